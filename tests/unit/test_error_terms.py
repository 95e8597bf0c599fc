"""Every outward error term of the engines is needed, and is used in the right place.

Each case injects a fault of a kind that one term covers, far larger than double precision makes it,
and enlarges that term alone to match. The bounds must then hold. Without the term they must not:
that shows that the fault matters. A term that is gone from the source, or changed, fails as well.
"""

from __future__ import annotations
import __future__

import inspect
import itertools
import math
import random
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from types import FunctionType
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from scipy import special, stats

from accountant_service.numerics import certified_interval
from accountant_service.numerics.engines import (
    fft_lattice,
    line_integral,
    rare_events,
    saddle_point,
)
from accountant_service.numerics.engines.line_integral import IntegrationSettings
from accountant_service.numerics.floats import convolution
from accountant_service.numerics.laws import (
    characteristic_function,
    gaussian,
    sampled_gaussian,
    windowed_loss,
)
from accountant_service.numerics.laws.characteristic_function import (
    CellPairs,
    TiltedSampledGaussian,
)
from accountant_service.numerics.laws.dominating_pair import GaussianPair, Release
from accountant_service.numerics.laws.windowed_loss import Window, WindowedLoss
from tests.support.helpers import log_uniform

pytestmark = pytest.mark.usefixtures("without_memory")  # engines are replaced here

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Term:
    """An error term in the source of one function, and how to enlarge it.

    Attributes:
        function: that contains the term.
        text: the term; it occurs there exactly once.
        enlarged: the same term for arithmetic as bad as the injected fault.
        absent: what is left without the term.
    """

    function: Any
    text: str
    enlarged: str
    absent: str


