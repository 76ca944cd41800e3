# SPDX-License-Identifier: Apache-2.0
"""What all families of kernels share: one translation unit holds them, other widths compile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources

import pytest

from cumla.errors import CompilationError
from cumla.launch import module, source
from cumla.launch.source import OPTIONS, KernelSpec, translation_unit
from cumla.launch.split import ragged_schedule

FAMILIES = ("mla", "indexer", "sparse", "split")
SPEC = KernelSpec("all", "all", "all", "All", 384)
CUDA = resources.files("cumla").joinpath("cuda")


def files() -> Iterator[str]:
    yield "merge_states.cu"
    for family in (*FAMILIES, "rows", "ptx"):
        folder = CUDA.joinpath(family)
        yield from (f"{family}/{it.name}" for it in folder.iterdir() if it.name[-4:] == ".cuh")
    for family in FAMILIES:
        folder = CUDA.joinpath(family)
        yield from (f"{family}/{it.name}" for it in folder.iterdir() if it.name[-3:] == ".cu")


def compile_text(text: str, *options: str) -> None:
    module._compile(SPEC, text, (*(it for it in OPTIONS if it[:4] != "-std"), *options))


def everything() -> str:
    """All kernels and headers, each once."""
    lines: list[str] = []
    seen: set[str] = set()
    for name in files():
        if name not in seen:
            source._inline("cumla.cuda", name, None, seen, lines)
    return "\n".join(lines)


def test_all_families_in_one_translation_unit(nvrtc: None) -> None:
    text = everything()
    assert text.count("struct Place {") == text.count("struct alignas(8) Place {") == 1
    compile_text(f"{text}\nusing namespace cumla;\n", "-std=c++17")


JOIN = """
template <int kValueDim>
__device__ __forceinline__ void join(const cumla::mla::MlaDecodeParams& p) {{
  const cumla::split::Tile tile(p);
  const cumla::split::Part part = cumla::split::part_of_cta(p, blockIdx.y);
  const cumla::split::Segment segment = cumla::split::segment_of(p, tile, part, part.place);
  cumla::split::Joiner<cumla::Bf16, kValueDim, 2048, {short}, cumla::mla::MlaDecodeParams,
                       cumla::split::Tile>(p, {{0, 1024, 16384, 0, 0}}, tile, segment)
      .join(p.causal);
}}
extern "C" __global__ void __launch_bounds__(384, 1)
join_columns(const __grid_constant__ cumla::mla::MlaDecodeParams p) {{
  join<{columns}>(p);
}}
"""


@pytest.mark.parametrize(("columns", "short"), [(64, "false"), (192, "true")])
def test_pieces_of_any_value_width_are_joined(columns: int, short: str, nvrtc: None) -> None:
    compile_text(layout() + JOIN.format(columns=columns, short=short), "-std=c++17")


def test_columns_that_are_no_whole_units_are_refused(nvrtc: None) -> None:
    with pytest.raises(CompilationError, match="half of the columns are whole units"):
        compile_text(layout() + JOIN.format(columns=96, short="false"), "-std=c++17")


def layout() -> str:
    lines: list[str] = []
    source._inline("cumla.cuda", "mla/mla_decode/layout.cuh", None, set(), lines)
    return "\n".join(lines)


# --- arithmetic of kernels, as the compiler evaluates it ------------------------------------------

LIMITS = """
template <typename T> __device__ constexpr T min(T a, T b) { return a < b ? a : b; }
template <typename T> __device__ constexpr T max(T a, T b) { return a < b ? b : a; }
"""


def evaluated(text: str, *functions: str) -> str:
    """Text with some functions made constant expressions: an overflow is an error then."""
    for function in functions:
        text, found = re.subn(
            rf"__device__ __forceinline__ ((?:int )?{function}\()", r"__device__ constexpr \1", text
        )
        assert found == 1, function
    return text.replace("namespace cumla {", f"namespace cumla {{{LIMITS}", 1)


@pytest.mark.parametrize(
    ("indptr", "counts"),
    [
        ((0, 5, 12), (5, 7)),
        ((0, 5, -1), (5, 0)),
        ((0, 5, -(2**31) + 44), (5, 0)),
        ((0, 5, -(2**31)), (5, 0)),
        ((-(2**31), 5, 2**31 - 1), (5, 7)),
        ((2**31 - 1, -(2**31), 2**31 - 1), (0, 12)),
    ],
)
def test_any_qo_indptr_is_a_number_of_queries(
    indptr: tuple[int, ...], counts: tuple[int, ...], nvrtc: None
) -> None:
    """Where it falls a request has none, at the ends of 32 bits, too."""
    text, _, _ = translation_unit(ragged_schedule.SPECS[0]).partition('extern "C"')
    numbers = ", ".join(f"static_cast<int>({n}ll)" for n in indptr)
    checks = [
        f"static_assert(cumla::split::Queries(kParams, {r}).count == {n});"
        for r, n in enumerate(counts)
    ]
    compile_text(
        "\n".join(
            [
                evaluated(text, "Queries"),
                f"constexpr int kIndptr[] = {{{numbers}}};",
                "constexpr cumla::split::RaggedScheduleParams params() {",
                "  cumla::split::RaggedScheduleParams p = {};",
                "  p.qo_indptr = kIndptr; p.qo_indptr_stride = 1; p.total_tokens = 12;",
                "  return p;",
                "}",
                "constexpr cumla::split::RaggedScheduleParams kParams = params();",
                *checks,
            ]
        ),
        "-std=c++20",
    )


def test_blocks_of_the_longest_keys(nvrtc: None) -> None:
    checks = {1: 1, 64: 1, 65: 2, 2**31 - 64: 2**25 - 1, 2**31 - 63: 2**25, 2**31 - 1: 2**25}
    text = evaluated(everything(), "blocks_before")
    lines = [
        f"static_assert(cumla::indexer::blocks_before({n}) == {b});" for n, b in checks.items()
    ]
    compile_text("\n".join([text, *lines]), "-std=c++17")
