"""The floor against 50-digit references over random grids."""

from __future__ import annotations

import random
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant_service.numerics.floats import rounding, search, special_functions
from accountant_service.numerics.laws import gaussian, sampled_gaussian, without_replacement
from tests.support import oracles
from tests.support.helpers import log_uniform


def relative(found: float, exact: mp.mpf) -> float:
    return float(abs(mp.mpf(found) / exact - 1)) if exact else abs(found)


def test_sampled_gaussian_moments_of_whole_orders() -> None:
    rng = random.Random(1)
    for _ in range(60):
        q, sigma = log_uniform(rng, 1e-7, 1), log_uniform(rng, 0.2, 1000)
        order = rng.randint(2, 200)
        found = sampled_gaussian.log_moments(np.array([float(order)]), q, sigma)[0]
        exact = oracles.sampled_gaussian_moment(order, q, sigma)
        assert relative(found, exact) < 1e-11, (q, sigma, order)


@pytest.mark.slow
@pytest.mark.parametrize("negative", [False, True])
def test_sampled_gaussian_moments_of_fractional_and_negative_orders(negative: bool) -> None:
    rng = random.Random(2)
    for _ in range(6):
        q, sigma = log_uniform(rng, 1e-6, 0.9), log_uniform(rng, 0.3, 30)
        order = -float(rng.randint(1, 40)) if negative else 1 + log_uniform(rng, 0.02, 30)
        found = sampled_gaussian.log_moments(np.array([order]), q, sigma)[0]
        exact = oracles.sampled_gaussian_moment(order, q, sigma)
        assert relative(found, exact) < 1e-10, (q, sigma, order)


def test_a_curve_agrees_with_its_orders_taken_alone() -> None:
    orders = 1 + np.geomspace(0.02, 300, 80)
    curve = sampled_gaussian.log_moments(orders, 0.01, 0.7)
    alone = [sampled_gaussian.log_moments(orders[i : i + 1], 0.01, 0.7)[0] for i in range(80)]
    np.testing.assert_allclose(curve, alone, rtol=1e-12)


def test_removing_a_record_costs_at_least_as_much_as_adding_one() -> None:
    """E₂ ≥ E₁ for the sampled Gaussian (arXiv 1908.10530, Theorem 5): both are computed."""
    moments = np.arange(1.0, 60.0)
    for q, sigma in ((0.01, 0.6), (0.1, 1.0), (0.5, 3.0), (1e-4, 0.4)):
        removing = sampled_gaussian.log_moments(moments + 1, q, sigma)
        adding = sampled_gaussian.log_moments(-moments, q, sigma)
        assert np.all(removing >= adding * (1 - 1e-12))
        assert np.any(removing > adding * 1.01)


@pytest.mark.slow
def test_central_moments_do_not_cancel() -> None:
    for sigma in (0.5, 1.0, 4.0, 50.0):
        found = without_replacement._log_central_moments(sigma, 66)
        for half in range(1, 34):
            exact = mp.log(oracles.central_moment(2 * half, sigma))
            assert abs(found[half] - float(exact)) < 1e-10 * max(1.0, abs(float(exact)))


@pytest.mark.slow
def test_without_replacement_moments() -> None:
    rng = random.Random(3)
    for _ in range(10):
        q, sigma = log_uniform(rng, 1e-5, 0.9), log_uniform(rng, 0.4, 20)
        order = rng.randint(2, 40)
        found = without_replacement.log_moments_as_in_paper(np.array([float(order)]), q, sigma)[0]
        assert relative(found, oracles.without_replacement_moment(order, q, sigma)) < 1e-10


def test_sampling_without_replacement_never_costs_more_than_no_sampling() -> None:
    orders = np.arange(2.0, 65.0)
    bound = without_replacement.log_moments(orders, 0.9, 5.0)
    assert np.all(bound <= orders * (orders - 1) / 50 * (1 + 1e-15))


def test_gaussian_profile() -> None:
    rng = random.Random(4)
    for _ in range(300):
        mu = log_uniform(rng, 1e-4, 100)
        epsilon = rng.random() ** 2 * (mu * mu / 2 + 8 * mu)
        exact = mp.log(oracles.gaussian_delta(epsilon, mu))
        assert abs(float(mp.mpf(float(gaussian.log_delta(epsilon, mu))) - exact)) < 1e-9


