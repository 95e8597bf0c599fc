"""The table of old suites names the tiers in which each promise is shown now."""

from __future__ import annotations

import re

import pytest

from tests.support.pages import ROOT
from tests.support.tiers import TIERS_BY_FILE

NUMBERS = {"": "1", "slow": "2", "browser": "2", "nightly": "3"}
FILE = re.compile(r"`(?:\w+/)*(test_\w+)(?:\.py)?`")


def rows() -> list[tuple[list[str], set[str]]]:
    """Return each row's files of today, and the tiers that it names."""
    found = []
    for row in re.findall(r"^\| (.+) \| (.+) \|$", (ROOT / "tests/README.md").read_text(), re.M):
        old, now = row
        files = FILE.findall(now) or FILE.findall(old)
        tiers = {tier for group in re.findall(r"\(([123](?:, [123])*)\)", now) for tier in group}
        if files and (tiers := tiers - set(", ")):
            found.append((files, tiers))
    return found


@pytest.mark.slow
def test_the_tiers_of_old_suites_are_those_of_their_files(request: pytest.FixtureRequest) -> None:
    """Every tier that a row names has a test in one of its files, which exist."""
    by_name = {
        name.rpartition("/")[2].removesuffix(".py"): {NUMBERS[each] for each in tiers}
        for name, tiers in request.config.stash[TIERS_BY_FILE].items()
    }
    if len(by_name) < 200:
        pytest.skip("only a run of all tests knows their tiers")
    assert len(rows()) > 30
    findings = [
        (files, sorted(tiers - set().union(*(by_name.get(each, set()) for each in files))))
        for files, tiers in rows()
        if any(each not in by_name for each in files)
        or not tiers <= set().union(*(by_name[each] for each in files))
    ]
    assert findings == [], str(findings)
