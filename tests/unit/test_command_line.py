"""The command line starts quickly, and lists each command as the command describes itself."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner, Result

from accountant_service import __version__, cli, importing
from accountant_service.accounting.methods import ACCOUNTANTS, DEFAULT_METHOD
from accountant_service.cli import mechanism_options, names
from accountant_service.questions import functions
from accountant_service.writing.number_format import round_up
from tests.support.command_tree import walk_commands

RUN = ("-q", "0.01", "-s", "1.1", "-t", "1000")
GROUP = get_command(cli.app)
assert isinstance(GROUP, TyperGroup)


def run_python(code: str) -> str:
    """Return what a new Python process prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_arguments_are_described_with_and_without_the_indentation_of_docstrings() -> None:
    """Python 3.13 and later remove it."""

    def ask() -> None: ...

    ask.__doc__ = inspect.getdoc(functions.epsilon)
    found = mechanism_options.describe_arguments(functions.epsilon)
    assert found["sample_rate"] == "q: expected batch size over dataset size."
    assert mechanism_options.describe_arguments(ask) == found


@pytest.mark.slow
def test_a_risk_is_marked_as_an_estimate_if_a_hypothesis_fails() -> None:
    words = ["noise-multiplier", "-q", "0.1", "-t", "10", "--advantage", "0.2"]
    assert "estimate: not proved" in invoke(*words, "--sampling", "shuffled").stdout
    assert "not proved" not in invoke(*words).stdout


@pytest.mark.parametrize("name", list(GROUP.commands))
def test_the_list_of_commands_says_what_each_command_says(name: str) -> None:
    listed, command = GROUP.commands[name], cli.load_command(name)
    assert listed.help == (command.help or "").split("\n")[0]
    assert command.name == name


@pytest.mark.slow
def test_help_cuts_no_name_and_shows_no_type_of_python() -> None:
    for words, _ in walk_commands():
        shown = invoke(*words, "--help", columns=80).output
        assert "…" not in shown, words
        assert "list[" not in shown, words


def test_help_marks_each_option_without_which_a_command_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = dict[str, set[str]]()
    for words, command in walk_commands():
        shown = {
            max(each.opts, key=len)
            for each in command.params
            if each.param_type_name == "option"
            and (each.required or "[required]" in (each.help or ""))
        }
        if not shown:
            continue
        found[" ".join(words)] = shown
        assert invoke(*words, "--help").output.count("[required]") == len(shown) + sum(
            each.param_type_name == "argument" and each.required for each in command.params
        )
        arguments = ["x" for each in command.params if each.param_type_name == "argument"]
        refused = invoke(*words, *arguments).output
        missing = set(re.findall(r"(--[\w-]+) is required", refused))
        assert missing - {"--noise-multiplier"} <= shown, words  # it may be in --mechanism instead
    assert found["dataset create"] == {"--size", "--epsilon", "--delta"}
    assert found["plan"] == {"--epsilon", "--delta", "--dataset-size"}
    assert found["epsilon"] == found["compare"] == {"--delta"}
    assert found["delta"] == {"--epsilon"}


@pytest.mark.slow
def test_help_and_version_import_no_arrays_and_no_server() -> None:
    """Help of any command, however deep: else each takes more than a second."""
    code = """
import sys
from typer.testing import CliRunner
from accountant_service import cli

def paths(command):
    yield []
    for name in getattr(command, "commands", {}):
        child = command.commands[name]
        if isinstance(command, cli._LazyGroup):
            child = cli.load_command(name)
        yield from ([name, *rest] for rest in paths(child))

import typer
called = [["--version"], *([*path, "--help"] for path in paths(typer.main.get_command(cli.app)))]
assert ["keys", "create", "--help"] in called
for words in called:
    assert CliRunner().invoke(cli.app, words).exit_code == 0, words
    heavy = {"numpy", "scipy", "sqlalchemy", "fastapi", "starlette", "httpx", "jinja2"}
    print(*sorted(heavy & set(sys.modules)), end="")
"""
    assert run_python(code) == ""


