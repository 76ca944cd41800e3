# SPDX-License-Identifier: Apache-2.0
"""The kernel's own text, run by the CPU, against the reference; poisoned memory stays as it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cumla
import tests.emulator
from cumla.launch.kernel import Launch
from cumla.launch.mha.attention import E4M3_COLUMNS
from cumla.launch.tensor_map import TensorMap
from tests.calls import int32
from tests.emulator import Array, CuPy, emulate, emulated_gpu
from tests.emulator.fenced import Fenced
from tests.launch.structs import parameters
from tests.mha.attention_cases import (
    FEW_ROWS,
    PAIRED_COUNTS,
    PAIRS,
    Sample,
    check,
    has_few_rows,
    make,
    reads_pairs,
    samples,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
ROOT = Path(__file__).resolve().parents[3]
SCALE = 0.2
FEW = (  # few kernels: each takes seconds to compile
    *samples(11, columns=(64, 64), dtype="bfloat16", cache="same"),
    *samples(
        2, columns=(192, 128), dtype="float16", page_size=16, window=17, sinks=True, cache="same"
    ),
    *samples(1, columns=(80, 136), dtype="bfloat16", page_size=48, lens=(130, 3)),
    *samples(8, columns=(64, 64), dtype="bfloat16", cache="e4m3", heads=(5, 5), queries="many"),
    *samples(2, columns=(192, 128), dtype="float16", cache="e4m3", lens=(700,), heads=(16, 1)),
    *samples(1, columns=(208, 16), dtype="bfloat16", cache="e4m3", lens=(130, 3), heads=(16, 1)),
    *samples(4, columns=(512, 512), dtype="bfloat16", cache="same", lens=(700, 70), page_size=64),
)


def call(cupy: CuPy, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Call with copies of NumPy arrays."""
    return cumla.attention(**{name: cupy.like(value) for name, value in arguments.items()})


def check_sample(sample: Sample) -> None:
    """On as many multiprocessors as cut its requests otherwise than those of others."""
    with emulated_gpu(4 + sample.seed % 9) as cupy:
        got = call(cupy, make(sample))
    check(sample, got, cumla.reference.attention(**make(sample)))


@pytest.mark.parametrize(
    "sample", FEW, ids=lambda s: f"{s.dtype}-{s.columns[0]}-{s.cache}-{s.seed}"
)
def test_attention(sample: Sample) -> None:
    check_sample(sample)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sample", samples(120), ids=lambda s: str(s.seed))
def test_attention_of_all_kinds(sample: Sample) -> None:
    check_sample(sample)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "columns", [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)], ids=str
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_kernel(columns: tuple[int, int], dtype: str, page_size: int) -> None:
    fixed = {"columns": columns, "dtype": dtype, "page_size": page_size, "lens": (200, 70, 0)}
    caches = ("same", "e4m3") if max(columns) in E4M3_COLUMNS else ("same",)
    for cache in caches:
        for sample in samples(3, **fixed, cache=cache):
            check_sample(sample)


@pytest.mark.parametrize("count", PAIRED_COUNTS)
@pytest.mark.parametrize(
    "sample",
    [sample for fixed in PAIRS for sample in samples(2, **fixed, dtype="bfloat16")],
    ids=lambda s: f"{s.columns[1]}-{s.seed}",
)
def test_two_kv_heads_of_a_thread_block(sample: Sample, count: int) -> None:
    given = make(sample)
    with emulated_gpu(count) as cupy:
        assert reads_pairs({name: cupy.like(value) for name, value in given.items()})
        got = call(cupy, given)
    check(sample, got, cumla.reference.attention(**make(sample)))


@pytest.mark.parametrize("count", [13, 33])
@pytest.mark.parametrize(
    "sample",
    [sample for fixed in FEW_ROWS for sample in samples(2, **fixed, dtype="bfloat16")],
    ids=lambda s: f"{s.columns[0]}-{s.outputs}-{s.seed}",
)
def test_few_rows(sample: Sample, count: int) -> None:
    given = make(sample)
    with emulated_gpu(count) as cupy:
        assert has_few_rows({name: cupy.like(value) for name, value in given.items()})
        got = call(cupy, given)
    check(sample, got, cumla.reference.attention(**make(sample)))


