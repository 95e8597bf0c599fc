"""What is released: the closed, frozen tree of mechanism descriptions and its JSON form."""

from accountant_service.mechanisms.canonical import Atom, CanonicalForm, canonical_form
from accountant_service.mechanisms.codec import MechanismError, from_json, json_schema, to_json
from accountant_service.mechanisms.sizes import sizes_other_than
from accountant_service.mechanisms.tree import (
    Composed,
    DiagonalGaussian,
    DpSgd,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    Mechanism,
    PoissonSampled,
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
    "Repeated",
    "Sampling",
    "canonical_form",
    "from_json",
    "json_schema",
    "sizes_other_than",
    "to_json",
]
