"""Hugging Face: a callback that asks the service before every step of an Opacus optimizer.

    trainer = Trainer(model, args, optimizers=(optimizer, None), callbacks=[
        PrivacyCallback(Budget(service, plan, epsilon=2.0, delta=1e-5), "runs/mine")
    ])

`Trainer.get_train_dataloader` must return the loader that Opacus made.
"""

from __future__ import annotations

from typing import Any, Final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training_client.errors import BudgetExhaustedError, NoGuaranteeError
from training_client.integrations.opacus.checks import require_no_accumulation
from training_client.integrations.opacus.skipped_steps import require_no_grad_scaler
from training_client.integrations.opacus.split_batches import require_no_batch_limit
from training_client.integrations.opacus.step_gate import GatedRun
from training_client.integrations.patches import warn_if_untested

warn_if_untested("opacus", "torch", "transformers", "accelerate")

_STATE: Final = "privacy_accountant"  # a key of the callbacks' states in trainer_state.json


class PrivacyCallback(GatedRun, TrainerCallback):
    """A `Trainer` callback that ends training before a step that the budget does not cover.

    A `Trainer` can be asked to stop only after a step, so the callback checks each step at the end
    of the one before, and the first when training begins. When a batch is drawn, one step of it is
    permitted; that raises if a request to stop was overruled. A second step of the batch raises
    before parameters change. Training resumed from a checkpoint counts the steps of the checkpoint,
    and is refused if they were charged as those of another plan; only a ledger knows of steps made
    after it was written.

    Args:
        allowance: a `Budget`, or a `LedgerBudget`, whose reservation is committed at the end. In
            distributed training each process has one, and that of rank 0 is asked.
        output: the folder for `privacy.json` and `certificate.json`. Training that ends in an error
            writes neither, and commits nothing.
        model_file: the name of a file in that folder, `.pt` or `.safetensors`. A model with
            `save_pretrained` saves itself: as `model.safetensors`, and LoRA adapters of PEFT as
            `adapter_model.safetensors`.
            The trained model is saved there before the run is committed, and both documents name
            its SHA-256. By default no model is saved or named.
        trackers: experiment trackers, told of ε and δ at every step and of the certificate.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **running: Any,
    ) -> None:
        """Check options, optimizer and loader, and that the budget covers one step.

        Raises:
            NoGuaranteeError: they do not run the allowance's plan, or the checkpoint's steps were
                charged as those of another.
            BudgetExhaustedError: no step fits.
            ServiceError: the service gave no usable answer.
        """
        require_no_accumulation(args.gradient_accumulation_steps)
        optimizer = running["optimizer"]
        limit = "max_steps" if args.max_steps > 0 else None
        require_no_batch_limit(running["train_dataloader"], limit)
        require_no_grad_scaler(True if args.fp16 else None, "fp16=True")
        require_no_grad_scaler(getattr(optimizer, "scaler", None), "accelerate")
        if args.auto_find_batch_size:
            raise NoGuaranteeError(
                "auto_find_batch_size=True restarts if a batch is too large, and that batch has no "
                "step: set it to False, and have batches split by Opacus' BatchMemoryManager"
            )
        unwrapped = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        saved = _states(state).get(_STATE)
        self.gate.guard(unwrapped, running["train_dataloader"], state.global_step, saved)
        self.gate.check_next_step()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Permit the optimizer one step on the batch that was just drawn.

        Raises:
            BudgetExhaustedError: training goes on although it was asked to stop.
            ServiceError: the service gave no usable answer.
        """
        self.gate.permit_step()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **running: Any,
    ) -> None:
        """Ask training to stop if the budget covers no further step.

        Raises:
            ServiceError: the service gave no usable answer.
        """
        # The Trainer clears gradients through the model, which leaves Opacus' sums.
        running["optimizer"].zero_grad()
        _states(state)[_STATE] = self.gate.state_dict()  # a checkpoint may follow
        if control.should_training_stop:
            return
        try:
            self.gate.check_next_step()
        except BudgetExhaustedError:
            control.should_training_stop = True

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **running: Any,
    ) -> None:
        """Save the model if asked, commit the run, and write its guarantee to a file.

        Raises:
            DataError: the model was not saved as one file.
            ServiceError: the service gave no usable answer.
        """
        self.settle(running["model"])


def _states(state: TrainerState) -> Any:
    """Return the dictionary of callbacks' states, which `TrainerState` declares as a list."""
    return state.stateful_callbacks
