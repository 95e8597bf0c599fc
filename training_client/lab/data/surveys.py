"""BANK and IPUMS, the tables of papers/003 beside Adult."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from training_client.errors import NotFetchedError
from training_client.lab.data.coded_table import CodedTable
from training_client.lab.data.dataset import Dataset

_YES_NO: Final = ("no", "yes")
BANK: Final = CodedTable(  # the attributes of UCI's bank-names.txt
    bounds={
        "age": 100.0, "balance": 100_000.0, "day": 31.0, "duration": 5000.0, "campaign": 60.0,
        "pdays": 900.0, "previous": 60.0,
    },
    codes={
        "job": (
            "admin.", "unknown", "unemployed", "management", "housemaid", "entrepreneur",
            "student", "blue-collar", "self-employed", "retired", "technician", "services",
        ),
        "marital": ("married", "divorced", "single"),
        "education": ("unknown", "secondary", "primary", "tertiary"),
        "default": _YES_NO,
        "housing": _YES_NO,
        "loan": _YES_NO,
        "contact": ("unknown", "telephone", "cellular"),
        "month": (
            "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
        ),
        "poutcome": ("unknown", "other", "failure", "success"),
    },
    label="y",
    is_positive=lambda answer: answer == "yes",
    separator=";",
)  # fmt: skip
_INCOME: Final = 300.0  # papers/003 Table 1
IPUMS: Final = CodedTable(  # harmonised variables of IPUMS-International
    bounds={"AGE": 100.0, "FAMSIZE": 30.0, "NCHILD": 9.0, "YRSCHOOL": 18.0, "HRSWORK1": 140.0},
    codes={
        "SEX": ("1", "2"),
        "MARST": ("1", "2", "3", "4"),
        "URBAN": ("1", "2"),
        "OWNERSHIP": ("1", "2"),
        "LIT": ("1", "2"),
        "SCHOOL": ("1", "2", "3", "4"),
        "NATIVITY": ("1", "2"),
        "RACE": ("10", "20", "30", "40", "51"),
        "EDATTAIN": ("1", "2", "3", "4"),
        "EMPSTAT": ("1", "2", "3"),
        "CLASSWK": ("1", "2", "3", "4"),
    },
    label="INCTOT",
    is_positive=lambda income: float(income) > _INCOME,
)


def find_bank(folder: Path) -> Path | None:
    """Return the file of BANK; None if it is not there."""
    return _find(folder, "bank", "bank-full.csv")


def find_ipums(folder: Path) -> Path | None:
    """Return the file of IPUMS; None if it is not there."""
    return _find(folder, "ipums", "ipums.csv")


def bank(folder: Path) -> Dataset:
    """Load BANK: 45 211 people who were offered a deposit, and whether they took it.

    Raises:
        NotFetchedError: the file is not there.
        DataError: it is not the expected table.
    """
    return _load(BANK, find_bank, folder, "bank", "UCI's Bank Marketing", "bank-full.csv")


def ipums(folder: Path) -> Dataset:
    """Load IPUMS: people of the census of Brazil, and whether they earn more than 300 a month.

    Raises:
        NotFetchedError: the file is not there.
        DataError: it is not the expected table.
    """
    columns = ", ".join((*IPUMS.bounds, *IPUMS.codes, IPUMS.label))
    source = f"an extract of IPUMS-International as CSV with the variables {columns}"
    return _load(IPUMS, find_ipums, folder, "ipums", source, "ipums.csv")


def _load(
    table: CodedTable,
    find: Callable[[Path], Path | None],
    folder: Path,
    name: str,
    source: str,
    file_name: str,
) -> Dataset:
    """Read a table from its file; say where it is obtained if the file is not there."""
    file = find(folder)
    if file is None:
        raise NotFetchedError(
            f"{name} was not found: put {source} into {folder / name / file_name}"
        )
    return table.read(file)


def _find(folder: Path, name: str, file_name: str) -> Path | None:
    """Return the path of a file in a folder, or in the one named after the data set in there."""
    files = (folder / name / file_name, folder / file_name)
    return next((file for file in files if file.is_file()), None)
