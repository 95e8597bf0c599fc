"""The registry of optimizers by name, for the command line, benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.optimizers.adadp import AdaDp
from training_client.optimizers.adadps import AdaDps, PublicPreconditioner
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.pigdo import PiGdo, Rule
from training_client.optimizers.state_source import (
    PUBLIC_BATCH_SIZE,
    NoisySource,
    PublicSource,
    RawSource,
    StateSource,
)
from training_client.optimizers.torch_optimizers import NoisyTorchOptimizer
from training_client.private_step.batches import Examples

MakeOptimizer = Callable[..., PrivateOptimizer]


@dataclass(frozen=True, slots=True)
class RegisteredOptimizer:
    """An optimizer's constructor, default options and description.

    Attributes:
        make: called with model, allowance, learning_rate, and options.
        title: what it does, in a few words.
        source: the paper that it is from.
        learning_rate: a first learning rate for MNIST; the default.
        states: the sources that its state may be made of; the first is the default.
        paper_option: the option that follows the paper exactly where the default does not; it
            computes every coordinate of every example's gradient.
    """

    make: MakeOptimizer
    title: str
    source: str
    learning_rate: float
    states: tuple[str, ...] = ("privatised",)
    paper_option: Literal["box", "own_squares"] | None = None


def _register_torch(
    optimizer: Callable[..., torch.optim.Optimizer], title: str, source: str, rate: float
) -> RegisteredOptimizer:
    """Return the registry entry for a PyTorch optimizer on noisy gradients."""

    def make(
        model: nn.Module, allowance: Allowance, *, learning_rate: float, **options: Any
    ) -> NoisyTorchOptimizer:
        """Return a private optimizer that feeds noisy gradients to the PyTorch optimizer."""
        torch_options = {name: options.pop(name) for name in ("momentum",) if name in options}
        return NoisyTorchOptimizer(
            model, allowance, partial(optimizer, lr=learning_rate, **torch_options), **options
        )

    return RegisteredOptimizer(make, title, source, rate)


def _make_adam(parameters: list[nn.Parameter], **options: Any) -> torch.optim.Adam:
    """Return Adam; it updates in one pass, without temporary tensors, where PyTorch can.

    PyTorch cannot if some parameters are sharded among processes and others are not.
    """
    are_alike = len({hasattr(each, "full_tensor") for each in parameters}) == 1
    return torch.optim.Adam(parameters, fused=are_alike, **options)


def _register_pigdo(rule: Rule, title: str) -> RegisteredOptimizer:
    """Return the registry entry for PIGDO with one of its adaptive rules."""

    def make(model: nn.Module, allowance: Allowance, **options: Any) -> PiGdo:
        """Return a PIGDO optimizer with the rule."""
        return PiGdo(model, allowance, rule, **options)

    return RegisteredOptimizer(make, title, "papers/001", 3.0, _ALL_STATES, "own_squares")


_ALL_STATES: Final = ("privatised", "public", "raw")
OPTIMIZERS: Final[dict[str, RegisteredOptimizer]] = {
    "dp_sgd": _register_torch(torch.optim.SGD, "SGD on the noisy gradient", "papers/002", 0.5),
    "dp_adam": _register_torch(_make_adam, "Adam on the noisy gradient", "papers/004", 1e-3),
    "dp_rmsprop": _register_torch(
        torch.optim.RMSprop, "RMSprop on the noisy gradient", "papers/004", 1e-3
    ),
    "dp_adagrad": _register_torch(
        torch.optim.Adagrad, "Adagrad on the noisy gradient", "papers/004", 1e-2
    ),
    "adadp": RegisteredOptimizer(
        AdaDp, "noise and steps adapted to past gradients", "papers/000", 2e-3, _ALL_STATES, "box"
    ),
    "adal": RegisteredOptimizer(
        partial(AdaDp, adaptive_noise=False), "AdaDP's adaptive steps only", "papers/000", 2e-3
    ),
    "adan": RegisteredOptimizer(
        partial(AdaDp, adaptive_rate=False), "AdaDP's adaptive noise only", "papers/000", 3.0,
        _ALL_STATES, "box",
    ),
    "pi_adam": _register_pigdo("adam", "Adam's rule on each example, then clipped"),
    "pi_rmsprop": _register_pigdo("rmsprop", "RMSprop's rule on each example, then clipped"),
    "pi_adagrad": _register_pigdo("adagrad", "Adagrad's rule on each example, then clipped"),
    "adadps": RegisteredOptimizer(
        AdaDps, "gradients divided by a public statistic, then clipped", "papers/004", 3.0,
        ("public", "privatised"),
    ),
    "dp_r_pub": RegisteredOptimizer(
        PublicPreconditioner, "noisy gradient divided by a public statistic", "papers/004", 0.01,
        ("public",),
    ),
    "dp_adam_pub": RegisteredOptimizer(
        partial(PublicPreconditioner, first=0.9), "dp_r_pub with momentum", "papers/004", 0.01,
        ("public",),
    ),
}  # fmt: skip


def make_source(
    state: str,
    public: tuple[Examples, torch.Tensor] | None = None,
    public_batch_size: int = PUBLIC_BATCH_SIZE,
) -> StateSource:
    """Return the named source of the gradients from which an optimizer updates its state.

    Args:
        state: privatised, public or raw.
        public: public examples and targets, for public.
        public_batch_size: public examples per step.

    Raises:
        ValueError: public state without public data.
    """
    if state == "public":
        if public is None:
            raise ValueError("state 'public' needs public data: pass public=(examples, targets)")
        return PublicSource(*public, public_batch_size)
    return RawSource() if state == "raw" else NoisySource()


def make_optimizer(
    name: str,
    model: nn.Module,
    allowance: Allowance,
    *,
    learning_rate: float | None = None,
    state: str | None = None,
    public: tuple[Examples, torch.Tensor] | None = None,
    public_batch_size: int = PUBLIC_BATCH_SIZE,
    **options: Any,
) -> PrivateOptimizer:
    """Make the private optimizer of this name for a model and a budget.

    Args:
        name: one of `OPTIMIZERS`.
        model: the model to train.
        allowance: the budget that covers the steps; its plan says what a step does and costs.
        learning_rate: the registered one by default.
        state: what its state is made of: privatised, public or raw; the registered default if None.
        public: public examples and targets, for state public.
        public_batch_size: public examples per step.
        options: of the optimizer.

    Raises:
        ValueError: unknown optimizer or state; the message lists those that exist.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: use one of {', '.join(OPTIMIZERS)}")
    entry = OPTIMIZERS[name]
    state = state or entry.states[0]
    if state not in entry.states:
        raise ValueError(f"{name} has no state {state!r}: use one of {', '.join(entry.states)}")
    return entry.make(
        model,
        allowance,
        learning_rate=entry.learning_rate if learning_rate is None else learning_rate,
        source=make_source(state, public, public_batch_size),
        **options,
    )
