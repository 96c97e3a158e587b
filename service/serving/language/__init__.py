"""Deployed language models: their queue, their worker, and the text of their answers."""
