"""Stated sampling, sizes and neighbours act on every sampled release of an imported document.

One run in many documents: each must cost what the run costs, under each statement.
"""

from __future__ import annotations

from typing import Any

import pytest

from accountant_service import importing, mechanisms
from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.importing import (
    DocumentError,
    Facts,
    account_for,
    read_document,
    require_valid,
)
from tests.support.helpers import codes

ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighbouringRelation.REPLACE_ONE
ZERO_OUT = NeighbouringRelation.ZERO_OUT_ONE
Json = dict[str, Any]


def lint(document: Any, **facts: Any) -> importing.Answer:
    found = read_document(document, Facts(**{"delta": 1e-5, **facts}))
    require_valid(found)
    return account_for(found)


def event(name: str, **fields: Any) -> Json:
    return {"class_name": f"{name}DpEvent", **fields}


def gaussian(noise: float = 1.0) -> Json:
    return event("Gaussian", noise_multiplier=noise)


def sampled(inner: Json | None = None, rate: float = 0.01) -> Json:
    return event("PoissonSampled", sampling_probability=rate, event=inner or gaussian())


def repeated(count: int, inner: Json) -> Json:
    return event("SelfComposed", count=count, event=inner)


def composed(*events: Json) -> Json:
    return event("Composed", events=list(events))


ONE = repeated(1000, sampled())
TWO = composed(repeated(500, sampled()), repeated(500, sampled()))
WRAPPED = {"event": TWO, "neighboring_relation": "ADD_OR_REMOVE_ONE", "delta": 1e-5}
KERAS = {"class_name": "DPKerasConfig", "delta": 1e-5, "clipping_norm": 1.0, "batch_size": 10,
         "train_steps": 1000, "train_size": 1000, "noise_multiplier": 1.0}  # fmt: skip
ARGUMENTS = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "epochs": 10,
             "dataset_size": 1000, "batch_size": 10}  # fmt: skip

# 1000 steps at the rate 0.01 with the noise multiplier 1, without the sizes of data and batches
DOCUMENTS: dict[str, Any] = {
    "event": ONE,
    "event, two phases": TWO,
    "event, two phases beside its relation": WRAPPED,
    "event, nested": composed(
        repeated(250, composed(sampled(), sampled())), composed(repeated(500, sampled()))
    ),
    "event, two releases on a sample": repeated(
        1000, sampled(composed(gaussian(2**0.5), gaussian(2**0.5)))
    ),
    "event, as text": (
        "ComposedDpEvent([SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), "
        "500), SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), 500)])"
    ),
    "Opacus, history": [[1.0, 0.01, 1000]],
    "Opacus, two phases": {"history": [[1.0, 0.01, 500], [1.0, 0.01, 500]], "mechanism": "prv"},
    "jax_privacy, one band": {
        "iterations": 1000, "expected_participations": 10, "num_bands": 1, "noise_multiplier": 1.0,
    },
    "run": {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1000},
}  # fmt: skip
SIZED: dict[str, Any] = {"Opacus, arguments": ARGUMENTS, "jax_privacy, Keras": KERAS}
SIZES = {"dataset_size": 1000, "batch_size": 10}
CODES = {
    "poisson": None,
    "shuffled": "shuffled-as-poisson",
    "fixed_size": "fixed-size-as-poisson",
    "none": "unsampled-as-sampled",
}


def run(sampling: str, noise: float = 1.0, batch: int = 10) -> Json:
    """A run of 1000 steps over 1000 records, as this service describes it."""
    known: Json = {"kind": "dp_sgd", "noise_multiplier": noise, "steps": 1000, "sampling": sampling}
    if sampling == "none":
        return {**known, "sample_rate": 1.0}
    return {**known, "dataset_size": 1000, "batch_size": batch}


def cost(mechanism: Json, relation: NeighbouringRelation = ADD_OR_REMOVE) -> float:
    return calculator.epsilon(mechanisms.from_json(mechanism), 1e-5, relation=relation).epsilon


def expected(sampling: str, noise: float = 1.0, batch: int = 10) -> float:
    relation = ZERO_OUT if sampling == "shuffled" else ADD_OR_REMOVE
    return cost(run(sampling, noise, batch), relation)


