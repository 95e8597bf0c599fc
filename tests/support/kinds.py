"""The documents of mechanisms, and short questions about them.

A constructor takes a kind's fields in the order given here; optional fields by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import (
    Guarantee,
    Interval,
    NeighbouringRelation,
    Status,
)

Json = dict[str, Any]
ADDED = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACED = NeighbouringRelation.REPLACE_ONE
ZEROED = NeighbouringRelation.ZERO_OUT_ONE


def _maker(kind: str) -> Callable[..., Json]:
    """Return the constructor of a kind's documents: of its fields in their order."""
    names = [field.name for field in fields(mechanisms.KINDS[kind])]

    def make(*values: Any, **more: Any) -> Json:
        """Return a document with these values."""
        assert len(values) <= len(names), kind
        return {"kind": kind} | dict(zip(names, values, strict=False)) | more

    return make


gaussian = _maker("gaussian")
laplace = _maker("laplace")
diagonal_gaussian = _maker("diagonal_gaussian")
poisson = _maker("poisson_sampled")
fixed_size = _maker("fixed_size_sampled")
truncated_poisson = _maker("truncated_poisson_sampled")
balls_in_bins = _maker("balls_in_bins")
repeated = _maker("repeated")
dp_sgd = _maker("dp_sgd")
randomized_response = _maker("randomized_response")
discrete_laplace = _maker("discrete_laplace")
discrete_gaussian = _maker("discrete_gaussian")
exponential = _maker("exponential")
permute_and_flip = _maker("permute_and_flip")
truncated_laplace = _maker("truncated_laplace")
factorization = _maker("matrix_factorization")
banded = _maker("banded_matrix_factorization")
tree_aggregation = _maker("tree_aggregation")
shuffled_reports = _maker("shuffled_reports")
approximate_dp = _maker("approximate_dp")
gdp = _maker("gdp")
zcdp = _maker("zcdp")
rdp = _maker("rdp")
privacy_profile = _maker("privacy_profile")
gaussian_mixture = _maker("gaussian_mixture")
user_level = _maker("user_level")


def composed(*parts: Json) -> Json:
    """Return the document of releases one after another."""
    return {"kind": "composed", "mechanisms": list(parts)}


def parallel(*parts: Json) -> Json:
    """Return the document of releases on disjoint parts of the data."""
    return {"kind": "parallel", "mechanisms": list(parts)}


def selection(distribution: str, mean: float, mechanism: Json, **more: float) -> Json:
    """Return the document of the best of a random number of runs."""
    repeats = {"distribution": distribution, "mean": mean} | more
    return {"kind": "private_selection", "repeats": repeats, "mechanism": mechanism}


def kinds_of(document: Json) -> set[str]:
    """Return the kinds of a document and of all that is in it."""
    inner = [*document.get("mechanisms", []), document.get("mechanism")]
    return {document["kind"]}.union(*(kinds_of(each) for each in inner if each))


def epsilon_at(
    document: Json, delta: float, relation: NeighbouringRelation = ADDED, method: str = "pld"
) -> Guarantee:
    """Return the guarantee of a document at δ."""
    return calculator.epsilon(mechanisms.from_json(document), delta, method, relation)


def proved_epsilon(
    document: Json, delta: float, relation: NeighbouringRelation = ADDED
) -> Interval:
    """Return the proved interval of ε at δ."""
    return _proved(epsilon_at(document, delta, relation))


def proved_delta(
    document: Json, epsilon: float, relation: NeighbouringRelation = ADDED
) -> Interval:
    """Return the proved interval of δ at ε."""
    tree = mechanisms.from_json(document)
    return _proved(calculator.delta(tree, epsilon, relation=relation))


def _proved(found: Guarantee) -> Interval:
    """Return the interval of a proved guarantee."""
    assert found.status is Status.PROVEN
    assert found.certified is not None
    return found.certified


def hash_of(document: Json) -> str:
    """Return the hash of a document's canonical form: equal for mechanisms of equal meaning."""
    return mechanisms.canonical_form(mechanisms.from_json(document)).hash
