"""The papers' optimizers, one protocol."""

from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.dp_sgd import DpSgd

__all__ = ["DpSgd", "PrivateOptimizer"]
