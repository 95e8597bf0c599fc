"""What a run leaves in its folder: the model, what may be said of it, and how to go on.

model.pt               the parameters
privacy.json           what the service claims of all that was released, and of which model
certificate.json       the ledger's certificate of the steps
pca.pt                 the directions that examples are projected on
pca-certificate.json   the ledger's certificate of these
checkpoint.pt          while the run lasts, with a ledger
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from training_client.budget import Budget, LedgerBudget, NoBudget
from training_client.checkpoint import NAME as CHECKPOINT
from training_client.checkpoint import Checkpoint
from training_client.claims import (
    CERTIFICATE,
    MODEL,
    PCA,
    PRIVACY,
    of_model,
    settle,
    unasked,
    write_json,
)
from training_client.errors import ServiceError, TrainingStoppedError
from training_client.optimizers import PrivateOptimizer
from training_client.pca import Projection
from training_client.recipe import Recipe
from training_client.service import Json
from training_client.train import Progress, Result


@dataclass
class Keeping:
    """The folder of one run.

    Attributes:
        recipe: of the run.
        budget: that it draws on.
        model: what is trained.
        optimizer: that trains it.
        projection: of the examples, if there is one.
        folder: where all goes.
        every: steps between checkpoints.
        steps: made so far, those of earlier processes included.
    """

    recipe: Recipe
    budget: Budget | LedgerBudget | NoBudget
    model: nn.Module
    optimizer: PrivateOptimizer
    projection: Projection | None
    folder: Path
    every: int
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        """Some may be made already."""
        self.steps = self.budget.made

    def reporting(self, shown: Callable[[Progress], None]) -> Callable[[Progress], None]:
        """The same reports, with a checkpoint now and then."""

        def report(now: Progress) -> None:
            self.steps = now.step
            shown(now)
            if now.step % self.every == 0:
                self.checkpoint(now.step)

        return report

    def checkpoint(self, steps: int) -> None:
        """Write one, if there is a reservation to go on with."""
        budget = self.budget
        if isinstance(budget, LedgerBudget):
            Checkpoint(
                self.recipe.document,
                budget.dataset,
                budget.reservation.identifier,
                budget.plan,
                None if self.projection is None else self.projection.directions,
                steps,
                self.model.state_dict(),
                self.optimizer.state_dict(),
            ).write(self.folder)

    @contextmanager
    def kept_if_it_stops(self) -> Iterator[None]:
        """What was trained before something stopped it is charged already, so it is kept."""
        try:
            yield
        except TrainingStoppedError as error:
            self.keep_model()
            if isinstance(self.budget, LedgerBudget):
                self.checkpoint(self.budget.reservation.steps_granted)
                if isinstance(error, ServiceError):
                    error.add_note("the run can go on with --resume when there is a service")
            raise

    def keep_model(self) -> None:
        """Write the parameters, the directions their inputs are projected on, and no claim yet."""
        (self.folder / CERTIFICATE).unlink(missing_ok=True)
        write_json(self.folder / PRIVACY, unasked(self.steps))  # an older claim is of another model
        torch.save(self.model.state_dict(), self.folder / MODEL)
        if self.projection is not None:
            torch.save(self.projection.directions, self.folder / PCA)
        write_json(self.folder / PRIVACY, self._of_model(unasked(self.steps)))

    def settle(self, result: Result) -> None:
        """Write what may be said of the model, and commit: then there is nothing to resume."""
        # what is committed cannot be trained again: without an answer a resumed run ends with this
        self.checkpoint(result.steps)
        claim = self._of_model(result.guarantee.document)
        settle(self.budget, result.steps, self.folder, claim)
        (self.folder / CHECKPOINT).unlink(missing_ok=True)

    def _of_model(self, claim: Json) -> Json:
        return of_model(claim, self.folder, self.recipe.declared_public)
