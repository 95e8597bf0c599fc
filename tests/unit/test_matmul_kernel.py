"""Products of matrices: the same by each library, and of no less precision than their factors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.helpers import nightly
from tests.support.pairwise import pairwise
from tests.support.tensors import require_close
from training_client.private_step.kernels import matmul
from training_client.private_step.kernels.matmul import (
    cache_sized_slices,
    full_precision,
    multiply,
    weighted_product,
)

CPU = torch.device("cpu")
SHAPES = [(576, 784, 192), (64, 784, 192), (192, 600, 784), (1024, 576, 60), (320, 9000, 20)]
OTHERS = [(1, 784, 192), (600, 784, 192), (600, 1, 300), (3, 4, 5), (0, 784, 192), (640, 784, 1)]
LAYOUTS = ["rows", "columns", "rows of more", "columns of more"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that oneDNN is asked for."""
    shapes: list[tuple[int, ...]] = []
    genuine = matmul._onednn_linear()
    if genuine is None:
        pytest.skip("PyTorch is built without oneDNN")

    def counted(left: torch.Tensor, right: torch.Tensor, *more: object) -> torch.Tensor:
        shapes.append((*left.shape, right.shape[0]))
        return genuine(left, right, *more)

    # private: what oneDNN is asked for has no other trace, and some machines lack AVX-512
    monkeypatch.setattr(matmul, "_onednn_linear", lambda: counted)
    monkeypatch.setattr(matmul, "_has_avx512", lambda: True)
    return shapes


def matrix(rows: int, columns: int, layout: str) -> torch.Tensor:
    found = {
        "rows": lambda: torch.randn(rows, columns),
        "columns": lambda: torch.randn(columns, rows).T,
        "rows of more": lambda: torch.randn(rows + 9, columns + 40)[
            4 : 4 + rows, 13 : 13 + columns
        ],
        "columns of more": lambda: torch.randn(columns, rows + 40)[:, 13 : 13 + rows].T,
    }[layout]()
    assert found.shape == (rows, columns)
    return found


