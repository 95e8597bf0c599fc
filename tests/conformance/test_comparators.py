"""The methods that the papers compare with: what they release, and that it is what is charged."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.clipped_sums import gradient_rows, random_like
from tests.support.optimizer_cases import PLAN, Releases, build_optimizer
from tests.support.small_models import batch, model, unbudgeted
from training_client.errors import DataError
from training_client.lab import agd as agd_module
from training_client.lab.agd import Agd, NoGate, train_agd
from training_client.lab.models import cross_entropy
from training_client.lab.relevance import PrivateRelevance
from training_client.optimizers import DpOpt, PdaDpMd
from training_client.optimizers.adppl import Adppl
from training_client.optimizers.dp_opt import cheapest_noise
from training_client.private_step.rounded_gaussian import NoiseGrid

# --- DpOpt


def test_no_noise_of_the_same_cost_changes_the_loss_less_than_that_of_dp_opt() -> None:
    """A descent along the constraint ends at the formula's minimum, and no neighbour is better."""
    generator = torch.Generator().manual_seed(3)
    deltas, weights = torch.rand(2, 40, generator=generator, dtype=torch.float64) + 0.05

    def priced(noise: torch.Tensor) -> torch.Tensor:
        """Scale noise such that Σ Δ²/σ² = 1."""
        return noise.mul((deltas / noise).norm())

    best = priced(cheapest_noise(deltas, weights))
    least = float((weights * best).sum())
    for _ in range(200):
        other = priced(best * torch.exp(0.05 * torch.randn(40, generator=generator).double()))
        assert float((weights * other).sum()) > least
    logs = torch.zeros(40, dtype=torch.float64, requires_grad=True)
    for _ in range(300):
        change = (weights * priced(logs.exp())).sum()
        (slope,) = torch.autograd.grad(change.log(), logs)
        logs.data -= 5.0 * slope
    assert float(change.detach()) == pytest.approx(least, rel=1e-4)


def test_dp_opt_keeps_the_constraint_with_equality_and_gives_useless_coordinates_more() -> None:
    """Δ has length C: each step's Σ Δᵢ²/σᵢ² is 1/σ²; without state it is DP-SGD."""
    optimizer = build_optimizer("dp_opt", model(), PLAN, state="public")
    releases = Releases(optimizer)
    for _ in range(3):
        optimizer.step(*batch(), cross_entropy)
    assert releases.transforms[0].for_block(optimizer.blocks[0]).scale is None
    assert isinstance(optimizer, DpOpt)
    transform = optimizer.transform()
    inverse = torch.cat([transform.for_block(b).scale.flatten() for b in optimizer.blocks])  # type: ignore[union-attr]
    deltas = optimizer.squares.clamp_min(1e-6 * optimizer.squares.mean()).sqrt()
    deltas *= PLAN.clip_norm / deltas.norm()
    noise = PLAN.noise_multiplier * transform.bound / inverse
    assert float((deltas / noise).square().sum()) == pytest.approx(PLAN.noise_multiplier**-2)
    heavy = optimizer.firsts.abs() / deltas
    assert noise[heavy.argmin()] / deltas[heavy.argmin()] ** (2 / 3) > (
        noise[heavy.argmax()] / deltas[heavy.argmax()] ** (2 / 3)
    )


# --- PDA-DPMD


def test_pda_dpmd_ends_with_the_public_gradient_alone() -> None:
    optimizer = build_optimizer("pda_dpmd", model(), PLAN, horizon=3)
    assert isinstance(optimizer, PdaDpMd)
    shares = []
    for _ in range(5):
        shares.append(optimizer.private_share)
        optimizer.step(*batch(), cross_entropy)
    assert shares == pytest.approx([1.0, math.cos(math.pi / 6), 0.5, 0.0, 0.0], abs=1e-12)
    with pytest.raises(ValueError, match="at least one step"):
        build_optimizer("pda_dpmd", model(), PLAN, horizon=0)


# --- ADPPL


def adppl(**options: Any) -> Adppl:
    net = model()
    shares = [each.abs() + 0.1 for each in random_like(net, 4)]
    return Adppl(net, unbudgeted(PLAN), learning_rate=0.1, shares=shares, **options)


def test_adppl_clips_shares_of_gradients_and_its_noise_is_over_the_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NoiseGrid, "add_noise", lambda _, total, factor, __: total.mul_(factor))
    optimizer = adppl()
    net, before = model(), torch.cat([each.detach().flatten() for each in optimizer.parameters])
    rows = gradient_rows(net, *batch()) * optimizer.shares
    kept = rows / rows.norm(dim=1, keepdim=True).clamp_min(1.0)
    expected = kept.sum(0) / PLAN.expected_batch_size / optimizer.shares
    optimizer.step(*batch(), cross_entropy)
    after = torch.cat([each.detach().flatten() for each in optimizer.parameters])
    assert torch.allclose(before - after, 0.1 * expected, rtol=1e-5, atol=1e-9)
    with pytest.raises(ValueError, match="not shaped like"):
        Adppl(net, unbudgeted(PLAN), learning_rate=0.1, shares=[])
    zeros = [torch.zeros_like(each) for each in net.parameters()]
    with pytest.raises(ValueError, match="expected shares"):
        Adppl(net, unbudgeted(PLAN), learning_rate=0.1, shares=zeros)


