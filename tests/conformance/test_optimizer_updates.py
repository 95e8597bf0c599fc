"""Without noise and clipping, every optimizer's updates equal those of its reference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.optimizer_cases import (
    PLAN,
    PUBLIC,
    QUIET,
    REFERENCES,
    Tensors,
    build_optimizer,
    random_like,
)
from tests.support.small_models import batch, model, per_example, unbudgeted
from training_client.lab.models import cross_entropy
from training_client.optimizers import AdaDps


@pytest.mark.parametrize("name", REFERENCES)
def test_without_noise_and_clipping_it_equals_the_plain_optimizer(name: str) -> None:
    private, plain = model(), model()
    examples, labels = batch()
    options = {"epsilon": 1e-30, "beta": 1e9} if name.startswith("ada") else {}
    if name in ("adadp", "adan"):
        options |= {"threshold": 0.0, "beta": 1e9}
    optimizer = build_optimizer(name, private, QUIET, learning_rate=0.05, **options)
    reference = REFERENCES[name](list(plain.parameters()))
    for _ in range(5):
        optimizer.step(examples, labels, cross_entropy)
        reference.zero_grad()
        (cross_entropy(plain(examples), labels).sum() / 32).backward()
        reference.step()
    for a, b in zip(private.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["adam", "rmsprop", "adagrad"])
def test_without_noise_and_clipping_pigdo_equals_its_row_of_table_1(rule: str) -> None:
    """With s and f from before the step: a second implementation, on the mean gradient."""
    private, plain = model(), model()
    examples, labels = batch()
    optimizer = build_optimizer(f"pi_{rule}", private, QUIET, learning_rate=0.01)
    first, second, epsilon = 0.9, 0.999, 1e-3
    f = [torch.zeros_like(p) for p in plain.parameters()]
    s = [torch.zeros_like(p) for p in plain.parameters()]
    for step in range(1, 5):
        optimizer.step(examples, labels, cross_entropy)
        loss = cross_entropy(plain(examples), labels).sum() / 32
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        with torch.no_grad():
            for at, (p, g) in enumerate(zip(plain.parameters(), gradients, strict=True)):
                known = s[at] / (1 - second ** (step - 1)) if rule == "adam" and step > 1 else s[at]
                taken = (first * f[at] + (1 - first) * g) / (1 - first**step)
                p -= 0.01 * (taken if rule == "adam" else g) / (known.sqrt() + epsilon)
                f[at] = first * f[at] + (1 - first) * g
                s[at] = s[at] + g**2 if rule == "adagrad" else second * s[at] + (1 - second) * g**2
    for a, b in zip(private.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["adam", "rmsprop", "adagrad"])
def test_with_own_squares_pigdo_equals_table_1_as_in_the_paper(rule: str) -> None:
    """Every example's f/√s, with s and f of the mean gradient before; no ε is printed."""
    private, plain = model(), model()
    (examples, labels), first, second = batch(), 0.9, 0.999
    options = {"own_squares": True, "epsilon": 0.0, "public": (examples, labels)}
    optimizer = build_optimizer(
        f"pi_{rule}", private, QUIET, learning_rate=0.01, state="public", **options
    )
    f = [torch.zeros_like(p) for p in plain.parameters()]
    s = [torch.zeros_like(p) for p in plain.parameters()]
    for step in range(1, 5):
        optimizer.step(examples, labels, cross_entropy)
        each = per_example(plain, examples, labels)
        with torch.no_grad():
            for at, (p, g) in enumerate(zip(plain.parameters(), each, strict=True)):
                if rule == "adam":
                    taken = (first * f[at] + (1 - first) * g) / (1 - first**step)
                    squares = (second * s[at] + (1 - second) * g**2) / (1 - second**step)
                else:
                    taken = g
                    squares = (
                        s[at] + g**2 if rule == "adagrad" else moving_average(second, s[at], g**2)
                    )
                p -= 0.01 * (taken / squares.sqrt()).mean(0)
                mean = g.mean(0)
                f[at] = moving_average(first, f[at], mean)
                s[at] = (
                    s[at] + mean**2 if rule == "adagrad" else moving_average(second, s[at], mean**2)
                )
    for a, b in zip(private.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["adam", "rmsprop", "adagrad"])
def test_with_own_squares_state_privatised_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="use state public or raw"):
        build_optimizer(f"pi_{rule}", model(), PLAN, own_squares=True)


def mean_gradient(net: nn.Module, of: tuple[torch.Tensor, torch.Tensor]) -> Tensors:
    """Return the gradient of the mean loss."""
    return torch.autograd.grad(cross_entropy(net(of[0]), of[1]).mean(), list(net.parameters()))


