"""One record moves a clipped sum by at most the bound; a non-finite gradient adds zero."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.support.small_models import batch, clipped_norm, model, sum_clipped, unbudgeted
from training_client.lab.models import cross_entropy
from training_client.plan import Plan
from training_client.private_step import Clipper, Transform, flatten_tensors
from training_client.private_step.private_sum import NoisyBlock, PrivateSum


def weighted(predictions: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient in the predictions is given."""
    return (predictions * gradient).flatten(1).sum(1)


@pytest.mark.spread(first=5)
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("shape", ["ball", "ellipsoid", "affine", "damped", "box"])
@pytest.mark.parametrize("layer", [nn.Linear(5, 4), nn.Conv1d(1, 3, 2)])
def test_a_non_finite_gradient_adds_zero_under_every_transform(
    layer: nn.Module, shape: str, number: float
) -> None:
    """In a box only the non-finite coordinates add nothing: every other one is within ±1."""
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

    rest, _ = sum_clipped(Clipper(net), inputs[kept], of[kept], weighted, by)
    assert all(bool(each.any()) for each in rest)  # or nothing would be as it was
    if shape == "box":
        own = torch.autograd.grad(weighted(net(inputs[4:5]), of[4:5]).sum(), list(net.parameters()))
        assert not any(bool(each.isfinite().all()) for each in own)
        within = [
            (d * g).nan_to_num(0.0).clamp(-1.0, 1.0) for d, g in zip(scales, own, strict=True)
        ]
        rest = [one + other for one, other in zip(rest, within, strict=True)]
    found, _ = sum_clipped(Clipper(net), inputs, of, weighted, by)
    for one, other in zip(found, rest, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("held", [False, True])
def test_one_record_more_does_not_make_a_sum_overflow(held: bool) -> None:
    """Σ w∇ may overflow before D makes it small again; then the other examples would be lost."""
    layer, most = nn.Linear(1, 1, bias=False), 3.4e38 / 400
    bound, found = 1.01e-10 * most, []
    by = Transform.fixed(bound, [torch.full_like(layer.weight, 1e-10)])
    for count in (400, 401, 900):
        values = torch.full((count, 1, 1) if held else (count, 1), math.sqrt(most))
        sums, _ = sum_clipped(Clipper(layer), values, values, weighted, by)
        found.append(float(sums[0].double().norm()))
    assert found[0] > 0
    assert abs(found[1] - found[0]) <= bound * (1 + 1e-3)
    assert found[2] <= 900 * bound


@pytest.mark.parametrize("rows", [700, 1792, 5000])
def test_a_record_moves_a_shifted_sum_by_the_bound_at_most(rows: int) -> None:
    """Rounding Σ wᵢ·b to one side for many examples, each as long as the bound, must not add up."""
    generator = torch.Generator().manual_seed(rows)
    layer = nn.Linear(60, 40, bias=False)
    inputs, of = torch.rand(rows, 60, generator=generator), torch.ones(rows, 40)
    shift = 10 * torch.rand(40, 60, generator=generator)
    by = Transform.fixed(1.0, [torch.rand(40, 60, generator=generator) + 0.5], [shift])
    whole, _ = sum_clipped(Clipper(layer), inputs, of, weighted, by)
    less, _ = sum_clipped(Clipper(layer), inputs[1:], of[1:], weighted, by)
    assert float((whole[0].double() - less[0].double()).norm()) <= 1 + 2e-6 * math.sqrt(rows)


@pytest.mark.spread(first=5)
@pytest.mark.parametrize("rows", [700, 1792, 5000, 20_000])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_record_moves_a_sum_by_the_bound_at_most(sparse: bool, rows: int) -> None:
    """With the record more than a quarter of the inputs is not 0, without it less.

    Where that decided whether zeros are left out, it moved 20 000 by more than three times the
    bound: sums of so many are rounded, and were rounded in two ways.
    """
    generator = torch.Generator().manual_seed(rows)
    layer = nn.Linear(160, 40, bias=False)
    inputs, of = torch.zeros(rows, 160), torch.ones(rows, 40)
    inputs[:, :40] = torch.rand(40, generator=generator) + 0.1
    inputs[1, 0], inputs[0] = 0.0, torch.rand(160, generator=generator) + 0.1
    by = Transform(1.0)
    clipper = Clipper(layer, sparse_inputs=sparse)
    whole, _ = sum_clipped(clipper, inputs, of, weighted, by)
    less, _ = sum_clipped(clipper, inputs[1:], of[1:], weighted, by)
    assert (inputs != 0).float().mean() > 0.25 > (inputs[1:] != 0).float().mean()
    assert float((whole[0].double() - less[0].double()).norm()) <= 1 + 2e-6 * math.sqrt(rows)


@pytest.mark.parametrize("lie", ["one number for all", "columns in a row"])
def test_leaving_out_a_non_finite_example_keeps_the_order_of_summation(lie: str) -> None:
    """Copying the others changed the order of summation: by a sixth of the bound, of 20 000."""
    rows = 20_000
    layer = nn.Linear(160, 40, bias=False)
    generator = torch.Generator().manual_seed(3)
    inputs, of = (
        torch.rand(160, generator=generator).repeat(rows, 1) + 0.1,
        torch.ones(rows, 40),
    )
    inputs[0] = math.nan
    if lie == "columns in a row":
        inputs = inputs.T.contiguous().T

    def loss(predictions: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return (
            predictions.sum(1) if lie == "one number for all" else predictions.mul(gradient).sum(1)
        )

    whole, _ = sum_clipped(Clipper(layer), inputs, of, loss, Transform(1.0))
    less, _ = sum_clipped(Clipper(layer), inputs[1:], of[1:], loss, Transform(1.0))
    assert float(less[0].norm()) > rows / 2
    assert float((whole[0].double() - less[0].double()).norm()) <= 1e-3


def test_scales_may_be_parameters_themselves() -> None:
    layer = nn.Linear(3, 2)
    one = torch.ones(1, 3), torch.ones(1, 2)
    plain = clipped_norm(layer, *one, Transform.fixed(0.5, [torch.ones(2, 3), torch.ones(2)]))
    trained = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))]
    assert clipped_norm(layer, *one, Transform.fixed(0.5, trained)) == plain


