# SPDX-License-Identifier: Apache-2.0
"""Merging partial attention results on the GPU against float64; what has weight 0 is NaN."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.gpu.tools import kernels
from tests.gpu.tools.arrays import bits_of, from_jax, from_torch, to_torch
from tests.gpu.tools.cases import Case as DecodeCase
from tests.gpu.tools.problem import (
    NAN_BITS,
    NUMPY_DTYPES,
    Guarded,
    make_problem,
    normal_bits,
    typed,
)
from tests.merge_tolerance import assert_merged

KERNELS = ("merge_states",)
cp: Any = pytest.importorskip("cupy")

DTYPES = ("bfloat16", "float16", "float32")
Array = Any


@dataclass(frozen=True)
class Case:
    """Partial results of one shape; `form` is how they are passed."""

    count: int = 3
    heads: int = 16
    head_dim: int = 512
    dtype: str = "bfloat16"
    axes: int = 4
    form: str = "sequence"
    base: float = math.e
    seed: int = 0

    @property
    def name(self) -> str:
        base = "e" if self.base == math.e else "2"
        return (
            f"n{self.count}-h{self.heads}-d{self.head_dim}-{self.dtype}-{self.axes}axes-"
            f"{self.form}-base_{base}"
        ).replace(" ", "_")

    @property
    def tokens(self) -> int:
        """Fewer where rows are long and many: the reference runs on the host."""
        return max(1, min(13, 4_000_000 // (self.count * self.heads * self.head_dim)))

    @property
    def out_shape(self) -> tuple[int, ...]:
        batch = (3,) if self.axes == 4 else ()
        return (*batch, self.tokens, self.heads, self.head_dim)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.out_shape[:-1]


def grid() -> list[Case]:
    """Every count with every dtype, the other factors drawn, the same ones every time."""
    draw = random.Random(20261121).choice
    return [
        Case(
            count=count,
            heads=draw((1, 16, 96, 128)),
            head_dim=draw((8, 16, 64, 72, 128, 512, 2056)),
            dtype=dtype,
            axes=draw((3, 4)),
            form=draw(("sequence", "stacked", "strided", "padded stack")),
            base=draw((math.e, 2)),
        )
        for count, dtype, _ in itertools.product((*range(1, 10), 60, 70), DTYPES, range(2))
    ]


CASES = grid()


class States:
    """Partial results on the host and on the GPU."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(100 * case.count + case.seed)
        kind = NUMPY_DTYPES[case.dtype]
        self.case = case
        self.outs = rng.standard_normal((case.count, *case.out_shape), np.float32).astype(kind)
        self.lses = 3 * rng.standard_normal((case.count, *case.lse_shape), np.float32)
        drawn = rng.random(self.lses.shape)
        self.lses[drawn < 0.15], self.lses[drawn > 0.85] = np.inf, -np.inf
        signs = np.where(np.arange(case.count) % 2, np.inf, -np.inf)
        nothing = self.lses[:, 0, ..., 0]  # one row, or one of each token
        nothing[...] = signs.reshape(-1, *[1] * (case.axes - 3))
        empty = np.isinf(self.lses)
        self.outs[empty] = np.nan
        self.arguments = self._upload()

    def _upload(self) -> tuple[Any, Any]:
        """The arrays in the form that the case asks for; what lies between their rows is NaN."""
        form, lses = self.case.form, cp.asarray(self.lses)
        if form in ("sequence", "stacked"):
            outs = upload(self.outs)
        else:
            outs = padded(self.outs, partials_inside=form == "strided")
            lses = cp.ascontiguousarray(lses.T).T  # the last axis has the largest stride
        if form in ("sequence", "strided"):
            return list(outs), tuple(lses)
        return outs, lses

    def merge(self, **options: Any) -> Any:
        return cumla.merge_attention_states(*self.arguments, lse_base=self.case.base, **options)

    def check(self, out: Array, lse: Array) -> dict[str, float]:
        return assert_merged(
            download(out), lse.get(), self.outs, self.lses, lse_base=self.case.base
        )


