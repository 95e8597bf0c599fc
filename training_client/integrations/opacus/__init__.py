"""Opacus: `connect` and `connect_ledger` have the service charge each step of a `PrivacyEngine`."""

from training_client.integrations.opacus.accountant import (
    NAME,
    RemoteAccountant,
    connect,
    connect_ledger,
)

__all__ = ["NAME", "RemoteAccountant", "connect", "connect_ledger"]
