# SPDX-License-Identifier: Apache-2.0
"""The cases of the benchmark, and how long their bytes and operations take at the ceilings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM

PAGE_SIZE = 64
LOG_NORMAL_SIGMA = 0.8
"""Standard deviation of the logarithm of ragged lengths."""
_ITEM = 2  # bytes of a bfloat16 or float16
_LOG_NORMAL = "lognormal:"


_KEYS = {  # of the ceilings, in files of results and of peers
    "read_gbps": "read_GBps",
    "copy_gbps": "copy_GBps",
    "matmul_tflops": "bf16_matmul_TFLOPs",
    "empty_us": "empty_kernel_us",
    "fp8_tflops": "fp8_matmul_TFLOPs",
    "fp8_scaled": "fp8_scaled",
    "sustained_tflops": "bf16_sustained_TFLOPs",
}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Ceilings of one GPU; the last three are 0 if they were not measured."""

    # Reading a large array, and copying one (bytes read and written), in 10^9 bytes a second.
    read_gbps: float
    copy_gbps: float
    matmul_tflops: float  # an 8192 x 8192 x 8192 bfloat16 matrix product of random numbers
    empty_us: float  # an empty kernel between two events
    fp8_tflops: float = 0.0  # the matrix product with float8_e4m3fn
    # True if that was scaled by the ratio of the products on another GPU instead of measured.
    fp8_scaled: bool = False
    # The bfloat16 product once more, over and over, with the GPU at its power limit.
    sustained_tflops: float = 0.0

    @classmethod
    def from_json(cls, figures: dict[str, Any]) -> Ceilings:
        """Read what `to_json` wrote, or the same keys in a file of peers."""
        return cls(**{name: figures[key] for name, key in _KEYS.items() if key in figures})

    def to_json(self) -> dict[str, float | bool]:
        """Name the figures as the results file does, without those that were not measured."""
        figures = {key: getattr(self, name) for name, key in _KEYS.items()}
        return {key: figure for key, figure in figures.items() if figure}


@dataclass(frozen=True, slots=True)
class Case:
    """A dense decode call, causal."""

    # As in ``q`` (batch, q_len, heads, 576).
    batch: int
    q_len: int
    heads: int
    kv_len: int  # tokens of each request; of ragged ones the mean
    kv_heads: int = 1  # divides heads
    dtype: str = "bfloat16"  # ``"bfloat16"`` or ``"float16"``
    # None: every request has kv_len tokens. Else their lengths are log-normal numbers drawn with
    # this seed, scaled so that the batch has as many tokens as with equal lengths.
    seed: int | None = None
    batch_invariant: bool = False  # as in `cumla.mla_decode`

    @property
    def name(self) -> str:
        """For example ``b128-s1-h16-kv4096``, or ``...-kvheads2-float16-lognormal3``."""
        return (
            f"b{self.batch}-s{self.q_len}-h{self.heads}-kv{self.kv_len}"
            + (f"-kvheads{self.kv_heads}" if self.kv_heads > 1 else "")
            + (f"-{self.dtype}" if self.dtype != "bfloat16" else "")
            + (f"-lognormal{self.seed}" if self.seed is not None else "")
            + ("-invariant" if self.batch_invariant else "")
        )

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Case:
        """Read what `to_json` wrote; files of version 0.1 know the first four keys alone."""
        return cls(
            batch=row["batch"],
            q_len=row["q_len"],
            heads=row["heads"],
            kv_len=row["kv_len"],
            kv_heads=row.get("kv_heads", 1),
            dtype=row.get("dtype", "bfloat16"),
            seed=seed_of(row.get("lengths", "equal")),
            batch_invariant=row.get("batch_invariant", False),
        )

    def to_json(self) -> dict[str, Any]:
        """Name the case as a row of the results file does."""
        return {
            "op": "dense_decode",
            "batch": self.batch,
            "q_len": self.q_len,
            "heads": self.heads,
            "kv_len": self.kv_len,
            "page": PAGE_SIZE,
            "kv_heads": self.kv_heads,
            "dtype": self.dtype,
            "lengths": "equal" if self.seed is None else f"{_LOG_NORMAL}{self.seed}",
            "batch_invariant": self.batch_invariant,
        }

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each request, (batch,)."""
        if self.seed is None:
            return np.full(self.batch, self.kv_len, np.int32)
        return log_normal_lengths(self.batch, self.kv_len, self.seed)

    @property
    def pages_of_requests(self) -> NDArray[np.int32]:
        """Cache pages of each request, (batch,)."""
        return -(-self.lengths // PAGE_SIZE)

    @property
    def pages(self) -> int:
        """Cache pages of all requests."""
        return int(self.pages_of_requests.sum())

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cached rows."""
        return self.batch * self.kv_len * self.kv_heads * HEAD_DIM * _ITEM

    @property
    def nbytes(self) -> int:
        """Bytes that must move: each cached row once, the queries, the output."""
        rows = self.batch * self.q_len * self.heads
        return self.cache_bytes + rows * (HEAD_DIM + VALUE_DIM) * _ITEM

    @property
    def flops(self) -> int:
        """Operations on visible pairs of query and token; masked pairs do not count."""
        hidden = np.arange(self.q_len)[:, None]  # tokens behind a query, from the last one on
        visible = int(np.maximum(self.lengths.astype(np.int64) - hidden, 0).sum())
        return 2 * self.heads * visible * (HEAD_DIM + VALUE_DIM)

    def memory_us(self, ceilings: Ceilings) -> float:
        """Time that the bytes need at the read ceiling, in microseconds."""
        return self.nbytes / (ceilings.read_gbps * 1e3)

    def arithmetic_us(self, ceilings: Ceilings) -> float:
        """Time that the operations need at the ceiling of the matrix product, in microseconds."""
        return self.flops / (ceilings.matmul_tflops * 1e6)

    def floor_us(self, ceilings: Ceilings) -> float:
        """Time below which no kernel gets while the ceilings hold, in microseconds."""
        return max(self.memory_us(ceilings), self.arithmetic_us(ceilings))


