"""The registry of optimizers by name, for the command line, benchmarks and tests."""

from __future__ import annotations

import inspect
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
from training_client.optimizers.dp_opt import DpOpt
from training_client.optimizers.pda_dpmd import PdaDpMd
from training_client.optimizers.pigdo import PiGdo, Rule
from training_client.optimizers.state_source import (
    PUBLIC_BATCH_SIZE,
    NoisySource,
    PublicSource,
    RawSource,
    StateSource,
)
from training_client.optimizers.torch_optimizers import NoisyTorchOptimizer
from training_client.private_step.batches import Examples, Targets

MakeOptimizer = Callable[..., PrivateOptimizer]


@dataclass(frozen=True, slots=True)
class RegisteredOptimizer:
    """An optimizer's constructor, default options and description.

    Attributes:
        make: called with model, allowance, learning_rate, and options.
        title: what it does, in a few words.
        source: the paper that it is from.
        learning_rate: a first learning rate for MNIST; the default.
        options: the names of its own options, beside those of every `PrivateOptimizer`.
        states: the sources that its state may be made of; the first is the default.
        paper_option: the option that follows the paper exactly where the default does not; it
            computes every coordinate of every example's gradient.
    """

    make: MakeOptimizer
    title: str
    source: str
    learning_rate: float
    options: frozenset[str]
    states: tuple[str, ...] = ("privatised",)
    paper_option: Literal["box", "own_squares"] | None = None


def _options_of(make: Callable[..., object]) -> frozenset[str]:
    """Return the names of an optimizer's own options that have a default."""
    return frozenset(
        each.name
        for each in inspect.signature(make).parameters.values()
        if each.kind == each.KEYWORD_ONLY and each.default is not each.empty
    )


def _register(
    make: MakeOptimizer, title: str, source: str, rate: float, *more: Any
) -> RegisteredOptimizer:
    """Return the registry entry for an optimizer of this package."""
    return RegisteredOptimizer(make, title, source, rate, _options_of(make), *more)


def _register_torch(
    optimizer: Callable[..., torch.optim.Optimizer],
    title: str,
    source: str,
    rate: float,
    own_options: str,
) -> RegisteredOptimizer:
    """Return the registry entry for a PyTorch optimizer on noisy gradients."""
    names = frozenset(own_options.split())

    def make(
        model: nn.Module, allowance: Allowance, *, learning_rate: float, **options: Any
    ) -> NoisyTorchOptimizer:
        """Return a private optimizer that feeds noisy gradients to the PyTorch optimizer."""
        torch_options = {name: options.pop(name) for name in names & options.keys()}
        return NoisyTorchOptimizer(
            model, allowance, partial(optimizer, lr=learning_rate, **torch_options), **options
        )

    return RegisteredOptimizer(make, title, source, rate, names)


def _make_fused(
    optimizer: Callable[..., torch.optim.Optimizer],
    parameters: list[nn.Parameter],
    **options: Any,
) -> torch.optim.Optimizer:
    """Return Adam or AdamW; it updates in one pass, without temporary tensors, where PyTorch can.

    PyTorch cannot if some parameters are sharded among processes and others are not.
    """
    are_alike = len({hasattr(each, "full_tensor") for each in parameters}) == 1
    return optimizer(parameters, fused=are_alike, **options)


def _register_pigdo(rule: Rule, title: str) -> RegisteredOptimizer:
    """Return the registry entry for PIGDO with one of its adaptive rules."""

    def make(model: nn.Module, allowance: Allowance, **options: Any) -> PiGdo:
        """Return a PIGDO optimizer with the rule."""
        return PiGdo(model, allowance, rule, **options)

    options = _options_of(PiGdo)
    return RegisteredOptimizer(make, title, "papers/001", 3.0, options, _ALL_STATES, "own_squares")


