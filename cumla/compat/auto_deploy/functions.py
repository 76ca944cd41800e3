# SPDX-License-Identifier: Apache-2.0
"""AutoDeploy's operations of attention and rotary embedding, as functions of PyTorch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.compat._arguments import check_axes, check_integers, check_new_rows, check_tensors
from cumla.compat._table import Interface
from cumla.compat._torch import import_torch, positions_of
from cumla.mha.attention import attention
from cumla.mha.cache import append_kv_cache
from cumla.mha.rope import apply_rope

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "apply_rope_on_flattened_inputs",
    "apply_rope_with_input_pos",
    "fused_flattened_mha_with_cache",
    "fused_flattened_mha_with_cache_rope_fusion",
    "fused_flattened_mha_with_paged_cache",
    "fused_mha_with_cache",
    "fused_mha_with_paged_cache",
    "prepare_fused_mha_metadata",
    "prepare_paged_mha_metadata",
    "scaled_dot_product_attention",
]

_TABLE = {"cos_sin[0]": "freqs_cis", "cos_sin[1]": "freqs_cis", "cos_sin": "freqs_cis"}
_ROPE = Interface({"q": "x", "positions": "input_pos", **_TABLE})


def _names(pages: str, lengths: dict[str, str]) -> tuple[Interface, Interface]:
    """Name the arguments of writing and of attending; `pages` has those of a request."""
    names = {"q_out": "q", "block_table": pages, **_TABLE, **lengths}
    return Interface(names), Interface({**names, "k": "k_cache", "v": "v_cache"})


_LENGTHS = {"kv_lens": "input_pos", "qo_indptr": "seq_start"}
_NAMES = {pages: _names(pages, _LENGTHS) for pages in ("k_cache", "cache_loc", "page_table")}
_NAMES["kv_indices"] = _names("kv_indices", {})


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Call PyTorch's function of this name, which marks attention in a graph."""
    attend: Any = import_torch().nn.functional.scaled_dot_product_attention
    result: Tensor = attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    return result


def fused_mha_with_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_pos: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    freqs_cis: Tensor | None,
) -> Tensor:
    """Write the keys and values of equally long requests into their caches, and attend.

    Differences from AutoDeploy: the history in the cache is visible. rotary_dim is a multiple of
    16; a table that is narrower than the heads rotates their last columns.
    """
    rows = _checked(q, k, v, k_cache, v_cache, input_pos=input_pos)
    batch, seqlen = q.shape[:2]
    if k_cache.shape[0] < batch:
        raise ValueError(
            f"k_cache: needs a slot for each of the {batch} requests of q, got shape "
            f"{tuple(k_cache.shape)}; make caches with more slots"
        )
    torch = import_torch()
    slots = torch.arange(batch, dtype=torch.int32, device=q.device)
    places = {"kv_lens": _int32(input_pos) + seqlen, "block_table": slots[:, None]}
    return _attend("k_cache", rows, (k_cache, v_cache), freqs_cis, places)


def fused_flattened_mha_with_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_len: Tensor,
    input_pos: Tensor,
    cache_loc: Tensor,
    seq_start: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    freqs_cis: Tensor | None,
) -> Tensor:
    """Write the keys and values of any requests into their slots, and attend.

    Differences from AutoDeploy: a request without tokens is skipped; where each request has one
    token its result is 0. Rows of no request hold anything. The rotation is as in
    `fused_mha_with_cache`.
    """
    lists = {"seq_len": seq_len, "input_pos": input_pos, "seq_start": seq_start}
    return _attend_flattened((q, k, v), lists, cache_loc, None, (k_cache, v_cache), freqs_cis)


def fused_flattened_mha_with_cache_rope_fusion(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_pos: Tensor,
    cache_loc: Tensor,
    seq_len: Tensor,
    seq_start: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    freqs_cis: Tensor | None,
) -> Tensor:
    """Call `fused_flattened_mha_with_cache`, which has another order of the arguments."""
    return fused_flattened_mha_with_cache(
        q, k, v, seq_len, input_pos, cache_loc, seq_start, k_cache, v_cache, freqs_cis
    )


