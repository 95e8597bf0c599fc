"""The ledger's rules as a pure state machine, and the filter's charges."""

from __future__ import annotations

import math
import uuid
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from accountant_service.accountants import ACCOUNTANTS, Question
from accountant_service.errors import MethodNotApplicableError
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import privacy_filter, rules
from accountant_service.ledger.errors import (
    BudgetExhaustedError,
    ReservationClosedError,
    StaleSequenceError,
)
from accountant_service.ledger.plans import StepPlan
from accountant_service.ledger.privacy_filter import RenyiFilter, compute_cost
from accountant_service.ledger.rules import Balance, Change, Dataset, Reservation, State
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


def dataset(policy: RenyiFilter = POLICY, balance: Balance | None = None) -> Dataset:
    return Dataset("d", "d", 1000, "record", policy, balance or Balance(), 0, "0" * 64, 0)


def plan(unit: int, steps: int) -> Reservation:
    return Reservation(uuid.uuid4().hex, "d", State.OPEN, {}, "", unit, steps, 0, 10**18, "", "key")


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

    @rule(target=made, unit=st.integers(0, 10**17), steps=st.integers(1, 5000))
    def reserve(self, unit: int, steps: int) -> str:
        asked = plan(unit, steps)
        before = self.dataset.balance
        try:
            self.apply(rules.reserve(self.dataset, asked))
        except BudgetExhaustedError as error:
            possible = error.steps or 0
        else:
            self.granted[asked.identifier] = 0
            return asked.identifier
        assert before == self.dataset.balance
        assert possible < steps
        assert possible == 0 or rules.fits_budget(self.dataset, unit, possible)
        assert not rules.fits_budget(self.dataset, unit, possible + 1)
        return ""

    @rule(which=made, steps=st.integers(1, 3000), slip=st.sampled_from([0, 0, 0, 1]))
    def grant(self, which: str, steps: int, slip: int) -> None:
        if not which:
            return
        run = self.runs[which]
        try:
            self.apply(rules.grant(run, steps, run.steps_granted + slip))
        except StaleSequenceError:
            assert slip
        except ReservationClosedError:
            assert run.state is not State.OPEN
        except BudgetExhaustedError:
            assert run.steps_granted + steps > run.steps_reserved
        else:
            assert not slip
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
        assert balance.held >= 0
        assert balance.taken <= POLICY.budget
        spent = sum(
            compute_cost(self.runs[i].step_cost, steps) for i, steps in self.granted.items()
        )
        assert balance.spent == spent  # every granted step is charged, for good
        held = sum(run.held for run in self.runs.values() if run.state is State.OPEN)
        assert balance.held == held


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- the filter


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-6), (3.0, 1e-5), (10.0, 1e-7)])
def test_what_the_filter_admits_is_within_the_budget(epsilon: float, delta: float) -> None:
    """As many steps as fit, certified: at most ε, and not absurdly far below."""
    policy = privacy_filter.choose_filter(epsilon, delta, RELATION)
    for run in (
        DpSgd(1.1, sample_rate=0.01, steps=1),
        DpSgd(0.8, sample_rate=0.001, steps=1),
        DpSgd(20.0, sample_rate=1.0, steps=1, sampling="none"),
    ):
        step = canonical_form(run)
        steps = privacy_filter.count_affordable_steps(policy.step_cost(step), policy.budget)
        assert steps is not None
        assert compute_cost(policy.step_cost(step), steps) <= policy.budget
        assert compute_cost(policy.step_cost(step), steps + 1) > policy.budget
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
    unit = POLICY.step_cost(canonical_form(Gaussian(sigma)))
    assert divergence * 1e18 <= unit <= divergence * 1e18 * (1 + 1e-8)
    gain = math.log(order) - (order - 1) * math.log1p(-1 / order)
    allowed = POLICY.epsilon - (-math.log(POLICY.delta) - gain) / (order - 1)
    assert allowed * 1e6 - 1.1 <= POLICY.budget <= allowed * 1e6


