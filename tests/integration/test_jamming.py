"""Hostile but well-formed requests: what each may take, and whom it may hold up."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text
from starlette.types import Message

from accountant_service.api import routes
from accountant_service.api.ledger_views import ANSWERS
from accountant_service.computing import processes as computation_processes
from accountant_service.computing.fair_queue import FairQueue, QueueLimits
from accountant_service.computing.fork_server import FORK_SERVER
from accountant_service.computing.processes import ComputationFailedError, ProcessPool
from accountant_service.errors import AccountingError, TooExpensiveError
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.errors import BudgetExhaustedError
from accountant_service.ledger.quotas import RunQuota
from accountant_service.ledger.service import Ledger
from accountant_service.numerics.laws.windowed_loss import Window, cached_windowed_loss
from accountant_service.operations.metrics import Metrics
from accountant_service.operations.problem import Problem
from accountant_service.operations.settings import Settings
from accountant_service.questions.answer_cache import (
    PARSED_HERE_BYTES_MAX,
    ComputationCache,
    _AnswerCache,
)
from accountant_service.questions.models import EpsilonRequest, UnreadBody
from accountant_service.questions.registry import compute
from tests.support.helpers import gaussian, run
from tests.support.ledger_scenarios import (
    ON_POSTGRESQL,
    ON_SQLITE,
    PLAN_JSON,
    Caller,
    Scenario,
    Service,
    refused,
    serving,
)

RUN = run(0.01, 1.1, 1000)
QUESTION = {"mechanism": RUN, "delta": 1e-5}
# more than the few bytes that are read on the event loop
LARGE = {"kind": "composed", "mechanisms": [gaussian(50 + k / 1000) for k in range(180)]}
BUDGET = {"epsilon": 8.0, "delta": 1e-5}
ENDLESS = {"sample_rate": 1e-8, "steps": 10**8, "epsilon": 0.5, "delta": 1e-10}  # for 10 s


# --- computation processes: what runs in them


def spin() -> None:
    while True:
        pass


def swallow() -> None:
    while True:
        try:
            spin()
        except Exception:
            continue


def one_long_instruction() -> None:
    10 ** (10**9)


def hoard() -> None:
    _ = [bytes(100 << 20) for _ in range(100)]


def die() -> None:
    os.kill(os.getpid(), 9)


def priority() -> int:
    return os.nice(0)


def refuse() -> None:
    raise BudgetExhaustedError("too much", 3)


def fail() -> None:
    raise KeyError("a-secret")


@pytest.fixture
def processes() -> Iterator[ProcessPool]:
    found = ProcessPool(1, seconds=0.2, niceness=7)
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("work", [spin, swallow, one_long_instruction, hoard, die])
def test_a_computation_that_takes_too_much_is_ended_and_its_process_replaced(
    processes: ProcessPool, work: Any
) -> None:
    async def both() -> int:
        with pytest.raises(TooExpensiveError):
            await processes.run(work)
        found: int = await processes.run(abs, -3)
        return found

    assert asyncio.run(both()) == 3


@pytest.mark.slow
def test_the_deadline_counts_the_time_of_one_computation_alone(processes: ProcessPool) -> None:
    async def many() -> None:
        for _ in range(5):
            await processes.run(busy_for, 0.1)

    asyncio.run(many())


@pytest.mark.slow
def test_a_process_whose_laws_fill_its_memory_empties_their_caches_and_goes_on() -> None:
    processes = ProcessPool(1, seconds=60, niceness=0)

    async def fill_and_look() -> tuple[int, int, int, int, int]:
        before, _, _ = await processes.run(describe_process)
        filled_bytes = await processes.run(fill_the_cache_of_laws)
        return before, filled_bytes, *await processes.run(describe_process)

    try:
        before, filled_bytes, after, left_bytes, laws = asyncio.run(fill_and_look())
    finally:
        processes.close()
    assert filled_bytes > computation_processes._EXITS_ABOVE_BYTES >= left_bytes
    assert (after, laws) == (before, 0)


def fill_the_cache_of_laws() -> int:
    for place in range(16):
        law = cached_windowed_loss(1e-8, 2.0 + place / 100, (Window(1.0, 0.1, 1),), 2.0)
        law.kept = np.ones(2 << 20)  # type: ignore[attr-defined]
    return computation_processes._resident_bytes()


def describe_process() -> tuple[int, int, int]:
    return (
        os.getpid(),
        computation_processes._resident_bytes(),
        cached_windowed_loss.cache_info().currsize,
    )


def busy_for(seconds: float) -> None:
    begun = time.process_time()
    while time.process_time() < begun + seconds:
        pass


@pytest.mark.slow
def test_computations_have_a_lower_priority_than_the_server(processes: ProcessPool) -> None:
    assert asyncio.run(processes.run(priority)) == min(os.nice(0) + 7, 19)


@pytest.mark.slow
def test_a_refusal_in_a_computation_process_keeps_its_details(processes: ProcessPool) -> None:
    with pytest.raises(BudgetExhaustedError) as refused:
        asyncio.run(processes.run(refuse))
    assert (refused.value.detail, refused.value.steps) == ("too much", 3)


@pytest.mark.slow
def test_a_failed_computation_is_reported_without_its_values(processes: ProcessPool) -> None:
    with pytest.raises(
        ComputationFailedError, match=r"KeyError at .*test_jamming.py:\d+ fail"
    ) as f:
        asyncio.run(processes.run(fail))
    assert "a-secret" not in str(f.value)


@pytest.mark.slow
def test_the_fork_server_is_replaced_when_it_dies() -> None:
    async def three() -> list[int]:
        found = []
        for number in range(3):
            processes = ProcessPool(1, seconds=5, niceness=0)
            found.append(await processes.run(abs, number))
            processes.close()
            assert FORK_SERVER._process is not None
            FORK_SERVER._process.kill()
            FORK_SERVER._process.wait()
        return found

    assert asyncio.run(three()) == [0, 1, 2]


@pytest.mark.slow
def test_computations_use_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that starts threads before the fork would hang or take other cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    FORK_SERVER.close()  # the next one starts in this environment

    async def environment() -> list[str | None]:
        processes = ProcessPool(1, seconds=5, niceness=0)
        try:
            names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
            return [await processes.run(os.getenv, name) for name in names]
        finally:
            processes.close()

    assert asyncio.run(environment()) == ["1", "1", "1"]


@pytest.mark.parametrize("forked", [True, False])
def test_closing_the_pool_ends_running_computations(forked: bool) -> None:
    """Also a process that is only being forked."""
    processes = ProcessPool(1, seconds=60, niceness=0)

    async def closed() -> float:
        await processes.run(abs, -1)
        processes.close()
        running = asyncio.ensure_future(processes.run(spin))
        await asyncio.sleep(0)
        if forked:
            await asyncio.sleep(0.5)
        begun = time.monotonic()
        processes.close()
        with pytest.raises((AccountingError, ComputationFailedError, asyncio.CancelledError)):
            await running
        return time.monotonic() - begun

    assert asyncio.run(closed()) < 1


# --- turns


def test_clients_take_turns_however_many_requests_each_sends() -> None:
    done: list[str] = []

    async def work(turns: FairQueue, who: str) -> None:
        async with turns.turn(who):
            await asyncio.sleep(0)
            done.append(who)

    async def rush() -> None:
        turns = FairQueue(QueueLimits(1, 1, 100, 100), "full")
        await asyncio.gather(*(work(turns, who) for who in "aaaaaaaab"))

    asyncio.run(rush())
    assert done.index("b") <= 2


def test_one_client_leaves_room_for_others() -> None:
    async def rush() -> None:
        turns = FairQueue(QueueLimits(3, 2, 100, 100), "full")
        hold = asyncio.Event()

        async def work() -> None:
            async with turns.turn("a"):
                await hold.wait()

        working = [asyncio.create_task(work()) for _ in range(9)]
        await asyncio.sleep(0)
        async with asyncio.timeout(1), turns.turn("b"):
            hold.set()
        await asyncio.gather(*working)

    asyncio.run(rush())


def test_requests_beyond_the_queue_or_its_time_limit_are_refused() -> None:
    async def rush() -> None:
        turns = FairQueue(QueueLimits(1, 1, 3, 2, seconds=0.05), "full")
        async with turns.turn("a"):
            waits = [asyncio.create_task(turns._wait_for_turn(who)) for who in "aabbb"]
            found = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(each) for each in found] == [Problem] * 5
        async with turns.turn("a"):  # nothing is left of those who gave up
            assert turns._waiting_count() == 0

    asyncio.run(rush())


def test_a_client_that_gives_up_passes_its_turn_on() -> None:
    async def rush() -> None:
        turns = FairQueue(QueueLimits(1, 1, 9, 9), "full")

        async def work(who: str) -> None:
            async with turns.turn(who):
                await asyncio.sleep(0.01)

        working = [asyncio.create_task(work(who)) for who in "abcabc"]
        await asyncio.sleep(0)
        for each in working[:4]:
            each.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(*working, return_exceptions=True)
        assert not turns._running
        assert not turns._waiting

    asyncio.run(rush())


# --- the event loop


def test_a_large_body_is_read_by_a_computation_process(
    own_web: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The serving process neither validates nor canonicalises it."""

    def here(*_: Any) -> None:
        raise AssertionError("in the serving process")

    body = {"mechanism": LARGE, "delta": 1e-5}
    assert len(json.dumps(body)) > PARSED_HERE_BYTES_MAX
    for name in (
        "questions.registry.canonical_form",
        "mechanisms.canonical.canonical_form",
        "questions.problems.read_body",
        "questions.problems.parse_json",
    ):
        monkeypatch.setattr(f"accountant_service.{name}", here)
    http = own_web.http
    answer = http.post("/v1/epsilon", json=body)
    assert answer.status_code == 200, answer.text
    batch = {"requests": [{"path": "/v1/epsilon", "body": body}]}
    assert http.post("/v1/batch", json=batch).json()["results"][0]["body"] == answer.json()
    bad = http.post("/v1/epsilon", json=body | {"delta": 2})
    assert (bad.status_code, bad.json()["errors"][0]["pointer"]) == (422, "/delta")
    raw, headers = b"[" * 10_000, {"Content-Type": "application/json"}
    assert http.post("/v1/epsilon", content=raw, headers=headers).status_code == 400


