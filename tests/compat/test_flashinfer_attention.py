# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's wrappers for decoding and prefill on the CPU, against attention in float32.

Shapes and tolerances of numbers are those of FlashInfer's own tests, in smaller batches.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from cumla import AttentionState
from cumla.compat import flashinfer
from cumla.compat.flashinfer import _attention, _wrapper
from tests.compat.elsewhere import open_elsewhere
from tests.compat.oracle import int32, naive, offsets_of, split
from tests.compat.torch_gpu import torch_gpu

torch = pytest.importorskip("torch")

NAN = math.nan
CLOSE = {"rtol": 1e-3, "atol": 1e-3}
DECODE = flashinfer.BatchDecodeWithPagedKVCacheWrapper
PREFILL = flashinfer.BatchPrefillWithPagedKVCacheWrapper
RAGGED = flashinfer.BatchPrefillWithRaggedKVCacheWrapper

SCORES = "window_left=-1 logits_soft_cap=None"
ROPE = "rope_scale=None rope_theta=None"
DTYPES = "kv_data_type=None o_data_type=None"
MASKS = "custom_mask=None packed_custom_mask=None causal=False pos_encoding_mode='NONE'"
ITEMS = (
    "prefix_len_ptr=None token_pos_in_items_ptr=None token_pos_in_items_len=0 max_item_len_ptr=None"
)
BACKEND = "backend='auto' jit_args=None jit_kwargs=None"
OF_FORWARD = f"{SCORES} sm_scale=None {ROPE} return_lse=False"


# --- problems ------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """A batch in FlashInfer's terms; what no request may read is NaN."""

    q: Any
    cache: Any  # packed, or a pair
    qo_indptr: Any
    indptr: Any
    indices: Any
    last_page_len: Any
    layout: str
    kv_lens: tuple[int, ...]

    @property
    def pages(self) -> tuple[Any, Any, Any]:
        return self.indptr, self.indices, self.last_page_len

    @property
    def parts(self) -> tuple[Any, Any]:
        """Keys and values, (pages, page_size, heads, columns)."""
        both = self.cache if isinstance(self.cache, tuple) else self.cache.unbind(1)
        k, v = (part.transpose(1, 2) if self.layout == "HND" else part for part in both)
        return k, v

    @property
    def sizes(self) -> tuple[int, ...]:
        k, _ = self.parts
        return self.q.shape[1], k.shape[2], self.q.shape[2], k.shape[1]

    def rows(self, request: int) -> tuple[Any, Any]:
        """Keys and values of a request."""
        pages = self.indices[self.indptr[request] : self.indptr[request + 1]].long()
        k, v = (part[pages].flatten(0, 1)[: self.kv_lens[request]] for part in self.parts)
        return k, v

    def expected(self, **options: Any) -> tuple[Any, Any]:
        """out, and lse to base 2."""
        states = []
        for r in range(len(self.kv_lens)):
            own = self.q[self.qo_indptr[r] : self.qo_indptr[r + 1]]
            states.append(naive(own, *self.rows(r), **options))
        out, lse = torch.cat([s[0] for s in states]), torch.cat([s[1] for s in states], dim=1)
        return out, lse.T / math.log(2)


