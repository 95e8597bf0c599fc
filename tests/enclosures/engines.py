"""Bounds of every engine, for one direction at a time, compared with the balls of `oracle`."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from accountant_service.numerics.engines import (
    enumeration,
    lattice_refinement,
    rare_events,
    saddle_point,
    small_noise,
)
from accountant_service.numerics.engines.line_integral import (
    IntegrationSettings,
    integrate_composition,
)
from accountant_service.numerics.errors import ContradictionError, SlowDecayError
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.laws import gaussian
from accountant_service.numerics.laws.balls_in_bins import BallsInBins
from accountant_service.numerics.laws.bounded_range import BoundedRangePair
from accountant_service.numerics.laws.characteristic_function import has_characteristic_function
from accountant_service.numerics.laws.discrete_pairs import RandomizedResponsePair
from accountant_service.numerics.laws.dominating_pair import (
    DIRECTIONS,
    Composition,
    Direction,
    GaussianPair,
    LaplacePair,
    Release,
)
from accountant_service.numerics.laws.fixed_size_replacement import FixedSizeReplacement
from accountant_service.numerics.laws.gaussian_mixture import drawn_shifts, several_records
from accountant_service.numerics.laws.replaced_laplace import ReplacedLaplacePair
from accountant_service.numerics.laws.replaced_person import ReplacedPersonPair
from accountant_service.numerics.laws.replaced_record import ReplacedRecord
from accountant_service.numerics.laws.revealed_sample import RevealedSamplePair
from accountant_service.numerics.privacy_profile import LatticeProfileBounds
from accountant_service.numerics.trade_off import direction_curve
from tests.enclosures import oracle
from tests.enclosures.oracle import LAPLACE, NORMAL, Ball, arb
from tests.support.helpers import log_uniform

QUESTIONS: Final = ("δ at ε", "ε at δ", "attack")
_SMOOTHING: Final = 1e-3  # relative width of the bounds of a smoothed integral
_LATTICE_POINTS: Final = 1 << 15
_LATTICE_WIDTH: Final = 1e-2
_WIDE: Final = 1e-2  # radius relative to δ of balls that are sums over cells


@dataclass(frozen=True)
class Case:
    """A composition in one direction, an ε to ask at, and a function that encloses δ at any ε.

    A case of one release may have the `pair` that its balls are computed from.
    """

    kind: str
    releases: Composition
    direction: Direction
    epsilon: float
    enclose: Callable[[float], Ball]
    radius: float = 1e-9  # the most that a ball may have, relative to δ
    pair: oracle.MixturePair | None = None


@dataclass
class Tally:
    """Comparisons by kind, engine, question and direction, and descriptions of those outside."""

    counts: dict[tuple[str, str, str, str], int] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)

    def count(self, case: Case, engine: str, question: str, is_outside: bool, shown: str) -> None:
        """Count one bound, and describe it if the truth is beyond it."""
        key = (case.kind, engine, question, case.direction)
        self.counts[key] = self.counts.get(key, 0) + 1
        if is_outside:
            described = f"{case.releases!r}, ε = {case.epsilon!r}: {shown}"
            self.outside.append(f"{', '.join(key)}: {described}")

    def table(self) -> str:
        """Return a table of engines, and of each kind, by question and direction."""
        columns = [(question, direction) for question in QUESTIONS for direction in DIRECTIONS]
        heads = [f"{question}, {direction}" for question, direction in columns]
        lines = [f"| engine | kind | {' | '.join(heads)} |", "|---|---|" + "---|" * len(columns)]
        counts = self.counts | self._over_all_kinds()
        for engine, kind in sorted({(each[1], each[0]) for each in counts}):
            cells = [str(counts.get((kind, engine, *each), "–")) for each in columns]
            lines.append(f"| {engine} | {kind} | {' | '.join(cells)} |")
        total = sum(self.counts.values())
        return "\n".join([*lines, "", f"{total} comparisons, {len(self.outside)} outside."])

    def _over_all_kinds(self) -> dict[tuple[str, str, str, str], int]:
        sums: dict[tuple[str, str, str, str], int] = {}
        for (_, *rest), count in self.counts.items():
            sums["* all *", *rest] = sums.get(("* all *", *rest), 0) + count
        return sums


def compare(case: Case, tally: Tally) -> None:
    """Ask every engine that can answer, and count its bounds; a contradiction is outside."""
    try:
        _compare(case, tally)
    except ContradictionError as error:
        tally.outside.append(f"{case.kind}, {case.direction}, ε = {case.epsilon!r}: {error}")


def _compare(case: Case, tally: Tally) -> None:
    truth = case.enclose(case.epsilon)
    delta = float(truth.mid())
    if not 1e-250 < delta < 1 or float(truth.rad()) > case.radius * delta:
        return
    for engine, lower, upper in _delta_bounds(case):
        wrong = arb(lower) * (1 - rounding.MARGIN) > truth
        wrong = wrong or arb(upper) * (1 + rounding.MARGIN) < truth
        tally.count(case, engine, "δ at ε", wrong, f"[{lower!r}, {upper!r}], {truth}")
    for engine, lower, upper in _epsilon_bounds(case, delta):
        above = upper * (1 + rounding.MARGIN)
        wrong = math.isfinite(upper) and bool(case.enclose(above) > arb(delta))
        below = lower * (1 - rounding.MARGIN)
        wrong = wrong or (below > 0 and bool(case.enclose(below) < arb(delta)))
        tally.count(case, engine, "ε at δ", wrong, f"[{lower!r}, {upper!r}] at δ = {delta!r}")
    for engine, false_positives, true_positives in _attacks(case):
        # P(A) ≤ δ(ε) + e^ε·Q(A) for every event
        most = (truth + arb(case.epsilon).exp() * arb(false_positives)) * (1 + rounding.MARGIN)
        shown = f"({false_positives!r}, {true_positives!r})"
        tally.count(case, engine, "attack", bool(arb(true_positives) > most), shown)


def _saddle(case: Case) -> saddle_point.SaddlePoint:
    return saddle_point.find_at_epsilon(case.releases, case.direction, case.epsilon)


def _integrals(case: Case) -> Iterator[tuple[str, Any]]:
    """Yield each integral that converges, or else its smoothed form."""
    saddle = _saddle(case)
    width = _SMOOTHING / (1 + saddle.tilt)
    smoothed = math.sqrt(0.15 * width / (0.5 + saddle.tilt))
    if not all(has_characteristic_function(law) for law, _ in case.releases):
        return
    for name, integrate in (
        ("line integral", integrate_composition),
        ("rare events", rare_events.integrate_rare_events),
    ):
        for suffix, smoothing in (("", 0.0), (", smoothed", smoothed)):
            settings = IntegrationSettings(
                math.log(1e-6), smoothing, 1 << (24 if smoothing else 20)
            )
            with contextlib.suppress(SlowDecayError):
                yield name + suffix, integrate(case.releases, saddle, settings)


def _lattices(case: Case) -> Iterator[tuple[str, Any, Any]]:
    """Yield the lower and upper profile of a lattice in doubles, and in longer numbers."""
    saddle = _saddle(case)
    width = _LATTICE_WIDTH / (1 + saddle.tilt)
    for name, extended in (("lattice", False), ("lattice, extended", True)):
        lattice = lattice_refinement.RefinedLattice.around(
            case.releases,
            saddle,
            max(saddle.log_delta, -600.0) - 10.0,
            width,
            _LATTICE_POINTS,
            extended=extended,
        )
        upper, lower = lattice.profiles()
        if upper is not None and lower is not None:
            yield name, lower, upper


def _delta_bounds(case: Case) -> Iterator[tuple[str, float, float]]:
    """Yield each engine's name, and its lower and upper bound on δ at the case's ε."""
    at = np.array([case.epsilon])
    yield "Rényi", 0.0, math.exp(min(_saddle(case).bound, 0.0))
    for name, line in _integrals(case):
        lower, upper = line.delta(at)
        yield name, float(lower[0]), float(upper[0])
    for name, low, high in _lattices(case):
        yield name, low.delta(case.epsilon), high.delta(case.epsilon)
    if (found := enumeration.profile(case.releases, case.direction)) is not None:
        lower, upper = found.delta(at)
        yield "enumeration", float(lower[0]), float(upper[0])
    # private: the public functions return the larger of both directions
    if (little := small_noise._build_profile(case.releases, -730.0)) is not None:
        logs = little.log_bounds(case.direction, case.epsilon)
        yield "little noise", math.exp(logs[0]), math.exp(logs[1])
    mu = _unsampled_mu(case)
    if mu is not None:
        exact = math.exp(float(gaussian.log_delta(case.epsilon, mu)))
        yield "closed form", rounding.down(exact), rounding.up(exact)
    curve = direction_curve(case.releases, case.direction, at)
    yield "trade-off", float(curve.lower[0]), float(curve.upper[0])


def _epsilon_bounds(case: Case, delta: float) -> Iterator[tuple[str, float, float]]:
    """Yield each engine's name, and its lower and upper bound on ε at δ."""
    found = saddle_point.find_at_delta(case.releases, case.direction, math.log(delta))
    yield "Rényi", 0.0, max(found.bound, 0.0)
    for name, line in _integrals(case):
        yield name, *line.epsilon(delta, max(found.bound, 2 * case.epsilon))
    for name, low, high in _lattices(case):
        yield name, low.epsilon(delta), high.epsilon(delta)
    if (listed := enumeration.profile(case.releases, case.direction)) is not None:
        yield "enumeration", *listed.epsilon(delta)
    mu = _unsampled_mu(case)
    if mu is not None:
        yield (
            "closed form",
            rounding.down(float(gaussian.epsilon_lower(delta, mu))),
            rounding.up(float(gaussian.epsilon(delta, mu))),
        )


