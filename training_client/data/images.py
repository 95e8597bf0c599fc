"""Images of your own, in a folder a class: `train/cat/1.png`, `test/dog/2.png`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from training_client.data.dataset import Dataset, Images
from training_client.errors import DataError

_PARTS: Final = ("train", "test")
_ENDS: Final = frozenset({".png", ".jpg", ".jpeg", ".bmp"})
_CHANNELS: Final = {"L": 1, "RGB": 3}


def has_images(folder: Path) -> bool:
    """Whether a folder has classes to train on and to test on."""
    return all((folder / part).is_dir() and _classes(folder / part) for part in _PARTS)


def read_images(folder: Path) -> Dataset:
    """A data set from images of one size, grey or in colours; pixels in [0, 1].

    Classes are numbered in the order of their folders' names.

    Raises:
        DataError: Pillow is missing, sizes or classes differ, or a file is no image.
    """
    classes = _classes(folder / "train")
    if not set(_classes(folder / "test")) <= set(classes):
        raise DataError(f"{folder}/test has classes that {folder}/train has not")
    (train, train_labels), (test, test_labels) = (_part(folder / part, classes) for part in _PARTS)
    if train.shape[1:] != test.shape[1:]:
        raise DataError(f"{folder}: images to train and to test on differ in size")
    images: Images = (train.shape[1], train.shape[2], train.shape[3])
    return Dataset(
        train.flatten(1), train_labels, test.flatten(1), test_labels, len(classes), images
    ).shuffled()


def _classes(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.is_dir())


def _part(folder: Path, classes: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images as (number, channels, height, width), and their classes."""
    found = [
        (_image(file), label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).glob("*"))
        if file.suffix.lower() in _ENDS
    ]
    if len({picture.shape for picture, _ in found}) != 1:
        raise DataError(f"{folder} needs images, all of one size and all grey or all in colours")
    pictures = torch.stack([picture for picture, _ in found])
    return pictures.float() / 255, torch.tensor([label for _, label in found])


def _image(file: Path) -> torch.Tensor:
    """Bytes as (channels, height, width)."""
    pillow = _pillow()
    try:
        with pillow.open(file) as picture:
            mode = "L" if picture.mode in ("1", "L") else "RGB"
            pixels = np.array(picture.convert(mode))
    except OSError as error:
        raise DataError(f"{file} is not an image: {error}") from None
    height, width = pixels.shape[:2]
    flat = torch.from_numpy(pixels).reshape(height, width, _CHANNELS[mode])
    return flat.permute(2, 0, 1)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "image files need Pillow: pip install 'privacy-accountant[images]'"
        ) from None
    return Image