@pytest.mark.parametrize("sampling", CODES)
@pytest.mark.parametrize("name", [*DOCUMENTS, *SIZED])
def test_the_stated_sampling_acts_in_every_document(name: str, sampling: str) -> None:
    document = {**DOCUMENTS, **SIZED}[name]
    answer = lint(document, sampling=sampling, epsilon=2.2, **SIZES)
    assert answer.guarantee is not None
    epsilon = answer.guarantee.epsilon
    if name == "event, nested" and sampling == "shuffled":  # single steps are an epoch each
        assert epsilon >= expected(sampling)
    else:
        assert epsilon == pytest.approx(expected(sampling), rel=1e-6)
    assert (answer.claims[-1].status == "proven") == (sampling == "poisson")
    assert codes(answer) & set(CODES.values()) == {CODES[sampling]} - {None}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_stated_sizes_act_in_every_document(name: str) -> None:
    answer = lint(
        DOCUMENTS[name], sampling="poisson", epsilon=2.2, dataset_size=1000, batch_size=500
    )
    assert answer.guarantee is not None
    assert answer.guarantee.epsilon == pytest.approx(expected("poisson", batch=500), rel=1e-6)
    assert "sample-rate-mismatch" in codes(answer)
    assert answer.claims[-1].status == "refuted"
    both = lint(DOCUMENTS[name], sampling="fixed_size", dataset_size=1000, batch_size=20)
    assert both.guarantee is not None
    assert both.guarantee.epsilon == pytest.approx(expected("fixed_size", batch=20), rel=1e-6)
    assert {"sample-rate-mismatch", "fixed-size-as-poisson"} <= codes(both)


def test_only_a_loader_draws_at_less_than_batch_over_dataset_size() -> None:
    sizes = {"dataset_size": 1000, "batch_size": 900}
    event_rate = lint(repeated(20, sampled(rate=0.5)), **sizes)
    assert "sample-rate-mismatch" in codes(event_rate)
    assert event_rate.mechanism is not None
    assert event_rate.mechanism["sample_rate"] == 0.9
    assert "sample-rate-mismatch" not in codes(lint([[1.0, 0.5, 20]], **sizes))


@pytest.mark.parametrize("document", [ONE, TWO, [[1.0, 0.01, 1000]], ARGUMENTS, KERAS])
def test_the_stated_relation_acts(document: Any) -> None:
    answer = lint(document, sampling="poisson", relation=ZERO_OUT)
    assert answer.guarantee is not None
    assert answer.found.relation is ZERO_OUT
    # an event's noise is relative to the sensitivity, which replacement doubles
    noise = 2.0 if document in (ONE, TWO) else 1.0
    replaced = lint(document, sampling="poisson", relation=REPLACE)
    assert replaced.guarantee is not None
    assert replaced.guarantee.epsilon == pytest.approx(
        cost(run("poisson", noise), REPLACE), rel=1e-6
    )
    if isinstance(document, dict) and document is not KERAS:
        inside = document if document is ARGUMENTS else {"event": document}
        inside = {**inside, "neighbouring_relation": "replace_one", "sampling": "poisson"}
        assert lint(inside).guarantee == replaced.guarantee
    # a stated relation stays: shuffled batches have no proved cost if a record is added
    shuffled = lint(document, sampling="shuffled", relation=ADD_OR_REMOVE, epsilon=1e3)
    assert shuffled.found.relation is ADD_OR_REMOVE
    assert shuffled.claims[-1].status == "estimate"
    assert shuffled.claims[-1].true_epsilon is None  # the ε of an estimate is no proved bound


@pytest.mark.parametrize("sampling", CODES)
def test_the_clipped_count_of_adaptive_clipping_is_sampled_like_the_sum(sampling: str) -> None:
    document = {**ARGUMENTS, "clipping": "adaptive", "unclipped_num_std": 0.7}
    answer = lint(document, sampling=sampling)
    # a record that comes or goes changes the count by 1; one that takes another's place changes
    # the sum by 2C and the count by 1
    noise = 1.0 if sampling == "fixed_size" else (1 + 0.75 * 0.7**-2) ** -0.5
    assert answer.guarantee is not None
    assert answer.guarantee.epsilon == pytest.approx(expected(sampling, noise), rel=1e-6)
    assert codes(answer) & set(CODES.values()) == {CODES[sampling]} - {None}


