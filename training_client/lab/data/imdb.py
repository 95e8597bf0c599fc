"""IMDB: film reviews as words, and whether each is positive (Maas et al. 2011).

The vocabulary and the token frequencies are computed from the training set without noise, so
training on this data set declares them public, as papers/004 does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from training_client.errors import DataError, NotFetchedError
from training_client.lab.data.bag_of_words import (
    count_tokens,
    document_frequencies,
    rank_tokens,
    scale_counts,
    split_into_tokens,
)
from training_client.lab.data.dataset import Dataset

VOCABULARY: Final = 10_000
_CLASSES: Final = ("neg", "pos")  # in the order of their labels
_FOLDER: Final = "aclImdb"


def has_imdb(folder: Path) -> bool:
    """Return whether a folder holds the unpacked reviews."""
    return any(base.is_dir() for base in _list_bases(folder))


def imdb(folder: Path, vocabulary: int = VOCABULARY, *, weigh_by_rarity: bool = False) -> Dataset:
    """Load IMDB: 25 000 training and 25 000 test reviews as bags of words, two classes.

    A row holds log(1 + count) of each token, scaled to norm 1.

    Args:
        folder: holds the unpacked folder `aclImdb`, or a folder `imdb` that holds it.
        vocabulary: the number of tokens to count, the most frequent ones of the training set.
        weigh_by_rarity: multiply each token by log(n / n_t) for n_t of n training reviews with the
            token (TF-IDF).

    Raises:
        NotFetchedError: there is no such folder.
        DataError: a folder of reviews is missing or empty, or a file is not text.
    """
    (train, train_labels), (test, test_labels) = _read_all(folder)
    ranked = rank_tokens(train, vocabulary)
    counts = count_tokens(train, ranked)
    frequencies = document_frequencies(counts)
    weights = -frequencies.log() if weigh_by_rarity else None
    return Dataset(
        scale_counts(counts, weights),
        train_labels,
        scale_counts(count_tokens(test, ranked), weights),
        test_labels,
        classes=len(_CLASSES),
        frequencies=frequencies,
    ).shuffled()


def imdb_sequences(folder: Path, vocabulary: int = VOCABULARY, length: int = 200) -> Dataset:
    """Load IMDB with each review as a sequence of token numbers, for a recurrent model.

    Token numbers are from 1; 0 stands in front of a review that is shorter.

    Args:
        folder: see `imdb`.
        vocabulary: the number of token numbers, 0 included; other tokens are left out.
        length: the number of tokens that are kept, the last ones of a review.

    Raises:
        NotFetchedError, DataError: see `imdb`.
    """
    (train, train_labels), (test, test_labels) = _read_all(folder)
    numbers = {word: at for at, word in enumerate(rank_tokens(train, vocabulary - 1), 1)}

    def encode(texts: list[list[str]]) -> torch.Tensor:
        """Return a row of token numbers for each text."""
        rows = torch.zeros(len(texts), length, dtype=torch.long)
        for row, text in zip(rows, texts, strict=True):
            known = [numbers[word] for word in text if word in numbers][-length:]
            row[length - len(known) :] = torch.tensor(known, dtype=torch.long)
        return rows

    return Dataset(
        encode(train), train_labels, encode(test), test_labels, classes=len(_CLASSES)
    ).shuffled()


def _read_all(folder: Path) -> list[tuple[list[list[str]], torch.Tensor]]:
    """Return the tokens and labels of the training set and of the test set."""
    base = next((each for each in _list_bases(folder) if each.is_dir()), None)
    if base is None:
        raise NotFetchedError(
            "imdb was not found: unpack ai.stanford.edu/~amaas/data/sentiment, so that "
            f"{folder / 'imdb'} has the folder {_FOLDER}"
        )
    return [_read(base / each) for each in ("train", "test")]


def _list_bases(folder: Path) -> tuple[Path, Path]:
    """Return the folders that may hold the reviews."""
    return folder / "imdb" / _FOLDER, folder / _FOLDER


def _read(folder: Path) -> tuple[list[list[str]], torch.Tensor]:
    """Return the tokens and labels of the reviews of the training set or the test set."""
    texts: list[list[str]] = []
    labels: list[int] = []
    for label, name in enumerate(_CLASSES):
        files = sorted((folder / name).glob("*.txt"))
        if not files:
            raise DataError(f"{folder / name} has no reviews (*.txt)")
        texts += [_read_review(file) for file in files]
        labels += [label] * len(files)
    return texts, torch.tensor(labels)


def _read_review(file: Path) -> list[str]:
    """Return the tokens of a review."""
    try:
        return split_into_tokens(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise DataError(f"{file} is not text in UTF-8") from None
