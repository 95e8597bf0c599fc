"""Random programs of tensor operations, which keep examples apart or mix them by chance."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

# Each step gets examples of shape (B, 4, 6) and returns as many values. Those that depend on a
# dimension, or on numbers, draw these once: a program is the same in every batch.
Step = Callable[[torch.Tensor], torch.Tensor]


def _axes() -> tuple[int, int, int]:
    return random.choice([(0, 1, 2), (0, 1, 2), (0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)])  # type: ignore[return-value]


def _along(name: str, function: Callable[[torch.Tensor, int], torch.Tensor]) -> tuple[str, Step]:
    """Return a step along a random dimension, mostly not that of the examples."""
    dim = random.choice([0, 1, 1, 2, 2, 2])
    return f"{name}({dim})", lambda x: x + 0.5 * function(x, dim)


def _positions(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.arange(x.shape[dim], dtype=x.dtype).view([-1 if d == dim else 1 for d in range(3)])


def _regrouped(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.cos()], 1).view(-1, 2, 4, 6).mean(1)


def _written(dim: int, at: int) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        found = x.clone()
        part = found.select(dim, min(at, x.shape[dim] - 1))
        part.mul_(0.5)
        return found

    return step


def _buffer(dim: int) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        found = x.new_zeros(x.shape)
        found.narrow(dim, 0, 2).copy_(
            x.narrow(dim, 1, 2) if x.shape[dim] > 2 else x.narrow(dim, 0, 2)
        )
        return x + found

    return step


def _transposed(axes: tuple[int, int, int], inner: Step) -> Step:
    back = [axes.index(d) for d in range(3)]
    return lambda x: inner(x.permute(axes)).permute(back)


def _steps() -> list[tuple[str, Step]]:
    """Return one drawing of each kind of step."""
    shift, at = random.choice([1, 2]), random.choice([0, 1])
    weight = torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6)
    return [
        ("tanh", torch.tanh),
        ("product with weights", lambda x: x @ weight),
        ("einsum", lambda x: torch.einsum("bik,bjk,bjl->bil", x, x, x) / 9),
        ("einsum over examples", lambda x: torch.einsum("bik,cik,cil->bil", x, x, x) / 9),
        ("layer norm", lambda x: functional.layer_norm(x, (6,))),
        ("layer norm of two", lambda x: functional.layer_norm(x, x.shape[1:])),
        ("group norm", lambda x: functional.group_norm(x, 2)),
        ("two batches", lambda x: torch.cat([x, x.cos()]).view(2, *x.shape).mean(0)),
        ("two batches, wrong", lambda x: torch.cat([x, x.cos()]).view(-1, 2, 4, 6).mean(1)),
        ("regrouped", _regrouped),
        ("flattened", lambda x: x.flatten(0, 1).cos().view(x.shape)),
        ("flattened softmax", lambda x: x.flatten(0, 1).softmax(1).view(x.shape)),
        ("flattened the other way", lambda x: x.transpose(0, 1).reshape(x.shape)),
        ("own row", lambda x: x * x[torch.arange(len(x)), x.detach()[:, :, 0].argmax(1)][:, None]),
        ("row by place", lambda x: x * x[torch.arange(len(x)), torch.arange(len(x)) % 4][:, None]),
        ("gather", lambda x: x + x.gather(2, x.detach().argmax(2, keepdim=True))),
        ("mask", lambda x: x.masked_fill(x > 0.5, 0.1)),
        ("where", lambda x: torch.where(x > 0, x, 0.1 * x)),
        ("number", lambda x: x * (1 + 1 / len(x)) if random.random() < 2 else x),
        ("repeat", lambda x: x.repeat(1, 2, 1)[:, ::2]),
        ("repeat of examples", lambda x: x.repeat(2, 1, 1)[len(x) :]),
        ("attention", lambda x: functional.scaled_dot_product_attention(*[x[:, None]] * 3)[:, 0]),
        ("attention over examples",
         lambda x: functional.scaled_dot_product_attention(*[x.transpose(0, 1)[None]] * 3)[0]
         .transpose(0, 1)),
        ("batch norm", lambda x: functional.batch_norm(x, None, None, training=True)),
        ("convolution", lambda x: functional.conv1d(x, weight[:4, :4, None].contiguous())),
        _along("softmax", lambda x, d: x.softmax(d)),
        _along("mean", lambda x, d: x.mean(d, keepdim=True)),
        _along("amax", lambda x, d: x.amax(d, keepdim=True)),
        _along("cumsum", lambda x, d: x.cumsum(d)),
        _along("flip", lambda x, d: x.flip(d)),
        _along("roll", lambda x, d: x.roll(shift, d)),
        _along("sort", lambda x, d: x.sort(d).values),
        _along("first", lambda x, d: x.narrow(d, at, 1)),
        _along("position", _positions),
        _along("stack", lambda x, d: torch.stack([x, x.sin()], d).mean(d)),
        _along("halves", lambda x, d: torch.cat([x, x.sin()], d).narrow(d, 0, x.shape[d])),
        _along("part", lambda x, d: torch.cat([x, x.sin()], d).narrow(d, 1, x.shape[d])),
        _along("index", lambda x, d: x.index_select(d, torch.tensor([at]))),
        ("write", _written(random.choice([0, 1, 2]), at)),
        ("buffer", _buffer(random.choice([1, 2]))),
    ]  # fmt: skip


_LONGEST: Final = 5


@dataclass(frozen=True)
class Program:
    """Steps one after another, each in an order of the dimensions, and then a sum.

    Attributes:
        steps: names and functions.
    """

    steps: tuple[tuple[str, Step], ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return one value for each example, if the program keeps them apart."""
        for _, step in self.steps:
            x = step(x)
        return x.tanh().sum((1, 2))

    def __str__(self) -> str:
        return ", ".join(name for name, _ in self.steps)


def random_program() -> Program:
    """Draw a program."""
    steps = []
    for _ in range(random.randint(1, _LONGEST)):
        name, step = random.choice(_steps())
        axes = _axes()
        is_plain = axes == (0, 1, 2)
        steps.append((name, step) if is_plain else (f"{name} in {axes}", _transposed(axes, step)))
    return Program(tuple(steps))
