"""The learning tasks: data, model, loss and score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from training_client.lab.data import DATASETS, Dataset, load
from training_client.lab.data.imdb import VOCABULARY, imdb, imdb_sequences
from training_client.lab.models import MODELS, Objective, WordModel, make_model
from training_client.lab.papers.convolutions import load_features, make_dense_layers
from training_client.lab.papers.experiments import FINE_GRID, GRID, MNIST_STEPS
from training_client.lab.pca import PrivatePca

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
        dataset: name of its data in the registry.
        prepare: loads the data from a folder, for σ and a seed.
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
        measures_objective: whether the score is the loss on the training set.
        make_network: makes the model, instead of `model`, which still names the objective.
    """

    title: str
    sample_rate: float
    dataset: str
    prepare: Callable[[Path, float, int], Dataset]
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
    measures_objective: bool = False
    make_network: Callable[[Dataset], nn.Module] | None = None

    @property
    def objective(self) -> Objective:
        """The training objective: the loss to minimise, and the score to measure."""
        known = MODELS[self.model].objective
        if self.measures_objective:
            return replace(known, score=known.loss, measure="objective")
        return known

    @property
    def unit(self) -> str:
        """The unit of the task's scores, as text."""
        times = "" if self.factor == 1 else f" × {self.factor:g}"
        return f"{self.objective.measure}{times}"

    @property
    def higher_is_better(self) -> bool:
        """Return whether a higher score is better."""
        return self.objective.measure == "accuracy"

    def build_model(self, data: Dataset, hidden: int | None = None) -> nn.Module:
        """Return a new model for the data."""
        if self.make_network is not None:
            return self.make_network(data)
        return make_model(self.model, data, hidden or self.hidden)


_load_dataset = cache(load)


def clear_loaded_data() -> None:
    """Forget the data sets that are kept in memory."""
    _load_dataset.cache_clear()


@lru_cache(maxsize=2)
def project_images(folder: Path, name: str, noise_multiplier: float, seed: int) -> Dataset:
    """Return the images projected onto 60 principal components, computed with noise."""
    data = _load_dataset(name, folder)
    noise = projection_noise(noise_multiplier)
    fitted = PrivatePca(COMPONENTS, noise).fit(
        data.train_examples, torch.Generator().manual_seed(seed)
    )
    return fitted.project_dataset(data)


def projection_noise(noise_multiplier: float) -> float:
    """Return σ_p of the projection: as in papers/000 §IV, else twice σ."""
    return PROJECTION_NOISE.get(noise_multiplier, 2 * noise_multiplier)


def _make_image_task(name: str, hidden: int = 1000, tuned_on: str = "") -> Task:
    """Return an image classification task with a multilayer perceptron."""
    return Task(
        title=f"{name}, 60-{hidden}-10",
        sample_rate=0.01,
        dataset=name,
        prepare=lambda folder, noise, seed: project_images(folder, name, noise, seed),
        model="mlp",
        hidden=hidden,
        tuned_at="σ = 4",
        tuning_steps=400,
        tuned_on=tuned_on,
        public_rows=600,
        has_private_projection=True,
    )


def _make_plain_image_task(name: str) -> Task:
    """Return an image classification task without a projection (papers/001 §5.1)."""
    return replace(
        _make_image_task(name, tuned_on="mnist"),
        title=f"{name}, 784-1000-10",
        prepare=lambda folder, *_: _load_dataset(name, folder),
        has_private_projection=False,
    )


def _test_on_training_set(data: Dataset) -> Dataset:
    """Return the data with the training set in place of the test set."""
    return replace(data, test_examples=data.train_examples, test_labels=data.train_labels)


def _measure_training_set(task: Task, **changes: Any) -> Task:
    """Return the task with scores on the training set."""
    prepare = task.prepare
    return replace(
        task,
        prepare=lambda folder, noise, seed: _test_on_training_set(prepare(folder, noise, seed)),
        **changes,
    )


