# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's MLA: the wrapper over `cumla.MLAAttentionPlan`, and decoding in a window.

One `plan` serves the `run` of every layer of a step. With ``use_cuda_graph=True`` it works as in
:mod:`cumla.compat.flashinfer.decode`, but the first `run` loads the kernels. What version 0.7 calls
deprecated gives a `DeprecationWarning`, once a wrapper.

Differences from FlashInfer:

* As in :mod:`cumla.compat.flashinfer.decode`, `plan` waits for nothing and reads its tensors later,
  and the first `run` makes a plan of cumla, here a `cumla.MLAAttentionPlan`, with its own memory.
* backend is "auto", "fa2" or "fa3", which all mean cumla's kernels.
* With ``use_cuda_graph=True`` the number of query tokens must stay, like the batch. Tensors that
  the constructor does not get are kept as copies from the first plan. Rows of no request hold
  anything; those after the last offset are not written in ``out``.
* Every run takes packed tensors or pairs, and returns an lse or not, whatever the plan announced.
* head_dim_ckv is 512, head_dim_kpe 64 or 0, page_size any number. Queries and outputs are bfloat16
  or float16, caches the same, or float8_e4m3fn beside bfloat16; scale_mode is "default", or with
  such a cache "kv-per-tensor", which means the same. In bfloat16 head_dim_ckv may be 256, beside a
  head_dim_kpe of 64 or 32.
* Lists are int32 or int64, on the GPU or the CPU, with gaps or without; kv_indptr and kv_indices
  may be longer.
* ckv_scale_arr, in place of ckv_scale, is ``(num_pages, page_size, 4)`` float32, of 128 columns of
  a token each.
* query_layout, kv_cache_layout, max_q_len and profiler_buffer are ignored; what belongs to other
  backends is refused with `ValueError`.
* `batch_decode_with_kv_cache_mla_swa` takes any batch, number of query tokens and heads, page size,
  strides and window, rows of any width of `cumla.mla_decode` in bfloat16 or float16, and no
  workspace.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from cumla.compat._arguments import check_tensors, missing_from
from cumla.compat._table import Interface
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
from cumla.core.arguments import checked_int, checked_scale
from cumla.core.frameworks import eager_only
from cumla.mla.attention import MLAAttentionPlan
from cumla.mla.decode import mla_decode
from cumla.mla.shape import WIDTHS

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAPlanMetadata",
    "batch_decode_with_kv_cache_mla_swa",
    "get_mla_swa_workspace_size_bytes",
]
__getattr__ = missing_from(__name__, "flashinfer.mla")

_CKV, _KPE = 512, 64  # columns of a row
_FP8 = "float8_e4m3fn"
_FOR_FP8 = " for an FP8 cache"
_SCALES = 4  # of a row, one for 128 latent columns
# cumla's names -> FlashInfer's, of what a plan is made of
_CSR = {
    "qo_indptr": "qo_indptr",
    "kv_lens": "kv_len_arr",
    "kv_indptr": "kv_indptr",
    "kv_indices": "kv_indices",
}
_DENSE = {"qo_indptr": "cum_seq_lens_q", "kv_lens": "seq_lens", "block_table": "block_tables"}
_SIZES = (  # that a plan needs
    *("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale"),
    *("q_data_type", "kv_data_type"),
)
_MLA = Interface(
    {
        "q": "query",
        "q[0]": "q_nope",
        "q[1]": "q_pe",
        "kv_cache[0]": "ckv_cache",
        "kv_cache[1]": "kpe_cache",
        "kv_cache[2]": "ckv_scale_arr",
        "kv_scale": "kpe_scale",
        "kv_lens": "kv_len_arr",
        "block_table": "block_tables",
        "softmax_scale": "sm_scale",
    },
    ValueError,
    refused=dict.fromkeys(
        (
            *("use_profiler", "output_scale", "scale_mode", "skip_softmax", "qk_nope_head_dim"),
            *("enable_pdl", "is_var_seq", "cute_dsl_impl", "use_sinks", "kv_len", "page_table"),
            *("o_scale", "sinks", "skip_softmax_threshold_scale_factor"),
            *("bmm1_scale", "bmm2_scale"),
        ),
        NO_KERNELS,
    ),
    unused={
        **dict.fromkeys(("use_profiler", "skip_softmax", "use_sinks"), False),
        "output_scale": "none",
        "scale_mode": "default",
        "cute_dsl_impl": "auto",
    },
    refusal=ValueError,
)

