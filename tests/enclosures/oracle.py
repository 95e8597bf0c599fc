"""δ(ε) in ball arithmetic (Arb, through python-flint), for one direction at a time.

Every function returns a ball that holds the exact value for the doubles that describe the
mechanism. Nothing is shared with the service but the formulas of the papers. Four forms cover what
is compared:

* One release whose pair (P, Q) consists of mixtures of one noise, with a loss that increases with
  the output z. The supremum of P(A) − e^ε·Q(A) is attained by {loss > ε}. Bisection brackets the
  output with that loss, and a ball over the bracket holds the supremum.
* Outcomes that can be listed: a sum over them.
* T sampled Gaussian releases, with or without an unsampled one: a line integral (see `Composed`).
* Two releases of any such pair, and an epoch of balls in two bins: cells of the first output (see
  `Twice` and `TwoBins`), which are convex in the other. These balls are wider: about 1e-4 of δ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from flint import acb, arb, ctx

BITS: Final = 240
Ball = Any  # arb, which has no types
Direction = Literal["removing", "adding"]
Mixture = Sequence[tuple[Ball, Ball]]  # weights and centres

ctx.prec = BITS


def ball(low: Ball, high: Ball) -> Ball:
    """Return a ball around two balls."""
    return arb(low).union(arb(high))


def positive_part(value: Ball) -> Ball:
    """Return max(value, 0)."""
    return value.nonnegative_part() if value.upper() > 0 else arb(0)


def normal_above(z: Ball) -> Ball:
    """Return P(Z > z)."""
    return (z / arb(2).sqrt()).erfc() / 2


def laplace_above(z: Ball) -> Ball:
    """Return P(X > z) for Laplace noise of scale 1."""
    if z < 0:
        return 1 - z.exp() / 2
    if z >= 0:
        return (-z).exp() / 2
    return ball(laplace_above(z.lower()), laplace_above(z.upper()))


@dataclass(frozen=True)
class Noise:
    """A symmetric noise: P(X > z), and log density(z) up to a constant."""

    above: Callable[[Ball], Ball]
    log_density: Callable[[Ball], Ball]


NORMAL: Final = Noise(normal_above, lambda z: -z * z / 2)
LAPLACE: Final = Noise(laplace_above, lambda z: -abs(z))


def gaussian_delta(epsilon: Ball, mu: Ball) -> Ball:
    """Return δ(ε) of a Gaussian mechanism, ε ≥ 0."""
    e, m = arb(epsilon), arb(mu)
    if m.is_zero():
        return arb(0)
    return normal_above(e / m - m / 2) - e.exp() * normal_above(e / m + m / 2)


@dataclass(frozen=True)
class MixturePair:
    """Two mixtures of one noise; the ratio of the densities of `p` and `q` increases with z."""

    noise: Noise
    p: Mixture
    q: Mixture

    def delta(self, epsilon: float, direction: Direction) -> Ball:
        """Return δ(ε): of P and Q when removing, of Q and P when adding."""
        factor = arb(epsilon).exp()
        target = arb(epsilon) if direction == "removing" else -arb(epsilon)
        z = self.output_at(target)
        if z is None:
            return arb(0)
        if direction == "removing":
            found = self._above(self.p, z) - factor * self._above(self.q, z)
        else:
            found = self._below(self.q, z) - factor * self._below(self.p, z)
        return positive_part(found)

    def loss(self, z: Ball) -> Ball:
        """Return the log of the ratio of the densities."""
        return (self._density(self.p, z) / self._density(self.q, z)).log()

    def output_at(self, loss: Ball, reach: float = 400.0) -> Ball | None:
        """Return a ball around the output with a given loss; None if no output has it."""
        low, high = arb(-reach), arb(reach)
        if self.loss(low) >= loss or self.loss(high) <= loss:
            return None
        for _ in range(BITS):
            middle = ((low + high) / 2).mid()
            at = self.loss(middle)
            if at < loss:
                low = middle
            elif at > loss:
                high = middle
            else:
                break
        return ball(low, high)

    def _density(self, mixture: Mixture, z: Ball) -> Ball:
        return sum((w * self.noise.log_density(z - x).exp() for w, x in mixture), arb(0))

    def _above(self, mixture: Mixture, z: Ball) -> Ball:
        return sum((w * self.noise.above(z - x) for w, x in mixture), arb(0))

    def _below(self, mixture: Mixture, z: Ball) -> Ball:
        return sum((w * self.noise.above(x - z) for w, x in mixture), arb(0))


def poisson(noise: Noise, rate: float, shift: Ball) -> MixturePair:
    """Return the pair of a Poisson-sampled release."""
    q = arb(rate)
    return MixturePair(noise, [(1 - q, arb(0)), (q, arb(shift))], [(arb(1), arb(0))])


def replaced(noise: Noise, rate: float, shift: Ball) -> MixturePair:
    """Return the pair of a Poisson-sampled release with one replaced record."""
    q, x = arb(rate), arb(shift)
    return MixturePair(noise, [(1 - q, arb(0)), (q, x)], [(1 - q, arb(0)), (q, -x)])


def binomial(trials: int, rate: float) -> list[Ball]:
    """Return the masses of a binomial law."""
    q = arb(rate)
    return [arb.bin_uiui(trials, j) * q**j * (1 - q) ** (trials - j) for j in range(trials + 1)]


def person(records: int, rate: float, mu: Ball, *, is_replaced: bool = False) -> MixturePair:
    """Return the pair of a person with several records who leaves, or is replaced."""
    weights = binomial(records, rate)
    p = [(w, j * arb(mu)) for j, w in enumerate(weights)]
    return MixturePair(NORMAL, p, [(w, -x) for w, x in p] if is_replaced else [(arb(1), arb(0))])


_CELLS: Final = 600  # of the first of two outputs
_ROOT_RADIUS: Final = arb(2) ** -80


@dataclass(frozen=True)
class Twice:
    """δ(ε) of two releases of one pair: E_P[h(e^ε·Q/P)] over the first output.

    h(t) = sup P(A) − t·Q(A) of the second release is convex and decreasing. In a cell of outputs
    with masses p and q, t = e^ε·Q/P has the mean e^ε·q/p under P. So the cell counts at least
    p·h(mean), by Jensen's inequality, and at most as much as the chord between its edges.
    """

    pair: MixturePair

    def delta(self, epsilon: float, direction: Direction) -> Ball:
        """Return δ(ε): of P and Q when removing, of Q and P when adding."""
        return (self if direction == "removing" else Twice(self._mirrored))._removing(epsilon)

    @property
    def _mirrored(self) -> MixturePair:
        """The pair of Q and P, with outputs −z: its loss increases as well."""
        return MixturePair(
            self.pair.noise,
            [(w, -x) for w, x in self.pair.q],
            [(w, -x) for w, x in self.pair.p],
        )

    def _removing(self, epsilon: float) -> Ball:
        pair, factor = self.pair, arb(epsilon).exp()
        masses = [(pair._above(pair.p, z), pair._above(pair.q, z)) for z in self._edges]
        ratios = [factor * (-pair.loss(z)).exp() for z in self._edges]
        highest = [self._advantage(t)[1] for t in ratios]
        p, q = 1 - masses[0][0], 1 - masses[0][1]
        low = p * self._advantage(factor * q / p)[0]
        high = p * highest[0]
        for k in range(len(ratios) - 1):
            p, q = masses[k][0] - masses[k + 1][0], masses[k][1] - masses[k + 1][1]
            if not p > 0:
                high += p.upper()
                continue
            mean, first, last = factor * q / p, ratios[k], ratios[k + 1]
            low += p * self._advantage(mean)[0]
            share = (first - mean) / (first - last)
            high += p * (highest[k] + (highest[k + 1] - highest[k]) * share)
        p, q = masses[-1]
        low += p * self._advantage(factor * q / p)[0]
        high += p * (1 + (highest[-1] - 1) * factor * q / p / ratios[-1])
        return positive_part(ball(low.lower(), high.upper()))

    @cached_property
    def _centres(self) -> list[float]:
        return sorted(float(x.mid()) for _, x in (*self.pair.p, *self.pair.q))

    @cached_property
    def _edges(self) -> list[Ball]:
        """The edges of the cells; the loss of Laplace noise is constant beyond the centres."""
        reach = 0.0 if self.pair.noise is LAPLACE else 9.0
        low, high = self._centres[0] - reach, self._centres[-1] + reach
        inner = [low + (high - low) * k / _CELLS for k in range(1, _CELLS)]
        return [arb(low), *map(arb, inner), arb(high)]

    def _advantage(self, t: Ball) -> tuple[Ball, Ball]:
        """Return a lower and an upper bound on h(t)."""
        pair = self.pair
        low, high = arb(self._table[0][0]), arb(self._table[0][-1])
        if pair.loss(high).exp() < t:  # A is beyond the table, or empty
            return arb(0), arb(0) if pair.noise is LAPLACE else pair._above(pair.p, high).upper()
        if pair.loss(low).exp() > t:
            return 1 - t, 1 - t if pair.noise is LAPLACE else arb(1)
        z = arb(self._root_near(t))
        found = pair._above(pair.p, z) - t * pair._above(pair.q, z)
        least, most = z - _ROOT_RADIUS, z + _ROOT_RADIUS
        if not (pair.loss(least).exp() < t < pair.loss(most).exp()):  # Newton's method is lost
            within = pair.output_at(t.log(), 36.0)
            if within is None:
                return found, arb(1)
            least, most = within.lower(), within.upper()
        return found, (pair._above(pair.p, least) - t * pair._above(pair.q, most)).upper()

    def _root_near(self, t: Ball) -> Ball:
        """Return an output whose loss is almost log t, by Newton's method."""
        target = t.log().mid()
        outputs, losses = self._table
        z = arb(float(np.interp(float(target), losses, outputs)))
        for _ in range(8):
            error = (self.pair.loss(z) - target).mid()
            slope = self._slope(float(z))
            if abs(error) < slope * arb(2) ** -90:
                break
            z = (z - error / slope).mid()
        return z

    @cached_property
    def _table(self) -> tuple[Any, Any]:
        reach = 0.0 if self.pair.noise is LAPLACE else 36.0
        low, high = self._centres[0] - reach, self._centres[-1] + reach
        outputs = np.linspace(low, high, 2001)
        return outputs, np.array([float(self.pair.loss(arb(float(z))).mid()) for z in outputs])

    def _slope(self, z: float) -> float:
        step = 1e-9
        ahead, behind = (self.pair.loss(arb(z + each)) for each in (step, -step))
        return max(float((ahead - behind).mid()) / (2 * step), 1e-30)


