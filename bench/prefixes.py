# SPDX-License-Identifier: Apache-2.0
"""What calls with shared prefixes take, in turns with calls without groups.

    python -m bench.prefixes FILE

Medians of single runs of plans, L2 cold, CUDA events, the host ahead, in microseconds: FILE holds a
row for each shape. Finding groups and updating plans, once a step, are columns of their own.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch

import cumla
from bench.masks import timed

PAGE = 64
# Name, groups, members of each, tokens of a prefix and of each rest, heads, kv heads (0: MLA),
# columns, query tokens
SHAPES = (
    ("64 of 8K + 512", 1, 64, 8192, 512, 32, 8, 128, 1),
    ("8 x 8 of 8K + 1K", 8, 8, 8192, 1024, 32, 8, 128, 1),
    ("16 of 8K + 512", 1, 16, 8192, 512, 32, 8, 128, 1),
    ("256 of 2K + 256", 1, 256, 2048, 256, 32, 8, 128, 1),
    ("64 of 8K + 512, drafts", 1, 64, 8192, 512, 32, 8, 128, 4),
    ("64 of 8K + 512, 64 columns", 1, 64, 8192, 512, 64, 8, 64, 1),
    ("nothing shared, 64 of 4K", 64, 1, 0, 4096, 32, 8, 128, 1),
    ("MLA, 8 heads, 64 of 8K + 512", 1, 64, 8192, 512, 8, 0, 576, 1),
    ("MLA, 16 heads, 64 of 8K + 512", 1, 64, 8192, 512, 16, 0, 576, 1),
    ("MLA, 64 heads, 64 of 8K + 512", 1, 64, 8192, 512, 64, 0, 576, 1),
)


def table_of(groups: int, members: int, prefix: int, rest: int) -> tuple[torch.Tensor, int]:
    """Pages of each request, in any order, and their number."""
    of_prefix, of_rest = prefix // PAGE, -(-rest // PAGE)
    rows, used = [], 0
    for _ in range(groups):
        shared = range(used, used + of_prefix)
        used += of_prefix
        for _ in range(members):
            rows.append([*shared, *range(used, used + of_rest)])
            used += of_rest
    numbers = torch.randperm(used, device="cuda").int()
    return numbers[torch.tensor(rows, device="cuda")], used


def plans_of(q: Any, caches: list[Any], bounds: Any, **more: Any) -> tuple[Any, Any]:
    """A plan without groups, and one with them."""
    if len(caches) == 1:
        kind = cumla.MLAAttentionPlan
        rows = q.flatten(0, 1)
        decode = cumla.MLADecodePlan.from_arrays(q, *caches)
        return decode, kind.from_arrays(rows, *caches, qo_indptr=bounds, **more)
    make = cumla.AttentionPlan.from_arrays
    return make(q, *caches), make(q, *caches, **more)


def measured(flush: torch.Tensor, shape: tuple[Any, ...]) -> dict[str, Any]:
    name, groups, members, prefix, rest, heads, kv_heads, columns, q_len = shape
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    table, used = table_of(groups, members, prefix, rest)
    batch = groups * members
    of_cache = (used, PAGE, kv_heads, columns) if kv_heads else (used, PAGE, columns)
    caches = [torch.randn(*of_cache, **kind) for _ in range(2 if kv_heads else 1)]
    q = torch.randn(batch, q_len, heads, columns, **kind)
    lens = torch.full((batch,), prefix + rest, dtype=torch.int32, device="cuda")
    bounds = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32, device="cuda")
    more = {"prefix_groups": True, "max_pages": table.shape[1]}
    plain, grouped = plans_of(q, caches, bounds, **more)
    given: dict[str, Any] = {"page_size": PAGE, "q_len": q_len}
    found = cumla.find_prefix_groups(table, lens, **given)
    lengths: dict[str, Any] = {} if kv_heads else {"qo_indptr": bounds}
    update = partial(grouped.update, lens, **lengths, groups=found)
    plain.update(lens)
    update()
    value_dim = columns if kv_heads else 512
    outs = [torch.empty(batch, q_len, heads, value_dim, **kind) for _ in range(2)]
    lses = [torch.empty(batch, q_len, heads, device="cuda") for _ in range(2)]
    rows, out, lse = q, outs[1], lses[1]
    if not kv_heads:
        rows, out, lse = q.flatten(0, 1), out.flatten(0, 1), lse.flatten(0, 1)
    calls = {
        "plain": partial(plain.run, q, *caches, block_table=table, out=outs[0], lse=lses[0]),
        "groups": partial(grouped.run, rows, *caches, block_table=table, out=out, lse=lse),
        "find": partial(cumla.find_prefix_groups, table, lens, **given),
        "update": update,
    }
    us = timed(calls, flush)
    torch.testing.assert_close(outs[1], outs[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lses[1], lses[0], atol=1e-3, rtol=1e-3)
    return {"name": name, "groups": groups, "members": members, "us": us}


def main() -> None:
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    rows = []
    for shape in SHAPES:
        rows.append(measured(flush, shape))
        print(json.dumps(rows[-1]), flush=True)
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        with open(sys.argv[1], "w", encoding="utf-8") as file:  # after each row: it may be stopped
            json.dump(about, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
