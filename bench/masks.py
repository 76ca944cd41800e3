# SPDX-License-Identifier: Apache-2.0
"""Times masks and biases of attention, interleaved with calls without them and other libraries.

    python -m bench.masks FILE [SECONDS]

Medians of single runs of plans, L2 cold, CUDA events, the host ahead, in microseconds: FILE holds a
row for each shape. Schedules and masks are made before, as a server makes them once a step.
Some query tokens of all results are compared with float64 before the timing and after it, by a rule
for each mask that is written apart from cumla's. Processes compile FlexAttention beside each other;
after SECONDS (40 by default) they begin nothing more, and rows lack its time. Then one at a time
uses the GPU. The other libraries are those of bench/libraries.py, where they are there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import cumla
from bench import mask_peers
from bench.libraries import Libraries
from bench.measure import Stopwatch
from cumla import AttentionBias, AttentionMask

DEVICE = "cuda"
TURNS = 15
WORKERS = 8
LIMIT = 2e-2  # of an error, as a share of the largest number of a query token and head
IMAGES, WIDTH = (512, 2500, 4096, 7000), 256  # tokens at which an image begins, and its tokens
CHUNK, BLOCK, WINDOW, DISTANCES = 8192, 32, 1023, 1024  # the last: of a table


class Shape(NamedTuple):
    """A row. `target`: us, or times the call without mask and bias ("x"), that issue asks for."""

    name: str  # its words say which mask or bias
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    columns: int
    target: str = ""


SHAPES = (
    Shape("prefill", 1, 8192, 8192, 32, 8, 128, "1.03 x"),
    Shape("prefill, 64 columns", 1, 8192, 8192, 32, 8, 64, "1.03 x"),
    Shape("prefill, windows of 1,024 and images", 1, 8192, 8192, 32, 16, 128, "290"),
    Shape("prefill, windows of 1,024 and images, 256 columns", 1, 8192, 8192, 16, 8, 256, "290"),
    Shape("prefill, images", 1, 8192, 8192, 32, 16, 128, "800"),
    Shape("prefill, images, 512 columns", 1, 8192, 8192, 16, 4, 512, "1,750"),
    Shape("prefill, blocks of 32", 1, 8192, 8192, 32, 8, 128, "790"),
    Shape("prefill, chunks of 8,192", 1, 32768, 32768, 40, 8, 128, "3,900"),
    Shape("decoding", 128, 1, 8192, 32, 8, 128, "1.02 x"),
    Shape("decoding, chunks of 8,192", 64, 1, 36864, 40, 8, 128, "252"),
    Shape("decoding one request", 1, 1, 8192, 4, 1, 128),
    Shape("drafts of 1 to 8, four on average", 64, 4, 4096, 32, 8, 128, "1.03 x"),
    Shape("trees of 16", 16, 16, 8192, 64, 8, 128, "135"),
    Shape("trees of 32", 16, 32, 8192, 32, 8, 128, "150"),
    Shape("trees of 64", 1, 64, 8192, 32, 8, 128, "24"),
    Shape("trees of 8", 64, 8, 4096, 32, 8, 128, "252"),
    Shape("trees of 8, 64 columns", 64, 8, 4096, 64, 8, 64, "132"),
    Shape("slopes, prefill", 1, 8192, 8192, 32, 8, 128, "1.02 x"),
    Shape("slopes, prefill, 64 columns", 1, 8192, 8192, 32, 8, 64, "1.02 x"),
    Shape("slopes, prefill, 256 columns", 1, 8192, 8192, 16, 8, 256, "1.02 x"),
    Shape("slopes, decoding", 128, 1, 8192, 32, 8, 128, "1.02 x"),
    Shape("slopes, decoding, e4m3", 64, 1, 8192, 32, 8, 128, "1.02 x"),
    Shape("a table of 1,024, decoding one request", 1, 1, 8192, 4, 1, 128, "13"),
    Shape("a table of 1,024, decoding one long request", 1, 1, 65536, 4, 1, 128, "20"),
    Shape("a table of 1,024, decoding", 64, 1, 8192, 32, 8, 128, "505"),
    Shape("a table of 1,024, decoding, one key head", 64, 1, 8192, 4, 1, 128, "70"),
    Shape("a table of 1,024, prefill", 1, 8192, 8192, 32, 8, 128, "900"),
    Shape("a local table of 512, prefill", 1, 8192, 8192, 32, 8, 128, "190"),
)


def distances(name: str) -> int:
    return DISTANCES // 2 if "local" in name else DISTANCES


def window_of(name: str) -> int | None:
    """Keys before a query's own that it sees."""
    return distances(name) - 1 if "local" in name else WINDOW if "windows" in name else None


