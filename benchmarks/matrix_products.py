"""Compare the CPU kernels' matrix products with PyTorch's, alternately, on one thread.

    python benchmarks/matrix_products.py

The products are those of a step at batch 600, one block of weights at a time, with dense and sparse
examples. `first` is the time of the first call, which builds the sparse form of the examples or
lets oneDNN compile code for the shape.
"""

from __future__ import annotations

import sys

sys.path = [p for p in sys.path if not p.endswith("benchmarks")]  # http.py shadows a library

import statistics
import time
from collections import deque
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from training_client.private_step.gradients.gradient_factors import Factor, make_factor

EXAMPLES, ROUNDS = 600, 41
# rows and columns of a block of a layer's weights, and the share of nonzero inputs
LAYERS = {
    "784-1000, 128 rows": (128, 784, 1.0),
    "784-1000, 128 rows, a fifth": (128, 784, 0.2),
    "60-1000": (1000, 60, 1.0),
    "1000-10": (10, 1000, 0.5),
    "10000-20, 13 rows, a hundredth": (13, 10_000, 0.01),
}


def measure_seconds(work: Callable[[], object]) -> float:
    """Return the duration of a call in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Print a table of the products' times here and in PyTorch."""
    torch.set_num_threads(1)
    table = Table(title=f"{EXAMPLES} examples, torch {torch.__version__}")
    for column in ("product", "PyTorch's ms", "ours ms", "ours / PyTorch's", "first ms"):
        table.add_column(column, justify="left" if column == "product" else "right")
    for name, (outputs, inputs, filled) in LAYERS.items():
        a, g, w = (torch.rand(EXAMPLES, each) for each in (inputs, outputs, 1))
        a *= torch.rand_like(a) < filled
        d, out = torch.rand(outputs, inputs), torch.empty(outputs, inputs)
        made: list[Factor] = []  # built at the first call, then shared by all blocks

        def get_factor(
            a: torch.Tensor = a, made: list[Factor] = made, filled: float = filled
        ) -> Factor:
            """Return `a` as a dense or sparse factor, which the first call makes."""
            if not made:
                made.append(make_factor(a, 1000, sparse=filled < 0.25))
            return made[0]

        kinds: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "norms": (
                lambda a=a, d=d: a @ d.T,  # type: ignore[misc]
                lambda d=d, get_factor=get_factor: deque(get_factor().products(d.T), 0),  # type: ignore[misc]
            ),
            "sum": (
                lambda a=a, g=g, w=w, out=out: torch.mm((g * w).T, a, out=out),  # type: ignore[misc]
                lambda g=g, w=w, out=out, get_factor=get_factor: get_factor().weighted_product(  # type: ignore[misc]
                    g, w[:, 0], len(g), out.double()
                ),
            ),
        }
        for kind, (theirs, ours) in kinds.items():
            made.clear()
            theirs()
            first = measure_seconds(ours)
            pairs = [(measure_seconds(theirs), measure_seconds(ours)) for _ in range(ROUNDS)]
            table.add_row(
                f"{name}: {kind}",
                f"{1e3 * statistics.median(a for a, _ in pairs):.2f}",
                f"{1e3 * statistics.median(b for _, b in pairs):.2f}",
                f"{statistics.median(b / a for a, b in pairs):.2f}",
                f"{1e3 * first:.2f}",
            )
    Console(width=100).print(table)


if __name__ == "__main__":
    with torch.no_grad():
        main()
