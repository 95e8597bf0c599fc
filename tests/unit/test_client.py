"""The client against a service that fails in every way: typed errors, and never a step."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import pickle
import re
import signal
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tests.support.stub_service import (
    PLAN,
    claim,
    linear_accountant,
    service,
    tiny_data,
)
from training_client.budget import Allowance, Budget, LedgerBudget, NoBudget, require_same_charge
from training_client.client import AccountingService, Reservation
from training_client.errors import (
    BudgetExhaustedError,
    DataError,
    NoGuaranteeError,
    ServiceConfusedError,
    ServiceRefusedError,
    ServiceUnreachableError,
)
from training_client.lab import cli, compare
from training_client.lab import train as training
from training_client.lab.cli.progress import catch_signals
from training_client.lab.data import Dataset
from training_client.lab.federated import Participant
from training_client.lab.models import cross_entropy, mlp
from training_client.lab.pca import PrivatePca
from training_client.lab.plan_run import RunSpec, reserve_budget
from training_client.lab.recipe import RecipeOptions, TrainingData, make_recipe
from training_client.optimizers import (
    OPTIMIZERS,
    PrivateOptimizer,
    make_optimizer,
    share_budget,
)
from training_client.phased_budget import PhasedLedgerBudget
from training_client.plan import Plan, Schedule
from training_client.private_step.kernels.sparse import SparseFactor
from training_client.private_step.sampling import PoissonSampler
from training_client.run_report import settle


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training_client.client.time.sleep", lambda _: None)


def own(**more: Any) -> Budget:
    """Return a budget of ε = 2, which allows 20 steps."""
    return Budget(service(more.pop("answer", linear_accountant)), PLAN, 2.0, 1e-5, **more)


def test_a_budget_may_start_at_a_later_step() -> None:
    budget = own(block=3)
    budget.allow(15)
    assert (budget.allowed, budget.spent) == (17, pytest.approx(1.7))
    budget.allow(20)
    with pytest.raises(BudgetExhaustedError, match="20 steps fit"):
        budget.allow(21)


def holding(steps: int, granted: int = 0) -> Reservation:
    return Reservation("r", "open", steps, granted, PLAN.mechanism(steps))


def held(accounting: AccountingService) -> LedgerBudget:
    reservation = holding(20, 0)
    return LedgerBudget(accounting, PLAN, "d", 1e-5, reservation, block=10)


def granting(path: str, body: dict[str, Any], reserved: int = 20) -> httpx.Response:
    """As `linear_accountant`, with a ledger that grants what is asked for."""
    if not path.endswith("/grants"):
        return linear_accountant(path, body)
    granted = {"steps_reserved": reserved, "steps_granted": body["sequence"] + body["steps"]}
    return httpx.Response(200, json={"id": "r", "state": "open"} | granted)


def after_pca(path: str, body: dict[str, Any]) -> httpx.Response:
    """As `linear_accountant`, with a free release before the steps."""
    if path == "/v1/epsilon" and body["mechanism"]["kind"] == "composed":
        body["mechanism"] = body["mechanism"]["mechanisms"][-1]
    return linear_accountant(path, body)


def either(ledger: bool, transport: Any = granting) -> Budget | LedgerBudget:
    return held(service(transport)) if ledger else own(answer=transport)


def train_three_steps(optimizer: PrivateOptimizer) -> PrivateOptimizer:
    for _ in range(3):
        optimizer.expect_examples(4)
        optimizer.step(torch.randn(4, 6), torch.tensor([0, 1, 2, 3]), cross_entropy)
    return optimizer


@pytest.mark.parametrize("ledger", [False, True])
def test_a_step_may_be_checked_twice_and_taken_once(ledger: bool) -> None:
    budget = either(ledger)
    first = second = budget.made
    budget.allow(first + 1)
    budget.take(first + 1)
    with pytest.raises(NoGuaranteeError, match="step 1 was taken before"):
        budget.take(second + 1)
    with pytest.raises(NoGuaranteeError, match="another run uses the same budget"):
        budget.allow(second + 1)
    budget.allow(first + 2)
    later = budget.made
    assert later == (10 if ledger else 1)  # who begins now begins after what is granted
    budget.take(later + 1)
    with pytest.raises(NoGuaranteeError, match=f"all steps up to {later + 1}"):
        budget.take(first + 2)


@pytest.mark.parametrize("name", ["adadp", "dp_adam", "pi_adam"])
@pytest.mark.slow
def test_a_checkpoint_is_refused_if_its_steps_are_not_paid_for(name: str) -> None:
    """A ledger that was restored from a backup has granted fewer steps than the run made."""
    optimizer = make_optimizer(name, nn.Linear(6, 4), held(service(granting)), learning_rate=0.1)
    kept = train_three_steps(optimizer).state_dict()

    def resumed(granted: int) -> PrivateOptimizer:
        budget = LedgerBudget(service(granting), PLAN, "d", 1e-5, holding(20, granted), block=10)
        found = make_optimizer(name, nn.Linear(6, 4), budget, learning_rate=0.1)
        found.load_state_dict(kept)
        return found

    assert resumed(10).steps_made == 10  # all granted steps count as made
    assert resumed(3).steps_made == 3
    with pytest.raises(NoGuaranteeError, match=r"after 3 steps.* granted only 2 of them"):
        resumed(2)
    without = own()
    counted = make_optimizer(name, nn.Linear(6, 4), without, learning_rate=0.1)
    counted.load_state_dict(kept)
    assert counted.steps_made == 3  # without a ledger the checkpoint counts them
    train_three_steps(counted)
    assert without.taken == 6
    del kept["steps_made"]  # as in checkpoints of earlier versions
    assert resumed(2).steps_made == 2


HALVED = Schedule.by_steps([(2, 1.0), (1, 0.5)])
OTHER_PLANS = [
    replace(PLAN, noise_multiplier=3.0),
    replace(PLAN, sample_rate=0.05),
    replace(PLAN, sampling="balls_in_bins"),
    replace(PLAN, noise_schedule=Schedule.by_steps([(2, 1.0), (1, 2.0)])),
]


def optimizer_of(name: str, plan: Plan, ledger: bool = False) -> PrivateOptimizer:
    """Return an optimizer whose budget covers 20 charges of a plan."""
    budget: Allowance = Budget(service(linear_accountant), plan, epsilon=2.0, delta=1e-5)
    if ledger:
        whole = plan.mechanism(20 * plan.steps_per_charge)
        reservation = Reservation("r", "open", 20, 10, whole)
        budget = LedgerBudget(service(granting), plan, "d", 1e-5, reservation)
    return make_optimizer(name, nn.Linear(6, 4), budget, learning_rate=0.1)


@pytest.mark.spread(first=3)
@pytest.mark.parametrize("name", ["adadp", "dp_adam", "pi_adam"])
@pytest.mark.parametrize("other", OTHER_PLANS, ids=["noise", "rate", "sampling", "schedule"])
def test_steps_of_a_checkpoint_are_not_claimed_under_another_plan(name: str, other: Plan) -> None:
    kept = train_three_steps(optimizer_of(name, PLAN)).state_dict()
    budgets = [False] if other.noise_schedule is not None else [False, True]
    for resumed in [optimizer_of(name, other, ledger) for ledger in budgets]:
        before = resumed.steps_made
        with pytest.raises(NoGuaranteeError, match="resume with the plan of") as no:
            resumed.load_state_dict(kept)
        assert PLAN.charged_step() in str(no.value)
        assert other.charged_step() in str(no.value)
        assert resumed.steps_made == before
    anew = optimizer_of(name, other)  # a new run that begins with the state of another
    anew.load_state_dict({key: value for key, value in kept.items() if key != "steps_made"})
    assert anew.steps_made == 0
    same = optimizer_of(name, replace(PLAN, clip_norm=0.5, learning_rate_schedule=HALVED))
    same.load_state_dict(kept)  # a step's cost is the same
    assert same.steps_made == 3
    with pytest.raises(DataError, match="is not one of this optimizer"):
        optimizer_of(name, PLAN).load_state_dict(kept | {"charged_mechanism": 7})


NOTHING = NoBudget(PLAN, 20, "a test")


@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize(
    ("name", "state"), [("adadp", "privatised"), ("dp_adam", "privatised"), ("pi_adam", "raw")]
)
def test_a_run_without_a_claim_does_not_become_one(name: str, state: str, ledger: bool) -> None:
    """Nor after its checkpoint was edited: what says that there is a claim must be there."""
    first = make_optimizer(name, nn.Linear(6, 4), NOTHING, learning_rate=0.1, state=state)
    kept = train_three_steps(first).state_dict()
    make_optimizer(name, nn.Linear(6, 4), NOTHING, learning_rate=0.1).load_state_dict(kept)
    claimed = train_three_steps(optimizer_of(name, PLAN)).state_dict()
    without = {key: kept[key] for key in kept if key != "steps_made"}
    raw = {"claim": claimed["claim"], "released_before": []}
    message = "run without a claim"
    for edited, why in (
        (kept, message),
        (kept | {"steps_made": 0}, message),
        (without, message),
        (kept | {"reservations": ["r"], "released_before": []}, message),
        ({key: kept[key] for key in kept if key != "claim"}, "no entry claim"),
        ({key: kept[key] for key in kept if key not in KEYS}, "no entry released_before"),
        ({key: kept[key] for key in kept.keys() - {"state_source"}} | raw, "no entry state_source"),
        *([(kept | raw, "made of raw gradients")] if state == "raw" else []),
    ):
        resumed = optimizer_of(name, PLAN, ledger)
        before = resumed.steps_made
        with pytest.raises(NoGuaranteeError, match=why):
            resumed.load_state_dict(edited)
        assert resumed.steps_made == before


def test_a_framework_s_checkpoint_of_a_run_without_a_claim_does_not_become_one() -> None:
    """They compare only what a budget's checkpoint names."""
    for steps in (0, 3):
        for budget in (own(), held(service(granting)), share_budget(own)):
            assert budget.claim == budget.checkpoint_keys()["claim"]
            with pytest.raises(NoGuaranteeError, match=f"To claim {re.escape(budget.claim)}"):
                require_same_charge(NOTHING.checkpoint_keys(), steps, budget.checkpoint_keys())
        require_same_charge(NOTHING.checkpoint_keys(), steps, NOTHING.checkpoint_keys())


