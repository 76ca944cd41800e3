# SPDX-License-Identifier: Apache-2.0
"""The kernel of whole row tiles, run by the CPU, against the reference."""

from __future__ import annotations

from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cumla
import tests.emulator
from cumla.launch.kernel import Launch
from cumla.launch.mha.key import MHAKey
from tests.calls import int32
from tests.emulator import emulate, emulated_gpu
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
from tests.selection import some

BF16 = np.dtype(ml_dtypes.bfloat16)
FEW = (  # few kernels: each takes seconds to compile
    *samples(8, columns=(64, 64), dtype="bfloat16", page_size=16, **MANY),
    *samples(3, columns=(64, 64), dtype="bfloat16", page_size=3, **MANY),
    *samples(3, columns=(192, 128), dtype="float16", page_size=0, **MANY),
)


def launched(arguments: dict[str, Any], multiprocessors: int = 1) -> tuple[Any, list[str]]:
    """The result of a call, and the kernels that it launched."""
    stems: list[str] = []

    def record(launch: Launch) -> None:
        stems.append(launch.spec.stem)
        emulate(launch)

    with (
        emulated_gpu(multiprocessors) as cupy,
        mock.patch.object(tests.emulator, "emulate", record),
    ):
        there = {name: cupy.like(value) for name, value in arguments.items()}
        return cumla.attention(**there), stems


def check_sample(sample: Sample) -> None:
    got, stems = launched(make(sample), 1 + sample.seed % 2)
    assert "attention_prefill" in stems
    check(sample, got, cumla.reference.attention(**make(sample)))


@pytest.mark.parametrize("sample", FEW, ids=lambda s: f"{s.columns[0]}-{s.page_size}-{s.seed}")
def test_prefill(sample: Sample) -> None:
    check_sample(sample)


