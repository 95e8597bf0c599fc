"""Per-example gradients of convolutions and of normalisation by groups equal those of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.accelerator_counts import no_cpu
from tests.support.clipped_sums import clipped_rows, gradient_rows, norm_of
from training_client.lab.models import cross_entropy
from training_client.private_step import Transform
from training_client.private_step.gradients.convolution_gradients import (
    ConvolutionProducts,
    Kernel,
    convolution_gradients,
    estimate_costs,
)
from training_client.private_step.gradients.example_gradients import MaterializedGradients
from training_client.testing import clipped_sum

COUNT = 4
Make = Callable[[], nn.Module]
LAYERS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "one dimension": (lambda: nn.Conv1d(3, 4, 3), (3, 7)),
    "three dimensions": (lambda: nn.Conv3d(2, 3, (2, 1, 3), padding=1), (2, 3, 4, 3)),
    "stride that leaves pixels out": (lambda: nn.Conv2d(3, 4, 2, stride=3), (3, 7, 6)),
    "stride, padding and dilation": (
        lambda: nn.Conv2d(3, 4, (3, 2), (2, 1), (2, 1), (1, 2)), (3, 6, 5)),
    "padding beyond the kernel": (lambda: nn.Conv2d(2, 3, 2, padding=3), (2, 3, 2)),
    "groups": (lambda: nn.Conv2d(6, 4, 3, groups=2, padding=1), (6, 4, 5)),
    "depthwise": (lambda: nn.Conv2d(5, 5, 3, groups=5, padding=1), (5, 6, 6)),
    "depthwise, two maps each": (lambda: nn.Conv2d(3, 6, 3, groups=3), (3, 6, 6)),
    "depthwise, wide": (lambda: nn.Conv2d(5, 5, 5, groups=5, padding=2), (5, 6, 7)),
    "depthwise, wide, dilated": (
        lambda: nn.Conv1d(5, 5, 5, groups=5, padding=4, dilation=2), (5, 9)),
    "depthwise, wide, strided": (lambda: nn.Conv2d(2, 2, 5, 2, groups=2), (2, 9, 8)),
    "pointwise": (lambda: nn.Conv2d(3, 4, 1, bias=False), (3, 4, 4)),
    "pointwise, groups": (lambda: nn.Conv2d(6, 4, 1, groups=2), (6, 4, 4)),
    "pointwise, strided": (lambda: nn.Conv2d(3, 4, 1, stride=2), (3, 5, 4)),
    "depthwise, one position": (lambda: nn.Conv2d(6, 6, 5, groups=6, padding=2), (6, 1, 1)),
    "one position, groups": (lambda: nn.Conv2d(6, 9, (3, 1), groups=3), (6, 3, 1)),
    "one pixel": (lambda: nn.Conv2d(8, 9, 3, padding=1), (8, 1, 1)),
    "one position": (lambda: nn.Conv2d(3, 5, 4), (3, 4, 4)),
    "same": (lambda: nn.Conv2d(3, 4, (2, 3), padding="same"), (3, 5, 5)),
    "valid": (lambda: nn.Conv1d(3, 4, 3, padding="valid"), (3, 5)),
    "circular": (lambda: nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="circular"), (3, 5, 5)),
    "reflect": (lambda: nn.Conv1d(3, 4, 3, 2, padding=2, padding_mode="reflect"), (3, 8)),
    "replicate, same": (
        lambda: nn.Conv2d(3, 4, 2, padding="same", padding_mode="replicate"), (3, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, 1), (3, 4, 3)),
    "transposed, groups": (
        lambda: nn.ConvTranspose1d(4, 6, 3, 2, groups=2, dilation=2), (4, 5)),
    "transposed, wide margin": (
        lambda: nn.ConvTranspose2d(2, 3, 3, 1, 1, (2, 3), dilation=4), (2, 3, 3)),
    "transposed, three dimensions": (lambda: nn.ConvTranspose3d(2, 3, 2, 2), (2, 2, 3, 2)),
    "large weight": (lambda: nn.Conv2d(32, 160, 3, padding=1), (32, 3, 2)),
    "large weight, groups": (lambda: nn.Conv2d(96, 192, 3, padding=1, groups=3), (96, 2, 2)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (6, 5, 3)),
    "group norm of single values": (lambda: nn.GroupNorm(2, 4), (4,)),
    "group norm, shift only": (lambda: frozen(nn.GroupNorm(2, 6), "weight"), (6, 5, 3)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 5, 4)),
}  # fmt: skip
PATHS: tuple[Any, ...] = (None, "held", "gram", "product")


def frozen(layer: nn.Module, name: str) -> nn.Module:
    """Return a layer of which one parameter is not trained."""
    layer.get_parameter(name).requires_grad_(False)
    return layer


class Between(nn.Module):
    """A layer between two others, so that it is differentiated in the backward pass."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.layer, self._shape = nn.Linear(3, torch.Size(shape).numel()), layer, shape

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.layer(self.first(rows).view(len(rows), *self._shape).tanh()).flatten(1)
        parts = found[:, : found.shape[1] // 4 * 4].reshape(len(rows), 4, -1)
        return parts.tanh().sum(2)


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model of a layer, a batch and labels."""
    torch.manual_seed(2)
    make, shape = LAYERS[name]
    net = Between(make(), shape).to(dtype)
    return net, torch.randn(COUNT, 3, dtype=dtype), torch.arange(COUNT) % 4


@pytest.mark.spread(first=2, second=10)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", LAYERS)
def test_clipped_sums_equal_those_of_gradients_of_each_example(name: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        net, examples, labels = build(name, dtype)
        bound = 0.5 * float(gradient_rows(net, examples, labels).norm(dim=1).mean())
        given = net, examples, labels, cross_entropy, bound
        sums = {(path, True): clipped_sum(*given, path=path) for path in PATHS}
        with no_cpu():
            sums |= {(path, False): clipped_sum(*given, path=path) for path in PATHS}
        exact = clipped_rows(net.double(), Transform(bound), examples.double(), labels).sum(0)
        for (path, on_cpu), found in sums.items():
            vector = torch.cat([each.flatten() for each in found]).double()
            is_allowance = path in ("gram", "product") and dtype == torch.float32  # for rounding
            lost, most = norm_of([vector - exact]), 1e-4 if is_allowance else tolerance
            assert lost <= most * norm_of([exact]), (path, dtype, on_cpu)


class InPlace(nn.Module):
    """Convolutions and normalisation whose outputs are changed in place, partly run again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(2, 6), nn.ConvTranspose2d(6, 4, 2)
        self.again = nn.InstanceNorm2d(6, affine=True)

    def part(self, images: torch.Tensor) -> torch.Tensor:
        return self.again(self.second(images)).relu_()  # type: ignore[no-any-return]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.first(images))
        found += 1.0
        found[:, 0] *= 2.0
        found = checkpoint(self.part, found.relu_(), use_reentrant=False)
        found = self.last(found)
        found *= 3.0
        return found.tanh().mean((2, 3))  # type: ignore[no-any-return]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_layers_may_be_changed_in_place_run_again_and_in_any_memory_format(
    memory_format: torch.memory_format,
) -> None:
    torch.manual_seed(1)
    net = InPlace().double().to(memory_format=memory_format)  # type: ignore[call-overload]
    examples = torch.randn(COUNT, 3, 6, 5).double().to(memory_format=memory_format)
    labels = torch.arange(COUNT) % 4
    exact = clipped_rows(net, Transform(0.1), examples, labels).sum(0)
    for path in PATHS:
        found = clipped_sum(net, examples, labels, cross_entropy, 0.1, path=path)
        vector = torch.cat([each.flatten() for each in found])
        torch.testing.assert_close(vector, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", [each for each in LAYERS if "norm" not in each])
def test_a_gradient_is_rounded_alike_at_each_place_among_any_number_of_examples(name: str) -> None:
    torch.manual_seed(1)
    make, shape = LAYERS[name]
    layer: Any = make()
    inputs = torch.randn(17, *shape)
    gradient = torch.randn_like(layer(inputs))

    def rows(of: slice, path: str) -> torch.Tensor:
        found: Any = convolution_gradients(layer, inputs[of], gradient[of], path)[layer.weight]
        if path == "held":
            return found.gradients  # type: ignore[no-any-return]
        return found.dense(slice(0, found.example_count), slice(0, len(layer.weight)))  # type: ignore[no-any-return]

    for path in ("held", "product"):
        whole = rows(slice(0, 17), path)
        for first, last in ((16, 17), (0, 2), (5, 8), (0, 16), (1, 17)):
            found = rows(slice(first, last), path)
            assert torch.equal(found, whole[first:last]), (path, first, last)


@pytest.mark.parametrize("name", ["large weight", "groups", "depthwise, wide", "one position"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_example_that_is_not_finite_changes_no_other_one(name: str, value: float) -> None:
    """Also where all examples are computed by one convolution."""
    torch.manual_seed(1)
    make, shape = LAYERS[name]
    layer: Any = make()
    inputs = torch.randn(COUNT, *shape)
    gradient = torch.randn_like(layer(inputs))
    for path in (*PATHS, "default"):
        kept = torch.arange(COUNT) != 1
        plain = convolution_gradients(layer, inputs, gradient, path)
        wild, of = inputs.clone(), gradient.clone()
        wild[1], of[1] = value, value
        found = convolution_gradients(layer, wild, of, path)
        for parameter, each in found.items():
            norms, wanted = each.squared_norms(1.0), plain[parameter].squared_norms(1.0)
            assert torch.equal(norms[kept], wanted[kept])
            assert not norms[1].isfinite()
            total = torch.empty_like(parameter, dtype=torch.float64)
            of_plain = torch.empty_like(total)
            weights, rows = torch.ones(COUNT - 1), slice(0, len(parameter))
            each.select(kept).weighted_sum(rows, weights, COUNT, total)
            plain[parameter].select(kept).weighted_sum(rows, weights, COUNT, of_plain)
            assert torch.equal(total, of_plain)


@pytest.mark.parametrize("make", [lambda: nn.Conv1d(1, 1, 3, padding=1), lambda: nn.LayerNorm(5)])
def test_a_layer_is_clipped_whose_input_is_a_leaf_made_on_the_way(make: Make) -> None:
    """No gradient of an earlier layer passes through what it is given."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = make(), nn.Linear(5, 4)

        def forward(self, examples: torch.Tensor) -> torch.Tensor:
            again = examples.detach().clone().requires_grad_()
            found: torch.Tensor = self.last((self.layer(again) + self.layer(examples))[:, 0])
            return found

    torch.manual_seed(1)
    net, examples, labels = Forces(), torch.randn(COUNT, 1, 5), torch.arange(COUNT) % 4
    found = clipped_sum(net, examples, labels, cross_entropy, 0.3)
    wanted = clipped_rows(net, Transform(0.3), examples, labels).sum(0)
    torch.testing.assert_close(torch.cat([each.flatten() for each in found]), wanted)


def test_without_channels_there_is_no_gradient() -> None:
    kernel = Kernel(torch.Size([4, 0, 3, 3]), (1, 1), (0, 0), (1, 1), 1)
    products = ConvolutionProducts(torch.ones(2, 0, 5, 5), torch.ones(2, 4, 3, 3), kernel)
    assert products.hold().gradients.shape == (2, 4, 0, 3, 3)
    assert products.dense(slice(0, 1), slice(1, 3)).shape == (1, 2, 0, 3, 3)
    products.weighted_sum(slice(0, 4), torch.ones(2), 2, torch.empty(4, 0, 3, 3).double())


# --- which way is taken

WAYS = {  # shape of the weight, stride, padding, groups, image, and the way that was fastest
    "few channels": ((64, 16, 3, 3), 1, 1, 1, 32, "held"),
    "depthwise": ((96, 1, 7, 7), 1, 3, 96, 8, "held"),
    "depthwise, one pixel": ((384, 1, 7, 7), 1, 3, 384, 1, "held"),
    "128 channels": ((128, 128, 3, 3), 1, 1, 1, 16, "held"),
    "many channels": ((256, 256, 3, 3), 1, 1, 1, 8, "pixels"),
    "one pixel": ((512, 512, 3, 3), 1, 1, 1, 1, "pixels"),
    "strided": ((256, 128, 3, 3), 2, 1, 1, 16, "patches"),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_cheapest_way_is_taken(name: str) -> None:
    shape, stride, padding, groups, image, way = WAYS[name]
    kernel = Kernel(torch.Size(shape), (stride,) * 2, (padding,) * 2, (1, 1), groups)
    count = (image + 2 * padding - shape[2]) // stride + 1
    costs = vars_of(estimate_costs(kernel, (image, image), (count, count), True))
    assert min(costs, key=lambda each: costs[each]) == way


def vars_of(costs: Any) -> dict[str, float]:
    """Return the costs by the names of their ways."""
    return {each: getattr(costs, each) for each in ("held", "product", "pixels", "patches")}


def test_held_gradients_take_little_memory() -> None:
    """Not more than four times image and map; others are kept as these."""
    torch.manual_seed(1)
    for layer, shape in ((nn.Conv2d(8, 8, 3), (8, 9, 9)), (nn.Conv2d(64, 64, 3), (64, 3, 3))):
        inputs = torch.randn(COUNT, *shape)
        gradient = torch.randn_like(layer(inputs))
        found = convolution_gradients(layer, inputs, gradient)[layer.weight]
        is_small = layer.weight.numel() <= 4 * (inputs[0].numel() + gradient[0].numel())
        assert isinstance(found, MaterializedGradients if is_small else ConvolutionProducts)
        assert found.element_count <= 4 * (inputs.numel() + gradient.numel())


def test_convolutions_that_may_round_to_half_precision_are_products_of_matrices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The norm allows for the rounding of single precision only."""
    torch.manual_seed(1)
    layer, inputs = nn.Conv2d(3, 4, 3), torch.randn(COUNT, 3, 5, 5)
    gradient = torch.randn_like(layer(inputs))
    monkeypatch.setattr(Kernel, "weight_gradient", None)
    setting: Any = torch.backends.mkldnn.conv  # type: ignore[attr-defined]
    before, setting.fp32_precision = setting.fp32_precision, "bf16"
    try:
        found = convolution_gradients(layer, inputs, gradient, "product")[layer.weight]
        total = torch.empty_like(layer.weight, dtype=torch.float64)
        found.weighted_sum(slice(0, 4), torch.ones(COUNT), COUNT, total)
    finally:
        setting.fp32_precision = before
    wanted = torch.autograd.grad(layer.double()(inputs.double()), layer.weight, gradient.double())[
        0
    ]
    torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=1e-5)
