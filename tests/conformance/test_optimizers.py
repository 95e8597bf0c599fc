"""Every optimizer, by the same rules: what it clips, what noise it adds, what its state knows."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.test_private_step import batch, model, per_example, sum_clipped, unbudgeted
from training_client import train as training
from training_client.budget import NoBudget
from training_client.clipping import Added, Affine, Block, Clipper, Loss, Sum, Transform
from training_client.clipping.allowances import WEIGHTED, rounding
from training_client.clipping.blocks import blocks_of
from training_client.clipping.sparse import Sparse
from training_client.distributed import Participant, train_together
from training_client.errors import DataError
from training_client.optimizers import (
    OPTIMIZERS,
    AdaDp,
    AdaDps,
    PrivateOptimizer,
    Step,
    make_optimizer,
)
from training_client.plan import Plan
from training_client.private_sum import Part, PrivateSum, Release

Tensors = Sequence[torch.Tensor]
SHAPES = ("ball", "ellipsoid", "box", "affine", "damped", "damped and shifted")
PRINTED = " as printed"  # after an optimizer's name: a box (with half axes), or own squares
BOXED = [
    (name + PRINTED, state)
    for name, entry in OPTIMIZERS.items() if entry.printed == "box"
    for state in entry.states
]  # fmt: skip
DAMPED = [
    (name + PRINTED, state)
    for name, entry in OPTIMIZERS.items() if entry.printed == "own_squares"
    for state in ("public", "raw")
]  # fmt: skip
STATES = [
    *((name, state) for name, entry in OPTIMIZERS.items() for state in entry.states),
    *BOXED,
    *DAMPED,
]
NOISY = [  # a draw knows nothing of what is clipped: of what is printed one of each is enough
    (name, state)
    for name, state in STATES
    if not name.endswith(PRINTED) or (name, state) in (BOXED[0], DAMPED[0])
]
PUBLIC = batch(64)


def made(name: str, net: nn.Module, plan: Plan, **options: Any) -> PrivateOptimizer:
    known = name.removesuffix(PRINTED)
    if known != name:
        boxed = {"box": True, "threshold": 0.0}
        options |= boxed if OPTIMIZERS[known].printed == "box" else {"own_squares": True}
    return make_optimizer(known, net, unbudgeted(plan), **{"public": PUBLIC} | options)


def like(net: nn.Module, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    trained = [p for p in net.parameters() if p.requires_grad]
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in trained]


def a_transform(shape: str, net: nn.Module) -> Transform:
    positive = [each.abs() + 0.05 for each in like(net, 3)]
    if shape == "ball":
        return Transform(0.7)
    if shape == "affine":
        return Transform.fixed(0.7, positive, like(net, 4))
    if shape.startswith("damped"):
        return Transform.fixed(
            0.7, positive, like(net, 4) if "shifted" in shape else None, damping=5
        )
    return ellipsoid([0.1 * each for each in positive], box=shape == "box")


def ellipsoid(half_axes: Tensors, *, box: bool = False) -> Transform:
    """As `AdaDp` makes it."""
    size = sum(each.numel() for each in half_axes)
    return Transform.fixed(math.sqrt(size), [1 / each for each in half_axes], box=box)


def maps(transform: Transform, like: Tensors) -> list[Affine]:
    """D and b of whole parameters."""
    return [transform.at(block).on(piece) for block in blocks_of(like) for piece in block.pieces]


# --- the engine against every example's gradient


def transformed(net: nn.Module, transform: Transform, *of: torch.Tensor) -> torch.Tensor:
    """u of every example, flat, one row an example, clipped: the oracle."""
    rows, gradients = [], per_example(net, *of)
    vector = torch.cat([each.flatten(1) for each in gradients], 1)
    for block in Clipper(net).blocks:
        affine, gradient = transform.at(block), vector[:, block.numbers]
        u = gradient if affine.shift is None else gradient + affine.shift
        u = u if affine.scale is None else u * affine.scale
        if transform.damping:
            assert affine.scale is not None
            u = u / (1 + (transform.damping * affine.scale * gradient) ** 2).sqrt()
        rows.append(u.flatten(1))
    u = torch.cat(rows, 1)
    if transform.box:
        return u.clamp(-1, 1)
    limit = transform.bound * (1 - WEIGHTED)
    return u * (limit / u.norm(dim=1, keepdim=True)).clamp_max(1.0)


class Last(nn.Module):
    """The mean over a sequence."""

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        return examples.mean(1)


def images() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1), nn.GroupNorm(3, 6), nn.Tanh(),
        nn.Conv2d(6, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 4),
    )  # fmt: skip
    return net.double(), torch.randn(8, 2, 6, 6, dtype=torch.float64)


def sequences() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Embedding(11, 5), nn.LayerNorm(5), nn.Linear(5, 7), nn.Tanh(), Last(), nn.Linear(7, 4)
    )
    return net.double(), torch.randint(0, 11, (8, 6))


def frozen() -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(nn.Linear(6, 6).double(), nn.Tanh(), model())
    net[0].requires_grad_(False)
    return net, batch(8)[0]


NETS = {"rows": lambda: (model(), batch(8)[0]), "images": images, "sequences": sequences,
        "frozen": frozen}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", NETS)
def test_clipped_sums_equal_those_of_every_example(
    kind: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training_client.clipping.blocks._ELEMENTS", 13)  # several to a parameter
    net, examples = NETS[kind]()
    labels, transform = torch.randint(0, 4, (len(examples),)), a_transform(shape, net)
    sums, _ = sum_clipped(Clipper(net), examples, labels, training.cross_entropy, transform)
    exact = transformed(net, transform, examples, labels).sum(0)
    found = torch.cat([each.flatten() for each in sums])
    assert torch.allclose(found, exact, rtol=1e-9, atol=1e-9 * float(exact.abs().max()))


@pytest.mark.parametrize("shape", SHAPES)
def test_clipped_sums_without_zeros_equal_those_of_every_example(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In single precision, where most numbers of examples are said to be 0."""
    monkeypatch.setattr("training_client.clipping.blocks._ELEMENTS", 7000)  # several to a parameter
    used: list[str] = []
    for name in ("products", "add_up"):
        genuine = getattr(Sparse, name)

        def watched(*of: Any, name: str = name, genuine: Any = genuine) -> Any:
            used.append(name)
            return genuine(*of)

        monkeypatch.setattr(Sparse, name, watched)
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 4))
    examples = torch.randn(150, 300) * (torch.rand(150, 300) < 0.15)
    labels, transform = torch.randint(0, 4, (150,)), a_transform(shape, net)
    sums, _ = sum_clipped(
        Clipper(net, sparse_inputs=True), examples, labels, training.cross_entropy, transform
    )
    assert (not used) == (shape == "box" or shape.startswith("damped"))
    assert ("products" in used[: used.index("add_up")] if used else False) == (
        shape in ("ellipsoid", "affine")
    )
    exact_net = copy.deepcopy(net).double()
    moved = replace(transform, **{
        name: (lambda block, of=of: of(block).double())
        for name, of in (("scale", transform.scale), ("shift", transform.shift)) if of is not None
    })  # fmt: skip
    exact = transformed(exact_net, moved, examples.double(), labels)
    found = torch.cat([each.flatten() for each in sums]).double()
    most = exact.abs().sum(0) * rounding(torch.float32, 300)  # which norms are allowed for
    assert bool(((found - exact.sum(0)).abs() <= most).all())


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_no_example_exceeds_the_bound(kind: str, shape: str, size: float) -> None:
    net, examples = NETS[kind]()
    net = net.float()
    if examples.is_floating_point():
        examples = (size * examples).float()
    clipper, transform = Clipper(net), a_transform(shape, net)
    longest = 0.0
    for at in range(len(examples)):
        one, label = examples[at : at + 1], torch.tensor([at % 4])
        sums, _ = sum_clipped(clipper, one, label, times(size), transform)
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in sums))
        assert norm <= transform.bound
        longest = max(longest, norm)
    assert longest > 0.99 * transform.bound or size < 1e4 or shape == "box"


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_under_autocast_what_is_clipped_and_summed_is_in_single_precision(
    kind: str, shape: str
) -> None:
    """The model's own passes round to 8 bits, so the gradients are others, by a little."""
    net, examples = NETS[kind]()
    net, labels = net.float(), torch.arange(len(examples)) % 4
    examples = examples.float() if examples.is_floating_point() else examples
    transform = a_transform(shape, net)
    clipper, loss = Clipper(net), training.cross_entropy
    exact = torch.cat(
        [e.flatten() for e in sum_clipped(clipper, examples, labels, loss, transform)[0]]
    )
    with torch.autocast("cpu", torch.bfloat16):
        sums, _ = sum_clipped(clipper, examples, labels, loss, transform)
    found = torch.cat([each.flatten() for each in sums])
    assert found.dtype == torch.float32
    assert 0.0 < float((found - exact).norm()) < 0.1 * float(exact.norm())
    for at in range(len(examples)):
        one = slice(at, at + 1)
        with torch.autocast("cpu", torch.bfloat16):
            alone, _ = sum_clipped(clipper, examples[one], labels[one], times(1e4), transform)
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in alone))
        assert norm <= transform.bound
        assert norm > 0.99 * transform.bound or shape == "box"


