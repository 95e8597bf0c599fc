"""Every model by its name, with what it is trained for: the loss belongs to the model.

A loss gives one value an example and never mixes examples: a record then moves one clipped gradient
and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from training_client.clipping import Loss
from training_client.data import Dataset
from training_client.data.dataset import Images
from training_client.errors import DataError

_CODE: Final = 30  # what the autoencoder makes of an example


def cross_entropy(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One loss an example."""
    return functional.cross_entropy(predictions, labels, reduction="none")


def logistic(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(−y·f)) of each example, y = ±1: papers/003, Experiment.

    Args:
        predictions: f, one column.
        labels: classes 0 and 1.
    """
    signs = 2.0 * labels - 1.0
    return functional.softplus(-signs * predictions.squeeze(1))


def squared_error(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the outputs of the squared distance, of each example."""
    return (predictions - targets).square().mean(1)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a model is trained for.

    Attributes:
        loss: one value an example.
        score: what is measured of each test example.
        measure: its name.
        reconstructs: whether an example is its own target.
    """

    loss: Loss
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    measure: str = "accuracy"
    reconstructs: bool = False

    def of(self, data: Dataset) -> Dataset:
        """The data with targets for labels."""
        if not self.reconstructs:
            return data
        return replace(data, train_labels=data.train_examples, test_labels=data.test_examples)


CLASSES: Final = Objective(cross_entropy, lambda found, labels: (found.argmax(1) == labels).float())
TWO_CLASSES: Final = Objective(
    logistic, lambda found, labels: ((found.squeeze(1) > 0) == (labels > 0)).float()
)
RECONSTRUCTION: Final = Objective(squared_error, squared_error, "squared error", True)


def mlp(inputs: int, hidden: int, classes: int) -> nn.Module:
    """One hidden layer of rectified linear units."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def autoencoder(inputs: int, hidden: int) -> nn.Module:
    """Layers that narrow to a code of 30 numbers, and widen again in the same steps.

    With 1 000 hidden units it has the 2.8 million parameters of papers/004, Appendix B.
    """
    narrowing = [inputs, hidden, max(1, hidden // 2), max(1, hidden // 4), _CODE]
    widths = [*narrowing, *narrowing[-2::-1]]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(images: Images, classes: int) -> nn.Module:
    """Two convolutions, pooled to 4 by 4: rows become images again."""
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


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that can be asked for by name.

    Attributes:
        make: called with the data it will be trained on, and units of its (first) hidden layer.
        objective: what it is trained for.
        title: what it is.
        classes: how many it can tell apart; None if any number.
        images: whether its examples are.
    """

    make: Callable[[Dataset, int], nn.Module]
    objective: Objective
    title: str
    classes: int | None = None
    images: bool = False


MODELS: Final[dict[str, Entry]] = {
    "mlp": Entry(
        lambda data, hidden: mlp(data.inputs, hidden, data.classes), CLASSES, "one hidden layer"
    ),
    "cnn": Entry(
        lambda data, _: cnn(data.images or (1, 1, data.inputs), data.classes),
        CLASSES,
        "two convolutions",
        images=True,
    ),
    "linear": Entry(
        lambda data, _: nn.Linear(data.inputs, data.classes), CLASSES, "no hidden layer"
    ),
    "logistic": Entry(
        lambda data, _: nn.Linear(data.inputs, 1), TWO_CLASSES, "one weight an input", 2
    ),
    "autoencoder": Entry(
        lambda data, hidden: autoencoder(data.inputs, hidden),
        RECONSTRUCTION,
        "to 30 numbers and back",
    ),
}


def side_information(model: nn.Module, frequencies: torch.Tensor) -> list[torch.Tensor]:
    """A of AdaDPS without public examples: weights by how frequent their input is (papers/004).

    Args:
        model: whose first Linear layer takes the inputs.
        frequencies: of each input; public, and 1 on average here.

    Returns:
        A tensor per parameter, ones where no input is weighted.
    """
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Linear)).weight
    row = (frequencies / frequencies.mean()).clamp_min(1e-6)
    return [
        row.expand_as(p).clone() if p is first else torch.ones_like(p) for p in model.parameters()
    ]


def require(name: str, data: Dataset) -> None:
    """Return if there is such a model for such data.

    Raises:
        DataError: there is none of that name, or it cannot tell so many classes apart.
    """
    if name not in MODELS:
        raise DataError(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    classes = MODELS[name].classes
    if classes not in (None, data.classes):
        raise DataError(f"{name} tells {classes} classes apart, the data have {data.classes}")
    if MODELS[name].images and data.images is None:
        raise DataError(f"{name} takes images, and these data are rows of numbers")


def make_model(name: str, data: Dataset, hidden: int = 1000) -> nn.Module:
    """A model by its name, on the device of the data.

    Raises:
        DataError: see `require`; or it does not fit into memory.
    """
    require(name, data)
    try:
        return MODELS[name].make(data, hidden).to(data.train_examples.device)
    except RuntimeError as error:
        raise DataError(f"{name} with hidden layers of {hidden} does not fit: {error}") from None
