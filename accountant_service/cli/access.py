"""Access to the ledger for commands: through the service with an API key, or in the database.

With `ACCOUNTANT_API_KEY` the commands ask the service at `ACCOUNTANT_SERVICE`, with the rights of
that key. Without a key they open the database of `ACCOUNTANT_DATABASE_URL`: anyone who can open it
has all rights anyway (decision 0015).
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar
from urllib import error as http_errors
from urllib import request as http
from urllib.parse import quote, urlencode, urlsplit

from accountant_service.cli.problems import CommandProblemError, build_problem, run_or_exit

if TYPE_CHECKING:
    from accountant_service.disclosure.facts import Facts
    from accountant_service.ledger.key_record import KeyRecord

KEY_VARIABLE: Final = "ACCOUNTANT_API_KEY"
SERVICE_VARIABLE: Final = "ACCOUNTANT_SERVICE"
DEFAULT_SERVICE: Final = "http://127.0.0.1:8000"
_SECONDS_MAX: Final = 120.0
_COMMAND_LINE: Final = "command-line"  # the key that the ledger records for these commands
Json = dict[str, Any]
Result = TypeVar("Result")


class LedgerAccess(ABC):
    """Interface through which commands call the ledger, with the JSON of the HTTP API.

    Every call raises `CommandProblemError` or an error with a code if it is refused.
    """

    @abstractmethod
    def create_dataset(self, body: Json) -> Json:
        """Create a dataset; return it with examples of how many steps its budget admits."""

    @abstractmethod
    def close_dataset(self, name: str) -> Json:
        """Close a dataset for new reservations; return it."""

    @abstractmethod
    def set_reference(self, name: str, body: Json) -> Json:
        """Choose or confirm the reference of a dataset; return it with what still fits."""

    @abstractmethod
    def quote_reference(self, name: str, body: Json) -> Json:
        """Return what would still fit with a reference, and what fits now; set nothing."""

    @abstractmethod
    def delete_dataset(self, name: str) -> Json:
        """Delete a dataset that was never used; return it as it was."""

    @abstractmethod
    def list_datasets(self) -> list[Json]:
        """Return all datasets that the caller may see."""

    @abstractmethod
    def get_dataset(self, name: str) -> Json:
        """Return a dataset."""

    @abstractmethod
    def quote(self, name: str, body: Json) -> Json:
        """Return how much of a dataset's budget a plan would cost; none of it is spent or held."""

    @abstractmethod
    def create_series(self, name: str, body: Json) -> Json:
        """Create a series from a template, unless it is there; return it."""

    @abstractmethod
    def list_series(self) -> list[Json]:
        """Return all series that the caller may see."""

    @abstractmethod
    def get_series(self, name: str) -> Json:
        """Return a series."""

    @abstractmethod
    def add_to_series(self, name: str, label: str, body: Json) -> Json:
        """Create the dataset of a series with a label, unless it is there; return it."""

    @abstractmethod
    def find_window(self, name: str, count: int) -> Json:
        """Return the last datasets of a series, and what they prove together."""

    @abstractmethod
    def quote_jointly(self, names: Sequence[str], body: Json) -> Json:
        """Return how much one run would cost each of several datasets; charge nothing."""

    @abstractmethod
    def reserve(self, names: Sequence[str], body: Json) -> Json:
        """Reserve budget for a plan on a dataset, or on several; return the reservation."""

    @abstractmethod
    def list_runs(self, name: str) -> list[Json]:
        """Return all reservations of a dataset, sorted: open ones first, latest lease end first."""

    @abstractmethod
    def get_run(self, identifier: str) -> Json:
        """Return a reservation."""

    @abstractmethod
    def change_run(self, identifier: str, action: str, body: Json) -> Json:
        """Grant steps of a reservation, or commit, release or renew it; return the reservation.

        Args:
            identifier: the reservation's.
            action: `grants`, `commit`, `release` or `renew`.
            body: of the request.
        """

    @abstractmethod
    def get_certificate(self, identifier: str) -> Json:
        """Return the certificate of a run that has ended."""

    @abstractmethod
    def get_facts(self, name: str) -> Facts:
        """Return the facts from which a dataset's report is written."""


