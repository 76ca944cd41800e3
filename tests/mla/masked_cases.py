# SPDX-License-Identifier: Apache-2.0
"""Calls of mla_decode and mla_attention with windows, trees and sinks, for NumPy: what no query
of a request sees is NaN or infinite, and page numbers of pages without a seen token are garbage."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cumla
from cumla.mla.shape import WIDTH
from tests.mla.fp8_arrays import SCALED, aligned, make_cache, normal_rows, parts_of
from tests.mla.tolerance import assert_close_lse, assert_close_out

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
GARBAGE = (-1, 2**31 - 1, -(2**31), 1 << 20)
WINDOWS: tuple[Any, ...] = (0, 1, 63, 64, 127, 512, (5, 0), (100, 3), (-1, 2), (63, None), (0, 200))
SINKS = ("none", "normal", "extreme")
LENGTHS = ((70, 700, 0, 130), (1300, 64, 65, 3), (200,), (2, 1, 641, 300, 63))


class Sample(NamedTuple):
    """One call."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    operation: str = "decode"  # all q_lens are the same; "table" or "list": of mla_attention
    heads: tuple[int, int] = (16, 1)  # of the queries and of the cache
    page_size: int = 64
    dtype: str = "bfloat16"
    form: str = "one"  # or "pair"; of FP8 caches one of fp8_arrays.FORMS
    is_fp8: bool = False
    causal: bool = True
    window: Any = None
    sinks: str = "none"
    seed: int = 0
    width: tuple[int, int] = WIDTH  # latent columns, and RoPE ones
    words: int = 0  # of the bits of a query token in a tree; 0: no tree

    @property
    def name(self) -> str:
        """A short test id."""
        q, kv, (heads, kv_heads) = self.q_lens, self.kv_lens, self.heads
        dtype = "fp8" if self.is_fp8 else f"{self.dtype[0]}16"
        words = (
            f"{self.operation}-q{'.'.join(map(str, q))}-kv{'.'.join(map(str, kv))}",
            f"h{heads}x{kv_heads}-page{self.page_size}-{dtype}",
            *(() if self.width == WIDTH else ("{}+{}".format(*self.width),)),
            self.form,
            f"{'causal' if self.causal else 'full'}-w{self.window}-sinks_{self.sinks}",
            *((f"tree{self.words}",) if self.words else ()),
        )
        return "-".join(words).replace(" ", "").replace(",", "+")


def samples(count: int, **fixed: Any) -> list[Sample]:
    """Draw calls, the same ones every time."""
    draw, found = random.Random(52), []
    for seed in range(count):
        kv_lens = draw.choice(LENGTHS)
        operation = draw.choice(("decode", "decode", "table", "list"))
        if operation == "decode":
            q_lens = (draw.choice((1, 1, 2, 5)),) * len(kv_lens)
        else:
            q_lens = tuple(draw.choice((0, 1, 3, 30)) for _ in kv_lens)
        causal = draw.random() < 0.75
        of_both = draw.choice(("window", "sinks", "both"))
        sample = Sample(
            q_lens,
            kv_lens,
            operation,
            draw.choice(((1, 1), (16, 1), (24, 2), (64, 1), (128, 1), (5, 1))),
            draw.choice((64, 128, 16, 1, 48)),
            draw.choice(tuple(DTYPES)),
            draw.choice(("one", "pair")),
            False,
            causal,
            None if of_both == "sinks" else draw.choice(WINDOWS),
            "none" if of_both == "window" else draw.choice(SINKS[1:]),
            seed,
        )
        found.append(sample._replace(**fixed))
    return found


class Problem(NamedTuple):
    """Arguments of a call, and which function takes them."""

    sample: Sample
    call: Callable[..., cumla.AttentionState]
    reference: Callable[..., cumla.AttentionState]
    given: dict[str, Any]


