"""Steps that are handed out, each once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from training_client.errors import NoGuaranteeError


class HandedOut:
    """The last step that was handed out, here alone.

    Of two threads that ask for the same step one gets it. A copy, or a process forked from this
    one, would hand out again what is charged once: the first cannot be made, the second is refused.

    Attributes:
        last: the last step, from 1; 0 if there was none.
    """

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            NoGuaranteeError: always.
        """
        raise NoGuaranteeError(
            "a copy of an allowance would hand out steps again that are charged once: "
            "give each run one of its own"
        )

    def look(self, step: int, allow: Callable[[int], None]) -> None:
        """Have `allow` raise if `step` may not be made; nobody is handed it.

        Raises:
            NoGuaranteeError: it was handed out, or may have been in the process that this one is
                forked from.
        """
        with self._alone(step):
            allow(step)

    def take(self, step: int, allow: Callable[[int], None]) -> None:
        """The same, and hand it out if nothing was raised."""
        with self._alone(step):
            allow(step)
            self.last = step

    @contextmanager
    def _alone(self, step: int) -> Iterator[None]:
        if os.getpid() != self._process:
            raise NoGuaranteeError(
                "the allowance belongs to the process that this one was forked from, which may "
                "make the same steps: begin the run's budget in the process that trains"
            )
        with self._lock:
            if step <= self.last:
                raise NoGuaranteeError(
                    f"step {step} was handed out before, as all up to {self.last}: another run "
                    "draws on the same allowance. Give each run one of its own, or begin one after "
                    "the other has ended"
                )
            yield
