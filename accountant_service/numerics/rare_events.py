"""δ(ε) by a line integral where it comes from a few improbable outcomes.

With rarely sampled releases and a small δ the law of one loss has two traits that defeat the plain
contour: nearly all of its mass is at one point, so that its characteristic function hardly decays;
and its tail is that of a log-normal law, so that e^{sl} is dominated by outcomes far beyond ε, the
line has to stay far left, and every digit cancels. So each release's outcomes are divided by their
loss, smoothly (see `windowed_loss`), into common ones a, rare ones b and extreme ones c. Then

* the extreme ones are counted as the worst: they add at most Σ T·c to δ, and nothing below;
* the compositions of common outcomes alone hardly ever reach ε: they add at most
  Π a(s)^T·e^{−sε} for any s > 0 (Chernoff), and nothing below;
* the rest is a measure whose moments are Π(a + b)^T − Πa^T, which decays as b does.

Where no such division leaves little enough, only the extreme ones are set aside.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from accountant_service.numerics import gaussian
from accountant_service.numerics.contour import Contour, Effort, LeftOut, Values, line_for, trace
from accountant_service.numerics.privacy_loss import Composition, GaussianRatio
from accountant_service.numerics.saddle_point import SaddlePoint
from accountant_service.numerics.sampled_gaussian import privacy_loss
from accountant_service.numerics.special import (
    LOG_SQRT_TWO_PI,
    Array,
    ComplexArray,
    log1p_complex,
    log_sum_exp,
)
from accountant_service.numerics.tilted_loss import UndampedError
from accountant_service.numerics.windowed_loss import Window, WindowedLoss, windowed_loss

_EPS: Final = float(np.finfo(float).eps)
_SHARES: Final = (0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.07, 0.05, 0.03)  # of ε, that are common
_LOW_SHARES: Final = (0.02, 0.01, 0.005)
_EPSILON_MIN: Final = 1e-4  # below it nobody looks
_SCALE: Final = 1.08  # divisions are made at its powers, so that neighbouring questions share laws
_TOPS: Final = np.geomspace(1e-5, 100.0, 160)  # losses, beyond which they may be extreme
_SPLIT_WIDTH: Final = 0.1  # of where it is
_TOP_WIDTH: Final = 0.07
_TILTS: Final = np.geomspace(0.1, 120.0, 36)  # times 1/ε
_RENYI_TILTS: Final = np.geomspace(0.1, 3e3, 80)  # times 1/top
_STILL: Final = 0.003  # of the top, up to which losses hardly turn
_COMMON_TILTS: Final = np.geomspace(1.0, 300.0, 40)  # the same, for the common outcomes
_SLIP_MAX: Final = 1e-9  # of one factor
_LOG_SLIP_MAX: Final = 1e-6  # of a composition: its decay is bounded with so much to spare
_SKETCH: Final = 1500  # nodes on which a division is chosen


def contour(releases: Composition, saddle: SaddlePoint, effort: Effort) -> Contour:
    """The contour of what matters at an ε, with what is left out; see `contour.contour`.

    Args:
        releases: with their counts.
        saddle: its ε and δ are looked at, nothing else.
        effort: accuracy, blur, and the work limit.

    Raises:
        UndampedError: a release is not Gaussian, a record is added, no division leaves little
            enough, or the integrand decays too slowly for the work limit.
    """
    parts = _parts(releases, saddle)
    if saddle.epsilon < _EPSILON_MIN:
        raise UndampedError
    epsilon = _SCALE ** round(math.log(saddle.epsilon, _SCALE))
    for division in _divisions(parts, epsilon, saddle.log_delta + effort.log_accuracy):
        with contextlib.suppress(UndampedError):
            divided = Divided(parts, division, epsilon)
            line = line_for(divided.saddle(saddle), effort, divided.log_mass)
            return trace(divided.on(line.tilt), line, effort.work, divided.left_out())
    raise UndampedError


def estimates(releases: Composition, about: SaddlePoint) -> list[SaddlePoint]:
    """Where ε may lie at about.log_delta: if one outcome reaches it alone; and if many do.

    The first is Σ T·δ₁(ε) = δ, with δ₁(ε) = q·δ_G(log(1 + (e^ε − 1)/q)) of one release and δ_G of
    it unsampled; the second Rényi's bound with the extreme outcomes set aside.
    """
    parts = _parts(releases, about)
    sketch = _Sketch(parts)
    many = sketch.renyi(about.log_delta)
    epsilons = np.geomspace(1e-3, 1.0, 200) * max(many, _EPSILON_MIN)
    at = int(np.searchsorted(-_log_of_one(parts, epsilons), -about.log_delta))
    one = float(epsilons[min(at, len(epsilons) - 1)])
    return [replace(about, epsilon=max(guess, _EPSILON_MIN)) for guess in (one, many)]


def _parts(releases: Composition, about: SaddlePoint) -> list[_Part]:
    if about.direction == "adding":
        raise UndampedError
    parts = []
    for release, count in releases:
        if not isinstance(release.ratio, GaussianRatio):
            raise UndampedError
        parts.append(_Part(release.sample_rate, release.ratio.mu, count))
    return parts


def _log_of_one(parts: list[_Part], epsilons: Array) -> Array:
    """log Σ T·δ₁(ε)."""
    total = np.full_like(epsilons, -np.inf)
    for part in parts:
        unsampled = np.log1p(np.expm1(np.minimum(epsilons, 500.0)) / part.sample_rate)
        log_one = gaussian.log_delta(unsampled, part.mu)
        total = np.logaddexp(total, log_one + math.log(part.count * part.sample_rate))
    return total


@dataclass(frozen=True, slots=True)
class _Part:
    sample_rate: float
    mu: float
    count: int


@dataclass(frozen=True, slots=True)
class _Division:
    """The windows of each class of outcomes; no common ones if `common` is empty."""

    common: tuple[Window, ...]
    rare: tuple[Window, ...]
    extreme: tuple[Window, ...]

    @classmethod
    def at(cls, split: float, top: float) -> _Division:
        """With losses common up to about `split`, none if it is 0, and extreme from `top` on."""
        below, above = (Window(top, _TOP_WIDTH * top, sign) for sign in (-1, 1))
        if split == 0.0:
            return cls((), (below,), (above,))
        common, rare = (Window(split, _SPLIT_WIDTH * split, sign) for sign in (-1, 1))
        return cls((common, below), (rare, below), (above,))


class _Sketch:
    """The laws of the losses on a few nodes, without proof: to choose a division."""

    def __init__(self, parts: list[_Part]) -> None:
        self._laws = [(*_sketch(part.sample_rate, part.mu), part.count) for part in parts]

    def log_mass(self, windows: tuple[Window, ...]) -> float:
        """Log of the expected number of outcomes in the windows."""
        counts = [
            count * math.exp(float(log_sum_exp(log_mass + _log_windows(windows, loss))))
            for loss, log_mass, count in self._laws
        ]
        return math.log(max(math.fsum(counts), 1e-300))

    def log_chernoff(self, windows: tuple[Window, ...], epsilon: float) -> float:
        """Log of Chernoff's bound of δ(ε) of compositions within the windows."""
        tilts = _COMMON_TILTS / epsilon
        return float((self._log_moments(windows, tilts) - tilts * epsilon).min())

    def _log_moments(self, windows: tuple[Window, ...], tilts: Array) -> Array:
        total = np.zeros_like(tilts)
        for loss, log_mass, count in self._laws:
            weighted = log_mass + _log_windows(windows, loss)
            total += count * log_sum_exp(weighted + tilts[:, None] * loss)
        return total

    def top(self, log_share: float) -> float:
        """About the least loss beyond which at most e^log_share outcomes are expected."""

        def few(top: float) -> bool:
            return self.log_mass(_Division.at(0.0, float(top)).extreme) < log_share

        at = bisect.bisect_left(_TOPS, True, key=few)
        if at == len(_TOPS):
            raise UndampedError
        return float(_TOPS[at])

    def renyi(self, log_delta: float) -> float:
        """About Rényi's bound of ε at δ with the extreme outcomes set aside."""
        top = self.top(log_delta - 3.0)
        tilts = _RENYI_TILTS / top
        moments = self._log_moments(_Division.at(0.0, top).rare, tilts)
        constant = -np.log1p(tilts) - tilts * np.log1p(1 / tilts)
        return float(((moments + constant - log_delta) / tilts).min())