def fused_mha_with_paged_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_pos: Tensor,
    cache_loc: Tensor,
    seq_len: Tensor,
    seq_start: Tensor,
    page_table: Tensor,
    max_seq_len: int,
    k_cache: Tensor,
    v_cache: Tensor,
    freqs_cis: Tensor | None,
) -> Tensor:
    """Write the keys and values of any requests into their pages, and attend.

    Differences from AutoDeploy are those of `fused_flattened_mha_with_cache`. New tokens may begin
    inside a page. max_seq_len is ignored.
    """
    lists = {"seq_len": seq_len, "input_pos": input_pos, "seq_start": seq_start}
    caches = k_cache, v_cache
    return _attend_flattened((q, k, v), lists, cache_loc, page_table, caches, freqs_cis)


def fused_flattened_mha_with_paged_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lens: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    freqs_cis: Tensor | None,
) -> Tensor:
    """Write keys and values into pages, and attend, with the metadata of one step.

    AutoDeploy has no such operation: it is that of the descriptor ``"cumla_paged"``, whose
    `prepare_paged_mha_metadata` makes kv_lens, qo_indptr, kv_indptr and kv_indices.
    """
    places = {"kv_lens": kv_lens, "qo_indptr": qo_indptr}
    places |= {"kv_indptr": kv_indptr, "kv_indices": kv_indices}
    rows = _checked(q, k, v, k_cache, v_cache, **places)
    return _attend("kv_indices", rows, (k_cache, v_cache), freqs_cis, places)


def prepare_fused_mha_metadata(
    input_ids: Tensor,
    seq_len: Tensor,
    input_pos: Tensor,
    cache_loc: Tensor,
    pages_per_seq: Tensor,
    page_size: int,
) -> list[Tensor]:
    """Make seq_len, input_pos, cache_loc and seq_start of `fused_flattened_mha_with_cache`.

    Differences from AutoDeploy: in batches of several tokens a request the requests without tokens
    stay, because only the device knows their number.
    """
    check_integers(seq_len=seq_len, input_pos=input_pos, cache_loc=cache_loc)
    count = min(_requests(input_ids, seq_len), cache_loc.shape[0])  # slots, which few may be
    start = seq_len[:count].cumsum(0).to(seq_len.dtype) - seq_len[:count]
    lists = _of_requests(count, seq_len=seq_len, input_pos=input_pos, cache_loc=cache_loc)
    return [*(numbers.clone() for numbers in lists), start]


def prepare_paged_mha_metadata(
    input_ids: Tensor,
    seq_len: Tensor,
    input_pos: Tensor,
    cache_loc: Tensor,
    pages_per_seq: Tensor,
    page_size: int,
) -> list[Tensor]:
    """Make the metadata of `fused_flattened_mha_with_paged_cache`, which AutoDeploy has not."""
    lists = {"seq_len": seq_len, "input_pos": input_pos}
    check_integers(**lists, cache_loc=cache_loc, pages_per_seq=pages_per_seq)
    places = _lengths(input_ids, **lists, seq_start=seq_len.cumsum(0) - seq_len)
    lens = places["kv_lens"]
    bounds = places.get("qo_indptr")
    if bounds is None:
        bounds = _int32(import_torch().arange(lens.shape[0] + 1, device=lens.device))
    (pages,) = _of_requests(lens.shape[0], pages_per_seq=pages_per_seq)
    # Counts of padded requests are old ones.
    ends = pages.cumsum(0).clamp(max=cache_loc.shape[0])
    return [lens, bounds, _with_zero(ends), _int32(cache_loc).clone()]


