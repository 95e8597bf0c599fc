"""The clipping bound holds in floating point: rounding, underflow and extreme magnitudes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partialmethod
from itertools import product

import pytest
import torch
from torch import nn

from tests.support.accelerator_counts import no_cpu
from tests.support.small_models import clipped_norm, sum_clipped
from training_client.private_step import Clipper, Transform
from training_client.private_step.blocks import cut_into_blocks
from training_client.private_step.gradients import gradient_factors
from training_client.private_step.gradients.sequence_products import SequenceProducts
from training_client.private_step.gradients.summed_gradients import SummedGradients
from training_client.private_step.kernels.elementwise import AffineMap
from training_client.private_step.layers.layer_uses import EnginePath
from training_client.private_step.layers.model_checks import CheckedModel
from training_client.private_step.rounding_bounds import rounding_error, sequence_rounding


@contextmanager
def flushed(flush: bool) -> Iterator[None]:
    """Flush subnormal numbers to 0, or do not, inside of a block."""
    torch.set_flush_denormal(flush)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


Attack = tuple[nn.Linear, torch.Tensor, torch.Tensor, Transform]


def huge_gradients() -> Iterator[Attack]:
    """Yield examples whose weight would be so small that it lost digits: they count as 0."""
    torch.manual_seed(0)
    for size, scaled in product((1e17, 1e19, 1e21, 1e22, 2e38), (False, True)):
        scales = [1e3 * torch.rand(3, 5) + 1e-3]
        by = Transform.fixed(1.0, scales) if scaled else Transform(1.0)
        inputs = size * torch.rand(1, 5)
        for height in (1e-30, 1e-3, 1.0, size):
            yield nn.Linear(5, 3, bias=False), inputs, height * torch.rand(1, 3), by


def values_rounded_up() -> Iterator[Attack]:
    """Yield numbers that may be rounded up to twice their value, and D makes them large again."""
    for bias, scale, bound, size, of in (
        (False, 1e18, 1e-9, 1e18, 1.6e-24),
        (False, 1.8e19, 2e-8, 1e18, 1.6e-24),
        (True, 1e38, 1e-7, 0.0, 1.6e-30),
        (True, 1e30, 1e-15, 0.0, 1.6e-30),
    ):
        layer = nn.Linear(1, 1, bias=bias)
        scales = [torch.full_like(each, scale) for each in layer.parameters()]
        if bias:
            scales[0].fill_(1e-10)
        by = Transform.fixed(bound, scales)
        for times in (0.5, 1.0, 1.3, 2.0, 7.0):
            yield layer, torch.full((1, 1), size), torch.full((1, 1), times * of), by


def weighted_inputs_of_two_digits() -> Iterator[Attack]:
    """Yield a weighted input of 1e-43, which has two digits, and a large gradient."""
    inputs, of = torch.full((1, 1), 1e-20), torch.full((1, 2), 1e16)
    for times, bound in product((1.0, 1.3, 2.0, 3.1, 7.0), (1.1e-27, 1.7e-27, 2.3e-26)):
        yield nn.Linear(1, 2, bias=False), inputs, of, Transform(times * bound)


def squares_that_underflow() -> Iterator[Attack]:
    """Yield output gradients of 1e-23, whose squares underflow, and inputs as large."""
    layer, of = nn.Linear(2, 1000, bias=False), torch.full((1, 1000), 1e-23)
    for bound, scale, size in product((1e-6, 1.0), (None, 1e6, 1e8, 1e18), (1e15, 1e18)):
        by = Transform(bound)
        if scale is not None:
            by = Transform.fixed(bound, [torch.full_like(layer.weight, scale)])
        yield layer, torch.full((1, 2), size), of, by


def large_scale_on_a_tiny_input() -> Iterator[Attack]:
    """Yield an input whose square underflows next to the other's, which its scale outweighs."""
    layer, inputs = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 1e-24]])
    for shifted, size in product((False, True), (1e3, 1e17)):
        shifts = [torch.full((1, 2), 1e-30)] if shifted else None
        by = Transform.fixed(1e-3, [torch.tensor([[1e-5, 1e22]])], shifts)
        yield layer, inputs, torch.full((1, 1), size), by


