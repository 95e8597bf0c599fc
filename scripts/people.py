"""Do the job of each person in `examples/people` in an empty folder, and count its commands.

python -m scripts.people                     # all of them, with their output
python -m scripts.people researcher auditor  # these
python -m scripts.people --write             # all; write the table into docs/how-to/by-role.md
python -m scripts.people --install researcher  # with the wheel in a new environment, timed as well
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.page_parts import DOCS, write_part

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "examples" / "people"
PAGE: Final = DOCS / "how-to" / "by-role.md"
PEOPLE: Final = (
    "researcher",
    "engineer",
    "privacy_officer",
    "training_engineer",
    "operator",
    "auditor",
)
SECONDS_MAX: Final = 300.0  # for a job
# The two programs are counted, and the service listens on a free port. All else is the script's.
_PRELUDE: Final = """
set -euo pipefail
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
accountant() {
    echo "$*" >> "$CALLS"
    if [ "$1" = serve ]; then exec env accountant "$@" --port "$PORT"; fi
    command accountant "$@"
}
accountant-train() {
    echo "train $*" >> "$CALLS"
    command accountant-train "$@"
}
"""


@dataclass(frozen=True, slots=True)
class Job:
    """One person's job as it was done: commands, time and result.

    Attributes:
        person: whose job it is.
        commands: different calls of `accountant` and `accountant-train`; waiting repeats one.
        seconds: from the first command to the last.
        cpu_seconds: those of all programs together that have ended.
        exit_code: of the script.
        output: what the commands printed.
    """

    person: str
    commands: int
    seconds: float
    cpu_seconds: float
    exit_code: int
    output: str


def read_purpose(person: str) -> str:
    """Return what a person's job is, from the first line of the script."""
    return (FOLDER / f"{person}.sh").read_text().splitlines()[0].removeprefix("# ")


def do_job(person: str, programs: Path = Path(sys.executable).parent) -> Job:
    """Run the script of a person in an empty folder, and return the result.

    Args:
        person: one of `PEOPLE`.
        programs: the folder with the programs, before those of the PATH.
    """
    with socket.socket() as probe, tempfile.TemporaryDirectory() as outside:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        empty, calls = Path(outside, "empty"), Path(outside, "calls")
        empty.mkdir()
        calls.touch()
        kept = {name: value for name, value in os.environ.items() if name[:11] != "ACCOUNTANT_"}
        started, used = time.monotonic(), _read_cpu_seconds()
        done = subprocess.run(
            ["bash", "-c", f"{_PRELUDE}. {FOLDER / person}.sh"],
            cwd=empty,
            env=kept
            | {
                "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "NO_COLOR": "1",
                "CALLS": str(calls),
                "PORT": str(port),
                "ACCOUNTANT_SERVICE": f"http://127.0.0.1:{port}",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SECONDS_MAX,
        )
        seconds, cpu_seconds = time.monotonic() - started, _read_cpu_seconds() - used
        commands = len(set(calls.read_text().splitlines()))
    return Job(person, commands, seconds, cpu_seconds, done.returncode, done.stdout)


def install(folder: Path) -> str:
    """Build the wheel, install it with pip in a new environment; return how long pip took.

    Args:
        folder: of the environment.
    """
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    started = time.monotonic()
    venv.create(folder / "environment", with_pip=True)
    pip = [folder / "environment/bin/python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, next(folder.glob("*.whl"))], check=True)
    seconds = time.monotonic() - started
    files = [each for each in folder.rglob("*") if each.is_file() and not each.is_symlink()]
    megabytes = sum(each.stat().st_size for each in files) / 1e6
    return f"installed in {seconds:.0f} seconds: {megabytes:.0f} MB"


def _read_cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def render_row(job: Job) -> str:
    """Return the Markdown table row of a job."""
    purpose = read_purpose(job.person)
    figures = f"{job.commands} | {job.seconds:.0f} | {job.cpu_seconds:.0f}"
    return f"| {purpose} | `{job.person}.sh` | {figures} |"


def write_table(jobs: list[Job]) -> None:
    """Write the table of jobs into the documentation page."""
    head = "| job | script | commands | seconds | CPU seconds |\n|---|---|---|---|---|\n"
    write_part(PAGE, "table", head + "".join(f"{render_row(job)}\n" for job in jobs))


def read_arguments() -> argparse.Namespace:
    """Read the names of people and `--write` from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.people",
        description="Do the jobs of people in an empty folder, and count their commands.",
    )
    people = ", ".join(PEOPLE)
    parser.add_argument("people", nargs="*", metavar="PERSON", help=f"of {people}; all by default")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    parser.add_argument(
        "--install", action="store_true",
        help="install the wheel in a new environment first, and use its programs; trains nothing",
    )  # fmt: skip
    found = parser.parse_args()
    unknown = [each for each in found.people if each not in PEOPLE]
    if unknown:
        parser.error(f"nobody is called {unknown[0]!r}: choose from {people}")
    if found.install and (found.write or not found.people):
        parser.error("--install needs the names of people, and writes no table")
    if found.write and found.people:
        parser.error("--write writes the rows of all people: leave out the names")
    return found


def main() -> int:
    """Do the jobs, print or write the table, and return 1 if a job failed."""
    arguments = read_arguments()
    jobs = []
    programs = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        if arguments.install:
            print(install(Path(folder)), flush=True)
            programs = Path(folder, "environment/bin")
        for person in arguments.people or PEOPLE:
            job = do_job(person, programs)
            print(f"# {person}\n{job.output}\n{render_row(job)}\n", flush=True)
            jobs.append(job)
    failed = [job.person for job in jobs if job.exit_code]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    if arguments.write:
        write_table(jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
