"""Banded noise: its law, what a record moves, the batches, the charge, and what ends its memory."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from scipy import special
from torch import nn
from torch.utils.data import TensorDataset

from accountant_service.questions.functions import epsilon
from tests.support.process_groups import run_in_processes
from tests.support.stub_service import service
from training_client.budget import Budget, NoBudget
from training_client.errors import DataError, NoGuaranteeError
from training_client.lab.models import cross_entropy, mlp
from training_client.optimizers import make_optimizer, private_batches
from training_client.plan import AdaptiveClipping, BandedNoise, Plan, Schedule
from training_client.private_step.earlier_noise import EarlierNoise, rounded_coordinates
from training_client.private_step.private_sum import PrivateSum
from training_client.private_step.processes.shared_budget import share_budget
from training_client.private_step.rounded_gaussian import NoiseGrid
from training_client.private_step.sampling import (
    BallsInBinsSampler,
    CyclicPoissonSampler,
    PoissonSampler,
    sampler_for_plan,
)
from training_client.private_step.transform import Transform

SIZE = 3000  # coordinates
NOISE = BandedNoise.square_root(groups=5, bands=4)
PLAN = Plan.banded(50, 0.5, clip_norm=1.0, noise_multiplier=2.0, noise=NOISE)
C = torch.tensor(NOISE.coefficients, dtype=torch.float64)


class Run:
    """Steps whose records' gradients are given: the loss is linear in the weights."""

    def __init__(self, seed: int | None = None, plan: Plan = PLAN, make: Any = None) -> None:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = nn.Linear(SIZE, 1, bias=False, dtype=torch.float64)
        make = make or (lambda: NoBudget(plan, 10**6, "it is a test"))
        self.sum = PrivateSum(net, make(), generator)
        self.plan, self.sampler = plan, CyclicPoissonSampler(50, 0.5, plan.steps_per_charge)
        self.sum.continue_epoch(self.sampler)
        self.deviation = math.nan

    def step(self, *records: torch.Tensor) -> torch.Tensor:
        """Return what a step with these records' gradients releases, in clip norms."""
        examples = torch.stack(records) if records else torch.zeros(0, SIZE, dtype=torch.float64)
        self.sampler.draw()
        self.sum.take()
        self.sum.expect_examples(len(records))
        found = self.sum.release(
            examples, torch.zeros(len(examples), 1), lambda out, _: out.sum(1), Transform(1.0)
        )
        self.deviation = found.noise_deviation * self.plan.expected_batch_size
        return found.to_tensors()[0].flatten() * self.plan.expected_batch_size

    def steps(self, count: int) -> torch.Tensor:
        return torch.stack([self.step() for _ in range(count)])


def multiply(released: torch.Tensor) -> torch.Tensor:
    """C times what steps release: the sums of a Gaussian mechanism with independent noise."""
    rows = [sum(C[i] * released[t - i] for i in range(min(t + 1, 4))) for t in range(len(released))]
    return torch.stack([torch.as_tensor(row) for row in rows])


def unit(at: int) -> torch.Tensor:
    return nn.functional.one_hot(torch.tensor(at), SIZE).double()


def test_the_noise_of_steps_is_c_inverse_times_independent_noise() -> None:
    run = Run()
    released, deviations = torch.empty(40, SIZE, dtype=torch.float64), []
    for t in range(40):
        released[t] = run.step()
        deviations.append(run.deviation)
    drawn = multiply(released)
    assert float(drawn.std()) == pytest.approx(2.0, rel=0.01)  # σC
    for lag in (1, 2, 3, 4, 5):
        product = (drawn[lag:] * drawn[:-lag]).mean() / 4
        assert abs(float(product)) < 5 / math.sqrt(SIZE * (40 - lag))
    assert float((released[1:] * released[:-1]).mean()) < -1  # a step takes back earlier noise
    for t in (0, 1, 5, 39):
        assert float(released[t].std()) == pytest.approx(deviations[t], rel=0.06)
    assert deviations[0] == pytest.approx(2.0, rel=1e-3)
    assert float(released.sum(0).std()) < 0.6 * float(drawn.sum(0).std())  # what it is for


