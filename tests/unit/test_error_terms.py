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

from accountant_service.numerics import (
    contour,
    gaussian,
    lattice,
    rare_events,
    saddle_point,
    sampled_gaussian,
    tilted_loss,
    two_sided,
    windowed_loss,
)
from accountant_service.numerics.contour import Effort
from accountant_service.numerics.privacy_loss import GaussianRatio, Release
from accountant_service.numerics.tilted_loss import Pairs, TiltedSampledGaussian
from accountant_service.numerics.windowed_loss import Window, WindowedLoss
from tests.helpers import log_uniform

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
        windowed_loss.windowed_loss.cache_clear()
        tilted_loss.tilted_loss.cache_clear()
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

RARE = [(Release(GaussianRatio(1 / 0.7), 1e-4), 2)]
MANY = [(Release(GaussianRatio(1 / 1.8), 2e-3), 900)]  # of which no outcome is common


def rare_bounds(run: Any = RARE, epsilon: float = 0.5, delta: float = 1e-12) -> tuple[float, float]:
    about = saddle_point.SaddlePoint(
        "removing", 1.0, epsilon, math.log(delta), epsilon, np.zeros(0), np.zeros(0)
    )
    found = rare_events.contour(run, about, Effort(math.log(1e-6), 0.0, 1 << 22))
    lower, upper = found.delta(np.array([epsilon]))
    return float(lower[0]), float(upper[0])


@pytest.fixture(scope="module")
def rare_delta() -> float:
    found = two_sided.delta_bounds(RARE, 0.5, 1e-7)
    return 0.5 * (found.lower + found.upper)


def rare_holds(exact: float) -> Callable[[], bool]:
    def holds() -> bool:
        windowed_loss.windowed_loss.cache_clear()
        lower, upper = rare_bounds()
        return lower <= exact <= upper

    return holds


def product_off_by(patch: Patch, share: float) -> None:
    genuine = rare_events._Product.value
    patch.setattr(rare_events._Product, "value", lambda of, scale: genuine(of, scale) * (1 - share))


def test_rounding_of_the_product(monkeypatch: Patch, rare_delta: float) -> None:
    product_off_by(monkeypatch, 1e-4)
    term = Term(
        rare_events._OnLine.values,
        "rounding = 16 * _EPS * terms * most",
        "rounding = 2e-4 * most",
        "rounding = 0 * most",
    )
    check(monkeypatch, term, rare_holds(rare_delta))


def test_common_scale_of_all_factors(monkeypatch: Patch, rare_delta: float) -> None:
    product_off_by(monkeypatch, 1e-4)
    monkeypatch.setattr(rare_events, "_LOG_SLIP_MAX", 1.0)
    term = Term(
        rare_events._OnLine.values,
        "log_slip += count * (b.slip + (a.slip if a else 0.0))",
        "log_slip += count * 1e-4",
        "log_slip += 0.0 * count",
    )
    check(monkeypatch, term, rare_holds(rare_delta))


def test_scale_of_a_factor_is_its_slip_or_its_error(monkeypatch: Patch, rare_delta: float) -> None:
    genuine = rare_events._Factor.of_few

    def off(*args: Any) -> Any:
        found = genuine(*args)
        return replace(found, rise=found.rise - 0.9e-4 * (1 + found.rise))

    monkeypatch.setattr(rare_events._Factor, "of_few", off)
    term = Term(
        tilted_loss.Nodes.measure,
        "2 * (float(self._relative().sum()) + 64 * _EPS)",
        "1e-4",
        "0.0",
    )
    check(monkeypatch, term, rare_holds(rare_delta))


@pytest.mark.parametrize("common", [False, True])
def test_mass_of_extreme_outcomes(monkeypatch: Patch, rare_delta: float, common: bool) -> None:
    """With a low top, much of δ comes from beyond it."""
    run, epsilon, exact = (RARE, 0.5, rare_delta) if common else (MANY, 0.28, 0.0)
    if not common:
        found = two_sided.delta_bounds(MANY, epsilon, 1e-7)
        exact = 0.5 * (found.lower + found.upper)
    top = epsilon if common else 0.2 * epsilon
    monkeypatch.setattr(rare_events._Sketch, "top", lambda *_: top)

    def holds() -> bool:
        lower, upper = rare_bounds(run, epsilon, exact)
        return lower <= exact <= upper

    text = "LeftOut(mass, tilts, moments)" if common else "LeftOut(mass)\n"
    absent = text.replace("mass", "0.0")
    check(monkeypatch, Term(rare_events.Divided.left_out, text, text, absent), holds)