@dataclass(frozen=True)
class TwoBins:
    """δ(ε) of an epoch of balls in two bins.

    R = (X₁ + X₂)/2, with X lognormal of mean 1 under Q. δ is E[(R − e^ε)⁺] when removing and
    E[(1 − e^ε·R)⁺] when adding. Given X₁ = x it is the price of an option on X₂, which is convex in
    x, so cells of X₁ bound it as in `Twice`.
    """

    mu: float

    def delta(self, epsilon: float, direction: Direction) -> Ball:
        """Return δ(ε)."""
        price = self._call if direction == "removing" else self._put
        factor, mu = arb(epsilon).exp(), arb(self.mu)
        edges = [arb(-9.0 + (18.0 + self.mu) * k / _CELLS) for k in range(_CELLS + 1)]
        values = [(mu * z - mu * mu / 2).exp() for z in edges]
        prices = [price(factor, x) for x in values]
        masses = [(normal_above(z), normal_above(z - mu)) for z in edges]
        low, high = arb(0), arb(0)
        bounds = [(arb(1), arb(1)), *masses, (arb(0), arb(0))]
        values = [arb(0), *values]
        prices = [price(factor, arb(0)), *prices]
        for k in range(len(values)):
            mass = bounds[k][0] - bounds[k + 1][0]
            mean = (bounds[k][1] - bounds[k + 1][1]) / mass
            low += mass * price(factor, mean)
            if k + 1 < len(values):
                slope = (prices[k + 1] - prices[k]) / (values[k + 1] - values[k])
            else:  # beyond the last edge a price rises by at most half as much as x
                slope = arb(0.5) if direction == "removing" else arb(0)
            high += mass * (prices[k] + slope * (mean - values[k]))
        return positive_part(ball(low.lower(), high.upper()))

    def _call(self, factor: Ball, x: Ball) -> Ball:
        """Return E[((x + X)/2 − e^ε)⁺]."""
        strike = 2 * factor - x
        if strike > 0:
            above, beyond = self._exceeds(strike)
            return (above - strike * beyond) / 2
        return (1 - strike) / 2 if strike < 0 else ball((1 - strike).lower() / 2, arb(1) / 2)

    def _put(self, factor: Ball, x: Ball) -> Ball:
        """Return E[(1 − e^ε·(x + X)/2)⁺]."""
        strike = 2 / factor - x
        if strike > 0:
            above, beyond = self._exceeds(strike)
            return factor / 2 * (strike * (1 - beyond) - (1 - above))
        return arb(0) if strike < 0 else ball(arb(0), factor * strike.upper())

    def _exceeds(self, strike: Ball) -> tuple[Ball, Ball]:
        """Return E[X; X > strike] and P(X > strike)."""
        mu = arb(self.mu)
        z = strike.log() / mu
        return normal_above(z - mu / 2), normal_above(z + mu / 2)