@pytest.mark.parametrize("shape", SHAPES + OTHERS)
def test_products_are_correct_in_every_memory_layout(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    for case in pairwise(shape=SHAPES + OTHERS, left=LAYOUTS, right=LAYOUTS):
        if case["shape"] == shape:
            left, right = matrix(rows, inner, case["left"]), matrix(inner, columns, case["right"])
            require_close(multiply(left, right), left, right)


@pytest.mark.slow
def test_products_summed_over_examples_are_correct() -> None:
    for examples in (0, 1, 63, 64, 65, 600, 1100):
        for columns in ((200, 784), (1000, 60), (10, 1000), (3, 2)):
            left, right = torch.randn(examples, columns[0]), torch.randn(examples, columns[1])
            weights = torch.rand(examples)
            for block in (0, 1, 40, 130, examples):
                out = torch.full(columns, torch.nan, dtype=torch.float64)
                weighted_product(left, right, weights, block, out)
                require_close(out.float(), left.T * weights, right)


@pytest.mark.parametrize(("inputs", "outputs", "asked"), [(60, 40, False), (60, 1000, True)])
def test_the_number_of_examples_does_not_choose_the_library(
    inputs: int, outputs: int, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more among 1791 did, and moved their sum by a thousandth of the bound beside its own."""
    # private: which library multiplies has no other trace, and some machines lack AVX-512
    monkeypatch.setattr(matmul, "_has_avx512", lambda: True)
    used: list[int] = []
    genuine = torch.mm
    monkeypatch.setattr(
        matmul,
        "_multiply_by_onednn",
        lambda left, right: used.append(left.shape[1]) or genuine(left, right),
    )
    for examples in (64, 640, 1792, 5056):
        left, right = torch.rand(examples, outputs), torch.rand(examples, inputs)
        out = torch.empty(outputs, inputs, dtype=torch.float64)
        weighted_product(left, right, torch.rand(examples), examples, out)
    assert used == ([64, 640, 1792, 5056] if asked else [])


@pytest.mark.parametrize("columns", [1, 192])
def test_examples_come_in_multiples_of_64_and_a_rest(columns: int) -> None:
    """Only if oneDNN multiplies them; other libraries get one slice without a rest."""
    right = torch.empty(784, columns)
    for size in (0, 1, 63, 64, 65, 600, 1024, 1030, 2048, 3000):
        found = cache_sized_slices(torch.empty(size, 784), right)
        assert [row for each in found for row in range(size)[each]] == list(range(size))
        assert all((each.stop - each.start) % 64 == 0 for each in found[:-1])
        assert all(0 < each.stop - each.start <= 1024 for each in found)
        if columns == 1 and 0 < size <= 1024:
            assert len(found) == 1


def test_batches_of_all_sizes_ask_onednn_for_few_shapes(asked: list[tuple[int, ...]]) -> None:
    """It compiles a program for each."""
    weights, out = torch.randn(192, 784), torch.empty(192, 784, dtype=torch.float64)
    for size in range(560, 641, 3):
        inputs, gradients = torch.randn(size, 784), torch.randn(size, 192)
        for part in cache_sized_slices(inputs, weights.T):
            multiply(inputs[part], weights.T)
        weighted_product(gradients, inputs, torch.ones(size), size, out)
    assert 0 < len(set(asked)) <= 6


def test_large_products_are_computed_by_onednn(asked: list[tuple[int, ...]]) -> None:
    for rows, inner, columns in SHAPES:
        multiply(torch.randn(rows, inner), torch.randn(inner, columns))
    assert len(asked) == len(SHAPES)
    for rows, inner, columns in OTHERS:
        multiply(torch.randn(rows, inner), torch.randn(inner, columns))
    strided = torch.randn(192, 2 * 784)[:, ::2]
    multiply(torch.randn(640, 784), strided.T)
    multiply(torch.randn(1, 784).expand(640, 784), torch.randn(784, 192))
    multiply(torch.randn(640 + 783).unfold(0, 784, 1), torch.randn(784, 192))
    multiply(torch.randn(640, 784).double(), torch.randn(784, 192).double())
    assert len(asked) == len(SHAPES)


def test_nan_stays_with_its_example(asked: list[tuple[int, ...]]) -> None:
    left, right = torch.randn(640, 784), torch.randn(784, 192)
    left[3], left[5, 2] = torch.nan, torch.inf
    found = multiply(left, right)
    assert asked
    assert not bool(found[[3, 5]].isfinite().any())
    assert bool(found[[0, 1, 2, 4, *range(6, 640)]].isfinite().all())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ONEDNN_DEFAULT_FPMATH_MODE", nightly("DNNL_DEFAULT_FPMATH_MODE")]
)
def test_a_library_set_to_lower_precision_is_not_used(name: str) -> None:
    asks = (
        "from training_client.private_step.kernels.matmul import _onednn_linear; "
        "print(_onednn_linear() is None)"
    )
    for value, refused in (
        ("BF16", True),
        ("ANY", True),
        ("STRICT", matmul._onednn_linear() is None),
    ):
        done = subprocess.run(
            [sys.executable, "-c", asks],
            env={name: value}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == f"{refused}\n"


SETTINGS = [
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.fp32_precision = 'bf16'",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "matmul[0].fp32_precision = 'tf32'; torch.set_float32_matmul_precision('high')",
]


@pytest.mark.spread(second=1)
@pytest.mark.parametrize(
    "setting",
    [pytest.param(each, marks=pytest.mark.slow) for each in SETTINGS[:2]]
    + [pytest.param(each, marks=pytest.mark.nightly) for each in SETTINGS[2:]],
)
def test_products_are_precise_under_every_precision_setting(setting: str) -> None:
    """For all devices at once, or for each: PyTorch refuses to read the one after the other."""
    asks = f"""
import torch
from training_client.private_step.kernels.matmul import full_precision
matmul = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
def settings():
    return [each.fp32_precision for each in matmul]
{setting}
before = settings()
assert before != ["none", "none"]
for autocast in (False, True):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with full_precision(torch.device("cpu")):
            print(*settings(), torch.is_autocast_enabled("cpu"))
        assert torch.is_autocast_enabled("cpu") == autocast
    assert settings() == before
"""
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 2 * "ieee ieee False\n"


def test_precision_is_restored_after_an_error() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ZeroDivisionError), full_precision(CPU):
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
