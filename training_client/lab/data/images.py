"""Read your own images from one folder per class: `train/cat/1.png`, `test/dog/2.png`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from training_client.errors import DataError
from training_client.lab.data.dataset import Dataset, ImageShape

_SPLITS: Final = ("train", "test")
_SUFFIXES: Final = frozenset({".png", ".jpg", ".jpeg", ".bmp"})
_CHANNELS: Final = {"L": 1, "RGB": 3}


def has_images(folder: Path) -> bool:
    """Return whether a folder holds `train` and `test`, each with one folder per class."""
    return all((folder / split).is_dir() and _class_names(folder / split) for split in _SPLITS)


def read_images(folder: Path) -> Dataset:
    """Read a data set of equally sized grey or colour images, with pixels scaled to [0, 1].

    Classes are numbered in the alphabetical order of their folders.

    Raises:
        DataError: Pillow is missing, sizes or classes differ, or a file is not an image.
    """
    classes = _class_names(folder / "train")
    if not set(_class_names(folder / "test")) <= set(classes):
        raise DataError(f"{folder}/test has classes that are not in {folder}/train")
    (train, train_labels), (test, test_labels) = (
        _read_split(folder / split, classes) for split in _SPLITS
    )
    if train.shape[1:] != test.shape[1:]:
        raise DataError(f"{folder}: training and test images differ in size")
    shape: ImageShape = (train.shape[1], train.shape[2], train.shape[3])
    return Dataset(
        train.flatten(1), train_labels, test.flatten(1), test_labels, len(classes), shape
    ).shuffled()


def _class_names(folder: Path) -> list[str]:
    """Return the names of a folder's subfolders, one per class, sorted."""
    return sorted(each.name for each in folder.iterdir() if each.is_dir())


def _read_split(folder: Path, classes: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of shape (examples, channels, height, width), and their class numbers."""
    found = [
        (_read_image(file), label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).glob("*"))
        if file.suffix.lower() in _SUFFIXES
    ]
    if len({picture.shape for picture, _ in found}) != 1:
        raise DataError(f"{folder} needs images, all of one size and all grey or all in colour")
    pictures = torch.stack([picture for picture, _ in found])
    return pictures.float() / 255, torch.tensor([label for _, label in found])


def _read_image(file: Path) -> torch.Tensor:
    """Read an image as bytes of shape (channels, height, width)."""
    pillow = _import_pillow()
    try:
        with pillow.open(file) as picture:
            mode = "L" if picture.mode in ("1", "L") else "RGB"
            pixels = np.array(picture.convert(mode))
    except OSError as error:
        raise DataError(f"{file} is not an image: {error}") from None
    height, width = pixels.shape[:2]
    flat = torch.from_numpy(pixels).reshape(height, width, _CHANNELS[mode])
    return flat.permute(2, 0, 1)


def _import_pillow() -> Any:
    """Import Pillow's Image module; if it is missing, raise and say how to install it."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "image files need Pillow: pip install 'privacy-accountant[images]'"
        ) from None
    return Image
