"""Texts as bags of words over the most frequent tokens of a training set."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

_TOKEN: Final = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_TAG: Final = re.compile(r"<[^>]*>")


def split_into_tokens(text: str) -> list[str]:
    """Return the words and numbers of a text in lower case, without its HTML tags."""
    return _TOKEN.findall(_TAG.sub(" ", text).lower())


def rank_tokens(texts: Iterable[Sequence[str]], count: int) -> list[str]:
    """Return the most frequent tokens, the most frequent one first."""
    words = Counter(word for text in texts for word in text)
    return [word for word, _ in words.most_common(count)]


def count_tokens(texts: Iterable[Sequence[str]], vocabulary: Sequence[str]) -> NDArray[np.uint16]:
    """Return how often each token of the vocabulary occurs in each text."""
    columns = {word: at for at, word in enumerate(vocabulary)}
    return np.stack([_count_known(text, columns) for text in texts])


def _count_known(text: Sequence[str], columns: dict[str, int]) -> NDArray[np.uint16]:
    """Return how often each token of the vocabulary occurs in a text."""
    known = np.array([columns[word] for word in text if word in columns], dtype=np.int64)
    return np.bincount(known, minlength=len(columns)).astype(np.uint16)


def scale_counts(counts: NDArray[Any], weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return log(1 + count), times the weight of each token if given, scaled to norm 1."""
    rows = torch.from_numpy(counts.astype(np.float32)).log1p_()
    if weights is not None:
        rows *= weights
    return rows.div_(rows.norm(dim=1, keepdim=True).clamp_min_(1e-12))


def document_frequencies(counts: NDArray[Any]) -> torch.Tensor:
    """Return the share of texts in which each token occurs."""
    return torch.from_numpy((counts > 0).mean(0, dtype=np.float32))
