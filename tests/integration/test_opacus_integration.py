"""An Opacus program whose accountant is the service: nothing else is changed."""

from __future__ import annotations

import warnings
from typing import Any

import httpx
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accountant_service import calculator
from accountant_service.mechanisms import DpSgd
from training_client.errors import BudgetExhaustedError, ServiceUnreachableError
from training_client.integrations import opacus as integration

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from opacus import PrivacyEngine


def program(**private: Any) -> tuple[nn.Module, Any, DataLoader[Any], PrivacyEngine]:
    """What a user of Opacus has written already."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(400, 6), torch.randint(0, 2, (400,)))
    net = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = PrivacyEngine(accountant="remote")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = (
            engine.make_private_with_epsilon if "target_epsilon" in private else engine.make_private
        )
        model, optimizer, loader = make(
            module=net, optimizer=optimizer, data_loader=DataLoader(data, batch_size=20),
            max_grad_norm=1.0, **private,
        )  # fmt: skip
    return model, optimizer, loader, engine


def train(model: nn.Module, optimizer: Any, loader: Any, epochs: int) -> int:
    steps = 0
    for _ in range(epochs):
        for examples, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(examples), targets).backward()
            optimizer.step()
            steps += 1
    return steps


pytestmark = pytest.mark.filterwarnings("ignore")


def test_it_accounts_for_what_was_trained(transport: Any, asked: list[Any]) -> None:
    integration.connect(transport=transport)
    model, optimizer, loader, engine = program(noise_multiplier=1.2)
    assert engine.get_epsilon(1e-5) == 0.0
    steps = train(model, optimizer, loader, 3)
    exact = calculator.epsilon(DpSgd(1.2, sample_rate=1 / 20, steps=steps), 1e-5)
    assert engine.get_epsilon(1e-5) == exact.epsilon
    assert len(asked) <= steps / 50 + 2  # a block at a time
    optimizer.noise_multiplier = 2.0  # a schedule: two stretches
    optimizer.step_hook(optimizer)
    assert [row[2] for row in engine.accountant.history] == [steps, 1]
    assert engine.get_epsilon(1e-5) > exact.epsilon
    assert asked[-1]["mechanism"]["kind"] == "composed"


def test_a_step_beyond_the_budget_changes_nothing(transport: Any) -> None:
    fits = 37
    budget = calculator.epsilon(DpSgd(1.0, sample_rate=1 / 20, steps=fits), 1e-5).epsilon
    integration.connect(epsilon=budget, delta=1e-5, transport=transport)
    model, optimizer, loader, engine = program(noise_multiplier=1.0)
    made: list[list[torch.Tensor]] = []

    def train_on() -> None:
        for _ in range(10):
            for examples, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(examples), targets).backward()
                made.append([p.detach().clone() for p in model.parameters()])
                optimizer.step()

    with pytest.raises(BudgetExhaustedError, match="37 steps are made"):
        train_on()
    before = made.pop()
    assert len(made) == fits
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert engine.get_epsilon(1e-5) == budget


def test_the_noise_for_a_target_is_found(transport: Any) -> None:
    integration.connect(transport=transport)
    model, optimizer, loader, engine = program(target_epsilon=3.0, target_delta=1e-5, epochs=2)
    train(model, optimizer, loader, 2)
    assert 2.8 < engine.get_epsilon(1e-5) <= 3.01


def test_without_a_service_no_step_is_made() -> None:
    def dead(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("gone")

    integration.connect(transport=httpx.MockTransport(dead))
    model, optimizer, loader, _ = program(noise_multiplier=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ServiceUnreachableError, match="accountant serve"):
        train(model, optimizer, loader, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_it_says_how_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_connection", None)
    with pytest.raises(ServiceUnreachableError, match=r"connect\(url\)"):
        PrivacyEngine(accountant="remote")


def test_a_rolled_back_checkpoint_does_not_rewind_what_was_spent(transport: Any) -> None:
    integration.connect(transport=transport)
    model, optimizer, loader, engine = program(noise_multiplier=1.0)
    train(model, optimizer, loader, 1)
    early = engine.accountant.state_dict()
    train(model, optimizer, loader, 1)
    spent = engine.get_epsilon(1e-5)
    engine.accountant.load_state_dict(early)
    assert engine.get_epsilon(1e-5) == spent
    other = {"history": [(2.0, 0.05, 10**6)], "mechanism": "remote"}
    engine.accountant.load_state_dict(other)  # more steps, but not those that were made
    assert engine.get_epsilon(1e-5) == spent
    fresh = integration.RemoteAccountant()
    fresh.load_state_dict(early)
    assert fresh.history == early["history"]
