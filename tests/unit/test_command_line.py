"""The command line starts quickly, and lists each command as the command describes itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from accountant_service import __version__, cli

GROUP = get_command(cli.app)
assert isinstance(GROUP, TyperGroup)


def run_python(code: str) -> str:
    """Return what a new Python process prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", list(GROUP.commands))
def test_the_list_of_commands_says_what_each_command_says(name: str) -> None:
    listed, command = GROUP.commands[name], cli.load_command(name)
    assert listed.help == (command.help or "").split("\n")[0]
    assert command.name == name


def test_help_and_version_import_no_arrays_and_no_server() -> None:
    for option in ("--help", "--version"):
        code = f"""
import sys
from typer.testing import CliRunner
from accountant_service import cli
assert CliRunner().invoke(cli.app, [{option!r}]).exit_code == 0
print(sorted({{"numpy", "scipy", "sqlalchemy", "fastapi", "pydantic"}} & set(sys.modules)))
"""
        assert run_python(code) == "[]\n", option


def test_the_version_is_the_package_s() -> None:
    found = CliRunner().invoke(cli.app, ["--version"])
    assert (found.exit_code, found.stdout) == (0, f"accountant {__version__}\n")


def test_computations_are_imported_while_the_server_is_imported() -> None:
    """Else the first reservation after a start waits for more than a second."""
    code = """
import sys
from typer.testing import CliRunner
from accountant_service import cli
from accountant_service.fork_server import ForkServer

def start(_):
    print(sorted({"numpy", "fastapi", "uvicorn"} & set(sys.modules)))
    raise SystemExit(0)

ForkServer.start = start
print(CliRunner().invoke(cli.app, ["serve", "--port", "1234"]).stdout)
"""
    assert run_python(code).splitlines()[0] == "[]"