@lru_cache(maxsize=16)
def _sketch(sample_rate: float, mu: float) -> tuple[Array, Array]:
    """Losses, and log masses, of a release at some nodes."""
    z = np.linspace(-9.0, 13.0 + mu, _SKETCH)
    loss = privacy_loss(mu * z - 0.5 * mu**2, sample_rate)
    return loss, loss - 0.5 * z * z - LOG_SQRT_TWO_PI + math.log(z[1] - z[0])


def _log_windows(windows: tuple[Window, ...], loss: Array) -> Array:
    total = np.zeros_like(loss)
    for window in windows:
        total = total + window.log(loss)
    return total


def _divisions(parts: list[_Part], epsilon: float, log_share: float) -> Iterator[_Division]:
    """Those to try: the lowest top that leaves out at most e^log_share, and where to split.

    The highest split that leaves out no more; none at all; and one very low.
    """
    sketch = _Sketch(parts)
    top = sketch.top(log_share)
    for shares in (_SHARES, (), _LOW_SHARES):
        if not shares:
            yield _Division.at(0.0, top)
        for division in (_Division.at(share * epsilon, top) for share in shares):
            if sketch.log_chernoff(division.common, epsilon) < log_share:
                yield division
                break


class Divided:
    """A composition whose outcomes are divided: the measure that is integrated, and the rest."""

    def __init__(self, parts: list[_Part], division: _Division, epsilon: float) -> None:
        self._parts, self._division, self._epsilon = parts, division, epsilon
        order = 1.0 + float(_TILTS[-1]) / epsilon
        self._rare = self._laws(division.rare, order)
        self._common = self._laws(division.common, order) if division.common else []
        top = division.rare[-1].edge
        still = _Division.at(_STILL * top, top)  # what hardly turns, and what does
        self._still = list(
            zip(self._laws(still.common, order), self._laws(still.rare, order), strict=True)
        )
        self._tilts = np.append(0.0, _TILTS / epsilon)
        self._moments = self._log_measure(1.0 + self._tilts)

    def _laws(self, windows: tuple[Window, ...], order: float) -> list[WindowedLoss]:
        return [windowed_loss(p.sample_rate, p.mu, windows, order) for p in self._parts]

    def _log_measure(self, orders: Array) -> Array:
        """Upper bounds of the log-moments of the measure."""
        total, ratio = np.zeros_like(orders), np.zeros_like(orders)
        if not self._common:
            for rare, part in zip(self._rare, self._parts, strict=True):
                total += part.count * rare.log_moments(orders)
            return total
        for common, rare, part in zip(self._common, self._rare, self._parts, strict=True):
            log_common = common.log_moments(orders)
            total += part.count * log_common
            ratio += part.count * np.logaddexp(0.0, rare.log_moments(orders) - log_common)
        upper: Array = total + ratio + np.log(-np.expm1(-ratio)) + 1e-9
        return upper

    @property
    def log_mass(self) -> float:
        """An upper bound of the log of the measure's mass."""
        return min(float(self._moments[0]), 0.0)

    def saddle(self, about: SaddlePoint) -> SaddlePoint:
        """Where the measure's own line may lie."""
        tilts, moments = self._tilts[1:], self._moments[1:]
        cost = moments - tilts * about.epsilon - np.log(tilts) - np.log1p(tilts)
        return replace(about, tilt=float(tilts[np.argmin(cost)]), tilts=tilts, moments=moments)

    def left_out(self) -> LeftOut:
        """What the extreme outcomes and the common ones add, at most."""
        mass = math.fsum(
            part.count * math.exp(float(law.log_moments(np.ones(1))[0]))
            for part, law in zip(self._parts, self._laws(self._division.extreme, 1.0), strict=True)
        )
        if not self._common:
            return LeftOut(mass)
        tilts = _COMMON_TILTS / self._epsilon
        moments = np.zeros_like(tilts)
        laws = self._laws(self._division.common, 1.0 + float(tilts[-1]))
        for part, law in zip(self._parts, laws, strict=True):
            moments += part.count * law.log_moments(1.0 + tilts)
        return LeftOut(mass, tilts, moments)

    def on(self, tilt: float) -> _OnLine:
        """The integrand of the measure on a line."""
        log_scale = float(self._log_measure(np.array([1.0 + tilt]))[0])
        counts = [part.count for part in self._parts]
        return _OnLine(
            counts, self._common, self._rare, self._still, tilt + 1.0, log_scale, self._epsilon
        )


