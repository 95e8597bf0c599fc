"""Commands of the pages run in a copy of the repository: benchmarks and further make targets."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from _pytest.mark.expression import Expression

from tests.support.databases import free_port
from tests.support.helpers import nightly
from tests.support.pages import copy_repository, end
from tests.support.programs import awake

_SECONDS = 900  # that a command may take, on a slow machine and beside other tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(_SECONDS + 20)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose environment is ready, so that make installs nothing into ours."""
    copy = tmp_path_factory.mktemp("commands") / "repository"
    copy_repository(copy)
    environment = copy / ".venv"
    environment.mkdir()
    for part in Path(sys.prefix).iterdir():
        if part.name != ".ready":
            (environment / part.name).symlink_to(part)
    (environment / ".ready").touch()
    return copy


def surroundings(home: Path, given: dict[str, str]) -> dict[str, str]:
    """Variables, without what another make or a configured service has left."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCOUNTANT_", "MAKE", "PYTEST_"))
    }
    path = f"{home / '.venv/bin'}:{os.environ['PATH']}"
    kept |= {"PATH": path, "PYTHONPATH": str(home), "COLUMNS": "120", "NO_COLOR": "1"}
    return kept | given


def done_by(command: str, home: Path, **given: str) -> str:
    """Run a command in the copy, and return its output."""
    done = subprocess.run(
        shlex.split(command),
        cwd=home,
        env=surroundings(home, given),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@contextmanager
def in_background(command: str, home: Path, **given: str) -> Iterator[None]:
    process = subprocess.Popen(
        shlex.split(command),
        cwd=home,
        env=surroundings(home, given),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        end(process)


def test_the_demonstration_trains_within_its_budget(home: Path) -> None:
    folder = home / "runs/mnist"
    folder.mkdir(parents=True)
    for left in ("ledger.db", "checkpoint.pt"):  # of a demo that was killed
        (folder / left).write_text("interrupted")
    told = done_by("make demo", home, DEMO_OPTIONS="--steps 60")
    for sentence in (
        "An earlier demo did not end; this one begins anew",
        "Stopped after 60 steps: all steps are done.",
        "all is well",
        "do not fit what is left of the budget of 'mnist'",
    ):
        assert sentence in told
    certificate = json.loads((folder / "certificate.json").read_text())
    assert certificate["steps"] == 60
    accuracy = re.search(r"Test accuracy ([\d.]+)%", told)
    assert accuracy
    assert float(accuracy[1]) > 70
    claim = json.loads((folder / "privacy.json").read_text())
    assert 1.98 <= claim["epsilon"] <= 2.0, "the first run may take the whole budget"
    assert claim["status"] == "proven"
    assert (folder / "model.pt").exists()
    look_at(told, home)


def look_at(printed: str, home: Path) -> None:
    """As its last line says: the run and its certificate are on the pages, behind a sign-in."""
    key = re.search(r"then sign in with the key (\S+)", printed)
    assert key
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        in_background("make look", home, SERVE_PORT=str(port)),
        httpx.Client(
            base_url=awake(url), headers={"Accept": "text/html"}, follow_redirects=True, timeout=20
        ) as person,
    ):
        form = person.get("/datasets").text  # leads to the form
        token = re.search(r'name="csrf" value="([^"]+)"', form)
        assert token
        shown = person.post("/sign-in", data={"csrf": token[1], "key": key[1]}).text
        assert 'href="/datasets/mnist"' in shown
        keys = person.get("/keys").text
        (row,) = re.findall(r">look<br>.*?</tr>", keys, re.DOTALL)
        assert 'data-label="Expires">never' not in row
        run = re.search(r'href="(/runs/[^"]+)"', person.get("/datasets/mnist").text)
        assert run
        page = person.get(run[1]).text
        assert "committed" in page
        link = re.search(r'href="([^"]*certificate[^"]*)"', page)
        assert link
        kept = json.loads((home / "runs/mnist/certificate.json").read_text())
        found = person.get(link[1]).json()
        for name in ("issued_at", "signature"):  # each answer is issued and signed anew
            found[name] = kept[name]
        found["dates"]["issued"] = kept["dates"]["issued"]
        assert found == kept


@pytest.mark.parametrize(
    ("command", "port", "path", "text"),
    [
        ("make serve", "SERVE_PORT", "/docs", "<h1>API</h1>"),
        nightly("make docs", "DOCS_PORT", "/", "<title>Privacy accountant</title>"),
    ],
)
def test_a_target_serves_its_pages(
    command: str, port: str, path: str, text: str, home: Path
) -> None:
    number = str(free_port())
    with in_background(command, home, **{port: number}):
        assert text in shown(f"http://127.0.0.1:{number}{path}")


def shown(url: str) -> str:
    """Return the page at an address, as soon as a server answers there."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            assert time.monotonic() < deadline, f"nobody answers at {url}"
            time.sleep(0.2)