KEYS = ("claim", "state_source")  # that earlier versions did not write


@pytest.mark.parametrize("name", ["adadp", "dp_adam"])
def test_a_claimed_checkpoint_of_an_earlier_version_is_resumed_if_it_shows_its_claim(
    name: str,
) -> None:
    kept = train_three_steps(optimizer_of(name, PLAN)).state_dict()
    earlier = {key: kept[key] for key in kept if key not in KEYS}
    resumed = optimizer_of(name, PLAN)
    resumed.load_state_dict(earlier)
    assert resumed.steps_made == 3
    resumed.load_state_dict(train_three_steps(resumed).state_dict())
    assert resumed.steps_made == 6
    for key in ("charged_mechanism", "released_before", "reservations"):
        for full in (earlier, kept):
            with pytest.raises(NoGuaranteeError, match=f"no entry {key}"):
                optimizer_of(name, PLAN).load_state_dict(
                    {each: full[each] for each in full if each != key}
                )


@pytest.mark.parametrize("ledger", [False, True])
def test_what_decides_a_claim_cannot_be_replaced(ledger: bool) -> None:
    """A step would no longer be what the budget pays for, and the claim would not say so."""
    optimizer = optimizer_of("dp_adam", PLAN, ledger)
    for holder, name in (
        *((optimizer, name) for name in (
            "source", "allowance", "private_sum", "plan", "clip_norm", "transform", "update",
            "step", "automatic_clipping", "parameters", "torch_optimizer", "steps_made",
            "__class__",
        )),
        *((optimizer.private_sum, name) for name in (
            "allowance", "plan", "clipper", "release", "clipped_sum", "_generator", "processes",
        )),
        *((optimizer.allowance, name) for name in ("plan", "delta", "before")),
    ):  # fmt: skip
        value = getattr(holder, name)
        with pytest.raises(NoGuaranteeError, match=rf"{name}.* cannot be replaced"):
            setattr(holder, name, value)
    if isinstance(optimizer.allowance, LedgerBudget):
        another = replace(optimizer.allowance.reservation, identifier="s")
        with pytest.raises(NoGuaranteeError, match="reservation cannot be replaced"):
            optimizer.allowance.reservation = another
    optimizer.learning_rate = 0.2
    optimizer.clip_factor = 1.0
    trial = make_optimizer("dp_adam", nn.Linear(6, 4), NOTHING)
    trial.source, trial.automatic_clipping = trial.source, 0.1


PCA: Any = {"kind": "gaussian", "noise_multiplier": 10}


