"""Histories that were forged and hashed anew: `accountant ledger verify` names the entry.

Anyone who can write to the database can make every hash fit. They cannot, unnoticed, write an
entry that the ledger's rules do not write. A whole history that follows the rules is not found:
against that head hashes are kept elsewhere.
"""

from __future__ import annotations

import copy
import json
import math
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

from accountant_service.accounting import calculator
from accountant_service.errors import TooExpensiveError
from accountant_service.ledger import database, hash_chain
from accountant_service.ledger.filters import ReferenceFilter, RenyiFilter, reference
from accountant_service.ledger.filters.reference import SLACK_UNITS
from accountant_service.ledger.filters.renyi import compute_cost
from accountant_service.ledger.repository import Repository
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.ledger.verification import VerificationReport, verify_snapshot
from accountant_service.ledger.webhooks import create_webhook
from accountant_service.mechanisms import from_json, to_json
from accountant_service.numerics import domination
from tests.support.earlier_ledgers import FIXTURES
from tests.support.ledger_scenarios import ADD_OR_REMOVE, Json, Scenario, faults_after, undone

SIZED = {"kind": "dp_sgd", "noise_multiplier": 2.0, "batch_size": 600, "steps": 15}
CLOSED = {"commit": "committed", "release": "released", "expire": "expired"}
INSERT_ENTRY = "INSERT INTO entry (dataset, number, body, hash)"
Entries = list[Json]
Edit = Callable[[Entries], Any]


@pytest.fixture(scope="module", autouse=True)
def known_dominations() -> Iterator[None]:
    """`verify` decides the same dominations for most forged histories: each is decided once."""
    decide = cache(domination.dominates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            domination,
            "dominates",
            lambda larger, smaller, slack: decide(tuple(larger), tuple(smaller), slack),
        )
        yield


def open_fixture(folder: Path, revision: str, alone: str = "") -> Repository:
    """Open a migrated ledger of an earlier version; with one of its datasets `alone`, or all."""
    with closing(sqlite3.connect(folder / "ledger.db")) as connection, connection:
        connection.executescript((FIXTURES / f"ledger-{revision}.sql").read_text())
        if alone:
            others = f"(SELECT id FROM dataset WHERE name != '{alone}')"
            for table in ("entry", "reservation"):
                connection.execute(f"DELETE FROM {table} WHERE dataset IN {others}")
            connection.execute(f"DELETE FROM dataset WHERE name != '{alone}'")
            created = f"action = 'dataset-created' AND subject != '{alone}'"
            connection.execute(f"DELETE FROM audit_event WHERE {created}")
    return database.open_repository(f"sqlite:///{folder}/ledger.db")


class Forger:
    """A ledger whose history can be replaced, with everything that can be made to fit it.

    Args:
        repository: the ledger.
        name: of the dataset.
        units: of its amounts, by their names in entries.
    """

    def __init__(
        self, repository: Repository, name: str, units: tuple[str, ...] = ("micronats",)
    ) -> None:
        self._repository, self._name, self._units = repository, name, units
        with repository.reading() as reading:
            dataset = reading.find_dataset(name)
            assert dataset is not None
            self._identifier = dataset.identifier
            stored = reading.list_entries(dataset, 0)
        self.entries: Entries = [json.loads(row.body) for row in stored]

    def forged(self, entries: Entries, **columns: Any) -> VerificationReport:
        """Verify other entries in place of these, with hashes and balances computed anew.

        Args:
            entries: of the dataset.
            columns: of the dataset's row, other than they were.
        """
        with undone(self._repository) as transaction:
            self._write(transaction.connection, entries)
            for name, value in columns.items():
                update = f"UPDATE dataset SET {name} = ? WHERE id = ?"
                transaction.connection.exec_driver_sql(update, (value, self._identifier))
            return verify_snapshot(transaction)

    def _write(self, connection: Connection, entries: Entries) -> None:
        head, of = hash_chain.GENESIS, self._identifier
        connection.exec_driver_sql("DELETE FROM entry WHERE dataset = ?", (of,))
        for number, entry in enumerate(entries, 1):
            body = hash_chain.encode_entry(entry)
            head = hash_chain.hash_entry(head, body)
            row = (of, number, body, head)
            connection.exec_driver_sql(
                "INSERT INTO entry (dataset, number, body, hash) VALUES (?, ?, ?, ?)", row
            )
        connection.exec_driver_sql(
            "UPDATE dataset SET spent = ?, held = ?, version = ?, head = ? WHERE id = ?",
            (*self._balance(entries), len(entries), head, of),
        )
        for each in {str(entry.get("reservation")) for entry in entries}:
            own = [
                (number, entry)
                for number, entry in enumerate(entries, 1)
                if str(entry.get("reservation")) == each
            ]
            self._fit(connection, each, own)

    def _balance(self, entries: Entries) -> tuple[str, str]:
        """Return the amounts spent and held that entries say."""
        spent, held = (
            [sum(map(_amount(f"{part}_{unit}"), entries)) for unit in self._units]
            for part in ("spent", "held")
        )
        return json.dumps(spent), json.dumps(held)

    def _fit(self, connection: Connection, identifier: str, own: list[tuple[int, Json]]) -> None:
        """Make the row of a reservation what its entries say."""
        entries = [entry for _, entry in own]
        grants = [entry for entry in entries if entry.get("kind") == "grant"]
        ends = [(number, CLOSED[entry["kind"]]) for number, entry in own
                if str(entry.get("kind")) in CLOSED]  # fmt: skip
        ended, state = ends[0] if ends else (None, "open")
        spent, held = map(json.loads, self._balance(entries))
        taken = json.dumps([sum(pair) for pair in zip(spent, held, strict=True)])
        connection.exec_driver_sql(
            "UPDATE reservation SET steps_granted = ?, state = ?, taken = ?, ended_entry = ? "
            "WHERE id = ?",
            (sum(map(_amount("steps"), grants)), state, taken, ended, identifier),
        )
        leases = [entry["expires_at"] for entry in entries if "expires_at" in entry]
        if leases and type(leases[-1]) is int:
            connection.exec_driver_sql(
                "UPDATE reservation SET expires_at = ? WHERE id = ?", (leases[-1], identifier)
            )


