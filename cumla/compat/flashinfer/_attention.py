# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's attention of MHA, GQA and MQA over `cumla.AttentionPlan` and `cumla.attention`.

It is what the wrappers for decoding and for prefill have in common.
"""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cumla.compat._arguments import CallersNames, check_axes, check_tensors, refuse
from cumla.compat._torch import positions_of
from cumla.compat.flashinfer._cache import is_pair, names_of_parts, split_cache
from cumla.compat.flashinfer._wrapper import (
    BACKENDS,
    LOG2_E,
    NO_KERNELS,
    Planned,
    checked_batch,
    checked_dtypes,
    dtype_of,
    factor_of,
    name_of,
)
from cumla.compat.flashinfer.page import get_seq_lens
from cumla.compat.flashinfer.rope import Frequencies
from cumla.core.arguments import checked_int, checked_scale
from cumla.core.check_mode import check_mode
from cumla.core.frameworks import eager_only
from cumla.core.paged import refuse_value
from cumla.mha.arguments import checked_layout
from cumla.mha.attention import AttentionPlan, attention

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "NAMES",
    "AttentionWrapper",
    "Numbers",
    "Options",
    "PagedWrapper",
    "attend_once",
    "longest_of",
    "refuse_masks",
    "splits_alike",
]

_NAMES = {
    "softmax_scale": "sm_scale",
    "softcap": "logits_soft_cap",
    "window": "window_left",
    "num_heads": "num_qo_heads",
}
NAMES = CallersNames(_NAMES, ValueError)
_PARTS = {
    pair: CallersNames(
        _NAMES | dict(zip(("k", "v"), names_of_parts(pair), strict=True)), ValueError
    )
    for pair in (False, True)
}
_Q = "tokens, num_qo_heads, head_dim"
_E4M3 = "float8_e4m3fn"
_ROTATED = 16  # of what number rotated rows have a multiple of columns
_E4M3_COLUMNS = 16  # of what number e4m3 rows have a multiple of columns


class Numbers(NamedTuple):
    """Sizes that a plan says."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int  # 0: rows without pages