@pytest.mark.parametrize("counts", [(3, 0, 0), (0, 0, 3), (0, 2, 1)], ids=str)
@pytest.mark.parametrize("heads", [(16, 2), (16, 8), (6, 1)], ids=str)
def test_few_rows_on_average(heads: tuple[int, int], counts: tuple[int, ...]) -> None:
    """A request has the queries of all, and so several tiles."""
    fixed = {"lens": (200, 470, 30), "columns": (128, 128), "cache": "same", "queries": "one"}
    fixed |= {"page_size": 64, "pages": "table", "outputs": "new", "dtype": "bfloat16"}
    (sample,) = samples(1, **fixed, heads=heads, window=None)
    given = make(sample)
    given |= {"q": given["q"][:3], "qo_indptr": int32(*np.cumsum([0, *counts]))}
    with emulated_gpu(33) as cupy:
        assert has_few_rows({name: cupy.like(value) for name, value in given.items()})
        out, lse = call(cupy, given)
    expected = cumla.reference.attention(**given)
    np.testing.assert_allclose(out.astype(np.float64), expected.out.astype(np.float64), atol=0.02)
    np.testing.assert_allclose(lse, expected.lse, atol=1e-4)


# --- a small call ---------------------------------------------------------------------------------


def problem(**changes: Any) -> dict[str, Any]:
    """Rows 3 to 27 of 30 have one of three requests; the first one is cut."""
    rng = np.random.default_rng(0)

    def rows(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(BF16)

    arguments = {
        "q": rows(30, 4, 64),
        "k": rows(24, 16, 2, 64),
        "v": rows(24, 16, 2, 64),
        "kv_lens": int32(300, 3, 7),
        "qo_indptr": int32(3, 7, 7, 27),
        "block_table": rng.permutation(24)[np.arange(60).reshape(3, 20) % 24].astype(np.int32),
        "sinks": np.arange(4, dtype=np.float32),
        "window": (90, 0),
        "out": np.full((30, 4, 64), np.nan, BF16),
        "lse": np.full((30, 4), np.nan, np.float32),
    }
    return arguments | changes


def bits(results: Any) -> list[bytes]:
    return [np.ascontiguousarray(array).tobytes() for array in results]


def test_rows_of_no_request_are_left_alone() -> None:
    """Before the first request and after the last one; a request without keys has its sinks."""
    arguments = problem()
    expected = cumla.reference.attention(**{n: np.array(a) for n, a in arguments.items()})
    with emulated_gpu() as cupy:
        out, lse = call(cupy, arguments)
    for got, poison, wanted in zip((out, lse), ("out", "lse"), expected, strict=True):
        for rows in (slice(3), slice(27, None)):
            assert bits([got[rows]]) == bits([arguments[poison][rows]])
        found, exact = (np.asarray(a[3:27]).astype(np.float64) for a in (got, wanted))
        assert (np.abs(found - exact) <= 2e-2).all()
    without_keys = lse[7:20]  # 20 queries of a request of 7 keys
    assert (np.asarray(without_keys) == np.arange(4)).all()
    assert not np.asarray(out[7:20]).any()


@pytest.mark.parametrize(("window", "page_size"), [(None, 16), (None, 3), (1000, 16)])
def test_requests_that_several_parts_share(window: int | None, page_size: int) -> None:
    """Fewer blocks would not be cut. A sink counts once, whether the first part sees a key or not;
    the number of multiprocessors changes no more than the order of sums."""
    rng, pages = np.random.default_rng(1), -(-3000 // page_size)
    arguments = {
        "q": rng.standard_normal((2, 1, 4, 64)).astype(BF16),
        **{name: rng.standard_normal((pages, page_size, 1, 64)).astype(BF16) for name in "kv"},
        "kv_lens": int32(3000, 2800),
        "block_table": np.broadcast_to(np.arange(pages, dtype=np.int32), (2, pages)).copy(),
        "sinks": np.array([8, 7, 6, -np.inf], np.float32),
        "window": window,
    }
    expected = cumla.reference.attention(**arguments)
    for multiprocessors in (8, 13):
        with emulated_gpu(multiprocessors) as cupy:
            runs = [call(cupy, arguments) for _ in range(2)]
        assert bits(runs[0]) == bits(runs[1])
        out, lse = runs[0]
        np.testing.assert_allclose(lse, expected.lse, rtol=1e-5, atol=1e-5)
        exact = expected.out.astype(np.float32)
        np.testing.assert_allclose(out.astype(np.float32), exact, atol=4e-3)


def test_repeats_are_the_same_to_the_bit() -> None:
    with emulated_gpu() as cupy:
        runs = [bits(call(cupy, problem())) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_lens": int32(), "qo_indptr": int32(0), "block_table": np.zeros((0, 20), np.int32)},
        {"q": np.zeros((0, 4, 64), BF16), "out": np.zeros((0, 4, 64), BF16)}
        | {"lse": np.zeros((0, 4), np.float32)},
    ],
    ids=["requests", "tokens"],
)
def test_none(changes: dict[str, Any]) -> None:
    """No request, or no query token: outputs are as they were."""
    arguments = problem(**changes)
    with emulated_gpu() as cupy:
        results = call(cupy, arguments)
    assert bits(results) == bits([arguments["out"], arguments["lse"]])


def launches(arguments: dict[str, Any]) -> list[Launch]:
    """Return what a call launches."""
    found: list[Launch] = []

    def record(launch: Launch) -> None:
        found.append(launch)
        emulate(launch)

    with emulated_gpu() as cupy, mock.patch.object(tests.emulator, "emulate", record):
        call(cupy, arguments)
    return found


def named(launch: Launch) -> dict[str, Any]:
    """The parameters of a launch, those of tensor maps as zeros."""
    values = (bytes(128) if isinstance(v, TensorMap) else v for v in launch.values)
    return parameters(launch._replace(values=tuple(values)))


def test_parameters_go_where_the_kernel_reads_them() -> None:
    arguments = problem(softcap=2.0, softmax_scale=SCALE)
    schedule, attend = launches(arguments)
    given, found = named(schedule), named(attend)
    assert given["batch"] == found["batch"] == 3
    assert attend.grid == (1, given["parts"], 2)  # the kv heads of a part are neighbours elsewhere:
    assert launches(problem(window=None))[1].grid == (2, given["parts"], 1)
    wanted = {
        "max_tokens": 20 * 16,
        "page_entries": 3 * 20,
        "num_pages": 24,
        "page_size": 16,
        "box_rows": 16,
        "key_columns": 64,
        "value_columns": 64,
        "q_len": 30,
        "tokens_apart": 0,
        "heads_per_group": 2,
        "row_groups": 4,
        "causal": 1,
        "window_left": 90,
        "window_right": 0,
        "out_is_float": 0,
        "parts": given["parts"],
        "q_stride_batch": 0,
        "q_stride_token": 512,
        "q_stride_head": 128,
        "lse_stride_batch": 0,
        "lse_stride_head": 1,
        "lse_stride_token": 4,
        "keys.stride_row": 256,
        "keys.stride_head": 128,
        "block_table_stride": 20,
    }
    assert {name: found[name] for name in wanted} == wanted
    log2_e = 1 / np.log(2)
    factors = {
        "scale_log2": 2 * log2_e,  # softcap stands for softmax_scale
        "to_softcap": 2 * SCALE / 2 * log2_e,
    }
    assert {name: found[name] for name in factors} == pytest.approx(factors, rel=1e-6)
    assert found["empty_lse"] == -np.inf


# --- integers that mean nothing -------------------------------------------------------------------


def garbage(rng: Any, shape: Any, small: int) -> Any:
    """Small numbers, and any others between them."""
    limits = np.iinfo(np.int32)
    wild = rng.integers(limits.min, limits.max, shape, np.int32, endpoint=True)
    wild = np.where(rng.random(shape) < 0.5, rng.choice([limits.min, limits.max], shape), wild)
    return np.where(rng.random(shape) < 0.7, rng.integers(-1, small, shape), wild).astype(np.int32)


def hostile(rng: Any, kinds: str) -> Iterator[tuple[dict[str, Any], bool]]:
    """Calls in which integers hold anything; and whether their results follow from them. `kinds`
    of keys and values: "bfloat16", or "others"."""
    tokens, batch, num_pages, page_size = 30, 4, 7, 16

    def rows(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(BF16)

    for size in (page_size, 3):
        cache = {name: rows(num_pages, size, 2, 64) for name in "kv"}
        bounds = np.sort(rng.integers(0, tokens + 1, batch + 1)).astype(np.int32)
        table = {"block_table": garbage(rng, (batch, 9), num_pages + 1)}
        given = {"q": rows(tokens, 4, 64), **cache, "kv_lens": garbage(rng, batch, 9 * size)}
        counts = np.sort(rng.integers(0, 21, batch + 1)).astype(np.int32)
        ordered = {"kv_indices": garbage(rng, 20, num_pages + 1), "kv_indptr": counts}
        listed = ordered | {"kv_indptr": garbage(rng, batch + 1, 20)}
        if kinds == "bfloat16":
            yield {**given, **table, "qo_indptr": bounds}, True
            yield {**given, **table, "qo_indptr": bounds, "window": (40, 3), "causal": False}, True
            yield {**given, **table, "qo_indptr": garbage(rng, batch + 1, tokens)}, False
            yield {**given, **ordered, "qo_indptr": bounds}, True
            yield {**given, **listed, "qo_indptr": bounds}, False
            uniform = {"q": rows(batch, 3, 4, 64), "kv_lens": garbage(rng, batch, 9 * size)}
            yield {**given, **table, **uniform}, True
            continue
        small = {name: cache[name].astype(ml_dtypes.float8_e4m3fn) for name in "kv"}
        small["k_scale"] = rng.uniform(0.5, 1, (batch, 2)).astype(np.float32)
        yield {**given, **table, **small, "qo_indptr": bounds}, True
        yield {**given, **table, **small, "qo_indptr": garbage(rng, batch + 1, tokens)}, False
        del small["k_scale"]
        yield {**given, **listed, **small, "qo_indptr": bounds}, False
        wide = {name: array.astype(np.float32) for name, array in {**given, **cache}.items()}
        wide["kv_lens"] = given["kv_lens"]
        yield {**wide, **table, "qo_indptr": bounds}, True
        yield {**wide, **listed, "qo_indptr": garbage(rng, batch + 1, tokens)}, False
    if kinds != "bfloat16":
        return
    ragged = {"q": rows(tokens, 4, 64), "k": rows(90, 2, 64), "v": rows(90, 2, 64)}
    ordered = np.sort(rng.integers(0, 91, batch + 1)).astype(np.int32)
    yield {**ragged, "qo_indptr": bounds, "kv_indptr": ordered}, True
    lens = garbage(rng, batch, 90)
    yield {**ragged, "qo_indptr": bounds, "kv_indptr": ordered, "kv_lens": lens}, True
    near = rng.integers(-2000, 2000, batch + 1).astype(np.int32)
    yield {**ragged, "qo_indptr": bounds, "kv_indptr": near}, False


def run_hostile(kinds: str, sides: tuple[int, ...] = (0, 1)) -> None:
    """Run all of them; a touch of what is no array's ends the process. Of one side every second
    call has its arrays at the end of their memory, the others at its beginning."""
    for side in sides:
        for number, (given, follows) in enumerate(hostile(np.random.default_rng(7), kinds)):
            at_end = (number + side) % 2 == 1
            fenced = Fenced(at_end=at_end)
            host = {n: a.copy() if hasattr(a, "copy") else a for n, a in given.items()}
            there = {n: fenced.copy(a) if hasattr(a, "copy") else a for n, a in given.items()}
            there = {n: a.view(Array) if isinstance(a, np.ndarray) else a for n, a in there.items()}

            def empty(shape: Any, dtype: Any = np.float32, fenced: Fenced = fenced) -> Any:
                return fenced.empty(shape, dtype).view(Array)

            with emulated_gpu(), mock.patch.object(CuPy, "empty", staticmethod(empty)):
                got = cumla.attention(**there)
            for name, array in given.items():
                if isinstance(array, np.ndarray):
                    assert there[name].tobytes() == array.tobytes(), (number, name)
            outputs = [np.full(a.shape, np.nan, a.dtype) for a in got]
            wanted = cumla.reference.attention(**host, out=outputs[0], lse=outputs[1])
            if not follows:
                continue
            for found, exact in zip(got, wanted, strict=True):
                poison = np.isnan(exact.astype(np.float32))
                assert (np.isnan(np.asarray(found, np.float32)) == poison).all(), number
                x, y = (np.asarray(a, np.float64)[~poison] for a in (found, exact))
                assert (np.isneginf(x) == np.isneginf(y)).all(), number
                seen = np.isfinite(y)
                assert (np.abs(x[seen] - y[seen]) <= 2e-2).all(), number


@pytest.mark.parametrize(
    ("kinds", "sides"),
    [
        ("bfloat16", (0,)),
        pytest.param("bfloat16", (1,), marks=pytest.mark.exhaustive),
        pytest.param("others", (0, 1), marks=pytest.mark.exhaustive),
    ],
)
def test_integers_that_mean_nothing(kinds: str, sides: tuple[int, ...]) -> None:
    """In a process of its own, between pages that must not be touched."""
    call = f"tests.run_hostile({kinds!r}, {sides})"
    code = f"from tests.launch.mha import test_attention as tests; {call}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
