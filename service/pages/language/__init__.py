"""Pages of language models."""
