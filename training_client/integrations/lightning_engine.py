"""Lightning with this project's own engine: a module whose steps a private optimizer makes.

    module = PrivateModule(net, optimizer, losses, "runs/mine")
    Trainer(max_epochs=2).fit(module, PrivateLoader(optimizer, dataset))

Opacus is not needed; `lightning` is the callback for its optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from pytorch_lightning import LightningModule
from torch import nn

from training_client.errors import NoGuaranteeError
from training_client.integrations.framework_optimizer import PrivateRun
from training_client.integrations.patches import warn_if_untested
from training_client.integrations.trackers import RunTracker
from training_client.optimizers import PrivateOptimizer
from training_client.private_step.batches import TargetLoss

warn_if_untested("torch", "pytorch-lightning")

PRECISIONS: Final = ("32-true", "64-true", "bf16-mixed")


class PrivateModule(LightningModule):
    """A `LightningModule` for a model that a private optimizer trains.

    Batches come from a `PrivateLoader`, which has each charged before it is drawn. The fit ends
    with the last step that the budget covers, and then writes the run's guarantee. Subclass it for
    validation, or to unpack batches in another way (`split_batch`). Losses are not logged: they
    are made of private records, without noise.

    Attributes:
        net: the model.

    Args:
        net: the model, on the device that it is trained on.
        optimizer: a private optimizer of the model.
        losses: `losses(outputs, targets)` returns one value per example.
        output: the folder for `privacy.json` and `certificate.json`. A fit that ends in an error
            writes neither, and commits nothing.
        model_file: the name of a file in that folder, `.pt` or `.safetensors`. The trained model is
            saved there, and both documents name its SHA-256.
        trackers: experiment trackers, told of ε and δ at every step and of the certificate.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: PrivateOptimizer,
        losses: TargetLoss,
        output: str | Path,
        *,
        model_file: str | None = None,
        trackers: Iterable[RunTracker] = (),
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = net
        self._private_run = PrivateRun(optimizer, losses, output, model_file, trackers)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's outputs."""
        return self.net(*inputs, **named)

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """Return a batch's examples and targets; by default it is a pair of them."""
        examples, targets = batch
        return examples, targets

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the private optimizer, as one of PyTorch."""
        return self._private_run.optimizer

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Make one private step."""
        optimizer: Any = self.optimizers()
        optimizer.step(lambda: self._private_run.step(*self.split_batch(batch)))

    def on_train_start(self) -> None:
        """Refuse a precision that may skip steps or lose noise.

        Raises:
            NoGuaranteeError: see above.
        """
        if self.trainer.precision not in PRECISIONS:
            raise NoGuaranteeError(
                f'precision="{self.trainer.precision}" may skip steps, or lose noise by rounding: '
                f"use one of {', '.join(PRECISIONS)}"
            )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the fit if the budget covers no further step.

        Raises:
            ServiceError: the service gave no usable answer.
        """
        if not self._private_run.has_next_step():
            self.trainer.should_stop = True

    def on_train_end(self) -> None:
        """Save the model if asked, commit the run, and write its guarantee to a file.

        Raises:
            NoGuaranteeError: the last batch had no step.
            ServiceError: the service gave no usable answer.
        """
        self._private_run.settle(self.net)
