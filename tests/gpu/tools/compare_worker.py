# SPDX-License-Identifier: Apache-2.0
"""One of the two processes of compare.py: checks and times cases with the cumla of one folder.

    python compare_worker.py FOLDER cupy|numpy

Reads jobs from standard input, a JSON object a line, and answers each with one. Needs nothing of
the repository but the public functions of the cumla in FOLDER, whose names and order of arguments
may be those of an earlier version. On NumPy arrays, for tests, the clock is the host's.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns, sleep
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32,
}  # fmt: skip
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE = 576**-0.5
KV_SCALE = 2.0**-9  # 448 times it is above the largest number of a cache
ROW_TOLERANCE = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-5}  # |error| / |row|
LOGITS_TOLERANCE = 3e-3  # tensor cores keep about 13 bits of a sum of FP8 products
LSE_TOLERANCE = 8.01 / 65536

Array = Any
Call = Callable[[], object]

READ_L2 = r"""
extern "C" __global__ void read_l2(const uint4* words, long long count, unsigned* sink) {
  unsigned sum = 0;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count;
       i += (long long)gridDim.x * blockDim.x) {
    const uint4 word = words[i];
    sum += word.x ^ word.y ^ word.z ^ word.w;
  }
  if (sum == 0x9e3779b9u) *sink = sum;
}
"""
FLUSH_BYTES = 512 << 20


class CuPy:
    """Arrays on the GPU, and its clock. The cache of the L2 is emptied before each timed call."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.flushed = cupy.zeros(FLUSH_BYTES // 4, np.uint32)
        self.sink = cupy.zeros(1, np.uint32)
        self.read = cupy.RawKernel(READ_L2, "read_l2")

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Make an array of 0xFF bytes: NaN as any float."""
        array = self.cupy.empty(tuple(shape), dtype)
        array.data.memset_async(0xFF, array.nbytes, self.stream)
        return array

    def repeat(self, array: Array, block: np.ndarray) -> None:
        """Fill a contiguous array with the bytes of a block, over and over."""
        source, done = self.upload(block), 0
        while done < array.nbytes:
            count = min(block.nbytes, array.nbytes - done)
            (array.data + done).copy_from_device_async(source.data, count, self.stream)
            done += count

    def upload(self, array: np.ndarray) -> Array:
        return self.cupy.asarray(array)

    def download(self, array: Array) -> np.ndarray:
        got = self.cupy.asnumpy(array, stream=self.stream)
        self.stream.synchronize()
        self.stream.use()  # copying a slice makes the null stream the current one
        return got

    def synchronize(self) -> None:
        self.stream.synchronize()

    def release(self) -> None:
        """Give memory back, so that the other process can have it."""
        gc.collect()
        self.cupy.get_default_memory_pool().free_all_blocks()

    def times(self, call: Call, repeats: int) -> list[float]:
        """Time calls between two events each, in microseconds."""
        grid = (4 * self.cupy.cuda.Device().attributes["MultiProcessorCount"],)
        arguments = (self.flushed, np.int64(FLUSH_BYTES // 16), self.sink)
        pairs = []
        for _ in range(repeats):
            self.read(grid, (512,), arguments)
            begin, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            begin.record(self.stream)
            call()
            end.record(self.stream)
            pairs.append((begin, end))
        self.stream.synchronize()
        return [1e3 * self.cupy.cuda.get_elapsed_time(*pair) for pair in pairs]


class NumPy:
    """The same on the CPU, for tests; as CuPy it knows no numbers of ml_dtypes."""

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        array = np.empty(tuple(shape), dtype)
        array.view(np.uint8).fill(0xFF)
        return array

    def repeat(self, array: Array, block: np.ndarray) -> None:
        assert array.dtype.kind == block.dtype.kind == "u"
        flat = array.reshape(-1).view(np.uint8)
        flat[:] = np.resize(block.reshape(-1).view(np.uint8), flat.size)

    def upload(self, array: np.ndarray) -> Array:
        assert array.dtype.kind in "iuf", array.dtype
        return array.copy()

    def download(self, array: Array) -> np.ndarray:
        assert array.dtype.kind in "iuf", array.dtype
        return np.array(array)

    def synchronize(self) -> None:
        pass

    def release(self) -> None:
        pass

    def times(self, call: Call, repeats: int) -> list[float]:
        measured = []
        for _ in range(repeats):
            begin = perf_counter_ns()
            call()
            measured.append((perf_counter_ns() - begin) / 1e3)
        return measured


# --- calls of both versions -----------------------------------------------------------------------

# What a parameter was called before.
FORMER = {"kv_lens": ("cache_seqlens", "context_lens"), "kv_scale": ("scale",)}
FORMER["max_kv_len"] = ("max_context_len", "max_seqlen")
LEFT_OUT = ("kv_lens",)  # of run(), which had the lengths before


def bind(function: Callable[..., Any], **given: Any) -> Call:
    """Bind arguments by their present names to a function of either version."""
    signature = inspect.signature(function)
    named = {}
    for name, value in given.items():
        names = [known for known in (name, *FORMER.get(name, ())) if known in signature.parameters]
        if names:
            named[names[0]] = value
        elif name not in LEFT_OUT:
            raise TypeError(f"{function.__qualname__} takes no {name}: {signature}")
    bound = signature.bind(**named)
    return partial(function, *bound.args, **bound.kwargs)


def plain(dtype: Any) -> str:
    """Name the unsigned integers of a dtype's size."""
    return f"uint{8 * np.dtype(dtype).itemsize}"