def apply_rope_with_input_pos(
    x: Tensor, freqs_cis: Tensor, input_pos: Tensor | None, layout: str
) -> Tensor:
    """Rotate queries or keys of equally long requests by the positions from input_pos on.

    Differences from AutoDeploy: tokens without a row of freqs_cis stay as they are.
    """
    check_tensors(x=x, freqs_cis=freqs_cis)
    if sorted(layout) != sorted("bsnd") or layout[-1] != "d":
        raise ValueError(
            f"layout: needs the letters b, s and n in any order, then d, got {layout!r}; pass the "
            f"axes of x"
        )
    check_axes("x", x, ", ".join(layout))
    torch = import_torch()
    axes = [layout.index(letter) for letter in "bsnd"]
    rows = x.permute(axes)
    batch, seqlen = rows.shape[:2]
    if input_pos is None:
        input_pos = torch.zeros(batch, dtype=torch.int32, device=x.device)
    check_tensors(input_pos=input_pos)
    if input_pos.shape != (batch,):
        raise ValueError(
            f"input_pos: needs shape ({batch},), the requests of x, got {tuple(input_pos.shape)}; "
            f"pass one position per request"
        )
    numbers = torch.arange(seqlen, dtype=input_pos.dtype, device=x.device)
    with _ROPE:
        turned = _rotated(rows.flatten(0, 1), (input_pos[:, None] + numbers).flatten(), freqs_cis)
    back = [axes.index(axis) for axis in range(4)]
    result: Tensor = turned.view(rows.shape).permute(back).contiguous()
    return result


def apply_rope_on_flattened_inputs(
    x: Tensor, freqs_cis: Tensor, input_pos: Tensor, seq_lens: Tensor, seq_start_indices: Tensor
) -> Tensor:
    """Rotate queries or keys of any requests by the positions from input_pos on.

    Differences from AutoDeploy: rows of no request hold anything.
    """
    lists = {"input_pos": input_pos, "seq_lens": seq_lens, "seq_start_indices": seq_start_indices}
    check_tensors(x=x, freqs_cis=freqs_cis, **lists)
    check_axes("x", x, "total_tokens, heads, head_dim")
    check_integers(**lists)
    offsets = _with_zero(seq_start_indices + seq_lens)
    with _ROPE:
        rotated: Tensor = _rotated(x, positions_of(offsets, _int32(input_pos), len(x)), freqs_cis)
    return rotated


def _attend_flattened(
    rows: Any, lists: dict[str, Any], cache_loc: Any, page_table: Any, caches: Any, freqs_cis: Any
) -> Any:
    """Write and attend in slots, or in the pages that a table has for each slot."""
    named = {**lists, "cache_loc": cache_loc}
    given = _checked(*rows, *caches, **named)
    _of_requests(max(numbers.shape[0] for numbers in named.values()), **named)
    places = _lengths(given[0], **lists)
    (slots,) = _of_requests(places["kv_lens"].shape[0], cache_loc=cache_loc)
    if page_table is None:
        places["block_table"] = _int32(slots)[:, None]
        return _attend("cache_loc", given, caches, freqs_cis, places)
    check_tensors(page_table=page_table)
    check_axes("page_table", page_table, "rows, max_pages")
    exists = (slots >= 0) & (slots < page_table.shape[0])
    table = page_table.index_select(0, slots.clamp(0, page_table.shape[0] - 1))
    places["block_table"] = table.masked_fill(~exists[:, None], -1)
    return _attend("page_table", given, caches, freqs_cis, places)


def _checked(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, **lists: Any) -> list[Any]:
    """Check that these are tensors with the right numbers of axes; give q, k and v four."""
    check_tensors(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, **lists)
    for name, tensor in lists.items():
        check_axes(name, tensor, "batch")
    check_integers(**lists)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_axes(name, cache, "slots, max_seq_len, kv_heads, head_dim")
        if cache.dtype.itemsize == 1:
            raise TypeError(
                f"{name}: needs q's dtype, {q.dtype}, got {cache.dtype}; allocate it so, or write "
                f"and read FP8 caches by cumla.append_kv_cache and cumla.attention"
            )
    check_new_rows(k=(k, k_cache), v=(v, v_cache))
    q, k = _with_heads("q", q, k_cache), _with_heads("k", k, k_cache)
    for what, found, wanted, kind in (
        ("tokens", k.shape[:2], q.shape[:2], ValueError),
        ("columns of a head", k.shape[3], q.shape[3], ValueError),
        ("dtype", k.dtype, q.dtype, TypeError),
    ):
        if found != wanted:
            raise kind(
                f"k: needs the {what} of q, {wanted}, got {found}; pass both of the same layer"
            )
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q: needs a multiple of the {k.shape[2]} heads of k, got {q.shape[2]}; check the two"
        )
    return [q, k, _with_heads("v", v, v_cache)]


