"""Every kind of layer: clipped sums equal the definition, on every path of the engine."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.layer_models import (
    LAYER_MODELS,
    POSITIONS,
    SIZE,
    WIDTH,
    WORDS,
    OwnParameter,
    build,
    call,
    clipped_sum_by_definition,
    each_gradient,
    padded,
    select,
    sequences,
    to_single_precision,
    tokens,
)
from tests.support.small_models import unbudgeted
from training_client.lab.models import cross_entropy
from training_client.optimizers import make_optimizer
from training_client.plan import Plan
from training_client.private_step.clippable_layers import find_trained_layers
from training_client.private_step.layer_uses import merge_parts
from training_client.private_step.model_checks import _gradients_of_magnitudes, _sum_tolerances
from training_client.private_step.model_pass import run_model_pass
from training_client.private_step.rounding_bounds import weight_rounding
from training_client.testing import clipped_sum

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
PATHS = (None, "gram", "product", "held", "replay")
TORCH_OPTIMIZERS: dict[str, Any] = {
    "dp_sgd": torch.optim.SGD,
    "dp_adam": torch.optim.Adam,
    "dp_rmsprop": torch.optim.RMSprop,
    "dp_adagrad": torch.optim.Adagrad,
}


def norm_of(tensors: list[torch.Tensor]) -> float:
    """Return the norm of all tensors together."""
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))


@pytest.mark.parametrize("physical_batch_size", [None, 4])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", LAYER_MODELS)
def test_a_clipped_sum_equals_its_definition(
    name: str, path: Any, physical_batch_size: int | None
) -> None:
    net, examples, labels = build(name)
    longest = max(map(norm_of, each_gradient(net, examples, labels)))
    for clip_norm in (0.5 * longest, 0.01 * longest, math.inf):
        found = clipped_sum(
            net, examples, labels, cross_entropy, clip_norm,
            path=path, physical_batch_size=physical_batch_size,
        )  # fmt: skip
        exact = clipped_sum_by_definition(net, examples, labels, clip_norm)
        largest = max(float(each.abs().max()) for each in exact)
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * largest)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", LAYER_MODELS)
def test_in_single_precision_no_example_exceeds_the_clip_norm(name: str, path: Any) -> None:
    net, examples, labels = build(name)
    net, examples = to_single_precision(net, examples)

    for size in (1.0, 1e4):

        def loss(outputs: torch.Tensor, targets: torch.Tensor, size: float = size) -> torch.Tensor:
            return size * cross_entropy(outputs, targets)

        for at in range(SIZE):
            one = slice(at, at + 1)
            exact = norm_of(each_gradient(net, select(examples, one), labels[one])[0])
            found = clipped_sum(net, select(examples, one), labels[one], loss, 1e-2, path=path)
            assert norm_of(found) <= 1e-2
            assert norm_of(found) > 0.999 * min(1e-2, size * exact)


@pytest.mark.parametrize("name", LAYER_MODELS)
def test_without_noise_and_clipping_an_optimizer_equals_the_plain_one(name: str) -> None:
    plan = Plan(dataset_size=2 * SIZE, sample_rate=0.5, clip_norm=1e25, noise_multiplier=1e-60)
    for private, plain in TORCH_OPTIMIZERS.items():
        (net, examples, labels), (other, _, _) = build(name), build(name)
        optimizer = make_optimizer(private, net, unbudgeted(plan), learning_rate=0.01)
        reference = plain(other.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.step(examples, labels, cross_entropy)
            reference.zero_grad()
            (cross_entropy(call(other, examples), labels).sum() / SIZE).backward()
            reference.step()
        for one, two in zip(net.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Let `gc.get_objects` list only what is made inside the `with` block and not freed."""
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize("name", LAYER_MODELS)
def test_a_step_frees_its_tensors_without_the_garbage_collector(name: str) -> None:
    """A cycle of references would keep the inputs of one or more earlier steps in memory."""
    net, examples, labels = build(name)
    clipped_sum(net, examples, labels, cross_entropy, 1.0)  # kernels are compiled and kept
    with without_garbage_collector():
        clipped_sum(net, examples, labels, cross_entropy, 1.0)
        left = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        assert not left


