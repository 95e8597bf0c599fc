"""Small releases are added up, in exact decimals, and a run that is worth it sets the reference."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest

from accountant_service import mechanisms
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.disclosure import nist_questions
from accountant_service.disclosure.facts import facts_of_dataset
from accountant_service.errors import CodedError
from accountant_service.ledger import plans
from accountant_service.ledger.errors import (
    ChargeUndecidedError,
    ReferenceFixedError,
    UnsuitableReferenceError,
)
from accountant_service.ledger.filters import (
    AdditionFilter,
    LateReferenceFilter,
    PrivacyFilter,
    ReferenceFilter,
    addition,
    from_json,
)
from accountant_service.ledger.rules import Balance, Dataset
from accountant_service.ledger.step_plan import StepPlan
from tests.support import kinds
from tests.support.filter_history import History
from tests.support.helpers import nightly, plan

RELATION = NeighbouringRelation.ADD_OR_REMOVE_ONE
Json = dict[str, Any]


def laplace(epsilon: str) -> StepPlan:
    return plan("laplace", noise_multiplier=float(1 / Fraction(epsilon)))


def pure(epsilon: str) -> StepPlan:
    return plan("approximate_dp", epsilon=float(epsilon), delta=0)


def training(steps: int = 1, *, rate: float = 0.01, sigma: float = 1.1) -> StepPlan:
    return plan("dp_sgd", sample_rate=rate, noise_multiplier=sigma, steps=steps)


def new(epsilon: float, delta: float) -> History:
    return History(LateReferenceFilter.of_budget(epsilon, delta, RELATION))


# --- exact sums


@pytest.mark.parametrize("make", [laplace, pure])
@pytest.mark.parametrize("filter_type", [AdditionFilter, LateReferenceFilter.of_budget])
def test_what_the_decimals_admit_is_admitted_in_any_order(
    make: Callable[[str], StepPlan], filter_type: Callable[..., PrivacyFilter]
) -> None:
    rng = random.Random(1)
    for _ in range(30):
        history, used = History(filter_type(1.0, 1e-6, RELATION)), Fraction()
        while True:
            amount = rng.choice(["0.05", "0.1", "0.2", "0.25"])
            used += Fraction(amount)
            assert history.spend(make(amount)) == (used <= 1), used
            if used > 1:
                break


def test_tenths_and_thirds_are_exact() -> None:
    for count in (3, 6, 7):
        history = new(count / 10, 1e-9)
        assert sum(history.spend(laplace("0.1")) for _ in range(count + 1)) == count
    history = new(1.0, 1e-6)
    assert sum(history.spend(plan("laplace", noise_multiplier=3.0)) for _ in range(4)) == 3


@pytest.mark.parametrize("amounts", [("0.1", "0.5"), ("0.5", "0.1"), ("0.1", "0.9")])
def test_the_order_does_not_decide(amounts: tuple[str, ...]) -> None:
    history = new(1.0, 1e-9)
    assert all(history.spend(pure(each)) for each in amounts)


def test_numbers_round_in_the_safe_direction() -> None:
    """A charge rounds up, the budget rounds down, and what is shown as spent rounds up."""
    for long in (Fraction(0.1), Fraction(1, 47)):
        units = addition.units_up(long)
        assert long <= Fraction(units, addition.UNITS) <= long * (1 + Fraction(3, 10**16))
        assert len(addition.write_units(units)) <= 22
    tiny = Fraction(1, 10**80)
    assert addition.units_up(tiny) == 1
    assert addition.units_down(1e-80) == 0
    assert addition.share_down(0.1, 19) == 1
    assert addition.epsilon_up(1) > 0
    third = addition.epsilon_up(addition.units_up(Fraction(1, 3)))
    assert Fraction(repr(third)) >= Fraction(1, 3)
    assert AdditionFilter(1.0, 1e-6, RELATION).share_of((1, 0)) > 0


@pytest.mark.parametrize(
    "text", ["0.30", "1e-8", "", "nan", "1/0", "1/47", 0.3, "1" * 500, "--1", "1e999999999"]
)
def test_an_amount_that_the_ledger_did_not_write_is_refused(text: object) -> None:
    with pytest.raises((TypeError, ValueError, ZeroDivisionError)):
        addition.read_units(text)  # type: ignore[arg-type]


def test_a_release_of_the_whole_budget_fits_an_empty_one() -> None:
    for policy in (AdditionFilter, LateReferenceFilter.of_budget):
        history = History(policy(1.0, 1e-6, RELATION))
        assert history.spend(plan("approximate_dp", epsilon=1.0, delta=1e-6))
        assert not history.spend(plan("approximate_dp", epsilon=0.0, delta=1e-30))


def test_a_run_by_addition_is_charged_as_a_whole_by_its_first_grant() -> None:
    policy = AdditionFilter(3.0, 1e-5, RELATION)
    charge = policy.compute_charge(training(1000), policy.nothing)
    assert charge.is_whole
    assert charge.spent(1) == charge.spent(1000) == charge.reserved
    assert charge.refund(0) == charge.reserved
    assert charge.refund(1) == (0, 0)
    too_low = replace(charge, epsilon=charge.epsilon * 9995 // 10000)
    assert not policy.is_charge_sufficient(training(1000), too_low)
    steps = policy.count_affordable_steps(training(), policy.nothing)
    assert steps is not None
    assert 0.75 * 3712 < steps <= 3712  # at a tenth of δ


# --- the late choice

TINY = {
    "a tiny rate": training(rate=1e-12, sigma=1e6),
    "a small rate": training(rate=1e-7, sigma=1000.0),
    "a noisy count": plan("discrete_laplace", scale=1000.0),
    "δ only": plan("approximate_dp", epsilon=0, delta=1e-8),
    "a weak release": plan("gdp", mu=1e-4),
    "a small ρ": plan("zcdp", rho=1e-8),
    "a rare response": plan(
        "poisson_sampled",
        sample_rate=1e-5,
        mechanism={"kind": "laplace", "noise_multiplier": 1.0},
    ),
}


@pytest.mark.parametrize("name", TINY)
def test_a_release_of_a_hundredth_takes_no_twentieth_from_others(name: str) -> None:
    history = new(3.0, 1e-5)
    assert history.spend(TINY[name])
    left = history.left(training())
    assert left is not None
    assert left >= 0.95 * 3712
    # the reference leaves room for what was added, and counts what is left exactly
    assert history.spend(training(left))
    assert not history.spend(training())


WEAK: dict[str, Callable[[float], Json]] = {  # a release of each kind with about this ε
    "laplace": lambda epsilon: kinds.laplace(1 / epsilon),
    "discrete_laplace": lambda epsilon: kinds.discrete_laplace(1 / epsilon),
    "truncated_laplace": lambda epsilon: kinds.truncated_laplace(1 / epsilon, 20 / epsilon),
    "randomized_response": lambda epsilon: kinds.randomized_response(
        2, 2 / (1 + math.exp(epsilon))
    ),
    "exponential": lambda epsilon: kinds.exponential(epsilon),
    "permute_and_flip": lambda epsilon: kinds.permute_and_flip(epsilon),
    "approximate_dp": lambda epsilon: kinds.approximate_dp(epsilon, epsilon * 1e-7),
    "gaussian": lambda epsilon: kinds.gaussian(5 / epsilon),
    "discrete_gaussian": lambda epsilon: kinds.discrete_gaussian(min(5 / epsilon, 1e4)),
    "gdp": lambda epsilon: kinds.gdp(epsilon / 5),
    "zcdp": lambda epsilon: kinds.zcdp(epsilon**2 / 50),
    "repeated": lambda epsilon: kinds.repeated(3, kinds.laplace(3 / epsilon)),
    "composed": lambda epsilon: kinds.composed(
        kinds.laplace(2 / epsilon), kinds.gaussian(10 / epsilon)
    ),
    "poisson_sampled": lambda epsilon: kinds.poisson(epsilon / 10, kinds.laplace(1.0)),
    "dp_sgd": lambda epsilon: kinds.dp_sgd(1.0, sample_rate=epsilon / 1000, steps=1),
}


def count_for_others(history: History, share: float) -> int:
    """Return how many ordinary steps a holder without any may reserve within a cap."""
    policy = history.policy.after_reserving(training(), history.taken)
    taken = policy.apply_cap(history.taken, share, policy.nothing)
    return policy.count_affordable_steps(training(), taken) or 0


@pytest.mark.parametrize("game", [1, *map(nightly, range(2, 40))])
@pytest.mark.slow
def test_no_small_release_of_any_kind_costs_others_a_twentieth(game: int) -> None:
    """With the whole budget, and within a cap: random amounts, of which small ones count."""
    rng, counted = random.Random(game), 0
    budget = rng.choice([(3.0, 1e-5), (5.0, 1e-6), (8.0, 1e-6)])
    fresh = {share: count_for_others(new(*budget), share) for share in (1.0, 0.5)}
    assert min(fresh.values()) > 20
    for name, make in WEAK.items():
        history = new(*budget)
        one = StepPlan.of(mechanisms.from_json(make(budget[0] * 10 ** rng.uniform(-4, -2))))
        if not history.spend(one) or history.policy.share_of(history.taken) > 0.01:
            continue
        counted += 1
        for share, before in fresh.items():
            assert count_for_others(history, share) >= 0.95 * before, (name, one.mechanism, share)
    assert counted >= len(WEAK) // 2


def test_the_reference_counts_what_addition_leaves() -> None:
    history = new(1.0, 1e-5)
    assert history.spend(pure("0.4"))
    assert history.spend(training(5))
    policy = history.policy
    assert isinstance(policy, LateReferenceFilter)
    rest = ReferenceFilter(0.6, 1e-5, RELATION).with_reference(training(), is_planned=False)
    assert policy.rest.steps == rest.steps
    assert policy.epsilon_of(history.taken) <= 1.0
    assert policy.is_sound()
    forged = policy.to_json() | {"added_epsilon": "0.5"}
    assert not from_json(forged, 1.0, 1e-5, RELATION).is_sound()
    # nothing of the reference was spent in a dataset whose run gave all of it back
    assert policy.may_be_replaced(policy.nothing)
    assert not policy.may_be_replaced(history.taken)


def test_runs_whose_composition_gains_set_the_reference() -> None:
    queries = plan("repeated", count=3, mechanism={"kind": "laplace", "noise_multiplier": 10.0})
    many = plan("repeated", count=1000, mechanism={"kind": "laplace", "noise_multiplier": 200.0})
    policy = LateReferenceFilter.of_budget(2.0, 1e-6, RELATION)
    assert policy.after_reserving(queries, policy.nothing).reference_part.reference is None
    chosen = policy.after_reserving(many, policy.nothing)
    assert chosen.reference_part.reference is not None
    assert chosen.reference_part.steps > 1000


def test_a_reference_that_is_never_used_up_is_refused() -> None:
    policy = LateReferenceFilter.of_budget(1e6, 0.9, RELATION)
    with pytest.raises(UnsuitableReferenceError, match="would not use it up"):
        policy._with_reference(training(rate=1e-9, sigma=1e4), (0, 0))  # private: no other way


def test_no_sentence_calls_the_steps_the_whole_budget_where_releases_are_added() -> None:
    history = new(1.0, 1e-5)
    assert history.spend(pure("0.1234567"))
    assert history.spend(training(50))
    policy = history.policy
    assert isinstance(policy, LateReferenceFilter)
    steps, said = policy.rest.steps, policy.description
    assert "ε = 0.1234567 " in said, "not rounded down"
    assert f"the rest is {steps} reference steps" in said
    held = Balance(history.taken, policy.nothing)
    dataset = Dataset("", "d", 1000, "record", policy, held, 1, "", 0)
    facts = facts_of_dataset(dataset, [], 0, 0)
    answers = " ".join(answer for *_, answer in nist_questions._mechanisms(facts))
    assert f"the budget is {steps}" not in said + answers
    assert f"the filter admits {steps} of it" in answers


def test_a_full_budget_refuses_runs_as_exhausted() -> None:
    history = new(1.0, 1e-6)
    assert history.spend(pure("1.0"))
    assert not history.spend(training(rate=1e-3))
    assert history.left(training(rate=1e-3)) == 0


def test_a_plan_whose_charge_is_not_known_in_time_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its amounts are not compared with a number that is small in the units of a sum."""

    def give_up(*_: object) -> None:
        raise ChargeUndecidedError("in this test no time suffices")

    monkeypatch.setattr(AdditionFilter, "compute_charge", give_up)
    monkeypatch.setattr(AdditionFilter, "count_affordable_steps", give_up)
    policy = AdditionFilter(3.0, 1e-5, RELATION)
    balance = Balance(policy.nothing, policy.nothing)
    dataset = Dataset("", "d", 1000, "record", policy, balance, 0, "", 0)
    found = plans.quote_plan(dataset, training(10).mechanism, (), 0.0)
    assert (found.fits, found.charged, found.affordable_steps) == (False, None, 0)


