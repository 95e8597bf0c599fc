"""Every outward error term of the engines covers the error that it is there for.

Where rounding shows in double precision, a value is compared with exact arithmetic. Elsewhere a
stand-in for a part of an engine is off by nearly as much as one term allows, in arithmetic with a
large machine epsilon, and the bounds must hold. `tests/mutants/table.toml` removes each term in
turn: the test that it names must then fail, so each term is needed and in the right place.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from fractions import Fraction
from types import ModuleType
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from scipy import stats

from accountant_service.numerics.engines import fft_lattice, line_integral, rare_events
from accountant_service.numerics.engines.line_integral import IntegrandValues, IntegrationLine
from accountant_service.numerics.floats.convolution import LatticeMasses, convolve
from accountant_service.numerics.laws import characteristic_function, gaussian, windowed_loss
from accountant_service.numerics.laws.characteristic_function import (
    CellPairs,
    CharacteristicValues,
    MomentIntegrand,
    TrapezoidalRule,
    exponent_error,
    trapezoidal_rule,
)
from accountant_service.numerics.laws.discrete_pairs import ApproximatePair
from accountant_service.numerics.laws.dominating_pair import GaussianPair, LossCells, Release
from accountant_service.numerics.laws.windowed_loss import Window, WindowedLoss
from tests.support import oracles
from tests.support.helpers import log_uniform

Patch = pytest.MonkeyPatch
EPS = float(np.finfo(float).eps)
FREQUENCIES = np.array([0.5, 8.0, 60.0])


def set_epsilon(patch: Patch, module: ModuleType, epsilon: float) -> None:
    """Let a module assume arithmetic with this machine epsilon."""
    # private: double precision is too good for a missing term to show at the bounds
    patch.setattr(module, "_EPS", epsilon)


# --- weights and moments of one release


@pytest.mark.parametrize("loss_error", [0.0, 1e-6])
def test_an_exponent_is_within_its_error(loss_error: float) -> None:
    """The product order·loss is rounded, and the loss is off."""
    rng = random.Random(1)
    for _ in range(50):
        order, loss = rng.uniform(-9, 9), rng.uniform(-3, 3)
        exact = Fraction(order) * (Fraction(loss) + Fraction(loss_error))
        stated = exponent_error(order, np.array([loss]), np.array([loss_error]))
        assert abs(Fraction(order * loss) - exact) <= Fraction(float(stated[0]))


def test_a_normal_density_is_within_its_error() -> None:
    z = np.linspace(-13.0, 13.0, 101) / 3
    integrand = MomentIntegrand(z, 0.1, 0 * z, 0 * z)
    for value, at, error in zip(np.exp(integrand.exponent), z, integrand.normal_error, strict=True):
        assert abs(mp.mpf(float(value)) / mp.exp(-(mp.mpf(float(at)) ** 2) / 2) - 1) <= error


@pytest.mark.parametrize("loss_error", [0.0, 1e-8])
@pytest.mark.parametrize("window", [Window(0.0, 1.0, 1), Window(0.3, 0.02, -1)])
def test_a_window_is_within_its_error(window: Window, loss_error: float) -> None:
    """A window is rounded, and evaluated at a loss that is off."""
    for u in np.linspace(-8.0, 8.0, 65):
        loss = np.array([window.edge + u * window.width])
        found = float(window.log_weight(loss)[0])
        exact = window.sign * (mp.mpf(float(loss[0])) + loss_error - window.edge) / window.width
        stated = float(window.relative_error(loss, np.array([loss_error]))[0])
        assert abs(mp.mpf(found) - mp.log(mp.ncdf(exact))) <= stated


@pytest.mark.parametrize(
    ("order", "growth_error", "epsilon", "fault"),
    [(20.0, 1e-6, EPS, 0.99e-6), (20.0, 0.0, 1e-7, 2200e-7), (1e-3, 1e-6, EPS, 0.99e-6)],
    ids=["growth", "rounding", "growth near 1"],
)
def test_a_moment_of_wrong_weights_is_within_its_error(
    monkeypatch: Patch, order: float, growth_error: float, epsilon: float, fault: float
) -> None:
    """E[e^{az}] = e^{a²/2}, where every weight is off by the same share."""
    set_epsilon(monkeypatch, characteristic_function, epsilon)
    z = np.arange(-14.0, 34.0, 0.125)
    off = MomentIntegrand(z, 0.125, order * z + fault, np.full_like(z, growth_error))
    found = trapezoidal_rule(off, z, 0 * z, -math.inf)
    assert abs(found.log_moment - order**2 / 2) <= found.moment_error


def test_a_moment_near_one_counts_the_error_of_the_rule_on_the_normal_density() -> None:
    """∫ n·e^growth = 1 is integrated well, and n itself badly, with so wide a spacing."""
    z = np.arange(-30.0, 31.0, 2.0)
    integrand = MomentIntegrand(z, 2.0, 0.25 * z * z - 0.5 * math.log(2), 0 * z)
    moment_minus_one, error = integrand.moment_minus_one()
    assert 1e-3 < abs(moment_minus_one) <= error


@pytest.mark.parametrize(
    ("loss_off", "weight_off"), [(1e-6, 0.0), (0.0, 1e-3)], ids=["losses", "weights"]
)
def test_a_characteristic_function_is_within_its_error(loss_off: float, weight_off: float) -> None:
    """All losses are off, or the weight at loss 0, which counts only in the sum of weights."""
    weight, loss = np.array([0.5, 0.5]), np.array([0.0, 1.0])
    relative_error = np.array([weight_off, 0.0])
    rule = TrapezoidalRule(weight, loss, relative_error, loss_off, 0.0, 0.0, 0.0)
    found, error = rule.characteristic(FREQUENCIES)
    first = 0.5 * (1 + weight_off)
    phases = np.exp(1j * np.outer(FREQUENCIES, loss + loss_off))
    exact = phases @ np.array([first, 0.5]) / (first + 0.5) - 1
    assert (np.abs(found - exact) <= error).all()


def test_an_unnormalised_characteristic_function_counts_the_error_of_the_mass() -> None:
    off = np.full(2, 1e-4)
    rule = TrapezoidalRule(np.array([0.5, 0.5]), np.array([0.0, 1.0]), off, 0.0, 0.0, 0.0, 0.0)
    at = np.array([0.0, 1e-6])
    found, error = rule.unnormalised_characteristic(at)
    assert (np.abs(found - ((1 + found) * (1 + 1e-4) - 1)) <= error).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_moment_counts_the_tail_beyond_its_limits(monkeypatch: Patch, side: str) -> None:
    """With a limit two standard deviations out, the tail is a share of the moment."""
    order = 1.0 if side == "left" else 3.0
    exact = WindowedLoss(0.3, 0.2, (), 3.0).trapezoidal_rule(order, 1.0).log_moment
    # private: no law has limits at which a tail shows, and both moments would otherwise show it
    monkeypatch.setattr(characteristic_function, "_SMALL_MOMENT", -1.0)
    if side == "right":
        for module in (windowed_loss, windowed_loss.sampled_gaussian):
            monkeypatch.setattr(module, "_TAIL_DEVIATIONS", 2.0)  # private: as above
    law = WindowedLoss(0.3, 0.2, (), 3.0)
    law._low = -2.0 if side == "left" else -13.0
    found = law.trapezoidal_rule(order, 1.0)
    assert abs(found.log_moment - exact) <= -math.log1p(-min(found.moment_error, 0.99))


def common_moment(q: float, mu: float, edge: float, order: float) -> Any:
    """Return log K(order) with one closing window of a tenth of its edge, to 30 digits."""

    def moment_minus_one(z: Any) -> Any:
        loss = mp.log1p(mp.mpf(q) * mp.expm1(mp.mpf(mu) * z - mp.mpf(mu) ** 2 / 2))
        window = mp.erfc((loss - mp.mpf(edge)) / (mp.mpf(0.1 * edge) * mp.sqrt(2))) / 2
        return mp.npdf(z) * (mp.exp(mp.mpf(order) * loss) * window - 1)

    with mp.workdps(32):
        step = mp.mpf(1) / 64
        return mp.log1p(
            step * mp.fsum(moment_minus_one(k * step) for k in range(-13 * 64, 13 * 64))
        )


@pytest.mark.parametrize("seed", [11, *(pytest.param(s, marks=pytest.mark.slow) for s in (12, 13))])
def test_a_moment_is_as_exact_as_it_states(seed: int) -> None:
    """Against 30 digits, where K is near 1 and T is a billion."""
    rng = random.Random(seed)
    q, mu = log_uniform(rng, 1e-10, 1e-6), log_uniform(rng, 0.8, 3.2)
    edge, order = log_uniform(rng, 0.02, 0.5), log_uniform(rng, 1.5, 20)
    law = WindowedLoss(q, mu, (Window(edge, 0.1 * edge, -1),), 40.0)
    found = law.trapezoidal_rule(order, 10.0)
    exact = common_moment(q, mu, edge, order)
    assert abs(float(exact - mp.mpf(found.log_moment))) <= found.moment_error
    assert found.moment_error < 1e-16 + 1e-12 * abs(found.log_moment)


def test_a_moment_near_one_counts_the_density_beyond_the_last_node() -> None:
    """A window that closes near the mode: beyond it n counts, and e^growth does not."""
    law = WindowedLoss(0.1, 2.0, (Window(0.05, 0.005, -1),), 10.0)
    assert law._high < 3
    found = law.trapezoidal_rule(2.0, 1.0)
    fine = np.arange(-14.0, 14.0, 2.0**-12)
    loss = np.log1p(0.1 * np.expm1(2.0 * fine - 2.0))
    weight = np.exp(2.0 * loss - 0.5 * fine**2 + Window(0.05, 0.005, -1).log_weight(loss))
    exact = math.log(2.0**-12 * math.fsum(weight) / math.sqrt(2 * math.pi))
    assert found.moment_error < 1e-12
    assert abs(found.log_moment - exact) < found.moment_error + 1e-13


def test_a_moment_of_a_hundred_thousand_nodes() -> None:
    """The nodes beyond the last window were stepped by a rounded spacing: 5 times the error."""
    edge = 4.0915073371871726e-05
    windows = (Window(edge, 0.1 * edge, -1), Window(2 * edge, 0.14 * edge, -1))
    order = 28.345020488910894
    law = WindowedLoss(0.005819331240093667, 1 / 0.47017073846520147, windows, order)
    fine, coarse = (law.trapezoidal_rule(order, top) for top in (1878129.568292951, 1000.0))
    assert abs(fine.log_moment - coarse.log_moment) <= fine.moment_error + coarse.moment_error


@pytest.mark.parametrize("spacing", [0.3, 1 / 3, 2.34e-4, math.pi])
def test_nodes_are_exact_multiples(spacing: float) -> None:
    rounded = characteristic_function.round_spacing(spacing)
    assert spacing * (1 - 2e-7) < rounded <= spacing
    z = characteristic_function.exact_multiples(rounded, -13.0, 400.0)
    assert z[0] <= -13.0
    assert z[-1] >= 400.0
    assert (np.diff(z) == rounded).all()
    assert all(Fraction(value) % Fraction(rounded) == 0 for value in z[:: max(1, len(z) // 50)])


def test_the_decay_counts_the_rounding_of_distances(monkeypatch: Patch) -> None:
    """Two atoms a distance of 1 apart, seen a thousandth further apart."""
    set_epsilon(monkeypatch, characteristic_function, 1e-3 / 8)
    loss, mass = np.array([0.0, 1e-12, 1.0, 1.0 + 1e-12]) * 1.0009, np.array([0.5, 0.0, 0.5])
    low = np.array([0.05, 0.1, 0.2])
    bound = CellPairs(loss, mass).log_decay(low, low * (1 + 1e-9))
    assert (bound >= np.log(np.cos(0.5 * low))).all()


# --- the product of characteristic functions


@dataclass(frozen=True)
class OffLoss:
    """A tilted loss whose φ and moment are off, by more than it states or by as much."""

    log_value: complex
    value_off: float = 0.0  # relative, of log φ
    moment_off: float = 0.0
    moment_error: float = 0.0
    error: float = 0.0

    def characteristic(self, frequencies: Any) -> CharacteristicValues:
        log_value = np.full(len(frequencies), self.log_value * (1 + self.value_off))
        error = np.full(len(frequencies), self.error)
        return CharacteristicValues(log_value, error, 0.5 + self.moment_off, self.moment_error)


@pytest.mark.parametrize(
    "off",
    [
        OffLoss(-1e-3 + 0.01j, value_off=5.9e-6),
        OffLoss(-1e-3 + 0.01j, value_off=-5.9e-6),
        OffLoss(0j, moment_off=1.45e-6),
        OffLoss(0j, moment_off=1e-4, moment_error=1e-4),
    ],
    ids=["power", "power down", "moment", "stated"],
)
def test_a_composition_of_wrong_values_is_within_its_error(monkeypatch: Patch, off: Any) -> None:
    set_epsilon(monkeypatch, line_integral, 1e-6)
    found = line_integral.CompositionIntegrand([(off, 40)]).values(np.zeros(1))
    assert abs(found.value[0] - np.exp(40 * off.log_value)) <= found.error[0]
    assert abs(found.log_scale - 40 * 0.5) <= found.log_scale_error


@pytest.mark.parametrize("rise", [1e-9, 1e-3, 0.5, 2.0, 30.0, -1e-9, -1e-3, -0.5, -2.0])
def test_a_value_far_off_is_covered(rise: float) -> None:
    """|Φ| ≤ 1, whatever is computed: φ(0) = 1 is computed as e^rise."""
    off: Any = OffLoss(complex(rise), error=abs(math.exp(rise) - 1))
    found = line_integral.CompositionIntegrand([(off, 40)]).values(np.zeros(1))
    assert abs(found.value[0] - 1) <= found.error[0] * (1 + 1e-6)
    assert abs(found.value[0]) <= 1
    assert found.largest[0] >= 1 - 1e-12


# --- the sum along the line: Gaussian releases in closed form


@dataclass(frozen=True)
class OffIntegrand:
    """Φ of a Gaussian release, off by a share of it and of its scale that it does not state."""

    mu: float = 1.0
    tilt: float = 1.0
    share: tuple[float, float] = (0.0, 0.0)  # constant, and for each frequency
    scale: tuple[float, float] = (0.0, 0.0)  # constant, and relative to the log of the scale
    scale_error: float = 0.0

    @property
    def standard_deviation(self) -> float:
        return self.mu

    def log_decay(self, edges: Any) -> Any:
        return -0.5 * (edges * self.mu) ** 2

    def count_nodes(self, _: float) -> float:
        return 1.0

    def values(self, frequencies: Any) -> IntegrandValues:
        log_phi = 1j * frequencies * (self.tilt + 0.5) * self.mu**2 + self.log_decay(frequencies)
        value = np.exp(log_phi) * (1 + self.share[0] + self.share[1] * len(frequencies))
        scale = 0.5 * self.tilt * (self.tilt + 1) * self.mu**2
        found = np.array(scale + self.scale[0] + self.scale[1] * scale)
        largest, error = np.abs(np.exp(log_phi)), np.array(self.scale_error)
        return IntegrandValues(value, largest, 0 * frequencies, found, error)


def line_at(tilt: float, mu: float, **changes: Any) -> IntegrationLine:
    """Return a line with aliases and omitted frequencies that do not show."""
    higher = tilt * np.geomspace(1.01, 30, 80)
    line = IntegrationLine(
        tilt, 60.0 * (1 + mu), 0.0, 0.0, -36.0, 0.0, higher, 0.5 * higher * (higher + 1) * mu**2
    )
    return replace(line, **changes)


def integrate(off: OffIntegrand, **changes: Any) -> line_integral.EvaluatedIntegral:
    return line_integral.integrate_along_line(off, line_at(off.tilt, off.mu, **changes), 1e9)


def assert_holds(
    found: line_integral.EvaluatedIntegral, mu: float, epsilon: float, reads: str
) -> None:
    """Check the bounds on δ(ε), or on the rates of the attack at ε, against closed forms."""
    at = np.array([epsilon])
    if reads == "delta":
        lower, upper = found.delta(at)
        assert lower[0] <= math.exp(float(gaussian.log_delta(at, mu)[0])) <= upper[0]
        return
    false_positives, true_positives = found.attack_rates(at)
    assert true_positives[0] <= stats.norm.sf(epsilon / mu - mu / 2) * (1 + 1e-9)
    assert false_positives[0] >= stats.norm.sf(epsilon / mu + mu / 2) * (1 - 1e-9)


@pytest.mark.parametrize("reads", ["delta", "attack"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("epsilon", "mu", "at", "threshold", "off"),
    [
        (1e-6, 1.0, 1.0, 0.0, OffIntegrand(share=(20e-6, 1e-6))),
        (1e-6, 1.0, 1.0, 50.0, OffIntegrand(share=(700e-6, 0.0))),
        (1e-8, 30.0, 900.0, 0.0, OffIntegrand(scale=(1200e-8, 4e-8))),
        (EPS, 1.0, 1.0, 0.0, OffIntegrand(scale=(0.99e-3, 0.0), scale_error=1e-3)),
    ],
    ids=["sum", "kernels", "exponents", "stated"],
)
def test_a_sum_of_wrong_terms_is_within_its_error(
    monkeypatch: Patch,
    epsilon: float,
    mu: float,
    at: float,
    threshold: float,
    off: OffIntegrand,
    sign: int,
    reads: str,
) -> None:
    """A wrong sum, wrong kernels or a wrong scale is the same as values that are all off."""
    set_epsilon(monkeypatch, line_integral, epsilon)
    share, scale = (tuple(sign * each for each in fault) for fault in (off.share, off.scale))
    off = replace(off, mu=mu, tilt=max(at / mu**2 - 0.5, 0.5), share=share, scale=scale)
    assert_holds(integrate(off, threshold=threshold), mu, at, reads)


def test_a_sum_at_a_large_epsilon_counts_the_rounding_of_its_phases() -> None:
    found = integrate(OffIntegrand()).above
    at = 1e11
    total, error = found.evaluate(np.array([at]))
    with mp.workdps(60):
        exact = mp.fsum(
            (mp.mpc(complex(term)) * mp.expj(-mp.mpf(float(v)) * at)).real
            for v, term in zip(found.frequencies, found.terms, strict=True)
        )
    assert abs(float(exact) - total[0]) <= error[0]


def test_the_aliases_of_attacks_are_smoothed() -> None:
    """A short period and much smoothing: P(L + ηZ ≥ t) is counted again and again."""
    mu, smoothing = 1.0, 1.2
    found = integrate(OffIntegrand(mu, 0.5), period=4.0, smoothing=smoothing)
    exact = stats.norm.sf(-0.5 * mu**2 / math.hypot(mu, smoothing))
    assert found.attack_rates(np.zeros(1))[1][0] <= exact


@pytest.mark.parametrize("smoothing", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("s", [0.3, 2.0, 12.0])
def test_tails_of_kernels_are_bounded(s: float, smoothing: float) -> None:
    """The kernels' integrals over octaves are at most their stated bounds."""
    changes = {"smoothing": smoothing, "threshold": (s + 0.5) * smoothing**2}
    line = line_at(s, 1.0, period=50.0, **changes)
    low = 2.0 ** np.arange(-1, 6) / max(smoothing, 0.1)
    stated = np.array(line.log_kernel_tails(low, 2 * low))
    for at, v in enumerate(np.linspace(a, 2 * a, 4001) for a in low):
        growth = math.exp(0.5 * (smoothing * v[0]) ** 2)
        for kernel, (values, _) in enumerate(line.kernels(v)):
            found = float(np.trapezoid(np.abs(values) * growth, v))
            assert found <= math.exp(stated[kernel, at]) * 1.01  # the trapezoids' own excess


