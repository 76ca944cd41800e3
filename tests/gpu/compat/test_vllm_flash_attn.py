# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention and cache writing on torch's CUDA tensors, in the shapes of its own tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import cumla
from cumla.compat.vllm_flash_attn import (
    flash_attn_varlen_func,
    get_scheduler_metadata,
    reshape_and_cache_flash,
)
from tests.compat.oracle import naive
from tests.gpu.tools.waiting import no_waiting

KERNELS = ("append_kv_cache", "attention", "ragged_schedule")
MAY_SKIP = ()
torch = pytest.importorskip("torch")

DEVICE = "cuda"
NAN = math.nan
LENGTHS = ((1, 1328), (5, 18), (129, 463))  # queries and keys
Report = Callable[..., None]


@pytest.fixture(autouse=True)
def prepared() -> None:
    cumla.prepare(cumla.attention, cumla.append_kv_cache)


def int32(numbers: Any) -> Any:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def offsets_of(lengths: Any) -> Any:
    return int32([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])


class Step:
    """Requests with their keys in the blocks of a cache; what no request has is NaN."""

    def __init__(
        self,
        lengths: Any = LENGTHS,
        *,
        heads: tuple[int, int] = (8, 2),
        columns: int = 128,
        block_size: int = 16,
        num_blocks: int = 2048,
    ) -> None:
        torch.manual_seed(columns + block_size)
        self.q_lens, self.kv_lens = map(list, zip(*lengths, strict=True))
        most = -(-max(self.kv_lens) // block_size)
        self.table = torch.randperm(num_blocks, device=DEVICE)[: len(lengths) * most]
        self.table = self.table.view(-1, most).int()
        shape = (2, num_blocks, block_size, heads[1], columns)
        self.caches = torch.full(shape, NAN, device=DEVICE, dtype=torch.bfloat16)
        self.new = torch.randn((2, sum(self.q_lens), heads[1], columns), device=DEVICE).bfloat16()
        self.q = torch.randn((sum(self.q_lens), heads[0], columns), device=DEVICE).bfloat16()
        for r, length in enumerate(self.kv_lens):
            pages = self.table[r].long()
            rows = self.caches[:, pages].flatten(1, 2)
            rows[:, :length] = torch.randn(rows[:, :length].shape, device=DEVICE).bfloat16()
            self.caches[:, pages] = rows.unflatten(1, (most, block_size))
        self.block_size = block_size

    @property
    def slots(self) -> Any:
        """Return where the new tokens go, which are the last ones of each request."""
        slots = []
        for r, (n, length) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            at = torch.arange(length - n, length, device=DEVICE)
            pages = self.table[r].long()[at // self.block_size]
            slots.append(pages * self.block_size + at % self.block_size)
        return torch.cat(slots)

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "q": self.q,
            "k": self.caches[0],
            "v": self.caches[1],
            "cu_seqlens_q": offsets_of(self.q_lens),
            "max_seqlen_q": max(self.q_lens),
            "seqused_k": int32(self.kv_lens),
            "max_seqlen_k": max(self.kv_lens),
            "block_table": self.table,
            "fa_version": 3,
        }

    def rows(self, request: int) -> Any:
        """Keys and values of a request."""
        pages = self.table[request].long()
        return self.caches[:, pages].flatten(1, 2)[:, : self.kv_lens[request]]

    def check(self, found: Any, report: Report, rows: Any = None, **options: Any) -> None:
        """vLLM's tolerance of out; lse is natural, with the heads first."""
        out, lse = found
        rows_of = rows or self.rows
        begin = 0
        for r, n in enumerate(self.q_lens):
            own = slice(begin, begin + n)
            begin += n
            wanted, natural = naive(self.q[own], *rows_of(r), causal=True, **options)
            torch.testing.assert_close(out[own].float(), wanted, atol=1.5e-2, rtol=1e-2)
            torch.testing.assert_close(lse[:, own], natural, atol=1e-3, rtol=1e-3)
            report({"out": float((out[own].float() - wanted).abs().max())})


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("columns", [72, 80, 128, 256])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(16, 32768), (32, 2048)])
@pytest.mark.parametrize("window", [None, 256])
@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_attention_over_blocks(
    heads: tuple[int, int],
    columns: int,
    block_size: int,
    num_blocks: int,
    window: int | None,
    softcap: float,
    record_figures: Report,
) -> None:
    shape = {"block_size": block_size, "num_blocks": num_blocks}
    step = Step(heads=heads, columns=columns, **shape)
    sides = (-1, -1) if window is None else (window - 1, 0)
    out = torch.full_like(step.q, NAN)
    arguments = step.arguments
    metadata = get_scheduler_metadata(
        3, 129, 1328, *heads, columns, arguments["seqused_k"], page_size=block_size
    )
    with no_waiting():
        found = flash_attn_varlen_func(
            **arguments,
            out=out,
            softmax_scale=columns**-0.5,
            causal=True,
            window_size=list(sides),
            softcap=softcap,
            scheduler_metadata=metadata,
            return_softmax_lse=True,
        )
    assert found[0] is out
    step.check(found, record_figures, window=sides, softcap=softcap)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("window", [(-1, -1), (127, 0)])