_ADAM_OPTIONS: Final = "betas eps weight_decay amsgrad"
_ALL_STATES: Final = ("privatised", "public", "raw")
OPTIMIZERS: Final[dict[str, RegisteredOptimizer]] = {
    "dp_sgd": _register_torch(
        torch.optim.SGD, "SGD on the noisy gradient", "papers/002", 0.5,
        "momentum dampening weight_decay nesterov",
    ),
    "dp_adam": _register_torch(
        partial(_make_fused, torch.optim.Adam), "Adam on the noisy gradient", "papers/004", 1e-3,
        _ADAM_OPTIONS,
    ),
    "dp_adamw": _register_torch(
        partial(_make_fused, torch.optim.AdamW), "AdamW on the noisy gradient", "arXiv 1711.05101",
        1e-3, _ADAM_OPTIONS,
    ),
    "dp_rmsprop": _register_torch(
        torch.optim.RMSprop, "RMSprop on the noisy gradient", "papers/004", 1e-3,
        "alpha eps weight_decay momentum centered",
    ),
    "dp_adagrad": _register_torch(
        torch.optim.Adagrad, "Adagrad on the noisy gradient", "papers/004", 1e-2,
        "lr_decay weight_decay initial_accumulator_value eps",
    ),
    "adadp": _register(
        AdaDp, "noise and steps adapted to past gradients", "papers/000", 2e-3, _ALL_STATES, "box"
    ),
    "adal": _register(
        partial(AdaDp, adaptive_noise=False), "AdaDP's adaptive steps only", "papers/000", 2e-3
    ),
    "adan": _register(
        partial(AdaDp, adaptive_rate=False), "AdaDP's adaptive noise only", "papers/000", 3.0,
        _ALL_STATES, "box",
    ),
    "pi_adam": _register_pigdo("adam", "Adam's rule on each example, then clipped"),
    "pi_rmsprop": _register_pigdo("rmsprop", "RMSprop's rule on each example, then clipped"),
    "pi_adagrad": _register_pigdo("adagrad", "Adagrad's rule on each example, then clipped"),
    "adadps": _register(
        AdaDps, "gradients divided by a public statistic, then clipped", "papers/004", 3.0,
        ("public", "privatised"),
    ),
    "dp_r_pub": _register(
        PublicPreconditioner, "noisy gradient divided by a public statistic", "papers/004", 0.01,
        ("public",),
    ),
    "dp_adam_pub": _register(
        partial(PublicPreconditioner, first=0.9), "dp_r_pub with momentum", "papers/004", 0.01,
        ("public",),
    ),
    "dp_opt": _register(
        DpOpt, "noise shaped by its effect on the loss", "papers/000 [13]", 0.5, _ALL_STATES
    ),
    "pda_dpmd": _register(
        PdaDpMd, "noisy gradient mixed with a public one", "arXiv 2112.00193", 0.5, ("public",)
    ),
}  # fmt: skip


def make_source(
    state: str,
    public: tuple[Examples, Targets] | None = None,
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
    public: tuple[Examples, Targets] | None = None,
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
        options: of every `PrivateOptimizer`, such as `physical_batch_size`, and of this one: for
            PyTorch's own optimizers their usual ones, such as `betas` and `weight_decay`.

    Raises:
        ValueError: unknown optimizer, state or option; the message lists those that exist.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: use one of {', '.join(OPTIMIZERS)}")
    entry = OPTIMIZERS[name]
    state = state or entry.states[0]
    if state not in entry.states:
        raise ValueError(f"{name} has no state {state!r}: use one of {', '.join(entry.states)}")
    known = entry.options | _options_of(PrivateOptimizer) - {"source"}
    if unknown := options.keys() - known:
        raise ValueError(
            f"{name} has no option {', '.join(sorted(unknown))}: use some of "
            f"{', '.join(sorted(known))}, besides learning_rate, state, public and "
            "public_batch_size"
        )
    return entry.make(
        model,
        allowance,
        learning_rate=entry.learning_rate if learning_rate is None else learning_rate,
        source=make_source(state, public, public_batch_size),
        **options,
    )
