# SPDX-License-Identifier: Apache-2.0
"""Attention with a bias against float64: the elements of tables that no query uses are NaN."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.gpu.tools.memory import Memory
from tests.mha.bias_cases import check, hiding, make, poisoned, samples

KERNELS = (
    "attention",
    "attention_decode",
    "attention_prefill",
    "attention_simt",
    "ragged_schedule",
)
cp: Any = pytest.importorskip("cupy")

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.attention)
    cp.cuda.Device().synchronize()


def on_host(array: Any) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}").get().view(array.dtype)


@pytest.mark.parametrize("sample", samples(216), ids=lambda s: f"{s[0]}-{s[1].seed}")
def test_grid(sample: Any) -> None:
    biased, memory = poisoned(make(*sample)), Memory(cp)
    given = {name: memory.upload(value) for name, value in biased.problem.given.items()}
    got = cumla.attention(**given, **biased.options, bias=biased.bias(memory.upload))
    out, lse = (on_host(array) for array in got)
    check(biased, cumla.AttentionState(out, lse), sample[1].dtype)


# --- long requests --------------------------------------------------------------------------------

# Requests, query tokens and keys of each, heads, kv heads, columns, dtype of keys, window
LONG = (
    (3, 1, 9000, 8, 2, 128, BF16, None),
    (3, 4, 5000, 8, 8, 64, np.dtype(np.float16), None),
    (2, 1, 6000, 16, 1, 128, E4M3, None),
    (3, 1, 7000, 8, 2, 64, E4M3, None),
    (2, 4, 5000, 8, 2, 256, E4M3, 900),
    (70, 1, 900, 4, 2, 64, BF16, None),
    (2, 5, 4000, 8, 2, 256, BF16, 1023),
    (2, 300, 2000, 8, 2, 128, BF16, None),
    (1, 1500, 1500, 12, 12, 64, BF16, None),
    (1, 700, 1800, 16, 2, 256, np.dtype(np.float16), None),
    (1, 1300, 1300, 8, 2, 128, BF16, 200),
    (1, 300, 900, 64, 8, 128, BF16, None),
    (2, 300, 700, 32, 8, 128, np.dtype(np.float16), 200),
    (1, 40, 700, 2, 1, 64, np.dtype(np.float32), None),
)


def arrays_of(kind: str, rng: Any, tokens: int, heads: int, batch: int) -> dict[str, np.ndarray]:
    if kind == "slopes":
        return {"slopes": rng.normal(0.05, 0.1, (batch, heads)).astype(np.float32)}
    if kind == "rows":
        return {"table": rng.standard_normal((tokens, heads, 1024)).astype(BF16)}
    table = rng.standard_normal((heads, 257)).astype(np.float32)
    return {"table": table, "first": np.int32([-100])}


@pytest.mark.parametrize("kind", ["slopes", "rows", "heads"])
@pytest.mark.parametrize("shape", LONG, ids=str)
def test_long_requests(shape: Any, kind: str) -> None:
    batch, q_len, longest, heads, kv_heads, columns, dtype, window = shape
    rng, memory = np.random.default_rng(longest + q_len), Memory(cp)
    per = -(-longest // 64)
    lens = rng.integers(longest // 2, longest, batch, endpoint=True).astype(np.int32)
    table = rng.permutation(batch * per).reshape(batch, per).astype(np.int32)
    of_q = BF16 if dtype == E4M3 else dtype
    q = rng.standard_normal((batch, q_len, heads, columns), np.float32).astype(of_q)
    pools = [np.full((batch * per, 64, kv_heads, columns), np.nan, dtype) for _ in "kv"]
    for r in range(batch):
        token = np.arange(lens[r])
        token = token[token >= lens[r] - q_len - (longest if window is None else window)]
        for pool in pools:
            rows = rng.standard_normal((len(token), kv_heads, columns), np.float32)
            pool[table[r][token // 64], token % 64] = rows.clip(-3, 3).astype(dtype)
    arrays = arrays_of(kind, rng, batch * q_len, heads, batch)
    given = {"q": q, "k": pools[0], "v": pools[1], "kv_lens": lens, "block_table": table}
    options = {"window": window}
    expected = cumla.attention(**given, **options, bias=cumla.AttentionBias(**arrays))
    there = {name: memory.upload(value) for name, value in given.items()}
    bias = cumla.AttentionBias(**{name: memory.upload(array) for name, array in arrays.items()})
    runs = [cumla.attention(**there, **options, bias=bias) for _ in range(4)]
    out, lse = (on_host(array) for array in runs[0])
    for other in runs[1:]:
        assert on_host(other.out).tobytes() == out.tobytes()
        assert on_host(other.lse).tobytes() == lse.tobytes()
    close = {"float32": 1e-5, "float16": 4e-3}.get(str(dtype), 1.6e-2)
    wanted = expected.out.astype(np.float64)
    np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=close, atol=close)
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("q_len", [2, 150])
@pytest.mark.parametrize("least", [-2.4e38, np.finfo(np.float32).min, -np.inf])
def test_the_least_numbers_hide_keys(dtype: Any, q_len: int, least: float) -> None:
    """Of decoding and of prefill; a query whose keys are all hidden sees none."""
    given, table = hiding(dtype, least)
    given["q"] = np.resize(given["q"], (2, q_len, *given["q"].shape[2:]))
    want = cumla.attention(**given, bias=cumla.AttentionBias(table=table))
    there = {name: Memory(cp).upload(value) for name, value in given.items()}
    got = cumla.attention(**there, bias=cumla.AttentionBias(table=cp.asarray(table)))
    out, lse = (on_host(array) for array in got)
    assert not out[:, :, 1].astype(np.float32).any()
    assert np.isneginf(lse[:, :, 1]).all()
    wanted = want.out.astype(np.float64)
    np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=1.6e-2, atol=1.6e-2)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_results_in_float32_are_those_before_rounding(kind: str, columns: int, dtype: Any) -> None:
    """Of prompts, which kernels of their own write in float32."""
    rng = np.random.default_rng(columns)

    def numbers(*shape: int) -> Any:
        return cp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)

    q, k, v = numbers(1, 1500, 12, columns), *(numbers(1, 1500, 12, columns) for _ in "kv")
    bias = cumla.AttentionBias(table=numbers(1500, 12, 96))
    if kind == "slopes":
        bias = cumla.AttentionBias(slopes=cp.asarray(rng.random(12, np.float32)))
    given: dict[str, Any] = {"bias": bias, "kv_lens": cp.asarray(np.int32([1500]))}
    pages = {"block_table": cp.arange(24, dtype=cp.int32).reshape(1, 24)}
    padded = (cp.pad(x[0], ((0, 36), (0, 0), (0, 0))).reshape(24, 64, 12, columns) for x in (k, v))
    arrays = (q, *padded)
    rounded = cumla.attention(*arrays, **given, **pages)
    out = cp.full(q.shape, cp.nan, cp.float32)
    exact = cumla.attention(*arrays, **given, **pages, out=out)
    assert on_host(out).astype(dtype).tobytes() == on_host(rounded.out).tobytes()
    assert on_host(exact.lse).tobytes() == on_host(rounded.lse).tobytes()


def test_graphs_see_other_arrays() -> None:
    """A captured run reads the arrays of a bias as they are at each replay."""
    rng = np.random.default_rng(0)

    def numbers(*shape: int) -> Any:
        return cp.asarray(rng.standard_normal(shape).astype(np.float16))

    q, k, v = numbers(3, 4, 8, 128), numbers(60, 64, 2, 128), numbers(60, 64, 2, 128)
    lens = cp.asarray(np.int32([1200, 77, 900]))
    table = cp.asarray(rng.permutation(60).reshape(3, 20).astype(np.int32))
    for kind, form in (("slopes", "linear"), ("rows", "table"), ("heads", "table")):
        arrays = {n: cp.asarray(a) for n, a in arrays_of("heads", rng, 12, 8, 3).items()}
        if kind == "slopes":
            arrays = {"slopes": cp.zeros((3, 8), cp.float32)}
        elif kind == "rows":
            arrays = {"table": numbers(12, 8, 50)}
        bias = cumla.AttentionBias(**arrays)
        plan = cumla.AttentionPlan.from_arrays(q, k, v, bias_form=form)
        plan.update(lens)
        out, lse = plan.run(q, k, v, block_table=table, bias=bias)
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            plan.update(lens, stream=stream.ptr)
            options = {"out": out, "lse": lse, "stream": stream.ptr}
            got = plan.run(q, k, v, block_table=table, bias=bias, **options)
            graph = stream.end_capture()
        for factor in (0.0, 0.3, -0.1):
            for name in ("slopes", "table"):
                if name in arrays:
                    arrays[name][...] = factor * cp.arange(arrays[name].shape[-1])
            cp.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            eager = cumla.attention(q, k, v, kv_lens=lens, block_table=table, bias=bias)
            assert on_host(got.out).tobytes() == on_host(eager.out).tobytes()
            assert on_host(got.lse).tobytes() == on_host(eager.lse).tobytes()
