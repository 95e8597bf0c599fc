"""The gate before a step of Opacus' optimizer, whichever framework calls it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from opacus.optimizers import DPOptimizer

from training_client.budget import Allowance
from training_client.claims import settle
from training_client.errors import BudgetExhaustedError, NoGuaranteeError
from training_client.integrations.checks import (
    require_no_skipped_steps,
    require_one_batch,
    require_plan,
)
from training_client.integrations.draws import Draws
from training_client.integrations.ranks import on_rank_zero
from training_client.integrations.skipped import require_finite, require_usual_precision
from training_client.integrations.splitting import Parts, ends_batch, require_finished


class StepGate:
    """Lets an Opacus optimizer make the steps that an allowance covers, and no other.

    A framework asks before it uses a batch, and so before noise is drawn, and can end the run
    cleanly. The optimizer asks again from its step hook: after the noise, but before gradients are
    added up over ranks or parameters change, and only for steps that are really made. So a
    framework that goes on all the same is stopped there, and so is a second gate of one allowance.

    A step is charged as one of a batch drawn for it alone, so a question asked of a batch permits
    one step, and the step uses that up. A second of the same batch is stopped in the hook, too.

    Args:
        allowance: asked on rank 0; other ranks get its answer.

    Attributes:
        steps: that count as made.
    """

    def __init__(self, allowance: Allowance) -> None:
        self.steps = allowance.made
        self._allowance = allowance
        self._optimizer: Any = None
        self._loader: Any = None
        self._permitted = False  # a step of the batch at hand
        self._draws: Draws | None = None
        self._parts = Parts()
        self._next: Callable[[DPOptimizer], None] | None = None

    def guard(self, optimizer: Any, loader: Any, made: int = 0) -> None:
        """Stand before every step of an optimizer from now on.

        Args:
            optimizer: of Opacus.
            loader: of the batches.
            made: steps that a checkpoint knows of. A ledger knows better.

        Raises:
            NoGuaranteeError: what runs is not what the allowance's plan says.
        """
        require_plan(optimizer, loader, self._allowance.plan)
        require_usual_precision(optimizer)
        self._draws = Draws(loader)
        self.steps = max(self.steps, self._allowance.resumed(made))
        self._optimizer, self._loader = optimizer, loader
        if optimizer.step_hook != self._before_step:
            self._next = optimizer.step_hook  # there is one slot, and Opacus' accountant is in it
            optimizer.attach_step_hook(self._before_step)

    def ask(self) -> None:
        """Return if a step may be made of the batch at hand; the optimizer takes it with the step.

        To be called once for each batch, or part of one, when it is drawn.

        Raises:
            BudgetExhaustedError: it may not.
            NoGuaranteeError: another run has made it; or an earlier batch, or part of one, has no
                step.
            ServiceError: no usable answer.
        """
        self._require_made()
        try:
            self.look_ahead()
        except BudgetExhaustedError:
            self._end_draws()
            raise
        if self._optimizer is not None:
            self._parts.require_each_taken(self._optimizer, self._loader)
            self._permitted = ends_batch(self._optimizer, self._loader)

    def look_ahead(self) -> None:
        """Return if there is a step after those that were made; of no batch is one permitted yet.

        Raises:
            BudgetExhaustedError: it may not.
            NoGuaranteeError: another run has made it.
            ServiceError: no usable answer.
        """
        on_rank_zero(partial(self._allowance.allow, self.steps + 1))

    def settle(self, folder: str | Path) -> None:
        """Commit, and write what may be said of the run.

        Raises:
            NoGuaranteeError: the last batch has no step, or was not finished; nothing is claimed.
            ServiceError: no usable answer.
        """
        self._require_made()
        if self._optimizer is not None:
            require_finished(self._optimizer)
        self._end_draws()
        on_rank_zero(partial(settle, self._allowance, self.steps, folder))

    def _before_step(self, optimizer: DPOptimizer) -> None:
        require_one_batch(optimizer)
        require_plan(optimizer, self._loader, self._allowance.plan)
        self._require_permitted()
        require_no_skipped_steps(optimizer)
        require_finite(optimizer)
        self._permitted = False
        if self._draws is not None and not hasattr(self._next, "counts_draws"):
            self._draws.use()
        on_rank_zero(partial(self._allowance.take, self.steps + 1))
        self.steps += 1
        if self._next is not None:
            self._next(optimizer)

    def _end_draws(self) -> None:
        if self._draws is not None:
            self._draws.end()

    def _require_made(self) -> None:
        if self._permitted:
            raise NoGuaranteeError(
                f"step {self.steps + 1} was left out after its batch was drawn, perhaps for what "
                "is in it, and no noise hides that: return a loss from every training_step, call "
                "the optimizer for every batch, and let nothing skip one"
            )

    def _require_permitted(self) -> None:
        if not self._permitted:
            raise NoGuaranteeError(
                f"step {self.steps + 1} has no batch of its own, and is charged as one of a batch "
                "drawn for it alone: make one step of a batch, or with the loader of Opacus' "
                "BatchMemoryManager one of each part, and draw another batch for the next"
            )
