# SPDX-License-Identifier: Apache-2.0
"""The interface of vLLM's FlashAttention on the CPU, against attention in float32."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest

from cumla.compat import _flash_attention, vllm_flash_attn
from cumla.compat.vllm_flash_attn import (
    flash_attn_varlen_func,
    get_scheduler_metadata,
    reshape_and_cache_flash,
)
from tests.compat.oracle import int32, naive, offsets_of, split
from tests.compat.torch_gpu import torch_gpu

torch = pytest.importorskip("torch")

LENGTHS = ((1, 1328), (5, 18), (129, 463))  # of vLLM's own tests: queries and keys
FEW = ((1, 95), (5, 18), (19, 40), (0, 7), (2, 1))


class Batch(NamedTuple):
    """Requests with their keys in the blocks of a cache."""

    q: Any
    k_cache: Any
    v_cache: Any
    q_lens: list[int]
    kv_lens: list[int]
    block_table: Any

    @property
    def arguments(self) -> dict[str, Any]:
        """Return what vLLM's layer passes, by keyword."""
        return {
            "q": self.q,
            "k": self.k_cache,
            "v": self.v_cache,
            "cu_seqlens_q": offsets_of(self.q_lens),
            "max_seqlen_q": max(self.q_lens),
            "seqused_k": int32(*self.kv_lens),
            "max_seqlen_k": max(self.kv_lens),
            "block_table": self.block_table,
            "fa_version": 3,
        }

    def rows(self, request: int) -> tuple[Any, Any]:
        """The keys and values of a request."""
        pages, length = self.block_table[request].long(), self.kv_lens[request]
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in (self.k_cache, self.v_cache))
        return k, v

    def expected(self, slopes: Any = None, **options: Any) -> list[Any]:
        each = [slopes] * len(self.q_lens) if slopes is None or slopes.ndim == 1 else slopes
        states = [
            naive(q, *self.rows(r), slopes=each[r], **options)
            for r, q in enumerate(split(self.q, self.q_lens))
        ]
        return [torch.cat([state[i] for state in states], dim=i) for i in range(2)]


def make_batch(
    lengths: Any = FEW,
    *,
    heads: tuple[int, int] = (8, 2),
    columns: int = 128,
    block_size: int = 16,
    dtype: Any = torch.bfloat16,
) -> Batch:
    torch.manual_seed(len(lengths) + columns + block_size)
    q_lens, kv_lens = map(list, zip(*lengths, strict=True))
    most = -(-max(kv_lens) // block_size)
    blocks = len(kv_lens) * most + 3
    table = torch.randperm(blocks)[: len(kv_lens) * most].view(-1, most).int()
    q = torch.randn(sum(q_lens), heads[0], columns).to(dtype)
    # As vLLM allocates them: both of a layer in one tensor.
    caches = torch.randn(2, blocks, block_size, heads[1], columns).to(dtype)
    return Batch(q, *caches.unbind(0), q_lens, kv_lens, table)


def check(found: Any, expected: Any) -> None:
    """vLLM's own tolerance of out; lse is not compared there."""
    torch.testing.assert_close(found[0].float(), expected[0], atol=1.5e-2, rtol=1e-2)
    torch.testing.assert_close(found[1], expected[1], atol=1e-3, rtol=1e-4)
    assert found[1].is_contiguous()


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize(("columns", "block_size"), [(40, 16), (128, 32), (256, 16)])
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_attention_over_blocks(
    heads: tuple[int, int], columns: int, block_size: int, window: Any, softcap: Any
) -> None:
    batch = make_batch(heads=heads, columns=columns, block_size=block_size)
    sides = (-1, -1) if window is None else (window - 1, 0)
    options = {"softmax_scale": columns**-0.5, "softcap": softcap or 0, "causal": True}
    options["window_size"] = list(sides)
    out = torch.full_like(batch.q, torch.nan)
    found = flash_attn_varlen_func(**batch.arguments, **options, out=out, return_softmax_lse=True)
    assert found[0] is out
    expected = batch.expected(causal=True, window=sides, softcap=softcap or 0.0)
    check(found, expected)
    del options["window_size" if window is None else "softmax_scale"]
    again = flash_attn_varlen_func(**batch.arguments, **options)
    assert torch.equal(again, out)


def test_the_lengths_of_vllms_tests() -> None:
    batch = make_batch(LENGTHS)
    found = flash_attn_varlen_func(**batch.arguments, causal=True, return_softmax_lse=True)
    check(found, batch.expected(causal=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, (127, 0)])
def test_sinks(window: Any, dtype: Any) -> None:
    """As gpt-oss has them: bfloat16, and lse includes them."""
    batch = make_batch(heads=(16, 2), columns=64)
    sinks = torch.linspace(-3, 6, 16).to(dtype)
    found = flash_attn_varlen_func(
        **batch.arguments, causal=True, window_size=window, s_aux=sinks, return_softmax_lse=True
    )
    check(found, batch.expected(causal=True, window=window or (-1, -1), sinks=sinks))


@pytest.mark.parametrize("by_request", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, (30, 0)), (False, (-1, 0))])
def test_alibi(causal: bool, window: Any, by_request: bool) -> None:
    """Scores are lower the further away a key is."""
    batch = make_batch()
    slopes = torch.rand(*([len(batch.q_lens)] if by_request else []), 8)
    options = {"causal": causal, "window_size": window, "alibi_slopes": slopes}
    found = flash_attn_varlen_func(**batch.arguments, **options, return_softmax_lse=True)
    check(found, batch.expected(causal=True, window=window or (-1, -1), slopes=slopes))


