"""Processes that share a budget make one run: the same model, one charge, each record at rate q."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.special import chdtrc
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.cuda_streams import DEVICE, stub_cuda
from tests.support.process_groups import run_in_processes
from tests.support.shared_runs import (
    CASES,
    RECORDS,
    Model,
    Records,
    message_of,
    no_claim,
    require_model_of_one,
    seeded,
    step_with,
    trained,
    with_frozen_parts,
)
from tests.support.stub_service import linear_accountant, service
from training_client.budget import Allowance, Budget
from training_client.errors import (
    BudgetExhaustedError,
    DataError,
    NoGuaranteeError,
    ProcessLostError,
    TrainingStoppedError,
)
from training_client.lab.models import cross_entropy
from training_client.optimizers import make_optimizer, private_batches
from training_client.optimizers.private_batches import _DrawnIndices
from training_client.plan import Plan
from training_client.private_step.processes.shared_budget import SharedBudget, share_budget
from training_client.private_step.rounded_gaussian import NoiseGrid
from training_client.private_step.sampling import PoissonSampler


def trained_in_turn(rank: int) -> Any:
    return [trained(rank, case) for case in CASES] + [
        trained(rank, CASES[0], DistributedDataParallel)
    ]


def require_models_of_one(found: list[Any]) -> None:
    """Each process must have the models that one process makes of the same samples and noise."""
    assert all(isinstance(each, list) for each in found), found
    for number, case in enumerate([*CASES, CASES[0]]):
        require_model_of_one([rank[number] for rank in found], case)


# --- one budget


def stub_budget() -> Budget:
    """Return a budget of 20 steps."""
    plan = Plan(dataset_size=RECORDS, sample_rate=0.1, clip_norm=1.0, noise_multiplier=1.0)
    return Budget(service(linear_accountant), plan, epsilon=2.0, delta=1e-5, block=7)


def asked_once(rank: int) -> Any:
    """Train until the budget ends; return the steps made, its state and the calls to make it.

    Each batch is copied ahead, as to a device of CUDA.
    """
    calls: list[int] = []

    def make() -> Allowance:
        calls.append(rank)
        return stub_budget()

    budget = share_budget(make)
    optimizer = make_optimizer("dp_sgd", Model(1), budget)
    with pytest.MonkeyPatch.context() as patch:
        stub_cuda(patch)
        for batch in private_batches(optimizer, Records(), device=DEVICE):
            step_with(optimizer, batch)
    with pytest.raises(BudgetExhaustedError, match="20 steps fit"):
        optimizer.take()
    claim = budget.guarantee(optimizer.steps_made)
    return optimizer.steps_made, budget.taken, budget.spent, claim.epsilon, calls


def refused(rank: int) -> list[str]:
    """Return the messages of what is refused, as this process sees them."""
    ways = (unshared, drawn_alone, raw, shared_twice, other_bound, other_model, failed_share)
    return [message_of(way, rank) for way in ways]


def unshared(rank: int) -> None:
    make_optimizer("dp_sgd", Model(1), no_claim())


def drawn_alone(rank: int) -> None:
    optimizer = make_optimizer("dp_sgd", Model(1), share_budget(no_claim))
    optimizer.step(torch.zeros(3, 6), torch.zeros(3, dtype=torch.int64), cross_entropy)


def raw(rank: int) -> None:
    make_optimizer("adadp", Model(1), share_budget(no_claim), state="raw")


def shared_twice(rank: int) -> None:
    share_budget(lambda: SharedBudget(no_claim))


def other_bound(rank: int) -> None:
    """Clip to another bound in the second process, as an optimizer made otherwise would."""
    optimizer = make_optimizer("dp_sgd", Model(1), share_budget(no_claim))
    object.__setattr__(optimizer.allowance, "plan", Plan(RECORDS, 0.5, 0.5 + rank, 1.0))
    for batch in private_batches(optimizer, Records()):
        step_with(optimizer, batch)


def other_model(rank: int) -> None:
    """Change the parameters of one process after the optimizer was made."""
    net = Model(1)
    optimizer = make_optimizer("dp_sgd", net, share_budget(no_claim))
    with torch.no_grad():
        net.layers[0].weight.add_(0.1 * rank)
    for batch in private_batches(optimizer, Records()):
        step_with(optimizer, batch)


def failed_share(rank: int) -> None:
    """Leave out an example in the second process."""
    optimizer = make_optimizer("dp_sgd", Model(1), share_budget(no_claim))
    for batch in private_batches(optimizer, Records()):
        step_with(optimizer, {name: each[rank:] for name, each in batch.items()})


def late(rank: int) -> list[str]:
    """Let rank 0 wait for longer than the timeout of the group."""
    import time

    budget = share_budget(no_claim)
    try:
        budget.run(lambda _: time.sleep(3))
        distributed.barrier()
    except (TrainingStoppedError, RuntimeError) as error:
        again = message_of(lambda _: budget.take(1), rank)
        return [f"{type(error).__name__}: {error}", again]
    return ["nothing"]


def of_two(rank: int) -> Any:
    frozen = trained(rank, CASES[0], with_frozen_parts)
    return asked_once(rank), refused(rank), frozen


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what two processes were allowed and refused, and a partly frozen model."""
    found = run_in_processes(2, tmp_path_factory.mktemp("two"), of_two)
    return list(zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_processes_train_the_model_of_one(processes: int, tmp_path: Path) -> None:
    """With every optimizer, and with every option of the plan and the clipping."""
    require_models_of_one(run_in_processes(processes, tmp_path, trained_in_turn))


@pytest.mark.slow
def test_frozen_parameters_and_buffers_are_those_of_rank_zero(two: Any) -> None:
    """Each process drew its own; the trained layers are those of one process only if they agree."""
    require_model_of_one(two[2], CASES[0], with_frozen_parts)


@pytest.mark.slow
def test_rank_zero_asks_and_all_obey(two: Any) -> None:
    first, second = two[0]
    assert first == (20, 20, 2.0, 2.0, [0])
    assert second == (20, 20, 2.0, 2.0, [])


@pytest.mark.slow
def test_what_would_be_more_than_one_run_is_refused(two: Any) -> None:
    first, second = two[1]
    for seen in (first, second):
        assert seen[0].startswith("NoGuaranteeError: 2 processes train")
        assert "share_budget" in seen[0]
        assert seen[1].startswith("NoGuaranteeError: no batch was drawn for step 1")
        assert "which no theorem covers" in seen[2]
        assert "rank 0 alone calls this function" in seen[3]
        assert "do not make the same step" in seen[4]
        assert "process 1: step 1, bound 1.5" in seen[4]
        assert "parameters differ" in seen[5]
    assert first[6].startswith("ProcessLostError: step 1 is not made: process 1 failed")
    assert second[6].startswith("DataError: ")
    assert "records were drawn, and the batch has" in second[6]


@pytest.mark.slow
def test_an_answer_that_comes_too_late_ends_the_run(tmp_path: Path) -> None:
    _, second = run_in_processes(2, tmp_path, late, timeout=1)
    assert all(each.startswith("ProcessLostError: a process that trains") for each in second)
    assert "timeout of init_process_group" in second[0]
    assert "patience_seconds" in second[0]


def test_a_shared_budget_of_one_process_is_an_ordinary_one() -> None:
    optimizer = make_optimizer("dp_sgd", Model(1), share_budget(stub_budget))
    examples = torch.zeros(3, 6)
    optimizer.expect_examples(3)
    optimizer.step({"input": examples}, torch.zeros(3, dtype=torch.int64), cross_entropy)
    assert optimizer.allowance.taken == 1


def test_a_shared_budget_is_not_shared_again() -> None:
    with pytest.raises(NoGuaranteeError, match="shared already"):
        share_budget(lambda: share_budget(no_claim))


def test_processes_that_did_not_join_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make_optimizer("dp_sgd", Model(1), share_budget(no_claim))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NoGuaranteeError, match="2 processes train"):
        optimizer.take()
    with pytest.raises(NoGuaranteeError, match="2 processes train"):
        make_optimizer("dp_sgd", Model(1), share_budget(no_claim))


