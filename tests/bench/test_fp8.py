# SPDX-License-Identifier: Apache-2.0
"""The benchmark of FP8 caches, on a GPU made of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cumla.bench import fp8
from cumla.bench.cases import Case
from cumla.bench.dense import CheckError
from cumla.bench.fp8 import FORMATS, FP8, fp8_row, measure_fp8
from cumla.bench.peers import load_peers
from cumla.bench.report import failures, to_markdown, to_text
from cumla.bench.timing import Timing
from tests.bench.fake_gpu import LAUNCH_US, FakeGpu

H200 = load_peers().ceilings
SMALL = Case(5, 1, 2, 130)


def format_of(kv_cache: Any) -> str:
    if isinstance(kv_cache, tuple):
        return "e4m3 and scales"
    columns = {656: "packed", 576: "e4m3" if kv_cache.dtype == np.uint8 else "bfloat16"}
    return columns[kv_cache.shape[-1]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU whose calls note the format of their cache, and may spoil what they wrote."""
    gpu: Any = FakeGpu()
    gpu.spoil, gpu.formats = lambda name, out, lse: None, []
    original = fp8.MLADecodePlan.run

    def run(
        self: Any, q: Any, kv_cache: Any, *others: Any, out: Any, lse: Any, **rest: Any
    ) -> None:
        original(self, q, kv_cache, *others, out=out, lse=lse, **rest)
        gpu.formats.append(format_of(kv_cache))
        gpu.spoil(gpu.formats[-1], out, lse)
        gpu.now += LAUNCH_US

    monkeypatch.setattr(fp8.MLADecodePlan, "run", run)
    return gpu


def test_cases() -> None:
    assert [(case.batch, case.q_len, case.heads, case.kv_len) for case in FP8] == [
        (128, 1, 16, 8192),
        (128, 1, 16, 16384),
        (128, 1, 128, 4096),
    ]
    assert list(FORMATS.items()) == [
        ("bfloat16", 1152),
        ("e4m3", 576),
        ("e4m3 and scales", 512 + 16 + 128),
        ("packed", 656),
    ]


def test_formats_are_timed_in_turns(gpu: Any) -> None:
    times = measure_fp8(gpu, SMALL)
    assert list(times) == list(FORMATS)
    assert all(time == (LAUNCH_US, LAUNCH_US, LAUNCH_US) for time in times.values())
    assert gpu.formats[:4] == list(FORMATS)  # what is checked
    timed = gpu.formats[4:]
    turns = [name for i, name in enumerate(timed) if i == 0 or timed[i - 1] != name]
    assert turns == [*FORMATS] * 3


@pytest.mark.parametrize("what", ["out", "lse", "unwritten"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_wrong_format_is_found(gpu: Any, name: str, what: str) -> None:
    def spoil(format_: str, out: Any, lse: Any) -> None:
        if format_ != name:
            return
        if what == "out":
            out[2, 0, 1] *= 1.02
        elif what == "lse":
            lse[4, 1] *= 1.001
        else:
            out[0] = np.nan

    gpu.spoil = spoil
    with pytest.raises(CheckError, match=f"^{name}: some requests of b5-s1-h2-kv130: "):
        measure_fp8(gpu, SMALL)
    assert len(gpu.formats) == 1 + list(FORMATS).index(name)  # nothing was timed


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bfloat16"])
def test_a_scale_that_is_left_out_is_found(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original = fp8._call

    def wrong(inputs: Any, cache: Any) -> Any:
        if format_of(cache.argument) == name == "e4m3":
            cache = cache._replace(kv_scale=2 * cache.kv_scale)
        elif format_of(cache.argument) == name == "packed":
            argument = cache.argument.copy()
            argument[..., 512:528].view(np.float32)[...] *= 2
            cache = cache._replace(argument=argument)
        elif format_of(cache.argument) == name:
            latent, rope, scales = cache.argument
            cache = cache._replace(argument=(latent, rope, 2 * scales))
        return original(inputs, cache)

    monkeypatch.setattr(fp8, "_call", wrong)
    with pytest.raises(CheckError, match=f"^{name}: "):
        measure_fp8(gpu, SMALL)


def test_rows() -> None:
    case = FP8[0]
    us = dict(zip(FORMATS, (300, 150, 160, 200), strict=True))
    times = {name: Timing(time, time - 1, time + 2) for name, time in us.items()}
    row = fp8_row(case, times, H200)
    assert (row["batch"], row["heads"], row["kv_len"]) == (128, 16, 8192)
    one = row["formats"][1]
    nbytes = 128 * 8192 * 576 + 128 * 16 * (576 + 512) * 2
    assert one["gbps"] == pytest.approx(nbytes / 150e3)
    assert one["read_share"] == pytest.approx(one["gbps"] / H200.read_gbps)
    assert [of["x_bfloat16"] for of in row["formats"]] == [1.0, 2.0, 1.875, 1.5]
    assert [of["us_low"] for of in row["formats"]] == [299, 149, 159, 199]
    packed = row["formats"][3]
    assert packed["gbps"] == pytest.approx((nbytes + 128 * 8192 * 80) / 200e3)
    assert row["formats"][0]["gbps"] == pytest.approx(case.nbytes / 300e3)


def test_table() -> None:
    us = dict(zip(FORMATS, (300.0, 150.0, 160.0, 200.0), strict=True))
    times = {name: Timing(time, time, time) for name, time in us.items()}
    machine = dict.fromkeys(("gpu", "sm_count", "driver", "cupy", "nvrtc", "cumla"), "1")
    failed = SMALL.to_json() | {"failed": "packed: is off"}
    found = {
        "machine": machine,
        "date": "2026-11-21T00:00",
        "ceilings": H200.to_json(),
        "peers": load_peers().source,
        "rows": [],
        "fp8": [fp8_row(FP8[0], times, H200), failed],
    }
    lines = to_markdown(found).splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("| FP8 caches: batch |"))
    titles = "| heads | kv_len | format | us | GB/s | share of the read ceiling | x bfloat16 |"
    assert lines[at].endswith(titles)
    assert lines[at + 2].startswith("| 128 | 16 | 8192 | bfloat16 | 300 | 4")
    assert lines[at + 2].endswith(" | 1.00 |")
    assert lines[at + 3].startswith("| 128 | 16 | 8192 | e4m3 | 150 | 4")
    assert lines[at + 3].endswith(" | 2.00 |")
    assert lines[at + 6] == "| 5 | 2 | 130 | failed |  |  |  |  |"
    assert failures(found) == ["packed: is off"]
    assert "e4m3 and scales" in to_text(found)