@pytest.mark.slow
def test_a_large_plan_is_reserved_and_quoted(web: Service) -> None:
    web.admin.dataset("large")
    assert web.admin.reserve("large", LARGE)["mechanism"] == LARGE
    path = "/v1/datasets/large/quotes"
    assert web.admin.make(path, {"mechanism": LARGE})["fits"]
    wrong = LARGE | {"mechanisms": [*LARGE["mechanisms"], {"kind": "no"}]}
    _, problem = web.admin.post(path, {"mechanism": wrong})
    assert problem["errors"][0]["pointer"] == "/mechanism/mechanisms/180/kind"


def test_the_event_loop_runs_between_the_items_of_a_batch() -> None:
    """Whatever else is ready runs after each item, also where all are known."""
    computations = ComputationCache(Settings(), Metrics())
    asked = EpsilonRequest.model_validate(QUESTION)
    computations._cache.keep(("/v1/epsilon", answerer_key(asked)), compute("/v1/epsilon", asked))
    items = [("/v1/epsilon", QUESTION)] * 200
    rounds = 0

    async def count() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async def batch() -> int:
        counting = asyncio.create_task(count())
        response = routes._BatchResponse(computations, "a", UnreadBody(b""), Settings())
        found = [each async for each in response._limited_results(items)]
        counting.cancel()
        return len(found)

    assert asyncio.run(batch()) == 200
    assert rounds > 50


