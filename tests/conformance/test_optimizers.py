"""Every optimizer: the same steps however a batch is computed, and the stated noise.

An optimizer with a source of state makes a few steps twice with the same noise: plainly, and in
another way. The slow tests cover all pairs of optimizer, model, clipping and ways.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.accelerator_counts import no_cpu
from tests.support.clipped_sums import clipped_rows
from tests.support.optimizer_cases import (
    BOXED,
    NETS,
    NOISY,
    OPTIONS,
    PLAN,
    STATES,
    Recorder,
    Releases,
    SequenceMean,
    build_optimizer,
    scaled_loss,
)
from tests.support.pairwise import pairwise
from tests.support.small_models import batch, model, sum_clipped, unbudgeted
from training_client.errors import DataError
from training_client.lab.models import cross_entropy
from training_client.optimizers import OPTIMIZERS, PrivateOptimizer, make_optimizer
from training_client.plan import AdaptiveClipping, Plan, Schedule
from training_client.private_step import Block, Clipper, Transform
from training_client.private_step.private_sum import NoisyBlock, NoisyMean, PrivateSum
from training_client.private_step.rounding_bounds import sum_share

NOISE = replace(PLAN, noise_multiplier=1.0)
PLANS = {
    "fixed": NOISE,
    "automatic": NOISE,
    "adaptive": replace(NOISE, adaptive_clipping=AdaptiveClipping(2.0), clip_norm=1e-3),
    "scheduled": replace(
        NOISE,
        noise_schedule=Schedule.by_steps([(1, 1.0), (2, 0.25)]),
        clip_schedule=Schedule.by_steps([(2, 1.0), (1, 3.0)]),
        learning_rate_schedule=Schedule.by_steps([(3, 1.0), (1, 0.0)]),
    ),
}
SIZES, RATE = (0, 1, 8, 8), 0.05
AXES: dict[str, Any] = {
    "net": list(NETS),
    "clipping": list(PLANS),
    "physical_batch_size": (5, 1, None),
    "on_cpu": (True, False),
    "block_size": (None, 13),
    "has_defaults": (True, False),
    "is_resumed": (True, False),
    "sets_rate": (True, False),
    "reads_at_once": (True, False),
}


@dataclass(frozen=True)
class Way:
    """The way in which steps are computed; by default the plain one."""

    physical_batch_size: int | None = None
    on_cpu: bool = True
    is_resumed: bool = False
    sets_rate: bool = False
    reads_at_once: bool = False


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
        return NoisyMean(
            *numbers, optimizer.blocks, optimizer.parameters, known, released.unclipped
        )

    return release


def run(name: str, state: str, net: str, clipping: str, way: Way, options: Any) -> Any:
    """Make steps with batches of several sizes; return each step's parameters and releases."""
    torch.manual_seed(9)
    module, examples = NETS[net]()
    labels, generator = torch.arange(len(examples)) % 4, torch.Generator().manual_seed(4)

    def build() -> PrivateOptimizer:
        found = build_optimizer(
            name, module, PLANS[clipping], state=state, generator=generator,
            public=(examples, labels), physical_batch_size=way.physical_batch_size,
            learning_rate=0.5 if way.sets_rate else RATE, **options,
        )  # fmt: skip
        found.learning_rate = RATE
        if way.reads_at_once:
            found.private_sum.release = release_after_all_blocks(found)  # type: ignore[method-assign]
        return found

    optimizer, found = build(), []
    for step, size in enumerate(SIZES, start=1):
        if way.is_resumed and step == 3:
            kept = copy.deepcopy(optimizer.state_dict())
            optimizer = build()
            optimizer.load_state_dict(kept)
        torch.manual_seed(step)
        releases, norm, factor = Releases(optimizer), optimizer.clip_norm, optimizer.clip_factor
        # not where it is built: an accelerator has other blocks, and so other noise
        with no_cpu(pretend=not way.on_cpu, must_ask=size > 0):
            optimizer.step(examples[:size], labels[:size], cross_entropy)
        parameters = [each.detach().clone() for each in optimizer.parameters]
        found.append((parameters, releases, norm, factor, optimizer.clip_factor))
    assert optimizer.learning_rate == RATE
    return found