STRATEGY = {"strategy": "DifferentialPrivacyServerSideAdaptiveClipping", "noise_multiplier": 1.0,
            "num_sampled_clients": 10, "num_rounds": 1000, "clipped_count_stddev": 0.7}  # fmt: skip


def test_a_strategy_charges_the_count_by_how_clients_are_drawn() -> None:
    counted = (1 + 0.75 * 0.7**-2) ** -0.5
    fixed = lint({**STRATEGY, "num_clients": 1000}, sampling="fixed_size")
    unsampled = lint({**STRATEGY, "num_clients": 1000}, sampling="none")
    assert fixed.guarantee is not None
    assert unsampled.guarantee is not None
    assert fixed.guarantee.epsilon == pytest.approx(expected("fixed_size"), rel=1e-6)
    assert unsampled.guarantee.epsilon == pytest.approx(expected("none", counted), rel=1e-6)
    assert "unsampled-as-sampled" in codes(unsampled)
    zeroed = read_document({**STRATEGY, "num_clients": 1000}, Facts(relation=ZERO_OUT))
    assert zeroed.mechanism is not None
    inner = zeroed.mechanism.to_json()["mechanism"]["mechanism"]
    assert inner["noise_multiplier"] == pytest.approx(counted)


@pytest.mark.parametrize("sampling", CODES)
def test_a_replaced_record_changes_the_clipped_count_as_theorem_1_assumes(sampling: str) -> None:
    """In batches of fixed size a count of 0 and 1 releases what a count of ±½ releases.

    In a Poisson batch it does not: a record that is not drawn adds 0, and one that is drawn 1.
    """
    document = {**ARGUMENTS, "clipping": "adaptive", "unclipped_num_std": 0.7}
    adaptive = lint(document, sampling=sampling, relation=REPLACE).guarantee
    flat = lint(ARGUMENTS, sampling=sampling, relation=REPLACE).guarantee
    assert adaptive is not None
    assert flat is not None
    if sampling == "poisson":
        assert adaptive.epsilon > 1.1 * flat.epsilon
    else:
        assert adaptive.epsilon == pytest.approx(flat.epsilon, rel=1e-9)


@pytest.mark.parametrize("sampling", ["fixed_size", "none"])
def test_a_replaced_client_changes_the_clipped_count_of_a_strategy_by_one(sampling: str) -> None:
    facts = Facts(relation=REPLACE, sampling=sampling)
    found = read_document({**STRATEGY, "num_clients": 1000}, facts)
    assert found.mechanism is not None
    inner = found.mechanism.to_json()["mechanism"]
    assert (inner.get("mechanism") or inner)["noise_multiplier"] == 1.0


def test_the_sizes_of_fixed_and_truncated_samples_are_checked() -> None:
    fixed = event(
        "SampledWithoutReplacement", source_dataset_size=5000, sample_size=10, event=gaussian()
    )
    answer = lint(composed(repeated(1000, fixed)), sampling="fixed_size", dataset_size=1000)
    assert answer.guarantee is not None
    assert answer.guarantee.epsilon == pytest.approx(expected("fixed_size"), rel=1e-6)
    assert "sample-rate-mismatch" in codes(answer)
    assert "sample-rate-mismatch" not in codes(lint(fixed, dataset_size=5000, batch_size=10))
    truncated = event(
        "TruncatedSubsampledGaussian", dataset_size=5000, sampling_probability=0.01,
        truncated_batch_size=100, noise_multiplier=1.0,
    )  # fmt: skip
    resized = lint(truncated, dataset_size=1000, batch_size=20)
    assert resized.mechanism is not None
    assert (resized.mechanism["dataset_size"], resized.mechanism["sample_rate"]) == (1000, 0.02)
    drawn = lint(repeated(1000, truncated), sampling="fixed_size", **SIZES)
    assert drawn.guarantee is not None
    assert drawn.guarantee.epsilon == pytest.approx(expected("fixed_size"), rel=1e-6)