def test_huge_scales_on_inputs_that_are_0_leave_the_sum_correct() -> None:
    """A scale of 1e18, from a root of 0, has no effect if the input is always 0."""
    layer = nn.Linear(20, 60, bias=False)
    inputs, of = torch.rand(9, 20), torch.randn(9, 60)
    scale = torch.ones(60, 20)
    inputs[:, :10], scale[:, :10] = 0.0, 1e18
    sums, _ = sum_clipped(Clipper(layer), inputs, of, weighted, Transform.fixed(1e3, [scale]))
    torch.testing.assert_close(sums[0], of.T @ inputs, rtol=1e-4, atol=1e-4)


def test_a_box_needs_a_bound_of_at_least_the_root_of_its_size() -> None:
    net, size = model(), sum(p.numel() for p in model().parameters())
    small = Transform.fixed(0.99 * math.sqrt(size), list(net.parameters()), box=True)
    with pytest.raises(ValueError, match=r"expected a bound .* for a box"):
        sum_clipped(Clipper(net), *batch(), cross_entropy, small)


def test_clipping_is_in_full_precision_whatever_the_model_uses() -> None:
    before, seen = torch.get_float32_matmul_precision(), []
    torch.set_float32_matmul_precision("medium")
    try:
        clipper = Clipper(model().float())
        # private: the precision is set inside of this function's call only
        genuine = clipper._clip_weights
        clipper._clip_weights = lambda *of: (  # type: ignore[method-assign]
            seen.append(torch.get_float32_matmul_precision()), genuine(*of)
        )[1]  # fmt: skip
        examples, labels = batch()
        sum_clipped(clipper, examples.float(), labels, cross_entropy, Transform(1.0))
        assert seen == ["highest"]
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


class BorrowedWeightModel(nn.Module):
    """A model in which the input of one layer is a parameter of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lends, self.borrows = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        row = self.lends.weight.detach()[0].expand(len(examples), -1)
        found: torch.Tensor = self.lends(examples) + self.borrows(row)
        return found


def test_updating_one_block_changes_no_later_block_of_the_release() -> None:
    """A layer's input may be a view of a parameter, which an earlier block's update changes."""
    torch.manual_seed(3)
    net, examples, labels = BorrowedWeightModel(), torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    plan = Plan(dataset_size=100, sample_rate=0.04, clip_norm=1.0, noise_multiplier=1e-9)
    private_sum = PrivateSum(net, unbudgeted(plan))
    whole = private_sum.release(examples, labels, cross_entropy, Transform(1.0)).to_tensors()
    wanted = flatten_tensors(whole)
    released = private_sum.release(examples, labels, cross_entropy, Transform(1.0))

    def take(part: NoisyBlock) -> None:
        torch.testing.assert_close(part.mean, part.block.view_in(wanted), rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for piece in part.block.pieces:
                piece.select_rows(private_sum.clipper.parameters).fill_(100.0)

    released.for_each_block(take)


@pytest.mark.parametrize("number", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["scale", "shift"])
@pytest.mark.parametrize("damping", [0.0, 1.0])
def test_a_transform_with_non_finite_values_releases_zero(
    damping: float, where: str, number: float
) -> None:
    """Otherwise a batch with a record could be distinguished from one without."""
    layer = nn.Linear(2, 1, bias=False)
    scale, shift = torch.ones(1, 2), torch.zeros(1, 2)
    (scale if where == "scale" else shift)[0, 0] = number
    by = Transform.fixed(1.0, [scale], [shift], damping=damping)
    for count in (0, 1, 400):
        given = torch.ones(count, 2), torch.ones(count, 1)
        sums, _ = sum_clipped(Clipper(layer), *given, weighted, by)
        assert torch.equal(sums[0], torch.zeros(1, 2))
