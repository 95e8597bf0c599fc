"""Calls of the service, one for each route that no method is written for.

`python -m scripts.question_functions --write` writes this module from the routes of the service:
change a route in `api/ledger_routes.py` or `api/routes.py`, or its body in the schemas there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from training_client.client.urls import quote_segment

Json = Mapping[str, Any]


def _present(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that were given."""
    return {name: value for name, value in arguments.items() if value is not None}


class RouteCalls(ABC):
    """Calls of the service's routes, which answer with the JSON of the HTTP API.

    An argument that is None is left out of the request, unless it is required.
    """

    @abstractmethod
    def _call(self, method: str, path: str, body: Json | None = None) -> dict[str, Any]:
        """Send a request that may be repeated; return the answer."""

    @abstractmethod
    def _call_once(self, method: str, path: str, body: Json | None = None) -> dict[str, Any]:
        """Send a request that must not be repeated; return the answer."""

    @abstractmethod
    def _call_with_key(
        self, method: str, path: str, body: Json | None, idempotency_key: str | None
    ) -> dict[str, Any]:
        """Send a write that takes effect once, however often it is sent; return the answer."""

    @abstractmethod
    def _list(self, path: str, query: Json) -> Iterator[dict[str, Any]]:
        """Yield the items of a list, page by page."""

    @abstractmethod
    def _download(self, path: str, query: Json) -> bytes:
        """Return the body of an answer in the requested format."""

    def trade_off(
        self,
        mechanism: Json,
        *,
        neighbouring_relation: str | None = None,
        prior: float | None = None,
        points: int | None = None,
        false_positive_rates: Sequence[float] | None = None,
    ) -> dict[str, Any]:
        """Compute the trade-off curve of the best membership attacker.

        Args:
            mechanism: mechanism.
            neighbouring_relation: the neighbouring relation.
            prior: probability that a record in question was used.
            points: number of false-positive rates, from 0 to 1.
            false_positive_rates: the rates to answer for, instead of `points` rates from 0 to 1.
        """
        return self._call(
            "POST",
            "/v1/trade-off",
            {
                "mechanism": mechanism,
                **_present(
                    neighbouring_relation=neighbouring_relation,
                    prior=prior,
                    points=points,
                    false_positive_rates=false_positive_rates,
                ),
            },
        )

    def batch(
        self,
        requests: Sequence[Json],
    ) -> dict[str, Any]:
        """Answer up to 1 000 requests in order, each with its own answer or problem.

        Args:
            requests: the questions, each with its path.
        """
        return self._call("POST", "/v1/batch", {"requests": requests})

    def methods(self) -> dict[str, Any]:
        """List the accounting methods: title, source, what each needs and what it proves."""
        return self._call("GET", "/v1/methods")

    def create_dataset(
        self,
        name: str,
        budget: Json,
        size: int,
        *,
        neighbouring_relation: str | None = None,
        privacy_unit: str | None = None,
        planned_mechanism: Json | None = None,
        filter: str | None = None,  # noqa: A002 - the API's name
        accept_weak: bool | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """Create a dataset with a privacy budget. The budget cannot be changed.

        The answer says how many steps of ordinary runs the budget admits, and warns if that is
        none.

        Args:
            name: name of the dataset, which must be new.
            budget: ε and δ for all runs that ever use it.
            size: number of records.
            neighbouring_relation: in what two datasets differ that must look alike.
            privacy_unit: what one record stands for. The budget and all amounts hold for one
                record, even if runs are described for several records of a person (`user_level`).
            planned_mechanism: mechanism you plan to run: with the filter `reference` its step
                becomes the unit of the budget; with `renyi` the order is chosen for it.
            filter: how releases are charged: `reference`: reference steps: the most runs of one
                kind, and queries before them; `renyi`: Rényi divergence: for runs of many kinds;
                `either`: either of these two, each with half of δ: for runs that you cannot
                foresee; `addition`: addition of ε and δ: for queries.
            accept_weak: must be true for ε above 20, or δ not below one over `size`: such a budget
                protects hardly anyone.
            idempotency_key: a write with the key of an earlier one is a repeat of it; random by
                default.
        """
        return self._call_with_key(
            "POST",
            "/v1/datasets",
            {
                "name": name,
                "budget": budget,
                "size": size,
                **_present(
                    neighbouring_relation=neighbouring_relation,
                    privacy_unit=privacy_unit,
                    planned_mechanism=planned_mechanism,
                    filter=filter,
                    accept_weak=accept_weak,
                ),
            },
            idempotency_key,
        )

    def list_datasets(self) -> Iterator[dict[str, Any]]:
        """List the datasets that this key may see page by page, sorted by name."""
        return self._list("/v1/datasets", {})

    def dataset(
        self,
        name: str,
    ) -> dict[str, Any]:
        """Get a dataset: its budget, and what is spent, held and remaining.

        Args:
            name: name of the dataset.
        """
        return self._call("GET", f"/v1/datasets/{quote_segment(name)}")

    def delete_dataset(
        self,
        name: str,
        *,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """Delete a dataset that was never used: its only entry is its creation.

        An audit event records who did, and the hash of that entry. The name may be used again.
        Anyone who may create a budget may delete it.

        Args:
            name: name of the dataset.
            idempotency_key: a write with the key of an earlier one is a repeat of it; random by
                default.
        """
        return self._call_with_key(
            "DELETE", f"/v1/datasets/{quote_segment(name)}", None, idempotency_key
        )

    def close_dataset(
        self,
        name: str,
        *,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """Close a dataset for good: it takes no further reservation.

        Open runs may go on to their end.

        Anyone who may create a budget may close it. A repeat changes nothing.

        Args:
            name: name of the dataset.
            idempotency_key: a write with the key of an earlier one is a repeat of it; random by
                default.
        """
        return self._call_with_key(
            "POST", f"/v1/datasets/{quote_segment(name)}/close", {}, idempotency_key
        )

    def set_reference(
        self,
        name: str,
        mechanism: Json,
        *,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """Choose or confirm the reference in whose steps the rest of the budget is counted.

        The key needs scope `owner`. No run replaces the reference afterwards. Once steps of a
        reference are spent or held, it can only be confirmed.

        Args:
            name: name of the dataset.
            mechanism: mechanism.
            idempotency_key: a write with the key of an earlier one is a repeat of it; random by
                default.
        """
        return self._call_with_key(
            "POST",
            f"/v1/datasets/{quote_segment(name)}/reference",
            {"mechanism": mechanism},
            idempotency_key,
        )

    def quote_reference(
        self,
        name: str,
        mechanism: Json,
    ) -> dict[str, Any]:
        """Tell what would still fit with a reference, and what fits now. Sets nothing.

        Args:
            name: name of the dataset.
            mechanism: mechanism.
        """
        return self._call(
            "POST", f"/v1/datasets/{quote_segment(name)}/reference/quotes", {"mechanism": mechanism}
        )

    def dataset_report(
        self,
        name: str,
        *,
        format: str | None = None,  # noqa: A002 - the API's name
        tier: int | None = None,
    ) -> bytes:
        """Get the report of a dataset: what is promised to its people, and what attackers achieve.

        Args:
            name: name of the dataset.
            format: `json` has all facts; `registry` is the YAML record of the OpenDP deployments
                registry, `model-card` and `nist` are Markdown.
            tier: how detailed the record for the deployments registry is, from 1 to 3; other
                formats ignore it.
        """
        return self._download(
            f"/v1/datasets/{quote_segment(name)}/report", _present(format=format, tier=tier)
        )

    def quotes(
        self,
        name: str,
        mechanisms: Sequence[Json],
    ) -> dict[str, Any]:
        """Quote several plans, each alone and all together. Charges nothing.

        Args:
            name: name of the dataset.
            mechanisms: plans, each of which is quoted alone.
        """
        return self._call(
            "POST", f"/v1/datasets/{quote_segment(name)}/quotes/batch", {"mechanisms": mechanisms}
        )

    def running_total(
        self,
        name: str,
    ) -> dict[str, Any]:
        """Get the ε of all granted steps, accounted as one plan.

        It is an estimate, not a guarantee.

        Args:
            name: name of the dataset.
        """
        return self._call("GET", f"/v1/datasets/{quote_segment(name)}/running-total")

    def list_reservations(
        self,
        name: str,
    ) -> Iterator[dict[str, Any]]:
        """List the reservations of a dataset page by page: open ones first, then the latest lease.

        Args:
            name: name of the dataset.
        """
        return self._list(f"/v1/datasets/{quote_segment(name)}/reservations", {})

    def run_report(
        self,
        identifier: str,
        *,
        format: str | None = None,  # noqa: A002 - the API's name
        tier: int | None = None,
    ) -> bytes:
        """Get the report of a run that has ended, written from its certificate.

        Args:
            identifier: identifier of the reservation.
            format: `json` has all facts; `registry` is the YAML record of the OpenDP deployments
                registry, `model-card` and `nist` are Markdown.
            tier: how detailed the record for the deployments registry is, from 1 to 3; other
                formats ignore it.
        """
        return self._download(
            f"/v1/reservations/{quote_segment(identifier)}/report",
            _present(format=format, tier=tier),
        )

    def list_entries(
        self,
        name: str,
    ) -> Iterator[dict[str, Any]]:
        """List the ledger's entries for a dataset, page by page.

        Args:
            name: name of the dataset.
        """
        return self._list(f"/v1/datasets/{quote_segment(name)}/entries", {})

    def list_caps(
        self,
        name: str,
    ) -> Iterator[dict[str, Any]]:
        """List the caps of a dataset page by page, with what each holder has taken.

        Args:
            name: name of the dataset.
        """
        return self._list(f"/v1/datasets/{quote_segment(name)}/caps", {})

    def set_team_cap(
        self,
        name: str,
        team: str,
        share: float,
    ) -> dict[str, Any]:
        """Limit what the keys of a team may take together. Replaces the team's earlier cap.

        Args:
            name: name of the dataset.
            team: name of the team.
            share: share of the budget, from 0 to 1.
        """
        return self._call(
            "PUT",
            f"/v1/datasets/{quote_segment(name)}/caps/teams/{quote_segment(team)}",
            {"share": share},
        )

    def remove_team_cap(
        self,
        name: str,
        team: str,
    ) -> None:
        """Remove the cap of a team.

        Args:
            name: name of the dataset.
            team: name of the team.
        """
        self._call("DELETE", f"/v1/datasets/{quote_segment(name)}/caps/teams/{quote_segment(team)}")

    def set_key_cap(
        self,
        name: str,
        key_id: str,
        share: float,
    ) -> dict[str, Any]:
        """Limit what an API key may take. Replaces the key's earlier cap.

        Args:
            name: name of the dataset.
            key_id: identifier of the API key.
            share: share of the budget, from 0 to 1.
        """
        return self._call(
            "PUT",
            f"/v1/datasets/{quote_segment(name)}/caps/keys/{quote_segment(key_id)}",
            {"share": share},
        )

    def remove_key_cap(
        self,
        name: str,
        key_id: str,
    ) -> None:
        """Remove the cap of an API key.

        Args:
            name: name of the dataset.
            key_id: identifier of the API key.
        """
        self._call(
            "DELETE", f"/v1/datasets/{quote_segment(name)}/caps/keys/{quote_segment(key_id)}"
        )

    def create_series(
        self,
        series: str,
        budget: Json,
        *,
        neighbouring_relation: str | None = None,
        privacy_unit: str | None = None,
        planned_mechanism: Json | None = None,
        filter: str | None = None,  # noqa: A002 - the API's name
        accept_weak: bool | None = None,
    ) -> dict[str, Any]:
        """Create a series of datasets from a template, which cannot be changed.

        A repeat changes nothing. A key that names the series among its `datasets` may use all of
        its datasets, also later ones.

        Args:
            series: name of the series.
            budget: ε and δ for all runs that ever use it.
            neighbouring_relation: in what two datasets differ that must look alike.
            privacy_unit: what one record stands for. The budget and all amounts hold for one
                record, even if runs are described for several records of a person (`user_level`).
            planned_mechanism: mechanism you plan to run: with the filter `reference` its step
                becomes the unit of the budget; with `renyi` the order is chosen for it.
            filter: how releases are charged: `reference`: reference steps: the most runs of one
                kind, and queries before them; `renyi`: Rényi divergence: for runs of many kinds;
                `either`: either of these two, each with half of δ: for runs that you cannot
                foresee; `addition`: addition of ε and δ: for queries.
            accept_weak: must be true for ε above 20, or δ not below one over `size`: such a budget
                protects hardly anyone.
        """
        return self._call(
            "PUT",
            f"/v1/series/{quote_segment(series)}",
            {
                "budget": budget,
                **_present(
                    neighbouring_relation=neighbouring_relation,
                    privacy_unit=privacy_unit,
                    planned_mechanism=planned_mechanism,
                    filter=filter,
                    accept_weak=accept_weak,
                ),
            },
        )

    def get_series(
        self,
        series: str,
    ) -> dict[str, Any]:
        """Get a series: its template, the number of its datasets, and its caps.

        Args:
            series: name of the series.
        """
        return self._call("GET", f"/v1/series/{quote_segment(series)}")

    def list_series(self) -> Iterator[dict[str, Any]]:
        """List the series that this key may see page by page, sorted by name."""
        return self._list("/v1/series", {})

    def add_to_series(
        self,
        series: str,
        label: str,
        size: int,
    ) -> dict[str, Any]:
        """Create the dataset NAME-LABEL of a series, with the budget and the caps of the series.

        A repeat with the same size changes nothing. All labels of a series have the same length;
        the datasets are in the order of their labels as texts. It needs scope `owner`; the key may
        be bound to the series.

        Args:
            series: name of the series.
            label: label of the dataset within its series.
            size: number of records.
        """
        return self._call(
            "PUT",
            f"/v1/series/{quote_segment(series)}/datasets/{quote_segment(label)}",
            {"size": size},
        )

    def quote_window(
        self,
        series: str,
        last: int,
        mechanism: Json,
    ) -> dict[str, Any]:
        """Quote one run on the last datasets of a series: what it takes of each. Charges nothing.

        Args:
            series: name of the series.
            last: how many datasets.
            mechanism: mechanism.
        """
        return self._call(
            "POST",
            f"/v1/series/{quote_segment(series)}/quotes",
            {"last": last, "mechanism": mechanism},
        )

    def quote_jointly(
        self,
        datasets: Sequence[str],
        mechanism: Json,
    ) -> dict[str, Any]:
        """Quote one run on several datasets: what it takes of each, what fits all.

        Charges nothing.

        Args:
            datasets: names; each is charged the whole plan, or none is. The mechanism's
                `dataset_size`, if it has one, is the number of records of all of them.
            mechanism: mechanism.
        """
        return self._call("POST", "/v1/quotes", {"datasets": datasets, "mechanism": mechanism})

    def set_series_team_cap(
        self,
        series: str,
        team: str,
        share: float,
    ) -> dict[str, Any]:
        """Limit what a team may take of each dataset of a series, also of later ones.

        Args:
            series: name of the series.
            team: name of the team.
            share: share of the budget, from 0 to 1.
        """
        return self._call(
            "PUT",
            f"/v1/series/{quote_segment(series)}/caps/teams/{quote_segment(team)}",
            {"share": share},
        )

    def remove_series_team_cap(
        self,
        series: str,
        team: str,
    ) -> None:
        """Remove the cap of a team from a series and from all of its datasets.

        Args:
            series: name of the series.
            team: name of the team.
        """
        self._call("DELETE", f"/v1/series/{quote_segment(series)}/caps/teams/{quote_segment(team)}")

    def set_series_key_cap(
        self,
        series: str,
        key_id: str,
        share: float,
    ) -> dict[str, Any]:
        """Limit what an API key may take of each dataset of a series, also of later ones.

        Args:
            series: name of the series.
            key_id: identifier of the API key.
            share: share of the budget, from 0 to 1.
        """
        return self._call(
            "PUT",
            f"/v1/series/{quote_segment(series)}/caps/keys/{quote_segment(key_id)}",
            {"share": share},
        )

    def remove_series_key_cap(
        self,
        series: str,
        key_id: str,
    ) -> None:
        """Remove the cap of an API key from a series and from all of its datasets.

        Args:
            series: name of the series.
            key_id: identifier of the API key.
        """
        self._call(
            "DELETE", f"/v1/series/{quote_segment(series)}/caps/keys/{quote_segment(key_id)}"
        )

    def create_key(
        self,
        scopes: Sequence[str],
        *,
        name: str | None = None,
        datasets: Sequence[str] | None = None,
        team: str | None = None,
        expires_in_seconds: float | None = None,
        requests_per_minute: int | None = None,
    ) -> dict[str, Any]:
        """Create an API key. Its secret is shown only once.

        Args:
            scopes: what the key may do.
            name: who or what uses the key.
            datasets: names of the only datasets it is for.
            team: team whose runs and caps the key shares; it cannot be changed.
            expires_in_seconds: seconds until the key expires; without it, it never does.
            requests_per_minute: quota of the key over all servers of the database: so many requests
                at once, and then at an even rate; null for no quota.
        """
        return self._call_once(
            "POST",
            "/v1/keys",
            {
                "scopes": scopes,
                **_present(
                    name=name,
                    datasets=datasets,
                    team=team,
                    expires_in_seconds=expires_in_seconds,
                    requests_per_minute=requests_per_minute,
                ),
            },
        )

    def list_keys(self) -> Iterator[dict[str, Any]]:
        """List the API keys page by page, the oldest first, without their secrets."""
        return self._list("/v1/keys", {})

    def change_key(
        self,
        identifier: str,
        requests_per_minute: int | None,
    ) -> dict[str, Any]:
        """Set or remove the quota of an API key. It counts from now on.

        Args:
            identifier: identifier of the API key.
            requests_per_minute: quota of the key over all servers of the database: so many requests
                at once, and then at an even rate; null for no quota.
        """
        return self._call(
            "PATCH",
            f"/v1/keys/{quote_segment(identifier)}",
            {"requests_per_minute": requests_per_minute},
        )

    def revoke_key(
        self,
        identifier: str,
    ) -> dict[str, Any]:
        """Revoke an API key.

        Args:
            identifier: identifier of the API key.
        """
        return self._call("DELETE", f"/v1/keys/{quote_segment(identifier)}")

    def export_entries(
        self,
        *,
        dataset: Sequence[str] | None = None,
        kind: Sequence[str] | None = None,
        since: str | None = None,
        until: str | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Export the entries of all datasets, by dataset and number, each with its hash.

        It needs a key with scope `auditor` or `admin`; one that is bound to datasets gets these
        only. `accountant ledger verify --file FILE` verifies the JSON lines offline.

        Args:
            dataset: name of a dataset; repeatable.
            kind: repeatable.
            since: earliest time, such as 2026-01-31T00:00:00Z.
            until: time before which all items are.
        """
        return self._list(
            "/v1/entries", _present(dataset=dataset, kind=kind, since=since, until=until)
        )

    def export_events(
        self,
        *,
        action: Sequence[str] | None = None,
        since: str | None = None,
        until: str | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Export the audit events, the oldest first: who managed keys, datasets and caps.

        It needs a key with scope `auditor` or `admin` that is not bound to datasets. Audit events
        are not part of a hash chain.

        Args:
            action: such as key-created, dataset-closed; repeatable.
            since: earliest time, such as 2026-01-31T00:00:00Z.
            until: time before which all items are.
        """
        return self._list("/v1/events", _present(action=action, since=since, until=until))
