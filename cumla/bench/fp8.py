# SPDX-License-Identifier: Apache-2.0
"""Dense decoding over FP8 caches: each format is checked, then timed in turns with bfloat16."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cumla import MLADecodePlan, append_mla_cache
from cumla.bench.cases import PAGE_SIZE, Case, Ceilings
from cumla.bench.ceilings import fill_normal
from cumla.bench.dense import CheckError, Inputs, check_some
from cumla.bench.gpu import DTYPES, Gpu
from cumla.bench.timing import GpuTimer, Timing, in_turns, time_cold
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM
from cumla.mla.fp8_caches import PACKED_BYTES, SCALES

__all__ = ["FORMATS", "FP8", "fp8_row", "measure_fp8"]

FP8: tuple[Case, ...] = (
    Case(128, 1, 16, 8192),
    Case(128, 1, 16, 16384),
    Case(128, 1, 128, 4096),
)
"""Cases whose times over FP8 caches are held against those over one of bfloat16."""
FORMATS = {
    "bfloat16": 2 * HEAD_DIM,
    "e4m3": HEAD_DIM,
    "e4m3 and scales": PACKED_BYTES,
    "packed": PACKED_BYTES,
}
"""From each format to the bytes of its rows: 16 bits; one array under one scale; latent columns,
RoPE ones of bfloat16 and scales of 128 columns in three arrays; these in one."""

_DEVIATION = 0.1  # of queries and cache
_SCALE = 2.0**-9  # of the tensor: 448 times it is above the largest number
_REPEATS = 10  # runs of a turn


class _Cache(NamedTuple):
    """A cache as it is called with, a factor, and its parts as the check reads them."""

    argument: Any
    kv_scale: float | None
    latent: Any  # bytes, or 16 bits
    rope: Any
    scales: Any = None


def measure_fp8(gpu: Gpu, case: Case, timer: GpuTimer = time_cold) -> dict[str, Timing]:
    """Check a case over caches of every format, then time all of them in turns.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    case : Case
        What to run: bfloat16 queries, one kv head, requests of the same length.
    timer : GpuTimer
        How to time a call.

    Returns
    -------
    dict
        From each of `FORMATS` to its time: the median of the turns, and their extremes.

    Raises
    ------
    CheckError
        A result is wrong.
    """
    count = case.pages
    pages = np.random.default_rng(count).permutation(count).astype(np.int32)
    inputs = Inputs(
        q=gpu.empty((case.batch, case.q_len, case.heads, HEAD_DIM), "uint16"),
        kv=gpu.empty((count, PAGE_SIZE, 1, HEAD_DIM), "uint16"),
        pages=pages[None],
        tables=[gpu.upload(pages.reshape(case.batch, -1))],
        seqlens=gpu.upload(case.lengths),
        out=gpu.empty((case.batch, case.q_len, case.heads, VALUE_DIM), "uint16"),
        lse=gpu.empty((case.batch, case.heads, case.q_len), "float32"),
        dtype=case.dtype,
        batch_invariant=False,
    )
    fill_normal(gpu, inputs.kv, case.dtype, seed=2, deviation=_DEVIATION)
    fill_normal(gpu, inputs.q, case.dtype, seed=3, deviation=_DEVIATION)
    calls = {}
    for name, cache in _caches(gpu, inputs).items():
        calls[name] = _call(inputs, cache)
        gpu.fill_bytes(inputs.out, 0xFF)
        gpu.fill_bytes(inputs.lse, 0xFF)
        calls[name]()
        try:
            check_some(gpu, inputs, case, partial(_gathered, gpu, inputs, cache))
        except CheckError as error:
            raise CheckError(f"{name}: some requests of {case.name}: {error}") from error
    times = in_turns(partial(timer, gpu, repeats=_REPEATS), tuple(calls.values()))
    return dict(zip(calls, times, strict=True))


def _caches(gpu: Gpu, inputs: Inputs) -> dict[str, _Cache]:
    """Quantise the cache into every format."""
    lead = inputs.kv.shape[:3]
    whole = inputs.kv.view(DTYPES[inputs.dtype])
    rows = whole.reshape(-1, HEAD_DIM)
    slots = gpu.upload(np.arange(len(rows)))
    one = gpu.empty((*lead, HEAD_DIM), "uint8")
    packed = gpu.empty((*lead, PACKED_BYTES), "uint8")
    append_mla_cache(rows, one, slots, scale=_SCALE)
    append_mla_cache(rows, packed, slots)
    begin = VALUE_DIM + 4 * SCALES
    latent, scales, rope = (
        packed[..., columns].copy()
        for columns in (slice(VALUE_DIM), slice(VALUE_DIM, begin), slice(begin, None))
    )
    scales, rope = scales.view("float32"), rope.view("uint16")
    parts = (latent, rope, scales)
    return {
        "bfloat16": _Cache(whole, None, inputs.kv[..., :VALUE_DIM], inputs.kv[..., VALUE_DIM:]),
        "e4m3": _Cache(one, _SCALE, one[..., :VALUE_DIM], one[..., VALUE_DIM:]),
        "e4m3 and scales": _Cache((latent, rope.view(DTYPES["bfloat16"]), scales), None, *parts),
        "packed": _Cache(packed, None, *parts),
    }


def _call(inputs: Inputs, cache: _Cache) -> partial[Any]:
    """Make a call with its schedule ready."""
    q, _, table, seqlens, out, lse = inputs.arguments()
    plan = MLADecodePlan.from_arrays(q, cache.argument)
    plan.update(seqlens)
    outputs = {"out": out, "lse": lse, "kv_scale": cache.kv_scale}
    return partial(plan.run, q, cache.argument, table, seqlens, **outputs)


def _gathered(gpu: Gpu, inputs: Inputs, cache: _Cache, requests: NDArray[np.int64]) -> Any:
    """Gather what the cache stands for in some requests.

    All scales are powers of two, so bfloat16 holds that exactly.
    """
    own = inputs.pages.reshape(len(inputs.q), -1)[requests]
    some = gpu.upload(own.ravel())
    latent, rope = (
        _known(gpu.download(part[some]), cache.kv_scale) for part in (cache.latent, cache.rope)
    )
    if cache.scales is not None:
        latent *= np.repeat(gpu.download(cache.scales[some]), VALUE_DIM // SCALES, axis=-1)
    rows = np.concatenate([latent, rope], axis=-1).astype(DTYPES["bfloat16"])
    return gpu.upload(rows.view(np.uint16))


def _known(bits: NDArray[Any], kv_scale: float | None) -> NDArray[np.float32]:
    """Give the numbers that bits stand for: e4m3 or bfloat16, by their size."""
    known: NDArray[np.float32]
    if bits.itemsize == 2:
        known = bits.view(DTYPES["bfloat16"]).astype(np.float32)
    else:
        numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        known = numbers[bits] * np.float32(kv_scale or 1.0)
    return known


def fp8_row(case: Case, times: dict[str, Timing], ceilings: Ceilings) -> dict[str, Any]:
    """Put the times over caches of several formats beside the read ceiling and bfloat16.

    Parameters
    ----------
    case : Case
        What ran.
    times : dict
        What `measure_fp8` gave.
    ceilings : Ceilings
        Of the GPU.

    Returns
    -------
    dict
        A row of the results, a list ``formats`` in it.
    """
    formats = []
    for name, time in times.items():
        nbytes = case.nbytes + case.batch * case.kv_len * (FORMATS[name] - FORMATS["bfloat16"])
        gbps = nbytes / (time.us * 1e3)
        figures = {"gbps": gbps, "read_share": gbps / ceilings.read_gbps}
        x = times["bfloat16"].us / time.us
        formats.append({"format": name, **time.figures(), **figures, "x_bfloat16": x})
    return case.to_json() | {"formats": formats}
