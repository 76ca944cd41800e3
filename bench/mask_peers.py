# SPDX-License-Identifier: Apache-2.0
"""Calls of other libraries for the rows of bench.masks.

Each takes the row's arrays, with all that a step makes once made before. FlexAttention gets rows of
keys without pages, and the mask or bias as a function that it compiles. FlashAttention-3 has no
masks but windows: :func:`flash_attention` says what it computes instead. FlashAttention-4 compiles
masks and biases of bench/mask_mods.py into its kernel, and gets lists of the blocks that a mask
shows. FlashInfer gets the bits of a custom mask, vLLM's Triton kernel the bounds of images, the
length of chunks, or slopes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

import cumla

Call = Callable[[], Any]
Peer = tuple[str, Call | dict[str, Call]]  # which of the row's results it computes, and how
LARGEST_MASK = 1 << 28  # pairs of a query token and a key that a library makes an array of


def rows_of(given: dict[str, Any]) -> list[Any]:
    """Gather keys and values: (batch, kv_len, kv heads, columns)."""
    kv_len = int(given["kv_lens"][0])
    table = given["block_table"].long()
    return [given[part][table].flatten(1, 2)[:, :kv_len].contiguous() for part in ("k", "v")]


def mods() -> Any:
    """The masks and biases of FlashAttention-4."""
    return import_module("bench.mask_mods")


def blocks_of(first: Any, sure: Any, last: Any, block: tuple[int, int], kv_len: int) -> list[Any]:
    """List blocks of keys for blocks of query tokens: those that some see, and those that all see.

    A query token sees keys from `first` to `sure`, and some to `last`: arrays (batch, q_len), whose
    q_len is a multiple of the block's. Each list is a number and indices, for all heads alike.
    """
    of_block = [rows.unflatten(1, (-1, block[0], 1)) for rows in (first, sure, last)]
    begin = torch.arange(0, kv_len, block[1], device=first.device)
    first, sure, last = of_block
    whole = ((first <= begin) & (sure >= begin + block[1] - 1)).all(2)
    some = ((first < begin + block[1]) & (last >= begin)).any(2) & ~whole
    lists: list[Any] = []
    for listed in (some[:, None], whole[:, None]):
        lists += [listed.sum(-1), (~listed).int().argsort(dim=-1, stable=True)]
    return [array.int().contiguous() for array in lists]


def flash_attention_4(
    library: Any,
    given: dict[str, Any],
    *,
    mask: Any = None,
    tree: Any = None,
    bias: Any = None,
    window: int | None = None,
    chunk: int = 0,
) -> dict[str, Call]:
    """FlashAttention-4 over rows without pages, by ways to ask for the same, without split keys.

    The heads of a key head share a tile: one tile for each head was slower in each prefill.
    """
    q, kv_len = given["q"], int(given["kv_lens"][0])
    batch, q_len, heads, columns = q.shape
    rows = rows_of(given)

    def call(*arrays: Any, **options: Any) -> Call:
        return lambda: library.flash_attn_func(*arrays, **options)[0].view(q.shape)

    if bias is not None:
        options: dict[str, Any] = {"causal": window is None}
        options["window_size"] = (None, None) if window is None else (window, 0)
        if bias.slopes is not None:
            loaded = {"score_mod": mods().slopes_of_array, "aux_tensors": [bias.slopes]}
            return {
                "slopes computed": call(q, *rows, score_mod=mods().slopes(heads), **options),
                "slopes loaded": call(q, *rows, **loaded, **options),
            }
        options["aux_tensors"] = [bias.table.unflatten(0, (batch, q_len))]
        return {
            "loads where needed": call(q, *rows, score_mod=mods().table, **options),
            "loads for all": call(q, *rows, score_mod=mods().table_of_any, **options),
        }
    block = {64: (192, 128), 128: (128, 128), 256: (128, 80)}[columns]
    tokens = torch.arange(-(-q_len // block[0]) * block[0], device=q.device)
    tokens = tokens.clamp(max=q_len - 1)  # those that fill a block are like the last one
    if tree is not None:
        last = tokens.expand(batch, -1) * 0 + kv_len - 1
        lists = blocks_of(last * 0, last - q_len, last, block, kv_len)
        options = {"mask_mod": mods().tree, "aux_tensors": [tree.int()]}
    else:
        first, last = (ends.view(batch, q_len)[:, tokens] for ends in (mask.start, mask.end))
        lists = blocks_of(first, last, last, block, kv_len)
        options = {"mask_mod": mods().interval, "aux_tensors": [first, last]}
    tensors = import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    options["block_sparse_tensors"] = tensors(*lists, block_size=block)
    calls = {"a mask": call(q, *rows, **options)}
    if chunk and q_len >= 1024:
        own = [part.view(-1, chunk, *part.shape[2:]) for part in (q, *rows)]
        calls["requests of their own"] = call(*own, causal=True)
    return calls


def flex(
    given: dict[str, Any], seen: Callable[..., Any], score: Callable[..., Any] | None
) -> Callable[[], Any]:
    """FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, q_len = given["q"].shape[:2]
    k, v = (rows.transpose(1, 2).contiguous() for rows in rows_of(given))
    blocks = create_block_mask(seen, batch, None, q_len, k.shape[2], device=k.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    q = given["q"].transpose(1, 2)
    more: dict[str, Any] = {"score_mod": score, "block_mask": blocks, "enable_gqa": True}
    return lambda: compiled(q, k, v, **more).transpose(1, 2)


def flash_infer(module: Any, given: dict[str, Any], visible: Any) -> Callable[[], Any]:
    """FlashInfer's paged prefill with a custom mask: `visible` is (batch, q_len, kv_len)."""
    q, k = given["q"], given["k"]
    batch, q_len, heads, columns = q.shape
    table, kv_len = given["block_table"], visible.shape[2]
    powers = 2 ** torch.arange(8, device=q.device, dtype=torch.uint8)
    pad = -q_len * kv_len % 8  # a request's bits begin with a byte
    bytes_ = torch.nn.functional.pad(visible.flatten(1), (0, pad)).view(-1, 8)
    bits = (bytes_ * powers).sum(-1, dtype=torch.uint8)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    counts = torch.arange(batch + 1, dtype=torch.int32)
    last = torch.full((batch,), (kv_len - 1) % k.shape[1] + 1, dtype=torch.int32)
    wrapper.plan(
        *(counts * q_len, counts * table.shape[1], table.flatten(), last),
        *(heads, k.shape[2], columns, k.shape[1]),
        packed_custom_mask=bits,
        q_data_type=q.dtype,
    )
    # It takes offsets in bits, where packed masks need offsets in bytes.
    wrapper._mask_indptr_buf = (counts * (bits.numel() // batch)).to(q.device)
    out = torch.empty_like(q).flatten(0, 1)
    return lambda: wrapper.run(q.flatten(0, 1), (k, given["v"]), out=out)


def vllm(
    attend: Any,
    given: dict[str, Any],
    *,
    spans: Any = None,
    bias: Any = None,
    window: int | None = None,
    chunk: int = 0,
) -> Call:
    """vLLM's Triton kernel, over pages; its keys are split as vLLM splits them."""
    q, table = given["q"], given["block_table"]
    batch, q_len, heads, columns = q.shape
    flat, segments = q.flatten(0, 1), 16
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q_len
    parts = len(flat) if q_len <= 8 else 0
    scratch = [
        torch.empty(parts, heads, segments, *last, device=q.device) for last in ((columns,), (), ())
    ]
    names = ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")
    options: dict[str, Any] = dict(zip(names, scratch, strict=True))
    options |= dict.fromkeys(("q_descale", "k_descale", "v_descale"))
    before = chunk - 1 if chunk else -1 if window is None else window
    options |= {"window_size": (before, 0), "chunk_lookback": 0 if chunk else -1}
    options |= {"alibi_slopes": None if bias is None else bias.slopes, "mm_prefix_range": spans}
    options |= {"cu_seqlens_q": starts, "max_seqlen_q": q_len, "seqused_k": given["kv_lens"]}
    options |= {"max_seqlen_k": table.shape[1] * given["k"].shape[1], "block_table": table}
    options |= {"softmax_scale": columns**-0.5, "causal": True, "softcap": 0}
    options |= {
        "seq_threshold_3D": 128 // given["k"].shape[2],
        "num_par_softmax_segments": segments,
    }
    out = torch.empty_like(flat)

    def call() -> Any:
        attend(flat, given["k"], given["v"], out, **options)
        return out.view(q.shape)

    return call


def flash_attention(
    library: Any, given: dict[str, Any], *, window: int | None, chunk: int, tree: Any, counts: Any
) -> Peer:
    """FlashAttention-3. Prefills get rows without pages.

    Chunks are requests of their own. A tree is a call over what is before the drafts, one over
    requests of one draft and pages of one token, and a merge, as SGLang does it. Windows have no
    images. Other masks are left out.
    """
    q, lens = given["q"], given["kv_lens"]
    batch, q_len = q.shape[:2]
    paged = _Paged(library, given)
    if tree is not None:
        return "mask", _two_passes(paged, tree)
    if counts is not None:
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0).int()])
        more = {"q_starts": starts, "max_q": int(counts.max())}
        return "ragged", paged.call(q.flatten(0, 1), lens, given["block_table"], **more)
    if q_len == 1 and chunk:
        page = given["k"].shape[1]
        first = (int(lens[0]) - 1) // chunk * chunk
        return "mask", paged.call(q, lens - first, given["block_table"][:, first // page :])
    if q_len < 1024:
        return "causal", paged.call(q, lens, given["block_table"])
    k, v = (rows.flatten(0, 1) for rows in rows_of(given))
    length = chunk or q_len
    starts = torch.arange(0, batch * q_len + 1, length, dtype=torch.int32, device=q.device)
    given = {"q_starts": starts, "k_starts": starts, "max_q": length, "max_kv": length}
    flat = q.flatten(0, 1)
    more = {"window": (-1 if window is None else window, 0 if window else -1), "splits": 1}
    more |= {"scale": q.shape[3] ** -0.5, "out": torch.empty_like(flat)}
    result = "window" if window is not None else "mask" if chunk else "causal"
    return result, partial(library, flat, k, v, **given, **more)


class _Paged:
    """Calls of FlashAttention-3 over pages, with their schedules made."""

    def __init__(self, library: Any, given: dict[str, Any]) -> None:
        self.library, self.given = library, given

    def call(
        self, q: Any, lens: Any, table: Any, *, page: int = 64, causal: bool = True, **more: Any
    ) -> Callable[[], Any]:
        k, v = (rows.view(-1, page, *rows.shape[2:]) for rows in (self.given["k"], self.given["v"]))
        sizes = {"max_q": more.get("max_q", q.shape[1]), "max_kv": table.shape[1] * page}
        schedule = self.library.schedule(
            lens,
            heads=(q.shape[-2], k.shape[2]),
            columns=(k.shape[3], v.shape[3]),
            dtype=q.dtype,
            page=page,
            causal=causal,
            q_starts=more.get("q_starts"),
            **sizes,
        )
        options = {"schedule": schedule, "causal": causal, "scale": q.shape[-1] ** -0.5}
        given = {"lens": lens, "table": table, "out": torch.empty_like(q)}
        return partial(self.library, q, k, v, **given, **options, **more)


def _two_passes(paged: _Paged, tree: Any) -> Callable[[], Any]:
    q, table, lens = (paged.given[name] for name in ("q", "block_table", "kv_lens"))
    batch, drafts = tree.shape[:2]
    before = lens - drafts
    places = before[:, None] + torch.arange(drafts, device=q.device)
    page = paged.given["k"].shape[1]
    slots = table.gather(1, places // page) * page + places % page
    order = (~tree).int().argsort(dim=-1, stable=True)
    own = slots[:, None].expand(tree.shape).gather(2, order).int().flatten(0, 1).contiguous()
    prefix = paged.call(q, before, table, causal=False, with_lse=True)
    single = q.flatten(0, 1)[:, None]
    some = tree.sum(-1).int().flatten()
    rest = paged.call(single, some, own, page=1, causal=False, with_lse=True)
    out = torch.empty_like(q)

    def call() -> Any:
        (first, first_lse), (second, second_lse) = prefix(), rest()
        lses = first_lse.transpose(1, 2), second_lse.view(batch, drafts, -1)
        cumla.merge_attention_states((first, second.view(q.shape)), lses, out=out)
        return out

    return call
