"""Experiment trackers: what a callback tells MLflow or Weights & Biases about a run's privacy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, Protocol

from training_client.client import Json
from training_client.run_report import CERTIFICATE, PRIVACY

EPSILON: Final = "privacy/epsilon"
DELTA: Final = "privacy/delta"


class RunTracker(Protocol):
    """Interface of an experiment tracker, which logs a run's privacy."""

    def log_spent(self, step: int, epsilon: float, delta: float) -> None:
        """Log ε and δ after a training step.

        Args:
            step: the step that was just charged, counted from 1.
            epsilon: ε of all steps that the budget has allowed so far.
            delta: δ of that ε.
        """

    def log_run(self, folder: Path) -> None:
        """Log the guarantee, claim and certificate at the end of a run.

        Args:
            folder: the folder with `privacy.json`, and `certificate.json` if there is a ledger.
        """


def list_documents(folder: Path) -> list[Path]:
    """Return the files of a run's privacy claim and certificate."""
    return [file for name in (PRIVACY, CERTIFICATE) if (file := folder / name).exists()]


def summarise_claim(folder: Path) -> dict[str, str | float]:
    """Return a run's guarantee as a flat dictionary of values for trackers to show."""
    claim: Json = json.loads((folder / PRIVACY).read_text())
    shown = ("epsilon", "delta", "status", "method", "steps", "model_sha256")
    return {f"privacy.{name}": claim[name] for name in shown if name in claim}


def summarise_certificate(certificate: Json) -> dict[str, str]:
    """Return the facts of a certificate that a registry shows beside a model."""
    guarantee = certificate["guarantee"]
    return {
        "privacy.epsilon": str(guarantee["epsilon"]),
        "privacy.delta": str(guarantee["delta"]),
        "privacy.dataset": str(certificate["dataset"]),
        "privacy.reservation": str(certificate["reservation"]),
        "privacy.model_sha256": str(certificate["declared"]["model_sha256"]),
    }
