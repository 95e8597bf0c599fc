"""Every optimizer with schedules, with automatic clipping and with adaptive clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.optimizer_cases import (
    BOXED,
    OPTIONS,
    PLAN,
    STATES,
    Recorder,
    build_optimizer,
    clipped_per_example,
    scaled_loss,
    wide_row_model,
)
from tests.support.small_models import batch, model, per_example, unbudgeted
from training_client.errors import DataError
from training_client.lab.models import cross_entropy
from training_client.optimizers import PrivateOptimizer, make_optimizer
from training_client.plan import AdaptiveClipping, Schedule
from training_client.private_step import Clipper, Transform
from training_client.private_step.private_sum import NoisyMean, PrivateSum

WHOLE = [case for case in STATES if case not in BOXED]
SCHEDULED = replace(
    PLAN,
    noise_schedule=Schedule.by_steps([(1, 1.0), (2, 0.25)]),
    clip_schedule=Schedule.by_steps([(2, 1.0), (1, 3.0)]),
)
STABILITY = 0.01


class Releases:
    """A record of the transform and the noise of each release of an optimizer."""

    def __init__(self, optimizer: PrivateOptimizer) -> None:
        self.transforms: list[Transform] = []
        self.means: list[NoisyMean] = []
        genuine = optimizer.private_sum.release

        def release(*of: Any) -> NoisyMean:
            self.transforms.append(of[3])
            self.means.append(genuine(*of))
            return self.means[-1]

        optimizer.private_sum.release = release  # type: ignore[method-assign]


@pytest.mark.parametrize(("name", "state"), STATES)
def test_each_step_has_the_noise_that_it_is_charged_with(name: str, state: str) -> None:
    optimizer = build_optimizer(
        name, model(), SCHEDULED, state=state, generator=torch.Generator().manual_seed(4)
    )
    releases = Releases(optimizer)
    for step in range(1, 5):
        optimizer.step(*batch(8), cross_entropy)
        plan, bound = SCHEDULED.at(step), releases.transforms[-1].bound
        assert bound in (plan.clip_norm, pytest.approx(math.sqrt(optimizer.size)))
        sigma = SCHEDULED.mechanism(4)["mechanisms"][min(step - 1, 1)]["noise_multiplier"]
        stated = sigma * bound / SCHEDULED.expected_batch_size
        assert releases.means[-1].noise_deviation == pytest.approx(stated, rel=1e-12)


def test_the_noise_drawn_is_that_of_its_step() -> None:
    net, examples, labels = wide_row_model()
    optimizer = make_optimizer("dp_sgd", net, unbudgeted(SCHEDULED))
    recorder = Recorder(optimizer)
    for step in range(1, 4):
        optimizer.step(examples[:0], labels[:0], cross_entropy)
        stated = SCHEDULED.at(step).noise_deviation / SCHEDULED.expected_batch_size
        assert float(recorder.released[-1].std()) == pytest.approx(stated, rel=0.01)


@pytest.mark.parametrize(("name", "state"), STATES)
def test_the_learning_rate_follows_its_schedule(name: str, state: str) -> None:
    """A step of factor 0 changes nothing, and the rate that is set stays as it was."""
    plan = replace(PLAN, learning_rate_schedule=Schedule.by_steps([(1, 1.0), (1, 0.0)]))
    optimizer = build_optimizer(name, model(), plan, state=state, learning_rate=0.125)
    optimizer.step(*batch(8), cross_entropy)
    before = [each.detach().clone() for each in optimizer.parameters]
    optimizer.step(*batch(8), cross_entropy)
    assert all(map(torch.equal, before, optimizer.parameters))
    assert optimizer.learning_rate == 0.125


# --- automatic clipping


@pytest.mark.parametrize("size", [1e-9, 1e3])
@pytest.mark.parametrize(("name", "state"), WHOLE)
def test_automatic_clipping_normalises_every_example(name: str, state: str, size: float) -> None:
    """Each example adds C·u/(‖u‖ + γ), so less than C."""
    net, (examples, labels) = model(), batch(8)
    plan = replace(PLAN, noise_multiplier=1e-18, clip_norm=3.0)
    options = OPTIONS.get(name, {}) | {"automatic_clipping": STABILITY}
    optimizer = build_optimizer(name, net, plan, state=state, **options)
    recorder, releases = Recorder(optimizer), Releases(optimizer)
    optimizer.step(examples, labels, cross_entropy)
    open_transform = optimizer.transform()
    unbounded = clipped_per_example(
        net, replace(open_transform, bound=1e12, box=False), examples, labels
    )
    norms = unbounded.norm(dim=1, keepdim=True) * size
    expected = (open_transform.bound * size * unbounded / (norms + STABILITY)).sum(0)
    if open_transform.shift is None and not open_transform.damping:
        optimizer.step(examples, labels, scaled_loss(size))
        found = recorder.released[-1] * plan.expected_batch_size
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    stated = 1e-18 * open_transform.bound / plan.expected_batch_size
    assert releases.means[-1].noise_deviation == pytest.approx(stated)
    optimizer.step(examples[:1], labels[:1], scaled_loss(size))
    assert float(recorder.released[-1].norm()) * plan.expected_batch_size < open_transform.bound


def test_one_record_moves_an_automatically_clipped_sum_by_less_than_its_bound() -> None:
    """Also in single precision, for gradients of any magnitude; the noise is for the bound."""
    net = nn.Linear(6, 4)
    clipper, transform = Clipper(net), Transform(2.0).automatic(STABILITY)
    assert transform.bound == STABILITY
    assert transform.gain == 2.0 / STABILITY
    examples, labels = torch.randn(1, 6), torch.tensor([1])
    for power in range(-45, 38, 3):
        total = clipper.clip(examples, labels, scaled_loss(float(10.0**power)), transform)
        sums = clipper.zeros()
        for block in clipper.blocks:
            total.write_block(block, transform.for_block(block), block.view_in(sums))
        assert float(sums.double().norm()) <= STABILITY


@pytest.mark.parametrize("stability", [0.0, -1.0, math.nan, math.inf])
def test_automatic_clipping_needs_a_positive_stability(stability: float) -> None:
    with pytest.raises(ValueError, match="automatic_clipping > 0"):
        build_optimizer("dp_sgd", model(), PLAN, automatic_clipping=stability)


# --- adaptive clipping


ADAPTIVE = replace(PLAN, adaptive_clipping=AdaptiveClipping(count_noise=2.0))


def count(net: nn.Module, bound: float, *of: torch.Tensor, physical: int | None = None) -> int:
    """Return the number of examples that are not clipped, as a step counts them."""
    transform = replace(Transform(bound), counts=True)
    return Clipper(net, physical).clip(*of, cross_entropy, transform).unclipped


def test_the_count_is_of_the_examples_within_the_clip_norm() -> None:
    net, (examples, labels) = model(), batch(32)
    gradients = torch.cat([each.flatten(1) for each in per_example(net, examples, labels)], 1)
    norms = gradients.norm(dim=1)
    for bound in (float(norms.min()) / 2, float(norms.median()), 2 * float(norms.max())):
        expected = int((norms < bound * (1 - 1e-6)).sum())
        assert count(net, bound, examples, labels) == expected
        assert count(net, bound, examples, labels, physical=5) == expected


def test_a_record_changes_the_count_by_one_at_most() -> None:
    net, (examples, labels) = model(), batch(16)
    gradients = torch.cat([each.flatten(1) for each in per_example(net, examples, labels)], 1)
    bound = float(gradients.norm(dim=1).median()) * 1.01
    whole = count(net, bound, examples, labels)
    without = [
        count(net, bound, *(torch.cat([each[:i], each[i + 1 :]]) for each in (examples, labels)))
        for i in range(16)
    ]
    assert {whole - each for each in without} == {0, 1}


@pytest.mark.parametrize(("name", "state"), WHOLE)
def test_the_clip_norm_follows_the_noisy_count_only(name: str, state: str) -> None:
    """With every example clipped it grows, and no count changes what a checkpoint restores."""
    optimizer = build_optimizer(name, model(), replace(ADAPTIVE, clip_norm=1e-3), state=state)
    releases = Releases(optimizer)
    for _ in range(4):
        factor, norm = optimizer.clip_factor, optimizer.clip_norm
        optimizer.step(*batch(32), cross_entropy)
        unclipped = releases.means[-1].unclipped
        assert unclipped is not None
        is_ball = releases.transforms[-1].bound == norm
        clipping = ADAPTIVE.adaptive_clipping
        assert clipping is not None
        expected = clipping.next_factor(factor, unclipped) if is_ball else factor
        assert optimizer.clip_factor == expected
    other = build_optimizer(name, model(), ADAPTIVE, state=state)
    other.load_state_dict(optimizer.state_dict())
    assert other.clip_factor == optimizer.clip_factor != 1
    plain = build_optimizer(name, model(), PLAN, state=state)
    with pytest.raises(DataError, match="adaptive clipping"):
        plain.load_state_dict(optimizer.state_dict())


def test_the_count_has_the_noise_that_it_is_charged_with() -> None:
    """An empty batch's count is only noise, of standard deviation τ over qN."""
    private_sum = PrivateSum(model(), unbudgeted(ADAPTIVE))
    examples, labels = batch(8)
    transform = replace(Transform(1.0), counts=True)
    seen = []
    for _ in range(3000):
        found = private_sum.release(examples[:0], labels[:0], cross_entropy, transform)
        found.to_tensors()  # the step is finished when its mean was read
        assert found.unclipped is not None
        seen.append(found.unclipped * ADAPTIVE.expected_batch_size)
    noise = torch.tensor(seen)
    assert float(noise.std()) == pytest.approx(2.0, rel=0.06)
    assert abs(float(noise.mean())) < 0.2


