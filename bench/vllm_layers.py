# SPDX-License-Identifier: Apache-2.0
"""Layers of vLLM with one attention backend after the other, driven as vLLM drives them.

    python -m bench.vllm_layers "mla bfloat16" SECONDS

runs one of `PARTS` and prints a row of JSON per line. vLLM's builder prepares each step from its
`CommonAttentionMetadata`, outside of the graph; the layers are one CUDA graph. Only the model
around them is left out: its config is a namespace, its queries and caches are random.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import product
from math import prod
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.turns import in_turns
from cumla.bench.section import Row
from cumla.bench.timing import Timing

__all__ = ["BACKENDS", "PARTS", "Backend", "Case", "case_rows", "part_rows"]

Step = Callable[[], Any]

PAGE = 64
MOST_TOKENS = 16384  # of a request: vLLM's max_model_len, which a graph is captured for
_MLA = "vllm.v1.attention.backends.mla"
BACKENDS = {
    "mla": {
        "cumla": "cumla.vllm.mla:Backend",
        "FlashMLA": f"{_MLA}.flashmla:FlashMLABackend",
        "FA3": f"{_MLA}.flashattn_mla:FlashAttnMLABackend",
    },
    "mha": {
        "cumla": "cumla.vllm.mha:Backend",
        "FA3": "vllm.v1.attention.backends.flash_attn:FlashAttentionBackend",
    },
}
"""Classes by family and name; cumla's comes first, the others are compared with it."""

_LATENT, _ROPE = 512, 64
_SCALE = 0.5  # of FP8 caches and FP8 queries
_ROWS = 4  # requests that are checked, in the first layer and the last
_LIMITS = {"bfloat16": 2e-2, "fp8": 8e-2}  # of a row's error: by the type that is multiplied
_BURST = 8
_SECONDS = 0.15  # of a turn: three measurements at least, and as many as fit


@dataclass(frozen=True, slots=True)
class Case:
    """Shape of a step: requests with `kv_len` tokens, of which one is new."""

    family: str
    heads: int
    kv_heads: int
    cache: str
    batch: int
    kv_len: int
    layers: int = 8

    @property
    def width(self) -> int:
        """Columns of a query."""
        return _LATENT + _ROPE if self.family == "mla" else 128

    @property
    def scale(self) -> float:
        """Factor of the logits: MLA's is that of the 192 columns before absorption."""
        return float((192 if self.family == "mla" else self.width) ** -0.5)

    @property
    def stored(self) -> str:
        """vLLM's name of the cache's dtype."""
        return "fp8" if self.cache == "fp8" else "auto"


def _cases(family: str, heads: Sequence[int], kv_heads: int, cache: str) -> tuple[Case, ...]:
    shapes = product(heads, (1, 16, 64, 128), (1024, 8192))
    return tuple(Case(family, h, kv_heads, cache, batch, n) for h, batch, n in shapes)


PARTS = {
    "mla bfloat16": _cases("mla", (16, 128), 1, "bfloat16"),
    "mha bfloat16": _cases("mha", (32,), 8, "bfloat16"),
    "mla fp8": _cases("mla", (16, 128), 1, "fp8"),
    "mha fp8": _cases("mha", (32,), 8, "fp8"),
}
"""Each runs in a process of its own: a fault of one library does not end the others."""


# --- a step, as vLLM describes it ----------------------------------------------------------------