Outcomes = Iterable[tuple[Ball, Ball]]


def outcomes_delta(outcomes: Outcomes, epsilon: float, direction: Direction) -> Ball:
    """Return δ(ε) of listed outcomes: their masses under P and under Q."""
    factor = arb(epsilon).exp()
    total = arb(0)
    for p, q in outcomes:
        one, other = (p, q) if direction == "removing" else (q, p)
        total += positive_part(one - factor * other)
    return total


def repeated_pair(p: Ball, q: Ball, count: int) -> list[tuple[Ball, Ball]]:
    """Return `count` releases of two outcomes, by how often the first occurs."""
    choices = [arb.bin_uiui(count, k) for k in range(count + 1)]
    return [
        (c * p**k * (1 - p) ** (count - k), c * q**k * (1 - q) ** (count - k))
        for k, c in enumerate(choices)
    ]


def revealed_gaussian(epsilon: float, rate: float, mu: float, count: int) -> Ball:
    """Return δ(ε) of Gaussian releases of which all know whether they sampled the record."""
    weights = binomial(count, rate)
    deltas = (gaussian_delta(epsilon, arb(k).sqrt() * arb(mu)) for k in range(count + 1))
    return sum((w * d for w, d in zip(weights, deltas, strict=True)), arb(0))


@dataclass(frozen=True)
class SampledMoments:
    """E[e^{(s + iv)·loss}] of a Poisson-sampled Gaussian release, for 0 ≤ v ≤ `frequency`.

    It is K = ∫ n(z)·A(z)^a dz, A = 1 − q + q·e^{μz − μ²/2}, with a = s + 1 + iv when removing and
    a = −s − iv when adding, by the trapezoidal rule. On Im z = ±y, 0 < y < π/μ, |n| is e^{y²/2}
    times its value on the real line, cos(μy/2)·A ≤ |A(z)| ≤ A and 0 ≤ |arg A(z)| ≤ μy.
    So the rule is off by at most 2·K(s)·e^{y²/2 + vμy}·cos(μy/2)^{min(Re a, 0)}/(e^{2πy/h} − 1)
    (Trefethen & Weideman 2014, Theorem 5.1).
    """

    rate: float
    mu: float
    direction: Direction
    tilt: float
    frequency: float = 0.0
    log_error: float = -70.0

    @property
    def order(self) -> float:
        """Re a."""
        return self.tilt + 1 if self.direction == "removing" else -self.tilt

    @cached_property
    def _strip(self) -> tuple[float, float]:
        """The height y and the spacing h."""
        found = []
        for share in range(1, 50):
            y = min(math.pi / self.mu * 0.02 * share, 14.0)
            cost = y * y / 2 + self.frequency * self.mu * y
            cost += min(self.order, 0.0) * math.log(math.cos(self.mu * y / 2))
            found.append((2 * math.pi * y / (cost - self.log_error), y))
        spacing, height = max(found)
        return height, spacing

    @cached_property
    def _ends(self) -> tuple[float, float]:
        """The ends of the sum, beyond which the integrand decreases."""
        return min(self.order, 0.0) * self.mu - 16.0, max(self.order, 1.0) * self.mu + 16.0

    @cached_property
    def nodes(self) -> list[tuple[Ball, Ball]]:
        """Losses and weights."""
        _, spacing = self._strip
        low, high = self._ends
        h, q, mu, a = arb(spacing), arb(self.rate), arb(self.mu), arb(self.order)
        scale, found = h / (2 * arb.pi()).sqrt(), []
        sign = 1 if self.direction == "removing" else -1
        for k in range(math.ceil((high - low) / spacing) + 1):
            z = arb(low) + h * k
            log_a = (1 - q + q * (mu * z - mu * mu / 2).exp()).log()
            found.append((sign * log_a, scale * (a * log_a - z * z / 2).exp()))
        return found

    @cached_property
    def _beyond(self) -> Ball:
        """A bound on the integral, and on the sum, beyond the nodes."""
        q, mu, a = arb(self.rate), arb(self.mu), arb(self.order)
        low = arb(self._ends[0])
        high = arb(self._ends[0]) + arb(self._strip[1]) * (len(self.nodes) - 1)
        if self.direction == "removing":  # left A ≤ 1; right A ≤ q·e^Λ·(1 + (1 − q)/q·e^{−Λ})
            odds = (1 - q) / q * (mu * mu / 2 - mu * high).exp()
            growth = (a * (q.log() + odds.log1p()) + a * (a - 1) * mu * mu / 2).exp()
            return normal_above(-low) + growth * normal_above(high - a * mu)
        # right A ≥ 1; left the slope of log(n·A^a) is at least |low| − |a|·μ
        log_a = (1 - q + q * (mu * low - mu * mu / 2).exp()).log()
        at_low = (a * log_a - low * low / 2).exp() / (2 * arb.pi()).sqrt()
        return normal_above(high) + at_low / (-low + a * mu)

    @cached_property
    def _share(self) -> Ball:
        """A bound on the quadrature's error relative to K(s)."""
        y, h = (arb(each) for each in self._strip)
        mu, least = arb(self.mu), min(self.order, 0.0)
        growth = y * y / 2 + self.frequency * mu * y + least * (mu * y / 2).cos().log()
        return 2 * growth.exp() / ((2 * arb.pi() * y / h).exp() - 1)

    @cached_property
    def error(self) -> Ball:
        """A bound on the error of any computed value."""
        total = sum((w for _, w in self.nodes), arb(0))
        whole = (total + self._beyond) / (1 - self._share)  # K(s) ≤ whole
        return (self._beyond + self._share * whole).upper()

    def at(self, frequencies: Ball) -> Ball:
        """Return the moment at s + iv, for a ball of frequencies v."""
        total = acb(0)
        for loss, weight in self.nodes:
            total += acb(0, frequencies * loss).exp() * weight
        return total + acb(arb(0, self.error), arb(0, self.error))

    def moment(self) -> Ball:
        """Return the moment at s, which is positive."""
        return sum((w for _, w in self.nodes), arb(0)) + arb(0, self.error)

    def decay_beyond(self, frequency: float) -> Ball:
        """Return a bound on |moment(s + iv)|/moment(s) for all v beyond a frequency.

        A law whose density f of the loss has variation B and mass m has |∫e^{ivl}f| ≤ B/v, and all
        else counts fully. In z, f = n·A^a/(μπ·K) with π = q·e^Λ/A, which has at most two modes, so
        that B ≤ 4·max f. Cells of eight nodes bound the maximum and the mass from some z on.
        """
        _, spacing = self._strip
        low, q, mu, a = arb(self._ends[0]), arb(self.rate), arb(self.mu), arb(self.order)
        whole, best = self.moment(), arb(1)
        mass, largest = arb(0), arb(0)
        step = max(1, round(0.1 / spacing))
        edges = [low + arb(spacing) * k for k in range(0, len(self.nodes), step)]
        for left, right in zip(edges[-2::-1], edges[:0:-1], strict=True):
            z = ball(left, right)
            ratio = q * (mu * z - mu * mu / 2).exp()
            size = 1 - q + ratio
            density = (a * size.log() - z * z / 2).exp() / (2 * arb.pi()).sqrt() / whole
            mass += (right - left).lower() * density.lower()
            largest = largest.max((density / (mu * ratio / size)).upper())
            best = best.min((1 - mass + 4 * largest / frequency).upper())
        return best


