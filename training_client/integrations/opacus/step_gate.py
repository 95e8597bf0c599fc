"""The gate before every step of Opacus' optimizer, for any framework that calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from opacus.optimizers import DPOptimizer

from training_client.budget import Allowance, require_same_charge
from training_client.errors import BudgetExhaustedError, NoGuaranteeError
from training_client.integrations.model_files import SaveModel, check_model_file, model_saver
from training_client.integrations.opacus.batch_counting import BatchCounter
from training_client.integrations.opacus.charged_updates import allow_update, refuse_other_updates
from training_client.integrations.opacus.checks import (
    require_no_skipped_steps,
    require_one_batch,
    require_plan,
)
from training_client.integrations.opacus.skipped_steps import (
    require_finite_gradients,
    require_full_precision,
)
from training_client.integrations.opacus.split_batches import (
    PhysicalBatchTracker,
    is_end_of_batch,
    require_finished_batch,
)
from training_client.integrations.patches import replace_step_hook
from training_client.integrations.trackers import RunTracker
from training_client.private_step.processes.process_group import is_rank_zero, run_on_rank_zero
from training_client.run_report import settle


class StepGate:
    """Lets an Opacus optimizer make only those steps that the run's budget covers.

    A framework asks before it uses a batch, and so before noise is drawn, when it can still end the
    run cleanly. The optimizer's step hook asks again: after the noise is drawn, but before
    gradients are reduced over ranks or parameters change, and only for steps that are really made.
    That stops a framework that goes on after a refusal, and a second gate of the same allowance.

    A step is charged as one of a batch drawn for it alone. So asking permits one step, which uses
    the permission up; the hook refuses a second step of the same batch.

    Args:
        allowance: the run's budget, asked on rank 0; other ranks get its answer.
        trackers: experiment trackers, told on rank 0 of every step that is charged.

    Attributes:
        steps: the number of steps that count as made.
    """

    def __init__(self, allowance: Allowance, trackers: Iterable[RunTracker] = ()) -> None:
        self.steps = allowance.made
        self._trackers = tuple(trackers)
        self._allowance = allowance
        self._optimizer: Any = None
        self._loader: Any = None
        self._is_permitted = False  # a step of the current batch
        self._batches: BatchCounter | None = None
        self._epoch: tuple[object, int] | None = None  # of the last batch
        self._physical_batches = PhysicalBatchTracker()
        self._next_hook: Callable[[DPOptimizer], None] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: the steps made, and what its claim rests on."""
        return {"steps_made": self.steps, **self._allowance.checkpoint_keys()}

    def guard(
        self,
        optimizer: Any,
        loader: Any,
        steps_made: int = 0,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """Attach this gate to an Opacus optimizer, so that each step is checked first.

        Args:
            optimizer: an optimizer of Opacus.
            loader: the training loader.
            steps_made: the number of steps that the framework's checkpoint counts. A ledger's own
                count takes precedence.
            saved: what `state_dict` returned for the checkpoint, if it holds that. Its number of
                steps is larger where balls-in-bins epochs ended early.

        Raises:
            NoGuaranteeError: the optimizer and loader do not run the allowance's plan, or the
                checkpoint's steps were charged as those of another plan or to another reservation,
                or followed other releases.
        """
        require_plan(optimizer, loader, self._allowance.plan)
        require_full_precision(optimizer)
        if saved is not None:
            steps_made = max(steps_made, saved["steps_made"])
            require_same_charge(saved, steps_made, self._allowance.checkpoint_keys())
        self._batches = BatchCounter(loader)
        self.steps = max(self.steps, self._allowance.count_resumed(steps_made))
        self._optimizer, self._loader = optimizer, loader
        refuse_other_updates(optimizer)
        if optimizer.step_hook != self._check_step:
            self._next_hook = replace_step_hook(optimizer, self._check_step)

    def permit_step(self) -> None:
        """Permit one step on the batch just drawn; call it once per (physical) batch.

        Raises:
            BudgetExhaustedError: the allowance covers no further step.
            NoGuaranteeError: another run made the step; or an earlier batch, or physical batch, had
                no step.
            ServiceError: the service gave no usable answer.
        """
        self._require_no_pending_step()
        self._leave_last_epoch()
        try:
            self.check_next_step()
        except BudgetExhaustedError:
            self._stop_counting()
            raise
        if self._optimizer is not None:
            self._physical_batches.require_last_used(self._optimizer, self._loader)
            self._is_permitted = is_end_of_batch(self._optimizer, self._loader)

    def check_next_step(self) -> None:
        """Raise unless the budget covers one more step, without permitting it.

        Raises:
            BudgetExhaustedError: it does not.
            NoGuaranteeError: another run made the step.
            ServiceError: the service gave no usable answer.
        """
        run_on_rank_zero(partial(self._allowance.allow, self.steps + 1))

    def settle(self, folder: str | Path, save_model: SaveModel | None = None) -> None:
        """End the run: save the model, commit the budget, and write the guarantee to a folder.

        Args:
            folder: the folder for `privacy.json` and `certificate.json`.
            save_model: saves the model to a folder and returns its file, on rank 0. Both documents
                then name the file's hash.

        Raises:
            DataError: the model was not saved as one file; nothing is committed.
            NoGuaranteeError: the last batch had no step, or was left unfinished; no guarantee is
                claimed.
            ServiceError: the service gave no usable answer.
        """
        self._require_no_pending_step()
        if self._optimizer is not None:
            require_finished_batch(self._optimizer)
        self._stop_counting()
        run_on_rank_zero(partial(self._write_end, Path(folder), save_model))

    def _write_end(self, folder: Path, save_model: SaveModel | None) -> None:
        """Save the model, commit the budget, write the guarantee, and notify the trackers."""
        model = None if save_model is None else save_model(folder)
        settle(self._allowance, self.steps, folder, model=model)
        for tracker in self._trackers:
            tracker.log_run(folder)

    def _check_step(self, optimizer: DPOptimizer) -> None:
        """Check the step that the optimizer is about to make, and spend its budget."""
        require_one_batch(optimizer)
        require_plan(optimizer, self._loader, self._allowance.plan)
        self._require_permission()
        require_no_skipped_steps(optimizer)
        require_finite_gradients(optimizer)
        self._is_permitted = False
        self._leave_last_epoch()  # the loader may have begun another since the step was permitted
        if self._batches is not None and not hasattr(self._next_hook, "counts_batches"):
            self._batches.use_batch()
        run_on_rank_zero(partial(self._allowance.take, self.steps + 1))
        self.steps += 1
        if is_rank_zero():
            for tracker in self._trackers:
                tracker.log_spent(self.steps, self._allowance.spent, self._allowance.delta)
        if self._next_hook is not None:
            self._next_hook(optimizer)
        allow_update(optimizer)

    def _leave_last_epoch(self) -> None:
        """Skip the remaining steps of a balls-in-bins epoch if the loader has begun another."""
        if self._batches is not None and self._batches.epoch != self._epoch:
            self._epoch = self._batches.epoch
            self.steps = self._allowance.plan.whole_charges(self.steps)

    def _stop_counting(self) -> None:
        """Allow the loader to draw batches without steps, since the run is over."""
        if self._batches is not None:
            self._batches.stop()

    def _require_no_pending_step(self) -> None:
        """Raise if a step was permitted but the optimizer has not taken it."""
        if self._is_permitted:
            raise NoGuaranteeError(
                f"step {self.steps + 1} was left out after its batch was drawn. A record in the "
                "batch may be the reason, and no noise hides that: return a loss from every "
                "training_step, and call the optimizer for every batch"
            )

    def _require_permission(self) -> None:
        """Raise if `permit_step` was not called before this step."""
        if not self._is_permitted:
            raise NoGuaranteeError(
                f"step {self.steps + 1} has no batch of its own, but it is charged as a step on "
                "one: make one step of each batch (with Opacus' BatchMemoryManager, of each "
                "physical batch), then draw another"
            )


class GatedRun:
    """A run whose steps a `StepGate` permits: what the callbacks of all frameworks share.

    Args:
        allowance: the run's budget.
        output: the folder for `privacy.json` and `certificate.json`.
        model_file: the name of a file in that folder, `.pt` or `.safetensors`, in which the trained
            model is saved before the run is committed; by default no model is saved.
        trackers: experiment trackers.
    """

    def __init__(
        self,
        allowance: Allowance,
        output: str | Path,
        *,
        model_file: str | None = None,
        trackers: Iterable[RunTracker] = (),
    ) -> None:
        self.gate = StepGate(allowance, trackers)
        self._output = output
        self._model_file = None if model_file is None else check_model_file(model_file)

    def settle(self, model: Any) -> None:
        """End the run: save the model if wanted, commit, and write guarantee and certificate."""
        self.gate.settle(self._output, model_saver(model, self._model_file))
