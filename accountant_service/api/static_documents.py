"""Answers that are the same for everybody: encoded once, compressed once, and revalidated by ETag.

To build the OpenAPI document or a page for every request would delay grants while somebody asks
for it again and again.
"""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

_GZIP_BYTES_MIN: Final = 500


@dataclass(frozen=True, slots=True)
class _Variant:
    """The bytes of a document in one content encoding, with their headers."""

    body: bytes
    headers: dict[str, str]


class StaticDocument:
    """A document that is sent as it is, or not at all if the client has it already.

    Args:
        body: its bytes.
        media_type: of the body.
        headers: further ones of every answer.
    """

    def __init__(
        self, body: bytes, media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        common = {"Cache-Control": "no-cache", "Vary": "Accept-Encoding", **(headers or {})}
        common["Content-Type"] = media_type
        self._plain = _encode(body, common)
        packed = gzip.compress(body, mtime=0) if len(body) >= _GZIP_BYTES_MIN else body
        self._packed = None
        if len(packed) < len(body):
            self._packed = _encode(packed, common | {"Content-Encoding": "gzip"})

    def respond(self, request: Request) -> Response:
        """Return the document, or 304 if the request names the ETag that it would get."""
        accepts_gzip = "gzip" in request.headers.get("Accept-Encoding", "")
        chosen = self._packed if self._packed is not None and accepts_gzip else self._plain
        known = request.headers.get("If-None-Match", "").replace("W/", "")
        if chosen.headers["ETag"] in [tag.strip() for tag in known.split(",")]:
            return Response(None, 304, chosen.headers)
        return Response(chosen.body, 200, chosen.headers)


class StaticDocuments:
    """The documents of an application by name; each is built when it is first asked for."""

    def __init__(self) -> None:
        self._found: dict[str, StaticDocument] = {}
        self._lock = threading.Lock()

    async def respond(
        self, request: Request, name: str, build: Callable[[], StaticDocument]
    ) -> Response:
        """Answer a request with a document; build it in a thread at the first request."""
        found = self._found.get(name)
        if found is None:
            found = await run_in_threadpool(self._build_once, name, build)
        return found.respond(request)

    def _build_once(self, name: str, build: Callable[[], StaticDocument]) -> StaticDocument:
        """Build a document, unless another thread has built it meanwhile."""
        with self._lock:
            if name not in self._found:
                self._found[name] = build()
            return self._found[name]


def _encode(body: bytes, headers: Mapping[str, str]) -> _Variant:
    """Return the bytes of a variant with an ETag of their own."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return _Variant(body, {**headers, "ETag": tag})
