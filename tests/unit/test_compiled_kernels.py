"""Compiled loops beside PyTorch's operations, which an accelerator runs, and beside mpmath."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

from training_client.budget import NoBudget
from training_client.lab.models import cross_entropy
from training_client.optimizers import make_optimizer
from training_client.plan import Plan
from training_client.private_step.gradients import example_gradients
from training_client.private_step.kernels import elementwise, row_sums
from training_client.private_step.kernels.compiled import compile_and_keep, compile_loop
from training_client.private_step.kernels.per_coordinate_sums import clamp_in_place, clamped_sum

KINDS = [torch.float32, torch.float64]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Run a function twice: with compiled kernels and with PyTorch's operations."""

    def run(function: Callable[..., Any], *given: Any, **more: Any) -> tuple[Any, Any]:
        found = function(*given, **more)
        with monkeypatch.context() as patch:
            for module in (row_sums, elementwise, example_gradients):
                patch.setattr(module, "is_on_cpu", lambda _: False)
            return found, function(*given, **more)

    return run


def table(kind: torch.dtype, *shape: int, size: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return size * torch.randn(*shape, generator=generator, dtype=kind)


def agree(pair: tuple[Any, Any], kind: torch.dtype) -> None:
    compiled, plain = pair
    if not isinstance(compiled, tuple):
        compiled, plain = (compiled,), (plain,)
    for one, other in zip(compiled, plain, strict=True):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        assert one.dtype == other.dtype
        tolerance = 1e-6 if kind == torch.float32 else 1e-13
        torch.testing.assert_close(one, other, rtol=tolerance, atol=1e-40, equal_nan=True)


def are_upper_bounds(
    pair: tuple[torch.Tensor, torch.Tensor], kind: torch.dtype, most: float
) -> None:
    """Compare exact sums with those of an accelerator, which rounds single precision up.

    They may be larger by the share `most`; see `tests/unit/test_row_sums.py`.
    """
    exact, plain = pair
    assert exact.isfinite().equal(plain.isfinite())
    excess = (plain - exact).nan_to_num()
    most = most if kind == torch.float32 else 1e-13
    assert bool((excess >= -1e-13 * exact.nan_to_num()).all())
    assert bool((excess <= most * exact.nan_to_num() + 1e-140).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_sums_along_rows_agree(
    both: Callable[..., tuple[Any, Any]], kind: torch.dtype, size: float
) -> None:
    values, others = table(kind, 7, 33, size=size), table(kind, 7, 50)
    values[2] = 0.0
    values[3, 4] = torch.nan
    values[4, 5] = torch.inf
    scale, shift = table(kind, 1, 33), table(kind, 1, 33)
    for rows in (values, values.T):  # the second is not in the order of memory
        are_upper_bounds(both(row_sums.squared_norms, rows), kind, 8e-6)
    are_upper_bounds(both(row_sums.mapped_squared_norms, values, scale, shift), kind, 9e-6)
    are_upper_bounds(both(row_sums.mapped_squared_norms, values, scale), kind, 9e-6)
    (unit, norms), (other_unit, other_norms) = both(row_sums.normalized_squares, values)
    are_upper_bounds((norms, other_norms), kind, 8e-6)
    agree((unit * norms[:, None], other_unit * other_norms[:, None]), kind)
    clean = values.nan_to_num(0.0, 0.0, 0.0)
    for squared in (False, True):

        def added(squared: bool = squared) -> torch.Tensor:
            total = torch.full((len(clean),), size, dtype=torch.float64)
            row_sums.add_row_dots(clean, others, total, 17, squared=squared)
            return total

        found, plain = both(added)
        terms = (clean * others[:, 17:].double() ** (2 if squared else 1)).abs().sum(1)
        share = 8e-6 if kind == torch.float32 else 1e-12
        assert bool((plain - found >= -1e-12 * (terms + size)).all())
        assert bool((plain - found <= share * terms + 1e-12 * size).all())
        assert bool((found != size).any())


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_squares_of_unit_rows_are_rounded_up(
    both: Callable[..., tuple[Any, Any]], kind: torch.dtype
) -> None:
    """Rounded to the next larger number; 0 stays 0, and NaN stays NaN.

    On an accelerator norms in single precision are rounded up, and entries divided by them.
    """
    tiny = torch.finfo(kind).tiny
    values = torch.tensor([[1.0, 1e-160, 0.0], [0.0, 0.0, 0.0], [torch.nan, 1.0, 0.0]]).to(kind)
    values[0, 1] = 1e-3 * tiny**0.5
    compiled, plain = both(row_sums.normalized_squares, values)
    assert (compiled[0][0, 0], compiled[1][0]) == (1.0, 1.0)
    assert 1 - 8e-6 < plain[0][0, 0] <= 1 <= plain[1][0] < 1 + 8e-6
    assert kind == torch.float32 or (plain[0][0, 0], plain[1][0]) == (1.0, 1.0)
    for squares, norms in (compiled, plain):
        assert squares[0].tolist()[1:] == [tiny, 0.0]
        assert norms[1] == 0.0
        assert squares[1].tolist() == [0.0] * 3
        assert bool(squares[2, 0].isnan())


def test_sums_along_rows_do_not_lose_what_single_precision_would() -> None:
    values = torch.tensor([[3e30, 4e30], [3e-30, 4e-30], [1.0, 1e-9]])
    exact = [mpmath.fsum(mpmath.mpf(float(v)) ** 2 for v in row) for row in values]
    for found, wanted in zip(row_sums.squared_norms(values).tolist(), exact, strict=True):
        assert found == pytest.approx(float(wanted), rel=1e-15)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-20, 1e-6, 1e6])