class Wrong(Exception):
    """A result is not what float64 says."""


class Work(NamedTuple):
    """A call, what checks its result, and the outputs whose bits are compared."""

    call: Call
    check: Callable[[], None]
    outputs: tuple[Array, ...]


# --- inputs ---------------------------------------------------------------------------------------


class Worker:
    """Makes the work of each case with one version of cumla."""

    def __init__(self, cumla: Any, device: Any) -> None:
        self.cumla, self.device = cumla, device
        self.work: Work | None = None

    def normal(self, shape: Sequence[int], dtype: str, *, deviation: float, seed: int) -> Array:
        """Make normal numbers; a block of a million or so is repeated."""
        array = self.device.empty(shape, plain(DTYPES[dtype]))
        count = min(array.size, 2**20 + 577)
        numbers = deviation * np.random.default_rng(seed).standard_normal(count, np.float32)
        self.device.repeat(array, numbers.astype(DTYPES[dtype]).view(array.dtype))
        return array.view(DTYPES[dtype])

    def get(self, array: Array, *index: Any) -> np.ndarray:
        """Bring a part of an array to the host; CuPy itself computes with plain integers alone."""
        bits = array.view(plain(array.dtype))
        return self.device.download(bits[index] if index else bits).view(array.dtype)

    def output(self, shape: Sequence[int], dtype: Any) -> Array:
        """Make an output of NaN."""
        return self.device.empty(shape, plain(dtype)).view(dtype)

    def lse_output(self, batch: int, heads: int, q_len: int) -> tuple[Array, Array]:
        """Make an lse of NaN, (batch, heads, q_len), and its view for this version."""
        lse = self.output((batch, heads, q_len), np.float32)
        of_former = "topk_length" in inspect.signature(self.cumla.mla_sparse_decode).parameters
        return lse, lse if of_former else lse.swapaxes(1, 2)

    def shuffled(self, count: int) -> np.ndarray:
        return np.random.default_rng(count).permutation(count).astype(np.int32)

    def lengths(self, batch: int, kv_len: int, ragged: bool) -> np.ndarray:
        """Tokens of each request; ragged ones are log-normal with the same mean."""
        if not ragged:
            return np.full(batch, kv_len, np.int32)
        drawn = np.random.default_rng(0).lognormal(sigma=0.8, size=batch)
        return np.maximum(1, drawn * (kv_len / drawn.mean())).astype(np.int32)

    def table(self, lengths: np.ndarray, page: int) -> np.ndarray:
        """Deal shuffled pages out to requests."""
        counts = -(-lengths // page)
        used = np.arange(counts.max()) < counts[:, None]
        table = np.zeros(used.shape, np.int32)
        table[used] = self.shuffled(int(counts.sum()))
        return table

    def tokens(self, part: Array, table: np.ndarray, request: int, length: int) -> np.ndarray:
        """Bring the rows of a request's tokens to the host: (tokens, kv_heads, columns)."""
        page = part.shape[1]
        own = self.device.upload(table[request, : -(-length // page)])
        rows = self.get(part, own)
        return rows.reshape(-1, *rows.shape[2:])[:length]

    # --- MLA --------------------------------------------------------------------------------------

    def decode(
        self, batch: int, q_len: int, heads: int, kv_len: int, *, page: int = 64,
        kv_heads: int = 1, dtype: str = "bfloat16", ragged: bool = False, cache: str = "one",
        invariant: bool = False,
    ) -> Work:  # fmt: skip
        """Decode with a ready plan; `cache` is one, split, e4m3, scales or packed."""
        device, lengths = self.device, self.lengths(batch, kv_len, ragged)
        table = self.table(lengths, page)
        q = self.normal((batch, q_len, heads, 576), dtype, deviation=0.1, seed=3)
        pages = int((-(-lengths // page)).sum())
        rows = self.normal((pages, page, kv_heads, 576), dtype, deviation=0.1, seed=2)
        given, keys, kv_scale = self.cache(rows, cache)
        out = self.output((*q.shape[:-1], 512), q.dtype)
        lse, given_lse = self.lse_output(batch, heads, q_len)
        plans = self.cumla.MLADecodePlan
        longest = {"batch_invariant": True, "max_kv_len": kv_len} if invariant else {}
        plan = bind(plans.from_arrays, q=q, kv_cache=given, **longest)()
        kv_lens = device.upload(lengths)
        bind(plan.update, kv_lens=kv_lens)()
        scaled = {} if kv_scale is None else {"kv_scale": kv_scale}
        arrays = {"q": q, "kv_cache": given, "block_table": device.upload(table)}
        call = bind(plan.run, **arrays, kv_lens=kv_lens, out=out, lse=given_lse, **scaled)

        def check() -> None:
            got_lse = self.get(lse)
            for request in sorted({0, batch - 1}):
                known = keys(table, request, int(lengths[request]))
                query, got = self.get(q, request).astype(np.float64), self.get(out, request)
                for token, head in sorted({(0, 0), (q_len - 1, heads - 1)}):
                    own = known[: lengths[request] - (q_len - 1 - token), head * kv_heads // heads]
                    close(query[token, head], own, got[token, head],
                          float(got_lse[request, head, token]), dtype)  # fmt: skip

        return Work(call, check, (out, lse))

    def cache(self, rows: Array, kind: str) -> tuple[Any, Callable[..., np.ndarray], float | None]:
        """Make a cache of a kind from rows: what to call with, its rows as float64, a factor."""
        device = self.device
        if kind == "split":
            bits = rows.view(np.uint16)
            halves = [device.empty((*rows.shape[:3], n), np.uint16) for n in (512, 64)]
            halves[0][...], halves[1][...] = bits[..., :512], bits[..., 512:]
            parts = [half.view(rows.dtype) for half in halves]
            return tuple(parts), partial(self.known, parts, None, None), None
        if kind == "one":
            return rows, partial(self.known, [rows], None, None), None
        packed = device.empty((*rows.shape[:3], 576 if kind == "e4m3" else 656), np.uint8)
        slots = device.upload(np.arange(int(np.prod(rows.shape[:3]))))
        factor = {"kv_scale": KV_SCALE} if kind == "e4m3" else {}
        flat = rows.reshape(-1, 576)
        bind(
            self.cumla.append_mla_cache, rows=flat, kv_cache=packed, slot_mapping=slots, **factor
        )()
        if kind == "e4m3":
            return packed, partial(self.known, [packed], None, KV_SCALE), KV_SCALE
        latent, scales, rope = (
            packed[..., part].copy() for part in (slice(512), slice(512, 528), slice(528, None))
        )
        scales, rope = scales.view(np.float32), rope.view(np.uint16).view(rows.dtype)
        keys = partial(self.known, [latent, rope], scales, None)
        return (packed if kind == "packed" else (latent, rope, scales)), keys, None

    def known(
        self, parts: list[Array], scales: Array, factor: float | None, *where: Any
    ) -> np.ndarray:
        """Give the numbers that a request's rows stand for."""
        columns = []
        for part in parts:
            rows = self.tokens(part, *where)
            if rows.dtype == np.uint8:
                rows = rows.view(E4M3).astype(np.float64) * (factor or 1.0)
            columns.append(rows.astype(np.float64))
        if scales is not None:
            columns[0] = columns[0] * np.repeat(self.tokens(scales, *where), 128, axis=-1)
        return np.concatenate(columns, axis=-1)

    def decode_schedule(self, batch: int, heads: int, kv_len: int, *, ragged: bool = False) -> Work:
        """Time a decode plan's update alone; `decode` shows that its schedule is right."""
        kv_lens = self.device.upload(self.lengths(batch, kv_len, ragged))
        plan = self.cumla.MLADecodePlan(batch, 1, heads, like=kv_lens)
        return Work(bind(plan.update, kv_lens=kv_lens), lambda: None, ())

    def attention(
        self, batch: int, heads: int, q_len: int, kv_len: int, *, causal: bool = True,
        decodes: int = 0, schedule: bool = False,
    ) -> Work:  # fmt: skip
        """Attend from queries of different lengths, or time the plan's update alone."""
        device = self.device
        counts = np.full(batch, q_len)
        counts[:decodes] = 1
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lengths = self.lengths(batch, kv_len, False)
        table = self.table(lengths, 64)
        q = self.normal((int(indptr[-1]), heads, 576), "bfloat16", deviation=0.1, seed=3)
        kv = self.normal((table.size, 64, 1, 576), "bfloat16", deviation=0.1, seed=2)
        out = self.output((*q.shape[:2], 512), q.dtype)
        lse = self.output(q.shape[:2], np.float32)
        starts, kv_lens = device.upload(indptr), device.upload(lengths)
        plans = self.cumla.MLAAttentionPlan
        plan = bind(plans.from_arrays, q=q, kv_cache=kv, qo_indptr=starts, causal=causal)()
        update = bind(plan.update, kv_lens=kv_lens, qo_indptr=starts)
        update()
        arrays = {"q": q, "kv_cache": kv, "block_table": device.upload(table)}
        call = bind(plan.run, **arrays, out=out, lse=lse)

        def check() -> None:
            for request in sorted({0, batch - 1}):
                known = self.known([kv], None, None, table, request, kv_len)
                for token in sorted({int(indptr[request]), int(indptr[request + 1]) - 1}):
                    seen = kv_len - (indptr[request + 1] - 1 - token if causal else 0)
                    query = self.get(q, token)[-1].astype(np.float64)
                    got, got_lse = self.get(out, token)[-1], float(self.get(lse, token)[-1])
                    close(query, known[:seen, 0], got, got_lse, "bfloat16")

        return Work(update, lambda: None, ()) if schedule else Work(call, check, (out, lse))

    def append(self, tokens: int, page: int, *, rotated: bool = False, cache: str = "one") -> Work:
        """Write rows into a paged cache."""
        device = self.device
        tokens -= tokens % page
        rows = self.normal((tokens, 576), "bfloat16", deviation=1.0, seed=1)
        columns = {"one": 576, "e4m3": 576, "packed": 656}[cache]
        kv = device.empty(
            (tokens // page, page, columns), np.uint16 if cache == "one" else np.uint8
        )
        slots = (
            self.shuffled(tokens // page)[:, None].astype(np.int64) * page + np.arange(page)
        ).ravel()
        rotation = {}
        if rotated:
            angles = 6.28 * np.random.default_rng(0).random((8192, 32))
            cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
            positions = np.arange(tokens) % 8192
            rotation = {"positions": device.upload(positions), "cos_sin": device.upload(cos_sin)}
        factor = {"kv_scale": 2.0**-6} if cache == "e4m3" else {}
        typed = kv.view(rows.dtype) if cache == "one" else kv
        call = bind(
            self.cumla.append_mla_cache, rows=rows, kv_cache=typed,
            slot_mapping=device.upload(slots), **rotation, **factor,
        )  # fmt: skip

        def check() -> None:
            flat = kv.reshape(tokens, columns)
            for i in sorted({0, tokens // 2, tokens - 1}):
                row = self.get(rows, i).astype(np.float64)
                got = self.get(flat, int(slots[i]))
                if rotated:
                    c, s = np.split(cos_sin[positions[i]].astype(np.float64), 2)
                    even, odd = row[512::2].copy(), row[513::2].copy()
                    row[512::2], row[513::2] = even * c - odd * s, odd * c + even * s
                if cache == "one":
                    read, step = (
                        got.view(rows.dtype).astype(np.float64),
                        2.0**-8 * np.abs(row) + 1e-5,
                    )
                    step[:512] = 0.0
                    step = step if rotated else 0.0 * row
                elif cache == "e4m3":
                    read = got.view(E4M3).astype(np.float64) * 2.0**-6
                    step = np.abs(row) / 16 + 2.0**-15
                else:
                    scales = np.repeat(got[512:528].view(np.float32), 128).astype(np.float64)
                    latent = got[:512].view(E4M3).astype(np.float64) * scales
                    rope = got[528:].view(rows.dtype).astype(np.float64)
                    read = np.concatenate([latent, rope])
                    step = np.abs(row) / 16 + np.append(scales, np.zeros(64)) / 512
                if not (np.abs(read - row) <= step).all():
                    raise Wrong(f"row {i} was not written as it should be")

        return Work(call, check, (kv,))

    # --- merging and the indexer ------------------------------------------------------------------

    def merge(self, count: int, tokens: int, *, dtype: str = "bfloat16") -> Work:
        """Merge partial results of 128 heads."""
        outs = self.normal((count, tokens, 128, 512), dtype, deviation=1.0, seed=5)
        lses = self.normal((count, tokens, 128), "float32", deviation=1.0, seed=6)
        out = self.output((tokens, 128, 512), outs.dtype)
        lse = self.output((tokens, 128), np.float32)
        call = bind(self.cumla.merge_attention_states, outs=outs, lses=lses, out=out, lse=lse)

        def check() -> None:
            for token in sorted({0, tokens // 2, tokens - 1}):
                own = self.get(lses, slice(None), token).astype(np.float64)
                total = np.log(np.exp(own).sum(0))
                parts = self.get(outs, slice(None), token).astype(np.float64)
                want = (np.exp(own - total)[..., None] * parts).sum(0)
                got = self.get(out, token).astype(np.float64)
                compare_rows(got, want, ROW_TOLERANCE[dtype])
                if not np.allclose(self.get(lse, token), total, rtol=1e-6, atol=2e-6):
                    raise Wrong(f"the logarithms of token {token} are off")

        return Work(call, check, (out, lse))

    def quantised(self, shape: Sequence[int], seed: int) -> tuple[Array, Array]:
        """Make e4m3 rows, as bytes, and their scales."""
        rows = self.normal(shape, "bfloat16", deviation=1.0, seed=seed)
        values = self.device.empty(shape, np.uint8)
        scales = self.device.empty(shape[:-1], np.float32)
        bind(self.cumla.quantize_fp8, x=rows, out=values, scale_out=scales)()
        return values, scales

    def quantize(self, rows: int, *, cache: bool = False) -> Work:
        """Quantise rows of 128, or write them into the indexer's cache."""
        device = self.device
        rows -= rows % 64
        x = self.normal((rows, 128), "bfloat16", deviation=1.0, seed=9)
        if cache:
            kv = device.empty((rows // 64, 64, 132), np.uint8)
            slots = (
                self.shuffled(rows // 64)[:, None].astype(np.int64) * 64 + np.arange(64)
            ).ravel()
            call = bind(
                self.cumla.append_indexer_cache, k=x, kv_cache=kv, slot_mapping=device.upload(slots)
            )
            outputs: tuple[Array, ...] = (kv,)
        else:
            values, scales = device.empty((rows, 128), np.uint8), device.empty((rows,), np.float32)
            call = bind(self.cumla.quantize_fp8, x=x, out=values, scale_out=scales)
            outputs = (values, scales)

        def check() -> None:
            for i in sorted({0, rows // 2, rows - 1}):
                if cache:
                    page = self.get(kv, int(slots[i]) // 64).ravel()
                    place = int(slots[i]) % 64
                    got, scale = (
                        page[: 64 * 128].reshape(64, 128),
                        page[64 * 128 :].view(np.float32),
                    )
                    got, factor = got[place], float(scale[place])
                else:
                    got, factor = self.get(values, i), float(self.get(scales)[i])
                row = self.get(x, i).astype(np.float64)
                read = got.view(E4M3).astype(np.float64) * factor
                if not (np.abs(read - row) <= np.abs(row) / 16 + factor / 512).all():
                    raise Wrong(f"row {i} was not quantised as it should be")

        return Work(call, check, outputs)

    def logits(self, q_len: int, kv_len: int) -> Work:
        """Score a prefill: 64 heads of 128, causal, cleaned."""
        device = self.device
        q, _ = self.quantised((q_len, 64, 128), seed=7)
        k, scales = self.quantised((kv_len, 128), seed=8)
        weights = self.normal((q_len, 64), "float32", deviation=1.0, seed=7)
        ends = (np.arange(q_len) + kv_len - q_len + 1).astype(np.int32)
        out = device.empty((q_len, kv_len), np.float32)
        call = bind(
            self.cumla.mqa_logits, q=q, kv=(k, scales), weights=weights,
            ks=device.upload(np.zeros(q_len, np.int32)), ke=device.upload(ends), out=out,
        )  # fmt: skip

        def check() -> None:
            keys, factors = self.get(k), self.get(scales)
            for i in sorted({0, q_len // 2, q_len - 1}):
                own = (keys[: ends[i]], factors[: ends[i]])
                compare_logits(self.get(out, i), self.get(q, i), self.get(weights, i), *own)

        return Work(call, check, (out,))

    def paged_logits(self, batch: int, q_len: int, kv_len: int, *, schedule: bool = False) -> Work:
        """Score a decoding step by a ready plan, or time the plan's update alone."""
        device, lengths = self.device, self.lengths(batch, kv_len, False)
        table = self.table(lengths, 64)
        q, _ = self.quantised((batch, q_len, 64, 128), seed=7)
        weights = self.normal((batch * q_len, 64), "float32", deviation=1.0, seed=7)
        kv = device.empty((table.size, 64, 1, 132), np.uint8)
        slots, rows = device.upload(np.arange(table.size * 64)), table.size * 64
        x = self.normal((rows, 128), "bfloat16", deviation=1.0, seed=8)
        bind(self.cumla.append_indexer_cache, k=x, kv_cache=kv, slot_mapping=slots)()
        out = device.empty((batch * q_len, kv_len), np.float32)
        lens, tables = device.upload(lengths), device.upload(table)
        plans = self.cumla.PagedMQALogitsPlan
        plan = bind(plans.from_arrays, q=q, kv_cache=kv, block_table=tables, kv_lens=lens)()
        update = bind(plan.update, kv_lens=lens)
        update()
        arrays = {"q": q, "kv_cache": kv, "weights": weights, "block_table": tables}
        call = bind(plan.run, **arrays, kv_lens=lens, max_kv_len=kv_len, out=out)

        def check() -> None:
            for request in sorted({0, batch - 1}):
                pages = self.get(kv, device.upload(table[request])).reshape(table.shape[1], -1)
                keys = pages[:, : 64 * 128].reshape(-1, 128)
                factors = np.ascontiguousarray(pages[:, 64 * 128 :]).view(np.float32).ravel()
                for i in range(q_len):
                    row, seen = request * q_len + i, kv_len - (q_len - 1 - i)
                    query = (self.get(out, row), self.get(q, request, i), self.get(weights, row))
                    compare_logits(*query, keys[:seen], factors[:seen])

        return Work(update, lambda: None, ()) if schedule else Work(call, check, (out,))

    # --- jobs -------------------------------------------------------------------------------------

    def prepare(self, op: str, numbers: Sequence[int], options: dict[str, Any]) -> dict[str, Any]:
        """Make a case ready and check it; tells a digest of its outputs."""
        self.work = None
        self.device.release()
        work: Work = getattr(self, op)(*numbers, **options)
        work.call()
        work.check()
        bits = hashlib.sha256()
        for output in work.outputs:
            flat = output.reshape(-1).view(np.uint8)
            bits.update(self.device.download(flat[: 1 << 20]).tobytes())
        self.work = work
        return {"bits": bits.hexdigest()}

    def time(self, repeats: int, warmup: int, rest: float) -> dict[str, Any]:
        """Time the prepared case: the median."""
        assert self.work is not None
        sleep(rest)
        times = self.device.times(self.work.call, warmup + repeats)
        return {"us": float(np.median(times[warmup:]))}

    def host(
        self, framework: str, function: str, shape: Sequence[int], repeats: int, warmup: int
    ) -> dict[str, Any]:
        """Time how long an eager call of (batch, heads, kv_len) keeps the host: the median."""
        batch, heads, kv_len = shape
        lengths = self.lengths(batch, kv_len, False)
        table = self.table(lengths, 64)
        q = self.normal((batch, 1, heads, 576), "bfloat16", deviation=0.1, seed=3)
        arrays = {
            "q": q,
            "kv_cache": self.normal((table.size, 64, 1, 576), "bfloat16", deviation=0.1, seed=2),
            "block_table": self.device.upload(table),
            "kv_lens": self.device.upload(lengths),
            "out": self.output((batch, 1, heads, 512), q.dtype),
            "lse": self.lse_output(batch, heads, 1)[1],
        }
        self.device.synchronize()
        drain = self.device.synchronize
        if framework == "PyTorch":
            import torch

            arrays = {name: as_tensor(torch, array) for name, array in arrays.items()}
            drain = torch.cuda.synchronize if torch.cuda.is_available() else drain
        call = bind(self.cumla.mla_decode, **arrays)
        if function == "plan.run":
            plans = self.cumla.MLADecodePlan
            plan = bind(plans.from_arrays, q=arrays["q"], kv_cache=arrays["kv_cache"])()
            bind(plan.update, kv_lens=arrays["kv_lens"])()
            call = bind(plan.run, **arrays)
        measured = []
        for i in range(warmup + repeats):
            if i % 16 == 0:
                drain()
            begin = perf_counter_ns()
            call()
            measured.append((perf_counter_ns() - begin) / 1e3)
        drain()
        return {"us": float(np.median(measured[warmup:]))}


def as_tensor(torch: Any, array: Array) -> Any:
    """View the same memory as a tensor; bfloat16 goes over as int16."""
    if str(array.dtype) == "bfloat16":
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(array)


# --- float64 --------------------------------------------------------------------------------------


def close(query: np.ndarray, keys: np.ndarray, got: np.ndarray, lse: float, dtype: str) -> None:
    """Compare one row of attention, and its log-sum-exp."""
    scores = SCALE * (keys @ query)
    total = scores.max() + np.log(np.exp(scores - scores.max()).sum())
    want = np.exp(scores - total) @ keys[:, :512]
    compare_rows(got.astype(np.float64)[None], want[None], ROW_TOLERANCE[dtype])
    if not abs(lse - total) <= LSE_TOLERANCE * max(abs(total), 1.0):
        raise Wrong(f"lse is {lse}, float64 gives {total}")


def compare_rows(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Compare rows by the norm of their errors."""
    errors = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    if not (errors <= tolerance).all():  # NaN is wrong
        raise Wrong(f"a row is off by {errors.max():.2e}, of at most {tolerance:.2e}")


def compare_logits(
    got: np.ndarray, q: np.ndarray, weights: np.ndarray, keys: np.ndarray, factors: np.ndarray
) -> None:
    """Compare the logits of one query; what it does not see is -inf."""
    products = np.maximum(q.view(E4M3).astype(np.float64) @ keys.view(E4M3).astype(np.float64).T, 0)
    want = factors * (weights.astype(np.float64) @ products)
    compare_rows(got[None, : len(keys)].astype(np.float64), want[None], LOGITS_TOLERANCE)
    if not np.isneginf(got[len(keys) :]).all():
        raise Wrong("not -inf after the visible tokens")


def main(folder: str, kind: str) -> None:
    """Answer jobs until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    sys.path[0] = folder  # in place of this script's, whose modules have common names
    import cumla

    assert cumla.__file__ is not None and cumla.__file__.startswith(folder), cumla.__file__
    worker = Worker(cumla, CuPy() if kind == "cupy" else NumPy())
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = getattr(worker, job.pop("do"))(**job)
        except Exception as error:  # of any kind: the other cases stand
            answer = {
                "error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
