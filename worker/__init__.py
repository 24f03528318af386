"""The Celery worker: lease a shard, run it through vLLM, publish its part, settle its Holds."""
