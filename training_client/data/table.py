"""Tables of your own: `train.csv` and `test.csv`, a label and then the features in every row."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch

from training_client.data.dataset import Dataset
from training_client.errors import DataError

_FILES: Final = ("train.csv", "test.csv")
_LARGEST: Final = float(1 << 53)  # of a class: larger numbers are whole by rounding


def has_tables(folder: Path) -> bool:
    """Whether a folder holds both of them."""
    return all((folder / name).is_file() for name in _FILES)


def read_tables(folder: Path) -> Dataset:
    """A data set from two tables: labels are whole numbers from 0, features any numbers.

    A first line of names is left out. Features are taken as they are: whoever scales them by what
    the data say releases that without noise.

    Raises:
        DataError: a table is missing, ragged, or holds what is no number.
    """
    (train, train_labels), (test, test_labels) = (_table(folder / name) for name in _FILES)
    if train.shape[1] != test.shape[1]:
        raise DataError(f"{folder}: train.csv and test.csv have not as many columns")
    classes = 1 + int(torch.cat([train_labels, test_labels]).max())
    return Dataset(train, train_labels, test, test_labels, classes).shuffled()


def _table(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        table = np.loadtxt(file, delimiter=",", ndmin=2, skiprows=_header_lines(file))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not a table of numbers: {error}") from None
    examples = torch.from_numpy(table[:, 1:]).float()  # where numbers may be too large
    whole = (np.abs(table[:, :1]) < _LARGEST).all() and (table[:, :1] % 1 == 0).all()
    if examples.numel() == 0 or not whole or not examples.isfinite().all():
        raise DataError(
            f"{file} needs a whole number and then finite features in every row, none beyond "
            f"{torch.finfo(examples.dtype).max:.2g}, the most that single precision holds"
        )
    labels = table[:, 0].astype(np.int64)
    if labels.min() < 0:
        raise DataError(f"{file}: classes begin at 0, not at {labels.min()}")
    return examples, torch.from_numpy(labels)


def _header_lines(file: Path) -> int:
    """1 if the first line begins with a name."""
    with file.open(encoding="utf-8") as lines:
        first = lines.readline().split(",")[0]
    try:
        float(first)
    except ValueError:
        return 1
    return 0
