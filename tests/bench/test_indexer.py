# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the indexer, on a GPU made of NumPy: floors, checks, rows, peers, tables."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cumla.bench import ceilings, indexer, indexer_cache
from cumla.bench.cases import Ceilings
from cumla.bench.dense import CheckError
from cumla.bench.indexer import (
    LOGITS,
    LOGITS_SCHEDULES,
    LogitsCase,
    LogitsTiming,
    PagedLogitsCase,
    PrefillLogitsCase,
    floor_us,
    logits_row,
    logits_schedule_row,
    measure_logits,
    time_logits_schedule,
)
from cumla.bench.indexer_cache import INDEXER_CACHE, IndexerCacheCase, measure_indexer_cache
from cumla.bench.operations import operation_row
from cumla.bench.peers import load_peers
from cumla.bench.report import failures, to_markdown, to_text
from cumla.bench.timing import Timing
from tests.bench.fake_gpu import LAUNCH_US, FakeGpu

H200 = load_peers().ceilings
SMALL = (
    PagedLogitsCase(5, 2, 70),
    PagedLogitsCase(2, 1, 130),
    PagedLogitsCase(1, 3, 2),
    PrefillLogitsCase(5, 90),
    PrefillLogitsCase(6, 4),
)
CACHE = tuple(IndexerCacheCase(case.op, 1) for case in INDEXER_CACHE[::2])


class Spoiled:
    """An operation that takes the fake GPU's clock forward, and may leave something wrong."""

    def __init__(self, gpu: FakeGpu, operation: Any) -> None:
        self.gpu, self.operation = gpu, operation
        self.spoil: Any = lambda *arguments, **options: None
        self.calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        result = self.operation(*arguments, **options)
        self.spoil(*arguments, **options)
        self.gpu.now += LAUNCH_US
        self.calls += 1
        return result


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    gpu: Any = FakeGpu()
    plan = indexer.PagedMQALogitsPlan
    gpu.paged = Spoiled(gpu, plan.run)
    monkeypatch.setattr(plan, "run", lambda *args, **options: gpu.paged(*args, **options))
    gpu.prefill = Spoiled(gpu, indexer.mqa_logits)
    monkeypatch.setattr(indexer, "mqa_logits", gpu.prefill)
    for name in ("quantize_fp8", "append_indexer_cache"):
        setattr(gpu, name, Spoiled(gpu, getattr(indexer_cache, name)))
        monkeypatch.setattr(indexer_cache, name, getattr(gpu, name))
    monkeypatch.setattr(indexer, "_SMALL_BATCH", 2)
    monkeypatch.setattr(indexer, "_GRAPH_CALLS", 4)
    monkeypatch.setattr(indexer, "_ROTATED_BYTES", 3 * SMALL[1].cache_bytes)
    return gpu


# --- what is measured -----------------------------------------------------------------------------


def test_the_cases_are_those_of_the_targets() -> None:
    paged = [(c.batch, c.next_n, c.kv_len) for c in LOGITS if isinstance(c, PagedLogitsCase)]
    assert paged == [
        *((64, 1, 8192), (64, 1, 32768), (128, 1, 32768), (64, 2, 8192), (128, 2, 32768)),
        *((128, 4, 32768), (8, 1, 131072), (4, 1, 131072), (2, 1, 131072), (1, 1, 131072)),
    ]
    prefill = [(c.q_len, c.kv_len) for c in LOGITS if isinstance(c, PrefillLogitsCase)]
    assert prefill == [(4096, 8192), (4096, 32768)]
    sizes = [case.nbytes for case in INDEXER_CACHE]
    assert sizes == pytest.approx([128e6, 2e9, 128e6, 2e9], rel=1e-3)


@pytest.mark.parametrize(
    ("case", "us", "rate"),
    [
        (PagedLogitsCase(64, 1, 8192), 23.97, ("gbps", 2998)),
        (PagedLogitsCase(128, 1, 32768), 142.85, ("gbps", 4001)),
        (PagedLogitsCase(64, 2, 8192), 26.11, ("tflops", 658)),
        (PagedLogitsCase(128, 2, 32768), 150.37, ("tflops", 914)),
        (PrefillLogitsCase(4096, 8192), 382.08, ("tflops", 1079)),
        (PrefillLogitsCase(4096, 32768), 1830.53, ("tflops", 1126)),
    ],
)
def test_work_is_what_the_peers_rates_imply(
    case: LogitsCase, us: float, rate: tuple[str, int]
) -> None:
    """Within 1 %: whoever published them counted the queries' bytes, too."""
    row = logits_row(case, LogitsTiming(Timing(us, us, us), None, 0.0), H200, load_peers())
    name, published = rate
    assert row[name] == pytest.approx(published, rel=0.01)
    cleaning = (
        {8192: 19.78, 32768: 21.31}[case.kv_len] if case.to_json()["op"] == "mqa_logits" else 0
    )
    of_peer = pytest.approx(
        {"us": us + cleaning, "scaled_us": us + cleaning, "x": 1 + cleaning / us}
    )
    assert row["peers"] == {"DeepGEMM": of_peer}


