"""The gate before a step of Opacus' optimizer, whichever framework calls it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from opacus.optimizers import DPOptimizer

from training_client.budget import Allowance
from training_client.claims import settle
from training_client.integrations.checks import (
    require_no_skipped_steps,
    require_one_batch,
    require_plan,
)
from training_client.integrations.ranks import on_rank_zero


class StepGate:
    """Lets an Opacus optimizer make the steps that an allowance covers, and no other.

    A framework asks before it uses a batch, and so before noise is drawn, and can end the run
    cleanly. The optimizer asks again from its step hook: after the noise, but before gradients are
    added up over ranks or parameters change, and only for steps that are really made. So a
    framework that goes on all the same, or makes two steps of a batch, is stopped there, and so is
    a second gate of one allowance.

    Args:
        allowance: asked on rank 0; other ranks get its answer.

    Attributes:
        steps: that count as made.
    """

    def __init__(self, allowance: Allowance) -> None:
        self.steps = allowance.made
        self._allowance = allowance
        self._loader: Any = None
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
        self.steps = max(self.steps, self._allowance.resumed(made))
        self._loader = loader
        if optimizer.step_hook != self._before_step:
            self._next = optimizer.step_hook  # there is one slot, and Opacus' accountant is in it
            optimizer.attach_step_hook(self._before_step)

    def ask(self) -> None:
        """Return if another step may be made; it is taken when the optimizer makes it.

        Raises:
            BudgetExhaustedError: it may not.
            NoGuaranteeError: another run has made it.
            ServiceError: no usable answer.
        """
        on_rank_zero(partial(self._allowance.allow, self.steps + 1))

    def settle(self, folder: str | Path) -> None:
        """Commit, and write what may be said of the run.

        Raises:
            ServiceError: no usable answer.
        """
        on_rank_zero(partial(settle, self._allowance, self.steps, folder))

    def _before_step(self, optimizer: DPOptimizer) -> None:
        require_one_batch(optimizer)
        require_no_skipped_steps(optimizer, self._loader)
        require_plan(optimizer, self._loader, self._allowance.plan)
        on_rank_zero(partial(self._allowance.take, self.steps + 1))
        self.steps += 1
        if self._next is not None:
            self._next(optimizer)
