# SPDX-License-Identifier: Apache-2.0
"""Masks and biases of the benchmark, on the CPU: FlexAttention gets what cumla gets."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

pytest.importorskip("torch.nn.attention.flex_attention")
import torch

from bench import masks


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as it is, uncompiled; small images and chunks."""
    small: dict[str, Any] = {"DEVICE": "cpu", "IMAGES": (5, 30), "WIDTH": 9, "CHUNK": 16}
    for name, value in (small | {"WINDOW": 12, "DISTANCES": 20}).items():
        monkeypatch.setattr(masks, name, value)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(masks, "timed", lambda calls, flush: dict.fromkeys(calls, 1.0))


@pytest.mark.parametrize("shape", masks.SHAPES, ids=lambda shape: shape[0])
def test_rows(shape: Any) -> None:
    """`measured` compares the results itself."""
    name, _, q_len, _, heads, kv_heads, columns = shape
    q_len = min(q_len, 70 if "prefill" in name else 7)
    small = name, 2, q_len, 70, heads // kv_heads * 2, 2, columns
    row = masks.measured(small, None, contextlib.nullcontext(), float("inf"))
    if "e4m3" in name:
        assert row["without flex"] == "no e4m3 keys"
    else:
        assert row["largest difference"] < 3e-2
    assert set(row["us"]) >= {"causal", "bias" if "slopes" in name or "table" in name else "mask"}


def test_a_wrong_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row says so, and has no time of FlexAttention."""
    real = masks.flex

    def wrong(name: str, given: Any, mask: Any, *more: Any) -> Any:
        return real(name, given, masks.mask_of("prefill", given["kv_lens"], 70), *more)

    monkeypatch.setattr(masks, "flex", wrong)
    shape = ("prefill, images", 2, 70, 70, 4, 2, 64)
    row = masks.measured(shape, None, contextlib.nullcontext(), float("inf"))
    assert "results differ" in row["without flex"]
    assert "flex" not in row["us"]


def test_late_rows_go_without() -> None:
    shape = ("prefill, blocks of 32", 2, 70, 70, 4, 2, 64)
    row = masks.measured(shape, None, contextlib.nullcontext(), 0.0)
    assert row["without flex"] == "no time to compile it"
