"""The papers' optimizers, one protocol."""

from training_client.optimizers.adadp import AdaDp
from training_client.optimizers.adadps import AdaDps, PublicPreconditioner
from training_client.optimizers.after_noise import AfterNoise
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.pigdo import PiGdo
from training_client.optimizers.registry import OPTIMIZERS, make_optimizer
from training_client.optimizers.source import (
    PUBLIC_BATCH_SIZE,
    Gradients,
    Noisy,
    Public,
    Raw,
    Source,
    Step,
)

__all__ = [
    "OPTIMIZERS",
    "PUBLIC_BATCH_SIZE",
    "AdaDp",
    "AdaDps",
    "AfterNoise",
    "Gradients",
    "Noisy",
    "PiGdo",
    "PrivateOptimizer",
    "Public",
    "PublicPreconditioner",
    "Raw",
    "Source",
    "Step",
    "make_optimizer",
]
