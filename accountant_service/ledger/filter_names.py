"""The privacy filters that a dataset may be created with, as every surface names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

FilterName = Literal["reference", "renyi", "either", "addition"]
DEFAULT_FILTER: Final = "reference"
FILTERS: Final[Mapping[str, str]] = {
    "reference": "reference steps: the most runs of one kind, and queries before them",
    "renyi": "Rényi divergence: for runs of many kinds",
    "either": "either of these two, each with half of δ: for runs that you cannot foresee",
    "addition": "addition of ε and δ: for queries",
}
assert tuple(FILTERS) == get_args(FilterName)