def rewrite(patch: Patch, term: Term, text: str) -> None:
    """Replace the term in the running function."""
    function: FunctionType = term.function
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(term.text) == 1, f"{function.__qualname__} has no term {term.text!r}"
    lines = source.replace(term.text, text).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("def "))  # no decorators
    names: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile("\n".join(lines[first:]), "<term>", "exec", flags), function.__globals__, names)
    patch.setattr(function, "__code__", names[function.__name__].__code__)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No law of an unbroken engine is remembered by a broken one, nor the other way."""
    for _ in range(2):
        windowed_loss.cached_windowed_loss.cache_clear()
        characteristic_function.tilted_loss.cache_clear()
        saddle_point._release_moments.cache_clear()
        if not _:
            yield


def check(patch: Patch, term: Term, holds: Callable[[], bool]) -> None:
    """With the fault and the enlarged term the bounds hold, without the term they do not."""
    with patch.context() as enlarged:
        rewrite(enlarged, term, term.enlarged)
        assert holds(), "the term does not cover the fault"
    with patch.context() as absent:
        rewrite(absent, term, term.absent)
        assert not holds(), "the fault does not need the term"


# --- rare events: two releases whose δ comes from one rare outcome

RARE = [(Release(GaussianPair(1 / 0.7), 1e-4), 2)]
MANY = [(Release(GaussianPair(1 / 1.8), 2e-3), 900)]  # of which no outcome is common


def rare_bounds(run: Any = RARE, epsilon: float = 0.5, delta: float = 1e-12) -> tuple[float, float]:
    about = saddle_point.SaddlePoint(
        "removing", 1.0, epsilon, math.log(delta), epsilon, np.zeros(0), np.zeros(0)
    )
    found = rare_events.integrate_rare_events(
        run, about, IntegrationSettings(math.log(1e-6), 0.0, 1 << 22)
    )
    lower, upper = found.delta(np.array([epsilon]))
    return float(lower[0]), float(upper[0])


@pytest.fixture(scope="module")
def rare_delta() -> float:
    found = certified_interval.delta_bounds(RARE, 0.5, 1e-7)
    return 0.5 * (found.lower + found.upper)


def rare_holds(exact: float) -> Callable[[], bool]:
    def holds() -> bool:
        windowed_loss.cached_windowed_loss.cache_clear()
        lower, upper = rare_bounds()
        return lower <= exact <= upper

    return holds


def product_off_by(patch: Patch, share: float) -> None:
    genuine = rare_events._LaplaceTransformProduct.value
    patch.setattr(
        rare_events._LaplaceTransformProduct,
        "value",
        lambda of, scale: genuine(of, scale) * (1 - share),
    )


def test_rounding_of_the_product(monkeypatch: Patch, rare_delta: float) -> None:
    product_off_by(monkeypatch, 1e-4)
    term = Term(
        rare_events._RareOutcomeIntegrand.values,
        "rounding = 16 * _EPS * terms * most",
        "rounding = 2e-4 * most",
        "rounding = 0 * most",
    )
    check(monkeypatch, term, rare_holds(rare_delta))


def test_common_scale_of_all_factors(monkeypatch: Patch, rare_delta: float) -> None:
    product_off_by(monkeypatch, 1e-4)
    monkeypatch.setattr(rare_events, "_TOTAL_SCALE_ERROR_MAX", 1.0)
    term = Term(
        rare_events._RareOutcomeIntegrand.values,
        "log_scale_error += count * (b.scale_error + (a.scale_error if a else 0.0))",
        "log_scale_error += count * 1e-4",
        "log_scale_error += 0.0 * count",
    )
    check(monkeypatch, term, rare_holds(rare_delta))


def test_scale_of_a_factor_is_its_slip_or_its_error(monkeypatch: Patch, rare_delta: float) -> None:
    genuine = rare_events._LaplaceTransform.with_absolute_error

    def off(*args: Any) -> Any:
        found = genuine(*args)
        return replace(
            found, phi_minus_one=found.phi_minus_one - 0.9e-4 * (1 + found.phi_minus_one)
        )

    monkeypatch.setattr(rare_events._LaplaceTransform, "with_absolute_error", off)
    term = Term(
        characteristic_function.TrapezoidalRule.unnormalised_characteristic,
        "2 * (float(self._weight_errors().sum()) + 64 * _EPS)",
        "1e-4",
        "0.0",
    )
    check(monkeypatch, term, rare_holds(rare_delta))


@pytest.mark.parametrize("common", [False, True])
def test_mass_of_extreme_outcomes(monkeypatch: Patch, rare_delta: float, common: bool) -> None:
    """With a low top, much of δ comes from beyond it."""
    run, epsilon, exact = (RARE, 0.5, rare_delta) if common else (MANY, 0.28, 0.0)
    if not common:
        found = certified_interval.delta_bounds(MANY, epsilon, 1e-7)
        exact = 0.5 * (found.lower + found.upper)
    top = epsilon if common else 0.2 * epsilon
    monkeypatch.setattr(rare_events._ApproximateLaws, "estimate_top", lambda *_: top)

    def holds() -> bool:
        lower, upper = rare_bounds(run, epsilon, exact)
        return lower <= exact <= upper

    text = "OmittedOutcomes(mass, tilts, moments)" if common else "OmittedOutcomes(mass)\n"
    absent = text.replace("mass", "0.0")
    check(monkeypatch, Term(rare_events.DividedComposition.omitted, text, text, absent), holds)


# --- one release's law: the moment and the characteristic function against the true ones

LAWS: list[Callable[[], tuple[Any, float]]] = [
    lambda: (WindowedLoss(1e-3, 1.3, (), 100.0), 12.0),
    lambda: (WindowedLoss(1e-9, 3.0, (Window(0.02, 0.002, -1),), 100.0), 9.0),
    lambda: (WindowedLoss(1e-3, 1.3, (Window(0.02, 0.002, 1), Window(0.3, 0.02, -1)), 99.0), 9.0),
    lambda: (TiltedSampledGaussian(0.02, 1.0, "removing", 4.0), 4.0),
    lambda: (TiltedSampledGaussian(0.02, 1.0, "adding", 4.0), 4.0),
]
FREQUENCIES = np.array([0.5, 8.0, 60.0])


def nodes_of(law: Any, order: float) -> characteristic_function.TrapezoidalRule:
    if isinstance(law, WindowedLoss):
        return law.trapezoidal_rule(order, float(FREQUENCIES[-1]))
    return law._trapezoidal_rule(float(FREQUENCIES[-1]))  # type: ignore[no-any-return]


def law_holds(law: Any, order: float, *, moment: bool, phi_minus_one: bool) -> Callable[[], bool]:
    """Return a check that later values are within their stated error of the present ones."""
    true = nodes_of(law, order)
    true_rise, _ = true.characteristic(FREQUENCIES)

    def holds() -> bool:
        found = nodes_of(law, order)
        off = abs(found.log_moment - true.log_moment)
        found_rise, error = found.characteristic(FREQUENCIES)
        within = (np.abs(found_rise - true_rise) <= error).all()
        return (off <= found.moment_error or not moment) and (bool(within) or not phi_minus_one)

    return holds


def integrand_off(patch: Patch, fault: Callable[[Any], Any]) -> None:
    genuine = characteristic_function.trapezoidal_rule

    def off(integrand: Any, *rest: Any) -> Any:
        return genuine(fault(integrand), *rest)

    patch.setattr(characteristic_function, "trapezoidal_rule", off)
    patch.setattr(windowed_loss, "trapezoidal_rule", off)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("reads", ["moment", "phi_minus_one"])
def test_losses_in_the_weights(monkeypatch: Patch, law: Any, reads: str) -> None:
    """Every l is off by 1e-6, where it is multiplied by the order."""
    of, order = law()
    holds = law_holds(of, order, moment=reads == "moment", phi_minus_one=reads == "phi_minus_one")

    def fault(integrand: Any) -> Any:
        weight = np.exp(integrand.exponent - integrand.exponent.max())
        middle = float(weight @ integrand.z / weight.sum())
        side = np.sign(integrand.z - middle) if reads == "phi_minus_one" else 1.0
        return replace(integrand, growth=integrand.growth + 0.9e-6 * order * side)

    integrand_off(monkeypatch, fault)
    term = Term(
        characteristic_function.exponent_error,
        "abs(order) * loss_error",
        "abs(order) * (loss_error + 1e-6)",
        "0 * loss_error",
    )
    check(monkeypatch, term, holds)


@pytest.mark.parametrize("law", [LAWS[0], *LAWS[3:]])  # windows have a test of their own
def test_products_in_the_weights(monkeypatch: Patch, law: Any) -> None:
    of, order = law()
    holds = law_holds(of, order, moment=True, phi_minus_one=False)
    integrand_off(monkeypatch, lambda of: replace(of, growth=of.growth + 0.9e-3 * abs(of.growth)))
    term = Term(
        characteristic_function.exponent_error,
        "4 * _EPS * np.abs(order * loss)",
        "(1e-3 * np.abs(order * loss) + 1e-3 * (loss < -300))",
        "0 * loss",
    )
    check(monkeypatch, term, holds)


@pytest.mark.parametrize("law", LAWS)
def test_normal_density_in_the_weights(monkeypatch: Patch, law: Any) -> None:
    of, order = law()
    holds = law_holds(of, order, moment=True, phi_minus_one=False)
    integrand_off(monkeypatch, lambda of: replace(of, z=of.z * (1 - 1e-5)))
    term = Term(
        characteristic_function.MomentIntegrand.normal_error.fget,  # type: ignore[attr-defined]
        "4 * _EPS * (2 + self.z * self.z)",
        "4e-5 * (2 + self.z * self.z)",
        "0 * self.z",
    )
    check(monkeypatch, term, holds)


@pytest.mark.parametrize("law", LAWS)
def test_losses_in_the_phases(monkeypatch: Patch, law: Any) -> None:
    """Every l is off by 1e-6, where it is multiplied by the frequency."""
    of, order = law()
    holds = law_holds(of, order, moment=False, phi_minus_one=True)
    genuine = characteristic_function.TrapezoidalRule.phi_minus_one
    monkeypatch.setattr(
        characteristic_function.TrapezoidalRule,
        "phi_minus_one",
        lambda of, v: genuine(replace(of, loss=of.loss + 0.9e-6), v),
    )
    term = Term(
        characteristic_function.TrapezoidalRule.characteristic,
        "frequencies * self.loss_error",
        "frequencies * (self.loss_error + 1e-6)",
        "0 * frequencies",
    )
    check(monkeypatch, term, holds)


WEIGHTS = "relative_error = integrand.growth_error + integrand.normal_error + 4 * _EPS * abs(peak)"
DIRECT = Term(
    characteristic_function.trapezoidal_rule,
    WEIGHTS,
    WEIGHTS.replace("4 * _EPS", "1e-6 + 0"),
    "relative_error = 0 * weight",
)
TOTAL = "rounding = float(weight @ relative_error) + 64 * _EPS"


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "term",
    [
        DIRECT,
        Term(
            characteristic_function.trapezoidal_rule,
            TOTAL,
            "rounding = 1e-6",
            "rounding = 64 * _EPS",
        ),
    ],
)
def test_rounding_of_a_moment_from_its_logarithm(monkeypatch: Patch, law: Any, term: Term) -> None:
    """The moment by the direct sum, where every weight is off by the same share."""
    of, order = law()
    holds = law_holds(of, order, moment=True, phi_minus_one=False)
    monkeypatch.setattr(characteristic_function, "_SMALL_MOMENT", -1.0)
    integrand_off(monkeypatch, lambda of: replace(of, growth=of.growth + 0.9e-6))
    check(monkeypatch, term, holds)


@pytest.mark.parametrize("law", LAWS[1:3])
@pytest.mark.parametrize("which", ["losses", "values"])
def test_windows_in_the_weights(monkeypatch: Patch, law: Any, which: str) -> None:
    """A window is evaluated at a loss that is off, or its logarithm is."""
    of, order = law()
    holds = law_holds(of, order, moment=True, phi_minus_one=False)
    genuine = Window.log_weight
    if which == "losses":
        monkeypatch.setattr(
            Window, "log_weight", lambda of, loss: genuine(of, loss - of.sign * 0.9e-7)
        )
        moved = "moved = loss_error / self.width"
        term = Term(
            Window.relative_error, moved, "moved = (loss_error + 1e-7) / self.width", "moved = 0"
        )
        term = replace(term, absent="moved = 0 * loss_error")
    else:
        monkeypatch.setattr(Window, "log_weight", lambda of, loss: genuine(of, loss) * (1 + 0.9e-5))
        evaluated = "16 * _EPS * (1 + np.maximum(u, 0.0) ** 2)"
        term = Term(Window.relative_error, evaluated, "1e-5", "0")
    check(monkeypatch, term, holds)


@pytest.mark.parametrize(
    ("side", "absent"), [("left", "right"), ("right", "left")], ids=["left", "right"]
)
def test_truncated_tails(monkeypatch: Patch, side: str, absent: str) -> None:
    """With limits two standard deviations out, either tail is a share of the moment."""
    order = 1.0 if side == "left" else 3.0

    def law() -> WindowedLoss:
        of = WindowedLoss(0.3, 0.2, (), 3.0)
        of._low = -2.0 if side == "left" else -13.0
        return of

    true = WindowedLoss(0.3, 0.2, (), 3.0).trapezoidal_rule(order, 1.0).log_moment
    monkeypatch.setattr(characteristic_function, "_SMALL_MOMENT", -1.0)
    if side == "right":
        for module in (windowed_loss, sampled_gaussian):
            monkeypatch.setattr(module, "_TAIL_DEVIATIONS", 2.0)

    def holds() -> bool:
        found = law().trapezoidal_rule(order, 1.0)
        return abs(found.log_moment - true) <= -math.log1p(-min(found.moment_error, 0.99))

    text = "np.logaddexp(left, right)"
    check(monkeypatch, Term(WindowedLoss._choose_spacing, text, text, absent), holds)


def common_moment(q: float, mu: float, edge: float, order: float) -> Any:
    """log K(order) with one closing window of a tenth of its edge, to 30 digits."""

    def moment_minus_one(z: Any) -> Any:
        loss = mp.log1p(mp.mpf(q) * mp.expm1(mp.mpf(mu) * z - mp.mpf(mu) ** 2 / 2))
        window = mp.erfc((loss - mp.mpf(edge)) / (mp.mpf(0.1 * edge) * mp.sqrt(2))) / 2
        return mp.npdf(z) * (mp.exp(mp.mpf(order) * loss) * window - 1)

    with mp.workdps(32):
        step = mp.mpf(1) / 64
        return mp.log1p(
            step * mp.fsum(moment_minus_one(k * step) for k in range(-13 * 64, 13 * 64))
        )


@pytest.mark.slow
def test_moments_are_as_exact_as_they_say() -> None:
    """Against 40 digits, where K is near 1 and T is a billion."""
    rng = random.Random(11)
    for _ in range(5):
        q, mu = log_uniform(rng, 1e-10, 1e-6), log_uniform(rng, 0.8, 3.2)
        edge, order = log_uniform(rng, 0.02, 0.5), log_uniform(rng, 1.5, 20)
        law = WindowedLoss(q, mu, (Window(edge, 0.1 * edge, -1),), 40.0)
        found = law.trapezoidal_rule(order, 10.0)
        exact = common_moment(q, mu, edge, order)
        assert abs(float(exact - mp.mpf(found.log_moment))) <= found.moment_error
        assert found.moment_error < 1e-16 + 1e-12 * abs(found.log_moment)


def test_a_moment_near_one_counts_what_lies_beyond_the_last_node() -> None:
    """A window that closes near the mode: beyond it n counts, and e^growth does not."""
    law = WindowedLoss(0.1, 2.0, (Window(0.05, 0.005, -1),), 10.0)
    assert law._high < 3
    spacing, _ = law._choose_spacing(np.array([2.0]), 1.0)
    z = characteristic_function.exact_multiples(spacing, -13.0, 13.0)
    loss = law._loss(z)
    growth = np.where(z < law._high + spacing, 2.0 * loss + law._log_windows(loss), -np.inf)
    moment_minus_one, error = characteristic_function.MomentIntegrand(
        z, spacing, growth, 0 * z
    ).moment_minus_one()
    fine = np.arange(-14.0, 14.0, 2.0**-12)
    loss = law._loss(fine)
    exact = 2.0**-12 * math.fsum(
        np.exp(2.0 * loss + law._log_windows(loss) - 0.5 * fine**2) / math.sqrt(2 * math.pi)
    )
    assert error < 1e-12
    assert abs(moment_minus_one - (exact - 1)) < error + 1e-13


def test_a_moment_of_a_hundred_thousand_nodes() -> None:
    """The nodes beyond the last window were stepped by a rounded spacing: 5 times the error."""
    edge = 4.0915073371871726e-05
    windows = (Window(edge, 0.1 * edge, -1), Window(2 * edge, 0.14 * edge, -1))
    law = WindowedLoss(0.005819331240093667, 1 / 0.47017073846520147, windows, 28.345020488910894)
    found = law.trapezoidal_rule(28.345020488910894, 1878129.568292951)
    coarse = law.trapezoidal_rule(28.345020488910894, 1000.0)  # another rule for the same moment
    assert abs(found.log_moment - coarse.log_moment) <= found.moment_error + coarse.moment_error
    spacing, _ = law._choose_spacing(np.array([28.345020488910894]), 1878129.568292951)
    z = characteristic_function.exact_multiples(spacing, -13.0, 13.0)
    assert (np.diff(z) == spacing).all()


@pytest.mark.parametrize("spacing", [0.3, 1 / 3, 2.34e-4, math.pi])
def test_nodes_are_exact_multiples(spacing: float) -> None:
    rounded = characteristic_function.round_spacing(spacing)
    assert spacing * (1 - 2e-7) < rounded <= spacing
    z = characteristic_function.exact_multiples(rounded, -13.0, 400.0)
    assert z[0] <= -13.0
    assert z[-1] >= 400.0
    assert all(Fraction(value) % Fraction(rounded) == 0 for value in z[:: max(1, len(z) // 50)])


def test_quadrature_of_the_normal_density() -> None:
    """∫ n·e^growth = 1 is integrated well, and n itself badly, with so wide a spacing."""
    z = np.arange(-30.0, 31.0, 2.0)
    integrand = characteristic_function.MomentIntegrand(
        z, 2.0, 0.25 * z * z - 0.5 * math.log(2), 0 * z
    )
    moment_minus_one, error = integrand.moment_minus_one()
    assert 1e-3 < abs(moment_minus_one) <= error


def test_the_sum_that_weights_are_divided_by() -> None:
    """An atom at loss 0 is off by a thousandth: it moves φ only through the sum of all weights."""
    off = 1e-3
    found = characteristic_function.TrapezoidalRule(
        np.array([0.5, 0.5]), np.array([0.0, 1.0]), np.array([off, 0.0]), 0.0, 0.0, 0.0, 0.0
    )
    phi_minus_one, error = found.characteristic(FREQUENCIES)
    true = 0.5 / (1 + 0.5 * off) * np.expm1(1j * FREQUENCIES)
    assert (np.abs(phi_minus_one - true) <= error).all()
    assert (np.abs(phi_minus_one - true) > 1e-6).any()


def test_distances_of_pairs(monkeypatch: Patch) -> None:
    """Two atoms a distance of 1 apart, seen a thousandth further apart."""
    fault = 1.0009
    loss, mass = np.array([0.0, 1e-12, 1.0, 1.0 + 1e-12]) * fault, np.array([0.5, 0.0, 0.5])
    low = np.array([0.05, 0.1, 0.2])

    def holds() -> bool:
        bound = CellPairs(loss, mass).log_decay(low, low * (1 + 1e-9))
        return bool((bound >= np.log(np.cos(0.5 * low))).all())

    term = Term(CellPairs.__init__, "8 * _EPS * float(np.abs(loss).max())", "1e-3", "0.0")
    check(monkeypatch, term, holds)


# --- the contour: 300 releases whose δ has many digits

RUN = [(Release(GaussianPair(1.0), 0.02), 300)]
NEAR, FAR = 1.0, 1.7  # where the contour is drawn, and where it is read


def run_bounds(epsilon: float, smoothing: float = 0.0) -> tuple[float, float]:
    characteristic_function.tilted_loss.cache_clear()
    saddle = saddle_point.find_at_epsilon(RUN, "removing", NEAR)
    found = line_integral.integrate_composition(
        RUN, saddle, IntegrationSettings(math.log(1e-8), smoothing, 1 << 20)
    )
    lower, upper = found.delta(np.array([epsilon]))
    return float(lower[0]), float(upper[0])


@pytest.fixture(scope="module", params=[NEAR, FAR], ids=["near", "far"])
def run_delta(request: pytest.FixtureRequest) -> tuple[float, float]:
    found = certified_interval.delta_bounds(RUN, request.param, 1e-7)
    return request.param, 0.5 * (found.lower + found.upper)


def run_holds(at: tuple[float, float]) -> Callable[[], bool]:
    def holds() -> bool:
        lower, upper = run_bounds(at[0])
        return lower <= at[1] <= upper

    return holds


def characteristic_off(patch: Patch, fault: Callable[[Any], Any]) -> None:
    genuine = TiltedSampledGaussian.characteristic
    patch.setattr(TiltedSampledGaussian, "characteristic", lambda of, v: fault(genuine(of, v)))


def test_rounding_of_powers(monkeypatch: Patch, run_delta: tuple[float, float]) -> None:
    characteristic_off(monkeypatch, lambda of: replace(of, log_value=of.log_value * (1 - 9e-6)))
    term = Term(
        line_integral.CompositionIntegrand.values,
        "rounded = (5 + different) * _EPS * np.abs(value.log_value)",
        "rounded = 1e-5 * np.abs(value.log_value)",
        "rounded = 0.0",
    )
    check(monkeypatch, term, run_holds(run_delta))


def test_rounding_of_moments(monkeypatch: Patch, run_delta: tuple[float, float]) -> None:
    characteristic_off(monkeypatch, lambda of: replace(of, log_moment=of.log_moment * (1 - 9e-5)))
    term = Term(
        line_integral.CompositionIntegrand.values,
        "sums = (2 + different) * _EPS * abs(value.log_moment)",
        "sums = 1e-4 * abs(value.log_moment)",
        "sums = 0.0",
    )
    check(monkeypatch, term, run_holds(run_delta))


def test_slip_of_moments(monkeypatch: Patch, run_delta: tuple[float, float]) -> None:
    characteristic_off(monkeypatch, lambda of: replace(of, log_moment=of.log_moment - 9e-6))
    term = Term(
        line_integral.CompositionIntegrand.values,
        "(value.moment_error + sums)",
        "(1e-5 + sums)",
        "(0.0 + sums)",
    )
    check(monkeypatch, term, run_holds(run_delta))


def test_drift_of_phases(monkeypatch: Patch) -> None:
    """Phases are off by a share; where δ is steeper or flatter than the tilt, it matters."""
    found = certified_interval.delta_bounds(RUN, FAR, 1e-7)
    genuine = line_integral._FourierSum.evaluate

    def off(of: Any, epsilons: Any) -> Any:
        return genuine(of, epsilons * (1 + 3.9e-4))[0], genuine(of, epsilons)[1]

    monkeypatch.setattr(line_integral._FourierSum, "evaluate", off)
    term = Term(
        line_integral._fourier_sum,
        "4 * _EPS * (size @ frequencies)",
        "4e-4 * (size @ frequencies)",
        "0 * error",
    )
    check(monkeypatch, term, run_holds((FAR, 0.5 * (found.lower + found.upper))))


def test_rounding_of_kernels(monkeypatch: Patch, run_delta: tuple[float, float]) -> None:
    genuine = line_integral.IntegrationLine.kernels

    def off(line: Any, frequencies: Any) -> Any:
        return [(kernel * (1 - 7e-5), size) for kernel, size in genuine(line, frequencies)]

    monkeypatch.setattr(line_integral.IntegrationLine, "kernels", off)
    term = Term(
        line_integral.integrate_along_line,
        "8 * _EPS * (1 + exponents)",
        "8e-5 * (1 + exponents)",
        "0 * exponents",
    )
    check(monkeypatch, term, run_holds(run_delta))


def test_rounding_of_the_sum(monkeypatch: Patch, run_delta: tuple[float, float]) -> None:
    genuine = line_integral._FourierSum.evaluate

    def off(of: Any, epsilons: Any) -> Any:
        total, error = genuine(of, epsilons)
        return total * (1 - 1e-5), error

    monkeypatch.setattr(line_integral._FourierSum, "evaluate", off)
    term = Term(
        line_integral._fourier_sum,
        "size.sum(axis=-1) * _EPS * (len(frequencies) + 32)",
        "size.sum(axis=-1) * 1e-5",
        "0.0",
    )
    check(monkeypatch, term, run_holds(run_delta))


def test_smoothing_in_the_aliases_of_attacks(monkeypatch: Patch) -> None:
    """A short period and much smoothing: P(L + ηZ ≥ t) is counted again and again."""
    mu, period, smoothing, threshold = 1.0, 4.0, 1.2, 0.0
    pair = [(Release(GaussianPair(mu)), 1)]
    genuine = line_integral.choose_line
    monkeypatch.setattr(
        line_integral,
        "choose_line",
        lambda saddle, settings: replace(
            genuine(saddle, settings), period=period, smoothing=smoothing
        ),
    )
    spread = math.sqrt(mu**2 + smoothing**2)
    exact = float(stats.norm.sf((threshold - 0.5 * mu**2) / spread))

    def holds() -> bool:
        saddle = saddle_point.find_at_epsilon(pair, "removing", 1.0)
        found = line_integral.integrate_composition(
            pair, saddle, IntegrationSettings(math.log(1e-6), 0.0, 1 << 22)
        )
        return float(found.attack_rates(np.array([threshold]))[1][0]) <= exact

    text = "chernoff += 0.5 * (line.higher_tilts * smoothing) ** 2 - np.log"
    check(
        monkeypatch,
        Term(line_integral.EvaluatedIntegral._aliasing_error, text, text, "chernoff -= np.log"),
        holds,
    )


@pytest.mark.parametrize(("side", "shift"), [("true_positives", 9e-6), ("false_positives", -9e-6)])
def test_slip_of_moments_in_attacks(monkeypatch: Patch, side: str, shift: float) -> None:
    """P of an attack is bounded from below, Q of it from above."""

    def attack() -> float:
        characteristic_function.tilted_loss.cache_clear()
        saddle = saddle_point.find_at_epsilon(RUN, "removing", NEAR)
        found = line_integral.integrate_composition(
            RUN, saddle, IntegrationSettings(math.log(1e-8), 0.0, 1 << 20)
        )
        false_positives, true_positives = found.attack_rates(np.array([NEAR]))
        return float(true_positives[0] if side == "true_positives" else false_positives[0])

    exact = attack()
    characteristic_off(monkeypatch, lambda of: replace(of, log_moment=of.log_moment + shift))
    characteristic_off(monkeypatch, lambda of: replace(of, moment_error=of.moment_error + 1e-5))

    def holds() -> bool:
        return attack() <= exact if side == "true_positives" else attack() >= exact

    text = "scale_error = self.log_scale_error + 4 * _EPS * (1 + exponent_size)"
    term = Term(
        line_integral.EvaluatedIntegral.attack_rates,
        text,
        text,
        text.replace("self.log_scale_error", "0.0"),
    )
    check(monkeypatch, term, holds)


@pytest.mark.parametrize("bound", ["delta", "attack_rates"])
def test_rounding_of_exponents(monkeypatch: Patch, bound: str) -> None:
    """e^{log_scale − sε} is off by a share, and with it every bound."""
    saddle = saddle_point.find_at_epsilon(RUN, "removing", NEAR)
    found = line_integral.integrate_composition(
        RUN, saddle, IntegrationSettings(math.log(1e-8), 0.0, 1 << 20)
    )
    at = np.array([NEAR])
    true = getattr(found, bound)(at)

    def holds() -> bool:
        off = {shift: replace(found, log_scale=found.log_scale + shift) for shift in (-9e-5, 9e-5)}
        low, high = getattr(off[-9e-5], bound)(at), getattr(off[9e-5], bound)(at)
        if bound == "delta":  # a lower and an upper bound
            return bool(high[0] <= true[1] and low[1] >= true[0])
        return bool(low[0] >= true[0] * (1 - 1e-9) and high[1] <= true[1] * (1 + 1e-9))

    text = "4 * _EPS * (1 + exponent_size)"
    term = Term(getattr(line_integral.EvaluatedIntegral, bound), text, "1e-4", "0.0")
    check(monkeypatch, term, holds)


def kernel_tails_hold(line: line_integral.IntegrationLine) -> bool:
    """Return whether the kernels' integrals over octaves are at most their stated bounds."""
    low = 2.0 ** np.arange(-1, 6) / max(line.smoothing, 0.1)
    points = [np.linspace(a, 2 * a, 4001) for a in low]
    said = np.array(line.log_kernel_tails(low, 2 * low))
    for at, v in enumerate(points):
        growth = math.exp(0.5 * (line.smoothing * v[0]) ** 2)
        for kernel, (values, _) in enumerate(line.kernels(v)):
            found = float(np.trapezoid(np.abs(values) * growth, v))
            if found > math.exp(said[kernel, at]) * 1.01:  # the trapezoids' own excess
                return False
    return True


