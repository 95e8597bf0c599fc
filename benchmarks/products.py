"""The engine's products of matrices beside PyTorch's own, in turn, one thread.

    python benchmarks/products.py

Those of a step at batch 600, a block at a time, with examples of which so much is not 0. `first` is
the first time: when zeros are left out, or oneDNN compiles a program for a shape.
"""

from __future__ import annotations

import sys

sys.path = [p for p in sys.path if not p.endswith("benchmarks")]  # http.py hides a library

import statistics
import time
from collections import deque
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from training_client.clipping.factors import Factor, factor_of

EXAMPLES, ROUNDS = 600, 41
# rows and columns of a layer's block of weights, and the share of its inputs that is not 0
LAYERS = {
    "784-1000, 128 rows": (128, 784, 1.0),
    "784-1000, 128 rows, a fifth": (128, 784, 0.2),
    "60-1000": (1000, 60, 1.0),
    "1000-10": (10, 1000, 0.5),
    "10000-20, 13 rows, a hundredth": (13, 10_000, 0.01),
}


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title=f"{EXAMPLES} examples, torch {torch.__version__}")
    for column in ("product", "PyTorch's ms", "ours ms", "ours / PyTorch's", "first ms"):
        table.add_column(column, justify="left" if column == "product" else "right")
    for name, (outputs, inputs, filled) in LAYERS.items():
        a, g, w = (torch.rand(EXAMPLES, each) for each in (inputs, outputs, 1))
        a *= torch.rand_like(a) < filled
        d, out = torch.rand(outputs, inputs), torch.empty(outputs, inputs)
        made: list[Factor] = []  # at first, and then kept for all blocks

        def factor(
            a: torch.Tensor = a, made: list[Factor] = made, filled: float = filled
        ) -> Factor:
            if not made:
                made.append(factor_of(a, 1000, sparse=filled < 0.25))
            return made[0]

        kinds: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "norms": (
                lambda a=a, d=d: a @ d.T,  # type: ignore[misc]
                lambda d=d, factor=factor: deque(factor().products(d.T), 0),  # type: ignore[misc]
            ),
            "sum": (
                lambda a=a, g=g, w=w, out=out: torch.mm((g * w).T, a, out=out),  # type: ignore[misc]
                lambda g=g, w=w, out=out, factor=factor: factor().add_up(g, w[:, 0], out),  # type: ignore[misc]
            ),
        }
        for kind, (theirs, ours) in kinds.items():
            made.clear()
            theirs()
            first = seconds(ours)
            pairs = [(seconds(theirs), seconds(ours)) for _ in range(ROUNDS)]
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
