"""One module per stage. A stage's functions run in a child, write under `out` if they make files,
and know nothing of caches or of other stages.
"""
