# SPDX-License-Identifier: Apache-2.0
"""AutoDeploy's operations on torch's CUDA tensors: in the shapes of its tests, and in graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import cumla
from cumla.compat import auto_deploy

KERNELS = (
    "append_kv_cache",
    "attention",
    "attention_simt",
    "ragged_schedule",
)
MAY_SKIP = ()
torch = pytest.importorskip("torch")

from tests.compat.deploy_cases import (  # noqa: E402
    TOLERANCE,
    Batch,
    Sizes,
    Slots,
    assert_agree,
    contiguous,
    expected,
    lengths_of,
    paged,
    table_of,
    turned,
)

DEVICE = "cuda"
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
every_dtype = pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT])


@pytest.fixture(autouse=True)
def _ready() -> None:
    torch.manual_seed(0)
    auto_deploy.register()
    cumla.prepare(cumla.attention, cumla.append_kv_cache, cumla.apply_rope)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Make torch raise where it would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def int32(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def freqs(rows: int, columns: int) -> Any:
    return torch.rand(rows, columns // 2, 2, device=DEVICE)


@every_dtype
@pytest.mark.parametrize("seqlen", [1, 8])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("history", [0, 3])
def test_requests_of_one_length(dtype: Any, seqlen: int, group: int, history: int) -> None:
    batch = Batch.make(Sizes(8, 8 // group, dtype=dtype), [seqlen] * 2, [history] * 2, DEVICE)
    k_cache, v_cache, _, slots = contiguous(batch, 2, 11)
    numbers = torch.arange(11, device=DEVICE)
    slots = slots._replace(rows=[numbers, 11 + numbers])
    freqs_cis = freqs(11, 16)
    wanted = expected(batch, slots, freqs_cis).view(2, seqlen, -1)
    rows = [r.view(2, seqlen, -1) for r in (batch.q, batch.k, batch.v)]
    with no_waiting():
        found = torch.ops.cumla.fused_mha_with_cache(
            *rows, batch.input_pos, k_cache, v_cache, freqs_cis
        )
    assert_agree(found, wanted, (k_cache, v_cache), slots)


@every_dtype
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("max_seq_len", [0, 1, 16])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("rotates", [False, True])
def test_flattened(
    dtype: Any, share: float, max_seq_len: int, group: int, batch_size: int, rotates: bool
) -> None:
    lengths = lengths_of(batch_size, max_seq_len, share)
    batch = Batch.make(Sizes(8, 8 // group, dtype=dtype), *lengths, DEVICE)
    most = 2 * (max_seq_len + 1)
    k_cache, v_cache, cache_loc, slots = contiguous(batch, 2 * batch_size, most)
    freqs_cis = freqs(most, 16) if rotates else None
    wanted = expected(batch, slots, freqs_cis)
    lists = batch.input_pos, cache_loc, batch.seq_len, batch.seq_start
    with no_waiting():
        found = torch.ops.cumla.fused_flattened_mha_with_cache_rope_fusion(
            batch.q, batch.k, batch.v, *lists, k_cache, v_cache, freqs_cis
        )
    assert_agree(found, wanted, (k_cache, v_cache), slots)


MIXED = [36, 44, 12, 1, 1, 0, 4, 4, 3, 7, 600], [0, 3, 17, 31, 32, 5, 4, 8, 5, 1, 2049]


@every_dtype
@pytest.mark.parametrize("columns", [(16, 0), (32, 0), (96, 0), (128, 0), (192, 128)])
@pytest.mark.parametrize("page", [4, 64])
@pytest.mark.parametrize("rotary", [0, 16])
def test_a_mix_in_pages(dtype: Any, columns: tuple[int, int], page: int, rotary: int) -> None:
    """A chunk that begins inside a page stays in its request's pages."""
    batch = Batch.make(Sizes(12, 2, *columns, dtype=dtype), *MIXED, DEVICE)
    k_cache, v_cache, pages, slots = paged(batch, page)
    freqs_cis = freqs(2700, rotary) if rotary else None
    wanted = expected(batch, slots, freqs_cis)
    numbers = torch.arange(len(pages), dtype=torch.int32, device=DEVICE)
    lists = batch.input_pos, numbers, batch.seq_len, batch.seq_start
    table = table_of(pages, DEVICE)
    with no_waiting():
        found = torch.ops.cumla.fused_mha_with_paged_cache(
            *(batch.q, batch.k, batch.v, *lists, table, 2700, k_cache, v_cache, freqs_cis)
        )
    assert_agree(found, wanted, (k_cache, v_cache), slots)


@pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT], ids=str)
@pytest.mark.parametrize("layout", ["bsnd", "nsbd"])
def test_rotations(dtype: Any, layout: str) -> None:
    freqs_cis, plain = freqs(40, 32), torch.randn(3, 5, 2, 32, device=DEVICE).to(dtype)
    x = torch.einsum(f"bsnd->{layout}", plain).contiguous()
    positions = [0, 13, 35]
    begin = int32(*positions)
    with no_waiting():
        found = torch.ops.cumla.apply_rope_with_input_pos(x, freqs_cis, begin, layout)
    wanted = torch.stack(
        [turned(rows, freqs_cis, first) for rows, first in zip(plain, positions, strict=True)]
    )
    back = torch.einsum(f"{layout}->bsnd", found)
    torch.testing.assert_close(back, wanted, **TOLERANCE)
    lists = begin, int32(5, 5, 5), int32(0, 5, 10)
    flat = torch.ops.cumla.apply_rope_on_flattened_inputs(plain.flatten(0, 1), freqs_cis, *lists)
    assert torch.equal(flat, back.flatten(0, 1))


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("name", ["cumla", "cumla_paged"])
def test_a_graph_of_a_mixed_batch_serves_any_other(name: str, dtype: Any) -> None:
    """Metadata and attention of a step are captured once; lengths, pages and tokens change."""
    sizes, tokens, batch_size = Sizes(8, 2, 64, dtype=dtype), 64, 5
    descriptor = auto_deploy.AttentionRegistry.get(name)
    attend, _ = descriptor.get_attention_op()
    prepare, _ = descriptor.get_prepare_metadata_op()
    si = auto_deploy.SequenceInfo(256, batch_size, 16 if descriptor.is_paged() else 0)
    si.to(DEVICE)
    shape = si.num_pages, si.page_size, sizes.kv_heads, sizes.columns
    k_cache, v_cache = (torch.randn(shape, dtype=dtype, device=DEVICE) for _ in "kv")
    freqs_cis = freqs(256, 64)
    input_ids = torch.zeros(1, tokens, dtype=torch.int32, device=DEVICE)
    rows = [
        torch.randn(1, tokens, n * sizes.columns, dtype=dtype, device=DEVICE) for n in (8, 2, 2)
    ]

    def step() -> Any:
        metadata = prepare(input_ids, *si.args[1:], si.page_size)
        return attend(*rows, *metadata, k_cache, v_cache, freqs_cis)

    si.nest_sequences([[0] * 30, [0], [0] * 20])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()

    for lengths, history in (
        ([1, 1, 40, 1, 21], [5, 17, 0, 100, 3]),
        ([64], [190]),
        ([1, 1, 1, 1, 1], [15, 16, 17, 255, 0]),
        ([7, 0, 57], [9, 9, 7]),
        ([0, 0], [1, 2]),
    ):
        needed = [-(-(a + b) // si.page_size) for a, b in zip(lengths, history, strict=True)]
        pool = torch.randperm(si.num_pages).tolist()
        pages = [[pool.pop() for _ in range(max(count, 1))] for count in needed]
        si.nest_sequences([[0] * n for n in lengths])
        si.update_pos(history, reset=True)
        si.assign_cache_loc(pages)
        batch = Batch.make(sizes, lengths, history, DEVICE)
        for static, new in zip(rows, (batch.q, batch.k, batch.v), strict=True):
            static[:, : sum(lengths)] = new
        inside = torch.arange(si.page_size, device=DEVICE)
        places = [torch.cat([page * si.page_size + inside for page in some]) for some in pages]
        slots = Slots(k_cache.clone(), v_cache.clone(), places)
        wanted = expected(batch, slots, freqs_cis)
        graph.replay()
        assert_agree(found[:, : sum(lengths)], wanted, (k_cache, v_cache), slots)


def test_a_graph_of_a_batch_that_decodes_leaves_padding_alone() -> None:
    sizes = Sizes(8, 2, 64)
    rows = [torch.randn(4, 1, n * 64, dtype=HALF, device=DEVICE) for n in (8, 2, 2)]
    caches = [torch.randn(4, 32, 2, 64, dtype=HALF, device=DEVICE) for _ in "kv"]
    seq_len, input_pos, cache_loc = int32(1, 1, 1, 1), int32(3, 4, 5, 6), int32(2, 0, 3, 1)
    seq_start = int32(0, 1, 2, 3)

    def step() -> Any:
        return torch.ops.cumla.fused_flattened_mha_with_cache(
            *rows, seq_len, input_pos, cache_loc, seq_start, *caches, None
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    seq_len[2:] = 0
    input_pos.copy_(int32(20, 31, 20, 30))
    cache_loc.copy_(int32(1, 3, 1, 3))  # those of others, for the padding
    inside = torch.arange(32, device=DEVICE)
    slots = Slots(*(cache.clone() for cache in caches), [32 + inside, 96 + inside])
    live = [r[:2].transpose(0, 1) for r in rows]
    wanted = expected(Batch(sizes, *live, int32(1, 1), int32(20, 31)), slots)
    graph.replay()
    assert not found[2:].any()
    assert_agree(found[:2].transpose(0, 1), wanted, (caches[0], caches[1]), slots)


def test_a_cache_of_more_than_two_to_the_31_elements() -> None:
    """The last slot lies 2^32 bytes and more after the first."""
    sizes = Sizes(8, 2, 128)
    slots_needed = 2**31 // (1024 * 2 * 128) + 2
    batch = Batch.make(sizes, [5, 1], [1000, 7], DEVICE)
    shape = slots_needed, 1024, 2, 128
    caches = [torch.zeros(shape, dtype=HALF, device=DEVICE) for _ in "kv"]
    last = slots_needed - 1
    for cache in caches:
        cache[last].normal_()
    small = [torch.stack([cache[last], cache[0]]) for cache in caches]
    inside = torch.arange(1024, device=DEVICE)
    slots = Slots(*small, [inside, 1024 + inside])
    wanted = expected(batch, slots)
    lists = batch.seq_len, batch.input_pos, int32(last, 0), batch.seq_start
    found = torch.ops.cumla.fused_flattened_mha_with_cache(
        batch.q, batch.k, batch.v, *lists, *caches, None
    )
    ends = [torch.stack([cache[last], cache[0]]) for cache in caches]
    assert_agree(found, wanted, (ends[0], ends[1]), slots)
