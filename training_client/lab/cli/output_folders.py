"""Output folders: checked before the training, then locked by one run."""

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
    """Raise if a folder cannot be created or written to, without creating it.

    Raises:
        DataError: it cannot be.
    """
    existing = next(
        each for each in chain([folder.absolute()], folder.absolute().parents) if each.exists()
    )
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise DataError(
            f"{folder} cannot be written to ({existing} is not a writable folder): choose another "
            "--output"
        )


def require_unlocked(folder: Path) -> None:
    """Raise if another run is writing to this folder.

    Raises:
        DataError: another run holds the lock.
    """
    if (folder / LOCK).exists():
        with lock_folder(folder):
            pass


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Context manager that locks a folder, created if needed, for one run.

    The lock ends with the process.

    Raises:
        DataError: another run holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise DataError(
            f"another run trains into {folder}: wait for it to end, or choose another --output"
        ) from None
    try:
        yield
    finally:
        lock.release()