# --- rare events


@dataclass(frozen=True)
class OffTransform:
    """A law whose Laplace transform is a constant, off by shares that it states or does not."""

    log_value: float
    value_off: float = 0.0
    moment_off: float = 0.0
    moment_error: float = 0.0

    def trapezoidal_rule(self, *_: float) -> Any:
        return self

    @property
    def log_moment(self) -> float:
        return self.log_value * (1 + self.value_off) + self.moment_off

    def characteristic(self, frequencies: Any) -> tuple[Any, Any]:
        return np.zeros(len(frequencies), complex), np.zeros(len(frequencies))


@pytest.mark.parametrize(
    ("epsilon", "off"),
    [
        (1e-7, OffTransform(-3.0, value_off=28e-7)),
        (1e-7, OffTransform(-3.0, value_off=-28e-7)),
        (EPS, OffTransform(-3.0, moment_off=0.99e-9, moment_error=1e-9)),
    ],
    ids=["product", "product down", "stated"],
)
def test_a_product_of_wrong_transforms_is_within_its_error(
    monkeypatch: Patch, epsilon: float, off: Any
) -> None:
    set_epsilon(monkeypatch, rare_events, epsilon)
    integrand = rare_events._RareOutcomeIntegrand([40], [], [off], [], 1.0, -120.0, 0.5)
    found = integrand.values(np.zeros(1))
    room = found.error[0] + math.expm1(float(found.log_scale_error))
    assert abs(found.value[0] - math.exp(40 * off.log_value + 120)) <= room


