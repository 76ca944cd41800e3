# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's selection of the largest scores at the shapes of its own tests, against torch.topk;
and by the kernel, which the CPU runs."""

from __future__ import annotations

from typing import Any

import pytest

from cumla.compat import flashinfer
from tests.compat.torch_gpu import torch_gpu

torch = pytest.importorskip("torch")

NONE = "<TopKTieBreak.NONE: 0>"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def numbers(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "width", "k"), [(1, 111, 10), (16, 4000, 256), (4, 32000, 1024)])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_top_k(batch: int, width: int, k: int, dtype: Any, is_sorted: bool) -> None:
    scores = numbers(batch, width, dtype=dtype)
    values, indices = flashinfer.top_k(scores, k, is_sorted)
    want = torch.topk(scores, k).values
    assert indices.dtype == torch.int64
    assert torch.equal(scores.gather(1, indices), values)
    assert torch.equal(values if is_sorted else values.sort(descending=True).values, want)
    if not is_sorted:
        assert bool((indices.diff() > 0).all())


def test_more_sorted_values_than_the_kernel_sorts() -> None:
    scores = torch.round(numbers(2, 10000) * 100)
    values, indices = flashinfer.top_k(scores, 9000, True)
    assert torch.equal(values, torch.topk(scores, 9000).values)
    assert bool((indices.diff()[values.diff() == 0] > 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 64])
def test_page_tables(page_size: int, dtype: Any) -> None:
    """Rows that share requests, and windows that begin anywhere."""
    rows, width, k = 6, 3000, 256
    scores = numbers(rows, width, dtype=dtype)
    table = torch.randperm(4 * 60 * 64).int().view(4, -1)[:, : 8000 // page_size].contiguous()
    lengths, batch = int32(2000, 100, 256, 257, 0, 1500), int32(0, 1, 2, 3, 0, 1)
    starts, entries = int32(0, 5, 17, 100, 3000, 1499), int32(0, 1, 2, 3, 4, 5)
    raw, out = (torch.full((rows, k), -7, dtype=torch.int32) for _ in range(2))
    found = flashinfer.top_k_page_table_transform(
        *(scores, table, lengths, k, batch),
        row_starts=starts,
        page_table_row_starts=entries,
        page_size=page_size,
        out=out,
        out_raw_indices=raw,
    )
    assert found is out
    for row in range(rows):
        length = int(lengths[row])
        count, first = min(length, k), int(starts[row])
        window = scores[row, first : first + length]
        chosen = raw[row, :count].long()
        assert torch.equal(
            window[chosen].sort(descending=True).values, torch.topk(window, count).values
        )
        page = table[batch[row], entries[row] + chosen // page_size]
        assert torch.equal(out[row, :count], page * page_size + chosen % page_size)
        assert bool((out[row, count:] == -1).all() and (raw[row, count:] == -1).all())


def test_the_table_begins_where_the_scores_do() -> None:
    scores, table = numbers(2, 50), torch.arange(100, dtype=torch.int32).view(2, 50) * 3
    given = (scores, table, int32(10, 20), 4)
    found = flashinfer.top_k_page_table_transform(*given, row_starts=int32(7, 30))
    best = torch.topk(scores[1, 30:50], 4).indices.sort().values + 30
    assert torch.equal(found[1], table[1, best])
    with pytest.raises(ValueError, match="page_table_row_starts: needed with row_starts and a pa"):
        flashinfer.top_k_page_table_transform(*given, row_starts=int32(7, 30), page_size=2)


def test_offsets() -> None:
    scores = numbers(3, 1000)
    offsets, lengths = int32(0, 5000, 70), int32(1000, 900, 3)
    found = flashinfer.top_k_ragged_transform(
        scores, offsets, lengths, 8, row_starts=int32(0, 9, 5)
    )
    best = torch.topk(scores[1, 9:909], 8).indices.sort().values
    assert torch.equal(found[1], (best + 5000).int())
    assert found[2].tolist() == [70, 71, 72, *[-1] * 5]


def test_what_is_refused() -> None:
    scores = numbers(2, 9)
    for call, error, message in (
        (lambda: flashinfer.top_k([1], 1), TypeError, "input: needs a PyTorch tensor"),
        (
            lambda: flashinfer.top_k(scores, 10),
            RuntimeError,
            "k: needs at most the 9 columns.*; pass min",
        ),
        (lambda: flashinfer.top_k(scores.int(), 1), RuntimeError, "input: needs float32 or"),
        (
            lambda: flashinfer.top_k(scores, 1, tie_break=flashinfer.TopKTieBreak.LARGE),
            NotImplementedError,
            "tie_break: needs NONE or SMALL",
        ),
        (
            lambda: flashinfer.top_k_page_table_transform(scores, torch.ones(2, 9), int32(1, 2), 1),
            RuntimeError,
            "src_page_table: needs int32",
        ),
        (
            lambda: flashinfer.top_k_ragged_transform(scores, int32(1), int32(1, 2), 1),
            RuntimeError,
            r"offsets: needs shape \(rows,\) with rows 2",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_gives_the_same(dtype: Any) -> None:
    """Also into a graph, with other lengths then."""
    scores, table = numbers(3, 5000, dtype=dtype), torch.randperm(15000).int().view(3, 5000)
    lengths, out = int32(5000, 3, 2000), torch.empty(3, 64, dtype=torch.int32)
    given = (scores, table, lengths, 64)
    values, indices = flashinfer.top_k(scores, 64, True)
    with torch_gpu() as gpu:
        assert torch.equal(flashinfer.top_k(scores, 64, True)[1], indices)
        assert torch.equal(flashinfer.top_k(scores, 64, True)[0], values)
        with gpu.capture():
            flashinfer.top_k_page_table_transform(*given, out=out)
        lengths.copy_(int32(4000, 64, 0))
        gpu.replay()
    assert torch.equal(out, flashinfer.top_k_page_table_transform(*given))
