# SPDX-License-Identifier: Apache-2.0
"""The table of a function of another library: its names, its errors, and what it refuses."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cumla.compat._torch import is_traced

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Interface"]


@dataclass(frozen=True, slots=True, eq=False)
class Interface:
    """How functions of another library differ from those of cumla that compute their results.

    It is a context manager: errors that cumla raises inside name the arguments of the caller.
    Where ``torch.compile`` may trace the call, write ``with interface():``.
    """

    # cumla's name of an argument, such as "kv_cache[0]" -> the caller's.
    names: Mapping[str, str] = field(default_factory=dict)
    # What a TypeError or ValueError of cumla becomes, where the library raises one for both.
    errors: type[Exception] | None = None
    # Argument without a counterpart -> why, and what to do. Its value is None, or `unused` has it.
    refused: Mapping[str, str] = field(default_factory=dict)
    unused: Mapping[str, object] = field(default_factory=dict)
    refusal: type[Exception] = NotImplementedError

    def naming(self, **names: str) -> Interface:
        """Return a table with more names."""
        return replace(self, names={**self.names, **names})

    def refuse(self, given: Mapping[str, Any]) -> None:
        """Refuse arguments that ask for what cumla does not have."""
        refused = self.refused
        for name, value in given.items():
            if value is not None and name in refused and not self._is_unused(name, value):
                raise self.refusal(f"{name}: {refused[name]}")

    def _is_unused(self, name: str, value: Any) -> bool:
        return name in self.unused and not getattr(value, "ndim", 0) and value == self.unused[name]

    def __call__(self) -> Any:
        return nullcontext() if is_traced() else self

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, (TypeError, ValueError)):
            raise (self.errors or type(error))(self._renamed(str(error))) from None

    def _renamed(self, message: str) -> str:
        """Put the caller's names into a message."""
        if not self.names:
            return message
        longest_first = "|".join(map(re.escape, sorted(self.names, key=len, reverse=True)))
        pattern = rf"(?<![\w.])({longest_first})(?!\w)"
        return re.sub(pattern, lambda found: self.names[found[0]], message)
