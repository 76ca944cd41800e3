# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's interface on the CPU: signatures, results, and what is refused."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import numpy as np
import pytest

import cumla
from cumla import CumlaError, MLADecodePlan
from cumla.compat import flash_mla
from cumla.core.arrays import open_call
from cumla.mla.shape import WIDE, WIDTHS
from tests.compat.elsewhere import open_elsewhere
from tests.compat.flash_mla_example import StepInputs, load_example, make_inputs

torch = pytest.importorskip("torch")

LENGTHS = (1, 130, 64)


def naive_layer(inputs: StepInputs, layer: int, *, causal: bool) -> tuple[Any, Any]:
    """Attention of a layer in float64, written per request with torch's own functions."""
    q, cache = inputs.queries[layer].double(), inputs.caches[layer].double()
    batch, q_len, heads, _ = q.shape
    out = torch.zeros(batch, q_len, heads, 512, dtype=torch.float64)
    lse = torch.full((batch, heads, q_len), math.inf, dtype=torch.float64)
    for b, kv_len in enumerate(inputs.cache_seqlens.tolist()):
        rows = cache[inputs.block_table[b].long()].flatten(0, 1)[:kv_len]
        rows = rows.repeat_interleave(heads // rows.shape[1], dim=1)
        for i in range(q_len):
            seen = rows[: max(kv_len - (q_len - 1 - i), 0)] if causal else rows
            if len(seen):
                scores = inputs.softmax_scale * torch.einsum("hd,thd->ht", q[b, i], seen)
                out[b, i] = torch.einsum("ht,thd->hd", scores.softmax(-1), seen[..., :512])
                lse[b, :, i] = scores.logsumexp(-1)
    return out, lse


def assert_layer(out: Any, lse: Any, inputs: StepInputs, layer: int, *, causal: bool) -> None:
    ref_out, ref_lse = naive_layer(inputs, layer, causal=causal)
    q = inputs.queries[layer]
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    # The reference rounds once, to the dtype of the output.
    torch.testing.assert_close(out.double(), ref_out, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-6, atol=1e-6)


def call(inputs: StepInputs, metadata: Any, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "q": inputs.queries[0],
        "k_cache": inputs.caches[0],
        "block_table": inputs.block_table,
        "cache_seqlens": inputs.cache_seqlens,
        "head_dim_v": 512,
        "tile_scheduler_metadata": metadata,
        **changes,
    }
    return flash_mla.flash_mla_with_kvcache(**arguments)


@pytest.fixture(scope="module")
def inputs() -> StepInputs:
    return make_inputs(LENGTHS, max_pages=3)


@pytest.fixture
def metadata() -> flash_mla.FlashMLASchedMeta:
    return flash_mla.get_mla_metadata()[0]


def test_every_name_of_flash_mla_is_there() -> None:
    names = {
        "get_mla_metadata",
        "flash_mla_with_kvcache",
        "flash_mla_sparse_fwd",
        "flash_attn_varlen_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_varlen_kvpacked_func",
        "get_mla_decoding_metadata",
        "has_legacy",
    }
    assert names <= set(flash_mla.__all__)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((object(), 16, 1), {}),  # lengths, rows a kv head, kv heads
        ((object(), 32, 1, 16, True, 2048), {}),  # ... query heads, fp8, topk
        ((), {"cache_seqlens": object(), "num_heads_k": 1}),
    ],
)
def test_metadata_takes_the_arguments_of_any_version(args: Any, kwargs: Any) -> None:
    result = flash_mla.get_mla_metadata(*args, **kwargs)
    assert isinstance(result, tuple)
    metadata, num_splits = result
    assert isinstance(metadata, flash_mla.FlashMLASchedMeta)
    assert num_splits is None
    assert flash_mla.get_mla_metadata(*args, **kwargs)[0] is not metadata


