# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's interface on the CPU, against attention in float32."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest

from cumla.compat import _flash_attention, flash_attn
from cumla.compat.flash_attn import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from cumla.core.frameworks import torch_framework
from tests.compat.oracle import NO_WINDOW, assert_state, int32, naive, offsets_of, split, turned
from tests.compat.torch_gpu import torch_gpu

torch = pytest.importorskip("torch")

HEADS = {"mha": (3, 3), "gqa": (6, 2), "mqa": (4, 1)}


class Case(NamedTuple):
    """One call with a cache."""

    q_len: int = 1
    new: int = 0
    heads: str = "gqa"
    columns: tuple[int, int] = (32, 32)  # of keys and of values
    page: int | None = None
    rotary: float = 0.0
    interleaved: bool = True
    causal: bool = False
    window: tuple[int, int] = NO_WINDOW
    chunk: int = 0
    softcap: float = 0.0
    batch_idx: bool = False
    varlen_q: bool = False
    varlen_new: bool = False
    own_rotary: bool = False  # rotary_seqlens
    dtype: Any = torch.bfloat16
    s_max: int = 40

    def __str__(self) -> str:
        changed = [(n, v) for n, v in self._asdict().items() if v != self._field_defaults[n]]
        return " ".join(f"{n}={v}" for n, v in changed) or "defaults"


CASES = [
    Case(),
    Case(heads="mha", page=4),
    Case(heads="mqa", page=128, dtype=torch.float16),
    Case(q_len=3, causal=True, softcap=5.0),
    Case(q_len=3, causal=True, columns=(48, 16), page=4),
    Case(q_len=4, window=(5, 2), page=4),
    Case(q_len=4, window=(5, -1), batch_idx=True),
    Case(q_len=4, window=(6, -1), causal=True, softcap=9.0),
    Case(q_len=64, causal=True, heads="mqa"),
    Case(varlen_q=True, causal=True, page=4),
    Case(varlen_q=True, window=(3, 3), batch_idx=True),
    Case(chunk=8, page=4),
    Case(q_len=5, chunk=4, causal=True, softcap=5.0, batch_idx=True),
    Case(q_len=20, chunk=6, page=4),  # more queries than keys
    Case(varlen_q=True, chunk=8, window=(3, 1), page=4),
    Case(varlen_q=True, chunk=8, window=(-1, 1)),
    Case(varlen_q=True, chunk=5, window=(2, -1), causal=True, dtype=torch.float16),
    Case(q_len=2, new=7, rotary=1.0, chunk=8, page=4),
    Case(new=1, page=4),
    Case(new=1, rotary=1.0, interleaved=False, causal=True),
    Case(new=1, rotary=0.5, causal=True, page=128, heads="mqa"),
    Case(new=1, rotary=1.0, page=4),
    Case(new=3, rotary=1.0),
    Case(q_len=4, new=4, rotary=0.5, interleaved=False, causal=True, page=4),
    Case(q_len=4, new=4, rotary=1.0, page=4, dtype=torch.float16),
    Case(q_len=4, new=4, rotary=1.0, window=(7, 0), batch_idx=True),
    Case(q_len=2, new=7, rotary=1.0, causal=True, batch_idx=True),
    Case(q_len=7, new=2, rotary=0.5, heads="mha", page=4),
    Case(q_len=3, new=3, rotary=1.0, causal=True, own_rotary=True),
    Case(q_len=3, new=3, rotary=1.0, own_rotary=True, page=4),
    Case(varlen_q=True, new=5, rotary=1.0, causal=True, page=4),
    Case(q_len=2, varlen_new=True, rotary=0.5, causal=True, own_rotary=True, page=4),
    Case(varlen_q=True, varlen_new=True, rotary=1.0, interleaved=False, causal=True),
    Case(varlen_q=True, varlen_new=True, rotary=1.0, window=(4, 4), own_rotary=True),
    Case(varlen_q=True, varlen_new=True, rotary=1.0, page=128),
    Case(new=3, columns=(64, 32), heads="mha"),
]


