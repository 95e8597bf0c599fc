"""Questions for an evaluator after NIST SP 800-226, answered from the facts or marked open.

The levels follow the publication's pyramid of a guarantee (Near, Darais, Lefkovitz and Howarth,
*Guidelines for Evaluating Differential Privacy Guarantees*, NIST SP 800-226, March 2025,
doi.org/10.6028/NIST.SP.800-226), from the parameters at the top to the collection of the data at
the bottom. The two ends are named in NIST's announcement of the draft (December 2023); the levels
between and the questions are ours, from summaries of the publication, and were not compared with
its text. They are no official checklist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from accountant_service.accounting.guarantee import count_exposed_records, warn_about_delta
from accountant_service.disclosure.facts import Facts
from accountant_service.disclosure.sentences import (
    OPEN,
    describe_relation,
    describe_stopping,
    list_attacks,
)
from accountant_service.writing import number_format


@dataclass(frozen=True, slots=True)
class Question:
    """A question that NIST SP 800-226 tells evaluators to ask, with the answer from the facts.

    Attributes:
        level: of the pyramid.
        text: the question.
        answer: from the facts; `OPEN`, or ending with it, where only the operator knows.
    """

    level: str
    text: str
    answer: str

    @property
    def is_open(self) -> bool:
        """True if the operator must still answer, in whole or in part."""
        return OPEN in self.answer


def list_questions(facts: Facts) -> tuple[Question, ...]:
    """Return all questions and answers, by level of NIST's pyramid from the top."""
    return tuple(
        Question(level, text, answer)
        for level, questions in (
            ("Privacy parameters", _parameters(facts)),
            ("Unit of privacy", _unit(facts)),
            ("Bounds on contributions", _bounds(facts)),
            ("Mechanisms and composition", _mechanisms(facts)),
            ("Algorithms, utility and bias", _algorithms(facts)),
            ("Correctness", _correctness(facts)),
            ("Trust model", _trust(facts)),
            ("Side channels", _side_channels()),
            ("Security and access control", _security(facts)),
            ("Data collection exposure", _collection()),
        )
        for text, answer in questions
    )


_Answers = Iterator[tuple[str, str]]


def _parameters(facts: Facts) -> _Answers:
    """Yield the questions about the privacy parameters ε and δ."""
    budget, run, dataset = facts.budget, facts.run, facts.dataset
    stated = (
        f"Everything released from the dataset: epsilon {number_format.round_up(budget.epsilon)} "
        f"at delta {number_format.round_up(budget.delta)}."
    )
    if run is not None:
        stated += (
            f" This run alone: epsilon {number_format.round_up(run.plan.epsilon)} at delta "
            f"{number_format.round_up(run.plan.delta)} ({run.status} by {run.method})."
        )
    yield (
        "Which variant of differential privacy holds, with which parameters?",
        (f"Approximate differential privacy. {stated}"),
    )
    guessing = list_attacks(facts, budget)[0]
    yield (
        "What do the parameters mean for a person?",
        (
            f"Of 1000 guesses {describe_relation(facts).question}, at most {guessing.at_most} are "
            "right; guessing blindly gives 500."
        ),
    )
    if dataset.size is None:
        answer = "The certificate does not state the number of records: " + OPEN
    else:
        answer = warn_about_delta(dataset.size, budget.delta) or (
            f"Yes: delta times {dataset.size} records is "
            f"{number_format.round_up(count_exposed_records(dataset.size, budget.delta), 2)}."
        )
    yield "Is delta below one over the number of records?", answer


def _unit(facts: Facts) -> _Answers:
    """Yield the questions about the privacy unit and the neighbouring relation."""
    unit = facts.dataset.privacy_unit
    ambiguous = (
        "Does each person have one record in the data?"
        if unit == "person"
        else f"How many {unit} entries may belong to one person?"
    )
    yield (
        "What is the unit of privacy: an event, a record or a person?",
        (f"One {unit}. {ambiguous} {OPEN}"),
    )
    yield (
        "Which datasets does the guarantee compare?",
        (f"Datasets are neighbours if {describe_relation(facts).neighbours}."),
    )