def _attacks(case: Case) -> Iterator[tuple[str, float, float]]:
    """Yield each engine's name, and the rates of its attack that wins most at the case's ε."""

    def best(rates: tuple[Any, Any]) -> tuple[float, float]:
        # times e^−ε, which can underflow: e^ε overflows for the largest ε
        at = int(np.argmax(np.exp(-case.epsilon) * rates[1] - rates[0]))
        return float(rates[0][at]), float(rates[1][at])

    thresholds = case.epsilon * np.array([0.9, 1.0, 1.1])
    for name, line in _integrals(case):
        yield name, *best(line.attack_rates(thresholds))
    for name, low, high in _lattices(case):
        yield name, *best(LatticeProfileBounds(high, low).attack_rates(thresholds))
    if (listed := enumeration.profile(case.releases, case.direction)) is not None:
        yield "enumeration", *best(listed.attack_rates(thresholds))
    curve = direction_curve(case.releases, case.direction, thresholds)
    yield "trade-off", *best((curve.false_positives, curve.true_positives))


def _unsampled_mu(case: Case) -> float | None:
    """Return μ of a single unsampled Gaussian release."""
    if len(case.releases) != 1:
        return None
    law, count = case.releases[0]
    is_gaussian = isinstance(law, Release) and isinstance(law.base_pair, GaussianPair)
    if count > 1 or not is_gaussian or law.sample_rate < 1.0:
        return None
    return law.base_pair.mu


