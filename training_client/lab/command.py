"""The entry point of `accountant-train`, which works without PyTorch to say what to install."""

from __future__ import annotations

import sys
from typing import Final

_EXTRA: Final = frozenset({"torch", "httpx", "numba"})


def main() -> None:
    """Run the command line; if a package that a command needs is missing, say what to install.

    Raises:
        SystemExit: with code 2 if the extra `train` is not installed.
    """
    from training_client.lab.cli import app

    try:
        app()
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        print(
            f"accountant-train needs {error.name}: pip install 'privacy-accountant[train]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
