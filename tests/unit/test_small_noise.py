"""Closed forms for little noise: against one integral, other engines, and each term left out."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from accountant_service import mechanisms
from accountant_service.accounting import calculator, solver
from accountant_service.accounting.methods import ACCOUNTANTS
from accountant_service.accounting.methods import pld as pld_accountant
from accountant_service.accounting.solver import Target
from accountant_service.errors import BoundsContradictError
from accountant_service.mechanisms import DpSgd
from accountant_service.numerics import certified_interval
from accountant_service.numerics.engines import small_noise
from accountant_service.numerics.floats.bounds import Bounds
from accountant_service.numerics.laws.dominating_pair import GaussianPair, LaplacePair, Release
from tests.support import oracles
from tests.support.helpers import ADD_OR_REMOVE, log_uniform, run
from tests.support.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("without_memory")  # engines are replaced here


def sampled(rate: float, sigma: float) -> Release:
    return Release(GaussianPair(1 / sigma), rate)


def one_step(epsilon: np.ndarray, q: float, sigma: float, *, removing: bool) -> np.ndarray:
    """δ of one release at any real ε, in closed form."""
    from scipy import special

    with np.errstate(divide="ignore", invalid="ignore"):
        if removing:
            odds = (np.exp(np.minimum(epsilon, 600.0)) - (1 - q)) / q
            z = (0.5 + sigma**2 * np.log(np.maximum(odds, 0.0))) / sigma  # −∞: always
            z = np.where(epsilon > 600, (0.5 + sigma**2 * (epsilon - math.log(q))) / sigma, z)
            lost = (1 - q) * special.ndtr(-z) + q * special.ndtr(1 / sigma - z)
            return lost - np.exp(epsilon + special.log_ndtr(-z))
        epsilon = np.minimum(epsilon, 600.0)
        odds = (np.exp(-epsilon) - (1 - q)) / q
        z = (0.5 + sigma**2 * np.log(np.maximum(odds, 0.0))) / sigma
        mixed = (1 - q) * special.ndtr(z) + q * special.ndtr(z - 1 / sigma)
        return np.where(odds > 0, special.ndtr(z) - np.exp(epsilon) * mixed, 0.0)


def two_steps(epsilon: float, q: float, sigma: float) -> float:
    """δ of two releases: the closed form of one, integrated over the other's outcomes."""
    worst = 0.0
    for removing in (True, False):
        z = np.linspace(-12, 12 + 1 / sigma, 400_001)
        ratio = z / sigma - 0.5 / sigma**2
        loss = np.logaddexp(math.log1p(-q), math.log(q) + ratio)
        weight = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * (z[1] - z[0])
        if removing:
            mixed = (1 - q) * weight + q * np.exp(-0.5 * (z - 1 / sigma) ** 2) / math.sqrt(
                2 * math.pi
            ) * (z[1] - z[0])
            value = mixed @ one_step(epsilon - loss, q, sigma, removing=True)
        else:
            value = weight @ one_step(epsilon + loss, q, sigma, removing=False)
        worst = max(worst, float(value))
    return worst


ONE = pairwise(sigma=[0.01, 0.03, 0.06], q=[1e-4, 0.3, 0.9], delta=[1e-5, 1e-12])


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("case", ONE, ids=str)
def test_one_release(case: dict[str, float]) -> None:
    bounds = small_noise.epsilon_bounds([(sampled(case["q"], case["sigma"]), 1)], case["delta"])
    exact = float(oracles.single_step_epsilon(**case))
    assert bounds is not None
    assert bounds.lower <= exact <= bounds.upper
    assert bounds.upper <= bounds.lower * (1 + 1e-4)


TWO = pairwise(sigma=[0.05, 0.07], q=[0.01, 0.5], share=[0.2, 1.0, 2.5])


@pytest.mark.spread(first=2)
@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_releases(case: dict[str, float]) -> None:
    sigma, q, epsilon = case["sigma"], case["q"], case["share"] * 0.5 / case["sigma"] ** 2
    bounds = small_noise.delta_bounds([(sampled(q, sigma), 2)], epsilon)
    exact = two_steps(epsilon, q, sigma)
    assert bounds is not None
    assert bounds.lower <= exact * (1 + 1e-7)
    assert exact <= bounds.upper * (1 + 1e-7)
    assert bounds.upper <= bounds.lower * 1.01