def test_alibi_that_cannot_be() -> None:
    batch, slopes = make_batch(), torch.rand(8)
    for options, message in (
        (
            {"alibi_slopes": slopes, "softcap": 3.0},
            "softcap: needs None beside alibi_slopes, got 3",
        ),
        ({"alibi_slopes": slopes[:3]}, r"alibi_slopes: needs shape \(num_heads,\) or "),
        (
            {"alibi_slopes": slopes, "dynamic_causal": torch.ones(5)},
            "dynamic_causal: needs None beside alibi_slopes",
        ),
    ):
        with pytest.raises(RuntimeError, match=f"^{message}"):
            flash_attn_varlen_func(**batch.arguments, causal=True, **options)


def test_what_vllm_passes_beside() -> None:
    """Scales of a cache of 16 bits, metadata, and what only steers speed; nothing changes."""
    batch = make_batch()
    metadata = get_scheduler_metadata(
        batch_size=5,
        max_seqlen_q=19,
        max_seqlen_k=95,
        num_heads_q=8,
        num_heads_kv=2,
        headdim=128,
        cache_seqlens=int32(*batch.kv_lens),
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=offsets_of(batch.q_lens),
        page_size=16,
        causal=True,
        window_size=(-1, -1),
        num_splits=4,
    )
    assert metadata.shape == (0,)
    assert metadata.dtype == torch.int32
    scales = torch.tensor(2.0).expand(5, 2)
    found = flash_attn_varlen_func(
        **batch.arguments,
        causal=True,
        window_size=[-1, -1],
        alibi_slopes=None,
        scheduler_metadata=metadata,
        q_descale=scales,
        k_descale=scales,
        v_descale=scales,
        num_splits=4,
        deterministic=True,
        cp_rank=0,
        output_scale=None,
        mask_mod=None,
        dynamic_causal=None,
    )
    assert torch.equal(found, flash_attn_varlen_func(**batch.arguments, causal=True))


@pytest.mark.parametrize("window", [(-1, -1), (4, 4), (7, 2)])
@pytest.mark.parametrize("rows", [False, True])
def test_requests_that_are_causal_or_not(window: tuple[int, int], rows: bool) -> None:
    """As vLLM passes flags of requests; the window bounds both kinds."""
    batch = make_batch()
    flags = int32(1, 0, 1, 0, 0)
    arguments = batch.arguments
    given = {"dynamic_causal": flags, "causal": window == (-1, -1), "window_size": list(window)}
    if rows:
        parts = zip(*(batch.rows(r) for r in range(5)), strict=True)
        arguments |= dict(zip("kv", map(torch.cat, parts), strict=True))
        arguments |= {"cu_seqlens_k": offsets_of(batch.kv_lens)}
        del arguments["seqused_k"], arguments["block_table"]
    found = flash_attn_varlen_func(**arguments, **given)
    for r, causal in enumerate(flags.tolist()):
        own = slice(int(arguments["cu_seqlens_q"][r]), int(arguments["cu_seqlens_q"][r + 1]))
        k, v = batch.rows(r)
        mask = torch.ones(own.stop - own.start, len(k), dtype=torch.bool)
        mask = mask.tril(len(k) - len(mask)) if causal else mask
        wanted, _ = naive(arguments["q"][own], k, v, window=window, mask=mask)
        torch.testing.assert_close(found[own].float(), wanted, rtol=2e-2, atol=2e-2)
    with pytest.raises(
        RuntimeError, match=r"^dynamic_causal: needs axes \(batch_size\), got shape"
    ):
        flash_attn_varlen_func(**arguments, dynamic_causal=flags[None])
    with pytest.raises(RuntimeError, match=r"^dynamic_causal: needs shape|^dynamic_causal: .*5"):
        flash_attn_varlen_func(**arguments, dynamic_causal=flags[1:])


