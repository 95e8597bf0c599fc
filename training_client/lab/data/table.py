"""Read your own tables, `train.csv` and `test.csv`: a label and then the features in every row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import numpy as np
import torch

from training_client.errors import DataError
from training_client.lab.data.dataset import Dataset

_FILES: Final = ("train.csv", "test.csv")
_FEATURE_MAX: Final = torch.finfo(torch.float32).max
_LABEL_BOUND: Final = float(1 << 53)  # every larger float is an integer, by rounding


def has_tables(folder: Path) -> bool:
    """Return whether a folder holds a CSV file of a training or a test set."""
    return any((folder / name).is_file() for name in _FILES)


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
    labels = torch.cat([train_labels, test_labels])
    classes = 1 + int(labels.max())
    if classes > len(labels):
        raise DataError(
            f"{folder}: the label {classes - 1} is beyond the classes, which count from 0: there "
            f"are {len(labels)} rows"
        )
    return Dataset(train, train_labels, test, test_labels, classes).shuffled()


def _read_table(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features and labels of one CSV file."""
    if not file.is_file():
        raise DataError(f"{file} is missing: your own tables are {' and '.join(_FILES)}")
    try:
        table = np.loadtxt(file, delimiter=",", ndmin=2, skiprows=int(_has_header(file)))
    except (OSError, ValueError) as error:
        fault = _find_fault(file)
        raise DataError(f"{file} is not a table of numbers: {fault or error}") from None
    examples = torch.from_numpy(table[:, 1:]).float()  # large values may overflow
    whole = (np.abs(table[:, :1]) < _LABEL_BOUND).all() and (table[:, :1] % 1 == 0).all()
    if examples.numel() == 0 or not whole or not examples.isfinite().all():
        fault = _find_fault(file)
        raise DataError(
            f"{file} needs an integer label and then finite features in every row, none beyond "
            f"{_FEATURE_MAX:.2g}, the largest single-precision number" + f"; {fault}" * bool(fault)
        )
    labels = table[:, 0].astype(np.int64)
    if labels.min() < 0:
        raise DataError(f"{file}: labels must start at 0, got {labels.min()}")
    return examples, torch.from_numpy(labels)


def _find_fault(file: Path) -> str | None:
    """Return what is wrong with the first line that is at fault, with its number in the file."""
    columns = 0
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or (number == 1 and _has_header(file)):
                continue
            fields = text.split(",")
            columns = columns or len(fields)
            fault = _describe_fault(fields, columns)
            if fault is not None:
                return f"line {number} {fault}"
    return None


def _describe_fault(fields: list[str], columns: int) -> str | None:
    """Return what is wrong with a row that should have so many columns; None if nothing is."""
    if len(fields) == 1 and ";" in fields[0]:
        return "has semicolons: separate with commas"
    if len(fields) == 1 and len(fields[0].split()) > 1:
        return "has spaces or tabs: separate with commas"
    if len(fields) != columns:
        return f"has {len(fields)} columns, and the rows before have {columns}"
    for at, field in enumerate(fields):
        try:
            value = float(field)
        except ValueError:
            return f"has {field.strip()!r}, which is not a number"
        if at == 0 and not (abs(value) < _LABEL_BOUND and value % 1 == 0):
            return f"has the label {field.strip()}, which is not an integer"
        if not abs(value) <= _FEATURE_MAX:
            return f"has {field.strip()}"
    return None


def _has_header(file: Path) -> bool:
    """Return whether a CSV file's first line is a header rather than a row of numbers."""
    with file.open(encoding="utf-8") as lines:
        first = re.split(r"[,;\s]", lines.readline().strip())[0]
    try:
        float(first)
    except ValueError:
        return True
    return False
