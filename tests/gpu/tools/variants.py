# SPDX-License-Identifier: Apache-2.0
"""The kernels with a line changed: random delays for stress, planted bugs to calibrate tools.

Every edit names the text that it replaces, and the kernels in which it must occur as often as it
says: tests/gpu_tools/test_oracle.py sees to it that the edits keep up with the kernels.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cumla.core.operation import Ready
from cumla.launch import all_specs, module
from cumla.launch.mla import mla_decode_fp8
from cumla.launch.mla.choice import decode_specs
from cumla.launch.mla.mla_decode import ragged_spec
from cumla.launch.source import OPTIONS, KernelSpec, translation_unit
from cumla.launch.split.plan import page_form

TILES = ("mla_decode",)
SWAPPED = ("mla_decode_swapped",)
BOTH = TILES + SWAPPED  # what they share
LOGITS = ("mqa_logits", "paged_mqa_logits")
FP8 = ("mla_decode_fp8",)


@dataclass(frozen=True)
class Edit:
    """One replacement in the translation unit of each of some kernels."""

    stems: tuple[str, ...]
    old: str
    new: str
    times: int = 1

    def apply(self, text: str) -> str:
        found = text.count(self.old)
        if found != self.times:
            stems = ", ".join(self.stems)
            raise ValueError(f"{stems}: {self.old!r} occurs {found} times, not {self.times}")
        return text.replace(self.old, self.new)


def stems_of(edits: Sequence[Edit]) -> tuple[str, ...]:
    """The kernels to which all of these edits apply."""
    return tuple(stem for stem in BOTH + LOGITS + FP8 if all(stem in edit.stems for edit in edits))


JITTER = """
__device__ __forceinline__ void jitter() {  // one thread in eight dawdles for up to 4 us
  unsigned h = (unsigned)clock64() * 2654435761u + blockIdx.x * 97u + blockIdx.y * 1013u;
  h = (h ^ (h >> 15)) * 2246822519u + threadIdx.x / 32u;
  h ^= h >> 13;
  if ((h & 7u) == 0u) __nanosleep((h >> 8) & 4095u);
}
"""

DAWDLE = """
// Half of the time; now and then for longer than others wait.
__device__ __forceinline__ void dawdle() {
  unsigned h = (unsigned)clock64() * 2654435761u + blockIdx.x * 97u + blockIdx.y * 1013u;
  h = (h ^ (h >> 15)) * 2246822519u;
  h ^= h >> 13;
  if ((h & 1u) == 0u) __nanosleep((h >> 8) & ((h & 0xf0u) == 0u ? 65535u : 4095u));
}
"""

_WAIT = "__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity, const char* name) {"
_ARRIVE = "__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {"
_EXPECT = "__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {"
_INIT = "__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {"
_AFTER = "__device__ __forceinline__ void mbarrier_arrive_after_copies(u32 barrier) {"


def _delays_of(stems: tuple[str, ...]) -> tuple[Edit, ...]:
    delayed = (_ARRIVE, _EXPECT, _AFTER, _WAIT)
    jitters = (Edit(stems, text, text + "\n  jitter();") for text in delayed)
    return (Edit(stems, _INIT, JITTER + _INIT), *jitters)


DELAYS = _delays_of(BOTH)
"""Random delays before every arrival on a barrier, and before every wait."""

FP8_DELAYS = (
    *_delays_of(FP8),
    Edit(
        FP8,
        "find_factors(round * 4, own, other);",
        "jitter();\n      find_factors(round * 4, own, other);\n      jitter();",
    ),
)
"""The same of what reads FP8 caches, and while consumers add up what they left for each other."""

FP8_MISSING_END_WAIT = Edit(FP8, "if (Layout::kQueries > 1 && n > 0)", "if (false)")
"""A consumer begins with a segment where the other one may still add up the one before."""

_ADD = "__device__ __forceinline__ u32 atomic_add_acq_rel(u32* address, u32 value) {"
_LOAD = "__device__ __forceinline__ u32 load_acquire(const u32* address) {"
_STORE = "__device__ __forceinline__ void store_relaxed(u32* address, u32 value) {"
_FENCE = "__device__ __forceinline__ void fence_sc_gpu() {"

JOIN_DELAYS = (
    Edit(BOTH, _ADD, DAWDLE + _ADD + "\n  dawdle();"),
    Edit(BOTH, _LOAD, _LOAD + "\n  dawdle();"),
    Edit(BOTH, _STORE, _STORE + "\n  dawdle();"),
    Edit(BOTH, _FENCE, _FENCE + "\n  dawdle();"),
)
"""Random delays before every access to a ticket."""

NO_PATIENCE = Edit(
    BOTH, "if (clock64() - start < kPatience) continue;", "if (clock64() < start) continue;"
)
"""A thread block that would wait for the others of its request leaves at once."""

NO_WAITING = Edit(BOTH, "const bool waits = !more && p.may_wait;", "const bool waits = false;")
"""The last thread block of a request joins everything."""

EARLY_JOIN = Edit(BOTH, "while (!all_arrived(load_acquire(arrived))) {", "while (false) {")
"""A thread block joins its share without waiting for the pieces of the others."""

_LATE = "if (blockIdx.y % 2 != 0) __nanosleep(20000u);\n    "
LATE_PIECES = {
    "one_tile": Edit(
        TILES, "write_piece(segment, inverse, lse);", _LATE + "write_piece(segment, inverse, lse);"
    ),
    "swapped": Edit(
        SWAPPED, "write_output(segment, split);", _LATE + "write_output(segment, split);"
    ),
}
"""Every second part stores its pieces when the others have long stored theirs."""

MISSING_WAIT = Edit(
    TILES,
    "mbarrier_wait(shared.probabilities_full(1 - consumer), (t / 2) & 1, \"the other consumer's "
    'probabilities");',
    "",
)
"""A consumer reads the other's maxima and probabilities without waiting for them."""