def compare_ways(
    name: str, state: str, *, net: str, clipping: str, block_size: int | None, has_defaults: bool,
    **way: Any,
) -> None:  # fmt: skip
    """Raise unless steps are the same in this way, with the noise and the bound of the plan."""
    clipping = "scheduled" if (name, state) in BOXED and clipping[0] == "a" else clipping
    options = {} if has_defaults else dict(OPTIONS.get(name, {}))
    options |= {"automatic_clipping": 0.01} if clipping == "automatic" else {}
    given = name, state, net, clipping
    with pytest.MonkeyPatch.context() as patch:
        if block_size is not None:
            # private: the size of blocks is no option, and only large models have several
            patch.setattr("training_client.private_step.blocks._BLOCK_SIZE", block_size)
        plain, other = run(*given, Way(), options), run(*given, Way(**way), options)
    before, plan = None, PLANS[clipping]
    charged = plan.mechanism(4).get("mechanisms", [])
    for step, (one, two) in enumerate(zip(plain, other, strict=True), start=1):
        parameters, releases, norm, factor, next_factor = one
        for first, second in zip(parameters, two[0], strict=True):
            assert bool(first.isfinite().all())
            torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-9)
        if before is not None:  # noise changes all, also in an empty batch; but a rate of 0 nothing
            changes = [not torch.equal(*pair) for pair in zip(before, parameters, strict=True)]
            assert not any(changes) if step == 4 and clipping == "scheduled" else all(changes)
        before = parameters
        transform, mean = releases.transforms[0], releases.means[0]
        size = sum(each.numel() for each in parameters)
        is_ball = clipping in ("fixed", "scheduled", "adaptive") and transform.bound == norm
        assert is_ball or clipping == "automatic" or transform.bound == pytest.approx(size**0.5)
        assert clipping == "adaptive" or norm == plan.at(step).clip_norm
        sigma = charged[min(step - 1, 1)]["noise_multiplier"] if charged else plan.noise_multiplier
        stated = sigma * transform.bound * transform.gain / plan.expected_batch_size
        # the rounding of sums is charged as more noise
        charged_noise = stated * (1 + sum_share(plan.expected_batch_size))
        most = charged_noise * (1 + 2.0**-27 * (size**0.5 + 2))
        assert charged_noise * (1 - 1e-12) <= mean.noise_deviation <= most
        if plan.adaptive_clipping is None or not is_ball:
            assert next_factor == factor
        else:
            assert next_factor == plan.adaptive_clipping.next_factor(factor, mean.unclipped)


@pytest.mark.parametrize(
    ("name", "row"), list(zip(OPTIMIZERS, cycle(pairwise(**AXES)))),
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_each_optimizer_makes_the_same_steps_in_another_way(name: str, row: dict[str, Any]) -> None:
    compare_ways(name, OPTIMIZERS[name].states[0], **row)


ROWS = pairwise(optimizer=STATES, **AXES)


@pytest.mark.spread(second=12)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "state"), STATES)
def test_optimizers_make_the_same_steps_in_every_way(
    name: str, state: str, subtests: pytest.Subtests
) -> None:
    for row in ROWS:
        if row["optimizer"] == (name, state):
            given = {axis: value for axis, value in row.items() if axis != "optimizer"}
            with subtests.test(**given):
                compare_ways(name, state, **given)


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


def test_sums_are_divided_by_the_expected_batch_size() -> None:
    net, (examples, labels) = model(), batch(8)
    plan = Plan(dataset_size=1000, sample_rate=0.1, clip_norm=1.0, noise_multiplier=1e-30)
    sums, _ = sum_clipped(Clipper(net), examples, labels, cross_entropy, Transform(1.0))
    before = [p.detach().clone() for p in net.parameters()]
    make_optimizer("dp_sgd", net, unbudgeted(plan), learning_rate=1.0).step(
        examples, labels, cross_entropy
    )
    for old, new, total in zip(before, net.parameters(), sums, strict=True):
        assert torch.allclose(old - new, total / 100)


# --- noise


