"""Sessions: a signed cookie that names an API key, and CSRF tokens for forms.

The cookie holds the key's identifier and the end of the session, with an HMAC. Its secret is in
the database, so every server of one database can check it. The key is read from the database with
each request, so revoking it ends its sessions at once.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Final

from fastapi import Request
from starlette.responses import Response

from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.errors import ForbiddenError, UnauthenticatedError
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.repository import Repository, now

COOKIE: Final = "accountant_session"
VISITOR: Final = "accountant_visitor"  # protects the sign-in form, before there is a session
SECONDS: Final = 8 * 3600
_SECRET: Final = "web-sessions"


class SessionEndedError(UnauthenticatedError):
    """The session has ended."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session of the holder of an API key.

    Attributes:
        key: the key as it is now.
        csrf: the token that every form of this session carries.
    """

    key: KeyRecord
    csrf: str

    @property
    def is_admin(self) -> bool:
        """Return whether the key may create keys."""
        return self.key.datasets is None and Scope.ADMIN in self.key.scopes

    @property
    def is_owner(self) -> bool:
        """Return whether the key may create datasets."""
        return self.is_admin or (self.key.datasets is None and Scope.OWNER in self.key.scopes)


class Sessions:
    """Creates and verifies signed session cookies, and CSRF tokens."""

    def __init__(self, repository: Repository, keys: Keys) -> None:
        self._repository = repository
        self._keys = keys
        self._secret: bytes | None = None

    def open(self, token: str) -> str:
        """Create a session for the holder of an API key, and return its cookie.

        Raises:
            UnauthenticatedError: the key is unknown, expired or revoked.
        """
        key = self._keys.authenticate(token)
        claim = f"{key.identifier}.{now() + SECONDS * 1_000_000}.{secrets.token_urlsafe(16)}"
        return f"{claim}.{self._sign('session', claim)}"

    def read(self, cookie: str) -> Session:
        """Verify a session cookie, and return its session.

        Raises:
            SessionEndedError: the session has ended, or the cookie is not valid.
        """
        claim, _, signature = cookie.rpartition(".")
        if not _equals_in_constant_time(self._sign("session", claim), signature):
            raise SessionEndedError("this session is unknown")
        identifier, until, _ = claim.split(".")
        if int(until) <= now():
            raise SessionEndedError(f"a session lasts {SECONDS // 3600} hours")
        try:
            return Session(self._keys.get_valid(identifier), self.csrf(cookie))
        except UnauthenticatedError as error:
            raise SessionEndedError(error.detail) from None

    def csrf(self, cookie: str) -> str:
        """Return the CSRF token for forms that are sent with this cookie."""
        return self._sign("form", cookie)

    def require_csrf(self, cookie: str | None, token: str) -> None:
        """Raise `ForbiddenError` unless the CSRF token belongs to the cookie."""
        if not cookie or not _equals_in_constant_time(self.csrf(cookie), token):
            raise ForbiddenError("this form does not belong to your session; reload the page")

    def _sign(self, purpose: str, text: str) -> str:
        """Return the HMAC of a text for one purpose, such as sessions or forms."""
        if self._secret is None:
            self._secret = self._repository.get_or_create_secret(_SECRET)
        message = f"{purpose}\n{text}".encode("utf-8", "surrogateescape")
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


def _equals_in_constant_time(expected: str, given: str) -> bool:
    """Compare two texts in a time that does not depend on their contents."""
    return hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogateescape"))


def set_cookie(request: Request, response: Response, name: str, value: str) -> None:
    """Set a cookie that scripts cannot read and other sites cannot send; secure over TLS."""
    response.set_cookie(
        name,
        value,
        max_age=SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