def test_tails_of_smoothed_kernels(monkeypatch: Patch) -> None:
    lines = [
        line_integral.IntegrationLine(
            s, 50.0, smoothing, (s + 0.5) * smoothing**2, -20.0, 0.0, np.zeros(0), np.zeros(0)
        )
        for s, smoothing in itertools.product((0.3, 2.0, 12.0), (0.05, 0.3))
    ]
    term = Term(
        line_integral.IntegrationLine.log_kernel_tails,
        "log_inverse + math.log(2) + larger",
        "log_inverse + math.log(2) + larger",
        "log_inverse - 3 + larger",
    )
    check(monkeypatch, term, lambda: all(kernel_tails_hold(line) for line in lines))


@pytest.mark.parametrize("smoothing", [0.0, 0.4])
def test_every_tail_of_kernels_is_covered(smoothing: float) -> None:
    for s in (0.2, 1.0, 7.0):
        threshold = (s + 0.5) * smoothing**2
        line = line_integral.IntegrationLine(
            s, 60.0, smoothing, threshold, -20.0, 0.0, np.zeros(0), np.zeros(0)
        )
        assert kernel_tails_hold(line)


def test_a_value_far_off_is_covered() -> None:
    """|Φ| ≤ 1, whatever is computed: the stated error reaches every such Φ."""

    @dataclass(frozen=True)
    class Off:
        """φ(0) = 1, computed as e^rise."""

        phi_minus_one: float

        def characteristic(self, frequencies: Any) -> characteristic_function.CharacteristicValues:
            value = np.full(len(frequencies), self.phi_minus_one, complex)
            error = np.abs(np.exp(value.real) - 1)
            return characteristic_function.CharacteristicValues(value, error, 0.0, 0.0)

    for phi_minus_one in (1e-9, 1e-3, 0.5, 2.0, 30.0, -1e-9, -1e-3, -0.5, -2.0):
        found = line_integral.CompositionIntegrand([(Off(phi_minus_one), 40)]).values(np.zeros(1))  # type: ignore[list-item]
        assert abs(found.value[0] - 1) <= found.error[0] * (1 + 1e-6)
        assert abs(found.value[0]) <= 1
        assert found.largest[0] >= 1 - 1e-12


