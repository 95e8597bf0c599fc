"""Lightning: a callback that asks before every step of an Opacus optimizer.

    trainer = Trainer(
        callbacks=[PrivacyCallback(Budget(service, plan, epsilon=2.0, delta=1e-5), "runs/mine")],
        use_distributed_sampler=False,
    )

The callback works with `lightning.pytorch` as with `pytorch_lightning`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pytorch_lightning import Callback, LightningModule, Trainer

from training_client.budget import Allowance
from training_client.errors import BudgetExhaustedError, NoGuaranteeError
from training_client.integrations.checks import require_no_accumulation
from training_client.integrations.gate import StepGate
from training_client.integrations.skipped import require_no_scaler
from training_client.integrations.splitting import require_whole_passes

_PRECISIONS: Final = ("32-true", "64-true", "bf16-mixed")


class PrivacyCallback(Callback):
    """Ends a fit before the step that its budget does not cover.

    The question is asked when a batch is about to be used: nothing has been computed from it yet.
    It permits one step, with manual optimization too: a second of the batch raises before
    parameters change. A fit that resumes a checkpoint counts the steps that the checkpoint knows
    of; steps made after it was written are known to a ledger only.

    Args:
        allowance: a `Budget`, or a `LedgerBudget`, whose reservation is committed at the end. With
            several processes each has one, and that of rank 0 is asked.
        output: folder for `privacy.json` and `certificate.json`. A fit that ends in an error
            writes neither, and commits nothing.
    """

    def __init__(self, allowance: Allowance, output: str | Path) -> None:
        self.gate = StepGate(allowance)
        self._output = output

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check what is about to run, and that at least a step of it fits.

        Raises:
            NoGuaranteeError: it is not what the allowance's plan says.
            BudgetExhaustedError: no step fits.
            ServiceError: no usable answer.
        """
        self._guard(trainer, made=trainer.global_step)
        self.gate.look_ahead()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check again: each epoch may have a loader of its own.

        Raises:
            NoGuaranteeError: what is about to run is not what the allowance's plan says.
        """
        self._guard(trainer)

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """End the fit if no further step fits; the batch is not used.

        Raises:
            BudgetExhaustedError: the fit was told to end and goes on, for min_steps or min_epochs.
            ServiceError: no usable answer.
        """
        try:
            self.gate.ask()
        except BudgetExhaustedError:
            if trainer.should_stop:
                raise
            trainer.should_stop = True
            raise StopIteration from None  # what the loop of batches ends on

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Commit, and write what may be said of the model.

        Raises:
            ServiceError: no usable answer.
        """
        self.gate.settle(self._output)

    def _guard(self, trainer: Trainer, made: int = 0) -> None:
        require_no_accumulation(trainer.accumulate_grad_batches)
        limited = trainer.max_steps != -1 or trainer.limit_train_batches != 1.0
        limit = "max_steps or limit_train_batches" if limited else None
        require_whole_passes(trainer.train_dataloader, limit)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        require_no_scaler(scaler, f'precision="{trainer.precision}"')
        if trainer.precision not in _PRECISIONS:
            raise NoGuaranteeError(
                f'precision="{trainer.precision}" may skip steps, or lose noise by rounding: take '
                f"one of {', '.join(_PRECISIONS)}"
            )
        if len(trainer.optimizers) != 1:
            raise NoGuaranteeError(f"one optimizer is accounted for, not {len(trainer.optimizers)}")
        self.gate.guard(trainer.optimizers[0], trainer.train_dataloader, made)
