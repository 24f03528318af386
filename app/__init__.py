"""The service: API, domain and reconciler. No torch, no vLLM: it starts in a second or two."""
