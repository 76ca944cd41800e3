# SPDX-License-Identifier: Apache-2.0
"""What the library asks the driver for, in a fixed table of calls: digests for the evidence.

Calls of the public operations and plans run over arrays that are nothing but shapes and addresses,
and every launch is written down as the driver gets it: entry point, grid, threads, shared memory,
attributes, bytes of the parameters, tensor maps. Names, modules and messages of the host code do
not show; a kernel's choice, its grid, a stride, an attribute do.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cumla
import cumla.mha.bias
import cumla.mha.mask
from cumla.core import _lifetime, arrays, frameworks, operation, plan
from cumla.launch import device, kernel, module, tensor_map
from cumla.mla.shape import WIDE, WRITTEN
from cumla.mla.shape import WIDTHS as ROWS
from tests import fake_cuda
from tests.fake_cuda import FakeBindings, FakeCuPy, FakeDriver

BF16, FP16, FP32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
E4M3, BYTES, INT32 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8), np.dtype(np.int32)
INT64 = np.dtype(np.int64)
HALVES, FLOATS = (BF16, FP16), (BF16, FP16, FP32)

Case = tuple[str, Callable[[], None]]  # group; a call or more


# --- without a GPU -------------------------------------------------------------------------------


class Recorder(FakeBindings):
    """Writes down whole launches, as lines of text by entry point."""

    def __init__(self, cupy: FakeCuPy) -> None:
        super().__init__(cupy)
        self.sizes: dict[str, int] = {}  # bytes of the parameters, by entry point
        self.asked: list[tuple[str, str]] = []

    def cuLaunchKernelEx(self, config: Any, handle: int, parameters: int, extra: int) -> tuple[int]:
        super().cuLaunchKernelEx(config, handle, parameters, extra)
        launched = self.launched.pop()
        given = {n: v for n, v in vars(config).items() if n != "attrs"}
        given["attrs"] = [(a.id, _values(a.value)) for a in config.attrs]
        values = launched.read(self.sizes[launched.entry]).hex()
        self.asked.append((launched.entry, json.dumps([given, values], sort_keys=True)))
        return (0,)


def _values(value: Any) -> Any:
    named = getattr(value, "__dict__", None)
    return value if named is None else {name: _values(v) for name, v in named.items()}


@contextmanager
def without_gpu() -> Iterator[tuple[_GPU, Recorder]]:
    """Put fakes in the place of CuPy and the driver; arrays always have the same addresses."""
    template = kernel.Launch.template
    known = {np.ndarray: frameworks.NUMPY}
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(frameworks.framework_of_type, known, clear=True),
    ):
        cupy = _GPU()
        recorder = Recorder(cupy)

        def sized(launch: kernel.Launch, *arguments: Any) -> kernel.Template:
            recorder.sizes[launch.spec.entry] = launch.layout.size
            return template(launch, *arguments)

        driver = FakeDriver()
        for owner in (_lifetime, arrays, module, plan):
            patch.setattr(owner, "driver", lambda: driver)
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setitem(sys.modules, "cumla_cubins", None)
        patch.setitem(sys.modules, "cuda.bindings.driver", recorder)
        patch.setattr(device, "installed_cupy", lambda: ("cupy-cuda12x 14.2.0",))
        patch.setattr(module, "_loaded", {})
        patch.setattr(module, "translation_unit", lambda spec, debug: "")  # nothing compiles it
        patch.setattr(operation, "forms", operation.Ready())
        patch.setattr(kernel.Launch, "template", sized)
        patch.setattr(fake_cuda, "_addresses", itertools.count(1))
        for name in ("CUMLA_CUBIN_DIR", "CUMLA_CHECK", "CUMLA_DEBUG"):
            patch.delenv(name, raising=False)
        _forget()
        yield cupy, recorder
        gc.collect()
        _lifetime.release_finished()
    _forget()


def _forget() -> None:
    """Forget what was found out of the CuPy and the driver that were there."""
    for cached in (
        *(frameworks.cupy_framework, device.import_cupy, device.properties, device.import_driver),
        *(kernel._config, tensor_map._encoded, tensor_map._around_address),
    ):
        cached.cache_clear()
    for found in gc.get_objects():
        if type(found) is operation.Ready:
            found.clear()


# --- the digests ---------------------------------------------------------------------------------


def launches(*names: str) -> dict[str, dict[str, str]]:
    """Digests of all launches of the table, or of some of its functions, by entry point and group.

    A launch counts with its place in the call, and with what the call allocates.
    """
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    with without_gpu() as (cupy, recorder):
        for (group, call), sms in _calls(_Maker(cupy), names or tuple(TABLE)):
            if sms != cupy.multiprocessors:
                cupy.multiprocessors = sms
                _forget()
            fake_cuda._addresses = itertools.count(1 << 8)
            operation.forms.clear()
            before = len(cupy.allocated)
            call()
            made = json.dumps(cupy.allocated[before:])
            for i, (entry, asked) in enumerate(recorder.asked):
                digest = found[entry].setdefault(group, hashlib.sha256())
                digest.update(f"{i} {made} {asked}\n".encode())
            recorder.asked.clear()
    return {e: {g: d.hexdigest()[:16] for g, d in groups.items()} for e, groups in found.items()}


def _calls(make: _Maker, names: tuple[str, ...]) -> Iterator[tuple[Case, int]]:
    """The calls, with the number of multiprocessors of the GPU."""
    for name in names:
        yield from ((case, 132) for case in TABLE[name](make))
    for name in (n for n in names if n in ("attention_plans", "dsa", "mla_invariant")):
        yield from (((f"{group}, of 78", call), 78) for group, call in TABLE[name](make))


class _GPU(FakeCuPy):
    """A GPU with another number of multiprocessors."""

    multiprocessors = 132

    def _properties(self, device: int) -> dict[str, Any]:
        return super()._properties(device) | {"multiProcessorCount": self.multiprocessors}


class _Maker:
    """Makes arrays of shapes and dtypes, and nothing else."""

    def __init__(self, cupy: FakeCuPy) -> None:
        self.cupy = cupy

    def __call__(self, *shape: int, dtype: np.dtype[Any] = BF16) -> Any:
        return self.cupy.ndarray(shape, dtype)

    def int32(self, *shape: int) -> Any:
        return self(*shape, dtype=INT32)

    def float32(self, *shape: int) -> Any:
        return self(*shape, dtype=FP32)

    def wide(self, *shape: int, dtype: np.dtype[Any] = BF16) -> Any:
        """Rows with a gap after each."""
        array = self.cupy.ndarray((*shape[:-1], shape[-1] + 64), dtype)
        array.shape = shape
        return array

    def repeated(self, *shape: int, dtype: np.dtype[Any] = FP32) -> Any:
        """One row in the place of all."""
        array = self(*shape, dtype=dtype)
        array.strides = (*[0] * (len(shape) - 1), dtype.itemsize)
        return array

    def latent(self, form: str, *shape: int, dtype: np.dtype[Any] = BF16) -> Any:
        """A cache of MLA's rows in one of FORMS."""
        if form == "same":
            return self(*shape, 576, dtype=dtype)
        if form == "apart":
            return self(*shape, 512, dtype=dtype), self(*shape, 64, dtype=dtype)
        if form == "e4m3":
            return self(*shape, 576, dtype=E4M3)
        if form == "e4m3 beside":
            return self(*shape, 512, dtype=E4M3), self(*shape, 64)
        if form == "scales":
            return self(*shape, 512, dtype=E4M3), self(*shape, 64), self.float32(*shape, 4)
        if form == "scales, e4m3":
            rope = self(*shape, 64, dtype=E4M3)
            return self(*shape, 512, dtype=E4M3), rope, self.float32(*shape, 4)
        assert form == "packed"
        return self(*shape, 656, dtype=BYTES)


FORMS = ("same", "apart", "e4m3", "e4m3 beside", "scales", "scales, e4m3", "packed")


# --- MLA -----------------------------------------------------------------------------------------


