"""Reports: attack rates are upper bounds, and every format says the same facts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from scipy.stats import norm

from accountant_service import mechanisms
from accountant_service.accounting.guarantee import (
    NeighbouringRelation,
    count_exposed_records,
    warn_about_delta,
)
from accountant_service.disclosure import rendering
from accountant_service.disclosure.attack_rates import (
    Detection,
    bound_attacks_by_epsilon,
    bound_attacks_on_mechanism,
    count_per_thousand,
)
from accountant_service.disclosure.deployments_registry import RegistryRecord, build_record, to_yaml
from accountant_service.disclosure.facts import Facts, facts_of_certificate
from accountant_service.disclosure.formats import Format
from accountant_service.disclosure.nist_questions import list_questions
from accountant_service.disclosure.rendering import render
from accountant_service.disclosure.sentences import list_attacks, list_conditions
from accountant_service.errors import FormatUnavailableError
from accountant_service.writing import number_format

CERTIFICATES = Path(__file__).parents[1] / "contract" / "fixtures" / "certificates"
ADDED = NeighbouringRelation.ADD_OR_REMOVE_ONE
NAMES = sorted(each.stem for each in CERTIFICATES.glob("*.json"))


def document(name: str) -> dict[str, Any]:
    """Return a certificate of the contract's fixtures."""
    found: dict[str, Any] = json.loads((CERTIFICATES / f"{name}.json").read_text())
    return found


@pytest.fixture(scope="module")
def facts() -> Facts:
    """The facts of a run that was stopped after 50 of 2000 steps."""
    return facts_of_certificate(document("certificate-3-stopped"))


def test_a_run_at_user_level_states_the_records_of_a_person(facts: Facts) -> None:
    """The promise of the run alone is for a person; that of the budget is for one record."""
    assert facts.run is not None
    described = {"kind": "user_level", "records": 4, "mechanism": facts.run.mechanism}
    run = facts.run.model_copy(update={"mechanism": described})
    *_, person, unseen = list_conditions(facts.model_copy(update={"run": run}))
    assert "a person may have up to 4 records" in person
    assert "“All runs together” needs the first condition" in person
    assert not any("4 records" in each for each in list_conditions(facts))
    assert unseen == list_conditions(facts)[-1]


@pytest.mark.parametrize("sigma", [0.5, 2.0, 20.0])
def test_rates_of_a_gaussian_are_those_of_its_trade_off_rounded_up(sigma: float) -> None:
    mechanism = mechanisms.from_json({"kind": "gaussian", "noise_multiplier": sigma})
    found = bound_attacks_on_mechanism(mechanism, ADDED, 1e-5)
    exact = 2 * norm.cdf(0.5 / sigma) - 1
    assert exact <= found.advantage <= exact * (1 + 1e-6)
    assert found.mu is not None
    assert found.mu <= 1 / sigma * (1 + 1e-6)
    for each in found.detections:
        rate = norm.cdf(norm.ppf(each.false_positive_rate) + 1 / sigma)
        assert rate <= each.true_positive_rate <= rate * (1 + 2e-3)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (1e-9, 1e-12), (1.0, 1e-5), (900, 0.1)])
def test_epsilon_and_delta_alone_bound_randomized_response(epsilon: float, delta: float) -> None:
    """With probability δ the record is published; else it is answered by randomised response."""
    found = bound_attacks_by_epsilon(epsilon, delta)
    advantage = delta + (1 - delta) * math.tanh(0.5 * epsilon)
    assert found.advantage == pytest.approx(advantage, rel=1e-6, abs=1e-12)
    assert found.advantage >= advantage * (1 - 1e-12)
    for each in found.detections:
        assert each.false_positive_rate <= each.true_positive_rate <= 1


def test_a_slack_raises_every_rate() -> None:
    mechanism = mechanisms.from_json({"kind": "gaussian", "noise_multiplier": 3.0})
    exact = bound_attacks_on_mechanism(mechanism, ADDED, 1e-5)
    loose = bound_attacks_on_mechanism(mechanism, ADDED, 1e-5, slack=0.01)
    assert loose.advantage >= exact.advantage + 0.01
    for one, other in zip(exact.detections, loose.detections, strict=True):
        assert other.true_positive_rate >= one.true_positive_rate + 0.01
    assert (exact.basis, loose.basis) == ("mechanism", "reference_steps")


