"""The process that forks computation processes, started as the service starts it."""

from __future__ import annotations

import pickle
import select
import socket
import subprocess
import sys

import pytest

from accountant_service.questions import PRELOADING
from tests.support.helpers import nightly

COMPUTE = "accountant_service.computing.processes:compute"


@pytest.mark.slow
@pytest.mark.parametrize("answered", [False, nightly(True)])
def test_it_ends_quietly_with_the_service(answered: bool) -> None:
    """Also if the service ends before it reads the answer to its request."""
    ours, theirs = socket.socketpair()
    to_process, process_end = socket.socketpair()
    with ours, theirs, to_process, process_end:
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "accountant_service.computing.fork_server",
                str(theirs.fileno()),
                PRELOADING,
            ],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        # it is still importing, and reads the request later
        socket.send_fds(ours, [pickle.dumps((COMPUTE, ()))], [process_end.fileno()])
        if answered:
            assert select.select([ours], [], [], 60)[0], "no answer"
        ours.close()
        _, errors = server.communicate(timeout=60)
    assert (server.returncode, errors) == (0, "")
