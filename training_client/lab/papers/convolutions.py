"""The network of papers/000 §IV-A for CIFAR-10: public convolutions, and private dense layers.

The convolutions are trained without privacy on CIFAR-100, which counts as public, and then fixed.
So a private example is the output of the convolutions for its image.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from training_client.lab.data import Dataset
from training_client.lab.data.cifar import cifar

_FILTERS: Final = 64
_NEIGHBOURS: Final = 9  # channels of local response normalisation
_WIDTHS: Final = (384, 192)  # the paper does not print them
_EPOCHS: Final = 20
_BATCH_SIZE: Final = 128
_CHUNK_ROWS: Final = 1000


def make_convolutions() -> nn.Sequential:
    """Make two convolutions with ReLU, pooling and local response normalisation."""
    normalise = nn.LocalResponseNorm(_NEIGHBOURS, alpha=1e-3 / 9)
    return nn.Sequential(
        nn.Unflatten(1, (3, 32, 32)),
        nn.Conv2d(3, _FILTERS, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), normalise,
        nn.Conv2d(_FILTERS, _FILTERS, 5, padding=2), nn.ReLU(), normalise, nn.MaxPool2d(2),
        nn.Flatten(),
    )  # fmt: skip


def make_dense_layers(data: Dataset) -> nn.Module:
    """Make two dense layers and the output layer, for the outputs of the convolutions."""
    first, second = _WIDTHS
    return nn.Sequential(
        nn.Linear(data.inputs, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(),
        nn.Linear(second, data.classes),
    )  # fmt: skip


@lru_cache(maxsize=1)
def load_features(folder: Path, seed: int, epochs: int = _EPOCHS) -> Dataset:
    """Return CIFAR-10 as outputs of convolutions that were trained on CIFAR-100.

    Raises:
        DataError: one of the two data sets is missing or broken.
    """
    private, public = cifar(folder), cifar(folder, 100)
    torch.manual_seed(seed)
    convolutions = make_convolutions()
    train_publicly(convolutions, public, epochs)
    return replace(
        private,
        train_examples=_apply(convolutions, private.train_examples),
        test_examples=_apply(convolutions, private.test_examples),
        images=None,
    )


def train_publicly(convolutions: nn.Sequential, public: Dataset, epochs: int) -> None:
    """Train convolutions with dense layers behind them on public images, without privacy."""
    with torch.no_grad():
        outputs = convolutions(public.train_examples[:1])
    head = make_dense_layers(replace(public, train_examples=outputs))
    network = nn.Sequential(convolutions, head)
    optimizer = torch.optim.Adam(network.parameters())
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(public.train_labels)), _BATCH_SIZE):
            optimizer.zero_grad()
            outputs = network(public.train_examples[rows])
            loss = functional.cross_entropy(outputs, public.train_labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@torch.no_grad()
def _apply(convolutions: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return the outputs of the convolutions for all images."""
    return torch.cat([convolutions(part) for part in torch.split(images, _CHUNK_ROWS)])
