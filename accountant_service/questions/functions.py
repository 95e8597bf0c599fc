"""The functions of the package, one for each question.

Each imports what it needs when it is called. The target or the claim may be the first argument
without its name. A number may be an array (a list, a tuple, NumPy's or pandas'): the result then is
`Answers`, with an answer for each element; several arrays are read in parallel.

`python -m scripts.question_functions --write` writes this module from the models in
`models.py` and `plan_models.py`: change a question there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accountant_service.questions.arguments import answer
from accountant_service.questions.arrays import for_each_element

if TYPE_CHECKING:
    from accountant_service.accounting.calculator import Comparison
    from accountant_service.accounting.guarantee import Guarantee
    from accountant_service.accounting.planner import Plan
    from accountant_service.accounting.solutions import (
        SolvedNoiseMultiplier,
        SolvedParameter,
        SolvedSampleRate,
        SolvedSteps,
    )
    from accountant_service.importing.cost import Answer


@for_each_element
def epsilon(
    delta: float,
    *,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    steps: int | None = None,
    dataset_size: int | None = None,
    batch_size: int | None = None,
    epochs: float | None = None,
    sampling: str | None = None,
    mechanism: Mapping[str, Any] | None = None,
    method: str | None = None,
    neighbouring_relation: str | None = None,
    tolerance: float | None = None,
    time_limit: float | None = None,
) -> Guarantee:
    """Compute the ε of a run, or of any mechanism, at δ.

    Args:
        delta: δ: 0, or from 1e-50 to below 1.
        noise_multiplier: σ: standard deviation of the noise over the clip norm.
        sample_rate: q: expected batch size over dataset size.
        steps: T: number of steps.
        dataset_size: number of records; with a batch size, instead of a sample rate.
        batch_size: expected number of records in a batch.
        epochs: passes over the dataset; with dataset and batch size, instead of steps.
        sampling: how batches are drawn: "poisson" (default), "fixed_size", "balls_in_bins",
            "shuffled" or "none".
        mechanism: any mechanism as JSON, instead of a run.
        method: the accounting method; "pld" by default.
        neighbouring_relation: the neighbouring relation: "add_or_remove_one" (default),
            "replace_one" or "zero_out_one".
        tolerance: largest allowed width of the proved interval, as a share of max(ε, 0.05), or of δ
            where δ is computed; without it the service aims at 1e-3 and returns what it reaches.
        time_limit: most CPU seconds that the computation may take; none by default.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: the question has no answer, such as no finite ε, or takes more time.
    """
    found: Guarantee = answer("/v1/epsilon", locals())
    return found


@for_each_element
def delta(
    epsilon: float,
    *,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    steps: int | None = None,
    dataset_size: int | None = None,
    batch_size: int | None = None,
    epochs: float | None = None,
    sampling: str | None = None,
    mechanism: Mapping[str, Any] | None = None,
    method: str | None = None,
    neighbouring_relation: str | None = None,
    tolerance: float | None = None,
    time_limit: float | None = None,
) -> Guarantee:
    """Compute the δ of a run, or of any mechanism, at ε.

    Args:
        epsilon: ε, from 0 to 1e6.
        noise_multiplier: σ: standard deviation of the noise over the clip norm.
        sample_rate: q: expected batch size over dataset size.
        steps: T: number of steps.
        dataset_size: number of records; with a batch size, instead of a sample rate.
        batch_size: expected number of records in a batch.
        epochs: passes over the dataset; with dataset and batch size, instead of steps.
        sampling: how batches are drawn: "poisson" (default), "fixed_size", "balls_in_bins",
            "shuffled" or "none".
        mechanism: any mechanism as JSON, instead of a run.
        method: the accounting method; "pld" by default.
        neighbouring_relation: the neighbouring relation: "add_or_remove_one" (default),
            "replace_one" or "zero_out_one".
        tolerance: largest allowed width of the proved interval, as a share of max(ε, 0.05), or of δ
            where δ is computed; without it the service aims at 1e-3 and returns what it reaches.
        time_limit: most CPU seconds that the computation may take; none by default.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: the question has no answer, such as no finite ε, or takes more time.
    """
    found: Guarantee = answer("/v1/delta", locals())
    return found


@for_each_element
def noise_multiplier(
    epsilon: float | None = None,
    *,
    delta: float | None = None,
    advantage: float | None = None,
    attack_success: float | None = None,
    prior: float | None = None,
    true_positive_rate: float | None = None,
    false_positive_rate: float | None = None,
    mu: float | None = None,
    sample_rate: float | None = None,
    steps: int | None = None,
    dataset_size: int | None = None,
    batch_size: int | None = None,
    epochs: float | None = None,
    sampling: str | None = None,
    earlier: Mapping[str, Any] | None = None,
    method: str | None = None,
    neighbouring_relation: str | None = None,
    time_limit: float | None = None,
) -> SolvedNoiseMultiplier:
    """Find the least noise multiplier with which a run meets an (ε, δ) or risk target.

    Args:
        epsilon: target ε, such as 2; with `delta`.
        delta: δ of the target; with `mu`, by how much the trade-off curve may miss it.
        advantage: largest membership advantage, such as 0.1, instead of ε.
        attack_success: largest success of guessing membership, such as 0.6, instead of ε.
        prior: with `attack_success`: probability of membership; 0.5 by default.
        true_positive_rate: largest rate, with `false_positive_rate`, instead of ε.
        false_positive_rate: with `true_positive_rate`, such as 0.001.
        mu: target μ of Gaussian DP, up to `delta` if that is given, instead of ε.
        sample_rate: q: expected batch size over dataset size.
        steps: T: number of steps.
        dataset_size: number of records; with a batch size, instead of a sample rate.
        batch_size: expected number of records in a batch.
        epochs: passes over the dataset; with dataset and batch size, instead of steps.
        sampling: how batches are drawn: "poisson" (default), "fixed_size", "balls_in_bins",
            "shuffled" or "none".
        earlier: releases made before, as JSON; all together must meet the target.
        method: the accounting method; "pld" by default.
        neighbouring_relation: the neighbouring relation: "add_or_remove_one" (default),
            "replace_one" or "zero_out_one".
        time_limit: most CPU seconds that the computation may take; none by default.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: the question has no answer, such as no value that meets the target, or
            takes more time.
    """
    found: SolvedNoiseMultiplier = answer("/v1/noise-multiplier", locals())
    return found


@for_each_element
def steps(
    epsilon: float | None = None,
    *,
    delta: float | None = None,
    advantage: float | None = None,
    attack_success: float | None = None,
    prior: float | None = None,
    true_positive_rate: float | None = None,
    false_positive_rate: float | None = None,
    mu: float | None = None,
    noise_multiplier: float,
    sample_rate: float | None = None,
    dataset_size: int | None = None,
    batch_size: int | None = None,
    sampling: str | None = None,
    earlier: Mapping[str, Any] | None = None,
    method: str | None = None,
    neighbouring_relation: str | None = None,
    time_limit: float | None = None,
) -> SolvedSteps:
    """Find the largest number of steps with which a run meets an (ε, δ) or risk target.

    Args:
        epsilon: target ε, such as 2; with `delta`.
        delta: δ of the target; with `mu`, by how much the trade-off curve may miss it.
        advantage: largest membership advantage, such as 0.1, instead of ε.
        attack_success: largest success of guessing membership, such as 0.6, instead of ε.
        prior: with `attack_success`: probability of membership; 0.5 by default.
        true_positive_rate: largest rate, with `false_positive_rate`, instead of ε.
        false_positive_rate: with `true_positive_rate`, such as 0.001.
        mu: target μ of Gaussian DP, up to `delta` if that is given, instead of ε.
        noise_multiplier: σ: standard deviation of the noise over the clip norm.
        sample_rate: q: expected batch size over dataset size.
        dataset_size: number of records; with a batch size, instead of a sample rate.
        batch_size: expected number of records in a batch.
        sampling: how batches are drawn: "poisson" (default), "fixed_size", "balls_in_bins",
            "shuffled" or "none".
        earlier: releases made before, as JSON; all together must meet the target.
        method: the accounting method; "pld" by default.
        neighbouring_relation: the neighbouring relation: "add_or_remove_one" (default),
            "replace_one" or "zero_out_one".
        time_limit: most CPU seconds that the computation may take; none by default.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: the question has no answer, such as no value that meets the target, or
            takes more time.
    """
    found: SolvedSteps = answer("/v1/steps", locals())
    return found


@for_each_element
def sample_rate(
    epsilon: float | None = None,
    *,
    delta: float | None = None,
    advantage: float | None = None,
    attack_success: float | None = None,
    prior: float | None = None,
    true_positive_rate: float | None = None,
    false_positive_rate: float | None = None,
    mu: float | None = None,
    noise_multiplier: float,
    steps: int,
    earlier: Mapping[str, Any] | None = None,
    method: str | None = None,
    neighbouring_relation: str | None = None,
    time_limit: float | None = None,
) -> SolvedSampleRate:
    """Find the largest sample rate with which a run meets an (ε, δ) or risk target.

    Args:
        epsilon: target ε, such as 2; with `delta`.
        delta: δ of the target; with `mu`, by how much the trade-off curve may miss it.
        advantage: largest membership advantage, such as 0.1, instead of ε.
        attack_success: largest success of guessing membership, such as 0.6, instead of ε.
        prior: with `attack_success`: probability of membership; 0.5 by default.
        true_positive_rate: largest rate, with `false_positive_rate`, instead of ε.
        false_positive_rate: with `true_positive_rate`, such as 0.001.
        mu: target μ of Gaussian DP, up to `delta` if that is given, instead of ε.
        noise_multiplier: σ: standard deviation of the noise over the clip norm.
        steps: T: number of steps.
        earlier: releases made before, as JSON; all together must meet the target.
        method: the accounting method; "pld" by default.
        neighbouring_relation: the neighbouring relation: "add_or_remove_one" (default),
            "replace_one" or "zero_out_one".
        time_limit: most CPU seconds that the computation may take; none by default.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: the question has no answer, such as no value that meets the target, or
            takes more time.
    """
    found: SolvedSampleRate = answer("/v1/sample-rate", locals())
    return found


@for_each_element
def solve(
    mechanism: Mapping[str, Any],
    *,
    parameter: str,
    epsilon: float | None = None,
    delta: float | None = None,
    advantage: float | None = None,
    attack_success: float | None = None,
    prior: float | None = None,
    true_positive_rate: float | None = None,
    false_positive_rate: float | None = None,
    mu: float | None = None,
    earlier: Mapping[str, Any] | None = None,
    method: str | None = None,
    neighbouring_relation: str | None = None,
    time_limit: float | None = None,
) -> SolvedParameter:
    """Find the value of a mechanism's parameter that costs most within an (ε, δ) or risk target.

    Args:
        mechanism: any mechanism as JSON; the parameter's value is ignored, and may be null.
        parameter: where the number is in the mechanism, as a JSON pointer, such as
            /mechanism/noise_multiplier; it may be a noise multiplier, scale, flip_probability,
            sample_rate, steps, count, records, epsilon, delta, mu or rho.
        epsilon: target ε, such as 2; with `delta`.
        delta: δ of the target; with `mu`, by how much the trade-off curve may miss it.
        advantage: largest membership advantage, such as 0.1, instead of ε.
        attack_success: largest success of guessing membership, such as 0.6, instead of ε.
        prior: with `attack_success`: probability of membership; 0.5 by default.
        true_positive_rate: largest rate, with `false_positive_rate`, instead of ε.
        false_positive_rate: with `true_positive_rate`, such as 0.001.
        mu: target μ of Gaussian DP, up to `delta` if that is given, instead of ε.
        earlier: releases made before, as JSON; all together must meet the target.
        method: the accounting method; "pld" by default.
        neighbouring_relation: the neighbouring relation: "add_or_remove_one" (default),
            "replace_one" or "zero_out_one".
        time_limit: most CPU seconds that the computation may take; none by default.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: the question has no answer, such as no value that meets the target, or
            takes more time.
    """
    found: SolvedParameter = answer("/v1/solve", locals())
    return found


@for_each_element
def compare(
    delta: float,
    *,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    steps: int | None = None,
    dataset_size: int | None = None,
    batch_size: int | None = None,
    epochs: float | None = None,
    sampling: str | None = None,
    mechanism: Mapping[str, Any] | None = None,
    methods: Sequence[str] | None = None,
    neighbouring_relation: str | None = None,
    tolerance: float | None = None,
    time_limit: float | None = None,
) -> Comparison:
    """Compare the ε of all methods with what is proved.

    Args:
        delta: δ: 0, or from 1e-50 to below 1.
        noise_multiplier: σ: standard deviation of the noise over the clip norm.
        sample_rate: q: expected batch size over dataset size.
        steps: T: number of steps.
        dataset_size: number of records; with a batch size, instead of a sample rate.
        batch_size: expected number of records in a batch.
        epochs: passes over the dataset; with dataset and batch size, instead of steps.
        sampling: how batches are drawn: "poisson" (default), "fixed_size", "balls_in_bins",
            "shuffled" or "none".
        mechanism: any mechanism as JSON, instead of a run.
        methods: names of methods; all by default.
        neighbouring_relation: the neighbouring relation: "add_or_remove_one" (default),
            "replace_one" or "zero_out_one".
        tolerance: largest allowed width of the proved interval, as a share of max(ε, 0.05), or of δ
            where δ is computed; without it the service aims at 1e-3 and returns what it reaches.
        time_limit: most CPU seconds that the computation may take; none by default.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: the question has no answer, such as no finite ε, or takes more time.
    """
    found: Comparison = answer("/v1/compare", locals())
    return found


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
    points: int | None = None,
    smallest_batch_size: int | None = None,
    largest_batch_size: int | None = None,
    steps_min: int | None = None,
    neighbouring_relation: str | None = None,
    time_limit: float | None = None,
) -> Plan:
    """Plan a run: batch size, steps and noise within a budget and a compute limit.

    Args:
        epsilon: ε that the run must not exceed, such as 2.
        delta: δ of the budget, such as 1e-5.
        dataset_size: number of records.
        epochs: compute limit: passes over the dataset; without it, `examples`, or `batch_size`
            times `steps`.
        examples: compute limit instead of epochs: batch size times steps.
        batch_size: today's choice, to compare with.
        steps: today's steps, with `batch_size`; as many as the limit allows by default.
        sampling: how batches may be drawn: "both" (default), "poisson" or "balls_in_bins".
        points: batch sizes for each sampling, beside the recommended one; 20 by default.
        smallest_batch_size: smallest batch size to plan; chosen by default.
        largest_batch_size: largest batch size to plan; chosen by default.
        steps_min: fewest steps of a recommended run, if possible; 100 by default.
        neighbouring_relation: the neighbouring relation: "add_or_remove_one" (default),
            "replace_one" or "zero_out_one".
        time_limit: most CPU seconds that the computation may take; none by default.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: the question has no answer, such as no noise multiplier that reaches the
            budget, or takes more time.
    """
    found: Plan = answer("/v1/plan", locals())
    return found


@for_each_element
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
    """Import a configuration or history of another tool: its mechanism, its cost and a lint.

    Args:
        document: the document: JSON, or text that is JSON, TOML, YAML or a Python repr.
        format: the tool that wrote the document; found from it by default.
        delta: δ, if the document names none.
        epsilon: an ε that is claimed.
        dataset_size: number of records, if the document does not say.
        batch_size: expected batch size, if the document does not say.
        sampling: how batches are drawn, if the document does not say: "poisson", "fixed_size",
            "shuffled" or "none".
        neighbouring_relation: the neighbouring relation, if the document does not say:
            "add_or_remove_one", "replace_one" or "zero_out_one".
        time_limit: most CPU seconds that the computation may take; none by default.

    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: the question has no answer, such as no noise that reaches the ε that the
            document targets, or takes more time.
    """
    found: Answer = answer("/v1/import", locals())
    return found
