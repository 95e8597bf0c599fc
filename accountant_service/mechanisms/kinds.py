"""The kinds of mechanism: each is one class that says all there is to say about it.

A class has the kind's name and fields, with their types and limits, an example, what its fields
must fulfil together, and its words. The API, its schema, the forms, the imports, the reference page
and the solver read these classes. A description says everything that an accountant may need, and
nothing about how to account for it.

The meaning of a released kind never changes: extensions are new kinds or new optional fields. A new
kind is a class in this file and, unless `simplified` says which mechanism it equals, its law in
`accounting/release_laws.py`.

`noise_multiplier` is the noise over the clip norm C under every neighbouring relation. Accountants,
not callers, take into account that a relation may double the sensitivity.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from accountant_service.mechanisms.field_types import (
    RATE_MIN,
    Cost,
    MechanismError,
    number,
    numbers,
    rate,
)
from accountant_service.writing.number_format import round_nearest as shown

COORDINATES_MAX: Final = 100_000  # of one diagonal_gaussian
COUNT_MAX: Final = 1_000_000_000  # repetitions, steps, records
BINS_MAX: Final = 100_000  # batches of an epoch of balls-in-bins sampling
# Noise multipliers outside these limits are refused: double precision is not enough for them.
NOISE_MIN: Final = 0.01
NOISE_MAX: Final = 1e6
LOSS_MAX: Final = 100.0  # greatest ε of a release; beyond it nobody is protected
SENSITIVITY_MAX: Final = 100_000  # of an integer
MATRIX_STEPS_MAX: Final = 100_000  # of correlated noise
POINTS_MAX: Final = 4096  # of a privacy profile or Rényi curve
RECORDS_MAX: Final = 256  # of one person
MIXTURE_SHIFTS_MAX: Final = 1000  # of one gaussian_mixture
_RATE_ROUNDING: Final = 1e-9  # relative, of a rate that stands for one over a whole number
_CURVE_ROUNDING: Final = 0.01  # relative, that a printed curve may be off
_MATRIX_WORK_MAX: Final = 10_000_000  # participations times coefficients
_SUM_ROUNDING: Final = 1e-9  # that the sum of a list of probabilities may differ from 1

PROBABILITY: Final = number(0.0, 1.0)
Noise = Annotated[float, number(NOISE_MIN, NOISE_MAX), Cost.FALLS]
Rate = Annotated[float, rate()]
Count = Annotated[int, number(0, COUNT_MAX, whole=True)]
Size = Annotated[int, number(1, COUNT_MAX, whole=True)]
Bins = Annotated[int, number(1, BINS_MAX, whole=True)]
MatrixSteps = Annotated[int, number(1, MATRIX_STEPS_MAX, whole=True)]
WholeSensitivity = Annotated[int, number(1, SENSITIVITY_MAX, whole=True)]
Coordinates = Annotated[
    tuple[float, ...],
    numbers(number(0.0, 1e150, open_low=True), "numbers > 0", COORDINATES_MAX),
]
_INNER_FIELDS: Final[dict[type, tuple[str, ...]]] = {}  # of each kind, once it was asked for

Sampling = Literal["poisson", "fixed_size", "balls_in_bins", "shuffled", "none"]
_SAMPLING: Final[Mapping[Sampling, str]] = {
    "poisson": "Poisson sampling",
    "fixed_size": "samples of fixed size",
    "balls_in_bins": "balls in bins",
    "shuffled": "shuffled batches",
    "none": "no sampling",
}


@dataclass(frozen=True, slots=True)
class Description:
    """A JSON object in a mechanism's description. Its fields are those of the object."""

    def check(self) -> None:
        """Check that the fields do not contradict each other; each one is within its limits.

        Raises:
            MechanismError: they do; its pointers are relative to this object.
        """


@dataclass(frozen=True, slots=True)
class Mechanism(Description):
    """A kind of mechanism. Its docstring describes it in the API's documentation.

    Attributes:
        kind: its name in JSON.
        example: the fields of an example, as JSON.
    """

    kind: ClassVar[str]
    example: ClassVar[Mapping[str, Any]]

    def inner(self) -> Iterator[tuple[str, Mechanism]]:
        """Yield the mechanisms directly inside this one, each with its JSON pointer from here."""
        for name in inner_fields(type(self)):
            value = getattr(self, name)
            if isinstance(value, tuple):
                yield from ((f"/{name}/{i}", each) for i, each in enumerate(value))
            elif value is not None:
                yield f"/{name}", value

    def with_inner(self, change: Callable[[Mechanism], Mechanism]) -> Self:
        """Return this mechanism with each of the mechanisms directly inside it changed."""
        changed: dict[str, Any] = {}
        for at, each in self.inner():
            name, *is_listed = at.split("/")[1:]
            new = change(each)
            changed[name] = (*changed.get(name, ()), new) if is_listed else new
        return replace(self, **changed)

    def release_count(self) -> int:
        """Return the number of releases, with repetitions."""
        inner = [each.release_count() for _, each in self.inner()]
        return sum(inner) if inner else 1

    def simplified(self) -> Mechanism:
        """Return an equal mechanism of a more basic kind, if there is one; else this one."""
        return self

    def describe_step(self) -> str:
        """Describe one step in words: the name, the noise and the sampling.

        The number of steps is left out: a run and its step are described alike.
        """
        values = (
            f"{f.name.replace('_', ' ')} = {_shorten(getattr(self, f.name))}" for f in fields(self)
        )
        return ", ".join([self.kind.replace("_", " "), *values])


