# SPDX-License-Identifier: Apache-2.0
"""A small grid for compute-sanitizer, and what its four tools say about the kernels.

    python tests/gpu/tools/sanitize.py --run FOLDER [--evidence-dir FOLDER]
                                       [--parts PART...] [--tools TOOL...]

runs the grid under memcheck, synccheck, racecheck and initcheck, calibrates the last two with
planted bugs, writes the logs to FOLDER and adds the verdicts to the evidence. Single steps:

    compute-sanitizer --tool TOOL python tests/gpu/tools/sanitize.py --tool TOOL [--only PART | BUG]
    python tests/gpu/tools/sanitize.py --summarise FOLDER [--evidence-dir FOLDER]

Each tool runs the grid in parts, a process each, several at once and on all GPUs. With --parts
only those run, and the verdicts are of kernels that no earlier whole run clears as they are: name
each part that launches one of these. With --tools the verdicts of others stay as they are.

All tools run the kernels that ship, except that racecheck runs some with edits that add order
(record.TOOLS says why). The grid's inputs are made, and its results compared, on the host: only
cumla's kernels run on the GPU. Memory comes straight from cudaMalloc, so that initcheck knows what
was never written.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = next(path for path in Path(__file__).resolve().parents if (path / "pyproject.toml").exists())
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import cumla  # noqa: E402
import cumla.launch.device as devices  # noqa: E402
from cumla.distributed.merge import MergeOfRanks  # noqa: E402
from cumla.launch import module  # noqa: E402
from cumla.launch.kernel import PreparedLaunch  # noqa: E402
from cumla.launch.merge_states import MOST_BLOCKS, Meeting, merge_blocks  # noqa: E402
from cumla.launch.sparse import top_k  # noqa: E402
from cumla.mha.mask import AttentionMask  # noqa: E402
from cumla.mla.shape import WIDE, WIDTH, WIDTHS, Width  # noqa: E402
from cumla.reference.sparse.mla_sparse import largest_scores  # noqa: E402
from cumla.sparse.mla_sparse import attend_as_flash_mla  # noqa: E402
from tests import prefix_cases  # noqa: E402
from tests.blocks import block_cases, score_cases, step_cases  # noqa: E402
from tests.gpu.tools import digests, pages, record, variants  # noqa: E402
from tests.gpu.tools.cases import Case  # noqa: E402
from tests.gpu.tools.fp8_problem import Fp8Case, Fp8Problem, make_fp8  # noqa: E402
from tests.gpu.tools.indexer_problem import MARGIN, Paged, Prefill, Rows, check_logits  # noqa: E402
from tests.gpu.tools.memory import owner_of  # noqa: E402
from tests.gpu.tools.problem import NUMPY_DTYPES, Problem, make_problem, typed  # noqa: E402
from tests.gpu.tools.ragged_problem import Ragged, make_ragged  # noqa: E402
from tests.gpu.tools.repeats import plan_of  # noqa: E402
from tests.gpu.tools.sparse_problem import (  # noqa: E402
    SparseCase,
    in_a_larger_cache,
    make_sparse,
)
from tests.gpu.tools.v4_problem import V4Case, make_v4  # noqa: E402
from tests.launch.split.find_prefix_groups_mirror import expected_groups  # noqa: E402
from tests.merge_tolerance import assert_merged  # noqa: E402
from tests.mha import attention_cases  # noqa: E402
from tests.mha import bias_cases as biased  # noqa: E402
from tests.mha import test_attention_mask as masked  # noqa: E402
from tests.mha.mask_cases import hostile, interval_cases, tree_cases  # noqa: E402
from tests.mla import masked_cases as masked_mla  # noqa: E402
from tests.sparse.top_k_cases import scores_of, shaped  # noqa: E402

PLANTS = {
    "missing-wait": variants.MISSING_WAIT,
    "missing-tile-wait": variants.MISSING_TILE_WAIT,
    "missing-gather-sync": variants.MISSING_GATHER_SYNC,
    "unwritten-partial": variants.UNWRITTEN_PARTIAL,
    "swapped-missing-exchange-sync": variants.SWAPPED_MISSING_EXCHANGE_SYNC,
    "swapped-unwritten-partial": variants.SWAPPED_UNWRITTEN_PARTIAL,
}
SHORT = {"columns": (128, 128), "block": (64, 2), "heads": (16, 1), "invariant": False}
BLOCKS = (
    *block_cases.samples(24)[::2],
    *block_cases.samples(1, lens=(2300,), topk=40),
    *(
        sample
        for e4m3 in ("same", "e4m3")
        for sample in block_cases.samples(2, cache=e4m3, **SHORT)
    ),
    *block_cases.samples(2, cache="e4m3", scales="rows", **SHORT),
)
PROMPTS = block_cases.prompts(12)[::3]
BLIND = {  # what racecheck cannot see: bitwise repeats and the oracle find these
    "missing-tile-wait": "it does not know the copy engine's writes",
    "swapped-missing-exchange-sync": "it does not know what wgmma reads",
}
PARTS = ("heads", "lists", "fp8", "dense", "logits", "blocks", "rows", "invariant")  # longest first
RUNS = (  # tool, a part of the grid or a planted bug
    *(("racecheck", part) for part in PARTS),  # it takes the longest
    *((tool, part) for tool in record.TOOLS if tool != "racecheck" for part in PARTS),
    *(("initcheck" if "unwritten" in plant else "racecheck", plant) for plant in PLANTS),
)
SPLIT = "one request cut into many parts"
INVARIANT = (Case(batch=2, heads=24), np.array([3000, 65]))  # the first is cut, the second is not
PAGES = (Case(batch=3, heads=8, q_len=2), np.array([300, 65, 0]))
PAGE_SIZES = (1, 16, 128)  # besides 64: rows, boxes, and blocks that begin inside of a page
RAGGED = (
    Ragged(),
    Ragged(q_lens=(1, 0, 9, 2), kv_lens=(900, 5, 70, 3), heads=24, page_size=1, paging="list"),
    Ragged(q_lens=(2,), kv_lens=(2000,), heads=9, page_size=16, causal=False),  # cut
    Ragged(q_lens=(1, 9), kv_lens=(2500, 70), heads=8),  # batch-invariant
)
FP8_CACHES = (  # few rows and more, one scale and many, a table and a list, and what is cut
    (Fp8Case(form="packed", heads=16, page_size=1), [900, 65, 0]),
    (Fp8Case(form="one", heads=24, q_len=2, kv_scale="array"), [300, 64, 3]),
    (Fp8Case(form="scales", heads=16, kv_heads=2, q_len=3, page_size=16), [700, 130, 1]),
    (Fp8Case(form="16-bit rope", batch=1, heads=8, page_size=48), [4300]),
    (Fp8Case(form="packed", heads=8, q_len=2), [700, 65, 0]),
    (Fp8Case(form="packed", batch=1, heads=40), [3000]),
    (Fp8Case(form="pair", heads=24, q_len=5, operation="table"), [900, 70, 3]),
    (Fp8Case(form="packed", heads=24, q_len=3, page_size=1, operation="list"), [2000, 70, 0]),
    (Fp8Case(form="one", heads=16, kv_scale="array", fp8_query=True), [900, 65, 0]),
    (Fp8Case(form="pair", heads=24, q_len=2, page_size=1, fp8_query=True), [300, 64, 3]),
    (Fp8Case(form="one", heads=24, q_len=3, operation="list", fp8_query=True), [700, 70, 0]),
)
FP8_PRODUCTS = (  # of both kinds of RoPE columns, one of them cut
    (Fp8Case(form="one", heads=128, q_len=2, page_size=1, fp8_products=True), [900, 65, 0]),
    (
        Fp8Case(form="16-bit rope", batch=1, heads=64, operation="table", fp8_products=True),
        [2300],
    ),
    (
        Fp8Case(form="one", heads=64, kv_scale="array", fp8_products=True, fp8_query=True),
        [900, 65, 0],
    ),
)
FP8_HEADS = (  # as many as tiles are full of, in each form
    (Fp8Case(form="packed", heads=64, page_size=1), [900, 65, 0]),
    (Fp8Case(form="one", heads=128, q_len=2, kv_scale="array"), [300, 64, 3]),
    (Fp8Case(form="pair", heads=64, q_len=2, kv_scale="array", fp8_query=True), [300, 64, 3]),
    (Fp8Case(form="pair", heads=128, kv_heads=2, q_len=2, operation="table"), [700, 130, 1]),
    (Fp8Case(form="16-bit rope", batch=1, heads=64, page_size=48), [2300]),
    (Fp8Case(form="scales, e4m3 rope", heads=64, page_size=16), [300, 70, 1]),
    (
        Fp8Case(form="packed", batch=6, heads=64, q_len=2, operation="list"),
        [128, 64, 0, 65, 1, 192],
    ),
)
FP8_SEGMENTS = (  # by two thread blocks: several requests each; one consumer has no block of some
    (Fp8Case(form="one", batch=6, heads=16), [128, 64, 0, 65, 1, 192]),
    (Fp8Case(form="scales", batch=6, heads=16), [128, 64, 0, 65, 1, 192]),
    (Fp8Case(form="packed", batch=6, heads=16), [128, 64, 0, 65, 1, 192]),
    (Fp8Case(form="scales", batch=5, heads=24), [64, 130, 0, 1, 65]),
)
_CUT: dict[str, Any] = {"kv_lens": (1300, 64, 65, 3), "sinks": "normal"}
MLA_MASKS = (  # windows and sinks, of all pages, whole and cut; then sinks of FP8 caches
    masked_mla.Sample((2,) * 4, heads=(24, 1), **_CUT),
    masked_mla.Sample((1,) * 4, heads=(16, 2), page_size=1, form="pair", **_CUT),
    masked_mla.Sample((1,) * 4, heads=(16, 1), window=70, **_CUT),
    masked_mla.Sample((2,), (1900,), heads=(16, 1), window=(1500, 3), causal=False, page_size=16),
    masked_mla.Sample((30, 1, 0, 3), operation="list", window=70, page_size=1, **_CUT),
    masked_mla.Sample((3, 30, 1, 0), operation="table", dtype="float16", page_size=48, **_CUT),
)
MLA_TREES = (  # of all pages, whole and cut, and of rows of other widths
    masked_mla.Sample((16,) * 4, heads=(24, 1), words=1, **_CUT),
    masked_mla.Sample((5, 70, 1, 0), operation="table", page_size=16, words=3, **_CUT),
    masked_mla.Sample((2, 9, 65, 3), operation="list", page_size=1, words=2, **_CUT),
    masked_mla.Sample((4,) * 4, words=1, width=(512, 0), **_CUT),
    masked_mla.Sample((4,) * 4, words=1, width=(256, 64), page_size=1, **_CUT),
)
MLA_WIDTHS = (  # each kernel of rows of other widths, of boxes and of single rows
    *(
        masked_mla.Sample(
            (1,) * 4, heads=(heads, 1), page_size=size, form=form, width=width, **_CUT
        )
        for width, form in (((256, 64), "one"), ((256, 32), "pair"), ((512, 0), "one"))
        for heads in (16, 64, 128)
        for size in (64, 1)
    ),
    *(
        masked_mla.Sample((3, 30, 1, 0), operation="table", page_size=size, width=width, **_CUT)
        for width in ((256, 64), (256, 32), (512, 0))
        for size in (16, 1)
    ),
    masked_mla.Sample((1,) * 4, heads=(16, 1), dtype="float16", width=(256, 32), **_CUT),
    masked_mla.Sample((1,) * 4, heads=(128, 1), dtype="float16", width=(512, 0), **_CUT),
)
MLA_WIDE = (  # of 1024 latent columns: masks, cut requests, all pages, few rows, clusters
    masked_mla.Sample((2,) * 4, heads=(24, 1), width=WIDE, **_CUT),
    masked_mla.Sample((30, 1, 0, 3), operation="list", window=70, page_size=1, width=WIDE, **_CUT),
    masked_mla.Sample(
        (2,), (1900,), window=(1500, 3), causal=False, page_size=16, form="pair", width=WIDE
    ),
    masked_mla.Sample(
        (1,) * 4, heads=(8, 2), page_size=1, form="pair", dtype="float16", width=WIDE, **_CUT
    ),
    masked_mla.Sample(
        (1,) * 6, (128, 64, 0, 65, 1, 192), heads=(40, 1), dtype="float16", width=WIDE
    ),
    *(
        masked_mla.Sample((1,) * 4, heads=(64, 1), page_size=size, form=form, width=WIDE, **_CUT)
        for size, form in ((64, "one"), (1, "pair"))
    ),
    masked_mla.Sample((1,) * 2, (700, 65), heads=(24, 1), window=200, page_size=20, width=WIDE),
    masked_mla.Sample((3,) * 4, heads=(8, 1), window=70, form="pair", width=WIDE, **_CUT),
    masked_mla.Sample((1,) * 9, (130, 3, 0) * 3, heads=(64, 1), window=100, width=WIDE),
    masked_mla.Sample((1,) * 90, (65, 3, 0) * 30, heads=(12, 1), window=50, width=WIDE),
)
MLA_E4M3_WIDTHS = (  # each kernel of e4m3 rows of other widths, of whole pages and of single rows
    *(
        masked_mla.Sample(
            (1,) * 4, heads=(heads, 1), page_size=size, form=form, width=width, is_fp8=True, **_CUT
        )
        for width, form, some in (
            ((256, 64), "one", (16, 24)),
            ((256, 32), "pair", (16,)),
            ((512, 0), "bytes", (16, 24, 64)),
        )
        for heads in some
        for size in (64, 1)
    ),
    *(
        masked_mla.Sample(
            *((3, 30, 1, 0), _CUT["kv_lens"], "table", (heads, 1), size),
            is_fp8=True,
            sinks="normal",
            width=width,
        )
        for width, heads in (((256, 64), 16), ((512, 0), 16), ((512, 0), 64))
        for size in (64, 1)
    ),
)
MLA_SINKS = (
    masked_mla.Sample((2,) * 4, heads=(16, 1), form="packed", is_fp8=True, **_CUT),
    masked_mla.Sample((1,) * 4, heads=(8, 1), form="packed", is_fp8=True, **_CUT),
    masked_mla.Sample((3, 1, 0, 9), operation="list", form="one", is_fp8=True, **_CUT),
)
MLA_SINKS_64 = (
    masked_mla.Sample((1,) * 4, heads=(64, 1), form="packed", is_fp8=True, **_CUT),
    masked_mla.Sample((3, 1, 0, 2), operation="table", heads=(64, 1), is_fp8=True, **_CUT),
)
_LISTS: dict[str, Any] = {"lists": "mixed", "lengths": "tokens"}
SPARSE = (  # each kernel: lists that are cut and lists that are not, absent entries, gaps, sinks
    SparseCase(batch=2, q_len=2, heads=24, topk=700, form="bfloat16", gaps=True, **_LISTS),
    SparseCase(heads=80, topk=300, form="float16", places="rows", sinks="finite", **_LISTS),
    SparseCase(batch=2, heads=9, topk=700, form="float16", page_size=1, sinks="finite", **_LISTS),
    SparseCase(batch=4, heads=16, topk=300, form="one", page_size=16, **_LISTS),
    SparseCase(heads=24, topk=200, form="16-bit rope", places="requests", **_LISTS),
    SparseCase(heads=8, topk=300, form="scales", page_size=1, gaps=True, **_LISTS),
    SparseCase(batch=2, heads=40, topk=200, form="scales, e4m3 rope", **_LISTS),
    SparseCase(batch=2, q_len=2, heads=16, topk=700, gaps=True, sinks="finite", **_LISTS),
    SparseCase(batch=2, q_len=2, heads=72, topk=700, places="rows", gaps=True, **_LISTS),
    SparseCase(batch=2, heads=24, topk=300, scales="wild", lists="blocks", page_size=1),
)
V4 = (  # two caches and one, lists that are cut; rows of 512 columns in 16 bits
    V4Case(batch=2, topk=128, extra=512, page_size=16, gaps=True, sinks="finite", **_LISTS),
    V4Case(batch=1, heads=80, topk=700, scales="wild", places="rows", page_size=53, **_LISTS),
    V4Case(form="v41", batch=2, topk=70, extra=300, page_size=16, gaps=True, **_LISTS),
    V4Case(form="v41", batch=1, heads=80, topk=128, extra=300, extra_form="v41_fp4", **_LISTS),
    V4Case(form="v41_fp4", heads=8, topk=300, places="rows", page_size=53, sinks="finite"),
    V4Case(form="v32_no_rope", batch=2, heads=16, topk=700, gaps=True, **_LISTS),
    V4Case(form="v32_no_rope", batch=2, heads=72, topk=300, places="rows", **_LISTS),
    V4Case(form="e4m3", batch=2, heads=16, topk=300, page_size=16, gaps=True, **_LISTS),
    V4Case(form="e4m3", heads=40, topk=200, sinks="finite", **_LISTS),
    V4Case(batch=2, heads=16, topk=200, form="bfloat16", gaps=True, **_LISTS),
    V4Case(heads=80, topk=300, form="bfloat16", sinks="finite", **_LISTS),
    V4Case(batch=1, heads=56, topk=700, form="float16", sinks="finite", **_LISTS),
)
_CUT: dict[str, Any] = {"operation": "tokens", "topk": 2800, "sinks": "finite"}
_EMPTY: dict[str, Any] = {"operation": "tokens", "topk": 300, "batch": 4, **_LISTS}
MAX_LOGITS: tuple[SparseCase, ...] = (  # one row tile and two; lists that are cut, and empty ones
    SparseCase(batch=5, heads=24, form="bfloat16", page_size=16, **_CUT),
    SparseCase(heads=80, form="float16", **_EMPTY),
    V4Case(heads=24, form="float16", **_EMPTY),
    V4Case(batch=3, heads=80, form="bfloat16", **_CUT),
)
_LARGE: dict[str, Any] = {"batch": 9, "heads": 24, "topk": 400, "operation": "tokens"}
OF_A_LARGE_CACHE = SparseCase(form="bfloat16", **_LARGE), V4Case(form="float16", **_LARGE)
LOGITS_SHAPES = (  # heads, head_dim, q_len: other kernels than those for 64 heads of 128
    (8, 64, 3),
    (16, 32, 8),
    (32, 128, 1),
    (64, 64, 4),
)
SELECTIONS = (  # shapes of top_k, and blocks of a row
    *((name, 1) for name in ("short", "row", "rows", "wide", "scanned", "streamed")),
    *((name, 2) for name in ("cluster", "wide", "sampled", "streamed")),
    ("cluster", 8),
)
DONE = "sanitize: the grid is done"
TIMEOUT = 480.0  # seconds a run
_AT_ONCE = 5  # runs, which share a GPU
COLD = 600.0  # for the first one, without a tool: it compiles what is not in the kernel cache
ABOUT = "about.json"  # beside the logs: machine, the tool's version, and the sources' digests
LEAST_VERSION = 2026, 4  # racecheck of 2025.3 reports accesses that a named barrier orders


def grid(multiprocessors: int) -> dict[str, tuple[Case, list[int]]]:
    """A handful of calls: cut, whole and empty requests, tails, kv heads, both dtypes."""
    return {
        SPLIT: (Case(batch=1, heads=16), [4300]),  # in which warps help each other to join
        "cut, ragged, causal, two row tiles": (
            Case(batch=3, heads=24, q_len=4),
            [700, 65, 0],
        ),
        "whole requests": (Case(batch=multiprocessors, heads=3), [65] * multiprocessors),
        "kv heads, fp16": (
            Case(batch=2, heads=8, kv_heads=2, q_len=2, dtype="float16"),
            [129, 63],
        ),
        "empty": (Case(batch=2, heads=5, q_len=2), [0, 0]),
        "lengths below q_len, float32 out": (
            Case(batch=2, heads=16, q_len=3, outputs="float32"),
            [1, 2],
        ),
    }


# --- on the GPU ----------------------------------------------------------------------------------


def run_grid(tool: str, only: str | None) -> None:
    """Run the grid or a part; with a planted bug only the call in which it must show, unchecked."""
    import cupy

    cupy.cuda.set_allocator(None)
    cases = grid(cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"])
    if only in PLANTS:
        case, lengths = cases[SPLIT]
        with variants.installed(PLANTS[only]):
            decode(cupy, make_problem(np, case, np.array(lengths)))
    else:
        launched: collections.Counter[tuple[str, str]] = collections.Counter()
        with counted(launched):
            for part in [only] if only else PARTS:
                run_calls(cupy, part, cases, edits=bool(record.TOOLS.get(tool)))
        for (entry, edit), count in sorted(launched.items()):
            print(f"sanitize: {entry} launched {count} times{edit and f', edited: {edit}'}")
    print(DONE)


def append_all(cupy: Any) -> None:
    """Run what writes into caches of both families."""
    for form in ("slots", "requests, rotated"):
        for width in WIDTHS:
            append_rows(cupy, form, width)
        for written in WRITTEN_ROWS:
            append_rows(cupy, form, *written)
        print(f"sanitize: rows by {form}: agree", flush=True)
    append_formats(cupy)
    print("sanitize: rows of formats: agree", flush=True)
    for cache in ("bfloat16", "uint8"):
        append_kv(cupy, cache)
        print(f"sanitize: keys and values into {cache}: agree", flush=True)
    build_masks(cupy)
    print("sanitize: masks: agree", flush=True)


def select_all(cupy: Any) -> None:
    """Run top_k by all its shapes."""
    for name, cluster in SELECTIONS:
        select_rows(cupy, name, cluster)
        print(f"sanitize: top-k, {name} by {cluster}: agrees", flush=True)


def attend_to_pages(cupy: Any) -> None:
    """Attend from queries of different lengths, and with windows, trees and sinks."""
    for ragged in RAGGED:
        attend_ragged(cupy, ragged, batch_invariant=ragged.heads == 8)
    print("sanitize: queries of different lengths: agree", flush=True)
    for sample in (*MLA_MASKS, *MLA_TREES):
        attend_latent_masked(cupy, sample)
    with multiprocessors(2):
        for sample in (*MLA_MASKS[2:5], *MLA_TREES[:3]):
            attend_latent_masked(cupy, sample)
    for sample in (*MLA_WIDTHS, *MLA_WIDE):
        attend_latent_masked(cupy, sample)
    print("sanitize: MLA with windows, trees and sinks: agree", flush=True)


def attend_fp8_caches(cupy: Any, edited: Callable[..., Any]) -> None:
    """Attend to FP8 caches of few heads and of whole tiles of them, also by two thread blocks."""

    def attend(case: Fp8Case, lengths: list[int]) -> None:
        attend_fp8(cupy, make_fp8(np, case, np.array(lengths)))

    with edited("every lane arrives", *variants.FP8_EVERY_LANE_ARRIVES):
        for case, lengths in FP8_CACHES:
            attend(case, lengths)
            print(f"sanitize: FP8 cache, {case.name}: agrees", flush=True)
        with multiprocessors(2):
            for case, lengths in FP8_SEGMENTS:
                attend(case, lengths)
        print("sanitize: FP8 caches by two thread blocks: agree", flush=True)
        for sample in MLA_SINKS:
            attend_with_sinks(cupy, sample)
        print("sanitize: FP8 caches with sinks: agree", flush=True)
        with edited("every lane arrives", *variants.HEADS_64_EVERY_LANE_ARRIVES):
            for sample in MLA_E4M3_WIDTHS:
                attend_latent_masked(cupy, sample)
        print("sanitize: FP8 caches of other widths: agree", flush=True)
    for changes, products in (
        (variants.HEADS_64_EVERY_LANE_ARRIVES, False),
        (variants.FP8_PRODUCTS_EVERY_LANE_ARRIVES, True),
    ):
        with edited("every lane arrives", *changes):
            for sample in MLA_SINKS_64[products:]:
                attend_with_sinks(cupy, sample, fp8_products=products)
        print(f"sanitize: sinks of many heads{', products' * products}: agree", flush=True)
    for kind, changes, cases in (
        ("FP8 cache of many heads", variants.HEADS_64_EVERY_LANE_ARRIVES, FP8_HEADS),
        ("products in e4m3", variants.FP8_PRODUCTS_EVERY_LANE_ARRIVES, FP8_PRODUCTS),
    ):
        with edited("every lane arrives", *changes):
            for case, lengths in cases:
                attend(case, lengths)
                with multiprocessors(2):
                    attend(case, lengths)
                print(f"sanitize: {kind}, {case.name}: agrees", flush=True)


def run_calls(
    cupy: Any, part: str, cases: Mapping[str, tuple[Case, list[int]]], *, edits: bool
) -> None:
    """Run the calls of a part, of the kernels that ship but for those ``edits`` lets be edited."""

    def edited(name: str, *changes: variants.Edit, page_size: int = 64) -> Any:
        return edited_kernels(name, changes, page_size) if edits else contextlib.nullcontext()

    if part == "dense":
        attend_dense(cupy, cases, edited)
    elif part == "fp8":
        attend_fp8_caches(cupy, edited)
    elif part == "lists":
        few = edited("every lane arrives", *variants.SPARSE_EVERY_LANE_ARRIVES)
        plain = edited("every lane arrives", *variants.SPARSE_16_EVERY_LANE_ARRIVES)
        swapped = edited("every lane arrives", *variants.SPARSE_SWAPPED_EVERY_LANE_ARRIVES)
        many = edited("every lane arrives", *variants.HEADS_64_EVERY_LANE_ARRIVES)
        v4 = edited("every lane arrives", *variants.V4_EVERY_LANE_ARRIVES)
        with few, plain, swapped, many, v4:
            attend_to_lists(cupy)
    elif part == "rows":
        write_rows(cupy)
    elif part == "invariant":
        attend_invariantly(cupy)
    elif part in {"heads", "blocks"}:
        few = edited("every lane arrives", *variants.DECODE_EVERY_LANE_ARRIVES)
        with few, edited("every lane arrives", *variants.E4M3_EVERY_LANE_ARRIVES):
            if part == "heads":
                attend_many_heads(cupy)
            else:
                attend_blocks(cupy, edited)
    else:
        score_all(cupy, edited)


def attend_dense(
    cupy: Any, cases: Mapping[str, tuple[Case, list[int]]], edited: Callable[..., Any]
) -> None:
    """Attend to whole latent caches of 16 bits."""
    for name, (case, lengths) in cases.items():
        problem = make_problem(np, case, np.array(lengths))
        for out, lse in decode(cupy, problem):
            problem.check(out, lse)
        print(f"sanitize: {name}: agrees", flush=True)
    for page_size in PAGE_SIZES:
        problem = pages.moved(make_problem(np, *PAGES), page_size)
        for out, lse in decode(cupy, problem):
            problem.check(out, lse)
        print(f"sanitize: pages of {page_size}: agree", flush=True)
    attend_to_pages(cupy)
    with multiprocessors(2):  # pages of 1: several requests and many blocks a part
        with edited("every lane arrives", *variants.SWAPPED_EVERY_LANE_ARRIVES, page_size=1):
            problem = pages.moved(make_problem(np, *PAGES), 1)
            for out, lse in decode(cupy, problem):
                problem.check(out, lse)
        attend_ragged(cupy, RAGGED[1])
    print("sanitize: pages of 1 by two thread blocks: agree", flush=True)


def attend_invariantly(cupy: Any) -> None:
    """Attend to pieces that one part has, and to those that several have."""
    case, lengths = INVARIANT
    problem = make_problem(np, case, lengths)
    for processors in (None, 1):
        with multiprocessors(processors) if processors else contextlib.nullcontext():
            for out, lse in decode(cupy, problem, batch_invariant=True):
                problem.check(out, lse)
    print("sanitize: batch-invariant, pieces in one part and in several: agree", flush=True)


def write_rows(cupy: Any) -> None:
    """Merge, append, quantise, and choose."""
    for count, dtype in ((2, "bfloat16"), (5, "float32")):
        merge_states(cupy, count, dtype, in_place=dtype == "float32")
        print(f"sanitize: {count} merged in {dtype}: agree", flush=True)
    merge_of_ranks(cupy)
    print("sanitize: merged by ranks: agree", flush=True)
    append_all(cupy)
    for dtype in ("bfloat16", "float32"):
        quantize_rows(cupy, dtype)
        print(f"sanitize: FP8 of {dtype}: agrees", flush=True)
    select_all(cupy)


def score_all(cupy: Any, edited: Callable[..., Any]) -> None:
    """The indexer's logits, of sequences and of pages."""
    for clean in (True, False):
        score_sequence(cupy, clean=clean)
        for q_len in (1, 2):
            score_pages(cupy, q_len, clean=clean)
        print(f"sanitize: logits, {'' if clean else 'not '}cleaned: agree", flush=True)
    score_more_pages(cupy)
    print("sanitize: logits of many requests: agree", flush=True)
    score_one_request(cupy, 3)
    print("sanitize: logits of one request: agree", flush=True)
    for heads, head_dim, q_len in LOGITS_SHAPES:
        score_sequence(cupy, heads=heads, head_dim=head_dim)
        score_pages(cupy, q_len, batch=3, mean=130, heads=heads, head_dim=head_dim)
        print(f"sanitize: logits of {heads} heads of {head_dim}: agree", flush=True)
    frees = variants.EVERY_LANE_FREES
    with edited("every lane frees", *frees), multiprocessors(2):
        score_sequence(cupy, seq_len=60, seq_len_kv=700, ranges="causal")
        with edited("loaders wait together", *frees, variants.LOADERS_WAIT_TOGETHER):
            for q_len in (1, 2, 5):
                score_pages(cupy, q_len, batch=9, mean=900)
            score_pages(cupy, 3, batch=7, mean=400)  # 19 blocks each, of a ring of 12
    one_request = variants.ONE_REQUEST_EVERY_LANE_FREES
    with edited("every lane frees", *one_request), multiprocessors(2):
        score_one_request(cupy, 2000)
    print("sanitize: logits by two thread blocks, all memory used again: agree", flush=True)


