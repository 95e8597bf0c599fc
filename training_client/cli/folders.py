"""Where results go, looked at before anything is trained for them."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

from training_client.errors import DataError


def require_writable(folder: Path) -> None:
    """Return if a folder can be written to, or made; it is not made yet.

    Raises:
        DataError: it cannot.
    """
    there = next(
        each for each in chain([folder.absolute()], folder.absolute().parents) if each.exists()
    )
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise DataError(
            f"{there} is no folder that {folder.name} can be written to: choose another"
        )
