"""Answers state their unit: one record, or a person with a limited number of records."""

from __future__ import annotations

import time
from typing import Any

import pytest

from accountant_service import calculator, mechanisms
from accountant_service.api.questions import ENDPOINTS
from accountant_service.guarantee import NeighbouringRelation

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


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize("delta", [1e-5, 2.4e-29, 1e-49])
def test_sampling_never_costs_a_person_more(relation: str, delta: float) -> None:
    """A sampled person cost 98.2816 where the same person without sampling cost 98.2188."""

    def upper(inner: Json) -> float:
        described = mechanisms.from_json(
            of_person(40, {"kind": "repeated", "count": 2, "mechanism": inner})
        )
        found = calculator.epsilon(described, delta, relation=NeighbouringRelation(relation))
        return found.epsilon

    noise: Json = {"kind": "gaussian", "noise_multiplier": 5.6}
    for rate in (0.5, 0.9999995):
        on_sample: Json = {"kind": "poisson_sampled", "sample_rate": rate, "mechanism": noise}
        assert upper(on_sample) <= upper(noise) * (1 + 1e-9)


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