def times(size: float) -> Loss:
    """A loss that is so many times larger, for there is no larger token."""
    return lambda predictions, targets: size * training.cross_entropy(predictions, targets)


def test_an_example_that_the_shift_cancels_is_still_bounded() -> None:
    """u = D∘(∇ + b) near zero: the norm is what is left of two large numbers."""
    net, (examples, labels) = model().float(), batch(1)
    examples = examples.float()
    gradient = [each[0].float() for each in per_example(net, examples, labels)]
    for size in (1e2, 1e4, 1e6):
        scales = [torch.full_like(each, size) for each in gradient]
        shifts = [-each * (1 + 1e-7) for each in gradient]
        transform = Transform.fixed(1e-3, scales, shifts)
        sums, _ = sum_clipped(Clipper(net), examples, labels, training.cross_entropy, transform)
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in sums))
        assert norm <= transform.bound


def test_the_square_of_a_gradient_is_free_of_the_noise() -> None:
    """Where ∇² is well above the noise its estimate is near it; elsewhere it is small."""
    generator = torch.Generator().manual_seed(6)
    exact = torch.tensor([0.0, 3.0]).repeat(20_000, 1)
    scales, shifts = torch.tensor([2.0, 0.5]).expand_as(exact), torch.ones_like(exact)
    transform = Transform.fixed(1.0, [scales], [shifts])
    noise = 0.4 * torch.randn(exact.shape, generator=generator)
    (affine,) = maps(transform, [exact])
    means, squares = affine.moments(scales * (exact + shifts) + noise, 0.4)
    small, large = squares.mean(0).tolist()
    assert small < 0.5 * (0.4 / 2.0) ** 2
    assert large == pytest.approx(9.0, rel=0.02)
    assert means.mean(0).tolist() == pytest.approx([0.0, 3.0], abs=0.02)


