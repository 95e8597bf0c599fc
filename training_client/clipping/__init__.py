"""Sums of clipped per-example gradients, most of them without the per-example gradients."""

from training_client.clipping.blocks import Block
from training_client.clipping.clipper import Clipper
from training_client.clipping.passes import Loss
from training_client.clipping.transform import Transform

__all__ = ["Block", "Clipper", "Loss", "Transform"]