def mla(make: _Maker) -> Iterator[Case]:
    """Dense decoding and batches of queries of different lengths, by calls and by plans."""
    grid = itertools.product(FORMS, HALVES, (64, 16, 1), (1, 5), (16, 20, 64, 128), (1, 24, 200))
    for form, dtype, page, q_len, heads, batch in grid:
        if dtype == FP16 and form not in FORMS[:2]:
            continue

        def call(
            form: str = form,
            dtype: np.dtype[Any] = dtype,
            page: int = page,
            q_len: int = q_len,
            heads: int = heads,
            batch: int = batch,
        ) -> None:
            cache = make.latent(form, 9, page, 1, dtype=dtype)
            table, lens = make.int32(batch, 40), make.int32(batch)
            q = make(batch, q_len, heads, 576, dtype=dtype)
            tokens, indptr = make(batch * q_len, heads, 576, dtype=dtype), make.int32(batch + 1)
            options: dict[str, Any] = {} if form in FORMS[:2] else {"fp8_products": heads == 64}
            cumla.mla_decode(q, cache, table, lens, **options)
            cumla.mla_attention(
                tokens, cache, block_table=table, kv_lens=lens, qo_indptr=indptr, **options
            )
            if page == 64:
                cumla.mla_decode(q, cache, table, lens, causal=False, softmax_scale=0.1)
                entries, begins = make.int32(50), make.int32(batch + 1)
                of_list = {"kv_indptr": begins, "kv_indices": entries}
                cumla.mla_attention(tokens, cache, kv_lens=lens, qo_indptr=indptr, **of_list)
            if page == 16:
                for planned in (
                    cumla.MLADecodePlan.from_arrays(q, cache),
                    cumla.MLAAttentionPlan.from_arrays(tokens, cache, qo_indptr=indptr),
                ):
                    ragged = isinstance(planned, cumla.MLAAttentionPlan)
                    planned.update(lens, **({"qo_indptr": indptr} if ragged else {}))
                    planned.run(q if not ragged else tokens, cache, block_table=table, **options)

        yield f"MLA, {form}, {dtype.name}, {q_len} tokens", call
    for page, q_len, heads, batch in itertools.product((64, 1), (1, 5), (16, 20, 64), (1, 200)):

        def queries(
            page: int = page, q_len: int = q_len, heads: int = heads, batch: int = batch
        ) -> None:
            cache, table = make.latent("e4m3", 9, page, 1), make.int32(batch, 40)
            lens, indptr = make.int32(batch), make.int32(batch + 1)
            ragged = {"block_table": table, "kv_lens": lens, "qo_indptr": indptr}
            for products in (False, True):
                options = {"q_scale": make.float32(1), "kv_scale": 0.5, "fp8_products": products}
                q = make(batch, q_len, heads, 576, dtype=E4M3)
                cumla.mla_decode(q, cache, table, lens, **options)
                tokens = make(batch * q_len, heads, 576, dtype=E4M3)
                cumla.mla_attention(tokens, cache, **ragged, **options)

        yield f"MLA, e4m3 queries, {q_len} tokens", queries
    for heads, kv_heads in ((32, 2), (128, 4)):

        def grouped(heads: int = heads, kv_heads: int = kv_heads) -> None:
            for q_len, batch in itertools.product((1, 4), (1, 40)):
                cache, lens = make(9, 64, kv_heads, 576), make.int32(batch)
                q = make(batch, q_len, heads, 576)
                cumla.mla_decode(q, cache, make.int32(batch, 40), lens)

        yield "MLA, several KV heads", grouped


def mla_masks(make: _Maker) -> Iterator[Case]:
    """Windows and sinks of dense MLA."""
    grid = itertools.product(FORMS, HALVES, (64, 16, 1), (1, 5), (16, 20, 64), (1, 40))
    for form, dtype, page, q_len, heads, batch in grid:
        if dtype == FP16 and form not in FORMS[:2]:
            continue

        def call(
            form: str = form,
            dtype: np.dtype[Any] = dtype,
            page: int = page,
            q_len: int = q_len,
            heads: int = heads,
            batch: int = batch,
        ) -> None:
            cache = make.latent(form, 9, page, 1, dtype=dtype)
            table, lens, sinks = make.int32(batch, 40), make.int32(batch), make.float32(heads)
            q = make(batch, q_len, heads, 576, dtype=dtype)
            tokens, indptr = make(batch * q_len, heads, 576, dtype=dtype), make.int32(batch + 1)
            ragged = {"block_table": table, "kv_lens": lens, "qo_indptr": indptr}
            kinds: list[dict[str, Any]] = [{"sinks": sinks}]
            if form in FORMS[:2]:
                kinds += [{"window": 127}, {"window": (30, 5), "causal": False, "sinks": sinks}]
            elif heads == 64:
                kinds += [{"sinks": sinks, "fp8_products": True}]
            for options in kinds:
                cumla.mla_decode(q, cache, table, lens, **options)
                cumla.mla_attention(tokens, cache, **ragged, **options)

        yield f"MLA with windows and sinks, {form}, {dtype.name}, {q_len} tokens", call


def mla_trees(make: _Maker) -> Iterator[Case]:
    """Trees of drafts, over rows of all widths that have them."""
    widths = [width for width in ROWS if width != WIDE]
    grid = itertools.product(widths, HALVES, (64, 16, 1), (16, 128), (1, 40))
    for (latent, rope), dtype, page, heads, batch in grid:

        def call(
            columns: int = latent + rope,
            dtype: np.dtype[Any] = dtype,
            page: int = page,
            heads: int = heads,
            batch: int = batch,
        ) -> None:
            cache = make(9, page, 1, columns, dtype=dtype)
            table, lens, tree = make.int32(batch, 40), make.int32(batch), make.int32(batch * 5, 2)
            q, tokens = (make(*n, heads, columns, dtype=dtype) for n in ((batch, 5), (batch * 5,)))
            ragged = {"block_table": table, "kv_lens": lens, "qo_indptr": make.int32(batch + 1)}
            for sinks in (None, make.float32(heads)):
                cumla.mla_decode(q, cache, table, lens, tree=tree, sinks=sinks)
                cumla.mla_attention(tokens, cache, **ragged, tree=tree, sinks=sinks)

        yield f"MLA with trees, {latent} + {rope} columns, {dtype.name}", call


def mla_widths(make: _Maker) -> Iterator[Case]:
    """Dense decoding over rows of other widths, with masks and without, and what writes them."""
    grid = itertools.product(HALVES, ROWS[1:], (64, 16, 1), (1, 5), (16, 20, 128), (1, 200))
    for dtype, (latent, rope), page, q_len, heads, batch in grid:
        if dtype == FP16 and page == 16:
            continue

        def call(
            dtype: np.dtype[Any] = dtype,
            latent: int = latent,
            rope: int = rope,
            page: int = page,
            q_len: int = q_len,
            heads: int = heads,
            batch: int = batch,
        ) -> None:
            cache: Any = make(9, page, 1, latent + rope, dtype=dtype)
            if q_len > 1 and rope:
                parts = (make(9, page, 1, columns, dtype=dtype) for columns in (latent, rope))
                cache = tuple(parts)
            table, lens = make.int32(batch, 40), make.int32(batch)
            q = make(batch, q_len, heads, latent + rope, dtype=dtype)
            tokens = make(batch * q_len, heads, latent + rope, dtype=dtype)
            indptr = make.int32(batch + 1)
            ragged = {"block_table": table, "kv_lens": lens, "qo_indptr": indptr}
            masks: list[dict[str, Any]] = [{}, {"sinks": make.float32(heads)}, {"window": 127}]
            for options in masks:
                cumla.mla_decode(q, cache, table, lens, **options)
                cumla.mla_attention(tokens, cache, **ragged, **options)
            if (latent, rope) == WIDE:
                for options in masks:
                    cumla.mla_attention(tokens, cache, **ragged, **options, batch_invariant=True)
                return
            cumla.mla_decode(q, cache, table, lens, batch_invariant=True)
            if dtype == FP16:
                return
            cache = make(9, page, 1, latent + rope, dtype=E4M3)
            if q_len > 1 and rope:
                cache = make(9, page, 1, latent, dtype=E4M3), make(9, page, 1, rope, dtype=E4M3)
            for options in masks[:2]:
                cumla.mla_decode(q, cache, table, lens, **options)
                cumla.mla_attention(tokens, cache, **ragged, **options)

        names = f"{latent} + {rope}, {'float16, ' if dtype == FP16 else ''}{q_len} tokens"
        yield f"MLA, {names}", call
    kinds = itertools.product((BF16, FP16), (False, True), (False, True))
    for (latent, rope), (halves, is_fp8, floats) in itertools.product(WRITTEN[1:], (*kinds,)):
        of_cache, of_rows = E4M3 if is_fp8 else halves, FP32 if floats else halves

        def append(
            latent: int = latent, rope: int = rope, dtypes: Any = (of_cache, of_rows, halves)
        ) -> None:
            columns, (of_cache, of_rows, halves) = latent + rope, dtypes
            named = {"cache_format": "e4m3_288"} if (columns, of_cache) == (288, E4M3) else {}
            rows, slots = make(77, 1, columns, dtype=of_rows), make(77, dtype=INT64)
            cache = make(9, 64, 1, columns, dtype=of_cache)
            cumla.append_mla_cache(rows, cache, slots, **named)
            if rope:
                turn = {"cos_sin": make.float32(99, rope), "positions": make(77, dtype=INT64)}
                turn["q_pe"] = make(77, 16, rope, dtype=halves)
                cumla.append_mla_cache(rows, cache, slots, **turn, **named)

        names = f"{latent} + {rope}, {of_cache.name}, {halves.name}, rows of {of_rows.name}"
        yield f"append_mla_cache, {names}", append


