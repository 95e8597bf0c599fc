"""The budget of a run: no step is made before the service has said that it fits."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Protocol

from training_client.errors import (
    BudgetExhaustedError,
    NoGuaranteeError,
    ServiceError,
    ServiceRefusedError,
)
from training_client.handed_out import HandedOut
from training_client.plan import Mechanism, Plan, composition
from training_client.service import (
    ADD_OR_REMOVE_ONE,
    PLD,
    AccountingService,
    Guarantee,
    Json,
    Reservation,
)

_OPEN: Final = "open"  # a reservation of which steps may be granted
_POINTS_MAX: Final = 200  # of a curve
_GIVING_UP_SECONDS: Final = 3.0
_ASKING_MAX: Final = 0.0025  # of the time that the steps take
_STEPS_MAX: Final = 10**9  # the service accounts for no more
_NO_EPSILON: Final = "no-finite-epsilon"


class Allowance(Protocol):
    """What an optimizer asks before every step.

    It hands out each step once: who begins later goes on after `made`, and two who began together
    cannot both make the same step.
    """

    @property
    def plan(self) -> Plan:
        """What a step costs."""
        ...

    @property
    def spent(self) -> float:
        """ε of the steps allowed so far."""
        ...

    @property
    def made(self) -> int:
        """Steps that count as made before the loop begins."""
        ...

    @property
    def taken(self) -> int:
        """The last step handed out: no claim may be of fewer."""
        ...

    def resumed(self, steps: int) -> int:
        """How many of the steps that a checkpoint knows of count as made."""
        ...

    def allow(self, step: int) -> None:
        """Return if step number `step` (from 1) may be made; raise if not. Ask as often as wanted.

        Raises:
            NoGuaranteeError: it was taken before.
        """
        ...

    def take(self, step: int) -> None:
        """Return if step number `step` may be made, now and by nobody else; raise if not."""
        ...

    def guarantee(self, steps: int) -> Guarantee:
        """The claim about a run that stopped after `steps` steps: that of its whole plan.

        Stopping may have looked at results, so the guarantee of the steps made claims too little.
        """
        ...

    def commit(self) -> Json | None:
        """The run is done: its certificate, if a ledger keeps one."""
        ...


@dataclass
class Budget:
    """Asks the service for ε ahead of the steps, a block at a time.

    Nothing is charged, so each block is as long as all before it: asking takes no part of a long
    run's time.

    The plan that is claimed ends with `steps`, or with the last step that fits ε: no step after its
    end is allowed. Wherever the run stops, the claim is of the whole plan. To claim less, say
    beforehand with `steps` where the run ends.

    Attributes:
        service: who answers.
        plan: what a step costs.
        epsilon, delta: what may be spent.
        block: steps asked for at first.
        method: of accounting.
        before: what is released before the first step: it takes its part of ε, and every claim
            covers it.
        steps: the last step of the plan, declared before the first; by default the last that fits.
        allowed: steps that the service has said fit, so far.
        spent: ε of the allowed steps.
    """

    service: AccountingService
    plan: Plan
    epsilon: float
    delta: float
    block: int = 50
    method: str = "pld"
    before: tuple[Mechanism, ...] = ()
    steps: int | None = None
    allowed: int = field(default=0, init=False)
    spent: float = field(default=0.0, init=False)
    _end: int | None = field(default=None, init=False, repr=False, compare=False)  # once found
    _handed_out: HandedOut = field(default_factory=HandedOut, init=False, repr=False, compare=False)

    def begin(self) -> list[Json]:
        """Return if what comes before fits together with a step: only then may it be released.

        Returns:
            No certificates: there is no ledger.

        Raises:
            BudgetExhaustedError: it does not fit.
            ServiceError: no usable answer; nothing may be released.
        """
        self.allow(1)
        return []

    def give_up(self) -> None:
        """Nothing is held."""

    def resumed(self, steps: int) -> int:
        """See `Allowance`: there is nothing else to go by."""
        return steps

    @property
    def made(self) -> int:
        """The last step taken."""
        return self._handed_out.last

    @property
    def taken(self) -> int:
        """See `Allowance`."""
        return self._handed_out.last

    def allow(self, step: int) -> None:
        """Return if step number `step` (from 1) fits; ask for the next block if not known yet.

        Raises:
            BudgetExhaustedError: the step would pass the budget.
            NoGuaranteeError: it was taken before.
            ServiceError: no usable answer; the step must not be made.
        """
        self._handed_out.look(step, self._allow)

    def take(self, step: int) -> None:
        """See `Allowance`; raises what `allow` does."""
        self._handed_out.take(step, self._allow)

    def guarantee(self, steps: int) -> Guarantee:
        """See `Allowance`: of the plan and of what came before it."""
        planned = max(self._planned_steps(), steps)
        return _stopped(self.planned(planned), steps, planned)

    def planned(self, steps: int) -> Guarantee:
        """The service's guarantee of a plan of `steps` steps, and of what came before."""
        whole = composition(self.before, self.plan.mechanism(steps))
        return self.service.epsilon(whole, self.delta, self.method)

    def commit(self) -> None:
        """See `Allowance`: nothing is held, and no certificate issued."""

    def _allow(self, step: int) -> None:
        if step <= self.allowed:
            return
        ahead = max(self.allowed, step - 1) + max(self.allowed, self.block)
        ahead = min(ahead, self._limit if self._end is None else self._end)
        if ahead > self.allowed:
            self._allow_up_to(ahead)
        if step > self.allowed:
            raise BudgetExhaustedError(
                f"all {self.allowed} steps of the plan are made"
                if self.allowed == self.steps
                else f"step {step} would pass ε = {self.epsilon:g} at δ = {self.delta:g}: "
                f"{self.allowed} steps fit"
            )

    def _allow_up_to(self, ahead: int) -> None:
        """Allow these steps, or up to the last that fits."""
        found = self._fitting(ahead)
        if found is None:
            ahead, found = self._last_fitting(self.allowed, ahead)
        if found is not None:
            self.allowed, self.spent = ahead, found.epsilon

    def _planned_steps(self) -> int:
        """Return the last step of the plan; none after it is allowed from now on."""
        if self._end is None:
            self._end = self._find_end()
        return self._end

    @property
    def _limit(self) -> int:
        return _STEPS_MAX if self.steps is None else self.steps

    def _find_end(self) -> int:
        fits, limit = self.allowed, self._limit
        ahead = min(max(2 * fits, self.block), limit) if self.steps is None else limit
        while fits < limit and self._fitting(ahead) is not None:
            fits, ahead = ahead, min(2 * ahead, limit)
        return fits if fits == limit else self._last_fitting(fits, ahead)[0]

    def _fitting(self, steps: int) -> Guarantee | None:
        """Return the guarantee of a plan of `steps` steps if that fits."""
        try:
            found = self.planned(steps)
        except ServiceRefusedError as error:
            if error.code != _NO_EPSILON:
                raise
            return None
        return found if found.epsilon <= self.epsilon else None

    def _last_fitting(self, fits: int, refused: int) -> tuple[int, Guarantee | None]:
        """Find the last step that fits, between one that does and one that does not.

        Returns:
            The step, and its guarantee if it is another than `fits`.
        """
        last = None
        while refused - fits > 1:
            middle = (fits + refused) // 2
            found = self._fitting(middle)
            if found is None:
                refused = middle
            else:
                fits, last = middle, found
        return fits, last


