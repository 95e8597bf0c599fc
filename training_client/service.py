"""The accounting service, typed: questions out, dataclasses back, every failure an exception."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import httpx

from training_client.errors import (
    BudgetExhaustedError,
    DataError,
    ServiceConfusedError,
    ServiceRefusedError,
    ServiceUnreachableError,
)
from training_client.waiting import Waiting, retry_after

_LOGGER: Final = logging.getLogger(__name__)
_FAULT: Final = 500  # of the service itself: waiting rarely mends it
_SECONDS_WITHOUT_HOPE: Final = 3.0
_SLICE_SECONDS: Final = 0.5  # within which a wait ends that is not wanted any more
_RETRIED: Final = frozenset({429, _FAULT, 502, 503, 504})
PLD: Final = "pld"  # the method that proves every claim it makes
ADD_OR_REMOVE_ONE: Final = "add_or_remove_one"
_PROVEN: Final = "proven"
_ESTIMATE: Final = "estimate"  # a hypothesis of the method fails

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Guarantee:
    """What the service claims about a run, and how far it can be trusted."""

    epsilon: float
    delta: float
    method: str
    status: str
    document: Json

    @classmethod
    def from_json(cls, document: Any) -> Guarantee:
        """Read a guarantee, refusing anything that is not one."""
        try:
            found = cls(
                float(document["epsilon"]),
                float(document["delta"]),
                str(document["method"]),
                str(document["status"]),
                document,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServiceConfusedError(f"the answer is not a guarantee: {error!r}") from None
        if not (math.isfinite(found.epsilon) and found.epsilon >= 0 and 0 <= found.delta <= 1):
            raise ServiceConfusedError(
                f"the answer is no guarantee: ε = {found.epsilon}, δ = {found.delta}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Reservation:
    """What the ledger holds for a run."""

    identifier: str
    state: str
    steps_reserved: int
    steps_granted: int
    mechanism: Json = field(default_factory=dict)

    @classmethod
    def from_json(cls, document: Json) -> Reservation:
        """Read a reservation, refusing anything that is not one."""
        try:
            found = cls(
                str(document["id"]),
                str(document["state"]),
                int(document["steps_reserved"]),
                int(document["steps_granted"]),
                dict(document.get("mechanism") or {}),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServiceConfusedError(f"the answer is not a reservation: {error!r}") from None
        if not 0 <= found.steps_granted <= found.steps_reserved:
            raise ServiceConfusedError(f"the answer is no reservation: {found}")
        return found


@dataclass(frozen=True, slots=True)
class Quote:
    """What a dataset's budget allows.

    Attributes:
        fits: whether the plan does.
        steps: of its mechanism that would; None if without end.
        noise_multiplier: with which all of its steps would; None if none does.
    """

    fits: bool
    steps: int | None
    noise_multiplier: float | None


class AccountingService:
    """A connection to the service. Use as a context manager.

    Args:
        url: where it listens, such as http://127.0.0.1:8000.
        api_key: for the ledger; computations may do without.
        timeout_seconds: for one attempt.
        patience_seconds: how long a call is repeated while the service is busy, its database takes
            no writes, or it stopped answering. `Retry-After` is obeyed; where it asks for more,
            the call ends at once. A service that never answered, or that fails with 500, is given
            three seconds.
        transport: for tests.

    Attributes:
        attempt_seconds: that the last attempt of the last call took.

    Raises:
        ServiceUnreachableError: that is no address.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 30.0,
        patience_seconds: float = 120.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url
        self.attempt_seconds = 0.0
        self._stop: Callable[[], bool] = lambda: False
        self._patience, self._reached = patience_seconds, False
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            self._client = httpx.Client(
                base_url=url, timeout=timeout_seconds, transport=transport, headers=headers
            )
        except httpx.InvalidURL as error:
            raise ServiceUnreachableError(
                f"{url!r} is no address of a service, such as http://127.0.0.1:8000: {error}"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    @contextmanager
    def giving_up_when(self, stop: Callable[[], bool]) -> Iterator[None]:
        """Wait for an answer only as long as `stop()` is false."""
        before, self._stop = self._stop, stop
        try:
            yield
        finally:
            self._stop = before

    def epsilon(
        self,
        mechanism: Json,
        delta: float,
        method: str = PLD,
        relation: str = ADD_OR_REMOVE_ONE,
    ) -> Guarantee:
        """The guarantee of a mechanism at δ.

        Args:
            mechanism: what is released.
            delta: that the answer may not pass.
            method: of accounting. The default proves what it says; of another, which somebody
                chose, an estimate is taken too, and says that it is one.
            relation: which data sets are neighbours.

        Raises:
            ServiceConfusedError: the answer is to another question, or claims less than it must.
        """
        body = {
            "mechanism": mechanism,
            "delta": delta,
            "method": method,
            "neighbouring_relation": relation,
        }
        found = Guarantee.from_json(self._ask("/v1/epsilon", body))
        if found.delta > delta or found.method != method:
            raise ServiceConfusedError(
                f"δ = {delta:g} by {method} was asked for, the answer is for δ = {found.delta:g} "
                f"by {found.method}"
            )
        if found.status not in ({_PROVEN} if method == PLD else {_PROVEN, _ESTIMATE}):
            raise ServiceConfusedError(
                f"the claim of {method} is {found.status!r}, and nothing may be made of it"
            )
        return replace(found, document={**found.document, "mechanism": mechanism})

    def curve(self, run: Json, delta: float, points: int) -> list[tuple[int, float]]:
        """ε along the steps of a run: so many steps, and what they cost.

        Args:
            run: a mechanism of kind dp_sgd; the last point is all of its steps.
            delta: of each ε.
            points: how many, evenly spaced.
        """
        body = {"mechanism": run, "delta": delta, "points": points}
        answer = self._ask("/v1/curve", body)
        try:
            found = [float(each) for each in answer["curves"][0]["epsilon"]]
            return list(zip(map(int, answer["steps"]), found, strict=True))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServiceConfusedError(f"the answer is not a curve: {error!r}") from None

    def noise_multiplier(
        self, *, sample_rate: float, steps: int, epsilon: float, delta: float, method: str = "pld"
    ) -> float:
        """The least noise multiplier with which a Poisson-sampled run stays within ε at δ."""
        body = {
            "sample_rate": sample_rate,
            "steps": steps,
            "epsilon": epsilon,
            "delta": delta,
            "method": method,
        }
        answer = self._ask("/v1/noise-multiplier", body)
        _require_within(Guarantee.from_json(answer.get("guarantee")), epsilon, delta)
        return _number(answer, "noise_multiplier")

    def steps(
        self,
        *,
        noise_multiplier: float,
        sample_rate: float,
        epsilon: float,
        delta: float,
        method: str = "pld",
    ) -> int:
        """The most steps such a run can make within ε at δ."""
        body = {
            "noise_multiplier": noise_multiplier,
            "sample_rate": sample_rate,
            "epsilon": epsilon,
            "delta": delta,
            "method": method,
        }
        answer = self._ask("/v1/steps", body)
        _require_within(Guarantee.from_json(answer.get("guarantee")), epsilon, delta)
        return int(_number(answer, "steps"))

    def quote(self, dataset: str, mechanism: Json) -> Quote:
        """Whether a whole run fits what is left of a dataset's budget, and what would."""
        answer = self._ask(f"/v1/datasets/{_part(dataset)}/quotes", {"mechanism": mechanism})
        affordable = answer.get("affordable")
        if not isinstance(affordable, dict) or not isinstance(answer.get("fits"), bool):
            raise ServiceConfusedError(f"a quote says {answer!r}")
        return Quote(answer["fits"], affordable.get("steps"), affordable.get("noise_multiplier"))

    def affordable_noise(self, dataset: str, mechanism: Json) -> float:
        """The least noise multiplier with which a whole run fits a dataset's budget."""
        noise = self.quote(dataset, mechanism).noise_multiplier
        if noise is None:
            raise BudgetExhaustedError(
                f"no noise makes these steps fit what is left of the budget of {dataset!r}"
            )
        return float(noise)

    def dataset(self, name: str) -> Json:
        """A dataset as the ledger has it."""
        return self._ask(f"/v1/datasets/{_part(name)}")

    def reserve(self, dataset: str, mechanism: Json, purpose: str = "") -> Reservation:
        """Hold budget for a whole run."""
        body = {"mechanism": mechanism, "purpose": purpose}
        return Reservation.from_json(
            self._write(f"/v1/datasets/{_part(dataset)}/reservations", body)
        )

    def grant(self, reservation: Reservation, steps: int) -> Reservation:
        """Have the next steps charged, before their noise is drawn."""
        body = {"steps": steps, "sequence": reservation.steps_granted}
        path = f"/v1/reservations/{_part(reservation.identifier)}/grants"
        after = Reservation.from_json(self._write(path, body))
        if after.steps_granted != reservation.steps_granted + steps:
            raise ServiceConfusedError(f"{steps} steps were asked for, the answer is {after}")
        return after

    def reservation(self, identifier: str) -> Reservation:
        """A reservation as the ledger has it."""
        return Reservation.from_json(self._ask(f"/v1/reservations/{_part(identifier)}"))

    def renew(self, reservation: Reservation) -> Reservation:
        """Extend the lease, from now on."""
        path = f"/v1/reservations/{_part(reservation.identifier)}/renew"
        return Reservation.from_json(self._write(path, {}))

    def commit(self, reservation: Reservation) -> Reservation:
        """The run is done; what was not granted is free again."""
        path = f"/v1/reservations/{_part(reservation.identifier)}/commit"
        return Reservation.from_json(self._write(path, {}))

    def release(
        self, reservation: Reservation, patience_seconds: float | None = None
    ) -> Reservation:
        """The run is given up; what was not granted is free again.

        Args:
            reservation: of the run.
            patience_seconds: for this call, if not the connection's.
        """
        path = f"/v1/reservations/{_part(reservation.identifier)}/release"
        return Reservation.from_json(self._write(path, {}, patience_seconds))

    def certificate(self, reservation: Reservation) -> Json:
        """What may be published about a run that has ended."""
        return self._ask(f"/v1/reservations/{_part(reservation.identifier)}/certificate")

    def _write(self, path: str, body: Json, patience: float | None = None) -> dict[str, Any]:
        """A write, repeated under one key until it is answered: it happens once."""
        try:
            return self._ask(path, body, {"Idempotency-Key": uuid.uuid4().hex}, patience)
        except ServiceRefusedError as error:
            if error.code == "budget-exhausted":
                raise BudgetExhaustedError(str(error)) from None
            raise

    def _ask(
        self,
        path: str,
        body: Json | None = None,
        headers: Mapping[str, str] | None = None,
        patience: float | None = None,
    ) -> dict[str, Any]:
        answer = self._send(
            path, body, headers or {}, self._patience if patience is None else patience
        )
        try:
            document = answer.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise ServiceConfusedError(f"{self.url}{path} answered {answer.status_code}, not JSON")
        if answer.is_success:
            return document
        faults = document.get("errors") or []
        pointers = tuple(str(fault.get("pointer")) for fault in faults if isinstance(fault, dict))
        code = str(document.get("code", answer.status_code))
        raise ServiceRefusedError(code, str(document.get("detail", "no reason given")), pointers)

    def _send(
        self, path: str, body: Json | None, headers: Mapping[str, str], patience: float
    ) -> httpx.Response:
        """The answer, as soon as there is one; every call is safe to repeat."""
        waiting, limit = Waiting(), min(_SECONDS_WITHOUT_HOPE, patience)
        while True:
            try:
                answer = self._attempt(path, body, headers)
            except httpx.HTTPError as error:
                problem, asked = f"{type(error).__name__}: {error}", 0.0
                self._reached |= not isinstance(error, httpx.ConnectError)
                hope = self._reached
            else:
                if answer.status_code not in _RETRIED:
                    return answer
                asked = retry_after(answer.headers)
                problem = _complaint(answer, asked)
                hope = answer.status_code != _FAULT
            waiting.seconds += self.attempt_seconds
            pause = waiting.pause(asked, patience if hope else limit)
            if pause is None or not self._waited(pause, problem):
                raise ServiceUnreachableError(
                    f"no answer from {self.url} within {waiting.seconds:.3g} s ({problem}); "
                    "nothing is trained without one. Is the service running? Start it with "
                    "`accountant serve`"
                )

    def _attempt(self, path: str, body: Json | None, headers: Mapping[str, str]) -> httpx.Response:
        method, started = "GET" if body is None else "POST", time.monotonic()
        try:
            answer = self._client.request(method, path, json=body, headers=headers)
            self._reached = True
        except httpx.InvalidURL as error:  # more than a URL can hold; again is no better
            raise DataError(f"{path[:60]!r}… cannot be asked for: {error}") from None
        except httpx.UnsupportedProtocol:
            raise DataError(
                f"{self.url!r} is no address of a service: write it as http://127.0.0.1:8000"
            ) from None
        finally:
            self.attempt_seconds = time.monotonic() - started
        return answer

    def _waited(self, seconds: float, problem: str) -> bool:
        """Wait and return True, unless it is not wanted any more."""
        _LOGGER.warning("%s: %s; asking again in %.1f s", self.url, problem, seconds)
        while seconds > 0 and not self._stop():
            time.sleep(min(seconds, _SLICE_SECONDS))
            seconds -= _SLICE_SECONDS
        return not self._stop()


def _complaint(answer: httpx.Response, asked: float) -> str:
    """Return what an answer says of why it is none, and when to come back."""
    said = f"it answered {answer.status_code}"
    with suppress(ValueError, KeyError, TypeError):
        said += f": {answer.json()['detail']}"
    return f"{said} (to be asked again after {asked:.0f} s)" if asked else said


def _part(name: str) -> str:
    """A name as one part of a path: whatever is in it, it may not lead to another.

    Raises:
        DataError: it is empty, or no part of a path can be made of it.
    """
    try:
        part = quote(name, safe="")
    except UnicodeEncodeError:
        part = ""
    if part in ("", ".", ".."):
        raise DataError(f"{name!r} can be no name in the ledger: give the one it has there")
    return part


def _number(answer: Json, name: str) -> float:
    value = answer.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ServiceConfusedError(f"the answer has no usable {name}: {value!r}")
    return value


def _require_within(guarantee: Guarantee, epsilon: float, delta: float) -> None:
    """Do not trust a solution whose own guarantee misses the target."""
    if guarantee.epsilon > epsilon or guarantee.delta > delta:
        raise ServiceConfusedError(
            f"the solution's guarantee (ε = {guarantee.epsilon}, δ = {guarantee.delta}) is outside "
            f"the budget asked for (ε = {epsilon}, δ = {delta})"
        )