def inner_fields(kind: type[Mechanism]) -> tuple[str, ...]:
    """Return the names of a kind's fields that hold one or several mechanisms."""
    if kind not in _INNER_FIELDS:
        names = (field.name for field in fields(kind) if "Mechanism" in str(field.type))
        _INNER_FIELDS[kind] = tuple(names)
    return _INNER_FIELDS[kind]


def _shorten(value: object) -> str:
    """Format a field's value briefly: of a list, only the first and last numbers."""
    if isinstance(value, tuple):
        return " … ".join(dict.fromkeys(f"{shown(each)}" for each in (value[0], value[-1])))
    return f"{shown(value)}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Gaussian(Mechanism):
    """Adds N(0, (σC)²) to a sum of vectors of ℓ2 norm at most C; `noise_multiplier` is σ."""

    kind: ClassVar = "gaussian"
    example: ClassVar = {"noise_multiplier": 1.1}
    noise_multiplier: Noise

    def describe_step(self) -> str:
        return f"Gaussian noise, σ = {shown(self.noise_multiplier)}"


@dataclass(frozen=True, slots=True)
class Laplace(Mechanism):
    """Adds Laplace noise to a sum of ℓ1 norm at most C; `noise_multiplier` is its scale b over C.

    The scale, not the standard deviation (which is √2·b): the unsampled release is (C/b)-DP.
    """

    kind: ClassVar = "laplace"
    example: ClassVar = {"noise_multiplier": 2.0}
    noise_multiplier: Noise

    def describe_step(self) -> str:
        return f"Laplace noise, b/C = {shown(self.noise_multiplier)}"


@dataclass(frozen=True, slots=True)
class DiagonalGaussian(Mechanism):
    """Adds Gaussian noise with its own standard deviation to each coordinate or block.

    As private as a Gaussian with σ* = (Σⱼ sⱼ²/σⱼ²)^(−1/2): Xu et al. 2020, Lemma 1.
    """

    kind: ClassVar = "diagonal_gaussian"
    example: ClassVar = {"sensitivities": [12, 6], "noise_stds": [17, 8.5]}
    sensitivities: Coordinates
    noise_stds: Coordinates

    def noise_multiplier(self) -> float:
        """Return the noise multiplier of the equivalent Gaussian release.

        It is σ* of Lemma 1, the same for any order of the coordinates.
        """
        ratios = sorted(
            (s / deviation) ** 2
            for s, deviation in zip(self.sensitivities, self.noise_stds, strict=True)
        )
        return 1.0 / math.sqrt(math.fsum(ratios))

    def check(self) -> None:
        if len(self.sensitivities) != len(self.noise_stds):
            message = f"must have {len(self.sensitivities)} numbers, as many as sensitivities"
            raise MechanismError(("/noise_stds", message))
        try:
            equivalent = self.noise_multiplier()
        except (OverflowError, ZeroDivisionError):
            equivalent = math.nan
        if not NOISE_MIN <= equivalent <= NOISE_MAX:
            limits = f"≥ {shown(NOISE_MIN)} and ≤ {shown(NOISE_MAX)}"
            message = f"must be equivalent to a noise multiplier {limits}"
            raise MechanismError(("/noise_stds", message))

    def simplified(self) -> Mechanism:
        return Gaussian(self.noise_multiplier())

    def describe_step(self) -> str:
        return f"Gaussian noise, σ* = {shown(self.noise_multiplier())}"


@dataclass(frozen=True, slots=True)
class PoissonSampled(Mechanism):
    """Runs `mechanism` on a sample that contains each record independently at `sample_rate`."""

    kind: ClassVar = "poisson_sampled"
    example: ClassVar = {
        "sample_rate": 0.01,
        "mechanism": {"kind": "gaussian", "noise_multiplier": 1.1},
    }
    sample_rate: Annotated[Rate, Cost.RISES]
    mechanism: Mechanism

    def describe_step(self) -> str:
        return f"{self.mechanism.describe_step()}, q = {shown(self.sample_rate)}, Poisson sampling"


@dataclass(frozen=True, slots=True)
class FixedSizeSampled(Mechanism):
    """Runs `mechanism` on a uniform sample of exactly `batch_size` of `dataset_size` records."""

    kind: ClassVar = "fixed_size_sampled"
    example: ClassVar = {
        "dataset_size": 60000,
        "batch_size": 600,
        "mechanism": {"kind": "gaussian", "noise_multiplier": 1.1},
    }
    dataset_size: Size
    batch_size: Size
    mechanism: Mechanism

    def check(self) -> None:
        if self.batch_size > self.dataset_size:
            raise MechanismError(("/batch_size", "must be at most dataset_size"))

    def describe_step(self) -> str:
        sample = f"samples of {self.batch_size} of {self.dataset_size} records"
        return f"{self.mechanism.describe_step()}, {sample}"


@dataclass(frozen=True, slots=True)
class BallsInBins(Mechanism):
    """Runs `mechanism` on each of `bins` batches: one epoch of balls-in-bins sampling.

    Each record is put into `selections` different batches, drawn uniformly and independently of all
    other records, and anew in every epoch. Batches have any size; the noisy sums are divided by a
    constant. `mechanism` is Gaussian noise without sampling of its own.
    """

    kind: ClassVar = "balls_in_bins"
    example: ClassVar = {
        "bins": 100,
        "selections": 1,
        "mechanism": {"kind": "gaussian", "noise_multiplier": 1.1},
    }
    bins: Bins
    mechanism: Mechanism
    selections: Bins = 1

    def check(self) -> None:
        if self.selections > self.bins:
            raise MechanismError(("/selections", f"must be at most bins, which is {self.bins}"))
        _require_gaussian(self.mechanism, "/mechanism")

    def describe_step(self) -> str:
        sample = f"each record in {self.selections} of {self.bins} batches"
        return f"{self.mechanism.describe_step()}, {sample}"


