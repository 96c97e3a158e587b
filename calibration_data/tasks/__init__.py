"""Small models with data, one for each metric: see make_tasks.py."""