def test_errors_are_what_their_names_say() -> None:
    assert issubclass(ProcessLostError, TrainingStoppedError)
    assert not issubclass(ProcessLostError, DataError)


# --- each record at rate q


def require_rate(counts: torch.Tensor, rate: float, smallest_p: float) -> None:
    """Raise unless records are drawn at a rate, independently of each other.

    Two chi-square tests: of each record's draws, and of the pairs of records. Each of them raises a
    false alarm with probability `smallest_p`.

    Args:
        counts: how often each record was drawn in each step, one row per step.
        rate: the rate that is charged.
        smallest_p: of a test that passes.
    """
    steps, records = counts.shape
    assert counts.max() == 1  # no record is in two shares
    squares = (counts.sum(0) - rate * steps) ** 2 / (steps * rate * (1 - rate))
    assert chdtrc(records, float(squares.sum())) > smallest_p
    centred = counts - rate
    correlations = (centred.T @ centred / (steps * rate * (1 - rate))).triu(1)
    pairs = records * (records - 1) // 2
    assert chdtrc(pairs, float((correlations**2).sum() * steps)) > smallest_p


@pytest.mark.spread(second=1)
@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.slow
def test_processes_draw_each_record_at_the_rate_that_is_charged(processes: int) -> None:
    """The rates of records, and of pairs of records of different processes, with fixed seeds."""
    records, rate, steps = 30, 0.3, 4000
    counts = torch.zeros(steps, records, dtype=torch.float64)
    for rank in range(processes):
        sampler = PoissonSampler(records, rate, seeded(rank))
        drawn = iter(_DrawnIndices(sampler, (rank, processes)))
        for step in range(steps):
            counts[step, next(drawn)] += 1
    require_rate(counts, rate, 1e-3)