@pytest.mark.parametrize("columns", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_split_keys(columns: tuple[int, int]) -> None:
    """Row tiles of two consumers, whole and cut, with pages and without."""
    fixed: dict[str, Any] = DRAFTS | {"columns": columns, "dtype": "bfloat16"}
    for page_size, count in ((64, 7), (16, 4), (0, 1)):
        for sample in samples(2, page_size=page_size, **fixed):
            got, stems = launched(make(sample), count)
            assert "attention_prefill" in stems
            check(sample, got, cumla.reference.attention(**make(sample)))


@pytest.mark.parametrize("columns", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_split_keys_of_ragged_queries_behind_windows(columns: tuple[int, int]) -> None:
    for i, fixed in enumerate(RAGGED_DRAFTS):
        (sample,) = samples(1, columns=columns, dtype="bfloat16", **fixed)
        got, stems = launched(make(sample), RAGGED_COUNTS[i % len(RAGGED_COUNTS)])
        assert stems.count("attention_prefill") == 1
        check(sample, got, cumla.reference.attention(**make(sample)))


@pytest.mark.parametrize("count", RAGGED_COUNTS)
def test_windows_leave_ragged_queries_to_split_keys(count: int) -> None:
    with emulated_gpu(count, always=True) as cupy:
        for fixed in RAGGED_DRAFTS:
            for sample in samples(6, **fixed):
                there = {name: cupy.like(value) for name, value in make(sample).items()}
                assert splits_keys(there)


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_kernel(columns: tuple[int, int], dtype: str) -> None:
    for page_size in (0, 3, 8, 16, 48, 64, 128):
        if page_size != 3 or columns != (256, 256):
            fixed = {"columns": columns, "dtype": dtype, "page_size": page_size}
            for sample in samples(4, **fixed, **MANY):
                check_sample(sample)


@pytest.mark.parametrize("name", RISING)
@pytest.mark.parametrize("dtype", some(["bfloat16", "float16"], 2))
def test_maxima_that_grow(name: str, dtype: str) -> None:
    """Weights by an old maximum are too large, or infinite: their scores are computed again."""
    arguments = rising(name, (64, 64), np.dtype(getattr(ml_dtypes, dtype, dtype)))
    got, stems = launched(arguments)
    assert "attention_prefill" in stems
    check_rising(got, arguments)


def mixture() -> dict[str, Any]:
    """Chunks of a prefill, decoding and requests of nothing; tiles of three requests a head."""
    rng = np.random.default_rng(3)
    return {
        "q": rng.standard_normal((200, 8, 64)).astype(BF16),
        **{name: rng.standard_normal((40, 16, 2, 64)).astype(BF16) for name in "kv"},
        "qo_indptr": int32(0, 70, 71, 71, 180, 200),
        "kv_lens": int32(90, 250, 30, 109, 7),
        "block_table": rng.permutation(80).reshape(5, 16).astype(np.int32) % 40,
    }


def chosen_on(given: dict[str, Any], processors: int) -> str:
    """The kernels of a plan for these arrays."""
    options = {"batch_invariant": True, "max_kv_len": 256} if "batch_invariant" in given else {}
    options |= {"window": given.get("window")}
    with emulated_gpu(processors) as cupy:
        q, k, v, bounds = (cupy.like(given[name]) for name in ("q", "k", "v", "qo_indptr"))
        plan = cumla.AttentionPlan.from_arrays(q, k, v, qo_indptr=bounds, **options)
    key = plan.key
    return " and ".join(one.choice.spec.stem for one in (key, key.beside) if one)


@pytest.mark.parametrize(
    ("batch", "q_len", "heads", "chosen"),
    [
        (16, 16, (64, 8), "split"),  # a row tile for almost each multiprocessor
        (20, 16, (64, 8), "split"),  # whole tiles would take two waves
        (16, 8, (64, 8), "attention"),  # one tile of 64 rows reads keys once
        (1, 16, (64, 8), "attention"),  # few tiles
        (1, 128, (32, 8), "split"),  # a chunk of a prompt
        (1, 2048, (32, 8), "whole"),
        (80, 32, (64, 8), "whole"),
        (1, 544, (32, 8), "split"),  # 1.03 waves of whole tiles
        (1, 900, (32, 8), "whole"),  # 1.8
        (1, 1100, (32, 8), "split"),  # 2.1
        (1, 1500, (32, 8), "whole"),  # 2.8
    ],
)
def test_keys_of_drafts_and_chunks_are_split(
    batch: int, q_len: int, heads: tuple[int, int], chosen: str
) -> None:
    sizes = batch * q_len, *heads, 128, 128, 64
    for masked in (False, True):
        key = MHAKey(
            batch, *sizes, "bfloat16", "bfloat16", not masked, q_len, 0, 132, masked=masked
        )
        if key.choice.is_split:
            assert chosen == "split"
            assert key.row_tile == 128
        else:
            assert chosen == ("whole" if key.choice.takes_full_tiles else key.choice.spec.stem)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "chosen"),
    [
        (16, 160, (64, 8), "split"),  # drafts, ten on average
        (4, 512, (32, 8), "split"),  # chunks
        (33, 512, (32, 8), "split"),  # 32 decode beside a chunk
        (33, 576, (32, 8), "split"),  # the chunk has 1.03 waves of whole tiles
        (65, 1088, (32, 8), "mixed"),  # 1.9
        (2, 601, (32, 8), "split"),  # 1.2
        (3, 1800, (32, 8), "mixed"),  # 3.5
        (64, 350, (64, 8), "mixed"),  # drafts of 44 rows, or chunks
        (64, 224, (32, 8), "attention"),  # drafts of one tile of 64 rows
    ],
)
def test_keys_of_ragged_batches_are_split(
    batch: int, tokens: int, heads: tuple[int, int], chosen: str
) -> None:
    key = MHAKey(batch, tokens, *heads, 128, 128, 64, "bfloat16", "bfloat16", True, 0, 0, 132)
    found = "split" if key.choice.is_split else "mixed" if key.choice.is_mixed else None
    assert chosen == (found or key.choice.spec.stem)


def test_whole_tiles_are_for_many_rows() -> None:
    """There is work for all multiprocessors, and room for a chunk."""
    many, few, drafts = mixture(), mixture(), mixture()
    few["q"], few["qo_indptr"] = few["q"][:40], int32(0, 36, 37, 38, 39, 40)
    drafts["q"], drafts["qo_indptr"] = drafts["q"][:20], int32(0, 4, 8, 12, 16, 20)
    one = many | {"qo_indptr": int32(0, 200)}
    chosen = {
        name: chosen_on(given, processors)
        for name, given, processors in (
            ("many rows", many, 1),
            ("one request", one, 1),
            ("few tiles", few, 30),
            ("tiles for most multiprocessors", many, 30),
            ("a chunk beside decoding", few, 1),
            ("a window", few | {"window": 5}, 1),
            ("drafts", drafts, 1),
            ("fixed cuts", many | {"batch_invariant": True}, 1),
        )
    }
    assert chosen == {
        "many rows": "attention and attention_prefill",
        "one request": "attention_prefill",
        "few tiles": "attention",
        "tiles for most multiprocessors": "attention_prefill",
        "a chunk beside decoding": "attention and attention_prefill",
        "a window": "attention",
        "drafts": "attention_decode",
        "fixed cuts": "attention",
    }


