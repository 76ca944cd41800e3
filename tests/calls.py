# SPDX-License-Identifier: Apache-2.0
"""A call of every public operation and plan that works, as data: the tests that hold for all of
them go through these tables. Arrays are NumPy's; `FakeCuPy.like` puts them on a GPU."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.core.spec import SPECS, Cache, Instead

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
Arguments = dict[str, Any]


class Operation(NamedTuple):
    """A public function, with arguments and outputs of a call."""

    function: Callable[..., Any]
    make: Callable[[], Arguments]
    outputs: Callable[[], Arguments]  # those that the function would allocate
    kernels: tuple[str, ...]  # that the call launches
    integers: tuple[str, ...] = ()  # arguments that the check mode looks at
    any_values: tuple[str, ...] = ()  # of these: all values are in order
    empty: tuple[tuple[str, ...], ...] = ()  # cut to nothing on their first axes
    shares: tuple[tuple[str, str], ...] = ()  # what is written to, and may lie in memory of another

    def __call__(self, **changes: Any) -> Any:
        return self.function(**self.make() | changes)

    @property
    def in_place(self) -> tuple[str, ...]:
        """Arguments that are written to and not returned."""
        spec, given = SPECS[self.function.__name__], self.make()
        rotated = [instead.of for instead in spec.rows(Instead) if instead.of in given]
        return (*[cache.name for cache in spec.rows(Cache)], *rotated)


class Planned(NamedTuple):
    """A plan, with what it takes from the arguments of its operation's call."""

    operation: str
    kind: Any
    numbers: Arguments  # by the class
    updates: int = 1  # kernels that an update launches, the first of the call's
    fixed: tuple[str, ...] = ()  # options of the call that the plan is made with

    @property
    def made_of(self) -> tuple[str, ...]:
        """What `from_arrays` takes of the call."""
        names = inspect.signature(self.kind.from_arrays).parameters
        return tuple(picked(OPERATIONS[self.operation].make(), tuple(names)))

    @property
    def updated_with(self) -> tuple[str, ...]:
        """What an update takes of the call."""
        operation = OPERATIONS[self.operation]
        return tuple(picked(operation.make(), SPECS[operation.function.__name__].planned))

    def make(self, arguments: Arguments, **options: Any) -> Any:
        return self.kind.from_arrays(**picked(arguments, self.made_of), **options)

    def lengths(self, arguments: Arguments) -> Arguments:
        return picked(arguments, self.updated_with)

    def sizes(self) -> Arguments:
        """What `workspace_bytes` takes of the numbers."""
        return picked(self.numbers, tuple(inspect.signature(self.kind.workspace_bytes).parameters))

    def inputs(self, arguments: Arguments) -> Arguments:
        """What a run takes."""
        return {n: v for n, v in arguments.items() if n not in (*self.updated_with, *self.fixed)}

    def ready(self, arguments: Arguments, **options: Any) -> Any:
        """Make a plan, and update it."""
        plan = self.make(arguments, **options)
        plan.update(**self.lengths(arguments))
        return plan


def picked(arguments: Arguments, names: tuple[str, ...]) -> Arguments:
    return {name: arguments[name] for name in names if name in arguments}


def numbers(*shape: int, dtype: Any = BF16) -> Any:
    return _numbers(shape, np.dtype(dtype)).copy()


