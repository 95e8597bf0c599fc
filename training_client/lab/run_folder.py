"""The output folder of a run: its model, privacy claim, certificates and checkpoint.

model.pt               the parameters
privacy.json           the privacy claim for everything released, and the hash of the model
certificate.json       the ledger's certificate for the steps; with scheduled noise several
pca.pt                 the principal components that examples are projected on
pca-certificate.json   the ledger's certificate for the components
checkpoint.pt          while a run with a ledger lasts
granted.json           while a run with a ledger lasts: the steps that the ledger has granted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from training_client.budget import GRANTS, Budget, NoBudget
from training_client.client import Json
from training_client.errors import ServiceError, ServiceRefusedError, TrainingStoppedError
from training_client.lab.checkpoint import CHECKPOINT, Checkpoint
from training_client.lab.pca import Projection
from training_client.lab.recipe import Recipe
from training_client.lab.train import Progress, Result
from training_client.optimizers import PrivateOptimizer
from training_client.phased_budget import ChargedBudget
from training_client.run_report import (
    CERTIFICATE,
    MODEL,
    PCA,
    PRIVACY,
    bind_to_model,
    describe_missing_guarantee,
    settle,
    write_json,
)


@dataclass
class RunFolder:
    """Writes one run's model, privacy claim and checkpoints to its output folder.

    Attributes:
        recipe: the run's configuration.
        budget: the budget that the run draws on.
        model: the model that is trained.
        optimizer: the optimizer that trains it.
        projection: the projection of the examples, if there is one.
        folder: the folder to write to.
        checkpoint_every: steps between checkpoints.
        steps: steps made so far, including those of earlier processes.
    """

    recipe: Recipe
    budget: Budget | ChargedBudget | NoBudget
    model: nn.Module
    optimizer: PrivateOptimizer
    projection: Projection | None
    folder: Path
    checkpoint_every: int
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        """Start the step count at the number of steps that the budget has already granted."""
        self.steps = self.budget.made

    def with_checkpoints(self, show: Callable[[Progress], None]) -> Callable[[Progress], None]:
        """Return a progress callback that calls `show`, and writes checkpoints when due."""

        def report(now: Progress) -> None:
            """Show the progress, and write a checkpoint if one is due."""
            self.steps = now.step
            show(now)
            if now.step % self.checkpoint_every == 0:
                self.write_checkpoint(now.step)

        return report

    def write_checkpoint(self, steps: int) -> None:
        """Write a checkpoint if the run has a ledger reservation with which it can be resumed."""
        budget = self.budget
        if isinstance(budget, ChargedBudget):
            Checkpoint(
                self.recipe.document,
                budget.dataset,
                budget.reservations,
                budget.plan,
                None if self.projection is None else self.projection.directions,
                steps,
                self.model.state_dict(),
                self.optimizer.state_dict(),
            ).write(self.folder)

    @contextmanager
    def save_on_error(self) -> Iterator[None]:
        """Context manager: save the model and a checkpoint if an error is raised."""
        try:
            yield
        except TrainingStoppedError as error:
            self.save_model()
            if isinstance(self.budget, ChargedBudget):
                self.write_checkpoint(self.budget.made)
                if not isinstance(error, ServiceRefusedError) and isinstance(error, ServiceError):
                    error.add_note("resume the run with --resume when the service is back")
            raise

    def save_model(self) -> None:
        """Save model parameters, PCA projection, and a privacy.json without a claim yet."""
        (self.folder / CERTIFICATE).unlink(missing_ok=True)
        write_json(
            self.folder / PRIVACY, describe_missing_guarantee(self.steps)
        )  # an older claim belongs to another model
        torch.save(self.model.state_dict(), self.folder / MODEL)
        if self.projection is not None:
            torch.save(self.projection.directions, self.folder / PCA)
        write_json(
            self.folder / PRIVACY, self._bind_to_model(describe_missing_guarantee(self.steps))
        )

    def finish(self, result: Result) -> None:
        """Write the privacy claim, commit the reservation, remove checkpoint and grant record."""
        # if the commit gets no answer, a resumed run has no step left to make and commits again
        self.write_checkpoint(result.steps)
        claim = self._bind_to_model(result.guarantee.document)
        settle(self.budget, result.steps, self.folder, claim)
        (self.folder / CHECKPOINT).unlink(missing_ok=True)
        (self.folder / GRANTS).unlink(missing_ok=True)

    def _bind_to_model(self, claim: Json) -> Json:
        """Return a privacy claim with the saved model's SHA-256 added."""
        return bind_to_model(claim, self.folder, self.recipe.declared_public)
