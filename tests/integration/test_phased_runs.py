"""`accountant-train run --dataset --noise-schedule`: one reservation for each noise multiplier."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from accountant_service import cli as accountant
from tests.support.training_bench import NOTHING, ROWS, Bench, require_success, words_of
from training_client.budget import LedgerBudget
from training_client.client import AccountingService
from training_client.errors import ServiceUnreachableError
from training_client.lab.checkpoint import Checkpoint
from training_client.optimizers import PrivateOptimizer
from training_client.phased_budget import PhasedLedgerBudget
from training_client.plan import Plan, Schedule

SCHEDULED = ("--noise-schedule", "10:1,20:0.5")
USUAL = ("--noise-multiplier", "8", *SCHEDULED, "--checkpoint-every", "5")


@pytest.fixture
def bench(bench: Bench) -> Bench:
    """The trainer's commands, with a dataset of ε = 8."""
    bench.give(8.0)
    return bench


def runs(bench: Bench) -> list[Any]:
    """Return the reservations of the checkpoint's run as the ledger has them now."""
    kept = Checkpoint.read(bench.folder)
    with bench.service("http://test", api_key=bench.token) as service:
        return [service.reservation(each) for each in kept.reservations]


def killed_at(step: int, bench: Bench, *more: str) -> None:
    """Start a run, and end it as if its process were killed, before it makes a step."""
    bench.run_killed_at(step, *USUAL, "--dataset", bench.name, *more)


