"""Answers of the API, built from the results of computations.

Each function fills a model of `schemas`, which alone names the fields. The values come from the
service itself, so the models are built without validation; the tests validate the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from accountant_service import importing, mechanisms
from accountant_service.accounting import planner
from accountant_service.accounting.calculator import Comparison, MethodCurve, NoAnswer, TradeOff
from accountant_service.accounting.guarantee import Assumption, Guarantee, NeighbouringRelation
from accountant_service.accounting.methods import ACCOUNTANTS, DEFAULT_METHOD
from accountant_service.accounting.solutions import (
    Solved,
    SolvedNoiseMultiplier,
    SolvedParameter,
    SolvedSampleRate,
    SolvedSteps,
)
from accountant_service.questions import models as schemas
from accountant_service.questions import plan_models as plan_schemas
from accountant_service.questions.models import (
    AssumptionView,
    CertifiedDelta,
    CertifiedEpsilon,
    GuaranteeView,
    InapplicableView,
    IntervalView,
)
from accountant_service.writing import command_lines


def guarantee(claim: Guarantee) -> GuaranteeView:
    """Return a guarantee as an API answer."""
    return GuaranteeView.of(
        claim,
        certified=_certified_interval_view(claim),
        warnings=list(claim.warnings),
        assumptions=_assumption_views(claim.assumptions),
    )


def _assumption_views(assumptions: Sequence[Assumption]) -> list[AssumptionView]:
    """Return the hypotheses of a theorem as parts of an API answer."""
    return [_assumption_view(each) for each in assumptions]


@lru_cache(maxsize=256)  # most questions rest on the same few assumptions
def _assumption_view(assumption: Assumption) -> AssumptionView:
    """Return one hypothesis of a theorem as a part of an API answer."""
    return AssumptionView.of(assumption)


def _certified_interval_view(claim: Guarantee) -> CertifiedEpsilon | CertifiedDelta | None:
    """Return the proved interval for a guarantee's ε or δ, or None."""
    if claim.certified is None:
        return None
    lower, upper = claim.certified.lower, claim.certified.upper
    if claim.solved_for == "epsilon":
        return CertifiedEpsilon.model_construct(epsilon_lower=lower, epsilon_upper=upper)
    return CertifiedDelta.model_construct(delta_lower=lower, delta_upper=upper)


def _risk_view(solved: Solved) -> schemas.RiskView | None:
    """Return the bounds on the risk that was solved for, or None if (ε, δ) was the target."""
    if solved.risk is None:
        return None
    return schemas.RiskView.of(solved.risk, status=solved.guarantee.status)


def _undecided_view(solved: SolvedSteps | SolvedParameter) -> schemas.UndecidedView | None:
    """Return how far one step more may be from the target; None if that is decided."""
    margin = solved.undecided
    return None if margin is None else schemas.UndecidedView.model_construct(margin=margin)


def noise_multiplier(solved: SolvedNoiseMultiplier) -> schemas.NoiseMultiplierAnswer:
    """Return the least noise multiplier, with its guarantee, as an API answer."""
    return schemas.NoiseMultiplierAnswer.of(
        solved, guarantee=guarantee(solved.guarantee), risk=_risk_view(solved)
    )


def steps(solved: SolvedSteps) -> schemas.StepsAnswer:
    """Return the largest number of steps, with its guarantee, as an API answer."""
    return schemas.StepsAnswer.of(
        solved,
        guarantee=guarantee(solved.guarantee),
        next=guarantee(solved.next),
        risk=_risk_view(solved),
        undecided=_undecided_view(solved),
    )


def sample_rate(solved: SolvedSampleRate) -> schemas.SampleRateAnswer:
    """Return the largest sample rate, with its guarantee, as an API answer."""
    return schemas.SampleRateAnswer.of(
        solved, guarantee=guarantee(solved.guarantee), risk=_risk_view(solved)
    )


def solved_parameter(solved: SolvedParameter, pointer: str) -> schemas.SolveAnswer:
    """Return the value of a free parameter, with its guarantee, as an API answer."""
    return schemas.SolveAnswer.of(
        solved,
        parameter=pointer,
        guarantee=guarantee(solved.guarantee),
        next=None if solved.next is None else guarantee(solved.next),
        risk=_risk_view(solved),
        undecided=_undecided_view(solved),
    )


def _inapplicable_view(answer: NoAnswer) -> InapplicableView:
    """Return a method without an answer, and the reason, as a part of an API answer."""
    return InapplicableView.model_construct(
        method=answer.method, code=answer.error.code, reason=answer.error.detail
    )


def comparison(compared: Comparison) -> schemas.CompareAnswer:
    """Return the comparison of methods as an API answer."""
    proved = compared.certified
    return schemas.CompareAnswer.model_construct(
        certified=guarantee(proved) if isinstance(proved, Guarantee) else None,
        certified_reason=None if isinstance(proved, Guarantee) else str(proved),
        guarantees=[
            _inapplicable_view(each) if isinstance(each, NoAnswer) else guarantee(each)
            for each in compared.answers
        ],
    )


