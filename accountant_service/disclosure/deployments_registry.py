"""The record of a deployment for the OpenDP deployments registry, as YAML.

The fields, their tiers and the allowed values are those of `schemas/deployments-schema.yaml` of
github.com/opendp/deployments-registry-data, commit 3e9c812 of 2026-07-15 (MIT licence). The schema
is based on research by Ghazi, Nanayakkara and Vadhan (arXiv 2509.13509). The registry's check also
wants strings without folded style, and a file name of lower-case letters, digits and underscores.

What only the operator knows is marked as open: replace these texts before you submit the record.
"""

from __future__ import annotations

import re
from datetime import date
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from accountant_service.disclosure.facts import Facts, Promise
from accountant_service.disclosure.sentences import (
    OPEN,
    describe_relation,
    describe_stopping,
    list_attacks,
    list_conditions,
    list_unprotected,
)
from accountant_service.writing import number_format

SCHEMA_COMMIT: Final = "3e9c812a924cf01d228f26f6c462c59c391c3f2a"
Tier = Literal[1, 2, 3]


def _tier(number: int) -> Any:
    """Declare an optional model field that the registry requires from this tier on."""
    return Field(None, json_schema_extra={"tier": number})


def _require_date(text: object) -> object:
    """Raise ValueError for a text that is not an ISO 8601 date; return any other value."""
    if isinstance(text, str):
        date.fromisoformat(text)
    return text


class _Section(BaseModel):
    """Base of the record's sections: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Basic(_Section):
    """The data product, as tier 1 of the registry describes it."""

    name: str
    data_curators: Annotated[list[str], Field(min_length=1)]
    intended_use: str
    data_product_type: Literal[
        "Summary statistics",
        "Machine learning model",
        "Dataset",
        "Synthetic data",
        "Interactive API",
        "SQL queries",
    ]
    data_product_region: str
    description: str
    publication_date: Annotated[str, BeforeValidator(_require_date)]
    data_product_sector: (
        Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"] | None
    ) = _tier(1)


class Variant(_Section):
    """The variant of differential privacy."""

    variant_name: (
        Literal["Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP", "Custom"] | None
    ) = _tier(2)
    data_domain: str | None = _tier(3)
    unprotected_quantities: str | None = _tier(3)


class Parameters(_Section):
    """The privacy parameters."""

    epsilon: float | None = None
    delta: float | str | None = None
    rho: float | None = None


class PrivacyLoss(_Section):
    """The privacy unit and the privacy parameters."""

    privacy_unit: str | None = _tier(2)
    privacy_unit_details: str | None = _tier(3)
    privacy_parameters: Parameters | None = _tier(2)
    privacy_parameters_details: str | None = _tier(3)


class DeploymentModel(_Section):
    """The trust model, and how releases are made."""

    model_name: Literal["Local", "Central", "Shuffle", "Federated", "Varies"] | None = _tier(2)
    model_name_details: str | None = _tier(3)
    actors: str | None = _tier(3)
    release_type: Literal["One release", "Many releases"] | None = _tier(2)
    release_type_details: str | None = _tier(3)
    data_source_type: Literal["Static", "Dynamic"] | None = _tier(2)
    data_source_type_details: str | None = _tier(3)
    access_type: Literal["Interactive", "Non-interactive"] | None = _tier(2)
    access_type_details: str | None = _tier(3)


class Accounting(_Section):
    """The accounting of several releases."""

    post_processing: str | None = _tier(3)
    composition: str | None = _tier(3)


class Implementation(_Section):
    """The implementation, and the reasons for it."""

    preprocessing_and_hyperparameter_tuning: str | None = _tier(3)
    mechanisms: str | None = _tier(3)
    justification: str | None = _tier(3)


class Administrative(_Section):
    """The sources and authors of the record."""

    sources: str | None = _tier(1)
    notes: str | None = _tier(1)
    registry_authors: Annotated[list[str], Field(min_length=1)]


class Deployment(_Section):
    """A deployment of differential privacy: all sections of a registry record."""

    basic: Basic
    dp_variant: Variant | None = None
    privacy_loss: PrivacyLoss | None = None
    deployment_model: DeploymentModel | None = None
    accounting: Accounting | None = None
    implementation: Implementation | None = None
    administrative: Administrative | None = None


class RegistryRecord(_Section):
    """A whole record of the OpenDP deployments registry."""

    url_slug: str
    status: Literal[
        "Converted",
        "Draft",
        "Pending",
        "Changes Required",
        "Approved",
        "Approved (Update Requested)",
        "Approved (Pending)",
    ]
    tier: Tier
    deployment: Deployment


def build_record(facts: Facts, tier: Tier = 3) -> RegistryRecord:
    """Return the description of a dataset or run for the deployments registry, up to a tier."""
    record = RegistryRecord(
        url_slug=re.sub(r"[^a-z0-9]+", "_", _name(facts).lower()).strip("_"),
        status="Draft",
        tier=tier,
        deployment=Deployment(
            basic=_basic(facts),
            dp_variant=Variant(
                variant_name="Approximate DP",
                data_domain=OPEN,
                unprotected_quantities="The number of records. Anything else: " + OPEN,
            ),
            privacy_loss=_privacy_loss(facts),
            deployment_model=_deployment_model(facts),
            accounting=Accounting(
                post_processing="Results may be processed further without privacy loss.",
                composition=_composition(facts),
            ),
            implementation=_implementation(facts),
            administrative=Administrative(
                notes=f"Schema of commit {SCHEMA_COMMIT[:7]}. {_describe_last_entry(facts)}",
                registry_authors=[OPEN],
            ),
        ),
    )
    return RegistryRecord.model_validate(_limit_to_tier(record, tier))


def to_yaml(record: RegistryRecord) -> str:
    """Return a registry description as YAML text, in the style that the registry accepts."""
    plain = record.model_dump(exclude_none=True)
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**30)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes texts of several lines as blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Represent a text in YAML, as a block if it has several lines."""
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _limit_to_tier(section: BaseModel, tier: int) -> dict[str, Any]:
    """Return a section's fields that belong to `tier` or a lower one, without empty sections."""
    kept: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        extra = field.json_schema_extra
        least = extra.get("tier", 1) if isinstance(extra, dict) else 1
        if value is None or (isinstance(least, int) and least > tier):
            continue
        plain = _limit_to_tier(value, tier) if isinstance(value, BaseModel) else value
        if plain != {}:
            kept[name] = plain
    return kept