def make_batch(
    q_lens: Any,
    kv_lens: Any,
    *,
    heads: tuple[int, int] = (8, 2),
    columns: tuple[int, int] = (64, 64),
    page_size: int = 16,
    layout: str = "NHD",
    pair: bool = False,
    dtype: Any = torch.float16,
    padding: int = 0,
) -> Batch:
    torch.manual_seed(sum(kv_lens) + page_size)
    counts = [-(-length // page_size) for length in kv_lens]
    indptr = offsets_of(counts)
    indices = torch.randperm(sum(counts) + 2).int()
    caches = [torch.full((len(indices), page_size, heads[1], c), NAN, dtype=dtype) for c in columns]
    for r, length in enumerate(kv_lens):
        own = indices[indptr[r] : indptr[r + 1]].long()
        for cache in caches:
            rows = cache[own].flatten(0, 1)
            rows[:length] = torch.randn(rows[:length].shape).to(dtype)
            cache[own] = rows.view(len(own), page_size, *rows.shape[1:])
    if layout == "HND":
        caches = [cache.transpose(1, 2).contiguous() for cache in caches]
    last = int32(*((length - 1) % page_size + 1 if length else 0 for length in kv_lens))
    q = torch.randn(sum(q_lens) + padding, heads[0], columns[0]).to(dtype)
    packed = tuple(caches) if pair else torch.stack(caches, dim=1)
    return Batch(q, packed, offsets_of(q_lens), indptr, indices, last, layout, tuple(kv_lens))


def workspace() -> Any:
    return torch.empty(16, dtype=torch.uint8)


def planned_decode(batch: Batch, q_len: int = 1, **options: Any) -> Any:
    wrapper = DECODE(workspace(), batch.layout)
    options.setdefault("q_data_type", batch.q.dtype)
    wrapper.plan(*batch.pages, *batch.sizes, q_len_per_req=q_len, **options)
    return wrapper


def planned_prefill(batch: Batch, **options: Any) -> Any:
    wrapper = PREFILL(workspace(), batch.layout)
    heads, kv_heads, columns, page_size = batch.sizes
    options.setdefault("q_data_type", batch.q.dtype)
    options["head_dim_vo"] = batch.parts[1].shape[-1]
    wrapper.plan(batch.qo_indptr, *batch.pages, heads, kv_heads, columns, page_size, **options)
    return wrapper


def check(found: Any, expected: Any, *, rows: Any = slice(None), tolerance: Any = None) -> None:
    out, lse = found
    assert type(found) is tuple
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    torch.testing.assert_close(out[rows].float(), expected[0], **(tolerance or CLOSE))
    torch.testing.assert_close(lse[rows], expected[1], **CLOSE)


# --- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_len", "page_size"), [(54, 1), (97, 8), (512, 16)])
@pytest.mark.parametrize(("heads", "columns"), [((4, 4), 128), ((32, 4), 256)])
@pytest.mark.parametrize(("layout", "pair"), [("NHD", False), ("HND", True)])
def test_decoding(
    kv_len: int, page_size: int, heads: tuple[int, int], columns: int, layout: str, pair: bool
) -> None:
    shape = {"heads": heads, "columns": (columns, columns), "page_size": page_size}
    batch = make_batch((1,) * 3, (kv_len,) * 3, layout=layout, pair=pair, **shape)
    wrapper = planned_decode(batch, pos_encoding_mode="NONE", data_type=batch.q.dtype)
    found = wrapper.run(batch.q, batch.cache, return_lse=True)
    check(found, batch.expected())
    given = torch.full_like(found[0], NAN)
    assert wrapper.run(batch.q, batch.cache, out=given) is given
    assert torch.equal(given, found[0])


@pytest.mark.parametrize("window_left", [-1, 0, 3, 128])
@pytest.mark.parametrize("logits_soft_cap", [None, 0.0, 30.0])
def test_scores_of_decoding(window_left: int, logits_soft_cap: float | None) -> None:
    batch = make_batch((1,) * 4, (54, 1, 300, 0), dtype=torch.bfloat16)
    wrapper = planned_decode(
        batch, window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=0.2
    )
    found = wrapper.run(batch.q, batch.cache, return_lse=True)
    mask = {"window": (window_left, -1), "softcap": logits_soft_cap or 0.0, "scale": 0.2}
    check(found, batch.expected(**mask), tolerance={"rtol": 1e-2, "atol": 1e-2})
    assert not found[0][3].any()
    assert found[1][3].isneginf().all()
    assert torch.equal(wrapper.run(batch.q, batch.cache, window_left=window_left), found[0])


@pytest.mark.parametrize("window_left", [-1, 128])
@pytest.mark.parametrize(("heads", "dtype"), [((32, 8), torch.float32), ((32, 32), torch.bfloat16)])
def test_sinks(heads: tuple[int, int], dtype: Any, window_left: int) -> None:
    batch = make_batch((1,) * 3, (300, 17, 0), heads=heads)
    sinks = torch.linspace(-3, 6, heads[0]).to(dtype)
    expected = batch.expected(window=(window_left, -1), sinks=sinks)
    for wrapper in (
        planned_decode(batch, window_left=window_left),
        planned_prefill(batch, window_left=window_left, causal=True),
    ):
        check(wrapper.run(batch.q, batch.cache, sinks=sinks, return_lse=True), expected)


@pytest.mark.parametrize("q_len", [2, 5])
def test_several_query_tokens(q_len: int) -> None:
    """Drafts: each token sees no later one; outputs have tokens before heads."""
    batch = make_batch((q_len,) * 3, (54, q_len, 300))
    wrapper = planned_decode(batch, q_len)
    expected = batch.expected(causal=True)
    found = wrapper.run(batch.q, batch.cache, return_lse=True, q_len_per_req=q_len)
    check(found, expected)
    out, lse = torch.full_like(batch.q, NAN), torch.full(batch.q.shape[:2], NAN)
    assert wrapper.run(batch.q, batch.cache, out=out, lse=lse) is out
    check((out, lse), expected)


@pytest.mark.parametrize("scales", [(0.5, 2.0, 0.25), (None, 3.0, None), (1.0, 1.0, 1.0)], ids=str)
def test_scales_are_folded(scales: Any) -> None:
    """Those of queries and keys into the scores, that of values into the output."""
    batch = make_batch((1,) * 2, (54, 20))
    of_scores = (scales[0] or 1.0) * (scales[1] or 1.0)
    out, lse = batch.expected(scale=of_scores * 64**-0.5, softcap=7.0)
    options = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    expected = out * (scales[2] or 1.0), lse
    tensors = {n: None if x is None else torch.tensor(x) for n, x in options.items()}
    for wrapper in (
        planned_decode(batch, logits_soft_cap=7.0),
        planned_prefill(batch, logits_soft_cap=7.0),
    ):
        check(wrapper.run(batch.q, batch.cache, **options, return_lse=True), expected)
        check(wrapper.run_return_lse(batch.q, batch.cache, **tensors), expected)
    k, v = batch.rows(0)
    single = flashinfer.single_decode_with_kv_cache(
        batch.q[0], k, v, **options, logits_soft_cap=7.0, return_lse=True
    )
    check(tuple(x[None] for x in single), [x[:1] for x in expected])


def test_lengths_in_place_of_last_pages() -> None:
    batch = make_batch((1,) * 3, (54, 1, 0))
    lens = torch.tensor(batch.kv_lens)
    wrapper = DECODE(workspace())
    last = torch.full_like(batch.last_page_len, 16)
    wrapper.plan(batch.indptr, batch.indices, last, *batch.sizes, seq_lens=lens)
    check(wrapper.run(batch.q, batch.cache, return_lse=True), batch.expected())


def test_last_pages_in_check_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch((1,) * 3, (54, 1, 300))
    wrapper, last = DECODE(workspace()), batch.last_page_len.clone()
    monkeypatch.setenv("CUMLA_CHECK", "1")
    wrapper.plan(*batch.pages, *batch.sizes)
    last[1] = batch.sizes[3] + 1
    need = "needs a number from 0 to page_size = "
    with pytest.raises(ValueError, match=rf"^last_page_len\[1\]: {need}"):
        wrapper.plan(batch.indptr, batch.indices, last, *batch.sizes)


def test_the_deprecated_names() -> None:
    """begin_forward, forward, end_forward: the options of forward count."""
    batch = make_batch((1,) * 3, (54, 1, 300))
    wrapper = DECODE(workspace(), use_tensor_cores=True)
    assert wrapper.use_tensor_cores
    wrapper.begin_forward(*batch.pages, *batch.sizes, window_left=5, sm_scale=0.9)
    expected = batch.expected(window=(9, -1), softcap=5.0, scale=0.3)
    options = {"window_left": 9, "logits_soft_cap": 5.0, "sm_scale": 0.3}
    found = wrapper.forward_return_lse(batch.q, batch.cache, **options)
    check(found, expected)
    assert torch.equal(wrapper.forward(batch.q, batch.cache, "NONE", **options), found[0])
    check(wrapper.forward_return_lse(batch.q, batch.cache), batch.expected())
    wrapper.end_forward()
    mixed = make_batch((3, 1, 4), (54, 1, 30))
    wrapper = PREFILL(workspace())
    wrapper.begin_forward(mixed.qo_indptr, *mixed.pages, *mixed.sizes)
    for causal in (True, False):
        found = wrapper.forward_return_lse(mixed.q, mixed.cache, causal, window_left=4)
        check(found, mixed.expected(causal=causal, window=(4, -1)))


def test_a_server_loop_of_decoding() -> None:
    """Append a token to each request, plan, and attend in two layers; requests come and go."""
    torch.manual_seed(1)
    page_size, kv_heads = 4, 2
    caches = [torch.full((40, 2, page_size, kv_heads, 32), NAN).half() for _ in range(2)]
    history: dict[int, list[Any]] = {}
    pages: dict[int, list[int]] = {}
    free = torch.randperm(40).tolist()
    wrapper = DECODE(workspace())
    for requests in [(0,), (0, 1), (0, 1, 2), (2, 0), (2,)] * 3:
        indptr, indices, last = [0], [], []
        for r in requests:
            tokens = history.setdefault(r, [])
            tokens.append(torch.randn(2, 2, kv_heads, 32).half())  # layer, keys and values
            if len(tokens) > page_size * len(pages.setdefault(r, [])):
                pages[r].append(free.pop())
            indices += pages[r]
            indptr.append(len(indices))
            last.append((len(tokens) - 1) % page_size + 1)
        lists = int32(*indptr), int32(*indices), int32(*last)
        count = len(requests)
        seq_lens = flashinfer.get_seq_lens(lists[0], lists[2], page_size)
        assert seq_lens.tolist() == [len(history[r]) for r in requests]
        places = flashinfer.get_batch_indices_positions(int32(*range(count + 1)), seq_lens, count)
        wrapper.plan(*lists, 4, kv_heads, 32, page_size, q_data_type="float16")
        for layer, cache in enumerate(caches):
            new = torch.stack([history[r][-1][layer] for r in requests], dim=1)
            flashinfer.append_paged_kv_cache(*new, *places, cache, lists[1], lists[0], lists[2])
            q = torch.randn(count, 4, 32).half()
            found = wrapper.run(q, cache, return_lse=True)
            for i, r in enumerate(requests):
                k, v = torch.stack([token[layer] for token in history[r]], dim=1)
                out, lse = naive(q[i : i + 1], k, v)
                torch.testing.assert_close(found[0][i].float(), out[0], **CLOSE)
                torch.testing.assert_close(found[1][i], lse[:, 0] / math.log(2), **CLOSE)


# --- prefill -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_len", "qo_len", "page_size"), [(54, 37, 1), (97, 17, 5), (40, 127, 16)]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("layout", "pair"), [("NHD", True), ("HND", False)])
def test_prefill(
    kv_len: int, qo_len: int, page_size: int, causal: bool, layout: str, pair: bool
) -> None:
    """With more queries than keys, the first see nothing under a causal mask."""
    shape = {"heads": (8, 2), "columns": (128, 128), "page_size": page_size}
    batch = make_batch((qo_len,) * 2, (kv_len,) * 2, layout=layout, pair=pair, **shape)
    wrapper = planned_prefill(batch, causal=causal, logits_soft_cap=0.0)
    found = wrapper.run(batch.q, batch.cache, return_lse=True)
    check(found, batch.expected(causal=causal))
    given = torch.full_like(found[0], NAN)
    assert wrapper.run(batch.q, batch.cache, out=given) is given
    assert torch.equal(given, found[0])


MIXED = (1, 5, 0, 17, 2), (70, 5, 33, 40, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [-1, 3, 13])
@pytest.mark.parametrize("logits_soft_cap", [0.0, 30.0])
def test_a_mix(causal: bool, window_left: int, logits_soft_cap: float) -> None:
    """Rows of nobody at the end; a window without a causal mask has no bound on the right."""
    batch = make_batch(*MIXED, columns=(192, 128), pair=True, padding=3)
    options = {"causal": causal, "window_left": window_left, "logits_soft_cap": logits_soft_cap}
    wrapper = planned_prefill(batch, **options)
    found = wrapper.run(batch.q, batch.cache, return_lse=True)
    expected = batch.expected(causal=causal, window=(window_left, -1), softcap=logits_soft_cap)
    check(found, expected, rows=slice(0, 25))
    out, lse = torch.full((28, 8, 128), 7.0).half(), torch.full((28, 8), -math.inf)
    wrapper.run(batch.q, batch.cache, out=out, lse=lse)
    check((out, lse), expected, rows=slice(0, 25))
    assert (out[25:] == 7.0).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("columns", "softcap"), [((64, 64), 0.0), ((192, 128), 30.0)])
def test_rows_without_pages(
    columns: tuple[int, int], softcap: float, causal: bool, layout: str
) -> None:
    q_lens, kv_lens = (3, 0, 37), (54, 7, 40)
    batch = make_batch(q_lens, kv_lens, heads=(4, 4), columns=columns, pair=True)
    k, v = (torch.cat(parts) for parts in zip(*map(batch.rows, range(3)), strict=True))
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    wrapper = RAGGED(workspace(), layout)
    offsets = batch.qo_indptr, offsets_of(list(kv_lens))
    options = {"causal": causal, "logits_soft_cap": softcap}
    wrapper.plan(*offsets, 4, 4, *columns, **options, q_data_type=torch.float16)
    found = wrapper.run(batch.q, k, v, return_lse=True)
    expected = batch.expected(causal=causal, softcap=softcap)
    check(found, expected)
    assert torch.equal(wrapper.forward(batch.q, k, v, **options), found[0])
    scaled = wrapper.run(batch.q, k, v, v_scale=0.5, k_scale=1.0)
    torch.testing.assert_close(scaled, found[0] * 0.5)


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_bases_and_layouts_of_the_lse(kind: str) -> None:
    q_lens, kv_lens = (3, 0, 17), (54, 7, 40)
    batch = make_batch(q_lens, kv_lens, pair=True)
    arguments: tuple[Any, ...] = (batch.q, batch.cache)
    if kind == "paged":
        wrapper = planned_prefill(batch, causal=True)
    else:
        arguments = (
            batch.q,
            *(torch.cat(x) for x in zip(*map(batch.rows, range(3)), strict=True)),
        )
        wrapper = RAGGED(workspace())
        wrapper.plan(batch.qo_indptr, offsets_of(list(kv_lens)), 8, 2, 64, causal=True)
    out, lse = wrapper.run(*arguments, return_lse=True)
    assert torch.equal(lse, wrapper.run(*arguments, return_lse=True, lse_base="log2")[1])
    for base, factor in (("log2", 1.0), ("ln", math.log(2))):
        for layout, wanted in (("NH", lse * factor), ("HN", lse.T * factor)):
            options = {"lse_base": base, "lse_layout": layout}
            given = torch.full(wanted.shape, NAN)
            state = wrapper.run(*arguments, return_lse=True, **options)
            kept = wrapper.run(*arguments, lse=given, return_lse=True, **options)
            assert kept[1] is given
            for found in (state, kept):
                assert torch.equal(found[0], out)
                assert found[1].is_contiguous()
                torch.testing.assert_close(found[1], wanted)
    for wrong in ({"lse_base": "log10"}, {"lse_layout": "BHN"}):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"^{name}: needs 'log2' or|^{name}: needs 'NH' or"):
            wrapper.run(*arguments, **wrong)
    with pytest.raises(ValueError, match=r"^lse: needs shape"):
        wrapper.run(*arguments, lse=torch.empty(20, 8), lse_layout="HN")