class Cache:
    """Caches of keys and values, and which rows in them the requests have."""

    def __init__(self, case: Case, batch: int) -> None:
        _, kv_heads = HEADS[case.heads]
        self.options: dict[str, Any] = {}
        if case.page is None:
            slots, size = (batch + 3 if case.batch_idx else batch), case.s_max
            table = torch.randperm(slots)[:batch] if case.batch_idx else torch.arange(batch)
            self.table = table[:, None]
            if case.batch_idx:
                self.options["cache_batch_idx"] = table.int()
        else:
            pages = -(-case.s_max // case.page)
            slots, size = batch * pages + 2, case.page
            self.table = torch.randperm(slots)[: batch * pages].view(batch, pages)
            self.options["page_table"] = self.table.int()
        self.k, self.v = (
            torch.randn(slots, size, kv_heads, columns).to(case.dtype) for columns in case.columns
        )

    def rows(self, request: int, length: int) -> tuple[Any, Any]:
        """Copies of a request's keys and values."""
        pages = self.table[request]
        return tuple(cache[pages].flatten(0, 1)[:length].clone() for cache in (self.k, self.v))


class Step:
    """The tensors of one call with a cache, and what it must give."""

    batch = 4
    cached = (17, 0, 5, 28)

    def __init__(self, case: Case) -> None:
        self.case = case
        self.q_lens = [3, 0, 1, 6] if case.varlen_q else [case.q_len] * self.batch
        self.new_lens = [3, 0, 1, 6] if case.varlen_new else [case.new] * self.batch
        self.starts = (2, 7, 11, 0) if case.own_rotary else self.cached
        self.is_ordered = case.causal or case.window != NO_WINDOW or case.chunk > 0
        heads, kv_heads = HEADS[case.heads]
        columns, columns_v = case.columns
        self.cache = Cache(case, self.batch)
        self.before = [self.cache.rows(r, n) for r, n in enumerate(self.cached)]
        self.q, self.k, self.v = (
            torch.randn(sum(lens), h, c).to(case.dtype)
            for lens, h, c in (
                (self.q_lens, heads, columns),
                (self.new_lens, kv_heads, columns),
                (self.new_lens, kv_heads, columns_v),
            )
        )
        angles = torch.rand(64, int(case.rotary * columns) // 2) * 2 * math.pi
        self.cos, self.sin = angles.cos().to(case.dtype), angles.sin().to(case.dtype)

    @property
    def arguments(self) -> dict[str, Any]:
        case, cache = self.case, self.cache
        named: dict[str, Any] = {"q": self.q, "k_cache": cache.k, "v_cache": cache.v}
        named |= {**cache.options, "cache_seqlens": int32(*self.cached), "causal": case.causal}
        named |= {"window_size": case.window, "softcap": case.softcap}
        if case.chunk:
            named["attention_chunk"] = case.chunk
        if case.rotary:
            named |= {"rotary_cos": self.cos, "rotary_sin": self.sin}
            named["rotary_interleaved"] = case.interleaved
        if case.own_rotary:
            named["rotary_seqlens"] = int32(*self.starts)
        if any(self.new_lens):
            named |= {"k": self.k, "v": self.v}
        for is_ragged, names, offsets, lens in (
            (case.varlen_q, ("q",), "cu_seqlens_q", self.q_lens),
            (case.varlen_new, ("k", "v"), "cu_seqlens_k_new", self.new_lens),
        ):
            if is_ragged:
                named[offsets] = offsets_of(lens)
                continue
            for name in names:
                if name in named:
                    named[name] = named[name].unflatten(0, (self.batch, lens[0]))
        return named

    def check_caches(self, request: int, new: tuple[Any, Any]) -> tuple[Any, Any]:
        """Check what a request has in the caches, and return it."""
        length = self.cached[request] + self.new_lens[request]
        found = self.cache.rows(request, length)
        keys, values = map(torch.cat, zip(self.before[request], new, strict=True))
        torch.testing.assert_close(found[0], keys, rtol=2**-7, atol=2**-7)
        assert torch.equal(found[1], values)
        return found

    def expected(self) -> tuple[Any, Any]:
        """Compute out and lse of all requests from what the caches hold after the call."""
        case, states = self.case, []
        parts = [split(self.q, self.q_lens), *(split(x, self.new_lens) for x in (self.k, self.v))]
        for r, (queries, keys, values) in enumerate(zip(*parts, strict=True)):
            if case.rotary:
                table, start = (self.cos, self.sin), self.starts[r]
                at = torch.arange(len(queries)) * int(self.is_ordered) + start
                queries = turned(queries, *table, at, case.interleaved)
                at = torch.arange(len(keys)) + start
                keys = turned(keys, *table, at, case.interleaved)
            mask = {name: getattr(case, name) for name in ("causal", "window", "softcap", "chunk")}
            states.append(naive(queries, *self.check_caches(r, (keys, values)), **mask))
        out, lse = (torch.cat([state[i] for state in states], dim=i) for i in range(2))
        if case.varlen_q:
            return out, lse
        form = (self.batch, case.q_len)
        return out.unflatten(0, form), lse.unflatten(1, form).transpose(0, 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_with_a_cache(case: Case) -> None:
    torch.manual_seed(0)
    step = Step(case)
    k_cache, q, k = (rows.clone() for rows in (step.cache.k, step.q, step.k))
    out, lse = flash_attn_with_kvcache(**step.arguments, return_softmax_lse=True)
    assert out.dtype == case.dtype
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert_state((out, lse), step.expected())
    assert (step.cache.k != k_cache).flatten(2).any(-1).sum() == sum(step.new_lens)
    assert torch.equal(step.q, q)
    assert torch.equal(step.k, k)
    # Without lse, and again: the same rows are written.
    assert torch.equal(flash_attn_with_kvcache(**step.arguments), out)


# --- other forms of the arguments ----------------------------------------------------------------


class Small(NamedTuple):
    """Queries and caches of two requests, 8 tokens of room each."""

    q: Any
    k_cache: Any
    v_cache: Any


@pytest.fixture
def small() -> Small:
    torch.manual_seed(1)
    return Small(*(torch.randn(2, n, h, 16).half() for n, h in ((1, 4), (8, 2), (8, 2))))


def test_one_length_for_all_requests(small: Small) -> None:
    found = flash_attn_with_kvcache(*small, cache_seqlens=5)
    assert torch.equal(found, flash_attn_with_kvcache(*small, cache_seqlens=int32(5, 5)))
    q, *caches = small
    ragged = flash_attn_with_kvcache(
        q[:, 0], *caches, cache_seqlens=5, cu_seqlens_q=int32(0, 1, 2), max_seqlen_q=1
    )
    assert torch.equal(ragged, found[:, 0])


def test_new_rows_need_room(small: Small) -> None:
    new = [torch.zeros(2, 3, 2, 16).half() for _ in "kv"]
    with pytest.raises(RuntimeError, match="cache_seqlens: needs room for the 3 new rows of k, at"):
        flash_attn_with_kvcache(*small, *new, cache_seqlens=6)
    with pytest.raises(RuntimeError, match="cu_seqlens_k_new: needed with k"):
        flash_attn_with_kvcache(*small, *(n.flatten(0, 1) for n in new), cache_seqlens=5)
    assert flash_attn_with_kvcache(*small, *new, cache_seqlens=5).isfinite().all()


@pytest.mark.parametrize("pages", [False, True])
def test_caches_are_full_unless_told(small: Small, pages: bool) -> None:
    q, k_cache, v_cache = small
    given = {"page_table": int32(1, 0)[:, None]} if pages else {}
    found = flash_attn_with_kvcache(*small, **given)
    order = [1, 0] if pages else [0, 1]
    for r, slot in enumerate(order):
        out, _ = naive(q[r], k_cache[slot], v_cache[slot])
        torch.testing.assert_close(found[r].float(), out, rtol=1e-3, atol=1e-3)


def test_nothing_visible_gives_0_and_minus_infinity(small: Small) -> None:
    out, lse = flash_attn_with_kvcache(*small, cache_seqlens=int32(0, 3), return_softmax_lse=True)
    assert not out[0].any()
    assert torch.isneginf(lse[0]).all()
    assert torch.isfinite(lse[1]).all()


def test_scale_and_what_only_steers_speed(small: Small) -> None:
    q, k_cache, v_cache = small
    lens = int32(5, 8)
    metadata = get_scheduler_metadata(
        2, 1, 8, 4, 2, 16, lens, torch.float16, page_size=None, causal=True, num_splits=3
    )
    assert metadata.dtype == torch.int32
    found, lse = flash_attn_with_kvcache(
        *small,
        cache_seqlens=lens,
        softmax_scale=0.7,
        causal=True,
        scheduler_metadata=metadata,
        num_splits=3,
        pack_gqa=True,
        sm_margin=8,
        max_seqlen_q=1,
        return_softmax_lse=True,
    )
    for r, n in enumerate(lens.tolist()):
        out, expected = naive(q[r], k_cache[r, :n], v_cache[r, :n], scale=0.7)
        torch.testing.assert_close(found[r].float(), out, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lse[r], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "used"),
    [
        ([3, 0, 5], [7, 4, 5], None),
        ([3, 2, 5], [7, 4, 5], [6, 0, 5]),  # the last rows of a request are not used
        ([9, 2, 1], [4, 30, 1], None),  # more queries than keys
    ],
)
@pytest.mark.parametrize(
    "mask",
    [
        *({}, {"causal": True}, {"window": (2, 1)}, {"causal": True, "softcap": 3.0}),
        *({"chunk": 3}, {"chunk": 3, "causal": True}, {"chunk": 4, "window": (2, 1)}),
    ],
    ids=str,
)
def test_ragged_rows(q_lens: list[int], k_lens: list[int], used: Any, mask: dict[str, Any]) -> None:
    torch.manual_seed(2)
    q = torch.randn(sum(q_lens), 6, 24).bfloat16()
    k, v = (torch.randn(sum(k_lens), 2, columns).bfloat16() for columns in (24, 40))
    theirs = {"window": "window_size", "chunk": "attention_chunk"}
    options: dict[str, Any] = {theirs.get(name, name): value for name, value in mask.items()}
    if used is not None:
        options["seqused_k"] = int32(*used)
    options |= {"deterministic": True, "return_attn_probs": True}
    cu = offsets_of(q_lens), offsets_of(k_lens)
    found = flash_attn_varlen_func(q, k, v, *cu, max(q_lens), max(k_lens), **options)
    states = [
        naive(a, b[:n], c[:n], **mask)
        for a, b, c, n in zip(
            split(q, q_lens), split(k, k_lens), split(v, k_lens), used or k_lens, strict=True
        )
    ]
    expected = [torch.cat([s[i] for s in states], dim=i) for i in range(2)]
    assert_state(found, expected)
    assert found[1].is_contiguous()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("causal", [False, True])
def test_requests_of_one_length(heads: str, causal: bool) -> None:
    torch.manual_seed(3)
    num_heads, kv_heads = HEADS[heads]
    packed = torch.randn(3, 9, num_heads + 2 * kv_heads, 32).half()
    q, k, v = packed.split([num_heads, kv_heads, kv_heads], dim=2)  # views, nothing is copied
    q = q[:, 4:]
    found = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    states = [naive(*rows, causal=causal) for rows in zip(q, k, v, strict=True)]
    assert_state(found, [torch.stack([s[i] for s in states]) for i in range(2)])
    assert torch.equal(flash_attn_func(q, k, v, None, causal), found[0])
    one_of_each = flash_attn_varlen_func(
        q, k, v, None, None, None, None, seqused_k=int32(9, 9, 9), causal=causal
    )
    assert torch.equal(one_of_each, found[0])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_splits", [1, 3, 70])
def test_combine(num_splits: int, dtype: Any) -> None:
    torch.manual_seed(4)
    parts = torch.randn(num_splits, 2, 5, 3, 16)
    lses = (3 * torch.randn(num_splits, 2, 3, 5)).transpose(-1, -2)
    lses[:, 0, 0, 0] = -math.inf
    out, lse = flash_attn_combine(parts, lses, out_dtype=dtype)
    assert out.dtype == (dtype or torch.float32)
    weights = (lses.double() - lses.double().logsumexp(0)).exp().nan_to_num(0.0)
    expected = (weights[..., None] * parts).sum(0)
    atol = 1e-5 if dtype is None else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=atol, atol=atol)
    torch.testing.assert_close(lse, lses.logsumexp(0), rtol=1e-5, atol=1e-5)
    assert lse.stride(-2) == 1
    given = torch.empty_like(out)
    again, _ = flash_attn_combine(parts, lses, given, dtype)
    assert again is given
    assert torch.equal(given, out)


def test_an_empty_batch() -> None:
    q = torch.zeros(0, 1, 4, 16).half()
    k_cache, v_cache = torch.zeros(2, 3, 8, 2, 16).half()
    lens, table = int32(), torch.zeros(0, 1, dtype=torch.int32)
    k = torch.zeros(0, 1, 2, 16).half()
    cos = torch.ones(8, 8).half()
    out, lse = flash_attn_with_kvcache(
        *(q, k_cache, v_cache, k, k),
        rotary_cos=cos,
        rotary_sin=cos,
        cache_seqlens=lens,
        page_table=table,
        return_softmax_lse=True,
    )
    assert out.shape == q.shape
    assert lse.shape == (0, 4, 1)
    rows = torch.zeros(0, 4, 16).half()
    none = int32(0)
    assert flash_attn_varlen_func(rows, rows, rows, none, none, 0, 0).shape == rows.shape


# --- what is refused -----------------------------------------------------------------------------

SEQLENS = int32(3, 3)
TWO = torch.zeros(2, 1, 2, 16).half()
E4M3_ROWS = torch.zeros(2, 8, 2, 16).to(torch.float8_e4m3fn)
SCALES = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"qv": TWO}, "qv: .*cumla.mla_decode"),
        ({"cache_leftpad": SEQLENS}, "cache_leftpad: .*leave it out"),
        ({"q_descale": SCALES}, "q_descale: .*bfloat16"),
        ({"q": torch.zeros(2, 1, 4, 16).to(torch.float8_e4m3fn)}, "q: .*float8.*convert"),
        ({"v_cache": torch.zeros(2, 8, 2, 520).half()}, "v_cache: .*512 .*520.*mla_decode"),
        ({"q": torch.zeros(2, 1, 4, 16, requires_grad=True)}, "q: .*gradient.*no_grad"),
    ],
)
def test_what_cumla_does_not_have(small: Small, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^{says}"):
        flash_attn_with_kvcache(**{**small._asdict(), "cache_seqlens": SEQLENS, **changes})


@pytest.mark.parametrize("changes", [{"qv": TWO}, {"q_descale": SCALES}], ids=str)
def test_what_cumla_does_not_have_for_rows(changes: dict[str, Any]) -> None:
    name = next(iter(changes))
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        flash_attn_func(TWO, TWO, TWO, **changes)
    rows, offsets = TWO[:, 0], int32(0, 1, 2)
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        flash_attn_varlen_func(rows, rows, rows, offsets, offsets, 1, 1, **changes)


def test_chunks_are_no_negative_numbers(small: Small) -> None:
    says = "^attention_chunk: needs .*got -1; pass 0"
    with pytest.raises(ValueError, match=says):
        flash_attn_with_kvcache(*small, cache_seqlens=SEQLENS, attention_chunk=-1)
    with pytest.raises(ValueError, match=says):
        flash_attn_func(TWO, TWO, TWO, attention_chunk=-1)


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_of_queries_that_are_used(causal: bool) -> None:
    torch.manual_seed(5)
    q, k = torch.randn(2, 6, 4, 16).half(), torch.randn(2, 11, 2, 16).half()
    options = {"seqused_q": int32(4, 1), "seqused_k": int32(11, 6), "causal": causal}
    found, lse = flash_attn_varlen_func(
        q, k, k, *[None] * 4, **options, attention_chunk=4, return_attn_probs=True
    )
    for r, (used, keys) in enumerate(((4, 11), (1, 6))):
        some = q[r, :used], k[r, :keys], k[r, :keys]
        assert_state((found[r, :used], lse[r, :, :used]), naive(*some, causal=causal, chunk=4))
        assert not found[r, used:].any()


def test_the_order_of_flash_attention_2() -> None:
    rows, offsets = TWO[:, 0], int32(0, 1, 2)
    way_out = "needs a tensor, got .*; the order is FlashAttention-3's, .* dropout_p .*: pass"
    with pytest.raises(TypeError, match=f"^seqused_q: {way_out}"):
        flash_attn_varlen_func(rows, rows, rows, offsets, offsets, 1, 1, 0.0, None, True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"^qv: {way_out}"):
        flash_attn_func(TWO, TWO, TWO, 0.0, None, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("expanded", [False, True])
def test_caches_of_e4m3(small: Small, expanded: bool) -> None:
    """Factors a request and head, or one for all, expanded."""
    factors = torch.full((1, 1), 1.5).expand(2, 2) if expanded else SCALES
    caches = [cache.to(torch.float8_e4m3fn) for cache in (small.k_cache, small.v_cache)]
    options = {"cache_seqlens": SEQLENS, "return_softmax_lse": True}
    descales = {"k_descale": factors, "v_descale": factors}
    found = flash_attn_with_kvcache(small.q, *caches, **descales, **options)
    plain = [cache.float() * factors[:, None, :, None] for cache in caches]
    for request, used in enumerate(SEQLENS.tolist()):
        k, v = (cache[request, :used] for cache in plain)
        out, lse = naive(small.q[request], k, v)
        assert_state((found[0][request], found[1][request]), (out, lse))


def test_new_rows_become_e4m3(small: Small) -> None:
    """They are written as their quotients with the factors that they are read with."""
    caches = [torch.zeros(2, 8, 2, 16).to(torch.float8_e4m3fn) for _ in range(2)]
    new = [torch.ones(2, 1, 2, 16).half() * 3 for _ in range(2)]
    first = int32(0, 0)
    descales = {"k_descale": SCALES, "v_descale": SCALES}
    out = flash_attn_with_kvcache(small.q, *caches, *new, cache_seqlens=first, **descales)
    stored = caches[1].float()[:, 0] * SCALES[:, :, None]
    torch.testing.assert_close(stored, new[1][:, 0].float(), rtol=0.07, atol=0)
    torch.testing.assert_close(out[:, 0].float(), stored.repeat_interleave(2, 1), rtol=2e-3, atol=0)


def test_rows_of_e4m3() -> None:
    rows = torch.randn(3, 2, 16).to(torch.float8_e4m3fn)
    q, offsets = torch.randn(3, 4, 16).half(), int32(0, 1, 3)
    one = torch.full((1, 1), 2.0).expand(2, 2)
    out = flash_attn_varlen_func(
        q, rows, rows, offsets, offsets, 2, 2, k_descale=one, v_descale=one, causal=True
    )
    plain = rows.float() * 2
    for begin, end in ((0, 1), (1, 3)):
        some = slice(begin, end)
        expected, _ = naive(q[some], plain[some], plain[some], causal=True)
        torch.testing.assert_close(out[some].float(), expected, rtol=2e-2, atol=2e-2)


def test_no_key() -> None:
    """Out is 0, and lse +inf: no row of keys is another case than none that is visible."""
    q, none = torch.randn(2, 3, 4, 16).half(), torch.zeros(2, 0, 2, 16).half()
    out, lse = flash_attn_func(q, none, none.new_zeros(2, 0, 2, 32), return_attn_probs=True)
    assert out.shape == (2, 3, 4, 32)
    assert out.dtype == q.dtype
    assert not out.any()
    assert lse.shape == (2, 4, 3)
    assert torch.isposinf(lse).all()
    rows, offsets = q.flatten(0, 1), int32(0, 3, 6)
    arguments = rows, none[0], none[0], offsets, int32(0, 0, 0), 3, 0
    out, lse = flash_attn_varlen_func(*arguments, return_attn_probs=True)
    assert not out.any()
    assert lse.shape == (4, 6)
    assert torch.isposinf(lse).all()
    some = torch.zeros(5, 2, 16).half()
    found = flash_attn_varlen_func(rows, some, some, *arguments[3:], return_attn_probs=True)
    assert torch.isneginf(found[1]).all()


@pytest.mark.parametrize("page", [None, 4])
@pytest.mark.parametrize("new", [0, 2])
def test_rows_of_the_table_or_the_cache_by_their_numbers(page: int | None, new: int) -> None:
    """cache_batch_idx with a table of all requests, as with one of those of the call."""
    step = Step(Case(q_len=2, new=new, page=page, causal=True, rotary=bool(new)))
    arguments = step.arguments
    order = [2, 0, 3, 1]
    name = "page_table" if page else "cache_batch_idx"
    rows = arguments.get(name, torch.arange(4, dtype=torch.int32))
    there = torch.empty_like(rows)
    there[order] = rows
    both = {"page_table": there, "cache_batch_idx": int32(*order)}
    cut = {"page_table": there[order], "cache_batch_idx": None}
    if not page:
        both = cut = {"cache_batch_idx": rows}
    results = []
    for given in (both, cut):
        caches = {n: arguments[n].clone() for n in ("k_cache", "v_cache")}
        found = flash_attn_with_kvcache(**arguments | caches | given, return_softmax_lse=True)
        results.append([*found, *(cache.nan_to_num(7.0) for cache in caches.values())])
    assert all(map(torch.equal, *results))


def test_numbers_of_no_row_of_the_table(small: Small) -> None:
    """They lead to no page: nothing is read or written through them."""
    numbers = int32(7, -3)
    table = int32(0, 1)[:, None]
    given = {"page_table": table, "cache_batch_idx": numbers, "cache_seqlens": SEQLENS}
    want = {"page_table": int32(-1, -1)[:, None], "cache_seqlens": SEQLENS}
    before = small.k_cache.clone()
    found = flash_attn_with_kvcache(*small, TWO, TWO, **given)
    assert torch.equal(small.k_cache, before)
    assert torch.equal(found, flash_attn_with_kvcache(*small, TWO, TWO, **want))


@pytest.mark.parametrize("ragged_k", [False, True])
@pytest.mark.parametrize("ragged_q", [False, True])
def test_some_queries_of_each_request(ragged_q: bool, ragged_k: bool) -> None:
    """Those of seqused_q stand at the end of the keys; the others get 0, and lse -inf."""
    room, used, kv_lens = [3, 4, 0, 5], [2, 0, 0, 9], [6, 3, 2, 5]
    if not ragged_q:
        room = [4] * 4
    q = torch.randn(sum(room), 4, 16).half()
    k, v = (torch.randn(sum(kv_lens), 2, 16).half() for _ in "kv")
    keys: Any = (k, v)
    if not ragged_k:
        rows = [[*part.split(kv_lens)] for part in (k, v)]
        pad = torch.nn.utils.rnn.pad_sequence
        keys = tuple(pad(part, batch_first=True) for part in rows)
    found = flash_attn_varlen_func(
        q if ragged_q else q.unflatten(0, (4, 4)),
        *keys,
        offsets_of(room) if ragged_q else None,
        offsets_of(kv_lens) if ragged_k else None,
        5,
        6,
        seqused_q=int32(*used),
        seqused_k=None if ragged_k else int32(*kv_lens),
        causal=True,
        window_size=(4, -1),
        return_attn_probs=True,
    )
    out, lse = found if ragged_q else (found[0].flatten(0, 1), found[1].transpose(0, 1).flatten(1))
    expected = torch.zeros(len(q), 4, 16), torch.full((4, len(q)), -math.inf)
    for request, own in enumerate(torch.arange(len(q)).split(room)):
        own = own[: used[request]]
        state = naive(
            q[own], *(split(x, kv_lens)[request] for x in (k, v)), causal=True, window=(4, 0)
        )
        expected[0][own], expected[1][:, own] = state
    assert_state((out, lse), expected)


def test_some_queries_on_the_emulated_gpu() -> None:
    with torch_gpu():
        test_some_queries_of_each_request(True, True)
        test_some_queries_of_each_request(False, False)


@pytest.mark.parametrize("used", [SEQLENS.float(), SEQLENS.long(), int32(1), SEQLENS[:, None]])
def test_numbers_of_queries_that_do_not_fit(used: Any) -> None:
    rows, offsets = TWO[:, 0], int32(0, 1, 2)
    with pytest.raises(RuntimeError, match=r"^seqused_q: needs (int32|the 2 requests|axes)"):
        flash_attn_varlen_func(rows, rows, rows, offsets, offsets, 1, 1, seqused_q=used)


def test_windows_of_other_kinds() -> None:
    q = torch.randn(1, 9, 4, 16).half()
    want = flash_attn_func(q, q, q, window_size=(2, 1))
    window = torch.tensor([2, 1])
    for pair in ([2, 1], window, window.numpy()):
        assert torch.equal(flash_attn_func(q, q, q, window_size=pair), want)


class OnGpu:
    is_cuda = True


def test_a_window_on_the_gpu_would_be_waited_for() -> None:
    with pytest.raises(TypeError, match=r"^window_size: needs numbers on the host, .*tolist"):
        flash_attn_func(TWO, TWO, TWO, window_size=OnGpu())  # type: ignore[arg-type]


def gapped(tensor: Any) -> Any:
    """The same numbers, with others between them."""
    return torch.stack([tensor, tensor * 3 + 1], -1)[..., 0]


@pytest.mark.parametrize("case", [CASES[-6], CASES[-3]], ids=str)
def test_gaps_are_closed_by_copies(case: Case) -> None:
    """In queries, new rows, rotations and lists, as FlashAttention does; caches are no copies."""
    step = Step(case)
    arguments = step.arguments
    caches = {n: arguments[n].clone() for n in ("k_cache", "v_cache")}
    want = flash_attn_with_kvcache(**arguments | caches)
    apart = {
        name: gapped(value)
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and name not in caches
    }
    assert {"q", "k", "v", "rotary_cos", "cu_seqlens_q", "cache_seqlens"} <= apart.keys()
    assert torch.equal(flash_attn_with_kvcache(**arguments | apart), want)
    rows, offsets = gapped(TWO[:, 0]), gapped(int32(0, 1, 2))
    found = flash_attn_varlen_func(rows, rows, rows, offsets, offsets, 1, 1)
    assert torch.equal(found, rows)
    with pytest.raises(RuntimeError, match=r"^k_cache: needs a contiguous last axis"):
        flash_attn_with_kvcache(**arguments | {"k_cache": gapped(caches["k_cache"])})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_where_no_gradient_is_recorded(small: Small, mode: Any) -> None:
    q = small.q.requires_grad_()
    with mode():
        found = flash_attn_with_kvcache(q, *small[1:], cache_seqlens=SEQLENS)
    assert not found.requires_grad


ROTARY = {"rotary_cos": torch.ones(8, 8).half(), "rotary_sin": torch.ones(8, 8).half()}
NEW = {"k": TWO, "v": TWO}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"k": TWO}, "k: needs v"),
        ({"v": TWO}, "k: needs v"),
        ({**NEW, "cache_seqlens": None}, "cache_seqlens: needed"),
        ({**NEW, "k": TWO[:1], "v": TWO[:1]}, "k: needs the 2 requests"),
        ({**NEW, "v": TWO[..., :8]}, "v_cache: needs shape"),
        (
            {**NEW, "k_cache": torch.zeros(2, 2, 8, 16).half()},
            r"k_cache: needs the 2 heads of k on its third axis.*pass k_cache.transpose\(1, 2\)",
        ),
        (
            {**NEW, "q": torch.zeros(2, 1, 3, 16).half()},
            "q: needs a multiple of the 2 heads of k, got 3; check",
        ),
        ({**NEW, "k": TWO.float()}, "k: needs the cache's dtype float16, got float32; convert it"),
        ({"cache_seqlens": -1}, "cache_seqlens: needs a number from 0 to 8"),
        ({"cache_seqlens": 9}, "cache_seqlens: needs a number from 0 to 8"),
        ({**NEW, "cache_seqlens": int32(3)}, "cache_seqlens: needs the 2 requests"),
        (ROTARY, "rotary_cos: needs new keys"),
        ({**NEW, "rotary_cos": ROTARY["rotary_cos"]}, "rotary_cos: needs rotary_sin"),
        (
            {**NEW, **ROTARY, "rotary_sin": torch.ones(8, 4).half()},
            "rotary_sin: needs shape and dtype of rotary_cos",
        ),
        ({**NEW, **ROTARY, "rotary_seqlens": int32(3)}, "rotary_seqlens: needs the 2 requests"),
        (
            {**NEW, "rotary_cos": torch.ones(8, 4).half(), "rotary_sin": torch.ones(8, 4).half()},
            "rotary_cos: needs rotary_dim a multiple of 16",
        ),
        ({"q": torch.zeros(2, 4, 16).half()}, "q: needs axes"),
        ({"cu_seqlens_q": int32(0, 1, 2)}, "q: needs axes"),
        ({"q": torch.zeros(3, 1, 4, 16).half()}, "k_cache: needs a row for each of the 3"),
        (
            {"q": torch.zeros(2, 1, 3, 16).half()},
            r"q: needs a multiple of the 2 kv heads of k_cache.*; check the axes of k_cache and of",
        ),
        ({"q": torch.zeros(2, 1, 4, 16).double()}, "q: needs bfloat16 or float16"),
        ({"q": torch.zeros(2, 1, 4, 16)}, "k_cache: needs float32, got float16"),
        ({"v_cache": E4M3_ROWS}, "v_cache: needs the kind of numbers of k_cache"),
        ({"k_descale": SCALES}, "k_descale: needs an e4m3 cache, got float16"),
        (
            {"k_cache": E4M3_ROWS, "v_cache": E4M3_ROWS, "v_descale": SCALES[:1, :, None]},
            "v_descale: needs shape",
        ),
        ({"k_cache": torch.zeros(2, 8, 2, 16).bfloat16()}, "k_cache: needs float16"),
        ({"v_cache": torch.zeros(2, 7, 2, 16).half()}, "v_cache: needs the pages.*of k_cache"),
        ({"cache_seqlens": SEQLENS.long()}, "cache_seqlens: needs int32"),
        ({"page_table": SEQLENS}, "page_table: needs axes"),
        ({"cache_batch_idx": SEQLENS[0]}, "cache_batch_idx: needs axes"),
        ({"cache_seqlens": SEQLENS[0]}, "cache_seqlens: needs axes"),
        ({**NEW, "cu_seqlens_k_new": SEQLENS[0]}, "cu_seqlens_k_new: needs axes"),
        ({**NEW, "cache_batch_idx": SEQLENS.long()}, "cache_batch_idx: needs int32"),
        ({"page_table": SEQLENS[:, None].long()}, "page_table: needs int32"),
        (
            {"page_table": SEQLENS[:, None], "cache_batch_idx": SEQLENS.long()},
            "cache_batch_idx: needs int32",
        ),
        ({"page_table": SEQLENS, "cache_batch_idx": SEQLENS}, "page_table: needs axes"),
        (
            {"page_table": SEQLENS[:0, None], "cache_batch_idx": SEQLENS},
            "page_table: needs a row for cache_batch_idx",
        ),
        ({"window_size": torch.tensor([1, 2, 3])}, "window_size: needs one number or a pair"),
        ({"window_size": (1, 2, 3)}, "window_size: needs one number or a pair"),
        ({"softcap": -1.0}, "softcap: needs a number"),
    ],
)
def test_arguments_that_do_not_fit(small: Small, changes: dict[str, Any], says: str) -> None:
    arguments = {**small._asdict(), "cache_seqlens": SEQLENS, **changes}
    before = small.k_cache.clone()
    with pytest.raises(RuntimeError, match=f"^{says}") as caught:
        flash_attn_with_kvcache(**arguments)
    assert type(caught.value) is RuntimeError
    assert torch.equal(small.k_cache, before)


