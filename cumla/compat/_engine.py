# SPDX-License-Identifier: Apache-2.0
"""Functions in the place of an engine's own: its modules call them by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def put_in_place(
    homes: Mapping[str, Iterable[str]],
    ours: Mapping[str, Any],
    refused: Callable[[str], Exception],
) -> None:
    """Replace functions of an engine by those of the same names in `ours`: all of them, or none.

    Parameters
    ----------
    homes : mapping
        Names of the engine's modules, and of the functions that each of them calls.
    ours : mapping
        Functions by these names.
    refused : function
        Makes the error for the first name that a module does not have, ``module.function``.

    Raises
    ------
    ImportError
        The engine has no module of a name.
    """
    places = [(import_module(home), name) for home, names in homes.items() for name in names]
    for module, name in places:
        if not callable(getattr(module, name, None)):
            raise refused(f"{module.__name__}.{name}")
    for module, name in places:
        setattr(module, name, ours[name])