Draw = Callable[[random.Random, Direction], Case | None]


def _rate(rng: random.Random) -> float:
    """Return a sample rate: ordinary, or so near to 1 that 1 − q has few digits."""
    if rng.random() < 0.4:
        return 1.0 - 2.0 ** -rng.randint(2, 53)
    return log_uniform(rng, 1e-4, 0.95)


def _of_pair(
    kind: str,
    law: Any,
    pair: oracle.MixturePair,
    rng: random.Random,
    direction: Direction,
    reach: tuple[float, float],
) -> Case | None:
    """Return a case of one release, at the loss of a random output within `reach`."""
    loss = float(pair.loss(arb(rng.uniform(*reach))).mid())
    epsilon = loss if direction == "removing" else -loss
    if not 1e-6 < epsilon < 500:
        return None
    return Case(kind, [(law, 1)], direction, epsilon, lambda e: pair.delta(e, direction), pair=pair)


def _draw_gaussian(rng: random.Random, direction: Direction) -> Case | None:
    q, mu = _rate(rng), log_uniform(rng, 0.05, 20.0)
    law = Release(GaussianPair(mu), q)
    reach = (-8.0, mu + 8.0)
    return _of_pair("sampled Gaussian", law, oracle.poisson(NORMAL, q, mu), rng, direction, reach)


