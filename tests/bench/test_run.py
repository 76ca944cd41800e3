# SPDX-License-Identifier: Apache-2.0
"""A whole run on a fake GPU, the ceilings, host times, and tables of results."""

from __future__ import annotations

import csv
import inspect
import io
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import __main__ as command
from bench import ceilings as all_ceilings
from bench import run as everything
from bench.report import lines, parts, to_markdown
from bench.sections import host
from cumla.bench import ceilings, run
from cumla.bench.cases import Case, Ceilings
from cumla.bench.gpu import Gpu
from cumla.bench.report import failures, to_csv, to_text
from cumla.errors import CumlaError
from tests.bench.conftest import DECODE, SMALL, Fakes, small, small_sections
from tests.bench.fake_gpu import CEILINGS, LAUNCH_US, FakeGpu

RECORDS = Path(__file__).resolve().parents[2] / "records"
PRODUCT_US = 1400.0


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
    sections = (small("", Case(1, 1, 2, 64)), small("page sizes: "))
    runs = run.run(sections, told.append)
    sizes = [(len(results["rows"]), len(results.get("pages", ()))) for results in runs]
    assert sizes == [(0, 0), (1, 0), (1, 1)]
    assert [line.partition(":")[0] for line in told[1:]] == [
        "b1-s1-h2-kv64",
        f"{DECODE.name} by page size",
    ]


def test_a_run_describes_itself(whole: Fakes) -> None:
    sections, found = (small("", Case(1, 1, 2, 64)),), replace(CEILINGS, fp8_tflops=1.0)
    *_, results = run.run(sections, lambda line: None, warm=True, limits=lambda gpu: found)
    assert (results["l2"], results["notes"]) == ("warm", [])
    assert results["ceilings"] == found.to_json()


def test_warm_runs_do_not_empty_the_cache(whole: Fakes) -> None:
    whole.gpu.flush_l2 = pytest.fail  # type: ignore[assignment]
    *_, results = run.run((small("", Case(17, 1, 2, 64)),), lambda line: None, warm=True)
    assert results["rows"][0]["us"] == LAUNCH_US


