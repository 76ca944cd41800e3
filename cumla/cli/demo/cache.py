# SPDX-License-Identifier: Apache-2.0
"""The demo's paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cumla.cli.demo.backends import Backend
from cumla.cli.demo.layer import LATENT_DIM, ROPE_DIM
from cumla.cli.demo.text import Request

Array = NDArray[Any]

PAGE_SIZE = 64
SPARE_PAGES = 3  # of nobody; they stay NaN, as does every slot behind the last token

BF16 = np.dtype(ml_dtypes.bfloat16)


def shuffled_pages(requests: list[Request], seed: int) -> tuple[Array, int]:
    """Deal the pages of a pool out: the table, -1 where there is no page, and their number."""
    counts = [-(-len(request.tokens) // PAGE_SIZE) for request in requests]
    total = sum(counts) + SPARE_PAGES
    pool = np.random.default_rng(seed).permutation(total).astype(np.int32)
    table = np.full((len(requests), max(counts)), -1, np.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count], pool = pool[:count], pool[count:]
    return table, total


@dataclass(frozen=True)
class PagedCache:
    """Latent rows of all requests in bfloat16 pages, where attention runs."""

    backend: Backend
    table: Array
    pages: Any
    block_table: Any

    @classmethod
    def shuffled(cls, requests: list[Request], backend: Backend, seed: int) -> PagedCache:
        """Give each request its pages from a shuffled pool, full of NaN so far."""
        table, total = shuffled_pages(requests, seed)
        pages = np.full((total, PAGE_SIZE, LATENT_DIM + ROPE_DIM), np.nan, BF16)
        return cls(backend, table, backend.put(pages), backend.put(table))

    def write(self, request: int, start: int, rows: Array) -> None:
        """Store the rows of a request's tokens from position start on."""
        rows = rows.astype(BF16)
        while len(rows):
            page, slot = self.table[request, start // PAGE_SIZE], start % PAGE_SIZE
            chunk = rows[: PAGE_SIZE - slot]
            self.backend.write(self.pages[page, slot : slot + len(chunk)], chunk)
            start, rows = start + len(chunk), rows[len(chunk) :]

    def read(self, lengths: Array) -> list[Array]:
        """Read back each request's rows, in float32."""
        pages = self.backend.fetch(self.pages)
        return [
            pages[row[: -(-int(n) // PAGE_SIZE)]].reshape(-1, pages.shape[2])[:n].astype(np.float32)
            for row, n in zip(self.table, lengths, strict=True)
        ]