# --- one release's law: the moment and the characteristic function against the true ones

LAWS: list[Callable[[], tuple[Any, float]]] = [
    lambda: (WindowedLoss(1e-3, 1.3, (), 100.0), 12.0),
    lambda: (WindowedLoss(1e-9, 3.0, (Window(0.02, 0.002, -1),), 100.0), 9.0),
    lambda: (WindowedLoss(1e-3, 1.3, (Window(0.02, 0.002, 1), Window(0.3, 0.02, -1)), 99.0), 9.0),
    lambda: (TiltedSampledGaussian(0.02, 1.0, "removing", 4.0), 4.0),
    lambda: (TiltedSampledGaussian(0.02, 1.0, "adding", 4.0), 4.0),
]
FREQUENCIES = np.array([0.5, 8.0, 60.0])


def nodes_of(law: Any, order: float) -> tilted_loss.Nodes:
    if isinstance(law, WindowedLoss):
        return law.nodes(order, float(FREQUENCIES[-1]))
    return law._nodes(float(FREQUENCIES[-1]))  # type: ignore[no-any-return]


def law_holds(law: Any, order: float, *, moment: bool, rise: bool) -> Callable[[], bool]:
    """Whether what is computed from now on is as near to the present values as it says."""
    true = nodes_of(law, order)
    true_rise, _ = true.characteristic(FREQUENCIES)

    def holds() -> bool:
        found = nodes_of(law, order)
        off = abs(found.log_moment - true.log_moment)
        found_rise, error = found.characteristic(FREQUENCIES)
        within = (np.abs(found_rise - true_rise) <= error).all()
        return (off <= found.moment_error or not moment) and (bool(within) or not rise)

    return holds


def integrand_off(patch: Patch, fault: Callable[[Any], Any]) -> None:
    genuine = tilted_loss.nodes

    def off(integrand: Any, *rest: Any) -> Any:
        return genuine(fault(integrand), *rest)

    patch.setattr(tilted_loss, "nodes", off)
    patch.setattr(windowed_loss, "nodes", off)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("reads", ["moment", "rise"])
def test_losses_in_the_weights(monkeypatch: Patch, law: Any, reads: str) -> None:
    """Every l is off by 1e-6, where it is multiplied by the order."""
    of, order = law()
    holds = law_holds(of, order, moment=reads == "moment", rise=reads == "rise")

    def fault(integrand: Any) -> Any:
        weight = np.exp(integrand.exponent - integrand.exponent.max())
        middle = float(weight @ integrand.z / weight.sum())
        side = np.sign(integrand.z - middle) if reads == "rise" else 1.0
        return replace(integrand, growth=integrand.growth + 0.9e-6 * order * side)

    integrand_off(monkeypatch, fault)
    term = Term(
        tilted_loss.growth_rounding,
        "abs(order) * loss_error",
        "abs(order) * (loss_error + 1e-6)",
        "0 * loss_error",
    )
    check(monkeypatch, term, holds)


@pytest.mark.parametrize("law", [LAWS[0], *LAWS[3:]])  # windows have a test of their own
def test_products_in_the_weights(monkeypatch: Patch, law: Any) -> None:
    of, order = law()
    holds = law_holds(of, order, moment=True, rise=False)
    integrand_off(monkeypatch, lambda of: replace(of, growth=of.growth + 0.9e-3 * abs(of.growth)))
    term = Term(
        tilted_loss.growth_rounding,
        "4 * _EPS * np.abs(order * loss)",
        "(1e-3 * np.abs(order * loss) + 1e-3 * (loss < -300))",
        "0 * loss",
    )
    check(monkeypatch, term, holds)


