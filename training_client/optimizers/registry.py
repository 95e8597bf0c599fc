"""Every optimizer by its name, as the command line, the benchmarks and the tests make it."""

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
from training_client.optimizers.after_noise import AfterNoise
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.pigdo import PiGdo, Rule
from training_client.optimizers.source import PUBLIC_BATCH_SIZE, Noisy, Public, Raw, Source

Make = Callable[..., PrivateOptimizer]


@dataclass(frozen=True, slots=True)
class Entry:
    """An optimizer that can be asked for by name.

    Attributes:
        make: called with model, allowance, learning_rate, and options.
        title: what it does.
        source: where it comes from.
        learning_rate: a start for MNIST.
        states: where its state may come from; the first is the default.
        printed: the option that takes what is printed to the letter where the default does not,
            and goes through every example's gradient for it.
    """

    make: Make
    title: str
    source: str
    learning_rate: float
    states: tuple[str, ...] = ("privatised",)
    printed: Literal["box", "own_squares"] | None = None


def _after(optimizer: Callable[..., torch.optim.Optimizer]) -> Make:
    def make(
        model: nn.Module, allowance: Allowance, *, learning_rate: float, **options: Any
    ) -> AfterNoise:
        ordinary = {name: options.pop(name) for name in ("momentum",) if name in options}
        return AfterNoise(
            model, allowance, partial(optimizer, lr=learning_rate, **ordinary), **options
        )

    return make


def _pi(rule: Rule, title: str) -> Entry:
    def make(model: nn.Module, allowance: Allowance, **options: Any) -> PiGdo:
        return PiGdo(model, allowance, rule, **options)

    return Entry(make, title, "papers/001", 3.0, _ANY, "own_squares")


_ADAM: Final = partial(torch.optim.Adam, fused=True)  # in one pass, without temporary tensors
_ANY: Final = ("privatised", "public", "raw")
OPTIMIZERS: Final[dict[str, Entry]] = {
    "dp_sgd": Entry(_after(torch.optim.SGD), "SGD on the noisy gradient", "papers/002", 0.5),
    "dp_adam": Entry(_after(_ADAM), "Adam on the noisy gradient", "papers/004", 1e-3),
    "dp_rmsprop": Entry(
        _after(torch.optim.RMSprop), "RMSprop on the noisy gradient", "papers/004", 1e-3
    ),
    "dp_adagrad": Entry(
        _after(torch.optim.Adagrad), "Adagrad on the noisy gradient", "papers/004", 1e-2
    ),
    "adadp": Entry(
        AdaDp, "noise and steps by the size of gradients", "papers/000", 2e-3, _ANY, "box"
    ),
    "adal": Entry(
        partial(AdaDp, adaptive_noise=False), "AdaDP's steps alone", "papers/000", 2e-3
    ),
    "adan": Entry(
        partial(AdaDp, adaptive_rate=False), "AdaDP's noise alone", "papers/000", 3.0, _ANY, "box"
    ),
    "pi_adam": _pi("adam", "Adam's rule before the clip"),
    "pi_rmsprop": _pi("rmsprop", "RMSprop's rule before the clip"),
    "pi_adagrad": _pi("adagrad", "Adagrad's rule before the clip"),
    "adadps": Entry(
        AdaDps, "gradients over a public statistic, then the clip", "papers/004", 3.0,
        ("public", "privatised"),
    ),
    "dp_r_pub": Entry(
        PublicPreconditioner, "the noisy gradient over a public statistic", "papers/004", 0.01,
        ("public",),
    ),
    "dp_adam_pub": Entry(
        partial(PublicPreconditioner, first=0.9), "the same with momentum", "papers/004", 0.01,
        ("public",),
    ),
}  # fmt: skip


def source_of(
    state: str,
    public: tuple[torch.Tensor, torch.Tensor] | None = None,
    public_batch_size: int = PUBLIC_BATCH_SIZE,
) -> Source:
    """A source by its name.

    Args:
        state: privatised, public or raw.
        public: examples and targets, for public.
        public_batch_size: of them, a step.
    """
    if state == "public":
        if public is None:
            raise ValueError("public state needs public data")
        return Public(*public, public_batch_size)
    return Raw() if state == "raw" else Noisy()


def make_optimizer(
    name: str,
    model: nn.Module,
    allowance: Allowance,
    *,
    learning_rate: float | None = None,
    state: str | None = None,
    public: tuple[torch.Tensor, torch.Tensor] | None = None,
    public_batch_size: int = PUBLIC_BATCH_SIZE,
    **options: Any,
) -> PrivateOptimizer:
    """An optimizer by its name.

    Args:
        name: of `OPTIMIZERS`.
        model: the model to train.
        allowance: allows each step, and says by its plan what a step does and costs.
        learning_rate: the entry's own by default.
        state: where its state comes from; the entry's first by default.
        public: examples and targets, if that is public.
        public_batch_size: of them, a step.
        options: of the optimizer.

    Raises:
        ValueError: there is no such optimizer, or it has no such state; the message names those
            there are.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"there is no optimizer {name!r}; there are {', '.join(OPTIMIZERS)}")
    entry = OPTIMIZERS[name]
    state = state or entry.states[0]
    if state not in entry.states:
        raise ValueError(f"{name} has no state {state!r}; it has {', '.join(entry.states)}")
    return entry.make(
        model,
        allowance,
        learning_rate=entry.learning_rate if learning_rate is None else learning_rate,
        source=source_of(state, public, public_batch_size),
        **options,
    )
