# SPDX-License-Identifier: Apache-2.0
"""The demo, and the examples of its kind, on the CPU: what they print, and that they notice wrong
attention and wrong rows."""

from __future__ import annotations

import io
import re
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.cli import demo, main
from cumla.cli.progress import ProgressBar
from tests.emulator import emulated_gpu

TEXT = "".join(f"{i} times {i} is {i * i}; " for i in range(40)).encode()
REAL_DECODE = cumla.mla_decode
REAL_UPDATE = cumla.MLAAttentionPlan.update
REAL_RUN = cumla.MLAAttentionPlan.run
REAL_PLAN = cumla.MLAAttentionPlan.from_arrays
REAL_APPEND = cumla.append_mla_cache
REAL_KV_UPDATE = cumla.AttentionPlan.update
REAL_KV_RUN = cumla.AttentionPlan.run
REAL_KV_PLAN = cumla.AttentionPlan.from_arrays
REAL_KV_APPEND = cumla.append_kv_cache
REAL_DSA_UPDATE, REAL_DSA_RUN = cumla.DSAPlan.update, cumla.DSAPlan.run
REAL_SELECT = cumla.DSAPlan.select
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(EXAMPLES)
    MLA_SERVING, LLAMA_SERVING = (
        runpy.run_path(str(EXAMPLES / f"{name}_serving.py"))["main"] for name in ("mla", "llama")
    )
    SPARSE = runpy.run_path(str(EXAMPLES / "sparse_decoding.py"))