@pytest.mark.parametrize("law", LAWS)
def test_normal_density_in_the_weights(monkeypatch: Patch, law: Any) -> None:
    of, order = law()
    holds = law_holds(of, order, moment=True, rise=False)
    integrand_off(monkeypatch, lambda of: replace(of, z=of.z * (1 - 1e-5)))
    term = Term(
        tilted_loss.Integrand.normal_error.fget,  # type: ignore[attr-defined]
        "4 * _EPS * (2 + self.z * self.z)",
        "4e-5 * (2 + self.z * self.z)",
        "0 * self.z",
    )
    check(monkeypatch, term, holds)


@pytest.mark.parametrize("law", LAWS)
def test_losses_in_the_phases(monkeypatch: Patch, law: Any) -> None:
    """Every l is off by 1e-6, where it is multiplied by the frequency."""
    of, order = law()
    holds = law_holds(of, order, moment=False, rise=True)
    genuine = tilted_loss.Nodes.rise
    monkeypatch.setattr(
        tilted_loss.Nodes,
        "rise",
        lambda of, v: genuine(replace(of, loss=of.loss + 0.9e-6), v),
    )
    term = Term(
        tilted_loss.Nodes.characteristic,
        "frequencies * self.loss_error",
        "frequencies * (self.loss_error + 1e-6)",
        "0 * frequencies",
    )
    check(monkeypatch, term, holds)


WEIGHTS = "slip = integrand.growth_error + integrand.normal_error + 4 * _EPS * abs(peak)"
DIRECT = Term(
    tilted_loss.nodes, WEIGHTS, WEIGHTS.replace("4 * _EPS", "1e-6 + 0"), "slip = 0 * weight"
)
TOTAL = "rounding = float(weight @ slip) + 64 * _EPS"


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "term", [DIRECT, Term(tilted_loss.nodes, TOTAL, "rounding = 1e-6", "rounding = 64 * _EPS")]
)
def test_rounding_of_a_moment_from_its_logarithm(monkeypatch: Patch, law: Any, term: Term) -> None:
    """The moment by the direct sum, where every weight is off by the same share."""
    of, order = law()
    holds = law_holds(of, order, moment=True, rise=False)
    monkeypatch.setattr(tilted_loss, "_SMALL_MOMENT", -1.0)
    integrand_off(monkeypatch, lambda of: replace(of, growth=of.growth + 0.9e-6))
    check(monkeypatch, term, holds)


@pytest.mark.parametrize("law", LAWS[1:3])
@pytest.mark.parametrize("which", ["losses", "values"])
def test_windows_in_the_weights(monkeypatch: Patch, law: Any, which: str) -> None:
    """A window is evaluated at a loss that is off, or its logarithm is."""
    of, order = law()
    holds = law_holds(of, order, moment=True, rise=False)
    genuine = Window.log
    if which == "losses":
        monkeypatch.setattr(Window, "log", lambda of, loss: genuine(of, loss - of.sign * 0.9e-7))
        moved = "moved = loss_error / self.width"
        term = Term(Window.slip, moved, "moved = (loss_error + 1e-7) / self.width", "moved = 0")
        term = replace(term, absent="moved = 0 * loss_error")
    else:
        monkeypatch.setattr(Window, "log", lambda of, loss: genuine(of, loss) * (1 + 0.9e-5))
        evaluated = "16 * _EPS * (1 + np.maximum(u, 0.0) ** 2)"
        term = Term(Window.slip, evaluated, "1e-5", "0")
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

    true = WindowedLoss(0.3, 0.2, (), 3.0).nodes(order, 1.0).log_moment
    monkeypatch.setattr(tilted_loss, "_SMALL_MOMENT", -1.0)
    if side == "right":
        for module in (windowed_loss, sampled_gaussian):
            monkeypatch.setattr(module, "_REACH", 2.0)

    def holds() -> bool:
        found = law().nodes(order, 1.0)
        return abs(found.log_moment - true) <= -math.log1p(-min(found.moment_error, 0.99))

    text = "np.logaddexp(left, right)"
    check(monkeypatch, Term(WindowedLoss._rule, text, text, absent), holds)


