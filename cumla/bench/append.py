# SPDX-License-Identifier: Apache-2.0
"""Writing rows into a paged cache: checked, then timed against the copy ceiling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cumla import append_mla_cache, reference
from cumla.bench.ceilings import fill_normal
from cumla.bench.dense import CheckError
from cumla.bench.gpu import DTYPES, Gpu
from cumla.bench.timing import time_cold
from cumla.launch.mla_plan import HEAD_DIM, VALUE_DIM

__all__ = ["CASES", "AppendCase", "run_append"]

_ROW_BYTES = 2 * HEAD_DIM
_ROPE_DIM = HEAD_DIM - VALUE_DIM
_MAX_POSITION = 8192
_CHECKED_ROWS = 510  # beside the first and the last


@dataclass(frozen=True)
class AppendCase:
    """What is written.

    Attributes
    ----------
    mbytes : int
        Size of the rows, in 10^6 bytes; as much is read as is written.
    page_size : int
        Tokens of a page; the pages are shuffled.
    rotated : bool
        With the rotation of the RoPE columns, by a float32 table.
    """

    mbytes: int
    page_size: int
    rotated: bool = False

    @property
    def tokens(self) -> int:
        """Rows, whole pages of them."""
        return self.mbytes * 10**6 // (_ROW_BYTES * self.page_size) * self.page_size


CASES = tuple(
    AppendCase(mbytes, page_size, rotated)
    for mbytes in (64, 1000)
    for page_size, rotated in ((64, False), (1, False), (64, True))
)


def run_append(
    gpu: Gpu, copy_gbps: float, cases: Iterable[AppendCase] = CASES
) -> list[dict[str, Any]]:
    """Check and time cases in bfloat16.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    copy_gbps : float
        What a copy reads and writes in the same run, in GB/s.
    cases : iterable of AppendCase
        In the order of the rows that come back.

    Returns
    -------
    list of dict
        ``mbytes``, ``tokens``, ``page_size``, ``rotated``; ``us`` (median), ``us_low``, ``us_high``
        of one call with a cold L2 cache; ``gbps``, rows read and written; ``efficiency``, their
        share of the copy ceiling.

    Raises
    ------
    CheckError
        A row was not written as it should be.
    """
    return [_run_case(gpu, copy_gbps, case) for case in cases]


def _run_case(gpu: Gpu, copy_gbps: float, case: AppendCase) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tokens = case.tokens
    pages = rng.permutation(tokens // case.page_size)
    slots = (pages[:, None] * case.page_size + np.arange(case.page_size)).ravel()
    row_bits, cache_bits = (gpu.empty((tokens, HEAD_DIM), "uint16") for _ in range(2))
    fill_normal(gpu, row_bits, "bfloat16", seed=1, deviation=1.0)
    gpu.fill_bytes(cache_bits, 0xFF)
    rows = row_bits.view(DTYPES["bfloat16"])
    kv_cache = cache_bits.view(DTYPES["bfloat16"]).reshape(-1, case.page_size, HEAD_DIM)
    slot_mapping = gpu.upload(slots)
    rotation: dict[str, Any] = {}
    if case.rotated:
        angles = 6.28 * rng.random((_MAX_POSITION, _ROPE_DIM // 2))
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        rotation = {"positions": np.arange(tokens) % _MAX_POSITION, "cos_sin": table}
    given = {name: gpu.upload(array) for name, array in rotation.items()}

    def append() -> None:
        append_mla_cache(rows, kv_cache, slot_mapping, **given)

    append()
    chosen = np.unique([0, tokens - 1, *rng.integers(0, tokens, _CHECKED_ROWS)])
    _check(gpu, case, row_bits, cache_bits, chosen, slots, rotation)
    timing = time_cold(gpu, append)
    gbps = 2 * tokens * _ROW_BYTES / (timing.us * 1e3)
    return {
        "mbytes": case.mbytes,
        "tokens": tokens,
        "page_size": case.page_size,
        "rotated": case.rotated,
        "us": timing.us,
        "us_low": timing.low,
        "us_high": timing.high,
        "gbps": gbps,
        "efficiency": gbps / copy_gbps,
    }


def _check(
    gpu: Gpu,
    case: AppendCase,
    row_bits: Any,
    cache_bits: Any,
    chosen: np.ndarray[Any, Any],
    slots: np.ndarray[Any, Any],
    rotation: dict[str, Any],
) -> None:
    """Compare some rows with what the reference makes of them."""
    rows = gpu.download(row_bits[gpu.upload(chosen)]).view(DTYPES["bfloat16"])
    got = gpu.download(cache_bits[gpu.upload(slots[chosen])]).view(DTYPES["bfloat16"])
    expected = np.empty_like(rows)
    if rotation:
        rotation = rotation | {"positions": rotation["positions"][chosen]}
    reference.append_mla_cache(rows, expected[:, None], np.arange(len(chosen)), **rotation)
    got, expected = got.astype(np.float32), expected.astype(np.float32)
    # Rotations in float32 may round to the neighbour of what float64 rounds to.
    allowed = np.zeros_like(expected)
    if case.rotated:
        allowed[:, VALUE_DIM:] = 2.0**-7 * np.abs(expected[:, VALUE_DIM:]) + 1e-5
    wrong = ~(np.abs(got - expected) <= allowed).all(axis=1)
    if wrong.any():
        raise CheckError(f"{case}: row {chosen[wrong][0]} was not written as it should be")
