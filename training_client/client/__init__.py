"""A typed HTTP client of the accounting service.

Answers are dataclasses and every failure is an exception (see `training_client.errors`). All calls
are safe to repeat, so the client retries while the service is busy or away.
"""

from __future__ import annotations

import logging
import math
import random
import socket
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Final, Self, Unpack
from urllib.parse import urlencode

import httpx

from training_client.client.answers import BudgetPlan, Comparison, Guarantee
from training_client.client.arguments import (
    CompareArguments,
    DeltaArguments,
    EpsilonArguments,
    ImportDocumentArguments,
    NoiseMultiplierArguments,
    PlanArguments,
    RunArguments,
    SampleRateArguments,
    SolveArguments,
    StepsArguments,
)
from training_client.client.calls import RouteCalls
from training_client.client.urls import quote_segment
from training_client.errors import (
    BudgetExhaustedError,
    DataError,
    ServiceConfusedError,
    ServiceRefusedError,
    ServiceUnreachableError,
)

_LOGGER: Final = logging.getLogger(__name__)
_NO_CONTENT: Final = 204
_INTERNAL_ERROR: Final = 500  # rarely goes away by waiting
_HOPELESS_SECONDS_MAX: Final = 3.0
_BACKOFF_MIN_SECONDS, _BACKOFF_MAX_SECONDS = 0.2, 10.0
_RANDOM: Final = random.SystemRandom()  # leaves the program's own random state untouched
_SLEEP_SECONDS_MAX: Final = 0.5  # between two looks at whether to stop waiting
_RETRIED: Final = frozenset({429, _INTERNAL_ERROR, 502, 503, 504})
_NO_ANSWER: Final = (httpx.NetworkError, httpx.RemoteProtocolError)  # the connection was closed
_START_IT: Final = "Is it running? Start it with `accountant serve`"
PLD: Final = "pld"  # the accounting method that proves each of its guarantees
ADD_OR_REMOVE_ONE: Final = "add_or_remove_one"
_PROVEN: Final = "proven"
_INVALID_REQUEST: Final = "invalid-request"
_RISKS: Final = ("advantage", "attack_success", "true_positive_rate", "mu")  # instead of ε
_ESTIMATE: Final = "estimate"  # one of the method's hypotheses does not hold

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Budget that the ledger holds for one run.

    Attributes:
        identifier: the ledger's identifier of the reservation.
        state: "open" while steps may be granted.
        steps_reserved: the number of steps that budget is reserved for.
        steps_granted: the number of steps already charged.
        mechanism: the mechanism of all reserved steps.
        dataset: the name of the dataset whose budget it holds; empty for a run on several, or if
            the service does not say.
        datasets: the names of the datasets of a run on several.
        neighbouring_relation: that of the dataset; empty if the service does not say.
    """

    identifier: str
    state: str
    steps_reserved: int
    steps_granted: int
    mechanism: Json = field(default_factory=dict)
    dataset: str = ""
    neighbouring_relation: str = ""
    datasets: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, document: Json) -> Reservation:
        """Parse a reservation.

        Raises:
            ServiceConfusedError: a field is missing, or more steps are granted than reserved.
        """
        try:
            found = cls(
                str(document["id"]),
                str(document["state"]),
                int(document["steps_reserved"]),
                int(document["steps_granted"]),
                dict(document.get("mechanism") or {}),
                str(document.get("dataset") or ""),
                str(document.get("neighbouring_relation") or ""),
                tuple(map(str, document.get("datasets") or ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServiceConfusedError(f"the answer is not a reservation: {error!r}") from None
        if not 0 <= found.steps_granted <= found.steps_reserved:
            raise ServiceConfusedError(f"the answer is not a reservation: {found}")
        return found


@dataclass(frozen=True, slots=True)
class Window:
    """The last datasets of a series.

    Attributes:
        names: of the datasets, in their order.
        size: the number of records of all of them.
        document: the service's whole answer: what is left of each, and what they prove together.
    """

    names: tuple[str, ...]
    size: int
    document: Json


@dataclass(frozen=True, slots=True)
class Quote:
    """The service's answer whether a run fits a dataset's remaining budget, and which run would.

    Attributes:
        fits: True if the whole run fits.
        steps: the most steps of this mechanism that fit; None if any number does.
        noise_multiplier: the least noise multiplier with which all steps fit; None if there is
            none.
        share: the share of the whole budget that the run takes; None if it does not fit.
        steps_alone: the most steps that would fit as the only run of the whole budget; None if any
            number would, or if the service does not say.
    """

    fits: bool
    steps: int | None
    noise_multiplier: float | None
    share: float | None = None
    steps_alone: int | None = None


class AccountingService(RouteCalls):
    """A connection to the accounting service over HTTP; use it as a context manager.

    Example:
        ```python
        with AccountingService("http://127.0.0.1:8000") as service:
            found = service.epsilon(
                delta=1e-5, noise_multiplier=1.1, dataset_size=60000, batch_size=600, epochs=10
            )
            print(found.epsilon)
        ```

    Every call may raise `ServiceUnreachableError` (no answer in time), `ServiceRefusedError` (the
    request is invalid), `ServiceConfusedError` (the answer breaks the API's contract) and
    `DataError` (the address or a name cannot be part of a URL).

    A busy or unavailable service is asked again, after the delay that its `Retry-After` header
    requests or an increasing one. Writes carry an idempotency key: retries take effect once.

    Args:
        url: the service's address, such as http://127.0.0.1:8000.
        api_key: the key for calls to the ledger, and for computations if the service requires one.
        timeout_seconds: the limit for one attempt.
        patience_seconds: the limit for one call with all its attempts. A call ends at once if
            `Retry-After` asks for more. At most three seconds are spent on a service that never
            answered, or that fails with status 500.
        transport: replaces the network in tests.

    Attributes:
        url: the service's address.
        attempt_seconds: the duration of the last call's last attempt.

    Raises:
        ServiceUnreachableError: `url` is not a valid address.
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
        self._should_stop: Callable[[], bool] = lambda: False
        self._patience, self._has_answered = patience_seconds, False
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            self._client = httpx.Client(
                base_url=url, timeout=timeout_seconds, transport=transport, headers=headers
            )
        except httpx.InvalidURL as error:
            raise ServiceUnreachableError(
                f"{url!r} is not the address of a service, such as http://127.0.0.1:8000: {error}"
            ) from None

    def __enter__(self) -> Self:
        """Return this connection."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection."""
        self._client.close()

    @contextmanager
    def giving_up_when(self, stop: Callable[[], bool]) -> Iterator[None]:
        """Context manager: stop retrying requests once `stop()` returns True.

        A call that is waiting then raises `ServiceUnreachableError` within half a second.
        """
        before, self._should_stop = self._should_stop, stop
        try:
            yield
        finally:
            self._should_stop = before

    def epsilon(
        self,
        mechanism: Json | None = None,
        delta: float | None = None,
        method: str = PLD,
        neighbouring_relation: str = ADD_OR_REMOVE_ONE,
        **arguments: Unpack[EpsilonArguments],
    ) -> Guarantee:
        """Return ε at δ, with its status and proof, for a DP-SGD run or any mechanism.

        Args:
            mechanism: any mechanism, as JSON; without it, the arguments describe a run.
            delta: δ, in (0, 1), required; the answer's δ does not exceed it.
            method: the accounting method. The default proves its guarantees; other methods may
                return one whose status is "estimate".
            neighbouring_relation: the neighbouring relation.
            arguments: a run, such as `noise_multiplier`, and more: see `EpsilonArguments`.

        Raises:
            ServiceConfusedError: the answer is for another δ or method, or is not proven though
                the method proves its guarantees.
        """
        delta = _require(delta, "delta")
        body = _describe_question(mechanism, arguments) | {
            "delta": delta,
            "method": method,
            "neighbouring_relation": neighbouring_relation,
        }
        found = self._require_trusted(
            Guarantee.from_json(self._request("/v1/epsilon", body)), method
        )
        if found.delta > delta:
            raise ServiceConfusedError(
                f"asked for δ = {delta:g}, but the answer is for δ = {found.delta:g}"
            )
        return replace(found, document={**found.document, "mechanism": body["mechanism"]})

    def delta(
        self,
        mechanism: Json | None = None,
        epsilon: float | None = None,
        method: str = PLD,
        neighbouring_relation: str = ADD_OR_REMOVE_ONE,
        **arguments: Unpack[DeltaArguments],
    ) -> Guarantee:
        """Return δ at ε, with its status and proof, for a DP-SGD run or any mechanism.

        Args:
            mechanism: any mechanism, as JSON; without it, the arguments describe a run.
            epsilon: ε ≥ 0, required; the answer's ε does not exceed it.
            method: the accounting method.
            neighbouring_relation: the neighbouring relation.
            arguments: a run, such as `noise_multiplier`, and more: see `DeltaArguments`.

        Raises:
            ServiceConfusedError: the answer is for another ε or method, or is not proven though
                the method proves its guarantees.
        """
        epsilon = _require(epsilon, "epsilon")
        body = _describe_question(mechanism, arguments) | {
            "epsilon": epsilon,
            "method": method,
            "neighbouring_relation": neighbouring_relation,
        }
        found = self._require_trusted(Guarantee.from_json(self._request("/v1/delta", body)), method)
        if found.epsilon > epsilon:
            raise ServiceConfusedError(
                f"asked for ε = {epsilon:g}, but the answer is for ε = {found.epsilon:g}"
            )
        return found

    def compare(
        self,
        mechanism: Json | None = None,
        delta: float | None = None,
        neighbouring_relation: str = ADD_OR_REMOVE_ONE,
        **arguments: Unpack[CompareArguments],
    ) -> Comparison:
        """Return ε at δ by every accounting method, and the proved interval around it.

        Args:
            mechanism: any mechanism, as JSON; without it, the arguments describe a run.
            delta: δ, in (0, 1), required.
            neighbouring_relation: the neighbouring relation.
            arguments: a run, such as `noise_multiplier`, and more: see `CompareArguments`.
        """
        body = _describe_question(mechanism, arguments) | {
            "delta": _require(delta, "delta"),
            "neighbouring_relation": neighbouring_relation,
        }
        return Comparison.from_json(self._request("/v1/compare", body))

    def curve(self, run: Json, delta: float, points: int) -> list[tuple[int, float]]:
        """Return pairs (steps, ε) along a run at δ, for drawing ε against the steps.

        Args:
            run: a mechanism of kind dp_sgd; the last pair is for all of its steps.
            delta: δ of each ε.
            points: the number of pairs, evenly spaced over the run.
        """
        body = {"mechanism": run, "delta": delta, "points": points}
        answer = self._request("/v1/curve", body)
        try:
            found = [float(each) for each in answer["curves"][0]["epsilon"]]
            return list(zip(map(int, answer["steps"]), found, strict=True))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServiceConfusedError(f"the answer is not a curve: {error!r}") from None

    def noise_multiplier(self, **arguments: Unpack[NoiseMultiplierArguments]) -> float:
        """Return the least noise multiplier with which a run meets an (ε, δ) or risk target.

        Args:
            arguments: the target, and the run without its noise: `sample_rate` and `steps`, or
                `dataset_size`, `batch_size` and `epochs`; see `NoiseMultiplierArguments`.

        Raises:
            ServiceConfusedError: the solution's own guarantee or risk exceeds the target.
        """
        return self._solve("noise_multiplier", arguments)

    def steps(self, **arguments: Unpack[StepsArguments]) -> int:
        """Return the largest number of steps with which a run meets an (ε, δ) or risk target.

        Args:
            arguments: the target, and the run without its steps: `noise_multiplier`, and
                `sample_rate` or `dataset_size` and `batch_size`; see `StepsArguments`.

        Raises:
            ServiceConfusedError: the solution's own guarantee or risk exceeds the target.
        """
        return int(self._solve("steps", arguments))

    def sample_rate(self, **arguments: Unpack[SampleRateArguments]) -> float:
        """Return the largest sample rate with which a run meets an (ε, δ) or risk target.

        Args:
            arguments: the target, and the run without its rate: `noise_multiplier` and `steps`; see
                `SampleRateArguments`.

        Raises:
            ServiceConfusedError: the solution's own guarantee or risk exceeds the target.
        """
        return self._solve("sample_rate", arguments)

    def solve(self, mechanism: Json, parameter: str, **arguments: Unpack[SolveArguments]) -> float:
        """Return the value of a mechanism's parameter that costs most within a target.

        Args:
            mechanism: the mechanism as JSON; the parameter's value is ignored, and may be None.
            parameter: JSON pointer into the mechanism, such as "/mechanism/noise_multiplier".
            arguments: the target, (ε, δ) or a risk; see `SolveArguments`.

        Raises:
            ServiceConfusedError: the solution's own guarantee or risk exceeds the target.
        """
        asked = {"mechanism": mechanism, "parameter": parameter, **arguments}
        return self._solve("solve", asked, "value")

    def import_document(
        self,
        document: str | Json | Sequence[Any],
        delta: float | None = None,
        **arguments: Unpack[ImportDocumentArguments],
    ) -> Json:
        """Return what a configuration or history of another tool costs, as the service's JSON.

        Args:
            document: a text (JSON, TOML, YAML or a Python repr), or what JSON is parsed to.
            delta: δ, if the document names none.
            arguments: what the document does not say; see `ImportDocumentArguments`.

        Raises:
            ServiceConfusedError: the answer has no verdict.
        """
        body = {"document": document, "delta": delta, **arguments}
        answer = self._request("/v1/import", _without_none(body))
        if not isinstance(answer.get("verdict"), str):
            raise ServiceConfusedError("the answer has no verdict")
        return answer

    def plan(self, **arguments: Unpack[PlanArguments]) -> BudgetPlan:
        """Return possible runs (batch size, steps, noise) within a budget, one of them recommended.

        Args:
            arguments: the budget, the dataset and a compute limit; see `PlanArguments`.

        Raises:
            ServiceConfusedError: a run's ε exceeds that of the budget.
        """
        answer = self._request("/v1/plan", _without_none(arguments))
        return BudgetPlan.from_json(answer, arguments["epsilon"])

    def quote(self, dataset: str | Sequence[str], mechanism: Json) -> Quote:
        """Ask whether a run fits a dataset's remaining budget, and which run would; spend nothing.

        Args:
            dataset: the dataset's name in the ledger; or several names, for one run on all their
                records, which must fit each of them.
            mechanism: the mechanism of the whole run, as JSON.
        """
        if isinstance(dataset, str):
            answer = self._request(f"{_dataset_path(dataset)}/quotes", {"mechanism": mechanism})
        else:
            body = {"datasets": list(dataset), "mechanism": mechanism}
            answer = self._request("/v1/quotes", body)
        affordable = answer.get("affordable")
        if not isinstance(affordable, dict) or not isinstance(answer.get("fits"), bool):
            raise ServiceConfusedError(f"the answer is not a quote: {answer!r}")
        return Quote(
            answer["fits"],
            affordable.get("steps"),
            affordable.get("noise_multiplier"),
            answer.get("share_of_budget"),
            answer.get("affordable_alone"),
        )

    def window(self, series: str, last: int) -> Window:
        """Return the last datasets of a series, for a run on all of their records.

        Args:
            series: the name of the series.
            last: how many datasets.

        Raises:
            ServiceRefusedError: its code is "series-too-short" if there are fewer.
        """
        answer = self._request(f"/v1/series/{quote_segment(series)}/window?last={int(last)}")
        try:
            names = tuple(str(each["name"]) for each in answer["items"])
            return Window(names, int(answer["size"]), answer)
        except (KeyError, TypeError, ValueError) as error:
            raise ServiceConfusedError(f"the answer is not a window: {error!r}") from None

    def affordable_noise(self, dataset: str, mechanism: Json) -> float:
        """Return the least noise multiplier with which a run fits the remaining budget.

        Args:
            dataset: the dataset's name in the ledger.
            mechanism: the mechanism of the whole run, as JSON; its noise multiplier is ignored.

        Raises:
            BudgetExhaustedError: no noise multiplier makes the run fit.
        """
        noise = self.quote(dataset, mechanism).noise_multiplier
        if noise is None:
            raise BudgetExhaustedError(
                f"no noise multiplier makes these steps fit the remaining budget of {dataset!r}"
            )
        return float(noise)

    def reserve(
        self,
        dataset: str | Sequence[str],
        mechanism: Json,
        purpose: str = "",
        idempotency_key: str | None = None,
    ) -> Reservation:
        """Reserve budget for a whole run.

        Args:
            dataset: the dataset's name in the ledger; or several names, for one run on all their
                records, which is charged to each of them or to none.
            mechanism: the mechanism of the whole run, as JSON.
            purpose: a note that the ledger keeps with the reservation.
            idempotency_key: a process that sends the key of an earlier one gets its reservation,
                as it was when it was made, instead of another one; a random key by default.

        Raises:
            BudgetExhaustedError: the run does not fit the remaining budget.
        """
        body = {"mechanism": mechanism, "purpose": purpose}
        if isinstance(dataset, str):
            path = f"{_dataset_path(dataset)}/reservations"
        else:
            path, body = "/v1/reservations", {"datasets": list(dataset), **body}
        return Reservation.from_json(self._write(path, body, idempotency_key=idempotency_key))

    def grant(self, reservation: Reservation, steps: int) -> Reservation:
        """Spend budget on the next steps; call it before their noise is drawn.

        Args:
            reservation: the run's reservation, as last returned.
            steps: the number of steps to charge.

        Returns:
            The reservation with these steps granted.

        Raises:
            BudgetExhaustedError: the steps do not fit the budget.
            ServiceRefusedError: steps that this client does not know of were granted meanwhile.
            ServiceConfusedError: another number of steps was granted.
        """
        body = {"steps": steps, "sequence": reservation.steps_granted}
        after = self._change_state(reservation, "grants", body)
        if after.steps_granted != reservation.steps_granted + steps:
            raise ServiceConfusedError(f"asked for {steps} steps, but the answer is {after}")
        return after

    def reservation(self, identifier: str) -> Reservation:
        """Return a reservation in its current state."""
        return Reservation.from_json(self._request(_reservation_path(identifier)))

    def renew(self, reservation: Reservation) -> Reservation:
        """Restart a reservation's lease."""
        return self._change_state(reservation, "renew")

    def commit(
        self,
        reservation: Reservation,
        clip_norm: float | None = None,
        model_sha256: str | None = None,
    ) -> Reservation:
        """End a finished run; the budget of steps that were not granted becomes free again.

        Args:
            reservation: the run's reservation.
            clip_norm: the bound on what one record contributes to a step, for the certificate.
            model_sha256: the hash of the trained model's file, for the certificate.
        """
        stated = {"clip_norm": clip_norm, "model_sha256": model_sha256}
        body = {name: value for name, value in stated.items() if value is not None}
        try:
            return self._change_state(reservation, "commit", body)
        except ServiceRefusedError as error:
            if not body or error.code != _INVALID_REQUEST:
                raise
            return self._change_state(reservation, "commit")  # an older service takes no facts

    def release(
        self, reservation: Reservation, patience_seconds: float | None = None
    ) -> Reservation:
        """End an abandoned run; the budget of steps that were not granted becomes free again.

        Args:
            reservation: the run's reservation.
            patience_seconds: the limit for this call; that of the connection by default.
        """
        return self._change_state(reservation, "release", patience=patience_seconds)

    def certificate(self, reservation: Reservation) -> Json:
        """Return the signed certificate of an ended run, which may be published."""
        return self._request(f"{_reservation_path(reservation.identifier)}/certificate")

    def _solve(self, question: str, arguments: Json, unknown: str | None = None) -> float:
        """Return the number with which a target is met, from the solver of this name.

        Raises:
            ServiceConfusedError: its own guarantee or risk exceeds the target.
        """
        body = _without_none({"method": PLD, **arguments})  # whatever a service's default is
        answer = self._request(f"/v1/{question.replace('_', '-')}", body)
        _require_within_target(answer, arguments)
        return _finite_number(answer, unknown or question)

    @staticmethod
    def _require_trusted(found: Guarantee, method: str) -> Guarantee:
        """Return a guarantee; raise if it is of another method, or its status is too weak.

        Raises:
            ServiceConfusedError: it is by another method, or its status forbids its use.
        """
        if found.method != method:
            raise ServiceConfusedError(f"asked for {method}, but the answer is by {found.method}")
        if found.status not in ({_PROVEN} if method == PLD else {_PROVEN, _ESTIMATE}):
            raise ServiceConfusedError(
                f"the guarantee by {method} has status {found.status!r} and cannot be used"
            )
        return found

    def _call(self, method: str, path: str, body: Json | None = None) -> dict[str, Any]:
        """Send a request that may be repeated; return the answer."""
        return self._request(path, body, method=method)

    def _call_once(self, method: str, path: str, body: Json | None = None) -> dict[str, Any]:
        """Send a request that must not be repeated; return the answer."""
        return self._request(path, body, method=method, patience=0.0)

    def _call_with_key(
        self, method: str, path: str, body: Json | None, idempotency_key: str | None
    ) -> dict[str, Any]:
        """Send a write that takes effect once, however often it is sent; return the answer."""
        return self._write(path, body, idempotency_key=idempotency_key, method=method)

    def _list(self, path: str, query: Json) -> Iterator[dict[str, Any]]:
        """Yield the items of a list, page by page."""
        cursor: str | None = ""
        while cursor is not None:
            page = self._request(_add_query(path, {**query, "cursor": cursor}))
            if not isinstance(page.get("items"), list):
                raise ServiceConfusedError(f"the answer of {path} is not a list")
            yield from page["items"]
            cursor = page.get("next_cursor")

    def _download(self, path: str, query: Json) -> bytes:
        """Return the body of an answer in the requested format."""
        return self._exchange(_add_query(path, query)).content

    def _change_state(
        self,
        reservation: Reservation,
        action: str,
        body: Json | None = None,
        patience: float | None = None,
    ) -> Reservation:
        """Send an action on a reservation, such as commit or renew; return its new state."""
        path = f"{_reservation_path(reservation.identifier)}/{action}"
        return Reservation.from_json(self._write(path, body or {}, patience))

    def _write(
        self,
        path: str,
        body: Json | None,
        patience: float | None = None,
        idempotency_key: str | None = None,
        method: str = "POST",
    ) -> dict[str, Any]:
        """Send a write; its retries share an Idempotency-Key, so that it takes effect once."""
        key = idempotency_key or uuid.uuid4().hex
        try:
            return self._request(path, body, {"Idempotency-Key": key}, patience, method)
        except ServiceRefusedError as error:
            if error.code in ("budget-exhausted", "cap-exhausted"):
                raise BudgetExhaustedError(str(error)) from None
            raise

    def _request(
        self,
        path: str,
        body: Json | None = None,
        headers: Mapping[str, str] | None = None,
        patience: float | None = None,
        method: str | None = None,
    ) -> dict[str, Any]:
        """Send a request, with retries; return the JSON object of the response.

        The method is POST if there is a body, or else GET, unless it is given.

        Raises:
            ServiceRefusedError: the answer is a problem document.
            ServiceConfusedError: the answer is not a JSON object.
        """
        answer = self._exchange(path, body, headers, patience, method)
        if answer.status_code == _NO_CONTENT:
            return {}
        document = _read_object(answer)
        if document is None:
            raise self._confused(path, answer)
        return document

    def _exchange(
        self,
        path: str,
        body: Json | None = None,
        headers: Mapping[str, str] | None = None,
        patience: float | None = None,
        method: str | None = None,
    ) -> httpx.Response:
        """Send a request, with retries; return the response, which is a success.

        Raises:
            ServiceRefusedError: the answer is a problem document.
            ServiceConfusedError: the answer is another failure.
        """
        request = self._build_request(
            method or ("GET" if body is None else "POST"), path, body, headers
        )
        answer = self._send_with_retries(request, self._patience if patience is None else patience)
        if answer.is_success:
            return answer
        document = _read_object(answer)
        if document is None:
            raise self._confused(path, answer)
        faults = document.get("errors") or []
        pointers = tuple(str(fault.get("pointer")) for fault in faults if isinstance(fault, dict))
        code = str(document.get("code", answer.status_code))
        raise ServiceRefusedError(code, str(document.get("detail", "no reason given")), pointers)

    def _confused(self, path: str, answer: httpx.Response) -> ServiceConfusedError:
        """Return the error for an answer that is not JSON."""
        return ServiceConfusedError(
            f"{self.url}{path} answered {answer.status_code}, not JSON{_advise_on(answer)}"
        )

    def _build_request(
        self, method: str, path: str, body: Json | None, headers: Mapping[str, str] | None
    ) -> httpx.Request:
        """Return a request; raise `DataError` if the address or path is not a valid URL."""
        try:
            return self._client.build_request(method, path, json=body, headers=headers)
        except httpx.InvalidURL as error:  # such as a name that is too long
            raise DataError(f"{path[:60]!r}… is not a valid URL path: {error}") from None

    def _send_with_retries(self, request: httpx.Request, patience: float) -> httpx.Response:
        """Send a request until it is answered or `patience` seconds have passed."""
        timer, hopeless_limit = RetryTimer(), min(_HOPELESS_SECONDS_MAX, patience)
        while True:
            advice = _START_IT
            try:
                answer = self._send(request)
            except httpx.HTTPError as error:
                problem, requested = f"{type(error).__name__}: {error}", 0.0
                self._has_answered |= not isinstance(error, _NO_ANSWER)
                may_recover = self._has_answered
                advice = advice if may_recover else _advise_after(error, self.url)
            else:
                if answer.status_code not in _RETRIED:
                    return answer
                requested = parse_retry_after(answer.headers)
                problem = _describe_failure(answer, requested)
                may_recover = answer.status_code != _INTERNAL_ERROR
            timer.seconds += self.attempt_seconds
            delay = timer.next_delay(requested, patience if may_recover else hopeless_limit)
            if delay is None or not self._sleep_unless_stopped(delay, problem):
                raise ServiceUnreachableError(
                    f"no answer from {self.url} within {timer.seconds:.3g} s ({problem}); "
                    f"training needs the service. {advice}"
                )

    def _send(self, request: httpx.Request) -> httpx.Response:
        """Send a request once, and record the response time."""
        started = time.monotonic()
        try:
            answer = self._client.send(request)
            self._has_answered = True
        except httpx.UnsupportedProtocol:
            host = self.url.partition("://")[2] or self.url or "127.0.0.1:8000"
            raise DataError(
                f"{self.url!r} is not the address of a service: write it as http://{host}, or as "
                f"https://{host} if it requires TLS"
            ) from None
        finally:
            self.attempt_seconds = time.monotonic() - started
        return answer

    def _sleep_unless_stopped(self, seconds: float, problem: str) -> bool:
        """Sleep and return True; return False early if the caller wants no more retries."""
        _LOGGER.warning("%s: %s; retrying in %.1f s", self.url, problem, seconds)
        while seconds > 0 and not self._should_stop():
            time.sleep(min(seconds, _SLEEP_SECONDS_MAX))
            seconds -= _SLEEP_SECONDS_MAX
        return not self._should_stop()


def _advise_after(error: BaseException, url: str) -> str:
    """Return what to do about a service that has never answered, by the error and its causes."""
    causes, rest = [error], url.partition("://")[2]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    if any(isinstance(each, socket.gaierror) for each in causes):
        return f"There is no such host: correct the address {url}"
    if any(isinstance(each, ssl.SSLCertVerificationError) for each in causes):
        return "Let this machine trust its certificate, as with the variable SSL_CERT_FILE"
    if any(isinstance(each, ssl.SSLError) for each in causes):
        return f"It may speak plain HTTP: use http://{rest}"
    is_closed = not isinstance(error, httpx.ConnectError) or any(
        isinstance(each, ConnectionResetError) for each in causes
    )
    if is_closed and url.startswith("http://"):
        return f"It may require TLS: use https://{rest}"
    return _START_IT


def _advise_on(answer: httpx.Response) -> str:
    """Return what to do about an answer that is not the service's, if it shows that."""
    asked = answer.request.url
    if answer.next_request is not None:
        found = answer.next_request.url
        return f". It redirects to {found}: use {found.scheme}://{found.netloc.decode()}"
    if asked.scheme == "http" and answer.status_code == 400 and "HTTPS" in answer.text:
        return f". It requires TLS: use https://{asked.netloc.decode()}"
    return ""


def _describe_failure(answer: httpx.Response, retry_after: float) -> str:
    """Return a failed response's status, its detail and the delay it requests."""
    said = f"it answered {answer.status_code}"
    with suppress(ValueError, KeyError, TypeError):
        said += f": {answer.json()['detail']}"
    return f"{said} (retry after {retry_after:.0f} s)" if retry_after else said


def _read_object(answer: httpx.Response) -> dict[str, Any] | None:
    """Return the JSON object of a response; None if it is not one."""
    try:
        document = answer.json()
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _add_query(path: str, query: Json) -> str:
    """Return a path with the parameters that have a value."""
    given = urlencode({name: value for name, value in query.items() if value != ""}, doseq=True)
    return f"{path}?{given}" if given else path


def _dataset_path(name: str) -> str:
    """Return the URL path of a dataset in the ledger."""
    return f"/v1/datasets/{quote_segment(name)}"


def _reservation_path(identifier: str) -> str:
    """Return the URL path of a reservation."""
    return f"/v1/reservations/{quote_segment(identifier)}"


def _finite_number(answer: Json, name: str) -> float:
    """Return a number field of a response; raise unless it is finite."""
    value = answer.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ServiceConfusedError(f"the answer's {name} is not a finite number: {value!r}")
    return value


def _require(value: float | None, name: str) -> float:
    """Return an argument's value; raise if it was not given.

    Raises:
        DataError: it is missing.
    """
    if value is None:
        raise DataError(f"{name} is required")
    return value


def _without_none(arguments: Json) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _describe_question(mechanism: Json | None, arguments: Json) -> dict[str, Any]:
    """Return the fields of a question about a mechanism, or about the run of these arguments.

    Raises:
        DataError: both were given.
    """
    others = _without_none(arguments)
    names = [name for name in others if name in RunArguments.__annotations__]
    run = {name: others.pop(name) for name in names}
    if run and mechanism is not None:
        raise DataError(f"{next(iter(run))} must be left out if a mechanism is given")
    return {**others, "mechanism": {"kind": "dp_sgd", **run} if mechanism is None else mechanism}


def _require_within_target(answer: Json, target: Json) -> None:
    """Raise if the guarantee or risk at a solution exceeds the target that was solved for.

    Raises:
        ServiceConfusedError: it does, or there is none.
    """
    found = Guarantee.from_json(answer.get("guarantee"))
    limits = {name: target[name] for name in _RISKS if target.get(name) is not None}
    if not limits:
        epsilon, delta = target.get("epsilon", 0.0), target.get("delta", 0.0)
        if found.epsilon > epsilon or found.delta > delta:
            raise ServiceConfusedError(
                f"the solution's guarantee (ε = {found.epsilon}, δ = {found.delta}) is outside the "
                f"budget (ε = {epsilon}, δ = {delta})"
            )
        return
    risk = answer.get("risk")
    upper = _finite_number(risk if isinstance(risk, dict) else {}, "upper")
    if upper > min(limits.values()):
        raise ServiceConfusedError(f"the solution's risk {upper} exceeds the target {limits}")


class RetryTimer:
    """Computes the delay before each retry of one request, and decides when to give up.

    Attributes:
        seconds: time spent on attempts and delays so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._backoff = _BACKOFF_MIN_SECONDS

    def next_delay(self, requested: float, limit: float) -> float | None:
        """Return the delay before the next attempt, or None to give up; count the attempt.

        Jitter keeps clients that failed together from returning together: each waits longer than
        requested, by up to 0.2 s, then up to 0.4 s, and so on up to 10 s.

        Args:
            requested: the service's `Retry-After` in seconds; the delay is at least as long.
            limit: the most seconds to spend on the request.
        """
        left = limit - self.seconds
        if left <= 0 or requested > left:
            return None
        delay = min(requested + self._backoff * _RANDOM.uniform(0.5, 1.0), left)
        self._backoff = min(2 * self._backoff, _BACKOFF_MAX_SECONDS)
        self.seconds += delay
        return delay


def parse_retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a response's `Retry-After` header requests, or 0 without one.

    Args:
        headers: the response's headers. A `Retry-After` date is compared with the response's own
            `Date`, since the clocks of client and service may differ.
    """
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    until = _parse_date(text)
    now = _parse_date(headers.get("Date", "")) or datetime.now(UTC)
    return 0.0 if until is None else max((until - now).total_seconds(), 0.0)


def _parse_date(text: str) -> datetime | None:
    """Parse an HTTP date with a time zone; return None if the text is not one."""
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
