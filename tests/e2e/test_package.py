"""The published packages: a wheel built from the source archive, both installed from scratch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.pages import PAGES, ROOT, copy_repository

pytestmark = pytest.mark.timeout(900)  # installing takes minutes on a busy machine
slow = pytest.mark.slow


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


@slow
def test_the_wheel_contains_templates_and_licences_but_no_tests(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    for package in ("accountant_service", "training_client"):
        assert f"{package}/py.typed" in names
    assert "accountant_service/web/templates/calculator.html" in names
    assert "accountant_service/web/static/vendor/htmx.LICENSE" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "benchmarks/", "data/")) for name in names)


@pytest.mark.nightly
@slow
def test_the_installed_service_answers(programs: Path, tmp_path: Path) -> None:
    question = ["-q", "0.01", "-s", "1.1", "-t", "1000", "-d", "1e-5", "--json"]
    done = run(programs / "accountant", "epsilon", *question, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "proven"
    made = run(programs / "python", "-c", "from accountant_service.app import create_app as c; c()")
    assert made.returncode == 0, made.stderr[-2000:]


@pytest.mark.nightly
@slow
def test_the_client_names_the_missing_extra(programs: Path) -> None:
    done = run(programs / "accountant-train", "--help")
    assert done.returncode == 2
    assert "privacy-accountant[train]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly  # the wheel is built from it, which shows most of this
def test_the_source_archive_installs_too(programs: Path, built: Path) -> None:
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps"]
    done = run(*pip, next(built.glob("*.tar.gz")))
    assert done.returncode == 0, done.stderr[-2000:]
    assert run(programs / "accountant", "--help").returncode == 0


INTEGRATIONS = "training_client.integrations"
EXTRAS = {  # what the pages say to install, and what is there then
    "pip install 'privacy-accountant[train]'": "training_client.lab.command",
    "pip install 'privacy-accountant[train,opacus]'": f"{INTEGRATIONS}.opacus",
    "pip install 'privacy-accountant[train,lightning]'": f"{INTEGRATIONS}.lightning",
    "pip install 'privacy-accountant[train,huggingface]'": f"{INTEGRATIONS}.huggingface",
    "pip install 'privacy-accountant[train,mlflow]'": f"{INTEGRATIONS}.mlflow",
    "pip install 'privacy-accountant[train,wandb]'": f"{INTEGRATIONS}.wandb",
    "pip install 'privacy-accountant[train,lora]'": "peft",
    "pip install 'privacy-accountant[opacus]'": "opacus",
    "pip install 'privacy-accountant[postgres]'": "psycopg",
    "pip install 'privacy-accountant[otel]'": "opentelemetry.instrumentation.fastapi",
    "pip install 'privacy-accountant[report]'": "weasyprint",
}


def test_every_extra_that_a_page_names_is_tried() -> None:
    named = (
        re.findall(r"pip install 'privacy-accountant\[.*?'", file.read_text()) for file in PAGES
    )
    assert {each for found in named for each in found} == set(EXTRAS)


@pytest.mark.nightly
def test_every_extra_is_installed_as_its_page_says(
    built: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """One environment, empty at first, so that what extras have in common is installed once."""
    venv.create(tmp_path / "growing", with_pip=True)
    growing = tmp_path / "growing/bin"
    ours = tmp_path / "ours.txt"
    version = next(built.glob("*.whl")).name.split("-")[1]
    ours.write_text(f"--find-links {built}\nprivacy-accountant=={version}\n")
    constraints = {"PIP_CONSTRAINT": f"{ROOT / 'constraints.txt'} {ours}", "PIP_QUIET": "1"}
    path = {"PATH": f"{growing}:{os.environ['PATH']}"}
    for line, module in EXTRAS.items():
        with subtests.test(line):
            done = script(line, tmp_path, constraints | path)
            assert done.returncode == 0, done.stderr[-2000:]
            imported = run(growing / "python", "-c", f"import {module}", cwd=tmp_path)
            assert imported.returncode == 0, imported.stderr[-2000:]


def script(text: str, folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euc", text],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


GPU = """
python3 -m venv .venv
.venv/bin/pip install torch
.venv/bin/pip install -e '.[train,postgres,dev]'
touch .venv/.ready
"""  # lines of docs/how-to/gpu.md, and then
TRAIN = ".venv/bin/accountant-train run --device cuda"
SEES_GPU = '.venv/bin/python -c "import torch; print(torch.cuda.is_available())"'


@pytest.mark.nightly
def test_an_environment_for_a_gpu_is_made_as_its_page_says(tmp_path: Path) -> None:
    """With the torch that is pinned; where there is no GPU, the run says so before it asks."""
    home = tmp_path / "repository"
    copy_repository(home)
    constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_QUIET": "1"}
    made = script(GPU, home, constraints)
    assert made.returncode == 0, made.stderr[-2000:]
    assert "pip install" not in run("make", "--dry-run", "install", cwd=home).stdout
    again = run("make", "--dry-run", "--always-make", "install", cwd=home)
    assert "pip install" in again.stdout  # which is how it would be seen
    done = script(TRAIN, home, {"ACCOUNTANT_SERVICE": "http://127.0.0.1:9"})
    assert "Traceback" not in done.stderr
    assert not (home / "runs").exists()
    if script(SEES_GPU, home, {}).stdout.strip() == "True":
        assert done.returncode == 4, done.stderr
    else:
        assert done.returncode == 2
        assert "cannot use 'cuda' here" in done.stderr