def test_gaps_are_closed_by_copies() -> None:
    """In rows and lists, as vLLM does."""

    def gapped(tensor: Any) -> Any:
        return torch.stack([tensor, tensor * 3 + 1], -1)[..., 0]

    q, k = torch.randn(5, 4, 16).half(), torch.randn(7, 2, 16).half()
    lists = int32(0, 2, 5), int32(0, 3, 7)
    want = flash_attn_varlen_func(q, k, k, 3, lists[0], 4, lists[1], causal=True)
    apart = [gapped(x) for x in (q, k, *lists)]
    found = flash_attn_varlen_func(
        *(apart[0], apart[1], apart[1], 3, apart[2], 4, apart[3]), causal=True
    )
    assert torch.equal(found, want)


@pytest.mark.parametrize("rows", [0, 4])
def test_no_key(rows: int) -> None:
    """Without a row of keys out is 0, also where it is given, and lse +inf; else -inf."""
    q, none = torch.randn(4, 4, 16).half(), torch.zeros(2, rows, 2, 16).half()
    out = torch.ones_like(q)
    arguments = {"seqused_k": int32(0, 0), "out": out, "return_softmax_lse": True}
    state = flash_attn_varlen_func(q, none, none, 3, int32(0, 1, 4), 0, **arguments)
    assert state[0] is out
    assert not out.any()
    assert torch.equal(state[1], torch.full((4, 4), -math.inf if rows else math.inf))
    if not rows:
        arguments["out"] = out[1:]
        with pytest.raises(RuntimeError, match=r"^out: needs shape"):
            flash_attn_varlen_func(q, none, none, 3, int32(0, 1, 4), 0, **arguments)


def test_positions_of_the_arguments() -> None:
    """max_seqlen_q comes before cu_seqlens_q; rows without blocks, and rows of one length."""
    torch.manual_seed(3)
    q_lens, kv_lens = [3, 0, 5], [7, 4, 5]
    q, k, v = (
        torch.randn(sum(n), h, 32).half() for n, h in ((q_lens, 6), (kv_lens, 2), (kv_lens, 2))
    )
    cu = offsets_of(q_lens), offsets_of(kv_lens)
    found = flash_attn_varlen_func(
        *(q, k, v, 5, cu[0], 7, cu[1], None, None, 0.0, 0.3, True, (-1, -1), 0.0, None),
        *(False, False, None, True),
    )
    states = [
        naive(*rows, causal=True, scale=0.3)
        for rows in zip(split(q, q_lens), split(k, kv_lens), split(v, kv_lens), strict=True)
    ]
    check(found, [torch.cat([s[i] for s in states], dim=i) for i in range(2)])
    same = k[:4][None].repeat(3, 1, 1, 1)
    stacked = flash_attn_varlen_func(q, same, same, 5, cu[0], 4, seqused_k=int32(4, 2, 3))
    flat = flash_attn_varlen_func(
        q, torch.cat([k[:4], k[:2], k[:3]]), torch.cat([k[:4], k[:2], k[:3]]), 5, cu[0], 4,
        offsets_of([4, 2, 3]),
    )  # fmt: skip
    assert torch.equal(stacked, flat)


# --- e4m3 keys and values ------------------------------------------------------------------------

E4M3 = torch.float8_e4m3fn
FACTORS = {
    "one": (torch.tensor([0.5]), torch.tensor([3.0])),
    "one, expanded": (torch.tensor(0.5).expand(5, 2), torch.tensor(3.0).expand(5, 2)),
    "of heads": (torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25])),
    "of requests": (torch.linspace(0.5, 2.0, 10).view(5, 2), torch.linspace(4, 0.1, 10).view(5, 2)),
}


