"""A thin PyTorch client: asks the accounting service before and during private training."""
