# SPDX-License-Identifier: Apache-2.0
"""Between a checked argument and the GPU: sources, modules, descriptors, schedules, launches."""

from __future__ import annotations

from cumla.launch.source import KernelSpec

__all__ = ["KernelSpec", "all_specs"]


def all_specs() -> tuple[KernelSpec, ...]:
    """List every kernel that cumla compiles, in the order of the launchers' modules."""
    from cumla.launch import merge_states
    from cumla.launch.indexer import (
        append_indexer_cache,
        mqa_logits,
        paged_mqa_logits,
        paged_mqa_schedule,
        quantize_fp8,
    )
    from cumla.launch.mha import (
        append_kv_cache,
        attention,
        attention_decode,
        attention_prefill,
        attention_simt,
        invariant_parts,
    )
    from cumla.launch.mla import (
        append_cache,
        append_fp8_cache,
        mla_decode,
        mla_decode_fp8,
        mla_decode_fp8_64,
        mla_decode_swapped,
    )
    from cumla.launch.sparse import (
        mla_sparse,
        mla_sparse_fp8,
        mla_sparse_packed,
        mla_sparse_v4,
        select_rows,
        top_k,
    )
    from cumla.launch.split import ragged_schedule, schedule

    return (
        schedule.SPECS
        + ragged_schedule.SPECS
        + mla_decode.SPECS
        + mla_decode_swapped.SPECS
        + mla_decode_fp8.SPECS
        + mla_decode_fp8_64.SPECS
        + merge_states.SPECS
        + append_cache.SPECS
        + append_fp8_cache.SPECS
        + append_kv_cache.SPECS
        + attention.SPECS
        + attention_decode.SPECS
        + attention_prefill.SPECS
        + attention_simt.SPECS
        + invariant_parts.SPECS
        + append_indexer_cache.SPECS
        + quantize_fp8.SPECS
        + mqa_logits.SPECS
        + paged_mqa_schedule.SPECS
        + paged_mqa_logits.SPECS
        + select_rows.SPECS
        + mla_sparse.SPECS
        + mla_sparse_fp8.SPECS
        + mla_sparse_packed.SPECS
        + mla_sparse_v4.SPECS
        + top_k.SPECS
    )
