# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's indexer logits on the CPU: results, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cumla import MissingDependencyError, UnsupportedDeviceError, reference
from cumla.compat import deep_gemm
from cumla.core.arrays import open_call
from tests.compat.deep_gemm_example import load_example

torch = pytest.importorskip("torch")

NUM_SMS = 132


@pytest.fixture(autouse=True)
def _num_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no GPU to ask."""
    monkeypatch.setattr(deep_gemm, "_num_sms", NUM_SMS)


def prefill_inputs(heads: int = 8, dim: int = 32) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(5, heads, dim).to(torch.float8_e4m3fn),
        "kv": (torch.randn(20, dim).to(torch.float8_e4m3fn), torch.rand(20) + 0.1),
        "weights": torch.randn(5, heads),
        "ks": torch.tensor([0, 3, 4, 9, 20], dtype=torch.int32),
        "ke": torch.tensor([20, 7, 4, 18, 20], dtype=torch.int32),
    }


def naive_prefill(q: Any, kv: Any, weights: Any, ks: Any, ke: Any) -> Any:
    """The formula in float64, with torch's own functions."""
    products = torch.einsum("mhd,nd->mhn", q.double(), kv[0].double()).relu()
    logits = (products * weights.double()[..., None]).sum(1) * kv[1].double()
    tokens = torch.arange(logits.shape[1])
    hidden = (tokens < ks[:, None]) | (tokens >= ke[:, None])
    return logits.masked_fill(hidden, -torch.inf)


def paged_inputs(next_n: int = 2, page_size: int = 16) -> dict[str, Any]:
    torch.manual_seed(next_n)
    dim, heads = 32, 8
    keys = torch.randn(9, page_size, dim).to(torch.float8_e4m3fn)
    scales = torch.rand(9, page_size) + 0.1
    parts = (keys.view(torch.uint8).flatten(1), scales.view(torch.uint8).flatten(1))
    return {
        "q": torch.randn(3, next_n, heads, dim).to(torch.float8_e4m3fn),
        "kv_cache": torch.cat(parts, 1).view(9, page_size, 1, dim + 4),
        "weights": torch.randn(3 * next_n, heads),
        "context_lens": torch.tensor([2 * page_size + 3, 0, page_size], dtype=torch.int32),
        "block_table": torch.randperm(9, dtype=torch.int32).view(3, 3),
    }


