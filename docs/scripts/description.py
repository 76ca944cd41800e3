# SPDX-License-Identifier: Apache-2.0
"""A hook of hatch: the project's URLs, and the README as the description on a package index.

The URLs come from the variables that the site is built with: ``REPO_URL`` and ``SITE_URL``. A
relative link leads nowhere on an index. With a REPO_URL it leads into that. Without one there is
nothing to link to: links become their text, and images are left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

if TYPE_CHECKING:
    from collections.abc import Mapping

_IMAGE = re.compile(r"^!\[([^\]]*)\]\((?!\w+:)([^)]+)\)\n", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)]+)\)")


class Description(MetadataHookInterface):
    """Sets what pyproject.toml calls dynamic, the version aside."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write URLs and description into the metadata."""
        root = Path(self.root)
        text = (root / "README.md").read_text(encoding="utf-8")
        urls = project_urls(os.environ)
        url = urls.get("Repository")
        metadata["urls"] = urls
        metadata["readme"] = {"content-type": "text/markdown", "text": description(text, url)}


def project_urls(environment: Mapping[str, str]) -> dict[str, str]:
    """List the URLs of the project that the environment names."""
    repository = environment.get("REPO_URL", "").rstrip("/")
    urls = {"Documentation": environment.get("SITE_URL", "")}
    if repository:
        urls |= {
            "Repository": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        }
    return {name: url for name, url in urls.items() if url}


def description(readme: str, url: str | None) -> str:
    """Make relative links absolute, or take them out.

    Parameters
    ----------
    readme : str
        Markdown.
    url : str or None
        Of the repository.

    Returns
    -------
    str
    """
    if url is None:
        return _LINK.sub(r"\1", _IMAGE.sub("", readme))
    readme = _IMAGE.sub(rf"![\1]({url.rstrip('/')}/raw/main/\2)\n", readme)
    return _LINK.sub(rf"[\1]({url.rstrip('/')}/blob/main/\2)", readme)
