"""The batches of private steps: Poisson sampling, also in turn, and balls-in-bins sampling.

Poisson sampling has each record in each batch independently, with the same probability. In turn, it
draws each batch from one of b groups, which each record was put into at random for the whole run.
Balls-in-bins sampling (random allocation) puts each record into one of the b batches of an epoch,
uniformly and independently of the others, and anew in each epoch. Every record is used once an
epoch, as if the data were shuffled, but batches have random sizes.

All read words of 64 bits from a keystream under a key of its own for each batch or epoch. Which
words mean what is counted in integers, so no probability is rounded up.
"""

from __future__ import annotations

import itertools
import math
import secrets
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import torch
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from training_client.errors import DataError, NoGuaranteeError
from training_client.plan import BALLS_IN_BINS, CYCLIC_POISSON, POISSON, Plan
from training_client.private_step.keystream import BLOCK, Array, read_keystream
from training_client.private_step.noise import FreshGenerator, draw_key

_WORDS: Final = 2**64  # equally likely words of the keystream


@dataclass(frozen=True, slots=True)
class Epoch:
    """One assignment of the records to the batches of an epoch, or a round of groups.

    Attributes:
        identifier: random; an assignment that is saved and restored keeps it.
        is_restored: whether it was loaded from a sampler's state.
        groups: identifies the assignment of records to groups that rounds share; None without.
    """

    identifier: str = field(default_factory=lambda: secrets.token_hex(8))
    is_restored: bool = field(default=False, compare=False)
    groups: str | None = field(default=None, compare=False)


class EpochProgress(Protocol):
    """Interface of what shows which epoch the last batch is of, and how many were drawn before.

    Attributes:
        epoch: the epoch of the last batch; None before the first, and if batches have no epochs.
        position: the number of batches drawn in the current epoch; 0 at its end, and if batches
            have no epochs.
    """

    epoch: Epoch | None
    position: int


class Sampler(EpochProgress, Protocol):
    """Interface of samplers, which draw the batches of a run.

    Attributes:
        sampling: its name in a plan.
        dataset_size: N, the number of records.
        sample_rate: q, the probability of each record to be in a batch.
    """

    sampling: ClassVar[str]
    dataset_size: int
    sample_rate: float

    def draw(self) -> torch.Tensor:
        """Draw one batch; return the indices of its records in ascending order."""


def describe_choice(sampler: Any, records: int) -> str:
    """Return what a sampler of PyTorch prefers or leaves out, and the way to have that charged.

    Private steps draw each record at the same rate, by a sampler of their own.

    Args:
        sampler: of a user's `DataLoader`.
        records: the number of records of its dataset.
    """
    name = type(sampler).__name__
    if isinstance(sampler, (SequentialSampler, RandomSampler)):
        return f"Its {name} prefers no record."
    chosen = len(sampler.indices) if isinstance(sampler, SubsetRandomSampler) else None
    if chosen is not None:
        return (
            f"Its {name} trains on {chosen} of {records} records, and all would be drawn: pass "
            "torch.utils.data.Subset(dataset, indices), and make the plan for as many records."
        )
    way = "weight each record's loss by a number of its own, at most 1"
    if isinstance(sampler, WeightedRandomSampler):
        return f"Its {name} prefers some records, and all would be drawn alike: {way}."
    return (
        f"Its {name} chooses the records, and all would be drawn alike. If it leaves some out, "
        f"pass a torch.utils.data.Subset; if it prefers some, {way}."
    )