def largest_change(name: str, seed: int, clip_norm: float, path: Any) -> float:
    """Return the norm of what one record, drawn at random, changes in a clipped sum."""
    net, examples, labels = build(name, seed)
    draw = random.Random(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(10 ** draw.uniform(-1, 1))
    record = draw.randrange(SIZE)
    rest = torch.arange(SIZE) != record
    whole = clipped_sum(net, examples, labels, cross_entropy, clip_norm, path=path)
    less = clipped_sum(net, select(examples, rest), labels[rest], cross_entropy, clip_norm,  # type: ignore[arg-type]
                       path=path)  # fmt: skip
    return norm_of([one - other for one, other in zip(whole, less, strict=True)])


@pytest.mark.parametrize("name", LAYER_MODELS)
def test_a_record_changes_a_sum_by_the_clip_norm_at_most(name: str) -> None:
    changes = []
    for seed in range(3):
        for clip_norm in (1e-3, 1.0):
            path = random.Random(seed).choice(PATHS)
            changes.append(largest_change(name, seed, clip_norm, path) / clip_norm)
    assert max(changes) <= 1 + 1e-9
    assert max(changes) > 1 - 10 * weight_rounding(torch.float64)


def test_packed_sequences_may_be_shorter_in_the_batch_of_the_check() -> None:
    """With this seed the model's check runs on shorter sequences than the batch has."""
    assert largest_change("packed sequences", 51, 0.5, None) <= 0.5 * (1 + 1e-9)


@pytest.mark.parametrize("name", LAYER_MODELS)
def test_no_gradient_exceeds_the_magnitudes_of_its_terms(name: str) -> None:
    """The model's check allows for rounding in proportion to these magnitudes."""
    net, examples, labels = build(name)
    parameters = [each for each in net.parameters() if each.requires_grad]
    found = run_model_pass(
        net, find_trained_layers(net), examples, labels, cross_entropy, differentiate=parameters
    )
    tolerances, magnitudes = _sum_tolerances(found), _gradients_of_magnitudes(found.uses)
    for parameter, gradient in zip(parameters, found.full_gradients, strict=True):
        _, is_exact = tolerances[parameter]
        if is_exact:
            assert gradient is not None
            total = torch.empty_like(gradient)
            ones = total.new_ones(SIZE)
            merge_parts(magnitudes[parameter], None).weighted_sum(slice(0, len(total)), ones, total)
            assert bool((gradient.abs() <= total * (1 + 1e-9)).all()), parameter.shape


def test_the_check_of_a_normalisation_layer_allows_for_the_rounding_of_all_its_terms() -> None:
    """With this seed the terms of a scale's gradient are larger than normalised absolute inputs."""
    assert largest_change("convolution", 4847, 3e-4, "product") <= 3e-4 * (1 + 1e-9)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_record_changes_ten_thousand_sums_by_the_clip_norm_at_most() -> None:
    draw = random.Random(1)
    for seed in range(10_000):
        name, clip_norm = draw.choice(list(LAYER_MODELS)), 10 ** draw.uniform(-4, 1)
        assert largest_change(name, seed, clip_norm, draw.choice(PATHS)) <= clip_norm * (1 + 1e-9)


def test_padding_changes_no_sequence_of_another_length() -> None:
    """The sum over padded sequences is that over each sequence alone, at its own length."""
    net, _, labels = build("packed sequences")
    batch = padded()
    found = clipped_sum(net, batch, labels, cross_entropy, 0.1)
    alone = []
    for at, length in enumerate(batch["lengths"].tolist()):
        one = {
            "rows": batch["rows"][at : at + 1, :length],
            "lengths": batch["lengths"][at : at + 1],
        }
        alone.append(clipped_sum(net, one, labels[at : at + 1], cross_entropy, 0.1))
    for whole, *parts in zip(found, *alone, strict=True):
        torch.testing.assert_close(whole, torch.stack(parts).sum(0), rtol=1e-7, atol=1e-9)


class MaskedAttention(nn.Module):
    """Attention that leaves out the padding, and a mean over what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.last = nn.Linear(6, 4)

    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = self.attention(rows, src_key_padding_mask=~mask)
        kept = mask[:, :, None]
        return self.last((found * kept).sum(1) / kept.sum(1))  # type: ignore[no-any-return]


def test_masked_attention_does_not_see_the_padding() -> None:
    torch.manual_seed(1)
    net, rows, labels = MaskedAttention().double(), sequences(), torch.arange(SIZE) % 4
    lengths = torch.tensor([7, 3, 1, 5, 7, 2])
    mask = torch.arange(7)[None] < lengths[:, None]
    found = clipped_sum(net, {"rows": rows, "mask": mask}, labels, cross_entropy, 0.1)
    alone = []
    for at, length in enumerate(lengths.tolist()):
        one = {"rows": rows[at : at + 1, :length], "mask": mask[at : at + 1, :length]}
        alone.append(clipped_sum(net, one, labels[at : at + 1], cross_entropy, 0.1))
    for whole, *parts in zip(found, *alone, strict=True):
        torch.testing.assert_close(whole, torch.stack(parts).sum(0), rtol=1e-7, atol=1e-9)


def test_a_partly_frozen_layer_trains_the_rest() -> None:
    net, examples, labels = build("transformer layer")
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("bias" in name)
    found = clipped_sum(net, examples, labels, cross_entropy, 0.1)
    exact = clipped_sum_by_definition(net, examples, labels, 0.1)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


class Checkpointed(nn.Module):
    """Runs layers again in the backward pass, instead of keeping what they compute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(6, 6), nn.Linear(6, 4), nn.PReLU(6)
        self.places = nn.Embedding(7, 6)
        self.attention = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        used = {"attention": self.attention, "recurrent": self.recurrent, "scale": self.scale,
                "places": self.places}  # fmt: skip
        for name, layer in used.items():
            layer.requires_grad_(name == kind)
        self.kind = kind

    def again(self, rows: torch.Tensor) -> torch.Tensor:
        if self.kind == "attention":
            return self.attention(rows)  # type: ignore[no-any-return]
        if self.kind == "recurrent":
            return self.recurrent(rows)[0]  # type: ignore[no-any-return]
        if self.kind == "places":
            return rows * self.places(torch.arange(7)[None])  # type: ignore[no-any-return]
        return self.scale(rows.mT).mT  # type: ignore[no-any-return]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.first(rows)
        if self.kind == "scale":
            found = found.mT.contiguous().mT
        found = checkpoint(self.again, found, use_reentrant=False)
        return self.last(found).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["attention", "recurrent", "places", "scale"])
def test_layers_may_run_again_in_the_backward_pass(kind: str) -> None:
    torch.manual_seed(1)
    net, rows, labels = Checkpointed(kind).double(), sequences(), torch.arange(SIZE) % 4
    found = clipped_sum(net, rows, labels, cross_entropy, 0.1)
    exact = clipped_sum_by_definition(net, rows, labels, 0.1)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


class ChangedInPlace(nn.Module):
    """Changes the outputs of layers in place; on sequences they are views of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.linear, self.own = nn.Linear(WIDTH, WIDTH), OwnParameter()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.words(tokens)
        found += self.places(torch.arange(POSITIONS)[None])
        mapped = self.linear(found)
        mapped += found
        mapped[:, 0] = 0.0
        own = self.own(mapped)
        own *= 2.0
        found = self.attention(own, own, own)[0]
        found += own
        return self.last(found).mean(1)  # type: ignore[no-any-return]


def test_the_outputs_of_layers_may_be_changed_in_place() -> None:
    torch.manual_seed(1)
    net, words, labels = ChangedInPlace().double(), tokens(), torch.arange(SIZE) % 4
    found = clipped_sum(net, words, labels, cross_entropy, 0.1)
    exact = clipped_sum_by_definition(net, words, labels, 0.1)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
