# SPDX-License-Identifier: Apache-2.0
"""The functions as operations of PyTorch, for torch.compile and torch.export."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.compat._torch import import_torch
from cumla.compat.auto_deploy import functions

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["register"]

_CACHES = "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? freqs_cis"
_SEQUENCES = (
    "Tensor input_ids, Tensor seq_len, Tensor input_pos, Tensor cache_loc, Tensor pages_per_seq, "
    "SymInt page_size"
)


class _Operation(NamedTuple):
    """An operation of PyTorch: what it is called with, and the results without their values."""

    schema: str
    fake: Callable[..., Any]


def _fake_sdpa(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _fake_attention(q: Any, *arguments: Any) -> Any:
    """Give q's tokens with the columns of v_cache in each head."""
    *_, k_cache, v_cache, _ = arguments
    batch, seqlen = q.shape[:2]
    heads = q.shape[2] if len(q.shape) == 4 else q.shape[2] // k_cache.shape[3]
    return q.new_empty((batch, seqlen, heads * v_cache.shape[3]))


def _fake_rope(x: Any, *_: Any) -> Any:
    return x.new_empty(x.shape)


_ATTENTION = {
    "scaled_dot_product_attention": _Operation(
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
        "bool is_causal=False, float? scale=None) -> Tensor",
        _fake_sdpa,
    ),
    "fused_mha_with_cache": _Operation(
        f"(Tensor q, Tensor k, Tensor v, Tensor input_pos, {_CACHES}) -> Tensor", _fake_attention
    ),
    "fused_flattened_mha_with_cache": _Operation(
        f"(Tensor q, Tensor k, Tensor v, Tensor seq_len, Tensor input_pos, Tensor cache_loc, "
        f"Tensor seq_start, {_CACHES}) -> Tensor",
        _fake_attention,
    ),
    "fused_flattened_mha_with_cache_rope_fusion": _Operation(
        f"(Tensor q, Tensor k, Tensor v, Tensor input_pos, Tensor cache_loc, Tensor seq_len, "
        f"Tensor seq_start, {_CACHES}) -> Tensor",
        _fake_attention,
    ),
    "fused_mha_with_paged_cache": _Operation(
        f"(Tensor q, Tensor k, Tensor v, Tensor input_pos, Tensor cache_loc, Tensor seq_len, "
        f"Tensor seq_start, Tensor page_table, SymInt max_seq_len, {_CACHES}) -> Tensor",
        _fake_attention,
    ),
    "fused_flattened_mha_with_paged_cache": _Operation(
        f"(Tensor q, Tensor k, Tensor v, Tensor kv_lens, Tensor qo_indptr, Tensor kv_indptr, "
        f"Tensor kv_indices, {_CACHES}) -> Tensor",
        _fake_attention,
    ),
    # They compute with shapes alone which rows they give, and so do they without values.
    "prepare_fused_mha_metadata": _Operation(
        f"({_SEQUENCES}) -> Tensor[]", functions.prepare_fused_mha_metadata
    ),
    "prepare_paged_mha_metadata": _Operation(
        f"({_SEQUENCES}) -> Tensor[]", functions.prepare_paged_mha_metadata
    ),
}
_ROPE = {
    "apply_rope_with_input_pos": _Operation(
        "(Tensor x, Tensor freqs_cis, Tensor? input_pos, str layout) -> Tensor", _fake_rope
    ),
    "apply_rope_on_flattened_inputs": _Operation(
        "(Tensor x, Tensor freqs_cis, Tensor input_pos, Tensor seq_lens, Tensor seq_start_indices) "
        "-> Tensor",
        _fake_rope,
    ),
}
_libraries: dict[tuple[str, str], Any] = {}  # namespace, operation; they live as long as these


def register(namespace: str = "cumla", rope_namespace: str | None = None) -> None:
    """Register the functions as operations of PyTorch, ``torch.ops.<namespace>.<function>``.

    The two of rotary embedding go to rope_namespace, `namespace` by default; AutoDeploy has
    ``"attention"`` and ``"rope"``. torch.compile and torch.export take them into their graphs; no
    gradients flow. A second call with the same names does nothing.

    Raises
    ------
    ImportError
        PyTorch is not installed.
    ValueError
        Someone else has registered an operation of that name, such as an imported TensorRT-LLM.
        Nothing has been registered then.

    Examples
    --------
    >>> import torch
    >>> from cumla.compat import auto_deploy
    >>> auto_deploy.register()
    >>> x, freqs_cis = torch.ones(1, 3, 2, 16).half(), torch.ones(8, 8, 2)
    >>> torch.ops.cumla.apply_rope_with_input_pos(x, freqs_cis, None, "bsnd").shape
    torch.Size([1, 3, 2, 16])
    """
    torch = import_torch()
    wanted = {(namespace, name): operation for name, operation in _ATTENTION.items()}
    place = namespace if rope_namespace is None else rope_namespace
    wanted |= {(place, name): operation for name, operation in _ROPE.items()}
    new = {key: operation for key, operation in wanted.items() if key not in _libraries}
    for space, name in new:
        if hasattr(getattr(torch.ops, space), name):
            raise ValueError(
                f"namespace: needs one in which {name} is free, got {space!r}, where it is "
                f"registered already; pass another"
            )
    for (space, name), operation in new.items():
        library = torch.library.Library(space, "FRAGMENT")
        library.define(f"{name}{operation.schema}")
        library.impl(name, getattr(functions, name), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{space}::{name}", operation.fake, lib=library)
        _libraries[space, name] = library
