"""The accounting service, typed: questions out, dataclasses back, every failure an exception."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import httpx

from training_client.errors import (
    ServiceConfusedError,
    ServiceRefusedError,
    ServiceUnreachableError,
)

_RETRIED: Final = frozenset({429, 500, 502, 503, 504})

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


class AccountingService:
    """A connection to the service. Use as a context manager.

    Args:
        url: where it listens, such as http://127.0.0.1:8000.
        timeout_seconds: for one attempt.
        attempts: how often to try before giving up, with growing pauses (0.2 s, 0.4 s, …).
        transport: for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 30.0,
        attempts: int = 5,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url
        self._attempts = attempts
        self._client = httpx.Client(base_url=url, timeout=timeout_seconds, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def epsilon(self, mechanism: Json, delta: float, method: str = "pld") -> Guarantee:
        """The guarantee of a mechanism at δ."""
        body = {"mechanism": mechanism, "delta": delta, "method": method}
        return Guarantee.from_json(self._ask("/v1/epsilon", body))

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

    def _ask(self, path: str, body: Json) -> dict[str, Any]:
        answer = self._post(path, body)
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

    def _post(self, path: str, body: Json) -> httpx.Response:
        """The answer, after as many attempts as allowed; computations are safe to repeat."""
        problem = ""
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(0.2 * 2 ** (attempt - 1))
            try:
                answer = self._client.post(path, json=body)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code not in _RETRIED:
                return answer
            problem = f"it answered {answer.status_code}"
        raise ServiceUnreachableError(
            f"no answer from {self.url} after {self._attempts} attempts ({problem}); nothing is "
            "trained without one. Is the service running? Start it with `accountant serve`"
        )


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
