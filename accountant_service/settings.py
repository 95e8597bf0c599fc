"""The only reader of the environment: every setting, its default and its meaning."""

from __future__ import annotations

import os
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from sqlalchemy import make_url

_PREFIX = "ACCOUNTANT_"


def _addresses(text: str) -> str:
    """The same addresses and networks without blanks; nothing for none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        for part in parts:
            ip_network(part)
    except ValueError:
        raise ValueError(
            "must be IP addresses or networks, such as 10.0.0.2 or 10.0.0.0/8; comma-separated"
        ) from None
    return ",".join(parts)


class Settings(BaseSettings):
    """Settings from variables with the prefix `ACCOUNTANT_`, such as `ACCOUNTANT_CACHE_ENTRIES`.

    With `_FILE` after its name a variable names a file that holds the value.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, extra="ignore", populate_by_name=True, hide_input_in_errors=True
    )

    database_url: str = Field(
        default="sqlite:///accountant.db", description="where the budget ledger is kept", repr=False
    )
    database_password: SecretStr | None = Field(
        default=None, description="put into the database's URL"
    )
    open_computation: bool = Field(
        default=True, description="whether computations are answered without an API key"
    )
    cache_entries: int = Field(
        default=4096, ge=0, description="answers kept for identical questions, by each worker"
    )
    cache_bytes_max: int = Field(
        default=64 << 20, ge=0, description="bytes of these answers, by each worker"
    )
    workers: int = Field(default=1, ge=1, le=64, description="processes that serve")
    computation_processes: int = Field(
        default_factory=lambda: os.cpu_count() or 1,
        ge=1,
        description="questions computed at the same time, by each worker, each in a process of "
        "its own; by default one a core",
    )
    computation_seconds_max: float = Field(
        default=10.0, gt=0, description="CPU seconds that one computation may take"
    )
    waiting_max: int = Field(
        default=256,
        ge=2,
        description="questions waiting for a process before new ones get 503; from one address "
        "or key, half of them",
    )
    batch_bytes_max: int = Field(
        default=2 << 20, ge=1, description="bytes of the answers to one batch"
    )
    unread_seconds_max: float = Field(
        default=20.0,
        gt=0,
        description="seconds a client may leave an answer unread before it is cut off",
    )
    body_bytes_max: int = Field(default=1 << 20, ge=1024, description="largest request body")
    body_seconds_max: float = Field(
        default=30.0, gt=0, description="seconds a request body may take to come"
    )
    rate_limit: float = Field(
        default=0.0,
        ge=0,
        description="requests a second of one key or address, to each worker; 0: any number",
    )
    rate_burst: int = Field(default=100, ge=1, description="requests that may come at once")
    trusted_proxies: Annotated[str, AfterValidator(_addresses)] = Field(
        default="",
        description="addresses or networks whose X-Forwarded-For and -Proto are believed; "
        "comma-separated",
    )
    idempotency_days: int = Field(
        default=30,
        ge=30,
        le=36500,
        description="days for which a repeated write gets its first answer; at least the longest "
        "lease",
    )
    shutdown_seconds: int = Field(
        default=30, ge=0, description="seconds that calls in flight get to finish after SIGTERM"
    )
    log_level: str = Field(
        default="warning", description="of the log; `info` has a line for each request"
    )
    metrics_directory: Path | None = Field(
        default=None,
        validation_alias="PROMETHEUS_MULTIPROC_DIR",
        description="where several workers keep their numbers; `serve` makes and removes it",
    )
    traces_endpoint: str | None = Field(
        default=None,
        validation_alias=AliasChoices(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
        ),
        description="where OpenTelemetry spans go, with the extra `otel`",
    )

    @property
    def database(self) -> str:
        """The database's URL, with its password."""
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
        """What is given in code, then in the environment, then in files it names."""
        named = _Files(settings_cls)
        return init_settings, env_settings, named, dotenv_settings, file_secret_settings


class _Files(PydanticBaseSettingsSource):
    """Values in files, such as a container's secrets."""

    def get_field_value(self, _: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """The value of one setting, if a variable names its file."""
        named = os.environ.get(f"{_PREFIX}{field_name.upper()}_FILE")
        value = None if named is None else Path(named).read_text().rstrip("\n")
        return value, field_name, False

    def __call__(self) -> dict[str, Any]:
        found = {
            name: self.get_field_value(field, name)[0]
            for name, field in self.settings_cls.model_fields.items()
        }
        return {name: value for name, value in found.items() if value is not None}