def upload(array: np.ndarray) -> Array:
    if array.dtype == np.float32:
        return cp.asarray(array)
    return cp.asarray(array.view(np.uint16)).view(array.dtype)


def download(array: Array) -> np.ndarray:
    if array.dtype == np.float32:
        return array.get()
    return np.ascontiguousarray(array.view(np.uint16).get()).view(array.dtype)


def padded(outs: np.ndarray, *, partials_inside: bool) -> Array:
    """A strided copy; with the partial results between the heads and head_dim, or outside."""
    dtype = outs.dtype
    bits = outs.view(np.uint32 if dtype == np.float32 else np.uint16)
    order = (*range(1, bits.ndim - 1), 0, bits.ndim - 1)
    moved = bits.transpose(order) if partials_inside else bits
    wide = (*moved.shape[:-2], moved.shape[-2] + 1, moved.shape[-1] + 8)
    nan = 0x7FC00001 if dtype == np.float32 else NAN_BITS[dtype.name]
    base = cp.full(wide, nan, dtype=bits.dtype)
    view = base[..., : moved.shape[-2], : moved.shape[-1]]
    view[...] = cp.asarray(np.ascontiguousarray(moved))
    if partials_inside:
        view = view.transpose(moved.ndim - 2, *range(moved.ndim - 2), moved.ndim - 1)
    return view.view(dtype)


def outputs(case: Case, dtype: str | None = None) -> tuple[Guarded, Guarded]:
    """Poisoned `out` and `lse`."""
    return (
        Guarded(cp, case.out_shape, dtype or case.dtype),
        Guarded(cp, case.lse_shape, "float32"),
    )


def same_bits(results: Any, expected: Any) -> bool:
    return all(
        bool((bits_of(x) == bits_of(y)).all()) for x, y in zip(results, expected, strict=True)
    )


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_grid(case: Case, record_figures: Callable[..., None]) -> None:
    states = States(case)
    out, lse = outputs(case)
    result = states.merge(out=out.array, lse=lse.array)
    assert result.out is out.array and result.lse is lse.array
    record_figures(states.check(*result))
    out.check_guards()
    lse.check_guards()
    fresh = states.merge()
    assert isinstance(fresh, cumla.AttentionState)
    assert (str(fresh.out.dtype), str(fresh.lse.dtype)) == (case.dtype, "float32")
    assert same_bits(fresh, result)


def test_the_grid_has_what_it_should() -> None:
    assert {case.count for case in CASES} == {*range(1, 10), 60, 70}
    for dtype in DTYPES:
        found = [case for case in CASES if case.dtype == dtype]
        assert {case.heads for case in found} == {1, 16, 96, 128}
        assert len({case.form for case in found}) == 4
        assert len({case.head_dim for case in found}) >= 5
        assert len({(case.axes, case.base) for case in found}) == 4


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_out(dtype: str, to: str, record_figures: Callable[..., None]) -> None:
    for head_dim in (8, 24, 512):
        states = States(Case(5, 3, head_dim, dtype))
        out, lse = outputs(states.case, to)
        record_figures(states.check(*states.merge(out=out.array, lse=lse.array)))
        out.check_guards()


def test_a_strided_output() -> None:
    """Between its rows nothing is written."""
    states = States(Case(4, 16, 64))
    wide = cp.full((3, 13, 20, 80), 0x7FC1, dtype=cp.uint16)
    lse = cp.zeros((16, 3, 13), dtype=cp.float32).transpose(1, 2, 0)
    states.check(*states.merge(out=typed(wide, "bfloat16")[:, :, 2:18, 8:72], lse=lse))
    wide[:, :, 2:18, 8:72] = 0x7FC1
    assert bool((wide == 0x7FC1).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["sequence", "strided"])
@pytest.mark.parametrize(("count", "place"), [(1, 0), (2, 0), (2, 1), (7, 3), (70, 0), (70, 65)])
def test_in_place(count: int, place: int, form: str, dtype: str) -> None:
    for head_dim in (8, 512, 1032):
        states = States(Case(count, 16, head_dim, dtype, form=form))
        expected = states.merge()
        outs, lses = states.arguments
        result = states.merge(out=outs[place], lse=lses[place])
        assert result.out is outs[place] and result.lse is lses[place]
        assert same_bits(result, expected)
        states.check(*result)


