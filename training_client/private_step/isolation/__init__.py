"""Proof that model and loss keep the examples of a batch apart, by following each operation."""