# --- the best adversary, on small mechanisms

Pair = tuple[tuple[float, float], ...]  # probability under P and under Q, of each outcome


def profile(pair: Pair, epsilon: float) -> float:
    return math.fsum(max(p - math.exp(epsilon) * q, 0.0) for p, q in pair)


def power(pair: Pair, times: int) -> Pair:
    found: Pair = ((1.0, 1.0),)
    for _ in range(times):
        found = tuple((p * a, q * b) for p, q in found for a, b in pair)
    return found


def count_steps(pair: Pair, epsilon: float, delta: float) -> int:
    times = 0
    while times < 6 and profile(power(pair, times + 1), epsilon) <= delta:
        times += 1
    return times


def best_adversary(
    small: Pair, small_epsilon: float, references: list[Pair], epsilon: float, delta: float,
    *, subtracts: bool,
) -> float:  # fmt: skip
    """Return the largest δ at ε: small releases first, then a reference chosen from the losses."""

    @cache
    def value(p: float, q: float, used: int, chosen: int, steps: int) -> float:
        best = max(p - math.exp(epsilon) * q, 0.0)
        if chosen < 0 and (used + 1) * small_epsilon <= epsilon:
            best = max(best, math.fsum(value(p * a, q * b, used + 1, -1, 0) for a, b in small))
        if chosen < 0:
            rest = epsilon - used * small_epsilon if subtracts else epsilon
            for at, each in enumerate(references):
                best = max(best, value(p, q, used, at, count_steps(each, rest, delta)))
        elif steps:
            pair = references[chosen]
            best = max(
                best, math.fsum(value(p * a, q * b, used, chosen, steps - 1) for a, b in pair)
            )
        return best

    return value(1.0, 1.0, 0, -1, 0)


