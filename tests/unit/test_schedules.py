"""Plans whose noise, clip norm or learning rate change: each step is charged as what it is."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from training_client.lab.schedules import format_schedule, parse_schedule
from training_client.plan import AdaptiveClipping, Plan, Schedule

PLAN = Plan(dataset_size=100, sample_rate=0.1, clip_norm=2.0, noise_multiplier=4.0)


def test_pieces_hold_for_their_steps_and_the_last_one_afterwards() -> None:
    schedule = Schedule.by_steps([(2, 1.0), (3, 0.5), (1, 0.25)])
    assert [schedule.at(step) for step in range(1, 9)] == [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    assert list(schedule.divide(4)) == [(2, 1.0), (2, 0.5)]
    assert list(schedule.divide(9)) == [(2, 1.0), (3, 0.5), (4, 0.25)]
    assert list(schedule.divide(0)) == [(0, 1.0)]


@pytest.mark.parametrize(
    ("curve", "middle"), [("linear", 0.625), ("cosine", 0.625), ("exponential", 0.5)]
)
def test_curves_go_from_one_to_their_end_in_as_many_steps_as_stated(
    curve: str, middle: float
) -> None:
    for steps, levels in product((1, 7, 16, 1000), (1, 5, 1000)):
        schedule = getattr(Schedule, curve)(0.25, steps, levels)
        factors = [factor for _, factor in schedule.pieces]
        assert sum(count for count, _ in schedule.pieces) == steps
        assert len(factors) == min(steps, levels)
        assert factors[0] == 1
        assert factors == sorted(factors, reverse=True)
        if len(factors) > 1:
            assert factors[-1] == pytest.approx(0.25)
        if len(factors) % 2 and len(factors) > 1:
            assert factors[len(factors) // 2] == pytest.approx(middle)


def test_exp_decays_by_the_same_factor_after_each_epoch_and_is_charged_epoch_by_epoch() -> None:
    """Yu et al. 2019: the noise multiplier of epoch t is σ₀·e^(−kt)."""
    schedule = parse_schedule("noise_schedule", "decay:0.05:100", 250)
    assert [steps for steps, _ in schedule.pieces] == [100, 100, 50]
    assert [factor for _, factor in schedule.pieces] == pytest.approx(
        [1.0, math.exp(-0.05), math.exp(-0.1)]
    )
    charged = replace(PLAN, noise_schedule=schedule).mechanism(250)["mechanisms"]
    assert [each["noise_multiplier"] for each in charged] == pytest.approx(
        [4.0 * factor for _, factor in schedule.pieces]
    )
    for text in ("decay", "decay:0.1", "decay:x:10", "decay:0.1:0", "decay:-1:10", "decay:nan:10"):
        with pytest.raises(ValueError, match="is no schedule"):
            parse_schedule("noise_schedule", text, 10)
    with pytest.raises(ValueError, match="is not from"):
        parse_schedule("noise_schedule", "decay:20:1", 10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schedule(()),
        lambda: Schedule.by_steps([(0, 1.0)]),
        lambda: Schedule.by_steps([(1, -0.5)]),
        lambda: Schedule.by_steps([(1, math.nan)]),
        lambda: Schedule.exponential(0.0, 5),
        lambda: Schedule.linear(0.5, 0),
        lambda: replace(PLAN, noise_schedule=Schedule.linear(0.0, 4)),
        lambda: replace(PLAN, clip_schedule=Schedule.linear(0.0, 4)),
        lambda: AdaptiveClipping(0.0),
        lambda: AdaptiveClipping(math.inf),
        lambda: AdaptiveClipping(1.0, quantile=1.0),
        lambda: AdaptiveClipping(1.0, learning_rate=-1.0),
    ],
)
def test_what_no_step_could_use_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


def test_scheduled_noise_is_charged_as_the_composition_that_runs() -> None:
    plan = replace(PLAN, noise_schedule=Schedule.by_steps([(2, 1.0), (3, 0.5)]))
    parts = plan.mechanism(9)["mechanisms"]
    assert [(part["noise_multiplier"], part["steps"]) for part in parts] == [(4.0, 2), (2.0, 7)]
    assert plan.mechanism(2) == PLAN.mechanism(2)
    for step in range(1, 10):  # what is run in a step is what it is charged with
        run = plan.at(step)
        (charged,) = (part for part in parts if part["noise_multiplier"] == run.noise_multiplier)
        assert charged["sample_rate"] == run.sample_rate


def test_the_clip_norm_and_the_learning_rate_change_no_charge() -> None:
    schedule = Schedule.cosine(0.0, 10)
    plan = replace(PLAN, clip_schedule=Schedule.linear(0.5, 2), learning_rate_schedule=schedule)
    assert plan.mechanism(7) == PLAN.mechanism(7)
    assert [plan.at(step).clip_norm for step in (1, 2, 3)] == [2.0, 1.0, 1.0]
    assert plan.at(2).noise_deviation == 4.0


def test_plans_have_the_same_charged_step_if_they_charge_the_same() -> None:
    def noise(*pieces: tuple[int, float]) -> Plan:
        return replace(PLAN, noise_schedule=Schedule.by_steps(pieces))

    same = [
        PLAN,
        replace(PLAN, noise_multiplier=4),
        replace(PLAN, clip_norm=1.0, dataset_size=50, learning_rate_schedule=Schedule.linear(0, 9)),
        replace(PLAN, noise_multiplier=1.0, noise_schedule=Schedule.by_steps([(100, 4.0)])),
    ]
    assert len({plan.charged_step() for plan in same}) == 1
    assert noise((5, 2.0), (1, 1.0)).charged_step() == noise((5, 2.0), (9, 1.0)).charged_step()
    others = [
        PLAN,
        replace(PLAN, noise_multiplier=4.1),
        replace(PLAN, sample_rate=0.2),
        replace(PLAN, sampling="balls_in_bins"),
        replace(PLAN, adaptive_clipping=AdaptiveClipping(3.0)),
        noise((5, 2.0), (5, 1.0)),
        noise((6, 2.0), (5, 1.0)),
        noise((5, 2.0), (5, 1.5)),
    ]
    assert len({plan.charged_step() for plan in others}) == len(others)


def test_an_epoch_of_balls_in_bins_has_one_noise() -> None:
    plan = Plan.balls_in_bins(100, 5, clip_norm=1.0, noise_multiplier=1.0)
    even = replace(plan, noise_schedule=Schedule.by_steps([(10, 1.0), (5, 0.5)]))
    steps = [part["steps"] for part in even.mechanism(11)["mechanisms"]]
    assert steps == [10, 5]
    with pytest.raises(ValueError, match="whole epochs of 5 steps"):
        replace(plan, noise_schedule=Schedule.by_steps([(7, 1.0), (5, 0.5)]))


def test_adaptive_clipping_is_charged_for_the_sum_and_the_count() -> None:
    """Its charge is never below the exact one, and above it by rounding only."""
    for sigma, noise in product((0.3, 1.0, 7.7), (0.5, 10.0, 123.0)):
        plan = replace(PLAN, noise_multiplier=sigma, adaptive_clipping=AdaptiveClipping(noise))
        charged = Fraction(plan.mechanism(1)["noise_multiplier"])
        exact_inverse_square = 1 / Fraction(sigma) ** 2 + 1 / Fraction(noise) ** 2
        ratio = 1 / charged**2 / exact_inverse_square
        assert 1 < ratio < 1 + Fraction(1, 10**12)


def test_a_plan_is_read_from_a_checkpoint_as_it_was() -> None:
    plan = replace(
        PLAN,
        noise_schedule=Schedule.exponential(0.5, 10),
        learning_rate_schedule=Schedule.cosine(0.1, 10),
        adaptive_clipping=AdaptiveClipping(3.0),
    )
    assert Plan.from_document(asdict(plan)) == plan
    earlier = {"dataset_size": 10, "sample_rate": 0.1, "clip_norm": 1.0, "noise_multiplier": 1.0}
    assert Plan.from_document(earlier) == Plan(10, 0.1, 1.0, 1.0)


def test_the_clip_norm_moves_towards_its_quantile() -> None:
    clipping = AdaptiveClipping(1.0, quantile=0.5, learning_rate=0.2)
    assert clipping.next_factor(1.0, 0.5) == 1.0
    assert clipping.next_factor(1.0, 0.9) < 1 < clipping.next_factor(1.0, 0.1)
    assert clipping.next_factor(1e6, -100.0) == 1e6
    assert clipping.next_factor(1e-6, 100.0) == 1e-6


@pytest.mark.parametrize("curve", ["linear", "cosine", "exponential"])
def test_a_curve_in_words_is_that_curve_over_the_whole_run(curve: str) -> None:
    found = parse_schedule("noise_schedule", f"{curve}:0.25", 60)
    assert found == getattr(Schedule, curve)(0.25, 60)
    assert parse_schedule("noise_schedule", format_schedule(found), 60) == found
    epochs = parse_schedule("noise_schedule", f"{curve}:0.25", 60, steps_per_level=20)
    assert [steps for steps, _ in epochs.pieces] == [20, 20, 20]
    assert [factor for _, factor in epochs.pieces] == [
        factor for _, factor in getattr(Schedule, curve)(0.25, 3).pieces
    ]


@pytest.mark.parametrize(
    "text",
    ["", "linear", "linear:", "linear:x", "linear:nan", "linear:-1", "linear:inf", "3", "3:", ":1",
     "0:1", "-1:1", "1.5:1", "²:1", "3:1,", "3:1;4:1", "3:1e7", "3:0", "cubic:1", "exponential:0"],
)  # fmt: skip
def test_a_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no schedule|not from|ends above"):
        parse_schedule("noise_schedule", text, 10)


def test_a_charged_step_names_what_decides_the_cost_of_every_step() -> None:
    """It is in checkpoints: its text must not change."""
    assert PLAN.charged_step() == (
        '{"kind": "dp_sgd", "noise_multiplier": 4.0, "sample_rate": 0.1, "sampling": "poisson", '
        '"steps": 1.0}'
    )
    assert replace(PLAN, noise_multiplier=4).charged_step() == PLAN.charged_step()
    scheduled = replace(PLAN, noise_schedule=Schedule.by_steps([(10, 1.0), (20, 0.5)]))
    parts = json.loads(scheduled.charged_step())["mechanisms"]
    assert [(part["steps"], part["noise_multiplier"]) for part in parts] == [(10, 4.0), (1, 2.0)]
    longer = replace(PLAN, noise_schedule=Schedule.by_steps([(10, 1.0), (90, 0.5)]))
    assert longer.charged_step() == scheduled.charged_step()  # the last piece holds ever after
    counting = replace(scheduled, adaptive_clipping=AdaptiveClipping(count_noise=2.0))
    first, last = json.loads(counting.charged_step())["mechanisms"]
    assert first["noise_multiplier"] == pytest.approx((1 / 16 + 1 / 4) ** -0.5)
    assert last["noise_multiplier"] == pytest.approx(2**0.5)
    bins = json.loads(Plan.balls_in_bins(100, 10, 1.0, 4.0).charged_step())
    assert (bins["sampling"], bins["steps"]) == ("balls_in_bins", 10)
    free = replace(PLAN, clip_norm=1.0, learning_rate_schedule=Schedule.linear(0.5, 4))
    assert free.charged_step() == PLAN.charged_step()
