"""Everything satisfies one of two filters, each with half of δ; a side that misses a run is over.

The adversary is the best one, exactly, on small mechanisms (`tests/support/either_game.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

import pytest

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.errors import CodedError
from accountant_service.ledger import plans
from accountant_service.ledger.errors import ChargeOutdatedError, ReferenceFixedError
from accountant_service.ledger.filters import EitherFilter, from_json
from accountant_service.ledger.filters.base import add, subtract
from accountant_service.ledger.filters.either import EitherCharge
from accountant_service.ledger.rules import (
    Balance,
    Dataset,
    NewDataset,
    Reservation,
    State,
    reserve,
)
from accountant_service.ledger.step_plan import StepPlan
from tests.support.either_game import (
    ChargedOnce,
    Either,
    MissesForgotten,
    MissesGivenBack,
    WholeDelta,
    random_game,
)
from tests.support.filter_history import History
from tests.support.helpers import nightly, plan
from tests.support.privacy_filter_game import Adversary

RELATION = NeighbouringRelation.ADD_OR_REMOVE_ONE
ROUNDING = 1e-12  # of float64 sums over long interactions
# Each filter that breaks a rule, and games in which the adversary exceeds δ.
BROKEN: dict[type[Either], tuple[int, ...]] = {
    WholeDelta: (0, 1, 2),
    MissesForgotten: (33, 224),
    ChargedOnce: (23, 106),
    MissesGivenBack: (33, 224),
}


LAPLACE = plan("laplace", noise_multiplier=20.0)
TRAINING = plan("dp_sgd", sample_rate=0.01, noise_multiplier=1.1, steps=500)
PARALLEL = plan(
    "parallel", mechanisms=[{"kind": "laplace", "noise_multiplier": each} for each in (9.0, 10.0)]
)


def new(epsilon: float = 3.0, delta: float = 1e-5, planned: StepPlan | None = None) -> EitherFilter:
    mechanism = None if planned is None else planned.mechanism
    wanted = NewDataset("d", 60_000, epsilon, delta, RELATION, "record", mechanism, "either")
    found = plans.choose_policy(wanted)
    assert isinstance(found, EitherFilter)
    return found


def misses(policy: EitherFilter, amounts: tuple[int, ...]) -> list[int]:
    return [count for _, count, _ in policy.split(amounts)]


def charge_of(policy: EitherFilter, one: StepPlan, taken: tuple[int, ...]) -> EitherCharge:
    found = policy.compute_charge(one, taken)
    assert isinstance(found, EitherCharge)
    return found


# --- the best adversary


def largest_excess(kind: type[Either], seeds: Iterable[int]) -> float:
    """Return the most by which the best adversary exceeds δ in one of these games."""
    excess = []
    for seed in seeds:
        game = random_game(seed)
        adversary = Adversary(kind(game), game.menu, lengths=(1, 2), grants=4, withdrawals=1)
        excess.append(game.attained(adversary.play()) - game.delta)
    return max(excess)


@pytest.mark.parametrize(
    "seeds", [range(120), *(nightly(range(at, at + 5000)) for at in range(1000, 106_000, 5000))]
)
def test_no_adversary_beats_either_of_two_filters(seeds: range) -> None:
    assert largest_excess(Either, seeds) <= ROUNDING


@pytest.mark.parametrize("kind", BROKEN)
def test_a_filter_that_breaks_a_rule_is_beaten(kind: type[Either]) -> None:
    for seed in BROKEN[kind]:
        assert largest_excess(kind, [seed]) > 1e-6, seed


# --- what is charged


def test_what_one_side_admits_as_a_whole_is_admitted() -> None:
    """Many small queries: addition ends first, and their divergence is what admits them."""
    one = plan("laplace", noise_multiplier=100.0)
    history = History(new(1.0, 1e-6))
    count = sum(1 for _ in itertools.takewhile(history.spend, itertools.repeat(one)))
    assert count > 400, "by addition a hundred fit"
    policy, taken = history.policy, history.taken
    assert isinstance(policy, EitherFilter)
    assert misses(policy, taken)[0] > 0, "the reference misses a run first"
    assert misses(policy, taken)[1] == 0
    assert 0.99 < policy.share_of(taken) <= 1
    assert policy.epsilon_of(taken) <= policy.epsilon
    assert history.left(one) == policy.sides[1].count_affordable_steps(
        one, policy.split(taken)[1][2]
    )


def test_each_side_has_half_of_delta() -> None:
    for delta in (1e-5, 1e-6, 0.1, 3e-7, 1.2345678901234567e-5):
        half = EitherFilter.half(delta)
        assert 2 * Fraction(repr(half)) <= Fraction(repr(delta))
        assert half >= 0.5 * delta * (1 - 1e-15)
    policy = new()
    assert policy.is_sound()
    assert [side.delta for side in policy.sides] == [5e-6, 5e-6]
    wide = replace(policy, sides=(policy.sides[0], replace(policy.sides[1], delta=6e-6)))  # type: ignore[type-var]
    assert not wide.is_sound()
    forged = policy.to_json()
    forged["sides"][0] |= {"reference": {"kind": "gaussian", "noise_multiplier": 1.0}}
    forged["sides"][0] |= {"reference_steps": 1000}
    assert not from_json(forged, 3.0, 1e-5, RELATION).is_sound()


def test_a_miss_is_held_then_spent_by_the_first_grant() -> None:
    policy = new()
    charge = charge_of(policy, PARALLEL, policy.nothing)
    assert [each.own is None for each in charge.sides] == [False, True], "no divergence is known"
    assert misses(policy, charge.reserved) == [0, 1]
    assert misses(policy, charge.spent(0)) == [0, 0]
    assert misses(policy, charge.spent(1)) == [0, 1]
    back = charge.refund(0)
    assert back == charge.reserved
    assert policy.is_refund_allowed(PARALLEL, charge, 0, charge.reserved)
    assert not policy.is_refund_allowed(PARALLEL, charge, 1, charge.reserved)
    used = charge.refund(1)
    assert used is not None
    assert misses(policy, used) == [0, 0]
    assert policy.is_refund_allowed(PARALLEL, charge, 1, used)
    forged = (*used[:5], 1, *used[6:])
    assert misses(policy, forged) == [0, 1]
    assert not policy.is_refund_allowed(PARALLEL, charge, 1, forged)


def test_a_side_that_missed_a_run_is_over() -> None:
    policy = new()
    taken = charge_of(policy, PARALLEL, policy.nothing).reserved
    after = policy.after_reserving(LAPLACE, taken)
    charge = charge_of(after, LAPLACE, taken)
    assert [each.own is None for each in charge.sides] == [False, True]
    assert after.sides[1] == policy.sides[1], "its weights stay"
    # nothing that only the other side can take fits then
    many = plan("dp_sgd", sample_rate=0.01, noise_multiplier=1.1, steps=100_000)
    refused = charge_of(after, many, taken)
    assert [each.own is None for each in refused.sides] == [True, True]
    assert not after.admits(add(taken, refused.reserved))
    assert not after.fits(many, taken)
    assert math.isinf(after.share_of(add(taken, refused.reserved)))


def test_no_side_may_be_beyond_its_limit() -> None:
    """Not even one that has missed a run: it could be within its limit again later."""
    policy = new()
    taken = list(policy.nothing)
    taken[0] = 1  # a miss of the first side
    assert policy.admits(tuple(taken))
    beyond = list(taken)
    beyond[3] = 10**80  # ε added in the first side
    assert not policy.admits(tuple(beyond))
    taken[5] = 1  # and one of the second
    assert not policy.admits(tuple(taken))


def test_a_release_of_nothing_is_no_miss() -> None:
    policy = new()
    taken = charge_of(policy, PARALLEL, policy.nothing).reserved
    nothing = plan("repeated", count=0, mechanism={"kind": "laplace", "noise_multiplier": 1.0})
    assert charge_of(policy, nothing, taken).reserved == policy.nothing
    assert policy.fits(nothing, taken)


def test_a_plan_that_no_side_can_charge_is_refused_with_the_reason() -> None:
    shuffled = plan(
        "dp_sgd", dataset_size=1000, batch_size=10, noise_multiplier=1.1, epochs=1,
        sampling="shuffled",
    )  # fmt: skip
    policy = new()
    with pytest.raises(CodedError, match="shuffled"):
        policy.after_reserving(shuffled, policy.nothing).compute_charge(shuffled, policy.nothing)


def test_a_side_changes_only_while_that_side_may() -> None:
    """A charge was computed before another run set the reference of a side."""
    policy = new()
    before = policy.after_reserving(TRAINING, policy.nothing)
    assert policy.allows_replacement(before, TRAINING, policy.nothing)
    other = plan("dp_sgd", sample_rate=0.02, noise_multiplier=1.5, steps=200)
    now = policy.after_reserving(other, policy.nothing)
    taken = charge_of(now, other, policy.nothing).reserved
    assert not now.may_become(before, taken)
    assert not now.allows_replacement(before, TRAINING, taken)
    dataset = Dataset("", "d", 1000, "record", now, Balance(taken, now.nothing), 1, "", 0)
    charge = before.compute_charge(TRAINING, policy.nothing)
    run = Reservation(
        "r", "", State.OPEN, {}, "", charge, TRAINING.steps, 0, 0, "", "k", None, charge.reserved
    )
    with pytest.raises(ChargeOutdatedError):
        reserve(dataset, run, before)
    # a side whose miss is only held changes neither
    held = (*policy.nothing[:5], 1, *policy.nothing[6:])
    assert not policy.may_become(before, held)
    assert policy.may_become(replace(before, sides=(before.sides[0], policy.sides[1])), held)


def test_shares_of_a_holder_are_those_of_one_side() -> None:
    policy = new().after_reserving(TRAINING, new().nothing)
    charge = charge_of(policy, TRAINING, policy.nothing).reserved
    share = policy.share_of(charge)
    assert policy.fits_share(policy.nothing, charge, share)
    assert not policy.fits_share(policy.nothing, charge, share * 0.99)
    assert not policy.fits_share(charge, charge, share * 1.5)
    assert policy.largest_share_of(charge) == pytest.approx(share)


def test_what_a_run_gives_back_is_given_back_in_both_sides() -> None:
    history = History(new(planned=TRAINING))
    assert history.spend(TRAINING)
    policy = history.policy
    assert isinstance(policy, EitherFilter)
    charge = charge_of(policy, TRAINING, policy.nothing)
    used = subtract(charge.reserved, policy.compute_refund(TRAINING, charge, 100))
    assert used == charge.spent(100)
    assert all(any(own) for _, _, own in policy.split(used))


def test_the_owner_s_reference_is_that_of_the_first_side() -> None:
    policy = new()
    assert policy.allows_owner_reference(policy.nothing)
    chosen = policy.with_owner_reference(TRAINING, policy.nothing)
    assert policy.allows_owner_replacement(chosen, policy.nothing)
    assert chosen.is_sound()
    assert chosen.sides[1] == policy.sides[1]
    assert chosen.after_reserving(LAPLACE, policy.nothing).reference_part == chosen.reference_part
    wide = replace(chosen, sides=(chosen.sides[0], chosen.sides[0]))
    assert not policy.allows_owner_replacement(wide, policy.nothing)
    missed = (1, *policy.nothing[1:])
    assert not policy.allows_owner_reference(missed)
    assert not policy.allows_owner_replacement(chosen, missed)
    with pytest.raises(ReferenceFixedError):
        policy.with_owner_reference(TRAINING, missed)