def rotated(batch: Batch, scale: float, theta: float) -> tuple[list[Any], list[Any]]:
    """Queries and keys of each request, rotated by their positions, in float64."""
    turns = theta ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64) / scale

    def turn(rows: Any, first: int) -> Any:
        angles = (first + torch.arange(len(rows), dtype=torch.float64))[:, None, None] * turns
        x, y = rows.double().chunk(2, dim=-1)
        pairs = x * angles.cos() - y * angles.sin(), x * angles.sin() + y * angles.cos()
        return torch.cat(pairs, -1).to(rows.dtype)

    queries = split(batch.q, (batch.qo_indptr[1:] - batch.qo_indptr[:-1]).tolist())
    keys = [batch.rows(r)[0] for r in range(len(batch.kv_lens))]
    starts = [len(k) - len(q) for q, k in zip(queries, keys, strict=True)]
    return [turn(*x) for x in zip(queries, starts, strict=True)], [turn(k, 0) for k in keys]


@pytest.mark.parametrize("form", ["paged", "HND pair", "decode", "ragged", "ragged HND"])
@pytest.mark.parametrize("rope", [{}, {"rope_scale": 2.0, "rope_theta": 500.0}])
def test_rotation_before_attention(form: str, rope: dict[str, float]) -> None:
    """Keys lie in the cache as they were; a page may stand at two places of two requests."""
    q_lens, kv_lens = ((1, 1, 1), (70, 5, 33)) if form == "decode" else ((3, 5, 17), (70, 5, 40))
    layout = "HND" if "HND" in form else "NHD"
    is_pair = "pair" in form or "ragged" in form
    batch = make_batch(q_lens, kv_lens, layout="NHD" if "ragged" in form else layout, pair=is_pair)
    if "ragged" not in form:
        batch.indices[5] = batch.indices[1]  # the only page of the second request
    options: dict[str, Any] = {"pos_encoding_mode": "ROPE_LLAMA", **rope}
    queries, keys = rotated(batch, rope.get("rope_scale", 1.0), rope.get("rope_theta", 1e4))
    values = [batch.rows(r)[1] for r in range(3)]
    states = [naive(*x, causal=True) for x in zip(queries, keys, values, strict=True)]
    expected = torch.cat([s[0] for s in states]), torch.cat([s[1] for s in states], 1).T
    expected = expected[0], expected[1] / math.log(2)
    if "ragged" in form:
        k, v = (torch.cat(x) for x in zip(*map(batch.rows, range(3)), strict=True))
        if layout == "HND":
            k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        ragged = RAGGED(workspace(), layout)
        ragged.plan(batch.qo_indptr, offsets_of(list(kv_lens)), 8, 2, 64, causal=True, **options)
        found = ragged.run(batch.q, k, v, return_lse=True)
        one = flashinfer.single_prefill_with_kv_cache(
            batch.q[8:],
            *(x[:, 75:] if layout == "HND" else x[75:] for x in (k, v)),
            causal=True,
            kv_layout=layout,
            return_lse=True,
            **options,
        )
        check(one, [x[8:] for x in expected])
    elif form == "decode":
        found = planned_decode(batch, **options).run(batch.q, batch.cache, return_lse=True)
    else:
        before = [x.clone() for x in batch.parts]
        wrapper = planned_prefill(batch, causal=True, **options)
        found = wrapper.run(batch.q, batch.cache, return_lse=True)
        again = wrapper.forward(batch.q, batch.cache, causal=True, **options)
        assert torch.equal(again, found[0])
        for part, old in zip(batch.parts, before, strict=True):
            torch.testing.assert_close(part, old, rtol=0, atol=0, equal_nan=True)
    check(found, expected)


@pytest.mark.parametrize("num_heads", [8, 12])
def test_alibi(num_heads: int) -> None:
    """Slopes follow from the number of heads, as in the paper."""
    most = 8
    slopes = [2.0 ** -(8 / most * (i + 1)) for i in range(most)]
    slopes += [2.0 ** -(4 / most * i) for i in (1, 3, 5, 7)]
    options = {"slopes": torch.tensor(slopes[:num_heads])}
    batch = make_batch((1, 1, 1), (70, 3, 33), heads=(num_heads, 4))
    found = planned_decode(batch, pos_encoding_mode="ALIBI").run(batch.q, batch.cache)
    torch.testing.assert_close(found.float(), batch.expected(**options)[0], **CLOSE)
    batch = make_batch((5, 1, 20), (70, 3, 33), heads=(num_heads, 4))
    wrapper = planned_prefill(batch, pos_encoding_mode="ALIBI", causal=True)
    found = wrapper.run(batch.q, batch.cache)
    expected = batch.expected(causal=True, **options)[0]
    torch.testing.assert_close(found.float(), expected, **CLOSE)
    with pytest.raises(ValueError, match=r"^return_lse: needs False with pos_encoding_mode"):
        wrapper.run(batch.q, batch.cache, return_lse=True)
    q, (k, v) = batch.q[:5], batch.rows(0)
    found = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, pos_encoding_mode="ALIBI")
    torch.testing.assert_close(found.float(), expected[:5], **CLOSE)
    wrapper.plan(
        *(batch.qo_indptr, *batch.pages, num_heads, 4, 64, 16),
        causal=True,
        q_data_type=batch.q.dtype,
    )
    expected = batch.expected(causal=True)[0]
    torch.testing.assert_close(wrapper.run(batch.q, batch.cache).float(), expected, **CLOSE)


def test_rotations_that_cannot_be() -> None:
    options: dict[str, Any] = {"pos_encoding_mode": "ROPE_LLAMA", "q_data_type": torch.float16}
    lists = int32(0, 1), int32(0, 1), int32(0), int32(1)
    with pytest.raises(ValueError, match=r"^pos_encoding_mode: needs .*multiple of 16 .*got .*24"):
        PREFILL(workspace()).plan(*lists, 2, 2, 24, 16, **options)
    with pytest.raises(ValueError, match=r"^pos_encoding_mode: needs .*16 bits.*got float8_e4m3fn"):
        PREFILL(workspace()).plan(*lists, 2, 2, 64, 16, **options, kv_data_type=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"^rope_theta: needs a number above 0"):
        PREFILL(workspace()).plan(*lists, 2, 2, 64, 16, **options, rope_theta=-1.0)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("pair", [False, True])