@dataclass
class LedgerBudget:
    """Has steps charged to a dataset's budget, a block at a time, before they are made.

    A run that dies has been charged for every block it asked for, and for no more. One that is
    resumed goes on after the last step that was granted.

    Attributes:
        service: the ledger, with an API key.
        plan: what a step costs.
        dataset: whose budget.
        delta: of the dataset's budget, for the run's own guarantee.
        reservation: the whole plan, held.
        before: what is released before the first step; the run's own guarantee covers it too.
        releases: what the dataset holds for each of these, in their order.
        block: steps charged at once, at first; then as many as it takes for asking to be a quarter
            of a percent of the time that they take.
        block_max: never more than these.
        renew_seconds: the lease is renewed so long after the last time.
        spent: ε of the run's granted steps alone, or of a few more.
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
    spent: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """The lease was new just now; what is granted already was granted to somebody else.

        Raises:
            NoGuaranteeError: the reservation is for other steps than the plan's.
        """
        held = self.reservation
        if held.mechanism != self.plan.mechanism(held.steps_reserved):
            raise NoGuaranteeError(
                f"reservation {held.identifier} holds budget for {held.mechanism}, and the plan is "
                f"to make {self.plan.mechanism(held.steps_reserved)}: reserve for what is run"
            )
        self._renewed = time.monotonic()
        self._asked: tuple[float, float] | None = None  # when the last block was granted; how long
        self._handed_out = HandedOut(held.steps_granted)

    def begin(self) -> list[Json]:
        """Have what comes before charged: only then may it be released.

        Returns:
            A certificate of each.

        Raises:
            ServiceError: no usable answer; nothing may be released.
        """
        granted = [self.service.grant(each, 1) for each in self.releases]
        return [self.service.certificate(self.service.commit(each)) for each in granted]

    def give_up(self) -> None:
        """Free what is held and was not granted; without an answer its lease ends anyway."""
        for each in (self.reservation, *self.releases):
            with suppress(ServiceError):
                self.service.release(each, patience_seconds=_GIVING_UP_SECONDS)

    def resumed(self, steps: int) -> int:  # noqa: ARG002
        """See `Allowance`: none, for the ledger knows which are."""
        return 0

    @property
    def made(self) -> int:
        """Steps granted so far: a run that begins now may not make them again."""
        return self.reservation.steps_granted

    @property
    def taken(self) -> int:
        """See `Allowance`."""
        return self._handed_out.last

    def allow(self, step: int) -> None:
        """See `Allowance`.

        Raises:
            BudgetExhaustedError: the plan has no such step.
            NoGuaranteeError: it was taken before.
            ServiceError: no usable answer; the step must not be made.
        """
        self._handed_out.look(step, self._allow)

    def take(self, step: int) -> None:
        """See `Allowance`; raises what `allow` does."""
        self._handed_out.take(step, self._allow)

    def _allow(self, step: int) -> None:
        held = self.reservation
        if held.state == _OPEN and time.monotonic() - self._renewed > self.renew_seconds:
            self._renew()
        if step <= held.steps_granted:
            return
        self._lengthen()
        block = min(self.block, held.steps_reserved - held.steps_granted)
        if block == 0 or held.state != _OPEN:
            raise BudgetExhaustedError(f"all {held.steps_granted} steps of the run are made")
        curve = self._curve  # before anything is charged
        self.reservation = self.service.grant(held, block)
        self._asked = time.monotonic(), self.service.attempt_seconds  # no wait in an outage
        granted = self.reservation.steps_granted
        self.spent = next(epsilon for steps, epsilon in curve if steps >= granted)
        if step > self.reservation.steps_granted:
            raise BudgetExhaustedError(f"step {step} is beyond the steps that were granted")

    def _lengthen(self) -> None:
        """Ask for more steps at a time where asking delays them."""
        if self._asked is None:
            return
        (granted_at, took), self._asked = self._asked, None
        # steps that are quicker than the answer are taken for as long, to divide by
        times = took / (_ASKING_MAX * max(time.monotonic() - granted_at, took))
        if times > 1:
            self.block = max(self.block, min(math.ceil(times * self.block), self.block_max))

    @cached_property
    def _curve(self) -> list[tuple[int, float]]:
        """ε along the steps, asked for once: its last point alone where more takes too long."""
        steps = self.reservation.steps_reserved
        points = min(_POINTS_MAX, math.ceil(steps / self.block))
        with suppress(ServiceRefusedError):
            if not self.before and self._relation == ADD_OR_REMOVE_ONE:
                return self.service.curve(self.plan.mechanism(steps), self.delta, points)
        return [(steps, self.planned(steps).epsilon)]

    def _renew(self) -> None:
        """Extend the lease. What is granted must be what was granted here, by nobody else."""
        found, held = self.service.renew(self.reservation), self.reservation.steps_granted
        if found.steps_granted != held:
            raise NoGuaranteeError(
                f"{found.steps_granted} steps of reservation {found.identifier} are granted, "
                f"{held} of them here: another run goes on with it"
            )
        self._renewed = time.monotonic()

    def guarantee(self, steps: int) -> Guarantee:
        """See `Allowance`: of all steps reserved, with what came before them."""
        reserved = self.reservation.steps_reserved
        return _stopped(self.planned(reserved), steps, reserved)

    def planned(self, steps: int) -> Guarantee:
        """The service's guarantee of a plan of `steps` steps, with what came before it."""
        whole = composition(self.before, self.plan.mechanism(steps))
        method = PLD if self._relation == ADD_OR_REMOVE_ONE else "subsampled_rdp"
        found = self.service.epsilon(whole, self.delta, method, self._relation)
        if found.status != "proven":
            raise NoGuaranteeError(f"the claim of {method} is {found.status}, not proven")
        return found

    @cached_property
    def _relation(self) -> str:
        """Of the dataset's neighbours: what is claimed of the run is claimed for the same."""
        return str(self.service.dataset(self.dataset).get("neighbouring_relation"))

    def commit(self) -> Json:
        """See `Allowance`: steps that were never granted are free again.

        It may have ended already: an earlier process committed, and got no certificate for it, or
        its lease ended.
        """
        if self.reservation.state == _OPEN:
            self.reservation = self.service.commit(self.reservation)
        return self.service.certificate(self.reservation)


