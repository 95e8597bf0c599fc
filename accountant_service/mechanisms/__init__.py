"""Mechanism descriptions: the tree of what is released, its JSON form and its canonical form."""

from accountant_service.mechanisms.canonical import Atom, CanonicalForm, canonical_form
from accountant_service.mechanisms.codec import MechanismError, from_json, json_schema, to_json
from accountant_service.mechanisms.dataset_sizes import find_dataset_size_mismatches
from accountant_service.mechanisms.in_words import describe_step
from accountant_service.mechanisms.tree import (
    Composed,
    DiagonalGaussian,
    DpSgd,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    Mechanism,
    PoissonSampled,
    RandomizedResponse,
    Repeated,
    Sampling,
)

__all__ = [
    "Atom",
    "CanonicalForm",
    "Composed",
    "DiagonalGaussian",
    "DpSgd",
    "FixedSizeSampled",
    "Gaussian",
    "Laplace",
    "Mechanism",
    "MechanismError",
    "PoissonSampled",
    "RandomizedResponse",
    "Repeated",
    "Sampling",
    "canonical_form",
    "describe_step",
    "find_dataset_size_mismatches",
    "from_json",
    "json_schema",
    "to_json",
]
