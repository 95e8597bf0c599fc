"""The same questions to dp-accounting and opacus, on a random grid."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest

from accountant_service.numerics.laws import sampled_gaussian
from tests.support.helpers import epsilon, log_uniform, run

ORDERS = [1.25, 1.5, 2.0, 3.0, 4.5, 8.0, 16.0, 32.0, 63.0]


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        pytest.param(31, 3, marks=pytest.mark.slow),
        pytest.param(None, 60, marks=pytest.mark.nightly),
    ],
    ids=["few", "many"],
)
def test_peers_agree(seed: int | None, count: int, request: pytest.FixtureRequest) -> None:
    """RDP is at most a peer's, the proved interval is around a peer's PLD, and curves are equal."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant
    from opacus.accountants.analysis import rdp as opacus_rdp

    rng = random.Random(request.getfixturevalue("night_seed") if seed is None else seed)
    for _ in range(count):
        q, sigma = log_uniform(rng, 1e-3, 0.5), log_uniform(rng, 0.6, 10)
        steps, delta = round(log_uniform(rng, 1, 3000)), log_uniform(rng, 1e-8, 1e-3)
        step = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma))
        event = dp_event.SelfComposedDpEvent(step, steps)
        peer = RdpAccountant().compose(event).get_epsilon(delta)
        case = (q, sigma, steps, delta)
        assert epsilon("subsampled_rdp", run(*case[:3]), delta).epsilon <= peer * 1.001 + 1e-9, case
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        peer = accountant.compose(event).get_epsilon(delta)
        certified = epsilon("pld", run(*case[:3]), delta).certified
        assert certified is not None
        assert certified.lower <= peer * (1 + 1e-6) + 1e-9, case
        assert certified.upper <= peer * 1.001 + 5e-5, case
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rdp = opacus_rdp.compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=ORDERS)
        orders = np.array(ORDERS)
        ours = sampled_gaussian.log_moments(orders, q, sigma) / (orders - 1)
        np.testing.assert_allclose(ours, rdp, rtol=2e-4)  # opacus truncates its series
