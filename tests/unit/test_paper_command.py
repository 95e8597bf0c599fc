"""`accountant-train paper` runs, resumes and says what is left; bad input changes no file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from filelock import FileLock
from typer.testing import CliRunner

from tests.support.paper_files import write_bank, write_cifar, write_imdb, write_posts
from training_client.budget import NoBudget
from training_client.lab import agd
from training_client.lab.cli import app
from training_client.lab.cli.paper import format_duration
from training_client.lab.data import Dataset
from training_client.lab.data.imdb import imdb_sequences
from training_client.lab.papers import runner, tasks
from training_client.lab.papers.accounting import describe_mechanism
from training_client.lab.papers.printed import BY_NAME
from training_client.lab.papers.runner import Job
from training_client.lab.papers.store import Store
from training_client.lab.papers.tasks import TASKS
from training_client.plan import Plan, factor_at

DOCS = Path(__file__).parents[2] / "docs"
FIGURE_4 = ("000", "--only", "figure-4", "--epochs-max", "30", "--seeds", "1")


def call(*words: object) -> Result:
    """Run the command."""
    return CliRunner().invoke(app, ["paper", *map(str, words)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A results file that has only learning rates."""
    lines = (DOCS / "training-results.jsonl").read_text().splitlines(keepends=True)
    kept = tmp_path / "results.jsonl"
    kept.write_text("".join(each for each in lines if '"tuning"' in each))
    return kept


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs that would have been trained; each is said to take two minutes."""
    made: list[Job] = []

    def train(job: Job) -> dict[str, Any]:
        made.append(job)
        known = {"score": 0.5, "curve": [[job.experiment.steps, 0.5]], "seconds": 120.0}
        return job.line | known

    def trivial(task: str, _: Path) -> dict[str, Any]:
        return {"kind": "trivial", "task": task, "score": 0.1}

    monkeypatch.setattr(runner, "train", train)
    monkeypatch.setattr(runner, "compute_trivial_score", trivial)
    return made


def test_a_paper_is_run_once_and_says_what_is_left(file: Path, trained: list[Job]) -> None:
    before = file.read_bytes()
    asked = call(*FIGURE_4, "--left", "--results", file)
    left = int(asked.output.split(" runs are left: not measured yet")[0].split()[-1])
    assert left == 4
    assert file.read_bytes() == before
    done = call(*FIGURE_4, "--results", file)
    assert done.exit_code == 0, done.output
    assert "Nothing is left. The results are in" in done.output
    assert file.read_bytes().startswith(before)  # lines are only added
    assert len(trained) == left == len({job.experiment.name for job in trained})
    again = call(*FIGURE_4, "--results", file)
    assert again.exit_code == 0
    assert len(trained) == left
    more = call(*FIGURE_4[:-1], "2", "--left", "--results", file)
    assert f"{left} runs are left: about {format_duration(120 * left)}." in more.output


@pytest.mark.parametrize(
    "command",
    [
        "accountant-train paper 000 --left",
        "accountant-train paper 000 --only table-1 --seeds 3",
    ],
)
def test_the_commands_of_the_page_work(
    command: str, file: Path, tmp_path: Path, trained: list[Job]
) -> None:
    done = call(*command.split()[2:], "--results", file, "--data-dir", tmp_path)
    assert done.exit_code == 0, done.output
    assert bool(trained) == ("--left" not in command)
    assert {job.experiment.section for job in trained} <= {"table-1"}


def test_a_stopped_command_goes_on(
    file: Path, trained: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = runner.train

    def stop(job: Job) -> dict[str, Any]:
        if len(trained) == 2:
            raise KeyboardInterrupt
        return train(job)

    monkeypatch.setattr(runner, "train", stop)
    stopped = call(*FIGURE_4, "--results", file)
    assert stopped.exit_code == 130
    assert "Stopped." in stopped.output
    assert "The same command goes on." in stopped.output
    monkeypatch.setattr(runner, "train", train)
    assert call(*FIGURE_4, "--results", file).exit_code == 0
    names = [job.experiment.name for job in trained]
    assert len(names) == len(set(names))


def alter(file: Path, **changes: object) -> None:
    """Add a finished run, with changes."""
    experiment = BY_NAME["mnist/figure-4/adal/8"]
    known = {"kind": "run", "experiment": experiment.name, "seed": 1, "steps": experiment.steps}
    line = {**known, "learning_rate": 0.001, "score": 0.5, "curve": [], **changes}
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda file: alter(file, settings={"clip_norm": 1.0}), "clip_norm 1.0, not 4.0"),
        (lambda file: alter(file, learning_rate=0.5), "learning_rate 0.5, not 0.001"),
        (lambda file: alter(file, steps=17), "was run for 17 steps, not 3000"),
        (lambda file: alter(file, experiment="a/b/c/1"), "unknown experiment 'a/b/c/1'"),
        (lambda file: alter(file, seed=0), "unknown seed 0"),
        (lambda file: alter(file, seed="one"), "unknown seed 'one'"),
        (lambda file: alter(file, kind="tuning", task="box", method="x", seed=4), "unknown seed 4"),
        (lambda file: file.write_text("# A page\n"), "1 is not a result"),
        (lambda file: file.write_text("a word"), "is not a results file"),
        (lambda file: file.write_bytes(b"\xff\xfe\n"), "is not a results file"),
        (lambda file: file.write_text('{"kind": "run", "seed": 1}\n'), "has no experiment"),
    ],
)  # fmt: skip
def test_a_file_of_other_settings_is_refused_and_left_as_it_is(
    change: Callable[[Path], object], told: str, file: Path, trained: list[Job]
) -> None:
    change(file)
    before = file.read_bytes()
    refused = call(*FIGURE_4, "--results", file)
    assert refused.exit_code == 2
    assert told in refused.output
    assert "choose another --results" in refused.output or "seed" in told
    assert file.read_bytes() == before
    assert not trained


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("005",), "Unknown paper '005': there are 000, 001, 002, 003, 004"),
        (("000", "--only", "table-9"), "Unknown place 'table-9' of papers/000: there are"),
        (("000", "--seeds", "0"), "greater than or equal to 1"),
        (("004", "--only", "table-4"), "imdb was not found: unpack"),
        (("003", "--only", "figure-1", "--results", "{folder}"), "Is a directory"),
    ],
)  # fmt: skip
def test_bad_input_is_named(words: tuple[str, ...], told: str, file: Path, tmp_path: Path) -> None:
    words = tuple(each.format(folder=tmp_path) for each in words)
    where = () if "--results" in words else ("--results", file)
    refused = call(*words, *where, "--data-dir", tmp_path)
    assert refused.exit_code == 2, refused.output
    assert told in " ".join(refused.output.split())


def test_what_has_no_experiment_says_why(file: Path) -> None:
    found = call("002", "--results", file)
    assert found.exit_code == 0
    assert "papers/002: nothing to train. `accountant audit` recomputes" in found.output
    assert (
        "nothing to train (the paper prints neither the start"
        in call("000", "--only", "figure-1", "--results", file).output
    )


def test_two_commands_do_not_share_a_file(file: Path) -> None:
    with FileLock(file.with_name(f".{file.name}.lock")):
        refused = call(*FIGURE_4, "--results", file)
    assert refused.exit_code == 2
    assert "another command writes to" in refused.output


@pytest.mark.slow
def test_experiments_on_your_own_data_start_with_one_command(file: Path, tmp_path: Path) -> None:
    write_bank(tmp_path / "bank/bank-full.csv", rows=1000)
    options = ("--epochs-max", "0.1", "--seeds", "1", "--results", file, "--data-dir", tmp_path)
    done = call("003", "--only", "figure-1", *options)
    assert done.exit_code == 0, done.output
    assert "Left out: ipums was not found" in done.output
    runs = list(Store(file).list_kind("run"))
    names = {run["experiment"].rsplit("/", 1)[0] for run in runs if "bank" in run["experiment"]}
    assert names == {"bank/main/sgd_maj", "bank/main/sgd_adv"}
    assert Store(file).find_trivial_score("bank") == pytest.approx(0.5, abs=0.05)
    other = tmp_path / "other.jsonl"
    other.write_text(
        "".join(each for each in file.read_text().splitlines(True) if "bank" not in each)
    )
    again = call(
        "003", "--only", "figure-1", *options[:4], "--results", other, *options[6:], "--workers", 2
    )
    assert again.exit_code == 0, again.output
    scores = [
        {run["experiment"]: run["score"] for run in Store(each).list_kind("run")}
        for each in (file, other)
    ]
    assert scores[0] == scores[1]  # as many processes, the same results


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "imdb/main/dp_sgd/1",
        "imdb-tfidf/main/adadps frequencies/1",
        "stackoverflow/main/dp_adam/0.95",
        "cifar10-cnn/figure-8/dp_sgd/8",
        "cifar10-cnn/figure-8/exp/13.63",
        "imdb/main/pda_dpmd/1",
        "imdb-lstm/main/adadps adam/1",
        "imdb-lstm/table-9/non_private adas/1",
        "imdb/main/adadps rmsprop, raw public/1",
        "imdb/table-9/non_private adam/1",
        "imdb/table-9/non_private adas/1",
        "imdb/table-9/non_private rmsprop/1",
    ],
)
def test_an_experiment_trains_on_files_in_the_real_format(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(TASKS["imdb-lstm"], prepare=lambda folder, *_: imdb_sequences(folder, length=5))
    monkeypatch.setitem(TASKS, "imdb-lstm", short)
    write_imdb(tmp_path)
    write_posts(tmp_path / "Posts.xml")
    write_cifar(tmp_path, 10, binary=True)
    tasks.clear_loaded_data()
    method = replace(BY_NAME[name].method, public_rows=2)
    experiment = replace(BY_NAME[name], steps=2, sample_rate=0.5, method=method)
    line = runner.train(Job(experiment, 0.1, 1, folder=tmp_path))
    assert 0 <= line["score"] <= 1
    assert [step for step, _ in line["curve"]] == [1, 2]
    assert line["settings"]["optimizer"] == experiment.method.optimizer


@pytest.mark.parametrize(
    ("name", "steps"),
    [("mnist/figure-2/agd/8", 4), ("mnist-784/figure-5/adppl/9.13", 4),
     ("mnist-784/figure-5/exp/13.63", 4)],
)  # fmt: skip
def test_a_comparator_trains_with_the_noise_that_is_charged(
    name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = replace(BY_NAME[name], steps=steps, sample_rate=0.5)
    if experiment.method.noise_schedule:
        method = replace(experiment.method, noise_schedule="decay:0.5:2")
        experiment = replace(experiment, method=method)
    rows, labels = torch.rand(200, 3), torch.arange(200) % 2
    data = Dataset(rows, labels, rows, labels, 2)
    plans: list[Plan] = []

    def noted(plan: Plan, *rest: Any) -> NoBudget:
        plans.append(plan)
        return NoBudget(plan, *rest)

    for module in (runner, agd):
        monkeypatch.setattr(module, "NoBudget", noted)
    task = replace(TASKS[experiment.task], hidden=4, prepare=lambda *_: data)
    monkeypatch.setitem(TASKS, experiment.task, task)
    line = runner.train(Job(experiment, 0.1, 1))
    assert [step for step, _ in line["curve"]][-1] == steps
    charged = describe_mechanism(experiment, steps)["mechanisms"]
    if experiment.method.rho:
        rho = charged[-1]["rho"]
        assert plans[0].noise_multiplier == pytest.approx((rho / steps) ** -0.5)
        spent = sum(1 / (2 * plan.noise_multiplier**2) for plan in plans)
        selections = line["steps_made"] * rho / steps / 2
        assert rho / 4 < spent + selections <= rho * (1 + 1e-12)
        return
    (plan,) = plans
    factors = [factor for count, factor in experiment.noise_pieces(steps) for _ in range(count)]
    assert [factor_at(plan.noise_schedule, step) for step in range(1, steps + 1)] == factors
    made = [each["noise_multiplier"] for each in charged if each["kind"] == "dp_sgd"]
    assert made == [plan.noise_multiplier * each for each in dict.fromkeys(factors)]
    assert ({"kind": "gaussian", "noise_multiplier": 30.0} in charged) == ("adppl" in name)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (59, "59 s"), (61, "1 min"), (7500, "2 h 5 min")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
