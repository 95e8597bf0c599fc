"""What `benchmarks/training_results.py` is made of."""
