# SPDX-License-Identifier: Apache-2.0
"""Custom masks of FlashInfer's prefill on the CPU, against attention in float32."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cumla.compat import flashinfer
from tests.compat.oracle import naive, offsets_of
from tests.compat.test_flashinfer_attention import (
    CLOSE,
    PREFILL,
    RAGGED,
    Batch,
    check,
    graph_buffers,
    make_batch,
    rotated,
    workspace,
)
from tests.compat.torch_gpu import torch_gpu

torch = pytest.importorskip("torch")

MIXED = (1, 5, 0, 17, 2), (70, 300, 33, 600, 1)


def packed(masks: list[Any]) -> Any:
    """As FlashInfer's segment_packbits has them: little-endian, each request from a whole byte."""
    found = []
    for mask in masks:
        bits = torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8)
        found.append((bits * 2 ** torch.arange(8)).sum(-1).to(torch.uint8))
    return torch.cat(found)


def plain(masks: list[Any]) -> Any:
    return torch.cat([mask.flatten() for mask in masks])


def trees(q_lens: Any, kv_lens: Any) -> list[Any]:
    """All keys before the drafts; drafts see what they see."""
    masks = []
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        own = min(q_len, kv_len)
        drafts = torch.rand(q_len, own) < 0.5
        masks.append(torch.cat([torch.ones(q_len, kv_len - own, dtype=torch.bool), drafts], dim=1))
    return masks


def last_keys(q_lens: Any, kv_lens: Any) -> list[Any]:
    """Any of the last 256 keys, and one interval before them."""
    masks = []
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        before = max(0, kv_len - 256)
        first, last = (torch.randint(before + 1, (q_len, 1)) for _ in range(2))
        keys = torch.arange(before)
        masks.append(
            torch.cat(
                [(keys >= first) & (keys <= last), torch.rand(q_len, kv_len - before) < 0.5], 1
            )
        )
    return masks


def intervals(q_lens: Any, kv_lens: Any) -> list[Any]:
    """Any intervals, some of no key."""
    masks = []
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        first, last = (torch.randint(kv_len, (q_len, 1)) for _ in range(2))
        keys = torch.arange(kv_len)
        masks.append((keys >= first) & (keys <= last))
    return masks


