"""Every optimizer on every kind of layer: without noise, the updates of gradients by definition.

Where PyTorch has the optimizer, its updates are the reference, without clipping. For every
optimizer the reference is also the optimizer itself, with gradients that are computed and clipped
by their definition, one model pass per example; that its rule is right is tested by
`test_optimizer_updates`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from torch import nn

from tests.support.clipped_sums import clip_rows, gradient_rows
from tests.support.layer_models import (
    LAYER_MODELS,
    SIZE,
    Examples,
    MeanOverPositions,
    build,
    call,
    sequences,
)
from tests.support.optimizer_cases import OPTIONS, REFERENCES, STATES, build_optimizer
from tests.support.small_models import unbudgeted
from training_client.lab.models import cross_entropy
from training_client.optimizers import PrivateOptimizer, make_optimizer
from training_client.plan import Plan
from training_client.private_step import AccumulatedSum, Clipper, Loss, Transform

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported"),
    pytest.mark.usefixtures("quiet"),
]
QUIET = Plan(dataset_size=2 * SIZE, sample_rate=0.5, clip_norm=1e9, noise_multiplier=1e-30)
CLIPPED = replace(QUIET, clip_norm=1.2)  # below some gradients' norms, and above others'
CONV1D = "Conv1D of Hugging Face"
NAMES = [*LAYER_MODELS, CONV1D]
STEPS = 3
PHYSICAL_BATCH_SIZES = (None, 1, 4)
PLAIN = ("dp_sgd", "dp_adam", "dp_adamw", "dp_rmsprop", "dp_adagrad")


def build_layers(name: str, seed: int = 0) -> tuple[nn.Module, Examples, torch.Tensor]:
    """Return a model in double precision, a batch, and labels."""
    if name != CONV1D:
        return build(name, seed)
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(seed)
    net = nn.Sequential(conv1d(9, 6), nn.Tanh(), conv1d(4, 9), MeanOverPositions())
    return net.double(), sequences(), torch.randint(0, 4, (SIZE,))


def build_from_layers(
    optimizer: str, state: str, name: str, physical_batch_size: int | None = None
) -> tuple[PrivateOptimizer, nn.Module, Examples, torch.Tensor]:
    """Return an optimizer, its model and a batch; all start from the same numbers."""
    net, examples, labels = build_layers(name)
    _, *public = build_layers(name, seed=1)
    found = build_optimizer(
        optimizer, net, CLIPPED, state=state, public=tuple(public), learning_rate=0.01,
        physical_batch_size=physical_batch_size, **OPTIONS.get(optimizer, {}),
    )  # fmt: skip
    return found, net, examples, labels


@contextmanager
def gradients_by_definition() -> Iterator[None]:
    """Let all sums of gradients be computed by one model pass per example."""

    def as_rows(clipper: Clipper, examples: Examples, targets: torch.Tensor) -> torch.Tensor:
        """Return one gradient per row."""
        with torch.enable_grad():
            return gradient_rows(clipper._model, examples, targets)

    def clip(
        self: Clipper,
        examples: Examples,
        targets: torch.Tensor,
        _: Loss,
        transform: Transform,
        share: float,
    ) -> AccumulatedSum:
        """Return the sum of clipped gradients."""
        gradients = as_rows(self, examples, targets)
        return AccumulatedSum(clip_rows(gradients, transform, self.blocks).sum(0), 0.0)

    def sum_unclipped(
        self: Clipper, examples: Examples, targets: torch.Tensor, _: Loss, size: float
    ) -> AccumulatedSum:
        """Return Σ∇ over `size`."""
        return AccumulatedSum(as_rows(self, examples, targets).sum(0) / size, 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clipper, "clip", clip)
        patch.setattr(Clipper, "sum_unclipped", sum_unclipped)
        yield


def require_equal(one: nn.Module, other: nn.Module, atol: float = 1e-6) -> None:
    """Raise unless two models have the same parameters up to rounding."""
    for first, second in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=atol)


def compare_with_definition(
    optimizer: str, state: str, name: str, physical_batch_size: int | None
) -> None:
    """Raise unless an optimizer makes the steps that it makes of gradients by definition."""
    ours, net, examples, labels = build_from_layers(optimizer, state, name, physical_batch_size)
    before = [each.clone() for each in net.parameters()]
    for _ in range(STEPS):
        ours.step(examples, labels, cross_entropy)
    exact, other, _, _ = build_from_layers(optimizer, state, name)
    with gradients_by_definition():
        for _ in range(STEPS):
            exact.step(examples, labels, cross_entropy)
    require_equal(net, other)
    assert not all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.spread(first=3, second=6)
@pytest.mark.parametrize("of", STATES)
def test_an_optimizer_with_tied_weights_equals_itself_with_gradients_by_definition(
    of: tuple[str, str],
) -> None:
    compare_with_definition(*of, "tied embedding", 4)


@pytest.mark.slow
def test_optimizers_of_pytorch_are_equalled_on_every_layer(subtests: pytest.Subtests) -> None:
    """And public examples may be a dictionary."""
    for name, optimizer, size in zip(NAMES, cycle(PLAIN), cycle(PHYSICAL_BATCH_SIZES)):
        with subtests.test(name, optimizer=optimizer, physical_batch_size=size):
            compare_with_pytorch(optimizer, name, size)
    compare_with_definition("adadps", "public", "packed sequences", None)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_optimizers_equal_themselves_with_gradients_by_definition(
    name: str, subtests: pytest.Subtests
) -> None:
    for (optimizer, state), size in product(STATES, PHYSICAL_BATCH_SIZES):
        with subtests.test(optimizer=optimizer, state=state, physical_batch_size=size):
            compare_with_definition(optimizer, state, name, size)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_optimizers_equal_those_of_pytorch(name: str, subtests: pytest.Subtests) -> None:
    for optimizer, size in product(PLAIN, PHYSICAL_BATCH_SIZES):
        with subtests.test(optimizer=optimizer, physical_batch_size=size):
            compare_with_pytorch(optimizer, name, size)


def compare_with_pytorch(optimizer: str, name: str, physical_batch_size: int | None) -> None:
    """Raise unless an optimizer makes PyTorch's steps; the learning rate is the references'."""
    net, examples, labels = build_layers(name)
    other, _, _ = build_layers(name)
    ours = make_optimizer(
        optimizer, net, unbudgeted(QUIET), learning_rate=0.05,
        physical_batch_size=physical_batch_size,
    )  # fmt: skip
    reference = REFERENCES[optimizer](list(other.parameters()))
    for _ in range(STEPS):
        ours.step(examples, labels, cross_entropy)
        reference.zero_grad()
        (cross_entropy(call(other, examples), labels).sum() / SIZE).backward()
        reference.step()
    # Adagrad divides by |∇| + 1e-10, which turns a gradient of rounding errors alone into steps
    require_equal(net, other, 1e-5 if optimizer == "dp_adagrad" else 1e-6)