def test_floors() -> None:
    memory, arithmetic = PagedLogitsCase(128, 1, 32768), PagedLogitsCase(128, 4, 32768)
    assert floor_us(memory, H200) == pytest.approx(128 * 32768 * 136 / 4468e3)
    visible = sum(32768 - i for i in range(4))
    flops = 2 * 64 * 128 * 128 * visible
    assert (arithmetic.flops, floor_us(arithmetic, H200)) == (flops, pytest.approx(flops / 1356e6))
    prefill = PrefillLogitsCase(2, 3)
    assert (prefill.flops, prefill.nbytes) == (2 * 64 * 128 * (2 + 3), 3 * 132 + 2 * 3 * 4)
    assert (PagedLogitsCase(1, 3, 2).flops, PrefillLogitsCase(6, 4).flops) == (
        2 * 64 * 128 * (2 + 1),
        2 * 64 * 128 * (1 + 2 + 3 + 4),
    )


def test_peers_are_scaled_by_the_ceiling_that_binds() -> None:
    slow_memory = replace(H200, read_gbps=H200.read_gbps / 2)
    slow_cores = replace(H200, fp8_tflops=H200.fp8_tflops / 2)
    timing = LogitsTiming(Timing(100.0, 90.0, 110.0), None, 0.0)

    def scaled(case: LogitsCase, limits: Ceilings) -> float:
        row = logits_row(case, timing, limits, load_peers())
        assert row["peers"]["DeepGEMM"]["x"] == row["peers"]["DeepGEMM"]["scaled_us"] / 100.0
        return float(row["peers"]["DeepGEMM"]["scaled_us"])

    memory, arithmetic = PagedLogitsCase(128, 1, 32768), PrefillLogitsCase(4096, 8192)
    assert scaled(memory, slow_memory) == pytest.approx(2 * 142.85)
    assert scaled(memory, slow_cores) == pytest.approx(142.85, rel=0.6)
    assert scaled(arithmetic, slow_cores) == pytest.approx(2 * 382.08 + 19.78)
    assert scaled(arithmetic, slow_memory) == pytest.approx(382.08 + 2 * 19.78)
    nobody = logits_row(PagedLogitsCase(1, 1, 131072), timing, H200, load_peers())
    assert nobody["peers"] == {}


# --- checks and times -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_case_is_checked_and_timed(gpu: Any, case: LogitsCase) -> None:
    timing = measure_logits(gpu, case)
    assert timing.single == Timing(LAUNCH_US, LAUNCH_US, LAUNCH_US)
    assert 0 < timing.row_error < 1e-6  # the reference's, rounded to float32
    small = isinstance(case, PagedLogitsCase) and case.batch <= 2
    assert (timing.graph is None) == (not small)
    if timing.graph is not None:
        assert timing.graph.us == pytest.approx(LAUNCH_US)


def spoil_row(row: int, column: int, value: float) -> Any:
    def spoil(*arguments: Any, out: Any, **options: Any) -> None:
        out[row, column] = value

    return spoil


@pytest.mark.parametrize(
    ("case", "row", "column", "value", "message"),
    [
        (SMALL[0], 9, 0, 99.0, "query 1 of request 4 are off by"),
        (SMALL[0], 4, 69, 0.0, "query 0 of request 2: not -inf behind the 69 tokens"),
        (SMALL[0], 1, 69, np.nan, "query 1 of request 0 are off by nan"),
        (SMALL[1], 0, 129, -np.inf, "query 0 of request 0 are off by inf"),
        (SMALL[3], 2, 88, 0.0, "query 2: not -inf behind the 88 tokens"),
        (SMALL[3], 4, 89, 99.0, "query 4 are off by"),
    ],
)
def test_a_wrong_logit_is_found(
    gpu: Any, case: LogitsCase, row: int, column: int, value: float, message: str
) -> None:
    operation = gpu.prefill if isinstance(case, PrefillLogitsCase) else gpu.paged
    operation.spoil = spoil_row(row, column, value)
    with pytest.raises(CheckError, match=f"^{case.name}: the logits of {message}"):
        measure_logits(gpu, case)
    assert operation.calls == 1


