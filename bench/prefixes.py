# SPDX-License-Identifier: Apache-2.0
"""Times calls with shared prefixes, interleaved with calls without groups.

    python -m bench.prefixes FILE

Medians of single runs of plans, L2 cold, CUDA events, the host ahead, in microseconds: FILE holds a
row for each shape. Finding groups and updating plans, once a step, are columns of their own.
FlashInfer's cascade, where it is there, is planned before. Some query tokens of all results are
compared with float64.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any, NamedTuple

import torch

import cumla
from bench.libraries import Libraries
from bench.masks import LIMIT, Flush, timed

DEVICE = "cuda"
PAGE = 64


class Shape(NamedTuple):
    """A row; kv_heads 0: MLA. `target`: us of the attention with groups that issue asks for."""

    name: str
    groups: int
    members: int  # of each group
    prefix: int  # tokens
    rest: int  # tokens of each member
    heads: int
    kv_heads: int
    columns: int
    q_len: int
    target: str = ""


SHAPES = (
    Shape("64 of 8K + 512", 1, 64, 8192, 512, 32, 8, 128, 1, "58"),
    Shape("8 x 8 of 8K + 1K", 8, 8, 8192, 1024, 32, 8, 128, 1, "145"),
    Shape("16 of 8K + 512", 1, 16, 8192, 512, 32, 8, 128, 1),
    Shape("256 of 2K + 256", 1, 256, 2048, 256, 32, 8, 128, 1),
    Shape("64 of 8K + 512, drafts", 1, 64, 8192, 512, 32, 8, 128, 4),
    Shape("64 of 8K + 512, 64 columns", 1, 64, 8192, 512, 64, 8, 64, 1),
    Shape("nothing shared, 64 of 4K", 64, 1, 0, 4096, 32, 8, 128, 1),
    Shape("MLA, 8 heads, 64 of 8K + 512", 1, 64, 8192, 512, 8, 0, 576, 1),
    Shape("MLA, 16 heads, 64 of 8K + 512", 1, 64, 8192, 512, 16, 0, 576, 1, "48"),
    Shape("MLA, 64 heads, 64 of 8K + 512", 1, 64, 8192, 512, 64, 0, 576, 1, "125"),
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
    numbers = torch.randperm(used, device=DEVICE).int()
    return numbers[torch.tensor(rows, device=DEVICE)], used


def plans_of(q: Any, caches: list[Any], bounds: Any, **more: Any) -> tuple[Any, Any]:
    """A plan without groups, and one with them."""
    if len(caches) == 1:
        kind = cumla.MLAAttentionPlan
        rows = q.flatten(0, 1)
        decode = cumla.MLADecodePlan.from_arrays(q, *caches)
        return decode, kind.from_arrays(rows, *caches, qo_indptr=bounds, **more)
    make = cumla.AttentionPlan.from_arrays
    return make(q, *caches), make(q, *caches, **more)


def cascade(module: Any, shape: Shape, table: Any, q: Any, caches: list[Any]) -> Any:
    """FlashInfer's cascade of two levels, planned."""
    batch, per = table.shape
    of_prefix = shape.prefix // PAGE
    leaders = table[:: shape.members, :of_prefix].flatten()
    starts, of_groups = (torch.arange(n + 1, dtype=torch.int32) for n in (batch, shape.groups))
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = module.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    wrapper.plan(
        [of_groups * shape.members * shape.q_len, starts * shape.q_len],
        [of_groups * of_prefix, starts * (per - of_prefix)],
        [leaders.contiguous(), table[:, of_prefix:].flatten()],
        [torch.full_like(of[1:], PAGE) for of in (of_groups, starts)],
        *(shape.heads, shape.kv_heads, shape.columns, PAGE),
        causal=True,
        q_data_type=q.dtype,
    )
    return partial(wrapper.run, q.flatten(0, 1), tuple(caches))


def exact(shape: Shape, token: int, table: Any, q: Any, caches: list[Any]) -> Any:
    """One query token's result in float64, (heads, columns of values)."""
    request, i = divmod(token, shape.q_len)
    seen = shape.prefix + shape.rest - (shape.q_len - 1 - i)
    rows = [cache[table[request].long()].flatten(0, 1)[:seen].double() for cache in caches]
    if not shape.kv_heads:
        rows = [rows[0][:, None], rows[0][:, None, :512]]
    k, v = (of.transpose(0, 1) for of in rows)
    own = q.flatten(0, 1)[token].double().view(len(k), -1, shape.columns)
    weights = (own @ k.transpose(1, 2) * shape.columns**-0.5).softmax(-1)
    return (weights @ v).flatten(0, 1)