@pytest.mark.slow
def test_gaussian_epsilon_is_bracketed_by_its_two_inverses() -> None:
    rng = random.Random(5)
    points = [(log_uniform(rng, 1e-6, 100), log_uniform(rng, 1e-15, 0.5)) for _ in range(80)]
    points += [(1.0, 0.38292491946265084), (1e-6, 1.5465032023856148e-10)]  # almost free
    for mu, delta in points:
        exact = oracles.gaussian_epsilon(delta, mu)
        low, high = float(gaussian.epsilon_lower(delta, mu)), float(gaussian.epsilon(delta, mu))
        assert low <= exact <= high, (mu, delta)
        assert high - low <= 1e-9 * high + 1e-11


def test_gaussian_profile_for_tiny_shifts() -> None:
    for mu in (1e-6, 1e-5, 1e-3, 0.49, 0.51):
        for multiple in (0.0, 0.1, 3.0, 8.0, 30.0):
            exact = mp.log(oracles.gaussian_delta(multiple * mu, mu))
            found = float(gaussian.log_delta(multiple * mu, mu))
            assert abs(float(mp.mpf(found) - exact)) < 1e-12, (mu, multiple)


@pytest.mark.parametrize("trials", [1, 2, 17, 1000, 10_000_000])
def test_binomial_probabilities(trials: int) -> None:
    p = mp.mpf(0.013)
    counts = sorted({0, 1, trials // 100, trials // 70, trials // 2, trials})
    found = special_functions.log_binomial_pmf(np.array(counts, float), trials, 0.013)
    for count, value in zip(counts, found, strict=True):
        exact = (
            mp.loggamma(trials + 1)
            - mp.loggamma(count + 1)
            - mp.loggamma(trials - count + 1)
            + count * mp.log(p)
            + (trials - count) * mp.log1p(-p)
        )
        assert abs(float(value - exact)) < 1e-11 + 1e-14 * abs(float(exact))


def test_the_binomial_window_holds_all_but_the_tails() -> None:
    for trials, p in ((1000, 0.01), (10_000_000, 0.3), (5, 0.5), (3, 1e-9)):
        first, last = special_functions.binomial_window(trials, p, -40.0)
        assert 0 <= first <= trials * p + 1
        assert trials * p - 1 <= last <= trials
        inside = np.arange(first, last + 1, dtype=float)
        mass = np.exp(special_functions.log_binomial_pmf(inside, trials, p)).sum()
        assert mass == pytest.approx(1.0, abs=1e-11)


@pytest.mark.parametrize("place", [1e-9, 0.37, 12.0, 4e7])
def test_boundary_ends_on_the_fitting_side(place: float) -> None:
    def excess(x: float) -> float:
        return float("inf") if x < place / 10 else place - x

    found = search.find_boundary(
        excess, feasible=place * 1e3, infeasible=place / 1e3, relative_width=1e-9
    )
    assert place <= found <= place * (1 + 1e-8)


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 1201, 999_999])
def test_largest_integer_is_exact(largest: int) -> None:
    asked: list[int] = []

    def excess(n: int) -> float:
        asked.append(n)
        return n**0.5 - (largest + 0.5) ** 0.5

    assert search.find_largest_integer(excess, 10**6) == largest
    assert len(asked) < 60
    assert search.find_largest_integer(lambda _: -1.0, 10**6) is None


def test_logarithms_near_one_keep_their_digits() -> None:
    for x in (-0.9, -0.02, -1e-3, -1e-9, 1e-12, 1e-5, 0.019, 0.021, 3.0):
        exact = mp.log1p(mp.mpf(x)) - mp.mpf(x)
        assert relative(float(special_functions.log1p_minus(np.array(x))), exact) < 1e-12


def test_log1p_of_small_complex_numbers_keeps_its_digits() -> None:
    """A billion of them are added up: numpy's own would be off by 1e-7 then."""
    rng = np.random.default_rng(5)
    x = 10.0 ** rng.uniform(-14, -0.2, 300) * np.exp(2j * np.pi * rng.random(300))
    for value, found in zip(x, special_functions.log1p_complex(x), strict=True):
        exact = mp.log(1 + mp.mpc(value.real, value.imag))
        assert abs(mp.mpc(found.real, found.imag) - exact) <= 1e-15 * abs(value)


@given(st.floats(0, 1000), st.floats(0, 1000))
def test_bounds_are_rounded_outward(first: float, second: float) -> None:
    """Past 1e-11, the error of every formula here."""
    assert rounding.up(first) >= first * (1 + 1e-11)
    assert rounding.up_each(np.array([first]))[0] == rounding.up(first)
    assert rounding.down(first) <= first * (1 - 1e-11)
    exact = Fraction(first) - Fraction(second)
    assert Fraction(rounding.subtract_rounding_down(first, second)) <= exact
    assert Fraction(rounding.add_rounding_up(first, -second)) >= exact
