"""Run `accountant` without its second of imports: a process that has them forks for each call.

Pages have hundreds of commands. `install` puts a small program called `accountant` into a folder
for the PATH; it hands its arguments, folder, environment and standard streams to the forking
process, and ends with the command's exit code. What runs is the program itself, from the command
line's arguments on. That it also starts on its own is shown in tests/e2e/test_commands.py.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NoReturn

_ROOT = Path(__file__).parents[2]
_OWN_START = ("serve",)  # it starts processes itself, and stays
_PACKAGES = ("accountant_service.cli", "accountant_service.ledger", "accountant_service.disclosure")
_MODULES = (  # that commands and engines import when they need them
    "accountant_service.api.questions",
    "accountant_service.api.ledger_views",
    "scipy.interpolate",
    "scipy.optimize",
)
_CALLER = """#!{python} -IS
import json, os, socket, sys
if set(sys.argv[1:2]) & set({own_start!r}):
    os.execv({program!r}, [{program!r}, *sys.argv[1:]])
call = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
message = json.dumps(call).encode()
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address!r})
    socket.send_fds(connection, [len(message).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(message)
    code = connection.recv(1)
sys.exit(code[0] if code else "the command ended without an exit code")
"""


def install(folder: Path) -> None:
    """Write a program `accountant` into a folder; the forking process starts when first needed."""
    program = folder / "accountant"
    program.write_text(
        _CALLER.format(
            python=sys.executable,
            own_start=_OWN_START,
            program=str(Path(sys.executable).with_name("accountant")),
            address=_start(),
        )
    )
    program.chmod(0o755)


@cache
def _start() -> str:
    """Start the forking process of this test process, and return the path of its socket."""
    folder = tempfile.mkdtemp(prefix="warm-")
    address = f"{folder}/socket"
    command = [sys.executable, "-m", "tests.support.warm_commands", address]
    process = subprocess.Popen(command, cwd=_ROOT, start_new_session=True)
    atexit.register(_stop, process, folder)
    deadline = time.monotonic() + 120
    while not os.path.exists(address):
        assert process.poll() is None, "the forking process ended"
        assert time.monotonic() < deadline, "the forking process did not start in time"
        time.sleep(0.05)
    return address


def _stop(process: subprocess.Popen[bytes], folder: str) -> None:
    """Kill the forking process and its calls, and remove its socket."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def serve(address: str) -> NoReturn:
    """Import all that commands need, then fork for each call."""
    from accountant_service import cli

    for package in map(import_module, _PACKAGES):
        for module in iter_modules(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    for name in _MODULES:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended calls need no wait
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)  # it appears when it takes calls
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _answer(connection, cli.app)
        connection.close()


def _answer(connection: socket.socket, program: Any) -> NoReturn:
    """Run one call in this process, send its exit code, and end."""
    code = 1
    try:
        _take_over(connection)
        program()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(bytes([code]))
        os._exit(code)


def _take_over(connection: socket.socket) -> None:
    """Take over the standard streams, arguments, folder and environment of the caller."""
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as told:
        call = json.loads(told.read(int.from_bytes(size, "big")))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    sys.argv = ["accountant", *call["arguments"]]
    os.chdir(call["folder"])
    os.environ.clear()
    os.environ.update(call["environment"])


if __name__ == "__main__":
    serve(sys.argv[1])