def measured(flush: Any, shape: Shape, libraries: Libraries) -> dict[str, Any]:
    name, groups, members, prefix, rest, heads, kv_heads, columns, q_len, target = shape
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
    table, used = table_of(groups, members, prefix, rest)
    batch = groups * members
    of_cache = (used, PAGE, kv_heads, columns) if kv_heads else (used, PAGE, columns)
    caches = [torch.randn(*of_cache, **kind) for _ in range(2 if kv_heads else 1)]
    q = torch.randn(batch, q_len, heads, columns, **kind)
    lens = torch.full((batch,), prefix + rest, dtype=torch.int32, device=DEVICE)
    bounds = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32, device=DEVICE)
    more = {"prefix_groups": True, "max_pages": table.shape[1]}
    plain, grouped = plans_of(q, caches, bounds, **more)
    given: dict[str, Any] = {"page_size": PAGE, "q_len": q_len}
    found = cumla.find_prefix_groups(table, lens, **given)
    lengths: dict[str, Any] = {} if kv_heads else {"qo_indptr": bounds}
    update = partial(grouped.update, lens, **lengths, groups=found)
    plain.update(lens)
    update()
    value_dim = columns if kv_heads else 512
    outs = [torch.full((batch, q_len, heads, value_dim), torch.nan, **kind) for _ in range(2)]
    lses = [torch.full((batch, q_len, heads), torch.nan, device=DEVICE) for _ in range(2)]
    rows, out, lse = q, outs[1], lses[1]
    if not kv_heads:
        rows, out, lse = q.flatten(0, 1), out.flatten(0, 1), lse.flatten(0, 1)
    plain_run = partial(plain.run, q, *caches, block_table=table, out=outs[0], lse=lses[0])
    grouped_run = partial(grouped.run, rows, *caches, block_table=table, out=out, lse=lse)
    attend = {"plain": lambda: plain_run().out, "groups": lambda: grouped_run().out}
    tokens = sorted({0, batch * q_len // 2, batch * q_len - 1})
    wanted = {token: exact(shape, token, table, q, caches) for token in tokens}

    def check(name: str, call: Any) -> float:
        got = call().reshape(batch * q_len, heads, value_dim)
        off = max(
            float(((got[token].double() - want).abs() / want.abs().amax(-1, keepdim=True)).max())
            for token, want in wanted.items()
        )
        if not off <= LIMIT:
            raise AssertionError(f"{name} is off by {off:.1e}, allowed are {LIMIT:.0e}")
        return off

    errors = {name: check(name, call) for name, call in attend.items()}
    torch.testing.assert_close(lses[1], lses[0], atol=1e-3, rtol=1e-3)
    notes = {}
    module = libraries.flash_infer("cascade")
    if module is not None and kv_heads and columns == 128 and prefix:
        try:
            peer = cascade(module, shape, table, q, caches)
            errors["FlashInfer"] = check("FlashInfer", peer)
            attend["FlashInfer"] = peer
        except Exception as exception:  # whatever it is: the row goes without
            notes["without FlashInfer"] = repr(exception)[:200]
    once = {"find": partial(cumla.find_prefix_groups, table, lens, **given), "update": update}
    us = timed(attend | once, flush)
    for name, call in attend.items():
        check(name, call)
    row = {"name": shape.name, "groups": groups, "members": members, "us": us}
    return row | {"target": target, "errors": errors} | notes


def main() -> None:
    flush, libraries = Flush(), Libraries(torch)
    rows = []
    for shape in SHAPES:
        try:
            rows.append(measured(flush, shape, libraries))
        except AssertionError as problem:
            rows.append({"name": shape.name, "us": {}, "problem": str(problem)[:300]})
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        about |= {"notes": libraries.notes, "rows": rows}
        with open(sys.argv[1], "w", encoding="utf-8") as file:  # after each row: it may be stopped
            json.dump(about, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
