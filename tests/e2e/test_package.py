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

from scripts import release
from tests.support.pages import PAGES, ROOT, copy_repository

pytestmark = pytest.mark.timeout(900)  # installing takes minutes on a busy machine
slow = pytest.mark.slow
BUILT_AT = 1_700_000_000


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    words = [str(each) for each in command]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    release.build_packages(ROOT, folder, BUILT_AT)
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
def test_a_build_in_another_folder_is_equal(built: Path, tmp_path: Path) -> None:
    copy_repository(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/data").unlink()
    for file in (tmp_path / "elsewhere").rglob("*.py"):
        file.chmod(0o600)
        os.utime(file, (1, 1))
    release.build_packages(tmp_path / "elsewhere", tmp_path / "dist", BUILT_AT)
    for folder in (built, tmp_path / "dist"):
        release.write_checksums(folder)
    assert (built / release.CHECKSUMS).read_text() == (tmp_path / "dist/SHA256SUMS").read_text()


@pytest.mark.nightly
def test_two_releases_of_a_commit_are_equal(tmp_path: Path) -> None:
    """As `make release` builds them, each in a clone of its own; the programs stand outside."""
    sums = []
    for name in ("one", "two"):
        clone = tmp_path / name
        assert run("git", "clone", "--quiet", ROOT, clone).returncode == 0
        ready = f"mkdir .venv && ln -s {sys.prefix}/* .venv && touch -d tomorrow .venv/.ready"
        assert script(ready, clone, {}).returncode == 0
        assert run("make", "site", cwd=clone).returncode == 0  # and a release has it once
        done = run("make", "release", cwd=clone)
        assert done.returncode == 0, done.stderr[-2000:]
        sums.append((clone / "dist" / release.CHECKSUMS).read_text())
        with zipfile.ZipFile(next((clone / "dist").glob("*.whl"))) as wheel:
            assert "accountant_service/web/documentation/index.html" in wheel.namelist()
    assert sums[0] == sums[1]
    assert len(sums[0].splitlines()) == 5
    assert run("make", "man", cwd=tmp_path / "two").returncode == 0
    assert (tmp_path / "two/build/man/accountant-epsilon.1").exists()


@slow
def test_the_wheel_contains_templates_and_licences_but_no_tests(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    for package in ("accountant_service", "command_words", "training_client"):
        assert f"{package}/py.typed" in names
    assert "accountant_service/web/templates/calculator.html" in names
    assert "accountant_service/web/static/vendor/htmx.LICENSE" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "benchmarks/", "data/")) for name in names)


LIGHT = """
python3 -m venv accountant
accountant/bin/pip install privacy-accountant
accountant/bin/accountant epsilon -q 0.01 -s 1.1 -t 1000 -d 1e-5
"""  # lines of docs/how-to/installing.md


@pytest.mark.nightly
def test_the_light_installation_is_small_and_answers(built: Path, tmp_path: Path) -> None:
    found = {"PIP_FIND_LINKS": str(built), "PIP_QUIET": "1"}
    done = script(LIGHT, tmp_path, found)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "proven by pld" in done.stdout
    files = [each.stat().st_size for each in tmp_path.rglob("*") if each.is_file()]
    assert sum(files) < 400e6


