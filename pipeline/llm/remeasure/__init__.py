"""A delivered language model scored and timed again, for `crucible validate` and `crucible bench`.

Scores and times never come from the store.
"""
