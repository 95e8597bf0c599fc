"""The judge of histories: it accepts what one call after the other explains, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.linearizability import Call, faults

BUDGET, COST = 20, 12
RECORD: list[dict[str, Any]] = [
    {"number": 1, "kind": "create", "spent_micronats": 0, "held_micronats": 0},
    {"number": 2, "kind": "reserve", "reservation": "a", "spent_micronats": 0,
     "held_micronats": 12, "steps": 12},
    {"number": 3, "kind": "grant", "reservation": "a", "spent_micronats": 4,
     "held_micronats": -4, "steps": 4},
    {"number": 4, "kind": "release", "reservation": "a", "spent_micronats": 0,
     "held_micronats": -8, "steps": 8},
]  # fmt: skip


def read(start: int, end: int, version: int, spent: int, held: int) -> Call:
    seen = {"version": version, "spent": {"micronats": spent}, "held": {"micronats": held}}
    return Call("read", start, end, 200, seen)


def run(steps_granted: int, state: str = "open") -> dict[str, Any]:
    return {"id": "a", "steps_granted": steps_granted, "steps_reserved": 12, "state": state}


RESERVE = Call("reserve", 10, 20, 201, run(0))
GRANT = Call("grant", 30, 40, 200, run(4))
RELEASE = Call("release", 50, 60, 200, run(4, "released"))
REFUSED = Call("reserve", 12, 45, 409, {"code": "budget-exhausted"})
HISTORY = [RESERVE, REFUSED, GRANT, read(35, 45, 2, 0, 12), read(41, 55, 4, 4, 0), RELEASE]


def judge(*calls: Call, record: list[dict[str, Any]] = RECORD) -> list[str]:
    return faults(calls, record, (BUDGET,), {"": (COST,)})


def changed(old: Call, **changes: Any) -> list[Call]:
    return [replace(call, **changes) if call is old else call for call in HISTORY]


LOST = {"end": None, "status": 0, "answer": {}}
NO_GRANT = [call for call in HISTORY if call is not GRANT]
SECOND = RECORD[1] | {"number": 3, "reservation": "b"}
LATE = RECORD[2] | {"number": 5, "held_micronats": 0}
STRANGER = "nobody asked for some of the entries [3]"
UNEXPLAINED, ORDER = "nothing in the record explains", "was answered before it began"


def test_what_one_order_of_calls_explains_is_accepted() -> None:
    for calls in (
        HISTORY,
        # a call without an answer may have happened or not
        changed(GRANT, **LOST),
        [*HISTORY, replace(GRANT, **LOST)],
        changed(REFUSED, start=1, end=11),  # the other may have come first
    ):
        assert judge(*calls) == []


def test_a_run_on_several_datasets_is_found_by_its_first_reservation() -> None:
    joint = {"joint": {"reservations": ["a", "b"], "records": 2}}
    parts = [entry | ({"reservation": "b"} if "reservation" in entry else {}) for entry in RECORD]
    record = [parts[0], parts[1] | joint, *parts[2:]]
    assert judge(*HISTORY, record=record) == []
    assert UNEXPLAINED in judge(*HISTORY, record=parts)[0]


@pytest.mark.parametrize(
    ("calls", "fault"),
    [
        ([*HISTORY, Call("grant", 61, 62, 200, run(8))], UNEXPLAINED),  # a lost write
        (NO_GRANT, STRANGER),
        ([*NO_GRANT, Call("read", 30, None, 0, {})], STRANGER),
        ([*HISTORY, GRANT], "two calls claim entry 3"),
        ([*HISTORY, read(41, 48, 2, 0, 12)], "entry 3 was answered before"),  # a stale read
        ([*HISTORY, read(41, 48, 3, 4, 12)], UNEXPLAINED),  # a state that never existed
        ([*HISTORY, read(21, 25, 3, 4, 8)], ORDER),  # a read of a later state
        (changed(RELEASE, start=5, end=8), ORDER),
        # refusals although there was room, the last after a read that showed it
        (changed(REFUSED, start=61, end=70), "there was room at all times"),
        (changed(REFUSED, start=1, end=5), "there was room at all times"),
        (
            [*changed(REFUSED, start=57, end=70), read(52, 56, 4, 4, 0)],
            "there was room at all times",
        ),
        # answers that differ from the record
        (changed(GRANT, answer=run(4, "committed")), UNEXPLAINED),
        (changed(GRANT, answer=run(4) | {"steps_reserved": 13}), UNEXPLAINED),
        (changed(REFUSED, answer={"code": "idempotency-key-reused"}), UNEXPLAINED),
    ],
)
def test_what_no_order_explains_is_found(calls: list[Call], fault: str) -> None:
    found = judge(*calls)
    assert fault in found[0]
    if fault in (STRANGER, "two calls claim entry 3"):
        assert found == [fault]


def test_a_record_that_overspends_or_goes_on_after_the_end_of_a_run_is_found() -> None:
    """Two plans of twelve within twenty, each acknowledged; and a grant after a release."""
    calls = [RESERVE, Call("reserve", 30, 40, 201, run(0) | {"id": "b"})]
    found = judge(*calls, record=[*RECORD[:2], SECOND])
    assert found == ["after entry 3 the balance is not within the budget"]
    calls = [*HISTORY, Call("grant", 70, 80, 200, run(8))]
    assert "entry 5 cannot follow those before it" in judge(*calls, record=[*RECORD, LATE])


# --- an exchange: reference steps and slack, and plans of two costs

BILLION = 10**9  # units of slack
EXCHANGED: list[dict[str, Any]] = [
    {"number": 1, "kind": "create"},
    {"number": 2, "kind": "reserve", "reservation": "a", "steps": 12, "held_reference_steps": 6,
     "held_slack": 20},
    {"number": 3, "kind": "grant", "reservation": "a", "steps": 4, "held_reference_steps": -2,
     "held_slack": -10, "spent_reference_steps": 2, "spent_slack": 10},
    {"number": 4, "kind": "commit", "reservation": "a", "steps": 8, "held_reference_steps": -4,
     "held_slack": -10, "spent_reference_steps": 1, "spent_slack": 10},
]  # fmt: skip
NONE = dict.fromkeys(
    ("spent_reference_steps", "spent_slack", "held_reference_steps", "held_slack"), 0
)
COMMIT = Call("commit", 50, 60, 200, run(4, "committed"))


def stack(
    start: int, end: int, version: int, spent: tuple[int, int], held: tuple[int, int]
) -> Call:
    def part(amounts: tuple[int, int]) -> dict[str, Any]:
        return {"reference_steps": amounts[0], "slack": amounts[1] / BILLION}

    seen = {"version": version, "spent": part(spent), "held": part(held)}
    return Call("read", start, end, 200, seen)


def judge_exchanged(*calls: Call, budget: tuple[int, int] = (10, BILLION)) -> list[str]:
    record = [NONE | entry for entry in EXCHANGED]
    costs = {"exchanged": (6, 0), "large": (8, 0)}
    return faults(calls, record, budget, costs)


def test_a_history_with_exchanges_explained_by_one_order_is_accepted() -> None:
    reads = [stack(35, 45, 3, (2, 10), (4, 10)), stack(61, 65, 4, (3, 20), (0, 0))]
    refused = Call("reserve", 12, 45, 409, {"code": "budget-exhausted"}, "large")
    assert judge_exchanged(RESERVE, GRANT, COMMIT, *reads, refused) == []


def test_a_read_with_wrong_slack_is_found() -> None:
    wrong = stack(35, 45, 3, (2, 9), (4, 10))
    assert "nothing in the record explains" in judge_exchanged(RESERVE, GRANT, COMMIT, wrong)[0]


def test_a_refusal_is_judged_by_the_cost_of_its_own_plan() -> None:
    """Room for the smaller plan, and none for the larger one, after the early end."""
    for plan, explained in (("exchanged", False), ("large", True)):
        refused = Call("reserve", 61, 70, 409, {"code": "budget-exhausted"}, plan)
        assert (judge_exchanged(RESERVE, GRANT, COMMIT, refused) == []) == explained


def test_a_record_that_overspends_slack_is_found() -> None:
    found = judge_exchanged(RESERVE, GRANT, COMMIT, budget=(10, 19))
    assert "after entry 2 the balance is not within the budget" in found