def test_an_ellipsoid_leaves_alone_what_its_box_leaves_alone() -> None:
    net, (examples, labels) = model(), batch()
    axes = [each.abs() + 1e-3 for each in like(net, 5)]
    largest = max(
        float((g.abs() / s).max())
        for g, s in zip(per_example(net, examples, labels), axes, strict=True)
    )
    wide = [1.01 * largest * each for each in axes]  # every example is within the box
    sums = [
        sum_clipped(
            Clipper(net), examples, labels, training.cross_entropy, ellipsoid(wide, box=box)
        )[0]
        for box in (True, False)
    ]
    for boxed, scaled in zip(*sums, strict=True):
        assert torch.allclose(boxed, scaled, rtol=1e-9, atol=1e-12)


def test_half_axes_give_the_noise_of_lemma_1() -> None:
    """σᵢ = σ√m·sᵢ on the gradient: Σ sᵢ²/σᵢ² = 1/σ², with equality (papers/000, Lemma 1)."""
    axes = [torch.tensor([0.5, 2.0]), torch.tensor([[0.1, 3.0, 1.0]])]
    transform, sigma = ellipsoid(axes), 2.0
    noise = [
        affine.moments(torch.full_like(s, sigma * transform.bound), 0.0)[0]
        for affine, s in zip(maps(transform, axes), axes, strict=True)
    ]
    total = sum(float((s / n).square().sum()) for s, n in zip(axes, noise, strict=True))
    assert total == pytest.approx(1 / sigma**2)


# --- every optimizer


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize(("name", "state"), STATES)
def test_lots_of_any_size_make_a_step(name: str, state: str, kind: str) -> None:
    """An empty lot adds noise all the same; a lot in physical batches is the lot."""
    plan = Plan(dataset_size=64, sample_rate=0.5, clip_norm=1.0, noise_multiplier=1.0)
    found = []
    for physical in (None, 5):
        torch.manual_seed(9)
        net, examples = NETS[kind]()
        labels = torch.arange(len(examples)) % 4
        options = {"generator": torch.Generator().manual_seed(4), "public": (examples, labels)}
        optimizer = made(name, net, plan, state=state, physical_batch_size=physical, **options)
        for size in (0, 1, 8):
            before = [p.detach().clone() for p in optimizer.parameters]
            optimizer.step(examples[:size], labels[:size], training.cross_entropy)
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
        optimizer = made(name, model(), PLAN, learning_rate=first, generator=generator)
        assert optimizer.learning_rate == first
        optimizer.learning_rate = later
        optimizer.step(*batch(), training.cross_entropy)
        found.append([p.detach() for p in optimizer.parameters])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("name", "state"), STATES)
