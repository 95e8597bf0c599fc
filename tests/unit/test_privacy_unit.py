"""Answers state their unit: one record, or a person with a limited number of records."""

from __future__ import annotations

import time
from typing import Any

import pytest

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.questions.registry import ENDPOINTS

Json = dict[str, Any]
GAUSSIAN: Json = {"kind": "gaussian", "noise_multiplier": 4.0}
LAPLACE: Json = {"kind": "laplace", "noise_multiplier": 4.0}


def of_person(records: int, inner: Json) -> Json:
    return {"kind": "user_level", "records": records, "mechanism": inner}


def composed(*inner: Json) -> Json:
    return {"kind": "composed", "mechanisms": list(inner)}


def sampled(inner: Json) -> Json:
    return {"kind": "poisson_sampled", "sample_rate": 0.1, "mechanism": inner}


def units(described: Json, method: str = "pld") -> list[str]:
    """Return the statements of an answer that are about its unit."""
    found = calculator.epsilon(mechanisms.from_json(described), 1e-5, method)
    return [each.statement for each in found.assumptions if "the unit is" in each.statement]


@pytest.mark.parametrize(
    "described",
    [
        of_person(4, GAUSSIAN),
        of_person(2, {"kind": "repeated", "count": 3, "mechanism": of_person(2, GAUSSIAN)}),
        composed(of_person(4, GAUSSIAN), of_person(4, sampled(GAUSSIAN))),
        sampled(composed(of_person(4, GAUSSIAN), GAUSSIAN)),
    ],
)
def test_an_answer_at_user_level_states_that_its_unit_is_a_person(described: Json) -> None:
    (unit,) = units(described)
    assert unit.startswith("the unit is a person, who has at most 4 records: ")


@pytest.mark.parametrize(
    "described",
    [
        composed(of_person(4, GAUSSIAN), GAUSSIAN),
        composed(of_person(4, sampled(GAUSSIAN)), LAPLACE),
        composed(of_person(2, GAUSSIAN), of_person(4, GAUSSIAN)),
    ],
)
def test_a_composition_with_record_level_states_what_it_needs_of_a_person(described: Json) -> None:
    (unit,) = units(described)
    assert unit.startswith("the unit is a person, who has at most 4 records, and in each release")
    assert unit.endswith("the claim holds for one record only")


@pytest.mark.parametrize("described", [GAUSSIAN, of_person(1, GAUSSIAN), composed()])
def test_an_answer_about_records_states_no_person(described: Json) -> None:
    assert units(described) == []


def test_other_methods_state_the_unit_too() -> None:
    assert len(units(composed(of_person(4, GAUSSIAN), GAUSSIAN), "subsampled_rdp")) == 1


def test_a_trade_off_states_the_unit() -> None:
    relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    tree = mechanisms.from_json(of_person(4, GAUSSIAN))
    found = calculator.trade_off(tree, 0.5, 3, relation)
    assert any("the unit is a person" in each.statement for each in found.assumptions)


def test_equal_costs_for_different_units_are_different_questions() -> None:
    """Noise 4 for a person with 4 records is noise 1 for a record, and the answers differ."""
    endpoint = ENDPOINTS["/v1/epsilon"]
    person, record = (
        endpoint.request.model_validate({"mechanism": each, "delta": 1e-5})
        for each in (of_person(4, GAUSSIAN), {"kind": "gaussian", "noise_multiplier": 1.0})
    )
    forms = [mechanisms.canonical_form(each.mechanism) for each in (person, record)]  # type: ignore[attr-defined]
    assert forms[0].hash == forms[1].hash
    assert endpoint.key(person) != endpoint.key(record)


def cost_of_forty(
    rate: float, delta: float, relation: str = "add_or_remove_one", times: int = 2
) -> float:
    """Return ε of releases with noise 5.6 that may have forty records of one person."""
    noise: Json = {"kind": "gaussian", "noise_multiplier": 5.6}
    on_sample: Json = {"kind": "poisson_sampled", "sample_rate": rate, "mechanism": noise}
    inner = noise if rate == 1.0 else on_sample
    described = mechanisms.from_json(
        of_person(40, {"kind": "repeated", "count": times, "mechanism": inner})
    )
    relation = NeighbouringRelation(relation)
    return calculator.epsilon(described, delta, relation=relation).epsilon


@pytest.mark.parametrize(
    ("delta", "once", "right"), [(1e-6, 98.2816, 98.2188), (2.4e-29, 4471, 163.34)]
)
def test_a_sampled_person_costs_no_more_than_it_once_did(
    delta: float, once: float, right: float
) -> None:
    """At rates near 1 the answer was `once`; the same person without sampling costs `right`."""
    unsampled = cost_of_forty(1.0, delta)
    assert unsampled == pytest.approx(right, rel=1e-5)
    assert cost_of_forty(0.9999995, delta) <= unsampled < once


_DELTAS = (0.5, 1e-2, 1e-3, 1e-4, 1e-5, 1e-7, 1e-9, 1e-12, 1e-16, 1e-20, 1e-24, 1e-29, 1e-35, 1e-42,
           1e-49)  # fmt: skip


@pytest.mark.spread(first=2, second=3)
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize(
    ("delta", "times"),
    [
        (1e-5, (2,)),
        (1e-49, (2,)),
        *(pytest.param(each, (7,), marks=pytest.mark.slow) for each in _DELTAS[::3]),
        *(pytest.param(each, (1, 2, 7), marks=pytest.mark.nightly) for each in _DELTAS),
    ],
)
def test_sampling_never_costs_a_person_more(
    relation: str, delta: float, times: tuple[int, ...]
) -> None:
    for count in times:
        unsampled = cost_of_forty(1.0, delta, relation, count)
        for rate in (0.5, 0.9999995, 1 - 2.0**-53):
            sampled = cost_of_forty(rate, delta, relation, count)
            assert sampled <= unsampled, (rate, count)


@pytest.mark.slow
def test_a_person_with_many_records_is_answered_quickly() -> None:
    """256 records took 51.8 CPU seconds; the exact value is 1 − 2e-16 by ball arithmetic."""
    described = mechanisms.from_json(
        of_person(256, {"kind": "poisson_sampled", "sample_rate": 0.5, "mechanism": GAUSSIAN})
    )
    before = time.process_time()
    found = calculator.delta(described, 20.0)
    assert time.process_time() - before < 3.0
    assert found.certified is not None
    assert found.certified.lower <= 1 - 2e-16 <= found.certified.upper


@pytest.mark.slow
def test_many_releases_that_show_who_took_part_have_a_delta_of_nearly_one() -> None:
    """Lattices for all of them took 27 CPU seconds, and their lower bound was .967."""
    one = {"kind": "poisson_sampled", "sample_rate": 0.5, "mechanism": GAUSSIAN | {
        "noise_multiplier": 10.0}}  # fmt: skip
    described = mechanisms.from_json({"kind": "repeated", "count": 100,
                                      "mechanism": of_person(256, one)})  # fmt: skip
    before = time.process_time()
    for epsilon in (2.0, 60.0):
        found = calculator.delta(described, epsilon)
        assert found.certified is not None
        assert 0.9999 < found.certified.lower <= found.certified.upper == 1.0
    assert time.process_time() - before < 9.0  # three on an idle machine
