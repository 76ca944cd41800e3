# SPDX-License-Identifier: Apache-2.0
"""What models of the kernels follow: marked functions and constants of cumla/cuda.

A comment ``// model: name`` above a function, a struct or a statement of a kernel says that the
model of that name in tests/launch follows it. The tests keep a digest of what is marked, in which
comments, white space and the names of variables do not count: it changes with an operator, a
number, a call or a member, and then the model has to follow.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources

from cumla.launch.source import strip_comments

__all__ = ["constant", "modelled"]

_MARK = re.compile(r"^[ ]*// model: (.*)$", re.MULTILINE)
_TOKEN = re.compile(r"\w+|\S")
_NAME = re.compile(r"(?!k[A-Z])[A-Za-z_]\w*")


@cache
def _text(file: str) -> str:
    return resources.files("cumla").joinpath(f"cuda/{file}").read_text("utf-8")


def constant(file: str, name: str) -> str:
    """The expression that a constant of a kernel is initialised with, as it stands there."""
    (found,) = re.findall(rf"constexpr int (?:\w+ = [^,;]+, )*{name} = ([^,;]+)", _text(file))
    return str(found)


def modelled(file: str, model: str) -> str:
    """Digest of what a file has marked for a model, in eight hexadecimal digits."""
    text = _text(file)
    marks = (m for m in _MARK.finditer(text) if model in m[1].split(", "))
    parts = [_without_names(_marked(strip_comments(text[mark.end() :]))) for mark in marks]
    assert parts, f"{file} has no mark `// model: {model}`"
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _marked(code: str) -> str:
    """The function, struct or statement with which code begins."""
    depth = 0
    for found in re.finditer(r"[{}();]", code):
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(found[0], 0)
        if depth == 0 and found[0] in "};":
            return code[: found.end()]
    raise AssertionError("a mark without an end")


def _without_names(code: str) -> str:
    """Code with its variables numbered in their order; calls, members and constants keep names."""
    tokens = _TOKEN.findall(code)
    numbers: dict[str, int] = {}
    bare = []
    for before, token, after in zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False):
        if _NAME.fullmatch(token) and after != "(" and before not in (".", ">", ":"):
            token = f"${numbers.setdefault(token, len(numbers))}"
        bare.append(token)
    return " ".join(bare)
