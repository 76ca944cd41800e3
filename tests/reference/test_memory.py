# SPDX-License-Identifier: Apache-2.0
"""Memory and time in proportion to the tokens that are read or written, not to a page."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cumla
from cumla import reference

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
PAGE_SIZE = 2**22
TOKENS = 500
MOST_BYTES = 40 * 2**20  # a page is 0.5 GB to 4.8 GB
SLOTS = np.arange(TOKENS)
TABLE = np.array([[1]], np.int32)
KV_LENS = np.array([TOKENS], np.int32)
FORMS: dict[str, tuple[tuple[int, Any], ...]] = {
    "bfloat16": ((576, BF16),),
    "e4m3": ((576, E4M3),),
    "packed": ((656, np.uint8),),
    "scales": ((512, E4M3), (64, BF16), (4, np.float32)),
}

BOTH = pytest.mark.parametrize("module", [reference, cumla], ids=["reference", "operation"])


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Hold what NumPy allocates to a limit."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.fixture
def caches(tmp_path: Path) -> Callable[..., list[Any]]:
    """Two pages of zeros of so many columns and dtypes: huge ones, in a sparse file, and small."""

    def make(*parts: tuple[int, Any]) -> list[Any]:
        huge = [
            np.memmap(tmp_path / f"{i}", dtype, "w+", shape=(2, PAGE_SIZE, columns))
            for i, (columns, dtype) in enumerate(parts)
        ]
        small = [np.zeros((2, TOKENS, columns), dtype) for columns, dtype in parts]
        if len(parts) == 1:
            return [np.asarray(huge[0]), small[0]]
        return [tuple(map(np.asarray, huge)), tuple(small)]

    return make


def normal(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(BF16)


@BOTH
@pytest.mark.parametrize("form", FORMS)
def test_mla(module: Any, form: str, caches: Callable[..., list[Any]]) -> None:
    """Both pages hold the same tokens: appended to, and attended to, in either form of a call."""
    rows, q = normal(TOKENS, 576), normal(1, 2, 4, 576)
    results = []
    for cache, page_size in zip(caches(*FORMS[form]), (PAGE_SIZE, TOKENS), strict=True):
        module.append_mla_cache(rows, cache, page_size + SLOTS)
        decoded = module.mla_decode(q, cache, TABLE, KV_LENS)
        ragged = module.mla_attention(
            q[0],
            cache,
            block_table=TABLE,
            kv_lens=KV_LENS,
            qo_indptr=np.array([0, 2], np.int32),
        )
        np.testing.assert_array_equal(ragged.out, decoded.out[0])
        lists = np.tile((page_size + SLOTS).astype(np.int32), (1, 2, 1))
        lengths = np.array([[TOKENS - 1, TOKENS]], np.int32)
        listed = module.mla_sparse_decode(q, cache, lists, topk_lens=lengths)
        np.testing.assert_array_equal(listed.out, decoded.out)
        results.append(decoded)
    np.testing.assert_array_equal(results[0].out, results[1].out)
    np.testing.assert_array_equal(results[0].lse, results[1].lse)
    assert np.abs(results[0].lse - np.log(TOKENS)).max() > 1e-3  # the rows are no zeros


@pytest.mark.parametrize("form", ["fused", "pair"])
def test_indexer(form: str, caches: Callable[..., list[Any]]) -> None:
    k, q = normal(TOKENS, 32), normal(1, 2, 8, 32).astype(E4M3)
    weights = np.ones((2, 8), np.float32)
    logits = []
    parts = ((36, np.uint8),) if form == "fused" else ((32, E4M3), (1, np.float32))
    for cache, page_size in zip(caches(*parts), (PAGE_SIZE, TOKENS), strict=True):
        pages = cache if form == "fused" else (cache[0], cache[1][..., 0])
        reference.append_indexer_cache(k, pages, page_size + SLOTS)
        options = {"block_table": TABLE, "kv_lens": KV_LENS, "max_kv_len": TOKENS}
        logits.append(reference.paged_mqa_logits(q, pages, weights, **options))
    np.testing.assert_array_equal(*logits)
    assert logits[0][:, : TOKENS - 1].any(axis=1).all()


def test_tokens_that_nobody_sees() -> None:
    """Keys and scales of more tokens than an int32 counts, of which a few are scored."""
    count = 2**31 + 100
    keys = np.broadcast_to(normal(32).astype(E4M3), (count, 32))
    scale = np.broadcast_to(np.ones((), np.float32), (count,))
    ks, ke = np.array([count - 3, -1, 5]), np.array([count + 5, 2, 5])
    q, weights = normal(3, 8, 32).astype(E4M3), np.ones((3, 8), np.float32)
    logits = reference.mqa_logits(q, (keys, scale), weights, ks, ke, max_kv_len=4)
    assert np.isfinite(logits).sum(axis=1).tolist() == [3, 2, 0]
