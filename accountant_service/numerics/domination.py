"""Decide whether one composition dominates another, and how many repetitions it takes.

For the dominating pair (P, Q) of a composition M in one direction of add-or-remove let

    H_M(x) = sup_A P(A) − e^x·Q(A)    for all real x.

A dominates B with slack η ≥ 0 if H_B(x) ≤ H_A(x) + η for all x, in both directions. A release of B
may then stand in for one of A at the cost of η of δ.

**Negative x.** With the complements of the events,

    H_{P,Q}(x) = 1 − e^x + e^x·H_{Q,P}(−x),

and the two directions are (P, Q) and (Q, P): every `Release` has the pair (M, N₀) when removing and
(N₀, M) when adding, the pairs of replaced records are their own mirror images, and the pair of a
composition is the product of its releases' pairs. At x < 0
the excess H_B − H_A of one direction is e^x ≤ 1 times that of the other at −x, so both directions
at x ≥ 0 suffice.

**Between grid points.** As a function of y = e^x, H is a supremum of lines of slopes in [−1, 0]:
convex and decreasing. Between the points y₁ < y₂ it is at most the chord through its upper bounds
there. It is at least the line from an upper bound at y₀ < y₁ through its lower bound at y₁,
prolonged, and likewise from an upper bound at y₃ > y₂ through its lower bound at y₂. The greater of
two lines is at least any mixture of them, with weights λ and 1 − λ. A mixture is a line, and is
above a chord if it is so at both ends. So the values at the ends prove the comparison between the
points. Left of x = 0 the points of the other direction supply y₀, by the identity above.

**Beyond the last point** H_B(x) ≤ H_B(x_last) ≤ η, as H decreases. The last point is at or beyond
Rényi's bound of ε at δ = η, or nothing is proved.

**Without numerics** a dominating composition is recognised if its releases can be turned into the
other's one by one (`_can_imitate`): a channel applied to both laws of a pair never increases H at
any x, and neither does leaving a release out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from accountant_service.numerics.engines import saddle_point
from accountant_service.numerics.engines.saddle_point import SaddlePoint
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.dominating_pair import (
    DIRECTIONS,
    Composition,
    GaussianPair,
    LaplacePair,
    Release,
    ReleaseLaw,
    total_variation,
)
from accountant_service.numerics.laws.replaced_record import ReplacedRecord
from accountant_service.numerics.privacy_profile import PrivacyProfile
from accountant_service.numerics.time_limit import check_time

_POINTS: Final = 256  # of the grid, up to the ε of the smaller composition at δ = slack
_POINTS_BEYOND: Final = 12  # from there to Rényi's bound of that ε
_RELATIVE_WIDTH: Final = 1e-4  # of bounds of H that are narrow enough
_ABSOLUTE_WIDTH: Final = 1 / 128  # the same, as a share of the slack
_COARSE: Final = 0.1  # relative width of bounds of H with which nothing can be decided
_ROUNDING: Final = 64 * float(np.finfo(float).eps)  # of sums of a few terms up to 1
_LAST_MAX: Final = 500.0  # of the grid: e^x stays a double
_COUNT: Final = 16  # numbers of repetitions that are compared at once
_RATIO: Final = 1.5  # of a guess to the first numbers that are tried around it
_RATIO_NEAR: Final = 1.02  # the same, where one number is tried at a time: guesses are close
_RATIO_MAX: Final = 1e9  # of the numbers tried next to the last ones; it grows up to this
_NARROW: Final = 1e-3  # relative distance of two numbers at which a search stops
_ROUNDS_MAX: Final = 60
_TILTS: Final = 8  # at which log-moments are compared for a guess


def dominates(larger: Composition, smaller: Composition, slack: float) -> bool:
    """Return whether one composition provably dominates another, with δ allowed to rise by `slack`.

    Args:
        larger: the composition that may dominate: each release with its count.
        smaller: the composition that may be dominated.
        slack: η ≥ 0, absolute, by which H of the smaller one may exceed that of the larger one.
            With 0, only domination that needs no numerics is proved.

    Returns:
        True only if domination is proved; False says nothing.

    Raises:
        TimeoutError: the CPU time is up (`time_limit`).
    """
    if _is_evident(larger, smaller, slack):
        return True
    if not slack > 0 or not larger:
        return False
    excess, _ = _bound_excess(_RepeatedComposition(larger), _RepeatedComposition(smaller), slack)
    return bool(excess[0] <= 0)


def fewest_repetitions(
    block: Composition, step: Composition, slack: float, most: int
) -> int | None:
    """Find the fewest repetitions of a step that dominate `block`, up to `slack` in δ.

    Args:
        block: the composition to be dominated.
        step: the composition that is repeated.
        slack: η ≥ 0, as in `dominates`.
        most: the largest number to try.

    Returns:
        A number ≥ 1 that is proved, or None if none up to `most` is. For Gaussian noise it is
        usually within 0.2 % or 1 of the least number.

    Raises:
        TimeoutError: the CPU time is up (`time_limit`).
    """
    if most < 1:
        return None
    unproved = _largest_satisfying(lambda n: not _is_evident(_repeat(step, n), block, slack), most)
    evident = unproved + 1 if unproved < most else None
    if not slack > 0 or not step or evident == 1 or _is_multiple(block, step):
        return evident
    fixed = _RepeatedComposition(block)

    def excess(numbers: Array) -> tuple[Array, NDArray[np.bool_]]:
        """Return, per repetition count, upper bounds on max over ε of δ_block − δ_steps − slack.

        There is one for each number of repetitions, less the slack; the number is proved if it is
        at most 0. The second value is whether the bounds behind it are narrow.
        """
        return _bound_excess(_RepeatedComposition(step, numbers), fixed, slack)

    if evident is None and excess(np.array([float(most)]))[0][0] > 0:
        return None
    guess = max(_moment_ratios(block, step, slack))
    proved = most if evident is None else evident
    return _search_proved_number(excess, guess, unproved=0, proved=proved)


def most_repetitions(step: Composition, larger: Composition, slack: float, most: int) -> int:
    """Find the most repetitions of a step that `larger` dominates, up to `slack` in δ.

    Args:
        step: the composition that is repeated.
        larger: the composition to dominate them.
        slack: η ≥ 0, as in `dominates`.
        most: the largest number to try.

    Returns:
        A number up to `most` that is proved; 0 if none is.

    Raises:
        TimeoutError: the CPU time is up (`time_limit`).
    """
    evident = _largest_satisfying(lambda n: _is_evident(larger, _repeat(step, n), slack), most)
    if not slack > 0 or not larger or evident == most or _is_multiple(larger, step):
        return evident
    fixed = _RepeatedComposition(larger)

    def excess(numbers: Array) -> tuple[Array, NDArray[np.bool_]]:
        """Return, per repetition count, upper bounds on max over ε of δ_steps − δ_larger − slack.

        There is one for each number of repetitions, less the slack; the number is proved if it is
        at most 0. The second value is whether the bounds behind it are narrow.
        """
        return _bound_excess(fixed, _RepeatedComposition(step, numbers), slack)

    guess = min(_moment_ratios(larger, step, slack))
    return _search_proved_number(excess, guess, unproved=most + 1, proved=evident)


def _repeat(releases: Composition, repetitions: int) -> list[tuple[ReleaseLaw, int]]:
    """Return the releases with each count multiplied by `repetitions`."""
    return [(release, count * repetitions) for release, count in releases]


def _merge_counts(releases: Composition) -> dict[ReleaseLaw, int]:
    """Return the distinct releases of a composition, each with its total count."""
    counts: dict[ReleaseLaw, int] = {}
    for release, count in releases:
        if count > 0:
            counts[release] = counts.get(release, 0) + count
    return counts


def _is_multiple(whole: Composition, step: Composition) -> bool:
    """Return whether a composition consists only of repetitions of the step's single release."""
    return (
        len(_merge_counts(step)) == 1 and _merge_counts(whole).keys() == _merge_counts(step).keys()
    )