@cache
def _numbers(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def int32(*values: Any) -> Any:
    return np.array(values, np.int32)


def aligned(shape: tuple[int, ...], dtype: Any = BF16, shift: int = 0) -> Any:
    """Zeros at `shift` bytes after a multiple of 64."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + shift
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)


def spread(shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> Any:
    """Zeros with these byte strides, in memory that they need not share."""
    reach = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = aligned((reach + np.dtype(dtype).itemsize,), np.uint8)
    return np.ndarray(shape, dtype, memory, strides=strides)


def every_other(array: Any) -> Any:
    """The same values, a gap after each of the last axis."""
    return np.repeat(array, 2, axis=-1)[..., ::2]


def shifted(array: Any, by: int) -> Any:
    """The same values, at `by` bytes after a multiple of 64."""
    copy = aligned(array.shape, array.dtype, by)
    copy[...] = array
    return copy


def padded(array: Any, by: int) -> Any:
    """The same values in rows that are `by` elements longer."""
    wide = aligned((*array.shape[:-1], array.shape[-1] + by), array.dtype)[..., :-by]
    wide[...] = array
    return wide


def frozen(array: Any) -> Any:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def broadcast(array: Any) -> Any:
    """One row in the place of all; it can be written to."""
    strides = (*[0] * (array.ndim - 1), array.itemsize if array.ndim > 1 else 0)
    return np.lib.stride_tricks.as_strided(
        aligned(array.shape[-1:], array.dtype), array.shape, strides
    )


@contextlib.contextmanager
def refused(error: type[Exception], message: str) -> Iterator[None]:
    """Expect an error whose message begins so; " ... " stands for anything between."""
    pattern = ".*".join(re.escape(part) for part in message.split(" ... "))
    with pytest.raises(error, match=f"^{pattern}"):
        yield


class Refusal(NamedTuple):
    """An argument, or several, that a call refuses, and how the message begins."""

    changes: Arguments
    error: type[Exception]
    message: str


def wrong_type(name: str, value: Any, need: str) -> Refusal:
    """Make the refusal of an argument, or of a part of it, that is of the wrong kind."""
    return Refusal({name.partition("[")[0]: value}, TypeError, f"{name}: needs {need}")


def wrong(name: str, value: Any, need: str) -> Refusal:
    """Make the refusal of an argument, or of a part of it, that does not fit."""
    return Refusal({name.partition("[")[0]: value}, ValueError, f"{name}: needs {need}")


NO_FACTORS = [
    wrong_type("kv_scale", value, f"a number, or a float32 array, got {got}; pass one of them")
    for value, got in (
        *((True, "bool True"), (np.bool_(True), "bool True"), ("1", "str '1'")),
        *(((1.0,), "tuple"), ([1.0], "list"), (Decimal("0.5"), "Decimal")),
    )
]


def badly_laid_out(name: str, array: Any) -> list[Refusal]:
    """List what no array of rows may be: gaps, odd strides, backwards, off 16 bytes."""
    least = next(i for i in (0, 1) if array.shape[i] > 1)
    axis = slice(None, None, -1) if least == 0 else (slice(None), slice(None, None, -1))
    return [
        wrong(
            name, every_other(array), "a contiguous last axis, got a stride of ... ; make a cont"
        ),
        wrong(name, padded(array, 1), "strides that are multiples of 16 bytes ... ; pad the rows"),
        wrong(name, array[axis], f"strides ... not negative, got - ... on axis {least}; pad the"),
        wrong(
            name, shifted(array, 8), "an address that is a multiple of 16 bytes, got 0x ... ; copy"
        ),
    ]


def all_of(refusals: list[Refusal]) -> Any:
    """Run a test for each."""
    return pytest.mark.parametrize(
        "refusal", refusals, ids=[refusal.message[:60] for refusal in refusals]
    )


def decode() -> Arguments:
    return {
        "q": numbers(2, 2, 16, 576),
        "kv_cache": numbers(6, 64, 1, 576),
        "block_table": int32([0, 1, 2], [3, 4, 5]),
        "kv_lens": int32(5, 130),
    }


def attention() -> Arguments:
    """Rows 1 to 5 of 8 have a request."""
    return {
        "q": numbers(8, 16, 576),
        "kv_cache": numbers(6, 64, 1, 576),
        "block_table": int32([0, 1, 2], [3, 4, 5]),
        "kv_lens": int32(5, 130),
        "qo_indptr": int32(1, 4, 6),
    }


def listed() -> Arguments:
    """The same with a list of pages."""
    pages = {"kv_indptr": int32(0, 1, 4), "kv_indices": int32(0, 3, 4, 5)}
    return attention() | {"block_table": None} | pages


LISTS = [[[0, 383, -1, 3, 3], [9, 1, 8, 4, 7]], [[5, 5, 6, 384, 2], [11, 40, 33, 1, 0]]]


def selected() -> Arguments:
    """Two query tokens of each of two requests, with lists of slots."""
    return {
        "q": numbers(2, 2, 16, 576),
        "kv_cache": numbers(6, 64, 1, 576),
        "indices": int32(*LISTS),
        "topk_lens": int32(5, 3),
    }


def selected_of_tokens() -> Arguments:
    """Four query tokens without a batch, with lists of positions, and sinks."""
    return {
        "q": numbers(4, 16, 576),
        "kv_cache": numbers(6, 64, 1, 576),
        "indices": int32(*LISTS).reshape(4, 5) // 2,
        "topk_lens": int32(5, 3, 0, 4),
        "block_table": int32([0, 1, 2], [3, 4, 5]),
        "row_to_request": int32(1, 0, 1, 0),
        "sinks": numbers(16, dtype=np.float32),
    }


def prefill() -> Arguments:
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((5, 8, 32)).astype(E4M3),
        "kv": (rng.standard_normal((20, 32)).astype(E4M3), rng.random(20, np.float32)),
        "weights": rng.standard_normal((5, 8)).astype(np.float32),
        "ks": int32(0, 1, 2, 3, 20),
        "ke": int32(20, 5, 2, 9, 20),
    }


def pages() -> Arguments:
    rng = np.random.default_rng(1)
    cache = np.zeros((6, 16, 1, 36), np.uint8)
    cache.reshape(6, -1)[:, : 16 * 32] = rng.integers(0, 0x60, (6, 16 * 32))
    cache.reshape(6, -1)[:, 16 * 32 :].view(np.float32)[...] = rng.random((6, 16))
    return {
        "q": rng.standard_normal((2, 3, 8, 32)).astype(E4M3),
        "kv_cache": cache,
        "weights": rng.standard_normal((6, 8)).astype(np.float32),
        "block_table": int32([0, 1, 2], [3, 4, 5]),
        "kv_lens": int32(5, 40),
        "max_kv_len": 50,
    }


def blocks() -> Arguments:
    """Rows 1 to 5 of 8 have a request; a list for each kv head."""
    return {
        "q": numbers(8, 4, 64),
        "k": numbers(6, 32, 2, 64),
        "v": numbers(6, 32, 2, 64),
        "block_indices": np.arange(48, dtype=np.int32).reshape(8, 2, 3) % 6,
        "block_size": 16,
        "kv_lens": int32(5, 90),
        "block_table": int32([0, 1, 2], [3, 4, 5]),
        "qo_indptr": int32(1, 4, 6),
    }


def blocks_of_equal_queries() -> Arguments:
    """Two query tokens of each request; lists that kv heads share, of some entries."""
    more = {
        "q": numbers(2, 2, 4, 64),
        "block_indices": int32([[3, 0]], [[1, 1]], [[2, 9]], [[-1, 0]]),
    }
    return (
        {n: value for n, value in blocks().items() if n != "qo_indptr"}
        | more
        | {"topk_lens": int32(2, 1, 2, 0)}
    )


def blocks_of_prompts() -> Arguments:
    """Two prompts, whose query tokens share row tiles."""
    return {
        "q": numbers(540, 16, 128),
        "k": numbers(6, 64, 1, 128),
        "v": numbers(6, 64, 1, 128),
        "block_indices": np.arange(1080, dtype=np.int32).reshape(540, 1, 2) % 6,
        "block_size": 64,
        "kv_lens": int32(190, 90),
        "block_table": int32([0, 1, 2], [3, 4, 5]),
        "qo_indptr": int32(1, 140, 230),
    }


def blocks_of_e4m3_prompts() -> Arguments:
    caches = {name: numbers(6, 64, 1, 128, dtype=E4M3) for name in "kv"}
    return blocks_of_prompts() | caches


def blocks_of_e4m3_prompts_by_rows() -> Arguments:
    """Each row of the cache has its factors."""
    return blocks_of_e4m3_prompts() | {
        name: np.full((1, 384), factor, np.float32)
        for name, factor in (("k_scale", 0.5), ("v_scale", 2.0))
    }


def scored_blocks() -> Arguments:
    """Rows 1 to 5 of 8 have a request."""
    return {
        "q": numbers(8, 4, 64),
        "keys": numbers(6, 32, 64),
        "block_size": 16,
        "kv_lens": int32(5, 90),
        "block_table": int32([0, 1, 2], [3, 4, 5]),
        "qo_indptr": int32(1, 4, 6),
    }


def scored_blocks_of_few() -> Arguments:
    return {
        "q": numbers(2, 1, 4, 128),
        "keys": numbers(6, 32, 128),
        "block_size": 16,
        "kv_lens": int32(5, 90),
        "block_table": int32([0, 1, 2], [3, 4, 5]),
    }


def scored_few_blocks() -> Arguments:
    return {
        "q": numbers(2, 1, 4, 128),
        "keys": numbers(3, 128, 128),
        "block_size": 128,
        "kv_lens": int32(5, 190),
        "block_table": int32([0, 1], [2, 1]),
    }


def scored_sums() -> Arguments:
    """Pooled keys of eight tokens, and two lists of each query token."""
    return {
        "q": numbers(8, 6, 64),
        "keys": numbers(6, 8, 64),
        "block_size": 8,
        "stride": 8,
        "num_groups": 2,
        "activation": "relu",
        "kv_lens": int32(5, 90),
        "block_table": int32([0, 1, 2], [3, 4, 5]),
        "qo_indptr": int32(1, 4, 6),
        "weights": numbers(8, 6, dtype=np.float32),
        "block_indices": np.broadcast_to(int32(0, 10, -1, 24, 3), (8, 2, 5)).copy(),
    }


def scored_keys() -> Arguments:
    """Pooled keys of eight tokens, for one query token of each request."""
    return {
        "q": numbers(2, 1, 4, 128),
        "keys": numbers(6, 8, 128),
        "block_size": 8,
        "stride": 8,
        "num_groups": 2,
        "kv_lens": int32(5, 90),
        "block_table": int32([0, 1, 2], [3, 4, 5]),
        "weights": numbers(2, 4, dtype=np.float32),
    }


def scored_prompt() -> Arguments:
    """Pooled keys of eight tokens, for 64 query tokens of a request."""
    return {
        "q": numbers(66, 4, 128),
        "keys": numbers(6, 8, 128),
        "block_size": 8,
        "stride": 8,
        "num_groups": 1,
        "activation": "relu",
        "kv_lens": int32(90),
        "block_table": int32([0, 1, 5]),
        "qo_indptr": int32(1, 65),
        "weights": numbers(66, 4, dtype=np.float32),
    }


def chosen_blocks() -> Arguments:
    return {
        "scores": numbers(3, 2, 40, dtype=np.float32),
        "topk": 5,
        "visible": int32(40, 3, 17),
        "init_blocks": 1,
        "local_blocks": 1,
    }


def rows() -> Arguments:
    """Rows into slots, with a rotation."""
    return {
        "rows": numbers(5, 576),
        "kv_cache": aligned((6, 16, 576)),
        "slot_mapping": int32(3, -1, 95, 17, 0),
        "positions": np.arange(5),
        "cos_sin": numbers(9, 64, dtype=np.float32),
        "q_pe": numbers(5, 3, 64),
    }


def rows_by_request() -> Arguments:
    return {
        "rows": numbers(5, 576),
        "kv_cache": aligned((6, 16, 576)),
        "batch_indices": int32(0, 0, 1, 1, -1),
        "positions": np.array([0, 20, 31, 1, 0], np.int64),
        "block_table": int32([0, 1], [5, 2]),
    }


def rows_of_v4() -> Arguments:
    kv_cache = aligned((6, 16, 1, 584), np.uint8)
    return rows_by_request() | {"rows": numbers(5, 512), "kv_cache": kv_cache}


def rows_of_width() -> Arguments:
    """Of 256 + 64 columns, into an e4m3 cache."""
    kv_cache = aligned((6, 16, 320), E4M3)
    return rows_by_request() | {"rows": numbers(5, 320), "kv_cache": kv_cache, "kv_scale": 0.5}


def decode_of_width() -> Arguments:
    """Of 256 + 32 columns."""
    return decode() | {"q": numbers(2, 2, 16, 288), "kv_cache": numbers(6, 64, 1, 288)}


def keys_and_values() -> Arguments:
    """Rows into slots, the columns of values of another number."""
    return {
        "k": numbers(5, 2, 64),
        "v": numbers(5, 2, 32),
        "k_cache": aligned((6, 16, 2, 64)),
        "v_cache": aligned((6, 16, 2, 32)),
        "slot_mapping": int32(3, -1, 95, 17, 0),
    }


def last_tokens() -> Arguments:
    """Rows 0 to 4 of 5 are the last of two requests; e4m3, with a rotation of 32 columns of 64."""
    angles = np.random.default_rng(2).random((40, 16))
    return {
        "k": numbers(5, 2, 64),
        "v": numbers(5, 2, 32),
        "k_cache": aligned((6, 16, 2, 64), np.uint8),
        "v_cache": aligned((6, 16, 2, 32), np.uint8),
        "kv_lens": int32(5, 20),
        "qo_indptr": int32(0, 1, 4),
        "block_table": int32([0, 1], [5, 2]),
        "cos_sin": (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)),
        "q": numbers(5, 4, 64),
        "k_scale": np.full((2, 2), 0.5, np.float32),
        "v_scale": np.full(2, 2.0, np.float32),
    }


def keys_in_pages() -> Arguments:
    """Queries of different lengths, rows 1 to 5 of 8; values have other columns than keys."""
    return {
        "q": numbers(8, 4, 64),
        "k": numbers(6, 16, 2, 64),
        "v": numbers(6, 16, 2, 32),
        "block_table": int32([0, 1, 2], [3, 4, 5]),
        "kv_lens": int32(5, 40),
        "qo_indptr": int32(1, 4, 6),
        "sinks": numbers(4, dtype=np.float32),
    }


def keys_in_listed_pages() -> Arguments:
    """The same with a list of pages."""
    pages = {"kv_indptr": int32(0, 1, 4), "kv_indices": int32(0, 3, 4, 5)}
    return keys_in_pages() | {"block_table": None} | pages


def keys_in_rows() -> Arguments:
    """The same without pages, nor lengths beside the offsets."""
    return {
        "q": numbers(8, 4, 64),
        "k": numbers(50, 2, 64),
        "v": numbers(50, 2, 32),
        "qo_indptr": int32(1, 4, 6),
        "kv_indptr": int32(0, 5, 45),
    }


def shared_prefixes() -> Arguments:
    """Requests whose first page is the same."""
    groups = int32(0, 0), int32(16, 16)
    table = int32([0, 1, 2], [0, 4, 5])
    return keys_in_pages() | {"block_table": table, "kv_lens": int32(20, 40), "groups": groups}


def tables() -> Arguments:
    """Rows that begin alike."""
    return {
        "block_table": int32([3, 4, 6], [0, 1, 2], [0, 1, 5]),
        "kv_lens": int32(9, 40, 35),
        "page_size": 16,
        "min_tokens": 20,
    }


def equal_queries() -> Arguments:
    """Two queries of each of two requests."""
    return {
        "q": numbers(2, 2, 4, 64),
        "k": numbers(6, 3, 2, 64),
        "v": numbers(6, 3, 2, 32),
        "block_table": int32([0, 1, 2], [3, 4, 5]),
        "kv_lens": int32(5, 9),
    }


def attended() -> Arguments:
    """Outputs of 8 rows."""
    return {"out": aligned((8, 4, 32)), "lse": aligned((8, 4), np.float32)}


IN_CACHES = tuple((cache, rows) for cache in ("k_cache", "v_cache") for rows in ("k", "v"))


def turned() -> Arguments:
    return {
        "q": numbers(5, 4, 64),
        "k": numbers(5, 2, 64),
        "positions": np.array([0, 5, 8, -1, 3], np.int64),
        "cos_sin": numbers(9, 64, dtype=np.float32),
    }


def keys() -> Arguments:
    return {
        "k": numbers(5, 64),
        "kv_cache": aligned((6, 16, 68), np.uint8),
        "slot_mapping": int32(3, -1, 95, 17, 0),
    }


def scores() -> Arguments:
    """Three rows, of which the first is shorter than k and the last has equal scores."""
    values = numbers(3, 40, dtype=np.float32)
    values[2] = np.round(values[2])
    return {
        "scores": values,
        "topk": 8,
        "row_lens": int32(5, 40, 30),
        "row_starts": int32(0, 0, 3),
        "block_table": int32([7, 1, 0], [2, -1, 4]),
        "page_size": 16,
        "row_to_request": int32(0, 1, 1),
        "offsets": int32(0, 2, 0),
    }


def partials() -> Arguments:
    return {
        "outs": [numbers(2, 5, 3, 16) + BF16.type(i) for i in range(3)],
        "lses": [numbers(2, 5, 3, dtype=np.float32) + np.float32(i) for i in range(3)],
    }


OPERATIONS = {
    "mla_decode": Operation(
        cumla.mla_decode,
        decode,
        lambda: {"out": aligned((2, 2, 16, 512)), "lse": aligned((2, 2, 16), np.float32)},
        ("mla_schedule", "mla_decode_bfloat16"),
        integers=("block_table", "kv_lens"),
        empty=(("q", "block_table", "kv_lens"),),
    ),
    "mla_decode of another width": Operation(
        cumla.mla_decode,
        decode_of_width,
        lambda: {"out": aligned((2, 2, 16, 256)), "lse": aligned((2, 2, 16), np.float32)},
        ("mla_schedule", "mla_decode_256_bfloat16_shared_blocks_boxes"),
        integers=("block_table", "kv_lens"),
        empty=(("q", "block_table", "kv_lens"),),
    ),
    "mla_attention": Operation(
        cumla.mla_attention,
        attention,
        lambda: {"out": aligned((8, 16, 512)), "lse": aligned((8, 16), np.float32)},
        ("mla_attention_schedule", "mla_attention_bfloat16"),
        integers=("qo_indptr", "kv_lens", "block_table"),
        empty=(("q",), ("q", "block_table", "kv_lens", "qo_indptr+1")),
    ),
    "mla_attention of a list": Operation(
        cumla.mla_attention,
        listed,
        lambda: {"out": aligned((8, 16, 512)), "lse": aligned((8, 16), np.float32)},
        ("mla_attention_schedule", "mla_attention_bfloat16"),
        integers=("qo_indptr", "kv_lens", "kv_indptr", "kv_indices"),
        empty=(("q",), ("q", "kv_lens", "qo_indptr+1", "kv_indptr+1", "kv_indices")),
    ),
    "attention": Operation(
        cumla.attention,
        keys_in_pages,
        attended,
        ("mla_attention_schedule", "attention_decode_bfloat16_64_64_8"),
        integers=("qo_indptr", "kv_lens", "block_table"),
        empty=(("q",), ("q", "block_table", "kv_lens", "qo_indptr+1")),
    ),
    "attention of a list": Operation(
        cumla.attention,
        keys_in_listed_pages,
        attended,
        ("mla_attention_schedule", "attention_decode_bfloat16_64_64_8"),
        integers=("qo_indptr", "kv_lens", "kv_indptr", "kv_indices"),
        empty=(("q",), ("q", "kv_lens", "qo_indptr+1", "kv_indptr+1", "kv_indices")),
    ),
    "attention of rows": Operation(
        cumla.attention,
        keys_in_rows,
        attended,
        ("mla_attention_schedule", "attention_bfloat16_64_64"),
        integers=("qo_indptr", "kv_indptr"),
        empty=(("q",), ("q", "qo_indptr+1", "kv_indptr+1")),
    ),
    "attention of equal queries": Operation(
        cumla.attention,
        equal_queries,
        lambda: {"out": aligned((2, 2, 4, 32)), "lse": aligned((2, 2, 4), np.float32)},
        ("mla_attention_schedule", "attention_decode_bfloat16_64_64_8"),
        integers=("kv_lens", "block_table"),
        empty=(("q", "block_table", "kv_lens"),),
    ),
    "block_sparse_attention": Operation(
        cumla.block_sparse_attention,
        blocks,
        lambda: {"out": aligned((8, 4, 64)), "lse": aligned((8, 4), np.float32)},
        ("block_rows", "block_attention_gathered_bfloat16_128x2"),
        integers=("qo_indptr", "kv_lens"),
        empty=(
            ("q", "block_indices"),
            ("q", "block_indices", "block_table", "kv_lens", "qo_indptr+1"),
        ),
    ),
    "block_sparse_attention of prompts": Operation(
        cumla.block_sparse_attention,
        blocks_of_prompts,
        lambda: {"out": aligned((540, 16, 128)), "lse": aligned((540, 16), np.float32)},
        (
            *("block_rows", "block_places", "block_tiles"),
            "attention_prefill_listed_bfloat16_128_128",
        ),
        integers=("qo_indptr", "kv_lens"),
        empty=(("q", "block_indices"),),
    ),
    "block_sparse_attention of e4m3 prompts": Operation(
        cumla.block_sparse_attention,
        blocks_of_e4m3_prompts,
        lambda: {"out": aligned((540, 16, 128)), "lse": aligned((540, 16), np.float32)},
        (
            *("block_rows", "block_places_widened", "widen_blocks_bfloat16"),
            *("block_tiles_widened", "attention_prefill_widened_bfloat16_128_128"),
            "block_attention_rest_bfloat16",
        ),
        integers=("qo_indptr", "kv_lens"),
        empty=(("q", "block_indices"),),
    ),
    "block_sparse_attention by factors of rows": Operation(
        cumla.block_sparse_attention,
        blocks_of_e4m3_prompts_by_rows,
        lambda: {"out": aligned((540, 16, 128)), "lse": aligned((540, 16), np.float32)},
        ("block_rows", "block_attention_bfloat16_e4m3_factors_2"),
        integers=("qo_indptr", "kv_lens", "k_scale", "v_scale"),
        any_values=("k_scale", "v_scale"),
        empty=(("q", "block_indices"),),
    ),
    "block_sparse_attention of equal queries": Operation(
        cumla.block_sparse_attention,
        blocks_of_equal_queries,
        lambda: {"out": aligned((2, 2, 4, 64)), "lse": aligned((2, 2, 4), np.float32)},
        ("block_rows", "block_attention_gathered_bfloat16_128x2"),
        integers=("kv_lens",),
        empty=(("q", "block_table", "kv_lens", "block_indices", "topk_lens"),),
    ),
    "block_scores": Operation(
        cumla.block_scores,
        scored_blocks,
        lambda: {"out": aligned((8, 4, 6), np.float32)},
        ("block_rows", "block_scores_bfloat16_64"),
        integers=("qo_indptr", "kv_lens"),
        empty=(("q",),),
    ),
    "block_scores of few query rows": Operation(
        cumla.block_scores,
        scored_blocks_of_few,
        lambda: {"out": aligned((2, 4, 6), np.float32)},
        ("block_scores_few_bfloat16",),
        integers=("kv_lens",),
        empty=(("q", "block_table", "kv_lens"),),
    ),
    "block_scores of few blocks": Operation(
        cumla.block_scores,
        scored_few_blocks,
        lambda: {"out": aligned((2, 4, 2), np.float32)},
        ("block_scores_each_bfloat16_8",),
        integers=("kv_lens",),
        empty=(("q", "block_table", "kv_lens"),),
    ),
    "block_scores of sums": Operation(
        cumla.block_scores,
        scored_sums,
        lambda: {"out": aligned((8, 2, 5), np.float32)},
        ("block_rows", "block_scores_sums_bfloat16_64"),
        integers=("qo_indptr", "kv_lens"),
        empty=(("q", "weights", "block_indices"),),
    ),
    "block_scores of a prompt": Operation(
        cumla.block_scores,
        scored_prompt,
        lambda: {"out": aligned((66, 1, 24), np.float32)},
        ("block_rows", "block_scores_prompts_bfloat16"),
        integers=("qo_indptr", "kv_lens"),
        empty=(("q", "weights"),),
    ),
    "block_scores of pooled keys": Operation(
        cumla.block_scores,
        scored_keys,
        lambda: {"out": aligned((2, 2, 24), np.float32)},
        ("block_scores_pooled_bfloat16_128",),
        integers=("kv_lens",),
        empty=(("q", "weights", "block_table", "kv_lens"),),
    ),
    "select_blocks": Operation(
        cumla.select_blocks,
        chosen_blocks,
        lambda: {"out": aligned((3, 2, 5), np.int32)},
        ("select_blocks_float32_256",),
        integers=("visible",),
        empty=(("scores", "visible"),),
    ),
    "attention of groups": Operation(
        cumla.attention,
        shared_prefixes,
        attended,
        (
            *("prefix_requests", "attention_schedule_numbered"),
            *("attention_masked_bfloat16_64_64", "combine_prefixes"),
        ),
        integers=("qo_indptr", "kv_lens", "block_table", "groups"),
        any_values=("groups",),
        empty=(("q",),),
    ),
    "find_prefix_groups": Operation(
        cumla.find_prefix_groups,
        tables,
        lambda: {"group": aligned((3,), np.int32), "prefix_len": aligned((3,), np.int32)},
        ("find_prefix_groups",),
        integers=("kv_lens",),
        empty=(("block_table", "kv_lens"),),
    ),
    "mla_sparse_decode": Operation(
        cumla.mla_sparse_decode,
        selected,
        lambda: {"out": aligned((2, 2, 16, 512)), "lse": aligned((2, 2, 16), np.float32)},
        ("bound_rows", "mla_schedule", "select_rows", "mla_sparse_bfloat16_swapped"),
        integers=("topk_lens", "indices"),
        any_values=("indices",),
        empty=(("q", "indices", "topk_lens"),),
    ),
    "mla_sparse_attention": Operation(
        cumla.mla_sparse_attention,
        selected_of_tokens,
        lambda: {"out": aligned((4, 16, 512)), "lse": aligned((4, 16), np.float32)},
        ("bound_rows", "mla_schedule", "select_rows", "mla_sparse_bfloat16_swapped"),
        integers=("topk_lens", "row_to_request", "block_table", "indices"),
        any_values=("indices",),
        empty=(("q", "indices", "topk_lens", "row_to_request"),),
    ),
    "mqa_logits": Operation(
        cumla.mqa_logits,
        prefill,
        lambda: {"out": aligned((5, 20), np.float32)},
        ("mqa_logits_h8_d32",),
        integers=("ks", "ke"),
        empty=(("q", "weights", "ks", "ke"), ("kv",)),
    ),
    "paged_mqa_logits": Operation(
        cumla.paged_mqa_logits,
        pages,
        lambda: {"out": aligned((6, 50), np.float32)},
        ("paged_mqa_schedule_256", "paged_mqa_logits_h32_d32_n128"),
        integers=("block_table", "kv_lens"),
        empty=(("q", "weights", "block_table", "kv_lens"),),
    ),
    "append_mla_cache": Operation(
        cumla.append_mla_cache,
        rows,
        dict,
        ("append_cache_bfloat16",),
        integers=("slot_mapping", "positions"),
        empty=(("rows", "slot_mapping", "positions", "q_pe"),),
    ),
    "append_mla_cache by request": Operation(
        cumla.append_mla_cache,
        rows_by_request,
        dict,
        ("append_cache_bfloat16",),
        integers=("batch_indices", "positions", "block_table"),
        empty=(("rows", "batch_indices", "positions"),),
    ),
    "append_mla_cache into V4's slots": Operation(
        cumla.append_mla_cache,
        rows_of_v4,
        dict,
        ("append_fp8_cache_v4",),
        integers=("batch_indices", "positions", "block_table"),
        empty=(("rows", "batch_indices", "positions"),),
    ),
    "append_mla_cache of another width": Operation(
        cumla.append_mla_cache,
        rows_of_width,
        dict,
        ("append_fp8_cache_widths_bfloat16",),
        integers=("batch_indices", "positions", "block_table"),
        empty=(("rows", "batch_indices", "positions"),),
    ),
    "append_kv_cache": Operation(
        cumla.append_kv_cache,
        keys_and_values,
        dict,
        ("append_kv_cache_bfloat16",),
        integers=("slot_mapping",),
        empty=(("k", "v", "slot_mapping"),),
        shares=IN_CACHES,
    ),
    "append_kv_cache of last tokens": Operation(
        cumla.append_kv_cache,
        last_tokens,
        dict,
        ("append_kv_cache_fp8_bfloat16",),
        integers=("qo_indptr", "kv_lens", "block_table", "k_scale", "v_scale"),
        empty=(
            ("k", "v", "q"),
            ("k", "v", "q", "kv_lens", "block_table", "k_scale", "qo_indptr+1"),
        ),
        shares=IN_CACHES,
    ),
    "apply_rope": Operation(
        cumla.apply_rope,
        turned,
        lambda: {"q_out": aligned((5, 4, 64)), "k_out": aligned((5, 2, 64))},
        ("append_kv_cache_bfloat16",),
        integers=("positions",),
        empty=(("q", "k", "positions"),),
        shares=(("q_out", "q"), ("k_out", "k")),
    ),
    "append_indexer_cache": Operation(
        cumla.append_indexer_cache,
        keys,
        dict,
        ("append_indexer_cache_bfloat16",),
        integers=("slot_mapping",),
        empty=(("k", "slot_mapping"),),
    ),
    "quantize_fp8": Operation(
        cumla.quantize_fp8,
        lambda: {"x": numbers(4, 3, 64)},
        lambda: {"out": aligned((4, 3, 64), E4M3), "scale_out": aligned((4, 3), np.float32)},
        ("quantize_fp8_bfloat16",),
        empty=(("x",),),
    ),
    "top_k": Operation(
        cumla.top_k,
        scores,
        lambda: {"out": aligned((3, 8), np.int32), "counts": aligned((3,), np.int32)},
        ("top_k_short_float32",),
        integers=("row_starts", "row_lens", "row_to_request"),
        empty=(("scores", "row_lens", "row_starts", "row_to_request", "offsets"),),
    ),
    "merge_attention_states": Operation(
        cumla.merge_attention_states,
        partials,
        lambda: {"out": aligned((2, 5, 3, 16)), "lse": aligned((2, 5, 3), np.float32)},
        ("merge_states_bfloat16",),
        empty=(("outs", "lses"),),
    ),
}

KEYS_IN_PAGES = {
    "batch": 2,
    "total_tokens": 8,
    "num_heads": 4,
    "head_dim": 64,
    "num_kv_heads": 2,
    "head_dim_v": 32,
    "page_size": 16,
}
BLOCKS = {
    "batch": 2,
    "total_tokens": 8,
    "num_heads": 4,
    "head_dim": 64,
    "topk": 3,
    "block_size": 16,
    "num_kv_heads": 2,
}
PLANS = {
    "MLADecodePlan": Planned(
        "mla_decode",
        cumla.MLADecodePlan,
        {"batch": 2, "q_len": 2, "num_heads": 16},
    ),
    "MLAAttentionPlan": Planned(
        "mla_attention",
        cumla.MLAAttentionPlan,
        {"batch": 2, "total_tokens": 8, "num_heads": 16},
    ),
    "MLAAttentionPlan of a list": Planned(
        "mla_attention of a list",
        cumla.MLAAttentionPlan,
        {"batch": 2, "total_tokens": 8, "num_heads": 16},
    ),
    "AttentionPlan": Planned(
        "attention",
        cumla.AttentionPlan,
        KEYS_IN_PAGES,
    ),
    "AttentionPlan of a list": Planned(
        "attention of a list",
        cumla.AttentionPlan,
        KEYS_IN_PAGES,
    ),
    "AttentionPlan of rows": Planned(
        "attention of rows",
        cumla.AttentionPlan,
        KEYS_IN_PAGES | {"page_size": 0},
    ),
    "AttentionPlan of equal queries": Planned(
        "attention of equal queries",
        cumla.AttentionPlan,
        KEYS_IN_PAGES | {"total_tokens": 4, "q_len": 2, "page_size": 3},
    ),
    "BlockSparsePlan": Planned(
        "block_sparse_attention",
        cumla.BlockSparsePlan,
        BLOCKS,
        fixed=("block_size",),
    ),
    "BlockSparsePlan of equal queries": Planned(
        "block_sparse_attention of equal queries",
        cumla.BlockSparsePlan,
        BLOCKS | {"total_tokens": 4, "q_len": 2, "topk": 2},
        fixed=("block_size",),
    ),
    "MLASparsePlan": Planned(
        "mla_sparse_decode",
        cumla.MLASparsePlan,
        {"batch": 2, "q_len": 2, "num_heads": 16, "topk": 5},
        updates=2,
    ),
    "MLASparsePlan of tokens": Planned(
        "mla_sparse_attention",
        cumla.MLASparsePlan,
        {"batch": 1, "q_len": 4, "num_heads": 16, "topk": 5},
        updates=2,
    ),
    "PagedMQALogitsPlan": Planned(
        "paged_mqa_logits",
        cumla.PagedMQALogitsPlan,
        {
            "batch": 2,
            "q_len": 3,
            "num_heads": 8,
            "head_dim": 32,
            "max_pages": 3,
            "page_size": 16,
        },
    ),
}

every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
every_plan = pytest.mark.parametrize("planned", PLANS.values(), ids=PLANS)


def arrays_of(arguments: Arguments) -> Iterator[tuple[str, Any]]:
    """Name every array, those of pairs and sequences by their place."""
    for name, value in arguments.items():
        if isinstance(value, (tuple, list)):
            yield from ((f"{name}[{i}]", part) for i, part in enumerate(value))
        elif hasattr(value, "shape"):
            yield name, value


def with_array(arguments: Arguments, name: str, array: Any) -> Arguments:
    """Put an array in the place of one that `arrays_of` names."""
    name, _, place = name.partition("[")
    if place:
        parts = list(arguments[name])
        parts[int(place[:-1])] = array
        array = type(arguments[name])(parts)
    return arguments | {name: array}
