"""The only reader of the environment: every setting, its default and its meaning."""

from __future__ import annotations

import os

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings from variables with the prefix `ACCOUNTANT_`, such as `ACCOUNTANT_CACHE_ENTRIES`."""

    model_config = SettingsConfigDict(env_prefix="ACCOUNTANT_", extra="ignore")

    database_url: str = Field(
        default="sqlite:///accountant.db", description="where the budget ledger is kept"
    )
    open_computation: bool = Field(
        default=True, description="whether computations are answered without an API key"
    )
    cache_entries: int = Field(
        default=4096, ge=0, description="answers kept for identical questions"
    )
    worker_threads: int = Field(
        default_factory=lambda: os.cpu_count() or 1,
        ge=1,
        description="questions computed at the same time",
    )
    waiting_max: int = Field(
        default=256, ge=1, description="questions waiting for a thread before new ones get 503"
    )
    body_bytes_max: int = Field(default=1 << 20, ge=1024, description="largest request body")
    log_level: str = Field(default="warning", description="of the server's own log")