server = sys.modules["served.server"]
GraphBackend = sys.modules["served.graph"].GraphBackend
TINY = "--layer", "tiny"


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(ordinal: int) -> None:
        raise cumla.UnsupportedDeviceError(f"device {ordinal}: not today\nmore")

    monkeypatch.setattr(demo, "require_hopper", refuse)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def run(*argv: str) -> int:
    """The demo with a small layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "DEEPSEEK_V2_LITE", demo.LayerShape(64, 2, 16, 16))
        return main(["demo", *argv])


def lines(output: str) -> dict[str, str]:
    """Return what the lines say, by their labels."""
    labelled = (line.split(maxsplit=1) for line in output.splitlines())
    return dict(labelled)


def test_decodes_a_text(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--file", str(text), "--steps", "3"]) == 0
    captured = capsys.readouterr()
    found = lines(captured.out)
    assert found["text"] == f"{text}, {len(TEXT)} bytes"
    assert found["layer"] == "DeepSeek-V2-Lite's shapes, 16 heads, random weights"
    assert found["backend"] == "cumla.reference on the CPU (device 0: not today)"
    (rate,) = re.findall(r"3, (\S+) tokens/s", found["steps"])
    assert float(rate) > 0
    assert re.match(r"\d+\.\d{3} ms, median step, wall clock", found["attention"])
    assert 1e-5 < float(found["error"].removeprefix("at most ")) <= 1e-2  # it is bfloat16
    assert found["ok:"] == "every step within 0.01 of un-absorbed attention in float32"
    assert captured.err == ""  # no progress bar where nobody watches


def without_the_newest_token(q: Any, cache: Any, table: Any, lengths: Any, **options: Any) -> Any:
    return REAL_DECODE(q, cache, table, lengths - 1, **options)


def pages_of_another_request(q: Any, cache: Any, table: Any, lengths: Any, **options: Any) -> Any:
    return REAL_DECODE(q, cache, np.roll(table, 1, axis=0), lengths, **options)


def with_the_default_scale(q: Any, cache: Any, table: Any, lengths: Any, **options: Any) -> Any:
    return REAL_DECODE(q, cache, table, lengths)


def with_a_nan(q: Any, cache: Any, table: Any, lengths: Any, **options: Any) -> Any:
    result = REAL_DECODE(q, cache, table, lengths, **options)
    result.out[1, 0, 1, 5] = np.nan
    return result


@pytest.mark.parametrize(
    "wrong",
    [
        without_the_newest_token,
        pages_of_another_request,
        with_the_default_scale,
        with_a_nan,
    ],
)
def test_fails_when_attention_is_wrong(
    wrong: Callable[..., Any],
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cumla, "mla_decode", wrong)
    assert run("--file", str(text), "--steps", "2") == 1
    assert "WRONG: 2 of 2 steps" in capsys.readouterr().out


def test_one_wrong_step_is_enough(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def wrong_once(*args: Any, **options: Any) -> Any:
        calls.append(args)
        decode = without_the_newest_token if len(calls) == 2 else REAL_DECODE
        return decode(*args, **options)

    monkeypatch.setattr(cumla, "mla_decode", wrong_once)
    assert run("--file", str(text), "--steps", "3") == 1
    assert "WRONG: 1 of 3 steps" in (output := capsys.readouterr().out)
    assert "the first is step 2" in output


def test_unusable_texts(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--file", str(text), "--steps", str(len(TEXT))) == 2
    assert f"needs a text of more than {len(TEXT)} bytes" in capsys.readouterr().err
    assert run("--file", str(text.parent / "nothing")) == 2
    assert "nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--steps", "0")
    assert "needs a whole number from 1, got '0'" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [1, 100, len(TEXT) - 1])
def test_requests_are_stretches_of_the_text(steps: int) -> None:
    requests = demo.cut_requests(TEXT, steps)
    for request in requests:
        assert request.tokens.tobytes() in TEXT
        assert len(request.tokens) == request.prompt + steps
    if steps <= 100:
        assert len({request.prompt for request in requests}) == len(requests) > 1


def test_pages_belong_to_one_request_each() -> None:
    requests = demo.cut_requests(TEXT, 10)
    table, total = demo.shuffled_pages(requests, seed=1)
    used = table[table >= 0]
    assert len(np.unique(used)) == len(used) == total - demo.SPARE_PAGES
    assert np.any(np.diff(used) != 1)  # shuffled
    slots = [demo.find_slots(table, i, np.arange(len(r.tokens))) for i, r in enumerate(requests)]
    together = np.concatenate(slots)
    assert len(np.unique(together)) == len(together)
    assert set(together // demo.PAGE_SIZE) == set(used)


def served(output: str) -> list[dict[str, str]]:
    """The lines of the steps."""
    rows = [line for line in output.splitlines() if line.startswith("|")]
    header, _, *steps = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [dict(zip(header, cells, strict=True)) for cells in steps]


@pytest.mark.parametrize("check", ["0", "1"])
def test_serves_requests_that_decode_beside_chunks_of_prompts(
    check: str,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUMLA_CHECK", check)
    calls = []

    def count(plan: Any, *arrays: Any, **options: Any) -> Any:
        calls.append(plan)
        return REAL_RUN(plan, *arrays, **options)

    monkeypatch.setattr(cumla.MLAAttentionPlan, "run", count)
    assert MLA_SERVING([*TINY, "--file", str(text), "--steps", "3"]) == 0
    captured = capsys.readouterr()
    steps = served(captured.out)
    assert len(calls) == len(steps)
    assert len(set(map(id, calls))) == 1  # one plan
    assert [step["step"] for step in steps] == [str(i + 1) for i in range(len(steps))]
    decoding = [int(step["decoding"]) for step in steps]
    chunks = [[int(n) for n in step["prompt chunks"].split("+") if n != "-"] for step in steps]
    prompts = sorted(request.prompt for request in demo.cut_requests(TEXT, 3))
    assert sum(map(sum, chunks)) == sum(prompts)
    assert sum(decoding) == 3 * len(prompts)
    assert max(n + sum(c) for n, c in zip(decoding, chunks, strict=True)) == server.STEP_TOKENS
    assert any(n and sum(c) for n, c in zip(decoding, chunks, strict=True))  # at the same time
    assert any(len(c) > 1 for c in chunks)
    assert decoding[-1] < len(prompts)  # those that are done are gone
    assert int(steps[-1]["cached tokens"]) == sum(prompts) + 3 * len(prompts)
    assert all(1e-5 < float(step["worst error"]) <= 1e-2 for step in steps)
    assert "backend   cumla.reference on the CPU (device 0: not today)" in captured.out
    assert "step      up to 256 query tokens, a call of the reference" in captured.out
    assert f"{sum(prompts) + 3 * len(prompts)} tokens, " in captured.out
    assert "ok: every step within 0.01" in captured.out
    assert captured.err == ""


def update_without_the_newest_token(plan: Any, kv_lens: Any, **bounds: Any) -> None:
    REAL_UPDATE(plan, kv_lens - 1, **bounds)


def plan_without_a_mask(*arrays: Any, **bounds: Any) -> Any:
    return REAL_PLAN(*arrays, **bounds, causal=False)


def run_with_neighbours_pages(plan: Any, *arrays: Any, block_table: Any, **options: Any) -> Any:
    return REAL_RUN(plan, *arrays, block_table=np.roll(block_table, 1, axis=0), **options)


def run_with_one_token_a_little_off(plan: Any, *arrays: Any, **options: Any) -> Any:
    result = REAL_RUN(plan, *arrays, **options)
    result.out[7] *= np.float32(1.05)
    return result


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("update", update_without_the_newest_token),
        ("from_arrays", plan_without_a_mask),
        ("run", run_with_neighbours_pages),
        ("run", run_with_one_token_a_little_off),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_serving_fails_when_attention_is_wrong(
    method: str,
    wrong: Callable[..., Any],
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cumla.MLAAttentionPlan, method, wrong)
    assert MLA_SERVING([*TINY, "--file", str(text), "--steps", "1"]) == 1
    assert "the first is step 1" in capsys.readouterr().out


def test_serving_fails_when_rows_are_not_written(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def forget_the_third(*arrays: Any, **options: Any) -> None:
        calls.append(options)
        if len(calls) != 3:
            REAL_APPEND(*arrays, **options)

    monkeypatch.setattr(cumla, "append_mla_cache", forget_the_third)
    assert MLA_SERVING([*TINY, "--file", str(text), "--steps", "1"]) == 1
    assert "the first is step 3" in capsys.readouterr().out


def test_serving_fails_with_a_schedule_of_the_step_before(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = []

    def update_once(plan: Any, kv_lens: Any, **bounds: Any) -> None:
        updates.append(kv_lens)
        if len(updates) == 1:
            REAL_UPDATE(plan, kv_lens.copy(), **bounds)

    monkeypatch.setattr(cumla.MLAAttentionPlan, "update", update_once)
    assert MLA_SERVING([*TINY, "--file", str(text), "--steps", "1"]) == 1
    assert "the first is step 2" in capsys.readouterr().out


def test_serves_a_llama(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    calls = []

    def count(plan: Any, *arrays: Any, **options: Any) -> Any:
        calls.append(plan)
        return REAL_KV_RUN(plan, *arrays, **options)

    monkeypatch.setattr(cumla.AttentionPlan, "run", count)
    assert LLAMA_SERVING([*TINY, "--file", str(text), "--steps", "2"]) == 0
    steps = served(output := capsys.readouterr().out)
    assert len(calls) == 2 * len(steps)  # layers
    assert len(set(map(id, calls))) == 1  # one plan
    assert any(step["decoding"] != "0" and step["prompt chunks"] != "-" for step in steps)
    assert all(1e-5 < float(step["worst error"]) <= 2e-3 for step in steps)
    assert "layers    tiny: 4 heads, random weights" in output
    assert "ok: every step within 0.01 of attention without a cache in float32" in output


def kv_update_without_the_newest_token(plan: Any, kv_lens: Any, **offsets: Any) -> None:
    REAL_KV_UPDATE(plan, kv_lens - 1, **offsets)


def kv_plan_without_a_mask(*arrays: Any, **offsets: Any) -> Any:
    return REAL_KV_PLAN(*arrays, **offsets, causal=False)


def kv_run_with_neighbours_pages(plan: Any, *arrays: Any, block_table: Any, **to: Any) -> Any:
    return REAL_KV_RUN(plan, *arrays, block_table=np.roll(block_table, 1, axis=0), **to)


def kv_run_with_keys_as_values(plan: Any, q: Any, k: Any, v: Any, **to: Any) -> Any:
    return REAL_KV_RUN(plan, q, k, k, **to)


def kv_run_with_one_head_a_little_off(plan: Any, *arrays: Any, **to: Any) -> Any:
    result = REAL_KV_RUN(plan, *arrays, **to)
    result.out[7, 1] *= np.float16(1.05)
    return result


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("update", kv_update_without_the_newest_token),
        ("from_arrays", kv_plan_without_a_mask),
        ("run", kv_run_with_neighbours_pages),
        ("run", kv_run_with_keys_as_values),
        ("run", kv_run_with_one_head_a_little_off),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_llama_fails_when_attention_is_wrong(
    method: str,
    wrong: Callable[..., Any],
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cumla.AttentionPlan, method, wrong)
    assert LLAMA_SERVING([*TINY, "--file", str(text), "--steps", "2"]) == 1
    assert "the first is step 1" in capsys.readouterr().out


def append_interleaved(*arrays: Any, **options: Any) -> None:
    REAL_KV_APPEND(*arrays, **options, interleaved=True)


def append_to_the_first_layer(k_cache: Any, block_table: Any, **options: Any) -> None:
    table = block_table % (k_cache.shape[0] // 2)
    REAL_KV_APPEND(**options, k_cache=k_cache, block_table=table)


@pytest.mark.parametrize("wrong", [append_interleaved, append_to_the_first_layer])
def test_a_llama_fails_when_rows_are_wrong(
    wrong: Callable[..., Any],
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cumla, "append_kv_cache", wrong)
    assert LLAMA_SERVING([*TINY, "--file", str(text), "--steps", "2"]) == 1
    assert "the first is step 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("left", "decoding", "counts"),
    [
        ([300, 5, 9], [False] * 3, [256, 0, 0]),
        ([200, 50, 9], [False] * 3, [200, 50, 6]),
        ([0, -3, 300], [True, True, False], [1, 1, 254]),
        ([-4, 254, 1], [True, False, False], [1, 254, 1]),
        ([-4, -9, -2], [False, True, False], [0, 1, 0]),
    ],
)
def test_tokens_of_a_step_are_dealt_out(
    left: list[int], decoding: list[bool], counts: list[int]
) -> None:
    assert server.deal(np.array(left), np.array(decoding)).tolist() == counts


class FakeGPUArray(np.ndarray):
    """Refuses, as CuPy does, what is not a plain copy."""

    def set(self, array: Any) -> None:
        assert self.flags.c_contiguous
        assert (self.dtype, self.shape) == (array.dtype, array.shape)
        self[...] = array


class FakeEvent:
    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        self.waited = True


class FakeStreams:
    """Streams whose captures hold what was called through `enqueue` meanwhile."""

    def __init__(self) -> None:
        self.capturing: list[Callable[[], Any]] | None = None
        self.graphs: list[list[Callable[[], Any]]] = []
        self.launches = 0

    def stream(self, *, non_blocking: bool) -> Any:
        assert non_blocking  # or work on the null stream would break the capture
        stream = nullcontext()
        stream.begin_capture = self.begin  # type: ignore[attr-defined]
        stream.end_capture = self.end  # type: ignore[attr-defined]
        return stream

    def begin(self) -> None:
        assert self.capturing is None
        self.capturing = []

    def end(self) -> Any:
        assert self.capturing is not None
        self.graphs.append(graph := self.capturing)
        self.capturing = None

        def launch() -> None:
            self.launches += 1
            for call in graph:
                call()

        return SimpleNamespace(launch=launch)

    def enqueue(self, function: Callable[..., Any]) -> Callable[..., None]:
        """Have the function called with the memory of its arrays, now or at each launch."""

        def call(*arguments: Any, **named: Any) -> None:
            bound = [as_host(argument) for argument in arguments]
            options = {name: as_host(value) for name, value in named.items()}
            if self.capturing is None:
                function(*bound, **options)
            else:
                self.capturing.append(lambda: function(*bound, **options))

        return call


def as_host(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, FakeGPUArray) else value


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    """A GPU whose arrays lie on the CPU."""

    def elapsed(start: Any, end: Any) -> float:
        assert end.waited
        assert end.time > start.time
        return 2.5  # milliseconds

    streams = FakeStreams()
    cupy = SimpleNamespace(
        asarray=lambda array: array.copy().view(FakeGPUArray),
        asnumpy=lambda array: array.view(np.ndarray).copy(),
        cuda=SimpleNamespace(Event=FakeEvent, get_elapsed_time=elapsed, Stream=streams.stream),
    )
    monkeypatch.setattr(demo, "require_hopper", lambda _: SimpleNamespace(name="Fake H200"))
    monkeypatch.setattr(demo, "import_cupy", lambda: cupy)
    return streams


def test_on_a_gpu_the_time_is_that_of_events(
    text: Path,
    streams: FakeStreams,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decode(*arrays: Any, **options: Any) -> Any:
        assert all(isinstance(array, FakeGPUArray) for array in arrays)
        result = REAL_DECODE(*(array.view(np.ndarray) for array in arrays), **options)
        return result._replace(out=result.out.view(FakeGPUArray))

    prepared = []
    monkeypatch.setattr(cumla, "mla_decode", decode)
    monkeypatch.setattr(cumla, "append_mla_cache", streams.enqueue(REAL_APPEND))
    monkeypatch.setattr(cumla.MLADecodePlan, "from_arrays", lambda q, cache: "a plan")
    monkeypatch.setattr(cumla, "prepare", lambda plan, *, device: prepared.append((plan, device)))
    assert run("--file", str(text), "--steps", "2") == 0
    found = lines(capsys.readouterr().out)
    assert found["attention"].startswith("2.500 ms, median step, CUDA events")
    assert found["backend"] == "CUDA kernels on Fake H200 (the first GPU)"
    assert prepared == [("a plan", 0)]


def test_on_a_gpu_one_graph_serves_all_steps(
    text: Path,
    streams: FakeStreams,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[Any] = []
    prepared: list[Any] = []

    def make_plan(*arrays: Any, qo_indptr: Any) -> Any:
        plan = REAL_PLAN(*map(as_host, arrays), qo_indptr=as_host(qo_indptr))
        plans.append(
            SimpleNamespace(update=streams.enqueue(plan.update), run=streams.enqueue(plan.run))
        )
        return plans[-1]

    monkeypatch.setattr(cumla.MLAAttentionPlan, "from_arrays", make_plan)
    monkeypatch.setattr(cumla, "append_mla_cache", streams.enqueue(REAL_APPEND))
    monkeypatch.setattr(cumla, "prepare", lambda *given, device: prepared.extend(given))
    assert MLA_SERVING([*TINY, "--file", str(text), "--steps", "3"]) == 0
    steps = served(output := capsys.readouterr().out)
    assert len(plans) == 1
    assert prepared == [*plans, cumla.append_mla_cache]  # before the capture
    (graph,) = streams.graphs
    assert len(graph) == 3  # rows, schedule, attention
    assert streams.launches == len(steps) > 5
    assert {step["kernel time"] for step in steps} == {"2.500 ms"}
    assert "backend   CUDA kernels on Fake H200 (the first GPU)" in output
    assert "query tokens, a replay of one CUDA graph" in output


def test_on_a_gpu_one_graph_serves_all_layers_and_steps_of_a_llama(
    text: Path,
    streams: FakeStreams,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: list[Any] = []

    def make_plan(*arrays: Any, qo_indptr: Any) -> Any:
        plan = REAL_KV_PLAN(*map(as_host, arrays), qo_indptr=as_host(qo_indptr))
        return SimpleNamespace(update=streams.enqueue(plan.update), run=streams.enqueue(plan.run))

    monkeypatch.setattr(cumla.AttentionPlan, "from_arrays", make_plan)
    monkeypatch.setattr(cumla, "append_kv_cache", streams.enqueue(REAL_KV_APPEND))
    monkeypatch.setattr(cumla, "prepare", lambda *given, device: prepared.extend(given))
    assert LLAMA_SERVING([*TINY, "--file", str(text), "--steps", "2"]) == 0
    steps = served(capsys.readouterr().out)
    assert prepared[1] is cumla.append_kv_cache  # before the capture, as is the plan
    (graph,) = streams.graphs
    assert len(graph) == 3  # rows, schedule, attention
    assert streams.launches == 2 * len(steps)
    assert {step["kernel time"] for step in steps} == {"5.000 ms"}


def emulated_backend(cupy: Any) -> Any:
    backend = GraphBackend("emulated", "on the CPU")
    backend.put, backend.fetch = cupy.asarray, lambda array: array.get()
    return backend


@pytest.mark.exhaustive
def test_the_kernels_serve_a_llama(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own text, on the CPU."""
    with emulated_gpu() as cupy:
        monkeypatch.setattr(GraphBackend, "choose", lambda: emulated_backend(cupy))
        text.write_bytes(TEXT[:150])
        assert LLAMA_SERVING([*TINY, "--file", str(text), "--steps", "2"]) == 0
    assert all(float(step["worst error"]) <= 2e-3 for step in served(capsys.readouterr().out))