@pytest.mark.parametrize("case", [SMALL[0], SMALL[3]], ids=lambda case: case.name)
def test_what_is_not_written_is_found(gpu: Any, case: LogitsCase) -> None:
    gpu.paged.operation = gpu.prefill.operation = lambda *arguments, **options: None
    with pytest.raises(CheckError, match=r"not -inf|off by nan"):
        measure_logits(gpu, case)


def test_a_graph_goes_round_caches_of_their_own_and_is_checked(gpu: Any) -> None:
    case, tables = SMALL[1], []

    def note(plan: Any, q: Any, cache: Any, w: Any, n: Any, table: Any, **options: Any) -> None:
        tables.append(table)
        if gpu.paged.calls > 40:  # in the graph
            options["out"][0, 3] = 99.0

    gpu.paged.spoil = note
    with pytest.raises(CheckError, match="are off by"):
        measure_logits(gpu, case)
    of_a_replay = tables[-4:]
    pages = np.concatenate([table.ravel() for table in of_a_replay[:3]])
    assert sorted(pages.tolist()) == list(range(3 * case.pages))
    assert [table is of_a_replay[i % 3] for i, table in enumerate(of_a_replay)] == [True] * 4


def test_schedules(gpu: Any) -> None:
    for case in LOGITS_SCHEDULES:
        row = logits_schedule_row(case, time_logits_schedule(gpu, case), load_peers())
        assert row["us"] == 0.0  # on the CPU nothing is computed
        assert (row["batch"], row["kv_len"]) == (case.batch, case.kv_len)
    assert row["deep_gemm_us"] is None  # of a single request
    one = logits_schedule_row(LOGITS_SCHEDULES[0], Timing(3.0, 3.0, 3.0), load_peers())
    assert one["deep_gemm_us"] == 6.08


# --- quantising -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CACHE, ids=lambda case: case.op)
def test_quantising_stands_beside_the_copy_ceiling(gpu: Any, case: IndexerCacheCase) -> None:
    row = operation_row(case, 4000.0, lambda: measure_indexer_cache(gpu, case))
    assert (row["op"], row["us"], row["tokens"] % 64) == (case.op, LAUNCH_US, 0)
    assert row["nbytes"] == row["tokens"] * (256 + 132)
    assert row["efficiency"] == pytest.approx(row["nbytes"] / LAUNCH_US / 1e3 / 4000.0)
    assert row["copy_us"] == LAUNCH_US


@pytest.mark.parametrize("case", CACHE, ids=lambda case: case.op)
@pytest.mark.parametrize("place", [0, -1])
def test_a_wrong_byte_is_found(gpu: Any, case: IndexerCacheCase, place: int) -> None:
    def spoil(*arguments: Any, out: Any = None, **options: Any) -> None:
        written = out if case.op == "quantize_fp8" else arguments[1]
        slot = (place if out is not None else arguments[2][place]) % case.tokens
        written.reshape(-1, written.shape[-1])[slot, 5] ^= 1

    getattr(gpu, case.op).spoil = spoil
    row = operation_row(case, 4000.0, lambda: measure_indexer_cache(gpu, case))
    assert "was not written as it should be" in row["failed"]


# --- the ceiling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_product", [True, False])
def test_the_fp8_ceiling(monkeypatch: pytest.MonkeyPatch, has_product: bool) -> None:
    gpu: Any = FakeGpu()

    def ticks(us: float) -> Any:
        def work() -> None:
            gpu.now += us

        return work, nullcontext()

    monkeypatch.setattr(ceilings, "_matmul", lambda gpu, large: ticks(1400.0))
    made = ticks(800.0) if has_product else None
    monkeypatch.setattr(ceilings, "_fp8_matmul", lambda gpu, large: made)
    found = ceilings.measure(gpu)
    assert found.fp8_scaled is not has_product
    of_us = 2 * 8192**3 / 1e6
    expected = of_us / 800.0 if has_product else of_us / 1400.0 * 1356 / 754
    assert found.fp8_tflops == pytest.approx(expected)
    assert Ceilings.from_json(found.to_json()) == found


