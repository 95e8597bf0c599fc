"""The trainer's commands against the service itself, both in this process, on small data."""

from __future__ import annotations

import json
import random
import re
import shlex
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from accountant_service import cli
from tests.support.helpers import nightly
from tests.support.training_bench import ROWS, Bench, require_success, small, words_of
from training_client.client import AccountingService
from training_client.errors import DataError
from training_client.lab import data as data_sets
from training_client.lab import federated
from training_client.lab.checkpoint import Checkpoint
from training_client.lab.cli import app, compare, together
from training_client.lab.cli.output_folders import lock_folder
from training_client.lab.data import Dataset
from training_client.lab.models import MODELS
from training_client.lab.number_format import format_upper_bound
from training_client.lab.pca import PrivatePca
from training_client.optimizers import PrivateOptimizer
from training_client.plan import Plan
from training_client.private_step.private_sum import PrivateSum

PCA = ("--pca", "3", "--pca-noise", "4")


def asked_epsilons(bench: Bench) -> list[Any]:
    """Return the mechanisms of which ε was asked."""
    return [body["mechanism"] for path, body in bench.asked if path == "/v1/epsilon"]


def load_by(monkeypatch: pytest.MonkeyPatch, load: Any) -> list[Path]:
    """Replace how the small data set is loaded; return the folders it is loaded from."""
    loaded = list[Path]()
    known = data_sets.DATASETS["small"]
    changed = replace(known, load=lambda folder: loaded.append(folder) or load(folder))
    monkeypatch.setitem(data_sets.DATASETS, "small", changed)
    return loaded


def test_the_projection_is_charged_with_the_steps(bench: Bench) -> None:
    answer = bench.answer(*PCA)
    assert answer["guarantee"] == bench.read("privacy.json")
    assert answer["guarantee"]["epsilon"] <= 2.0
    last = asked_epsilons(bench)[-1]
    assert last["kind"] == "composed"
    assert last["mechanisms"][0] == PrivatePca(3, 4.0).mechanism()
    assert last["mechanisms"][1]["steps"] == answer["steps"] == 30
    assert torch.load(bench.folder / "pca.pt").shape == (8, 3)
    assert torch.load(bench.folder / "model.pt")["0.weight"].shape == (4, 3)


@pytest.mark.slow
def test_a_budget_for_the_steps_alone_refuses_steps_and_projection(bench: Bench) -> None:
    """With the same noise the steps fit alone, and fewer of them fit beside the PCA."""
    assert bench.answer("--epsilon", "1")["steps"] >= 30
    noise = asked_epsilons(bench)[0]["noise_multiplier"]
    fewer = bench.answer("--epsilon", "1", *PCA, "--noise-multiplier", str(noise))
    assert 1 <= fewer["steps"] < 30
    assert fewer["guarantee"]["epsilon"] <= 1
    loud = bench.run("--epsilon", "1", "--pca", "3", "--pca-noise", "0.5")
    assert loud.exit_code == 3
    assert "--pca-noise" in loud.output


@pytest.mark.slow
def test_nothing_is_touched_before_the_composition_fits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched = load_by(monkeypatch, small)
    for arguments in (
        ("--epsilon", "1", "--pca", "3", "--pca-noise", "0.5"),
        ("--epsilon", "0.1", "--pca", "3", "--pca-noise", "9", "--noise-multiplier", "1"),
        ("--epsilon", "0.001", "--noise-multiplier", "1"),
    ):
        assert bench.run(*arguments).exit_code == 3
    bench.refuse = "/v1/epsilon"
    assert bench.run(*PCA).exit_code == 4
    assert not touched
    assert not bench.folder.exists()


