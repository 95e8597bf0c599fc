"""Read a table with a header whose columns hold numbers or codes, as features in [−1, 1].

Bounds and codes come from a published codebook and not from the data, so that scaling and encoding
reveal nothing about a record. An unknown code is 0 in all of its columns.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from training_client.errors import DataError
from training_client.lab.data.dataset import Dataset


@dataclass(frozen=True, slots=True)
class CodedTable:
    """The columns of a table.

    Attributes:
        bounds: the largest size of the values of each numeric column; larger ones are cut.
        codes: the codes of each categorical column.
        label: the column of the label.
        is_positive: whether a value of that column is of class 1.
        separator: between two values of a line.
    """

    bounds: Mapping[str, float]
    codes: Mapping[str, Sequence[str]]
    label: str
    is_positive: Callable[[str], bool]
    separator: str = ","

    @property
    def inputs(self) -> int:
        """The number of features."""
        return len(self.bounds) + sum(map(len, self.codes.values()))

    def read(self, file: Path) -> Dataset:
        """Read a table; a fifth of the rows, in a fixed random order, is the test set.

        Raises:
            DataError: a column is missing, a value is not a number, or there are too few rows.
        """
        rows = self._read_rows(file)
        if len(rows) < 5:
            raise DataError(f"{file} has {len(rows)} rows, at least 5 are needed")
        table = torch.tensor(rows, dtype=torch.float32)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        table = table[order]
        test, train = table[: len(rows) // 5], table[len(rows) // 5 :]
        return Dataset(train[:, 1:], train[:, 0].long(), test[:, 1:], test[:, 0].long(), classes=2)

    def _read_rows(self, file: Path) -> list[list[float]]:
        """Return the label and the features of each row."""
        try:
            with file.open(newline="", encoding="utf-8-sig") as lines:
                reader = csv.DictReader(lines, delimiter=self.separator)
                columns = {*self.bounds, *self.codes, self.label}
                if missing := sorted(columns - set(reader.fieldnames or ())):
                    raise DataError(f"{file} has no column {', '.join(missing)}")
                return [self._encode(file, reader.line_num, row) for row in reader]
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{file} is not a table: {error}") from None

    def _encode(self, file: Path, line: int, row: Mapping[str, str | None]) -> list[float]:
        """Return the label and the features of a row."""
        try:
            label = float(self.is_positive(row[self.label] or ""))
            numbers = [float(row[name] or "") / bound for name, bound in self.bounds.items()]
        except ValueError as error:
            raise DataError(f"{file}:{line}: {error}") from None
        if any(number != number for number in numbers):
            raise DataError(f"{file}:{line}: a value is NaN")
        scaled = [max(-1.0, min(1.0, number)) for number in numbers]
        chosen = [float(row[name] == code) for name, known in self.codes.items() for code in known]
        return [label, *scaled, *chosen]