def mla_invariant(make: _Maker) -> Iterator[Case]:
    """Dense decoding whose bits do not depend on the batch."""
    for form, heads, batch, columns in itertools.product(
        ("same", "e4m3", "packed"), (8, 16, 64, 128), (1, 16, 200), (2, 64, 2048)
    ):

        def call(
            form: str = form, heads: int = heads, batch: int = batch, columns: int = columns
        ) -> None:
            cache, table, lens = make.latent(form, 9, 64, 1), make.int32(batch, columns), batch
            q = make(batch, 1, heads, 576)
            cumla.mla_decode(q, cache, table, make.int32(lens), batch_invariant=True)
            if columns == 64:
                given = {"kv_lens": make.int32(lens), "qo_indptr": make.int32(batch + 1)}
                tokens = make(batch, heads, 576)
                cumla.mla_attention(tokens, cache, block_table=table, **given, batch_invariant=True)

        yield f"MLA, batch-invariant, {form}", call
    for dtype, page, heads in itertools.product((BF16, FP16), (64, 16, 1), (8, 64, 128)):

        def of_16_bits(dtype: Any = dtype, page: int = page, heads: int = heads) -> None:
            cache, table, lens = make(9, page, 1, 576, dtype=dtype), make.int32(3, 800), 3
            for options in ({}, {"sinks": make.float32(heads)}):
                q = make(3, 1, heads, 576, dtype=dtype)
                cumla.mla_decode(q, cache, table, make.int32(lens), **options, batch_invariant=True)

        yield f"MLA, batch-invariant, {dtype.name}, pages of {page}", of_16_bits


# --- lists of rows -------------------------------------------------------------------------------

_BYTES = {"v4": 584, "v41": 528, "v41_fp4": 288, "v32_no_rope": 528, "e4m3, 512 columns": 512}
_NAMED = ("v41", "v41_fp4", "v32_no_rope")


def mla_lists(make: _Maker) -> Iterator[Case]:
    """Sparse attention, in all formats of caches, with the largest scores of FlashMLA's face."""
    from cumla.sparse.mla_sparse import attend_as_flash_mla

    grid = itertools.product(
        (*FORMS, *_BYTES), HALVES, (1, 2), (16, 20, 64, 128), (1, 20, 300), (5, 512, 2048)
    )
    for form, dtype, q_len, heads, batch, topk in grid:
        if (dtype == FP16 and form not in FORMS[:2]) or (q_len > 1 and batch != 20):
            continue

        def call(
            form: str = form,
            dtype: np.dtype[Any] = dtype,
            q_len: int = q_len,
            heads: int = heads,
            batch: int = batch,
            topk: int = topk,
        ) -> None:
            nbytes = _BYTES.get(form)
            cache = make(9, 64, 1, nbytes, dtype=BYTES) if nbytes else None
            cache = cache or make.latent(form, 9, 64, 1, dtype=dtype)
            named = {"cache_format": form} if form in _NAMED else {}
            q = make(batch, q_len, heads, 512 if nbytes else 576, dtype=dtype)
            indices, sinks = make.int32(batch, q_len, topk), make.float32(heads)
            cumla.mla_sparse_decode(q, cache, indices, **named)
            more: dict[str, Any] = {"topk_lens": make.int32(batch), "sinks": sinks}
            if form.startswith("v4") and topk == 512:
                more["extra_kv_cache"] = make(5, 2, 1, nbytes, dtype=BYTES)
                more["extra_indices"] = make.int32(batch, q_len, 128)
            more["block_table"] = make.int32(batch, 40)
            cumla.mla_sparse_decode(q, cache, indices, **named, **more)
            if form == "v41" and topk == 512:
                more["extra_kv_cache"] = make(5, 2, 1, 288, dtype=BYTES)
                second = {"extra_cache_format": "v41_fp4"}
                cumla.mla_sparse_decode(q, cache, indices, **named, **more, **second)
            if topk == 512:
                tokens = make(batch, heads, 512 if nbytes else 576, dtype=dtype)
                cumla.mla_sparse_attention(tokens, cache, make.int32(batch, topk), **named)
                options = {"batch_invariant": True}
                cumla.mla_sparse_decode(q, cache, indices, **named, **options)

        yield f"lists, {form}, {dtype.name}", call
    for dtype, columns, heads, batch in itertools.product(
        HALVES, (512, 576), (16, 64, 128), (1, 20, 300)
    ):

        def prefill(
            dtype: np.dtype[Any] = dtype, columns: int = columns, heads: int = heads, n: int = batch
        ) -> None:
            q, kv = make(n, heads, columns, dtype=dtype), make(4096, 1, columns, dtype=dtype)
            attend_as_flash_mla(q, kv, make.int32(n, 512), None, None, 0.1)
            cumla.mla_sparse_attention(q, kv, make.int32(n, 512))

        yield f"lists, {columns} columns, with the largest scores, {dtype.name}", prefill


# --- MHA, GQA, MQA -------------------------------------------------------------------------------

WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512), (72, 40), (96, 96))


def attention(make: _Maker) -> Iterator[Case]:
    """Attention of all widths, dtypes and batches, with windows, sinks and soft caps."""
    grid = itertools.product(
        WIDTHS, FLOATS, (False, True), ((8, 8), (32, 8), (64, 8)), (0, 64, 16, 1), (1, 16, 200)
    )
    for (keys, values), dtype, fp8, (heads, kv_heads), page, batch in grid:
        if fp8 and (dtype == FP32 or keys > 256 or keys % 16 or values % 16):
            continue
        is_rare = dtype != BF16 or (keys, values) not in WIDTHS[:5] or page in (16, 1)
        if is_rare and ((heads, kv_heads) != (32, 8) or batch == 1):
            continue

        def call(
            keys: int = keys,
            values: int = values,
            dtype: np.dtype[Any] = dtype,
            fp8: bool = fp8,
            heads: int = heads,
            kv_heads: int = kv_heads,
            page: int = page,
            batch: int = batch,
        ) -> None:
            of_cache = E4M3 if fp8 else dtype
            shape = (9, page, kv_heads) if page else (5000, kv_heads)
            k, v = make(*shape, keys, dtype=of_cache), make(*shape, values, dtype=of_cache)
            pages: dict[str, Any] = {}
            if page:
                pages = {"block_table": make.int32(batch, 40), "kv_lens": make.int32(batch)}
            else:
                pages = {"kv_indptr": make.int32(batch + 1)}
            if fp8:
                pages |= {"k_scale": make.float32(1), "v_scale": 0.5}
            more = {"window": 100, "sinks": make.float32(heads), "softcap": 30.0}
            for tokens in (batch, 2 * batch + 7, 40 * batch):
                q, indptr = make(tokens, heads, keys, dtype=dtype), make.int32(batch + 1)
                cumla.attention(q, k, v, qo_indptr=indptr, **pages)
            cumla.attention(q, k, v, qo_indptr=indptr, **pages, **more)
            if page:
                for q_len in (1, 4, 300):
                    q = make(batch, q_len, heads, keys, dtype=dtype)
                    cumla.attention(q, k, v, **pages)
                cumla.attention(q, k, v, **pages, causal=False)

        yield (
            f"attention, {keys} and {values} columns, {dtype.name}, {'e4m3' if fp8 else 'same'}",
            call,
        )