class ReferenceForger(Forger):
    """A forger of a dataset with a reference filter, which is alone in its ledger."""

    def __init__(self, folder: Path, name: str) -> None:
        units = ("reference_steps", "slack")
        super().__init__(open_fixture(folder, "0003", alone=name), name, units)

    def _write(self, connection: Connection, entries: Entries) -> None:
        super()._write(connection, entries)
        filters = [entry.get("filter") for entry in entries[1:]]
        found = [entries[0], *(each for each in filters if isinstance(each, dict))][-1]
        names = ("filter", "reference", "reference_steps", "planned", "slack_share")
        if all(name in found for name in names) and found["filter"] == "reference":
            policy = json.dumps({name: found[name] for name in names} | {"epsilons": []})
            connection.exec_driver_sql(
                "UPDATE dataset SET policy = ? WHERE id = ?", (policy, self._identifier)
            )

    def _fit(self, connection: Connection, identifier: str, own: list[tuple[int, Json]]) -> None:
        super()._fit(connection, identifier, own)
        names = ("charged_reference_steps", "slack", "return_slack")
        reserved = next((entry for _, entry in own if all(name in entry for name in names)), {})
        numbers = [reserved.get(name) for name in names]
        if all(type(number) is int and abs(number) < 2**62 for number in numbers):
            connection.exec_driver_sql(
                "UPDATE reservation SET charge = json_set(charge, '$.charged_reference_steps', "
                "?, '$.slack', ?, '$.return_slack', ?) WHERE id = ?",
                (*numbers, identifier),
            )


def _amount(name: str) -> Callable[[Json], int]:
    def read(entry: Json) -> int:
        value = entry.get(name)
        return value if type(value) is int and abs(value) < 2**62 else 0

    return read


@pytest.fixture(scope="module")
def forger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forger]:
    with closing(open_fixture(tmp_path_factory.mktemp("forged"), "0001")) as repository:
        yield Forger(repository, "patients")


def renumbered(entries: Entries) -> Entries:
    return [entry | {"number": number} for number, entry in enumerate(entries, 1)]


def first(entries: Entries, kind: str) -> int:
    return next(at for at, entry in enumerate(entries) if entry["kind"] == kind)


def inserted(like: str, **fields: Any) -> Edit:
    """An edit that adds a changed copy of the first entry of a kind right after it."""

    def edit(entries: Entries) -> Entries:
        at = first(entries, like)
        return [*entries[: at + 1], entries[at] | fields, *entries[at + 1 :]]

    return edit


def appended(like: str, **fields: Any) -> Edit:
    def edit(entries: Entries) -> Entries:
        return [*entries, entries[first(entries, like)] | fields]

    return edit


def changed(which: str, **fields: Any) -> Edit:
    def edit(entries: Entries) -> Entries:
        at = first(entries, which)
        return [*entries[:at], entries[at] | fields, *entries[at + 1 :]]

    return edit


def without(kind: str, *names: str) -> Edit:
    def edit(entries: Entries) -> Entries:
        at = first(entries, kind)
        less = {name: value for name, value in entries[at].items() if name not in names}
        return [*entries[:at], less, *entries[at + 1 :]]

    return edit


def deleted(kind: str) -> Edit:
    def edit(entries: Entries) -> Entries:
        at = first(entries, kind)
        return entries[:at] + entries[at + 1 :]

    return edit


def swapped(kind: str) -> Edit:
    """With the entry after it."""

    def edit(entries: Entries) -> Entries:
        at = first(entries, kind)
        return [*entries[:at], entries[at + 1], entries[at], *entries[at + 2 :]]

    return edit


def refunded(entries: Entries) -> Entries:
    """A grant of as many steps less than nothing, at what they cost: nothing else is wrong."""
    grant = [entry for entry in entries if entry["kind"] == "grant"][-1]
    back = {
        "steps": -grant["steps"],
        "spent_micronats": -grant["spent_micronats"],
        "held_micronats": -grant["held_micronats"],
    }
    return [*entries, grant | back]


