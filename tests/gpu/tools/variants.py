# SPDX-License-Identifier: Apache-2.0
"""The kernels with a line changed: random delays for stress, planted bugs to calibrate tools.

Every edit names a line by its mark ``// plant: name``, or a wrapper of cumla/cuda/ptx:
tests/gpu_tools/test_oracle.py sees to it that the edits keep up with the kernels.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cumla.core._driver import driver, in_primary_context
from cumla.core.operation import Ready
from cumla.launch import all_specs, module
from cumla.launch.mha import attention_decode, attention_prefill
from cumla.launch.mla import mla_decode_fp8, mla_decode_fp8_64, mla_decode_fp8_products
from cumla.launch.mla.choice import decode_specs
from cumla.launch.mla.mla_decode import ragged_spec
from cumla.launch.source import OPTIONS, KernelSpec, translation_unit
from cumla.launch.sparse import mla_sparse_fp8, mla_sparse_packed, mla_sparse_v4
from cumla.launch.split.plan import page_form

TILES = ("mla_decode",)
SWAPPED = ("mla_decode_swapped",)
BOTH = TILES + SWAPPED  # what they share
LOGITS = ("mqa_logits", "paged_mqa_logits")
LOGITS_FEW = ("paged_mqa_logits_few",)
FP8 = ("mla_decode_fp8",)
SPARSE_16 = ("mla_sparse",)
SPARSE_SWAPPED = ("mla_sparse, swapped",)  # its entry points of few rows
SPARSE_FP8 = ("mla_sparse_fp8",)
SPARSE_PACKED = ("mla_sparse_packed",)
SPARSE_V4 = ("mla_sparse_v4", "mla_sparse_v41")
SPARSE_8 = SPARSE_FP8 + SPARSE_PACKED + SPARSE_V4
SPARSE = SPARSE_16 + SPARSE_8
FP8_64 = ("mla_decode_fp8_64",)
HEADS_64 = SPARSE_PACKED + FP8_64
FP8_PRODUCTS = ("mla_decode_fp8_products",)
ATTENTION = ("attention",)
DECODE = ("attention_decode",)
PREFILL = ("attention_prefill",)


@dataclass(frozen=True)
class Edit:
    """A change of one line in the translation unit of each of some kernels.

    Attributes
    ----------
    stems : tuple of str
        The kernels.
    at : str
        The line: one with the mark ``// plant: at``, or, of ``name()``, that on which the body of a
        wrapper of that name begins, or, of ``statement;``, this statement.
    new : str
        What takes the place of `old`; groups of it are ``\\1`` and so on.
    old : str
        A regular expression that is found once in the line.
    """

    stems: tuple[str, ...]
    at: str
    new: str
    old: str = r"\S.*"

    def apply(self, text: str) -> str:
        if self.at.endswith("()"):
            line = rf"__device__ __forceinline__ \w+ {self.at[:-2]}\([^;]*?\) {{(?=\n)"
            found = [match.span() for match in re.finditer(line, text)]
        elif self.at.endswith(";"):
            found = [match.span() for match in re.finditer(re.escape(self.at), text)]
        else:
            found = [*self._marked(text)]
        if len(found) != 1:
            stems = ", ".join(self.stems)
            raise ValueError(f"{stems}: {self.at!r} occurs {len(found)} times, not once")
        begin, end = found[0]
        edited, count = re.subn(self.old, self.new, text[begin:end])
        if count != 1:
            raise ValueError(f"{self.at}: {self.old!r} occurs {count} times in {text[begin:end]!r}")
        return text[:begin] + edited + text[end:]

    def _marked(self, text: str) -> Iterator[tuple[int, int]]:
        """Find the lines with the mark, without their comments."""
        line = re.compile(r"(.*?)  // (?:.*; )?plant: ")
        for mark in re.finditer(rf"plant: (?={self.at}$)", text, re.MULTILINE):
            begin = text.rfind("\n", 0, mark.start()) + 1
            if found := line.fullmatch(text, begin, mark.end()):
                yield found.span(1)


def _inside(stems: tuple[str, ...], wrapper: str, code: str, before: str = "") -> Edit:
    """Begin the body of a wrapper with some code; other code may come before the function."""
    return Edit(stems, f"{wrapper}()", rf"{before}\g<0>\n  {code}", r"(?s).+")


def _ahead(stems: tuple[str, ...], at: str, code: str) -> Edit:
    return Edit(stems, at, rf"{code}\g<0>")


def stems_of(edits: Sequence[Edit]) -> tuple[str, ...]:
    """The kernels to which all of these edits apply."""
    decoding = BOTH + FP8 + SPARSE + SPARSE_SWAPPED + FP8_64 + FP8_PRODUCTS
    stems = decoding + LOGITS + LOGITS_FEW + ATTENTION + DECODE + PREFILL
    return tuple(stem for stem in stems if all(stem in edit.stems for edit in edits))


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


def _delays_of(stems: tuple[str, ...]) -> tuple[Edit, ...]:
    copies = "mbarrier_arrive_after_copies"
    delayed = ("mbarrier_arrive", "mbarrier_arrive_expect_tx", copies, "mbarrier_wait")
    return (
        Edit(stems, "mbarrier_init()", JITTER + r"\g<0>", r"(?s).+"),
        *(_inside(stems, name, "jitter();") for name in delayed),
    )


DELAYS = _delays_of(BOTH)
"""Random delays before every arrival on a barrier, and before every wait."""

DECODE_DELAYS = _delays_of(DECODE)
"""The same of few queries."""

FP8_DELAYS = (
    *_delays_of(FP8),
    Edit(FP8, "exchange", r"jitter();\n      \g<0>\n      jitter();"),
)
"""The same of what reads FP8 caches, and while consumers add up what they left for each other."""

SPARSE_DELAYS = _delays_of(SPARSE)
"""The same of what attends to lists."""

FP8_64_DELAYS = _delays_of(FP8_64)
"""The same of many heads over FP8 caches."""

FP8_PRODUCTS_DELAYS = _delays_of(FP8_PRODUCTS)
"""The same with products in e4m3."""

FP8_MISSING_END_WAIT = Edit(FP8, "end of the segment before", "if (false)")
"""A consumer begins with a segment where the other one may still add up the one before."""

JOIN_DELAYS = (
    _inside(BOTH, "atomic_add_acq_rel", "dawdle();", DAWDLE),
    *(_inside(BOTH, it, "dawdle();") for it in ("load_acquire", "store_relaxed", "fence_sc_gpu")),
)
"""Random delays before every access to a ticket."""

NO_PATIENCE = Edit(BOTH, "patience", "0", "kPatience")
"""A thread block that would wait for the others of its request leaves at once."""

NO_WAITING = Edit(BOTH, "waiting", "= false;", "= .*")
"""The last thread block of a request joins everything."""

EARLY_JOIN = Edit(BOTH, "arrivals", "while (false) {")
"""A thread block joins its share without waiting for the pieces of the others."""

_LATE = "if (blockIdx.y % 2 != 0) __nanosleep(20000u);\n    "
LATE_PIECES = {
    "one_tile": _ahead(TILES, "piece", _LATE),
    "swapped": _ahead(SWAPPED, "piece", _LATE),
}
"""Every second part stores its pieces when the others have long stored theirs."""

MISSING_WAIT = Edit(TILES, "adopt", "")
"""A consumer reads the other's maxima and probabilities without waiting for them."""

