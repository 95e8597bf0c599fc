"""δ(ε) of a composition by one integral along a vertical line, with every error outward.

With x = L − ε and s > 0 the hockey stick is an integral of exponentials (Laplace inversion; for
privacy curves, not as a bound: Alghamdi et al. 2022, arXiv 2208.09595),

    (1 − e^{−x})₊ = (1/2πi) ∫_{Re w = s} e^{wx}·G(w) dw,    G(w) = 1/(w(w + 1)),

so that δ(ε) = E_P[(1 − e^{ε−L})₊] is the integral of e^{K(w) − wε}·G(w), K(w) = log E_P[e^{wL}].
K is the sum of the releases' own, each times its count: the cost does not depend on the counts.
Summed with spacing Δ the integral is, exactly (Poisson's summation formula),

    δ(ε) + Σ_{j≠0} e^{jsW}·δ(ε + jW),    W = 2π/Δ.

Every added term is positive: the sum errs upwards, by at most 1/(e^{sW} − 1) from the left and by
Chernoff's bound from the right. The frequencies that are left out are bounded by the decay of
|φ|, the rest by the errors of φ and by rounding.

**Blurring.** Where |φ| hardly decays, as with a handful of rare events, the hockey stick is
blurred by η. Above it: account one more Gaussian release of μ = η, which multiplies the integrand
by e^{w(w+1)η²/2}. Below it: let the attacker accuse when L + ηZ ≥ ε + c, Z his own normal draw:

    (1 − e^{−x})·P(x + ηZ ≥ c):   G(w) = e^{w²η²/2 − wc}/w − e^{(w+1)²η²/2 − (w+1)c}/(w + 1).

Both cost η²/2 times the density of L at ε, and decay like e^{−v²η²/2} whatever φ does.

docs/accountants/pld.md has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np

from accountant_service.numerics.privacy_loss import Composition
from accountant_service.numerics.saddle_point import SaddlePoint
from accountant_service.numerics.special import Array, ComplexArray
from accountant_service.numerics.tilted_loss import TiltedLoss, UndampedError, tilted_loss

_UNDERFLOW: Final = 1e-300  # more than any δ, or Q of an attack, that is computed as zero
_EPS: Final = float(np.finfo(float).eps)
_BLOCKS_PER_OCTAVE: Final = 8
_OCTAVES: Final = 24
_ROUNDS: Final = 7  # each narrows the upper bound 32 times
_POINTS: Final = 32
_HALVINGS: Final = 34  # the lower bound is this many halvings of ε below the upper one, at most
_DIGITS: Final = 32.0  # natural log of what double precision resolves, with room
_SECANTS: Final = 6
_SECANT_LEAST: Final = 1e-10  # relative, of ε
_WIDENINGS: Final = (1.05, 2.0)  # of what the errors amount to
_ONCE: Final = np.asarray(1.0)


@dataclass(frozen=True, slots=True)
class Effort:
    """How accurate, how blurred, and at what cost.

    Attributes:
        log_accuracy: log of the relative error of δ to aim at.
        blur: η ≥ 0.
        work: the most frequencies times nodes.
    """

    log_accuracy: float
    blur: float
    work: float


@dataclass(frozen=True, slots=True)
class _Sum:
    """Σ Re(terms·e^{−ivε}), off by at most `error`, and `drift` more for each unit of ε.

    Of one composition, or of several: then terms, error and drift have a row for each of them.
    """

    frequencies: Array
    terms: ComplexArray
    error: Array
    drift: Array

    def at(self, epsilons: Array) -> tuple[Array, Array]:
        """The sum and its error at each ε; of several compositions, each at its own ε."""
        phase = np.multiply.outer(epsilons, self.frequencies)
        total = (np.cos(phase) * self.terms.real + np.sin(phase) * self.terms.imag).sum(axis=-1)
        return total, self.error + self.drift * np.abs(epsilons)


@dataclass(frozen=True, slots=True)
class Contour:
    """The summed integrand of a composition, ready for any ε.

    In units of e^{log_scale − sε}, known up to a factor e^{±log_slip}, δ(ε) is at most `above` and,
    less the aliases, at least `below`. In units of e^{log_scale − st}, P(L + ηZ ≥ t) is, less the
    aliases, at least `accused`, and in units of e^{log_scale − (s+1)t}, Q of it at most `innocent`.
    """

    line: Line
    above: _Sum
    below: _Sum
    accused: _Sum
    innocent: _Sum
    log_scale: Array
    log_slip: Array
    left_out: LeftOut

    def delta(self, epsilons: Array) -> tuple[Array, Array]:
        """Lower and upper bounds of δ at each real ε (which may be negative)."""
        tilt = self.line.tilt
        exponent = np.minimum(self.log_scale - tilt * epsilons, 600.0)  # past it δ ≤ 1 says more
        slip = self.log_slip + 4 * _EPS * (1 + np.abs(self.log_scale) + np.abs(tilt * epsilons))
        total, error = self.above.at(epsilons)
        upper = np.exp(exponent + slip) * np.maximum(total + error, 0.0) + _UNDERFLOW
        upper += self.left_out.delta(epsilons)
        total, error = self.below.at(epsilons)
        lower = np.exp(exponent - slip) * np.maximum(total - error, 0.0) - self._aliases(epsilons)
        return np.clip(lower, 0.0, 1.0), np.minimum(upper, 1.0)

    def epsilon(self, delta: float, bound: float) -> tuple[float, float]:
        """Lower and upper bounds of the smallest ε ≥ 0 with δ(ε) ≤ `delta`.

        Args:
            delta: in (0, 1).
            bound: an upper bound that is known.
        """
        points, upper = np.linspace(0.0, bound, _POINTS + 1), 0.0
        for _ in range(_ROUNDS):
            costly = np.flatnonzero(~(self.delta(points[:-1])[1] <= delta))
            if not len(costly):
                break
            low, upper = points[costly[-1]], float(points[costly[-1] + 1])
            points = np.linspace(low, upper, _POINTS + 1)
        points, lower = upper * (1 - np.exp2(-np.arange(_HALVINGS))), 0.0
        for _ in range(2):
            costly = np.flatnonzero(self.delta(points[:-1])[0] > delta)
            if not len(costly):
                break
            lower = float(points[costly[-1]])
            points = np.linspace(lower, points[costly[-1] + 1], _POINTS + 1)
        return lower, upper

    def epsilons(self, delta: float, about: Array) -> tuple[Array, Array]:
        """Bounds of the smallest ε > 0 of each of several compositions, by the secant method.

        Args:
            delta: in (0, 1).
            about: a guess of each ε.

        Returns:
            Lower bounds, 0 where none is found, and upper bounds, infinite where none is.
        """
        at, slope = about, np.full_like(about, self.line.tilt + 0.5)  # of −log δ
        rise = self._log_excess(at, delta)
        for _ in range(_SECANTS):
            step = np.clip(rise / slope, -0.5 * at, at)
            following = self._log_excess(at + step, delta)
            with np.errstate(invalid="ignore", divide="ignore"):
                steeper = (rise - following) / step
            usable = (steeper > 0) & (np.abs(step) > _SECANT_LEAST * at) & np.isfinite(steeper)
            at, rise, slope = at + step, following, np.where(usable, steeper, slope)
        least, most = self.delta(at)
        width = np.log(most / np.maximum(least, _UNDERFLOW)) / slope + np.abs(rise) / slope
        lower, upper = np.zeros_like(at), np.full_like(at, math.inf)
        for widening in _WIDENINGS:
            out = widening * width + _SECANT_LEAST * at
            below, above = np.maximum(at - out, 0.0), at + out
            lower = np.maximum(lower, np.where(self.delta(below)[0] > delta, below, 0.0))
            upper = np.minimum(upper, np.where(self.delta(above)[1] <= delta, above, math.inf))
        return lower, upper

    def _log_excess(self, epsilons: Array, delta: float) -> Array:
        excess: Array = np.log(self.delta(epsilons)[1]) - math.log(delta)
        return excess

    def attacks(self, thresholds: Array) -> tuple[Array, Array]:
        """Error rates of the attacker who accuses when L + ηZ reaches a threshold.

        Returns:
            Upper bounds of Q of the event, and lower bounds of P of it.
        """
        tilt = self.line.tilt
        reach = np.abs(self.log_scale) + (tilt + 1) * np.abs(thresholds)
        slip = self.log_slip + 4 * _EPS * (1 + reach)
        exponent = np.minimum(self.log_scale - tilt * thresholds, 600.0)
        total, error = self.accused.at(thresholds)
        accused = np.exp(exponent - slip) * np.maximum(total - error, 0.0)
        exponent = np.minimum(self.log_scale - (tilt + 1) * thresholds, 600.0)
        total, error = self.innocent.at(thresholds)
        innocent = np.exp(exponent + slip) * np.maximum(total + error, 0.0) + _UNDERFLOW
        accused = accused - self._aliases(thresholds, self.line.attack_blur)
        return np.minimum(innocent, 1.0), np.clip(accused, 0.0, 1.0)

    def _aliases(self, epsilons: Array, blur: float = 0.0) -> Array:
        """What the periodic sum counts besides δ(ε), or P(L + ηZ ≥ ε), at most."""
        line = self.line
        left = math.exp(line.log_mass) / math.expm1(min(line.tilt * line.period, 700.0))
        if not len(line.higher_tilts):
            return np.full_like(epsilons, math.inf)
        decay = np.minimum((line.higher_tilts - line.tilt) * line.period, 700.0)
        chernoff = line.higher_moments - np.multiply.outer(epsilons, line.higher_tilts)
        chernoff += 0.5 * (line.higher_tilts * blur) ** 2 - np.log(np.expm1(decay))
        total: Array = left + np.exp(np.minimum(chernoff.min(axis=1), 700.0))
        return total * (1 + 1e-9)


def contour(
    releases: Composition, saddle: SaddlePoint, effort: Effort, times: Array = _ONCE
) -> Contour:
    """Sum the integrand of a composition along a line that serves a saddle point.

    Args:
        releases: with their counts.
        saddle: near the ε of interest, of the composition repeated the most times.
        effort: accuracy there, blur, and the work limit.
        times: how often all of it is repeated; if several, the contour is of each.

    Raises:
        UndampedError: the integrand decays too slowly for the work limit.
    """
    line = line_for(saddle, effort)
    shares = times / times.max()
    moments = np.multiply.outer(shares, line.higher_moments) * (1 + 4 * _EPS)
    line = replace(line, higher_moments=moments)
    tilted = [(tilted_loss(r, saddle.direction, line.tilt), count) for r, count in releases]
    return trace(Composed(tilted, times), line, effort.work)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What the outcomes that a contour does not integrate may add to δ.

    Attributes:
        mass: that of some, whose losses are not looked at.
        tilts: by which Chernoff's bound is taken of the others.
        moments: upper bounds of log E[e^{sL}] of those, at each.
    """

    mass: float = 0.0
    tilts: Array = field(default_factory=lambda: np.zeros(0))
    moments: Array = field(default_factory=lambda: np.zeros(0))

    def delta(self, epsilons: Array) -> Array:
        """An upper bound of what it adds at each ε."""
        total = np.full_like(epsilons, self.mass)
        if len(self.tilts):
            chernoff = (self.moments - np.multiply.outer(epsilons, self.tilts)).min(axis=1)
            total += np.exp(np.minimum(chernoff, 0.0))
        return total * (1 + 1e-9)