def of_e4m3(batch: Batch) -> Batch:
    caches = [(cache.float() / 2).to(E4M3) for cache in (batch.k_cache, batch.v_cache)]
    return batch._replace(k_cache=caches[0], v_cache=caches[1])


def expected_of_e4m3(batch: Batch, factors: Any, **options: Any) -> tuple[Any, Any]:
    """Attention to what each request's rows stand for."""
    by_request = [factor.expand(len(batch.kv_lens), 2)[..., None] for factor in factors]
    states, begin = [], 0
    for r, n in enumerate(batch.q_lens):
        rows = [x.float() * factor[r] for x, factor in zip(batch.rows(r), by_request, strict=True)]
        states.append(naive(batch.q[begin : begin + n], *rows, causal=True, **options))
        begin += n
    out, lse = (torch.cat(parts, dim=i) for i, parts in enumerate(zip(*states, strict=True)))
    return out, lse


@pytest.mark.parametrize("form", FACTORS)
@pytest.mark.parametrize("columns", [64, 128])
def test_e4m3_blocks(columns: int, form: str) -> None:
    batch, factors = of_e4m3(make_batch(columns=columns)), FACTORS[form]
    sinks = torch.linspace(-2, 3, 8)
    descales = {"k_descale": factors[0], "v_descale": factors[1]}
    options = {"causal": True, "window_size": [40, 0], "s_aux": sinks, **descales}
    found = flash_attn_varlen_func(
        **batch.arguments,
        **options,
        q_descale=factors[0],  # of 16-bit queries, ignored
        return_softmax_lse=True,
    )
    assert found[0].dtype == batch.q.dtype
    check(found, expected_of_e4m3(batch, factors, window=(40, 0), sinks=sinks))
    rows = {name: batch.arguments[name].view(torch.uint8) for name in "kv"}
    assert torch.equal(flash_attn_varlen_func(**batch.arguments | rows, **options), found[0])


def test_e4m3_rows() -> None:
    """With offsets, and of requests of one length; without factors they are 1."""
    torch.manual_seed(4)
    q, lens = torch.randn(6, 4, 32).half(), [4, 2, 3]
    k, v = torch.randn(2, 9, 2, 32).to(E4M3)
    cu, factors = offsets_of([2, 2, 2]), FACTORS["of heads"]
    descales = {"k_descale": factors[0], "v_descale": factors[1]}
    found = flash_attn_varlen_func(
        q, k, v, 2, cu, 4, offsets_of(lens), **descales, causal=True, return_softmax_lse=True
    )
    exact = [rows.float() * factor[:, None] for rows, factor in zip((k, v), factors, strict=True)]
    pieces = zip(split(q, [2, 2, 2]), *(split(rows, lens) for rows in exact), strict=True)
    states = [naive(*rows, causal=True) for rows in pieces]
    check(found, [torch.cat([s[i] for s in states], dim=i) for i in range(2)])
    stacked = k.view(3, 3, 2, 32)
    plain = flash_attn_varlen_func(q, stacked, stacked, 2, cu, 3, seqused_k=int32(3, 3, 3))
    for r, rows in enumerate(stacked.float()):
        out, _ = naive(q[2 * r : 2 * r + 2], rows, rows)
        torch.testing.assert_close(plain[2 * r : 2 * r + 2].float(), out, rtol=2e-3, atol=2e-3)


