"""Checkpoints: the state that a run needs to be resumed. The spent budget is the ledger's record.

A checkpoint never rewinds the budget: a resumed run goes on after the last step that was *granted*,
not after the last step in the checkpoint. Steps in between may have been made and seen, so they are
not made again. Random generators are not saved: noise never repeats.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch

from training_client.budget import BEFORE, CHARGED, RESERVATIONS
from training_client.errors import DataError, NoGuaranteeError
from training_client.lab.models import MODELS
from training_client.lab.recipe import Recipe
from training_client.optimizers import OPTIMIZERS, PrivateOptimizer
from training_client.optimizers.base import SOURCE
from training_client.plan import Plan

CHECKPOINT: Final = "checkpoint.pt"
_OPTIMIZER_KEY: Final = "kept"  # of the optimizer state in the file
_UNREADABLE: Final = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, RuntimeError, TypeError,
    UnpicklingError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training run between two steps, from which it can be resumed.

    Attributes:
        recipe: the run's configuration, as in `Recipe.document`.
        dataset: the ledger dataset whose budget the run draws on.
        reservations: the identifiers of the reservations of its steps, in their order: one, or
            with scheduled noise one for each noise multiplier.
        plan: what a step does and costs.
        directions: the released principal components, which are never drawn again.
        steps: steps made when the checkpoint was written.
        model: the state dict of the model.
        optimizer: the state dict of the optimizer; it says what is claimed for the steps, and what
            the state is made of.
    """

    recipe: dict[str, Any]
    dataset: str
    reservations: Sequence[str]
    plan: Plan
    directions: torch.Tensor | None
    steps: int
    model: dict[str, Any]
    optimizer: dict[str, Any]

    def optimizer_state(self, optimizer: PrivateOptimizer) -> dict[str, Any]:
        """Return the optimizer's state; of an earlier version, with what paid for its steps.

        Such a state said nothing of that. But the file did: its run has these reservations.

        Args:
            optimizer: that resumes the run, under the budget of its reservations.
        """
        own, known = optimizer.state_dict(), (CHARGED, BEFORE, RESERVATIONS)
        if not self.reservations or any(key in self.optimizer for key in known):
            return self.optimizer
        return {**self.optimizer, **{key: own[key] for key in known if key in own}}

    def write(self, folder: Path) -> None:
        """Write the checkpoint to a folder; replace an older one atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{CHECKPOINT}.part"
        stored = {**vars(self), "plan": asdict(self.plan)}
        stored[_OPTIMIZER_KEY] = stored.pop("optimizer")
        with part.open("wb") as file:
            torch.save(stored, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / CHECKPOINT)

    @staticmethod
    def require_none(folder: Path) -> None:
        """Raise if a folder already holds a checkpoint, so that a new run must not begin there.

        Raises:
            DataError: the folder holds a run that can still be resumed.
        """
        if (folder / CHECKPOINT).exists():
            raise DataError(
                f"{folder} holds the checkpoint of a run that did not end: continue it with "
                f"--resume, choose another --output, or remove {folder / CHECKPOINT}"
            )

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read the checkpoint in a folder, with its tensors on the CPU.

        Raises:
            DataError: there is no checkpoint, or it cannot be read.
        """
        with report_unreadable(folder):
            stored = _load(folder)
            state = {
                "plan": Plan.from_document(stored["plan"]),
                "optimizer": stored[_OPTIMIZER_KEY],
            }
            kept = {name: value for name, value in stored.items() if name != _OPTIMIZER_KEY}
            if "reservation" in kept:  # the key of an earlier version, for its only reservation
                kept["reservations"] = [kept.pop("reservation")]
            checkpoint = cls(**(kept | state))
            _require_known(Recipe.from_document(checkpoint.recipe))
            if not checkpoint.model or not all(map(torch.is_tensor, checkpoint.model.values())):
                raise ValueError("it has no model weights")
            if not (names := checkpoint.reservations) or not all(isinstance(x, str) for x in names):
                raise ValueError(f"expected identifiers of reservations, got {names!r}")
            checkpoint._require_one_claim()
            return checkpoint

    def _require_one_claim(self) -> None:
        """Raise if the optimizer's state is of another run than the rest; an old one may not say.

        Raises:
            NoGuaranteeError: see above.
        """
        own = {
            SOURCE: Recipe.from_document(self.recipe).state,
            RESERVATIONS: list(self.reservations),
            CHARGED: self.plan.charged_step(),
        }
        for key, value in own.items():
            if (found := self.optimizer.get(key, value)) != value:
                raise NoGuaranteeError(
                    f"the checkpoint's optimizer state has {key} {found!r}, but its run has "
                    f"{value!r}: they are of two runs, and no claim covers both. Restore a copy of "
                    f"{CHECKPOINT}"
                )


@contextmanager
def report_unreadable(folder: Path) -> Iterator[None]:
    """Context manager: turn errors in using a folder's checkpoint into a DataError.

    Raises:
        DataError: the checkpoint does not have the expected content.
    """
    try:
        yield
    except _UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        raise _unreadable_error(
            folder, f"its content is not as this version writes it ({reason})"
        ) from None


def _load(folder: Path) -> Any:
    """Return the content of a folder's checkpoint file, with its tensors on the CPU."""
    try:
        file = (folder / CHECKPOINT).open("rb")
    except OSError as error:
        raise DataError(
            f"no checkpoint to resume in {folder} ({error.strerror}): only an unfinished run with "
            "--dataset has one"
        ) from None
    with file:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except (*_UNREADABLE, OSError):  # PyTorch's own message advises to run code from the file
            raise _unreadable_error(folder, "the file is cut short or not a checkpoint") from None


def _unreadable_error(folder: Path, reason: str) -> DataError:
    """Return the error for a checkpoint that cannot be used, with the reason."""
    return DataError(
        f"no checkpoint to resume in {folder}: {reason}. Restore a copy of {folder / CHECKPOINT}, "
        "or remove it and start a new run without --resume; granted steps stay spent"
    )


def _require_known(recipe: Recipe) -> None:
    """Raise if a checkpoint names an unknown model, optimizer or source of optimizer state."""
    if recipe.model not in MODELS:
        raise ValueError(f"unknown model {recipe.model!r}: there are {', '.join(MODELS)}")
    entry = OPTIMIZERS.get(recipe.optimizer)
    if entry is None or recipe.state not in entry.states:
        raise ValueError(f"unknown optimizer {recipe.optimizer!r} with state {recipe.state!r}")
