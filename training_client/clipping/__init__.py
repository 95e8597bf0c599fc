"""Sums of clipped per-example gradients, without the per-example gradients."""

from training_client.clipping.linear import LinearClipper, Loss
from training_client.clipping.transform import Transform

__all__ = ["LinearClipper", "Loss", "Transform"]
