# SPDX-License-Identifier: Apache-2.0
"""attention of many queries: the samples by whole row tiles, whole prefills, chunks, repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu.mha.test_attention import BF16, agree, bits, poisoned, run_on_gpu
from tests.gpu.tools import kernels
from tests.gpu.tools.memory import Memory
from tests.gpu.tools.sanitize import multiprocessors
from tests.mha.attention_cases import (
    DRAFTS,
    MANY,
    RAGGED_COUNTS,
    RAGGED_DRAFTS,
    RISING,
    Sample,
    check,
    check_rising,
    make,
    rising,
    samples,
    splits_keys,
)

KERNELS = ("attention_prefill", "ragged_schedule")
cp: Any = pytest.importorskip("cupy")

Report = Callable[..., None]
SAMPLES = samples(80, **MANY)


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.attention)
    cp.cuda.Device().synchronize()


@pytest.mark.parametrize("s", SAMPLES, ids=lambda s: str(s.seed))
def test_grid(s: Sample, record_figures: Report) -> None:
    """By one thread block, which takes all tiles, and by seven."""
    expected = cumla.reference.attention(**make(s))
    for count in (1, 7):
        with multiprocessors(count):
            got = run_on_gpu(make(s))
        record_figures(check(s, got, expected))


@pytest.mark.parametrize("s", samples(60, **DRAFTS), ids=lambda s: str(s.seed))
def test_split_keys(s: Sample, record_figures: Report) -> None:
    """By so many thread blocks that none, some or all row tiles are cut."""
    expected = cumla.reference.attention(**make(s))
    for count in (1, 4, 7):
        with multiprocessors(count):
            got = run_on_gpu(make(s))
        record_figures(check(s, got, expected))


@pytest.mark.parametrize(
    "s",
    [s for fixed in RAGGED_DRAFTS for s in samples(6, **fixed)],
    ids=lambda s: f"{s.page_size}-{s.window}-{s.seed}",
)
def test_split_keys_of_ragged_queries_behind_windows(s: Sample, record_figures: Report) -> None:
    """Twice each, to the same bits."""
    given = make(s)
    expected, rows = cumla.reference.attention(**make(s)), slice(0, int(given["qo_indptr"][-1]))
    for count in RAGGED_COUNTS:
        with multiprocessors(count):
            memory = Memory(cp)
            assert splits_keys({name: memory.upload(value) for name, value in given.items()})
            got, again = run_on_gpu(given), run_on_gpu(given)
        record_figures(check(s, got, expected))
        for one, other in zip(got, again, strict=True):
            assert (bits(one)[rows] == bits(other)[rows]).all()


def whole(
    columns: tuple[int, int],
    heads: tuple[int, int],
    q_lens: list[int],
    kv_lens: list[int],
    page: int,
) -> dict[str, Any]:
    """Requests over shuffled pages; pages that no request has hold NaN."""
    rng = np.random.default_rng(sum(q_lens))
    counts = [-(-n // page) for n in kv_lens]
    total = sum(counts) + 2
    order = rng.permutation(total)
    table = np.full((len(counts), max(counts)), 2**31 - 1, np.int32)
    for request, count in enumerate(counts):
        begin = sum(counts[:request])
        table[request, :count] = order[begin : begin + count]
    caches = {}
    for name, width in zip("kv", columns, strict=True):
        caches[name] = rng.standard_normal((total, page, heads[1], width), np.float32).astype(BF16)
        caches[name][order[-2:]] = np.nan
    return {
        "q": rng.standard_normal((sum(q_lens), heads[0], columns[0]), np.float32).astype(BF16),
        **caches,
        "kv_lens": np.array(kv_lens, np.int32),
        "qo_indptr": np.cumsum([0, *q_lens]).astype(np.int32),
        "block_table": table,
    }


@pytest.mark.parametrize("name", RISING)
@pytest.mark.parametrize("columns", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)], ids=str)
def test_maxima_that_grow(name: str, columns: tuple[int, int], dtype: Any) -> None:
    arguments = rising(name, columns, dtype)
    with multiprocessors(2):
        check_rising(run_on_gpu(arguments), arguments)


PREFILLS = {
    "Llama": ((128, 128), (8, 2), [1500], [1500], 64),
    "DeepSeek": ((192, 128), (9, 9), [1100], [1100], 64),
    "Gemma": ((256, 256), (4, 2), [2000, 100], [2000, 1100], 16),
    "gpt-oss": ((64, 64), (16, 2), [700, 1, 513], [700, 3000, 2000], 16),
    "a chunk": ((128, 128), (16, 2), [600], [4000], 16),
    "chunks beside decoding": (
        *((128, 128), (8, 2), [1, 700, *[1] * 22, 600, 2]),
        *([300, 900, *range(100, 2300, 100), 600, 9000], 16),
    ),
    "a chunk beside decoding, 64 columns": (
        *((64, 64), (16, 2), [*[1] * 24, 400], [*range(10, 2410, 100), 2000], 64),
    ),
    "a chunk beside decoding, pages of three tokens": (
        *((192, 128), (8, 8), [3, 500, *[1] * 20], [7000, 500, *range(0, 2000, 100)], 3),
    ),
    "a chunk beside decoding, 256 columns": (
        *((256, 256), (4, 2), [*[1] * 10, 1000], [*range(64, 2000, 200), 1000], 64),
    ),
    "pages of one token": ((128, 128), (8, 2), [700, 400], [700, 900], 1),
}


@pytest.mark.parametrize("name", PREFILLS)
@pytest.mark.parametrize("window", [None, 300])
def test_prefill(name: str, window: int | None) -> None:
    """As many tiles as keep all multiprocessors busy; twenty times the same bits."""
    arguments = whole(*PREFILLS[name]) | {"window": window}
    there = {n: Memory(cp).upload(a) for n, a in arguments.items()}
    with multiprocessors(30):
        runs = [cumla.attention(**there, **poisoned(arguments)) for _ in range(20)]
    agree(runs[0], cumla.reference.attention(**arguments), arguments["qo_indptr"])
    for run in runs[1:]:
        for one, other in zip(run, runs[0], strict=True):
            assert bool((bits(one) == bits(other)).all())


def test_all_multiprocessors_beside_other_work() -> None:
    """Thread blocks begin late, and in any order: tiles are taken by who is there."""
    arguments = whole((64, 64), (64, 8), [1024, 1024], [1024, 1024], 64)
    there = {n: Memory(cp).upload(a) for n, a in arguments.items()}
    first = cumla.attention(**there, **poisoned(arguments))
    agree(first, cumla.reference.attention(**arguments), arguments["qo_indptr"])
    for seed in range(5):
        kernels.noise(seed)
        again = cumla.attention(**there, **poisoned(arguments))
        for one, other in zip(again, first, strict=True):
            assert bool((bits(one) == bits(other)).all())