def attention_by_masks(make: _Maker) -> Iterator[Case]:
    """Attention with masks: all widths, dtypes and forms of pages; decoding, drafts and prefill."""
    build = cumla.mha.mask.AttentionMask
    for (keys, values), dtype, fp8, page in itertools.product(
        WIDTHS, FLOATS, (False, True), (0, 64, 1)
    ):
        if fp8 and (dtype == FP32 or keys > 256 or keys % 16 or values % 16):
            continue

        def call(
            keys: int = keys,
            values: int = values,
            dtype: np.dtype[Any] = dtype,
            fp8: bool = fp8,
            page: int = page,
        ) -> None:
            of_cache, batch = E4M3 if fp8 else dtype, 16
            shape = (9, page, 8) if page else (5000, 8)
            k, v = make(*shape, keys, dtype=of_cache), make(*shape, values, dtype=of_cache)
            pages: dict[str, Any] = {"kv_indptr": make.int32(batch + 1)}
            if page:
                pages = {"block_table": make.int32(batch, 40), "kv_lens": make.int32(batch)}
            for tokens in (batch, 40 * batch):
                q, indptr = make(tokens, 32, keys, dtype=dtype), make.int32(batch + 1)
                given = {"qo_indptr": indptr, **pages}
                start, end = make.int32(tokens), make.int32(tokens)
                cumla.attention(q, k, v, **given, mask=build(start=start))
                prefix = build(start=start, end=end, prefix_len=make.int32(batch))
                cumla.attention(q, k, v, **given, mask=prefix, sinks=make.float32(32))
                tree = build(tree=make.int32(tokens, 3), tree_start=make.int32(batch))
                cumla.attention(q, k, v, **given, mask=tree, causal=False)
            if page:
                for q_len in (1, 300):
                    q, rows = make(batch, q_len, 32, keys, dtype=dtype), make.int32(batch * q_len)
                    cumla.attention(q, k, v, **pages, mask=build(end=rows))
                cumla.attention(q, k, v, **pages, mask=build(end=rows), softcap=30.0)

        cache = "e4m3" if fp8 else "same"
        yield f"masks in attention, {keys} and {values} columns, {dtype.name}, {cache}", call


def attention_of_drafts(make: _Maker) -> Iterator[Case]:
    """Attention of equally many queries of each request, whose keys are split."""
    for (keys, values), dtype, page in itertools.product(WIDTHS[:4], HALVES, (64, 16)):

        def call(
            keys: int = keys, values: int = values, dtype: np.dtype[Any] = dtype, page: int = page
        ) -> None:
            k, v = (make(9, page, 8, width, dtype=dtype) for width in (keys, values))
            for batch, q_len in ((16, 24), (1, 300)):
                pages = {"block_table": make.int32(batch, 40), "kv_lens": make.int32(batch)}
                q, rows = make(batch, q_len, 32, keys, dtype=dtype), make.int32(batch * q_len)
                cumla.attention(q, k, v, **pages)
                mask = cumla.mha.mask.AttentionMask(end=rows)
                cumla.attention(q, k, v, **pages, mask=mask, sinks=make.float32(32))
                cumla.attention(q, k, v, **pages, softcap=30.0)
                cumla.attention(q, k, v, **pages, mask=mask, softcap=30.0)

        yield f"drafts, {keys} and {values} columns, {dtype.name}", call


def attention_with_caps(make: _Maker) -> Iterator[Case]:
    """Soft caps and float32 results of few queries, which have kernels of their own."""
    for (keys, values), dtype, fp8, page in itertools.product(
        WIDTHS, HALVES, (False, True), (64, 1)
    ):
        if fp8 and (keys > 256 or keys % 16 or values % 16):
            continue

        def call(
            keys: int = keys,
            values: int = values,
            dtype: np.dtype[Any] = dtype,
            fp8: bool = fp8,
            page: int = page,
        ) -> None:
            of_cache = E4M3 if fp8 else dtype
            k, v = (make(9, page, 8, width, dtype=of_cache) for width in (keys, values))
            for batch, q_len in ((1, 1), (1, 16), (16, 1), (16, 4)):
                pages = {"block_table": make.int32(batch, 40), "kv_lens": make.int32(batch)}
                q = make(batch, q_len, 32, keys, dtype=dtype)
                cumla.attention(q, k, v, **pages, softcap=30.0)
                cumla.attention(q, k, v, **pages, out=make.float32(batch, q_len, 32, values))

        cache = "e4m3" if fp8 else "same"
        yield f"capped attention, {keys} and {values} columns, {dtype.name}, {cache}", call


def attention_of_pairs(make: _Maker) -> Iterator[Case]:
    """Masks of many requests, whose kv heads are read in pairs."""
    for dtype, width in itertools.product(HALVES, (128, 96)):

        def call(dtype: np.dtype[Any] = dtype, width: int = width) -> None:
            k, v = (make(9, 64, 8, width, dtype=dtype) for _ in range(2))
            pages = {"block_table": make.int32(100, 40), "kv_lens": make.int32(100)}
            for q_len in (1, 4):
                q, rows = make(100, q_len, 32, width, dtype=dtype), make.int32(100 * q_len)
                mask = cumla.mha.mask.AttentionMask(end=rows)
                cumla.attention(q, k, v, **pages, mask=mask, sinks=make.float32(32))

        yield f"masks in attention, pairs of {width} columns, {dtype.name}", call


def attention_plans(make: _Maker) -> Iterator[Case]:
    """Plans of attention, lists of pages, other layouts, batch invariance."""
    for dtype, fp8, width, batch, page in itertools.product(
        HALVES, (False, True), (64, 128), (1, 16, 200), (64, 16)
    ):

        def call(
            dtype: np.dtype[Any] = dtype,
            fp8: bool = fp8,
            width: int = width,
            batch: int = batch,
            page: int = page,
        ) -> None:
            of_cache = E4M3 if fp8 else dtype
            k, v = (make(9, 8, page, width, dtype=of_cache) for _ in range(2))
            lens, table = make.int32(batch), make.int32(batch, 40)
            entries, begins = make.int32(50), make.int32(batch + 1)
            for tokens in (batch, 3 * batch, 40 * batch):
                q, indptr = make(tokens, 32, width, dtype=dtype), make.int32(batch + 1)
                given = {"qo_indptr": indptr, "kv_layout": "HND"}
                planned = cumla.AttentionPlan.from_arrays(q, k, v, **given, window=(64, 0))
                planned.update(lens, qo_indptr=indptr)
                planned.run(q, k, v, block_table=table, kv_layout="HND", softmax_scale=0.2)
                planned = cumla.AttentionPlan.from_arrays(q, k, v, **given)
                planned.update(lens, qo_indptr=indptr, kv_indptr=begins)
                planned.run(q, k, v, kv_indices=entries, kv_layout="HND")
            given = {"kv_lens": lens, "block_table": table, "kv_layout": "HND"}
            cumla.attention(q, k, v, qo_indptr=indptr, **given, batch_invariant=True)
            rows = make(batch, 2, 32, width, dtype=dtype)
            cumla.attention(rows, k, v, **given, batch_invariant=True)

        yield (
            f"plans of attention, {width} columns, {dtype.name}, {'e4m3' if fp8 else 'same'}",
            call,
        )


# --- the indexer ---------------------------------------------------------------------------------


