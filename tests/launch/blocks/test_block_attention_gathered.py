# SPDX-License-Identifier: Apache-2.0
"""block_attention_gathered, emulated: lists of many small blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.blocks import attention
from cumla.launch.blocks.choice import gathered_cluster, gathered_ctas
from tests.blocks.block_cases import Sample, check, make, samples
from tests.emulator import emulated_gpu
from tests.launch.blocks.test_block_attention import key
from tests.selection import some

COLUMNS = (64, 64), (128, 128), (192, 128), (192, 192), (256, 256)
BLOCKS = (4, 16), (8, 4), (16, 2)
GATHERED = [
    replace(sample, columns=COLUMNS[i % 5], block=BLOCKS[i % 3], topk=(33, 130, 512)[i % 3])
    for i, sample in enumerate(samples(400, queries=1))
    if sample.heads[0] // sample.heads[1] <= 16
]


def run(sample: Sample, sms: int = 7, **given: Any) -> bytes:
    """Check the call of a sample; the bits of its result."""
    problem = make(sample)
    attention._key.cache_clear()
    with emulated_gpu(sms) as cupy:
        there = {name: cupy.like(value) for name, value in (problem.given | given).items()}
        got = cumla.block_sparse_attention(**there)
    check(problem, cumla.AttentionState(*map(np.array, got)), sample.dtype)
    return np.array(got.out).tobytes() + np.array(got.lse).tobytes()


@pytest.mark.parametrize("sample", some(GATHERED, 10), ids=str)
def test_lists(sample: Sample) -> None:
    run(sample)


@pytest.mark.parametrize("cache", ["same", "e4m3"])
def test_lists_are_sets(cache: str) -> None:
    """Order and repetition change no bit, nor does the number of lists of an invariant call."""
    fixed: dict[str, Any] = {"counts": None, "are": "blocks", "outputs": "new", "cache": cache}
    fixed |= {"columns": (256, 256), "heads": (12, 1), "queries": 1, "lens": (900,)}
    (sample,) = samples(1, block=(4, 16), topk=60, lists="hostile", invariant=True, **fixed)
    first = make(sample).given["block_indices"]
    moved = np.random.default_rng(0).permuted(first, axis=-1)
    assert run(sample) == run(sample, block_indices=moved) == run(sample, sms=132)


def test_which_lists() -> None:
    """Small blocks of up to 512 entries, 16 heads and 256 columns."""
    small: dict[str, Any] = {"topk": 512, "block_size": 4}
    assert key(1, **small).gathered_columns == 128
    assert key(1, **small, columns=(192, 128)).gathered_columns == 192
    assert key(1, **small, columns=(256, 256)).gathered_columns == 256
    for more in ({"topk": 513}, {"block_size": 64}, {"columns": (512, 512)}):
        assert key(1, **(small | more)).gathered_columns == 0


def test_how_many_thread_blocks() -> None:
    """As many as multiprocessors at most; 256 columns have one alone if few share a list."""
    lists = 1, 4, 5, 8, 9, 16, 32, 64, 128, 132, 133
    clusters = [gathered_cluster(n, 4096, 132) for n in lists]
    assert clusters == [16, 16, 8, 8, 8, 8, 4, 2, 1, 1, 1]
    assert gathered_cluster(1, 100, 132) == 1
    assert [gathered_ctas(256, n, c, 132) for n, c in zip(lists, clusters, strict=True)] == [
        *(1, 1, 1, 1),
        *(2, 2, 2),
        *(1, 1, 1, 2),
    ]
    assert gathered_ctas(192, 128, 1, 132) == 2
