# SPDX-License-Identifier: Apache-2.0
"""Masks and biases of the benchmark, on the CPU: other libraries get what cumla gets."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch.nn.attention.flex_attention")
import torch

from bench import mask_peers, masks
from tests.bench import fake_compiled
from tests.bench.fake_libraries import FakeLibraries

FOREVER = float("inf")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as it is, uncompiled; small images and chunks."""
    small: dict[str, Any] = {"DEVICE": "cpu", "IMAGES": (5, 30), "WIDTH": 9, "CHUNK": 64}
    for name, value in (small | {"BLOCK": 16, "WINDOW": 12, "DISTANCES": 20}).items():
        monkeypatch.setattr(masks, name, value)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(mask_peers, "mods", lambda: fake_compiled.mods)
    blocks = SimpleNamespace(BlockSparseTensorsTorch=fake_compiled.Blocks)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", blocks)
    monkeypatch.setattr(masks, "timed", lambda calls, flush: dict.fromkeys(calls, 1.0))


def libraries_with_masks() -> Any:
    libraries: Any = FakeLibraries()
    libraries.flash_attention_4 = fake_compiled.flash_attention_4
    libraries.vllm_attention = fake_compiled.vllm_attention
    return libraries


def small(shape: masks.Shape) -> masks.Shape:
    """A prefill of two chunks, or steps of a few tokens."""
    kv_len = 128 if "chunks" in shape.name else 70
    q_len = kv_len if "prefill" in shape.name else min(shape.q_len, 7)
    heads = shape.heads // shape.kv_heads * 2
    return shape._replace(batch=2, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=2)


@pytest.mark.parametrize("shape", masks.SHAPES, ids=lambda shape: shape.name)
def test_rows(shape: masks.Shape) -> None:
    """A row has the right results of all that can compute it."""
    libraries = libraries_with_masks()
    case, notes = masks.prepared(small(shape), libraries, FOREVER)
    row = masks.measured(case, notes, None)
    assert not notes
    kind = "ragged" if "drafts" in shape.name else "bias" if case.bias is not None else "mask"
    peers = set() if "e4m3" in shape.name or kind == "ragged" else {"flex"}
    if kind != "bias" and shape.columns <= 256:
        peers.add("FA3")
    if peers and shape.columns <= 256 and kind != "ragged":
        peers.add("FA4")
    if "flex" in peers and any(word in shape.name for word in ("images", "chunks", "slopes")):
        peers.add("vLLM")
    if kind == "mask" and shape.columns == 128 and shape.q_len > 1:
        peers.add("FlashInfer")
    windows = {"window"} if "windows" in shape.name else set()
    apart = {"apart"} if "prefill, chunks" in shape.name else set()
    assert set(row["us"]) == {"causal", kind} | peers | windows | apart
    assert max(row["errors"].values()) < masks.LIMIT


def test_a_wrong_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row says so, and has no time of FlexAttention."""
    real = mask_peers.flex
    everything = masks.rule_of("prefill", "causal", 0)
    monkeypatch.setattr(
        mask_peers, "flex", lambda given, seen, score: real(given, everything, score)
    )
    libraries = libraries_with_masks()
    case, notes = masks.prepared(
        masks.Shape("prefill, images", 2, 70, 70, 4, 2, 64), libraries, FOREVER
    )
    assert "is off by" in notes["without flex"]
    assert "flex" not in masks.measured(case, notes, None)["us"]


def test_a_wrong_result_of_cumla_ends_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = masks.mask_of
    monkeypatch.setattr(masks, "mask_of", lambda name, *more: mask("prefill", *more))
    libraries = libraries_with_masks()
    with pytest.raises(AssertionError, match="mask is off by"):
        masks.prepared(masks.Shape("prefill, images", 2, 70, 70, 4, 2, 64), libraries, FOREVER)


def test_late_rows_go_without() -> None:
    shape = masks.Shape("prefill, blocks of 32", 2, 70, 70, 4, 2, 64)
    libraries = libraries_with_masks()
    case, notes = masks.prepared(shape, libraries, 0.0)
    assert notes == {"without flex": "no time to compile it"}
    assert set(case.calls) == {"causal", "mask", "FA3", "FA4, a mask"}