@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len", "dtype"), [(16, 1, 1, "bfloat16"), (6, 2, 3, "float16")]
)
def test_the_example_runs_with_its_import_line_changed(
    heads: int, kv_heads: int, q_len: int, dtype: str
) -> None:
    inputs = make_inputs(
        LENGTHS, max_pages=3, heads=heads, kv_heads=kv_heads, q_len=q_len, dtype=dtype
    )
    outs, lses = load_example()(*inputs.arguments)
    assert tuple(outs.shape) == (3, len(LENGTHS), q_len, heads, 512)
    assert tuple(lses.shape) == (3, len(LENGTHS), heads, q_len)
    for layer in range(3):
        assert_layer(outs[layer], lses[layer], inputs, layer, causal=True)


def test_arguments_by_position_as_in_the_old_style() -> None:
    inputs = make_inputs(LENGTHS, max_pages=3, q_len=2)
    metadata, num_splits = flash_mla.get_mla_metadata(inputs.cache_seqlens, 2 * 16, 1)
    out, lse = flash_mla.flash_mla_with_kvcache(
        inputs.queries[0],
        inputs.caches[0],
        inputs.block_table,
        inputs.cache_seqlens,
        512,
        metadata,
        num_splits,
        inputs.softmax_scale,
        True,
    )
    assert_layer(out, lse, inputs, 0, causal=True)