class ServiceAccess(LedgerAccess):
    """Access to the ledger through the service's HTTP API, with an API key.

    Args:
        service: the address, such as http://127.0.0.1:8000.
        key: the API key.
    """

    def __init__(self, service: str, key: str) -> None:
        if urlsplit(service).scheme not in ("http", "https"):
            raise CommandProblemError(
                build_problem(
                    f"{SERVICE_VARIABLE} must be an address such as {DEFAULT_SERVICE}, "
                    f"not {service!r}"
                )
            )
        self._service, self._key = service.rstrip("/"), key

    def create_dataset(self, body: Json) -> Json:
        """Create a dataset; return it with examples of how many steps its budget admits."""
        return self._call("/v1/datasets", body, is_write=True)

    def close_dataset(self, name: str) -> Json:
        """Close a dataset for new reservations; return it."""
        return self._call(f"/v1/datasets/{quote(name, safe='')}/close", {}, is_write=True)

    def set_reference(self, name: str, body: Json) -> Json:
        """Choose or confirm the reference of a dataset; return it with what still fits."""
        return self._call(f"/v1/datasets/{quote(name, safe='')}/reference", body, is_write=True)

    def quote_reference(self, name: str, body: Json) -> Json:
        """Return what would still fit with a reference, and what fits now; set nothing."""
        return self._call(f"/v1/datasets/{quote(name, safe='')}/reference/quotes", body)

    def delete_dataset(self, name: str) -> Json:
        """Delete a dataset that was never used; return it as it was."""
        path = f"/v1/datasets/{quote(name, safe='')}"
        return self._call(path, is_write=True, method="DELETE")

    def list_datasets(self) -> list[Json]:
        """Return all datasets that the key may see, page by page."""
        return self._read_pages("/v1/datasets")

    def get_dataset(self, name: str) -> Json:
        """Return a dataset."""
        return self._call(f"/v1/datasets/{quote(name, safe='')}")

    def quote(self, name: str, body: Json) -> Json:
        """Return how much of a dataset's budget a plan would cost; none of it is spent or held."""
        return self._call(f"/v1/datasets/{quote(name, safe='')}/quotes", body)

    def create_series(self, name: str, body: Json) -> Json:
        """Create a series from a template, unless it is there; return it."""
        return self._call(f"/v1/series/{quote(name, safe='')}", body, method="PUT")

    def list_series(self) -> list[Json]:
        """Return all series that the key may see, page by page."""
        return self._read_pages("/v1/series")

    def get_series(self, name: str) -> Json:
        """Return a series."""
        return self._call(f"/v1/series/{quote(name, safe='')}")

    def add_to_series(self, name: str, label: str, body: Json) -> Json:
        """Create the dataset of a series with a label, unless it is there; return it."""
        path = f"/v1/series/{quote(name, safe='')}/datasets/{quote(label, safe='')}"
        return self._call(path, body, method="PUT")

    def find_window(self, name: str, count: int) -> Json:
        """Return the last datasets of a series, and what they prove together."""
        return self._call(f"/v1/series/{quote(name, safe='')}/window?last={count}")

    def quote_jointly(self, names: Sequence[str], body: Json) -> Json:
        """Return how much one run would cost each of several datasets; charge nothing."""
        return self._call("/v1/quotes", {"datasets": list(names), **body})

    def reserve(self, names: Sequence[str], body: Json) -> Json:
        """Reserve budget for a plan on a dataset, or on several; return the reservation."""
        return self._call(*_address_reservation(names, body), is_write=True)

    def list_runs(self, name: str) -> list[Json]:
        """Return all reservations of a dataset, page by page."""
        return self._read_pages(f"/v1/datasets/{quote(name, safe='')}/reservations")

    def _read_pages(self, path: str) -> list[Json]:
        """Return the items of all pages of a list; earlier services answer some lists whole."""
        found: list[Json] = []
        cursor: str | None = ""
        while cursor is not None:
            page = self._call(f"{path}?{urlencode({'cursor': cursor})}" if cursor else path)
            found += page["items"]
            cursor = page.get("next_cursor")
        return found

    def get_run(self, identifier: str) -> Json:
        """Return a reservation."""
        return self._call(f"/v1/reservations/{quote(identifier, safe='')}")

    def change_run(self, identifier: str, action: str, body: Json) -> Json:
        """Grant steps of a reservation, or commit, release or renew it; return the reservation."""
        path = f"/v1/reservations/{quote(identifier, safe='')}/{action}"
        return self._call(path, body, is_write=True)

    def get_certificate(self, identifier: str) -> Json:
        """Return the certificate of a run that has ended."""
        return self._call(f"/v1/reservations/{quote(identifier, safe='')}/certificate")

    def get_facts(self, name: str) -> Facts:
        """Return the facts from which a dataset's report is written."""
        from accountant_service.disclosure.facts import Facts

        return Facts.model_validate(self._call(f"/v1/datasets/{quote(name, safe='')}/report"))

    def _call(
        self,
        path: str,
        body: Json | None = None,
        *,
        is_write: bool = False,
        method: str | None = None,
    ) -> Json:
        """Send a request with the key, and return the answer's JSON."""
        headers = {"Authorization": f"Bearer {self._key}", "Accept": "application/json"}
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        if is_write:
            headers["Idempotency-Key"] = uuid.uuid4().hex
        with self._open(http.Request(self._service + path, data, headers, method=method)) as answer:
            found: Json = json.load(answer)
            return found

    def download(self, path: str, output: TextIO) -> None:
        """Write a response's text to a stream, as it arrives."""
        headers = {"Authorization": f"Bearer {self._key}"}
        with self._open(http.Request(self._service + path, None, headers)) as answer:
            for line in answer:
                output.write(line.decode())

    @contextmanager
    def _open(self, request: http.Request) -> Iterator[Any]:
        """Context manager that sends a request and yields the response; raise on failures."""
        try:
            with http.urlopen(request, timeout=_SECONDS_MAX) as answer:
                yield answer
        except http_errors.HTTPError as error:
            raise CommandProblemError(_read_problem(error)) from None
        except (OSError, ValueError, HTTPException) as error:
            raise CommandProblemError(
                build_problem(self._explain(error), code="service-away")
                | {"title": "The service does not answer"}
            ) from None

    def _explain(self, error: Exception) -> str:
        """Return why the service does not answer, and what to do."""
        reason = getattr(error, "reason", error)
        scheme, _, rest = self._service.partition("://")
        if isinstance(reason, socket.gaierror):
            advice = f"There is no such host: correct {SERVICE_VARIABLE}"
        elif isinstance(reason, ssl.SSLCertVerificationError):
            advice = "Let this machine trust its certificate, as with the variable SSL_CERT_FILE"
        elif isinstance(reason, ssl.SSLError):
            advice = f"It may speak plain HTTP: set {SERVICE_VARIABLE} to http://{rest}"
        elif isinstance(reason, HTTPException | ConnectionResetError) and scheme == "http":
            advice = f"It may require TLS: set {SERVICE_VARIABLE} to https://{rest}"
        else:
            advice = f"Start it with `accountant serve`, or set {SERVICE_VARIABLE}"
        return (
            f"the service at {self._service} does not answer ({reason}). {advice}, or unset "
            f"{KEY_VARIABLE} to use the database directly"
        )