_SWA = Interface(
    {
        "q": "query",
        "block_table": "block_tables",
        "kv_lens": "seq_lens",
        "softmax_scale": "sm_scale",
        "window": "window_left",
    },
    ValueError,
)
_SWA_BACKENDS = ("auto", "sm90")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _warns_of_positions(method: _Method) -> _Method:
    @functools.wraps(method)
    def wrapped(self: BatchMLAPagedAttentionWrapper, *args: Any, **kwargs: Any) -> Any:
        if args:
            self._warn("positional arguments of plan() and run()", "pass them by keyword", 3)
        return method(self, *args, **kwargs)

    return cast("_Method", wrapped)


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Lengths and pages of a batch, in one of FlashInfer's two forms, or in both.

    Make it with `csr`, `dense` or `dual`. FlashInfer's own objects will do as well.
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
    ) -> MLAPlanMetadata:
        """Describe a batch by lists of pages; the tensors are those of `plan`."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Describe a batch by a table of pages, ``(batch, max_pages)``; max_q_len is not used."""
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Describe a batch in both forms; of them the lists are used."""
        return cls(
            *(qo_indptr, kv_indptr, kv_indices, kv_len_arr),
            *(cum_seq_lens_q, block_tables, seq_lens, max_q_len),
        )


def get_mla_swa_workspace_size_bytes(
    batch_size: int, q_len_per_req: int, num_q_heads: int = 64
) -> int:
    """Return 0 bytes: `batch_decode_with_kv_cache_mla_swa` has memory of its own."""
    return 0


def batch_decode_with_kv_cache_mla_swa(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    window_left: int,
    sm_scale: float,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend to the last window_left tokens before a query's own, and to its own: absorbed MLA.

    query is ``(batch, q_len, num_heads, 1088)``, kv_cache ``(num_pages, page_size, 1088)``, the
    result ``(batch, q_len, num_heads, 1024)``, and that of a request without keys is 0.
    workspace_buffer is not used. Capture it into a CUDA graph after one call.
    """
    if backend not in _SWA_BACKENDS:
        raise ValueError(
            f"backend: needs one of {', '.join(_SWA_BACKENDS)}, got {backend!r}; cumla has kernels "
            f"of its own, so leave it out"
        )
    check_tensors(query=query, kv_cache=kv_cache, block_tables=block_tables, seq_lens=seq_lens)
    with _SWA():
        return mla_decode(
            query,
            kv_cache,
            block_tables,
            seq_lens,
            window=window_left,
            softmax_scale=sm_scale,
            out=out,
        ).out


class _Shape(NamedTuple):
    """The options of the `MLAAttentionPlan` of a plan."""

    batch: int
    num_heads: int
    page_size: int
    head_dim: int
    dtype: str
    cache_dtype: str
    causal: bool


class _Form(NamedTuple):
    """The tensors that the runs of a plan take."""

    q_data_type: Any
    kv_data_type: Any
    head_dim_ckv: int
    head_dim_kpe: int
    has_fixed_lse: bool  # else a run decides about the lse, which is deprecated


