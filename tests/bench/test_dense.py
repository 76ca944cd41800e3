# SPDX-License-Identifier: Apache-2.0
"""Dense decoding and the ceilings, measured from end to end on a GPU made of NumPy."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench import ceilings as all_ceilings
from cumla.bench import ceilings, dense, run
from cumla.bench.cases import Case, Ceilings
from cumla.bench.gpu import Gpu
from cumla.bench.problem import check, lay_out, sample
from cumla.bench.section import CheckError, Section
from cumla.errors import CumlaError
from tests.bench.conftest import Fakes
from tests.bench.fake_gpu import CEILINGS, LAUNCH_US, FakeGpu, memory

CASES = (Case(17, 1, 3, 64), Case(2, 2, 3, 128))  # the first is no small batch
PRODUCT_US = 1400.0


def small(*cases: Case) -> Section:
    return replace(dense.SECTION, cases=cases)


def test_dense_rows_stand_beside_the_ceilings(fakes: Fakes) -> None:
    first, second = fakes.measure(small(*CASES))["rows"]
    for row, case in zip((first, second), CASES, strict=True):
        assert row.items() >= case.to_json().items()
        assert row["us"] == row["us_low"] == row["us_high"] == row["stream_only_us"] == LAUNCH_US
        assert row["efficiency"] == pytest.approx(row["floor_us"] / LAUNCH_US)
        assert 0 < row["row_error"] <= 4e-3
        assert 0 <= row["lse_error"] <= 1e-5
    assert second["tflops"] == pytest.approx(CASES[1].flops / LAUNCH_US / 1e6)
    assert second["gbps"] == pytest.approx(CASES[1].nbytes / LAUNCH_US / 1e3)
    assert first["graph_us"] is None
    assert second["graph_us"] == pytest.approx(LAUNCH_US)


# --- wrong results --------------------------------------------------------------------------------


def spoiler(what: str, number: int = 0) -> Any:
    """Spoil what the call of this number writes into out= and lse=."""
    seen = []

    def spoil(name: str, arguments: Any, options: dict[str, Any]) -> None:
        if not name.startswith("MLA"):
            return
        seen.append(name)
        if len(seen) != number + 1:
            return
        out, lse = options["out"], options["lse"]
        if what == "out":
            out[-1, ..., -1, :] *= 1.05
        elif what == "lse":
            lse[(-1, *[slice(None)] * (lse.ndim - 1))] *= 1.001
        else:
            out[0] = np.nan

    return spoil


@pytest.mark.parametrize("what", ["out", "lse", "unwritten"])
def test_wrong_attention_is_not_timed(fakes: Fakes, what: str) -> None:
    fakes.cumla.spoil = spoiler(what)
    (row,) = small(CASES[0]).run(fakes.bench, fakes.told.append)
    assert f"{'lse' if what == 'lse' else 'out'} is wrong in " in row["failed"]
    assert "us" not in row
    assert fakes.told[-1] == f"FAILED: {row['failed']}"
    assert len([name for name in fakes.cumla.calls if name.startswith("MLA")]) == 1


def test_an_error_of_one_case_leaves_the_others(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = dense.lay_out

    def broken(gpu: Any, case: Case, *caches: int) -> Any:
        if case == CASES[0]:
            raise TypeError("no such\nargument")
        return original(gpu, case, *caches)

    monkeypatch.setattr(dense, "lay_out", broken)
    first, second = fakes.measure(small(*CASES))["rows"]
    assert first["failed"] == f"{CASES[0].name}: TypeError: no such"
    assert second["us"] == LAUNCH_US
    assert fakes.told[0] == f"FAILED: {first['failed']}"


def test_a_case_that_does_not_fit_says_so(fakes: Fakes) -> None:
    fakes.gpu.free_bytes = lambda: 1 << 20  # type: ignore[method-assign]
    (row,) = small(Case(64, 1, 1, 16384)).run(fakes.bench, fakes.told.append)
    assert "needs 1.2 GB for its cache, and 0.0 GB are free" in row["failed"]


@pytest.mark.parametrize("kv_head", [0, 1])
def test_every_kv_head_is_checked(fakes: Fakes, kv_head: int) -> None:
    def spoil(name: str, arguments: Any, options: Any) -> None:
        options["out"][:, :, 2 * kv_head] *= 1.02

    fakes.cumla.spoil = spoil
    (row,) = small(Case(2, 1, 4, 64, kv_heads=2)).run(fakes.bench, fakes.told.append)
    assert "out is wrong in 2 of 8 rows" in row["failed"]


def test_unwritten_output_is_wrong(fakes: Fakes) -> None:
    with pytest.raises(CheckError, match="out is wrong in 12 of 12 rows"):
        check(fakes.gpu, lay_out(fakes.gpu, CASES[1]))


def test_what_a_graph_left_is_checked(fakes: Fakes) -> None:
    def captured(work: Any) -> Any:
        def spoil(name: str, arguments: Any, options: Any) -> None:
            options["out"][...] = 9.0

        fakes.cumla.spoil = spoil
        return work

    fakes.gpu.capture = captured  # type: ignore[method-assign]
    (row,) = small(CASES[1]).run(fakes.bench, fakes.told.append)
    assert "failed" in row


def test_graphs_go_round_caches_of_their_own(fakes: Fakes) -> None:
    tables: list[Any] = []
    fakes.cumla.spoil = lambda name, arguments, options: tables.append(options["block_table"])
    fakes.measure(small(CASES[1]))
    of_a_replay = tables[-3:]
    pages = np.concatenate([table.ravel() for table in of_a_replay])
    assert sorted(pages.tolist()) == list(range(3 * CASES[1].pages))
    assert sorted(pages.tolist()) != pages.tolist()


def test_the_stream_brings_all_kv_heads(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(fakes.gpu, "launch", lambda *arguments: sent.append(arguments))
    kv = np.zeros((3, 64, 2, 576), np.uint16)
    ceilings.stream_only(fakes.gpu, kv, np.array([2, 0], np.int32))()
    ((spec, _, _, (tensor_map, address, count)),) = sent
    assert spec == ceilings.STREAM_KV
    assert (tensor_map.ptr, tensor_map.sizes) == (kv.ctypes.data, (576, 64, 1, 6))
    assert memory(address, (count,), "int32").tolist() == [4, 5, 0, 1]


def test_sampled_rows_hold_the_corners() -> None:
    rows = sample(Case(128, 2, 128, 1024))
    assert 510 <= len(rows) <= 512
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert (rows[0].tolist(), rows[-1].tolist()) == ([0, 0, 0], [127, 1, 127])
    assert sample(Case(1, 1, 1, 64)).tolist() == [[0, 0, 0]]


# --- a run --------------------------------------------------------------------------------------


@pytest.fixture
def whole(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Fakes on which `run.run` runs, but for its environment and ceilings."""
    monkeypatch.setattr(run, "Gpu", lambda: fakes.gpu)
    monkeypatch.setattr(run, "current_device", lambda: 0)
    monkeypatch.setattr(run, "environment", lambda gpu: {"format": 1, "machine": {}})
    monkeypatch.setattr(ceilings, "measure", lambda gpu: CEILINGS)
    return fakes


