# SPDX-License-Identifier: Apache-2.0
"""AutoDeploy's descriptors of attention: the operations, and what they need, by name."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from cumla.compat._torch import import_torch
from cumla.compat.auto_deploy.ops import register

if TYPE_CHECKING:
    from collections.abc import Callable

    from cumla.compat.auto_deploy.sequence import AttentionInfo, SequenceInfo

__all__ = ["AttentionDescriptor", "AttentionRegistry", "CumlaAttention", "CumlaPagedAttention"]

GetAttentionInfo: TypeAlias = "Callable[[], AttentionInfo]"
Initializers: TypeAlias = "dict[str, Callable[[SequenceInfo], Any]]"


class AttentionDescriptor:
    """An attention that AutoDeploy can put into a graph: class methods alone."""

    # The operation of attention, that of metadata, and whether a sequence may have several pages.
    _table: ClassVar[tuple[str, str, bool]]

    @classmethod
    def is_paged(cls) -> bool:
        """Return whether a sequence may have several pages."""
        return cls._table[2]

    @classmethod
    def get_attention_op(cls) -> tuple[Callable[..., Any], int]:
        """Return the operation, and how many of its arguments are queries, keys and values.

        It takes these, the metadata, the caches of the layer, the buffers and the constants.
        """
        register()
        return getattr(import_torch().ops.cumla, cls._table[0]), 3

    @classmethod
    def get_prepare_metadata_op(cls) -> tuple[Callable[..., Any], int]:
        """Return the operation that makes the metadata of a step, and the number of its results.

        It takes the tensors of a `SequenceInfo`, and its page_size.
        """
        register()
        return getattr(import_torch().ops.cumla, cls._table[1]), 4

    @classmethod
    def get_cache_initializers(cls, get_info: GetAttentionInfo) -> Initializers:
        """Return what makes k_cache and v_cache, (num_pages, page_size, kv_heads, head_dim)."""

        def make(si: SequenceInfo) -> Any:
            if si.is_paged and not cls.is_paged():
                raise ValueError(
                    f"page_size: needs max_seq_len {si.max_seq_len} for contiguous caches, got "
                    f"{si.page_size}; take the descriptor 'cumla_paged'"
                )
            info = get_info()
            shape = si.num_pages, si.page_size, info.num_kv_heads, info.head_dim
            dtype = info.cache_config.dtype or info.dtype
            return import_torch().empty(shape, device=si.device, dtype=dtype)

        return {"k_cache": make, "v_cache": make}

    @classmethod
    def get_global_buffer_initializers(cls, get_info: GetAttentionInfo) -> Initializers:
        """Return what makes freqs_cis, float32, with two rows per token of the longest sequence.

        Layers share a buffer where their names of it are the same.
        """
        info = get_info()
        config = info.pos_embd_config
        parts = ["freqs_cis", *astuple(config), *(() if info.rope_dim is None else [info.rope_dim])]

        def make(si: SequenceInfo) -> Any:
            """Make cosines and sines of the positions, (rows, columns / 2, 2)."""
            torch = import_torch()
            columns = info.head_dim if info.rope_dim is None else info.rope_dim
            rows = 0 if config.mode is None else 2 * si.max_seq_len
            powers = torch.arange(0, columns, 2, dtype=torch.float64) / columns
            positions = torch.arange(rows, dtype=torch.float64)
            angles = torch.outer(positions, config.rope_theta**-powers)
            return torch.stack([angles.cos(), angles.sin()], dim=-1).to(si.device, torch.float32)

        return {"_".join(map(str, parts)).replace(".", "_"): make}

    @classmethod
    def get_constants(cls, attention_info: AttentionInfo) -> list[int | float | str | None]:
        """Return the last arguments of the operation."""
        return []


class AttentionRegistry:
    """Descriptors by name."""

    _attention_registry: ClassVar[dict[str, type[AttentionDescriptor]]] = {}

    @classmethod
    def register(
        cls, kernel_source: str
    ) -> Callable[[type[AttentionDescriptor]], type[AttentionDescriptor]]:
        """Return a decorator that registers a descriptor; a name is taken once (ValueError)."""

        def decorator(attention_cls: type[AttentionDescriptor]) -> type[AttentionDescriptor]:
            if cls.has(kernel_source):
                raise ValueError(
                    f"kernel_source: needs a name that is free, got {kernel_source!r}; pass another"
                )
            cls._attention_registry[kernel_source] = attention_cls
            return attention_cls

        return decorator

    @classmethod
    def get(cls, kernel_source: str) -> type[AttentionDescriptor]:
        """Return the descriptor of this name (ValueError if there is none)."""
        if not cls.has(kernel_source):
            raise ValueError(
                f"kernel_source: needs one of {', '.join(cls._attention_registry)}, got "
                f"{kernel_source!r}; register it first"
            )
        return cls._attention_registry[kernel_source]

    @classmethod
    def has(cls, kernel_source: str) -> bool:
        """Return whether there is a descriptor of this name."""
        return kernel_source in cls._attention_registry


@AttentionRegistry.register("cumla")
class CumlaAttention(AttentionDescriptor):
    """Contiguous caches: each sequence has a slot of max_seq_len tokens."""

    _table = "fused_flattened_mha_with_cache", "prepare_fused_mha_metadata", False


@AttentionRegistry.register("cumla_paged")
class CumlaPagedAttention(AttentionDescriptor):
    """Paged caches: the metadata operation finds pages and lengths once for all layers."""

    _table = "fused_flattened_mha_with_paged_cache", "prepare_paged_mha_metadata", True