# --- seeds of the operating system

RANDOM = Plan(dataset_size=RECORDS, sample_rate=0.25, clip_norm=3.0, noise_multiplier=1.5)
DRAWS = 300  # enough to notice a rate that is 15 % off


def drawn_indices(_: int) -> list[list[int]]:
    """Return the indices that `private_batches` gives this process in each of many light steps."""
    budget = share_budget(lambda: no_claim(RANDOM, DRAWS))
    optimizer, found = make_optimizer("dp_sgd", nn.Linear(6, 4), budget), []
    for batch in private_batches(optimizer, Records()):
        found.append(batch["index"].tolist())
        step_with(optimizer, batch)
    return found


def noise_of_empty_batches(_: int) -> tuple[list[torch.Tensor], int]:
    """Return the means of two empty batches, and how often this process drew noise for them."""
    draws, genuine = 0, NoiseGrid.draw_like

    def draw(*of: Any) -> torch.Tensor:
        nonlocal draws
        draws += 1
        return genuine(*of)

    optimizer = make_optimizer(
        "dp_sgd", nn.Linear(400, 250), share_budget(lambda: no_claim(RANDOM))
    )
    empty = torch.zeros(0, 400), torch.zeros(0, dtype=torch.int64)
    means = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseGrid, "draw_like", draw)
        for _step in range(2):
            optimizer.take()
            optimizer.expect_examples(0)
            released = optimizer.private_sum.release(*empty, cross_entropy, optimizer.transform())
            means.append(torch.cat([each.flatten() for each in released.to_tensors()]))
    return means, draws


def random_numbers(rank: int) -> Any:
    return drawn_indices(rank), noise_of_empty_batches(rank)


@pytest.fixture(
    scope="module",
    params=[pytest.param(2, marks=pytest.mark.nightly), pytest.param(4, marks=pytest.mark.slow)],
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the random numbers of two and of four processes, whose seeds are not chosen."""
    size: int = request.param
    return run_in_processes(size, tmp_path_factory.mktemp("random"), random_numbers)


def test_real_processes_draw_each_record_at_the_rate_that_is_charged(ranks: list[Any]) -> None:
    """Both chi-square tests together raise a false alarm once in some hundred million runs."""
    counts = torch.zeros(DRAWS, RECORDS, dtype=torch.float64)
    for rank, (indices, _) in enumerate(ranks):
        assert len(indices) == DRAWS
        for step, own in enumerate(indices):
            assert all(index % len(ranks) == rank for index in own)
            counts[step, own] += 1
    require_rate(counts, RANDOM.sample_rate, 1e-9)


def test_all_processes_get_the_one_noise_that_rank_zero_drew(ranks: list[Any]) -> None:
    """Noise has the stated deviation to 2 %, which is nine standard errors.

    A mean of independent noise of every process would have less, and their sum more.
    """
    stated = RANDOM.noise_multiplier * RANDOM.clip_norm / (RANDOM.sample_rate * RECORDS)
    first, draws = ranks[0][1]
    assert draws > 0
    assert not torch.equal(*first)
    for mean in first:
        assert float(mean.std()) == pytest.approx(stated, rel=0.02)
        assert abs(float(mean.mean())) < 0.03 * stated
    for _, (means, others) in ranks[1:]:
        assert others == 0
        assert all(map(torch.equal, means, first))


_ENDS_A_GROUP = """
from pathlib import Path
import torch
from torch import distributed
import training_client.optimizers

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
torch.optim.Adam([torch.zeros(3, requires_grad=True)])
distributed.all_reduce(torch.ones(3))
distributed.destroy_process_group()
print(*[(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()])
"""


@pytest.mark.slow
def test_a_destroyed_process_group_leaves_no_threads_that_abort_python_at_its_end() -> None:
    threads = subprocess.check_output([sys.executable, "-c", _ENDS_A_GROUP], text=True)
    assert "gloo" not in threads