@pytest.mark.slow
def test_a_ledger_charges_the_projection_before_it_is_drawn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger that does not answer lets nothing be projected.

    A run without a guarantee in the same folder leaves no certificate of this one.
    """
    bench.give(6.0)
    spent, genuine, folder = list[float](), PrivatePca.fit, bench.folder

    def fit(*given: Any) -> Any:
        spent.append(bench.dataset()["spent"]["reference_steps"])
        return genuine(*given)

    monkeypatch.setattr(PrivatePca, "fit", fit)
    bench.refuse, bench.folder = "/grants", folder.with_name("refused")
    charged = ("--dataset", bench.name, *PCA, "--noise-multiplier", "4")
    assert bench.run(*charged).exit_code == 4
    assert not spent
    bench.refuse, bench.folder = None, folder
    require_success(bench.run(*charged))
    assert spent[0] > 0
    pca, steps = bench.read("pca-certificate.json"), bench.read("certificate.json")
    assert pca["mechanism"]["mechanism"] == PrivatePca(3, 4.0).mechanism()
    assert (pca["steps"], steps["steps"]) == (1, 30)
    assert pca["reservation"] != steps["reservation"]
    whole = bench.read("privacy.json")["epsilon"]
    assert max(pca["guarantee"]["epsilon"], steps["guarantee"]["epsilon"]) < whole < 6.0
    assert bench.dataset()["spent"]["epsilon"] <= 6.0
    certified = {"certificate.json", "pca-certificate.json", "pca.pt", "privacy.json", "model.pt"}
    assert bench.left() == certified
    assert bench.run("--epsilon", "0.001", "--noise-multiplier", "1").exit_code == 3
    assert bench.left() == certified  # what was refused has not begun
    require_success(bench.run("--service", "none", "--no-guarantee", "--noise-multiplier", "1"))
    assert bench.left() == {"privacy.json", "model.pt", "earlier-1"}
    assert bench.read("privacy.json")["guarantee"] == "none"


@pytest.mark.slow
def test_a_run_that_does_not_fit_the_ledger_leaves_no_reservation(bench: Bench) -> None:
    bench.give(1.0)
    for noise in ("0.3", "4"):  # the projection does not fit, or the steps beside it
        given = ("--pca", "3", "--pca-noise", noise, "--noise-multiplier", "0.5")
        done = bench.run("--dataset", bench.name, *given)
        assert done.exit_code == 3
        assert "does not fit" in done.output or "do not fit" in done.output
        bench.require_uncharged()
        assert not bench.folder.exists()


@pytest.mark.slow
def test_data_that_do_not_suit_the_run_leave_no_reservation(bench: Bench) -> None:
    bench.give(3.0)
    for given, said in (
        (("--pca", "9", "--pca-noise", "9"), "with 8 inputs"),
        ((*PCA, "--model", "cnn"), "--pca turns them into rows of numbers"),
    ):
        asked = len(bench.asked)
        done = bench.run("--dataset", bench.name, *given)
        assert done.exit_code == 2
        assert said in done.output
        bench.require_uncharged()
    assert len(bench.asked) == asked  # for a model that takes no projections


def test_frequencies_guide_the_optimizer_where_they_are_public(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ("--optimizer", "adadps", "--side-information", "--model", "linear")
    assert "needs token frequencies" in bench.run(*wanted).output
    counted = replace(small(Path()), frequencies=torch.arange(1.0, 9.0))
    load_by(monkeypatch, lambda _: counted)
    require_success(bench.run(*wanted))
    asked = next(body for path, body in bench.asked if path == "/v1/noise-multiplier")
    assert asked["sample_rate"] == 20 / ROWS  # no example is given up
    assert bench.run(*wanted, *PCA).exit_code == 2
    assert bench.run("--side-information").exit_code == 2


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_projection(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.give(8.0)
    more = ("--dataset", bench.name, *PCA, "--model", "linear", "--warm-start", "5")
    public = ("--public-examples", "50", "--checkpoint-every", "5", "--optimizer", "adadp")
    for step, made in ((1, 0), (13, 10)):  # before the first step there is a projection, too
        bench.folder = bench.folder.with_name(f"killed-{step}")
        bench.asked.clear()
        bench.run_killed_at(step, *more, *public, "--noise-multiplier", "4")
        kept = torch.load(bench.folder / "checkpoint.pt", weights_only=True)
        assert (kept["steps"], kept["directions"].shape) == (made, (8, 3))
    assert kept["recipe"]["model"] == "linear"
    assert len([path for path, _ in bench.asked if path.endswith("/grants")]) == 2
    monkeypatch.setattr(PrivatePca, "fit", None)  # it must not be called again
    bench.asked.clear()
    # all thirty steps were granted in one block, so none is left: what was made is not made again
    require_success(bench.train("run", "--resume"))
    assert not [path for path, _ in bench.asked if path.endswith("/grants")]
    assert torch.equal(torch.load(bench.folder / "pca.pt"), kept["directions"])
    assert asked_epsilons(bench)[-1]["mechanisms"][0] == PrivatePca(3, 4.0).mechanism()
    assert bench.read("certificate.json")["steps"] == 30


@pytest.mark.parametrize(
    "model", ["logistic", "autoencoder", pytest.param("linear", marks=pytest.mark.slow)]
)
def test_every_model_is_trained_and_measured(bench: Bench, model: str) -> None:
    answer = bench.answer("--model", model, "--learning-rate", "0.1")
    assert answer["measure"] == ("squared error" if model == "autoencoder" else "accuracy")
    assert (answer["accuracy"] is None) == (model == "autoencoder")
    assert answer["score"] > 0
    assert answer["certificate"] is None
    assert bench.read("privacy.json")["status"] == "proven"


@pytest.mark.slow
def test_a_warm_start_gives_its_examples_up(bench: Bench) -> None:
    warm = ("--warm-start", "1500", "--public-examples", "100", "--model", "linear")
    answer = bench.answer(*warm, "--learning-rate", "1e-6", "--momentum", "0")
    assert answer["accuracy"] > 0.8
    asked = next(body for path, body in bench.asked if path == "/v1/noise-multiplier")
    assert asked["sample_rate"] == 20 / (ROWS - 100)


WRONG_INPUT = [
    (["--model", "resnet"], "Unknown model 'resnet': there are mlp"),
    (["--model", "cnn"], "cnn takes images"),
    (["--batch-size", "500"], "more than 400 records"),
    (["--warm-start", "5", "--public-examples", "400"], "leaves no private record of 400"),
    (["--pca", "9"], "--pca 9 is not possible with 8 inputs"),
    (["--size", "7", "--batch-size", "5"], "has 400 records, the plan is for 7"),
    (["--data", "mine"], "--size"),
    (["--learning-rate", "nan"], "not a finite number above 0"),
    (["--learning-rate", "0"], "not a finite number above 0"),
    (["--epsilon", "inf"], "not a finite number above 0"),
    (["--noise-multiplier", "inf"], "not a finite number above 0"),
    (["--delta", "1"], "not a finite number above 0 and below 1"),
    (["--clip-norm", "inf"], "--clip-norm"),
    (["--momentum", "1"], "less than or equal to 0.9999"),
    (["--hidden", "99999999999999999999"], "--hidden"),
    (["--model", "linear", "--device", "banana"], "cannot use 'banana' here"),
    (["--output", "/dev/null"], "/dev/null"),
    (["--api-key", "ключ"], "printable ASCII"),
    (["--noise-schedule", "half"], "--noise-schedule 'half' is no"),
    (["--clip-schedule", "linear:0"], "factor 0 is not from 1e-06 to 1e+06"),
    (["--learning-rate-schedule", "exponential:0"], "exponential decay ends above 0"),
    (["--clip-schedule", "20:1,11:0.5"], "--clip-schedule names 31 steps, and the run has 30"),
    (
        ["--noise-schedule", "5:1,5:2", "--sampling", "balls_in_bins"],
        "--noise-schedule 5:1,5:2 changes the noise within an epoch, which has 20 steps",
    ),
]


def test_wrong_input_is_named(bench: Bench, subtests: pytest.Subtests) -> None:
    for arguments, words in WRONG_INPUT:
        with subtests.test(arguments=arguments):
            done = bench.run(*arguments)
            assert done.exit_code == 2, done.output
            assert words in words_of(done)


def test_wrong_data_are_found_before_anything_is_reserved(
    bench: Bench, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    bench.give(8.0)
    own = ("--data-dir", str(tmp_path), "--size", str(ROWS), "--data")
    right = "1,2\n" * ROWS
    for name, train in (("ragged", "1,2\n0,2,3\n"), ("few", right[4:]), ("words", f"{right}1,x\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.csv").write_text(train)
        (tmp_path / name / "test.csv").write_text(right)
    for arguments, words in (
        ([*own, "ragged"], "train.csv is not a table of numbers"),
        ([*own, "few"], f"has {ROWS - 1} records, the plan is for {ROWS}: check --size"),
        ([*own, "words"], "line 401 has 'x', which is not a number"),
        (
            [*own, "words", "--noise-schedule", "10:2,20:1"],
            "line 401 has 'x', which is not a number",
        ),
        ([*own, "words", "--pca", "1"], "line 401 has 'x', which is not a number"),
        ([*own, "missing"], "Unknown dataset 'missing'"),
        (["--size", "7", "--batch-size", "5"], "has 400 records, the plan is for 7"),
        (["--model", "cnn"], "cnn takes images"),
        (["--pca", "9"], "--pca 9 is not possible with 8 inputs"),
    ):
        with subtests.test(arguments=arguments):
            done = bench.run("--dataset", bench.name, *arguments)
            assert done.exit_code == 2, done.output
            assert words in words_of(done)
            assert bench.dataset()["version"] == 1


@pytest.mark.parametrize("command", ["run", "compare", "together", "data", "optimizers"])
def test_help_cuts_no_name_and_shows_no_type_of_python(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert "…" not in shown.output
    assert "list[" not in shown.output


def test_a_plot_of_no_known_kind_is_refused_before_the_training(bench: Bench) -> None:
    done = bench.train("compare", "dp_sgd", "--output", "plot.nope")
    assert done.exit_code == 2
    assert "should end in .png" in done.output
    assert not bench.asked


def test_an_unwritable_data_folder_is_named() -> None:
    done = CliRunner().invoke(app, ["data", "adult", "--data-dir", "/dev/null"])
    assert done.exit_code == 2
    assert "Stopped: /dev/null" in done.output


def test_the_printed_epsilon_is_not_less_than_the_written_one(bench: Bench) -> None:
    for epsilon in ("0.1", "0.3"):
        done = bench.run("--epsilon", epsilon)
        said = re.search(r"Guarantee: ε = ([\d.e-]+)", done.output)
        assert said, done.output
        assert Decimal(said[1]) >= Decimal(repr(bench.read("privacy.json")["epsilon"]))


def test_a_model_too_large_for_memory_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> None:
        raise RuntimeError("you tried to allocate 313600000000 bytes")

    kind = MODELS["mlp"]
    monkeypatch.setitem(MODELS, "mlp", replace(kind, make=no_room))
    done = bench.run()
    assert done.exit_code == 2
    assert "does not fit into memory: you tried to allocate" in done.output


def compared(bench: Bench, tmp_path: Path, *arguments: str) -> Any:
    """Compare optimizers of logistic models at ε = 1; return the answer as JSON."""
    usual = ("--model", "logistic", "--epsilon", "1", "--steps", "4", "--batch-size", "20")
    plot = ("--output", str(tmp_path / "plot.png"))
    done = bench.train("compare", *arguments, *usual, *plot, "--json")
    return json.loads(require_success(done).stdout)


@pytest.mark.slow
def test_optimizers_are_compared_by_what_the_model_is_for(bench: Bench, tmp_path: Path) -> None:
    plot = ("--output", str(tmp_path / "plot.png"))
    usual = ("--model", "autoencoder", "--steps", "4", "--hidden", "8", "--batch-size", "20")
    done = require_success(bench.train("compare", "dp_sgd", "dp_adam", *usual, *PCA, *plot))
    assert "squared error" in done.output
    assert {each["kind"] for each in asked_epsilons(bench)} == {"composed"}


@pytest.mark.slow
def test_a_comparison_as_json_says_what_each_step_did_and_cost(
    bench: Bench, tmp_path: Path
) -> None:
    curves = compared(bench, tmp_path, "dp_sgd", "dp_adam")
    delta = next(body for path, body in bench.asked if path == "/v1/epsilon")["delta"]
    asked = asked_epsilons(bench)[-1]
    assert len(curves) == 2
    for curve in curves:
        assert curve["delta"] == delta
        assert curve["plan"]["sample_rate"] == asked["sample_rate"]
        assert curve["plan"]["noise_multiplier"] == asked["noise_multiplier"]
        assert curve["steps"][-1] == asked["steps"] == 4
        assert curve["epsilons"][-1] <= 1


@pytest.mark.slow
def test_schedules_are_compared_as_they_are_charged(bench: Bench, tmp_path: Path) -> None:
    schedules = ("--noise-schedule", "2:1,2:0.5", "--learning-rate-schedule", "linear:0")
    (curve,) = compared(bench, tmp_path, "dp_sgd", *schedules)
    assert curve["plan"]["noise_schedule"]["pieces"] == [[2, 1.0], [2, 0.5]]
    assert curve["plan"]["learning_rate_schedule"]["pieces"][-1][1] == 0
    assert 0.95 < curve["epsilons"][-1] <= 1
    first, last = asked_epsilons(bench)[-1]["mechanisms"]
    assert (first["steps"], last["steps"]) == (2, 2)
    assert last["noise_multiplier"] == first["noise_multiplier"] / 2


def test_participants_follow_the_schedules_round_by_round(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, rates = federated.descend_along_mean, list[float]()

    def descend(parameters: Any, contributions: Any, learning_rate: float) -> None:
        rates.append(learning_rate)
        genuine(parameters, contributions, learning_rate)

    monkeypatch.setattr(federated, "descend_along_mean", descend)
    usual = ("together", "--participants", "2", "--noise-multiplier", "6", "--rounds", "4")
    schedules = ("--noise-schedule", "2:1,2:0.5", "--learning-rate-schedule", "3:1,1:0.2")
    answer = json.loads(require_success(bench.train(*usual, *schedules, "--json")).stdout)
    assert answer["schedules"] == {
        "noise_schedule": "2:1.0,2:0.5", "learning_rate_schedule": "3:1.0,1:0.2",
    }  # fmt: skip
    assert rates == pytest.approx([0.5, 0.5, 0.5, 0.1])
    claim = bench.read("privacy-participant-2.json")
    parts = claim["mechanism"]["mechanisms"]
    assert [(each["steps"], each["noise_multiplier"]) for each in parts] == [(2, 6.0), (2, 3.0)]
    assert claim["epsilon"] <= 1
    paper = ("--method", "gaussian_sampling_composition", "--rounds", "90")
    refused = bench.train(*usual, *paper, "--noise-schedule", "80:1,10:0.5")
    assert refused.exit_code == 2
    assert "cannot account for --noise-schedule: use --method pld" in words_of(refused)
    longer = bench.train(*usual, "--clip-schedule", "4:1,1:0.5")
    assert longer.exit_code == 2
    said = "--clip-schedule names 5 steps, one for each round, and there are 4 rounds"
    assert said in words_of(longer)


def test_participants_clip_and_add_noise_as_scheduled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, seen = PrivateSum.release, list[tuple[float, float]]()

    def release(self: PrivateSum, *of: Any) -> Any:
        seen.append((self.plan.noise_multiplier, of[-1].bound))
        return genuine(self, *of)

    monkeypatch.setattr(PrivateSum, "release", release)
    done = bench.train(
        "together", "--participants", "1", "--noise-multiplier", "6", "--rounds", "3",
        "--noise-schedule", "1:1,2:0.5", "--clip-schedule", "2:1,1:0.25",
    )  # fmt: skip
    require_success(done)
    assert seen == [(6.0, 1.0), (3.0, 1.0), (3.0, 0.25)]


@pytest.mark.slow
def test_participants_train_until_their_budgets_are_spent(bench: Bench) -> None:
    done = bench.train(
        "together", "--participants", "3", "--epsilon", "0.01,1,1.6", "--sample-rate", "0.1",
        "--noise-multiplier", "2", "--rounds", "60", "--model", "logistic", "--json",
    )  # fmt: skip
    answer = json.loads(require_success(done).stdout)
    first, second, third = answer["participants"]
    assert (first["rounds"], first["dropped_out"], first["epsilon"]) == (0, 1, 0.0)
    assert 1 <= second["rounds"] < third["rounds"]
    assert second["dropped_out"] == second["rounds"] + 1
    assert second["epsilon"] <= 1
    assert answer["rounds"] == third["rounds"] <= 60
    assert (third["dropped_out"] is None) == (third["rounds"] == 60)
    assert first["records"] == 133
    for each in answer["participants"]:
        written = json.loads(Path(each["privacy"]).read_text())
        assert written["epsilon"] == each["epsilon"]
    shown = bench.train("together", "--participants", "2", "--epsilon", "0.6", "--rounds", "2")
    assert "participant-2" in shown.output
    assert "2 rounds" in shown.output


def test_together_reports_who_takes_part_and_who_never_did(bench: Bench) -> None:
    done = bench.train(
        "together", "--participants", "3", "--epsilon", "0.01,1,1.6", "--noise-multiplier", "2",
        "--rounds", "3",
    )  # fmt: skip
    require_success(done)
    assert "round 1: participant-1 has dropped out" in done.output
    assert "round 3: 2 of 3 take part" in done.output
    nobody = bench.train("together", "--participants", "2", "--noise-multiplier", "0.05")
    assert nobody.exit_code == 3
    assert "for participant-1, step 1 would exceed ε = 1" in nobody.output
    assert "Raise --noise-multiplier" in nobody.output


@pytest.mark.slow
def test_a_service_that_asks_everybody_for_a_key_gets_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str | None] = []

    def service(url: str, *, api_key: str | None = None) -> AccountingService:
        given.append(api_key)
        return bench.service(url)

    for module in (compare, together):
        monkeypatch.setattr(module, "AccountingService", service)
    usual = ["--data", "small", "--hidden", "4", "--output"]
    for arguments in (
        ["together", *usual, str(tmp_path), "--participants", "2", "--rounds", "2"],
        ["compare", "dp_sgd", *usual, str(tmp_path / "plot.png"), "--steps", "2", "--batch-size=9"],
    ):
        key = {"ACCOUNTANT_API_KEY": bench.token}
        require_success(CliRunner().invoke(app, arguments, env=key))
    assert given == [bench.token, bench.token]


def test_a_run_makes_no_more_steps_than_it_was_asked_for(bench: Bench) -> None:
    """However many its noise would allow."""
    done = require_success(bench.run("--noise-multiplier", "20", "--steps", "7", "--json"))
    answer = json.loads(done.stdout)
    assert (answer["steps"], answer["steps_planned"]) == (7, 7)
    assert answer["stopped"] == "all steps are done"
    spent = format_upper_bound(answer["guarantee"]["epsilon"])
    assert f"7 steps at q = 0.05 with σ = 20 take ε = {spent} of 2 at δ = 1e-5" in done.stderr
    assert re.search(rf"step 7: loss [\d.]+, ε ≤ {spent}\n", done.stderr)


def test_scheduled_noise_is_charged_as_the_composition_that_runs(bench: Bench) -> None:
    done = require_success(bench.run("--noise-schedule", "10:1,20:0.5", "--json"))
    answer = json.loads(done.stdout)
    assert answer["schedules"] == {"noise_schedule": "10:1.0,20:0.5"}
    assert 1.9 < answer["guarantee"]["epsilon"] <= 2.0
    parts = answer["guarantee"]["mechanism"]["mechanisms"]
    assert [each["steps"] for each in parts] == [10, 20]
    first, last = (each["noise_multiplier"] for each in parts)
    assert last == pytest.approx(first / 2)
    assert "times the factors of --noise-schedule" in done.stderr


def test_schedules_of_clip_norm_and_learning_rate_take_no_more_budget(bench: Bench) -> None:
    plain = json.loads(bench.run("--noise-multiplier", "20", "--json").stdout)
    changing = ("--clip-schedule", "cosine:0.1", "--learning-rate-schedule", "linear:0")
    done = require_success(bench.run("--noise-multiplier", "20", *changing, "--json"))
    answer = json.loads(done.stdout)
    assert answer["guarantee"]["mechanism"] == plain["guarantee"]["mechanism"]
    assert answer["schedules"].keys() == {"clip_schedule", "learning_rate_schedule"}
    assert plain["schedules"] == {}


@pytest.mark.slow
def test_a_resumed_run_keeps_its_schedules(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.give(3.0)
    genuine, used = PrivateOptimizer.step, list[float]()

    def step(self: PrivateOptimizer, *of: Any) -> float:
        used.append(self.plan.at(len(used) + 1).clip_norm)
        return genuine(self, *of)

    with monkeypatch.context() as patch:
        patch.setattr(PrivateOptimizer, "step", step)
        schedule = ("--dataset", bench.name, "--clip-schedule", "10:1,20:0.5")
        bench.run_killed_at(13, *schedule, "--checkpoint-every", "5")
    assert used == [1.0] * 10 + [0.5] * 2
    other = bench.train("run", "--resume", "--clip-schedule", "linear:0.5")
    assert other.exit_code == 2
    assert "here --clip-schedule 10:1.0,20:0.5: leave out" in words_of(other)
    again = bench.train("run", "--resume", "--clip-schedule", "10:1,20:0.5", "--json")
    answer = json.loads(require_success(again).stdout)
    assert answer["schedules"] == {"clip_schedule": "10:1.0,20:0.5"}


def test_if_no_step_fits_the_error_names_noise_that_would(bench: Bench) -> None:
    done = bench.run("--noise-multiplier", "0.1", "--steps", "7")
    assert done.exit_code == 3
    assert "0 steps fit of 7; all would with σ = " in done.output


@pytest.mark.slow
def test_compare_shows_how_far_it_is(bench: Bench, tmp_path: Path) -> None:
    plot = str(tmp_path / "plot.png")
    usual = ("--data", "small", "--batch-size", "20", "--hidden", "4", "--output", plot)
    given = ["compare", "dp_sgd", *usual, "--steps", "10", "--seeds", "2"]
    done = CliRunner().invoke(app, given, env={"ACCOUNTANT_API_KEY": bench.token})
    require_success(done)
    assert "dp_sgd, step 20: loss" in done.output


def test_the_papers_accounting_is_used_where_it_is_asked_for(bench: Bench) -> None:
    method = "gaussian_sampling_composition"
    done = bench.train(
        "together", "--participants", "2", "--noise-multiplier", "6", "--method", method,
        "--rounds", "3", "--json",
    )  # fmt: skip
    require_success(done)
    assert {body["method"] for path, body in bench.asked if path == "/v1/epsilon"} == {method}


@pytest.mark.parametrize(("method", "rounds"), [("sgd-maj", 2), ("sgd-pass", 9), ("a-ddp", 9)])
def test_noise_comes_from_the_planned_rounds_as_in_papers_003(
    bench: Bench, method: str, rounds: int
) -> None:
    """σ of T = 2 is the least by the theorem that papers/003 names; baselines end with T."""
    given = ("--participants", "4", "--epsilon", "0.5", "--delta", "1e-8", "--sample-rate", "0.2")
    usual = ("together", *given, "--noise-for", method, "--planned-rounds", "2", "--json")
    answer = json.loads(require_success(bench.train(*usual, "--rounds", "9")).stdout)
    assert answer["rounds"] == rounds
    claim = bench.read("privacy-participant-1.json")
    theorem = "basic_composition" if method == "sgd-maj" else "advanced_composition"
    each_step = {"kind": "gaussian", "noise_multiplier": claim["mechanism"]["noise_multiplier"]}
    body = {"mechanism": {"kind": "repeated", "count": 2, "mechanism": each_step}}
    found = bench.api.post("/v1/epsilon", json=body | {"delta": 1e-8, "method": theorem}).json()
    assert found["epsilon"] == pytest.approx(0.5, rel=1e-3)
    assert claim["epsilon"] <= 0.5
    sampling = "balls_in_bins" if method == "sgd-pass" else "poisson"
    assert claim["mechanism"]["sampling"] == sampling
    for more, words in (
        (("--noise-multiplier", "2"), "leave out --noise-multiplier"),
        (("--noise-for", "sgd"), "must be one of a-ddp, sgd-maj"),
    ):
        refused = bench.train(*usual, *more)
        assert (refused.exit_code, words in words_of(refused)) == (2, True), refused.output


def test_participants_without_a_first_round_are_told_why(bench: Bench) -> None:
    for arguments, code, words in (
        (["--epsilon", "1,2"], 2, "one for each of 3"),
        (["--epsilon", "one"], 2, "not a number"),
        (["--sample-rate", "1.5"], 2, "--sample-rate must be in (0, 1]"),
        (["--epsilon", "1e-4"], 3, "0 steps fit"),
        (["--method", "nope"], 2, "/method"),
    ):
        done = bench.train("together", "--participants", "3", *arguments)
        assert done.exit_code == code
        assert words in done.output
        assert not bench.folder.exists()


def test_no_claim_of_an_earlier_run_stands_beside_a_new_model(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.run("--epsilon", "0.5").exit_code == 0
    first = bench.read("privacy.json")
    assert (first["status"], first["model_sha256"]) == ("proven", bench.digest())
    bench.leave_after(10, "/v1/epsilon", monkeypatch)
    assert bench.run("--epsilon", "50", "--steps", "120").exit_code == 4
    assert first["model_sha256"] != bench.digest()
    assert bench.read("privacy.json") == {
        "guarantee": "none",
        "reason": "the run ended before the service could be asked about 50 steps",
        "steps": 50,
        "model_sha256": bench.digest(),
    }


def test_a_run_that_dies_leaves_neither_an_older_model_nor_its_claim(bench: Bench) -> None:
    require_success(bench.run())
    bench.run_killed_at(1)
    assert bench.left() == set()


def test_together_leaves_no_claim_of_an_earlier_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.train("together", "--participants", "3", "--rounds", "2").exit_code == 0
    assert bench.read("privacy-participant-3.json")["model_sha256"] == bench.digest()
    assert bench.run().exit_code == 0
    assert bench.left() == {"privacy.json", "model.pt"}

    def dies(**_: Any) -> None:
        bench.refuse = "/v1/epsilon"

    monkeypatch.setattr(together, "train_federated", lambda *_, **__: dies() or 2)
    assert bench.train("together", "--participants", "2", "--rounds", "2").exit_code == 4
    assert bench.left() == {"privacy-participant-1.json", "privacy-participant-2.json", "model.pt"}
    assert bench.read("privacy-participant-1.json")["guarantee"] == "none"


def test_a_run_that_may_be_resumed_is_not_overwritten(bench: Bench) -> None:
    bench.folder.mkdir()
    (bench.folder / "checkpoint.pt").write_bytes(b"of another run")
    for command in ("run", "together"):
        done = bench.train(command)
        assert done.exit_code == 2
        assert "--resume" in done.output
        assert "--output" in done.output
        assert not bench.asked
        assert (bench.folder / "checkpoint.pt").read_bytes() == b"of another run"


@pytest.mark.parametrize(
    "missing", [pytest.param("/commit", marks=pytest.mark.slow), "/certificate"]
)
def test_a_failed_end_is_repeated_on_resume_with_the_trained_model(
    bench: Bench, missing: str
) -> None:
    bench.give(3.0)
    bench.refuse = missing
    assert bench.run("--dataset", bench.name).exit_code == 4
    trained = torch.load(bench.folder / "model.pt")
    bench.refuse = None
    require_success(bench.train("run", "--resume"))
    found = torch.load(bench.folder / "model.pt")
    assert all(torch.equal(found[name], trained[name]) for name in trained)
    assert bench.read("certificate.json")["steps"] == 30
    assert bench.read("privacy.json")["model_sha256"] == bench.digest()
    assert "checkpoint.pt" not in bench.left()


def _mixing(data: Dataset, _: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(data.inputs), nn.Linear(data.inputs, data.classes))


def _failing(*_: Any) -> nn.Module:
    raise KeyError("a defect")


@pytest.mark.parametrize("projected", [pytest.param(PCA, marks=pytest.mark.slow), ()])
def test_a_model_that_cannot_be_built_releases_and_reserves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, projected: tuple[str, ...]
) -> None:
    bench.give(3.0)
    for make, code in ((_mixing, 2), (_failing, 1)):
        monkeypatch.setitem(MODELS, "linear", replace(MODELS["linear"], make=make))
        done = bench.run("--dataset", bench.name, *projected, "--model", "linear")
        assert done.exit_code == code
        bench.require_uncharged()
        assert not bench.folder.exists()


def test_data_declared_public_are_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    note = data_sets.declared_public("newsgroups")
    assert note is not None
    assert "without noise" in note
    assert data_sets.declared_public("mine") is data_sets.declared_public("adult") is None
    known = replace(data_sets.DATASETS["small"], declared_public=note)
    monkeypatch.setitem(data_sets.DATASETS, "small", known)
    for command in (
        lambda: bench.run(),
        lambda: bench.train("together", "--participants", "2", "--rounds", "2"),
    ):
        assert note in words_of(require_success(command()))
        (claim,) = list(bench.folder.glob("privacy*.json"))[:1]
        assert bench.read(claim.name)["declared_public"] == note


@pytest.mark.slow
def test_raw_state_is_compared_only_where_no_guarantee_is_asked_for(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # words, not their outlines
    plot = tmp_path / "plot.svg"
    given = (
        "compare", "adadp:raw", "adadp", "--steps", "2", "--hidden", "4", "--batch-size", "20",
        "--output", str(plot),
    )  # fmt: skip
    refused = bench.train(*given)
    assert refused.exit_code == 2
    assert "--no-guarantee" in refused.output
    assert not bench.asked
    done = require_success(bench.train(*given, "--no-guarantee"))
    table = done.output.partition("Test accuracy at")[2]
    said = dict(re.findall(r"(adadp\S*) .*?(as stated|none) ", table))
    assert said == {"adadp:raw": "none", "adadp": "as stated"}
    labels = re.findall(r">(adadp[^<]*)</text>", plot.read_text())
    assert sorted(labels) == ["adadp", "adadp:raw (no guarantee)"]


RAW = ("--optimizer", "adadp", "--state", "raw")


def test_raw_state_is_trained_without_a_claim_and_without_a_charge(bench: Bench) -> None:
    bench.give(3.0)
    for more in ((), ("--dataset", bench.name), ("--dataset", bench.name, "--no-guarantee")):
        refused = bench.run(*RAW, *more)
        assert refused.exit_code == 2
        assert ("leave out --dataset" if len(more) == 3 else "--no-guarantee") in refused.output
        assert not bench.folder.exists()
    done = require_success(bench.run(*RAW, "--no-guarantee"))
    said = words_of(done)
    assert "No guarantee: --state raw is computed from private gradients" in said
    assert "Guarantee: ε" not in said
    claim = bench.read("privacy.json")
    assert claim["guarantee"] == "none"
    assert "no theorem covers" in claim["reason"]
    assert (claim["steps"], claim["model_sha256"]) == (30, bench.digest())
    assert not claim.keys() & {"epsilon", "delta", "status", "method"}
    assert bench.left() == {"privacy.json", "model.pt"}
    assert not [path for path, _ in bench.asked if "reservations" in path]
    bench.require_uncharged()


def test_a_run_without_a_service_has_to_ask_for_no_guarantee_and_says_so(bench: Bench) -> None:
    alone = ("--service", "none", "--noise-multiplier", "1")
    refused = bench.run(*alone)
    assert refused.exit_code == 2
    assert "no accounting service was asked" in refused.output
    assert "--no-guarantee" in refused.output
    assert not bench.folder.exists()
    done = require_success(bench.run(*alone, "--no-guarantee"))
    assert "No guarantee: no accounting service was asked." in done.output
    assert "ε" not in done.output  # of nobody's making
    assert bench.read("privacy.json")["steps"] == 30
    assert not bench.asked


def test_a_folder_that_another_run_trains_into_is_refused_and_nothing_stays_held(
    bench: Bench,
) -> None:
    bench.give(8.0)
    (bench.folder / "checkpoint.pt").parent.mkdir(parents=True)
    (bench.folder / "checkpoint.pt").touch()  # the other's: it is not told to be removed
    with lock_folder(bench.folder):
        done = bench.run("--dataset", bench.name, "--noise-multiplier", "8")
    assert done.exit_code == 2
    assert "another run trains into" in done.stderr
    assert bench.left() == {"checkpoint.pt"}
    bench.require_uncharged()


def test_a_resumed_run_reads_its_checkpoint_under_the_folders_lock(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two resumes at once read the same checkpoint before, and both began."""
    bench.give(8.0)
    more = ("--dataset", bench.name, "--noise-multiplier", "8", "--checkpoint-every", "5")
    bench.run_killed_at(11, *more)
    genuine, refused = Checkpoint.read, []

    def read(folder: Path) -> Checkpoint:
        with pytest.raises(DataError, match="another run trains into"), lock_folder(folder):
            pass
        refused.append(folder)
        return genuine(folder)

    monkeypatch.setattr(Checkpoint, "read", read)
    require_success(bench.train("run", "--resume"))
    assert refused == [bench.folder]
    monkeypatch.setattr(Checkpoint, "read", genuine)
    missing = bench.train("run", "--resume", "--output", str(bench.folder / "none"))
    assert missing.exit_code == 2
    assert not (bench.folder / "none").exists()


