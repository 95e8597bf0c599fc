"""Squared norms in single precision on an accelerator are upper bounds of the exact ones."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch

from training_client.private_step.kernels.row_sums import squared_norms

WIDTHS = (1, 2, 63, 64, 65, 1000, 4097)
LARGEST, SMALLEST = 3.4e38, 1.4e-45  # the last is denormal


def hostile_row(width: int) -> torch.Tensor:
    """Return values of mixed magnitude, or such as lose most when their squares are added."""
    kind = random.choice(["mixed", "equal", "one large", "denormal", "rounded down"])
    if kind == "equal":
        return torch.full((width,), 10 ** random.uniform(-45, 38))
    if kind == "one large":  # each further square is lost beside the first
        row = torch.full((width,), 0.99 * 2.0**-12)
        row[0] = 1.0
        return row * 10 ** random.uniform(-30, 30)
    if kind == "denormal":
        return SMALLEST * torch.randint(-9, 10, (width,)).float()
    if kind == "rounded down":
        return torch.full((width,), 1 + random.randrange(1 << 12) * 2.0**-23)
    exponents = torch.empty(width, dtype=torch.float64).uniform_(-46, 38)
    return (10**exponents * torch.randint(0, 2, (width,)).mul(2).sub(1)).float()


def exact(row: torch.Tensor) -> Fraction:
    """Return the squared norm of a row."""
    return sum((Fraction(each) ** 2 for each in row.tolist()), Fraction(0))


@pytest.fixture
def _no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)


@pytest.mark.usefixtures("_no_cpu")
@pytest.mark.parametrize("width", WIDTHS)
def test_squared_norms_are_upper_bounds_and_close(width: int) -> None:
    random.seed(width)
    torch.manual_seed(width)
    rows = torch.stack([hostile_row(width) for _ in range(60)])
    for row, found in zip(rows, squared_norms(rows).tolist(), strict=True):
        wanted = exact(row)
        assert wanted <= Fraction(found) <= wanted * (1 + Fraction(8, 10**6))


@pytest.mark.usefixtures("_no_cpu")
def test_values_that_are_not_finite_stay_so() -> None:
    rows = torch.tensor([[1.0, math.inf], [-math.inf, 0.0], [math.nan, 1.0], [0.0, 0.0]])
    found = squared_norms(rows).tolist()
    assert found[:2] == [math.inf, math.inf]
    assert math.isnan(found[2])
    assert found[3] == 0.0


@pytest.mark.usefixtures("_no_cpu")
def test_the_largest_and_smallest_numbers_neither_overflow_nor_underflow() -> None:
    rows = torch.tensor([[LARGEST] * 70, [SMALLEST] * 70])
    for row, found in zip(rows, squared_norms(rows).tolist(), strict=True):
        assert exact(row) <= Fraction(found) < math.inf


@pytest.mark.usefixtures("_no_cpu")
def test_double_precision_and_empty_rows_are_added_up_in_double_precision() -> None:
    rows = torch.tensor([[1e-160, 1e160]], dtype=torch.float64)
    assert squared_norms(rows).tolist() == [math.inf]
    assert squared_norms(torch.zeros(3, 0)).tolist() == [0.0, 0.0, 0.0]
