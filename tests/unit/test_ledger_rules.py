"""The ledger's rules as a pure state machine, and the filter's charges."""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import ACCOUNTANTS, Question
from accountant_service.errors import MethodNotApplicableError
from accountant_service.ledger import rules
from accountant_service.ledger.errors import (
    BudgetExhaustedError,
    ChargeOutdatedError,
    ReservationClosedError,
    StaleSequenceError,
)
from accountant_service.ledger.filters import PrivacyFilter, ReferenceFilter, RenyiFilter, renyi
from accountant_service.ledger.filters.base import Amounts, Charge, add, negate
from accountant_service.ledger.filters.reference import SLACK_UNITS, ReferenceCharge
from accountant_service.ledger.filters.renyi import RenyiCharge, compute_cost
from accountant_service.ledger.rules import Balance, Change, Dataset, Reservation, State
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import (
    Composed,
    DpSgd,
    Gaussian,
    Laplace,
    Repeated,
    canonical_form,
)

RELATION = NeighbouringRelation.ADD_OR_REMOVE_ONE
POLICY = RenyiFilter(8.0, 3.0, 1e-5, RELATION)
REFERENCE = ReferenceFilter(
    3.0, 1e-5, RELATION, DpSgd(1.1, sample_rate=0.01, steps=1), steps=1000, is_planned=True
)
SLACKS = (0, 1, SLACK_UNITS // 16, SLACK_UNITS // 3, SLACK_UNITS // 2 + 1, SLACK_UNITS)


def dataset(policy: PrivacyFilter = POLICY, balance: Balance | None = None) -> Dataset:
    nothing = Balance(policy.nothing, policy.nothing)
    return Dataset("d", "d", 1000, "record", policy, balance or nothing, 0, "0" * 64, 0)


def plan(charge: Charge) -> Reservation:
    return Reservation(
        uuid.uuid4().hex,
        "d",
        State.OPEN,
        {},
        "",
        charge,
        charge.steps,
        0,
        10**18,
        "",
        "key",
        None,
        charge.reserved,
    )


def try_grant(
    run: Reservation, steps: int, slip: int, apply: Callable[[Change | None], None]
) -> bool:
    """Grant steps, the sequence off by `slip`; return whether they were, else check the reason."""
    try:
        apply(rules.grant(run, steps, run.steps_granted + slip))
    except StaleSequenceError:
        assert slip
    except ReservationClosedError:
        assert run.state is not State.OPEN
    except BudgetExhaustedError:
        assert run.steps_granted + steps > run.steps_reserved
    else:
        assert not slip
        return True
    return False


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of requests, granted or refused: never more than the budget."""

    made = Bundle("made")

    @initialize()
    def begin(self) -> None:
        self.dataset = dataset()
        self.runs: dict[str, Reservation] = {}
        self.granted: dict[str, int] = {}

    def apply(self, change: Change | None) -> None:
        if change is not None:
            balance = self.dataset.balance.plus(change.balance)
            self.dataset = replace(self.dataset, balance=balance)
            self.runs[change.reservation.identifier] = change.reservation

    @rule(
        target=made,
        unit=st.one_of(st.integers(10**14, 10**15), st.integers(0, 10**17)),
        steps=st.integers(1, 5000),
    )
    def reserve(self, unit: int, steps: int) -> str:
        asked = plan(RenyiCharge(steps, (unit,)))
        before = self.dataset.balance
        try:
            self.apply(rules.reserve(self.dataset, asked, POLICY))
        except BudgetExhaustedError:
            possible = POLICY.count_steps((unit,), before.taken) or 0
        else:
            self.granted[asked.identifier] = 0
            return asked.identifier
        assert before == self.dataset.balance
        assert possible < steps
        assert possible == 0 or rules.fits_budget(self.dataset, RenyiCharge(possible, (unit,)))
        assert not rules.fits_budget(self.dataset, RenyiCharge(possible + 1, (unit,)))
        return ""

    @rule(which=made, steps=st.integers(1, 3000), slip=st.sampled_from([0, 0, 0, 1]))
    def grant(self, which: str, steps: int, slip: int) -> None:
        if which and try_grant(self.runs[which], steps, slip, self.apply):
            self.granted[which] += steps

    @rule(which=made, state=st.sampled_from([State.COMMITTED, State.RELEASED, State.EXPIRED]))
    def close(self, which: str, state: State) -> None:
        if not which:
            return
        run = self.runs[which]
        try:
            self.apply(rules.close(run, state))
        except ReservationClosedError:
            assert run.state not in (State.OPEN, state)
        else:
            assert self.runs[which].state is state

    @invariant()
    def nothing_is_overspent(self) -> None:
        balance = self.dataset.balance
        assert balance.held >= (0,)
        assert balance.taken <= (POLICY.budget,)
        spent = 0
        for identifier, steps in self.granted.items():
            charge = self.runs[identifier].charge
            assert isinstance(charge, RenyiCharge)
            spent += compute_cost(charge.step_costs[0], steps)
        assert balance.spent == (spent,)  # every granted step is charged, for good
        assert balance.held == sum_of_held(self.runs.values(), POLICY)


def sum_of_held(runs: Iterable[Reservation], policy: PrivacyFilter) -> Amounts:
    return reduce(add, (run.held for run in runs if run.state is State.OPEN), policy.nothing)


@dataclass
class Exchanged:
    """The amounts that a run took of a stack, counted apart from the ledger's own arithmetic."""

    charge: ReferenceCharge
    granted: int = 0
    spent: Amounts = (0, 0)

    def grant(self, steps: int) -> None:
        """Take the share of the reference steps that all granted steps are, and the slack."""
        self.granted += steps
        share = Fraction(self.charge.reference_steps * self.granted, self.charge.steps)
        self.spent = math.ceil(share), self.charge.slack

    @property
    def held(self) -> Amounts:
        """The amounts that no step has taken yet."""
        whole = self.charge.slack + self.charge.return_slack
        return self.charge.reference_steps - self.spent[0], whole - self.spent[1]


class ReferenceMachine(RuleBasedStateMachine):
    """Any sequence of exchanges, grants and early ends: never more than the stack and the slack."""

    made = Bundle("made")

    @initialize()
    def begin(self) -> None:
        self.dataset = dataset(REFERENCE)
        self.runs: dict[str, Reservation] = {}
        self.counted: dict[str, Exchanged] = {}
        self.spent_before = REFERENCE.nothing

    def apply(self, change: Change | None) -> None:
        assert change is not None
        balance = self.dataset.balance.plus(change.balance)
        self.dataset = replace(self.dataset, balance=balance)
        self.runs[change.reservation.identifier] = change.reservation

    @rule(
        target=made,
        steps=st.integers(1, 500),
        reference_steps=st.one_of(st.integers(0, 40), st.integers(0, 600)),
        slack=st.sampled_from(SLACKS),
        return_slack=st.sampled_from(SLACKS),
        is_reference=st.booleans(),
    )
    def reserve(
        self, steps: int, reference_steps: int, slack: int, return_slack: int, is_reference: bool
    ) -> str:
        charge = ReferenceCharge(steps, reference_steps, slack, return_slack)
        if is_reference:
            charge = ReferenceCharge(steps, steps, is_reference=True)
        asked, before = plan(charge), self.dataset.balance
        taken = add(before.taken, Exchanged(charge).held)
        try:
            self.apply(rules.reserve(self.dataset, asked, REFERENCE))
        except BudgetExhaustedError:
            assert before == self.dataset.balance
            assert taken[0] > REFERENCE.steps or taken[1] > SLACK_UNITS
            return ""
        self.counted[asked.identifier] = Exchanged(charge)
        return asked.identifier

    @rule(which=made, steps=st.integers(1, 300), slip=st.sampled_from([0, 0, 0, 1]))
    def grant(self, which: str, steps: int, slip: int) -> None:
        if which and try_grant(self.runs[which], steps, slip, self.apply):
            self.counted[which].grant(steps)

    @rule(
        which=made,
        state=st.sampled_from([State.COMMITTED, State.RELEASED, State.EXPIRED]),
        share=st.fractions(0, Fraction(5, 4), max_denominator=8),
        slack_returned=st.booleans(),
    )
    def close(self, which: str, state: State, share: Fraction, slack_returned: bool) -> None:
        if not which:
            return
        run, counted = self.runs[which], self.counted[which]
        held = counted.held
        offered = (math.ceil(share * held[0]), held[1] if slack_returned else 0)
        if run.state is not State.OPEN:
            with contextlib.suppress(ReservationClosedError):
                assert rules.close(run, state, offered) is None
                assert run.state is state
            return
        if run.refund_if_ended is None and slack_returned:  # first without, then with it
            with pytest.raises(ChargeOutdatedError):
                rules.close(run, state)
        try:
            change = rules.close(run, state, offered)
        except rules.RuleError:
            assert offered[0] > held[0]
            return
        assert change is not None
        self.apply(change)
        self.check_end(counted, change, offered)

    def check_end(self, counted: Exchanged, change: Change, offered: Amounts) -> None:
        """Check what an end gave back; note what it spent."""
        charge, held = counted.charge, counted.held
        returned = negate(add(change.balance.spent, change.balance.held))
        assert all(0 <= given <= most for given, most in zip(returned, held, strict=True))
        if counted.granted in (0, charge.steps) or not charge.reference_steps:
            assert returned == held  # nothing was exchanged, or nothing is left to exchange back
        elif charge.is_reference:
            assert returned == (charge.steps - counted.granted, 0)
        else:
            assert returned == offered
        counted.spent = add(counted.spent, tuple(np.subtract(held, returned).tolist()))

    @invariant()
    def nothing_is_overspent(self) -> None:
        balance = self.dataset.balance
        assert REFERENCE.admits(balance.taken)
        assert balance.taken[0] <= REFERENCE.steps
        assert balance.taken[1] <= SLACK_UNITS
        assert min(balance.held) >= 0
        spent = [counted.spent for counted in self.counted.values()]
        assert balance.spent == reduce(add, spent, REFERENCE.nothing)
        open_runs = [self.counted[i].held for i, r in self.runs.items() if r.state is State.OPEN]
        assert balance.held == reduce(add, open_runs, REFERENCE.nothing)
        assert balance.held == sum_of_held(self.runs.values(), REFERENCE)

    @invariant()
    def what_is_spent_stays_spent(self) -> None:
        spent = self.dataset.balance.spent
        assert spent[0] >= self.spent_before[0]
        assert spent[1] >= self.spent_before[1]
        self.spent_before = spent


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestReferenceMachine = ReferenceMachine.TestCase
TestReferenceMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- the filter


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-6), (3.0, 1e-5), (10.0, 1e-7)])
def test_what_the_filter_admits_is_within_the_budget(epsilon: float, delta: float) -> None:
    """As many steps as fit, certified: at most ε, and not absurdly far below."""
    policy = renyi.choose_filter(epsilon, delta, RELATION)
    for run in (
        DpSgd(1.1, sample_rate=0.01, steps=1),
        DpSgd(0.8, sample_rate=0.001, steps=1),
        DpSgd(20.0, sample_rate=1.0, steps=1, sampling="none"),
    ):
        step = canonical_form(run)
        (cost,) = policy.step_costs(step)
        steps = policy.count_steps((cost,), policy.nothing)
        assert steps is not None
        assert compute_cost(cost, steps) <= policy.budget
        assert compute_cost(cost, steps + 1) > policy.budget
        if steps == 0:
            continue
        question = Question(step.repeated(steps), RELATION)
        certified = ACCOUNTANTS["pld"].epsilon(question, delta).certified
        assert certified is not None
        assert certified.upper <= epsilon
        if epsilon >= 3:
            assert certified.upper > 0.8 * epsilon