def test_the_check_mode_names_the_way_out(metadata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    inputs = make_inputs(LENGTHS, max_pages=3)
    call(inputs, metadata)
    inputs.cache_seqlens[0] += 1
    with pytest.raises(ValueError, match=r"^cache_seqlens\[0\]: .*; call get_mla_metadata\(\) for"):
        call(inputs, metadata)


def test_a_flag_in_the_place_of_the_scale(inputs: StepInputs, metadata: Any) -> None:
    """FlashMLA's README passes causal where FlashMLA has softmax_scale."""
    arguments = inputs.queries[0], inputs.caches[0], inputs.block_table, inputs.cache_seqlens, 512
    indices = torch.zeros(3, 1, 64, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^softmax_scale: needs a number, got bool; .*causal="):
        flash_mla.flash_mla_with_kvcache(*arguments, metadata, None, True, False, indices)


@pytest.mark.parametrize("causal", [torch.tensor(True), None])
def test_causal_by_what_is_true_or_false(causal: Any) -> None:
    inputs = make_inputs(LENGTHS, max_pages=3, q_len=2)
    out, lse = call(
        inputs, flash_mla.get_mla_metadata()[0], causal=causal, softmax_scale=inputs.softmax_scale
    )
    assert_layer(out, lse, inputs, 0, causal=bool(causal))


def test_not_causal_and_scaled_by_the_head_dim_unless_told() -> None:
    base = make_inputs(LENGTHS, max_pages=3, q_len=2)
    inputs = StepInputs(
        base.queries, base.caches, base.block_table, base.cache_seqlens, softmax_scale=576**-0.5
    )
    out, lse = call(inputs, flash_mla.get_mla_metadata()[0])
    assert_layer(out, lse, inputs, 0, causal=False)


def test_a_request_without_tokens() -> None:
    inputs = make_inputs((0, 5), max_pages=1)
    out, lse = call(inputs, flash_mla.get_mla_metadata()[0])
    assert not out[0].any()
    assert torch.isposinf(lse[0]).all()
    assert torch.isfinite(lse[1]).all()


class Plans:
    """The plans that calls make, in order, and the stream on which they believe to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.capturing, self.plan = 0, False, flash_mla.FlashMLAPlan
        self.views: Any = ()
        self.fails = False  # whether runs do
        self.log: list[str] = []
        self.alive: list[weakref.ref[Any]] = []
        monkeypatch.setattr(flash_mla, "FlashMLAPlan", self)
        monkeypatch.setattr(flash_mla, "open_call", self.open_call)
        monkeypatch.setattr(flash_mla, "current_stream", lambda *_: self.stream)

    def open_call(self, arguments: Any) -> Plans:
        self.views = open_call(arguments).views
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def from_arrays(self, *arguments: Any, **options: Any) -> MLADecodePlan:
        plans, number = self, len(self.alive)

        class Plan(self.plan):  # type: ignore[name-defined,misc]
            def update(self, *arguments: Any, **options: Any) -> None:
                plans.log.append(f"{'captured ' * plans.capturing}update {number}")
                super().update(*arguments, **options)

            def run(self, *arguments: Any, **options: Any) -> Any:
                plans.log.append(f"{'captured ' * plans.capturing}run {number}")
                if plans.fails:
                    raise CumlaError("cuLaunchKernelEx failed")
                return super().run(*arguments, **options)

        plan = Plan.from_arrays(*arguments, **options)
        self.alive.append(weakref.ref(plan))
        return plan


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return Plans(monkeypatch)


def test_the_schedule_is_computed_by_the_first_call_only(
    inputs: StepInputs, plans: Plans, metadata: flash_mla.FlashMLASchedMeta
) -> None:
    for _ in range(3):
        call(inputs, metadata)
    call(inputs, flash_mla.get_mla_metadata()[0])
    assert plans.log == ["update 0", "run 0", "run 0", "run 0", "update 1", "run 1"]


def test_the_object_keeps_the_schedules_of_all_streams(
    inputs: StepInputs, plans: Plans, metadata: flash_mla.FlashMLASchedMeta
) -> None:
    """Graphs that were captured with it hold their addresses, whatever it served since."""
    for plans.stream in (7, 0, 7, 0):
        call(inputs, metadata)
    assert plans.log == ["update 0", "run 0", "update 1", "run 1", "run 0", "run 1"]
    assert all(plan() is not None for plan in plans.alive)
    del metadata._plans
    assert all(plan() is None for plan in plans.alive)


def test_a_schedule_that_was_only_captured_serves_no_call_outside(
    inputs: StepInputs, plans: Plans, metadata: flash_mla.FlashMLASchedMeta
) -> None:
    for plans.capturing in (True, True, False, False, True):
        call(inputs, metadata)
    assert plans.log == [
        *("captured update 0", "captured run 0", "captured run 0"),
        *("update 1", "run 1", "run 1", "captured run 1"),
    ]
    assert all(plan() is not None for plan in plans.alive)


def test_a_failed_first_call_leaves_the_metadata_empty(
    inputs: StepInputs, plans: Plans, metadata: flash_mla.FlashMLASchedMeta
) -> None:
    """Free for other shapes, that is: a capture may have got the schedule into its graph."""
    plans.fails = True
    with pytest.raises(CumlaError, match="cuLaunchKernelEx"):
        call(inputs, metadata)
    plans.fails = False
    call(inputs, metadata, q=inputs.queries[0][:, :, :8])
    assert plans.log == ["update 0", "run 0", "update 1", "run 1"]
    assert all(plan() is not None for plan in plans.alive)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block_table": "long"}, TypeError, "block_table: needs int32, got int64"),
        ({"block_table": "flatten"}, ValueError, r"block_table: needs shape \(batch, max_pages\)"),
        ({"cache_seqlens": "long"}, TypeError, "cache_seqlens: needs int32, got int64"),
        (
            {"cache_seqlens": "repeat"},
            ValueError,
            r"cache_seqlens: needs shape \(batch,\) with bat",
        ),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale: needs a number from"),
    ],
)
def test_nothing_is_launched_before_the_arguments_are_checked(
    inputs: StepInputs,
    plans: Plans,
    metadata: flash_mla.FlashMLASchedMeta,
    change: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    ((name, how),) = change.items()
    wrong = how
    if isinstance(how, str):
        wrong = getattr(getattr(inputs, name), how)(*((2,) if how == "repeat" else ()))
    with pytest.raises(error, match=f"^{message}"):
        call(inputs, metadata, **{name: wrong})
    assert (plans.log, plans.alive) == ([], [])


@pytest.mark.parametrize("current", [None, 100])
def test_a_thread_without_a_context_or_with_another_gpus(
    inputs: StepInputs,
    metadata: flash_mla.FlashMLASchedMeta,
    monkeypatch: pytest.MonkeyPatch,
    current: int | None,
) -> None:
    """Whether the default stream of the arrays' GPU is captured is asked in a context of it."""
    library = open_elsewhere(monkeypatch, flash_mla, current)
    call(inputs, metadata)
    assert (library.asked, library.context) == ([103], current)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"causal": True}, "causal=True"),
        ({"q": (3, 1, 16, 576)}, "seq_q=1"),
        ({"q": (3, 2, 32, 576)}, "heads_q=32"),
        ({"q": (5, 2, 16, 576)}, "batch=5"),
        ({"k_cache": (9, 64, 2, 576)}, "heads_k=2"),
        ({"dtype": torch.float16}, "dtype=torch.float16"),
    ],
)
def test_metadata_belongs_to_the_shapes_of_its_first_call(
    metadata: flash_mla.FlashMLASchedMeta, change: dict[str, Any], named: str
) -> None:
    inputs = make_inputs(LENGTHS, max_pages=3, q_len=2)
    call(inputs, metadata)
    changes = {
        name: torch.zeros(value, dtype=torch.bfloat16) if isinstance(value, tuple) else value
        for name, value in change.items()
    }
    dtype = changes.pop("dtype", None)
    if dtype is not None:
        changes = {"q": inputs.queries[0].to(dtype), "k_cache": inputs.caches[0].to(dtype)}
    with pytest.raises(ValueError, match=rf"tile_scheduler_metadata: .*got .*{named}") as error:
        call(inputs, metadata, **changes)
    assert "call get_mla_metadata()" in str(error.value)
    call(inputs, metadata)  # it still serves the shapes that it belongs to


