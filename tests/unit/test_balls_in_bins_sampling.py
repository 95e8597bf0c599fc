"""Balls in bins: the law of the batches, and that epochs are charged and begun as a whole."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from scipy import special

from tests.support.stub_service import linear_accountant, service, tiny_data
from training_client.budget import Budget, LedgerBudget, NoBudget
from training_client.client import Reservation
from training_client.errors import BudgetExhaustedError, DataError, NoGuaranteeError
from training_client.lab import train as training
from training_client.lab.models import mlp
from training_client.optimizers import OPTIMIZERS, make_optimizer
from training_client.plan import Plan
from training_client.private_step import sampling
from training_client.private_step.sampling import BallsInBinsSampler, PoissonSampler

BINS = 10
PLAN = Plan.balls_in_bins(100, BINS, clip_norm=1.0, noise_multiplier=1.0)


def seeded(dataset_size: int, bins: int, seed: int = 3) -> BallsInBinsSampler:
    return BallsInBinsSampler(dataset_size, bins, torch.Generator().manual_seed(seed))


def bins_of(sampler: BallsInBinsSampler) -> torch.Tensor:
    """Draw an epoch: the bin of each record."""
    found = torch.full((sampler.dataset_size,), -1)
    for at in range(sampler.bins):
        batch = sampler.draw()
        assert bool((found[batch] == -1).all())
        assert torch.equal(batch, batch.sort().values)
        found[batch] = at
    assert bool((found >= 0).all())  # each record is in one batch
    return found


def require_uniform(cells: torch.Tensor, values: int) -> None:
    """A chi-square test of equally likely cells."""
    counts = torch.bincount(cells, minlength=values)
    expected = len(cells) / values
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert 1e-4 < special.chdtrc(values - 1, statistic) < 1 - 1e-4


def test_records_are_put_into_bins_uniformly_and_independently_of_each_other_and_of_the_past() -> (
    None
):
    sampler, bins = seeded(30, 4), 4
    epochs = torch.stack([bins_of(sampler) for _ in range(2000)])
    require_uniform(epochs.flatten(), bins)
    require_uniform(epochs[:, 3], bins)
    for one, other in ((0, 1), (7, 22)):  # of two records
        require_uniform(bins * epochs[:, one] + epochs[:, other], bins**2)
    require_uniform((bins * epochs[:-1] + epochs[1:]).flatten(), bins**2)  # of two epochs
    sizes = (epochs == 0).sum(1).double()
    assert float(sizes.mean()) == pytest.approx(30 / 4, rel=0.03)
    assert float(sizes.var()) == pytest.approx(30 / 4 * 3 / 4, rel=0.15)


def test_no_bin_is_favoured_by_a_remainder(monkeypatch: pytest.MonkeyPatch) -> None:
    """2⁶⁴ is 6 more than a multiple of 10: the six greatest words are drawn again."""
    most, words = 2**64 - 1, [2**64 - 6, 7, 2**64 - 7, 2**64 - 1, 2**64 - 2, 12, 2**64 - 3, 25]
    monkeypatch.setattr(
        sampling,
        "read_keystream",
        lambda *of: np.array([words.pop(0) for _ in range(of[2])], np.uint64),
    )
    assert bins_of(seeded(4, 10)).tolist() == [5, 7, (most - 6) % 10, 2]
    assert words == []


def test_batches_may_be_empty_or_the_whole_dataset() -> None:
    sizes = [len(sampler.draw()) for sampler in [seeded(3, 50)] for _ in range(50)]
    assert (sum(sizes), min(sizes)) == (3, 0)
    everything = seeded(5, 1)
    assert all(everything.draw().tolist() == [0, 1, 2, 3, 4] for _ in range(3))
    assert everything.position == 0


def test_an_epoch_goes_on_where_its_state_was_saved() -> None:
    one, file = seeded(40, 8), io.BytesIO()
    used = torch.cat([one.draw() for _ in range(3)])
    torch.save(one.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert not set(torch.cat(state["left"]).tolist()) & set(used.tolist())
    other = seeded(40, 8, seed=4)
    other.load_state_dict(state)
    assert other.position == 3
    assert all(torch.equal(one.draw(), other.draw()) for _ in range(5))
    assert not all(torch.equal(one.draw(), other.draw()) for _ in range(8))  # another epoch
    other.load_state_dict(seeded(40, 8).state_dict())
    assert other.position == 0
    with pytest.raises(DataError, match=r"40 records in 8 batches.*40 records in 9"):
        seeded(40, 9).load_state_dict(state)


def test_copies_do_not_share_an_epoch() -> None:
    """A batch of which two noisy sums are released costs more than is charged."""
    sampler = BallsInBinsSampler(1000, 2)
    sampler.draw()
    copied = copy.deepcopy(sampler)
    assert copied.position == 0
    assert not torch.equal(bins_of(copied), bins_of(copy.copy(sampler)))


@pytest.mark.parametrize(
    "wrong", [{"sample_rate": 0.3}, {"sample_rate": 0.30000001}, {"sampling": "shuffled"}]
)
def test_a_plan_has_whole_epochs_of_a_known_sampling(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sample_rate = 1/b|expected sampling"):
        replace(PLAN, **wrong)


def test_a_plan_charges_whole_epochs() -> None:
    assert [PLAN.mechanism(steps)["steps"] for steps in (1, 10, 11)] == [10, 10, 20]
    assert PLAN.mechanism(5)["sampling"] == "balls_in_bins"
    for bins in (3, 49, 60_000, 10**6):  # 1/b is rounded
        assert Plan.balls_in_bins(100, bins, 1.0, 1.0).steps_per_charge == bins
    assert replace(PLAN, sampling="poisson").whole_charges(11) == 11


# --- budgets


def recorded(asked: list[Any], of: Any = linear_accountant) -> Any:
    def answer(path: str, body: Any) -> httpx.Response:
        asked.append((path, body))
        return of(path, body)

    return service(answer)


@pytest.mark.parametrize(("steps", "fits"), [(None, 20), (30, 20), (20, 20), (15, 15)])
def test_a_budget_allows_whole_epochs(steps: int | None, fits: int) -> None:
    asked: list[Any] = []
    budget = Budget(recorded(asked), PLAN, epsilon=2.5, delta=1e-5, block=3, steps=steps)
    for step in range(1, fits + 1):
        budget.take(step)
        assert budget.allowed >= min(fits, PLAN.whole_charges(step))  # before its first batch
    with pytest.raises(BudgetExhaustedError):
        budget.take(fits + 1)
    assert budget.guarantee(fits).document["mechanism"]["steps"] == 20
    assert {body["mechanism"]["steps"] % BINS for _, body in asked} == {0}
    assert len(asked) < 8


def granting(path: str, body: dict[str, Any]) -> httpx.Response:
    """A ledger that counts epochs: four are reserved, and each costs ε = 1."""
    if path == "/v1/curve":
        curve = {"method": "pld", "status": "proven", "epsilon": [1.0, 2.0, 3.0, 4.0]}
        return httpx.Response(200, json={"steps": [1, 2, 3, 4], "curves": [curve]})
    if not path.endswith("/grants"):
        return linear_accountant(path, body)
    granted = {"steps_reserved": 4, "steps_granted": body["sequence"] + body["steps"]}
    return httpx.Response(200, json={"id": "r", "state": "open"} | granted)


def reserved(asked: list[Any], block: int = 3, granted: int = 0) -> LedgerBudget:
    held = Reservation("r", "open", 4, granted, PLAN.mechanism(40))
    accounting = recorded(asked, granting)
    return LedgerBudget(accounting, PLAN, "d", 1e-5, held, block=block, block_max=block)


@pytest.mark.parametrize(("block", "epochs"), [(1, 1), (10, 1), (11, 2), (1000, 4)])
def test_a_ledger_grants_epochs_before_their_first_batch(block: int, epochs: int) -> None:
    asked: list[Any] = []
    budget = reserved(asked, block)
    budget.allow(1)
    grants = [body for path, body in asked if path.endswith("/grants")]
    assert grants == [{"steps": epochs, "sequence": 0}]
    assert (budget.made, budget.spent, budget.reserved) == (BINS * epochs, epochs, 40)
    for step in range(1, 41):
        budget.take(step)
    with pytest.raises(BudgetExhaustedError, match="all 40 steps"):
        budget.take(41)
    assert budget.guarantee(33).document["steps_planned"] == 40


# --- runs


def run(
    allowance: Any, steps: int | None, optimizer: Any = None, sampler: Any = None, **options: Any
) -> Any:
    data = tiny_data()
    optimizer = optimizer or make_optimizer("dp_sgd", mlp(5, 8, 2), allowance, **options)
    net = mlp(5, 8, 2)
    training.train(net, data, optimizer, steps_max=steps, sampler=sampler)
    return optimizer


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every batch that is drawn."""
    found: list[torch.Tensor] = []
    genuine: Callable[[BallsInBinsSampler], torch.Tensor] = BallsInBinsSampler.draw

    def draw(sampler: BallsInBinsSampler) -> torch.Tensor:
        found.append(genuine(sampler))
        return found[-1]

    monkeypatch.setattr(BallsInBinsSampler, "draw", draw)
    return found


