"""The learning tasks: data, model, loss and score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import nn

from benchmarks.results.experiments import FINE_GRID, GRID, MNIST_STEPS
from training_client.lab.data import Dataset, load
from training_client.lab.models import MODELS, Objective, make_model
from training_client.lab.pca import PrivatePca

DATA_FOLDER: Final = Path("data")
COMPONENTS: Final = 60
PROJECTION_NOISE: Final = {2.0: 4.0, 3.0: 6.0, 4.0: 7.0, 8.0: 16.0}  # σ_p by σ, papers/000 §IV
VALIDATION_SHARE: Final = 1 / 6  # of the training set, to choose learning rates
USER_ROWS: Final = 100  # records per user: papers/003, Experiment


@dataclass(frozen=True)
class Task:
    """A learning task: a dataset, a model and a score.

    Attributes:
        title: title in the report.
        sample_rate: q.
        prepare: loads the data for σ and a seed.
        model: the model's name.
        tuned_at: the report's column whose experiments the learning rates are tuned for.
        tuning_steps: greatest number of steps while tuning.
        grid: learning rates to try, as factors of the method's own.
        tuned_on: another task, whose tuned learning rates are used.
        hidden: units of the model's first layer.
        public_rows: training examples set aside as public, for methods that need them.
        users: number of people who hold the data; each adds their own noise.
        has_private_projection: True if a private PCA, with its own noise, projects the data.
        delta: δ of the certified ε.
        factor: factor of the scores.
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
    has_private_projection: bool = False
    delta: float = 1e-5
    factor: float = 1.0

    @property
    def objective(self) -> Objective:
        """The training objective: the loss to minimise, and the score to measure."""
        return MODELS[self.model].objective

    @property
    def unit(self) -> str:
        """The unit of the task's scores, as text."""
        times = "" if self.factor == 1 else f" × {self.factor:g}"
        return f"{self.objective.measure}{times}"

    @property
    def higher_is_better(self) -> bool:
        """Return whether a higher score is better."""
        return self.objective.measure == "accuracy"

    def build_model(self, data: Dataset) -> nn.Module:
        """Return a new model for the data."""
        return make_model(self.model, data, self.hidden)


@cache
def _load_dataset(name: str) -> Dataset:
    """Return a dataset by its name."""
    return load(name, DATA_FOLDER)


@lru_cache(maxsize=2)
def project_images(name: str, noise_multiplier: float, seed: int) -> Dataset:
    """Return the images projected onto 60 principal components, computed with noise."""
    data = _load_dataset(name)
    pca = PrivatePca(COMPONENTS, PROJECTION_NOISE[noise_multiplier])
    return pca.fit(data.train_examples, torch.Generator().manual_seed(seed)).project_dataset(data)


def _make_image_task(name: str, hidden: int = 1000, tuned_on: str = "") -> Task:
    """Return an image classification task with a multilayer perceptron."""
    return Task(
        title=f"{name}, 60-{hidden}-10",
        sample_rate=0.01,
        prepare=lambda noise, seed: project_images(name, noise, seed),
        model="mlp",
        hidden=hidden,
        tuned_at="σ = 4",
        tuning_steps=400,
        tuned_on=tuned_on,
        public_rows=600,
        has_private_projection=True,
    )


def _load_adult() -> Dataset:
    """Return the records of Adult, cut to a whole number of users."""
    data = _load_dataset("adult")
    return data.select(slice(len(data.train_labels) // USER_ROWS * USER_ROWS))


TASKS: Final[dict[str, Task]] = {
    "mnist": _make_image_task("mnist"),
    "mnist-8": replace(  # like mnist, but with learning rates tuned at σ = 8 and at full length
        _make_image_task("mnist"), tuned_at="σ = 8", tuning_steps=MNIST_STEPS, grid=FINE_GRID
    ),
    "box": _make_image_task("mnist", hidden=50),
    "fashion-mnist": _make_image_task("fashion-mnist", tuned_on="mnist"),
    "adult": Task(
        title="Adult, logistic regression",
        sample_rate=1 / USER_ROWS,
        prepare=lambda *_: _load_adult(),
        model="logistic",
        tuned_at="ε = 0.5",
        tuning_steps=8000,
        users=325,
        delta=1e-8,
    ),
    "newsgroups": Task(
        title="20 newsgroups, linear",
        sample_rate=64 / 11_293,
        prepare=lambda *_: _load_dataset("newsgroups"),
        model="linear",
        tuned_at="σ = 1",
        tuning_steps=400,
        public_rows=113,
    ),
    "autoencoder": Task(
        title="MNIST, autoencoder of a quarter of the width",
        sample_rate=256 / 60_000,
        prepare=lambda *_: MODELS["autoencoder"].objective.with_targets(_load_dataset("mnist")),
        model="autoencoder",
        hidden=250,
        tuned_at="σ = 1",
        tuning_steps=150,
        public_rows=600,
        factor=100.0,
    ),
}


def hold_out_validation(data: Dataset) -> Dataset:
    """Return the data with a part of the training set held out as the test set."""
    rows = int(len(data.train_labels) * (1 - VALIDATION_SHARE))
    return replace(
        data.select(slice(rows)),
        test_examples=data.train_examples[rows:],
        test_labels=data.train_labels[rows:],
    )