@pytest.mark.parametrize("name", ["adadp", "dp_adam"])
def test_a_checkpoint_names_the_releases_and_reservations_that_a_claim_must_cover(
    name: str, tmp_path: Path
) -> None:
    def resumed(budget: Allowance) -> PrivateOptimizer:
        return make_optimizer(name, nn.Linear(6, 4), budget, learning_rate=0.1)

    def own(*before: Any) -> Budget:
        return Budget(service(after_pca), PLAN, epsilon=2.0, delta=1e-5, before=before)

    def ledger(identifier: str, *before: Any) -> LedgerBudget:
        reservation = replace(holding(20, 10), identifier=identifier)
        return LedgerBudget(service(granting), PLAN, "d", 1e-5, reservation, before)

    def phased(*identifiers: str) -> PhasedLedgerBudget:
        parts = [replace(PLAN, noise_multiplier=each) for each in (1.0, 2.0)]
        held = [
            replace(holding(5, 5), identifier=each, mechanism=part.mechanism(5))
            for each, part in zip(identifiers, parts, strict=True)
        ]
        phases = [
            LedgerBudget(service(granting), part, "d", 1e-5, each)
            for part, each in zip(parts, held, strict=True)
        ]
        halves = Schedule.by_steps([(5, 1.0), (5, 2.0)])
        return PhasedLedgerBudget(replace(PLAN, noise_schedule=halves), phases)

    file = tmp_path / "checkpoint.pt"
    anew = "before=(…,)"
    for first, later, message in (
        (own(PCA), own(), "before=[]"),
        (own(), own(PCA), "released []"),
        (own(PCA), own({**PCA, "noise_multiplier": 10.0}), None),
        (own(PCA), ledger("a", PCA), "charged to no reservation"),
        (ledger("a", PCA), ledger("a"), "before=[]"),
        (ledger("a"), ledger("b"), "charged to reservation a"),
        (ledger("a"), ledger("a"), None),
        (ledger("a", PCA), own(PCA), None),  # it counts, and claims, the steps itself
        (ledger("a"), own(PCA), "released []"),
        (ledger("a", PCA), NOTHING, None),
        (phased("a", "b"), phased("a", "b"), None),
        (phased("a", "b"), phased("c", "d"), "reservation a, b, but this budget holds reservation"),
        (ledger("a"), share_budget(lambda: ledger("b")), anew),
        (share_budget(lambda: ledger("a", PCA)), share_budget(lambda: ledger("a", PCA)), None),
    ):
        made = resumed(first).state_dict() | {"steps_made": 5}
        torch.save(made, file)
        optimizer, kept = resumed(later), torch.load(file, weights_only=True)
        before = optimizer.steps_made
        if message is None:
            optimizer.load_state_dict(kept)
            assert optimizer.steps_made >= 5
            continue
        with pytest.raises(NoGuaranteeError, match=re.escape(message)):
            optimizer.load_state_dict(kept)
        assert optimizer.steps_made == before
        optimizer.load_state_dict({key: x for key, x in kept.items() if key != "steps_made"})


def test_a_reservation_under_another_relation_is_refused() -> None:
    """The ledger would charge the run under it, and the claim would be for the dataset's."""
    replacing = replace(holding(20), dataset="d", neighbouring_relation="replace_one")
    budget = LedgerBudget(service(granting), PLAN, "d", 1e-5, replacing)
    for use in (budget.guarantee, budget.take):
        with pytest.raises(NoGuaranteeError, match="is for replace_one"):
            use(1)
    assert budget.made == 0


@pytest.mark.parametrize("ledger", [False, True])
def test_of_two_threads_one_is_granted_a_step(ledger: bool) -> None:
    """Both ask while the service takes its time: without a lock both would be answered."""
    within = threading.Barrier(2)

    def slow(path: str, body: dict[str, Any]) -> httpx.Response:
        with suppress(threading.BrokenBarrierError):
            within.wait(0.5)  # for the other thread to ask too
        return granting(path, body)

    budget = either(ledger, slow)

    def take(_: int) -> bool:
        try:
            budget.take(1)
        except NoGuaranteeError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(take, range(2))) == [False, True]
    assert budget.taken == 1


@pytest.mark.parametrize("ledger", [False, True])
def test_a_budget_cannot_be_copied(ledger: bool) -> None:
    budget = either(ledger)
    for copied, each in itertools.product(
        (copy.copy, copy.deepcopy, pickle.dumps), (budget, budget._counter)
    ):
        with pytest.raises(NoGuaranteeError, match="give each run its own budget"):
            copied(each)
    budget.take(1)


@pytest.mark.parametrize("ledger", [False, True])
def test_a_forked_process_is_granted_no_step(ledger: bool) -> None:
    budget = either(ledger)
    budget.take(1)
    if (child := os.fork()) == 0:
        try:
            budget.take(2)
        except NoGuaranteeError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    budget.take(2)


def test_a_budget_is_not_spent_by_a_second_model_again() -> None:
    budget = own(block=7)
    made: list[int] = []
    for steps_max in (12, None):
        model = mlp(5, 8, 2)
        optimizer = make_optimizer("dp_sgd", model, budget, learning_rate=0.1)
        result = training.train(
            model, tiny_data(), optimizer, steps_max=steps_max,
            report=lambda now: made.append(now.step),
        )  # fmt: skip
    assert made == list(range(1, 21))
    assert (result.steps, result.stopped_by_budget) == (20, True)
    assert result.guarantee.epsilon == pytest.approx(2.0)


def stopping_after(steps: int) -> dict[str, Any]:
    """Ways of `train` to end a run early."""
    asked = iter(range(steps + 1))
    return {"stop": lambda: next(asked) == steps}


@pytest.mark.parametrize("how", [stopping_after(3), {"steps_max": 3}], ids=["asked", "steps_max"])
@pytest.mark.parametrize(("kind", "planned"), [("open", 20), ("declared", 12), ("ledger", 20)])
def test_a_run_that_stops_early_claims_its_plan(
    kind: str, planned: int, how: dict[str, Any], tmp_path: Path
) -> None:
    """ε = 2 allows 20 steps. Only an end that was declared before the first step counts."""
    how = stopping_after(3) if "stop" in how else how
    accounting = service(granting)
    budget: Budget | LedgerBudget = Budget(accounting, PLAN, epsilon=2.0, delta=1e-5, block=7)
    if kind == "ledger":
        budget = held(accounting)
        budget.block = 2
    elif kind == "declared":
        budget = replace(budget, steps=12)
    model = mlp(5, 8, 2)
    optimizer = make_optimizer("dp_sgd", model, budget, learning_rate=0.1)
    result = training.train(model, tiny_data(), optimizer, **how)
    assert (result.steps, result.stopped_by_budget) == (3, False)
    assert result.stopped_by_request == ("stop" in how)
    assert result.guarantee.epsilon == pytest.approx(0.1 * planned)
    said = result.guarantee.document
    assert (said["steps"], said["steps_planned"], said["scope"]) == (3, planned, "fixed_plan")
    assert said["mechanism"] == PLAN.mechanism(planned)
    budget.commit = lambda *_: None  # type: ignore[method-assign]
    settle(budget, 3, tmp_path)  # what the integrations end with
    written = json.loads((tmp_path / "privacy.json").read_text())
    assert written["epsilon"] == pytest.approx(0.1 * planned)
    assert (written["steps"], written["steps_planned"]) == (3, planned)