def test_another_number_of_pages_is_no_other_shape(
    inputs: StepInputs, plans: Plans, metadata: flash_mla.FlashMLASchedMeta
) -> None:
    call(inputs, metadata)
    call(inputs, metadata, k_cache=inputs.caches[0].repeat(2, 1, 1, 1))
    assert len(plans.alive) == 1


_MERGE = "attend to each cache .* cumla.merge_attention_states"


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("kv_format", "leave it out"),
        ("attn_sink", "leave it out"),
        ("extra_k_cache", _MERGE),
        ("extra_indices_in_kvcache", _MERGE),
        ("topk_length", "leave it out"),
        ("extra_topk_length", _MERGE),
    ],
)
def test_what_dense_decoding_does_not_take(
    inputs: StepInputs, metadata: flash_mla.FlashMLASchedMeta, name: str, way_out: str
) -> None:
    to = "a second cache" if name.startswith("extra") else "sparse attention"
    with pytest.raises(NotImplementedError, match=f"^{name}: belongs to {to}.*; {way_out}"):
        call(inputs, metadata, **{name: torch.ones(1, dtype=torch.int32)})


def test_prefill_over_rows() -> None:
    """Also with the columns of several tensors in one; the lse is (tokens, heads)."""
    torch.manual_seed(3)
    q = torch.randn(9, 4, 96, dtype=torch.bfloat16)
    kv = torch.randn(9, 4, 96 + 64, dtype=torch.bfloat16)
    ends = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    sizes = ends, ends, 5, 5
    options = {"softmax_scale": 0.1, "causal": True}
    out, lse = flash_mla.flash_attn_varlen_func(q, kv[..., :96], kv[..., 96:], *sizes, **options)
    assert out.shape == (9, 4, 64) and lse.shape == (9, 4)
    for begin, end in ((0, 4), (4, 9)):
        rows = slice(begin, end)
        scores = 0.1 * torch.einsum("qhd,khd->hqk", q[rows].double(), kv[rows, :, :96].double())
        scores += torch.full(scores.shape[1:], -math.inf).triu(1)
        want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), kv[rows, :, 96:].double())
        torch.testing.assert_close(out[rows].double(), want, rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(lse[rows].double(), scores.logsumexp(-1).T, rtol=1e-6, atol=1e-6)
    packed = flash_mla.flash_attn_varlen_kvpacked_func(q, kv, *sizes, 96, **options)
    whole = torch.cat([q, kv], -1)
    same = flash_mla.flash_attn_varlen_qkvpacked_func(whole, ends, 5, 96, **options)
    for found in (packed, same):
        assert torch.equal(found[0], out) and torch.equal(found[1], lse)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout_p": 0.1}, r"^dropout_p: needs 0, got 0.1"),
        ({"is_varlen": False}, r"^is_varlen: needs True"),
    ],
)
def test_what_prefill_does_not_take(change: dict[str, Any], message: str) -> None:
    rows = torch.zeros(3, 1, 64, dtype=torch.bfloat16)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=message):
        flash_mla.flash_attn_varlen_func(rows, rows, rows, ends, ends, 3, 3, **change)
    short = torch.tensor([0], dtype=torch.int64)
    with pytest.raises((TypeError, ValueError), match=r"^cu_seqlens_qo: "):
        flash_mla.flash_attn_varlen_func(rows, rows, rows, short, ends, 3, 3)


