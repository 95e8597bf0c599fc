"""Programs as users of Opacus write them, in its three frameworks.

Its imports take ten seconds: tests reach it as a `LazyModule`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytorch_lightning
import torch
import transformers
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from training_client.budget import Allowance
from training_client.integrations import huggingface, lightning
from training_client.integrations.framework_optimizer import PrivateLoader
from training_client.integrations.huggingface_engine import PrivateTrainer
from training_client.integrations.lightning_engine import PrivateModule
from training_client.integrations.opacus.balls_in_bins import balls_in_bins_loader
from training_client.integrations.opacus.step_gate import StepGate
from training_client.lab.models import cross_entropy
from training_client.optimizers import PrivateOptimizer
from training_client.plan import Plan

RECORDS, BATCH = 400, 20
PLAN = Plan(RECORDS, BATCH / RECORDS, 1.0, 1.0)


class Records(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.examples = torch.randn(RECORDS, 6)
        self.targets = torch.randint(0, 2, (RECORDS,))

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"examples": self.examples[row], "labels": self.targets[row]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, examples: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.linear(examples)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class CountingSGD(torch.optim.SGD):
    """Knows how many steps it made, and what they left."""

    made = 0
    left: tuple[torch.Tensor, ...] = ()

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.made += 1
        self.left = copies(self)
        return None


def copies(optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, ...]:
    return tuple(each.detach().clone() for each in optimizer.param_groups[0]["params"])


@dataclass
class Private:
    """A model, its optimizer and its loader, made private by Opacus.

    Attributes:
        options: of `make_private`, beside what is usual here.
        workers: that load records, ahead of the model.
        accountant: of the engine; Opacus' own by default.
        balls_in_bins: whether each pass puts the records into bins, in place of Poisson sampling.
        batch_size: of the loader.
    """

    options: dict[str, Any] = field(default_factory=dict)
    workers: int = 0
    accountant: str = "prv"
    balls_in_bins: bool = False
    batch_size: int = BATCH

    def __post_init__(self) -> None:
        self.net = Net()
        self.sgd = CountingSGD(self.net.parameters(), lr=0.1)
        usual: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "wrap_model": False}
        loader: Any = DataLoader(Records(), self.batch_size, num_workers=self.workers)
        if self.balls_in_bins:
            loader, usual["poisson_sampling"] = balls_in_bins_loader(loader), False
        self.engine = PrivacyEngine(accountant=self.accountant)
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.net, optimizer=self.sgd, data_loader=loader, **(usual | self.options)
        )
        self.begun_with = copies(self.sgd)

    @property
    def untouched_since(self) -> bool:
        """True if the parameters are as the last step left them."""
        left = self.sgd.left or self.begun_with
        return all(map(torch.equal, copies(self.sgd), left))

    def split(self, size: int = 4) -> Any:
        """Return the batches of the loader, split into physical batches of a size."""
        with BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=size, optimizer=self.optimizer
        ) as parts:
            return parts

    def gated(self, allowance: Allowance, loader: Any = None) -> StepGate:
        """Return a gate that guards the optimizer, with the own or another loader."""
        gate = StepGate(allowance)
        gate.guard(self.optimizer, self.loader if loader is None else loader)
        return gate


def step(private: Private, batch: dict[str, Any] | None = None) -> None:
    private.optimizer.zero_grad()
    private.net(**batch or next(iter(private.loader)))["loss"].backward()
    private.optimizer.step()


class InLightning:
    """Fits with Lightning; with manual optimization if several steps a batch are asked for."""

    overruled: ClassVar[dict[str, Any]] = {"min_steps": 100}

    def fit(
        self,
        private: Private,
        allowance: Allowance,
        folder: Path,
        *,
        steps_max: int = -1,
        accumulate: int = 1,
        resume: bool = False,
        by_hand: int = 0,
        data: Any = None,
        methods: dict[str, Any] | None = None,
        epochs: int = 20,
        told: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        class Module(pytorch_lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = private.net
                self.automatic_optimization = not by_hand

            def training_step(self, batch: dict[str, torch.Tensor], _: int) -> Any:
                for _ in range(by_hand):
                    self.optimizers().zero_grad()
                    self.manual_backward(self.net(**batch)["loss"])
                    self.optimizers().step()
                return None if by_hand else self.net(**batch)["loss"]

            def configure_optimizers(self) -> Any:
                return private.optimizer

        for name, method in (methods or {}).items():
            setattr(Module, name, method)
        saving = ModelCheckpoint(folder / ("after" if resume else "before"), save_last=True)
        trainer = pytorch_lightning.Trainer(
            max_epochs=epochs,
            max_steps=steps_max,
            accumulate_grad_batches=accumulate,
            callbacks=[lightning.PrivacyCallback(allowance, folder, **(told or {})), saving],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        ckpt = folder / "before/last.ckpt" if resume else None
        trainer.fit(Module(), data or private.loader, ckpt_path=ckpt, weights_only=False)


class GoesOn(transformers.TrainerCallback):
    """Does not let training stop."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        control.should_training_stop = False


