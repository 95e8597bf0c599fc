"""Clipped sums equal weighted sums of per-example gradients, also compiled and under autocast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numba
import pytest
import torch
from torch import nn

from tests.support.small_models import (
    TokenClassifier,
    batch,
    clipped_norm,
    model,
    per_example,
    sum_clipped,
    unbudgeted,
)
from training_client.integrations.patches import tune_process
from training_client.lab.models import cross_entropy
from training_client.optimizers import make_optimizer
from training_client.plan import Plan
from training_client.private_step import Clipper, Transform
from training_client.private_step.kernels import per_coordinate_sums
from training_client.private_step.kernels.per_coordinate_sums import clamp_in_place, clamped_sum


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 1e9])
def test_clipped_sums_equal_the_per_example_oracle(bias: bool, clip_norm: float) -> None:
    net, (examples, labels) = model(bias=bias), batch()
    sums, mean_loss = sum_clipped(
        Clipper(net), examples, labels, cross_entropy, Transform(clip_norm)
    )
    gradients = per_example(net, examples, labels)
    norms = torch.sqrt(sum(g.flatten(1).square().sum(1) for g in gradients))  # type: ignore[arg-type]
    weights = (clip_norm * (1 - 1e-7) / norms).clamp_max(1.0)  # a little below C, on purpose
    for found, gradient in zip(sums, gradients, strict=True):
        exact = torch.einsum("b,b...->...", weights, gradient)
        assert torch.allclose(found, exact, rtol=1e-9, atol=1e-12)
    expected = cross_entropy(net(examples), labels).mean().detach()
    assert mean_loss == pytest.approx(float(expected))


def compile_with_dynamo(net: nn.Module) -> tuple[nn.Module, list[torch.fx.GraphModule]]:
    """Compile with Dynamo only, and run the traced graph: Inductor needs a compiler and rounds."""
    traced = []

    def as_traced(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        traced.append(graph)
        return graph.forward

    torch.compiler.reset()
    found = torch.compile(net, backend=as_traced)
    assert isinstance(found, nn.Module)
    return found, traced


TRACING = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by Dynamo itself


@pytest.mark.slow
@TRACING
def test_a_compiled_model_has_the_clipped_sums_of_the_plain_model() -> None:
    net = model()
    fast, traced = compile_with_dynamo(net)
    clipper, plain = Clipper(fast), Clipper(net)
    for size in (32, 32, 7, 1, 32):  # the third and the last are not probed
        examples, labels = batch(size)
        for by in (Transform(1.0), Transform(1e9)):
            found, loss = sum_clipped(clipper, examples, labels, cross_entropy, by)
            wanted, of_plain = sum_clipped(plain, examples, labels, cross_entropy, by)
            assert loss == pytest.approx(of_plain, rel=1e-12)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        fast(examples)  # between two steps, as a score does
    assert traced


@pytest.mark.slow
@TRACING
def test_a_model_compiled_and_used_before_clipping_is_clipped_as_if_it_were_not() -> None:
    """Dynamo must not run the graph that it traced before there were hooks."""
    net = model()
    fast, _ = compile_with_dynamo(net)
    fast(batch()[0])
    found, _ = sum_clipped(Clipper(fast), *batch(), cross_entropy, Transform(1.0))
    wanted, _ = sum_clipped(Clipper(net), *batch(), cross_entropy, Transform(1.0))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_without_noise_and_clipping_dp_sgd_equals_sgd() -> None:
    private, plain = model(), model()
    examples, labels = batch()
    plan = Plan(dataset_size=64, sample_rate=0.5, clip_norm=1e12, noise_multiplier=1e-30)
    optimizer = make_optimizer("dp_sgd", private, unbudgeted(plan), learning_rate=0.3, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    for _ in range(5):
        optimizer.step(examples, labels, cross_entropy)
        reference.zero_grad()
        (cross_entropy(plain(examples), labels).sum() / 32).backward()
        reference.step()
    for a, b in zip(private.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


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


def test_the_padding_of_an_embedding_has_no_gradient() -> None:
    net, (_, labels) = TokenClassifier(expanded=True).double(), batch()
    examples = torch.randint(0, 9, (32, 6), generator=torch.Generator().manual_seed(1))
    assert bool((examples == 0).any())
    for clip_norm in (0.1, 1e9):
        sums, _ = sum_clipped(Clipper(net), examples, labels, cross_entropy, Transform(clip_norm))
        each = per_example(net, examples, labels)
        norms = torch.sqrt(sum(g.flatten(1).square().sum(1) for g in each))  # type: ignore[arg-type]
        weights = (clip_norm * (1 - 1e-7) / norms).clamp_max(1.0)
        for found, gradient in zip(sums, each, strict=True):
            exact = torch.einsum("b,b...->...", weights, gradient)
            assert torch.allclose(found, exact, rtol=1e-9, atol=1e-12)
        assert not bool(sums[0][0].any())


def test_clipping_is_in_full_precision_whatever_the_model_uses() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        seen = []
        clipper = Clipper(model().float())
        weights = clipper._clip_weights
        clipper._clip_weights = lambda *of: (  # type: ignore[method-assign]
            seen.append(torch.get_float32_matmul_precision()), weights(*of)
        )[1]  # fmt: skip
        examples, labels = batch()
        sum_clipped(clipper, examples.float(), labels, cross_entropy, Transform(1.0))
        assert seen == ["highest"]
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


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
    by = Transform.fixed(1e3, [scale])
    sums, _ = sum_clipped(Clipper(layer), inputs, of, lambda p, g: (p * g).sum(1), by)
    torch.testing.assert_close(sums[0], of.T @ inputs, rtol=1e-4, atol=1e-4)


def test_a_channels_last_model_has_the_same_clipped_sums() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 4))
    examples, labels = torch.randn(5, 2, 6, 6), torch.arange(5) % 4
    wanted, _ = sum_clipped(Clipper(net), examples, labels, cross_entropy, Transform(1.0))
    turned = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found, _ = sum_clipped(Clipper(turned), examples, labels, cross_entropy, Transform(1.0))
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other)


def test_channels_last_convolutions_have_the_gradients_of_autograd() -> None:
    """The first layer's output is channels-last, which Opacus' sampler for the second misreads."""
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Flatten())
    net = net.append(nn.Linear(16, 4)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    examples, labels = torch.randn(5, 2, 6, 6), torch.arange(5) % 4
    for inputs in (examples, examples.to(memory_format=torch.channels_last)):
        sums, _ = sum_clipped(Clipper(net), inputs, labels, cross_entropy, Transform(1e6))
        loss = cross_entropy(net(inputs), labels).sum()
        for one, other in zip(sums, torch.autograd.grad(loss, net.parameters()), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_model_under_autocast_is_clipped_in_full_precision() -> None:
    net, (examples, labels) = model().float(), batch()
    for at in range(8):
        one = slice(at, at + 1)
        with torch.autocast("cpu", torch.bfloat16):
            sums, _ = sum_clipped(
                Clipper(net),
                100 * examples[one].float(),
                labels[one],
                cross_entropy,
                Transform(0.5),
            )
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in sums))
        assert 0.4 < norm <= 0.5


def test_a_model_of_usual_size_passes_the_checks_under_autocast() -> None:
    """Layers then round to 8 bits, and the compared gradients differ by as much."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
    examples, labels = torch.rand(64, 784), torch.arange(64) % 10
    clipper = Clipper(net)
    for _ in range(2):  # both are probed
        with torch.autocast("cpu", torch.bfloat16):
            sums, _ = sum_clipped(clipper, examples, labels, cross_entropy, Transform(1e-3))
    assert all(each.dtype == torch.float32 for each in sums)
    exact, _ = sum_clipped(Clipper(net), examples, labels, cross_entropy, Transform(1e-3))
    for found, wanted in zip(sums, exact, strict=True):
        assert float((found - wanted).norm()) < 0.05 * float(wanted.norm())


