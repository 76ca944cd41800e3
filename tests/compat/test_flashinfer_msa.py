# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's functions for MiniMax M3: what they compute, in its orders of axes, and refuse."""

from __future__ import annotations

from typing import Any

import pytest

import cumla
from cumla.compat.flashinfer import msa_ops
from tests.calls import refused

torch = pytest.importorskip("torch")

HEADS, KV_HEADS, COLUMNS, BLOCK = 8, 2, 128, 128


def numbers(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16()


def int32(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


LENS, BOUNDS, TABLE = (300, 130), (0, 2, 3), ([2, 0, 4], [1, 3, -1])
PAGES: dict[str, Any] = {"page_table": int32(*TABLE), "seqused_k": int32(*LENS)}


def seen_by(token: int, causal: bool = True) -> tuple[int, int]:
    """The request of a query token, and how many tokens it sees."""
    request = int(token >= BOUNDS[1])
    return request, LENS[request] - (BOUNDS[request + 1] - 1 - token if causal else 0)


def rows(cache: Any, request: int, head: int, tokens: range) -> Any:
    found = [cache[TABLE[request][t // BLOCK], head, t % BLOCK] for t in tokens]
    return torch.stack(found).float()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_scores(causal: bool, reduces: bool, kv_heads: int) -> None:
    q, k = numbers(3, 4, COLUMNS), numbers(5, kv_heads, BLOCK, COLUMNS, seed=1)
    options = {"causal": causal, "reduce_heads": reduces, **PAGES}
    got = msa_ops.msa_proxy_score(q, k, int32(*BOUNDS), max_k_tiles=4, **options)
    want = torch.full((4, 4, 3), -torch.inf)
    for token in range(3):
        request, seen = seen_by(token, causal)
        for head in range(4):
            products = rows(k, request, head * kv_heads // 4, range(seen)) @ q[token, head].float()
            for block in range(-(-seen // BLOCK)):
                want[head, block, token] = products[block * BLOCK : (block + 1) * BLOCK].max()
    if reduces:
        want = want.amax(0, keepdim=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    out = torch.empty_like(got)
    assert (
        msa_ops.msa_proxy_score(q, k, int32(*BOUNDS), max_k_tiles=4, output=out, **options) is out
    )
    assert torch.equal(out, got)


def test_selection() -> None:
    scores = torch.round(numbers(2, 40, 5).float() * 4)
    for valid in (None, 30, int32(40, 3, 17, 0, 18)):
        got = msa_ops.msa_topk_select(scores, 17, valid, None, 1, 2)
        counts = [40 if valid is None else valid] * 5 if not torch.is_tensor(valid) else valid
        want = cumla.select_blocks(
            scores.permute(2, 0, 1).contiguous(),
            17,
            visible=int32(*counts),
            init_blocks=1,
            local_blocks=2,
        )
        assert got.shape == (5, 2, 17)
        assert torch.equal(got, want)


@pytest.mark.parametrize("cache", ["bfloat16", "e4m3", "packed"])
def test_attention(cache: str) -> None:
    """Both functions, over lists of any length with a block twice and one that is not there."""
    q, both = numbers(3, HEADS, COLUMNS), numbers(5, KV_HEADS, BLOCK, 2 * COLUMNS, seed=2)
    k, v = both[..., :COLUMNS], both[..., COLUMNS:]
    factors: dict[str, Any] = {}
    if cache == "e4m3":
        k, v = (x.contiguous().to(torch.float8_e4m3fn) for x in (k, v))
        factors = {"k_global_scale": 0.5, "v_global_scale": 2.0}
    elif cache == "bfloat16":
        k, v = k.contiguous(), v.contiguous()
    lists = int32([[2, 0, 0], [1, 2, 9], [1, -1, 0]], [[0, -1, -1], [2, -1, 1], [0, 0, 0]])
    lens = {"causal": True, "return_softmax_lse": True, **PAGES, **factors}
    out, lse = msa_ops.msa_sparse_attention(q, k, v, lists, int32(*BOUNDS), **lens)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:2]
    for token in range(3):
        request, seen = seen_by(token)
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            chosen = [t for t in range(seen) if t // BLOCK in lists[group, token].tolist()]
            keys, values = (rows(x, request, group, chosen) for x in (k, v))  # type: ignore[arg-type]
            scores = keys @ q[token, head].float() * factors.get("k_global_scale", 1) * 128**-0.5
            want = scores.softmax(0) @ values * factors.get("v_global_scale", 1)
            torch.testing.assert_close(out[token, head].float(), want, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(lse[token, head], scores.logsumexp(0), rtol=1e-4, atol=1e-4)
    # The first request's tokens alone, as a step of two tokens.
    some = {"page_table": int32(TABLE[0]), "seqused_k": int32(LENS[0]), **factors}
    into = torch.empty_like(q[:2])
    step = msa_ops.msa_sparse_decode_attention(
        q[:2], k, v, lists[:, :2], seqlen_q=2, out=into, return_softmax_lse=True, **some
    )
    assert step[0] is into
    assert torch.equal(step[0], out[:2])
    assert torch.equal(step[1], lse[:2])
    plain = msa_ops.msa_sparse_decode_attention(q[:2], k, v, lists[:, :2], seqlen_q=2, **some)
    assert torch.equal(plain, out[:2])


Q, K = numbers(3, HEADS, COLUMNS), numbers(5, KV_HEADS, BLOCK, COLUMNS)
LISTS, OFFSETS = torch.zeros(KV_HEADS, 3, 4, dtype=torch.int32), int32(*BOUNDS)
FP4 = "needs None, got factors of an FP4 cache; keep the cache in e4m3, and pass"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens_k": OFFSETS}, NotImplementedError, "cu_seqlens_k: needs None, got offsets"),
        ({"q_offset": 3}, NotImplementedError, "q_offset: needs None, got positions of queries"),
        ({"k_scale": K}, NotImplementedError, f"k_scale: {FP4} k_global_scale"),
        ({"v_scale": K}, NotImplementedError, f"v_scale: {FP4} v_global_scale"),
        (
            {"return_temperature_lse": True},
            NotImplementedError,
            "return_temperature_lse: needs False, got True; call FlashInfer for it",
        ),
        ({"page_table": None}, ValueError, "page_table: needs a tensor beside keys in pages, got"),
        ({"seqused_k": None}, ValueError, "seqused_k: needs a tensor beside keys in pages, got"),
        ({"k_global_scale": 2.0}, ValueError, "k_global_scale: needs an e4m3 cache"),
        ({"q2k_indices": LISTS[0]}, ValueError, "q2k_indices: needs axes (num_kv_heads, total_q"),
        ({"q2k_indices": LISTS[:, :2]}, ValueError, "q2k_indices: needs shape"),
        ({"q2k_indices": LISTS.numpy()}, TypeError, "q2k_indices: needs a PyTorch tensor"),
        ({"seqused_k": OFFSETS.long()}, TypeError, "seqused_k: needs int32"),
        (
            {"k": K[:, :, :64]},
            ValueError,
            "k: needs pages of 128 tokens, got shape (5, 2, 64, 128)",
        ),
        ({"v": K[:, :, :64]}, ValueError, "v: needs pages of 128 tokens, got shape"),
        ({"v": K[0]}, ValueError, "v: needs axes (num_pages, num_kv_heads, 128, head_dim), got"),
        ({"q": Q.double()}, TypeError, "q: needs bfloat16 or float16 or float32, got float64"),
        ({"cu_seqlens_q": OFFSETS.float()}, TypeError, "cu_seqlens_q: needs int32"),
        ({"out": Q[:2]}, ValueError, "out: needs shape (3, 8, 128), got (2, 8, 128)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_attention_refuses(change: Any, error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"q": Q, "k": K, "v": K, "q2k_indices": LISTS, **PAGES}
    with refused(error, message):
        msa_ops.msa_sparse_attention(**{**given, "cu_seqlens_q": OFFSETS, **change})
    if "cu_seqlens_q" not in change and "return_temperature_lse" not in change:
        if "out" in change:
            message = "out: needs the 3 query tokens of q, got shape (2, 8, 128); leave it out"
        with refused(error, message):
            msa_ops.msa_sparse_decode_attention(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"seqlen_q": 2},
            ValueError,
            "seqlen_q: needs a divisor of the 3 query tokens of q, got 2",
        ),
        ({"seqlen_q": 0}, ValueError, "seqlen_q: needs a number from 1, got 0"),
        ({"seqlen_q": 1.0}, TypeError, "seqlen_q: needs an int, got float"),
        ({"out": Q[0]}, ValueError, "out: needs axes (batch * seqlen_q, num_qo_heads, head_dim)"),
        ({"q": Q[0]}, ValueError, "q: needs axes (batch * seqlen_q, num_qo_heads, head_dim), got"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_decoding_refuses(change: Any, error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"q": Q, "k": K, "v": K, "q2k_indices": LISTS, **PAGES}
    with refused(error, message):
        msa_ops.msa_sparse_decode_attention(**given | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"output": torch.zeros(1)}, ValueError, "output: needs shape (8, 3, 3) and torch.float32"),
        (
            {"output": torch.zeros(8, 3, 3).bfloat16()},
            ValueError,
            "output: needs shape (8, 3, 3) and torch.float32, got (8, 3, 3) and torch.bfloat16",
        ),
        ({"max_k_tiles": -1}, ValueError, "max_k_tiles: needs a number from 0, got -1; leave it"),
        ({"k": K[:, :0]}, ValueError, "q: needs a multiple of the 0 heads of k, one at least"),
        ({"q": Q[:, :3]}, ValueError, "q: needs a multiple of the 2 heads of k, one at least, got"),
        ({"q": Q[0]}, ValueError, "q: needs axes (total_q, num_qo_heads, head_dim)"),
        ({"k": K[:, :, :64]}, ValueError, "k: needs pages of 128 tokens, got shape"),
        ({"k": K.half()}, TypeError, "k: needs the dtype of q, bfloat16, got float16"),
        ({"q_offset": 3}, NotImplementedError, "q_offset: needs None"),
        ({"cu_seqlens_k": OFFSETS}, NotImplementedError, "cu_seqlens_k: needs None"),
        ({"page_table": None}, ValueError, "page_table: needs a tensor beside keys in pages, got"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_scores_refuse(change: Any, error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"q": Q, "k": K, "cu_seqlens_q": OFFSETS, **PAGES}
    with refused(error, message):
        msa_ops.msa_proxy_score(**given | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"topk": 2}, ValueError, "topk: needs at least the 3 forced blocks, got 2"),
        ({"topk": None}, TypeError, "topk: needs an int, got"),
        ({"force_begin_blocks": -1}, ValueError, "force_begin_blocks: needs a number from 0"),
        ({"force_end_blocks": -1}, ValueError, "force_end_blocks: needs a number from 0"),
        ({"num_valid_pages": -1}, ValueError, "num_valid_pages: needs a number from 0, got -1"),
        ({"num_valid_pages": 2.0}, TypeError, "num_valid_pages: needs an int, got float"),
        ({"num_valid_pages": int32(1, 2)}, ValueError, "num_valid_pages: needs shape"),
        ({"max_score": torch.zeros(4, 1)}, ValueError, "max_score: needs axes (num_qo_heads, max_"),
        ({"output": torch.zeros(1, 1, 3)}, TypeError, "output: needs int32, got float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_selection_refuses(change: Any, error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"max_score": torch.zeros(1, 4, 1), "topk": 3}
    forced = {"force_begin_blocks": 1, "force_end_blocks": 2}
    assert msa_ops.msa_topk_select(**given, num_valid_pages=2**40).tolist() == [[[0, 1, 2]]]
    with refused(error, message):
        msa_ops.msa_topk_select(**given | forced | change)