def test_the_table_of_flash_attention_2(small: Small) -> None:
    """Its block_table is page_table; caches of heads before tokens may come turned."""
    arguments = {**small._asdict(), "cache_seqlens": SEQLENS}
    table = int32(1, 0)[:, None]
    want = flash_attn_with_kvcache(**arguments, page_table=table)
    turned = {n: arguments[n].transpose(1, 2).contiguous() for n in ("k_cache", "v_cache")}
    turned = {name: cache.transpose(1, 2) for name, cache in turned.items()}
    got = flash_attn_with_kvcache(**arguments | turned, block_table=table)
    assert torch.equal(got, want)
    assert not torch.equal(got, flash_attn_with_kvcache(**arguments))
    with pytest.raises(TypeError, match=r"^block_table: is another name of page_table, got both"):
        flash_attn_with_kvcache(**arguments, page_table=table, block_table=table)


@pytest.mark.parametrize("name", ["q", "k_cache", "k", "page_table", "cache_seqlens"])
def test_arguments_that_are_no_tensors(small: Small, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: needs a PyTorch tensor, got builtins.list"):
        flash_attn_with_kvcache(**{**small._asdict(), name: [1, 2]})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"causal": 1}, "causal: needs True or False, got int"),
        ({"causal": 0.125}, "causal: needs True or False, got float"),
        ({"window_size": 5}, "window_size: needs a pair of numbers, got 5"),
        ({"window_size": torch.tensor(5)}, r"window_size: needs a pair of numbers, got tensor\(5"),
        ({"window_size": None}, "window_size: needs a pair of numbers, got None"),
    ],
)
def test_options_of_the_wrong_kind(small: Small, changes: dict[str, Any], says: str) -> None:
    before = small.k_cache.clone()
    with pytest.raises(TypeError, match=f"^{says}"):
        flash_attn_with_kvcache(**small._asdict(), **NEW, cache_seqlens=SEQLENS, **changes)
    assert torch.equal(small.k_cache, before)
    with pytest.raises(TypeError, match=f"^{says}"):
        flash_attn_func(TWO, TWO, TWO, **changes)