def test_a_record_moves_a_round_by_at_most_the_norm_of_the_coefficients() -> None:
    """Given the same noise, C times the releases differ by c⊗x, but for the rounding."""
    grid = NoiseGrid.for_sum(2.0, 1 + 1e-9, rounded_coordinates(SIZE, NOISE), 5)
    direction = torch.randn(SIZE, dtype=torch.float64)
    record = direction / direction.norm() * (1 - 1e-12)
    one, other = Run(seed=3), Run(seed=3)
    before = multiply(torch.stack([one.step(unit(7)) for _ in range(9)]))
    beside = [other.step(unit(7), *([record] if t == 2 else [])) for t in range(9)]
    moved = multiply(torch.stack(beside)) - before
    for t, row in enumerate(moved):
        share = float(C[t - 2]) if 2 <= t < 6 else 0.0
        most = (1 + 3 * 1.25) * grid.step * math.sqrt(SIZE) + 1e-9
        assert abs(float(row.norm()) - share) < most, t
    assert float(moved.norm()) == pytest.approx(NOISE.norm, rel=1e-4)


def test_the_noise_pays_for_the_rounding_of_what_is_taken_back() -> None:
    for bands in (1, 2, 4, 30):
        noise = BandedNoise.square_root(30, bands)
        assert rounded_coordinates(100, noise) >= 100 * (1 + 1.25 * math.sqrt(bands - 1)) ** 2
    assert rounded_coordinates(100, None) == 100
    plain = dataclasses.replace(PLAN, sampling="poisson", banded_noise=None, sample_rate=0.1)
    grids = [Run(plan=each).sum._noise(each, Transform(1.0)) for each in (plain, PLAN)]
    assert grids[1].deviation > grids[0].deviation


@pytest.mark.parametrize("weight", [0.3, 1.0, 1 - 2**-53])
@pytest.mark.parametrize("size", [3.0, 2.0**40 + 1, 2.0**50, 2.0**52 - 1])
def test_what_is_taken_back_moves_by_little_more_than_the_record(
    weight: float, size: float
) -> None:
    """For errors of any size; beyond the grid they are clamped, which moves nothing apart."""
    errors = size + torch.tensor([0.0, 1, 2, 3, 10, 1000], dtype=torch.float64)
    found = []
    for each in (errors, errors - 7):
        earlier = EarlierNoise(BandedNoise(2, (1.0, weight)))
        earlier.keep(0, each.clone())
        steps = torch.zeros(6, dtype=torch.float64)
        earlier.take_back(0, steps, 1)
        assert torch.equal(steps, steps.round())
        found.append(steps)
    assert float((found[0] - found[1]).abs().max()) <= weight * 7 + 1.25


@pytest.mark.parametrize("shares", [1, 3])
def test_what_processes_take_back_adds_up_exactly(shares: int) -> None:
    earlier = EarlierNoise(BandedNoise(4, (1.0, 1.0, 1.0, 1.0)))
    for _ in range(3):
        earlier.keep(0, torch.tensor([2.0**52, -(2.0**52)], dtype=torch.float64))
    steps = torch.zeros(2, dtype=torch.float64)
    earlier.take_back(0, steps, shares)
    assert 2.0**50 < float(steps[0] * shares) <= 2.0**51
    assert float(steps[1]) == -float(steps[0])


# --- what ends the memory


def correlation(before: torch.Tensor, after: torch.Tensor) -> float:
    return float((before * after).mean())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_has_no_earlier_noise(copied: Callable[[Any], Any]) -> None:
    """Two runs with the same earlier noise would both release a share of a gradient."""
    run = Run()
    last = run.steps(5)[-1]
    assert len(pickle.dumps(run.sum._earlier)) < 1000  # private: it shows nothing of its noise
    run.sum = copied(run.sum)
    run.sum.continue_epoch(run.sampler)
    assert abs(correlation(last, run.step())) < 0.5


def test_memory_lasts_as_long_as_the_groups() -> None:
    run = Run()
    last = run.steps(5)[-1]
    run.sum.continue_epoch(run.sampler)  # a further loop with the same sampler
    next_one = run.step()
    assert correlation(last, next_one) < -1
    run.sampler = CyclicPoissonSampler(50, 0.5, 5)  # a record may be in its first group
    run.sum.continue_epoch(run.sampler)  # the rest of the round is skipped
    assert run.sum.steps == 10
    new = run.step()
    assert abs(correlation(next_one, new)) < 0.5
    assert run.deviation == pytest.approx(2.0, rel=1e-3)


