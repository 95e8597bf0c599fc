"""The dev container is for this project: its Python, packages, port and folder of programs."""

from __future__ import annotations

import json
import re
import tomllib

from tests.support.pages import ROOT


def test_the_dev_container_has_what_the_image_has_and_the_tests_need() -> None:
    """The image itself is not built here: its registry cannot be reached by every machine."""
    described = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=")
    assert re.search(rf"python:{re.escape(oldest)}\b", described["image"])
    installed = described["postCreateCommand"].partition(" && make install")[0].split()
    libraries = re.findall(r"\b(?:lib[\w.-]+\d|fonts-[\w-]+)\b", (ROOT / "Dockerfile").read_text())
    assert libraries, "those that draw PDF"
    assert {*libraries, "chromium"} <= {*installed}
    assert {*described["portsAttributes"]} == {str(port) for port in described["forwardPorts"]}
    assert described["remoteEnv"]["PATH"].startswith("${containerWorkspaceFolder}/.venv/bin:")
