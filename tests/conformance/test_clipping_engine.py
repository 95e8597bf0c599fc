"""Clipped sums of every kind of transform and model equal the per-example oracle."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.optimizer_cases import (
    NETS,
    SHAPES,
    Tensors,
    build_transform,
    clipped_per_example,
    ellipsoid,
    random_like,
    scaled_loss,
)
from tests.support.small_models import batch, model, per_example, sum_clipped
from training_client.lab.models import cross_entropy
from training_client.private_step import AffineMap, Clipper, Transform
from training_client.private_step.blocks import cut_into_blocks
from training_client.private_step.kernels.sparse import SparseFactor
from training_client.private_step.rounding_bounds import rounding_error


def affine_maps(transform: Transform, like: Tensors) -> list[AffineMap]:
    """Return D and b of whole parameters."""
    return [
        transform.for_block(block).for_piece(piece)
        for block in cut_into_blocks(like)
        for piece in block.pieces
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", NETS)
def test_clipped_sums_equal_the_per_example_oracle(
    kind: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "training_client.private_step.blocks._BLOCK_SIZE", 13
    )  # several to a parameter
    net, examples = NETS[kind]()
    labels, transform = torch.randint(0, 4, (len(examples),)), build_transform(shape, net)
    sums, _ = sum_clipped(Clipper(net), examples, labels, cross_entropy, transform)
    exact = clipped_per_example(net, transform, examples, labels).sum(0)
    found = torch.cat([each.flatten() for each in sums])
    assert torch.allclose(found, exact, rtol=1e-9, atol=1e-9 * float(exact.abs().max()))


@pytest.mark.parametrize("shape", SHAPES)
def test_sparse_clipped_sums_equal_the_per_example_oracle(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In single precision, with inputs that are declared to be mostly 0."""
    monkeypatch.setattr(
        "training_client.private_step.blocks._BLOCK_SIZE", 7000
    )  # several to a parameter
    used: list[str] = []
    for name in ("products", "weighted_product"):
        genuine = getattr(SparseFactor, name)

        def watched(*of: Any, name: str = name, genuine: Any = genuine) -> Any:
            used.append(name)
            return genuine(*of)

        monkeypatch.setattr(SparseFactor, name, watched)
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 4))
    examples = torch.randn(150, 300) * (torch.rand(150, 300) < 0.15)
    labels, transform = torch.randint(0, 4, (150,)), build_transform(shape, net)
    sums, _ = sum_clipped(
        Clipper(net, sparse_inputs=True), examples, labels, cross_entropy, transform
    )
    assert (not used) == (shape == "box" or shape.startswith("damped"))
    assert ("products" in used[: used.index("weighted_product")] if used else False) == (
        shape in ("ellipsoid", "affine")
    )
    exact_net = copy.deepcopy(net).double()
    moved = replace(transform, **{
        name: (lambda block, of=of: of(block).double())
        for name, of in (("scale", transform.scale), ("shift", transform.shift)) if of is not None
    })  # fmt: skip
    exact = clipped_per_example(exact_net, moved, examples.double(), labels)
    found = torch.cat([each.flatten() for each in sums]).double()
    most = exact.abs().sum(0) * rounding_error(torch.float32, 300)  # which norms are allowed for
    assert bool(((found - exact.sum(0)).abs() <= most).all())


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_no_example_exceeds_the_bound(kind: str, shape: str, size: float) -> None:
    net, examples = NETS[kind]()
    net = net.float()
    if examples.is_floating_point():
        examples = (size * examples).float()
    clipper, transform = Clipper(net), build_transform(shape, net)
    longest = 0.0
    for at in range(len(examples)):
        one, label = examples[at : at + 1], torch.tensor([at % 4])
        sums, _ = sum_clipped(clipper, one, label, scaled_loss(size), transform)
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in sums))
        assert norm <= transform.bound
        longest = max(longest, norm)
    assert longest > 0.99 * transform.bound or size < 1e4 or shape == "box"


