"""The certified interval over the whole range of parameters: it holds the truth every time.

50 cases in the second tier, 10 000 at night. The truth is the closed form at
q = 1 and for one release, an independent line integral where that decays, and otherwise the other
engine, which shares no method.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from accountant_service.numerics import certified_interval
from accountant_service.numerics.engines.line_integral import EvaluatedIntegral
from accountant_service.numerics.errors import SlowDecayError
from accountant_service.numerics.floats.bounds import Bounds
from accountant_service.numerics.laws import gaussian
from tests.support import oracles
from tests.support.helpers import log_uniform, releases

pytestmark = pytest.mark.usefixtures("without_memory")  # engines are replaced here

TOLERANCE = 1e-3


@dataclass
class Tally:
    """The references that judged the cases, and the widths of their intervals."""

    judges: dict[str, int] = field(default_factory=dict)
    widths: list[float] = field(default_factory=list)


def random_case(rng: random.Random) -> tuple[list[oracles.Run], float]:
    kind = rng.random()
    if kind < 0.15:
        parts = [(1.0, log_uniform(rng, 0.3, 50), int(log_uniform(rng, 1, 1e6)))]
    elif kind < 0.3:
        parts = [(log_uniform(rng, 1e-5, 1), log_uniform(rng, 0.3, 50), 1)]
    else:
        parts = [
            (log_uniform(rng, 1e-5, 1), log_uniform(rng, 0.3, 50), int(log_uniform(rng, 1, 1e6)))
            for _ in range(1 if kind < 0.8 else rng.randint(2, 5))
        ]
    return parts, log_uniform(rng, 1e-15, 1e-2)


def judge(parts: list[oracles.Run], delta: float, bounds: Bounds) -> str:
    """Fail unless the interval contains its reference; return the reference's name."""
    case = (parts, delta, bounds)
    q, sigma, count = parts[0]
    if len(parts) == 1 and q == 1.0:
        mu = count**0.5 / sigma
        assert bounds.lower <= float(gaussian.epsilon(delta, mu)), case
        assert bounds.upper >= float(gaussian.epsilon_lower(delta, mu)), case
        return "closed form at q = 1"
    if len(parts) == 1 and count == 1:
        exact = float(oracles.single_step_epsilon(delta, q, sigma))
        assert bounds.lower <= exact * (1 + 1e-9) + 1e-12, case
        assert bounds.upper >= exact * (1 - 1e-9), case
        return "closed form of one release"
    return by_line_integral(parts, delta, bounds) or by_lattice(parts, delta, bounds)


def by_line_integral(parts: list[oracles.Run], delta: float, bounds: Bounds) -> str | None:
    def exact(epsilon: float, *, removing: bool) -> float | None:
        return oracles.double_line_integral_delta(parts, epsilon, removing=removing)

    at_upper = exact(bounds.upper, removing=True)
    at_lower = exact(bounds.lower, removing=True)
    if at_upper is None or at_lower is None:
        return None
    case = (parts, delta, bounds)
    at_upper = max(at_upper, exact(bounds.upper, removing=False) or 0.0)
    assert at_upper <= delta * (1 + 1e-7), (*case, at_upper)
    if bounds.lower > 0.0 and at_lower < delta * (1 - 1e-7):
        assert (exact(bounds.lower, removing=False) or 0.0) >= delta * (1 - 1e-7), (*case, at_lower)
    return "line integral"


def by_lattice(parts: list[oracles.Run], delta: float, bounds: Bounds) -> str:
    def undamped(*_: object) -> EvaluatedIntegral:
        raise SlowDecayError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certified_interval, "integrate_composition", undamped)
        patch.setattr(certified_interval.rare_events, "integrate_rare_events", undamped)
        other = certified_interval.epsilon_bounds(releases(*parts), delta, 0.1)
    assert max(bounds.lower, other.lower) <= min(bounds.upper, other.upper), (parts, delta, bounds)
    return "lattice"


def hold(seed: int, cases: int) -> Tally:
    rng, tally = random.Random(seed), Tally()
    for _ in range(cases):
        parts, delta = random_case(rng)
        bounds = certified_interval.epsilon_bounds(releases(*parts), delta, TOLERANCE)
        by = judge(parts, delta, bounds)
        tally.judges[by] = tally.judges.get(by, 0) + 1
        if bounds.upper >= 0.05:
            tally.widths.append((bounds.upper - bounds.lower) / bounds.upper)
            if tally.widths[-1] > TOLERANCE:
                print("wide:", parts, delta, bounds)
    print(cases, "cases:", tally.judges)
    tally.widths.sort()
    wide = sum(width > TOLERANCE for width in tally.widths)
    print(f"median width {tally.widths[len(tally.widths) // 2]:.1e}, {wide} wider than 1e-3")
    return tally


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("seed", "cases"),
    [
        pytest.param(2026, 50, marks=pytest.mark.slow),
        pytest.param(None, 10_000, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.timeout(7200)
def test_random_intervals_hold_the_truth(
    seed: int | None, cases: int, request: pytest.FixtureRequest
) -> None:
    tally = hold(request.getfixturevalue("night_seed") if seed is None else seed, cases)
    assert len(tally.judges) == 4
    assert max(tally.widths) <= TOLERANCE