def test_a_box_needs_a_bound_of_at_least_the_root_of_its_size() -> None:
    net, size = model(), sum(p.numel() for p in model().parameters())
    small = Transform.fixed(0.99 * math.sqrt(size), list(net.parameters()), box=True)
    with pytest.raises(ValueError, match=r"expected a bound .* for a box"):
        sum_clipped(Clipper(net), *batch(), cross_entropy, small)


def test_a_clamped_sum_keeps_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        clamped_sum(torch.ones(4, 3), torch.ones(4, 2), torch.ones(3, 2))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Share compiled loops out among two threads; tests have one otherwise."""
    per_coordinate_sums._compile_clamped_sum()  # it sets the number
    before = numba.get_num_threads()
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
    yield
    numba.set_num_threads(before)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_clamped_sum_counts_nan_as_zero(kind: torch.dtype, two_threads: None) -> None:
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(50, 9, generator=generator, dtype=kind)
    inputs = torch.randn(50, 7, generator=generator, dtype=kind)
    scale = torch.rand(9, 7, generator=generator, dtype=kind) + 0.1
    gradients[3, 2], gradients[4, 5] = math.nan, math.inf
    each = gradients[:, :, None] * inputs[:, None, :] * scale
    exact = torch.where(each.isnan(), 0.0, each.clamp(-1.0, 1.0)).sum(0)
    assert torch.allclose(clamped_sum(gradients, inputs, scale), exact, atol=1e-5)
    assert torch.allclose(clamp_in_place(each).sum(0), exact, atol=1e-5)


def test_flushing_of_subnormals_ends_with_training() -> None:
    """The service's bounds, computed in the same process, need numbers below 1e-38."""
    tiny = torch.full((1,), 1e-39)

    def interrupted() -> None:
        with tune_process():
            assert float(tiny * 1.0) == 0.0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert float(tiny * 1.0) > 0.0