def test_help_names_the_methods_and_formats_that_there_are() -> None:
    assert tuple(ACCOUNTANTS) == names.METHODS
    assert names.DEFAULT_METHOD == DEFAULT_METHOD
    assert tuple(importing.FORMATS) == names.FORMATS


def test_the_version_is_the_package_s() -> None:
    found = CliRunner().invoke(cli.app, ["--version"])
    assert (found.exit_code, found.stdout) == (0, f"accountant {__version__}\n")


def test_computations_are_imported_while_the_server_is_imported() -> None:
    """Else the first reservation after a start waits for more than a second."""
    code = """
import sys
from typer.testing import CliRunner
from accountant_service import cli
from accountant_service.computing.fork_server import ForkServer

def start(_):
    print(sorted({"numpy", "fastapi", "uvicorn"} & set(sys.modules)))
    raise SystemExit(0)

ForkServer.start = start
print(CliRunner().invoke(cli.app, ["serve", "--port", "1234"]).stdout)
"""
    assert run_python(code).splitlines()[0] == "[]"


def invoke(*words: str, columns: int = 100, text: str | None = None) -> Result:
    """Run a command with a terminal of this width and this standard input."""
    return CliRunner().invoke(cli.app, list(words), input=text, env={"COLUMNS": str(columns)})


def solved(*words: str, text: str | None = None) -> dict[str, Any]:
    """Return the JSON answer of a command that succeeds."""
    found = invoke(*words, "--json", text=text)
    assert found.exit_code == 0, found.output
    answer: dict[str, Any] = json.loads(found.stdout)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("columns", [30, 40, 60, 100])
def test_a_comparison_shows_every_epsilon_at_any_width(columns: int) -> None:
    shown = invoke("compare", *RUN, "-d", "1e-5", columns=columns).stdout
    answers = solved("compare", *RUN, "-d", "1e-5")["guarantees"]
    for each in answers:
        assert each["method"] in shown
        if "epsilon" in each:
            assert round_up(each["epsilon"]) in shown
    if columns <= 60:
        assert max(map(len, shown.splitlines()[:12])) <= 60


def test_several_mechanisms_and_a_run_are_accounted_for_together() -> None:
    one = '{"kind": "gaussian", "noise_multiplier": 5}'
    both = solved("epsilon", *RUN, "-m", one, "-m", one, "-d", "1e-5")
    alone = solved("epsilon", *RUN, "-d", "1e-5")
    piped = solved("epsilon", *RUN, "-m", "@-", "-d", "1e-5", text=f"{one}\n{one}\n")
    listed = solved("epsilon", *RUN, "-m", f"[{one}, {one}]", "-d", "1e-5")
    assert alone["epsilon"] < both["epsilon"]
    assert both["mechanism_hash"] == piped["mechanism_hash"] == listed["mechanism_hash"]


OTHER_RUN = {"kind": "dp_sgd", "noise_multiplier": 1.5, "sample_rate": 0.02, "steps": 500}


@pytest.mark.parametrize(
    "options",
    ["-q 0.02 -t 500 -s 1.5", "--sample-rate 0.02 --steps=5e2 -s1.5", "-n 500 -b 10 -e 10 -s 1.5"],
)
def test_another_run_is_given_by_its_options(options: str) -> None:
    found = solved("epsilon", *RUN, "--and", options, "-d", "1e-5")
    same = solved("epsilon", *RUN, "-m", json.dumps(OTHER_RUN), "-d", "1e-5")
    assert found == same


def test_several_other_runs_and_other_releases_count_together() -> None:
    gaussian = '{"kind": "gaussian", "noise_multiplier": 5}'
    given = ["-m", gaussian, "--and", "-q .02 -t 500 -s 1.5", "--and", "-q 0.02 -t 500 -s 1.5"]
    document = json.dumps(OTHER_RUN)
    for command in ("epsilon", "compare"):
        found = solved(command, *RUN, *given, "-d", "1e-5")
        same = solved(command, *RUN, "-m", gaussian, "-m", document, "-m", document, "-d", "1e-5")
        assert found == same
    alone = solved("epsilon", "--and", "-q 0.02 -t 500 -s 1.5", "-d", "1e-5")
    assert alone == solved("epsilon", "-m", document, "-d", "1e-5")