def random_game(rng: random.Random) -> dict[str, Any]:
    small = rng.uniform(0.05, 0.4)
    likely = math.exp(small) / (1 + math.exp(small))
    references = []
    for _ in range(2):
        p = rng.uniform(0.01, 0.6)
        q = p * math.exp(-rng.uniform(0.1, 2.0))
        references.append(((p, q), (1 - p, 1 - q)))
    return {
        "small": ((likely, 1 - likely), (1 - likely, likely)),
        "small_epsilon": small,
        "references": references,
        "epsilon": rng.uniform(0.3, 1.0),
        "delta": 10 ** rng.uniform(-4, -1),
    }


@pytest.mark.parametrize("games", [60, nightly(20000)])
@pytest.mark.slow
def test_no_adversary_beats_a_reference_that_is_chosen_late(games: int) -> None:
    """And one that does not subtract what was added is beaten: the check can fail."""
    rng, beaten = random.Random(games), 0
    for _ in range(games):
        game = random_game(rng)
        delta = game["delta"]
        assert best_adversary(**game, subtracts=True) <= delta * (1 + 1e-9), game
        beaten += best_adversary(**game, subtracts=False) > delta * (1 + 1e-9)
    assert beaten > games / 10


def test_an_unknown_plan_is_refused_by_every_filter() -> None:
    shuffled = plan(
        "dp_sgd", dataset_size=1000, batch_size=10, noise_multiplier=1.1, epochs=1,
        sampling="shuffled",
    )  # fmt: skip
    for policy in (
        AdditionFilter(3.0, 1e-5, RELATION), LateReferenceFilter.of_budget(3.0, 1e-5, RELATION),
    ):  # fmt: skip
        with pytest.raises(CodedError):
            policy.after_reserving(shuffled, policy.nothing).compute_charge(
                shuffled, policy.nothing
            )


