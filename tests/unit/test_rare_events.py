"""The division into common, rare and extreme outcomes, against exact values; and its mutations."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from scipy import integrate, special

from accountant_service.numerics.engines import rare_events
from accountant_service.numerics.engines.line_integral import (
    EvaluatedIntegral,
    IntegrationSettings,
)
from accountant_service.numerics.engines.saddle_point import SaddlePoint
from accountant_service.numerics.errors import SlowDecayError
from accountant_service.numerics.floats.special_functions import log1p_complex
from accountant_service.numerics.laws import gaussian, windowed_loss
from accountant_service.numerics.laws.dominating_pair import Composition, GaussianPair, Release
from accountant_service.numerics.laws.sampled_gaussian import privacy_loss
from accountant_service.numerics.laws.windowed_loss import Window, WindowedLoss
from tests.support import oracles
from tests.support.helpers import log_uniform, releases

pytestmark = pytest.mark.usefixtures("without_memory")  # engines are replaced here

EFFORT = IntegrationSettings(math.log(1e-6), 0.0, 1 << 22)


def aimed(epsilon: float, delta: float) -> SaddlePoint:
    nothing = np.zeros(0)
    return SaddlePoint("removing", 1.0, epsilon, math.log(delta), epsilon, nothing, nothing)


def traced(
    run: Composition, epsilon: float, delta: float, settings: IntegrationSettings = EFFORT
) -> EvaluatedIntegral:
    return rare_events.integrate_rare_events(run, aimed(epsilon, delta), settings)


def bounds(run: Composition, epsilon: float, delta: float) -> tuple[float, float]:
    lower, upper = traced(run, epsilon, delta).delta(np.array([epsilon]))
    return float(lower[0]), float(upper[0])


def beside(q: float, sigma: float, epsilon: float, rest: Callable[[float], float]) -> float:
    """δ(ε) of one sampled release and others whose δ at any real ε is `rest`."""

    def integrand(z: float) -> float:
        loss = math.log1p(q * math.expm1(z / sigma - 0.5 / sigma**2))
        return math.exp(loss - 0.5 * z * z) / math.sqrt(2 * math.pi) * rest(epsilon - loss)

    points = list(np.linspace(-10.0, 12.0 + 1 / sigma, 45))
    pieces = itertools.pairwise(points)
    return math.fsum(
        integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-11, limit=200)[0] for a, b in pieces
    )


def single(epsilon: float, q: float, sigma: float) -> float:
    """δ of one sampled release at any real ε."""
    if epsilon <= math.log1p(-q):
        return -math.expm1(epsilon)
    return float(oracles.single_step_delta(epsilon, q, sigma, removing=True))


@pytest.mark.slow
def test_one_release_has_a_closed_form() -> None:
    rng, answered = random.Random(31), 0
    for _ in range(60):
        q, sigma = log_uniform(rng, 1e-6, 0.05), log_uniform(rng, 0.35, 8)
        epsilon = log_uniform(rng, 0.01, 4)
        exact = single(epsilon, q, sigma)
        if exact < 1e-35:
            continue
        try:
            lower, upper = bounds(releases((q, sigma, 1)), epsilon, exact)
        except SlowDecayError:
            continue
        answered += 1
        assert lower <= exact * (1 + 1e-11), (q, sigma, epsilon)
        assert upper >= exact * (1 - 1e-11), (q, sigma, epsilon)
        assert upper - lower < 1e-3 * exact, (q, sigma, epsilon)
    assert answered > 12


def test_two_releases_are_one_integral() -> None:
    for (q, sigma), (p, rho), epsilon in [
        ((3e-4, 1.2), (2e-3, 2.0), 0.1),  # two alike: RUN, below
    ]:
        run = releases((q, sigma, 1), (p, rho, 1))
        exact = beside(q, sigma, epsilon, lambda rest, p=p, rho=rho: single(rest, p, rho))
        lower, upper = bounds(run, epsilon, exact)
        assert lower <= exact * (1 + 1e-9)
        assert upper >= exact * (1 - 1e-9)
        assert upper - lower < 1e-3 * exact


def test_a_rare_release_beside_a_whole_one() -> None:
    q, sigma, mu, epsilon = 1e-4, 0.6, 0.05, 1.2
    run = [*releases((q, sigma, 1)), (Release(GaussianPair(mu)), 4)]

    def whole(rest: float) -> float:
        if rest < 0:  # δ(−ε) = 1 − e^{−ε} + e^{−ε}·δ(ε)
            return -math.expm1(rest) + math.exp(rest) * whole(-rest)
        return math.exp(float(gaussian.log_delta(np.array([rest]), 2 * mu)[0]))

    exact = beside(q, sigma, epsilon, whole)
    lower, upper = bounds(run, epsilon, exact)
    assert lower <= exact * (1 + 1e-9)
    assert upper >= exact * (1 - 1e-9)
    assert upper - lower < 1e-3 * exact


RUN, EPSILON = releases((1e-4, 0.7, 2)), 0.5


@pytest.fixture(scope="module")
def exact() -> float:
    return beside(1e-4, 0.7, EPSILON, lambda rest: single(rest, 1e-4, 0.7))


# --- outward terms: the bounds hold with each, and not without (tests/mutants)


def all_outcomes_are_extreme(patch: pytest.MonkeyPatch) -> None:
    """Let most of δ come from beyond the top."""
    # private: the engine chooses so well that what it sets aside does not show
    patch.setattr(rare_events._ApproximateLaws, "estimate_top", lambda *_: EPSILON)


def half_of_all_is_common(patch: pytest.MonkeyPatch) -> None:
    genuine = rare_events._OutcomeDivision.at
    # private: the engine chooses so well that what it sets aside does not show
    patch.setattr(rare_events._ApproximateLaws, "log_chernoff", lambda *_: -math.inf)
    # private: the engine chooses so well that what it sets aside does not show
    patch.setattr(
        rare_events._OutcomeDivision,
        "at",
        lambda split, top: genuine(EPSILON if split else 0.0, top),
    )


def few_nodes(patch: pytest.MonkeyPatch) -> None:
    # private: the engine chooses so well that what it sets aside does not show
    patch.setattr(windowed_loss, "_LOG_ERROR", 0.0)


def wrong_factors(patch: pytest.MonkeyPatch) -> None:
    """Let every factor be as far off as it states."""
    genuine, size = rare_events._LaplaceTransform.with_scale_error, 1e-4

    def off(*args: Any) -> Any:
        found = genuine(*args)
        moved = found.phi_minus_one - size * (1 + found.phi_minus_one)
        return replace(found, phi_minus_one=moved, error=found.error + size)

    # private: the engine chooses so well that what it sets aside does not show
    patch.setattr(rare_events._LaplaceTransform, "with_scale_error", off)


@pytest.mark.parametrize(
    "fault", [all_outcomes_are_extreme, half_of_all_is_common, few_nodes, wrong_factors]
)
def test_outcomes_set_aside_are_within_the_bounds(
    fault: Callable[[pytest.MonkeyPatch], None], exact: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault is far larger than what the engine's own choices leave."""
    fault(monkeypatch)
    lower, upper = bounds(RUN, EPSILON, exact)
    assert lower <= exact <= upper
    assert upper > lower * (1 + 1e-5)


