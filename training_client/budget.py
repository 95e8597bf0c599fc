"""Budgets of training steps: no step is made before the accounting service has said that it fits.

Allowance         the interface that optimizers ask, and what its implementations share
├── Budget            a target (ε, δ) for one run, checked by the service; nothing is recorded
├── LedgerBudget      steps charged to a dataset's budget in the ledger
│                     (with scheduled noise: `phased_budget`)
└── NoBudget          a fixed number of steps without a privacy claim
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn

from training_client.client import (
    ADD_OR_REMOVE_ONE,
    PLD,
    AccountingService,
    Json,
    Reservation,
)
from training_client.client.answers import Guarantee
from training_client.errors import (
    BudgetExhaustedError,
    DataError,
    NoGuaranteeError,
    ServiceError,
    ServiceRefusedError,
)
from training_client.plan import Mechanism, Plan, compose

GRANTS: Final = "granted.json"  # the usual name of a record of grants
_OPEN: Final = "open"  # the state of a reservation of which steps may be granted
_CURVE_POINTS_MAX: Final = 200
RELEASE_PATIENCE_SECONDS: Final = 3.0
_ASKING_SHARE_MAX: Final = 0.0025  # of the time that the steps take
_STEPS_MAX: Final = 10**9  # the most steps that the service accounts for
_NO_EPSILON: Final = "no-finite-epsilon"
CLAIM: Final = "claim"  # the keys of `Allowance.checkpoint_keys`
CHARGED: Final = "charged_mechanism"
BEFORE: Final = "released_before"
RESERVATIONS: Final = "reservations"
_EARLIER_KEYS: Final = frozenset({CHARGED, BEFORE, RESERVATIONS})
NO_CLAIM: Final = "none"
_CLAIMED: Final = frozenset({"plan", "epsilon", "delta", "method", "before", "steps", "dataset"})
_BEGIN_ANEW: Final = (
    "load the model's parameters only, without the checkpoint's number of steps, and give the "
    "earlier run's mechanism to the budget: before=(…,), and to a LedgerBudget also its "
    "reservation: releases=(…,)"
)


def require_granted(steps: int, granted: int) -> None:
    """Raise unless the ledger granted as many steps as a checkpoint counts.

    Raises:
        NoGuaranteeError: it granted fewer.
    """
    if steps > granted:
        raise NoGuaranteeError(
            f"the checkpoint was written after {steps} steps, but the ledger has granted only "
            f"{granted} of them. If it is an older copy, restored from a backup, enter the missing "
            "steps first; see docs/how-to/backup.md. If this is another run's reservation, load "
            "only the model's parameters, without the checkpoint's steps"
        )


def require_known_claim(saved: Json, own: Json) -> None:
    """Raise unless a checkpoint says all that a claim about its steps must know.

    Earlier versions wrote no `CLAIM`. Of their checkpoints only those of a claimed run have all
    keys that they knew.

    Args:
        saved: a checkpoint.
        own: the keys that it must have, with those of the budget that resumes it.

    Raises:
        NoGuaranteeError: the budget claims a guarantee, and a key is missing, or the checkpoint is
            of a run without a claim.
    """
    _require_claimed(saved, own)
    needed = _EARLIER_KEYS if saved.keys() <= _EARLIER_KEYS else own.keys()
    if own[CLAIM] != NO_CLAIM and (missing := needed - saved.keys()):
        raise NoGuaranteeError(
            f"the checkpoint has no entry {', '.join(sorted(missing))}: it is of an earlier "
            "version, or entries were removed, and its run may have claimed no guarantee. Continue "
            f"it with a NoBudget; or, if a budget paid for its steps, {_BEGIN_ANEW}"
        )


def require_same_charge(saved: Json, steps: int, own: Json) -> None:
    """Raise unless the budget that resumes a checkpoint covers what the checkpoint rests on.

    A key that one of the two lacks is not compared: checkpoints of earlier versions lack some, and
    a `NoBudget`, which claims nothing, needs no releases before its steps.

    Args:
        saved: a checkpoint, with the `checkpoint_keys` of the budget of the run that wrote it.
        steps: the number of its steps.
        own: the `checkpoint_keys` of the budget that resumes.

    Raises:
        NoGuaranteeError: the plans differ in noise, sample rate or sampling at some step, or the
            releases before the first step differ, or other reservations paid for the steps; or the
            checkpoint is of a run without a claim, however many steps it counts.
    """
    _require_claimed(saved, own)
    same = {key for key in saved.keys() & own.keys() if saved[key] == own[key]}
    differ = saved.keys() & own.keys() - same if steps else set()
    if CHARGED in differ:
        raise NoGuaranteeError(
            f"each of the checkpoint's {steps} steps was charged as {saved[CHARGED]}, but this "
            f"plan charges {own[CHARGED]}, which would not cover them: resume with the plan of "
            f"the run that wrote the checkpoint. To train on with another plan, {_BEGIN_ANEW}"
        )
    if BEFORE in differ:
        raise NoGuaranteeError(
            f"before the first of the checkpoint's {steps} steps its run released "
            f"{saved[BEFORE]}, but this budget has before={own[BEFORE]}, so its claim would not "
            "cover the same releases: resume with the same mechanisms in `before`"
        )
    if RESERVATIONS in differ and own[RESERVATIONS]:
        if set(saved[RESERVATIONS]) & set(own[RESERVATIONS]):
            return
        raise NoGuaranteeError(
            f"the checkpoint's {steps} steps were charged to "
            f"{_name_reservations(saved[RESERVATIONS])}, but this budget holds "
            f"{_name_reservations(own[RESERVATIONS])}, and its claim would leave them out: resume "
            f"with the checkpoint's reservation. To train on with another, {_BEGIN_ANEW}"
        )


def _require_claimed(saved: Json, own: Json) -> None:
    """Raise if a budget with a claim resumes the checkpoint of a run without one."""
    if saved.get(CLAIM) == NO_CLAIM != own.get(CLAIM, NO_CLAIM):
        raise NoGuaranteeError(
            "the checkpoint is of a run without a claim (NoBudget), and no budget can pay for it "
            f"later: continue it with a NoBudget. To claim {own[CLAIM]}, begin with a new "
            "optimizer, and with parameters that no private record has changed"
        )


def _name_reservations(identifiers: Sequence[str]) -> str:
    """Return reservations by their identifiers, for a message."""
    return f"reservation {', '.join(identifiers)}" if identifiers else "no reservation"


def read_grants(file: Path) -> dict[str, int]:
    """Return a client's record of the charges granted to each reservation; empty without a file.

    A ledger that was restored from a backup has lost its latest grants, and would grant the same
    steps again. A checkpoint counts only the steps made when it was written. The record counts all
    that may have been made: it is written after each grant, before the first of its steps.

    Raises:
        DataError: the file is not such a record.
    """
    try:
        found = json.loads(file.read_text())
        if not all(isinstance(charges, int) for charges in found.values()):
            raise ValueError(f"expected numbers of steps, got {found!r}")
    except FileNotFoundError:
        return {}
    except (AttributeError, ValueError) as error:
        raise DataError(
            f"{file} is no record of granted steps ({error}). If the ledger was restored from a "
            "backup, enter the missing steps first; see docs/how-to/backup.md. Then remove the file"
        ) from None
    return dict(found)


def record_grant(file: Path, held: Reservation) -> None:
    """Write how many charges of a reservation are granted, so that a crash cannot lose it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    with part.open("w") as written:
        json.dump(read_grants(file) | {held.identifier: held.steps_granted}, written)
        written.flush()
        os.fsync(written.fileno())
    part.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # a power failure must not bring the replaced file back
    finally:
        os.close(folder)


