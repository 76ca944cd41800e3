# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe: docstrings in the form from which it makes pages.

A role, such as :func:`cumla.mla_decode`, becomes a link if the name has a page, and code if not.
``::`` before a block of code becomes a colon. Parameters that share a description, ``a, b : int``,
get an entry each: griffe gives all of a group the type and the default of the first.
"""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`~?([\w.]+)`")
_CODE_FOLLOWS = re.compile(r"::(?=\n\n +)")
_PARAMETERS = re.compile(r"^Parameters\n-+\n(?s:.*?)(?=^\S.*\n-+$|\Z)", re.MULTILINE)
_GROUP = re.compile(r"^(\S+(?:, \S+)+)( : .*)?((?:\n+ .*)+)", re.MULTILINE)


def names_with_a_page() -> set[str]:
    """Names that the API pages show."""
    spec = spec_from_file_location("pages", Path(__file__).with_name("pages.py"))
    assert spec is not None and spec.loader is not None
    pages = module_from_spec(spec)
    spec.loader.exec_module(pages)
    return set(pages.names_with_a_page())


def split_groups(text: str) -> str:
    """Give each parameter of a docstring an entry of its own."""

    def split(group: re.Match[str]) -> str:
        names, kind, description = group.groups("")
        return "\n".join(f"{name}{kind}{description}" for name in names.split(", "))

    return _PARAMETERS.sub(lambda section: _GROUP.sub(split, section[0]), text)


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def __init__(self) -> None:
        super().__init__()
        self._names = names_with_a_page()

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = _ROLE.sub(self._link, obj.docstring.value)
            obj.docstring.value = split_groups(_CODE_FOLLOWS.sub(":", text))

    def _link(self, match: re.Match[str]) -> str:
        name = match[1]
        name = name if name.startswith("cumla.") else f"cumla.{name}"
        owner = name.rpartition(".")[0]  # of a method
        is_member = owner in self._names and owner.rpartition(".")[2][:1].isupper()
        has_page = name in self._names or is_member
        return f"[`{match[1]}`][{name}]" if has_page else f"`{match[1]}`"
