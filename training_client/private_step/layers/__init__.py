"""Runs of a model: layers that can be clipped, records of their uses, and proofs of isolation."""
