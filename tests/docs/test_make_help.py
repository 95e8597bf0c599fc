"""`make help` lists every target by subject, and hooks run what `make check` runs."""

from __future__ import annotations

import re
import subprocess

import yaml

from tests.support.pages import ROOT


def test_make_help_lists_every_target_under_a_subject() -> None:
    source = (ROOT / "Makefile").read_text()
    printed = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    targets = set(re.findall(r"^([a-z-]+):", source, re.MULTILINE))
    assert set(re.findall(r"^  make ([a-z-]+) ", printed, re.MULTILINE)) == targets
    subjects = re.findall(r"^##@ (.+)$", source, re.MULTILINE)
    assert re.findall(r"^(\S.*)$", printed, re.MULTILINE) == subjects


def test_every_hook_before_a_commit_is_part_of_make_check() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    check = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    for hook in hooks:
        program = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert f"$(BIN)/{program}" in check, hook["id"]