@dataclass(frozen=True, slots=True)
class Values:
    """Φ at some frequencies, known up to a factor e^{±log_slip}.

    Attributes:
        value: Φ, relative to e^{log_scale}.
        largest: an upper bound of the true |Φ|.
        error: an upper bound of the distance of `value` from Φ.
        log_scale: about log Φ(0).
        log_slip: see above.

    Of several compositions each has a row for each of them.
    """

    value: ComplexArray
    largest: Array
    error: Array
    log_scale: Array
    log_slip: Array


class Integrand(Protocol):
    """Φ(v) = E[e^{(s + iv)L}] over a measure of outcomes, on the line of one s > 0."""

    @property
    def deviation(self) -> float:
        """About that of the tilted loss."""
        ...

    def log_decay(self, edges: Array) -> Array:
        """Upper bounds of log|Φ(v)/Φ(0)| from each edge to the next, and from the last on."""
        ...

    def nodes_for(self, frequency: float) -> float:
        """How many terms Φ takes up to this frequency: the unit of work."""
        ...

    def values(self, frequencies: Array) -> Values:
        """Φ at these frequencies, of which the last is the largest."""
        ...


class Composed:
    """The integrand of a whole composition: Φ = Π φᵢ^{Tᵢ}; or of each of several powers of it."""

    def __init__(self, tilted: Sequence[tuple[TiltedLoss, int]], times: Array = _ONCE) -> None:
        """The releases with their counts, and how often the whole of them is repeated.

        Args:
            tilted: each release, and its count.
            times: one number ≥ 1, or several, of which the values have a row each.
        """
        self._tilted = tilted
        self._times = times
        self._least = float(np.min(times))  # |φ| ≤ 1: it decays the slowest

    @property
    def deviation(self) -> float:
        """See `Integrand`."""
        square = math.fsum(count * of.deviation**2 for of, count in self._tilted)
        return math.sqrt(self._least * square)

    def log_decay(self, edges: Array) -> Array:
        """See `Integrand`: of the fewest repetitions, and so of all."""
        total = np.zeros_like(edges)
        for of, count in self._tilted:
            total[:-1] += count * of.log_decay(edges[:-1], edges[1:])
            total[-1] += count * of.log_tail(float(edges[-1]))
        return self._least * total

    def nodes_for(self, frequency: float) -> float:
        """See `Integrand`."""
        return math.fsum(of.nodes_for(frequency) for of, _ in self._tilted)

    def values(self, frequencies: Array) -> Values:
        """See `Integrand`: |(φ + e)^T − φ^T| ≤ (|φ| + |e|)^T − |φ|^T."""
        different = len(self._tilted)
        log_phi = np.zeros(len(frequencies), complex)
        off = np.zeros(len(frequencies))
        log_scale, log_slip = 0.0, 0.0
        for of, count in self._tilted:
            value = of.characteristic(frequencies)
            log_phi += count * value.log_value
            magnitude = np.maximum(np.exp(value.log_value.real), _UNDERFLOW)
            rounded = (5 + different) * _EPS * np.abs(value.log_value)
            off += count * (np.log1p(value.error / magnitude) + rounded)
            log_scale += count * value.log_moment
            sums = (2 + different) * _EPS * abs(value.log_moment)
            log_slip += count * (value.moment_error + sums)
        times = self._times[..., np.newaxis]
        log_phi, off = times * log_phi, times * off
        # |Φ| ≤ 1: what was computed outside the unit disc is nearer to Φ once it is moved onto it
        phi = np.exp(np.minimum(log_phi.real, 0.0) + 1j * log_phi.imag)
        largest = np.exp(np.minimum(log_phi.real + off, 0.0))  # |Φ| and |phi| are at most this
        grown = np.exp(np.minimum(log_phi.real, 1.0)) * np.expm1(np.minimum(off, 1.0))
        error = np.where(off < 1.0, grown, 2 * largest)
        return Values(phi, largest, error, self._times * log_scale, self._times * log_slip)


