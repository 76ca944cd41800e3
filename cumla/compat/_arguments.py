# SPDX-License-Identifier: Apache-2.0
"""Checks that the compatibility modules share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from opcode import opmap
from typing import Any, NoReturn

from cumla.compat._torch import import_torch
from cumla.core.names import arg

__all__ = [
    "check_axes",
    "check_given",
    "check_integers",
    "check_new_rows",
    "check_tensors",
    "missing_from",
    "refuse_gradients",
]


def check_tensors(**tensors: Any) -> None:
    """Check that these are tensors of PyTorch."""
    for name, tensor in tensors.items():
        if not hasattr(tensor, "new_empty"):
            kind = type(tensor)
            way_out = "pass a tensor"
            if isinstance(tensor, (list, tuple)) and any(hasattr(p, "new_empty") for p in tensor):
                way_out += (
                    ", such as torch.cat(..., dim=-1) of parts, or call cumla's own functions, "
                    "which take parts that are apart"
                )
            elif isinstance(tensor, (list, tuple)):
                way_out += (
                    ", such as torch.tensor(..., dtype=torch.int32) of lengths or page numbers"
                )
            if hasattr(tensor, "__dlpack__"):  # an array of another framework
                way_out += ", or call cumla's own functions, which take it"
            raise TypeError(
                f"{arg(name)}: needs a PyTorch tensor, got {kind.__module__}.{kind.__qualname__}; "
                f"{way_out}"
            )


def check_given(**tensors: Any) -> None:
    """Check that these are tensors of PyTorch, or None."""
    check_tensors(**{name: tensor for name, tensor in tensors.items() if tensor is not None})


def check_axes(name: str, tensor: Any, *forms: str) -> None:
    """Check the number of axes against forms such as ``"batch, next_n"``."""
    if len(tensor.shape) not in [form.count(",") + 1 for form in forms]:
        wanted, shape = " or ".join(f"({form})" for form in forms), tuple(tensor.shape)
        raise ValueError(f"{arg(name)}: needs axes {wanted}, got shape {shape}; reshape it")


def check_integers(kinds: tuple[str, ...] = ("int32", "int64"), /, **tensors: Any) -> None:
    """Check the dtypes of lengths, offsets and indices."""
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in kinds:
            raise TypeError(
                f"{arg(name)}: needs {' or '.join(kinds)}, got {dtype}; convert it first"
            )


def check_new_rows(**pairs: tuple[Any, Any]) -> None:
    """Check that rows have the dtype of the caches they are written to, unless that is FP8."""
    if len({cache.dtype for _, cache in pairs.values()}) > 1:
        return  # then a cache is wrong, and append_kv_cache says so
    for name, (rows, cache) in pairs.items():
        if cache.dtype.itemsize > 1 and rows.dtype != cache.dtype:
            need, got = (str(tensor.dtype).removeprefix("torch.") for tensor in (cache, rows))
            raise TypeError(f"{arg(name)}: needs the cache's dtype {need}, got {got}; convert it")


def missing_from(module: str, library: str, **instead: str) -> Callable[[str], NoReturn]:
    """Make the ``__getattr__`` of a module, which says where a name that it lacks comes from.

    `instead` names what takes the place of some of them here.

    Python replaces an `AttributeError` in ``from module import name`` by its own text, so that
    import gets an `ImportError`; everything else, `hasattr` among it, an `AttributeError`.
    """

    def __getattr__(name: str) -> NoReturn:
        caller = sys._getframe(1)
        imports = caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]
        way = f"use {instead[name]}, or " if name in instead else ""
        raise (ImportError if imports else AttributeError)(
            f"{name}: {module} does not have it; {way}import it from {library}", name=name
        )

    return __getattr__


def refuse_gradients(**tensors: Any) -> None:
    """Refuse tensors that require a gradient, while gradients are recorded; None is no tensor."""
    if import_torch().is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise NotImplementedError(
                    f"{name}: requires a gradient, and cumla has no backward pass; call this under "
                    f"torch.no_grad(), or pass {arg(name)}.detach()"
                )