def test_one_partial_result_comes_back_to_the_bit() -> None:
    for dtype in DTYPES:
        states = States(Case(1, 16, 512, dtype))
        out, lse = states.merge()
        used = np.isfinite(states.lses[0])
        np.testing.assert_array_equal(lse.get()[used], states.lses[0][used])
        np.testing.assert_array_equal(download(out)[used], states.outs[0][used])


def test_nan_logarithm_stays_in_its_row() -> None:
    states = States(Case(5, 16, 512, form="stacked"))
    expected = states.merge()
    rows = np.isfinite(states.lses[2]) & np.isfinite(states.lses[3])
    batch, token, head = (int(x[0]) for x in np.nonzero(rows))
    states.arguments[1][2, batch, token, head] = np.nan
    out, lse = states.merge()
    spoilt = np.zeros(rows.shape, bool)
    spoilt[batch, token, head] = True
    assert np.array_equal(np.isnan(lse.get()), spoilt)
    assert np.isnan(download(out)[batch, token, head]).all()
    np.testing.assert_array_equal(download(out)[~spoilt], download(expected.out)[~spoilt])


def test_logarithms_far_apart_and_far_from_zero() -> None:
    """Weights that underflow, and logarithms whose exponentials do not fit into a float."""
    states = States(Case(4, 8, 64, "float32", form="stacked"))
    for shift in (-3000.0, 3000.0):
        states.lses[...] = np.where(np.isinf(states.lses), states.lses, shift)
        states.lses[1] -= 300
        states.arguments = (states.arguments[0], cp.asarray(states.lses))
        states.check(*states.merge())


@pytest.mark.parametrize("count", [2, 9, 70])
def test_20_repeats_give_the_same_bits(count: int) -> None:
    for dtype in DTYPES:
        states = States(Case(count, 128, 512, dtype))
        results = [states.merge() for _ in range(20)]
        states.check(*results[0])
        assert all(same_bits(result, results[0]) for result in results[1:])


def test_more_than_2_to_the_31_elements() -> None:
    """Each partial result has them; rows from both ends and around the limit are compared."""
    shape = (33_000, 128, 512)
    nbytes = 2 * math.prod(shape)
    assert math.prod(shape) > 1 << 31
    cp.get_default_memory_pool().free_all_blocks()
    if cp.cuda.runtime.memGetInfo()[0] < 3.5 * nbytes:
        pytest.skip(f"needs {3.5 * nbytes / 2**30:.0f} GiB of free memory")
    bits = [normal_bits(cp, shape, "bfloat16", 1.0, offset) for offset in (11, 22_222)]
    lses = cp.asarray(np.random.default_rng(0).standard_normal((2, *shape[:2]), np.float32))
    out, lse = cumla.merge_attention_states([typed(x, "bfloat16") for x in bits], lses)
    limit = (1 << 31) // (128 * 512)
    for tokens in (slice(0, 3), slice(limit - 2, limit + 3), slice(-3, None)):
        partials = [x[tokens].get().view(ml_dtypes.bfloat16) for x in bits]
        merged = download(out[tokens]), lse[tokens].get()
        assert_merged(*merged, partials, lses[:, tokens].get(), lse_base=math.e)


def test_parts_of_a_cache_merge_into_the_whole() -> None:
    """Behind the kernels that write its inputs, in one stream."""
    problem = make_problem(cp, DecodeCase(batch=3, q_len=2, heads=128, kv_len=2000, causal=False))
    table, lengths = problem.table, problem.lengths
    parts = []
    for begin, end in itertools.pairwise((0, 1, 9, table.shape[1])):
        inside = np.clip(lengths - 64 * begin, 0, 64 * (end - begin)).astype(np.int32)
        parts.append((cp.asarray(table[:, begin:end].copy()), cp.asarray(inside)))
    for _ in range(5):
        results = [
            cumla.mla_decode(
                problem.q,
                problem.kv_cache,
                *part,
                causal=False,
                out=cp.full(problem.out_shape, np.nan, dtype=cp.float32),
            )
            for part in parts
        ]
        out = typed(cp.zeros(problem.out_shape, dtype=cp.uint16), "bfloat16")
        merged = cumla.merge_attention_states(*zip(*results, strict=True), out=out)
        problem.check(*merged)


