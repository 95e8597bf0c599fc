"""Norms of every form of per-example gradients, as an accelerator computes them: upper bounds.

Tensors say that they are not on a CPU. Exact norms are computed with fractions.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch

from training_client.private_step.blocks import Piece
from training_client.private_step.gradients import token_gradients
from training_client.private_step.gradients.example_gradients import (
    MaterializedGradients,
    OuterProducts,
)
from training_client.private_step.gradients.sequence_products import SequenceProducts
from training_client.private_step.gradients.summed_gradients import SummedGradients
from training_client.private_step.gradients.token_gradients import TokenGradients
from training_client.private_step.kernels.elementwise import AffineMap
from training_client.private_step.kernels.row_sums import mapped_squared_norms

pytestmark = pytest.mark.usefixtures("no_cpu_anywhere")
ROWS, COLUMNS, EXAMPLES, POSITIONS = 5, 4, 3, 6
BOUND = 0.1
FORMS = ["outer", "held", "product", "gram", "tokens", "summed"]
Exact = list[list[Fraction]]


def drawn(*shape: int, spread: float) -> torch.Tensor:
    """Return numbers of both signs; their exponents of ten are uniform, from −spread to spread."""
    if spread == 0:
        return torch.randn(shape)
    exponents = torch.empty(shape, dtype=torch.float64).uniform_(-spread, spread)
    return (10**exponents * torch.randint(0, 2, shape).mul(2).sub(1)).float()


def fractions(tensor: torch.Tensor) -> Any:
    """Return a tensor's values as nested lists of fractions."""
    return [fractions(each) for each in tensor] if tensor.dim() else Fraction(float(tensor))


def sums_of_products(gradients: torch.Tensor, inputs: torch.Tensor) -> list[Exact]:
    """Return Σₜ gₜaₜᵀ of each example."""
    pairs = zip(fractions(gradients), fractions(inputs), strict=True)
    return [
        [[sum(g[o] * a[i] for g, a in zip(gs, inputs, strict=True)) for i in range(COLUMNS)]
         for o in range(ROWS)]
        for gs, inputs in pairs
    ]  # fmt: skip


def make(form: str, spread: float) -> tuple[Any, list[Exact]]:
    """Return per-example gradients of a form, and their exact values."""
    held = drawn(EXAMPLES, ROWS, COLUMNS, spread=spread)
    gradients = drawn(EXAMPLES, POSITIONS, ROWS, spread=spread)
    inputs = drawn(EXAMPLES, POSITIONS, COLUMNS, spread=spread)
    if form == "outer":
        exact = sums_of_products(gradients[:, :1], inputs[:, :1])
        return OuterProducts(gradients[:, 0], inputs[:, 0]), exact
    if form == "held":
        return MaterializedGradients(held), fractions(held)
    if form == "summed":
        exact = [
            [[x + y for x, y in zip(*rows, strict=True)] for rows in zip(*pair, strict=True)]
            for pair in zip(sums_of_products(gradients, inputs), fractions(held), strict=True)
        ]
        parts = SequenceProducts(gradients, inputs), MaterializedGradients(held)
        return SummedGradients(parts), exact
    if form == "tokens":
        tokens = torch.randint(0, ROWS, (EXAMPLES, POSITIONS))
        found = TokenGradients.from_output_gradients(tokens, inputs, ROWS, padding=0)
        exact = [[[Fraction(0)] * COLUMNS for _ in range(ROWS)] for _ in range(EXAMPLES)]
        places = zip(found.examples.tolist(), found.tokens.tolist(), strict=True)
        for (example, token), row in zip(places, fractions(found.rows), strict=True):
            of_token = exact[example][token]
            exact[example][token] = [x + y for x, y in zip(of_token, row, strict=True)]
        return found, exact
    if random.random() < 0.3:
        inputs[:, 3:], gradients[:, 3:] = inputs[:, :3], -gradients[:, :3] * (1 + 2.0**-20)
    return SequenceProducts(gradients, inputs, form), sums_of_products(gradients, inputs)


def mapped(exact: Exact, scale: Any, shift: Any) -> Fraction:
    """Return the squared norm of a gradient after shift and scale."""
    return sum(
        ((exact[o][i] + shift[o][i]) * scale[o][i]) ** 2
        for o in range(ROWS) for i in range(COLUMNS)
    )  # fmt: skip


def bounds(gradients: Any, scale: torch.Tensor, shift: torch.Tensor | None) -> list[float]:
    """Return the norms of the whole parameter after a map."""
    coordinates = slice(0, ROWS * COLUMNS)
    piece = Piece(0, slice(0, ROWS), (ROWS, COLUMNS), coordinates)
    found: list[float] = gradients.mapped_squared_norms(
        [(piece, AffineMap(scale, shift))], BOUND
    ).tolist()
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("spread", "cases"),
    [
        (2.0, 4),
        pytest.param(9.0, 20, marks=pytest.mark.slow),
        *(pytest.param(spread, 300, marks=pytest.mark.nightly) for spread in (0.0, 2.0, 9.0)),
    ],
)
def test_norms_are_upper_bounds(form: str, spread: float, cases: int) -> None:
    random.seed(cases)
    torch.manual_seed(cases)
    finite = 0
    for _ in range(cases):
        gradients, exact = make(form, spread)
        scale = drawn(ROWS, COLUMNS, spread=spread).abs()
        shift = drawn(ROWS, COLUMNS, spread=spread)
        nothing = torch.zeros(ROWS, COLUMNS)
        ways = [
            (gradients.squared_norms(BOUND).tolist(), torch.ones(ROWS, COLUMNS), nothing),
            (bounds(gradients, scale, None), scale, nothing),
            (bounds(gradients, scale, shift), scale, shift),
        ]
        for found, *affine in ways:
            for norm, one in zip(found, exact, strict=True):
                wanted = mapped(one, *map(fractions, affine))
                assert norm == math.inf or Fraction(norm) >= wanted
                finite += norm < math.inf
                if spread == 0 and form != "gram":
                    assert norm <= wanted * (1 + Fraction(1, 1000)) + Fraction(1, 1000)
    assert finite > cases * EXAMPLES


def test_a_table_of_one_repeated_token_keeps_the_norm_of_its_shift(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All its rows but one are 0, and take nothing from the shift, whatever its bound exceeds."""

    def looser(*given: Any) -> torch.Tensor:
        found = mapped_squared_norms(*given)
        return found * (1 + 8e-6 * torch.rand_like(found))

    monkeypatch.setattr(token_gradients, "mapped_squared_norms", looser)
    torch.manual_seed(0)
    shift, scale = torch.rand(ROWS, COLUMNS) + 1, torch.rand(ROWS, COLUMNS) + 1
    shift[1] *= 1000
    tokens = torch.ones(1, 30_000, dtype=torch.int64)
    table = TokenGradients.from_output_gradients(tokens, torch.zeros(1, 30_000, COLUMNS), ROWS)
    wanted = mapped([[Fraction(0)] * COLUMNS] * ROWS, fractions(scale), fractions(shift))
    assert Fraction(bounds(table, scale, shift)[0]) >= wanted
