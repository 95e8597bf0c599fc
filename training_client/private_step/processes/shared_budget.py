"""A budget that several processes share: rank 0 asks and is charged, and all get its answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from training_client.budget import CLAIM, Allowance
from training_client.client import Json
from training_client.client.answers import Guarantee
from training_client.errors import NoGuaranteeError
from training_client.plan import Plan
from training_client.private_step.processes.process_group import ProcessGroup

T = TypeVar("T")
_Summary = tuple[Plan, int, int, float]  # the plan; steps made and taken; ε of the allowed steps


class SharedBudget(Allowance):
    """A run's budget shared by several processes: rank 0 holds it and answers all of them.

    Every method asks rank 0 and gives its answer, or its exception, to all processes. So all must
    call it, in the same order. The attributes are those of the last answer.

    Attributes:
        plan: the plan of every step.
        group: the processes.
        spent: ε of the steps allowed so far.
    """

    def __init__(self, make_budget: Callable[[], Allowance]) -> None:
        self.group = ProcessGroup()
        self._own: Allowance | None = None  # on rank 0
        summary, self._checkpoint_keys, self._has_claim = self.group.run_on_rank_zero(
            partial(self._create, make_budget)
        )
        self.plan, self._made, self._taken, self.spent = summary

    def _create(
        self, make_budget: Callable[[], Allowance]
    ) -> tuple[_Summary, dict[str, Any], bool]:
        """Create the budget on rank 0; return what all processes keep of it."""
        self._own = make_budget()
        if isinstance(self._own, SharedBudget):
            raise NoGuaranteeError("the budget is shared already: share it once")
        return _summarise(self._own), self._own.checkpoint_keys(), self._own.has_claim

    @property
    def has_claim(self) -> bool:
        """True if a guarantee is claimed for the steps."""
        return self._has_claim

    @property
    def claim(self) -> str:
        """The claim of rank 0's budget, in words."""
        return str(self._checkpoint_keys[CLAIM])

    def assume(self, *sentences: str) -> None:
        """Add to what the claim rests on; rank 0 writes it, and no process is asked."""
        if self._own is not None:
            self._own.assume(*sentences)

    @property
    def made(self) -> int:
        """The number of steps that are paid for, as last broadcast by rank 0."""
        return self._made

    @property
    def taken(self) -> int:
        """The number of the last step taken, as last broadcast by rank 0."""
        return self._taken

    def run(self, function: Callable[[Allowance], T]) -> T:
        """Call a function with the budget on rank 0, and return its result on all processes.

        Args:
            function: its result or exception must be picklable.

        Raises:
            ProcessLostError: a process ended, or rank 0 answered too late.
        """
        result, (_, self._made, self._taken, self.spent) = self.group.run_on_rank_zero(
            partial(self._run_own, function)
        )
        return result

    def _run_own(self, function: Callable[[Allowance], T]) -> tuple[T, _Summary]:
        """Call a function with rank 0's budget; return the result, and plan, step counts and ε."""
        assert self._own is not None
        return function(self._own), _summarise(self._own)

    def begin(self) -> list[Json]:
        """Spend budget on the releases before the first step, once for all processes."""
        return self.run(lambda budget: budget.begin())

    def give_up(self) -> None:
        """Release the reserved budget of steps that were not granted."""
        self.run(lambda budget: budget.give_up())

    def checkpoint_keys(self) -> dict[str, Any]:
        """Return what a checkpoint must name of its steps.

        No process is asked, since one process alone may write the checkpoint.
        """
        return dict(self._checkpoint_keys)

    def count_resumed(self, steps: int) -> int:
        """Return how many of a checkpoint's `steps` count as done when the run is resumed."""
        return self.run(lambda budget: budget.count_resumed(steps))

    def allow(self, step: int) -> None:
        """Raise on all processes unless the budget covers a step; do not take the step."""
        self.run(lambda budget: budget.allow(step))

    def take(self, step: int) -> None:
        """Take a step, once for all processes; raise on all if the budget does not cover it."""
        self.run(lambda budget: budget.take(step))

    def guarantee(self, steps: int) -> Guarantee:
        """Return the guarantee of the whole plan, for a run that stopped after `steps` steps."""
        return self.run(lambda budget: budget.guarantee(steps))

    def commit(self, model_sha256: str | None = None) -> Json | None:
        """End the run, and return the ledger's certificate if there is a ledger."""
        return self.run(lambda budget: budget.commit(model_sha256))

    def _require_allowed(self, step: int) -> None:
        """Raise if the budget does not cover the step."""
        self.allow(step)


def share_budget(make_budget: Callable[[], Allowance]) -> SharedBudget:
    """Create a budget on rank 0, and share it with all processes of `torch.distributed`.

    An optimizer with a shared budget makes each step together with the other processes: each clips
    the gradients of its share of the batch, rank 0 adds noise, and the sums are added up. Without
    `torch.distributed` there is one process, and the budget is as `make_budget` returns it.

    Args:
        make_budget: returns a `Budget`, `LedgerBudget` or `NoBudget`; called on rank 0 only, so
            that a plan is reserved once.

    Raises:
        Exception: what `make_budget` raises, on all processes.
    """
    return SharedBudget(make_budget)


def _summarise(budget: Allowance) -> _Summary:
    """Return a budget's plan, steps paid for, last step and ε, to broadcast to all processes."""
    return budget.plan, budget.made, budget.taken, budget.spent