def test_a_run_grows_and_tells_each_step(whole: Fakes) -> None:
    told: list[str] = []
    runs = run.run((small(Case(1, 1, 2, 64), CASES[1]),), told.append)
    assert [len(results["rows"]) for results in runs] == [0, 1, 2]
    assert [line.partition(":")[0] for line in told[1:]] == ["b1-s1-h2-kv64", CASES[1].name]


def test_a_run_describes_itself(whole: Fakes) -> None:
    sections, found = (small(Case(1, 1, 2, 64)),), replace(CEILINGS, fp8_tflops=1.0)
    *_, results = run.run(sections, lambda line: None, warm=True, limits=lambda gpu: found)
    assert (results["l2"], results["notes"]) == ("warm", [])
    assert results["ceilings"] == found.to_json()


def test_warm_runs_do_not_empty_the_cache(whole: Fakes) -> None:
    whole.gpu.flush_l2 = pytest.fail  # type: ignore[assignment]
    *_, results = run.run((small(Case(17, 1, 2, 64)),), lambda line: None, warm=True)
    assert results["rows"][0]["us"] == LAUNCH_US


@pytest.mark.parametrize("name", ["CUMLA_CHECK", "CUMLA_DEBUG"])
def test_slow_kernels_are_refused(whole: Fakes, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(CumlaError, match=f"{name}=1: unset it"):
        next(run.run((small(),), lambda line: None))


def test_the_environment_names_kernels_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "cupy_nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(run, "digest", lambda spec: f"digest of {spec.entry}")
    found = run.environment(FakeGpu())  # type: ignore[arg-type]
    assert found["digests"]["mla_schedule"] == "digest of mla_schedule"
    assert (found["machine"]["gpu"], found["machine"]["nvrtc"]) == ("Fake GPU", "12.9")


def test_the_fake_gpu_has_the_methods_of_the_real_one() -> None:
    for name, method in vars(Gpu).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            real, fake = (inspect.signature(kind.__dict__[name]) for kind in (Gpu, FakeGpu))
            assert list(real.parameters) == list(fake.parameters), name


# --- ceilings -------------------------------------------------------------------------------------


def ticks(gpu: FakeGpu, us: Any) -> Any:
    """A product that takes some time, and what to run it inside."""

    def work() -> None:
        gpu.now += us() if callable(us) else us

    return work, nullcontext()


@pytest.mark.parametrize("has_product", [True, False])
def test_ceilings(monkeypatch: pytest.MonkeyPatch, has_product: bool) -> None:
    gpu: Any = FakeGpu()
    made = ticks(gpu, 800.0) if has_product else None
    monkeypatch.setattr(ceilings, "_matmul", lambda gpu, large: ticks(gpu, PRODUCT_US))
    monkeypatch.setattr(all_ceilings, "_fp8_matmul", lambda gpu, large: made)
    found = all_ceilings.measure(gpu)
    of_us = 2 * 8192**3 / 1e6
    assert found.matmul_tflops == found.sustained_tflops == pytest.approx(of_us / PRODUCT_US)
    assert found.read_gbps == pytest.approx(gpu.streamed.nbytes / LAUNCH_US / 1e3)
    assert found.empty_us == LAUNCH_US
    assert found.fp8_scaled is not has_product
    expected = of_us / 800.0 if has_product else of_us / PRODUCT_US * 1356 / 754
    assert found.fp8_tflops == pytest.approx(expected)
    assert Ceilings.from_json(found.to_json()) == found
    without = ceilings.measure(gpu).to_json()
    assert found.to_json().items() > without.items()
    assert not [key for key in without if "fp8" in key]


def test_the_sustained_ceiling_is_that_of_a_hot_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()
    runs = []

    def us() -> float:
        runs.append(gpu.now)
        return PRODUCT_US if len(runs) <= 400 else 1750.0

    monkeypatch.setattr(ceilings, "_matmul", lambda gpu, large: ticks(gpu, us))
    found = ceilings.measure(gpu)
    assert found.sustained_tflops == pytest.approx(2 * 8192**3 / 1e6 / 1750.0)
    assert 1.4e6 <= gpu.now - runs[20] <= 2e6


def test_the_fp8_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch multiplies such matrices on the CPU, too; without PyTorch there is no product."""
    torch = pytest.importorskip("torch")
    gpu: Any = FakeGpu()
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", 32)
    bits = np.empty(4096, np.uint16)
    made = all_ceilings._fp8_matmul(gpu, bits)
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
    monkeypatch.setattr(all_ceilings, "find_spec", lambda name: None)
    assert all_ceilings._fp8_matmul(gpu, gpu.streamed) is None
