"""The worked commits of CONTRIBUTING.md apply to this version, and what they add can be used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, copy_repository

DIFFS = re.findall(
    r"^```diff\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL
)
USES = "tests/docs/use_of_examples.py"
SUITES = {  # what the repository's own tests require of the things that are added
    "unsampled_gaussian": "tests/conformance/test_accountants.py",
    "dp_adamax": "tests/conformance/test_optimizers.py",
    "concentrated_gaussian": "tests/unit/test_mechanisms.py",
    "names_the_methods": "tests/unit/test_command_line.py",
    "migrations_and_create_all": "tests/integration/test_ledger.py",
}


@pytest.fixture(scope="module")
def changed_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("contributing") / "repository"
    copy_repository(copy)
    for diff in DIFFS:
        apply = ["git", "apply", "-C1"]
        done = subprocess.run(apply, cwd=copy, input=diff, text=True, capture_output=True)
        assert done.returncode == 0, f"{done.stderr}\n{diff}"
    write = [sys.executable, "-m", "scripts.question_functions", "--write"]
    subprocess.run(write, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, check=True)
    return copy


def test_there_is_one_commit_for_each_kind_of_change() -> None:
    assert len(DIFFS) == 6


def test_a_change_is_made_in_one_place() -> None:
    """A kind that equals no other needs its law as well, and a column the rule that sets it."""
    for diff in DIFFS:
        touched = re.findall(r"^\+\+\+ b/(\S+\.py)", diff, re.MULTILINE)
        added = "--- /dev/null" in diff  # and it is registered
        is_column = "op.add_column" in diff  # which a migration adds
        assert len(touched) == 1 + added + is_column, touched


@pytest.mark.slow
def test_the_commits_are_formatted_as_the_rest(changed_copy: Path) -> None:
    program = Path(sys.executable).parent / "ruff"
    for command in (["check"], ["format", "--check"]):
        call = [program, *command, "accountant_service", "command_words", "training_client"]
        subprocess.run(call, cwd=changed_copy, check=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_the_commits_add_can_be_used(changed_copy: Path) -> None:
    chosen = " or ".join((Path(USES).stem, *SUITES))
    command = [sys.executable, "-m", "pytest", "-v", "-k", chosen, "-m", "not slow and not nightly"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", USES, *SUITES.values()],
        cwd=changed_copy,
        env=os.environ | {"PYTHONPATH": str(changed_copy), "COLUMNS": "200"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    for name, suite in SUITES.items():
        assert re.search(rf"^{suite}::.*{name}.* PASSED", done.stdout, re.MULTILINE), name
