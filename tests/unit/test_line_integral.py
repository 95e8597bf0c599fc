"""The line integral against 40 digits, and a mutation for each of its error terms."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from accountant_service.numerics import certified_interval
from accountant_service.numerics.engines import line_integral as engine
from accountant_service.numerics.engines import saddle_point
from accountant_service.numerics.engines.line_integral import (
    EvaluatedIntegral,
    IntegrationSettings,
    integrate_composition,
)
from accountant_service.numerics.errors import ContradictionError, SlowDecayError
from accountant_service.numerics.laws import characteristic_function, sampled_gaussian
from accountant_service.numerics.laws.characteristic_function import TiltedSampledGaussian
from accountant_service.numerics.laws.dominating_pair import (
    DIRECTIONS,
    Composition,
    GaussianPair,
    LaplacePair,
    Release,
)
from tests.support import oracles
from tests.support.helpers import log_uniform, nightly, releases

pytestmark = pytest.mark.usefixtures("without_memory")  # engines are replaced here

CHEAP = IntegrationSettings(math.log(1e-8), smoothing=0.0, work_limit=1 << 20)


ORACLE_CASES = [
    nightly([(0.01, 1.0, 1000)], 1e-5, 6.0),
    ([(0.001, 4.0, 1_000_000)], 1e-6, 14.0),  # a peer's double precision is off by 8e-9 here
    ([(0.001, 2.0, 100_000)], 1e-12, 27.0),  # and another's bound by 1e-3
    nightly([(0.5, 20.0, 10_000)], 1e-10, 2.0),
    ([(0.02, 1.1, 800), (0.004, 0.9, 3000), (0.1, 6.0, 500)], 1e-7, 6.0),
]


@pytest.mark.spread(second=1)
@pytest.mark.slow
@pytest.mark.parametrize(("parts", "delta", "tilt"), ORACLE_CASES)
def test_the_interval_holds_the_line_integral_at_forty_digits(
    parts: list[oracles.Run], delta: float, tilt: float
) -> None:
    """δ(lower) ≥ δ ≥ δ(upper), where the interval is as narrow as the proof makes it."""
    bounds = certified_interval.epsilon_bounds(releases(*parts), delta, 1e-7)
    assert bounds.upper - bounds.lower < 1e-7 * bounds.upper

    def exact(epsilon: float) -> oracles.Number:
        return oracles.line_integral_delta(parts, epsilon, tilt, removing=True)

    assert exact(bounds.lower) >= delta >= exact(bounds.upper)


@pytest.mark.slow
@pytest.mark.parametrize("removing", [True, False])
def test_delta_of_either_direction_holds_the_line_integral(removing: bool) -> None:
    parts = [(0.02, 1.0, 300)]
    direction = DIRECTIONS[0] if removing else DIRECTIONS[1]
    epsilon = 0.0 if removing else 0.4
    exact = oracles.line_integral_delta(parts, epsilon, 4.0, removing=removing, digits=14)
    saddle = saddle_point.find_at_epsilon(releases(*parts), direction, epsilon)
    found = integrate_composition(releases(*parts), saddle, CHEAP)
    lower, upper = found.delta(np.array([epsilon]))
    assert lower[0] <= exact <= upper[0]
    assert upper[0] - lower[0] < 1e-6 * upper[0]


def test_attacks_are_bounded_by_the_neyman_pearson_optimum() -> None:
    for mu in (0.3, 1.0, 4.0):
        pair = [(Release(GaussianPair(mu)), 1)]
        for epsilon in (0.0, 1.0, 3.0):
            found = integrate_composition(
                pair, saddle_point.find_at_epsilon(pair, "removing", epsilon), CHEAP
            )
            thresholds = np.array([epsilon - 0.5, epsilon, epsilon + 0.5])
            false_positives, true_positives = found.attack_rates(thresholds)
            scaled = thresholds / mu
            assert (true_positives <= stats.norm.sf(stats.norm.isf(false_positives) - mu)).all()
            assert false_positives == pytest.approx(stats.norm.sf(scaled + mu / 2), rel=1e-5)
            assert true_positives == pytest.approx(stats.norm.sf(scaled - mu / 2), rel=1e-5)


def test_no_attack_is_given_a_false_positive_rate_of_zero() -> None:
    """Q of an attack that double precision cannot hold was 0, which no attack on noise attains."""
    pair = [(Release(GaussianPair(35.0)), 1)]
    saddle = saddle_point.find_at_epsilon(pair, "removing", 800.0)
    false_positives, true_positives = integrate_composition(pair, saddle, CHEAP).attack_rates(
        np.array([800.0])
    )
    assert true_positives[0] > 1e-9
    assert false_positives[0] > 0


@pytest.mark.parametrize(
    ("seed", "laws"),
    [
        pytest.param(3, 8, marks=pytest.mark.slow),
        pytest.param(None, 200, marks=pytest.mark.nightly),
    ],
)
def test_the_decay_bounds_the_characteristic_function_everywhere(
    seed: int | None, laws: int, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(request.getfixturevalue("night_seed") if seed is None else seed)
    closest = -math.inf
    for _ in range(laws):
        q, mu = log_uniform(rng, 1e-5, 0.9), log_uniform(rng, 0.02, 3)
        law = TiltedSampledGaussian(q, mu, rng.choice(DIRECTIONS), log_uniform(rng, 0.01, 60))
        edges = np.geomspace(0.05, 400, 90) / max(law.standard_deviation, mu / 20)
        if law.count_nodes(float(edges[-1])) > 2e5:
            continue
        bound = law.log_decay(edges[:-1], edges[1:])
        inside = np.exp(np.linspace(np.log(edges[:-1]), np.log(edges[1:]), 5))
        true = law.characteristic(np.sort(inside, axis=None)).log_value.real.reshape(-1, 5).max(1)
        significant = true > -25  # below, the quadrature's own error shows
        assert (true[significant] <= bound[significant] + 1e-9).all()
        beyond = np.array([law.log_decay_beyond(float(edge)) for edge in edges[:-1]])
        assert (true[significant] <= beyond[significant] + 1e-9).all()
        gaps = (true - bound)[significant & (true < -0.05)]
        closest = max(closest, *gaps.tolist(), -99.0)
    assert closest > -1.5  # the bound is not vacuous


def test_noise_without_a_density_is_left_to_the_lattice() -> None:
    pair = [(Release(LaplacePair(0.5)), 10)]
    with pytest.raises(SlowDecayError):
        integrate_composition(
            pair, saddle_point.find_at_delta(pair, "removing", math.log(1e-5)), CHEAP
        )


def test_the_cost_does_not_depend_on_the_count() -> None:
    sizes = []
    for count in (10**3, 10**5, 10**7, 10**9):
        run = releases((0.01 / math.sqrt(count / 1000), 1.0, count))
        saddle = saddle_point.find_at_delta(run, "removing", math.log(1e-5))
        sizes.append(len(integrate_composition(run, saddle, CHEAP).above.terms))
    assert sizes == sorted(sizes, reverse=True)  # it falls, if anything
    assert sizes[0] <= 40


# --- outward terms: the bounds hold with each, and not without (tests/mutants)

RUN: Composition = releases((0.02, 1.0, 300))
EPSILON = 1.0


@pytest.fixture(scope="module")
def exact() -> float:
    found = oracles.double_line_integral_delta([(0.02, 1.0, 300)], EPSILON, removing=True)
    assert found is not None
    return found


def bounds_at(settings: IntegrationSettings = CHEAP, **changes: Any) -> tuple[float, float]:
    """Return bounds on δ from a line that is changed after it was chosen."""
    saddle = saddle_point.find_at_epsilon(RUN, "removing", EPSILON)
    line = replace(engine.choose_line(saddle, settings), **changes)
    tilted = [(characteristic_function.tilted_loss(r, "removing", line.tilt), n) for r, n in RUN]
    found = engine.integrate_along_line(engine.CompositionIntegrand(tilted), line, 1 << 20)
    lower, upper = found.delta(np.array([EPSILON]))
    return float(lower[0]), float(upper[0])


@pytest.mark.parametrize("changes", [{"period": 2.0}, {"log_tail": -1.5}], ids=["aliases", "tail"])
def test_a_short_sum_is_within_its_bounds(changes: dict[str, float], exact: float) -> None:
    """With a short period other ε count as well, and with few frequencies much is left out."""
    lower, upper = bounds_at(**changes)
    assert lower <= exact <= upper
    assert upper > lower * 1.01


def test_the_tail_is_where_the_decay_says() -> None:
    """A longer sum adds no more than the bound on the tail, which two lengths differ by."""
    saddle = saddle_point.find_at_epsilon(RUN, "removing", EPSILON)
    line = engine.choose_line(saddle, IntegrationSettings(math.log(1e-2), 0.0, 1 << 20))
    loss = characteristic_function.tilted_loss(RUN[0][0], "removing", line.tilt)
    found = engine.integrate_along_line(engine.CompositionIntegrand([(loss, 300)]), line, 1 << 20)
    kept, spacing = len(found.above.terms), 2 * math.pi / line.period
    longer = spacing * np.arange(1, 40 * kept)
    phi = np.exp(300 * loss.characteristic(longer).log_value.real)
    sums = (found.above, found.below, found.true_positives, found.false_positives)
    for (kernel, _), seen in zip(line.kernels(longer), sums, strict=True):
        missing = float((phi * np.abs(kernel))[kept - 1 :].sum()) * spacing / math.pi
        assert 0 < missing <= float(seen.error)


def test_a_coarse_quadrature_is_within_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    law = TiltedSampledGaussian(0.02, 1.0, "removing", 4.0)
    frequencies = np.array([0.0, 0.2, 0.4])
    exact = np.exp(law.characteristic(frequencies).log_value)
    # private: the spacing is always so narrow that the quadrature's error does not show
    monkeypatch.setattr(characteristic_function, "_LOG_ERROR", -1.0)
    coarse = law.characteristic(frequencies)
    off = np.abs(np.exp(coarse.log_value) - exact)
    assert (off <= coarse.error).all()
    assert (off[1:] > 1e-6).all()


def test_bounds_hold_in_arithmetic_of_seven_digits(
    monkeypatch: pytest.MonkeyPatch, exact: float
) -> None:
    genuine = characteristic_function.TrapezoidalRule.phi_minus_one
    monkeypatch.setattr(
        characteristic_function.TrapezoidalRule,
        "phi_minus_one",
        lambda of, v: genuine(of, v) * (1 - 1e-7),
    )
    for module in (characteristic_function, engine):
        # private: double precision is too good for an error to show
        monkeypatch.setattr(module, "_EPS", 1e-7)
    lower, upper = bounds_at()
    assert lower <= exact <= upper


def test_smoothing_moves_either_bound_outward(exact: float) -> None:
    lower, upper = bounds_at(IntegrationSettings(math.log(1e-8), 0.05, 1 << 20))
    assert lower < exact < upper
    assert upper - lower < 0.1 * exact


def test_smoothing_serves_where_nothing_decays() -> None:
    """One release: |φ| decays like 1/v, and the closed form is known."""
    run = releases((0.1, 0.8, 1))
    for epsilon in (0.2, 1.0, 2.5):
        exact = float(oracles.single_step_delta(epsilon, 0.1, 0.8, removing=True))
        saddle = saddle_point.find_at_epsilon(run, "removing", epsilon)
        found = integrate_composition(
            run, saddle, IntegrationSettings(math.log(1e-6), smoothing=0.02, work_limit=1 << 24)
        )
        lower, upper = found.delta(np.array([epsilon]))
        assert lower[0] <= exact <= upper[0]
        assert upper[0] - lower[0] < 0.02 * exact


SWEEP: list[Callable[[random.Random], Composition]] = [
    lambda rng: releases((log_uniform(rng, 1e-5, 1), log_uniform(rng, 0.3, 50), rng.randint(1, 9))),
    lambda rng: releases(
        (log_uniform(rng, 1e-5, 1), log_uniform(rng, 0.3, 50), int(log_uniform(rng, 10, 1e6)))
    ),
    lambda rng: releases(
        *(
            (log_uniform(rng, 1e-4, 1), log_uniform(rng, 0.4, 20), int(log_uniform(rng, 1, 1e5)))
            for _ in range(4)
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(len(SWEEP)))
def test_contour_and_lattice_agree(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines that share only the cells' closed forms never contradict each other."""
    rng = random.Random(100 + kind)
    genuine = certified_interval.integrate_composition
    for _ in range(4):  # thousands more: test_random_grid.py at night
        run, delta = SWEEP[kind](rng), log_uniform(rng, 1e-13, 1e-2)
        bounds = certified_interval.epsilon_bounds(run, delta, 1e-3)
        monkeypatch.setattr(certified_interval, "integrate_composition", _undamped)
        other = certified_interval.epsilon_bounds(run, delta, 2e-2)
        monkeypatch.setattr(certified_interval, "integrate_composition", genuine)
        assert max(bounds.lower, other.lower) <= min(bounds.upper, other.upper), (run, delta)


