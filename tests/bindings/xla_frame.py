# SPDX-License-Identifier: Apache-2.0
"""A call frame of XLA's without XLA, for handlers that launch on a GPU that is not there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import jax

from cumla.jax.handler import Execute, make_handler

_tables: list[Any] = []  # handlers remember functions by the table's address, which XLA keeps


class Xla:
    """Calls handlers as XLA does: `jaxlib/include/xla/ffi/api/c_api.h`."""

    def __init__(self, execute: Execute, stream: int = 7, device: int = 0) -> None:
        self.stream, self.device = stream, device
        self.buffer_bytes = 48  # of the struct
        self._handler = make_handler(execute)
        self._message = b""
        function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        functions = [function(f) for f in (self._make_error, self._get_stream, self._get_device)]
        self._api = (ctypes.c_int64 * 25)(200, 0, 24, 0, 3 << 32)
        for place, pointer in zip((6, 10, 23), functions, strict=True):
            self._api[place] = ctypes.cast(pointer, ctypes.c_void_p).value or 0
        _tables.append((self._api, functions))

    def _make_error(self, block: int) -> int:
        pointer = ctypes.c_int64.from_address(block + 16).value
        self._message = ctypes.string_at(pointer)
        return 1

    def _get_stream(self, block: int) -> int:
        ctypes.c_int64.from_address(block + 24).value = self.stream
        return 0

    def _get_device(self, block: int) -> int:
        ctypes.c_int32.from_address(block + 24).value = self.device
        return 0

    def frame(
        self,
        text: bytes,
        inputs: Sequence[tuple[int, Sequence[int]]],
        results: Sequence[tuple[int, Sequence[int]]],
    ) -> Any:
        """Describe a call; buffers are addresses and shapes."""
        kept: list[Any] = []

        def words(*values: int) -> int:
            kept.append((ctypes.c_int64 * max(len(values), 1))(*values))
            return ctypes.addressof(kept[-1])

        def buffers(of: Sequence[tuple[int, Sequence[int]]]) -> int:
            return words(*[words(self.buffer_bytes, 0, 11, at, len(s), words(*s)) for at, s in of])

        kept.append(ctypes.create_string_buffer(text))
        span = words(ctypes.addressof(kept[-1]), len(text))
        frame = (ctypes.c_int64 * 22)(
            *(168, 0, ctypes.addressof(self._api), 99, 3),
            *(40, 0, len(inputs), 0, buffers(inputs)),
            *(40, 0, len(results), 0, buffers(results)),
            *(48, 0, 1, 0, 0, words(span)),
        )
        frame.kept = kept
        return frame

    def call(self, frame: Any) -> str:
        """Call the handler: its error's message, or nothing."""
        self._message = b""
        failed = self._handler(ctypes.addressof(frame))
        assert bool(failed) == bool(self._message)
        return self._message.decode()

    def ask(
        self,
        frame_bytes: int = 168,
        inputs_bytes: int = 40,
        metadata_bytes: int = 36,
        table_bytes: int = 200,
        major: int = 0,
        has_table: bool = True,
    ) -> tuple[int, int, int]:
        """Ask for the metadata, with structs of these sizes: version, traits."""
        metadata = (ctypes.c_int64 * 6)(metadata_bytes, 24, 0, 0, 0, 0)
        extension = (ctypes.c_int64 * 4)(32, 1, 0, ctypes.addressof(metadata))
        self._api[0], self._api[4] = table_bytes, 3 << 32 | major
        frame = self.frame(b"", (), ())
        frame[0], frame[1], frame[5] = frame_bytes, ctypes.addressof(extension), inputs_bytes
        frame[2] *= has_table
        assert self.call(frame) == ""
        return metadata[3] & 0xFFFFFFFF, metadata[3] >> 32, metadata[4]


def custom_calls(function: Any, *arguments: Any, **named: Any) -> list[tuple[bytes, Any, Any]]:
    """Trace a function: of each call of cumla the static part, and the shapes of its buffers."""
    found = []

    def look(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "ffi_call":
                (text,) = dict(equation.params["attributes"]).values()
                shapes = [[v.aval.shape for v in vs] for vs in (equation.invars, equation.outvars)]
                found.append((text.encode(), *shapes))
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    look(inner)

    def traced_anew(*arguments: Any, **named: Any) -> Any:  # or JAX takes an earlier trace
        return function(*arguments, **named)

    look(jax.make_jaxpr(traced_anew)(*arguments, **named).jaxpr)
    return found
