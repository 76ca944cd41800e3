# SPDX-License-Identifier: Apache-2.0
"""What masks and biases of attention take, in turns with calls without them and with FlexAttention.

    python -m bench.masks FILE [SECONDS]

Medians of single calls, L2 cold, CUDA events, the host ahead, in microseconds: FILE holds a row for
each shape. A call of cumla includes its schedule. FlexAttention of PyTorch gets the same mask or
bias as a function that it compiles, its block mask made before, and rows of keys without pages. Its
results must be close. Five processes compile it beside each other; one at a time uses the GPU for
timing. After SECONDS (30 by default) nothing is compiled any more: rows then lack its time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import cumla
from cumla import AttentionBias, AttentionMask

DEVICE = "cuda"
TURNS = 15
WORKERS = 5
IMAGES, WIDTH = (512, 2500, 4096, 7000), 256  # tokens at which an image begins, and its tokens
CHUNK, WINDOW, DISTANCES = 8192, 1023, 1024  # the last: of a table
# Name, requests, query tokens and keys of each, heads, kv heads, columns
SHAPES = (
    ("prefill", 1, 8192, 8192, 32, 8, 128),
    ("prefill, 64 columns", 1, 8192, 8192, 32, 8, 64),
    ("prefill, windows of 1,024 and images", 1, 8192, 8192, 32, 16, 128),
    ("prefill, windows of 1,024 and images, 256 columns", 1, 8192, 8192, 16, 8, 256),
    ("prefill, images", 1, 8192, 8192, 32, 16, 128),
    ("prefill, blocks of 32", 1, 8192, 8192, 32, 8, 128),
    ("prefill, chunks of 8,192", 1, 16384, 16384, 40, 8, 128),
    ("decoding", 128, 1, 8192, 32, 8, 128),
    ("decoding, chunks of 8,192", 64, 1, 30000, 40, 8, 128),
    ("decoding one request", 1, 1, 8192, 4, 1, 128),
    ("trees of 16", 16, 16, 8192, 64, 8, 128),
    ("trees of 64", 1, 64, 8192, 32, 8, 128),
    ("trees of 8", 64, 8, 4096, 32, 8, 128),
    ("trees of 8, 64 columns", 64, 8, 4096, 64, 8, 64),
    ("slopes, prefill", 1, 8192, 8192, 32, 8, 128),
    ("slopes, prefill, 64 columns", 1, 8192, 8192, 32, 8, 64),
    ("slopes, prefill, 256 columns", 1, 8192, 8192, 16, 8, 256),
    ("slopes, decoding", 128, 1, 8192, 32, 8, 128),
    ("slopes, decoding, e4m3", 64, 1, 8192, 32, 8, 128),
    ("a table of 1,024, decoding one request", 1, 1, 8192, 4, 1, 128),
    ("a table of 1,024, decoding", 64, 1, 8192, 32, 8, 128),
    ("a table of 1,024, prefill", 1, 8192, 8192, 32, 8, 128),
)


def bias_of(name: str, tokens: int, heads: int) -> AttentionBias:
    if "slopes" in name:
        slopes = 2.0 ** -(8 / heads * torch.arange(1, heads + 1, device=DEVICE))
        return AttentionBias(slopes=slopes.float())
    table = torch.randn(tokens, heads, DISTANCES, dtype=torch.bfloat16, device=DEVICE)
    return AttentionBias(table=table)


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
        window = WINDOW if "windows" in name else None
        return AttentionMask.image_spans(spans.to(DEVICE), window=window, **places)
    if "chunks" in name:
        return AttentionMask.chunks(CHUNK, **places)
    if "blocks" in name:
        return AttentionMask.blocks(32, **places)
    return AttentionMask.windows(1 << 30, **places)


def timed(calls: dict[str, Callable[[], Any]], flush: torch.Tensor) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(2 + TURNS):
        for name, call in calls.items():
            flush.fill_(1)
            flush.fill_(2)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if turn > 1:
                found[name].append(begin.elapsed_time(end) * 1e3)
    return {name: round(statistics.median(times), 1) for name, times in found.items()}


def flex(name: str, given: dict[str, Any], mask: Any, tree: Any, bias: Any) -> Callable[[], Any]:
    """FlexAttention over the same rows, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, lens = given["q"], given["kv_lens"]
    batch, q_len = q.shape[:2]
    kv_len = int(lens[0])
    before = kv_len - q_len
    table = given["block_table"].long()
    k, v = (
        given[part][table].flatten(1, 2)[:, :kv_len].transpose(1, 2).contiguous()
        for part in ("k", "v")
    )

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        if tree is not None:
            return (j < before) | tree[b, i, (j - before).clamp(min=0)]
        if mask is None:
            return j <= before + i
        at = b * q_len + i
        return (j >= mask.start[at]) & (j <= mask.end[at])

    def slope(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + bias.slopes[h] * (j - (before + i))

    def row(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        away = before + i - j
        of = bias.table[b * q_len + i, h, away.clamp(0, bias.table.shape[2] - 1)]
        return score + torch.where((away >= 0) & (away < bias.table.shape[2]), of, 0.0)

    changed = None if bias is None else slope if "slopes" in name else row
    blocks = create_block_mask(seen, batch, None, q_len, kv_len, device=DEVICE)
    compiled = torch.compile(flex_attention, dynamic=False)
    rows = q.transpose(1, 2)
    more: dict[str, Any] = {"score_mod": changed, "block_mask": blocks, "enable_gqa": True}
    return lambda: compiled(rows, k, v, **more)


def measured(shape: Any, flush: torch.Tensor, lock: Any, until: float) -> dict[str, Any]:
    """Measure one row, with FlexAttention if there is time to compile it."""
    name, batch, q_len, kv_len, heads, kv_heads, columns = shape
    per = -(-kv_len // 64)
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
    cache = [torch.randn(batch * per, 64, kv_heads, columns, **kind) for _ in range(2)]
    lens = torch.full((batch,), kv_len, dtype=torch.int32, device=DEVICE)
    given: dict[str, Any] = {
        "q": torch.randn(batch, q_len, heads, columns, **kind),
        "k": cache[0],
        "v": cache[1],
        "kv_lens": lens,
        "block_table": torch.randperm(batch * per, device=DEVICE).int().view(batch, per),
    }
    if "e4m3" in name:
        given |= {part: given[part].to(torch.float8_e4m3fn) for part in ("k", "v")}
    calls: dict[str, Callable[[], Any]] = {"causal": partial(cumla.attention, **given)}
    mask = tree = bias = None
    if "slopes" in name or "table" in name:
        bias = bias_of(name, batch * q_len, heads)
        calls["bias"] = partial(cumla.attention, **given, bias=bias)
    elif "trees" in name:
        tree = tree_of(batch, q_len)
        mask = AttentionMask.from_tree(tree, kv_lens=lens, q_len=q_len)
    else:
        mask = mask_of(name, lens, q_len)
    if bias is None:
        calls["mask"] = partial(cumla.attention, **given, mask=mask)
    if "windows" in name:
        calls["window"] = partial(cumla.attention, **given, window=WINDOW)
    own = calls["bias" if bias else "mask"]()[0]
    problem, error = "", None
    if "e4m3" in name:
        problem = "no e4m3 keys"
    elif time.monotonic() > until:
        problem = "no time to compile it"
    else:
        try:
            calls["flex"] = flex(name, given, mask, tree, bias)
            out = calls["flex"]().transpose(1, 2)
            error = float((out.float() - own.float()).abs().max())
            if error > 3e-2:
                raise AssertionError(f"results differ by {error}")
        except Exception as exception:  # whatever it is: the row goes without
            problem = f"{type(exception).__name__}: {exception}".partition("\n")[0][:200]
            calls.pop("flex", None)
    with lock:
        us = timed(calls, flush)
    sizes = {"batch": batch, "q_len": q_len, "kv_len": kv_len, "heads": [heads, kv_heads]}
    row = {"name": name, **sizes, "columns": columns, "us": us}
    return row | ({"without flex": problem} if problem else {"largest difference": error})


def work(numbers: range, lock: Any, until: float, found: Any) -> None:
    """Measure some rows, in a process."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    for number in numbers:
        try:
            row = measured(SHAPES[number], flush, lock, until)
        except Exception as exception:
            row = {"name": SHAPES[number][0], "us": {}, "problem": repr(exception)[:300]}
        torch.cuda.empty_cache()
        found.put((number, row))


def main(path: str, seconds: float = 30.0) -> None:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    lock, found, until = context.Lock(), context.Queue(), time.monotonic() + seconds
    workers = [
        context.Process(target=work, args=(range(i, len(SHAPES), WORKERS), lock, until, found))
        for i in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    rows = {}
    for _ in SHAPES:
        number, row = found.get()
        rows[number] = row
        print(json.dumps(row), flush=True)
        about = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "rows": [rows[number] for number in sorted(rows)],
        }
        with open(path, "w", encoding="utf-8") as file:
            json.dump(about, file, indent=1)
            file.write("\n")
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:3]))
