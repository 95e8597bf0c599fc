"""Gradients that optimizers shift, scale, box or damp, then clip, on every kind of layer."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layer_models import (
    LAYER_MODELS,
    SIZE,
    build,
    each_gradient,
    select,
    to_single_precision,
)
from tests.support.optimizer_cases import SHAPES, build_transform, clip_rows
from tests.support.small_models import sum_clipped
from training_client.lab.models import cross_entropy
from training_client.private_step import Clipper, Transform

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
AUTOMATIC = "automatic"
ALL_SHAPES = (*SHAPES, AUTOMATIC)


def build_shape(shape: str, net: nn.Module, gradients: torch.Tensor) -> Transform:
    """Return a transform that clips some of these gradients, one per row, but not all of them."""
    if shape == AUTOMATIC:
        return Transform(0.7).automatic(float(gradients.norm(dim=1).mean()))
    found = build_transform(shape, net)
    if found.box:
        return found
    unclipped = clip_rows(gradients, replace(found, bound=1e9), Clipper(net).blocks)
    return replace(found, bound=float(unclipped.norm(dim=1).mean()))


def gradient_rows(net: nn.Module, *of: Any) -> torch.Tensor:
    """Return each example's gradient as a row, one model pass per example."""
    return torch.stack([torch.cat([p.flatten() for p in g]) for g in each_gradient(net, *of)])


def clipped(net: nn.Module, *of: Any, physical_batch_size: int | None = None) -> torch.Tensor:
    """Return a batch's sum of transformed and clipped gradients as one vector."""
    examples, labels, transform = of
    clipper = Clipper(net, physical_batch_size)
    found, _ = sum_clipped(clipper, examples, labels, cross_entropy, transform)
    return torch.cat([each.flatten() for each in found])


def compare_with_definition(name: str, shape: str, physical_batch_size: int | None) -> None:
    """Raise unless a sum of clipped gradients is that of each example's own pass."""
    net, examples, labels = build(name)
    gradients = gradient_rows(net, examples, labels)
    transform = build_shape(shape, net, gradients)
    found = clipped(net, examples, labels, transform, physical_batch_size=physical_batch_size)
    exact = clip_rows(gradients, transform, Clipper(net).blocks).sum(0)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9 * float(exact.abs().max()))


def require_bound(name: str, shape: str) -> None:
    """Raise if in single precision an example's part of a sum exceeds the bound.

    Raise as well if it is far from its definition: a sum of zeros exceeds no bound.
    """
    net, examples, labels = build(name)
    net, examples = to_single_precision(net, examples)
    gradients = gradient_rows(net, examples, labels)
    transform = build_shape(shape, net, gradients)
    exact = clip_rows(gradients, transform, Clipper(net).blocks)
    for at in range(SIZE):
        one = slice(at, at + 1)
        found = clipped(net, select(examples, one), labels[one], transform).double()
        assert float(found.norm()) <= transform.bound
        assert not transform.box or float(found.abs().max()) <= 1
        assert float((found - exact[at]).norm()) < 2e-3 * float(exact[at].norm())


SIZES = (None, 4)
EVERY_CASE = list(product(LAYER_MODELS, ALL_SHAPES))
SOME_CASES = list(zip(LAYER_MODELS, cycle(ALL_SHAPES)))  # one transform of each layer


@pytest.mark.parametrize(("name", "shape"), SOME_CASES)
def test_transformed_and_clipped_gradients_equal_their_definition(name: str, shape: str) -> None:
    compare_with_definition(name, shape, SIZES[SOME_CASES.index((name, shape)) % 2])


@pytest.mark.parametrize(("name", "shape"), SOME_CASES)
def test_no_transformed_gradient_exceeds_the_bound(name: str, shape: str) -> None:
    require_bound(name, shape)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYER_MODELS)
def test_all_transforms_equal_their_definition(name: str, subtests: pytest.Subtests) -> None:
    for shape, size in product(ALL_SHAPES, SIZES):
        with subtests.test(shape=shape, physical_batch_size=size):
            compare_with_definition(name, shape, size)
    for shape in ALL_SHAPES:
        with subtests.test(shape=shape, precision="single"):
            require_bound(name, shape)
