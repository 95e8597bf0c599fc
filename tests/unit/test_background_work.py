"""Work in a background thread goes on after errors, and stops when it is closed."""

from __future__ import annotations

import logging
import threading

import pytest

from accountant_service.ledger.background_work import BackgroundWork
from accountant_service.ledger.errors import DatabaseAwayError


@pytest.mark.parametrize("error", [ValueError("a defect"), DatabaseAwayError("away")])
def test_work_is_tried_again_after_an_error(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()
    failures = [error, error]

    def work() -> float:
        if failures:
            raise failures.pop()
        done.set()
        return 60.0

    background = BackgroundWork("test", work, delay=0.0, pause_after_failure=0.0)
    with caplog.at_level(logging.ERROR):
        background.start()
        assert done.wait(20), "the thread ended"
        background.close()
    assert background.is_stopping
    defects = [record for record in caplog.records if record.exc_info]
    assert len(defects) == (2 if isinstance(error, ValueError) else 0), "a defect is logged"


def test_closed_work_is_not_called_again() -> None:
    calls: list[int] = []
    called = threading.Event()

    def work() -> float:
        calls.append(1)
        called.set()
        return 0.2

    background = BackgroundWork("closed", work, delay=0.0, pause_after_failure=0.0)
    background.start()
    assert called.wait(20)
    background.close()
    (thread,) = (each for each in threading.enumerate() if each.name == "closed")
    thread.join(20)
    assert len(calls) == 1
