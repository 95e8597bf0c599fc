"""The package's metadata that depend on where the project is published: its README and addresses.

Hatchling imports this file when it builds the package; see `[tool.hatch.metadata.hooks.custom]` in
pyproject.toml for the settings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE: Final = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n?", re.MULTILINE)
_COMMENT: Final = re.compile(r"^<!-- .* -->\n", re.MULTILINE)
_LINK: Final = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)]*)\)")


def render_readme(text: str, repository: str) -> str:
    """Return the README for a package index, where links to files of the repository lead nowhere.

    Args:
        text: the README, with links to files relative to the repository.
        repository: the repository's address, to which links are made; if empty, links become
            their text. Pictures are left out.
    """
    text = _COMMENT.sub("", _IMAGE.sub("", text))
    if not repository:
        return _LINK.sub(r"\1", text)
    return _LINK.sub(rf"[\1]({repository}/blob/main/\2)", text)


class PackageMetadata(MetadataHookInterface):
    """Hatchling's metadata hook."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README, and the addresses that are known."""
        repository: str = self.config["repository"]
        addresses = {
            "Repository": repository,
            "Documentation": self.config["documentation"],
            "Changes": repository and f"{repository}/blob/main/CHANGELOG.md",
        }
        metadata["urls"] = {name: address for name, address in addresses.items() if address}
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = render_readme(readme, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
