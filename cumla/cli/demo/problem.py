# SPDX-License-Identifier: Apache-2.0
"""The demo's problem: the requests of a text, their pages, and what a step is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import cumla
from cumla.cli.demo.backends import Backend
from cumla.cli.demo.layer import LATENT_DIM, ROPE_DIM

Array = NDArray[Any]

LONGEST_PROMPT = 2048
PROMPT_SHARES = (1.0, 0.625, 0.25, 1 / 64)  # of the longest prompt, one a request
PAGE_SIZE = 64
SPARE_PAGES = 3  # of nobody; they stay NaN, as does every slot behind the last token

BF16 = np.dtype(ml_dtypes.bfloat16)
UNABSORBED = "un-absorbed attention"  # to the same cache
TOLERANCE = 1e-2  # of |out - expected| / |expected|, for each token in each step


@dataclass(frozen=True)
class Request:
    """A stretch of text: the prompt, and the bytes that the steps append."""

    tokens: Array
    prompt: int


def load_text(file: Path | None) -> tuple[str, bytes]:
    """Read the text and name it.

    None stands for cumla's README: the one that the installed package carries as its description,
    or that of the source tree.
    """
    if file is not None:
        return str(file), file.read_bytes()
    try:
        description = metadata.metadata("cumla").json.get("description")
    except metadata.PackageNotFoundError:
        description = None
    if isinstance(description, str):
        return "README of the installed cumla", description.encode()
    readme = Path(cumla.__file__).parent.parent / "README.md"
    if readme.is_file():
        return "README.md of cumla's source tree", readme.read_bytes()
    raise ValueError("cumla is installed without its README; name a text with --file")


def cut_requests(text: bytes, steps: int, most: int = LONGEST_PROMPT) -> list[Request]:
    """Cut a request of each length from the text, spread from its beginning to its end."""
    longest = min(len(text) - steps, most)
    if longest < 1:
        raise ValueError(
            f"--steps {steps} needs a text of more than {steps} bytes, got {len(text)}; "
            "take fewer steps or name a longer text with --file"
        )
    data = np.frombuffer(text, np.uint8)
    requests = []
    for i, share in enumerate(PROMPT_SHARES):
        prompt = max(round(share * longest), 1)
        start = (len(text) - prompt - steps) * i // (len(PROMPT_SHARES) - 1)
        requests.append(Request(data[start : start + prompt + steps], prompt))
    return requests


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


def worst_error(out: Array, expected: Array) -> float:
    """Find the largest relative error of a token; both are (tokens, heads, columns)."""
    errors = np.linalg.norm(out - expected, axis=(1, 2)) / np.linalg.norm(expected, axis=(1, 2))
    return float(errors.max())


def verdict(worst: Sequence[float], oracle: str = UNABSORBED, arithmetic: str = "float32") -> int:
    """Print whether all steps are right, by the worst error of each; the exit code."""
    wrong = np.flatnonzero(~(np.array(worst) <= TOLERANCE))  # NaN is wrong
    if wrong.size:
        print(
            f"WRONG: {wrong.size} of {len(worst)} steps are more than {TOLERANCE:g} away from "
            f"{oracle} in {arithmetic}, the first is step {wrong[0] + 1}"
        )
        return 1
    print(f"ok: every step within {TOLERANCE:g} of {oracle} in {arithmetic}")
    return 0
