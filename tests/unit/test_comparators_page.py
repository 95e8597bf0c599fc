"""The page of comparators: its tables are what the results files say, and the programs run."""

from __future__ import annotations

import json
import re
import statistics
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import authors_code, comparators
from scripts.page_parts import enclose_part
from tests.support.pages import ROOT
from tests.support.training_bench import small

PAGE = (ROOT / "docs" / "comparators.md").read_text()


def test_the_tables_are_those_of_the_results_files() -> None:
    assert comparators.render(comparators.known_lines()) in PAGE
    assert authors_code.report() in PAGE


def test_the_verdicts_follow_from_the_results() -> None:
    def mean(task: str, method: str) -> float:
        return statistics.mean(
            each["score"] for each in comparators.known_lines()
            if (each["task"], each["method"]) == (task, method) and each["seed"]
        )  # fmt: skip

    assert mean("images", "EXP") <= mean("images", "dp_sgd")
    assert mean("images", "adppl") < mean("images", "dp_sgd") - 0.01
    assert mean("text", "pda_dpmd") > mean("text", "adadps") + 0.01
    assert mean("text", "adadps, adam with m") > mean("text", "pda_dpmd") + 0.01
    assert mean("text", "adadps, adam with m") > mean("text", "adadps") + 0.1
    assert abs(mean("text", "pda_dpmd") - mean("text", "dp_sgd, warm start")) < 0.03
    assert abs(mean("text", "adadps, current") - mean("text", "adadps")) < 0.01


