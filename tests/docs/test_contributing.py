"""The worked commits of CONTRIBUTING.md apply to this version and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, copy_repository

DIFFS = re.findall(
    r"^```diff\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL
)
USE = """
from accountant_service import calculator, mechanisms
from accountant_service.app import create_app
from accountant_service.settings import Settings
from fastapi.testclient import TestClient
from training_client.optimizers import OPTIMIZERS

run = mechanisms.from_json({"kind": "concentrated_gaussian", "rho": 0.5})
method, exact = calculator.compare(run, 1e-5, ["unsampled_gaussian", "pld"]).answers
assert method.status == "proven" and abs(method.epsilon / exact.epsilon - 1) < 1e-8
assert "dp_adamax" in OPTIMIZERS
with TestClient(create_app(Settings(database_url="sqlite:///ledger.db"))) as client:
    assert "Gaussian mechanism without sampling" in client.get("/methods").text
"""


@pytest.fixture(scope="module")
def changed_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("contributing") / "repository"
    copy_repository(copy)
    for diff in DIFFS:
        apply = ["git", "apply", "-C1"]
        done = subprocess.run(apply, cwd=copy, input=diff, text=True, capture_output=True)
        assert done.returncode == 0, f"{done.stderr}\n{diff}"
    return copy


def test_there_is_one_commit_for_each_kind_of_change() -> None:
    assert len(DIFFS) == 4


@pytest.mark.slow
def test_the_commits_apply_and_work(changed_copy: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(changed_copy)}
    subprocess.run([sys.executable, "-c", USE], cwd=changed_copy, env=environment, check=True)


def test_the_commits_are_formatted_as_the_rest(changed_copy: Path) -> None:
    program = Path(sys.executable).parent / "ruff"
    for command in (["check"], ["format", "--check"]):
        call = [program, *command, "accountant_service", "training_client"]
        subprocess.run(call, cwd=changed_copy, check=True)
