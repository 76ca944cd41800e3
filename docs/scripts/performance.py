# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: the tables and figures of the performance page, from the recorded run.

The page's text is docs/performance.md; `{{ name }}` in it is what bench/page.py makes of
records/performance.json. If a kernel that was measured has changed since, the build fails.

    python docs/scripts/performance.py    # writes docs/figures/peers.svg and the README's rows
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import page as pages  # noqa: E402

RECORD = ROOT / "records/performance.json"
PAGE = "performance.md"
_record: dict[str, Any] = {}


def on_files(files: Any, *, config: Any) -> Any:
    """Read the record and add the figures."""
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import File

    try:
        _record.update(pages.read(RECORD))
    except pages.StaleRecordError as error:
        raise PluginError(f"{PAGE}: {error}") from error
    for path, figure in pages.figures(_record):
        files.append(File.generated(config, path, content=figure))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in what the page leaves open."""
    return pages.fill(markdown, _record) if page.file.src_uri == PAGE else markdown


def main() -> None:
    """Write the figure, and the README's rows."""
    record, readme = pages.read(RECORD), ROOT / "README.md"
    (ROOT / "docs/figures/peers.svg").write_text(pages.overview(record), encoding="utf-8")
    text = pages.with_readme_parts(readme.read_text(encoding="utf-8"), record)
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
