"""The facts of a report in plain sentences, for readers who know no Greek letters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Final

from accountant_service import mechanisms
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.disclosure.attack_rates import count_per_thousand
from accountant_service.disclosure.facts import Facts, Promise, RunFacts
from accountant_service.writing import number_format

_FALSE_POSITIVE_RATE: Final = 0.01  # of the attackers on the first page
_PRIOR: Final = 0.5
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
        at_most: out of 1000, with all results that the promise covers.
        blind: out of 1000, by luck alone.
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
            f"Someone guesses {words.question}, once in each of 1000 cases. Both answers were "
            "equally likely before. Right guesses:",
            count_per_thousand(promise.attacks.guess_success),
            500,
        ),
        Attack(
            "Finding",
            f"Someone looks for signs that {words.present}, and sees them in {blind} of 1000 "
            f"cases where {words.absent}. Signs seen in 1000 cases where {words.present}:",
            found,
            blind,
        ),
        Attack(
            "Certainty",
            f"Someone claims that {words.present} only when these signs are seen. Both answers "
            "were equally likely before. Right claims of 1000:",
            count_per_thousand(detection.posterior(_PRIOR)),
            count_per_thousand(_PRIOR),
        ),
    )


def describe_promise(facts: Facts) -> str:
    """State in words what is guaranteed to whom, for a run or all runs on a dataset."""
    unit, name = facts.dataset.privacy_unit, facts.dataset.name
    what = "this run gives" if facts.run is not None else "all runs on this dataset together give"
    return (
        f"Promised to each {unit} in “{name}”, under the conditions below: {what} nearly the same "
        f"results as {describe_relation(facts).instead}. The numbers say how nearly. A run is one "
        "training of a model, or another computation."
    )


def describe_consequences(facts: Facts) -> str:
    """State that the bounds on attacks also limit what is learned about a person, and any harm."""
    words, (_, finding, _) = describe_relation(facts), list_attacks(facts, facts.budget)
    return (
        "The count under “Finding” limits any other consequence too, such as guessing a diagnosis "
        f"or refusing insurance: what happens in {finding.blind} of 1000 cases where "
        f"{words.absent} happens in at most {finding.at_most} of 1000 where {words.present} "
        "(all runs together). "
        "Rarer signs, or a suspicion from elsewhere, make a claim surer than here: the next pages "
        "have more numbers."
    )


def describe_scope(facts: Facts) -> str:
    """State for whom, against whom, and for which runs the counts hold."""
    everyone = (
        f"The counts hold for each {facts.dataset.privacy_unit}, also an unusual one, and against "
        "someone who knows all other data and has unlimited computing power."
    )
    together = (
        "“All runs together” includes runs still to come, up to a budget that cannot be raised: "
        "the ledger, which records all runs, refuses a run that would exceed it."
    )
    if facts.run is not None:
        return (
            f"{everyone} {together} “This run alone” needs one condition more, the last one below. "
            "If in doubt, use “all runs together”."
        )
    if facts.use is None:
        return f"{everyone} {together}"
    taken = number_format.round_up(100 * (1 - facts.use.left), 3)
    return (
        f"{everyone} {together} So far, {taken} % of the budget is used or reserved. The counts "
        "are those of the whole budget."
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
    one = (
        "Each person has one record in the data. For a person with more, the counts are higher."
        if unit == "record"
        else f"Each {unit} has one record in the data: several were merged into one before. The "
        "owner of the data makes sure of this."
    )
    return (
        one,
        "The training program did what the ledger recorded: in each step it drew records at "
        "random, limited the influence of each, and added random noise of the recorded size.",
        "Nobody learns, now or later, which records were drawn and which random numbers were "
        "added.",
        *(() if run is None else _list_run_conditions(run)),
    )


def _list_run_conditions(run: RunFacts) -> Iterator[str]:
    """Yield the conditions of the guarantee for one run alone, one sentence each."""
    plan = mechanisms.canonical_form(mechanisms.from_json(run.mechanism))
    most = max(plan.premises.records_per_person, default=1)
    if most > 1:
        yield (
            f"For “this run alone”: a person may have up to {most} records, in each release at "
            "most the number that the mechanism states. “All runs together” needs the first "
            "condition."
        )
    yield (
        "For “this run alone”: nobody used what is in the data, or results from them, to plan "
        "this run."
    )


def list_unprotected(facts: Facts) -> tuple[str, ...]:
    """Return the harms that the guarantee does not cover, one sentence each."""
    unit = facts.dataset.privacy_unit
    is_public = facts.dataset.neighbouring_relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    return (
        "What is true of the whole group. If the data show that smoking is dangerous, this is "
        f"then known of every {unit}, also of others.",
        *(("The number of records: it is treated as public.",) if is_public else ()),
        f"The same {unit} in other datasets, or in other publications.",
        "Anything computed from the data outside the ledger, such as a selection of records, or "
        "a model’s accuracy measured on them.",
        "The data themselves, if someone gets access to them.",
        "What someone learns who watches the computer, from its time and memory.",
        "Tiny rounding errors in published numbers, from which an expert might learn more.",
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