def _name(facts: Facts) -> str:
    """Return the name of the data product for the registry record."""
    if facts.run is None:
        return f"Releases from {facts.dataset.name}"
    return f"Model of run {facts.run.identifier[:8]} on {facts.dataset.name}"


def _basic(facts: Facts) -> Basic:
    """Return the registry section on the data product (tier 1)."""
    if facts.run is None:
        described = f"All runs on the dataset {facts.dataset.name} together"
    else:
        described = f"{facts.run.step}, {facts.run.steps_granted} steps on {facts.dataset.name}"
    return Basic(
        name=_name(facts),
        data_curators=[OPEN],
        intended_use=OPEN,
        data_product_type="Machine learning model",
        data_product_region=OPEN,
        description=described,
        publication_date=facts.issued[:10],
    )


def _privacy_loss(facts: Facts) -> PrivacyLoss:
    """Return the registry section on the privacy unit, and ε and δ of the budget."""
    budget, run = facts.budget, facts.run
    details = [_describe_attacks(facts, budget, "Everything released from the dataset")]
    if run is not None:
        details.append(
            f"This run alone: ε = {number_format.round_up(run.plan.epsilon)} at "
            f"δ = {number_format.round_up(run.plan.delta)}. {describe_stopping(run)}"
        )
        details.append(_describe_attacks(facts, run.plan, "This run alone"))
    return PrivacyLoss(
        privacy_unit=facts.dataset.privacy_unit,
        privacy_unit_details=f"Two datasets are neighbours if {describe_relation(facts).neighbours}"
        f" (relation {facts.dataset.neighbouring_relation.value}).",
        privacy_parameters=Parameters(epsilon=budget.epsilon, delta=budget.delta),
        privacy_parameters_details="\n\n".join(details),
    )


def _describe_attacks(facts: Facts, promise: Promise, subject: str) -> str:
    """Describe in sentences how far membership attacks on `subject` can succeed."""
    guessing, finding, *_ = list_attacks(facts, promise)
    return (
        f"{subject}: of 1000 guesses {describe_relation(facts).question}, at most "
        f"{guessing.at_most} are right (500 by guessing blindly). An attack with a "
        f"false-positive rate of 1 % has a true-positive rate of at most "
        f"{number_format.round_up(finding.at_most / 10)} %."
    )


def _deployment_model(facts: Facts) -> DeploymentModel:
    """Return the registry section on the trust model, and on how releases are made."""
    return DeploymentModel(
        model_name="Central",
        model_name_details=facts.dataset.trust_model,
        actors="The curator holds the data and trains. The ledger sees no data. Holders of its "
        "keys may spend the budget. Nobody who receives results is trusted. Their names: " + OPEN,
        release_type="Many releases",
        release_type_details="The budget is set once and never reset. New data are a new dataset.",
        data_source_type="Static",
        data_source_type_details="The number of records is fixed when the dataset is registered.",
        access_type="Interactive",
        access_type_details="Analysts reserve budget for runs, and may choose each after earlier "
        "results. The one filter covers all of them together, even if they collude.",
    )


def _composition(facts: Facts) -> str:
    """Describe in words how several releases are accounted for together."""
    return f"Privacy filter, sound for adaptively chosen runs. {facts.filter.description}."


def _implementation(facts: Facts) -> Implementation:
    """Return the registry section on mechanisms, assumptions and unprotected harms."""
    run = facts.run
    lines = [] if run is None else [f"{run.step}; {run.steps_reserved or run.steps_granted} steps."]
    if run is not None and run.clip_norm is not None:
        lines.append(f"Clip norm {number_format.round_nearest(run.clip_norm)}, as declared.")
    lines.append(f"Accounted for by privacy-accountant {facts.accountant_version}.")
    lines += [f"Assumed: {each}" for each in list_conditions(facts)]
    lines += [f"Not protected: {each}" for each in list_unprotected(facts)]
    return Implementation(
        preprocessing_and_hyperparameter_tuning="Runs charged to the ledger are covered by the "
        "budget, tuning included. Anything else: " + OPEN,
        mechanisms="\n".join(lines),
        justification=OPEN,
    )


def _describe_last_entry(facts: Facts) -> str:
    """Return a reference to the last ledger entry, its number and hash, as text."""
    return f"Ledger entry {facts.record.entries}, head {facts.record.head}."