MISSING_TILE_WAIT = Edit(
    TILES,
    'mbarrier_wait(shared.full(consumer, column), phase, "KV tiles");',
    "",
)
"""A consumer multiplies tiles that TMA may still be writing."""

UNWRITTEN_PARTIAL = Edit(
    TILES, "p.partial_lse[piece * p.row_groups * kRowGroup + row + 8] = lse[1];", ""
)
"""Half of the log-sum-exps of every piece are never written."""

MISSING_GATHER_SYNC = Edit(
    BOTH,
    "consumers_sync();\n      if (helper == 0) {",
    "if (helper == 0) {",
)
"""A warp adds up what the other warps of its item have before they have written it."""

SWAPPED_MISSING_EXCHANGE_SYNC = Edit(
    SWAPPED, "leave_sums();\n    consumers_sync();", "leave_sums();"
)
"""A consumer leaves its output where the other one may still read the query and probabilities."""

SWAPPED_UNWRITTEN_PARTIAL = Edit(
    SWAPPED, "of_piece[row_of(i)] = lse[i];", "of_piece[row_of(i & 1)] = lse[i & 1];"
)
"""Half of the log-sum-exps of every piece are never written."""

EVERY_LANE_FREES = (
    Edit(
        LOGITS,
        "mbarrier_init(shared.free(s), kConsumers * 4);",
        "mbarrier_init(shared.free(s), kConsumers * kWarpgroup);",
    ),
    Edit(
        LOGITS,
        "__syncwarp();\n      if (lane == 0) mbarrier_arrive(shared.free(finished.slot));",
        "fence_proxy_async_shared();\n      mbarrier_arrive(shared.free(finished.slot));",
    ),
)
"""Every lane says itself, behind a fence of its own, that it has read a block's scales.

racecheck follows no order that goes through another lane, nor the fence of who loads.
"""

LOADERS_WAIT_TOGETHER = Edit(
    ("paged_mqa_logits",),
    "if (lane / 4 * 4 == four && box < boxes) {",
    """for (int other = four; other < four + 4 && begin + other < boxes; ++other) {
          const u32 slot_there = __shfl_sync(0xffffffffu, slot, other);
          const u32 phase_there = __shfl_sync(0xffffffffu, free_phase, other);
          mbarrier_wait(shared.free(slot_there), phase_there, "a free slot for tokens");
        }
        if (lane / 4 * 4 == four && box < boxes) {""",
)
"""Each lane waits for the slots of its neighbours, too: racecheck misses waits of some lanes."""

FP8_EVERY_LANE_ARRIVES = (
    Edit(FP8, "mbarrier_init(shared.free(s), 4);", "mbarrier_init(shared.free(s), kWarpgroup);"),
    Edit(
        FP8, "mbarrier_init(shared.query_full(n), 2);", "mbarrier_init(shared.query_full(n), 64);"
    ),
    Edit(
        FP8, "mbarrier_init(shared.query_free(n), 8);", "mbarrier_init(shared.query_free(n), 256);"
    ),
    Edit(
        FP8,
        "if (lane == 0) mbarrier_arrive(shared.free(s));",
        "fence_proxy_async_shared();\n    mbarrier_arrive(shared.free(s));",
    ),
    Edit(
        FP8,
        "if (lane == 0) mbarrier_arrive(shared.query_full(n));",
        "mbarrier_arrive(shared.query_full(n));",
    ),
    Edit(
        FP8,
        "if (lane == 0) mbarrier_arrive(shared.query_free(of.n));",
        "mbarrier_arrive(shared.query_free(of.n));",
    ),
)
"""Every lane says itself that it has read from a slot of the ring, and what it did to the query."""