def test_a_length_that_is_no_number(small: Small) -> None:
    with pytest.raises(
        TypeError, match=r"^cache_seqlens: needs a PyTorch tensor, got builtins.bool"
    ):
        flash_attn_with_kvcache(**small._asdict(), cache_seqlens=True)


def test_partial_results_that_do_not_fit() -> None:
    parts, lses = torch.zeros(2, 1, 3, 2, 16), torch.zeros(2, 1, 3, 2)
    for arguments, says in [
        ((parts[0], lses), "out_partial: needs axes"),
        ((parts, lses[..., 0]), "lse_partial: needs axes"),
        ((parts, lses.double()), "lse_partial"),
        ((parts, lses, torch.zeros(1, 3, 2, 16), torch.float16), "out: needs out_dtype"),
        ((parts, lses, torch.zeros(1, 3, 2, 8)), "out: needs shape"),
    ]:
        with pytest.raises(RuntimeError, match=f"^{says}"):
            flash_attn_combine(*arguments)


def test_torch_compile_is_refused(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_framework(), "_dynamo", lambda: True)  # importing it takes seconds
    with pytest.raises(RuntimeError, match=r"^q: .*torch\.compile.*torch\.compiler\.disable"):
        flash_attn_with_kvcache(*small, cache_seqlens=SEQLENS)