# --- streams and graphs --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["current", "object", "handle"])
@pytest.mark.parametrize("count", [3, 70])
def test_a_side_stream(count: int, how: str) -> None:
    states = States(Case(count, 16, 512, form="stacked"))
    states.merge()  # the kernel is loaded
    outs, lses = states.arguments
    late = cp.zeros_like(lses)
    cp.cuda.Device().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        kernels.spin(100_000_000)
        late[...] = lses
    if how == "current":
        with stream:
            result = cumla.merge_attention_states(outs, late, lse_base=states.case.base)
    else:
        given = stream if how == "object" else stream.ptr
        result = cumla.merge_attention_states(outs, late, stream=given)
    assert not stream.done, "the call waited for the device"
    stream.synchronize()
    states.check(*result)


def test_a_cupy_graph_replayed_with_new_values() -> None:
    first, second = (States(Case(9, 96, 512, form="stacked", seed=seed)) for seed in (1, 2))
    out, lse = outputs(first.case)
    cumla.prepare(cumla.merge_attention_states)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        first.merge(out=out.array, lse=lse.array)
        graph = stream.end_capture()
    for states in (first, second, first):
        first.arguments[0].view(np.uint16)[...] = upload(states.outs).view(np.uint16)
        first.arguments[1][...] = cp.asarray(states.lses)
        out.repoison()
        lse.repoison()
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        states.check(out.array, lse.array)
        out.check_guards()
        lse.check_guards()


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("count", [3, 70])
def test_a_torch_graph(torch: Any, count: int) -> None:
    """Outputs, and what many partial results need between launches, come from its pool."""
    states = States(Case(count, 16, 512, form="stacked"))
    outs, lses = (to_torch(torch, array) for array in states.arguments)
    cumla.prepare(cumla.merge_attention_states)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = cumla.merge_attention_states(outs, lses)
    for _ in range(3):
        result.out.fill_(float("nan"))
        result.lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        states.check(*(from_torch(torch, tensor) for tensor in result))


# --- frameworks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["sequence", "strided", "padded stack"])
def test_torch(torch: Any, form: str, dtype: str) -> None:
    states = States(Case(5, 96, 128, dtype, form=form))
    arguments = [
        [to_torch(torch, array) for array in some]
        if isinstance(some, (list, tuple))
        else to_torch(torch, some)
        for some in states.arguments
    ]
    result = cumla.merge_attention_states(*arguments)
    torch.cuda.synchronize()
    assert all(isinstance(tensor, torch.Tensor) for tensor in result)
    assert result.out.dtype == getattr(torch, dtype)
    states.check(*(from_torch(torch, tensor) for tensor in result))
    in_place = cumla.merge_attention_states(*arguments, out=arguments[0][2], lse=arguments[1][2])
    torch.cuda.synchronize()
    assert bool((in_place.out.float() == result.out.float()).all())
    assert bool((in_place.lse == result.lse).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [4, 70])
def test_jax(jax: Any, count: int, dtype: str) -> None:
    states = States(Case(count, 16, 512, dtype, axes=3))
    outs, lses = jax.numpy.asarray(states.outs), jax.numpy.asarray(states.lses)
    for arguments in ((outs, lses), (list(outs), list(lses))):
        result = cumla.merge_attention_states(*arguments)
        assert all(isinstance(array, jax.Array) for array in result)
        states.check(*(from_jax(array) for array in result))


def test_partial_results_of_several_frameworks(torch: Any, jax: Any) -> None:
    states = States(Case(3, 16, 512))
    outs, lses = states.arguments
    mixed = [outs[0], to_torch(torch, outs[1]), jax.numpy.asarray(states.outs[2])]
    torch.cuda.synchronize()
    result = cumla.merge_attention_states(mixed, lses)
    assert isinstance(result.out, cp.ndarray)
    assert same_bits(result, states.merge())