def test_sinks(window: tuple[int, int], dtype: str, record_figures: Report) -> None:
    step = Step(heads=(64, 8), columns=64)
    sinks = torch.linspace(-3, 6, 64, device=DEVICE).to(getattr(torch, dtype))
    arguments = step.arguments
    with no_waiting():
        found = flash_attn_varlen_func(
            **arguments,
            causal=True,
            window_size=list(window),
            s_aux=sinks,
            return_softmax_lse=True,
        )
    step.check(found, record_figures, window=window, sinks=sinks)


@pytest.mark.parametrize("blocks_hold_heads_first", [False, True])
def test_a_step_of_a_layer(blocks_hold_heads_first: bool, record_figures: Report) -> None:
    """Write, then attend; padded rows have no slot, and others the slot -1."""
    step = Step()
    if blocks_hold_heads_first:
        step.caches = step.caches.transpose(2, 3).contiguous().transpose(2, 3)
    padded = torch.cat([step.new, torch.full_like(step.new[:, :5], NAN)], dim=1)
    slots = torch.cat([step.slots, torch.full((2,), -1, device=DEVICE)])
    expected = step.caches.clone()
    flat = expected.flatten(1, 2)
    flat[:, step.slots] = step.new
    expected = flat.unflatten(1, expected.shape[1:3])
    one, arguments = torch.ones(1, device=DEVICE), step.arguments
    with no_waiting():
        reshape_and_cache_flash(*padded, *step.caches, slots, "auto", one, one)
        found = flash_attn_varlen_func(**arguments, causal=True, return_softmax_lse=True)
    torch.testing.assert_close(step.caches, expected, rtol=0, atol=0, equal_nan=True)
    step.check(found, record_figures)


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_fp8_caches_are_written(columns: int) -> None:
    step = Step(columns=columns)
    caches = torch.zeros(step.caches.shape, device=DEVICE, dtype=torch.uint8)
    scales = [torch.tensor([scale], device=DEVICE) for scale in (0.5, 2.0)]
    slots = step.slots
    with no_waiting():
        reshape_and_cache_flash(*step.new, *caches, slots, "fp8", *scales)
    for cache, rows, scale in zip(caches, step.new, (0.5, 2.0), strict=True):
        found = cache.view(torch.float8_e4m3fn).flatten(0, 1)[slots].float()
        assert torch.equal(found, (rows.float() / scale).to(torch.float8_e4m3fn).float())
    assert int((caches.flatten(1, 2) != 0).any(-1).any(-1).sum()) <= 2 * len(slots)


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("form", ["one, expanded", "of heads", "of requests"])
@pytest.mark.parametrize("captured", [False, True])
def test_fp8_caches_are_read(
    columns: int, form: str, captured: bool, record_figures: Report
) -> None:
    """Factors lie on the device; under a graph those of the replay count. Padding is NaN."""
    step = Step(columns=columns)
    caches = (step.caches.float() / 2).to(torch.float8_e4m3fn)
    shape = {"one, expanded": (1, 1), "of heads": (2,), "of requests": (3, 2)}[form]
    factors = [torch.ones(shape, device=DEVICE) for _ in "kv"]
    given = [factor.expand(3, 2) if factor.shape == (1, 1) else factor for factor in factors]
    arguments = step.arguments | {"k": caches[0], "v": caches[1].view(torch.uint8)}
    arguments |= {"k_descale": given[0], "v_descale": given[1]}

    def attend() -> Any:
        return flash_attn_varlen_func(**arguments, causal=True, return_softmax_lse=True)

    with no_waiting():
        found = attend()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    if captured:
        with torch.cuda.graph(graph):
            found = attend()
    for factor in factors:
        factor.uniform_(0.25, 2.0)
    if captured:
        graph.replay()
    else:
        with no_waiting():
            found = attend()
    step.check(found, record_figures, rows=of_e4m3(step, caches, given))


