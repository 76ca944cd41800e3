# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's Python interface over `cumla.mla_decode` and sparse MLA.

The first call with a metadata object computes the schedule on the device, from the lengths in its
``cache_seqlens``, or, with ``indices``, from ``topk_length`` and ``extra_topk_length``; it serves
every later call with that object: one object for one decoding step, all layers. Captured into a
CUDA graph, it is computed anew by each replay. Keep the metadata object as long as the graphs: it
holds every schedule that was computed with it. Where nothing is attended out is 0 and lse +inf;
sinks scale out, and lse is without them.

Differences from FlashMLA:

* Inference only: no gradients flow.
* A metadata object belongs to the shapes, dtype, device and mask of its first call. With other
  lengths calls stay inside the cache, but their results are undefined; ``CUMLA_CHECK=1`` finds
  lengths that changed in the tensor of the first call, and does not look at another tensor.
* Each stream has a schedule of its own, and calls outside of graphs do not rely on one that only a
  graph computes. In graphs of torch.compile, after ``import cumla.torch``, each call computes its
  own.
* Sparse calls take any number of heads, any topk, and ``topk_length`` beside the format of
  DeepSeek-V3.2; an index that names no slot counts as absent. A second cache goes with the formats
  of V4 and V4.1.
* A dense cache has pages of any size. It may be e4m3 under ``descale_k``, as with SGLang's build,
  beside queries in 16 bits or e4m3.