def _draw_little_noise(rng: random.Random, direction: Direction) -> Case | None:
    """Return a release whose output shows whether the record was sampled."""
    q, mu = rng.uniform(0.05, 0.95), log_uniform(rng, 14.0, 50.0)
    law, pair = Release(GaussianPair(mu), q), oracle.poisson(NORMAL, q, mu)
    reach = (-4.0, 4.0) if direction == "adding" else (mu / 2 + 5 / mu, mu / 2 + 400 / mu)
    return _of_pair("little noise", law, pair, rng, direction, reach)


def _draw_unsampled(rng: random.Random, direction: Direction) -> Case | None:
    mu = log_uniform(rng, 0.01, 20.0)
    epsilon = max(mu * mu / 2 + mu * rng.uniform(-3, 9), 0.01)
    return Case(
        "Gaussian",
        [(Release(GaussianPair(mu)), 1)],
        direction,
        epsilon,
        lambda e: oracle.gaussian_delta(arb(e), arb(mu)),
    )


def _draw_laplace(rng: random.Random, direction: Direction) -> Case | None:
    q, beta = _rate(rng), log_uniform(rng, 0.05, 20.0)
    law, pair = Release(LaplacePair(beta), q), oracle.poisson(LAPLACE, q, beta)
    return _of_pair("sampled Laplace", law, pair, rng, direction, (0.01 * beta, 0.99 * beta))


def _draw_replaced(rng: random.Random, direction: Direction) -> Case | None:
    q, mu = _rate(rng), log_uniform(rng, 0.05, 10.0)
    law, pair = ReplacedRecord(mu, q), oracle.replaced(NORMAL, q, mu)
    return _of_pair("replaced record", law, pair, rng, direction, (-mu - 8.0, mu + 8.0))


def _draw_replaced_laplace(rng: random.Random, direction: Direction) -> Case | None:
    q, beta = _rate(rng), log_uniform(rng, 0.05, 15.0)
    law, pair = Release(ReplacedLaplacePair(beta, q)), oracle.replaced(LAPLACE, q, beta)
    return _of_pair("replaced, Laplace", law, pair, rng, direction, (-0.99 * beta, 0.99 * beta))


def _draw_person(rng: random.Random, direction: Direction, most_records: int = 80) -> Case | None:
    k, q, mu = round(log_uniform(rng, 1, most_records)), _rate(rng), log_uniform(rng, 0.05, 2.0)
    law, pair = Release(several_records(k, q, mu)), oracle.person(k, q, mu)
    return _of_pair("person", law, pair, rng, direction, (-6.0, k * mu + 6.0))


def _draw_mixture(rng: random.Random, direction: Direction) -> Case | None:
    """Return contributions of random sizes, half of the time with some of size 0."""
    count = rng.randint(2, 8)
    shifts = sorted(log_uniform(rng, 0.01, 10.0) for _ in range(count))
    if rng.random() < 0.5:
        shifts[0] = 0.0
    parts = [log_uniform(rng, 1e-6, 1.0) for _ in shifts]
    chances = [each / math.fsum(parts) for each in parts]
    p = [(arb(chance), arb(shift)) for chance, shift in zip(chances, shifts, strict=True)]
    if rng.random() < 0.5:
        pair = oracle.MixturePair(NORMAL, p, [(w, -x) for w, x in p])
        law: Any = Release(ReplacedPersonPair(drawn_shifts(shifts, chances)))
        reach = (-shifts[-1] - 6.0, shifts[-1] + 6.0)
        return _of_pair("replaced mixture", law, pair, rng, direction, reach)
    pair = oracle.MixturePair(NORMAL, p, [(arb(1), arb(0))])
    law = Release(drawn_shifts(shifts, chances))
    return _of_pair("mixture", law, pair, rng, direction, (-6.0, shifts[-1] + 6.0))