class Inputs:
    """Requests of a case: lengths, block table, queries, and what the caches hold."""

    def __init__(self, case: Case, device: str) -> None:
        self.torch = torch = import_module("torch")
        self.case, self.device = case, device
        self.e4m3 = torch.float8_e4m3fn
        random = np.random.default_rng(case.batch)
        each = -(-case.kv_len // PAGE)
        pages = random.permutation(case.batch * each).astype(np.int32).reshape(case.batch, each)
        table = np.zeros((case.batch, MOST_TOKENS // PAGE), np.int32)
        table[:, :each] = pages
        self.pages = pages.size
        self.table = torch.from_numpy(table).to(device)
        self.host_offsets = torch.arange(case.batch + 1, dtype=torch.int32)
        self.offsets = self.host_offsets.to(device)
        self.slots = torch.zeros(case.batch, dtype=torch.int64, device=device)
        self.kv_lens = torch.full((case.batch,), case.kv_len, dtype=torch.int32, device=device)
        # Lengths of a later step: a replay must follow them.
        later = random.integers(1, case.kv_len, case.batch, endpoint=True).astype(np.int32)
        self.later = torch.from_numpy(later).to(device)
        self.q = self._queries()
        factors = dict.fromkeys(("_q_scale", "_k_scale", "_v_scale"), _SCALE)
        self.layer = SimpleNamespace(
            **{name: torch.tensor(value, device=device) for name, value in factors.items()},
            **{f"{name}_float": value for name, value in factors.items()},
        )

    def normal(self, seed: int, *shape: int) -> Any:
        generator = self.torch.Generator(self.device).manual_seed(seed)
        dtype = self.torch.bfloat16
        return self.torch.randn(shape, generator=generator, dtype=dtype, device=self.device)

    def _queries(self) -> Any:
        """Make queries; those of MLA with the strides of the products that vLLM takes them from."""
        tokens, heads = self.case.batch, self.case.heads
        if self.case.family == "mha":
            return self.normal(1, tokens, heads, self.case.width)
        latent = self.normal(1, heads, tokens, _LATENT).transpose(0, 1)
        return latent, self.normal(2, tokens, heads, 128 + _ROPE)[..., 128:]

    def quantised_queries(self) -> Any:
        """Make the queries of backends that multiply in FP8: of MLA one array."""
        q = self.torch.cat(self.q, -1) if isinstance(self.q, tuple) else self.q
        return (q / _SCALE).to(self.e4m3)

    def fill(self, cache: Any, seed: int) -> None:
        """Write what layer `seed` holds into a cache, whatever its axes."""
        for part, array in enumerate(arrays(self.case, cache)):
            values = self.normal(10 + 2 * seed + part, *array.shape)
            if self.case.cache == "fp8":
                values, array = (values / _SCALE).to(self.e4m3), array.view(self.e4m3)
            array.copy_(values)

    def common(self, max_seq_len: int) -> Any:
        """Describe the step to a builder."""
        batch = self.case.batch
        return import_module("vllm.v1.attention.backend").CommonAttentionMetadata(
            query_start_loc=self.offsets,
            query_start_loc_cpu=self.host_offsets,
            seq_lens=self.kv_lens,
            num_reqs=batch,
            num_actual_tokens=batch,
            max_query_len=1,
            max_seq_len=max_seq_len,
            block_table_tensor=self.table,
            slot_mapping=self.slots,
        )

    def reference(self, cache: Any, q: Any, request: int) -> Any:
        """Attend in float32 for a request, from what a backend was given: ``(heads, columns)``."""
        case, length = self.case, int(self.kv_lens[request])
        table = self.table[request, : -(-length // PAGE)].long()
        rows = []
        for array in arrays(case, cache):
            if case.cache == "fp8":
                array = array.view(self.e4m3)
            rows.append(array[table].flatten(0, 1)[:length].float())
            rows[-1] *= _SCALE if case.cache == "fp8" else 1.0
        q = self.torch.cat([part[request] for part in q], -1) if type(q) is tuple else q[request]
        q = q.float() * (_SCALE if q.dtype == self.e4m3 else 1.0)
        q = q.view(case.kv_heads, -1, case.width)
        keys = rows[0].view(length, case.kv_heads, case.width)
        values = keys[..., :_LATENT] if case.family == "mla" else rows[1]
        weights = (self.torch.einsum("ghd,ngd->ghn", q, keys) * case.scale).softmax(-1)
        return self.torch.einsum("ghn,ngd->ghd", weights, values).flatten(0, 1)


def arrays(case: Case, cache: Any) -> tuple[Any, ...]:
    """View a cache as arrays of rows of pages: MLA's one, or keys and values."""
    if case.family == "mla":
        return (cache,)
    halves = cache.unbind(1) if cache.ndim == 5 else cache.transpose(1, 2).chunk(2, -1)
    return tuple(halves)


def config_of(case: Case) -> Any:
    """Make vLLM's config, with what builders ask of a model."""
    vllm, torch = import_module("vllm.config"), import_module("torch")
    config = vllm.VllmConfig()
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=MOST_TOKENS,
        use_mla=case.family == "mla",
        is_diffusion=False,
        rswa_window=None,
        hf_text_config=SimpleNamespace(
            q_lora_rank=None,
            kv_lora_rank=_LATENT,
            qk_nope_head_dim=128,
            qk_rope_head_dim=_ROPE,
            v_head_dim=128,
        ),
        get_num_attention_heads=lambda parallel: case.heads,
        get_num_kv_heads=lambda parallel: case.kv_heads,
        get_head_size=lambda: case.width,
    )
    config.cache_config.cache_dtype = case.stored
    config.cache_config.block_size = PAGE
    config.scheduler_config.max_num_seqs = 128
    config.compilation_config.cudagraph_mode = vllm.CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.max_cudagraph_capture_size = 512
    return config


class Backend:
    """Layers with a backend of vLLM: built, called and captured as in vLLM's model runner."""

    def __init__(self, name: str, inputs: Inputs) -> None:
        self.inputs, self.case = inputs, inputs.case
        self.kind = resolve_name(BACKENDS[self.case.family][name])
        self.config = config_of(self.case)
        with import_module("vllm.config").set_current_vllm_config(self.config):
            self._build()

    def _build(self) -> None:
        case, inputs, torch = self.case, self.inputs, self.inputs.torch
        self.impls = [self._impl() for _ in range(case.layers)]
        layers = self.config.compilation_config.static_forward_context
        prefill = SimpleNamespace(clone=lambda: None)  # no step has a prefill
        for number, impl in enumerate(self.impls):
            layers[str(number)] = SimpleNamespace(impl=impl, prefill_backend=prefill)
        stored = torch.uint8 if case.cache == "fp8" else torch.bfloat16
        specs = import_module("vllm.v1.kv_cache_interface")
        spec = specs.MLAAttentionSpec if case.family == "mla" else specs.FullAttentionSpec
        self.builder = self.kind.get_builder_cls()(
            spec(block_size=PAGE, num_kv_heads=case.kv_heads, head_size=case.width, dtype=stored),
            list(layers),
            self.config,
            inputs.table.device,  # with its number
        )
        shape = self.kind.get_kv_cache_shape(
            inputs.pages, PAGE, case.kv_heads, case.width, case.stored
        )
        self.caches = [torch.empty(shape, dtype=stored, device=inputs.device) for _ in self.impls]
        for number, cache in enumerate(self.caches):
            inputs.fill(cache, number)
        self.in_fp8 = case.cache == "fp8" and self.impls[0].supports_quant_query_input
        self.q = inputs.quantised_queries() if self.in_fp8 else inputs.q
        self.common = inputs.common(case.kv_len)
        self.new = inputs.normal(3, case.batch, case.kv_heads, case.width)  # nobody reads them
        self.outs: list[Any] = []
        if case.family == "mha":  # whose output is the caller's
            self.outs = [torch.empty_like(inputs.q) for _ in self.impls]

    def _impl(self) -> Any:
        case = self.case
        options = {
            "num_heads": case.heads,
            "head_size": case.width,
            "scale": case.scale,
            "num_kv_heads": case.kv_heads,
            "alibi_slopes": None,
            "sliding_window": None,
            "kv_cache_dtype": case.stored,
            "logits_soft_cap": None,
            "attn_type": "decoder",
            "kv_sharing_target_layer_name": None,
        }
        if case.family == "mla":
            options |= vars(self.config.model_config.hf_text_config)
            options |= {"qk_head_dim": 128 + _ROPE, "kv_b_proj": None}
        impl = self.kind.get_impl_cls()(**options)
        if case.family == "mla":
            impl.dcp_world_size = 1  # the layer would ask the group of processes
        else:
            impl.process_weights_after_loading(self.inputs.torch.bfloat16)
        return impl

    def begin(self) -> Any:
        """Build the metadata of a step: before the layers, and before each replay."""
        return self.builder.build(0, self.common)

    def attend(self, metadata: Any) -> list[Any]:
        """Run all layers."""
        if self.case.family == "mha":
            arrays = self.inputs.layer, self.q, self.new, self.new
            return [
                impl.forward(*arrays, cache, metadata, output=out)
                for impl, cache, out in zip(self.impls, self.caches, self.outs, strict=True)
            ]
        fp8 = self.case.cache == "fp8"
        return [
            impl.forward_mqa(
                self.q, cache.view(self.inputs.e4m3) if fp8 else cache, metadata, self.inputs.layer
            )[0]
            for impl, cache in zip(self.impls, self.caches, strict=True)
        ]

    def capture(self) -> None:
        """Capture the layers for any lengths, on a stream on which the metadata is built, too."""
        torch = self.inputs.torch
        longest = self.inputs.common(MOST_TOKENS)
        if self.inputs.device == "cpu":
            self.metadata = self.builder.build_for_cudagraph_capture(longest)
            self.replay: Step = self._again
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.attend(self.begin())  # compiles
            self.metadata = self.builder.build_for_cudagraph_capture(longest)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                self.outs = self.attend(self.metadata)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.replay = graph.replay

    def _again(self) -> None:
        self.outs = self.attend(self.begin())

    def step(self) -> None:
        """Decode one token of each request."""
        self.begin()
        self.replay()

    def error(self) -> float:
        """Run a step; return the largest error of a row, relative to its length."""
        self.step()
        batch, last = self.case.batch, len(self.outs) - 1
        found = []
        for request in {round(i * (batch - 1) / (_ROWS - 1)) for i in range(_ROWS)}:
            for place in {0, last}:
                wanted = self.inputs.reference(self.caches[place], self.q, request)
                out = self.outs[place].reshape(batch, *wanted.shape)[request].float()
                off = (out - wanted).norm(dim=-1) / wanted.norm(dim=-1)
                found.append(float(off.nan_to_num(nan=float("inf")).max()))
        return max(found)


# --- measuring -----------------------------------------------------------------------------------


def case_rows(case: Case, device: str, seconds: float, repeats: int = 20) -> Iterator[Row]:
    """Measure a case with each backend that serves it; a row per backend."""
    inputs = Inputs(case, device)
    torch, end = inputs.torch, time.monotonic() + seconds
    wait: Step = torch.cuda.synchronize if device == "cuda" else int
    backends: dict[str, Backend] = {}
    rows: dict[str, Row] = {}
    for name in BACKENDS[case.family]:
        rows[name] = asdict(case) | {"backend": name}
        try:
            backend = Backend(name, inputs)
            backend.capture()
            errors = [backend.error()]
            inputs.kv_lens.copy_(inputs.later)
            errors.append(backend.error())
            rows[name] |= {"error": max(errors)} | _judged(backend, max(errors))
            backends[name] = backend
        except Exception as error:  # of any kind: the other backends stand
            reason = str(error).strip().partition("\n")[0]
            rows[name]["failed"] = f"{type(error).__name__}: {reason}"
        finally:
            inputs.kv_lens.fill_(case.kv_len)
    for backend in backends.values():
        backend.step()
    own = backends.get("cumla")
    for name, backend in backends.items():
        if own is not None and backend is not own:
            rows[name]["differs"] = max(map(_distance, backend.outs, own.outs))
    clocks = {
        "": _Clock(wait, repeats, "step"),
        "graph_": _Clock(wait, repeats, "replay", count=4),
        "burst_": _Clock(wait, repeats, "step", count=_BURST),
        "build_": _Clock(wait, repeats, "begin", waits=False),
    }
    for prefix, clock in clocks.items():
        if time.monotonic() > end:
            break
        works = [getattr(backend, clock.work) for backend in backends.values()]
        for name, timing in zip(backends, in_turns(clock, works), strict=True):
            rows[name] |= {prefix + key: value for key, value in timing.figures().items()}
    yield from rows.values()


def _judged(backend: Backend, error: float) -> Row:
    limit = _LIMITS["fp8" if backend.in_fp8 else "bfloat16"]
    return {"multiplies": "fp8" if backend.in_fp8 else "bfloat16", "correct": error <= limit}


def _distance(out: Any, other: Any) -> float:
    """Return how far two results of a layer are apart, relative to the second."""
    out, other = out.float().flatten(), other.float().flatten()
    return float((out - other).norm() / other.norm())


@dataclass(frozen=True)
class _Clock:
    """Times work in microseconds: until it is done, or until the call returns."""

    wait: Step
    repeats: int
    work: str  # the name of a Backend's method
    count: int = 1  # runs without a wait between them
    waits: bool = True

    def __call__(self, work: Step) -> Timing:
        measured: list[float] = []
        until = time.monotonic() + _SECONDS
        for turn in range(-2, self.repeats):
            if turn >= 3 and time.monotonic() > until:
                break
            begin = time.perf_counter_ns()
            for _ in range(self.count):
                work()
            returned = time.perf_counter_ns()
            self.wait()
            end = time.perf_counter_ns() if self.waits else returned
            if turn >= 0:
                measured.append((end - begin) / 1e3 / self.count)
        return Timing.of(measured)


def part_rows(cases: Sequence[Case], device: str, seconds: float) -> Iterator[Row]:
    """Measure cases while there is time; those that there is none for are rows that say so."""
    torch = import_module("torch")
    end = time.monotonic() + seconds
    current: AbstractContextManager[Any] = nullcontext()
    if device == "cuda":  # the default stream cannot be captured, so vLLM does not use it
        current = torch.cuda.stream(torch.cuda.Stream())
    with torch.inference_mode(), current:
        for case in cases:
            left = end - time.monotonic()
            if left <= 0:
                yield asdict(case) | {"skipped": "no time was left"}
                continue
            fitting = replace(case, layers=_fitting(case, device))
            try:
                yield from case_rows(fitting, device, left)
            except Exception as error:  # of any kind: later cases stand
                yield asdict(case) | {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
            if device == "cuda":
                gc.collect()
                torch.cuda.empty_cache()


def _fitting(case: Case, device: str) -> int:
    """Count the layers whose caches fit for all backends; four fifths of the free memory."""
    if device != "cuda":
        return case.layers
    free, _ = import_module("torch").cuda.mem_get_info()
    count = 1 if case.family == "mla" else 2
    row = prod((count, case.kv_heads, case.width, 1 if case.cache == "fp8" else 2))
    each = row * case.batch * -(-case.kv_len // PAGE) * PAGE * len(BACKENDS[case.family])
    return max(1, min(case.layers, int(0.8 * free) // each))


def main() -> None:
    """Run a part."""
    name, seconds = sys.argv[1:]
    torch = import_module("torch")
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU")
    for path in BACKENDS[PARTS[name][0].family].values():
        with suppress(Exception):  # raised again, and said, by each case
            resolve_name(path)
    gc.freeze()  # each capture collects garbage, which takes long over all that vLLM imports
    for row in part_rows(PARTS[name], "cuda", float(seconds)):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
