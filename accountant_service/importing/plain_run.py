"""A training run in the words of papers: noise multiplier, batch and data size, steps or epochs.

The sample rate is the batch size over the number of records. The keys have the names of TensorFlow
Privacy, Keras, Lightning and Hugging Face too.
"""

from __future__ import annotations

from typing import Final

from accountant_service.importing.imported import Facts, Imported
from accountant_service.importing.keys import (
    CLAIM,
    POST_PROCESSING,
    SAMPLING,
    SEED,
    SIZES,
    UNIT,
    Fields,
    checked,
    harmless,
    join,
)
from accountant_service.importing.runs import RUN, read_run
from accountant_service.importing.unit import MICROBATCHES

KEYS: Final = join(
    *RUN,
    *SIZES,
    *SAMPLING,
    *CLAIM,
    *UNIT,
    *MICROBATCHES,
    checked("clipping", "must not be adaptive, which releases a count as well"),
    harmless("accountant_type accountant method", "the ε of any other accountant is not used"),
    SEED,
    *POST_PROCESSING,
)


def detect(fields: Fields) -> bool:
    """Return whether a document has noise, a target ε or a length of a run."""
    return any(fields.has(name) for name in ("noise_multiplier", "epsilon", "steps", "epochs"))


def read(fields: Fields, facts: Facts) -> Imported:
    """Import a training run described by noise, sizes and a number of steps or epochs."""
    clipping = fields.find("clipping")
    if clipping is not None and clipping.choice(("flat", "per_layer", "adaptive")) == "adaptive":
        raise clipping.fault(
            "releases a count of clipped records, which is read as Opacus makes it: state "
            "unclipped_num_std, and import the document as opacus"
        )
    return read_run(fields, facts, "a training run", by_loader=False)
