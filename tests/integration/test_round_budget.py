"""A participant of federated training is granted one round at a time by the ledger."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ledger_client import LedgerClient
from tests.support.small_models import batch, model
from training_client.client import Reservation
from training_client.errors import (
    BudgetExhaustedError,
    DataError,
    NoGuaranteeError,
    ServiceRefusedError,
)
from training_client.integrations.flower import round_budget
from training_client.integrations.flower.round_budget import RoundBudget
from training_client.lab.federated import AdaptiveParticipant, Participant
from training_client.lab.models import cross_entropy
from training_client.plan import AdaptiveClipping, Plan

PLAN = Plan(400, 0.1, 1.0, 1.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory of the test's own."""
    monkeypatch.chdir(tmp_path)


def budget(ledger: LedgerClient, **other: Any) -> RoundBudget:
    site = RoundBudget(ledger, ledger.patients, 1e-5, PLAN, rounds=3, folder=Path("site"))
    return replace(site, **other)


def make_rounds(rounds: RoundBudget, count: int, job: str = "job") -> Reservation:
    """Make rounds as processes that keep the reservation's identifier; return the reservation."""
    found = rounds.find_reservation(job)
    for _ in range(count):
        granted = rounds.grant_round(found)
        granted.take(granted.first)
        found = rounds.find_reservation(job, found.identifier)
    return found


class Restored:
    """The ledger after a backup was restored that knows only some of the reservations.

    It answers as the service does, and counts the questions about each reservation.
    """

    def __init__(self, ledger: LedgerClient, patch: pytest.MonkeyPatch, *lost: str) -> None:
        self.asked: list[str] = []
        self.granted: dict[str, int] = {}  # fewer than the ledger granted
        genuine = ledger.reservation

        def reservation(identifier: str) -> Reservation:
            self.asked.append(identifier)
            if identifier in lost:
                return genuine("0" * 32)
            found = genuine(identifier)
            granted = self.granted.get(identifier, found.steps_granted)
            return replace(found, steps_granted=granted)

        patch.setattr(ledger, "reservation", reservation)
        self.patch = patch
        self.begin_process()

    def begin_process(self) -> None:
        """Forget what was asked before, as in a new process."""
        # private: another process would take seconds
        self.patch.setattr(round_budget, "_SEEN", {})


def test_each_round_is_granted_and_recorded_until_all_are_made(
    ledger: LedgerClient, tmp_path: Path
) -> None:
    rounds = budget(ledger, folder=tmp_path)
    found = rounds.find_reservation("job")
    for number in (1, 2, 3):
        granted = rounds.grant_round(found)
        assert (granted.first, granted.last) == (number, number)
        granted.take(number)
        with pytest.raises(BudgetExhaustedError, match="not step"):
            granted.take(number + 1)
        found = rounds.find_reservation("job", found.identifier)
        assert found.steps_granted == number
    with pytest.raises(BudgetExhaustedError, match="all 3 rounds"):
        rounds.grant_round(found)
    rounds.end(found)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(each)["round"] for each in lines] == [1, 2, 3]
    assert json.loads((tmp_path / "privacy.json").read_text())["steps"] == 3
    assert (tmp_path / "certificate.json").exists()
    with pytest.raises(BudgetExhaustedError):
        rounds.grant_round(rounds.find_reservation("job", found.identifier))


