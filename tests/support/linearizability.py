"""Check that the answers to racing clients are linearizable: explained by one order of calls.

The ledger writes every change into one numbered record per dataset, so there is no need to search
for an order: the record is the candidate. A history is linearizable in that order if

* every acknowledged write is in the record, with the answer that the record explains, and every
  entry is somebody's write, once;
* a read shows the record's state at its version;
* a refusal has a version at which there was no room; and
* a call that had ended before another began comes before it.

Calls that never got an answer may be in the record or not. Times are of one machine's clock.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accountant_service.ledger.filters.reference import SLACK_UNITS


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a client.

    Attributes:
        kind: reserve, grant, commit, release or read.
        start, end: nanoseconds of a clock that all clients share; no end without an answer.
        status: of the answer, 0 without one.
        answer: as JSON.
        plan: the name of the plan that a reservation asks for.
    """

    kind: str
    start: int
    end: int | None
    status: int
    answer: dict[str, Any]
    plan: str = ""

    @classmethod
    def from_line(cls, line: str) -> Call:
        """Parse one line of a client's log."""
        return cls(**json.loads(line))


Amounts = tuple[float, ...]


def faults(
    calls: Sequence[Call],
    entries: Sequence[dict[str, Any]],
    budget: Amounts,
    costs: Mapping[str, Amounts],
) -> list[str]:
    """Return what no sequence of calls explains in a history; empty if it is linearizable.

    Args:
        calls: of all clients on one dataset.
        entries: the dataset's record, first to last.
        budget: of the dataset: micro-nats, or reference steps and slack.
        costs: of each plan, by its name, in the same units.
    """
    record = _Record(entries, budget, costs)
    answered = sorted((call for call in calls if call.end is not None), key=lambda call: call.start)
    fixed = [(call, record.place(call)) for call in answered if not _refused(call)]
    found = list(record.broken)
    found += [f"nothing in the record explains {call}" for call, at in fixed if at is None]
    placed = [(call, at) for call, at in fixed if at is not None]
    found += _strangers(calls, record, [at for call, at in placed if call.kind != "read"])
    found += _out_of_order(placed)
    return found + _refusals(placed, [call for call in answered if _refused(call)], record)


def _refused(call: Call) -> bool:
    """Return whether a reservation was refused because the budget is exhausted."""
    exhausted = call.answer.get("code") == "budget-exhausted"
    return call.kind == "reserve" and call.status == 409 and exhausted


_ENDS = {"commit": "committed", "release": "released", "expire": "expired"}


