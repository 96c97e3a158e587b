"""A folder for PYTHONPATH: Python imports its `sitecustomize` before the user's script."""
