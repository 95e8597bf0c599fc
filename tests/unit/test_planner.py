"""The planner: its noise multipliers against the general solver, its measures and its advice."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from accountant_service import mechanisms
from accountant_service.accounting import calculator, noise_frontier, planner, solver
from accountant_service.accounting.guarantee import NeighbouringRelation, Status
from accountant_service.accounting.methods.pld import dominating_pairs
from accountant_service.accounting.planner import BatchRange, CurrentChoice, Goal, PlannedRun
from accountant_service.errors import UnreachableTargetError
from accountant_service.mechanisms import DpSgd
from accountant_service.numerics import certified_interval
from accountant_service.numerics.laws.dominating_pair import DIRECTIONS
from accountant_service.numerics.upper_bound import bound_direction

GOAL = Goal(epsilon=2.0, delta=1e-5, dataset_size=60_000, examples=600_000)
GOALS = {
    "ordinary": GOAL,
    "little budget": replace(GOAL, epsilon=0.3, delta=1e-6),
    "much budget": replace(GOAL, epsilon=8.0),
    "few steps": replace(GOAL, examples=60_000, epsilon=8.0, delta=1e-8),
    "small data": Goal(1.0, 1e-4, 500, 10_000),
    "replaced records": replace(GOAL, relation=NeighbouringRelation.REPLACE_ONE),
}
FEW = BatchRange(points=4, smallest=None)


def frontier(goal: Goal, sampling: planner.PlannedSampling, points: int = 4) -> list[PlannedRun]:
    return list(planner.plan(goal, (sampling,), BatchRange(points)).runs)


def cases() -> list[Any]:
    """Return goals and samplings; the general solver takes long for balls in bins."""
    quick = {("small data", "balls_in_bins"), *((name, "poisson") for name in GOALS)}
    return [
        pytest.param(name, sampling, marks=[] if (name, sampling) in quick else pytest.mark.nightly)
        for name in GOALS
        for sampling in planner.SAMPLINGS
    ]


@pytest.mark.spread(second=2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "sampling"), cases())
def test_the_noise_is_at_least_that_of_the_solver_and_at_most_a_thousandth_more(
    name: str, sampling: planner.PlannedSampling
) -> None:
    goal = GOALS[name]
    for run in frontier(goal, sampling, 3):
        least = solver.noise_multiplier(run.run, goal.target).value
        assert least * (1 - 2e-6) <= run.noise_multiplier <= least * 1.001, run


@pytest.mark.spread(second=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", GOALS)
def test_every_claim_is_proved_again(name: str) -> None:
    goal = GOALS[name]
    plan = planner.plan(goal, batches=FEW)
    for run in plan.runs:
        claim = calculator.epsilon(run.run, goal.delta, relation=goal.relation)
        assert claim.status is Status.PROVEN
        assert claim.epsilon <= goal.epsilon
        assert run.epsilon <= goal.epsilon
    assert plan.guarantee.epsilon <= goal.epsilon
    assert plan.guarantee.status is Status.PROVEN


@pytest.mark.slow
@pytest.mark.parametrize("sampling", planner.SAMPLINGS)
def test_larger_batches_need_more_noise_and_have_more_signal(
    sampling: planner.PlannedSampling,
) -> None:
    runs = frontier(GOAL, sampling, 12)
    for small, large in itertools.pairwise(runs):
        assert small.batch_size < large.batch_size
        assert small.steps > large.steps
        assert small.noise_multiplier < large.noise_multiplier
        assert small.effective_noise > large.effective_noise
        assert small.signal_to_noise < large.signal_to_noise


@pytest.mark.slow
def test_the_measures_are_those_of_their_formulas() -> None:
    for run in planner.plan(GOAL, batches=FEW).runs:
        rate = run.batch_size / GOAL.dataset_size
        assert run.sample_rate == pytest.approx(rate)
        assert run.epochs == pytest.approx(run.steps * rate)
        assert run.steps * run.batch_size <= GOAL.examples * (1 + 1e-9)
        assert run.effective_noise == pytest.approx(run.noise_multiplier / run.batch_size)
        mean_of_all = run.effective_noise / math.sqrt(run.steps)
        assert run.signal_to_noise == pytest.approx(1 / mean_of_all)
        assert (run.run.rate(), run.run.step_count()) == (run.sample_rate, run.steps)


def test_full_batches_reach_the_limit_of_the_signal_to_noise_and_no_run_exceeds_it() -> None:
    plan = planner.plan(GOAL, batches=BatchRange(4, 6_000, 60_000))
    shares = [run.signal_to_noise / plan.signal_to_noise_limit for run in plan.runs]
    assert max(shares) <= 1
    full = [run for run in plan.runs if run.batch_size == GOAL.dataset_size]
    assert len(full) == 2
    assert all(run.signal_to_noise > 0.999 * plan.signal_to_noise_limit for run in full)


def test_the_recommended_run_is_the_smallest_batch_with_nearly_the_best_signal() -> None:
    plan = planner.plan(GOAL, ("poisson",), BatchRange(8))
    long = [run for run in plan.runs if run.steps >= GOAL.steps_min]
    best = max(run.signal_to_noise for run in long)
    chosen = plan.recommended
    assert chosen in plan.runs
    assert chosen.signal_to_noise >= planner.SHARE * best
    smaller = [run for run in long if run.batch_size < chosen.batch_size]
    assert smaller
    assert all(run.signal_to_noise < planner.SHARE * best for run in smaller)
    text = f"With Poisson sampling, a batch of {chosen.batch_size} is the smallest that divides"
    assert plan.reason.startswith(text)


@pytest.mark.parametrize("size", [60_000, 50_021, 32_561])
@pytest.mark.slow
def test_the_recommendation_does_not_depend_on_the_number_of_runs(size: int) -> None:
    goal = Goal(2.0, 1e-6, size, 20 * size)
    found = {planner.plan(goal, batches=BatchRange(points)).recommended for points in (2, 3, 8)}
    assert len(found) == 1
    assert found.pop().steps >= goal.steps_min


@pytest.mark.spread(first=1, second=2)
@pytest.mark.parametrize("name", GOALS)
def test_all_runs_are_made_of_whole_numbers_and_cost_what_they_say(name: str) -> None:
    """They are described by sizes, as the API takes them."""
    goal = GOALS[name]
    for run in planner.plan(goal, batches=FEW).runs:
        described = mechanisms.to_json(run.run)
        assert {"dataset_size", "batch_size", "steps"} <= described.keys()
        assert mechanisms.from_json(described) == run.run, "it is a run that the API accepts"
        assert (type(run.batch_size), type(run.steps)) == (int, int)
        if run.sampling == "balls_in_bins":
            assert goal.dataset_size % run.batch_size == 0
            assert run.steps % (goal.dataset_size // run.batch_size) == 0


@pytest.mark.slow
def test_a_recommended_batch_divides_the_records_where_it_can() -> None:
    for size in (1_000, 48_000, 50_000):
        found = planner.plan(replace(GOAL, dataset_size=size), batches=FEW)
        assert size % found.recommended.batch_size == 0
    prime = planner.plan(Goal(2.0, 1e-6, 50_021, 20 * 50_021), batches=FEW)
    assert prime.recommended.sampling == "poisson"
    assert prime.recommended.batch_size == float(f"{prime.recommended.batch_size:.2g}")
    assert "few-sizes-divide" in codes(prime)


def test_the_range_of_batch_sizes_limits_the_recommendation() -> None:
    for smallest, largest in ((1, 500), (4_000, 6_000), (777, 777)):
        chosen = planner.plan(GOAL, ("poisson",), BatchRange(3, smallest, largest)).recommended
        assert smallest <= chosen.batch_size <= largest


def codes(plan: planner.Plan, *, warnings: bool = False) -> set[str]:
    return {each.code for each in plan.advice if each.is_warning or not warnings}


def test_a_sound_plan_has_no_warning() -> None:
    assert codes(planner.plan(GOAL, ("poisson",), FEW), warnings=True) == set()


def test_a_delta_of_one_over_n_is_warned_about() -> None:
    plan = planner.plan(replace(GOAL, delta=1 / 60_000), ("poisson",), FEW)
    assert codes(plan, warnings=True) == {"delta-too-large"}


def test_a_small_batch_of_today_is_warned_about_and_compared() -> None:
    plan = planner.plan(GOAL, ("poisson",), FEW, CurrentChoice(32))
    assert "current-choice" in codes(plan, warnings=True)
    assert plan.current is not None
    assert plan.current_guarantee is not None
    assert (plan.current.batch_size, plan.current.steps) == (32, 18_750)
    assert plan.current_guarantee.epsilon <= GOAL.epsilon
    text = next(each.message for each in plan.advice if each.code == "current-choice")
    assert "Today's batch of 32 with 18750 steps needs σ = " in text


def test_a_choice_beyond_the_compute_limit_is_warned_about() -> None:
    plan = planner.plan(GOAL, ("poisson",), FEW, CurrentChoice(6_000, 500))
    assert "current-choice-above-limit" in codes(plan, warnings=True)


def test_more_epochs_are_advised_only_where_they_reduce_the_noise() -> None:
    short = planner.plan(replace(GOAL, epsilon=8.0, examples=60_000), ("poisson",), FEW)
    long = planner.plan(replace(GOAL, epsilon=0.5, examples=6_000_000), ("poisson",), FEW)
    assert "more-epochs-help" in codes(short)
    assert "more-epochs-gain-little" in codes(long)


def test_too_few_steps_are_warned_about() -> None:
    plan = planner.plan(replace(GOAL, examples=5_000, steps_min=10_000), ("poisson",), FEW)
    assert "few-steps" in codes(plan, warnings=True)
    assert plan.reason.startswith("No batch size allows 10000 steps")


def test_less_than_an_epoch_leaves_balls_in_bins_out() -> None:
    plan = planner.plan(replace(GOAL, examples=59_999), batches=FEW)
    assert {run.sampling for run in plan.runs} == {"poisson"}
    assert "sampling-left-out" in codes(plan, warnings=True)


def test_balls_in_bins_alone_needs_an_epoch() -> None:
    with pytest.raises(UnreachableTargetError, match="whole epochs"):
        planner.plan(replace(GOAL, examples=59_999), ("balls_in_bins",), FEW)


def test_a_budget_that_no_noise_reaches_is_refused() -> None:
    with pytest.raises(UnreachableTargetError):
        planner.plan(replace(GOAL, epsilon=1e-9, delta=1e-12), ("poisson",), FEW)


def test_a_frontier_needs_at_most_two_and_a_half_evaluations_for_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluations = 0
    bound = noise_frontier._FrontierSearch._bound

    def counted(self: Any, trial: DpSgd) -> float:
        nonlocal evaluations
        evaluations += 1
        return bound(self, trial)

    # private: the number of evaluations is not part of any answer
    monkeypatch.setattr(noise_frontier._FrontierSearch, "_bound", counted)
    monkeypatch.setattr(solver, "noise_multiplier", None)  # the general solver is not needed
    runs = [
        DpSgd(1.0, dataset_size=60_000, batch_size=batch, steps=600_000 // batch)
        for batch in (100, 150, 225, 340, 500, 750, 1_100, 1_700, 2_500, 3_700, 5_600, 8_400)
    ]
    found = noise_frontier.solve_noise_multipliers(runs, GOAL.target)
    assert [each.run.batch_size for each in found] == [each.batch_size for each in runs]
    assert evaluations <= 2.5 * len(runs)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_wrong_prediction_costs_evaluations_and_no_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = DpSgd(1.0, dataset_size=60_000, batch_size=600, steps=1_000)
    least = solver.noise_multiplier(run, GOAL.target).value
    predict = noise_frontier._FrontierSearch._predict
    for factor in (0.05, 0.7, 1.3, 30.0):
        # private: predictions are too good to be wrong by so much
        monkeypatch.setattr(
            noise_frontier._FrontierSearch,
            "_predict",
            lambda self, run, factor=factor: factor * predict(self, run),
        )
        found = noise_frontier.solve_noise_multipliers([run], GOAL.target)[0]
        assert least * (1 - 2e-6) <= found.run.noise_multiplier <= least * 1.001
        assert found.epsilon <= GOAL.epsilon


RELEASES = {
    "balls in bins": DpSgd(1.2, sample_rate=0.02, steps=500, sampling="balls_in_bins"),
    "one bin of two": DpSgd(3.0, sample_rate=0.5, steps=10, sampling="balls_in_bins"),
    "few steps": DpSgd(0.6, sample_rate=0.01, steps=100),
}


@pytest.mark.parametrize("name", RELEASES)
def test_a_single_upper_bound_lies_above_the_certified_interval_s_lower_end(name: str) -> None:
    releases = dominating_pairs(GOAL.target.question(RELEASES[name]))
    proved = certified_interval.epsilon_bounds(releases, 1e-5, 1e-4)
    for width in (0.1, 0.01, 0.001):
        for tilt in (1e-9, 0.5, 3.0, 50.0):
            found = max(
                bound_direction(releases, direction, 1e-5, proved.upper, tilt, width).epsilon
                for direction in DIRECTIONS
            )
            assert found >= proved.lower
            if tilt == 3.0:
                assert found <= proved.upper * (1 + 2 * width)