# --- the owner chooses the reference


def test_the_owner_s_reference_counts_what_addition_leaves_and_stays() -> None:
    history = new(1.0, 1e-5)
    assert history.spend(pure(".005"))
    chosen = history.policy.with_owner_reference(training(7), history.taken)
    own = chosen.reference_part
    assert own is not None
    assert own.reference == training().mechanism
    assert (own.is_planned, own.epsilon) == (True, 0.995)
    of_run = history.policy.after_reserving(training(100), history.taken).reference_part
    assert of_run is not None
    assert own.steps == of_run.steps
    assert history.policy.allows_owner_replacement(chosen, history.taken)
    assert chosen.admits(history.taken)
    assert from_json(chosen.to_json(), 1.0, 1e-5, RELATION) == chosen
    assert chosen.initial == history.policy.initial
    other = training(100, sigma=3)
    assert chosen.after_reserving(other, history.taken) == chosen
    assert not chosen.allows_replacement(
        history.policy.after_reserving(other, history.taken), other, history.taken
    )


def test_the_owner_confirms_the_reference_of_a_run_and_cannot_replace_it() -> None:
    history = new(1.0, 1e-5)
    assert history.spend(training(10))
    policy, taken = history.policy, history.taken
    assert isinstance(policy, LateReferenceFilter)
    confirmed = policy.with_owner_reference(training(), taken)
    assert replace(confirmed, rest=replace(confirmed.rest, is_planned=False)) == policy
    assert policy.allows_owner_replacement(confirmed, taken)
    with pytest.raises(ReferenceFixedError, match="another reference"):
        policy.with_owner_reference(training(sigma=3), taken)
    other = policy.initial.with_owner_reference(training(sigma=3), policy.nothing)
    assert not policy.allows_owner_replacement(other, taken)
    assert policy.allows_owner_replacement(other, policy.nothing)
    assert not policy.allows_owner_replacement(policy, taken), "nobody confirmed it"
    assert policy.allows_owner_reference(taken)
    assert not confirmed.allows_owner_reference(taken)


