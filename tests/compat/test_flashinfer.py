# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's merging, cache writing and concatenation on the CPU, against formulas in float64."""

from __future__ import annotations

import inspect
import math
from types import ModuleType
from typing import Any

import pytest

from cumla.compat import flashinfer
from cumla.compat.flashinfer import cascade, concat_ops, mla, page

torch = pytest.importorskip("torch")

INF, NAN = math.inf, math.nan
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}

dtypes = pytest.mark.parametrize("dtype", HALF_ULP)


def int32(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("module", "name", "parameters"),
    [
        (cascade, "merge_state", "v_a s_a v_b s_b"),
        (cascade, "merge_state_in_place", "v s v_other s_other mask=None"),
        (cascade, "merge_states", "v s"),
        (
            page,
            "append_paged_mla_kv_cache",
            (
                "append_ckv append_kpe batch_indices positions ckv_cache kpe_cache kv_indices "
                "kv_indptr kv_last_page_len"
            ),
        ),
        (page, "get_batch_indices_positions", "append_indptr seq_lens nnz"),
        (page, "get_seq_lens", "kv_indptr kv_last_page_len page_size"),
        (concat_ops, "concat_mla_k", "k k_nope k_rope backend='default'"),
        (
            mla,
            "BatchMLAPagedAttentionWrapper",
            (
                "float_workspace_buffer use_cuda_graph=False qo_indptr=None kv_indptr=None "
                "kv_indices=None kv_len_arr=None backend='auto'"
            ),
        ),
    ],
)
def test_names_and_signatures_are_where_flashinfer_has_them(
    module: ModuleType, name: str, parameters: str
) -> None:
    function = getattr(module, name)
    found = inspect.signature(function).parameters.values()
    given = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in found]
    assert " ".join(given) == parameters
    assert name in module.__all__
    assert (getattr(flashinfer, name, None) is function) == (module is not concat_ops)


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