HALF_PRECISIONS = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("precision", HALF_PRECISIONS, ids=str)
@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_under_autocast_sums_are_clipped_in_single_precision(
    kind: str, shape: str, precision: torch.dtype
) -> None:
    """The model's own passes round to 8 or 11 bits, so gradients differ a little.

    In float16 a large gradient overflows to infinity, and then the example adds nothing.
    """
    net, examples = NETS[kind]()
    net, labels = net.float(), torch.arange(len(examples)) % 4
    examples = examples.float() if examples.is_floating_point() else examples
    transform = build_transform(shape, net)
    clipper, loss = Clipper(net), cross_entropy
    exact = torch.cat(
        [e.flatten() for e in sum_clipped(clipper, examples, labels, loss, transform)[0]]
    )
    with torch.autocast("cpu", precision):
        sums, _ = sum_clipped(clipper, examples, labels, loss, transform)
    found = torch.cat([each.flatten() for each in sums])
    assert found.dtype == torch.float32
    assert 0.0 < float((found - exact).norm()) < 0.1 * float(exact.norm())
    for at in range(len(examples)):
        one = slice(at, at + 1)
        with torch.autocast("cpu", precision):
            alone, _ = sum_clipped(clipper, examples[one], labels[one], scaled_loss(1e4), transform)
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in alone))
        assert norm <= transform.bound
        overflows = norm == 0.0 and precision == torch.float16
        assert norm > 0.99 * transform.bound or shape == "box" or overflows


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e4, 1e6, 1e30])
def test_under_float16_an_example_that_overflows_adds_nothing_and_changes_no_other(
    shape: str, size: float
) -> None:
    net, (examples, labels) = model().float(), batch(6)
    examples, transform = examples.float(), build_transform(shape, net)
    kept = torch.arange(6) != 2
    examples[2] *= size
    with torch.autocast("cpu", torch.float16):
        sums, _ = sum_clipped(Clipper(net), examples, labels, cross_entropy, transform)
        others, _ = sum_clipped(
            Clipper(net), examples[kept], labels[kept], cross_entropy, transform
        )
        gradient = torch.autograd.grad(
            cross_entropy(net(examples[2:3]), labels[2:3]).sum(), list(net.parameters())
        )
    added = [one - other for one, other in zip(sums, others, strict=True)]
    length = math.sqrt(sum(float(each.double().square().sum()) for each in added))
    assert length <= transform.bound * (1 + 1e-5)
    is_finite = all(bool(each.isfinite().all()) for each in gradient)
    assert is_finite == (size < 1e6)
    if not is_finite:
        assert length <= 1e-5 * transform.bound


def test_an_example_whose_gradient_the_shift_cancels_keeps_the_bound() -> None:
    """u = D∘(∇ + b) near zero: the norm is what is left of two large numbers."""
    net, (examples, labels) = model().float(), batch(1)
    examples = examples.float()
    gradient = [each[0].float() for each in per_example(net, examples, labels)]
    for size in (1e2, 1e4, 1e6):
        scales = [torch.full_like(each, size) for each in gradient]
        shifts = [-each * (1 + 1e-7) for each in gradient]
        transform = Transform.fixed(1e-3, scales, shifts)
        sums, _ = sum_clipped(Clipper(net), examples, labels, cross_entropy, transform)
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in sums))
        assert norm <= transform.bound


def test_the_estimated_squared_gradient_has_the_noise_variance_removed() -> None:
    """If ∇² is well above the noise, its estimate is near it; otherwise it is small."""
    generator = torch.Generator().manual_seed(6)
    exact = torch.tensor([0.0, 3.0]).repeat(20_000, 1)
    scales, shifts = torch.tensor([2.0, 0.5]).expand_as(exact), torch.ones_like(exact)
    transform = Transform.fixed(1.0, [scales], [shifts])
    noise = 0.4 * torch.randn(exact.shape, generator=generator)
    (affine,) = affine_maps(transform, [exact])
    means, squares = affine.gradient_moments(scales * (exact + shifts) + noise, 0.4)
    small, large = squares.mean(0).tolist()
    assert small < 0.5 * (0.4 / 2.0) ** 2
    assert large == pytest.approx(9.0, rel=0.02)
    assert means.mean(0).tolist() == pytest.approx([0.0, 3.0], abs=0.02)


def test_an_ellipsoid_clips_no_example_within_its_box() -> None:
    net, (examples, labels) = model(), batch()
    axes = [each.abs() + 1e-3 for each in random_like(net, 5)]
    largest = max(
        float((g.abs() / s).max())
        for g, s in zip(per_example(net, examples, labels), axes, strict=True)
    )
    wide = [1.01 * largest * each for each in axes]  # every example is within the box
    sums = [
        sum_clipped(Clipper(net), examples, labels, cross_entropy, ellipsoid(wide, box=box))[0]
        for box in (True, False)
    ]
    for boxed, scaled in zip(*sums, strict=True):
        assert torch.allclose(boxed, scaled, rtol=1e-9, atol=1e-12)


def test_half_axes_give_the_noise_of_lemma_1() -> None:
    """σᵢ = σ√m·sᵢ on the gradient: Σ sᵢ²/σᵢ² = 1/σ², with equality (papers/000, Lemma 1)."""
    axes = [torch.tensor([0.5, 2.0]), torch.tensor([[0.1, 3.0, 1.0]])]
    transform, sigma = ellipsoid(axes), 2.0
    noise = [
        affine.gradient_moments(torch.full_like(s, sigma * transform.bound), 0.0)[0]
        for affine, s in zip(affine_maps(transform, axes), axes, strict=True)
    ]
    total = sum(float((s / n).square().sum()) for s, n in zip(axes, noise, strict=True))
    assert total == pytest.approx(1 / sigma**2)
