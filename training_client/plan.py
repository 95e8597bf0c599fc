"""The plan of a DP-SGD step: one object runs the step and states its privacy cost.

Training and accounting read the same numbers, so that they cannot differ.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, Final, Protocol, Self

Mechanism = Mapping[str, Any]  # JSON, as the accounting service reads it
POISSON: Final = "poisson"
BALLS_IN_BINS: Final = "balls_in_bins"
CYCLIC_POISSON: Final = "cyclic_poisson"  # of plans with banded noise
SAMPLINGS: Final = (POISSON, BALLS_IN_BINS)
_SCHEDULES: Final = ("noise_schedule", "clip_schedule", "learning_rate_schedule")
_FACTOR_MAX: Final = 1e6  # of an adapted clip norm, relative to the first
_LEVELS: Final = 16  # of a schedule
_ROUNDING: Final = 1e-14  # more than a few roundings in double precision


class NoiseSolver(Protocol):
    """Interface of what knows the noise that a run needs: `AccountingService`."""

    def noise_multiplier(
        self, *, epsilon: float, delta: float, sample_rate: float, steps: int, sampling: str
    ) -> float:
        """Return the smallest noise multiplier with which a run satisfies (ε, δ)."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Factors by which steps multiply the noise, clip norm or learning rate, constant in pieces.

    So a run with scheduled noise is the composition of a few runs with constant noise.

    Attributes:
        pieces: pairs of a number of steps and the factor in these steps.

    Raises:
        ValueError: there is no piece, a piece has no step, or a factor is negative or not finite.
    """

    pieces: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        """Require at least one piece, each with a step or more and a finite factor ≥ 0."""
        if not self.pieces or any(steps < 1 for steps, _ in self.pieces):
            raise ValueError(
                f"expected pieces of at least one step each, (steps, factor), got {self.pieces}"
            )
        if not all(0 <= factor < math.inf for _, factor in self.pieces):
            raise ValueError(f"expected finite factors ≥ 0, got {self.pieces}")

    @classmethod
    def by_steps(cls, pieces: Sequence[tuple[int, float]]) -> Self:
        """Return the schedule with these pairs (number of steps, factor)."""
        return cls(tuple((int(steps), float(factor)) for steps, factor in pieces))

    @classmethod
    def linear(cls, end: float, steps: int, levels: int = _LEVELS) -> Self:
        """Return a schedule whose factor changes linearly from 1 to `end`, in `levels` levels.

        Args:
            end: the last factor.
            steps: the number of steps until it is reached.
            levels: the number of different factors; each holds for about steps/levels steps.
        """
        return cls._sampled(lambda part: 1 + (end - 1) * part, steps, levels)

    @classmethod
    def cosine(cls, end: float, steps: int, levels: int = _LEVELS) -> Self:
        """Return a schedule from 1 to `end` along half a cosine wave; arguments as for `linear`."""
        return cls._sampled(
            lambda part: end + (1 - end) * (1 + math.cos(math.pi * part)) / 2, steps, levels
        )

    @classmethod
    def exponential(cls, end: float, steps: int, levels: int = _LEVELS) -> Self:
        """Return a schedule from 1 to `end` > 0 in equal ratios; arguments as for `linear`."""
        if not end > 0:
            raise ValueError(f"expected end > 0 for exponential decay, got {end}")
        return cls._sampled(lambda part: float(end**part), steps, levels)

    @classmethod
    def _sampled(cls, curve: Callable[[float], float], steps: int, levels: int) -> Self:
        """Return a schedule with a curve's values at `levels` points from 0 to 1."""
        levels = min(levels, steps)
        if levels < 1:
            raise ValueError(f"expected at least one step and one level, got {steps}, {levels}")
        ends = [steps * (level + 1) // levels for level in range(levels)]
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        factors = [curve(level / max(levels - 1, 1)) for level in range(levels)]
        return cls(tuple(zip(counts, factors, strict=True)))

    def at(self, step: int) -> float:
        """Return the factor at a step, counted from 1."""
        ends = list(accumulate(steps for steps, _ in self.pieces))
        return self.pieces[min(bisect_left(ends, step), len(ends) - 1)][1]

    def divide(self, steps: int) -> Iterator[tuple[int, float]]:
        """Divide the first `steps` steps by factor: yield pairs (number of steps, factor)."""
        left = steps
        for count, factor in self.pieces[:-1]:
            taken = min(count, left)
            if taken:
                yield taken, factor
            left -= taken
        if left or not steps:
            yield left, self.pieces[-1 if left else 0][1]


@dataclass(frozen=True, slots=True)
class AdaptiveClipping:
    """A clip norm that follows a quantile of gradient norms (Andrew et al. 2021, arXiv 1905.03871).

    Each step also releases, with noise, how many examples are not clipped: b. Then the clip norm is
    multiplied by e^{−η(b/qN − quantile)}, within a factor of a million of its first value.

    Attributes:
        count_noise: the standard deviation of the noise on the number of examples not clipped; one
            record changes it by 1.
        quantile: γ in (0, 1), the share of examples that should not be clipped.
        learning_rate: η > 0.

    Raises:
        ValueError: a parameter is out of range.
    """

    count_noise: float
    quantile: float = 0.5
    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        """Require positive finite count noise and learning rate, and a quantile in (0, 1)."""
        if not (0 < self.count_noise < math.inf and 0 < self.learning_rate < math.inf):
            raise ValueError(
                f"expected finite count_noise > 0 and learning_rate > 0, got {self.count_noise} "
                f"and {self.learning_rate}"
            )
        if not 0 < self.quantile < 1:
            raise ValueError(f"expected a quantile in (0, 1), got {self.quantile}")

    def next_factor(self, factor: float, unclipped: float) -> float:
        """Return the clip norm's next factor, given the noisy fraction of unclipped examples."""
        share = min(max(unclipped, 0.0), 1.0)
        found = factor * math.exp(-self.learning_rate * (share - self.quantile))
        return min(max(found, 1 / _FACTOR_MAX), _FACTOR_MAX)

    def noise_beside_count(self, charged: float) -> float:
        """Return σ, rounded up, such that a step's sum and count together are charged as given.

        Args:
            charged: the noise multiplier s of one release: 1/s² = 1/σ² + 1/τ².

        Raises:
            ValueError: the count alone has less noise.
        """
        left = 1 - (charged / self.count_noise) ** 2
        if not left > _ROUNDING:
            raise ValueError(
                f"the target needs noise multiplier {charged:g}, and the count of unclipped "
                f"examples alone has {self.count_noise:g}: raise count_noise"
            )
        return charged / math.sqrt(left) * (1 + 8 * _ROUNDING / left)


@dataclass(frozen=True, slots=True)
class BandedNoise:
    """Noise that later steps take back in part, for records that are sampled in turn (BandMF).

    Each record is in one of b groups, drawn at random, and step t samples the group t mod b. With S
    the clipped sum and Z independent noise, step t releases

        Y_t = S_t + Σᵢ cᵢ·(S_{t−i} − Y_{t−i}) + Z_t,   i = 1, …, b − 1,

    so that sums of steps, which the model's parameters are, have less noise than Z's would. A
    record is in no two of the steps that share noise: the b steps of a round together cost it one
    Poisson-sampled Gaussian release of noise multiplier σ/‖c‖ (Choquette-Choo et al. 2023, arXiv
    2306.08153v2, Theorem 4; docs/accountants/kinds.md has a proof).

    Attributes:
        groups: b ≥ 1, the number of groups, and of the steps of a round.
        coefficients: c; the first is 1, and at most b − 1 others do not increase and are ≥ 0: the
            noise of others would grow from step to step.

    Raises:
        ValueError: a parameter is out of range.
    """

    groups: int
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        """Require as many coefficients as groups at most, from 1 down to 0."""
        if not isinstance(self.groups, int):
            raise ValueError(f"expected a whole number of groups, got {self.groups!r}")
        coefficients = tuple(map(float, self.coefficients))
        object.__setattr__(self, "coefficients", coefficients)
        falls = all(one >= other >= 0 for one, other in pairwise((1.0, *coefficients)))
        if not (falls and coefficients[:1] == (1.0,)):
            raise ValueError(
                f"expected coefficients that begin with 1, do not increase and are not negative, "
                f"got {coefficients}"
            )
        if not len(self.coefficients) <= self.groups:
            raise ValueError(
                f"expected at least as many groups as coefficients, got {self.groups} groups and "
                f"{len(self.coefficients)} coefficients: a record must be in none of the steps "
                "that share noise with its last one"
            )

    @classmethod
    def square_root(cls, groups: int, bands: int | None = None) -> Self:
        """Return the coefficients of the square root of the matrix of prefix sums, cut off.

        They are cᵢ = C(2i, i)/4ⁱ, close to the best for sums of steps (Kalinin & Lampert 2024,
        arXiv 2405.13763).

        Args:
            groups: b.
            bands: the number of coefficients, from 1 to b; by default b. Each of them after the
                first takes memory for a number in double precision a coordinate, in every process,
                also of a sharded model.

        Raises:
            ValueError: see the class.
        """
        count = groups if bands is None else bands
        ratios = ((2 * i - 1) / (2 * i) for i in range(1, count))
        return cls(groups, tuple(accumulate(ratios, mul, initial=1.0)))

    @property
    def norm(self) -> float:
        """‖c‖ ≥ 1, rounded up: how far a record moves what a round releases, in clip norms."""
        return math.hypot(*self.coefficients) * (1 + _ROUNDING)


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a sampled Gaussian step: sampling, clip norm, noise and dataset size.

    Attributes:
        dataset_size: N, the number of records in the training set.
        sample_rate: q, the probability of each record to be in a step's batch; with banded noise in
            the batch of a step of its group.
        clip_norm: C, the ℓ2 norm that each example's gradient is clipped to.
        noise_multiplier: σ; the noise added to the sum of clipped gradients has standard
            deviation σC.
        sampling: "poisson"; "balls_in_bins": in each epoch of 1/q steps, each record is in one
            batch, drawn uniformly; or with banded noise "cyclic_poisson": records are in groups,
            which are sampled in turn.
        noise_schedule: factors of σ, step by step; the steps are charged with their own noise.
        clip_schedule: factors of C; noise stays σ times the clip norm of its step.
        learning_rate_schedule: factors of the optimizer's learning rate.
        adaptive_clipping: how C follows the norms of the gradients; what it releases is charged.
        banded_noise: how the noise of steps is correlated; with one noise and clip norm.

    Raises:
        ValueError: a parameter is not positive and finite, the sample rate exceeds 1, the sampling
            is unknown, the epochs of balls-in-bins sampling have no whole number of steps, the
            noise changes within one, or banded noise has another sampling or varies.
    """

    dataset_size: int
    sample_rate: float
    clip_norm: float
    noise_multiplier: float
    sampling: str = POISSON
    noise_schedule: Schedule | None = None
    clip_schedule: Schedule | None = None
    learning_rate_schedule: Schedule | None = None
    adaptive_clipping: AdaptiveClipping | None = None
    banded_noise: BandedNoise | None = None

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Read a plan from a dictionary of plain values, as `dataclasses.asdict` makes it."""
        known = dict(document)
        for name in _SCHEDULES:
            if known.get(name) is not None:
                known[name] = Schedule.by_steps(known[name]["pieces"])
        if known.get("adaptive_clipping") is not None:
            known["adaptive_clipping"] = AdaptiveClipping(**known["adaptive_clipping"])
        if known.get("banded_noise") is not None:
            banded = known["banded_noise"]
            known["banded_noise"] = BandedNoise(banded["groups"], tuple(banded["coefficients"]))
        return cls(**known)

    @classmethod
    def balls_in_bins(
        cls, dataset_size: int, bins: int, clip_norm: float, noise_multiplier: float
    ) -> Self:
        """Return the plan of balls-in-bins sampling with `bins` batches in an epoch."""
        return cls(dataset_size, 1 / bins, clip_norm, noise_multiplier, BALLS_IN_BINS)

    @classmethod
    def banded(
        cls,
        dataset_size: int,
        sample_rate: float,
        clip_norm: float,
        noise_multiplier: float,
        noise: BandedNoise,
    ) -> Self:
        """Return the plan of a run with banded noise; `sample_rate` is that within a group."""
        return cls(
            dataset_size, sample_rate, clip_norm, noise_multiplier, CYCLIC_POISSON,
            banded_noise=noise,
        )  # fmt: skip

    @classmethod
    def for_target(
        cls,
        service: NoiseSolver,
        epsilon: float,
        delta: float,
        epochs: float,
        batch_size: int,
        dataset_size: int,
        clip_norm: float,
        *,
        sampling: str = POISSON,
        adaptive_clipping: AdaptiveClipping | None = None,
        clip_schedule: Schedule | None = None,
        learning_rate_schedule: Schedule | None = None,
        banded_noise: BandedNoise | None = None,
    ) -> Self:
        """Return the plan with the least noise with which a number of epochs satisfies (ε, δ).

        The service computes the noise, for records that are added or removed. A
        `Budget(service, plan, epsilon, delta, steps=plan.steps_in(epochs))` covers the run.

        Args:
            service: the `AccountingService`.
            epsilon: the largest ε of the run.
            delta: its δ.
            epochs: passes over the records, on average; whole ones with balls-in-bins sampling.
            batch_size: the expected number of records in a batch.
            dataset_size: the number of records.
            clip_norm: C > 0, of each example's gradient.
            sampling: how batches are drawn: poisson or balls_in_bins. With the latter an epoch has
                ⌈N/B⌉ batches.
            adaptive_clipping: see `Plan`; its noisy count has a share of ε.
            clip_schedule: see `Plan`.
            learning_rate_schedule: see `Plan`.
            banded_noise: see `Plan`; the sampling is then that of groups in turn, so a batch is
                drawn from N/b records.

        Raises:
            ValueError: a parameter is out of range, or the noise on the count of adaptive clipping
                is too small for the target.
            ServiceError: the service gave no usable answer, as when no noise meets the target.
        """
        groups = 1 if banded_noise is None else banded_noise.groups
        if not (0 < epochs < math.inf and 1 <= batch_size <= dataset_size / groups):
            most = "dataset_size" if groups == 1 else f"dataset_size/{groups}"
            raise ValueError(
                f"expected finite epochs > 0 and 1 ≤ batch_size ≤ {most}, got {epochs}, "
                f"{batch_size} and {dataset_size}"
            )
        if banded_noise is not None and sampling not in (POISSON, CYCLIC_POISSON):
            raise ValueError(f"banded noise has sampling {CYCLIC_POISSON}, not {sampling!r}")
        bins = math.ceil(dataset_size / batch_size)
        rate = 1 / bins if sampling == BALLS_IN_BINS else batch_size / dataset_size
        if banded_noise is not None:
            rate, sampling = min(rate * groups, 1.0), CYCLIC_POISSON
        plan = cls(
            dataset_size, rate, clip_norm, 1.0, sampling, None, clip_schedule,
            learning_rate_schedule, adaptive_clipping, banded_noise,
        )  # fmt: skip
        steps = plan.steps_in(epochs)
        if banded_noise is not None:  # a round is one Poisson-sampled release
            steps, sampling = plan.charges(steps), POISSON
        needed = service.noise_multiplier(
            epsilon=epsilon, delta=delta, sample_rate=rate, steps=steps, sampling=sampling
        )
        if adaptive_clipping is not None:
            needed = adaptive_clipping.noise_beside_count(needed)
        if banded_noise is not None:
            needed *= banded_noise.norm
        return replace(plan, noise_multiplier=needed)

    def __post_init__(self) -> None:
        """Reject parameters that give no privacy guarantee."""
        for name, value in (
            ("dataset_size", self.dataset_size),
            ("sample_rate", self.sample_rate),
            ("clip_norm", self.clip_norm),
            ("noise_multiplier", self.noise_multiplier),
        ):
            if not 0 < value < math.inf:
                raise ValueError(f"expected a finite {name} > 0, got {value}")
        if self.sample_rate > 1:
            raise ValueError(f"expected sample_rate ≤ 1, got {self.sample_rate}")
        known = SAMPLINGS if self.banded_noise is None else (CYCLIC_POISSON,)
        if self.sampling not in known:
            raise ValueError(f"expected sampling {' or '.join(known)}, got {self.sampling!r}")
        if self.banded_noise is not None and self.varies:
            raise ValueError(
                "banded noise has one noise multiplier and one clip norm: leave out noise_schedule,"
                " clip_schedule and adaptive_clipping"
            )
        if self.sampling == BALLS_IN_BINS and self.sample_rate != 1 / self.steps_per_charge:
            raise ValueError(
                f"expected sample_rate = 1/b with a whole number b of batches in an epoch, got "
                f"{self.sample_rate}"
            )
        self._check_schedules()

    def _check_schedules(self) -> None:
        """Reject schedules with zero noise or clip norm, or with noise varying within an epoch."""
        for name, schedule in (
            ("noise_schedule", self.noise_schedule),
            ("clip_schedule", self.clip_schedule),
        ):
            if schedule is not None and not all(factor > 0 for _, factor in schedule.pieces):
                raise ValueError(f"expected factors > 0 in {name}, got {schedule.pieces}")
        pieces = () if self.noise_schedule is None else self.noise_schedule.pieces[:-1]
        if any(steps % self.steps_per_charge for steps, _ in pieces):
            raise ValueError(
                f"expected noise_schedule in whole epochs of {self.steps_per_charge} steps, got "
                f"pieces of {[steps for steps, _ in pieces]}: an epoch of balls-in-bins sampling "
                "has one noise multiplier"
            )

    @property
    def varies(self) -> bool:
        """Return whether noise or clip norm change from step to step."""
        return any((self.noise_schedule, self.clip_schedule, self.adaptive_clipping))

    @property
    def constant_clip_norm(self) -> float | None:
        """The clip norm C of every step; None if it changes."""
        changes = self.clip_schedule is not None or self.adaptive_clipping is not None
        return None if changes else self.clip_norm

    def at(self, step: int) -> Plan:
        """Return the plan of one step, counted from 1, with its own noise and clip norm.

        The clip norm of adaptive clipping is that before any adaptation.
        """
        if self.noise_schedule is None and self.clip_schedule is None:
            return self
        return replace(
            self,
            noise_multiplier=self.noise_multiplier * factor_at(self.noise_schedule, step),
            clip_norm=self.clip_norm * factor_at(self.clip_schedule, step),
            noise_schedule=None,
            clip_schedule=None,
        )

    def phases(self, steps: int) -> list[tuple[int, Plan]]:
        """Return the run's phases of equal noise: each one's number of steps and plan.

        Args:
            steps: the number of steps in all; rounded up to whole charges.
        """
        whole = self.whole_charges(steps)
        if self.noise_schedule is None:
            return [(whole, self)]
        return [
            (
                count,
                replace(
                    self,
                    noise_multiplier=self.noise_multiplier * factor,
                    noise_schedule=None,
                ),
            )
            for count, factor in self.noise_schedule.divide(whole)
        ]

    @property
    def charged_noise_multiplier(self) -> float:
        """The noise multiplier by which a step's cost is computed, rounded down.

        It is σ. With adaptive clipping a step releases two things of one batch: the sum, which a
        record moves by C under noise σC, and a count, which it moves by 1 under noise τ. Together
        they are a Gaussian release of noise multiplier (1/σ² + 1/τ²)^(−1/2) (papers/000, Lemma 1).
        """
        if self.adaptive_clipping is None:
            return self.noise_multiplier
        sigma, count = self.noise_multiplier, self.adaptive_clipping.count_noise
        return (1 - _ROUNDING) / math.hypot(1 / sigma, 1 / count)

    def steps_in(self, epochs: float) -> int:
        """Return the number of steps in `epochs` passes over the records, rounded up."""
        steps = epochs / self.sample_rate * (1 - _ROUNDING)
        return self.whole_charges(math.ceil(steps * self._groups))

    @property
    def steps_per_charge(self) -> int:
        """The number of steps paid for together: 1, or those of an epoch or round.

        It is 1; with balls-in-bins sampling the b steps of an epoch: a record that is in one of its
        batches is in no other, so that the epoch as a whole is the mechanism; and with banded noise
        the b steps of a round, which samples each group once.
        """
        return round(1 / self.sample_rate) if self.sampling == BALLS_IN_BINS else self._groups

    @property
    def _groups(self) -> int:
        """The number of groups that records are sampled in, one a step."""
        return 1 if self.banded_noise is None else self.banded_noise.groups

    def charges(self, steps: int) -> int:
        """Return the number of charges for `steps` steps: one per step, epoch or round."""
        return -(-steps // self.steps_per_charge)

    def whole_charges(self, steps: int) -> int:
        """Return `steps` rounded up to whole charges."""
        return self.charges(steps) * self.steps_per_charge

    @property
    def expected_batch_size(self) -> float:
        """The expected batch size, by which sums are divided: qN, or qN/b of b groups.

        The size of the batch drawn is itself private.
        """
        return self.sample_rate * self.dataset_size / self._groups

    @property
    def noise_deviation(self) -> float:
        """The standard deviation σC of the noise drawn for each coordinate of a gradient sum."""
        return self.noise_multiplier * self.clip_norm

    def mechanism(self, steps: int) -> dict[str, Any]:
        """Return the mechanism of `steps` steps, as JSON for the accounting service.

        With scheduled noise it is the composition of runs with constant noise. An epoch of
        balls-in-bins sampling or a round of banded noise counts as a whole, even if it ends early.
        """
        if self.banded_noise is not None:
            round_of_steps = {
                "kind": "banded_matrix_factorization",
                "noise_multiplier": self.noise_multiplier,
                "coefficients": list(self.banded_noise.coefficients),
                "steps": self._groups,
                "groups": self._groups,
                "sample_rate": self.sample_rate,
            }
            return {"kind": "repeated", "count": self.charges(steps), "mechanism": round_of_steps}
        parts = [
            {
                "kind": "dp_sgd",
                "noise_multiplier": plan.charged_noise_multiplier,
                "sample_rate": plan.sample_rate,
                "steps": count,
                "sampling": plan.sampling,
            }
            for count, plan in self.phases(steps)
        ]
        return parts[0] if len(parts) == 1 else {"kind": "composed", "mechanisms": parts}

    def charged_step(self) -> str:
        """Return what each step is charged as, as JSON; equal for plans that charge the same.

        A checkpoint holds it beside the number of its steps. It is the mechanism of one charge;
        with scheduled noise, of all steps up to the first with the schedule's last factor.
        """
        earlier = () if self.noise_schedule is None else self.noise_schedule.pieces[:-1]
        mechanism = self.mechanism(1 + sum(steps for steps, _ in earlier))
        numbers = json.loads(json.dumps(mechanism), parse_int=float)  # σ = 1 and 1.0 are the same
        return json.dumps(numbers, sort_keys=True)


def factor_at(schedule: Schedule | None, step: int) -> float:
    """Return a schedule's factor at a step, counted from 1; 1 without a schedule."""
    return 1.0 if schedule is None else schedule.at(step)


def compose(before: tuple[Mechanism, ...], last: Mechanism) -> Mechanism:
    """Return the composition of the releases `before` and `last` as one mechanism.

    Args:
        before: the earlier releases; without any, `last` itself is returned.
        last: the final release.
    """
    return {"kind": "composed", "mechanisms": [*before, last]} if before else last
