"""Many numbers of repetitions on one line: as proved as one by one, at the cost of a few."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import ACCOUNTANTS, Question
from accountant_service.errors import TooExpensiveError
from accountant_service.mechanisms import DpSgd, canonical_form
from accountant_service.numerics import epsilon_curve
from accountant_service.numerics.certified_interval import epsilon_bounds
from accountant_service.numerics.engines import line_integral as engine
from accountant_service.numerics.engines import saddle_point
from accountant_service.numerics.epsilon_curve import epsilon_curve as curve
from accountant_service.numerics.floats.bounds import Bounds, relative_width
from accountant_service.numerics.laws import gaussian
from accountant_service.numerics.laws.characteristic_function import (
    TiltedSampledGaussian,
    tilted_loss,
)
from accountant_service.numerics.laws.dominating_pair import GaussianPair, LaplacePair, Release
from tests.support import oracles
from tests.support.helpers import log_uniform

TOLERANCE = 1e-3


def sampled(q: float, sigma: float) -> list[tuple[Release, int]]:
    return [(Release(GaussianPair(1 / sigma), q), 1)]


def evenly(last: int, points: int) -> list[int]:
    return sorted({math.ceil(last * i / points) for i in range(1, points + 1)})


@pytest.mark.slow
def test_holds_the_closed_form_without_sampling() -> None:
    rng = random.Random(31)
    for _ in range(15):
        mu, delta = log_uniform(rng, 0.02, 0.5), log_uniform(rng, 1e-12, 1e-2)
        times = evenly(rng.randint(2, 2000), 40)
        releases = [(Release(GaussianPair(mu)), 1)]
        for each, bounds in zip(times, curve(releases, times, delta, TOLERANCE), strict=True):
            exact = float(gaussian.epsilon(delta, mu * math.sqrt(each)))
            assert bounds.lower <= exact <= bounds.upper, (mu, each, delta)
            assert relative_width(bounds) <= TOLERANCE


@pytest.mark.nightly
@pytest.mark.slow
def test_holds_the_line_integral_and_what_is_found_one_by_one() -> None:
    """Random runs, mostly sampled: each point holds δ by an independent sum, and is narrow."""
    rng = random.Random(32)
    judged = 0
    for _ in range(12):
        q, sigma = log_uniform(rng, 1e-4, 0.5), log_uniform(rng, 0.5, 20)
        delta = log_uniform(rng, 1e-12, 1e-3)
        times = evenly(int(log_uniform(rng, 100, 3e5)), 30)
        found = curve(sampled(q, sigma), times, delta, TOLERANCE)
        for each, bounds in list(zip(times, found, strict=True))[::7]:
            alone = epsilon_bounds([(sampled(q, sigma)[0][0], each)], delta, TOLERANCE)
            case = (q, sigma, each, delta)
            assert max(bounds.lower, alone.lower) <= min(bounds.upper, alone.upper), case
            assert relative_width(bounds) <= TOLERANCE, case
            judged += _judged_by_line_integral([(q, sigma, each)], delta, bounds)
    assert judged > 20


def _judged_by_line_integral(run: list[oracles.Run], delta: float, bounds: Bounds) -> bool:
    sides = []
    for epsilon in (bounds.lower, bounds.upper):
        both = [
            oracles.double_line_integral_delta(run, epsilon, removing=removing)
            for removing in (True, False)
        ]
        if any(side is None for side in both):
            return False
        sides.append(max(side for side in both if side is not None))
    assert bounds.lower == 0.0 or sides[0] >= delta * (1 - 1e-7), (run, delta, bounds)
    assert sides[1] <= delta * (1 + 1e-7), (run, delta, bounds)
    return True


@pytest.mark.parametrize(
    "releases",
    [
        [(Release(GaussianPair(0.9), 0.02), 2), (Release(GaussianPair(0.3), 0.2), 1)],
        [(Release(LaplacePair(0.4), 0.1), 1)],  # nothing decays: every one by itself
    ],
)
def test_a_repeated_mixture_is_what_it_is_one_by_one(releases: list[tuple[Release, int]]) -> None:
    times = evenly(60, 6)
    for each, bounds in zip(times, curve(releases, times, 1e-5, TOLERANCE), strict=True):
        alone = epsilon_bounds([(r, count * each) for r, count in releases], 1e-5, TOLERANCE)
        assert max(bounds.lower, alone.lower) <= min(bounds.upper, alone.upper)
        assert relative_width(bounds) <= TOLERANCE


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("method", ACCOUNTANTS)
def test_every_method_draws_the_curve_that_it_answers(method: str) -> None:
    unit = canonical_form(DpSgd(1.1, sample_rate=0.02, steps=1))
    step = Question(unit, NeighbouringRelation.ADD_OR_REMOVE_ONE)
    times = evenly(500, 5)
    for each, found in zip(times, ACCOUNTANTS[method].curve(step, times, 1e-5), strict=True):
        alone = ACCOUNTANTS[method].epsilon(step.repeated(each), 1e-5)
        assert found is not None
        assert found.epsilon == pytest.approx(alone.epsilon, rel=TOLERANCE)
        assert found.assumptions == alone.assumptions
        assert found.mechanism_hash == alone.mechanism_hash
    assert found.epsilon == alone.epsilon  # the last to the digit


def test_a_hundred_points_cost_a_few_evaluations_of_the_integrand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluated = []
    genuine = TiltedSampledGaussian.characteristic

    def counted(self: TiltedSampledGaussian, frequencies: Any) -> Any:
        evaluated.append(len(frequencies))
        return genuine(self, frequencies)

    monkeypatch.setattr(TiltedSampledGaussian, "characteristic", counted)
    curve(sampled(0.01, 1.1), evenly(10_000, 100), 1e-5, TOLERANCE)
    assert len(evaluated) <= 8


# --- mutations: what is taken of the fewest repetitions, of each, and of either direction


def run_with_few_frequencies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Bounds]]:
    """Bounds from a line that leaves out much, and the exact ε of each point."""
    coarse = engine.IntegrationSettings(math.log(0.3), 0.0, 1 << 18)
    # private: so coarse a line shows each term
    monkeypatch.setattr(epsilon_curve, "_SETTINGS", (coarse,))
    mu, times = 0.05, np.arange(100.0, 401.0, 20.0)
    found = epsilon_curve._bounds_of_group([(Release(GaussianPair(mu)), 1)], times, 1e-5)
    exact = gaussian.epsilon(1e-5, mu * np.sqrt(times))
    return list(zip(exact.tolist(), found, strict=True))


def violations(cases: list[tuple[float, Bounds]]) -> int:
    return sum(not bounds.lower <= exact <= bounds.upper for exact, bounds in cases)


def test_the_tail_is_that_of_the_fewest_repetitions() -> None:
    """More repetitions add less than the tail of the fewest; the most would bound less."""
    release, _ = sampled(0.02, 1.0)[0]
    saddle = saddle_point.find_at_delta([(release, 1200)], "removing", math.log(1e-5))
    line = engine.choose_line(saddle, engine.IntegrationSettings(math.log(1e-8), 0.0, 1 << 20))
    tilted = tilted_loss(release, "removing", line.tilt)

    def tail(times: list[float]) -> tuple[int, float]:
        integrand = engine.CompositionIntegrand([(tilted, 1)], np.array(times))
        extent = engine._choose_frequencies(integrand, line, 1 << 20)
        return extent.count, extent.tails[0]

    def missing(count: int) -> float:
        frequencies = 2 * math.pi / line.period * np.arange(count, 40 * count, dtype=float)
        phi = np.exp(300 * tilted.characteristic(frequencies).log_value.real)
        kernel = np.abs(line.kernels(frequencies)[0][0])
        return float((phi * kernel).sum()) * 2 / line.period

    count, promised = tail([300.0, 600.0, 1200.0])
    assert 0 < missing(count) <= promised
    count, promised = tail([1200.0])
    assert missing(count) > promised


def test_aliases_are_subtracted_at_each_point(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = engine.choose_line

    def short(saddle: Any, settings: Any) -> engine.IntegrationLine:
        line = genuine(saddle, settings)
        return engine.replace(line, period=0.5 * line.period)

    monkeypatch.setattr(engine, "choose_line", short)
    assert violations(run_with_few_frequencies(monkeypatch)) == 0
    # private: the term is left out to show that it is needed
    monkeypatch.setattr(
        engine.EvaluatedIntegral,
        "_aliasing_error",
        lambda _, epsilons, __=0.0: np.zeros_like(epsilons),
    )
    assert violations(run_with_few_frequencies(monkeypatch)) > 0


def test_a_point_that_the_shared_search_misses_is_computed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search that finds nothing costs time, not validity."""
    # private: no question is known at which the search fails
    monkeypatch.setattr(engine, "_SECANTS", 0)
    monkeypatch.setattr(engine, "_WIDENINGS", (1e-3,))
    # nor does the time of others count: the limit is of CPU time
    monkeypatch.setattr("time.monotonic", itertools.count(0.0, 100.0).__next__)
    times = evenly(1000, 10)
    found = curve(sampled(0.1, 2.0), times, 1e-6, TOLERANCE)
    assert found == sorted(found, key=lambda bounds: bounds.upper)
    for each, bounds in zip(times, found, strict=True):
        assert bounds == epsilon_bounds([(sampled(0.1, 2.0)[0][0], each)], 1e-6, TOLERANCE)