def test_memory_ends_where_steps_of_a_round_are_left_out() -> None:
    """Without them a record's next step would be among those that share noise with its last."""
    run = Run()
    first = run.steps(3)[0]
    run.sampler.draw()
    run.sampler.draw()
    run.sum.continue_epoch(run.sampler)
    assert abs(correlation(first, run.step())) < 0.5
    assert run.sum.steps == 6
    assert run.deviation == pytest.approx(2.0, rel=1e-3)


def test_a_sampler_that_is_exchanged_in_silence_brings_no_earlier_noise() -> None:
    """Its rounds name their groups, and the sum goes by that."""
    run = Run()
    last = run.steps(5)[-1]
    vars(run.sampler).update(_name="new", _members=[torch.arange(50)] * 5)
    assert abs(correlation(last, run.step())) < 0.5


def test_the_scale_of_the_noise_may_not_change() -> None:
    earlier = EarlierNoise(NOISE)
    earlier.begin(1, "a", NoiseGrid(1.0, 2.0))
    with pytest.raises(NoGuaranteeError, match="same clip norm and noise in each step"):
        earlier.begin(2, "a", NoiseGrid(0.5, 2.0))


# --- batches


def test_groups_take_turns_and_records_are_sampled_at_their_rate() -> None:
    records, groups, rounds = 400, 5, 300
    sampler = CyclicPoissonSampler(records, 0.25, groups, torch.Generator().manual_seed(1))
    counts, last = torch.zeros(records), torch.full((records,), -groups)
    group = torch.full((records,), -1)
    for step in range(groups * rounds):
        batch = sampler.draw()
        assert torch.equal(batch, batch.sort().values)
        assert bool((step - last[batch] >= groups).all())  # at least a round apart
        assert bool(((group[batch] == -1) | (group[batch] == step % groups)).all())
        counts[batch] += 1
        last[batch], group[batch] = step, step % groups
    assert sampler.position == 0
    sizes = torch.bincount(group, minlength=groups)
    statistic = float(((sizes - 80) ** 2 / 80).sum())
    assert 1e-4 < special.chdtrc(groups - 1, statistic) < 1 - 1e-4
    chi2 = float(((counts - 75) ** 2 / (75 * 0.75)).sum())
    assert 1e-4 < special.chdtrc(records, chi2) < 1 - 1e-4
    assert float(counts.mean()) == pytest.approx(75, abs=4 * math.sqrt(75 * 0.75 / records))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_sampler_has_groups_of_its_own(copied: Callable[[Any], Any]) -> None:
    sampler = CyclicPoissonSampler(400, 1.0, 5)
    first = sampler.draw()
    other = copied(sampler)
    assert (other.position, other.groups, other.sample_rate) == (0, 5, 1.0)
    assert not torch.equal(other.draw(), first)
    assert other.epoch.groups != sampler.epoch.groups


def test_each_draw_has_a_key_of_its_own() -> None:
    sampler = CyclicPoissonSampler(1000, 0.5, 1)
    assert not torch.equal(sampler.draw(), sampler.draw())


@pytest.mark.parametrize(
    "other",
    [
        PoissonSampler(50, 0.5),
        CyclicPoissonSampler(50, 0.25, 5),
        CyclicPoissonSampler(50, 0.5, 4),
    ],
)
def test_another_sampler_than_is_charged_is_refused(other: Any) -> None:
    with pytest.raises(DataError, match="charged for"):
        sampler_for_plan(PLAN, 50, other)
    assert sampler_for_plan(PLAN, 50).sampling == "cyclic_poisson"


# --- plan and charge


@pytest.mark.parametrize("steps", [1, 5, 6, 200])
def test_a_run_costs_what_the_whole_matrix_costs(steps: int) -> None:
    mechanism = PLAN.mechanism(steps)
    assert mechanism["count"] == math.ceil(steps / 5)
    whole = mechanism["mechanism"] | {"steps": 5 * mechanism["count"]}
    assert epsilon(1e-5, mechanism=mechanism).epsilon == epsilon(1e-5, mechanism=whole).epsilon
    poisson = {"kind": "dp_sgd", "noise_multiplier": 2 / NOISE.norm, "sample_rate": 0.5}
    charged = epsilon(1e-5, mechanism=poisson | {"steps": mechanism["count"]}).epsilon
    assert charged == pytest.approx(epsilon(1e-5, mechanism=mechanism).epsilon, rel=1e-9)