def test_spent_budget_as_epsilon() -> None:
    assert POLICY.epsilon_of(0) == 0.0
    assert POLICY.epsilon_of(POLICY.budget) <= POLICY.epsilon
    assert POLICY.epsilon_of(POLICY.budget) > POLICY.epsilon - 1e-5
    assert POLICY.epsilon_of(POLICY.budget + 10) > POLICY.epsilon - 1e-9
    values = [POLICY.epsilon_of(n) for n in range(0, POLICY.budget, POLICY.budget // 50)]
    assert sorted(values) == values


def test_what_has_no_proof_is_not_charged() -> None:
    shuffled = DpSgd(1.0, sample_rate=0.01, steps=100, sampling="shuffled")
    with pytest.raises(MethodNotApplicableError, match="shuffled"):
        POLICY.step_cost(StepPlan.of(shuffled).step)


def test_a_planned_mechanism_gets_the_order_best_for_it() -> None:
    step = canonical_form(DpSgd(1.0, sample_rate=0.01, steps=1))
    own = privacy_filter.choose_filter(3.0, 1e-5, RELATION, step)
    general = privacy_filter.choose_filter(3.0, 1e-5, RELATION)

    def steps(policy: RenyiFilter) -> int:
        return privacy_filter.count_affordable_steps(policy.step_cost(step), policy.budget) or 0

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


# --- mutants: each makes the machine above fail


def fails() -> bool:
    machine = LedgerMachine
    try:
        from hypothesis.stateful import run_state_machine_as_test

        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=200, stateful_step_count=30, deadline=None, database=None,
                print_blob=False, phases=(Phase.generate,),  # the smallest example is not needed
            ),
        )  # fmt: skip
    except (AssertionError, ExceptionGroup, ReservationClosedError, BudgetExhaustedError):
        return True
    return False


def test_refunding_granted_steps_on_expiry_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = rules.close

    def generous(reservation: Reservation, state: State) -> Change | None:
        change = genuine(reservation, state)
        if change is None or state is not State.EXPIRED:
            return change
        spent = compute_cost(reservation.step_cost, reservation.steps_granted)
        return replace(change, balance=Balance(-spent, change.balance.held))

    monkeypatch.setattr(rules, "close", generous)
    assert fails()


def test_not_counting_what_is_held_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rules,
        "fits_budget",
        lambda d, unit, steps: d.balance.spent + compute_cost(unit, steps) <= d.policy.budget,
    )
    assert fails()


def test_ignoring_the_sequence_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = rules.grant
    monkeypatch.setattr(
        rules, "grant", lambda run, steps, _: genuine(run, steps, run.steps_granted)
    )
    assert fails()


def test_rounding_down_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "compute_cost", lambda unit, steps: unit * steps // 10**12)
    assert fails()


def plan_of(**fields: object) -> Reservation:
    plan = Reservation("r", "d", State.OPEN, {}, "", 10**15, 10, 0, 0, "", "k")
    return replace(plan, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, -1, -(10**12)])
def test_no_rule_grants_or_reserves_less_than_a_step(steps: int) -> None:
    dataset = Dataset("d", "d", 1, "record", POLICY, Balance(), 1, "", 0)
    rules.reserve(dataset, plan_of())
    with pytest.raises(rules.RuleError, match="steps must be at least 1"):
        rules.reserve(dataset, plan_of(steps_reserved=steps))
    with pytest.raises(rules.RuleError, match="steps must be at least 1"):
        rules.grant(plan_of(steps_granted=5), steps, 5)


@pytest.mark.parametrize(("field", "value"), [("step_cost", -1), ("expires_at", -1)])
def test_no_rule_reserves_at_a_negative_price_or_before_1970(field: str, value: int) -> None:
    dataset = Dataset("d", "d", 1, "record", POLICY, Balance(), 1, "", 0)
    with pytest.raises(rules.RuleError, match=f"at least 0, not {value}"):
        rules.reserve(dataset, plan_of(**{field: value}))
