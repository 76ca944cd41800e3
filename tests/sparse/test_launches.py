# SPDX-License-Identifier: Apache-2.0
"""What sparse MLA hands to its launchers, and on which stream. The GPU is a stand-in's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from cumla.sparse import attend, mla_sparse
from tests.calls import BF16, int32, numbers, refused
from tests.fake_cuda import FakeBindings, FakeCuPy, FakeDriver

TOKENS, HEADS, TOPK = 6, 16, 5
SCHEDULE = ["bound_rows", "mla_schedule"]


class Handed:
    """What the launchers were called with; they are called all the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.key: Any = None
        self.lengths: Any = None
        self.arguments: Any = None
        self.out: Any = None
        self.lse: Any = None
        lengths_launches, attend_launches = attend.lengths_launches, attend.attend_launches

        def lengths(key: Any, buffer: int, lengths: tuple[Any, Any]) -> Any:
            self.key, (self.lengths, _) = key, lengths
            return lengths_launches(key, buffer, lengths)

        def attention(key: Any, buffer: int, arguments: Any, out: Any, lse: Any) -> Any:
            self.key, self.arguments, self.out, self.lse = key, arguments, out, lse
            return attend_launches(key, buffer, arguments, out, lse)

        monkeypatch.setattr(attend, "lengths_launches", lengths)
        monkeypatch.setattr(attend, "attend_launches", attention)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch, bindings: FakeBindings) -> Handed:
    return Handed(monkeypatch)


def tokens(**changes: Any) -> dict[str, Any]:
    return {
        "q": numbers(TOKENS, HEADS, 576),
        "kv_cache": numbers(4, 8, 1, 576),
        "indices": np.zeros((TOKENS, TOPK), np.int32),
        **changes,
    }


def batched(**changes: Any) -> dict[str, Any]:
    q, lists = numbers(2, 3, HEADS, 576), np.zeros((2, 3, TOPK), np.int32)
    return tokens(q=q, indices=lists, **changes)


def on_gpu(cupy: FakeCuPy, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: cupy.like(array) for name, array in arguments.items()}


def call(cupy: FakeCuPy, arguments: dict[str, Any]) -> Any:
    function = cumla.mla_sparse_decode
    if arguments["q"].ndim == 3:
        function = cumla.mla_sparse_attention
    return function(**on_gpu(cupy, arguments))


# --- views ----------------------------------------------------------------------------------------


def test_a_batch_as_it_comes(cupy: FakeCuPy, handed: Handed) -> None:
    call(cupy, batched())
    a = handed.arguments
    assert (a.q.shape, a.q_rope.shape) == ((2, 3, HEADS, 512), (2, 3, HEADS, 64))
    assert (a.kv_cache.shape, a.kv_rope.shape) == ((4, 8, 1, 512), (4, 8, 1, 64))
    assert (a.kv_scales, a.kv_scale, a.block_table, a.row_to_request, a.sinks) == (
        *(None, 1.0, None),
        *(None, None),
    )
    assert a.softmax_scale == 576**-0.5
    assert (handed.out.shape, handed.lse.shape) == ((2, 3, HEADS, 512), (2, HEADS, 3))
    assert handed.lengths is None
    key = handed.key
    assert (key.batch, key.q_len, key.num_heads, key.topk) == (2, 3, HEADS, TOPK)
    assert (key.dtype, key.cache, key.sm_count, key.batch_invariant) == (
        *("bfloat16", "same"),
        *(132, False),
    )


