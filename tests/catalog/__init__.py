"""The served models, their revisions and tokenizers."""
