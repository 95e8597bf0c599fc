"""The functions that ask for ε, for δ, and for a comparison of methods.

`python -m scripts.question_functions --write` writes this module from the models in
`api/schemas.py`: change a question there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accountant_service.questions.arguments import answer
from accountant_service.questions.arrays import for_each_element

if TYPE_CHECKING:
    from accountant_service.calculator import Comparison
    from accountant_service.guarantee import Guarantee


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