def _with_heads(name: str, rows: Any, cache: Any) -> Any:
    check_axes(name, rows, "batch, seqlen, heads * head_dim", "batch, seqlen, heads, head_dim")
    if len(rows.shape) == 4:
        return rows
    columns, head_dim = rows.shape[2], cache.shape[3]
    if not head_dim or columns % head_dim:
        raise ValueError(
            f"{name}: needs a multiple of the {head_dim} columns of a head in the cache, got shape "
            f"{tuple(rows.shape)}; pass the cache of this layer"
        )
    return rows.unflatten(2, (columns // head_dim, head_dim))


def _int32(numbers: Any) -> Any:
    """Convert, unless they are; AutoDeploy's sums of lengths are int64."""
    return numbers.to(import_torch().int32)


def _with_zero(ends: Any) -> Any:
    return import_torch().nn.functional.pad(_int32(ends), (1, 0))


def _is_generate_only(rows: Any) -> bool:
    """Return whether each request has one token; a single token may belong to any request."""
    return bool(rows.shape[1] == 1 and rows.shape[0] > 1)


def _requests(rows: Any, seq_len: Any) -> int:
    """Count the requests that the shapes show."""
    return int((rows if _is_generate_only(rows) else seq_len).shape[0])


def _of_requests(count: int, **lists: Any) -> list[Any]:
    """Cut lists to the requests that there are; one for all would be repeated silently."""
    for name, numbers in lists.items():
        if numbers.shape[0] < count:
            raise ValueError(
                f"{name}: needs a number for each of the {count} requests, got shape "
                f"{tuple(numbers.shape)}; describe the same requests"
            )
    return [numbers[:count] for numbers in lists.values()]


def _lengths(rows: Any, seq_len: Any, input_pos: Any, seq_start: Any) -> dict[str, Any]:
    """Compute the keys of each request and, unless each has one token, where its tokens begin."""
    count = _requests(rows, seq_len)
    seq_len, input_pos = _of_requests(count, seq_len=seq_len, input_pos=_int32(input_pos))
    if _is_generate_only(rows):
        # Without keys, a padded request has no place to write to, and sees nothing.
        return {"kv_lens": (input_pos + 1).masked_fill(seq_len == 0, 0)}
    (seq_start,) = _of_requests(count, seq_start=seq_start)
    ends = _with_zero(seq_start + seq_len)
    return {"kv_lens": input_pos + _int32(seq_len), "qo_indptr": ends}


def _attend(pages: str, rows: Any, caches: Any, freqs_cis: Any, places: dict[str, Any]) -> Any:
    """Write new rows into the caches and attend; out has the heads of a token in one axis."""
    lead, (k_cache, v_cache) = rows[0].shape[:2], caches
    q, k, v = (x.flatten(0, 1) for x in rows) if "qo_indptr" in places else rows
    writing, attending = _NAMES[pages]
    with writing:
        rotation: dict[str, Any] = {}
        if freqs_cis is not None and freqs_cis.numel() > 0:
            rotation = {"q": q, "q_out": q.new_empty(q.shape), **_table(freqs_cis, q.shape[-1])}
        append_kv_cache(k, v, k_cache, v_cache, **places, **rotation)
    with attending:
        out = attention(rotation.get("q_out", q), k_cache, v_cache, **places).out
    return out.view(*lead, out.shape[-2] * out.shape[-1])


def _table(freqs_cis: Any, head_dim: int) -> dict[str, Any]:
    """Name cosines and sines, and where the columns begin that they rotate."""
    check_axes("freqs_cis", freqs_cis, "max_position, rotary_dim / 2, 2")
    offset = head_dim - 2 * freqs_cis.shape[1]
    if freqs_cis.shape[2] != 2 or offset < 0:
        raise ValueError(
            f"freqs_cis: needs shape (max_position, rotary_dim / 2, 2) with rotary_dim at most "
            f"{head_dim}, the columns of a head, got {tuple(freqs_cis.shape)}; pass the table of "
            f"this model"
        )
    return {"cos_sin": (freqs_cis[..., 0], freqs_cis[..., 1]), "rotary_offset": offset}


def _rotated(x: Any, positions: Any, freqs_cis: Any) -> Any:
    """Rotate rows (tokens, heads, head_dim) into a new tensor."""
    return apply_rope(x, None, positions, **_table(freqs_cis, x.shape[-1]))[0]