def test_pages_of_one_token_without_their_axis(layout: str, pair: bool) -> None:
    batch = make_batch((1, 1), (5, 3), page_size=1, layout=layout, pair=pair)
    axis = -2 if layout == "HND" else -3
    cache = batch.cache
    cache = tuple(c.squeeze(axis) for c in cache) if pair else cache.squeeze(axis)
    check(planned_decode(batch).run(batch.q, cache, return_lse=True), batch.expected())
    check(planned_prefill(batch).run(batch.q, cache, return_lse=True), batch.expected())
    other = make_batch((1, 1), (5, 3), page_size=4, layout=layout, pair=pair)
    with pytest.raises(ValueError, match=r"page_size|pages"):
        planned_decode(other).run(batch.q, cache)


@pytest.mark.parametrize("option", [{"fixed_split_size": 4}, {"disable_split_kv": True}])
@pytest.mark.parametrize("form", ["decode", "paged", "ragged"])
def test_the_same_bits_in_any_batch(form: str, option: dict[str, Any]) -> None:
    """A request of more keys than one part has, alone and beside others."""
    lens = 1500, 40, 7
    batch = make_batch((1,) * 3, lens, heads=(2, 1), page_size=64, pair=True)
    results = []
    for count in (3, 1):
        own = batch._replace(
            q=batch.q[:count],
            qo_indptr=batch.qo_indptr[: count + 1],
            indptr=batch.indptr[: count + 1],
            last_page_len=batch.last_page_len[:count],
        )
        with torch_gpu():
            if form == "ragged":
                wrapper = RAGGED(workspace())
                offsets = offsets_of(list(lens[:count]))
                wrapper.plan(own.qo_indptr, offsets, 2, 1, 64, kv_indptr_cpu=offsets, **option)
                k, v = (torch.cat(x) for x in zip(*map(own.rows, range(count)), strict=True))
                found = wrapper.run(own.q, k, v, return_lse=True)
            else:
                planned = planned_decode if form == "decode" else planned_prefill
                wrapper = planned(own, **option)
                found = wrapper.run(own.q, own.cache, return_lse=True)
        assert wrapper._plan is not None
        assert wrapper._plan.key.batch_invariant
        results.append([x[0] for x in found])
    assert all(map(torch.equal, *results))
    check(tuple(x[None] for x in results[0]), [x[:1] for x in batch.expected()])


def test_what_a_plan_for_any_batch_needs() -> None:
    """The longest request, without waiting: from lists on the CPU, what is said, or all pages."""
    batch = make_batch((1,) * 3, (70, 5, 33))
    wrapper = planned_prefill(batch, fixed_split_size=4)
    assert wrapper._shape is not None
    assert (wrapper._shape.batch_invariant, wrapper._shape.max_kv_len) == (True, 128)
    assert planned_prefill(batch, fixed_split_size=4, max_sequence_kv=90)._shape.max_kv_len == 90
    graph = PREFILL(workspace(), "NHD", True, **graph_buffers(3))
    graph.plan(batch.qo_indptr, *batch.pages, *batch.sizes, disable_split_kv=True)
    assert graph._shape is not None
    assert graph._shape.max_kv_len == 40 * 16
    for longest in (70, 90):  # a graph serves all that its pages hold
        said = {"fixed_split_size": 4, "max_sequence_kv": longest}
        graph.plan(batch.qo_indptr, *batch.pages, *batch.sizes, **said)
        assert graph._shape.max_kv_len == 40 * 16
    for none in ({}, {"fixed_split_size": -1}):
        assert planned_prefill(batch, **none)._shape.max_kv_len is None
    with pytest.raises(ValueError, match=r"^fixed_split_size: needs at most .* pieces"):
        planned_prefill(batch, fixed_split_size=4, max_sequence_kv=1 << 30)
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"^fixed_split_size: needs the longest.*kv_indptr_cpu"):
        _attention.longest_of(on_gpu, None)
    assert _attention.longest_of(on_gpu, 77) == 77


def test_a_ragged_graph_serves_requests_up_to_the_longest_of_its_first_plan() -> None:
    ones, none = offsets_of([1, 1]), offsets_of([0, 0])
    wrapper = RAGGED(workspace(), "NHD", True, none.clone(), none.clone())
    q = torch.randn(2, 4, 64).half()

    def check_plan(*lens: int, **options: Any) -> None:
        rows = torch.randn(2, sum(lens), 2, 64).half()
        options |= {"disable_split_kv": True}
        wrapper.plan(ones, offsets_of(list(lens)), 4, 2, 64, **options)
        found = wrapper.run(q, *rows)
        for r, (k, v) in enumerate(zip(*(x.split(lens) for x in rows), strict=True)):
            expected = flashinfer.single_prefill_with_kv_cache(q[r : r + 1], k, v)
            torch.testing.assert_close(found[r : r + 1], expected, rtol=2e-3, atol=2e-3)

    check_plan(100, 7)
    check_plan(3, 50)
    check_plan(128, 1, max_sequence_kv=128)
    with pytest.raises(ValueError, match=r"^kv_indptr: needs requests of at most 128 keys.*got 25"):
        check_plan(200, 1)
    check_plan(5, 5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_one_request(causal: bool, layout: str) -> None:
    batch = make_batch((17,), (54,), columns=(128, 64), pair=True)
    k, v = batch.rows(0)
    if layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    options = {"causal": causal, "window_left": 9, "logits_soft_cap": 5.0, "sm_scale": 0.2}
    found = flashinfer.single_prefill_with_kv_cache_return_lse(
        batch.q, k, v, kv_layout=layout, **options
    )
    expected = batch.expected(causal=causal, window=(9, -1), softcap=5.0, scale=0.2)
    check(found, expected)
    scaled = flashinfer.single_prefill_with_kv_cache(
        batch.q, k, v, kv_layout=layout, **options | {"sm_scale": 0.1}, k_scale=2.0, v_scale=0.5
    )
    torch.testing.assert_close(scaled.float(), expected[0] * 0.5, **CLOSE)
    last = flashinfer.single_decode_with_kv_cache(batch.q[-1], k, v, layout, return_lse=True)
    expected = batch.expected(causal=True)
    assert [tuple(x.shape) for x in last] == [(8, 64), (8,)]
    check(tuple(x[None] for x in last), [x[-1:] for x in expected])


def test_wide_and_longer_lists() -> None:
    """int64 is converted; lists may go on after the last request."""
    batch = make_batch(*MIXED)
    indptr = torch.cat([batch.indptr, batch.indptr[-1:] + 3]).long()
    last = batch.last_page_len.long()
    wrapper = PREFILL(workspace())
    wrapper.plan(batch.qo_indptr.long(), indptr, batch.indices.long(), last, *batch.sizes)
    check(wrapper.run(batch.q, batch.cache, return_lse=True), batch.expected())


def apart(tensor: Any) -> Any:
    """The same numbers, with others between them."""
    return torch.stack([tensor, tensor * 3 + 1], -1)[..., 0]


@pytest.mark.parametrize("graph", [False, True])
def test_lists_with_gaps(graph: bool) -> None:
    batch = make_batch(*MIXED)
    buffers = graph_buffers(len(batch.kv_lens)) if graph else {}
    wrapper = PREFILL(workspace(), "NHD", graph, **buffers)
    wrapper.plan(*map(apart, (batch.qo_indptr, *batch.pages)), *batch.sizes)
    check(wrapper.run(batch.q, batch.cache, return_lse=True), batch.expected())
    for name, buffer in buffers.items():
        with pytest.raises(ValueError, match=f"^{name}: needs contiguous"):
            PREFILL(workspace(), "NHD", graph, **buffers | {name: apart(buffer)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8])
def test_lists_that_are_no_integers(dtype: Any) -> None:
    """A conversion would cut fractions off without a word."""
    batch = make_batch(*MIXED)
    lists = {"qo_indptr": batch.qo_indptr, "paged_kv_indptr": batch.indptr}
    lists |= {"paged_kv_indices": batch.indices, "paged_kv_last_page_len": batch.last_page_len}
    names = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size")
    sizes = dict(zip(names, batch.sizes, strict=True))
    for name in lists:
        with pytest.raises(
            ValueError, match=f"^{name}: needs int32 or int64, got {str(dtype)[6:]}"
        ):
            PREFILL(workspace()).plan(**lists | {name: lists[name].to(dtype)}, **sizes)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("q_lens", [(2, 1), (0, 0), ()])
def test_nothing_to_attend_to(q_lens: tuple[int, ...], graph: bool) -> None:
    """A cache without pages; no query tokens, no requests."""
    batch = make_batch(q_lens, (0,) * len(q_lens))
    batch = batch._replace(indices=batch.indices[:0], cache=batch.cache[:0])
    buffers = graph_buffers(len(q_lens)) if graph else {}
    wrapper = PREFILL(workspace(), "NHD", graph, **buffers)
    wrapper.plan(batch.qo_indptr, *batch.pages, *batch.sizes, causal=True)
    out, lse = wrapper.run(batch.q, batch.cache, return_lse=True)
    assert out.shape == batch.q.shape
    assert not out.any()
    assert lse.isneginf().all()


# --- e4m3 keys and values ------------------------------------------------------------------------

E4M3 = torch.float8_e4m3fn
SCALES = (0.5, 3.0)  # of keys and of values


def of_e4m3(batch: Batch, scales: Any = SCALES) -> tuple[Batch, Batch]:
    """The batch with its cache in e4m3, and with what that stands for, which float16 holds."""
    pair = isinstance(batch.cache, tuple)
    parts = batch.cache if pair else batch.cache.unbind(1)
    small = [(part.float() / 4).to(E4M3) for part in parts]

    def multiplied(part: Any, scale: Any) -> Any:
        by_heads = torch.as_tensor(scale, dtype=torch.float32).reshape(-1)
        return part.float() * (
            by_heads[:, None] if batch.layout == "NHD" else by_heads[:, None, None]
        )

    exact = [multiplied(part, scale) for part, scale in zip(small, scales, strict=True)]
    caches = [tuple(parts) if pair else torch.stack(parts, dim=1) for parts in (small, exact)]
    return batch._replace(cache=caches[0]), batch._replace(cache=caches[1])


FORMS = {
    "numbers": SCALES,
    "tensors of one": tuple(torch.tensor(scale) for scale in SCALES),
    "of heads": (torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25])),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("layout", "pair"), [("NHD", False), ("HND", True)])