def indexer(make: _Maker) -> Iterator[Case]:
    """Scores of all keys and of pages, their quantization and cache, and the largest of them."""
    for heads, dim, tokens in itertools.product((8, 16, 32, 64), (32, 64, 128), (1, 7, 700)):

        def logits(heads: int = heads, dim: int = dim, tokens: int = tokens) -> None:
            q, weights = make(tokens, heads, dim, dtype=E4M3), make.float32(tokens, heads)
            kv = make(900, dim, dtype=E4M3), make.float32(900)
            begins, ends = make.int32(tokens), make.int32(tokens)
            cumla.mqa_logits(q, kv, weights, begins, ends)
            options = {"clean": False, "max_kv_len": 500, "logits_dtype": BF16}
            cumla.mqa_logits(q, kv, weights, begins, ends, **options)

        yield "mqa_logits", logits
    for heads, dim, q_len, batch in itertools.product(
        (8, 32, 64), (32, 64, 128), (1, 2, 3, 4, 6, 8), (1, 20, 300)
    ):

        def paged(heads: int = heads, dim: int = dim, n: int = q_len, batch: int = batch) -> None:
            q, weights = make(batch, n, heads, dim, dtype=E4M3), make.float32(batch * n, heads)
            cache, table = make(9, 64, 1, dim + 4, dtype=BYTES), make.int32(batch, 40)
            lens, each = make.int32(batch), make.int32(batch, n)
            cumla.paged_mqa_logits(q, cache, weights, table, lens, max_kv_len=2000)
            cumla.paged_mqa_logits(q, cache, weights, table, each, max_kv_len=900, clean=False)
            planned = cumla.PagedMQALogitsPlan.from_arrays(q, cache, table, lens)
            planned.update(lens)
            planned.run(q, cache, weights, block_table=table, max_kv_len=2000)
            if dim == 128:
                options = {"max_kv_len": 2000, "cache_format": "mxfp4"}
                cache = make(9, 64, 1, 68, dtype=BYTES)
                cumla.paged_mqa_logits(q, cache, weights, table, lens, **options)

        yield "paged_mqa_logits", paged
    for dtype, rows, width, k in itertools.product(
        FLOATS,
        (1, 20, 300, 4000),
        (100, 4096, 9000, 30_000, 70_000, 200_000, 1_000_000),
        (8, 512, 2048),
    ):

        def select(
            dtype: np.dtype[Any] = dtype, rows: int = rows, width: int = width, k: int = k
        ) -> None:
            scores, lens = make(rows, width, dtype=dtype), make.int32(rows)
            cumla.top_k(scores, k, row_lens=lens)
            table, of_row = make.int32(4, 2000), make.int32(rows)
            more = {"block_table": table, "page_size": 64, "row_to_request": of_row}
            cumla.top_k(scores, k, row_lens=lens, row_starts=make.int32(rows), **more)
            if width <= 4096:
                cumla.top_k(scores, k, sorted=True, values=True, offsets=make.int32(rows))
            if (width, k) == (200_000, 8):  # more than a list
                cumla.top_k(scores, 10_000)

        yield f"top_k, {dtype.name}", select
    for dtype, rows in itertools.product(FLOATS, (20, 300)):

        def select_many(dtype: np.dtype[Any] = dtype, rows: int = rows) -> None:
            cumla.top_k(make(rows, 200_000, dtype=dtype), 5_000, row_lens=make.int32(rows))

        yield f"top_k of half a list and more, {dtype.name}", select_many
    for dtype, rows, dim in itertools.product(FLOATS, (1, 700), (32, 64, 128)):

        def keys(dtype: np.dtype[Any] = dtype, rows: int = rows, dim: int = dim) -> None:
            cumla.quantize_fp8(make(rows, 3, dim, dtype=dtype), power_of_two_scales=rows == 1)
            cache, slots = make(9, 64, dim + 4, dtype=BYTES), make(rows, dtype=INT64)
            cumla.append_indexer_cache(make(rows, dim, dtype=dtype), cache, slots)
            if dim == 128:
                cache, form = make(9, 64, 68, dtype=BYTES), {"cache_format": "mxfp4"}
                cumla.append_indexer_cache(make(rows, dim, dtype=dtype), cache, slots, **form)

        yield f"indexer's rows, {dtype.name}", keys


# --- caches --------------------------------------------------------------------------------------


def caches(make: _Maker) -> Iterator[Case]:
    """New rows into caches, with and without a rotation."""
    for form, of_cache, of_rows, rows, page in itertools.product(
        ("same", "apart", "e4m3", "e4m3 beside", "scales", "packed", "v4", *_NAMED),
        *(HALVES, FLOATS, (1, 700), (64, 16)),
    ):
        only_bf16 = form not in (*FORMS[:2], "e4m3")
        if of_rows not in (of_cache, FP32) or (only_bf16 and of_cache == FP16):
            continue

        def append(
            form: str = form,
            of_cache: np.dtype[Any] = of_cache,
            of_rows: np.dtype[Any] = of_rows,
            rows: int = rows,
            page: int = page,
        ) -> None:
            nbytes = _BYTES.get(form)
            cache = make(9, page, 1, nbytes, dtype=BYTES) if nbytes else None
            cache = cache or make.latent(form, 9, page, 1, dtype=of_cache)
            given = make(rows, 512 if nbytes else 576, dtype=of_rows)
            place = {"batch_indices": make.int32(rows), "positions": make.int32(rows)}
            table = {"block_table": make.int32(5, 40)}
            named = {"cache_format": form} if form in _NAMED else {}
            cumla.append_mla_cache(given, cache, **place, **table, **named)
            if not nbytes:
                turn = {"cos_sin": make.float32(99, 64), "q_pe": make(rows, 3, 64, dtype=of_cache)}
                cumla.append_mla_cache(
                    given, cache, make(rows, dtype=INT64), positions=make.int32(rows), **turn
                )

        yield f"append_mla_cache, {form}, {of_cache.name}, rows of {of_rows.name}", append
    for dtype, fp8, rows, width in itertools.product(
        FLOATS, (False, True), (1, 700), (64, 128, 256)
    ):

        def keys(
            dtype: np.dtype[Any] = dtype, fp8: bool = fp8, rows: int = rows, width: int = width
        ) -> None:
            of_cache = E4M3 if fp8 else dtype
            k, v = (make(rows, 4, width, dtype=dtype) for _ in range(2))
            k_cache, v_cache = (make(9, 16, 4, width, dtype=of_cache) for _ in range(2))
            scales = {"k_scale": make.float32(1), "v_scale": 0.5} if fp8 else {}
            cumla.append_kv_cache(k, v, k_cache, v_cache, make(rows, dtype=INT64), **scales)
            place = {"kv_lens": make.int32(5), "qo_indptr": make.int32(6)}
            turn = {"cos_sin": make.float32(99, width), "q": make(rows, 8, width, dtype=dtype)}
            table = {"block_table": make.int32(5, 40)}
            cumla.append_kv_cache(k, v, k_cache, v_cache, **place, **table, **turn, **scales)
            if not fp8:
                cumla.apply_rope(turn["q"], k, make.int32(rows), turn["cos_sin"])

        yield f"append_kv_cache, {dtype.name}, {'e4m3' if fp8 else 'same'}", keys


def dsa(make: _Maker) -> Iterator[Case]:
    """A step of DeepSeek-V3.2: scores, the largest of them, attention to their rows."""
    for batch, q_len, heads in itertools.product((1, 20, 300), (1, 2), (16, 128)):

        def step(batch: int = batch, q_len: int = q_len, heads: int = heads) -> None:
            q, index_q = make(batch, q_len, heads, 576), make(batch, q_len, 64, 128, dtype=E4M3)
            cache, keys = make.latent("packed", 9, 64, 1), make(9, 64, 1, 132, dtype=BYTES)
            table, weights = make.int32(batch, 40), make.float32(batch * q_len, 64)
            planned = cumla.DSAPlan.from_arrays(
                q, cache, index_q, keys, block_table=table, topk=2048
            )
            planned.update(make.int32(batch))
            planned.select(index_q, keys, weights, block_table=table)
            planned.run(q, cache, block_table=table)

        yield "steps of DSAPlan", step