MISSING_TILE_WAIT = Edit(TILES, "tiles", "")
"""A consumer multiplies tiles that TMA may still be writing."""

UNWRITTEN_PARTIAL = Edit(TILES, "partial", "")
"""Half of the log-sum-exps of every piece are never written."""

MISSING_GATHER_SYNC = Edit(BOTH, "gather", "")
"""A warp adds up what the other warps of its item have before they have written it."""

SWAPPED_MISSING_EXCHANGE_SYNC = Edit(SWAPPED, "exchange", "")
"""A consumer leaves its output where the other one may still read the query and probabilities."""

SWAPPED_UNWRITTEN_PARTIAL = Edit(SWAPPED, "partial", r"(\1 & 1)]", r"\((\w+)\)\]")
"""Half of the log-sum-exps of every piece are never written."""

_ONE_LANE = r"if \([\w. %]+ == 0\) "

EVERY_LANE_FREES = (
    Edit(LOGITS, "block read, arrivals", "* kWarpgroup", r"\* 4"),
    Edit(LOGITS, "block read", "fence_proxy_async_shared();\n      ", _ONE_LANE),
)
"""Every lane says itself, behind a fence of its own, that it has read a block's scales.

racecheck follows no order that goes through another lane, nor the fence of who loads.
"""

ONE_REQUEST_EVERY_LANE_FREES = (
    Edit(LOGITS_FEW, "block of one request read, arrivals", ", kWarpgroup)", r", 4\)"),
    Edit(LOGITS_FEW, "block of one request read", "fence_proxy_async_shared();\n    ", _ONE_LANE),
)
"""The same of a request that is scored alone."""