SWAPPED_EVERY_LANE_ARRIVES = (
    Edit(
        SWAPPED, "mbarrier_init(shared.query_full(), 2);", "mbarrier_init(shared.query_full(), 64);"
    ),
    Edit(
        SWAPPED,
        "mbarrier_init(shared.query_free(), 8);",
        "mbarrier_init(shared.query_free(), 256);",
    ),
    Edit(
        SWAPPED,
        "if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.query_full());",
        "mbarrier_arrive(shared.query_full());",
    ),
    Edit(
        SWAPPED,
        "if (lane == 0) mbarrier_arrive(shared.query_free());",
        "mbarrier_arrive(shared.query_free());",
    ),
)
"""The same of what is done to the query of few rows."""


ALL = {
    "delays": DELAYS,
    "delays over FP8 caches": FP8_DELAYS,
    "delays of the joining": JOIN_DELAYS,
    "no patience": (NO_PATIENCE,),
    "no waiting": (NO_WAITING,),
    "early join": (EARLY_JOIN,),
    "late pieces": (LATE_PIECES["one_tile"],),
    "swapped: late pieces": (LATE_PIECES["swapped"],),
    "missing wait": (MISSING_WAIT,),
    "over FP8 caches: missing end wait": (*FP8_DELAYS, FP8_MISSING_END_WAIT),
    "missing tile wait": (MISSING_TILE_WAIT,),
    "unwritten partial": (UNWRITTEN_PARTIAL,),
    "missing gather sync": (MISSING_GATHER_SYNC,),
    "swapped: missing exchange sync": (SWAPPED_MISSING_EXCHANGE_SYNC,),
    "swapped: unwritten partial": (SWAPPED_UNWRITTEN_PARTIAL,),
    "every lane frees": EVERY_LANE_FREES,
    "every lane arrives": FP8_EVERY_LANE_ARRIVES,
    "swapped: every lane arrives": SWAPPED_EVERY_LANE_ARRIVES,
    "loaders wait together": (LOADERS_WAIT_TOGETHER,),
}
"""Every variant that a test or a tool uses."""


def specs_of(stem: str, page_size: int = 64) -> tuple[KernelSpec, ...]:
    """The entry points of a kernel for bfloat16 and one size of pages, or for 64 heads of 128."""
    if stem in FP8:
        return mla_decode_fp8.SPECS
    decode = (*decode_specs("bfloat16", page_size), ragged_spec("bfloat16", page_form(page_size)))
    logits = (spec for spec in all_specs() if "h64_d128" in spec.entry)
    return tuple(spec for spec in (*decode, *logits) if spec.stem == stem)


def edited_text(spec: KernelSpec, *edits: Edit) -> str:
    """The translation unit of one entry point after the edits."""
    text = translation_unit(spec)
    for edit in edits:
        text = edit.apply(text)
    return text


@contextlib.contextmanager
def installed(*edits: Edit, page_size: int = 64, device: int = 0) -> Iterator[None]:
    """Let cumla launch edited kernels (`specs_of`) for a while: those to which all edits apply."""
    originals = {
        spec: module.load(spec, device, capturing=lambda: False)
        for stem in stems_of(edits)
        for spec in specs_of(stem, page_size)
    }
    assert originals, "no kernel has the text of all these edits"
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: _compiled(spec, edits), originals))
        edited = {spec: _load_edited(spec, edits, device, Path(folder)) for spec in originals}
    try:
        for spec, kernel in edited.items():
            module._loaded[spec, device] = kernel
        _forget_launches()
        yield
    finally:
        import cupy

        cupy.cuda.Device(device).synchronize()
        for spec, kernel in originals.items():
            module._loaded[spec, device] = kernel
        _forget_launches()


def _forget_launches() -> None:
    """Make operations and plans pack their launches anew: those that are ready hold a kernel."""
    for found in gc.get_objects():
        if type(found) is Ready:
            found.clear()


@functools.cache
def _compiled(spec: KernelSpec, edits: tuple[Edit, ...]) -> bytes:
    cubin: bytes = module._compile(spec, edited_text(spec, *edits), OPTIONS)[0]
    return cubin


def _load_edited(
    spec: KernelSpec, edits: tuple[Edit, ...], device: int, folder: Path
) -> module.LoadedKernel:
    import cupy

    path = folder / f"{spec.entry}.cubin"
    path.write_bytes(_compiled(spec, edits))
    return module._ready(spec, device, cupy.RawModule(path=str(path)).get_function(spec.entry))
