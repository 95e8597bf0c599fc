"""Sums in single precision on an accelerator are upper bounds of the exact ones.

They are compared with exact fractions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import mpmath
import pytest
import torch

from training_client.private_step.kernels import accelerator_sums
from training_client.private_step.kernels.row_sums import (
    add_row_dots,
    mapped_squared_norms,
    normalized_squares,
    squared_norms,
)

pytestmark = pytest.mark.usefixtures("no_cpu_anywhere")
WIDTHS = (2, 63, 65, 1, 64, 1000, 4097)
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


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest) -> int:
    """Return the number of values of a row; random numbers are those of this number."""
    found: int = request.param
    random.seed(found)
    torch.manual_seed(found)
    return found


@pytest.mark.spread(first=3, second=2)
def test_squared_norms_are_upper_bounds_and_close(width: int) -> None:
    rows = torch.stack([hostile_row(width) for _ in range(60)])
    for row, found in zip(rows, squared_norms(rows).tolist(), strict=True):
        wanted = exact(row)
        assert wanted <= Fraction(found) <= wanted * (1 + Fraction(8, 10**6))


def test_values_that_are_not_finite_stay_so() -> None:
    rows = torch.tensor([[1.0, math.inf], [-math.inf, 0.0], [math.nan, 1.0], [0.0, 0.0]])
    found = squared_norms(rows).tolist()
    assert found[:2] == [math.inf, math.inf]
    assert math.isnan(found[2])
    assert found[3] == 0.0


def test_the_largest_and_smallest_numbers_neither_overflow_nor_underflow() -> None:
    rows = torch.tensor([[LARGEST] * 70, [SMALLEST] * 70])
    for row, found in zip(rows, squared_norms(rows).tolist(), strict=True):
        assert exact(row) <= Fraction(found) < math.inf


def test_double_precision_and_empty_rows_are_added_up_in_double_precision() -> None:
    rows = torch.tensor([[1e-160, 1e160]], dtype=torch.float64)
    assert squared_norms(rows).tolist() == [math.inf]
    assert squared_norms(torch.zeros(3, 0)).tolist() == [0.0, 0.0, 0.0]


# --- after a map


def hostile_map(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a scale and a shift, perhaps one that cancels most of the row."""
    scale = hostile_row(len(row)).abs()
    kind = random.choice(["none", "any", "nearly cancels", "cancels where the scale is large"])
    if kind == "none":
        return scale, None
    if kind == "any":
        return scale, hostile_row(len(row))
    if kind == "nearly cancels":
        return scale, -row * (1 + torch.randint(-3, 4, row.shape) * 2.0**-23)
    shift = torch.where(scale > scale.median(), -row.nextafter(row + 1), row)
    return scale, shift.nan_to_num(0.0, 0.0, 0.0)


def exact_mapped(row: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None) -> Fraction:
    """Return the squared norm of a row after a map."""
    shifts = torch.zeros_like(row) if shift is None else shift
    triples = zip(row.tolist(), shifts.tolist(), scale.tolist(), strict=True)
    return sum(
        (((Fraction(x) + Fraction(b)) * Fraction(d)) ** 2 for x, b, d in triples), Fraction(0)
    )


def largest(*rows: torch.Tensor | None) -> Fraction:
    """Return the largest magnitude, or the smallest normal number if it is larger."""
    found = max(float(each.abs().max()) for each in rows if each is not None)
    return max(Fraction(found), Fraction(2) ** -126)


def root(number: Fraction) -> mpmath.mpf:
    """Return a square root to fifty digits."""
    with mpmath.workdps(50):
        return mpmath.sqrt(mpmath.mpf(number.numerator) / number.denominator)


@pytest.mark.spread(first=3, second=2)
def test_mapped_squared_norms_are_upper_bounds_and_close(width: int) -> None:
    """They are close but for 2⁻¹²¹ of the largest value, shift and scale, as denormals are kept."""
    for _ in range(60):
        row = hostile_row(width)
        scale, shift = hostile_map(row)
        given = (row[None], scale[None], None if shift is None else shift[None])
        found = Fraction(float(mapped_squared_norms(*given)))
        wanted = exact_mapped(row, scale, shift)
        assert wanted <= found
        lost = 2.0**-121 * math.sqrt(width) * root((largest(row, shift) * largest(scale)) ** 2)
        assert root(found) <= root(wanted * (1 + Fraction(9, 10**6))) + 1.001 * lost


def test_every_row_may_have_a_map_of_its_own() -> None:
    random.seed(0)
    torch.manual_seed(0)
    rows, scale, shift = (torch.stack([hostile_row(70) for _ in range(20)]) for _ in range(3))
    together = mapped_squared_norms(rows, scale, shift)
    for at, found in enumerate(together.tolist()):
        part = slice(at, at + 1)
        assert found == float(mapped_squared_norms(rows[part], scale[part], shift[part]))


MIXED = torch.tensor([2.0**50, 2.0**-90 * (1 + 2.0**-11)]), torch.tensor([2.0**-149, 1.0])


def test_what_underflows_beside_a_large_value_is_allowed_for() -> None:
    row, scale = MIXED
    found = mapped_squared_norms(row[None], scale[None])
    assert Fraction(float(found)) >= exact_mapped(row, scale, None)