@dataclass(frozen=True, slots=True)
class Line:
    """Re w = s, the period W of the sum on it, the blur, and the tail it may leave out.

    Attributes:
        tilt: s.
        period: W; the frequencies are 2πk/W.
        blur: η.
        threshold: c.
        log_tail: log of the tail, relative to e^{K(s) − sε}.
        log_mass: log of the mass of the measure, which δ is at most.
        higher_tilts: some tilts above s.
        higher_moments: upper bounds of K there; of several compositions, a row for each.
    """

    tilt: float
    period: float
    blur: float
    threshold: float
    log_tail: float
    log_mass: float
    higher_tilts: Array
    higher_moments: Array

    @property
    def attack_blur(self) -> float:
        """η of an attack: some blur there is, if far too little to matter."""
        return max(self.blur, 1e-6 * self.period)

    def kernels(self, frequencies: Array) -> list[tuple[ComplexArray, Array]]:
        """G(s + iv) above and below the hockey stick; and of P and Q of L + ηZ ≥ 0.

        Each with the size of what it is computed from, which its rounding is relative to.

        Raises:
            UndampedError: the blur is so large that they overflow.
        """
        w = np.asarray(self.tilt + 1j * frequencies)
        if 0.5 * (self.tilt + 1) ** 2 * self.attack_blur**2 > 600.0:
            raise UndampedError
        half = 0.5 * self.blur**2
        above = np.exp(w * (w + 1) * half) / (w * (w + 1))
        below, below_size = above, np.abs(above)
        if self.blur > 0.0:
            accused = np.exp(w * w * half - w * self.threshold) / w
            innocent = np.exp((w + 1) ** 2 * half - (w + 1) * self.threshold) / (w + 1)
            below, below_size = accused - innocent, np.abs(accused) + np.abs(innocent)
        half = 0.5 * self.attack_blur**2
        accused, innocent = np.exp(w * w * half) / w, np.exp((w + 1) ** 2 * half) / (w + 1)
        return [
            (above, np.abs(above)),
            (below, below_size),
            (accused, np.abs(accused)),
            (innocent, np.abs(innocent)),
        ]

    def log_kernel_tails(self, low: Array, high: Array) -> list[Array]:
        """Upper bounds of log(e^{a²η²/2}·∫|G| dv) over each a = low ≤ v ≤ high, of each kernel."""
        s, half = self.tilt, 0.5 * self.blur**2
        log_square = np.log(1 / low - 1 / high)
        attack_half = 0.5 * self.attack_blur**2
        octaves = np.log(high / low)
        log_inverse = np.log(np.minimum(octaves, 1 / np.maximum(self.blur * low, 1e-150) ** 2))
        damped = np.log(np.minimum(octaves, 1 / (self.attack_blur * low) ** 2))
        damped = damped - (attack_half - half) * low * low
        accused, innocent = s * s * half, (s + 1) ** 2 * half
        larger = max(accused - s * self.threshold, innocent - (s + 1) * self.threshold)
        return [
            log_square + s * (s + 1) * half,
            log_inverse + math.log(2) + larger if self.blur else log_square,
            damped + s * s * attack_half,
            damped + (s + 1) ** 2 * attack_half,
        ]