def seen_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Return a list of the number and the noise multiplier of each step that is made."""
    genuine, seen = PrivateOptimizer.step, list[tuple[int, float]]()

    def step(self: PrivateOptimizer, *of: Any) -> float:
        seen.append((self.private_sum.current_step, self.plan.noise_multiplier))
        return genuine(self, *of)

    monkeypatch.setattr(PrivateOptimizer, "step", step)
    return seen


@pytest.mark.slow
def test_each_phase_is_reserved_before_the_first_step_and_charged_as_it_is_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = seen_steps(monkeypatch)
    done = require_success(bench.run(*USUAL, "--dataset", bench.name, "--json"))
    assert [step for step, _ in seen] == list(range(1, 31))
    assert [noise for _, noise in seen] == [8.0] * 10 + [4.0] * 20
    writes = [path.rpartition("/")[2] for path, body in bench.asked if body is not None]
    ledger = [each for each in writes if each in ("reservations", "grants", "commit")]
    assert ledger == ["reservations"] * 2 + ["grants"] * 2 + ["commit"] * 2
    claim, certificates = bench.read("privacy.json"), bench.read("certificate.json")["certificates"]
    assert [each["steps"] for each in certificates] == [10, 20]
    assert [each["mechanism"]["noise_multiplier"] for each in certificates] == [8.0, 4.0]
    assert claim["mechanism"]["mechanisms"] == [each["mechanism"] for each in certificates]
    assert max(each["guarantee"]["epsilon"] for each in certificates) < claim["epsilon"] < 8
    assert (claim["steps"], claim["model_sha256"]) == (30, bench.digest())
    assert json.loads(done.stdout)["certificate"] == str(bench.folder / "certificate.json")
    assert "times the factors of --noise-schedule: reserved as" in done.stderr
    after = bench.dataset()
    assert after["held"] == NOTHING
    assert claim["epsilon"] <= after["spent"]["epsilon"] <= 8
    assert "checkpoint.pt" not in bench.left()


@pytest.mark.slow
def test_the_certificates_of_a_run_are_verified_and_name_no_model(bench: Bench) -> None:
    """The certificate of one phase must not pass as that of the model: its ε is smaller."""
    assert bench.run(*USUAL, "--dataset", bench.name).exit_code == 0
    file, model = bench.folder / "certificate.json", bench.folder / "model.pt"

    def verify(*options: str) -> tuple[int, Any]:
        done = CliRunner().invoke(accountant.app, ["verify", str(file), *options, "--json"])
        return done.exit_code, json.loads(done.stdout)

    code, answer = verify()
    assert (code, answer["faults"]) == (0, [])
    assert [each["steps_granted"] for each in answer["certificates"]] == [10, 20]
    told = CliRunner().invoke(accountant.app, ["verify", str(file)])
    assert "2 certificates, of which each covers its own steps alone\nvalid" in told.stdout
    code, answer = verify("--model", str(model))
    assert code == 1
    assert ["names no model" in each for each in answer["faults"]] == [True, True]
    listed = bench.read("certificate.json")["certificates"]
    for wrong, words in (
        ([listed[0], listed[1] | {"dataset": "other"}], "certificate 2: the signature does not"),
        ([], "must be a list of certificates"),
        ([{"certificates": listed}, *listed], "certificate 1: it is a list"),
    ):
        file.write_text(json.dumps({"certificates": wrong}))
        code, answer = verify()
        assert (code, words in str(answer["faults"])) == (1, True), answer
    refused = CliRunner().invoke(accountant.app, ["report", str(file)])
    assert refused.exit_code != 0


@pytest.mark.slow
def test_noise_is_found_with_which_all_phases_fit(bench: Bench) -> None:
    require_success(bench.run(*SCHEDULED, "--dataset", bench.name))
    assert 4 < bench.read("privacy.json")["epsilon"] <= 8
    after = bench.dataset()
    assert after["held"] == NOTHING
    assert after["spent"]["epsilon"] <= 8


@pytest.mark.parametrize(
    "before", [(), pytest.param(("--pca", "3", "--pca-noise", "30"), marks=pytest.mark.slow)]
)
def test_if_a_phase_does_not_fit_nothing_is_reserved(bench: Bench, before: tuple[str, ...]) -> None:
    small = ("--noise-multiplier", "8", "--noise-schedule", "10:1,20:0.01")
    done = bench.run(*small, "--dataset", bench.name, *before)
    assert done.exit_code == 3, done.output
    said = words_of(done)
    assert "phase 2 of 2, 20 steps with σ = 0.08, does not fit" in said
    assert "raise --noise-multiplier, or lower --steps" in said
    bench.require_uncharged()
    assert not bench.folder.exists()


def test_an_interrupt_while_phases_are_reserved_leaves_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, asked = AccountingService.reserve, list[int]()

    def interrupted(*of: Any, **more: Any) -> Any:
        asked.append(1)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return genuine(*of, **more)

    monkeypatch.setattr(AccountingService, "reserve", interrupted)
    assert bench.run(*USUAL, "--dataset", bench.name).exit_code == 130
    assert bench.dataset()["held"] == NOTHING


@pytest.mark.slow
def test_a_killed_run_goes_on_in_the_phase_after_the_last_granted_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at(7, bench)
    assert [(each.state, each.steps_granted) for each in runs(bench)] == [("open", 10), ("open", 0)]
    other = bench.train("run", "--resume", "--noise-schedule", "10:1,20:0.6")
    assert other.exit_code == 2
    assert "here --noise-schedule 10:1.0,20:0.5: leave out" in words_of(other)
    seen = seen_steps(monkeypatch)
    again = require_success(bench.train("run", "--resume", *USUAL, "--dataset", bench.name))
    assert seen == [(step, 4.0) for step in range(11, 31)]  # steps 7 to 10 may have been seen
    assert "from a checkpoint after 5 steps; 10 of 30 were granted" in again.output
    assert [each["steps"] for each in bench.read("certificate.json")["certificates"]] == [10, 20]
    assert bench.read("privacy.json")["model_sha256"] == bench.digest()


@pytest.mark.slow
@pytest.mark.parametrize("commits", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_that_dies_while_it_commits_is_committed_on_resume(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    genuine, asked = LedgerBudget.commit, list[int]()

    def commit(*of: Any) -> Any:
        asked.append(1)
        if len(asked) == commits + 1:
            raise ServiceUnreachableError("gone")
        return genuine(*of)

    with monkeypatch.context() as patched:
        patched.setattr(LedgerBudget, "commit", commit)
        assert bench.run(*USUAL, "--dataset", bench.name).exit_code == 4
    states = [each.state for each in runs(bench)]
    assert states == ["committed"] * commits + ["open"] * (2 - commits)
    seen = seen_steps(monkeypatch)
    require_success(bench.train("run", "--resume"))
    assert seen == []
    certificates = bench.read("certificate.json")["certificates"]
    assert [each["state"] for each in certificates] == ["committed"] * 2


def test_a_run_whose_next_phase_has_ended_makes_no_step_of_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at(7, bench)
    last = runs(bench)[-1]
    with bench.service("http://test", api_key=bench.token) as service:
        service.release(last)
    seen = seen_steps(monkeypatch)
    again = require_success(bench.train("run", "--resume"))
    assert f"reservation {last.identifier} is released" in words_of(again)
    assert seen == []
    claim, certificates = bench.read("privacy.json"), bench.read("certificate.json")["certificates"]
    assert [(each["state"], each["steps"]) for each in certificates] == [
        ("committed", 10), ("released", 0),
    ]  # fmt: skip
    assert (claim["steps"], claim["steps_planned"]) == (10, 30)


def test_a_run_that_is_asked_to_end_frees_later_phases(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.interrupt_at(3, monkeypatch)
    done = bench.run(*USUAL, "--dataset", bench.name)
    assert done.exit_code == 130, done.output
    claim, certificates = bench.read("privacy.json"), bench.read("certificate.json")["certificates"]
    assert [each["steps"] for each in certificates] == [10, 0]
    assert (claim["steps"], claim["steps_planned"]) == (3, 30)
    assert [each["steps"] for each in claim["mechanism"]["mechanisms"]] == [10, 20]
    assert bench.dataset()["held"] == NOTHING


@pytest.mark.slow
def test_a_projection_is_charged_before_the_phases(bench: Bench) -> None:
    require_success(bench.run(*USUAL, "--dataset", bench.name, "--pca", "3", "--pca-noise", "30"))
    claim, pca = bench.read("privacy.json"), bench.read("pca-certificate.json")
    kinds = [each["kind"] for each in claim["mechanism"]["mechanisms"]]
    assert kinds == ["gaussian", "composed"]
    assert pca["steps"] == 1
    assert claim["epsilon"] > max(
        each["guarantee"]["epsilon"] for each in bench.read("certificate.json")["certificates"]
    )
    assert bench.dataset()["held"] == NOTHING


def test_epsilon_is_refused_as_without_a_schedule(bench: Bench) -> None:
    done = bench.run(*USUAL, "--dataset", bench.name, "--epsilon", "1")
    assert done.exit_code == 2
    assert "use --noise-multiplier" in done.output
    assert bench.asked == []


@pytest.mark.slow
def test_a_curve_in_whole_epochs_is_resumed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With balls in bins a resumed run is given the curve that its plan was made of."""
    curve = ("--noise-schedule", "linear:0.5", "--sampling", "balls_in_bins", "--steps", "40")
    killed_at(3, bench, *curve)
    seen = seen_steps(monkeypatch)
    require_success(bench.train("run", "--resume", "--noise-multiplier", "8", *curve))
    assert seen == [(step, 4.0) for step in range(21, 41)]
    assert [each["steps"] for each in bench.read("certificate.json")["certificates"]] == [1, 1]


def test_a_checkpoint_of_an_earlier_version_has_one_reservation(bench: Bench) -> None:
    killed_at(7, bench)
    file = bench.folder / "checkpoint.pt"
    stored = torch.load(file, weights_only=True)
    first, _ = stored.pop("reservations")
    stored["kept"]["reservations"] = [first]
    torch.save(stored | {"reservation": first}, file)
    assert list(Checkpoint.read(bench.folder).reservations) == [first]


def test_leases_of_past_and_later_phases_are_renewed(bench: Bench) -> None:
    plan = Plan(ROWS, 0.05, 1.0, 12.0, noise_schedule=Schedule.by_steps([(2, 1), (2, 0.9)]))
    with bench.service("http://test", api_key=bench.token) as service:
        budget = PhasedLedgerBudget.reserve(service, plan, bench.name, 4)
        for phase in budget.phases:
            phase.renew_seconds = -1.0
        budget.take(1)
        budget.take(3)
    renewed = [path.split("/")[-2] for path, _ in bench.asked if path.endswith("/renew")]
    first, last = budget.reservations
    assert renewed == [last, first, first, last]
