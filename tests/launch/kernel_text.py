# SPDX-License-Identifier: Apache-2.0
"""The text of the kernels, to which models of them are tied."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib import resources

from cumla.launch.source import strip_comments

__all__ = ["assert_in_order", "in_one_line"]


@cache
def in_one_line(name: str) -> str:
    """A file of cumla/cuda without comments, its white space single blanks."""
    text = resources.files("cumla").joinpath(f"cuda/{name}").read_text("utf-8")
    return re.sub(r"\s+", " ", strip_comments(text))


def assert_in_order(name: str, lines: Iterable[str]) -> None:
    """Hold that a file has these pieces of text, one behind the other."""
    source, at = in_one_line(name), 0
    for line in lines:
        assert line in source[at:], line
        at = source.index(line, at) + len(line)
