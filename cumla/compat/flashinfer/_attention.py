# SPDX-License-Identifier: Apache-2.0
"""The base of FlashInfer's wrappers for decoding and for prefill, over `cumla.AttentionPlan`.

The methods of a wrapper pass their arguments here by FlashInfer's names. The table `ATTENTION` has
the names of cumla's arguments there, and what is refused.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cumla.compat._arguments import check_axes, check_given, check_tensors
from cumla.compat._table import Interface
from cumla.compat._torch import positions_of
from cumla.compat.flashinfer._cache import is_pair, names_of_parts, split_cache
from cumla.compat.flashinfer._masks import Lists, is_masked, keep_mask, mask_of
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
from cumla.core.names import arg
from cumla.core.paged import refuse_value
from cumla.launch.mha.attention import E4M3_COLUMNS
from cumla.mha.arguments import checked_layout
from cumla.mha.attention import AttentionPlan, attention
from cumla.mha.bias import AttentionBias
from cumla.mha.mask import AttentionMask

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ATTENTION",
    "AttentionWrapper",
    "Names",
    "Options",
    "PagedWrapper",
    "attend_once",
    "longest_of",
    "splits_alike",
]

_ITEMS = "belongs to the scoring of several items, which cumla does not have; leave it out"
_ROWS = (
    "cumla has the rows of values where those of keys are, and those of the output where the "
    "queries are; leave it out"
)
ATTENTION = Interface(
    {
        "softmax_scale": "sm_scale",
        "softcap": "logits_soft_cap",
        "window": "window_left",
        "num_heads": "num_qo_heads",
        "bias": "pos_encoding_mode",
    },
    ValueError,
    refused={
        **dict.fromkeys(("prefix_len_ptr", "token_pos_in_items_ptr"), _ITEMS),
        **dict.fromkeys(("token_pos_in_items_len", "max_item_len_ptr"), _ITEMS),
        **dict.fromkeys(("v_indptr", "o_indptr"), _ROWS),
        **dict.fromkeys(
            (
                *("jit_args", "jit_kwargs", "variant_owns_mask", "use_token_head_sf"),
                *("window_right", "kv_cache_sf", "skip_softmax_threshold_scale_factor"),
                *("use_fp16_softmax", "uses_spcompress", "o_scale", "o_dtype"),
                *("scale_q", "scale_k", "scale_v"),
            ),
            NO_KERNELS,
        ),
        "args": (
            "cumla's kernels take no more arguments by position; pass keys and values of pages as "
            "one pair, (k, v), and sinks as sinks="
        ),
    },
    unused={
        "args": (),
        "token_pos_in_items_len": 0,
        "window_right": 0,
        **dict.fromkeys(
            ("variant_owns_mask", "use_token_head_sf", "use_fp16_softmax", "uses_spcompress"), False
        ),
    },
    refusal=ValueError,
)
_PARTS = {
    pair: ATTENTION.naming(**dict(zip("kv", names_of_parts(pair), strict=True)))
    for pair in (False, True)
}
_Q = "tokens, num_qo_heads, head_dim"
_E4M3 = "float8_e4m3fn"
_ROTATED = 16  # of what number rotated rows have a multiple of columns


class Numbers(NamedTuple):
    """The sizes of a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int  # 0: rows without pages


class Names(NamedTuple):
    """FlashInfer's names of the arguments of a wrapper."""

    arrays: Mapping[str, str]  # of `plan`, by cumla's names
    buffers: Mapping[str, str]  # of the constructor, by cumla's names
    sizes: tuple[str, ...] = (  # of `plan`, as in `Numbers`
        *("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size"),
    )


