# SPDX-License-Identifier: Apache-2.0
"""The cases of the benchmark, and how long their bytes and operations take at the ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

__all__ = ["DENSE", "HEAD_DIM", "PAGE_SIZE", "VALUE_DIM", "Case", "Ceilings", "select"]

PAGE_SIZE = 64
HEAD_DIM = 576
VALUE_DIM = 512
_ITEM = 2  # bytes of a bfloat16


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What one GPU can do at best.

    Attributes
    ----------
    read_gbps : float
        Reading a large array, in 10^9 bytes a second.
    copy_gbps : float
        Copying one, bytes read and written.
    matmul_tflops : float
        An 8192 x 8192 x 8192 bfloat16 matrix product of random numbers.
    empty_us : float
        An empty kernel between two events.
    """

    read_gbps: float
    copy_gbps: float
    matmul_tflops: float
    empty_us: float

    @classmethod
    def from_json(cls, figures: dict[str, Any]) -> Ceilings:
        """Read what `to_json` wrote, or the same keys in a file of peers."""
        return cls(
            read_gbps=float(figures["read_GBps"]),
            copy_gbps=float(figures["copy_GBps"]),
            matmul_tflops=float(figures["bf16_matmul_TFLOPs"]),
            empty_us=float(figures["empty_kernel_us"]),
        )

    def to_json(self) -> dict[str, float]:
        """Name the figures as the results file does."""
        return {
            "read_GBps": self.read_gbps,
            "copy_GBps": self.copy_gbps,
            "bf16_matmul_TFLOPs": self.matmul_tflops,
            "empty_kernel_us": self.empty_us,
        }


@dataclass(frozen=True, slots=True)
class Case:
    """A dense decode call: every request has the same length, one kv head, causal.

    Attributes
    ----------
    batch, q_len, heads : int
        As in ``q`` (batch, q_len, heads, 576).
    kv_len : int
        Tokens of each request, a multiple of the page size.
    """

    batch: int
    q_len: int
    heads: int
    kv_len: int

    @property
    def name(self) -> str:
        """For example ``b128-s1-h16-kv4096``."""
        return f"b{self.batch}-s{self.q_len}-h{self.heads}-kv{self.kv_len}"

    @property
    def pages_of_request(self) -> int:
        """Cache pages of one request."""
        return self.kv_len // PAGE_SIZE

    @property
    def pages(self) -> int:
        """Cache pages of all requests."""
        return self.batch * self.pages_of_request

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cached rows."""
        return self.batch * self.kv_len * HEAD_DIM * _ITEM

    @property
    def nbytes(self) -> int:
        """Bytes that must move: each cached row once, the queries, the output."""
        rows = self.batch * self.q_len * self.heads
        return self.cache_bytes + rows * (HEAD_DIM + VALUE_DIM) * _ITEM

    @property
    def flops(self) -> int:
        """Operations on visible pairs of query and token; masked pairs do not count."""
        visible = sum(self.kv_len - (self.q_len - 1 - i) for i in range(self.q_len))
        return 2 * self.batch * self.heads * visible * (HEAD_DIM + VALUE_DIM)

    def floor_us(self, ceilings: Ceilings) -> float:
        """Time below which no kernel gets while the ceilings hold, in microseconds."""
        memory = self.nbytes / (ceilings.read_gbps * 1e3)
        arithmetic = self.flops / (ceilings.matmul_tflops * 1e6)
        return max(memory, arithmetic)


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


def select(patterns: Sequence[str]) -> tuple[Case, ...]:
    """Choose cases by name.

    Parameters
    ----------
    patterns : sequence of str
        Shell patterns, for example ``b128-*-kv4096``. None at all chooses every case.

    Returns
    -------
    tuple of Case
        In the table's order.

    Raises
    ------
    ValueError
        A pattern matches no case.
    """
    for pattern in patterns:
        if not any(fnmatchcase(case.name, pattern) for case in DENSE):
            names = ", ".join(case.name for case in DENSE)
            raise ValueError(f"rows: {pattern!r} matches none of {names}")
    if not patterns:
        return DENSE
    return tuple(
        case for case in DENSE if any(fnmatchcase(case.name, pattern) for pattern in patterns)
    )