@pytest.mark.parametrize("state", ["public", "privatised"])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("statistic", ["rmsprop", "adam", "adagrad", "known"])
def test_without_noise_and_clipping_adadps_descends_over_its_statistic(
    statistic: str, momentum: float, state: str
) -> None:
    """With A from before the step, or known: a second implementation, on mean gradients."""
    private, plain = model(), model()
    known, decay, epsilon = [each.abs() + 0.1 for each in random_like(plain, 6)], 0.8, 1e-2
    side = {"side_information": known} if statistic == "known" else {"statistic": statistic}
    options = {"momentum": momentum, "decay": decay, "epsilon": epsilon} | side
    optimizer = build_optimizer(
        "adadps", private, QUIET, learning_rate=0.01, state=state, **options
    )
    v = [torch.zeros_like(p) for p in plain.parameters()]
    s = [torch.zeros_like(p) for p in plain.parameters()]
    for steps in range(4):
        optimizer.step(*batch(), cross_entropy)
        public = mean_gradient(plain, PUBLIC if state == "public" else batch())
        gradients = mean_gradient(plain, batch())
        share = 1 - decay**steps if statistic == "adam" and steps > 0 else 1.0
        with torch.no_grad():
            for at, p in enumerate(plain.parameters()):
                over = (s[at] / share).sqrt() + epsilon if steps > 0 else torch.ones_like(p)
                over = known[at] if statistic == "known" else over
                v[at] = momentum * v[at] + gradients[at] / over
                p.sub_(v[at], alpha=0.01)
                more = public[at] ** 2
                s[at] = (
                    s[at] + more if statistic == "adagrad" else moving_average(decay, s[at], more)
                )
    for a, b in zip(private.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def moving_average(decay: float, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return decay * old + (1 - decay) * new


@pytest.mark.parametrize(("name", "first"), [("dp_r_pub", 0.0), ("dp_adam_pub", 0.9)])
def test_without_noise_and_clipping_baselines_descend_over_a_public_statistic(
    name: str, first: float
) -> None:
    """With A that includes this step's public gradient: a second implementation."""
    private, plain = model(), model()
    decay, epsilon = 0.8, 1e-2
    options = {"decay": decay, "epsilon": epsilon}
    optimizer = build_optimizer(name, private, QUIET, learning_rate=0.01, **options)
    f = [torch.zeros_like(p) for p in plain.parameters()]
    s = [torch.zeros_like(p) for p in plain.parameters()]
    for steps in range(1, 5):
        optimizer.step(*batch(), cross_entropy)
        public, gradients = mean_gradient(plain, PUBLIC), mean_gradient(plain, batch())
        share = 1 - decay**steps if name == "dp_adam_pub" else 1.0
        with torch.no_grad():
            for at, p in enumerate(plain.parameters()):
                s[at] = moving_average(decay, s[at], public[at] ** 2)
                f[at] = moving_average(first, f[at], gradients[at])
                direction = f[at] / (1 - first**steps) / ((s[at] / share).sqrt() + epsilon)
                p.sub_(direction, alpha=0.01)
    for a, b in zip(private.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["dp_sgd", "dp_adam", "dp_rmsprop", "dp_adagrad", "adadp"])
def test_transposed_weights_in_memory_are_trained_alike(name: str) -> None:
    """PyTorch's fused optimizers read parameters and gradients in memory order."""
    found = []
    for turned in (False, True):
        net = model()
        if turned:
            weight = net[0].weight.detach()
            net[0].weight = nn.Parameter(weight.T.contiguous().T)
        optimizer = build_optimizer(name, net, QUIET)
        for _ in range(3):
            optimizer.step(*batch(), cross_entropy)
        found.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.allclose(*found, rtol=1e-9, atol=1e-12)


def test_side_information_scales_gradients_before_the_clip() -> None:
    """A ∝ how often a feature occurs: with A = 1 it is DP-SGD, and steps scale by 1/A."""
    found = []
    for size in (1.0, 4.0):
        net, (examples, labels) = model(), batch()
        known = [torch.full_like(p, size) for p in net.parameters()]
        before = [p.detach().clone() for p in net.parameters()]
        AdaDps(net, unbudgeted(QUIET), learning_rate=0.1, side_information=known).step(
            examples, labels, cross_entropy
        )
        found.append([b - p.detach() for b, p in zip(before, net.parameters(), strict=True)])
    for one, four in zip(*found, strict=True):
        assert torch.allclose(one, 4 * four, rtol=1e-9)
