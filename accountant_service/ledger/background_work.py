"""Work that a server does again and again in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from accountant_service.ledger.errors import DatabaseAwayError

_LOG: Final = logging.getLogger(__name__)


class BackgroundWork:
    """A thread that calls a function at intervals until it is closed.

    A defect in the function is logged, and it is called again later: the thread must not end
    unseen.

    Args:
        name: of the thread, and for the log.
        work: does a part of the work; returns the seconds until it is called again.
        delay: seconds until it is called first.
        pause_after_failure: seconds until it is called again after an error, such as a database
            that is away.
    """

    def __init__(
        self, name: str, work: Callable[[], float], *, delay: float, pause_after_failure: float
    ) -> None:
        self._name, self._work = name, work
        self._delay, self._pause_after_failure = delay, pause_after_failure
        self._stopped = threading.Event()

    @property
    def is_stopping(self) -> bool:
        """Return whether the thread was asked to stop, so that its work should end soon."""
        return self._stopped.is_set()

    def start(self) -> None:
        """Start the thread."""
        self._stopped.clear()
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Stop the thread after its current call."""
        self._stopped.set()

    def _run(self) -> None:
        """Call the function at intervals until closed."""
        pause = self._delay
        while not self._stopped.wait(pause):
            try:
                pause = self._work()
            except DatabaseAwayError:
                pause = self._pause_after_failure
            except Exception:
                _LOG.exception("the background work %r failed; it is tried again", self._name)
                pause = self._pause_after_failure
