"""Every optimizer: batches of any size, the stated noise, and the box of its paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.optimizer_cases import (
    BOXED,
    NETS,
    NOISY,
    OPTIONS,
    PLAN,
    STATES,
    Recorder,
    SequenceMean,
    build_optimizer,
    clipped_per_example,
    scaled_loss,
)
from tests.support.small_models import batch, model, unbudgeted
from training_client.lab.models import cross_entropy
from training_client.optimizers import OPTIMIZERS, PrivateOptimizer
from training_client.plan import Plan
from training_client.private_step import Block, Transform
from training_client.private_step.private_sum import NoisyBlock, NoisyMean, PrivateSum


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize(("name", "state"), STATES)
def test_batches_of_any_size_make_a_step(name: str, state: str, kind: str) -> None:
    """An empty batch still adds noise; splitting into physical batches changes nothing."""
    plan = Plan(dataset_size=64, sample_rate=0.5, clip_norm=1.0, noise_multiplier=1.0)
    found = []
    for physical in (None, 5):
        torch.manual_seed(9)
        net, examples = NETS[kind]()
        labels = torch.arange(len(examples)) % 4
        options = {"generator": torch.Generator().manual_seed(4), "public": (examples, labels)}
        optimizer = build_optimizer(
            name, net, plan, state=state, physical_batch_size=physical, **options
        )
        for size in (0, 1, 8):
            before = [p.detach().clone() for p in optimizer.parameters]
            optimizer.step(examples[:size], labels[:size], cross_entropy)
            after = optimizer.parameters
            assert all(torch.isfinite(p).all() for p in after)
            assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        found.append([p.detach() for p in net.parameters()])
    for whole, parts in zip(*found, strict=True):
        assert torch.allclose(whole, parts, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learning_rate_may_be_changed_between_steps(name: str) -> None:
    found = []
    for first, later in ((0.5, 0.125), (0.125, 0.125)):
        torch.manual_seed(9)
        generator = torch.Generator().manual_seed(4)
        optimizer = build_optimizer(name, model(), PLAN, learning_rate=first, generator=generator)
        assert optimizer.learning_rate == first
        optimizer.learning_rate = later
        optimizer.step(*batch(), cross_entropy)
        found.append([p.detach() for p in optimizer.parameters])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("name", "state"), STATES)
def test_a_step_uses_the_transform_from_before_its_update(
    name: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clip weights are computed with the transform of all blocks from before the update.

    So updating block by block equals updating after all blocks were computed.
    """
    monkeypatch.setattr("training_client.private_step.blocks._BLOCK_SIZE", 13)
    plan = replace(PLAN, noise_multiplier=1e-3)
    found = []
    for beforehand in (False, True):
        torch.manual_seed(9)
        options = OPTIONS.get(name, {}) | {"generator": torch.Generator().manual_seed(4)}
        optimizer = build_optimizer(name, model(), plan, state=state, **options)
        if beforehand:
            monkeypatch.setattr(
                optimizer.private_sum, "release", release_after_all_blocks(optimizer)
            )
        for _ in range(4):
            optimizer.step(*batch(), cross_entropy)
        assert len(optimizer.blocks) > len(optimizer.parameters)
        found.append([p.detach() for p in optimizer.parameters])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def release_after_all_blocks(optimizer: PrivateOptimizer) -> Callable[..., NoisyMean]:
    """Return a `PrivateSum.release` that computes all blocks before it returns the first."""
    genuine = optimizer.private_sum.release

    def release(*of: Any) -> NoisyMean:
        released, parts = genuine(*of), list[NoisyBlock]()
        released.for_each_block(parts.append)
        following = iter(parts)

        def known(block: Block, mean: torch.Tensor) -> NoisyBlock:
            part = next(following)
            assert part.block == block
            mean.copy_(part.mean)
            return replace(part, mean=mean)

        numbers = (released.mean_loss, released.noise_deviation)
        return NoisyMean(*numbers, optimizer.blocks, optimizer.parameters, known)

    return release


def test_a_release_can_be_read_once() -> None:
    private_sum = PrivateSum(model(), unbudgeted(PLAN))
    ways: list[Callable[[NoisyMean], object]] = [
        NoisyMean.to_tensors,
        lambda r: r.for_each_block(lambda _: None),
    ]
    for take in ways:
        for again in ways:
            released = private_sum.release(*batch(), cross_entropy, Transform(1.0))
            take(released)
            with pytest.raises(RuntimeError, match="can be read once"):
                again(released)


