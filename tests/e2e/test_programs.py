"""The programs as a user runs them: the server process, the command line, the demonstration."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from accountant_service import cli
from tests.support.server import PROGRAMS, Server

SHOWN = {"COLUMNS": "120", "NO_COLOR": "1"}
RUN = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1000}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `accountant` in a process of its own."""
    return subprocess.run(
        [PROGRAMS / "accountant", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | SHOWN,
        check=False,
        timeout=120,
    )


def in_this_process(*arguments: str) -> Result:
    """Run a command of `accountant` without a second for the start of a process."""
    return CliRunner().invoke(cli.app, arguments, env=SHOWN)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service process, which ends well and without a traceback."""
    folder = tmp_path_factory.mktemp("server")
    found = Server(f"sqlite:///{folder}/ledger.db", folder)
    found.wait()
    yield found
    assert found.stop() in (0, -signal.SIGTERM)
    assert "Traceback" not in found.log


def post(server: Server, path: str, body: Any) -> tuple[int, Any]:
    """Return the status and the JSON answer of a request."""
    status, answer = server.ask("POST", path, body)
    return status, json.loads(answer)


@pytest.mark.slow
def test_the_server_answers_and_survives_a_huge_body(server: Server) -> None:
    huge = {"mechanism": {"kind": "composed", "mechanisms": [{"kind": "x"}] * 700_000}}
    status, problem = post(server, "/v1/epsilon", huge)
    assert (status, problem["code"]) == (413, "body-too-large")
    status, served = post(server, "/v1/epsilon", {"mechanism": RUN, "delta": 1e-5})
    assert (status, served["status"]) == (200, "proven")
    printed = command("epsilon", "--mechanism", json.dumps(RUN), "-d", "1e-5", "--json")
    assert json.loads(printed.stdout) == served


@pytest.mark.slow
def test_memory_stays_within_its_bounds(tmp_path: Path) -> None:
    """Idle below 150 MB; no accepted request adds more than 300 MB."""
    server = Server(f"sqlite:///{tmp_path}/ledger.db", tmp_path)
    server.wait()  # the first start may compile modules, which needs memory of its own
    server.stop()
    server.start()
    server.wait()

    def megabytes(field: str) -> float:
        """Return a field of the server process's memory."""
        text = Path(f"/proc/{server.process.pid}/status").read_text()
        found = re.search(rf"{field}:\s+(\d+) kB", text)
        assert found
        return int(found[1]) / 1024

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
            assert post(server, "/v1/epsilon", body)[0] in (200, 422)
    most = megabytes("VmHWM")
    server.stop()
    assert idle < 150
    assert most - idle < 300


@pytest.mark.parametrize(
    "words",
    [
        "epsilon -q 0.01 -s 1.1 -t 1000 -d 1e-5",
        "delta -q 0.01 -s 1.1 -t 1000 -E 2",
        "noise-multiplier -q 0.01 -t 1000 -E 2 -d 1e-5",
        "steps -q 0.01 -s 1.1 -E 2 -d 1e-5",
        "compare -q 0.01 -s 1.1 -t 1000 -d 1e-5",
    ],
)
def test_every_command_prints_text_and_json(words: str) -> None:
    arguments = words.split()
    shown = in_this_process(*arguments)
    assert shown.exit_code == 0, shown.stderr
    assert "proven" in shown.stdout
    assert json.loads(in_this_process(*arguments, "--json").stdout)
    help_text = in_this_process(arguments[0], "--help").stdout
    assert "Example: accountant" in help_text
    assert "--json" in help_text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("epsilon -q 2 -s 1 -t 5 -d 1e-5", "--sample-rate must be"),
        ("epsilon -q 0.1 -s 1 -t 5 -d 7", "--delta must be"),
        ("epsilon -d 1e-5 --mechanism {", "--mechanism is not JSON"),
        ("epsilon -d 1e-5 --mechanism @/nowhere", "cannot read the file"),
        ("steps -q 0.1 -s 1 -E 1 -d 1e-5 --method x", "--method must be"),
    ],
)
def test_wrong_input_is_explained_without_a_traceback(words: str, told: str) -> None:
    refused = in_this_process(*words.split())
    assert refused.exit_code == 2
    assert isinstance(refused.exception, SystemExit)
    assert told in refused.stderr


@pytest.mark.slow
def test_the_program_explains_wrong_input_as_its_commands_do() -> None:
    refused = command("epsilon", "-q", "2", "-s", "1", "-t", "5", "-d", "1e-5")
    assert refused.returncode == 2
    assert "--sample-rate must be" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_the_trainer_does_not_train_without_a_service(tmp_path: Path) -> None:
    from training_client.lab.cli import app  # torch comes with it

    nobody = ["--service", "http://127.0.0.1:9"]
    done = CliRunner().invoke(app, ["run", *nobody, "--data-dir", str(tmp_path)], env=SHOWN)
    assert done.exit_code == 4
    assert "accountant serve" in done.stderr
    assert not list(tmp_path.iterdir()), "data was touched without an answer"