* The functions of prefill attention have no dropout.
* Tensors on the CPU are computed by `cumla.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.compat._arguments import check_axes, check_tensors, missing_from, refuse_gradients
from cumla.compat._flash_mla_sparse import (
    KV_FORMATS,
    SecondCache,
    check_dtypes,
    check_sink,
    flash_mla_sparse_fwd,
    packed_rows,
    with_sink,
    written,
)
from cumla.compat._table import Interface
from cumla.compat._torch import import_torch, is_traced, plainly
from cumla.core.arguments import INT32, Array, bind, checked_scale
from cumla.core.arrays import current_stream, open_call
from cumla.mha.attention import attention
from cumla.mla.decode import MLADecodePlan, mla_decode
from cumla.mla.shape import HEAD_DIM, PACKED, UNNAMED, width_of
from cumla.sparse.mla_sparse import MLASparsePlan, mla_sparse_decode

if TYPE_CHECKING:
    import torch

    from cumla.core.plan import Plan

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
]
__getattr__ = missing_from(__name__, "flash_mla")

_VALUE_DIM = 512
_SECOND_CACHE = (
    "belongs to a second cache, which goes with the formats of DeepSeek-V4 and V4.1; attend to "
    "each cache with cumla's own functions, and merge the results by cumla.merge_attention_states"
)
_SPARSE = "belongs to sparse attention, whose calls have indices; "
_UPDATES = (  # of the check mode
    "call plan.update(kv_lens) after each change of the lengths",
    "call plan.update(topk_lens) after each change of the lengths",
)
_CALL = Interface(
    {
        "kv_cache": "k_cache",
        "kv_lens": "cache_seqlens",
        "extra_kv_cache": "extra_k_cache",
        "extra_indices": "extra_indices_in_kvcache",
        "sinks": "attn_sink",
        "topk_lens": "topk_length",
        "extra_topk_lens": "extra_topk_length",
        "that the plan was updated with": "of the metadata object's first call",
        **dict.fromkeys(_UPDATES, "call get_mla_metadata() for each step with new lengths"),
    },
    refused={
        **dict.fromkeys(SecondCache._fields, _SECOND_CACHE),
        "descale_q": "is the factor of e4m3 queries beside an e4m3 k_cache; leave it out otherwise",
        "descale_k": (
            "is the factor of a dense e4m3 k_cache; leave it out, packed rows hold their factors"
        ),
        **dict.fromkeys(("attn_sink", "topk_length", "kv_format"), f"{_SPARSE}leave it out"),
    },
)
_VARLEN = Interface({"qo_indptr": "cu_seqlens_qo", "kv_indptr": "cu_seqlens_kv"})
_ENTRY = "give each request of the batch its entry"
_INTEGERS = {
    "block_table": Array("batch max_pages", INT32, "row", _ENTRY),
    "kv_lens": Array("batch", INT32, way_out=_ENTRY),
}


class _Shape(NamedTuple):
    """The properties that all dense calls with a metadata object share."""

    batch: int
    seq_q: int
    heads_q: int
    page_size: int
    heads_k: int
    d_qk: int
    dtype: Any
    cache_dtype: Any
    causal: bool
    device: Any
    longest: int | None  # with enable_batch_invariant: tokens that a request has room for


class _SparseShape(NamedTuple):
    """The same for sparse calls."""

    batch: int
    seq_q: int
    heads_q: int
    d_qk: int
    topk: int
    has_topk_length: bool
    extra_topk: int | None
    has_extra_topk_length: bool
    is_fp8_kvcache: bool
    form: str | None
    invariant: bool
    dtype: Any
    device: Any


class FlashMLASchedMeta:
    """The metadata object: empty at first, with a schedule from the first call on.

    FlashMLA's fields may be assigned, as SGLang does before dense FP8 calls; nobody reads what they
    hold. With another tile_scheduler_metadata the object is as new: a step of its own.
    """

    __slots__ = (
        "_device",
        "_plans",
        "_shape",
        "_stale",
        "_tiles",
        "config",
        "have_initialized",
        "num_splits",
    )

    def __init__(self) -> None:
        self.have_initialized = False
        self.config: Any = None
        self.num_splits: Any = None
        self._tiles: Any = None
        self._stale: set[Any] = set()  # plans whose schedules are of a former step
        self._shape: _Shape | _SparseShape | None = None  # of the calls that succeeded
        self._device: int | None = None  # where those were, as a CUDA ordinal
        # By shape, stream, and whether a graph computes the schedule. Graphs hold their addresses,
        # so none is let go.
        self._plans: dict[tuple[_Shape | _SparseShape, int, bool], Plan[Any]] = {}

    @property
    def tile_scheduler_metadata(self) -> Any:
        """The value that was assigned last."""
        return self._tiles

    @tile_scheduler_metadata.setter
    def tile_scheduler_metadata(self, tiles: Any) -> None:
        if tiles is not self._tiles:
            self._stale = set(self._plans)  # which graphs may read
            self._shape = None
        self._tiles = tiles


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Make the metadata object of one decoding step, and None, in the place of num_splits.

    Differences from FlashMLA: the arguments, which differ between its versions, are ignored.
    """
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make tensors for the fields of a metadata object, as SGLang's build asks for them.

    Differences from it: the tensors hold nothing, and the other arguments are ignored.
    """
    check_tensors(seqlens_k=seqlens_k)
    torch = import_torch()
    empty = {"dtype": torch.int32, "device": seqlens_k.device}
    return torch.zeros(1, 8, **empty), torch.zeros(len(seqlens_k) + 1, **empty)


def has_legacy() -> bool:
    """Tell SGLang that dense attention is there."""
    return True


@plainly
def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode over a paged latent cache.

    Differences from FlashMLA:

    * Without indices k_cache has q's dtype, or is e4m3, ``(num_blocks, page_size, heads_k, 576)``
      under descale_k, ``(1,)`` float32; q is then bfloat16, or e4m3 under descale_q. Both may have
      512, 320 or 288 columns, with a head_dim_v of 512 or 256. With indices
      16-bit caches go with as many columns as q, and packed ones with q in bfloat16; their blocks
      are contiguous and begin at multiples of 16 bytes. Pages have any size.
    * topk_length may be ``(batch, seq_q)``.
    * By position softmax_scale comes before causal, as in FlashMLA, whose README leaves it out.
    * out, of vLLM, is written to and returned. With enable_batch_invariant, of vLLM, a request, or
      a query token with indices, has the same bits in any batch.
    * An is_fp8_kvcache of None looks at the cache. use_legacy, of SGLang, is ignored. Rows of 528
      bytes need a kv_format, V32_NO_ROPE or V41: no width is taken for one of two formats. A second
      cache of V4.1 may have rows of 528 or of 288 bytes.
    """
    if isinstance(softmax_scale, bool):
        raise TypeError("softmax_scale: needs a number, got bool; pass causal= by name")
    if is_fp8_kvcache is None:
        is_fp8_kvcache = indices is not None and k_cache.dtype.itemsize == 1
    extra = SecondCache(extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    if indices is None or not is_fp8_kvcache:
        _CALL.refuse(extra._asdict())
    columns = _VALUE_DIM if indices is not None else _value_columns(q)
    _check_metadata(head_dim_v, tile_scheduler_metadata, num_splits, columns)
    metadata, scale = tile_scheduler_metadata, softmax_scale
    if indices is not None:
        _CALL.refuse({"descale_q": descale_q, "descale_k": descale_k})
        form = _checked_format(kv_format, q, bool(is_fp8_kvcache))
        return _attend_sparsely(
            metadata,
            q,
            k_cache,
            indices,
            scale,
            bool(causal),
            bool(is_fp8_kvcache),
            bool(enable_batch_invariant),
            attn_sink,
            topk_length,
            extra,
            out,
            form,
        )
    _CALL.refuse({"attn_sink": attn_sink, "topk_length": topk_length, "kv_format": kv_format})
    check_tensors(q=q, k_cache=k_cache, block_table=block_table, cache_seqlens=cache_seqlens)
    refuse_gradients(q=q, k_cache=k_cache)
    check_axes("q", q, "batch, seq_q, heads_q, 576")
    check_axes(
        "k_cache", k_cache, "num_blocks, page_size, heads_k, 576", "num_blocks, page_size, 576"
    )
    queries, fp8, after = _fp8_arguments(q, k_cache, is_fp8_kvcache, descale_q, descale_k)
    longest = None
    if enable_batch_invariant and block_table is not None:  # all that a row of it can name
        check_axes("block_table", block_table, "batch, max_blocks")
        longest = max(1, block_table.shape[1] * k_cache.shape[1])
    shape = _shape_of(queries, k_cache, bool(causal), longest)
    if is_traced():  # graphs take no plans
        options: dict[str, Any] = {
            "causal": shape.causal,
            "batch_invariant": bool(enable_batch_invariant),
        }
        options |= {"softmax_scale": scale, **fp8}
        found, lse = mla_decode(queries, k_cache, block_table, cache_seqlens, **options)
        if after is not None:
            found = (found / after).to(found.dtype)
        return written(out, found), lse.masked_fill(lse == -inf, inf).mT
    _check_first_use(metadata, shape)

    def updated(plan: MLADecodePlan | None) -> MLADecodePlan:
        _check_integers(q, block_table=block_table, kv_lens=cache_seqlens)
        modes: dict[str, Any] = {"causal": shape.causal, "max_kv_len": longest}
        modes["batch_invariant"] = longest is not None
        plan = plan or FlashMLAPlan.from_arrays(queries, k_cache, **modes)
        plan.update(cache_seqlens)
        return plan

    with _CALL:
        checked_scale(scale, 1.0)  # run() does so, too, but after the schedule's launch
        plan = _updated_plan(metadata, shape, q, updated)
        options = {"block_table": block_table, "softmax_scale": scale, "out": out}
        found, lse = plan.run(queries, k_cache, **options, **fp8)
    metadata._shape = shape
    if after is not None:
        found.div_(after)
    return found if out is None else out, lse.mT


def _fp8_arguments(
    q: Any, k_cache: Any, is_fp8: bool | None, descale_q: Any, descale_k: Any
) -> tuple[Any, dict[str, Any], Any]:
    """Return the queries, what an e4m3 cache has beside them, and what divides the output.

    e4m3 queries of rows without kernels for them become bfloat16, and values are then multiplied by
    the factor of the scores.
    """
    e4m3 = import_torch().float8_e4m3fn
    if k_cache.dtype != e4m3:
        if is_fp8:
            raise TypeError(
                f"k_cache: needs float8_e4m3fn with is_fp8_kvcache and without indices, got "
                f"{k_cache.dtype}; pass indices for packed rows, or leave is_fp8_kvcache out"
            )
        _CALL.refuse({"descale_q": descale_q, "descale_k": descale_k})
        return q, {}, None
    if q.dtype != e4m3:
        if descale_q is not None:
            raise NotImplementedError(
                f"descale_q: is the factor of e4m3 queries, got it beside q of {q.dtype}; leave it "
                f"out"
            )
        return q, {"kv_scale": descale_k}, None
    factors = [factor for factor in (descale_q, descale_k) if factor is not None]
    for name, factor in {"descale_q": descale_q, "descale_k": descale_k}.items():
        if factor is None:
            continue
        check_tensors(**{name: factor})
        if factor.numel() != 1 or factor.dtype != import_torch().float32:
            raise ValueError(
                f"{name}: needs one float32 number, got shape {tuple(factor.shape)} and "
                f"{factor.dtype}; pass the factor of the whole tensor"
            )
    if q.shape[-1] == HEAD_DIM:
        return q, {"q_scale": descale_q, "kv_scale": descale_k, "fp8_products": True}, None
    scale = factors[0] * factors[-1] if len(factors) == 2 else (factors or [None])[0]
    fp8 = {"kv_scale": None if scale is None else scale.reshape(1), "fp8_products": True}
    return q.to(import_torch().bfloat16), fp8, descale_q


def _checked_format(kv_format: str | None, q: Any, is_fp8: bool) -> str | None:
    """Check the name of a format; return cumla's."""
    if kv_format is None:
        return None
    if kv_format not in KV_FORMATS:
        raise NotImplementedError(
            f"kv_format: needs {' or '.join(KV_FORMATS)}, got {kv_format!r}; cumla has no other "
            f"packed format"
        )
    form = KV_FORMATS[kv_format]
    columns = HEAD_DIM if form == PACKED else _VALUE_DIM
    if not is_fp8 or q.shape[-1] != columns:
        raise ValueError(
            f"kv_format: needs a packed cache beside q of {columns} columns for {kv_format}, got q "
            f"of shape {tuple(q.shape)}; leave it out, or pass the format of the cache"
        )
    return form


def _attend_sparsely(
    metadata: FlashMLASchedMeta,
    q: Any,
    k_cache: Any,
    indices: Any,
    softmax_scale: float | None,
    causal: bool,
    is_fp8: bool,
    invariant: bool,
    attn_sink: Any,
    topk_length: Any,
    extra: SecondCache,
    out: Any,
    form: str | None,
) -> tuple[Any, Any]:
    if causal:
        raise ValueError(
            "causal: needs False with indices, which tell all that a query sees, got True; leave "
            "it out"
        )
    check_tensors(q=q, k_cache=k_cache, indices=indices)
    check_axes("q", q, "batch, seq_q, heads_q, d_qk")
    check_axes("indices", indices, "batch, seq_q, topk")
    check_sink(q, attn_sink)
    refuse_gradients(q=q, k_cache=k_cache, attn_sink=attn_sink)
    batch, seq_q, heads_q, d_qk = q.shape
    if d_qk == HEAD_DIM:
        _CALL.refuse(extra._asdict())
    if not is_fp8:
        check_dtypes("k_cache", k_cache, q, "of a packed cache say is_fp8_kvcache=True")
    cache = k_cache
    if is_fp8:
        cache, form = packed_rows("k_cache", k_cache, d_qk, form)
    named: dict[str, Any] = {} if form in (None, *UNNAMED) else {"cache_format": form}
    second, extra_topk = extra.checked(d_qk, form or "")
    if is_traced():
        second |= {"topk_lens": topk_length, "extra_topk_lens": extra.extra_topk_length}
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "batch_invariant": invariant}
        found, lse = mla_sparse_decode(q, cache, indices, **named, **second, **options)
        found, lse = with_sink(found, lse, attn_sink)
        return written(out, found), lse.mT
    forms = f"{form}+{second.get('extra_cache_format', form)}" if second else form
    has_lengths = topk_length is not None, extra.extra_topk_length is not None
    sizes = batch, seq_q, heads_q, d_qk, indices.shape[2], has_lengths[0], extra_topk
    shape = _SparseShape(*sizes, has_lengths[1], is_fp8, forms, invariant, q.dtype, q.device)
    _check_first_use(metadata, shape)

    def updated(plan: MLASparsePlan | None) -> MLASparsePlan:
        plan = plan or FlashMLASparsePlan.from_arrays(
            q, cache, indices, **named, **second, batch_invariant=invariant
        )
        plan.update(topk_length, extra_topk_lens=extra.extra_topk_length)
        return plan

    with _CALL:
        checked_scale(softmax_scale, 1.0)
        plan = _updated_plan(metadata, shape, q, updated)
        second.pop("extra_cache_format", None)  # which the plan has
        found, lse = plan.run(
            q, cache, indices, **second, sinks=attn_sink, softmax_scale=softmax_scale, out=out
        )
    metadata._shape = shape
    return found if out is None else out, lse.mT


def _check_first_use(metadata: FlashMLASchedMeta, shape: _Shape | _SparseShape) -> None:
    had = metadata._shape
    if had is not None and had != shape:
        first, now = (
            " ".join(f"{name}={value}" for name, value in one._asdict().items())
            for one in (had, shape)
        )
        raise ValueError(
            f"tile_scheduler_metadata: needs what it was first used with, {first}, got {now}; call "
            f"get_mla_metadata() for each combination"
        )


class FlashMLAPlan(MLADecodePlan):
    """FlashMLA's log-sum-exp of nothing is +inf."""

    _hidden = MappingProxyType({"empty_lse": inf})


class FlashMLASparsePlan(MLASparsePlan):
    """FlashMLA's log-sum-exp of lists is without sinks."""

    _hidden = MappingProxyType({"as_flash_mla": True})


def _shape_of(q: Any, k_cache: Any, causal: bool, longest: int | None) -> _Shape:
    """Check the properties that calls with a metadata object must share."""
    batch, seq_q, heads_q, d_qk = q.shape
    page_size, *heads_k = k_cache.shape[1:-1]
    if k_cache.dtype != import_torch().float8_e4m3fn:
        check_dtypes("k_cache", k_cache, q, "pass float8_e4m3fn rows, or packed ones with indices")
    for name, tensor in {"q": q, "k_cache": k_cache}.items():
        if width_of(tensor.shape[-1]) is None or tensor.shape[-1] != d_qk:
            raise ValueError(
                f"{name}: needs {HEAD_DIM} columns, {_VALUE_DIM} latent ones and those of RoPE, or "
                f"{_VALUE_DIM} as q and k_cache of a model without RoPE, got shape "
                f"{tuple(tensor.shape)}; call cumla.mla_decode with pairs for parts"
            )
    kv_heads = heads_k[0] if heads_k else 1
    modes = q.dtype, k_cache.dtype, causal and seq_q > 1, q.device, longest
    return _Shape(batch, seq_q, heads_q, page_size, kv_heads, d_qk, *modes)


def _updated_plan(
    metadata: FlashMLASchedMeta,
    shape: _Shape | _SparseShape,
    q: Any,
    updated: Callable[[Any], Plan[Any]],
) -> Any:
    """Return a plan whose schedule serves a call on the current stream; make one by `updated`.

    A schedule that was only captured has not been computed, so it serves captures alone.
    """
    plans, stale = metadata._plans, metadata._stale
    if metadata._shape is not None:  # then it is this one, whose tensors are all in one place
        key = shape, current_stream("q", q, metadata._device), False
        plan = plans.get(key)
        if plan is not None and key not in stale:
            return plan
    call = open_call((("q", q),))
    with call:  # the driver answers for the current context, which a new thread does not have
        capturing = call.capturing
    key = shape, call.stream, False
    if key not in plans or key in stale:
        key = shape, call.stream, capturing
    plan = plans.get(key)
    if plan is None or key in stale:
        plan = plans[key] = updated(plan)
        stale.discard(key)
    metadata._device = plan._device
    return plan


def _check_integers(q: Any, **arrays: Any) -> None:
    """Check what a run is given beside q and the cache, before a schedule is launched for it."""
    views = open_call((("q", q), *arrays.items())).views
    bind(_INTEGERS, dict(zip(arrays, views[1:], strict=True)), {"batch": q.shape[0]})


@plainly
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to rows of keys and values, those of all requests behind each other.

    Returns ``(tokens, heads_q, columns of v)`` and a log-sum-exp of ``(tokens, heads_q)``.

    Differences from FlashMLA: the numbers of columns of `cumla.attention`, and no gradients. The
    longest lengths are not looked at, deterministic is so anyway, and rows without keys have an lse
    of -inf.
    """
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p: needs 0, got {dropout_p}; cumla has no dropout, leave it out"
        )
    if not is_varlen:
        raise NotImplementedError("is_varlen: needs True, got False; pass the offsets, and no flag")
    check_tensors(q=q, k=k, v=v, cu_seqlens_qo=cu_seqlens_qo, cu_seqlens_kv=cu_seqlens_kv)
    offsets = {"qo_indptr": cu_seqlens_qo, "kv_indptr": cu_seqlens_kv}
    with _VARLEN():
        found, lse = attention(q, k, v, **offsets, causal=bool(causal), softmax_scale=softmax_scale)
    return found, lse


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `flash_attn_varlen_func` with the columns of q, k and v of one tensor."""
    q, k, v = (qkv[..., columns] for columns in _columns(0, head_dim_qk, 2 * head_dim_qk))
    sizes = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    options: Any = dropout_p, softmax_scale, causal, deterministic, is_varlen
    return flash_attn_varlen_func(q, k, v, *sizes, *options)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `flash_attn_varlen_func` with the columns of k and v of one tensor."""
    k, v = (kv[..., columns] for columns in _columns(0, head_dim_qk))
    sizes = cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv
    options: Any = dropout_p, softmax_scale, causal, deterministic, is_varlen
    return flash_attn_varlen_func(q, k, v, *sizes, *options)


def _columns(*begins: int) -> list[slice]:
    """Return stretches of columns, each up to where the next one begins."""
    return [slice(*pair) for pair in zip(begins, (*begins[1:], None), strict=True)]


def _value_columns(q: object) -> int:
    """Return the values' columns of the rows that a query is for."""
    shape = getattr(q, "shape", None)
    width = width_of(shape[-1]) if shape else None
    return width[0] if width else _VALUE_DIM


def _check_metadata(head_dim_v: int, metadata: object, num_splits: object, columns: int) -> None:
    if not isinstance(metadata, FlashMLASchedMeta):
        raise TypeError(
            "tile_scheduler_metadata: needs the first element of what "
            f"cumla.compat.flash_mla.get_mla_metadata() returned, got {type(metadata).__name__}; "
            "import get_mla_metadata from there, too"
        )
    if num_splits is not None:
        raise TypeError(
            "num_splits: needs None, the second element of what get_mla_metadata() returned, "
            f"got {type(num_splits).__name__}; cumla schedules on its own"
        )
    if head_dim_v != columns:
        raise ValueError(
            f"head_dim_v: needs {columns}, the width of the values in a cache row, got "
            f"{head_dim_v}; pass {columns}, and slice the output where you need fewer columns"
        )