def require_recorded_grants(file: Path, held: Reservation) -> None:
    """Raise unless the ledger has granted as much of a reservation as the record says.

    Raises:
        DataError: the record cannot be read.
        NoGuaranteeError: the ledger has granted less.
    """
    recorded = read_grants(file).get(held.identifier, 0)
    if recorded > held.steps_granted:
        raise NoGuaranteeError(
            f"{file} records that {recorded} steps of reservation {held.identifier} were granted, "
            f"but the ledger has granted only {held.steps_granted} of them. It is an older copy, "
            "restored from a backup: enter the missing steps first; see docs/how-to/backup.md"
        )


class _NotCopied:
    """Base class of budgets and counters of steps, which cannot be copied."""

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: a copy could take the same steps again.

        Raises:
            NoGuaranteeError: always.
        """
        raise NoGuaranteeError(
            "a copy of a budget would grant the same steps a second time without charging them: "
            "give each run its own budget"
        )


class FixedParts:
    """Base class of objects whose parts decide a guarantee: what is fixed cannot be replaced."""

    def keep_fixed(self, *names: str) -> None:
        """Refuse from now on to set the attributes of these names."""
        vars(self)["_fixed"] = vars(self).get("_fixed", frozenset()) | set(names)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            NoGuaranteeError: it is fixed.
        """
        if name in vars(self).get("_fixed", ()):
            raise NoGuaranteeError(
                f"{name} of {type(self).__name__} cannot be replaced: the budget claims a "
                "guarantee for the steps as the optimizer was made to take them. For other steps, "
                "make a new optimizer and a new budget, and give it the earlier run's mechanism: "
                "before=(…,)"
            )
        super().__setattr__(name, value)