def target(asked: list[Any] | None = None, batch_size: int = 10, **more: Any) -> Plan:
    """Return the plan of four epochs, of a service that always finds σ = 1.5."""

    def answer(path: str, body: dict[str, Any]) -> Any:
        if asked is not None:
            asked.append(body)
        return httpx.Response(
            200,
            json={
                "noise_multiplier": 1.5,
                "guarantee": {"epsilon": 2.0, "delta": 1e-5, "method": "pld", "status": "proven"},
            },
        )

    return Plan.for_target(
        service(answer), 2.0, 1e-5, epochs=4, batch_size=batch_size, dataset_size=1000,
        clip_norm=1.0, banded_noise=NOISE, **more,
    )  # fmt: skip


def test_the_target_s_noise_is_that_of_the_rounds() -> None:
    asked: list[Any] = []
    plan = target(asked)
    assert (plan.sample_rate, plan.expected_batch_size) == (0.05, 10)
    assert plan.steps_in(4) == 400
    assert (asked[0]["steps"], asked[0]["sample_rate"]) == (80, 0.05)
    assert 1.5 <= plan.noise_multiplier / math.hypot(*NOISE.coefficients) <= 1.5 * (1 + 1e-13)


def test_a_plan_is_stored_and_read() -> None:
    document = json.loads(json.dumps(dataclasses.asdict(PLAN)))
    assert Plan.from_document(document) == PLAN
    assert (PLAN.expected_batch_size, PLAN.steps_per_charge, PLAN.whole_charges(6)) == (5, 5, 10)
    assert NOISE.coefficients == (1.0, 0.5, 0.375, 0.3125)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: BandedNoise(2, (1.0, 0.5, 0.3)), "at least as many groups"),
        (lambda: BandedNoise(5.5, (1.0,)), "a whole number of groups"),  # type: ignore[arg-type]
        (lambda: BandedNoise(2, (0.5,)), "begin with 1"),
        (lambda: BandedNoise(2, ()), "begin with 1"),
        (lambda: BandedNoise(2, (1.0, math.nan)), "not negative"),
        (lambda: BandedNoise(2, (1.0, -0.1)), "not negative"),
        (lambda: BandedNoise(4, (1.0, 0.0, 1.0, 1.0)), "do not increase"),  # noise without end
        (lambda: target(sampling="balls_in_bins"), "banded noise has sampling cyclic_poisson"),
        (lambda: target(batch_size=201), "batch_size ≤ dataset_size/5"),
        (lambda: BandedNoise(0, (1.0,)), "at least as many groups"),
        (lambda: BandedNoise.square_root(3, 4), "at least as many groups"),
        (lambda: dataclasses.replace(PLAN, sampling="poisson"), "expected sampling cyclic_poisson"),
        (lambda: dataclasses.replace(PLAN, banded_noise=None), "expected sampling poisson or"),
        (lambda: dataclasses.replace(PLAN, clip_schedule=Schedule.linear(0.5, 9)), "leave out"),
        (lambda: dataclasses.replace(PLAN, noise_schedule=Schedule.linear(2, 9)), "leave out"),
        (lambda: dataclasses.replace(PLAN, adaptive_clipping=AdaptiveClipping(9.0)), "leave out"),
    ],
)  # fmt: skip
def test_plans_that_cannot_be_charged_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


# --- processes, optimizers


def of_two(rank: int) -> torch.Tensor:
    """Return what 20 steps of two processes release; one has a record in the third."""
    run = Run(make=lambda: share_budget(lambda: NoBudget(PLAN, 100, "it is a test")))
    found = []
    for t in range(20):
        mine = [50 * unit(3)] if rank == 1 and t == 2 else []
        found.append(run.step(*mine))
    return torch.stack(found)


