"""Images in the four IDX files that MNIST was first given out in, gzipped or not."""

from __future__ import annotations

import gzip
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from training_client.data.dataset import Dataset, Images
from training_client.errors import DataError

_PARTS: Final = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def has_idx(folder: Path) -> bool:
    """Whether a folder holds all four of them."""
    return all(_file(folder, part) is not None for part in _PARTS)


def read_idx(folder: Path, expected: Sequence[str] | None = None) -> Dataset:
    """A data set of images from its four IDX files.

    Args:
        folder: where they are.
        expected: the SHA-256 of each, unpacked: training images and labels, then the test set's.

    Raises:
        DataError: a file is missing, is not an IDX file of bytes, does not go with the others, or
            is another than expected.
    """
    hashes: Sequence[str | None] = expected or [None] * len(_PARTS)
    train, train_labels, test, test_labels = (
        _table(folder, part, digest) for part, digest in zip(_PARTS, hashes, strict=True)
    )
    if len(train) != len(train_labels) or len(test) != len(test_labels):
        raise DataError(f"{folder} has not as many labels as images")
    return Dataset(
        train.flatten(1).float() / 255,
        train_labels.long(),
        test.flatten(1).float() / 255,
        test_labels.long(),
        classes=1 + int(torch.cat([train_labels, test_labels]).max()),
        images=_images(train),
    )


def _images(pictures: torch.Tensor) -> Images:
    return (1, pictures.shape[1], pictures.shape[2])


def _file(folder: Path, part: str) -> Path | None:
    found = [folder / f"{part}{end}" for end in ("", ".gz")]
    return next((file for file in found if file.exists()), None)


def _table(folder: Path, part: str, expected: str | None) -> torch.Tensor:
    """The numbers of one file: a kind, its sizes of four bytes each, then a byte a number."""
    file = _file(folder, part)
    if file is None:
        raise DataError(f"{folder} has no {part}")
    packed = file.read_bytes()
    raw = gzip.decompress(packed) if file.suffix == ".gz" else packed
    digest = hashlib.sha256(raw).hexdigest()
    if expected not in (None, digest):
        raise DataError(f"{file} has SHA-256 {digest} unpacked, expected {expected}")
    dimensions = 3 if "images" in part else 1
    header = 4 + 4 * dimensions
    if raw[:4] != bytes([0, 0, 8, dimensions]) or len(raw) < header:
        raise DataError(f"{file} is not an IDX file of bytes")
    shape = [int(size) for size in np.frombuffer(raw, ">i4", dimensions, 4)]
    if len(raw) != header + math.prod(shape):
        raise DataError(f"{file} is not an IDX file of bytes")
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=header).reshape(shape).copy())
