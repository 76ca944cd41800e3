# SPDX-License-Identifier: Apache-2.0
"""mla_decode and mla_attention over rows of other widths than 512 + 64: against float64, with NaN
wherever no query looks."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.mla.shape import WIDE, WIDTHS, WRITTEN
from tests.gpu.tools import kernels
from tests.gpu.tools.arrays import bits_of
from tests.gpu.tools.sanitize import append_rows, there
from tests.mla import masked_cases as cases
from tests.mla.fp8_arrays import BF16
from tests.mla.masked_cases import Problem, Sample

KERNELS = (
    "ragged_schedule",
    "schedule",
    "mla_decode",
    "mla_decode_swapped",
    "mla_decode_wide",
    "mla_decode_halves",
    "mla_decode_wide_few",
    "mla_decode_fp8",
    "mla_decode_fp8_64",
    "append_cache",
    "append_fp8_cache",
)
cp: Any = pytest.importorskip("cupy")

OTHERS = WIDTHS[1:]
OF_CACHES = [(width, False) for width in WIDTHS] + [
    (width, True) for width in WIDTHS if width != WIDE
]
F16, E4M3 = np.dtype(np.float16), np.dtype(ml_dtypes.float8_e4m3fn)
HALVES = ("bfloat16", "float16")
_HEADS = ((1, 1), (5, 1), (8, 1), (12, 1), (16, 1), (17, 1), (40, 1), (64, 1), (128, 1), (32, 2))
_LENGTHS = ((700, 0, 1, 130), (4097, 64, 65, 63), (9000,), (513, 1, 2, 300, 63))
LONG = (
    Sample((1,) * 40, (16_384, 9_000, 5, 700) * 10, heads=(32, 1)),
    Sample((4,) * 17, (5_000, 700, 65) * 5 + (9_000, 3), heads=(32, 1)),
    Sample((1,) * 3, (131_072, 70_000, 12_345), heads=(8, 1), page_size=16),
    Sample((700, 1, 33), (9_000, 16_384, 33), "list", (40, 1), 1, window=300, sinks="normal"),
    Sample((1,) * 200, (300, 65, 1_000, 2) * 50, heads=(64, 1)),
)
SHORT_WINDOWS = (  # clusters of eight to one that share keys, and of two that share columns
    Sample((1,), (5_000,), heads=(64, 1), window=512, sinks="normal"),
    Sample((1,) * 2, (513, 9_000), heads=(64, 1), window=512),
    Sample((2,) * 2, (700, 65), heads=(64, 1), window=(900, 100), causal=False, page_size=48),
    Sample((1,) * 12, (513, 600, 1, 0) * 3, heads=(64, 1), window=512, sinks="extreme"),
    Sample((1,) * 30, (513, 600, 64) * 10, heads=(64, 1), window=512, page_size=1),
    Sample((4,) * 40, (513, 5, 700, 1_025) * 10, heads=(64, 1), window=512, sinks="normal"),
    Sample((1,) * 16, (513, 5, 700, 0) * 4, heads=(8, 1), window=512, form="pair"),
    Sample((1,) * 50, (600, 513) * 25, heads=(5, 1), window=512, page_size=16),
    Sample((1,) * 150, (300, 65, 1_000, 2, 514) * 30, heads=(12, 1), window=512),
)


def drawn() -> list[Sample]:
    """Every width with all heads, page sizes, numbers of queries and dtypes; masks among them."""
    found = []
    draw = np.random.default_rng(7)
    for width, heads, size in itertools.product(OTHERS, _HEADS, (64, 1, 16, 128)):
        lens = _LENGTHS[draw.integers(len(_LENGTHS))]
        operation = ("decode", "decode", "table", "list")[draw.integers(4)]
        q_lens = tuple(int(n) for n in draw.choice((0, 1, 3, 30), len(lens)))
        if operation == "decode":
            q_lens = (int(draw.choice((1, 2, 4, 8))),) * len(lens)
        masks = {
            "causal": bool(draw.random() < 0.8),
            "window": (None, None, None, 0, 127, (100, 3))[draw.integers(6)],
            "sinks": ("none", "none", "normal", "extreme")[draw.integers(4)],
            "form": "pair" if width[1] and draw.random() < 0.5 else "one",
        }
        numbers = {"heads": heads, "page_size": size, "seed": len(found)}
        masks["dtype"] = ("bfloat16", "bfloat16", "float16")[draw.integers(3)]
        found.append(Sample(q_lens, lens, operation, **numbers, **masks, width=width))
    return found


def drawn_of_e4m3() -> list[Sample]:
    """Every third of these of e4m3 caches under one factor, without windows, and long ones."""
    forms = ("one", "bytes", "pair", "pair of bytes")
    found = []
    drawn_of_these = [sample for sample in drawn() if sample.width != WIDE]
    for i, sample in enumerate(drawn_of_these[::3]):
        form = forms[i % (4 if sample.width[1] else 2)]
        fixed: dict[str, Any] = {"is_fp8": True, "window": None, "dtype": "bfloat16"}
        found.append(sample._replace(form=form, **fixed))
    long = ((LONG[0], (256, 64)), (LONG[1], (256, 32)), (LONG[4], (512, 0)))
    return found + [s._replace(is_fp8=True, width=width) for s, width in long]


SAMPLES = [
    *drawn_of_e4m3(),
    *drawn(),
    *(
        sample._replace(width=width, dtype=HALVES[(i + j) % 2])
        for i, sample in enumerate(LONG)
        for j, width in enumerate(OTHERS)
    ),
    *(sample._replace(width=WIDE, dtype=dtype) for sample in SHORT_WINDOWS for dtype in HALVES),
]


def uploaded(problem: Problem) -> dict[str, Any]:
    return {name: there(cp, value) for name, value in problem.given.items()}


def poisoned(problem: Problem, dtype: Any = None) -> dict[str, Any]:
    """Outputs that are NaN before the call."""
    shape, own = problem.given["q"].shape[:-1], problem.given["q"].dtype
    out = cp.empty((*shape, problem.sample.width[0]), dtype=dtype or own)
    out.view(cp.uint8)[...] = 0xFF
    return {"out": out, "lse": cp.full(shape, cp.nan, dtype=cp.float32)}


def on_host(state: Any) -> tuple[np.ndarray, np.ndarray]:
    out, lse = state
    return out.view(f"u{out.dtype.itemsize}").get().view(out.dtype), lse.get()


def assert_same_bits(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        assert bool((bits_of(a) == bits_of(b)).all())


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_samples(sample: Sample, record_figures: Any) -> None:
    problem = cases.make(sample)
    given = uploaded(problem)
    state = problem.call(**given, **poisoned(problem))
    want = cases.in_float64(problem)
    record_figures(cases.check(problem, *on_host(state), want))
    for _ in range(2):
        kernels.noise(sample.seed)
        assert_same_bits(state, problem.call(**given, **poisoned(problem)))
    state = problem.call(**given, **poisoned(problem, cp.float32))
    cases.check(problem, *on_host(state), want)


@pytest.mark.parametrize(("width", "is_fp8"), [of for of in OF_CACHES if of[0] in OTHERS])
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_plans_and_replays(width: tuple[int, int], heads: int, is_fp8: bool) -> None:
    """A plan's graph with other lengths; fixed cuts; the ragged function."""
    sample = Sample((2,) * 3, (2000, 65, 700), heads=(heads, 1), width=width, is_fp8=is_fp8)
    problem = cases.make(sample)
    given = uploaded(problem)
    state = problem.call(**given)
    want = cases.in_float64(problem)
    cases.check(problem, *on_host(state), want)
    lens = given.pop("kv_lens")
    causal = given.pop("causal"), given.pop("window")
    assert causal == (True, None)
    factor = {name: given[name] for name in ("kv_scale",) if name in given}
    plan = cumla.MLADecodePlan.from_arrays(given["q"], given["kv_cache"])
    assert plan.key.width == width
    cumla.prepare(plan)
    now = cp.zeros_like(lens)
    plan.update(now)
    first = plan.run(**given, **poisoned(problem))
    assert not bool(bits_of(first.out).any())
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        plan.update(now)
        later = plan.run(**given, out=first.out, lse=first.lse)
        graph = stream.end_capture()
        now[...] = lens
        graph.launch()
    stream.synchronize()
    assert_same_bits(later, state)
    rows = {"q": given["q"].reshape(-1, heads, sum(width)), "kv_cache": given["kv_cache"]}
    indptr = cp.asarray(np.int32([0, 2, 4, 6]))
    pages = {"block_table": given["block_table"], "kv_lens": lens, "qo_indptr": indptr}
    for invariant in (False, True):
        out, lse = cumla.mla_attention(**rows, **pages, **factor, batch_invariant=invariant)
        found = out.reshape(state.out.shape), lse.reshape(state.lse.shape)
        cases.check(problem, *on_host(found), want)
        if width == WIDE:
            continue
        fixed = problem.call(**given, kv_lens=lens, batch_invariant=invariant)
        cases.check(problem, *on_host(fixed), want)
    for r in range(3):
        if width == WIDE:  # by the ragged function alone
            first = {"q": rows["q"][2 * r : 2 * r + 2], "kv_cache": rows["kv_cache"]}
            own = {n: pages[n][r : r + 1] for n in ("block_table", "kv_lens")}
            own |= {"qo_indptr": indptr[:2], "batch_invariant": True}
            alone = cumla.mla_attention(**first, **own)
            assert_same_bits(alone, (out[2 * r : 2 * r + 2], lse[2 * r : 2 * r + 2]))
            continue
        some = {n: given[n][r : r + 1] for n in ("q", "block_table")}
        alone = problem.call(**given | some, kv_lens=lens[r : r + 1], batch_invariant=True)
        assert_same_bits(alone, [x[r : r + 1] for x in fixed])


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize(("width", "is_fp8"), OF_CACHES)
def test_padded_rows_and_pages(is_fp8: bool, width: tuple[int, int], heads: int) -> None:
    """Rows that are slices of wider ones; what is behind them is NaN."""
    for page_size in (64, 1):
        sample = Sample((1,) * 3, (700, 65, 130), page_size=page_size, width=width, is_fp8=is_fp8)
        problem = cases.make(sample._replace(heads=(heads, 1)))
        given = uploaded(problem)
        cache = given["kv_cache"]
        bits = cp.dtype(f"u{cache.dtype.itemsize}")  # CuPy makes no array of e4m3
        shape = cache.shape[0] + 1, page_size + 1, 1, 1152
        wide = cp.full(shape, 2 ** (8 * bits.itemsize) - 1, dtype=bits)[:-1, :page_size]
        wide[..., : sum(width)] = cache.view(bits)
        view = wide[..., : sum(width)].view(cache.dtype)
        state = problem.call(**given | {"kv_cache": view}, **poisoned(problem))
        cases.check(problem, *on_host(state))
        assert_same_bits(state, problem.call(**given, **poisoned(problem)))


