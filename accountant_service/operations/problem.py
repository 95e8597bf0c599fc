"""The failure that the edge of the service itself raises."""

from __future__ import annotations

from starlette.exceptions import HTTPException


class Problem(HTTPException):
    """A failure raised by the API itself, rather than by a computation or the ledger."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, detail, headers)
