# SPDX-License-Identifier: Apache-2.0
"""Handlers that XLA calls, through ctypes: its foreign function interface, `xla/ffi/api/c_api.h`.

XLA passes the address of a call frame, and everything else is found from there by fixed offsets,
which XLA keeps within a major version of the interface. Nothing is compiled. Memory is read with
`struct`, through one array that covers all of it: attributes of `ctypes.Structure` take ten times
as long, and a callback is to take no more than 5 us.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax

from cumla.errors import CumlaError

__all__ = ["KNOWN", "Frame", "message_of", "register", "unknown_layout", "unknown_layout_error"]

KNOWN = "XLA's foreign function interface 0.1 and later 0.x, of JAX 0.5 to 0.11"
_MAJOR = 0
# Bytes of the 64-bit structs of version 0.1, which later minor versions only extend at their ends.
_FRAME_BYTES, _LIST_BYTES, _BUFFER_BYTES, _METADATA_BYTES = 168, 40, 48, 36
# Call frame: extension 8, api 16, context 24; arguments 40, results 80, attributes 120, each a list
# with its number of entries at 16 and their addresses at 32 (attributes: 40).
_FRAME = struct.Struct("<8x3q24xq8xq16xq8xq40xq")
_LISTS = (40, 80, 120)
# Buffer: address 24, rank 32, address of the sizes 40.
_RANK = 32
# Functions in the table at `api`.
_ERROR_CREATE, _STREAM_GET, _DEVICE_GET = 48, 80, 184
_MAJOR_AT = 32  # in that table
_METADATA = 1  # the extension in which XLA asks for version and traits
_VERSION = (0, 1)
_COMMAND_BUFFERS = 1  # trait: launches may be captured once and replayed
_INVALID_ARGUMENT, _INTERNAL = 3, 13

_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_Function = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)  # none of those used here waits
_Block = ctypes.c_int64 * 4  # arguments of such a function: size, extension, and two of its own
_memory: Any = (ctypes.c_char * ((1 << 62) - 1)).from_address(0)  # of the process
_frame_at = _FRAME.unpack_from
_word_at = struct.Struct("<q").unpack_from
_pair_at = struct.Struct("<2q").unpack_from
_data_at = struct.Struct("<24xq").unpack_from  # of a buffer
_put_half = struct.Struct("<i").pack_into

_handlers: list[object] = []  # alive as long as the process
_unknown: list[str] = []  # what XLA's questions for the metadata had that is not known here


class _Question(threading.local):
    """Arguments of a function of the table, for each thread."""

    def __init__(self) -> None:
        self.block = _Block(32, 0, 0, 0)
        self.address = ctypes.addressof(self.block)


_question = _Question()


@cache
def _function(api: int, offset: int) -> Any:
    """Look a function of XLA's table up."""
    (size,) = _word_at(_memory, api)
    if size < offset + 8:
        raise unknown_layout_error(f"a table of {size} bytes")
    return _Function(*_word_at(_memory, api + offset))


@cache
def _words_at(count: int) -> Any:
    """Make what reads so many words."""
    return struct.Struct(f"<{count}q").unpack_from


class Frame(NamedTuple):
    """One execution of a call: what XLA passes."""

    address: int
    api: int
    context: int
    buffers: tuple[int, ...]  # addresses of the descriptions of arguments, then of results

    def stream(self) -> int:
        """Ask for the CUstream handle."""
        return self._ask(_STREAM_GET)

    def device(self) -> int:
        """Ask for the CUDA ordinal."""
        return self._ask(_DEVICE_GET) & 0xFFFFFFFF

    def _ask(self, function: int) -> int:
        block = _question.block
        block[2], block[3] = self.context, 0
        if _function(self.api, function)(_question.address):
            raise CumlaError(f"XLA does not answer a handler (function at {function}); report this")
        return block[3]

    def check(self, shapes: list[tuple[int, ...]]) -> None:
        """Compare what XLA passes with the shapes of arguments and results.

        `CumlaError` for another layout than the one that is known here.
        """
        sizes = _sizes(self.address)
        if not _are_known(sizes) or len(self.buffers) != len(shapes):
            raise unknown_layout_error(f"structs of {sizes} bytes, {len(self.buffers)} buffers")
        for buffer, shape in zip(self.buffers, shapes, strict=True):
            (size,) = _word_at(_memory, buffer)
            rank, sizes = _pair_at(_memory, buffer + _RANK)
            if size < _BUFFER_BYTES or rank != len(shape):
                raise unknown_layout_error(f"a buffer of rank {rank}, not {len(shape)}")
            found = _words_at(rank)(_memory, sizes)
            if found != shape:
                raise unknown_layout_error(f"a buffer of shape {found}, not {shape}")