class BatchMLAPagedAttentionWrapper(Planned[MLAAttentionPlan, _Shape]):
    """Attention over a paged MLA cache, planned once a step."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(
                f"backend: needs one of {', '.join(BACKENDS)}, got {backend!r}; cumla has kernels "
                f"of its own, so leave it out; plan(metadata=MLAPlanMetadata.dense(...)) takes "
                f"block tables"
            )
        check_tensors(float_workspace_buffer=float_workspace_buffer)
        buffers = {
            "qo_indptr": ("qo_indptr", qo_indptr),
            "kv_lens": ("kv_len_arr", kv_len_arr),
            "kv_indptr": ("kv_indptr", kv_indptr),
            "kv_indices": ("kv_indices", kv_indices),
        }
        super().__init__(float_workspace_buffer, use_cuda_graph, buffers, _DENSE | _CSR, "query")
        self._form: _Form | None = None
        self._sm_scale: float | None = None
        self._warned: set[str] = set()

    @_warns_of_positions
    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | str | None = None,
        kv_data_type: torch.dtype | str | None = None,
        use_profiler: bool = False,
        *,
        metadata: Any = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | str | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        qk_nope_head_dim: int | None = None,
        enable_pdl: bool | None = None,
        is_var_seq: bool | None = None,
        cute_dsl_impl: str = "auto",
        use_sinks: bool = False,
    ) -> None:
        """Take lengths, pages and options for the runs that follow, without waiting for the GPU."""
        given = locals()
        q_data_type, kv_data_type = dtype_of(q_data_type), dtype_of(kv_data_type)
        if scale_mode == "kv-per-tensor" and name_of(kv_data_type) == _FP8:
            given["scale_mode"] = "default"
        _MLA.refuse(given)
        needed = {name: given[name] for name in _SIZES}
        needed |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        for name, value in needed.items():
            if value is None:
                raise TypeError(f"{name}: needs a value, got None; pass it to plan()")
        if (head_dim_ckv, head_dim_kpe) not in WIDTHS:
            known = ", ".join(f"{latent} and {rope}" for latent, rope in WIDTHS)
            raise ValueError(
                f"head_dim_ckv: needs rows of as many columns, and as many of RoPE (head_dim_kpe), "
                f"as one of {known}, got {head_dim_ckv} and {head_dim_kpe}; import the wrapper "
                f"from flashinfer for others"
            )
        dtypes = checked_dtypes(
            q_data_type, kv_data_type, dtype_of(output_dtype), ("bfloat16",), "output_dtype"
        )
        with _MLA:
            sm_scale = checked_scale(sm_scale, 1.0)
            for name in ("num_heads", "page_size"):  # here, because 16.0 equals 16
                checked_int(name, needed[name], "pass the size of a call")
        flat = MLAPlanMetadata(
            **{field.name: given[field.name] for field in fields(MLAPlanMetadata)}
        )
        is_flat = any(value is not None for value in vars(flat).values())
        if metadata is not None and is_flat:
            raise ValueError(
                "metadata: needs the other tensors left out, got both; pass lengths and pages once"
            )
        if is_flat:
            self._warn("lengths and pages beside metadata=", "pass metadata=MLAPlanMetadata...", 4)
        arrays = _lengths_and_pages(flat if is_flat else metadata)
        shape = _Shape(
            arrays["kv_lens"].shape[0],
            needed["num_heads"],
            needed["page_size"],
            _columns_of(needed["head_dim_ckv"], needed["head_dim_kpe"], *dtypes),
            *dtypes,
            bool(causal),
        )
        has_fixed_lse = qo_indptr is None or lse_mode != "none"
        widths = needed["head_dim_ckv"], needed["head_dim_kpe"]
        form = _Form(q_data_type, kv_data_type, *widths, has_fixed_lse)
        pages = "block_tables" if "block_table" in arrays else "kv_indices"
        said = needed | {"causal": shape.causal, "sm_scale": sm_scale, "metadata": pages}
        self._take(shape, arrays, said)
        self._form, self._sm_scale = form, sm_scale

    @_warns_of_positions
    @eager_only
    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | None = None,
        bmm2_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend, with the lengths and pages of the last plan."""
        _MLA.refuse(locals(), _REFUSED_BY_RUN)
        if query is None or kv_cache is None:
            self._warn("q_nope, q_pe, ckv_cache and kpe_cache", "pass query= and kv_cache=", 4)
        q = _one_form("query", query, q_nope=q_nope, q_pe=q_pe)
        cache = _one_form("kv_cache", kv_cache, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        shape, form = self._shape, self._form
        if shape is None or form is None:
            raise RuntimeError("run: needs a plan, got none; call plan() first")
        wants_lse = bool(return_lse or lse is not None)
        if wants_lse and not form.has_fixed_lse:
            self._warn("an lse that plan() did not announce", "pass lse_mode= to plan()", 4)
        heads, page_size = ("num_heads", shape.num_heads), ("page_size", shape.page_size)
        _check_parts(("query", "q_nope", "q_pe"), q, "q_data_type", form, heads)
        _check_parts(("kv_cache", "ckv_cache", "kpe_cache"), cache, "kv_data_type", form, page_size)
        if form.head_dim_kpe == 0:
            q, cache = (x[0] if isinstance(x, tuple) else x for x in (q, cache))
            if shape.head_dim != _CKV:
                q, cache = _with_rope(q, cache)
        scales = {"ckv_scale": ckv_scale, "ckv_scale_arr": ckv_scale_arr, "kpe_scale": kpe_scale}
        kv_scale = None
        if shape.cache_dtype == _FP8:
            cache, kv_scale = _with_scales(cache, has_rope=form.head_dim_kpe > 0, **scales)
        else:
            given = [name for name, scale in scales.items() if scale is not None]
            if given:
                raise ValueError(
                    f"{given[0]}: ckv_scale, ckv_scale_arr and kpe_scale need a plan with "
                    f"kv_data_type {_FP8}, got {shape.cache_dtype}; leave them out"
                )
        with _MLA:
            plan = self._ready_plan(q[0] if isinstance(q, tuple) else q)
            state = plan.run(
                q,
                _with_a_page(cache),
                block_table=self._arrays.get("block_table"),
                kv_indices=self._arrays.get("kv_indices"),
                softmax_scale=self._sm_scale,
                kv_scale=kv_scale,
                out=out,
                lse=lse,
            )
        if wants_lse and not return_lse_base_on_e:
            state.lse.mul_(LOG2_E)
        return tuple(state) if return_lse else state.out

    def _make(self, shape: _Shape, tokens: int, like: Any) -> MLAAttentionPlan:
        return MLAAttentionPlan(total_tokens=tokens, like=like, **shape._asdict())

    def _warn(self, what: str, instead: str, stacklevel: int) -> None:
        if what not in self._warned:
            self._warned.add(what)
            message = f"FlashInfer deprecates {what}; {instead}"
            warnings.warn(message, DeprecationWarning, stacklevel)


_REFUSED_BY_RUN = _MLA.refused_by(BatchMLAPagedAttentionWrapper.run)


def _check_parts(
    names: tuple[str, str, str], value: Any, planned: str, form: _Form, axis: tuple[str, int]
) -> None:
    """Check dtype, middle axis and columns of a packed tensor, or of a pair, against the plan."""
    size_name, size = axis
    whole, *parts = names
    dtype = getattr(form, planned)
    width = form.head_dim_ckv, form.head_dim_kpe
    given = {whole: (value, sum(width))}
    if isinstance(value, tuple):
        if len(value) != 2:
            raise ValueError(f"{whole}: needs a tensor or a pair, got {len(value)}; pass {parts}")
        given = dict(zip(parts, zip(value, width, strict=True), strict=True))
    for name, (part, columns) in given.items():
        check_tensors(**{name: part})
        if part.dtype != dtype:
            raise ValueError(
                f"{name}.dtype: needs {planned} of the plan, {dtype}, got {part.dtype}; convert "
                f"{name}, or plan for it"
            )
        if len(part.shape) != 3 or part.shape[2] != columns:
            raise ValueError(
                f"{name}: needs 3 axes, the last of {columns} columns, got shape "
                f"{tuple(part.shape)}; reshape it, or plan for it"
            )
        if part.shape[1] != size:
            raise ValueError(
                f"{name}: needs {size_name} of the plan, {size}, as its second axis, got shape "
                f"{tuple(part.shape)}; pass what was planned, or plan for it"
            )


def _columns_of(ckv: int, kpe: int, dtype: str, cache_dtype: str) -> int:
    """Return the columns of rows as kernels take them: without RoPE those have bfloat16 alone."""
    return ckv + kpe if kpe or {dtype, cache_dtype} == {"bfloat16"} else ckv + _KPE


def _with_rope(q: Any, ckv: Any) -> tuple[Any, Any]:
    """Add RoPE columns where a model has none: 0 in the query, so that those read do not count.

    Those of the cache are its first latent columns once more, which takes no memory.
    """
    return (q, q.new_zeros((*q.shape[:-1], _KPE))), (ckv, ckv[..., :_KPE])


def _with_a_page(cache: Any) -> Any:
    """Add a page that nobody reads to a cache without pages: there is nothing to attend to."""
    if not isinstance(cache, tuple):
        return cache if cache.shape[0] else cache.new_empty((1, *cache.shape[1:]))
    return cache if cache[0].shape[0] else tuple(map(_with_a_page, cache))


def _with_scales(
    cache: Any, *, has_rope: bool, ckv_scale: Any, ckv_scale_arr: Any, kpe_scale: Any
) -> Any:
    """Return an FP8 cache as cumla takes it, and the factor of what has no scales in it."""
    if (ckv_scale is None) == (ckv_scale_arr is None):
        raise ValueError(
            f"ckv_scale: needs either it or ckv_scale_arr for an FP8 cache, got "
            f"{'neither' if ckv_scale is None else 'both'}; pass ckv_scale=1.0 if the rows were "
            f"not scaled"
        )
    ckv_factor = 1.0 if ckv_scale is None else factor_of("ckv_scale", ckv_scale, _FOR_FP8)
    # Without RoPE columns the query's are 0: any factor will do, and one for all costs the least.
    kpe_factor = factor_of("kpe_scale", kpe_scale, _FOR_FP8) if has_rope else ckv_factor
    first = cache[0] if isinstance(cache, tuple) else cache
    if ckv_scale_arr is None:
        if ckv_factor == kpe_factor:
            return cache, kpe_factor
        torch = sys.modules["torch"]
        ckv_scale_arr = torch.full(
            (*first.shape[:-1], _SCALES), ckv_factor, dtype=torch.float32, device=first.device
        )
    parts = (first[..., :_CKV], cache[..., _CKV:]) if first is cache else cache
    return (*parts, ckv_scale_arr), kpe_factor


def _lengths_and_pages(metadata: Any) -> dict[str, Any]:
    """Take the tensors of one form, by cumla's names, and check their kinds and batch."""
    if not hasattr(metadata, "kv_len_arr"):
        raise TypeError(
            f"metadata: needs all of {', '.join(_CSR.values())}, or all of "
            f"{', '.join(_DENSE.values())}, got neither; make it with MLAPlanMetadata.csr or .dense"
        )
    for theirs in (_CSR, _DENSE):
        arrays = {name: getattr(metadata, theirs[name], None) for name in theirs}
        missing = [theirs[name] for name, array in arrays.items() if array is None]
        if not missing:
            checked_batch(theirs, arrays)
            return arrays
        if len(missing) < len(arrays):
            break
    raise ValueError(f"{missing[0]}: needs a tensor, got None; describe the pages of all requests")


def _one_form(name: str, whole: Any, **parts: Any) -> Any:
    """Return a packed tensor or a pair, however it was passed."""
    given = tuple(part for part in parts.values() if part is not None)
    if whole is None and len(given) == len(parts):
        return given
    if whole is not None and not given:
        return tuple(whole) if isinstance(whole, list) else whole
    both = " and ".join(parts)
    if whole is None and given:
        raise ValueError(f"{name}: needs both {both}, got one; pass the other, too")
    raise TypeError(
        f"{name}: needs {name}= alone, or {both} together, got "
        f"{'neither' if whole is None else 'both forms'}; pass one form: {name}= by name, because "
        f"the first four arguments are q_nope, q_pe, ckv_cache and kpe_cache"
    )