def test_e4m3_caches(layout: str, pair: bool, form: str, dtype: Any) -> None:
    """Their scales go to the kernels; that of queries goes to the scores."""
    scales = FORMS[form]
    made = make_batch((2,) * 3, (54, 2, 300), layout=layout, pair=pair, dtype=dtype)
    batch, exact = of_e4m3(made, scales)
    expected = exact.expected(causal=True, scale=2 * 64**-0.5, softcap=7.0)
    options = {"q_scale": 2.0, "k_scale": scales[0], "v_scale": scales[1], "return_lse": True}
    said = {"kv_data_type": E4M3, "logits_soft_cap": 7.0}
    tolerance = {"rtol": 1e-2, "atol": 1e-2}
    for wrapper in (planned_decode(batch, 2, **said), planned_prefill(batch, **said, causal=True)):
        found = wrapper.run(batch.q, batch.cache, **options)
        assert found[0].dtype == dtype
        check(found, expected, tolerance=tolerance)


def test_scales_of_requests() -> None:
    """Where the plan says how many query tokens each has."""
    made = make_batch((1,) * 2, (54, 20), page_size=64)
    k_scale, v_scale = (
        torch.tensor([[0.5, 2.0], [1.0, 3.0]]),
        torch.tensor([[1.0, 4.0], [0.1, 9.0]]),
    )
    batch, exact = of_e4m3(made, (1.0, 1.0))
    for request, page in enumerate(batch.indices[:2]):
        exact.cache[page, 0] *= k_scale[request][:, None]
        exact.cache[page, 1] *= v_scale[request][:, None]
    wrapper = planned_decode(batch, kv_data_type="float8_e4m3fn")
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    check(wrapper.run(batch.q, batch.cache, **scales, return_lse=True), exact.expected())
    with pytest.raises(ValueError, match=r"^k_scale: needs shape \(1,\), \(2,\), or \(batch, 2\)"):
        planned_prefill(batch, kv_data_type=E4M3).run(batch.q, batch.cache, **scales)


def test_e4m3_caches_and_scales_that_do_not_fit() -> None:
    made = make_batch((1,) * 2, (54, 20))
    batch, _ = of_e4m3(made)
    wrapper = planned_decode(batch, kv_data_type=E4M3)
    for cache, options, message in (
        (made.cache, {}, r"paged_kv_cache\[:, 0\]: needs kv_data_type of the plan, torch.float8_e"),
        (batch.cache, {"k_scale": 0.0}, "k_scale: needs a number above 0, got 0.0"),
        (batch.cache, {"v_scale": torch.tensor(-1.0)}, "v_scale: needs a number above 0, got -1"),
        (batch.cache, {"v_scale": torch.ones(3)}, r"v_scale: needs shape \(1,\), \(2,\), or"),
        (batch.cache, {"v_scale": torch.ones(2).half()}, "v_scale: needs float32, got float16"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            wrapper.run(batch.q, cache, **options)
    with pytest.raises(ValueError, match=r"^k_scale: needs a number, got a tensor of shape"):
        planned_decode(made).run(made.q, made.cache, k_scale=torch.ones(2))


def test_e4m3_rows_and_one_request() -> None:
    batch, exact = of_e4m3(make_batch((3, 20), (54, 20), pair=True))
    (k, v), (k_exact, v_exact) = (
        [torch.cat(parts) for parts in zip(*map(one.rows, range(2)), strict=True)]
        for one in (batch, exact)
    )
    scales = {"k_scale": SCALES[0], "v_scale": SCALES[1]}
    wrapper = RAGGED(workspace())
    offsets = batch.qo_indptr, offsets_of([54, 20])
    wrapper.plan(*offsets, 8, 2, 64, causal=True, kv_data_type=E4M3)
    expected = exact.expected(causal=True)
    check(wrapper.run(batch.q, k, v, **scales, return_lse=True), expected)
    one = flashinfer.single_prefill_with_kv_cache_return_lse(
        batch.q[3:], k[54:], v[54:], causal=True, **scales
    )
    check(one, [x[3:] for x in expected])
    last = flashinfer.single_decode_with_kv_cache(
        batch.q[-1], k[54:], v[54:], **scales, return_lse=True
    )
    check(tuple(x[None] for x in last), naive_base_2(batch.q[-1:], k_exact[54:], v_exact[54:]))


def naive_base_2(*rows: Any) -> tuple[Any, Any]:
    out, lse = naive(*rows)
    return out, lse.T / math.log(2)


@pytest.mark.parametrize("q_len", [1, 3])
def test_e4m3_caches_on_the_emulated_gpu(q_len: int) -> None:
    """Captured: the factors of the replay count, which lie on the device."""
    scales = [torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25])]
    made = make_batch((q_len,) * 3, (54, q_len, 300), page_size=8)
    batch, _ = of_e4m3(made)
    buffers = [torch.full((size,), -9, dtype=torch.int32) for size in (4, 60, 3)]
    out = torch.full_like(batch.q, NAN)
    with torch_gpu() as gpu:
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)
        wrapper.plan(*batch.pages, *batch.sizes, q_len_per_req=q_len, kv_data_type=E4M3)
        with gpu.capture():
            wrapper.run(batch.q, batch.cache, k_scale=scales[0], v_scale=scales[1], out=out)
        for _ in range(2):
            scales[0].mul_(1.5), scales[1].add_(0.5)
            out.fill_(NAN)
            gpu.replay()
            _, exact = of_e4m3(made, scales)
            expected, _ = exact.expected(causal=True)
            torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3)


# --- CUDA graphs ---------------------------------------------------------------------------------


def graph_buffers(batch: int = 5, pages: int = 40) -> dict[str, Any]:
    sizes = {
        "qo_indptr_buf": batch + 1,
        "paged_kv_indptr_buf": batch + 1,
        "paged_kv_indices_buf": pages,
        "paged_kv_last_page_len_buf": batch,
    }
    return {n: torch.full((size,), -9, dtype=torch.int32) for n, size in sizes.items()}


LATER = (
    ((1, 5, 0, 17, 2), (0, 20, 3, 1, 1), (25, 0, 0, 0, 0)),
    (
        (70, 5, 33, 40, 1),
        (9, 80, 6, 1, 100),
        (30, 7, 0, 1, 5),
    ),
)


def test_plans_fill_the_given_buffers() -> None:
    buffers = graph_buffers()
    wrapper = PREFILL(workspace(), "NHD", True, **buffers)
    assert wrapper.is_cuda_graph_enabled
    for q_lens, kv_lens in zip(*LATER, strict=True):
        batch = make_batch(q_lens, kv_lens)
        arrays = batch.qo_indptr, *batch.pages
        wrapper.plan(*arrays, *batch.sizes, causal=True)
        for buffer, array in zip(buffers.values(), arrays, strict=True):
            assert torch.equal(buffer[: len(array)], array)
        places = {name: array.data_ptr() for name, array in wrapper._arrays.items()}
        for array in arrays:
            array.fill_(-1)  # it is not looked at any more
        batch = make_batch(q_lens, kv_lens)
        found = wrapper.run(batch.q, batch.cache, return_lse=True)
        check(found, batch.expected(causal=True))
        wrapper.plan(batch.qo_indptr, *batch.pages, *batch.sizes, causal=True)
        assert {name: array.data_ptr() for name, array in wrapper._arrays.items()} == places


