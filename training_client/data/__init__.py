"""Real data, fetched once, checked by hash, kept in a folder of your choice."""

from training_client.data.dataset import Dataset
from training_client.data.registry import (
    DATASETS,
    Known,
    check,
    declared_public,
    is_sparse,
    load,
    train_size,
)

__all__ = [
    "DATASETS",
    "Dataset",
    "Known",
    "check",
    "declared_public",
    "is_sparse",
    "load",
    "train_size",
]
