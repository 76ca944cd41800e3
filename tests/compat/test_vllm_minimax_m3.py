# SPDX-License-Identifier: Apache-2.0
"""vLLM's functions for MiniMax M3: what they compute, what they refuse, where they are put."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from cumla.compat import vllm_minimax_m3 as m3
from tests.calls import refused

torch = pytest.importorskip("torch")

HEADS, KV_HEADS, COLUMNS, BLOCK, TOPK = 8, 2, 128, 128, 3


def numbers(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16()


def int32(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


LENS, TABLE = (700, 130, 385), ([2, 0, 4, 9, 10, 3], [1, 5, -1, 0, 0, 0], [6, 7, 8, 11, 0, 0])
KV = numbers(12, KV_HEADS, BLOCK, 2 * COLUMNS, seed=1)
INDEX = numbers(12, BLOCK, COLUMNS, seed=2)


def positions(counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Request and visible keys of each query token."""
    found = []
    for request, count in enumerate(counts):
        found += [(request, LENS[request] - (count - 1 - i)) for i in range(count)]
    return found


def keys_of(cache: Any, request: int, tokens: list[int]) -> Any:
    return torch.stack([cache[TABLE[request][t // BLOCK], ..., t % BLOCK, :] for t in tokens])


def attended(q: Any, lists: Any, counts: tuple[int, ...], scale: float = 1.0) -> Any:
    """A loop over query tokens and heads."""
    out = torch.zeros(q.shape)
    for token, (request, seen) in enumerate(positions(counts)):
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            chosen = set(lists[group, token].tolist())
            rows = keys_of(KV, request, [t for t in range(seen) if t // BLOCK in chosen])[:, group]
            k, v = rows.float()[:, :COLUMNS] * scale, rows.float()[:, COLUMNS:] * scale
            weights = (k @ q[token, head].float() * COLUMNS**-0.5).softmax(0)
            out[token, head] = weights @ v
    return out


def chosen(idx_q: Any, counts: tuple[int, ...], init: int, local: int) -> list[list[list[int]]]:
    """For each head and token, forced blocks and the best others."""
    found: list[list[list[int]]] = [[] for _ in range(idx_q.shape[1])]
    for token, (request, seen) in enumerate(positions(counts)):
        rows = keys_of(INDEX, request, list(range(seen))).float()
        visible = range(-(-seen // BLOCK))
        forced = {*visible[:init], *(visible[-local:] if local else ())}
        for head, lists in enumerate(found):
            products = rows @ idx_q[token, head].float()
            best = {b: float(products[b * BLOCK : (b + 1) * BLOCK].max()) for b in visible}
            others = sorted((b for b in visible if b not in forced), key=lambda b: -best[b])
            blocks = sorted(forced | {*others[: TOPK - init - local]})
            lists.append([*blocks, *[-1] * (TOPK - len(blocks))])
    return found


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("given", [False, True])
def test_decoding(counts: tuple[int, ...], given: bool) -> None:
    n, lens, table = counts[0], int32(*LENS), int32(*TABLE)
    q, idx_q = numbers(3 * n, HEADS, COLUMNS), numbers(3 * n, KV_HEADS, COLUMNS, seed=3)
    buffer = torch.full((20, KV_HEADS, TOPK), -7, dtype=torch.int32).transpose(0, 1)
    index = (idx_q, INDEX, table, lens, 768, TOPK, 1, 1, KV_HEADS, n, 4)
    lists = m3.minimax_m3_index_decode(*index, out=buffer if given else None)
    assert lists.tolist() == chosen(idx_q, counts, 1, 1)
    if given:
        assert torch.equal(buffer[:, : 3 * n], lists)
        assert (buffer[:, 3 * n :] == -7).all()
    output = torch.empty_like(q)
    m3.minimax_m3_sparse_attn_decode(q, KV, lists, table, lens, KV_HEADS, COLUMNS**-0.5, output, n)
    want = attended(q, lists, counts)
    torch.testing.assert_close(output.float(), want, rtol=2e-2, atol=2e-2)


def test_prefill() -> None:
    counts, lens, table = (3, 1, 4), int32(*LENS), int32(*TABLE)
    bounds, prefix = int32(0, 3, 4, 8), int32(*[n - c for n, c in zip(LENS, counts, strict=True)])
    q, idx_q = numbers(8, HEADS, COLUMNS), numbers(8, KV_HEADS, COLUMNS, seed=3)
    score = m3.minimax_m3_index_score(idx_q, INDEX, table, bounds, lens, prefix, 4, 700, KV_HEADS)
    assert score.shape == (KV_HEADS, 8, 6)
    lists = m3.minimax_m3_index_topk(score, bounds, prefix, 4, TOPK, 0, 1)
    assert lists.tolist() == chosen(idx_q, counts, 0, 1)
    output = torch.empty_like(q)
    m3.minimax_m3_sparse_attn(
        *(q, KV, lists, table, bounds, lens, prefix, 4, KV_HEADS, COLUMNS**-0.5, output)
    )
    torch.testing.assert_close(output.float(), attended(q, lists, counts), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_factor_of_e4m3(shape: tuple[int, ...]) -> None:
    """And none is 1. Numbers of bfloat16 that e4m3 has."""
    lens, table = int32(*LENS), int32(*TABLE)
    kv = (KV.float() * 4).to(torch.float8_e4m3fn)
    q, lists = numbers(3, HEADS, COLUMNS), torch.zeros(KV_HEADS, 3, TOPK, dtype=torch.int32)
    outs = []
    for cache, factors in (
        (kv, {name: torch.full(shape, 0.5) for name in ("k_scale", "v_scale")}),
        ((kv.float() * 0.5).bfloat16(), {}),
    ):
        outs.append(torch.empty_like(q))
        arrays = (q, cache, lists, table, lens, KV_HEADS, COLUMNS**-0.5, outs[-1], 1)
        m3.minimax_m3_sparse_attn_decode(*arrays, **factors)
    torch.testing.assert_close(*outs, rtol=1e-2, atol=1e-2)


def test_factors_of_heads_and_tokens() -> None:
    """By the row of the cache, powers of 2."""
    lens, table = int32(*LENS), int32(*TABLE)
    kv = (KV.float() * 4).to(torch.float8_e4m3fn)
    q, lists = numbers(3, HEADS, COLUMNS), int32([[0, 2, 5]] * 3, [[1, 3, -1]] * 3)
    factors = torch.exp2(torch.randint(-5, 1, (2, KV_HEADS, 12 * BLOCK + 3)))
    of_rows = factors[..., : 12 * BLOCK].view(2, KV_HEADS, 12, BLOCK, 1).transpose(1, 2)
    k, v = (kv[..., :COLUMNS].float() * of_rows[0], kv[..., COLUMNS:].float() * of_rows[1])
    outs = []
    for cache, given in (
        (kv, {"k_scale": factors[0], "v_scale": factors[1]}),
        (torch.cat([k, v], -1).bfloat16(), {}),
    ):
        outs.append(torch.empty_like(q))
        arrays = (q, cache, lists, table, lens, KV_HEADS, COLUMNS**-0.5, outs[-1], 1)
        m3.minimax_m3_sparse_attn_decode(*arrays, **given)
    assert torch.equal(*outs)


Q, LISTS = numbers(3, HEADS, COLUMNS), torch.zeros(KV_HEADS, 3, TOPK, dtype=torch.int32)
DECODE: dict[str, Any] = {
    "q": Q,
    "kv_cache": KV,
    "topk_idx": LISTS,
    "block_table": int32(*TABLE),
    "seq_lens": int32(*LENS),
    "num_kv_heads": KV_HEADS,
    "sm_scale": 0.1,
    "output": torch.empty_like(Q),
    "decode_query_len": 1,
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"decode_query_len": 2}, ValueError, "q: needs 2 query tokens of each of the 3 requests"),
        ({"decode_query_len": 0}, ValueError, "decode_query_len: needs a number from 1, got 0"),
        ({"output": Q[:2]}, ValueError, "output: needs the 3 query tokens of q, got shape (2, 8"),
        ({"kv_cache": KV[:, :, :64]}, ValueError, "kv_cache: needs shape (num_blocks, num_kv_head"),
        ({"num_kv_heads": 1}, ValueError, "kv_cache: needs shape ... with 1 kv heads and head_dim"),
        ({"kv_cache": KV.to(torch.float8_e5m2)}, TypeError, "kv_cache: needs"),
        ({"topk_idx": LISTS[:, :2]}, ValueError, "topk_idx: needs shape"),
        ({"topk_idx": LISTS[0]}, ValueError, "topk_idx: needs axes (num_kv_heads, total_q, topk)"),
        ({"seq_lens": int32(*LENS).long()}, TypeError, "seq_lens: needs int32"),
        (
            {"k_scale": torch.ones(2, 5)},
            ValueError,
            "v_scale: needs factors of rows, as k_scale has, got others; broadcast them to that",
        ),
        ({"k_scale": torch.ones(1)}, ValueError, "k_scale: needs an e4m3 cache"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_attention_refuses(change: Any, error: type[Exception], message: str) -> None:
    with refused(error, message):
        m3.minimax_m3_sparse_attn_decode(**DECODE | change)


def test_what_the_indexer_refuses() -> None:
    index: dict[str, Any] = {
        "idx_q": numbers(3, KV_HEADS, COLUMNS),
        "index_kv_cache": INDEX,
        "block_table": int32(*TABLE),
        "seq_lens": int32(*LENS),
        "max_seq_len": 768,
        "topk": TOPK,
        "init_blocks": 0,
        "local_blocks": 1,
        "num_kv_heads": KV_HEADS,
        "decode_query_len": 1,
        "max_decode_query_len": 1,
    }
    for change, error, message in (
        ({"idx_q": numbers(3, 2, 96)}, ValueError, "idx_q: needs shape"),
        ({"index_kv_cache": INDEX[:, :64]}, ValueError, "index_kv_cache: needs pages of 128 token"),
        ({"index_kv_cache": INDEX.half()}, TypeError, "index_kv_cache: needs the dtype of idx_q"),
        ({"max_seq_len": 0}, ValueError, "max_seq_len: needs a number from 1, got 0"),
        ({"topk": 0}, ValueError, "topk: needs a number from 1, got 0"),
        ({"init_blocks": 3}, ValueError, "topk: needs at least the 4 forced blocks, got 3"),
        ({"out": LISTS[:, :2]}, ValueError, "out: needs shape"),
        (
            {"out": LISTS.new_zeros(20, KV_HEADS, TOPK)},
            ValueError,
            "out: needs num_idx_heads 2 on its first axis, got shape (20, 2, 3); vLLM 0.26 passes",
        ),
        ({"block_table": int32(*TABLE)[:2]}, ValueError, "block_table: needs the 3 rows"),
    ):
        with refused(error, message):
            m3.minimax_m3_index_decode(**index | change)


def test_they_are_put_where_vllm_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """All, or none: a version of vLLM with other names is refused."""
    modules = {}
    for home, names in m3._HOMES.items():
        parts = home.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            module = modules.setdefault(name, ModuleType(name))
            monkeypatch.setitem(sys.modules, name, module)
            if depth > 1:
                setattr(modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
        for name in names:
            setattr(modules[home], name, print)
    m3.replace()
    for home, names in m3._HOMES.items():
        assert all(getattr(modules[home], name) is getattr(m3, name) for name in names)
    first, last = m3._HOMES
    for name in m3._HOMES[first]:
        setattr(modules[first], name, print)
    del modules[last].minimax_m3_index_score
    with refused(ImportError, f"{last}.minimax_m3_index_score: needs a function of that name"):
        m3.replace()
    assert all(getattr(modules[first], name) is print for name in m3._HOMES[first])
