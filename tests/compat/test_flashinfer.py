# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's merging and cache writing on the CPU, against formulas written out here."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cumla.compat import flashinfer

torch = pytest.importorskip("torch")

Array = NDArray[Any]
Convert = Callable[[Array], Any]

INF, NAN = math.inf, math.nan
DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}

dtypes = pytest.mark.parametrize("dtype", DTYPES)


def to_torch(array: Array) -> Any:
    """A tensor of the same memory; torch takes bfloat16 as bits only."""
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.fixture(params=["torch", "numpy"])
def convert(request: pytest.FixtureRequest) -> Convert:
    """What makes an array of the framework, of the same memory, out of NumPy's."""
    return to_torch if request.param == "torch" else lambda array: array


def to_host(array: Any, like: Any) -> Array:
    """NumPy array of a result, which must be of the framework of `like`."""
    assert type(array) is type(like)
    if not isinstance(array, torch.Tensor):
        return np.asarray(array)
    if array.dtype == torch.bfloat16:
        return np.asarray(array.view(torch.int16)).view(DTYPES["bfloat16"])
    return np.asarray(array)


def states(
    count: int, dtype: str, *, tokens: int = 7, heads: int = 3, head_dim: int = 16
) -> tuple[Array, Array]:
    """Stacked states; some are empty, in rows 0 and 1 all of them, and hold NaN there."""
    rng = np.random.default_rng(count)
    v = rng.standard_normal((count, tokens, heads, head_dim)).astype(DTYPES[dtype])
    s = (3 * rng.standard_normal((count, tokens, heads))).astype(np.float32)
    s[rng.random(s.shape) < 0.2] = -INF
    s[:, 0] = -INF
    s[:, 1] = INF
    v[np.isinf(s)] = NAN
    return v, s


def naive_merge(v: Array, s: Array) -> tuple[Array, Array]:
    """Powers of two, their sum and weighted mean, a row at a time, in float64."""
    _, tokens, heads, head_dim = v.shape
    merged, log = np.zeros((tokens, heads, head_dim)), np.full((tokens, heads), -INF)
    for t, h in np.ndindex(tokens, heads):
        used = [i for i in range(len(s)) if math.isfinite(s[i, t, h])]
        weights = [2.0 ** float(s[i, t, h]) for i in used]
        if used:
            rows = [v[i, t, h].astype(np.float64) for i in used]
            weighted = [w * row for w, row in zip(weights, rows, strict=True)]
            merged[t, h] = np.sum(weighted, axis=0) / sum(weights)
            log[t, h] = math.log2(sum(weights))
    return merged, log


def assert_state(v: Array, s: Array, expected: tuple[Array, Array], dtype: str) -> None:
    assert (v.dtype, s.dtype) == (DTYPES[dtype], np.float32)
    # The reference computes in float64 and rounds once.
    np.testing.assert_allclose(
        v.astype(np.float64), expected[0], rtol=HALF_ULP[dtype], atol=2.0**-25
    )
    np.testing.assert_allclose(s, expected[1], rtol=2.0**-23, atol=1e-14)


def assert_same_bits(got: Array, wanted: Array) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert got.tobytes() == wanted.tobytes()