@pytest.mark.parametrize(("rate", "count"), [(0.5, 500), (0.5000001, 501), (0.0, 0), (1.0, 1000)])
def test_counts_are_rounded_up(rate: float, count: int) -> None:
    assert count_per_thousand(rate) == count


def test_without_a_release_the_counts_are_those_of_guessing() -> None:
    found = bound_attacks_by_epsilon(0.0, 0.0)
    assert (found.advantage, count_per_thousand(found.guess_success)) == (0.0, 500)


def test_a_posterior_follows_from_bayes_rule() -> None:
    found = Detection(false_positive_rate=0.01, true_positive_rate=0.05).posterior(0.01)
    assert found == pytest.approx(0.01 * 0.05 / (0.01 * 0.05 + 0.99 * 0.01), rel=1e-9)


def check_formats(found: Facts, name: str) -> None:
    """Require a report in every format but PDF, which is written from the HTML."""
    assert {Format.JSON, Format.HTML, Format.MODEL_CARD, Format.REGISTRY, Format.NIST} == set(
        Format
    ) - {Format.PDF}
    assert Facts.model_validate_json(render(found, Format.JSON)) == found
    html = render(found, Format.HTML).decode()
    assert found.dataset.name in html
    assert "None" not in html
    assert "## Privacy" in render(found, Format.MODEL_CARD).decode()
    RegistryRecord.model_validate(yaml.safe_load(render(found, Format.REGISTRY)))
    assert render(found, Format.NIST).startswith(b"| Level |")
    assert found.run is not None
    assert found.run.plan.epsilon == document(name)["guarantee"]["epsilon"]


def test_a_certificate_has_a_report_in_every_format(facts: Facts) -> None:
    check_formats(facts, "certificate-3-stopped")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_certificate_has_a_report_in_every_format(name: str) -> None:
    check_formats(facts_of_certificate(document(name)), name)


def test_the_budget_s_attacks_follow_from_its_reference_steps(facts: Facts) -> None:
    budget = facts.budget
    assert budget.attacks.basis == "reference_steps"
    assert budget.attacks.advantage < bound_attacks_by_epsilon(3.0, 1e-5).advantage
    assert facts.run is not None
    assert facts.run.plan.attacks.advantage < budget.attacks.advantage
    renyi = facts_of_certificate(document("certificate-2-renyi"))
    assert renyi.budget.attacks.basis == "epsilon_and_delta"


def test_the_first_page_has_no_greek_and_counts_attacks(facts: Facts) -> None:
    html = render(facts, Format.HTML).decode()
    first = html[html.index("<body>") : html.index("The same in numbers")]
    assert not any(letter in first for letter in "εδσμα")
    guessing = list_attacks(facts, facts.budget)[0]
    assert f"at most {guessing.at_most} of 1000" in first
    assert "500 of 1000" in first
    assert 500 < guessing.at_most < 1000
    assert first.count("date</div>") == 3  # lines to sign on


def test_the_first_page_counts_the_claims_of_someone_who_rarely_speaks(facts: Facts) -> None:
    """Their claims are right more often than the guesses of someone who always guesses."""
    guessing, finding, certainty = list_attacks(facts, facts.budget)
    assert guessing.at_most < certainty.at_most
    right = finding.at_most / (finding.at_most + finding.blind)
    assert abs(certainty.at_most / 1000 - right) < 0.02
    assert certainty.blind == 500


def test_a_report_says_which_steps_its_promise_covers(facts: Facts) -> None:
    html = render(facts, Format.HTML).decode()
    assert "The run reserved 2000 steps and was granted 50." in html
    assert "The promise covers all 2000 reserved steps." in html