def test_the_commands_of_the_page_write_results_and_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without training: each run is known at once. A second run finds all lines there."""
    for module in (comparators, authors_code):
        monkeypatch.setattr(module, "RESULTS", tmp_path / f"{module.__name__}.jsonl")
        monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    parts = [enclose_part(name, "report", "") for name in ("comparison", "published")]
    (tmp_path / "page.md").write_text("\nbetween\n".join(parts))
    monkeypatch.setattr(comparators, "score", lambda *of: 0.5 + of[2] / 1000)
    monkeypatch.setattr(comparators, "target_of", lambda _: 0.25)
    monkeypatch.setattr(authors_code, "run_pigdo", lambda _: iter([0.5, 0.75]))
    monkeypatch.setattr(authors_code, "run_adadps", lambda _: iter([0.25]))
    sizes = []
    for command in (
        "python -m benchmarks.comparators run",
        "python -m benchmarks.comparators run",
        "python -m benchmarks.comparators report",
        "python -m benchmarks.authors_code pigdo --noise-multiplier 4",
        "python -m benchmarks.authors_code adadps --noise-multiplier 1 --side frequency",
        "python -m benchmarks.authors_code report",
    ):
        module, *arguments = command.split()[2:]
        monkeypatch.setattr("sys.argv", [module, *arguments])
        {"benchmarks.comparators": comparators, "benchmarks.authors_code": authors_code}[
            module
        ].main()
        sizes.append(comparators.RESULTS.stat().st_size)
    assert len(set(sizes)) == 1
    page = (tmp_path / "page.md").read_text()
    assert "| dp_sgd | 0.530 ± 0.000 | +0.0 | 30, the end of its grid |" in page
    assert "not run" not in page
    assert "| pigdo | – | 4 | 2 | 0.7500 | " in page
    assert "| adadps | frequency | 1 | 1 | 0.2500 | " in page
    assert "\nbetween\n" in page


def test_means_and_missing_runs_are_stated() -> None:
    lines = [
        {"task": "text", "method": "dp_sgd", "rate": 10.0, "seed": seed, "score": score,
         "epsilon": 0.50001}
        for seed, score in ((0, 0.9), (1, 0.2), (2, 0.3))
    ]  # fmt: skip
    text = comparators.render(lines)
    assert "| dp_sgd | 0.250 ± 0.071 | +0.0 | 10 |" in text
    assert "ε = 0.501" in text
    assert "| pda_dpmd | not run | – | – |" in text


@pytest.mark.nightly
@pytest.mark.slow
def test_all_methods_of_a_task_spend_the_epsilon_of_dp_sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    data = replace(small(ROOT), frequencies=torch.linspace(0.1, 1, 8))
    monkeypatch.setattr(comparators, "load", lambda *_: data)
    comparators.dataset.cache_clear()
    for task, kind in comparators.TASKS.items():
        shorter = replace(kind, batch=200, steps=10, public=30, hidden=4)
        monkeypatch.setitem(comparators.TASKS, task, shorter)
    try:
        for task, methods in comparators.METHODS.items():
            target = comparators.target_of(task)
            for method in methods:
                assert 0 <= comparators.score(task, method, method.rate, 1) <= 1
                plan = comparators.planned(task, method, 400)
                steps = plan.mechanism(10)
                before = [comparators.RELEVANCE.mechanism()] if method.name == "adppl" else []
                spent = {"kind": "composed", "mechanisms": [*before, steps]} if before else steps
                assert 0.99 * target < comparators.proved(spent) <= target, method.name
    finally:
        for each in (comparators.dataset, comparators.target_of, comparators._planned):
            each.cache_clear()


@pytest.mark.parametrize("program", ["pigdo", "public", "frequency", "none"])
def test_the_published_programs_clip_mean_gradients_of_groups(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = replace(small(ROOT), frequencies=torch.linspace(0.1, 1, 8))
    images = replace(
        data, train_examples=torch.rand(1200, 784), test_examples=torch.rand(5, 784),
        train_labels=torch.arange(1200) % 10, test_labels=torch.arange(5),
    )  # fmt: skip
    monkeypatch.setattr(authors_code, "load", lambda name, _: images if name == "mnist" else data)
    options = Namespace(noise_multiplier=1.0, epochs=1, side=program, learning_rate=1.0)
    run = authors_code.run_pigdo if program == "pigdo" else authors_code.run_adadps
    assert all(0 <= each <= 1 for each in run(options))


def test_a_pair_counts_as_one_gradient_of_norm_c_at_most() -> None:
    net = torch.nn.Linear(3, 2)
    noisy = authors_code.NoisyGroups(net, 0.1, 0.0)
    noisy.set_gradients(100 * torch.randn(5, 2, 3), torch.zeros(5, 2, dtype=torch.long))
    total = torch.cat([each.grad.flatten() for each in net.parameters()])  # type: ignore[union-attr]
    assert 0 < float(total.norm()) <= 0.1 + 1e-6
    claimed, truly = authors_code.cost("pigdo", 4.0, 100)
    assert truly > 2 * claimed


def test_the_page_judges_no_paper_and_shows_a_constant_answer() -> None:
    """Two seeds of small runs are measurements; verdicts are those of the papers' rows."""
    assert not re.findall(r"(?:not )?reproduced|refuted|confirmed", PAGE)
    assert "](papers/index.md)" in PAGE
    assert "| the best constant answer | 0.113 |" in comparators.render([])


def test_a_published_program_writes_no_epoch_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def train(options: Namespace) -> Iterator[float]:
        started.append(options.noise_multiplier)
        yield from (epoch / 100 for epoch in range(1, options.epochs + 1))

    monkeypatch.setattr(authors_code, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(authors_code, "run_pigdo", train)
    for noise, epochs in (("4", "2"), ("4", "2"), ("4", "3"), ("8", "1"), ("4", "3")):
        monkeypatch.setattr(
            "sys.argv", ["authors_code", "pigdo", "--noise-multiplier", noise, "--epochs", epochs]
        )
        authors_code.main()
    lines = [json.loads(line) for line in authors_code.RESULTS.read_text().splitlines()]
    assert [(e["noise_multiplier"], e["epoch"]) for e in lines] == [(4, 1), (4, 2), (4, 3), (8, 1)]
    assert started == [4, 4, 8]  # a finished run is not trained again