@pytest.mark.parametrize("check", ["0", "1"])
def test_decodes_sparsely(
    check: str, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMLA_CHECK", check)
    selections: list[Any] = []

    def count(plan: Any, *arrays: Any, **options: Any) -> Any:
        selections.append(plan)
        return REAL_SELECT(plan, *arrays, **options)

    monkeypatch.setattr(cumla.DSAPlan, "select", count)
    assert SPARSE["main"](["--file", str(text), "--steps", "3", "--layer", "tiny"]) == 0
    output = capsys.readouterr().out
    assert len(selections) == 2 * 3  # of three layers, one of which shares a selection
    assert len(set(map(id, selections))) == 1
    lengths = [request.prompt + n for request in demo.cut_requests(TEXT, 3, 256) for n in (1, 2, 3)]
    read, seen = (3 * sum(numbers) for numbers in ((min(n, 64) for n in lengths), lengths))
    assert f"{read / seen:.1%} of the cached tokens, {read} of {seen}" in output
    (error,) = re.findall(r"error +at most (\S+):", output)
    assert 1e-5 < float(error) <= 1e-2
    assert "64 tokens selected by 8 heads of 32" in output
    assert "ok: every step within 0.01 of dense attention to the selected tokens in fl" in output


def update_sparsely_without_the_newest_token(plan: Any, kv_lens: Any) -> None:
    REAL_DSA_UPDATE(plan, kv_lens - 1)


def select_another_token(plan: Any, *arrays: Any, **options: Any) -> Any:
    """In the place of the last one selected by the first request."""
    indices = REAL_SELECT(plan, *arrays, **options)
    indices[0, 0, -1] = np.setdiff1d(np.arange(250), indices[0])[0]
    return indices


def select_a_token_twice(plan: Any, *arrays: Any, **options: Any) -> Any:
    indices = REAL_SELECT(plan, *arrays, **options)
    indices[0, 0, -1] = indices[0, 0, 0]
    return indices


def run_without_a_token(plan: Any, *arrays: Any, **options: Any) -> Any:
    indices = plan.indices.copy()
    indices[-1, 0, 2] = -1
    return REAL_DSA_RUN(plan, *arrays, indices=indices, **options)


def run_with_a_nan(plan: Any, *arrays: Any, **options: Any) -> Any:
    result = REAL_DSA_RUN(plan, *arrays, **options)
    result.out[1, 0, 1, 5] = np.nan
    return result


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("update", update_sparsely_without_the_newest_token),
        ("select", select_another_token),
        ("select", select_a_token_twice),
        ("run", run_without_a_token),
        ("run", run_with_a_nan),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_decoding_sparsely_fails_when_it_is_wrong(
    method: str,
    wrong: Callable[..., Any],
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cumla.DSAPlan, method, wrong)
    assert SPARSE["main"](["--file", str(text), "--steps", "2", "--layer", "tiny"]) == 1
    assert "WRONG: 2 of 2 steps" in capsys.readouterr().out


def test_the_cpu_decodes_sparsely_with_a_small_layer(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SPARSE["main"](["--file", str(text), "--steps", "1"]) == 0
    assert "layers    tiny: 3, 2 heads" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_kernels_decode_sparsely(capsys: pytest.CaptureFixture[str]) -> None:
    """Their own text, on the CPU."""
    with emulated_gpu() as cupy:
        backend = emulated_backend(cupy)
        requests = demo.cut_requests(TEXT, 2, 128)
        shape = SPARSE["SPARSE_LAYERS"]["tiny"]
        assert SPARSE["decode_sparse"](shape, requests, 2, backend, seed=0) == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_progress_bar_is_for_terminals(stream: io.StringIO) -> None:
    with ProgressBar("working", 2, stream=stream) as bar:
        bar.advance(note="a note")
    last = stream.getvalue().split("\r")[-1]
    assert bool(re.match(r"working \[#{15}\.{15}\] 1/2 a note", last)) == stream.isatty()
    assert bool(last) == stream.isatty()
