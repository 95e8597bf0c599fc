"""Private optimizers, and their batches, in the forms that training frameworks take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import Dataset

from training_client.errors import BudgetExhaustedError, NoGuaranteeError
from training_client.integrations.model_files import check_model_file, model_saver
from training_client.integrations.trackers import RunTracker
from training_client.optimizers import PrivateOptimizer, private_batches
from training_client.private_step.batches import Examples, TargetLoss, Targets
from training_client.run_report import settle

_END: Final = object()


class PrivateLoader:
    """Batches of a private optimizer, in epochs of ⌈1/q⌉ steps.

    Each batch is charged before it is drawn, and needs its step before the next is drawn: so a
    framework must not load ahead, which those that know a loader's length do not. All epochs
    together are one call of `private_batches`.

    Attributes:
        dataset: the private records.

    Args:
        optimizer: its plan says how records are drawn.
        dataset: see above.
        options: see `private_batches`: `collate`, `sampler`, `workers` and `device`.
    """

    def __init__(self, optimizer: PrivateOptimizer, dataset: Dataset[Any], **options: Any) -> None:
        self.dataset = dataset
        self._optimizer, self._options = optimizer, options
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return self._optimizer.plan.steps_in(1)

    def __iter__(self) -> Iterator[Any]:
        """Draw the batches of an epoch; fewer, or none, if the budget is spent."""
        if self._batches is None:
            self._batches = private_batches(self._optimizer, self.dataset, **self._options)
        for _ in range(len(self)):
            batch = next(self._batches, _END)
            if batch is _END:
                return
            yield batch


class FrameworkOptimizer(torch.optim.Optimizer):
    """A private optimizer in the form of PyTorch's, whose `step` expects the private step made.

    Its state is that of the private optimizer, so that the checkpoints of a framework hold what a
    claim rests on. Schedulers may change the learning rates in its parameter groups.

    Attributes:
        private: the private optimizer.
    """

    def __init__(self, private: PrivateOptimizer) -> None:
        self._torch_optimizer: torch.optim.Optimizer | None = None
        super().__init__(private.parameters, {"lr": private.learning_rate})
        self.private, self._is_step_made = private, False
        self._torch_optimizer = getattr(private, "torch_optimizer", None)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, of PyTorch's optimizer if the private one has one."""
        own = self._torch_optimizer
        return self._groups if own is None else own.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Set the groups of an optimizer that is not one of PyTorch's."""
        self._groups = groups

    def private_step(self, examples: Examples, targets: Targets, loss: TargetLoss) -> float:
        """Make the private step of a batch; return its mean loss, for the data owner only.

        Raises:
            BudgetExhaustedError, DataError, NoGuaranteeError, ServiceError: see `PrivateOptimizer`.
        """
        if self._torch_optimizer is None:
            self.private.learning_rate = self.param_groups[0]["lr"]
        found = self.private.step(examples, targets, loss)
        self._is_step_made = True
        return found

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure, if there is one, and count the private step as the framework's.

        Raises:
            NoGuaranteeError: no private step was made since the last call.
        """
        found = None if closure is None else closure()
        if not self._is_step_made:
            raise NoGuaranteeError(
                "the framework made a step of its own, without a private one: leave training_step "
                "as it is, or call private_step once for every batch"
            )
        self._is_step_made = False
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a private step leaves no gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the private optimizer."""
        return self.private.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the private optimizer.

        Raises:
            DataError, NoGuaranteeError: see `PrivateOptimizer.load_state_dict`.
        """
        self.private.load_state_dict(state_dict)


class PrivateRun:
    """A run of a private optimizer in a framework: its steps and its end.

    Attributes:
        optimizer: what the framework gets.

    Args:
        private: the private optimizer.
        loss: `loss(outputs, targets)` returns one value per example.
        output: the folder for `privacy.json` and `certificate.json`.
        model_file: the name of a file in that folder in which the model is saved; see `settle`.
        trackers: experiment trackers.
    """

    def __init__(
        self,
        private: PrivateOptimizer,
        loss: TargetLoss,
        output: str | Path,
        model_file: str | None = None,
        trackers: Iterable[RunTracker] = (),
    ) -> None:
        self.optimizer = FrameworkOptimizer(private)
        self._loss, self._output, self._trackers = loss, Path(output), tuple(trackers)
        self._model_file = None if model_file is None else check_model_file(model_file)

    def step(self, examples: Examples, targets: Targets) -> float:
        """Make a private step, and tell the trackers; see `FrameworkOptimizer.private_step`."""
        found = self.optimizer.private_step(examples, targets, self._loss)
        private = self.optimizer.private
        for tracker in self._trackers:
            tracker.log_spent(private.steps_made, private.allowance.spent, private.allowance.delta)
        return found

    def has_next_step(self) -> bool:
        """Return whether the budget covers another step.

        Raises:
            NoGuaranteeError, ServiceError: see `Allowance.allow`.
        """
        private = self.optimizer.private
        try:
            private.allowance.allow(private.steps_made + 1)
        except BudgetExhaustedError:
            return False
        return True

    def settle(self, model: Any) -> None:
        """End the run: save the model if asked, commit, and write guarantee and certificate.

        Raises:
            DataError: the model was not saved as one file; nothing is committed.
            NoGuaranteeError: the last batch had no step; nothing is claimed.
            ServiceError: the service gave no usable answer.
        """
        private = self.optimizer.private
        private.private_sum.require_no_open_step("its batch had no step, so nothing is claimed")
        save = model_saver(model, self._model_file)
        saved = None if save is None else save(self._output)
        settle(private.allowance, private.steps_made, self._output, model=saved)
        for tracker in self._trackers:
            tracker.log_run(self._output)
