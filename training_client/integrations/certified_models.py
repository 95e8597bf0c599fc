"""A gate before model registries: only a model with a valid certificate passes.

The check is the program `accountant verify`, which is installed with this package. It needs no
service and no network.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from training_client.client import Json
from training_client.errors import NoGuaranteeError

_PROGRAM: Final = "accountant"
_SECONDS_MAX: Final = 600.0


def require_certified(model: str | Path, certificate: str | Path, *, public_key: str) -> Json:
    """Return a certificate if it is valid and names this model's file; else raise.

    Args:
        model: the model's file.
        certificate: the certificate's file.
        public_key: the ledger's, in hexadecimal, from its operator. Anyone can sign a certificate
            with a key of their own.

    Raises:
        NoGuaranteeError: the certificate is not valid, is about another model or about none, is
            signed with another key, or could not be verified.
    """
    found = _find_faults(Path(model), Path(certificate), public_key)
    if found:
        raise NoGuaranteeError(f"{model} has no valid certificate: {'; '.join(found)}")
    document: Json = json.loads(Path(certificate).read_text(encoding="utf-8"))
    return document


def _find_faults(model: Path, certificate: Path, public_key: str) -> list[str]:
    """Return the faults that `accountant verify` finds; empty only if it reports none."""
    folder = Path(sys.executable).parent
    program = shutil.which(_PROGRAM, path=str(folder)) or shutil.which(_PROGRAM)
    if program is None:
        return [f"the program {_PROGRAM} is not installed here"]
    command = [program, "verify", str(certificate), "--model", str(model)]
    try:
        done = subprocess.run(
            [*command, "--public-key", public_key, "--json"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS_MAX,
        )
        faults = _read_faults(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"it could not be verified: {error}"]
    if faults is None:
        return [done.stderr.strip() or f"it could not be verified: exit code {done.returncode}"]
    return faults or ([] if done.returncode == 0 else [f"exit code {done.returncode}"])


def _read_faults(printed: str) -> list[str] | None:
    """Return the faults in the output of `accountant verify --json`; None if it has no list."""
    try:
        answer = json.loads(printed)
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    found = answer.get("faults")
    if found is None and "detail" in answer:  # an option is wrong
        errors = answer.get("errors") or [{"message": answer["detail"]}]
        found = [f"{each.get('option', '')} {each.get('message')}".strip() for each in errors]
    return [str(each) for each in found] if isinstance(found, list) else None