@pytest.mark.parametrize("head_axis", [False, True])
def test_tokens_are_a_batch_of_one(cupy: FakeCuPy, handed: Handed, head_axis: bool) -> None:
    arguments = tokens(
        topk_lens=int32(*range(TOKENS)),
        block_table=int32([0, 1], [2, 3]),
        row_to_request=int32(0, 1, 0, 1, 0, 1),
        sinks=numbers(HEADS, dtype=np.float32),
    )
    if head_axis:
        arguments["indices"] = arguments["indices"][:, None]
    call(cupy, arguments)
    a = handed.arguments
    assert a.q.shape == (1, TOKENS, HEADS, 512)
    assert a.q.strides[1:] == (HEADS * 1152, 1152, 2)
    assert a.q_rope.ptr == a.q.ptr + 1024
    assert (a.indices.shape, a.indices.strides[1:]) == ((1, TOKENS, TOPK), (4 * TOPK, 4))
    assert (a.block_table.shape, a.sinks.shape) == ((2, 2), (HEADS,))
    for view in (a.row_to_request, handed.lengths):
        assert (view.shape, view.strides[1:]) == ((1, TOKENS), (4,))
    assert (handed.out.shape, handed.lse.shape) == ((1, TOKENS, HEADS, 512), (1, HEADS, TOKENS))
    assert handed.lse.strides[1:] == (4, 4 * HEADS)
    assert (handed.key.batch, handed.key.q_len) == (1, TOKENS)


def test_numbers_of_requests_are_those_of_their_tokens(cupy: FakeCuPy, handed: Handed) -> None:
    table = int32([0, 1], [2, 3], [0, 0])
    call(
        cupy,
        batched(topk_lens=int32(1, 2), block_table=table, row_to_request=int32(0, 2)),
    )
    for view in (handed.lengths, handed.arguments.row_to_request):
        assert (view.shape, view.strides) == ((2, 3), (4, 0))
    call(cupy, batched(topk_lens=int32([1, 2, 3], [4, 5, 6])))
    assert (handed.lengths.shape, handed.lengths.strides) == ((2, 3), (12, 4))


@pytest.mark.parametrize("form", ["rows", "packed rows", "packed", "pair", "triple", "e4m3"])
def test_caches(cupy: FakeCuPy, handed: Handed, form: str) -> None:
    """Rows without pages are pages of one slot; packed rows are known as such."""
    bits = np.zeros((4, 8, 576), np.uint8)
    cache: Any = {
        "rows": numbers(32, 576),
        "packed rows": np.zeros((32, 656), np.uint8),
        "packed": np.zeros((4, 8, 1, 656), np.uint8),
        "pair": (numbers(4, 8, 512), numbers(4, 8, 64)),
        "triple": (bits[..., :512], np.zeros((4, 8, 64), BF16), np.zeros((4, 8, 4), np.float32)),
        "e4m3": bits,
    }[form]
    if form == "triple":
        cache = tuple(np.ascontiguousarray(part) for part in cache)
    arguments = on_gpu(cupy, batched(kv_cache=cache))
    cumla.mla_sparse_decode(**arguments)
    a, pages = handed.arguments, (32, 1) if "rows" in form else (4, 8)
    assert a.kv_cache.shape == (*pages, 1, 512)
    assert a.kv_rope.shape == (*pages, 1, 64)
    kinds = {"rows": "same", "pair": "same", "packed rows": "v32", "packed": "v32"}
    assert handed.key.cache == kinds.get(form, "e4m3")
    if "packed" in form:
        assert (a.kv_scales.ptr, a.kv_rope.ptr) == (a.kv_cache.ptr + 512, a.kv_cache.ptr + 528)
        assert a.kv_scales.shape == (*pages, 1, 4)
    made_of = [arguments[name] for name in ("q", "kv_cache", "indices")]
    assert cumla.MLASparsePlan.from_arrays(*made_of).key == handed.key


# --- plans ----------------------------------------------------------------------------------------