# --- the lattice


def test_rounding_of_chernoff_moments(monkeypatch: Patch) -> None:
    rng = np.random.default_rng(3)
    mass = rng.random(10_000)
    step = fft_lattice.LatticeMasses(-4000, mass / mass.sum(), 10**9)
    losses = (np.arange(len(mass)) + step.first) * 1e-3

    def exact(rate: float) -> float:
        return step.count * float(special.logsumexp(rate * losses, b=step.mass))

    genuine = fft_lattice.coarsen

    def off(*args: Any) -> Any:
        points, masses = genuine(*args)
        return points, masses * (1 - 1e-4)

    monkeypatch.setattr(fft_lattice, "coarsen", off)

    def holds() -> bool:
        moments = fft_lattice._ChernoffMoments([step], 1e-3)
        wanted = np.array([exact(rate) for rate in moments.rates])
        below = np.array([exact(-rate) for rate in moments.rates])
        return bool((moments.upper >= wanted).all() and (moments.lower >= below).all())

    term = Term(
        fft_lattice._moment_rounding, "_EPS * (4 * largest", "1e-4 * (4 * largest", "0 * (4"
    )
    term = replace(term, absent="0 * (4 * largest")
    check(monkeypatch, term, holds)


@pytest.mark.parametrize("side", ["upper", "lower"])
def test_rounding_of_tilted_masses(monkeypatch: Patch, side: str) -> None:
    """Every mass of 50 Gaussian releases is off by 1e-4, inward."""
    mu, steps, delta = 1.0, 50, 1e-5
    pair = [(Release(GaussianPair(mu / math.sqrt(steps))), steps)]
    exact = float(gaussian.epsilon(delta, mu))
    share = -1e-4 if side == "upper" else 1e-4
    genuine = fft_lattice.LatticeMasses

    def off(first: int, mass: Any, count: int) -> Any:
        return genuine(first, mass * (1 + share), count)

    monkeypatch.setattr(fft_lattice, "LatticeMasses", off)

    def holds() -> bool:
        aim = fft_lattice.AccuracyTarget("removing", 4.0, exact)
        make = fft_lattice.upper_profile if side == "upper" else fft_lattice.lower_profile
        found = make(pair, aim, 2e-4, math.log(delta)).epsilon(delta)
        return found >= exact if side == "upper" else found <= exact

    term = Term(
        fft_lattice._compose,
        "4 * _EPS * (4 + terms)",
        "1e-4 + 0 * terms",
        "0 * terms",
    )
    check(monkeypatch, term, holds)