def blocks_of_prompts(make: _Maker) -> Iterator[Case]:
    """Block-sparse attention of prompts, whose query tokens share row tiles."""
    for columns, dtype, fp8 in itertools.product(((128, 128), (192, 128)), HALVES, (False, True)):

        def prompts(
            columns: tuple[int, int] = columns, dtype: np.dtype[Any] = dtype, fp8: bool = fp8
        ) -> None:
            of_cache = E4M3 if fp8 else dtype
            for heads, kv_heads, block, topk in ((64, 4, 128, 16), (12, 1, 64, 40), (32, 1, 64, 9)):
                k, v = (make(9, 128, kv_heads, n, dtype=of_cache) for n in columns)
                lists = make.int32(900, kv_heads, topk)
                given: dict[str, Any] = {"block_table": make.int32(3, 50), "block_size": block}
                given["kv_lens"] = make.int32(3)
                q = make(900, heads, columns[0], dtype=dtype)
                cumla.block_sparse_attention(q, k, v, lists, **given, qo_indptr=make.int32(4))
                given |= {"sinks": make.float32(heads), "topk_lens": make.int32(900)}
                q = make(3, 300, heads, columns[0], dtype=dtype)
                cumla.block_sparse_attention(q, k, v, lists, **given)

        cache = "e4m3" if fp8 else "same"
        yield f"prompts over lists of blocks, {columns[0]} columns, {dtype.name}, {cache}", prompts


def blocks_of_e4m3_by_rows(make: _Maker) -> Iterator[Case]:
    """Block-sparse attention with factors of e4m3 rows."""
    for dtype, (heads, kv_heads) in itertools.product(HALVES, ((16, 1), (32, 4))):

        def attend(
            dtype: np.dtype[Any] = dtype, heads: int = heads, kv_heads: int = kv_heads
        ) -> None:
            k, v = (make(9, 128, kv_heads, 128, dtype=E4M3) for _ in range(2))
            given = {f"{name}_scale": make.float32(kv_heads, 9 * 128) for name in "kv"}
            for batch, q_len in ((1, 1), (33, 1), (64, 1), (128, 1), (200, 3)):
                lists = make.int32(batch * q_len, kv_heads, 16)
                q = make(batch, q_len, heads, 128, dtype=dtype)
                of_call = {"block_table": make.int32(batch, 50), "kv_lens": make.int32(batch)}
                for invariant in (False, True):
                    cumla.block_sparse_attention(
                        *(q, k, v, lists),
                        **(of_call | given),
                        block_size=128,
                        batch_invariant=invariant,
                    )

        yield f"factors of rows, lists of blocks, {dtype.name}, {heads} heads", attend


def blocks(make: _Maker) -> Iterator[Case]:
    """Block-sparse attention, scores of blocks, and their choice."""
    grid = itertools.product((64, 128, 192, 256), HALVES, (False, True), ((16, 1), (32, 4)))
    for width, dtype, fp8, (heads, kv_heads) in grid:

        def attend(
            width: int = width,
            dtype: np.dtype[Any] = dtype,
            fp8: bool = fp8,
            heads: int = heads,
            kv_heads: int = kv_heads,
        ) -> None:
            of_cache = E4M3 if fp8 else dtype
            for block, page, topk in ((128, 128, 16), (16, 64, 40), (4, 64, 513)):
                for batch, q_len in ((1, 1), (64, 1), (200, 3)):
                    k, v = (make(9, page, kv_heads, width, dtype=of_cache) for _ in range(2))
                    q = make(batch, q_len, heads, width, dtype=dtype)
                    lists = make.int32(batch * q_len, kv_heads, topk)
                    given: dict[str, Any] = {"block_table": make.int32(batch, 50)}
                    of_call = {"block_size": block, "kv_lens": make.int32(batch)}
                    cumla.block_sparse_attention(q, k, v, lists, **of_call, **given)
                    shared = make(batch * q_len, 1, topk, dtype=INT64)
                    given |= {
                        "sinks": make.float32(heads),
                        "topk_lens": make.int32(batch * q_len),
                    }
                    cumla.block_sparse_attention(
                        q, k, v, shared, **of_call, **given, batch_invariant=True
                    )
                plan = cumla.BlockSparsePlan.from_arrays(q, k, v, lists, block_size=block)
                plan.update(of_call["kv_lens"])
                plan.run(q, k, v, lists, **given, indices_are="tokens")

        cache = "e4m3" if fp8 else "same"
        yield f"lists of blocks, {width} columns, {dtype.name}, {heads} heads, {cache}", attend
    for dtype, fp8 in itertools.product(HALVES, (False, True)):

        def few(dtype: np.dtype[Any] = dtype, fp8: bool = fp8) -> None:
            for batch, topk in ((33, 16), (6, 16), (3, 7), (2, 30)):
                k, v = (make(9, 128, 1, 128, dtype=E4M3 if fp8 else dtype) for _ in range(2))
                q, lists = make(batch, 1, 12, 128, dtype=dtype), make.int32(batch, 1, topk)
                given = {"block_table": make.int32(batch, 50), "kv_lens": make.int32(batch)}
                cumla.block_sparse_attention(q, k, v, lists, block_size=128, **given)

        yield f"few lists of blocks, {dtype.name}, {'e4m3' if fp8 else 'same'}", few
    for width, dtype in itertools.product((64, 128, 256), (BF16, FP16, E4M3)):

        def score(width: int = width, dtype: np.dtype[Any] = dtype) -> None:
            for tokens, heads, block in ((3, 4, 128), (900, 1, 16), (900, 32, 64)):
                given: dict[str, Any] = {"kv_lens": make.int32(3), "block_table": make.int32(3, 99)}
                keys = make(9, 128, width, dtype=dtype)
                q = make(tokens, heads, width, dtype=dtype)
                given |= {"qo_indptr": make.int32(4), "block_size": block}
                cumla.block_scores(q, keys, **given)

        yield f"scores of blocks, {width} columns, {dtype.name}", score
    for dtype in FLOATS:

        def select(dtype: np.dtype[Any] = dtype) -> None:
            for tokens, width, k in ((3, 200, 9), (3, 1024, 16), (9, 3000, 16), (700, 40000, 512)):
                scores, visible = make(tokens, 4, width, dtype=dtype), make.int32(tokens)
                cumla.select_blocks(scores, k, visible=visible, local_blocks=1)
                cumla.select_blocks(scores, 3, visible=visible, init_blocks=1, local_blocks=2)

        yield f"choice of blocks, {dtype.name}", select
    for q_len in (0, 2):

        def step(q_len: int = q_len) -> None:
            lead = (3, q_len) if q_len else (7,)
            q, index_q = make(*lead, 16, 128, dtype=BF16), make(*lead, 2, 128, dtype=BF16)
            k, v = (make(9, 128, 2, 128, dtype=BF16) for _ in range(2))
            keys, table = make(9, 128, 128, dtype=BF16), {"block_table": make.int32(3, 99)}
            ragged = {} if q_len else {"qo_indptr": make.int32(4)}
            forced: dict[str, Any] = {"topk": 16, "block_size": 128, "local_blocks": 1}
            of = cumla.BlockSparseStep.from_arrays(
                q, k, v, index_q, keys, **table, **ragged, **forced
            )
            of.update(make.int32(3), **ragged)
            of.select(index_q, keys, **table)
            of.run(q, k, v, **table)

        yield f"step of blocks, {q_len} query tokens", step


def scores_of_few_rows(make: _Maker) -> Iterator[Case]:
    """Scores of blocks for few query rows of each request."""
    for dtype in (BF16, FP16, E4M3):

        def score(dtype: np.dtype[Any] = dtype) -> None:
            for batch, q_len, heads in ((1, 1, 4), (64, 1, 4), (300, 2, 3)):
                given: dict[str, Any] = {"block_table": make.int32(batch, 99), "block_size": 64}
                keys, q = (
                    make(*shape, 128, dtype=dtype) for shape in ((9, 128), (batch, q_len, heads))
                )
                cumla.block_scores(q, keys, kv_lens=make.int32(batch), **given)

        yield f"scores of blocks, few query rows, {dtype.name}", score

        def score_few(dtype: np.dtype[Any] = dtype) -> None:
            for batch in (1, 8) if dtype == E4M3 else (1,):  # 99 blocks, and 792
                q, keys = make(batch, 1, 4, 128, dtype=dtype), make(9, 128, 128, dtype=dtype)
                table, lens = make.int32(batch, 99), make.int32(batch)
                cumla.block_scores(q, keys, block_size=128, kv_lens=lens, block_table=table)

        yield f"scores of few blocks, {dtype.name}", score_few


