"""Measure the structure of both packages, and what a question, a grant and a step pass.

Files, code lines, components (modules or folders directly below a package), arrows (imports between
components) and circles (groups of components that import each other). A profiler counts the modules
of which a function is called.

python -m scripts.structure           # prints them
python -m scripts.structure --write   # writes the tables into docs/architecture.md
"""

from __future__ import annotations

import ast
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import grimp

from scripts.page_parts import DOCS, write_part

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = DOCS / "architecture.md"
PACKAGES: Final = ("accountant_service", "training_client")
_STEPS_BEFORE: Final = 40  # the first steps prove that examples are apart
_RUN: Final = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01}
_OPTIONS: Final = ["-q", "0.01", "-s", "1.1", "-d", "1e-5"]


def count_code_lines(text: str) -> int:
    """Return the number of lines with code: no blank lines, comments or docstrings."""
    tree = ast.parse(text)
    documentation = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documentation
        for number, line in enumerate(text.splitlines(), 1)
    )


@cache
def find_arrows(package: str) -> Mapping[str, frozenset[str]]:
    """Return, for each component of a package, the other components that it imports."""
    graph = grimp.build_graph(package, cache_dir=None)
    arrows: dict[str, set[str]] = {
        child.split(".")[1]: set() for child in graph.find_children(package)
    }
    for importer in graph.modules - {package}:
        source = importer.split(".")[1]
        for imported in graph.find_modules_directly_imported_by(importer) - {package}:
            arrows[source].add(imported.split(".")[1])
    return {source: frozenset(targets - {source}) for source, targets in arrows.items()}


def find_circles(arrows: Mapping[str, frozenset[str]]) -> list[frozenset[str]]:
    """Return the groups of components of which each imports each, directly or through others."""

    def reach(start: str) -> frozenset[str]:
        """Return all that a component imports, directly or through others."""
        found, left = set[str](), list(arrows[start])
        while left:
            each = left.pop()
            if each not in found:
                found.add(each)
                left += arrows[each]
        return frozenset(found)

    reached = {each: reach(each) for each in arrows}
    groups = {
        frozenset(other for other in found if each in reached[other])
        for each, found in reached.items()
    }
    return sorted(groups - {frozenset()}, key=sorted)


def count_files(package: str) -> tuple[int, int]:
    """Return a package's numbers of files and code lines."""
    files = sorted((ROOT / package).rglob("*.py"))
    return len(files), sum(count_code_lines(each.read_text()) for each in files)


def trace_modules(package: str, run: Callable[[], object]) -> frozenset[str]:
    """Call a function, and return the files of a package of which a function was called."""
    passed: set[str] = set()
    below = str(ROOT / package) + os.sep

    def profile(frame: FrameType, event: str, _: Any) -> None:
        """Note the file of a called function; a module's own code is no function."""
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(below):
            passed.add(code.co_filename.removeprefix(below))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as the documentation says
    return frozenset(passed)


def _ask_python(steps: int) -> None:
    """Ask for an ε with the Python function."""
    from accountant_service import epsilon

    epsilon(1e-5, noise_multiplier=1.1, sample_rate=0.01, steps=steps)


def _ask_command(steps: int) -> None:
    """Ask for an ε on the command line."""
    from typer.testing import CliRunner

    from accountant_service.cli import app

    done = CliRunner().invoke(app, ["epsilon", *_OPTIONS, "-t", str(steps)])
    assert done.exit_code == 0, done.output


def _trace_service() -> Iterator[tuple[str, str, int]]:
    """Yield what is asked of the service, its package, and how many modules it passes."""
    from fastapi.testclient import TestClient

    from accountant_service.computing.processes import ProcessPool
    from accountant_service.ledger.api_keys import Scope
    from accountant_service.operations.settings import Settings
    from accountant_service.server.app import create_app

    async def run_here(_: ProcessPool, function: Callable[..., Any], *arguments: Any) -> Any:
        """Compute in this process, where the profiler sees it."""
        return function(*arguments)

    ProcessPool.run = run_here  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        api = TestClient(create_app(Settings(database_url=f"sqlite:///{folder}/ledger.db")))
        key = api.app.state.keys.create([Scope.ADMIN])[0]  # type: ignore[attr-defined]

        def post(path: str, body: object, name: str = "") -> Any:
            """Return the service's answer to a body."""
            headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": name} if name else {}
            answer = api.post(path, json=body, headers=headers)
            assert answer.is_success, answer.text
            return answer.json()

        def ask(steps: int) -> None:
            """Ask for an ε over HTTP."""
            post("/v1/epsilon", {"mechanism": _RUN | {"steps": steps}, "delta": 1e-5})

        for question, function in (
            ("Python", _ask_python),
            ("HTTP", ask),
            ("command line", _ask_command),
        ):
            function(1000)  # imports, and what is made once
            passed = trace_modules(PACKAGES[0], lambda run=function: run(1001))  # type: ignore[misc]
            yield f"a question, {question}", PACKAGES[0], len(passed)
        budget = {"epsilon": 8.0, "delta": 1e-5}
        post("/v1/datasets", {"name": "d", "size": 400, "budget": budget}, "dataset")
        held = post("/v1/datasets/d/reservations", {"mechanism": _RUN | {"steps": 10}}, "run")
        grants = f"/v1/reservations/{held['id']}/grants"

        def grant(sequence: int) -> None:
            """Grant the step that follows `sequence` others."""
            post(grants, {"sequence": sequence, "steps": 1}, f"step {sequence}")

        grant(0)
        passed = trace_modules(PACKAGES[0], lambda: grant(1))
        yield "a grant", PACKAGES[0], len(passed)


def _trace_step() -> Iterator[tuple[str, str, int]]:
    """Yield how many modules of the client a training step passes."""
    import torch

    from training_client.budget import NoBudget
    from training_client.optimizers import make_optimizer, private_batches
    from training_client.plan import Plan

    cross_entropy = partial(torch.nn.functional.cross_entropy, reduction="none")
    budget = NoBudget(Plan(400, 0.05, 1.0, 1.1), _STEPS_BEFORE + 1, "a measurement")
    optimizer = make_optimizer("dp_sgd", torch.nn.Linear(8, 2), budget)
    records = torch.utils.data.TensorDataset(torch.rand(400, 8), torch.zeros(400).long())
    batches = iter(private_batches(optimizer, records))

    def step() -> None:
        """Draw a batch, and make its step."""
        examples, targets = next(batches)
        optimizer.step(examples, targets, cross_entropy)

    for _ in range(_STEPS_BEFORE):
        step()
    yield "a training step", PACKAGES[1], len(trace_modules(PACKAGES[1], step))


def render() -> str:
    """Return the page's tables as Markdown: figures that do not change with every line."""
    rows = ["| package | components | arrows | circles |", "|---|---|---|---|"]
    for package in PACKAGES:
        arrows = find_arrows(package)
        count = sum(len(targets) for targets in arrows.values())
        rows.append(f"| `{package}` | {len(arrows)} | {count} | {len(find_circles(arrows))} |")
    rows += ["", "| passes through | modules |", "|---|---|"]
    rows += [
        f"| {what} | {count} of `{package}` |"
        for found in (_trace_service(), _trace_step())
        for what, package, count in found
    ]
    return "\n".join(rows)


def main() -> None:
    """Print the figures, or write the tables into the page."""
    for package in PACKAGES:
        files, lines = count_files(package)
        print(f"{package}: {files} files, {lines} code lines")
    table = render()
    print(f"\n{table}")
    if "--write" in sys.argv[1:]:
        write_part(PAGE, "structure", table)


if __name__ == "__main__":
    main()