def _sizes(frame: int) -> list[int]:
    """Bytes of a call frame and of its three lists."""
    return [_word_at(_memory, frame + at)[0] for at in (0, *_LISTS)]


def _are_known(sizes: list[int]) -> bool:
    return sizes[0] >= _FRAME_BYTES and min(sizes[1:]) >= _LIST_BYTES


def unknown_layout_error(found: str, instead: str = "") -> CumlaError:
    """Make the error of a JAX whose calls cannot be read."""
    return CumlaError(
        f"JAX {jax.__version__} calls handlers in a way that cumla.jax does not know "
        f"({found}){instead}; use a JAX from 0.5 to 0.11, or call cumla outside jax.jit"
    )


def unknown_layout() -> str:
    """Return what of the installed JAX's layout is not known here; "" if all is as it should be.

    The version is known from the import on. XLA shows its sizes when a backend starts, which it
    does before it compiles anything.
    """
    return _shipped() or (_unknown[0] if _unknown else "")


@cache
def _shipped() -> str:
    """Compare the major version in the header that jaxlib ships, if it does."""
    try:
        header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text(encoding="utf-8")
    except OSError:
        return ""
    major = re.search(r"#define XLA_FFI_API_MAJOR (\d+)", header)
    return "" if major is None or int(major[1]) == _MAJOR else f"major version {major[1]}"


def _asked(frame: int, api: int, metadata: int) -> str:
    """Compare what XLA passes when it asks for the metadata; "" if all is known."""
    sizes = _sizes(frame)
    (size,) = _word_at(_memory, metadata)
    if not _are_known(sizes) or size < _METADATA_BYTES:
        return f"structs of {[*sizes, size]} bytes"
    if api:  # JAX 0.5 and 0.6 pass no table in this call
        major = _word_at(_memory, api + _MAJOR_AT)[0] & 0xFFFFFFFF
        (size,) = _word_at(_memory, api)
        if major != _MAJOR or size < _DEVICE_GET + 8:
            return f"major version {major}, a table of {size} bytes"
    return ""


Execute = Callable[[bytes, tuple[int, ...], Frame], None]


def register(target: str, platform: str, execute: Execute) -> None:
    """Have XLA call a function under a name, on a platform, for the life of the process.

    `execute` takes the bytes of the call's one attribute, the addresses of all buffers, arguments
    first, and the frame. What it raises ends the computation with its message. With a major version
    that is not known nothing is registered: XLA would refuse it, and the backend would not start.
    """
    if _shipped():
        return
    handler = make_handler(execute)
    _handlers.append(handler)
    address = ctypes.cast(handler, ctypes.c_void_p).value
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(address), platform=platform)


def make_handler(execute: Execute) -> Any:
    """Make the C function; it is gone when the object is."""

    def handle(frame: int) -> int | None:
        api = 0
        try:
            extension, api, context, inputs, at_inputs, results, at_results, attributes = _frame_at(
                _memory, frame
            )
            if extension and _word_at(_memory, extension + 8)[0] & 0xFFFFFFFF == _METADATA:
                (metadata,) = _word_at(_memory, extension + 24)
                _unknown.extend(filter(None, [_asked(frame, api, metadata)]))
                _answer(metadata)
                return None
            buffers = _words_at(inputs)(_memory, at_inputs) if inputs else ()
            buffers += _words_at(results)(_memory, at_results)
            addresses = tuple([_data_at(_memory, buffer)[0] for buffer in buffers])
            begin, length = _pair_at(_memory, *_word_at(_memory, attributes))
            text = _memory[begin : begin + length]
            execute(text, addresses, Frame(frame, api, context, buffers))
        except BaseException as error:  # nothing may pass through XLA's frames
            return _failed(api, message_of(error), error)
        return None

    return _Handler(handle)


def _answer(metadata: int) -> None:
    """Tell XLA the version that this layout is of, and that launches may be replayed."""
    for offset, value in ((24, _VERSION[0]), (28, _VERSION[1]), (32, _COMMAND_BUFFERS)):
        _put_half(_memory, metadata + offset, value)


def message_of(error: BaseException) -> str:
    """Tell an exception's type and text, without what C++ cannot hold: that ends the process."""
    try:
        return f"{type(error).__name__}: {error}".encode(errors="replace").decode()
    except BaseException:  # of __str__
        return type(error).__name__


def _failed(api: int, text: str, error: BaseException) -> int:
    """Make XLA's error of an exception."""
    code = _INVALID_ARGUMENT if isinstance(error, (TypeError, ValueError)) else _INTERNAL
    message = ctypes.create_string_buffer(text.encode())
    block = _Block(28, 0, ctypes.addressof(message), code)
    return int(_function(api, _ERROR_CREATE)(ctypes.addressof(block)) or 0)
