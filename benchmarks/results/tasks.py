"""What is trained on: data, model, loss, and how well it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import nn

from training_client.clipping import Loss
from training_client.data import Dataset, load
from training_client.pca import PrivatePca
from training_client.train import accuracy, cross_entropy, mlp

FOLDER: Final = Path("data")
COMPONENTS: Final = 60
PROJECTION_NOISE: Final = {2.0: 4.0, 4.0: 7.0, 8.0: 16.0}  # σ_p by σ, papers/000 §IV-C
VALIDATION: Final = 1 / 6  # of the training set, while learning rates are chosen


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
        title: in the report.
        sample_rate: q.
        prepare: the data, given σ and a seed.
        model: a new one, for some data.
        loss: one value an example.
        score: how good a model is.
        unit: of the score.
        tuned_at: σ while learning rates are chosen.
        tuning_steps: how long they are tried.
        public_rows: how many training examples are given up by those that need public ones.
        higher_is_better: of the score.
        projected: whether the data went through a private projection, with its own noise.
        delta: δ of what is certified.
    """

    title: str
    sample_rate: float
    prepare: Callable[[float, int], Dataset]
    model: Callable[[Dataset], nn.Module]
    loss: Loss
    score: Callable[[nn.Module, Dataset], float]
    unit: str
    tuned_at: float
    tuning_steps: int
    public_rows: int
    higher_is_better: bool = True
    projected: bool = False
    delta: float = 1e-5


@cache
def _loaded(name: str) -> Dataset:
    return load(name, FOLDER)


@lru_cache(maxsize=2)
def projected(name: str, noise_multiplier: float, seed: int) -> Dataset:
    """Images in 60 directions, which are found with noise."""
    data = _loaded(name)
    pca = PrivatePca(COMPONENTS, PROJECTION_NOISE[noise_multiplier])
    return pca.fit(data.train_examples, torch.Generator().manual_seed(seed)).of(data)


def _images(name: str, hidden: int = 1000) -> Task:
    return Task(
        title=f"{name}, 60 directions of a private projection, {hidden} hidden units",
        sample_rate=0.01,
        prepare=lambda noise, seed: projected(name, noise, seed),
        model=lambda data: mlp(data.inputs, hidden, data.classes),
        loss=cross_entropy,
        score=accuracy,
        unit="accuracy",
        tuned_at=4.0,
        tuning_steps=400,
        public_rows=600,
        projected=True,
    )


TASKS: Final[dict[str, Task]] = {
    "mnist": _images("mnist"),
    "small": _images("mnist", hidden=50),
    "fashion-mnist": _images("fashion-mnist"),
}


def held_out(data: Dataset) -> Dataset:
    """The same with a part of the training set in the test set's place."""
    rows = int(len(data.train_labels) * (1 - VALIDATION))
    return replace(
        data.rows(slice(rows)),
        test_examples=data.train_examples[rows:],
        test_labels=data.train_labels[rows:],
    )
