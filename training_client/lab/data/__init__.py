"""Data sets: downloaded once, checked by SHA-256, and kept in a folder."""

from training_client.lab.data.dataset import Dataset
from training_client.lab.data.registry import (
    DATASETS,
    DatasetInfo,
    declared_public,
    is_sparse,
    load,
    require_size,
    train_size,
)

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetInfo",
    "declared_public",
    "is_sparse",
    "load",
    "require_size",
    "train_size",
]