@lru_cache(maxsize=64)
def log_normal_lengths(batch: int, mean: int, seed: int) -> NDArray[np.int32]:
    """Draw lengths of at least 1 token whose sum is exactly ``batch * mean``."""
    drawn = np.random.default_rng(seed).lognormal(sigma=LOG_NORMAL_SIGMA, size=batch)
    spare = batch * (mean - 1)  # tokens beside the one that each request has
    ends = np.rint(np.cumsum(drawn) * (spare / drawn.sum())).astype(np.int64)
    ends[-1] = spare
    lengths: NDArray[np.int32] = (1 + np.diff(ends, prepend=0)).astype(np.int32)
    lengths.setflags(write=False)
    return lengths


def seed_of(lengths: str) -> int | None:
    """Read how a command or a file names lengths."""
    if lengths == "equal":
        return None
    seed = lengths.removeprefix(_LOG_NORMAL)
    if seed == lengths or not seed.isdecimal():
        raise ValueError(f"lengths: needs 'equal' or '{_LOG_NORMAL}SEED', got {lengths!r}")
    return int(seed)


DENSE: tuple[Case, ...] = tuple(
    Case(batch, q_len, heads, kv_len)
    for batch, q_len, heads, lengths in (
        (128, 1, 128, (1024, 4096, 8192, 16384)),
        (128, 2, 128, (1024, 4096, 8192)),
        (128, 1, 64, (1024, 4096, 16384)),
        (128, 1, 16, (1024, 4096, 8192, 16384)),
        (16, 1, 128, (8192,)),
        (16, 1, 16, (8192,)),
        (4, 1, 128, (8192,)),
        (4, 1, 16, (8192,)),
        (1, 1, 128, (8192,)),
        (1, 1, 16, (8192,)),
        (1, 1, 128, (131072,)),
        (1, 1, 16, (131072,)),
        (4, 1, 16, (131072,)),
        (16, 1, 128, (131072,)),
    )
    for kv_len in lengths
)


def grid(
    batches: Iterable[int], q_lens: Iterable[int], heads: Iterable[int], kv_lens: Iterable[int]
) -> tuple[Case, ...]:
    """Combine shapes."""
    return tuple(Case(*shape) for shape in product(batches, q_lens, heads, kv_lens))


def vary(
    cases: Iterable[Case],
    kv_heads: Iterable[int],
    dtypes: Iterable[str],
    seeds: Iterable[int | None],
) -> tuple[Case, ...]:
    """Make each case with each number of kv heads, dtype and kind of lengths."""
    made = tuple(
        replace(case, kv_heads=of, dtype=dtype, seed=seed)
        for dtype, of, seed, case in product(dtypes, kv_heads, seeds, cases)
    )
    for case in made:
        if case.heads % case.kv_heads:
            raise ValueError(f"kv heads: {case.kv_heads} does not divide {case.heads} heads")
    return made


def select(patterns: Sequence[str]) -> tuple[Case, ...]:
    """Choose cases by name."""
    for pattern in patterns:
        if not any(fnmatchcase(case.name, pattern) for case in DENSE):
            names = ", ".join(case.name for case in DENSE)
            raise ValueError(f"rows: {pattern!r} matches none of {names}")
    if not patterns:
        return DENSE
    return tuple(
        case for case in DENSE if any(fnmatchcase(case.name, pattern) for pattern in patterns)
    )