def test_elementwise_formulas_agree(
    both: Callable[..., tuple[Any, Any]], kind: torch.dtype, size: float
) -> None:
    squares = table(kind, 9, 40, size=size)  # half of them below 0
    squares[0] = 0.0
    mean, scale, shift = table(kind, 9, 40), table(kind, 9, 40).exp(), table(kind, 9, 40)
    agree(both(elementwise.inverse_square_roots, squares, 0.7, 1e-3), kind)
    agree(both(elementwise.inverse_square_roots, squares, least=1e-8), kind)
    agree(both(elementwise.gradient_moments, mean, scale, None, 0.0), kind)
    agree(both(elementwise.sum_square_roots, squares, 1e-8), kind)
    for found, plain in zip(
        *both(elementwise.gradient_moments, mean, scale, shift, 0.5), strict=True
    ):
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)  # for what cancels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shifted", [False, True])
def test_maps_agree_and_set_non_finite_values_to_zero(
    both: Callable[..., tuple[Any, Any]], kind: torch.dtype, shifted: bool
) -> None:
    scale, shift = table(kind, 9, 40).exp(), table(kind, 9, 40)
    weighted = (shift, torch.tensor(2.5, dtype=kind)) if shifted else None
    scale[1, 2], scale[2, 2] = torch.inf, torch.nan

    def mapped() -> torch.Tensor:
        total = table(kind, 9, 41)[:, :40].contiguous()
        total[3, 3], total[4, 4] = torch.inf, torch.nan
        elementwise.map_in_place(total, scale, weighted)
        return total

    compiled, plain = both(mapped)
    agree((compiled, plain), kind)
    assert bool(compiled.isfinite().all())
    assert compiled[[1, 2, 3, 4], [2, 2, 3, 4]].tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_inverse_roots_are_finite_and_positive(
    both: Callable[..., tuple[Any, Any]], kind: torch.dtype
) -> None:
    squares = torch.tensor([0.0, -1.0, -torch.inf, torch.inf, torch.nan, 1e37, 1e-37], dtype=kind)
    for pair in (
        both(elementwise.inverse_square_roots, squares, 2.0),
        both(elementwise.inverse_square_roots, squares, 2.0, 1e-3, 1e38),
    ):
        agree(pair, kind)
        assert bool((pair[0] > 0).all())
        assert bool(pair[0].isfinite().all())


