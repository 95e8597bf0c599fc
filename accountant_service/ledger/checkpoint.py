"""Signed checkpoints of a verification: the state of each dataset after its last sound entry.

A later verification goes on from a checkpoint. It is signed with the key of the ledger's
certificates, because everything up to it is then taken on trust.
"""

from __future__ import annotations

import json
from typing import Any, Final

from accountant_service.ledger import signing
from accountant_service.ledger.certificate import format_time
from accountant_service.ledger.schema_revision import REVISION
from accountant_service.ledger.verification import States
from accountant_service.version import __version__
from accountant_service.writing.canonical_json import read_json

_FORMAT: Final = "privacy-accountant-checkpoint/1"
# what this program writes; another version may store other columns, or check more of the entries
_WRITER: Final = {"format": _FORMAT, "revision": REVISION, "accountant_version": __version__}


class CheckpointRefusedError(ValueError):
    """A document is no checkpoint that this ledger signed, or another version wrote it."""


def write(states: States, seed: bytes, at: int) -> str:
    """Return a signed checkpoint as JSON.

    Args:
        states: of the datasets, by their names.
        seed: the 32 bytes of the signing key.
        at: microseconds since 1970.
    """
    document: dict[str, Any] = {**_WRITER, "written": format_time(at), "datasets": dict(states)}
    return json.dumps(signing.sign(document, seed)) + "\n"


def read(text: str, seed: bytes) -> States:
    """Return the states of the datasets in a checkpoint, once its signature is verified.

    Raises:
        CheckpointRefusedError: nothing in the document may be trusted.
    """
    try:
        document = read_json(text)
        stated = {name: document[name] for name in _WRITER}
        faults = signing.find_signature_faults(document, signing.derive_public_key(seed))
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointRefusedError(f"it is no checkpoint: {error!r}") from None
    if faults:
        raise CheckpointRefusedError(f"this ledger did not sign it so: {faults[0]}")
    if stated != _WRITER:
        raise CheckpointRefusedError(f"{stated} wrote it, and this is {_WRITER}")
    found: States = document["datasets"]
    return found
