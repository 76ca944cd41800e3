# SPDX-License-Identifier: Apache-2.0
"""Requests that are cut at fixed positions: the parts, and that a request's bits are its own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.launch.mha.choice import RULES
from tests.calls import int32
from tests.emulator import emulated_gpu
from tests.launch.mha.test_attention import BF16, bits, call
from tests.launch.split.invariant_parts_mirror import parts_of

PIECE = RULES.piece_blocks * 64
"""Tokens between cuts."""


@pytest.mark.parametrize("most", [8000, 4000, 1])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [
        ((1, 1, 1, 1), (6000, 0, 2048, 2049)),
        ((0, 40, 3, 16), (50, 8000, 4097, 100)),
        ((0, 0, 0, 0), (9, 9, 9, 9)),
    ],
    ids=str,
)
def test_parts(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], most: int) -> None:
    """One for each piece, in the order of the tiles; the rest are empty, tickets are zero."""
    group, total = 2, sum(q_lens) + 5
    sizes = {"num_kv_heads": 2, "batch_invariant": True, "max_kv_len": most}
    with emulated_gpu(8) as cupy:
        nbytes = cumla.AttentionPlan.workspace_bytes(4, total, 4, 64, **sizes, sm_count=8)
        buffer = cupy.empty(nbytes, np.uint8)
        plan = cumla.AttentionPlan(4, total, 4, 64, **sizes, workspace=buffer)
        lengths = {"kv_lens": int32(*kv_lens), "qo_indptr": int32(0, *np.cumsum(q_lens))}
        plan.update(**{name: cupy.asarray(array) for name, array in lengths.items()})
    key, layout = plan.key, plan.key.layout
    tiles = []
    for q_len, tokens in zip(q_lens, kv_lens, strict=True):
        tiles += [(tokens, q_len * group)] * -(-q_len * group // 64)
    expected = parts_of(
        tiles, key.num_places, key.parts, RULES.piece_blocks, max(1, -(-most // PIECE))
    )
    found = buffer[layout.parts : layout.parts + key.parts * 48].view(np.int32).reshape(-1, 12)
    assert (found[:, :10] == expected).all()
    assert not buffer[layout.tickets : layout.tickets + 16 * key.num_tickets].any()


@pytest.mark.parametrize("most", [1, 1024])
def test_a_plan_that_cuts_nothing_reserves_no_pieces(most: int) -> None:
    """A list of row tiles and of parts is all that it needs, however many tokens it has."""
    sizes: dict[str, Any] = {"batch_invariant": True, "max_kv_len": most, "sm_count": 132}
    for nbytes, tiles in (
        (cumla.AttentionPlan.workspace_bytes(8, 16_384, 32, 128, num_kv_heads=8, **sizes), 1032),
        (cumla.MLAAttentionPlan.workspace_bytes(8, 8192, 128, **sizes), 16_392),
        (cumla.MLADecodePlan.workspace_bytes(128, 1, 16, **sizes), 128),
        (cumla.MLADecodePlan.workspace_bytes(128, 1, 128, **sizes), 128),
    ):
        assert nbytes <= tiles * (32 + 48) + 5 * 256


ALONE = (4200, 1, 2060, 600, 0)
"""Keys of requests: pieces of different numbers, the last one of which is short, or one."""


def invariant_problem(q_lens: tuple[int, ...], dtype: str, **changes: Any) -> dict[str, Any]:
    """Requests of the lengths ALONE, and what each has whoever comes with it."""
    rng = np.random.default_rng(2)
    kind = {"e4m3": ml_dtypes.float8_e4m3fn}.get(dtype, BF16)
    return {
        "q": rng.standard_normal((sum(q_lens), 4, 64)).astype(BF16),
        **{name: rng.standard_normal((500, 16, 2, 64)).astype(kind) for name in "kv"},
        "kv_lens": int32(*ALONE),
        "qo_indptr": int32(0, *np.cumsum(q_lens)),
        "block_table": rng.permutation(1350).reshape(5, 270).astype(np.int32) % 500,
        "sinks": np.arange(4, dtype=np.float32),
        **changes,
    }


@pytest.mark.parametrize(
    ("q_lens", "dtype"),
    [
        ((4, 1, 40, 3, 2), "bfloat16"),
        pytest.param((1, 1, 1, 1, 1), "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param((1, 1, 1, 1, 1), "e4m3", marks=pytest.mark.exhaustive),
        pytest.param((4, 1, 40, 3, 2), "e4m3", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_bits_of_a_request_do_not_depend_on_its_neighbours(
    q_lens: tuple[int, ...], dtype: str
) -> None:
    """Alone, in another order and on another GPU; without the flag they do."""
    arguments = invariant_problem(q_lens, dtype)
    bounds = arguments["qo_indptr"]

    def rows_of(batch: list[int], processors: int, invariant: bool) -> dict[int, list[bytes]]:
        rows = np.concatenate([np.arange(bounds[r], bounds[r + 1]) for r in batch])
        given = arguments | {
            "q": arguments["q"][rows],
            "kv_lens": arguments["kv_lens"][batch],
            "qo_indptr": int32(0, *np.cumsum([q_lens[r] for r in batch])),
            "block_table": arguments["block_table"][batch],
            "batch_invariant": invariant,
        }
        with emulated_gpu(processors) as cupy:
            out, lse = call(cupy, given)
        check_against_reference(given, (out, lse))
        ends = given["qo_indptr"]
        return {
            r: bits((out[a:b], lse[a:b])) for r, a, b in zip(batch, ends, ends[1:], strict=False)
        }

    whole = rows_of([0, 1, 2, 3, 4], 8, invariant=True)
    for batch, processors in (([0], 8), ([2, 0], 13), ([4, 3, 1, 2, 0], 4)):
        for request, found in rows_of(batch, processors, invariant=True).items():
            assert found == whole[request], (batch, request)
    free = rows_of([0, 1, 2, 3, 4], 8, invariant=False)
    assert any(free[r] != rows_of([r], 8, invariant=False)[r] for r in (0, 2))


def check_against_reference(given: dict[str, Any], got: Any) -> None:
    asked = {name: value for name, value in given.items() if name != "batch_invariant"}
    expected = cumla.reference.attention(**asked)
    for found, exact, tolerance in zip(got, expected, (2e-2, 1e-4), strict=True):
        one, other = (np.asarray(a, np.float32) for a in (found, exact))
        np.testing.assert_allclose(one, other, atol=tolerance)


def test_an_invariant_plan_gives_the_bits_of_a_call() -> None:
    """Whatever longer requests it serves; those that are longer still are right, too."""
    arguments = invariant_problem((1, 1, 1, 1, 1), "bfloat16")
    with emulated_gpu(8) as cupy:
        there = {name: cupy.like(value) for name, value in arguments.items()}
        expected = bits(cumla.attention(**there, batch_invariant=True))
        lengths = {name: there.pop(name) for name in ("kv_lens", "qo_indptr")}
        for most in (4200, 50_000, 4000):
            plan = cumla.AttentionPlan.from_arrays(
                *(there[name] for name in ("q", "k", "v")),
                qo_indptr=lengths["qo_indptr"],
                batch_invariant=True,
                max_kv_len=most,
            )
            plan.update(**lengths)
            got = plan.run(**there)
            if most >= max(ALONE):
                assert bits(got) == expected
            check_against_reference(arguments, got)


def test_few_query_rows_alone_and_among_many() -> None:
    """Joining adds pieces in one order, however many row groups the batch could fill."""
    rng = np.random.default_rng(5)
    lens = int32(5000, *[64] * 15)
    q, kinds = rng.standard_normal((16, 4, 128)).astype(BF16), ("k", "v")
    caches = {name: rng.standard_normal((79, 64, 1, 128)).astype(BF16) for name in kinds}
    found = []
    for batch in (1, 16):
        with emulated_gpu(4) as cupy:
            given = caches | {
                "q": q[:batch],
                "kv_lens": lens[:batch],
                "qo_indptr": np.arange(batch + 1, dtype=np.int32),
                "block_table": np.tile(np.arange(79, dtype=np.int32), (batch, 1)),
                "out": np.zeros((batch, 4, 128), np.float32),
            }
            there = {name: cupy.like(value) for name, value in given.items()}
            out, lse = cumla.attention(**there, batch_invariant=True)
        found.append(bits((out[:1], lse[:1])))
    assert found[0] == found[1]