def test_a_given_output(inputs: StepInputs, metadata: Any) -> None:
    want, want_lse = call(inputs, flash_mla.get_mla_metadata()[0], causal=True)
    out = torch.full_like(want, math.nan)
    found, lse = call(inputs, metadata, causal=True, out=out, is_fp8_kvcache=None, use_legacy=True)
    assert found is out
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    with pytest.raises(ValueError, match=r"^out: needs shape"):
        call(inputs, metadata, causal=True, out=out[:1])


def test_the_same_bits_in_any_batch(inputs: StepInputs, metadata: Any) -> None:
    """A plan that cuts requests alike, for all tokens that the table has room for."""
    found = call(inputs, metadata, enable_batch_invariant=True)
    (plan,) = metadata._plans.values()
    assert plan.key.batch_invariant
    assert plan.key.max_blocks * 64 == inputs.block_table.shape[1] * 64
    want = call(inputs, flash_mla.get_mla_metadata()[0])
    assert all(map(torch.equal, found, want))
    with pytest.raises(ValueError, match=r"^tile_scheduler_metadata: needs what it was first used"):
        call(inputs, metadata)


def e4m3(tensor: Any, factor: float) -> Any:
    return (tensor.float() / factor).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("of_query", [None, 0.5, 0.03])
def test_an_e4m3_cache_under_its_factor(
    inputs: StepInputs, metadata: Any, of_query: float | None
) -> None:
    """Values have the factor of the cache alone, scores have both."""
    fields = flash_mla.get_mla_decoding_metadata(inputs.cache_seqlens, 16, 1)
    metadata.tile_scheduler_metadata, metadata.num_splits = fields
    assert flash_mla.has_legacy()
    cache, descale_k = e4m3(inputs.caches[0], 0.25), torch.tensor([0.25])
    given: dict[str, Any] = {"k_cache": cache, "descale_k": descale_k, "causal": True}
    given["softmax_scale"] = inputs.softmax_scale
    q = inputs.queries[0]
    if of_query is not None:
        given |= {"q": e4m3(q, of_query), "descale_q": torch.tensor([of_query])}
        q = given["q"].double() * of_query
    found, lse = call(inputs, metadata, is_fp8_kvcache=True, **given)
    exact = StepInputs(
        **vars(inputs) | {"queries": q[None].double(), "caches": cache[None].double() * 0.25}
    )
    want, want_lse = naive_layer(exact, 0, causal=True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), want, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    out = torch.empty_like(found)
    again, _ = call(inputs, metadata, out=out, **given)
    assert again is out and torch.equal(out, found)