def test_a_claim_names_what_it_rests_on_beside_its_theorem(tmp_path: Path) -> None:
    budget = own(steps=3)
    optimizer = make_optimizer("dp_sgd", mlp(5, 8, 2), budget, learning_rate=0.1)
    # private: which operations have no rule changes with every rule that is written
    optimizer.private_sum.clipper._checked.unproved.append("odd() in line 7 has no rule")
    training.train(mlp(5, 8, 2), tiny_data(), optimizer, steps_max=2)
    settle(budget, 3, tmp_path)
    assumed = json.loads((tmp_path / "privacy.json").read_text())["assumed"]
    assert assumed[-1] == (
        "Examples are apart, which was tested and not proved: odd() in line 7 has no rule."
    )
    assert optimizer.unproved == ("odd() in line 7 has no rule",)
    for words in ("AES-256", "alike beside other records", "named for"):
        assert sum(words in each for each in assumed) == 1


def test_no_step_is_made_after_an_end_that_was_declared() -> None:
    budget = own(steps=5)
    budget.take(5)
    with pytest.raises(BudgetExhaustedError, match="all 5 steps of the plan are made"):
        budget.take(6)
    assert budget.guarantee(5).epsilon == pytest.approx(0.5)


def test_what_is_claimed_does_not_depend_on_where_the_run_stopped() -> None:
    for block, made in itertools.product((1, 3, 50), (0, 1, 19, 20)):
        budget = own(block=block)
        for step in range(1, made + 1):
            budget.take(step)
        assert budget.guarantee(made).epsilon == pytest.approx(2.0)
        with pytest.raises(BudgetExhaustedError, match="20 steps fit"):
            budget.allow(21)


@pytest.mark.parametrize("cost", [0.0, 1e-12])
def test_an_unlimited_plan_ends_at_the_services_largest_step_count(cost: float) -> None:
    def nearly_free(_: str, body: dict[str, Any]) -> httpx.Response:
        steps = body["mechanism"]["steps"]
        if steps > 10**9:
            return httpx.Response(422, json={"code": "invalid-request"})
        return httpx.Response(200, json=claim(cost * steps))

    budget = Budget(service(nearly_free), PLAN, epsilon=2.0, delta=1e-5)
    budget.take(1)
    assert budget.guarantee(1).document["steps_planned"] == 10**9


def test_a_plan_ends_before_no_epsilon_is_finite() -> None:
    def noisy_up_to_70(_: str, body: dict[str, Any]) -> httpx.Response:
        if body["mechanism"]["steps"] > 70:
            return httpx.Response(422, json={"code": "no-finite-epsilon"})
        return httpx.Response(200, json=claim(1.0))

    budget = Budget(service(noisy_up_to_70), PLAN, epsilon=2.0, delta=1e-5)
    budget.take(1)
    assert budget.guarantee(1).document["steps_planned"] == 70
    with pytest.raises(BudgetExhaustedError, match="70 steps fit"):
        budget.allow(71)


def test_a_plan_without_privacy_is_refused() -> None:
    for name in ("dataset_size", "sample_rate", "clip_norm", "noise_multiplier"):
        for value in (0, -1, math.nan, math.inf):
            if (name, value) == ("dataset_size", math.inf):
                continue
            said = f"a finite {name} > 0" if name in ("clip_norm", "noise_multiplier") else name
            with pytest.raises(ValueError, match=said):
                Plan(**{**asdict(PLAN), name: value})


def test_a_refusal_can_be_sent_to_other_processes() -> None:
    refusal = ServiceRefusedError("unknown-method", "there is no such method", ("/method",))
    sent = pickle.loads(pickle.dumps(refusal))
    assert (str(sent), sent.code, sent.pointers) == (str(refusal), refusal.code, refusal.pointers)


def run(accounting: AccountingService, **more: Any) -> tuple[training.Result, torch.nn.Module]:
    model = mlp(5, 8, 2)
    budget = Budget(accounting, PLAN, epsilon=2.0, delta=1e-5, block=7)
    optimizer = make_optimizer("dp_sgd", model, budget, learning_rate=0.1)
    return training.train(model, tiny_data(), optimizer, **more), model


def test_temporary_failures_are_retried_and_the_last_error_has_advice() -> None:
    calls = []

    def flaky(path: str, _: dict[str, Any]) -> httpx.Response:
        calls.append(path)
        if len(calls) < 3:
            return httpx.Response(503, json={"code": "busy"})
        return httpx.Response(200, json=claim(1.0))

    assert service(flaky).epsilon(PLAN.mechanism(5), 1e-5).epsilon == 1.0
    assert len(calls) == 3

    def down(*_: object) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ServiceUnreachableError, match="accountant serve") as caught:
        service(down).epsilon(PLAN.mechanism(5), 1e-5)
    assert caught.value.exit_code == 4


def test_refusals_are_not_retried_and_carry_the_code() -> None:
    calls = []

    def refuse(path: str, _: dict[str, Any]) -> httpx.Response:
        calls.append(path)
        problem = {"code": "no-finite-epsilon", "detail": "add noise", "errors": []}
        return httpx.Response(422, json=problem)

    with pytest.raises(ServiceRefusedError, match="add noise") as caught:
        service(refuse).epsilon(PLAN.mechanism(5), 1e-5)
    assert caught.value.code == "no-finite-epsilon"
    assert len(calls) == 1


def test_answers_that_do_not_follow_the_api_are_rejected() -> None:
    for answer in (
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[1]),
        httpx.Response(200, json={}),
        httpx.Response(200, json=claim(-1.0)),
        httpx.Response(200, json=claim(1.0, 2.0)),
        httpx.Response(200, json={**claim(1.0), "epsilon": "much"}),
        httpx.Response(200, text='{"epsilon": NaN, "delta": 1e-5, "method": "a", "status": "b"}'),
        httpx.Response(404, text="not here"),
    ):
        with pytest.raises(ServiceConfusedError):
            service(lambda *_, answer=answer: answer).epsilon(PLAN.mechanism(5), 1e-5)


WRONG = [{"delta": 0.9}, {"status": "estimate"}, {"status": "refuted"}, {"method": "clt"}]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("ledger", [False, True])
def test_an_answer_to_another_question_allows_no_step(wrong: dict[str, Any], ledger: bool) -> None:
    budget = either(ledger, lambda *_: httpx.Response(200, json=claim(0.1) | wrong))
    with pytest.raises(ServiceConfusedError):
        budget.guarantee(5)
    with pytest.raises(ServiceConfusedError):
        budget.take(1)
    assert budget.made == 0


