"""Two processes that train together; each appends what it asked and made to a file of its own.

    python two_ranks.py FOLDER

The service answers here, in place of one over HTTP: a step costs ε = 0.1, and 1.25 is allowed.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import httpx
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from training_client.budget import Budget, NoBudget
from training_client.client import AccountingService
from training_client.errors import BudgetExhaustedError, NoGuaranteeError
from training_client.integrations.opacus import accountant as integration
from training_client.optimizers import make_optimizer
from training_client.plan import Plan

warnings.simplefilter("ignore")

from opacus import PrivacyEngine  # noqa: E402
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel  # noqa: E402

from training_client.integrations.opacus.step_gate import StepGate  # noqa: E402

FOLDER = Path(sys.argv[1])
CHILD = os.fork()  # after the imports, which take seconds
RANK = int(CHILD == 0)


def say(what: str) -> None:
    with (FOLDER / f"rank{RANK}.txt").open("a") as file:
        file.write(what + "\n")


def answer(request: httpx.Request) -> httpx.Response:
    steps = json.loads(request.content).get("mechanism", {"steps": 12})["steps"]
    say(f"asked {steps}")
    claim = {"epsilon": 0.1 * steps, "delta": 1e-5, "method": "pld", "status": "proven"}
    return httpx.Response(200, json=claim | {"steps": 12, "guarantee": claim})


def train() -> None:
    data = TensorDataset(torch.randn(400, 6), torch.randint(0, 2, (400,)))
    net = DifferentiallyPrivateDistributedDataParallel(nn.Linear(6, 2))
    model, optimizer, loader = PrivacyEngine(accountant="remote").make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=100),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for _ in range(20):
        for examples, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(examples), targets).backward()
            before = [each.detach().clone() for each in net.parameters()]
            try:
                optimizer.step()
            except BudgetExhaustedError:
                same = all(map(torch.equal, before, net.parameters()))
                say(f"refused, untouched {same}, weights {net.module.weight.sum():.6f}")
                return
            say("made")


def ask_at_the_gate() -> None:
    service = AccountingService("http://test", transport=httpx.MockTransport(answer))
    gate = StepGate(Budget(service, Plan(400, 0.25, 1.0, 1.0), 1.25, 1e-5, block=10))
    for gate.steps in (0, 11, 12):
        try:
            gate.permit_step()
            say(f"step {gate.steps + 1} allowed")
        except BudgetExhaustedError as error:
            say(f"step {gate.steps + 1} refused: {error}")


def train_natively() -> None:
    """The engine here would make a run in each of the processes."""
    budget = NoBudget(Plan(400, 0.25, 1.0, 1.0), 1, "it is a test")
    try:
        make_optimizer("dp_sgd", nn.Linear(6, 2), budget)
    except NoGuaranteeError as error:
        say(f"natively: {error}")


integration.connect(epsilon=1.25, block=10, transport=httpx.MockTransport(answer))
distributed.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", rank=RANK, world_size=2)
try:
    train()
    say("at the gate")
    ask_at_the_gate()
    train_natively()
finally:
    distributed.destroy_process_group()
if CHILD:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(CHILD, 0)[1]))