def curves(steps: Sequence[int], answers: Sequence[MethodCurve | NoAnswer]) -> schemas.CurveAnswer:
    """Return each method's ε at each step count as an API answer."""
    return schemas.CurveAnswer.model_construct(
        steps=list(steps),
        curves=[
            _inapplicable_view(each) if isinstance(each, NoAnswer) else _curve_view(each)
            for each in answers
        ],
    )


def _curve_view(curve: MethodCurve) -> schemas.CurveView:
    """Return one method's curve as a part of an API answer."""
    return schemas.CurveView.of(
        curve,
        epsilon=list(curve.epsilons),
        warnings=list(curve.warnings),
        assumptions=_assumption_views(curve.assumptions),
    )


def trade_off(curve: TradeOff, prior: float) -> schemas.TradeOffAnswer:
    """Return a trade-off curve, and quantities derived from it, as an API answer."""
    return schemas.TradeOffAnswer.model_construct(
        false_positive_rates=list(curve.false_positive_rates),
        false_negative_rates_lower=[rate.lower for rate in curve.false_negative_rates],
        false_negative_rates_upper=[rate.upper for rate in curve.false_negative_rates],
        membership_advantage=IntervalView.of(curve.advantage),
        prior=prior,
        attack_success=IntervalView.of(curve.success),
        posterior_lower=[each.lower for each in curve.posteriors],
        posterior_upper=[each.upper for each in curve.posteriors],
        gaussian_dp=schemas.GaussianDpView.model_construct(mu=curve.mu, error=curve.mu_error),
        mechanism_hash=curve.mechanism_hash,
        status=curve.status,
        assumptions=_assumption_views(curve.assumptions),
    )


def plan(found: planner.Plan, goal: planner.Goal) -> plan_schemas.PlanAnswer:
    """Return a plan as an API answer."""
    current = None
    if found.current is not None and found.current_guarantee is not None:
        current = _certified_run_view(found.current, found.current_guarantee, goal)
    return plan_schemas.PlanAnswer.model_construct(
        recommended=_certified_run_view(found.recommended, found.guarantee, goal),
        reason=found.reason,
        current=current,
        signal_to_noise_limit=found.signal_to_noise_limit,
        examples=goal.examples,
        method=found.guarantee.method,
        runs=[plan_schemas.PlannedRunView.of(each) for each in found.runs],
        advice=[
            plan_schemas.AdviceView.of(each, severity="warning" if each.is_warning else "note")
            for each in found.advice
        ],
        sources=[
            plan_schemas.SourceView.model_construct(source=source, says=says)
            for source, says in planner.SOURCES.items()
        ],
    )


def _certified_run_view(
    run: planner.PlannedRun, claim: Guarantee, goal: planner.Goal
) -> plan_schemas.CertifiedRunView:
    """Return a planned run with its mechanism, guarantee and commands as a part of an answer."""
    mechanism = mechanisms.to_json(run.run)
    is_trained = goal.relation is NeighbouringRelation.ADD_OR_REMOVE_ONE  # by `accountant-train`
    commands = plan_schemas.CommandsView.model_construct(
        price=command_lines.price_command(mechanism, goal.delta, goal.relation),
        train=command_lines.training_command(mechanism, goal.epsilon, goal.delta)
        if is_trained
        else None,
    )
    return plan_schemas.CertifiedRunView.of(
        run, mechanism=mechanism, guarantee=guarantee(claim), commands=commands
    )


def imported(answer: importing.Answer) -> schemas.ImportAnswer:
    """Return an imported document as an API answer."""
    return schemas.ImportAnswer.model_construct(
        tool=answer.found.tool,
        verdict=answer.verdict,
        summary=answer.summary,
        mechanism=answer.mechanism,
        neighbouring_relation=answer.found.relation,
        guarantee=None if answer.guarantee is None else guarantee(answer.guarantee),
        guarantee_reason=answer.reason,
        claims=[_claim_view(claim) for claim in answer.claims],
        findings=[schemas.FindingView.of(finding) for finding in answer.findings],
        noise_tails=[schemas.NoiseTailView.of(tail) for tail in answer.noise_tails],
    )


def _claim_view(claim: importing.CheckedClaim) -> schemas.CheckedClaimView:
    """Return a claim, with what is proved about it, as a part of an API answer."""
    bounds = {
        name: None if interval is None else IntervalView.of(interval)
        for name, interval in (
            ("true_epsilon", claim.true_epsilon),
            ("true_delta", claim.true_delta),
        )
    }
    return schemas.CheckedClaimView.of(claim, **bounds)


def methods() -> schemas.MethodsAnswer:
    """Return the list of accounting methods as an API answer."""
    return schemas.MethodsAnswer.model_construct(
        methods=[
            schemas.MethodView.of(each, method=each.name, default=each.name == DEFAULT_METHOD)
            for each in ACCOUNTANTS.values()
        ]
    )
