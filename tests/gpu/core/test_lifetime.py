# SPDX-License-Identifier: Apache-2.0
"""What a call must leave alone: the thread's context, a forked process, threads without the GIL."""

from __future__ import annotations

import pytest

from tests.gpu.tools.process import run_fresh

KERNELS = ("quantize_fp8",)
pytest.importorskip("cupy")

GREEN = """
import cupy
import numpy as np
from cuda.bindings import driver
import cumla

def succeed(result):
    assert result[0] == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]

cupy.zeros(1)
device = succeed(driver.cuDeviceGet(0))
kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
resource = succeed(driver.cuDeviceGetDevResource(device, kind))
parts, *_ = succeed(driver.cuDevSmResourceSplitByCount(1, resource, 0, 16))
description = succeed(driver.cuDevResourceGenerateDesc([parts[0]], 1))
flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
green = succeed(driver.cuGreenCtxCreate(description, device, flags))
context = succeed(driver.cuCtxFromGreenCtx(green))
stream = succeed(
    driver.cuGreenCtxStreamCreate(green, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
)
x = cupy.asarray(np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32))
expected = cumla.reference.quantize_fp8(cupy.asnumpy(x)).scale
cupy.cuda.Device().synchronize()
for state in ("cold", "warm"):
    scale = cupy.empty(64, np.float32)
    driver.cuCtxSetCurrent(context)
    cumla.quantize_fp8(x, scale_out=scale, stream=int(stream))
    succeed((driver.cuStreamSynchronize(stream)[0], None))
    assert int(succeed(driver.cuCtxGetCurrent())) == int(context), state
    np.testing.assert_allclose(cupy.asnumpy(scale), expected, rtol=1e-6)
print("done")
"""

FORK = """
import os
import cupy
import numpy as np
import cumla
from cumla.core import _lifetime

stream = cupy.cuda.Stream(non_blocking=True)
x = cupy.zeros((64, 128), np.float32)
cumla.quantize_fp8(x)
_lifetime.keep_until_passed(cupy.zeros(3), stream.ptr, 0)
assert _lifetime.waiting
child = os.fork()
if child == 0:
    cumla.quantize_fp8(np.zeros((3, 128), np.float32))
    try:
        cumla.quantize_fp8(x)
    except cumla.UnsupportedDeviceError as error:
        assert "forked" in str(error)
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
cumla.quantize_fp8(x)
cupy.cuda.Device().synchronize()
print("done")
"""

HOST_FUNCTION = """
import time
import cupy
from cumla.core._lifetime import keep_until_passed, order_streams

cupy.zeros(1)
stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
for call in (
    lambda: keep_until_passed(None, stream.ptr, 0),
    lambda: order_streams(other.ptr, stream.ptr, 0),
):
    stream.launch_host_func(lambda _: time.sleep(2), None)
    for _ in range(20_000):
        call()
    stream.synchronize()
print("done")
"""


@pytest.mark.parametrize(
    "script", [GREEN, FORK, HOST_FUNCTION], ids=["green context", "fork", "host function"]
)
def test_in_a_process_of_its_own(script: str) -> None:
    done = run_fresh(script)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
