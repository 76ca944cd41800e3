# SPDX-License-Identifier: Apache-2.0
"""Batches for AutoDeploy's operations, and what they must give, in float32."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

TOLERANCE = {"rtol": 1e-2, "atol": 1e-2}  # of AutoDeploy's own tests
ONE_ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6}


def lengths_of(batch_size: int, max_seq_len: int, share: float) -> tuple[list[int], list[int]]:
    """New tokens and history of requests, of which a share decodes, as AutoDeploy's tests do."""
    decoding = int(share * batch_size)
    chunks = torch.randint(0, max_seq_len + 1, (batch_size - decoding,)).tolist()
    history = torch.randint(0, max_seq_len + 1, (batch_size,)).tolist()
    return [*chunks, *[int(max_seq_len > 0)] * decoding], history


class Sizes(NamedTuple):
    """Sizes of a layer."""

    heads: int = 8
    kv_heads: int = 2
    columns: int = 16
    columns_v: int = 0  # 0: as keys
    dtype: Any = torch.float16

    @property
    def value_columns(self) -> int:
        return self.columns_v or self.columns


class Batch(NamedTuple):
    """New rows of all requests, ``(1, total, heads * columns)``, and which request has which."""

    sizes: Sizes
    q: Any
    k: Any
    v: Any
    seq_len: Any
    input_pos: Any

    @classmethod
    def make(cls, sizes: Sizes, lengths: list[int], history: list[int], device: str) -> Batch:
        total = sum(lengths)

        def rows(heads: int, columns: int) -> Any:
            return torch.randn(1, total, heads * columns, dtype=sizes.dtype, device=device)

        q, k = rows(sizes.heads, sizes.columns), rows(sizes.kv_heads, sizes.columns)
        v = rows(sizes.kv_heads, sizes.value_columns)
        lists = (torch.tensor(n, dtype=torch.int32, device=device) for n in (lengths, history))
        return cls(sizes, q, k, v, *lists)

    @property
    def seq_start(self) -> Any:
        return self.seq_len.cumsum(0) - self.seq_len  # int64, as in AutoDeploy's tests

    def requests(self) -> list[tuple[slice, int, int]]:
        """The rows of each request, its history and its number of new tokens."""
        lengths, history = self.seq_len.tolist(), self.input_pos.tolist()
        starts = self.seq_start.tolist()
        return [(slice(a, a + n), h, n) for a, n, h in zip(starts, lengths, history, strict=True)]


def turned(rows: Any, freqs_cis: Any, first: int) -> Any:
    """Rotate rows (tokens, heads, columns), the last columns if the table is narrower."""
    half = freqs_cis.shape[1]
    cos, sin = freqs_cis[first : first + len(rows), None].float().unbind(-1)
    x = rows.float()
    kept, a, b = x.split([x.shape[-1] - 2 * half, half, half], dim=-1)
    return torch.cat([kept, cos * a - sin * b, sin * a + cos * b], dim=-1).to(rows.dtype)


class Slots(NamedTuple):
    """Where requests have their tokens: rows of all tokens of a cache, and their numbers."""

    k_cache: Any
    v_cache: Any
    rows: list[Any]  # of each request, the places of its positions in the flattened caches


def expected(batch: Batch, slots: Slots, freqs_cis: Any = None) -> Any:
    """Write the new rows into the caches, and attend to these, each request by itself."""
    sizes = batch.sizes
    k_cache, v_cache = (c.flatten(0, 1) for c in (slots.k_cache, slots.v_cache))  # views
    out = torch.zeros(
        batch.q.shape[1], sizes.heads, sizes.value_columns, dtype=sizes.dtype, device=batch.q.device
    )
    for (some, history, count), places in zip(batch.requests(), slots.rows, strict=True):
        q = batch.q[0, some].unflatten(-1, (sizes.heads, sizes.columns))
        k = batch.k[0, some].unflatten(-1, (sizes.kv_heads, sizes.columns))
        v = batch.v[0, some].unflatten(-1, (sizes.kv_heads, sizes.value_columns))
        if freqs_cis is not None and freqs_cis.numel():
            q, k = turned(q, freqs_cis, history), turned(k, freqs_cis, history)
        new = places[history : history + count]
        k_cache[new], v_cache[new] = k, v
        seen = places[: history + count]
        keys, values = (
            c[seen].float().repeat_interleave(sizes.heads // sizes.kv_heads, dim=1)
            for c in (k_cache, v_cache)
        )
        scores = torch.einsum("nhd,thd->hnt", q.float(), keys) * sizes.columns**-0.5
        later = torch.ones(count, history + count, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(later.triu(history + 1), -torch.inf)
        out[some] = torch.einsum("hnt,thd->nhd", scores.softmax(-1), values).to(sizes.dtype)
    return out.flatten(1)[None]


def contiguous(batch: Batch, slots: int, max_seq_len: int) -> tuple[Any, Any, Any, Slots]:
    """Caches full of numbers, and random slots: k_cache, v_cache, cache_loc, and the oracle's."""
    sizes, device = batch.sizes, batch.q.device
    caches = [
        torch.randn(slots, max_seq_len, sizes.kv_heads, n, dtype=sizes.dtype, device=device)
        for n in (sizes.columns, sizes.value_columns)
    ]
    count = len(batch.seq_len)
    cache_loc = torch.randperm(slots, device=device)[:count].to(torch.int32)
    numbers = torch.arange(max_seq_len, device=device)
    rows = [slot * max_seq_len + numbers for slot in cache_loc.tolist()]
    return *caches, cache_loc, Slots(*(c.clone() for c in caches), rows)


def paged(batch: Batch, page: int) -> tuple[Any, Any, list[list[int]], Slots]:
    """Caches full of numbers, and shuffled pages: k_cache, v_cache, pages, and the oracle's."""
    sizes, device = batch.sizes, batch.q.device
    counts = [-(-(history + count) // page) for _, history, count in batch.requests()]
    total = sum(counts) + 3
    caches = [
        torch.randn(total, page, sizes.kv_heads, n, dtype=sizes.dtype, device=device)
        for n in (sizes.columns, sizes.value_columns)
    ]
    pool = torch.randperm(total).tolist()
    pages = [[pool.pop() for _ in range(count)] for count in counts]
    inside = torch.arange(page)
    rows = [
        torch.cat([n * page + inside for n in some] or [inside[:0]]).to(device) for some in pages
    ]
    return *caches, pages, Slots(*(c.clone() for c in caches), rows)


def table_of(pages: list[list[int]], device: Any) -> Any:
    """A table with a row of each request; what it does not use leads nowhere."""
    widest = max([*map(len, pages), 1])
    rows = [[*some, *[2**31 - 1] * (widest - len(some))] for some in pages]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def assert_agree(found: Any, wanted: Any, caches: tuple[Any, Any], slots: Slots) -> None:
    """Results agree within AutoDeploy's tolerance, values to the bit, keys to a rounding."""
    torch.testing.assert_close(found.float(), wanted.float(), **TOLERANCE)
    assert torch.equal(caches[1], slots.v_cache)
    keys, rtol = caches[0].float(), ONE_ROUNDING[caches[0].dtype]
    torch.testing.assert_close(keys, slots.k_cache.float(), rtol=rtol, atol=1e-6)