def _undamped(*_: Any) -> EvaluatedIntegral:
    raise SlowDecayError


# --- what a second reader found in an early version


@pytest.mark.nightly
@pytest.mark.parametrize("delta", [1e-3, nightly(1e-9)])
def test_a_billion_steps_keep_their_digits(delta: float) -> None:
    """numpy's complex log1p is off by an eps of one: the interval was 1 % off, once inverted."""
    parts = [(1e-6, 1.0, 10**9)]
    bounds = certified_interval.epsilon_bounds(releases(*parts), delta, 1e-3)
    tilt = 9.0 if delta < 1e-6 else 20.0

    def exact(epsilon: float) -> oracles.Number:
        return oracles.line_integral_delta(parts, epsilon, tilt, removing=True, digits=14)

    assert exact(bounds.lower) >= delta >= exact(bounds.upper)


@pytest.mark.parametrize(("sigma", "order"), [(1 / 30, -3.0), (0.01, -1.0), (0.01, -5.0)])
def test_moments_of_negative_order_with_little_noise(sigma: float, order: float) -> None:
    """K is about |a|·q; the mean of u, which lies beyond what a double holds, was left out."""
    found = float(sampled_gaussian.log_moments(np.array([order]), 1e-3, sigma)[0])
    # almost surely u = −q; the rest of the mass, where u is astronomic, is of measure nothing
    assert found == pytest.approx(order * math.log1p(-1e-3), rel=1e-6)
    assert found >= order * math.log1p(-1e-3) * (1 - 1e-11)


@pytest.mark.slow
def test_a_moment_near_full_sampling_is_an_upper_bound() -> None:
    q, mu, order = 1 - 1e-12, 6.0, -1.0
    exact = oracles.sampled_gaussian_moment(order, q, 1 / mu)
    found = sampled_gaussian.log_moments(np.array([order]), q, 1 / mu)[0]
    assert float(exact) * (1 - 1e-12) <= found <= float(exact) * (1 + 1e-10)


def test_smoothing_that_overflows_is_refused() -> None:
    run = releases((0.0014708069696008933, 1 / 0.006671157550570104, 1))
    saddle = saddle_point.find_at_delta(run, "removing", math.log(1e-8))
    with pytest.raises(SlowDecayError):
        integrate_composition(
            run, saddle, IntegrationSettings(math.log(1e-6), smoothing=0.0016, work_limit=1 << 24)
        )


def test_a_contradiction_is_never_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EvaluatedIntegral, "epsilon", lambda *_: (2.0, 1.0))
    with pytest.raises(ContradictionError):
        certified_interval.epsilon_bounds(RUN, 1e-5, 1e-3)
