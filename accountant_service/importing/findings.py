"""Findings of the lint: what is wrong in an imported configuration, and what is true instead."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Severity(StrEnum):
    """The severity of a finding.

    An error: a claim is false, the tool accounts for something other than what is run, or no proof
    covers its ε. A warning names something that the claim rests on and that the document does not
    establish. A note is for information.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


# Every code that a finding can have, with its severity and its title.
CODES: Final[dict[str, tuple[Severity, str]]] = {
    "claim-refuted": (Severity.ERROR, "The claimed ε is below a proved lower bound"),
    "accountant-refuted": (Severity.ERROR, "The tool's accountant reports less than is true"),
    "claim-not-proven": (Severity.WARNING, "The claimed ε is not proved"),
    "claim-loose": (Severity.NOTE, "The claimed ε is larger than needed"),
    "sample-rate-mismatch": (Severity.ERROR, "The sample rate is not batch over dataset size"),
    "shuffled-as-poisson": (Severity.ERROR, "Shuffled batches are accounted as Poisson"),
    "unsampled-as-sampled": (Severity.ERROR, "Noise on all the data is accounted as sampled"),
    "fixed-size-as-poisson": (Severity.ERROR, "Batches of fixed size are accounted as Poisson"),
    "sampling-not-stated": (Severity.WARNING, "How batches are drawn is not stated"),
    "sensitivity-below-clip": (Severity.ERROR, "The sensitivity is below the clipping norm"),
    "sensitivity-above-clip": (Severity.NOTE, "The sensitivity is above the clipping norm"),
    "local-sensitivity": (Severity.ERROR, "Two clipped updates differ by twice the norm"),
    "classical-gaussian": (Severity.ERROR, "The classical Gaussian formula is used for ε ≥ 1"),
    "per-round-budget": (Severity.WARNING, "ε is per round, not of the run"),
    "adaptive-clip-count": (
        Severity.ERROR,
        "The noisy count of clipped records is charged too little",
    ),
    "weighted-average": (Severity.WARNING, "A weighted average has a larger sensitivity"),
    "client-count-mismatch": (Severity.ERROR, "Fewer clients are averaged than planned"),
    "release-budget": (Severity.ERROR, "The stated ε leaves out the cost of the released values"),
    "no-guarantee": (Severity.ERROR, "This filter has no privacy guarantee"),
    "delta-too-large": (Severity.WARNING, "δ is not below 1/N"),
    "unknown-key": (Severity.ERROR, "A key is not known, so nothing is proven"),
    "unused-key": (Severity.ERROR, "A key has no part in the cost, so nothing is proven"),
    "several-runs": (Severity.ERROR, "Two sections may describe two runs"),
    "microbatches": (Severity.ERROR, "Several records are clipped together"),
    "privacy-unit": (Severity.ERROR, "The cost is that of another unit than the stated one"),
    "accumulated-batches": (Severity.WARNING, "Several batches make one noisy update"),
    "accumulated-steps": (Severity.WARNING, "Steps may count batches, not noisy updates"),
    "seed-stated": (Severity.WARNING, "The seed of the noise is in the document"),
    "sampling-by-default": (Severity.NOTE, "The tool's default says how batches are drawn"),
    "relation-not-stated": (Severity.NOTE, "The neighbouring relation is not stated"),
    "noise-chosen": (Severity.NOTE, "The noise is chosen for a target ε"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about an imported document: what is wrong, and what is true or what to do.

    Attributes:
        code: a key of `CODES`.
        pointer: JSON pointer into the document.
        message: what is wrong.
        instead: what is true instead, or what to do.
    """

    code: str
    pointer: str
    message: str
    instead: str = ""

    @property
    def severity(self) -> Severity:
        """The severity of a finding with this code."""
        return CODES[self.code][0]