_edits: dict[int, str] = {}
"""The name of its edit, by the handle of an edited kernel."""


@contextlib.contextmanager
def edited_kernels(name: str, changes: tuple[variants.Edit, ...], page_size: int) -> Iterator[None]:
    """`variants.installed`, under a name that the log tells."""
    with variants.installed(*changes, page_size=page_size):
        specs = [
            s for stem in variants.stems_of(changes) for s in variants.specs_of(stem, page_size)
        ]
        handles = [module._loaded[spec, 0].handle for spec in specs]
        _edits.update(dict.fromkeys(handles, name))
        yield
        for handle in handles:  # the next kernel to be loaded may get it
            del _edits[handle]


@contextlib.contextmanager
def counted(launched: collections.Counter[tuple[str, str]]) -> Iterator[None]:
    """Count launches by entry point and edit."""
    launch_it = PreparedLaunch.__call__

    def launch(self: PreparedLaunch) -> None:
        launched[self._kernel.spec.entry, _edits.get(self._kernel.handle, "")] += 1
        launch_it(self)

    with mock.patch.object(PreparedLaunch, "__call__", launch):
        yield


def merge_states(cupy: Any, count: int, dtype: str, *, in_place: bool) -> None:
    """Merge partial results, one row of which has weight 0, into memory of their own or not."""
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((count, 2, 3, 5, 72)).astype(NUMPY_DTYPES[dtype])
    lses = rng.standard_normal((count, 2, 3, 5), np.float32)
    outs[1, 0, 1, 2], lses[1, 0, 1, 2] = np.nan, -np.inf
    bits = np.uint32 if dtype == "float32" else np.uint16
    partials = list(typed(cupy.asarray(outs.view(bits)), dtype))
    logarithms = list(cupy.asarray(lses))
    options = {"out": partials[1], "lse": logarithms[1]} if in_place else {}
    out, lse = cumla.merge_attention_states(partials, logarithms, **options)
    assert_merged(typed(out.view(bits).get(), dtype), lse.get(), outs, lses, lse_base=math.e)


