"""Matrices without their zeros: the same numbers, the same products, and chosen where they help."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from tests.support.tensors import require_close
from training_client.private_step.gradients.gradient_factors import DenseFactor, make_factor
from training_client.private_step.kernels.sparse import SparseFactor

TINY = float(torch.finfo(torch.float32).tiny)
SHAPES = [(1, 1), (5, 9), (600, 784), (130, 200), (200, 130), (3, 0), (0, 3)]
COLUMNS = [1, 7, 8, 20, 112, 113, 300]


def mostly_zero(rows: int, columns: int) -> torch.Tensor:
    """A fifth of it is not 0; some rows and columns are all 0, and some zeros have a sign."""
    found = torch.randn(rows, columns) * (torch.rand(rows, columns) < 0.2)
    found[1::7], found[:, 2::5] = 0.0, -0.0
    return found


def whole(matrix: SparseFactor) -> torch.Tensor:
    rows = len(matrix.starts) - 1
    found = torch.zeros(rows, matrix.columns)
    for row in range(rows):
        its = slice(int(matrix.starts[row]), int(matrix.starts[row + 1]))
        found[row, matrix.places[its].long()] = matrix.values[its]
    return found


def test_sparse_matrices_omit_only_zeros() -> None:
    for shape in SHAPES:
        matrix = mostly_zero(*shape)
        found = SparseFactor.from_dense(matrix)
        assert torch.equal(whole(found), matrix)
        assert bool((found.values != 0).all())
        assert torch.equal(whole(found._transposed), matrix.T)
        assert torch.equal(whole(SparseFactor.from_dense(matrix.T)), matrix.T)


def test_nan_and_infinity_are_kept() -> None:
    matrix = torch.tensor([[0.0, math.nan, 0.0], [math.inf, 0.0, -math.inf]])
    assert torch.equal(
        SparseFactor.from_dense(matrix).values.nan_to_num(7.0, 8.0, 9.0), torch.tensor([7.0, 8, 9])
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_products_and_sums_over_examples_are_those_of_the_matrix(shape: tuple[int, int]) -> None:
    for at, columns in enumerate(COLUMNS):
        matrix, right = mostly_zero(*shape), torch.randn(shape[1], columns)
        right = right if at % 2 else right.T.contiguous().T
        sparse = SparseFactor.from_dense(matrix)
        parts = list(sparse.products(right))
        assert all(rows == slice(0, len(matrix)) for rows, _, _ in parts)
        assert [c for _, part, _ in parts for c in range(columns)[part]] == list(range(columns))
        require_close(torch.cat([found for _, _, found in parts], 1), matrix, right)
        left, weights = torch.randn(shape[0], columns + 9), torch.rand(shape[0])
        left = left[:, 4 : 4 + columns]
        out = torch.full((columns, shape[1]), torch.nan, dtype=torch.float64)
        sparse.weighted_product(left, weights, 0, out)
        require_close(out.float(), left.T * weights, matrix)


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_squares_are_those_of_the_matrix(size: float) -> None:
    """In double precision, and none of them becomes 0."""
    for shape in SHAPES:
        require_same_squares(size * mostly_zero(*shape))


def require_same_squares(matrix: torch.Tensor) -> None:
    """Raise unless a matrix without its zeros has the squares of the whole matrix."""
    dense, few = DenseFactor(matrix), SparseFactor.from_dense(matrix)
    assert torch.allclose(few.squared_norms(), dense.squared_norms(), rtol=1e-12, atol=0.0)
    (unit, norms), (expected, _) = few.normalized_squares(), dense.normalized_squares()
    assert torch.equal(norms, few.squared_norms())
    assert torch.allclose(whole(unit), expected.rows, rtol=1e-6, atol=0.0)
    assert bool((unit.values >= TINY).all())


def test_a_relatively_tiny_square_stays_above_zero() -> None:
    unit, _ = SparseFactor.from_dense(torch.tensor([[1.0, 0.0, 1e-30]])).normalized_squares()
    assert unit.values.tolist() == [1.0, TINY]


def test_nan_stays_with_its_example() -> None:
    matrix, right = mostly_zero(6, 40), torch.randn(40, 20)
    matrix[3, 1], matrix[5, 3] = math.nan, math.inf
    ((_, _, found),) = SparseFactor.from_dense(matrix).products(right)
    assert not bool(found[[3, 5]].isfinite().any())
    assert bool(found[[0, 1, 2, 4]].isfinite().all())
    assert SparseFactor.from_dense(matrix).squared_norms().isfinite().tolist() == 3 * [True] + [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("said", [False, True])
def test_the_declaration_and_not_the_data_decides_about_sparse_kernels(said: bool) -> None:
    """The two add up in another order: a record that chose between them moved all the others."""
    for rows, filled in product((1, 200), (0.0, 0.2, 1.0)):
        matrix = torch.zeros(rows * 500)
        matrix[: int(filled * len(matrix))] = 1.0
        kind = SparseFactor if said else DenseFactor
        assert type(make_factor(matrix.view(rows, 500), 64, sparse=said)) is kind


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (torch.zeros(500, 127), 64),
        (torch.zeros(500, 500), 15),
        (torch.zeros(500, 500, dtype=torch.float64), 64),
        (torch.zeros(500, 500, device="meta"), 64),
    ],
)
def test_narrow_or_unsuitable_matrices_stay_dense(rows: torch.Tensor, columns: int) -> None:
    assert type(make_factor(rows, columns, sparse=True)) is DenseFactor
    assert type(make_factor(torch.zeros(1, 128), 16, sparse=True)) is SparseFactor


def test_large_sparse_matrices_have_64_bit_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    # private: a matrix that needs 64-bit indices has two thousand million values
    monkeypatch.setattr("training_client.private_step.kernels.sparse._INT32_SIZE_MAX", 130 * 200)
    matrix, right = mostly_zero(130, 200), torch.randn(200, 20)
    found = SparseFactor.from_dense(matrix)
    assert (found.starts.dtype, found.places.dtype) == (torch.int64, torch.int64)
    ((_, _, made),) = found.products(right)
    require_close(made, matrix, right)
    out = torch.empty(20, 200, dtype=torch.float64)
    found.weighted_product(left := torch.randn(130, 20), weights := torch.rand(130), 0, out)
    require_close(out.float(), left.T * weights, matrix)