def sums_of_scores(make: _Maker) -> Iterator[Case]:
    """Scores of blocks from sums over heads, of pooled keys and of listed blocks."""
    for width, dtype in itertools.product((64, 128, 256), (BF16, FP16, E4M3)):

        def add_up(width: int = width, dtype: np.dtype[Any] = dtype) -> None:
            for tokens, heads, groups, stride in ((3, 4, 1, 4), (900, 16, 2, 8), (70, 40, 5, 1)):
                given: dict[str, Any] = {"kv_lens": make.int32(3), "block_table": make.int32(3, 99)}
                keys = make(9, 32, width, dtype=dtype)
                q = make(tokens, heads, width, dtype=dtype)
                given |= {"qo_indptr": make.int32(4), "stride": stride, "num_groups": groups}
                given["block_size"] = stride if stride > 1 else 16
                cumla.block_scores(q, keys, **given, weights=make.float32(tokens, heads))
                lists = make.int32(tokens, groups, 50)
                cumla.block_scores(q, keys, **given, activation="relu", block_indices=lists)

            for batch, q_len, groups in ((3, 2, 1), (64, 1, 4), (2, 90, 1)):
                given = {"kv_lens": make.int32(batch), "block_table": make.int32(batch, 99)}
                q, keys = (
                    make(*shape, width, dtype=dtype) for shape in ((batch, q_len, 4), (9, 24))
                )
                weights = make.float32(batch * q_len, 4)
                given |= {"block_size": 4, "stride": 4, "num_groups": groups, "weights": weights}
                cumla.block_scores(q, keys, **given)

        yield f"sums of scores of blocks, {width} columns, {dtype.name}", add_up

    for dtype in (BF16, FP16, E4M3):

        def add_up_two(dtype: np.dtype[Any] = dtype) -> None:
            given: dict[str, Any] = {"kv_lens": make.int32(2), "block_table": make.int32(2, 99)}
            given |= {"block_size": 4, "stride": 4, "num_groups": 2}
            q, keys = (make(*shape, 128, dtype=dtype) for shape in ((2, 90, 4), (9, 24)))
            cumla.block_scores(q, keys, **given)

        yield f"sums of scores of blocks, groups of two heads, {dtype.name}", add_up_two


def small(make: _Maker) -> Iterator[Case]:
    """Merging states."""
    for dtype, count, rows in itertools.product(FLOATS, (2, 5), (1, 700)):

        def merge(dtype: np.dtype[Any] = dtype, count: int = count, rows: int = rows) -> None:
            outs = [make(rows, 16, 128, dtype=dtype) for _ in range(count)]
            cumla.merge_attention_states(outs, [make.float32(rows, 16) for _ in range(count)])

        yield f"merge_attention_states, {dtype.name}", merge


def attention_by_biases(make: _Maker) -> Iterator[Case]:
    """Attention with slopes and tables: all widths, dtypes and forms of pages."""
    build = cumla.mha.bias.AttentionBias
    for (keys, values), dtype, fp8, page in itertools.product(
        WIDTHS, FLOATS, (False, True), (0, 64, 1)
    ):
        if max(keys, values) > 256 or (fp8 and (dtype == FP32 or keys % 16 or values % 16)):
            continue

        def call(
            keys: int = keys,
            values: int = values,
            dtype: np.dtype[Any] = dtype,
            fp8: bool = fp8,
            page: int = page,
        ) -> None:
            of_cache, batch = E4M3 if fp8 else dtype, 16
            shape = (9, page, 8) if page else (5000, 8)
            k, v = make(*shape, keys, dtype=of_cache), make(*shape, values, dtype=of_cache)
            pages: dict[str, Any] = {"kv_indptr": make.int32(batch + 1)}
            if page:
                pages = {"block_table": make.int32(batch, 40), "kv_lens": make.int32(batch)}
            for tokens in (batch, 40 * batch):
                q, indptr = make(tokens, 32, keys, dtype=dtype), make.int32(batch + 1)
                given = {"qo_indptr": indptr, **pages}
                cumla.attention(q, k, v, **given, bias=build(slopes=make.float32(32)))
                table = make(tokens, 32, 100, dtype=dtype)
                cumla.attention(q, k, v, **given, bias=build(table=table), window=99)
                heads = build(table=make.float32(32, 9), first=make.int32(1))
                cumla.attention(q, k, v, **given, bias=heads, causal=False)
            if page:
                for q_len in (1, 4, 300):
                    q, slopes = make(batch, q_len, 32, keys, dtype=dtype), make.float32(batch, 32)
                    cumla.attention(q, k, v, **pages, bias=build(slopes=slopes))
                out, table = make.float32(*q.shape[:3], values), make(16 * 300, 32, 96, dtype=dtype)
                cumla.attention(q, k, v, **pages, bias=build(slopes=slopes), out=out)
                cumla.attention(q, k, v, **pages, bias=build(table=table), out=out)

        cache = "e4m3" if fp8 else "same"
        yield f"biases in attention, {keys} and {values} columns, {dtype.name}, {cache}", call


def attention_of_few_rows_by_biases(make: _Maker) -> Iterator[Case]:
    """One query token of one request, with slopes and with a table."""
    build = cumla.mha.bias.AttentionBias
    for dtype, width in itertools.product(HALVES, (64, 128, 256)):

        def call(dtype: np.dtype[Any] = dtype, width: int = width) -> None:
            k, v = (make(9, 64, 8, width, dtype=dtype) for _ in range(2))
            pages = {"block_table": make.int32(1, 40), "kv_lens": make.int32(1)}
            q, table = make(1, 1, 32, width, dtype=dtype), make(1, 32, 100, dtype=dtype)
            for bias in (build(slopes=make.float32(32)), build(table=table)):
                cumla.attention(q, k, v, **pages, bias=bias)

        yield f"biases in attention of few rows, {width} columns, {dtype.name}", call


def masks(make: _Maker) -> Iterator[Case]:
    """Building masks of attention: intervals, by requests and by tokens, and trees in all forms."""
    build = cumla.mha.mask.AttentionMask

    for total, batch in ((5, 5), (700, 3)):

        def rows(total: int = total, batch: int = batch) -> None:
            lens = {"kv_lens": make.int32(batch)}
            ragged = {**lens, "qo_indptr": make.int32(batch + 1), "total_tokens": total}
            build.windows(127, **ragged)
            build.chunks(8192, 1, **lens, q_len=2, positions=make(2 * batch, dtype=INT64))
            build.blocks(32, **ragged, positions=make.int32(total))
            build.causal_flags(make(batch, dtype=BYTES), window=9, **ragged)
            build.image_spans(make.int32(batch, 6, 2), window=1023, **ragged)
            build.image_spans(make.int32(total, 2), clamp=True, **ragged)

        yield "masks by rows", rows

        def trees(total: int = total, batch: int = batch) -> None:
            lens, flags = {"kv_lens": make.int32(batch)}, np.dtype(bool)
            ragged = {**lens, "qo_indptr": make.int32(batch + 1), "total_tokens": total}
            build.from_tree(make(batch, 40, 40, dtype=flags))
            build.from_tree(make(batch + 2, 40, 40, dtype=flags), window=3, **ragged)
            build.from_tree(make(total, 5, dtype=BYTES), **ragged)
            build.from_tree(make(9000, dtype=flags), full=True, **lens, q_len=40)
            build.from_tree(make(9000, dtype=BYTES), full=True, **ragged)
            out = build(tree=make.int32(total, 8))
            build.from_tree(make(batch, 40, 40, dtype=flags), **ragged, out=out)

        yield "masks of trees", trees