def line_for(saddle: SaddlePoint, effort: Effort, log_mass: float = 0.0) -> Line:
    """The line with the shortest period, among those that lose few digits.

    Aliases of a share a of δ need W ≥ log(1/aδ)/s on the left and, by Chernoff's bound at s′ > s,
    W ≥ (K(s′) − s′ε − log aδ)/(s′ − s) on the right. Left of the saddle point the right tail is
    lighter, for which e^{K(s) − sε} exceeds δ by more: digits that double precision has to spare.
    """
    tilts, moments = saddle.tilts, saddle.moments
    log_share = effort.log_accuracy + saddle.log_delta
    exponents = moments - tilts * saddle.epsilon
    left = np.logaddexp(0.0, log_mass - log_share) / tilts
    with np.errstate(divide="ignore"):
        right = (moments - tilts * 0.8 * saddle.epsilon - log_share) / np.maximum(
            tilts - tilts[:, None], 0.0
        )
    period = np.maximum(left, np.where(tilts > tilts[:, None], right, math.inf).min(axis=1))
    digits = exponents - np.log1p(tilts) - saddle.log_delta
    period[(digits > _DIGITS + effort.log_accuracy) | (tilts > 1.2 * saddle.tilt)] = math.inf
    best = int(np.argmin(period))
    if not math.isfinite(period[best]):
        raise UndampedError
    return Line(
        float(tilts[best]),
        float(period[best]),
        effort.blur,
        (saddle.tilt + 0.5) * effort.blur**2,  # where the attacker loses least
        float(log_share - exponents[best]),
        log_mass,
        tilts[best + 1 :],
        moments[best + 1 :],
    )


