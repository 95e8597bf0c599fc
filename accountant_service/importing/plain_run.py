"""A training run in the words of papers: noise multiplier, batch and data size, steps or epochs.

The sample rate is the batch size over the number of records.
"""

from __future__ import annotations

from typing import Final

from accountant_service.importing.document import Json, Part
from accountant_service.importing.imported import Facts, Imported
from accountant_service.importing.runs import read_run

_NOISE: Final = {"noise_multiplier", "sigma", "epsilon"}
_LENGTH: Final = {"steps", "epochs"}


def detect(document: Json) -> bool:
    """Return whether a document has noise or ε, and a number of steps or epochs."""
    return (
        isinstance(document, dict)
        and bool(_NOISE & document.keys())
        and bool(_LENGTH & document.keys())
    )


def read(document: Part, facts: Facts) -> Imported:
    """Import a training run described by noise, sizes and a number of steps or epochs."""
    clipping = document.find("clipping")
    if clipping is not None and clipping.value == "adaptive":
        raise clipping.fault(
            "releases a count of clipped records, which is read as Opacus makes it: state "
            "unclipped_num_std, and import the document as opacus"
        )
    return read_run(document, facts, "a training run", by_loader=False)
