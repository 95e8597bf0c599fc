"""The questions that the API answers: for each path its models, its function and its cache key.

The command line and the Python functions answer the same questions without HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import to_json

from accountant_service import importing
from accountant_service.accounting import calculator, planner, solver
from accountant_service.accounting.guarantee import Guarantee
from accountant_service.accounting.solutions import (
    SolvedNoiseMultiplier,
    SolvedParameter,
    SolvedSampleRate,
    SolvedSteps,
)
from accountant_service.mechanisms import DpSgd, Mechanism, canonical_form
from accountant_service.questions import models as schemas
from accountant_service.questions import plan_models as plan_schemas
from accountant_service.questions import problems, views
from accountant_service.questions.models import UnreadBody
from accountant_service.writing.canonical_json import canonical_json


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A computation endpoint: its request and answer models, its cache key and its function.

    Attributes:
        request: the model of its questions.
        answer_model: the model of its answers.
        key: returns the cache key of a question.
        compute: computes what a question asks for, as the Python functions return it.
        view: converts that, and the question, to an answer of the API.
    """

    request: type[BaseModel]
    answer_model: type[BaseModel]
    key: Callable[[Any], Hashable]
    compute: Callable[[Any], Any]
    view: Callable[[Any, Any], BaseModel] = lambda found, _: found

    def answer(self, question: BaseModel) -> BaseModel:
        """Compute the API's answer to a question."""
        return self.view(self.compute(question), question)


def _epsilon(question: schemas.EpsilonRequest) -> Guarantee:
    """Compute ε at a given δ."""
    return calculator.epsilon(
        question.mechanism,
        question.delta,
        question.method,
        question.neighbouring_relation,
        question.tolerance,
    )


def _delta(question: schemas.DeltaRequest) -> Guarantee:
    """Compute δ at a given ε."""
    return calculator.delta(
        question.mechanism,
        question.epsilon,
        question.method,
        question.neighbouring_relation,
        question.tolerance,
    )


def _noise_multiplier(question: schemas.NoiseMultiplierRequest) -> SolvedNoiseMultiplier:
    """Solve for a run's noise multiplier."""
    found = solver.noise_multiplier(question.run(), question.target())
    return SolvedNoiseMultiplier(found.value, found.guarantee, found.risk)


def _steps(question: schemas.StepsRequest) -> SolvedSteps:
    """Solve for a run's number of steps."""
    found = solver.steps(question.run(), question.target())
    assert found.next is not None
    return SolvedSteps(int(found.value), found.guarantee, found.next, found.undecided, found.risk)


def _sample_rate(question: schemas.SampleRateRequest) -> SolvedSampleRate:
    """Solve for a run's sample rate."""
    found = solver.sample_rate(question.run(), question.target())
    return SolvedSampleRate(found.value, found.guarantee, found.risk)


def _solve(question: schemas.SolveRequest) -> SolvedParameter:
    """Solve for the free parameter of a mechanism."""
    free = question.free_parameter()
    found = solver.parameter(free, question.target())
    return SolvedParameter(
        int(found.value) if free.is_whole else found.value,
        free.write(found.value),
        found.guarantee,
        found.next,
        found.undecided,
        found.risk,
    )


def _compare(question: schemas.CompareRequest) -> calculator.Comparison:
    """Compare accounting methods."""
    return calculator.compare(
        question.mechanism,
        question.delta,
        question.methods,
        question.neighbouring_relation,
        question.tolerance,
    )


def _compute_curve(question: schemas.CurveRequest) -> schemas.CurveAnswer:
    """Answer a request for ε after each of several step counts."""
    assert isinstance(question.mechanism, DpSgd)
    return views.curves(
        *calculator.curve(
            question.mechanism,
            question.delta,
            question.methods,
            question.points,
            question.neighbouring_relation,
        )
    )


def _compute_trade_off(question: schemas.TradeOffRequest) -> schemas.TradeOffAnswer:
    """Answer a request for the trade-off curve of the best membership attacker."""
    found = calculator.trade_off(
        question.mechanism,
        question.prior,
        question.points,
        question.neighbouring_relation,
        question.false_positive_rates,
    )
    return views.trade_off(found, question.prior)


def _plan(question: plan_schemas.PlanRequest) -> planner.Plan:
    """Plan a run within a budget and a compute limit."""
    return planner.plan(
        question.goal(), question.samplings(), question.batches(), question.current()
    )


def _import(question: schemas.ImportRequest) -> importing.Answer:
    """Import a document of another tool."""
    return importing.account_for(question.read())


