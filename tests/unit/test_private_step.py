"""The private step: clipping against the per-example oracle, noise, sampling."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special
from torch import nn

from training_client import elements
from training_client import train as training
from training_client.budget import NoBudget
from training_client.clipping import (
    Clipper,
    Loss,
    Transform,
    elementwise,
    factors,
    gradients,
    joined,
    rows,
)
from training_client.clipping.blocks import split
from training_client.clipping.elementwise import clamped, clamped_products
from training_client.errors import DataError, UnsupportedModelError
from training_client.noise import FreshGenerator, gaussian_like
from training_client.optimizers import make_optimizer
from training_client.plan import Plan
from training_client.private_sum import Part, PrivateSum
from training_client.processor import fit_for_training
from training_client.sampling import PoissonSampler


def batch(size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    examples = 3 * torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return examples, torch.randint(0, 4, (size,), generator=generator)


def unbudgeted(plan: Plan) -> NoBudget:
    """As many steps as a test makes."""
    return NoBudget(plan, 10**9, "it is a test")


def model(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 9, bias=bias), nn.Tanh(), nn.Linear(9, 4)).double()


def per_example(net: nn.Module, examples: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """The oracle: every example's gradient, one by one."""
    parameters = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(net, values, (x[None],))
        return nn.functional.cross_entropy(out, y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, examples, labels)
    return list(gradients.values())


def sum_clipped(
    clipper: Clipper, examples: torch.Tensor, targets: torch.Tensor, loss: Loss, by: Transform
) -> tuple[list[torch.Tensor], float]:
    """Block by block, as a step adds noise to it; and the batch's mean loss."""
    found = clipper.clip(examples, targets, loss, by)
    sums = clipper.zeros()
    for block in clipper.blocks:
        with torch.no_grad():
            found.on(block, by.at(block), block.of(sums))
    return split(sums, clipper.parameters), found.mean_loss


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 1e9])
def test_clipped_sums_equal_the_per_example_oracle(bias: bool, clip_norm: float) -> None:
    net, (examples, labels) = model(bias=bias), batch()
    sums, mean_loss = sum_clipped(
        Clipper(net), examples, labels, training.cross_entropy, Transform(clip_norm)
    )
    gradients = per_example(net, examples, labels)
    norms = torch.sqrt(sum(g.flatten(1).square().sum(1) for g in gradients))  # type: ignore[arg-type]
    weights = (clip_norm * (1 - 1e-6) / norms).clamp_max(1.0)  # a little below C, on purpose
    for found, gradient in zip(sums, gradients, strict=True):
        exact = torch.einsum("b,b...->...", weights, gradient)
        assert torch.allclose(found, exact, rtol=1e-9, atol=1e-12)
    expected = training.cross_entropy(net(examples), labels).mean().detach()
    assert mean_loss == pytest.approx(float(expected))


def test_no_example_exceeds_the_clip_norm() -> None:
    net, (examples, labels) = model().float(), batch()
    clipper = Clipper(net)
    for i in range(len(labels)):
        one = slice(i, i + 1)
        sums, _ = sum_clipped(
            clipper,
            examples[one].float() * 100,
            labels[one],
            training.cross_entropy,
            Transform(0.5),
        )
        norm = math.sqrt(sum(float(s.double().square().sum()) for s in sums))
        assert norm <= 0.5


