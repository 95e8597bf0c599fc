"""The engine's way of a GPU, run on a CPU that says it is none.

`Tensor.is_cpu` decides about compiled loops, oneDNN, sparse products, and the sizes of blocks and
chunks. With it False, the engine takes the way of every other device. GPUs' own kernels and
generators are not tried by this.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.layer_models import LAYER_MODELS, build, clipped_sum_by_definition
from tests.support.small_models import unbudgeted
from training_client.lab.models import cross_entropy, mlp
from training_client.optimizers import OPTIMIZERS, make_optimizer
from training_client.plan import Plan
from training_client.private_step.kernels import compiled
from training_client.testing import clipped_sum

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
PLAN = Plan(dataset_size=64, sample_rate=0.5, clip_norm=0.5, noise_multiplier=1.0)


@pytest.fixture
def no_cpu(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Have tensors say that they are not on a CPU; return a list with an item per question."""
    asked: list[None] = []

    def is_cpu(_: torch.Tensor) -> bool:
        asked.append(None)
        return False

    monkeypatch.setattr(torch.Tensor, "is_cpu", property(is_cpu), raising=False)
    assert not compiled.is_on_cpu(torch.zeros(1))
    asked.clear()
    return asked


@pytest.mark.parametrize("name", LAYER_MODELS)
def test_a_clipped_sum_equals_its_definition(name: str, no_cpu: list[None]) -> None:
    net, examples, labels = build(name)
    for clip_norm in (0.05, math.inf):
        found = clipped_sum(net, examples, labels, cross_entropy, clip_norm)
        wanted = clipped_sum_by_definition(net, examples, labels, clip_norm)
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))
    assert no_cpu


CASES = [
    *((name, entry.states[0], {}) for name, entry in OPTIMIZERS.items()),
    ("adadp", "raw", {}),
    ("adadp", "public", {"box": True}),
    ("pi_adam", "public", {}),
    ("pi_adam", "public", {"own_squares": True}),
]


def train(name: str, state: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Return the parameters after three steps, with fixed noise."""
    torch.manual_seed(0)
    net = mlp(80, 100, 10)
    examples, labels = torch.randn(64, 80), torch.arange(64) % 10
    optimizer = make_optimizer(
        name, net, unbudgeted(PLAN), state=state, public=(examples[:16] + 1, labels[:16]),
        public_batch_size=16, generator=torch.Generator().manual_seed(3), **options,
    )  # fmt: skip
    for _ in range(3):
        optimizer.step(examples, labels, cross_entropy)
    return [each.detach().clone() for each in net.parameters()]


@pytest.mark.parametrize(("name", "state", "options"), CASES)
def test_an_optimizer_trains_the_model_that_it_trains_on_a_cpu(
    name: str, state: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    before = train(name, state, options)
    asked = request.getfixturevalue("no_cpu")
    for one, other in zip(before, train(name, state, options), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)
    assert asked