def _bounds(facts: Facts) -> _Answers:
    """Yield the questions about bounds on contributions and about public quantities."""
    run = facts.run
    answer = "Every contribution is clipped to a norm before noise is added. The norm: " + OPEN
    if run is not None and run.clip_norm is not None:
        answer = (
            f"The contribution of one record to a step is clipped to norm "
            f"{number_format.round_nearest(run.clip_norm)}, as the training program declared."
        )
    yield "How is the contribution of one unit bounded?", answer
    size = facts.dataset.size
    yield (
        "Which quantities are released without noise?",
        (
            f"The number of records{'' if size is None else f', {size},'} is assumed to be public. "
            f"Others: {OPEN}"
        ),
    )


def _mechanisms(facts: Facts) -> _Answers:
    """Yield the questions about mechanisms and composition."""
    run, used = facts.run, facts.filter
    if run is not None:
        yield (
            "Which mechanisms add noise, with which parameters?",
            (f"{run.step}. {describe_stopping(run)}"),
        )
    else:
        steps = sorted({each.step for each in facts.runs})
        yield (
            "Which mechanisms add noise, with which parameters?",
            ("; ".join(steps) + "." if steps else "No run has reserved budget yet."),
        )
    reference = ""
    if used.reference is not None and used.reference_steps is not None:
        reference = (
            f" The reference is {used.reference}; the filter admits {used.reference_steps} of it."
        )
    yield (
        "How is privacy loss added up over several releases?",
        (
            f"By a privacy filter that stays sound if runs are chosen after earlier results: "
            f"{used.description}.{reference}"
        ),
    )


def _algorithms(facts: Facts) -> _Answers:
    """Yield the questions about the algorithm, its utility and its bias."""
    run = facts.run
    is_sgd = run is not None and run.mechanism.get("kind") == "dp_sgd"
    yield (
        "Which algorithm uses the mechanisms?",
        ("Stochastic gradient descent with clipped and noisy gradients." if is_sgd else OPEN),
    )
    yield (
        "Was preprocessing or tuning done on the private data, and was it charged?",
        ("Runs charged to this ledger are covered by the budget. Anything else: " + OPEN),
    )
    yield "Is the result accurate enough for its use?", OPEN
    yield "Does the noise harm small groups more than others?", OPEN


def _correctness(facts: Facts) -> _Answers:
    """Yield the questions about the correctness of the accounting and the implementation."""
    yield (
        "How is the accounting checked?",
        (
            f"Every bound is proved and rounded outward by privacy-accountant "
            f"{facts.accountant_version}. `accountant verify` computes a certificate's guarantee "
            "again on any machine, and `accountant ledger verify` every charge."
        ),
    )
    yield (
        "How is the training program checked?",
        (
            "The ledger sees descriptions and no data, so it cannot check what a program did: "
            + OPEN
        ),
    )
    yield (
        "Is the noise safe against attacks on floating-point numbers?",
        (
            "The proofs are about real numbers, and no protection of the low digits is claimed. "
            f"Which sampler was used? {OPEN}"
        ),
    )


def _trust(facts: Facts) -> _Answers:
    """Yield the questions about the trust model: who sees the data."""
    yield (
        "Who is trusted with what?",
        (
            f"Model: {facts.dataset.trust_model}. The ledger's operator is trusted to keep one "
            "history. Nobody who receives results is trusted."
        ),
    )
    yield (
        "Who may ask, and how often?",
        (
            "Holders of API keys with scope run may spend the budget until it is used up. "
            f"Who they are: {OPEN}"
        ),
    )


def _side_channels() -> _Answers:
    """Yield the question about side channels."""
    yield (
        "What can be learnt from time, memory or errors?",
        (
            "The duration and memory of training depend on the data and are not protected. Who can "
            f"watch them? {OPEN}"
        ),
    )


def _security(facts: Facts) -> _Answers:
    """Yield the questions about access to the data and to the ledger."""
    yield "Who has access to the raw data, and how is it protected?", OPEN
    yield (
        "How are budget and record protected?",
        (
            "The ledger accepts writes from keys with the right scope only. Each entry holds the "
            f"hash of the entry before it; the last is number {facts.record.entries} with hash "
            f"{facts.record.head[:16]}…"
        ),
    )


def _collection() -> _Answers:
    """Yield the question about the collection of the data."""
    yield "How were the data collected, and how long are they kept?", OPEN
