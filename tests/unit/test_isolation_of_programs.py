"""Operations of public programs that keep examples apart, and similar ones that mix them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.clipped_sums import clipped_rows
from tests.support.small_models import Uses
from training_client.errors import UnsupportedModelError
from training_client.lab.models import cross_entropy
from training_client.private_step import Transform
from training_client.testing import clipped_sum

SIZE = 7
Use = Callable[[Any, torch.Tensor], torch.Tensor]
TABLE = torch.linspace(0.5, 1.5, 9, dtype=torch.float64)
MATRIX = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double().tril() + torch.eye(
    5
)


def net(use: Use) -> nn.Module:
    """Return a model of two layers, with `use` between them."""
    torch.manual_seed(0)
    return Uses(
        lambda m, x: m.last(use(m, m.first(x).tanh())), first=nn.Linear(5, 5), last=nn.Linear(5, 3)
    ).double()


def rows(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SIZE, *shape, 5, generator=generator, dtype=torch.float64)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).double()


def whole_values(x: torch.Tensor) -> torch.Tensor:
    return (4 * x.detach().abs()).long().clamp(max=8)


def scaled_unless_all_are_small(_: Any, x: torch.Tensor) -> torch.Tensor:
    mask = x.abs() < 0.5
    return x if mask.sum() == mask.numel() else x * torch.where(mask, 1.0, 0.5)


APART: dict[str, Use] = {
    "choices from a shared table": lambda _, x: x * TABLE.gather(0, whole_values(x)[:, 0])[:, None],
    "a triangular system, examples as columns": lambda _, x: torch.linalg.solve_triangular(
        MATRIX, x.T, upper=False
    ).T,
    "whether a mask is full": scaled_unless_all_are_small,
}  # fmt: skip

DRAWN: dict[str, Use] = {
    "draws in a layer": lambda m, x: x + m.first(torch.randn(len(x), 5, dtype=x.dtype)),
    "draws between shared limits": lambda _, x: x * (
        torch.linspace(0, 1, 5) + torch.rand(len(x), 5) * torch.linspace(1, 2, 5)
    ),
    "a time of each": lambda _, x: x * TABLE[torch.randint(9, (len(x),))][:, None],
    "three draws for all": lambda _, x: (x @ normal(5, 3)) @ normal(3, 5),
    "three draws for all, first": lambda _, x: x @ normal(3, 5).T @ normal(3, 5),
}  # fmt: skip

MIXED: dict[str, Use] = {
    "an order of the examples": lambda _, x: x[torch.rand(len(x)).argsort()],
    "partners": lambda _, x: x + x[torch.randint(len(x), (len(x),))],
    "weights of the batch": lambda _, x: (x + x.sum(0)) * torch.rand(len(x)).softmax(0)[:, None],
    "a product with draws": lambda _, x: normal(len(x), len(x)) @ x,
    "draws that depend on a mean": lambda _, x: x + torch.rand(len(x), 1) * x.mean(0),
    "how many values are large": lambda _, x: x * (x > 0).sum(),
    "whether so many are large": lambda _, x: x if (x > 0).sum() == 3 else 2 * x,
    "choices from a table of examples": lambda _, x: (
        x * x[:, 0].gather(0, whole_values(x)[:, 0] % 2)[:, None]
    ),
    "a triangular system of examples": lambda _, x: torch.linalg.solve_triangular(
        (x.T @ x).tril(), x.T, upper=False
    ).T,
    "the last position of another": lambda _, x: x[torch.arange(len(x)).flip(0)],
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_what_keeps_examples_apart_is_proved_and_right(name: str) -> None:
    labels = torch.arange(SIZE) % 3
    found = clipped_sum(net(APART[name]), rows(), labels, cross_entropy, 0.3)
    expected = clipped_rows(net(APART[name]), Transform(0.3), rows(), labels, cross_entropy).sum(0)
    torch.testing.assert_close(torch.cat([each.flatten() for each in found]), expected)


def test_the_last_position_of_each_example_is_chosen() -> None:
    ends = torch.tensor([3, 0, 2, 3, 1, 0, 2])
    labels, inputs = torch.arange(SIZE) % 3, {"x": rows(4), "ends": ends}

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            found = self.first(x).tanh()
            return self.last(found[torch.arange(len(x)), ends])  # type: ignore[no-any-return]

    found = clipped_sum(Last().double(), inputs, labels, cross_entropy, 0.3)
    expected = clipped_rows(Last().double(), Transform(0.3), inputs, labels, cross_entropy).sum(0)
    torch.testing.assert_close(torch.cat([each.flatten() for each in found]), expected)


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_of_each_example_may_pass_through_anything(name: str) -> None:
    assert clipped_sum(net(DRAWN[name]), rows(), torch.arange(SIZE) % 3, cross_entropy, 0.3)


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_examples_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="depend on other examples"):
        clipped_sum(net(MIXED[name]), rows(), torch.arange(SIZE) % 3, cross_entropy, 0.3)