def test_prefix_groups() -> None:
    """Requests whose pages begin alike."""
    for width in OTHERS:
        sample = Sample((1, 3, 2), (1000, 777, 1300), "table", (16, 1), width=width)
        problem = cases.make(sample)
        given = uploaded(problem)
        table = given["block_table"]
        table[1:, :6] = table[0, :6]
        host = problem.given | {"block_table": table.get()}
        want = cumla.reference.mla_attention(**host)
        lengths = {name: given[name] for name in ("kv_lens", "qo_indptr")}
        groups = cumla.find_prefix_groups(table, given["kv_lens"], page_size=64, min_tokens=64)
        got = cumla.mla_attention(
            given["q"], given["kv_cache"], **lengths, block_table=table, groups=groups
        )
        out, lse = on_host(got)
        np.testing.assert_allclose(lse, want.lse, rtol=1e-4)
        error = np.abs(out.astype(np.float64) - want.out.astype(np.float64)).max()
        assert error < 0.02 * np.abs(want.out.astype(np.float64)).max()


@pytest.mark.parametrize("width", WRITTEN)
@pytest.mark.parametrize("of_cache", ["bfloat16", "float16", "uint8"])
def test_rows_into_caches(of_cache: str, width: tuple[int, int]) -> None:
    """The writers' bits: plain rows, and rotations by quarter turns; places that do not exist."""
    for of_rows, of_queries in itertools.product(("", "float32"), HALVES):
        if of_cache in ("uint8", of_queries):
            dtypes = of_cache, of_rows or of_queries, of_queries
            for form in ("slots", "requests, rotated", "requests, rotated by halves"):
                append_rows(cp, form, width, *dtypes)