def test_e4m3_blocks_on_the_emulated_gpu() -> None:
    """Written and read in a capture, under one pair of factors: those of the replay count."""
    batch = make_batch(((1, 40), (3, 18), (2, 7)), heads=(8, 2), columns=64)
    caches = torch.zeros(2, *batch.k_cache.shape).to(E4M3)
    rows = torch.randn(2, sum(batch.kv_lens), 2, 64).bfloat16()
    slots = torch.cat(
        [
            batch.block_table[r].long()[torch.arange(n) // 16] * 16 + torch.arange(n) % 16
            for r, n in enumerate(batch.kv_lens)
        ]
    )
    batch = batch._replace(k_cache=caches[0], v_cache=caches[1])
    scales, out = [torch.ones(2), torch.ones(2)], torch.zeros_like(batch.q)
    arguments = batch.arguments

    def layer() -> Any:
        reshape_and_cache_flash(*rows, *caches, slots, "fp8", *scales)
        descales = {"k_descale": scales[0], "v_descale": scales[1]}
        options = {"causal": True, "return_softmax_lse": True}
        return flash_attn_varlen_func(**arguments, **descales, **options, out=out)

    with torch_gpu() as gpu:
        with gpu.capture():
            found = layer()
        for factors in (FACTORS["of heads"], FACTORS["of heads"][::-1]):
            for scale, factor in zip(scales, factors, strict=True):
                scale.copy_(factor)
            out.fill_(torch.nan)
            gpu.replay()
            assert found[0] is out
            check(found, expected_of_e4m3(batch, scales))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"v": torch.zeros(3, 16, 2, 128).bfloat16()}, RuntimeError, "v: needs the kind of numb"),
        ({"k_descale": torch.ones(3)}, RuntimeError, r"k_descale: needs shape \(1,\), \(2,\), or"),
        ({"v_descale": torch.ones(2).half()}, RuntimeError, "v_descale: needs float32, got float1"),
        ({"k_descale": 2.0}, TypeError, "k_descale: needs a PyTorch tensor, got builtins.float"),
    ],
)
def test_e4m3_arguments_that_do_not_fit(changes: dict[str, Any], error: Any, says: str) -> None:
    arguments = {**of_e4m3(make_batch()).arguments, **changes}
    with pytest.raises(error, match=f"^{says}"):
        flash_attn_varlen_func(**arguments)


# --- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("slots_dtype", [torch.int64, torch.int32])
def test_rows_go_to_their_slots(layout: str, slots_dtype: Any) -> None:
    """Padding has the slot -1, or no slot at all; blocks may have the heads first in memory."""
    torch.manual_seed(5)
    packed = torch.randn(11, 3 * 4, 32).half()
    _, key, value = packed.view(11, 3, 4, 32).unbind(1)  # views, as of a projection of all three
    caches = (
        torch.zeros(2, 5, 4, 8, 32).half()
        if layout == "HND"
        else torch.zeros(2, 5, 8, 4, 32).half()
    )
    caches = caches.transpose(2, 3) if layout == "HND" else caches
    slots = torch.tensor([3, 17, -1, 39, 0, 8, 9, -1, 21], dtype=slots_dtype)
    one = torch.ones(1)
    result = reshape_and_cache_flash(key, value, *caches.unbind(0), slots, "auto", one, one)
    assert result is None
    expected = torch.zeros(2, 40, 4, 32).half()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot], expected[1, slot] = key[row], value[row]
    assert torch.equal(caches.reshape(2, 40, 4, 32), expected)


@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("scales", [(0.5, 2.0), "tensors"], ids=str)
def test_fp8_caches(cache_dtype: Any, name: str, scales: Any) -> None:
    torch.manual_seed(6)
    key, value = torch.randn(2, 7, 2, 16).bfloat16()
    caches = torch.zeros(2, 3, 4, 2, 16, dtype=torch.uint8).view(cache_dtype)
    slots = torch.arange(7) + 2
    k_scale, v_scale = (torch.tensor([0.5]), torch.tensor(2.0)) if scales == "tensors" else scales
    reshape_and_cache_flash(key, value, caches[0], caches[1], slots, name, k_scale, v_scale)
    for cache, rows, scale in zip(caches, (key, value), (0.5, 2.0), strict=True):
        found = cache.view(torch.float8_e4m3fn).float().view(12, 2, 16)
        assert torch.equal(found[2:9], (rows.float() / scale).to(torch.float8_e4m3fn).float())
        assert not found[:2].any()
        assert not found[9:].any()