def test_plans_of_the_buffers_themselves() -> None:
    """As servers pass them that wrote the next step's lists there."""
    batch = make_batch((1,) * 5, (70, 5, 33, 40, 1))
    buffers = [b for n, b in graph_buffers().items() if n != "qo_indptr_buf"]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)
    for buffer, array in zip(buffers, batch.pages, strict=True):
        buffer[: len(array)] = array
    wrapper.plan(buffers[0], buffers[1][: len(batch.indices)], buffers[2], *batch.sizes)
    check(wrapper.run(batch.q, batch.cache, return_lse=True), batch.expected())


class Gpu:
    """What a wrapper asks of a stream, and a plan that notes where it is updated and run."""

    def __init__(self) -> None:
        self.stream, self.capturing = 1, False
        self.log: list[str] = []

    def open_call(self, arguments: Any) -> Gpu:
        return self

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __call__(self, **options: Any) -> Any:
        self.log.append("make")
        return GpuPlan(self)

    def workspace_bytes(self, *numbers: Any, **others: Any) -> int:
        return 0


class GpuPlan:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.stream = gpu, 0

    def prepare(self) -> None:
        assert not self.gpu.capturing
        self.gpu.log.append("prepare")

    def update(self, *lengths: Any, **others: Any) -> None:
        self.stream = self.gpu.stream
        self.gpu.log.append("captured update" if self.gpu.capturing else "update")

    def run(self, q: Any, *arguments: Any, **options: Any) -> Any:
        assert self.stream == self.gpu.stream
        self.gpu.log.append("captured run" if self.gpu.capturing else "run")
        return AttentionState(q, None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(_wrapper, "open_call", gpu.open_call)
    monkeypatch.setattr(_attention, "AttentionPlan", gpu)
    return gpu


def test_without_graphs_the_first_run_makes_the_schedule(gpu: Gpu) -> None:
    batch = make_batch(*MIXED)
    wrapper = PREFILL(workspace())
    for _ in range(2):
        wrapper.plan(batch.qo_indptr, *batch.pages, *batch.sizes)
        for _ in range(2):
            wrapper.run(batch.q, batch.cache)
    gpu.stream = 2
    wrapper.run(batch.q, batch.cache)
    assert gpu.log == ["make", *["update", "run", "run"] * 2, "update", "run"]


@pytest.mark.parametrize("capture_stream", [1, 2])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_graph_has_its_schedule_once(gpu: Gpu, kind: str, capture_stream: int) -> None:
    """The first plan loads the kernels; a capture may come next."""
    batch = make_batch((1,) * 5, (70, 5, 33, 40, 1))
    buffers = graph_buffers()
    if kind == "decode":
        del buffers["qo_indptr_buf"]
        wrapper: Any = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            workspace(), *buffers.values()
        )
        arguments = (*batch.pages, *batch.sizes)
    else:
        wrapper = PREFILL(workspace(), "NHD", True, **buffers)
        arguments = (batch.qo_indptr, *batch.pages, *batch.sizes)

    def capture() -> None:
        gpu.stream, gpu.capturing = capture_stream, True
        wrapper.run(batch.q, batch.cache)
        wrapper.run(batch.q, batch.cache)
        gpu.stream, gpu.capturing = 1, False

    wrapper.plan(*arguments)
    assert gpu.log == ["make", "prepare", *(["update"] if kind == "decode" else [])]
    for i in range(2):
        gpu.log.clear()
        capture()
        made = ["make"] if kind == "prefill" and i == 0 else []
        assert gpu.log == [*made, "captured update", "captured run", "captured run"]
        gpu.log.clear()
        wrapper.plan(*arguments)
        assert gpu.log == ["update"]
    gpu.log.clear()
    wrapper.run(batch.q, batch.cache)
    assert gpu.log == ["run"]


@pytest.mark.parametrize("current", [None, 100])
def test_a_thread_without_a_context_or_with_another_gpus(
    monkeypatch: pytest.MonkeyPatch, current: int | None
) -> None:
    library = open_elsewhere(monkeypatch, _wrapper, current)
    batch = make_batch((1,) * 2, (20, 30))
    found = planned_decode(batch).run(batch.q, batch.cache, return_lse=True)
    check(found, batch.expected())
    assert set(library.asked) == {103}
    assert library.context == current


