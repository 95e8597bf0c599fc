"""One record moves a computed sum by at most the sensitivity that the noise is made for.

The batches are made against the rounding of sums: many records half a unit in the last place away,
one huge record first, signs that alternate, and a running sum that a record lifts over a power of
two, where all others are rounded to multiples of another unit. Products in single precision are
tried in the library's order, and one after the other, which is the worst order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.accelerator_counts import no_cpu
from tests.support.small_models import unbudgeted
from training_client.lab.models import cross_entropy
from training_client.plan import Plan
from training_client.private_step import Clipper, Transform
from training_client.private_step.blocks import cut_into_blocks
from training_client.private_step.clipped_sum import ClippedSum
from training_client.private_step.gradients import chunked_gradients, example_gradients
from training_client.private_step.gradients.convolution_gradients import ConvolutionProducts, Kernel
from training_client.private_step.gradients.example_gradients import (
    ExampleGradients,
    MaterializedGradients,
    OuterProducts,
)
from training_client.private_step.gradients.sequence_products import SequenceProducts
from training_client.private_step.gradients.summed_gradients import SummedGradients
from training_client.private_step.gradients.token_gradients import TokenGradients
from training_client.private_step.kernels import matmul
from training_client.private_step.kernels.elementwise import AffineMap
from training_client.private_step.kernels.sparse import SparseFactor
from training_client.private_step.private_sum import PrivateSum
from training_client.private_step.rounding_bounds import (
    SHARE_MAX,
    require_precise_sum,
    rounding_error,
    single_precision_block,
    sum_share,
)
from training_client.testing import clipped_sum

ROWS, COLUMNS, POSITIONS = 2, 3, 3
EXPECTED = (1, 8, 60, 150, 600, 3000)  # numbers of records
ULP = 2.0**-24  # half a unit in the last place of 1


def straddle(count: int, period: int) -> np.ndarray:
    """Return numbers whose sum is just above a power of two, and just below it without the first.

    Then pairs follow that are rounded up above it, and down below: with u the unit below, 1.25u and
    −0.75u are 2u and 0 above, u and −u below. It begins again with each block of `period` numbers.
    """
    power = max(0, int(math.log2(max(2, period))) - 1)
    unit = 2.0 ** (power - 24)
    pairs = np.tile([1.25 * unit, -0.75 * unit], period)
    pattern = np.concatenate([np.ones(2**power), [0.5], pairs])[:period]
    return np.resize(pattern, count)


def draw_values(draw: np.random.Generator, count: int, period: int) -> torch.Tensor:
    """Draw one number in [−1, 1] for each record, against rounding in single precision."""
    kind = draw.integers(6)
    odd = 2 * draw.integers(0, 8, count) + 1
    if kind == 0:  # each is half a unit away from where the running sum can be
        values = 1 - odd * ULP * 2.0 ** draw.integers(0, 4)
    elif kind == 1:  # one huge record first, and then what is always rounded up, or down
        size = ULP * 2.0 ** draw.integers(0, 10) * (1 + draw.choice([-1, 1]) * 2.0**-20)
        values = np.full(count, size)
        values[0] = 1.0
    elif kind == 2:  # signs alternate around a running sum
        values = (1 - odd * ULP) * (-1.0) ** np.arange(count)
        values[: count // 3] = 1.0
    elif kind == 3:
        values = straddle(count, period)
    elif kind == 4:  # all alike
        values = np.full(count, 0.5 + draw.random() / 2)
    else:
        values = draw.uniform(-1, 1, count)
    return torch.from_numpy(values).float()


def outer(draw: np.random.Generator, values: torch.Tensor) -> OuterProducts:
    """Return outer products of the values."""
    gradients = values[:, None].repeat(1, ROWS)
    inputs = torch.ones(len(values), COLUMNS)
    if draw.random() < 0.5:
        inputs[:, 1] = torch.from_numpy(draw.uniform(-1, 1, len(values)))
    return OuterProducts(gradients, inputs)


class SparseProducts(OuterProducts):
    """Outer products whose narrow inputs are stored in compressed form too."""

    _input_factor = property(lambda self: SparseFactor.from_dense(self.inputs))  # type: ignore[assignment]


def sparse(draw: np.random.Generator, values: torch.Tensor) -> SparseProducts:
    """Return outer products with sparse inputs."""
    found = outer(draw, values)
    return SparseProducts(found.gradients, found.inputs)


def held(_: np.random.Generator, values: torch.Tensor) -> MaterializedGradients:
    """Return gradients that are held."""
    return MaterializedGradients(values[:, None, None].repeat(1, ROWS, COLUMNS))


def sequences(draw: np.random.Generator, values: torch.Tensor) -> SequenceProducts:
    """Return gradients whose terms cancel within each record, up to the value."""
    gradients = values[:, None, None].repeat(1, POSITIONS, ROWS)
    size = 2.0 ** draw.integers(0, 18)
    gradients[:, 1], gradients[:, 2] = size, -size
    return SequenceProducts(gradients, torch.ones(len(values), POSITIONS, COLUMNS))


def convolutions(draw: np.random.Generator, values: torch.Tensor) -> ConvolutionProducts:
    """Return gradients of a convolution with a stride, whose terms cancel as in a sequence."""
    maps = sequences(draw, values).gradients.mT.contiguous()
    kernel = Kernel(torch.Size((ROWS, COLUMNS, 1)), (2,), (0,), (1,), 1)
    return ConvolutionProducts(torch.ones(len(values), COLUMNS, 2 * POSITIONS), maps, kernel)


def tokens(_: np.random.Generator, values: torch.Tensor) -> TokenGradients:
    """Return gradients of an embedding table, of one token of each record."""
    which = torch.zeros(len(values), 1, dtype=torch.long)
    of_output = values[:, None, None].repeat(1, 1, COLUMNS)
    return TokenGradients.from_output_gradients(which, of_output, ROWS)


def parts(draw: np.random.Generator, values: torch.Tensor) -> SummedGradients:
    """Return gradients whose parts cancel, up to the value."""
    size = 2.0 ** draw.integers(0, 18)
    token = tokens(draw, values)
    products = SequenceProducts(
        torch.full((len(values), 1, ROWS), size), torch.ones(len(values), 1, COLUMNS)
    )
    less = MaterializedGradients(torch.full((len(values), ROWS, COLUMNS), -size))
    return SummedGradients((products, less, token))


KINDS: dict[str, Callable[[np.random.Generator, torch.Tensor], ExampleGradients]] = {
    "outer": outer, "sparse": sparse, "held": held, "sequences": sequences,
    "convolutions": convolutions, "tokens": tokens, "parts": parts,
}  # fmt: skip
SHORTEST = 1e-3  # of a clip norm: in the norm of what cancels with a shift is more allowance
MAPS = ("none", "scaled", "shifted", "box", "damped")


def make_map(draw: np.random.Generator, kind: str) -> AffineMap:
    """Return a scale, and a shift that cancels what nearly all records have in common."""
    if kind == "none":
        return AffineMap(None)
    size = ROWS * COLUMNS
    scale = torch.from_numpy(draw.uniform(0.5, 1.0, size)).float()
    shift = -torch.ones(size) if kind in ("shifted", "damped") else None
    return AffineMap(scale, shift)


def sum_of(
    gradients: ExampleGradients, affine: AffineMap, kind: str, records: int, share: float
) -> torch.Tensor:
    """Return the sum that a step rounds to its grid, of records that are not clipped."""
    parameter = nn.Parameter(torch.empty(ROWS, COLUMNS))
    (block,) = cut_into_blocks([parameter])
    weights = None if kind == "box" else torch.ones(records)
    in_single = 0 if kind == "shifted" else single_precision_block(records, share)
    require_precise_sum(records, share, torch.float32, is_shifted=kind == "shifted")
    damping = 0.25 if kind == "damped" else 0.0
    if weights is None or damping:
        found = ClippedSum([gradients], weights, 0.0, damping)
    else:
        found = ClippedSum.with_small_sums(
            [gradients], weights, 0.0, [parameter], summed_in_single=in_single
        )
    total = torch.empty(block.size, dtype=torch.float64)
    found.write_block(block, affine, total)
    return total


def largest_norm(gradients: ExampleGradients, affine: AffineMap, kind: str, records: int) -> float:
    """Return an upper bound on the norm of what a record adds, from each record alone."""
    if kind == "box":
        return math.sqrt(ROWS * COLUMNS)
    numbers, few = torch.arange(records), torch.linspace(0, records - 1, 12).long().unique()
    alone = [sum_of(gradients.select(numbers == i), affine, kind, 1, SHARE_MAX).norm() for i in few]
    return float(torch.stack(alone).max())


def worst_excess(kind: str, how: str, pairs: int, *, accelerated: bool, seed: int = 0) -> float:
    """Return the largest (distance − norm of the record)/(C·a) over pairs of neighbouring batches.

    C is the largest norm of a few records. If it is at most 1, a distance is at most C(1 + a).
    """
    draw, worst = np.random.default_rng(seed), 0.0
    for _ in range(pairs):
        expected = float(draw.choice(EXPECTED))
        share = sum_share(expected)
        records = 2 + int(draw.integers(0, int(1.2 * expected) + 20))
        period = single_precision_block(records, share) or records
        period = min(records, period - period % 64 if period > 64 else period)
        gradients = KINDS[kind](draw, draw_values(draw, records, period))
        affine = make_map(draw, how)
        record = int(draw.choice([0, 0, draw.integers(records)]))
        with no_cpu(pretend=accelerated, must_ask=False):
            largest = largest_norm(gradients, affine, how, records)
            others = torch.arange(records) != record
            whole = sum_of(gradients, affine, how, records, share)
            less = sum_of(gradients.select(others), affine, how, records - 1, share)
            own = sum_of(gradients.select(~others), affine, how, 1, share)
        moved = float((whole - less).norm()) - float(own.norm())
        worst = max(worst, moved / (max(largest, float(own.norm()), SHORTEST) * share))
    return worst


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add up products in single precision one after the other."""

    def add(
        left: torch.Tensor, right: torch.Tensor, weights: torch.Tensor, total: torch.Tensor
    ) -> None:
        terms = (left * weights[:, None]).numpy()[:, :, None] * right.numpy()[:, None]
        assert terms.dtype == np.float32
        total += torch.from_numpy(np.cumsum(terms, axis=0, dtype=np.float32)[-1])

    # private: an order of summation is no option of a library
    monkeypatch.setattr(matmul, "_add_product", add)


