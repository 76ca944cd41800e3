# SPDX-License-Identifier: Apache-2.0
"""A figure of ratios as SVG: a line for each row, a dot for each library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

LEVEL = 0.995  # of another library's time / cumla's: below, that library is ahead

# Told apart by readers who see red and green alike (Okabe and Ito 2008); red is for what is ahead.
_COLORS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_AHEAD, _GRID, _TEXT = "#c62828", "#d0d0d0", "#222222"
_WIDTH, _LABELS, _LINE, _TOP, _BOTTOM = 820, 250, 17, 52, 34
_TICKS = (
    0.1,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    1.0,
    1.1,
    1.2,
    1.4,
    1.7,
    2.0,
    3.0,
    4.0,
    6.0,
    10.0,
    20.0,
)

Dots = list[tuple[str, list[tuple[str, float]]]]  # a line's label, and its (peer, x)


def draw(title: str, lines: Dots, means: Mapping[int, float] | None = None) -> str:
    """Draw an SVG: a line for each label, a dot for each x; what is left of 1 is red.

    `means` are marks at the means of lines, by their place.
    """
    every = [x for _, dots in lines for _, x in dots] or [1.0]
    low, high = min(0.9, min(every) * 0.97), max(1.2, max(every) * 1.03)
    scale = (_WIDTH - _LABELS - 30) / math.log(high / low)
    height = _TOP + _LINE * len(lines) + _BOTTOM
    bottom = height - _BOTTOM

    def at(x: float) -> float:
        return _LABELS + 10 + scale * math.log(x / low)

    def text(x: float, y: float, words: str, color: str = _TEXT, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}"{more}>{escape(words)}</text>'

    peers = list(dict.fromkeys(peer for _, dots in lines for peer, _ in dots))
    colors = dict(zip(peers, _COLORS * len(peers), strict=False))
    size = f'width="{_WIDTH}" height="{height}"'
    red = f'x="{at(low):.1f}" width="{at(1.0) - at(low):.1f}" height="{bottom - _TOP}"'
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {size}>',
        '<g font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect {size} fill="white"/>',
        f'<rect {red} y="{_TOP}" fill="#fdecea"/>',
        text(10, 18, title, more=' font-size="13" font-weight="bold"'),
    ]
    for tick in _TICKS:
        if low <= tick <= high:
            stroke = f'stroke="{_TEXT if tick == 1.0 else _GRID}"'
            both = f'x1="{at(tick):.1f}" x2="{at(tick):.1f}"'
            found.append(f'<line {both} y1="{_TOP}" y2="{bottom}" {stroke}/>')
            found.append(text(at(tick), bottom + 13, f"{tick:g}", more=' text-anchor="middle"'))
    words = "time / cumla's time: right of 1 cumla is faster, red: the other one"
    found.append(text(at(low), bottom + 27, words))
    begin = _LABELS + 10.0
    for peer in peers:
        found.append(f'<circle cx="{begin:.0f}" cy="38" r="4.5" fill="{colors[peer]}"/>')
        found.append(text(begin + 9, 42, peer))
        begin += 28 + 7.2 * len(peer)
    for place, (label, dots) in enumerate(lines):
        y = _TOP + _LINE * (place + 0.5)
        ahead = min((x for _, x in dots), default=1.0) < LEVEL
        more = ' text-anchor="end"' + (' font-weight="bold"' if ahead else "")
        found.append(text(_LABELS, y + 4, label, _AHEAD if ahead else _TEXT, more))
        for peer, x in dots:
            color = _AHEAD if x < LEVEL else colors[peer]
            ring = f' stroke="{colors[peer]}" stroke-width="1.5"'
            found.append(
                f'<circle cx="{at(x):.1f}" cy="{y:.1f}" r="4" fill="{color}"{ring}>'
                f"<title>{escape(f'{label}: {peer} {x:.2f}')}</title></circle>"
            )
        if means and place in means:
            both = f'x1="{at(means[place]):.1f}" x2="{at(means[place]):.1f}"'
            span = f'y1="{y - 8:.1f}" y2="{y + 8:.1f}"'
            found.append(f'<line {both} {span} stroke="{_TEXT}" stroke-width="2.5"/>')
    return "\n".join((*found, "</g>", "</svg>")) + "\n"