def merge_of_ranks(cupy: Any, ranks: int = 3) -> None:
    """Merge on one GPU what ranks have written, one rank after the other.

    Each finds that those before it came, and is told that those after it did; numbers wrap around.
    """
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((ranks, 9, 5, 72), np.float32)
    lses = rng.standard_normal((ranks, 9, 5), np.float32)
    partials, logarithms = list(cupy.asarray(outs)), list(cupy.asarray(lses))
    blocks = merge_blocks(45, 18, ranks)
    counters = cupy.zeros((ranks, MOST_BLOCKS, ranks), np.uint32)
    counters[:, :blocks] = 0xFFFFFFFE
    at = address_of(counters)
    step = counters.nbytes // ranks
    tables = tuple(range(at, at + counters.nbytes, step))
    for turn in (0xFFFFFFFF, 0, 1):
        for rank in range(ranks):
            later = counters[rank, :blocks, rank + 1 :]
            later += 1
            merge = MergeOfRanks(Meeting(rank, tables, 1_000_000_000))
            out, lse = merge(partials, logarithms)
            assert_merged(out.get(), lse.get(), outs, lses, lse_base=math.e)
            later -= 1
        expected = np.zeros_like(counters.get())
        expected[:, :blocks] = turn
        np.testing.assert_array_equal(counters.get(), expected)


