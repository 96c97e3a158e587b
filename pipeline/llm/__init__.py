"""Decoder language models: the same promise as for other models, with other candidates.

A candidate is a library with a format of the weights and of the KV cache. Its artifact is a folder.
The gate scores the user's texts, and the race times answers to prompts cut from them.
"""