# --- the bounds on shifted lines

CASES = [
    (1e-4, 1.5, (Window(0.02, 0.002, 1), Window(0.3, 0.02, -1))),
    (1e-4, 1.5, (Window(0.02, 0.002, -1), Window(0.3, 0.02, -1))),
    (0.01, 0.3, (Window(0.05, 0.005, -1),)),
    (0.3, 0.8, (Window(1.0, 0.07, 1),)),
    (1.0, 0.2, (Window(0.1, 0.01, 1), Window(0.9, 0.06, -1))),
]


def integrand(
    law: tuple[float, float, tuple[Window, ...]], order: complex, points: Any
) -> np.ndarray[Any, Any]:
    """n(z)·e^{a·l}·Π windows at complex points, by the complex error function."""
    q, mu, windows = law
    loss = log1p_complex(q * np.expm1(np.asarray(mu * points - 0.5 * mu * mu, complex)))
    value = np.exp(-0.5 * points * points + order * loss) / math.sqrt(2 * math.pi)
    for window in windows:
        value = value * special.ndtr(window.sign * (loss - window.edge) / window.width)
    return np.asarray(value)


@pytest.mark.spread(second=2)
@pytest.mark.parametrize(
    ("law", "order"),
    [
        pytest.param(law, order, marks=pytest.mark.slow if each else pytest.mark.nightly)
        for (at, law), (of, order) in itertools.product(
            enumerate(CASES), enumerate((1.0, 12.0, 30.0))
        )
        for each in [at % 3 == of]
    ],
)
def test_bounds_on_lines_hold(law: Any, order: float) -> None:
    """Decay, quadrature and moments against fine sums, on the real line and on shifted ones."""
    q, mu, windows = law
    seen = WindowedLoss(q, mu, windows, 100.0)
    step = 2.0**-13
    z = np.arange(-14.0, min(seen._high + 4, 40.0), step)
    frequencies = np.array([0.5, 8.0, 60.0, 400.0])
    decay = seen.log_decay(order, frequencies)
    for v, bound in zip(frequencies, decay, strict=True):
        moment = abs(integrand(law, order + 1j * v, z).sum() * step)
        assert (
            math.log(moment + 1e-300) <= bound + 1e-6
            or moment < 1e-13 * np.abs(integrand(law, order, z)).sum() * step
        )
    growth = seen._log_line_integrals(np.array([order]), 60.0)[0]
    for height, bound in list(zip(seen._heights, growth, strict=True))[::4]:
        if height * mu > 0.5:
            continue
        line = np.abs(integrand(law, order + 60j, z - 1j * height)).sum() * step
        assert math.log(line) <= bound + 1e-9
    moment = integrand(law, order, z).real.sum() * step
    upper = float(seen.log_moments(np.array([order]))[0])
    assert 0 <= upper - math.log(moment) < 1e-9
    nodes = seen.trapezoidal_rule(order, 60.0)
    phi_minus_one, error = nodes.characteristic(np.array([0.5, 8.0, 60.0]))
    for at, v in enumerate((0.5, 8.0, 60.0)):
        wanted = integrand(law, order + 1j * v, z).sum() * step
        found = math.exp(nodes.log_moment) * (1 + phi_minus_one[at])
        assert abs(found - wanted) <= math.exp(nodes.log_moment) * (error[at] + 1e-12)


