"""What is given out: a wheel made from the source archive, and both in an empty environment."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    words = [str(each) for each in command]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def programs(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that holds the wheel and what it needs, and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet"]
    done = run(*pip, next(built.glob("*.whl")))
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "bin"


def test_the_wheel_holds_what_is_no_code(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    for package in ("accountant_service", "training_client"):
        assert f"{package}/py.typed" in names
    assert "accountant_service/web/templates/calculator.html" in names
    assert "accountant_service/web/static/vendor/htmx.LICENSE" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "benchmarks/", "data/")) for name in names)


def test_the_service_is_there(programs: Path, tmp_path: Path) -> None:
    question = ["-q", "0.01", "-s", "1.1", "-t", "1000", "-d", "1e-5", "--json"]
    done = run(programs / "accountant", "epsilon", *question, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "proven"
    made = run(programs / "python", "-c", "from accountant_service.app import create_app as c; c()")
    assert made.returncode == 0, made.stderr[-2000:]


def test_the_client_says_what_it_lacks(programs: Path) -> None:
    done = run(programs / "accountant-train", "--help")
    assert done.returncode == 2
    assert "privacy-accountant[train]" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_source_archive_installs_too(programs: Path, built: Path) -> None:
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps"]
    done = run(*pip, next(built.glob("*.tar.gz")))
    assert done.returncode == 0, done.stderr[-2000:]
    assert run(programs / "accountant", "--help").returncode == 0
