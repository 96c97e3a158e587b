"""What `benchmarks/gpu_models.py` is made of."""
