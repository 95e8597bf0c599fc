"""Lightning: a callback that asks the service before every step of an Opacus optimizer.

    trainer = Trainer(
        callbacks=[PrivacyCallback(Budget(service, plan, epsilon=2.0, delta=1e-5), "runs/mine")],
        use_distributed_sampler=False,
    )

The callback works with `lightning.pytorch` as with `pytorch_lightning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from training_client.errors import BudgetExhaustedError, NoGuaranteeError
from training_client.integrations.lightning_engine import PRECISIONS
from training_client.integrations.opacus.checks import require_no_accumulation
from training_client.integrations.opacus.skipped_steps import require_no_grad_scaler
from training_client.integrations.opacus.split_batches import require_no_batch_limit
from training_client.integrations.opacus.step_gate import GatedRun
from training_client.integrations.patches import warn_if_untested

warn_if_untested("opacus", "torch", "pytorch-lightning")


class PrivacyCallback(GatedRun, Callback):
    """A `Trainer` callback that ends training before a step that the budget does not cover.

    It asks before a batch is used, when nothing has been computed from it. That permits one step,
    with manual optimization too: a second step of the batch raises before parameters change. A fit
    resumed from a checkpoint counts the steps of the checkpoint, and is refused if they were
    charged as those of another plan; only a ledger knows of steps made after it was written.

    Args:
        allowance: a `Budget`, or a `LedgerBudget`, whose reservation is committed at the end. In
            distributed training each process has one, and that of rank 0 is asked.
        output: the folder for `privacy.json` and `certificate.json`. A fit that ends in an error
            writes neither, and commits nothing.
        model_file: the name of a file in that folder, `.pt` or `.safetensors`.
            The trained model is saved there before the run is committed, and both documents name
            its SHA-256. By default no model is saved or named.
        trackers: experiment trackers, told of ε and δ at every step and of the certificate.
    """

    _saved: Mapping[str, Any] | None = None  # of the gate, in the checkpoint that was loaded

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the budget's steps."""
        return self.gate.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint holds of the budget's steps, until training starts."""
        self._saved = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check options, optimizer and loader, and that the budget covers one step.

        Raises:
            NoGuaranteeError: they do not run the allowance's plan, or the checkpoint's steps were
                charged as those of another.
            BudgetExhaustedError: no step fits.
            ServiceError: the service gave no usable answer.
        """
        self._guard_optimizer(trainer, trainer.global_step, self._saved)
        self.gate.check_next_step()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check optimizer and loader again, because each epoch may have its own loader.

        Raises:
            NoGuaranteeError: the trainer does not run the allowance's plan.
        """
        self._guard_optimizer(trainer)

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Permit one step on the batch, or end training before the batch is used.

        Raises:
            BudgetExhaustedError: min_steps or min_epochs makes the fit go on although it was asked
                to end.
            ServiceError: the service gave no usable answer.
        """
        try:
            self.gate.permit_step()
        except BudgetExhaustedError:
            if trainer.should_stop:
                raise
            trainer.should_stop = True
            raise StopIteration from None  # ends the loop over batches

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the model if asked, commit the run, and write its guarantee to a file.

        Raises:
            ServiceError: the service gave no usable answer.
        """
        self.settle(pl_module)

    def _guard_optimizer(
        self, trainer: Trainer, steps_made: int = 0, saved: Mapping[str, Any] | None = None
    ) -> None:
        """Let the optimizer check the budget before each step after the first `steps_made`."""
        require_no_accumulation(trainer.accumulate_grad_batches)
        limited = trainer.max_steps != -1 or trainer.limit_train_batches != 1.0
        limit = "max_steps or limit_train_batches" if limited else None
        require_no_batch_limit(trainer.train_dataloader, limit)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        require_no_grad_scaler(scaler, f'precision="{trainer.precision}"')
        if trainer.precision not in PRECISIONS:
            raise NoGuaranteeError(
                f'precision="{trainer.precision}" may skip steps, or lose noise by rounding: use '
                f"one of {', '.join(PRECISIONS)}"
            )
        if len(trainer.optimizers) != 1:
            raise NoGuaranteeError(
                f"the model has {len(trainer.optimizers)} optimizers, and the budget covers one: "
                "return one optimizer from configure_optimizers"
            )
        self.gate.guard(trainer.optimizers[0], trainer.train_dataloader, steps_made, saved)
