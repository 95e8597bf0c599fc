"""Opacus' optimizers round their sums to a grid, and add whole numbers; so do several ranks."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.lazy_modules import LazyModule
from training_client.errors import NoGuaranteeError
from training_client.private_step.rounded_gaussian import NoiseGrid

optimizers = LazyModule("opacus.optimizers")
per_layer = LazyModule("opacus.optimizers.ddp_perlayeroptimizer")
exact_noise = LazyModule("training_client.integrations.opacus.exact_noise")
checks = LazyModule("training_client.integrations.opacus.checks")
KEY = bytes(range(32))
SIGMA, BOUND, BATCH = 0.8, 3.0, 20

pytestmark = pytest.mark.slow  # importing Opacus takes seconds


def made(kind: str = "DPOptimizer", bound: Any = BOUND, **options: Any) -> Any:
    """Return an optimizer of Opacus whose parameters have per-example gradients."""
    assert callable(exact_noise.grid_of)  # importing it changes Opacus
    net = nn.Linear(5, 7)
    usual = {"noise_multiplier": SIGMA, "max_grad_norm": bound, "expected_batch_size": BATCH}
    optimizer = getattr(optimizers, kind)(torch.optim.SGD(net.parameters(), 0.1), **usual | options)
    for each in optimizer.params:
        each.grad_sample = torch.randn(BATCH, *each.shape)
    return optimizer


def noisy(optimizer: Any, key: bytes | None) -> list[torch.Tensor]:
    """Return each parameter's exact sum in steps of the grid, with noise if there is a key."""
    size = sum(each.numel() for each in optimizer.params)
    grid = NoiseGrid.for_sum(SIGMA, BOUND, size, 2**20)
    rounded = [grid.round(each.summed_grad, 2) for each in optimizer.params]
    noise = [0 if key is None else grid.draw_like(each, key) for each in rounded]
    return [(one + other) * grid.step for one, other in zip(rounded, noise, strict=True)]


def test_the_noise_of_a_step_is_on_the_grid_of_all_its_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # private: the keys are replaced, to repeat the noise
    monkeypatch.setattr("training_client.integrations.opacus.exact_noise.draw_key", lambda _: KEY)
    optimizer = made()
    assert exact_noise.grid_of(optimizer) == NoiseGrid.for_sum(SIGMA, BOUND, 42, 2**20)
    optimizer.pre_step()
    for each, exact in zip(optimizer.params, noisy(optimizer, KEY), strict=True):
        assert torch.equal(each.grad, (exact.to(torch.float32) / BATCH).view_as(each))
    with pytest.raises(ValueError, match="haven't been cleared"):
        optimizer.add_noise()


def test_each_parameter_and_step_has_noise_of_its_own() -> None:
    found = []
    for _ in "12":
        torch.manual_seed(1)
        optimizer = made(loss_reduction="sum")
        optimizer.pre_step()
        found.append(
            torch.cat([(each.grad - each.summed_grad).flatten() for each in optimizer.params])
        )
    assert len({round(float(each), 4) for each in torch.cat(found).flatten()}) > 40


def test_the_noise_multiplier_pays_for_the_rounding_of_clip_norms_per_layer() -> None:
    norms = [1.1, 0.7]
    grid = exact_noise.grid_of(made("DPPerLayerOptimizer", norms))
    assert grid.noise_deviation > SIGMA * math.hypot(*norms)
    assert grid.noise_deviation == pytest.approx(SIGMA * math.hypot(*norms), rel=1e-6)


@pytest.mark.parametrize("norm", [0.0, math.inf])
def test_noise_that_is_no_number_is_left_to_the_checks(norm: float) -> None:
    optimizer = made(bound=norm)
    optimizer.pre_step()
    with pytest.raises(NoGuaranteeError, match="max_grad_norm"):
        checks.require_private_optimizer(optimizer)


class TwoRanks:
    """Stands in for two processes, in two threads, that send each other whole numbers."""

    def __init__(self) -> None:
        self.met, self.given = threading.Barrier(2, timeout=60), list[torch.Tensor]()

    def add_up(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor, tensor.round())
        self.given.append(tensor.clone())
        self.met.wait()
        tensor.copy_(self.given[-1] + self.given[-2])
        self.met.wait()


@pytest.mark.parametrize("kind", ["DistributedDPOptimizer", "SimpleDistributedPerLayerOptimizer"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ranks_add_up_whole_numbers_and_one_of_them_draws(
    kind: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # private: the keys are replaced, to repeat the noise; two ranks are made in one process
    monkeypatch.setattr("training_client.integrations.opacus.exact_noise.draw_key", lambda _: KEY)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    ranks, bound = [], BOUND
    if "PerLayer" in kind:
        bound = [BOUND * 0.6, math.nextafter(BOUND * 0.8, 0)]
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        ranks.append(made(kind, bound, loss_reduction=reduction))
        ranks[-1].pre_step()
    exact = [
        one + other for one, other in zip(noisy(ranks[0], KEY), noisy(ranks[1], None), strict=True)
    ]
    monkeypatch.setattr(torch.distributed, "all_reduce", TwoRanks().add_up)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda part: part.reduce_gradients(), ranks))
    share = 1 if reduction == "sum" else 2 * BATCH
    for part in ranks:
        for each, whole in zip(part.params, exact, strict=True):
            assert torch.allclose(each.grad, (whole / share).float().view_as(each), rtol=3e-7)
    for one, other in zip(ranks[0].params, ranks[1].params, strict=True):
        assert torch.equal(one.grad, other.grad)


def test_noise_that_is_added_while_gradients_are_computed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    net = nn.Linear(5, 7)
    optimizer = per_layer.DistributedPerLayerOptimizer(
        torch.optim.SGD(net.parameters(), 0.1),
        noise_multiplier=1.0,
        max_grad_norm=[1.0, 1.0],
        expected_batch_size=BATCH,
    )
    with pytest.raises(NoGuaranteeError, match="while gradients are computed"):
        checks.require_private_optimizer(optimizer)