CASES = [
    (kind, how, accelerated)
    for kind in KINDS
    for how in MAPS
    for accelerated in (False, True)
    if not (kind == "sparse" and accelerated)
]
NIGHTLY_CASES = [each for each in CASES if each[1] in ("none", "shifted")]
FAST, SLOW, NIGHT = 8, 100, 10_000  # pairs


def case_of_tier(case: tuple[str, str, bool], pairs: int) -> Any:
    """Return a case with as many pairs, marked as its tier."""
    marks = {SLOW: [pytest.mark.slow], NIGHT: [pytest.mark.nightly]}
    return pytest.param(*case, pairs, marks=marks.get(pairs, []))


@pytest.mark.spread(first=5, second=10)
@pytest.mark.parametrize(
    ("kind", "how", "accelerated", "pairs"),
    [
        case_of_tier(case, pairs)
        for pairs, cases in ((FAST, CASES), (SLOW, CASES), (NIGHT, NIGHTLY_CASES))
        for case in cases
    ],
)
def test_adversarial_batches_stay_within_the_charged_sensitivity(
    kind: str, how: str, accelerated: bool, pairs: int
) -> None:
    assert worst_excess(kind, how, pairs, accelerated=accelerated) <= 1.0


NUMBERS_OF_PAIRS = [
    100,
    pytest.param(1000, marks=pytest.mark.slow),
    pytest.param(NIGHT, marks=pytest.mark.nightly),
]