def rule_of(name: str, kind: str, before: Any, tree: Any = None) -> Callable[..., Any]:
    """Tell whether query token i of request b sees key j, as FlexAttention asks for it.

    `kind`: "mask" for all of the row's mask, "window" without images, or "causal".
    """
    window = window_of(name)
    window = None if kind == "causal" else window

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        p = before + i
        if kind == "mask" and tree is not None:
            return (j < before) | tree[b, i, (j - before).clamp(min=0)]
        if kind == "mask" and "blocks" in name:
            return j // BLOCK <= p // BLOCK
        inside = j <= p
        if kind == "mask" and "chunks" in name:
            inside = inside & (j >= p // CHUNK * CHUNK)
        if window is not None:
            inside = inside & (p - j <= window)
        if kind == "mask" and "images" in name:
            for at in IMAGES:
                of_image = (p >= at) & (p < at + WIDTH) & (j >= at) & (j < at + WIDTH)
                inside = inside | of_image
        return inside

    return seen


def score_of(bias: Any, before: int, q_len: int) -> Callable[..., Any] | None:
    """Tell a score with its bias, as FlexAttention asks for it."""
    if bias is None:
        return None

    def slope(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + bias.slopes[h] * (j - (before + i))

    def row(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        away = before + i - j
        of = bias.table[b * q_len + i, h, away.clamp(0, bias.table.shape[2] - 1)]
        return score + torch.where((away >= 0) & (away < bias.table.shape[2]), of, 0.0)

    return row if bias.slopes is None else slope


def bias_of(name: str, tokens: int, heads: int) -> AttentionBias | None:
    if "slopes" in name:
        slopes = 2.0 ** -(8 / heads * torch.arange(1, heads + 1, device=DEVICE))
        return AttentionBias(slopes=slopes.float())
    if "table" not in name:
        return None
    size = tokens, heads, distances(name)
    return AttentionBias(table=torch.randn(size, dtype=torch.bfloat16, device=DEVICE))


def tree_of(batch: int, drafts: int) -> torch.Tensor:
    """Trees whose drafts see the first one, themselves, and some between."""
    shape = batch, drafts, drafts
    tree = torch.ones(shape, dtype=torch.bool, device=DEVICE).tril()
    some = torch.rand(shape, device=DEVICE) < 0.4
    some |= torch.eye(drafts, dtype=torch.bool, device=DEVICE)
    some[:, :, 0] = True
    return tree & some


def mask_of(name: str, lens: torch.Tensor, q_len: int) -> AttentionMask:
    places: dict[str, Any] = {"kv_lens": lens, "q_len": q_len}
    batch = len(lens)
    if "images" in name:
        spans = torch.tensor([[(at, at + WIDTH - 1) for at in IMAGES]] * batch, dtype=torch.int32)
        return AttentionMask.image_spans(spans.to(DEVICE), window=window_of(name), **places)
    if "chunks" in name:
        return AttentionMask.chunks(CHUNK, **places)
    if "blocks" in name:
        return AttentionMask.blocks(BLOCK, **places)
    return AttentionMask.windows(1 << 30, **places)


def timed(calls: dict[str, Callable[[], Any]], flush: Any) -> dict[str, float]:
    """Time calls in turns: medians."""
    watch = Stopwatch(flush, torch)
    for call in calls.values():
        call()
    host = max(min(watch.host_us(call) for _ in range(3)) for call in calls.values())
    times = watch.in_turns(list(calls.values()), TURNS, 1.6 * host + 40)
    return {name: round(us, 1) for name, (us, _) in zip(calls, times, strict=True)}


class Flush:
    """Empties L2 by reading 512 MiB."""

    def __init__(self) -> None:
        self._array = torch.zeros(1 << 27, device=DEVICE)

    def flush_l2(self) -> None:
        self._array.sum()


def planned(given: dict[str, Any], *, counts: Any = None, **more: Any) -> Callable[[], Any]:
    """Make a plan and its schedule, and results full of NaN for it."""
    q, mask, bias = given["q"], more.get("mask"), more.get("bias")
    forms: dict[str, Any] = {"window": more.pop("window", None)}
    if mask is not None:
        forms["mask_form"] = "rows" if mask.tree is None else "tree"
    if bias is not None:
        forms["bias_form"] = "table" if bias.slopes is None else "linear"
    lengths = {}
    if counts is not None:
        q = q.flatten(0, 1)
        lengths["qo_indptr"] = torch.cat([counts.new_zeros(1), counts.cumsum(0).int()])
    plan = cumla.AttentionPlan.from_arrays(q, given["k"], given["v"], **forms, **lengths)
    plan.update(given["kv_lens"], **lengths)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=DEVICE)
    lse = torch.full(q.shape[:-1], float("nan"), device=DEVICE)
    table = given["block_table"]
    arrays = {"block_table": table, "out": out, "lse": lse}
    return lambda: plan.run(q, given["k"], given["v"], **arrays, **more).out


class Case:
    """Arrays of a row, its calls, and float64."""

    def __init__(self, shape: Shape) -> None:
        name, batch, q_len, kv_len, heads, kv_heads, columns, _ = shape
        self.shape, self.before = shape, kv_len - q_len
        per = -(-kv_len // 64)
        kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
        cache = [torch.randn(batch * per, 64, kv_heads, columns, **kind) for _ in range(2)]
        self.lens = torch.full((batch,), kv_len, dtype=torch.int32, device=DEVICE)
        if "e4m3" in name:
            cache = [part.to(torch.float8_e4m3fn) for part in cache]
        self.given: dict[str, Any] = {
            "q": torch.randn(batch, q_len, heads, columns, **kind),
            "k": cache[0],
            "v": cache[1],
            "kv_lens": self.lens,
            "block_table": torch.randperm(batch * per, device=DEVICE).int().view(batch, per),
        }
        self.bias = bias_of(name, batch * q_len, heads)
        self.tree = tree_of(batch, q_len) if "trees" in name else None
        self.counts: Any = None
        if "drafts of" in name:
            pattern = torch.tensor([1, 7, 2, 6, 3, 5, 4, 4, 8, 1, 3, 4], device=DEVICE)
            self.counts = pattern.repeat(batch // 12 + 1)[:batch].int()
            self.counts[-1] += batch * q_len - int(self.counts.sum())
        self.calls: dict[str, Callable[[], Any]] = {}
        self.kinds: dict[str, str] = {}  # what each call computes
        self._exact: dict[tuple[str, int], Any] = {}

    def add(self, name: str, kind: str, call: Callable[[], Any]) -> float:
        """Add a call, if its result is right: its error."""
        self.kinds[name] = kind
        error = self.error(kind, call())
        if not error <= LIMIT:
            raise AssertionError(f"{name} is off by {error:.1e}, allowed are {LIMIT:.0e}")
        self.calls[name] = call
        return error

    def add_own(self) -> None:
        name, given = self.shape.name, self.given
        window = window_of(name)
        self.add("causal", "causal", planned(given))
        if self.counts is not None:
            self.add("ragged", "ragged", planned(given, counts=self.counts))
        elif self.bias is not None:
            kind = "causal" if window is None else "window"
            self.add("bias", f"{kind} bias", planned(given, bias=self.bias, window=window))
        else:
            mask = mask_of(name, self.lens, self.shape.q_len)
            if self.tree is not None:
                mask = AttentionMask.from_tree(self.tree, kv_lens=self.lens, q_len=self.shape.q_len)
            self.add("mask", "mask", planned(given, mask=mask))
            if "chunks" in name and self.shape.q_len > CHUNK:
                self.add("apart", "mask", planned(self.chunks()))
        if window is not None and self.bias is None:
            self.add("window", "window", planned(given, window=window))

    def chunks(self) -> dict[str, Any]:
        """The chunks of a prefill as requests of their own, which need no mask."""
        q, table = (self.given[name] for name in ("q", "block_table"))
        own = q.view(-1, CHUNK, *q.shape[2:])
        lens = self.lens.new_full((len(own),), CHUNK)
        return self.given | {"q": own, "block_table": table.view(len(own), -1), "kv_lens": lens}

    def peers(self, libraries: Libraries) -> dict[str, Callable[[], mask_peers.Peer]]:
        """Tell how to make the calls of other libraries that have such a row: one, or variants."""
        shape, given = self.shape, self.given
        pairs = shape.batch * shape.q_len * shape.kv_len
        if "e4m3" in shape.name:
            return {}
        found: dict[str, Callable[[], mask_peers.Peer]] = {}
        library = libraries.flash_attention
        if library is not None and self.bias is None and shape.columns <= 256:
            more: dict[str, Any] = {"tree": self.tree, "counts": self.counts}
            more |= {"window": window_of(shape.name)}
            more |= {"chunk": CHUNK if "chunks" in shape.name else 0}
            found["FA3"] = partial(mask_peers.flash_attention, library, given, **more)
        if self.counts is not None:
            return found
        own = self.kinds["mask" if self.bias is None else "bias"]
        newer = libraries.flash_attention_4 if shape.columns <= 256 else None
        if newer is not None:
            found["FA4"] = lambda: (own, self.flash_attention_4(newer))
        triton = libraries.vllm_attention
        served = any(word in shape.name for word in ("images", "chunks", "slopes"))
        if triton is not None and served:
            found["vLLM"] = lambda: (own, self.vllm(triton))
        if pairs > mask_peers.LARGEST_MASK:
            return found
        seen = rule_of(shape.name, own.removesuffix(" bias"), self.before, self.tree)
        module = libraries.flash_infer("prefill")
        if module is not None and self.bias is None and shape.columns == 128 and shape.q_len > 1:
            infer = partial(mask_peers.flash_infer, module, given)
            found["FlashInfer"] = lambda: (own, infer(self.dense(seen)))
        score = score_of(self.bias, self.before, shape.q_len)
        flex = partial(mask_peers.flex, given, seen, score)
        return found | {"flex": lambda: (own, flex())}

    def flash_attention_4(self, module: Any) -> dict[str, Callable[[], Any]]:
        name, _, q_len = self.shape[:3]
        mask = mask_of(name, self.lens, q_len) if self.bias is None else None
        more: dict[str, Any] = {"mask": mask, "tree": self.tree, "bias": self.bias}
        more |= {"window": window_of(name), "chunk": CHUNK if "chunks" in name else 0}
        return mask_peers.flash_attention_4(module, self.given, **more)

    def vllm(self, attend: Any) -> Callable[[], Any]:
        name, batch = self.shape[:2]
        more: dict[str, Any] = {"bias": self.bias, "window": window_of(name)}
        more |= {"chunk": CHUNK if "chunks" in name else 0}
        if "images" in name:
            spans = [[(at, at + WIDTH - 1) for at in IMAGES]] * batch
            more["spans"] = torch.tensor(spans, dtype=torch.int32, device=DEVICE)
        return mask_peers.vllm(attend, self.given, **more)

    def dense(self, seen: Callable[..., Any]) -> Any:
        batch, q_len, kv_len = self.shape[1:4]
        of = [torch.arange(n, device=DEVICE) for n in (batch, q_len, kv_len)]
        return seen(of[0][:, None, None], 0, of[1][:, None], of[2]).expand(batch, q_len, kv_len)

    def error(self, kind: str, out: Any) -> float:
        """The largest error of some query tokens, of all their heads."""
        tokens = self.shape.batch * self.shape.q_len
        out, worst = out.reshape(tokens, *out.shape[-2:]), 0.0
        middle = IMAGES[1] + 3 if "images" in self.shape.name else tokens // 2
        for token in sorted({0, tokens // 3, min(middle, tokens - 1), tokens - 1}):
            if (kind, token) not in self._exact:
                self._exact[kind, token] = self._attend(kind, token)
            want = self._exact[kind, token]
            largest = want.abs().amax(-1, keepdim=True)
            off = (out[token].double() - want) / largest
            worst = max(worst, float(off.abs().nan_to_num(torch.inf).max()))
        return worst

    def _attend(self, kind: str, token: int) -> Any:
        name, _, q_len, kv_len, _, kv_heads, columns, _ = self.shape
        request, i, before = token // q_len, token % q_len, self.before
        if kind == "ragged":
            ends = self.counts.cumsum(0)
            request = int((ends <= token).sum())
            i = token - int(ends[request] - self.counts[request])
            before, kind = kv_len - int(self.counts[request]), "causal"
        pages = self.given["block_table"][request].long()
        k, v = (
            self.given[part][pages].flatten(0, 1)[:kv_len].double().transpose(0, 1)
            for part in ("k", "v")
        )
        q = self.given["q"].flatten(0, 1)[token].double().view(kv_heads, -1, columns)
        scores = (q @ k.transpose(1, 2)).flatten(0, 1) * columns**-0.5
        j = torch.arange(kv_len, device=DEVICE)
        if kind.endswith("bias"):
            heads = torch.arange(len(scores), device=DEVICE)[:, None]
            score: Any = score_of(self.bias, before, q_len)
            scores = score(scores, request, heads, i, j)
        seen = rule_of(name, kind.removesuffix(" bias"), before, self.tree)(request, 0, i, j)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights.view(kv_heads, -1, kv_len) @ v).flatten(0, 1)


def said(exception: Exception) -> str:
    return f"{type(exception).__name__}: {exception}".partition("\n")[0][:200]


def fastest(us: dict[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    """Times with the fastest of each library's variants, and what it is."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for name, time_of in us.items():
        library, _, variant = name.partition(", ")
        if time_of <= found.get(library, time_of):
            found[library] = time_of
            if variant:
                kinds[library] = variant
    return found, kinds


def prepared(shape: Shape, libraries: Libraries, until: float) -> tuple[Case, dict[str, Any]]:
    """Make a row's calls, and check them; those of FlexAttention if there is time to compile it."""
    case = Case(shape)
    case.add_own()
    notes: dict[str, Any] = {}
    for name, make in case.peers(libraries).items():
        if name == "flex" and time.monotonic() > until:
            notes[f"without {name}"] = "no time to compile it"
            continue
        try:
            kind, made = make()
        except Exception as exception:  # whatever it is: the row goes without
            notes[f"without {name}"] = said(exception)
            continue
        variants = (
            {f"{name}, {of}": call for of, call in made.items()}
            if isinstance(made, dict)
            else {name: made}
        )
        for variant, call in variants.items():
            try:
                case.add(variant, kind, call)
            except Exception as exception:
                notes[f"without {variant}"] = said(exception)
    return case, notes


def measured(case: Case, notes: dict[str, Any], flush: Any) -> dict[str, Any]:
    """Time a row, and check its results again."""
    us = timed(case.calls, flush)
    errors = {name: case.error(case.kinds[name], call()) for name, call in case.calls.items()}
    if max(errors.values()) > LIMIT:
        raise AssertionError(f"after the timing results are off by {errors}")
    name, batch, q_len, kv_len, heads, kv_heads, columns, target = case.shape
    sizes = {"batch": batch, "q_len": q_len, "kv_len": kv_len, "heads": [heads, kv_heads]}
    row: dict[str, Any] = {"name": name, **sizes, "columns": columns, "us": us}
    row["us"], kinds = fastest(us)
    own = ("causal", "mask", "bias", "ragged", "window", "apart")
    peers = {name: case.kinds[name] for name in us if name not in own}
    row |= {"target": target, "errors": errors, "peers compute": peers}
    row |= {"variants": kinds} if kinds else {}
    return row | {f"us of {name}": us[name] for name in us if ", " in name} | notes


def work(numbers: range, until: float, ready: Any, turn: Any, found: Any) -> None:
    """Prepare some rows, in a process; then measure them, when it is its turn."""
    cases: dict[int, tuple[Case, dict[str, Any]] | Exception] = {}
    libraries = Libraries(torch)
    for number in numbers:
        try:
            cases[number] = prepared(SHAPES[number], libraries, until)
        except Exception as exception:
            cases[number] = exception
    ready.put(numbers.start)
    turn.wait()
    flush = Flush()
    for number, case in cases.items():
        try:
            if isinstance(case, Exception):
                raise case
            row = measured(*case, flush)
        except Exception as exception:
            row = {"name": SHAPES[number].name, "us": {}, "problem": repr(exception)[:300]}
        found.put((number, row))
    found.put((numbers.start, libraries.notes))
    found.close()
    found.join_thread()


def main(path: str, seconds: float = 40.0) -> None:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    found, ready, until = context.Queue(), context.Queue(), time.monotonic() + seconds
    turns = [context.Event() for _ in range(WORKERS)]
    workers = [
        context.Process(
            target=work, args=(range(i, len(SHAPES), WORKERS), until, ready, turn, found)
        )
        for i, turn in enumerate(turns)
    ]
    for worker in workers:
        worker.start()
    waiting = set(range(WORKERS))
    while any(workers[i].is_alive() for i in waiting):
        try:
            waiting.discard(ready.get(timeout=1.0))
        except queue.Empty:
            continue
    rows: dict[int, dict[str, Any]] = {}
    notes: list[str] = []
    for worker, turn in zip(workers, turns, strict=True):
        turn.set()
        while True:
            try:
                number, row = found.get(timeout=1.0)
            except queue.Empty:
                if not worker.is_alive():
                    break
                continue
            if isinstance(row, list):
                notes += [note for note in row if note not in notes]
                break
            rows[number] = row
            print(json.dumps(row), flush=True)
            about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            about |= {"notes": notes, "rows": [rows[number] for number in sorted(rows)]}
            with open(path, "w", encoding="utf-8") as file:
                json.dump(about, file, indent=1)
                file.write("\n")
        worker.join(30)


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:3]))