def test_a_plan_runs_again_after_one_update() -> None:
    """The counter from which tiles are taken is where it was."""
    arguments = mixture()
    expected = cumla.reference.attention(**arguments)
    with emulated_gpu(3) as cupy:
        there = {name: cupy.like(value) for name, value in arguments.items()}
        lengths = {name: there.pop(name) for name in ("kv_lens", "qo_indptr")}
        arrays = [there[name] for name in ("q", "k", "v")]
        plan = cumla.AttentionPlan.from_arrays(*arrays, qo_indptr=lengths["qo_indptr"])
        plan.update(**lengths)
        runs = [plan.run(**there) for _ in range(3)]
    for out, lse in runs:
        assert np.asarray(out).tobytes() == np.asarray(runs[0].out).tobytes()
        assert np.asarray(lse).tobytes() == np.asarray(runs[0].lse).tobytes()
    errors = np.abs(np.asarray(runs[0].out, np.float32) - np.asarray(expected.out, np.float32))
    assert errors.max() <= 2e-2
    np.testing.assert_allclose(runs[0].lse, expected.lse, atol=1e-4)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"cache_dtype": "float8_e4m3fn"},
        {"page_size": 1, "head_dim_v": 256},
        {"dtype": "float32"},
    ],
    ids=str,
)
def test_one_workspace_serves_every_form(form: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"num_kv_heads": 8, "head_dim_v": form.get("head_dim_v", 128)}
    with emulated_gpu(132) as cupy:
        nbytes = cumla.AttentionPlan.workspace_bytes(4, 4096, 32, 128, **sizes, sm_count=132)
        workspace = cupy.empty(nbytes, np.uint8)
        plan = cumla.AttentionPlan(4, 4096, 32, 128, **sizes | form, workspace=workspace)
    key, layout = plan.key, plan.key.layout
    assert layout.nbytes <= nbytes
    rows = key.tiles * key.parts * 2 * key.row_groups * 16 if key.parts > 1 else 0
    assert layout.nbytes - layout.partial_out >= rows * key.value_dim * 4  # pieces are float32


@pytest.mark.parametrize("columns", [64, 128, 192, 256])
def test_a_workspace_serves_split_row_tiles(columns: int) -> None:
    sizes: dict[str, Any] = {"num_kv_heads": 8, "head_dim_v": min(columns, 128)}
    if columns != 192:
        sizes["head_dim_v"] = columns
    with emulated_gpu(132) as cupy:
        nbytes = cumla.AttentionPlan.workspace_bytes(16, 256, 64, columns, **sizes, sm_count=132)
        workspace = cupy.empty(nbytes, np.uint8)
        plan = cumla.AttentionPlan(16, 256, 64, columns, **sizes, q_len=16, workspace=workspace)
    assert plan.key.choice.spec.stem == "attention_prefill" and plan.key.parts > 1
    assert plan.key.row_groups == 8


@pytest.mark.parametrize("fills", [False, True])
def test_sections_of_heads_cover_all(fills: bool) -> None:
    """As if few keys filled L2: a section a head, or one, for a tile for each thread block."""
    arguments = mixture() | {"q": mixture()["q"].repeat(3, 1)}  # three heads of keys
    arguments |= {name: arguments[name].repeat(3, 2)[:, :, :3] for name in "kv"}
    expected = cumla.reference.attention(**arguments)
    edits = {"kBytesInL2 = 12 << 20": "kBytesInL2 = 1"}
    if fills:
        edits["gridDim.x / 8 * 7"] = "20u"
    real = tests.emulator.translation_unit

    def smaller(spec: Any) -> str:
        whole = real(spec)
        if spec.stem != "attention_prefill":
            return whole
        for text, other in edits.items():
            assert text in whole
            whole = whole.replace(text, other)
        return whole

    tests.emulator._library.cache_clear()
    try:
        with mock.patch.object(tests.emulator, "translation_unit", smaller):
            got, stems = launched(arguments)
    finally:
        tests.emulator._library.cache_clear()
    assert "attention_prefill" in stems
    np.testing.assert_allclose(got[1], expected.lse, atol=1e-4)
