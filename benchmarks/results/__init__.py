"""The experiments, storage and report of `benchmarks/training_results.py`."""
