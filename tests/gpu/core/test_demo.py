# SPDX-License-Identifier: Apache-2.0
"""The demo on the GPU: every step is compared with attention in float32, or the exit code is 1."""

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


@pytest.mark.parametrize("options", [(), ("--chunked-prefill",), ("--model", "llama")], ids=str)
def test_the_demo_is_right_on_the_gpu(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--file", str(TEXT), "--steps", "4", *options]) == 0
    output = capsys.readouterr().out
    assert "backend   CUDA kernels on" in output
    assert ("a replay of one CUDA graph" in output) == bool(options)


def test_sparse_decoding_is_right_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(TEXT.parent / "examples/sparse_decoding.py"))
    assert example["main"](["--file", str(TEXT), "--steps", "4"]) == 0
    output = capsys.readouterr().out
    assert "backend   CUDA kernels on" in output
    assert "a replay of one CUDA graph" in output