def prefixes(make: _Maker) -> Iterator[Case]:
    """Shared prefixes: finding them, MHA of one and of several query tokens, MLA, plans."""

    def find() -> None:
        for columns, n in ((40, 16), (300, 2000)):
            table, lens = make.int32(n, columns), make.int32(n)
            cumla.find_prefix_groups(table, lens, page_size=16)
            cumla.find_prefix_groups(table, lens, make.int32(n + 1), page_size=64, min_tokens=1)

    yield "find_prefix_groups", find

    for dtype, (keys, values), page in itertools.product(FLOATS, WIDTHS[::2], (64, 16, 1)):

        def attend(
            dtype: np.dtype[Any] = dtype, keys: int = keys, values: int = values, page: int = page
        ) -> None:
            k, v = make(9, page, 8, keys, dtype=dtype), make(9, page, 8, values, dtype=dtype)
            groups = make.int32(16), make.int32(16)
            pages = {"block_table": make.int32(16, 40), "kv_lens": make.int32(16)}
            for q_len in (1, 3):
                q = make(16, q_len, 32, keys, dtype=dtype)
                cumla.attention(q, k, v, **pages, groups=groups, sinks=make.float32(32))
            rows, indptr = make(70, 32, keys, dtype=dtype), make.int32(17)
            cumla.attention(rows, k, v, **pages, qo_indptr=indptr, groups=groups)
            more: dict[str, Any] = {"prefix_groups": True, "max_pages": 40, "causal": False}
            plan = cumla.AttentionPlan.from_arrays(rows, k, v, qo_indptr=indptr, **more)
            plan.update(pages["kv_lens"], qo_indptr=indptr, groups=groups)
            plan.run(rows, k, v, block_table=pages["block_table"])

        yield f"attention with groups, {keys} and {values} columns, {dtype.name}, {page}", attend

    for dtype, heads in itertools.product(HALVES, (16, 128)):

        def latent(dtype: np.dtype[Any] = dtype, heads: int = heads) -> None:
            groups, lens, indptr = (make.int32(16), make.int32(16)), make.int32(16), make.int32(17)
            for tokens, page in ((16, 64), (50, 1)):
                q, cache = make(tokens, heads, 576, dtype=dtype), make(9, page, 576, dtype=dtype)
                given = {"kv_lens": lens, "qo_indptr": indptr, "block_table": make.int32(16, 40)}
                cumla.mla_attention(q, cache, **given, groups=groups)

        yield f"MLA with groups, {heads} heads, {dtype.name}", latent


def layouts(make: _Maker) -> Iterator[Case]:
    """Arrays with gaps, given outputs, scales of requests and heads, right windows, no pages."""
    for dtype, batch, heads in itertools.product(HALVES, (3, 40), (16, 128)):

        def latent(dtype: np.dtype[Any] = dtype, n: int = batch, heads: int = heads) -> None:
            table, lens = make.wide(n, 40, dtype=INT32), make.int32(n)
            q, out = make.wide(n, 2, heads, 576, dtype=dtype), make.wide(n, 2, heads, 512)
            apart = make.wide(9, 64, 1, 512, dtype=dtype), make.wide(9, 64, 1, 64, dtype=dtype)
            for cache in (make.wide(9, 64, 1, 576, dtype=dtype), apart):
                cumla.mla_decode(q, cache, table, lens)
            state = {
                "out": make.wide(n, 2, heads, 512, dtype=dtype),
                "lse": make.float32(n, heads, 2).swapaxes(1, 2),
            }
            cumla.mla_decode(q, apart, table, lens, **state)
            state["out"] = make.float32(n, 2, heads, 512)
            cumla.mla_decode(q, apart, table, lens, **state)
            if dtype == BF16:
                scales = make.repeated(9, 64, 1, 4)
                kv = make.wide(9, 64, 1, 512, dtype=E4M3), make.wide(9, 64, 1, 64), scales
                cumla.mla_decode(q, kv, table, lens, out=out)
                cumla.mla_decode(q, kv[0:2], table, lens, kv_scale=make.float32(1))
                cumla.mla_decode(q, kv[0:2], table, lens, kv_scale=0.5)
            rows, requests = make.wide(n, 2, 300, dtype=INT32), make.wide(n, 2, dtype=INT32)
            lists: dict[str, Any] = {"block_table": table, "row_to_request": requests}
            cumla.mla_sparse_decode(q, apart, rows, **lists, topk_lens=make.wide(n, 2, dtype=INT32))

        yield f"MLA with gaps, {dtype.name}", latent
    for dtype, fp8, batch, width in itertools.product(HALVES, (False, True), (3, 200), (64, 128)):

        def heads(
            dtype: np.dtype[Any] = dtype, fp8: bool = fp8, batch: int = batch, width: int = width
        ) -> None:
            of_cache = E4M3 if fp8 else dtype
            k, v = (make.wide(9, 64, 8, width, dtype=of_cache) for _ in range(2))
            pages = {"block_table": make.wide(batch, 40, dtype=INT32), "kv_lens": make.int32(batch)}
            q, rows = make.wide(batch, 2, 32, width, dtype=dtype), make.int32(batch + 1)
            tokens = make.wide(3 * batch, 32, width, dtype=dtype)
            out, lse = (
                make.wide(3 * batch, 32, width, dtype=dtype),
                make.wide(3 * batch, 32, dtype=FP32),
            )
            cumla.attention(q, k, v, **pages, window=(64, 16), causal=False)
            cumla.attention(tokens, k, v, **pages, qo_indptr=rows, window=(None, 16), causal=False)
            cumla.attention(tokens, k, v, **pages, qo_indptr=rows, out=out, lse=lse)
            if fp8:
                for scale in (make.float32(8), make.wide(batch, 8, dtype=FP32)):
                    cumla.attention(q, k, v, **pages, k_scale=scale, v_scale=scale)
            nothing = (make(0, 64, 8, width, dtype=of_cache) for _ in range(2))
            cumla.attention(tokens, *nothing, **pages, qo_indptr=rows)

        yield f"attention with gaps, {dtype.name}, {'e4m3' if fp8 else 'same'}", heads


def others(make: _Maker) -> Iterator[Case]:
    """The same of what is not attention."""
    for dtype in FLOATS:

        def call(dtype: np.dtype[Any] = dtype) -> None:
            stacked = make(4, 5, 7, 16, 128, dtype=dtype)
            lses = make.float32(4, 5, 16, 7).swapaxes(-1, -2)
            out = make.wide(5, 7, 16, 128, dtype=dtype)
            cumla.merge_attention_states(stacked, lses, out=out, lse_base=2.0)
            scores = make.wide(20, 5000, dtype=dtype)
            more = {"out": make.wide(20, 64, dtype=INT32), "counts": make.int32(20)}
            cumla.top_k(scores, 64, out_positions=make.wide(20, 64, dtype=INT32), **more)
            k, v = make.wide(9, 4, 64, dtype=dtype), make.wide(9, 4, 64, dtype=dtype)
            k_cache, v_cache = (make.wide(9, 16, 4, 64, dtype=dtype) for _ in range(2))
            turn = {"cos_sin": (make.float32(99, 16), make.float32(99, 16)), "rotary_offset": 8}
            place = {"batch_indices": make.int32(9), "positions": make(9, dtype=INT64)}
            of_list = {"kv_indices": make.int32(50), "kv_indptr": make.int32(6)}
            q = make.wide(9, 8, 64, dtype=dtype)
            given = {"q": q, "q_out": make.wide(9, 8, 64, dtype=dtype), "interleaved": True}
            cumla.append_kv_cache(k, v, k_cache, v_cache, **place, **of_list, **turn, **given)
            hnd = (make.wide(9, 4, 16, 64, dtype=dtype) for _ in range(2))
            cumla.append_kv_cache(k, v, *hnd, make.int32(9), kv_layout="HND")

        yield f"others with gaps, {dtype.name}", call


TABLE: dict[str, Callable[[_Maker], Iterator[Case]]] = {
    function.__name__: function
    for function in (
        *(
            mla,
            mla_masks,
            mla_trees,
            mla_widths,
            mla_invariant,
            mla_lists,
            attention,
            attention_by_masks,
            attention_of_drafts,
            attention_with_caps,
            attention_of_pairs,
        ),
        *(attention_by_biases, attention_of_few_rows_by_biases, attention_plans),
        *(indexer, dsa, caches, small, masks),
        *(prefixes, layouts, others, blocks, blocks_of_prompts, blocks_of_e4m3_by_rows),
        *(scores_of_few_rows, sums_of_scores),
    )
}

if __name__ == "__main__":
    gc.disable()  # a tenth of the time
    named = sys.argv[1:]
    if named and "/" in named[0]:  # "0/2": half of the table; no two functions have one group
        share, count = map(int, named[0].split("/"))
        named = [*TABLE][share::count]
    json.dump(launches(*named), sys.stdout, sort_keys=True)