def input_whose_share_underflows() -> Iterator[Attack]:
    """Yield an input whose share of ‖a‖² underflows: the sum was once 1e14 bounds long."""
    layer = nn.Linear(2, 1, bias=False)
    for scale, share in product((1e15, 1e18, 1.8e19), (1e-18, 1e-19, 2e-20, 1e-21, 1e-24)):
        by = Transform.fixed(1e-3, [torch.tensor([[1e-19, scale]])])
        for size in (1e-6, 1.0, 1e6, 1e12):
            yield layer, torch.tensor([[1.0, share]]), torch.full((1, 1), size), by


def shift_that_cancels() -> Iterator[Attack]:
    """Yield ∇ + b of almost 0, where w∇ underflows and w·b does not: once 180 times the bound."""
    of = torch.tensor([[1e18]])
    for size, bound in ((2.2e-38, 5.9e-3), (1.1e-37, 1.2e-3), (1e-34, 5.5e-5), (1e-36, 1e-12)):
        values = torch.tensor([[size]])
        by = Transform.fixed(bound, [torch.full((1, 1), 1e18)], [-values * of])
        yield nn.Linear(1, 1, bias=False), values, of, by
    of = torch.full((1, 1), 1.3e-38)
    scales, shifts = [torch.ones(1, 1), torch.full((1,), 1e18)], [torch.zeros(1, 1), -of[0]]
    yield nn.Linear(1, 1), torch.zeros(1, 1), of, Transform.fixed(1.8e-23, scales, shifts)


def small_squares_after_a_large_one() -> Iterator[Attack]:
    """Yield squares of which each may be lost to rounding in a long sum."""
    for outputs, shifted, share in product((1000, 100_000), (False, True), (0.3, 0.49, 0.9)):
        layer = nn.Linear(4, outputs, bias=False)
        of = torch.full((1, outputs), math.sqrt(share * 2.0**-24))
        of[0, 0] = 1.0
        shifts = [torch.zeros_like(layer.weight)] if shifted else None
        by = Transform.fixed(1.0, [torch.ones_like(layer.weight)], shifts)
        yield layer, torch.ones(1, 4), of, by


ATTACKS = [
    huge_gradients, values_rounded_up, weighted_inputs_of_two_digits, squares_that_underflow,
    large_scale_on_a_tiny_input, input_whose_share_underflows, shift_that_cancels,
    small_squares_after_a_large_one,
]  # fmt: skip


@pytest.mark.spread(first=3, second=6)
@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda each: each.__name__)
def test_values_made_to_exceed_the_bound_keep_it(
    attack: Callable[[], Iterator[Attack]], flush: bool
) -> None:
    with flushed(flush):
        for layer, inputs, of, by in attack():
            assert clipped_norm(layer, inputs, of, by) <= by.bound, (inputs, of[0, 0], by.bound)


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
def test_a_bound_at_which_sums_may_underflow_or_overflow_is_refused(
    kind: torch.dtype, bound: float, rows: int
) -> None:
    """The refusal does not depend on the batch, which is private."""
    layer = nn.Linear(2, 2, dtype=kind)
    examples, of = torch.ones(rows, 2, dtype=kind), torch.ones(rows, 2, dtype=kind)
    with pytest.raises(
        ValueError, match=r"expected a clipping bound from .* underflow or overflow"
    ):
        clipped_norm(layer, examples, of, Transform(bound))


