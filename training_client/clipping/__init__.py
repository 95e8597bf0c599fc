"""Sums of clipped per-example gradients, most of them without the per-example gradients."""

from training_client.clipping.blocks import Block, joined
from training_client.clipping.clipped_sum import Added, ClippedSum, Sum
from training_client.clipping.clipper import Clipper
from training_client.clipping.passes import Loss
from training_client.clipping.transform import Affine, Transform

__all__ = [
    "Added",
    "Affine",
    "Block",
    "ClippedSum",
    "Clipper",
    "Loss",
    "Sum",
    "Transform",
    "joined",
]
