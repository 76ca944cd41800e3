# SPDX-License-Identifier: Apache-2.0
"""The table of a function of another library: its names, its errors, and what it refuses."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cumla.compat._torch import is_traced
from cumla.core.names import local

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Interface"]


@dataclass(frozen=True, slots=True, eq=False)
class Interface:
    """The differences between functions of another library and those of cumla behind them.

    It is a context manager: errors that cumla raises inside name the arguments of the caller.
    Where ``torch.compile`` may trace the call, write ``with interface():``.
    """

    # cumla's name of an argument, such as "kv_cache[0]" -> the caller's.
    names: Mapping[str, str] = field(default_factory=dict)
    # The error that replaces TypeError and ValueError of cumla, if the library raises another.
    errors: type[Exception] | None = None
    # Argument without a counterpart -> why, and what to do. Its value is None, or `unused` has it.
    refused: Mapping[str, str] = field(default_factory=dict)
    unused: Mapping[str, object] = field(default_factory=dict)
    refusal: type[Exception] = NotImplementedError

    def naming(self, **names: str) -> Interface:
        """Return a table with more names."""
        return replace(self, names={**self.names, **names})

    def refused_by(self, function: Any) -> tuple[str, ...]:
        """List the refused arguments of a function."""
        names = inspect.signature(function).parameters
        return tuple([name for name in names if name in self.refused])

    def refuse(self, given: Mapping[str, Any], names: Iterable[str] | None = None) -> None:
        """Refuse arguments that cumla has no counterpart for, all or those of some names."""
        unused = self.unused
        for name in given if names is None else names:
            value = given[name]
            if value is None or value is unused.get(name) or name not in self.refused:
                continue
            is_array = bool(getattr(value, "ndim", 0))
            if name not in unused or is_array or value != unused[name]:
                raise self.refusal(f"{name}: {self.refused[name]}")

    def __call__(self) -> Any:
        return nullcontext() if is_traced() else self

    def __enter__(self) -> None:
        local.names = (self.names, getattr(local, "names", None))

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        local.names = local.names[1]
        if self.errors is not None and isinstance(error, (TypeError, ValueError)):
            raise self.errors(str(error)) from None