def _draw_replaced_person(rng: random.Random, direction: Direction) -> Case | None:
    k, q, mu = rng.randint(1, 12), _rate(rng), log_uniform(rng, 0.05, 2.0)
    law = Release(ReplacedPersonPair(several_records(k, q, mu)))
    pair = oracle.person(k, q, mu, is_replaced=True)
    reach = (-k * mu - 6.0, k * mu + 6.0)
    return _of_pair("replaced person", law, pair, rng, direction, reach)


def _draw_fixed_size(rng: random.Random, direction: Direction) -> Case | None:
    q, mu = _rate(rng), log_uniform(rng, 0.05, 10.0)
    pair = oracle.poisson(NORMAL, q, mu)
    case = _of_pair("fixed size", FixedSizeReplacement(mu, q), pair, rng, "removing", (0, mu + 8))
    if case is None:  # both directions have the profile of the sampled release that is removed
        return None
    return Case(case.kind, case.releases, direction, case.epsilon, case.enclose)


def _draw_response(rng: random.Random, direction: Direction) -> Case | None:
    q, flip, count = _rate(rng), rng.uniform(0.01, 0.9), round(log_uniform(rng, 1, 200))
    true, other = 1 - arb(flip) / 2, arb(flip) / 2
    p = (1 - arb(q)) * other + arb(q) * true
    pairs = oracle.repeated_pair(p, other, count)
    law = Release(RandomizedResponsePair(2, flip), q)
    end = count * float(
        abs((p / other).log() if direction == "removing" else ((1 - p) / (1 - other)).log())
    )
    return Case(
        "randomized response",
        [(law, count)],
        direction,
        rng.uniform(0.05, 0.97) * end,
        lambda e: oracle.outcomes_delta(pairs, e, direction),
    )


def _draw_revealed(rng: random.Random, direction: Direction) -> Case | None:
    q, mu, count = log_uniform(rng, 1e-3, 0.9), log_uniform(rng, 0.1, 3.0), rng.randint(1, 40)
    law = Release(RevealedSamplePair(GaussianPair(mu), q))
    return Case(
        "revealed sample",
        [(law, count)],
        direction,
        log_uniform(rng, 0.05, 1.0) * mu * (1 + 3 * math.sqrt(count)),
        lambda e: oracle.revealed_gaussian(arb(e), q, mu, count),
    )


def _draw_composed(rng: random.Random, direction: Direction) -> Case | None:
    """Return many sampled releases, mostly with an unsampled one, whose decay is certain."""
    q, mu = log_uniform(rng, 1e-4, 0.5), log_uniform(rng, 0.2, 1.6)
    is_alone = rng.random() < 0.3
    if is_alone:
        q = log_uniform(rng, 0.02, 0.5)
    count = round(log_uniform(rng, 40 / q, 400 / q) if is_alone else log_uniform(rng, 1, 3e4))
    other = 0.0 if is_alone else log_uniform(rng, 0.1, 2.0)
    releases = [(Release(GaussianPair(mu), q), count)]
    if other:
        releases.append((Release(GaussianPair(other)), 1))
    saddle = saddle_point.find_at_delta(
        releases, direction, math.log(log_uniform(rng, 1e-14, 1e-2))
    )
    if not saddle.tilt < 200:
        return None
    digits = 30.0 - saddle.log_delta
    width = math.sqrt(max(2 * digits * _variance(saddle), 1e-6))
    sum_of = oracle.Composed(
        q,
        mu,
        count,
        other,
        direction,
        saddle.tilt,
        digits / saddle.tilt + 3 * width + 1.0,
        math.sqrt(2 * digits) / (other or math.sqrt(_variance(saddle))),
    )
    return Case("many releases", releases, direction, saddle.epsilon, sum_of.delta)