@pytest.mark.parametrize(("status", "taken"), [("estimate", True), ("refuted", False)])
def test_an_estimate_is_accepted_from_a_chosen_method_only_if_not_refuted(
    status: str, taken: bool
) -> None:
    answer = claim(0.1) | {"status": status, "method": "clt"}
    accounting = service(lambda *_: httpx.Response(200, json=answer))
    budget = Budget(accounting, PLAN, epsilon=2.0, delta=1e-5, method="clt")
    if taken:
        budget.take(1)
        assert budget.guarantee(1).status == status  # which privacy.json then says
    else:
        with pytest.raises(ServiceConfusedError, match="refuted"):
            budget.take(1)


def test_a_solution_whose_own_guarantee_misses_the_budget_is_not_trusted() -> None:
    def generous(*_: object) -> httpx.Response:
        return httpx.Response(200, json={"noise_multiplier": 0.5, "guarantee": claim(9.0)})

    with pytest.raises(ServiceConfusedError, match="outside the budget"):
        service(generous).noise_multiplier(sample_rate=0.1, steps=5, epsilon=2.0, delta=1e-5)


def test_a_refused_step_leaves_the_parameters_untouched() -> None:
    def nothing_left(path: str, _: dict[str, Any]) -> httpx.Response:
        if path == "/v1/steps":
            return httpx.Response(200, json={"steps": 0, "guarantee": claim(0.0)})
        return httpx.Response(200, json=claim(99.0))

    model = mlp(5, 8, 2)
    before = [p.clone() for p in model.parameters()]
    budget = Budget(service(nothing_left), PLAN, epsilon=2.0, delta=1e-5)
    with pytest.raises(BudgetExhaustedError) as caught:
        budget.allow(1)
    assert caught.value.exit_code == 3
    optimizer = make_optimizer("dp_sgd", model, budget, learning_rate=0.1)
    training.train(model, tiny_data(), optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_without_an_answer_no_step_is_made() -> None:
    """The service dies after two blocks: the granted steps are made, not one more."""
    asked = []
    made = []

    def dies(path: str, body: dict[str, Any]) -> httpx.Response:
        asked.append(path)
        if len(asked) > 2:
            raise httpx.ConnectError("gone")
        return linear_accountant(path, body)

    with pytest.raises(ServiceUnreachableError):
        run(service(dies), report=lambda now: made.append(now.step))
    assert made == list(range(1, 15))


def test_code_and_claim_come_from_one_plan() -> None:
    """An optimizer runs the plan that its allowance accounts for, and takes no other plan."""
    budget = own()
    optimizer = make_optimizer("dp_sgd", mlp(5, 8, 2), budget)
    assert optimizer.plan is budget.plan
    with pytest.raises(NoGuaranteeError, match=r"expected a budget.*got Plan.*NoBudget"):
        make_optimizer("dp_sgd", mlp(5, 8, 2), PLAN)  # type: ignore[arg-type]


# --- a dataset's budget


class Ledger:
    """A ledger of one reservation, which loses every third answer after it has acted."""

    def __init__(self, reserved: int) -> None:
        self.reserved, self.granted, self.calls = reserved, 0, 0
        self.answered: dict[str, dict[str, Any]] = {}

    def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or b"{}")
        if request.url.path in ("/v1/epsilon", "/v1/curve", "/v1/datasets/d"):
            return linear_accountant(request.url.path, body)
        assert request.headers["Authorization"] == "Bearer secret"
        key = request.headers["Idempotency-Key"]
        self.calls += 1
        if key not in self.answered:
            if body.get("sequence", 0) != self.granted:
                return httpx.Response(409, json={"code": "stale-sequence", "detail": "no"})
            self.granted += body["steps"]
            self.answered[key] = self.view()
        if self.calls % 3 == 0:
            raise httpx.ReadTimeout("lost")
        return httpx.Response(200, json=self.answered[key])

    def view(self) -> dict[str, Any]:
        held = {"steps_reserved": self.reserved, "steps_granted": self.granted}
        return {"id": "r", "state": "open", "mechanism": PLAN.mechanism(self.reserved), **held}

    def client(self) -> AccountingService:
        transport = httpx.MockTransport(self.handle)
        return AccountingService("http://test", api_key="secret", transport=transport)


def test_steps_are_charged_before_they_are_made_whatever_answers_are_lost() -> None:
    ledger = Ledger(reserved=20)
    accounting = ledger.client()
    held = Reservation.from_json(ledger.view())
    budget = LedgerBudget(accounting, PLAN, "d", 1e-5, held, block=3)
    model = mlp(5, 8, 2)
    made: list[int] = []

    def seen(now: training.Progress) -> None:
        made.append(now.step)
        assert ledger.granted >= now.step  # write-ahead

    result = training.train(
        model,
        tiny_data(),
        make_optimizer("dp_sgd", model, budget, learning_rate=0.1),
        report=seen,
    )
    assert made == list(range(1, 21))
    assert (result.steps, ledger.granted, result.stopped_by_budget) == (20, 20, True)


@pytest.mark.parametrize(
    ("step_seconds", "blocks"),
    [
        (0.4, [5] * 60),
        (0.001, [5, 100, 100, 95]),
        (0.03, [5, *[54] * 5, 25]),
    ],
)
def test_blocks_are_so_long_that_asking_takes_a_quarter_of_a_percent(
    monkeypatch: pytest.MonkeyPatch, step_seconds: float, blocks: list[int]
) -> None:
    """A grant takes 4 ms here: as long as a hundredth of a step, or 4 of them, or a seventh."""
    clock, granted = [0.0], [0]

    def answer(path: str, body: dict[str, Any]) -> httpx.Response:
        if not path.endswith("/grants"):
            return linear_accountant(path, body)
        clock[0] += 0.004
        granted.append(body["sequence"] + body["steps"])
        return granting(path, body, 300)

    monkeypatch.setattr("training_client.budget.time.monotonic", lambda: clock[0])
    held = holding(300, 0)
    budget = LedgerBudget(service(answer), PLAN, "d", 1e-5, held, block=5, block_max=100)
    for step in range(1, 301):
        budget.take(step)
        clock[0] += step_seconds
    assert [after - before for before, after in itertools.pairwise(granted)] == blocks


def test_a_grant_that_is_not_what_was_asked_for_stops_the_run() -> None:
    ledger = Ledger(reserved=20)
    accounting = ledger.client()
    held = holding(20, 5)  # the client knows of steps the ledger does not
    with pytest.raises(ServiceRefusedError, match="stale-sequence"):
        LedgerBudget(accounting, PLAN, "d", 1e-5, held).allow(6)
    with pytest.raises(ServiceConfusedError):
        Reservation.from_json({"id": "r", "state": "open", "steps_reserved": 1, "steps_granted": 2})


