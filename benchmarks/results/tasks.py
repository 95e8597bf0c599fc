"""What is trained on: data, model, loss, and how well it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import nn

from benchmarks.results.experiments import FINE_GRID, GRID, MNIST_STEPS
from training_client.data import Dataset, load
from training_client.models import MODELS, Objective, make_model
from training_client.pca import PrivatePca

FOLDER: Final = Path("data")
COMPONENTS: Final = 60
PROJECTION_NOISE: Final = {2.0: 4.0, 3.0: 6.0, 4.0: 7.0, 8.0: 16.0}  # σ_p by σ, papers/000 §IV
VALIDATION: Final = 1 / 6  # of the training set, while learning rates are chosen
USER_ROWS: Final = 100  # records of each user, papers/003, Experiment


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
        title: in the report.
        sample_rate: q.
        prepare: the data, given σ and a seed.
        model: its name.
        tuned_at: the column of the report whose experiments the learning rates are chosen for.
        tuning_steps: how long they are tried at most.
        grid: learning rates that are tried, over the method's own.
        tuned_on: another task, whose learning rates it takes over.
        hidden: units of the model's first layer.
        public_rows: how many training examples are given up by those that need public ones.
        users: how many people hold the data, of whom each adds noise of their own.
        projected: whether the data went through a private projection, with its own noise.
        delta: δ of what is certified.
        factor: what scores are multiplied by.
    """

    title: str
    sample_rate: float
    prepare: Callable[[float, int], Dataset]
    model: str
    tuned_at: str
    tuning_steps: int
    grid: tuple[float, ...] = GRID
    tuned_on: str = ""
    hidden: int = 1000
    public_rows: int = 0
    users: int = 1
    projected: bool = False
    delta: float = 1e-5
    factor: float = 1.0

    @property
    def objective(self) -> Objective:
        """What is minimised, and what is measured."""
        return MODELS[self.model].objective

    @property
    def unit(self) -> str:
        """What scores are."""
        times = "" if self.factor == 1 else f" × {self.factor:g}"
        return f"{self.objective.measure}{times}"

    @property
    def higher_is_better(self) -> bool:
        """Of scores."""
        return self.objective.measure == "accuracy"

    def new_model(self, data: Dataset) -> nn.Module:
        """One of them."""
        return make_model(self.model, data, self.hidden)


@cache
def _loaded(name: str) -> Dataset:
    return load(name, FOLDER)


@lru_cache(maxsize=2)
def projected(name: str, noise_multiplier: float, seed: int) -> Dataset:
    """Images in 60 directions, which are found with noise."""
    data = _loaded(name)
    pca = PrivatePca(COMPONENTS, PROJECTION_NOISE[noise_multiplier])
    return pca.fit(data.train_examples, torch.Generator().manual_seed(seed)).of(data)


def _images(name: str, hidden: int = 1000, tuned_on: str = "") -> Task:
    return Task(
        title=f"{name}, 60-{hidden}-10",
        sample_rate=0.01,
        prepare=lambda noise, seed: projected(name, noise, seed),
        model="mlp",
        hidden=hidden,
        tuned_at="σ = 4",
        tuning_steps=400,
        tuned_on=tuned_on,
        public_rows=600,
        projected=True,
    )


def _adult() -> Dataset:
    """As many records as make whole users."""
    data = _loaded("adult")
    return data.rows(slice(len(data.train_labels) // USER_ROWS * USER_ROWS))


TASKS: Final[dict[str, Task]] = {
    "mnist": _images("mnist"),
    "mnist-8": replace(  # as mnist, with learning rates of its own, tried at full length
        _images("mnist"), tuned_at="σ = 8", tuning_steps=MNIST_STEPS, grid=FINE_GRID
    ),
    "box": _images("mnist", hidden=50),
    "fashion-mnist": _images("fashion-mnist", tuned_on="mnist"),
    "adult": Task(
        title="Adult, logistic regression",
        sample_rate=1 / USER_ROWS,
        prepare=lambda *_: _adult(),
        model="logistic",
        tuned_at="ε = 0.5",
        tuning_steps=8000,
        users=325,
        delta=1e-8,
    ),
    "newsgroups": Task(
        title="20 newsgroups, linear",
        sample_rate=64 / 11_293,
        prepare=lambda *_: _loaded("newsgroups"),
        model="linear",
        tuned_at="σ = 1",
        tuning_steps=400,
        public_rows=113,
    ),
    "autoencoder": Task(
        title="MNIST, autoencoder of a quarter of the width",
        sample_rate=256 / 60_000,
        prepare=lambda *_: MODELS["autoencoder"].objective.of(_loaded("mnist")),
        model="autoencoder",
        hidden=250,
        tuned_at="σ = 1",
        tuning_steps=150,
        public_rows=600,
        factor=100.0,
    ),
}


def held_out(data: Dataset) -> Dataset:
    """The same with a part of the training set in the test set's place."""
    rows = int(len(data.train_labels) * (1 - VALIDATION))
    return replace(
        data.rows(slice(rows)),
        test_examples=data.train_examples[rows:],
        test_labels=data.train_labels[rows:],
    )