def test_nothing_waits_for_the_gpu(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """No method that hands a number or a copy to the host is called."""

    def wait(self: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError("waits for the GPU")

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, wait)
    seen = []

    def noted(name: str) -> Any:
        def operation(first: Any, *_: Any, lse: Any = None, **__: Any) -> Any:
            seen.append(name)
            return first, lse

        return operation

    monkeypatch.setattr(_flash_attention, "attention", noted("attention"))
    for name in ("append_kv_cache", "apply_rope"):
        monkeypatch.setattr(flash_attn, name, noted(name))
    q, k_cache, v_cache = small
    new = torch.zeros(2, 2, 16).half()
    offsets = int32(0, 1, 2)
    flash_attn_with_kvcache(
        *(q[:, 0], k_cache, v_cache, new, new),
        **ROTARY,
        cache_seqlens=SEQLENS,
        cu_seqlens_q=offsets,
        cu_seqlens_k_new=offsets.clone(),
        rotary_seqlens=SEQLENS,
        return_softmax_lse=True,
    )
    assert seen == ["apply_rope", "append_kv_cache", "attention"]
    flash_attn_with_kvcache(*small, TWO, TWO, **ROTARY, cache_seqlens=3, causal=True)
    assert seen[3:] == ["append_kv_cache", "attention"]  # one kernel rotates queries and keys