def address_of(array: Any) -> int:
    """Tell where an array lies: CuPy's, or the emulator's."""
    return int(array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data)


WRITTEN_ROWS = tuple(
    (width, cache or halves, rows or halves, halves)
    for (halves, cache, rows), width in zip(
        itertools.product(("bfloat16", "float16"), ("", "uint8"), ("", "float32")),
        ((256, 64), (1024, 32), (512, 0), (256, 32), (1024, 64), (512, 32), (256, 0), (1024, 64)),
        strict=True,
    )
)
"""One width for each writer of other widths: dtypes of its caches, rows and queries."""


def append_rows(
    cupy: Any,
    form: str,
    width: Width = WIDTH,
    of_cache: str = "bfloat16",
    of_rows: str = "bfloat16",
    of_queries: str = "bfloat16",
) -> None:
    """Write rows into a cache, and compare all of it; some of their places do not exist.

    Beside e4m3 numbers the factor is 0.5; some of them saturate. Queries turn as rows do.
    """
    rng = np.random.default_rng(0)
    tokens, (latent, rope) = 37, width
    rows = rng.standard_normal((tokens, 2, latent + rope), dtype=np.float32)
    rows = (rows * rng.choice([1e-3, 1, 300], (tokens, 2, 1))).astype(NUMPY_DTYPES[of_rows])
    cache = np.zeros((5, 16, 2, latent + rope), NUMPY_DTYPES.get(of_cache, np.dtype(np.uint8)))
    arguments: dict[str, Any] = {"slot_mapping": rng.permutation(100)[:tokens] - 10}
    if form != "slots" and rope:
        quarter_turns = np.zeros((20, rope), np.float32)
        quarter_turns[:, rope // 2 :] = 1
        arguments = {
            "batch_indices": np.arange(tokens) % 3 - 1,
            "positions": np.arange(tokens) - 3,
            "block_table": np.array([[4, 2147480000, 1], [0, -1, 3]], np.int32),
            "cos_sin": quarter_turns,
            "q_pe": rng.standard_normal((tokens, 19, rope)).astype(NUMPY_DTYPES[of_queries]),
            "interleaved": form != "requests, rotated by halves",
        }
    named: dict[str, Any] = {}
    if of_cache == "uint8":
        named["kv_scale"] = 0.5
        if width == (256, 32):  # as wide as another format
            named["cache_format"] = "e4m3_288"
    given = {name: there(cupy, value) for name, value in arguments.items()}
    device = there(cupy, cache)
    cumla.append_mla_cache(there(cupy, rows), device, **given, **named)
    cumla.reference.append_mla_cache(rows, cache, **arguments, **named)
    np.testing.assert_array_equal(_bits_on_host(device), cache.view(f"u{cache.itemsize}"))
    if "q_pe" in given:
        np.testing.assert_array_equal(
            _bits_on_host(given["q_pe"]), arguments["q_pe"].view(np.uint16)
        )


def _bits_on_host(array: Any) -> np.ndarray:
    found: np.ndarray = array.view(f"u{array.dtype.itemsize}").get()
    return found


def append_formats(cupy: Any) -> None:
    """Write rows of formats of bytes; those with RoPE columns also rotated, by quarter turns."""
    rng = np.random.default_rng(0)
    tokens, bf16 = 37, NUMPY_DTYPES["bfloat16"]
    rows = rng.standard_normal((tokens, 512)).astype(bf16)
    slots = rng.permutation(100)[:tokens] - 10
    turns = np.zeros((20, 64), np.float32)
    turns[:, 32:] = 1
    rotated = {"positions": np.arange(tokens) - 3, "cos_sin": turns}
    for form, nbytes in (("v32_no_rope", 528), ("v41", 528), ("v41_fp4", 288)):
        for more in ({}, rotated) if form != "v32_no_rope" else ({},):
            cache = np.zeros((5, 16, 1, nbytes), np.uint8)
            there = cupy.asarray(cache)
            given = {name: cupy.asarray(array) for name, array in more.items()}
            bits = typed(cupy.asarray(rows.view(np.uint16)), "bfloat16")
            cumla.append_mla_cache(bits, there, cupy.asarray(slots), cache_format=form, **given)
            cumla.reference.append_mla_cache(rows, cache, slots, cache_format=form, **more)
            np.testing.assert_array_equal(there.get(), cache)


def append_kv(cupy: Any, cache: str) -> None:
    """Write keys and values, of other columns, and rotate; a few tokens have no place."""
    rng = np.random.default_rng(0)
    bf16 = NUMPY_DTYPES["bfloat16"]
    dtype = bf16 if cache == "bfloat16" else np.dtype(np.uint8)
    quarter_turns = np.zeros((40, 32), np.float32)
    quarter_turns[:, 16:] = 1
    host: dict[str, Any] = {
        "k": rng.standard_normal((37, 3, 64)).astype(bf16),
        "v": rng.standard_normal((37, 3, 16)).astype(bf16),
        "q": rng.standard_normal((37, 6, 64)).astype(bf16),
        "k_cache": np.zeros((5, 16, 3, 64), dtype),
        "v_cache": np.zeros((5, 16, 3, 16), dtype),
        "kv_lens": np.array([20, 3, 48], np.int32),
        "qo_indptr": np.array([0, 20, 25, 35], np.int32),
        "block_table": np.array([[4, 2147480000, 1], [0, -1, 3], [2, 5, 1]], np.int32),
        "cos_sin": quarter_turns,
    }
    if cache != "bfloat16":
        host["k_scale"] = np.array([[0.5, 1, 2]] * 3, np.float32)
    there = {
        name: cupy.asarray(a.view(np.uint16) if a.dtype == bf16 else a) for name, a in host.items()
    }
    given = {name: a.view(host[name].dtype) for name, a in there.items()}
    cumla.append_kv_cache(**given)
    cumla.reference.append_kv_cache(**host)
    for name in ("q", "k_cache", "v_cache"):
        np.testing.assert_array_equal(there[name].get().view(host[name].dtype), host[name])


def build_masks(cupy: Any) -> None:
    """Build intervals and trees, in each form of their arrays, and from any integers."""
    cases = [case for case in interval_cases() if case.batch.lead == 2][::3] + tree_cases()[::4]
    calls = [(case.builder, case.given | case.batch.places) for case in cases]
    calls += [
        (builder, given) for builder, given, is_ordered in map(hostile, range(40)) if is_ordered
    ]
    for builder, given in calls:
        there = {n: cupy.asarray(v) if hasattr(v, "shape") else v for n, v in given.items()}
        got = getattr(AttentionMask, builder)(**there).given
        for name, expected in getattr(AttentionMask, builder)(**given).given.items():
            np.testing.assert_array_equal(got[name].get(), expected)


def share_prefixes(cupy: Any) -> None:
    """Find groups, and attend with them: MHA with and without causality, and MLA."""
    for batch, least in prefix_cases.detection_cases().values():
        tables = [there(cupy, array) for array in batch[:3]]
        found = cumla.find_prefix_groups(*tables, page_size=batch.page_size, min_tokens=least)
        arrays = [array.get().tolist() for array in found]
        assert arrays == list(expected_groups(batch, least))
    chosen = [s for s in prefix_cases.samples(96) if max(s.columns) <= 128][:10:2]
    for sample in chosen:
        problem, options = prefix_cases.make(sample)
        given = {name: there(cupy, value) for name, value in problem.given.items()}
        more = {name: there(cupy, value) for name, value in options.items()}
        tables = [given[name] for name in ("block_table", "kv_lens", "qo_indptr")]
        size = problem.batch.page_size
        groups = cumla.find_prefix_groups(*tables, page_size=size, min_tokens=64)
        shape = *problem.given["q"].shape[:-1], problem.given["v"].shape[-1]
        lse = cupy.zeros(shape[:-1], "f4")  # rows of no request are not written to
        outs = {"out": cupy.zeros(shape, dtype=given["q"].dtype), "lse": lse}
        out, lse = cumla.attention(**given, **more, **outs, groups=groups)
        host = out.view(f"u{out.dtype.itemsize}").get().view(out.dtype)
        rounding = attention_cases.ROUNDING[sample.dtype]
        prefix_cases.check(problem, cumla.AttentionState(host, lse.get()), rounding, **options)
    groups = [prefix_cases.Group(3, 256), prefix_cases.Group(2, 64, (90,))]
    batch = prefix_cases.batch_of(groups, 64, (1, 2))
    tables = [there(cupy, array) for array in batch[:3]]
    rng = np.random.default_rng(0)
    shapes = (7, 16, 576), (batch.num_pages, 64, 576)
    host = [rng.standard_normal(shape).astype(np.float16) for shape in shapes]
    lengths = {"block_table": batch.block_table, "kv_lens": batch.kv_lens}
    expected = cumla.mla_attention(*host, **lengths, qo_indptr=batch.qo_indptr)
    at = {"block_table": tables[0], "kv_lens": tables[1], "qo_indptr": tables[2]}
    found = cumla.find_prefix_groups(*tables, page_size=64, min_tokens=64)
    out, lse = cumla.mla_attention(*(there(cupy, a) for a in host), **at, groups=found)
    np.testing.assert_allclose(out.get(), expected.out, atol=4e-3)
    np.testing.assert_allclose(lse.get(), expected.lse, atol=2e-4)


def quantize_rows(cupy: Any, dtype: str) -> None:
    """Quantise rows alone, into the indexer's pages and into FP8 caches; some have no place."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((37, 576)).astype(NUMPY_DTYPES[dtype])
    slots = rng.permutation(100)[:37] - 10
    given, at = there(cupy, rows), cupy.asarray(slots)
    for got, expected in zip(
        cumla.quantize_fp8(given), cumla.reference.quantize_fp8(rows), strict=True
    ):
        np.testing.assert_array_equal(got.get().view(np.uint8), expected.view(np.uint8))
    for shape in ((5, 16, 132), (5, 16, 576), (5, 16, 656), (5, 16, 584)):
        host, device = np.zeros(shape, np.uint8), cupy.zeros(shape, dtype=np.uint8)
        if shape[2] == 132:
            cumla.append_indexer_cache(given[:, :128], device, at)
            cumla.reference.append_indexer_cache(rows[:, :128], host, slots)
        else:
            latent = 448 if shape[2] == 584 else 512  # parts of their own: none is read beyond
            both = rows[:, :latent], rows[:, latent : latent + 64]
            cumla.append_mla_cache(there(cupy, both), device, at)
            cumla.reference.append_mla_cache(rows[:, : latent + 64], host, slots)
        np.testing.assert_array_equal(device.get(), host)
    host, device = np.zeros((5, 16, 68), np.uint8), cupy.zeros((5, 16, 68), dtype=np.uint8)
    cumla.append_indexer_cache(given[:, :128], device, at, cache_format="mxfp4")
    cumla.reference.append_indexer_cache(rows[:, :128], host, slots, cache_format="mxfp4")
    np.testing.assert_array_equal(device.get(), host)


def select_rows(cupy: Any, name: str, cluster: int, dtype: str = "float32") -> None:
    """Select from rows of all kinds with one shape of the kernel: slots, positions and values.

    Memory has the scores of the rows alone: initcheck tells of any other that is read.
    """
    shape = top_k._SHAPES[name]
    width = 8900 if shape.is_sampled else 4500  # more than the list: a sample is taken
    starts, pages = np.array([0, 2, 3, 1], np.int32), width // 64 + 1
    lengths = np.array([width, width - 497, 2049, 100], np.int32)
    table = np.random.default_rng(1).permutation(300)[: 2 * pages].reshape(2, pages)
    table = table.astype(np.int32)
    some = {"row_to_request": np.array([1, 0, 7, 1], np.int32), "block_table": table}
    some |= {"row_lens": lengths, "row_starts": starts, "offsets": np.array([0, 3, 0, 9], np.int32)}
    for i, kind in enumerate(("normal", "crowded", "equal", "special")):
        k = 4200 if i == 0 and shape.takes_turns else 600
        host = scores_of(kind, 4, width + 5, dtype)[:, 5:]
        bits = host.view(f"u{host.itemsize}")
        memory = cupy.empty((4, width + 5), dtype=bits.dtype)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            own = slice(start, start + length)
            memory[row, 5:][own] = cupy.asarray(np.ascontiguousarray(bits[row, own]))
        there = memory.view(host.dtype)[:, 5:]
        given = {key: cupy.asarray(value) for key, value in some.items()}
        options = {"page_size": 64, "values": True, "sorted": bool(i % 2)}
        want_positions, positions = np.empty((4, k), np.int32), cupy.zeros((4, k), dtype=np.int32)
        want = cumla.reference.top_k(host, k, out_positions=want_positions, **some, **options)
        with shaped(name, cluster):
            got = cumla.top_k(there, k, out_positions=positions, **given, **options)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one.get().view(np.uint8), other.view(np.uint8))


@contextlib.contextmanager
def multiprocessors(count: int) -> Iterator[None]:
    """Let work be shared out to this many only: memory is used again in small cases."""
    few = replace(devices.properties(0), sm_count=count)
    real = devices.properties
    with contextlib.ExitStack() as stack:
        for name, imported in [*sys.modules.items()]:  # wherever it was imported to
            if name.startswith("cumla.") and getattr(imported, "properties", None) is real:
                stack.enter_context(mock.patch.object(imported, "properties", return_value=few))
        variants.forget_launches()
        stack.callback(variants.forget_launches)
        yield


def score_sequence(
    cupy: Any,
    *,
    clean: bool = True,
    seq_len: int = 21,
    seq_len_kv: int = 300,
    ranges: str = "packed",
    heads: int = 64,
    head_dim: int = 128,
) -> None:
    """Score tokens for the queries of several requests; compressed into bfloat16 if not clean."""
    width, dtype = (0, "float32") if clean else (40, "bfloat16")
    problem = Prefill(np, seq_len, seq_len_kv, heads, head_dim, ranges)
    out = Rows(np, problem.seq_len, width or problem.seq_len_kv, dtype)
    given = uploaded(cupy, problem.arrays)
    logits = score(cupy, cumla.mqa_logits, given, out, max_kv_len=width or None, clean=clean)
    check_logits(np, logits, problem.expected(width), clean=clean)


def score_pages(
    cupy: Any,
    q_len: int,
    *,
    clean: bool = True,
    batch: int = 5,
    mean: int = 200,
    heads: int = 64,
    head_dim: int = 128,
    page_size: int = 64,
    form: str | None = None,
) -> None:
    """Score the tokens of ragged requests, in a call of its own and with a plan."""
    form = form or ("pair" if clean else "fused")
    problem = Paged(np, batch, q_len, mean, heads, head_dim, page_size, form=form)
    columns = int(problem.lengths.max()) + 9
    given = uploaded(cupy, problem.arrays)
    plan = cumla.PagedMQALogitsPlan.from_arrays(*given[:2], *given[3:], **problem.options)
    plan.update(given[4])
    run = functools.partial(plan.run, block_table=given[3])
    call = functools.partial(cumla.paged_mqa_logits, **problem.options)
    for function, arrays in ((call, given), (run, given[:3])):
        out = Rows(np, batch * q_len, columns, "float32")
        logits = score(cupy, function, arrays, out, max_kv_len=columns, clean=clean)
        problem.check(logits, clean=clean)


def score_one_request(cupy: Any, tokens: int) -> None:
    """A request alone; of 2,000 tokens a multiprocessor rings hold fewer blocks than there are."""
    mean = tokens * devices.properties(0).sm_count
    for heads, q_len, page_size in ((64, 1, 64), (32, 2, 16)):
        score_pages(cupy, q_len, batch=1, mean=mean, heads=heads, page_size=page_size)


def score_more_pages(cupy: Any) -> None:
    """Requests that are scheduled by 1,024 threads, and keys of 68 bytes."""
    score_pages(cupy, 1, batch=300, mean=30)
    for q_len in (1, 3, 8):
        score_pages(cupy, q_len, batch=3, mean=400, form="mxfp4")


def score(cupy: Any, function: Any, arrays: tuple[Any, ...], out: Rows, **options: Any) -> Any:
    """Logits on the host, written into a part of poisoned memory, around which nothing changes."""
    there = cupy.asarray(out.base)
    part = there[1:-1, MARGIN:-MARGIN].view(out.array.dtype)
    function(*arrays, out=part, **options)
    out.base[...] = there.get()
    out.check_guards()
    return out.array


def uploaded(cupy: Any, arrays: Any) -> Any:
    """The same on the device, numbers of one byte as such."""
    if isinstance(arrays, tuple):
        return tuple(uploaded(cupy, array) for array in arrays)
    return cupy.asarray(arrays.view(np.uint8) if arrays.itemsize == 1 else arrays)


def on_device(cupy: Any, array: Any, dtype: str) -> Any:
    """One array of query or cache, or a pair, without anything between their rows."""
    if isinstance(array, tuple):
        return tuple(on_device(cupy, part, dtype) for part in array)
    return typed(cupy.asarray(np.ascontiguousarray(array.view(np.uint16))), dtype)


def decode(
    cupy: Any, problem: Problem, *, batch_invariant: bool = False
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Results, on the host, of a call of its own and, allocated, of each kernel that can serve."""
    case = problem.case
    q, kv = (on_device(cupy, x, case.dtype) for x in (problem.q, problem.kv_cache))
    table, lengths = cupy.asarray(problem.block_table), cupy.asarray(problem.lengths)
    options: dict[str, Any] = {}
    if case.outputs == "float32":
        options["out"] = cupy.empty(problem.out_shape, dtype=cupy.float32)
    ways: dict[str, Any] = {"causal": case.causal, "batch_invariant": batch_invariant}
    longest = int(problem.lengths.max()) if batch_invariant else None
    results = [cumla.mla_decode(q, kv, table, lengths, **ways, **options)]
    for variant in case.variants:
        there = replace(problem, q=q, kv_cache=kv)
        plan = plan_of(there, variant, max_kv_len=longest, batch_invariant=batch_invariant)
        plan.update(lengths)
        results.append(plan.run(q, kv, block_table=table))
    host = []
    for out, lse in results:
        dtype = str(out.dtype)
        bits = out.view(np.uint32 if dtype == "float32" else np.uint16).get()
        host.append(
            (bits.view(np.float32) if dtype == "float32" else typed(bits, dtype), lse.get())
        )
    return host


def attend_ragged(cupy: Any, case: Ragged, **more: Any) -> None:
    """Queries of different lengths, each row of which some request has."""
    problem = make_ragged(np, case)
    given = {
        name: on_device(cupy, array, case.dtype)
        if name in ("q", "kv_cache")
        else cupy.asarray(array)
        for name, array in problem.arguments.items()
        if name != "causal" and array is not None
    }
    out, lse = cumla.mla_attention(**problem.arguments | given, **more)
    problem.check(typed(out.view(np.uint16).get(), case.dtype), lse.get())


def attend_latent_masked(cupy: Any, sample: masked_mla.Sample) -> None:
    """MLA with windows and sinks."""
    problem = masked_mla.make(sample)
    masked_mla.check(problem, *_attend_masked_mla(cupy, problem))


def attend_with_sinks(cupy: Any, sample: masked_mla.Sample, **options: Any) -> None:
    """MLA over an FP8 cache with sinks, beside the same without them."""
    problem = masked_mla.make(sample)
    both = problem, masked_mla.without_sinks(problem)
    found = [_attend_masked_mla(cupy, one, "f4", **options) for one in both]
    masked_mla.check_sinks(problem, *found)


def _attend_masked_mla(
    cupy: Any, problem: masked_mla.Problem, dtype: Any = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    given = {name: there(cupy, value) for name, value in problem.given.items()}
    shape, own = problem.given["q"].shape[:-1], problem.given["q"].dtype
    # Rows of no request are not written to.
    latent = problem.sample.width[0]
    outs = {"out": cupy.zeros((*shape, latent), dtype=dtype or own), "lse": cupy.zeros(shape, "f4")}
    out, lse = problem.call(**given, **options, **outs)
    return out.view(f"u{out.dtype.itemsize}").get().view(out.dtype), lse.get()


def attend_many_heads(cupy: Any) -> None:
    """All forms of keys and values: pages, rows, e4m3, float32."""
    for sample in attention_cases.samples(4, lens=(130, 3)):  # pages, rows, windows, sinks
        attend_mha(cupy, sample)
    with multiprocessors(3):  # what is cut, and several row tiles and many blocks a part
        for columns in (64, 512):
            fixed = {"lens": (2000, 70), "columns": (columns, columns), "page_size": 16}
            for sample in attention_cases.samples(2, **fixed, cache="same"):
                attend_mha(cupy, sample)
        for sample in attention_cases.samples(1, lens=(2000, 70), columns=(64, 64), cache="e4m3"):
            attend_mha(cupy, replace(sample, queries="many"))
            attend_mha(cupy, sample, batch_invariant=True)
        for cache in ("e4m3", "same"):  # few rows, which are eight of a kv head here, or 16
            few = {"lens": (2000, 70), "columns": (64, 64), "queries": "uniform", "window": None}
            for heads in ((8, 2), (8, 1)):
                for sample in attention_cases.samples(2, **few, cache=cache, heads=heads):
                    attend_mha(cupy, sample)
    with multiprocessors(1):
        few |= {"lens": (300, 70, 16, 130), "dtype": "bfloat16"}  # many tiles of few rows
        for cache, *columns in (
            ("e4m3", 64, 64),
            ("e4m3", 192, 128),
            ("e4m3", 256, 256),
            ("same", 64, 64),
        ):
            few["columns"] = tuple(columns)
            for heads in ((8, 2), (16, 1)):
                for sample in attention_cases.samples(1, **few, cache=cache, heads=heads):
                    attend_mha(cupy, sample)
        for page_size in (3, 16):
            fixed = attention_cases.MANY | {"columns": (64, 64), "dtype": "bfloat16"}
            for sample in attention_cases.samples(2, page_size=page_size, **fixed):
                attend_mha(cupy, sample)
    with multiprocessors(3):  # two kv heads a thread block
        for fixed in attention_cases.PAIRS:
            for sample in attention_cases.samples(1, **fixed, dtype="bfloat16"):
                attend_mha(cupy, sample)
    for fixed in attention_cases.FEW_ROWS[:4]:
        for sample in attention_cases.samples(1, **fixed, dtype="bfloat16"):
            attend_mha(cupy, sample)
    with multiprocessors(7):  # row tiles whose keys are split
        for columns in ((64, 64), (128, 128)):
            fixed = attention_cases.DRAFTS | {"columns": columns, "dtype": "bfloat16"}
            for sample in attention_cases.samples(2, page_size=16, **fixed):
                attend_mha(cupy, sample)
    for sample in attention_cases.samples(2, lens=(130, 3), dtype="float32"):
        attend_mha(cupy, sample)
    print("sanitize: attention of many heads: agrees", flush=True)
    attend_by_masks(cupy)
    attend_by_biases(cupy)
    share_prefixes(cupy)
    print("sanitize: shared prefixes: agree", flush=True)


def attend_by_masks(cupy: Any) -> None:
    """All forms of keys and values with arrays that say what is seen, and full row tiles."""
    few = masked.samples(84)[:70:7]
    kinds = [("windows", {}), ("prefix", {}), ("tree", {}), ("chunks", {"cache": "e4m3"})]
    for sample, (mask, more) in zip(few, [*kinds, *kinds], strict=False):
        attend_masked(cupy, sample._replace(mask=mask, **more))
    attend_masked(cupy, few[0]._replace(dtype="float32", cache="same"))
    with multiprocessors(1):
        fixed = {"q_lens": (64, 64, 64), "heads": (8, 1), "cache": "same", "page_size": 16}
        for sample, (mask, _) in zip(few, kinds, strict=False):
            for columns in ((64, 64), (128, 128)):
                full = sample._replace(mask=mask, columns=columns, dtype="bfloat16", **fixed)
                attend_masked(cupy, full)
            pairs = {"q_lens": "equal", "heads": (4, 2), "columns": (96, 96), "page_size": 64}
            attend_masked(cupy, full._replace(**pairs))
    with multiprocessors(7):  # keys of one request's row tiles are split
        one = fixed | {"q_lens": (40,), "heads": (16, 1), "columns": (64, 64)}
        for sample, (mask, _) in zip(few, kinds, strict=False):
            attend_masked(cupy, sample._replace(mask=mask, dtype="bfloat16", **one))
    print("sanitize: attention with masks: agrees", flush=True)


def attend_blocks(cupy: Any, edited: Callable[..., Any]) -> None:
    """Lists of blocks, cut into parts or not, of all forms; scores, and their choice."""

    def attend(sample: block_cases.Sample, count: int) -> None:
        problem = block_cases.make(sample)
        given = {name: there(cupy, value) for name, value in problem.given.items()}
        with multiprocessors(count):
            got = cumla.block_sparse_attention(**given)
        host = [a.view(f"u{a.dtype.itemsize}").get().view(a.dtype) for a in got]
        block_cases.check(problem, cumla.AttentionState(*host), sample.dtype)

    for sample in BLOCKS:
        for count in (132, 3):
            attend(sample, count)
    with edited("every lane arrives", *variants.LISTED_EVERY_LANE_ARRIVES):
        for sample in PROMPTS:  # whose query tokens share row tiles
            attend(sample, 2)
    scores = [
        draw(seed) for seed in range(9) for draw in (score_cases.scores_case, score_cases.few_case)
    ]
    for case in (*scores, *map(score_cases.long_case, score_cases.DTYPES)):
        given = {name: there(cupy, value) for name, value in case.given.items()}
        score_cases.check_scores(case, cumla.block_scores(**given).get())
    draws = score_cases.sums_case, score_cases.pooled_case, score_cases.prompts_case
    for case in (draw(seed) for seed in range(9) for draw in draws):
        given = {name: there(cupy, value) for name, value in case.given.items()}
        score_cases.check_sums(case, cumla.block_scores(**given).get())
    for seed in range(9):
        wanted = score_cases.select_case(seed)
        if wanted["scores"].size < 50_000:
            given = {name: there(cupy, value) for name, value in wanted.items()}
            got = cumla.select_blocks(**given).get()
            np.testing.assert_array_equal(got, score_cases.chosen(wanted))
    for case in (step_cases.Case(q_len=2), step_cases.Case(q_len=0, init_blocks=1)):
        arrays = case.arguments()
        given = {name: there(cupy, value) for name, value in arrays.items()}
        step = case.step(given)
        case.update(step, given)
        lists, out, _ = case.expected(arrays)
        np.testing.assert_array_equal(case.select(step, given).get(), lists)
        np.testing.assert_allclose(case.run(step, given).out.get(), out, atol=4e-3)
    print("sanitize: blocks of GQA: agree", flush=True)


def attend_masked(cupy: Any, sample: masked.Sample) -> None:
    problem = masked.make(sample)
    given = {name: there(cupy, value) for name, value in problem.given.items()}
    arrays = {name: cupy.asarray(array) for name, array in problem.mask.given.items()}
    shape = (*problem.given["q"].shape[:-1], problem.given["v"].shape[-1])
    # Rows of no request are not written to.
    outs = {"out": cupy.zeros(shape, dtype=given["q"].dtype), "lse": cupy.zeros(shape[:-1], "f4")}
    found, lse = cumla.attention(**given, **outs, mask=AttentionMask(**arrays))
    host = found.view(f"u{found.dtype.itemsize}").get().view(found.dtype)
    masked.check(problem, cumla.AttentionState(host, lse.get()), sample.dtype)


def attend_by_biases(cupy: Any) -> None:
    """All forms of keys and values with biases of each kind, and full row tiles."""
    few = biased.samples(72)[:42:7]
    for kind, sample in few:
        attend_biased(cupy, kind, sample)
        attend_biased(cupy, kind, sample._replace(dtype="bfloat16", cache="e4m3"))
    attend_biased(cupy, few[0][0], few[0][1]._replace(dtype="float32", cache="same"))
    with multiprocessors(1):
        fixed = {"q_lens": (64, 64, 64), "heads": (8, 1), "cache": "same", "page_size": 16}
        rows = {"q_lens": "equal", "heads": (4, 2), "page_size": 64}  # tiles of eight rows
        for kind, sample in few[:5:2]:  # slopes, and tables of rows and of heads
            for columns in ((64, 64), (128, 128), (256, 256)):
                full = sample._replace(columns=columns, dtype="bfloat16", **fixed)
                attend_biased(cupy, kind, full)
                attend_biased(cupy, kind, full._replace(**rows))
    print("sanitize: attention with biases: agrees", flush=True)


def attend_biased(cupy: Any, kind: str, sample: masked.Sample) -> None:
    call = biased.make(kind, sample)
    given = {name: there(cupy, value) for name, value in call.problem.given.items()}
    shape = (*call.problem.given["q"].shape[:-1], call.problem.given["v"].shape[-1])
    # Rows of no request are not written to.
    outs = {"out": cupy.zeros(shape, dtype=given["q"].dtype), "lse": cupy.zeros(shape[:-1], "f4")}
    bias = call.bias(lambda array: there(cupy, array))
    found, lse = cumla.attention(**given, **outs, **call.options, bias=bias)
    host = found.view(f"u{found.dtype.itemsize}").get().view(found.dtype)
    biased.check(call, cumla.AttentionState(host, lse.get()), sample.dtype)


def attend_mha(cupy: Any, sample: attention_cases.Sample, **options: Any) -> None:
    """Keys and values of many heads; copies have no gaps between rows."""
    if sample.outputs == "new":  # its rows of no request would be copied without ever being written
        sample = replace(sample, outputs="given")
    host = attention_cases.make(sample)
    there = {}
    for name, value in host.items():
        if isinstance(value, np.ndarray):
            flat = np.ascontiguousarray(value)
            value = cupy.asarray(flat.view(f"u{flat.itemsize}")).view(flat.dtype)
        there[name] = value
    out, lse = cumla.attention(**there, **options)
    found = out.view(f"u{out.dtype.itemsize}").get().view(out.dtype), lse.get()
    attention_cases.check(sample, found, cumla.reference.attention(**host))


def there(cupy: Any, array: Any) -> Any:
    """An array or a tuple of arrays on the device, without gaps between rows; all else as it is."""
    if isinstance(array, tuple):
        return tuple(there(cupy, part) for part in array)
    if not isinstance(array, np.ndarray):
        return array
    flat = np.ascontiguousarray(array)
    return cupy.asarray(flat.view(f"u{flat.itemsize}")).view(flat.dtype)


def attend_to_lists(cupy: Any) -> None:
    """All forms of caches, by all thread blocks and by two."""
    for case in SPARSE:
        attend_sparse(cupy, case)
        print(f"sanitize: lists, {case.name}: agree", flush=True)
    for case in V4:
        attend_v4(cupy, case)
        print(f"sanitize: lists, {case.name}: agree", flush=True)
    for case in MAX_LOGITS:
        attend_with_max_logits(cupy, case)
        print(f"sanitize: lists, max_logits, {case.name}: agree", flush=True)
    with multiprocessors(2):
        for case in MAX_LOGITS:
            attend_with_max_logits(cupy, replace(case, batch=3 + case.batch))
        for case in SPARSE:
            attend_sparse(cupy, replace(case, batch=3 + case.batch))
        for case in V4:
            attend_v4(cupy, replace(case, batch=3 + case.batch))
        for case in OF_A_LARGE_CACHE:
            attend_with_max_logits(cupy, case, is_large=True)
    print("sanitize: lists by two thread blocks: agree", flush=True)


def attend_sparse(cupy: Any, case: SparseCase) -> None:
    """A call of its own, a batch-invariant one, and one with a plan."""
    problem = make_sparse(np, case)
    cache = problem.arguments["kv_cache"]
    given = {name: there(cupy, array) for name, array in problem.arguments.items()}
    if case.gaps:  # copied with what lies between its pages
        given["kv_cache"] = with_gaps(cupy, cache)
    decodes = case.operation == "decode"
    call = cumla.mla_sparse_decode if decodes else cumla.mla_sparse_attention
    plan = cumla.MLASparsePlan.from_arrays(*(given[n] for n in ("q", "kv_cache", "indices")))
    lengths = given.get("topk_lens")
    plan.update(lengths)
    inputs = {name: array for name, array in given.items() if name != "topk_lens"}
    expected = problem.expected()
    for out, lse in (call(**given), call(**given, batch_invariant=True), plan.run(**inputs)):
        problem.check(typed(out.view(np.uint16).get(), case.dtype), lse.get(), expected)


def attend_v4(cupy: Any, case: V4Case) -> None:
    """Rows of 512 columns, in the same ways."""
    problem = make_v4(np, case)
    given = {name: there(cupy, array) for name, array in problem.arguments.items()}
    for name in problem.memory.keys() if case.is_fp8 else ():  # with what lies between pages
        given[name] = problem.view_of(name, cupy.asarray(problem.memory[name]))
    decodes = case.operation == "decode"
    call = cumla.mla_sparse_decode if decodes else cumla.mla_sparse_attention
    moved = replace(problem, arguments=given)
    plan = moved.plan()
    expected = problem.expected()
    results = (call(**given), call(**given, batch_invariant=True), plan.run(**moved.inputs))
    for out, lse in results:
        problem.check(typed(out.view(np.uint16).get(), case.dtype), lse.get(), expected)


def attend_with_max_logits(cupy: Any, case: SparseCase, *, is_large: bool = False) -> None:
    """As FlashMLA's prefill does; all but max_logits has the bits of the kernel without them.

    Not for lists of few heads, whose kernel without them has other bits. Those of up to 64 heads
    over 512 columns may be read by the kernel, and are then compared with the reference.
    """
    problem = make_v4(np, case) if isinstance(case, V4Case) else make_sparse(np, case)
    if is_large:
        problem = in_a_larger_cache(problem)
    given = {name: there(cupy, array) for name, array in problem.arguments.items()}
    arrays = [given.get(n) for n in ("q", "kv_cache", "indices", "topk_lens", "sinks")]
    out, lse, max_logits = attend_as_flash_mla(*arrays, case.softmax_scale)
    wanted = largest_scores(
        *(problem.arguments[n] for n in ("q", "kv_cache", "indices")),
        topk_lens=problem.arguments.get("topk_lens"),
        softmax_scale=case.softmax_scale,
    )
    np.testing.assert_allclose(max_logits.get(), wanted, rtol=2.01 / 65536, atol=1e-6)
    without = cumla.mla_sparse_attention(**given)
    problem.check(typed(without.out.view(np.uint16).get(), case.dtype), without.lse.get())
    has_same_bits = case.heads > 64 or not isinstance(case, V4Case)
    if has_same_bits:
        assert without.out.get().tobytes() == out.get().tobytes()
    else:
        problem.check(typed(out.view(np.uint16).get(), case.dtype), without.lse.get())
    given.pop("sinks", None)
    want = cumla.mla_sparse_attention(**given).lse.get()
    got = np.where(lse.get() == np.inf, -np.inf, lse.get())
    if has_same_bits:
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def with_gaps(cupy: Any, cache: Any) -> Any:
    """A cache, or its parts, as views of copies of all the memory that they are views of."""
    if isinstance(cache, tuple):
        return tuple(with_gaps(cupy, part) for part in cache)
    owner = owner_of(cache)
    memory = cupy.asarray(owner.view(np.uint8)).reshape(*owner.shape[:3], -1)
    return memory[:, : cache.shape[1], :, : cache.shape[3] * cache.itemsize].view(cache.dtype)


def attend_fp8(cupy: Any, problem: Fp8Problem) -> None:
    """A call of its own, and one with a plan."""
    lengths = {name: there(cupy, array) for name, array in problem.lengths_of_plan.items()}
    inputs = {name: there(cupy, array) for name, array in problem.inputs.items()}
    is_decode = problem.case.operation == "decode"
    call = cumla.mla_decode if is_decode else cumla.mla_attention
    results = [call(**lengths | inputs)]
    if is_decode:
        plan: Any = cumla.MLADecodePlan.from_arrays(inputs["q"], inputs["kv_cache"])
    else:
        plan = cumla.MLAAttentionPlan.from_arrays(
            inputs["q"], inputs["kv_cache"], qo_indptr=lengths["qo_indptr"]
        )
    plan.update(**lengths)
    results.append(plan.run(**inputs))
    for out, lse in results:
        problem.check(typed(out.view(np.uint16).get(), "bfloat16"), lse.get())


# --- compute-sanitizer ---------------------------------------------------------------------------


def log_name(tool: str, only: str) -> str:
    return f"{tool}-{only}.log"


def run_all(folder: Path, timeout: float, parts: Sequence[str], tools: Sequence[str]) -> None:
    """Run these tools on these parts, a few a GPU at a time; a log each, with its time."""
    command = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    version = version_of(command)
    folder.mkdir(parents=True, exist_ok=True)
    about = record.machine() | {"version": version}
    sources = record.Sources.now()._asdict()
    runs = [run for run in RUNS if run[0] in tools and run[1] in (*parts, *PLANTS)]
    content = {"about": about, "sources": sources, "grid": sorted(parts), "tools": sorted(tools)}
    record.write(folder, Path(ABOUT).stem, content)
    warm = [sys.executable, str(Path(__file__).resolve())]
    if not os.environ.get("CUMLA_CUBIN_DIR"):  # else all kernels are compiled
        subprocess.run(warm, cwd=ROOT, check=True, timeout=max(timeout, COLD))
    for run in runs:
        (folder / log_name(*run)).unlink(missing_ok=True)
    gpus = _visible_gpus()
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for gpu in gpus * _AT_ONCE:
        free.put(gpu)

    def run_one(run: tuple[str, str]) -> None:
        gpu = free.get()
        try:
            _run_tool(command, warm, folder, timeout, gpu, *run)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus) * _AT_ONCE) as pool:
        list(pool.map(run_one, runs))


