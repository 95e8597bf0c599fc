"""`accountant plan`: readable at 40 columns, marked, drawn, and refused with all that is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.questions.registry import ENDPOINTS

PLAN = ["plan", "-E", "2", "-d", "1e-5", "-n", "60000", "-e", "10", "--points", "4"]


def run(*arguments: str, columns: int = 100) -> Any:
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(cli.app, [*PLAN, *arguments], env=environment)


@pytest.mark.parametrize("columns", [40, 100])
@pytest.mark.slow
def test_the_plan_fits_the_terminal_and_marks_its_runs(columns: int) -> None:
    found = run("-b", "256", columns=columns)
    assert found.exit_code == 0, found.output
    lines = [line for line in found.stdout.splitlines() if not line.startswith("accountant")]
    assert max(map(len, lines)) <= columns
    assert len([line for line in lines if line.lstrip().startswith("▸ ")]) == 2  # and the legend
    assert re.search(r"^ • +256 +2343 +\d+\.\d+", found.stdout, re.MULTILINE)
    assert "…" not in found.stdout
    assert ("σ/B" in found.stdout.split("sampling  ")[-1]) == (columns == 100) or columns == 40
    assert "proven by pld" in " ".join(found.stdout.split())


def test_the_json_is_the_api_s_answer() -> None:
    answer = json.loads(run("--json", "--sampling", "poisson").stdout)
    body = {"epsilon": 2, "delta": 1e-5, "dataset_size": 60000, "epochs": 10, "points": 4}
    endpoint = ENDPOINTS["/v1/plan"]
    request = endpoint.request.model_validate(body | {"sampling": "poisson"})
    assert answer == endpoint.answer(request).model_dump(mode="json")


@pytest.mark.slow
def test_the_frontier_is_drawn_or_the_option_is_named(tmp_path: Path) -> None:
    for suffix, start in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")):
        file = tmp_path / f"plan.{suffix}"
        assert run("--sampling", "poisson", "--plot", str(file)).exit_code == 0
        assert file.read_bytes().startswith(start)
    assert "signal-to-noise" in (tmp_path / "plan.svg").read_text()
    for name in ("plan.txt", "no/folder/plan.svg"):
        found = run("--sampling", "poisson", "--plot", str(tmp_path / name))
        assert found.exit_code == 2
        assert "--plot" in found.output
