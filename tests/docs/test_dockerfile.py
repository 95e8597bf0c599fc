"""The image is made of all packages, and its context has whatever is copied into it."""

from __future__ import annotations

import re
import tomllib

from tests.support.pages import ROOT


def test_the_context_has_what_the_image_copies() -> None:
    lines = re.findall(r"^COPY ((?!--from).+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    copied = {source for line in lines for source in line.split()[:-1]}
    let_through = re.findall(r"^!(.+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert copied - set(let_through) == set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(packages) - copied == set()
