# SPDX-License-Identifier: Apache-2.0
"""A decoding step in each framework: cumla called eagerly, compiled, and in CUDA graphs.

    python -m bench.framework_steps PART SECONDS

runs one of `PARTS` and prints a row of JSON a line; what there was no time for is a row that says
so.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

import cumla
from bench.step_case import CALL, CASES, Arrays, Budget, Prepared, Step, StepCase, bits, row_of
from cumla.bench.gpu import Gpu
from cumla.bench.section import Row

__all__ = ["PARTS", "cupy_rows", "jax_rows", "torch_rows"]

_COUNTED = 6  # runs whose callbacks are counted
_FLOOR_OPERATIONS = 32
_NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}


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
        return out, gpu.empty((case.batch, 1, case.heads), "float32")

    def prepare(case: StepCase, mode: str) -> Prepared:
        arrays, (out, lse) = case.lay_out(upload, copy), outputs(case)
        step: Any = _in_place(case, arrays, partial(_planned, case, arrays, out, lse))
        step()
        kept = bits(gpu.download(out.view(np.uint16)))
        if mode == "graph":
            step = gpu.capture(step)
        return step, gpu.synchronize, kept

    yield budget.row(
        row_of("call", call, "CuPy", "eager"),
        lambda: (_single(call, call.lay_out(upload, copy)), gpu.synchronize, {}),
    )
    for case in cases:
        for mode in ("graph", "eager"):
            gpu.release()
            yield budget.row(row_of("step", case, "CuPy", mode), partial(prepare, case, mode))


def _single(case: StepCase, arrays: Arrays) -> Step:
    """Make a call without a plan, which allocates its outputs."""
    (cache,) = arrays.caches
    given = {"block_table": arrays.table, "kv_lens": arrays.kv_lens}
    return partial(getattr(cumla, case.functions.attend), arrays.q, *cache, **given)


def _planned(case: StepCase, arrays: Arrays, out: Any, lse: Any) -> tuple[Step, Callable[..., Any]]:
    """Make what computes the schedule, and what attends to one layer by it."""
    plan = getattr(cumla, case.functions.plan).from_arrays(arrays.q, *arrays.caches[0])

    def attend(cache: tuple[Any, ...]) -> Any:
        return plan.run(arrays.q, *cache, block_table=arrays.table, out=out, lse=lse).out

    return partial(plan.update, arrays.kv_lens), attend


def _in_place(
    case: StepCase, arrays: Arrays, make: Callable[[], tuple[Step, Callable[..., Any]]]
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

    def prepare(case: StepCase, mode: str) -> Prepared:
        arrays = case.lay_out(upload, torch.clone)
        out = arrays.q.new_empty(*arrays.q.shape[:-1], 512 if case.family == "mla" else case.width)
        lse = arrays.q.new_empty(case.batch, 1, case.heads, dtype=torch.float32)
        if mode in ("eager", "graph"):
            step: Any = _in_place(case, arrays, partial(_planned, case, arrays, out, lse))
        else:
            step = _compiled_torch(torch, case, arrays, mode)
        result = step()
        wait()
        kept = bits(result.cpu().view(torch.int16).numpy())
        if mode == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        return step, wait, kept

    with torch.no_grad():
        yield budget.row(
            row_of("call", call, "PyTorch", "eager"),
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
                yield budget.row(
                    row_of("step", case, "PyTorch", name), partial(prepare, case, mode)
                )


def _compiled_torch(torch: Any, case: StepCase, arrays: Arrays, mode: str) -> Step:
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

    def single(options: Row | None) -> Prepared:
        arrays = call.lay_out(jax.numpy.asarray, jax.numpy.copy)
        function = _single(call, arrays)
        if options is not None:
            (cache,), attend = arrays.caches, getattr(cumla, call.functions.attend)
            compiled = jax.jit(lambda *given: attend(*given), compiler_options=options)
            function = partial(compiled, arrays.q, *cache, arrays.table, arrays.kv_lens)
        return *_waiting(jax, function), {}

    def prepare(case: StepCase, options: Row) -> Prepared:
        arrays, functions = case.lay_out(jax.numpy.asarray, jax.numpy.copy), case.functions
        append, kind = getattr(binding, functions.append), getattr(binding, functions.plan)

        def layers(caches: Any, q: Any, rows: Any, table: Any, kv_lens: Any, slots: Any) -> Any:
            plan, written = kind.from_arrays(q, *caches[0]).update(kv_lens), []
            for cache in caches:
                new = append(*rows, *cache, slots)
                written.append(new if isinstance(new, tuple) else (new,))
                (out, _), plan = plan.run(q, *written[-1], block_table=table)
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
        kept = bits(np.asarray(timed()).view(np.uint16))
        return timed, wait, {"callbacks": callbacks, **kept}

    def floor(case: StepCase) -> Prepared:
        arrays = case.lay_out(jax.numpy.asarray, jax.numpy.copy)
        return *_waiting(jax, _floor_of(jax, arrays)), {}

    yield budget.row(row_of("floor", None, "JAX", "jit"), lambda: (*_waiting(jax, _floor(jax)), {}))
    for case in cases:
        yield budget.row(row_of("floor", case, "JAX", "jit"), partial(floor, case))
    modes: dict[str, Any] = {
        "eager": None,
        "jit": {},
        "jit, no command buffers": _NO_COMMAND_BUFFERS,
    }
    for mode, options in modes.items():
        yield budget.row(row_of("call", call, "JAX", mode), partial(single, options))
    steps = [("jit", case) for case in cases]
    for mode, case in (*steps, ("jit, no command buffers", cases[0])):
        yield budget.row(row_of("step", case, "JAX", mode), partial(prepare, case, modes[mode]))


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

    def trivial(x: Any) -> Any:
        for _ in range(_FLOOR_OPERATIONS):
            x = jax.lax.optimization_barrier(x * 1.5)  # which keeps XLA from fusing them
        return x

    return partial(jax.jit(trivial), jax.numpy.ones(1024))


def _floor_of(jax: Any, arrays: Arrays) -> Step:
    """Make a step of trivial operations on the same arrays: each layer's cache is written to."""

    def layers(caches: Any, q: Any, rows: Any) -> Any:
        written = []
        for cache in caches:
            new = tuple([c.at[0, 0].set(row[0]) for c, row in zip(cache, rows, strict=True)])
            new, q = jax.lax.optimization_barrier((new, q * 1.5))
            written.append(new)
        return written, q

    compiled, caches = jax.jit(layers, donate_argnums=0), arrays.caches

    def step() -> Any:
        nonlocal caches
        caches, out = compiled(caches, arrays.q, arrays.rows)
        return out

    return step


def _counted() -> Callable[[], int]:
    """Count XLA's calls into Python from now on: each looks once into what is ready."""
    execute: Any = import_module("cumla.jax.execute")

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
        yield from cupy_rows(budget, CASES, CALL, gpu)


def _torch(budget: Budget) -> Iterator[Row]:
    torch = import_module("torch")
    if not torch.cuda.is_available():
        yield {"framework": "PyTorch", "skipped": "PyTorch sees no GPU"}
        return
    yield from torch_rows(budget, CASES, CALL)


def _jax(budget: Budget) -> Iterator[Row]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = import_module("jax")
    if jax.default_backend() not in ("gpu", "cuda"):
        yield {"framework": "JAX", "skipped": "JAX sees no GPU"}
        return
    yield from jax_rows(budget, CASES, CALL)


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
