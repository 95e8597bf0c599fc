"""A process that has imported what computations need, and forks computation processes from itself.

The forked processes share its memory and start in milliseconds. The serving process itself has
threads, so it must not be forked. `multiprocessing` has a fork server too, but each of its
processes imports the main module of the program again.

What it calls is named as `module:function`: this module imports no other of the package.

    python -m accountant_service.computing.fork_server DESCRIPTOR MODULE:FUNCTION
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
from pkgutil import resolve_name
from typing import Any, Final

# one thread each: threads do not survive a fork, and one computation uses one core
_THREAD_COUNTS: Final = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)
_REQUEST_BYTES_MAX: Final = 4096


class ForkServer:
    """Handle of a fork server: starts it when needed, and restarts it if it died.

    Attributes:
        preload: the function, as `module:function`, that a server calls when it starts, before it
            forks; none if empty.
    """

    preload = ""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Start the server unless it is running. It imports its modules in the background."""
        with self._lock:
            self._ensure_started()

    def _ensure_started(self) -> socket.socket:
        """Start the server unless it is running, and return the socket to it."""
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            path = os.pathsep.join(filter(None, sys.path))
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno()), self.preload],
                    pass_fds=[theirs.fileno()],
                    env=os.environ | dict.fromkeys(_THREAD_COUNTS, "1") | {"PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C stops the service, which then stops the server
                )
        return self._socket

    def fork(self, function: str, *arguments: Any) -> tuple[int, Connection]:
        """Fork a process that runs a function until the connection closes.

        Args:
            function: as `module:function`; it is called with the process's end of the connection.
            arguments: what else it is called with.

        Returns:
            The process ID, and the connection to the process.

        Raises:
            OSError: the server has died twice.
        """
        request = pickle.dumps((function, arguments))
        with self._lock:
            try:
                return self._request_fork(request)
            except OSError:  # the server was killed, perhaps to free memory
                self._stop()
                return self._request_fork(request)

    def _request_fork(self, request: bytes) -> tuple[int, Connection]:
        """Ask the server for a new process; return its process ID and the connection to it."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            to_server = self._ensure_started()
            socket.send_fds(to_server, [request], [theirs.fileno()])
            answer = to_server.recv(8)
            if not answer:
                raise BrokenPipeError("the server that forks computation processes has ended")
            return int.from_bytes(answer, "big"), Connection(ours.detach())

    def close(self) -> None:
        """Stop the server. Processes that still compute exit afterwards."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        """Stop the server if it is running; the caller holds the lock."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._socket = None
            self._process.terminate()  # it may still be importing; its processes go on
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2.0)


FORK_SERVER: Final = ForkServer()
atexit.register(FORK_SERVER.close)


def _serve_forks(requests: socket.socket) -> None:
    """Serve fork requests on a socket until the service closes it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps processes that have ended
    with suppress(ConnectionError):  # the service has ended with a request or an answer under way
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES_MAX, 1)
            if not message:
                return
            process_id = os.fork()
            if process_id == 0:
                requests.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run_forked_process(descriptors[0], *pickle.loads(message))
            os.close(descriptors[0])
            requests.sendall(process_id.to_bytes(8, "big"))


def _run_forked_process(descriptor: int, function: str, arguments: tuple[Any, ...]) -> None:
    """Run computations in a forked process until its connection closes, then exit."""
    try:
        resolve_name(function)(Connection(descriptor), *arguments)
    finally:
        os._exit(0)


if __name__ == "__main__":
    _, number, preloading = sys.argv
    if preloading:
        resolve_name(preloading)()
    _serve_forks(socket.socket(fileno=int(number)))