def test_an_empty_batch_still_gets_noise() -> None:
    net = model()
    plan = Plan(dataset_size=10, sample_rate=0.5, clip_norm=1.0, noise_multiplier=2.0)
    before = [p.clone() for p in net.parameters()]
    optimizer = make_optimizer("dp_sgd", net, unbudgeted(plan), learning_rate=1.0)
    optimizer.step(*batch(0), training.cross_entropy)
    assert all(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_an_example_with_an_infinite_gradient_counts_as_zero(number: float) -> None:
    net, (examples, labels) = model(), batch()
    clipper = Clipper(net)
    rest, _ = sum_clipped(clipper, examples[1:], labels[1:], training.cross_entropy, Transform(1.0))
    examples[0] = number
    found, _ = sum_clipped(clipper, examples, labels, training.cross_entropy, Transform(1.0))
    assert all(torch.allclose(a, b) for a, b in zip(found, rest, strict=True))


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("shape", ["ball", "ellipsoid", "affine", "damped", "box"])
@pytest.mark.parametrize("layer", [nn.Linear(5, 4), nn.Conv1d(1, 3, 2)])
def test_a_gradient_that_is_not_finite_adds_nothing_whatever_bounds_it(
    layer: nn.Module, shape: str, number: float
) -> None:
    """In a box that is so of its coordinates that are no number: any other is within ±1."""
    generator = torch.Generator().manual_seed(3)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    net = nn.Sequential(layer, nn.Flatten()).double()
    inputs = numbers(9, 5) if isinstance(layer, nn.Linear) else numbers(9, 1, 5)
    of, kept = numbers(*net(inputs).shape), torch.arange(9) != 4
    of[4, 1] = number
    scales = [numbers(*each.shape).abs() + 0.1 for each in net.parameters()]
    shifts = [numbers(*each.shape) for each in net.parameters()]
    by = {
        "ball": Transform(1.0),
        "ellipsoid": Transform.fixed(1.0, scales),
        "affine": Transform.fixed(1.0, scales, shifts),
        "damped": Transform.fixed(1.0, scales, shifts, damping=2.0),
        "box": Transform.fixed(9.0, scales, box=True),
    }[shape]

    def loss(predictions: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return (predictions * gradient).sum(1)

    rest, _ = sum_clipped(Clipper(net), inputs[kept], of[kept], loss, by)
    assert all(bool(each.any()) for each in rest)  # or nothing would be as it was
    if shape == "box":
        own = torch.autograd.grad(loss(net(inputs[4:5]), of[4:5]).sum(), list(net.parameters()))
        assert not any(bool(each.isfinite().all()) for each in own)
        within = [
            (d * g).nan_to_num(0.0).clamp(-1.0, 1.0) for d, g in zip(scales, own, strict=True)
        ]
        rest = [one + other for one, other in zip(rest, within, strict=True)]
    found, _ = sum_clipped(Clipper(net), inputs, of, loss, by)
    for one, other in zip(found, rest, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def compiled(net: nn.Module) -> tuple[nn.Module, list[torch.fx.GraphModule]]:
    """By Dynamo, what it traced run as it is: Inductor needs a compiler, and rounds in its way."""
    traced = []

    def as_traced(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        traced.append(graph)
        return graph.forward

    torch.compiler.reset()
    found = torch.compile(net, backend=as_traced)
    assert isinstance(found, nn.Module)
    return found, traced


TRACING = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by Dynamo itself


@TRACING
def test_a_compiled_model_is_clipped_as_the_model_itself_is() -> None:
    net = model()
    fast, traced = compiled(net)
    clipper, plain = Clipper(fast), Clipper(net)
    for size in (32, 32, 7, 1, 32):  # the third and the last are not probed
        examples, labels = batch(size)
        for by in (Transform(1.0), Transform(1e9)):
            found, loss = sum_clipped(clipper, examples, labels, training.cross_entropy, by)
            wanted, of_plain = sum_clipped(plain, examples, labels, training.cross_entropy, by)
            assert loss == pytest.approx(of_plain, rel=1e-12)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        fast(examples)  # between two steps, as a score does
    assert traced


@TRACING
def test_a_model_that_was_compiled_and_used_releases_nothing_it_is_not_seen_in() -> None:
    """Dynamo keeps to what it traced before there were hooks: none of the layers is seen."""
    fast, _ = compiled(model())
    fast(batch()[0])
    with pytest.raises(UnsupportedModelError, match="compile it anew"):
        sum_clipped(Clipper(fast), *batch(), training.cross_entropy, Transform(1.0))


def test_without_noise_and_clipping_it_is_plain_descent() -> None:
    private, plain = model(), model()
    examples, labels = batch()
    plan = Plan(dataset_size=64, sample_rate=0.5, clip_norm=1e12, noise_multiplier=1e-30)
    optimizer = make_optimizer("dp_sgd", private, unbudgeted(plan), learning_rate=0.3, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    for _ in range(5):
        optimizer.step(examples, labels, training.cross_entropy)
        reference.zero_grad()
        (training.cross_entropy(plain(examples), labels).sum() / 32).backward()
        reference.step()
    for a, b in zip(private.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_sums_are_divided_by_the_expected_batch_size() -> None:
    net, (examples, labels) = model(), batch(8)
    plan = Plan(dataset_size=1000, sample_rate=0.1, clip_norm=1.0, noise_multiplier=1e-30)
    sums, _ = sum_clipped(Clipper(net), examples, labels, training.cross_entropy, Transform(1.0))
    before = [p.detach().clone() for p in net.parameters()]
    make_optimizer("dp_sgd", net, unbudgeted(plan), learning_rate=1.0).step(
        examples, labels, training.cross_entropy
    )
    for old, new, total in zip(before, net.parameters(), sums, strict=True):
        assert torch.allclose(old - new, total / 100)


def test_noise_has_the_stated_deviation_and_never_repeats() -> None:
    plan = Plan(dataset_size=10, sample_rate=0.5, clip_norm=3.0, noise_multiplier=1.5)
    generator = FreshGenerator(torch.device("cpu"))
    draws = gaussian_like(torch.empty(1_000_000), plan.noise_deviation, generator)
    assert float(draws.std()) == pytest.approx(4.5, rel=0.01)
    assert float(draws.mean()) == pytest.approx(0.0, abs=0.02)
    again = gaussian_like(torch.empty(1_000_000), plan.noise_deviation, generator)
    other = gaussian_like(
        torch.empty(1_000_000), plan.noise_deviation, FreshGenerator(torch.device("cpu"))
    )
    assert not torch.equal(draws, again)
    assert not torch.equal(draws, other)


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.1, 600 / 60_000, 1 / 3, 1e-9, 2.0**-53, 3e-16, 1e-17])
def test_no_record_is_drawn_more_often_than_is_charged(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 2⁵³ numbers that are drawn from, as many are below q as it has room for."""
    room = math.floor(Fraction(rate) * 2**53)
    near = [k for k in range(room - 2, room + 3) if 0 <= k < 2**53]
    numbers = torch.tensor([k * 2.0**-53 for k in near], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: numbers)
    drawn = PoissonSampler(len(near), rate).draw()
    assert [near[at] for at in drawn] == [k for k in near if k < room]
    assert Fraction(room, 2**53) <= Fraction(rate)


def test_what_is_drawn_from_are_multiples_of_the_spacing() -> None:
    numbers = torch.rand(100_000, dtype=torch.float64) * 2.0**53
    assert torch.equal(numbers, numbers.floor())
    assert bool((numbers % 2 == 1).any())


def test_poisson_batches_pass_a_chi_square_test() -> None:
    """Batch sizes are binomial, and every record is drawn equally often."""
    generator = torch.Generator().manual_seed(7)
    sampler = PoissonSampler(200, 0.05, generator)
    counts, sizes = torch.zeros(200), []
    rounds = 4000
    for _ in range(rounds):
        drawn = sampler.draw()
        counts[drawn] += 1
        sizes.append(len(drawn))
    expected = rounds * 0.05
    statistic = float(((counts - expected) ** 2 / (expected * 0.95)).sum())
    assert 1e-4 < special.chdtrc(200, statistic) < 1 - 1e-4
    assert np.mean(sizes) == pytest.approx(10, rel=0.03)
    assert np.var(sizes) == pytest.approx(9.5, rel=0.15)


@pytest.mark.parametrize(
    ("net", "name"),
    [
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), "BatchNorm1d"),
        *(
            (
                nn.Sequential(kind(6, 4)),
                rf"layer 0 \({kind.__name__}\).* Opacus' DP{kind.__name__} ",
            )
            for kind in (nn.RNN, nn.LSTM, nn.GRU)
        ),
        (
            nn.TransformerEncoderLayer(6, 2),
            r"layer self_attn \(MultiheadAttention\).*scaled_dot_product_attention",
        ),
        (
            nn.Sequential(nn.EmbeddingBag(5, 4)),
            r"layer 0 \(EmbeddingBag\).*take Embedding and a sum",
        ),
        (nn.Sequential(nn.Embedding(5, 4, sparse=True)), r"layer 0 \(Embedding\).*sparse=False"),
        (nn.Embedding(5, 4, scale_grad_by_freq=True), r"\(root\).*scale_grad_by_freq=False"),
        (nn.Sequential(nn.ConvTranspose1d(2, 3, 2)), r"layer 0 \(ConvTranspose1d\).*freeze it"),
        (nn.Sequential(nn.ReLU()), "no layer"),
        (
            nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, track_running_stats=True)),
            "keeps",
        ),
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, affine=False)), "over the batch"),
        (nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True)), "inplace=False"),
        (nn.Sequential(nn.Linear(6, 4)).bfloat16(), "bfloat16"),
        (nn.Sequential(nn.Linear(6, 4)).half(), "float16"),
    ],
)
def test_other_layers_are_named_and_refused(net: nn.Module, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name) as refused:
        Clipper(net)
    assert "install" not in str(refused.value)  # Opacus is there


class Tokens(nn.Module):
    """What a transformer begins with; positions are the same of every example."""

    def __init__(self, *, expanded: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.tokens, self.positions = nn.Embedding(9, 5, padding_idx=0), nn.Embedding(6, 5)
        self.last, self.expanded = nn.Linear(5, 4), expanded

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(examples.shape[1])[None]
        if self.expanded:
            positions = positions.expand_as(examples)
        embedded = self.tokens(examples) + self.positions(positions)
        found: torch.Tensor = self.last(embedded.tanh().mean(1))
        return found


def test_the_padding_of_an_embedding_has_no_gradient() -> None:
    net, (_, labels) = Tokens(expanded=True).double(), batch()
    examples = torch.randint(0, 9, (32, 6), generator=torch.Generator().manual_seed(1))
    assert bool((examples == 0).any())
    for clip_norm in (0.1, 1e9):
        sums, _ = sum_clipped(
            Clipper(net), examples, labels, training.cross_entropy, Transform(clip_norm)
        )
        each = per_example(net, examples, labels)
        norms = torch.sqrt(sum(g.flatten(1).square().sum(1) for g in each))  # type: ignore[arg-type]
        weights = (clip_norm * (1 - 1e-6) / norms).clamp_max(1.0)
        for found, gradient in zip(sums, each, strict=True):
            exact = torch.einsum("b,b...->...", weights, gradient)
            assert torch.allclose(found, exact, rtol=1e-9, atol=1e-12)
        assert not bool(sums[0][0].any())


def test_what_all_examples_share_is_to_be_expanded() -> None:
    net, examples = Tokens(expanded=False), torch.randint(0, 9, (32, 6))
    message = r"layer positions \(Embedding.* applied to 1 rows, of 32 examples.*position ids"
    with pytest.raises(UnsupportedModelError, match=message):
        sum_clipped(Clipper(net), examples, batch()[1], training.cross_entropy, Transform(1.0))


def test_without_opacus_other_layers_are_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opacus.grad_sample", None)
    Clipper(model())
    with pytest.raises(UnsupportedModelError, match=r"privacy-accountant\[opacus\]"):
        Clipper(nn.Sequential(nn.Conv1d(2, 3, 2)))


def test_a_layer_that_is_frozen_in_part_or_takes_no_part_is_refused() -> None:
    net = model()
    net[0].bias.requires_grad_(False)  # type: ignore[index]
    with pytest.raises(UnsupportedModelError, match="frozen in part"):
        Clipper(net)
    idle = model()
    idle.register_module("idle", nn.Linear(2, 2).double())
    idle.forward = lambda examples: idle[1](idle[0](examples))  # type: ignore[index]
    with pytest.raises(UnsupportedModelError, match="takes no part"):
        sum_clipped(Clipper(idle), *batch(), training.cross_entropy, Transform(1.0))


def centred(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One value an example, and each depends on all of them."""
    return training.cross_entropy(predictions - predictions.mean(0), labels)


class Mixing(nn.Module):
    """A model that does something to a batch, before or after its layer."""

    def __init__(self, mix: Callable[[torch.Tensor], torch.Tensor], *, first: bool) -> None:
        super().__init__()
        self.layer, self.mix, self.first = nn.Linear(6, 4).double(), mix, first

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        if self.first:
            examples = self.mix(examples)
        found: torch.Tensor = self.layer(examples)
        return found if self.first else self.mix(found)


def late(examples: torch.Tensor) -> torch.Tensor:
    """Mixes from its sixth call on: the probe of the first batch makes five, and the batch one."""
    late.calls += 1  # type: ignore[attr-defined]
    return examples - examples.mean(0) if late.calls > 6 else examples  # type: ignore[attr-defined]


def batch_norm(examples: torch.Tensor) -> torch.Tensor:
    return nn.functional.batch_norm(examples, None, None, training=True)


def hinge(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mixes examples, and is flat where the first one is."""
    centred = predictions - predictions.mean(0)
    margins = centred.gather(1, labels[:, None]).squeeze(1)
    return (margins[0].detach() - margins).clamp_min(0.0)


def rare(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Weighs classes by how often a batch has them."""
    counts = torch.bincount(labels, minlength=4)
    return training.cross_entropy(predictions, labels) / counts[labels]


def counting(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return training.cross_entropy(predictions, labels) / len(labels)


class Transposed(nn.Module):
    """Keeps examples in the second dimension, of as many as there are in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4).double()

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(examples.T[:, :, None])
        return found.sum(0)


@pytest.mark.parametrize(
    ("net", "loss", "message"),
    [
        (model(), nn.functional.cross_entropy, "reduction='none'"),
        (model(), centred, "depends on others"),
        (model(), hinge, "depends on others"),
        (model(), rare, "depends on others"),
        (model(), counting, "depends on others"),
        (Mixing(lambda x: x - x.mean(0), first=True), training.cross_entropy, "depends on others"),
        (Mixing(lambda x: x - x.mean(0), first=False), training.cross_entropy, "depends on others"),
        (Mixing(batch_norm, first=True), training.cross_entropy, "depends on others"),
        (
            Mixing(lambda x: x / x.abs().amax().detach(), first=False),
            training.cross_entropy,
            "depends on others",
        ),
        (Transposed(), training.cross_entropy, "depends on others|is applied to"),
    ],
)
def test_what_mixes_examples_is_refused(net: nn.Module, loss: Loss, message: str) -> None:
    examples, labels = batch(6)
    with pytest.raises(UnsupportedModelError, match=message):
        sum_clipped(Clipper(net), examples, labels, loss, Transform(1.0))


def test_mixing_that_begins_later_is_found() -> None:
    late.calls = 0  # type: ignore[attr-defined]
    clipper = Clipper(Mixing(late, first=True))

    def steps(count: int) -> None:
        for _ in range(count):
            sum_clipped(clipper, *batch(6), training.cross_entropy, Transform(1.0))

    steps(1)
    with pytest.raises(UnsupportedModelError, match="depends on others"):
        steps(8)


def test_random_parts_are_no_mixing_and_draw_as_without_a_probe() -> None:
    net = nn.Sequential(nn.Linear(6, 50), nn.Dropout(), nn.Linear(50, 4)).double()
    found = []
    for probed in (True, False):
        clipper = Clipper(net)
        if not probed:
            clipper._probe = lambda *_: None  # type: ignore[method-assign]
        torch.manual_seed(8)
        for _ in range(3):
            sums, _ = sum_clipped(clipper, *batch(), training.cross_entropy, Transform(1.0))
        found.append(sums)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert net.training


class Remembering(nn.Module):
    """Keeps a mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4).double()
        self.register_buffer("seen", torch.zeros(6).double())

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        self.seen = 0.9 * self.seen + 0.1 * examples.mean(0)
        found: torch.Tensor = self.layer(examples)
        return found


def test_what_a_forward_pass_writes_down_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="running statistics"):
        sum_clipped(Clipper(Remembering()), *batch(), training.cross_entropy, Transform(1.0))
    words = nn.Sequential(nn.Embedding(5, 6, max_norm=1.0), nn.Flatten(), nn.Linear(12, 4))
    with torch.no_grad():
        words[0].weight *= 10
    with pytest.raises(UnsupportedModelError, match="max_norm"):
        sum_clipped(
            Clipper(words),
            torch.tensor([[0, 1]] * 3),
            torch.tensor([0, 1, 2]),
            training.cross_entropy,
            Transform(1.0),
        )


class Tied(nn.Module):
    """Uses a parameter in two places, one of them out of sight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.layer(examples), self.layer.weight)


@pytest.mark.parametrize(
    "net",
    [
        Tied(),
        nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1, padding_mode="circular"),
            nn.Flatten(),
        ).double(),
    ],
)  # fmt: skip
def test_a_gradient_that_a_clip_would_see_in_part_is_refused(net: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError, match="do not add up"):
        sum_clipped(Clipper(net), *batch(), training.cross_entropy, Transform(1.0))


@pytest.mark.parametrize("size", [1e17, 1e19, 1e21, 1e22, 2e38])
@pytest.mark.parametrize("scaled", [False, True])
def test_huge_examples_are_bounded_too(size: float, scaled: bool) -> None:
    """Where a weight would be so small that it lost digits an example counts as nothing."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 3, bias=False)
    transform = Transform(1.0)
    if scaled:
        transform = Transform.fixed(1.0, [1e3 * torch.rand(3, 5) + 1e-3])
    inputs = size * torch.rand(1, 5)
    for height in (1e-30, 1e-3, 1.0, size):
        assert clipped_norm(layer, inputs, height * torch.rand(1, 3), transform) <= 1.0


def test_a_clip_is_in_full_precision_whatever_the_model_ran_in() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        seen = []
        clipper = Clipper(model().float())
        weights = clipper._weights
        clipper._weights = lambda *of: (  # type: ignore[method-assign]
            seen.append(torch.get_float32_matmul_precision()), weights(*of)
        )[1]  # fmt: skip
        examples, labels = batch()
        sum_clipped(clipper, examples.float(), labels, training.cross_entropy, Transform(1.0))
        assert seen == ["highest"]
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_layer_applied_twice_is_refused() -> None:
    layer = nn.Linear(6, 6).double()
    net = nn.Sequential(layer, layer)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 \(Linear.*twice.*a layer of its own"):
        sum_clipped(Clipper(net), *batch(), training.cross_entropy, Transform(1.0))


def test_more_rows_than_examples_are_refused() -> None:
    """A model that cuts an example into rows would count each of them as one."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, examples: torch.Tensor) -> torch.Tensor:
            return self.layer(examples.reshape(-1, 3)).reshape(len(examples), -1)

    examples, labels = batch()
    with pytest.raises(
        UnsupportedModelError, match=r"layer layer \(Linear.* is applied to 64 rows, of 32 examples"
    ):
        sum_clipped(
            Clipper(Patches()), examples.float(), labels, training.cross_entropy, Transform(1.0)
        )


def test_a_shared_parameter_is_refused() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    with pytest.raises(UnsupportedModelError, match="share a parameter"):
        Clipper(nn.Sequential(first, second))


def clipped_norm(layer: nn.Module, inputs: torch.Tensor, of: torch.Tensor, by: Transform) -> float:
    """Of what one example adds, whose output gradient is given, exactly."""
    sums, _ = sum_clipped(
        Clipper(layer),
        inputs,
        of,
        lambda predictions, gradient: (predictions * gradient).sum(1),
        by,
    )
    return math.sqrt(sum(float(each.double().square().sum()) for each in sums))


@pytest.mark.parametrize(
    ("bias", "scale", "bound", "size", "of"),
    [
        (False, 1e18, 1e-9, 1e18, 1.6e-24),
        (False, 1.8e19, 2e-8, 1e18, 1.6e-24),
        (True, 1e38, 1e-7, 0.0, 1.6e-30),
        (True, 1e30, 1e-15, 0.0, 1.6e-30),
    ],
)
def test_weighted_numbers_that_are_rounded_up_do_not_pass_the_bound(
    bias: bool, scale: float, bound: float, size: float, of: float
) -> None:
    """The smallest numbers are rounded up by as much as they are, and D makes them large again."""
    layer = nn.Linear(1, 1, bias=bias)
    scales = [torch.full_like(each, scale) for each in layer.parameters()]
    if bias:
        scales[0].fill_(1e-10)
    by = Transform.fixed(bound, scales)
    for times in (0.5, 1.0, 1.3, 2.0, 7.0):
        one = torch.full((1, 1), size), torch.full((1, 1), times * of)
        assert clipped_norm(layer, *one, by) <= bound


@pytest.mark.parametrize("times", [1.0, 1.3, 2.0, 3.1, 7.0])
def test_without_scales_weighted_numbers_are_not_rounded_up_either(times: float) -> None:
    """A weighted input of 1e-43 has two digits, and the gradient makes it large again."""
    inputs, of = torch.full((1, 1), 1e-20), torch.full((1, 2), 1e16)
    for bound in (1.1e-27, 1.7e-27, 2.3e-26):
        by = Transform(times * bound)
        assert clipped_norm(nn.Linear(1, 2, bias=False), inputs, of, by) <= by.bound


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        (torch.float32, 1e29),
        (torch.float32, 1e-32),
        (torch.float64, 1e141),
        (torch.float64, 1e-200),
    ],
)
def test_a_bound_that_sums_could_not_keep_is_refused(
    kind: torch.dtype, bound: float, rows: int
) -> None:
    """Whatever the batch, which is private."""
    layer = nn.Linear(2, 2, dtype=kind)
    examples, of = torch.ones(rows, 2, dtype=kind), torch.ones(rows, 2, dtype=kind)
    with pytest.raises(ValueError, match=r"expected a bound from .* could not tell the sums"):
        clipped_norm(layer, examples, of, Transform(bound))


@pytest.mark.parametrize("held", [False, True])
def test_one_record_more_does_not_make_a_sum_pass_all_numbers(held: bool) -> None:
    """Σ w∇ passed them before D made it small again, and nothing of the others was left."""
    layer, most = nn.Linear(1, 1, bias=False), 3.4e38 / 400
    bound, found = 1.01e-10 * most, []
    by = Transform.fixed(bound, [torch.full_like(layer.weight, 1e-10)])
    for count in (400, 401, 900):
        values = torch.full((count, 1, 1) if held else (count, 1), math.sqrt(most))
        sums, _ = sum_clipped(
            Clipper(layer), values, values, lambda p, g: (p * g).flatten(1).sum(1), by
        )
        found.append(float(sums[0].double().norm()))
    assert found[0] > 0
    assert abs(found[1] - found[0]) <= bound * (1 + 1e-3)
    assert found[2] <= 900 * bound


def leave_zeros_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all factors in single precision, however narrow and however few zeros they have."""
    for name in ("_NUMBERS", "_COLUMNS"):
        monkeypatch.setattr(factors, name, 0)
    monkeypatch.setattr(Clipper, "__init__", partialmethod(Clipper.__init__, sparse_inputs=True))


def test_scales_may_be_parameters_themselves() -> None:
    layer = nn.Linear(3, 2)
    one = torch.ones(1, 3), torch.ones(1, 2)
    plain = clipped_norm(layer, *one, Transform.fixed(0.5, [torch.ones(2, 3), torch.ones(2)]))
    trained = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))]
    assert clipped_norm(layer, *one, Transform.fixed(0.5, trained)) == plain


@pytest.mark.parametrize("bound", [1e-6, 1.0])
@pytest.mark.parametrize("scale", [None, 1e6, 1e8, 1e18])
@pytest.mark.parametrize("size", [1e15, 1e18])
def test_squares_that_underflow_are_counted(bound: float, scale: float | None, size: float) -> None:
    """Output gradients of 1e-23 have squares of nothing, and inputs may be as large as they are."""
    layer = nn.Linear(2, 1000, bias=False)
    transform = Transform(bound)
    if scale is not None:
        transform = Transform.fixed(bound, [torch.full_like(layer.weight, scale)])
    of = torch.full((1, 1000), 1e-23)
    assert clipped_norm(layer, torch.full((1, 2), size), of, transform) <= bound


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [1e3, 1e17])
def test_a_scale_that_is_large_where_an_input_is_tiny_is_counted(
    shifted: bool, size: float
) -> None:
    """Next to the other input its square is nothing, and next to its scale the other's is."""
    layer = nn.Linear(2, 1, bias=False)
    scales = [torch.tensor([[1e-5, 1e22]])]
    shifts = [torch.full((1, 2), 1e-30)] if shifted else None
    transform = Transform.fixed(1e-3, scales, shifts)
    inputs, of = torch.tensor([[1.0, 1e-24]]), torch.full((1, 1), size)
    assert clipped_norm(layer, inputs, of, transform) <= 1e-3


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("scale", [1e15, 1e18, 1.8e19])
def test_an_input_that_is_nothing_beside_another_is_counted(flush: bool, scale: float) -> None:
    """Its share of ‖a‖² was taken for 0, and its scale is not small: 1e14 bounds came of that."""
    layer, exceeded = nn.Linear(2, 1, bias=False), []
    by = Transform.fixed(1e-3, [torch.tensor([[1e-19, scale]])])
    torch.set_flush_denormal(flush)
    try:
        for share in (1e-18, 1e-19, 2e-20, 1e-21, 1e-24):
            for size in (1e-6, 1.0, 1e6, 1e12):
                inputs, of = torch.tensor([[1.0, share]]), torch.full((1, 1), size)
                exceeded.append(clipped_norm(layer, inputs, of, by) > 1e-3)
    finally:
        torch.set_flush_denormal(False)
    assert not any(exceeded)


def an_attack(draw: random.Random) -> tuple[nn.Linear, torch.Tensor, torch.Tensor, Transform]:
    """A small layer, an input, a gradient, D, b and a bound, of any size that numbers have."""
    kind = draw.choice([torch.float32, torch.float64])
    most = math.log10(torch.finfo(kind).max)
    width = draw.choice([3.0, 10.0, 20.0, most])
    layer = nn.Linear(draw.randint(1, 3), draw.randint(1, 3), bias=draw.random() < 0.4, dtype=kind)

    def numbers(like: torch.Tensor, *, positive: bool = False) -> torch.Tensor:
        found = torch.tensor(
            [10 ** draw.uniform(-width, width) for _ in range(like.numel())], dtype=torch.float64
        ).clamp(torch.finfo(kind).tiny, torch.finfo(kind).max)
        if not positive:
            found *= torch.tensor([draw.choice([-1, 1, 1, 0]) for _ in found])
        return found.to(kind).view(like.shape)

    inputs = numbers(torch.empty(1, layer.in_features))
    of = numbers(torch.empty(1, layer.out_features))
    gradients = [of.T @ inputs, of[0]][: 1 + (layer.bias is not None)]
    shifts = None
    if draw.random() < 0.5:
        shifts = [
            -each.nan_to_num() if draw.random() < 0.5 else numbers(each) for each in gradients
        ]
    scales = [numbers(each, positive=True) for each in gradients]
    if draw.random() < 0.5:  # what is small is made large again
        scales = [
            (draw.uniform(0.01, 100) / each.abs()).clamp(
                torch.finfo(kind).tiny, torch.finfo(kind).max
            )
            for each in gradients
        ]
    bound = 10 ** draw.uniform(max(-width / 2, -130), min(width / 2, 25))
    return layer, inputs, of, Transform.fixed(bound, scales, shifts)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize(
    "how", ["compiled", "accelerated", "sparse", "damped", "damped, accelerated"]
)
def test_no_sizes_of_numbers_pass_the_bound(
    how: str, flush: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1000 at random a few did while squares beside others were lost."""
    monkeypatch.setattr(Clipper, "_probe", lambda *_: None)  # as long as all the rest
    if "accelerated" in how:
        for module in (elements, elementwise, gradients, rows):
            monkeypatch.setattr(module, "on_processor", lambda _: False)
    if how == "sparse":
        leave_zeros_out(monkeypatch)
    draw = random.Random(11)
    torch.set_flush_denormal(flush)
    try:
        for _ in range(1000):
            layer, inputs, of, by = an_attack(draw)
            if "damped" in how:
                by = replace(by, damping=10 ** draw.uniform(-20, 20))
            assert clipped_norm(layer, inputs, of, by) <= by.bound, (inputs, of)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("accelerated", [False, True])
def test_damped_squares_that_a_precision_has_no_number_for_are_counted(
    accelerated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if accelerated:
        monkeypatch.setattr(elementwise, "on_processor", lambda _: False)
    layer, one = nn.Linear(2, 1, bias=False), torch.ones(1, 1)
    for size, bound in ((1e-25, 1e-28), (1e25, 1e20)):
        by = Transform.fixed(bound, [torch.ones(1, 2)], [torch.full((1, 2), size)], damping=1e-35)
        norm = clipped_norm(layer, torch.full((1, 2), size), one, by)
        assert 0.99 * bound < norm <= bound


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_what_is_taken_for_nothing_is_counted(
    sparse: bool, flush: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of squares, of small weights, of a shift: each of these was above the bound once."""
    if sparse:
        leave_zeros_out(monkeypatch)
    single, double = torch.float32, torch.float64
    attacks = [  # type, bound, a, g, D, b
        (single, 1.0, [1e18], [0.0, 1e3], [[1e3], [1e-17]], None),
        (single, 1.0, [1e18], [0.0, 1e10], [[1e3], [1e-19]], None),
        (single, 1e-11, [1e-28] * 4, [1e18], [[1.0] * 4], [[1e-10] * 4]),
        (single, 1e-3, [1.1e-38] * 4, [1e18], [[1e18] * 4], None),
        (double, 1.0, [1e-154] * 4, [8e152], [[100.0] * 4], None),
        (double, 1.0, [1e-163] * 4, [8e152], [[1e12] * 4], None),
        (double, 0.1, [1.4e-154] * 784, [8e152], None, None),
        (double, 1e-10, [1e-162] * 4, [8e152], None, None),
        (single, 1.0, [1e14], [0.0, 1e14], [[1.0], [3e-20]], [[0.0], [1e30]]),
        (single, 1.0, [1.0], [0.0], [[1e-20]], [[1e25]]),
        (single, 1.0, [1.0], [1e25], [[1e-20]], [[1e25]]),
        (double, 1.0, [1.0] * 4, [1e200], [[1e-170] * 4], None),
        (double, 1e-6, [5e152], [1e-78], [[1e-77]], None),
        (double, 1e-6, [5e152], [1e-135], [[1e-20]], None),
        (double, 1e-14, [5e152], [1e-82], [[1e-81]], None),
        (double, 1e-13, [0.0], [0.0], [[1e152]], [[1e-163]]),
    ]
    torch.set_flush_denormal(flush)
    try:
        for kind, bound, inputs, of, scale, shift in attacks:
            layer = nn.Linear(len(inputs), len(of), bias=False, dtype=kind)
            shifts = None if shift is None else [torch.tensor(shift, dtype=kind)]
            by = Transform(bound)
            if scale is not None:
                by = Transform.fixed(bound, [torch.tensor(scale, dtype=kind)], shifts)
            values = torch.tensor([inputs], dtype=kind), torch.tensor([of], dtype=kind)
            assert clipped_norm(layer, *values, by) <= bound, (kind, bound, inputs[0])
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("flush", [False, True])
def test_what_a_shift_cancels_is_nothing_where_weights_make_it_nothing(flush: bool) -> None:
    """∇ + b is almost 0, but w∇ is 0 and w·b is not: this was 180 times the bound."""
    torch.set_flush_denormal(flush)
    try:
        for inputs, bound in (
            (2.2e-38, 5.9e-3),
            (1.1e-37, 1.2e-3),
            (1e-34, 5.5e-5),
            (1e-36, 1e-12),
        ):
            layer = nn.Linear(1, 1, bias=False)
            values, of = torch.tensor([[inputs]]), torch.tensor([[1e18]])
            by = Transform.fixed(bound, [torch.full((1, 1), 1e18)], [-values * of])
            assert clipped_norm(layer, values, of, by) <= bound
        biased, of = nn.Linear(1, 1), torch.full((1, 1), 1.3e-38)
        scales, shifts = [torch.ones(1, 1), torch.full((1,), 1e18)], [torch.zeros(1, 1), -of[0]]
        by = Transform.fixed(1.8e-23, scales, shifts)
        assert clipped_norm(biased, torch.zeros(1, 1), of, by) <= 1.8e-23
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("rows", [700, 1792, 5000])
def test_a_record_moves_a_shifted_sum_by_the_bound_at_most(rows: int) -> None:
    """Among many, each as long as the bound: Σ wᵢ·b was rounded to one side for all of them."""
    generator = torch.Generator().manual_seed(rows)
    layer = nn.Linear(60, 40, bias=False)
    inputs, of = torch.rand(rows, 60, generator=generator), torch.ones(rows, 40)
    shift = 10 * torch.rand(40, 60, generator=generator)
    by = Transform.fixed(1.0, [torch.rand(40, 60, generator=generator) + 0.5], [shift])

    def loss(predictions: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return (predictions * gradient).sum(1)

    whole, _ = sum_clipped(Clipper(layer), inputs, of, loss, by)
    less, _ = sum_clipped(Clipper(layer), inputs[1:], of[1:], loss, by)
    assert float((whole[0].double() - less[0].double()).norm()) <= 1 + 2e-6 * math.sqrt(rows)


@pytest.mark.parametrize("rows", [700, 1792, 5000, 20_000])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_record_moves_a_sum_by_the_bound_at_most(sparse: bool, rows: int) -> None:
    """With it more than a quarter is not 0, without it less; all others are alike.

    Where that decided whether zeros are left out, it moved 20 000 by more than three times the
    bound: sums of so many are rounded, and were rounded in two ways.
    """
    generator = torch.Generator().manual_seed(rows)
    layer = nn.Linear(160, 40, bias=False)
    inputs, of = torch.zeros(rows, 160), torch.ones(rows, 40)
    inputs[:, :40] = torch.rand(40, generator=generator) + 0.1
    inputs[1, 0], inputs[0] = 0.0, torch.rand(160, generator=generator) + 0.1
    by = Transform(1.0)

    def loss(predictions: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return (predictions * gradient).sum(1)

    clipper = Clipper(layer, sparse_inputs=sparse)
    whole, _ = sum_clipped(clipper, inputs, of, loss, by)
    less, _ = sum_clipped(clipper, inputs[1:], of[1:], loss, by)
    assert (inputs != 0).float().mean() > 0.25 > (inputs[1:] != 0).float().mean()
    assert float((whole[0].double() - less[0].double()).norm()) <= 1 + 2e-6 * math.sqrt(rows)


@pytest.mark.parametrize("lie", ["one number for all", "columns in a row"])
def test_an_example_that_is_left_out_leaves_the_others_where_they_lie(lie: str) -> None:
    """What was left was copied, and summed by another program: a sixth of the bound, of 20 000."""
    rows = 20_000
    layer = nn.Linear(160, 40, bias=False)
    generator = torch.Generator().manual_seed(3)
    inputs, of = torch.rand(160, generator=generator).repeat(rows, 1) + 0.1, torch.ones(rows, 40)
    inputs[0] = math.nan
    if lie == "columns in a row":
        inputs = inputs.T.contiguous().T

    def loss(predictions: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if lie == "one number for all":
            return predictions.sum(1)
        return (predictions * gradient).sum(1)

    whole, _ = sum_clipped(Clipper(layer), inputs, of, loss, Transform(1.0))
    less, _ = sum_clipped(Clipper(layer), inputs[1:], of[1:], loss, Transform(1.0))
    assert float(less[0].norm()) > rows / 2
    assert float((whole[0].double() - less[0].double()).norm()) <= 1e-3


class Borrowing(nn.Module):
    """One of its layers is given a parameter of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lends, self.borrows = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        row = self.lends.weight.detach()[0].expand(len(examples), -1)
        found: torch.Tensor = self.lends(examples) + self.borrows(row)
        return found


def test_an_update_changes_nothing_that_is_still_to_be_summed() -> None:
    """What a layer saw may be a part of a parameter, which an earlier block's update changes."""
    torch.manual_seed(3)
    net, examples, labels = Borrowing(), torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    plan = Plan(dataset_size=100, sample_rate=0.04, clip_norm=1.0, noise_multiplier=1e-9)
    private_sum = PrivateSum(net, unbudgeted(plan))
    whole = private_sum.release(examples, labels, training.cross_entropy, Transform(1.0)).whole()
    wanted = joined(whole)
    released = private_sum.release(examples, labels, training.cross_entropy, Transform(1.0))

    def take(part: Part) -> None:
        torch.testing.assert_close(part.mean, part.block.of(wanted), rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for piece in part.block.pieces:
                piece.of(private_sum.clipper.parameters).fill_(100.0)

    released.each(take)


def test_scales_of_what_never_changes_do_not_silence_a_batch() -> None:
    """1e18 is what the root of 0 becomes: where an input is always 0 nothing comes of it."""
    layer = nn.Linear(20, 60, bias=False)
    inputs, of = torch.rand(9, 20), torch.randn(9, 60)
    scale = torch.ones(60, 20)
    inputs[:, :10], scale[:, :10] = 0.0, 1e18
    by = Transform.fixed(1e3, [scale])
    sums, _ = sum_clipped(Clipper(layer), inputs, of, lambda p, g: (p * g).sum(1), by)
    torch.testing.assert_close(sums[0], of.T @ inputs, rtol=1e-4, atol=1e-4)


def test_images_in_another_order_of_memory_are_clipped_too() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 4))
    examples, labels = torch.randn(5, 2, 6, 6), torch.arange(5) % 4
    wanted, _ = sum_clipped(Clipper(net), examples, labels, training.cross_entropy, Transform(1.0))
    turned = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found, _ = sum_clipped(
        Clipper(turned), examples, labels, training.cross_entropy, Transform(1.0)
    )
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other)


def test_convolutions_in_another_order_of_memory_are_clipped_too() -> None:
    """What the first one gives is in that order, which Opacus' sampler for the second misreads."""
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Flatten())
    net = net.append(nn.Linear(16, 4)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    examples, labels = torch.randn(5, 2, 6, 6), torch.arange(5) % 4
    for inputs in (examples, examples.to(memory_format=torch.channels_last)):
        sums, _ = sum_clipped(Clipper(net), inputs, labels, training.cross_entropy, Transform(1e6))
        loss = training.cross_entropy(net(inputs), labels).sum()
        for one, other in zip(sums, torch.autograd.grad(loss, net.parameters()), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_no_physical_batch_is_refused() -> None:
    plan = Plan(dataset_size=100, sample_rate=0.04, clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="physical_batch_size"):
        PrivateSum(model(), unbudgeted(plan), physical_batch_size=-1)


@pytest.mark.parametrize("number", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["scale", "shift"])
@pytest.mark.parametrize("damping", [0.0, 1.0])
def test_a_transform_beyond_every_number_lets_nothing_out(
    damping: float, where: str, number: float
) -> None:
    """Else a batch with a record could be told from one without."""
    layer = nn.Linear(2, 1, bias=False)
    scale, shift = torch.ones(1, 2), torch.zeros(1, 2)
    (scale if where == "scale" else shift)[0, 0] = number
    by = Transform.fixed(1.0, [scale], [shift], damping=damping)
    for count in (0, 1, 400):
        sums, _ = sum_clipped(
            Clipper(layer),
            torch.ones(count, 2),
            torch.ones(count, 1),
            lambda p, g: (p * g).sum(1),
            by,
        )
        assert torch.equal(sums[0], torch.zeros(1, 2))


@pytest.mark.parametrize("outputs", [1000, 100_000])
@pytest.mark.parametrize("shifted", [False, True])
def test_small_squares_behind_a_large_one_are_counted(outputs: int, shifted: bool) -> None:
    """In a long sum each of them may be lost to rounding."""
    layer = nn.Linear(4, outputs, bias=False)
    for share in (0.3, 0.49, 0.9):
        of = torch.full((1, outputs), math.sqrt(share * 2.0**-24))
        of[0, 0] = 1.0
        shifts = [torch.zeros_like(layer.weight)] if shifted else None
        transform = Transform.fixed(1.0, [torch.ones_like(layer.weight)], shifts)
        assert clipped_norm(layer, torch.ones(1, 4), of, transform) <= 1.0


def test_a_model_under_autocast_is_clipped_in_full_precision() -> None:
    net, (examples, labels) = model().float(), batch()
    for at in range(8):
        one = slice(at, at + 1)
        with torch.autocast("cpu", torch.bfloat16):
            sums, _ = sum_clipped(
                Clipper(net),
                100 * examples[one].float(),
                labels[one],
                training.cross_entropy,
                Transform(0.5),
            )
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in sums))
        assert 0.4 < norm <= 0.5


def test_a_model_of_a_usual_size_passes_the_probe_under_autocast() -> None:
    """Its layers then round to 8 bits, and what is compared differs by as much."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
    examples, labels = torch.rand(64, 784), torch.arange(64) % 10
    clipper = Clipper(net)
    for _ in range(2):  # both are probed
        with torch.autocast("cpu", torch.bfloat16):
            sums, _ = sum_clipped(
                clipper, examples, labels, training.cross_entropy, Transform(1e-3)
            )
    assert all(each.dtype == torch.float32 for each in sums)
    exact, _ = sum_clipped(Clipper(net), examples, labels, training.cross_entropy, Transform(1e-3))
    for found, wanted in zip(sums, exact, strict=True):
        assert float((found - wanted).norm()) < 0.05 * float(wanted.norm())


def test_a_box_is_bounded_by_the_root_of_its_size() -> None:
    net, size = model(), sum(p.numel() for p in model().parameters())
    small = Transform.fixed(0.99 * math.sqrt(size), list(net.parameters()), box=True)
    with pytest.raises(ValueError, match="a box is bounded"):
        sum_clipped(Clipper(net), *batch(), training.cross_entropy, small)


def test_every_word_of_a_generator_is_drawn() -> None:
    """A seed of a CPU generator has 32 bits: it would be one of 4e9, and could be found."""
    one, other = (FreshGenerator(torch.device("cpu")).get_state() for _ in range(2))
    words = [state[24 : 24 + 8 * 624].view(torch.int64) for state in (one, other)]
    assert int((words[0] != words[1]).sum()) > 600
    assert int(words[0].max()) < 2**32
    generator = FreshGenerator(torch.device("cpu"))
    known = torch.Generator().manual_seed(generator.initial_seed())
    assert not torch.equal(torch.rand(9, generator=generator), torch.rand(9, generator=known))
    draws = torch.rand(200_000, generator=generator)
    assert float(draws.mean()) == pytest.approx(0.5, abs=0.005)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
)
def test_a_copy_adds_other_noise(copied: Callable[[Any], Any]) -> None:
    """The same twice, and the difference of two sums had none."""
    generator = FreshGenerator(torch.device("cpu"))
    other = copied(generator)
    assert isinstance(other, FreshGenerator)
    assert len({float(torch.rand(1, generator=each)) for each in (generator, other)}) == 2


def test_a_copied_optimizer_and_sampler_draw_anew() -> None:
    plan = Plan(dataset_size=100, sample_rate=0.5, clip_norm=1.0, noise_multiplier=1.0)
    net = model()
    whole = (
        net,
        make_optimizer("dp_sgd", net, unbudgeted(plan), learning_rate=1.0),
        PoissonSampler(100, 0.5),
    )
    copies = [copy.deepcopy(whole) for _ in range(2)]
    for _, optimizer, _ in copies:
        optimizer.step(*batch(), training.cross_entropy)
    one, other = (each.parameters() for each, _, _ in copies)
    for was, left, right in zip(net.parameters(), one, other, strict=True):
        assert not torch.equal(left, was)
        assert not torch.equal(left, right)
    first, second = (sampler.draw() for _, _, sampler in copies)
    assert not torch.equal(first, second)


def test_a_forked_process_draws_anew() -> None:
    generator = FreshGenerator(torch.device("cpu"))
    chosen = torch.Generator().manual_seed(1)  # a caller's own repeats, as a caller wants it
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        drawn = [float(torch.rand(1, generator=each)) for each in (generator, chosen)]
        os.write(writer, json.dumps(drawn).encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = json.loads(os.read(reader, 1000))
    ours = [float(torch.rand(1, generator=each)) for each in (generator, chosen)]
    assert ours[0] != theirs[0]
    assert ours[1] == theirs[1]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_noise_that_would_be_taken_for_nothing_is_refused(kind: torch.dtype) -> None:
    least = torch.finfo(kind).tiny * 2**24
    generator = FreshGenerator(torch.device("cpu"))
    torch.set_flush_denormal(True)
    try:
        drawn = gaussian_like(torch.empty(100_000, dtype=kind), least, generator)
    finally:
        torch.set_flush_denormal(False)
    assert int((drawn == 0).sum()) < 3
    with pytest.raises(DataError, match="next to nothing"):
        gaussian_like(torch.empty(9, dtype=kind), least * 0.99, generator)


def test_a_box_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        clamped_products(torch.ones(4, 3), torch.ones(4, 2), torch.ones(3, 2))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_box_counts_what_is_no_number_as_nothing(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(50, 9, generator=generator, dtype=kind)
    inputs = torch.randn(50, 7, generator=generator, dtype=kind)
    scale = torch.rand(9, 7, generator=generator, dtype=kind) + 0.1
    gradients[3, 2], gradients[4, 5] = math.nan, math.inf
    each = gradients[:, :, None] * inputs[:, None, :] * scale
    exact = torch.where(each.isnan(), 0.0, each.clamp(-1.0, 1.0)).sum(0)
    assert torch.allclose(clamped_products(gradients, inputs, scale), exact, atol=1e-5)
    assert torch.allclose(clamped(each).sum(0), exact, atol=1e-5)


def test_what_training_does_to_tiny_numbers_ends_with_it() -> None:
    """The service's own bounds, in the same process, need numbers below 1e-38."""
    tiny = torch.full((1,), 1e-39)

    def interrupted() -> None:
        with fit_for_training():
            assert float(tiny * 1.0) == 0.0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert float(tiny * 1.0) > 0.0
