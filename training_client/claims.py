"""What a run leaves beside its model: what is claimed of it, and the ledger's certificate.

A claim is of one model: none of an earlier run may stand beside another.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Final

from training_client.budget import Allowance
from training_client.errors import NoGuaranteeError
from training_client.service import Json

PRIVACY: Final = "privacy.json"
CERTIFICATE: Final = "certificate.json"
PCA_CERTIFICATE: Final = "pca-certificate.json"
MODEL: Final = "model.pt"
PCA: Final = "pca.pt"
_LEFT: Final = (PRIVACY, "privacy-participant-*.json", CERTIFICATE, PCA_CERTIFICATE, MODEL, PCA)


def clear(folder: Path) -> Path | None:
    """Remove what an earlier run left, claims before the model that they are of.

    What a ledger was charged for is moved instead, for no later run is charged for it again.

    Returns:
        Where it is now, if there was any.
    """
    left = [file for pattern in _LEFT for file in sorted(folder.glob(pattern))]
    if folder / CERTIFICATE not in left:
        for file in left:
            file.unlink()
        return None
    kept = next(each for n in itertools.count(1) if not (each := folder / f"earlier-{n}").exists())
    kept.mkdir()
    for file in left:
        file.rename(kept / file.name)
    return kept


def unasked(steps: int) -> Json:
    """What may be said of steps that the service was never asked about."""
    reason = f"the run ended before the service could be asked about {steps} steps"
    return {"guarantee": "none", "reason": reason, "steps": steps}


def of_model(claim: Json, folder: Path, declared_public: str | None) -> Json:
    """A claim that says which model it is of, and what it does not cover.

    Args:
        claim: what may be said of the steps.
        folder: where the model is.
        declared_public: what was computed from the private records without noise, if anything.
    """
    digest = hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()
    beside = {} if declared_public is None else {"declared_public": declared_public}
    return {**claim, "model_sha256": digest, **beside}


def write_json(file: Path, document: Json) -> None:
    """Write a document, in a folder that is made if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=2) + "\n")


def settle(allowance: Allowance, steps: int, folder: str | Path, claim: Json | None = None) -> None:
    """End a run: write what may be said of it, and commit what is held for it.

    Args:
        allowance: that the run drew on.
        steps: made, those of earlier processes included.
        folder: where the model is; made if need be.
        claim: what may be said of the model; the service's guarantee by default.

    Raises:
        NoGuaranteeError: more steps were handed out than are said to be made.
        ServiceError: no usable answer. What is held stays held until its lease ends.
    """
    if steps < allowance.taken:
        raise NoGuaranteeError(
            f"step {allowance.taken} was handed out, and no claim may be of {steps} steps"
        )
    home = Path(folder)
    (home / CERTIFICATE).unlink(missing_ok=True)  # of an earlier run, if there is one
    write_json(home / PRIVACY, claim or allowance.guarantee(steps).document)
    certificate = allowance.commit()  # after what may be said, for it may fail
    if certificate is not None:
        write_json(home / CERTIFICATE, certificate)
