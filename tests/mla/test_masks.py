# SPDX-License-Identifier: Apache-2.0
"""Windows, trees and sinks of dense MLA without a GPU: definition, plans, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.launch.mla.shape import MLADecodeKey
from tests.mla import masked_cases as cases
from tests.mla.masked_cases import Sample


@pytest.mark.parametrize(
    "sample", [*cases.samples(24), *cases.trees(16)], ids=lambda sample: sample.name
)
def test_the_definition_is_that_of_attention(sample: Sample) -> None:
    """MLA is attention with one row as key and value; what nobody sees is NaN."""
    problem = cases.make(sample)
    given = dict(problem.given)
    cache = given.pop("kv_cache")
    cache = np.concatenate([*cache], axis=-1) if isinstance(cache, tuple) else cache
    q, k = (x.astype(np.float64) for x in (given.pop("q"), cache))
    if sample.words:
        given["mask"] = cumla.AttentionMask(tree=given.pop("tree"))
        del given["window"]
    want = cumla.reference.attention(q, k, k[..., :512], **given, softmax_scale=576**-0.5)
    got = cases.in_float64(problem)
    np.testing.assert_allclose(got.out, want.out, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6)


@pytest.mark.parametrize(
    "sample", [*cases.samples(6), *cases.trees(6)], ids=lambda sample: sample.name
)
def test_plans(sample: Sample) -> None:
    """A plan is made with the window or for trees, and run with the sinks."""
    problem = cases.make(sample)
    given = dict(problem.given)
    fixed = {name: given.pop(name) for name in ("causal", "window")}
    fixed["mask_form"] = "tree" if sample.words else None
    names = ("kv_lens", "qo_indptr", "kv_indptr")
    lengths = {name: given.pop(name) for name in names if name in given}
    if sample.operation == "decode":
        plan: Any = cumla.MLADecodePlan.from_arrays(given["q"], given["kv_cache"], **fixed)
    else:
        indptr = {"qo_indptr": lengths["qo_indptr"]}
        arrays = given["q"], given["kv_cache"]
        plan = cumla.MLAAttentionPlan.from_arrays(*arrays, **indptr, **fixed)
    plan.update(**lengths)
    outs = {"out": np.zeros((*given["q"].shape[:-1], 512), given["q"].dtype)}
    outs["lse"] = np.zeros(given["q"].shape[:-1], np.float32)
    cases.check(problem, *plan.run(**given, **outs))


def test_windows_are_scheduled_by_row_tiles() -> None:
    """A plan with a window has the buffer of the ragged schedule, with the tiles of its batch."""
    key = MLADecodeKey(5, 3, 16, 1, 64, "bfloat16", True, 0, 132, window=(511, 0))
    tiles = key.by_tiles
    assert tiles is not None
    assert (tiles.total_tokens, tiles.schedule_window, tiles.axis_q_len) == (15, 511, 3)
    assert key.layout == tiles.layout
    assert (tiles.row_groups, tiles.piece_cost, tiles.min_blocks) == (3, 2, 2)
    assert MLADecodeKey(5, 3, 16, 1, 64, "bfloat16", True, 0, 132).by_tiles is None


@pytest.mark.parametrize("shape", [(1, 1, 16), (5, 3, 128), (200, 1, 24)])
def test_the_size_of_a_buffer(shape: tuple[int, int, int]) -> None:
    """That of the larger of the plans with and without a causal mask."""
    for window in (511, (-1, 2)):
        nbytes = cumla.MLADecodePlan.workspace_bytes(*shape, window=window, sm_count=132)
        like = np.zeros(1, np.int32)
        keys = [
            cumla.MLADecodePlan(*shape, window=window, causal=causal, like=like).key
            for causal in (True, False)
        ]
        assert nbytes == max(replace(k, sm_count=132, device=0).layout.nbytes for k in keys)


def small(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    q, kv_cache = np.ones((2, 1, 4, 576), np.float16), np.ones((4, 64, 576), np.float16)
    table, lens = np.int32([[0, 1], [2, 3]]), np.int32([100, 7])
    return {"q": q, "kv_cache": kv_cache, "block_table": table, "kv_lens": lens}, options


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": (1, 2, 3)}, ValueError, "window: needs one number or a pair"),
        ({"window": -2}, ValueError, "window: needs"),
        ({"window": 1.5}, TypeError, "window: needs"),
        (
            {"window": 3, "batch_invariant": True},
            ValueError,
            r"batch_invariant: needs window None, got \(3, 0\); leave one of them out",
        ),
        ({"sinks": np.ones(4)}, TypeError, "sinks: needs float32"),
        ({"sinks": np.ones(3, np.float32)}, ValueError, r"sinks: needs shape \(num_heads"),
        ({"sinks": np.ones((4, 2), np.float32)[:, 0]}, ValueError, "sinks: needs"),
        (
            {"tree": np.ones((2, 1), bool)},
            TypeError,
            r"tree: needs uint32 or int32, got bool; pass cumla\.AttentionMask\.from_tree",
        ),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    arrays, options = small(**options)
    with pytest.raises(error, match=message):
        cumla.mla_decode(**arrays, **options)


def test_windows_are_for_16_bit_caches() -> None:
    sample = Sample((1, 1), (70, 3), is_fp8=True, form="packed")
    arrays = cases.make(sample).given | {"window": 5}
    message = "window: needs a kv_cache of q's dtype, got one of float8_e4m3fn beside"
    with pytest.raises(ValueError, match=message):
        cumla.mla_decode(**arrays)
    with pytest.raises(ValueError, match=message):
        cumla.MLADecodePlan(2, 1, 16, cache_dtype="float8_e4m3fn", window=5, like=np.zeros(1))
    with pytest.raises(ValueError, match=message):
        cumla.MLAAttentionPlan(2, 9, 16, cache_dtype="float8_e4m3fn", window=5, like=np.zeros(1))
    # No window at all: unbounded, or on the side where causal queries see nothing.
    for window in (-1, None, (-1, 5)):
        cumla.mla_decode(**arrays | {"window": window})


def test_the_check_mode_lets_freed_pages_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    arrays, _ = small()
    arrays["block_table"] = np.int32([[-1, 1], [2, 3]])
    cumla.mla_decode(**arrays, window=35)
    with pytest.raises(ValueError, match=r"block_table\[0, 0\]: needs a page number"):
        cumla.mla_decode(**arrays, window=36)