MU, COUNT, DELTA, SPACING = 1.0, 50, 1e-5, 2e-4
PAIR = [(Release(GaussianPair(MU / math.sqrt(COUNT))), COUNT)]


def lattice_holds(side: str) -> Callable[[], bool]:
    """Return a check that a lattice's bound of ε is on its side of the closed form."""
    exact = float(gaussian.epsilon(DELTA, MU))

    def holds() -> bool:
        aim = fft_lattice.AccuracyTarget("removing", 4.0, exact)
        make = fft_lattice.upper_profile if side == "upper" else fft_lattice.lower_profile
        found = make(PAIR, aim, SPACING, math.log(DELTA)).epsilon(DELTA)
        return found >= exact if side == "upper" else found <= exact

    return holds


@pytest.mark.parametrize("side", ["upper", "lower"])
@pytest.mark.parametrize(
    ("text", "enlarged"),
    [
        ("rounding += step.count * 4 * _EPS * abs(log_moment)", "rounding += 2e-4"),
        ("_EPS * (4 * (1 + tilt) * largest_loss + size)", "2e-4"),
    ],
    ids=["product", "weights"],
)
def test_rounding_of_the_scale(monkeypatch: Patch, side: str, text: str, enlarged: str) -> None:
    """A composed mass is off by 1e-4, inward for P and for Q."""
    genuine = fft_lattice._ComposedMasses

    def off(*args: Any) -> Any:
        found = genuine(*args)
        inward = -1e-4 if side == "upper" or found.tilt > 4.5 else 1e-4
        return replace(found, log_scale=found.log_scale + inward)

    monkeypatch.setattr(fft_lattice, "_ComposedMasses", off)
    absent = "rounding += 0.0" if text.startswith("rounding") else "0.0"
    term = Term(fft_lattice._compose, text, enlarged, absent)
    check(monkeypatch, term, lattice_holds(side))


