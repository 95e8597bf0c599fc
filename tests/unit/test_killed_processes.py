"""One of several processes is killed at a chosen moment: no step without a charge.

Steps are charged one by one, so that a single step too many is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.helpers import nightly
from tests.support.killed_ranks import MOMENTS, Victim, append_byte, count_of, count_steps
from tests.support.process_groups import run_in_processes
from tests.support.shared_runs import PLAN, Model, Records, message_of, step_with
from tests.support.stub_service import linear_accountant, service
from training_client.budget import LedgerBudget
from training_client.optimizers import make_optimizer, private_batches, share_budget

STEPS = 5
LOST = "ProcessLostError: a process that trains with this one ended"


def charged_in(folder: Path) -> Path:
    """Return the file that has a byte for each step charged."""
    return folder / "charged"


def begun_in(folder: Path, rank: int) -> Path:
    """Return the file that has a byte for each step that a rank began."""
    return folder / f"begun-{rank}"


def ledger_budget(folder: Path) -> LedgerBudget:
    """Return the budget of a run of 5 steps; it goes on after the steps charged so far."""

    def answer(path: str, body: Any) -> httpx.Response:
        """Answer as a ledger with one reservation."""
        if not path.startswith("/v1/reservations/"):
            return linear_accountant(path, body)
        if path.endswith("/grants"):
            assert body == {"steps": 1, "sequence": count_of(charged_in(folder))}
            append_byte(charged_in(folder))
        held = {"id": "r", "state": "open", "mechanism": PLAN.mechanism(STEPS)}
        counts = {"steps_reserved": STEPS, "steps_granted": count_of(charged_in(folder))}
        return httpx.Response(200, json=held | counts)

    ledger = service(answer)
    return LedgerBudget(ledger, PLAN, "d", 1e-5, ledger.reservation("r"), block=1, block_max=1)


def replicated() -> nn.Module:
    return Model(1)


def sharded() -> nn.Module:
    net = Model(1)
    for layer in net.layers:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(net)
    return net


def train(rank: int, folder: Path, make: Callable[[], nn.Module]) -> tuple[int, str, str]:
    """Train with the steps that are not charged yet.

    Returns:
        The number of steps taken; the error that ended the training, if any did; and that of a
        further step.
    """
    count_steps(begun_in(folder, rank))
    optimizer = make_optimizer("dp_adam", make(), share_budget(partial(ledger_budget, folder)))

    def make_steps(_: int) -> None:
        """Make all steps."""
        for batch in private_batches(optimizer, Records()):
            step_with(optimizer, batch)

    end = message_of(make_steps, rank)
    made = optimizer.steps_made
    return made, end, message_of(lambda _: optimizer.allowance.take(made + 1), rank)


def train_until_killed(
    rank: int, folder: Path, make: Callable[[], nn.Module], victim: Victim
) -> tuple[int, str, str]:
    victim.watch(rank)
    return train(rank, folder, make)


def require_charged(folder: Path, size: int) -> int:
    """No process began more steps than are charged; return these."""
    charged = count_of(charged_in(folder))
    for rank in range(size):
        assert count_of(begun_in(folder, rank)) <= charged, rank
    return charged


IN_CI = ((replicated, "answer", 2, 0), (sharded, "update", 2, 1))
EVERY = [
    (make, moment, size, rank)
    for make, moment, size in product((replicated, sharded), MOMENTS, (2, 4))
    for rank in (0, size - 1)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "moment", "size", "rank"),
    [each if each in IN_CI else nightly(*each) for each in EVERY],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_no_step_is_uncharged_when_a_process_is_killed(
    make: Callable[[], nn.Module], moment: str, size: int, rank: int, tmp_path: Path
) -> None:
    for name in ("moment", "killed", "resumed"):
        (tmp_path / name).mkdir()
    victim = Victim(tmp_path / "moment", rank, moment)
    found = run_in_processes(size, tmp_path / "killed", train_until_killed, tmp_path, make, victim)
    begun = 2 if moment == "answer" else 3
    assert found.pop(rank) is None
    assert count_of(begun_in(tmp_path, rank)) == begun
    # rank 0, if it lives, is charged for the step after an update before it sees that one is lost
    charged = require_charged(tmp_path, size)
    assert charged == 3 + (moment == "update" and rank > 0)
    for steps, end, again in found:
        assert end.startswith(LOST)
        assert again.startswith(LOST)
        assert begun <= steps <= charged  # of four, some may get rank 0's answer before the loss

    resumed = run_in_processes(size, tmp_path / "resumed", train, tmp_path, make)
    assert [steps for steps, _, _ in resumed] == [STEPS] * size
    assert require_charged(tmp_path, size) == STEPS