def answerer_key(asked: Any) -> Any:
    from accountant_service.questions.registry import ENDPOINTS

    return ENDPOINTS["/v1/epsilon"].key(asked)


def test_a_batch_beyond_its_size_limit_gets_errors_for_the_rest(url: str) -> None:
    item = {"path": "/v1/epsilon", "body": QUESTION}
    with serving(url, batch_bytes_max=5000) as found:
        answer = found.http.post("/v1/batch", json={"requests": [item] * 100})
        results = answer.json()["results"]
    assert len(results) == 100
    answered = [each for each in results if each["status"] == 200]
    assert 1 <= len(answered) < 10
    assert {each["body"]["code"] for each in results[len(answered) :]} == {"too-expensive"}
    assert "5000 bytes" in results[-1]["body"]["detail"]


def test_a_client_that_does_not_read_holds_one_piece_of_its_answer_in_memory() -> None:
    """The rest of a batch is made when the first pieces have been sent."""
    computations = ComputationCache(Settings(), Metrics())
    made = 0

    async def answers() -> Any:
        nonlocal made
        for _ in range(1000):
            made += 1
            yield b'"' + b"x" * 100_000 + b'"'

    async def unread() -> None:
        response = routes._BatchResponse(computations, "a", UnreadBody(b""), Settings())
        sent = 0

        async def send(message: Message) -> None:
            nonlocal sent
            sent += 1
            if sent > 3:
                await asyncio.Event().wait()

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        # private: a list that stops in the middle comes from no ledger
        response._items = items  # type: ignore[method-assign]
        response._limited_results = lambda _: answers()  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await response({"type": "http", "asgi": {}}, receive, send)

    async def items() -> list[Any]:
        return []

    asyncio.run(unread())
    assert made <= 4


