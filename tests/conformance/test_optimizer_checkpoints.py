"""Checkpoints of other models, unknown names, and input that would spoil the state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.support.optimizer_cases import OPTIONS, PLAN, build_optimizer, leaves
from tests.support.small_models import batch, model, unbudgeted
from training_client.errors import DataError
from training_client.lab.models import cross_entropy
from training_client.optimizers import AdaDps, PrivateOptimizer, make_optimizer


@pytest.mark.parametrize("name", ["adadp", "pi_adam", "adadps", "dp_adam_pub", "dp_adam"])
def test_a_checkpoint_of_another_model_is_refused(name: str) -> None:
    other = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()
    wider = build_optimizer(name, other, PLAN)
    wider.step(*batch(), cross_entropy)
    kept, optimizer = wider.state_dict(), build_optimizer(name, model(), PLAN)
    with pytest.raises(DataError, match="of another model"):
        optimizer.load_state_dict(kept)
    with pytest.raises(DataError):
        optimizer.load_state_dict({})
    with pytest.raises(DataError, match=r"of another|is not one of this optimizer"):
        optimizer.load_state_dict(
            {key: [each] for key, each in kept.items() if key != "statistics"}
        )


def test_unknown_names_and_states_are_named_and_refused() -> None:
    net = model()
    with pytest.raises(ValueError, match="use one of dp_sgd"):
        build_optimizer("sgd", net, PLAN)
    with pytest.raises(ValueError, match="use one of privatised"):
        build_optimizer("dp_sgd", net, PLAN, state="raw")
    with pytest.raises(ValueError, match="public data"):
        make_optimizer("adadps", net, unbudgeted(PLAN))


@pytest.mark.parametrize("name", ["adadps", "dp_adam_pub", "adadp", "pi_adam"])
def test_non_finite_public_losses_are_refused(name: str) -> None:
    """Their squares would stay in the state: before a step, and after training diverged."""
    examples, labels = batch(16)
    with pytest.raises(DataError, match="NaN or infinite values"):
        made_with(name, model(), (examples / 0.0, labels))
    net = model()
    optimizer = made_with(name, net, (examples, labels))
    optimizer.step(*batch(), cross_entropy)
    with torch.no_grad():
        net[2].weight.fill_(math.inf)
    with pytest.raises(DataError, match="public examples has become nan: lower the learning rate"):
        optimizer.step(*batch(), cross_entropy)
    assert all(torch.isfinite(each).all() for each in leaves(optimizer.state_dict()))


def made_with(name: str, net: nn.Module, public: tuple[torch.Tensor, ...]) -> PrivateOptimizer:
    options = OPTIONS.get(name, {})
    return make_optimizer(name, net, unbudgeted(PLAN), state="public", public=public, **options)


def test_a_model_on_another_device_than_its_data_is_refused() -> None:
    optimizer = build_optimizer("dp_sgd", model(), PLAN, generator=torch.Generator())
    with pytest.raises(DataError, match="the examples are on meta, the model on cpu"):
        optimizer.step(*(each.to("meta") for each in batch()), cross_entropy)


@pytest.mark.parametrize("wrong", [0.0, -1.0, 1e-19, 1e38, math.inf, math.nan])
def test_side_information_that_sums_may_overflow_with_is_refused(wrong: float) -> None:
    net = model()
    known = [torch.ones_like(each) for each in net.parameters()]
    AdaDps(net, unbudgeted(PLAN), learning_rate=0.1, side_information=known)
    with pytest.raises(ValueError, match="shaped like the parameters"):
        AdaDps(net, unbudgeted(PLAN), learning_rate=0.1, side_information=known[::-1])
    known[1].view(-1)[-1] = wrong
    with pytest.raises(ValueError, match=r"side information from 1e-18 to 1e\+18"):
        AdaDps(net, unbudgeted(PLAN), learning_rate=0.1, side_information=known)


@pytest.mark.parametrize("wrong", [{"beta": 0.0}, {"threshold": -1.0}, {"epsilon": 0.0}])
def test_adadp_refuses_what_would_divide_by_zero(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected beta"):
        build_optimizer("adadp", model(), PLAN, **wrong)
