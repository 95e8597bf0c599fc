"""The same questions to dp-accounting and opacus, on a random grid."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants.analysis import rdp as opacus_rdp

from accountant_service.numerics.laws import sampled_gaussian
from tests.support.helpers import epsilon, log_uniform, run

GRID_RNG = random.Random(31)
GRID = [
    (
        log_uniform(GRID_RNG, 1e-3, 0.5),
        log_uniform(GRID_RNG, 0.6, 10),
        round(log_uniform(GRID_RNG, 1, 3000)),
        log_uniform(GRID_RNG, 1e-8, 1e-3),
    )
    for _ in range(12)
]
ORDERS = [1.25, 1.5, 2.0, 3.0, 4.5, 8.0, 16.0, 32.0, 63.0]


def event(q: float, sigma: float, steps: int) -> dp_event.DpEvent:
    step = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma))
    return dp_event.SelfComposedDpEvent(step, steps)


@pytest.mark.parametrize(("q", "sigma", "steps", "delta"), GRID)
def test_dp_accounting_rdp_is_at_best_equal(
    q: float, sigma: float, steps: int, delta: float
) -> None:
    peer = RdpAccountant().compose(event(q, sigma, steps)).get_epsilon(delta)
    ours = epsilon("subsampled_rdp", run(q, sigma, steps), delta).epsilon
    assert ours <= peer * 1.001 + 1e-9


@pytest.mark.parametrize(("q", "sigma", "steps", "delta"), GRID)
def test_dp_accounting_pld_lies_above_the_proved_lower_bound(
    q: float, sigma: float, steps: int, delta: float
) -> None:
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    peer = accountant.compose(event(q, sigma, steps)).get_epsilon(delta)
    claim = epsilon("pld", run(q, sigma, steps), delta)
    assert claim.certified is not None
    assert claim.certified.lower <= peer * (1 + 1e-6) + 1e-9
    assert claim.certified.upper <= peer * 1.001 + 5e-5


@pytest.mark.parametrize(("q", "sigma", "steps", "delta"), GRID)
def test_opacus_rdp_curve_is_the_same(q: float, sigma: float, steps: int, delta: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = opacus_rdp.compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=ORDERS)
    orders = np.array(ORDERS)
    ours = sampled_gaussian.log_moments(orders, q, sigma) / (orders - 1)
    np.testing.assert_allclose(ours, peer, rtol=2e-4)  # opacus truncates its series