def download_entries(query: Mapping[str, list[str]], output: TextIO) -> None:
    """Write the service's export of the ledger's entries to a text stream.

    Args:
        query: the parameters of `GET /v1/entries`.
        output: where to write.

    Raises:
        CommandProblemError: no key is set, or the service refuses or does not answer.
    """
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise CommandProblemError(build_problem(f"set {KEY_VARIABLE} to a key of scope auditor"))
    service = ServiceAccess(os.environ.get(SERVICE_VARIABLE) or DEFAULT_SERVICE, key)
    service.download(f"/v1/entries?{urlencode(query, doseq=True)}", output)


def _read_problem(error: http_errors.HTTPError) -> Json:
    """Return the error answer (problem document) to a refused request."""
    try:
        found: Json = json.load(error)
        if {"title", "detail", "code"} <= found.keys():
            return found
    except (ValueError, AttributeError):
        pass
    detail = f"the answer is {error.code} {error.reason}, and not of the accounting service"
    return build_problem(detail, code="http-error")


def command_line_key() -> KeyRecord:
    """Return the key that the ledger records for commands, with all rights on datasets."""
    from accountant_service.ledger.key_record import KeyRecord

    scopes = frozenset({"owner", "run"})
    return KeyRecord(_COMMAND_LINE, _COMMAND_LINE, b"", scopes, None, None, 0)


