# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cumla.errors import CompilationError
from cumla.launch import source
from cumla.launch.source import digest, error_excerpt, strip_comments, translation_unit


def positions(text: str) -> dict[str, tuple[str, int]]:
    """Return where ``#line`` says that each line of a translation unit stands."""
    found: dict[str, tuple[str, int]] = {}
    name, number = "", 0
    for line in text.split("\n"):
        if line.startswith("#line "):
            _, digits, name = line.split(" ", 2)
            number = int(digits)
        else:
            found.setdefault(line, (name.strip('"'), number))
            number += 1
    return found


def test_headers_are_written_out_once(sources, small):
    text = translation_unit(small)
    assert "#include" not in text
    assert "#pragma once" not in text
    assert text.count("using f32 = float;") == 1
    assert text.index("using f32") < text.index("f32 times(") < text.index("struct ScaleParams")


@pytest.mark.parametrize("debug", [False, True])
def test_line_directives_name_every_line_of_every_file(sources, small, debug):
    found = positions(translation_unit(small, debug=debug))
    for name in ("small.cu", "scale.cuh", "ptx/types.cuh"):
        lines = (sources / name).read_text().split("\n")
        seen = {line for line in lines if lines.count(line) == 1 and line and line[0] != "#"}
        seen -= {"namespace cumla {", "}", "}  // namespace cumla"}
        assert seen
        for line in seen:
            assert found[line] == (f"cumla/cuda/{name}", lines.index(line) + 1)


def test_entry_point(sources, small):
    tail = translation_unit(small).split("#line 1 ")[-1].split("\n")
    assert len(tail) <= 10
    assert 'extern "C" __global__ void __launch_bounds__(128, 2)' in tail
    assert "small_f32(const __grid_constant__ cumla::ScaleParams params) {" in tail
    assert "  cumla::scale<float>(params);" in tail


def test_debug_build_defines_a_macro_first(sources, small):
    assert translation_unit(small, debug=True).startswith("#define CUMLA_DEBUG 1\n")
    assert "CUMLA_DEBUG" not in translation_unit(small)


def test_missing_files_are_named(sources, small):
    with pytest.raises(CompilationError, match=r"cumla/cuda/none\.cu is not in this installation"):
        translation_unit(replace(small, stem="none"))
    (sources / "scale.cuh").unlink()
    with pytest.raises(CompilationError, match=r"scale\.cuh, which cumla/cuda/small\.cu includes"):
        translation_unit(small)


def test_kernels_of_other_packages_have_the_headers_of_the_library(tmp_path, small, monkeypatch):
    (tmp_path / "cuda" / "ptx").mkdir(parents=True)
    (tmp_path / "bench").mkdir()
    (tmp_path / "cuda" / "ptx" / "types.cuh").write_text("using f32 = float;")
    (tmp_path / "bench" / "small.cu").write_text('// top\n#include "ptx/types.cuh"\nf32 x;')
    folders = {"cumla.cuda": tmp_path / "cuda", "cumla.bench.cuda": tmp_path / "bench"}
    monkeypatch.setattr(source, "_sources", folders.__getitem__)
    spec = replace(small, package="cumla.bench.cuda")
    assert spec.path == "cumla/bench/cuda/small.cu"
    found = positions(translation_unit(spec))
    assert found["using f32 = float;"] == ("cumla/cuda/ptx/types.cuh", 1)
    assert found["f32 x;"] == ("cumla/bench/cuda/small.cu", 3)
    (tmp_path / "cuda" / "ptx" / "types.cuh").unlink()
    with pytest.raises(
        CompilationError,
        match=r"^cumla/cuda/ptx/types\.cuh, which cumla/bench/cuda/small\.cu includes, is not in",
    ):
        translation_unit(spec)


@pytest.mark.parametrize("package", ["cumla.cuda", "cumla.bench.cuda"])
def test_packages_are_folders_of_this_installation(package):
    folder = source._sources(package)
    assert any(path.name.endswith(".cu") for path in folder.iterdir())


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("a; // gone\nb;", "a;\nb;"),
        ("a /* gone\n gone */ b;", "a   b;"),
        ("x/**/y", "x y"),
        ('s = "// stays /* stays";  // gone', 's = "// stays /* stays";'),
        (r's = "\"// stays"; // gone', r's = "\"// stays";'),
        ("c = '\"'; // gone", "c = '\"';"),
        (r"c = '\''; /* gone */ d = '/';", r"c = '\'';   d = '/';"),
        ("n = 1'000'000; // it's gone", "n = 1'000'000;"),
        ('r = R"(// stays " /* stays)"; // gone', 'r = R"(// stays " /* stays)";'),
        ('r = R"x(a)" // stays)x"; // gone', 'r = R"x(a)" // stays)x";'),
        ("// gone \\\n gone too\nb;", "b;"),
        ('#line 7 "a.cu"\n\n  a;   \n\t\nb;', "  a;\nb;"),
        ("a / b / c;", "a / b / c;"),
        ("#define A(x) \\\n  x", "#define A(x) \\\n  x"),
    ],
)
def test_strip_comments(text, bare):
    assert strip_comments(text) == bare


def test_digest_ignores_comments_and_lines(sources, small, edit):
    before = digest(small)
    edit("small.cu", "struct ScaleParams {", "// a comment\n\n/* another */\nstruct ScaleParams {")
    edit("scale.cuh", "#pragma once", "#pragma once\n// and one here")
    assert digest(small) == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("small.cu", "127 - threadIdx.x", "126 - threadIdx.x"),
        ("scale.cuh", "x * y", "x + y"),
        ("ptx/types.cuh", "float", "double"),
    ],
)
def test_digest_sees_every_file(sources, small, edit, name, old, new):
    before = digest(small)
    edit(name, old, new)
    assert digest(small) != before


def test_digest_sees_entry_options_and_build(sources, small, monkeypatch):
    before = digest(small)
    others = [digest(replace(small, threads=256)), digest(small, debug=True)]
    monkeypatch.setattr(source, "OPTIONS", (*source.OPTIONS, "-lineinfo"))
    others.append(digest(small))
    assert len({before, *others}) == 4


def test_cubin_name_holds_entry_and_digest(sources, small):
    assert source.cubin_name(small) == f"small_f32-{digest(small)}.cubin"


def test_options_hold_what_cupy_adds():
    assert set(source.ADDED_BY_CUPY) < set(source.OPTIONS)
    assert source.OPTIONS[0] == "-arch=sm_90a"


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), ("", False), ("0", False), ("false", False), ("1", True)]
)
def test_debug_build_follows_the_environment(monkeypatch, value, expected):
    if value is None:
        monkeypatch.delenv("CUMLA_DEBUG", raising=False)
    else:
        monkeypatch.setenv("CUMLA_DEBUG", value)
    assert source.debug_build() is expected


def test_excerpt_shows_the_lines_in_error(sources: Path, small):
    log = (
        "cumla/cuda/scale.cuh(5): error: no such thing\n"
        "cumla/cuda/scale.cuh(5): error: again\n"
        "cumla/cuda/small.cu(3): warning: not shown\n"
        "elsewhere.cu(1): error: not ours\n"
    )
    shown = error_excerpt(translation_unit(small), log, around=1)
    assert shown.split("\n") == [
        "cumla/cuda/scale.cuh:",
        "     4 | namespace cumla {",
        ">    5 | __device__ __forceinline__ f32 times(f32 x, f32 y) { return x * y; }",
        "     6 | }",
    ]
    assert error_excerpt(translation_unit(small), "ptxas fatal: out of luck") == ""