def test_a_step_reads_no_state_that_it_has_changed(
    name: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights were found with the map of all blocks as it was before the update.

    So an update that takes block after block is one that is given all of them made beforehand.
    """
    monkeypatch.setattr("training_client.clipping.blocks._ELEMENTS", 13)
    plan = replace(PLAN, noise_multiplier=1e-3)
    found = []
    for beforehand in (False, True):
        torch.manual_seed(9)
        options = OPTIONS.get(name, {}) | {"generator": torch.Generator().manual_seed(4)}
        optimizer = made(name, model(), plan, state=state, **options)
        if beforehand:
            monkeypatch.setattr(optimizer.private_sum, "release", made_at_once(optimizer))
        for _ in range(4):
            optimizer.step(*batch(), training.cross_entropy)
        assert len(optimizer.blocks) > len(optimizer.parameters)
        found.append([p.detach() for p in optimizer.parameters])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def made_at_once(optimizer: PrivateOptimizer) -> Callable[..., Release]:
    """`PrivateSum.release`, with all parts made before any is given out."""
    genuine = optimizer.private_sum.release

    def release(*of: Any) -> Release:
        released, parts = genuine(*of), list[Part]()
        released.each(parts.append)
        following = iter(parts)

        def known(block: Block, mean: torch.Tensor) -> Part:
            part = next(following)
            assert part.block == block
            mean.copy_(part.mean)
            return replace(part, mean=mean)

        numbers = (released.mean_loss, released.deviation)
        return Release(*numbers, optimizer.blocks, optimizer.parameters, known)

    return release


def test_a_release_is_taken_once() -> None:
    private_sum = PrivateSum(model(), unbudgeted(PLAN))
    ways: list[Callable[[Release], object]] = [Release.whole, lambda r: r.each(lambda _: None)]
    for take in ways:
        for again in ways:
            released = private_sum.release(*batch(), training.cross_entropy, Transform(1.0))
            take(released)
            with pytest.raises(RuntimeError, match="taken once"):
                again(released)


def wide(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """With 300 000 numbers, to see a deviation by; and examples."""
    torch.manual_seed(1)
    if kind == "rows":
        return nn.Sequential(nn.Linear(600, 500), nn.ReLU(), nn.Linear(500, 4)), torch.randn(4, 600)
    if kind == "images":
        net = nn.Sequential(
            nn.Conv2d(64, 512, 3), nn.GroupNorm(4, 512), nn.Flatten(), nn.Linear(512, 4)
        )
        return net, torch.randn(4, 64, 3, 3)
    net = nn.Sequential(nn.Embedding(3000, 100), nn.LayerNorm(100), Last(), nn.Linear(100, 4))
    return net, torch.randint(0, 3000, (4, 6))


@pytest.mark.parametrize("kind", ["rows", "images", "sequences"])
@pytest.mark.parametrize(("name", "state"), NOISY)
def test_the_noise_is_as_stated(name: str, state: str, kind: str) -> None:
    """On an empty lot the noisy mean is nothing but noise of deviation σB/(qN)."""
    net, examples = wide(kind)
    labels = torch.arange(len(examples))
    plan = Plan(dataset_size=64, sample_rate=0.5, clip_norm=3.0, noise_multiplier=1.5)
    optimizer = made(name, net, plan, state=state, public=(examples, labels))
    recorder, seen = Recorder(optimizer), []
    for _ in range(3):
        bound = optimizer.transform().bound
        optimizer.step(examples[:0], labels[:0], training.cross_entropy)
        stated = plan.noise_multiplier * bound / plan.expected_batch_size
        noise = recorder.released[-1]
        seen.append(noise / noise.norm())
        assert float(noise.std()) == pytest.approx(stated, rel=0.01)
        assert abs(float(noise.mean())) < 0.02 * stated
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize(("name", "state"), NOISY)
def test_noise_repeats_neither_within_a_step_nor_in_the_next(name: str, state: str) -> None:
    """Blocks of the same noise would tell the difference of their sums."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))
    examples, labels = torch.randn(4, 784), torch.arange(4)
    options = {"generator": torch.Generator().manual_seed(8), "public": (examples, labels)}
    optimizer = made(name, net, PLAN, state=state, **options)
    recorder = Recorder(optimizer)
    for _ in range(2):
        optimizer.step(examples[:0], labels[:0], training.cross_entropy)
    noise = [block.of(step) for step in recorder.released for block in optimizer.blocks]
    assert len(noise) >= 14
    for one, other in combinations(noise, 2):
        size = min(len(one), len(other))
        both = torch.stack([one[:size], other[:size]])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 6 / math.sqrt(size)
    assert repeated(torch.cat(recorder.released)) <= 3  # by chance once in 50 times


def repeated(numbers: torch.Tensor) -> int:
    """How many neighbours, of single precision, occur again elsewhere, bit by bit."""
    bits = numbers.numpy().view(np.uint32).astype(np.uint64)
    pairs = np.sort(bits[:-1] << np.uint64(32) | bits[1:])
    return int((pairs[1:] == pairs[:-1]).sum())


@pytest.mark.parametrize(("name", "state"), BOXED)
def test_a_box_clamps_every_coordinate_of_every_example(name: str, state: str) -> None:
    net, (examples, labels) = model(), batch()
    plan = replace(PLAN, noise_multiplier=1e-9)
    optimizer = made(name, net, plan, state=state, beta=2.0)
    recorder = Recorder(optimizer)
    for _ in range(2):
        optimizer.step(examples, labels, training.cross_entropy)
    boxed = replace(optimizer.transform(), box=True)
    each = transformed(net, boxed, examples, labels)
    assert 0.1 < float((each.abs() == 1).double().mean()) < 0.95
    optimizer.step(examples, labels, training.cross_entropy)
    found = recorder.released[-1] * plan.expected_batch_size
    assert torch.allclose(found, each.sum(0), rtol=1e-6, atol=1e-6)
    optimizer.step(examples[:1], labels[:1], times(1e6))
    found = recorder.released[-1] * plan.expected_batch_size
    assert float(found.abs().max()) == pytest.approx(1.0, abs=1e-6)


REFERENCES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "dp_sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "dp_adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "dp_rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05),
    "dp_adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adal": lambda p: torch.optim.RMSprop(p, lr=0.05, alpha=0.9, eps=0.0),
    "adadp": lambda p: torch.optim.RMSprop(p, lr=0.05, alpha=0.9, eps=0.0),
    "adan": lambda p: torch.optim.SGD(p, lr=0.05),
}
QUIET = Plan(dataset_size=64, sample_rate=0.5, clip_norm=1e9, noise_multiplier=1e-30)


