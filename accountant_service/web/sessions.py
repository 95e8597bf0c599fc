"""Who is signed in: a signed cookie that names an API key, and the tokens that guard forms.

The cookie says which key signed in and until when, under an HMAC whose secret is in the database:
every server of one database knows it. The key itself is read anew with each request, so revoking
it ends its sessions at once.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Final

from fastapi import Request
from starlette.responses import Response

from accountant_service.errors import ForbiddenError, UnauthenticatedError
from accountant_service.ledger.keys import Keys, Scope
from accountant_service.ledger.repository import KeyRecord, Repository, now

COOKIE: Final = "accountant_session"
VISITOR: Final = "accountant_visitor"  # what guards the sign-in form, before there is a session
SECONDS: Final = 8 * 3600
_SECRET: Final = "web-sessions"


class SessionEndedError(UnauthenticatedError):
    """The cookie is of a session that is over."""


@dataclass(frozen=True, slots=True)
class Session:
    """Who is signed in.

    Attributes:
        key: as it stands now.
        csrf: the token that every form of this session carries.
    """

    key: KeyRecord
    csrf: str

    @property
    def is_admin(self) -> bool:
        """Whether the key may make keys."""
        return self.key.datasets is None and Scope.ADMIN in self.key.scopes

    @property
    def is_owner(self) -> bool:
        """Whether the key may make datasets."""
        return self.is_admin or (self.key.datasets is None and Scope.OWNER in self.key.scopes)


class Sessions:
    """Signs cookies and reads them."""

    def __init__(self, repository: Repository, keys: Keys) -> None:
        self._repository = repository
        self._keys = keys
        self._secret: bytes | None = None

    def open(self, token: str) -> str:
        """The cookie of a new session for the holder of an API key.

        Raises:
            UnauthenticatedError: the key is not known, has expired or was revoked.
        """
        key = self._keys.authenticate(token)
        claim = f"{key.identifier}.{now() + SECONDS * 1_000_000}.{secrets.token_urlsafe(16)}"
        return f"{claim}.{self._sign('session', claim)}"

    def read(self, cookie: str) -> Session:
        """Whose session a cookie is of.

        Raises:
            SessionEndedError: it has ended, or was never one.
        """
        claim, _, signature = cookie.rpartition(".")
        if not _same(self._sign("session", claim), signature):
            raise SessionEndedError("this session is not known")
        identifier, until, _ = claim.split(".")
        if int(until) <= now():
            raise SessionEndedError(f"a session lasts {SECONDS // 3600} hours")
        try:
            return Session(self._keys.current(identifier), self.csrf(cookie))
        except UnauthenticatedError as error:
            raise SessionEndedError(error.detail) from None

    def csrf(self, cookie: str) -> str:
        """The token that a form sent with this cookie must carry."""
        return self._sign("form", cookie)

    def require_csrf(self, cookie: str | None, token: str) -> None:
        """Raise `ForbiddenError` unless a form was made for who sends it."""
        if not cookie or not _same(self.csrf(cookie), token):
            raise ForbiddenError("this form is not from your session; load the page again")

    def _sign(self, purpose: str, text: str) -> str:
        if self._secret is None:
            self._secret = self._repository.secret(_SECRET)
        message = f"{purpose}\n{text}".encode("utf-8", "surrogateescape")
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


def _same(expected: str, given: str) -> bool:
    return hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogateescape"))


def set_cookie(request: Request, response: Response, name: str, value: str) -> None:
    """Send a cookie that no script reads and no other site sends; over TLS where there is TLS."""
    response.set_cookie(
        name,
        value,
        max_age=SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
