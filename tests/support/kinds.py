"""The documents of mechanisms, and short questions about them.

A constructor takes a kind's fields in the order given here; optional fields by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accountant_service import calculator, mechanisms
from accountant_service.guarantee import Guarantee, Interval, NeighbouringRelation, Status

Json = dict[str, Any]
ADDED = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACED = NeighbouringRelation.REPLACE_ONE
ZEROED = NeighbouringRelation.ZERO_OUT_ONE


def _maker(kind: str, *fields: str) -> Callable[..., Json]:
    """Return the constructor of a kind's documents."""

    def make(*values: Any, **more: Any) -> Json:
        """Return a document with these values."""
        assert len(values) <= len(fields), kind
        return {"kind": kind} | dict(zip(fields, values, strict=False)) | more

    return make


gaussian = _maker("gaussian", "noise_multiplier")
laplace = _maker("laplace", "noise_multiplier")
diagonal_gaussian = _maker("diagonal_gaussian", "sensitivities", "noise_stds")
poisson = _maker("poisson_sampled", "sample_rate", "mechanism")
fixed_size = _maker("fixed_size_sampled", "dataset_size", "batch_size", "mechanism")
truncated_poisson = _maker(
    "truncated_poisson_sampled", "dataset_size", "sample_rate", "batch_size_max", "mechanism"
)
balls_in_bins = _maker("balls_in_bins", "bins", "mechanism")
repeated = _maker("repeated", "count", "mechanism")
dp_sgd = _maker("dp_sgd", "noise_multiplier")
randomized_response = _maker("randomized_response", "categories", "flip_probability")
discrete_laplace = _maker("discrete_laplace", "scale", "sensitivity")
discrete_gaussian = _maker("discrete_gaussian", "noise_std", "sensitivity")
exponential = _maker("exponential", "epsilon")
permute_and_flip = _maker("permute_and_flip", "epsilon")
truncated_laplace = _maker("truncated_laplace", "scale", "bound", "sensitivity")
factorization = _maker(
    "matrix_factorization",
    *("noise_multiplier", "coefficients", "steps", "min_separation", "participations"),
)
banded = _maker(
    "banded_matrix_factorization",
    *("noise_multiplier", "coefficients", "steps", "groups", "sample_rate"),
)
tree_aggregation = _maker("tree_aggregation", "noise_multiplier", "steps")
shuffled_reports = _maker("shuffled_reports", "reports", "mechanism")
approximate_dp = _maker("approximate_dp", "epsilon", "delta")
gdp = _maker("gdp", "mu")
zcdp = _maker("zcdp", "rho")
rdp = _maker("rdp", "orders", "divergences")
privacy_profile = _maker("privacy_profile", "epsilons", "deltas")
gaussian_mixture = _maker("gaussian_mixture", "noise_multiplier", "shifts", "probabilities")
user_level = _maker("user_level", "records", "mechanism")


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
