"""`accountant-train` starts without PyTorch; both programs complete what is typed."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from training_client.lab.cli import app, load_command

PROGRAMS = Path(sys.executable).parent
GROUP = get_command(app)
assert isinstance(GROUP, TyperGroup)
CPU_SECONDS_MAX = 0.3
HEAVY = {"torch", "numpy", "httpx", "numba"}


def used_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_help_imports_no_package_of_the_extra_and_is_quick() -> None:
    code = f"""
import sys
from typer.testing import CliRunner
from training_client.lab import cli
shown = CliRunner().invoke(cli.app, ["--help"])
print(shown.exit_code, sorted({HEAVY} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 []\n"
    seconds = []
    for _ in range(3):  # other tests share the CPU's caches meanwhile
        before = used_cpu_seconds()
        subprocess.run([PROGRAMS / "accountant-train", "--help"], check=True, capture_output=True)
        seconds.append(used_cpu_seconds() - before)
    assert min(seconds) < 1.5 * CPU_SECONDS_MAX


@pytest.mark.slow
def test_the_list_of_commands_says_what_each_command_says() -> None:
    for name, listed in GROUP.commands.items():
        command = load_command(name)
        text = " ".join((command.help or "").split("\n\n")[0].split())
        assert (listed.help, name) == (text, command.name)


def complete(shell: str, program: str, typed: str) -> str:
    """Return what a program answers to a shell that asks how a line goes on."""
    words = {
        "bash": {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))},
        "zsh": {"_TYPER_COMPLETE_ARGS": typed},
        "fish": {"_TYPER_COMPLETE_ARGS": typed, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    asked = {f"_{program.replace('-', '_').upper()}_COMPLETE": f"complete_{shell}"}
    done = subprocess.run(
        [PROGRAMS / program], env=os.environ | words | asked, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_and_options_are_completed(shell: str) -> None:
    assert "epsilon" in complete(shell, "accountant", "accountant ep")
    assert "together" in complete(shell, "accountant-train", "accountant-train to")


@pytest.mark.slow
def test_bash_completes_the_options_of_a_command_of_a_group() -> None:
    assert "--noise-multiplier" in complete("bash", "accountant", "accountant epsilon --noi")
    assert "--scope" in complete("bash", "accountant", "accountant keys create --sc")
    assert "--epsilon" in complete("bash", "accountant-train", "accountant-train run --eps")
    bash = shutil.which("bash")
    assert bash is not None
    script = (
        "source <(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 accountant --show-completion bash)"
    )
    path = f"{PROGRAMS}:{os.environ['PATH']}"
    line = f"{script}; complete -p accountant"
    done = subprocess.run(
        [bash, "-c", line], env=os.environ | {"PATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "accountant" in done.stdout