def test_another_run_is_on_the_same_data() -> None:
    sizes = ["-n", "60000", "-b", "600", "-e", "1", "-s", "1.1", "-d", "1e-5"]
    found = solved("epsilon", *sizes, "--and", "-b 300 -e 2 -s 1")
    assert found == solved("epsilon", *sizes, "--and", "-n 60000 -b 300 -e 2 -s 1")


def test_another_run_counts_towards_a_target() -> None:
    target = ["-q", "0.01", "-t", "500", "-E", "2", "-d", "1e-5"]
    found = solved("noise-multiplier", *target, "--and", "-q 0.02 -t 500 -s 1.5")
    assert found == solved("noise-multiplier", *target, "-m", json.dumps(OTHER_RUN))
    assert found["noise_multiplier"] > solved("noise-multiplier", *target)["noise_multiplier"]


def test_noise_for_the_next_run_counts_what_was_released_before(tmp_path: Path) -> None:
    earlier = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 500}
    (tmp_path / "certificate.json").write_text(json.dumps({"mechanism": earlier, "steps": 500}))
    target = ("-q", "0.01", "-E", "2", "-d", "1e-5")
    alone = solved("noise-multiplier", "-t", "1000", *target)["noise_multiplier"]
    after = solved("noise-multiplier", "-t", "1000", *target, "-m", json.dumps(earlier))
    file = f"@{tmp_path}/certificate.json"
    assert after == solved("noise-multiplier", "-t", "1000", *target, "-m", file)
    assert after["noise_multiplier"] > alone
    sigma = str(after["noise_multiplier"])
    run = ("-q", "0.01", "-s", sigma, "-t", "1000")
    together = solved("epsilon", *run, "-m", json.dumps(earlier), "-d", "1e-5")
    assert 1.999 < together["epsilon"] <= 2.0
    steps = solved("steps", "-s", sigma, *target, "-m", file)
    assert 999 <= steps["steps"] <= 1001
    rate = solved("sample-rate", "-s", sigma, "-t", "1000", "-E", "2", "-d", "1e-5", "-m", file)
    assert rate["sample_rate"] == pytest.approx(0.01, rel=1e-3)


def test_a_delta_too_large_for_the_data_is_warned_about() -> None:
    run = ("-n", "1000", "-b", "10", "-s", "1.1", "-t", "10")
    shown = " ".join(invoke("epsilon", *run, "-d", "0.01").stdout.split())
    assert "is not below 1/1000" in shown
    assert "warning" not in invoke("epsilon", *run, "-d", "1e-6").stdout
    found = invoke("epsilon", *run, "-d", "0.01", "--json")
    assert "warning: δ = 0.01 is not below 1/1000" in found.stderr
    json.loads(found.stdout)


def test_whole_numbers_may_have_an_exponent() -> None:
    run = ("-q", "0.01", "-s", "1.1", "-d", "1e-5")
    assert solved("epsilon", *run, "-t", "1e2") == solved("epsilon", *run, "-t", "100")


@pytest.mark.parametrize("command", ["epsilon", "noise-multiplier"])
def test_help_shows_an_example_of_a_mechanism(command: str) -> None:
    shown = " ".join(invoke(command, "--help", columns=200).stdout.split())
    assert '{"kind": "dp_sgd", "noise_multiplier": 1.1' in shown


def test_a_small_delta_is_written_in_one_way() -> None:
    run = ("-q", "0.01", "-s", "1.1", "-t", "10", "-d", "1e-05")
    shown = invoke("epsilon", *run).stdout
    assert ("1e-5" in shown, "1e-05" in shown) == (True, False)
