"""The functions of the package: `from accountant_service import epsilon, noise_multiplier, …`.

They take the options of the command line as keyword arguments, check them with the models of the
API, and return dataclasses. The target or the claim may be the first argument without its name.
A number may be an array (a list, a tuple, NumPy's or pandas'): the result then is `Answers`, with
an answer for each element; several arrays are read in parallel. Each function imports what it needs
when it is called, so that `from accountant_service import epsilon` is quick: NumPy, SciPy and
pydantic come with the first answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accountant_service import number_format
from accountant_service.guarantee import Guarantee, Interval
from accountant_service.presentation import Presented, Row
from accountant_service.questions.arguments import read_arguments
from accountant_service.questions.arrays import for_each_element
from accountant_service.questions.functions import compare, delta, epsilon
from accountant_service.time_limit import limit_cpu_seconds

if TYPE_CHECKING:
    from accountant_service.importing import Answer
    from accountant_service.planner import Plan

__all__ = [
    "compare",
    "delta",
    "epsilon",
    "import_document",
    "noise_multiplier",
    "plan",
    "sample_rate",
    "solve",
    "steps",
]

Mechanism = Mapping[str, Any]


class _Solved(Presented):
    """Base class of a solver's results, which have a `guarantee`."""

    __slots__ = ()
    guarantee: Guarantee

    def __str__(self) -> str:
        """Return the result in a line."""
        return f"{' '.join(self._describe())}: {self.guarantee}"

    def table(self) -> list[Row]:
        """Return what was solved for, and the guarantee."""
        return [self._describe(), *self.guarantee.table()]

    def _describe(self) -> Row:
        """Return the name and the value of what was solved for, rounded to the safe side."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SolvedNoiseMultiplier(_Solved):
    """The least noise multiplier that meets a target.

    Attributes:
        noise_multiplier: σ, rounded up.
        guarantee: the guarantee at that noise multiplier.
        risk: bounds of the risk, if the target is a risk: proved if the guarantee is proven.
    """

    noise_multiplier: float
    guarantee: Guarantee
    risk: Interval | None = None

    def _describe(self) -> Row:
        return "noise multiplier", number_format.round_up(self.noise_multiplier)


@dataclass(frozen=True, slots=True)
class SolvedSteps(_Solved):
    """The largest number of steps that meets a target.

    Attributes:
        steps: the number of steps.
        guarantee: the guarantee after these steps.
        next: the guarantee after one step more, which is not proved to meet the target.
        undecided: how far the true ε, or risk, of one step more may be from the target, if its
            proved interval contains the target; None if one step more is proved to miss it.
        risk: bounds of the risk, if the target is a risk: proved if the guarantee is proven.
    """

    steps: int
    guarantee: Guarantee
    next: Guarantee
    undecided: float | None = None
    risk: Interval | None = None

    def _describe(self) -> Row:
        return "steps", str(self.steps)


@dataclass(frozen=True, slots=True)
class SolvedSampleRate(_Solved):
    """The largest sample rate that meets a target.

    Attributes:
        sample_rate: q, rounded down.
        guarantee: the guarantee at that sample rate.
        risk: bounds of the risk, if the target is a risk: proved if the guarantee is proven.
    """

    sample_rate: float
    guarantee: Guarantee
    risk: Interval | None = None

    def _describe(self) -> Row:
        return "sample rate", number_format.round_down(self.sample_rate)


@dataclass(frozen=True, slots=True)
class SolvedParameter(_Solved):
    """The value of a mechanism's free parameter that costs most within a target.

    Attributes:
        value: of the parameter, rounded to the safe side.
        mechanism: the mechanism as JSON, with this value.
        guarantee: the guarantee at that value.
        next: of a whole number: the guarantee of one more, which is not proved to meet the target.
        undecided: as in `SolvedSteps`, of a whole number.
        risk: bounds of the risk, if the target is a risk: proved if the guarantee is proven.
    """

    value: float
    mechanism: Mechanism
    guarantee: Guarantee
    next: Guarantee | None = None
    undecided: float | None = None
    risk: Interval | None = None

    def _describe(self) -> Row:
        return "value", number_format.exactly(self.value)


@for_each_element
def noise_multiplier(
    epsilon: float | None = None,
    *,
    delta: float | None = None,
    sample_rate: float | None = None,
    steps: int | None = None,
    dataset_size: int | None = None,
    batch_size: int | None = None,
    epochs: float | None = None,
    sampling: str | None = None,
    method: str | None = None,
    neighbouring_relation: str | None = None,
    advantage: float | None = None,
    attack_success: float | None = None,
    prior: float | None = None,
    true_positive_rate: float | None = None,
    false_positive_rate: float | None = None,
    mu: float | None = None,
    earlier: Mechanism | None = None,
    time_limit: float | None = None,
) -> SolvedNoiseMultiplier:
    """Return the least noise multiplier with which a run meets an (ε, δ) or risk target.

    Args:
        epsilon: the target ε, with `delta`.
        delta: δ of the target; with `mu`, by how much the trade-off curve may miss it.
        sample_rate: as for `epsilon`.
        steps: as for `epsilon`.
        dataset_size: as for `epsilon`.
        batch_size: as for `epsilon`.
        epochs: as for `epsilon`.
        sampling: as for `epsilon`.
        method: as for `epsilon`.
        neighbouring_relation: as for `epsilon`.
        advantage: largest membership advantage, instead of ε.
        attack_success: largest probability of guessing membership, instead of ε.
        prior: with `attack_success`: probability of membership; 0.5 by default.
        true_positive_rate: largest rate, with `false_positive_rate`, instead of ε.
        false_positive_rate: with `true_positive_rate`.
        mu: μ of Gaussian DP, instead of ε.
        earlier: releases made before the run, as JSON; they count towards the target.
        time_limit: as for `epsilon`.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: no noise multiplier reaches the target.
    """
    given = locals()
    from accountant_service import solver
    from accountant_service.api import schemas

    with limit_cpu_seconds(given.pop("time_limit")):
        asked = read_arguments(schemas.NoiseMultiplierRequest, given)
        found = solver.noise_multiplier(asked.run(), asked.target())
        return SolvedNoiseMultiplier(found.value, found.guarantee, found.risk)


@for_each_element
def steps(
    epsilon: float | None = None,
    *,
    noise_multiplier: float,
    delta: float | None = None,
    sample_rate: float | None = None,
    dataset_size: int | None = None,
    batch_size: int | None = None,
    sampling: str | None = None,
    method: str | None = None,
    neighbouring_relation: str | None = None,
    advantage: float | None = None,
    attack_success: float | None = None,
    prior: float | None = None,
    true_positive_rate: float | None = None,
    false_positive_rate: float | None = None,
    mu: float | None = None,
    earlier: Mechanism | None = None,
    time_limit: float | None = None,
) -> SolvedSteps:
    """Return the largest number of steps with which a run meets an (ε, δ) or risk target.

    Args:
        noise_multiplier: as for `epsilon`.
        epsilon: as for `noise_multiplier`.
        delta: as for `noise_multiplier`.
        sample_rate: as for `epsilon`.
        dataset_size: as for `epsilon`.
        batch_size: as for `epsilon`.
        sampling: as for `epsilon`.
        method: as for `epsilon`.
        neighbouring_relation: as for `epsilon`.
        advantage: as for `noise_multiplier`.
        attack_success: as for `noise_multiplier`.
        prior: as for `noise_multiplier`.
        true_positive_rate: as for `noise_multiplier`.
        false_positive_rate: as for `noise_multiplier`.
        mu: as for `noise_multiplier`.
        earlier: releases made before the run, as JSON; they count towards the target.
        time_limit: as for `epsilon`.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: every number of steps meets the target.
    """
    given = locals()
    from accountant_service import solver
    from accountant_service.api import schemas

    with limit_cpu_seconds(given.pop("time_limit")):
        asked = read_arguments(schemas.StepsRequest, given)
        found = solver.steps(asked.run(), asked.target())
        assert found.next is not None
        return SolvedSteps(
            int(found.value), found.guarantee, found.next, found.undecided, found.risk
        )


@for_each_element
def sample_rate(
    epsilon: float | None = None,
    *,
    noise_multiplier: float,
    steps: int,
    delta: float | None = None,
    method: str | None = None,
    neighbouring_relation: str | None = None,
    advantage: float | None = None,
    attack_success: float | None = None,
    prior: float | None = None,
    true_positive_rate: float | None = None,
    false_positive_rate: float | None = None,
    mu: float | None = None,
    earlier: Mechanism | None = None,
    time_limit: float | None = None,
) -> SolvedSampleRate:
    """Return the largest Poisson sample rate with which a run meets an (ε, δ) or risk target.

    Args:
        noise_multiplier: as for `epsilon`.
        steps: number of steps.
        epsilon: as for `noise_multiplier`.
        delta: as for `noise_multiplier`.
        method: as for `epsilon`.
        neighbouring_relation: as for `epsilon`.
        advantage: as for `noise_multiplier`.
        attack_success: as for `noise_multiplier`.
        prior: as for `noise_multiplier`.
        true_positive_rate: as for `noise_multiplier`.
        false_positive_rate: as for `noise_multiplier`.
        mu: as for `noise_multiplier`.
        earlier: releases made before the run, as JSON; they count towards the target.
        time_limit: as for `epsilon`.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: no sample rate reaches the target.
    """
    given = locals()
    from accountant_service import solver
    from accountant_service.api import schemas

    with limit_cpu_seconds(given.pop("time_limit")):
        asked = read_arguments(schemas.SampleRateRequest, given)
        found = solver.sample_rate(asked.run(), asked.target())
        return SolvedSampleRate(found.value, found.guarantee, found.risk)


@for_each_element
def plan(
    epsilon: float,
    *,
    delta: float,
    dataset_size: int,
    epochs: float | None = None,
    examples: int | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    sampling: str | None = None,
    neighbouring_relation: str | None = None,
    points: int | None = None,
    smallest_batch_size: int | None = None,
    largest_batch_size: int | None = None,
    steps_min: int | None = None,
    time_limit: float | None = None,
) -> Plan:
    """Return batch sizes, steps and noise within a budget and a compute limit, with advice.

    Args:
        epsilon: ε of the budget, above 0.
        delta: δ of the budget.
        dataset_size: number of records.
        epochs: the compute limit: passes over the dataset.
        examples: the compute limit instead of epochs: batch size times steps.
        batch_size: today's choice, to compare with.
        steps: today's number of steps; as many as the limit allows by default.
        sampling: "poisson", "balls_in_bins" or "both" (default).
        neighbouring_relation: as for `epsilon`.
        points: batch sizes for each sampling; 20 by default.
        smallest_batch_size: chosen by default.
        largest_batch_size: chosen by default.
        steps_min: fewest steps of a recommended run; 100 by default.
        time_limit: as for `epsilon`.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: no noise multiplier reaches the budget.
    """
    given = locals()
    from accountant_service import planner
    from accountant_service.api import plan_schemas

    with limit_cpu_seconds(given.pop("time_limit")):
        asked = read_arguments(plan_schemas.PlanRequest, given)
        return planner.plan(asked.goal(), asked.samplings(), asked.batches(), asked.current())


def import_document(
    document: str | Mapping[str, Any] | Sequence[Any],
    *,
    format: str | None = None,  # noqa: A002 - the API's name
    delta: float | None = None,
    epsilon: float | None = None,
    dataset_size: int | None = None,
    batch_size: int | None = None,
    sampling: str | None = None,
    neighbouring_relation: str | None = None,
    time_limit: float | None = None,
) -> Answer:
    """Return what a configuration or history of another tool costs, and a verdict on its claims.

    The answer has `verdict`, `summary` (the verdict in a sentence), `guarantee`, `claims`,
    `findings` and `noise_tails` (lower bounds of δ from where generators of normal numbers end).

    Args:
        document: a text (JSON, TOML, YAML or a Python repr), or what JSON is parsed to.
        format: the tool, such as "opacus" or "dp_event"; found from the document by default.
        delta: δ, if the document names none.
        epsilon: an ε that is claimed.
        dataset_size: number of records, if the document does not say.
        batch_size: expected batch size, if the document does not say.
        sampling: "poisson", "fixed_size", "shuffled" or "none", if the document does not say.
        neighbouring_relation: as for `epsilon`, if the document does not say.
        time_limit: as for `epsilon`.

    Raises:
        InvalidArgumentError: the document cannot be read, or contradicts itself or an argument.
        AccountingError: no noise reaches the ε that the document targets, or it takes more time.
    """
    given = locals()
    from accountant_service import importing
    from accountant_service.api import schemas

    with limit_cpu_seconds(given.pop("time_limit")):
        return importing.account_for(read_arguments(schemas.ImportRequest, given).read())


def solve(
    mechanism: Mechanism,
    *,
    parameter: str,
    epsilon: float | None = None,
    delta: float | None = None,
    method: str | None = None,
    neighbouring_relation: str | None = None,
    advantage: float | None = None,
    attack_success: float | None = None,
    prior: float | None = None,
    true_positive_rate: float | None = None,
    false_positive_rate: float | None = None,
    mu: float | None = None,
    time_limit: float | None = None,
) -> SolvedParameter:
    """Return the value of one parameter of any mechanism that costs most within a target.

    Args:
        mechanism: the mechanism as JSON; the parameter's value is ignored, and may be None.
        parameter: JSON pointer into the mechanism, such as "/mechanism/noise_multiplier".
        epsilon: as for `noise_multiplier`.
        delta: as for `noise_multiplier`.
        method: as for `epsilon`.
        neighbouring_relation: as for `epsilon`.
        advantage: as for `noise_multiplier`.
        attack_success: as for `noise_multiplier`.
        prior: as for `noise_multiplier`.
        true_positive_rate: as for `noise_multiplier`.
        false_positive_rate: as for `noise_multiplier`.
        mu: as for `noise_multiplier`.
        time_limit: as for `epsilon`.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: no allowed value meets the target, or every whole number does.
    """
    given = locals()
    from accountant_service import solver
    from accountant_service.api import schemas

    with limit_cpu_seconds(given.pop("time_limit")):
        asked = read_arguments(schemas.SolveRequest, given)
        free = asked.free_parameter()
        found = solver.parameter(free, asked.target())
        value = int(found.value) if free.is_whole else found.value
        return SolvedParameter(
            value, free.write(value), found.guarantee, found.next, found.undecided, found.risk
        )
