"""Where results go: looked at before anything is trained for them, then held by one run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from training_client.errors import DataError

LOCK: Final = ".lock"


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


def require_free(folder: Path) -> None:
    """Return if no other run trains into a folder, whose checkpoint were taken for a dead one's.

    Raises:
        DataError: another run does.
    """
    if (folder / LOCK).exists():
        with held(folder):
            pass


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Nobody else trains into a folder meanwhile, so that a claim is of the model beside it.

    A process that dies lets go of it. The folder is made if need be.

    Raises:
        DataError: another run holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise DataError(
            f"another run trains into {folder}: wait for its end, or choose another --output"
        ) from None
    try:
        yield
    finally:
        lock.release()