def test_a_curve_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epsilon_curve, "SECONDS_MAX", -1.0)
    unit = canonical_form(DpSgd(1.1, sample_rate=0.02, steps=1))
    step = Question(unit, NeighbouringRelation.ADD_OR_REMOVE_ONE)
    with pytest.raises(TooExpensiveError, match="fewer points"):
        ACCOUNTANTS["pld"].curve(step, [1, 2, 3], 1e-5)


def test_more_steps_never_cost_less() -> None:
    """Bounds of different engines differ by their widths; none of them may show as a dip."""
    wide = [Bounds(1.0, 1.2), Bounds(0.9, 1.1), Bounds(1.05, 1.3)]
    assert epsilon_curve._enforce_monotone(wide) == [
        Bounds(1.0, 1.1), Bounds(1.0, 1.1), Bounds(1.05, 1.3)
    ]  # fmt: skip


def test_dropping_the_costlier_direction_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    times = evenly(1000, 20)
    exact = curve(sampled(0.1, 2.0), times, 1e-6, TOLERANCE)
    monkeypatch.setattr(epsilon_curve, "distinct_directions", lambda _: ("adding",))
    dropped = curve(sampled(0.1, 2.0), times, 1e-6, TOLERANCE)
    below = [one.upper < other.lower for one, other in zip(dropped, exact, strict=True)]
    assert all(below[:-1])  # the last is asked for alone


def test_renyi_bounds_of_shares_are_those_of_fewer_repetitions() -> None:
    release = sampled(0.05, 1.0)[0][0]
    saddle = saddle_point.find_at_delta([(release, 1000)], "removing", math.log(1e-6))
    bounds = saddle_point.renyi_bounds(saddle, np.array([0.1, 0.5, 1.0]), math.log(1e-6))
    for share, bound in zip((100, 500, 1000), bounds, strict=True):
        alone = saddle_point.find_at_delta([(release, share)], "removing", math.log(1e-6))
        assert bound >= alone.bound
        assert bound == pytest.approx(alone.bound, rel=1e-2)
