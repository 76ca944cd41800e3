# SPDX-License-Identifier: Apache-2.0
"""Sections and their cases, which cumla and other libraries compute alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Call = Callable[[], Any]
Shape = Mapping[str, Any]


class Variant(NamedTuple):
    """A way in which a library can be asked for the same: by builds, splits, entry points."""

    name: str
    call: Call  # queues the work on PyTorch's current stream and returns what it computes


@dataclass(frozen=True)
class Case:
    """One row of a section."""

    run: Call  # cumla's call
    error: Callable[[Any], float]  # of what a call returned, against float64
    limit: float  # the largest error that is right
    nbytes: int = 0  # that have to move
    flops: int = 0
    product: str = "bfloat16"  # the dtype whose products bound it
    peers: Mapping[str, list[Variant]] = field(default_factory=dict)
    peer_limit: float = 2e-2  # for libraries, some of which round more


@dataclass(frozen=True)
class Section:
    """A table of the performance page."""

    name: str
    title: str
    about: str  # what the reader has to know, Markdown
    columns: Mapping[str, str]  # headings, by key of a shape
    shapes: tuple[Shape, ...]
    build: Callable[..., Case]  # (lab, **shape)
    baseline: Mapping[str, str] = field(default_factory=dict)  # peers that are no library: headings

    def libraries(self, peers: Iterable[str]) -> list[str]:
        """Those of the peers that are libraries."""
        return [peer for peer in dict.fromkeys(peers) if peer not in self.baseline]

    def label(self, shape: Shape) -> str:
        """Name a row, short enough for a figure."""
        return " ".join(_word(key, value) for key, value in shape.items() if _word(key, value))


_FORMS = {  # of numbers; the usual value of the others goes without saying
    "batch": "b{}", "queries": "s{}", "decodes": "+ {} decodes", "heads": "h{}", "kv_len": "kv{}",
    "extra": "+ {}", "rows": "r{}", "width": "w{}", "page": "p{}", "tokens": "t{}",
    "parts": "{} of",
}  # fmt: skip
_USUAL = {"queries": 1, "decodes": 0, "lengths": "equal", "more": "", "rotated": False}


def _word(key: str, value: Any) -> str:
    if key in _USUAL and value == _USUAL[key]:
        return ""
    return key if value is True else _FORMS.get(key, "{}").format(value)


def shapes(keys: str, *rows: tuple[Any, ...]) -> tuple[Shape, ...]:
    """Make shapes from rows of values."""
    return tuple(dict(zip(keys.split(), row, strict=True)) for row in rows)