@pytest.mark.parametrize("name", REFERENCES)
def test_without_noise_and_clipping_it_is_the_plain_optimizer(name: str) -> None:
    private, plain = model(), model()
    examples, labels = batch()
    options = {"epsilon": 1e-30, "beta": 1e9} if name.startswith("ada") else {}
    if name in ("adadp", "adan"):
        options |= {"threshold": 0.0, "beta": 1e9}
    optimizer = made(name, private, QUIET, learning_rate=0.05, **options)
    reference = REFERENCES[name](list(plain.parameters()))
    for _ in range(5):
        optimizer.step(examples, labels, training.cross_entropy)
        reference.zero_grad()
        (training.cross_entropy(plain(examples), labels).sum() / 32).backward()
        reference.step()
    for a, b in zip(private.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["adam", "rmsprop", "adagrad"])
def test_without_noise_and_clipping_pigdo_is_its_row_of_table_1(rule: str) -> None:
    """With s and f from before the step; written out here once more, on the mean gradient."""
    private, plain = model(), model()
    examples, labels = batch()
    optimizer = made(f"pi_{rule}", private, QUIET, learning_rate=0.01)
    first, second, epsilon = 0.9, 0.999, 1e-3
    f = [torch.zeros_like(p) for p in plain.parameters()]
    s = [torch.zeros_like(p) for p in plain.parameters()]
    for step in range(1, 5):
        optimizer.step(examples, labels, training.cross_entropy)
        loss = training.cross_entropy(plain(examples), labels).sum() / 32
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        with torch.no_grad():
            for at, (p, g) in enumerate(zip(plain.parameters(), gradients, strict=True)):
                known = s[at] / (1 - second ** (step - 1)) if rule == "adam" and step > 1 else s[at]
                taken = (first * f[at] + (1 - first) * g) / (1 - first**step)
                p -= 0.01 * (taken if rule == "adam" else g) / (known.sqrt() + epsilon)
                f[at] = first * f[at] + (1 - first) * g
                s[at] = s[at] + g**2 if rule == "adagrad" else second * s[at] + (1 - second) * g**2
    for a, b in zip(private.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["adam", "rmsprop", "adagrad"])
def test_with_own_squares_pigdo_is_table_1_to_the_letter(rule: str) -> None:
    """Every example's f/√s, with s and f of the mean gradient before; no ε is printed."""
    private, plain = model(), model()
    (examples, labels), first, second = batch(), 0.9, 0.999
    options = {"own_squares": True, "epsilon": 0.0, "public": (examples, labels)}
    optimizer = made(f"pi_{rule}", private, QUIET, learning_rate=0.01, state="public", **options)
    f = [torch.zeros_like(p) for p in plain.parameters()]
    s = [torch.zeros_like(p) for p in plain.parameters()]
    for step in range(1, 5):
        optimizer.step(examples, labels, training.cross_entropy)
        each = per_example(plain, examples, labels)
        with torch.no_grad():
            for at, (p, g) in enumerate(zip(plain.parameters(), each, strict=True)):
                if rule == "adam":
                    taken = (first * f[at] + (1 - first) * g) / (1 - first**step)
                    squares = (second * s[at] + (1 - second) * g**2) / (1 - second**step)
                else:
                    taken = g
                    squares = s[at] + g**2 if rule == "adagrad" else mixed(second, s[at], g**2)
                p -= 0.01 * (taken / squares.sqrt()).mean(0)
                mean = g.mean(0)
                f[at] = mixed(first, f[at], mean)
                s[at] = s[at] + mean**2 if rule == "adagrad" else mixed(second, s[at], mean**2)
    for a, b in zip(private.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["adam", "rmsprop", "adagrad"])
def test_with_own_squares_state_cannot_be_made_of_what_is_released(rule: str) -> None:
    with pytest.raises(ValueError, match="take public state, or raw"):
        made(f"pi_{rule}", model(), PLAN, own_squares=True)


def gradients_of(net: nn.Module, of: tuple[torch.Tensor, torch.Tensor]) -> Tensors:
    """Of the mean loss."""
    return torch.autograd.grad(
        training.cross_entropy(net(of[0]), of[1]).mean(), list(net.parameters())
    )