@pytest.fixture
def small_run(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: a run of sections has the rows of small ones, and the L2's state."""

    def fake(sections: Any, note: Any, *, warm: bool, limits: Any) -> Any:
        assert limits is all_ceilings.measure
        names = {section.name for section in sections}
        described = {name: results[name] for name in ("machine", "date", "ceilings")}
        start = described | {"l2": "warm" if warm else "cold", "notes": [], "rows": []}
        yield start | {name: results[name] for name in everything.NAMES if name in names}

    host_times = {"host": {"CuPy": {"us": 12.0}}, "host_stages": {}, "notes": ["no JAX"]}
    monkeypatch.setattr(everything.base, "run", fake)
    monkeypatch.setattr(everything, "Gpu", lambda: nullcontext())
    monkeypatch.setattr(everything, "measure_host", lambda gpu: dict(host_times))


@pytest.mark.parametrize("name", everything.NAMES)
def test_sections_are_chosen_by_name(small_run: None, name: str) -> None:
    *_, results = everything.run(lambda line: None, [name])
    assert {name for name in everything.NAMES if results.get(name)} == {name}
    assert results["protocol"] == everything.PROTOCOL
    assert results["notes"] == (["no JAX"] if name == "host" else [])


def test_the_command_measures(
    small_run: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    assert command.main(["--only", "merge", "host", "--warm", "--json", str(file)]) == 0
    measured = json.loads(file.read_text())
    assert [name for name in everything.NAMES if measured.get(name)] == ["merge", "host"]
    assert measured["l2"] == "warm"
    assert capsys.readouterr().out == to_text(parts(measured)) + "\n"
    with pytest.raises(SystemExit):
        command.main(["--only", "dense"])
    assert "choose from" in capsys.readouterr().err


def test_the_command_reads(
    results: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, table = tmp_path / "run.json", tmp_path / "run.csv"
    file.write_text(json.dumps(results))
    assert command.main(["--from", str(file), "--markdown", "--csv", str(table)]) == 0
    assert capsys.readouterr().out == to_markdown(parts(results))
    assert table.read_text() == to_csv(lines(results))
    results["merge"][0]["failed"] = "merge is off"
    file.write_text(json.dumps(results))
    assert command.main(["--from", str(file)]) == 1
    assert "\n\nmerge is off\n\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["CUMLA_CHECK", "CUMLA_DEBUG"])
def test_slow_kernels_are_refused(whole: Fakes, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(CumlaError, match=f"{name}=1: unset it"):
        next(run.run(small_sections(), lambda line: None))


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


# --- host times -----------------------------------------------------------------------------------


@pytest.fixture
def few_calls(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    monkeypatch.setattr(host, "time_host", partial(host.time_host, repeats=4, warmup=1))
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    return fakes


def test_host_times_of_cupy(few_calls: Fakes) -> None:
    measured = host.measure_host(few_calls.gpu, DECODE)  # type: ignore[arg-type]
    assert set(measured["host"]) == {"CuPy"}
    assert set(measured["host_stages"]) == {"arguments"}  # nothing is launched on the CPU
    assert measured["host"]["CuPy"]["us"] > 0


@pytest.mark.parametrize("has_gpu", [True, False])
def test_host_time_of_jax(few_calls: Fakes, monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(host, "find_spec", lambda name: name == "jax" or None)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    cpus = jax.devices("cpu")

    def devices(backend: str) -> Any:
        if not has_gpu:
            raise RuntimeError(f"Unknown backend: '{backend}'\nand more")
        return cpus

    monkeypatch.setattr(jax, "devices", devices)
    measured = host.measure_host(few_calls.gpu, DECODE)  # type: ignore[arg-type]
    why = [] if has_gpu else ["JAX: no host time (RuntimeError: Unknown backend: 'gpu')"]
    assert measured["notes"] == why
    assert ("JAX" in measured["host"]) == has_gpu


# --- tables ---------------------------------------------------------------------------------------


def test_every_section_has_its_table(results: dict[str, Any]) -> None:
    markdown, text = to_markdown(parts(results)), to_text(parts(results))
    for section in small_sections():
        table = section.table(results)
        assert len(table) > len(SMALL[section.title])
        assert {len(cells) for cells in table} == {len(table[0])}
        assert f"| {' | '.join(table[0])} |" in markdown
        assert f"| {' | '.join(table[-1])} |" in markdown
        assert table[0][0] in text
    for line in markdown.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_cells(results: dict[str, Any]) -> None:
    markdown = to_markdown(parts(results))
    for line in (
        "| 2 | 2 | 3 | 128 | 5.0 | 1 | 64 | 0.01 | 5.0 | 5.0 |",
        "| 17 | 1 | 3 | 64 | 5.0 | 5.0, 5.0 | 5.0 | 1.000 |",
        "| 3 | 2 | 2 x 1, 1 x 4 | 80 | True | 5.0 | ",
        "| 2 | 2 | 70 | 5.0 (1.000) | 5.0 (1.000) |",
        "| 2 | 2 | 70 | dtype and layout | cache: split | 5.0 | 1.000 |",
        "| 3 | 4 | float32 | 4 | 5.0 | 840 | 0.20 | 5.0 | - | - | - | - | - | - |",
        "| mqa_logits | 1 | 5 | 9 | 5.0 | ",
    ):
        assert line in markdown


def test_columns_of_usual_values_are_left_out(results: dict[str, Any]) -> None:
    titles = small("").table(results)[0]
    assert not {"kv_heads", "dtype", "lengths", "batch_invariant", "x FlashMLA"} & set(titles)
    results["rows"][0] |= {"dtype": "float16", "peers": {"FlashMLA": {"x": 1.2}}}
    table = small("").table(results)
    assert table[0][4:6] == ["dtype", "us"]
    assert table[1][table[0].index("x FlashMLA")] == "1.20*"


def test_failed_rows_say_so(results: dict[str, Any]) -> None:
    for section in small_sections():
        case = SMALL[section.title][0]
        section.rows(results)[0].clear()
        (row,) = (row for row in results[section.name] if not row)
        row |= case.to_json() | {"failed": f"{case.name} is off"}
    wrong = [f"{SMALL[section.title][0].name} is off" for section in small_sections()]
    assert failures(lines(results)) == wrong
    text = to_text(parts(results))
    assert all(line in text for line in wrong)
    assert to_markdown(parts(results)).count("| failed |") == len(wrong)


@pytest.mark.parametrize("name", ["h100.json", "h200.json", "h200-peers.json"])
def test_recorded_runs_print(name: str) -> None:
    recorded = json.loads((RECORDS / name).read_text())
    markdown = to_markdown(parts(recorded))
    assert to_text(parts(recorded)).count("\n") > 100
    in_this_run = name == "h200-peers.json"
    assert ("| peers of this run: batch |" in markdown) == in_this_run
    where = ", in this run" if in_this_run else ""
    assert f"; x peer: the peer's time{where}, divided by ours." in markdown
    assert r"\*: scaled: that peer was measured on NVIDIA H200" in markdown
    assert "first call of a process" in markdown


def test_peers_of_a_run_stand_beside_published_ones(results: dict[str, Any]) -> None:
    results["peers"] = {"device": "a GPU", "date": "2026"}
    row = results["rows"][1]
    row["peers"] = {
        "FlashMLA": {"us": 7.0, "scaled_us": 7.0, "x": 1.4},
        "FlashInfer": {"us": 6.0, "scaled_us": 6.0, "own_us": 4.8, "x": 1.25, "measured": True},
        "Triton": {"us": 9.0, "scaled_us": 9.0, "x": 1.8, "measured": True, "apart": True},
    }
    row["best_peer"] = "FlashInfer"
    results["indexer"][0]["peers"] = {
        "DeepGEMM": {"us": 6.0, "scaled_us": 6.0, "own_us": 5.0, "x": 1.2, "measured": True}
    }
    lines = to_markdown(parts(results)).splitlines()
    at = next(i for i, line in enumerate(lines) if "peers of this run" in line)
    assert lines[at].endswith("| kv_len | us | us in turns | FlashInfer us | x | Triton us | x |")
    assert lines[at + 2] == "| 2 | 2 | 3 | 128 | 5.0 | 4.8 | 6.0 | 1.25 | 9.0 | 1.80^ |"
    assert any(r"| 1.40\* | 1.25 (FlashInfer) |" in line for line in lines)
    at = next(i for i, line in enumerate(lines) if line.startswith("| indexer in turns: op |"))
    assert lines[at + 2].endswith("| 5.0 | 6.0 | 1.200 |")
    assert "us in turns: ours in turns with the peers of this run" in lines[-1]
    assert "^: a much slower peer, which ran apart" in lines[-1]


def test_csv_has_a_line_for_each_time(results: dict[str, Any]) -> None:
    results["rows"][0]["peers"] = {"FlashMLA": {"scaled_us": 250.0}}
    rows = list(csv.DictReader(io.StringIO(to_csv(lines(results)))))
    count = {name: sum(row["section"] == name for row in rows) for name in results}
    assert (count["rows"], count["fp8"], count["forms"], count["indexer"]) == (2, 4, 9, 7)
    assert rows[0]["FlashMLA_scaled_us"] == "250.0"
    assert rows[1]["FlashMLA_scaled_us"] == ""
    assert {row["us"] for row in rows if row["section"] in ("rows", "merge")} == {"5.0"}
    assert "peers" not in rows[0] and "seeds" not in rows[0]
