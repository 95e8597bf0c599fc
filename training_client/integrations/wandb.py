"""Weights & Biases: logs ε, δ and the certificate of a run, and logs certified models only.

run = wandb.init(project="patients")
callback = PrivacyCallback(budget, "runs/mine", model_file="model.pt", trackers=[WandbTracker(run)])
...
log_model(run, "patients", "runs/mine/model.pt", "runs/mine/certificate.json", public_key=key)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import wandb

from training_client.integrations.certified_models import require_certified
from training_client.integrations.trackers import (
    DELTA,
    EPSILON,
    list_documents,
    summarise_certificate,
    summarise_claim,
)


class WandbTracker:
    """A tracker that logs to a run of Weights & Biases.

    ε and δ become the metrics `privacy/epsilon` and `privacy/delta`, with the axis `privacy/step`;
    the documents of the run's end become an artifact, and the guarantee part of the summary.

    Args:
        run: what `wandb.init` returned.
        every: steps between two values of the metrics, for example those of an epoch.
    """

    def __init__(self, run: Any, every: int = 1) -> None:
        self._run = run
        self._every = every
        run.define_metric("privacy/*", step_metric="privacy/step")

    def log_spent(self, step: int, epsilon: float, delta: float) -> None:
        """Log ε and δ after a training step."""
        if step % self._every == 0:
            self._run.log({EPSILON: epsilon, DELTA: delta, "privacy/step": step})

    def log_run(self, folder: Path) -> None:
        """Log a run's guarantee in the summary, and its claim and certificate as an artifact."""
        claim = summarise_claim(folder)
        self._run.summary.update(claim)
        artifact = wandb.Artifact(f"privacy-{self._run.id}", type="certificate", metadata=claim)
        for file in list_documents(folder):
            artifact.add_file(str(file))
        self._run.log_artifact(artifact)


def log_model(
    run: Any,
    name: str,
    model: str | Path,
    certificate: str | Path,
    *,
    public_key: str,
    registry: str | None = None,
) -> Any:
    """Log a model's file with its certificate; raise unless the certificate is valid for it.

    Args:
        run: what `wandb.init` returned.
        name: the artifact's.
        model: the model's file.
        certificate: the certificate's file.
        public_key: the ledger's, in hexadecimal, from its operator.
        registry: a path in the registry to link the model to, such as
            `wandb-registry-model/patients`. That needs a server; by default it is not linked.

    Returns:
        The logged artifact, with the model and the certificate.

    Raises:
        NoGuaranteeError: the model's hash has no valid certificate; nothing is logged.
    """
    document = require_certified(model, certificate, public_key=public_key)
    artifact = wandb.Artifact(name, type="model", metadata=summarise_certificate(document))
    for file in (model, certificate):
        artifact.add_file(str(file))
    logged = run.log_artifact(artifact)
    if registry is not None:
        run.link_artifact(logged, registry)
    return logged