def sampler_for_plan(
    plan: Plan, records: int, sampler: Sampler | None = None, has_claim: bool = False
) -> Sampler:
    """Return the given sampler, if it samples as planned; without one, a new sampler.

    Args:
        plan: the plan.
        records: the number of records.
        sampler: a sampler to use, if it fits the plan; a new one by default.
        has_claim: whether a guarantee is claimed, which needs batches that nobody can draw again.

    Raises:
        DataError: the plan is for another number of records, or the given sampler does not fit.
        NoGuaranteeError: a claim's batches come from a generator that the program made.
    """
    if records != plan.dataset_size:
        raise DataError(
            f"there are {records} records, and the plan is charged for {plan.dataset_size}: its "
            "expected batch size, which sums are divided by, would be another. Make the plan for "
            "the records that are trained on"
        )
    if sampler is None and plan.sampling == BALLS_IN_BINS:
        sampler = BallsInBinsSampler(records, plan.steps_per_charge)
    if sampler is None and plan.sampling == CYCLIC_POISSON:
        sampler = CyclicPoissonSampler(records, plan.sample_rate, plan.steps_per_charge)
    if isinstance(sampler, torch.utils.data.Sampler):
        raise DataError(
            f"{describe_choice(sampler, records)} No step is charged by such a sampler: use the "
            "default, or a PoissonSampler, CyclicPoissonSampler or BallsInBinsSampler"
        )
    found = sampler or PoissonSampler(records, plan.sample_rate)
    drawn = found.sampling, found.dataset_size, found.sample_rate
    if drawn != (plan.sampling, records, plan.sample_rate):
        raise DataError(
            f"the sampler ({found.sampling}) draws from {found.dataset_size} records at sample "
            f"rate {found.sample_rate:g}, but there are {records} records and the plan is charged "
            f"for sample rate {plan.sample_rate:g} ({plan.sampling})"
        )
    if (groups := getattr(found, "groups", None)) not in (None, plan.steps_per_charge):
        raise DataError(
            f"the sampler has {groups} groups, and the plan is charged for {plan.steps_per_charge}"
        )
    generator = getattr(found, "_generator", None)
    if has_claim and not (generator is None or isinstance(generator, FreshGenerator)):
        raise NoGuaranteeError(
            "the batches are drawn by a generator that the program made: anyone who knows its seed "
            "knows which records are in them, and sampling hides nothing. Leave out generator. For "
            "runs that can be repeated, use a NoBudget"
        )
    return found


class PoissonSampler:
    """Draws each record independently into each batch; batch sizes vary, and may be zero.

    Attributes:
        dataset_size: N, the number of records.
        sample_rate: q in (0, 1].

    Args:
        dataset_size: see above.
        sample_rate: see above.
        generator: a key of each batch is drawn from it; by default from the operating system.
    """

    sampling: ClassVar[str] = POISSON
    epoch: Epoch | None = None
    position = 0

    def __init__(
        self, dataset_size: int, sample_rate: float, generator: torch.Generator | None = None
    ) -> None:
        self.dataset_size, self.sample_rate = dataset_size, sample_rate
        self._generator = generator

    def draw(self) -> torch.Tensor:
        """Draw one batch; return the indices of its records in ascending order."""
        return draw_rows(self.dataset_size, self.sample_rate, draw_key(self._generator))