def force_sparse_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use sparse factors for all inputs in single precision, even narrow ones with few zeros."""
    # private: narrow inputs are multiplied with their zeros, as that is faster
    for name in ("_SPARSE_WIDTH_MIN", "_SPARSE_COLUMNS_MIN"):
        monkeypatch.setattr(gradient_factors, name, 0)
    monkeypatch.setattr(Clipper, "__init__", partialmethod(Clipper.__init__, sparse_inputs=True))


def draw_attack(draw: random.Random) -> tuple[nn.Linear, torch.Tensor, torch.Tensor, Transform]:
    """Draw a small layer, an input, a gradient, D, b and a bound, of any magnitude."""
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


@pytest.mark.spread(second=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "flush"),
    [
        ("compiled", False), ("compiled", True), ("accelerated", True), ("sparse", False),
        ("damped", True), ("damped, accelerated", False),
    ],
)  # fmt: skip
def test_values_of_random_magnitude_keep_the_bound(
    how: str, flush: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of 1000 random cases exceed it if small squares next to large ones are lost."""
    # private: checks of the model, which are tested elsewhere, take as long as all the rest
    monkeypatch.setattr(CheckedModel, "_run_proved", CheckedModel._pass)
    if how == "sparse":
        force_sparse_factors(monkeypatch)
    draw = random.Random(11)
    with flushed(flush), no_cpu(pretend="accelerated" in how):
        for _ in range(1000):
            layer, inputs, of, by = draw_attack(draw)
            if "damped" in how:
                by = replace(by, damping=10 ** draw.uniform(-20, 20))
            assert clipped_norm(layer, inputs, of, by) <= by.bound, (inputs, of)


