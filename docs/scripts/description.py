# SPDX-License-Identifier: Apache-2.0
"""A hook of hatch: the README as the description on a package index.

A relative link leads nowhere there. With a project URL named Repository it leads into that. Without
one there is nothing to link to: links become their text, and images are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"^!\[([^\]]*)\]\((?!\w+:)([^)]+)\)\n", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)]+)\)")


class Description(MetadataHookInterface):
    """Sets the readme, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write the description into the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        url = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {"content-type": "text/markdown", "text": description(text, url)}


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