def of_e4m3(step: Step, caches: Any, factors: Any) -> Callable[[int], Any]:
    """Give what makes the keys and values that the e4m3 rows of a request stand for."""

    def rows(request: int) -> Any:
        pages, length = step.table[request].long(), step.kv_lens[request]
        by_heads = [factor.expand(len(step.q_lens), -1)[request] for factor in factors]
        return [
            cache.view(torch.uint8)[pages].view(cache.dtype).flatten(0, 1)[:length].float()
            * factor[:, None]
            for cache, factor in zip(caches, by_heads, strict=True)
        ]

    return rows


@pytest.mark.parametrize("captured", [False, True])
def test_a_server_loop_of_decoding(captured: bool, record_figures: Report) -> None:
    """Two layers, a token for each request and step; under a graph lengths and slots change."""
    lengths = (1, 15, 16, 500, 33, 1027)
    layers = [Step([(1, n) for n in lengths], heads=(32, 8)) for _ in range(2)]
    for layer in layers[1:]:
        layer.table = layers[0].table
        layer.caches.copy_(-layers[0].caches)
    most = layers[0].table.shape[1] * 16
    first = layers[0].arguments
    lens, slots = first["seqused_k"], layers[0].slots
    one = torch.ones((), device=DEVICE)
    outs = [torch.full_like(layer.q, NAN) for layer in layers]
    lengths_of_graph = {name: first[name] for name in ("cu_seqlens_q", "seqused_k", "block_table")}

    def forward() -> list[Any]:
        results = []
        for layer, out in zip(layers, outs, strict=True):
            reshape_and_cache_flash(*layer.new, *layer.caches, slots, "auto", one, one)
            results.append(
                flash_attn_varlen_func(
                    *(layer.q, layer.caches[0], layer.caches[1]),
                    max_seqlen_q=1,
                    max_seqlen_k=most,
                    **lengths_of_graph,
                    out=out,
                    causal=True,
                    return_softmax_lse=True,
                    fa_version=3,
                )
            )
        return results

    graph, results = None, forward()
    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = forward()
    for _ in range(12):
        for layer in layers:
            layer.kv_lens = [n + 1 for n in layer.kv_lens[:-1]] + layer.kv_lens[-1:]
            layer.q.copy_(torch.randn(layer.q.shape, device=DEVICE))
            layer.new.copy_(torch.randn(layer.new.shape, device=DEVICE))
        lens.copy_(int32(layers[0].kv_lens))
        slots.copy_(layers[0].slots)
        for out in outs:
            out.fill_(NAN)
        torch.cuda.synchronize()
        if graph is None:
            with no_waiting():
                results = forward()
        else:
            graph.replay()
        for layer, found in zip(layers, results, strict=True):
            layer.check(found, record_figures)