def test_a_batch_pauses_after_each_piece() -> None:
    async def answers() -> Any:
        for _ in range(20):
            yield b"x" * routes._CHUNK_BYTES

    async def seconds() -> float:
        begun = time.monotonic()
        pieces = [piece async for piece in routes._chunks(answers())]
        assert len(pieces) == 21
        return time.monotonic() - begun

    assert asyncio.run(seconds()) >= 20 * routes._PAUSE_SECONDS


def test_the_cache_is_bounded_in_bytes() -> None:
    cache = _AnswerCache(100, 1000)
    for number in range(50):
        cache.keep(number, b"x" * 99)
    assert [number for number in range(50) if cache.find(number)] == list(range(40, 50))
    cache.keep("huge", b"x" * 2000)
    assert cache.find("huge") is None


def test_a_question_whose_client_left_the_queue_is_not_computed() -> None:
    computations = ComputationCache(Settings(computation_processes=1), Metrics())
    begun: list[str] = []

    async def slow(_: Any, path: str, ask: Any) -> bytes:
        begun.append(ask.raw.decode())
        await asyncio.sleep(0.2)
        return b"{}"

    # private: a computation of a known length
    computations._processes.run = slow  # type: ignore[method-assign]

    async def rush() -> None:
        asks = [
            asyncio.create_task(computations.answer("a", "/v1/epsilon", UnreadBody(text)))
            for text in (b"first", b"second", b"third")
        ]
        await asyncio.sleep(0.05)
        asks[1].cancel()
        await asyncio.gather(*asks, return_exceptions=True)

    asyncio.run(rush())
    assert begun == ["first", "third"]


def test_a_question_whose_client_has_gone_is_given_up() -> None:
    given_up = False

    async def answer() -> bytes:
        nonlocal given_up
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            given_up = True
            raise
        return b""

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def ask() -> None:
        request = routes.Request({"type": "http"}, receive)
        with pytest.raises(Problem):
            await routes.cancel_on_disconnect(request, answer())
        await asyncio.sleep(0)

    asyncio.run(ask())
    assert given_up


def test_an_endless_question_is_refused_as_too_expensive(url: str) -> None:
    with serving(url, computation_seconds_max=0.5) as found:
        begun = time.monotonic()
        answer = found.http.post("/v1/noise-multiplier", json=ENDLESS)
        assert (answer.status_code, answer.json()["code"]) == (422, "too-expensive")
        assert time.monotonic() - begun < 20
        assert found.http.post("/v1/epsilon", json=QUESTION).status_code == 200


# --- the ledger


@pytest.mark.slow
def test_quotes_of_one_key_leave_another_keys_alone(url: str) -> None:
    """One key's calculations never take every process, and keys take turns at them."""
    with serving(url, computation_processes=2) as found:
        greedy, other = found.admin, found.caller(Scope.ADMIN)
        greedy.dataset("d", BUDGET)
        other.dataset("e", BUDGET)
        plans = {"mechanisms": [run(0.01 + k / 1e5, 0.8, 5000) for k in range(25)]}
        alone = seconds_of_quote(other, 1)
        with ThreadPoolExecutor(12) as clients:
            path = "/v1/datasets/d/quotes/batch"
            rush = [clients.submit(greedy.post, path, plans) for _ in range(12)]
            time.sleep(0.5)
            took = seconds_of_quote(other, 2)
            unfinished = sum(not each.done() for each in rush)
            assert unfinished >= 10, "the rush was over too early to tell"
            assert {each.result()[0] for each in rush} == {200}
        assert took < max(1.0, 20 * alone)


