"""Install packages with uv, from the places that pip is set up to use: uv does not read these.

    python scripts/install.py ENVIRONMENT --constraint constraints.txt --editable '.[train]'

uv takes a seventh of pip's CPU time, and keeps what it has unpacked for the next environment; see
docs/decisions/0021-three-tiers-of-tests.md. This file needs nothing but Python.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

# pip's setting, the variable by which uv takes the same, and what stands between several values
VARIABLES: Final = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "cert": ("SSL_CERT_FILE", " "),
}


def read_settings(listed: str) -> dict[str, str]:
    """Return uv's variables for what `pip config list` printed; a later line overrides."""
    found = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        setting = key.rpartition(".")[2]
        if setting in VARIABLES:
            variable, between = VARIABLES[setting]
            found[variable] = between.join(str(ast.literal_eval(value)).split())
    return found


def main(environment: str, *arguments: str) -> int:
    """Run `uv pip install` with these arguments for an environment; return its exit status."""
    asked = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    best = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # the best version of all indexes, like pip
    python = Path(environment, "bin", "python")
    call = [sys.executable, "-m", "uv", "pip", "install", "--python", python]
    variables = best | read_settings(listed) | os.environ
    return subprocess.run([*call, *arguments], env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