def test_non_contiguous_tensors_are_read_correctly() -> None:
    """As the weights of a convolution in channels_last."""
    squares = table(torch.float64, 9, 40).square()
    turned = squares.T.contiguous().T
    assert torch.equal(
        elementwise.inverse_square_roots(turned), elementwise.inverse_square_roots(squares)
    )
    gradient, wanted = table(torch.float64, 9, 40), squares.clone()
    steps = [
        elementwise.rmsprop_update(gradient, mean_square, rate=0.1, epsilon=1e-8)
        for mean_square in (turned, wanted)
    ]
    torch.testing.assert_close(*steps)
    torch.testing.assert_close(turned, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_rmsprop_updates_agree(both: Callable[..., tuple[Any, Any]], kind: torch.dtype) -> None:
    def step() -> tuple[torch.Tensor, torch.Tensor]:
        square, gradient = table(kind, 8, 30).square(), table(kind, 8, 31)[:, :30].contiguous()
        return elementwise.rmsprop_update(gradient, square, rate=0.1, epsilon=1e-8), square

    agree(both(step), kind)


@pytest.mark.parametrize("name", ["dp_sgd", "adadp", "pi_adam", "adadps"])
def test_an_optimizer_is_the_same_without_compiled_loops(
    both: Callable[..., tuple[Any, Any]], name: str
) -> None:
    """As it runs on an accelerator; in double precision, for what noise does to roundings."""

    def train() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(12, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3)
        ).double()
        examples, labels = torch.rand(40, 12, dtype=torch.float64), torch.arange(40) % 3
        optimizer = make_optimizer(
            name,
            net,
            NoBudget(Plan(400, 0.1, 1.0, 0.1), 10**9, "it is a test"),
            public=(examples[:8], labels[:8]),
            generator=torch.Generator().manual_seed(1),
            **({"threshold": 0.0} if name == "adadp" else {}),
        )
        for _ in range(5):
            optimizer.step(examples, labels, cross_entropy)
        return tuple(p.detach().clone() for p in optimizer.parameters)

    compiled, plain = both(train)
    for one, other in zip(compiled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Share compiled loops out among two threads; tests have one otherwise."""
    import numba

    clamped_sum(torch.ones(4, 3), torch.ones(4, 2), torch.ones(3, 2))  # it sets the number
    before = numba.get_num_threads()
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
    yield
    numba.set_num_threads(before)


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_clamped_sum_counts_nan_as_zero(kind: torch.dtype, two_threads: None) -> None:
    gradients, inputs = table(kind, 50, 9), table(kind, 50, 7)
    scale = table(kind, 9, 7).abs() + 0.1
    gradients[3, 2], gradients[4, 5] = torch.nan, torch.inf
    each = gradients[:, :, None] * inputs[:, None, :] * scale
    exact = torch.where(each.isnan(), 0.0, each.clamp(-1.0, 1.0)).sum(0)
    before = torch.get_num_threads()
    assert torch.allclose(clamped_sum(gradients, inputs, scale), exact.double(), atol=1e-5)
    assert torch.get_num_threads() == before
    assert torch.allclose(clamp_in_place(each).sum(0), exact, atol=1e-5)


def test_a_compiled_loop_is_kept_for_the_next_process() -> None:
    for _ in range(2):
        loop: Any = compile_loop.__wrapped__(row_sums._squared_norms)
        loop(np.ones((2, 3)), np.empty(2))
    assert sum(loop.stats.cache_hits.values()) == 1


@pytest.mark.slow
def test_a_loop_runs_where_nothing_can_be_kept() -> None:
    """As in a container with a read-only file system: here there is no source file."""
    defined: dict[str, Any] = {}
    exec("def double(values, result):\n    result[:] = 2 * values", defined)
    result = np.empty(3)
    compile_and_keep(defined["double"])(np.arange(3.0), result)
    assert result.tolist() == [0.0, 2.0, 4.0]
