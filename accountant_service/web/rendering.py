"""Rendering of pages: templates, security headers and safe rounding of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from fastapi import Request
from jinja2 import Environment
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from accountant_service.template_environment import create_environment

_FOLDER: Final = Path(__file__).parent

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_PRIVATE: Final = {"Cache-Control": "no-store", "Vary": "Cookie"}


def format_count(value: int) -> str:
    """Format a whole number with non-breaking spaces between groups of three digits."""
    return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}").replace("-", "\N{MINUS SIGN}")


def format_moment(seconds: float | None) -> str:
    """Format Unix time in seconds as a date and time in UTC."""
    if seconds is None:
        return "never"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def format_words(name: str) -> str:
    """Format an API name as words: underscores become spaces."""
    return name.replace("_", " ")


def _template_environment() -> Environment:
    """Create the Jinja environment, with the filters that templates use."""
    found = create_environment(_FOLDER / "templates")
    found.filters |= {"count": format_count, "moment": format_moment, "words": format_words}
    return found


_TEMPLATES: Final = _template_environment()


def render_page(request: Request, template: str, status: int = 200, **context: Any) -> Response:
    """Render a template as a page for the current session."""
    session = getattr(request.state, "session", None)
    text = _TEMPLATES.get_template(template).render(
        path=request.url.path, session=session, **context
    )
    return Response(text, status, {**HEADERS, **_PRIVATE}, media_type="text/html; charset=utf-8")


class Assets(StaticFiles):
    """Static files: styles, scripts and the icon."""

    def __init__(self) -> None:
        super().__init__(directory=_FOLDER / "static")

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a static file, with a header that makes browsers revalidate it."""
        answer = await super().get_response(path, scope)
        answer.headers.update({**HEADERS, "Cache-Control": "no-cache"})
        return answer