LOADERS_WAIT_TOGETHER = _ahead(
    ("paged_mqa_logits",),
    "loaders",
    """for (int other = four; other < four + 4 && begin + other < boxes; ++other) {
          const u32 slot_there = __shfl_sync(0xffffffffu, slot, other);
          const u32 phase_there = __shfl_sync(0xffffffffu, free_phase, other);
          mbarrier_wait(shared.free(slot_there), phase_there, "a free slot for tokens");
        }
        """,
)
"""Each lane waits for the slots of its neighbours, too: racecheck misses waits of some lanes."""

_COUNT = r", \d+\)"


def _every_lane_of_queries(stems: tuple[str, ...], copied: str) -> tuple[Edit, ...]:
    """`copied`: the mark of a warp that has copied its share."""
    return (
        Edit(stems, "query copied, arrivals", ", 64)", _COUNT),
        Edit(stems, "query read, arrivals", ", 256)", _COUNT),
        Edit(stems, copied, "", _ONE_LANE),
        Edit(stems, "query read", "", _ONE_LANE),
    )


def _every_lane_arrives(stems: tuple[str, ...]) -> tuple[Edit, ...]:
    return (
        Edit(stems, "slot read, arrivals", ", kWarpgroup)", _COUNT),
        Edit(stems, "slot read", "fence_proxy_async_shared();\n    ", _ONE_LANE),
        *_every_lane_of_queries(stems, "FP8 query copied"),
    )


FP8_EVERY_LANE_ARRIVES = _every_lane_arrives(FP8)
"""Every lane says itself that it has read from a slot of the ring, and what it did to the query."""

SPARSE_EVERY_LANE_ARRIVES = _every_lane_arrives(SPARSE_FP8)
"""The same over lists of rows."""

SPARSE_16_EVERY_LANE_ARRIVES = (
    Edit(
        SPARSE_16,
        "mbarrier_init(shared.query_full(), query);\n  mbarrier_init(shared.query_free(), 8);",
        "free(), 256)",
        r"free\(\), 8\)",
    ),
    Edit(
        SPARSE_16,
        "if (i + 2 >= segment.blocks) arrive(shared.query_free());",
        " mbarrier_a",
        r" a(?=rrive)",
    ),
    Edit(
        SPARSE_16,
        "if (first >= segment.blocks) arrive(shared.query_free());",
        " mbarrier_a",
        r" a(?=rrive)",
    ),
)
"""The same of the query's tile that consumers of lists hold in registers."""