@pytest.mark.parametrize("split", [0.1, 0.0], ids=["beside common outcomes", "alone"])
def test_extreme_outcomes_count_in_full(split: float) -> None:
    part = rare_events._SampledGaussian(1e-3, 1.4, 3)
    division = rare_events._OutcomeDivision.at(split, 0.5)
    omitted = rare_events.DividedComposition([part], division, 0.5).omitted()
    z = np.arange(-13.0, 20.0, 1 / 128)
    loss = np.log1p(1e-3 * np.expm1(1.4 * z - 0.98))
    weight = np.exp(loss - 0.5 * z * z + division.extreme[0].log_weight(loss))
    exact = 3 * math.fsum(weight) / 128 / math.sqrt(2 * math.pi)
    assert exact <= omitted.delta(np.array([1e3]))[0] <= exact * (1 + 1e-6)


# --- the lattice


def test_a_convolution_counts_the_errors_of_both_transforms() -> None:
    """A transform that is off by η in norm is the same as masses that are off by η in norm."""
    size = 1024
    exact = stats.binom.pmf(np.arange(400), 399, 0.3)
    eta = 7 * EPS * math.log2(size)
    off = exact + 0.98 * 2 * eta * math.sqrt(float(exact @ exact)) * (np.arange(400) == 120)
    mass, error = convolve([LatticeMasses(0, off, 1)], 0, size)
    assert np.abs(mass[:400] - exact).max() <= error