class DatabaseAccess(LedgerAccess):
    """Access to the ledger directly in its database, with all rights."""

    def __init__(self, repository: Any) -> None:
        from accountant_service.api.ledger_views import ANSWERS
        from accountant_service.ledger.series_catalog import SeriesCatalog
        from accountant_service.ledger.service import Ledger

        self._repository = repository
        self._ledger, self._series = Ledger(repository, ANSWERS), SeriesCatalog(repository)
        self._key = command_line_key()

    def _write(self, call: str, body: Json | None) -> Any:
        """Build a write request to the ledger, with a new Idempotency-Key."""
        from accountant_service.ledger.service import WriteRequest

        return WriteRequest(self._key, uuid.uuid4().hex, call, body)

    def create_dataset(self, body: Json) -> Json:
        """Create a dataset; return it with examples of how many steps its budget admits."""
        from accountant_service.api.ledger_schemas import DatasetRequest

        new = DatasetRequest.model_validate(body).to_new_dataset()
        return _read(self._ledger.create_dataset(self._write("POST /v1/datasets", body), new))

    def close_dataset(self, name: str) -> Json:
        """Close a dataset for new reservations; return it."""
        write = self._write(f"POST /v1/datasets/{name}/close", {})
        return _read(self._ledger.close_dataset(write, name))

    def set_reference(self, name: str, body: Json) -> Json:
        """Choose or confirm the reference of a dataset; return it with what still fits."""
        from accountant_service import mechanisms

        write = self._write(f"POST /v1/datasets/{name}/reference", body)
        mechanism = mechanisms.from_json(body["mechanism"])
        return _read(self._ledger.set_reference(write, name, mechanism))

    def quote_reference(self, name: str, body: Json) -> Json:
        """Return what would still fit with a reference, and what fits now; set nothing."""
        from accountant_service import mechanisms
        from accountant_service.api.ledger_views import reference_quote_view

        mechanism = mechanisms.from_json(body["mechanism"])
        return reference_quote_view(self._ledger.quote_reference(self._key, name, mechanism))

    def delete_dataset(self, name: str) -> Json:
        """Delete a dataset that was never used; return it as it was."""
        write = self._write(f"DELETE /v1/datasets/{name}", None)
        return _read(self._ledger.delete_dataset(write, name))

    def list_datasets(self) -> list[Json]:
        """Return all datasets."""
        from accountant_service.api.ledger_views import dataset_view

        return [dataset_view(each) for each in self._ledger.list_datasets(self._key)]

    def get_dataset(self, name: str) -> Json:
        """Return a dataset."""
        from accountant_service.api.ledger_views import dataset_view

        return dataset_view(self._ledger.get_dataset(self._key, name))

    def quote(self, name: str, body: Json) -> Json:
        """Return how much of a dataset's budget a plan would cost; none of it is spent or held."""
        from accountant_service import mechanisms
        from accountant_service.api.ledger_views import quote_view
        from accountant_service.ledger.plans import quote_plan

        dataset = self._ledger.get_dataset(self._key, name)
        return quote_view(quote_plan(dataset, mechanisms.from_json(body["mechanism"])))

    def create_series(self, name: str, body: Json) -> Json:
        """Create a series from a template, unless it is there; return it."""
        from accountant_service.api.ledger_schemas import SeriesRequest
        from accountant_service.api.ledger_views import series_view
        from accountant_service.ledger.plans import choose_policy

        template = SeriesRequest.model_validate(body).to_template()
        choose_policy(template.example)
        return series_view(self._series.create(self._key, name, template)[0])

    def list_series(self) -> list[Json]:
        """Return all series."""
        from accountant_service.api.ledger_views import series_view

        return [series_view(each) for each in self._series.list_series(self._key)]

    def get_series(self, name: str) -> Json:
        """Return a series."""
        from accountant_service.api.ledger_views import series_view

        return series_view(self._series.get(self._key, name))

    def add_to_series(self, name: str, label: str, body: Json) -> Json:
        """Create the dataset of a series with a label, unless it is there; return it."""
        from accountant_service.api.ledger_schemas import SeriesDatasetRequest
        from accountant_service.api.ledger_views import dataset_view, preview_view
        from accountant_service.ledger import plans

        size = SeriesDatasetRequest.model_validate(body).size
        template = self._series.get(self._key, name).series.template
        policy = plans.choose_policy(template.example)
        dataset, is_new = self._series.add_dataset(self._key, name, label, size, policy)
        preview = plans.preview_budget(policy, template.planned_mechanism)
        told = preview_view(plans.warn_of_size(preview, size, template.delta)) if is_new else {}
        return dataset_view(dataset) | told

    def find_window(self, name: str, count: int) -> Json:
        """Return the last datasets of a series, and what they prove together."""
        from accountant_service.api.ledger_views import window_view

        names = self._series.find_window(self._key, name, count)
        return window_view(name, [self.get_dataset(each) for each in names])

    def quote_jointly(self, names: Sequence[str], body: Json) -> Json:
        """Return how much one run would cost each of several datasets; charge nothing."""
        from accountant_service import mechanisms
        from accountant_service.api.ledger_views import joint_quote_view
        from accountant_service.ledger.plans import Quote, quote_plan, state_of

        mechanism = mechanisms.from_json(body["mechanism"])
        datasets = self._ledger.find_datasets(self._key, names, is_joint=True)
        records = sum(dataset.size for dataset in datasets)
        known: dict[Hashable, Quote] = {}
        for each in datasets:
            if state_of(each) not in known:
                known[state_of(each)] = quote_plan(each, mechanism, records=records)
        return joint_quote_view([(each, known[state_of(each)]) for each in datasets])

    def reserve(self, names: Sequence[str], body: Json) -> Json:
        """Reserve budget for a plan on a dataset, or on several; return the reservation."""
        from accountant_service.api.ledger_schemas import ReservationRequest

        plan = ReservationRequest.model_validate(body)
        path, sent = _address_reservation(names, body)
        asked = plan.mechanism, plan.lease_seconds, plan.purpose
        write = self._write(f"POST {path}", sent)
        if len(names) == 1:
            return _read(self._ledger.reserve(write, names[0], *asked))
        return _read(self._ledger.reserve_jointly(write, names, *asked))

    def list_runs(self, name: str) -> list[Json]:
        """Return all reservations of a dataset."""
        from accountant_service.api.ledger_views import reservation_view

        self._ledger.get_dataset(self._key, name)  # expires ended leases
        dataset, runs, _ = self._ledger.read_runs(self._key, name)
        return [reservation_view(dataset, run) for run in runs]

    def get_run(self, identifier: str) -> Json:
        """Return a reservation."""
        from accountant_service.api.ledger_views import run_view

        return run_view(self._ledger.get_run(self._key, identifier))

    def change_run(self, identifier: str, action: str, body: Json) -> Json:
        """Grant steps of a reservation, or commit, release or renew it; return the reservation."""
        from accountant_service.api import ledger_schemas as bodies

        ledger = self._ledger
        write = self._write(f"POST /v1/reservations/{identifier}/{action}", body)
        match action:
            case "grants":
                asked = bodies.GrantRequest.model_validate(body)
                return _read(ledger.grant(write, identifier, asked.steps, asked.sequence))
            case "commit":
                stated = bodies.CommitRequest.model_validate(body).to_declaration()
                return _read(ledger.commit(write, identifier, stated))
            case "release":
                return _read(ledger.release(write, identifier))
            case _:
                lease = bodies.RenewRequest.model_validate(body).lease_seconds
                return _read(ledger.renew(write, identifier, lease))

    def get_certificate(self, identifier: str) -> Json:
        """Return the certificate of a run that has ended."""
        return self._ledger.issue_certificate(self._key, identifier)

    def get_facts(self, name: str) -> Facts:
        """Return the facts from which a dataset's report is written."""
        from accountant_service.disclosure.facts import RUNS_MAX, facts_of_dataset
        from accountant_service.ledger.repository import now

        self._ledger.get_dataset(self._key, name)  # expires ended leases
        return facts_of_dataset(*self._ledger.read_runs(self._key, name, RUNS_MAX), now())