class StepCounter(_NotCopied):
    """A thread-safe counter that takes each step number at most once, in ascending order.

    If two threads take the same step, one of them gets it. A copy, or a process forked from this
    one, would grant steps again that are charged once: copies are impossible, and a forked
    process is refused.

    Attributes:
        last: the last step taken, counted from 1; 0 if there is none.
    """

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self._lock = threading.Lock()
        self._process = os.getpid()

    def check(self, step: int, require_allowed: Callable[[int], None]) -> None:
        """Raise unless a step may be taken now, without taking it.

        Args:
            step: the step's number.
            require_allowed: raises if the budget does not cover the step.

        Raises:
            NoGuaranteeError: the step was taken before, or this process is a fork.
        """
        with self._lock_for_new_step(step):
            require_allowed(step)

    def take(self, step: int, require_allowed: Callable[[int], None]) -> None:
        """Take a step, so that it cannot be taken again; raise if it is not allowed."""
        with self._lock_for_new_step(step):
            require_allowed(step)
            self.last = step

    @contextmanager
    def _lock_for_new_step(self, step: int) -> Iterator[None]:
        """Context manager that holds the lock; raise if the step was taken before."""
        if os.getpid() != self._process:
            raise NoGuaranteeError(
                "the budget belongs to this process's parent, which may make the same steps: "
                "create the budget in the process that trains"
            )
        with self._lock:
            if step <= self.last:
                raise NoGuaranteeError(
                    f"step {step} was taken before, like all steps up to {self.last}: another run "
                    "uses the same budget. Give each run its own budget, or start it after the "
                    "other run has ended"
                )
            yield