@pytest.mark.spread(first=1, second=1)
@pytest.mark.parametrize("pairs", NUMBERS_OF_PAIRS)
@pytest.mark.parametrize("how", ["none", "scaled"])
def test_products_in_the_worst_order_stay_within_the_charged_sensitivity(
    how: str, pairs: int, one_by_one: None
) -> None:
    """An eighth of the charge is what straddled powers of two can take of it."""
    assert 0.05 < worst_excess("outer", how, pairs, accelerated=False) <= 1.0


def test_one_block_for_a_large_batch_exceeds_the_charge(
    one_by_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a rule that ignores the number of records would be found."""
    monkeypatch.setitem(globals(), "single_precision_block", lambda records, _: records)
    assert worst_excess("outer", "none", 100, accelerated=False) > 2.0


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("kind", ["held", "sequences", "parts"])
def test_held_gradients_in_single_precision_exceed_the_charge(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a sum without double precision would be found."""

    def add(rows: torch.Tensor, weights: torch.Tensor, _: int, total: torch.Tensor) -> None:
        terms = np.vstack([total.float().numpy(), (rows * weights[:, None]).numpy()])
        total.copy_(torch.from_numpy(np.cumsum(terms, axis=0, dtype=np.float32)[-1]))

    # private: nothing else computes these sums in single precision
    for module in (example_gradients, chunked_gradients):
        monkeypatch.setattr(module, "add_weighted_rows", add)
    assert worst_excess(kind, "none", 100, accelerated=False) > 2.0


# --- how much is charged


def test_the_blocks_of_a_batch_of_any_size_keep_the_share() -> None:
    for expected in (0.1, 1.0, 33.0, 128.0, 1e3, 1e6):
        share = sum_share(expected)
        assert 0 < share <= SHARE_MAX
        assert sum_share(expected / 2) <= share
        for records in (1, 2, int(expected) + 1, int(1.5 * expected) + 64, 5000, 1_000_000):
            block = single_precision_block(records, share)
            # an error of n(k + 6)u for the sum with a record, and one for the sum without it
            assert 2 * records * (block + 6) * 2.0**-24 * (block > 0) <= share
            if expected <= 100 and records <= 1.5 * expected + 50:
                assert block >= records


def test_sums_in_double_precision_that_are_too_long_are_refused() -> None:
    require_precise_sum(1_000_000, 0.01, torch.float32, is_shifted=False)
    require_precise_sum(100_000, 0.01, torch.float32, is_shifted=True)
    with pytest.raises(ValueError, match="use smaller batches, or single precision"):
        require_precise_sum(100_000, 0.01, torch.float64, is_shifted=True)


def test_the_noise_pays_for_the_share_of_sums() -> None:
    plan = Plan(dataset_size=6000, sample_rate=0.1, clip_norm=2.0, noise_multiplier=1.5)
    private_sum = PrivateSum(nn.Linear(3, 2), unbudgeted(plan))
    examples, labels = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    released = private_sum.release(examples, labels, cross_entropy, Transform(2.0))
    charged = 1.5 * 2.0 * (1 + SHARE_MAX) / 600
    assert charged <= released.noise_deviation <= charged * (1 + 2.0**-27 * 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("held_in_full", [False, True])
def test_what_cancels_with_a_shift_is_not_much_longer_than_the_clip_norm(
    held_in_full: bool, dtype: torch.dtype
) -> None:
    """The allowance for its rounding in the norm bounds it, and so the rounding of the sum."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, bias=False, dtype=dtype)
    inputs, of = torch.randn(1, 3, dtype=dtype), torch.randn(1, 2, dtype=dtype)
    shift = -(of.T @ inputs)
    by = Transform.fixed(1.0, [torch.ones(2, 3, dtype=dtype)], [shift])
    for size in (1.0, 1e2, 1e4, 1e6, 1e9):
        large = Transform.fixed(1.0, [torch.ones(2, 3, dtype=dtype)], [size * shift])
        clipper = Clipper(layer, path="held" if held_in_full else None)
        found = clipper.clip(size * inputs, of, lambda p, g: (p * g).sum(1), large)
        assert isinstance(found, ClippedSum)
        assert found.weights is not None
        length = (
            2 * size * float(shift.norm()) * float(found.weights.max() if len(found.weights) else 0)
        )
        assert length <= 2 * math.sqrt(2 / rounding_error(dtype)) * by.bound


def test_a_record_of_a_sequence_is_rounded_alike_beside_others() -> None:
    """This is assumed of every library, and is so here."""
    torch.manual_seed(0)
    for positions, rows, columns in ((2, 3, 5), (64, 40, 24), (128, 96, 200)):
        gradients = torch.randn(40, positions, rows)
        products = SequenceProducts(gradients, torch.randn(40, positions, columns))
        whole = products.dense(slice(0, 40), slice(0, rows))
        for start, stop in ((0, 1), (3, 4), (7, 20), (39, 40)):
            assert torch.equal(
                products.dense(slice(start, stop), slice(0, rows)), whole[start:stop]
            )


class Mixed(nn.Module):
    """A matrix as a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 6))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.weight)


@pytest.mark.parametrize("make", [Mixed, lambda: nn.Sequential(Mixed())])
@pytest.mark.filterwarnings("ignore:.*run on each example alone")
def test_terms_of_an_own_parameter_that_cancel_are_added_up_in_double_precision(
    make: Callable[[], nn.Module],
) -> None:
    """Their rounding errors depend on the other examples, so these must be far below the sum."""
    torch.manual_seed(0)
    big = torch.randn(17, 150, 6) * 1e6
    rows = torch.cat([big, -big + 0.125 * torch.randn(17, 150, 6).sign()], 1)
    rows = rows[:, torch.randperm(300)]
    net = make()

    def loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return outputs.sum((1, 2))

    exact = rows.double().sum(1)
    for count in (17, 16):
        found = clipped_sum(net, rows[:count], torch.zeros(count), loss, 1e9)[0]
        expected = exact[:count].sum(0).expand(5, -1)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-4)
