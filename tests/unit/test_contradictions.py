"""Proved bounds that contradict each other are an error with the question in it, everywhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.errors import BoundsContradictError
from accountant_service.numerics.engines.line_integral import EvaluatedIntegral
from accountant_service.questions.problems import of_error
from tests.support.helpers import run

pytestmark = pytest.mark.usefixtures("without_memory")  # engines are replaced here

RUN = mechanisms.from_json(run(0.01, 1.1, 1000))

QUESTIONS: dict[str, Callable[[], Any]] = {
    "epsilon": lambda: calculator.epsilon(RUN, 1e-5),
    "another method, judged": lambda: calculator.epsilon(RUN, 1e-5, "subsampled_rdp"),
    "delta": lambda: calculator.delta(RUN, 1.0),
    "compare": lambda: calculator.compare(RUN, 1e-5),
    "curve": lambda: calculator.curve(RUN, 1e-5, ["pld"], 5),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_contradiction_names_the_question(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = EvaluatedIntegral.delta

    def crossed(line: EvaluatedIntegral, epsilons: Any) -> Any:
        lower, upper = genuine(line, epsilons)
        return upper * 1.01, lower * 0.99

    monkeypatch.setattr(EvaluatedIntegral, "delta", crossed)
    monkeypatch.setattr(EvaluatedIntegral, "epsilon", lambda *_: (2.0, 1.0))
    monkeypatch.setattr(
        EvaluatedIntegral, "epsilons", lambda _, __, about: (about * 1.01, about * 0.99)
    )
    with pytest.raises(BoundsContradictError) as caught:
        QUESTIONS[name]()
    assert "is above the proved upper bound" in caught.value.detail
    for part in ("add_or_remove_one", "sha256:", "noise_multiplier=1.1", "sample_rate=0.01"):
        assert part in caught.value.detail


def test_a_trade_off_that_contradicts_delta_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attack that does better than δ allows."""
    genuine = EvaluatedIntegral.attack_rates

    def too_good(line: EvaluatedIntegral, thresholds: Any) -> Any:
        false_positives, true_positives = genuine(line, thresholds)
        return 0.5 * false_positives, true_positives

    monkeypatch.setattr(EvaluatedIntegral, "attack_rates", too_good)
    with pytest.raises(BoundsContradictError):
        calculator.trade_off(RUN, 0.5, 20)


def test_a_contradiction_is_logged_with_the_question(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        problem = of_error(BoundsContradictError("lower above upper, of sha256:abc"))
    assert problem["status"] == 422
    assert problem["code"] == "bounds-contradict"
    assert [record.message for record in caplog.records] == ["lower above upper, of sha256:abc"]
