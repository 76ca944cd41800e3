# SPDX-License-Identifier: Apache-2.0
"""Explains which kernel serves a case, and why; nothing is measured or compiled."""

from __future__ import annotations

from dataclasses import replace

from cumla.bench.cases import PAGE_SIZE, Case
from cumla.errors import CumlaError
from cumla.launch.device import current_device, properties
from cumla.launch.mla.choice import decode_spec
from cumla.launch.mla.mla_decode_fp8 import fp8_specs
from cumla.launch.mla.shape import MLADecodeKey

_REASONS = {
    "swapped": "memory is the bound, and the rows fit the N side of the matrix products",
    "one_tile": "it reads each KV block alone, so memory is the bound",
    "shared_blocks": "they read the same KV blocks, so arithmetic is the bound",
}
_SM_COUNT = 132  # of an H100 SXM, an H200 and a GH200


def find_sm_count() -> tuple[int, str]:
    """Ask the GPU how many multiprocessors it has."""
    try:
        found = properties(current_device())
    except CumlaError:
        return _SM_COUNT, "no GPU found: as of an H200"
    return found.sm_count, found.name


def explain(case: Case, sm_count: int) -> str:
    """Say which kernel serves a case and why."""
    key = key_of(case, sm_count)
    spec = decode_spec(key)
    tiles = "1 row tile" if key.row_tiles == 1 else f"{key.row_tiles} row tiles"
    reason = _REASONS[key.variant]
    blocks = key.parts * key.tiles
    joined = "" if key.parts == 1 else "; pieces of a request that parts share are joined"
    return (
        f"{case.name}: {spec.entry} ({spec.threads} threads, {spec.smem_bytes} B of shared memory)"
        f"\n  variant {key.variant}: {key.group_rows} query rows of a kv head in {tiles}: {reason}"
        f"\n  {key.parts} parts x {key.tiles} tiles of all kv heads = {blocks} thread blocks on "
        f"{sm_count} multiprocessors{joined}{_of_fp8_caches(key)}"
    )


def _of_fp8_caches(key: MLADecodeKey) -> str:
    """Name the kernels that serve the shape where its cache is FP8, if queries are as they need."""
    if key.dtype != "bfloat16":
        return ""
    own = replace(key, cache="e4m3")
    one, grouped, *others = (spec.entry for spec in fp8_specs(own))
    in_rows = "".join(f", packed {entry}" for entry in others if entry.endswith("_packed"))
    return f"\n  of an FP8 cache: {one}, or with scales of its own {grouped}{in_rows}"


def key_of(case: Case, sm_count: int) -> MLADecodeKey:
    """Return the key of a case's plan."""
    return MLADecodeKey(
        batch=case.batch,
        q_len=case.q_len,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        page_size=PAGE_SIZE,
        dtype=case.dtype,
        causal=case.q_len > 1,
        device=0,
        sm_count=sm_count,
    )
