"""All settings of the service, read from the environment."""

from __future__ import annotations

import os
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from sqlalchemy import make_url

from accountant_service.ledger.quotas import OPEN_RUNS_MAX, UNSPENT_RUNS_MAX

_PREFIX = "ACCOUNTANT_"


def _validate_networks(text: str) -> str:
    """Check a comma-separated list of IP addresses and networks; return it without spaces."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        for part in parts:
            ip_network(part)
    except ValueError:
        raise ValueError(
            "must be IP addresses or networks, such as 10.0.0.2 or 10.0.0.0/8; comma-separated"
        ) from None
    return ",".join(parts)


def _validate_shares(text: str) -> str:
    """Check a comma-separated list of budget shares in (0, 1]; return it unchanged."""
    try:
        shares = parse_shares(text)
    except ValueError:
        shares = (0.0,)
    if not all(0 < share <= 1 for share in shares):
        raise ValueError("must be shares above 0 and up to 1, such as 0.5,0.8; comma-separated")
    return text


def _validate_address(text: str) -> str:
    """Check the address of a web page; return it unchanged."""
    if text and not text.startswith(("https://", "http://")):
        raise ValueError("must be an address that begins with https:// or http://")
    return text


def parse_shares(text: str) -> tuple[float, ...]:
    """Return the budget shares in a comma-separated list, ascending."""
    return tuple(sorted({float(part) for part in text.split(",") if part.strip()}))


class Settings(BaseSettings):
    """Settings from variables with the prefix `ACCOUNTANT_`, such as `ACCOUNTANT_CACHE_ENTRIES`.

    A variable with `_FILE` after its name holds the path of a file with the value.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, extra="ignore", populate_by_name=True, hide_input_in_errors=True
    )

    database_url: str = Field(
        default="sqlite:///accountant.db", description="URL of the ledger's database", repr=False
    )
    database_password: SecretStr | None = Field(
        default=None, description="password of the database; inserted into its URL"
    )
    open_computation: bool = Field(default=True, description="whether computations need no API key")
    cache_entries: int = Field(default=4096, ge=0, description="cached answers of each worker")
    cache_bytes_max: int = Field(
        default=64 << 20, ge=0, description="bytes of the cached answers of each worker"
    )
    workers: int = Field(default=1, ge=1, le=64, description="number of worker processes")
    computation_processes: int = Field(
        default_factory=lambda: os.cpu_count() or 1,
        ge=1,
        description="computations that each worker runs at the same time, each in its own process; "
        "by default one per core",
    )
    computation_seconds_max: float = Field(
        default=10.0, gt=0, description="CPU seconds allowed for one computation"
    )
    waiting_max: int = Field(
        default=256,
        ge=2,
        description="requests that may wait for a process; one address or key may have half of "
        "these places, and further requests get 503. The ledger's calculations have as many places "
        "of their own",
    )
    batch_bytes_max: int = Field(
        default=2 << 20, ge=1, description="bytes of the answer to one batch request"
    )
    unread_seconds_max: float = Field(
        default=20.0,
        gt=0,
        description="seconds that an answer may stay unread before the connection is closed",
    )
    head_bytes_max: int = Field(
        default=32 << 10,
        ge=8192,
        description="bytes of the largest request head: the request line and the headers",
    )
    head_seconds_max: float = Field(
        default=10.0,
        gt=0,
        description="seconds that a connection without a request in progress may take to send a "
        "complete head",
    )
    connections_per_address_max: int = Field(
        default=256,
        ge=1,
        description="connections of one address, or of one /64 network of IPv6, to each worker; "
        "for a further one the oldest that has no request in progress is closed",
    )
    body_bytes_max: int = Field(
        default=1 << 20, ge=1024, description="bytes of the largest request body"
    )
    body_seconds_max: float = Field(
        default=30.0, gt=0, description="seconds that a request body may take to arrive"
    )
    rate_limit: float = Field(
        default=0.0,
        ge=0,
        description="requests per second from one key or address to each worker; 0 for no limit",
    )
    keyless_rate: float = Field(
        default=50.0,
        ge=0,
        description="requests per second that one address without a valid key begins at each "
        "worker, 10 of them at once; 256 more wait; 0 for no limit",
    )
    rate_burst: int = Field(
        default=100, ge=1, description="requests of one key or address that may come at once"
    )
    trusted_proxies: Annotated[str, AfterValidator(_validate_networks)] = Field(
        default="",
        description="addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto "
        "are trusted; comma-separated",
    )
    open_runs_max: int = Field(
        default=OPEN_RUNS_MAX,
        ge=1,
        description="open runs that one key may have of one dataset",
    )
    unspent_runs_max: int = Field(
        default=UNSPENT_RUNS_MAX,
        ge=1,
        description="runs of one key and dataset that spent nothing and whose lease ended within "
        "the last day, or has not ended",
    )
    idempotency_days: int = Field(
        default=30,
        ge=30,
        le=36500,
        description="days during which a repeated write gets its first answer; at least 30, "
        "which is the longest lease",
    )
    budget_shares: Annotated[str, AfterValidator(_validate_shares)] = Field(
        default="0.5,0.8,0.95",
        description="comma-separated shares of a budget; `/metrics` shows which are passed",
    )
    documentation_url: Annotated[str, AfterValidator(_validate_address)] = Field(
        default="",
        description="address where you serve this documentation; every page links to it",
    )
    shutdown_seconds: int = Field(
        default=30, ge=0, description="seconds that requests in flight get to finish after SIGTERM"
    )
    log_level: str = Field(
        default="warning", description="lowest level that is logged; `info` logs each request"
    )
    metrics_directory: Path | None = Field(
        default=None,
        validation_alias="PROMETHEUS_MULTIPROC_DIR",
        description="directory of the metrics of several workers; `serve` sets it itself, so set "
        "it only with another ASGI server",
    )
    traces_endpoint: str | None = Field(
        default=None,
        validation_alias=AliasChoices(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
        ),
        description="endpoint for OpenTelemetry spans; needs the extra `otel`",
    )

    @property
    def database(self) -> str:
        """The database URL, including its password."""
        if self.database_password is None:
            return self.database_url
        url = make_url(self.database_url).set(password=self.database_password.get_secret_value())
        return url.render_as_string(hide_password=False)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources of settings: arguments, environment variables, then files."""
        files = _FileSettingsSource(settings_cls)
        return init_settings, env_settings, files, dotenv_settings, file_secret_settings


class _FileSettingsSource(PydanticBaseSettingsSource):
    """Reads settings from files that environment variables name, such as a container's secrets."""

    def get_field_value(self, _: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return the value of a setting from the file that its variable names, if any."""
        path = os.environ.get(f"{_PREFIX}{field_name.upper()}_FILE")
        value = None if path is None else Path(path).read_text().rstrip("\n")
        return value, field_name, False

    def __call__(self) -> dict[str, Any]:
        """Return all settings that are given by files."""
        found = {
            name: self.get_field_value(field, name)[0]
            for name, field in self.settings_cls.model_fields.items()
        }
        return {name: value for name, value in found.items() if value is not None}
