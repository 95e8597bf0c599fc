"""A-DDP: participants leave when their own budgets are spent, and send only noisy sums."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import httpx
import pytest
import torch

from tests.support.small_models import batch, model
from training_client.budget import Budget
from training_client.client import AccountingService
from training_client.errors import DataError, NoGuaranteeError, ServiceUnreachableError
from training_client.lab.federated import (
    AdaptiveParticipant,
    Participant,
    Round,
    train_federated,
)
from training_client.lab.models import cross_entropy
from training_client.plan import Plan
from training_client.private_step.sampling import PoissonSampler


def cost(noise: float) -> float:
    """ε of a step, in this toy service."""
    return 0.125 / noise


def service(asked: list[Any] | None = None) -> AccountingService:
    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if asked is not None:
            asked.append(body)
        claim = {"delta": body["delta"], "method": body["method"], "status": "proven"}
        if request.url.path == "/v1/epsilon":
            mechanism = body["mechanism"]
            epsilon = mechanism["steps"] * cost(mechanism["noise_multiplier"])
            return httpx.Response(200, json=claim | {"epsilon": epsilon})
        steps = int(body["epsilon"] / cost(body["noise_multiplier"]) + 1e-9)
        found = claim | {"epsilon": steps * cost(body["noise_multiplier"])}
        return httpx.Response(200, json={"steps": steps, "guarantee": found})

    return AccountingService("http://test", transport=httpx.MockTransport(handle))


def participant(
    name: str, net: Any, *, noise: float = 1.0, epsilon: float = 1.0, rate: float = 0.5, **more: Any
) -> Participant:
    examples, labels = batch(32)
    plan = Plan(32, rate, more.pop("clip_norm", 1.0), noise)
    method = more.pop("method", "pld")
    budget = Budget(more.pop("service", None) or service(), plan, epsilon, 1e-5, 7, method)
    return Participant(name, net, examples, labels, budget, **more)


def test_each_participant_trains_until_its_budget_is_spent() -> None:
    net, rounds = model(), list[Round]()
    people = [
        participant("short", net, epsilon=0.5),
        participant("long", net, epsilon=1.25),
        participant("loud", net, noise=0.5, epsilon=1.25),
    ]
    done = train_federated(net, people, cross_entropy, learning_rate=0.1, report=rounds.append)
    assert done == 10
    assert [each.steps for each in people] == [4, 10, 5]
    assert [each.took_part for each in rounds] == (
        [("short", "long", "loud")] * 4 + [("long", "loud")] + [("long",)] * 5
    )
    assert people[1].guarantee().epsilon == 1.25


def descend(net: torch.nn.Module, steps: int) -> None:
    """Plain descent on all of the data, for comparison."""
    examples, labels = batch(32)
    descent = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.2)
    for _ in range(steps):
        descent.zero_grad()
        cross_entropy(net(examples), labels).mean().backward()
        descent.step()


@pytest.mark.parametrize("frozen", [False, True])
def test_without_noise_and_clipping_it_is_plain_descent_on_the_average(frozen: bool) -> None:
    """Frozen parameters stay, and the others get their own gradients."""
    shared = model()
    shared[0].requires_grad_(requires_grad=not frozen)  # then contributions begin after it
    plain = copy.deepcopy(shared)
    people = [
        participant(name, shared, noise=1e-30, clip_norm=1e9, rate=1.0, epsilon=1e30)
        for name in "ab"
    ]
    train_federated(shared, people, cross_entropy, learning_rate=0.2, rounds_max=4)
    descend(plain, steps=4)
    for a, b in zip(shared.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_no_participant_releases_a_gradient_without_noise() -> None:
    """Of the deviation stated, in everybody's own draws, of everybody's own seed."""
    torch.manual_seed(2)
    net, rounds = torch.nn.Linear(6, 5000, dtype=torch.float64), 20
    people = [participant(name, net, noise=2.0, epsilon=100.0, rate=1.0) for name in "ab"]
    given = torch.stack([contributed(each, net) for each in people for _ in range(rounds)])
    noise = given - given.mean(0)  # everybody's records are all in every round
    stated = 2.0 * 1.0 / 32
    for own in noise.view(len(people), rounds, -1):
        found = float(own.square().sum()) / (own.numel() * (1 - 1 / len(noise)))
        assert math.sqrt(found) == pytest.approx(stated, rel=0.01)
    shared = -1 / (len(noise) - 1)  # the mean was made of all of them
    seen = torch.corrcoef(noise).fill_diagonal_(shared) - shared
    assert float(seen.abs().max()) < 6 / math.sqrt(noise.shape[1])


def contributed(one: Participant, net: torch.nn.Module) -> torch.Tensor:
    given = one.contribute([p.detach() for p in net.parameters()], cross_entropy)
    assert given is not None
    return torch.cat([each.flatten() for each in given])


class Only(PoissonSampler):
    """One record, always."""

    def __init__(self, at: int) -> None:
        super().__init__(32, 0.5)
        self.at = at

    def draw(self) -> torch.Tensor:
        return torch.tensor([self.at])


@pytest.mark.parametrize("clip_norm", [0.1, 2.0])
def test_no_record_moves_a_contribution_by_more_than_its_owners_clip_norm(clip_norm: float) -> None:
    net, norms = model(), []
    for at in range(32):
        free = {"noise": 1e-30, "epsilon": 1e30}
        one = participant("a", net, clip_norm=clip_norm, sampler=Only(at), **free)
        norms.append(16 * float(contributed(one, net).norm()))
    assert 0.999 * clip_norm < max(norms) <= clip_norm


def test_the_papers_accounting_may_be_asked_for() -> None:
    asked: list[Any] = []
    one = participant("a", model(), service=service(asked), method="gaussian_sampling_composition")
    parameters = [p.detach() for p in model().parameters()]
    while one.contribute(parameters, cross_entropy) is not None:
        pass
    assert one.steps == 8
    assert {body["method"] for body in asked} == {"gaussian_sampling_composition"}


def test_without_an_answer_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training_client.client.time.sleep", lambda _: None)

    def dead(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("gone")

    gone = AccountingService("http://test", transport=httpx.MockTransport(dead))
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    people = [participant("a", net, service=gone)]
    with pytest.raises(ServiceUnreachableError):
        train_federated(net, people, cross_entropy, learning_rate=0.1)
    assert people[0].steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_two_participants_cannot_share_one_budget() -> None:
    net, (examples, labels) = model(), batch(32)
    budget = Budget(service(), Plan(32, 0.5, 1.0, 1.0), 1.0, 1e-5)
    people = [Participant(name, net, examples, labels, budget) for name in "ab"]
    with pytest.raises(NoGuaranteeError, match="another run uses the same budget"):
        train_federated(net, people, cross_entropy, learning_rate=0.1)
    assert [each.steps for each in people] == [1, 0]


def adaptive(
    net: torch.nn.Module,
    scales: list[torch.Tensor],
    *,
    noise: float = 1e-30,
    clip_norm: float = 1e9,
    epsilon: float = 1e30,
    local_steps: int = 3,
) -> AdaptiveParticipant:
    examples, labels = batch(32)
    budget = Budget(service(), Plan(32, 1.0, clip_norm, noise), epsilon, 1e-5, 7)
    return AdaptiveParticipant(
        "a", net, examples, labels, budget,
        side_information=scales, learning_rate=0.2, local_steps=local_steps,
    )  # fmt: skip


def test_without_noise_algorithm_3_is_local_descent_along_gradients_over_side_information() -> None:
    shared, plain = model(), model()
    scales = [torch.rand_like(each) + 0.5 for each in shared.parameters()]
    examples, labels = batch(32)
    for _ in range(6):
        plain.zero_grad()
        cross_entropy(plain(examples), labels).mean().backward()
        with torch.no_grad():
            for each, scale in zip(plain.parameters(), scales, strict=True):
                each.sub_(each.grad / scale, alpha=0.2)  # type: ignore[operator]
    done = train_federated(
        shared, [adaptive(shared, scales)], cross_entropy, learning_rate=1.0, rounds_max=2
    )
    assert done == 2
    for a, b in zip(shared.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_algorithm_3_draws_fresh_noise_in_every_local_step() -> None:
    net = torch.nn.Linear(6, 5000, dtype=torch.float64)
    scales = [torch.ones_like(each) for each in net.parameters()]
    one = adaptive(net, scales, noise=1.0, clip_norm=100.0, epsilon=100.0, local_steps=4)
    parameters = [each.detach() for each in net.parameters()]
    given = []
    for _ in range(2):
        made = one.contribute(parameters, cross_entropy)
        assert made is not None
        given.append(torch.cat([each.flatten() for each in made]))
    # repeated noise would make the two equal, and one sum four times as wide rather than twice
    stated = 0.2 * math.sqrt(4) * 100.0 / 32
    assert float((given[0] - given[1]).std()) == pytest.approx(math.sqrt(2) * stated, rel=0.02)
    assert one.steps == 8


def test_algorithm_3_ends_with_the_budget_and_charges_each_local_step() -> None:
    net = model()
    scales = [torch.ones_like(each) for each in net.parameters()]
    one = adaptive(net, scales, noise=1.0, clip_norm=1.0, epsilon=0.5)  # four steps
    done = train_federated(net, [one], cross_entropy, learning_rate=1.0)
    assert (done, one.steps) == (2, 4)  # the second round has one step
    with pytest.raises(DataError, match="at least one local step"):
        adaptive(net, scales, local_steps=0)


def test_bad_input_is_named() -> None:
    net = model()
    people = [participant("a", net), participant("a", net)]
    with pytest.raises(ValueError, match="unique names"):
        train_federated(net, people, cross_entropy, learning_rate=0.1)
    examples, labels = batch(10)
    budget = Budget(service(), Plan(32, 0.5, 1.0, 1.0), 1.0, 1e-5)
    with pytest.raises(DataError, match="has 10 records, the plan is for 32"):
        Participant("a", net, examples, labels, budget)