def trees(count: int, **fixed: Any) -> list[Sample]:
    """Draw calls with trees, the same ones every time."""
    draw, found = random.Random(7), []
    for sample in samples(count):
        q_len = draw.choice((1, 4, 17, 64))
        q_lens = tuple(draw.choice((0, 1, 5, 16, 70, 260)) for _ in sample.q_lens)
        if sample.operation == "decode":
            q_lens = (q_len,) * len(q_lens)
        words = draw.choice((1, 2, -(-max(1, *q_lens) // 32), 8))
        tree = sample._replace(q_lens=q_lens, window=None, words=min(words, 8))
        found.append(tree._replace(**fixed))
    return found


def tree_of(sample: Sample, rng: np.random.Generator) -> np.ndarray:
    """Bits of each query token: itself, some earlier drafts, and garbage behind the tokens."""
    tree = rng.integers(0, 1 << 32, (sum(sample.q_lens), sample.words), np.uint64)
    tree = tree.astype(np.uint32)
    for begin, n in zip(np.cumsum([0, *sample.q_lens]), sample.q_lens, strict=False):
        for i in range(n):
            if i // 32 < sample.words:
                tree[begin + i, i // 32] |= np.uint32(1 << i % 32)
        if n > 2:  # a draft that no query sees, itself included
            tree[begin : begin + n, 0] &= ~np.uint32(2)
    return tree


def seen_by_tree(sample: Sample, request: int, tree: np.ndarray) -> np.ndarray:
    """Return whether some query of a request sees each of its tokens."""
    n, tokens = sample.q_lens[request], sample.kv_lens[request]
    begin = sum(sample.q_lens[:request])
    seen = np.zeros(tokens, bool)
    seen[: max(tokens - n, 0)] = n > 0
    for row in tree[begin : begin + n]:
        bits = np.unpackbits(row.astype("<u4").view(np.uint8), bitorder="little")
        number = np.arange(tokens) - (tokens - n)
        known = (number >= 0) & (number < len(bits))
        seen[known] |= bits[number[known]].astype(bool)
    return seen


def seen_tokens(sample: Sample, request: int) -> tuple[int, int]:
    """The first token that a query of a request sees, and the one behind the last."""
    n, tokens, window = sample.q_lens[request], sample.kv_lens[request], sample.window
    if sample.words:
        return 0, tokens if n else 0
    left, right = window if isinstance(window, tuple) else (window, None)
    right = 0 if sample.causal else right
    if n == 0:
        return 0, 0
    begin = 0 if left is None or left < 0 else max(tokens - n - left, 0)
    end = tokens if right is None or right < 0 else min(tokens, max(tokens + right, 0))
    return (begin, end) if begin < end else (0, 0)


def make(sample: Sample) -> Problem:
    """Build the arrays of a call."""
    rng = np.random.default_rng(sample.seed)
    batch, heads = len(sample.q_lens), sample.heads[0]
    tree = tree_of(sample, rng) if sample.words else None
    table, seen = _pages(sample, rng, tree)
    cache = _numbers(sample, rng, len(seen))
    for part in parts_of(cache):
        if part.itemsize == 1:
            part.view(np.uint8)[~seen] = 0xFF  # NaN, of bfloat16 and float32 as well
        else:
            part[~seen] = np.where(rng.random((~seen).sum()) < 0.5, np.nan, np.inf)[:, None, None]
    dtype = DTYPES[sample.dtype]
    columns = sum(sample.width)
    q = aligned((sum(sample.q_lens), heads, columns), dtype)
    q[...] = rng.standard_normal(q.shape) * 0.3  # scores near 0 keep lse in its absolute bound
    given = {"q": q, "kv_cache": cache, "kv_lens": np.int32(sample.kv_lens)}
    given |= {"causal": sample.causal, "window": sample.window}
    if tree is not None:
        given["tree"] = tree
    if sample.is_fp8 and sample.form in SCALED:
        given["kv_scale"] = 0.01
    if sample.sinks != "none":
        given["sinks"] = sinks = rng.uniform(-2, 4, heads).astype(np.float32)
        if sample.sinks == "extreme":
            sinks[:6] = np.float32([np.inf, -np.inf, 3e38, -3e38, 1e30, 0])[:heads]
    if sample.operation == "decode":
        given |= {"q": q.reshape(batch, -1, heads, columns), "block_table": table}
        return Problem(sample, cumla.mla_decode, cumla.reference.mla_decode, given)
    given["qo_indptr"] = np.cumsum([0, *sample.q_lens]).astype(np.int32)
    if sample.operation == "table":
        given["block_table"] = table
    else:
        counts = [-(-n // sample.page_size) for n in sample.kv_lens]
        listed = [row[:n] for row, n in zip(table, counts, strict=True)]
        given["kv_indices"] = np.concatenate([*listed, np.int32([-1])])
        given["kv_indptr"] = np.cumsum([0, *counts]).astype(np.int32)
    return Problem(sample, cumla.mla_attention, cumla.reference.mla_attention, given)


def _pages(sample: Sample, rng: np.random.Generator, tree: Any) -> tuple[np.ndarray, np.ndarray]:
    """Draw a table with garbage where nobody looks, and tell the rows of pages that somebody sees.

    Some pages are in no entry.
    """
    size, batch = sample.page_size, len(sample.kv_lens)
    index = np.arange(max(1, *(-(-n // size) for n in sample.kv_lens)))
    spans = [seen_tokens(sample, r) for r in range(batch)]
    used = np.array([(index * size < end) & (index * size + size > begin) for begin, end in spans])
    seen = np.zeros((used.sum() + batch + 2, size), bool)
    table = rng.choice(np.int32(GARBAGE), used.shape)
    table[used] = rng.permutation(len(seen))[: used.sum()]
    for r, (begin, end) in enumerate(spans):
        tokens = np.arange(begin, end)
        if tree is not None:
            tokens = tokens[seen_by_tree(sample, r, tree)[begin:end]]
        seen[table[r, tokens // size], tokens % size] = True
    return table, seen


def _numbers(sample: Sample, rng: np.random.Generator, num_pages: int) -> Any:
    """A cache without anything that is not a number."""
    shape = (num_pages, sample.page_size, sample.heads[1])
    if sample.is_fp8:
        return make_cache(sample.form, *shape, width=sample.width)
    widths = (sum(sample.width),) if sample.form == "one" else sample.width
    parts = tuple(aligned((*shape, n), DTYPES[sample.dtype]) for n in widths)
    for part in parts:
        part[...] = normal_rows(rng, part.shape, part.dtype)
    return parts if len(parts) > 1 else parts[0]


def in_float64(problem: Problem) -> cumla.AttentionState:
    """The definition's results."""
    shape = problem.given["q"].shape[:-1]
    out, lse = np.zeros((*shape, problem.sample.width[0])), np.zeros(shape)
    return problem.reference(**problem.given, out=out, lse=lse)


def check(
    problem: Problem, out: np.ndarray, lse: np.ndarray, want: cumla.AttentionState | None = None
) -> dict[str, float]:
    """Hold results against the definition: `want`, or what is computed here."""
    want = in_float64(problem) if want is None else want
    figures = assert_close_out(out, want.out, visible_v_rms=1.0)
    return figures | assert_close_lse(lse, want.lse)


def without_sinks(problem: Problem) -> Problem:
    """The same call without them."""
    return problem._replace(given={n: a for n, a in problem.given.items() if n != "sinks"})


def check_sinks(
    problem: Problem, found: tuple[np.ndarray, np.ndarray], plain: tuple[np.ndarray, np.ndarray]
) -> None:
    """Hold float32 results against those of the same call without sinks."""
    (out, lse), (plain_out, plain_lse) = found, plain
    sinks = problem.given["sinks"].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        share = np.where(np.isneginf(plain_lse), 0, 1 / (1 + np.exp(sinks - plain_lse)))
        want = np.logaddexp(plain_lse.astype(np.float64), sinks)
    np.testing.assert_allclose(out, plain_out * share[..., None], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want, rtol=2e-6, atol=2e-6)
