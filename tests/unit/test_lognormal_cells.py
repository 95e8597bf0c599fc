"""Masses of a lognormal variable in cells: the error of each, against 50 digits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpf

from accountant_service.numerics.laws.lognormal_cells import cell_masses

EPS = float(np.finfo(float).eps)


def exact_mass(mu: float, low: float, high: float, *, tilted: bool) -> Any:
    """The mass between two edges: a difference of tails on the side where they are small."""
    shift = mpf(mu) / 2 - (mpf(mu) if tilted else 0)
    a = mp.log(mpf(low)) / mpf(mu) + shift if low > 0 else mp.ninf
    b = mp.log(mpf(high)) / mpf(mu) + shift
    if a > 0:
        a, b = -b, -a
    return (mp.erfc(-b / mp.sqrt(2)) - mp.erfc(-a / mp.sqrt(2))) / 2


def shares_of_bounds(mu: float, edges: np.ndarray[Any, Any]) -> list[float]:
    """The errors over their bounds."""
    plain, plain_error, tilted, tilted_error = cell_masses(mu, edges)
    found = []
    with mp.workdps(50):
        for at, (low, high) in enumerate(itertools.pairwise(edges)):
            for is_tilted, mass, error in (
                (False, plain, plain_error),
                (True, tilted, tilted_error),
            ):
                exact = exact_mass(mu, float(low), float(high), tilted=is_tilted)
                found.append(float(abs(exact - mpf(float(mass[at]))) / mpf(float(error[at]))))
    return found


@pytest.mark.parametrize("mu", [0.01, 0.25, 1.0, 4.0])
@pytest.mark.parametrize("step", [2.0**-12, 0.25])
@pytest.mark.parametrize("first", [0, 35, 30_000])
def test_masses_are_within_their_errors(mu: float, step: float, first: int) -> None:
    edges = np.arange(first, first + 12) * step
    assert max(shares_of_bounds(mu, edges)) <= 1


def test_the_error_of_a_narrow_cell_is_relative() -> None:
    plain, plain_error, tilted, tilted_error = cell_masses(1.0, np.arange(4000, 5000) / 2**12)
    assert (plain_error <= 100 * EPS * plain).all()
    assert (tilted_error <= 100 * EPS * tilted).all()


def test_wide_cells_are_within_their_errors() -> None:
    """The series for narrow cells would leave out more than the error that is stated."""
    assert max(shares_of_bounds(1.0, np.arange(2, 10) * 0.5)) <= 1


def test_an_unbounded_cell_has_the_tail() -> None:
    plain, _, tilted, _ = cell_masses(1.0, np.array([2.0, np.inf]))
    assert 0 < plain[0] < tilted[0] < 1