def version_of(command: str) -> str:
    """The version of a compute-sanitizer that follows the order of named barriers."""
    printed = ""
    if Path(command).exists():
        printed = subprocess.run(
            [command, "--version"], capture_output=True, text=True, check=True
        ).stdout
    known = re.search(r"Version ([\d.]+)", printed)
    version = known[1] if known else ""
    if tuple(int(part) for part in re.findall(r"\d+", version)) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise SystemExit(
            f"compute-sanitizer: needs {least} or later, got {version or 'none'} ({command}): "
            "pip install nvidia-cuda-sanitizer-api, and put the folder nvidia/cu13/"
            "compute-sanitizer of its site-packages first on PATH"
        )
    return version


def _visible_gpus() -> list[str]:
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[:count] if given else [str(gpu) for gpu in range(count)]


def _run_tool(
    command: str, warm: list[str], folder: Path, timeout: float, gpu: str, tool: str, only: str
) -> None:
    arguments = [command, "--tool", tool, "--print-limit", "1000"]
    if tool == "memcheck":  # libraries probe for driver functions that are not there
        arguments += ["--report-api-errors", "no"]
    if tool == "synccheck":  # by itself it makes room for too few
        arguments += ["--num-cuda-barriers", "256"]
    arguments += [*warm, "--tool", tool, "--only", only]
    start = time.monotonic()
    path = folder / log_name(tool, only)
    with path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and what it runs
            process.wait()
    with path.open("a", encoding="utf-8") as log:
        log.write(f"\n[{time.monotonic() - start:.1f} s]\n")
    print(f"{path.name}: {time.monotonic() - start:.1f} s", flush=True)


