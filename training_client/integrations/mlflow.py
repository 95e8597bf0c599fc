"""MLflow: logs ε, δ and the certificate of a run, and registers certified models only.

callback = PrivacyCallback(budget, "runs/mine", model_file="model.pt", trackers=[MlflowTracker()])
...
register_model("patients", "runs/mine/model.pt", "runs/mine/certificate.json", public_key=key)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from training_client.errors import DataError
from training_client.integrations.certified_models import require_certified
from training_client.integrations.trackers import (
    DELTA,
    EPSILON,
    list_documents,
    summarise_certificate,
    summarise_claim,
)

_FOLDER: Final = "privacy"
_MODEL_FOLDER: Final = "certified_model"
_EXISTS: Final = "RESOURCE_ALREADY_EXISTS"


class MlflowTracker:
    """A tracker that logs to a run of MLflow.

    ε and δ become the metrics `privacy/epsilon` and `privacy/delta`, the documents of the run's end
    become artifacts in `privacy/`, and the guarantee becomes tags.

    Args:
        run_id: the run of MLflow; by default the active one.
        every: steps between two values of the metrics, for example those of an epoch.
    """

    def __init__(self, run_id: str | None = None, every: int = 1) -> None:
        self._run_id = run_id
        self._every = every

    def log_spent(self, step: int, epsilon: float, delta: float) -> None:
        """Log ε and δ after a training step.

        Raises:
            DataError: no run of MLflow is active.
        """
        if step % self._every:
            return
        run_id, client = _find_run_id(self._run_id), MlflowClient()
        client.log_metric(run_id, EPSILON, epsilon, step=step)
        client.log_metric(run_id, DELTA, delta, step=step)

    def log_run(self, folder: Path) -> None:
        """Log a run's guarantee as tags, and its claim and certificate as artifacts.

        Raises:
            DataError: no run of MLflow is active.
        """
        run_id, client = _find_run_id(self._run_id), MlflowClient()
        for name, value in summarise_claim(folder).items():
            client.set_tag(run_id, name, value)
        for file in list_documents(folder):
            client.log_artifact(run_id, str(file), _FOLDER)


def register_model(
    name: str,
    model: str | Path,
    certificate: str | Path,
    *,
    public_key: str,
    run_id: str | None = None,
) -> Any:
    """Register a model's file with its certificate; raise unless the certificate is valid for it.

    Args:
        name: the registered model's.
        model: the model's file.
        certificate: the certificate's file.
        public_key: the ledger's, in hexadecimal, from its operator.
        run_id: the run of MLflow that keeps the files; by default the active one.

    Returns:
        MLflow's `ModelVersion`. Its files are the model and the certificate.

    Raises:
        NoGuaranteeError: the model's hash has no valid certificate; nothing is registered.
        DataError: no run of MLflow is active.
    """
    document = require_certified(model, certificate, public_key=public_key)
    run_id, client = _find_run_id(run_id), MlflowClient()
    for file in (model, certificate):
        client.log_artifact(run_id, str(file), _MODEL_FOLDER)
    _create_registered_model(client, name)
    source = f"{client.get_run(run_id).info.artifact_uri}/{_MODEL_FOLDER}"
    return client.create_model_version(
        name, source, run_id=run_id, tags=summarise_certificate(document)
    )


def _create_registered_model(client: MlflowClient, name: str) -> None:
    """Create a registered model unless there is one of this name."""
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != _EXISTS:
            raise


def _find_run_id(given: str | None) -> str:
    """Return the given run's id, or the active run's.

    Raises:
        DataError: none is given, and none is active.
    """
    active = mlflow.active_run()
    if given is None and active is None:
        raise DataError("no run of MLflow is active: call mlflow.start_run(), or give run_id")
    return given or str(active.info.run_id)
