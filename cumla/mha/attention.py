# SPDX-License-Identifier: Apache-2.0
"""Attention of many heads over cached keys and values: :func:`attention` and its plan."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from cumla import reference
from cumla.core.arguments import (
    SINKS,
    Views,
    as_number,
    bind,
    check_dtype,
    check_layout,
    checked_flag,
    checked_int,
    checked_max_kv_len,
    checked_window,
    dtype_name,
    window_sides,
)
from cumla.core.names import arg
from cumla.core.operation import Both, Scheduled
from cumla.core.paged import (
    RAGGED_LENGTHS,
    Attend,
    TableOrList,
    by_head,
    check_made_for,
    check_ragged_lengths,
    check_ragged_pages,
    check_rows,
    checked_pages,
    refuse_value,
)
from cumla.core.prefixes import (
    GROUPS,
    PrefixSchedule,
    check_groups_given,
    check_prefix_arrays,
    check_prefix_options,
    check_shared_pages,
    checked_max_pages,
    has_whole_groups,
)
from cumla.core.spec import (
    OUT_AND_LSE,
    SOFTMAX_SCALE,
    Factor,
    Option,
    Spec,
    array,
    flag,
    in_parts,
    optional,
    record,
)
from cumla.core.state import AttentionState
from cumla.launch.device import checked_sm_count, sm_count_of
from cumla.launch.mha.attention import E4M3_COLUMNS
from cumla.launch.mha.choice import RULES, with_caps
from cumla.launch.mha.key import MHAKey
from cumla.launch.mha.launch import MHAArguments, attention_launch
from cumla.launch.mha.mask_rows import SPECS as MASK_SPECS
from cumla.launch.mha.prefixes import (
    PREFIX_SPECS,
    prefix_attention_launches,
    prefix_schedule_launches,
)
from cumla.launch.module import load
from cumla.launch.split.invariant_parts import SPECS as INVARIANT_SPECS
from cumla.launch.split.invariant_parts import invariant_parts_launch
from cumla.launch.split.plan import BLOCK_TOKENS, MOST_PARTS, MOST_TOKENS
from cumla.launch.split.ragged_schedule import ragged_schedule_launch, schedule_spec
from cumla.mha.arguments import (
    DTYPES,
    E4M3,
    KV_LAYOUT,
    batched,
    check_mask_batch,
    checked_layout,
    checked_mask,
    checked_scales,
    swapped,
)
from cumla.mha.bias import AttentionBias, check_beside, checked_bias, checked_form
from cumla.mha.mask import AttentionMask

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable
    from cumla.core.paged import Host, Results
    from cumla.launch.mha.append_kv_cache import Scale
    from cumla.launch.source import KernelSpec
    from cumla.prefix_groups import PrefixGroups

__all__ = ["AttentionPlan", "attention"]

_MOST_COLUMNS = 512
_E4M3 = "float8_e4m3fn"
_PIECE_TOKENS = RULES.piece_blocks * BLOCK_TOKENS
_FACTORS = ("k_scale", "v_scale")
_MOST_ROWS = (1 << 31) - 128  # of a kv head, that the kernels can number
_SIZES = (
    *("total_tokens", "num_heads", "num_kv_heads", "head_dim", "head_dim_v", "page_size"),
    *("dtype", "cache_dtype", "q_len"),
)


def checked_softcap(name: str, value: Any) -> float:
    """Return the bound of the scores."""
    cap = as_number(name, value)
    if not 1e-3 <= cap <= 1e6:
        raise ValueError(
            f"{arg(name)}: needs a number from 0.001 to 1000000.0, got {value}; leave it out for "
            f"none"
        )
    return cap


ATTENTION = Spec(
    "attention",
    (
        array("q"),
        array("k"),
        array("v"),
        optional("kv_lens"),
        optional("qo_indptr"),
        optional("block_table"),
        optional("kv_indptr"),
        optional("kv_indices"),
        flag("causal", True),
        Option("window", None, checked_window, "int[]?"),
        record("mask", AttentionMask),
        record("bias", AttentionBias),
        optional("groups", in_parts("groups", "prefix lengths")),
        Option("softcap", None, checked_softcap, "float?"),
        optional("sinks"),
        SOFTMAX_SCALE,
        Factor("k_scale"),
        Factor("v_scale"),
        KV_LAYOUT,
        *OUT_AND_LSE,
        flag("batch_invariant", False),
    ),
    positional=3,
    kernels=(
        *("mla_attention_schedule", "invariant_parts", "attention_", "mask_rows"),
        *("find_prefix_groups", "prefix_requests", "combine_prefixes"),
    ),
    returns=("out", "lse"),
    result=AttentionState,
    planned=("kv_lens", "qo_indptr", "kv_indptr", "groups"),
)


@ATTENTION
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    kv_lens: Any = None,
    qo_indptr: Any = None,
    block_table: Any = None,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    causal: bool = True,
    window: int | Sequence[int | None] | None = None,
    mask: AttentionMask | None = None,
    bias: AttentionBias | None = None,
    groups: PrefixGroups | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    softmax_scale: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_layout: str = "NHD",
    out: Any = None,
    lse: Any = None,
    batch_invariant: bool = False,
    stream: Any = None,
) -> AttentionState:
    """Attend to keys and values of many heads: MHA, GQA and MQA, decoding and prefill in one call.

    Query head ``h`` uses kv head ``h // (num_heads // num_kv_heads)``. With the sums over the keys
    that a query sees, and c being `softcap`::

        score = softmax_scale * q.k + bias      or, with softcap, c * tanh(softmax_scale * q.k / c)
        lse   = log(sum(exp(score)))            or, with sinks, log(exp(sink) + sum(exp(score)))
        out   = sum(exp(score - lse) * v)

    Query i of the n of a request with kv_len keys has position ``p = kv_len - n + i``, so the last
    query is at the last key. It sees key j if ``p - left <= j <= p + right``. Requests may have any
    numbers of queries: decoding, drafts and chunks of a prefill go together in one call. Arrays on
    the GPU are computed by CUDA kernels (compute capability 9.0), on the caller's stream and
    without waiting for it; arrays on the CPU by :func:`cumla.reference.attention`.

    Parameters
    ----------
    q : array
        ``(total_tokens, num_heads, head_dim)`` with qo_indptr, or ``(batch, q_len, num_heads,
        head_dim)`` without, bfloat16 or float16, head_dim a multiple of 8 up to 512, or float32,
        head_dim a multiple of 4; of CuPy, PyTorch, JAX or NumPy. float32 takes far longer, because
        tensor cores do not multiply it. Any strides that are multiples of 16 bytes, the last axis
        contiguous.
    k, v : array
        Pages ``(num_pages, page_size, num_kv_heads, head_dim)`` of q's dtype, of any page size; v
        may have another head_dim_v, a multiple of 8 up to 512. num_heads is a multiple of
        num_kv_heads. Strides as for q; for a packed cache pass its two parts. Or rows without
        pages, ``(total_kv, num_kv_heads, head_dim)``. Both may be float8_e4m3fn, or uint8 with its
        bits, with a multiple of 16 columns up to 256.
    kv_lens : array
        ``(batch,)`` int32: keys of each request, those of its queries included. Clamped to what the
        pages of the request hold. For rows without pages, the differences of kv_indptr by default.
    qo_indptr : array, optional
        ``(batch + 1,)`` int32: where the query tokens of each request begin in q, and where the
        last ones end. The numbers must be non-decreasing. Rows before the first and from the last
        on belong to no request; no results are written for them.
    block_table : array, optional
        ``(batch, max_pages)`` int32, rows contiguous: page numbers of each request. A contiguous
        cache ``(slots, max_len, num_kv_heads, head_dim)`` has one column, the slots.
    kv_indptr, kv_indices : array, optional
        In place of block_table: the pages of request r are
        ``kv_indices[kv_indptr[r] : kv_indptr[r + 1]]``. ``(batch + 1,)`` and ``(pages,)`` int32.
        For rows without pages pass kv_indptr alone, which counts rows.
    causal : bool
        No query sees a key after its own position.
    window : int or pair of int, optional
        left, or (left, right), both inclusive. -1 or None is unbounded, and so is a side that is
        not given. A sliding window of W tokens is left = W - 1.
    mask : AttentionMask, optional
        What each query sees, as arrays that kernels read: image spans, chunks, blocks, requests
        that are causal or not, trees of drafts. In place of a window, which the mask's builders
        take. Where the mask has `end`, `causal` has no effect.
    bias : AttentionBias, optional
        A number for each score, by the distance of the key: ALiBi, or a table. Not with a mask or
        softcap, nor with more than 256 columns of k or v.
    groups : PrefixGroups, optional
        Neighbouring requests whose pages begin alike, as :func:`cumla.find_prefix_groups` finds
        them: the pages of a prefix are read once for all requests of a group. For keys in pages
        with a contiguous block_table, without window, mask or bias. Results differ from those
        without groups only by rounding. With batch_invariant they are the same bits: groups are
        checked, and save nothing.
    softcap : float, optional
        Bound of the scores, above 0.
    sinks : array, optional
        ``(num_heads,)`` float32: a score per head that takes part in every sum of weights and has
        no value. It is not multiplied by softmax_scale, and lse includes it.
    softmax_scale : float, optional
        Factor of the scores, ``head_dim ** -0.5`` by default.
    k_scale, v_scale : float or array, optional
        Factors of e4m3 keys and values: the value is the stored number times the factor, above 0. A
        number is between 2 ** -126 and 2 ** 126. An array is float32, ``(1,)``,
        ``(num_kv_heads,)`` or, with block_table or where q has four axes, ``(batch,
        num_kv_heads)``; the kernel reads it, and it may change between the replays of a graph. 1 by
        default.
    kv_layout : str
        ``"NHD"``, or ``"HND"`` for pages ``(num_pages, num_kv_heads, page_size, head_dim)``. The
        two cannot be told apart by shape: the wrong one gives wrong results without an error.
    out, lse : array, optional
        Where to write: q's shape with head_dim_v columns, in q's dtype or float32, and
        float32 of q's shape without its columns.
    batch_invariant : bool
        Give a request the same bits whatever else is in the batch: other requests, their number,
        its place among them. A request with at most 64 query rows per kv head, one tile of the
        kernel, is then split every 2048 keys; other requests are not split. This takes longer than
        splits that fill the GPU. The workspace is sized for the longest request that block_table
        can hold: pass no more columns than needed, or make a plan.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    AttentionState
        ``out`` and ``lse``. A query that sees no key has out 0 and lse -inf or, with sinks, the
        sink. New arrays hold undefined values in rows of no request.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`.

    Notes
    -----
    Offsets and page numbers are not checked, except with ``CUMLA_CHECK=1``. No value causes an
    access outside of the arrays, and pages outside of the cache read as zeros. Keys after those of
    a request, or before all windows, never affect a result, NaN included.

    Sources: FlashAttention-2 (arXiv:2307.08691), sinks as in gpt-oss (arXiv:2508.10925), softcap as
    in Gemma 2 (arXiv:2408.00118).

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q = np.ones((5, 8, 64), np.float16)  # 1 and 4 new tokens
    >>> k = v = np.ones((4, 16, 2, 64), np.float16)
    >>> lens, qo_indptr, table = np.int32([20, 4]), np.int32([0, 1, 5]), np.int32([[0, 1], [3, 0]])
    >>> cumla.attention(q, k, v, kv_lens=lens, qo_indptr=qo_indptr, block_table=table).out.shape
    (5, 8, 64)
    """
    state: AttentionState = _ATTENTION.call(
        *(q, k, v, kv_lens, qo_indptr, block_table, kv_indptr, kv_indices, causal, window, mask),
        *(
            bias,
            groups,
            softcap,
            sinks,
            softmax_scale,
            k_scale,
            v_scale,
            kv_layout,
            out,
            lse,
            batch_invariant,
            stream,
        ),
    )
    return state


def _check_no_window(window: tuple[int, int] | None) -> None:
    """Refuse a window beside a mask."""
    if window is not None:
        raise ValueError(
            f"{arg('window')}: needs None beside {arg('mask')}, got {window}; pass it to the "
            f"builder of the mask, or build AttentionMask.windows{window}"
        )


class _Attend(Attend[MHAArguments, MHAKey]):
    trusted = ("block_table", "kv_indices")

    def arguments(self, views: Views, options: Any) -> MHAArguments:
        """Check all but the lengths."""
        given = {name: view for name, view in views.items() if view is not None}
        q, k, v = (checked_rows(name, given) for name in ("q", "k", "v"))
        has_pages = len(k.shape) == 4
        if has_pages and options.kv_layout == "HND":
            k, v = swapped(k), swapped(v)
        check_heads(q, k, v)
        pages = _checked_form(given, has_pages, options.kv_layout)
        bind(SINKS, views, {"num_heads": q.shape[-2]})
        if not has_pages:
            k, v = batched(k), batched(v)  # one page
        numbers = options.k_scale, options.v_scale
        factors = _checked_factors(given, numbers, (k, v), pages)
        scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
        window, cap = window_sides(options.window, options.causal), options.softcap or 0.0
        sinks, mask = given.get("sinks"), checked_mask(given, prod(q.shape[:-2]))
        if not mask.is_empty:
            _check_no_window(options.window)
            window = -1, -1
        bias = checked_bias(given, prod(q.shape[:-2]), q.shape[-2], _told_batch(q, pages))
        if bias.form:
            check_beside(not mask.is_empty, options.softcap, max(q.shape[-1], v.shape[3]))
        k_scale, v_scale = factors
        return MHAArguments(
            *(q, k, v, pages, sinks, scale, cap, window, options.causal, options.kv_layout),
            *(k_scale, v_scale, mask, bias),
        )

    def value_dim(self, arguments: MHAArguments) -> int:
        return arguments.v.shape[3]

    def check_values(self, host: Host, arguments: MHAArguments) -> None:
        """Look at page numbers, and at the lengths that came with them."""
        a = arguments
        num_pages, page_size = a.k.shape[:2]
        tokens = prod(a.q.shape[:-2])
        check_shared_pages(host, page_size, tokens)
        if a.pages is None:
            _check_lengths(host, tokens, 1)
            if "kv_indptr" in host:
                need = f"an offset from 0 to {page_size}, the rows of {arg('k')}"
                bounds = host["kv_indptr"]
                wrong = bounds > page_size
                refuse_value("kv_indptr", bounds, wrong, need, "the kernels would clamp it")
            return
        has_list = "kv_indptr" in host  # whose offsets come before what is between them
        if has_list:
            _check_lengths(host, tokens, page_size)
        if "kv_lens" in host:
            check_ragged_pages(host, num_pages, page_size, _first_seen(host, a))
        if not has_list:
            _check_lengths(host, tokens, page_size)

    def recipe(
        self, key: Any, arguments: MHAArguments, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        """Describe one launch, or two for a mixed batch or for shared prefixes."""
        if key.both and key.batch and 0 not in arguments.q.shape:
            out, lse = outs
            return prefix_attention_launches(key, buffer, arguments, out, by_head(lse))
        launches = super().recipe(key, arguments, outs, buffer)
        if not launches or not key.beside:
            return launches
        chunks = super().recipe(key.beside, arguments, outs, key.beside_at(buffer))
        return (*chunks, *launches)

    def reference(self, host: Host, arguments: MHAArguments) -> Results:
        a = arguments
        options: dict[str, Any] = {"causal": a.causal, "window": a.window}
        records: dict[str, dict[str, Any]] = {}
        for name, value in host.items():
            of, _, field = name.partition(".")
            if name in GROUPS:  # which change nothing but time
                continue
            (records.setdefault(of, {}) if field else options)[field or name] = value
        if "mask" in records:
            options |= {"mask": AttentionMask(**records["mask"]), "window": None}
        if "bias" in records:
            options["bias"] = AttentionBias(**records["bias"])
        options |= {"softcap": a.softcap or None, "softmax_scale": a.softmax_scale}
        if a.k.dtype in E4M3:
            options.setdefault("k_scale", a.k_scale.number)
            options.setdefault("v_scale", a.v_scale.number)
        return reference.attention(**options, kv_layout=a.layout)


class _Attention(Scheduled[MHAArguments, MHAKey]):
    def batch(self, attend: MHAArguments, views: Views) -> int | None:
        return attend.q.shape[0] if len(attend.q.shape) == 4 else None

    def arguments(self, views: Views, options: Any) -> Both[MHAArguments]:
        given = {name for name, view in views.items() if view is not None}
        q = checked_rows("q", views)
        _check_lengths_given(given, len(q.shape), len(views["k"].shape) if views["k"] else 0)
        found = super().arguments(views, options)
        lengths, attend, _ = found
        batch = _batch_of(lengths, attend)
        if attend.pages is not None:
            check_rows(attend.pages, batch)
        check_mask_batch(attend.mask, batch)
        if has_whole_groups(given):
            check_prefix_options(options.window, not attend.mask.is_empty)
            check_prefix_arrays(attend.q, attend.pages, None)
            _check_no_bias(attend.bias.form)
            _check_scales_of_groups(attend)
        return found

    def key(self, arguments: Both[MHAArguments], device: int) -> MHAKey:
        lengths, attend, options = arguments
        batch, shape = _batch_of(lengths, attend), _shape_of(attend)
        sm_count = sm_count_of(device)
        cuts = _cuts_of(batch, attend) if options.batch_invariant else _NO_CUTS
        masked = not attend.mask.is_empty
        causal, left = attend.causal, attend.window[0]
        is_shared = lengths[-1] is not None and not options.batch_invariant
        columns = attend.pages.shape[1] if is_shared and attend.pages is not None else 0
        last = columns, attend.bias.form
        return _key(batch, shape, causal, left, device, sm_count, cuts, masked, *last)


def _batch_of(lengths: tuple[Any, ...], attend: MHAArguments) -> int:
    if len(attend.q.shape) == 4:
        return attend.q.shape[0]
    size: int = lengths[0].shape[0] - 1
    return size


def _shape_of(a: MHAArguments) -> tuple[Any, ...]:
    """Read off what a key holds of the arrays, as _SIZES lists it."""
    *tokens, num_heads, head_dim = a.q.shape
    q_len = tokens[1] if len(tokens) == 2 else 0
    page_size = 0 if a.pages is None else a.k.shape[1]
    heads = num_heads, a.k.shape[2], head_dim, a.v.shape[3]
    cache_dtype = _E4M3 if a.k.dtype in E4M3 else a.k.dtype
    return prod(tokens), *heads, page_size, a.q.dtype, cache_dtype, q_len


_NO_CUTS = (False, 1, 0)


def _cuts_of(batch: int, a: MHAArguments) -> tuple[bool, int, int]:
    """Tell into how many pieces the longest request is cut, and how many more than one all have."""
    tokens = prod(a.k.shape[:2])  # of rows without pages
    if a.pages is not None:
        tokens = a.pages.shape[-1] * a.k.shape[1]
    if a.pages is not None and len(a.pages.shape) == 2:  # any row may be as long
        return _cuts(batch, tokens)
    return True, max(1, -(-tokens // _PIECE_TOKENS)), tokens // _PIECE_TOKENS


def _cuts(batch: int, max_kv_len: int) -> tuple[bool, int, int]:
    """Return the same of requests that may all be so long."""
    pieces = max(1, -(-max_kv_len // _PIECE_TOKENS))
    return True, pieces, batch * (pieces - 1)


@lru_cache(maxsize=1024)
def _key(
    batch: int,
    shape: tuple[Any, ...],
    causal: bool,
    window_left: int,
    device: int | None,
    sm_count: int,
    cuts: tuple[bool, int, int],
    masked: bool = False,
    max_pages: int = 0,
    bias: str = "",
) -> MHAKey:
    """Make a key, the same object each time: it keeps what follows from it."""
    *sizes, q_len = shape
    causal = causal and not masked  # of which the arrays tell
    of_gpu: tuple[Any, ...] = (device, sm_count, window_left)
    modes: tuple[Any, ...] = (causal, q_len, *of_gpu, *cuts, masked, "batch", max_pages, bias)
    key = MHAKey(batch, *sizes, *modes)
    rows = key.total_tokens * (2 * key.num_heads if max_pages else key.heads_per_group)
    if rows > _MOST_ROWS:
        raise ValueError(
            f"{arg('q')}: needs fewer query tokens, or heads, than a schedule can hold, got "
            f"{key.total_tokens} tokens; cut the call in two"
        )
    if key.batch_invariant and key.parts > MOST_PARTS:
        raise ValueError(
            f"{arg('batch_invariant')}: needs at most {MOST_PARTS} pieces of requests, got "
            f"{key.parts}; lower a plan's max_kv_len, pass fewer pages, or fewer requests at once"
        )
    return key


# --- checks --------------------------------------------------------------------------------------


def checked_rows(name: str, given: Views) -> ArrayView:
    view = given[name]
    assert view is not None
    q = given["q"]
    assert q is not None
    if name == "q":
        check_dtype(name, view.dtype, DTYPES)
    else:
        of_q = (q.dtype,) if q.dtype == "float32" else (q.dtype, *E4M3)
        check_dtype(name, view.dtype, of_q, f"convert it, or {arg('q')}")
    axes = {
        "q": "(total_tokens, num_heads, head_dim) or (batch, q_len, num_heads, head_dim)",
        "k": "(num_pages, page_size, num_kv_heads, head_dim) or (total_kv, num_kv_heads, head_dim)",
        "v": "(num_pages, page_size, num_kv_heads, head_dim_v), or rows, as k",
    }[name]
    columns = view.shape[-1] if len(view.shape) in (3, 4) else 0
    step, most = _column_step(view.dtype)
    if not columns or columns % step or columns > most:
        way_out = "pad the columns with zeros"
        if not columns:
            packed = ", of a packed cache pass its two parts" if name != "q" else ""
            way_out = f"reshape it{packed}"
        elif columns > most:
            way_out = "keep this cache in 16 bits" if view.dtype in E4M3 else "more do not fit"
        raise ValueError(
            f"{arg(name)}: needs shape {axes} with a multiple of {step} columns up to {most}, got "
            f"{view.shape}; {way_out}"
        )
    check_layout(name, view)
    return view


def _column_step(dtype: str) -> tuple[int, int]:
    """Tell of what number columns are a multiple, of rows of a dtype, and how many there may be."""
    if dtype in E4M3:
        return E4M3_COLUMNS.step, E4M3_COLUMNS[-1]
    return 4 if dtype == "float32" else 8, _MOST_COLUMNS


def check_heads(q: ArrayView, k: ArrayView, v: ArrayView) -> None:
    """Check that queries, keys and values fit together; pages have the order of NHD."""
    if (k.dtype in E4M3) != (v.dtype in E4M3):
        raise TypeError(
            f"{arg('v')}: needs the kind of numbers of {arg('k')}, {k.dtype}, got {v.dtype}; pass "
            f"both of one layer"
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{arg('k')}: needs the {q.shape[-1]} columns of {arg('q')}, got shape {k.shape}; "
            f"pass the cache of this layer"
        )
    if len(v.shape) != len(k.shape) or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"{arg('v')}: needs the pages, tokens and heads of {arg('k')}, {k.shape[:-1]}, got "
            f"shape {v.shape}; pass both of one layer"
        )
    if (0 in k.shape[-3:-1] and len(k.shape) == 4) or not k.shape[-2]:
        raise ValueError(
            f"{arg('k')}: needs at least one token a page and one kv head, got shape {k.shape}; "
            f"skip the call where there is no cache"
        )
    num_heads, num_kv_heads = q.shape[-2], k.shape[-2]
    if not num_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"{arg('q')}: needs a multiple of the {num_kv_heads} kv heads of {arg('k')}, got "
            f"{num_heads} heads in shape {q.shape}; check the axes of "
            f"{arg('k (kv_layout)')} and of {arg('q')}"
        )


def _checked_factors(
    given: Views,
    numbers: tuple[float | None, float | None],
    caches: tuple[ArrayView, ArrayView],
    pages: ArrayView | None,
) -> list[Scale]:
    q = given["q"]
    assert q is not None
    batch = _told_batch(q, pages)
    return [
        checked_scales(
            name, given.get(name), number, cache, batch, "with block_table or q of four axes"
        )
        for name, number, cache in zip(_FACTORS, numbers, caches, strict=True)
    ]


def _told_batch(q: ArrayView, pages: ArrayView | None) -> int | None:
    """Count the requests, if kernels know the number of a row's request."""
    if len(q.shape) == 4:
        return q.shape[0]
    return pages.shape[0] if pages is not None and len(pages.shape) == 2 else None


def _checked_form(given: Views, has_pages: bool, layout: str) -> ArrayView | None:
    """Check that page numbers come in one form, and return them; None for rows without pages."""
    names = {n for n in ("block_table", "kv_indptr", "kv_indices") if n in given}
    if has_pages:
        if ("block_table" in names and len(names) > 1) or not names & {"block_table", "kv_indices"}:
            raise ValueError(
                f"{arg('block_table')}: needs page numbers as {arg('block_table')}, or as "
                f"{arg('kv_indptr')} and {arg('kv_indices')}, got "
                f"{' and '.join(sorted(names)) or 'neither'}; pass one form, which for a "
                f"contiguous cache (slots, max_len, ...) is a block table of one column"
            )
        return checked_pages(given)
    if names - {"kv_indptr"} or layout != "NHD":
        raise ValueError(
            f"{arg('k')}: rows without pages, of shape {given['k'].shape if given['k'] else ()}, "
            f"take {arg('kv_indptr')} alone and {arg('kv_layout')} 'NHD', got "
            f"{' and '.join(sorted(names))} and {layout!r}; pass pages with four axes, or leave "
            f"these out"
        )
    return None


def _check_lengths_given(given: set[str], q_axes: int, k_axes: int) -> None:
    """Check that lengths are there, and those only that mean something."""
    if (q_axes == 3) != ("qo_indptr" in given):
        need = (
            f"offsets of the requests for {arg('q')} of three axes"
            if q_axes == 3
            else f"{arg('q')} of three axes"
        )
        way_out = (
            f"pass it, or {arg('q')} as (batch, q_len, ...)" if q_axes == 3 else "leave it out"
        )
        got = "None" if q_axes == 3 else f"{arg('q')} of {q_axes} axes"
        raise ValueError(f"{arg('qo_indptr')}: needs {need}, got {got}; {way_out}")
    if k_axes == 3 and "kv_indptr" not in given:
        raise ValueError(
            f"{arg('kv_indptr')}: needed for {arg('k')} and {arg('v')} without pages, to tell the "
            f"rows of each request, got None; pass it"
        )
    if k_axes == 4 and "kv_lens" not in given:
        raise ValueError(
            f"{arg('kv_lens')}: needed for keys in pages, got None; pass it, or {arg('k')} and "
            f"{arg('v')} as rows, of three axes, with {arg('kv_indptr')}"
        )
    if k_axes == 4 and ("kv_indptr" in given) != ("kv_indices" in given):
        raise ValueError(
            f"{arg('kv_indptr')}: needs {arg('kv_indices')} beside it for keys in pages, got one "
            f"of them; pass both, or {arg('block_table')}"
        )


def _first_seen(host: Host, a: MHAArguments) -> np.ndarray[Any, Any] | None:
    """Check mode: tell the first token of each request that a window lets its queries see."""
    left = a.window[0]
    if left < 0:
        return None
    bounds, lengths = host.get("qo_indptr"), host["kv_lens"].astype(np.int64)
    new = a.q.shape[1] if bounds is None else np.diff(bounds.astype(np.int64))
    return np.maximum(lengths - new - left, 0)


def _check_lengths(host: Host, total_tokens: int, page_size: int) -> None:
    """Check mode: raise for the first offset or length out of range."""
    absent = {"qo_indptr": np.zeros(1, np.int32), "kv_lens": np.zeros(0, np.int32)}
    known = absent | dict(host)
    if "kv_lens" not in host and "kv_indptr" in host:
        known["kv_lens"] = np.zeros(len(host["kv_indptr"]) - 1, np.int32)
    if {"qo_indptr", "kv_lens", "kv_indptr"} & set(host):
        check_ragged_lengths(known, total_tokens, page_size, MOST_TOKENS)


_SCHEDULE = PrefixSchedule[MHAKey](
    RAGGED_LENGTHS, ragged_schedule_launch, invariant_parts_launch, prefix_schedule_launches
)


_ATTEND = _Attend(attention_launch)
_ATTENTION = _Attention(_SCHEDULE, _ATTEND, ATTENTION)


class AttentionPlan(TableOrList[MHAKey]):
    """Schedule and workspace of :func:`attention`, to be used for every layer of a step.

    It works like :class:`cumla.MLADecodePlan`, with the same rules for buffers, streams, threads,
    CUDA graphs and errors. A graph serves any mix of up to `batch` requests and `total_tokens`
    query tokens: q is padded, and absent requests have equal offsets and no keys. Layers with and
    without a window need one plan each.

    Parameters
    ----------
    batch : int
        Requests.
    total_tokens, num_heads, head_dim : int
        As in ``q`` ``(total_tokens, num_heads, head_dim)``.
    num_kv_heads, head_dim_v : int, optional
        Of ``k`` and ``v``; num_heads and head_dim by default.
    page_size : int
        Tokens of a page; 0 for rows without pages.
    q_len : int, optional
        Query tokens of each request, where q is ``(batch, q_len, num_heads, head_dim)``: then
        total_tokens is ``batch * q_len``.
    dtype : str or dtype
        ``"bfloat16"``, ``"float16"`` or ``"float32"``, or any framework's dtype of that name: of q,
        and of k and v unless `cache_dtype` says otherwise.
    cache_dtype : str or dtype, optional
        ``"float8_e4m3fn"`` for e4m3 keys and values; dtype by default.
    causal, window, batch_invariant
        As in :func:`attention`; batch_invariant needs `max_kv_len`.
    mask_form : str, optional
        ``"rows"`` for runs with a mask that has no `tree`, ``"tree"`` for those with one; None for
        runs without a mask.
    bias_form : str, optional
        ``"linear"`` for runs with a bias of `slopes`, ``"table"`` for those with a `table`; None
        for runs without a bias.
    prefix_groups : bool
        Let updates take `groups`, requests that share prefixes. It needs `max_pages`.
    max_pages : int, optional
        With prefix_groups, and only then: columns of block_table, which is contiguous.
    max_kv_len : int, optional
        With batch_invariant, and only then: keys of the longest request that the plan is to serve.
        The buffer grows with it. Longer requests are computed, too, with their last split by one
        thread block per kv head. It does not change the bits of shorter requests.
    device, workspace, like, stream : optional
        As for :class:`cumla.MLADecodePlan`.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q = np.ones((5, 8, 64), np.float16)  # 1 and 4 new tokens
    >>> k = v = np.ones((4, 16, 2, 64), np.float16)
    >>> table, qo_indptr = np.array([[0, 1], [3, 0]], np.int32), np.array([0, 1, 5], np.int32)
    >>> plan = cumla.AttentionPlan.from_arrays(q, k, v, qo_indptr=qo_indptr)
    >>> plan.update(np.array([20, 4], np.int32), qo_indptr=qo_indptr)
    >>> for layer in range(3):
    ...     out, lse = plan.run(q, k, v, block_table=table)
    >>> out.shape, lse.shape
    ((5, 8, 64), (5, 8))
    """

    _operation = _ATTENTION

    def __init__(
        self,
        batch: int,
        total_tokens: int,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        head_dim_v: int | None = None,
        page_size: int = 64,
        q_len: int | None = None,
        dtype: str = "bfloat16",
        cache_dtype: str | None = None,
        causal: bool = True,
        window: int | Sequence[int | None] | None = None,
        mask_form: str | None = None,
        bias_form: str | None = None,
        batch_invariant: bool = False,
        max_kv_len: int | None = None,
        prefix_groups: bool = False,
        max_pages: int | None = None,
        device: int | None = None,
        workspace: Any = None,
        like: Any = None,
        stream: Any = None,
    ) -> None:
        self._causal = checked_flag("causal", causal)
        self._window = checked_window("window", window)
        self._mask_form = _checked_form_of_mask(mask_form, self._window)
        bias = checked_form(bias_form)
        heads = num_heads, num_kv_heads, head_dim, head_dim_v
        dtypes = dtype, cache_dtype
        shape = checked_shape(batch, total_tokens, heads, page_size, q_len, dtypes)

        cuts = _checked_cuts(batch, batch_invariant, max_kv_len)
        left, _ = window_sides(self._window, self._causal)
        masked = mask_form is not None
        columns = checked_max_pages(prefix_groups, max_pages, batch, page_size)
        if columns:
            check_prefix_options(self._window, masked)
            _check_no_bias(bias)
        if bias:
            check_beside(
                masked, None, max(head_dim, head_dim if head_dim_v is None else head_dim_v)
            )
        self._max_pages = columns
        last = 0 if cuts[0] else columns, bias  # batch-invariant requests share nothing

        def key_on(on: int | None) -> MHAKey:
            sm_count = sm_count_of(on)
            return _key(batch, shape, self._causal, left, on, sm_count, cuts, masked, *last)

        self._make(key_on, device, workspace, like, stream)
        names = ["kv_lens" if page_size else "kv_indptr=..."]
        names += ([] if q_len else ["qo_indptr=..."]) + (["groups=..."] if columns else [])
        vars(self)["_lengths"] = ", ".join(names)

    @classmethod
    def from_arrays(
        cls,
        q: Any,
        k: Any,
        v: Any,
        *,
        qo_indptr: Any = None,
        kv_layout: str = "NHD",
        causal: bool = True,
        window: int | Sequence[int | None] | None = None,
        mask_form: str | None = None,
        bias_form: str | None = None,
        batch_invariant: bool = False,
        max_kv_len: int | None = None,
        prefix_groups: bool = False,
        max_pages: int | None = None,
        workspace: Any = None,
        stream: Any = None,
    ) -> AttentionPlan:
        """Make a plan for the shapes of these arrays, with a buffer of q's framework.

        Arrays are as in :func:`attention`; only their shapes, dtypes and device are used. All other
        parameters are those of the class.
        """
        layout = checked_layout(kv_layout)
        arrays = {"q": q, "k": k, "v": v}
        if qo_indptr is not None:
            arrays["qo_indptr"] = qo_indptr
        options: dict[str, Any] = {"causal": causal, "window": window, "kv_layout": layout}
        options |= {"mask_form": mask_form, "bias_form": bias_form}
        options |= {"batch_invariant": batch_invariant}
        options |= {"max_kv_len": max_kv_len, "workspace": workspace}
        options |= {"prefix_groups": prefix_groups, "max_pages": max_pages}
        return cls._from(arrays, stream, **options)

    @classmethod
    def _numbers(
        cls, views: dict[str, ArrayView | None], options: dict[str, Any]
    ) -> dict[str, Any]:
        q, k, v = (checked_rows(name, views) for name in ("q", "k", "v"))
        if options.pop("kv_layout") == "HND" and len(k.shape) == 4:
            k, v = swapped(k), swapped(v)
        check_heads(q, k, v)
        *lead, num_heads, head_dim = q.shape
        batch, q_len = lead[0], lead[1] if len(lead) == 2 else None
        if q_len is None:
            _check_lengths_given({name for name in views if name != "k"}, 3, 0)
            batch = bind({"qo_indptr": RAGGED_LENGTHS["qo_indptr"]}, views, {})["batch"]
        return {
            "batch": batch,
            "total_tokens": prod(lead),
            "num_heads": num_heads,
            "head_dim": head_dim,
            "num_kv_heads": k.shape[-2],
            "head_dim_v": v.shape[-1],
            "page_size": k.shape[1] if len(k.shape) == 4 else 0,
            "q_len": q_len,
            "dtype": q.dtype,
            "cache_dtype": _E4M3 if k.dtype in E4M3 else None,
        }

    @staticmethod
    def workspace_bytes(
        batch: int,
        total_tokens: int,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        head_dim_v: int | None = None,
        batch_invariant: bool = False,
        max_kv_len: int | None = None,
        prefix_groups: bool = False,
        max_pages: int | None = None,
        sm_count: int | None = None,
    ) -> int:
        """Size of a plan's buffer in bytes, for any pages and dtypes; numbers as for the class.

        `sm_count` and errors are as in :meth:`cumla.MLADecodePlan.workspace_bytes`.
        """
        heads = num_heads, num_kv_heads, head_dim, head_dim_v
        shape = checked_shape(batch, total_tokens, heads, 64, None, ("bfloat16", None))
        sm_count = checked_sm_count(sm_count)
        cuts = _checked_cuts(batch, batch_invariant, max_kv_len)
        key = _key(batch, shape, False, -1, 0, sm_count, cuts)
        forms: list[dict[str, Any]] = [{}, {"page_size": 1}, {"window_left": 0}]
        if max(key.head_dim, key.head_dim_v) <= E4M3_COLUMNS[-1]:
            e4m3 = {"cache_dtype": _E4M3}
            forms += [e4m3, *({"bias": b} | c for b in ("linear", "table") for c in ({}, e4m3))]
        if batch and not total_tokens % batch:  # a plan may be made with q_len
            forms += [form | {"q_len": total_tokens // batch} for form in forms]
        columns = checked_max_pages(prefix_groups, max_pages, batch, 64)
        if columns and not cuts[0]:
            forms = [form | {"max_pages": columns, "causal": True} for form in forms]
        return max(replace(key, **form).layout.nbytes for form in forms)

    def update(
        self,
        kv_lens: Any = None,
        *,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        groups: PrefixGroups | None = None,
        stream: Any = None,
        **misplaced: Never,
    ) -> None:
        """Compute the schedule for these lengths, on the device.

        Lengths and groups are as in :func:`attention`; stream, captures and errors as in
        :meth:`cumla.MLADecodePlan.update`. With kv_indptr the runs that follow take ``kv_indices``,
        or rows without pages; without it they take ``block_table``. A plan with prefix_groups needs
        groups: the runs that follow take block tables with these prefixes.
        """
        if misplaced:
            raise self._misplaced("update", misplaced)
        self._renew(kv_lens, qo_indptr, kv_indptr, groups, stream)

    def _update(self, inputs: dict[str, Any], stream: Any, key: Hashable = None) -> None:
        self._check_lengths_given(inputs)
        super()._update(inputs, stream, key)

    @property
    def _has_pages(self) -> bool:  # type: ignore[override]
        return self.key.page_size != 0

    @property
    def _batch(self) -> int:
        return self.key.batch

    def _fixed(self) -> dict[str, Any]:
        modes = {"causal": self._causal, "batch_invariant": self.key.batch_invariant}
        return {"window": self._window, **modes}

    def _check_lengths_given(self, given: Mapping[str, Any]) -> None:
        """Check that an update has the lengths that this plan needs, and no others."""
        key = self.key
        if key.q_len and "qo_indptr" in given:
            raise ValueError(
                f"{arg('qo_indptr')}: needs a plan without q_len, got one for {key.q_len} query "
                f"tokens of each request; leave it out"
            )
        needed = {
            "qo_indptr": (not key.q_len, "a plan without q_len, to tell the queries of each"),
            "kv_indptr": (
                not key.page_size,
                "a plan for rows without pages, to tell those of each",
            ),
            "kv_lens": (bool(key.page_size), "a plan for pages, to tell the keys of each"),
        }
        check_groups_given(given, self._max_pages)
        for name, (is_needed, why) in needed.items():
            if is_needed and name not in given:
                raise ValueError(f"{arg(name)}: needed for {why} request, got None; pass it")

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        block_table: Any = None,
        kv_indices: Any = None,
        mask: AttentionMask | None = None,
        bias: AttentionBias | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        softmax_scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        kv_layout: str = "NHD",
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
        **misplaced: Never,
    ) -> AttentionState:
        """Attend with the schedule of the last update, as :meth:`cumla.MLADecodePlan.run` does.

        Parameters
        ----------
        q, k, v, block_table, kv_indices, mask, bias, softcap, sinks, softmax_scale, k_scale, \
v_scale, kv_layout, out, lse, stream
            As in :func:`attention`. Pass block_table or kv_indices, as the last update requires,
            and neither for rows without pages. Pass a mask if the plan has a `mask_form`, and of
            that form; likewise a bias.
        """
        if misplaced:
            raise self._misplaced("run", misplaced)
        state: AttentionState = self._call(
            *(q, k, v, block_table, kv_indices, mask, bias, softcap, sinks, softmax_scale),
            *(k_scale, v_scale, kv_layout, out, lse, stream),
        )
        return state

    def _load(self, device: int, capturing: Callable[[], bool]) -> None:
        cuts = INVARIANT_SPECS if self.key.batch_invariant else ()
        masks = MASK_SPECS if self.key.masked else ()  # whose arrays may be built under capture
        chunks = () if self.key.both or self.key.beside is None else (self.key.beside.choice.spec,)
        key = self.key.both or self.key
        specs: tuple[KernelSpec, ...] = (
            schedule_spec(key),
            *cuts,
            *masks,
            key.choice.spec,
            *chunks,
            *map(with_caps, (key.choice.spec, *chunks)),  # a run may have a softcap
            *(PREFIX_SPECS if self.key.both else ()),
        )
        for spec in specs:
            load(spec, device, capturing=capturing)

    def _check_lengths(self, host: Host) -> None:
        _check_lengths(host, self.key.total_tokens, self.key.schedule_page_size)

    def _check_shape(self, arguments: MHAArguments) -> None:
        made = tuple([getattr(self.key, name) for name in _SIZES])
        check_made_for(_SIZES, made, _shape_of(arguments))
        if arguments.pages is not None:
            check_rows(arguments.pages, self.key.batch)
        if self._max_pages:
            check_prefix_arrays(arguments.q, arguments.pages, self._max_pages)
            _check_scales_of_groups(arguments)
        form = self._mask_form or "none"
        if arguments.mask.form != form:
            words = {"none": "no mask", "rows": "a mask without tree", "tree": "one with a tree"}
            got = arguments.mask.form
            raise ValueError(
                f"{arg('mask')}: needs {words[form]} for a plan of mask_form {self._mask_form!r}, "
                f"got {words[got]}; make a plan with mask_form={None if got == 'none' else got!r}"
            )
        check_mask_batch(arguments.mask, self.key.batch)
        if arguments.bias.form != self.key.bias:
            told = {"": "no bias", "linear": "a bias of slopes", "table": "a bias by a table"}
            raise ValueError(
                f"{arg('bias')}: needs {told[self.key.bias]} for a plan of bias_form "
                f"{self.key.bias or None!r}, got {told[arguments.bias.form]}; make a plan for each "
                f"form of biases"
            )


def _check_no_bias(form: str) -> None:
    """Refuse a bias beside groups: keys of a prefix have other positions there."""
    if form:
        raise ValueError(
            f"{arg('bias')}: needs None beside {arg('groups')}, got one; leave out the groups"
        )


def _check_scales_of_groups(arguments: MHAArguments) -> None:
    """Refuse scales of requests: a group has those of its first request, or of none."""
    for name in _FACTORS:
        view = getattr(arguments, name).view
        if view is not None and view.shape[0] > 1 and view.strides[0]:
            raise ValueError(
                f"{arg(name)}: needs one number, or one for each kv head, beside groups, got shape "
                f"{view.shape}; leave out the groups"
            )


def _checked_form_of_mask(form: Any, window: tuple[int, int] | None) -> str | None:
    """Check the form of a plan's masks."""
    if form not in (None, "rows", "tree"):
        raise ValueError(
            f"mask_form: needs 'rows', 'tree' or None, got {form!r}; pass 'tree' for masks that "
            f"have one"
        )
    if form is not None:
        _check_no_window(window)
    found: str | None = form
    return found


def checked_shape(
    batch: Any,
    total_tokens: Any,
    heads: tuple[Any, ...],
    page_size: Any,
    q_len: Any,
    dtypes: tuple[Any, Any],
) -> tuple[Any, ...]:
    """Check the numbers of a plan, and give them as _SIZES lists them."""
    num_heads, num_kv_heads, head_dim, head_dim_v = heads
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    named = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for name, value in {**named, "head_dim_v": head_dim_v}.items():
        checked_int(name, value, "pass the size of a call")
    dtype, cache_dtype = _checked_dtypes(*dtypes)
    step, most = _column_step(cache_dtype)
    for name, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if value % step or value > most:
            raise ValueError(
                f"{arg(name)}: needs a multiple of {step} up to {most}, got {value}; "
                f"{'keep caches in 16 bits' if most < value <= 512 else 'pad with zeros'}"
            )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{arg('num_heads')}: needs a multiple of num_kv_heads {num_kv_heads}, got "
            f"{num_heads}; check the two"
        )
    checked_int("batch", batch, "pass the number of requests", 0)
    checked_int("total_tokens", total_tokens, "pass the most query tokens of a step", 0)
    checked_int("page_size", page_size, "pass 0 for rows without pages", 0)
    if q_len is not None and checked_int("q_len", q_len, "leave it out") * batch != total_tokens:
        raise ValueError(
            f"{arg('total_tokens')}: needs batch * q_len = {batch * q_len}, got {total_tokens}; "
            f"pass that number, or no q_len"
        )
    sizes = total_tokens, num_heads, num_kv_heads, head_dim, head_dim_v
    return *sizes, page_size, dtype, cache_dtype, q_len or 0


def _checked_cuts(batch: int, batch_invariant: Any, max_kv_len: Any) -> tuple[bool, int, int]:
    most = checked_max_kv_len(checked_flag("batch_invariant", batch_invariant), max_kv_len)
    return _cuts(batch, most) if most else _NO_CUTS


def _checked_dtypes(dtype: Any, cache_dtype: Any) -> tuple[str, str]:
    dtype, cache_dtype = dtype_name(dtype), dtype_name(cache_dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype: needs {' or '.join(DTYPES)}, got {dtype!r}; pass one of them")
    if cache_dtype not in (None, dtype, _E4M3) or {dtype, cache_dtype} == {"float32", _E4M3}:
        raise TypeError(
            f"cache_dtype: needs {dtype}, or {_E4M3} beside 16-bit queries, got {cache_dtype}; "
            f"leave it out for caches of dtype"
        )
    return dtype, cache_dtype or dtype