def test_longer_numbers_leave_a_smaller_error() -> None:
    """The masses of a binomial distribution of 2 000 trials, each within its own error."""
    steps = [LatticeMasses(-1, np.array([0.25, 0.5, 0.25]), 1000)]
    size = 4096
    exact = np.array([float(mp.binomial(2000, k) / mp.mpf(2) ** 2000) for k in range(700, 1300)])
    (doubles, error), (longer, smaller) = (
        convolve(steps, -1000, size, extended=extended) for extended in (False, True)
    )
    for mass, bound in ((doubles, error), (longer, smaller)):
        assert np.abs(mass[700:1300] - exact).max() <= bound + EPS * exact.max()
    # a machine whose longest numbers are doubles gains nothing
    assert smaller <= error * float(np.finfo(np.longdouble).eps) / EPS + EPS * exact.max()


def test_chernoff_bounds_count_the_rounding_of_moments(monkeypatch: Patch) -> None:
    """Masses that are off, in the moments only, by a share that rounding may have."""
    mass = np.random.default_rng(3).random(10_000)
    step = LatticeMasses(-4000, mass / mass.sum(), 10**9)
    losses = (np.arange(len(mass)) + step.first) * 1e-3
    genuine = fft_lattice.coarsen

    def off(*args: Any) -> Any:
        points, masses = genuine(*args)
        return points, masses * (1 - 1e-4)

    set_epsilon(monkeypatch, fft_lattice, 1e-7)
    monkeypatch.setattr(fft_lattice, "coarsen", off)
    moments = fft_lattice._ChernoffMoments([step], 1e-3)
    for sign, found in ((1, moments.upper), (-1, moments.lower)):
        exponents = np.log(step.mass) + sign * np.multiply.outer(moments.rates, losses)
        assert (found >= step.count * fft_lattice.log_sum_exp(exponents)).all()