_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
_HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warn")
_KERNEL = re.compile(r"\b(\w+?)(?:\+0x[0-9a-f]+|\()")
_LAUNCHED = re.compile(r"^sanitize: (\w+) launched \d+ times(?:, edited: (.+))?$", re.MULTILINE)
_HEAD = re.compile(r"^========= (?!COMPUTE|ERROR SUMM|RACECHECK SUMM|\s)(.+)$", re.MULTILINE)


def read_log(text: str) -> dict[str, Any]:
    """What one run of a tool found: complete or not, errors, warnings, kinds of report."""
    errors, hazards = _ERRORS.search(text), _HAZARDS.search(text)
    kinds = collections.Counter(_kind(head) for head in _HEAD.findall(text))
    known = {spec.entry for stem in digests.launchers() for spec in digests.specs(stem)}
    named = collections.Counter(name for name in _KERNEL.findall(text) if name in known)
    seconds = re.search(r"^\[([\d.]+) s\]$", text, re.MULTILINE)
    edited: dict[str, list[str]] = {}
    for entry, edit in _LAUNCHED.findall(text):
        edited.setdefault(edit, []).append(entry)
    return {
        "complete": DONE in text and bool(errors or hazards),
        "errors": int(hazards[2]) if hazards else int(errors[1]) if errors else 0,
        "warnings": int(hazards[3]) if hazards else 0,
        "kernels": dict(sorted(named.items())),
        "kinds": dict(kinds.most_common()),
        "seconds": float(seconds[1]) if seconds else None,
        "shipped": edited.pop("", []),
        "edited": edited,
    }


