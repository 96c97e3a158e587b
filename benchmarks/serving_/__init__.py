"""What `serving.py` and `soak.py` are made of: a cheap client, the servers that take turns, and the
models they serve.
"""
