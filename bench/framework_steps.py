# SPDX-License-Identifier: Apache-2.0
"""A decoding step in each framework: cumla called eagerly, compiled, and in CUDA graphs.

    python -m bench.framework_steps PART SECONDS

runs one of `PARTS` and prints a row of JSON a line; what there was no time for is a row that says
so. A step writes one token of each request into the cache of each layer and attends, all layers by
one schedule. Each layer has a cache of its own, so that no cached row is in L2 when its turn comes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cumla
from cumla.bench.gpu import Gpu
from cumla.bench.timing import Timing

__all__ = ["CASES", "PARTS", "Budget", "StepCase", "cupy_rows", "jax_rows", "torch_rows"]

Row = dict[str, Any]
Step = Callable[[], Any]
"""Enqueues a step, or a call; returns the output of its last layer."""

_PAGE = 64
_BURST = 16  # steps that follow each other without a wait
_COUNTED = 6  # runs whose callbacks are counted
_FLOOR_OPERATIONS = 32
_NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}


class _Family(NamedTuple):
    """The functions of cumla that a step calls, by their names."""

    append: str
    attend: str
    plan: str


_FAMILIES = {
    "mla": _Family("append_mla_cache", "mla_decode", "MLADecodePlan"),
    "mha": _Family("append_kv_cache", "attention", "AttentionPlan"),
}


@dataclass(frozen=True, slots=True)
class StepCase:
    """Shape of a step: requests of `kv_len` tokens, one query token each, bfloat16."""

    family: str
    heads: int
    kv_heads: int
    batch: int
    kv_len: int
    layers: int = 32

    @property
    def functions(self) -> _Family:
        """What is called."""
        return _FAMILIES[self.family]

    @property
    def width(self) -> int:
        """Columns of a query, and of a cached row."""
        return 576 if self.family == "mla" else 128

    def workspace_bytes(self) -> int:
        """Size of a plan's buffer."""
        plan = getattr(cumla, self.functions.plan)
        if self.family == "mla":
            return int(plan.workspace_bytes(self.batch, 1, self.heads))
        sizes = (self.batch, self.batch, self.heads, self.width)
        return int(plan.workspace_bytes(*sizes, num_kv_heads=self.kv_heads))

    def lay_out(self, upload: Callable[[Any], Any], copy: Callable[[Any], Any]) -> _Arrays:
        """Make the arrays of a step; `upload` copies one from NumPy, `copy` one that is there."""
        random = np.random.default_rng(self.kv_len)
        period = (random.standard_normal(65521) * 0.1).astype(ml_dtypes.bfloat16)
        each = -(-self.kv_len // _PAGE)
        pages = random.permutation(self.batch * each).astype(np.int32).reshape(self.batch, each)
        last = self.kv_len - 1
        by_heads = () if self.family == "mla" else (self.kv_heads,)
        count = 1 + len(by_heads)  # of arrays that hold a cached token
        cache = upload(np.resize(period, (pages.size, _PAGE, *by_heads, self.width)))
        row = np.resize(period[7:], (self.batch, *by_heads, self.width))
        return _Arrays(
            upload(np.resize(period[3:], (self.batch, 1, self.heads, self.width))),
            tuple([upload(row) for _ in range(count)]),
            [tuple([copy(cache) for _ in range(count)]) for _ in range(self.layers)],
            upload(pages),
            upload(np.full(self.batch, self.kv_len, np.int32)),
            upload(pages[:, last // _PAGE] * np.int32(_PAGE) + np.int32(last % _PAGE)),
        )


class _Arrays(NamedTuple):
    """What a step works on; one or two arrays hold the cached rows of a layer."""

    q: Any
    rows: tuple[Any, ...]
    caches: list[tuple[Any, ...]]
    table: Any
    kv_lens: Any
    slots: Any


_MLA, _GQA = StepCase("mla", 16, 1, 8, 4096), StepCase("mha", 32, 8, 8, 4096)
CASES = (
    _MLA,
    _GQA,
    replace(_MLA, heads=128, batch=32),
    replace(_GQA, batch=32),
)
_CALL = StepCase("mla", 16, 1, 16, 1024, layers=1)
"""Little work for the GPU: of its single calls the host's time counts."""


# --- measuring -----------------------------------------------------------------------------------


@dataclass
class Budget:
    """Time that is left, and what measures with it."""

    seconds: float
    repeats: int = 30

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds

    def row(self, made: Row, prepare: Callable[[], tuple[Step, Step, Row]]) -> Row:
        """Measure what `prepare` makes: a step, what waits for it, and more of the row.

        The times are microseconds: ``us`` until the result is there, ``host_us`` until the step
        returns, ``burst_us`` a step of several without a wait between them.
        """
        if time.monotonic() > self._end:
            return made | {"skipped": "no time was left"}
        try:
            step, wait, more = prepare()
            return made | self._times(step, wait) | more
        except Exception as error:  # of any kind: what is measured later stands
            reason = str(error).strip().partition("\n")[0]
            return made | {"failed": f"{type(error).__name__}: {reason}"}

    def _times(self, step: Step, wait: Step) -> Row:
        waited, alone, bursts = [], [], []
        for _ in range(4):  # plain executions, captures
            step()
            wait()
        for _ in range(self.repeats):
            begin = time.perf_counter_ns()
            step()
            alone.append((time.perf_counter_ns() - begin) / 1e3)
            wait()
            waited.append((time.perf_counter_ns() - begin) / 1e3)
        for _ in range(max(3, self.repeats // 5)):
            begin = time.perf_counter_ns()
            for _ in range(_BURST):
                step()
            wait()
            bursts.append((time.perf_counter_ns() - begin) / 1e3 / _BURST)
        host, burst = Timing.of(alone).us, Timing.of(bursts).us
        return Timing.of(waited).figures() | {"host_us": host, "burst_us": burst}


def _row(op: str, case: StepCase | None, framework: str, mode: str) -> Row:
    return {"op": op, **(asdict(case) if case else {}), "framework": framework, "mode": mode}


def _bits(array: np.ndarray[Any, Any]) -> Row:
    """Identify a result: it is the same to the bit in all frameworks and modes."""
    return {"bits": hashlib.sha256(array.tobytes()).hexdigest()[:16]}


# --- CuPy ----------------------------------------------------------------------------------------


def cupy_rows(
    budget: Budget, cases: tuple[StepCase, ...], call: StepCase, gpu: Any
) -> Iterator[Row]:
    """Measure CuPy's calls, and CUDA graphs of them; outputs and plans are made beforehand."""

    def upload(array: Any) -> Any:
        if array.dtype != ml_dtypes.bfloat16:
            return gpu.upload(array)
        return gpu.upload(array.view(np.uint16)).view(ml_dtypes.bfloat16)

    def copy(array: Any) -> Any:
        new = gpu.empty(array.shape, "uint16").view(array.dtype)
        gpu.copy(new, array)
        return new

    def outputs(case: StepCase) -> tuple[Any, Any]:
        columns = 512 if case.family == "mla" else case.width
        out = gpu.empty((case.batch, 1, case.heads, columns), "uint16").view(ml_dtypes.bfloat16)
        return out, gpu.empty((case.batch, case.heads, 1), "float32")

    def prepare(case: StepCase, mode: str) -> tuple[Step, Step, Row]:
        arrays, (out, lse) = case.lay_out(upload, copy), outputs(case)
        step: Any = _in_place(case, arrays, partial(_planned, case, arrays, out, lse))
        step()
        kept = _bits(gpu.download(out.view(np.uint16)))
        if mode == "graph":
            step = gpu.capture(step)
        return step, gpu.synchronize, kept

    yield budget.row(
        _row("call", call, "CuPy", "eager"),
        lambda: (_single(call, call.lay_out(upload, copy)), gpu.synchronize, {}),
    )
    for case in cases:
        for mode in ("graph", "eager"):
            gpu.release()
            yield budget.row(_row("step", case, "CuPy", mode), partial(prepare, case, mode))


def _single(case: StepCase, arrays: _Arrays) -> Step:
    """Make a call without a plan, which allocates its outputs."""
    (cache,) = arrays.caches
    given = {"block_table": arrays.table, "kv_lens": arrays.kv_lens}
    return partial(getattr(cumla, case.functions.attend), arrays.q, *cache, **given)


def _planned(
    case: StepCase, arrays: _Arrays, out: Any, lse: Any
) -> tuple[Step, Callable[..., Any]]:
    """Make what computes the schedule, and what attends to one layer by it."""
    plan = getattr(cumla, case.functions.plan).from_arrays(arrays.q, *arrays.caches[0])

    def attend(cache: tuple[Any, ...]) -> Any:
        return plan.run(arrays.q, *cache, arrays.table, out=out, lse=lse).out

    return partial(plan.update, arrays.kv_lens), attend


def _in_place(
    case: StepCase, arrays: _Arrays, make: Callable[[], tuple[Step, Callable[..., Any]]]
) -> Step:
    """Make a step that writes into its caches; `make` gives schedule and attention."""
    schedule, attend = make()
    append = getattr(cumla, case.functions.append)

    def step() -> Any:
        schedule()
        for cache in arrays.caches:
            append(*arrays.rows, *cache, arrays.slots)
            out = attend(cache)
        return out

    return step


# --- PyTorch -------------------------------------------------------------------------------------


def torch_rows(budget: Budget, cases: tuple[StepCase, ...], call: StepCase) -> Iterator[Row]:
    """Measure PyTorch: eager calls, CUDA graphs of them, and steps under torch.compile."""
    torch = import_module("torch")
    import_module("cumla.torch")
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    wait = torch.cuda.synchronize if on_gpu else int

    def upload(array: Any) -> Any:
        if array.dtype != ml_dtypes.bfloat16:
            return torch.tensor(array, device=device)
        return torch.tensor(array.view(np.int16), device=device).view(torch.bfloat16)

    def prepare(case: StepCase, mode: str) -> tuple[Step, Step, Row]:
        arrays = case.lay_out(upload, torch.clone)
        out = arrays.q.new_empty(*arrays.q.shape[:-1], 512 if case.family == "mla" else case.width)
        lse = arrays.q.new_empty(case.batch, case.heads, 1, dtype=torch.float32)
        if mode in ("eager", "graph"):
            step: Any = _in_place(case, arrays, partial(_planned, case, arrays, out, lse))
        else:
            step = _compiled_torch(torch, case, arrays, mode)
        result = step()
        wait()
        kept = _bits(result.cpu().view(torch.int16).numpy())
        if mode == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        return step, wait, kept

    with torch.no_grad():
        yield budget.row(
            _row("call", call, "PyTorch", "eager"),
            lambda: (_single(call, call.lay_out(upload, torch.clone)), wait, {}),
        )
        quick = ("eager", "graph") if on_gpu else ("eager",)
        slow = ("default", "reduce-overhead") if on_gpu else ("default",)
        for modes in (quick, slow):
            for case, mode in product(cases, modes):
                torch.compiler.reset()
                if on_gpu:
                    torch.cuda.empty_cache()
                name = mode if mode in quick else f"torch.compile, {mode}"
                yield budget.row(_row("step", case, "PyTorch", name), partial(prepare, case, mode))


def _compiled_torch(torch: Any, case: StepCase, arrays: _Arrays, mode: str) -> Step:
    """Compile a step, whose plan is a workspace and whose caches are buffers of a module."""
    on_gpu = arrays.q.is_cuda
    nbytes = case.workspace_bytes() if on_gpu else 0
    workspace = torch.zeros(nbytes, dtype=torch.uint8, device=arrays.q.device)
    name = case.functions.attend
    schedule, attend = (
        getattr(torch.ops.cumla, f"{name}_{half}") for half in ("schedule", "attend")
    )

    class Layers(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for place, cache in enumerate(arrays.caches):
                for part, array in enumerate(cache):
                    self.register_buffer(f"cache_{place}_{part}", array)
            self.register_buffer("workspace", workspace)

        def forward(self, q: Any, rows: Any, table: Any, kv_lens: Any, slots: Any) -> Any:
            given = {"block_table": table, "kv_lens": kv_lens, "workspace": self.workspace}
            for place in range(case.layers):
                cache = [getattr(self, f"cache_{place}_{part}") for part in range(len(rows))]
                inputs = ([q], cache) if case.family == "mla" else (q, *cache)
                if place == 0:
                    schedule(*inputs, **given)
                getattr(cumla, case.functions.append)(*rows, *cache, slots)
                out, _ = attend(*inputs, **given)
            return out

    options = {"mode": mode} if on_gpu else {"backend": "aot_eager"}
    compiled = torch.compile(Layers(), fullgraph=True, **options)
    return partial(compiled, arrays.q, arrays.rows, arrays.table, arrays.kv_lens, arrays.slots)


# --- JAX -----------------------------------------------------------------------------------------


def jax_rows(budget: Budget, cases: tuple[StepCase, ...], call: StepCase) -> Iterator[Row]:
    """Measure JAX: XLA's floor, calls, and steps with command buffers and without."""
    jax = import_module("jax")
    binding: Any = import_module("cumla.jax")
    count = _counted()

    def single(options: Row | None) -> tuple[Step, Step, Row]:
        arrays = call.lay_out(jax.numpy.asarray, jax.numpy.copy)
        function = _single(call, arrays)
        if options is not None:
            (cache,), attend = arrays.caches, getattr(cumla, call.functions.attend)
            compiled = jax.jit(lambda *given: attend(*given), compiler_options=options)
            function = partial(compiled, arrays.q, *cache, arrays.table, arrays.kv_lens)
        return *_waiting(jax, function), {}

    def prepare(case: StepCase, options: Row) -> tuple[Step, Step, Row]:
        arrays, functions = case.lay_out(jax.numpy.asarray, jax.numpy.copy), case.functions
        append, kind = getattr(binding, functions.append), getattr(binding, functions.plan)

        def layers(caches: Any, q: Any, rows: Any, table: Any, kv_lens: Any, slots: Any) -> Any:
            plan, written = kind.from_arrays(q, *caches[0]).update(kv_lens), []
            for cache in caches:
                new = append(*rows, *cache, slots)
                written.append(new if isinstance(new, tuple) else (new,))
                (out, _), plan = plan.run(q, *written[-1], table)
            return written, out

        compiled = jax.jit(layers, donate_argnums=0, compiler_options=options)
        caches = arrays.caches
        rest = (arrays.q, arrays.rows, *arrays[3:])

        def step() -> Any:
            nonlocal caches
            caches, out = compiled(caches, *rest)
            return out

        timed, wait = _waiting(jax, step)
        callbacks = []
        for _ in range(_COUNTED):
            before = count()
            timed()
            wait()
            callbacks.append(count() - before)
        kept = _bits(np.asarray(timed()).view(np.uint16))
        return timed, wait, {"callbacks": callbacks, **kept}

    yield budget.row(_row("floor", None, "JAX", "jit"), lambda: (*_waiting(jax, _floor(jax)), {}))
    modes: dict[str, Any] = {
        "eager": None,
        "jit": {},
        "jit, no command buffers": _NO_COMMAND_BUFFERS,
    }
    for mode, options in modes.items():
        yield budget.row(_row("call", call, "JAX", mode), partial(single, options))
    for case in cases:
        for mode in ("jit", "jit, no command buffers"):
            row = _row("step", case, "JAX", mode)
            yield budget.row(row, partial(prepare, case, modes[mode]))


def _waiting(jax: Any, step: Step) -> tuple[Step, Step]:
    """Keep a step's last result for a wait: dropped before the next, its memory is used again."""
    kept: list[Any] = []

    def timed() -> Any:
        kept.clear()
        kept.append(step())
        return kept[0]

    return timed, lambda: jax.block_until_ready(kept)


def _floor(jax: Any) -> Step:
    """Make a compiled step of as many trivial operations, each of which needs the one before."""

    @jax.jit
    def trivial(x: Any) -> Any:
        for _ in range(_FLOOR_OPERATIONS):
            x = jax.lax.optimization_barrier(x * 1.5)  # which keeps XLA from fusing them
        return x

    return partial(trivial, jax.numpy.ones(1024))


def _counted() -> Callable[[], int]:
    """Count XLA's calls into Python from now on: each looks once into what is ready."""
    execute = import_module("cumla.jax.execute")

    class Counting(type(execute._ready)):  # type: ignore[misc]
        count = 0

        def get(self, *arguments: Any) -> Any:
            Counting.count += 1
            return super().get(*arguments)

    execute._ready = Counting()
    return lambda: Counting.count


# --- processes -----------------------------------------------------------------------------------


def _cupy(budget: Budget) -> Iterator[Row]:
    with Gpu() as gpu:
        yield from cupy_rows(budget, CASES, _CALL, gpu)


def _torch(budget: Budget) -> Iterator[Row]:
    torch = import_module("torch")
    if not torch.cuda.is_available():
        yield {"framework": "PyTorch", "skipped": "PyTorch sees no GPU"}
        return
    yield from torch_rows(budget, CASES, _CALL)


def _jax(budget: Budget) -> Iterator[Row]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = import_module("jax")
    if jax.default_backend() not in ("gpu", "cuda"):
        yield {"framework": "JAX", "skipped": "JAX sees no GPU"}
        return
    yield from jax_rows(budget, CASES, _CALL)


PARTS: dict[str, Callable[[Budget], Iterator[Row]]] = {"cupy": _cupy, "jax": _jax, "torch": _torch}
"""By the names of the packages that they need, in the order in which they run."""


def main() -> None:
    """Run a part."""
    name, seconds = sys.argv[1:]
    for row in PARTS[name](Budget(float(seconds))):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
