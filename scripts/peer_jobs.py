"""Do the same jobs with other libraries: run the scripts of `examples/jobs`, and count their lines.

python -m scripts.peer_jobs --python PYTHON          # runs all, and prints the table
python -m scripts.peer_jobs --python PYTHON --write  # writes docs/accountants/jobs.md, too

PYTHON is the interpreter of an environment with opacus, dp_accounting, opendp and riskcal; by
default this one, where those that are not installed are left as they were.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "examples" / "jobs"
PAGE: Final = ROOT / "docs" / "accountants" / "jobs.md"
DATA: Final = ROOT / "docs" / "accountants" / "jobs.jsonl"
JOBS: Final = {
    "epsilon": "ε of 10 epochs: 60 000 records, batches of 600, σ = 1.1, δ = 1e-5",
    "noise": "σ of the same run for ε = 2",
    "risk": "σ for a true-positive rate of at most 1 % at a false-positive rate of 0.1 %",
    "earlier_release": "ε of the run and of a statistic with σ = 4 before it",
    "one_release": "σ of one Gaussian release for ε = 1 at δ = 1e-5",
    "budget": "two runs of 3000 steps within ε = 3, each from a process of its own",
}
LIBRARIES: Final = ("accountant", "opacus", "dp_accounting", "opendp", "riskcal")
PACKAGES: Final = {"dp_accounting": "dp-accounting"}
_ANSWERS: Final = ("noise_multiplier", "epsilon", "code")  # of our programs, in this order
_MARKS: Final = ("<!-- begin table -->\n", "<!-- end table -->\n")
_VERSION: Final = "from importlib.metadata import version; print(version({!r}))"


@dataclass(frozen=True, slots=True)
class Result:
    """A job done with a library.

    Attributes:
        job: a folder of `examples/jobs`.
        library: the name of the script there.
        version: the library's; empty for this project.
        lines: lines of code, without blank ones and comments.
        calls: calls of functions and commands.
        answer: the last that the script printed.
        seconds: CPU seconds, the start of programs included.
    """

    job: str
    library: str
    version: str
    lines: int
    calls: int
    answer: str
    seconds: float


def find_script(job: str, library: str) -> Path | None:
    """Return the script of a job with a library; None if the library cannot do it."""
    found = [file for file in (FOLDER / job).iterdir() if file.stem == f"with_{library}"]
    return found[0] if found else None


def count_lines(script: Path) -> int:
    """Return the number of lines that are neither blank nor comments."""
    lines = (line.strip() for line in script.read_text().splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def count_calls(script: Path) -> int:
    """Return the number of calls in a script: of functions, or of `accountant`."""
    text = script.read_text()
    if script.suffix == ".sh":
        return len(re.findall(r"^accountant ", text, re.MULTILINE))
    called = (each.func for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call))
    return sum(getattr(each, "id", "") not in ("print", "range") for each in called)


def run_script(
    script: Path, python: Path, programs: Path = Path(sys.executable).parent
) -> tuple[str, float]:
    """Run a script in an empty folder; return what it printed, and its CPU seconds.

    Args:
        script: of Python or of bash.
        python: the interpreter of the other libraries.
        programs: the folder with `accountant`.
    """
    program = ["bash", "-euo", "pipefail"] if script.suffix == ".sh" else [str(python)]
    kept = {name: value for name, value in os.environ.items() if name[:11] != "ACCOUNTANT_"}
    path = f"{programs}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        before = os.times()
        done = subprocess.run(
            [*program, str(script)],
            cwd=folder,
            env=kept | {"PATH": path, "PYTHONPATH": str(ROOT) if script.suffix == ".sh" else ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        used = os.times()
    if done.returncode:
        raise RuntimeError(f"{script}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    seconds = sum(used[2:4]) - sum(before[2:4])
    return done.stdout, seconds


def read_answer(printed: str) -> str:
    """Return the answer of a script: a number to six digits, or the code of a refusal."""
    last = printed.strip().splitlines()[-1]
    try:
        found = json.loads(last)
    except ValueError:
        return last
    if isinstance(found, dict):
        found = next(found[name] for name in _ANSWERS if name in found)
    return found if isinstance(found, str) else f"{found:.6g}"


def read_version(library: str, python: Path) -> str | None:
    """Return a library's version in an environment; None if it is not installed."""
    if library == "accountant":
        return ""
    name = PACKAGES.get(library, library)
    if python == Path(sys.executable):
        try:
            return version(name)
        except PackageNotFoundError:
            return None
    done = subprocess.run(
        [python, "-c", _VERSION.format(name)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def run_jobs(python: Path) -> Iterator[Result]:
    """Yield the results of the scripts whose library is installed."""
    for job in JOBS:
        for library in LIBRARIES:
            script, installed = find_script(job, library), read_version(library, python)
            if script is None or installed is None:
                continue
            printed, seconds = run_script(script, python)
            answer, lines = read_answer(printed), count_lines(script)
            calls = count_calls(script)
            yield Result(job, library, installed, lines, calls, answer, round(seconds, 1))


def read_results() -> list[Result]:
    """Return the results of the data file."""
    return [Result(**json.loads(line)) for line in DATA.read_text().splitlines()]


def render(results: list[Result]) -> str:
    """Return the table of results."""
    found = {(each.job, each.library): each for each in results}
    versions = {each.library: each.version for each in results}
    heads = [f"{each} {versions.get(each, '')}".strip() for each in LIBRARIES]
    text = f"| job | {' | '.join(heads)} |\n{'|---' * (1 + len(heads))}|\n"
    for job, title in JOBS.items():
        cells = [_render_cell(found.get((job, library))) for library in LIBRARIES]
        text += f"| {title} | {' | '.join(cells)} |\n"
    return text


def _render_cell(result: Result | None) -> str:
    """Return a cell: lines, calls, seconds and answer."""
    if result is None:
        return "–"
    lines = f"{result.lines} line{'s' * (result.lines != 1)}"
    calls = f"{result.calls} call{'s' * (result.calls != 1)}"
    return f"{lines}, {calls}, {result.seconds} s: {result.answer}"


def main() -> None:
    """Run the jobs, print the table, and write it on request."""
    given = sys.argv[1:]
    named = given[given.index("--python") + 1] if "--python" in given else sys.executable
    started = time.monotonic()
    results = list(run_jobs(Path(named)))
    print(render(results))
    print(f"{time.monotonic() - started:.0f} seconds", file=sys.stderr)
    if "--write" not in given:
        return
    DATA.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in results))
    begin, end = _MARKS
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    table = f"{begin}\n{render(results)}\n{end}"
    PAGE.write_text(pattern.sub(lambda _: table, PAGE.read_text()))


if __name__ == "__main__":
    main()