@pytest.mark.slow
def test_processes_take_back_the_noise_of_one(tmp_path: Path) -> None:
    one, other = run_in_processes(2, tmp_path, of_two)
    assert isinstance(one, torch.Tensor), one
    assert torch.equal(one, other)
    drawn = multiply(one)
    drawn[2:6, 3] -= C
    assert float(drawn.std()) == pytest.approx(2.0, rel=0.02)


def claimed(plan: Plan = PLAN) -> Budget:
    """Return a budget with a claim, of a service that allows any number of steps."""

    def answer(path: str, body: dict[str, Any]) -> Any:
        proven = {"epsilon": 1.0, "delta": 1e-5, "method": "pld", "status": "proven"}
        return httpx.Response(200, json=proven)

    return Budget(service(answer), plan, 2.0, 1e-5, steps=40)


def made(plan: Plan = PLAN) -> Any:
    return make_optimizer("dp_sgd", mlp(5, 8, 2), claimed(plan))


POISSON = dataclasses.replace(PLAN, sampling="poisson", banded_noise=None)
BINS = Plan.balls_in_bins(50, 5, clip_norm=1.0, noise_multiplier=2.0)


@pytest.mark.parametrize(
    ("plan", "other"),
    [
        (PLAN, CyclicPoissonSampler(50, 1.0, 5)),
        (PLAN, BallsInBinsSampler(50, 5)),
        (PLAN, PoissonSampler(50, 0.5)),
        (POISSON, PoissonSampler(50, 1.0)),
        (BINS, CyclicPoissonSampler(50, 1.0, 5)),
    ],
)
def test_a_sampler_that_is_continued_must_draw_what_is_charged(plan: Plan, other: Any) -> None:
    """A sampler of a larger rate would make batches that cost more than is charged."""
    optimizer = made(plan)
    optimizer.continue_epoch(other)
    with pytest.raises(DataError, match="charged for"):
        optimizer.draw(other)
    fitting = sampler_for_plan(plan, 50)
    optimizer.draw(fitting)
    fitting.sample_rate = 1.0
    with pytest.raises(DataError, match="charged for"):
        made(plan).draw(fitting)


@pytest.mark.parametrize("plan", [PLAN, POISSON, BINS])
def test_a_claim_needs_batches_that_nobody_can_draw_again(plan: Plan) -> None:
    fitting = sampler_for_plan(plan, 50)
    vars(fitting)["_generator"] = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(50, 5), torch.arange(50) % 2)
    with pytest.raises(NoGuaranteeError, match="anyone who knows its seed"):
        made(plan).draw(fitting)
    with pytest.raises(NoGuaranteeError, match="anyone who knows its seed"):
        next(private_batches(made(plan), data, sampler=fitting))


def test_with_a_claim_each_step_needs_records_drawn_for_it() -> None:
    """Two optimizers that use one draw have one coin for two charges."""
    sampler, data = CyclicPoissonSampler(50, 0.5, 5), (torch.randn(50, 5), torch.arange(50) % 2)
    one, other = made(), made()
    for each in (one, other):
        each.continue_epoch(sampler)
    rows = one.draw(sampler)
    one.step(data[0][rows], data[1][rows], cross_entropy)
    with pytest.raises(NoGuaranteeError, match="no batch was drawn for step 1"):
        other.step(data[0][rows], data[1][rows], cross_entropy)
    other.draw(sampler)
    with pytest.raises(NoGuaranteeError, match="drew 2 batches"):
        other.step(data[0][rows], data[1][rows], cross_entropy)


def test_what_is_taken_back_cannot_be_replaced_under_a_claim() -> None:
    optimizer = made()
    with pytest.raises(NoGuaranteeError):
        optimizer.private_sum._earlier = None  # private: the attack


@pytest.mark.parametrize("name", ["dp_sgd", "dp_adam"])
def test_a_run_ends_with_its_rounds_and_trains(name: str) -> None:
    optimizer = make_optimizer(name, mlp(5, 8, 2), NoBudget(PLAN, 23, "it is a test"))
    data = TensorDataset(torch.randn(50, 5), torch.arange(50) % 2)
    for examples, labels in private_batches(optimizer, data):
        optimizer.step(examples, labels, cross_entropy)
    assert optimizer.steps_made == 23
    assert all(bool(each.isfinite().all()) for each in optimizer.parameters)