@pytest.mark.nightly
@slow
def test_the_installed_service_answers(programs: Path, tmp_path: Path) -> None:
    question = ["-q", "0.01", "-s", "1.1", "-t", "1000", "-d", "1e-5", "--json"]
    done = run(programs / "accountant", "epsilon", *question, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "proven"
    made = run(
        programs / "python", "-c", "from accountant_service.server.app import create_app as c; c()"
    )
    assert made.returncode == 0, made.stderr[-2000:]


@pytest.mark.nightly
@slow
def test_the_client_names_the_missing_extra(programs: Path) -> None:
    assert run(programs / "accountant-train", "--help").returncode == 0
    done = run(programs / "accountant-train", "run", "--help")
    assert done.returncode == 2
    assert "privacy-accountant[train]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly  # the wheel is built from it, which shows most of this
def test_the_source_archive_installs_too(programs: Path, built: Path) -> None:
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps"]
    done = run(*pip, next(built.glob("*.tar.gz")))
    assert done.returncode == 0, done.stderr[-2000:]
    assert run(programs / "accountant", "--help").returncode == 0


OLDEST = """
from accountant_service import epsilon, plan
from accountant_service.server.app import create_app
from starlette.testclient import TestClient
from training_client.client import AccountingService

found = epsilon(1e-5, noise_multiplier=1.1, sample_rate=0.01, steps=1000)
assert str(found).endswith("proven by pld (1.51536 ≤ ε ≤ 1.51537)"), found
assert plan(2, delta=1e-5, dataset_size=6000, epochs=2, points=2).recommended.steps
question = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1000}
with TestClient(create_app()) as client:
    for page in ("/", "/plan", "/docs", "/datasets", "/openapi.json"):
        assert client.get(page, headers={"Accept": "text/html"}).status_code == 200, page
    asked = client.post("/v1/epsilon", json={"mechanism": question, "delta": 1e-5})
    assert asked.json()["epsilon"] == found.epsilon
"""


TRIED = (
    "compare -q .01 -s 1.1 -t 99 -d 1e-5",
    "keys create --scope admin",
    "keys list",
    "dataset create d -n 1000 -E 1 -d 1e-5",
    "ledger verify",
    "epsilon --help",
)


def newest_python() -> Path:
    """Return the newest Python on the PATH or beside this one, as pyenv has them."""
    folders = [*map(Path, os.get_exec_path()), *Path(sys.base_prefix).parent.glob("*/bin")]
    names = re.compile(r"python3\.(\d+)")
    found = {
        int(name[1]): each
        for folder in folders
        for each in folder.glob("python3.*")
        if (name := names.fullmatch(each.name)) and run(each, "-c", "").returncode == 0
    }
    return found[max(found)]


@pytest.mark.nightly
@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_the_wheel_works_with_the_oldest_and_the_newest_dependencies(
    built: Path, tmp_path: Path, resolution: str
) -> None:
    """With the oldest on the oldest Python allowed, which runs this; outside the repository."""
    assert sys.version_info[:2] == (3, 11)
    python = newest_python() if resolution == "highest" else sys.executable
    made = run(sys.executable, "-m", "uv", "venv", "--quiet", "--python", python, tmp_path / "new")
    assert made.returncode == 0, made.stderr
    install = [sys.executable, ROOT / "scripts/install.py", tmp_path / "new", "--quiet"]
    needed = ["-r", ROOT / "pyproject.toml", "--extra", "client", "--resolution", resolution]
    for packages in (needed, ["--no-deps", next(built.glob("*.whl"))]):
        done = run(*install, *packages, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
    programs = tmp_path / "new/bin"
    tried = run(programs / "python", "-W", "error:Field:UserWarning", "-c", OLDEST, cwd=tmp_path)
    assert tried.returncode == 0, tried.stderr[-2000:]
    for words in TRIED:
        done = run(programs / "accountant", *words.split(), cwd=tmp_path)
        assert done.returncode == 0, (words, done.stdout[-900:], done.stderr[-900:])
    assert run(programs / "python", "-c", "import torch").returncode == 1


TRAINS = """
import torch
from training_client.budget import NoBudget
from training_client.lab.models import cross_entropy
from training_client.optimizers import make_optimizer, private_batches
from training_client.plan import Plan

plan = Plan(200, sample_rate=0.1, clip_norm=1.0, noise_multiplier=1.1)
model = torch.nn.Linear(4, 2)
before = model.weight.detach().clone()
optimizer = make_optimizer("dp_adam", model, NoBudget(plan, 3, "a test"), learning_rate=0.1)
data = torch.utils.data.TensorDataset(torch.randn(200, 4), torch.randint(0, 2, (200,)))
for examples, labels in private_batches(optimizer, data):
    optimizer.step(examples, labels, cross_entropy)
assert optimizer.steps_made == 3
assert torch.isfinite(model.weight).all() and not torch.equal(model.weight, before)
"""


@pytest.mark.nightly
def test_the_newest_python_trains(built: Path, tmp_path: Path) -> None:
    """With the extra `train` of the wheel, outside the repository."""
    made = run(sys.executable, "-m", "uv", "venv", "--quiet", "--python", newest_python(),
        tmp_path / "new")  # fmt: skip
    assert made.returncode == 0, made.stderr
    wheel = f"privacy-accountant[train] @ {next(built.glob('*.whl')).as_uri()}"
    install = [sys.executable, ROOT / "scripts/install.py", tmp_path / "new", "--quiet", wheel]
    done = run(*install, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    trained = run(tmp_path / "new/bin/python", "-c", TRAINS, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr[-2000:]
    assert run(tmp_path / "new/bin/accountant-train", "--help").returncode == 0


INTEGRATIONS = "training_client.integrations"
EXTRAS = {  # what the pages say to install, and what is there then
    "pip install 'privacy-accountant[client]'": "training_client.client",
    "pip install 'privacy-accountant[train]'": "training_client.lab.command",
    "pip install 'privacy-accountant[train,opacus]'": f"{INTEGRATIONS}.opacus",
    "pip install 'privacy-accountant[train,lightning]'": f"{INTEGRATIONS}.lightning",
    "pip install 'privacy-accountant[train,huggingface]'": f"{INTEGRATIONS}.huggingface",
    "pip install 'privacy-accountant[train,mlflow]'": f"{INTEGRATIONS}.mlflow",
    "pip install 'privacy-accountant[train,wandb]'": f"{INTEGRATIONS}.wandb",
    "pip install 'privacy-accountant[train,lora]'": "peft",
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