def test_the_clip_norm_reaches_the_median_of_the_norms() -> None:
    examples, labels = batch(32)
    net = model()
    gradients = torch.cat([each.flatten(1) for each in per_example(net, examples, labels)], 1)
    median = float(gradients.norm(dim=1).median())
    plan = replace(
        PLAN, dataset_size=32, sample_rate=1.0, noise_multiplier=1e-9, clip_norm=100 * median,
        adaptive_clipping=AdaptiveClipping(1e-9),
    )  # fmt: skip
    optimizer = make_optimizer("dp_sgd", net, unbudgeted(plan), learning_rate=0.0)
    for _ in range(120):
        optimizer.step(examples, labels, cross_entropy)
    assert optimizer.clip_norm == pytest.approx(median, rel=0.1)


def wrong_ways() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield combinations that clip no example as a whole, or have no threshold to adapt."""
    yield "adadp", {"box": True, "automatic_clipping": 0.01}, "a box clips coordinates"
    yield "adadp", {"box": True, "plan": ADAPTIVE}, "a box clips coordinates"
    yield "dp_sgd", {"automatic_clipping": 0.01, "plan": ADAPTIVE}, "no threshold to adapt"


@pytest.mark.parametrize(("name", "options", "message"), list(wrong_ways()))
def test_combinations_without_a_meaning_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    plan = options.pop("plan", PLAN)
    with pytest.raises(ValueError, match=message):
        build_optimizer(name, model(), plan, **options)