def _largest_satisfying(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest integer up to `most` for which `holds` is true; 0 if there is none.

    The property holds for all numbers below one for which it holds.
    """
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


# ------------------------------------------------------------------ domination without numerics


def _is_evident(larger: Composition, smaller: Composition, slack: float) -> bool:
    """Return whether domination follows from comparing the releases, without computing δ(ε).

    Each release of the smaller composition takes one of the larger one that can imitate it; or all
    that the smaller one releases is within the slack: H(x) ≤ H(0), its total variation, at x ≥ 0.
    """
    if total_variation(smaller) <= slack:
        return True
    left, missing = _merge_counts(larger), _merge_counts(smaller)
    for release in missing:
        same = min(missing[release], left.get(release, 0))
        missing[release] -= same
        left[release] = left.get(release, 0) - same
    if _has_enough_gaussian_noise(left, missing):
        return True
    for release, count in missing.items():
        check_time()
        for other in left:
            taken = min(count, left[other]) if _can_imitate(other, release) else 0
            count -= taken
            left[other] -= taken
        if count > 0:
            return False
    return True


def _has_enough_gaussian_noise(left: dict[ReleaseLaw, int], missing: dict[ReleaseLaw, int]) -> bool:
    """Return whether the Gaussian releases in `left` dominate all releases in `missing`.

    Unsampled Gaussian releases compose to one, whose μ² is the sum. False if others are missing.
    """
    total = [Fraction(0), Fraction(0)]
    for at, counts in enumerate((left, missing)):
        for release, count in counts.items():
            mu = _unsampled_gaussian_mu(release)
            if mu is not None:
                total[at] += count * Fraction(mu) ** 2
            elif at == 1 and count > 0:
                return False
    return total[1] <= total[0]


def _unsampled_gaussian_mu(release: ReleaseLaw) -> float | None:
    """Return μ (sensitivity over noise) of an unsampled Gaussian release; None for any other."""
    if not isinstance(release, Release) or release.sample_rate < 1.0:
        return None
    return release.base_pair.mu if isinstance(release.base_pair, GaussianPair) else None


def _can_imitate(release: ReleaseLaw, other: ReleaseLaw) -> bool:
    """Return whether post-processing can turn `release`'s dominating pair into `other`'s.

    With the same noise law this holds if the other has at least the noise and at most the sample
    rate. *Noise:* N(0, 1) and N(μ, 1), scaled by r = μ′/μ ≤ 1 and with N(0, 1 − r²) added, become
    N(0, 1) and N(μ′, 1). Laplace noise of scale b becomes that of scale b′ ≥ b if it is left alone
    with probability (b/b′)², and else Laplace noise of scale b′ is added (the characteristic
    functions are 1/(1 + b²t²) and 1/(1 + b′²t²)). A channel acts on mixtures part by part.
    *Sampling:* with probability q′/q keep the outcome, else draw one from N₀. N₀ becomes N₀ and
    (1 − q)·N₀ + q·N₁ becomes (1 − q′)·N₀ + q′·N₁. The same channel serves both directions.
    Both channels also act on the three parts N(0), N(μ) and N(−μ) of a replaced record's pair.
    """
    if isinstance(release, ReplacedRecord) and isinstance(other, ReplacedRecord):
        return other.mu <= release.mu and other.sample_rate <= release.sample_rate
    if not (isinstance(release, Release) and isinstance(other, Release)):
        return False
    pair, other_pair = release.base_pair, other.base_pair
    if other.sample_rate > release.sample_rate:
        return False
    if pair == other_pair:
        return True
    if isinstance(pair, GaussianPair) and isinstance(other_pair, GaussianPair):
        return other_pair.mu <= pair.mu
    if isinstance(pair, LaplacePair) and isinstance(other_pair, LaplacePair):
        return other_pair.inverse_scale <= pair.inverse_scale
    return False


# ----------------------------------------------------------------------- domination with bounds


class _RepeatedComposition:
    """Bounds on δ(ε) of a composition, for each of several numbers of repetitions."""

    def __init__(self, releases: Composition, numbers: Array | None = None) -> None:
        self.profiles = {
            direction: PrivacyProfile(releases, direction, numbers) for direction in DIRECTIONS
        }


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Bounds on δ(ε) of two compositions at increasing ε, for a removed or an added record.

    Attributes:
        x: increasing, from 0.
        smaller_upper: upper bounds on H of the smaller composition, a row for each repetition.
        larger_lower: lower bounds on H of the larger one.
        larger_upper: upper bounds on the same.
        is_narrow: whether the bounds in each row are narrow.
    """

    x: Array
    smaller_upper: Array
    larger_lower: Array
    larger_upper: Array
    is_narrow: NDArray[np.bool_]


def _bound_excess(
    larger: _RepeatedComposition, smaller: _RepeatedComposition, slack: float
) -> tuple[Array, NDArray[np.bool_]]:
    """Return upper bounds on max over ε of δ_smaller − δ_larger − slack, and whether each is tight.

    There is one for each number of repetitions, valid at every ε. It is tight where the bounds on
    both δ(ε) behind it are narrow.
    """
    removing, adding = (
        _bound_profiles(larger.profiles[direction], smaller.profiles[direction], slack)
        for direction in DIRECTIONS
    )
    excess = np.maximum(
        _largest_gap(removing, adding, slack), _largest_gap(adding, removing, slack)
    )
    return excess, removing.is_narrow & adding.is_narrow


def _bound_profiles(larger: PrivacyProfile, smaller: PrivacyProfile, slack: float) -> _Bounds:
    """Return bounds on δ(ε) of both compositions at increasing ε, narrow enough to compare."""
    saddle = saddle_point.find_at_delta(smaller.largest, smaller.direction, math.log(slack))
    last = min(max(saddle.bound, 1e-3) * (1 + 1e-9), _LAST_MAX)
    near = min(saddle.epsilon, last)
    x = np.linspace(0.0, max(near, 0.5 * last), _POINTS)
    x = np.unique(np.concatenate([x, np.linspace(x[-1], last, _POINTS_BEYOND + 1)]))
    absolute = _ABSOLUTE_WIDTH * slack
    lower, smaller_upper = smaller.cover(x, _RELATIVE_WIDTH, absolute)
    # from the second point on at which H is within the slack there is nothing to compare
    within = np.flatnonzero((smaller_upper <= slack).all(axis=0))
    if len(within):
        kept = max(int(within[0]) + 2, 2)
        x, lower, smaller_upper = x[:kept], lower[:, :kept], smaller_upper[:, :kept]
    larger_lower, larger_upper = np.zeros_like(lower), larger.renyi_bound(x)
    is_narrow = _are_narrow(lower, smaller_upper, absolute)
    is_refuted = bool((lower > larger_upper + slack).any(axis=1).all())
    if not is_refuted and (is_narrow.any() or len(lower) == 1):
        larger_lower, larger_upper = larger.cover(x, _RELATIVE_WIDTH, absolute)
        larger_narrow = _are_narrow(larger_lower, larger_upper, absolute)
        is_narrow = is_narrow & larger_narrow
    if is_refuted:
        is_narrow = np.ones(1, dtype=bool)
    return _Bounds(x, smaller_upper, larger_lower, larger_upper, is_narrow)


def _are_narrow(lower: Array, upper: Array, absolute: float) -> NDArray[np.bool_]:
    """Return, per repetition count, whether bounds on δ(ε) are narrow enough to compare."""
    return np.asarray((upper - lower <= _COARSE * upper + 10 * absolute).all(axis=1))


def _largest_gap(this: _Bounds, other: _Bounds, slack: float) -> Array:
    """Return, per repetition count, upper bounds on max over ε of δ_smaller − δ_larger − slack."""
    left, right = _prolonged_lines(this, other)
    near, far = this.smaller_upper[:, :-1] - slack, this.smaller_upper[:, 1:] - slack
    at_near, at_far = this.larger_lower[:, :-1], this.larger_lower[:, 1:]
    # the mixture of both lines that is parallel to the chord, or the nearest
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (near - far - right) / (left - right)
    share = np.clip(np.nan_to_num(share, nan=0.5), 0.0, 1.0)
    gap = np.maximum(
        near - share * at_near - (1 - share) * (at_far + right),
        far - share * (at_near - left) - (1 - share) * at_far,
    )
    gap += _ROUNDING * (1 + left + right)
    settled = near <= 0  # H decreases, and is at least 0
    tail = this.smaller_upper[:, -1] - slack
    largest: Array = np.maximum(np.where(settled, 0.0, gap).max(axis=1), tail)
    return np.nan_to_num(largest, nan=math.inf)  # nothing is proved by overflowing lines


def _prolonged_lines(this: _Bounds, other: _Bounds) -> tuple[Array, Array]:
    """Extend the neighbouring chords of δ(ε) into each grid interval; return how far each falls.

    The first line starts at an interval's left end, and its slope is that of the interval before;
    the second ends at the right end, with the slope of the interval after. The falls are not
    negative: the first is rounded up, the second down.
    """
    x, step = this.x, np.diff(this.x)
    # the point left of 0, by the other direction's H
    beyond = other.x[1]
    mirrored = -math.expm1(-beyond) + math.exp(-beyond) * other.larger_upper[:, 1]
    before = np.concatenate([mirrored[:, np.newaxis], this.larger_upper[:, :-2]], axis=1)
    width = -np.expm1(-np.append(beyond, step[:-1]))
    ratio = np.expm1(step) / width * (1 + _ROUNDING)
    left = np.maximum(before - this.larger_lower[:, :-1], 0.0) * ratio
    width = np.expm1(x[2:] - x[1:-1])
    ratio = -np.expm1(-step[:-1]) / width * (1 - _ROUNDING)
    right = np.maximum(this.larger_lower[:, 1:-1] - this.larger_upper[:, 2:], 0.0) * ratio
    right = np.concatenate([right, np.zeros((len(right), 1))], axis=1)  # nothing is known beyond
    return left, right


# --------------------------------------------------------------------------------------- search


def _moment_ratios(whole: Composition, step: Composition, slack: float) -> list[float]:
    """Return ratios of log-moments, which estimate how many times `step` is as costly as `whole`.

    The ratio is 1 where more than the slack is revealed for certain.
    """
    ratios: list[float] = []
    for direction in DIRECTIONS:
        saddle = saddle_point.find_at_delta(whole, direction, math.log(slack))
        if math.isinf(saddle.bound):
            return [1.0]
        tilt = _largest_affordable_tilt(step, saddle)
        relevant = (saddle.tilts <= tilt * 1.2) & (saddle.tilts >= 0.05 * tilt)
        every = max(1, int(relevant.sum()) // _TILTS)
        tilts, moments = saddle.tilts[relevant][::every], saddle.moments[relevant][::every]
        own = np.zeros_like(tilts)
        for release, count in step:
            own += count * release.log_moments(direction, tilts)
        ratios += [float(ratio) for ratio in moments / np.maximum(own, 1e-300)]
    return ratios


def _largest_affordable_tilt(step: Composition, saddle: SaddlePoint) -> float:
    """Return the tilt of a saddle point, or the largest below it at which moments cost little.

    Laplace noise leads to tilts at which a sampled step's moments take a gigabyte of memory.
    """
    for tilt in (saddle.tilt, *saddle.tilts[saddle.tilts < saddle.tilt][::-1]):
        if saddle_point.is_affordable(step, np.full(_TILTS, tilt)):
            return float(tilt)
    return saddle.tilt


def _search_proved_number(
    excess: Callable[[Array], tuple[Array, NDArray[np.bool_]]],
    guess: float,
    unproved: int,
    proved: int,
) -> int:
    """Return the number of repetitions nearest to `unproved` for which domination is proved.

    Args:
        excess: returns upper bounds for many numbers, each proving its number if it is at most 0,
            and whether the bounds behind each are narrow.
        guess: of the answer.
        unproved: a number that does not count as proved.
        proved: a number that does, or lies beyond all that may be tried.

    Raises:
        TimeoutError: the CPU time is up before any number was proved.
    """
    count, first, is_upward, ratio = _COUNT, proved, unproved < proved, _RATIO**2
    low, high = min(unproved, proved), max(unproved, proved)
    numbers = _integers_around(guess, unproved, proved, count)
    for _ in range(_ROUNDS_MAX):
        if not len(numbers):
            break
        try:
            found, is_narrow = excess(numbers)
        except TimeoutError:
            if proved == first == 0:
                raise
            break  # a number that was proved is an answer
        before = (unproved, proved)
        succeeded, failed = numbers[found <= 0], numbers[(found > 0) & (is_narrow | (count == 1))]
        if len(succeeded):
            proved = int(succeeded.min() if is_upward else succeeded.max())
        failed = failed[failed < proved] if is_upward else failed[failed > proved]
        if len(failed):
            unproved = int(failed.max() if is_upward else failed.min())
        if abs(proved - unproved) <= max(1, int(_NARROW * min(proved, unproved))):
            break
        if (unproved, proved) == before and count > 1:  # many at once share too coarse a line
            count, ratio = 1, _RATIO_NEAR
        if (low, high) == (min(unproved, proved), max(unproved, proved)):
            numbers = _integers_around(guess, unproved, proved, count)
            continue
        numbers = _integers_between(unproved, proved, (low, high), count, ratio)
        ratio = min(ratio**2, _RATIO_MAX)
    return proved


def _integers_around(guess: float, unproved: int, proved: int, count: int) -> Array:
    """Return up to `count` trial integers around a guess, between a failed and a proved number."""
    low, high = min(unproved, proved), max(unproved, proved)
    guess = min(max(guess, low + 1.0), high - 1.0)
    return _geometric_integers(guess / _RATIO, guess * _RATIO, low, high, count)


def _integers_between(
    unproved: int, proved: int, outer: tuple[int, int], count: int, ratio: float
) -> Array:
    """Return up to `count` integers to try next, between a failed and a proved number.

    Args:
        unproved: the last number that is not proved.
        proved: the next one that is.
        outer: the lower and the upper of both before any number was tried.
        count: how many integers to return at most.
        ratio: the largest ratio of an integer to the nearest number already tried.
    """
    low, high = min(unproved, proved), max(unproved, proved)
    if high == outer[1] and low > outer[0]:
        return _geometric_integers(low + 1.0, low * ratio + 1, low, high, count)
    if low == outer[0] and high < outer[1]:
        return _geometric_integers(high / ratio - 1, high - 1.0, low, high, count)
    step = (high - low) / (count + 1)
    return _geometric_integers(low + step, high - step, low, high, count)


def _geometric_integers(first: float, last: float, above: int, below: int, count: int) -> Array:
    """Return up to `count` integers, in geometric steps from about `first` to about `last`.

    All are strictly between `above` and `below`.
    """
    first, last = max(first, above + 1.0, 1.0), max(min(last, below - 1.0), 1.0)
    if count == 1:
        first = last = math.sqrt(first * last)
    numbers = np.unique(np.round(np.geomspace(first, last, count)))
    inside: Array = numbers[(numbers > above) & (numbers < below)]
    return inside
