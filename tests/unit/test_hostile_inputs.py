"""Inputs made to exceed the clip norm: mixed magnitudes, denormals, equal tokens, bfloat16."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.accelerator_counts import no_cpu
from training_client.private_step import Clipper, Transform, clipper
from training_client.private_step.layers.layer_uses import EnginePath

DENORMAL, LARGE = -44.0, 18.0  # exponents of ten, from the smallest denormal numbers
LENGTHS = (1, 2, 3, 17, 300)
PATHS: tuple[EnginePath | None, ...] = (None, "gram", "product", "held")


def mixed(shape: tuple[int, ...], lowest: float, highest: float) -> torch.Tensor:
    """Return numbers of both signs whose exponents of ten are uniform."""
    exponents = torch.empty(shape, dtype=torch.float64).uniform_(lowest, highest)
    return (10**exponents * torch.randint(0, 2, shape).mul(2).sub(1)).float()


class Tied(nn.Module):
    """Predicts tokens with the table that it looks them up in."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.last.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.table(tokens))
        return found


class Own(nn.Module):
    """A layer with a parameter of its own, which is run again for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight


class InBfloat16(nn.Module):
    """Runs a layer under autocast."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found: torch.Tensor = self.layer(inputs)
        return found


class Outputs(nn.Module):
    """An LSTM without its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(5, 3, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(inputs)[0]
        return found


def numbers(width: int, largest: float = LARGE) -> Callable[[int], torch.Tensor]:
    """Return a function from a length to a sequence of rows; the second half may cancel."""

    def draw(length: int) -> torch.Tensor:
        lowest, highest = sorted(random.uniform(DENORMAL, largest) for _ in range(2))
        rows = mixed((1, length, width), lowest, highest)
        half = length // 2
        if random.random() < 0.3 and half:
            rows[:, half : 2 * half] = rows[:, :half] * (1 + 1e-6 * random.random())
        return rows

    return draw


def tokens(length: int) -> torch.Tensor:
    """Return a sequence of tokens, perhaps all equal."""
    return torch.randint(0, random.choice([1, 2, 7]), (1, length))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor], bool]] = {
    "linear": (lambda: nn.Linear(5, 3), numbers(5), True),
    "linear in bfloat16": (lambda: InBfloat16(nn.Linear(5, 3)), numbers(5), True),
    "tied": (Tied, tokens, True),
    "embedding": (lambda: nn.Embedding(7, 4), tokens, False),
    "embedding in bfloat16": (
        lambda: InBfloat16(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))), tokens, False,
    ),
    "bag": (lambda: nn.EmbeddingBag(7, 4, mode="sum"), tokens, False),
    "own parameter": (Own, numbers(5), False),
    "normalisation": (lambda: nn.LayerNorm(5), numbers(5, 12.0), False),
    "recurrent": (Outputs, numbers(5), False),
}  # fmt: skip


def random_transform(parameters: list[nn.Parameter], bound: float) -> Transform:
    """Return a ball, or one after a map of mixed magnitude; perhaps automatic."""
    transform = Transform(bound)
    if random.random() < 0.5:
        lowest, highest = random.choice([(-18.0, 18.0), (-3.0, 3.0), (0.0, 18.0), (-18.0, 0.0)])
        scales = [mixed(tuple(each.shape), lowest, highest).abs() for each in parameters]
        shifts = [mixed(tuple(each.shape), -30.0, 12.0) for each in parameters]
        transform = Transform.fixed(
            bound, scales, shifts if random.random() < 0.4 else None,
            damping=random.choice([0.0, 3.0]),
        )  # fmt: skip
    return transform.automatic(random.choice([1e-3, 1.0])) if random.random() < 0.2 else transform


def weighted_loss(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient in the outputs is the weights."""
    return (outputs.float() * weights).flatten(1).sum(1)


def share_of_bound(kind: str, *, plain: bool = False) -> float:
    """Return what one hostile example adds to a sum, relative to the clipping bound."""
    make, draw, has_paths = KINDS[kind]
    net, inputs = make(), draw(random.choice(LENGTHS))
    with torch.no_grad():
        shape = tuple(net(inputs).shape)
    weights = mixed(shape, random.choice([-44.0, -20.0, -6.0]), random.choice([0.0, 6.0, 15.0]))
    engine = Clipper(net, path=random.choice(PATHS) if has_paths else None)
    bound = random.choice([1e-6, 0.1, 1e3])
    transform = Transform(bound) if plain else random_transform(engine.parameters, bound)
    sums = engine.zeros()
    with torch.no_grad():
        found = engine.clip(inputs, weights, weighted_loss, transform)
        for block in engine.blocks:
            found.write_block(block, transform.for_block(block), block.view_in(sums))
    return float(sums.double().norm()) / transform.bound


def seeded(seed: int) -> None:
    """Seed both generators that the cases are drawn from."""
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.spread(first=1, second=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("seed", "cases"),
    [(0, 10), *(pytest.param(seed, 600, marks=pytest.mark.nightly) for seed in range(2, 7))],
)
def test_no_hostile_example_exceeds_the_bound(kind: str, seed: int, cases: int) -> None:
    seeded(seed)
    if kind == "recurrent":  # each is a proof of thousands of operations
        cases = min(cases, 60)
    shares = [share_of_bound(kind) for _ in range(cases)]
    assert all(math.isfinite(each) and each <= 1 for each in shares), max(shares)
    assert max(shares) > 0.99 or cases < 40  # most are clipped, so that the bound is tried


@pytest.mark.spread(second=4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("seed", "cases"),
    [(10, 15), *(pytest.param(seed, 600, marks=pytest.mark.nightly) for seed in range(11, 16))],
)
def test_no_hostile_example_exceeds_the_bound_on_an_accelerator(
    kind: str, seed: int, cases: int
) -> None:
    """Tensors say that they are not on a CPU."""
    with no_cpu():
        test_no_hostile_example_exceeds_the_bound(kind, seed, cases)


@pytest.mark.slow
def test_without_the_allowance_for_rounding_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest shares are less than the allowance below 1: an allowance of 0 is too small."""
    monkeypatch.setattr(clipper, "weight_rounding", lambda _: 0.0)
    seeded(0)
    shares: list[Any] = [share_of_bound("linear", plain=True) for _ in range(200)]
    assert max(shares) > 1