def test_a_step_of_a_layer() -> None:
    """Write, then attend, as vLLM's layer does for a mix of prefill and decoding."""
    batch = make_batch()
    new = [torch.randn(len(batch.q) + 3, 2, 128).bfloat16() for _ in range(2)]  # with padding
    slots = []
    for r, (n, length) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        for position in range(length - n, length):
            block = int(batch.block_table[r, position // 16])
            slots.append(block * 16 + position % 16 if position >= 0 else -1)
    one = torch.ones(())
    reshape_and_cache_flash(
        *new, batch.k_cache, batch.v_cache, torch.tensor(slots), "auto", one, one
    )
    begin = batch.q_lens[0]
    assert torch.equal(batch.rows(1)[0][-5:], new[0][begin : begin + 5])
    found = flash_attn_varlen_func(**batch.arguments, causal=True, return_softmax_lse=True)
    check(found, batch.expected(causal=True))


# --- the kernels, emulated -----------------------------------------------------------------------


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_layer_on_the_emulated_gpu(heads_first: bool) -> None:
    """Captured: slots, lengths and blocks of the replay count; blocks of other strides too."""
    batch = make_batch(((1, 40), (3, 18), (2, 7)), heads=(8, 2), columns=64)
    caches = torch.stack([batch.k_cache, batch.v_cache])
    if heads_first:
        caches = caches.transpose(2, 3).contiguous().transpose(2, 3)
    batch = batch._replace(k_cache=caches[0], v_cache=caches[1])
    new = torch.randn(2, 6, 2, 64).bfloat16()
    sinks = torch.linspace(-2, 3, 8)  # of 16 bits they would be converted, which no replay sees
    one, out, arguments = torch.ones(()), torch.zeros_like(batch.q), batch.arguments
    slots = torch.full((6,), -1)

    def layer() -> Any:
        reshape_and_cache_flash(*new, *caches, slots, "auto", one, one)
        options = {"causal": True, "s_aux": sinks, "return_softmax_lse": True}
        return flash_attn_varlen_func(**arguments, **options, out=out)

    with torch_gpu() as gpu:
        with gpu.capture():
            found = layer()
        for step in range(2):
            lens = [n - step for n in batch.kv_lens]
            batch = batch._replace(kv_lens=lens)
            arguments["seqused_k"].copy_(int32(*lens))
            begin = 0
            for r, (n, length) in enumerate(zip(batch.q_lens, lens, strict=True)):
                at = torch.arange(length - n, length)
                slots[begin : begin + n] = batch.block_table[r].long()[at // 16] * 16 + at % 16
                begin += n
            new.copy_(torch.randn(new.shape))
            out.fill_(torch.nan)
            gpu.replay()
            assert found[0] is out
            check(found, batch.expected(causal=True, sinks=sinks))
            assert torch.equal(caches.reshape(2, -1, 2, 64)[:, slots], new)


# --- what is refused -----------------------------------------------------------------------------

ROWS = torch.zeros(2, 2, 16).half()
ONES = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"q_v": ROWS}, "q_v: .*cumla.mla_attention"),
        ({"dropout_p": 0.1}, "dropout_p: .*leave it at 0"),
        ({"alibi_slopes": ONES[0]}, "alibi_slopes: needs causal=True, or 0 as window_size"),
        ({"cp_world_size": 2}, "cp_world_size: .*cumla.merge_attention_states"),
        ({"cp_tot_seqused_k": int32(1, 1)}, "cp_tot_seqused_k: .*merge_attention_states"),
        ({"output_scale": ONES}, "output_scale: .*leave it out"),
        ({"mask_mod": max}, "mask_mod: .*leave it out"),
        ({"aux_tensors": [ONES]}, "aux_tensors: .*leave it out"),
        ({"gather_kv_indices": int32(0, 1)[:, None]}, "gather_kv_indices: .*mla_sparse_attention"),
        ({"gather_kv_valid_length": int32(1, 1)}, "gather_kv_valid_length: .*leave it out"),
        ({"q": ROWS.to(torch.float8_e4m3fn)}, "q: .*float8.*convert"),
        ({"q": torch.zeros(2, 2, 16, requires_grad=True)}, "q: .*gradient.*no_grad"),
    ],
)
def test_what_cumla_does_not_have(changes: dict[str, Any], says: str) -> None:
    offsets = int32(0, 1, 2)
    rows: dict[str, Any] = {"q": ROWS, "k": ROWS, "v": ROWS}
    lengths = {"max_seqlen_q": 1, "cu_seqlens_q": offsets, "max_seqlen_k": 1}
    with pytest.raises(NotImplementedError, match=f"^{says}"):
        flash_attn_varlen_func(**rows | lengths | {"cu_seqlens_k": offsets} | changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seqused_k": None}, "cu_seqlens_k: needs either.*got neither"),
        ({"cu_seqlens_k": int32(0, 1)}, "cu_seqlens_k: needs either.*got both"),
        ({"cu_seqlens_k": int32(0, 1), "seqused_k": None}, "block_table: needs seqused_k beside"),
        ({"q": torch.zeros(2, 1, 8, 128).bfloat16()}, "q: needs axes"),
        ({"cu_seqlens_q": int32(0, 1)[:, None]}, "cu_seqlens_q: needs axes"),
        ({"seqused_k": torch.tensor([1, 2, 3, 4, 5])}, "seqused_k: needs int32"),
        ({"seqused_k": int32(1, 2)}, r"(seqused_k|cu_seqlens_q): needs shape"),
        ({"block_table": int32(0, 1)}, "block_table: needs axes"),
        ({"s_aux": torch.zeros(3)}, "s_aux: needs"),
        ({"window_size": [1, 2, 3]}, "window_size: needs one number or a pair"),
        ({"softcap": -1.0}, "softcap: needs a number"),
        ({"out": torch.zeros(1, 8, 128).bfloat16()}, "out: needs shape"),
        ({"v": torch.zeros(3, 16, 2, 128).bfloat16()}, "v: needs the pages"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], says: str) -> None:
    arguments = {**make_batch().arguments, "causal": True, **changes}
    with pytest.raises(RuntimeError, match=f"^{says}") as caught:
        flash_attn_varlen_func(**arguments)
    assert type(caught.value) is RuntimeError