def test_a_reservation_cannot_pass_its_reference_off_as_the_owner_s() -> None:
    policy = new(1.0, 1e-5).policy
    forged = policy.with_owner_reference(training(), policy.nothing)
    assert policy.allows_owner_replacement(forged, policy.nothing)
    assert not policy.allows_replacement(forged, training(10), policy.nothing)


def test_a_larger_rest_than_addition_leaves_is_no_owner_s_reference() -> None:
    """The choice must subtract what was added: otherwise the budget is spent twice."""
    history = new(1.0, 1e-5)
    assert history.spend(pure(".3"))
    whole = history.policy.with_owner_reference(training(), history.policy.nothing)
    assert not whole.admits(history.taken)
    assert isinstance(whole, LateReferenceFilter)
    forged = replace(whole, added=history.taken[2:])
    assert not forged.is_sound()


@pytest.mark.parametrize(
    "policy",
    [
        AdditionFilter(1.0, 1e-5, RELATION),
        ReferenceFilter(1.0, 1e-5, RELATION),
        ReferenceFilter(1.0, 0.0, RELATION),
        ReferenceFilter(1.0, 1e-5, RELATION).with_reference(training(), is_planned=True),
    ],
)
def test_other_filters_have_no_reference_of_the_owner(policy: PrivacyFilter) -> None:
    assert not policy.allows_owner_reference(policy.nothing)
    assert not policy.allows_owner_replacement(policy, policy.nothing)
    with pytest.raises(ReferenceFixedError):
        policy.with_owner_reference(training(), policy.nothing)


def test_a_reference_that_nothing_fits_is_refused_to_the_owner() -> None:
    policy = new(1.0, 1e-5).policy
    with pytest.raises(UnsuitableReferenceError, match="would not use it up"):
        policy.with_owner_reference(training(rate=1e-12, sigma=1e6), policy.nothing)
    dataset = Dataset(
        "d", "d", 60_000, "record", policy, Balance(policy.nothing, policy.nothing), 1, "", 0
    )
    useless = mechanisms.from_json({"kind": "approximate_dp", "epsilon": 0.0, "delta": 1e-7})
    with pytest.raises(UnsuitableReferenceError, match="dominate no ordinary run"):
        plans.choose_reference(dataset, useless)
