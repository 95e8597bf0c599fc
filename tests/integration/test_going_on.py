"""Runs on a ledger's dataset: under its relation, after an end that nobody chose, and going on."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from accountant_service.ledger import rules
from tests.support.training_bench import ROWS, Bench, require_success, words_of

USUAL = ("--noise-multiplier", "4", "--steps", "70", "--checkpoint-every", "5")


def ledger(bench: Bench, method: str, path: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {bench.token}", "Idempotency-Key": f"{bench.name}{path}"}
    return bench.api.request(method, path, json=body, headers=headers).json()


def died(bench: Bench) -> str:
    """A run of 70 steps that was killed after 12, of 50 that are granted; its reservation."""
    bench.give(8.0)
    bench.run_killed_at(13, *USUAL, "--dataset", bench.name)
    kept = torch.load(bench.folder / "checkpoint.pt", weights_only=True)
    (identifier,) = kept["reservations"]
    return str(identifier)


@pytest.mark.slow
def test_a_claim_is_for_the_dataset_s_neighbours(bench: Bench) -> None:
    """A record that is replaced moves a sum twice as far: the other relation claims too little."""
    budget = {"epsilon": 200.0, "delta": 1e-5}
    body = {
        "name": bench.name, "size": ROWS, "budget": budget, "neighbouring_relation": "replace_one",
        "accept_weak": True,
    }  # fmt: skip
    ledger(bench, "POST", "/v1/datasets", body)
    done = require_success(bench.run("--dataset", bench.name, "--noise-multiplier", "2"))
    claim, certificate = bench.read("privacy.json"), bench.read("certificate.json")
    assert claim["neighbouring_relation"] == "replace_one"
    assert claim["status"] == "proven"
    assert claim["epsilon"] >= 0.99 * certificate["guarantee"]["epsilon"]
    assert f"ε = {str(claim['epsilon'])[:4]}" in done.output


def test_a_run_whose_reservation_ended_keeps_what_it_was_charged_for(bench: Bench) -> None:
    identifier = died(bench)
    assert (
        ledger(bench, "POST", f"/v1/reservations/{identifier}/release", {})["state"] == "released"
    )
    again = require_success(bench.train("run", "--resume"))
    assert "released" in again.output
    certificate, claim = bench.read("certificate.json"), bench.read("privacy.json")
    assert (certificate["steps_reserved"], certificate["steps"]) == (70, 50)
    assert (claim["steps_planned"], claim["steps"]) == (70, 50)
    assert claim["mechanism"]["steps"] == certificate["mechanism"]["steps"] == 70
    assert claim["epsilon"] == certificate["guarantee"]["epsilon"]
    assert "It covers all 70 steps planned" in words_of(again)


def test_a_service_that_goes_away_stops_the_run_and_loses_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The granted block is finished, no more; with a service again the run goes on."""
    bench.give(8.0)
    with monkeypatch.context() as patch:
        made = bench.counted(patch)
        bench.leave_after(10, "/reservations/", patch)
        done = bench.run(*USUAL, "--dataset", bench.name)
    assert done.exit_code == 4, done.output
    assert "--resume" in done.output
    assert len(made) == 50
    assert "model.pt" in bench.left()
    bench.refuse = None
    again = bench.counted(monkeypatch)
    require_success(bench.train("run", "--resume"))
    assert len(again) == 20  # nothing was charged in vain
    assert bench.read("certificate.json")["steps"] == 70


def test_a_run_is_not_resumed_on_a_ledger_that_knows_fewer_steps(bench: Bench) -> None:
    """It was restored from a backup: the steps since would be granted and charged only once."""
    identifier = died(bench)
    file = bench.folder / "checkpoint.pt"
    torch.save(torch.load(file, weights_only=True) | {"steps": 60}, file)
    done = bench.train("run", "--resume")
    assert done.exit_code == 2
    said = words_of(done)
    assert "after 60 steps, but the ledger has granted only 50 of them" in said
    found = ledger(bench, "GET", f"/v1/reservations/{identifier}")
    assert (found["state"], found["steps_granted"]) == ("open", 50)