def test_the_sustained_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same product, when it has heated the GPU."""
    gpu: Any = FakeGpu()
    runs = []

    def work() -> None:
        runs.append(gpu.now)
        gpu.now += 1400.0 if len(runs) <= 400 else 1750.0

    monkeypatch.setattr(ceilings, "_matmul", lambda gpu, large: (work, nullcontext()))
    monkeypatch.setattr(ceilings, "_fp8_matmul", lambda gpu, large: None)
    found = ceilings.measure(gpu)
    of_us = 2 * 8192**3 / 1e6
    assert found.matmul_tflops == pytest.approx(of_us / 1400.0)
    assert found.sustained_tflops == pytest.approx(of_us / 1750.0)
    assert 1.4e6 <= gpu.now - runs[20] <= 2e6
    assert Ceilings.from_json(found.to_json()) == found


def test_the_fp8_product_needs_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()
    monkeypatch.setattr(ceilings, "find_spec", lambda name: None)
    assert ceilings._fp8_matmul(gpu, gpu.streamed) is None


def test_the_fp8_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch multiplies such matrices on the CPU, too."""
    torch = pytest.importorskip("torch")
    gpu: Any = FakeGpu()
    monkeypatch.setattr(ceilings, "_MATMUL_SIZE", 32)
    bits = np.random.default_rng(0).standard_normal(4096).astype(np.float32).view(np.uint16)[1::2]
    made = ceilings._fp8_matmul(gpu, np.ascontiguousarray(bits))
    assert made is not None
    product: Any = made[0]()
    a, b = (
        torch.from_numpy(bits[i * 1024 : (i + 1) * 1024].copy().view(np.int16))
        .view(torch.bfloat16)
        .reshape(32, 32)
        .to(torch.float8_e4m3fn)
        .float()
        for i in range(2)
    )
    assert torch.allclose(product.float(), a @ b.T, rtol=1e-2, atol=1e-2)


# --- tables ---------------------------------------------------------------------------------------


def results(rows: list[dict[str, Any]], **limits: Any) -> dict[str, Any]:
    """Results with these rows of the indexer and none of attention."""
    machine = {
        "gpu": "A GPU",
        "sm_count": 4,
        "driver": "1",
        "cupy": "c",
        "nvrtc": "1",
        "cumla": "0",
    }
    return {
        "machine": machine,
        "date": "2026-11-21T00:00",
        "ceilings": replace(H200, **limits).to_json(),
        "peers": load_peers().source,
        "rows": [],
        "indexer": rows,
    }


def test_tables() -> None:
    peers = load_peers()
    single, graph = Timing(25.0, 24.0, 26.0), Timing(31.0, 31.0, 31.0)
    rows = [
        logits_row(PagedLogitsCase(64, 1, 8192), LogitsTiming(single, None, 0.0), H200, peers),
        logits_row(PagedLogitsCase(1, 1, 131072), LogitsTiming(single, graph, 0.0), H200, peers),
        logits_row(PrefillLogitsCase(4096, 8192), LogitsTiming(single, None, 0.0), H200, peers),
        PagedLogitsCase(2, 1, 131072).to_json() | {"failed": "the logits are off"},
        logits_schedule_row(PagedLogitsCase(64, 1, 8192), Timing(6.2, 6.0, 6.4), peers),
        CACHE[0].to_json() | {"nbytes": 10**6, "us": 5.0, "gbps": 200.0, "efficiency": 0.05},
    ]
    markdown = to_markdown(results(rows)).splitlines()
    (at,) = (i for i, line in enumerate(markdown) if line.startswith("| indexer: op |"))
    assert markdown[at].endswith("| us | TFLOP/s | GB/s | efficiency | x DeepGEMM | graph us |")
    assert markdown[at + 2 : at + 6] == [
        r"| paged_mqa_logits | 64 | 1 | 8192 | 25.0 | 344 | 2852 | 0.64 | 0.96\* | - |",
        "| paged_mqa_logits | 1 | 1 | 131072 | 25.0 | 86 | 713 | 0.16 | - | 31.0 |",
        r"| mqa_logits | 1 | 4096 | 8192 | 25.0 | 16494 | 5412 | 12.16 | 16.07\* | - |",
        "| paged_mqa_logits | 2 | 1 | 131072 | wrong result |  |  |  |  |  |",
    ]
    assert "| 64 | 1 | 8192 | 6.2 | 2.5 | 6.1 |" in markdown
    assert "| 2560 | 128 | bfloat16 | 1 | 5.0 | 200 | 0.05 |" in markdown
    assert any(r"\*: scaled: that peer was measured on NVIDIA H200" in line for line in markdown)
    assert "float8_e4m3fn 1356 TFLOP/s, an empty" in to_text(results(rows))
    assert failures(results(rows)) == ["the logits are off"]


def test_a_scaled_ceiling_is_marked() -> None:
    text = to_text(results([], fp8_scaled=True))
    assert "float8_e4m3fn 1356 TFLOP/s (scaled from that of bfloat16, not measured)" in text
    assert "indexer" not in text
