"""CIFAR-10 and CIFAR-100: colour images of 32 by 32 pixels, in either of their two formats.

The binary format has one byte per label and 3 072 per image. The Python format, which torchvision
reads, consists of pickles: only arrays and plain values are read from them, and no code is run.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from training_client.errors import DataError, NotFetchedError
from training_client.lab.data.dataset import Dataset

_PIXELS: Final = 3 * 32 * 32
_TEN: Final = tuple(f"data_batch_{number}" for number in range(1, 6)), ("test_batch",)
_HUNDRED: Final = ("train",), ("test",)
# what a pickle of arrays needs; numpy.core was renamed to numpy._core
_ALLOWED: Final = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}
Labelled = tuple[NDArray[np.uint8], NDArray[np.int64]]


def has_cifar(folder: Path, classes: int = 10) -> bool:
    """Return whether the files of CIFAR are in a folder, or in the one named after it in there."""
    return any(base.is_dir() for base in _list_bases(folder, classes))


def cifar(folder: Path, classes: int = 10) -> Dataset:
    """Load CIFAR: 50 000 training and 10 000 test images in 10 or 100 classes, pixels in [0, 1].

    Args:
        folder: holds `cifar-10-batches-py` or `cifar-10-batches-bin` (`cifar-100-python` or
            `cifar-100-binary`), or a folder `cifar10` (`cifar100`) that holds it.
        classes: 10 or 100.

    Raises:
        NotFetchedError: there is no such folder.
        DataError: a file is missing, or is not in this format.
    """
    base = next((each for each in _list_bases(folder, classes) if each.is_dir()), None)
    if base is None:
        names = " or ".join(_folder_names(classes))
        raise NotFetchedError(
            f"cifar{classes} was not found: unpack cs.toronto.edu/~kriz/cifar.html, so that "
            f"{folder / f'cifar{classes}'} has a folder {names}"
        )
    train, test = (
        _join([_read_file(base, name, classes) for name in names])
        for names in (_TEN if classes == 10 else _HUNDRED)
    )
    return Dataset(*_convert(train), *_convert(test), classes=classes, images=(3, 32, 32))


def _folder_names(classes: int) -> tuple[str, str]:
    """Return the names of the unpacked folders, of the Python and of the binary format."""
    if classes == 10:
        return "cifar-10-batches-py", "cifar-10-batches-bin"
    return "cifar-100-python", "cifar-100-binary"


def _list_bases(folder: Path, classes: int) -> list[Path]:
    """Return the folders that may hold the files."""
    names = _folder_names(classes)
    return [base / name for base in (folder / f"cifar{classes}", folder) for name in names]


def _join(parts: Sequence[Labelled]) -> Labelled:
    """Return images and labels of several files as one array each."""
    return np.concatenate([images for images, _ in parts]), np.concatenate([y for _, y in parts])


def _convert(found: Labelled) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images as numbers in [0, 1], and labels, as tensors."""
    return torch.from_numpy(found[0]).float() / 255, torch.from_numpy(found[1])


def _read_file(base: Path, name: str, classes: int) -> Labelled:
    """Return the images and labels of one file of either format."""
    binary = base.name.endswith(("bin", "binary"))
    file = base / (f"{name}.bin" if binary else name)
    if not file.is_file():
        raise DataError(f"{base} has no file {file.name}")
    images, labels = (_read_binary if binary else _read_pickle)(file, classes)
    is_right = images.ndim == 2 and images.shape == (len(labels), _PIXELS) and len(labels) > 0
    if not is_right or images.dtype != np.uint8 or not 0 <= labels.min() <= labels.max() < classes:
        raise DataError(f"{file} is not a file of CIFAR-{classes}")
    return images, labels


def _read_binary(file: Path, classes: int) -> Labelled:
    """Return the images and labels of a binary file; CIFAR-100 has a coarse label before them."""
    raw = np.frombuffer(file.read_bytes(), np.uint8)
    width = _PIXELS + (1 if classes == 10 else 2)
    if raw.size % width:
        raise DataError(f"{file} is not a file of CIFAR-{classes}: it ends within an image")
    table = raw.reshape(-1, width)
    return table[:, -_PIXELS:], table[:, -_PIXELS - 1].astype(np.int64)


def _read_pickle(file: Path, classes: int) -> Labelled:
    """Return the images and labels of a pickle."""
    try:
        found = _ArrayUnpickler(io.BytesIO(file.read_bytes()), encoding="bytes").load()
        label = b"labels" if classes == 10 else b"fine_labels"
        return np.asarray(found[b"data"]), np.asarray(found[label], dtype=np.int64)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{file} is not a file of CIFAR-{classes}: {error}") from None


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler of arrays, lists, strings and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that arrays need; raise for any other."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
        return super().find_class(module, name)
