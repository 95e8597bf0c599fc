"""Checkpoints: what a run needs to go on after it died. What was spent is the ledger's to say.

A checkpoint never rewinds spend: a resumed run goes on after the last step that was *granted*, not
after the last that the checkpoint knows of. Steps in between may have been made and seen, so they
are not made again. Generators are not kept: noise never repeats.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch

from training_client.errors import DataError
from training_client.models import MODELS
from training_client.optimizers import OPTIMIZERS
from training_client.plan import Plan
from training_client.recipe import Recipe

NAME: Final = "checkpoint.pt"
_UNREADABLE: Final = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, RuntimeError, TypeError,
    UnpicklingError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A run between two steps.

    Attributes:
        recipe: what is trained, on what and how; see `Recipe.document`.
        dataset: whose budget it draws on.
        reservation: identifier of what the dataset holds for it.
        plan: what a step does and costs.
        directions: that were released for the examples to be projected on; never drawn again.
        steps: made when this was written.
        model: its parameters.
        kept: what the optimizer keeps.
    """

    recipe: dict[str, Any]
    dataset: str
    reservation: str
    plan: Plan
    directions: torch.Tensor | None
    steps: int
    model: dict[str, Any]
    kept: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Put it in a folder: all of it, or what was there before."""
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{NAME}.part"
        with part.open("wb") as file:
            torch.save({**vars(self), "plan": asdict(self.plan)}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / NAME)

    @staticmethod
    def require_none(folder: Path) -> None:
        """Return if a new run may begin in a folder.

        Raises:
            DataError: one that could still be resumed is there.
        """
        if (folder / NAME).exists():
            raise DataError(
                f"{folder} holds the checkpoint of a run that did not end: go on with it by "
                f"--resume, choose another --output, or remove {folder / NAME}"
            )

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """The one in a folder, on the processor: whoever goes on may have no accelerator.

        Raises:
            DataError: there is none, or it is not one.
        """
        with understood(folder):
            found = _loaded(folder)
            kept = cls(**(found | {"plan": Plan(**found["plan"])}))
            _require_known(Recipe.of(kept.recipe))
            if not kept.model or not all(map(torch.is_tensor, kept.model.values())):
                raise ValueError("it has no weights of a model")
            return kept


@contextmanager
def understood(folder: Path) -> Iterator[None]:
    """What cannot be made of a folder's checkpoint is no fault of the program: around its use.

    Raises:
        DataError: it says something else than this version wrote.
    """
    try:
        yield
    except _UNREADABLE as error:
        said = f"{type(error).__name__}: {error}"
        raise _none_in(folder, f"it is not as this version writes one ({said})") from None


def _loaded(folder: Path) -> Any:
    try:
        file = (folder / NAME).open("rb")
    except OSError as error:
        raise DataError(
            f"no checkpoint to resume in {folder} ({error.strerror}): a run on a ledger's dataset "
            "leaves one until it is done"
        ) from None
    with file:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except (*_UNREADABLE, OSError):  # PyTorch's advice is to run whatever is in the file
            raise _none_in(folder, "the file is cut short, or something else") from None


def _none_in(folder: Path, why: str) -> DataError:
    return DataError(
        f"no checkpoint to resume in {folder}: {why}. Put back a copy of {folder / NAME}, or "
        "remove it and begin a new run without --resume; what was granted stays spent"
    )


def _require_known(recipe: Recipe) -> None:
    """Raise if there is no such model, optimizer or state: before anything is asked or loaded."""
    if recipe.model not in MODELS:
        raise ValueError(f"there is no model {recipe.model!r}; there are {', '.join(MODELS)}")
    entry = OPTIMIZERS.get(recipe.optimizer)
    if entry is None or recipe.state not in entry.states:
        raise ValueError(f"there is no optimizer {recipe.optimizer!r} with state {recipe.state!r}")
