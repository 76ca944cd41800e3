# SPDX-License-Identifier: Apache-2.0
"""Builders, layers and caches of the plugin, set up as vLLM does; `stubbed` must be in force."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import cumla
from tests.bindings.stand_in import CONFIG, PATH

torch = pytest.importorskip("torch")

PAGES, PAGE, HEADS, SCALE = 24, 16, 4, 0.1
BATCHED_TOKENS = 2048


def queries(tokens: int, device: str = "cpu", heads: int = HEADS) -> tuple[Any, Any]:
    """Absorbed queries, and those of RoPE in a wider array, as vLLM has them."""
    generator = torch.Generator().manual_seed(tokens)
    nope = torch.randn(tokens, heads, 512, generator=generator).bfloat16()
    wide = torch.randn(tokens, heads, 192, generator=generator).bfloat16()
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
        width: tuple[int, int] = (512, 64),
    ) -> None:
        from vllm.config import CUDAGraphMode

        from cumla.vllm.mla import Builder, Impl

        self.width = width
        torch.manual_seed(1)
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.bfloat16, hf_config=CONFIG, model=PATH),
            num_heads=HEADS // dcp,
            parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
            compilation_config=SimpleNamespace(
                cudagraph_mode=CUDAGraphMode[graphs], max_cudagraph_capture_size=512
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=BATCHED_TOKENS),
            speculative_config=SimpleNamespace(enable_adaptive_verification=cuts_drafts),
        )
        spec = SimpleNamespace(dtype=cache_dtype, head_size=sum(width), block_size=PAGE, dcp=dcp)
        self.builder = Builder(spec, ["layer"], config, torch.device(device))
        self.impl = Impl(scale=SCALE)
        self.impl.need_to_return_lse_for_decode = dcp > 1
        self.k_scale = torch.tensor(0.5, device=device)
        self.layer = SimpleNamespace(_k_scale=self.k_scale)
        self.cache = torch.zeros(PAGES, PAGE, sum(width), dtype=cache_dtype, device=device)
        rows = torch.randn(PAGES * PAGE, sum(width)).bfloat16().to(device)
        self.write(rows, torch.arange(PAGES * PAGE, device=device))

    def write(self, rows: Any, slots: Any) -> None:
        latent = self.width[0]
        arrays = rows[:, :latent], rows[:, None, latent:], self.cache, slots
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


TOPK, INDEX_HEADS, LONGEST = 32, 8, 320


class SparseMLA:
    """A builder, a layer, an indexer and both caches, as vLLM sets them up."""

    def __init__(
        self,
        cache_dtype: str = "auto",
        heads: int = HEADS,
        device: str = "cpu",
        dcp: int = 1,
        ranks: int = 1,  # of tensor parallelism
        ubatching: bool = False,
        topk: int = TOPK,
        pages: int = PAGES,
        page: int = PAGE,
        sinks: Any = None,
        columns: int = 576,
        pool: int = 1,
        hosted: Any = None,
    ) -> None:
        from cumla.vllm.sparse import Backend, Builder, Impl

        torch.manual_seed(1)
        self.device, self.heads, self.topk, self.dcp = device, heads, topk, dcp
        model = SimpleNamespace(
            dtype=torch.bfloat16,
            hf_config=SimpleNamespace(**vars(CONFIG), index_topk=topk),
            model=PATH,
            hf_text_config=SimpleNamespace(index_topk=topk, index_kpool=pool),
            get_num_attention_heads=lambda parallel: heads // parallel.tensor_parallel_size,
        )
        config = SimpleNamespace(
            model_config=model,
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            parallel_config=SimpleNamespace(
                use_ubatching=ubatching, tensor_parallel_size=max(ranks, dcp)
            ),
            attention_config=SimpleNamespace(sparse_mla_force_mqa=False, hisparse_config=hosted),
        )
        stored = torch.bfloat16 if cache_dtype == "auto" else torch.uint8
        spec = SimpleNamespace(dtype=stored, block_size=page, dcp=dcp, head_size=columns)
        self.builder = Builder(spec, ["layer"], config, torch.device(device))
        # As vLLM has it, in pools wider than lists are; nobody writes the columns behind them.
        self.pool, width = pool, topk if pool == 1 else topk + 2 * pool
        self.buffer = torch.full((512, width), 7, dtype=torch.int32, device=device)
        self.impl = Impl(scale=SCALE, topk_indices_buffer=self.buffer, sinks=sinks)
        self.layer = SimpleNamespace(_k_scale=torch.tensor(0.5, device=device))
        shape = Backend.get_kv_cache_shape(pages, page, 1, columns, cache_dtype)
        self.cache = torch.zeros(shape, dtype=stored, device=device)
        if cache_dtype == "fp8":
            self.cache = self.cache.view(torch.float8_e4m3fn)  # as vLLM views it
        self.keys = torch.zeros(pages, page, 132, dtype=torch.uint8, device=device)
        slots = torch.arange(pages * page, device=device)
        rows = torch.randn(len(slots), columns, device=device).bfloat16()
        scale = None if cache_dtype in ("auto", "fp8_ds_mla") else self.layer._k_scale.view(1)
        cumla.append_mla_cache(rows, self.cache, slots, kv_scale=scale)
        keys = torch.randn(len(slots), 128, device=device).bfloat16()
        cumla.append_indexer_cache(keys, self.keys, slots, power_of_two_scales=True)
        self.schedule = torch.zeros(1, device=device)

    def step(
        self,
        kv_lens: Any,
        offsets: Any,
        tokens: int,
        host: Any = None,
        captured: bool = False,
        table: Any = None,
        decodes: int | None = None,
        prefill: Any = None,
    ) -> Any:
        """Metadata for requests with kv_lens, whose queries `offsets`, and `host`, tell."""
        host = offsets.cpu() if host is None else host
        common = SimpleNamespace(
            block_table_tensor=tables(kv_lens) if table is None else table,
            seq_lens=kv_lens,
            query_start_loc_cpu=host,
            query_start_loc=offsets,
            num_actual_tokens=tokens,
            num_decodes=len(kv_lens) if decodes is None else decodes,
            prefill=prefill,
        )
        if captured:
            return self.builder.build_for_cudagraph_capture(common)
        return self.builder.build(0, common)

    def attend(self, step: Any, q: Any, **options: Any) -> Any:
        return self.impl.forward_mqa(q, self.cache, step, self.layer)

    def lists(self, visible: Any) -> None:
        """Fill vLLM's buffer as an indexer does: some of the visible tokens, then -1."""
        generator = torch.Generator().manual_seed(3)
        for row, count in zip(self.buffer, visible, strict=False):
            pools = count // self.pool
            chosen = torch.randperm(pools, generator=generator)[: self.topk // self.pool]
            tokens = chosen.sort().values[:, None] * self.pool + torch.arange(self.pool)
            row[: self.topk + self.pool - 1] = -1
            row[: tokens.numel()] = tokens.flatten().to(self.device)
            tail = torch.arange(pools * self.pool, count)  # of the last pool, behind the others
            row[self.topk : self.topk + len(tail)] = tail.to(self.device)

    def index_inputs(self, tokens: int) -> tuple[Any, Any, Any]:
        """Queries of the indexer, their weights, and new keys."""
        generator = torch.Generator().manual_seed(tokens)
        q = torch.randn(tokens, INDEX_HEADS, 128, generator=generator)
        weights = torch.randn(tokens, INDEX_HEADS, generator=generator)
        keys = torch.randn(tokens, 128, generator=generator).bfloat16()
        q, weights, keys = (each.to(self.device) for each in (q, weights, keys))
        return q.to(torch.float8_e4m3fn), weights, keys

    def index(self, step: Any, q: Any, weights: Any, keys: Any, longest: int = LONGEST) -> Any:
        """Call vLLM's operation for a layer."""
        from cumla.vllm.indexer import select
        from tests.vllm import stub

        stub.steps, stub.device = {"layer.k_cache": step}, self.device
        return select(
            *(torch.zeros(len(q), 8), "layer.k_cache", self.keys, q, None, keys, weights, 128),
            *("ue8m0", self.topk, 128, longest, 4096, self.buffer, False, False, False, 0),
            self.dcp,
        )

    def decoding(self, lens: Any, table: Any, offsets: Any, padded: bool = False) -> Any:
        """Metadata of the indexer for lengths ``(batch, q_len)`` that tokens see."""
        tokens = int(offsets[-1]) if padded else lens.numel()
        decode = SimpleNamespace(
            block_table=table,
            seq_lens=lens,
            decode_lens=offsets.diff(),
            requires_padding=padded,
            schedule_metadata=self.schedule,
        )
        return SimpleNamespace(
            slot_mapping=torch.full((tokens,), -1, device=self.device),
            num_prefills=0,
            num_decode_tokens=tokens,
            decode=decode,
        )

    def prefilling(self, lens: Any, starts: Any, table: Any) -> Any:
        """Metadata of the indexer for prefills in one chunk."""
        places = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cpu().cumsum(0)])
        ks, ke = [], []
        for i, length in enumerate(lens.tolist()):
            queries = int(starts[i + 1] - starts[i])
            ks += [int(places[i])] * queries
            ke += [int(places[i]) + length - queries + 1 + j for j in range(queries)]
        chunk = SimpleNamespace(
            token_start=0,
            token_end=int(starts[-1]),
            total_seq_lens=int(places[-1]),
            skip_kv_gather=False,
            block_table=table,
            cu_seq_lens=places.int().to(self.device),
            cu_seqlen_ks=int32(*ks, device=self.device),
            cu_seqlen_ke=int32(*ke, device=self.device),
        )
        return SimpleNamespace(
            slot_mapping=torch.full((int(starts[-1]),), -1, device=self.device),
            num_prefills=len(lens),
            num_decode_tokens=0,
            prefill=SimpleNamespace(chunks=[chunk]),
        )


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
            model_config=SimpleNamespace(
                dtype=torch.bfloat16, hf_config=CONFIG, model=PATH, **(model or {})
            ),
            parallel_config=SimpleNamespace(use_ubatching=ubatching),
            compilation_config=SimpleNamespace(static_forward_context=layers),
            scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=128),
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
        prefixes: Any = None,
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
            rswa_prefix_lens=prefixes,
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
        """Return what was written: keys and values."""
        shape = (PAGES, PAGE, 2, 64)
        return self.keys.view(shape), self.values.view(shape)
