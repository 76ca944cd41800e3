# SPDX-License-Identifier: Apache-2.0
"""A cache that is cut among two GPUs by JAX, against one GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.tools.process import run_fresh

KERNELS = ("merge_states",)  # what attends and appends is tested alone elsewhere
MAY_SKIP = ("needs two GPUs", "needs JAX on the GPU")
cp: Any = pytest.importorskip("cupy")


JAX = """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
import jax
assert len(jax.devices("gpu")) >= 2
from tests.distributed import test_jax as t
t.decodes(2, 1, repeats=100)
t.decodes(2, 3)
t.gathers(2)
t.attends(2, "bfloat16", "float32")
t.writes(2)
"""


def test_jax(jax: Any) -> None:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    done = run_fresh(JAX, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