@pytest.mark.parametrize(
    ("row", "scale", "shift"),
    [([1.0, math.inf], [1.0, 1.0], [0.0, 0.0]), ([math.nan, 1.0], [1.0, 1.0], [1.0, 1.0]),
     ([1.0, math.inf], [1.0, 1.0], [0.0, -math.inf]), ([1.0, 1.0], [math.inf, 1.0], [1.0, 1.0]),
     ([1.0, 1.0], [math.nan, 1.0], [0.0, 0.0]), ([1.0, 1.0], [1.0, 1.0], [math.nan, 0.0])],
)  # fmt: skip
def test_what_is_not_finite_has_no_finite_norm_after_a_map(
    row: list[float], scale: list[float], shift: list[float]
) -> None:
    found = mapped_squared_norms(*(torch.tensor([each]) for each in (row, scale, shift)))
    assert not bool(found.isfinite().any())


def test_the_largest_numbers_do_not_overflow_after_a_map() -> None:
    row = torch.full((70,), LARGEST)
    found = float(mapped_squared_norms(row[None], row[None], row[None]))
    assert exact_mapped(row, row, row) <= Fraction(found) < math.inf


# --- dot products, squares of unit rows, and sums over positions


@pytest.mark.spread(first=6, second=3)
@pytest.mark.parametrize("squared", [False, True])
def test_dot_products_are_upper_bounds_and_close(width: int, squared: bool) -> None:
    for _ in range(40):
        row, other = hostile_row(width), hostile_row(width)
        row = row.abs() if squared else row
        total = torch.zeros(1, dtype=torch.float64)
        add_row_dots(row[None], torch.cat([torch.ones(3), other])[None], total, 3, squared=squared)
        power = 2 if squared else 1
        terms = [
            Fraction(x) * Fraction(z) ** power
            for x, z in zip(row.tolist(), other.tolist(), strict=True)
        ]
        excess = Fraction(float(total)) - sum(terms)
        lost = width * Fraction(2) ** -120 * largest(row) * largest(other) ** power
        assert 0 <= excess <= sum(map(abs, terms)) * Fraction(8, 10**6) + lost


@pytest.mark.spread(first=3, second=2)
def test_squares_of_unit_rows_lose_three_roundings_at_most(width: int) -> None:
    rows = torch.stack([hostile_row(width) for _ in range(40)])
    squares, norms = normalized_squares(rows)
    assert bool(((squares >= torch.finfo(torch.float32).tiny) == (rows != 0)).all())
    least = 1 - 3 * Fraction(2) ** -24
    for row, entries, norm in zip(rows, squares.tolist(), norms.tolist(), strict=True):
        assert exact(row) <= Fraction(norm) <= exact(row) * (1 + Fraction(8, 10**6))
        for value, entry in zip(row.tolist(), entries, strict=True):
            assert Fraction(entry) * Fraction(norm) >= Fraction(value) ** 2 * least


@pytest.mark.parametrize(("positions", "columns"), [(1, 3), (5, 70), (300, 2)])
def test_products_of_sums_over_positions_are_upper_bounds_and_close(
    positions: int, columns: int
) -> None:
    random.seed(columns)
    torch.manual_seed(columns)
    rows = 3
    for _ in range(20):
        left = hostile_row(positions * rows).view(1, positions, rows)
        right = hostile_row(positions * columns).view(1, positions, columns)
        scale = hostile_row(rows * columns).view(rows, columns)
        sums = accelerator_sums.square_sums(left), accelerator_sums.square_sums(right)
        found = Fraction(float(accelerator_sums.mapped_products(*sums, scale)))
        of_left, of_right = ([exact(each) for each in one[0].T] for one in (left, right))
        wanted = sum(
            g * a * Fraction(float(scale[o, i])) ** 2
            for o, g in enumerate(of_left) for i, a in enumerate(of_right)
        )  # fmt: skip
        assert wanted <= found
        roundings = rows + columns + 2 * positions + 8
        most = wanted * (1 + 4 * roundings * Fraction(2) ** -24)
        lost = (largest(left) * largest(right) * largest(scale)) ** 2 * Fraction(2) ** -113
        assert found <= most + positions**2 * rows * columns * lost


# --- what the bounds would miss without their allowances


def without_rounding_up() -> bool:
    """Return whether rows whose squares are rounded down keep their norm."""
    row = torch.full((64,), 1 + 5 * 2.0**-23)
    return Fraction(float(squared_norms(row[None]))) >= exact(row)


def without_allowance_for_underflow() -> bool:
    """Return whether a value that underflows in a map keeps its norm."""
    row, scale = MIXED
    found = mapped_squared_norms(row[None], scale[None])
    return Fraction(float(found)) >= exact_mapped(row, scale, None)


def without_allowance_for_dots() -> bool:
    """Return whether products that are rounded down keep their sum."""
    row, total = torch.full((64,), 1 + 5 * 2.0**-23), torch.zeros(1, dtype=torch.float64)
    add_row_dots(row[None], row[None], total)
    return Fraction(float(total)) >= exact(row)


@pytest.mark.parametrize(
    ("name", "value", "holds"),
    [("_ROUNDED_UP", 1.0, without_rounding_up), ("_ROUNDED_UP", 1.0, without_allowance_for_dots),
     ("_UNDERFLOW", 0.0, without_allowance_for_underflow)],
)  # fmt: skip
def test_without_their_allowances_they_would_be_no_upper_bounds(
    name: str, value: float, holds: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert holds()
    # private: an allowance is no option, and its absence must be noticed
    monkeypatch.setattr(accelerator_sums, name, value)
    assert not holds()
