"""Keys that are revoked while their requests wait, and clocks that are set back."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any, Final

import pytest

from accountant_service.api.ledger_views import encode_answer
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import repository as storage
from accountant_service.ledger import service
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.caps import Caps
from accountant_service.ledger.errors import UnauthenticatedError
from accountant_service.ledger.repository import KeyRecord, Repository, now
from accountant_service.ledger.rules import Cap, Dataset, HolderKind, NewDataset
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.verification import verify
from accountant_service.mechanisms import DpSgd

RUN: Final = DpSgd(4.0, sample_rate=0.01, steps=20)


def request(key: KeyRecord, idempotency: str | None = None) -> WriteRequest:
    return WriteRequest(key, idempotency or uuid.uuid4().hex, "test", None)


def new_dataset(name: str) -> NewDataset:
    relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    return NewDataset(name, 1000, 3.0, 1e-5, relation, "record", RUN, "renyi")


class Bench:
    """A dataset with an open run, and the key that made both."""

    def __init__(self, repository: Repository) -> None:
        self.repository, self.ledger = repository, Ledger(repository, encode_answer)
        self.keys, self.caps = Keys(repository), Caps(repository)
        self.key = self.keys.create([Scope.ADMIN])[1]
        self.ledger.create_dataset(request(self.key), new_dataset("d"))
        self.run = self.reserve()
        self.ledger.grant(request(self.key), self.run, 5, 0)

    def reserve(self, lease: float = 3600.0, idempotency: str | None = None) -> str:
        write = request(self.key, idempotency)
        return str(json.loads(self.ledger.reserve(write, "d", RUN, lease, "").text)["id"])

    def dataset(self) -> Dataset:
        with self.repository.reading() as reading:
            found = reading.find_dataset("d")
        assert found is not None
        return found


def cap_of(bench: Bench) -> Cap:
    return Cap(HolderKind.KEY, bench.key.identifier, 0.5)


WRITES: Final[dict[str, Callable[[Bench], Any]]] = {
    "create": lambda it: it.ledger.create_dataset(request(it.key), new_dataset("another")),
    "close": lambda it: it.ledger.close_dataset(request(it.key), "d"),
    "reserve": lambda it: it.reserve(),
    "grant": lambda it: it.ledger.grant(request(it.key), it.run, 1, 5),
    "renew": lambda it: it.ledger.renew(request(it.key), it.run, 7200.0),
    "commit": lambda it: it.ledger.commit(request(it.key), it.run),
    "release": lambda it: it.ledger.release(request(it.key), it.run),
    "cap": lambda it: it.caps.set("d", cap_of(it), it.key.identifier),
    "key": lambda it: it.keys.create([Scope.ADMIN], by=it.key.identifier),
    "quota": lambda it: it.keys.set_quota(it.key.identifier, 7, it.key.identifier),
    "revoke": lambda it: it.keys.revoke(it.key.identifier, it.key.identifier),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_of_a_key_that_was_revoked_meanwhile_has_no_effect(
    name: str, repository: Repository
) -> None:
    """It was authenticated before, and waited for its turn or for a computation."""
    bench = Bench(repository)
    answered = uuid.uuid4().hex
    first = bench.reserve(idempotency=answered)
    bench.keys.revoke(bench.key.identifier, "admin")
    before, keys = bench.dataset(), bench.keys.list_keys()
    with pytest.raises(UnauthenticatedError, match="revoked while the request waited"):
        WRITES[name](bench)
    assert bench.dataset() == before
    assert bench.keys.list_keys() == keys
    assert bench.caps.list_uses("d")[1] == []
    assert bench.reserve(idempotency=answered) == first, "it was carried out before"
    assert verify(repository).faults == []


def test_a_key_may_revoke_itself(local: Repository) -> None:
    bench = Bench(local)
    found = bench.keys.revoke(bench.key.identifier, bench.key.identifier)
    assert found is not None
    assert found.revoked_at is not None


def test_a_clock_that_is_set_back_leaves_no_lease_that_ended_too_early(
    local: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the decision was read before, and that of the entry after the change."""
    bench = Bench(local)
    lease = bench.ledger.get_reservation(bench.key, bench.run)[1].expires_at
    monkeypatch.setattr(service, "now", lambda: lease + 1)
    monkeypatch.setattr(storage, "now", lambda: lease - 10**9)
    dataset, run = bench.ledger.get_reservation(bench.key, bench.run)
    assert run.state.value == "expired"
    assert dataset.balance.held == (0,)
    monkeypatch.undo()
    assert bench.dataset().created_at <= now()
    assert verify(local).faults == []