# --- merging -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("merge_state", ["v_a", "s_a", "v_b", "s_b"]),
        ("merge_state_in_place", ["v", "s", "v_other", "s_other", "mask"]),
        ("merge_states", ["v", "s"]),
        (
            "append_paged_mla_kv_cache",
            [
                "append_ckv",
                "append_kpe",
                "batch_indices",
                "positions",
                "ckv_cache",
                "kpe_cache",
                "kv_indices",
                "kv_indptr",
                "kv_last_page_len",
            ],
        ),
    ],
)
def test_the_signatures_are_flashinfers(name: str, parameters: list[str]) -> None:
    found = inspect.signature(getattr(flashinfer, name)).parameters
    assert list(found) == parameters
    defaults = {n: p.default for n, p in found.items() if p.default is not p.empty}
    assert defaults == ({"mask": None} if "mask" in parameters else {})
    assert {p.kind for p in found.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert name in flashinfer.__all__


@dtypes
def test_two_states(dtype: str, convert: Convert) -> None:
    v, s = states(2, dtype)
    v_a, v_b, s_a, s_b = map(convert, (*v, *s))
    result = flashinfer.merge_state(v_a, s_a, v_b, s_b)
    assert type(result) is tuple
    merged = [to_host(array, v_a) for array in result]
    assert_state(*merged, naive_merge(v, s), dtype)
    assert not merged[0][:2].any()
    assert np.isneginf(merged[1][:2]).all()


@dtypes
@pytest.mark.parametrize("count", [1, 2, 5, 70])
def test_many_states(count: int, dtype: str, convert: Convert) -> None:
    v, s = states(count, dtype)
    stacked = [convert(np.ascontiguousarray(x.swapaxes(0, 1))) for x in (v, s)]
    result = flashinfer.merge_states(*stacked)
    assert type(result) is tuple
    assert_state(*(to_host(x, stacked[0]) for x in result), naive_merge(v, s), dtype)


def test_many_states_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    merge = flashinfer.merge_attention_states

    def note(outs: Any, lses: Any, **options: Any) -> Any:
        given.extend((outs, lses))
        return merge(outs, lses, **options)

    monkeypatch.setattr(flashinfer, "merge_attention_states", note)
    v, s = torch.zeros(4, 5, 3, 8), torch.zeros(4, 5, 3)
    flashinfer.merge_states(v, s)
    assert [x.data_ptr() for x in given] == [v.data_ptr(), s.data_ptr()]


@dtypes
def test_in_place(dtype: str, convert: Convert) -> None:
    v, s = states(2, dtype)
    expected = naive_merge(v, s)
    wide = np.full((7, 5, 24), 7, DTYPES[dtype])
    wide[:, 1:4, 8:] = v[0]
    before = v[1].copy(), s[1].copy()
    arguments = convert(wide[:, 1:4, 8:]), convert(s[0]), convert(v[1]), convert(s[1])
    assert flashinfer.merge_state_in_place(*arguments) is None
    assert_state(wide[:, 1:4, 8:], s[0], expected, dtype)
    wide[:, 1:4, 8:] = 7
    assert (wide == 7).all()
    for got, wanted in zip((v[1], s[1]), before, strict=True):
        assert_same_bits(got, wanted)


@dtypes
@pytest.mark.parametrize("kind", [np.bool_, np.uint8])
def test_masked_in_place(kind: Any, dtype: str, convert: Convert) -> None:
    v, s = states(2, dtype)
    merged = np.array([1, 0, 1, 1, 0, 1, 0], bool)
    used = ~merged[:, None] & np.isfinite(s[0])
    empty = ~merged[:, None] & np.isinf(s[0])
    assert used.any()
    assert empty.any()
    expected = naive_merge(v, s)
    before, other = (v[0].copy(), s[0].copy()), (v[1].copy(), s[1].copy())
    mask = np.where(merged, 200, 0).astype(kind)
    flashinfer.merge_state_in_place(*map(convert, (v[0], s[0], v[1], s[1], mask)))
    assert_state(v[0][merged], s[0][merged], tuple(x[merged] for x in expected), dtype)
    for got, kept in zip((v[0], s[0]), before, strict=True):
        assert_same_bits(got[used], kept[used])
    assert not v[0][empty].any()
    assert np.isneginf(s[0][empty]).all()
    for got, wanted in zip((v[1], s[1]), other, strict=True):
        assert_same_bits(got, wanted)


def attend(scores: Array, values: Array) -> tuple[Array, Array]:
    """Attention of scores (tokens, heads, keys) over values (keys, head_dim); s to base 2."""
    total = np.exp(scores).sum(axis=-1)
    with np.errstate(divide="ignore"):
        log = np.log2(total)
    return (np.exp(scores) @ values / np.where(total, total, 1)[..., None]).astype("f4"), log


@pytest.mark.parametrize("cuts", [[5], [0, 4, 20], list(range(1, 20))])
def test_parts_of_the_keys_merge_into_all(cuts: list[int], convert: Convert) -> None:
    rng = np.random.default_rng(len(cuts))
    scores, values = rng.standard_normal((3, 5, 20)), rng.standard_normal((20, 24))
    bounds = itertools.pairwise((0, *cuts, 20))
    parts = [attend(scores[..., slice(*part)], values[slice(*part)]) for part in bounds]
    v, s = (np.stack(x, axis=1).astype(np.float32) for x in zip(*parts, strict=True))
    by_stack = flashinfer.merge_states(convert(v), convert(s))
    chained = convert(v[:, 0].copy()), convert(s[:, 0].copy())
    for i in range(1, len(parts)):
        chained = flashinfer.merge_state(*chained, convert(v[:, i]), convert(s[:, i]))
    for result in (by_stack, chained):
        for got, wanted in zip(result, attend(scores, values), strict=True):
            np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-5, atol=1e-6)