def test_updates_without_lengths(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    """On the stream of the framework that the buffer is of, or the one that is given."""
    for made in ({"device": 0}, {"like": cupy.like(numbers(2))}):
        cupy.stream = 0
        plan = cumla.MLASparsePlan(2, 3, HEADS, TOPK, **made)
        for stream in (0, 7, 7, 0):
            cupy.stream = stream
            plan.update()
            assert [launch.stream for launch in bindings.launched] == [stream] * 2
            assert bindings.entries == SCHEDULE
            assert plan.serves(stream)
        plan.update(stream=5)
        assert [launch.stream for launch in bindings.launched] == [5] * 2
        bindings.launched.clear()


def test_lengths_and_none_in_turn(cupy: FakeCuPy, handed: Handed) -> None:
    """What was found in order before is not taken for the other."""
    given = on_gpu(cupy, batched())
    lengths = cupy.like(int32(1, 2))
    plan = cumla.MLASparsePlan.from_arrays(**given)
    seen = []
    for topk_lens in (None, lengths, None, lengths):
        handed.lengths = "nothing new"
        plan.update(topk_lens)
        seen.append(handed.lengths)
    assert seen[0] is None
    assert seen[1].ptr == lengths.data.ptr
    assert seen[2:] == ["nothing new"] * 2


def test_an_update_without_lengths_in_check_mode(
    cupy: FakeCuPy, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    host = batched(block_table=int32([0, 1], [2, 9]))
    given = on_gpu(cupy, host)
    plan = cumla.MLASparsePlan.from_arrays(*[given[n] for n in ("q", "kv_cache", "indices")])
    plan.update()
    plan.run(**given)  # to whose last page no index leads
    bindings.launched.clear()
    host["indices"][1, 2, 4] = 15
    with refused(ValueError, "block_table[1, 1]: needs a page number from 0 to 3, got 9"):
        plan.run(**given)
    assert bindings.entries == []


@pytest.mark.parametrize(("columns", "tag"), [(576, "_swapped"), (512, "_512_swapped_lists")])
def test_what_is_prepared(
    cupy: FakeCuPy, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch, columns: int, tag: str
) -> None:
    """The kernel for the columns of the arrays, or those for both where none were given."""
    loaded: list[str] = []
    monkeypatch.setattr(mla_sparse, "load", lambda spec, *_, **__: loaded.append(spec.entry))
    q, cache = (numbers(*shape, columns) for shape in ((2, 3, HEADS), (4, 8, 1)))
    given = on_gpu(cupy, batched() | {"q": q, "kv_cache": cache})
    always = [*SCHEDULE, "select_rows"]
    cumla.MLASparsePlan.from_arrays(**given).prepare()
    assert sorted(loaded) == sorted([*always, f"mla_sparse_bfloat16{tag}"])
    loaded.clear()
    cumla.MLASparsePlan(2, 3, HEADS, TOPK, device=0).prepare()
    assert sorted(loaded) == sorted(
        [*always, "mla_sparse_bfloat16_swapped", "mla_sparse_bfloat16_512_swapped_lists"]
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_update_that_is_captured(
    cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver, dtype: str
) -> None:
    """Whatever the output's dtype."""
    given = on_gpu(cupy, batched())
    plan = cumla.MLASparsePlan.from_arrays(**given)
    plan.prepare()
    driver.capturing.add(0)
    plan.update()
    sinks = cupy.like(numbers(HEADS, dtype=np.float32))
    kind = BF16 if dtype == "bfloat16" else dtype
    out, lse = cupy.ndarray((2, 3, HEADS, 512), kind), cupy.ndarray((2, 3, HEADS), "float32")
    plan.run(**given, sinks=sinks, out=out, lse=lse)
    assert bindings.entries == [
        *SCHEDULE,
        *("select_rows", "mla_sparse_bfloat16_swapped"),
    ]
    driver.capturing.clear()
    assert not plan.serves(0)


def test_the_same_arrays_in_other_places(cupy: FakeCuPy, handed: Handed) -> None:
    """A ready run tells sinks from a factor of the cache, which may be the same array."""
    arguments = on_gpu(
        cupy,
        tokens(
            q=numbers(TOKENS, 1, 576),
            kv_cache=np.zeros((4, 8, 576), np.uint8),
        ),
    )
    one = cupy.like(np.ones(1, np.float32))
    plan = cumla.MLASparsePlan.from_arrays(**arguments)
    plan.update()
    for _ in range(2):
        plan.run(**arguments, sinks=one)
    assert (handed.arguments.sinks.ptr, handed.arguments.kv_scale) == (one.data.ptr, 1.0)
    plan.run(**arguments, kv_scale=one)
    assert handed.arguments.sinks is None
    assert handed.arguments.kv_scale.ptr == one.data.ptr