def test_a_round_is_refused_if_the_ledger_forgot_rounds_that_the_site_recorded(
    ledger: LedgerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a backup of the ledger was restored."""
    rounds = budget(ledger, folder=tmp_path)
    found = rounds.find_reservation("job")
    for _ in range(2):
        rounds.grant_round(found)
        found = rounds.find_reservation("job", found.identifier)
    restored = Restored(ledger, monkeypatch)
    restored.granted[found.identifier] = 1
    with pytest.raises(NoGuaranteeError, match=r"that 2 steps .* granted only 1 of them"):
        rounds.grant_round(ledger.reservation(found.identifier))
    with (tmp_path / "rounds.jsonl").open("a") as record:
        record.write('{"round": 3, "data')  # a crash cut the line
    rounds.grant_round(found)
    restored.granted[found.identifier] = 2
    for spend in (rounds.grant_round, rounds.end):
        with pytest.raises(NoGuaranteeError, match=r"that 3 steps .* granted only 2 of them"):
            spend(found)
    assert ledger.reservation(found.identifier).state == "open"


def test_a_restored_ledger_that_lost_the_reservation_grants_no_round(
    ledger: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's idempotency key is lost too: the ledger would take it for a new run."""
    lost = make_rounds(budget(ledger), 2)
    Restored(ledger, monkeypatch, lost.identifier)
    reserved = ledger.dataset(ledger.patients)
    for job in ("job", "another job"):
        with pytest.raises(NoGuaranteeError, match=r"does not know it\..*docs/how-to/backup\.md"):
            budget(ledger).find_reservation(job)
    assert ledger.dataset(ledger.patients) == reserved  # nothing is reserved
    other, rounds = ledger.reserve(ledger.patients, PLAN.mechanism(3)), budget(ledger)
    for spend in (rounds.grant_round, rounds.end):  # a reservation that the context names
        with pytest.raises(NoGuaranteeError, match=f"{lost.identifier} were granted"):
            spend(other)
    record = Path("site/rounds.jsonl")
    record.write_text("")  # the missing steps are entered
    granted = rounds.grant_round(other)
    assert granted.last == 1
    assert granted.checkpoint_keys()["reservations"] == [other.identifier]


def test_an_earlier_reservation_of_which_the_ledger_lost_rounds_is_noticed(
    ledger: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored = Restored(ledger, monkeypatch)
    earlier = make_rounds(budget(ledger), 2).identifier
    again = make_rounds(budget(ledger), 0, "next").identifier
    restored.granted[earlier] = 1
    for known in (None, again):
        restored.begin_process()
        with pytest.raises(NoGuaranteeError, match=r"that 2 steps .* granted only 1 of them"):
            budget(ledger).grant_round(budget(ledger).find_reservation("next", known))
    steps = budget(ledger, plan=replace(PLAN, noise_multiplier=4.0), steps_per_round=2)
    with pytest.raises(NoGuaranteeError, match=r"that 2 steps"):  # recorded as they were charged
        steps.find_reservation("more steps in a round")
    restored.granted[earlier] = 2
    steps.grant_round(steps.find_reservation("more steps in a round"))


def test_a_second_job_asks_once_about_the_first(
    ledger: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored = Restored(ledger, monkeypatch)
    first = make_rounds(budget(ledger), 3)
    budget(ledger).end(first)  # an ended reservation is still known
    restored.begin_process()
    second = ledger.reserve(ledger.patients, PLAN.mechanism(3))
    restored.asked.clear()
    for _ in range(3):  # each with a budget of its own, as for each of Flower's messages
        budget(ledger).grant_round(second)
        second = budget(ledger).find_reservation("next", second.identifier)
    assert restored.asked.count(first.identifier) == 1
    others = budget(ledger, dataset="others")
    assert others._read_record() == {}


def test_a_record_of_an_earlier_version_counts_lines(
    ledger: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored = Restored(ledger, monkeypatch)
    first = make_rounds(budget(ledger), 2).identifier
    record = Path("site/rounds.jsonl")
    lines = [json.loads(each) for each in record.read_text().splitlines()]
    for each in lines:
        del each["steps_granted"]
    record.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    restored.granted[first] = 1
    with pytest.raises(NoGuaranteeError, match=r"that 2 steps .* granted only 1 of them"):
        budget(ledger).find_reservation("next")
    restored.granted[first] = 2
    make_rounds(budget(ledger), 3, "next")


def test_a_site_that_lost_its_state_finds_its_reservation_again(ledger: LedgerClient) -> None:
    rounds = budget(ledger)
    first = rounds.find_reservation("job")
    rounds.grant_round(first)
    again = budget(ledger).find_reservation("job")
    assert (again.identifier, again.steps_granted) == (first.identifier, 1)
    assert budget(ledger).find_reservation("another job").identifier != first.identifier


@pytest.mark.slow
def test_two_processes_of_a_site_cannot_share_a_round(
    ledger: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = budget(ledger)
    seen = rounds.find_reservation("job")
    rounds.grant_round(seen)
    with pytest.raises(NoGuaranteeError, match="another process"):
        rounds.grant_round(seen)
    monkeypatch.setattr(ledger, "renew", lambda held: held)  # the other was granted after it
    with pytest.raises(ServiceRefusedError):
        rounds.grant_round(seen)
    assert rounds.find_reservation("job").steps_granted == 1


def test_a_reservation_of_another_plan_is_refused_before_it_is_charged(
    ledger: LedgerClient,
) -> None:
    held = budget(ledger).find_reservation("job")
    quieter = budget(ledger, plan=replace(PLAN, noise_multiplier=0.5))
    with pytest.raises(NoGuaranteeError, match="reservation"):
        quieter.grant_round(held)
    with pytest.raises(ServiceRefusedError, match="idempotency-key-reused"):
        quieter.find_reservation("job")
    assert budget(ledger).find_reservation("job").steps_granted == 0


def test_bad_input_is_named(ledger: LedgerClient) -> None:
    for other, message in (
        ({"rounds": 0}, "at least one round"),
        ({"steps_per_round": 0}, "at least one round"),
        ({"plan": replace(PLAN, adaptive_clipping=AdaptiveClipping(1.0))}, "without schedules"),
        ({"plan": Plan.balls_in_bins(400, 4, 1.0, 1.0), "steps_per_round": 6}, "whole number"),
    ):
        with pytest.raises(DataError, match=message):
            budget(ledger, **other)
    with pytest.raises(BudgetExhaustedError):  # it does not fit
        budget(ledger, rounds=10**6).find_reservation("job")


@pytest.mark.parametrize("steps", [1, 4])
def test_participants_train_with_granted_rounds(ledger: LedgerClient, steps: int) -> None:
    plan = Plan(32, 0.5, 1.0, 4.0)
    rounds = budget(ledger, plan=plan, rounds=2, steps_per_round=steps)
    net, (examples, labels) = model(), batch(32)
    parameters = [each.detach() for each in net.parameters()]
    seen = []
    for _ in range(2):  # each as if in a new process
        granted = rounds.grant_round(rounds.find_reservation("job"))
        site = (
            Participant("a", net, examples, labels, granted)
            if steps == 1
            else AdaptiveParticipant(
                "a", net, examples, labels, granted,
                side_information=[torch.ones_like(each) for each in parameters],
                learning_rate=0.1, local_steps=steps,
            )
        )  # fmt: skip
        contribution = site.contribute(parameters, cross_entropy)
        assert contribution is not None
        seen.append(torch.cat([each.flatten() for each in contribution]))
        assert granted.is_used
        assert site.contribute(parameters, cross_entropy) is None
        assert granted.spent > 0
    assert not torch.equal(*seen)
    assert rounds.find_reservation("job").steps_granted == 2 * steps