def _every_lane_of_64_heads(stems: tuple[str, ...], prefix: str = "") -> tuple[Edit, ...]:
    """`prefix`: of the marks that such kernels have for themselves."""
    return (
        Edit(stems, "slot read, arrivals", ", 256)", _COUNT),
        Edit(stems, "probabilities, arrivals", ", kWarpgroup)", _COUNT),
        Edit(stems, "probabilities read, arrivals", ", 256)", _COUNT),
        Edit(stems, f"{prefix}slot read", "fence_proxy_async_shared();\n        ", _ONE_LANE),
        Edit(stems, f"{prefix}probabilities read", "", _ONE_LANE),
        Edit(stems, f"{prefix}probabilities", "", r"if \(threadIdx.x % kWarpgroup == 0\) "),
        _ahead(
            stems,
            f"{prefix}granules",
            """for (int k = 0; k < kGranules; ++k) {
      const GranulePlace<Layout> at(kGranules * t + k);
      mbarrier_wait(shared.full(at.slot), at.phase, "a granule");
    }
    """,
        ),
    )


HEADS_64_EVERY_LANE_ARRIVES = _every_lane_of_64_heads(HEADS_64)
"""The same of 64 heads, whose readers wait for rows themselves."""

FP8_PRODUCTS_EVERY_LANE_ARRIVES = _every_lane_of_64_heads(FP8_PRODUCTS, "e4m3 ")
"""The same with products in e4m3."""

V4_EVERY_LANE_ARRIVES = (
    Edit(SPARSE_V4, "V4 rows found, arrivals", ", 32 * warps)", r", warps\)"),
    Edit(SPARSE_V4, "V4 rows used, arrivals", ", 32 * warps)", r", warps\)"),
    Edit(
        *(SPARSE_V4, "V4 tiles, arrivals"),
        *("32 * warps, 32 * warps + finding,", r"warps, warps \+ finding,"),
    ),
    Edit(SPARSE_V4, "V4 rows found", "", _ONE_LANE),
    Edit(SPARSE_V4, "V4 rows used", "", _ONE_LANE),
    Edit(SPARSE_V4, "V4 tiles", "", _ONE_LANE),
)
"""The same of V4's rows, and of tiles."""

E4M3_EVERY_LANE_ARRIVES = (
    Edit(ATTENTION, "e4m3 keys, arrivals", "kE4m3 ? kWarpgroup", r"kE4m3 \? 4"),
    Edit(ATTENTION, "e4m3 values, arrivals", "kE4m3 ? kWarpgroup", r"kE4m3 \? 4"),
    Edit(ATTENTION, "e4m3 tiles", "", _ONE_LANE),
)
"""The same of tiles of e4m3 keys and values, where pieces are joined later."""

DECODE_EVERY_LANE_ARRIVES = (
    Edit(DECODE, "query, arrivals", ", 32)", r", kNarrows \? 1 : 32\)"),
    Edit(DECODE, "sums, arrivals", "32 * kDecodeWarps", "kDecodeWarps"),
    Edit(DECODE, "sums read, arrivals", "32 * kJoinWarps", "kJoinWarps"),
    Edit(DECODE, "query", "", _ONE_LANE),
    Edit(DECODE, "sums", "", _ONE_LANE),
    Edit(DECODE, "sums read", "", _ONE_LANE),
)
"""The same of the query rows and the results of few queries."""

LISTED_EVERY_LANE_ARRIVES = (
    Edit(PREFILL, "keys used, arrivals", "kWarpgroup * kConsumers", r"4 \* kConsumers"),
    Edit(PREFILL, "values used, arrivals", "kWarpgroup * kConsumers", r"4 \* kConsumers"),
    Edit(PREFILL, "keys or values used", "", _ONE_LANE),
)
"""The same of what query tokens see of a block's keys, where they have lists."""


SWAPPED_EVERY_LANE_ARRIVES = _every_lane_of_queries(SWAPPED, "query copied")
"""The same of what is done to the query of few rows."""

SPARSE_SWAPPED_EVERY_LANE_ARRIVES = _every_lane_of_queries(SPARSE_SWAPPED, "query copied")
"""The same over lists of 16-bit rows."""