def _import_cache_key(question: schemas.ImportRequest) -> Hashable:
    """Return the cache key of an imported document: the hash of the request."""
    return hashlib.sha256(to_json(question)).digest()


def _cache_key(question: BaseModel) -> Hashable:
    """Return a request's cache key: its fields, with the mechanism's hash and premises.

    Equivalent mechanisms may assume something else of the data, which the answer states.
    """
    return tuple(
        _mechanism_key(value) if name == "mechanism" else _to_hashable(value)
        for name, value in question
    )


def _solve_cache_key(question: schemas.SolveRequest) -> Hashable:
    """Return a request's cache key: its fields, with the text of its document."""
    return tuple(
        canonical_json(value) if name == "mechanism" else _to_hashable(value)
        for name, value in question
    )


def _mechanism_key(mechanism: Mechanism) -> Hashable:
    """Return what the answer depends on: the canonical hash, and the premises."""
    form = canonical_form(mechanism)
    return form.hash, form.premises


def _curve_cache_key(question: schemas.CurveRequest) -> Hashable:
    """Return a curve's cache key: the mechanism's hash, and how it is divided into steps."""
    return (
        question.mechanism,
        question.delta,
        tuple(question.methods),
        question.points,
        question.neighbouring_relation,
    )


def _to_hashable(value: Any) -> Hashable:
    """Convert a list to a tuple, which can be part of a cache key."""
    return tuple(value) if isinstance(value, list) else value


def _of_answer(view: Callable[[Any], BaseModel]) -> Callable[[Any, Any], BaseModel]:
    """Return a view that does not need the question."""
    return lambda found, _: view(found)


ENDPOINTS: Final[Mapping[str, Endpoint]] = {
    "/v1/epsilon": Endpoint(
        schemas.EpsilonRequest,
        schemas.GuaranteeView,
        _cache_key,
        _epsilon,
        _of_answer(views.guarantee),
    ),
    "/v1/delta": Endpoint(
        schemas.DeltaRequest,
        schemas.GuaranteeView,
        _cache_key,
        _delta,
        _of_answer(views.guarantee),
    ),
    "/v1/noise-multiplier": Endpoint(
        schemas.NoiseMultiplierRequest,
        schemas.NoiseMultiplierAnswer,
        _cache_key,
        _noise_multiplier,
        _of_answer(views.noise_multiplier),
    ),
    "/v1/steps": Endpoint(
        schemas.StepsRequest,
        schemas.StepsAnswer,
        _cache_key,
        _steps,
        _of_answer(views.steps),
    ),
    "/v1/sample-rate": Endpoint(
        schemas.SampleRateRequest,
        schemas.SampleRateAnswer,
        _cache_key,
        _sample_rate,
        _of_answer(views.sample_rate),
    ),
    "/v1/solve": Endpoint(
        schemas.SolveRequest,
        schemas.SolveAnswer,
        _solve_cache_key,
        _solve,
        lambda found, question: views.solved_parameter(found, question.parameter),
    ),
    "/v1/compare": Endpoint(
        schemas.CompareRequest,
        schemas.CompareAnswer,
        _cache_key,
        _compare,
        _of_answer(views.comparison),
    ),
    "/v1/curve": Endpoint(
        schemas.CurveRequest, schemas.CurveAnswer, _curve_cache_key, _compute_curve
    ),
    "/v1/trade-off": Endpoint(
        schemas.TradeOffRequest, schemas.TradeOffAnswer, _cache_key, _compute_trade_off
    ),
    "/v1/plan": Endpoint(
        plan_schemas.PlanRequest,
        plan_schemas.PlanAnswer,
        _cache_key,
        _plan,
        lambda found, question: views.plan(found, question.goal()),
    ),
    "/v1/import": Endpoint(
        schemas.ImportRequest,
        schemas.ImportAnswer,
        _import_cache_key,
        _import,
        _of_answer(views.imported),
    ),
}


def compute(path: str, question: BaseModel | UnreadBody) -> bytes:
    """Compute the JSON answer to a request, in a computation process."""
    endpoint = ENDPOINTS[path]
    if isinstance(question, UnreadBody):
        question = problems.read_body(endpoint.request, question.raw)
    return to_json(endpoint.answer(question))


def make_cache_key(path: str, question: BaseModel | UnreadBody) -> tuple[str, Hashable]:
    """Return a request's cache key: path and fields, or the hash of an unparsed body."""
    if isinstance(question, UnreadBody):
        return path, hashlib.sha256(question.raw).digest()
    return path, ENDPOINTS[path].key(question)
