"""The files that a run leaves beside its model: its guarantee and the ledger's certificates.

A guarantee belongs to one model, so files of an earlier run are never left beside a new one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Final

from training_client.budget import GRANTS, Allowance
from training_client.client import Json
from training_client.errors import DataError, NoGuaranteeError
from training_client.private_step.processes.shared_budget import SharedBudget

PRIVACY: Final = "privacy.json"
CERTIFICATE: Final = "certificate.json"
PCA_CERTIFICATE: Final = "pca-certificate.json"
MODEL: Final = "model.pt"
PCA: Final = "pca.pt"
_RUN_FILES: Final = (
    PRIVACY,  # first: while files are removed, no guarantee may stay without its model
    "privacy-participant-*.json",
    CERTIFICATE,
    PCA_CERTIFICATE,
    MODEL,
    PCA,
    GRANTS,
)


def clear_earlier_run(folder: Path) -> Path | None:
    """Remove an earlier run's files, or move them away if they include a ledger certificate.

    The ledger charged that run, and charges no later run for it again; its files are kept.

    Returns:
        The folder that they were moved to; None if they were removed, or there were none.
    """
    found = [file for pattern in _RUN_FILES for file in sorted(folder.glob(pattern))]
    if folder / CERTIFICATE not in found:
        for file in found:
            file.unlink()
        return None
    kept = next(each for n in itertools.count(1) if not (each := folder / f"earlier-{n}").exists())
    kept.mkdir()
    for file in found:
        file.rename(kept / file.name)
    return kept


def describe_missing_guarantee(steps: int) -> Json:
    """Return the JSON claim of a run that ended before the service computed its guarantee."""
    reason = f"the run ended before the service could be asked about {steps} steps"
    return {"guarantee": "none", "reason": reason, "steps": steps}


def bind_to_model(guarantee: Json, folder: Path, declared_public: str | None) -> Json:
    """Return a guarantee's JSON with the model file's hash and the declared public data added.

    Args:
        guarantee: the document of the steps' guarantee.
        folder: the folder with the model.
        declared_public: what was computed from the private records without noise, if anything.
    """
    digest = hash_model(folder / MODEL)
    exception = {} if declared_public is None else {"declared_public": declared_public}
    return {**guarantee, "model_sha256": digest, **exception}


def hash_model(file: Path) -> str:
    """Return the SHA-256 of a model's file in lower-case hexadecimal.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read the model's file {file}: {error.strerror}") from None


def write_json(file: Path, document: Json) -> None:
    """Write a JSON document to a file, and create its folder if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=2) + "\n")


def settle(
    allowance: Allowance,
    steps: int,
    folder: str | Path,
    claim: Json | None = None,
    model: str | Path | None = None,
) -> None:
    """End a run: write its guarantee, commit its reservation, and write the certificate.

    Of several processes that share a budget all must call it, and rank 0 writes.

    Args:
        allowance: the run's budget.
        steps: the number of steps made, those of earlier processes included.
        folder: the folder for `privacy.json` and `certificate.json`; created if needed.
        claim: the document to write; the service's guarantee by default. `assumed` is added, which
            lists what the claim rests on beside the theorem's hypotheses.
        model: the file of the trained model, already saved. `privacy.json` and the certificate
            then name its SHA-256, so that `accountant verify --model` can recognise it.

    Raises:
        DataError: the model's file cannot be read; nothing is committed.
        NoGuaranteeError: more than `steps` steps were taken from the budget.
        ServiceError: the service gave no usable answer; the reservation stays until its lease ends.
    """
    if isinstance(allowance, SharedBudget):
        allowance.run(lambda budget: settle(budget, steps, folder, claim, model))
        return
    if steps < allowance.taken:
        raise NoGuaranteeError(
            f"step {allowance.taken} was taken, so no guarantee of {steps} steps can be claimed"
        )
    home = Path(folder)
    (home / CERTIFICATE).unlink(missing_ok=True)  # an earlier run's
    named: Json = {} if model is None else {"model_sha256": hash_model(Path(model))}
    assumed: Json = {"assumed": list(allowance.assumed)} if allowance.has_claim else {}
    document: Json = {**(claim or allowance.guarantee(steps).document), **named, **assumed}
    write_json(home / PRIVACY, document)
    certificate = allowance.commit(document.get("model_sha256"))  # last, for it may fail
    if certificate is not None:
        write_json(home / CERTIFICATE, certificate)
