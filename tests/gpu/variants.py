# SPDX-License-Identifier: Apache-2.0
"""The kernels with a line changed: random delays for stress, planted bugs to calibrate tools.

Every edit names the text that it replaces, which must occur as often as it says:
tests/test_gpu_oracle.py sees to it that the edits keep up with the kernels.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cumla.launch import all_specs, module
from cumla.launch.source import OPTIONS, KernelSpec, translation_unit

BFLOAT16_ENTRIES = {"mla_decode": "mla_decode_bfloat16", "mla_merge": "mla_merge_bfloat16"}


@dataclass(frozen=True)
class Edit:
    """One replacement in a kernel's translation unit."""

    stem: str
    old: str
    new: str
    times: int = 1

    def apply(self, text: str) -> str:
        found = text.count(self.old)
        if found != self.times:
            raise ValueError(f"{self.stem}: {self.old!r} occurs {found} times, not {self.times}")
        return text.replace(self.old, self.new)


JITTER = """
__device__ __forceinline__ void jitter() {  // one thread in eight dawdles for up to 4 us
  unsigned h = (unsigned)clock64() * 2654435761u + blockIdx.x * 97u + blockIdx.y * 1013u;
  h = (h ^ (h >> 15)) * 2246822519u + threadIdx.x / 32u;
  h ^= h >> 13;
  if ((h & 7u) == 0u) __nanosleep((h >> 8) & 4095u);
}
"""

_WAIT = "__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity, const char* name) {"
_ARRIVE = "__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {"
_EXPECT = "__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {"
_INIT = "__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {"

DELAYS = (
    Edit("mla_decode", _INIT, JITTER + _INIT),
    Edit("mla_decode", _ARRIVE, _ARRIVE + "\n  jitter();"),
    Edit("mla_decode", _EXPECT, _EXPECT + "\n  jitter();"),
    Edit("mla_decode", _WAIT, _WAIT + "\n  jitter();"),
)
"""Random delays before every arrival on a barrier, and before every wait."""

MISSING_WAIT = Edit(
    "mla_decode",
    "mbarrier_wait(shared.probabilities_full(1 - consumer), (t / 2) & 1, \"the other consumer's "
    'probabilities");',
    "",
)
"""A consumer reads the other's maxima and probabilities without waiting for them."""

MISSING_TILE_WAIT = Edit(
    "mla_decode",
    'mbarrier_wait(shared.full(consumer, column), phase, "a KV tile");',
    "",
)
"""A consumer multiplies tiles that TMA may still be writing."""

UNWRITTEN_PARTIAL = Edit(
    "mla_decode",
    "if (exists && consumer == 0 && lane % 4 == 0)\n      p.partial_lse[index]",
    "if (exists && consumer == 0 && lane == 0 && segment.slot == 0)\n      p.partial_lse[index]",
)
"""Most log-sum-exps of partial results are never written."""


def spec_of(stem: str) -> KernelSpec:
    """The bfloat16 entry point of a kernel."""
    return next(spec for spec in all_specs() if spec.entry == BFLOAT16_ENTRIES[stem])


def edited_text(*edits: Edit) -> str:
    """The translation unit of one kernel after the edits."""
    (stem,) = {edit.stem for edit in edits}
    text = translation_unit(spec_of(stem))
    for edit in edits:
        text = edit.apply(text)
    return text


@contextlib.contextmanager
def installed(*edits: Edit, device: int = 0) -> Iterator[None]:
    """Let cumla launch the edited bfloat16 kernel for a while."""
    import cupy

    spec = spec_of(edits[0].stem)
    module.load(spec, device, capturing=lambda: False)
    cubin, _ = module._compile(spec, edited_text(*edits), OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "edited.cubin"
        path.write_bytes(cubin)
        function: Any = cupy.RawModule(path=str(path)).get_function(spec.entry)
        kernel = module._ready(spec, device, function)
    original = module._loaded[spec, device]
    module._loaded[spec, device] = kernel
    try:
        yield
    finally:
        cupy.cuda.Device(device).synchronize()
        module._loaded[spec, device] = original
