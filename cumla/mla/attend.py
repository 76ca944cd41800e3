# SPDX-License-Identifier: Apache-2.0
"""Shared parts of :func:`cumla.mla_decode`, :func:`cumla.mla_attention` and their plans."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from cumla.core.arguments import SINKS, Array, bind, checked_window
from cumla.core.names import arg
from cumla.core.operation import parts_on_host
from cumla.core.paged import QO_INDPTR, Attend, Host, Results, check_made_for
from cumla.core.plan import Plan
from cumla.core.spec import SOFTMAX_SCALE, Factor, Option, array, flag, in_parts, optional
from cumla.core.state import AttentionState
from cumla.core.tree import TREE_DTYPES, check_words
from cumla.launch.mla.mla_decode import DecodeArguments
from cumla.launch.mla.mla_decode_fp8 import fp8_specs
from cumla.launch.mla.shape import TREE, MLAAttentionKey, MLADecodeKey
from cumla.launch.module import load
from cumla.mla.arguments import (
    CACHE_PARTS,
    ROW_PARTS,
    Columns,
    cache_of,
    check_fp8_products,
    check_fp8_query,
    check_taken,
    check_tree,
    checked_kv_scale,
    checked_q_scale,
    checked_query_and_cache,
    computed_dtype,
    named_width,
    other_cache,
    row_width,
    window_of,
)
from cumla.mla.shape import WIDTHS

if TYPE_CHECKING:
    from collections.abc import Callable

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable, Output
    from cumla.launch.source import KernelSpec

Q_AND_CACHE = (
    array("q", in_parts(*ROW_PARTS)),
    array("kv_cache", in_parts(*CACHE_PARTS)),
)
OPTIONS = (
    SOFTMAX_SCALE,
    Factor("kv_scale"),
    Factor("q_scale"),
    flag("fp8_products", False),
    flag("causal", True),
    Option("window", None, checked_window, "int[]?"),
    optional("sinks"),
    optional("tree"),
)
_MORE = {
    **SINKS,
    "tree": Array(
        "total_tokens words",
        TREE_DTYPES,
        "row",
        "give each query token its bits",
        "pass cumla.AttentionMask.from_tree(...).tree of a mask",
    ),
}
HIDDEN = {"empty_lse": -inf}  # where nothing is visible; FlashMLA has it otherwise
_SCALES = {width: float(sum(width) ** -0.5) for width in WIDTHS}  # of the scores, by default
K = TypeVar("K", bound=MLADecodeKey | MLAAttentionKey)


def shape_of(q: ArrayView, kv_cache: ArrayView) -> Any:
    """Read off what a key holds of a query and a cache: Shape, but for a batch that q lacks."""
    _, page_size, num_kv_heads, _ = kv_cache.shape
    return *q.shape[:-1], num_kv_heads, page_size, computed_dtype(q)


class MLAAttend(Attend[DecodeArguments, K], Generic[K]):
    """Attends to latent rows.

    `axes` are those of q before its columns, `definition` is the function of
    :mod:`cumla.reference`.
    """

    def __init__(
        self,
        axes: tuple[str, ...],
        launch: Callable[..., Launchable],
        definition: Callable[..., AttentionState],
    ) -> None:
        super().__init__(launch)
        self._axes = axes
        self._definition = definition

    def pages(self, views: Views, columns: Columns) -> ArrayView:
        """Check the page numbers, and return them."""
        raise NotImplementedError

    def arguments(self, views: Views, options: Any) -> DecodeArguments:
        """Check all but the lengths."""
        columns = checked_query_and_cache(views, self._axes, WIDTHS, fp8_queries=True)
        check_fp8_query(columns, views.get("sinks") is not None)
        kv_scale = checked_kv_scale(columns, views, options.kv_scale)
        q_scale = checked_q_scale(columns, views, options.q_scale)
        check_fp8_products(columns, options.fp8_products)
        pages = self.pages(views, columns)
        scale = options.softmax_scale
        if scale is None:
            scale = _SCALES[columns.width]
        scales = columns.kv_scales, kv_scale, scale
        check_taken(columns.width, cache_of(columns.kv_cache), views.get("tree") is not None)
        modes = options.causal, options.empty_lse
        fp8: bool = options.fp8_products
        *tokens, num_heads, _ = columns.q.shape
        bind(_MORE, views, {"num_heads": num_heads, "total_tokens": prod(tokens)})
        cache, tree = cache_of(columns.kv_cache), views.get("tree")
        sides = window_of(options.window, options.causal, cache)
        if tree is not None:
            check_words("tree", tree)
            check_tree(sides, cache)
            sides, modes = TREE, (False, options.empty_lse)
        masks: dict[str, Any] = {"sinks": views.get("sinks"), "window": sides, "tree": tree}
        masks |= {"fp8_products": fp8, "q_scale": q_scale}
        return DecodeArguments(*columns[:4], pages, *scales, *modes, **masks)

    def first_seen(self, host: Host, a: DecodeArguments) -> np.ndarray[Any, Any] | None:
        """Check mode: tell the first token of each request that a window lets its queries see."""
        left, _ = a.window or (-1, -1)
        if left < 0:
            return None
        bounds, lengths = host.get("qo_indptr"), host["kv_lens"].astype(np.int64)
        new = a.q.shape[1] if bounds is None else np.diff(bounds.astype(np.int64))
        return np.maximum(lengths - new - left, 0)

    def value_dim(self, arguments: DecodeArguments) -> int:
        """Tell the latent columns."""
        return arguments.q.shape[-1]

    def outputs(self, arguments: DecodeArguments) -> tuple[Output, ...]:
        """Return the same for queries in 16 bits."""
        q = arguments.q._replace(dtype=computed_dtype(arguments.q))
        return super().outputs(arguments._replace(q=q))

    def reference(self, host: Host, arguments: DecodeArguments) -> Results:
        """Compute with the lengths that came."""
        names = ("qo_indptr", "kv_indptr", "kv_indices", "sinks", "tree", "out", "lse")
        factors: dict[str, Any] = {"kv_scale": arguments.kv_scale, "q_scale": arguments.q_scale}
        factors = {  # a view, if it is an array
            name: host.get(name, None if factor == 1.0 else factor)
            for name, factor in factors.items()
        }
        state = self._definition(
            parts_on_host(host, "q"),
            parts_on_host(host, "kv_cache"),
            block_table=host.get("block_table"),
            kv_lens=host["kv_lens"],
            softmax_scale=arguments.softmax_scale,
            **factors,
            causal=arguments.causal,
            window=arguments.window,
            **{name: host[name] for name in names if name in host},
        )
        state.lse[state.lse == -inf] = arguments.empty_lse
        return state


class MLAPlan(Plan[K], Generic[K]):
    """Base of the plans: what follows from a query and a cache of latent rows."""

    _axes: ClassVar[tuple[str, ...]]  # of q before its columns, as the key names them

    @classmethod
    def _numbers(cls, views: dict[str, ArrayView | None], options: Any) -> dict[str, Any]:
        columns = checked_query_and_cache(views, cls._axes, WIDTHS, fp8_queries=True)
        batch = bind({"qo_indptr": QO_INDPTR}, views, {})
        _, page_size, num_kv_heads, _ = columns.kv_cache.shape
        sizes = dict(zip(cls._axes, columns.q.shape, strict=False)) | batch
        sizes |= {"num_kv_heads": num_kv_heads, "page_size": page_size}
        sizes |= {"head_dim": sum(columns.width)}
        dtype = computed_dtype(columns.q)
        return sizes | {"dtype": dtype, "cache_dtype": columns.kv_cache.dtype}

    def _fixed(self) -> dict[str, Any]:
        key = self.key
        modes = {"batch_invariant": getattr(key, "batch_invariant", False)}
        return {"causal": key.causal, "window": key.window, **modes}

    @property
    def _batch(self) -> int:
        return self.key.batch

    def _specs(self) -> tuple[KernelSpec, ...]:
        """List the kernels of the schedule, then the one that attends to a cache of q's dtype."""
        raise NotImplementedError

    def _load(self, device: int, capturing: Callable[[], bool]) -> None:
        *schedule, attend = self._specs()
        attends = (attend,) if self.key.cache == "same" else fp8_specs(self.key)
        for spec in (*schedule, *attends):
            load(spec, device, capturing=capturing)

    def _check_shape(self, arguments: DecodeArguments) -> None:
        q, kv_cache = arguments.q, arguments.kv_cache
        names = (*self._axes, "num_kv_heads", "page_size", "dtype")
        made = tuple([getattr(self.key, name) for name in names])
        check_made_for(names, made, shape_of(q, kv_cache))
        width = row_width(q, arguments.q_rope)
        if width != self.key.width:
            raise ValueError(
                f"plan: made for rows of {named_width(self.key.width)} columns, got "
                f"{named_width(width)}; make a plan with head_dim={sum(width)}"
            )
        if cache_of(kv_cache) != self.key.cache:
            raise other_cache(q, kv_cache)
        if (arguments.tree is None) is (self.key.window == TREE):
            form, got = ("'tree'", "None") if arguments.tree is None else ("None", "a tree")
            raise ValueError(
                f"{arg('tree')}: needs {'no tree' if got != 'None' else 'a tree'} for a plan of "
                f"mask_form {form}, got {got}; make a plan for each of both"
            )