def _kind(head: str) -> str:
    """The first line of a report without its addresses and numbers."""
    return re.sub(r"0x[0-9a-f]+|\b\d+\b", "#", head).strip()


def verdicts(folder: Path, parts: Sequence[str] = PARTS) -> dict[str, dict[str, Any]]:
    """What each tool found that has logs, in these parts, and what it made of the planted bugs."""
    result: dict[str, dict[str, Any]] = {}

    def read(tool: str, only: str) -> dict[str, Any]:
        path = folder / log_name(tool, only)
        return read_log(path.read_text("utf-8", errors="replace") if path.exists() else "")

    for tool in record.TOOLS:
        if any((folder / log_name(tool, part)).exists() for part in parts):
            grid = {} if set(parts) == set(PARTS) else {"grid": sorted(parts)}
            found = _whole([read(tool, part) for part in parts])
            result[tool] = found | grid | {"planted": {}}
    for tool, plant in RUNS:
        if plant in PLANTS and tool in result:
            found = read(tool, plant)
            usual = result[tool]["kernels"]  # the planted grid is a part of it
            seen = any(count > usual.get(name, 0) for name, count in found["kernels"].items())
            result[tool]["planted"][plant] = {
                "found": seen,
                "blind": BLIND.get(plant, ""),
                **{name: found[name] for name in ("complete", "errors", "seconds")},
            }
    return result