def trace(
    integrand: Integrand, line: Line, work: float, left_out: LeftOut | None = None
) -> Contour:
    """Sum an integrand along a line.

    Args:
        integrand: on this line.
        line: see `line_for`.
        work: the most frequencies times nodes.
        left_out: what it does not count; nothing unless given.

    Raises:
        UndampedError: the integrand decays too slowly for the work limit.
    """
    extent = _extent(integrand, line, work)
    spacing = 2 * math.pi / line.period
    frequencies: Array = spacing * np.arange(extent.count + 1, dtype=float)
    values = integrand.values(frequencies)
    reach = line.tilt + 1 + frequencies  # the kernels are off by a few eps of their exponents
    exponents = line.attack_blur**2 * reach**2 + abs(line.threshold) * reach
    rounding = 8 * _EPS * (1 + exponents)
    share = np.full(len(frequencies), spacing / math.pi)
    share[0] /= 2
    above, below, accused, innocent = (
        _sum(frequencies, values, share * kernel, share * size * rounding, tail)
        for (kernel, size), tail in zip(line.kernels(frequencies), extent.tails, strict=True)
    )
    return Contour(
        line,
        above,
        below,
        accused,
        innocent,
        values.log_scale,
        values.log_slip,
        left_out or LeftOut(),
    )