class InHuggingFace:
    """Trains with transformers; additional steps of a batch are made by hand, before its own."""

    overruled: ClassVar[dict[str, Any]] = {"more": [GoesOn()]}

    def fit(
        self,
        private: Private,
        allowance: Allowance,
        folder: Path,
        *,
        steps_max: int = -1,
        accumulate: int = 1,
        resume: bool = False,
        by_hand: int = 0,
        more: list[Any] | None = None,
        told: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        class Trainer(transformers.Trainer):
            def get_train_dataloader(self) -> Any:
                return private.loader

            def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *more: Any) -> Any:
                for _ in range(by_hand):
                    step(private, inputs)
                    private.optimizer.zero_grad()
                return super().training_step(model, inputs, *more)

        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=20,
            max_steps=steps_max,
            gradient_accumulation_steps=accumulate,
            save_strategy="epoch",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **options,
        )
        privacy = huggingface.PrivacyCallback(allowance, folder, **(told or {}))
        callbacks = [privacy, *(more or [])]
        trainer = Trainer(
            private.net, arguments, optimizers=(private.optimizer, None), callbacks=callbacks
        )
        trainer.train(resume_from_checkpoint=resume or None)


class EngineInLightning:
    """Fits with Lightning and this project's engine."""

    half: ClassVar[dict[str, Any]] = {"precision": "bf16-true"}

    def fit(
        self,
        net: nn.Module,
        optimizer: PrivateOptimizer,
        folder: Path,
        *,
        epochs: int = 20,
        resume: bool = False,
        told: dict[str, Any] | None = None,
        loader: Any = None,
        skip: bool = False,
        **options: Any,
    ) -> None:
        class Module(PrivateModule):
            def split_batch(self, batch: dict[str, torch.Tensor]) -> Any:
                return batch["examples"], batch["labels"]

            def training_step(self, batch: Any, batch_idx: int) -> None:
                if not skip:
                    super().training_step(batch, batch_idx)

        saving = ModelCheckpoint(folder / ("after" if resume else "before"), save_last=True)
        trainer = pytorch_lightning.Trainer(
            max_epochs=epochs,
            callbacks=[saving],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        ckpt = folder / "before/last.ckpt" if resume else None
        trainer.fit(
            Module(net, optimizer, cross_entropy, folder, **(told or {})),
            loader or PrivateLoader(optimizer, Records()),
            ckpt_path=ckpt,
            weights_only=False,
        )


class Classifier(nn.Module):
    """A model of Hugging Face's kind: it is called with a record's fields."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(examples)
        return found


class EngineInHuggingFace:
    """Trains with transformers and this project's engine."""

    half: ClassVar[dict[str, Any]] = {"fp16": True}

    def fit(
        self,
        net: nn.Module,
        optimizer: PrivateOptimizer,
        folder: Path,
        *,
        epochs: int = 20,
        resume: bool = False,
        told: dict[str, Any] | None = None,
        loader: Any = None,
        skip: bool = False,
        **options: Any,
    ) -> None:
        class Mine(PrivateTrainer):
            def get_train_dataloader(self) -> Any:
                return loader or super().get_train_dataloader()

            def training_step(self, *of: Any) -> Any:
                return torch.tensor(0.0) if skip else super().training_step(*of)

        usual = {"lr_scheduler_type": "constant", "save_strategy": "epoch", "fp16": False}
        arguments = transformers.TrainingArguments(
            output_dir=str(folder), num_train_epochs=epochs, report_to=[], disable_tqdm=True,
            use_cpu=True, **(usual | options),
        )  # fmt: skip
        trainer = Mine(
            net, arguments, train_dataset=Records(), private=optimizer, losses=cross_entropy,
            output=folder, **(told or {}),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume or None)


def tiny_bert() -> nn.Module:
    """Return a classifier of Hugging Face, of two layers."""
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=8, num_labels=2,
        )
    )  # fmt: skip