class _Shape(NamedTuple):
    """The options of the `AttentionPlan` of a plan."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    dtype: str
    cache_dtype: str
    causal: bool
    window: int | None
    mask_form: str | None
    bias_form: str | None
    q_len: int | None  # query tokens of each request; None: offsets tell
    batch_invariant: bool
    max_kv_len: int | None  # with batch_invariant: keys of the longest request


class Options(NamedTuple):
    """The options of a plan that concern scores."""

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None
    rope: Frequencies | None = None  # of the rotation before attention
    alibi: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Check them among the arguments of a call, and name in one way what is absent."""
        mode = given["pos_encoding_mode"]
        if mode not in ("NONE", "ROPE_LLAMA", "ALIBI"):
            raise ValueError(
                f"pos_encoding_mode: needs 'NONE', 'ROPE_LLAMA' or 'ALIBI', got {mode!r}; pass one "
                f"of them"
            )
        rope = None
        if mode == "ROPE_LLAMA":
            scale, theta = given["rope_scale"], given["rope_theta"]
            rope = Frequencies(
                factor_of("rope_scale", 1.0 if scale is None else scale, ""),
                factor_of("rope_theta", 1e4 if theta is None else theta, ""),
            )
        cap, scale = given["logits_soft_cap"], given["sm_scale"]
        if mode == "ALIBI" and cap:
            raise ValueError(
                f"logits_soft_cap: needs None or 0 with pos_encoding_mode 'ALIBI', got {cap}; for "
                f"both import the wrapper from flashinfer"
            )
        with ATTENTION():
            left = checked_int("window_left", given["window_left"], "pass -1 for none", -(1 << 31))
            scale = None if scale is None else checked_scale(scale, 1.0)
        return cls(
            max(left, -1),
            cap if cap is not None and cap > 0 else None,
            scale,
            rope,
            mode == "ALIBI",
        )

    @property
    def bias_form(self) -> str | None:
        """The form of a plan's biases."""
        return "linear" if self.alibi else None

    def check_lse(self, return_lse: Any) -> None:
        """Refuse sums that FlashInfer would make of distances from another key."""
        if self.alibi and return_lse:
            raise ValueError(
                "return_lse: needs False with pos_encoding_mode 'ALIBI', got True; cumla counts "
                "distances from the query's own key: call cumla.attention with a bias"
            )

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

    Methods that end in `_with` take the arguments of a public method, by its names.
    """

    _names: ClassVar[Names]
    _refused_by_plan: ClassVar[tuple[str, ...]]
    _refused_by_run: ClassVar[tuple[str, ...]]

    def _init_with(self, given: Mapping[str, Any]) -> None:
        backend, use_cuda_graph = given["backend"], bool(given["use_cuda_graph"])
        if backend not in BACKENDS:
            raise ValueError(
                f"backend: needs one of {', '.join(BACKENDS)}, got {backend!r}; cumla has kernels "
                f"of its own, so leave it out"
            )
        ATTENTION.refuse(given)
        workspace = given["float_workspace_buffer"]
        check_tensors(float_workspace_buffer=workspace)
        self._kv_layout, self._backend = checked_layout(given["kv_layout"]), backend
        for name in self._names.buffers.values():
            if use_cuda_graph and given[name] is None:
                raise ValueError(
                    f"{arg(name)}: needs a tensor with use_cuda_graph, got None; pass one with "
                    f"room for the largest step"
                )
        buffers = {name: (theirs, given[theirs]) for name, theirs in self._names.buffers.items()}
        super().__init__(workspace, use_cuda_graph, buffers, self._names.arrays, "q")
        if self._kept:
            checked_batch(self._names.buffers, dict(self._kept))
        self._types: tuple[Any, Any] = (None, None)  # of queries and keys
        self._mask: AttentionMask | None = None  # of the last plan; in graphs it stays there
        # Pages, lengths and shape before each row, a list of keys, became a request.
        self._listed: tuple[dict[str, Any], _Shape] | None = None
        self._keeps_masks = use_cuda_graph and given.get("custom_mask_buf") is not None
        self._options = Options(-1, None, None)
        self._slopes: Any = None  # of ALiBi, on the device

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Return whether lengths and pages stay at the addresses that CUDA graphs read."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Do nothing: cumla's plans have memory of their own."""

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer, which deprecates it."""

    def _make(self, shape: _Shape, tokens: int, like: Any) -> AttentionPlan:
        return AttentionPlan(total_tokens=tokens, like=like, **shape._asdict())

    @abstractmethod
    def _lengths_of(
        self, given: Mapping[str, Any], arrays: dict[str, Any], page_size: int
    ) -> tuple[int, int | None]:
        """Check and complete the arrays of a plan.

        Returns the number of requests, and the longest one if requests are split alike.
        """

    def _plan_with(self, given: Mapping[str, Any], causal: bool, q_len: int | None = None) -> None:
        """Take the arguments of a plan for the runs that follow."""
        ATTENTION.refuse(given, self._refused_by_plan)
        options = Options.of(given)
        sizes = [given.get(name, 0) for name in self._names.sizes]
        numbers = Numbers(*(sizes[2] if size is None else size for size in sizes))
        arrays = {name: given[theirs] for name, theirs in self._names.arrays.items()}
        batch, max_kv_len = self._lengths_of(given, arrays, numbers.page_size)
        either = given.get("data_type")
        types = given["q_data_type"] or either, given["kv_data_type"] or either
        query, cache, output = map(dtype_of, (*types, given["o_data_type"]))
        cache = query if cache is None else cache
        by_data_type = given["kv_data_type"] is None and either is not None
        names = checked_dtypes(
            *(query, cache, output, ("bfloat16", "float16")),
            cache_name="data_type" if by_data_type else "kv_data_type",
        )
        options.check_rotation(numbers.head_dim, names[1])
        mask = self._mask_of(given, arrays, options.window_left, numbers.page_size)
        splits = max_kv_len is not None, max_kv_len
        left = options.window_left
        shape = _Shape(
            batch, *numbers, *names, bool(causal), left, None, options.bias_form, q_len, *splits
        )
        if mask is not None and options.alibi:
            raise ValueError(
                "pos_encoding_mode: needs no custom mask beside 'ALIBI', got one; for both "
                "import the wrapper from flashinfer"
            )
        if isinstance(mask, AttentionMask):
            form = "rows" if mask.tree is None else "tree"
            shape = shape._replace(causal=False, window=None, mask_form=form)
        if shape != self._shape or any(type(size) is not int for size in numbers):  # 16.0 equals 16
            self._check_numbers(shape)
        said: dict[str, Any] = dict(zip(self._names.sizes, numbers, strict=True))
        said |= {"q_data_type": query, "kv_data_type": cache, "q_len_per_req": q_len}
        said["max_sequence_kv"] = max_kv_len
        listed = None
        if isinstance(mask, Lists):
            listed = {name: self._there(array) for name, array in arrays.items()}, shape
            rows = len(mask.kv_lens)
            shape = shape._replace(batch=rows, page_size=1, q_len=1, causal=False, window=None)
            arrays, mask = mask._asdict(), None
        self._take(shape, arrays, said | _said(shape.causal, options))
        self._listed = listed
        if self._mask is not None and self._keeps_masks:
            assert mask is not None
            keep_mask(self._mask, mask)
        else:
            self._mask = mask
        self._types, self._options = (query, cache), options
        self._keep_slopes(shape.num_heads)
        if self._use_cuda_graph and self._plan is None:
            self._prepare(shape)

    def _keep_slopes(self, num_heads: int) -> None:
        """Bring slopes to the device, where captured runs find them."""
        if self._options.alibi and (self._slopes is None or len(self._slopes) != num_heads):
            self._slopes = alibi_slopes(num_heads).to(self.device)

    def _mask_of(
        self, given: Mapping[str, Any], arrays: Mapping[str, Any], window_left: int, page_size: int
    ) -> AttentionMask | Lists | None:
        """Return the mask of a plan, on the device; a wrapper for graphs has one or never one."""
        if not is_masked(given):
            if self._keeps_masks:
                raise ValueError(
                    f"{arg('custom_mask')}: needed in each plan of a wrapper with custom_mask_buf, "
                    f"got None; make one without it for plans without a mask"
                )
            return None
        if self._use_cuda_graph and not self._keeps_masks:
            raise ValueError(
                f"{arg('custom_mask_buf')}: needed with use_cuda_graph for plans with a mask, got "
                f"None; make the wrapper with it"
            )
        q_lens = arrays["qo_indptr"].diff().tolist()
        kv_lens = arrays["kv_lens"] if "kv_lens" in arrays else arrays["kv_indptr"].diff()
        firsts = [first * max(page_size, 1) for first in arrays["kv_indptr"][:-1].tolist()]
        with ATTENTION:
            lens = q_lens, kv_lens.tolist()
            found = mask_of(given, *lens, window_left, firsts, self._keeps_masks)
        if isinstance(found, Lists):
            return found
        mask = AttentionMask(**{name: self._there(array) for name, array in found.given.items()})
        room = None if self._mask is None else len(self._mask.start)
        if self._keeps_masks and room is not None and len(mask.start) > room:
            raise ValueError(
                f"{self._theirs['qo_indptr']}: needs at most the {room} query tokens of the first "
                f"plan of this wrapper beside a mask, got {len(mask.start)}; plan for the most "
                f"tokens first"
            )
        return mask

    def _check_numbers(self, shape: _Shape) -> None:
        """Check sizes, before the first run makes a plan of them."""
        theirs = dict(zip(Numbers._fields, self._names.sizes, strict=True))
        for name in ("head_dim", "head_dim_v"):
            columns = getattr(shape, name)
            if shape.cache_dtype == _E4M3 and columns % E4M3_COLUMNS.step:
                raise ValueError(
                    f"{theirs[name]}: needs a multiple of {E4M3_COLUMNS.step} with kv_data_type "
                    f"{_E4M3}, got {columns}; pad the columns with zeros"
                )
        with ATTENTION.naming(
            **theirs, batch_invariant="fixed_split_size", max_kv_len="max_sequence_kv"
        ):
            checked_int("page_size", shape.page_size, "pass the tokens of a page", 0)
            AttentionPlan.workspace_bytes(
                shape.batch,
                shape.batch,
                shape.num_heads,
                shape.head_dim,
                num_kv_heads=shape.num_kv_heads,
                head_dim_v=shape.head_dim_v,
                batch_invariant=shape.batch_invariant,
                max_kv_len=shape.max_kv_len,
                sm_count=1,
            )

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

    def _forward_with(self, given: Mapping[str, Any], *arrays: Any, causal: bool) -> Any:
        """Attend, with options that take the place of the plan's, which FlashInfer deprecates."""
        options, shape = Options.of(given), self._planned_shape()
        if self._use_cuda_graph:
            self._check_said(_said(bool(causal), options))
        if shape.mask_form is None and self._listed is None:
            self._shape = shape._replace(
                causal=bool(causal), window=options.window_left, bias_form=options.bias_form
            )
        elif options.window_left != self._options.window_left:
            raise ValueError(
                f"window_left: needs that of the plan beside a mask, "
                f"{self._options.window_left}, got {options.window_left}; plan for it"
            )
        self._options = options
        self._keep_slopes(shape.num_heads)
        scales = {n: given[n] for n in ("q_scale", "k_scale", "v_scale") if n in given}
        return self.run(*arrays, **scales, return_lse=given["return_lse"])  # type: ignore[attr-defined]

    def _planned_shape(self) -> _Shape:
        if self._shape is None:
            raise RuntimeError("run: needs a plan, got none; call plan() first")
        return self._shape

    def _run_with(self, names: Interface, given: Mapping[str, Any], k: Any, v: Any) -> Any:
        """Attend with the lengths and pages of the last plan."""
        q, out, lse, sinks = given["q"], given["out"], given["lse"], given.get("sinks")
        lse_base = _one_of(("log2", "ln"), "lse_base", given)
        is_turned = _one_of(("NH", "HN"), "lse_layout", given) == "HN"
        return_lse, window_left = given["return_lse"], given.get("window_left")
        scales = given["q_scale"], given["k_scale"], given["v_scale"]
        shape, options = self._planned_shape(), self._options
        if window_left not in (None, options.window_left):
            raise ValueError(
                f"window_left: needs that of the plan, {options.window_left}, got {window_left}; "
                f"leave it out, or plan for it"
            )
        sm_scale, head_dim, cache_dtype = options.sm_scale, shape.head_dim, shape.cache_dtype
        scale, factors, v_factor = _scales(sm_scale, head_dim, cache_dtype, scales)
        with names:
            check_tensors(q=q, k=k, v=v)
            if not (sinks is None and out is None and lse is None):
                check_given(sinks=sinks, out=out, lse=lse)
            check_axes("q", q, _Q)
            _, planned = self._listed or (None, shape)
            for name, rows in (("k", k), ("v", v)) if planned.page_size else ():
                self._check_heads(name, rows)
            _check_type("q", q, "q_data_type", self._types[0])
            _check_type("k", k, "kv_data_type", self._types[1])
            wants_lse = bool(return_lse or lse is not None)
            options.check_lse(wants_lse)
            heads_first = is_turned and wants_lse
            if lse is not None:
                axes = "num_qo_heads, tokens" if heads_first else "tokens, num_qo_heads"
                check_axes("lse", lse, axes)
            elif wants_lse:
                size = q.shape[1::-1] if heads_first else q.shape[:2]
                lse = q.new_empty(size, dtype=sys.modules["torch"].float32)
            given_q = q
            q, k, v, pages = self._arranged(q, k, v)
            q_rows = self._by_request("q", q)
            lse_rows = self._by_request("lse", lse.T if heads_first else lse)
            state = self._ready_plan(given_q).run(
                q_rows,
                k,
                v,
                **pages,
                mask=self._mask,
                bias=AttentionBias(self._slopes) if options.alibi else None,
                softcap=options.logits_soft_cap,
                sinks=None if sinks is None else sinks.float(),
                softmax_scale=scale,
                **factors,
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

    def _arranged(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Rotate and list rows as the last plan has it; the last item has kv_indices and layout."""
        rope, shape = self._options.rope, self._planned_shape()
        arrays, planned = self._listed or (self._arrays, shape)
        tokens = len(q) if self._mask is None else len(self._mask.start)
        tokens = tokens if self._listed is None else shape.batch
        if len(q) != tokens:
            raise ValueError(
                f"{arg('q')}: needs the {tokens} query tokens of the mask, got {len(q)}; pass only "
                f"rows of requests"
            )
        kv_indices = self._arrays.get("kv_indices")
        layout = self._kv_layout if planned.page_size else "NHD"
        if planned.page_size and (rope is not None or self._listed is not None):
            k, v, in_turn = _listed_pages(k, v, arrays["kv_indices"])
            kv_indices = in_turn if self._listed is None else kv_indices
        if rope is not None:
            q, k = self._turned(rope, q, k, arrays, planned)
        if self._listed is not None:
            k, v = (_as_pages_of_one(rows, layout) for rows in (k, v))
            layout = "NHD"
        return q, k, v, {"kv_indices": kv_indices, "kv_layout": layout}

    def _turned(
        self, rope: Frequencies, q: Any, k: Any, arrays: dict[str, Any], shape: _Shape
    ) -> tuple[Any, Any]:
        """Rotate queries, and keys of rows or of listed pages, by their positions."""
        torch = sys.modules["torch"]
        starts = arrays["kv_indptr"]
        kv_lens = arrays.get("kv_lens")
        if kv_lens is None:
            kv_lens = starts[1:] - starts[:-1]
        cuts = arrays.get("qo_indptr")
        if cuts is None:
            cuts = torch.arange(shape.batch + 1, device=q.device, dtype=torch.int32) * shape.q_len
        q = rope.turn(q, positions_of(cuts, kv_lens - (cuts[1:] - cuts[:-1]), q.shape[0]))
        none = torch.zeros_like(kv_lens)
        if not shape.page_size:
            return q, rope.turn(k, positions_of(starts, none, k.shape[0]))
        rows = k.transpose(1, 2) if self._kv_layout == "HND" else k
        first = positions_of(starts, none, rows.shape[0]) * shape.page_size
        positions = (first[:, None] + torch.arange(shape.page_size, device=q.device)).flatten()
        rows = rope.turn(rows.flatten(0, 1), positions).unflatten(0, rows.shape[:2])
        return q, rows.transpose(1, 2) if self._kv_layout == "HND" else rows

    def _check_heads(self, name: str, rows: Any) -> None:
        need, axis = self._planned_shape().num_kv_heads, -3 if self._kv_layout == "HND" else -2
        if rows.ndim > 2 and rows.shape[axis] != need:
            raise ValueError(
                f"{arg(name)}: needs the {need} kv heads of the plan on axis {axis} with kv_layout "
                f"{self._kv_layout!r}, got shape {tuple(rows.shape)}; pass the cache of this "
                f"layer, or make the wrapper with its kv_layout"
            )

    def _by_request(self, name: str, rows: Any) -> Any:
        """Add an axis of requests to rows of tokens, if all have the same number of tokens."""
        assert self._shape is not None
        batch, q_len = self._shape.batch, self._shape.q_len
        if rows is None or q_len is None:
            return rows
        if not rows.ndim or rows.shape[0] != batch * q_len:
            raise ValueError(
                f"{arg(name)}: needs {q_len} rows for each of the {batch} requests of the plan, "
                f"got shape {tuple(rows.shape)}; pass what was planned, or plan with q_len_per_req"
            )
        return rows.unflatten(0, (batch, q_len))


class PagedWrapper(AttentionWrapper):
    """A wrapper for keys and values in pages."""

    def _lengths_of(
        self, given: Mapping[str, Any], arrays: dict[str, Any], page_size: int
    ) -> tuple[int, int | None]:
        if page_size == 0:
            raise ValueError("page_size: needs a number above 0, got 0; pass the tokens of a page")
        seq_lens = arrays["kv_lens"]
        if seq_lens is None:
            del arrays["kv_lens"]
        batch = checked_batch(self._theirs, arrays)
        if seq_lens is None:
            indptr, last = arrays["kv_indptr"], arrays["last_page_len"]
            if indptr.device != last.device:
                indptr, last = map(self._there, (indptr, last))
            if check_mode():
                self._check_last_pages(last, page_size)
            seq_lens = arrays["kv_lens"] = get_seq_lens(indptr, last, page_size)
        pages = self._kept.get("kv_indices", arrays["kv_indices"]).shape[0]
        if not self._use_cuda_graph:
            del arrays["last_page_len"]
        if not splits_alike(given):
            return batch, None
        longest: int | None = given.get("max_sequence_kv")
        if self._use_cuda_graph or (longest is None and seq_lens.device.type != "cpu"):
            longest = pages * page_size
        elif longest is None:
            longest = _rounded(int(seq_lens.max())) if len(seq_lens) else pages * page_size
        return batch, max(1, longest)

    def _check_last_pages(self, last: Any, page_size: int) -> None:
        if last.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing():
            return
        tokens, need = last.numpy(force=True), f"a number from 0 to page_size = {page_size}"
        wrong = (tokens < 0) | (tokens > page_size)
        refuse_value(
            self._theirs["last_page_len"], tokens, wrong, need, "tell the tokens of the last page"
        )

    def _run_on_pages_with(self, given: Mapping[str, Any]) -> Any:
        """Attend to a packed cache or a pair."""
        ATTENTION.refuse(given, self._refused_by_run)
        cache = given["paged_kv_cache"]
        names = _PARTS[is_pair(cache)]
        with names:
            k, v = split_cache(cache, self._kv_layout)
        return self._run_with(names, given, k, v)


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
    masks: Mapping[str, Any] | None = None,
) -> Any:
    """Attend in one request, without a plan; the cache is its one page."""
    torch = sys.modules["torch"]
    with ATTENTION():
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
        window: int | None = options.window_left
        mask: Any = None
        if masks is not None and is_masked(masks):
            lens = [q.shape[0]], [kv_len]
            mask, window = mask_of(masks, *lens, options.window_left, [0]), None
        options.check_lse(return_lse)
        bias = None
        if options.alibi:
            bias = AttentionBias(alibi_slopes(q.shape[1]).to(q.device))
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        batch_axis = 0
        if isinstance(mask, Lists):  # each query token is a request
            pages, mask, batch_axis = mask._asdict(), None, 1
            rows = (part.transpose(0, 1) if is_hnd else part for part in (k, v))
            k, v = (part[:, None] for part in rows)
            kv_layout, causal = "NHD", False
        else:
            pages = {"kv_lens": q.new_full((1,), kv_len, dtype=torch.int32)}
            pages["block_table"] = q.new_zeros((1, 1), dtype=torch.int32)
            k, v = k[None], v[None]
        out, _ = attention(
            q.unsqueeze(batch_axis),
            k,
            v,
            **pages,
            causal=bool(causal),
            window=window,
            mask=mask,
            bias=bias,
            softcap=options.logits_soft_cap,
            softmax_scale=scale,
            **factors,
            kv_layout=kv_layout,
            lse=lse.unsqueeze(batch_axis),
        )
    out = out.squeeze(batch_axis)
    if v_factor != 1.0:
        out.mul_(v_factor)
    return (out, lse.mul_(LOG2_E)) if return_lse else out


def _listed_pages(k: Any, v: Any, pages: Any) -> tuple[Any, Any, Any]:
    """Copy listed pages, one for each entry, and number them.

    A page may stand at several places, and a server's pool has many others.
    """
    torch = sys.modules["torch"]
    there = pages.clamp(0, max(k.shape[0] - 1, 0)).long()[: pages.shape[0] if len(k) else 0]
    in_turn = torch.arange(pages.shape[0], device=pages.device, dtype=torch.int32)
    return k[there], v[there], in_turn


def _as_pages_of_one(rows: Any, kv_layout: str) -> Any:
    """Return the tokens of pages, or of rows without pages, as pages of one token."""
    if rows.ndim == 3:
        return rows[:, None]
    rows = rows.transpose(1, 2) if kv_layout == "HND" else rows
    return rows.flatten(0, 1)[:, None]


def alibi_slopes(num_heads: int) -> Any:
    """Return the slopes of ALiBi (arXiv:2108.12409), ``(num_heads,)`` float32 on the CPU."""
    most = 1 << num_heads.bit_length() - 1  # the greatest power of two
    slopes = [2.0 ** (-8 * (i + 1) / most) for i in range(most)]
    slopes += [2.0 ** (-4 * (2 * i + 1) / most) for i in range(num_heads - most)]
    torch = sys.modules["torch"]
    return torch.tensor(slopes, dtype=torch.float32)


def splits_alike(given: Mapping[str, Any]) -> bool:
    """Return whether results must not depend on the batch; -1 is no size, as in FlashInfer.

    The size does not matter: cumla splits requests at its own positions. Its plan needs the length
    of the longest request, without waiting for the GPU.
    """
    return bool(given["disable_split_kv"]) or given["fixed_split_size"] not in (None, -1)


def longest_of(indptr: Any, longest: int | None) -> int:
    """Return the keys of the longest request: `longest`, or from offsets on the CPU."""
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


def _one_of(known: tuple[str, str], name: str, given: Mapping[str, Any]) -> str:
    """Return one of two words, the first where the argument is not among those given."""
    value: str = given.get(name, known[0])
    if value not in known:
        raise ValueError(f"{arg(name)}: needs {' or '.join(map(repr, known))}, got {value!r}")
    return value


def _said(causal: bool, options: Options) -> dict[str, Any]:
    """Name the options that a graph depends on."""
    return {"causal": causal, **options._asdict()}


def _check_type(name: str, tensor: Any, planned: str, dtype: Any) -> None:
    if tensor.dtype != dtype:
        raise ValueError(
            f"{arg(name)}: needs {planned} of the plan, {dtype}, got {tensor.dtype}; convert it, "
            f"or plan for it"
        )


def _scales(
    sm_scale: float | None, head_dim: int, cache_dtype: str, scales: tuple[Any, Any, Any]
) -> tuple[float | None, dict[str, Any], float]:
    """Return the factors of the scores, of `cumla.attention` by name, and of the output.

    `scales` are those of queries, keys and values. Kernels read those of e4m3 keys and values,
    which may be on the GPU. For 16 bits that of keys is folded, too, and that of values multiplies
    the output.
    """
    if scales[0] is scales[1] is scales[2] is None:
        return sm_scale, {}, 1.0
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
