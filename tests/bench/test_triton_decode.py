# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel to compare with: its numbers in Triton's interpreter, its size for sm_90."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def test_agrees_with_the_reference() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.interpret_triton"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    errors = [float(line) for line in done.stdout.split()]
    assert len(errors) == 3
    assert all(0 < error < 1e-3 for error in errors), errors


@pytest.mark.parametrize("rows", [16, 128])
def test_fits_a_hopper_multiprocessor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: int
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # it warns where this is not set
    decode = importlib.import_module("bench.triton_decode")
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.backends.compiler")
    source = importlib.import_module("triton.compiler").ASTSource
    options = decode.tile_options(rows)
    types = dict.fromkeys(("q", "kv", "out"), "*bf16")
    types |= dict.fromkeys(("block_table", "seqlens"), "*i32")
    types |= {"partial_out": "*fp32", "partial_lse": "*fp32", "scale": "fp32"}
    constants = {name: options[name] for name in ("TILE_ROWS", "TILE_TOKENS")} | {"SINGLE": False}
    names = decode.ATTEND.arg_names
    kernel = triton.compile(
        source(
            decode.ATTEND,
            {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
        ),
        target=compiler.GPUTarget("cuda", 90, 32),
        options={name: options[name] for name in ("num_warps", "num_stages")},
    )
    assert 0 < kernel.metadata.shared <= 232448
