"""A process that has imported the accountants and forks computation processes from itself.

They share its memory and start in milliseconds. The serving process itself has threads, so it must
not be forked. `multiprocessing` has such a server too, but each of its processes imports the main
module of the program again.

    python -m accountant_service.forking DESCRIPTOR
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

# threads would not survive the fork, and one computation uses one core
_THREADS: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_REQUEST_BYTES_MAX: Final = 4096


class ForkServer:
    """The server, started when it is first needed and again if it died."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Start the server unless it was started; it imports its modules in the background."""
        with self._turn:
            self._started()

    def _started(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            path = os.pathsep.join(filter(None, sys.path))
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=os.environ | dict.fromkeys(_THREADS, "1") | {"PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the service, which then lets go of it
                )
        return self._socket

    def fork(self, *arguments: Any) -> tuple[int, Connection]:
        """Start a process that runs `processes.compute` with these arguments.

        Returns:
            Its number, and the connection to it.

        Raises:
            OSError: the server dies again and again.
        """
        request = pickle.dumps(arguments)
        with self._turn:
            try:
                return self._forked(request)
            except OSError:  # it was killed, perhaps for memory
                self._forget()
                return self._forked(request)

    def _forked(self, request: bytes) -> tuple[int, Connection]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            to_server = self._started()
            socket.send_fds(to_server, [request], [theirs.fileno()])
            answer = to_server.recv(8)
            if not answer:
                raise BrokenPipeError("the server that forks computation processes has ended")
            return int.from_bytes(answer, "big"), Connection(ours.detach())

    def close(self) -> None:
        """End the server; the processes that still compute end after that."""
        with self._turn:
            self._forget()

    def _forget(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._socket = None
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2.0)


FORK_SERVER: Final = ForkServer()
atexit.register(FORK_SERVER.close)


def _serve(requests: socket.socket) -> None:
    """Fork a process for each request, until the service closes the connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets processes that ended
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES_MAX, 1)
        if not message:
            return
        number = os.fork()
        if number == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _compute(descriptors[0], pickle.loads(message))
        os.close(descriptors[0])
        requests.sendall(number.to_bytes(8, "big"))


def _compute(descriptor: int, arguments: tuple[Any, ...]) -> None:
    from accountant_service import processes

    try:
        processes.compute(Connection(descriptor), *arguments)
    finally:
        os._exit(0)


def _prepare() -> None:
    """Import what computations need, and fill the caches that the first of them would fill."""
    from accountant_service import calculator
    from accountant_service.api import answering  # noqa: F401 - its processes need it
    from accountant_service.guarantee import NeighbouringRelation
    from accountant_service.ledger import filter as privacy_filter
    from accountant_service.mechanisms import DpSgd

    calculator.epsilon(DpSgd(1.1, sample_rate=0.01, steps=1000), 1e-5)
    privacy_filter.choose(1.0, 1e-5, NeighbouringRelation.ADD_OR_REMOVE_ONE)


if __name__ == "__main__":
    _prepare()
    _serve(socket.socket(fileno=int(sys.argv[1])))