class CyclicPoissonSampler:
    """Draws each batch from one group of the records, group by group; batch sizes vary.

    Each record is put into one group, uniformly and independently of the others, when the sampler
    is made. So no record is in two of `groups` batches that follow one another. A copy of the
    sampler, pickled or not, makes groups of its own: no state of banded noise is stored.

    Attributes:
        dataset_size: N, the number of records.
        sample_rate: q in (0, 1], the probability of each record of the group whose turn it is.
        groups: b, the number of groups.
        epoch: the round of b batches that the last one is in; None before the first.
        position: the number of batches drawn in the current round; 0 at its end.

    Args:
        dataset_size: see above.
        sample_rate: see above.
        groups: see above.
        generator: keys of the groups and of each batch are drawn from it; by default from the
            operating system.
    """

    sampling: ClassVar[str] = CYCLIC_POISSON

    def __init__(
        self,
        dataset_size: int,
        sample_rate: float,
        groups: int,
        generator: torch.Generator | None = None,
    ) -> None:
        self.dataset_size, self.sample_rate, self.groups = dataset_size, sample_rate, groups
        self._generator = generator
        self._members = draw_epoch(dataset_size, groups, draw_key(generator))
        self._name = secrets.token_hex(8)
        self.epoch: Epoch | None = None
        self.position = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle such that a copy draws groups of its own."""
        arguments = self.dataset_size, self.sample_rate, self.groups, self._generator
        return type(self), arguments

    def draw(self) -> torch.Tensor:
        """Draw one batch; return the indices of its records in ascending order."""
        if self.position == 0:
            self.epoch = Epoch(groups=self._name)
        members = self._members[self.position]
        self.position = (self.position + 1) % self.groups
        return members[draw_rows(len(members), self.sample_rate, draw_key(self._generator))]


class BallsInBinsSampler:
    """Puts each record into one random batch of each epoch; batch sizes vary, and may be zero.

    An epoch is charged as a whole, as one noisy sum of each of its batches. A copy of the sampler,
    pickled or not, begins an epoch of its own, so that no batch is summed twice.

    Attributes:
        dataset_size: N, the number of records.
        bins: b, the number of batches in an epoch.
        sample_rate: 1/b, the probability of each record to be in a batch.
        epoch: the epoch of the last batch; None before the first.
        position: the number of batches drawn in the current epoch; 0 at its end.

    Args:
        dataset_size: see above.
        bins: see above.
        generator: a key of each epoch is drawn from it; by default from the operating system.
    """

    sampling: ClassVar[str] = BALLS_IN_BINS

    def __init__(
        self, dataset_size: int, bins: int, generator: torch.Generator | None = None
    ) -> None:
        self.dataset_size, self.bins, self.sample_rate = dataset_size, bins, 1 / bins
        self._generator = generator
        self._batches: tuple[torch.Tensor, ...] = ()
        self.epoch: Epoch | None = None
        self.position = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle such that a copy draws its own assignment of records to batches."""
        return type(self), (self.dataset_size, self.bins, self._generator)

    def draw(self) -> torch.Tensor:
        """Return the indices of the next batch's records in ascending order."""
        if self.position == 0:
            self._batches = draw_epoch(self.dataset_size, self.bins, draw_key(self._generator))
            self.epoch = Epoch()
        batch = self._batches[self.position]
        self.position = (self.position + 1) % self.bins
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the remaining batches of the current epoch; keep them as secret as the records.

        Going on from them is safe only if none of them was drawn after the state was saved: a batch
        that has two noisy sums costs more than is charged. `accountant-train` therefore saves no
        state, and begins a new epoch when it resumes a run.
        """
        left = self._batches[self.position :] if self.position else ()
        return {
            "dataset_size": self.dataset_size,
            "bins": self.bins,
            "left": [each.clone() for each in left],
            "epoch": self.epoch.identifier if self.epoch else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the remaining batches that `state_dict` returned.

        Raises:
            DataError: the state is of other records, or of another number of batches.
        """
        if (state["dataset_size"], state["bins"]) != (self.dataset_size, self.bins):
            raise DataError(
                f"the state is of {state['dataset_size']} records in {state['bins']} batches, the "
                f"sampler draws {self.dataset_size} records in {self.bins}"
            )
        left = tuple(state["left"])
        self.position = (self.bins - len(left)) % self.bins
        self._batches = (torch.empty(0, dtype=torch.int64),) * self.position + left
        # earlier versions did not save the identifier
        self.epoch = Epoch(state.get("epoch") or Epoch().identifier, is_restored=True)


def draw_rows(records: int, sample_rate: float, key: bytes) -> torch.Tensor:
    """Draw each of `records` rows independently; return the indices of those drawn, ascending.

    Args:
        records: the number of rows.
        sample_rate: q in (0, 1]. Of the 2⁶⁴ equally likely words ⌊q·2⁶⁴⌋ draw a row, so that its
            probability is q rounded down to a multiple of 2⁻⁶⁴: at most what is charged.
        key: 32 random bytes, which nothing else is drawn with.
    """
    accepted = math.floor(Fraction(sample_rate) * _WORDS)
    found = [np.empty(0, np.int64)]
    for number, start in enumerate(range(0, records if accepted else 0, BLOCK)):
        words = read_keystream(key, number, min(BLOCK, records - start))
        found.append(start + np.flatnonzero(words <= np.uint64(accepted - 1)))
    return torch.from_numpy(np.concatenate(found))


def draw_epoch(dataset_size: int, bins: int, key: bytes) -> tuple[torch.Tensor, ...]:
    """Put each record into one random batch of `bins`; return each batch's indices, ascending."""
    drawn = torch.from_numpy(_draw_uniform(dataset_size, bins, key))
    sizes = torch.bincount(drawn, minlength=bins)
    return torch.split(torch.argsort(drawn, stable=True), sizes.tolist())


def _draw_uniform(count: int, values: int, key: bytes) -> Array:
    """Draw integers from 0 to values − 1, each with exactly the same probability.

    2⁶⁴ is rarely a multiple of `values`, so the words above its largest multiple are drawn again.
    """
    accepted, streams = _WORDS // values * values, itertools.count()

    def draw(size: int) -> Array:
        """Return words that were not read before."""
        starts = range(0, size, BLOCK)
        blocks = [read_keystream(key, next(streams), min(BLOCK, size - start)) for start in starts]
        return np.concatenate([np.empty(0, np.uint64), *blocks])

    words = draw(count)
    while len(refused := np.flatnonzero(words > np.uint64(accepted - 1))):
        words[refused] = draw(len(refused))
    return (words % np.uint64(values)).astype(np.int64)
