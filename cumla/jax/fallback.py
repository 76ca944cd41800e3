# SPDX-License-Identifier: Apache-2.0
"""Calls without a handler, for a JAX whose layout `cumla.jax.handler` does not know.

JAX's own `buffer_callback` hands over the buffers, so that nothing depends on XLA's structs.
Checks, launches and results are the same, and caches are written in place. What is lost is
said in `cumla.jax`; Python runs for each call in each execution.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax

from cumla.core._dlpack import DLTensor, ordinal
from cumla.errors import CumlaError
from cumla.jax.execute import on_cpu, on_gpu
from cumla.jax.handler import KNOWN, message_of, unknown_layout_error

__all__ = ["callback"]

_log = logging.getLogger(__name__)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Execution(NamedTuple):
    """One execution of a call, as JAX tells it."""

    context: Any  # jax.experimental.buffer_callback.ExecutionContext
    buffers: tuple[Any, ...]  # arguments, then results
    ordinal: int | None

    def stream(self) -> int:
        return int(self.context.stream)

    def device(self) -> int:
        assert self.ordinal is not None
        return self.ordinal

    def check(self, shapes: list[tuple[int, ...]]) -> None:
        found = [tuple(buffer.shape) for buffer in self.buffers]
        if found != shapes:
            raise CumlaError(f"JAX passes buffers of shapes {found}, not {shapes}; report this")


def callback(
    text: str, shapes: tuple[Any, ...], options: dict[str, Any], unknown: str
) -> Callable[..., Any]:
    """Make the function of arrays that calls back through JAX.

    `CumlaError` if this JAX has no `buffer_callback`; a warning, once, if it has. `unknown` is why
    there is no handler.
    """
    try:
        from jax.experimental.buffer_callback import buffer_callback
    except ImportError:
        instead = ", and has no jax.experimental.buffer_callback, which is used then (JAX 0.6.1)"
        raise unknown_layout_error(unknown, instead) from None
    _warn(unknown)
    static = text.encode()

    def run(context: Any, results: tuple[Any, ...], *arguments: Any) -> None:
        try:
            buffers = arguments + results
            device = ordinal("buffer", *buffers[0].__dlpack_device__())
            execute = on_cpu if device is None else on_gpu
            addresses = tuple(map(_address, buffers))
            execute(static, addresses, _Execution(context, buffers, device))
        except BaseException as error:
            raise CumlaError(message_of(error)) from None

    function: Callable[..., Any] = buffer_callback(run, shapes, **options)
    return function


def _address(buffer: Any) -> int:
    """Read the address of a buffer, by DLPack; NumPy's and CUDA's interfaces are for one each.

    The capsule is not consumed. It goes with what it describes, and the memory is XLA's.
    """
    capsule = buffer.__dlpack__()
    return DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")).data or 0


@cache
def _warn(unknown: str) -> None:
    _log.warning(
        "JAX %s calls handlers in a way that cumla.jax does not know (%s; known: %s). Calls inside "
        "jax.jit use jax.experimental.buffer_callback instead. Results are the same; XLA runs "
        "Python for each call of cumla in each execution, without command buffers, and such "
        "programs cannot be exported.",
        jax.__version__,
        unknown,
        KNOWN,
    )
