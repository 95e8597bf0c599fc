"""The facts of a report in plain sentences, for readers who know no Greek letters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Final

from accountant_service import number_format
from accountant_service.disclosure.attack_rates import count_per_thousand
from accountant_service.disclosure.facts import Facts, Promise, RunFacts
from accountant_service.guarantee import NeighbouringRelation

_FALSE_POSITIVE_RATE: Final = 0.01  # of the attackers on the first page
_PRIOR: Final = 0.01
OPEN: Final = "open: ask the operator"


@dataclass(frozen=True, slots=True)
class RelationWords:
    """Phrases for the two neighbouring datasets that an attacker tries to tell apart.

    Attributes:
        question: what the attacker guesses about one unit.
        present: the case that the attacker claims.
        absent: the other case.
        instead: what would have been different in the other case.
        neighbours: when two datasets are neighbours.
    """

    question: str
    present: str
    absent: str
    instead: str
    neighbours: str


_RELATIONS: Final = {
    NeighbouringRelation.ADD_OR_REMOVE_ONE: RelationWords(
        "whether the data of one {unit} were used",
        "the data were used",
        "the data were not used",
        "without the data of that {unit}",
        "one dataset has the data of one {unit} more than the other",
    ),
    NeighbouringRelation.ZERO_OUT_ONE: RelationWords(
        "whether the data of one {unit} were used or blanked out",
        "the data were used",
        "the data were blanked out",
        "with blank data for that {unit}",
        "the data of one {unit} are blank in one dataset",
    ),
    NeighbouringRelation.REPLACE_ONE: RelationWords(
        "which of two versions of the data of one {unit} was used",
        "the first version was used",
        "the second version was used",
        "with other data for that {unit}",
        "the data of one {unit} differ between the datasets",
    ),
}


@dataclass(frozen=True, slots=True)
class Attack:
    """A kind of attack: its largest number of successes out of 1000, and that of blind guessing.

    Attributes:
        title: in a few words.
        sentence: what is counted.
        at_most: out of 1000, with everything that the promise covers.
        blind: out of 1000, without any release.
    """

    title: str
    sentence: str
    at_most: int
    blind: int


def describe_relation(facts: Facts) -> RelationWords:
    """Return phrases for the two neighbouring datasets, in terms of the privacy unit."""
    words = _RELATIONS[facts.dataset.neighbouring_relation]
    unit = facts.dataset.privacy_unit
    return RelationWords(*(text.replace("{unit}", unit) for text in astuple(words)))


def list_attacks(facts: Facts, promise: Promise) -> tuple[Attack, ...]:
    """Return the attacks, each with the largest number of successes that the guarantee allows."""
    words = describe_relation(facts)
    detection = promise.attacks.detection(_FALSE_POSITIVE_RATE)
    found = count_per_thousand(detection.true_positive_rate)
    blind = count_per_thousand(_FALSE_POSITIVE_RATE)
    return (
        Attack(
            "Guessing",
            f"Someone guesses 1000 times {words.question}. Both answers are equally likely. "
            "Right are:",
            count_per_thousand(promise.attacks.guess_success),
            500,
        ),
        Attack(
            "Finding",
            f"An attacker claims that {words.present}. In 1000 cases where {words.absent}, the "
            f"claim is made {blind} times. In 1000 cases where {words.present}, it is made:",
            found,
            blind,
        ),
        Attack(
            "Certainty",
            f"The same attacker looks at 1000 cases, and in 10 of them {words.present}. "
            "Of 1000 claims, right are:",
            count_per_thousand(detection.posterior(_PRIOR)),
            count_per_thousand(_PRIOR),
        ),
    )


def describe_promise(facts: Facts) -> str:
    """State in words what is guaranteed to whom, for a run or all runs on a dataset."""
    unit, name = facts.dataset.privacy_unit, facts.dataset.name
    what = "This run" if facts.run is not None else "All runs on this dataset together"
    return (
        f"Promised to each {unit} in “{name}”: {what[0].lower()}{what[1:]} would have given "
        f"nearly the same results {describe_relation(facts).instead}. The numbers below say how "
        "nearly."
    )


def describe_consequences(facts: Facts) -> str:
    """State in a sentence that the bounds on attacks also limit all other effects on a person."""
    words, (_, finding, _) = describe_relation(facts), list_attacks(facts, facts.budget)
    return (
        f"The count under “Finding” also limits every other consequence: what happens in "
        f"{finding.blind} of 1000 cases where {words.absent} happens in at most {finding.at_most} "
        f"of 1000 where {words.present}, because of everything from the dataset."
    )


def describe_stopping(run: RunFacts) -> str:
    """Explain in words which steps of a run the guarantee covers, and why."""
    if run.steps_reserved is None:
        return (
            f"The certificate is of an early format: it covers the {run.steps_granted} steps that "
            "were granted, and only if the run was planned to end there."
        )
    return (
        f"The run reserved {run.steps_reserved} steps and was granted {run.steps_granted}. The "
        f"promise covers all {run.steps_reserved} reserved steps. A run may be stopped because of "
        "what its results showed, so a promise about the granted steps alone could be too strong."
    )


def list_conditions(facts: Facts) -> tuple[str, ...]:
    """Return the conditions that the guarantee depends on, one sentence each."""
    unit, run = facts.dataset.privacy_unit, facts.run
    is_public = facts.dataset.neighbouring_relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    one = (
        "Each person has one record in the data. For a person with more, the counts are higher."
        if unit == "record"
        else f"Each {unit} has one record in the data. The operator makes sure of this."
    )
    return (
        one,
        "The training program did what was charged: it drew each batch at random, limited what "
        "one record can contribute, and added noise of the stated size.",
        "The batches and the random numbers stay secret.",
        *(("The number of records is public.",) if is_public else ()),
        *(() if run is None else ("The plan of this run did not depend on earlier results.",)),
    )


def list_unprotected(facts: Facts) -> tuple[str, ...]:
    """Return the harms that the guarantee does not cover, one sentence each."""
    unit = facts.dataset.privacy_unit
    return (
        f"What is true of the whole group. If the data show that smoking is dangerous, this is "
        f"known about every {unit}, also one whose data were not used.",
        f"The same {unit} in other datasets, other ledgers or other publications.",
        "Everything that was computed from the data without this ledger: a selection of records, "
        "printed training results, accuracy on test data.",
        "The data themselves, where they are stored and processed.",
        "What the time or the memory that the training used shows to someone who can watch it.",
        "The low digits of the released numbers: the theory is about real numbers, and computers "
        "round.",
    )


def describe_numbers(promise: Promise) -> Iterator[tuple[str, str]]:
    """Yield the numbers of a guarantee, each with its name, rounded up."""
    attacks = promise.attacks
    yield "epsilon (ε)", number_format.round_up(promise.epsilon)
    yield "delta (δ)", number_format.round_up(promise.delta)
    if attacks.mu is not None and attacks.mu_slack is not None:
        slack = number_format.round_up(attacks.mu_slack, 3)
        yield "Gaussian-DP mu (μ)", f"{number_format.round_up(attacks.mu)}, up to {slack}"
    yield "membership advantage", number_format.round_up(attacks.advantage)
    yield "success of guessing", number_format.round_up(attacks.guess_success)


BASIS: Final = {
    "mechanism": "the noise and sampling of the whole plan",
    "reference_steps": "all reference steps of the budget, which dominate whatever is released",
    "epsilon_and_delta": "epsilon and delta alone",
}