def test_batches_of_fixed_size_cost_more_than_all_the_data() -> None:
    # the rate 1 is that of a loader that drops its last, smaller batch
    history = [[4.0, 1.0, 20]]
    sizes = {"dataset_size": 1000, "batch_size": 900}
    fixed = lint(history, sampling="fixed_size", epsilon=5.0, **sizes)
    assert fixed.claims[0].status == "refuted"
    shuffled = lint(history, sampling="shuffled", **sizes)
    assert shuffled.found.relation is ZERO_OUT
    assert "shuffled-as-poisson" in codes(shuffled)
    assert not codes(lint(history, sampling="shuffled"))  # each step uses all the data


def test_a_release_on_all_the_data_is_not_sampled() -> None:
    answer = lint(composed(gaussian(5.0), TWO), sampling="fixed_size", **SIZES)
    assert answer.mechanism is not None
    assert answer.mechanism["mechanisms"][0] == {"kind": "gaussian", "noise_multiplier": 5.0}
    assert "fixed-size-as-poisson" in codes(answer)


def test_shuffled_phases_with_different_noise_make_whole_epochs() -> None:
    whole = lint([[2.0, 0.01, 300], [1.0, 0.01, 700]], sampling="shuffled")
    assert whole.guarantee is not None
    phases = [
        {"kind": "dp_sgd", "noise_multiplier": 2.0, "sample_rate": 0.01, "steps": 300,
         "sampling": "shuffled"},
        {"kind": "dp_sgd", "noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 700,
         "sampling": "shuffled"},
    ]  # fmt: skip
    both = {"kind": "composed", "mechanisms": phases}
    assert whole.guarantee.epsilon == pytest.approx(cost(both, ZERO_OUT), rel=1e-6)
    # the same noise: a record is in as many batches as there are epochs
    assert lint([[1.0, 0.01, 50], [1.0, 0.01, 950]], sampling="shuffled").guarantee is not None


BANDED = {"iterations": 1000, "expected_participations": 10, "num_bands": 2,
          "noise_multiplier": 1.0}  # fmt: skip
LAPLACE = event("Laplace", noise_multiplier=1.0)
FIXED = event("SampledWithoutReplacement", source_dataset_size=99, sample_size=9, event=gaussian())
LOCAL = "LocalDpMod(clipping_norm=1.0, sensitivity=2.0, epsilon=10.0, delta=1e-5)"
SVT = {"path": "SVTPrivacy", "args": {"parameters": 10}}
NESTED = sampled(sampled(rate=0.1))