def test_other_tensors_in_the_metadata_begin_a_step(
    inputs: StepInputs, plans: Plans, metadata: Any
) -> None:
    """The plan is updated with the lengths of that step, in the memory that graphs read."""
    for lengths in (LENGTHS, (60, 7, 128), (0, 1, 2)):
        lens = torch.tensor(lengths, dtype=torch.int32)
        tiles, metadata.num_splits = flash_mla.get_mla_decoding_metadata(lens)
        metadata.tile_scheduler_metadata = tiles
        found = call(inputs, metadata, cache_seqlens=lens)
        want = call(inputs, flash_mla.get_mla_metadata()[0], cache_seqlens=lens)
        assert all(map(torch.equal, found, want))
        assert len(metadata._plans) == 1
        again = call(inputs, metadata, cache_seqlens=lens)
        assert all(map(torch.equal, again, want))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"descale_q": torch.ones(1)}, NotImplementedError, "^descale_q: is the factor of e4m3"),
        ({"descale_k": torch.ones(1)}, NotImplementedError, "^descale_k: is the factor of a dense"),
        ({"is_fp8_kvcache": True}, TypeError, "^k_cache: needs float8_e4m3fn with is_fp8"),
    ],
)
def test_factors_of_what_is_not_e4m3(
    inputs: StepInputs, metadata: Any, change: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        call(inputs, metadata, **change)


@pytest.mark.parametrize("factor", [0.5, torch.ones(1, dtype=torch.int32), torch.ones(2)])
def test_factors_are_one_float32_number(inputs: StepInputs, metadata: Any, factor: Any) -> None:
    given = {"q": e4m3(inputs.queries[0], 1.0), "k_cache": e4m3(inputs.caches[0], 1.0)}
    with pytest.raises((TypeError, ValueError), match=r"^descale_q: needs"):
        call(inputs, metadata, **given, descale_q=factor, descale_k=torch.ones(1))


def test_tensors_as_metadata_are_refused(inputs: StepInputs) -> None:
    made_by_another_library = torch.zeros(132, 8, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"tile_scheduler_metadata: .*get_mla_metadata\(\).*Tensor"):
        call(inputs, made_by_another_library)


def test_num_splits_must_be_the_placeholder(
    inputs: StepInputs, metadata: flash_mla.FlashMLASchedMeta
) -> None:
    with pytest.raises(TypeError, match=r"num_splits: needs None.*got Tensor"):
        call(inputs, metadata, num_splits=torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize("width", [576, 128])
def test_head_dim_v_is_512(
    inputs: StepInputs, metadata: flash_mla.FlashMLASchedMeta, width: int
) -> None:
    with pytest.raises(ValueError, match=f"head_dim_v: needs 512.*got {width}; pass 512"):
        call(inputs, metadata, head_dim_v=width)


@pytest.mark.parametrize(
    ("width", "is_fp8"),
    [of for of in itertools.product(WIDTHS, (False, True)) if of != (WIDE, True)],
)
def test_rows_of_other_widths(
    width: tuple[int, int], is_fp8: bool, metadata: flash_mla.FlashMLASchedMeta
) -> None:
    """Dense; of a model without RoPE all columns are the value."""
    columns = sum(width)
    q, cache = torch.randn(2, 1, 4, columns).bfloat16(), torch.randn(5, 64, 1, columns).bfloat16()
    table, lens = torch.tensor([[3, 0], [1, 4]]).int(), torch.tensor([100, 7]).int()
    factors: dict[str, Any] = {}
    if is_fp8:
        cache = cache.to(torch.float8_e4m3fn)
        factors["descale_k"] = torch.tensor([0.5])
    for causal in (False, True):
        given = (q, cache, table, lens, width[0], metadata, None, 0.06)
        out, lse = flash_mla.flash_mla_with_kvcache(*given, causal=causal, **factors)
        scale = {"kv_scale": factors["descale_k"]} if is_fp8 else {}
        want = cumla.mla_decode(q, cache, table, lens, softmax_scale=0.06, **scale)
        assert torch.equal(out, want.out)
        assert torch.equal(lse, want.lse.mT)
    with pytest.raises(ValueError, match=rf"^head_dim_v: needs {width[0]}, .* got {columns + 1};"):
        flash_mla.flash_mla_with_kvcache(*given[:4], columns + 1, metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (576,)}, r"^q: needs axes \(batch, seq_q, heads_q, 576\), got shape \(576,\)"),
        ({"q": (3, 16, 576)}, r"^q: needs axes .*got shape \(3, 16, 576\)"),
        ({"k_cache": (64, 576)}, r"^k_cache: needs axes .*got shape \(64, 576\)"),
        ({"k_cache": (9, 64, 1, 500)}, r"^k_cache: needs 576 columns.*got .*500"),
        ({"q": (3, 1, 16, 512)}, r"^k_cache: needs 576 columns.* or 512 .* cumla.mla_decode with"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_shapes_are_checked_before_they_are_compared(
    inputs: StepInputs,
    metadata: flash_mla.FlashMLASchedMeta,
    change: dict[str, tuple[int, ...]],
    message: str,
    first: bool,
) -> None:
    if not first:
        call(inputs, metadata)
    changes = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in change.items()}
    with pytest.raises(ValueError, match=message):
        call(inputs, metadata, **changes)


def test_packed_rows_go_with_indices(inputs: StepInputs, metadata: Any) -> None:
    cache = torch.zeros(9, 64, 1, 656, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"^k_cache: needs q's dtype .*got uint8; .* with indices"):
        call(inputs, metadata, k_cache=cache)


def test_pages_of_any_size(inputs: StepInputs, metadata: Any) -> None:
    want = call(inputs, flash_mla.get_mla_metadata()[0])
    halves = inputs.caches[0].reshape(-1, 32, 1, 576)
    table = (inputs.block_table[..., None] * 2 + torch.arange(2)).flatten(1).to(torch.int32)
    found = call(inputs, metadata, k_cache=halves, block_table=table)
    assert all(map(torch.equal, found, want))


def test_a_cache_without_its_head_axis(
    inputs: StepInputs, metadata: flash_mla.FlashMLASchedMeta
) -> None:
    expected = call(inputs, metadata)
    got = call(inputs, metadata, k_cache=inputs.caches[0][:, :, 0])
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_the_mask_makes_no_difference_to_a_single_query(
    inputs: StepInputs, metadata: flash_mla.FlashMLASchedMeta
) -> None:
    expected = call(inputs, metadata)
    got = call(inputs, metadata, causal=True)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ["q", "k_cache", "block_table", "cache_seqlens"])
def test_dense_decoding_needs_every_tensor(
    inputs: StepInputs, metadata: flash_mla.FlashMLASchedMeta, name: str
) -> None:
    for wrong, kind, more in (
        (None, "NoneType", "$"),
        ([1], "list", ", such as .*int32"),
        ((torch.zeros(1),), "tuple", r", such as torch.cat\(.* parts that are apart$"),
    ):
        message = f"^{name}: needs a PyTorch tensor, got builtins.{kind}; pass a tensor{more}"
        with pytest.raises(TypeError, match=message):
            call(inputs, metadata, **{name: wrong})


def test_arrays_of_other_frameworks_have_functions_of_their_own(
    inputs: StepInputs, metadata: flash_mla.FlashMLASchedMeta
) -> None:
    message = "^q: needs a PyTorch tensor, got numpy.ndarray; pass a tensor, or call cumla's own"
    with pytest.raises(TypeError, match=message):
        call(inputs, metadata, q=np.zeros((3, 1, 16, 576)))
