# SPDX-License-Identifier: Apache-2.0
"""The demo and the examples of its kind: each step is compared with attention in float32."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from cumla.cli import main

KERNELS = (
    "append_cache",
    "ragged_schedule",
    "schedule",
    "mla_decode",
    "mla_decode_swapped",
    "append_kv_cache",
    "attention",
    "select_rows",
    "top_k",
    "mla_sparse",
)
TEXT = Path(__file__).resolve().parents[3] / "README.md"


EXAMPLES = TEXT.parent / "examples"


def test_the_demo_is_right_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--file", str(TEXT), "--steps", "4"]) == 0
    assert "backend   CUDA kernels on" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mla_serving", "llama_serving", "sparse_decoding"])
def test_examples_are_right_on_the_gpu(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    assert example["main"](["--file", str(TEXT), "--steps", "4"]) == 0
    output = capsys.readouterr().out
    assert "backend   CUDA kernels on" in output
    assert "a replay of one CUDA graph" in output