SEEDS = [10, 13, *map(nightly, (11, 12, 14, 15))]  # some need the very last halving


def any_run(seed: int) -> tuple[float, float, int, int]:
    """Draw a run at random: ε, σ, the batch size, and the number of steps beyond the budget."""
    chance = random.Random(seed)
    budget, batch = (chance.uniform(1, 3), chance.uniform(1.3, 2.2)), chance.randint(16, 24)
    return *budget, batch, 1 + chance.randrange(99)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_budget_of_its_own_is_trained_to_the_very_last_step(
    bench: Bench, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as /v1/steps says, which solves for them in another way."""
    epsilon, noise, batch, beyond = any_run(seed)
    with bench.service("http://test") as service:
        affordable = service.steps(
            noise_multiplier=noise, sample_rate=batch / ROWS, epsilon=epsilon, delta=1e-5
        )
    assert affordable > 0  # or nothing would be shown
    made = bench.counted(monkeypatch)
    done = bench.run(
        "--epsilon", repr(epsilon), "--noise-multiplier", repr(noise), "--batch-size", str(batch),
        "--steps", str(affordable + beyond), "--json",
    )  # fmt: skip
    answer = json.loads(require_success(done).stdout)
    assert len(made) == answer["steps"] == affordable
    assert answer["stopped"] == "the budget allows no further step"
    assert answer["guarantee"]["epsilon"] <= epsilon
    assert "and the run ends with the last that does; all would with σ = " in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_datasets_budget_is_trained_to_the_very_last_step(
    bench: Bench, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a quote says is affordable, and neither one more at once nor one more afterwards."""
    epsilon, noise, batch, _ = any_run(seed)
    bench.give(epsilon)
    with bench.service("http://test", api_key=bench.token) as service:
        one = Plan(ROWS, batch / ROWS, 1.0, noise).mechanism(1)
        affordable = service.quote(bench.name, one).steps
    assert affordable  # or nothing would be shown
    made = bench.counted(monkeypatch)

    def asks_for(steps: int) -> Result:
        return bench.run(
            "--dataset", bench.name, "--noise-multiplier", repr(noise),
            "--batch-size", str(batch), "--steps", str(steps),
        )  # fmt: skip

    beyond = asks_for(affordable + 1)
    assert beyond.exit_code == 3
    assert f" {affordable} such steps would" in " ".join(beyond.output.split())
    bench.require_uncharged()
    assert made == []
    require_success(asks_for(affordable))
    assert len(made) == bench.read("certificate.json")["steps"] == affordable
    assert asks_for(1).exit_code == 3
    assert len(made) == affordable
    assert bench.dataset()["spent"]["epsilon"] <= epsilon


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["poisson", "balls_in_bins"])
def test_a_plan_s_commands_price_it_and_train_it(
    sampling: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data are a folder of CSV files."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data/mine"
    folder.mkdir(parents=True)
    for name, rows in (("train.csv", 600), ("test.csv", 50)):
        lines = [f"{row % 2},{row % 2 + row / rows},{row % 7 / 7}" for row in range(rows)]
        (folder / name).write_text("\n".join(lines))
    words = f"plan -E 1.5 -d 1e-4 -n 600 -e 5 --sampling {sampling} --steps-min 10"
    found = CliRunner().invoke(cli.app, words.split(), env={"COLUMNS": "60"})
    price, train = (
        shlex.split(line) for line in found.stdout.splitlines() if line.startswith("accountant")
    )
    priced = json.loads(CliRunner().invoke(cli.app, [*price[1:], "--json"]).stdout)
    assert (priced["status"], priced["sampling"]) == ("proven", sampling)
    assert priced["epsilon"] <= 1.5
    given = [*train[1:], "--hidden", "4", "--json"]
    trained = json.loads(require_success(CliRunner().invoke(app, given)).stdout)
    assert str(trained["steps"]) == train[train.index("--steps") + 1]
    assert trained["guarantee"]["epsilon"] == priced["epsilon"]