@pytest.mark.parametrize("accelerated", [False, True])
def test_damped_squares_that_underflow_or_overflow_keep_the_bound(accelerated: bool) -> None:
    layer, one = nn.Linear(2, 1, bias=False), torch.ones(1, 1)
    for size, bound in ((1e-25, 1e-28), (1e25, 1e20)):
        by = Transform.fixed(bound, [torch.ones(1, 2)], [torch.full((1, 2), size)], damping=1e-35)
        with no_cpu(pretend=accelerated):
            norm = clipped_norm(layer, torch.full((1, 2), size), one, by)
        assert 0.99 * bound < norm <= bound


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_values_that_underflow_keep_the_bound(
    sparse: bool, flush: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Underflow of squares, small weights or shifts: each of these once exceeded the bound."""
    if sparse:
        force_sparse_factors(monkeypatch)
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
    with flushed(flush):
        for kind, bound, inputs, of, scale, shift in attacks:
            layer = nn.Linear(len(inputs), len(of), bias=False, dtype=kind)
            shifts = None if shift is None else [torch.tensor(shift, dtype=kind)]
            by = Transform(bound)
            if scale is not None:
                by = Transform.fixed(bound, [torch.tensor(scale, dtype=kind)], shifts)
            values = torch.tensor([inputs], dtype=kind), torch.tensor([of], dtype=kind)
            assert clipped_norm(layer, *values, by) <= bound, (kind, bound, inputs[0])


def draw_sequence_attack(
    draw: random.Random,
) -> tuple[nn.Linear, torch.Tensor, torch.Tensor, Transform]:
    """Draw a layer, a sequence and its gradients, D, b and a bound; often the terms cancel."""
    kind = draw.choice([torch.float32, torch.float64])
    tiny, most = torch.finfo(kind).tiny, torch.finfo(kind).max
    width = draw.choice([1.0, 3.0, 10.0, 20.0, math.log10(most)])
    positions = draw.choice([1, 2, 3, 8, 40])
    layer = nn.Linear(draw.randint(1, 3), draw.randint(1, 3), bias=draw.random() < 0.4, dtype=kind)

    def numbers(*shape: int, positive: bool = False) -> torch.Tensor:
        found = torch.tensor(
            [10 ** draw.uniform(-width, width) for _ in range(math.prod(shape))],
            dtype=torch.float64,
        ).clamp(tiny, most)
        if not positive:
            found *= torch.tensor([draw.choice([-1, 1, 1, 0]) for _ in found])
        return found.to(kind).view(shape)

    inputs = numbers(1, positions, layer.in_features)
    of = numbers(1, positions, layer.out_features)
    if positions > 1 and draw.random() < 0.5:
        even = positions - positions % 2
        inputs[:, 1:even:2] = inputs[:, 0:even:2]
        of[:, 1:even:2] = -of[:, 0:even:2] * (1 + draw.choice([0.0, 1e-7, 1e-5, 1e-3]))
    bound = 10 ** draw.uniform(max(-width / 2, -130), min(width / 2, 25))
    if draw.random() < 0.4:
        return layer, inputs, of, Transform(bound)
    gradient = torch.einsum("to,ti->oi", of[0].double(), inputs[0].double()).to(kind)
    gradients = [gradient, of[0].sum(0)][: 1 + (layer.bias is not None)]
    scales = [numbers(*each.shape, positive=True) for each in gradients]
    if draw.random() < 0.5:  # what is small is made large again
        scales = [(draw.uniform(0.01, 100) / each.abs()).clamp(tiny, most) for each in gradients]
    shifts = None
    if draw.random() < 0.5:
        shifts = [
            -each.nan_to_num(0, 1, -1) if draw.random() < 0.5 else numbers(*each.shape)
            for each in gradients
        ]
    by = Transform.fixed(bound, scales, shifts)
    return (
        layer,
        inputs,
        of,
        replace(by, damping=draw.choice([0.0, 0.0, 10 ** draw.uniform(-20, 20)])),
    )


@pytest.mark.parametrize(
    ("path", "flush", "cases"),
    [
        (None, False, 60),
        *(
            pytest.param(*each, 300, marks=pytest.mark.slow)
            for each in ((None, True), ("gram", False), ("product", True))
        ),
        *(
            pytest.param(path, flush, 3000, marks=pytest.mark.nightly)
            for path in (None, "gram", "product")
            for flush in (False, True)
        ),
    ],
)
def test_sequences_of_random_magnitude_keep_the_bound(
    path: EnginePath | None, flush: bool, cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terms that cancel round by far more than their sum; about a third is clipped to the bound."""
    # private: checks of the model, which are tested elsewhere, take as long as all the rest
    monkeypatch.setattr(CheckedModel, "_run_proved", CheckedModel._pass)
    draw, longest = random.Random(13), 0
    with flushed(flush):
        for _ in range(cases):
            layer, inputs, of, by = draw_sequence_attack(draw)
            sums, _ = sum_clipped(
                Clipper(layer, path=path), inputs, of, lambda p, g: (p * g).flatten(1).sum(1), by
            )
            norm = math.sqrt(sum(float(each.double().square().sum()) for each in sums))
            assert norm <= by.bound, (inputs, of)
            longest += norm > 0.99 * by.bound
        assert longest > cases / 5


@pytest.mark.spread(first=2, second=4)
@pytest.mark.parametrize("path", [None, "gram", "product", "held"])
@pytest.mark.parametrize("positions", [2, 64, 1000])
def test_a_sequence_whose_terms_cancel_keeps_the_bound(
    positions: int, path: EnginePath | None
) -> None:
    """The terms are millions of times as long as their sum."""
    generator = torch.Generator().manual_seed(positions)
    layer = nn.Linear(9, 7, bias=False)
    for share in (0.0, 1e-7, 1e-5, 1e-3):
        inputs = torch.randn(1, positions, 9, generator=generator)
        of = torch.randn(1, positions, 7, generator=generator)
        inputs[:, 1::2], of[:, 1::2] = inputs[:, ::2], -of[:, ::2] * (1 + share)
        for bound in (1e-6, 1e-3, 1.0):
            sums, _ = sum_clipped(
                Clipper(layer, path=path), inputs, of,
                lambda p, g: (p * g).flatten(1).sum(1), Transform(bound),
            )  # fmt: skip
            assert float(sums[0].double().norm()) <= bound


def draw_convolution_attack(
    draw: random.Random,
) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Transform]:
    """Draw a convolution, an image and its output's gradients, D, b and a bound."""
    kind, width = draw.choice([torch.float32, torch.float64]), draw.choice([1.0, 5.0, 15.0])
    groups = draw.choice([1, 1, 2])
    layer = nn.Conv2d(
        2 * groups, draw.randint(1, 2) * groups, (draw.randint(1, 3), draw.randint(1, 2)),
        draw.randint(1, 2), draw.randint(0, 2), groups=groups, bias=False, dtype=kind,
    )  # fmt: skip

    def numbers(shape: torch.Size, *, positive: bool = False) -> torch.Tensor:
        powers = [draw.uniform(-width, width) for _ in range(shape.numel())]
        signs = [1 if positive else draw.choice([-1, 0, 1, 1]) for _ in powers]
        found = [sign * 10**power for sign, power in zip(signs, powers, strict=True)]
        return torch.tensor(found, dtype=kind).view(shape)

    inputs = numbers(torch.Size([1, 2 * groups, draw.randint(3, 6), 3]))
    of = numbers(layer(inputs).shape)
    if draw.random() < 0.5:  # most terms cancel
        inputs = inputs[:, :, :1, :1].expand_as(inputs).clone()
        of[..., 1:] = -of[..., :-1] * (1 + draw.choice([0.0, 1e-7, 1e-4]))
    bound = 10 ** draw.uniform(-width, width)
    if draw.random() < 0.4:
        return layer, inputs, of, Transform(bound)
    shift = [numbers(layer.weight.shape)] if draw.random() < 0.5 else None
    by = Transform.fixed(bound, [numbers(layer.weight.shape, positive=True)], shift)
    return (
        layer,
        inputs,
        of,
        replace(by, damping=draw.choice([0.0, 0.0, 10 ** draw.uniform(-9, 9)])),
    )


