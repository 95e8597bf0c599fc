"""The hash of a trained model's file, for commands with the option `--model`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from accountant_service.cli.problems import CommandProblemError, build_problem

POINTER: Final = "/model_sha256"


def hash_model(file: Path) -> str:
    """Return the SHA-256 of a model's file in hexadecimal.

    Raises:
        CommandProblemError: the file cannot be read.
    """
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        message = f"cannot read the file {str(file)!r}: {error.strerror}"
        raise CommandProblemError(build_problem(message, POINTER)) from None