def _make_census_task(name: str, title: str, tuned_on: str = "adult") -> Task:
    """Return a logistic regression on records that users of 100 records each hold."""

    def prepare(folder: Path, *_: float) -> Dataset:
        """Return the records, cut to a whole number of users."""
        data = _load_dataset(name, folder)
        return data.select(slice(len(data.train_labels) // USER_ROWS * USER_ROWS))

    return Task(
        title=title,
        sample_rate=1 / USER_ROWS,
        dataset=name,
        prepare=prepare,
        model="logistic",
        tuned_at="ε = 0.5",
        tuning_steps=8000,
        tuned_on=tuned_on,
        users=DATASETS[name].train_size // USER_ROWS,
        delta=1e-8,
    )


def _reconstruct(folder: Path, *_: float) -> Dataset:
    """Return MNIST with each image as its own target."""
    return MODELS["autoencoder"].objective.with_targets(_load_dataset("mnist", folder))


_AUTOENCODER: Final = Task(
    title="MNIST, autoencoder of a quarter of the width",
    sample_rate=256 / 60_000,
    dataset="mnist",
    prepare=_reconstruct,
    model="autoencoder",
    hidden=250,
    tuned_at="σ = 1",
    tuning_steps=150,
    public_rows=600,
    factor=100.0,
)


def _make_text_task(name: str, model: str, public_rows: int, **changes: Any) -> Task:
    """Return a classification of texts as bags of words, in batches of 64."""
    rows = DATASETS[name].train_size
    known: dict[str, Any] = {
        "title": f"{name}, {model}",
        "sample_rate": 64 / rows,
        "dataset": name,
        "prepare": lambda folder, *_: _load_dataset(name, folder),
        "model": model,
        "tuned_at": "σ = 1",
        "tuning_steps": 400,
        "public_rows": public_rows,
        "delta": 1 / rows,
    }
    return Task(**known | changes)


_ADULT: Final = _make_census_task("adult", "Adult, logistic regression", tuned_on="")
_BANK: Final = _make_census_task("bank", "BANK, logistic regression")
_IPUMS: Final = _make_census_task("ipums", "IPUMS, logistic regression")
_IMDB: Final = _make_text_task("imdb", "logistic", 250)
_MNIST: Final = _make_plain_image_task("mnist")
_FASHION: Final = _make_plain_image_task("fashion-mnist")
TASKS: Final[dict[str, Task]] = {
    "mnist": _make_image_task("mnist"),
    "mnist-8": replace(  # like mnist, but with learning rates tuned at σ = 8 and at full length
        _make_image_task("mnist"), tuned_at="σ = 8", tuning_steps=MNIST_STEPS, grid=FINE_GRID
    ),
    "box": _make_image_task("mnist", hidden=50),
    "fashion-mnist": _make_image_task("fashion-mnist", tuned_on="mnist"),
    "adult": _ADULT,
    "newsgroups": _make_text_task(
        "newsgroups", "linear", 113, title="20 newsgroups, linear", delta=1e-5
    ),
    "autoencoder": _AUTOENCODER,
    "mnist-784": _MNIST,
    "mnist-train": _measure_training_set(_MNIST),
    "fashion-784": _FASHION,
    "fashion-train": _measure_training_set(_FASHION),
    "cifar10": Task(
        title="CIFAR-10, on convolutions trained on CIFAR-100",
        sample_rate=2000 / 50_000,
        dataset="cifar10",
        prepare=lambda folder, _, seed: load_features(folder, seed),
        model="mlp",
        make_network=make_dense_layers,
        tuned_at="σ = 6",
        tuning_steps=400,
        tuned_on="mnist",
        public_rows=500,
    ),
    "cifar10-cnn": Task(
        title="CIFAR-10, two convolutions",
        sample_rate=600 / 50_000,
        dataset="cifar10",
        prepare=lambda folder, *_: _load_dataset("cifar10", folder),
        model="cnn",
        tuned_at="σ = 4",
        tuning_steps=400,
        tuned_on="mnist",
        public_rows=500,
    ),
    "bank": _BANK,
    "ipums": _IPUMS,
    **{
        f"{name}-objective": _measure_training_set(task, tuned_on="adult", measures_objective=True)
        for name, task in (("adult", _ADULT), ("bank", _BANK), ("ipums", _IPUMS))
    },
    "imdb": _IMDB,
    "imdb-tfidf": replace(
        _IMDB, title="IMDB, TF-IDF", prepare=lambda folder, *_: imdb(folder, weigh_by_rarity=True)
    ),
    "imdb-lstm": replace(
        _IMDB,
        title="IMDB, LSTM",
        prepare=lambda folder, *_: imdb_sequences(folder),
        model="linear",
        make_network=lambda data: WordModel(VOCABULARY, data.classes),
    ),
    "stackoverflow": _make_text_task("stackoverflow", "linear", 2460),
    "autoencoder-full": replace(
        _AUTOENCODER,
        title="MNIST, autoencoder",
        sample_rate=64 / 60_000,
        hidden=1000,
        tuned_on="autoencoder",
        delta=1 / 60_000,
    ),
    "mnist-64": replace(
        _MNIST, title="mnist, batches of 64", sample_rate=64 / 60_000, delta=1 / 60_000
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
