# SPDX-License-Identifier: Apache-2.0
"""Writing into caches of keys and values: :func:`append_kv_cache`."""

from __future__ import annotations

from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cumla import reference
from cumla.core.arguments import (
    as_number,
    bind,
    check_own_memory,
    checked_flag,
    checked_int,
)
from cumla.core.arrays import check_mutable, parts
from cumla.core.check_mode import refuse_first
from cumla.core.operation import Operation, parts_on_host, run
from cumla.launch.device import require_hopper
from cumla.launch.mha.append_kv_cache import AppendKVArguments, Scale, append_kv_launch
from cumla.mha.arguments import (
    DTYPES,
    E4M3,
    PLACES,
    batched,
    check_rotation,
    checked_layout,
    checked_rows,
    checked_written_cache,
    tables_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable

__all__ = ["append_kv_cache"]


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

    Where the rows of a token go is told in one of three ways: by `slot_mapping`; by
    `batch_indices` and `positions`; or by `kv_lens`, whose last tokens are the new ones of each
    request, divided by `qo_indptr`, or q_len each where k has four axes. The last two need the page
    numbers of each request: `block_table`, or `kv_indices` and `kv_indptr`. A contiguous cache
    ``(slots, max_len, num_kv_heads, head_dim)`` is one of pages of max_len tokens: its block_table
    is the slot of each request, ``(batch, 1)``. With `cos_sin` keys are rotated on their way, and
    so are the queries `q`. Arrays on the GPU are written by one CUDA kernel (compute capability
    9.0), on the caller's stream and without waiting for it; arrays on the CPU by
    :func:`cumla.reference.append_kv_cache`.

    Rows are skipped, and nothing is written, where a slot, request or position is negative or a
    place lies outside of the cache, of the request's pages or of `cos_sin`. Which of several rows
    for the same place is written is undefined: it may be a mixture of them.

    Parameters
    ----------
    k, v : array
        ``(tokens, num_kv_heads, head_dim)``, or ``(batch, q_len, num_kv_heads, head_dim)``,
        bfloat16 or float16, head_dim a multiple of 8 up to 512; v may have another one. Of CuPy,
        PyTorch, JAX or NumPy. Any strides that are multiples of 16 bytes, the last axis contiguous.
    k_cache, v_cache : array
        ``(num_pages, page_size, num_kv_heads, head_dim)`` with the columns of k and v, of their
        dtype, or float8_e4m3fn, or uint8 with its bits; any page size, strides as for k. Of a
        packed cache pass the two parts, ``cache[:, 0]`` and ``cache[:, 1]``. Not of JAX, whose
        arrays are immutable.
    slot_mapping : array, optional
        ``(tokens,)`` int32 or int64: page * page_size + offset.
    batch_indices : array, optional
        ``(tokens,)`` int32 or int64: the request of each token.
    positions : array, optional
        ``(tokens,)`` int32 or int64: the position of each token in its request. Beside slot_mapping
        or kv_lens it counts for the rotation alone, as multimodal models and drafts need it.
    qo_indptr : array, optional
        ``(batch + 1,)`` int32, not decreasing: the new tokens of request i are
        ``qo_indptr[i]`` up to ``qo_indptr[i + 1]``.
    kv_lens : array, optional
        ``(batch,)`` int32: tokens of each request, the new ones included.
    block_table : array, optional
        ``(batch, max_pages)`` int32: page numbers of each request.
    kv_indices, kv_indptr : array, optional
        ``(entries,)`` and ``(batch + 1,)`` int32, instead of block_table: the page numbers of
        request i are ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]``.
    cos_sin : array or pair of arrays, optional
        ``(max_position, rotary_dim)`` float32, bfloat16 or float16: the cosines of all pairs of
        columns, then their sines; or ``(cos, sin)``, each ``(max_position, rotary_dim / 2)``, any
        strides. ``(freqs[..., 0], freqs[..., 1])`` of a table (max_position, rotary_dim / 2, 2).
        rotary_dim is a multiple of 16. With c and s the j-th of them, pair j becomes
        ``(c * x0 - s * x1, s * x0 + c * x1)``, computed in float32.
    interleaved : bool
        Pair j is columns 2 j and 2 j + 1 (GPT-J); if False, j and ``j + rotary_dim / 2`` (GPT-NeoX,
        Llama, Qwen). :func:`append_mla_cache` has the other default, as DeepSeek's models do.
    rotary_offset : int
        The first column that is rotated, a multiple of 8.
    q : array, optional
        Queries to rotate by the same positions, also those of skipped rows:
        ``(tokens, num_heads, head_dim)`` or ``(batch, q_len, num_heads, head_dim)``, as k. In
        place, unless there is `q_out`.
    q_out : array, optional
        Of q's shape and dtype, written to in place of q. Where a position lies outside of cos_sin
        the query is copied as it is.
    k_scale, v_scale : float or array, optional
        Of e4m3 caches: rows are written divided by it. An array is float32, ``(1,)``,
        ``(num_kv_heads,)``, or, where requests are known, ``(batch, num_kv_heads)``; the kernel
        reads it, and it may change between the replays of a graph. 1 by default.
    kv_layout : str
        ``"NHD"``, or ``"HND"`` for caches ``(num_pages, num_kv_heads, page_size, head_dim)``.
    stream : optional
        A CUDA stream, as in :func:`cumla.mla_decode`. By default the current stream of k_cache's
        framework.

    Raises
    ------
    TypeError
        An argument is of the wrong kind: no array, a tracer, an unknown dtype, a flag that is
        neither True nor False, or an array of JAX's that would have to be written to. As with every
        error but the last, the message names it, and nothing has been launched or written.
    ValueError
        An argument does not fit: its shape, strides, alignment or place; or arguments do not fit
        together.
    UnsupportedDeviceError
        The arrays are on a GPU that is not of compute capability 9.0.
    MissingDependencyError
        The arrays are on a GPU, and CuPy, NVRTC or cuda.bindings is missing.
    CompilationError
        A kernel does not compile with the NVRTC that is installed.
    NotPreparedError
        The stream is being captured and the kernel is not loaded yet.
    CumlaError
        The driver refuses a launch; base class of the four above.

    Notes
    -----
    Numbers in e4m3 are rounded to nearest even and saturate at 448; they are
    ``row * (1 / scale)`` in float32.

    The rotation is that of RoFormer (arXiv:2104.09864), section 3.4.

    Examples
    --------
    Two requests with one new token each, the third of its request and the fourth:

    >>> import numpy as np, cumla
    >>> k = v = np.ones((2, 4, 64), np.float16)
    >>> k_cache, v_cache = np.zeros((2, 8, 16, 4, 64), np.float16)
    >>> cumla.append_kv_cache(
    ...     k, v, k_cache, v_cache,
    ...     kv_lens=np.array([3, 4], np.int32), qo_indptr=np.array([0, 1, 2], np.int32),
    ...     block_table=np.array([[5], [2]], np.int32),
    ... )
    >>> np.argwhere(k_cache[..., 0, 0]).tolist()
    [[2, 3], [5, 2]]
    """
    layout = checked_layout(kv_layout)
    interleaved = checked_flag("interleaved", interleaved)
    rotary_offset = checked_int("rotary_offset", rotary_offset, "pass the first column", 0)
    numbers = [
        as_number(name, scale) if isinstance(scale, Real) else None
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    ]
    optional = {
        "slot_mapping": slot_mapping,
        "batch_indices": batch_indices,
        "positions": positions,
        "qo_indptr": qo_indptr,
        "kv_lens": kv_lens,
        "block_table": block_table,
        "kv_indices": kv_indices,
        "kv_indptr": kv_indptr,
        "q": q,
        "q_out": q_out,
        "k_scale": None if isinstance(k_scale, Real) else k_scale,
        "v_scale": None if isinstance(v_scale, Real) else v_scale,
    }
    given = {name: array for name, array in optional.items() if array is not None}
    rotated = "q_out" if "q_out" in given else "q"
    written = {"v_cache": v_cache}
    if rotated in given:
        written[rotated] = given.pop(rotated)
    for name, array in {"k_cache": k_cache, **written}.items():
        check_mutable(name, array)
    table = {} if cos_sin is None else parts("cos_sin", cos_sin, ("cosines", "sines"))
    # The cache comes first, because its framework must know of what is written.
    inputs = {"k_cache": k_cache, "k": k, "v": v, **given, **table}
    run(_APPEND, inputs, written, (*numbers, interleaved, rotary_offset, layout), stream)


class _Options(NamedTuple):
    """What is no array."""

    k_number: float | None
    v_number: float | None
    interleaved: bool
    rotary_offset: int
    layout: str


class _Append(Operation[AppendKVArguments, None]):
    """Writes rows in place; nothing is returned."""

    integers = (
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

    def arguments(self, views: Views, options: tuple[Any, ...]) -> AppendKVArguments:
        given = {name: view for name, view in views.items() if view is not None}
        return _checked(given, _Options(*options))

    def check_overlap(self, views: Views, written: Sequence[str]) -> None:
        """Let rows lie in the cache, in slots of which only the caller knows."""
        super().check_overlap(views, ["q_out" if "q_out" in views else "q"])
        others = {name: view for name, view in views.items() if name not in ("k", "v")}
        super().check_overlap(others, ["k_cache", "v_cache"])

    def key(self, arguments: AppendKVArguments, device: int) -> None:
        require_hopper(device)

    def recipe(
        self, key: None, arguments: AppendKVArguments, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        return (append_kv_launch(arguments),) if arguments.tokens else ()

    def check_values(
        self, host: Mapping[str, np.ndarray[Any, Any]], arguments: AppendKVArguments
    ) -> None:
        _check_values(host, arguments)

    def reference(
        self, host: Mapping[str, np.ndarray[Any, Any]], arguments: AppendKVArguments
    ) -> Sequence[np.ndarray[Any, Any]]:
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


_APPEND = _Append()


def _checked(views: Mapping[str, ArrayView], options: _Options) -> AppendKVArguments:
    """Check the views of one call, by name, against each other."""
    _check_combination(views)
    lead = "(tokens, num_kv_heads, columns) or (batch, q_len, num_kv_heads, columns)"
    k = checked_rows("k", views["k"], DTYPES, lead)
    v = checked_rows("v", views["v"], (k.dtype,), lead)
    if v.shape[:3] != k.shape[:3] or len(views["v"].shape) != len(views["k"].shape):
        raise ValueError(
            f"v: needs the tokens and heads of k, {views['k'].shape[:-1]}, got shape "
            f"{views['v'].shape}; pass both of the same tokens"
        )
    caches = {}
    for name, rows in (("k_cache", k), ("v_cache", v)):
        view = views[name]
        if options.layout == "HND" and len(view.shape) == 4:
            view = _swapped(view)
        caches[name] = checked_written_cache(name, view, rows, name[0])
    k_cache, v_cache = caches.values()
    if v_cache.shape[:2] != k_cache.shape[:2] or (v_cache.dtype in E4M3) != (k_cache.dtype in E4M3):
        raise ValueError(
            f"v_cache: needs the pages of k_cache, {k_cache.shape[:2]} of {k_cache.dtype}, got "
            f"{v_cache.shape[:2]} of {v_cache.dtype}; pass two caches of one layer"
        )
    is_uniform = len(views["k"].shape) == 4
    sizes = {"tokens": k.shape[0] * k.shape[1], **({"batch": k.shape[0]} if is_uniform else {})}
    sizes = bind(PLACES, views, sizes)
    q, q_out = _checked_queries(views, k)
    cos, sin = tables_of(views)
    if cos is not None:
        check_rotation(cos, k.shape[3], options.rotary_offset)
    scales = [
        _checked_scale(name, views, number, cache, sizes)
        for name, number, cache in (
            ("k_scale", options.k_number, k_cache),
            ("v_scale", options.v_number, v_cache),
        )
    ]
    return AppendKVArguments(
        q,
        q_out,
        k,
        v,
        k_cache,
        v_cache,
        *(views.get(name) for name in _Append.integers),
        cos,
        sin,
        *scales,
        options.interleaved,
        options.rotary_offset,
        options.layout,
    )


def _swapped(view: ArrayView) -> ArrayView:
    """Put the axis of tokens before that of heads."""
    (pages, heads, tokens, columns), (page, head, token, column) = view.shape, view.strides
    return view._replace(shape=(pages, tokens, heads, columns), strides=(page, token, head, column))


def _check_combination(views: Mapping[str, ArrayView]) -> None:
    """Check that one way, and one only, tells where the rows go, and that nothing is in vain."""
    tables = {n for n in ("block_table", "kv_indices", "kv_indptr") if n in views}
    is_uniform = len(views["k"].shape) == 4
    if "slot_mapping" in views:
        if tables:
            raise ValueError(
                f"{min(tables)}: needs a call without slot_mapping, which tells where the rows go, "
                f"got both; leave one of them out"
            )
    elif tables not in ({"block_table"}, {"kv_indices", "kv_indptr"}):
        raise ValueError(
            f"block_table: needs block_table, or both kv_indices and kv_indptr, where there is no "
            f"slot_mapping, got {' and '.join(sorted(tables)) or 'none of them'}; pass one form"
        )
    elif "kv_lens" not in views and not {"batch_indices", "positions"} <= set(views):
        raise ValueError(
            "kv_lens: needed to tell where the rows go, unless there are slot_mapping, or "
            "batch_indices and positions, got none of them; pass one form"
        )
    if "kv_lens" in views and "batch_indices" in views:
        raise ValueError(
            "batch_indices: needs a call without kv_lens, which tells the requests, got both; "
            "leave one of them out"
        )
    if "kv_lens" in views and is_uniform == ("qo_indptr" in views):
        need = "a call without it for k of four axes" if is_uniform else "offsets of the requests"
        raise ValueError(
            f"qo_indptr: needs {need}, beside kv_lens, got k of shape {views['k'].shape}; "
            f"{'leave it out' if is_uniform else 'pass it, or k as (batch, q_len, ...)'}"
        )
    if "qo_indptr" in views and "kv_lens" not in views:
        raise ValueError("kv_lens: needed with qo_indptr, got None; pass it, or no qo_indptr")
    is_turned = "cos_sin" in views or "cos_sin[0]" in views
    for name, needed in (("q", "cos_sin"), ("q_out", "q")):
        if name in views and not (is_turned if needed == "cos_sin" else needed in views):
            raise ValueError(f"{needed}: needed with {name}, got None; pass it, or no {name}")
    knows_positions = bool({"positions", "kv_lens"} & set(views))
    if is_turned and not knows_positions:
        raise ValueError(
            "positions: needed with cos_sin, unless kv_lens tells them, got None; pass it"
        )
    if "positions" in views and not is_turned and "batch_indices" not in views:
        raise ValueError(
            "positions: needs batch_indices to tell where the rows go, or cos_sin to rotate them, "
            "got neither; leave it out, or pass one of them"
        )


def _checked_queries(
    views: Mapping[str, ArrayView], k: ArrayView
) -> tuple[ArrayView | None, ArrayView | None]:
    """Check the queries to rotate, and where to write them."""
    if "q" not in views:
        return None, None
    lead = "of k with num_heads in place of num_kv_heads,"
    q = checked_rows("q", views["q"], (k.dtype,), lead)
    if (q.shape[:2], q.shape[3]) != (k.shape[:2], k.shape[3]) or len(views["q"].shape) != len(
        views["k"].shape
    ):
        raise ValueError(
            f"q: needs tokens and columns of k, whose shape is {views['k'].shape}, got "
            f"{views['q'].shape}; pass the queries of the same tokens"
        )
    out = views.get("q_out", views["q"])
    name = "q_out" if "q_out" in views else "q"
    if out.dtype != q.dtype or out.shape != views["q"].shape:
        raise ValueError(
            f"q_out: needs shape and dtype of q, {views['q'].shape} {q.dtype}, got {out.shape} "
            f"{out.dtype}; allocate it so"
        )
    check_own_memory(name, out)
    return q, batched(checked_rows(name, out, (q.dtype,), lead))


def _checked_scale(
    name: str,
    views: Mapping[str, ArrayView],
    number: float | None,
    cache: ArrayView,
    sizes: Mapping[str, int],
) -> Scale:
    """Check the factor of an e4m3 cache, and give it the axes (batch, num_kv_heads)."""
    view = views.get(name)
    if view is None and number is None:
        return Scale()
    if cache.dtype not in E4M3:
        raise ValueError(f"{name}: needs an e4m3 cache, got {cache.dtype}; leave it out")
    if view is None:
        assert number is not None
        if not 2.0**-126 <= number <= 2.0**126:
            raise ValueError(
                f"{name}: needs a normal number above 0, got {number}; pass the factor by which "
                f"numbers of the cache are multiplied when they are read"
            )
        return Scale(number)
    heads = cache.shape[2]
    if view.dtype != "float32":
        raise TypeError(f"{name}: needs float32, got {view.dtype}; convert it first")
    if view.shape == (sizes.get("batch"), heads) and "slot_mapping" not in views:
        return Scale(view=view)
    if view.shape not in ((), (1,), (heads,)):
        raise ValueError(
            f"{name}: needs shape (1,), ({heads},), or (batch, {heads}) where there is no "
            f"slot_mapping, got {view.shape}; reshape it"
        )
    stride = view.strides[0] if view.shape == (heads,) and heads > 1 else 0
    return Scale(view=view._replace(shape=(1, heads), strides=(0, stride)))


def _check_values(host: Mapping[str, np.ndarray[Any, Any]], arguments: AppendKVArguments) -> None:
    """Check mode: raise for the first number that is out of range."""
    assert arguments.k_cache is not None
    num_pages, page_size = arguments.k_cache.shape[:2]
    if "slot_mapping" in host:
        last = num_pages * page_size - 1
        slots = host["slot_mapping"]
        need = f"a slot up to {last}, or below 0 to skip"
        refuse_first("slot_mapping", slots, slots > last, need)
    if "qo_indptr" in host:
        bounds = host["qo_indptr"].astype(np.int64)
        wrong = (bounds < 0) | (bounds > arguments.tokens)
        wrong[1:] |= np.diff(bounds) < 0
        need = f"offsets from 0 to {arguments.tokens}, the tokens of k, that do not decrease"
        refuse_first("qo_indptr", host["qo_indptr"], wrong, need)
    if "block_table" in host and "kv_lens" in host:
        most = host["block_table"].shape[1] * page_size
        lens = host["kv_lens"]
        refuse_first("kv_lens", lens, lens > most, f"at most the {most} tokens of block_table")
    if arguments.cos is not None and "positions" in host:
        positions, last = host["positions"], arguments.cos.shape[0] - 1
        need = f"a row of cos_sin, up to {last}, or below 0"
        refuse_first("positions", positions, positions > last, need)
