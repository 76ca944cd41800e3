# SPDX-License-Identifier: Apache-2.0
"""Writing into caches of keys and values: :func:`append_kv_cache`."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from cumla import reference
from cumla.core.arguments import bind, check_output, check_own_memory
from cumla.core.names import arg
from cumla.core.operation import parts_on_host
from cumla.core.paged import (
    page_lists,
    refuse_pages,
    refuse_positions,
    refuse_slots,
    refuse_value,
)
from cumla.core.spec import Factor, Instead, Spec, array, cache, flag, optional
from cumla.launch.kernel import Unplanned
from cumla.launch.mha.append_kv_cache import AppendKVArguments, append_kv_launch
from cumla.mha.arguments import (
    ANGLES,
    DTYPES,
    E4M3,
    KV_LAYOUT,
    PLACES,
    ROTARY_OFFSET,
    batched,
    check_rotation,
    checked_rows,
    checked_scales,
    checked_written_cache,
    tables_of,
)
from cumla.reference.mha.cache import last_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.paged import Host, Results
    from cumla.launch.kernel import Launch

__all__ = ["append_kv_cache"]


APPEND_KV_CACHE = Spec(
    "append_kv_cache",
    (
        array("k"),
        array("v"),
        cache("k_cache"),
        cache("v_cache"),
        optional("slot_mapping"),
        optional("batch_indices"),
        optional("positions"),
        optional("qo_indptr"),
        optional("kv_lens"),
        optional("block_table"),
        optional("kv_indices"),
        optional("kv_indptr"),
        optional("cos_sin", ANGLES),
        flag("interleaved", False),
        ROTARY_OFFSET,
        optional("q"),
        Instead("q_out", of="q"),
        Factor("k_scale"),
        Factor("v_scale"),
        KV_LAYOUT,
    ),
    positional=5,
    kernels=("append_kv_cache_",),
)


@APPEND_KV_CACHE
def append_kv_cache(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any = None,
    *,
    batch_indices: Any = None,
    positions: Any = None,
    qo_indptr: Any = None,
    kv_lens: Any = None,
    block_table: Any = None,
    kv_indices: Any = None,
    kv_indptr: Any = None,
    cos_sin: Any = None,
    interleaved: bool = False,
    rotary_offset: int = 0,
    q: Any = None,
    q_out: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_layout: str = "NHD",
    stream: Any = None,
) -> None:
    """Write the keys and values of new tokens into a cache, in place; rotate keys and queries.

    There are three ways to say where new rows go: `slot_mapping`; `batch_indices` and `positions`;
    or `kv_lens`. With `kv_lens`, the new tokens are the last ones of each request, divided by
    `qo_indptr` or, if k has four axes, by q_len. The last two ways need the page numbers of each
    request: `block_table`, or `kv_indices` and `kv_indptr`. A contiguous cache
    ``(slots, max_len, num_kv_heads, head_dim)`` is a cache with pages of max_len tokens; its
    block_table ``(batch, 1)`` holds the slot of each request. With `cos_sin` the same kernel
    rotates the keys and the queries `q`. Devices and streams are as in :func:`cumla.mla_decode`;
    arrays on the CPU are written by :func:`cumla.reference.append_kv_cache`.

    Rows are skipped if a slot, request or position is negative, or if their place is outside of the
    cache, of the request's pages or of `cos_sin`. If several rows have the same place, the result
    there is undefined and may be a mixture of them.

    Parameters
    ----------
    k, v : array
        ``(tokens, num_kv_heads, head_dim)``, or ``(batch, q_len, num_kv_heads, head_dim)``,
        bfloat16, float16 or float32, head_dim a multiple of 8 up to 512; v may have another
        head_dim. Of CuPy, PyTorch, JAX or NumPy. Strides are any multiples of 16 bytes, the last
        axis is contiguous.
    k_cache, v_cache : array
        ``(num_pages, page_size, num_kv_heads, head_dim)`` with the columns of k and v, of their
        dtype, or float8_e4m3fn, or uint8 with its bits; any page size, strides as for k. For a
        packed cache pass the two parts, ``cache[:, 0]`` and ``cache[:, 1]``. JAX arrays are
        immutable and refused here: the function of that name in `cumla.jax` returns new ones.
    slot_mapping : array, optional
        ``(tokens,)`` int32 or int64: page * page_size + offset.
    batch_indices : array, optional
        ``(tokens,)`` int32 or int64: the request of each token.
    positions : array, optional
        ``(tokens,)`` int32 or int64: the position of each token in its request. With slot_mapping
        or kv_lens, positions are used only for the rotation, as multimodal models and drafts need
        it.
    qo_indptr : array, optional
        ``(batch + 1,)`` int32, non-decreasing: the new tokens of request i are
        ``qo_indptr[i]`` up to ``qo_indptr[i + 1]``. Tokens of no request are skipped.
    kv_lens : array, optional
        ``(batch,)`` int32: tokens of each request, the new ones included. With slot_mapping it
        gives the positions for the rotation, unless `positions` does.
    block_table, kv_indices, kv_indptr : array, optional
        As in :func:`append_mla_cache`.
    cos_sin : array or pair of arrays, optional
        ``(max_position, rotary_dim)``, the cosines, then the sines, or a pair ``(cos, sin)``, as in
        :func:`apply_rope`, which has the formula. The other columns are copied.
    interleaved : bool
        Pair j is columns 2 j and 2 j + 1 (GPT-J); if False, j and ``j + rotary_dim / 2`` (GPT-NeoX,
        Llama, Qwen). :func:`append_mla_cache` has the other default, as DeepSeek's models do.
    rotary_offset : int
        The first column that is rotated, a multiple of 8.
    q : array, optional
        Queries to rotate by the same positions, those of skipped rows included:
        ``(tokens, num_heads, head_dim)`` or ``(batch, q_len, num_heads, head_dim)``, as k. In
        place, unless there is `q_out`.
    q_out : array, optional
        Of q's shape and dtype, written to in place of q; it may be q. A query whose position is
        outside of cos_sin is copied as it is.
    k_scale, v_scale : float or array, optional
        Factors of e4m3 caches: the value is the stored number times the factor. A number is
        between 2 ** -126 and 2 ** 126. An array is float32, ``(1,)``, ``(num_kv_heads,)`` or,
        without slot_mapping, ``(batch, num_kv_heads)``; the kernel reads it, and it may change
        between the replays of a graph. 1 by default.
    kv_layout : str
        ``"NHD"``, or ``"HND"`` for caches ``(num_pages, num_kv_heads, page_size, head_dim)``.
    stream : optional
        A CUDA stream, as in :func:`cumla.mla_decode`. By default the current stream of k_cache's
        framework.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.append_mla_cache`.

    Notes
    -----
    Numbers in e4m3 are rounded to nearest even and saturate at 448; they are
    ``row * (1 / scale)`` in float32.

    The rotation is that of RoFormer (arXiv:2104.09864), section 3.4.

    Examples
    --------
    Two requests have one new token each, the third and the fourth of its request:

    >>> import numpy as np, cumla
    >>> k = v = np.ones((2, 4, 64), np.float16)
    >>> k_cache, v_cache = np.zeros((2, 8, 16, 4, 64), np.float16)
    >>> given = {"qo_indptr": np.int32([0, 1, 2]), "block_table": np.int32([[5], [2]])}
    >>> cumla.append_kv_cache(k, v, k_cache, v_cache, kv_lens=np.int32([3, 4]), **given)
    >>> np.argwhere(k_cache[..., 0, 0]).tolist()
    [[2, 3], [5, 2]]
    """
    _APPEND.call(
        *(k, v, k_cache, v_cache, slot_mapping, batch_indices, positions, qo_indptr, kv_lens),
        *(block_table, kv_indices, kv_indptr, cos_sin, interleaved, rotary_offset, q, q_out),
        *(k_scale, v_scale, kv_layout, stream),
    )


class _Append(Unplanned[AppendKVArguments]):
    trusted = (
        "slot_mapping",
        "batch_indices",
        "positions",
        "qo_indptr",
        "kv_lens",
        "block_table",
        "kv_indices",
        "kv_indptr",
    )
    in_place = MappingProxyType({"q_out": "q"})

    def arguments(self, views: Views, options: Any) -> AppendKVArguments:
        given = {name: view for name, view in views.items() if view is not None}
        return _checked(given, options)

    def check_overlap(self, views: Views, written: Sequence[str]) -> None:
        """Let rows be views of the cache, in slots that only the caller knows."""
        super().check_overlap(views, ["q_out" if "q_out" in views else "q"])
        others = {name: view for name, view in views.items() if name not in ("k", "v")}
        super().check_overlap(others, ["k_cache", "v_cache"])

    def launches(self, arguments: AppendKVArguments, outs: Sequence[ArrayView]) -> Sequence[Launch]:
        return (append_kv_launch(arguments),) if arguments.tokens else ()

    def check_values(self, host: Host, arguments: AppendKVArguments) -> None:
        a = arguments
        assert a.k_cache is not None
        num_pages, page_size = a.k_cache.shape[:2]
        if "slot_mapping" in host:
            refuse_slots(host["slot_mapping"], num_pages * page_size)
        if "qo_indptr" in host:
            bounds = host["qo_indptr"].astype(np.int64)
            wrong = (bounds < 0) | (bounds > a.tokens)
            wrong[1:] |= np.diff(bounds) < 0
            need = f"non-decreasing offsets from 0 to {a.tokens}, the tokens of {arg('k')}"
            refuse_value("qo_indptr", host["qo_indptr"], wrong, need)
        if "kv_lens" in host:
            _check_lengths(host, a)
        elif "batch_indices" in host:
            refuse_pages(host, host["batch_indices"], host["positions"], num_pages, page_size)
        if a.cos is not None and "positions" in host:
            refuse_positions(host["positions"], a.cos.shape[0])

    def reference(self, host: Host, arguments: AppendKVArguments) -> Results:
        others = {name: array for name, array in host.items() if not name.startswith("cos_sin")}
        if arguments.cos is not None:
            others["cos_sin"] = parts_on_host(host, "cos_sin")
        for name, scale in (("k_scale", arguments.k_scale), ("v_scale", arguments.v_scale)):
            others.setdefault(name, np.array(scale.number, np.float32))
        reference.append_kv_cache(
            **others,
            interleaved=arguments.interleaved,
            rotary_offset=arguments.rotary_offset,
            kv_layout=arguments.layout,
        )
        return ()


_APPEND = _Append(APPEND_KV_CACHE)


def _checked(views: Mapping[str, ArrayView], options: Any) -> AppendKVArguments:
    _check_combination(views)
    _check_rotated(views, options.rotary_offset)
    lead = "(tokens, num_kv_heads, columns) or (batch, q_len, num_kv_heads, columns)"
    k = checked_rows("k", views["k"], DTYPES, lead)
    v = checked_rows("v", views["v"], (k.dtype,), lead, f"convert it, or {arg('k')}")
    if v.shape[:3] != k.shape[:3] or len(views["v"].shape) != len(views["k"].shape):
        raise ValueError(
            f"{arg('v')}: needs the tokens and heads of {arg('k')}, {views['k'].shape[:-1]}, got "
            f"shape {views['v'].shape}; pass both of the same tokens"
        )
    k_cache = checked_written_cache("k_cache", views["k_cache"], k, options.kv_layout)
    v_cache = checked_written_cache("v_cache", views["v_cache"], v, options.kv_layout)
    if v_cache.shape[:2] != k_cache.shape[:2] or (v_cache.dtype in E4M3) != (k_cache.dtype in E4M3):
        raise ValueError(
            f"{arg('v_cache')}: needs as many pages of as many tokens as {arg('k_cache')}, "
            f"{k_cache.shape[:2]} of {k_cache.dtype}, got {v_cache.shape[:2]} of {v_cache.dtype}; "
            f"pass two caches of one layer"
        )
    sizes = {"tokens": k.shape[0] * k.shape[1]}
    if "kv_lens" in views and "qo_indptr" not in views:
        sizes["batch"] = k.shape[0]
    sizes = bind(PLACES, views, sizes)
    q, q_out = _checked_queries(views, k)
    cos, sin = tables_of(views)
    if cos is not None:
        check_rotation(cos, k.shape[3], options.rotary_offset)
    batch = None if "slot_mapping" in views else sizes.get("batch")
    told = (batch, f"where there is no {arg('slot_mapping')}")
    return AppendKVArguments(
        q=q,
        q_out=q_out,
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=views.get("slot_mapping"),
        batch_indices=views.get("batch_indices"),
        positions=views.get("positions"),
        qo_indptr=views.get("qo_indptr"),
        kv_lens=views.get("kv_lens"),
        block_table=views.get("block_table"),
        kv_indices=views.get("kv_indices"),
        kv_indptr=views.get("kv_indptr"),
        cos=cos,
        sin=sin,
        k_scale=checked_scales("k_scale", views.get("k_scale"), options.k_scale, k_cache, *told),
        v_scale=checked_scales("v_scale", views.get("v_scale"), options.v_scale, v_cache, *told),
        interleaved=options.interleaved,
        rotary_offset=options.rotary_offset,
        layout=options.kv_layout,
    )


def _check_combination(views: Mapping[str, ArrayView]) -> None:
    """Check that exactly one form says where the rows go."""
    if "qo_indptr" in views and "kv_lens" not in views:
        raise ValueError(
            f"{arg('kv_lens')}: needs lengths beside {arg('qo_indptr')}, got None; pass both or "
            f"none"
        )
    tables = {n for n in ("block_table", "kv_indices", "kv_indptr") if n in views}
    told = {n for n in ("batch_indices", "positions", "kv_lens") if n in views}
    if "slot_mapping" in views:
        unused = tables | (told & {"batch_indices"})
        if "positions" in told or not {"cos_sin", "cos_sin[0]"} & set(views):
            unused |= told & {"kv_lens"}  # which would tell the positions to rotate by
        if unused:
            raise ValueError(
                f"{arg(min(unused))}: needs a call without {arg('slot_mapping')}, which tells "
                f"where the rows go, got both; leave one of them out"
            )
    elif "kv_lens" not in told and not told >= {"batch_indices", "positions"}:
        raise ValueError(
            f"{arg('slot_mapping')}: needs slots, or {arg('kv_lens')}, or {arg('batch_indices')} "
            f"and positions, which tell where the rows go, got "
            f"{' and '.join(sorted(told)) or 'none of them'}; pass one form"
        )
    elif tables not in ({"block_table"}, {"kv_indices", "kv_indptr"}):
        raise ValueError(
            f"{arg('block_table')}: needs {arg('block_table')}, or both {arg('kv_indices')} and "
            f"{arg('kv_indptr')}, where there is no {arg('slot_mapping')}, got "
            f"{' and '.join(sorted(tables)) or 'none of them'}; pass one form"
        )
    if told >= {"kv_lens", "batch_indices"}:
        raise ValueError(
            f"{arg('batch_indices')}: needs a call without {arg('kv_lens')}, which tells the "
            f"requests, got both; leave one of them out"
        )
    is_uniform = len(views["k"].shape) == 4
    if "kv_lens" in views and is_uniform == ("qo_indptr" in views):
        need = (
            f"a call without it for {arg('k')} of four axes"
            if is_uniform
            else "offsets of the requests"
        )
        raise ValueError(
            f"{arg('qo_indptr')}: needs {need}, beside {arg('kv_lens')}, got {arg('k')} of shape "
            f"{views['k'].shape}; "
            f"{'leave it out' if is_uniform else 'pass it, or k as (batch, q_len, ...)'}"
        )


def _check_rotated(views: Mapping[str, ArrayView], rotary_offset: int) -> None:
    """Check that a rotation has its positions, and that no argument is given in vain."""
    is_rotated = "cos_sin" in views or "cos_sin[0]" in views
    for name, is_given in (("q", "q" in views), ("rotary_offset", rotary_offset)):
        if is_given and not is_rotated:
            raise ValueError(
                f"{arg('cos_sin')}: needed with {arg(name)}, got None; pass it, or no {arg(name)}"
            )
    if "q_out" in views and "q" not in views:
        raise ValueError(
            f"{arg('q')}: needed with {arg('q_out')}, got None; pass it, or no {arg('q_out')}"
        )
    if is_rotated and not {"positions", "kv_lens"} & set(views):
        raise ValueError(
            f"{arg('positions')}: needed with {arg('cos_sin')}, unless {arg('kv_lens')} tells "
            f"them, got None; pass it"
        )
    if "positions" in views and "batch_indices" not in views and not is_rotated:
        raise ValueError(
            f"{arg('positions')}: needs {arg('batch_indices')} to tell where the rows go, or "
            f"{arg('cos_sin')} to rotate them, got neither; leave it out, or pass one of them"
        )


def _checked_queries(
    views: Mapping[str, ArrayView], k: ArrayView
) -> tuple[ArrayView | None, ArrayView | None]:
    if "q" not in views:
        return None, None
    given = views["q"]
    lead = f"of {arg('k')} with num_heads in place of num_kv_heads,"
    q = checked_rows("q", given, (k.dtype,), lead, f"convert it, or {arg('k')}")
    if (q.shape[:2], q.shape[3], len(given.shape)) != (
        k.shape[:2],
        k.shape[3],
        len(views["k"].shape),
    ):
        raise ValueError(
            f"{arg('q')}: needs tokens and columns of {arg('k')}, whose shape is "
            f"{views['k'].shape}, got {given.shape}; pass the queries of the same tokens"
        )
    if "q_out" not in views:
        check_own_memory("q", given)
        return q, q
    check_output("q_out", views["q_out"], given.shape, (q.dtype,), "rows")
    return q, batched(views["q_out"])


def _check_lengths(host: Host, a: AppendKVArguments) -> None:
    """Check lengths against the pages and the table of angles, and the page numbers in use."""
    assert a.k_cache is not None
    num_pages, page_size = a.k_cache.shape[:2]
    lens, q_len = host["kv_lens"], a.rows.shape[1]
    bounds = host.get("qo_indptr")
    new = np.full(len(lens), q_len) if bounds is None else np.diff(bounds)
    requests, positions = last_tokens(np.arange(a.tokens), q_len, bounds, lens)
    if "slot_mapping" not in host:
        _, _, begin, end = page_lists(host)
        wrong = (new > 0) & (lens > (end - begin) * page_size)
        refuse_value("kv_lens", lens, wrong, "no more tokens than the pages of the request hold")
        refuse_pages(host, requests, positions, num_pages, page_size)
    for name, period in (("slot_mapping", page_size), ("positions", 1 << 62)):
        if name in host:  # without the new tokens lengths have them all so much too early
            told = np.flatnonzero((requests >= 0) & (host[name] >= 0))
            of, ahead = requests[told], (host[name].astype(np.int64) - positions)[told]
            tokens, fit, late = (
                np.bincount(of, weights, len(lens))
                for weights in (None, ahead % period == 0, (ahead - new[of]) % period == 0)
            )
            wrong = (tokens > 0) & (late == tokens) & (fit == 0)
            need = f"the new tokens included, as {arg(name)} has them"
            refuse_value("kv_lens", lens, wrong, need, "their positions would be too small")
    if a.cos is not None and "positions" not in host:
        rows = a.cos.shape[0]
        need = f"at most {rows} tokens, the rows of {arg('cos_sin')}"
        refuse_value("kv_lens", lens, (new > 0) & (lens > rows), need)
