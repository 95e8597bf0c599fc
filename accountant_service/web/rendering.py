"""Rendering of pages: templates, security headers and safe rounding of numbers."""

from __future__ import annotations

import mimetypes
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from fastapi import Request
from jinja2 import Environment
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.responses import Response

from accountant_service import mechanisms
from accountant_service.api.static_documents import StaticDocument, StaticDocuments
from accountant_service.operations.template_environment import create_environment
from accountant_service.web import run_form
from accountant_service.web.session_checks import optional_session
from accountant_service.writing import number_format
from command_words.names import find_field

Json = dict[str, Any]
_FOLDER: Final = Path(__file__).parent

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_HTML: Final = "text/html; charset=utf-8"
_NOTES_MAX: Final = 5
_NAME_MAX: Final = 40  # characters of a parameter's name that a note repeats
_PRIVATE: Final = {"Cache-Control": "no-store", "Vary": "Cookie"}


def format_moment(seconds: float | None) -> str:
    """Format Unix time in seconds as a date and time in UTC."""
    if seconds is None:
        return "never"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def format_duration(seconds: float | None) -> str:
    """Format a time span in its two largest units, such as "3 h 5 min"; "–" if it is unknown."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    for name, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // part} {smaller}"
    return f"{whole // 60} min" if whole >= 60 else f"{whole} s"


def describe_plan(mechanism: Json) -> str:
    """Describe a mechanism in words: one of its steps, and the number of steps."""
    found = mechanisms.from_json(mechanism)
    match found:
        case mechanisms.DpSgd():
            steps = found.step_count()
        case mechanisms.Repeated():
            steps = found.count
        case _:
            return found.describe_step()
    unit = "step" if steps == 1 else "steps"
    return f"{found.describe_step()}, {number_format.group_digits(steps)} {unit}"


def format_sentence(text: str) -> str:
    """Capitalise a text's first letter, unless it is a symbol or begins an identifier."""
    first = text.partition(" ")[0]
    return text if "_" in first or not first.isascii() else text[:1].upper() + text[1:]


def format_words(name: str) -> str:
    """Format an API name as words: underscores become spaces."""
    return name.replace("_", " ")


def note_unknown_parameters(given: Iterable[str], known: Collection[str]) -> list[str]:
    """Return a sentence for each URL parameter that the page does not know; at most six."""
    unknown = sorted(set(given) - set(known))
    sentences = []
    for name in unknown[:_NOTES_MAX]:
        shown = name if len(name) <= _NAME_MAX else name[:_NAME_MAX] + "…"
        meant = find_field(shown, known)
        advice = f" Did you mean “{meant}”?" if meant else ""
        sentences.append(f"This page does not know the parameter “{shown}” and ignores it.{advice}")
    if len(unknown) > _NOTES_MAX:
        sentences.append(f"It ignores {len(unknown) - _NOTES_MAX} more parameters.")
    return sentences


def list_parameter_faults(query: QueryParams, known: Collection[str]) -> list[str]:
    """Return a sentence for each URL parameter that the page cannot use, or has twice.

    For pages that compute: without the parameter, the answer would be another question's.
    """
    counts = Counter(name for name, _ in query.multi_items())
    twice = [f"“{name}” is in the address {count} times." for name, count in counts.items()
             if count > 1 and name in known]  # fmt: skip
    unknown = note_unknown_parameters(query, known)
    return twice + [sentence.replace(" and ignores it.", ".") for sentence in unknown]


def _template_environment() -> Environment:
    """Create the Jinja environment, with the filters that templates use."""
    found = create_environment(_FOLDER / "templates")
    found.filters |= {
        "duration": format_duration,
        "moment": format_moment,
        "plan": describe_plan,
        "sentence": format_sentence,
        "words": format_words,
    }
    found.globals |= {"run_fields": run_form.FIELDS, "run_choices": run_form.CHOICES}
    return found


_TEMPLATES: Final = _template_environment()
# one page at a time: Python renders no two at once, and grants would wait for each thread in turn
_RENDERING: Final = threading.Lock()


def render_page(
    request: Request,
    template: str,
    status: int = 200,
    parameters: Collection[str] = (),
    notes: Sequence[str] = (),
    **context: Any,
) -> Response:
    """Render a template as a page for the current session.

    Args:
        request: the request that the page answers.
        template: the file name of the template.
        status: the HTTP status.
        parameters: names of the URL parameters that the page reads; a note names all others.
        notes: further sentences about the URL, shown at the top of the page.
        context: the variables of the template.
    """
    session = getattr(request.state, "session", None)
    with _RENDERING:
        text = _TEMPLATES.get_template(template).render(
            path=request.url.path,
            session=session,
            documentation=request.app.state.settings.documentation_url or "/documentation/",
            notes=[*note_unknown_parameters(request.query_params, parameters), *notes],
            **context,
        )
    return Response(text, status, {**HEADERS, **_PRIVATE}, media_type=_HTML)


async def respond_with_static_page(
    request: Request, template: str, build_context: Callable[[], dict[str, Any]]
) -> Response:
    """Answer with a page that takes no parameters, rendered once for all who are not signed in.

    Args:
        request: the request that the page answers.
        template: the file name of the template.
        build_context: returns the variables of the template.
    """
    await optional_session(request)

    def render() -> Response:
        """Render the page."""
        return render_page(request, template, parameters=request.query_params, **build_context())

    def render_once() -> StaticDocument:
        """Render the page for all who are not signed in."""
        headers = {**HEADERS, "Vary": "Cookie, Accept-Encoding"}
        return StaticDocument(bytes(render().body), _HTML, headers)

    if getattr(request.state, "session", None) is not None:
        return await run_in_threadpool(render)
    documents: StaticDocuments = request.app.state.static_documents
    return await documents.respond(request, request.url.path, render_once)


def load_assets() -> dict[str, StaticDocument]:
    """Return the pages' static files (styles, scripts, the icon) by their path."""
    folder = _FOLDER / "static"
    return {
        file.relative_to(folder).as_posix(): StaticDocument(
            file.read_bytes(), mimetypes.guess_type(file.name)[0] or "text/plain", HEADERS
        )
        for file in folder.rglob("*")
        if file.is_file()
    }
