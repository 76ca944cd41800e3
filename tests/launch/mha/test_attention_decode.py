# SPDX-License-Identifier: Apache-2.0
"""The kernel of few query rows, run by the CPU, against the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.launch.mha.attention_decode import decode_spec
from tests.calls import int32
from tests.launch.mha.test_attention_prefill import launched
from tests.mha.attention_cases import Sample, check, make, samples

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
NARROW: dict[str, Any] = {"columns": (64, 64), "dtype": "bfloat16", "queries": "uniform"}
FEW = (  # few kernels: each takes seconds to compile
    *samples(9, cache="e4m3", heads=(8, 2), **NARROW),
    *samples(6, cache="same", heads=(8, 2), window=None, **NARROW),
    *samples(5, cache="e4m3", heads=(8, 1), **NARROW),  # 16 rows
    *samples(3, **NARROW | {"columns": (192, 128), "dtype": "float16"}, cache="e4m3", heads=(8, 2)),
    *samples(
        2, **NARROW | {"columns": (96, 96)}, cache="same", page_size=3, heads=(8, 2), window=None
    ),
)


def check_sample(sample: Sample) -> None:
    # 16-bit keys of 64 columns need a request for each two of them.
    multiprocessors = 4 + sample.seed % (9 if sample.cache == "e4m3" else 2)
    got, stems = launched(make(sample), multiprocessors)
    assert stems[-1] == "attention_decode"
    check(sample, got, cumla.reference.attention(**make(sample)))


@pytest.mark.parametrize(
    "sample", FEW, ids=lambda s: f"{s.columns[0]}-{s.cache}-{s.page_size}-{s.heads[1]}-{s.seed}"
)
def test_decode(sample: Sample) -> None:
    check_sample(sample)


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [(4, 1), (8, 1)], ids=str)  # 8 and 16 rows
def test_every_kernel(columns: tuple[int, int], dtype: str, heads: tuple[int, int]) -> None:
    fixed = {"columns": columns, "dtype": dtype, "heads": heads, "queries": "uniform"}
    for page_size, cache in product((0, 3, 8, 16, 48, 128), ("e4m3", "same")):
        pages = {"page_size": page_size, "cache": cache, "window": None}
        tiles = columns[0] // 64, columns[1] // 64
        spec = decode_spec(dtype, tiles, 2 * heads[0], e4m3=cache == "e4m3")
        gains = cache == "e4m3" or tiles == (1, 1) or page_size % 64
        for sample in samples(4, **fixed, **pages):
            got, stems = launched(make(sample), 3)
            assert stems[-1] == ("attention_decode" if spec and gains else "attention")
            check(sample, got, cumla.reference.attention(**make(sample)))


def decoding(**changes: Any) -> dict[str, Any]:
    """One query of each of three requests, the first of which is cut."""
    rng = np.random.default_rng(2)

    def rows(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(BF16)

    return {
        "q": rows(3, 1, 8, 64),
        "k": rows(60, 16, 2, 64).astype(E4M3),
        "v": rows(60, 16, 2, 64).astype(E4M3),
        "kv_lens": int32(900, 3, 17),
        "block_table": rng.permutation(60)[np.arange(171).reshape(3, 57) % 60].astype(np.int32),
    } | changes


def chosen_for(given: dict[str, Any]) -> str:
    """The kernel of a plan for these arrays."""
    options = {name: given[name] for name in ("window", "batch_invariant") if name in given}
    if "batch_invariant" in given:
        options["max_kv_len"] = 1000
    if "qo_indptr" in given:
        options["qo_indptr"] = given["qo_indptr"]
    plan = cumla.AttentionPlan.from_arrays(given["q"], given["k"], given["v"], **options)
    return plan.key.choice.spec.stem


@pytest.mark.parametrize(("multiprocessors", "stem"), [(13, "attention_decode"), (14, "attention")])
def test_few_requests_of_64_columns_take_wide_tiles(multiprocessors: int, stem: str) -> None:
    """Of whole pages: six kv heads of requests are enough for half of 13, not of 14."""
    given = decoding() | {name: np.ones((60, 64, 2, 64), BF16) for name in "kv"}
    plan = cumla.AttentionPlan.from_arrays(given["q"], given["k"], given["v"])
    assert replace(plan.key, sm_count=multiprocessors).choice.spec.stem == stem


def test_which_kernel_decodes() -> None:
    """That of few rows where it is faster, and rows do not depend on who else is there."""
    small, wide = decoding(), decoding()
    small |= {name: small[name].astype(BF16) for name in "kv"}
    wide["q"] = np.ones((3, 1, 8, 128), BF16)
    wide |= {name: np.ones((60, 64, 2, 128), BF16) for name in "kv"}
    paged = wide | {name: np.ones((60, 16, 2, 128), BF16) for name in "kv"}
    many = {"q": np.ones((3, 5, 8, 64), BF16)}  # 20 rows of a kv head
    offsets = {"qo_indptr": np.zeros(65, np.int32)}
    drafts = offsets | {"q": np.ones((80, 8, 64), BF16)}  # 64 rows more than one each
    chunk = offsets | {"q": np.ones((81, 8, 64), BF16)}
    chosen = {
        name: chosen_for(given)
        for name, given in {
            "e4m3": decoding(),
            "e4m3, window": decoding(window=40),
            "e4m3, 20 rows": decoding() | many,
            "e4m3, perhaps a chunk": decoding() | chunk,
            "e4m3, fixed cuts": decoding(batch_invariant=True),
            "64 columns": small,
            "64 columns, window": small | {"window": 40},
            "64 columns, drafts": small | drafts,
            "64 columns, perhaps a chunk": small | chunk,
            "whole pages": wide,
            "small pages": paged,
        }.items()
    }
    decode, other = "attention_decode", "attention"
    assert chosen == {
        "e4m3": decode,
        "e4m3, window": decode,
        "e4m3, 20 rows": other,
        "e4m3, perhaps a chunk": decode,
        "e4m3, fixed cuts": other,
        "64 columns": decode,
        "64 columns, window": other,
        "64 columns, drafts": decode,
        "64 columns, perhaps a chunk": other,
        "whole pages": other,
        "small pages": decode,
    }


def test_chunks_of_a_prompt_among_decoding() -> None:
    """Requests longer than the others are several row tiles of the same kernel."""
    rng = np.random.default_rng(5)
    given = decoding(qo_indptr=int32(0, 1, 2, 9), q=rng.standard_normal((9, 4, 64)).astype(BF16))
    got, stems = launched(given, 6)
    assert stems[-1] == "attention_decode"
    expected = cumla.reference.attention(**given)
    np.testing.assert_allclose(got[1], expected.lse, atol=1e-4)
    exact = expected.out.astype(np.float32)
    np.testing.assert_allclose(np.asarray(got[0], np.float32), exact, atol=1e-2)


def test_queries_of_any_size() -> None:
    """Rows of bfloat16 are brought into the range of float16: by powers of two, so exactly."""
    given = decoding()
    plain, _ = launched(given)
    for power in (2.0**-20, 2.0**20, 2.0**60):
        scaled = decoding(q=(given["q"].astype(np.float64) * power).astype(BF16))
        got, _ = launched(scaled | {"softmax_scale": 0.125 / power})
        for one, other in zip(got, plain, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    counts = np.array([[900], [3], [17]]).repeat(8, 1)
    for factors in ({}, {"k_scale": 2.0**126, "softmax_scale": 1e6}):  # the product is infinite
        zeros, _ = launched(decoding(q=np.zeros_like(given["q"])) | factors)
        np.testing.assert_allclose(np.asarray(zeros[1])[:, 0], np.log(counts), rtol=1e-6)


def test_rows_and_kernels() -> None:
    """Eight rows where they do, then 16, then another kernel."""
    for rows, most in ((1, 8), (8, 8), (9, 16), (16, 16)):
        found = decode_spec("bfloat16", (2, 2), rows, e4m3=True)
        assert found and found[0] == most
        assert found[1].entry == f"attention_decode_bfloat16_128_128_e4m3_{most}"
    assert decode_spec("bfloat16", (2, 2), 17, e4m3=True) is None
    assert decode_spec("bfloat16", (4, 4), 9, e4m3=True) is None