class Allowance(ABC):
    """Base class of a run's privacy budget, which permits each training step once.

    A run that starts later continues after `made`; two runs at the same time cannot both take the
    same step.

    Attributes:
        plan: the plan of every step.
        delta: δ of the run's guarantee.
        spent: ε of the steps allowed so far.
    """

    plan: Plan
    delta: float
    spent: float
    _counter: StepCounter

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, but refuse to replace what the guarantee is claimed for.

        Raises:
            NoGuaranteeError: the budget has a value of it already.
        """
        own = vars(self).get(name)
        is_other = isinstance(own, Reservation) and own.identifier != value.identifier
        if is_other or (name in _CLAIMED and name in vars(self)):
            raise NoGuaranteeError(
                f"a budget's {name} cannot be replaced: its guarantee is that of one plan, and "
                "would not cover the steps made under the other. For noise that changes from step "
                "to step, give the plan a noise_schedule. For another plan, make a new budget, and "
                "give it the earlier run's mechanism: before=(…,)"
            )
        super().__setattr__(name, value)

    @property
    def has_claim(self) -> bool:
        """True if a guarantee is claimed for the steps."""
        return True

    @property
    def claim(self) -> str:
        """The claim in words, for a checkpoint; `NO_CLAIM` if nothing is claimed."""
        return f"δ = {self.delta:g}" if self.has_claim else NO_CLAIM

    @property
    def privacy_unit(self) -> str | None:
        """The word for one record of the ledger's dataset, such as person; None without a ledger.

        Raises:
            ServiceError: the service gave no usable answer.
        """
        return None

    @property
    def assumed(self) -> tuple[str, ...]:
        """The sentences that name what the claim of the run rests on and is not proved."""
        return tuple(vars(self).get("_assumed", ()))

    def assume(self, *sentences: str) -> None:
        """Add to what the claim rests on; the same sentence counts once."""
        vars(self)["_assumed"] = tuple(dict.fromkeys((*self.assumed, *sentences)))  # also if frozen

    @property
    def made(self) -> int:
        """The number of steps that the budget has paid for already.

        With balls-in-bins sampling it begins a new epoch: the rest of the last one is left out.
        """
        return self.plan.whole_charges(self._counter.last)

    @property
    def taken(self) -> int:
        """The number of the last step that was allowed; a guarantee must cover all up to it."""
        return self._counter.last

    def begin(self) -> list[Json]:
        """Spend budget on the releases that precede training, such as a private PCA; call it first.

        Returns:
            A certificate of each charged release; without a ledger there are none.

        Raises:
            BudgetExhaustedError: the releases do not fit the budget.
            ServiceError: the service gave no usable answer; nothing may be released.
        """
        return []

    def give_up(self) -> None:  # noqa: B027 - without a ledger there is nothing to free
        """Release the budget that is reserved for steps not yet granted."""

    def checkpoint_keys(self) -> dict[str, Any]:
        """Return what a checkpoint must name of its steps, for `require_same_charge`.

        It is the claim, what each step was charged as, the releases before the first step, and the
        identifiers of the reservations that paid for the steps, if a ledger has them.
        """
        return {CLAIM: self.claim, CHARGED: self.plan.charged_step(), RESERVATIONS: []}

    def count_resumed(self, steps: int) -> int:
        """Return how many of a checkpoint's steps count as done when its run is resumed.

        Raises:
            NoGuaranteeError: a ledger has granted fewer than these.
        """
        return steps

    def allow(self, step: int) -> None:
        """Raise unless the budget covers a step, without taking it.

        Args:
            step: the step's number, counted from 1.

        Raises:
            BudgetExhaustedError: the step does not fit the budget.
            NoGuaranteeError: the step was taken before.
            ServiceError: the service gave no usable answer; the step must not be made.
        """
        self._counter.check(step, self._require_allowed)

    def take(self, step: int) -> None:
        """Take a step, so that no other run can take it; raise if the budget does not cover it."""
        self._counter.take(step, self._require_allowed)

    @abstractmethod
    def guarantee(self, steps: int) -> Guarantee:
        """Return the guarantee of the whole plan, for a run that stopped after `steps` steps.

        The decision to stop may depend on results, so the guarantee of the steps made alone would
        claim too small an ε.
        """

    def commit(self, model_sha256: str | None = None) -> Json | None:  # noqa: ARG002
        """End the run, and return the ledger's certificate if there is a ledger.

        Args:
            model_sha256: the hash of the model's file, which the certificate then names.
        """
        return None

    @abstractmethod
    def _require_allowed(self, step: int) -> None:
        """Raise if the budget does not cover the step."""


@dataclass
class Budget(_NotCopied, Allowance):
    """An (ε, δ) budget for one run without a ledger, checked by the service ahead of the steps.

    The ledger is not involved and nothing is charged. The service is asked for a block of steps at
    a time; each block is as long as all before it, so long runs spend next to no time asking.

    The run's plan ends with `steps`, or with the last step that fits ε; no later step is allowed.
    Wherever the run stops, its guarantee is that of the whole plan. For a smaller ε, declare an
    earlier end with `steps` before the first step.

    Attributes:
        service: the accounting service.
        plan: the plan of every step.
        epsilon: the largest ε that may be spent.
        delta: δ of every guarantee.
        block: the number of steps in the first block.
        method: the accounting method.
        before: mechanisms released before the first step; every guarantee covers them too.
        steps: the plan's last step, declared before the first; by default the last that fits.
        allowed: the number of steps known to fit so far.
        spent: ε of the allowed steps.
    """

    service: AccountingService
    plan: Plan
    epsilon: float
    delta: float
    block: int = 50
    method: str = PLD
    before: tuple[Mechanism, ...] = ()
    steps: int | None = None
    allowed: int = field(default=0, init=False)
    spent: float = field(default=0.0, init=False)
    _plan_end: int | None = field(default=None, init=False, repr=False, compare=False)  # once found
    _counter: StepCounter = field(
        default_factory=StepCounter, init=False, repr=False, compare=False
    )

    def begin(self) -> list[Json]:
        """Check that one step and the releases that precede training fit the budget together.

        Returns:
            An empty list: there is no ledger to certify them.

        Raises:
            BudgetExhaustedError: they do not fit.
            ServiceError: the service gave no usable answer; nothing may be released.
        """
        self.allow(1)
        return []

    @property
    def claim(self) -> str:
        """The target (ε, δ) and the accounting method."""
        return f"ε = {self.epsilon:g} at δ = {self.delta:g} by {self.method}"

    def checkpoint_keys(self) -> dict[str, Any]:
        """Return what a checkpoint must name of its steps."""
        return super().checkpoint_keys() | {BEFORE: _plain_json(self.before)}

    def guarantee(self, steps: int) -> Guarantee:
        """Return the guarantee of the whole plan, including the releases that precede training."""
        planned = max(self._close_plan(), steps)
        return add_step_counts(self.planned_guarantee(planned), steps, planned)

    def planned_guarantee(self, steps: int) -> Guarantee:
        """Return the guarantee of `steps` steps and the releases that precede training."""
        whole = compose(self.before, self.plan.mechanism(steps))
        return self.service.epsilon(whole, self.delta, self.method)

    def _require_allowed(self, step: int) -> None:
        """Raise if the budget does not cover the step; ask the service if not yet known."""
        if step <= self.allowed:
            return
        ahead = max(self.allowed, step - 1) + max(self.allowed, self.block)
        ahead = self.plan.whole_charges(ahead)  # an epoch is allowed as a whole
        ahead = min(ahead, self._limit if self._plan_end is None else self._plan_end)
        if ahead > self.allowed:
            self._allow_up_to(ahead)
        if step > self.allowed:
            raise BudgetExhaustedError(
                f"all {self.allowed} steps of the plan are made"
                if self.allowed == self.steps
                else f"step {step} would exceed ε = {self.epsilon:g} at δ = {self.delta:g}: "
                f"{self.allowed} steps fit"
            )

    def _allow_up_to(self, ahead: int) -> None:
        """Allow all steps up to number `ahead`, or up to the last one that fits the budget."""
        found = self._guarantee_if_fits(ahead)
        if found is None:
            ahead, found = self._find_last_fitting(self.allowed, ahead)
        if found is not None:
            self.allowed, self.spent = ahead, found.epsilon

    def _close_plan(self) -> int:
        """Fix the last step of the plan, so that no later step is allowed; return its number."""
        if self._plan_end is None:
            self._plan_end = self._find_plan_end()
        return self._plan_end

    @property
    def _limit(self) -> int:
        """The largest step number that may ever be allowed."""
        return _STEPS_MAX if self.steps is None else self.steps

    def _find_plan_end(self) -> int:
        """Find the last step that fits the budget, by doubling and bisection."""
        fits, limit = self.allowed, self._limit
        ahead = min(max(2 * fits, self.block), limit) if self.steps is None else limit
        while fits < limit and self._guarantee_if_fits(ahead) is not None:
            fits, ahead = ahead, min(2 * ahead, limit)
        return fits if fits == limit else self._find_last_fitting(fits, ahead)[0]

    def _guarantee_if_fits(self, steps: int) -> Guarantee | None:
        """Return the guarantee of `steps` steps, or None if it exceeds the budget's ε."""
        try:
            found = self.planned_guarantee(steps)
        except ServiceRefusedError as error:
            if error.code != _NO_EPSILON:
                raise
            return None
        return found if found.epsilon <= self.epsilon else None

    def _find_last_fitting(self, fits: int, refused: int) -> tuple[int, Guarantee | None]:
        """Return the last step that fits ε, found by bisection, and its guarantee.

        Args:
            fits: a number of steps that fit.
            refused: a larger number of steps that do not fit.

        Returns:
            The step, and its guarantee if the step is not `fits` itself.
        """
        last = None
        while refused - fits > self.plan.steps_per_charge:
            middle = self.plan.whole_charges((fits + refused) // 2)
            found = self._guarantee_if_fits(middle)
            if found is None:
                refused = middle
            else:
                fits, last = middle, found
        return fits, last


@dataclass
class LedgerBudget(_NotCopied, Allowance):
    """A run's reservation in the ledger; budget is spent on a block of steps ahead of them.

    A run that crashes was charged for the blocks it asked for, and no more. A resumed run continues
    after the last step granted.

    Attributes:
        service: the accounting service, connected with an API key.
        plan: the plan of every step.
        dataset: the dataset's name in the ledger.
        delta: δ of the run's guarantee; that of the dataset's budget.
        reservation: the reservation of the whole plan.
        before: mechanisms released before the first step; the run's guarantee covers them too.
        releases: a reservation for each mechanism of `before`, in the same order. If an earlier run
            made the release, it has ended. Only a resumed run with granted steps needs none.
        block: the number of steps charged at once, rounded up to whole epochs with balls-in-bins
            sampling. It grows until asking takes at most a quarter of a percent of the steps' time.
        block_max: the upper limit of `block`.
        renew_seconds: the time after which the reservation's lease is renewed.
        record: a file, such as granted.json beside the checkpoint, where each grant is recorded
            before its steps are made. A ledger restored from a backup, which has granted less, is
            then refused. Each run needs its own file.
        spent: ε of the run's granted steps, rounded up to the next point of its curve.
    """

    service: AccountingService
    plan: Plan
    dataset: str
    delta: float
    reservation: Reservation
    before: tuple[Mechanism, ...] = ()
    releases: tuple[Reservation, ...] = ()
    block: int = 50
    block_max: int = 1000
    renew_seconds: float = 600.0
    record: str | Path | None = None
    spent: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Check the reservation, and continue after the steps that the ledger has granted.

        Raises:
            DataError: the record of grants cannot be read.
            NoGuaranteeError: the reservation is on another dataset, or not for the plan's steps; or
                the ledger has granted fewer steps than the record says.
        """
        held = self.reservation
        self._require_own_dataset(held)
        if self.record is not None:
            require_recorded_grants(Path(self.record), held)
        if held.mechanism != self.plan.mechanism(self.reserved):
            raise NoGuaranteeError(
                f"reservation {held.identifier} is for {held.mechanism}, but the plan is "
                f"{self.plan.mechanism(self.reserved)}: reserve budget for the plan that is run; "
                "for scheduled noise use PhasedLedgerBudget"
            )
        self._renewed_at = time.monotonic()
        self._last_grant: tuple[float, float] | None = None  # its time; the seconds it took
        self._counter = StepCounter(self.made)

    def begin(self) -> list[Json]:
        """Spend budget on the releases that precede training, such as a private PCA; commit them.

        All steps of their reservations are charged: any of them may be released. Nothing more is
        charged to a reservation that has ended, and nothing more may be released under it.

        Returns:
            A certificate of each.

        Raises:
            NoGuaranteeError: one of their reservations is on another dataset, or ended without a
                grant, or they are not for the mechanisms of `before`; nothing is spent.
            ServiceError: the service gave no usable answer; nothing may be released.
        """
        self._require_reserved_releases()
        charged: list[Reservation] = []
        for each in self.releases:
            if each.state == _OPEN:
                granted = self._grant(each, each.steps_reserved - each.steps_granted)
                charged.append(self.service.commit(granted))
            else:
                charged.append(each)
        self.releases = tuple(charged)
        return [self.service.certificate(each) for each in charged]

    def _require_charged_releases(self) -> None:
        """Raise unless the releases before the first step are charged to the dataset's budget."""
        self._require_reserved_releases()
        for each in self.releases:
            if each.state == _OPEN and each.steps_granted < each.steps_reserved:
                raise NoGuaranteeError(
                    f"the release of reservation {each.identifier} is not charged: call begin() "
                    "before the release, and then make the first step"
                )

    def _require_reserved_releases(self) -> None:
        """Raise unless the reserved releases are those that the run claims.

        A resumed run needs no reservations: they were charged before its first step.
        """
        for each in self.releases:
            self._require_own_dataset(each)
            if each.state != _OPEN and each.steps_granted == 0:
                raise NoGuaranteeError(
                    f"reservation {each.identifier} is {each.state} without a granted step, so its "
                    "release is not charged: reserve budget for it again"
                )
        reserved, claimed = [each.mechanism for each in self.releases], list(self.before)
        if not reserved and self.made > 0:
            return
        if reserved != claimed:
            raise NoGuaranteeError(
                f"the reserved releases are {reserved}, but before the first step the run claims "
                f"{claimed}: reserve budget for each mechanism of `before`, in its order, pass the "
                "reservations as `releases`, ended ones too, and write each mechanism in `before` "
                "with all fields, as the ledger does"
            )

    def _require_own_dataset(self, held: Reservation) -> None:
        """Raise if a reservation holds the budget of another dataset than the run's."""
        if held.dataset not in ("", self.dataset):
            raise NoGuaranteeError(
                f"reservation {held.identifier} is on dataset {held.dataset!r}, not on "
                f"{self.dataset!r}: reserve budget of the dataset that is trained on, or name the "
                "reservation's dataset"
            )

    def give_up(self) -> None:
        """Release the budget of steps not granted; if that fails, the lease's end frees it."""
        for each in (self.reservation, *self.releases):
            with suppress(ServiceError):
                self.service.release(each, patience_seconds=RELEASE_PATIENCE_SECONDS)

    @property
    def claim(self) -> str:
        """The dataset whose ledger is charged, and δ of its budget."""
        return f"what dataset {self.dataset!r} is charged, at δ = {self.delta:g}"

    def checkpoint_keys(self) -> dict[str, Any]:
        """Return what a checkpoint must name of its steps."""
        names = {BEFORE: _plain_json(self.before), RESERVATIONS: self.reservations}
        return super().checkpoint_keys() | names

    def count_resumed(self, steps: int) -> int:
        """Return 0: the ledger counts the steps; it has granted all of a checkpoint's.

        Raises:
            NoGuaranteeError: it has granted fewer, as it was restored from a backup.
        """
        require_granted(steps, self.made)
        return 0

    @property
    def privacy_unit(self) -> str:
        """The word for one record of the ledger's dataset."""
        return str(self.service.dataset(self.dataset).get("privacy_unit"))

    @property
    def reservations(self) -> list[str]:
        """The identifier of the reservation of the steps, in a list."""
        return [self.reservation.identifier]

    @property
    def made(self) -> int:
        """The number of steps granted so far."""
        return self.reservation.steps_granted * self.plan.steps_per_charge

    @property
    def reserved(self) -> int:
        """The number of steps that budget is reserved for."""
        return self.reservation.steps_reserved * self.plan.steps_per_charge

    def _require_allowed(self, step: int) -> None:
        """Raise unless the ledger granted the step; request the next block of steps if needed."""
        held = self.reservation
        self.renew_if_due()
        if step <= self.made:
            return
        self._adapt_block()
        left = held.steps_reserved - held.steps_granted
        block = min(self.plan.charges(self.block), left)
        if block == 0 or held.state != _OPEN:
            raise BudgetExhaustedError(f"all {self.made} steps of the run are made")
        if self.made == 0:
            self._require_charged_releases()
        curve = self._epsilon_curve  # before anything is charged
        self.reservation = self._grant(held, block)
        self._last_grant = time.monotonic(), self.service.attempt_seconds  # without outages' waits
        granted = self.reservation.steps_granted
        self.spent = next(epsilon for charges, epsilon in curve if charges >= granted)
        if step > self.made:
            raise BudgetExhaustedError(f"step {step} is beyond the steps that were granted")

    def _grant(self, held: Reservation, charges: int) -> Reservation:
        """Spend budget of a reservation, and record it before it is used.

        If no charges are left, such as of a release that was granted before, return it unchanged.
        """
        if charges == 0:
            return held
        granted = self.service.grant(held, charges)
        if self.record is not None:
            record_grant(Path(self.record), granted)
        return granted

    def _adapt_block(self) -> None:
        """Enlarge the blocks of steps if requests for them take too much of the run's time."""
        if self._last_grant is None:
            return
        (granted_at, seconds), self._last_grant = self._last_grant, None
        # steps faster than the answer count as long as it, so that the quotient stays bounded
        factor = seconds / (_ASKING_SHARE_MAX * max(time.monotonic() - granted_at, seconds))
        if factor > 1:
            self.block = max(self.block, min(math.ceil(factor * self.block), self.block_max))

    @cached_property
    def _epsilon_curve(self) -> list[tuple[int, float]]:
        """Pairs (number of charges, ε) along the run; only the last if the service has no curve."""
        charges = self.reservation.steps_reserved
        points = min(_CURVE_POINTS_MAX, math.ceil(self.reserved / self.block), charges)
        with suppress(ServiceRefusedError):
            if not self.before and self.relation == ADD_OR_REMOVE_ONE:
                return self.service.curve(self.plan.mechanism(self.reserved), self.delta, points)
        return [(charges, self.planned_guarantee(self.reserved).epsilon)]

    def renew_if_due(self) -> None:
        """Renew the reservation's lease if it is open and `renew_seconds` have passed."""
        is_due = time.monotonic() - self._renewed_at > self.renew_seconds
        if self.reservation.state == _OPEN and is_due:
            self._renew()

    def _renew(self) -> None:
        """Renew the reservation's lease, so that it does not expire during the run.

        Raises:
            NoGuaranteeError: another run was granted steps of this reservation.
        """
        found, held = self.service.renew(self.reservation), self.reservation.steps_granted
        if found.steps_granted != held:
            raise NoGuaranteeError(
                f"{found.steps_granted} steps of reservation {found.identifier} are granted, "
                f"{held} of them to this run: another run uses the same reservation"
            )
        self._renewed_at = time.monotonic()

    def guarantee(self, steps: int) -> Guarantee:
        """Return the guarantee of all reserved steps and of the releases that precede training."""
        return add_step_counts(self.planned_guarantee(self.reserved), steps, self.reserved)

    def planned_guarantee(self, steps: int) -> Guarantee:
        """Return the guarantee of `steps` steps and the releases that precede training.

        Raises:
            NoGuaranteeError: the guarantee is not proven.
        """
        whole = compose(self.before, self.plan.mechanism(steps))
        return prove_guarantee(self.service, whole, self.delta, self.relation)

    @cached_property
    def relation(self) -> str:
        """The dataset's neighbouring relation, which the run's guarantee is for.

        Raises:
            NoGuaranteeError: the reservation is for another one.
        """
        found = str(self.service.dataset(self.dataset).get("neighbouring_relation"))
        held = self.reservation
        if held.neighbouring_relation not in ("", found):
            raise NoGuaranteeError(
                f"reservation {held.identifier} is for {held.neighbouring_relation}, but dataset "
                f"{self.dataset!r} is for {found}: reserve budget of this dataset"
            )
        return found

    def commit(self, model_sha256: str | None = None) -> Json:
        """End the run in the ledger, free the steps not granted, and return the certificate.

        The certificate names the clip norm, unless it changes, and, if it is given, the hash of the
        model's file. The reservation may have ended before: its lease expired, or an earlier
        process committed it and failed before it got the certificate.
        """
        if self.reservation.state == _OPEN:
            self.reservation = self.service.commit(
                self.reservation, self.plan.constant_clip_norm, model_sha256
            )
        return self.service.certificate(self.reservation)


@dataclass(frozen=True)
class NoBudget(Allowance):
    """A fixed number of steps without a privacy guarantee; no service is asked.

    Several optimizers may share it, since steps need not be told apart.

    Attributes:
        plan: the plan of every step.
        steps: the number of steps that may be made.
        reason: the reason why there is no guarantee.
    """

    plan: Plan
    steps: int
    reason: str
    delta: float = field(default=1.0, init=False)
    spent: float = field(default=math.inf, init=False)

    @property
    def has_claim(self) -> bool:
        """False: nothing is claimed."""
        return False

    @property
    def made(self) -> int:
        """Always 0: this class does not count steps."""
        return 0

    @property
    def taken(self) -> int:
        """Always 0: this class does not count steps."""
        return 0

    def allow(self, step: int) -> None:
        """Raise if the step's number exceeds the fixed number of steps.

        Raises:
            BudgetExhaustedError: the step is beyond them.
        """
        self._require_allowed(step)

    def take(self, step: int) -> None:
        """Raise if the step's number exceeds the fixed number of steps; count nothing."""
        self._require_allowed(step)

    def guarantee(self, steps: int) -> Guarantee:
        """Return an infinite ε, with the reason why there is no guarantee."""
        document = {"guarantee": "none", "reason": self.reason, "steps": steps}
        return Guarantee(math.inf, 1.0, "none", "none", document)

    def _require_allowed(self, step: int) -> None:
        """Raise if the step's number exceeds the fixed number of steps."""
        if step > self.steps:
            raise BudgetExhaustedError(f"all {self.steps} steps are made")


def prove_guarantee(
    service: AccountingService, mechanism: Mechanism, delta: float, relation: str
) -> Guarantee:
    """Return the guarantee of a mechanism under a dataset's neighbouring relation.

    Raises:
        NoGuaranteeError: the guarantee is not proven.
    """
    method = PLD if relation == ADD_OR_REMOVE_ONE else "subsampled_rdp"
    found = service.epsilon(mechanism, delta, method, relation)
    if found.status != "proven":
        raise NoGuaranteeError(f"the guarantee by {method} is {found.status}, not proven")
    return found


def _plain_json(mechanisms: tuple[Mechanism, ...]) -> list[Any]:
    """Return mechanisms as lists and dictionaries, as they are after a checkpoint is read."""
    found: list[Any] = json.loads(json.dumps(mechanisms))
    return found


def add_step_counts(guarantee: Guarantee, steps: int, planned: int) -> Guarantee:
    """Return a guarantee with the numbers of done (`steps`) and planned steps in its JSON."""
    counts = {"scope": "fixed_plan", "steps": steps, "steps_planned": planned}
    return replace(guarantee, document={**guarantee.document, **counts})
