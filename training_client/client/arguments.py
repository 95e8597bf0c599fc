"""Keyword arguments of the typed client, one class for each question.

`python -m scripts.question_functions --write` writes this module from the models of the service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Required, TypedDict


class RunArguments(TypedDict, total=False):
    """Keyword arguments that describe a DP-SGD run; used where no mechanism is given.

    Attributes:
        noise_multiplier: σ: standard deviation of the noise over the clip norm.
        sample_rate: q: expected batch size over dataset size.
        steps: T: number of steps.
        dataset_size: number of records; with a batch size, instead of a sample rate.
        batch_size: expected number of records in a batch.
        epochs: passes over the dataset; with dataset and batch size, instead of steps.
        sampling: how batches are drawn: "poisson" (default), "fixed_size", "balls_in_bins",
            "shuffled" or "none".
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    dataset_size: int
    batch_size: int
    epochs: float
    sampling: str


class EpsilonArguments(RunArguments, total=False):
    """Keyword arguments of `AccountingService.epsilon`.

    Attributes:
        tolerance: largest allowed width of the proved interval, as a share of max(ε, 0.05), or of δ
            where δ is computed; without it the service aims at 1e-3 and returns what it reaches.
    """

    tolerance: float


class DeltaArguments(RunArguments, total=False):
    """Keyword arguments of `AccountingService.delta`.

    Attributes:
        tolerance: largest allowed width of the proved interval, as a share of max(ε, 0.05), or of δ
            where δ is computed; without it the service aims at 1e-3 and returns what it reaches.
    """

    tolerance: float


class NoiseMultiplierArguments(TypedDict, total=False):
    """Keyword arguments of `AccountingService.noise_multiplier`.

    Attributes:
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
    """

    epsilon: float
    delta: float
    advantage: float
    attack_success: float
    prior: float
    true_positive_rate: float
    false_positive_rate: float
    mu: float
    sample_rate: float
    steps: int
    dataset_size: int
    batch_size: int
    epochs: float
    sampling: str
    earlier: Mapping[str, Any]
    method: str
    neighbouring_relation: str


class StepsArguments(TypedDict, total=False):
    """Keyword arguments of `AccountingService.steps`.

    Attributes:
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
    """

    epsilon: float
    delta: float
    advantage: float
    attack_success: float
    prior: float
    true_positive_rate: float
    false_positive_rate: float
    mu: float
    noise_multiplier: Required[float]
    sample_rate: float
    dataset_size: int
    batch_size: int
    sampling: str
    earlier: Mapping[str, Any]
    method: str
    neighbouring_relation: str


class SampleRateArguments(TypedDict, total=False):
    """Keyword arguments of `AccountingService.sample_rate`.

    Attributes:
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
    """

    epsilon: float
    delta: float
    advantage: float
    attack_success: float
    prior: float
    true_positive_rate: float
    false_positive_rate: float
    mu: float
    noise_multiplier: Required[float]
    steps: Required[int]
    earlier: Mapping[str, Any]
    method: str
    neighbouring_relation: str


class SolveArguments(TypedDict, total=False):
    """Keyword arguments of `AccountingService.solve`.

    Attributes:
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
    """

    epsilon: float
    delta: float
    advantage: float
    attack_success: float
    prior: float
    true_positive_rate: float
    false_positive_rate: float
    mu: float
    earlier: Mapping[str, Any]
    method: str
    neighbouring_relation: str


class CompareArguments(RunArguments, total=False):
    """Keyword arguments of `AccountingService.compare`.

    Attributes:
        methods: names of methods; all by default.
        tolerance: largest allowed width of the proved interval, as a share of max(ε, 0.05), or of δ
            where δ is computed; without it the service aims at 1e-3 and returns what it reaches.
    """

    methods: Sequence[str]
    tolerance: float


class PlanArguments(TypedDict, total=False):
    """Keyword arguments of `AccountingService.plan`.

    Attributes:
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
    """

    epsilon: Required[float]
    delta: Required[float]
    dataset_size: Required[int]
    epochs: float
    examples: int
    batch_size: int
    steps: int
    sampling: str
    points: int
    smallest_batch_size: int
    largest_batch_size: int
    steps_min: int
    neighbouring_relation: str


class ImportDocumentArguments(TypedDict, total=False):
    """Keyword arguments of `AccountingService.import_document`.

    Attributes:
        format: the tool that wrote the document; found from it by default.
        epsilon: an ε that is claimed.
        dataset_size: number of records, if the document does not say.
        batch_size: expected batch size, if the document does not say.
        sampling: how batches are drawn, if the document does not say: "poisson", "fixed_size",
            "shuffled" or "none".
        neighbouring_relation: the neighbouring relation, if the document does not say:
            "add_or_remove_one", "replace_one" or "zero_out_one".
    """

    format: str
    epsilon: float
    dataset_size: int
    batch_size: int
    sampling: str
    neighbouring_relation: str