WANTED = RunSpec(1000, 0.1, 1.0, 50)
TINY = {"epsilon": 1.0, "delta": 1e-5}


def test_an_exhausted_budget_is_not_reported_as_a_bad_request() -> None:
    def full(path: str, body: dict[str, Any]) -> httpx.Response:
        if path.endswith("/quotes"):
            nothing = {"steps": 0, "noise_multiplier": None}
            return httpx.Response(200, json={"fits": False, "affordable": nothing})
        return httpx.Response(409, json={"code": "budget-exhausted", "detail": "nothing is left"})

    with pytest.raises(BudgetExhaustedError, match="nothing is left"):
        service(full).reserve("d", PLAN.mechanism(10))
    with pytest.raises(BudgetExhaustedError, match="no noise"):
        service(full).affordable_noise("d", PLAN.mechanism(10))


def dataset_of(records: int | None, **quote: Any) -> AccountingService:
    """Return a service with a dataset of this many records, and a quote for each plan."""

    def answer(path: str, _: dict[str, Any]) -> httpx.Response:
        if path.endswith("/quotes"):
            return httpx.Response(200, json=quote)
        if path.endswith("/reservations"):
            held = {"id": "r", "state": "open", "steps_reserved": 50, "steps_granted": 0}
            return httpx.Response(201, json=held | {"mechanism": WANTED.plan(1.0).mechanism(50)})
        size = {} if records is None else {"size": records}
        return httpx.Response(200, json={"budget": TINY} | size)

    return service(answer)


def test_a_reserved_run_is_told_what_is_left_in_steps() -> None:
    share = "It takes 24.7 % of the dataset's budget"
    for affordable, told in (
        (306, f"{share}, after which about 256 more such steps fit"),
        (51, f"{share}, after which about 1 more such step fits"),
        (50, f"{share}, after which no such step fits"),
        (None, share),
    ):
        some, said = {"steps": affordable, "noise_multiplier": 1.0}, list[str]()
        roomy = dataset_of(1000, fits=True, affordable=some, share_of_budget=0.247)
        reserve_budget(roomy, WANTED, "d", said.append, 1.0)
        assert said[-1] == told


@pytest.mark.parametrize("records", [1000, 1001, None])
def test_a_plan_that_does_not_fit_is_refused_with_what_would(records: int | None) -> None:
    """And whose budget it asks for is doubted if the ledger counts more records than there are."""
    some, said = {"steps": 7, "noise_multiplier": 3.25}, list[str]()
    small = dataset_of(records, fits=False, affordable=some, affordable_alone=40)
    with pytest.raises(BudgetExhaustedError, match=r"7 such steps.*σ = 3.25") as refused:
        reserve_budget(small, WANTED, "d", said.append, 1.0)
    assert "As the only run of the whole budget, 40 would" in str(refused.value)
    assert refused.value.exit_code == 3
    assert any("'d' has 1001 records, the training data 1000" in each for each in said) == (
        records == 1001
    )


def test_a_dataset_of_fewer_records_than_the_training_data_is_not_charged() -> None:
    """They are another's: its budget would be spent on them, and theirs not."""
    asked = list[str]()

    def answer(path: str, _: dict[str, Any]) -> httpx.Response:
        asked.append(path)
        return httpx.Response(200, json={"size": 999, "budget": TINY})

    with pytest.raises(DataError, match="999 records, the training data 1000"):
        reserve_budget(service(answer), WANTED, "d", lambda _: None, 1.0)
    assert asked == ["/v1/datasets/d"]


@pytest.mark.parametrize("address", ["127.0.0.1:8123", "htp://127.0.0.1:8123"])
def test_an_address_without_its_protocol_is_refused_at_once(address: str) -> None:
    with AccountingService(address) as asked, pytest.raises(DataError) as told:
        asked.dataset("d")
    assert "write it as http://127.0.0.1:8123, or as https://127.0.0.1:8123 if" in str(told.value)


def speak_plain_http(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")


def expect_tls(connection: socket.socket) -> None:
    with suppress(ssl.SSLError):  # it finds no TLS: no certificate is needed for that
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).wrap_socket(connection, server_side=True)


def reset_at_once(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize(
    ("answer", "used", "right", "said"),
    [
        (speak_plain_http, "https", "http", "It may speak plain HTTP"),
        (expect_tls, "http", "https", "It may require TLS"),
        (reset_at_once, "http", "https", "It may require TLS"),
    ],
)
def test_the_wrong_protocol_is_told_by_its_error(
    answer: Callable[[socket.socket], None], used: str, right: str, said: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def serve() -> None:
            with suppress(OSError):  # closed at the end
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        run = f"run --service {used}://127.0.0.1:{port} --data mnist --epsilon 2 --delta 1e-5"
        options = ["--steps", "3", "--output", str(tmp_path / "run")]
        found = CliRunner().invoke(cli.app, [*run.split(), *options])
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert f"{said}: use {right}://127.0.0.1:{port}" in found.output
    assert found.exit_code == 4


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (socket.gaierror(-2, "Name or service not known"), "There is no such host: correct"),
        (ssl.SSLCertVerificationError(1, "self-signed"), "Let this machine trust its certificate"),
        (ConnectionRefusedError(111, "Connection refused"), "Start it with `accountant serve`"),
    ],
)
def test_an_unreachable_service_is_explained_by_its_cause(cause: OSError, said: str) -> None:
    def fail(*_: object) -> httpx.Response:
        raise httpx.ConnectError(str(cause)) from cause

    with pytest.raises(ServiceUnreachableError, match=said):
        service(fail).dataset("d")


def test_a_proxy_that_asks_for_another_protocol_is_told_by_its_answer() -> None:
    def redirect(path: str, _: dict[str, Any]) -> httpx.Response:
        return httpx.Response(308, headers={"Location": f"https://accounts.example:444{path}"})

    plain = httpx.Response(400, text="The plain HTTP request was sent to HTTPS port")
    for answer, right in (
        (redirect, "use https://accounts.example:444"),
        (lambda *_: plain, "It requires TLS: use https://"),
    ):
        with pytest.raises(ServiceConfusedError, match=right):
            service(answer).dataset("d")


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_run_between_two_steps(kind: signal.Signals) -> None:
    before = signal.getsignal(kind)
    with catch_signals() as stop:
        assert not stop()
        os.kill(os.getpid(), kind)
        assert stop()
    assert signal.getsignal(kind) is before