@pytest.mark.slow
def test_bounds_agree_with_the_other_engines() -> None:
    """`pld` intersects the two, and raises where nothing is left."""
    rng, answered = random.Random(5), 0
    for _ in range(12):
        release = sampled(log_uniform(rng, 1e-4, 0.9), log_uniform(rng, 0.06, 0.12))
        releases = [(release, rng.randint(1, 2000)), (sampled(1.0, rng.uniform(0.5, 5.0)), 1)]
        delta = log_uniform(rng, 1e-10, 1e-3)
        closed = small_noise.epsilon_bounds(releases, delta)
        if closed is None:
            continue
        answered += 1
        other = certified_interval.epsilon_bounds(releases, delta, 1e-3)
        assert closed.lower <= other.upper
        assert other.lower <= closed.upper
    assert answered >= 4


def test_no_bounds_are_returned_outside_the_range_of_validity() -> None:
    assert small_noise.epsilon_bounds([(sampled(0.01, 1.0), 10)], 1e-5) is None
    assert small_noise.epsilon_bounds([(sampled(1.0, 0.02), 10)], 1e-5) is None
    laplace = Release(LaplacePair(50.0), 0.1)
    assert small_noise.delta_bounds([(sampled(0.01, 0.02), 10), (laplace, 1)], 1.0) is None


# --- each outward term: with it the bounds hold, without it they do not

LOOSE = {"_AMBIGUOUS_MAX": 1e3, "_AMBIGUOUS_RELEASES_MAX": 40}
POINTS = [(q, share * 12.5) for q in (0.02, 0.3, 0.7) for share in (0.02, 0.5, 1.5)]


def encloses(sigma: float = 0.2) -> bool:
    """Return whether the bounds for two releases enclose the exact values at all points."""
    for q, epsilon in POINTS:
        bounds = small_noise.delta_bounds([(sampled(q, sigma), 2)], epsilon)
        assert bounds is not None
        exact = two_steps(epsilon, q, sigma)
        if not bounds.lower * (1 - 1e-7) <= exact <= bounds.upper * (1 + 1e-7):
            return False
    return True


@pytest.mark.slow
def test_the_term_of_ambiguous_releases_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (LOOSE | {"_MARGINS": (9.0,)}).items():
        # private: margins at which the term shows
        monkeypatch.setattr(small_noise, name, value)
    assert encloses()
    # private: the term is left out to show that it is needed
    monkeypatch.setattr(small_noise._SampledReleases, "expected_ambiguous", lambda *_: 0.0)
    assert not encloses()


