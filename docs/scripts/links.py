# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: links from a page to files of the repository that are not pages.

A script of the folder examples has a page, made by pages.py. With `repo_url` in mkdocs.yml other
links lead to the file there. Without it the site has nothing to link to, so the link becomes its
text. A link to a file that does not exist is an error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\.?/[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace the links of one page."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def replace(match: re.Match[str]) -> str:
        text, link = match.groups()
        path = posixpath.normpath(posixpath.join(folder, link.partition("#")[0]))
        if path.startswith("docs/"):
            return match[0]
        if re.fullmatch(r"examples/\w+\.py", path) and (ROOT / path).exists():
            made = posixpath.relpath(f"docs/{path.removesuffix('.py')}.md", folder)
            return f"[{text}]({made})"
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {path}, which does not exist")
        url = config.repo_url
        return f"[{text}]({url.rstrip('/')}/blob/main/{path})" if url else text

    return _LINK.sub(replace, markdown)
