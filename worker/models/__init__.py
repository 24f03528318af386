"""Getting weights onto this machine: fetch, convert to safetensors, list in models.toml."""
