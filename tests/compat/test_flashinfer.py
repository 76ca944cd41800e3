# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's merging, cache writing and concatenation on the CPU, against formulas in float64."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest

from cumla.compat import flashinfer
from cumla.compat.flashinfer import cascade, concat_ops, mla
from tests.compat.torch_gpu import torch_gpu

torch = pytest.importorskip("torch")

INF, NAN = math.inf, math.nan
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}

dtypes = pytest.mark.parametrize("dtype", HALF_ULP)


def int32(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


def test_plans_are_described_by_what_the_package_exports() -> None:
    assert "MLAPlanMetadata" in flashinfer.__all__
    assert flashinfer.MLAPlanMetadata is mla.MLAPlanMetadata


# --- merging -------------------------------------------------------------------------------------


def states(count: int, dtype: Any) -> tuple[Any, Any]:
    """Stacked states; some are empty, in rows 0 and 1 all of them, and hold NaN there."""
    random = torch.Generator().manual_seed(count)
    s = 3 * torch.randn(count, 7, 3, generator=random)
    s[torch.rand(s.shape, generator=random) < 0.2] = -INF
    s[:, 0], s[:, 1] = -INF, INF
    v = torch.randn(count, 7, 3, 16, generator=random)
    v[s.isinf()] = NAN
    return v.to(dtype), s


def check(result: Any, v: Any, s: Any, rows: Any = slice(None)) -> None:
    """Hold a state against the weighted mean by powers of two, in float64."""
    weights = torch.where(s.isinf(), 0, s.double().exp2())
    total = weights.sum(0)
    merged = (v.double().nan_to_num() * weights[..., None]).sum(0) / total[..., None]
    dtype = result[0].dtype
    assert (dtype, result[1].dtype) == (v.dtype, torch.float32)
    expected = merged.nan_to_num()[rows], total.log2()[rows]
    got = result[0].double()[rows], result[1].double()[rows]
    # The reference computes in float64 and rounds once.
    torch.testing.assert_close(got[0], expected[0], rtol=HALF_ULP[dtype], atol=2.0**-25)
    torch.testing.assert_close(got[1], expected[1], rtol=2.0**-23, atol=1e-14)


@dtypes
def test_two_states(dtype: Any) -> None:
    v, s = states(2, dtype)
    result = flashinfer.merge_state(v[0], s[0], v[1], s[1].double())  # FlashInfer converts s
    assert type(result) is tuple
    check(result, v, s)
    assert not result[0][:2].any()
    assert result[1][:2].isneginf().all()


@dtypes
@pytest.mark.parametrize("count", [1, 5, 70])
def test_many_states_are_not_copied(
    count: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    merge = cascade.merge_attention_states

    def note(outs: Any, lses: Any, **options: Any) -> Any:
        given.extend((outs, lses))
        return merge(outs, lses, **options)

    monkeypatch.setattr(cascade, "merge_attention_states", note)
    v, s = states(count, dtype)
    stacked = [x.swapaxes(0, 1).contiguous() for x in (v, s)]
    check(flashinfer.merge_states(*stacked), v, s)
    assert [x.data_ptr() for x in given] == [x.data_ptr() for x in stacked]


@pytest.mark.parametrize("masked", [None, torch.bool, torch.uint8])
@dtypes
def test_in_place(dtype: Any, masked: Any) -> None:
    v, s = states(2, dtype)
    wide = torch.full((7, 5, 24), 7, dtype=dtype)
    own_v, own_s = wide[:, 1:4, 8:], s[0].clone()
    own_v.copy_(v[0])
    other = v[1].clone(), s[1].clone()
    mask = None if masked is None else (200 * int32(1, 0, 1, 1, 0, 1, 0)).to(masked)
    merged = torch.ones(7, dtype=torch.bool) if mask is None else mask.bool()
    assert flashinfer.merge_state_in_place(own_v, own_s, *other, mask) is None
    check((own_v, own_s), v, s, merged)
    s[1, ~merged] = -INF
    check((own_v, own_s), v, s)
    assert torch.equal(own_v[~merged].nan_to_num(), v[0][~merged].nan_to_num())
    own_v.fill_(7)
    assert (wide == 7).all()
    torch.testing.assert_close(other[0], v[1], rtol=0, atol=0, equal_nan=True)


def test_states_that_do_not_fit() -> None:
    """FlashInfer's kernels check them, whose errors are RuntimeErrors of any kind."""
    v, s = torch.zeros(3, 2, 8), torch.zeros(3, 2)
    stacked = torch.zeros(2, 3, 2, 8), torch.zeros(2, 3, 2)
    wide = torch.zeros(4, 2, 8), torch.zeros(4, 2)
    for call, error, message in (
        (lambda: flashinfer.merge_state(v, None, v, s), TypeError, "s_a: needs a PyTorch tensor"),
        (
            lambda: flashinfer.merge_state(*stacked, v, s),
            RuntimeError,
            r"v_a: needs axes \(seq_len, num_heads, head_dim\), got shape \(2, 3, 2, 8\)",
        ),
        (
            lambda: flashinfer.merge_state(v, s, v.half(), s),
            RuntimeError,
            "v_b: needs the dtype of v_a, float32",
        ),
        (
            lambda: flashinfer.merge_state_in_place(v, s, v[:2], s[:2]),
            RuntimeError,
            r"v_other: needs the shape of v, \(3, 2, 8\)",
        ),
        (
            lambda: flashinfer.merge_state_in_place(v, s.double(), v.clone(), s),
            RuntimeError,
            "s: needs float32, got float64",
        ),
        (
            lambda: flashinfer.merge_state_in_place(v, s, v.clone(), s.clone(), s == 0),
            RuntimeError,
            r"mask: needs axes \(seq_len\), got shape \(3, 2\)",
        ),
        (
            lambda: flashinfer.merge_state_in_place(v, s, v.clone(), s.clone(), torch.ones(2)),
            RuntimeError,
            "mask: needs an entry for each of the 3 rows .* got 2",
        ),
        (
            lambda: flashinfer.merge_states(v, s),
            RuntimeError,
            r"v: needs axes \(seq_len, num_states, .*\(3, 2, 8\)",
        ),
        (
            lambda: flashinfer.merge_states(stacked[0][:, :0], stacked[1][:, :0]),
            RuntimeError,
            "v: needs a leading axis of at least one",
        ),
        (
            lambda: flashinfer.merge_state_in_place(wide[0][:3], s, wide[0][1:], s + 0),
            RuntimeError,
            "v: needs memory of its own, got memory that v_other uses too; pass another",
        ),
        (
            lambda: flashinfer.merge_state_in_place(v, wide[1][:3], v + 0, wide[1][1:]),
            RuntimeError,
            "s: needs memory of its own, got memory that s_other uses too; pass another",
        ),
        (
            lambda: flashinfer.merge_state_in_place(v.double(), s, v.double(), s.clone()),
            RuntimeError,
            "v: needs float32 .* got float64; convert v and v_other$",
        ),
        (
            lambda: flashinfer.merge_state(v.double(), s, v.double(), s),
            RuntimeError,
            "v_a: needs float32 .* got float64; convert v_a and v_b$",
        ),
        (
            lambda: flashinfer.merge_states(stacked[0].double(), stacked[1]),
            RuntimeError,
            "v: needs float32 .* got float64; convert v$",
        ),
    ):
        with pytest.raises(error, match=f"^{message}"):
            call()


# --- pages ---------------------------------------------------------------------------------------


def test_lists_that_are_no_integers_and_lists_with_gaps() -> None:
    """A conversion would cut fractions off without a word; gaps are closed by copies."""
    lists: dict[str, Any] = {"batch_indices": int32(0, 0, 1), "positions": int32(0, 1, 0)}
    lists |= {"kv_indices": int32(1, 0), "kv_indptr": int32(0, 1, 2)}
    rows, latent, rope = (
        torch.randn(3, 2, 16),
        torch.randn(3, 512).half(),
        torch.randn(3, 64).half(),
    )

    def keys(**given: Any) -> Any:
        cache, last = torch.zeros(2, 2, 4, 2, 16), int32(2, 1)
        flashinfer.append_paged_kv_cache(
            rows, rows, paged_kv_cache=cache, kv_last_page_len=last, **given
        )
        return cache

    def latents(**given: Any) -> Any:
        caches = torch.zeros(2, 4, 512).half(), torch.zeros(2, 4, 64).half()
        flashinfer.append_paged_mla_kv_cache(
            latent,
            rope,
            ckv_cache=caches[0],
            kpe_cache=caches[1],
            kv_last_page_len=int32(2, 1),
            **given,
        )
        return torch.cat(caches, -1)

    def lengths(**given: Any) -> Any:
        return flashinfer.get_seq_lens(**given, page_size=4)

    def whose(**given: Any) -> Any:
        return torch.stack(flashinfer.get_batch_indices_positions(**given, nnz=3))

    def turned(**given: Any) -> Any:
        return torch.cat(flashinfer.apply_rope_pos_ids(rows, rows, **given))

    for function, arguments in (
        (keys, lists),
        (latents, lists),
        (lengths, {"kv_indptr": int32(0, 1, 2), "kv_last_page_len": int32(2, 1)}),
        (whose, {"append_indptr": int32(0, 1, 3), "seq_lens": int32(2, 1)}),
        (turned, {"pos_ids": int32(4, 0, 2)}),
    ):
        want = function(**arguments)
        assert want.any()
        apart = {n: torch.stack([x, x + 7], -1)[..., 0] for n, x in arguments.items()}
        assert torch.equal(function(**apart), want)
        for name in arguments:
            with pytest.raises(RuntimeError, match=f"^{name}: needs int32 or int64, got float32"):
                function(**arguments | {name: arguments[name].float()})


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize(("dtype", "joined"), [(torch.bfloat16, True), (torch.float16, False)])
def test_rows_go_to_their_pages(dtype: Any, joined: bool, page_size: int) -> None:
    """From the pages of each request and its new tokens to the cache, by FlashInfer's functions."""
    kv_indptr, kv_indices = int32(0, 4, 4, 9), torch.randperm(11)[:9]
    last_page_len = int32(page_size, 0, max(page_size - 1, 1))
    seq_lens = flashinfer.get_seq_lens(kv_indptr, last_page_len, page_size)
    assert seq_lens.tolist() == [4 * page_size, 0, 4 * page_size + int(last_page_len[2])]
    new = 3, 0, int(seq_lens[2])
    indptr, nnz = int32(0, new[0], new[0], sum(new)), sum(new) + 2  # two of nobody
    whose, positions = flashinfer.get_batch_indices_positions(indptr, seq_lens, nnz)
    assert (whose.dtype, positions.dtype) == (torch.int32, torch.int32)
    assert whose.tolist() == [0] * 3 + [2] * new[2] + [-1, -1]
    assert positions[:-2].tolist() == [*range(4 * page_size - 3, 4 * page_size), *range(new[2])]
    rows = torch.randn(nnz, 576).to(dtype)
    expected = torch.full((11, page_size, 576), NAN, dtype=dtype)
    cache = expected.clone()
    for row, request, position in zip(rows, whose.tolist()[:-2], positions.tolist(), strict=False):
        number = kv_indices[kv_indptr[request] + position // page_size]
        expected[number, position % page_size] = row
    caches = cache[..., :512], cache[..., 512:]
    if not joined:
        caches = caches[0].clone(), caches[1].clone()
    result = flashinfer.append_paged_mla_kv_cache(
        *rows.split((512, 64), dim=-1), whose, positions.long(), *caches, kv_indices, kv_indptr,
        last_page_len,
    )  # fmt: skip
    assert result is None
    got = torch.cat(caches, dim=-1)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_tokens_of_no_request() -> None:
    """As FlashInfer has them: the request -1 and the position 0; a batch may have no requests."""
    for indptr, lens, nnz, whose, where in (
        ((0,), (), 3, [-1] * 3, [0] * 3),
        ((0,), (), 0, [], []),
        ((0,), (9,), 1, [-1], [0]),
        ((1, 1, 3), (7, 5, 8), 5, [-1, 1, 1, -1, -1], [0, 3, 4, 0, 0]),
    ):
        found = flashinfer.get_batch_indices_positions(int32(*indptr), int32(*lens), nnz)
        assert [array.tolist() for array in found] == [whose, where]
        assert {array.dtype for array in found} == {torch.int32}
        outputs = [torch.full((nnz,), -9, dtype=torch.int32) for _ in range(2)]
        given = flashinfer.get_batch_indices_positions(int32(*indptr), int32(*lens), nnz, *outputs)
        assert all(one is other for one, other in zip(given, outputs, strict=True))
        assert [array.tolist() for array in outputs] == [whose, where]
    with pytest.raises(RuntimeError, match=r"^positions: needs shape \(3,\), .* got \(2,\)"):
        flashinfer.get_batch_indices_positions(int32(0, 1), int32(9), 3, None, int32(0, 0))
    for indptr in ((), (0, 1, 2)):
        with pytest.raises(RuntimeError, match=r"^append_indptr: needs an entry more than reque"):
            flashinfer.get_batch_indices_positions(int32(*indptr), int32(9), 3)


def test_rows_that_do_not_fit() -> None:
    bfloat16 = {"dtype": torch.bfloat16}
    arguments = {
        "append_ckv": torch.ones(2, 512, **bfloat16),
        "append_kpe": torch.ones(2, 64, **bfloat16),
        "batch_indices": int32(0, 0),
        "positions": int32(3, 4),
        "ckv_cache": torch.zeros(3, 4, 512, **bfloat16),
        "kpe_cache": torch.zeros(3, 4, 64, **bfloat16),
        "kv_indices": int32(2, 0),
        "kv_indptr": int32(0, 2),
        "kv_last_page_len": int32(1),
    }
    for name, wrong, error, message in (
        ("ckv_cache", torch.zeros(3, 4, 512), RuntimeError, "ckv_cache: needs bfloat16 or .*float"),
        ("append_kpe", torch.ones(2, 60, **bfloat16), RuntimeError, "append_kpe: needs"),
        ("positions", int32(1, 2, 3), RuntimeError, r"positions: needs shape \(tokens,\) with"),
        ("kv_indices", [2, 0], TypeError, "kv_indices: needs a PyTorch tensor, got builtins.list"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            flashinfer.append_paged_mla_kv_cache(**arguments | {name: wrong})


class Appending:
    """Rows for some places of three requests, one without pages, and for nowhere; the rest NaN."""

    def __init__(self, page_size: int, layout: str, pair: bool, dtype: Any, columns: int) -> None:
        torch.manual_seed(page_size)
        self.layout = layout
        counts, indices = (4, 0, 5), torch.randperm(11)[:9]
        indptr = int32(0, 4, 4, 9)
        places = [(r, p) for r, n in enumerate(counts) for p in range(n * page_size)][::2]
        nowhere = [(1, 0), (0, 4 * page_size), (-1, 0), (0, -1), (3, 0)]
        self.key, self.value = torch.randn(2, len(places) + 5, 2, columns).to(dtype)
        self.expected = torch.full((11, 2, page_size, 2, columns), NAN, dtype=dtype)
        shape = self.expected.transpose(2, 3) if layout == "HND" else self.expected
        packed = torch.full(shape.shape, NAN, dtype=dtype)
        for i, (r, p) in enumerate(places):
            page = self.expected[indices[indptr[r] + p // page_size]]
            page[0, p % page_size], page[1, p % page_size] = self.key[i], self.value[i]
        self.cache = (packed[:, 0].clone(), packed[:, 1].clone()) if pair else packed
        rows = torch.tensor(places + nowhere)
        self.lists = indices, indptr.long(), int32(1, 0, 1)
        self.places = rows[:, 0].contiguous(), rows[:, 1].int()

    def append(self) -> None:
        arguments = (self.key, self.value, *self.places, self.cache, *self.lists, self.layout)
        assert flashinfer.append_paged_kv_cache(*arguments) is None

    def check(self) -> None:
        found = torch.stack(self.cache, dim=1) if isinstance(self.cache, tuple) else self.cache
        found = found.transpose(2, 3) if self.layout == "HND" else found
        torch.testing.assert_close(found, self.expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("layout", "pair"), [("NHD", False), ("NHD", True), ("HND", False)])
@pytest.mark.parametrize(
    ("page_size", "dtype", "columns"),
    [(1, torch.float16, 64), (5, torch.bfloat16, 128), (8, torch.float32, 24)],
)
def test_keys_and_values_go_to_their_pages(
    layout: str, pair: bool, page_size: int, dtype: Any, columns: int
) -> None:
    case = Appending(page_size, layout, pair, dtype, columns)
    case.append()
    case.check()
    with torch_gpu():
        case = Appending(page_size, layout, pair, dtype, columns)
        case.append()
        case.check()


def test_rows_are_rounded_into_a_cache_of_8_bits() -> None:
    case = Appending(4, "NHD", True, torch.bfloat16, 64)
    fp8 = torch.float8_e4m3fn
    case.cache = tuple(part.to(fp8) for part in case.cache)
    case.append()
    case.cache = tuple(part.float() for part in case.cache)
    case.expected = case.expected.to(fp8).float()
    case.check()


def test_keys_and_values_that_do_not_fit() -> None:
    case = Appending(4, "NHD", False, torch.float16, 16)
    before = case.cache.clone()
    usual = {
        "append_key": case.key,
        "append_value": case.value,
        "batch_indices": case.places[0],
        "positions": case.places[1],
        "paged_kv_cache": case.cache,
        "kv_indices": case.lists[0],
        "kv_indptr": case.lists[1],
        "kv_last_page_len": case.lists[2],
    }
    for changes, error, message in (
        (
            {"append_key": case.key[1:]},
            RuntimeError,
            "append_value: needs the tokens and heads of ",
        ),
        ({"positions": case.places[1][1:]}, RuntimeError, "positions: needs shape"),
        ({"kv_layout": "NDH"}, RuntimeError, "kv_layout: needs 'NHD' or 'HND'"),
        (
            {"kv_layout": "HND"},
            RuntimeError,
            r"paged_kv_cache\[:, 0\]: needs shape \(num_pages, 2, ",
        ),
        (
            {"paged_kv_cache": case.cache[:, 0]},
            RuntimeError,
            "paged_kv_cache: needs keys and values along its second axis.*pair",
        ),
        (
            {"paged_kv_cache": (case.cache,)},
            RuntimeError,
            "paged_kv_cache: needs one tensor or a p",
        ),
        (
            {"paged_kv_cache": (case.cache[:, 0], case.cache[:, 1].bfloat16())},
            RuntimeError,
            r"paged_kv_cache\[1\]: needs float16",
        ),
        ({"append_key": [1, 2]}, TypeError, "append_key: needs a PyTorch tensor"),
        (
            {"append_key": case.key.float()},
            RuntimeError,
            "append_key: needs the cache's dtype float16, got float32; convert it",
        ),
        ({"paged_kv_cache": 7}, RuntimeError, "paged_kv_cache: needs a PyTorch tensor"),
        ({"kv_indptr": [0, 1]}, TypeError, "kv_indptr: needs a PyTorch tensor"),
        (
            {"kv_indices": case.lists[1], "kv_indptr": case.lists[0]},
            RuntimeError,
            "kv_indptr: needs 4 entries with the 3 requests of kv_last_page_len, got 9; pass kv_in",
        ),
    ):
        with pytest.raises(error, match=f"^{message}"):
            flashinfer.append_paged_kv_cache(**usual | changes)
    torch.testing.assert_close(case.cache, before, rtol=0, atol=0, equal_nan=True)


# --- rotation ------------------------------------------------------------------------------------


def turned(rows: Any, angles: Any, interleaved: bool) -> Any:
    """Rows (tokens, heads, columns) by angles (tokens, rotary_dim / 2), in float64."""
    out, half = rows.double(), angles.shape[1]
    pairs = out[..., : 2 * half].clone()
    pairs = pairs.unflatten(-1, (half, 2) if interleaved else (2, half))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    numbers = torch.view_as_complex(pairs.contiguous())
    numbers = torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)[:, None])
    numbers = numbers if interleaved else numbers.transpose(-1, -2)
    out[..., : 2 * half] = numbers.flatten(-2)
    return out


def check_turned(found: Any, expected: Any) -> None:
    """Products in float32 are rounded once."""
    bound = HALF_ULP[found.dtype] * expected.abs() + 3e-6
    assert ((found.double() - expected).abs() <= bound).all()


ROTATIONS = [
    (64, 64, torch.float16),
    (128, 64, torch.bfloat16),
    (256, 128, torch.float16),
    (96, 64, torch.float32),
]


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_size", "rotary_dim", "dtype"), ROTATIONS)
@pytest.mark.parametrize("where", ["cpu", "emulated gpu"])
def test_rotation_by_a_table(
    where: str, head_size: int, rotary_dim: int, dtype: Any, is_neox: bool
) -> None:
    """Of views into a projection; in place, and into new tensors."""
    torch.manual_seed(head_size)
    angles = torch.outer(
        torch.arange(50), 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    )
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    angles = torch.atan2(*(table.double().chunk(2, dim=-1)[::-1]))
    positions = torch.tensor([3, 0, 49, 7, 7])
    projection = torch.randn(5, 7 * head_size).to(dtype)
    query, key, value = projection.split([4 * head_size, head_size, 2 * head_size], dim=-1)
    before = projection.clone()
    expected = [
        turned(rows.unflatten(1, (-1, head_size)), angles[positions], not is_neox).flatten(1)
        for rows in (query, key)
    ]
    with torch_gpu() if where != "cpu" else contextlib.nullcontext():
        found = flashinfer.apply_rope_with_cos_sin_cache(
            positions, query, key, head_size, table, is_neox
        )
        assert torch.equal(projection, before)
        assert not flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions.int(), query, key, head_size, table, is_neox
        )
    for new, rows, wanted in zip(found, (query, key), expected, strict=True):
        check_turned(new, wanted)
        assert torch.equal(new, rows)
    assert torch.equal(value, before[:, 5 * head_size :])


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("rotary_dim", [None, 32])
def test_rotation_by_positions(rotary_dim: int | None, interleave: bool) -> None:
    torch.manual_seed(2)
    q, k = torch.randn(6, 4, 64).half(), torch.randn(6, 2, 64).half()
    positions = int32(0, 1, 17, 4096, 131_071, 5)
    columns = rotary_dim or 64
    exponents = torch.arange(0, columns, 2).double() / columns
    angles = positions[:, None] / (8 * 500_000.0**exponents)
    expected = [turned(rows, angles, interleave) for rows in (q, k)]
    before = q.clone()
    options = {"rope_scale": 8, "rope_theta": 5e5, "interleave": interleave}
    found = flashinfer.apply_rope_pos_ids(q, k, positions, rotary_dim, **options)
    assert torch.equal(q, before)
    assert not flashinfer.apply_rope_pos_ids_inplace(q, k, positions.long(), rotary_dim, **options)
    for new, rows, wanted in zip(found, (q, k), expected, strict=True):
        check_turned(new, wanted)
        assert torch.equal(new, rows)


LLAMA31 = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("by", ["pos_ids", "offsets"])
@pytest.mark.parametrize("llama31", [False, True])
def test_rotation_of_requests_and_of_llama_3_1(llama31: bool, by: str, in_place: bool) -> None:
    """Positions count on from an offset; slow turns are slowed down, quick ones kept."""
    q, k = torch.randn(7, 4, 64).half(), torch.randn(7, 2, 64).half()
    indptr, offsets = int32(1, 3, 3, 6), int32(5000, 9, 0)
    positions = torch.tensor([0, 5000, 5001, 0, 1, 2, 0])
    is_outside = torch.tensor([1, 0, 0, 0, 0, 0, 1]).bool()
    turns = 500000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    if llama31:  # of a wave by how often the former context holds it
        kept = ((8192 * turns / (2 * math.pi) - 1) / 3).clamp(0, 1)
        turns = kept * turns + (1 - kept) * turns / 8
        assert {0.0, 1.0} < {*kept.tolist()}
    else:
        turns = turns / 8
    name = f"apply_{'llama31_' if llama31 else ''}rope{'_pos_ids' if by == 'pos_ids' else ''}"
    function = getattr(flashinfer, name + ("_inplace" if in_place else ""))
    places = (positions,) if by == "pos_ids" else (indptr, offsets)
    options = {"rope_scale": 8.0, "rope_theta": 500000.0}
    before = q.clone(), k.clone()
    result = function(q, k, *places, **options)
    assert result is None if in_place else torch.equal(q, before[0])
    found = (q, k) if in_place else result
    for new, rows in zip(found, before, strict=True):
        wanted = turned(rows, torch.outer(positions.double(), turns), False)
        if by == "offsets":
            wanted[is_outside] = rows[is_outside].double()  # rows of no request stay
        check_turned(new, wanted)
    if llama31:
        usual = getattr(flashinfer, name)(*before, *places)
        told = getattr(flashinfer, name)(*before, *places, **options, **LLAMA31)
        assert all(map(torch.equal, usual, told))


def test_requests_to_rotate_that_do_not_fit() -> None:
    rows = torch.zeros(3, 2, 64)
    for indptr, offsets, says in (
        (int32(0, 3), int32(0, 1), "offsets: needs an entry for each of the 1 requests"),
        (int32(0, 3).float(), int32(0), "indptr: needs int32 or int64, got float32"),
        (int32(0, 3), int32(0).double(), "offsets: needs int32 or int64, got float64"),
        (int32(0, 3)[None], int32(0), "indptr: needs axes"),
    ):
        with pytest.raises(RuntimeError, match=f"^{says}"):
            flashinfer.apply_rope(rows, rows, indptr, offsets)
    with pytest.raises(TypeError, match=r"^offsets: needs a PyTorch tensor"):
        flashinfer.apply_rope(rows, rows, int32(0, 3), [0])  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("pair", [False, True])
def test_pages_of_one_row_without_their_axis(layout: str, pair: bool) -> None:
    case = Appending(1, layout, pair, torch.float16, 16)
    axis = -2 if layout == "HND" else -3
    given = case.cache
    case.cache = tuple(c.squeeze(axis) for c in given) if pair else given.squeeze(axis)
    case.append()
    case.cache = given
    case.check()


def test_rotations_that_do_not_fit() -> None:
    rows, table = torch.ones(2, 32).half(), torch.ones(5, 16)
    heads = torch.ones(2, 1, 32).half()
    positions = int32(0, 1)
    by_table = flashinfer.apply_rope_with_cos_sin_cache
    by_positions = flashinfer.apply_rope_pos_ids
    for call, error, message in (
        (lambda: by_table([1], rows, rows, 32, table), TypeError, "positions: needs a PyTorch t"),
        (lambda: by_table(positions, 1, rows, 32, table), TypeError, "query: needs a PyTorch t"),
        (lambda: by_table(positions, heads, rows, 32, table), RuntimeError, "query: needs axes"),
        (
            lambda: by_table(positions, rows, rows, 24, table),
            RuntimeError,
            r"query: needs a multiple of head_size 24 columns, got shape \(2, 32\)",
        ),
        (
            lambda: by_table(positions, rows, rows, 32, torch.ones(5, 48)),
            RuntimeError,
            "cos_sin_cache: needs rotary_dim a multiple of 16",
        ),
        (
            lambda: by_table(positions, rows.double(), rows, 32, table),
            RuntimeError,
            "query: needs bfloat16 or float16 or float32, got float64",
        ),
        (lambda: by_table(int32(1), rows, rows, 32, table), RuntimeError, "positions: needs shape"),
        (lambda: by_positions(heads, heads, int32(1)), RuntimeError, "pos_ids: needs shape"),
        (lambda: by_positions(rows, heads, positions), RuntimeError, "q: needs axes"),
        (
            lambda: by_positions(heads, heads, positions, 48),
            RuntimeError,
            "rotary_dim: needs an even number up to the 32 columns of q, got 48",
        ),
        (
            lambda: by_positions(heads, heads[1:], positions),
            RuntimeError,
            "k: needs tokens and col",
        ),
    ):
        with pytest.raises(error, match=f"^{message}"):
            call()


# --- concat_mla_k --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_keys_are_put_together(dtype: Any) -> None:
    base = torch.full((7, 4, 200), 7.0).to(dtype)
    k_nope, k_rope = torch.randn(7, 4, 128).to(dtype), torch.randn(7, 1, 64).to(dtype)
    assert concat_ops.concat_mla_k(base[..., 8:], k_nope, k_rope) is None
    assert (base[..., :8].float() == 7).all()
    expected = torch.cat([k_nope.float(), k_rope.float().expand(7, 4, 64)], dim=-1)
    assert torch.equal(base[..., 8:].float(), expected)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": torch.zeros(7, 4, 200)}, RuntimeError, r"k: needs shape \(7, 4, 192\).*4, 200\)"),
        ({"k_nope": torch.zeros(7, 1, 128)}, RuntimeError, r"k: needs shape \(7, 1, 192\)"),
        ({"k_rope": torch.zeros(7, 4, 64)}, RuntimeError, r"k_rope: .* \(7, 1, 64\).*\(7, 4, 64\)"),
        ({"k_rope": torch.zeros(7, 64)}, RuntimeError, r"k_rope: needs axes \(num_tokens, 1, rope"),
        ({"k_nope": torch.zeros(7, 4, 128).half()}, RuntimeError, "k_nope: needs the dtype of k, "),
        ({"k": 5}, TypeError, "k: needs a PyTorch tensor"),
        ({"backend": "cake"}, ValueError, "backend: needs 'default', got 'cake'"),
    ],
)
def test_keys_that_do_not_fit(changes: Any, error: type[Exception], message: str) -> None:
    parts = {"k_nope": torch.zeros(7, 4, 128), "k_rope": torch.zeros(7, 1, 64)}
    with pytest.raises(error, match=f"^{message}"):
        concat_ops.concat_mla_k(**{"k": torch.zeros(7, 4, 192), **parts, **changes})