def test_one_record_moves_relevances_sums_by_one_at_most_and_relevant_inputs_get_larger_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grids: list[torch.Tensor] = []
    monkeypatch.setattr(NoiseGrid, "add_noise", lambda _, total, *__: grids.append(total.clone()))
    examples, labels = torch.randn(50, 6), torch.arange(50) % 4
    examples[:, 2] += 5.0 * (labels == 1)
    examples[7] = math.inf
    release = PrivateRelevance(1e-3)
    relevance = release.fit(examples, labels, 4)
    release.fit(examples[1:], labels[1:], 4)
    assert 0 < float((grids[0] - grids[1]).norm()) <= 1
    shares = release.shares(model(), relevance)
    assert int(shares[0][0].argmax()) == 2
    assert all(bool((each == 1).all()) for each in shares[1:])
    assert release.mechanism() == {"kind": "gaussian", "noise_multiplier": 1e-3}
    with pytest.raises(ValueError, match="expected noise_multiplier"):
        PrivateRelevance(0.0)


# --- AGD


def run_agd(net: nn.Module, rho: float, **changes: Any) -> agd_module.AgdRun:
    usual = {"clip_norm": 1.0, "noise_multiplier": 1.0, "selection_epsilon": 1.0}
    return train_agd(net, *batch(), cross_entropy, NoGate(rho), Agd(**usual | changes))


def test_without_noise_agd_takes_the_step_size_that_lowers_the_loss_most() -> None:
    net, plain, (examples, labels) = model(), model(), batch()
    found = run_agd(
        net, 1e20, noise_multiplier=1e-6, selection_epsilon=1e6, steps_max=5,
        step_sizes=(0.01, 0.3, 2.0, 50.0), loss_max=100.0, clip_norm=100.0,
    )  # fmt: skip
    assert (found.steps, found.failures) == (5, 0)
    for _ in range(5):
        before = [each.detach().clone() for each in plain.parameters()]
        plain.zero_grad()
        torch.autograd.backward(cross_entropy(plain(examples), labels).mean())
        slope = torch.cat([each.grad.flatten() for each in plain.parameters()])  # type: ignore[union-attr]
        ends = []
        for size in (0.01, 0.3, 2.0, 50.0):
            with torch.no_grad():
                for each, old in zip(plain.parameters(), before, strict=True):
                    each.copy_(old - size * each.grad / slope.norm())  # type: ignore[operator]
                ends.append((float(cross_entropy(plain(examples), labels).mean()), size))
        with torch.no_grad():
            for each, old in zip(plain.parameters(), before, strict=True):
                each.copy_(old - min(ends)[1] * each.grad / slope.norm())  # type: ignore[operator]
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-3)


def test_after_a_failed_direction_agd_pays_more_for_gradients() -> None:
    """With step sizes that only harm, every direction fails: 1/σ² grows by γ each time."""
    found = run_agd(model(), 200.0, selection_epsilon=4.0, step_sizes=(1e6,), growth=0.5)
    paid = found.failures - 1  # the last was not measured again: 0.5·1.5ᵏ + 8 each no longer fit
    assert found.steps == 0 < paid
    assert found.noise_multiplier**-2 == pytest.approx(1.5**paid)
    left = 200.0 - 0.5 * 1.5**paid - 8.0 * found.failures
    assert 0 <= left < 0.25 * 1.5**paid


def test_agd_makes_nothing_before_it_has_paid_and_depends_on_releases_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, before = model(), [each.detach().clone() for each in model().parameters()]
    # private: what AGD computes from records must come after the payment
    monkeypatch.setattr(agd_module, "_count_loss", lambda *_: pytest.fail("it was not paid for"))
    assert run_agd(net, 0.4).steps == 0  # a gradient costs 0.5
    assert run_agd(net, 0.6).steps == 0  # no selection fits beside it
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    ends = []
    examples, labels = batch()
    neighbour = examples.clone()
    neighbour[0] = 7.0
    for data in (examples, neighbour):
        net, releases = model(), iter([*random_like_vectors(net, 20)])
        # private: both data sets must see the same releases
        monkeypatch.setattr(agd_module, "_release_gradient", lambda *_, of=releases: next(of))
        # private: as above
        monkeypatch.setattr(agd_module, "_select_step", lambda *_: 0.1)
        gate, agd = NoGate(1.0), Agd(clip_norm=1.0, noise_multiplier=1.0, selection_epsilon=1.0)
        with pytest.raises(StopIteration):
            train_agd(net, data, labels, cross_entropy, gate, agd)
        ends.append(torch.cat([each.detach().flatten() for each in net.parameters()]))
    assert torch.equal(*ends)


def random_like_vectors(net: nn.Module, count: int) -> list[torch.Tensor]:
    return [torch.cat([e.flatten() for e in random_like(net, seed)]) for seed in range(count)]


def test_a_record_changes_a_loss_count_by_one_unit_at_most() -> None:
    net, (examples, labels) = model(), batch()
    counts = [
        agd_module._count_loss(net, examples[:size], labels[:size], cross_entropy, 1.0)
        for size in range(1, 33)
    ]
    steps = [after - before for before, after in pairwise(counts)]
    assert all(0 <= each <= agd_module._UNITS for each in steps)
    broken = examples.clone()
    broken[0] = math.nan
    found = agd_module._count_loss(net, broken[:1], labels[:1], cross_entropy, 1.0)
    assert found == agd_module._UNITS


@pytest.mark.parametrize("wrong", [{"growth": 0.0}, {"step_sizes": ()}, {"clip_norm": math.nan}])
def test_parameters_of_agd_without_a_meaning_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="positive finite"):
        run_agd(model(), 1.0, **wrong)
