"""Keys that are revoked while their requests wait, and clocks that are set back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from accountant_service.ledger import repository as storage
from accountant_service.ledger import service
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.caps import Caps
from accountant_service.ledger.repository import now
from accountant_service.ledger.rules import Cap, HolderKind
from tests.support.ledger_scenarios import Scenario, refused


class Bench:
    """A dataset with an open run, and the key that made both."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.key = scenario, scenario.person(Scope.ADMIN)
        self.name = self.key.identifier
        self.key.create()
        self.run = self.key.reserve()
        self.key.grant(self.run, 5)

    def state(self) -> tuple[Any, ...]:
        """Return what a write could change."""
        scenario = self.scenario
        return scenario.dataset(), scenario.keys.list_keys(), scenario.caps.list_uses("d")[1]


def set_cap(bench: Bench) -> Any:
    cap = Cap(HolderKind.KEY, bench.name, 0.5)
    return Caps(bench.scenario.repository).set("d", cap, bench.name)


WRITES: Final[dict[str, Callable[[Bench], Any]]] = {
    "create": lambda it: it.key.create("another"),
    "close": lambda it: it.key.close(),
    "reserve": lambda it: it.key.reserve(),
    "grant": lambda it: it.key.grant(it.run, 1, 5),
    "renew": lambda it: it.key.renew(it.run),
    "commit": lambda it: it.key.commit(it.run),
    "release": lambda it: it.key.release(it.run),
    "cap": set_cap,
    "key": lambda it: it.scenario.keys.create([Scope.ADMIN], by=it.name),
    "quota": lambda it: it.scenario.keys.set_quota(it.name, 7, it.name),
    "revoke": lambda it: it.scenario.keys.revoke(it.name, it.name),
}


def test_a_write_of_a_key_that_was_revoked_meanwhile_has_no_effect(scenario: Scenario) -> None:
    """It was authenticated before, and waited for its turn or for a computation."""
    bench = Bench(scenario)
    first = bench.key.reserve(once="answered")
    scenario.keys.revoke(bench.name, "admin")
    before = bench.state()
    for name, write in WRITES.items():
        with refused("unauthenticated", "revoked while the request waited"):
            write(bench)
        assert bench.state() == before, name
    assert bench.key.reserve(once="answered") == first, "it was carried out before"


def test_a_key_may_revoke_itself(scenario: Scenario) -> None:
    own = scenario.person(Scope.ADMIN).identifier
    found = scenario.keys.revoke(own, own)
    assert found is not None
    assert found.revoked_at is not None


def test_a_clock_that_is_set_back_leaves_no_lease_that_ended_too_early(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the decision was read before, and that of the entry after the change."""
    bench = Bench(scenario)
    lease = bench.key.look(bench.run).expires_at
    with monkeypatch.context() as patch:
        patch.setattr(service, "now", lambda: lease + 1)
        patch.setattr(storage, "now", lambda: lease - 10**9)
        assert bench.key.look(bench.run).state.value == "expired"
    assert scenario.dataset().balance.held == (0,)
    assert scenario.dataset().created_at <= now()