def freed_early(entries: Entries) -> Entries:
    """A lease that is said to have ended before it did."""
    at = first(entries, "expire")
    return [*entries[:at], entries[at] | {"at": entries[0]["at"]}, *entries[at + 1 :]]


EDITS: dict[str, Edit] = {
    "created again, with negative spend": appended("create", spent_micronats=-1000),
    "created again": inserted("create"),
    "not created": deleted("create"),
    "created with spend": changed("create", spent_micronats=5),
    "created for another size": changed("create", size=1),
    "steps granted back": refunded,
    "no steps granted": inserted("grant", steps=0, spent_micronats=0, held_micronats=0),
    "granted twice": inserted("grant"),
    "granted more than reserved": changed("grant", steps=10**6),
    "granted for less": changed("grant", spent_micronats=0, held_micronats=0),
    "granted to nobody": changed("grant", reservation="0" * 32),
    "grant deleted": deleted("grant"),
    "steps as text": changed("grant", steps="50"),
    "steps as a fraction": changed("grant", steps=50.0),
    "steps as a truth value": changed("grant", steps=True),
    "no number of steps": changed("grant", steps=None),
    "endless steps": changed("grant", steps=math.inf),
    "a field more": changed("grant", refund=3),
    "a field less": without("grant", "key"),
    "reserved twice": inserted("reserve"),
    "reserved after it ended": appended("reserve"),
    "reservation deleted": deleted("reserve"),
    "granted before it was reserved": swapped("reserve"),
    "reserved for less": changed("reserve", held_micronats=1),
    "reserved at a negative price": changed("reserve", unit_attonats="-5", held_micronats=-1),
    "reserved at a lower price": changed("reserve", unit_attonats="1", held_micronats=1),
    "price written otherwise": changed("reserve", unit_attonats="+7"),
    "another mechanism": changed("reserve", mechanism={"kind": "gaussian", "noise_multiplier": 1}),
    "no mechanism": changed("reserve", mechanism={"kind": "gaussian"}),
    "shuffled batches": changed(
        "reserve",
        mechanism={"kind": "dp_sgd", "noise_multiplier": 9, "sample_rate": 0.1, "steps": 200}
        | {"sampling": "shuffled"},
    ),
    "another hash": changed("reserve", mechanism_hash="sha256:0"),
    "fewer steps than the mechanism's": changed("reserve", steps=10),
    "purpose without words": changed("reserve", purpose=None),
    "lease before time": changed("reserve", expires_at=-1),
    "lease in words": changed("reserve", expires_at="never"),
    "lease shortened": changed("renew", expires_at=1),
    "renewed at a price": changed("renew", held_micronats=-5),
    "committed twice": inserted("commit", steps=0, held_micronats=0),
    "released after the commit": inserted("commit", kind="release", steps=0, held_micronats=0),
    "granted after the commit": appended("grant"),
    "renewed after the commit": appended("renew"),
    "committed and more given back": changed("commit", held_micronats=-(10**6)),
    "released and more given back": changed("release", spent_micronats=-5),
    "expired early": freed_early,
    "expired twice": inserted("expire"),
    "before time": changed("grant", at=-1),
    "at no time": changed("grant", at=None),
    "at half a microsecond": changed("grant", at=0.5),
    "at no number": changed("grant", at=math.nan),
    "by nobody": changed("grant", key=None),
    "of no version": changed("grant", accountant_version=2),
    "of no kind": changed("grant", kind="refund"),
    "out of order": changed("grant", number=40),
}


def test_an_unchanged_ledger_verifies(forger: Forger) -> None:
    report = forger.forged(forger.entries)
    assert (report.faults, report.datasets, report.entries) == ([], 2, 17)
    assert {entry["kind"] for entry in forger.entries} >= {*CLOSED, "create", "renew", "grant"}


def find_change(was: Entries, entries: Entries) -> int:
    """Return the number of the first entry that is not as it was."""
    return next(
        number
        for number, (before, entry) in enumerate(zip([*was, None], entries, strict=False), 1)
        if before is None or hash_chain.encode_entry(before) != hash_chain.encode_entry(entry)
    )


def named_entries(faults: list[str]) -> set[int]:
    """Return the numbers of the entries that faults name."""
    return {int(number) for fault in faults for number in re.findall(r": entry (\d+)", fault)}


@pytest.mark.parametrize("name", EDITS)
def test_a_forged_entry_is_named(name: str, forger: Forger) -> None:
    edited = EDITS[name](copy.deepcopy(forger.entries))
    entries = edited if name == "out of order" else renumbered(edited)
    at = find_change(forger.entries, entries)
    faults = forger.forged(entries).faults
    named = named_entries(faults)
    later = name in ("grant deleted", "reservation deleted", "granted before it was reserved")
    assert named if later else at in named, faults


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
# another of these is another history that follows the rules
FREE: dict[str, Callable[[Any], bool]] = {
    "at": lambda value: type(value) is int and value >= 0,
    "expires_at": lambda value: type(value) is int and value >= 0,
    "key": lambda value: type(value) is str,
    "purpose": lambda value: type(value) is str,
    "accountant_version": lambda value: type(value) is str,
}


