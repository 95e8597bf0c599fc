"""The engine's products of matrices beside PyTorch's own, in turn, one thread.

    python benchmarks/products.py

Those of a step at batch 600 on 784-1000-10 and 60-1000-10, a block at a time. `first` is the first
time that a shape is met, when oneDNN compiles a program for it.
"""

from __future__ import annotations

import sys

sys.path = [p for p in sys.path if not p.endswith("benchmarks")]  # http.py hides a library

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from training_client.clipping.products import parts_of, product, weighted_product

EXAMPLES, ROUNDS = 600, 41
# sides of a layer's block of weights
LAYERS = {"784-1000, 128 rows": (128, 784), "60-1000": (1000, 60), "1000-10": (10, 1000)}


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title=f"{EXAMPLES} examples, torch {torch.__version__}")
    for column in ("product", "PyTorch's ms", "ours ms", "ours / PyTorch's", "first ms"):
        table.add_column(column, justify="left" if column == "product" else "right")
    for name, (outputs, inputs) in LAYERS.items():
        a, g, w = (torch.rand(EXAMPLES, each) for each in (inputs, outputs, 1))
        d, out = torch.rand(outputs, inputs), torch.empty(outputs, inputs)
        kinds: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "norms": (
                lambda a=a, d=d: a @ d.T,  # type: ignore[misc]
                lambda a=a, d=d: [product(a[part], d.T) for part in parts_of(a, d.T)],  # type: ignore[misc]
            ),
            "sum": (
                lambda a=a, g=g, w=w, out=out: torch.mm((g * w).T, a, out=out),  # type: ignore[misc]
                lambda a=a, g=g, w=w, out=out: weighted_product(g, a, w[:, 0], out),  # type: ignore[misc]
            ),
        }
        for kind, (theirs, ours) in kinds.items():
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