def test_a_run_that_a_restored_ledger_refuses_is_not_told_to_resume(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.give(8.0)
    genuine = rules.grant

    def of_a_backup(run: rules.Reservation, steps: int, sequence: int) -> rules.Change:
        """Grant as a ledger whose backup was made before the first grant."""
        return genuine(replace(run, steps_granted=0), steps, sequence)

    monkeypatch.setattr(rules, "grant", of_a_backup)
    done = bench.run(*USUAL, "--dataset", bench.name)
    said = words_of(done)
    assert done.exit_code == 2
    assert "only 0 steps of reservation " in said
    assert " are granted, not 50: is this ledger an older copy" in said
    assert "--resume" not in said


@pytest.mark.slow
@pytest.mark.parametrize("ledger", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_is_asked_to_end_claims_its_plan(
    ledger: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.give(8.0)
    given = (*USUAL, *(("--dataset", bench.name) if ledger else ("--epsilon", "8")))
    require_success(bench.run(*given))
    planned = bench.read("privacy.json")
    bench.interrupt_at(3, monkeypatch)
    done = bench.run(*given)
    assert done.exit_code == 130, done.output
    claim = bench.read("privacy.json")
    assert (claim["steps"], claim["steps_planned"]) == (3, 70)
    assert claim["epsilon"] == planned["epsilon"]
    assert "It covers all 70 steps planned" in words_of(done)
    if ledger:
        assert bench.read("certificate.json")["guarantee"]["epsilon"] == planned["epsilon"]
    assert (claim["status"], claim["model_sha256"]) == ("proven", bench.digest())
    assert "checkpoint.pt" not in bench.left()


def test_a_resumed_run_keeps_its_options(bench: Bench) -> None:
    """Changed options are refused, not ignored, and the run can still be resumed."""
    died(bench)
    for option, *value in (
        ("--dataset", "another"),
        ("--steps", "60"),
        ("--noise-multiplier", "5"),
        ("--batch-size", "21"),
        ("--clip-norm", "2"),
        ("--optimizer", "adadp"),
        ("--hidden", "5"),
        ("--no-guarantee",),
        ("--epsilon", "0.5"),
        ("--data", "newsgroups"),
    ):
        again = bench.train("run", "--resume", option, *value)
        assert again.exit_code == 2, again.output
        assert f"{option} " in again.output
    same = ("--resume", "--dataset", bench.name, "--batch-size", "20", *USUAL)
    require_success(bench.train("run", *same))
    assert bench.read("certificate.json")["steps"] == 70


def test_sigterm_gives_back_what_is_held_before_the_first_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.give(8.0)
    held = list[Any]()

    def killed(*_: Any) -> None:
        held.append(bench.dataset()["held"]["epsilon"])
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr("training_client.lab.cli.run.clear_earlier_run", killed)
        assert bench.run(*USUAL, "--dataset", bench.name).exit_code == 130
    assert held[0] > 0
    bench.require_uncharged()


def test_a_ledgers_budget_cannot_be_given_on_the_command_line(bench: Bench) -> None:
    """Else a run would take all that is left, whatever it was told to spend."""
    bench.give(8.0)
    for option in ("--epsilon", "--delta"):
        done = bench.run("--dataset", bench.name, option, "1e-6")
        assert done.exit_code == 2
        assert "--noise-multiplier" in done.output
    assert bench.asked == []


@pytest.mark.slow
def test_public_examples_are_reported_without_a_warning_about_the_dataset(bench: Bench) -> None:
    """In a folder whose name looks like markup."""
    bench.give(8.0)
    bench.folder = bench.folder.parent / "[red]a[" / "b]"
    public = ("--optimizer", "adadps", "--public-examples", "50")
    done = require_success(bench.run("--dataset", bench.name, *public))
    note = "50 records of the training set (--public-examples)"
    assert f"covered by no guarantee: {note}." in words_of(done)
    assert bench.read("privacy.json")["declared_public"] == note
    assert "is it the right one" not in done.output
    assert "[red]a[/b]/" in done.output.replace("\n", "")


def test_a_delta_that_protects_nobody_is_noted(bench: Bench) -> None:
    for delta, noted in (("0.01", True), ("1e-5", False)):
        done = require_success(bench.run("--delta", delta))
        assert ("is not less than 1/" in done.output) == noted


@pytest.mark.slow
def test_a_model_charged_to_a_ledger_is_not_overwritten(bench: Bench) -> None:
    """A model that a dataset's budget went into is not removed by the next run in its folder."""
    bench.give(8.0)
    charged = ("--dataset", bench.name, "--noise-multiplier", "8")
    require_success(bench.run(*charged))
    paid = {name: (bench.folder / name).read_bytes() for name in bench.left()}
    assert {"model.pt", "privacy.json", "certificate.json"} <= set(paid)
    assert "earlier-1" in require_success(bench.run(*charged)).output
    earlier = bench.folder / "earlier-1"
    assert {file.name: file.read_bytes() for file in earlier.iterdir()} == paid
    for _ in range(2):
        unpaid = ("--service", "none", "--no-guarantee", "--noise-multiplier", "8")
        require_success(bench.run(*unpaid))
    assert {"earlier-1", "earlier-2"} <= bench.left()
    assert "earlier-3" not in bench.left()