def _variance(saddle: saddle_point.SaddlePoint) -> float:
    """Estimate the variance of the tilted loss from second differences of its log-moments."""
    at = int(np.argmin(np.abs(saddle.tilts - saddle.tilt)))
    at = min(max(at, 1), len(saddle.tilts) - 2)
    s, k = saddle.tilts[at - 1 : at + 2], saddle.moments[at - 1 : at + 2]
    slopes = np.diff(k) / np.diff(s)
    return float(max((slopes[1] - slopes[0]) / (0.5 * (s[2] - s[0])), 1e-9))


def _draw_bounded_range(rng: random.Random, direction: Direction) -> Case | None:
    bound = log_uniform(rng, 0.05, 20.0)
    return Case(
        "bounded range",
        [(Release(BoundedRangePair(bound)), 1)],
        direction,
        rng.uniform(0.01, 0.97) * bound,
        lambda e: (
            (1 - ((arb(e) - bound) / 2).exp()) ** 2 / (1 - (-arb(bound)).exp())
            if e < bound
            else arb(0)
        ),
    )


def _twice(kind: str, draw_one: Draw) -> Draw:
    """Return a function that draws two releases of a law; see `oracle.Twice`."""

    def draw(rng: random.Random, direction: Direction) -> Case | None:
        one = None
        while one is None or one.pair is None:
            one = draw_one(rng, direction)
        twice = oracle.Twice(one.pair)
        return Case(
            f"{kind}, twice",
            [(one.releases[0][0], 2)],
            direction,
            one.epsilon * rng.uniform(0.3, 1.6),
            lambda e: twice.delta(e, direction),
            radius=_WIDE,
        )

    draw.__name__ = f"_draw_twice_{kind.replace(' ', '_')}"
    return draw


def _draw_two_bins(rng: random.Random, direction: Direction) -> Case | None:
    """Return an epoch of balls in two bins; see `oracle.TwoBins`."""
    mu = log_uniform(rng, 0.1, 3.0)
    epsilon = rng.uniform(0.05, 1.0) * (mu + mu * mu / 2)
    bins = oracle.TwoBins(mu)
    releases = [(BallsInBins(mu, 2), 1)]
    return Case(
        "balls in two bins",
        releases,
        direction,
        epsilon,
        lambda e: bins.delta(e, direction),
        radius=_WIDE,
    )


COSTLY: Final = (  # a second for each ball
    _twice("sampled Gaussian", _draw_gaussian),
    _twice("sampled Laplace", _draw_laplace),
    _twice("replaced record", _draw_replaced),
    _twice("replaced Laplace", _draw_replaced_laplace),
    _twice("person", partial(_draw_person, most_records=12)),
    _twice("replaced person", _draw_replaced_person),
)
DRAWS: Final[tuple[Draw, ...]] = (
    _draw_unsampled,
    _draw_gaussian,
    _draw_little_noise,
    _draw_laplace,
    _draw_replaced,
    _draw_replaced_laplace,
    _draw_person,
    _draw_mixture,
    _draw_replaced_person,
    _draw_fixed_size,
    _draw_bounded_range,
    _draw_response,
    _draw_revealed,
    _draw_composed,
    _draw_two_bins,
    *COSTLY,
)


def compare_random_cases(seed: int, points: int, draws: tuple[Draw, ...] = DRAWS) -> Tally:
    """Compare about `points` random cases of each kind in each direction; fewer costly ones."""
    tally = Tally()
    for number, draw in enumerate(draws):
        for direction in DIRECTIONS:
            rng = random.Random(f"{seed} {number} {direction}")
            for _ in range(math.ceil(points / 20) if draw in COSTLY else points):
                case = draw(rng, direction)
                if case is not None:
                    compare(case, tally)
    return tally