# --- appending -----------------------------------------------------------------------------------


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_go_to_their_pages(dtype: str, page_size: int, joined: bool, convert: Convert) -> None:
    rng = np.random.default_rng(page_size)
    kv_indptr = np.array([0, 4, 4, 9], np.int32)
    kv_indices = rng.permutation(11)[:9].astype(np.int32)
    places = [
        (request, position)
        for request in range(3)
        for position in range(page_size * int(kv_indptr[request + 1] - kv_indptr[request]))
    ]
    places = [places[i] for i in rng.permutation(len(places))[: len(places) // 2]]
    nowhere = [(1, 0), (0, 4 * page_size), (-1, 0), (0, -1), (3, 0)]
    rows = np.array(places + nowhere, np.int32)
    ckv, kpe = (rng.standard_normal((len(rows), n)).astype(DTYPES[dtype]) for n in (512, 64))
    both = np.full((11, page_size, 576), NAN, DTYPES[dtype])
    expected = both.copy()
    for i, (request, position) in enumerate(places):
        page = kv_indices[kv_indptr[request] + position // page_size]
        expected[page, position % page_size] = np.concatenate([ckv[i], kpe[i]])
    caches = both[..., :512], both[..., 512:]
    if not joined:
        caches = caches[0].copy(), caches[1].copy()
    result = flashinfer.append_paged_mla_kv_cache(
        convert(ckv),
        convert(kpe),
        convert(rows[:, 0].copy()),
        convert(rows[:, 1].astype(np.int64)),
        *map(convert, caches),
        convert(kv_indices),
        convert(kv_indptr),
        convert(np.full(3, -77, np.int32)),  # not looked at
    )
    assert result is None
    assert_same_bits(np.concatenate(caches, axis=-1), expected)


def append_arguments(**changes: Any) -> dict[str, Any]:
    """Two rows for positions 3 and 4 of a request with pages 2 and 0."""
    return {
        "append_ckv": torch.ones(2, 512, dtype=torch.bfloat16),
        "append_kpe": torch.full((2, 64), 2, dtype=torch.bfloat16),
        "batch_indices": torch.tensor([0, 0], dtype=torch.int32),
        "positions": torch.tensor([3, 4], dtype=torch.int32),
        "ckv_cache": torch.zeros(3, 4, 512, dtype=torch.bfloat16),
        "kpe_cache": torch.zeros(3, 4, 64, dtype=torch.bfloat16),
        "kv_indices": torch.tensor([2, 0], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 2], dtype=torch.int32),
        "kv_last_page_len": torch.tensor([1], dtype=torch.int32),
        **changes,
    }


@pytest.mark.parametrize("names", [["kv_indices"], ["kv_indptr"], ["kv_indices", "kv_indptr"]])
def test_wide_page_lists_are_converted(names: list[str]) -> None:
    arguments = append_arguments()
    flashinfer.append_paged_mla_kv_cache(
        **arguments | {name: arguments[name].long() for name in names}
    )
    for cache, value in ((arguments["ckv_cache"], 1), (arguments["kpe_cache"], 2)):
        assert (cache[2, 3] == value).all()
        assert (cache[0, 0] == value).all()
        assert cache.count_nonzero() == 2 * cache.shape[-1]


# --- errors --------------------------------------------------------------------------------------


def test_axes_that_flashinfer_does_not_have() -> None:
    v, s = torch.zeros(2, 3, 3, 8), torch.zeros(2, 3, 3)
    axes = r"needs axes \(seq_len, num_heads, head_dim\), got shape \(2, 3, 3, 8\)"
    with pytest.raises(ValueError, match=f"^v_a: {axes}"):
        flashinfer.merge_state(v, s, v, s)
    with pytest.raises(ValueError, match=f"^v: {axes}"):
        flashinfer.merge_state_in_place(v, s, v, s)
    with pytest.raises(ValueError, match=r"^v: needs axes \(seq_len, num_states, .*\(3, 3, 8\)"):
        flashinfer.merge_states(v[0], s)
    with pytest.raises(ValueError, match=r"^s: needs axes \(seq_len, num_states, .*\(3, 3\)"):
        flashinfer.merge_states(v, s[0])
    v, s = torch.zeros(3, 3, 8), torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"^mask: needs axes \(seq_len\), got shape \(3, 3\)"):
        flashinfer.merge_state_in_place(v, s, v.clone(), s.clone(), s == 0)
    with pytest.raises(ValueError, match=r"^mask: needs an entry for each of the 3 rows .* got 2"):
        flashinfer.merge_state_in_place(v, s, v.clone(), s.clone(), torch.ones(2))


@pytest.mark.parametrize("name", ["v_a", "s_a", "v_b", "s_b"])
def test_what_is_no_tensor(name: str) -> None:
    v, s = torch.zeros(3, 2, 8), torch.zeros(3, 2)
    arguments = {"v_a": v, "s_a": s, "v_b": v, "s_b": s, name: None}
    with pytest.raises(TypeError, match=r"needs .*got builtins.NoneType"):
        flashinfer.merge_state(**arguments)


def test_errors_of_the_operations() -> None:
    v, s = torch.zeros(3, 2, 8), torch.zeros(3, 2)
    with pytest.raises(TypeError, match=r"^lses\[1\]: needs float32, got float64"):
        flashinfer.merge_state(v, s, v, s.double())
    with pytest.raises(TypeError, match=r"^outs\[1\]: needs the dtype of outs\[0\], float32"):
        flashinfer.merge_state(v, s, v.half(), s)
    with pytest.raises(ValueError, match=r"^outs\[1\]: needs the shape of outs\[0\], \(3, 2, 8\)"):
        flashinfer.merge_state_in_place(v, s, v[:2], s[:2])
    with pytest.raises(
        ValueError, match=r"^outs: needs a leading axis of at least one .*got shape \(0, 3"
    ):
        flashinfer.merge_states(torch.zeros(3, 0, 2, 8), torch.zeros(3, 0, 2))
    with pytest.raises(TypeError, match=r"^kv_cache\[0\]: needs bfloat16 or .*got float32"):
        flashinfer.append_paged_mla_kv_cache(**append_arguments(ckv_cache=torch.zeros(3, 4, 512)))
    with pytest.raises(ValueError, match=r"^positions: needs shape \(tokens,\) with 2 tokens"):
        flashinfer.append_paged_mla_kv_cache(
            **append_arguments(positions=torch.zeros(3, dtype=torch.int32))
        )
