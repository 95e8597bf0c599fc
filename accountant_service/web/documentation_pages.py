"""The documentation, which mkdocs has built into a folder beside this file: `make site`.

A release contains it. In a checkout without it, its addresses say how to build it.
"""

from __future__ import annotations

import base64
import hashlib
import mimetypes
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from accountant_service.api.static_documents import StaticDocument, StaticDocuments
from accountant_service.web.rendering import HEADERS, POLICY, respond_with_static_page

ADDRESS: Final = "/documentation/"
SITE: Final = Path(__file__).parent / "documentation"
_FIRST: Final = "index.html"

router = APIRouter(include_in_schema=False)


def list_files(site: Path) -> dict[str, Path]:
    """Return the files of a built site by their path within it; empty if it was not built."""
    return {
        file.relative_to(site).as_posix(): file
        for file in site.rglob("*")
        if file.is_file() and not file.is_symlink()
    }


_FILES: Final = list_files(SITE)  # no request can name any other file


@router.get(ADDRESS.rstrip("/"))
async def redirect_to_first_page() -> Response:
    """Redirect to the first page, whose links are relative to it."""
    return RedirectResponse(ADDRESS)


@router.get(ADDRESS + "{path:path}")
async def show_documentation(request: Request, path: str) -> Response:
    """Answer with a file of the documentation, or say how to build it."""
    if _FIRST not in _FILES:
        if path:
            return RedirectResponse(ADDRESS)
        return await respond_with_static_page(request, "documentation.html", dict)
    file = _FILES.get(path or _FIRST)
    if file is None:
        raise HTTPException(404)
    documents: StaticDocuments = request.app.state.static_documents
    return await documents.respond(request, str(file), lambda: _read_document(file))


def _read_document(file: Path) -> StaticDocument:
    """Return a file of the site with its headers."""
    body, kind = file.read_bytes(), mimetypes.guess_type(file.name)[0] or "text/plain"
    if kind != "text/html":
        return StaticDocument(body, kind, HEADERS)
    policy = {"Content-Security-Policy": allow_inline(body.decode())}
    return StaticDocument(body, f"{kind}; charset=utf-8", {**HEADERS, **policy})


def allow_inline(page: str) -> str:
    """Return the Content-Security-Policy that allows what stands in a page, by its hash.

    The theme writes scripts, and a notebook writes styles, into their pages.
    """
    found = _InlineParts()
    found.feed(page)
    scripts, styles, attributes = (
        "".join(f" '{_hash(text)}'" for text in sorted(texts)) for texts in found.texts.values()
    )
    policy = POLICY.replace("script-src 'self'", f"script-src 'self'{scripts}")
    policy = policy.replace("style-src 'self'", f"style-src 'self'{styles}")
    return policy + (f"; style-src-attr 'unsafe-hashes'{attributes}" if attributes else "")


def _hash(text: str) -> str:
    """Return the hash of an inline script or style, as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class _InlineParts(HTMLParser):
    """Collects the inline scripts, styles and style attributes of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.texts: dict[str, set[str]] = {"script": set(), "style": set(), "attribute": set()}
        self._text: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a style attribute, and whether an inline script or style begins."""
        given = dict(attrs)
        if given.get("style"):
            self.texts["attribute"].add(given["style"] or "")
        self._text = [] if tag in ("script", "style") and "src" not in given else None

    def handle_data(self, data: str) -> None:
        """Note a part of an inline script or style: the parser cuts it at each closing tag."""
        if self._text is not None:
            self._text.append(data)

    def handle_endtag(self, tag: str) -> None:
        """Note that an inline script or style has ended."""
        if self._text is not None and tag in self.texts:
            self.texts[tag].add("".join(self._text))
        self._text = None
