# SPDX-License-Identifier: Apache-2.0
"""Builders, layers and caches of the plugin, set up as vLLM does; `stubbed` must be in force."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

PAGES, PAGE, HEADS, SCALE = 24, 16, 4, 0.1
BATCHED_TOKENS = 2048


def queries(tokens: int, device: str = "cpu") -> tuple[Any, Any]:
    """Absorbed queries, and those of RoPE in a wider array, as vLLM has them."""
    generator = torch.Generator().manual_seed(tokens)
    nope = torch.randn(tokens, HEADS, 512, generator=generator).bfloat16()
    wide = torch.randn(tokens, HEADS, 192, generator=generator).bfloat16()
    return nope.to(device), wide.to(device)[..., 128:]


STEPS = {  # lengths of the cache, offsets, tokens: the kind of plan
    "decoding": ((90, 5, 33), (0, 1, 2, 3), 3, "MLADecodePlan"),
    "drafts": ((90, 5, 33), (0, 2, 4, 6), 6, "MLADecodePlan"),
    "padded requests": ((90, 5, 0, 0), (0, 2, 4, 4, 4), 8, "MLADecodePlan"),
    "short prefills": ((90, 5, 33), (0, 1, 6, 8), 8, "MLAAttentionPlan"),
    "as many tokens as equal lengths": ((90, 5, 33), (0, 1, 4, 6), 6, "MLAAttentionPlan"),
    "padded tokens": ((90, 5, 33), (0, 1, 2, 4), 6, "MLAAttentionPlan"),
}


def int32(*values: int, device: str = "cpu") -> Any:
    return torch.tensor(values, dtype=torch.int32, device=device)


def tables(kv_lens: Any) -> Any:
    """All pages, an equal share for each request."""
    pages = torch.arange(PAGES, dtype=torch.int32, device=kv_lens.device)
    return pages.view(len(kv_lens), -1)


class MicroBatch(NamedTuple):
    """A part of a step."""

    tokens: slice
    kv_lens: Any
    offsets: Any
    table: Any


def micro_batches(kv_lens: Any, offsets: Any, table: Any) -> list[MicroBatch]:
    """Divide a step in two by its tokens, as vLLM does.

    Offsets are copies, and lengths where a request is divided; other lengths are views.
    """
    starts, tokens = offsets.tolist(), int(offsets[-1])
    found = []
    for begin, end in ((0, tokens // 2), (tokens // 2, tokens)):
        first = max(i for i, start in enumerate(starts) if start <= begin)
        last = min(i for i, start in enumerate(starts) if start >= end)
        lens, missing = kv_lens[first:last], starts[last] - end
        if missing:
            lens = lens.clone()
            lens[-1] -= missing
        own = (offsets[first : last + 1] - begin).clamp(0, end - begin)
        found.append(MicroBatch(slice(begin, end), lens, own, table[first:last]))
    return found


class MLA:
    """A builder, a layer and a cache, as vLLM sets them up."""

    def __init__(
        self,
        cache_dtype: Any = torch.bfloat16,
        dcp: int = 1,
        device: str = "cpu",
        graphs: str = "FULL_AND_PIECEWISE",
        cuts_drafts: bool = False,
    ) -> None:
        from vllm.config import CUDAGraphMode

        from cumla.vllm.mla import Builder, Impl

        torch.manual_seed(1)
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.bfloat16),
            num_heads=HEADS // dcp,
            parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
            compilation_config=SimpleNamespace(
                cudagraph_mode=CUDAGraphMode[graphs], max_cudagraph_capture_size=512
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=BATCHED_TOKENS),
            speculative_config=SimpleNamespace(enable_adaptive_verification=cuts_drafts),
        )
        spec = SimpleNamespace(dtype=cache_dtype, block_size=PAGE, dcp=dcp)
        self.builder = Builder(spec, ["layer"], config, torch.device(device))
        self.impl = Impl(scale=SCALE)
        self.impl.need_to_return_lse_for_decode = dcp > 1
        self.k_scale = torch.tensor(0.5, device=device)
        self.layer = SimpleNamespace(_k_scale=self.k_scale)
        self.cache = torch.zeros(PAGES, PAGE, 576, dtype=cache_dtype, device=device)
        rows = torch.randn(PAGES * PAGE, 576).bfloat16().to(device)
        self.write(rows, torch.arange(PAGES * PAGE, device=device))

    def write(self, rows: Any, slots: Any) -> None:
        arrays = rows[:, :512], rows[:, None, 512:], self.cache, slots
        self.impl.do_kv_cache_update(*arrays, "as the cache", self.k_scale)

    def step(
        self,
        kv_lens: Any,
        offsets: Any,
        tokens: int,
        host: Any = None,
        captured: bool = False,
        table: Any = None,
        prefill: Any = None,
    ) -> Any:
        """Metadata for requests with kv_lens, whose queries `offsets`, and `host`, tell."""
        common = SimpleNamespace(
            block_table_tensor=tables(kv_lens) if table is None else table,
            seq_lens_device=kv_lens,
            max_seq_len=2048,
            query_start_loc_cpu=offsets.cpu() if host is None else host,
            query_start_loc_device=offsets,
            num_decode_tokens=tokens,
            dcp_tot_seq_lens_device=None,
            prefill=prefill,
        )
        if captured:
            return self.builder.build_for_cudagraph_capture(common)
        return self.builder.build(0, common)

    def attend(self, step: Any, q: Any) -> Any:
        return self.impl.forward_mqa(q, self.cache, step, self.layer)


class MHA:
    """A builder, layers and caches, as vLLM sets them up."""

    def __init__(
        self,
        cache_dtype: Any = torch.bfloat16,
        device: str = "cpu",
        ubatching: bool = False,
        model: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from cumla.vllm.mha import Backend, Builder, Impl

        torch.manual_seed(2)
        self.impls = {
            "full": Impl(HEADS, 64, SCALE, 2, **options),
            "window": Impl(HEADS, 64, SCALE, 2, sliding_window=8, **options),
        }
        layers = {name: SimpleNamespace(impl=impl) for name, impl in self.impls.items()}
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.bfloat16, **(model or {})),
            parallel_config=SimpleNamespace(use_ubatching=ubatching),
            compilation_config=SimpleNamespace(static_forward_context=layers),
        )
        spec = SimpleNamespace(num_kv_heads=2, head_size=64, block_size=PAGE, dtype=cache_dtype)
        self.builder = Builder(spec, list(layers), config, torch.device(device))
        self.layer = SimpleNamespace(
            _k_scale=torch.tensor(0.5, device=device), _v_scale=torch.tensor(0.25, device=device)
        )
        shape = Backend.get_kv_cache_shape(PAGES, PAGE, 2, 64)
        self.cache = torch.zeros(shape, dtype=cache_dtype, device=device)
        self.keys, self.values = torch.randn(2, PAGES * PAGE, 2, 64).bfloat16().to(device)
        self.write(self.keys, self.values, torch.arange(PAGES * PAGE, device=device))

    def write(self, keys: Any, values: Any, slots: Any) -> None:
        self.impls["full"].do_kv_cache_update(self.layer, keys, values, self.cache, slots)

    def step(
        self,
        kv_lens: Any,
        offsets: Any,
        tokens: int,
        causal: Any = True,
        captured: bool = False,
        table: Any = None,
        spans: Any = None,
        host: Any = None,
    ) -> Any:
        on_host = {}
        if spans is not None:
            host = offsets.cpu() if host is None else host
            on_host = {
                "max_query_len": int((host[1:] - host[:-1]).max()),
                "query_start_loc_cpu": host,
                "seq_lens_cpu_upper_bound": kv_lens.cpu(),
            }
        common = SimpleNamespace(
            **on_host,
            mm_req_doc_ranges=spans,
            causal=causal,
            num_actual_tokens=tokens,
            seq_lens=kv_lens,
            query_start_loc=offsets,
            block_table_tensor=tables(kv_lens) if table is None else table,
        )
        if captured:
            return self.builder.build_for_cudagraph_capture(common)
        return self.builder.build(0, common)

    def another_group(self) -> MHA:
        """The same layers as a group of their own: with a builder and a cache."""
        other, first = copy(self), self.builder
        other.builder = type(first)(
            first.kv_cache_spec, list(self.impls), first.vllm_config, first.device
        )
        other.cache = self.cache.clone()
        return other

    def attend(self, name: str, step: Any, q: Any, **options: Any) -> Any:
        new = torch.zeros_like(q)
        arrays = q, new, new, self.cache, step
        output = torch.full_like(q, 7.0)
        return self.impls[name].forward(self.layer, *arrays, output, **options)

    def pages(self) -> tuple[Any, Any]:
        """What was written: keys and values."""
        shape = (PAGES, PAGE, 2, 64)
        return self.keys.view(shape), self.values.view(shape)