def wide_model(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model large enough to estimate a standard deviation from its noise, and examples."""
    torch.manual_seed(1)
    if kind == "rows":
        net = nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))
        return net, torch.randn(4, 784)
    if kind == "images":
        net = nn.Sequential(
            nn.Conv2d(64, 512, 3), nn.GroupNorm(4, 512), nn.Flatten(), nn.Linear(512, 4)
        )
        return net, torch.randn(4, 64, 3, 3)
    net = nn.Sequential(
        nn.Embedding(3000, 100), nn.LayerNorm(100), SequenceMean(), nn.Linear(100, 4)
    )
    return net, torch.randint(0, 3000, (4, 6))


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("case", list(zip(NOISY, cycle(("rows", "images", "sequences")))))
def test_noise_has_the_stated_deviation_and_is_never_repeated(
    case: tuple[tuple[str, str], str],
) -> None:
    """An empty batch's noisy mean is only noise, of standard deviation σB/(qN).

    Two blocks with the same noise would reveal the difference of their sums.
    """
    (name, state), kind = case
    net, examples = wide_model(kind)
    options = {
        "generator": torch.Generator().manual_seed(8),
        "public": (examples, torch.arange(len(examples))),
    }
    plan = Plan(dataset_size=64, sample_rate=0.5, clip_norm=3.0, noise_multiplier=1.5)
    optimizer = build_optimizer(name, net, plan, state=state, **options)
    recorder = Recorder(optimizer)
    for _ in range(2):
        bound = optimizer.transform().bound
        optimizer.step(examples[:0], torch.arange(0), cross_entropy)
        stated = plan.noise_multiplier * bound / plan.expected_batch_size
        assert float(recorder.released[-1].std()) == pytest.approx(stated, rel=0.01)
        assert abs(float(recorder.released[-1].mean())) < 0.02 * stated
    noise = [block.view_in(step) for step in recorder.released for block in optimizer.blocks]
    assert len(noise) >= (14 if kind == "rows" else 6)
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


def test_the_noise_drawn_is_that_of_its_step() -> None:
    """And the learning rate may be 0."""
    torch.manual_seed(1)
    net, plan = nn.Linear(600, 400), PLANS["scheduled"]
    optimizer = make_optimizer("dp_sgd", net, unbudgeted(plan))
    recorder = Recorder(optimizer)
    for step in range(1, 4):
        optimizer.step(torch.randn(0, 600), torch.arange(0), cross_entropy)
        stated = plan.at(step).noise_deviation / plan.expected_batch_size
        assert float(recorder.released[-1].std()) == pytest.approx(stated, rel=0.01)


# --- boxes, automatic and adaptive clipping


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("of", BOXED)
def test_a_box_clamps_every_coordinate_of_every_example(of: tuple[str, str]) -> None:
    net, (examples, labels) = model(), batch()
    plan = replace(PLAN, noise_multiplier=1e-9)
    optimizer = build_optimizer(of[0], net, plan, state=of[1], beta=2.0)
    recorder = Recorder(optimizer)
    for _ in range(2):
        optimizer.step(examples, labels, cross_entropy)
    each = clipped_rows(net, replace(optimizer.transform(), box=True), examples, labels)
    assert 0.1 < float((each.abs() == 1).double().mean()) < 0.95
    optimizer.step(examples, labels, cross_entropy)
    found = recorder.released[-1] * plan.expected_batch_size
    assert torch.allclose(found, each.sum(0), rtol=1e-6, atol=1e-6)
    optimizer.step(examples[:1], labels[:1], scaled_loss(1e6))
    found = recorder.released[-1] * plan.expected_batch_size
    assert float(found.abs().max()) == pytest.approx(1.0, abs=1e-6)


WHOLE = [case for case in STATES if case not in BOXED]


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("of", WHOLE)
def test_automatic_clipping_normalises_every_example(of: tuple[str, str]) -> None:
    """Each example adds C·u/(‖u‖ + γ), so less than C."""
    for size in (1e-9, 1e3):
        net, (examples, labels) = model(), batch(8)
        plan = replace(PLAN, noise_multiplier=1e-18, clip_norm=3.0)
        options = OPTIONS.get(of[0], {}) | {"automatic_clipping": 0.01}
        optimizer = build_optimizer(of[0], net, plan, state=of[1], **options)
        recorder = Recorder(optimizer)
        optimizer.step(examples, labels, cross_entropy)
        opened = optimizer.transform()
        unbounded = clipped_rows(net, replace(opened, bound=1e12, box=False), examples, labels)
        norms = unbounded.norm(dim=1, keepdim=True) * size
        expected = (opened.bound * size * unbounded / (norms + 0.01)).sum(0)
        if opened.shift is None and not opened.damping:
            optimizer.step(examples, labels, scaled_loss(size))
            found = recorder.released[-1] * plan.expected_batch_size
            largest = float(expected.abs().max())
            assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6 * largest)
        optimizer.step(examples[:1], labels[:1], scaled_loss(size))
        assert float(recorder.released[-1].norm()) * plan.expected_batch_size < opened.bound


def count(net: nn.Module, bound: float, *of: torch.Tensor, physical: int | None = None) -> int:
    """Return the number of examples that are not clipped, as a step counts them."""
    transform = replace(Transform(bound), counts=True)
    return Clipper(net, physical).clip(*of, cross_entropy, transform).unclipped


def test_the_count_is_of_the_examples_within_the_clip_norm() -> None:
    """And a record changes it by one at most."""
    net, (examples, labels) = model(), batch(32)
    norms = clipped_rows(net, Transform(1e9), examples, labels).norm(dim=1)
    for bound in (float(norms.min()) / 2, float(norms.median()), 2 * float(norms.max())):
        expected = int((norms < bound * (1 - 1e-6)).sum())
        assert count(net, bound, examples, labels) == expected
        assert count(net, bound, examples, labels, physical=5) == expected
    bound = float(norms.median()) * 1.01
    whole, rows = count(net, bound, examples, labels), torch.arange(32)
    less = [count(net, bound, examples[rows != at], labels[rows != at]) for at in range(16)]
    assert {whole - each for each in less} == {0, 1}


@pytest.mark.slow
def test_the_count_has_the_noise_that_it_is_charged_with() -> None:
    """An empty batch's count is only noise, of standard deviation τ over qN."""
    plan = PLANS["adaptive"]
    private_sum = PrivateSum(model(), unbudgeted(plan))
    transform, seen = replace(Transform(1.0), counts=True), []
    for _ in range(3000):
        found = private_sum.release(*batch(0), cross_entropy, transform)
        found.to_tensors()  # the step is finished when its mean was read
        assert found.unclipped is not None
        seen.append(found.unclipped * plan.expected_batch_size)
    noise = torch.tensor(seen)
    assert float(noise.std()) == pytest.approx(2.0, rel=0.06)
    assert abs(float(noise.mean())) < 0.2


def test_the_clip_norm_reaches_the_median_of_the_norms() -> None:
    net, (examples, labels) = model(), batch(32)
    norms = clipped_rows(net, Transform(1e9), examples, labels).norm(dim=1)
    median = float(norms.median())
    plan = replace(
        PLAN, dataset_size=32, sample_rate=1.0, noise_multiplier=1e-9, clip_norm=100 * median,
        adaptive_clipping=AdaptiveClipping(1e-9),
    )  # fmt: skip
    optimizer = make_optimizer("dp_sgd", net, unbudgeted(plan), learning_rate=0.0)
    for _ in range(120):
        optimizer.step(examples, labels, cross_entropy)
    assert optimizer.clip_norm == pytest.approx(median, rel=0.1)
    with pytest.raises(DataError, match="adaptive clipping"):
        build_optimizer("dp_sgd", model(), PLAN).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("name", "clipping", "options", "message"),
    [
        ("adadp", "fixed", {"box": True, "automatic_clipping": 0.01}, "a box clips coordinates"),
        ("adadp", "adaptive", {"box": True}, "a box clips coordinates"),
        ("dp_sgd", "adaptive", {"automatic_clipping": 0.01}, "no threshold to adapt"),
        *(
            ("dp_sgd", "fixed", {"automatic_clipping": wrong}, "automatic_clipping > 0")
            for wrong in (0.0, -1.0, math.nan, math.inf)
        ),
    ],
)
def test_clipping_without_a_meaning_is_refused(
    name: str, clipping: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(name, model(), PLANS[clipping], **options)