@pytest.mark.parametrize("name", ["q", "k", "cu_seqlens_q", "seqused_k", "block_table", "s_aux"])
def test_arguments_that_are_no_tensors(name: str) -> None:
    arguments = make_batch().arguments | {name: [1, 2]}
    with pytest.raises(TypeError, match=f"^{name}: needs a PyTorch tensor, got builtins.list"):
        flash_attn_varlen_func(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"kv_cache_dtype": "int8"}, NotImplementedError, "kv_cache_dtype: needs one of auto, "),
        ({"kv_cache_dtype": "fp8_e5m2"}, NotImplementedError, "kv_cache_dtype: .*got 'fp8_e5m2'"),
        ({"kv_cache_dtype": "fp8"}, RuntimeError, "key_cache: needs the dtype that kv_cache_dtype"),
        ({"key": [1]}, TypeError, "key: needs a PyTorch tensor"),
        ({"slot_mapping": int32(0)[0]}, RuntimeError, "slot_mapping: needs axes"),
        ({"slot_mapping": torch.arange(5)}, RuntimeError, "slot_mapping: needs shape"),
        ({"value": torch.zeros(3, 2, 8).half()}, RuntimeError, "value_cache: needs shape"),
        ({"key_cache": torch.zeros(2, 4, 2, 16)}, RuntimeError, "key_cache: needs float16"),
        (
            {name: torch.zeros(2, 4, 2, 16) for name in ("key_cache", "value_cache")},
            RuntimeError,
            "key: needs the cache's dtype float32, got float16",
        ),
    ],
)
def test_rows_that_do_not_fit(changes: dict[str, Any], error: Any, says: str) -> None:
    rows, cache = torch.ones(3, 2, 16).half(), torch.zeros(2, 4, 2, 16).half()
    arguments: dict[str, Any] = {
        "key": rows,
        "value": rows,
        "key_cache": cache,
        "value_cache": cache.clone(),
        "slot_mapping": torch.arange(3),
        "kv_cache_dtype": "auto",
        "k_scale": None,
        "v_scale": None,
    }
    with pytest.raises(error, match=f"^{says}") as caught:
        reshape_and_cache_flash(**arguments | changes)
    assert type(caught.value) is error
    assert not cache.any()


def test_nothing_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No method that hands a number or a copy to the host is called."""
    batch = make_batch()
    arguments = batch.arguments
    one, slots = torch.ones(()), torch.arange(4)

    def wait(self: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError("waits for the GPU")

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, wait)
    seen = []

    def attention(q: Any, *_: Any, lse: Any = None, **__: Any) -> Any:
        seen.append("attention")
        return q, lse

    def append_kv_cache(*_: Any, **__: Any) -> None:
        seen.append("append_kv_cache")

    monkeypatch.setattr(_flash_attention, "attention", attention)
    monkeypatch.setattr(vllm_flash_attn, "append_kv_cache", append_kv_cache)
    caches = batch.k_cache, batch.v_cache
    rows = batch.q[:, :2]
    reshape_and_cache_flash(rows, rows, *caches, slots, "auto", one, one)
    flash_attn_varlen_func(**arguments, s_aux=torch.zeros(8), return_softmax_lse=True)
    assert seen == ["append_kv_cache", "attention"]