class _Shape(NamedTuple):
    """What a plan says of the calls that it serves, as options of `AttentionPlan`."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    dtype: str
    cache_dtype: str
    causal: bool
    window: int
    q_len: int | None  # query tokens of each request; None: offsets tell
    batch_invariant: bool
    max_kv_len: int | None  # with batch_invariant: keys of the longest request


class Options(NamedTuple):
    """What a plan says of the scores."""

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None
    rope: Frequencies | None = None  # of the rotation before attention

    def checked(
        self,
        pos_encoding_mode: str,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Options:
        """Check them, and name in one way what is absent."""
        if pos_encoding_mode not in ("NONE", "ROPE_LLAMA"):
            raise ValueError(
                f"pos_encoding_mode: needs 'NONE' or 'ROPE_LLAMA', got {pos_encoding_mode!r}; "
                f"cumla.attention adds no bias: for ALIBI import the wrapper from flashinfer"
            )
        rope = None
        if pos_encoding_mode == "ROPE_LLAMA":
            rope = Frequencies(
                factor_of("rope_scale", 1.0 if rope_scale is None else rope_scale, ""),
                factor_of("rope_theta", 1e4 if rope_theta is None else rope_theta, ""),
            )
        with NAMES():
            left = checked_int("window_left", self.window_left, "pass -1 for none", -(1 << 31))
            scale = None if self.sm_scale is None else checked_scale(self.sm_scale, 1.0)
        cap = self.logits_soft_cap
        return Options(max(left, -1), cap if cap is not None and cap > 0 else None, scale, rope)

    def check_rotation(self, head_dim: int, cache_dtype: str) -> None:
        """Check that what is rotated can be."""
        if self.rope is not None and (cache_dtype == _E4M3 or head_dim % _ROTATED):
            raise ValueError(
                f"pos_encoding_mode: needs keys of 16 bits and a multiple of {_ROTATED} columns "
                f"for 'ROPE_LLAMA', got {cache_dtype} and {head_dim}; rotate by apply_rope_pos_ids "
                f"before"
            )


class AttentionWrapper(Planned[AttentionPlan, _Shape]):
    """A wrapper for queries, keys and values of many heads.

    `buffers`, by cumla's names, hold the caller's names of the tensors that graphs read; with
    use_cuda_graph all are needed. `others` are options that cumla does not have.
    """

    _numbers = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size")
    _names: ClassVar[Mapping[str, str]]  # cumla's names of arrays -> those of `plan`

    def __init__(
        self,
        workspace: Any,
        kv_layout: str,
        use_cuda_graph: bool,
        buffers: Mapping[str, tuple[str, Any]],
        backend: str,
        **others: Any,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(
                f"backend: needs one of {', '.join(BACKENDS)}, got {backend!r}; cumla has kernels "
                f"of its own, so leave it out"
            )
        refuse(NO_KERNELS, ValueError, **others)
        check_tensors(float_workspace_buffer=workspace)
        self._kv_layout, self._backend = checked_layout(kv_layout), backend
        for name, buffer in buffers.values():
            if use_cuda_graph and buffer is None:
                raise ValueError(
                    f"{name}: needs a tensor with use_cuda_graph, got None; pass one with room for "
                    f"the largest step"
                )
        super().__init__(workspace, bool(use_cuda_graph), buffers, self._names, "q")
        if self._kept:
            checked_batch({n: own_name for n, (own_name, _) in buffers.items()}, dict(self._kept))
        self._types: tuple[Any, Any] = (None, None)  # of queries and keys
        self._options = Options(-1, None, None)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether lengths and pages keep their places, for CUDA graphs."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Do nothing: cumla's plans have memory of their own."""

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer, which deprecates it."""

    def _make(self, shape: _Shape, tokens: int, like: Any) -> AttentionPlan:
        return AttentionPlan(total_tokens=tokens, like=like, **shape._asdict())

    def _say(
        self,
        arrays: dict[str, Any],
        numbers: Numbers,
        dtypes: tuple[Any, Any, Any],
        options: Options,
        *,
        causal: bool,
        q_len: int | None = None,
        max_kv_len: int | None = None,
    ) -> None:
        """Take what a plan says: arrays by cumla's names, dtypes of queries, keys and output.

        With max_kv_len a request has the same bits in any batch.
        """
        query, cache, output = map(dtype_of, dtypes)
        cache = query if cache is None else cache
        names = checked_dtypes(query, cache, output, "o_data_type", ("bfloat16", "float16"))
        batch = checked_batch(self._theirs, arrays)
        options.check_rotation(numbers.head_dim, names[1])
        cuts = (max_kv_len is not None, max_kv_len)
        self._check_numbers(batch, numbers, names[1], *cuts)
        shape = _Shape(batch, *numbers, *names, bool(causal), options.window_left, q_len, *cuts)
        said: dict[str, Any] = dict(zip(self._numbers, numbers, strict=True))
        said |= {"q_data_type": query, "kv_data_type": cache, "q_len_per_req": q_len}
        said["max_sequence_kv"] = max_kv_len
        self._take(shape, arrays, said | _said(shape.causal, options))
        self._types, self._options = (query, cache), options
        if self._use_cuda_graph and self._plan is None:
            self._prepare(shape)

    def _check_numbers(
        self,
        batch: int,
        numbers: Numbers,
        cache_dtype: str,
        batch_invariant: bool,
        max_kv_len: int | None,
    ) -> None:
        """Check sizes, before the first run makes a plan of them."""
        theirs = dict(zip(Numbers._fields, self._numbers, strict=True))
        for name in ("head_dim", "head_dim_v"):
            if cache_dtype == _E4M3 and getattr(numbers, name) % _E4M3_COLUMNS:
                raise ValueError(
                    f"{theirs[name]}: needs a multiple of {_E4M3_COLUMNS} with kv_data_type "
                    f"{_E4M3}, got {getattr(numbers, name)}; pad the columns with zeros"
                )
        with CallersNames(
            theirs | {"batch_invariant": "fixed_split_size", "max_kv_len": "max_sequence_kv"},
            ValueError,
        ):
            sizes: dict[str, Any] = numbers._asdict()
            sizes |= {"batch_invariant": batch_invariant, "max_kv_len": max_kv_len}
            page_size, heads, head_dim = map(sizes.pop, ("page_size", "num_heads", "head_dim"))
            checked_int("page_size", page_size, "pass the tokens of a page", 0)
            AttentionPlan.workspace_bytes(batch, batch, heads, head_dim, **sizes, sm_count=1)

    def _prepare(self, shape: _Shape) -> None:
        """Load the kernels, so that the first run may be captured.

        With one number of query tokens for all requests the plan of the runs can be made, too.
        """
        tokens = shape.batch * (shape.q_len or 1)
        plan = self._make(shape, tokens, next(iter(self._arrays.values())))
        plan.prepare()
        if shape.q_len is not None:
            self._plan, self._made_for = plan, (shape, tokens)
            self._update()

    def _override(self, causal: bool, options: Options) -> None:
        """Take what `forward` says anew, which FlashInfer deprecates."""
        shape = self._planned_shape()
        if self._use_cuda_graph:
            self._check_said(_said(bool(causal), options))
        self._shape = shape._replace(causal=bool(causal), window=options.window_left)
        self._options = options

    def _planned_shape(self) -> _Shape:
        if self._shape is None:
            raise RuntimeError("run: needs a plan, got none; call plan() first")
        return self._shape

    @eager_only
    def _attend(
        self,
        names: CallersNames,
        q: Any,
        k: Any,
        v: Any,
        *,
        scales: tuple[Any, Any, Any],
        sinks: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        window_left: int | None = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
    ) -> Any:
        """Attend with the lengths and pages of the last plan."""
        is_turned = _checked_lse(lse_base, lse_layout)
        shape, options = self._planned_shape(), self._options
        if window_left not in (None, options.window_left):
            raise ValueError(
                f"window_left: needs that of the plan, {options.window_left}, got {window_left}; "
                f"leave it out, or plan for it"
            )
        sm_scale, head_dim, cache_dtype = options.sm_scale, shape.head_dim, shape.cache_dtype
        scale, factors, v_factor = _scales(sm_scale, head_dim, cache_dtype, scales)
        with names:
            optional = {"sinks": sinks, "out": out, "lse": lse}
            given = {name: tensor for name, tensor in optional.items() if tensor is not None}
            check_tensors(q=q, k=k, v=v, **given)
            check_axes("q", q, _Q)
            for name, rows in (("k", k), ("v", v)) if shape.page_size else ():
                self._check_heads(name, rows)
            _check_type("q", q, "q_data_type", self._types[0])
            _check_type("k", k, "kv_data_type", self._types[1])
            wants_lse = bool(return_lse or lse is not None)
            heads_first = is_turned and wants_lse
            if lse is not None:
                axes = "num_qo_heads, tokens" if heads_first else "tokens, num_qo_heads"
                check_axes("lse", lse, axes)
            elif wants_lse:
                size = q.shape[1::-1] if heads_first else q.shape[:2]
                lse = q.new_empty(size, dtype=sys.modules["torch"].float32)
            kv_indices = self._arrays.get("kv_indices")
            given_q = q
            if options.rope is not None:
                q, k, v, kv_indices = self._turned(options.rope, q, k, v)
            q_rows = self._by_request("q", q)
            lse_rows = self._by_request("lse", lse.T if heads_first else lse)
            if wants_lse and shape.q_len is not None:
                lse_rows = lse_rows.swapaxes(1, 2)
            state = self._ready_plan(given_q).run(
                q_rows,
                k,
                v,
                kv_indices=kv_indices,
                softcap=options.logits_soft_cap,
                sinks=None if sinks is None else sinks.float(),
                softmax_scale=scale,
                **factors,
                kv_layout=self._kv_layout if shape.page_size else "NHD",
                out=self._by_request("out", out),
                lse=lse_rows,
            )
        if out is None:
            out = state.out if shape.q_len is None else state.out.flatten(0, 1)
        if v_factor != 1.0:
            out.mul_(v_factor)
        if wants_lse and lse_base == "log2":
            lse.mul_(LOG2_E)
        return (out, lse) if return_lse else out

    def _turned(self, rope: Frequencies, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any, Any]:
        """Rotate queries and keys by their positions; listed pages are copied, one for each entry.

        A page may stand at several places, and a server's pool has many others.
        """
        torch, arrays, shape = sys.modules["torch"], self._arrays, self._planned_shape()
        starts = arrays["kv_indptr"]
        kv_lens = arrays.get("kv_lens")
        if kv_lens is None:
            kv_lens = starts[1:] - starts[:-1]
        cuts = arrays.get("qo_indptr")
        if cuts is None:
            cuts = torch.arange(shape.batch + 1, device=q.device, dtype=torch.int32) * shape.q_len
        q = rope.turn(q, positions_of(cuts, kv_lens - (cuts[1:] - cuts[:-1]), q.shape[0]))
        none = torch.zeros_like(kv_lens)
        pages = arrays.get("kv_indices")
        if pages is None:
            return q, rope.turn(k, positions_of(starts, none, k.shape[0])), v, None
        there = pages.clamp(0, max(k.shape[0] - 1, 0)).long()[: pages.shape[0] if len(k) else 0]
        k, v = k[there], v[there]
        rows = k.transpose(1, 2) if self._kv_layout == "HND" else k
        first = positions_of(starts, none, rows.shape[0]) * shape.page_size
        positions = (first[:, None] + torch.arange(shape.page_size, device=q.device)).flatten()
        rows = rope.turn(rows.flatten(0, 1), positions).unflatten(0, rows.shape[:2])
        k = rows.transpose(1, 2) if self._kv_layout == "HND" else rows
        return q, k, v, torch.arange(pages.shape[0], device=q.device, dtype=torch.int32)

    def _check_heads(self, name: str, rows: Any) -> None:
        need, axis = self._planned_shape().num_kv_heads, -3 if self._kv_layout == "HND" else -2
        if rows.ndim > 2 and rows.shape[axis] != need:
            raise ValueError(
                f"{name}: needs the {need} kv heads of the plan on axis {axis} with kv_layout "
                f"{self._kv_layout!r}, got shape {tuple(rows.shape)}; pass the cache of this "
                f"layer, or make the wrapper with its kv_layout"
            )

    def _by_request(self, name: str, rows: Any) -> Any:
        """Give rows of tokens an axis of requests, if all have the same number of tokens."""
        assert self._shape is not None
        batch, q_len = self._shape.batch, self._shape.q_len
        if rows is None or q_len is None:
            return rows
        if not rows.ndim or rows.shape[0] != batch * q_len:
            raise ValueError(
                f"{name}: needs {q_len} rows for each of the {batch} requests of the plan, got "
                f"shape {tuple(rows.shape)}; pass what was planned, or plan with q_len_per_req"
            )
        return rows.unflatten(0, (batch, q_len))


class PagedWrapper(AttentionWrapper):
    """A wrapper for keys and values in pages."""

    def _say_pages(
        self,
        arrays: dict[str, Any],
        seq_lens: Any,
        numbers: Numbers,
        dtypes: tuple[Any, Any, Any],
        options: Options,
        fixed_split_size: int | None,
        disable_split_kv: bool,
        longest: int | None = None,
        **others: Any,
    ) -> None:
        """Take what a plan says; arrays tell the tokens of last pages."""
        if numbers.page_size == 0:
            raise ValueError("page_size: needs a number above 0, got 0; pass the tokens of a page")
        checked_batch(self._theirs, arrays)
        if seq_lens is None:
            indptr, last = arrays["kv_indptr"], arrays["last_page_len"]
            if indptr.device != last.device:
                indptr, last = map(self._there, (indptr, last))
            if check_mode():
                self._check_last_pages(last, numbers.page_size)
            seq_lens = get_seq_lens(indptr, last, numbers.page_size)
        if not self._use_cuda_graph:
            del arrays["last_page_len"]
        if splits_alike(fixed_split_size, disable_split_kv):
            pages = self._kept.get("kv_indices", arrays["kv_indices"]).shape[0]
            most = max(1, pages * numbers.page_size)
            if not self._use_cuda_graph:
                if longest is not None:
                    most = max(1, longest)
                elif seq_lens.device.type == "cpu" and len(seq_lens):
                    most = _rounded(int(seq_lens.max()))
            others["max_kv_len"] = most
        self._say({**arrays, "kv_lens": seq_lens}, numbers, dtypes, options, **others)

    def _check_last_pages(self, last: Any, page_size: int) -> None:
        if last.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing():
            return
        tokens, need = last.numpy(force=True), f"a number from 0 to page_size = {page_size}"
        wrong = (tokens < 0) | (tokens > page_size)
        refuse_value(
            self._theirs["last_page_len"], tokens, wrong, need, "tell the tokens of the last page"
        )

    @eager_only
    def _attend_to_pages(
        self, q: Any, paged_kv_cache: Any, elsewhere: Mapping[str, Any], **options: Any
    ) -> Any:
        """Attend to a packed cache or a pair; `elsewhere` are arguments of other kernels."""
        refuse(NO_KERNELS, ValueError, **elsewhere)
        names = _PARTS[is_pair(paged_kv_cache)]
        with names:
            k, v = split_cache(paged_kv_cache, self._kv_layout)
        return self._attend(names, q, k, v, **options)


def attend_once(
    q: Any,
    k: Any,
    v: Any,
    kv_layout: str,
    options: Options,
    *,
    causal: bool,
    scales: tuple[Any, Any, Any],
    return_lse: bool,
) -> Any:
    """Attend in one request, without a plan; the cache is its one page."""
    torch = sys.modules["torch"]
    with NAMES():
        check_tensors(q=q, k=k, v=v)
        check_axes("q", q, _Q)
        is_hnd = checked_layout(kv_layout) == "HND"
        form = "num_kv_heads, kv_len, head_dim" if is_hnd else "kv_len, num_kv_heads, head_dim"
        for name, rows in (("k", k), ("v", v)):
            check_axes(name, rows, form)
        kv_len = k.shape[1 if is_hnd else 0]
        scale, factors, v_factor = _scales(options.sm_scale, q.shape[-1], name_of(k.dtype), scales)
        options.check_rotation(q.shape[-1], name_of(k.dtype))
        if options.rope is not None:
            numbers, qo_len = torch.arange(kv_len, device=q.device), q.shape[0]
            q = options.rope.turn(q, torch.arange(kv_len - qo_len, kv_len, device=q.device))
            k = k.transpose(0, 1) if is_hnd else k
            k = options.rope.turn(k, numbers)
            k = k.transpose(0, 1) if is_hnd else k
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        out, _ = attention(
            q[None],
            k[None],
            v[None],
            kv_lens=q.new_full((1,), kv_len, dtype=torch.int32),
            block_table=q.new_zeros((1, 1), dtype=torch.int32),
            causal=bool(causal),
            window=options.window_left,
            softcap=options.logits_soft_cap,
            softmax_scale=scale,
            **factors,
            kv_layout=kv_layout,
            lse=lse.T[None],
        )
    out = out[0]
    if v_factor != 1.0:
        out.mul_(v_factor)
    return (out, lse.mul_(LOG2_E)) if return_lse else out


def refuse_masks(custom_mask: Any, packed_custom_mask: Any) -> None:
    """Refuse masks by element."""
    refuse(
        "cumla masks by causal and window_left; cut a request where its mask changes, or import "
        "the function from flashinfer",
        ValueError,
        custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask,
    )


def splits_alike(fixed_split_size: int | None, disable_split_kv: bool) -> bool:
    """Tell whether results are not to depend on the batch; -1 is no size, as in FlashInfer.

    The size does not matter: cumla cuts requests at positions of its own. What a plan of it needs
    to know is the longest request, without waiting for the GPU.
    """
    return bool(disable_split_kv) or fixed_split_size not in (None, -1)


def longest_of(indptr: Any, longest: int | None) -> int:
    """Tell the keys of the longest request from offsets on the CPU, or from what is said of it."""
    if longest is not None:
        return max(1, longest)
    if indptr.device.type != "cpu":
        raise ValueError(
            "fixed_split_size: needs the longest request beside it, without waiting for the GPU, "
            "got kv_indptr on a GPU; pass kv_indptr_cpu or max_sequence_kv"
        )
    return _rounded(int((indptr[1:] - indptr[:-1]).max()) if len(indptr) > 1 else 1)


def _rounded(length: int) -> int:
    """Round up to a power of 2, so that the plans of many steps are one."""
    return 1 << max(length - 1, 0).bit_length()


def _checked_lse(lse_base: str, lse_layout: str) -> bool:
    """Check both, and tell whether heads come before tokens."""
    for name, value, known in (
        ("lse_base", lse_base, ("log2", "ln")),
        ("lse_layout", lse_layout, ("NH", "HN")),
    ):
        if value not in known:
            raise ValueError(f"{name}: needs {' or '.join(map(repr, known))}, got {value!r}")
    return lse_layout == "HN"


def _said(causal: bool, options: Options) -> dict[str, Any]:
    """Name what a graph holds of the options."""
    return {"causal": causal, **options._asdict()}


def _check_type(name: str, tensor: Any, planned: str, dtype: Any) -> None:
    if tensor.dtype != dtype:
        raise ValueError(
            f"{name}: needs {planned} of the plan, {dtype}, got {tensor.dtype}; convert it, or "
            f"plan for it"
        )


def _scales(
    sm_scale: float | None, head_dim: int, cache_dtype: str, scales: tuple[Any, Any, Any]
) -> tuple[float | None, dict[str, Any], float]:
    """Say where the scales go: to the scores, to `cumla.attention` by name, and to the output.

    `scales` are those of queries, keys and values. Kernels read those of e4m3 keys and values,
    which may be on the GPU. For 16 bits that of keys is folded, too, and that of values multiplies
    the output.
    """
    of_scores = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    factors, of_out = {}, 1.0
    if cache_dtype == _E4M3:
        given = {name: of_scores.pop(name) for name in ("k_scale", "v_scale")}
        factors = {n: _factor(n, scale) for n, scale in given.items() if scale is not None}
    elif (v_scale := of_scores.pop("v_scale")) is not None:
        of_out = factor_of("v_scale", v_scale, "")
    factor = prod([factor_of(n, scale, "") for n, scale in of_scores.items() if scale is not None])
    if factor != 1.0:
        sm_scale = (head_dim**-0.5 if sm_scale is None else sm_scale) * factor
    return sm_scale, factors, of_out


def _factor(name: str, scale: Any) -> Any:
    """Return a number as such, also that of a tensor on the CPU, and other tensors as they are."""
    is_tensor = hasattr(scale, "new_empty")
    if is_tensor and (scale.is_cuda or scale.numel() != 1):
        return scale
    return factor_of(name, scale, "")
