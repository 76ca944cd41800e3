# SPDX-License-Identifier: Apache-2.0
"""Shared by the plugins of engines: replacing an engine's functions, and refusals."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def refusal(model: Any, message: str) -> NotImplementedError:
    """Make the error of what a model or its server asks for, and cumla does not have.

    Parameters
    ----------
    model : object
        The engine's configuration of the model: of vLLM its `model`, of SGLang its `model_path`,
        and the `architectures` of its `hf_config`. What is missing is left out.
    message : str
        The feature's name, what cumla needs, what came, and the way out.

    Returns
    -------
    NotImplementedError
        The message, and the name of the model.
    """
    classes = getattr(getattr(model, "hf_config", None), "architectures", None) or ()
    path = getattr(model, "model", None) or getattr(model, "model_path", None)
    of = " of ".join(filter(None, (", ".join(classes), path)))
    return NotImplementedError(f"{message}; the model is {of}" if of else message)


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
