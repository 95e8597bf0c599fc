"""A section about privacy for the model card of a Hugging Face model, as Markdown.

A model card is the README.md of a model's repository (huggingface.co/docs/hub/model-cards). The
section's heading has the level that the card's template uses for its sections.
"""

from __future__ import annotations

from collections.abc import Iterator

from accountant_service.accounting.guarantee import warn_about_delta
from accountant_service.disclosure.facts import Facts, Promise
from accountant_service.disclosure.nist_questions import list_questions
from accountant_service.disclosure.sentences import (
    describe_numbers,
    describe_promise,
    describe_relation,
    describe_stopping,
    list_attacks,
    list_conditions,
    list_unprotected,
)
from accountant_service.writing import number_format


def write_model_card(facts: Facts) -> str:
    """Return the privacy section of a model card."""
    return "\n".join(_lines(facts)) + "\n"


def write_questions(facts: Facts) -> str:
    """Return questions after NIST SP 800-226 with their answers, as a Markdown table."""
    rows = [
        f"| {each.level} | {_cell(each.text)} | {_cell(each.answer)} |"
        for each in list_questions(facts)
    ]
    return "\n".join(["| Level | Question | Answer |", "|---|---|---|", *rows]) + "\n"


def _lines(facts: Facts) -> Iterator[str]:
    """Yield the lines of a model card's privacy section, as Markdown."""
    run, dataset, budget = facts.run, facts.dataset, facts.budget
    yield "## Privacy"
    yield ""
    yield _plain(describe_promise(facts))
    yield ""
    promises = [("All runs together", budget)]
    if run is not None:
        promises.insert(0, ("This run alone", run.plan))
    columns = " | ".join(f"{title}: at most" for title, _ in promises)
    yield f"| Of 1000 … | by luck alone | {columns} |"
    yield "|---|---|" + "---|" * len(promises)
    yield from _attack_rows(facts, [promise for _, promise in promises])
    yield ""
    for title, promise in promises:
        numbers = "; ".join(f"{name} {value}" for name, value in describe_numbers(promise))
        yield f"- **{title}**: {numbers}"
    yield f"- **Neighbouring datasets**: {_plain(describe_relation(facts).neighbours)}"
    if dataset.size is not None:
        yield f"- **Records**: {dataset.size}"
    if run is not None:
        yield f"- **Mechanism**: {run.step}"
        yield f"- **Steps**: {describe_stopping(run)}"
        if run.clip_norm is not None:
            yield f"- **Clip norm**: {number_format.round_nearest(run.clip_norm)}, as declared"
        if run.model_sha256 is not None:
            yield f"- **SHA-256 of the model**: `{run.model_sha256}`"
        yield f"- **Run**: `{run.identifier}`, certificate issued {facts.issued}"
    warning = warn_about_delta(dataset.size, budget.delta)
    if warning:
        yield f"- **Warning**: {warning}"
    yield from _list("This holds only if", list_conditions(facts))
    yield from _list("Not protected", list_unprotected(facts))
    yield ""
    yield "Check the certificate with `accountant verify certificate.json`."


def _attack_rows(facts: Facts, promises: list[Promise]) -> Iterator[str]:
    """Yield the Markdown rows of the table of attack rates, with a column for each guarantee."""
    for kinds in zip(*(list_attacks(facts, each) for each in promises), strict=True):
        counts = " | ".join(str(each.at_most) for each in kinds)
        yield f"| {_cell(kinds[0].sentence.rstrip(':'))} | {kinds[0].blind} | {counts} |"


def _list(title: str, items: tuple[str, ...]) -> Iterator[str]:
    """Yield the Markdown lines of a titled list."""
    yield ""
    yield f"**{title}:**"
    yield ""
    yield from (f"- {_plain(each)}" for each in items)


def _cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Return a text on one line, with Markdown and HTML markup escaped."""
    single = " ".join(text.split())
    return single.replace("&", "&amp;").replace("<", "&lt;").replace("[", "\\[")
