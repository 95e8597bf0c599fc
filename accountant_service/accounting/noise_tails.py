"""The normal generators of libraries end, and what that costs: a lower bound of δ, whatever ε.

A generator makes a normal number of n random bits, so there is a largest draw: r deviations. With
one record more, whose gradient has the clip norm and lies on one coordinate, a draw z is shifted by
1/σ. An output beyond r is impossible without the record, so its loss is infinite. If the record is
in a step with probability q, in each of T steps independently, and p = P(|z + 1/σ| > r), then

    δ ≥ 1 − (1 − q·p)^T    at every ε.

**Box–Muller** makes two numbers of one radius R = √(−2 ln u) and an angle. No pair has a radius
beyond r = √(−2 ln u₀), where u₀ is the least uniform number. A pair that is shifted by μ = 1/σ
along one axis is beyond r if R² + 2Rμ cos θ + μ² > r². For exact normal numbers p would be Marcum's
Q₁(μ, r). But a radius beyond r is what the generator does not draw: Q₁(μ, r) is too large, by about
exp(−r²/2) at most. Here p is summed over the radii that are drawn. A larger radius is beyond r more
often if μ ≤ r. If μ > r, that is so only from √(μ² − r²) on: a shift moves the smallest ones out.

**Inversion** makes one number of a uniform one, and p counts those that the shift moves beyond r.

Every step of these computations rounds p down. Generators compute in floating point, with relative
errors of u below w, and of logarithms, sines and square roots below m. So each u counts as any
within w of it. A draw is at most m of its length, which is at most r, from the exact one, and an
output must be beyond r·(1 + m): an exact sum counts if it is beyond r·(1 + 2m).
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import special

from accountant_service.mechanisms import (
    Composed,
    DpSgd,
    FixedSizeSampled,
    Gaussian,
    Mechanism,
    PoissonSampled,
    Repeated,
)
from accountant_service.numerics.floats import rounding

_MARGIN: Final = 2.0**-18  # m in single and double precision
_BFLOAT16_MARGIN: Final = 2.0**-6
_UNIFORM_MARGIN: Final = 2.0**-21  # w
_SLACK: Final = 1 - 1e-9  # for the rounding of sums of positive numbers
_SINGLE_POINTS: Final = 4096  # of the least uniform numbers, which are counted one by one
_CELLS_PER_OCTAVE: Final = 512
_ZIGGURAT_END: Final = 3.6541528853610088  # NumPy's ziggurat_nor_r: beyond it is the tail


@dataclass(frozen=True)
class NormalGenerator(ABC):
    """A library's generator of standard normal numbers.

    Attributes:
        library: its name.
        name: the library, the precision and the device.
        source: where its code is.
    """

    library: str
    name: str
    source: str

    @property
    @abstractmethod
    def largest(self) -> float:
        """r, in deviations: no draw, nor pair of draws of one radius, is larger."""

    @abstractmethod
    def escape_probability(self, shift: float) -> float:
        """Return a lower bound of p for a draw that is shifted by `shift` > 0 deviations."""


@dataclass(frozen=True)
class BoxMuller(NormalGenerator):
    """Two numbers of one radius √(−2 ln u), where u is (k + offset)/2^bits, for k from 0.

    Attributes:
        bits: of u, and of the angle.
        offset: see above.
        least: u for k = 0, if it is another number.
    """

    bits: int
    offset: float
    least: float | None = None

    @property
    def largest(self) -> float:
        """The radius of the least u."""
        least = math.ldexp(self.offset, -self.bits) if self.least is None else self.least
        return math.sqrt(-2 * math.log(least))

    def escape_probability(self, shift: float) -> float:
        """Sum over cells of k, each with the radius of the cell that is beyond r least often.

        The angles are multiples of 2π/2^bits: of those in an arc one at most is lost by rounding.
        """
        edges = _cell_edges(self.bits)
        uniform = np.ldexp(np.stack([edges[:-1], edges[1:] - 1]) + self.offset, -self.bits)
        if self.least is not None:
            uniform[:, 0] = self.least
        uniform *= [[1 - _UNIFORM_MARGIN], [1 + _UNIFORM_MARGIN]]
        largest, smallest = np.sqrt(-2 * np.log(np.minimum(uniform, 1.0)))
        excess = (self.largest * (1 + 2 * _MARGIN)) ** 2 - shift**2
        radius = np.clip(math.sqrt(max(-excess, 0.0)), smallest, largest)
        of_zero = np.full_like(radius, 2.0 if excess >= 0 else -2.0)
        cosine = np.divide(excess - radius**2, 2 * radius * shift, out=of_zero, where=radius > 0)
        arc = np.arccos(np.clip(cosine, -1, 1)) / math.pi - math.ldexp(2.0, -self.bits)
        share = np.where(cosine < -1, 1.0, np.maximum(arc, 0.0))
        return float(np.ldexp(np.diff(edges), -self.bits) @ share) * _SLACK


@dataclass(frozen=True)
class Inversion(NormalGenerator):
    """√2·erf⁻¹ of 1 − (4k − 1)/2^(bits + 1), for k from 1 to 2^bits.

    The most negative draw is larger than the largest one, which `largest` is.

    Attributes:
        bits: of the uniform number.
        margin: m.
    """

    bits: int
    margin: float = _MARGIN

    @property
    def largest(self) -> float:
        """The draw for k = 1."""
        return float(-special.ndtri(math.ldexp(3.0, -self.bits - 2)))

    def escape_probability(self, shift: float) -> float:
        """Count the k whose draws, shifted, are larger than the largest draw.

        The most negative draw is up to 1.2 times as large, and so is its error.
        """
        above = float(special.ndtr(shift - self.largest * (1 + 2.2 * self.margin))) * _SLACK
        count = min(math.floor((math.ldexp(above, self.bits + 2) + 1) / 4), 1 << self.bits)
        return math.ldexp(count, -self.bits)


@dataclass(frozen=True)
class Rejection(NormalGenerator):
    """A generator that ends so far out that no bound is computed.

    Attributes:
        end: the largest draw.
    """

    end: float

    @property
    def largest(self) -> float:
        """The end."""
        return self.end

    def escape_probability(self, shift: float) -> float:  # noqa: ARG002 — the base passes it
        """Return 0, which is a lower bound."""
        return 0.0


def _cell_edges(bits: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return edges of cells of the whole numbers below 2^bits: single ones, then a share each."""
    single = np.arange(_SINGLE_POINTS + 1.0)
    octaves = bits - math.log2(_SINGLE_POINTS)
    growing = _SINGLE_POINTS * 2 ** np.linspace(0, octaves, round(octaves * _CELLS_PER_OCTAVE) + 1)
    every = np.unique(np.concatenate([single, np.floor(growing), [math.ldexp(1.0, bits)]]))
    return every[every <= math.ldexp(1.0, bits)]