ROTATIONS = [
    (width, interleaved, dtype)
    for width in WRITTEN
    for interleaved in (None, False, True)[: 3 if width[1] else 1]
    for dtype in (BF16, F16, np.float32)
]


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(("width", "interleaved", "dtype"), ROTATIONS)
def test_rows_between_others(
    width: tuple[int, int], interleaved: bool | None, dtype: Any, is_fp8: bool
) -> None:
    """Any angles; gaps between rows stay what they were, and so do slots that nobody names."""
    latent, rope = width
    rng = np.random.default_rng(3)
    halves = BF16 if dtype == np.float32 else np.dtype(dtype)
    rows = rng.standard_normal((133, 2, latent + rope)).astype(dtype)
    slots = rng.permutation(40 * 8)[:133] - 9
    given: dict[str, Any] = {"rows": rows, "slot_mapping": slots}
    if interleaved is not None:
        angles = rng.standard_normal((120, rope), dtype=np.float32)
        given |= {"positions": np.arange(133), "cos_sin": angles, "interleaved": interleaved}
        given |= {"q_pe": rng.standard_normal((133, 5, rope)).astype(halves)}
    if is_fp8:
        given["kv_scale"] = np.float32(0.02)
        if sum(width) == 288:
            given["cache_format"] = "e4m3_288"
    device = {name: there(cp, value) for name, value in given.items()}
    kind, gap = (np.dtype(np.uint8), 16) if is_fp8 else (halves, 8)
    wide = np.full((40, 8, 2, (latent + rope + gap) * kind.itemsize), 0xFF, np.uint8).view(kind)
    on_gpu = there(cp, wide)
    cumla.append_mla_cache(kv_cache=on_gpu[..., :-gap], **device)
    cumla.reference.append_mla_cache(kv_cache=wide[..., :-gap], **given)
    found = on_gpu.view(cp.dtype(f"u{kind.itemsize}")).get()
    whole = wide.view(found.dtype)
    for columns in (slice(latent), slice(latent + rope, None)):  # bits of what is not rotated
        np.testing.assert_array_equal(found[..., columns], whole[..., columns])
    turned = slice(latent, latent + rope)
    own = E4M3 if is_fp8 else halves
    pairs = [(found[..., turned].view(own), whole[..., turned].view(own))]
    if "q_pe" in given:
        queries = device["q_pe"].view(cp.uint16).get().view(halves)
        pairs.append((queries, given["q_pe"]))
    for got, want in pairs:  # a step of the type, between normal numbers and below
        steps = ml_dtypes.finfo(got.dtype)
        least = max(float(steps.smallest_subnormal), 1e-5)
        got, want = (x.astype(np.float32) for x in (got, want))
        np.testing.assert_allclose(got, want, rtol=float(steps.eps), atol=least)
