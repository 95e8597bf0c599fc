"""Read your own tables, `train.csv` and `test.csv`: a label and then the features in every row."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch

from training_client.errors import DataError
from training_client.lab.data.dataset import Dataset

_FILES: Final = ("train.csv", "test.csv")
_LABEL_BOUND: Final = float(1 << 53)  # every larger float is an integer, by rounding


def has_tables(folder: Path) -> bool:
    """Return whether a folder holds the CSV files of a training and a test set."""
    return all((folder / name).is_file() for name in _FILES)


def read_tables(folder: Path) -> Dataset:
    """Read a data set from two CSV files with finite features and integer labels from 0.

    A header line is skipped. Features are used as they are: scaling them by statistics of the data
    would release those statistics without noise.

    Raises:
        DataError: a table is missing or ragged, or holds a value that is not a finite number.
    """
    (train, train_labels), (test, test_labels) = (_read_table(folder / name) for name in _FILES)
    if train.shape[1] != test.shape[1]:
        raise DataError(f"{folder}: train.csv and test.csv differ in their number of columns")
    classes = 1 + int(torch.cat([train_labels, test_labels]).max())
    return Dataset(train, train_labels, test, test_labels, classes).shuffled()


def _read_table(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features and labels of one CSV file."""
    try:
        table = np.loadtxt(file, delimiter=",", ndmin=2, skiprows=int(_has_header(file)))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not a table of numbers: {error}") from None
    examples = torch.from_numpy(table[:, 1:]).float()  # large values may overflow
    whole = (np.abs(table[:, :1]) < _LABEL_BOUND).all() and (table[:, :1] % 1 == 0).all()
    if examples.numel() == 0 or not whole or not examples.isfinite().all():
        raise DataError(
            f"{file} needs an integer label and then finite features in every row, none beyond "
            f"{torch.finfo(examples.dtype).max:.2g}, the largest single-precision number"
        )
    labels = table[:, 0].astype(np.int64)
    if labels.min() < 0:
        raise DataError(f"{file}: labels must start at 0, got {labels.min()}")
    return examples, torch.from_numpy(labels)


def _has_header(file: Path) -> bool:
    """Return whether a CSV file's first line is a header rather than a row of numbers."""
    with file.open(encoding="utf-8") as lines:
        first = lines.readline().split(",")[0]
    try:
        float(first)
    except ValueError:
        return True
    return False
