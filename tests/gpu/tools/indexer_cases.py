# SPDX-License-Identifier: Apache-2.0
"""The grids of the indexer's logits: every size, and the rest dealt out so that all pairs occur."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

from tests.gpu.tools.indexer_problem import RANGES

HEADS, DIMS = (8, 16, 32, 64), (32, 64, 128)
DTYPES = ("float32", "bfloat16")
SEQ_LENS, KV_LENS = (1, 7, 77, 2048), (1, 63, 1000, 8192, 65536)
MODES = ("clean", "compressed", "unclean", "compressed unclean")
BATCHES, Q_LENS, MEANS = (1, 3, 64, 256), (1, 2, 3, 4), (1, 700, 8192, 65536)
PAGE_SIZES, FORMS = (16, 32, 64, 128), ("fused", "padded", "pair", "3d")


class Sample(NamedTuple):
    """One point of the grid of prefills."""

    seq_len: int
    seq_len_kv: int
    heads: int
    dim: int
    ranges: str
    mode: str
    dtype: str
    padded: bool

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in self).replace(" ", "_")


def samples() -> list[Sample]:
    """The same ones every time: four of each size, with all modes and all ranges."""
    rng = random.Random(5)
    shapes = itertools.cycle(itertools.product(HEADS, DIMS))
    found = []
    for n, size in enumerate(itertools.product(SEQ_LENS, KV_LENS)):
        ranges, dtypes = rng.sample(list(RANGES), 4), rng.sample(DTYPES * 2, 4)
        for k in range(4):
            rest = ranges[k], MODES[(n + k) % 4], dtypes[k], k == (n + n // 5) % 4
            found.append(Sample(*size, *next(shapes), *rest))
    return found


class Step(NamedTuple):
    """One point of the grid of decoding steps."""

    batch: int
    q_len: int
    mean: int
    heads: int
    dim: int
    page_size: int
    per_row: bool
    form: str
    dtype: str
    clean: bool

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in self)


def steps() -> list[Step]:
    """Every batch with every mean length and every q_len; the rest dealt out among these four."""
    rng = random.Random(5)
    shapes = itertools.cycle(itertools.product((64, 32, 16, 8), (128, 64, 32)))
    found = []
    for batch, mean in itertools.product(BATCHES, MEANS):
        is_large = batch * mean > 1 << 23  # some GB
        dealt = zip(
            rng.sample(Q_LENS, 4),
            rng.sample(PAGE_SIZES, 4),
            rng.sample((False, False, False, True), 4),
            rng.sample(FORMS, 4),
            rng.sample(DTYPES * 2, 4),
            rng.sample((True, True, True, False), 4),
            strict=True,
        )
        for q_len, page_size, per_row, form, dtype, clean in dealt:
            heads, dim = next(shapes) if not is_large else (64, 128)
            rest = page_size, per_row, form, dtype, clean
            found.append(Step(batch, q_len, mean, heads, dim, *rest))
    for q_len in (5, 6, 7, 8):
        found.append(Step(5, q_len, 700, 64, 128, 64, q_len % 2 == 0, "fused", "float32", True))
    return found