def test_what_a_graph_would_not_see_is_refused() -> None:
    batch = make_batch(*MIXED)
    buffers = graph_buffers(pages=len(batch.indices))
    wrapper = PREFILL(workspace(), "NHD", True, **buffers)
    arguments = batch.qo_indptr, *batch.pages, *batch.sizes
    wrapper.plan(*arguments, causal=True)
    wrapper.run(batch.q, batch.cache)
    with pytest.raises(ValueError, match=r"^q: needs 25 query tokens, .* got 26; with use_cuda_gr"):
        wrapper.run(torch.cat([batch.q, batch.q[:1]]), batch.cache)
    for options, message in (
        ({"causal": False}, "causal: needs True, as in the first plan of this wrapper, got False"),
        ({"window_left": 3}, "window_left: needs -1, as in the first plan"),
        ({"sm_scale": 0.3}, "sm_scale: needs None, as in the first plan"),
        ({"logits_soft_cap": 3.0}, "logits_soft_cap: needs None, as in the first plan"),
        ({"q_data_type": "bfloat16"}, "q_data_type: needs torch.float16, as in the first plan"),
        ({"head_dim_vo": 8}, "head_dim_vo: needs 64, as in the first plan"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            wrapper.plan(*arguments, **{"causal": True, **options})
    with pytest.raises(ValueError, match=r"^causal: needs True, as in the first plan"):
        wrapper.forward(batch.q, batch.cache)
    longer = [batch.qo_indptr + 100, batch.indptr, int32(*[0] * 40), batch.last_page_len]
    with pytest.raises(ValueError, match=r"^paged_kv_indices: needs to fit the buffer of shape \("):
        wrapper.plan(*longer, *batch.sizes, causal=True)
    check(wrapper.run(batch.q, batch.cache, return_lse=True), batch.expected(causal=True))
    more = make_batch((1,) * 6, (3,) * 6)
    with pytest.raises(ValueError, match=r"^qo_indptr: needs to fit .* \(6,\) .* got \(7,\)"):
        wrapper.plan(more.qo_indptr, *more.pages, *more.sizes, causal=True)


def test_nothing_waits_for_the_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """No method that hands a number or a copy to the host is called, by plan or run."""
    batch = make_batch(*MIXED)
    buffers = graph_buffers()
    lists = batch.qo_indptr, *batch.pages
    sizes = batch.sizes
    k, small = batch.cache[:, 0], batch.cache.to(E4M3)

    def wait(self: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError("waits for the GPU")

    monkeypatch.setattr(_wrapper, "_known_end", lambda offsets: 0)  # those of a GPU
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, wait)
    for graph in (False, True):
        wrapper = PREFILL(workspace(), "NHD", graph, **(buffers if graph else {}))
        wrapper.plan(*lists, *sizes)
        wrapper.run(batch.q, batch.cache, sinks=torch.zeros(8), k_scale=2.0, return_lse=True)
        ragged = RAGGED(workspace(), "NHD", graph, *(list(buffers.values())[:2] if graph else ()))
        ragged.plan(*lists[:2], *sizes[:3])
        ragged.run(batch.q, k[:, 0], k[:, 0], return_lse=True)
    decoding = DECODE(workspace())
    decoding.plan(*lists[1:], *sizes, q_len_per_req=5)
    decoding.run(batch.q, batch.cache)
    decoding.plan(*lists[1:], *sizes, q_len_per_req=5, kv_data_type=E4M3)
    decoding.run(batch.q, small, k_scale=torch.ones(2), v_scale=torch.ones(5, 2))
    assert gpu.log.count("run") == 6


# --- the kernels, emulated -----------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "pair"), [("NHD", False), ("HND", False), ("NHD", True)])
def test_prefill_on_the_emulated_gpu(layout: str, pair: bool) -> None:
    with torch_gpu():
        batch = make_batch(*MIXED, layout=layout, pair=pair, padding=2)
        sinks = torch.linspace(-1, 2, 8)
        wrapper = planned_prefill(batch, causal=True, window_left=20, logits_soft_cap=9.0)
        found = wrapper.run(batch.q, batch.cache, sinks=sinks, return_lse=True)
        expected = batch.expected(causal=True, window=(20, -1), softcap=9.0, sinks=sinks)
        check(found, expected, rows=slice(0, 25))


@pytest.mark.parametrize("q_len", [1, 3])
def test_decoding_on_the_emulated_gpu(q_len: int) -> None:
    """The views of outputs that have tokens before heads are what the kernels write to."""
    with torch_gpu():
        batch = make_batch((q_len,) * 3, (54, q_len, 300), page_size=8)
        out, lse = torch.full_like(batch.q, NAN), torch.full(batch.q.shape[:2], NAN)
        wrapper = planned_decode(batch, q_len)
        found = wrapper.run(batch.q, batch.cache, out=out, lse=lse, v_scale=0.5, return_lse=True)
        expected = batch.expected(causal=True)
        check(found, (expected[0] * 0.5, expected[1]))
        assert found[0] is out


def test_rows_and_one_request_on_the_emulated_gpu() -> None:
    with torch_gpu():
        batch = make_batch((3, 0, 20), (54, 7, 20), pair=True)
        k, v = (torch.cat(parts) for parts in zip(*map(batch.rows, range(3)), strict=True))
        wrapper = RAGGED(workspace(), "HND")
        wrapper.plan(batch.qo_indptr, offsets_of([54, 7, 20]), 8, 2, 64, causal=True)
        rows = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        expected = batch.expected(causal=True)
        check(wrapper.run(batch.q, *rows, return_lse=True), expected)
        one = flashinfer.single_prefill_with_kv_cache_return_lse(
            batch.q[3:], k[61:], v[61:], causal=True
        )
        check(one, [x[3:] for x in expected])


@pytest.mark.parametrize("form", ["paged", "decode", "ragged"])
def test_rotation_on_the_emulated_gpu(form: str) -> None:
    with torch_gpu():
        test_rotation_before_attention(form, {"rope_theta": 500.0})


def test_a_graph_sees_the_lengths_of_the_last_plan() -> None:
    """A capture right after the first plan; later plans are seen by its replays."""
    steps = [
        make_batch((1,) * 3, lens, page_size=4) for lens in ((9, 1, 30), (10, 2, 0), (3, 40, 7))
    ]
    first = steps[0]
    q, out = torch.empty_like(first.q), torch.full_like(first.q, NAN)
    caches = [torch.empty(30, *first.cache.shape[1:]).half() for _ in range(2)]
    sizes = (4, 30, 3)
    buffers = [torch.full((size,), -9, dtype=torch.int32) for size in sizes]
    with torch_gpu() as gpu:
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)

        def load(step: Batch) -> None:
            q.copy_(step.q)
            for cache, sign in zip(caches, (1, -1), strict=True):
                cache[: len(step.cache)] = sign * step.cache
            wrapper.plan(*step.pages, *step.sizes)

        load(first)
        outs = [torch.full_like(out, NAN) for _ in caches]
        with gpu.capture():
            for cache, given in zip(caches, outs, strict=True):
                wrapper.run(q, cache, out=given)
        assert len(gpu.captured) == 3  # one schedule for both layers
        for step in (*steps, *reversed(steps)):
            load(step)
            for given in outs:
                given.fill_(NAN)
            gpu.replay()
            for given, sign in zip(outs, (1, -1), strict=True):
                expected, _ = step._replace(cache=sign * step.cache).expected()
                torch.testing.assert_close(given.float(), expected, **CLOSE)
        load(steps[1])
        check(wrapper.run(q, caches[0], return_lse=True), steps[1].expected())


def test_a_graph_of_prefill_right_after_the_first_plan() -> None:
    """The plan of its runs is made in the capture, by the number of query rows."""
    steps = [make_batch(*lengths, page_size=4) for lengths in zip(*LATER, strict=True)]
    most = max(len(step.cache) for step in steps)
    q, out = torch.empty_like(steps[0].q), torch.empty_like(steps[0].q)
    cache = torch.empty(most, *steps[0].cache.shape[1:]).half()
    with torch_gpu() as gpu:
        wrapper = PREFILL(workspace(), "NHD", True, **graph_buffers(pages=most))
        for step in (*steps, steps[0]):
            q.copy_(step.q)
            cache[: len(step.cache)] = step.cache
            wrapper.plan(step.qo_indptr, *step.pages, *step.sizes, causal=True)
            if not gpu.captured:
                with gpu.capture():
                    wrapper.run(q, cache, out=out)
                assert len(gpu.captured) == 2
            out.fill_(NAN)
            gpu.replay()
            torch.testing.assert_close(out.float(), step.expected(causal=True)[0], **CLOSE)


# --- errors --------------------------------------------------------------------------------------

ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pos_encoding_mode": "ALiBi"},
            "pos_encoding_mode: needs 'NONE', 'ROPE_LLAMA' or 'ALIBI', got 'ALiBi'",
        ),
        (
            {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 3.0},
            "logits_soft_cap: needs None or 0 with pos_encoding_mode 'ALIBI', got 3.0",
        ),
        ({"prefix_len_ptr": ONES}, "prefix_len_ptr: belongs to the scoring of several items"),
        ({"token_pos_in_items_len": 3}, "token_pos_in_items_len: belongs to the scoring"),
        ({"use_token_head_sf": True}, "use_token_head_sf: belongs to kernels"),
        ({"q_data_type": "float32"}, "q_data_type: needs bfloat16 or float16, got torch.float32"),
        ({"kv_data_type": torch.float8_e5m2}, "kv_data_type: needs q_data_type, torch.float16, or"),
        (
            {"kv_data_type": "bfloat16"},
            "kv_data_type: needs .*float8_e4m3fn beside bfloat16 or float16, got torch.bfloat16",
        ),
        (
            {"kv_data_type": torch.float8_e4m3fn, "head_dim_qk": 72},
            "head_dim_qk: needs a multiple of 16 with kv_data_type float8_e4m3fn, got 72",
        ),
        (
            {"o_data_type": torch.float32},
            "o_data_type: needs q_data_type, .*leave it out, and pass",
        ),
        ({"num_qo_heads": 7}, "num_qo_heads: needs a multiple of num_kv_heads 2, got 7"),
        ({"head_dim_qk": 60}, "head_dim_qk: needs a multiple of 8 up to 512, got 60"),
        ({"head_dim_vo": 520}, "head_dim_vo: needs a multiple of 8 up to 512, got 520"),
        ({"page_size": 0}, "page_size: needs a number above 0, got 0"),
        ({"sm_scale": -1.0}, "sm_scale: needs a number from 1e-20"),
        (
            {"qo_indptr": int32(0, 1)},
            "qo_indptr: needs 6 entries with the 5 requests of paged_kv_i",
        ),
        ({"paged_kv_indices": int32(0)[:, None]}, r"paged_kv_indices: needs axes \(pages\)"),
        (
            {"paged_kv_last_page_len": [1]},
            "paged_kv_last_page_len: needs a PyTorch tensor, got bui",
        ),
        ({"seq_lens": int32(1, 2)}, "seq_lens: needs 5 entries with the 5 requests of"),
    ],
)
def test_arguments_of_a_plan(changes: dict[str, Any], message: str) -> None:
    batch = make_batch(*MIXED)
    heads, kv_heads, columns, page_size = batch.sizes
    arguments: dict[str, Any] = {
        "qo_indptr": batch.qo_indptr,
        "paged_kv_indptr": batch.indptr,
        "paged_kv_indices": batch.indices,
        "paged_kv_last_page_len": batch.last_page_len,
        "num_qo_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim_qk": columns,
        "page_size": page_size,
    }
    wrapper = PREFILL(workspace())
    wrapper.plan(**arguments)
    with pytest.raises(ValueError, match=f"^{message}"):
        wrapper.plan(**arguments | changes)
    for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size"):  # that equal the last
        with pytest.raises(ValueError, match=f"^{name}: needs an int, got float"):
            wrapper.plan(**arguments | {name: float(arguments[name])})
    # What was refused has changed nothing.
    check(wrapper.run(batch.q, batch.cache, return_lse=True), batch.expected())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pos_encoding_mode": "alibi"}, "pos_encoding_mode: needs 'NONE'"),
        ({"window_right": 3}, "window_right: belongs to kernels"),
        ({"use_token_head_sf": True}, "use_token_head_sf: belongs to kernels"),
        ({"is_causal": True}, "is_causal: needs what q_len_per_req 1 says, got True"),
        ({"q_len_per_req": 0}, "q_len_per_req: needs a number from 1, got 0"),
        ({"data_type": torch.bfloat16}, "data_type: needs q_.*; pass q_data_type=torch.bfloat16"),
        ({"kv_data_type": "bfloat16"}, "kv_data_type: needs q_.*; pass q_data_type=torch.bfloat16"),
        ({"head_dim": 520}, "head_dim: needs a multiple of 8 up to 512, got 520"),
        ({"last_page_len": int32(1)}, "last_page_len: needs 3 entries with the 3 requests of ind"),
    ],
)
def test_arguments_of_a_plan_for_decoding(changes: dict[str, Any], message: str) -> None:
    batch = make_batch((1,) * 3, (5, 6, 7))
    names = ("indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim")
    values = (*batch.pages, *batch.sizes)
    arguments = dict(zip((*names, "page_size"), values, strict=True))
    with pytest.raises(ValueError, match=f"^{message}"):
        DECODE(workspace()).plan(**arguments | {"fixed_split_size": -1} | changes)