def test_many_small_grants_cost_what_one_large_one_does() -> None:
    unit = 123_456_789_012_345
    pieces = [compute_cost(unit, n + 1) - compute_cost(unit, n) for n in range(1000)]
    assert sum(pieces) == compute_cost(unit, 1000)
    assert compute_cost(unit, 1) * 10**12 >= unit  # and up, never down


def test_a_charge_is_at_least_the_divergence_and_the_budget_at_most_what_is_allowed() -> None:
    sigma, order = 2.0, 8.0
    divergence = order / (2 * sigma**2)
    (unit,) = POLICY.step_costs(canonical_form(Gaussian(sigma)))
    assert divergence * 1e18 <= unit <= divergence * 1e18 * (1 + 1e-8)
    gain = math.log(order) - (order - 1) * math.log1p(-1 / order)
    allowed = POLICY.epsilon - (-math.log(POLICY.delta) - gain) / (order - 1)
    assert allowed * 1e6 - 1.1 <= POLICY.budget <= allowed * 1e6


def test_spent_budget_as_epsilon() -> None:
    assert POLICY.epsilon_of((0,)) == 0.0
    assert POLICY.epsilon_of((POLICY.budget,)) <= POLICY.epsilon
    assert POLICY.epsilon_of((POLICY.budget,)) > POLICY.epsilon - 1e-5
    assert POLICY.epsilon_of((POLICY.budget + 10,)) > POLICY.epsilon - 1e-9
    values = [POLICY.epsilon_of((n,)) for n in range(0, POLICY.budget, POLICY.budget // 50)]
    assert sorted(values) == values


def test_a_mechanism_without_a_proof_is_not_charged() -> None:
    shuffled = DpSgd(1.0, sample_rate=0.01, steps=100, sampling="shuffled")
    with pytest.raises(MethodNotApplicableError, match="shuffled"):
        POLICY.step_costs(StepPlan.of(shuffled).step)


def test_a_planned_mechanism_gets_the_order_best_for_it() -> None:
    step = canonical_form(DpSgd(1.0, sample_rate=0.01, steps=1))
    own = renyi.choose_filter(3.0, 1e-5, RELATION, step)
    general = renyi.choose_filter(3.0, 1e-5, RELATION)

    def steps(policy: RenyiFilter) -> int:
        return policy.count_steps(policy.step_costs(step), policy.nothing) or 0

    assert steps(own) > steps(general) > 0.5 * steps(own)
    others = [replace(own, order=order) for order in np.geomspace(2, 60, 80)]
    assert max(map(steps, others)) <= 1.01 * steps(own)


@pytest.mark.parametrize(
    ("mechanism", "steps"),
    [
        (DpSgd(1.0, sample_rate=0.1, steps=70), 70),
        (DpSgd(1.0, dataset_size=1000, batch_size=100, epochs=2.5), 25),
        (Repeated(9, Laplace(2.0)), 9),
        (Gaussian(3.0), 1),
        (Composed((Gaussian(3.0), Laplace(1.0))), 1),
        (Repeated(0, Gaussian(1.0)), 1),
    ],
)
def test_steps_of_a_plan(mechanism: object, steps: int) -> None:
    found = StepPlan.of(mechanism)  # type: ignore[arg-type]
    assert found.steps == steps
    if found.canonical.atom_counts:
        assert found.step.repeated(steps).hash == found.canonical.hash


# --- mutants: each makes a machine above fail


def generous_close(
    run: Reservation, state: State, returned: Amounts | None = None, close: Any = rules.close
) -> Change | None:
    """Refund the granted steps of a lease that ends."""
    change = close(run, state, returned)
    if change is None or state is not State.EXPIRED:
        return change
    spent = run.charge.spent(run.steps_granted)
    return replace(change, balance=Balance(negate(spent), change.balance.held))


def fits_without_held(of: Dataset, charge: Charge) -> bool:
    return of.policy.admits(add(of.balance.spent, charge.reserved))


def grant_at_any_sequence(run: Reservation, steps: int, _: int, grant: Any = rules.grant) -> Change:
    return grant(run, steps, run.steps_granted)


def return_more_than_is_held(condition: bool, message: str) -> None:
    if not condition and "can be returned" not in message:
        raise rules.RuleError(message)


def spend_no_slack(
    charge: ReferenceCharge, granted: int, spent: Any = ReferenceCharge.spent
) -> Any:
    return spent(charge, granted)[0], 0


def spend_rounded_down(charge: ReferenceCharge, granted: int) -> Amounts:
    if granted == 0:
        return 0, 0
    return charge.reference_steps * granted // charge.steps, charge.slack


def admit_any_slack(policy: ReferenceFilter, taken: Amounts) -> bool:
    return taken[0] <= policy.steps


BOTH, SLOW = (LedgerMachine, ReferenceMachine), pytest.mark.slow
EXCHANGES = (ReferenceMachine,)
MUTANTS = [
    pytest.param(rules, "close", generous_close, BOTH, marks=SLOW),
    (rules, "fits_budget", fits_without_held, BOTH),
    (rules, "grant", grant_at_any_sequence, BOTH),
    (renyi, "compute_cost", lambda unit, steps: unit * steps // 10**12, (LedgerMachine,)),
    # private: what is broken here is the check itself
    pytest.param(rules, "_require", return_more_than_is_held, EXCHANGES, marks=SLOW),
    (ReferenceCharge, "refund", lambda charge, granted: charge.held(granted), EXCHANGES),
    (ReferenceCharge, "spent", spend_no_slack, EXCHANGES),
    (
        ReferenceCharge, "reserved",
        property(lambda charge: (charge.reference_steps, charge.slack)), EXCHANGES,
    ),
    (ReferenceFilter, "admits", admit_any_slack, EXCHANGES),
    (ReferenceCharge, "spent", spend_rounded_down, EXCHANGES),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "mutant", "machines"), MUTANTS)
def test_a_mutant_would_be_caught(
    owner: Any,
    name: str,
    mutant: Any,
    machines: tuple[type[RuleBasedStateMachine], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    for machine in machines:
        with pytest.raises(
            (AssertionError, ExceptionGroup, ReservationClosedError, BudgetExhaustedError)
        ):
            run_state_machine_as_test(machine, settings=settings(
                max_examples=2000, stateful_step_count=30, deadline=None, database=None,
                print_blob=False, phases=(Phase.generate,),  # the smallest example is not needed
            ))  # fmt: skip


def plan_of(**fields: object) -> Reservation:
    charge = RenyiCharge(10, (10**15,))
    plan = Reservation(
        "r", "d", State.OPEN, {}, "", charge, 10, 0, 0, "", "k", None, charge.reserved
    )
    return replace(plan, **fields)  # type: ignore[arg-type]


def test_no_rule_grants_or_reserves_less_than_a_step() -> None:
    rules.reserve(dataset(), plan_of(), POLICY)
    for steps in (0, -1, -(10**12)):
        with pytest.raises(rules.RuleError, match="steps must be at least 1"):
            rules.reserve(dataset(), plan_of(steps_reserved=steps), POLICY)
        with pytest.raises(rules.RuleError, match="steps must be at least 1"):
            rules.grant(plan_of(steps_granted=5), steps, 5)


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        (POLICY, {"charge": RenyiCharge(10, (-(10**12),))}),
        (POLICY, {"expires_at": -1}),
        (REFERENCE, {"charge": ReferenceCharge(10, -1)}),
        (REFERENCE, {"charge": ReferenceCharge(10, 1, -1)}),
        (REFERENCE, {"charge": ReferenceCharge(10, 1, 5, -6)}),
        (REFERENCE, {"charge": ReferenceCharge(10, 1, -5, 6)}),
        (REFERENCE, {"charge": ReferenceCharge(10, 1, 6, -5)}),
    ],
)
def test_no_rule_reserves_at_a_negative_price_or_before_1970(
    policy: PrivacyFilter, fields: dict[str, object]
) -> None:
    with pytest.raises(rules.RuleError, match="at least 0, not"):
        rules.reserve(dataset(policy), plan_of(**fields), policy)


# --- the reference


def test_only_an_untouched_dataset_takes_another_reference() -> None:
    """A reservation that lost the race for the reference is charged again, never admitted."""
    other = replace(REFERENCE, reference=Gaussian(30.0), steps=50, is_planned=False)
    fixed = replace(REFERENCE, is_planned=False)
    asked = plan(ReferenceCharge(20, 20, is_reference=True))
    change = rules.reserve(dataset(fixed), asked, other)
    assert change.policy == other
    for balance in (Balance((0, 0), (1, 0)), Balance((1, 0), (0, 0)), Balance((0, 1), (0, 0))):
        with pytest.raises(ChargeOutdatedError):
            rules.reserve(dataset(fixed, balance), asked, other)
    with pytest.raises(BudgetExhaustedError):  # the new filter counts, not the old one
        rules.reserve(dataset(fixed), plan(ReferenceCharge(51, 51, is_reference=True)), other)


def test_the_stack_and_all_slack_together_are_within_delta() -> None:
    for delta, share in product((1e-5, 3e-7, 0.013, 5e-324, 1e-300), (0.01, 0.1, 0.7, 1 / 3)):
        policy = replace(REFERENCE, delta=delta, slack_share=share)
        whole = Fraction(policy._steps_delta) + Fraction(policy._slack_delta(SLACK_UNITS))
        assert whole <= Fraction(delta)
        parts = 2 * Fraction(policy._slack_delta(SLACK_UNITS // 2))
        slack = Fraction(policy._slack_delta(SLACK_UNITS))
        assert parts <= slack or parts <= Fraction(delta * share)
