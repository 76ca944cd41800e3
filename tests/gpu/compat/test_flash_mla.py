# SPDX-License-Identifier: Apache-2.0
"""A decoding step written for FlashMLA, on the GPU: eager, and captured whole into a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from cumla import reference
from cumla.compat import flash_mla
from tests.compat.flash_mla_example import StepInputs, load_example, make_inputs
from tests.gpu.tools.process import run_fresh
from tests.mla import tolerance

KERNELS = ("schedule", "mla_decode", "mla_decode_swapped")
SPARSE_SCALE = 0.5  # as FlashMLA's own tests have it
torch = pytest.importorskip("torch")

LENGTHS = (1, 640, 63, 2000)
MAX_PAGES = 33
LATER_LENGTHS = ((2, 641, 64, 2001), (2048, 0, 1, 65), (0, 0, 0, 0), (7, 2112, 2112, 2112))

SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len", "dtype"),
    [
        (16, 1, 1, "bfloat16"),
        (128, 1, 2, "bfloat16"),
        (64, 1, 1, "float16"),
        (24, 3, 4, "bfloat16"),
    ],
)


@pytest.fixture(autouse=True)
def prepared() -> None:
    cumla.prepare(cumla.mla_decode)


def to_float64(tensor: Any) -> np.ndarray:
    array: np.ndarray = tensor.double().cpu().numpy()
    return array


CheckStep = Callable[..., None]


@pytest.fixture
def check_step(record_figures: Callable[..., None]) -> CheckStep:
    """Hold the results of every layer against the float64 reference, for the present lengths."""

    def check(outs: Any, lses: Any, inputs: StepInputs, *, causal: bool = True) -> None:
        table, lengths = inputs.block_table.cpu().numpy(), inputs.cache_seqlens.cpu().numpy()
        layers = zip(inputs.queries, inputs.caches, outs, lses, strict=True)
        for q, cache, out, lse in layers:
            expected = reference.mla_decode(
                to_float64(q),
                to_float64(cache),
                table,
                lengths,
                softmax_scale=inputs.softmax_scale,
                causal=causal,
            )
            assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)
            assert out.device == lse.device == q.device
            wanted = np.where(np.isneginf(expected.lse), np.inf, expected.lse).swapaxes(1, 2)
            figures = tolerance.assert_close_lse(to_float64(lse), wanted)
            figures = {f"lse_{name}": value for name, value in figures.items()}
            record_figures(figures | tolerance.assert_close_out(to_float64(out), expected.out))

    return check


def capture(step: Any, *arguments: Any, stream: Any = None) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step(*arguments)
    return graph, results


def layer_of(inputs: StepInputs, metadata: flash_mla.FlashMLASchedMeta) -> tuple[Any, Any]:
    """Attention of the first layer."""
    return flash_mla.flash_mla_with_kvcache(
        inputs.queries[0],
        inputs.caches[0],
        inputs.block_table,
        inputs.cache_seqlens,
        512,
        metadata,
        None,
        inputs.softmax_scale,
        True,
    )


def replay(graph: Any, results: Any, inputs: StepInputs, lengths: tuple[int, ...]) -> None:
    """Replay with new lengths in the same tensor; what the replay does not write becomes NaN."""
    inputs.cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
    for result in results:
        result.fill_(float("nan"))
    graph.replay()


@SHAPES
def test_the_example_runs_eagerly(
    heads: int, kv_heads: int, q_len: int, dtype: str, check_step: CheckStep
) -> None:
    step = load_example()
    inputs = make_inputs(
        LENGTHS,
        max_pages=MAX_PAGES,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        dtype=dtype,
        device="cuda",
    )
    for lengths in (LENGTHS, *LATER_LENGTHS[:2]):
        inputs.cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        check_step(*step(*inputs.arguments), inputs)


@SHAPES
def test_the_example_is_captured_whole_and_replayed_with_new_lengths(
    heads: int, kv_heads: int, q_len: int, dtype: str, check_step: CheckStep
) -> None:
    inputs = make_inputs(
        LENGTHS,
        max_pages=MAX_PAGES,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        dtype=dtype,
        device="cuda",
    )
    graph, results = capture(load_example(), *inputs.arguments)
    for lengths in (LENGTHS, *LATER_LENGTHS, LENGTHS):
        replay(graph, results, inputs, lengths)
        check_step(*results, inputs)


def test_eager_steps_between_replays_disturb_nothing(check_step: CheckStep) -> None:
    step = load_example()
    captured = make_inputs(LENGTHS, max_pages=MAX_PAGES, q_len=2, device="cuda")
    eager = make_inputs((300, 4), max_pages=8, heads=128, device="cuda")
    graph, results = capture(step, *captured.arguments)
    for lengths in LATER_LENGTHS:
        before = step(*eager.arguments)
        replay(graph, results, captured, lengths)
        after = step(*eager.arguments)
        check_step(*results, captured)
        check_step(*before, eager)
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_two_graphs_that_share_a_pool(check_step: CheckStep) -> None:
    """As a server captures them: one graph a batch size, all in one memory pool."""
    step, pool = load_example(), torch.cuda.graph_pool_handle()
    captured = []
    for batch in (4, 2):
        inputs = make_inputs(LENGTHS[:batch], max_pages=MAX_PAGES, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results = step(*inputs.arguments)
        captured.append((graph, results, inputs))
    for lengths in LATER_LENGTHS:
        for graph, results, inputs in captured:
            replay(graph, results, inputs, lengths[: len(inputs.queries[0])])
            check_step(*results, inputs)


def test_metadata_warmed_up_eagerly_then_captured(check_step: CheckStep) -> None:
    """The schedule of the eager call serves the graph, as long as the lengths stay."""
    inputs = make_inputs(LENGTHS, max_pages=MAX_PAGES, layers=1, device="cuda")
    metadata, _ = flash_mla.get_mla_metadata()
    out, lse = layer_of(inputs, metadata)
    graph, results = capture(layer_of, inputs, metadata)
    replay(graph, results, inputs, LENGTHS)
    check_step([results[0]], [results[1]], inputs)
    assert torch.equal(out, results[0])
    assert torch.equal(lse, results[1])


def test_a_graph_outlives_calls_on_other_streams(check_step: CheckStep) -> None:
    """The kept metadata object keeps the schedule that a graph reads, whatever it served since."""
    inputs = make_inputs(LENGTHS, max_pages=MAX_PAGES, layers=1, device="cuda")
    metadata, _ = flash_mla.get_mla_metadata()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        layer_of(inputs, metadata)
    stream.synchronize()
    graph, results = capture(layer_of, inputs, metadata, stream=stream)
    layer_of(inputs, metadata)  # on the default stream
    torch.cuda.synchronize()
    sizes = range(9, 24)  # memory of the size of any freed schedule is somebody else's now
    with torch.cuda.stream(stream):
        others = [
            torch.full((1 << size,), 0xA5, dtype=torch.uint8, device="cuda")
            for size in sizes
            for _ in range(3)
        ]
    torch.cuda.synchronize()
    replay(graph, results, inputs, LENGTHS)
    check_step([results[0]], [results[1]], inputs)
    assert all(bool((other == 0xA5).all()) for other in others)


def test_a_captured_schedule_serves_no_call_outside(check_step: CheckStep) -> None:
    """The first call was only captured, on the stream of the calls that follow it."""
    inputs = make_inputs(LENGTHS, max_pages=MAX_PAGES, layers=1, device="cuda")
    metadata, _ = flash_mla.get_mla_metadata()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph, results = capture(layer_of, inputs, metadata, stream=stream)
    with torch.cuda.stream(stream):
        for out, lse in (layer_of(inputs, metadata), layer_of(inputs, metadata)):
            check_step([out], [lse], inputs)
        for lengths in (LATER_LENGTHS[0], LENGTHS):
            replay(graph, results, inputs, lengths)
            check_step([results[0]], [results[1]], inputs)


def test_not_causal_and_scaled_by_the_head_dim_unless_told(check_step: CheckStep) -> None:
    base = make_inputs(LENGTHS, max_pages=MAX_PAGES, q_len=3, layers=1, device="cuda")
    inputs = StepInputs(
        base.queries, base.caches, base.block_table, base.cache_seqlens, softmax_scale=576**-0.5
    )
    out, lse = flash_mla.flash_mla_with_kvcache(
        inputs.queries[0],
        inputs.caches[0],
        inputs.block_table,
        inputs.cache_seqlens,
        512,
        flash_mla.get_mla_metadata()[0],
    )
    check_step([out], [lse], inputs, causal=False)


def test_a_side_stream_of_torch(check_step: CheckStep) -> None:
    """Work that went to another stream would overtake the copy behind the sleep."""
    inputs = make_inputs(LENGTHS, max_pages=MAX_PAGES, device="cuda")
    later = torch.tensor(LATER_LENGTHS[0], dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        inputs.cache_seqlens.copy_(later)
        results = load_example()(*inputs.arguments)
    stream.synchronize()
    check_step(*results, inputs)


# --- SGLang's and vLLM's arguments ----------------------------------------------------------------


def in_e4m3(tensor: Any, factor: float) -> Any:
    return (tensor.float() / factor).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("of_cache", [1.0, 0.5, 3.7])
@pytest.mark.parametrize("of_query", [None, 1.0, 0.5, 3.7])
@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (40, 2), (128, 1), (64, 3)])
def test_e4m3_rows_under_their_factors(
    heads: int,
    q_len: int,
    of_query: float | None,
    of_cache: float,
    record_figures: Callable[..., None],
) -> None:
    """Queries in 16 bits, or in e4m3; eager, and captured and replayed with other factors."""
    inputs = make_inputs(
        LENGTHS, max_pages=MAX_PAGES, heads=heads, q_len=q_len, layers=1, device="cuda"
    )
    q, cache = inputs.queries[0] * 640, in_e4m3(inputs.caches[0], 2**-9)
    q = q if of_query is None else in_e4m3(q, 1.0)
    factors = {"descale_k": torch.tensor([of_cache], device="cuda")}
    if of_query is not None:
        factors["descale_q"] = torch.tensor([of_query], device="cuda")
    scale = 1e-5 / ((of_query or 1.0) * of_cache)

    def call() -> Any:
        metadata, _ = flash_mla.get_mla_metadata()
        return flash_mla.flash_mla_with_kvcache(
            *(q, cache, inputs.block_table, inputs.cache_seqlens, 512, metadata, None),
            *(scale, True, True),
            **factors,
        )

    def check(out: Any, lse: Any) -> None:
        by_query, by_cache = (
            float(factors[name][0]) if name in factors else 1.0
            for name in ("descale_q", "descale_k")
        )
        expected = reference.mla_decode(
            to_float64(q.float()) * by_query,
            to_float64(cache.float()) * by_cache,
            inputs.block_table.cpu().numpy(),
            inputs.cache_seqlens.cpu().numpy(),
            softmax_scale=scale,
        )
        got, wanted = to_float64(out), np.where(np.isneginf(expected.lse), np.inf, expected.lse)
        assert out.dtype == torch.bfloat16
        if of_query is None or heads % 64:
            figures = tolerance.assert_close_lse(to_float64(lse), wanted.swapaxes(1, 2))
            rms = float(np.sqrt(np.mean(np.square(to_float64(cache.float()) * by_cache))))
            record_figures(
                figures | tolerance.assert_close_out(got, expected.out, visible_v_rms=rms)
            )
            return
        # Products in e4m3 round weights by up to 2^-4, as FlashMLA's do.
        error = np.linalg.norm(got - expected.out, axis=-1)
        row = float(np.max(error / np.linalg.norm(expected.out, axis=-1).clip(1e-30)))
        got_lse, wanted = to_float64(lse), wanted.swapaxes(1, 2)
        seen = np.isfinite(wanted)
        assert np.array_equal(got_lse[~seen], wanted[~seen])
        of_lse = float(np.abs(got_lse[seen] - wanted[seen]).max())
        record_figures({"row": row, "lse": of_lse})
        assert row <= 7e-2 and of_lse <= 7e-2, (row, of_lse)

    eager = call()
    check(*eager)
    graph, results = capture(call)
    replay(graph, results, inputs, LENGTHS)
    assert all(torch.equal(x, y) for x, y in zip(results, eager, strict=True))
    for factor in factors.values():
        factor.mul_(0.75)
    replay(graph, results, inputs, LATER_LENGTHS[0])
    check(*results)


@pytest.mark.parametrize(("heads", "dtype"), [(16, "bfloat16"), (128, "bfloat16"), (64, "float16")])
def test_a_request_has_the_same_bits_in_any_batch(
    heads: int, dtype: str, check_step: CheckStep
) -> None:
    sizes: dict[str, Any] = {"heads": heads, "dtype": dtype, "layers": 1, "device": "cuda"}
    inputs = make_inputs(LENGTHS, max_pages=MAX_PAGES, **sizes)

    def call(rows: slice) -> Any:
        return flash_mla.flash_mla_with_kvcache(
            *(inputs.queries[0][rows], inputs.caches[0], inputs.block_table[rows]),
            *(inputs.cache_seqlens[rows], 512, flash_mla.get_mla_metadata()[0]),
            softmax_scale=inputs.softmax_scale,
            causal=True,
            enable_batch_invariant=True,
        )

    out, lse = call(slice(None))
    check_step([out], [lse], inputs)
    for i in range(len(LENGTHS)):
        for rows in (slice(i, i + 1), slice(max(i - 1, 0), i + 1)):
            alone, of_alone = call(rows)
            assert torch.equal(alone[-1], out[i]) and torch.equal(of_alone[-1], lse[i])


@pytest.mark.parametrize(("tokens", "heads"), [(3, 16), (62, 128), (1, 64)])
@pytest.mark.parametrize("columns", [512, 576])
def test_statistics_of_a_prefill_to_base_2(columns: int, tokens: int, heads: int) -> None:
    generator = torch.Generator("cuda").manual_seed(tokens)
    options: dict[str, Any] = {"generator": generator, "device": "cuda"}
    q = torch.randn(tokens, heads, columns, **options).bfloat16() / 10
    kv = torch.randn(592, 1, columns, **options).bfloat16() / 10
    indices = torch.randint(-1, 592, (tokens, 1, 128), dtype=torch.int32, **options)
    indices[-1] = -1
    given = q, kv, indices, SPARSE_SCALE
    out, highest, lse = flash_mla.flash_mla_sparse_fwd(*given)
    found = flash_mla.flash_mla_sparse_fwd(*given, return_log2_lse=True, use_legacy=True)
    assert torch.equal(found[0], out)
    for got, natural in ((found[1], highest), (found[2], lse)):
        torch.testing.assert_close(got, natural / np.log(2))
        assert bool(got[-1].isinf().all())
    none = flash_mla.flash_mla_sparse_fwd(*given, return_log2_lse=False)
    assert torch.equal(none[0], out) and none[1:] == (None, None)


FRESH_PROCESS = """\
import torch
import cumla
from tests.compat.flash_mla_example import load_example, make_inputs

inputs = make_inputs((1, 640, 63, 2000), max_pages=33, device="cuda")
torch.cuda.synchronize()
if {prepare}:
    cumla.prepare(cumla.mla_decode)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    outs, lses = load_example()(*inputs.arguments)
inputs.cache_seqlens.copy_(torch.tensor((2, 641, 64, 2001), dtype=torch.int32))
graph.replay()
captured = outs.clone()
outs, lses = load_example()(*inputs.arguments)
print("equal", torch.equal(captured, outs), float(outs.abs().max()) > 0)
"""


def test_the_first_call_of_a_process_may_be_the_captured_one() -> None:
    result = run_fresh(FRESH_PROCESS.format(prepare=True))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["equal", "True", "True"]


def test_without_prepare_the_captured_call_names_the_cold_kernel() -> None:
    result = run_fresh(FRESH_PROCESS.format(prepare=False))
    assert result.returncode != 0
    assert "NotPreparedError" in result.stderr
    assert "mla_" in result.stderr
    assert "cumla.prepare" in result.stderr