@pytest.mark.slow
def test_the_slack_of_the_approximate_loss_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a wide middle left out of account, l is above its approximation by up to log 2."""
    for name, value in (LOOSE | {"_MARGINS": (-0.6,)}).items():
        # private: margins at which the term shows
        monkeypatch.setattr(small_noise, name, value)
    assert encloses()
    # private: the term is left out to show that it is needed
    monkeypatch.setattr(small_noise._SmallNoiseProfile, "_loss_error", property(lambda _: 0.0))
    assert not encloses()


def test_records_taken_for_present(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding, with a small slack: outcomes that are taken for present are left out."""
    of = small_noise._SampledReleases(np.array([1.0]), np.array([0.6]), np.array([2.0]))
    counts = small_noise._enumerate_participations(of, 0.0, -700.0)
    assert counts is not None
    profile = small_noise._SmallNoiseProfile(of, counts, 0.0, 1.0)
    exact = max(
        float(oracles.single_step_delta(0.0, 0.6, 0.5, removing=removing))
        for removing in (True, False)
    )
    assert profile.log_lower(0.0) <= math.log(exact)
    nothing = np.full(1, -math.inf)
    # private: the term is left out to show that it is needed
    monkeypatch.setattr(small_noise._SampledReleases, "log_false_presence", lambda *_: nothing)
    assert profile.log_lower(0.0) > math.log(exact)


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_rounding_of_arguments(side: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ε − o(k) is off by a share of 1e-6 of its terms, inward."""
    counts = small_noise._enumerate_participations(
        small_noise._SampledReleases(np.array([50.0]), np.array([0.1]), np.array([8.0])),
        0.0,
        -700.0,
    )
    assert counts is not None
    exact = counts.log_mixture_delta(200.0, 0.0)
    genuine = small_noise._log_gaussian_delta
    # private: the rounding that is covered is made here
    monkeypatch.setattr(
        small_noise,
        "_log_gaussian_delta",
        lambda at, mu: genuine(at - side * 0.9e-6 * (200.0 + np.abs(counts.offsets) + mu**2), mu),
    )

    def holds() -> bool:
        off = counts.log_mixture_delta(200.0, side)
        return off <= exact if side > 0 else off >= exact

    assert not holds()
    # private: the rounding that is covered is made here
    monkeypatch.setattr(small_noise, "_ARGUMENT_ROUNDING", 1e-6)
    assert holds()


def test_the_counts_outside_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    # private: counts are left out that no answer would miss
    monkeypatch.setattr(small_noise, "_LOG_TAIL_MIN", -1.0)
    releases = [(sampled(0.5, 0.02), 200)]
    bounds = small_noise.delta_bounds(releases, 130_000.0)
    monkeypatch.undo()
    exact = small_noise.delta_bounds(releases, 130_000.0)
    assert bounds is not None
    assert exact is not None
    assert bounds.lower <= exact.lower <= exact.upper <= bounds.upper
    assert bounds.upper - 2 * math.exp(-1.0) < exact.lower


# --- what is answered


@pytest.mark.parametrize("sigma", [0.01, 0.03, 0.05])
def test_little_noise_is_enclosed_narrowly(sigma: float) -> None:
    for q, steps in ((0.01, 1000), (1e-4, 1000), (0.5, 3), (0.01, 100_000)):
        found = calculator.epsilon(mechanisms.from_json(run(q, sigma, steps)), 1e-5, tolerance=1e-7)
        assert found.certified is not None
        assert found.certified.upper <= found.certified.lower * (1 + 1e-7)
        assert found.warnings == ()


def test_a_wide_interval_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = mechanisms.from_json(run(0.01, 1.0, 1000))
    monkeypatch.setattr(
        pld_accountant.certified_interval, "epsilon_bounds", lambda *_: Bounds(1.0, 2.0)
    )
    text = "the proved interval is wider than a relative 0.001"
    for method in ("pld", "subsampled_rdp"):
        found = calculator.epsilon(wide, 1e-5, method)
        assert len(found.warnings) == 1
        assert found.warnings[0].startswith(text)


def test_disjoint_intervals_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    described = mechanisms.from_json(run(0.01, 0.1, 1000))
    monkeypatch.setattr(
        pld_accountant.certified_interval, "epsilon_bounds", lambda *_: Bounds(1.0, 2.0)
    )
    monkeypatch.setattr(small_noise, "epsilon_bounds", lambda *_: Bounds(3.0, 4.0))
    with pytest.raises(BoundsContradictError):
        calculator.epsilon(described, 1e-5)


# --- step counts


def test_a_step_whose_interval_contains_the_target_is_computed_more_finely() -> None:
    plan = DpSgd(20.0, sample_rate=0.001, steps=1)
    target = Target(ACCOUNTANTS["pld"], ADD_OR_REMOVE, 1.0, 1e-6)
    found = solver.steps(plan, target)
    assert found.value == 22_382_666
    assert found.undecided is None
    assert found.next is not None
    assert found.next.certified is not None
    assert found.guarantee.epsilon <= 1.0 < found.next.certified.lower


def test_a_step_that_stays_undecided_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    # private: no known question stays undecided
    monkeypatch.setattr(solver, "_FINER_TOLERANCES", ())
    plan = DpSgd(20.0, sample_rate=0.001, steps=1)
    target = Target(ACCOUNTANTS["pld"], ADD_OR_REMOVE, 1.0, 1e-6)
    found = solver.steps(plan, target)
    assert found.next is not None
    assert found.next.certified is not None
    assert found.next.certified.lower <= 1.0 < found.next.certified.upper
    assert found.undecided is not None
    assert found.undecided == pytest.approx(
        max(1.0 - found.next.certified.lower, found.next.certified.upper - 1.0)
    )
    assert found.undecided < 1e-5


def test_a_bound_from_above_is_not_called_undecided() -> None:
    plan = DpSgd(2.0, sample_rate=0.1, steps=1, sampling="shuffled")
    target = Target(ACCOUNTANTS["pld"], solver.NeighbouringRelation.ZERO_OUT_ONE, 3.0, 1e-5)
    found = solver.steps(plan, target)
    assert found.undecided is None
    assert found.next is not None
    assert found.guarantee.epsilon <= 3.0 < found.next.epsilon
