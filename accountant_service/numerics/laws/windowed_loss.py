"""One sampled Gaussian release, with its outcomes weighted by smooth windows of their loss.

When the record is removed, dP = n(z)·e^{l(z)} dz with l = log(1 − q + q·e^Λ), Λ = μz − μ²/2. A
window is Φ((l − edge)/width), which keeps greater losses, or Φ((edge − l)/width), which keeps
smaller ones. The integral is

    K(a) = ∫ n(z)·e^{a·l(z)}·Π windows dz,    a = s + 1 + iv.

Everything rests on one bound, of the integrand on the lines Im z = ±y with φ = μy ≤ π/2. There

* |n| is e^{y²/2} times its value on the real line;
* Re l and θ = |Im l| increase with Re z, and |e^{(s + 1 + iv)l}| = e^{(s + 1)Re l ± vθ};
* |Φ(u + it)| ≤ e^{t²/2}·Φ(u), as ∫_{−∞}^u |n(r + it)| dr says, and so ≤ 1 + e^{t²/2}·Φ(−u).

On either line, taken upwards or downwards, the integral is that of the real line. With e^{−vθ} it
bounds |K| by how fast it decays; with e^{+vθ} it bounds the error of the trapezoidal rule, at most
2Me^{−2πy/κ}/(1 − e^{−2πy/κ}) at spacing κ (Trefethen & Weideman, SIAM Review 56(3), 2014, Theorem
5.1). Both are taken cell by cell of the line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from scipy import special

from accountant_service.numerics.errors import SlowDecayError
from accountant_service.numerics.floats.special_functions import LOG_SQRT_TWO_PI, Array, log_sum_exp
from accountant_service.numerics.laws import sampled_gaussian
from accountant_service.numerics.laws.characteristic_function import (
    CellPairs,
    MomentIntegrand,
    TrapezoidalRule,
    exact_multiples,
    exponent_error,
    log_cell_mass_lower,
    loss_rounding,
    round_spacing,
    trapezoidal_rule,
)

_EPS: Final = float(np.finfo(float).eps)
_LOG_ERROR: Final = -44.0  # natural log of the quadrature's error relative to K
_TAIL_DEVIATIONS: Final = 13.0  # of the real line on either side, as in `sampled_gaussian`
_WINDOW_TAIL_WIDTHS: Final = 14.0  # widths beyond a window's edge
_CELLS: Final = 256
_WINDOW_EDGES: Final = np.linspace(-10.0, 12.0, 67)  # widths from a window's edge
_LINE_HEIGHTS: Final = np.geomspace(
    0.004, 1.0, 20
)  # shares of the strip 0 < μy ≤ π/2 that are tried
_HEIGHT_MAX: Final = 12.6
_PAIR_CELLS: Final = 160  # cells that form pairs
_NODES_MAX: Final = 1 << 17
_RESULTS_MAX: Final = 16  # results that a law remembers


@dataclass(frozen=True, slots=True)
class Window:
    """A smooth weight in [0, 1] that selects privacy losses above, or below, an edge.

    The weight is Φ(sign·(l − edge)/width), Φ the standard normal distribution function. With sign
    +1 the window keeps the losses above its edge, with −1 those below.
    """

    edge: float
    width: float
    sign: int

    def log_weight(self, loss: Array) -> Array:
        """Return the log of the window's weight at each privacy loss."""
        return special.log_ndtr(self.sign * (loss - self.edge) / self.width)

    def relative_error(self, loss: Array, loss_error: Array) -> Array:
        """Return upper bounds on the relative errors of the weights computed at each loss.

        `loss_error` bounds the error of each loss, which makes the weight inexact too.
        """
        u = self.sign * (loss - self.edge) / self.width
        closed = np.maximum(-u, 0.0)
        hazard = np.where(u > 0, np.exp(-0.5 * u * u), 1 + closed)  # at least (log Φ)′
        moved = loss_error / self.width + 4 * _EPS * (np.abs(u) + abs(self.edge) / self.width)
        # SciPy's log Φ is off by a few eps of itself, and by u² of them where it is near 0
        evaluated = 16 * _EPS * (1 + np.maximum(u, 0.0) ** 2) * np.abs(special.log_ndtr(u))
        relative_error: Array = hazard * moved + evaluated
        return relative_error

    def log_weight_bound_beyond(self, real: Array, imaginary: Array) -> Array:
        """Bound log|weight| from above on curves that start at the complex loss real + i·imaginary.

        The point is real + i·imaginary. The bound holds for all losses l on a curve to the right
        along which (Im l)² − (Re l − edge)² decreases.
        """
        u = self.sign * (real - self.edge) / self.width
        growth = 0.5 * (imaginary / self.width) ** 2
        if self.sign > 0:
            return np.logaddexp(0.0, growth + special.log_ndtr(-u))
        return np.asarray(growth + special.log_ndtr(u))

    def log_weight_bound(self, low: Array, high: Array, imaginary_max: Array) -> Array:
        """Bound log|weight| from above on rectangles of complex losses.

        The rectangle is low ≤ Re l ≤ high, |Im l| ≤ imaginary_max.
        """
        ends = np.stack([self.sign * (low - self.edge), self.sign * (high - self.edge)])
        u = ends / self.width
        growth = 0.5 * (imaginary_max / self.width) ** 2
        near_one = np.logaddexp(0.0, growth + special.log_ndtr(-u.min(axis=0)))
        bound: Array = np.minimum(growth + special.log_ndtr(u.max(axis=0)), near_one)
        return bound