@pytest.mark.slow
def test_a_run_uses_each_record_once_an_epoch(drawn: list[torch.Tensor]) -> None:
    run(reserved([]), None)
    assert len(drawn) == 40
    for at in range(0, 40, BINS):
        assert sorted(torch.cat(drawn[at : at + BINS]).tolist()) == list(range(100))


@pytest.mark.spread(first=1)
@pytest.mark.parametrize(
    "make", [reserved, lambda _: Budget(service(linear_accountant), PLAN, 4, 1e-5)]
)
def test_what_is_left_of_an_epoch_is_not_used_after_other_bins_are_drawn(make: Any) -> None:
    """Bins that are drawn anew are another epoch, which is charged by itself."""
    allowance = make([])
    optimizer = run(allowance, 13)
    run(allowance, 25, optimizer)  # with a new sampler: the second epoch ends after three steps
    assert optimizer.steps_made == 25
    assert allowance.taken == 25
    assert make_optimizer("dp_sgd", mlp(5, 8, 2), allowance).steps_made == 30


def test_steps_follow_the_place_of_a_sampler_in_its_epoch(drawn: list[torch.Tensor]) -> None:
    sampler, allowance = BallsInBinsSampler(100, BINS), reserved([])
    optimizer = run(allowance, 13, sampler=sampler)
    run(allowance, 20, optimizer, sampler)
    assert sorted(torch.cat(drawn[10:]).tolist()) == list(range(100))
    sampler.draw()  # without a step
    with pytest.raises(NoGuaranteeError, match="drew 1 batches of its epoch, and 20 steps"):
        run(allowance, 30, optimizer, sampler)
    assert allowance.taken == optimizer.steps_made == 20


