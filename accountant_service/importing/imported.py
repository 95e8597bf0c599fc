"""Models of an imported document: the mechanism, the claims and the facts around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.importing.findings import Finding


@dataclass(frozen=True, slots=True)
class Node:
    """A mechanism read from a document, with a pointer to the part that describes it.

    Attributes:
        kind: the mechanism's kind.
        pointer: JSON pointer of the part of the document.
        fields: the mechanism's fields: numbers, strings, lists of numbers, nodes, lists of nodes.
    """

    kind: str
    pointer: str
    fields: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the mechanism as JSON, with all mechanisms inside it."""
        return {"kind": self.kind} | {name: _to_json(value) for name, value in self.fields.items()}

    def source_of(self, pointer: str) -> str:
        """Convert a JSON pointer into the mechanism to a pointer into the document."""
        inner: Any = self
        found = self.pointer
        for step in pointer.split("/")[1:]:
            if isinstance(inner, Node):
                inner = inner.fields.get(step)
            elif isinstance(inner, list) and step.isdigit() and int(step) < len(inner):
                inner = inner[int(step)]
            else:
                break
            found = inner.pointer if isinstance(inner, Node) else found
        return found

    def but(self, **fields: Any) -> Node:
        """Return a copy with some fields changed; a field given as None is removed."""
        changed = {**self.fields, **fields}
        return replace(
            self, fields={name: value for name, value in changed.items() if value is not None}
        )


def _to_json(value: Any) -> Any:
    """Return the value of a node's field as JSON."""
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    return value.to_json() if isinstance(value, Node) else value


@dataclass(frozen=True, slots=True)
class Claim:
    """An (ε, δ) guarantee that a document, or the user who imports it, claims.

    Attributes:
        epsilon: the claimed ε.
        delta: the claimed δ; None means the δ of the whole answer.
        pointer: where it is claimed.
        mechanism: what it is claimed of, if not of the whole mechanism.
        relation: the neighbouring relation of the claim, if not that of the whole mechanism.
        is_refuted: whether the claim is false whatever its mechanism costs, because there is
            almost no noise; a finding has the reason.
    """

    epsilon: float
    delta: float | None
    pointer: str
    mechanism: Node | None = None
    relation: NeighbouringRelation | None = None
    is_refuted: bool = False


@dataclass(frozen=True, slots=True)
class Imported:
    """A document's content: its mechanism, its claims and the lint's findings.

    Attributes:
        tool: the tool and the kind of document, in words.
        mechanism: what is run; None if it has no guarantee at all. A `dp_sgd` node without
            `noise_multiplier` has the noise that reaches `target`.
        relation: the neighbouring relation of the claims.
        delta: δ that the document names.
        target: ε that the tool chooses the noise for.
        method: our name of the accounting method that the tool uses.
        accounted: what the tool accounts for, if that is not what is run.
        claims: what is claimed.
        findings: what the parser has found wrong.
        dataset_size: number of records.
        batch_size: expected number of records in a batch.
        sampling: how the tool draws batches if nothing is stated, if not as it accounts for them.
        sampling_pointer: where the document says how batches are drawn, or would say it.
        has_loader_rate: whether batches are drawn at one over the number of batches of a loader.
        groups: number of groups that the records are in, of which each step samples one.
        epochs: whole passes over the data, if they are stated.
        epoch_batches: of shuffled data, the fewest that an epoch can have, if that is known: more
            epochs in as many steps cost more.
        is_sampling_stated: whether the document, by its form or by the default that its tool
            documents, says how batches are drawn.
        premises: unchecked statements that the cost rests on; with any, nothing is proven.
        libraries: names of those that may draw the tool's noise, as in `noise_tails`.
    """

    tool: str
    mechanism: Node | None
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    delta: float | None = None
    target: float | None = None
    method: str | None = None
    accounted: Node | None = None
    claims: tuple[Claim, ...] = ()
    findings: tuple[Finding, ...] = field(default=())
    dataset_size: int | None = None
    batch_size: int | None = None
    sampling: str | None = None
    sampling_pointer: str = ""
    has_loader_rate: bool = False
    groups: int = 1
    epochs: int | None = None
    epoch_batches: float | None = None
    is_sampling_stated: bool = False
    premises: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()

    def unless(self, premise: str, *findings: Finding) -> Imported:
        """Return a copy whose cost rests on one more premise, with findings that say why."""
        return replace(
            self, premises=(*self.premises, premise), findings=(*self.findings, *findings)
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a document leaves out and the user states, such as the dataset size.

    Attributes:
        dataset_size: number of records.
        batch_size: expected number of records in a batch.
        sampling: how batches are drawn.
        epsilon: the claimed ε.
        delta: δ.
        relation: the neighbouring relation.
    """

    dataset_size: int | None = None
    batch_size: int | None = None
    sampling: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    relation: NeighbouringRelation | None = None