def prefixes(q_lens: Any, kv_lens: Any) -> list[Any]:
    """The first keys, a window far behind them, and of one request any of the last 256 keys."""
    masks = []
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        keys, queries = torch.arange(kv_len), torch.arange(kv_len - q_len, kv_len)[:, None]
        seen = (keys < kv_len // 4) | ((keys <= queries - 100) & (keys > queries - 340))
        if request == 3:
            seen[:, -256:] = torch.rand(q_len, 256) < 0.5
        masks.append(seen)
    return masks


def any_keys(q_lens: Any, kv_lens: Any) -> list[Any]:
    """Any keys, of one token none."""
    masks = [torch.rand(*sizes) < 0.3 for sizes in zip(q_lens, kv_lens, strict=True)]
    masks[-1][-1] = False
    return masks


KINDS = {
    "any keys": any_keys,
    "trees": trees,
    "last keys": last_keys,
    "intervals": intervals,
    "prefixes": prefixes,
}


def expected(batch: Batch, masks: list[Any], **options: Any) -> tuple[Any, Any]:
    """out, and lse to base 2."""
    states = [
        naive(
            batch.q[batch.qo_indptr[r] : batch.qo_indptr[r + 1]], *batch.rows(r), mask=m, **options
        )
        for r, m in enumerate(masks)
    ]
    out, lse = torch.cat([s[0] for s in states]), torch.cat([s[1] for s in states], dim=1)
    return out, lse.T / math.log(2)


def plan(wrapper: Any, batch: Batch, **options: Any) -> None:
    heads, kv_heads, columns, page_size = batch.sizes
    wrapper.plan(batch.qo_indptr, *batch.pages, heads, kv_heads, columns, page_size, **options)


@pytest.mark.parametrize("name", ["custom_mask", "packed_custom_mask"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window_left", [-1, 40])
def test_a_mask_of_pages(kind: str, name: str, window_left: int) -> None:
    """A mask takes the place of causal, and a window bounds it."""
    batch = make_batch(*MIXED)
    masks = KINDS[kind](*MIXED)
    given = packed(masks) if name[0] == "p" else plain(masks)
    wrapper = PREFILL(workspace())
    plan(wrapper, batch, **{name: given}, window_left=window_left, causal=True)
    found = wrapper.run(batch.q, batch.cache, return_lse=True)
    wanted = expected(batch, masks, window=(window_left, -1))
    check(found, wanted)
    again = wrapper.forward(batch.q, batch.cache, True, window_left=window_left)
    assert torch.equal(again, found[0])
    plan(wrapper, batch, causal=True)  # without one again
    check(wrapper.run(batch.q, batch.cache, return_lse=True), batch.expected(causal=True))


def test_what_a_mask_costs_follows_from_its_form() -> None:
    """Intervals need no bits, and drafts as many words as they need."""
    batch = make_batch(*MIXED)
    wrapper = PREFILL(workspace())
    plan(wrapper, batch, custom_mask=plain(intervals(*MIXED)))
    assert wrapper._mask.tree is None
    plan(wrapper, batch, custom_mask=plain(trees(*MIXED)))
    assert wrapper._mask.tree.shape == (25, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_rows_without_pages(kind: str) -> None:
    batch = make_batch(*MIXED, pair=True)
    masks = KINDS[kind](*MIXED)
    k, v = (torch.cat(parts) for parts in zip(*map(batch.rows, range(5)), strict=True))
    wrapper = RAGGED(workspace())
    offsets = batch.qo_indptr, offsets_of(list(batch.kv_lens))
    wrapper.plan(*offsets, 8, 2, 64, packed_custom_mask=packed(masks), logits_soft_cap=5.0)
    found = wrapper.run(batch.q, k, v, return_lse=True)
    check(found, expected(batch, masks, softcap=5.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["custom_mask", "packed_custom_mask"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_mask_of_one_request(kind: str, name: str, layout: str) -> None:
    batch = make_batch((9,), (333,))
    (mask,) = KINDS[kind]((9,), (333,))
    given = packed([mask]) if name[0] == "p" else mask
    k, v = (x if layout == "NHD" else x.transpose(0, 1) for x in batch.rows(0))
    found = flashinfer.single_prefill_with_kv_cache(
        batch.q, k, v, **{name: given}, kv_layout=layout, window_left=100, return_lse=True
    )
    out, lse = expected(batch, [mask], window=(100, -1))
    torch.testing.assert_close(found[0].float(), out, **CLOSE)
    torch.testing.assert_close(found[1], lse, **CLOSE)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_any_keys_in_pages_of_any_form(layout: str, pair: bool, page_size: int) -> None:
    """With sinks and a soft cap, and the same bits in any batch."""
    columns = (64, 32 if pair else 64)
    batch = make_batch(*MIXED, layout=layout, pair=pair, page_size=page_size, columns=columns)
    masks, sinks = any_keys(*MIXED), torch.linspace(-1, 1, 8)
    wrapper = PREFILL(workspace(), layout)
    wrapper.plan(
        *(batch.qo_indptr, *batch.pages, 8, 2, 64, page_size),
        head_dim_vo=columns[1],
        custom_mask=plain(masks),
        logits_soft_cap=5.0,
        disable_split_kv=True,
    )
    found = wrapper.run(batch.q, batch.cache, return_lse=True, sinks=sinks)
    check(found, expected(batch, masks, softcap=5.0, sinks=sinks))


@pytest.mark.parametrize("is_ragged", [False, True])
def test_any_keys_that_are_rotated(is_ragged: bool) -> None:
    batch = make_batch(*MIXED, pair=True)
    masks, options = any_keys(*MIXED), {"pos_encoding_mode": "ROPE_LLAMA"}
    queries, keys = rotated(batch, 1.0, 1e4)
    values = [batch.rows(r)[1] for r in range(5)]
    states = [
        naive(*rows, mask=mask) for *rows, mask in zip(queries, keys, values, masks, strict=True)
    ]
    wanted = torch.cat([s[0] for s in states]), torch.cat([s[1] for s in states], 1).T / math.log(2)
    if is_ragged:
        k, v = (torch.cat(parts) for parts in zip(*map(batch.rows, range(5)), strict=True))
        wrapper = RAGGED(workspace())
        offsets = batch.qo_indptr, offsets_of(list(batch.kv_lens))
        wrapper.plan(*offsets, 8, 2, 64, custom_mask=plain(masks), **options)
        found = wrapper.run(batch.q, k, v, return_lse=True)
    else:
        paged = PREFILL(workspace())
        plan(paged, batch, custom_mask=plain(masks), **options)
        found = paged.run(batch.q, batch.cache, return_lse=True)
    check(found, wanted)


def test_no_request() -> None:
    batch = make_batch((), ())
    wrapper = PREFILL(workspace())
    plan(wrapper, batch, custom_mask=torch.zeros(0, dtype=torch.bool))
    assert wrapper.run(batch.q, batch.cache).shape == batch.q.shape


def test_a_graph_sees_the_mask_of_the_last_plan() -> None:
    """Of fewer query tokens and of any form as well."""
    steps = [
        (trees, (1, 5, 0, 17, 2), (70, 30, 33, 40, 1)),
        (intervals, (0, 10, 3, 1, 1), (9, 80, 6, 1, 100)),
        (last_keys, (5, 0, 20, 0, 0), (30, 7, 300, 1, 5)),
    ]
    batches = [make_batch(*lengths, page_size=4) for _, *lengths in steps]
    most = max(len(batch.cache) for batch in batches)
    q, out = (torch.full_like(batches[0].q, math.nan) for _ in range(2))
    cache = torch.empty(most, *batches[0].cache.shape[1:]).half()
    with torch_gpu() as gpu:
        buffers = graph_buffers(pages=most) | {
            "custom_mask_buf": torch.empty(9),
            "mask_indptr_buf": 1,
        }
        wrapper = PREFILL(workspace(), "NHD", True, **buffers)
        for (kind, *lengths), batch in zip(steps, batches, strict=True):
            masks, tokens = kind(*lengths), len(batch.q)
            q[:tokens], cache[: len(batch.cache)] = batch.q, batch.cache
            plan(wrapper, batch, custom_mask=plain(masks))
            if not gpu.captured:
                with gpu.capture():
                    wrapper.run(q, cache, out=out)
            out.fill_(math.nan)
            gpu.replay()
            torch.testing.assert_close(out[:tokens].float(), expected(batch, masks)[0], **CLOSE)
        with pytest.raises(
            ValueError, match=r"^custom_mask: needed in each plan of a wrapper with"
        ):
            plan(wrapper, batches[0])
        longer = make_batch((30, 0, 0, 0, 0), (30, 0, 0, 0, 0), page_size=4)
        with pytest.raises(
            ValueError, match=r"^qo_indptr: needs at most the 25 query tokens of the"
        ):
            plan(wrapper, longer, custom_mask=torch.ones(900, dtype=torch.bool))
        without = PREFILL(workspace(), "NHD", True, **graph_buffers(pages=most))
        with pytest.raises(
            ValueError, match=r"^custom_mask_buf: needed with use_cuda_graph for pl"
        ):
            plan(without, batches[0], custom_mask=plain(trees(*steps[0][1:])))


def test_masks_that_are_refused() -> None:
    """What is planned stays as it is."""
    batch = make_batch(*MIXED)
    masks = trees(*MIXED)
    wrapper = PREFILL(workspace())
    plan(wrapper, batch, custom_mask=plain(masks))
    gap = [mask.clone() for mask in masks]
    gap[3][4, 342] = False  # the key after it is the 257th from the end
    gap[3][3, 0] = False  # so that no key is a prefix
    serves = r"got request 3 with a second interval that begins 257 keys .*make a wrapper without"
    buffers = graph_buffers(pages=len(batch.cache)) | {"custom_mask_buf": torch.empty(9)}
    in_graphs = PREFILL(workspace(), "NHD", True, **buffers)
    for name, of in (("custom_mask", plain), ("packed_custom_mask", packed)):
        with pytest.raises(ValueError, match=f"^{name}: needs, with use_cuda_graph, .*{serves}"):
            plan(in_graphs, batch, **{name: of(gap)})
    for given, message in (
        ({"custom_mask": plain(masks)[1:]}, "custom_mask: needs 11772 entries: .*got 11771"),
        ({"packed_custom_mask": packed(masks)[1:]}, "packed_custom_mask: needs .* bytes, those"),
        ({"custom_mask": plain(masks).float()}, "custom_mask: needs bool or uint8, got torch.fl"),
        ({"packed_custom_mask": plain(masks)}, "packed_custom_mask: needs uint8, got torch.bool"),
        ({"custom_mask": [True]}, "custom_mask: needs a PyTorch tensor, got"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            plan(wrapper, batch, **given)
    check(wrapper.run(batch.q, batch.cache, return_lse=True), expected(batch, masks))
    with pytest.raises(ValueError, match=r"^q: needs the 25 query tokens of the mask, got 24"):
        wrapper.run(batch.q[1:], batch.cache)
    plan(wrapper, batch, custom_mask=plain(gap))  # by lists of keys
    check(wrapper.run(batch.q, batch.cache, return_lse=True), expected(batch, gap))
    with pytest.raises(ValueError, match=r"^q: needs the 25 query tokens of the mask, got 24"):
        wrapper.run(batch.q[1:], batch.cache)
    gap[3][4, 342], gap[3][4, 343] = True, False
    plan(wrapper, batch, custom_mask=plain(gap))
    check(wrapper.run(batch.q, batch.cache, return_lse=True), expected(batch, gap))
    with pytest.raises(ValueError, match=r"^q: needs the 25 query tokens of the mask, got 24"):
        wrapper.run(batch.q[1:], batch.cache)
    with pytest.raises(ValueError, match=r"^window_left: needs that of the plan beside a mask, -1"):
        wrapper.forward(batch.q, batch.cache, window_left=3)