def common_moment(q: float, mu: float, edge: float, order: float) -> Any:
    """log K(order) with one closing window of a tenth of its edge, to 30 digits."""

    def excess(z: Any) -> Any:
        loss = mp.log1p(mp.mpf(q) * mp.expm1(mp.mpf(mu) * z - mp.mpf(mu) ** 2 / 2))
        window = mp.erfc((loss - mp.mpf(edge)) / (mp.mpf(0.1 * edge) * mp.sqrt(2))) / 2
        return mp.npdf(z) * (mp.exp(mp.mpf(order) * loss) * window - 1)

    with mp.workdps(32):
        step = mp.mpf(1) / 64
        return mp.log1p(step * mp.fsum(excess(k * step) for k in range(-13 * 64, 13 * 64)))


def test_moments_are_as_exact_as_they_say() -> None:
    """Against 40 digits, where K is near 1 and T is a billion."""
    rng = random.Random(11)
    for _ in range(5):
        q, mu = log_uniform(rng, 1e-10, 1e-6), log_uniform(rng, 0.8, 3.2)
        edge, order = log_uniform(rng, 0.02, 0.5), log_uniform(rng, 1.5, 20)
        law = WindowedLoss(q, mu, (Window(edge, 0.1 * edge, -1),), 40.0)
        found = law.nodes(order, 10.0)
        exact = common_moment(q, mu, edge, order)
        assert abs(float(exact - mp.mpf(found.log_moment))) <= found.moment_error
        assert found.moment_error < 1e-16 + 1e-12 * abs(found.log_moment)


def test_a_moment_near_one_counts_what_lies_beyond_the_last_node() -> None:
    """A window that closes near the mode: beyond it n counts, and e^growth does not."""
    law = WindowedLoss(0.1, 2.0, (Window(0.05, 0.005, -1),), 10.0)
    assert law._high < 3
    spacing, _ = law._rule(np.array([2.0]), 1.0)
    z = tilted_loss.multiples(spacing, -13.0, 13.0)
    loss = law._loss(z)
    growth = np.where(z < law._high + spacing, 2.0 * loss + law._log_windows(loss), -np.inf)
    excess, error = tilted_loss.Integrand(z, spacing, growth, 0 * z).excess()
    fine = np.arange(-14.0, 14.0, 2.0**-12)
    loss = law._loss(fine)
    exact = 2.0**-12 * math.fsum(
        np.exp(2.0 * loss + law._log_windows(loss) - 0.5 * fine**2) / math.sqrt(2 * math.pi)
    )
    assert error < 1e-12
    assert abs(excess - (exact - 1)) < error + 1e-13


def test_a_moment_of_a_hundred_thousand_nodes() -> None:
    """The nodes beyond the last window were stepped by a rounded spacing: 5 times the error."""
    edge = 4.0915073371871726e-05
    windows = (Window(edge, 0.1 * edge, -1), Window(2 * edge, 0.14 * edge, -1))
    law = WindowedLoss(0.005819331240093667, 1 / 0.47017073846520147, windows, 28.345020488910894)
    found = law.nodes(28.345020488910894, 1878129.568292951)
    coarse = law.nodes(28.345020488910894, 1000.0)  # another rule for the same moment
    assert abs(found.log_moment - coarse.log_moment) <= found.moment_error + coarse.moment_error
    spacing, _ = law._rule(np.array([28.345020488910894]), 1878129.568292951)
    z = tilted_loss.multiples(spacing, -13.0, 13.0)
    assert (np.diff(z) == spacing).all()


