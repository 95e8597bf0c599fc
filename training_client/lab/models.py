"""The registry of models, each with its objective: the loss and the test measure.

A loss returns one value per example and never mixes examples, so that a record affects only its own
clipped gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from command_words.names import describe_unknown
from training_client.errors import DataError
from training_client.lab.data import Dataset
from training_client.lab.data.dataset import ImageShape
from training_client.private_step import Loss

_CODE_SIZE: Final = 30  # of the autoencoder's bottleneck


def cross_entropy(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy loss of each example."""
    return functional.cross_entropy(predictions, labels, reduction="none")


def logistic(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the logistic loss log(1 + exp(−y·f)) of each example with label y = ±1 (papers/003).

    Args:
        predictions: f, one column.
        labels: 0 or 1.
    """
    signs = 2.0 * labels - 1.0
    return functional.softplus(-signs * predictions.squeeze(1))


def squared_error(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each example's squared error, averaged over the model's outputs."""
    return (predictions - targets).square().mean(1)


@dataclass(frozen=True, slots=True)
class Objective:
    """A training objective: a loss, and a measure of quality on test data.

    Attributes:
        loss: returns one value per example.
        score: returns the measure of each test example.
        measure: the name of the measure.
        reconstructs: whether each example is its own target.
    """

    loss: Loss
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    measure: str = "accuracy"
    reconstructs: bool = False

    def with_targets(self, data: Dataset) -> Dataset:
        """Return the data set with labels replaced by this objective's targets."""
        if not self.reconstructs:
            return data
        return replace(data, train_labels=data.train_examples, test_labels=data.test_examples)


CLASSES: Final = Objective(
    cross_entropy, lambda outputs, labels: (outputs.argmax(1) == labels).float()
)
TWO_CLASSES: Final = Objective(
    logistic, lambda outputs, labels: ((outputs.squeeze(1) > 0) == (labels > 0)).float()
)
RECONSTRUCTION: Final = Objective(squared_error, squared_error, "squared error", True)


def mlp(inputs: int, hidden: int, classes: int) -> nn.Module:
    """Make a network with one hidden layer of rectified linear units."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def autoencoder(inputs: int, hidden: int) -> nn.Module:
    """Make an autoencoder with a code of 30 units, and a decoder that mirrors the encoder.

    With 1 000 hidden units it has the 2.8 million parameters of papers/004, Appendix B.
    """
    narrowing = [inputs, hidden, max(1, hidden // 2), max(1, hidden // 4), _CODE_SIZE]
    widths = [*narrowing, *narrowing[-2::-1]]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(images: ImageShape, classes: int) -> nn.Module:
    """Make a network with two convolutions, pooled to 4 by 4; its inputs are flattened images."""
    return nn.Sequential(
        nn.Unflatten(1, images),
        nn.Conv2d(images[0], 16, 5, stride=2, padding=2),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


class WordModel(nn.Module):
    """Classifier of sequences of token numbers: an embedding, a recurrent network, a dense layer.

    With 10 000 tokens and 64 units in two LSTM layers it has the 706 690 parameters of papers/004,
    Appendix B.
    """

    def __init__(self, vocabulary: int, classes: int, units: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, units)
        self.recurrence = nn.LSTM(units, units, num_layers=2, batch_first=True)
        self.output = nn.Linear(units, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes, from the state after the last token."""
        states, _ = self.recurrence(self.embedding(tokens))
        scores: torch.Tensor = self.output(states[:, -1])
        return scores


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A registered model: how to build it, and its objective.

    Attributes:
        make: makes the model, given the data set and the width of its (first) hidden layer.
        objective: its loss and test measure.
        title: a short description.
        classes: the only number of classes it supports; None for any number.
        images: whether it needs images.
    """

    make: Callable[[Dataset, int], nn.Module]
    objective: Objective
    title: str
    classes: int | None = None
    images: bool = False


MODELS: Final[dict[str, ModelInfo]] = {
    "mlp": ModelInfo(
        lambda data, hidden: mlp(data.inputs, hidden, data.classes), CLASSES, "one hidden layer"
    ),
    "cnn": ModelInfo(
        lambda data, _: cnn(data.images or (1, 1, data.inputs), data.classes),
        CLASSES,
        "two convolutions",
        images=True,
    ),
    "linear": ModelInfo(
        lambda data, _: nn.Linear(data.inputs, data.classes), CLASSES, "no hidden layer"
    ),
    "logistic": ModelInfo(
        lambda data, _: nn.Linear(data.inputs, 1), TWO_CLASSES, "one weight per input", 2
    ),
    "autoencoder": ModelInfo(
        lambda data, hidden: autoencoder(data.inputs, hidden),
        RECONSTRUCTION,
        "reconstruction from 30 numbers",
    ),
}


def side_information(
    model: nn.Module,
    frequencies: torch.Tensor,
    statistic: str = "frequency",
    cap: float = math.inf,
    others: float = 1.0,
) -> list[torch.Tensor]:
    """Return AdaDPS's public preconditioner A from input frequencies (papers/004, §6.1.2).

    The inputs' weights are weighed against all other parameters: they share one clip norm. So
    `equal` with the same `others` is the control of every comparison.

    Args:
        model: a model whose first Linear layer takes the inputs.
        frequencies: the public frequency of each input.
        statistic: a key of `SIDE_STATISTICS`.
        cap: K ≥ 1; A of the inputs' weights is kept within 1/K and K times its mean.
        others: A > 0 of all other parameters, such as the bias; 1 in the paper.

    Returns:
        One tensor per parameter.

    Raises:
        DataError: the statistic is unknown, or `cap` or `others` is out of range.
    """
    if statistic not in SIDE_STATISTICS:
        raise DataError(
            f"unknown side statistic {statistic!r}: there are {', '.join(SIDE_STATISTICS)}"
        )
    if not (cap >= 1 and 0 < others < math.inf):
        raise DataError(f"expected a cap of at least 1 and others > 0, got {cap:g} and {others:g}")
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Linear)).weight
    row = SIDE_STATISTICS[statistic](frequencies)
    row = (row / row.mean()).clamp(max(1 / cap, 1e-6), cap)
    return [
        row.expand_as(p).clone() if p is first else torch.full_like(p, others)
        for p in model.parameters()
    ]


def _inverse_tf_idf(frequencies: torch.Tensor) -> torch.Tensor:
    """Return 1/(f·log(1/f)): A inversely proportional to the mean TF-IDF of binary counts."""
    known = frequencies.clamp(1e-9, 1 - 1e-6)
    return 1 / (known * known.log().neg())


def _common_apart(frequencies: torch.Tensor) -> torch.Tensor:
    """Return 1 for the hundred most frequent inputs and 1/20 for the others."""
    row = torch.full_like(frequencies, 1 / 20)
    row[frequencies.topk(min(100, len(row))).indices] = 1.0
    return row


SIDE_STATISTICS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "frequency": lambda frequencies: frequencies,
    "tf-idf": _inverse_tf_idf,
    "common": _common_apart,
    "equal": torch.ones_like,
}


def require_compatible(name: str, data: Dataset) -> None:
    """Raise unless the named model exists and can be trained on the data.

    Raises:
        DataError: the name is unknown, or the model does not support the classes or inputs.
    """
    if name not in MODELS:
        raise DataError(describe_unknown("model", name, MODELS))
    classes = MODELS[name].classes
    if classes not in (None, data.classes):
        raise DataError(f"{name} supports {classes} classes, the data have {data.classes}")
    if MODELS[name].images and data.images is None:
        raise DataError(f"{name} takes images, but the data are rows of numbers")


def make_model(name: str, data: Dataset, hidden: int = 1000) -> nn.Module:
    """Make a model by its name, on the device of the data.

    Raises:
        DataError: the model is unknown, unsuited to the data, or too large for the memory.
    """
    require_compatible(name, data)
    try:
        return MODELS[name].make(data, hidden).to(data.train_examples.device)
    except RuntimeError as error:
        raise DataError(
            f"{name} with --hidden {hidden} does not fit into memory: {error}"
        ) from None
