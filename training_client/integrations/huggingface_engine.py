"""Hugging Face with this project's own engine: a `Trainer` whose steps a private optimizer makes.

    trainer = PrivateTrainer(
        model, arguments, train_dataset=records, private=optimizer, losses=losses,
        output="runs/mine",
    )

Opacus is not needed; `huggingface` is the callback for its optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainingArguments

from training_client.errors import DataError, NoGuaranteeError
from training_client.integrations.framework_optimizer import PrivateLoader, PrivateRun
from training_client.integrations.patches import warn_if_untested
from training_client.integrations.trackers import RunTracker
from training_client.optimizers import PrivateOptimizer
from training_client.private_step.batches import TargetLoss

warn_if_untested("torch", "transformers", "accelerate")


class PrivateTrainer(Trainer):
    """A `Trainer` for a model that a private optimizer trains.

    Batches are drawn as the optimizer's plan says, each charged before it is drawn: batch sizes and
    seeds of the arguments do not count. Training ends with the last step that the budget covers,
    and then writes the run's guarantee. A resumed run draws new batches.

    Args:
        model: the model, on the device that it is trained on. It is called with a record's fields,
            without the labels.
        args: see `Trainer`; without accumulation, `fp16` and `auto_find_batch_size`.
        private: a private optimizer of the model.
        losses: `losses(outputs, labels)` returns one value per example. With several `label_names`
            the labels are a dictionary.
        output: the folder for `privacy.json` and `certificate.json`. Training that ends in an error
            writes neither, and commits nothing.
        model_file: the name of a file in that folder; a model with `save_pretrained` saves itself
            as `model.safetensors`. Both documents then name its SHA-256.
        trackers: experiment trackers, told of ε and δ at every step and of the certificate.
        options: see `Trainer`. `train_dataset` holds the private records; the collator must pad
            them all to one width.

    Raises:
        NoGuaranteeError: an argument could skip a step, or divide it into several batches.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        *,
        private: PrivateOptimizer,
        losses: TargetLoss,
        output: str | Path,
        model_file: str | None = None,
        trackers: Iterable[RunTracker] = (),
        **options: Any,
    ) -> None:
        _require_whole_steps(args)
        args.ignore_data_skip = True
        self._private_run = PrivateRun(private, losses, output, model_file, trackers)
        super().__init__(model, args, optimizers=(self._private_run.optimizer, None), **options)
        self.add_callback(_EndOfBudget(self._private_run))

    def get_train_dataloader(self) -> Any:
        """Return the private batches of the training records."""
        records: Any = self.train_dataset
        return PrivateLoader(
            self._private_run.optimizer.private, records, collate=self.data_collator
        )

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Make one private step; return the batch's mean loss, for the data owner only."""
        model.train()
        examples = dict(self._prepare_inputs(inputs))
        names = self.label_names or ["labels"]
        labels = {name: examples.pop(name) for name in names if name in examples}
        if not labels:
            raise DataError(
                f"no record has {' or '.join(names)}: name its labels, by label_names of "
                "TrainingArguments"
            )
        targets = next(iter(labels.values())) if len(labels) == 1 else labels
        with self.compute_loss_context_manager():
            loss = self._private_run.step(examples, targets)
        return torch.tensor(loss, device=self.args.device)


class _EndOfBudget(TrainerCallback):
    """Ends training with the budget, and settles the run."""

    def __init__(self, run: PrivateRun) -> None:
        self._run = run

    def on_step_end(
        self, args: TrainingArguments, state: Any, control: TrainerControl, **running: Any
    ) -> None:
        """Ask training to stop if the budget covers no further step."""
        if not control.should_training_stop and not self._run.has_next_step():
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: Any, control: TrainerControl, **running: Any
    ) -> None:
        """Save the model if asked, commit the run, and write its guarantee to a file."""
        self._run.settle(running["model"])


def _require_whole_steps(args: TrainingArguments) -> None:
    """Raise unless each step is made of one batch, and none can be skipped.

    Raises:
        NoGuaranteeError: see above.
    """
    for refused, option, reason in (
        (args.fp16, "fp16=True", "skips a step where one record's gradient overflows"),
        (args.auto_find_batch_size, "auto_find_batch_size=True", "leaves out a batch's step"),
        (args.gradient_accumulation_steps != 1, "gradient_accumulation_steps",
         "draws several batches for a step that is charged for one"),
    ):  # fmt: skip
        if refused:
            raise NoGuaranteeError(
                f"{option} {reason}: leave it out. Memory is limited by the optimizer's "
                "physical_batch_size, and bf16=True is allowed"
            )
