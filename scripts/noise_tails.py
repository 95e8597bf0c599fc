"""Print where libraries' normal generators end, and which published runs that refutes.

python -m scripts.noise_tails           # prints both tables
python -m scripts.noise_tails --write   # writes them into docs/gaussian-noise.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from accountant_service.accounting.noise_tails import GENERATORS
from accountant_service.writing import number_format
from scripts.imported_configurations import describe_source, import_entry, read_entries
from scripts.page_parts import DOCS, write_part

PAGE: Final = DOCS / "gaussian-noise.md"
NOISES: Final = (0.5, 1.0, 2.0)
_SHOWN: Final = ("PyTorch, float32, CPU", "PyTorch, float32, CUDA", "TensorFlow", "JAX, float32")
_LIBRARIES: Final = {  # of the projects in the list, by what their code imports
    "pytorch/opacus": "PyTorch",
    "NVIDIA/NVFlare": "PyTorch",
    "adap/flower": "PyTorch",
    "awslabs/fast-differential-privacy": "PyTorch",
    "dayu11/Differentially-Private-Deep-Learning": "PyTorch",
    "facebookresearch/ViP-MAE": "PyTorch",
    "facebookresearch/tan": "PyTorch",
    "ftramer/Handcrafted-DP": "PyTorch",
    "lxuechen/private-transformers": "PyTorch",
    "tensorflow/federated": "TensorFlow",
    "tensorflow/privacy": "TensorFlow",
    "google-deepmind/jax_privacy": "JAX",
}


def render_generators() -> Iterator[str]:
    """Yield a row for each generator: its end, and p for a record in a step at some noises."""
    yield "| generator | largest draw, σ | " + " | ".join(f"p at σ = {each:g}" for each in NOISES)
    yield " | code |\n|---|---|" + "---|" * len(NOISES) + "---|\n"
    for each in GENERATORS:
        escapes = (each.escape_probability(1 / noise) for noise in NOISES)
        cells = (number_format.round_down(p, 3) if p else "–" for p in escapes)
        end = number_format.round_nearest(each.largest, 4)
        path, _, function = each.source.partition(", ")
        yield f"| {each.name} | {end} | {' | '.join(cells)} | `{path}`: `{function}` |\n"


def render_runs() -> Iterator[str]:
    """Yield a row for each published run whose δ is below a bound of its library's generators."""
    yield "| configuration | δ | δ is at least, if the noise is drawn by |\n|---|---|---|\n"
    for entry in read_entries():
        source = entry["source"]
        library = _LIBRARIES.get(source.get("repository", ""))
        if library is None or "/tests/" in source["path"]:
            continue
        answer = import_entry(entry).answer
        delta = _delta_of(answer)
        if delta is None:
            continue
        bounds = [
            f"{tail['generator']}: {number_format.round_down(tail['delta_lower'], 2)}"
            for tail in answer["noise_tails"]
            if tail["generator"].startswith(library)
            and tail["generator"].startswith(_SHOWN)
            and tail["delta_lower"] > delta
        ]
        if bounds:
            shown = number_format.round_nearest(delta, 3)
            name = f"{entry['name']}<br>{describe_source(source)}"
            yield f"| {name} | {shown} | {'<br>'.join(bounds)} |\n"


def _delta_of(answer: dict[str, Any]) -> float | None:
    """Return the δ of an import's answer; None if it has none."""
    guarantee = answer.get("guarantee")
    return None if guarantee is None else float(guarantee["delta"])


TABLES: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "generators": render_generators,
    "runs": render_runs,
}


def main() -> None:
    """Print the tables, or write them into the page."""
    for name, render in TABLES.items():
        table = "".join(render())
        if "--write" not in sys.argv:
            print(table)
            continue
        write_part(PAGE, name, table)


if __name__ == "__main__":
    main()