def change_a_field(forger: Forger, data: st.DataObject, value: Any, first: int) -> None:
    """Put another value into one field of one entry, and check that this is named."""
    entries = copy.deepcopy(forger.entries)
    at = data.draw(st.integers(first, len(entries) - 1))
    name = data.draw(st.sampled_from(sorted(entries[at])))
    assume(name not in FREE or not FREE[name](value))
    assume((name, entries[at]["kind"]) != ("reservation", "reserve"))  # the row of none fits
    assume(hash_chain.encode_entry({"": value}) != hash_chain.encode_entry({"": entries[at][name]}))
    entries[at][name] = value
    faults = forger.forged(entries).faults
    assert any(f": entry {at + 1}" in fault for fault in faults), faults


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data(), value=VALUES)
def test_no_field_of_an_entry_can_be_changed_against_the_rules(
    data: st.DataObject, value: Any, forger: Forger
) -> None:
    change_a_field(forger, data, value, 0)


# --- the reference filter

ENTRIES_EACH = 18


@pytest.fixture(scope="module", params=["first", "planned"])
def reference_forger(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ReferenceForger:
    return ReferenceForger(tmp_path_factory.mktemp("forged"), request.param)


def ended(entries: Entries, *, exchanged: bool) -> tuple[int, int, int]:
    """Return where the run that ended early was reserved, granted and committed."""
    for at, entry in enumerate(entries):
        if entry["kind"] == "commit" and entry["steps"]:
            own = [i for i, e in enumerate(entries) if e.get("reservation") == entry["reservation"]]
            if (entries[own[0]]["slack"] > 0) == exchanged:
                return own[0], own[1], at
    raise AssertionError


def altered(which: int, *, exchanged: bool = True, **changes: Any) -> Edit:
    """An edit that adds to numbers of a run that ended early, and puts other values in.

    Args:
        which: 0 for its reservation, 1 for its grant, 2 for its commit.
        exchanged: whether the run is of another mechanism than the reference.
        changes: by field: a number to add, or another value.
    """

    def edit(entries: Entries) -> Entries:
        at = ended(entries, exchanged=exchanged)[which]
        entry = dict(entries[at])
        for name, change in changes.items():
            entry[name] = entry[name] + change if type(change) is int else change
        return [*entries[:at], entry, *entries[at + 1 :]]

    return edit


def refiltered(**changes: Any) -> Edit:
    """An edit that changes the last filter that is recorded, and the dataset's row with it."""

    def edit(entries: Entries) -> Entries:
        at = max((i for i, e in enumerate(entries) if isinstance(e.get("filter"), dict)), default=0)
        entry = dict(entries[at])
        if at:
            entry["filter"] = entry["filter"] | changes
        else:
            entry |= changes
        return [*entries[:at], entry, *entries[at + 1 :]]

    return edit


def refilled(entries: Entries) -> Entries:
    """Another reference, for a larger stack, after steps were made."""
    stack = {"filter": "reference", "reference_steps": 464, "planned": False, "slack_share": 0.01}
    at = ended(entries, exchanged=True)[0]
    step = entries[at]["mechanism"] | {"steps": 1}
    other = entries[at] | {"filter": stack | {"reference": step}}
    return [*entries[:at], other, *entries[at + 1 :]]


def undercharged(entries: Entries) -> Entries:
    """A run that is charged half of the reference steps, from its reservation to its end."""
    reserved, granted, committed = ended(entries, exchanged=True)
    run = entries[reserved]
    half = run["charged_reference_steps"] // 2
    spent = -(-half * entries[granted]["steps"] // run["steps"])
    edited = list(entries)
    edited[reserved] = run | {"charged_reference_steps": half, "held_reference_steps": half}
    edited[granted] = entries[granted] | {
        "spent_reference_steps": spent,
        "held_reference_steps": -spent,
    }
    edited[committed] = entries[committed] | {"held_reference_steps": spent - half}
    return edited


def without_slack(entries: Entries) -> Entries:
    """A run that is exchanged without any slack, and fewer reference steps."""
    reserved, granted, _ = ended(entries, exchanged=True)
    edited = undercharged(entries)
    edited[reserved] |= {"slack": 0, "held_slack": edited[reserved]["return_slack"]}
    edited[granted] |= {"spent_slack": 0, "held_slack": 0}
    return edited


EXCHANGE_EDITS: dict[str, Edit] = {
    "exchanged for half of it": undercharged,
    "exchanged without slack": without_slack,
    "exchanged for less": altered(0, charged_reference_steps=-4, held_reference_steps=-4),
    "exchanged for nothing": altered(0, charged_reference_steps=-9, held_reference_steps=-9),
    "exchanged for less than nothing": altered(
        0, charged_reference_steps=-10, held_reference_steps=-10
    ),
    "more slack than is held": altered(0, slack=1),
    "more slack to return than is held": altered(0, return_slack=1),
    "slack below nothing": altered(0, slack=-(10**9), held_slack=-(10**9)),
    "slack moved to the end": altered(0, slack=-(10**8), return_slack=10**8),
    "more slack than the reserve": altered(0, slack=SLACK_UNITS, held_slack=SLACK_UNITS),
    "slack as text": altered(0, slack="7"),
    "steps as a truth value": altered(0, charged_reference_steps=True),
    "steps as a fraction": altered(0, charged_reference_steps=9.0),
    "no steps": altered(0, charged_reference_steps=None),
    "endless steps": altered(0, charged_reference_steps=math.inf),
    "held less": altered(0, held_reference_steps=-1),
    "granted without its slack": altered(1, spent_slack=-1, held_slack=1),
    "granted at a rounded down share": altered(1, spent_reference_steps=-1, held_reference_steps=1),
    "granted and given back": altered(1, spent_reference_steps=-4, held_reference_steps=0),
    "one step too many given back": altered(2, spent_reference_steps=-1),
    "steps given back, and the slack too": altered(2, spent_slack=-62_500_000),
    "more given back than is held": altered(2, spent_reference_steps=-10, held_reference_steps=0),
    "held after the end": altered(2, held_reference_steps=1),
    "slack held after the end": altered(2, held_slack=1),
    "given back in fractions": altered(2, spent_reference_steps=0.5),
    "reference steps charged less": altered(
        0, exchanged=False, charged_reference_steps=-15, held_reference_steps=-15
    ),
    "reference steps charged at half": altered(
        1, exchanged=False, spent_reference_steps=-5, held_reference_steps=5
    ),
    "reference steps given back": altered(2, exchanged=False, spent_reference_steps=-11),
    "reference steps kept": altered(2, exchanged=False, spent_reference_steps=3),
    "the reference changed later": refilled,
}
FILTER_EDITS: dict[str, Edit] = {
    "more reference steps than the budget": refiltered(reference_steps=3000),
    "reference steps below nothing": refiltered(reference_steps=-5),
    "endless reference steps": refiltered(reference_steps=math.inf),
    "more reference steps than can be counted": refiltered(reference_steps=10**30),
    "reference steps as text": refiltered(reference_steps="7"),
    "no reference": refiltered(reference=None),
    "a reference of other noise": refiltered(
        reference={"kind": "gaussian", "noise_multiplier": 100.0}
    ),
    "a reference of shuffled batches": refiltered(
        reference={"kind": "dp_sgd", "noise_multiplier": 9, "sample_rate": 0.1, "steps": 1}
        | {"sampling": "shuffled"}
    ),
    "a reference that is no mechanism": refiltered(reference={"kind": "magic"}),
    "a slack below nothing": refiltered(slack_share=-1.0),
    "a slack above δ": refiltered(slack_share=1.5),
    "a slack that is not a number": refiltered(slack_share=math.nan),
    "another filter": refiltered(filter="renyi"),
    "no such filter": refiltered(filter="gdp"),
}  # fmt: skip


def test_a_ledger_with_exchanges_verifies(reference_forger: ReferenceForger) -> None:
    report = reference_forger.forged(reference_forger.entries)
    assert (report.faults, report.datasets, report.entries) == ([], 1, ENTRIES_EACH)


@pytest.mark.parametrize("name", [*EXCHANGE_EDITS, *FILTER_EDITS])
def test_a_forged_exchange_is_named(name: str, reference_forger: ReferenceForger) -> None:
    was = reference_forger.entries
    entries = (EXCHANGE_EDITS | FILTER_EDITS)[name](copy.deepcopy(was))
    faults = reference_forger.forged(entries).faults
    # a filter is the dataset's: its first entry, its row, or every charge may be what is wrong
    is_named = find_change(was, entries) in named_entries(faults)
    assert is_named or (name in FILTER_EDITS and faults), faults


@pytest.fixture(scope="module")
def planned_forger(tmp_path_factory: pytest.TempPathFactory) -> ReferenceForger:
    return ReferenceForger(tmp_path_factory.mktemp("planned"), "planned")


def test_a_share_of_slack_outside_its_range_is_named_where_no_run_shows_it(
    planned_forger: ReferenceForger,
) -> None:
    """With a negative share the reference steps would have more than δ, and the slack less."""
    for share in (-1.0, -1e-9, 1.0, 1.5, 1e300, -math.inf):
        created = planned_forger.entries[0] | {"slack_share": share}
        faults = planned_forger.forged([created]).faults
        assert any("breaks a rule: slack_share" in fault for fault in faults), faults


def test_a_row_that_cannot_be_read_is_named(planned_forger: ReferenceForger) -> None:
    """It must not keep the other datasets from being verified."""
    for column, value in (
        ("policy", "{}"),
        ("policy", "nonsense"),
        ("policy", '{"filter": "gdp"}'),
        ("policy", "[" * 100_000),
        ("spent", "7"),
        ("held", "null"),
        ("spent", "[1, 2"),
        ("relation", "cousins"),
    ):
        faults = planned_forger.forged(planned_forger.entries, **{column: value}).faults
        assert any("'planned': its row cannot be read" in fault for fault in faults), faults


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data(), value=VALUES)
def test_no_field_of_an_exchange_can_be_changed_against_the_rules(
    data: st.DataObject, value: Any, reference_forger: ReferenceForger
) -> None:
    change_a_field(reference_forger, data, value, 1)


def test_believing_recorded_charges_would_be_caught(
    reference_forger: ReferenceForger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the domination, decided anew, that finds a run charged half from end to end."""
    entries = undercharged(copy.deepcopy(reference_forger.entries))
    for believed in (False, True):
        if believed:
            monkeypatch.setattr(ReferenceFilter, "is_charge_sufficient", lambda *_: True)
        faults = reference_forger.forged(entries).faults
        assert any("less than the plan costs" in each for each in faults) != believed


def test_invalid_numbers_of_a_dataset_are_reported(forger: Forger) -> None:
    """In the dataset's row and in its first entry alike."""
    for column, name, value in (
        ("size", "size", 0),
        ("epsilon", "epsilon", -1.0),
        ("delta", "delta", 2.0),
        ("policy", "order", 0.5),
        ("created_at", "created_at", -5),
    ):
        entries = copy.deepcopy(forger.entries)
        entries[0][name] = value
        stored = json.dumps({"filter": "renyi", "order": value}) if name == "order" else value
        faults = forger.forged(entries, **{column: stored}).faults
        assert any(f"the dataset breaks a rule: {name}" in each for each in faults), faults


def test_a_mechanism_for_more_records_than_there_are_is_named(forger: Forger) -> None:
    """It was believed once: the rate, and so the charge, was too small. Fewer cost more."""
    order, at = forger.entries[0]["order"], len(forger.entries) + 1
    renyi = RenyiFilter(order, 4.0, 1e-5, ADD_OR_REMOVE)
    for size, part, named in (
        (10**9, "", True), (60_000, "", False), (59_999, "", False),
        (10**9, "/mechanisms/0", True), (60_000, "/mechanisms/0", False),
    ):  # fmt: skip
        run = SIZED | {"dataset_size": size}
        plan = StepPlan.of(from_json({"kind": "parallel", "mechanisms": [run]} if part else run))
        unit = renyi.step_costs(plan.step)[0]
        reserved = forger.entries[first(forger.entries, "reserve")] | {
            "reservation": "f" * 32,
            "mechanism": to_json(plan.mechanism),
            "mechanism_hash": plan.canonical.hash,
            "steps": plan.steps,
            "unit_attonats": str(unit),
            "held_micronats": compute_cost(unit, plan.steps),
        }
        faults = forger.forged(renumbered([*forger.entries, reserved])).faults
        told = f"entry {at}: {part}/dataset_size of"
        assert [told in each for each in faults] == [named] * named + [False], (size, part)


# --- rows that no chain has

OF_PLANNED = "(SELECT id FROM dataset WHERE name = 'planned')"


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A ledger as this version writes it, with datasets of every filter."""
    with closing(open_fixture(tmp_path_factory.mktemp("newest"), "0006")) as repository:
        assert faults_after(repository) == []
        yield repository


@pytest.mark.parametrize(
    ("statements", "named"),
    [
        (
            ["DELETE FROM dataset WHERE name = 'planned'"],
            [r"\d+ entries belong to", r"\d+ reservations belong to", "it was created, but it has"],
        ),
        (
            [
                "DELETE FROM entry WHERE dataset = " + OF_PLANNED,
                "DELETE FROM reservation WHERE dataset = " + OF_PLANNED,
                "DELETE FROM webhook_event WHERE dataset = 'planned'",
                "DELETE FROM dataset WHERE name = 'planned'",
            ],
            ["it was created, but it has"],
        ),
        (
            [
                f"{INSERT_ENTRY} SELECT 'x', number, body, hash FROM entry "
                f"WHERE dataset = {OF_PLANNED}",
                "UPDATE reservation SET dataset = 'x' WHERE dataset = " + OF_PLANNED,
                "UPDATE dataset SET id = 'x' WHERE name = 'planned'",
            ],
            [r"\d+ entries belong to"],
        ),
        (
            ["INSERT INTO entry (dataset, number, body, hash) VALUES ('x', 0, '', '')"],
            ["1 entries belong to"],
        ),
        (["INSERT INTO cap VALUES ('x', 'key', 'k', 0.5, NULL)"], ["1 caps belong to"]),
        (
            [f"{INSERT_ENTRY} SELECT id, 0, 'nonsense', 'z' FROM dataset WHERE name = 'planned'"],
            ["1 entries have a number below 1"],
        ),
        (
            [
                "INSERT INTO audit_event SELECT 'x', at, key_id, action, subject, detail "
                "FROM audit_event WHERE subject = 'planned' AND action = 'dataset-created'"
            ],
            ["it was created 2 times"],
        ),
    ],
)
def test_rows_of_no_dataset_are_named(
    statements: list[str], named: list[str], newest: Repository
) -> None:
    """A dataset of the same name would begin with its whole budget again."""
    faults = faults_after(newest, *statements)
    for pattern in named:
        assert any(re.search(pattern, fault) for fault in faults), (pattern, faults)


# --- values that the ledger does not write


@pytest.mark.spread(first=10)
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE dataset SET size = 'x'",
        "UPDATE dataset SET size = 60000.5",
        "UPDATE dataset SET privacy_unit = x'ff'",
        "UPDATE dataset SET privacy_unit = CAST(x'ff' AS TEXT)",
        "UPDATE dataset SET head = 7.5",
        "UPDATE dataset SET version = 'x'",
        "UPDATE dataset SET policy = json_set(policy, '$.extra', 1)",
        "UPDATE dataset SET policy = json_set(policy, '$.planned', 1)",
        "UPDATE dataset SET policy = json_set(policy, '$.slack_share', '0.001')",
        "UPDATE dataset SET policy = json_set(policy, '$.reference.steps', 1.0)",
        "UPDATE dataset SET policy = json_set(policy, '$.epsilons[127]', 0.01)",
        "UPDATE dataset SET policy = json_set(policy, '$.epsilons[0]', 0.01)",
        "UPDATE dataset SET policy = json_set(policy, '$.epsilons[0]', 'x')",
        "UPDATE dataset SET policy = json_set(policy, '$.epsilons[60]', "
        "0.9985 * json_extract(policy, '$.epsilons[60]'))",
        "UPDATE dataset SET policy = json_set(policy, '$.epsilons', json('[0.01]'))",
        "UPDATE dataset SET spent = replace(spent, ',', '.0,')",
        "UPDATE reservation SET taken = replace(taken, ',', '.0,')",
        "UPDATE reservation SET charge = json_set(charge, '$.extra', 1)",
        "UPDATE reservation SET charge = json_set(charge, '$.is_reference', 1)",
        "UPDATE reservation SET charge = '{\"slack\": 0, ' || substr(charge, 2)",
        "UPDATE reservation SET mechanism = json_set(mechanism, '$.steps', 30.0)",
        "UPDATE reservation SET steps_granted = 'x'",
        "UPDATE reservation SET ended_entry = ended_entry - 1",
        "UPDATE reservation SET ended_entry = NULL",
        "UPDATE reservation SET key_id = CAST(x'ff' AS TEXT)",
        "UPDATE OR IGNORE reservation SET id = x'78'",
        "UPDATE entry SET number = 'x' WHERE number = 3",
        "UPDATE entry SET body = x'ff' WHERE number = 3",
        "UPDATE entry SET body = CAST(x'ff' AS TEXT) WHERE number = 3",
        "UPDATE entry SET hash = x'ff' WHERE number = 3",
    ],
)
def test_other_text_and_types_than_the_ledger_writes_are_named(
    statement: str, newest: Repository
) -> None:
    """And they keep no other dataset from being verified: each of these is in 'planned' alone."""
    column = "name" if statement.startswith("UPDATE dataset") else "dataset"
    alone = f"{column} = " + ("'planned'" if column == "name" else OF_PLANNED)
    faults = faults_after(
        newest, f"{statement} {'AND' if 'WHERE' in statement else 'WHERE'} {alone}"
    )
    assert faults
    assert all(fault.startswith("dataset 'planned': ") for fault in faults), faults


def test_a_replaced_reference_gets_a_table_of_its_own() -> None:
    """It kept the table of the first reference once, and showed its ε."""
    first_plan, second_plan = (
        StepPlan.of(from_json({"kind": "dp_sgd", "noise_multiplier": noise, "sample_rate": 0.1,
                               "steps": 30}))
        for noise in (6.0, 4.0)
    )  # fmt: skip
    empty = ReferenceFilter(3.0, 1e-5, ADD_OR_REMOVE)
    once = empty.after_reserving(first_plan, empty.nothing).tabulated()
    twice = once.after_reserving(second_plan, once.nothing).tabulated()
    alone = empty.after_reserving(second_plan, empty.nothing).tabulated()
    assert twice.epsilons == alone.epsilons != once.epsilons
    assert twice.epsilon_of((10, 0)) == alone.epsilon_of((10, 0))


def test_without_a_table_epsilon_is_that_of_the_steps() -> None:
    """A quote shows it: the next row of a table would be a larger ε."""
    step = {"kind": "dp_sgd", "noise_multiplier": 4.0, "sample_rate": 0.1, "steps": 1}
    plan = StepPlan.of(from_json(step | {"steps": 30}))
    empty = ReferenceFilter(3.0, 1e-5, ADD_OR_REMOVE)
    policy = empty.after_reserving(plan, empty.nothing)
    exact = calculator.epsilon(from_json(step | {"steps": 33}), 1e-5 * (1 - policy.slack_share))
    without = policy.epsilon_of((33, 0))
    assert without == pytest.approx(exact.epsilon, rel=1e-9)
    assert without < policy.tabulated().epsilon_of((33, 0))


def test_a_table_that_cannot_be_recomputed_is_not_called_too_small(
    newest: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a curve took more than its seconds, and `verify` said so once."""
    # private: the tables that earlier tests computed are remembered
    reference._compute_table.cache_clear()
    monkeypatch.setattr("accountant_service.numerics.epsilon_curve.SECONDS_MAX", -1.0)
    monkeypatch.setattr(
        "accountant_service.numerics.epsilon_curve.relative_width", lambda _: math.inf
    )
    faults = faults_after(newest)
    assert faults
    assert all("its table of ε could not be checked" in fault for fault in faults), faults


def test_a_table_that_could_not_be_computed_shows_the_whole_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The budget is one that no other test has: tables are remembered."""
    plan = StepPlan.of(from_json({"kind": "dp_sgd", "noise_multiplier": 6.0, "sample_rate": 0.1,
                                  "steps": 31}))  # fmt: skip
    filled = ReferenceFilter(2.9, 1e-5, ADD_OR_REMOVE).after_reserving(plan, (0, 0))

    def refuse(*_: object) -> None:
        raise TooExpensiveError("no time")

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceFilter, "compute_table", refuse)
        shown = filled.tabulated()
    assert set(shown.epsilons) == {2.9}
    assert shown.is_table_sound()
    assert not replace(shown, epsilons=(0.01, *shown.epsilons[1:])).is_table_sound()


ALTERED_ACCESS: dict[str, tuple[str, str]] = {
    "a wider scope": ("UPDATE api_key SET scopes = '[\"admin\"]'", "it was altered since"),
    "more datasets": ("UPDATE api_key SET datasets = NULL", "it was altered since"),
    "another secret of a key": ("UPDATE api_key SET digest = x'00'", "it was altered since"),
    "a later end": ("UPDATE api_key SET expires_at = 9000000000000000", "it was altered since"),
    "a team": ("UPDATE api_key SET team = 'other'", "it was altered since"),
    "a quota": ("UPDATE api_key SET requests_per_minute = 9999", "its quota is 9999"),
    "a valid key again": ("UPDATE api_key SET revoked_at = NULL", "and is valid"),
    "a deleted key": ("DELETE FROM api_key", "but it has no row"),
    "a new key": (
        "INSERT INTO api_key SELECT 'x', name, digest, scopes, datasets, team, created_at, "
        "expires_at, NULL, NULL, NULL, NULL FROM api_key LIMIT 1",
        "no audit event says that it was created",
    ),
    "an unreadable key": ("UPDATE api_key SET scopes = '7'", "cannot be read"),
    "a larger cap": ("UPDATE cap SET share = 0.75", "is 0.75, not 0.25"),
    "no cap": ("DELETE FROM cap", "but it has no row"),
    "a removed cap again": (
        "INSERT INTO cap SELECT dataset, kind, 'gone', share, taken FROM cap",
        "no audit event says that the cap of team gone was set",
    ),
    "another receiver": ("UPDATE webhook SET url = 'http://x'", "altered since it was added"),
    "another signature": ("UPDATE webhook SET secret = 'whsec_x'", "altered since it was added"),
    "no webhook": ("DELETE FROM webhook", "but it has no row"),
    "a new webhook": (
        "INSERT INTO webhook SELECT 'x', url, secret, dataset, shares, created_at FROM webhook",
        "no audit event says that it was added",
    ),
    "an event for nobody": ("UPDATE webhook_event SET body = '{}'", "its body has another id"),
    "another signing key": ("UPDATE secret SET value = zeroblob(32)", "was altered since"),
    "a short signing key": ("UPDATE secret SET value = x'00'", "it is not 32 bytes"),
    "no signing key": ("DELETE FROM secret WHERE name = 'certificates'", "but it has no row"),
    "times of entries": ("UPDATE entry SET at = 1 WHERE number = 2", "in its columns, but records"),
    "kinds of entries": ("UPDATE entry SET kind = 'x' WHERE number = 2", "in its columns"),
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A ledger with keys, caps, a webhook with a waiting event, and secrets."""
    url = f"sqlite:///{tmp_path_factory.mktemp('access')}/ledger.db"
    with closing(database.open_repository(url)) as repository:
        scenario = Scenario(repository)
        scenario.admin.create("d")
        member = scenario.person(team="vision", datasets=("d",)).record.identifier
        scenario.keys.set_quota(member, 60, by="test")
        scenario.keys.revoke(scenario.person().record.identifier, by="test")
        scenario.cap(0.5, team="vision")
        scenario.cap(0.25, team="vision")
        scenario.cap(0.5, team="gone")
        scenario.uncap(team="gone")
        with repository.transaction() as transaction:
            webhook = create_webhook("https://example.org/budgets", None, (0.0001,), 0)
            transaction.add_webhook(webhook, "test")
        run = scenario.admin.reserve(300)
        scenario.admin.commit(run)
        scenario.ledger.issue_certificate(scenario.admin.record, run)
        assert scenario.faults() == []
        yield repository


@pytest.mark.parametrize("name", ALTERED_ACCESS)
def test_an_altered_key_cap_webhook_or_secret_is_named(name: str, guarded: Repository) -> None:
    statement, fault = ALTERED_ACCESS[name]
    found = faults_after(guarded, statement)
    assert any(fault in each for each in found), found
