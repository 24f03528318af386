"""The engine against plain Hugging Face, over every dimension that it has."""
