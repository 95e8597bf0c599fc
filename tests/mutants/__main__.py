"""Apply each mutant of `table.toml` to a copy of the packages, and run the test that must find it.

`python -m tests.mutants [--only WORDS] [--write]` prints a table of what was found by which test,
in the first tier that finds it; `--write` writes its rows to docs/mutants.md. It goes on after an
error and ends with a list of them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.page_parts import DOCS, write_part

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = Path(__file__).with_name("table.toml")
PAGE: Final = DOCS / "mutants.md"
COPIED: Final = ("accountant_service", "command_words", "training_client", "tests")
TIERS: Final = {1: "not slow and not browser and not nightly", 2: "slow", 3: "nightly"}
TIMEOUT: Final = 300.0
NO_TESTS: Final = 5  # pytest's exit code
HEADER: Final = "| file | broken | found by | tier | s |\n|---|---|---|---|---|\n"


@dataclass(frozen=True)
class Mutant:
    """A text of one file, the text that replaces it, and the test that must then fail."""

    path: str
    test: str
    text: str
    replacement: str
    broken: str

    @property
    def begin_of_row(self) -> str:
        """The mutant's row of the table without the tier and the seconds, which a run tells."""
        file, function = self.test.split("::")
        return f"| `{self.path}` | {self.broken} | `{Path(file).name}::{function}` | "


def read_table() -> list[Mutant]:
    """Return all mutants of the table."""
    return [
        Mutant(path, test, *mutant)
        for path, tests in tomllib.loads(TABLE.read_text()).items()
        for test, mutants in tests.items()
        for mutant in mutants
    ]


@contextmanager
def copied_repository() -> Iterator[Path]:
    """Yield a folder with copies of the packages and the tests, and links to everything else."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for each in ROOT.iterdir():
            if each.name in COPIED:
                shutil.copytree(each, copy / each.name)
            elif not each.name.startswith(".git"):
                (copy / each.name).symlink_to(each)
        yield copy


def run_tests(copy: Path, tier: int, tests: Iterable[str]) -> tuple[int, str, float]:
    """Run tests in the copy; return the exit code, the output and the seconds."""
    options = ["-q", "-rfEp", "--tb=short", "-p", "no:cacheprovider", "-m", TIERS[tier]]
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",  # compiled modules of one mutant must not serve another
        "COLUMNS": "1000",
    }
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return 124, f"more than {TIMEOUT:.0f} s", TIMEOUT
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start


def check_without_mutants(copy: Path, mutants: list[Mutant]) -> Iterator[str]:
    """Yield an error for each test that does not pass without any mutant."""
    tests = sorted({each.test for each in mutants})
    output = "".join(run_tests(copy, tier, tests)[1] for tier in TIERS)
    for test in tests:
        passed, failed = (
            re.search(rf"^{word} {re.escape(test)}(\[| |::|$)", output, re.M)
            for word in ("PASSED", "(FAILED|ERROR)")
        )
        if failed or not passed:
            yield f"{test}: does not pass without a mutant\n{output[-2000:]}"


def find_mutant(copy: Path, mutant: Mutant) -> tuple[str, str]:
    """Run the mutant's test with it, tier by tier; return the rest of its row, and an error."""
    path = copy / mutant.path
    genuine = path.read_text()
    if genuine.count(mutant.text) != 1:
        return "", f"the text occurs {genuine.count(mutant.text)} times"
    path.write_text(genuine.replace(mutant.text, mutant.replacement))
    try:
        for tier in TIERS:
            code, output, seconds = run_tests(copy, tier, [mutant.test])
            if code not in (0, NO_TESTS):
                break
        else:
            return "", "survives"
    finally:
        path.write_text(genuine)
    # an error of another kind might come from a text that is not valid there
    failed = re.search(r"^FAILED .* - (assert\b|AssertionError|Failed)", output, re.M)
    # Hypothesis shows several failures as a group, whose members stand beside a bar
    of_group = re.findall(r"^ +\| (\w+Error)\b", output, re.M)
    if code != 1 or not (failed or set(of_group) == {"AssertionError"}):
        return "", f"ends otherwise than by a failed assertion\n{output[-2000:]}"
    return f"{tier} | {seconds:.0f} |\n", ""


def run_mutants(mutants: list[Mutant]) -> tuple[dict[str, str], list[str]]:
    """Run the mutants and print a table; return what each row ends with, and all errors."""
    ends = {}
    print(HEADER, end="")
    with copied_repository() as copy:
        errors = list(check_without_mutants(copy, mutants))
        for mutant in mutants:
            ends[mutant.begin_of_row], error = find_mutant(copy, mutant)
            print(mutant.begin_of_row, ends[mutant.begin_of_row] or error, sep="", flush=True)
            if error:
                errors.append(f"{mutant.path}, {mutant.broken}: {error}")
    return ends, errors


def read_page() -> dict[str, str]:
    """Return what each row of the page ends with: the tier and the seconds."""
    lines = PAGE.read_text().splitlines(keepends=True)
    rows = [re.match(r"(\| `.*` \| )(\d \| \d+ \|\n)", each) for each in lines]
    return {row[1]: row[2] for row in rows if row}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="only rows that contain these words")
    parser.add_argument("--write", action="store_true", help="write the table into docs/mutants.md")
    options = parser.parse_args()
    table = [each for each in read_table() if options.only in each.begin_of_row]
    ends, errors = run_mutants(table)
    if options.write and not errors:
        ends = read_page() | ends
        begins = [each.begin_of_row for each in read_table()]
        write_part(PAGE, "mutants", HEADER + "".join(each + ends[each] for each in begins))
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