@dataclass(frozen=True, slots=True)
class _Extent:
    """How many frequencies after 0, and for each kernel the tail beyond them."""

    count: int
    tails: list[float]


def _extent(integrand: Integrand, line: Line, work: float) -> _Extent:
    """The fewest frequencies that leave out no more than the line's tail."""
    deviation = integrand.deviation
    if not 1e-60 < deviation < 1e60:
        raise UndampedError
    edges = 2.0 ** (np.arange(_BLOCKS_PER_OCTAVE * _OCTAVES + 1) / _BLOCKS_PER_OCTAVE) / deviation
    low, high = edges, np.append(edges[1:], math.inf)
    log_phi = integrand.log_decay(edges)
    # the largest from each block on: what is left out is bounded by a decreasing function
    log_phi = np.maximum.accumulate(log_phi[::-1])[::-1] - 0.5 * (line.blur * low) ** 2
    tails = [
        np.logaddexp.accumulate((log_phi + log_kernel)[::-1])[::-1] - math.log(math.pi)
        for log_kernel in line.log_kernel_tails(low, high)
    ]
    reached = np.flatnonzero(np.maximum(tails[0], tails[1]) <= line.log_tail)
    if not len(reached):
        raise UndampedError
    first = int(reached[0])
    count = max(math.ceil(float(low[first]) * line.period / (2 * math.pi)), 8)
    if count * integrand.nodes_for(2 * math.pi * count / line.period) > work:
        raise UndampedError
    return _Extent(count, [math.exp(min(float(tail[first]), 700.0)) for tail in tails])


def _sum(
    frequencies: Array,
    values: Values,
    kernel: ComplexArray,
    kernel_error: Array,
    tail: float,
) -> _Sum:
    """Σ Φ·kernel: |Φ'G' − ΦG| ≤ |Φ' − Φ|·|G'| + |Φ|·|G' − G| for computed Φ', G'."""
    terms = values.value * kernel
    size = np.abs(terms)
    error = values.error @ np.abs(kernel) + values.largest @ kernel_error
    error += tail + size.sum(axis=-1) * _EPS * (len(frequencies) + 32)
    return _Sum(frequencies, terms, error, 4 * _EPS * (size @ frequencies))
