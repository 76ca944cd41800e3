# SPDX-License-Identifier: Apache-2.0
"""PyTorch, for the compatibility modules, and what several of them compute with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

__all__ = ["import_torch", "is_traced", "plainly", "positions_of"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def import_torch() -> Any:
    """Import PyTorch, or say that it is needed."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "this module of cumla.compat needs PyTorch, which cannot be imported; install it: pip "
            "install torch, or call cumla's own functions, which take arrays of NumPy, CuPy and JAX"
        ) from error
    return torch


def is_traced() -> bool:
    """Return whether torch.compile or torch.export is tracing the call."""
    return bool(import_torch().compiler.is_compiling())


def plainly(function: _Function) -> _Function:
    """Call a function that makes no tensor without torch's modes, unless it is traced.

    A default device is such a mode, in which each attribute of a tensor takes 2 us.
    """

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if is_traced():
            return function(*args, **named)
        with import_torch()._C.DisableTorchFunction():
            return function(*args, **named)

    return call  # type: ignore[return-value]


def positions_of(offsets: Any, first: Any, tokens: int, step: int = 1) -> Any:
    """Return the position of each token: `first` of its request, plus `step` for each token.

    `offsets` are ``(batch + 1,)``, `first` is ``(batch,)``. Tokens of no request get any number.
    """
    torch = import_torch()
    numbers = torch.arange(tokens, dtype=offsets.dtype, device=offsets.device)
    request = torch.searchsorted(offsets[1:], numbers, right=True)
    first = torch.cat([first, first.new_zeros(1)])[request]  # one more: tokens of no request
    return first + (numbers - offsets[request]) * step
