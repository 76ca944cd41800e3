# SPDX-License-Identifier: Apache-2.0
"""Ragged MLA that cuts requests at fixed positions: where, and that bits stay the same."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.errors import CumlaError
from tests.calls import int32
from tests.emulator import emulated_gpu
from tests.launch.mha.test_attention import bits

HEADS = 16
PIECE = 2048  # tokens between cuts of a request whose tile has 64 rows
Q_LENS, KV_LENS = (4, 1, 9, 2), (2200, 70, 130, 2049)


def rows_of(q_lens: tuple[int, ...], batch: list[int]) -> np.ndarray:
    bounds = np.cumsum([0, *q_lens])
    return np.concatenate([np.arange(bounds[r], bounds[r + 1]) for r in batch])


def attend(
    batch: list[int], processors: int, *, listed: bool = False, **more: Any
) -> dict[int, Any]:
    """Return what each request of the batch gets, by number."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((sum(Q_LENS), HEADS, 576)).astype(ml_dtypes.bfloat16)
    cache = rng.standard_normal((100, 64, 576)).astype(ml_dtypes.bfloat16)
    table = rng.permutation(4 * 70).reshape(4, 70).astype(np.int32) % 100
    ends = int32(0, *np.cumsum([Q_LENS[r] for r in batch]))
    given = {"kv_lens": int32(*[KV_LENS[r] for r in batch]), "qo_indptr": ends}
    if listed:
        used = [-(-KV_LENS[r] // 64) for r in batch]
        given["kv_indptr"] = int32(0, *np.cumsum(used))
        lists = [table[r, :n] for r, n in zip(batch, used, strict=True)]
        given["kv_indices"] = np.concatenate(lists)
    else:
        given["block_table"] = table[batch]
    rows = q[rows_of(Q_LENS, batch)]
    with emulated_gpu(processors) as cupy:
        arrays = {name: cupy.asarray(array) for name, array in given.items()}
        state = cumla.mla_attention(
            cupy.asarray(rows), cupy.asarray(cache), softmax_scale=0.02, **arrays, **more
        )
        out, lse = np.asarray(state.out), np.asarray(state.lse)
    exact = cumla.reference.mla_attention(rows, cache, softmax_scale=0.02, **given)
    np.testing.assert_allclose(out.astype(np.float32), exact.out.astype(np.float32), atol=2e-2)
    np.testing.assert_allclose(lse, exact.lse, atol=1e-3)
    spans = zip(batch, ends, ends[1:], strict=False)
    return {r: bits((out[a:b], lse[a:b])) for r, a, b in spans}


def test_bits_of_a_request_do_not_depend_on_its_neighbours() -> None:
    """Alone on another GPU, with a list of pages; without the flag they do."""
    whole = attend([3, 1, 2, 0], 4, batch_invariant=True)
    assert attend([0], 9, listed=True, batch_invariant=True)[0] == whole[0]
    assert attend([0], 9)[0] != whole[0]


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "pieces"),
    [
        ((1, 8, 9), (3 * PIECE, PIECE + 1, 3 * PIECE), [3, 2, 2, 1, 1, 1]),
        ((0, 1, 1), (PIECE, 0, PIECE), [1, 1]),
        ((2, 2, 2), (9 * PIECE, PIECE - 1, 5), [4, 1, 1]),  # the last piece is the rest
    ],
)
def test_requests_of_few_tokens_are_cut(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], pieces: list[int]
) -> None:
    """Each piece is a part; tiles of requests of more than 8 tokens are whole."""
    sizes = {"batch_invariant": True, "max_kv_len": 4 * PIECE}
    with emulated_gpu(6) as cupy:
        nbytes = cumla.MLAAttentionPlan.workspace_bytes(3, 20, HEADS, **sizes, sm_count=6)
        buffer = cupy.empty(nbytes, np.uint8)
        plan = cumla.MLAAttentionPlan(3, 20, HEADS, **sizes, workspace=buffer)
        ends = cupy.asarray(int32(0, *np.cumsum(q_lens)))
        plan.update(cupy.asarray(int32(*kv_lens)), qo_indptr=ends)
    key, layout = plan.key, plan.key.layout
    assert key.piece_blocks * 64 == PIECE
    found = buffer[layout.parts : layout.parts + key.parts * 48].view(np.int32).reshape(-1, 12)
    expected = [
        (place, piece * PIECE // 64) for place, count in enumerate(pieces) for piece in range(count)
    ]
    assert found[: len(expected), :2].tolist() == [list(pair) for pair in expected]
    assert (found[len(expected) :, 0] == key.num_places).all()
    assert not buffer[layout.tickets : layout.tickets + 16 * key.num_tickets].any()


def test_a_plan_without_room_says_so() -> None:
    with pytest.raises((ValueError, CumlaError), match="max_kv_len: needs the length"):
        cumla.MLAAttentionPlan(3, 20, HEADS, batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant: needs at most 65535 pieces"):
        cumla.MLAAttentionPlan.workspace_bytes(
            512, 4096, 128, batch_invariant=True, max_kv_len=1 << 20, sm_count=132
        )
