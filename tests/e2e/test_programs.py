"""The programs as a user runs them: the server process, the command line, the demonstration."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from accountant_service import cli
from tests.support.programs import awake

PROGRAMS = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]


def command(*arguments: str, program: str = "accountant") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(
        [PROGRAMS / program, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=120,
    )


def in_this_process(*arguments: str) -> Result:
    """Run a command of `accountant` without a second for the start of a process."""
    return CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "120", "NO_COLOR": "1"})


@contextmanager
def running(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """The address of a service process, which ends well, and without a traceback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [PROGRAMS / "accountant", "serve", "--port", str(port)],
        cwd=folder,
        env=os.environ | environment,
        stderr=subprocess.PIPE,
    )
    try:
        yield awake(f"http://127.0.0.1:{port}")
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM)
    assert b"Traceback" not in log


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("server"), {}) as url:
        yield url


def post(url: str, body: bytes) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_the_server_answers_and_survives_a_huge_body(server: str) -> None:
    huge = b'{"mechanism": {"kind": "composed", "mechanisms": [' + b'{"kind": "x"},' * 700_000
    status, problem = post(f"{server}/v1/epsilon", huge)
    assert (status, problem["code"]) == (413, "body-too-large")
    run = {"kind": "dp_sgd", "noise_multiplier": 1, "sample_rate": 0.01, "steps": 100}
    status, answer = post(
        f"{server}/v1/epsilon", json.dumps({"mechanism": run, "delta": 1e-5}).encode()
    )
    assert status == 200
    assert answer["status"] == "proven"


def test_memory_stays_within_its_bounds(server: str) -> None:
    """Idle below 150 MB; no accepted request adds more than 300 MB."""
    pid = int(
        subprocess.run(
            ["pgrep", "-f", f"serve --port {server.rsplit(':', 1)[1]}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()[0]
    )

    def megabytes(field: str) -> float:
        text = Path(f"/proc/{pid}/status").read_text()
        found = re.search(rf"{field}:\s+(\d+) kB", text)
        assert found
        return int(found[1]) / 1024

    assert megabytes("VmRSS") < 150
    idle = megabytes("VmRSS")
    parts = [
        {"kind": "dp_sgd", "noise_multiplier": 0.5 + i / 50, "sample_rate": 1e-3, "steps": 999}
        for i in range(40)
    ]
    questions = [
        {"kind": "dp_sgd", "noise_multiplier": 0.6, "sample_rate": 1e-4, "steps": 200_000},
        {"kind": "dp_sgd", "noise_multiplier": 0.3, "sample_rate": 1e-4, "steps": 10_000_000},
        {"kind": "composed", "mechanisms": parts},
    ]
    for mechanism in questions:
        for method in ("pld", "subsampled_rdp"):
            body = {"mechanism": mechanism, "delta": 1e-7, "method": method}
            status, _ = post(f"{server}/v1/epsilon", json.dumps(body).encode())
            assert status in (200, 422)
    assert megabytes("VmHWM") - idle < 300


@pytest.mark.parametrize(
    "arguments",
    [
        ["epsilon", "-q", "0.01", "-s", "1.1", "-t", "1000", "-d", "1e-5"],
        ["delta", "-q", "0.01", "-s", "1.1", "-t", "1000", "-E", "2"],
        ["noise-multiplier", "-q", "0.01", "-t", "1000", "-E", "2", "-d", "1e-5"],
        ["steps", "-q", "0.01", "-s", "1.1", "-E", "2", "-d", "1e-5"],
        ["compare", "-q", "0.01", "-s", "1.1", "-t", "1000", "-d", "1e-5"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_command_prints_text_and_json(server: str, arguments: list[str]) -> None:
    shown = command(*arguments)
    assert shown.returncode == 0, shown.stderr
    assert "proven" in shown.stdout
    as_json = in_this_process(*arguments, "--json")
    answer = json.loads(as_json.stdout)
    assert answer
    help_text = in_this_process(arguments[0], "--help").stdout
    assert "Example: accountant" in help_text
    assert "--json" in help_text


def test_the_command_line_answers_what_the_service_answers(server: str) -> None:
    run = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1000}
    body = json.dumps({"mechanism": run, "delta": 1e-5}).encode()
    _, served = post(f"{server}/v1/epsilon", body)
    printed = command("epsilon", "--mechanism", json.dumps(run), "-d", "1e-5", "--json")
    assert json.loads(printed.stdout) == served


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["epsilon", "-q", "2", "-s", "1", "-t", "5", "-d", "1e-5"], "--sample-rate must be"),
        (["epsilon", "-q", "0.1", "-s", "1", "-t", "5", "-d", "7"], "--delta must be"),
        (["epsilon", "-d", "1e-5", "--mechanism", "{"], "--mechanism is not JSON"),
        (["epsilon", "-d", "1e-5", "--mechanism", "@/nowhere"], "cannot read the file"),
        (
            ["steps", "-q", "0.1", "-s", "1", "-E", "1", "-d", "1e-5", "--method", "x"],
            "--method must be",
        ),
    ],
)
def test_wrong_input_is_explained_without_a_traceback(arguments: list[str], words: str) -> None:
    refused = in_this_process(*arguments)
    assert refused.exit_code == 2
    assert isinstance(refused.exception, SystemExit)
    assert words in refused.stderr


def test_the_program_explains_wrong_input_as_its_commands_do() -> None:
    refused = command("epsilon", "-q", "2", "-s", "1", "-t", "5", "-d", "1e-5")
    assert refused.returncode == 2
    assert "--sample-rate must be" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_the_trainer_does_not_train_without_a_service(tmp_path: Path) -> None:
    done = command(
        "run",
        "--service",
        "http://127.0.0.1:9",
        "--data-dir",
        str(tmp_path),
        program="accountant-train",
    )
    assert done.returncode == 4
    assert "accountant serve" in done.stderr
    assert not list(tmp_path.iterdir()), "data was touched without an answer"
