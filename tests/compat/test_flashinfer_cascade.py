# SPDX-License-Identifier: Apache-2.0
"""MultiLevelCascadeAttentionWrapper: levels of prefixes give what whole requests give."""

from __future__ import annotations

from typing import Any

import pytest

import cumla

torch = pytest.importorskip("torch")

import cumla.compat.flashinfer as flashinfer  # noqa: E402

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
# Pages of all, of the first three requests and of the last two, then of each request.
ALL, GROUPS, OWN = [20], [[0, 1, 2, 3, 4], [5, 6, 7]], [[10], [11, 12], [13], [14, 15], [16]]
LAST = [5, 3, 16, 1, 9]  # tokens in the last page


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def offsets(lists: list[list[int]]) -> Any:
    return int32(0, *torch.tensor([len(one) for one in lists]).cumsum(0).tolist())


def level(qo_indptr: Any, lists: list[list[int]], last: list[int]) -> tuple[Any, ...]:
    return qo_indptr, offsets(lists), int32(*[page for one in lists for page in one]), int32(*last)


def levels(counts: list[int]) -> list[tuple[Any, ...]]:
    """Three levels of requests with so many query tokens."""
    of_requests = int32(0, *torch.tensor(counts).cumsum(0).tolist())
    total, middle = sum(counts), sum(counts[:3])
    return [
        level(int32(0, total), [ALL], [PAGE]),
        level(int32(0, middle, total), GROUPS, [PAGE, PAGE]),
        level(of_requests, OWN, LAST),
    ]


def planned(layers: list[tuple[Any, ...]], **more: Any) -> Any:
    workspace = torch.empty(16, dtype=torch.uint8)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(layers), workspace, "NHD")
    arrays = [list(column) for column in zip(*layers, strict=True)]
    options = {"causal": True, "q_data_type": torch.float16, **more}
    wrapper.plan(*arrays, HEADS, KV_HEADS, DIM, PAGE, **options)
    return wrapper


@pytest.mark.parametrize("counts", [[1, 1, 1, 1, 1], [2, 1, 3, 1, 4]])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_as_whole_requests(counts: list[int], cap: float | None) -> None:
    torch.manual_seed(0)
    cache = torch.randn(21, 2, PAGE, KV_HEADS, DIM, dtype=torch.float16)
    q = torch.randn(sum(counts), HEADS, DIM, dtype=torch.float16)
    layers = levels(counts)
    got = planned(layers, logits_soft_cap=cap).run(q, cache)
    rows = [ALL + GROUPS[r > 2] + OWN[r] for r in range(5)]
    lens = [(len(row) - 1) * PAGE + last for row, last in zip(rows, LAST, strict=True)]
    table = torch.zeros(5, 8, dtype=torch.int32)
    for r, row in enumerate(rows):
        table[r, : len(row)] = int32(*row)
    options: dict[str, Any] = {"kv_lens": int32(*lens), "qo_indptr": layers[-1][0]}
    expected = cumla.attention(
        q, cache[:, 0], cache[:, 1], **options, block_table=table, softcap=cap
    )
    torch.testing.assert_close(got, expected.out, atol=3e-3, rtol=3e-3)


def test_one_level_is_a_prefill() -> None:
    torch.manual_seed(0)
    cache = torch.randn(21, 2, PAGE, KV_HEADS, DIM, dtype=torch.float16)
    q = torch.randn(5, HEADS, DIM, dtype=torch.float16)
    (last,) = levels([1] * 5)[2:]
    got = planned([last]).run(q, cache)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8))
    wrapper.plan(*last, HEADS, KV_HEADS, DIM, PAGE, causal=True, q_data_type=torch.float16)
    assert torch.equal(got, wrapper.run(q, cache))


def test_refusals() -> None:
    layers = levels([1] * 5)
    with pytest.raises(ValueError, match="window_left: needs -1 for levels"):
        planned(layers, window_left=7)
    with pytest.raises(ValueError, match="pos_encoding_mode: needs 'NONE' for levels"):
        planned(layers, pos_encoding_mode="ROPE_LLAMA")
    wrapper = planned(layers)
    arrays = [list(column) for column in zip(*layers, strict=True)]
    with pytest.raises(ValueError, match="paged_kv_indptr_arr: needs a list of 3 tensors"):
        wrapper.plan(arrays[0], arrays[1][:2], *arrays[2:], HEADS, KV_HEADS, DIM, PAGE)
    arrays[0][1] = int32(0, 5)
    with pytest.raises(ValueError, match="level 1: qo_indptr: needs 3 entries"):
        wrapper.plan(*arrays, HEADS, KV_HEADS, DIM, PAGE)
    workspace = torch.empty(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="qo_indptr_buf_arr: needs a list of 2 tensors"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, use_cuda_graph=True)
