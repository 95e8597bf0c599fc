"""AdaDP's E′ as the mean of per-example squares: the definition, its sources, its sensitivity."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.clipped_sums import build_transform, clipped_rows, gradient_rows
from tests.support.optimizer_cases import NETS, PLAN, PUBLIC, build_optimizer
from tests.support.small_models import batch, model
from training_client.budget import Budget
from training_client.client import AccountingService
from training_client.errors import NoGuaranteeError
from training_client.lab.models import cross_entropy
from training_client.optimizers import AdaDp, RawSource
from training_client.private_step import Clipper


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("physical", [None, 3])
def test_squares_are_those_of_each_examples_gradient(kind: str, physical: int | None) -> None:
    net, examples = NETS[kind]()
    labels = torch.arange(len(examples)) % 4
    found, loss = Clipper(net, physical).mean_of_squares(examples, labels, cross_entropy, 16)
    each = gradient_rows(net, examples, labels)
    assert torch.allclose(found, each.square().sum(0) / 16, rtol=1e-9, atol=1e-15)
    assert loss == pytest.approx(float(cross_entropy(net(examples), labels).detach().mean()))


@pytest.mark.parametrize("name", ["adadp", "adan"])
def test_the_state_is_the_moving_mean_of_public_squares(name: str) -> None:
    """Both readings of line 23 differ, and the second keeps what averages away in the first."""
    net = model()
    options = {"state": "public", "public_batch_size": 64, "learning_rate": 0.0}
    optimizer = build_optimizer(name, net, PLAN, example_squares=True, **options)
    plain = build_optimizer(name, model(), PLAN, **options)
    assert isinstance(optimizer, AdaDp)
    assert isinstance(plain, AdaDp)
    for each in (optimizer, plain):
        each.step(*batch(8), cross_entropy)
    gradients = gradient_rows(model(), *PUBLIC)
    expected = 0.1 * gradients.square().mean(0)
    assert torch.allclose(optimizer.prior_squares, expected, rtol=1e-9)
    assert torch.allclose(plain.prior_squares, 0.1 * gradients.mean(0).square(), rtol=1e-6)
    assert bool((optimizer.prior_squares >= plain.prior_squares * (1 - 1e-9)).all())


def test_noisy_gradients_do_not_tell_the_squares() -> None:
    with pytest.raises(ValueError, match="mean of per-example squares cannot be made of noisy"):
        build_optimizer("adadp", model(), PLAN, state="privatised", example_squares=True)
    with pytest.raises(ValueError, match="AdaL has none"):
        build_optimizer("adal", model(), PLAN, example_squares=True)


def test_raw_squares_need_a_run_without_a_claim() -> None:
    budget = Budget(AccountingService("http://test"), PLAN, epsilon=1.0, delta=1e-5)
    with pytest.raises(NoGuaranteeError, match="no theorem covers"):
        AdaDp(model(), budget, learning_rate=1.0, source=RawSource(), example_squares=True)
    optimizer = build_optimizer("adadp", model(), PLAN, state="raw", example_squares=True)
    optimizer.step(*batch(8), cross_entropy)
    assert isinstance(optimizer, AdaDp)
    gradients = gradient_rows(model(), *batch(8))
    expected = 0.1 * gradients.square().sum(0) / PLAN.expected_batch_size
    assert torch.allclose(optimizer.prior_squares, expected, rtol=1e-9)


@pytest.mark.parametrize("shape", ["ball", "ellipsoid", "box"])
def test_the_sensitivity_that_a_release_of_squares_would_have(shape: str) -> None:
    """Σ u∘u moves by at most B² with one example, and by √m in a box; the page states both."""
    net, (examples, labels) = model(), batch(32)
    transform = build_transform(shape, net)
    u = clipped_rows(net, transform, examples, labels)
    bound = math.sqrt(u.shape[1]) if shape == "box" else transform.bound**2
    assert float(u.square().norm(dim=1).max()) <= bound
    if shape == "ball":  # a gradient along one axis attains the bound
        one_axis = torch.tensor([[transform.bound, 0.0]])
        assert float(one_axis.square().norm()) == pytest.approx(bound)