ALL = {
    "delays": DELAYS,
    "delays over FP8 caches": FP8_DELAYS,
    "delays over lists": SPARSE_DELAYS,
    "delays of many heads": FP8_64_DELAYS,
    "delays of products in e4m3": FP8_PRODUCTS_DELAYS,
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
    "one request: every lane frees": ONE_REQUEST_EVERY_LANE_FREES,
    "every lane arrives": FP8_EVERY_LANE_ARRIVES,
    "over lists: every lane arrives": SPARSE_EVERY_LANE_ARRIVES,
    "many heads: every lane arrives": HEADS_64_EVERY_LANE_ARRIVES,
    "products in e4m3: every lane arrives": FP8_PRODUCTS_EVERY_LANE_ARRIVES,
    "lists of 16-bit rows: every lane arrives": SPARSE_16_EVERY_LANE_ARRIVES,
    "V4: every lane arrives": V4_EVERY_LANE_ARRIVES,
    "swapped: every lane arrives": SWAPPED_EVERY_LANE_ARRIVES,
    "lists of 16-bit rows, swapped: every lane arrives": SPARSE_SWAPPED_EVERY_LANE_ARRIVES,
    "e4m3: every lane arrives": E4M3_EVERY_LANE_ARRIVES,
    "few queries: every lane arrives": DECODE_EVERY_LANE_ARRIVES,
    "lists of prompts: every lane arrives": LISTED_EVERY_LANE_ARRIVES,
    "delays of few queries": DECODE_DELAYS,
    "loaders wait together": (LOADERS_WAIT_TOGETHER,),
}
"""Every variant that a test or a tool uses."""


def specs_of(stem: str, page_size: int = 64) -> tuple[KernelSpec, ...]:
    """The entry points of a kernel for bfloat16 and one size of pages, or for 64 heads of 128."""
    if stem in FP8:
        return mla_decode_fp8.SPECS
    if stem in FP8_64:
        return mla_decode_fp8_64.SPECS
    if stem in FP8_PRODUCTS:
        return mla_decode_fp8_products.SPECS
    if stem in SPARSE_16:
        forms = re.compile(r"mla_sparse_b?float16_shared_blocks(_max_logits)?")
        return tuple(spec for spec in all_specs() if forms.fullmatch(spec.entry))
    if stem in SPARSE_SWAPPED:
        forms = re.compile(r"mla_sparse_b?float16(_512)?_swapped(_lists)?")
        return tuple(spec for spec in all_specs() if forms.fullmatch(spec.entry))
    if stem in SPARSE_8:
        launchers = (mla_sparse_fp8, mla_sparse_packed, mla_sparse_v4)
        return tuple(s for of in launchers for s in of.SPECS if s.stem == stem)
    if stem in ATTENTION:
        specs = (spec for spec in all_specs() if spec.stem == "attention")
        return tuple(spec for spec in specs if spec.entry.endswith("_e4m3"))
    if stem in DECODE:
        return attention_decode.SPECS
    if stem in LOGITS_FEW:
        return tuple(spec for spec in all_specs() if spec.stem == stem)
    if stem in PREFILL:
        return tuple(spec for spec in attention_prefill.SPECS if "_listed_" in spec.entry)
    decode = (*decode_specs("bfloat16", page_size), ragged_spec("bfloat16", page_form(page_size)))
    logits = (spec for spec in all_specs() if "h64_d128" in spec.entry)
    return tuple(spec for spec in (*decode, *logits) if spec.stem == stem)


text_of = functools.cache(translation_unit)  # of one entry point, as it is


def edited_text(spec: KernelSpec, *edits: Edit) -> str:
    """The translation unit of one entry point after the edits."""
    text = text_of(spec)
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
        forget_launches()
        yield
    finally:
        import cupy

        cupy.cuda.Device(device).synchronize()
        for spec, kernel in originals.items():
            module._loaded[spec, device] = kernel
        forget_launches()


def forget_launches() -> None:
    """Make operations and plans pack their launches anew.

    Those that are ready hold a kernel, and follow from the GPU's multiprocessors.
    """
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
    with in_primary_context(driver(), device):
        return module._ready(spec, device, cupy.RawModule(path=str(path)).get_function(spec.entry))