def test_a_resumed_run_begins_with_the_next_epoch(drawn: list[torch.Tensor]) -> None:
    assert run(reserved([], granted=1), None).steps_made == 40
    assert len(drawn) == 30


@pytest.mark.parametrize("other", [PoissonSampler(100, 0.1), BallsInBinsSampler(100, 11)])
def test_another_sampler_than_is_charged_is_refused(other: Any) -> None:
    with pytest.raises(DataError, match=r"charged for sample rate 0.1 \(balls_in_bins\)"):
        run(reserved([]), 5, sampler=other)
    with pytest.raises(DataError, match=r"charged for sample rate 0.1 \(poisson\)"):
        run(NoBudget(replace(PLAN, sampling="poisson"), 5, ""), 5, sampler=seeded(100, 10))


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_with_it_and_with_empty_batches(name: str) -> None:
    plan = Plan.balls_in_bins(100, 200, clip_norm=1.0, noise_multiplier=1.0)  # half are empty
    public = (torch.rand(20, 5), torch.arange(20) % 2)
    state = OPTIMIZERS[name].states[0]
    allowance = NoBudget(plan, 200, "it is a test")
    optimizer = make_optimizer(
        name, mlp(5, 8, 2), allowance, state=state, public=public if state == "public" else None
    )
    run(allowance, 20, optimizer)
    assert optimizer.steps_made == 20
    assert all(bool(each.isfinite().all()) for each in optimizer.parameters)
