"""Read images from four IDX files, the format of MNIST, gzipped or not."""

from __future__ import annotations

import gzip
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from training_client.errors import DataError
from training_client.lab.data.dataset import Dataset

_FILES: Final = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def has_idx(folder: Path) -> bool:
    """Return whether a folder holds all four IDX files (the format of MNIST)."""
    return all(_find_file(folder, name) is not None for name in _FILES)


def read_idx(folder: Path, expected: Sequence[str] | None = None) -> Dataset:
    """Read a data set of images from its four IDX files.

    Args:
        folder: the folder that holds the files.
        expected: the SHA-256 of each unpacked file: training images and labels, then test images
            and labels.

    Raises:
        DataError: a file is missing, is not an IDX file of bytes, does not match the others, or has
            another SHA-256 than expected.
    """
    hashes: Sequence[str | None] = expected or [None] * len(_FILES)
    train, train_labels, test, test_labels = (
        _read_array(folder, name, digest) for name, digest in zip(_FILES, hashes, strict=True)
    )
    if len(train) != len(train_labels) or len(test) != len(test_labels):
        raise DataError(f"{folder}: the numbers of images and of labels differ")
    return Dataset(
        train.flatten(1).float() / 255,
        train_labels.long(),
        test.flatten(1).float() / 255,
        test_labels.long(),
        classes=1 + int(torch.cat([train_labels, test_labels]).max()),
        images=(1, train.shape[1], train.shape[2]),
    )


def _find_file(folder: Path, name: str) -> Path | None:
    """Return the path of an IDX file, gzipped or not; None if it does not exist."""
    candidates = (folder / name, folder / f"{name}.gz")
    return next((file for file in candidates if file.exists()), None)


def _read_array(folder: Path, name: str, expected: str | None) -> torch.Tensor:
    """Read one IDX file of bytes as a tensor; raise if its SHA-256 is not the expected one."""
    file = _find_file(folder, name)
    if file is None:
        raise DataError(f"{folder} has no file {name}")
    packed = file.read_bytes()
    raw = gzip.decompress(packed) if file.suffix == ".gz" else packed
    digest = hashlib.sha256(raw).hexdigest()
    if expected not in (None, digest):
        raise DataError(f"{file} has SHA-256 {digest} (unpacked), expected {expected}")
    dimensions = 3 if "images" in name else 1
    header = 4 + 4 * dimensions
    if raw[:4] != bytes([0, 0, 8, dimensions]) or len(raw) < header:
        raise DataError(f"{file} is not an IDX file of bytes")
    shape = [int(size) for size in np.frombuffer(raw, ">i4", dimensions, 4)]
    if len(raw) != header + math.prod(shape):
        raise DataError(f"{file} is not an IDX file of bytes")
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=header).reshape(shape).copy())