class _Record:
    """A dataset's record, in which entry n has position 2n, and a read after it 2n + 1."""

    def __init__(
        self, entries: Iterable[dict[str, Any]], budget: Amounts, costs: Mapping[str, Amounts]
    ) -> None:
        nothing = (0,) * len(budget)
        self.spent: list[Amounts] = [nothing]
        self.held: list[Amounts] = [nothing]
        self.budget, self.costs = budget, costs
        self.writes: dict[tuple[str, str, int], int] = {}
        self.created = 0
        self.broken: list[str] = []
        granted: dict[str, int] = {}
        names: dict[str, str] = {}
        self.reserved: dict[str, int] = {}
        closed: set[str] = set()
        for number, entry in enumerate(entries, 1):
            assert entry["number"] == number
            self.spent.append(_add(self.spent[-1], _recorded("spent", entry)))
            self.held.append(_add(self.held[-1], _recorded("held", entry)))
            run, kind = entry.get("reservation", ""), entry["kind"]
            if "joint" in entry:  # its answers name the first of its reservations
                names[run] = entry["joint"]["reservations"][0]
            run = names.get(run, run)
            lowest = min(*self.held[-1], *self.spent[-1])
            if lowest < 0 or _exceeds(_add(self.spent[-1], self.held[-1]), budget):
                self.broken.append(f"after entry {number} the balance is not within the budget")
            if (
                kind != "create" and (run in self.reserved) == (kind == "reserve")
            ) or run in closed:
                self.broken.append(f"entry {number} cannot follow those before it")
            if kind == "reserve":
                self.reserved[run] = entry["steps"]
            if kind in _ENDS:
                closed.add(run)
            if kind == "grant":
                granted[run] = granted.get(run, 0) + entry["steps"]
            if kind == "create":
                self.created = number
            else:
                self.writes[kind, run, granted.get(run, 0)] = 2 * number

    def place(self, call: Call) -> int | None:
        """Return an answered call's position; None if the record does not explain its answer."""
        answer = call.answer
        if call.kind != "read":
            run = answer.get("id", "")
            key = (call.kind, run, answer.get("steps_granted", -1))
            as_it_was = (
                call.status in (200, 201)
                and answer.get("state") == _ENDS.get(call.kind, "open")
                and answer.get("steps_reserved") == self.reserved.get(run)
            )
            return self.writes.get(key) if as_it_was else None
        version = answer.get("version", -1)
        if not self.created <= version < len(self.spent):
            return None
        seen = (_shown(answer["spent"]), _shown(answer["held"]))
        return 2 * version + 1 if seen == (self.spent[version], self.held[version]) else None

    def without_room(self, plan: str, low: int, high: int) -> int | None:
        """Return the first position in a range at which a plan does not fit, or None."""
        for version in range(max(self.created, low // 2), len(self.spent)):
            place = 2 * version + 1
            taken = _add(self.spent[version], self.held[version])
            if low <= place <= high and _exceeds(_add(taken, self.costs[plan]), self.budget):
                return place
        return None


def _add(one: Amounts, other: Amounts) -> Amounts:
    """Add amounts."""
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _exceeds(taken: Amounts, budget: Amounts) -> bool:
    """Return whether amounts exceed the budget in any unit."""
    return any(a > b for a, b in zip(taken, budget, strict=True))


def _recorded(part: str, entry: dict[str, Any]) -> Amounts:
    """Return the change of the spent or held amounts that an entry records."""
    if f"{part}_micronats" in entry:
        return (entry[f"{part}_micronats"],)
    return entry[f"{part}_reference_steps"], entry[f"{part}_slack"]


def _shown(part: dict[str, Any]) -> Amounts:
    """Return the spent or held amounts that an answer states."""
    if part.get("micronats") is not None:
        return (part["micronats"],)
    return part["reference_steps"], round(part["slack"] * SLACK_UNITS)


def _strangers(calls: Sequence[Call], record: _Record, claimed: list[int]) -> list[str]:
    """Describe entries without a call, and entries that two calls claim."""
    unexplained = set(record.writes.values()) - set(claimed)
    found = [f"two calls claim entry {at // 2}" for at, n in Counter(claimed).items() if n > 1]
    kinds = {at: kind for (kind, _, _), at in record.writes.items()}
    lacking = Counter(kinds[at] for at in unexplained)
    lacking -= Counter(call.kind for call in calls if call.end is None)
    if lacking:
        numbers = sorted(at // 2 for at in unexplained if lacking[kinds[at]])
        found.append(f"nobody asked for some of the entries {numbers}")
    return found


def _out_of_order(placed: list[tuple[Call, int]]) -> list[str]:
    """Describe calls recorded before a call that had ended when they began."""
    by_end = sorted(placed, key=lambda pair: pair[0].end or 0)
    found, ended, latest = [], 0, -1
    for call, at in sorted(placed, key=lambda pair: pair[0].start):
        while ended < len(by_end) and (by_end[ended][0].end or 0) < call.start:
            latest = max(latest, by_end[ended][1])
            ended += 1
        if latest > at:
            found.append(f"entry {latest // 2} was answered before it began: {call}")
    return found


def _refusals(placed: list[tuple[Call, int]], refused: list[Call], record: _Record) -> list[str]:
    """Describe refusals of plans that fitted at all times between the call's start and end.

    By start, each at the first moment that those before it leave: no other choice leaves more.
    """
    found, known = [], list(placed)
    for call in refused:
        assert call.end is not None
        ended = [at for other, at in known if other.end and other.end < call.start]
        later = [at for other, at in placed if other.start > call.end]
        moment = record.without_room(call.plan, max(ended, default=0), min(later, default=1 << 62))
        if moment is None:
            found.append(f"there was room at all times for {call}")
        else:
            known.append((call, moment))
    return found