@dataclass(frozen=True, slots=True)
class _OnLine:
    """Π(a + b)^T − Πa^T on the line Re w = s, or Πb^T; see `contour.Integrand`.

    It is a polynomial in every a and b without negative coefficients. So if the a and b are off by
    e and f, it is off by at most its value at |a| + e and |b| + f less that at |a| and |b|.
    """

    counts: list[int]
    common: list[WindowedLoss]
    rare: list[WindowedLoss]
    still: list[tuple[WindowedLoss, WindowedLoss]]
    order: float
    log_scale: float
    epsilon: float

    @property
    def deviation(self) -> float:
        """See `Integrand`: what a division resolves, and more."""
        return 10.0 * self.epsilon

    def log_decay(self, edges: Array) -> Array:
        """See `Integrand`: |Φ(v)| ≤ Σ T·|b(v)|·Π(a + b)^T/(a + b), all at v = 0 but the first.

        Without common outcomes Π|b|^T.
        """
        if not self.common:
            log_sizes = [
                count * self._log_decay_of_one(rare, still, turning, edges)
                for rare, (still, turning), count in zip(
                    self.rare, self.still, self.counts, strict=True
                )
            ]
            total: Array = np.sum(log_sizes, axis=0) - self.log_scale
            return np.minimum(total, 0.0) + _LOG_SLIP_MAX
        order = np.array([self.order])
        rows, whole = [], 0.0
        for common, rare, count in zip(self.common, self.rare, self.counts, strict=True):
            either = float(np.logaddexp(common.log_moments(order), rare.log_moments(order))[0])
            whole += count * either
            rows.append(math.log(count) + rare.log_decay(self.order, edges) - either)
        bound: Array = log_sum_exp(np.array(rows), axis=0) + whole - self.log_scale
        return np.minimum(bound, 0.0) + _LOG_SLIP_MAX

    def _log_decay_of_one(
        self, whole: WindowedLoss, still: WindowedLoss, turning: WindowedLoss, edges: Array
    ) -> Array:
        """Of a whole law: by pairs of its outcomes, by lines, or by lines for what turns."""
        order = np.array([self.order])
        log_moment, log_still = whole.log_moments(order)[0], still.log_moments(order)[0]
        by_pairs = np.append(whole.pairs(self.order).log_decay(edges[:-1], edges[1:]), 0.0)
        by_lines = np.minimum(
            whole.log_decay(self.order, edges),
            np.logaddexp(log_still, turning.log_decay(self.order, edges)),
        )
        best: Array = np.minimum(by_pairs + log_moment, by_lines)
        return best

    def nodes_for(self, frequency: float) -> float:
        """See `Integrand`."""
        laws = (*self.common, *self.rare)
        return math.fsum(law.nodes_for(self.order, frequency) for law in laws)

    def values(self, frequencies: Array) -> Values:
        """See `Integrand`."""
        value, size, largest = (_Product(len(frequencies), bool(self.common)) for _ in range(3))
        terms: Array = np.full(len(frequencies), float(len(self.counts)))
        log_slip = 0.0
        for at, count in enumerate(self.counts):
            b, a = self._factors(at, frequencies)
            terms += count * value.times(b.log(), a.log() if a else None, count)
            size.times(b.log_size(), a.log_size() if a else None, count)
            largest.times(b.log_largest(), a.log_largest() if a else None, count)
            log_slip += count * (b.slip + (a.slip if a else 0.0))
        if log_slip > _LOG_SLIP_MAX:
            raise UndampedError
        most = largest.value(self.log_scale).real
        rounding = 16 * _EPS * terms * most
        error = most - size.value(self.log_scale).real + 2 * rounding
        if not np.isfinite(error).all():
            raise UndampedError
        found = value.value(self.log_scale)
        error = np.maximum(error, rounding)
        return Values(found, most, error, np.asarray(self.log_scale), np.asarray(log_slip))

    def _factors(self, at: int, frequencies: Array) -> tuple[_Factor, _Factor | None]:
        """b and a of one release. Beside common outcomes rare ones are few: b's slip is an error.

        As a factor of the whole measure it would count T times, as an error only as often as rare
        outcomes occur.
        """
        if not self.common:
            return _Factor.of(self.rare[at], self.order, frequencies), None
        b = _Factor.of_few(self.rare[at], self.order, frequencies)
        return b, _Factor.of(self.common[at], self.order, frequencies)


