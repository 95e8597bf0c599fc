"""DP-FedAvg: a site's whole update is clipped and noised, and the site is the privacy unit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.small_models import batch, model
from training_client.budget import NoBudget
from training_client.errors import DataError
from training_client.lab.federated import train_federated
from training_client.lab.federated_averaging import FedAvgParticipant
from training_client.lab.models import cross_entropy
from training_client.plan import Plan


def participant(
    net: nn.Module, *, clip_norm: float = 1.0, noise: float = 1e-25, rate: float = 1.0, **more: Any
) -> FedAvgParticipant:
    examples, labels = batch(32)
    budget = NoBudget(Plan(1, rate, clip_norm, noise), more.pop("rounds", 50), "it is a test")
    more.setdefault("learning_rate", 0.2)
    return FedAvgParticipant("a", net, more.pop("examples", examples), labels, budget, **more)


def contributed(one: FedAvgParticipant, net: nn.Module) -> torch.Tensor:
    given = one.contribute([each.detach() for each in net.parameters()], cross_entropy)
    assert given is not None
    return torch.cat([each.flatten() for each in given])


def test_without_noise_and_clipping_a_round_is_local_descent() -> None:
    net, plain = model(), model()
    examples, labels = batch(32)
    descent = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.2)
    for _ in range(6):
        descent.zero_grad()
        cross_entropy(plain(examples), labels).mean().backward()
        descent.step()
    one = participant(net, clip_norm=1e3, local_epochs=3)
    assert train_federated(net, [one], cross_entropy, learning_rate=1.0, rounds_max=2) == 2
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_an_epoch_uses_each_record_once_in_small_batches() -> None:
    net = nn.Linear(6, 4, dtype=torch.float64)
    used: list[int] = []

    def count(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        used.append(len(outputs))
        return cross_entropy(outputs, labels)

    one = participant(net, local_epochs=2, local_batch_size=12)
    one.contribute(list(net.parameters()), count)
    assert used == [12, 12, 8] * 2


def test_the_whole_update_is_clipped() -> None:
    net = model()
    free = contributed(participant(net, clip_norm=1e9), net)
    clipped = contributed(participant(net, clip_norm=1e-3), net)
    assert 1e-3 * (1 - 1e-5) < float(clipped.norm()) <= 1e-3
    assert torch.allclose(clipped / clipped.norm(), free / free.norm(), atol=1e-5)


def test_noise_of_the_planned_deviation_is_drawn_anew_in_each_round() -> None:
    net = nn.Linear(6, 5000, dtype=torch.float64)
    one = participant(net, clip_norm=0.5, noise=3.0, learning_rate=1e-9)
    rounds = torch.stack([contributed(one, net) for _ in range(4)])
    assert float(rounds.std()) == pytest.approx(3.0 * 0.5, rel=0.02)
    correlations = torch.corrcoef(rounds) - torch.eye(4)
    assert float(correlations.abs().max()) < 6 / math.sqrt(rounds.shape[1])


def test_a_site_that_is_not_drawn_sends_noise_alone() -> None:
    net = model()
    one = participant(net, clip_norm=1e-3, rate=0.5, rounds=200)
    norms = [float(contributed(one, net).norm()) for _ in range(200)]
    drawn = [each for each in norms if each > 1e-9]
    assert 60 < len(drawn) < 140
    assert drawn == pytest.approx([2e-3] * len(drawn), rel=1e-4)  # divided by the sample rate


def test_an_update_that_is_not_finite_is_left_out() -> None:
    net = nn.Linear(6, 4, dtype=torch.float64)
    spoiled = batch(32)[0]
    spoiled[3, 2] = math.inf
    found = contributed(participant(net, noise=1.0, examples=spoiled), net)
    assert bool(found.isfinite().all())


def test_frozen_parameters_are_not_sent_and_a_round_is_charged_each() -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)).double()
    net[0].weight.requires_grad_(False)
    one = participant(net, rounds=3)
    assert len(contributed(one, net)) == 4 + 4 * 4 + 4
    assert train_federated(net, [one], cross_entropy, learning_rate=1.0) == 2
    assert one.steps == 3


def test_a_site_is_one_privacy_unit() -> None:
    net, (examples, labels) = model(), batch(32)
    budget = NoBudget(Plan(32, 0.5, 1.0, 1.0), 1, "it is a test")
    with pytest.raises(DataError, match="is for 32 privacy units, but the site is one unit"):
        FedAvgParticipant("a", net, examples, labels, budget, learning_rate=0.1)
    for wrong in ({"local_epochs": 0}, {"local_batch_size": 0}, {"examples": examples[:0]}):
        with pytest.raises(DataError, match="at least 1"):
            participant(net, **wrong)
