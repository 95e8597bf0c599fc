"""One suite over every registered accountant."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant_service import calculator, mechanisms, solver
from accountant_service.accountants import ACCOUNTANTS
from accountant_service.errors import AccountingError, MethodNotApplicableError
from accountant_service.guarantee import Guarantee, NeighbouringRelation, Status
from accountant_service.mechanisms import DpSgd
from accountant_service.solver import Target
from tests.support.helpers import REPLACE, delta, epsilon, gaussian, question, run

METHODS = list(ACCOUNTANTS)
NEVER_PROVEN = {"adadp_rdp", "mma", "moments_accountant_closed_form", "gdp_clt"}
LAPLACE = {"kind": "laplace", "noise_multiplier": 2.0}

every_method = pytest.mark.parametrize("method", METHODS)


def upper(claim: Guarantee) -> float:
    return claim.epsilon


def lower(claim: Guarantee) -> float:
    """For the two-sided method a proved lower bound; for formulas the value itself."""
    return claim.certified.lower if claim.certified else claim.epsilon * (1 - 1e-9)


def ask(
    method: str,
    mechanism: dict[str, Any],
    at: float,
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE,
) -> Guarantee | AccountingError:
    """The answer, or why there is none."""
    try:
        return epsilon(method, mechanism, at, relation)
    except AccountingError as error:
        return error


@every_method
def test_every_method_has_its_name_source_and_needs(method: str) -> None:
    accountant = ACCOUNTANTS[method]
    assert accountant.name == method
    for text in (accountant.title, accountant.source, accountant.needs, accountant.proves):
        assert text
    assert type(accountant).__doc__


@every_method
def test_a_plain_run_gets_a_complete_answer(method: str) -> None:
    claim = epsilon(method, run(0.01, 2.0, 1000), 1e-5)
    assert 0 < claim.epsilon < math.inf
    assert claim.delta == 1e-5
    assert claim.method == method
    assert claim.assumptions
    assert claim.mechanism_hash.startswith("sha256:")
    assert claim.status is (Status.ESTIMATE if method in NEVER_PROVEN else Status.PROVEN)
    assert all(a.statement and a.source for a in claim.assumptions)


@every_method
@pytest.mark.parametrize(
    "nothing",
    [run(0.01, 1.0, 0), run(0.0, 1.0, 1000), {"kind": "composed", "mechanisms": []}],
    ids=["no-steps", "no-samples", "empty"],
)
def test_nothing_released_costs_nothing(method: str, nothing: dict[str, Any]) -> None:
    claim = epsilon(method, nothing, 1e-5)
    assert (claim.epsilon, claim.status) == (0.0, Status.PROVEN)
    assert delta(method, nothing, 1.0).delta == 0.0


@every_method
def test_without_sampling_the_result_is_that_of_the_gaussian_mechanism(method: str) -> None:
    claim = epsilon(method, run(1.0, 5.0, 10), 1e-5)
    exact = epsilon("pld", run(1.0, 5.0, 10), 1e-5)
    assert math.isfinite(claim.epsilon)
    if method not in NEVER_PROVEN:
        assert claim.epsilon >= lower(exact)


@every_method
@pytest.mark.parametrize("sigma", [0.01, 0.05, 0.2, 1000.0, 1e6])
@pytest.mark.parametrize("q", [1e-7, 0.01, 1.0])
def test_tiny_and_huge_noise_give_a_number_or_a_refusal(
    method: str, sigma: float, q: float
) -> None:
    for steps in (1, 10_000_000):
        claim = ask(method, run(q, sigma, steps), 1e-15)
        if isinstance(claim, AccountingError):
            assert claim.code in ("no-finite-epsilon", "too-expensive")
            assert claim.detail
        else:
            assert 0 <= claim.epsilon < math.inf


@every_method
def test_a_mechanism_without_a_formula_is_refused_with_its_pointer(method: str) -> None:
    mixture = {
        "kind": "poisson_sampled",
        "sample_rate": 0.1,
        "mechanism": {"kind": "composed", "mechanisms": [gaussian(1.0), LAPLACE]},
    }
    composed = {"kind": "composed", "mechanisms": [gaussian(4.0), mixture]}
    with pytest.raises(MethodNotApplicableError) as caught:
        epsilon(method, composed, 1e-5)
    assert caught.value.pointer is not None
    assert caught.value.pointer.startswith("/mechanisms/")
    assert method in str(caught.value)


@every_method
@pytest.mark.parametrize(
    "mechanism",
    [
        LAPLACE,
        {"kind": "composed", "mechanisms": [run(0.01, 1.0, 5), run(0.02, 2.0, 5)]},
        {"kind": "composed", "mechanisms": [run(0.01, 1.0, 5), LAPLACE]},
        run(0.01, 1.0, 100, sampling="shuffled"),
        {
            "kind": "dp_sgd",
            "noise_multiplier": 1.0,
            "dataset_size": 1000,
            "batch_size": 10,
            "steps": 50,
            "sampling": "fixed_size",
        },
        {"kind": "diagonal_gaussian", "sensitivities": [12, 6], "noise_stds": [17, 8.5]},
    ],
    ids=["laplace", "heterogeneous", "mixed", "shuffled", "fixed-size", "diagonal"],
)
@pytest.mark.parametrize("relation", list(NeighbouringRelation))
def test_every_combination_is_answered_or_refused_with_a_reason(
    method: str, mechanism: dict[str, Any], relation: NeighbouringRelation
) -> None:
    claim = ask(method, mechanism, 1e-5, relation)
    if isinstance(claim, AccountingError):
        assert isinstance(claim, MethodNotApplicableError)
        assert claim.pointer is not None
        return
    assert 0 <= claim.epsilon < math.inf
    certified = ask("pld", mechanism, 1e-5, relation)
    if isinstance(certified, Guarantee) and claim.status is Status.PROVEN:
        assert claim.epsilon >= lower(certified), "a proven claim below a proved lower bound"


@every_method
def test_shuffled_batches_are_not_proven_under_add_or_remove(method: str) -> None:
    shuffled = run(0.01, 1.0, 100, sampling="shuffled")
    claim = epsilon(method, shuffled, 1e-5)
    assert claim.status is Status.ESTIMATE
    assert any("shuffled" in a.statement and not a.holds for a in claim.assumptions)


@pytest.mark.parametrize("method", sorted(set(METHODS) - NEVER_PROVEN))
@pytest.mark.parametrize("relation", NeighbouringRelation)
@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "shuffled", "none", "balls_in_bins"])
def test_the_status_is_the_one_that_the_pages_of_the_methods_state(
    method: str, relation: NeighbouringRelation, sampling: str
) -> None:
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    replaced = relation is NeighbouringRelation.REPLACE_ONE
    zeroed = relation is NeighbouringRelation.ZERO_OUT_ONE
    sizes = {"dataset_size": 100, "batch_size": 100 if sampling == "none" else 10}
    mechanism = {"kind": "dp_sgd", "noise_multiplier": 4.0, "steps": 10, "sampling": sampling}
    claim = ask(method, mechanism | sizes, 1e-5, relation)
    if (method != "pld" and sampling == "balls_in_bins") or (
        method == "pld" and sampling == "fixed_size" and zeroed
    ):
        assert isinstance(claim, MethodNotApplicableError)
        return
    assert isinstance(claim, Guarantee)
    is_estimate = (sampling == "shuffled" and added) or (
        method == "moments_accountant"
        and (sampling == "fixed_size" or (sampling == "poisson" and replaced))
    )
    assert claim.status is (Status.ESTIMATE if is_estimate else Status.PROVEN)


def test_the_moments_accountant_claims_no_other_relation_than_the_one_asked_for() -> None:
    claim = epsilon("moments_accountant", run(1.0, 4.0, 10), 1e-5, REPLACE)
    assert claim.status is Status.PROVEN
    assert not any("added, removed" in each.statement for each in claim.assumptions)


@every_method
@pytest.mark.parametrize("relation", NeighbouringRelation)
@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "none"])
def test_sampled_runs_assume_a_public_number_of_records(
    method: str, relation: NeighbouringRelation, sampling: str
) -> None:
    """Only if a record more or less would change the number that sums are divided by."""
    sizes = {"dataset_size": 100, "batch_size": 100 if sampling == "none" else 1}
    mechanism = {"kind": "dp_sgd", "noise_multiplier": 4.0, "steps": 10, "sampling": sampling}
    claim = ask(method, mechanism | sizes, 1e-5, relation)
    if isinstance(claim, AccountingError):
        return
    said = [each for each in claim.assumptions if "number of records is public" in each.statement]
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    assert [each.holds for each in said] == ([True] if added and sampling != "none" else [])


def test_curves_and_trade_offs_say_what_they_assume() -> None:
    mechanism = mechanisms.from_json(run(0.01, 2.0, 100))
    assert isinstance(mechanism, DpSgd)
    _, curves = calculator.curve(mechanism, 1e-5, METHODS, 2)
    answers = [calculator.trade_off(mechanism, 0.5, 3), *curves]
    for each in answers:
        if not isinstance(each, calculator.NoAnswer):
            assert "number of records is public" in str(each.assumptions)


@pytest.mark.parametrize("method", [m for m in METHODS if m != "adadp_rdp"])
def test_replacing_a_record_costs_as_much_as_half_the_noise(method: str) -> None:
    """Of all methods but one, which takes σ as in the paper under either relation."""
    replaced = epsilon(method, run(1.0, 4.0, 10), 1e-5, NeighbouringRelation.REPLACE_ONE)
    halved = epsilon(method, run(1.0, 2.0, 10), 1e-5)
    assert replaced.epsilon == pytest.approx(halved.epsilon, rel=1e-9)


@every_method
def test_delta_inverts_epsilon(method: str) -> None:
    for q, sigma, steps, at in (
        (0.01, 2.0, 1000, 1e-5),
        (0.2, 3.0, 40, 1e-3),
        (1.0, 6.0, 30, 1e-7),
    ):
        claim = epsilon(method, run(q, sigma, steps), at)
        back = delta(method, run(q, sigma, steps), claim.epsilon)
        assert back.solved_for == "delta"
        assert back.epsilon == claim.epsilon
        assert back.delta == pytest.approx(at, rel=2e-2 if method == "pld" else 1e-6)
        again = epsilon(method, run(q, sigma, steps), min(back.delta * (1 + 1e-9), 0.5))
        assert again.epsilon <= claim.epsilon * (1 + 1e-3 if method == "pld" else 1 + 1e-8)


@every_method
def test_parts_composed_are_the_whole(method: str) -> None:
    whole = epsilon(method, run(0.02, 1.5, 300), 1e-6)
    parts = {"kind": "composed", "mechanisms": [run(0.02, 1.5, 100), run(0.02, 1.5, 200)]}
    assert epsilon(method, parts, 1e-6).epsilon == whole.epsilon


runs = st.tuples(
    st.floats(1e-4, 1.0),
    st.floats(0.4, 50.0),
    st.integers(1, 5000),
    st.floats(1e-10, 1e-2),
)


def costlier(method: str, cheap: dict[str, Any], dear: dict[str, Any], at: float) -> None:
    """`dear` costs at least as much as `cheap`, as far as the method can tell."""
    try:
        assert lower(epsilon(method, cheap, at)) <= upper(epsilon(method, dear, at)) * (1 + 1e-9)
    except AccountingError:
        return


@every_method
@settings(max_examples=12, deadline=None)
@given(point=runs, factor=st.floats(1.01, 4.0))
def test_epsilon_is_monotone(method: str, point: tuple[float, ...], factor: float) -> None:
    q, sigma, steps, at = point
    here = run(q, sigma, int(steps))
    costlier(method, run(q, sigma * factor, int(steps)), here, at)
    costlier(method, here, run(q, sigma, math.ceil(steps * factor)), at)
    costlier(method, here, run(min(1.0, q * factor), sigma, int(steps)), at)
    if method != "mma" or steps > -math.log(at):  # its formula turns around for few steps
        looser = epsilon(method, here, min(at * factor, 0.5))
        assert lower(looser) <= upper(epsilon(method, here, at)) * (1 + 1e-9)


@every_method
def test_mechanisms_of_equal_meaning_have_equal_guarantees(method: str) -> None:
    one = mechanisms.from_json(run(0.01, 2.0, 100))
    other = mechanisms.from_json(
        {
            "kind": "repeated",
            "count": 100,
            "mechanism": {
                "kind": "poisson_sampled",
                "sample_rate": 0.01,
                "mechanism": gaussian(2.0),
            },
        }
    )
    assert question(mechanisms.to_json(one)).form == question(mechanisms.to_json(other)).form


@every_method
def test_every_solver_ends_on_the_safe_side(method: str) -> None:
    loose = method in {"advanced_composition", "basic_composition", "optimal_composition"}
    target = Target(
        ACCOUNTANTS[method], NeighbouringRelation.ADD_OR_REMOVE_ONE, 5.0 if loose else 1.5, 1e-5
    )
    run_of = DpSgd(noise_multiplier=2.0, sample_rate=0.02, steps=40)

    noise = solver.noise_multiplier(run_of, target)
    assert noise.guarantee.epsilon <= target.epsilon
    less = replace(run_of, noise_multiplier=noise.value * 0.998)
    assert target.guarantee(less).epsilon > target.epsilon

    solved = replace(run_of, noise_multiplier=noise.value)
    steps = solver.steps(solved, target)
    assert steps.value >= 40
    assert steps.next is not None
    assert steps.guarantee.epsilon <= target.epsilon < steps.next.epsilon
    assert target.guarantee(replace(solved, steps=int(steps.value) + 1)) == steps.next

    rate = solver.sample_rate(solved, target)
    assert rate.guarantee.epsilon <= target.epsilon
    if rate.value < 1:
        more = replace(solved, sample_rate=min(1.0, rate.value * 1.002))
        assert target.guarantee(more).epsilon > target.epsilon
