"""One suite over every registered accountant."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from accountant_service import mechanisms
from accountant_service.accounting import calculator, solver
from accountant_service.accounting.guarantee import Guarantee, NeighbouringRelation, Status
from accountant_service.accounting.methods import ACCOUNTANTS
from accountant_service.accounting.solver import Target
from accountant_service.errors import AccountingError, MethodNotApplicableError
from accountant_service.mechanisms import DpSgd
from tests.support.helpers import delta, epsilon, log_uniform, run
from tests.support.kind_rows import ROWS, exact_delta
from tests.support.kinds import (
    ADDED,
    REPLACED,
    ZEROED,
    Json,
    composed,
    diagonal_gaussian,
    dp_sgd,
    gaussian,
    hash_of,
    laplace,
    poisson,
    repeated,
)
from tests.support.pairwise import pairwise

METHODS = list(ACCOUNTANTS)
NEVER_PROVEN = {"adadp_rdp", "mma", "moments_accountant_closed_form", "gdp_clt"}
SAMPLINGS = ["poisson", "fixed_size", "shuffled", "none", "balls_in_bins"]

every_method = pytest.mark.parametrize("method", METHODS)


def lower(claim: Guarantee) -> float:
    """For the two-sided method a proved lower bound; for formulas the value itself."""
    return claim.certified.lower if claim.certified else claim.epsilon * (1 - 1e-9)


def ask(
    method: str, document: Json, at: float, relation: NeighbouringRelation = ADDED
) -> Guarantee | AccountingError:
    """The answer, or why there is none."""
    try:
        return epsilon(method, document, at, relation)
    except AccountingError as error:
        return error


def sampled_run(sampling: str) -> Json:
    batch = 100 if sampling == "none" else 10
    sizes = {"dataset_size": 100, "batch_size": batch, "steps": 10}
    return dp_sgd(4.0, sampling=sampling, **sizes)


# --- one case of each method


@every_method
def test_a_plain_run_gets_a_complete_answer(method: str) -> None:
    accountant = ACCOUNTANTS[method]
    assert accountant.name == method
    for text in (accountant.title, accountant.source, accountant.needs, accountant.proves):
        assert text
    assert type(accountant).__doc__
    claim = epsilon(method, run(0.01, 2.0, 1000), 1e-5)
    assert 0 < claim.epsilon < math.inf
    assert claim.delta == 1e-5
    assert claim.method == method
    assert claim.assumptions
    assert claim.mechanism_hash.startswith("sha256:")
    assert claim.status is (Status.ESTIMATE if method in NEVER_PROVEN else Status.PROVEN)
    assert all(a.statement and a.source for a in claim.assumptions)
    check_inverse(method, run(0.01, 2.0, 1000), 1e-5)


def check_inverse(method: str, document: Json, at: float) -> None:
    """δ at the ε of δ is δ, and ε there is no more than before."""
    claim = epsilon(method, document, at)
    back = delta(method, document, claim.epsilon)
    assert back.solved_for == "delta"
    assert back.epsilon == claim.epsilon
    assert back.delta == pytest.approx(at, rel=2e-2 if method == "pld" else 1e-6)
    again = epsilon(method, document, min(back.delta * (1 + 1e-9), 0.5))
    assert again.epsilon <= claim.epsilon * (1 + 1e-3 if method == "pld" else 1 + 1e-8)


@every_method
def test_runs_of_equal_meaning_cost_the_same(method: str) -> None:
    for nothing in (run(0.01, 1.0, 0), run(0.0, 1.0, 1000), composed()):
        claim = epsilon(method, nothing, 1e-5)
        assert (claim.epsilon, claim.status) == (0.0, Status.PROVEN)
        assert delta(method, nothing, 1.0).delta == 0.0
    parts = composed(run(0.02, 1.5, 100), run(0.02, 1.5, 200))
    whole = epsilon(method, run(0.02, 1.5, 300), 1e-6)
    assert epsilon(method, parts, 1e-6).epsilon == whole.epsilon
    assert hash_of(run(0.01, 2.0, 100)) == hash_of(repeated(100, poisson(0.01, gaussian(2.0))))
    unsampled = epsilon(method, run(1.0, 5.0, 10), 1e-5)
    assert math.isfinite(unsampled.epsilon)
    if method not in NEVER_PROVEN:
        assert unsampled.epsilon >= lower(epsilon("pld", run(1.0, 5.0, 10), 1e-5))
    if method != "adadp_rdp":  # it takes σ as in the paper under either relation
        replaced = epsilon(method, run(1.0, 4.0, 10), 1e-5, REPLACED)
        halved = epsilon(method, run(1.0, 2.0, 10), 1e-5)
        assert replaced.epsilon == pytest.approx(halved.epsilon, rel=1e-9)


@every_method
def test_a_mechanism_without_a_formula_is_refused_with_its_pointer(method: str) -> None:
    mixture = poisson(0.1, composed(gaussian(1.0), laplace(2.0)))
    with pytest.raises(MethodNotApplicableError) as caught:
        epsilon(method, composed(gaussian(4.0), mixture), 1e-5)
    assert caught.value.pointer is not None
    assert caught.value.pointer.startswith("/mechanisms/")
    assert method in str(caught.value)


@every_method
def test_shuffled_batches_are_not_proven_under_add_or_remove(method: str) -> None:
    claim = epsilon(method, run(0.01, 1.0, 100, sampling="shuffled"), 1e-5)
    assert claim.status is Status.ESTIMATE
    assert any("shuffled" in a.statement and not a.holds for a in claim.assumptions)


def test_the_moments_accountant_claims_no_other_relation_than_the_one_asked_for() -> None:
    claim = epsilon("moments_accountant", run(1.0, 4.0, 10), 1e-5, REPLACED)
    assert claim.status is Status.PROVEN
    assert not any("added, removed" in each.statement for each in claim.assumptions)


def test_curves_and_trade_offs_say_what_they_assume() -> None:
    mechanism = mechanisms.from_json(run(0.01, 2.0, 100))
    assert isinstance(mechanism, DpSgd)
    _, curves = calculator.curve(mechanism, 1e-5, METHODS, 2)
    for each in (calculator.trade_off(mechanism, 0.5, 3), *curves):
        if not isinstance(each, calculator.NoAnswer):
            assert "number of records is public" in str(each.assumptions)


# --- every two of method, mechanism, relation and δ

MIXED = [
    laplace(2.0),
    composed(run(0.01, 1.0, 5), run(0.02, 2.0, 5)),
    composed(run(0.01, 1.0, 5), laplace(2.0)),
    run(0.01, 1.0, 100, sampling="shuffled"),
    sampled_run("fixed_size"),
    diagonal_gaussian([12, 6], [17, 8.5]),
]
FIRST = {row.mechanism["kind"]: row for row in reversed(ROWS)}  # a kind's first row
COMPARED = [*FIRST.values(), *(row for row in ROWS if row.lost and row not in FIRST.values())]
RELATIONS = [ADDED, REPLACED, ZEROED]
NOISE = {"sigma": [0.01, 0.05, 0.2, 1000.0, 1e6], "q": [1e-7, 0.01, 1.0], "steps": [1, 10_000_000]}
POINTS = {
    "q": [1e-3, 0.05, 0.7],
    "sigma": [0.5, 2.0, 20.0],
    "steps": [1, 100, 3000],
    "at": [1e-9, 1e-5, 1e-3],
}


def cover(method: str, axes: dict[str, list[Any]]) -> list[Json]:
    """The cases of a method in the cover of pairs with all methods."""
    cases = pairwise(method=METHODS, **axes)
    return [
        {k: v for k, v in case.items() if k != "method"}
        for case in cases
        if case["method"] == method
    ]


def products(axes: dict[str, list[Any]]) -> list[Json]:
    return [dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values())]


def check_claim(method: str, document: Json, relation: NeighbouringRelation, at: float) -> None:
    """A number or a refusal with its place; a proven number is above a proved lower bound."""
    claim = ask(method, document, at, relation)
    if isinstance(claim, AccountingError):
        assert isinstance(claim, MethodNotApplicableError)
        assert claim.pointer is not None
        return
    assert 0 <= claim.epsilon < math.inf
    certified = ask("pld", document, at, relation)
    if isinstance(certified, Guarantee) and claim.status is Status.PROVEN:
        assert claim.epsilon >= lower(certified), "a proven claim below a proved lower bound"


def check_truth(method: str, row: Any, relation: NeighbouringRelation) -> None:
    """No proven ε is below the one whose δ is known by definition."""
    if relation not in row.known:
        return
    for at in row.points():
        exact = float(exact_delta(row, at, relation))
        if at > 0 and 1e-4 < exact < 0.5:
            claim = ask(method, row.mechanism, exact, relation)
            is_proven = isinstance(claim, Guarantee) and claim.status is Status.PROVEN
            if is_proven and claim.epsilon < at * (1 - 1e-12 - row.error):  # above the largest loss
                held = float(exact_delta(row, claim.epsilon, relation))
                assert held <= exact, (method, row.name, relation, at, claim.epsilon)


def check_noise(method: str, q: float, sigma: float, steps: int) -> None:
    """Tiny and huge noise give a number or a refusal."""
    claim = ask(method, run(q, sigma, steps), 1e-15)
    if isinstance(claim, AccountingError):
        assert claim.code in ("no-finite-epsilon", "too-expensive")
        assert claim.detail
    else:
        assert 0 <= claim.epsilon < math.inf


def costlier(method: str, cheap: Json, dear: Json, at: float) -> None:
    """`dear` costs at least as much as `cheap`, as far as the method can tell."""
    try:
        least, most = lower(epsilon(method, cheap, at)), epsilon(method, dear, at).epsilon
    except AccountingError:
        return
    assert least <= most * (1 + 1e-9), (method, cheap, dear, at)


def check_monotone(
    method: str, q: float, sigma: float, steps: int, at: float, factor: float = 1.3
) -> None:
    """More noise, fewer steps, a smaller sample rate and a larger δ cost no more."""
    here = run(q, sigma, steps)
    costlier(method, run(q, sigma * factor, steps), here, at)
    costlier(method, here, run(q, sigma, math.ceil(steps * factor)), at)
    costlier(method, here, run(min(1.0, q * factor), sigma, steps), at)
    if method != "mma" or steps > -math.log(at):  # its formula turns around for few steps
        looser = epsilon(method, here, min(at * factor, 0.5))
        assert lower(looser) <= epsilon(method, here, at).epsilon * (1 + 1e-9)


@pytest.mark.slow
@every_method
def test_pairs_of_mechanism_relation_and_size_are_answered_soundly(method: str) -> None:
    for case in cover(method, {"document": MIXED, "relation": RELATIONS, "at": [1e-5, 1e-2]}):
        check_claim(method, **case)
    for case in cover(method, {"row": COMPARED, "relation": RELATIONS}):
        check_truth(method, **case)
    for case in cover(method, NOISE):
        check_noise(method, **case)
    for case in cover(method, POINTS):
        check_monotone(method, **case)
    for q, sigma, steps, at in ((0.2, 3.0, 40, 1e-3), (1.0, 6.0, 30, 1e-7)):
        check_inverse(method, run(q, sigma, steps), at)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@every_method
def test_all_mechanisms_relations_and_sizes_are_answered_soundly(
    method: str, night_seed: int
) -> None:
    for case in products({"document": MIXED, "relation": RELATIONS, "at": [1e-5, 1e-2]}):
        check_claim(method, **case)
    for case in products({"row": ROWS, "relation": RELATIONS}):
        check_truth(method, **case)
    for case in products(NOISE):
        check_noise(method, **case)
    rng = random.Random(night_seed)
    for _ in range(60):
        q, sigma = log_uniform(rng, 1e-4, 1.0), log_uniform(rng, 0.4, 50)
        steps, at = int(log_uniform(rng, 1, 5000)), log_uniform(rng, 1e-10, 1e-2)
        check_monotone(method, q, sigma, steps, at, log_uniform(rng, 1.01, 4.0))


@pytest.mark.slow
@every_method
def test_status_and_assumptions_are_those_that_the_pages_of_the_methods_state(method: str) -> None:
    """The number of records is public if one more or less would change what divides the sums."""
    for relation, sampling in itertools.product(RELATIONS, SAMPLINGS):
        case = (relation, sampling)
        claim = ask(method, sampled_run(sampling), 1e-5, relation)
        unknown = method != "pld" and sampling == "balls_in_bins"
        if isinstance(claim, AccountingError):
            assert isinstance(claim, MethodNotApplicableError)
            assert unknown or method in NEVER_PROVEN, case
            continue
        estimate = (sampling == "shuffled" and relation is ADDED) or (
            method == "moments_accountant"
            and (sampling == "fixed_size" or (sampling == "poisson" and relation is REPLACED))
        )
        if method not in NEVER_PROVEN:
            assert not unknown, case
            assert claim.status is (Status.ESTIMATE if estimate else Status.PROVEN), case
        if sampling in ("poisson", "fixed_size", "none"):
            said = [a.holds for a in claim.assumptions if "records is public" in a.statement]
            assert said == ([True] if relation is ADDED and sampling != "none" else []), case


@pytest.mark.slow
@every_method
def test_every_solver_ends_on_the_safe_side(method: str) -> None:
    loose = method in {"advanced_composition", "basic_composition", "optimal_composition"}
    target = Target(ACCOUNTANTS[method], ADDED, 5.0 if loose else 1.5, 1e-5)
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
