"""One report in every format."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment

from accountant_service.accounting.guarantee import warn_about_delta
from accountant_service.disclosure import sentences
from accountant_service.disclosure.attack_rates import FALSE_POSITIVE_RATES
from accountant_service.disclosure.deployments_registry import Tier, build_record, to_yaml
from accountant_service.disclosure.facts import Facts, Promise, facts_of_certificate
from accountant_service.disclosure.formats import Format
from accountant_service.disclosure.model_card import write_model_card, write_questions
from accountant_service.disclosure.nist_questions import list_questions
from accountant_service.errors import FormatUnavailableError
from accountant_service.operations.template_environment import create_environment
from accountant_service.writing import number_format

_FOLDER: Final = Path(__file__).parent / "templates"
_PRIORS: Final = (0.01, 0.1, 0.5)
_STATES: Final = {
    "open": "not ended",
    "committed": "ended",
    "released": "ended early",
    "expired": "ended by the service, which heard nothing more",
}


def render(facts: Facts, wanted: Format, tier: Tier = 3) -> bytes:
    """Render a report in the wanted file format.

    Args:
        facts: of the report.
        wanted: the format.
        tier: of the deployments registry; other formats ignore it.

    Raises:
        FormatUnavailableError: PDF is wanted and WeasyPrint cannot be used.
    """
    match wanted:
        case Format.HTML:
            return render_html(facts).encode()
        case Format.PDF:
            return _write_pdf(render_html(facts))
        case Format.JSON:
            return (facts.model_dump_json(indent=2) + "\n").encode()
        case Format.REGISTRY:
            return to_yaml(build_record(facts, tier)).encode()
        case Format.MODEL_CARD:
            return write_model_card(facts).encode()
        case Format.NIST:
            return write_questions(facts).encode()


def render_certificate(document: Mapping[str, Any], wanted: Format, tier: Tier = 3) -> bytes:
    """Render the report of a run from its valid certificate, in the wanted file format."""
    return render(facts_of_certificate(document), wanted, tier)


def render_html(facts: Facts) -> str:
    """Return a report as one HTML file without scripts, and without files from elsewhere."""
    run = facts.run
    promises = [("all runs together", facts.budget)]
    if run is not None:
        promises.insert(0, ("this run alone", run.plan))
    return (
        _environment()
        .get_template("report.html")
        .render(
            facts=facts,
            run=run,
            attacks=_compare_attacks(facts, promises),
            promises=[_describe(title, promise) for title, promise in promises],
            rates=FALSE_POSITIVE_RATES,
            promise=sentences.describe_promise(facts),
            consequences=sentences.describe_consequences(facts),
            scope=sentences.describe_scope(facts),
            state=None if run is None else _STATES.get(run.state, run.state),
            relation=sentences.describe_relation(facts),
            stopping=None if run is None else sentences.describe_stopping(run),
            conditions=sentences.list_conditions(facts),
            unprotected=sentences.list_unprotected(facts),
            warning=warn_about_delta(facts.dataset.size, facts.budget.delta),
            questions=list_questions(facts),
        )
    )


def _compare_attacks(
    facts: Facts, promises: list[tuple[str, Promise]]
) -> list[tuple[sentences.Attack, list[tuple[str, int]]]]:
    """Return each attack, with its largest number of successes in 1000 under each guarantee."""
    titles = [title for title, _ in promises]
    each = [sentences.list_attacks(facts, promise) for _, promise in promises]
    return [
        (kinds[0], list(zip(titles, (kind.at_most for kind in kinds), strict=True)))
        for kinds in zip(*each, strict=True)
    ]


def _describe(title: str, promise: Promise) -> dict[str, Any]:
    """Return a guarantee's template variables: numbers, detection rates and posteriors."""
    return {
        "title": title,
        "scope": promise.scope,
        "numbers": list(sentences.describe_numbers(promise)),
        "basis": sentences.BASIS[promise.attacks.basis],
        "detections": [
            (rate, promise.attacks.detection(rate).true_positive_rate)
            for rate in FALSE_POSITIVE_RATES
        ],
        "posteriors": [
            (prior, [each.posterior(prior) for each in promise.attacks.detections])
            for prior in _PRIORS
        ],
    }


def _percent(rate: float) -> str:
    """Format a probability as a percentage, rounded up."""
    return f"{number_format.round_up(min(100.0, 100 * rate), 4)} %"


def _date(moment: str) -> str:
    """Format an ISO 8601 date and time in UTC for readers: 5 March 2026, 14:02 UTC."""
    found = datetime.fromisoformat(moment)
    return f"{found.day} {found:%B %Y, %H:%M} UTC"


def _environment() -> Environment:
    """Return the Jinja environment of the reports."""
    found = create_environment(_FOLDER)
    found.filters["percent"] = _percent
    found.filters["date"] = _date
    return found


def _write_pdf(html: str) -> bytes:
    """Return an HTML text as PDF, with no access to other files or the network."""
    try:
        import weasyprint
    except (ImportError, OSError) as error:  # OSError: Pango is not installed
        raise FormatUnavailableError(
            f"PDF needs WeasyPrint and Pango ({error}). Install them with "
            "pip install 'privacy-accountant[report]' and, on Debian, apt-get install "
            "libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0; or ask for html and print it"
        ) from None
    document = weasyprint.HTML(string=html, url_fetcher=_refuse_to_fetch)
    found: bytes = document.write_pdf()
    return found


def _refuse_to_fetch(url: str, *_: Any, **__: Any) -> Any:
    """Raise an error for any URL, as a report must not load external files."""
    raise ValueError(f"a report loads nothing, and not {url}")