@pytest.mark.nightly  # the demonstration fetches and checks one of them
def test_fetched_data_have_the_expected_content(home: Path) -> None:
    said = done_by("make data", home)
    for name, sizes in (
        ("mnist", "60,000 + 10,000"),
        ("adult", "32,561 + 16,281"),
        ("newsgroups", "11,293 + 7,528"),
    ):
        assert f"{name}: {sizes} examples" in said


@pytest.mark.nightly
def test_the_benchmarks_print_their_tables_and_grants_stay_quick_under_hostile_load(
    home: Path,
) -> None:
    said = done_by("make bench", home, BENCH_OPTIONS="--quick")
    for title in ("(a) q=0.01", "certified curves", "uncached questions (0 refused)"):
        assert title in said


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "briefly", "title"),
    [
        ("python benchmarks/ledger_cost.py", "", "Steps that each filter admits"),
        ("python benchmarks/matrix_products.py", "", "600 examples"),
        ("python benchmarks/random_allocation.py", " --quick", "σ=2 b=10 E=1"),
        (
            "python benchmarks/balls_in_bins_simulation.py",
            " --cases 2 --draws 100000",
            "0 of 2 cases are off by more than 5 standard errors",
        ),
        (
            "python benchmarks/training_step.py",
            " --models narrow_mlp --only adadp --only a_ddp --only 'dp_sgd bf16' --rounds 1",
            "narrow_mlp: 60-1000-10, batch 600",
        ),
        (
            "python benchmarks/training_step.py",
            " --models narrow_mlp,cnn --only 'dp_sgd compiled' --rounds 1",
            "small CNN, 28×28, batch 256",
        ),
        (
            "python benchmarks/model_checks.py",
            " --models narrow_mlp",
            "Proofs in a run of 200 steps",
        ),
        ("python benchmarks/budget_calls.py --steps 2000", " --steps 20", "20 steps"),
        ("python benchmarks/planner.py --compare 5", " --points 3", "poisson+balls_in_bins"),
        ("python benchmarks/sharded_memory.py", " --processes 2", "memory over that"),
        (
            "python benchmarks/sampling.py",
            " --steps 10 --batch-size 6000 --hidden 8 --seeds 1",
            "balls_in_bins",
        ),
    ],
)
def test_a_benchmark_prints_its_table(command: str, briefly: str, title: str, home: Path) -> None:
    assert title in done_by(command + briefly, home)


@pytest.mark.nightly
def test_a_step_of_dp_sgd_takes_no_more_time_and_memory_than_its_goals(
    home: Path, tmp_path: Path
) -> None:
    """Ratios to an ordinary step, of CPU time and of allocated bytes, in one run."""
    goals = {
        "encoder": (1.5, 1.3),
        "embedding": (5.0, 1.5),
        **dict.fromkeys(("bert", "gpt2", "llama", "vit", "wrn", "unet"), (1.6, 1.5)),
    }
    others = ("lstm", "lora", "mlp", "cnn")
    names, file = [*goals, *others], tmp_path / "rows.json"
    done_by(
        f"python benchmarks/training_step.py --models {','.join(names)} --only sgd --only dp_sgd "
        f"--json {file}",
        home,
    )
    rows = [row for row in json.loads(file.read_text()) if row["step"] == "dp_sgd"]
    assert {row["model"] for row in rows} == set(names)
    for row in rows:
        time_goal, memory_goal = goals.get(row["model"], (math.inf, math.inf))
        assert 0 < row["time_ratio"] <= time_goal, row
        assert 0 < row["memory_ratio"] <= memory_goal, row
        assert row["batch"] > 0


def test_make_targets_together_run_every_test(home: Path) -> None:
    """Each test runs in one target of those that CI runs, or in the nightly one."""
    commands = ("make test", "make test-slow", "make test-browser", "make test-nightly")
    one, whole = [markers_of(each, home) for each in commands], markers_of("make test-all", home)
    for marked in itertools.product((False, True), repeat=3):
        marks = dict(zip(("slow", "nightly", "browser"), marked, strict=True))
        runs = [each.evaluate(marks.__getitem__) for each in one]
        assert runs[-1] == marks["nightly"]
        assert whole.evaluate(marks.__getitem__) == (not marks["nightly"])
        assert sum(runs) == 1 or (sum(runs) > 1 and marks["browser"])


def markers_of(command: str, home: Path) -> Expression:
    """Return the marker expression of the tests that a make target runs."""
    shown = done_by(f"{command} --dry-run", home)
    found = re.search(r'pytest .*-m "?([a-z ]+)', shown)
    assert found, shown
    return Expression.compile(found[1].strip())


@pytest.mark.nightly  # it asks the package index for every version
def test_the_locked_versions_are_those_that_the_project_asks_for(home: Path) -> None:
    lock = home / "constraints.txt"
    before = lock.read_text()
    done_by("make lock", home)
    assert lock.read_text() == before
