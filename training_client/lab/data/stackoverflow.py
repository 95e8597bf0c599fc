"""Stack Overflow: questions as bags of words, and the commonest of their tags.

The questions are read from `Posts.xml` of the Stack Exchange data dump, in its order. Vocabulary,
token frequencies and tags are computed from all questions that are read, without noise, so
training on this data set declares them public, as papers/004 does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

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
TAGS: Final = 500
TRAIN_SIZE: Final = 246_092  # papers/004, Appendix B
TEST_SIZE: Final = 24_609
_READ: Final = 400_000  # questions, of which some have none of the commonest tags
_QUESTION: Final = "1"
_TAG: Final = re.compile(r"[^<>|]+")


@dataclass(frozen=True, slots=True)
class _Question:
    """The tokens and the tags of a question."""

    tokens: list[str]
    tags: list[str]


def has_stackoverflow(folder: Path) -> bool:
    """Return whether a folder holds the posts of the data dump."""
    return any(file.is_file() for file in _list_files(folder))


def stackoverflow(folder: Path, vocabulary: int = VOCABULARY) -> Dataset:
    """Load Stack Overflow: 246 092 training and 24 609 test questions, 500 classes.

    The class of a question is the most frequent of its tags. The last tenth of the questions, and
    at most 24 609, are the test set. The arrays take 11 GB of memory.

    Args:
        folder: holds `Posts.xml`, or a folder `stackoverflow` that holds it.
        vocabulary: the number of tokens to count, the most frequent ones.

    Raises:
        NotFetchedError: there is no such file.
        DataError: the file is not XML, or has fewer than two tagged questions.
    """
    file = next((each for each in _list_files(folder) if each.is_file()), None)
    if file is None:
        raise NotFetchedError(
            "stackoverflow was not found: unpack stackoverflow.com-Posts.7z of "
            f"archive.org/details/stackexchange into {folder / 'stackoverflow'}"
        )
    questions = list(islice(_read_questions(file), _READ))
    ranks = {tag: at for at, tag in enumerate(_rank_tags(questions))}
    labelled = [
        (each.tokens, min(ranks[tag] for tag in each.tags if tag in ranks))
        for each in questions
        if any(tag in ranks for tag in each.tags)
    ][: TRAIN_SIZE + TEST_SIZE]
    if len(labelled) < 2:
        raise DataError(f"{file} has {len(labelled)} questions with tags, at least 2 are needed")
    tests = min(TEST_SIZE, max(1, len(labelled) // 10))
    texts, labels = [tokens for tokens, _ in labelled], torch.tensor([y for _, y in labelled])
    ranked = rank_tokens(texts[:-tests], vocabulary)
    counts = count_tokens(texts, ranked)
    return Dataset(
        scale_counts(counts[:-tests]),
        labels[:-tests],
        scale_counts(counts[-tests:]),
        labels[-tests:],
        classes=len(ranks),
        frequencies=document_frequencies(counts[:-tests]),
    ).shuffled()


def _list_files(folder: Path) -> tuple[Path, Path]:
    """Return the files that may hold the posts."""
    return folder / "stackoverflow" / "Posts.xml", folder / "Posts.xml"


def _rank_tags(questions: list[_Question]) -> list[str]:
    """Return the most frequent tags, the most frequent one first."""
    tags = Counter(tag for question in questions for tag in question.tags)
    return [tag for tag, _ in tags.most_common(TAGS)]


def _read_questions(file: Path) -> Iterator[_Question]:
    """Yield the questions of the data dump, without keeping the file in memory."""
    try:
        for _, row in ElementTree.iterparse(file):
            if row.tag == "row" and row.get("PostTypeId") == _QUESTION:
                text = f"{row.get('Title', '')} {row.get('Body', '')}"
                yield _Question(split_into_tokens(text), _TAG.findall(row.get("Tags", "")))
            row.clear()
    except ElementTree.ParseError as error:
        raise DataError(f"{file} is not XML: {error}") from None
