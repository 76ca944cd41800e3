# SPDX-License-Identifier: Apache-2.0
"""attention of few queries: the samples by small row tiles, decoding of models, graphs, repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.gpu.mha.test_attention import BF16, agree, bits, check_garbage, poisoned, run_on_gpu
from tests.gpu.mha.test_attention_prefill import whole
from tests.gpu.tools import kernels, variants
from tests.gpu.tools.memory import Memory
from tests.gpu.tools.sanitize import multiprocessors
from tests.mha.attention_cases import Sample, check, make, samples

KERNELS = ("attention_decode", "ragged_schedule")
cp: Any = pytest.importorskip("cupy")

Report = Callable[..., None]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
UNIFORM: dict[str, Any] = {"queries": "uniform", "window": None, "cache": "same"}
SAMPLES = (
    *samples(80, cache="e4m3", queries="uniform", heads=(8, 2), columns=(128, 128)),
    *samples(40, cache="e4m3", queries="one", heads=(4, 1), columns=(192, 128)),
    *samples(40, cache="e4m3", queries="uniform", heads=(16, 2), columns=(128, 128)),
    *samples(40, cache="e4m3", queries="uniform", heads=(5, 5), columns=(256, 256)),
    *samples(40, cache="e4m3", queries="few", heads=(4, 2), columns=(64, 64)),
    *samples(30, **UNIFORM, heads=(8, 1), columns=(64, 64)),
    *samples(30, **UNIFORM, heads=(8, 2), columns=(64, 64)),
    *samples(20, **UNIFORM, heads=(8, 2), columns=(128, 128), page_size=1),
    *samples(20, **UNIFORM, heads=(5, 5), columns=(128, 128), page_size=16),
)


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.attention)
    cp.cuda.Device().synchronize()


@pytest.mark.parametrize("s", SAMPLES, ids=lambda s: f"{s.columns[0]}-{s.heads[0]}-{s.seed}")
def test_grid(s: Sample, record_figures: Report) -> None:
    """By all multiprocessors, and by so few that their parts have several requests."""
    expected = cumla.reference.attention(**make(s))
    record_figures(check(s, run_on_gpu(make(s)), expected))
    with multiprocessors(4):
        record_figures(check(s, run_on_gpu(make(s)), expected))


LENS = [1, 8000, 17, 300, 64, 0, 2049, 700, 33, 5, 1000, 128]
MODELS = {
    "Llama, e4m3": ((128, 128), (32, 8), 64, True),
    "Llama, e4m3, pages of 16": ((128, 128), (32, 8), 16, True),
    "Llama, pages of one token": ((128, 128), (32, 8), 1, False),
    "Llama, pages of 16": ((128, 128), (32, 8), 16, False),
    "gpt-oss": ((64, 64), (64, 8), 64, False),
    "gpt-oss, e4m3": ((64, 64), (64, 8), 8, True),
    "DeepSeek, e4m3": ((192, 128), (16, 16), 64, True),
    "Gemma, e4m3": ((256, 256), (16, 8), 128, True),
    "Qwen, 16 heads a group, e4m3": ((128, 128), (32, 2), 48, True),
}


def decoding(name: str) -> dict[str, Any]:
    columns, heads, page, is_e4m3 = MODELS[name]
    arguments = whole(columns, heads, [1] * len(LENS), LENS, page)
    if is_e4m3:
        factors = np.arange(1, 1 + len(LENS) * heads[1], dtype=np.float32).reshape(len(LENS), -1)
        arguments |= {n: arguments[n].astype(E4M3) for n in "kv"}
        arguments |= {"k_scale": 0.25 + factors % 5 / 8, "v_scale": 1 + factors % 7}
    return arguments


@pytest.mark.parametrize("name", MODELS)
def test_decoding(name: str) -> None:
    """Requests from nothing to thousands of tokens; twenty times the same bits, beside others."""
    arguments = decoding(name)
    there = {n: Memory(cp).upload(a) for n, a in arguments.items()}
    plan = cumla.AttentionPlan.from_arrays(*(there[n] for n in "qkv"), qo_indptr=there["qo_indptr"])
    assert plan.key.choice.takes_few_rows
    first = cumla.attention(**there, **poisoned(arguments))
    agree(first, cumla.reference.attention(**arguments), arguments["qo_indptr"])
    for seed in range(20):
        if seed % 5 == 0:
            kernels.noise(seed)
        again = cumla.attention(**there, **poisoned(arguments))
        for one, other in zip(again, first, strict=True):
            assert bool((bits(one) == bits(other)).all())


@pytest.mark.parametrize("name", MODELS)
def test_random_delays_at_every_barrier(name: str) -> None:
    """Delays shift who waits for whom, over many tiles of a thread block; all bits stay."""
    arguments = decoding(name)
    there = {n: Memory(cp).upload(a) for n, a in arguments.items()}
    with multiprocessors(4):
        expected = cumla.attention(**there, **poisoned(arguments))
        with variants.installed(*variants.DECODE_DELAYS):
            for _ in range(20):
                delayed = cumla.attention(**there, **poisoned(arguments))
                for one, other in zip(delayed, expected, strict=True):
                    assert bool((bits(one) == bits(other)).all())


@pytest.mark.parametrize("name", ["Llama, e4m3", "gpt-oss", "Llama, pages of one token"])
def test_a_graph_serves_other_lengths(name: str) -> None:
    arguments = decoding(name)
    there = {n: Memory(cp).upload(a) for n, a in arguments.items()}
    lengths = {n: there.pop(n) for n in ("kv_lens", "qo_indptr")}
    plan = cumla.AttentionPlan.from_arrays(
        *(there[n] for n in "qkv"), qo_indptr=lengths["qo_indptr"]
    )
    plan.prepare()
    outputs = poisoned(arguments)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan.update(**lengths)
        plan.run(**there, **outputs)
        graph = stream.end_capture()
    rng = np.random.default_rng(0)
    for _ in range(4):
        later = np.array([int(rng.integers(0, n + 1)) for n in LENS], np.int32)
        lengths["kv_lens"].set(later)
        cp.cuda.Device().synchronize()
        graph.launch(stream=stream)
        stream.synchronize()
        expected = cumla.reference.attention(**arguments | {"kv_lens": later})
        agree((outputs["out"], outputs["lse"]), expected, arguments["qo_indptr"])


@pytest.mark.parametrize("power", [-60, -20, 40])
def test_queries_of_any_size(power: int) -> None:
    """Beside e4m3 keys bfloat16 rows are brought into the range of float16, each by its own."""
    arguments = decoding("Llama, e4m3")
    rows = np.exp2(power + np.arange(len(LENS)) % 3)[:, None, None]
    arguments["q"] = (arguments["q"].astype(np.float64) * rows).astype(BF16)
    arguments["softmax_scale"] = min(max(0.05 * 2.0**-power, 1e-20), 1e6)
    there = {n: Memory(cp).upload(a) for n, a in arguments.items()}
    got = cumla.attention(**there, **poisoned(arguments))
    agree(got, cumla.reference.attention(**arguments), arguments["qo_indptr"])


@pytest.mark.parametrize("page_size", [3, 16, 64])
@pytest.mark.parametrize("seed", range(8))
def test_garbage_everywhere(seed: int, page_size: int) -> None:
    check_garbage(seed, page_size, 14, E4M3)  # two query tokens of a request on average