@lru_cache(maxsize=16)  # a curve, or a solver for the steps, asks for the same ones again
def cached_windowed_loss(
    sample_rate: float, mu: float, windows: tuple[Window, ...], order: float
) -> WindowedLoss:
    """Return the `WindowedLoss` with these arguments from a cache, or construct it."""
    return WindowedLoss(sample_rate, mu, windows, order)


class WindowedLoss:
    """A sampled Gaussian release's privacy loss l, weighted by smooth functions (windows) of l.

    K(a) = E[e^{(a − 1)l}·weight] is its transform at a complex order a, whose imaginary part is a
    frequency v. K of a real order is a moment.
    """

    def __init__(
        self, sample_rate: float, mu: float, windows: Sequence[Window], order: float
    ) -> None:
        """Prepare the weighted privacy loss for log-moments of orders a in (0, order].

        Args:
            sample_rate: q in (0, 1].
            mu: of the release.
            windows: their product is taken.
            order: the largest a, at least 1.
        """
        self._rate, self._mu, self._windows = sample_rate, mu, tuple(windows)
        closed = [
            window.edge + order * window.width**2 + _WINDOW_TAIL_WIDTHS * window.width
            for window in self._windows
            if window.sign < 0
        ]
        self._low, self._high = -_TAIL_DEVIATIONS, max(order, 1.0) * mu + _TAIL_DEVIATIONS
        if closed:
            self._high = max(min(self._high, self._position_of_loss(max(closed))), 1.0)
        self._prepare_lines()
        self._results: dict[tuple[str, bytes], Array] = {}

    def _compute_once(self, name: str, argument: Array, compute: Callable[[], Array]) -> Array:
        """Return the cached result of a computation for this argument, or compute it."""
        key = (name, argument.tobytes())
        found = self._results.get(key)
        if found is None:
            found = compute()
            if len(self._results) >= _RESULTS_MAX:
                self._results.clear()
            self._results[key] = found
        return found

    def _position_of_loss(self, loss: float) -> float:
        """Return the mechanism output z at which the release has this privacy loss."""
        odds = (
            loss - math.log(self._rate) if loss > 300 else math.log1p(math.expm1(loss) / self._rate)
        )
        return odds / self._mu + 0.5 * self._mu

    def _loss(self, z: Array) -> Array:
        """Return the privacy loss at each mechanism output z."""
        return sampled_gaussian.privacy_loss(self._mu * z - 0.5 * self._mu**2, self._rate)

    def _complex_loss(self, z: Array, heights: Array) -> tuple[Array, Array]:
        """Return real and imaginary parts of the loss at z + iy: rows y = `heights`, columns z."""
        whole = self._mu * z - 0.5 * self._mu**2
        ratio = np.minimum(whole, 300.0)  # beyond it l follows Λ
        angle = self._mu * heights[:, None]
        odds = self._rate * np.exp(ratio)
        real, imaginary = 1 - self._rate + odds * np.cos(angle), odds * np.sin(angle)
        # |w|² − 1 keeps the digits of a small loss
        rise = self._rate * np.expm1(ratio) - 2 * odds * np.sin(0.5 * angle) ** 2
        square = rise * (2 + rise) + imaginary**2
        far = square < -0.5
        near = 0.5 * np.log1p(np.where(far, 0.0, square))
        log_size = np.where(far, np.log(np.hypot(real, imaginary) + 1e-300), near)
        return log_size + (whole - ratio), np.arctan2(imaginary, real)

    def _prepare_lines(self) -> None:
        """Precompute bounds on the Laplace transform's integrand on lines Im z = y."""
        self._heights = np.minimum(_LINE_HEIGHTS * 0.5 * math.pi / self._mu, _HEIGHT_MAX)
        z = self._cell_edges()
        loss, angle = self._complex_loss(z, self._heights)
        nearest = np.where(z[:-1] * z[1:] <= 0, 0.0, np.minimum(np.abs(z[:-1]), np.abs(z[1:])))
        log_size = np.log(np.diff(z)) - LOG_SQRT_TWO_PI - 0.5 * nearest**2
        tail = float(special.log_ndtr(-_TAIL_DEVIATIONS))
        log_size = np.append(log_size, tail) + 0.5 * self._heights[:, None] ** 2
        below = np.full((len(self._heights), 1), -745.0)  # log of the least double: no loss
        low, high = np.hstack([loss[:, :-1], below]), np.hstack([loss[:, 1:], loss[:, :1]])
        self._least_angle = np.hstack([angle[:, :-1], 0 * angle[:, :1]])
        self._greatest_angle = np.hstack([angle[:, 1:], angle[:, :1]])
        for window in self._windows:
            log_size = log_size + window.log_weight_bound(low, high, self._greatest_angle)
        self._log_size, self._greatest_loss = log_size, high
        self._end_loss, self._end_angle = loss[:, -1], angle[:, -1]

    def _cell_edges(self) -> Array:
        """Return the ends of the intervals that outputs z are divided into, finer near windows."""
        turns = [
            self._position_of_loss(max(window.edge + u * window.width, 0.0))
            for window in self._windows
            for u in _WINDOW_EDGES
        ]
        edges = np.concatenate([np.linspace(self._low, self._high, _CELLS + 1), turns])
        return np.unique(edges[(edges >= self._low) & (edges <= self._high)])

    def _log_beyond(
        self,
        order: float,
        heights: Array,
        end_loss: Array,
        end_angle: Array,
        frequency: float = 0.0,
    ) -> Array:
        """Return, per line Im z = y, the log of a bound on the integral beyond the last interval.

        `heights` are the y. `end_loss` and `end_angle` are the real and imaginary part of the loss
        where the cells end on each line.

        The integrand is weighted by e^{vθ}.

        To the right dθ/d(Re l) = tan(φ − θ). So past a window's edge its bound there, θ² less
        (Re l − edge)² over 2·width², decreases if φ ≤ π/4 and Re l − edge ≥ θ·tan φ at the end;
        and e^{a·Re l + vθ} times it, if it closes, where the difference is (a + v·tan φ)·width² at
        least. The rest is what `sampled_gaussian` leaves out, or the normal tail.
        """
        angle, natural = self._mu * heights, np.array([max(order, 1.0)])
        slope = np.tan(np.minimum(angle, 0.25 * math.pi))
        log_windows, falls = np.zeros_like(heights), np.zeros(heights.shape, dtype=bool)
        for window in self._windows:
            past = end_loss - window.edge - slope * end_angle
            decreases = (angle <= 0.25 * math.pi) & (past >= 0)
            log_end = window.log_weight_bound_beyond(end_loss, end_angle)
            log_windows += np.where(decreases, log_end, 0.5 * (angle / window.width) ** 2)
            falls |= (
                decreases
                & (window.sign < 0)
                & (past >= (order + frequency * slope) * window.width**2)
            )
        log_rest = np.full_like(heights, math.inf)
        if self._high >= natural[0] * self._mu + _TAIL_DEVIATIONS:
            log_rest = sampled_gaussian.log_truncation_error(natural, self._rate, 1 / self._mu)
            log_rest = log_rest + frequency * angle
        tail = float(special.log_ndtr(-self._high)) + order * end_loss + frequency * end_angle
        log_rest = np.minimum(log_rest, np.where(falls, tail, math.inf))
        largest: Array = log_rest + log_windows + 0.5 * heights**2
        return largest

    def log_decay(self, order: float, frequencies: Array) -> Array:
        """Return upper bounds on log|Laplace transform| at order + iu, for u ≥ each frequency."""
        argument = np.append(frequencies, order)
        return self._compute_once("decay", argument, lambda: self._log_decay(order, frequencies))

    def _log_decay(self, order: float, frequencies: Array) -> Array:
        """Compute the result of `log_decay`, which caches it."""
        fixed = self._log_size + order * self._greatest_loss
        beyond = self._log_beyond(order, self._heights, self._end_loss, self._end_angle)
        best = np.full_like(frequencies, math.inf)
        for line in range(len(self._heights)):
            falling = fixed[line] - np.multiply.outer(frequencies, self._least_angle[line])
            total = np.logaddexp(
                log_sum_exp(falling), beyond[line] - frequencies * self._end_angle[line]
            )
            best = np.minimum(best, total)
        return best

    def cell_pairs(self, order: float) -> CellPairs:
        """Return upper bounds on the characteristic function of the loss tilted to this order."""
        z = np.linspace(self._low, self._high, _PAIR_CELLS + 1)
        loss, middle = self._loss(z), self._loss(0.5 * (z[:-1] + z[1:]))
        log_mass = log_cell_mass_lower(z, loss, middle, order)
        for window in self._windows:
            log_mass = log_mass + window.log_weight(loss[1:] if window.sign < 0 else loss[:-1])
        return CellPairs(loss, np.exp(log_mass - self.log_moments(np.array([order]))[0]))

    def _log_line_integrals(self, orders: Array, frequency: float) -> Array:
        """Bound ∫|integrand| on lines Im z = y; return logs: a row per order, a column per y.

        Rows are orders, columns are lines. The trapezoidal rule's error follows from them.
        """
        growth = []
        for order in orders:
            rising = self._log_size + order * self._greatest_loss
            beyond = self._log_beyond(
                float(order), self._heights, self._end_loss, self._end_angle, frequency
            )
            growth.append(
                np.logaddexp(log_sum_exp(rising + frequency * self._greatest_angle), beyond)
            )
        return np.array(growth)

    def _choose_spacing(self, orders: Array, frequency: float) -> tuple[float, Array]:
        """Choose a trapezoidal spacing; return it, and the log of its error per order."""
        growth = self._log_line_integrals(orders, frequency)
        z = self._cell_edges()
        about = log_sum_exp(self._exponent(z[1:], orders) + np.log(np.diff(z))) - LOG_SQRT_TWO_PI
        needed = growth - about[:, None] - _LOG_ERROR
        widest = np.min(np.max(2 * math.pi * self._heights / np.maximum(needed, 1.0), axis=1))
        if not widest * _NODES_MAX > self._high - self._low:
            raise SlowDecayError
        spacing = round_spacing(float(widest))
        decrease = 2 * math.pi * self._heights / spacing
        quadrature = (growth + math.log(2) - decrease - np.log(-np.expm1(-decrease))).min(axis=1)
        real, flat = np.zeros(1), self._loss(np.array([self._high]))
        left = special.log_ndtr(self._low) + orders * max(
            float(self._loss(np.array([self._low]))[0]), 0.0
        )
        right = np.array([self._log_beyond(float(order), real, flat, real)[0] for order in orders])
        return float(spacing), np.logaddexp(np.logaddexp(left, right), quadrature)

    def _log_windows(self, loss: Array) -> Array:
        """Return the log of the product of all windows' weights at each privacy loss."""
        return sum((window.log_weight(loss) for window in self._windows), np.zeros_like(loss))

    def _exponent(self, z: Array, orders: Array) -> Array:
        """Return the log of the Laplace transform's integrand: a row per order, a column per z.

        Rows are orders.
        """
        loss = self._loss(z)
        fixed = self._log_windows(loss) - 0.5 * z * z
        exponent: Array = np.multiply.outer(orders, loss) + fixed
        return exponent

    def _exponent_error(self, loss: Array, loss_error: Array, order: float) -> Array:
        """Return upper bounds on the rounding error of order·loss + log(product of weights)."""
        error = exponent_error(order, loss, loss_error)
        for window in self._windows:
            error = error + window.relative_error(loss, loss_error)
        return error

    def log_moments(self, orders: Array) -> Array:
        """Return upper bounds on log E[e^{(a − 1)·loss}·weight], one for each order a in `orders`.

        Each order is in (0, order].
        """
        return self._compute_once("moments", orders, lambda: self._log_moments(orders))

    def _log_moments(self, orders: Array) -> Array:
        """Compute the result of `log_moments`, which caches it."""
        spacing, log_omitted = self._choose_spacing(orders, 0.0)
        z = exact_multiples(spacing, self._low, self._high)
        loss = self._loss(z)
        exponent = self._exponent(z, orders)
        loss_error = loss_rounding(loss, self._rate, self._mu)
        relative_error = self._exponent_error(loss, loss_error, float(orders.max())) + 4 * _EPS * (
            2 + z * z
        )
        relative_error = relative_error + 4 * _EPS * (
            8 + np.abs(exponent.max(axis=1, keepdims=True))
        )
        log_moment = log_sum_exp(exponent + relative_error) + math.log(spacing) - LOG_SQRT_TWO_PI
        upper: Array = np.logaddexp(log_moment, log_omitted) + 64 * _EPS
        return upper

    def count_nodes(self, order: float, frequency: float) -> float:
        """Return the number of quadrature nodes for the Laplace transform up to this frequency."""
        spacing, _ = self._choose_spacing(np.array([order]), frequency)
        return (self._high - self._low) / spacing

    def trapezoidal_rule(self, order: float, frequency: float) -> TrapezoidalRule:
        """Return a trapezoidal rule for the Laplace transform at this order, up to a frequency."""
        orders = np.array([order])
        spacing, log_omitted = self._choose_spacing(orders, frequency)
        z = exact_multiples(spacing, self._low, max(self._high, _TAIL_DEVIATIONS))
        loss = self._loss(z)
        loss_error = loss_rounding(loss, self._rate, self._mu)
        growth = order * loss + self._log_windows(loss)
        growth[z >= self._high + spacing] = -math.inf  # where all windows have closed
        error = self._exponent_error(loss, loss_error, order)
        integrand = MomentIntegrand(z, spacing, growth, error)
        return trapezoidal_rule(integrand, loss, loss_error, float(log_omitted[0]))
