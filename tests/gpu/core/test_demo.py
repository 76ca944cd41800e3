# SPDX-License-Identifier: Apache-2.0
"""The demo on the GPU: every step is compared with un-absorbed attention, or the exit code is 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from cumla.cli import main

KERNELS = (
    "append_cache",
    "ragged_schedule",
    "schedule",
    "mla_decode",
    "mla_decode_swapped",
)
TEXT = Path(__file__).resolve().parents[3] / "README.md"


@pytest.mark.parametrize("chunked", [False, True])
def test_the_demo_is_right_on_the_gpu(chunked: bool, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--chunked-prefill"] if chunked else []
    assert main(["demo", "--file", str(TEXT), "--steps", "4", *options]) == 0
    output = capsys.readouterr().out
    assert "backend   CUDA kernels on" in output
    assert ("a replay of one CUDA graph" in output) == chunked