def naive_paged(inputs: dict[str, Any], width: int, seen: Any) -> Any:
    """The formula in float64 for each row, which sees so many tokens."""
    q, cache = inputs["q"], inputs["kv_cache"]
    batch, next_n, _, dim = q.shape
    pages, page_size = cache.shape[:2]
    flat = cache.view(pages, -1)
    keys = flat[:, : page_size * dim].view(torch.float8_e4m3fn).view(pages, page_size, dim)
    scales = flat[:, page_size * dim :].contiguous().view(torch.float32)
    logits = torch.full((batch * next_n, width), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        table = inputs["block_table"][b].long()
        k, scale = keys[table].flatten(0, 1).double(), scales[table].flatten().double()
        for i in range(next_n):
            row, length = b * next_n + i, int(seen[b, i])
            products = (q[b, i].double() @ k[:length].T).relu()
            logits[row, :length] = inputs["weights"][row].double() @ products * scale[:length]
    return logits


def seen_by_rows(context_lens: Any, next_n: int) -> Any:
    steps = torch.arange(next_n) - next_n + 1
    return (context_lens[:, None] + steps).clamp(min=0)


def assert_logits(logits: Any, wanted: Any, dtype: Any = torch.float32) -> None:
    """The reference rounds once."""
    assert logits.dtype == dtype
    assert torch.equal(logits == -torch.inf, wanted == -torch.inf)
    rtol = 2.0**-24 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(logits.double(), wanted, rtol=1.001 * rtol, atol=1e-30)


# --- results --------------------------------------------------------------------------------------


def test_prefill_of_the_example() -> None:
    inputs = prefill_inputs()
    logits, compressed = load_example().prefill(*inputs.values())
    wanted = naive_prefill(**inputs)
    assert_logits(logits, wanted)
    assert compressed.shape == (5, 20)
    for i, (begin, end) in enumerate(zip(inputs["ks"], inputs["ke"], strict=True)):
        assert_logits(compressed[i, : end - begin], wanted[i, begin:end])


def test_prefill_cleans_compressed_logits_too() -> None:
    inputs = prefill_inputs()
    logits = deep_gemm.fp8_mqa_logits(*inputs.values(), max_seqlen_k=9)
    wanted = torch.full((5, 9), -torch.inf, dtype=torch.float64)
    for i, row in enumerate(naive_prefill(**inputs)):
        visible = row[row > -torch.inf][:9]
        wanted[i, : len(visible)] = visible
    assert_logits(logits, wanted)


@pytest.mark.parametrize("next_n", [1, 2, 4])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("page_size", [16, 64])
def test_decoding_of_the_example(next_n: int, per_row: bool, page_size: int) -> None:
    inputs = paged_inputs(next_n, page_size)
    seen = seen_by_rows(inputs["context_lens"], next_n)
    if per_row:
        inputs["context_lens"] = seen.int()
    step = load_example().DecodeStep("cpu")
    step.update(inputs["context_lens"], page_size)
    wanted = naive_paged(inputs, 100, seen.clamp(max=100))
    assert_logits(step.run(*inputs.values(), 100, True), wanted)
    unclean = step.run(*inputs.values(), 100, False)
    visible = wanted > -torch.inf
    assert torch.equal(unclean[visible], step.run(*inputs.values(), 100, True)[visible])


@pytest.mark.parametrize("clean", [(), (1,), (torch.tensor(True),), (0,), (None,)])
def test_cleaning_by_what_is_true_or_false(
    monkeypatch: pytest.MonkeyPatch, clean: tuple[Any, ...]
) -> None:
    """By default a prefill is cleaned, and paged logits are not."""
    asked: list[Any] = []

    def note(reference: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, clean: Any, **options: Any) -> Any:
            asked.append(clean)
            return reference(*arguments, clean=clean, **options)

        return call

    for name in ("mqa_logits", "paged_mqa_logits"):
        monkeypatch.setattr(reference, name, note(getattr(reference, name)))
    schedule = torch.zeros(NUM_SMS + 1, 2, dtype=torch.int32)
    deep_gemm.fp8_mqa_logits(*prefill_inputs().values(), *clean)
    deep_gemm.fp8_paged_mqa_logits(*paged_inputs().values(), schedule, 50, *clean)
    wanted = [bool(clean[0])] * 2 if clean else [True, False]
    assert [(type(seen), seen) for seen in asked] == [(bool, flag) for flag in wanted]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newer_names(dtype: Any, named: bool) -> None:
    logits_dtype = str(dtype).removeprefix("torch.") if named else dtype
    inputs = prefill_inputs()
    q, *rest = inputs.values()
    logits = deep_gemm.fp8_fp4_mqa_logits((q, None), *rest, logits_dtype=logits_dtype)
    assert_logits(logits, naive_prefill(**inputs), dtype)
    inputs = paged_inputs()
    q, *rest = inputs.values()
    schedule = deep_gemm.get_paged_mqa_logits_metadata(inputs["context_lens"], 16, NUM_SMS)
    logits = deep_gemm.fp8_fp4_paged_mqa_logits(
        (q, None), *rest, schedule, 50, clean_logits=True, logits_dtype=logits_dtype
    )
    wanted = naive_paged(inputs, 50, seen_by_rows(inputs["context_lens"], 2))
    assert_logits(logits, wanted, dtype)


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_rows_begin_at_multiples_of_1024_bytes(dtype: Any, itemsize: int) -> None:
    q, kv, *rest = prefill_inputs().values()
    for width, columns in ((0, 20), (256, 256), (300, 300)):
        logits = deep_gemm.fp8_fp4_mqa_logits(
            (q, None), kv, *rest, max_seqlen_k=width, logits_dtype=dtype
        )
        assert logits.shape == (5, columns)
        assert logits.stride(1) == 1
        assert logits.stride(0) * itemsize == -(-columns * itemsize // 1024) * 1024
    schedule = torch.zeros(NUM_SMS + 1, 2, dtype=torch.int32)
    logits = deep_gemm.fp8_paged_mqa_logits(*paged_inputs().values(), schedule, 257)
    assert (logits.shape, logits.stride()) == ((6, 257), (512, 1))


def test_metadata_has_the_shape_of_deep_gemms() -> None:
    lengths = torch.ones(7, dtype=torch.int32)
    for form in (lengths, lengths[:, None]):
        metadata = deep_gemm.get_paged_mqa_logits_metadata(form, 64, deep_gemm.get_num_sms())
        assert (metadata.shape, metadata.dtype) == ((NUM_SMS + 1, 2), torch.int32)


def test_parts_of_the_metadata_are_thread_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched on a GPU: the lengths of the call, and the schedule where it lies."""
    monkeypatch.setattr(deep_gemm, "require_hopper", lambda device: None)
    inputs, schedule = paged_inputs(), torch.zeros(101, 2, dtype=torch.int32)
    names = ("q", "kv_cache", "weights", "kv_lens", "block_table")
    arrays = dict(zip(names, inputs.values(), strict=True)) | {"schedule_meta": schedule}
    out = torch.zeros(6, 256)
    views = dict(
        zip((*arrays, "out"), open_call((*arrays.items(), ("out", out))).views, strict=True)
    )
    views["context_lens"] = views["kv_lens"]
    for operation, options, written, blocks in (
        (deep_gemm._METADATA, 100, "schedule_meta", 1),
        (deep_gemm._SCORES, (50, None, False), "out", 100),
    ):
        arguments = operation.arguments(views, options)
        key = operation.key(arguments, 0)
        (launch,) = operation.recipe(key, arguments, (views[written],), 0)
        assert key.num_sms == 100
        assert launch.grid == (blocks, 1, 1)
        assert {schedule.data_ptr(), inputs["context_lens"].data_ptr()} <= set(launch.values)


def test_num_sms() -> None:
    assert deep_gemm.get_num_sms() == NUM_SMS
    deep_gemm.set_num_sms(100)
    assert deep_gemm.get_num_sms() == 100
    for value, error in ((-1, ValueError), (0.0, TypeError), (False, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"^new_num_sms: needs "):
            deep_gemm.set_num_sms(value)  # type: ignore[arg-type]
    assert deep_gemm.get_num_sms() == 100


def test_no_number_of_sms_means_the_gpus_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        sm_count = 114

    monkeypatch.setattr(deep_gemm, "current_device", lambda: 3)
    monkeypatch.setattr(deep_gemm, "properties", lambda ordinal: {3: Gpu}[ordinal])
    deep_gemm.set_num_sms(100)
    deep_gemm.set_num_sms(0)
    assert deep_gemm.get_num_sms() == 114


def test_without_a_gpu_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise MissingDependencyError("CuPy is not installed")

    monkeypatch.setattr(deep_gemm, "_num_sms", None)
    monkeypatch.setattr(deep_gemm, "current_device", missing)
    with pytest.raises(UnsupportedDeviceError, match=r"CuPy is not .*call set_num_sms\(number\)"):
        deep_gemm.get_num_sms()


# --- refused --------------------------------------------------------------------------------------


def test_what_belongs_to_other_gpus() -> None:
    some = torch.zeros(3, 2, dtype=torch.int32)
    q, *rest = prefill_inputs().values()
    paged_q, *paged_rest = paged_inputs().values()
    paged = *paged_rest, some, 9
    prefill, decode = deep_gemm.fp8_fp4_mqa_logits, deep_gemm.fp8_fp4_paged_mqa_logits
    calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        (r"q\[1\]", prefill, ((q, some), *rest)),
        ("schedule_meta", prefill, ((q, None), *rest, True, 0, None, some)),
        (r"q\[1\]", decode, ((paged_q, some), *paged)),
        ("indices", deep_gemm.fp8_paged_mqa_logits, (paged_q, *paged, False, some)),
        ("indices", decode, ((paged_q, None), *paged, False, None, some)),
        ("indices", deep_gemm.get_paged_mqa_logits_metadata, (some, 64, NUM_SMS, some)),
    ]
    for name, function, arguments in calls:
        with pytest.raises(NotImplementedError, match=f"^{name}: belongs to kernels for GPUs"):
            function(*arguments)


def test_errors_have_the_names_of_the_arguments() -> None:
    inputs = prefill_inputs()
    for name, theirs in (("ks", "cu_seq_len_k_start"), ("ke", "cu_seq_len_k_end")):
        with pytest.raises(TypeError, match=f"^{theirs}: needs int32, got int64"):
            deep_gemm.fp8_mqa_logits(*(inputs | {name: inputs[name].long()}).values())
        with pytest.raises(ValueError, match=f"^{theirs}: needs shape"):
            deep_gemm.fp8_mqa_logits(*(inputs | {name: inputs[name][:2]}).values())


def test_queries_of_newer_names_are_a_pair() -> None:
    q, *rest = prefill_inputs().values()
    with pytest.raises(TypeError, match=r"^q: needs a pair of queries .*got Tensor; pass \(q, No"):
        deep_gemm.fp8_fp4_mqa_logits(q, *rest)


@pytest.mark.parametrize(
    ("kv", "error", "got"),
    [
        (None, TypeError, "builtins.NoneType"),
        ((), ValueError, "0"),
        (torch.zeros(20, 32).to(torch.float8_e4m3fn), TypeError, "torch.Tensor"),
    ],
)
def test_keys_and_scales_are_a_pair(kv: Any, error: type[Exception], got: str) -> None:
    inputs = prefill_inputs() | {"kv": kv}
    with pytest.raises(error, match=rf"^kv: needs a pair of arrays.*got {got}; pass \(k, scale\)$"):
        deep_gemm.fp8_mqa_logits(*inputs.values())


@pytest.mark.parametrize("value", [torch.float16, "float16", [1]])
def test_dtypes_of_logits_that_there_are_not(value: Any) -> None:
    q, *rest = prefill_inputs().values()
    message = "^logits_dtype: needs float32 or bfloat16, got "
    with pytest.raises(TypeError, match=message):
        deep_gemm.fp8_fp4_mqa_logits((q, None), *rest, logits_dtype=value)
    q, *rest = paged_inputs().values()
    schedule = torch.zeros(NUM_SMS + 1, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match=message):
        deep_gemm.fp8_fp4_paged_mqa_logits((q, None), *rest, schedule, 9, logits_dtype=value)


@pytest.mark.parametrize(
    ("value", "error", "got"), [(2.5, TypeError, "float 2.5"), (-1, ValueError, "-1")]
)
def test_widths(value: Any, error: type[Exception], got: str) -> None:
    with pytest.raises(error, match=f"^max_seqlen_k: needs .*got {got};"):
        deep_gemm.fp8_mqa_logits(*prefill_inputs().values(), max_seqlen_k=value)
    schedule = torch.zeros(NUM_SMS + 1, 2, dtype=torch.int32)
    with pytest.raises(error, match=f"^max_context_len: needs .*got {got};"):
        deep_gemm.fp8_paged_mqa_logits(*paged_inputs().values(), schedule, value)


@pytest.mark.parametrize("schedule", [None, 0, np.zeros((133, 2), np.int32)])
def test_schedules_that_are_no_tensors(schedule: Any) -> None:
    with pytest.raises(TypeError, match=r"^schedule_meta: needs a PyTorch tensor, got "):
        deep_gemm.fp8_paged_mqa_logits(*paged_inputs().values(), schedule, 50)


def test_a_schedule_that_nobody_computed() -> None:
    with pytest.raises(TypeError, match=r"got None; call get_paged_mqa_logits_metadata first$"):
        deep_gemm.fp8_paged_mqa_logits(*paged_inputs().values(), None, 50)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        (torch.zeros(133, 2), TypeError, "schedule_meta: needs int32, got float32"),
        (torch.zeros(266, dtype=torch.int32), ValueError, r"schedule_meta: .*got \(266,\)"),
        (torch.zeros(133, 3, dtype=torch.int32), ValueError, r"schedule_meta: .*got \(133, 3\)"),
        (torch.zeros(1, 2, dtype=torch.int32), ValueError, r"schedule_meta: .*got shape \(1, 2\)"),
        (torch.zeros(133, 4, dtype=torch.int32)[:, :2], ValueError, "schedule_meta: .*contiguous"),
    ],
)
def test_schedules_that_do_not_fit(schedule: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        deep_gemm.fp8_paged_mqa_logits(*paged_inputs().values(), schedule, 50)


def test_positions_of_copies_without_clean_logits() -> None:
    """Their next argument in its place is refused, not taken for True."""
    says = (
        r"^clean_logits: needs True or False, got (int|Tensor); pass the arguments after it by name"
    )
    prefill = prefill_inputs()
    with pytest.raises(TypeError, match=says):
        deep_gemm.fp8_fp4_mqa_logits((prefill["q"], None), *list(prefill.values())[1:], 4096)
    lens = torch.ones(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=says):
        deep_gemm.fp8_fp4_paged_mqa_logits(
            (torch.zeros(1, 1, 64, 128), None), lens, lens, lens, lens, lens, 8, lens
        )


def test_metadata_checks_its_arguments() -> None:
    lengths = torch.ones(7, dtype=torch.int32)
    metadata = deep_gemm.get_paged_mqa_logits_metadata
    with pytest.raises(ValueError, match=r"^num_sms: needs a number from 1, got 0"):
        metadata(lengths, 64, 0)
    with pytest.raises(
        TypeError, match=r"^context_lens: needs a PyTorch tensor, got builtins.list"
    ):
        metadata([1, 2], 64, NUM_SMS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^context_lens: needs axes"):
        metadata(lengths[:, None, None], 64, NUM_SMS)
    with pytest.raises(TypeError, match=r"^context_lens: needs int32, got int64"):
        metadata(lengths.long(), 64, NUM_SMS)
    with pytest.raises(ValueError, match=r"^context_lens: needs axes"):
        metadata(lengths[0], 64, NUM_SMS)


@pytest.mark.parametrize("next_n", [0, 2])
def test_nothing_to_score(next_n: int) -> None:
    inputs = paged_inputs(2)
    inputs |= {"q": inputs["q"][:0, :next_n], "weights": inputs["weights"][:0]}
    inputs |= {name: inputs[name][:0] for name in ("context_lens", "block_table")}
    schedule = deep_gemm.get_paged_mqa_logits_metadata(inputs["context_lens"], 16, NUM_SMS)
    assert schedule.shape == (NUM_SMS + 1, 2)
    assert deep_gemm.fp8_paged_mqa_logits(*inputs.values(), schedule, 40).shape == (0, 40)