@pytest.mark.parametrize(
    ("path", "on_cpu", "cases"),
    [
        (None, True, 30),
        ("gram", True, 30),
        ("product", False, 30),
        *(
            pytest.param(path, on_cpu, 1000, marks=pytest.mark.nightly)
            for path in (None, "gram", "product")
            for on_cpu in (True, False)
        ),
    ],
)
def test_convolutions_of_random_magnitude_keep_the_bound(
    path: EnginePath | None, on_cpu: bool, cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # private: checks of the model, which are tested elsewhere, take as long as all the rest
    monkeypatch.setattr(CheckedModel, "_run_proved", CheckedModel._pass)
    draw, longest = random.Random(17), 0
    with no_cpu(pretend=not on_cpu):
        for _ in range(cases):
            layer, inputs, of, by = draw_convolution_attack(draw)
            sums, _ = sum_clipped(
                Clipper(layer, path=path), inputs, of, lambda p, g: (p * g).flatten(1).sum(1), by
            )
            norm = math.sqrt(sum(float(each.double().square().sum()) for each in sums))
            assert norm <= by.bound, (layer, inputs, of)
            longest += norm > 0.99 * by.bound
    assert longest > cases / 5


@pytest.mark.spread(first=1, second=1)
@pytest.mark.parametrize("path", [None, "gram", "product", "held"])
def test_a_convolution_whose_terms_cancel_keeps_the_bound(path: EnginePath | None) -> None:
    """The image is two copies of one, and the output's gradients nearly cancel between them."""
    generator = torch.Generator().manual_seed(1)
    layer = nn.Conv1d(64, 65, 3, bias=False)
    for length, share in product((4, 500), (0.0, 1e-7, 1e-5, 1e-3)):
        half = torch.randn(1, 64, length, generator=generator)
        of = torch.randn(1, 65, length - 2, generator=generator)
        gap = torch.zeros(1, 65, 2)
        gradients = torch.cat([of, gap, -of * (1 + share)], 2)
        for bound in (1e-6, 1e-3, 1.0):
            sums, _ = sum_clipped(
                Clipper(layer, path=path), torch.cat([half, half], 2), gradients,
                lambda p, g: (p * g).flatten(1).sum(1), Transform(bound),
            )  # fmt: skip
            assert float(sums[0].double().norm()) <= bound


@pytest.mark.parametrize("uses", [2, 10, 40])
def test_what_underflows_in_all_uses_of_a_parameter_is_added_to_its_norm(uses: int) -> None:
    """As on a CPU that flushes denormal numbers to 0."""
    positions, least = 10, float(torch.finfo(torch.float32).tiny)
    factor = torch.full((1, positions, 2), 0.99 * math.sqrt(least))
    part = SequenceProducts(factor, factor, "product")
    unit = AffineMap(torch.ones(2, 2))
    (piece,) = cut_into_blocks([nn.Parameter(torch.empty(2, 2))])[0].pieces
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU keeps denormal numbers")
    try:
        found = SummedGradients((part,) * uses)
        norms = [found.squared_norms(1e-20), found.mapped_squared_norms([(piece, unit)], 1e-20)]
    finally:
        torch.set_flush_denormal(False)
    exact = 2 * uses * positions * 0.98 * least
    assert all(float(each.sqrt()) >= exact for each in norms)


@pytest.mark.slow
def test_an_embedding_of_random_magnitude_keeps_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    # private: checks of the model, which are tested elsewhere, take as long as all the rest
    monkeypatch.setattr(CheckedModel, "_run_proved", CheckedModel._pass)
    draw = random.Random(5)
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        layer, width = nn.Embedding(5, 3), draw.choice([1.0, 10.0, 20.0])
        tokens = torch.randint(0, 5, (1, 4), generator=generator)
        spread = torch.empty(1, 4, 3).uniform_(-width, width, generator=generator)
        of = (10.0**spread) * torch.randint(-1, 2, (1, 4, 3), generator=generator)
        scale = 10.0 ** torch.empty(5, 3).uniform_(-width / 2, width / 2, generator=generator)
        shift = 10.0 ** torch.empty(5, 3).uniform_(-width, width, generator=generator)
        bound = 10 ** draw.uniform(-width / 2, width / 2)
        for by in (
            Transform(bound),
            Transform.fixed(bound, [scale]),
            Transform.fixed(bound, [scale], [shift]),
            Transform.fixed(bound, [scale], [shift], damping=1e-3),
        ):
            sums, _ = sum_clipped(
                Clipper(layer), tokens, of, lambda p, g: (p * g).flatten(1).sum(1), by
            )
            assert float(sums[0].double().norm()) <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("terms", [0, 1, 300, 30_000, 1_000_000, 4_000_000])
def test_allowances_cover_products_of_roundings(dtype: torch.dtype, terms: int) -> None:
    """Also of very long sums, in exact arithmetic; of 64 roundings one pays for the allowance."""
    half_epsilon = Fraction(torch.finfo(dtype).eps) / 2
    of_sum = (terms + 63) * half_epsilon
    of_sum /= 1 - of_sum  # Higham, Lemma 3.1
    assert Fraction(rounding_error(dtype, terms)) * (1 - of_sum) >= 2 * of_sum
    terms = max(terms, 1)
    of_product = (terms + 16) * half_epsilon
    assert Fraction(sequence_rounding(dtype, terms)) >= of_product / (1 - of_product)


def test_sums_that_are_too_long_for_a_bound_count_as_infinite() -> None:
    assert rounding_error(torch.float32, 1 << 23) == math.inf
    assert sequence_rounding(torch.float32, 1 << 24) == math.inf


@pytest.mark.slow
def test_norms_have_full_precision_wherever_the_targets_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a model on a GPU, under autocast there, and targets on the CPU without it."""
    is_enabled = torch.is_autocast_enabled
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda device: device != "meta" and is_enabled(device)
    )
    torch.manual_seed(0)
    worst = 0.0
    for _ in range(50):
        layer = nn.Linear(9, 7, bias=False)
        transform = Transform.fixed(1.0, [0.3 + 3 * torch.rand(7, 9)], [torch.randn(7, 9)])
        heights = torch.randn(1, 7)
        clipper = Clipper(layer)
        with torch.autocast("cpu", torch.bfloat16):
            found = clipper.clip(
                torch.randn(1, 9),
                torch.zeros(1, device="meta"),
                lambda outputs, _, heights=heights: (outputs.float() * heights).sum(1),
                transform,
            )
            total = clipper.zeros()
            for block in clipper.blocks:
                found.write_block(block, transform.for_block(block), block.view_in(total))
        worst = max(worst, float(total.double().norm()))
    assert 0.9 < worst <= 1.0