@pytest.mark.parametrize("state", ["public", "privatised"])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("statistic", ["rmsprop", "adam", "adagrad", "known"])
def test_without_noise_and_clipping_adadps_descends_over_its_statistic(
    statistic: str, momentum: float, state: str
) -> None:
    """With A from before the step, or known; written out here once more, on mean gradients."""
    private, plain = model(), model()
    known, decay, epsilon = [each.abs() + 0.1 for each in like(plain, 6)], 0.8, 1e-2
    side = {"side_information": known} if statistic == "known" else {"statistic": statistic}
    options = {"momentum": momentum, "decay": decay, "epsilon": epsilon} | side
    optimizer = made("adadps", private, QUIET, learning_rate=0.01, state=state, **options)
    v = [torch.zeros_like(p) for p in plain.parameters()]
    s = [torch.zeros_like(p) for p in plain.parameters()]
    for steps in range(4):
        optimizer.step(*batch(), training.cross_entropy)
        public = gradients_of(plain, PUBLIC if state == "public" else batch())
        gradients = gradients_of(plain, batch())
        share = 1 - decay**steps if statistic == "adam" and steps > 0 else 1.0
        with torch.no_grad():
            for at, p in enumerate(plain.parameters()):
                over = (s[at] / share).sqrt() + epsilon if steps > 0 else torch.ones_like(p)
                over = known[at] if statistic == "known" else over
                v[at] = momentum * v[at] + gradients[at] / over
                p.sub_(v[at], alpha=0.01)
                more = public[at] ** 2
                s[at] = s[at] + more if statistic == "adagrad" else mixed(decay, s[at], more)
    for a, b in zip(private.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def mixed(decay: float, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return decay * old + (1 - decay) * new


@pytest.mark.parametrize(("name", "first"), [("dp_r_pub", 0.0), ("dp_adam_pub", 0.9)])
def test_without_noise_and_clipping_baselines_descend_over_a_public_statistic(
    name: str, first: float
) -> None:
    """With A that has this step's public gradient in it; written out here once more."""
    private, plain = model(), model()
    decay, epsilon = 0.8, 1e-2
    options = {"decay": decay, "epsilon": epsilon}
    optimizer = made(name, private, QUIET, learning_rate=0.01, **options)
    f = [torch.zeros_like(p) for p in plain.parameters()]
    s = [torch.zeros_like(p) for p in plain.parameters()]
    for steps in range(1, 5):
        optimizer.step(*batch(), training.cross_entropy)
        public, gradients = gradients_of(plain, PUBLIC), gradients_of(plain, batch())
        share = 1 - decay**steps if name == "dp_adam_pub" else 1.0
        with torch.no_grad():
            for at, p in enumerate(plain.parameters()):
                s[at] = mixed(decay, s[at], public[at] ** 2)
                f[at] = mixed(first, f[at], gradients[at])
                direction = f[at] / (1 - first**steps) / ((s[at] / share).sqrt() + epsilon)
                p.sub_(direction, alpha=0.01)
    for a, b in zip(private.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["dp_sgd", "dp_adam", "dp_rmsprop", "dp_adagrad", "adadp"])
def test_weights_in_another_order_of_memory_are_trained_alike(name: str) -> None:
    """PyTorch's fused optimizers go over memory, a gradient's too."""
    found = []
    for turned in (False, True):
        net = model()
        if turned:
            weight = net[0].weight.detach()
            net[0].weight = nn.Parameter(weight.T.contiguous().T)
        optimizer = made(name, net, QUIET)
        for _ in range(3):
            optimizer.step(*batch(), training.cross_entropy)
        found.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.allclose(*found, rtol=1e-9, atol=1e-12)


def test_side_information_scales_gradients_before_the_clip() -> None:
    """A ∝ how often a feature occurs: with A = 1 it is DP-SGD, and steps scale by 1/A."""
    found = []
    for size in (1.0, 4.0):
        net, (examples, labels) = model(), batch()
        known = [torch.full_like(p, size) for p in net.parameters()]
        before = [p.detach().clone() for p in net.parameters()]
        AdaDps(net, unbudgeted(QUIET), learning_rate=0.1, side_information=known).step(
            examples, labels, training.cross_entropy
        )
        found.append([b - p.detach() for b, p in zip(before, net.parameters(), strict=True)])
    for one, four in zip(*found, strict=True):
        assert torch.allclose(one, 4 * four, rtol=1e-9)


# --- leaks: what an optimizer keeps may depend on a record through noisy sums only


class Recorder:
    """Every noisy mean that a run releases, a vector for each step."""

    def __init__(self, optimizer: PrivateOptimizer) -> None:
        self.released: list[torch.Tensor] = []
        private_sum = optimizer.private_sum
        release, part = private_sum.release, private_sum._part

        def recorded(*of: Any) -> Release:
            self.released.append(optimizer.zeros())
            return release(*of)

        def noisy(total: Sum, transform: Transform, block: Block, mean: torch.Tensor) -> Part:
            found = part(total, transform, block, mean)
            block.of(self.released[-1]).copy_(found.mean)
            return found

        private_sum.release = recorded  # type: ignore[method-assign]
        private_sum._part = noisy  # type: ignore[method-assign]


def state_of(optimizer: PrivateOptimizer) -> list[torch.Tensor]:
    """Every tensor and number that can be reached from an optimizer, but for its model's."""
    return leaves(vars(optimizer))


def leaves(value: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """Of generators nothing is told, and functions and classes hold nothing."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, bool | int | float | np.number | np.ndarray):
        return [torch.as_tensor(value, dtype=torch.float64)]
    seen = set() if seen is None else seen
    if id(value) in seen or callable(value):  # a module is called, too
        return []
    seen.add(id(value))
    return [leaf for each in parts(value) for leaf in leaves(each, seen)]


def parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if hasattr(value, "__dict__"):
        return list(vars(value).values())
    return [getattr(value, name) for name in getattr(value, "__slots__", ())]


Make = Callable[[], PrivateOptimizer]


def replayed(
    make: Make, released: list[torch.Tensor], other: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """The state of a run on another dataset whose releases are these, whatever its batches."""
    torch.manual_seed(5)
    optimizer = make()
    following = iter(released)
    genuine = optimizer.private_sum.summed

    def summed(*of: Any) -> Sum:
        """The other dataset is looked at, and what was released put in place of its sum."""
        size = PLAN.expected_batch_size
        return Added(next(following) * size, genuine(*of).mean_loss)

    optimizer.private_sum.summed = summed  # type: ignore[method-assign]

    def without_noise(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros_like(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training_client.private_sum.gaussian_like", without_noise)
        for _ in released:
            optimizer.step(*other, training.cross_entropy)
    return state_of(optimizer)


PLAN = Plan(dataset_size=64, sample_rate=0.5, clip_norm=1.0, noise_multiplier=0.5)
OPTIONS: dict[str, dict[str, Any]] = {"adadp": {"threshold": 0.0}, "adan": {"threshold": 0.0}}


def states_after_a_replay(make: Make) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of a run, and of a run on data that differs in one record but released the same."""
    examples, labels = batch()
    torch.manual_seed(5)
    optimizer = make()
    recorder = Recorder(optimizer)
    for _ in range(4):
        optimizer.step(examples, labels, training.cross_entropy)
    neighbour = examples.clone()
    neighbour[0] = 7.0
    return state_of(optimizer), replayed(make, recorder.released, (neighbour, labels))


def same(kept: list[torch.Tensor], again: list[torch.Tensor]) -> bool:
    assert len(kept) == len(again) > 0
    pairs = zip(kept, again, strict=True)
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs)


@pytest.mark.parametrize(("name", "state"), STATES)
def test_state_is_a_function_of_what_was_released(name: str, state: str) -> None:
    def make() -> PrivateOptimizer:
        return made(name, model(), PLAN, state=state, **OPTIONS.get(name, {}))

    proven = state != "raw"
    assert same(*states_after_a_replay(make)) == proven
    assert make().source.proven == proven


PLACES: dict[str, Callable[[PrivateOptimizer], Any]] = {
    "itself": lambda optimizer: optimizer,
    "sum": lambda optimizer: optimizer.private_sum,
    "clipper": lambda optimizer: optimizer.private_sum.clipper,
    "source": lambda optimizer: optimizer.source,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["tensor", "number", "array", "list"])
def test_a_leak_is_found_in_any_optimizer(kind: str, place: str) -> None:
    """One that keeps something of the batch itself is caught, whatever it calls it."""

    class Leaky(AdaDp):
        def update(self, step: Step) -> None:
            super().update(step)
            total = step.examples.sum()
            kinds = {"number": float(total), "array": total.numpy(), "list": [[[[[total]]]]]}
            PLACES[place](self).anything = kinds.get(kind, total)

    assert not same(
        *states_after_a_replay(lambda: Leaky(model(), unbudgeted(PLAN), learning_rate=0.1))
    )
    assert same(*states_after_a_replay(lambda: AdaDp(model(), unbudgeted(PLAN), learning_rate=0.1)))


@pytest.mark.parametrize("sound", [True, False])
def test_what_a_participant_keeps_beside_the_data_is_a_function_of_what_was_released(
    sound: bool,
) -> None:
    """The server's model too. One that keeps the sum of its examples is caught."""

    class Leaky(Participant):
        def contribute(self, parameters: Tensors, loss: Loss) -> list[torch.Tensor] | None:
            self.anything = float(self._examples.sum())
            return super().contribute(parameters, loss)

    kind = Participant if sound else Leaky
    examples, labels = batch(PLAN.dataset_size)
    neighbour = examples.clone()
    neighbour[0] = 7.0
    found = [after_rounds(kind, each, labels) for each in (examples, neighbour)]
    assert same(*found) == sound


def after_rounds(
    kind: type[Participant], examples: torch.Tensor, labels: torch.Tensor
) -> list[torch.Tensor]:
    """What there is after four rounds that release the same on any data."""
    torch.manual_seed(5)
    net = model()
    person = kind("one", net, examples, labels, NoBudget(PLAN, 4, "it is attacked"))
    genuine, seeds = person._private_sum.summed, iter(range(4))

    def summed(*of: Any) -> Sum:
        released = torch.cat([each.flatten() for each in like(net, next(seeds))])
        return Added(released, genuine(*of).mean_loss)

    person._private_sum.summed = summed  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "training_client.private_sum.gaussian_like", lambda t, *_: torch.zeros_like(t)
        )
        train_together(net, [person], training.cross_entropy, learning_rate=0.1)
    kept = {
        name: each for name, each in vars(person).items() if name not in ("_examples", "_targets")
    }
    return [*leaves(kept), *(each.detach() for each in net.parameters())]


# --- half axes of noisy gradients


def half_axes(noise: float, steps: int = 200) -> list[float | None]:
    """The length of AdaDP's half axes, step by step, under so much noise."""
    optimizer = AdaDp(
        model(),
        unbudgeted(replace(PLAN, noise_multiplier=noise)),
        learning_rate=1e-3,
        threshold=0.0,
        generator=torch.Generator().manual_seed(5),  # the mistake shows under most noise, not all
    )
    found = []
    for _ in range(steps):
        optimizer.step(*batch(), training.cross_entropy)
        found.append(optimizer.half_axes)
    assert all(bool(each.isfinite().all()) for each in state_of(optimizer))
    return found


def test_half_axes_do_not_feed_on_their_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that noise does not hide make half axes; noise alone makes none."""
    quiet = half_axes(0.05)[1:]
    assert all(each is not None and each <= PLAN.clip_norm for each in quiet)
    assert half_axes(8.0) == [None] * 200
    monkeypatch.setattr("training_client.optimizers.adadp._DEVIATIONS", 0.0)
    assert half_axes(8.0) != [None] * 200


def test_what_noise_leaves_in_the_squares_is_known() -> None:
    """R is the variance of E′ about E[g²] where there is no gradient: of 20 000 coordinates."""
    net = nn.Linear(2000, 10, bias=False, dtype=torch.float64)
    optimizer = AdaDp(
        net, unbudgeted(replace(PLAN, noise_multiplier=2.0)), learning_rate=0.0, threshold=math.inf
    )
    empty = torch.zeros(0, 2000, dtype=torch.float64), torch.zeros(0, dtype=torch.long)
    for _ in range(50):
        optimizer.step(*empty, training.cross_entropy)
    squares = optimizer.prior_squares
    assert float(squares.var()) == pytest.approx(optimizer.uncertainty, rel=0.1)
    assert abs(float(squares.mean())) < 5 * math.sqrt(optimizer.uncertainty / 20_000)


# --- checkpoints


@pytest.mark.parametrize(("name", "state"), STATES)
def test_a_run_goes_on_from_what_was_kept(name: str, state: str) -> None:
    """As if it had not stopped, under the same noise."""
    found = []
    for stops in (False, True):
        torch.manual_seed(9)
        net = model()
        optimizer = made(name, net, PLAN, state=state, **OPTIONS.get(name, {}))
        for step in range(4):
            if stops and step == 2:
                kept = copy.deepcopy(optimizer.state_dict())
                optimizer = made(name, net, PLAN, state=state, **OPTIONS.get(name, {}))
                optimizer.load_state_dict(kept)
            torch.manual_seed(step)
            optimizer.private_sum._generator.manual_seed(step)
            optimizer.step(*batch(), training.cross_entropy)
        found.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["adadp", "pi_adam", "adadps", "dp_adam_pub", "dp_adam"])
def test_what_another_model_kept_is_refused(name: str) -> None:
    other = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()
    wider = made(name, other, PLAN)
    wider.step(*batch(), training.cross_entropy)
    kept, optimizer = wider.state_dict(), made(name, model(), PLAN)
    with pytest.raises(DataError, match="of another model"):
        optimizer.load_state_dict(kept)
    with pytest.raises(DataError):
        optimizer.load_state_dict({})
    with pytest.raises(DataError, match=r"of another|is not one of"):
        optimizer.load_state_dict(
            {key: [each] for key, each in kept.items() if key != "statistics"}
        )


# --- bad input


def test_names_and_states_that_do_not_exist_are_named() -> None:
    net = model()
    with pytest.raises(ValueError, match="there are dp_sgd"):
        made("sgd", net, PLAN)
    with pytest.raises(ValueError, match="it has privatised"):
        made("dp_sgd", net, PLAN, state="raw")
    with pytest.raises(ValueError, match="public data"):
        make_optimizer("adadps", net, unbudgeted(PLAN))


@pytest.mark.parametrize("name", ["adadps", "dp_adam_pub", "adadp", "pi_adam"])
def test_public_losses_that_are_no_numbers_are_refused(name: str) -> None:
    """Their squares would be in the state for good: before a step, and when training diverged."""
    examples, labels = batch(16)
    with pytest.raises(DataError, match="not all finite numbers"):
        made_with(name, model(), (examples / 0.0, labels))
    net = model()
    optimizer = made_with(name, net, (examples, labels))
    optimizer.step(*batch(), training.cross_entropy)
    with torch.no_grad():
        net[2].weight.fill_(math.inf)
    with pytest.raises(DataError, match="public examples has become nan: lower the learning rate"):
        optimizer.step(*batch(), training.cross_entropy)
    assert all(torch.isfinite(each).all() for each in leaves(optimizer.state_dict()))


def made_with(name: str, net: nn.Module, public: tuple[torch.Tensor, ...]) -> PrivateOptimizer:
    options = OPTIONS.get(name, {})
    return make_optimizer(name, net, unbudgeted(PLAN), state="public", public=public, **options)


def test_a_model_on_another_device_than_its_data_is_refused() -> None:
    net = model().to("meta")
    optimizer = made("dp_sgd", net, PLAN, generator=torch.Generator())
    with pytest.raises(DataError, match="the model on meta"):
        optimizer.step(*batch(), training.cross_entropy)


@pytest.mark.parametrize("wrong", [0.0, -1.0, 1e-19, 1e38, math.inf, math.nan])
def test_side_information_that_sums_may_overflow_with_is_refused(wrong: float) -> None:
    net = model()
    known = [torch.ones_like(each) for each in net.parameters()]
    AdaDps(net, unbudgeted(PLAN), learning_rate=0.1, side_information=known)
    with pytest.raises(ValueError, match="shaped like the parameters"):
        AdaDps(net, unbudgeted(PLAN), learning_rate=0.1, side_information=known[::-1])
    known[1].view(-1)[-1] = wrong
    with pytest.raises(ValueError, match=r"side information from 1e-18 to 1e\+18"):
        AdaDps(net, unbudgeted(PLAN), learning_rate=0.1, side_information=known)


@pytest.mark.parametrize("wrong", [{"beta": 0.0}, {"threshold": -1.0}, {"epsilon": 0.0}])
def test_adadp_refuses_what_would_divide_by_zero(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected beta"):
        made("adadp", model(), PLAN, **wrong)
