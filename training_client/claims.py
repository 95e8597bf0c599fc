"""What a run leaves beside its model: what is claimed of it, and the ledger's certificate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from training_client.budget import Allowance
from training_client.service import Json

PRIVACY: Final = "privacy.json"
CERTIFICATE: Final = "certificate.json"


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
        ServiceError: no usable answer. What is held stays held until its lease ends.
    """
    home = Path(folder)
    write_json(home / PRIVACY, claim or allowance.guarantee(steps).document)
    certificate = allowance.commit()  # after what may be said, for it may fail
    if certificate is not None:
        write_json(home / CERTIFICATE, certificate)
