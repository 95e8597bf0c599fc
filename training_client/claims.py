"""What a run leaves beside its model: what is claimed of it, and the ledger's certificate."""

from __future__ import annotations

import json
from pathlib import Path

from training_client.budget import Allowance
from training_client.service import Json


def write_claims(folder: str | Path, claim: Json, certificate: Json | None) -> None:
    """Write `privacy.json`, and `certificate.json` if there is a certificate.

    Args:
        folder: where the model is; made if need be.
        claim: what may be said of the model.
        certificate: from the ledger.
    """
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    for name, document in (("privacy", claim), ("certificate", certificate)):
        if document is not None:
            (home / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")


def settle(allowance: Allowance, steps: int, folder: str | Path) -> None:
    """End a run: commit what is held for it, and write what may be said of it.

    Args:
        allowance: that the run drew on.
        steps: made, those of earlier processes included.
        folder: where the model is.

    Raises:
        ServiceError: no usable answer. What is held stays held until its lease ends.
    """
    claim = allowance.guarantee(steps).document
    write_claims(folder, claim, None)  # before the commit, which may fail
    write_claims(folder, claim, allowance.commit())