@dataclass(frozen=True, slots=True)
class _Factor:
    """a(s + iv) or b(s + iv) of one release: e^{log_scale ± slip}·(1 + rise ± error).

    The slip is the same at every v: that of a measure larger or smaller by so much throughout.
    So the integral over a composition, which is that of a positive measure, slips by T times it.
    """

    log_scale: float
    slip: float
    rise: ComplexArray
    error: Array

    @classmethod
    def of(cls, law: WindowedLoss, order: float, frequencies: Array) -> _Factor:
        """Return the factor; if hardly anything is known of its scale, as `of_few` does."""
        nodes = law.nodes(order, float(frequencies[-1]))
        if nodes.moment_error > _SLIP_MAX:
            return cls.of_few(law, order, frequencies)
        rise, error = nodes.characteristic(frequencies)
        return cls(nodes.log_moment, nodes.moment_error, rise, error)

    @classmethod
    def of_few(cls, law: WindowedLoss, order: float, frequencies: Array) -> _Factor:
        """Return the factor without a slip: the error of its scale is part of its error."""
        nodes = law.nodes(order, float(frequencies[-1]))
        rise, error = nodes.measure(frequencies)
        return cls(nodes.log_moment, 0.0, rise, error)

    def log(self) -> ComplexArray:
        return np.asarray(self.log_scale + log1p_complex(self.rise))

    def log_size(self) -> ComplexArray:
        return np.asarray(self.log().real, complex)

    def log_largest(self) -> ComplexArray:
        size = np.exp(log1p_complex(self.rise).real)
        return self.log_size() + np.log1p(self.error / np.maximum(size, 1e-300))


