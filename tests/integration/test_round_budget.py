"""A participant of federated training is granted one round at a time by the ledger."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small_models import batch, model
from training_client.client import AccountingService
from training_client.errors import (
    BudgetExhaustedError,
    DataError,
    NoGuaranteeError,
    ServiceRefusedError,
)
from training_client.integrations.round_budget import RoundBudget
from training_client.lab.federated import AdaptiveParticipant, Participant
from training_client.lab.models import cross_entropy
from training_client.plan import AdaptiveClipping, Plan

PLAN = Plan(400, 0.1, 1.0, 1.0)


def budget(ledger: AccountingService, **other: Any) -> RoundBudget:
    return replace(RoundBudget(ledger, "patients", 1e-5, PLAN, rounds=3), **other)


def test_each_round_is_granted_and_recorded_until_all_are_made(
    ledger: AccountingService, tmp_path: Path
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
    ledger: AccountingService, tmp_path: Path
) -> None:
    """As after a backup of the ledger was restored."""
    rounds = budget(ledger, folder=tmp_path)
    found = rounds.find_reservation("job")
    for _ in range(2):
        rounds.grant_round(found)
        found = rounds.find_reservation("job", found.identifier)
    with pytest.raises(NoGuaranteeError, match=r"after 2 steps, .* granted only 1 of them"):
        rounds.grant_round(replace(found, steps_granted=1))
    with (tmp_path / "rounds.jsonl").open("a") as record:
        record.write('{"round": 3, "data')  # a crash cut the line
    rounds.grant_round(found)
    with pytest.raises(NoGuaranteeError, match=r"after 3 steps, .* granted only 2 of them"):
        rounds.grant_round(found)


def test_a_site_that_lost_its_state_finds_its_reservation_again(ledger: AccountingService) -> None:
    rounds = budget(ledger)
    first = rounds.find_reservation("job")
    rounds.grant_round(first)
    again = budget(ledger).find_reservation("job")
    assert (again.identifier, again.steps_granted) == (first.identifier, 1)
    assert budget(ledger).find_reservation("another job").identifier != first.identifier


def test_two_processes_of_a_site_cannot_share_a_round(ledger: AccountingService) -> None:
    rounds = budget(ledger)
    seen = rounds.find_reservation("job")
    rounds.grant_round(seen)
    with pytest.raises(NoGuaranteeError, match="another process"):
        rounds.grant_round(seen)
    assert rounds.find_reservation("job").steps_granted == 1


def test_a_grant_that_another_process_overtook_is_refused(
    ledger: AccountingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = budget(ledger)
    seen = rounds.find_reservation("job")
    rounds.grant_round(seen)
    monkeypatch.setattr(ledger, "renew", lambda held: held)  # the other was granted after it
    with pytest.raises(ServiceRefusedError):
        rounds.grant_round(seen)
    assert rounds.find_reservation("job").steps_granted == 1


def test_a_reservation_of_another_plan_is_refused_before_it_is_charged(
    ledger: AccountingService,
) -> None:
    held = budget(ledger).find_reservation("job")
    quieter = budget(ledger, plan=replace(PLAN, noise_multiplier=0.5))
    with pytest.raises(NoGuaranteeError, match="reservation"):
        quieter.grant_round(held)
    with pytest.raises(ServiceRefusedError, match="idempotency-key-reused"):
        quieter.find_reservation("job")
    assert budget(ledger).find_reservation("job").steps_granted == 0


def test_a_run_that_does_not_fit_is_refused(ledger: AccountingService) -> None:
    with pytest.raises(BudgetExhaustedError):
        budget(ledger, rounds=10**6).find_reservation("job")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rounds": 0}, "at least one round"),
        ({"steps_per_round": 0}, "at least one round"),
        ({"plan": replace(PLAN, adaptive_clipping=AdaptiveClipping(1.0))}, "without schedules"),
        ({"plan": Plan.balls_in_bins(400, 4, 1.0, 1.0), "steps_per_round": 6}, "whole number"),
    ],
)
def test_bad_input_is_named(ledger: AccountingService, other: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        budget(ledger, **other)


@pytest.mark.parametrize("steps", [1, 4])
def test_participants_train_with_granted_rounds(ledger: AccountingService, steps: int) -> None:
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