@pytest.mark.parametrize(
    ("document", "facts", "pointer"),
    [
        # sizes or relations that contradict the document
        (ARGUMENTS, {"dataset_size": 2000}, "/dataset_size"),
        (ARGUMENTS, {"batch_size": 20}, "/batch_size"),
        (KERAS, {"dataset_size": 2000}, "/train_size"),
        (KERAS, {"batch_size": 20}, "/batch_size"),
        ({**KERAS, "gradient_accumulation_steps": 2}, {"batch_size": 10}, "/batch_size"),
        ({**BANDED, "num_examples": 1000}, {"dataset_size": 2000}, "/num_examples"),
        ({**WRAPPED, "batch_size": 5}, {"batch_size": 10}, "/batch_size"),
        ({**STRATEGY, "num_clients": 1000}, {"dataset_size": 2000}, "/num_clients"),
        ({**STRATEGY, "num_clients": 1000}, {"batch_size": 20}, "/num_sampled_clients"),
        (WRAPPED, {"relation": REPLACE}, "/neighboring_relation"),
        ({**ARGUMENTS, "neighbouring_relation": "other"}, {}, "/neighbouring_relation"),
        ({**SVT, "neighbouring_relation": "add_or_remove_one"}, {}, ""),
        (LOCAL, {"relation": ADD_OR_REMOVE}, ""),
        (SVT, {"relation": ADD_OR_REMOVE}, ""),
        (ONE, {"dataset_size": 10, "batch_size": 20}, ""),
        ([[1.0, 0.01, 1000]], {"dataset_size": 10, "batch_size": 20}, ""),
        # sampling that contradicts the document
        ({**ARGUMENTS, "poisson_sampling": False}, {"sampling": "poisson"}, "/poisson_sampling"),
        ({**ARGUMENTS, "sampling": "shuffled"}, {"sampling": "poisson"}, "/sampling"),
        ({**ARGUMENTS, "sampling": "poisson", "poisson_sampling": False}, {}, "/poisson_sampling"),
        (repeated(3, FIXED), {"sampling": "poisson"}, "/event"),
        (composed(FIXED), {"sampling": "shuffled"}, "/events/0"),
        ({**STRATEGY, "num_clients": 1000}, {"sampling": "poisson"}, "/num_sampled_clients"),
        ({**STRATEGY, "num_clients": 1000, "sampling": "poisson"}, {}, "/num_sampled_clients"),
        ({**BANDED, "sampling": "shuffled"}, {}, ""),
        ({**SVT, "sampling": "poisson"}, {}, "/sampling"),
        ({**SVT, "sampling": "poisson"}, {"sampling": "none"}, "/sampling"),
        ({"noise_multiplier": 1, "steps": 9, "sample_rate": 0.1, "clipping": "adaptive"}, {},
         "/clipping"),
        # documents without a sampled release
        (LOCAL, {"sampling": "fixed_size"}, ""),
        (SVT, {"sampling": "poisson"}, ""),
        (repeated(10, gaussian()), {"sampling": "fixed_size", **SIZES}, ""),
        (repeated(10, gaussian()), SIZES, ""),
        (STRATEGY, {"sampling": "fixed_size"}, ""),
        # statements that cannot act on a release
        (TWO, {"sampling": "fixed_size"}, "/events/0/event"),
        (TWO, {"sampling": "fixed_size", "dataset_size": 1000}, "/events/0/event"),
        ([[1.0, 1.0, 10]], {"sampling": "fixed_size"}, "/0"),
        (NESTED, {"sampling": "shuffled"}, ""),
        (sampled(FIXED), {"sampling": "poisson"}, ""),
        (composed(NESTED), {"sampling": "fixed_size", "dataset_size": 9}, "/events/0"),
        (NESTED, SIZES, ""),
        (repeated(10, sampled(LAPLACE)), {"sampling": "shuffled"}, "/event/event"),
        (BANDED, {"sampling": "shuffled"}, ""),
        (BANDED, {"sampling": "fixed_size", **SIZES}, ""),
        ([[2.0, 0.01, 50], [1.0, 0.01, 950]], {"sampling": "shuffled"}, "/0"),
    ],
)  # fmt: skip
def test_a_statement_that_cannot_act_is_refused(document: Any, facts: Json, pointer: str) -> None:
    with pytest.raises(DocumentError) as refused:
        lint(document, **facts)
    assert [at for at, _ in refused.value.faults] == [pointer]


def test_the_rate_of_a_banded_plan_is_that_of_a_group() -> None:
    document = {**BANDED, "expected_participations": 100}
    right = lint(document, dataset_size=1000, batch_size=100)
    assert "sample-rate-mismatch" not in codes(right)
    wrong = lint(document, dataset_size=1000, batch_size=200)
    assert "sample-rate-mismatch" in codes(wrong)
    assert wrong.mechanism is not None
    assert wrong.mechanism["sample_rate"] == 0.4


@pytest.mark.parametrize("document", [{**WRAPPED, **SIZES}, {"history": [[1.0, 0.01, 1000]]}])
def test_a_document_states_sampling_beside_its_event_or_history(document: Json) -> None:
    answer = lint({**document, "sampling": "fixed_size", **SIZES})
    assert answer.guarantee is not None
    assert answer.guarantee.epsilon == pytest.approx(expected("fixed_size"), rel=1e-6)
    (found,) = (each for each in answer.findings if each.code == "fixed-size-as-poisson")
    assert found.pointer == "/sampling"


def test_samples_within_samples_are_all_taken_away() -> None:
    answer = lint(repeated(5, sampled(sampled(rate=0.1), rate=1.0)), sampling="none")
    assert answer.guarantee is not None
    assert answer.guarantee.epsilon == pytest.approx(
        cost({"kind": "repeated", "count": 5, "mechanism": {"kind": "gaussian",
              "noise_multiplier": 1.0}})
    )  # fmt: skip