def seconds_of_quote(caller: Caller, number: int) -> float:
    """Ask for a quote for dataset `e`; return how long that took."""
    begun = time.monotonic()
    caller.make("/v1/datasets/e/quotes", {"mechanism": run(0.02, 1.0 + number / 100, 100)})
    return time.monotonic() - begun


@ON_POSTGRESQL
def test_grants_that_wait_for_one_row_leave_another_dataset_alone(own_web: Service) -> None:
    admin, runs = own_web.admin, []
    for name in ("locked", "free"):
        admin.dataset(name, filter="renyi")
        runs.append(admin.reserve(name)["id"])
    with own_web.repository.engine.connect() as holder, ThreadPoolExecutor(40) as clients:
        holder.exec_driver_sql("SELECT * FROM dataset WHERE name = 'locked' FOR UPDATE")
        waiting = [clients.submit(admin.grant, runs[0], 1, 0) for _ in range(40)]
        time.sleep(1.0)
        begun = time.monotonic()
        for sequence in range(5):
            assert admin.grant(runs[1], 1, sequence)[0] == 200
        assert time.monotonic() - begun < 2
        view = admin.read("/v1/datasets/locked")  # reading waits for no lock
        assert not any(view["spent"]["micronats"])
        holder.rollback()
        statuses = [each.result()[0] for each in waiting]
    assert set(statuses) <= {200, 409, 503}
    assert statuses.count(200) == 1


@ON_POSTGRESQL
def test_a_lock_held_for_long_is_answered_with_retry_after(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # private: no setting changes the seconds that the database waits for a lock
    monkeypatch.setattr("accountant_service.ledger.repository._LOCK_SECONDS", 0.2)
    # private: nor those that a write waits for its turn
    monkeypatch.setattr("accountant_service.api.async_ledger._WRITE_WAIT_SECONDS_MAX", 0.5)
    with serving(url) as found:
        admin = found.admin
        admin.dataset("d", filter="renyi")
        path = f"/v1/reservations/{admin.reserve('d', PLAN_JSON)['id']}/grants"
        grant = ("POST", path, {"steps": 1, "sequence": 0}, "once")
        with found.repository.engine.connect() as holder, ThreadPoolExecutor(12) as clients:
            holder.exec_driver_sql("SELECT * FROM dataset FOR UPDATE")
            asked = [clients.submit(admin.send, *grant) for _ in range(12)]
            answers = [each.result() for each in asked]
        assert {answer.json()["code"] for answer in answers} == {"database-away", "busy"}
        assert all(answer.status_code == 503 for answer in answers)
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers)
        assert admin.send(*grant).status_code == 200


def test_a_plan_too_large_to_be_answered_with_each_grant_is_not_reserved(web: Service) -> None:
    parts = [gaussian(50 + k / 10000) for k in range(4000)]
    plan = {"mechanism": {"kind": "composed", "mechanisms": parts}}
    web.admin.dataset("small")
    status, problem = web.admin.post("/v1/datasets/small/reservations", plan)
    assert (status, problem["code"]) == (422, "too-expensive")
    assert "131072 bytes" in problem["detail"]


