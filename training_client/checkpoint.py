"""Checkpoints: what a run needs to go on after it died. What was spent is the ledger's to say.

A checkpoint never rewinds spend: a resumed run goes on after the last step that was *granted*, not
after the last that the checkpoint knows of. Steps in between may have been made and seen, so they
are not made again. Generators are not kept: noise never repeats.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from training_client.errors import DataError
from training_client.plan import Plan

NAME: Final = "checkpoint.pt"


@dataclass(frozen=True)
class Checkpoint:
    """A run between two steps.

    Attributes:
        recipe: what is trained, on what and how; see `Recipe.document`.
        dataset: whose budget it draws on.
        reservation: identifier of what the dataset holds for it.
        delta: of that budget.
        plan: what a step does and costs.
        directions: that were released for the examples to be projected on; never drawn again.
        steps: made when this was written.
        model: its parameters.
        kept: what the optimizer keeps.
    """

    recipe: dict[str, Any]
    dataset: str
    reservation: str
    delta: float
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
        """The one in a folder.

        Raises:
            DataError: there is none, or it is not one.
        """
        try:
            found = torch.load(folder / NAME, weights_only=True)
            return cls(**(found | {"plan": Plan(**found["plan"])}))
        except (OSError, TypeError, KeyError, ValueError, RuntimeError) as error:
            raise DataError(f"no checkpoint to resume in {folder}: {error}") from None
