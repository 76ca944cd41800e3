# SPDX-License-Identifier: Apache-2.0
"""What masks and biases of attention take, in turns with calls without them.

    python -m bench.masks FILE

Medians of single calls, L2 cold, CUDA events, the host ahead, in microseconds: FILE holds a row for
each shape. A call includes its schedule.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import cumla
from cumla import AttentionBias, AttentionMask

TURNS = 15
IMAGES, WIDTH = (512, 2500, 4096, 7000), 256  # tokens at which an image begins, and its tokens
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
        slopes = 2.0 ** -(8 / heads * torch.arange(1, heads + 1, device="cuda"))
        return AttentionBias(slopes=slopes.float())
    table = torch.randn(tokens, heads, 1024, dtype=torch.bfloat16, device="cuda")
    return AttentionBias(table=table)


def mask_of(name: str, batch: int, q_len: int, lens: torch.Tensor) -> AttentionMask:
    places: dict[str, Any] = {"kv_lens": lens, "q_len": q_len}
    if "trees" in name:
        tree = torch.ones(batch, q_len, q_len, dtype=torch.bool, device="cuda").tril()
        tree[:, :, 1:] &= (torch.rand(batch, q_len, q_len - 1, device="cuda") < 0.4) | torch.eye(
            q_len, dtype=torch.bool, device="cuda"
        )[:, 1:]
        return AttentionMask.from_tree(tree, **places)
    if "images" in name:
        spans = torch.tensor([[(at, at + WIDTH - 1) for at in IMAGES]] * batch, dtype=torch.int32)
        window = 1023 if "windows" in name else None
        return AttentionMask.image_spans(spans.cuda(), window=window, **places)
    if "chunks" in name:
        return AttentionMask.chunks(8192, **places)
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


def main() -> None:
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    rows = []
    for name, batch, q_len, kv_len, heads, kv_heads, columns in SHAPES:
        per = -(-kv_len // 64)
        kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        cache = [torch.randn(batch * per, 64, kv_heads, columns, **kind) for _ in range(2)]
        lens = torch.full((batch,), kv_len, dtype=torch.int32, device="cuda")
        given: dict[str, Any] = {
            "q": torch.randn(batch, q_len, heads, columns, **kind),
            "k": cache[0],
            "v": cache[1],
            "kv_lens": lens,
            "block_table": torch.randperm(batch * per, device="cuda").int().view(batch, per),
        }
        if "e4m3" in name:
            given |= {part: given[part].to(torch.float8_e4m3fn) for part in ("k", "v")}
        calls: dict[str, Callable[[], Any]] = {"causal": partial(cumla.attention, **given)}
        if "slopes" in name or "table" in name:
            bias = bias_of(name, batch * q_len, heads)
            calls["bias"] = partial(cumla.attention, **given, bias=bias)
        else:
            mask = mask_of(name, batch, q_len, lens)
            calls["mask"] = partial(cumla.attention, **given, mask=mask)
        if "windows" in name:
            calls["window"] = partial(cumla.attention, **given, window=1023)
        shape = {"batch": batch, "q_len": q_len, "kv_len": kv_len, "heads": [heads, kv_heads]}
        rows.append({"name": name, **shape, "columns": columns, "us": timed(calls, flush)})
        print(json.dumps(rows[-1]), flush=True)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    with open(sys.argv[1], "w") as file:
        json.dump(about, file, indent=1)


if __name__ == "__main__":
    main()