def _whole(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The finding of a tool from those of the parts of the grid."""
    kernels: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    edited: dict[str, set[str]] = {}
    for part in parts:
        kernels.update(part["kernels"])
        kinds.update(part["kinds"])
        for edit, entries in part["edited"].items():
            edited.setdefault(edit, set()).update(entries)
    return {
        "complete": all(part["complete"] for part in parts),
        **{name: sum(part[name] for part in parts) for name in ("errors", "warnings")},
        "kernels": dict(sorted(kernels.items())),
        "kinds": dict(kinds.most_common()),
        "seconds": sum(part["seconds"] or 0.0 for part in parts),
        "shipped": sorted({entry for part in parts for entry in part["shipped"]}),
        "edited": {edit: sorted(entries) for edit, entries in edited.items()},
    }


def summarise(folder: Path, evidence: Path) -> bool:
    """Print the verdicts, add them to the evidence, and tell whether all kernels are clean."""
    known = record.read(folder, Path(ABOUT).stem)
    sources = record.Sources.read(known["sources"])
    run = record.Run(evidence, record.SANITIZER, known["about"], sources)
    wrong: set[str] = set()
    parts = known.get("grid", PARTS)
    found_by_tool = verdicts(folder, parts)
    for tool, found in found_by_tool.items():
        run.add(tool, found)
        print(f"{tool:<10} {found['errors']} errors, {found['warnings']} warnings")
        for kind, count in found["kinds"].items():
            print(f"{'':<10} {count} x {kind}")
        whole = "grid" not in found
        for stem in (s for s in sources.kernels if whole or record.ran(s, found, sources)):
            for problem in record.tool_problems(stem, tool, found, sources):
                wrong.add(stem)
                print(f"{'':<10} {stem}: {problem}")
    run.complete()
    missing = sorted(set(known.get("tools", record.TOOLS)) - set(found_by_tool))
    if missing:
        print(f"without a log of {', '.join(missing)}")
    return not wrong and not missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tool", choices=record.TOOLS, default="", help="which one runs the grid")
    parser.add_argument(
        "--only",
        choices=(*PARTS, *PLANTS),
        help="run a part of the grid, or one call with this bug in the kernel",
    )
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="run all tools, then summarise")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of the grid")
    parser.add_argument("--tools", nargs="+", choices=record.TOOLS, default=list(record.TOOLS))
    parser.add_argument("--summarise", type=Path, metavar="FOLDER", help="read the logs there")
    parser.add_argument("--evidence-dir", type=Path, default=record.FOLDER, metavar="FOLDER")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds a tool may take")
    arguments = parser.parse_args()
    if arguments.run:
        run_all(arguments.run, arguments.timeout, arguments.parts, arguments.tools)
    folder = arguments.run or arguments.summarise
    if not folder:
        run_grid(arguments.tool, arguments.only)
    elif not summarise(folder, arguments.evidence_dir):
        sys.exit(1)


if __name__ == "__main__":
    main()