@pytest.mark.parametrize("side", ["upper", "lower"])
@pytest.mark.parametrize(
    ("text", "enlarged", "absent"),
    [
        ("error = eta * total_norm", "error = 1e-8", "error = 0.0"),
        (
            "error += step.count * (eta * own * partner + 8 * _EPS * total_norm)",
            "error += 1e-8",
            "error += 0.0",
        ),
    ],
    ids=["transform back", "transforms and powers"],
)
def test_rounding_of_transforms(
    monkeypatch: Patch, side: str, text: str, enlarged: str, absent: str
) -> None:
    """Every point of the inverse transform is off by 1e-8, towards a smaller or a larger δ."""
    genuine = convolution.fft

    class Off:
        rfft = staticmethod(genuine.rfft)
        next_fast_len = staticmethod(genuine.next_fast_len)

        @staticmethod
        def irfft(*args: Any) -> Any:
            return genuine.irfft(*args) + (-0.9e-8 if side == "upper" else 0.9e-8)

    monkeypatch.setattr(convolution, "fft", Off)
    check(monkeypatch, Term(convolution.convolve, text, enlarged, absent), lattice_holds(side))


@pytest.mark.parametrize(
    ("side", "function", "text", "absent", "window"),
    [
        (
            "upper",
            fft_lattice.upper_profile,
            "slack = infinite + math.exp(min(tilted.log_above + top, 0.0))",
            "slack = infinite",
            (-3.0, 4.5),
        ),
        ("lower", fft_lattice.lower_profile, " - aliases * p_weights", "", (3.5, 6.0)),
    ],
    ids=["P above", "P wrapped around"],
)
def test_mass_outside_the_window(
    monkeypatch: Patch,
    side: str,
    function: Any,
    text: str,
    absent: str,
    window: tuple[float, float],
) -> None:
    """With a narrow window, what lies beyond it matters."""
    monkeypatch.setattr(fft_lattice._ChernoffMoments, "window", lambda _: window)
    check(monkeypatch, Term(function, text, text, absent), lattice_holds(side))
