"""The engine: vLLM with steering hooks. Only this package imports vllm."""