@dataclass(frozen=True)
class NoBudget:
    """A fixed number of steps without a privacy claim: nobody is asked, and nothing is charged.

    Attributes:
        plan: what a step does.
        steps: that may be made.
        reason: why there is no guarantee.
    """

    plan: Plan
    steps: int
    reason: str
    spent: float = field(default=math.inf, init=False)
    made: int = field(default=0, init=False)
    taken: int = field(default=0, init=False)

    def begin(self) -> list[Json]:
        """Nothing is charged."""
        return []

    def give_up(self) -> None:
        """Nothing is held."""

    def resumed(self, steps: int) -> int:
        """See `Allowance`."""
        return steps

    def allow(self, step: int) -> None:
        """See `Allowance`.

        Raises:
            BudgetExhaustedError: all steps are made.
        """
        if step > self.steps:
            raise BudgetExhaustedError(f"all {self.steps} steps are made")

    def take(self, step: int) -> None:
        """See `Allowance`: of what nothing is claimed there is enough for everybody."""
        self.allow(step)

    def guarantee(self, steps: int) -> Guarantee:
        """None, and why."""
        document = {"guarantee": "none", "reason": self.reason, "steps": steps}
        return Guarantee(math.inf, 1.0, "none", "none", document)

    def commit(self) -> None:
        """See `Allowance`: nothing is held."""


def _stopped(claim: Guarantee, steps: int, planned: int) -> Guarantee:
    """The claim of a plan, with both numbers of steps: those made and those planned."""
    both = {"scope": "fixed_plan", "steps": steps, "steps_planned": planned}
    return replace(claim, document={**claim.document, **both})