@pytest.mark.parametrize("spacing", [0.3, 1 / 3, 2.34e-4, math.pi])
def test_nodes_are_exact_multiples(spacing: float) -> None:
    rounded = tilted_loss.representable(spacing)
    assert spacing * (1 - 2e-7) < rounded <= spacing
    z = tilted_loss.multiples(rounded, -13.0, 400.0)
    assert z[0] <= -13.0
    assert z[-1] >= 400.0
    assert all(Fraction(value) % Fraction(rounded) == 0 for value in z[:: max(1, len(z) // 50)])


def test_quadrature_of_the_normal_density() -> None:
    """∫ n·e^growth = 1 is integrated well, and n itself badly, with so wide a spacing."""
    z = np.arange(-30.0, 31.0, 2.0)
    integrand = tilted_loss.Integrand(z, 2.0, 0.25 * z * z - 0.5 * math.log(2), 0 * z)
    excess, error = integrand.excess()
    assert 1e-3 < abs(excess) <= error


def test_the_sum_that_weights_are_divided_by() -> None:
    """An atom at loss 0 is off by a thousandth: it moves φ only through the sum of all weights."""
    off = 1e-3
    found = tilted_loss.Nodes(
        np.array([0.5, 0.5]), np.array([0.0, 1.0]), np.array([off, 0.0]), 0.0, 0.0, 0.0, 0.0
    )
    rise, error = found.characteristic(FREQUENCIES)
    true = 0.5 / (1 + 0.5 * off) * np.expm1(1j * FREQUENCIES)
    assert (np.abs(rise - true) <= error).all()
    assert (np.abs(rise - true) > 1e-6).any()


def test_distances_of_pairs(monkeypatch: Patch) -> None:
    """Two atoms a distance of 1 apart, seen a thousandth further apart."""
    fault = 1.0009
    loss, mass = np.array([0.0, 1e-12, 1.0, 1.0 + 1e-12]) * fault, np.array([0.5, 0.0, 0.5])
    low = np.array([0.05, 0.1, 0.2])

    def holds() -> bool:
        bound = Pairs(loss, mass).log_decay(low, low * (1 + 1e-9))
        return bool((bound >= np.log(np.cos(0.5 * low))).all())

    term = Term(Pairs.__init__, "8 * _EPS * float(np.abs(loss).max())", "1e-3", "0.0")
    check(monkeypatch, term, holds)


# --- the contour: 300 releases whose δ has many digits

RUN = [(Release(GaussianRatio(1.0), 0.02), 300)]
NEAR, FAR = 1.0, 1.7  # where the contour is drawn, and where it is read


def run_bounds(epsilon: float, blur: float = 0.0) -> tuple[float, float]:
    tilted_loss.tilted_loss.cache_clear()
    saddle = saddle_point.of_epsilon(RUN, "removing", NEAR)
    found = contour.contour(RUN, saddle, Effort(math.log(1e-8), blur, 1 << 20))
    lower, upper = found.delta(np.array([epsilon]))
    return float(lower[0]), float(upper[0])


@pytest.fixture(scope="module", params=[NEAR, FAR], ids=["near", "far"])
def run_delta(request: pytest.FixtureRequest) -> tuple[float, float]:
    found = two_sided.delta_bounds(RUN, request.param, 1e-7)
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
        contour.Composed.values,
        "rounded = (5 + different) * _EPS * np.abs(value.log_value)",
        "rounded = 1e-5 * np.abs(value.log_value)",
        "rounded = 0.0",
    )
    check(monkeypatch, term, run_holds(run_delta))


def test_rounding_of_moments(monkeypatch: Patch, run_delta: tuple[float, float]) -> None:
    characteristic_off(monkeypatch, lambda of: replace(of, log_moment=of.log_moment * (1 - 9e-5)))
    term = Term(
        contour.Composed.values,
        "sums = (2 + different) * _EPS * abs(value.log_moment)",
        "sums = 1e-4 * abs(value.log_moment)",
        "sums = 0.0",
    )
    check(monkeypatch, term, run_holds(run_delta))


def test_slip_of_moments(monkeypatch: Patch, run_delta: tuple[float, float]) -> None:
    characteristic_off(monkeypatch, lambda of: replace(of, log_moment=of.log_moment - 9e-6))
    term = Term(
        contour.Composed.values, "(value.moment_error + sums)", "(1e-5 + sums)", "(0.0 + sums)"
    )
    check(monkeypatch, term, run_holds(run_delta))


def test_drift_of_phases(monkeypatch: Patch) -> None:
    """Phases are off by a share; where δ is steeper or flatter than the tilt, it matters."""
    found = two_sided.delta_bounds(RUN, FAR, 1e-7)
    genuine = contour._Sum.at

    def off(of: Any, epsilons: Any) -> Any:
        return genuine(of, epsilons * (1 + 3.9e-4))[0], genuine(of, epsilons)[1]

    monkeypatch.setattr(contour._Sum, "at", off)
    term = Term(
        contour._sum, "4 * _EPS * (size @ frequencies)", "4e-4 * (size @ frequencies)", "0 * error"
    )
    check(monkeypatch, term, run_holds((FAR, 0.5 * (found.lower + found.upper))))


def test_rounding_of_kernels(monkeypatch: Patch, run_delta: tuple[float, float]) -> None:
    genuine = contour.Line.kernels

    def off(line: Any, frequencies: Any) -> Any:
        return [(kernel * (1 - 7e-5), size) for kernel, size in genuine(line, frequencies)]

    monkeypatch.setattr(contour.Line, "kernels", off)
    term = Term(
        contour.trace, "8 * _EPS * (1 + exponents)", "8e-5 * (1 + exponents)", "0 * exponents"
    )
    check(monkeypatch, term, run_holds(run_delta))


def test_rounding_of_the_sum(monkeypatch: Patch, run_delta: tuple[float, float]) -> None:
    genuine = contour._Sum.at

    def off(of: Any, epsilons: Any) -> Any:
        total, error = genuine(of, epsilons)
        return total * (1 - 1e-5), error

    monkeypatch.setattr(contour._Sum, "at", off)
    term = Term(
        contour._sum,
        "size.sum(axis=-1) * _EPS * (len(frequencies) + 32)",
        "size.sum(axis=-1) * 1e-5",
        "0.0",
    )
    check(monkeypatch, term, run_holds(run_delta))


def test_blur_in_the_aliases_of_attacks(monkeypatch: Patch) -> None:
    """A short period and much blur: P(L + ηZ ≥ t) is counted again and again."""
    mu, period, blur, threshold = 1.0, 4.0, 1.2, 0.0
    pair = [(Release(GaussianRatio(mu)), 1)]
    genuine = contour.line_for
    monkeypatch.setattr(
        contour,
        "line_for",
        lambda saddle, effort: replace(genuine(saddle, effort), period=period, blur=blur),
    )
    spread = math.sqrt(mu**2 + blur**2)
    exact = float(stats.norm.sf((threshold - 0.5 * mu**2) / spread))

    def holds() -> bool:
        saddle = saddle_point.of_epsilon(pair, "removing", 1.0)
        found = contour.contour(pair, saddle, Effort(math.log(1e-6), 0.0, 1 << 22))
        return float(found.attacks(np.array([threshold]))[1][0]) <= exact

    text = "chernoff += 0.5 * (line.higher_tilts * blur) ** 2 - np.log"
    check(monkeypatch, Term(contour.Contour._aliases, text, text, "chernoff -= np.log"), holds)


@pytest.mark.parametrize(("side", "shift"), [("accused", 9e-6), ("innocent", -9e-6)])
def test_slip_of_moments_in_attacks(monkeypatch: Patch, side: str, shift: float) -> None:
    """P of an attack is bounded from below, Q of it from above."""

    def attack() -> float:
        tilted_loss.tilted_loss.cache_clear()
        saddle = saddle_point.of_epsilon(RUN, "removing", NEAR)
        found = contour.contour(RUN, saddle, Effort(math.log(1e-8), 0.0, 1 << 20))
        innocent, accused = found.attacks(np.array([NEAR]))
        return float(accused[0] if side == "accused" else innocent[0])

    exact = attack()
    characteristic_off(monkeypatch, lambda of: replace(of, log_moment=of.log_moment + shift))
    characteristic_off(monkeypatch, lambda of: replace(of, moment_error=of.moment_error + 1e-5))

    def holds() -> bool:
        return attack() <= exact if side == "accused" else attack() >= exact

    text = "slip = self.log_slip + 4 * _EPS * (1 + reach)"
    term = Term(contour.Contour.attacks, text, text, text.replace("self.log_slip", "0.0"))
    check(monkeypatch, term, holds)


@pytest.mark.parametrize("bound", ["delta", "attacks"])
def test_rounding_of_exponents(monkeypatch: Patch, bound: str) -> None:
    """e^{log_scale − sε} is off by a share, and with it every bound."""
    saddle = saddle_point.of_epsilon(RUN, "removing", NEAR)
    found = contour.contour(RUN, saddle, Effort(math.log(1e-8), 0.0, 1 << 20))
    at = np.array([NEAR])
    true = getattr(found, bound)(at)

    def holds() -> bool:
        off = {shift: replace(found, log_scale=found.log_scale + shift) for shift in (-9e-5, 9e-5)}
        low, high = getattr(off[-9e-5], bound)(at), getattr(off[9e-5], bound)(at)
        if bound == "delta":  # a lower and an upper bound
            return bool(high[0] <= true[1] and low[1] >= true[0])
        return bool(low[0] >= true[0] * (1 - 1e-9) and high[1] <= true[1] * (1 + 1e-9))

    terms = "np.abs(self.log_scale) + np.abs(tilt * epsilons)" if bound == "delta" else "reach"
    text = f"4 * _EPS * (1 + {terms})"
    term = Term(getattr(contour.Contour, bound), text, "1e-4", "0.0")
    check(monkeypatch, term, holds)


def kernel_tails_hold(line: contour.Line) -> bool:
    """Whether the integrals of all kernels over octaves are at most what is said of them."""
    low = 2.0 ** np.arange(-1, 6) / max(line.blur, 0.1)
    points = [np.linspace(a, 2 * a, 4001) for a in low]
    said = np.array(line.log_kernel_tails(low, 2 * low))
    for at, v in enumerate(points):
        growth = math.exp(0.5 * (line.blur * v[0]) ** 2)
        for kernel, (values, _) in enumerate(line.kernels(v)):
            found = float(np.trapezoid(np.abs(values) * growth, v))
            if found > math.exp(said[kernel, at]) * 1.01:  # the trapezoids' own excess
                return False
    return True


def test_tails_of_blurred_kernels(monkeypatch: Patch) -> None:
    lines = [
        contour.Line(s, 50.0, blur, (s + 0.5) * blur**2, -20.0, 0.0, np.zeros(0), np.zeros(0))
        for s, blur in itertools.product((0.3, 2.0, 12.0), (0.05, 0.3))
    ]
    term = Term(
        contour.Line.log_kernel_tails,
        "log_inverse + math.log(2) + larger",
        "log_inverse + math.log(2) + larger",
        "log_inverse - 3 + larger",
    )
    check(monkeypatch, term, lambda: all(kernel_tails_hold(line) for line in lines))


@pytest.mark.parametrize("blur", [0.0, 0.4])
def test_every_tail_of_kernels_is_covered(blur: float) -> None:
    for s in (0.2, 1.0, 7.0):
        threshold = (s + 0.5) * blur**2
        line = contour.Line(s, 60.0, blur, threshold, -20.0, 0.0, np.zeros(0), np.zeros(0))
        assert kernel_tails_hold(line)


def test_a_value_far_off_is_covered() -> None:
    """|Φ| ≤ 1, whatever is computed: the stated error reaches every such Φ."""

    @dataclass(frozen=True)
    class Off:
        """φ(0) = 1, computed as e^rise."""

        rise: float

        def characteristic(self, frequencies: Any) -> tilted_loss.Characteristic:
            value = np.full(len(frequencies), self.rise, complex)
            error = np.abs(np.exp(value.real) - 1)
            return tilted_loss.Characteristic(value, error, 0.0, 0.0)

    for rise in (1e-9, 1e-3, 0.5, 2.0, 30.0, -1e-9, -1e-3, -0.5, -2.0):
        found = contour.Composed([(Off(rise), 40)]).values(np.zeros(1))  # type: ignore[list-item]
        assert abs(found.value[0] - 1) <= found.error[0] * (1 + 1e-6)
        assert abs(found.value[0]) <= 1
        assert found.largest[0] >= 1 - 1e-12


# --- the lattice


def test_rounding_of_chernoff_moments(monkeypatch: Patch) -> None:
    rng = np.random.default_rng(3)
    mass = rng.random(10_000)
    step = lattice._Steps(-4000, mass / mass.sum(), 10**9)
    losses = (np.arange(len(mass)) + step.first) * 1e-3

    def exact(rate: float) -> float:
        return step.count * float(special.logsumexp(rate * losses, b=step.mass))

    genuine = lattice._coarsen

    def off(*args: Any) -> Any:
        points, masses = genuine(*args)
        return points, masses * (1 - 1e-4)

    monkeypatch.setattr(lattice, "_coarsen", off)

    def holds() -> bool:
        moments = lattice._Moments([step], 1e-3)
        wanted = np.array([exact(rate) for rate in moments.rates])
        below = np.array([exact(-rate) for rate in moments.rates])
        return bool((moments.upper >= wanted).all() and (moments.lower >= below).all())

    term = Term(lattice._moment_rounding, "_EPS * (4 * largest", "1e-4 * (4 * largest", "0 * (4")
    term = replace(term, absent="0 * (4 * largest")
    check(monkeypatch, term, holds)


@pytest.mark.parametrize("side", ["upper", "lower"])
def test_rounding_of_tilted_masses(monkeypatch: Patch, side: str) -> None:
    """Every mass of 50 Gaussian releases is off by 1e-4, inward."""
    mu, steps, delta = 1.0, 50, 1e-5
    pair = [(Release(GaussianRatio(mu / math.sqrt(steps))), steps)]
    exact = float(gaussian.epsilon(delta, mu))
    share = -1e-4 if side == "upper" else 1e-4
    genuine = lattice._Steps

    def off(first: int, mass: Any, count: int) -> Any:
        return genuine(first, mass * (1 + share), count)

    monkeypatch.setattr(lattice, "_Steps", off)

    def holds() -> bool:
        aim = lattice.Aim("removing", 4.0, exact)
        make = lattice.upper_profile if side == "upper" else lattice.lower_profile
        found = make(pair, aim, 2e-4, math.log(delta)).epsilon(delta)
        return found >= exact if side == "upper" else found <= exact

    term = Term(
        lattice._compose,
        "4 * _EPS * (4 + terms)",
        "1e-4 + 0 * terms",
        "0 * terms",
    )
    check(monkeypatch, term, holds)


MU, COUNT, DELTA, SPACING = 1.0, 50, 1e-5, 2e-4
PAIR = [(Release(GaussianRatio(MU / math.sqrt(COUNT))), COUNT)]


def lattice_holds(side: str) -> Callable[[], bool]:
    """Whether a lattice's bound of ε is on the right side of the closed form, and not vacuous."""
    exact = float(gaussian.epsilon(DELTA, MU))

    def holds() -> bool:
        aim = lattice.Aim("removing", 4.0, exact)
        make = lattice.upper_profile if side == "upper" else lattice.lower_profile
        found = make(PAIR, aim, SPACING, math.log(DELTA)).epsilon(DELTA)
        return found >= exact if side == "upper" else found <= exact

    return holds


@pytest.mark.parametrize("side", ["upper", "lower"])
@pytest.mark.parametrize(
    ("text", "enlarged"),
    [
        ("rounding += step.count * 4 * _EPS * abs(log_moment)", "rounding += 2e-4"),
        ("_EPS * (4 * (1 + tilt) * reach + size)", "2e-4"),
    ],
    ids=["product", "weights"],
)
def test_rounding_of_the_scale(monkeypatch: Patch, side: str, text: str, enlarged: str) -> None:
    """A composed mass is off by 1e-4, inward for P and for Q."""
    genuine = lattice._Tilted

    def off(*args: Any) -> Any:
        found = genuine(*args)
        inward = -1e-4 if side == "upper" or found.tilt > 4.5 else 1e-4
        return replace(found, log_scale=found.log_scale + inward)

    monkeypatch.setattr(lattice, "_Tilted", off)
    absent = "rounding += 0.0" if text.startswith("rounding") else "0.0"
    term = Term(lattice._compose, text, enlarged, absent)
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
    genuine = lattice.fft

    class Off:
        rfft = staticmethod(genuine.rfft)
        next_fast_len = staticmethod(genuine.next_fast_len)

        @staticmethod
        def irfft(*args: Any) -> Any:
            return genuine.irfft(*args) + (-0.9e-8 if side == "upper" else 0.9e-8)

    monkeypatch.setattr(lattice, "fft", Off)
    check(monkeypatch, Term(lattice._convolve, text, enlarged, absent), lattice_holds(side))


@pytest.mark.parametrize(
    ("side", "function", "text", "absent", "window"),
    [
        (
            "upper",
            lattice.upper_profile,
            "slack = infinite + math.exp(min(tilted.log_above + top, 0.0))",
            "slack = infinite",
            (-3.0, 4.5),
        ),
        ("lower", lattice.lower_profile, " - aliases * p_weights", "", (3.5, 6.0)),
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
    monkeypatch.setattr(lattice._Moments, "window", lambda _: window)
    check(monkeypatch, Term(function, text, text, absent), lattice_holds(side))
