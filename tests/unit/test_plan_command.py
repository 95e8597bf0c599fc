"""`accountant plan`: readable at 40 columns, marked, drawn, and refused with all that is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.api.questions import ENDPOINTS

PLAN = ["plan", "-E", "2", "-d", "1e-5", "-n", "60000", "-e", "10", "--points", "4"]


def run(*arguments: str, columns: int = 100) -> Any:
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(cli.app, [*PLAN, *arguments], env=environment)


@pytest.mark.parametrize("columns", [40, 100])
def test_the_plan_fits_the_terminal_and_marks_its_runs(columns: int) -> None:
    found = run("-b", "256", columns=columns)
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
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


def test_the_frontier_is_drawn(tmp_path: Path) -> None:
    for suffix, start in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")):
        file = tmp_path / f"plan.{suffix}"
        assert run("--sampling", "poisson", "--plot", str(file)).exit_code == 0
        assert file.read_bytes().startswith(start)
    assert "signal-to-noise" in (tmp_path / "plan.svg").read_text()


@pytest.mark.parametrize("name", ["plan.txt", "no/folder/plan.svg"])
def test_a_plot_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    found = run("--sampling", "poisson", "--plot", str(tmp_path / name))
    assert found.exit_code == 2
    assert "--plot" in found.output


def test_all_that_is_wrong_is_said_at_once_in_the_words_of_options() -> None:
    found = CliRunner().invoke(cli.app, ["plan", "-d", "2", "--batch-size", "0"])
    assert found.exit_code == 2
    for words in (
        "--epsilon is required",
        "--delta must be < 1",
        "--dataset-size is required",
        "--batch-size must be",
    ):
        assert words in found.output
    assert "Traceback" not in found.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--examples", "5"], "--examples must be left out if --epochs are given"),
        (["-t", "5"], "--batch-size is required with --steps"),
        (["-b", "60001"], "--batch-size must be at most 60000, which is --dataset-size"),
        (["--sampling", "shuffled"], "--sampling must be"),
        (["--points", "1"], "--points must be"),
        (
            ["--smallest-batch-size", "500", "--largest-batch-size", "50"],
            "--smallest-batch-size must be at most --largest-batch-size",
        ),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], words: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2
    assert words in " ".join(found.output.split())


@pytest.mark.parametrize("command", ["plan", "import"])
def test_a_refusal_is_the_api_s_problem_with_json(command: str, tmp_path: Path) -> None:
    (tmp_path / "history").write_text("{}")
    arguments = ["plan"] if command == "plan" else ["import", str(tmp_path / "history"), "-d", "2"]
    found = CliRunner().invoke(cli.app, [*arguments, "--json"])
    problem = json.loads(found.output)
    assert (found.exit_code, problem["code"]) == (2, "invalid-request")
    assert "/delta" in {fault["pointer"] for fault in problem["errors"]}
    assert "--delta" in {fault["option"] for fault in problem["errors"]}