def _address_reservation(names: Sequence[str], body: Json) -> tuple[str, Json]:
    """Return the path and the body of the request that reserves budget of these datasets."""
    if len(names) == 1:
        return f"/v1/datasets/{quote(names[0], safe='')}/reservations", body
    return "/v1/reservations", {"datasets": list(names), **body}


def _read(answer: Any) -> Json:
    """Parse the JSON of the ledger's answer to a write."""
    found: Json = json.loads(answer.text)
    return found


@contextmanager
def open_ledger(*, create: bool = False) -> Iterator[LedgerAccess]:
    """Context manager that opens the ledger: the service if a key is set, else the database.

    Args:
        create: whether to create a ledger in the database if there is none.

    Raises:
        CommandProblemError: the address of the service is not valid.
        LedgerError: a newer version of this program made the database, or the ledger was moved to
            another one.
    """
    key = os.environ.get(KEY_VARIABLE)
    if key:
        yield ServiceAccess(os.environ.get(SERVICE_VARIABLE) or DEFAULT_SERVICE, key)
        return
    from accountant_service.cli.opening import open_configured
    from accountant_service.ledger.database import DatabaseRefusedError
    from accountant_service.ledger.errors import LedgerError

    try:
        with open_configured(create=create) as repository:
            yield DatabaseAccess(repository)
    except DatabaseRefusedError as error:
        raise LedgerError(str(error)) from None


def call_ledger(
    action: Callable[[LedgerAccess], Result],
    options: Mapping[str, str],
    *,
    as_json: bool,
    create: bool = False,
) -> Result:
    """Return the result of a call to the ledger; if it is refused, print why and exit.

    Args:
        action: it may raise `CommandProblemError` or any error with a code.
        options: the option or argument that sets the value at each JSON pointer.
        as_json: whether to print a problem as JSON.
        create: whether to create a ledger in the database if there is none.
    """

    def run() -> Result:
        """Open the ledger, and make the call."""
        with open_ledger(create=create) as ledger:
            return action(ledger)

    return run_or_exit(run, options, as_json=as_json)
