"""The page of training results says what the results file says, and nothing else."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.results import report
from benchmarks.results.plots import draw
from tests.support.helpers import epsilon, run
from training_client.lab.data import Dataset
from training_client.lab.papers import runner
from training_client.lab.papers.accounting import build_question
from training_client.lab.papers.experiments import (
    ADULT_PLANS,
    EXPERIMENTS,
    PAPER_SCHEDULE,
    PASSES,
    LinearDecay,
    Method,
)
from training_client.lab.papers.runner import Job, list_tuning_jobs
from training_client.lab.papers.store import KINDS, Store
from training_client.lab.papers.tasks import TASKS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BY_NAME = {each.name: each for each in EXPERIMENTS}
SCHEDULED = [each.name for each in EXPERIMENTS if each.task == "mnist-8"]


def made_up(file: Path) -> Store:
    """Three seeds of every fifth experiment; the last of them broke down."""
    store = Store(file)
    for experiment in EXPERIMENTS[::5]:
        for seed in (1, 2, 3):
            known = {"experiment": experiment.name, "seed": seed, "steps": experiment.steps}
            curve = [[experiment.steps, 0.5 + seed / 10]]
            score = None if seed == 3 else 0.5 + seed / 10
            rest = {"score": score, "curve": curve, "seconds": 1.0}
            store.add({"kind": "run", **known, "learning_rate": 0.1, **rest})
        asked = build_question(experiment, experiment.steps)
        store.add({"kind": "epsilon", **asked, "epsilon": 0.25, "status": "proven"})
    return store


def test_a_page_renders_from_a_few_results(tmp_path: Path) -> None:
    store = made_up(tmp_path / "results.jsonl")
    text = report.render_page(store, report.TEMPLATE.read_text())
    assert "0.650 ± 0.071, 1 broke down" in text
    assert "| 0.25 |" in text
    assert not set("{}") & set(text)


@pytest.mark.slow
def test_plots_are_drawn_from_a_few_results(tmp_path: Path) -> None:
    store = made_up(tmp_path / "results.jsonl")
    draw(report.find_experiments("adult/main"), store, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")


def test_a_truncated_result_line_is_computed_again(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines = len(made_up(file).lines)
    file.write_text(file.read_text() + '{"kind": "ru')
    store = Store(file)
    assert len(store.lines) == lines
    name = EXPERIMENTS[1].name
    known = {"kind": "run", "experiment": name, "seed": 1, "steps": 1}
    store.add({**known, "score": 0.5, "curve": []})
    assert len(Store(file).lines) == lines + 1


def test_every_experiment_says_what_its_paper_prints() -> None:
    sources = {each.paper_result.source for each in EXPERIMENTS}
    assert all(source.startswith("papers/00") or source == "none" for source in sources)


def test_names_tell_experiments_apart() -> None:
    private = [each.name for each in EXPERIMENTS if each.method.optimizer != "non_private"]
    assert len(private) == len(set(private))


def test_the_grid_is_tried_for_every_method() -> None:
    tried = {
        (job.experiment.task, job.experiment.method.label) for job in list_tuning_jobs(EXPERIMENTS)
    }
    needed = {(TASKS[each.task].tuned_on or each.task, each.method.label) for each in EXPERIMENTS}
    assert tried == needed
    expected = sum(len(TASKS[task].grid) for task, _ in tried)
    assert len(list(list_tuning_jobs(EXPERIMENTS))) == expected


def test_the_schedule_of_papers_000_falls_for_ten_epochs_and_then_stays() -> None:
    rates = [0.1 * PAPER_SCHEDULE.factor(done) for done in (0, 500, 1000, 3000)]
    assert rates == pytest.approx([0.1, 0.076, 0.052, 0.052])


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("optimizer", ["dp_sgd", "adadp"])
def test_a_run_follows_its_schedule(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = Method("scheduled", optimizer, 0.5, 1.0, schedule=LinearDecay(0.5, 2))
    experiment = replace(BY_NAME["mnist-8/main/dp_sgd/8"], method=method, steps=4)
    used, make = [], runner._make_stepper

    def recorded(*of: Any) -> Any:
        made = make(*of)
        step = made.step
        made.step = lambda *given: (used.append(made.learning_rate), step(*given))
        return made

    # private: a result says nothing of the rate of each step
    monkeypatch.setattr(runner, "_make_stepper", recorded)
    rows, labels = torch.rand(200, 3), torch.arange(200) % 2
    data = Dataset(rows, labels, rows, labels, 2)
    task = replace(TASKS["mnist-8"], hidden=4)
    runner._train_model(Job(experiment, method.learning_rate, 1), task, data)
    assert used == [0.5, 0.375, 0.25, 0.25]


def test_a_run_whose_loss_becomes_infinite_is_stored_as_broken_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = Method("raw", "adadp", 0.5, 1.0, state="raw")
    experiment = replace(BY_NAME["mnist-8/main/dp_sgd/8"], method=method, steps=40)
    rows, labels = torch.full((100, 3), 3e38), torch.arange(100) % 2
    data = Dataset(rows, labels, rows, labels, 2)
    task = replace(TASKS["mnist-8"], hidden=4, prepare=lambda *_: data)
    monkeypatch.setitem(TASKS, "mnist-8", task)
    line = runner.train(Job(experiment, 1e3, 1))
    assert (line["score"], line["curve"]) == (None, [])


@pytest.mark.parametrize("changes", [{"optimizer": "non_private"}, {"separate_users": True}])
def test_a_schedule_that_no_run_would_follow_is_refused(changes: dict[str, Any]) -> None:
    known = {"optimizer": "dp_sgd", "learning_rate": 0.1, "clip_norm": 1.0}
    with pytest.raises(ValueError, match="schedule"):
        Method("method", **(known | changes), schedule=PAPER_SCHEDULE)


def scored(file: Path, scores: dict[str, tuple[float, ...]]) -> Store:
    """A results file with these final scores, seed by seed."""
    store = Store(file)
    for name, values in scores.items():
        known = {"kind": "run", "experiment": name, "steps": BY_NAME[name].steps}
        for seed, score in enumerate(values, start=1):
            store.add({**known, "seed": seed, "score": score, "curve": [], "seconds": 1.0})
    return store


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        ((0.90, 0.91, 0.92), "+2.0 points, 95 % interval −0.3 to +4.3: not significant"),
        ((0.93, 0.94, 0.95), "+5.0 points, 95 % interval +2.7 to +7.3: significant"),
        ((0.83, 0.84, 0.85), "−5.0 points, 95 % interval −7.3 to −2.7: significant"),
        ((0.93,), "+4.0 points, –"),
    ],
)
def test_a_lead_is_called_significant_only_where_its_interval_excludes_0(
    tmp_path: Path, ahead: tuple[float, ...], expected: str
) -> None:
    first, second = "mnist-8/main/adadp/8", "mnist-8/main/dp_sgd/8"
    store = scored(tmp_path / "file.jsonl", {first: ahead, second: (0.88, 0.89, 0.90)})
    pair = f"{first} over {second}"
    assert report.render_page(store, f"{{lead:{pair}}} points, {{verdict:{pair}}}") == expected


@pytest.mark.parametrize(
    ("difference", "expected"),
    [(0.031, "+3.1"), (-0.0012, "−0.1"), (0.0002, "+0.02"), (-0.00043, "−0.04"), (0.0, "+0.0")],
)
def test_an_interval_end_close_to_0_shows_the_digit_that_decides(
    difference: float, expected: str
) -> None:
    assert report._format_interval_end(difference) == expected


def test_the_page_is_what_the_results_file_says() -> None:
    store = Store(DOCS / "training-results.jsonl")
    text = report.render_page(store, report.TEMPLATE.read_text())
    assert (DOCS / "training-results.md").read_text() == text


def test_a_line_is_json_without_surprises() -> None:
    for line in (DOCS / "training-results.jsonl").read_text().splitlines():
        assert json.loads(line)["kind"] in KINDS


@pytest.mark.parametrize(
    ("ahead", "left"),
    [
        ((0.89, 0.90, 0.91), "+1.0 points (95 % interval −1.3 to +3.3: not significant)"),
        ((0.93, 0.94, 0.95), "+5.0 points (95 % interval +2.7 to +7.3: significant)"),
    ],
)
def test_what_is_left_of_the_lead_of_adadp_is_read_off_the_results(
    tmp_path: Path, ahead: tuple[float, ...], left: str
) -> None:
    scores = {"mnist-8/main/dp_sgd, schedule/8": (0.88, 0.89, 0.90)}
    scores |= {f"mnist-8/main/{name}, schedule/8": ahead for name in ("adadp", "adadp raw")}
    scores |= {"mnist/main/dp_sgd/8": (0.85, 0.86, 0.87)}
    text = report.render_page(scored(tmp_path / "file.jsonl", scores), report.TEMPLATE.read_text())
    summary = text.split("## In short")[1].split("\n## ")[0]
    assert "DP-SGD reaches 0.890 ± 0.010 instead of 0.860 ± 0.010" in summary
    assert summary.count(left) == 2


def test_the_words_about_our_settings_hold_for_the_results() -> None:
    store = Store(DOCS / "training-results.jsonl")

    def mean(name: str) -> float:
        return statistics.mean(report.list_final_scores(BY_NAME[name], store))

    for method in ("adadp", "adadp raw", "dp_adam"):
        ours = mean(f"mnist/main/{method}/8") - mean("mnist/main/dp_sgd/8")
        assert ours > 0.01
        for rest in ("", ", schedule"):  # the lead comes from our own settings
            pair = [f"mnist-8/main/{each}{rest}/8" for each in (method, "dp_sgd")]
            assert mean(pair[0]) - mean(pair[1]) < ours / 2
            assert report.format_verdict(" over ".join(pair), store).endswith(": not significant")
    at_4, at_8 = (store.find_best_rate(task, "dp_sgd") or 0.0 for task in ("mnist", "mnist-8"))
    assert 0 < at_8 < at_4  # what was chosen at σ = 4 is too large at σ = 8
    for name in SCHEDULED:  # no choice is at the end of its grid
        label = BY_NAME[name].method.label
        assert (
            store.find_best_rate("mnist-8", label)
            in sorted(store.list_tuning_scores("mnist-8", label))[1:-1]
        )
    runs = [run for name in SCHEDULED for run in store.list_runs(BY_NAME[name])]
    assert {run["seed"] for run in runs} == {1, 2, 3}
    assert len(runs) == 3 * len(SCHEDULED)


THEOREMS = {  # of each method for Adult: what accounts for it, and at what rate
    "sgd_maj": ("basic_composition", 1.0),
    "sgd_adv": ("advanced_composition", 0.01),
    "sgd_pass": ("advanced_composition", 1.0),
    "a_ddp": ("gaussian_sampling_composition", 0.01),
    "a_ddp pld": ("pld", 0.01),
}


@pytest.mark.parametrize("label", list(THEOREMS))
def test_plans_for_adult_are_what_the_service_says(label: str) -> None:
    method, rate = THEOREMS[label]
    for target, plans in ADULT_PLANS.items():
        noise, rounds = plans[label]
        steps = PASSES if label == "sgd_pass" else rounds
        found = epsilon(method, run(rate, noise, steps), TASKS["adult"].delta)
        assert found.epsilon == pytest.approx(target, rel=1e-3)


def called(command: str, *options: object) -> str:
    """Run a command of the page with further options; return its output."""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["env", f"PATH={programs}", *shlex.split(command), *map(str, options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_the_command_that_reports_writes_the_page_and_its_plots(tmp_path: Path) -> None:
    called("python benchmarks/training_results.py report", "--page", tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == (DOCS / "training-results.md").read_text()
    drawn = {each.name for each in (tmp_path / "images").iterdir()}
    assert drawn == {each.name for each in (DOCS / "images").glob("training-*.svg")}