@dataclass(frozen=True)
class Composed:
    """δ(ε) of `count` Poisson-sampled Gaussian releases and one unsampled one of μ = `other`.

    With W the period and Δ = 2π/W, sum E[e^{wL}]·e^{−wε}/(w(w+1)), w = s + iv, over the frequencies
    v = kΔ. Times Δ/2π it is δ(ε) and aliases (Poisson's summation formula), which are at least 0
    and at most 1/(e^{sW} − 1) and, for s′ > s, E[e^{s′L}]·e^{−s′ε}/(e^{(s′−s)W} − 1).
    """

    rate: float
    mu: float
    count: int
    other: float
    direction: Direction
    tilt: float
    period: float
    frequency: float

    def delta(self, epsilon: float) -> Ball:
        """Return a ball around δ(ε)."""
        step, last = 2 * arb.pi() / arb(self.period), self._last
        e, total = arb(epsilon), arb(0)
        for k, moment in enumerate(self._moments):
            w = acb(arb(self.tilt), step * k)
            value = (moment * (-w * e).exp() / (w * (w + 1))).real
            total += value if k else value / 2
        total *= step / arb.pi()
        tail = self._tail(step, last) * (-arb(self.tilt) * e).exp()
        low = total - tail - self._aliases(e)
        return positive_part(ball(low.lower(), (total + tail).upper()))

    @property
    def _last(self) -> int:
        return math.ceil(self.frequency * self.period / (2 * math.pi))

    @cached_property
    def _release(self) -> SampledMoments:
        return SampledMoments(
            self.rate, self.mu, self.direction, self.tilt, 1.05 * self.frequency + 1.0
        )

    @cached_property
    def _moments(self) -> list[Ball]:
        """E[e^{wL}] at w = s + ikΔ."""
        step, m = 2 * arb.pi() / arb(self.period), arb(self.other)
        found = []
        for k in range(self._last + 1):
            w = acb(arb(self.tilt), step * k)
            found.append(self._release.at(step * k) ** self.count * (w * (w + 1) * m * m / 2).exp())
        return found

    def _tail(self, step: Ball, last: int) -> Ball:
        """Bound Δ/π·Σ |E[e^{wL}]|/v² over v = kΔ beyond the last one."""
        s, m, start = arb(self.tilt), arb(self.other), step * last
        scale = self._release.moment() ** self.count * (s * (s + 1) * m * m / 2).exp()
        if self.other > 0:
            return (scale * (-start * start * m * m / 2).exp() / start / arb.pi()).upper()
        total, v = arb(0), start  # block by block, until the variation decides
        end = 12 * self.frequency
        while v < end:
            following = v * arb("1.01")
            size = abs(self._tail_release.at(ball(v, following))) / self._release.moment()
            size = size.min(arb(1)) ** self.count
            total += size.upper() * (1 / (v - step) - 1 / following)
            v = following.mid()
        rest = self._tail_release.decay_beyond(float(end)).min(arb(1)) ** self.count / (v - step)
        return ((total + rest) * scale / arb.pi()).upper()

    @cached_property
    def _tail_release(self) -> SampledMoments:
        return SampledMoments(
            self.rate, self.mu, self.direction, self.tilt, 13 * self.frequency, log_error=-20.0
        )

    def _aliases(self, epsilon: Ball) -> Ball:
        """Bound the aliases from either side."""
        s, w, m = arb(self.tilt), arb(self.period), arb(self.other)
        right = None
        for tilt, moment in self._higher_moments:
            s2 = arb(tilt)
            log = self.count * moment.log() + s2 * (s2 + 1) * m * m / 2 - s2 * epsilon
            found = log.exp() / (((s2 - s) * w).exp() - 1)
            right = found if right is None else right.min(found)
        return (1 / ((s * w).exp() - 1) + right).upper()

    @cached_property
    def _higher_moments(self) -> list[tuple[float, Ball]]:
        tilts = [self.tilt * factor for factor in (1.2, 1.5, 2.0, 3.0)]
        return [
            (tilt, SampledMoments(self.rate, self.mu, self.direction, tilt).moment())
            for tilt in tilts
        ]