def test_a_name_in_a_certificate_cannot_change_the_page() -> None:
    evil = '<script>alert(1)</script>"}'
    found = facts_of_certificate(document("certificate-3-stopped") | {"dataset": evil})
    html = render(found, Format.HTML).decode()
    assert "<script" not in html
    card = render(found, Format.MODEL_CARD).decode()
    assert "<script" not in card


def test_every_level_of_the_nist_pyramid_is_asked_about(facts: Facts) -> None:
    questions = list_questions(facts)
    levels = list(dict.fromkeys(each.level for each in questions))
    assert levels[0] == "Privacy parameters"
    assert levels[-1] == "Data collection exposure"
    assert len(levels) == 10
    assert all(each.answer for each in questions)
    assert {each.is_open for each in questions} == {True, False}
    table = render(facts, Format.NIST).decode()
    assert table.count("\n") == len(questions) + 2


@pytest.mark.parametrize("tier", [1, 2, 3])
def test_the_registry_s_record_has_the_fields_of_its_tier(facts: Facts, tier: Any) -> None:
    record = yaml.safe_load(to_yaml(build_record(facts, tier)))
    RegistryRecord.model_validate(record)
    deployment = record["deployment"]
    assert record["tier"] == tier
    assert ("privacy_loss" in deployment) == (tier >= 2)
    assert ("implementation" in deployment) == (tier >= 3)
    if tier >= 2:
        loss = deployment["privacy_loss"]
        assert loss["privacy_parameters"] == {"epsilon": 3.0, "delta": 1e-05}
        assert ("privacy_unit_details" in loss) == (tier >= 3)


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("basic", {"surprise": "x"}),
        ("basic", {"publication_date": "1/1/2026"}),
        ("basic", {"data_product_type": "Model"}),
        ("basic", {"data_curators": []}),
        ("deployment_model", {"model_name": "Cloud"}),
        ("dp_variant", {"variant_name": "DP"}),
        ("privacy_loss", {"privacy_parameters": {"epsilon": "one"}}),
    ],
)
def test_what_the_registry_s_schema_refuses_is_refused(
    facts: Facts, section: str, change: dict[str, Any]
) -> None:
    record = build_record(facts).model_dump(exclude_none=True)
    record["deployment"][section] |= change
    with pytest.raises(ValidationError):
        RegistryRecord.model_validate(record)


def test_the_registry_s_texts_are_not_folded(facts: Facts) -> None:
    """As its own check demands: plain, quoted or literal style."""
    text = to_yaml(build_record(facts))
    styles = {getattr(token, "style", None) for token in yaml.scan(text)}
    assert styles <= {None, "|", "'", '"'}


@pytest.mark.slow
def test_pdf_is_written_from_the_html(facts: Facts) -> None:
    pytest.importorskip("weasyprint")
    assert render(facts, Format.PDF).startswith(b"%PDF-")


def test_without_the_library_for_pdf_the_message_says_what_to_install(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "weasyprint", None)
    with pytest.raises(FormatUnavailableError, match=r"privacy-accountant\[report\].*libpango"):
        render(facts, Format.PDF)


def test_a_report_loads_nothing(facts: Facts) -> None:
    html = render(facts, Format.HTML).decode()
    assert "http" not in html
    assert "src=" not in html
    with pytest.raises(ValueError, match="loads nothing"):
        rendering._refuse_to_fetch("file:///etc/passwd")


@pytest.mark.parametrize(
    ("size", "delta", "warns"),
    [(None, 0.5, False), (1000, 1e-4, False), (1000, 1e-3, True), (1000, 0.1, True)],
)
def test_a_delta_that_allows_to_publish_a_record_is_warned_about(
    size: int | None, delta: float, warns: bool
) -> None:
    assert (warn_about_delta(size, delta) is not None) == warns


@pytest.mark.parametrize(
    ("size", "delta", "count"), [(60_000, 1e-5, "0.6"), (7, 0.1, "0.7"), (10, 0.1, "1")]
)
def test_exposed_records_are_counted_in_the_decimals_that_were_written(
    size: int, delta: float, count: str
) -> None:
    """In binary 60000 times 1e-5 is above 0.6, and is rounded up to 0.61."""
    assert number_format.round_up(count_exposed_records(size, delta), 2) == count