@pytest.mark.parametrize(("every", "steps"), [(5, [5, 10, 15, 20]), (6, [6, 12, 18, 20])])
def test_accuracy_is_evaluated_during_training(
    every: int, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step is evaluated once, even if it is one of those evaluated during training."""
    evaluated = Mock(wraps=training.evaluate)
    monkeypatch.setattr(training, "evaluate", evaluated)
    result, _ = run(service(linear_accountant), evaluate_every=every)
    assert [step for step, _ in result.scores] == [each for each in steps if each % every == 0]
    assert evaluated.call_count == len(steps)
    if every == 5:
        assert result.scores[-1] == (20, result.test_score)


def test_public_rows_are_not_trained_on() -> None:
    data = tiny_data()
    private, (examples, labels) = data.split_public(30)
    assert len(private.train_labels) == 70
    assert torch.equal(torch.cat([examples, private.train_examples]), data.train_examples)
    assert torch.equal(torch.cat([labels, private.train_labels]), data.train_labels)


@pytest.mark.parametrize("ledger", [False, True])
def test_raw_state_can_only_be_trained_without_a_claim(ledger: bool) -> None:
    """Raw state is trained with a `NoBudget`, or not at all: code and claim cannot differ."""
    model = mlp(5, 8, 2)
    budget = either(ledger)
    with pytest.raises(NoGuaranteeError, match="raw"):
        make_optimizer("adadp", model, budget, state="raw")
    optimizer = make_optimizer("adadp", model, NoBudget(PLAN, 3, "raw"), state="raw")
    assert training.train(model, tiny_data(), optimizer).guarantee.status == "none"


def test_a_ledger_s_budget_is_for_the_plan_that_is_run() -> None:
    """Of another the ledger would charge what is not made."""
    for other in (replace(PLAN, noise_multiplier=0.5), replace(PLAN, sample_rate=0.2)):
        with pytest.raises(NoGuaranteeError, match="reserve budget for the plan that is run"):
            LedgerBudget(service(granting), other, "d", 1e-5, holding(20))
    nothing = replace(holding(20), mechanism={})
    with pytest.raises(NoGuaranteeError, match="reserve budget for the plan that is run"):
        LedgerBudget(service(granting), PLAN, "d", 1e-5, nothing)


@pytest.mark.parametrize(("records", "rate"), [(100, 1.0), (100, 0.05), (99, 0.1), (200, 0.1)])
def test_batches_are_drawn_as_they_are_charged(records: int, rate: float) -> None:
    model, data = mlp(5, 8, 2), tiny_data()
    sampler = PoissonSampler(records, rate)
    budget = own()
    with pytest.raises(DataError, match="the plan is charged for sample rate"):
        training.train(model, data, make_optimizer("dp_sgd", model, budget), sampler=sampler)
    with pytest.raises(DataError, match="the plan is charged for sample rate"):
        Participant("a", model, data.train_examples, data.train_labels, budget, sampler=sampler)
    assert (budget.made, budget.allowed) == (0, 0)


@pytest.mark.parametrize("ledger", [False, True])
def test_no_claim_is_of_fewer_steps_than_were_made(ledger: bool, tmp_path: Path) -> None:
    budget = either(ledger)
    budget.take(1)
    budget.take(2)
    with pytest.raises(NoGuaranteeError, match="step 2 was taken"):
        settle(budget, 1, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("state", ["expired", "released", "committed"])
def test_a_reservation_that_has_ended_leaves_its_certificate(state: str) -> None:
    """Nothing more is trained; what was granted is claimed, and nothing committed again."""
    asked: list[str] = []

    def answer(path: str, body: dict[str, Any]) -> httpx.Response:
        asked.append(path)
        return linear_accountant(path, body)

    ended = replace(holding(20, 7), state=state)
    budget = LedgerBudget(service(answer), PLAN, "d", 1e-5, ended, renew_seconds=-1.0)
    with pytest.raises(BudgetExhaustedError, match="all 7 steps"):
        budget.take(budget.made + 1)
    budget.service = service(lambda path, _: httpx.Response(200, json={"certificate": path}))
    assert budget.commit() == {"certificate": "/v1/reservations/r/certificate"}
    assert asked == []


@pytest.mark.parametrize("state", ["privatised", "public", "raw"])
def test_forward_passes_are_limited_to_the_physical_batch_size(state: str) -> None:
    """Public and private examples alike; the result is the same."""

    def after(rows: int | None) -> tuple[int, torch.Tensor]:
        torch.manual_seed(0)
        model = mlp(5, 8, 2)
        most = 0

        def seen(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            nonlocal most
            most = max(most, len(inputs[0]))

        generator = torch.Generator().manual_seed(1)
        public = (torch.rand(40, 5, generator=generator), torch.randint(0, 2, (40,)))
        options = make_recipe(
            RecipeOptions(
                data="mnist", optimizer="adadp", state=state, physical_batch_size=rows,
                model="mlp", hidden=8,
            )
        )  # fmt: skip
        optimizer = make_optimizer(
            "adadp", model, NoBudget(PLAN, 3, "it is a test"), state=state, public=public,
            generator=generator, threshold=0.0, **options.options,
        )  # fmt: skip
        model.register_forward_pre_hook(seen)
        torch.manual_seed(2)  # which public examples a step takes
        examples = torch.rand(23, 5, generator=generator)
        for _ in range(3):
            optimizer.step(examples, examples[:, 0].round().long(), cross_entropy)
        return most, torch.cat([each.detach().flatten() for each in model.parameters()])

    (most, expected), (few, found) = after(None), after(7)
    assert (most >= 23, few) == (True, 7)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("data", "pca", "few"),
    [
        ("mnist", None, True),
        ("newsgroups", None, True),
        ("mnist", PrivatePca(150, 1.0), False),
        ("fashion-mnist", None, False),
        ("mine", None, False),
    ],
)
def test_sparse_kernels_are_used_for_data_declared_sparse(
    data: str, pca: PrivatePca | None, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The examples themselves decide nothing: here none is 0."""
    used: list[object] = []
    genuine = SparseFactor.from_dense
    monkeypatch.setattr(
        SparseFactor, "from_dense", lambda matrix: used.append(matrix) or genuine(matrix)
    )
    recipe = make_recipe(
        RecipeOptions(data=data, optimizer="dp_sgd", size=20, model="mlp", hidden=20, pca=pca)
    )
    examples, labels = torch.rand(20, 150), torch.arange(20) % 2
    _, optimizer = recipe.build(
        NoBudget(PLAN, 1, "it is a test"),
        TrainingData(Dataset(examples, labels, examples, labels, 2), None),
    )
    optimizer.step(examples, labels, cross_entropy)
    assert bool(used) == few


def test_non_finite_raw_gradients_end_the_run() -> None:
    """They would stay in the state for good."""
    model = mlp(5, 8, 2)
    optimizer = make_optimizer("adadp", model, NoBudget(PLAN, 3, "raw"), state="raw")
    examples = torch.rand(4, 5)
    examples[2, 3] = math.nan
    with pytest.raises(DataError, match="private examples has become nan"):
        optimizer.step(examples, torch.zeros(4, dtype=torch.long), cross_entropy)


@pytest.mark.slow
def test_optimizers_are_compared_at_one_budget(tmp_path: Path) -> None:
    curves = []
    for name, objection in (("dp_sgd", None), ("adadp", "made of raw gradients")):
        budget = own(block=7)

        def make(allowance: Allowance, name: str = name) -> tuple[torch.nn.Module, Any]:
            model = mlp(5, 8, 2)
            return model, make_optimizer(name, model, allowance)

        curves.append(
            compare.train_seeds(name, make, tiny_data(), budget, 20, 2, objection=objection)
        )
    assert curves[0].epsilons == pytest.approx([0.1 * step for step in curves[0].steps])
    assert len(curves[0].finals) == 2  # both seeds made all 20 steps
    assert curves[0].steps[-1] == 20
    assert curves[0].document["final"] == pytest.approx(curves[0].final)
    compare.plot(curves, tmp_path / "plots" / "curves.png")
    assert (tmp_path / "plots" / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_wrong_options_are_explained() -> None:
    raw = ["--optimizer", "adadp", "--state", "raw"]
    adadps = ["--optimizer", "adadps"]
    for arguments, words in (
        (["--optimizer", "nope"], "Unknown optimizer"),
        (["--state", "raw"], "has no state"),
        (raw, "--no-guarantee"),
        ([*raw, "--no-guarantee", "--dataset", "d"], "ledger"),
        (["--service", "none"], "no accounting service"),
        (["--service", "none", "--no-guarantee"], "--noise-multiplier"),
        (["--optimizer", "dp_adam", "--momentum", "0.5"], "--momentum"),
        (["--box"], "--box is an option of adadp, adan, not of dp_sgd"),
        (["--example-squares"], "--example-squares is an option of adadp, adan, not of dp_sgd"),
        (["--optimizer", "adadp", "--example-squares"], "--state public"),
        (["--own-squares"], "--own-squares is an option of pi_adam, pi_rmsprop, pi_adagrad, not"),
        (["--optimizer", "pi_adam", "--own-squares"], "--state public"),
        (["--optimizer", "adadps", "--statistic", "mean"], "there are rmsprop, adam, adagrad"),
        (["--current-statistic"], "--current-statistic is an option of adadps, not of dp_sgd"),
        ([*adadps, "--state", "privatised", "--current-statistic"], "--state public"),
        ([*adadps, "--side-information", "--first-moment", "0.9"], "leave out --side-information"),
        (["--small-constant", "0.1"], "--small-constant is an option of dp_adam, "),
        (["--small-constant", "nan"], "not a finite number above 0"),
        ([*adadps, "--side-cap", "2"], "--side-cap needs --side-information"),
        ([*adadps, "--side-information", "--side-cap", "0.5"], "a cap of at least 1"),
        ([*adadps, "--side-information", "--side-statistic", "x"], "frequency, tf-idf, common"),
    ):
        done = CliRunner().invoke(cli.app, ["run", *arguments], env={"COLUMNS": "300"})
        assert done.exit_code == 2
        assert words in done.output


def test_settings_of_the_papers_reach_the_optimizer_by_its_own_names() -> None:
    def options(optimizer: str, **given: Any) -> dict[str, Any]:
        chosen = RecipeOptions(
            data="adult",
            optimizer=optimizer,
            model="logistic",
            hidden=1,
            learning_rate=1.0,
            **given,
        )
        return make_recipe(chosen).options

    assert options(
        "adadps", statistic="adam", first_moment=0.9, current_statistic=True, small_constant=1e-8
    ) == {
        "learning_rate": 1.0, "statistic": "adam", "first": 0.9, "current_statistic": True,
        "epsilon": 1e-8,
    }  # fmt: skip
    assert options("pi_adam", small_constant=1e-30)["epsilon"] == 1e-30
    assert options("dp_adam", small_constant=1e-6)["eps"] == 1e-6
    assert options("pda_dpmd", horizon=7)["horizon"] == 7
    assert "horizon" not in options("dp_sgd", horizon=7)


def test_the_optimizers_are_listed() -> None:
    done = CliRunner().invoke(cli.app, ["optimizers"], env={"COLUMNS": "200"})
    assert all(name in done.output for name in OPTIMIZERS)
    listed = json.loads(CliRunner().invoke(cli.app, ["optimizers", "--json"]).stdout)
    assert {each["name"]: each["states"] for each in listed} == {
        name: list(each.states) for name, each in OPTIMIZERS.items()
    }


def test_a_run_that_another_resumed_is_not_renewed() -> None:
    """Else it would take what the other was granted for its own."""

    def answer(path: str, body: dict[str, Any]) -> httpx.Response:
        if path.endswith("/renew"):
            held = {"id": "r", "state": "open", "steps_reserved": 500, "steps_granted": 150}
            return httpx.Response(200, json=held)
        return granting(path, body, 500)

    reservation = holding(500, 0)
    budget = LedgerBudget(service(answer), PLAN, "d", 1e-5, reservation)
    budget.allow(1)
    budget.renew_seconds = -1.0
    for step in (2, 51):  # granted or not: a lease may end within a block too
        with pytest.raises(NoGuaranteeError, match="another run uses the same reservation"):
            budget.allow(step)
    assert budget.reservation.steps_granted == 50


@pytest.mark.parametrize("refused", [False, True])
def test_a_budget_shows_at_least_the_epsilon_spent(refused: bool) -> None:
    """ε of the steps that are granted, by one curve; by the whole plan where that is refused."""
    asked: list[str] = []

    def answer(path: str, body: dict[str, Any]) -> httpx.Response:
        asked.append(path)
        if path == "/v1/curve" and refused:
            return httpx.Response(422, json={"code": "too-expensive", "detail": "…"})
        return granting(path, body, 130)

    held = holding(130, 0)
    budget = LedgerBudget(service(answer), PLAN, "d", 1e-5, held)
    for step in range(1, 131):
        budget.take(step)
        granted = budget.reservation.steps_granted
        assert budget.spent >= 0.1 * granted - 1e-9
        assert refused or budget.spent <= 0.1 * (granted + budget.block)
    assert asked.count("/v1/curve") == 1
    assert len(asked) == (5 if refused else 4)  # blocks of 50, then 100: steps take no time


def test_a_certificate_of_another_run_does_not_outlast_a_claim(tmp_path: Path) -> None:
    (tmp_path / "certificate.json").write_text("{}")
    settle(NoBudget(PLAN, 3, "nobody was asked"), 3, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["privacy.json"]