_TORCH: Final = "aten/src/ATen/native/cpu/DistributionTemplates.h"
_JAX: Final = "jax/_src/random.py, _normal_real"
GENERATORS: Final[tuple[NormalGenerator, ...]] = (
    BoxMuller("PyTorch", "PyTorch, float32, CPU", f"{_TORCH}, normal_fill", 24, 1.0),
    BoxMuller("PyTorch", "PyTorch, float32, CUDA", "curand_normal.h, _curand_box_muller", 32, 0.5),
    BoxMuller("PyTorch", "PyTorch, float64, CPU", f"{_TORCH}, normal_fill", 53, 1.0),
    BoxMuller(
        "TensorFlow", "TensorFlow, float32",
        "tensorflow/core/lib/random/random_distributions_utils.h, BoxMullerFloat",
        23, 0.0, float(np.float32(1e-7)),
    ),
    Inversion("JAX", "JAX, float32", _JAX, 23),
    Inversion("JAX", "JAX, bfloat16", _JAX, 7, _BFLOAT16_MARGIN),
    Rejection(
        "NumPy", "NumPy, float64, Generator (ziggurat)",
        "numpy/random/src/distributions/distributions.c, random_standard_normal",
        _ZIGGURAT_END + math.sqrt(106 * math.log(2)),
    ),
    Rejection(
        "NumPy", "NumPy, float64, RandomState (polar)",
        "numpy/random/src/legacy/legacy-distributions.c, legacy_gauss",
        math.sqrt(208 * math.log(2)),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NoiseTail:
    """A lower bound of a mechanism's δ, if a generator draws its noise.

    Attributes:
        generator: its name.
        largest_draw: r, in deviations, rounded to the nearest double.
        delta_lower: δ at any ε is at least this.
    """

    generator: str
    largest_draw: float
    delta_lower: float


def find_noise_tails(mechanism: Mechanism, libraries: Iterable[str]) -> tuple[NoiseTail, ...]:
    """Return what the ends of libraries' generators cost, for those with a bound above 0.

    Args:
        mechanism: releases of other kinds than Gaussian noise on a sum count as nothing.
        libraries: names of libraries in `GENERATORS`.
    """
    exposures, names = list(_exposures(mechanism)), set(libraries)
    tails = (
        NoiseTail(each.name, each.largest, _delta_lower(each, exposures))
        for each in GENERATORS
        if each.library in names
    )
    return tuple(each for each in tails if each.delta_lower > 0)


def _delta_lower(
    generator: NormalGenerator, exposures: Iterable[tuple[float, float, int]]
) -> float:
    """Return 1 − Π(1 − q·p)^T, rounded down."""
    log_missed = 0.0
    for noise_multiplier, rate, count in exposures:
        escape = rate * generator.escape_probability(1 / noise_multiplier)
        log_missed += count * math.log1p(-min(escape, 1 - 2**-53))
    return max(0.0, rounding.down(-math.expm1(log_missed * _SLACK)))


def _exposures(mechanism: Mechanism) -> Iterable[tuple[float, float, int]]:
    """Yield σ, q and T of a mechanism's Gaussian releases."""
    match mechanism:
        case Gaussian(noise_multiplier):
            yield noise_multiplier, 1.0, 1
        case PoissonSampled(rate, Gaussian(noise_multiplier)):
            yield noise_multiplier, rate, 1
        case FixedSizeSampled(size, batch, Gaussian(noise_multiplier)):
            yield noise_multiplier, batch / size, 1
        case DpSgd(noise_multiplier) if mechanism.sampling == "balls_in_bins":
            yield noise_multiplier, 1.0, mechanism.step_count() // mechanism.bins()
        case DpSgd(noise_multiplier) if mechanism.sampling == "shuffled":
            yield noise_multiplier, *_shuffled_epochs(mechanism)
        case DpSgd(noise_multiplier):
            yield noise_multiplier, mechanism.rate(), mechanism.step_count()
        case Repeated(count, inner):
            yield from ((sigma, rate, count * times) for sigma, rate, times in _exposures(inner))
        case Composed(inners):
            for each in inners:
                yield from _exposures(each)


def _shuffled_epochs(run: DpSgd) -> tuple[float, int]:
    """Return the least chance of a record to be in a step of an epoch, and the fewest epochs.

    A loader that drops the last, smaller batch drops a record with it; one that keeps it has fewer
    epochs in as many steps.
    """
    if run.rate() == 0.0:
        return 0.0, 0
    batches = 1 / run.rate()
    if abs(batches - round(batches)) <= 4 * sys.float_info.epsilon * batches:
        batches = round(batches)  # the rate was rounded
    chance, most = math.floor(batches) / batches, math.ceil(batches)
    whole = run.step_count() // most if run.epochs is None else math.floor(run.epochs)
    return chance, whole
