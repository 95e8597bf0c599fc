"""Optimizers, models, transforms and recorders that the conformance tests share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support.small_models import batch, model, unbudgeted
from training_client.lab.models import cross_entropy
from training_client.optimizers import OPTIMIZERS, PrivateOptimizer, make_optimizer
from training_client.plan import Plan
from training_client.private_step import Block, BlockwiseSum, Loss, Transform
from training_client.private_step.layers.model_checks import CheckedModel
from training_client.private_step.private_sum import NoisyBlock, NoisyMean
from training_client.private_step.rounded_gaussian import NoiseGrid

PAPER_VARIANT = (
    " as in the paper"  # after an optimizer's name: a box (with half axes), or own squares
)
BOXED = [
    (name + PAPER_VARIANT, state)
    for name, entry in OPTIMIZERS.items() if entry.paper_option == "box"
    for state in entry.states
]  # fmt: skip
DAMPED = [
    (name + PAPER_VARIANT, state)
    for name, entry in OPTIMIZERS.items() if entry.paper_option == "own_squares"
    for state in ("public", "raw")
]  # fmt: skip
STATES = [
    *((name, state) for name, entry in OPTIMIZERS.items() for state in entry.states),
    *BOXED,
    *DAMPED,
]
NOISY = [  # noise does not depend on the clipping: one case of each paper variant is enough
    (name, state)
    for name, state in STATES
    if not name.endswith(PAPER_VARIANT) or (name, state) in (BOXED[0], DAMPED[0])
]
PUBLIC = batch(64)
# The optimizer of PyTorch that each private one equals without noise and clipping
REFERENCES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "dp_sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "dp_adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "dp_adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "dp_rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05),
    "dp_adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adal": lambda p: torch.optim.RMSprop(p, lr=0.05, alpha=0.9, eps=0.0),
    "adadp": lambda p: torch.optim.RMSprop(p, lr=0.05, alpha=0.9, eps=0.0),
    "adan": lambda p: torch.optim.SGD(p, lr=0.05),
}


def build_optimizer(name: str, net: nn.Module, plan: Plan, **options: Any) -> PrivateOptimizer:
    """Build an optimizer by its name, with `PAPER_VARIANT` after it for the paper's variant."""
    known = name.removesuffix(PAPER_VARIANT)
    if known != name:
        boxed = {"box": True, "threshold": 0.0}
        options |= boxed if OPTIMIZERS[known].paper_option == "box" else {"own_squares": True}
    return make_optimizer(known, net, unbudgeted(plan), **{"public": PUBLIC} | options)


class SequenceMean(nn.Module):
    """A layer that takes the mean over a sequence."""

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        return examples.mean(1)


def images() -> tuple[nn.Module, torch.Tensor]:
    """Return a convolutional model and a batch of images."""
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1), nn.GroupNorm(3, 6), nn.Tanh(),
        nn.Conv2d(6, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 4),
    )  # fmt: skip
    return net.double(), torch.randn(8, 2, 6, 6, dtype=torch.float64)


def sequences() -> tuple[nn.Module, torch.Tensor]:
    """Return a model with an embedding, and a batch of token sequences."""
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Embedding(11, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 7),
        nn.Tanh(),
        SequenceMean(),
        nn.Linear(7, 4),
    )
    return net.double(), torch.randint(0, 11, (8, 6))


def frozen() -> tuple[nn.Module, torch.Tensor]:
    """Return a model with a frozen first layer, and a batch."""
    net = nn.Sequential(nn.Linear(6, 6).double(), nn.Tanh(), model())
    net[0].requires_grad_(False)
    return net, batch(8)[0]


NETS = {"rows": lambda: (model(), batch(8)[0]), "images": images, "sequences": sequences,
        "frozen": frozen}  # fmt: skip


def scaled_loss(size: float) -> Loss:
    """Return the cross entropy multiplied by a factor, to make gradients larger."""
    return lambda predictions, targets: size * cross_entropy(predictions, targets)


QUIET = Plan(dataset_size=64, sample_rate=0.5, clip_norm=1e9, noise_multiplier=1e-30)


class Recorder:
    """A record of every noisy mean that a run releases, one vector per step."""

    def __init__(self, optimizer: PrivateOptimizer) -> None:
        self.released: list[torch.Tensor] = []
        private_sum = optimizer.private_sum
        release, part = private_sum.release, private_sum._noisy_block

        def recorded(*of: Any) -> NoisyMean:
            """Start a new vector for a step's noisy mean, and release it."""
            self.released.append(optimizer.zeros())
            return release(*of)

        def noisy(
            total: BlockwiseSum, transform: Transform, block: Block, mean: torch.Tensor
        ) -> NoisyBlock:
            """Compute a noisy block, and copy it into the recorded vector."""
            found = part(total, transform, block, mean)
            block.view_in(self.released[-1]).copy_(found.mean)
            return found

        private_sum.release = recorded  # type: ignore[method-assign]
        # private: a block's noisy mean is not kept after the optimizer used it
        private_sum._noisy_block = noisy  # type: ignore[method-assign]


class Releases:
    """A record of the transform and the noise of each release of an optimizer."""

    def __init__(self, optimizer: PrivateOptimizer) -> None:
        self.transforms: list[Transform] = []
        self.means: list[NoisyMean] = []
        genuine = optimizer.private_sum.release

        def release(*of: Any) -> NoisyMean:
            self.transforms.append(of[3])
            self.means.append(genuine(*of))
            return self.means[-1]

        optimizer.private_sum.release = release  # type: ignore[method-assign]


def leaves(value: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """Return every tensor and number that can be reached from a value."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, bool | int | float | np.number | np.ndarray):
        return [torch.as_tensor(value, dtype=torch.float64)]
    seen = set() if seen is None else seen
    if id(value) in seen or callable(value):  # a module is called, too
        return []
    seen.add(id(value))
    return [leaf for each in children(value) for leaf in leaves(each, seen)]


def children(value: Any) -> list[Any]:
    """Return the values stored directly in a value: items, elements or attributes."""
    if isinstance(value, dict):
        if value and all(map(callable, value.values())):
            return []  # hooks, whose keys are counted in the process
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, CheckedModel):  # sizes of batches tell its proofs apart; no copy has them
        return list(value.__getstate__().values())
    if hasattr(value, "__dict__"):
        return list(vars(value).values())
    return [getattr(value, name) for name in getattr(value, "__slots__", ())]


PLAN = Plan(dataset_size=64, sample_rate=0.5, clip_norm=1.0, noise_multiplier=0.5)
OPTIONS: dict[str, dict[str, Any]] = {"adadp": {"threshold": 0.0}, "adan": {"threshold": 0.0}}


def without_noise(_: NoiseGrid, total: torch.Tensor, factor: float, __: bytes) -> None:
    """Take the place of `NoiseGrid.add_noise`: the sum is neither rounded nor hidden."""
    total.mul_(factor)