def wide_model(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model large enough to estimate a standard deviation from its noise, and examples."""
    torch.manual_seed(1)
    if kind == "rows":
        return nn.Sequential(nn.Linear(600, 500), nn.ReLU(), nn.Linear(500, 4)), torch.randn(4, 600)
    if kind == "images":
        net = nn.Sequential(
            nn.Conv2d(64, 512, 3), nn.GroupNorm(4, 512), nn.Flatten(), nn.Linear(512, 4)
        )
        return net, torch.randn(4, 64, 3, 3)
    net = nn.Sequential(
        nn.Embedding(3000, 100), nn.LayerNorm(100), SequenceMean(), nn.Linear(100, 4)
    )
    return net, torch.randint(0, 3000, (4, 6))


@pytest.mark.parametrize("kind", ["rows", "images", "sequences"])
@pytest.mark.parametrize(("name", "state"), NOISY)
def test_noise_has_the_stated_standard_deviation(name: str, state: str, kind: str) -> None:
    """An empty batch's noisy mean is only noise, of standard deviation σB/(qN)."""
    net, examples = wide_model(kind)
    labels = torch.arange(len(examples))
    plan = Plan(dataset_size=64, sample_rate=0.5, clip_norm=3.0, noise_multiplier=1.5)
    optimizer = build_optimizer(name, net, plan, state=state, public=(examples, labels))
    recorder, seen = Recorder(optimizer), []
    for _ in range(3):
        bound = optimizer.transform().bound
        optimizer.step(examples[:0], labels[:0], cross_entropy)
        stated = plan.noise_multiplier * bound / plan.expected_batch_size
        noise = recorder.released[-1]
        seen.append(noise / noise.norm())
        assert float(noise.std()) == pytest.approx(stated, rel=0.01)
        assert abs(float(noise.mean())) < 0.02 * stated
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize(("name", "state"), NOISY)
def test_noise_repeats_neither_within_a_step_nor_in_the_next(name: str, state: str) -> None:
    """Two blocks with the same noise would reveal the difference of their sums."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))
    examples, labels = torch.randn(4, 784), torch.arange(4)
    options = {"generator": torch.Generator().manual_seed(8), "public": (examples, labels)}
    optimizer = build_optimizer(name, net, PLAN, state=state, **options)
    recorder = Recorder(optimizer)
    for _ in range(2):
        optimizer.step(examples[:0], labels[:0], cross_entropy)
    noise = [block.view_in(step) for step in recorder.released for block in optimizer.blocks]
    assert len(noise) >= 14
    for one, other in combinations(noise, 2):
        size = min(len(one), len(other))
        both = torch.stack([one[:size], other[:size]])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 6 / math.sqrt(size)
    assert count_repeated_pairs(torch.cat(recorder.released)) <= 3  # by chance once in 50 times


def count_repeated_pairs(numbers: torch.Tensor) -> int:
    """Return the number of adjacent pairs of floats that occur again elsewhere, bit by bit."""
    bits = numbers.numpy().view(np.uint32).astype(np.uint64)
    pairs = np.sort(bits[:-1] << np.uint64(32) | bits[1:])
    return int((pairs[1:] == pairs[:-1]).sum())


@pytest.mark.parametrize(("name", "state"), BOXED)
def test_a_box_clamps_every_coordinate_of_every_example(name: str, state: str) -> None:
    net, (examples, labels) = model(), batch()
    plan = replace(PLAN, noise_multiplier=1e-9)
    optimizer = build_optimizer(name, net, plan, state=state, beta=2.0)
    recorder = Recorder(optimizer)
    for _ in range(2):
        optimizer.step(examples, labels, cross_entropy)
    boxed = replace(optimizer.transform(), box=True)
    each = clipped_per_example(net, boxed, examples, labels)
    assert 0.1 < float((each.abs() == 1).double().mean()) < 0.95
    optimizer.step(examples, labels, cross_entropy)
    found = recorder.released[-1] * plan.expected_batch_size
    assert torch.allclose(found, each.sum(0), rtol=1e-6, atol=1e-6)
    optimizer.step(examples[:1], labels[:1], scaled_loss(1e6))
    found = recorder.released[-1] * plan.expected_batch_size
    assert float(found.abs().max()) == pytest.approx(1.0, abs=1e-6)
