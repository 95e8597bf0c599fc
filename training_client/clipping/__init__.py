"""Sums of clipped per-example gradients, without the per-example gradients."""

from training_client.clipping.linear import LinearClipper

__all__ = ["LinearClipper"]
