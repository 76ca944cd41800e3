# SPDX-License-Identifier: Apache-2.0
"""Rows of V4 and V4.1 have the bytes that vLLM's kernels write, in Triton's interpreter.

These need `VLLM_TEST_FILES`, a folder with vLLM's package (an unpacked wheel), and Triton.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.servers import ROOT, last_line

FILES = os.environ.get("VLLM_TEST_FILES", "")


@pytest.mark.skipif(not FILES, reason="needs VLLM_TEST_FILES")
def test_bytes_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    counts = last_line(sys.executable, path, "vllm/row_writers.py", FILES)
    assert counts == "148 148 148"