@dataclass(frozen=True)
class OffResponse(Release):
    """Randomized response, whose masses under P and Q are off by shares that it does not state."""

    p_off: float = 0.0
    q_off: float = 0.0

    def cells(self, *args: Any, **options: Any) -> LossCells:
        found = super().cells(*args, **options)
        return replace(
            found,
            p=found.p * (1 + self.p_off),
            q=found.q * (1 + self.q_off),
            gap=found.gap * (1 + self.p_off),
        )


@pytest.mark.parametrize(("side", "off"), [("upper", 3.23e-5), ("lower", 1.45e-6)])
def test_a_lattice_of_wrong_masses_is_within_its_error(
    monkeypatch: Patch, off: float, side: str
) -> None:
    """Losses ±2 lie on the lattice; so masses are all that is off, by nearly all terms together."""
    set_epsilon(monkeypatch, fft_lattice, 1e-8)
    size, count = 2.0, 200
    inward = (-off, 0.0) if side == "upper" else (off, -off)
    run: Any = [(OffResponse(ApproximatePair(size, 0.0), 1.0, *inward), count)]
    epsilon = 0.98 * count * size
    make = fft_lattice.upper_profile if side == "upper" else fft_lattice.lower_profile
    target = fft_lattice.AccuracyTarget("removing", 4.0, epsilon)
    found = make(run, target, size, math.log(1e-5)).delta(epsilon)
    exact = oracles.randomised_responses_delta(epsilon, mp.mpf(size), count)
    assert found >= exact if side == "upper" else found <= exact


@pytest.mark.parametrize(
    ("side", "window"), [("upper", (-3.0, 4.5)), ("lower", (3.5, 6.0))], ids=["above", "wrapped"]
)
def test_mass_outside_the_window_counts(
    monkeypatch: Patch, side: str, window: tuple[float, float]
) -> None:
    """With a narrow window, much mass lies beyond it."""
    # private: the window is so wide that what lies beyond it never shows
    monkeypatch.setattr(fft_lattice._ChernoffMoments, "window", lambda _: window)
    pair: Any = [(Release(GaussianPair(1 / math.sqrt(50))), 50)]
    exact = float(gaussian.epsilon(1e-5, 1.0))
    make = fft_lattice.upper_profile if side == "upper" else fft_lattice.lower_profile
    target = fft_lattice.AccuracyTarget("removing", 4.0, exact)
    found = make(pair, target, 2e-4, math.log(1e-5)).epsilon(1e-5)
    assert found >= exact if side == "upper" else found <= exact
