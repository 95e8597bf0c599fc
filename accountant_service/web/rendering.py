"""Templates to answers: escaped, under a strict Content-Security-Policy, numbers rounded safely."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from fastapi import Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from accountant_service import digits

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


def count(value: int) -> str:
    """A whole number in groups of three, with spaces that do not break."""
    return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}").replace("-", "\N{MINUS SIGN}")


def moment(seconds: float | None) -> str:
    """A time since 1970 as a date."""
    if seconds is None:
        return "never"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def words(name: str) -> str:
    """A name of the wire as words."""
    return name.replace("_", " ")


def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "number": digits.nearest,
        "up": digits.up,
        "down": digits.down,
        "count": count,
        "moment": moment,
        "words": words,
    }
    return found


_TEMPLATES: Final = _environment()


def page(request: Request, template: str, status: int = 200, **context: Any) -> Response:
    """A page, for whoever is signed in."""
    session = getattr(request.state, "session", None)
    text = _TEMPLATES.get_template(template).render(
        path=request.url.path, session=session, **context
    )
    return Response(text, status, {**HEADERS, **_PRIVATE}, media_type="text/html; charset=utf-8")


class Assets(StaticFiles):
    """Style, scripts and the icon."""

    def __init__(self) -> None:
        super().__init__(directory=_FOLDER / "static")

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file, to be asked for again only when it has changed."""
        answer = await super().get_response(path, scope)
        answer.headers.update({**HEADERS, "Cache-Control": "no-cache"})
        return answer