def test_arguments_of_a_run() -> None:
    batch = make_batch((1,) * 3, (5, 6, 7))
    with pytest.raises(RuntimeError, match=r"^run: needs a plan, got none; call plan\(\) first"):
        DECODE(workspace()).run(batch.q, batch.cache)
    with pytest.raises(RuntimeError, match=r"^run: needs a plan, got none; call plan\(\) first"):
        DECODE(workspace()).forward(batch.q, batch.cache)
    wrapper = planned_decode(batch)
    pair = batch.cache[:, 0], batch.cache[:, 1]
    usual: dict[str, Any] = {"q": batch.q, "paged_kv_cache": batch.cache}
    for changes, message in (
        ({"q": [1]}, "q: needs a PyTorch tensor"),
        ({"q": batch.q[0]}, r"q: needs axes \(tokens, num_qo_heads, head_dim\)"),
        ({"q": batch.q[:2]}, "q: needs 1 rows for each of the 3 requests of the plan, got shape"),
        (
            {"q": batch.q.bfloat16()},
            "q: needs q_data_type of the plan, torch.float16, got torch.bf",
        ),
        ({"q": batch.q[:, :4]}, "plan: made for num_qo_heads 8, got num_qo_heads 4; make a"),
        ({"paged_kv_cache": batch.cache.bfloat16()}, r"k: needs kv_data_type|paged_kv_cache"),
        ({"paged_kv_cache": batch.cache[:, :1]}, "paged_kv_cache: needs keys and values along its"),
        ({"paged_kv_cache": batch.cache[:, 0]}, r"paged_kv_cache: needs keys and values along"),
        ({"paged_kv_cache": (*pair, pair[0])}, "paged_kv_cache: needs one tensor or a pair, got 3"),
        ({"paged_kv_cache": (pair[0][..., :32], pair[1])}, r"paged_kv_cache\[0\]: needs the 64 co"),
        ({"paged_kv_cache": (pair[0], pair[1][:1])}, r"paged_kv_cache\[1\]: needs the pages, "),
        ({"out": torch.zeros(3, 8, 32).half()}, "out: needs shape"),
        ({"out": torch.zeros(2, 8, 64).half()}, "out: needs 1 rows for each of the 3 requests"),
        ({"lse": torch.zeros(3, 8).half()}, "lse: needs float32"),
        ({"lse": [0.0]}, "lse: needs a PyTorch tensor"),
        ({"lse": torch.zeros(24)}, r"lse: needs axes \(tokens, num_qo_heads\), got shape \(24,\)"),
        ({"window_left": 4}, "window_left: needs that of the plan, -1, got 4"),
        ({"q_len_per_req": 2}, "q_len_per_req: needs that of the plan, 1, got 2"),
        ({"sinks": torch.zeros(3)}, "sinks: needs"),
        ({"k_scale": 0.0}, "k_scale: needs a number above 0, got 0.0"),
        ({"kv_cache_sf": ONES}, "kv_cache_sf: belongs to kernels that cumla does not have"),
        (
            {"skip_softmax_threshold_scale_factor": 1.0},
            "skip_softmax_threshold_scale_factor: belongs to kernels",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            wrapper.run(**usual | changes)
    with pytest.raises(ValueError, match=r"^args: .* as one pair, \(k, v\), and sinks as sinks="):
        wrapper.run(batch.q, batch.cache, ONES)


def test_queries_that_end_before_their_offsets_do() -> None:
    """The host knows offsets that it was given; more rows than that are padding."""
    batch = make_batch((1, 3, 2), (5, 6, 7))
    wrapper, ragged = PREFILL(workspace()), RAGGED(workspace())
    wrapper.plan(batch.qo_indptr, *batch.pages, 8, 2, 64, 16, q_data_type=batch.q.dtype)
    ragged.plan(batch.qo_indptr, batch.qo_indptr, 8, 2, 64, q_data_type=batch.q.dtype)
    rows = torch.zeros(6, 2, 64).half()
    for run in (lambda q: wrapper.run(q, batch.cache), lambda q: ragged.run(q, rows, rows)):
        with pytest.raises(ValueError, match=r"^q: needs the 6 query tokens that qo_indptr .* 5;"):
            run(batch.q[:5])
        padded = run(torch.cat([batch.q, batch.q]))
        assert torch.equal(padded[:6], run(batch.q))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_caches_of_the_other_layout(layout: str) -> None:
    """The message names kv_layout, also where the heads of the queries could go with either."""
    batch = make_batch((1,) * 3, (5, 6, 7), page_size=4, layout=layout)
    says = f"needs the 2 kv heads of the plan on axis -[23] with kv_layout '{layout}', got shape"
    with pytest.raises(ValueError, match=rf"^paged_kv_cache\[:, 0\]: {says}"):
        planned_decode(batch).run(batch.q, batch.cache.transpose(2, 3))
    wrapper = RAGGED(workspace(), layout)
    wrapper.plan(batch.qo_indptr, batch.qo_indptr, 8, 2, 64, q_data_type=batch.q.dtype)
    rows = torch.zeros(3, 2, 64).half() if layout == "HND" else torch.zeros(2, 3, 64).half()
    with pytest.raises(ValueError, match=f"^k: {says}"):
        wrapper.run(batch.q, rows, rows)


@pytest.mark.parametrize("kind", [DECODE, PREFILL, RAGGED])
def test_arguments_of_a_wrapper(kind: Any) -> None:
    for arguments, error, message in (
        (([1],), TypeError, "float_workspace_buffer: needs a PyTorch tensor"),
        ((workspace(), "NDH"), ValueError, "kv_layout: needs 'NHD' or 'HND', got 'NDH'"),
        ((workspace(), "NHD", True), ValueError, r"\w+_buf\w*: needs a tensor with use_cuda_graph"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            kind(*arguments)
    for options, message in (
        ({"backend": "trtllm-gen"}, "backend: needs one of auto, fa2, fa3, got 'trtllm-gen'"),
        ({"jit_args": [1]}, "jit_args: belongs to kernels"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            kind(workspace(), **options)


def test_buffers_that_do_not_fit() -> None:
    for name, wrong, message in (
        ("qo_indptr_buf", torch.zeros(5, dtype=torch.int32), "qo_indptr_buf: needs 6 entries with"),
        (
            "paged_kv_indptr_buf",
            torch.zeros(6),
            "paged_kv_indptr_buf: needs int32, .* torch.float32",
        ),
        ("paged_kv_indices_buf", int32(0)[0], "paged_kv_indices_buf: needs axes"),
        (
            "paged_kv_last_page_len_buf",
            torch.empty(5, dtype=torch.int32, device="meta"),
            "paged_kv_last_page_len_buf: needs a tensor on cpu",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            PREFILL(workspace(), "NHD", True, **graph_buffers() | {name: wrong})


def test_one_request_that_does_not_fit() -> None:
    q, k = torch.zeros(4, 16).half(), torch.zeros(5, 2, 16).half()
    for call, message in (
        (lambda: flashinfer.single_decode_with_kv_cache(q[None], k, k), "q: needs axes"),
        (lambda: flashinfer.single_decode_with_kv_cache(q, k[None], k), "k: needs axes"),
        (lambda: flashinfer.single_decode_with_kv_cache(q, k, k, "HND"), "q: needs a multiple|k: "),
        (
            lambda: flashinfer.single_prefill_with_kv_cache(q[None], k, k, scale_q=ONES),
            "scale_q: belongs to kernels",
        ),
        (
            lambda: flashinfer.single_prefill_with_kv_cache(
                q[None], k, k, pos_encoding_mode="ALIBI", return_lse=True
            ),
            "return_lse: needs False with pos_encoding_mode 'ALIBI', got True",
        ),
    ):
        with pytest.raises(ValueError, match=f"^({message})"):
            call()
