"""Private optimizers: the papers' and those of PyTorch, behind one interface.

`base` makes a step; each family (`adadp`, `adadps`, `dp_opt`, `pda_dpmd`, `pigdo`,
`torch_optimizers`) says what is clipped and how the noisy mean changes the parameters;
`state_source` says which gradients an optimizer's state is made of; `registry` makes them by name.
`private_batches` draws and loads the batches of a training loop (`record_groups`: several examples
of a record, or all records of a person), and `share_budget` has several processes train together.
`fix` returns a copy of a model with layers that can be clipped.
"""

from training_client.optimizers.adadp import AdaDp
from training_client.optimizers.adadps import AdaDps, PublicPreconditioner
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.dp_opt import DpOpt
from training_client.optimizers.pda_dpmd import PdaDpMd
from training_client.optimizers.pigdo import PiGdo
from training_client.optimizers.private_batches import private_batches
from training_client.optimizers.record_groups import (
    AugmentedDataset,
    PerRecord,
    PersonDataset,
    mean_per_record,
    sum_per_record,
)
from training_client.optimizers.registry import OPTIMIZERS, make_optimizer
from training_client.optimizers.state_source import (
    PUBLIC_BATCH_SIZE,
    GradientEstimate,
    NoisySource,
    PublicSource,
    RawSource,
    StateSource,
    StepContext,
)
from training_client.optimizers.torch_optimizers import NoisyTorchOptimizer
from training_client.private_step.layers.model_fixes import fix
from training_client.private_step.processes.shared_budget import SharedBudget, share_budget

__all__ = [
    "OPTIMIZERS",
    "PUBLIC_BATCH_SIZE",
    "AdaDp",
    "AdaDps",
    "AugmentedDataset",
    "DpOpt",
    "GradientEstimate",
    "NoisySource",
    "NoisyTorchOptimizer",
    "PdaDpMd",
    "PerRecord",
    "PersonDataset",
    "PiGdo",
    "PrivateOptimizer",
    "PublicPreconditioner",
    "PublicSource",
    "RawSource",
    "SharedBudget",
    "StateSource",
    "StepContext",
    "fix",
    "make_optimizer",
    "mean_per_record",
    "private_batches",
    "share_budget",
    "sum_per_record",
]