@dataclass(frozen=True, slots=True)
class Repeated(Mechanism):
    """Runs `mechanism` `count` times with fresh randomness, each adaptively."""

    kind: ClassVar = "repeated"
    example: ClassVar = {"count": 1000, "mechanism": {"kind": "gaussian", "noise_multiplier": 40.0}}
    count: Annotated[Count, Cost.RISES]
    mechanism: Mechanism

    def release_count(self) -> int:
        return self.count * self.mechanism.release_count()

    def describe_step(self) -> str:
        return self.mechanism.describe_step()


@dataclass(frozen=True, slots=True)
class Composed(Mechanism):
    """Runs each of `mechanisms` once, each adaptively."""

    kind: ClassVar = "composed"
    example: ClassVar = {
        "mechanisms": [
            {"kind": "gaussian", "noise_multiplier": 4.0},
            {"kind": "laplace", "noise_multiplier": 2.0},
        ]
    }
    mechanisms: tuple[Mechanism, ...]

    def release_count(self) -> int:
        return sum(each.release_count() for each in self.mechanisms)

    def describe_step(self) -> str:
        return f"{len(self.mechanisms)} mechanisms together"


@dataclass(frozen=True, slots=True)
class DpSgd(Mechanism):
    """Shorthand for a training run: `steps` sampled Gaussian releases.

    Either `sample_rate` and `steps`, or `dataset_size`, `batch_size` and one of `steps` and
    `epochs`; or `steps` alone if `sampling` is "none", because the rate is then 1. Steps are
    rounded up to a whole number: ⌈epochs·dataset_size/batch_size⌉. With `balls_in_bins` sampling
    the batches of an epoch and the epochs must be whole numbers.
    """

    kind: ClassVar = "dp_sgd"
    example: ClassVar = {"noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1000}
    noise_multiplier: Annotated[Noise, "σ: standard deviation of the noise over the clip norm"]
    sample_rate: Annotated[Rate | None, "q: expected batch size over dataset size", Cost.RISES] = (
        None
    )
    steps: Annotated[Count | None, "T: number of steps", Cost.RISES] = None
    dataset_size: Annotated[
        Size | None, "number of records; with a batch size, instead of a sample rate"
    ] = None
    batch_size: Annotated[Size | None, "expected number of records in a batch"] = None
    epochs: Annotated[
        float | None,
        number(0.0, 1e6),
        "passes over the dataset; with dataset and batch size, instead of steps",
    ] = None
    sampling: Annotated[Sampling, "how batches are drawn"] = "poisson"

    def rate(self) -> float:
        """Return the sample rate: the expected fraction of the dataset in one batch."""
        return self.sample_rate if self.sample_rate is not None else float(self._exact_rate())

    def bins(self) -> int:
        """Return the number of batches in an epoch, rounded to the nearest integer."""
        if self.sample_rate is not None:
            return round(1 / self.sample_rate) if self.sample_rate > 0 else 1
        return round(1 / self._exact_rate())

    def unit_steps(self) -> int:
        """Return the number of steps accounted together: those of a balls-in-bins epoch, else 1."""
        return self.bins() if self.sampling == "balls_in_bins" else 1

    def step_count(self) -> int:
        """Return the number of steps."""
        if self.steps is not None:
            return self.steps
        return math.ceil(Fraction(self.epochs or 0) / self._exact_rate())

    def _exact_rate(self) -> Fraction:
        """Return the batch size over the dataset size, as an exact fraction.

        `check` has made sure that both are given, or that there is no sampling.
        """
        if self.batch_size is None:
            return Fraction(1)
        return Fraction(self.batch_size, self.dataset_size or 1)

    def epoch_count(self) -> int:
        """Return the number of epochs of shuffled batches, rounded up.

        A loader that drops the last, smaller batch has ⌊N/B⌋ steps an epoch, one that keeps it has
        one more. The smaller number counts: a record may then be in more batches. A rate given
        without sizes may be rounded, so its inverse within a few rounding errors of a whole number
        counts as that number: 1 000 steps at a rate of 0.01 are ten epochs.
        """
        if self.epochs is not None:
            return math.ceil(self.epochs)
        if self.rate() == 0.0:
            return 0
        if self.dataset_size is not None:
            batches = math.floor(1 / self._exact_rate())
        else:
            batches = math.floor(1 / self.rate() * (1 + 4 * sys.float_info.epsilon))
        return -(-self.step_count() // max(batches, 1))

    def check(self) -> None:
        sizes = self.dataset_size is not None and self.batch_size is not None
        partial = (self.dataset_size is None) != (self.batch_size is None)
        faults = []
        is_rate_known = self.sampling == "none" and not sizes  # then it is 1
        if partial or (sizes == (self.sample_rate is not None) and not is_rate_known):
            given = "sample_rate, or dataset_size and batch_size"
            faults.append(("", f"must give either {given}"))
        if (self.steps is None) == (self.epochs is None) or (self.epochs is not None and not sizes):
            faults.append(("", "must give either steps, or epochs beside dataset_size"))
        if faults:
            raise MechanismError(*faults)
        if self.dataset_size is not None and (self.batch_size or 0) > self.dataset_size:
            raise MechanismError(("/batch_size", "must be at most dataset_size"))
        if self.sampling == "fixed_size" and not sizes:
            raise MechanismError(("", "fixed_size sampling needs dataset_size and batch_size"))
        if self.sampling == "none" and self.rate() != 1.0:
            raise MechanismError(("", "sampling none uses all the data: sample_rate must be 1"))
        if self.step_count() > COUNT_MAX:
            raise MechanismError(("/epochs", f"must make at most {COUNT_MAX} steps"))
        if self.sampling == "balls_in_bins" and self.rate() > 0.0:
            self._check_bins()

    def _check_bins(self) -> None:
        """Raise MechanismError unless a balls-in-bins run has whole epochs of equal batches."""
        bins = self.bins()
        whole = "balls_in_bins sampling needs a whole number of batches an epoch"
        if self.sample_rate is None and (self.batch_size or 1) * bins != self.dataset_size:
            message = (
                f"must divide dataset_size, which is {self.dataset_size}: {whole}. For {bins} "
                f"batches, give sample_rate {1 / bins!r} and steps instead of sizes"
            )
            raise MechanismError(("/batch_size", message))
        if self.sample_rate is not None and abs(self.sample_rate * bins - 1) > _RATE_ROUNDING:
            message = f"must be 1 divided by a whole number, such as {1 / bins!r}: {whole}"
            raise MechanismError(("/sample_rate", message))
        if bins > BINS_MAX:
            name = "sample_rate" if self.sample_rate is not None else "batch_size"
            raise MechanismError((f"/{name}", f"must make at most {BINS_MAX} batches an epoch"))
        if self.epochs is not None and self.epochs % 1:
            raise MechanismError(("/epochs", "must be whole: balls_in_bins has whole epochs"))
        if self.steps is not None and self.steps % bins:
            message = f"must be a multiple of {bins}: balls_in_bins has whole epochs"
            raise MechanismError(("/steps", message))

    def release_count(self) -> int:
        return self.step_count()

    def describe_step(self) -> str:
        rate = "" if self.sampling == "none" else f"q = {shown(self.rate())}, "
        return f"DP-SGD, {rate}σ = {shown(self.noise_multiplier)}, {_SAMPLING[self.sampling]}"


@dataclass(frozen=True, slots=True)
class RandomizedResponse(Mechanism):
    """Answers truly, or with probability `flip_probability` uniformly among all categories.

    Each person sends one answer. Neighbouring datasets differ in one person's true category.
    """

    kind: ClassVar = "randomized_response"
    example: ClassVar = {"categories": 4, "flip_probability": 0.6}
    categories: Annotated[int, number(2, COUNT_MAX, whole=True)]
    flip_probability: Annotated[float, number(RATE_MIN, 1.0), Cost.FALLS]


@dataclass(frozen=True, slots=True)
class DiscreteLaplace(Mechanism):
    """Adds an integer j with probability ∝ e^{−|j|/scale} to one integer.

    `sensitivity` is that of the integer under the stated neighbouring relation.
    """

    kind: ClassVar = "discrete_laplace"
    example: ClassVar = {"scale": 5.0, "sensitivity": 1}
    scale: Annotated[float, number(NOISE_MIN, NOISE_MAX), Cost.FALLS]
    sensitivity: WholeSensitivity = 1

    def check(self) -> None:
        _require_enough_noise("/scale", self.scale, self.sensitivity / LOSS_MAX)


@dataclass(frozen=True, slots=True)
class DiscreteGaussian(Mechanism):
    """Adds an integer j with probability ∝ e^{−j²/(2·noise_std²)} to one integer.

    `sensitivity` is that of the integer under the stated neighbouring relation.
    """

    kind: ClassVar = "discrete_gaussian"
    example: ClassVar = {"noise_std": 4.0, "sensitivity": 1}
    noise_std: Annotated[float, number(NOISE_MIN, 1e4)]
    sensitivity: WholeSensitivity = 1

    def check(self) -> None:
        _require_enough_noise("/noise_std", self.noise_std, self.sensitivity / 14)


@dataclass(frozen=True, slots=True)
class Exponential(Mechanism):
    """A mechanism with the bounded range `epsilon` under the stated neighbouring relation.

    The exponential mechanism with scores of sensitivity Δ and probabilities ∝ e^{ε·score/(2Δ)} has
    it, or e^{ε·score/Δ} if all scores change in the same direction.
    """

    kind: ClassVar = "exponential"
    example: ClassVar = {"epsilon": 0.5}
    epsilon: Annotated[float, number(1e-6, LOSS_MAX), Cost.RISES]


@dataclass(frozen=True, slots=True)
class PermuteAndFlip(Mechanism):
    """The permute-and-flip mechanism with probabilities e^{ε·(score − best)/(2Δ)}: it is ε-DP."""

    kind: ClassVar = "permute_and_flip"
    example: ClassVar = {"epsilon": 0.5}
    epsilon: Annotated[float, number(1e-6, LOSS_MAX), Cost.RISES]


@dataclass(frozen=True, slots=True)
class TruncatedLaplace(Mechanism):
    """Adds noise with a density ∝ e^{−|x|/scale} on [−bound, bound] to one number.

    `sensitivity` is that of the number under the stated neighbouring relation.
    """

    kind: ClassVar = "truncated_laplace"
    example: ClassVar = {"scale": 2.0, "bound": 30.0, "sensitivity": 1.0}
    scale: Annotated[float, number(NOISE_MIN, NOISE_MAX)]
    bound: Annotated[float, number(0.0, 1e9, open_low=True)]
    sensitivity: Annotated[float, number(0.0, NOISE_MAX, open_low=True)] = 1.0

    def check(self) -> None:
        _require_enough_noise("/scale", self.scale, self.sensitivity / LOSS_MAX)
        if self.scale > NOISE_MAX * self.sensitivity:  # as Laplace noise: smaller losses underflow
            message = f"must be ≥ the scale divided by {shown(NOISE_MAX)}"
            raise MechanismError(("/sensitivity", message))
        if self.bound < self.sensitivity:
            raise MechanismError(("/bound", "must be ≥ the sensitivity"))


@dataclass(frozen=True, slots=True)
class MatrixFactorization(Mechanism):
    """Adds correlated noise to the steps of a training run (DP-FTRL): Gaussian noise times C⁻¹.

    C is the lower-triangular Toeplitz matrix with these coefficients in its first column, as in
    BandMF and BLT, and `noise_multiplier` the noise over the clip norm before C⁻¹ is applied. Each
    record takes part in at most `participations` steps, at least `min_separation` steps apart.
    """

    kind: ClassVar = "matrix_factorization"
    example: ClassVar = {
        "noise_multiplier": 4.0,
        "coefficients": [1.0, 0.5, 0.375],
        "steps": 1000,
        "min_separation": 100,
        "participations": 10,
    }
    noise_multiplier: Noise
    coefficients: Annotated[
        tuple[float, ...],
        numbers(number(0.0, 1e6), "decreasing numbers ≥ 0", COORDINATES_MAX),
    ]
    steps: MatrixSteps
    min_separation: Size
    participations: Size

    def sensitivity(self) -> float:
        """Return the ℓ2 sensitivity of the matrix C times the gradients, in units of the clip norm.

        The worst record takes part in the steps 0, b, 2b, …: inner products of columns are not
        negative, and fall with the distance of the columns and with the later one's index.
        """
        total = [0.0] * self.steps
        for start in range(0, self.steps, self.min_separation)[: self.participations]:
            for i, value in enumerate(self.coefficients[: self.steps - start]):
                total[start + i] += value
        return math.hypot(*total)

    def check(self) -> None:
        for i in range(1, len(self.coefficients)):
            if self.coefficients[i] > self.coefficients[i - 1]:
                raise MechanismError((f"/coefficients/{i}", "must not exceed the one before"))
        _check_participations(self)
        if self.participations * len(self.coefficients) > _MATRIX_WORK_MAX:
            message = f"times participations must be at most {_MATRIX_WORK_MAX}"
            raise MechanismError(("/coefficients", message))
        _check_sensitivity(self.noise_multiplier, self.sensitivity())

    def simplified(self) -> Mechanism:
        return Gaussian(self.noise_multiplier / self.sensitivity())

    def describe_step(self) -> str:
        noise = f"σ = {shown(self.noise_multiplier)}"
        return f"correlated Gaussian noise, {noise}, {self.steps} steps"


@dataclass(frozen=True, slots=True)
class BandedMatrixFactorization(Mechanism):
    """Adds correlated noise to a run whose records are Poisson-sampled in turn, group by group.

    Noise and C are those of `matrix_factorization`, as in BandMF. Each record belongs to one of
    `groups` groups, which depends on nothing but the record. Step t samples each record of the
    group t mod `groups` independently at `sample_rate`, and no other record. C has at most as many
    coefficients as there are groups, so the steps of one record share no noise.
    """

    kind: ClassVar = "banded_matrix_factorization"
    example: ClassVar = {
        "noise_multiplier": 4.0,
        "coefficients": [1.0, 0.5, 0.375],
        "steps": 1000,
        "groups": 10,
        "sample_rate": 0.1,
    }
    noise_multiplier: Noise
    coefficients: Annotated[
        tuple[float, ...], numbers(number(0.0, 1e6), "numbers ≥ 0", COORDINATES_MAX)
    ]
    steps: Size
    groups: Size
    sample_rate: Rate

    def rounds(self) -> tuple[tuple[float, int], ...]:
        """Return the column norms at the first group's steps, each with its number of steps.

        Other groups have as many steps or one fewer, at columns that are cut off no less.
        """
        count = -(-self.steps // self.groups)
        last = self.steps - (count - 1) * self.groups
        whole, cut = math.hypot(*self.coefficients), math.hypot(*self.coefficients[:last])
        return ((whole, count - 1), (cut, 1)) if cut < whole else ((whole, count),)

    def check(self) -> None:
        if len(self.coefficients) > self.groups:
            message = f"must be at most {self.groups} numbers, as many as groups"
            raise MechanismError(("/coefficients", message))
        for norm, _ in self.rounds():
            _check_sensitivity(self.noise_multiplier, norm)

    def release_count(self) -> int:
        return sum(count for _, count in self.rounds())

    def describe_step(self) -> str:
        noise = f"σ = {shown(self.noise_multiplier)}, q = {shown(self.sample_rate)}"
        sampling = f"Poisson sampling of {self.groups} groups in turn"
        return f"correlated Gaussian noise, {noise}, {self.steps} steps, {sampling}"


@dataclass(frozen=True, slots=True)
class TreeAggregation(Mechanism):
    """Releases sums over a binary tree of the steps of a run, each with its own noise (DP-FTRL).

    The tree's nodes are blocks of 1, 2, 4, … steps; a node is released when its last step is done.
    Each has Gaussian noise of `noise_multiplier` times the clip norm. A record takes part in at
    most `participations` steps, at least `min_separation` steps apart. For a tree that
    starts anew each epoch use the kind `repeated`.
    """

    kind: ClassVar = "tree_aggregation"
    example: ClassVar = {
        "noise_multiplier": 6.0,
        "steps": 1000,
        "participations": 1,
        "min_separation": 1,
    }
    noise_multiplier: Noise
    steps: MatrixSteps
    participations: Size = 1
    min_separation: Size = 1

    def squared_sensitivity_bounds(self) -> tuple[int, int]:
        """Return a lower and an upper bound on the squared ℓ2 sensitivity, for clip norm 1.

        It is the most that Σ m² over the nodes can be, m the number of the record's steps in a
        node. Below: the record takes part in the steps 0, b, 2b, …. Above: in each level of the
        tree, nodes hold as many of its steps as fit, one node after the other.
        """
        separation, most = self.min_separation, self.participations
        counts = [0] * self.steps
        for step in range(0, self.steps, separation)[:most]:
            counts[step] = 1
        lower, upper, size = 0, 0, 1
        while counts:
            lower += sum(count * count for count in counts)
            fitting = min(most, -(-size // separation))
            present = min(most, -(-len(counts) * size // separation))
            upper += present // fitting * fitting**2 + (present % fitting) ** 2
            whole = len(counts) // 2 * 2
            counts = [a + b for a, b in zip(counts[:whole:2], counts[1:whole:2], strict=True)]
            size *= 2
        return lower, upper

    def check(self) -> None:
        _check_participations(self)
        _, squared = self.squared_sensitivity_bounds()
        _check_sensitivity(self.noise_multiplier, math.sqrt(squared))

    def describe_step(self) -> str:
        return f"sums over a tree of {self.steps} steps, σ = {shown(self.noise_multiplier)}"


@dataclass(frozen=True, slots=True)
class Repeats(Description):
    """The distribution of the number of runs of a private selection, with its mean.

    `shape` is that of a negative binomial distribution.
    """

    distribution: Literal["geometric", "logarithmic", "negative_binomial", "poisson"]
    mean: Annotated[float, number(1.0, 1e6, open_low=True)]
    shape: Annotated[float, number(0.0, 1e3)] | None = None

    def check(self) -> None:
        if self.distribution == "negative_binomial":
            if self.shape is None:
                raise MechanismError(("/shape", "is required"))
        elif self.shape is not None:
            raise MechanismError(("/shape", "is not a field of repeats"))


@dataclass(frozen=True, slots=True)
class PrivateSelection(Mechanism):
    """Runs `mechanism` a random number of times, and releases the output of the best run only."""

    kind: ClassVar = "private_selection"
    example: ClassVar = {
        "repeats": {"distribution": "poisson", "mean": 10},
        "mechanism": {"kind": "gaussian", "noise_multiplier": 4.0},
    }
    repeats: Repeats
    mechanism: Mechanism

    def describe_step(self) -> str:
        distribution = self.repeats.distribution.replace("_", " ")
        runs = f"about {shown(self.repeats.mean)} runs ({distribution})"
        return f"the best of {runs} of: {self.mechanism.describe_step()}"


@dataclass(frozen=True, slots=True)
class ShuffledReports(Mechanism):
    """Shuffles the reports of `reports` people: each runs `mechanism` on their own input only.

    All run the same mechanism, independently, and it is ε-DP for some ε. Only the shuffled reports
    are seen. Neighbouring datasets differ in one person's input.
    """

    kind: ClassVar = "shuffled_reports"
    example: ClassVar = {
        "reports": 10000,
        "mechanism": {"kind": "randomized_response", "categories": 4, "flip_probability": 0.6},
    }
    reports: Size
    mechanism: Mechanism

    def check(self) -> None:
        match self.mechanism:
            case RandomizedResponse() | DiscreteLaplace() | Exponential() | PermuteAndFlip():
                return
            case ApproximateDp(_, delta):
                if delta > 0:
                    message = "must be 0: shuffled_reports needs an ε-DP mechanism"
                    raise MechanismError(("/mechanism/delta", message))
            case _:
                kinds = "randomized_response, discrete_laplace, exponential, permute_and_flip or "
                known = f"{kinds}approximate_dp with delta 0"
                message = f"must be an ε-DP mechanism of one input: {known}"
                raise MechanismError(("/mechanism", message))

    def describe_step(self) -> str:
        return f"{self.reports} shuffled reports of: {self.mechanism.describe_step()}"


@dataclass(frozen=True, slots=True)
class Parallel(Mechanism):
    """Runs each of `mechanisms` on a part of the data of its own.

    Each record belongs to one part, which depends on nothing but the record and never changes. So
    the parts are the same in all repetitions of a `repeated` release. Another `parallel` may divide
    the data in another way.
    """

    kind: ClassVar = "parallel"
    example: ClassVar = {
        "mechanisms": [
            {"kind": "gaussian", "noise_multiplier": 4.0},
            {"kind": "laplace", "noise_multiplier": 2.0},
        ]
    }
    mechanisms: tuple[Mechanism, ...]

    def release_count(self) -> int:
        return sum(each.release_count() for each in self.mechanisms)

    def describe_step(self) -> str:
        return f"{len(self.mechanisms)} mechanisms on disjoint parts of the data"


@dataclass(frozen=True, slots=True)
class ApproximateDp(Mechanism):
    """Any release that is (ε, δ)-DP under the stated neighbouring relation."""

    kind: ClassVar = "approximate_dp"
    example: ClassVar = {"epsilon": 0.1, "delta": 1e-07}
    epsilon: Annotated[float, number(0.0, LOSS_MAX), Cost.RISES]
    delta: Annotated[float, PROBABILITY, Cost.RISES]


@dataclass(frozen=True, slots=True)
class Gdp(Mechanism):
    """Any release that is μ-Gaussian DP under the stated neighbouring relation."""

    kind: ClassVar = "gdp"
    example: ClassVar = {"mu": 0.7}
    mu: Annotated[float, number(1 / NOISE_MAX, 1 / NOISE_MIN), Cost.RISES]


@dataclass(frozen=True, slots=True)
class Zcdp(Mechanism):
    """Any release that is ρ-zero-concentrated DP under the stated neighbouring relation."""

    kind: ClassVar = "zcdp"
    example: ClassVar = {"rho": 0.05}
    rho: Annotated[float, number(1e-12, LOSS_MAX), Cost.RISES]


@dataclass(frozen=True, slots=True)
class Rdp(Mechanism):
    """Any release with these Rényi divergences, at most, at these orders.

    Under the stated neighbouring relation, and in both directions.
    """

    kind: ClassVar = "rdp"
    example: ClassVar = {"orders": [2, 4, 8], "divergences": [0.1, 0.2, 0.5]}
    orders: Annotated[
        tuple[float, ...],
        numbers(number(1.0, 1e6, open_low=True), "increasing orders > 1", POINTS_MAX),
    ]
    divergences: Annotated[
        tuple[float, ...],
        numbers(number(0.0, 1e6), "increasing divergences ≥ 0", POINTS_MAX),
    ]

    def check(self) -> None:
        _require_paired("orders", self.orders, "divergences", self.divergences)
        for i in range(1, len(self.orders)):
            if self.divergences[i] < self.divergences[i - 1] * (1 - _CURVE_ROUNDING):
                message = "must not decrease: a Rényi divergence increases with its order"
                raise MechanismError((f"/divergences/{i}", message))
        curve = zip(self.orders, self.divergences, strict=True)
        moments = [(order - 1) * each for order, each in curve]
        at = _find_nonconvex([1.0, *self.orders], [0.0, *moments])
        if at is not None:
            where = "lies above the chord of its neighbours"
            message = f"{where}: (order − 1)·divergence must be convex"
            raise MechanismError((f"/divergences/{at - 1}", message))


@dataclass(frozen=True, slots=True)
class PrivacyProfile(Mechanism):
    """Any release that is (ε, δ)-DP for each of these pairs under the stated relation."""

    kind: ClassVar = "privacy_profile"
    example: ClassVar = {"epsilons": [0, 1, 2], "deltas": [0.3, 0.01, 1e-05]}
    epsilons: Annotated[
        tuple[float, ...], numbers(number(0.0, 500.0), "increasing numbers ≥ 0", POINTS_MAX)
    ]
    deltas: Annotated[
        tuple[float, ...], numbers(PROBABILITY, "decreasing probabilities", POINTS_MAX)
    ]

    def check(self) -> None:
        _require_paired("epsilons", self.epsilons, "deltas", self.deltas)
        for i in range(1, len(self.deltas)):
            if self.deltas[i] > self.deltas[i - 1]:
                raise MechanismError((f"/deltas/{i}", "must not exceed the one before"))
        at = _find_nonconvex([math.exp(each) for each in self.epsilons], self.deltas)
        if at is not None:
            message = "lies above the chord of its neighbours: δ must be convex in e^ε"
            raise MechanismError((f"/deltas/{at}", message))


@dataclass(frozen=True, slots=True)
class UserLevel(Mechanism):
    """Runs `mechanism` on data in which one person has up to `records` records.

    Each record is sampled by itself, and its gradient is clipped by itself. Neighbouring datasets
    differ in all records of one person.
    """

    kind: ClassVar = "user_level"
    example: ClassVar = {
        "records": 4,
        "mechanism": {
            "kind": "poisson_sampled",
            "sample_rate": 0.01,
            "mechanism": {"kind": "gaussian", "noise_multiplier": 2.0},
        },
    }
    records: Annotated[int, number(1, RECORDS_MAX, whole=True), Cost.RISES]
    mechanism: Mechanism

    def describe_step(self) -> str:
        return f"{self.mechanism.describe_step()}, up to {self.records} records a person"


@dataclass(frozen=True, slots=True)
class GaussianMixture(Mechanism):
    """Gaussian noise on a sum to which a person's contribution is drawn anew in every release.

    Its norm is at most `shifts[i]`, in clip norms, with probability `probabilities[i]`,
    independently of all other persons. `noise_multiplier` is noise over one clip norm.
    """

    kind: ClassVar = "gaussian_mixture"
    example: ClassVar = {
        "noise_multiplier": 4.0,
        "shifts": [0, 1, 2.5],
        "probabilities": [0.9, 0.08, 0.02],
    }
    noise_multiplier: Noise
    shifts: Annotated[
        tuple[float, ...], numbers(number(0.0, 1e9), "increasing numbers ≥ 0", MIXTURE_SHIFTS_MAX)
    ]
    probabilities: Annotated[
        tuple[float, ...],
        numbers(PROBABILITY, "probabilities that add up to 1", MIXTURE_SHIFTS_MAX),
    ]

    def drawn(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the shifts of positive probability, and their probabilities, which add up to 1.

        What rounding has left of 1 goes to the largest shift, and what is too much is taken from
        the smallest: a larger contribution never costs less.
        """
        pairs = list(zip(self.shifts, self.probabilities, strict=True))
        kept = [(shift, Fraction(str(chance))) for shift, chance in pairs if chance > 0]
        missing = 1 - sum(chance for _, chance in kept)
        at = -1 if missing > 0 else 0
        kept[at] = (kept[at][0], kept[at][1] + missing)
        kept = [(shift, chance) for shift, chance in kept if chance > 0]
        return tuple(shift for shift, _ in kept), tuple(float(chance) for _, chance in kept)

    def on_sample(self, rate: Fraction) -> GaussianMixture:
        """Return the mixture on a Poisson sample: a person who is not in it contributes nothing."""
        chances = {
            shift: rate * Fraction(str(chance))
            for shift, chance in zip(self.shifts, self.probabilities, strict=True)
        }
        chances[0.0] = Fraction(1) - sum(chances[shift] for shift in chances if shift > 0)
        shifts = tuple(sorted(chances))
        return GaussianMixture(
            self.noise_multiplier, shifts, tuple(float(chances[shift]) for shift in shifts)
        )

    def check(self) -> None:
        _require_paired("shifts", self.shifts, "probabilities", self.probabilities)
        if abs(math.fsum(self.probabilities) - 1) > _SUM_ROUNDING:
            raise MechanismError(("/probabilities", "must add up to 1"))
        largest = self.drawn()[0][-1]
        if largest == 0:
            raise MechanismError(("/shifts", "must have one > 0 that may be drawn"))
        _check_sensitivity(self.noise_multiplier, largest)


@dataclass(frozen=True, slots=True)
class TruncatedPoissonSampled(Mechanism):
    """Runs `mechanism` on a Poisson sample of which at most `batch_size_max` records are kept.

    A larger sample is replaced by a uniform subset of that size. `dataset_size` is the number of
    records of the larger of two neighbouring datasets.
    """

    kind: ClassVar = "truncated_poisson_sampled"
    example: ClassVar = {
        "dataset_size": 1000,
        "sample_rate": 0.02,
        "batch_size_max": 40,
        "mechanism": {"kind": "gaussian", "noise_multiplier": 1.2},
    }
    dataset_size: Size
    sample_rate: Rate
    batch_size_max: Size
    mechanism: Mechanism

    def simplified(self) -> Mechanism:
        if self.batch_size_max >= self.dataset_size or self.sample_rate == 0.0:
            return PoissonSampled(self.sample_rate, self.mechanism)
        return self

    def describe_step(self) -> str:
        sampling = f"Poisson sampling, at most {self.batch_size_max} records"
        return f"{self.mechanism.describe_step()}, q = {shown(self.sample_rate)}, {sampling}"


def _require_enough_noise(pointer: str, noise: float, least: float) -> None:
    """Raise an error at `pointer` if a noise scale is below the `least` that is allowed."""
    if noise < least:
        raise MechanismError((pointer, f"must be ≥ {shown(least)} at this sensitivity"))


def _require_gaussian(mechanism: Mechanism, pointer: str) -> None:
    """Raise an error at `pointer` unless a mechanism makes Gaussian releases on all records."""
    match mechanism:
        case Gaussian() | DiagonalGaussian():
            return
        case Repeated() | Composed():
            for at, inner in mechanism.inner():
                _require_gaussian(inner, f"{pointer}{at}")
        case _:
            message = "must be Gaussian noise without sampling: balls_in_bins is the sampling"
            raise MechanismError((pointer, message))


def _check_participations(run: MatrixFactorization | TreeAggregation) -> None:
    """Raise MechanismError if a run is too short for so many separated participations."""
    if run.participations > -(-run.steps // run.min_separation):
        message = "must be possible: at most steps/min_separation, rounded up"
        raise MechanismError(("/participations", message))


def _check_sensitivity(noise_multiplier: float, sensitivity: float) -> None:
    """Raise MechanismError if noise divided by sensitivity is outside the limits."""
    if not sensitivity or not NOISE_MIN <= noise_multiplier / sensitivity <= NOISE_MAX:
        message = f"must be ≥ {shown(NOISE_MIN)} and ≤ {shown(NOISE_MAX)} times the sensitivity"
        raise MechanismError(("/noise_multiplier", f"{message} {shown(sensitivity)}"))


def _require_paired(
    name: str, values: tuple[float, ...], other: str, others: tuple[float, ...]
) -> None:
    """Raise MechanismError unless `values` increase and `others` has as many numbers."""
    for i in range(1, len(values)):
        if values[i] <= values[i - 1]:
            raise MechanismError((f"/{name}/{i}", "must be greater than the one before"))
    if len(others) != len(values):
        raise MechanismError((f"/{other}", f"must have {len(values)} numbers, as many as {name}"))


def _find_nonconvex(x: Sequence[float], values: Sequence[float]) -> int | None:
    """Return the first index where values are clearly not convex as a function of x, or None.

    A hundredth is allowed for rounding.
    """
    for i in range(1, len(x) - 1):
        share = (x[i] - x[i - 1]) / (x[i + 1] - x[i - 1])
        chord = values[i - 1] + share * (values[i + 1] - values[i - 1])
        if values[i] > chord * (1 + _CURVE_ROUNDING):
            return i
    return None


KINDS: Final[Mapping[str, type[Mechanism]]] = {  # every kind in this file, in the API's order
    each.kind: each
    for each in list(globals().values())
    if isinstance(each, type) and issubclass(each, Mechanism) and each is not Mechanism
}