def test_a_complex_window_is_within_its_bound() -> None:
    """|Φ(u + it)| by 30 digits."""
    rng = random.Random(5)
    window = Window(0.0, 1.0, 1)
    for _ in range(300):
        u, t, spread = rng.uniform(-8, 8), rng.uniform(0, 6), rng.uniform(0, 0.5)
        with mp.workdps(30):
            value = abs(mp.erfc(-mp.mpc(u, rng.uniform(0, 1) * t) / mp.sqrt(2)) / 2)
        low, high = np.array([u - spread]), np.array([u + spread * rng.random()])
        assert mp.log(value) <= float(window.log_weight_bound(low, high, np.array([t]))[0]) + 1e-12


def test_losses_grow_to_the_right_on_every_line() -> None:
    law = WindowedLoss(1e-3, 1.3, (), 1.0)
    z = np.linspace(-10, 20, 3001)
    loss, angle = law._complex_loss(z, np.array([0.01, 0.4, 0.5 * math.pi / 1.3]))
    wanted = np.log(1 - 1e-3 + 1e-3 * np.exp(1.3 * (z + 0.4j) - 0.845))
    assert np.allclose(loss[1], wanted.real, rtol=1e-9, atol=1e-15)
    assert np.allclose(angle[1], wanted.imag, rtol=1e-9, atol=1e-15)
    assert (np.diff(loss) >= -1e-15).all()
    assert (np.diff(angle) >= 0).all()
    slope = np.diff(angle[1]) / np.maximum(np.diff(loss[1]), 1e-300)
    assert np.allclose(slope[2000:], np.tan(0.52 - angle[1][2000:-1]), rtol=0.05, atol=1e-3)


def test_cases_beyond_the_engine_are_left_to_other_engines() -> None:
    with pytest.raises(SlowDecayError):
        rare_events.integrate_rare_events(
            RUN, replace(aimed(0.1, 1e-9), direction="adding"), EFFORT
        )
    with pytest.raises(SlowDecayError):
        traced(RUN, 0.0, 1e-9)


def test_many_events_need_no_common_ones() -> None:
    """If Tq is about 1 and ε takes several events, only extreme outcomes are set aside."""
    found = traced(releases((2e-3, 1.8, 900)), 0.28, 2.7e-15)
    assert not len(found.omitted.tilts)
    lower, upper = found.epsilon(2.7e-15, 1.0)
    assert 0.27 < lower < upper < lower * (1 + 1e-4)
    exact = oracles.double_line_integral_delta([(2e-3, 1.8, 900)], upper, removing=True)
    assert exact is None or exact <= 2.7e-15


def test_privacy_loss_without_sampling_is_that_of_the_release() -> None:
    ratio = np.linspace(-50, 50, 11)
    assert (privacy_loss(ratio, 1.0) == ratio).all()
