# SPDX-License-Identifier: Apache-2.0
"""The builders of attention masks, bit for bit as on the CPU, where other tests compare them with
loops over all keys; with any integers, in graphs, from other frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from cumla.launch.mha.mask_rows import SPECS
from cumla.launch.module import load
from cumla.mha.mask import AttentionMask
from tests.gpu.tools.arrays import to_torch
from tests.gpu.tools.memory import Memory
from tests.mha.mask_cases import Case, hostile, interval_cases, tree_cases, trees

KERNELS = ("mask_rows",)
MAY_SKIP = ("needs JAX on the GPU",)
cp: Any = pytest.importorskip("cupy")


@pytest.fixture(autouse=True)
def _settled() -> None:
    load(SPECS[0], cp.cuda.Device().id, capturing=lambda: False)
    cp.cuda.Device().synchronize()


def same(got: AttentionMask, expected: AttentionMask) -> None:
    assert got.given.keys() == expected.given.keys()
    for name, array in expected.given.items():
        assert cp.asarray(got.given[name]).get().tobytes() == array.tobytes(), name


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    memory = Memory(cp)
    return {name: memory.upload(value) for name, value in given.items()}


@pytest.mark.parametrize("case", [*interval_cases(), *tree_cases()], ids=repr)
def test_grid(case: Case) -> None:
    memory = Memory(cp)
    same(case.build(memory.upload), case.build())


def test_long_prompts() -> None:
    """More tokens than a GPU runs at once, and offsets of many requests."""
    lens = np.arange(1, 700, 7, dtype=np.int32)
    places = {
        "kv_lens": lens + 3000,
        "qo_indptr": np.cumsum([0, *lens], dtype=np.int32),
        "total_tokens": int(lens.sum()) + 9,
    }
    spans = np.stack([np.arange(3000, 3640, 16), np.arange(3007, 3647, 16)], axis=-1)
    given = {"spans": np.tile(spans.astype(np.int32), (len(lens), 1, 1)), "window": 1023, **places}
    same(AttentionMask.image_spans(**on_gpu(given)), AttentionMask.image_spans(**given))


@pytest.mark.parametrize("seed", range(200))
def test_integers_that_mean_nothing(seed: int) -> None:
    builder, given, is_ordered = hostile(seed)
    got = getattr(AttentionMask, builder)(**on_gpu(given))
    expected = getattr(AttentionMask, builder)(**given)
    cp.cuda.Device().synchronize()
    if is_ordered:
        same(got, expected)


def test_repeats_are_the_same_to_the_bit() -> None:
    for case in (interval_cases()[-1], tree_cases()[-1]):
        expected = case.build()
        for _ in range(50):
            same(case.build(Memory(cp).upload), expected)


# --- graphs and frameworks ------------------------------------------------------------------------


def test_a_graph_replayed_with_other_images_and_trees() -> None:
    """Lengths, offsets, spans and trees are new; rows behind the last request are empty."""
    batch, total = 3, 40
    there = {
        "qo_indptr": cp.zeros(batch + 1, np.int32),
        "kv_lens": cp.zeros(batch, np.int32),
    }
    spans, drafts = cp.zeros((batch, 4, 2), np.int32), cp.zeros((batch, 16, 16), bool)
    images = AttentionMask(start=cp.zeros(total, np.int32), end=cp.zeros(total, np.int32))
    tree = AttentionMask(start=cp.zeros(total, np.int32), tree=cp.zeros((total, 2), np.uint32))
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        assert AttentionMask.image_spans(spans, **there, out=images) is images
        assert AttentionMask.from_tree(drafts, window=9, **there, out=tree) is tree
        graph = stream.end_capture()
    for step in range(3):
        rng = np.random.default_rng(step)
        q_lens = rng.integers(0, 13, batch)
        begin = rng.integers(0, 60, (batch, 4, 1))
        host: dict[str, Any] = {
            "qo_indptr": np.cumsum([0, *q_lens], dtype=np.int32),
            "kv_lens": (q_lens + rng.integers(0, 50, batch)).astype(np.int32),
        }
        fresh = np.concatenate([begin, begin + rng.integers(0, 20, begin.shape)], axis=-1)
        fresh, grown = fresh.astype(np.int32), trees(batch + step, 16)[step:]
        for name, array in host.items():
            there[name].set(array)
        spans.set(fresh)
        drafts.set(grown)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        same(images, AttentionMask.image_spans(fresh, **host, total_tokens=total))
        expected = AttentionMask.from_tree(grown, window=9, **host, total_tokens=total)
        assert (tree.start.get() == expected.start).all()
        assert (tree.tree.get()[:, :1] == expected.tree).all()
        assert not tree.tree.get()[:, 1:].any()


def test_a_capture_needs_given_arrays() -> None:
    lens, stream = cp.zeros(3, np.int32), cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        with pytest.raises(cumla.NotPreparedError, match=r"pass out\.start= and out\.end="):
            AttentionMask.blocks(32, kv_lens=lens, q_len=2)
        stream.end_capture()


@pytest.mark.parametrize("case", [interval_cases()[40], tree_cases()[2]], ids=repr)
def test_torch(case: Case) -> None:
    torch = pytest.importorskip("torch")
    there = case.build(lambda array: to_torch(torch, cp.asarray(array)))
    torch.cuda.synchronize()
    assert all(isinstance(array, torch.Tensor) for array in there.given.values())
    for name, expected in case.build().given.items():
        got = there.given[name].view(torch.int32).cpu().numpy()
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("case", [interval_cases()[40], tree_cases()[2]], ids=repr)
def test_jax(case: Case, jax: Any) -> None:
    there = case.build(jax.numpy.asarray)
    for name, expected in case.build().given.items():
        assert isinstance(there.given[name], jax.Array)
        assert np.asarray(there.given[name]).tobytes() == expected.tobytes()
