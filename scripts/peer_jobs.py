"""Do the same jobs with this project and with other libraries; count their steps and lines.

python -m scripts.peer_jobs                           # jobs of the libraries that are installed
python -m scripts.peer_jobs --python PYTHON           # other libraries from another environment
python -m scripts.peer_jobs --python PYTHON --write   # and write the tables into docs/peers.md
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Final

from scripts.page_parts import DOCS, write_part

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "examples" / "peers"
PAGE: Final = DOCS / "peers.md"
SECONDS_MAX: Final = 1200.0  # for a script; riskcal plans for minutes
OURS: Final = "ours"
LIBRARIES: Final = {  # the name of each distribution, and of its column
    "opacus": "Opacus",
    "dp-accounting": "dp_accounting",
    "opendp": "OpenDP",
    "riskcal": "riskcal",
}
JOBS: Final = {
    "epsilon": "ε of a DP-SGD run",
    "noise": "the noise for ε = 2",
    "advantage": "the noise for a membership advantage of 0.1",
    "two_runs": "ε of two runs on the same data",
    "unsampled": "ε of 100 Gaussian sums without sampling",
    "plan": "which batch size, at ε = 2 and 20 epochs",
    "budget": "a budget that refuses what does not fit",
    "report": "a report to sign, and a certificate",
}
_NUMBERS: Final = ("epsilon", "noise", "advantage", "two_runs", "unsampled")
_PROGRAM: Final = "accountant "  # begins a command of a shell script


@dataclass(frozen=True, slots=True)
class Count:
    """The size of a script.

    Attributes:
        steps: statements that are not imports, or commands of this project's program.
        lines: those that are not empty and no comment.
    """

    steps: int
    lines: int


def find_script(job: str, library: str) -> Path | None:
    """Return the script that does a job with a library; None if the library cannot do it."""
    name = OURS if library == OURS else f"with_{library.replace('-', '_')}"
    return next(iter((FOLDER / job).glob(f"{name}.*")), None)


def count(script: Path) -> Count:
    """Count the steps and the lines of a script."""
    text = script.read_text()
    lines = [line for line in text.splitlines() if line.strip() and line.strip()[0] != "#"]
    if script.suffix == ".sh":
        return Count(sum(_PROGRAM in line for line in lines), len(lines))
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    steps = [each for each in statements if not isinstance(each, ast.Import | ast.ImportFrom)]
    return Count(len(steps), len(lines))


def run(script: Path, python: str) -> str:
    """Run a script in an empty folder, and return what it prints.

    Raises:
        CalledProcessError: it failed.
    """
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name[:11] != "ACCOUNTANT_"}
    command = ["bash", "-e", str(script)] if script.suffix == ".sh" else [python, str(script)]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            command,
            cwd=folder,
            env=kept | {"PATH": programs, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if script.suffix == ".sh" else subprocess.DEVNULL,
            text=True,
            check=True,
            timeout=SECONDS_MAX,
        ).stdout


def find_program(name: str) -> str:
    """Return the absolute path of a program: the scripts run in another folder.

    Raises:
        ArgumentTypeError: there is no such program.
    """
    found = shutil.which(name)
    if found is None:
        raise argparse.ArgumentTypeError(f"there is no program {name!r}")
    return str(Path(found).absolute())  # not resolved: a link leads out of an environment


def find_versions(python: str) -> dict[str, str]:
    """Return the versions of those libraries that an environment has."""
    code = """
import importlib.metadata as metadata, sys
for name in sys.argv[1:]:
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
"""
    command = [python, "-c", code, *LIBRARIES]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(line.split(" ", 1) for line in found.splitlines())


def read_number(output: str) -> str:
    """Return the first number of an output, rounded up to six digits: it is an upper bound."""
    found = re.search(r"\d+\.\d+", output)
    if found is None:
        return "–"
    six_digits = Context(prec=6, rounding=ROUND_CEILING)
    return f"{six_digits.create_decimal(found[0]).normalize():f}"


def render_counts() -> str:
    """Return the table of steps and lines."""
    head = ["job", "this project", *LIBRARIES.values()]
    rows = [[title, *map(_render_count, [job] * 5, [OURS, *LIBRARIES])] for job, title in
            JOBS.items()]  # fmt: skip
    return _render_table(head, rows)


def _render_count(job: str, library: str) -> str:
    """Return the cell of a job and a library."""
    script = find_script(job, library)
    if script is None:
        return "no"
    found = count(script)
    return f"{found.steps} / {found.lines}"


def render_answers(outputs: Mapping[tuple[str, str], str], versions: Mapping[str, str]) -> str:
    """Return the table of the numbers that the scripts print."""
    names = [f"{title} {versions.get(name, '')}".strip() for name, title in LIBRARIES.items()]
    rows = [
        [JOBS[job], *(read_number(outputs.get((job, each), "")) for each in (OURS, *LIBRARIES))]
        for job in _NUMBERS
    ]
    return _render_table(["job", "this project", *names], rows)


def _render_table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    rule = ["---"] * len(head)
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, rule, *rows])


def run_jobs(python: str) -> dict[tuple[str, str], str]:
    """Run the scripts of all libraries that are installed; return what each prints."""
    installed = find_versions(python)
    outputs = {}
    for job in JOBS:
        for library in (OURS, *LIBRARIES):
            script = find_script(job, library)
            if script is None or (library != OURS and library not in installed):
                continue
            outputs[job, library] = run(script, sys.executable if library == OURS else python)
            print(f"# {script.relative_to(ROOT)}\n{outputs[job, library]}", flush=True)
    return outputs


def main() -> None:
    """Do the jobs, print the tables, and write them if asked to."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    options.add_argument(
        "--python", type=find_program, default=sys.executable, help="with the other libraries"
    )
    options.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    asked = options.parse_args()
    versions = find_versions(asked.python)
    tables = f"\n{render_counts()}\n{render_answers(run_jobs(asked.python), versions)}\n"
    print(tables)
    missing = LIBRARIES.keys() - versions
    if missing:
        print(f"not installed: {', '.join(sorted(missing))}", file=sys.stderr)
    if asked.write:
        if missing:
            sys.exit("install them to write the tables")
        write_part(PAGE, "tables", tables)


if __name__ == "__main__":
    main()