@pytest.mark.slow
def test_memory_for_large_bodies_is_bounded_and_small_ones_are_always_read(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accountant_service.server.app.BODY_MEMORY_BYTES", 10_000)
    body = {"mechanism": LARGE, "delta": 1e-5}
    with serving(url) as found:
        http, room = found.http, found.app.state.body_memory  # type: ignore[attr-defined]
        for _ in range(3):  # the room is given back
            assert http.post("/v1/epsilon", json=body).status_code == 200
        room.take(9_000)
        answer = http.post("/v1/epsilon", json=body)
        assert (answer.status_code, answer.json()["code"]) == (503, "busy")
        assert answer.headers["Retry-After"]
        assert http.post("/v1/epsilon", json=QUESTION).status_code == 200
        room.give_back(9_000)
        assert http.post("/v1/epsilon", json=body).status_code == 200


@pytest.mark.slow
def test_the_serving_process_computes_nothing(own_web: Service) -> None:
    """Policies, charges, quotes, totals and certificates are calculated elsewhere."""
    plans = [
        {"kind": "composed", "mechanisms": [run(1e-3, j + i / 50, 999) for i in range(25, 65)]}
        for j in range(3)
    ]
    admin = own_web.admin
    admin.dataset("d", BUDGET)
    begun, used = time.monotonic(), time.process_time()
    made = admin.reserve("d", RUN)["id"]
    assert admin.grant(made, 1000, 0)[0] == 200
    admin.commit(made)
    for path in ("datasets/d/running-total", f"reservations/{made}/certificate"):
        admin.read(f"/v1/{path}")
    admin.make("/v1/datasets/d/quotes/batch", {"mechanisms": plans})
    took, used = time.monotonic() - begun, time.process_time() - used
    assert took > 1, "too little work to tell"
    assert used < 0.3 * took


# --- what one key may store

EMPTY = {"kind": "composed", "mechanisms": []}
FREE = {"kind": "composed", "mechanisms": [EMPTY] * 3200}  # 128 kB that cost no budget


@ON_SQLITE
def test_no_call_of_the_ledger_takes_a_large_plan(url: str) -> None:
    large = EMPTY | {"mechanisms": [EMPTY] * 4000}
    with serving(url) as found:
        found.admin.dataset("d", BUDGET)
        dataset = {"name": "e", "size": 9, "budget": BUDGET, "planned_mechanism": large}
        for path, body, pointer in (
            ("/v1/datasets", dataset, "/planned_mechanism"),
            ("/v1/datasets/d/quotes", {"mechanism": large}, "/mechanism"),
            ("/v1/datasets/d/reservations", {"mechanism": large}, "/mechanism"),
        ):
            status, problem = found.admin.post(path, body)
            assert (status, problem["code"]) == (422, "too-expensive")
            assert "may have 131072 bytes" in problem["detail"]
            assert [each["pointer"] for each in problem["errors"]] == [pointer]


@ON_SQLITE
@pytest.mark.slow
def test_a_stored_answer_does_not_repeat_the_plan(url: str) -> None:
    with serving(url) as found:
        admin = found.admin
        admin.dataset("d", BUDGET)
        made = admin.make("/v1/datasets/d/reservations", {"mechanism": FREE}, once="reserve")
        path = f"/v1/reservations/{made['id']}"
        answers = {
            "renew": admin.make(f"{path}/renew", {}, once="renew"),
            "grants": admin.make(f"{path}/grants", {"steps": 1, "sequence": 0}, once="grants"),
            "commit": admin.make(f"{path}/commit", {}, once="commit"),
        }
        closed = admin.make("/v1/datasets/d/close", {}, once="close")
        with found.repository.reading() as reading:
            rows = reading.connection.execute(text("SELECT value, answer FROM idempotency_key"))
            stored = {row.value: row.answer for row in rows}
        repeated = ("reserve", *answers, "close")
        assert max(len(stored[name]) for name in repeated) < 1500
        assert admin.make("/v1/datasets/d/reservations", {"mechanism": FREE}, "reserve") == made
        assert admin.make(f"{path}/renew", {}, "renew") == answers["renew"]
        assert admin.make(f"{path}/commit", {}, "commit") == answers["commit"]
        grant = admin.make(f"{path}/grants", {"steps": 1, "sequence": 0}, "grants")
        assert grant == answers["grants"], "as it was, though the run has ended since"
        assert admin.make("/v1/datasets/d/close", {}, "close") == closed


@ON_SQLITE
@pytest.mark.slow
def test_an_answer_that_an_earlier_version_stored_whole_is_repeated(url: str) -> None:
    with serving(url) as found:
        found.admin.dataset("d", BUDGET)
        made = found.admin.make("/v1/datasets/d/reservations", {"mechanism": PLAN_JSON}, "once")
        with found.repository.transaction() as transaction:
            transaction.connection.execute(
                text("UPDATE idempotency_key SET answer = :whole WHERE value = 'once'"),
                {"whole": json.dumps(made | {"purpose": "as stored"})},
            )
        again = found.admin.make("/v1/datasets/d/reservations", {"mechanism": PLAN_JSON}, "once")
        assert again == made | {"purpose": "as stored"}


@ON_SQLITE
@pytest.mark.slow
def test_a_page_of_runs_or_entries_stays_small(url: str) -> None:
    with serving(url) as found:
        found.admin.dataset("d", BUDGET)
        made = {found.admin.reserve("d", FREE)["id"] for _ in range(5)}
        for name, entries in (("reservations", 5), ("entries", 6)):
            items, cursor, pages = [], "", 0
            while cursor is not None:
                answer = found.admin.send("GET", f"/v1/datasets/d/{name}?cursor={cursor}")
                assert len(answer.content) < 400_000
                page = answer.json()
                items, cursor, pages = [*items, *page["items"]], page["next_cursor"], pages + 1
            assert (len(items), pages) == (entries, 3)
        assert {each["reservation"] for each in items if "reservation" in each} == made
        assert found.admin.send("GET", "/v1/datasets/d").status_code == 200


@ON_SQLITE
@pytest.mark.slow
def test_a_key_has_a_number_of_open_and_of_unspent_runs(url: str) -> None:
    with serving(url, open_runs_max=3, unspent_runs_max=4) as found:
        one, other = found.caller(Scope.RUN), found.caller(Scope.RUN)
        found.admin.dataset("d", BUDGET)
        runs = [one.reserve("d")["id"] for _ in range(3)]
        status, problem = one.try_to_reserve("d", PLAN_JSON)
        assert (status, problem["code"]) == (409, "too-many-runs")
        assert "has 3 open runs" in problem["detail"]
        other.reserve("d")
        assert one.grant(runs[0], 10, 0)[0] == 200
        assert one.commit(runs[0])[0] == 200
        for each in runs[1:]:
            one.make(f"/v1/reservations/{each}/release")
        for _ in range(2):  # two were released unused, two cost nothing
            one.make(f"/v1/reservations/{one.reserve('d', FREE)['id']}/release")
        status, problem = one.try_to_reserve("d", PLAN_JSON)
        assert (status, problem["code"]) == (409, "too-many-runs")
        assert "4 runs of the dataset that spent nothing" in problem["detail"]
        other.reserve("d", FREE)


def test_runs_that_spent_nothing_count_for_a_day(scenario: Scenario) -> None:
    scenario.ledger = Ledger(scenario.repository, ANSWERS, run_quota=RunQuota(unspent_max=2))
    person = scenario.person(Scope.ADMIN)
    person.create()
    for _ in range(2):
        person.release(person.reserve(lease=3600))
    scenario.wait(3600 + 86_000)
    with refused("too-many-runs"):
        person.reserve()
    scenario.wait(1000)
    person.reserve()


def test_a_stranger_waits_for_no_lock_and_takes_none(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that may not change a run is refused before the write turn, if it knows the run too."""
    scenario.admin.create()
    run = scenario.person(team="a").reserve()
    stranger, elsewhere = scenario.person(team="b"), scenario.person(datasets=("e",))

    def locked(*_: Any) -> Any:
        raise AssertionError("a transaction began")

    with monkeypatch.context() as patch:
        patch.setattr(scenario.repository, "transaction", locked)
        for act in (stranger.grant, stranger.renew, stranger.commit, stranger.release):
            with refused("forbidden"):
                act(run)
        for act in (elsewhere.grant, elsewhere.commit):
            with refused("not-found", "there is no reservation"):
                act(run)
        with refused("not-found"):
            stranger.grant("0" * 32)


@pytest.mark.slow
@ON_SQLITE
def test_over_http_a_stranger_takes_no_turn(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(url) as found:
        found.admin.dataset("d", BUDGET)
        run = found.caller(Scope.RUN).reserve("d")["id"]
        stranger = found.caller(Scope.RUN)
        stranger.send("GET", "/v1/datasets/d")  # its key's use is recorded

        def turn(*_: Any) -> Any:
            raise AssertionError("it waits for a turn")

        monkeypatch.setattr(
            found.app.state.async_ledger._writes, "turn", turn
        )  # private: the queue
        for path, body in (("grants", {"steps": 1, "sequence": 0}), ("renew", {}), ("commit", {})):
            asked = stranger.refusal("POST", f"/v1/reservations/{run}/{path}", body)
            assert asked == (403, "forbidden")
