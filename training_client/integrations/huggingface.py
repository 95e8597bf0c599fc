"""Hugging Face: a callback that asks before every step of an Opacus optimizer.

    trainer = Trainer(model, args, optimizers=(optimizer, None), callbacks=[
        PrivacyCallback(Budget(service, plan, epsilon=2.0, delta=1e-5), "runs/mine")
    ])

`Trainer.get_train_dataloader` must return the loader that Opacus made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training_client.budget import Allowance
from training_client.errors import BudgetExhaustedError, NoGuaranteeError
from training_client.integrations.checks import require_no_accumulation
from training_client.integrations.gate import StepGate
from training_client.integrations.skipped import require_no_scaler
from training_client.integrations.splitting import require_whole_passes


class PrivacyCallback(TrainerCallback):
    """Ends training before the step that its budget does not cover.

    A `Trainer` heeds a request to stop only after a step, so at the end of each the callback looks
    for the next, and when training begins for the first. A step is asked for when its batch is
    drawn: that raises if the request was overruled. A second step of the batch raises before
    parameters change. Training that resumes a checkpoint counts the steps that the checkpoint knows
    of; steps made after it was written are known to a ledger only.

    Args:
        allowance: a `Budget`, or a `LedgerBudget`, whose reservation is committed at the end. With
            several processes each has one, and that of rank 0 is asked.
        output: folder for `privacy.json` and `certificate.json`. Training that ends in an error
            writes neither, and commits nothing.
    """

    def __init__(self, allowance: Allowance, output: str | Path) -> None:
        self.gate = StepGate(allowance)
        self._output = output

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **running: Any,
    ) -> None:
        """Check what is about to run, and that at least a step of it fits.

        Raises:
            NoGuaranteeError: it is not what the allowance's plan says.
            BudgetExhaustedError: no step fits.
            ServiceError: no usable answer.
        """
        require_no_accumulation(args.gradient_accumulation_steps)
        optimizer = running["optimizer"]
        limit = "max_steps" if args.max_steps > 0 else None
        require_whole_passes(running["train_dataloader"], limit)
        require_no_scaler(True if args.fp16 else None, "fp16=True")
        require_no_scaler(getattr(optimizer, "scaler", None), "accelerate")
        if args.auto_find_batch_size:
            raise NoGuaranteeError(
                "auto_find_batch_size=True begins again where a batch was too large, and that step "
                "is left out: set it to False, and have batches split by Opacus' BatchMemoryManager"
            )
        own = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self.gate.guard(own, running["train_dataloader"], made=state.global_step)
        self.gate.look_ahead()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Ask for one step, of the batch that was drawn.

        Raises:
            BudgetExhaustedError: training was told to stop and goes on.
            ServiceError: no usable answer.
        """
        self.gate.ask()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **running: Any,
    ) -> None:
        """Look for the next step, if there is to be one.

        Raises:
            ServiceError: no usable answer.
        """
        # The Trainer clears gradients through the model, which leaves what Opacus summed.
        running["optimizer"].zero_grad()
        if control.should_training_stop:
            return
        try:
            self.gate.look_ahead()
        except BudgetExhaustedError:
            control.should_training_stop = True

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Commit, and write what may be said of the model.

        Raises:
            ServiceError: no usable answer.
        """
        self.gate.settle(self._output)