class _Product:
    """Π(a + b)^T − Πa^T, or Πb^T alone."""

    def __init__(self, points: int, differs: bool) -> None:
        self._whole, self._ratio = np.zeros(points, complex), np.zeros(points, complex)
        self._differs = differs

    def times(self, log_b: ComplexArray, log_a: ComplexArray | None, count: int) -> Array:
        """One more release, `count` times; what its rounding is relative to, each time."""
        if log_a is None:
            self._whole += count * log_b
            return np.asarray(np.abs(log_b))
        log_ratio = _log_one_plus_exp(log_b - log_a)  # of (a + b)/a
        self._whole += count * (log_a + log_ratio)
        self._ratio += count * log_ratio
        exponent = np.minimum(np.abs(log_b - log_a), 700.0)  # of b/a: its rounding is the ratio's
        return np.asarray(np.abs(log_a) + np.abs(log_ratio) * (1 + exponent))

    def value(self, log_scale: float) -> ComplexArray:
        """Relative to e^log_scale: e^whole·(1 − e^−ratio), without overflow."""
        whole = self._whole - log_scale
        if not self._differs:
            with np.errstate(over="ignore", invalid="ignore"):
                return np.exp(whole)
        grows = self._ratio.real > 0
        positive, negative = np.where(grows, self._ratio, 0.0), np.where(grows, 0.0, self._ratio)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused
            up = np.exp(whole) * -np.expm1(-positive)
            down = np.exp(whole - negative) * np.expm1(negative)
        return np.asarray(np.where(grows, up, down))


def _log_one_plus_exp(x: ComplexArray) -> ComplexArray:
    """log(1 + e^x), without overflow."""
    grows = x.real > 0
    return np.asarray(np.where(grows, x, 0.0) + log1p_complex(np.exp(np.where(grows, -x, x))))
