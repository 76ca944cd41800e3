# SPDX-License-Identifier: Apache-2.0
"""A progress bar on standard error, silent where nobody watches."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

_WIDTH = 30


class ProgressBar:
    """Shows how many of a known number of steps are done, if the stream is a terminal."""

    def __init__(self, label: str, total: int, *, stream: TextIO | None = None) -> None:
        self._label, self._total, self._done, self._shown = label, total, 0, 0
        self._stream = sys.stderr if stream is None else stream
        self._visible = self._stream.isatty()

    def __enter__(self) -> ProgressBar:
        self._draw("")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._visible:
            self._stream.write("\n")
            self._stream.flush()

    def advance(self, *, note: str = "") -> None:
        """Count one step as done; the note is shown after the bar until the next step."""
        self._done += 1
        self._draw(note)

    def _draw(self, note: str) -> None:
        if not self._visible:
            return
        filled = _WIDTH * self._done // max(self._total, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        line = f"{self._label} [{bar}] {self._done}/{self._total} {note}".rstrip()
        self._stream.write("\r" + line.ljust(self._shown))
        self._stream.flush()
        self._shown = len(line)
