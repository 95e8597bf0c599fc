"""Every result that the five papers print, and the experiments that answer it.

`printed.csv` has a row for each: paper, place, claim, value as in the paper, unit, the paper's
epochs, a reference to our result as in the paper (without a guarantee), one to our result with a
guarantee, and a note where there is neither. A reference is one of

    EXPERIMENT                  its final score
    EXPERIMENT over EXPERIMENT  the difference of their final scores
    EXPERIMENT at ACCURACY      ε when it first reaches an accuracy
    EXPERIMENT until EPSILON    its score at the last point with at most this ε
    EXPERIMENT seconds          its time per step
    EXPERIMENT estimate         √E′[g²] over |g| at the last step that is watched
    EXPERIMENT noise            the share of σᵢ below 10 there, and from 10 to 20 at the first
    EXPERIMENT by DELTA         how much its score at ε = 0.5 changes with this δ
    audit: CLAIM                the verdict of `accountant audit` on a claim that begins so
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from training_client.errors import DataError
from training_client.lab.papers.experiments import Experiment
from training_client.lab.papers.published import ALL_EXPERIMENTS

PAPERS: Final = ("000", "001", "002", "003", "004")
BY_NAME: Final = {each.name: each for each in ALL_EXPERIMENTS}
_ROMAN: Final = {"i": "1", "ii": "2"}
_SOURCE: Final = re.compile(r"papers/(\d{3}) (Table \w+|Figures? \w+|§[\w.-]*\w)")
_OPERATORS: Final = {"over": "lead", "at": "epsilon", "until": "score", "by": "shift"}
_OF_RUNS: Final = ("seconds", "estimate", "noise")
AUDIT: Final = "audit: "


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a result of ours.

    Attributes:
        kind: score, lead, epsilon, seconds, estimate, noise, shift or audit.
        experiments: the experiments that it is computed from.
        argument: an accuracy, an ε, a δ, or the beginning of the audit's claim.
    """

    kind: str
    experiments: tuple[Experiment, ...] = ()
    argument: str = ""


@dataclass(frozen=True, slots=True)
class PrintedResult:
    """A result that a paper prints.

    Attributes:
        paper: its number, such as 000.
        place: its table, figure or section.
        claim: what the value is of.
        value: the value as in the paper; empty if there is only a curve or a sentence.
        unit: the unit of the value.
        epochs: the epochs that the paper prints; None if it prints none.
        ours: our result by the algorithm as in the paper, without a guarantee.
        private: our result with a guarantee.
        note: why there is neither.
    """

    paper: str
    place: str
    claim: str
    value: str
    unit: str
    epochs: float | None
    ours: Reference | None
    private: Reference | None
    note: str

    @property
    def references(self) -> tuple[Reference, ...]:
        """The references that the row has."""
        return tuple(each for each in (self.ours, self.private) if each is not None)


@cache
def list_printed_results() -> tuple[PrintedResult, ...]:
    """Return every printed result of the five papers."""
    text = files(__package__).joinpath("printed.csv").read_text(encoding="utf-8")
    return tuple(
        PrintedResult(
            row["paper"], row["place"], row["claim"], row["value"], row["unit"],
            float(row["epochs"]) if row["epochs"] else None,
            _parse_reference(row["ours"]), _parse_reference(row["private"]), row["note"],
        )
        for row in csv.DictReader(text.splitlines())
    )  # fmt: skip


def _parse_reference(text: str) -> Reference | None:
    """Return the reference that a cell of the table holds; None if it is empty."""
    if not text:
        return None
    if text.startswith(AUDIT):
        return Reference("audit", argument=text.removeprefix(AUDIT))
    name, _, kind = text.rpartition(" ")
    if kind in _OF_RUNS:
        return Reference(kind, (BY_NAME[name],))
    for word, meant in _OPERATORS.items():
        first, found, rest = text.partition(f" {word} ")
        if found and word == "over":
            return Reference(meant, (BY_NAME[first], BY_NAME[rest]))
        if found:
            return Reference(meant, (BY_NAME[first],), rest)
    return Reference("score", (BY_NAME[text],))


def shorten_place(place: str) -> str:
    """Return a place as `--only` names it: "Table I" is table-1, "§5.2" section-5.2."""
    words = place.replace("§", "section ").lower().split()
    return "-".join(_ROMAN.get(word, word) for word in words)


def list_places(paper: str) -> list[str]:
    """Return the names of a paper's places with printed results, in the order of the paper."""
    found = (shorten_place(each.place) for each in list_printed_results() if each.paper == paper)
    return list(dict.fromkeys(found))


def list_experiments(paper: str, place: str | None = None) -> list[Experiment]:
    """Return the experiments that answer a paper's printed results, or those of one place.

    Raises:
        DataError: the paper or the place is unknown.
    """
    if paper not in PAPERS:
        raise DataError(f"Unknown paper {paper!r}: there are {', '.join(PAPERS)}")
    if place is not None and place not in list_places(paper):
        raise DataError(
            f"Unknown place {place!r} of papers/{paper}: there are {', '.join(list_places(paper))}"
        )
    found = {(each.name, each.steps): each for each in _find_experiments(paper, place)}
    return list(found.values())


def _find_experiments(paper: str, place: str | None) -> Iterator[Experiment]:
    """Yield the experiments of the printed results, and those whose source is the place."""
    for row in list_printed_results():
        if row.paper == paper and place in (None, shorten_place(row.place)):
            for reference in row.references:
                yield from reference.experiments
    for experiment in ALL_EXPERIMENTS:
        source = _SOURCE.match(experiment.paper_result.source)
        if (
            source
            and source[1] == paper
            and place in (None, shorten_place(source[2].replace("Figures", "Figure")))
        ):
            yield experiment
