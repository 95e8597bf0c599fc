"""The tiers of the tests: the CPU time that a test may take in each, and the seed of the night.

A test's marker is its tier: none for `make test`, `slow` and `browser` for CI, `nightly` for the
night. `spread(first=4, second=20)` is for a test with many cases: 4 stay in the first tier and 20
in the second, spread evenly over the list, and the others run at night. The summary says what all
tests took, and which took more than their tier allows. A night that is interrupted goes on where it
was: with `--night-log` each finished test is a line of a file, and those that the file says passed
under the same seed are not run again.
"""

from __future__ import annotations

import datetime
import json
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# CPU seconds of one test with its fixtures and the processes that it ended, on a quick machine
LIMITS = {"nightly": 1800.0, "slow": 20.0, "browser": 20.0, "": 1.5}
FIRST_TIER = 360.0  # CPU seconds of all tests of the first tier
_REASON_LENGTH = 4000  # the last characters of a failure that the night's log keeps
_STARTED = pytest.StashKey[float]()
_PASSED = pytest.StashKey[set[str]]()
TIERS_BY_FILE = pytest.StashKey[dict[str, set[str]]]()  # of all collected tests


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the night's seed and its log."""
    today = int(f"{datetime.datetime.now(tz=datetime.UTC):%Y%m%d}")
    parser.addoption(
        "--night-seed", type=int, default=today, help="of the night's random cases (default: date)"
    )
    parser.addoption(
        "--night-log", type=Path, help="a file of finished tests: those that passed are not rerun"
    )


@pytest.fixture(scope="session")
def night_seed(request: pytest.FixtureRequest) -> int:
    """The seed of random cases of the night; the date, or `--night-seed`."""
    return int(request.config.getoption("--night-seed"))


def tier_of(item: pytest.Item) -> str:
    """Return the marker that decides in which tier a test runs."""
    return next((tier for tier in LIMITS if tier and item.get_closest_marker(tier)), "")


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note when a test starts."""
    item.stash[_STARTED] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Put a test's CPU time into its last report, which comes from any worker to the summary."""
    report = yield
    if report.when == "teardown":
        spent = cpu_seconds() - item.stash[_STARTED]
        report.user_properties.append(("cpu", (tier_of(item), spent)))
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Collect the CPU times where the summary is printed, and read what an earlier run finished."""
    seed = config.getoption("--night-seed")
    log = config.getoption("--night-log")
    config.pluginmanager.register(_Sums(seed))
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        config.stash[_PASSED] = set(config.workerinput["passed"])
    elif log:
        config.stash[_PASSED] = _passed_tests(log, seed)
        config.pluginmanager.register(_Log(log, seed))


def choose_evenly(count: int, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return `count` of the items, spread evenly over the list, or all if there are no more."""
    return [items[len(items) * at // count] for at in range(count)] if count < len(items) else items


def _spread_cases(items: list[pytest.Item]) -> None:
    """Move cases of the tests that say so to the next tier and the night."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("spread"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        marker = found[0].get_closest_marker("spread")
        assert marker is not None
        for name, tier, later in (("first", "", "slow"), ("second", "slow", "nightly")):
            here = [each for each in found if tier_of(each) == tier]
            kept = choose_evenly(marker.kwargs.get(name, len(here)), here)
            for each in here:
                if each not in kept:
                    each.add_marker(later)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give all workers the same tests, also one that starts when others have finished some."""
    node.workerinput["passed"] = sorted(node.config.stash.get(_PASSED, set()))


@pytest.hookimpl(tryfirst=True)  # before pytest looks at markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give cases their tiers, and leave out what passed before the night was interrupted."""
    _spread_cases(items)
    tiers = config.stash[TIERS_BY_FILE] = defaultdict(set)
    for each in items:
        tiers[each.nodeid.partition("::")[0]].add(tier_of(each))
        if tier_of(each) == "nightly" and not each.get_closest_marker("timeout"):
            each.add_marker(pytest.mark.timeout(2 * LIMITS["nightly"]))
    passed = config.stash.get(_PASSED, set())
    left_out = [each for each in items if each.nodeid in passed]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [each for each in items if each.nodeid not in passed]


def _passed_tests(log: Path, seed: int) -> set[str]:
    """Return the tests whose last line says that they passed under a seed."""
    lines = log.read_text().splitlines() if log.exists() else []
    last = {each["test"]: each for each in map(json.loads, lines) if each["seed"] == seed}
    return {name for name, each in last.items() if each["outcome"] == "passed"}


class _Log:
    """A file that gets a line when a test has finished."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path, self._seed = path, seed
        self._outcomes: dict[str, str] = {}
        self._reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the worst outcome of a test's phases, and write it after the last."""
        outcome = self._outcomes.get(report.nodeid, "passed")
        if report.outcome != "passed" and outcome != "failed":
            self._outcomes[report.nodeid] = outcome = report.outcome
            self._reasons[report.nodeid] = report.longreprtext[-_REASON_LENGTH:]
        if report.when != "teardown":
            return
        cpu: tuple[str, float] = dict(report.user_properties).get("cpu", ("", 0.0))
        line = {"test": report.nodeid, "outcome": outcome, "cpu_s": round(cpu[1], 1)}
        if outcome == "failed":
            line["reason"] = self._reasons[report.nodeid]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line | {"seed": self._seed}) + "\n")


class _Sums:
    """The CPU time of each test, and their summary."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._spent: dict[str, tuple[str, float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what a test took."""
        spent = dict(report.user_properties).get("cpu")
        if spent:
            self._spent[report.nodeid] = spent

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the sum, the tests above their tier's limit, and how to repeat a night."""
        tests = self._spent.items()
        above = sorted((-spent, name) for name, (tier, spent) in tests if spent > LIMITS[tier])
        terminalreporter.section("CPU time")
        total = sum(spent for _, spent in self._spent.values())
        is_first = {tier for tier, _ in self._spent.values()} == {""}
        above_all = f", more than {FIRST_TIER:.0f}" if is_first and total > FIRST_TIER else ""
        terminalreporter.line(f"{len(tests)} tests took {total:.0f} CPU seconds{above_all}")
        by_function: dict[str, float] = defaultdict(float)
        for name, (_, spent) in tests:
            by_function[name.partition("[")[0]] += spent
        costly = sorted(by_function.items(), key=lambda each: -each[1])
        for name, spent in costly[: 20 if len(tests) > 100 else 0]:
            terminalreporter.line(f"{spent:7.1f} s: {name}")
        for spent, name in above:
            terminalreporter.line(f"{-spent:7.1f} s, more than its tier allows: {name}")
        if any(tier == "nightly" for tier, _ in self._spent.values()):
            terminalreporter.line(
                f"the night's seed: repeat with make test-nightly NIGHT={self._seed}"
            )
