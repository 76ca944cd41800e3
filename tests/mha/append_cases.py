# SPDX-License-Identifier: Apache-2.0
"""Calls of append_kv_cache, drawn at random from all that it can be asked; NumPy arrays."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["Sample", "bits_of", "check", "make", "samples"]

DTYPES: dict[str, Any] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
POISON = 0xFF  # bytes: NaN in every float
MAX_POSITION = 90
LARGEST = 6.0  # of the numbers
MOST = 150  # tokens that the pages of a request hold, at least
FACTORS: dict[str, tuple[Any, ...]] = {
    "lens": ((1,), (1, 1, 1), (0, 5, 1, 33), (64, 64), (7, 0, 0, 2, 1)),
    "page_size": (1, 3, 16, 64),
    "kv_heads": (1, 2, 3, 8, 9),
    "group": (0, 1, 3, 8),
    "columns": (16, 64, 96, 128, 192, 256, 512),
    "value_columns": (8, 64, 128),
    "dtype": ("bfloat16", "float16"),
    "cache": ("16 bits", "16 bits", "e4m3", "bytes"),
    "layout": ("NHD", "HND", "packed", "padded"),
    "places": ("slots", "batch_indices", "kv_lens", "uniform"),
    "pages": ("table", "list"),
    "index": ("int32", "int64"),
    "table": ("none", "float32", "bfloat16", "float16"),
    "form": ("one", "pair", "freqs"),
    "interleaved": (False, True),
    "rotary": ("whole", "first", "last", "middle"),
    "scales": ("none", "number", "one", "head", "request"),
    "q": ("in place", "output", "slice"),
}


@dataclass(frozen=True)
class Sample:
    """One point of the grid."""

    lens: tuple[int, ...]
    page_size: int
    kv_heads: int
    group: int
    columns: int
    value_columns: int
    dtype: str
    cache: str
    layout: str
    places: str
    pages: str
    index: str
    table: str
    form: str
    interleaved: bool
    rotary: str
    scales: str
    q: str
    seed: int


def samples(count: int) -> list[Sample]:
    """List the same points every time."""
    rng = random.Random(20261123)
    return [
        Sample(**{name: rng.choice(values) for name, values in FACTORS.items()}, seed=seed)
        for seed in range(count)
    ]


def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of NaN."""
    array = np.empty(shape, dtype)
    array.view(np.uint8).fill(POISON)
    return array


@dataclass(frozen=True)
class Counts:
    """Sizes of a sample, and the request and position of each token."""

    lens: tuple[int, ...]
    tokens: int
    max_pages: int
    num_pages: int
    kv_lens: Any
    requests: Any
    positions: Any

    @classmethod
    def of(cls, s: Sample, rng: Any) -> Counts:
        lens = (4, 4, 4) if s.places == "uniform" else s.lens
        # As under a captured graph: qo_indptr may end before the rows do.
        more = 2 if s.places == "kv_lens" and s.seed % 3 == 0 else 0
        kv_lens = np.array([n + int(rng.integers(0, 60)) for n in lens], np.int32)
        if s.seed % 5 == 0:
            kv_lens[-1] -= 50  # some of its tokens have no place
        ranges = [np.arange(end - n, end) for n, end in zip(lens, kv_lens, strict=True)]
        max_pages = -(-MOST // s.page_size)
        return cls(
            lens,
            sum(lens) + more,
            max_pages,
            len(lens) * max_pages + 3,
            kv_lens,
            np.repeat(np.arange(len(lens)), lens),
            np.concatenate([*ranges, np.full(more, -1)]),
        )


def make(s: Sample) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give arguments, and by name the whole memory of those that may be written to."""
    rng = np.random.default_rng(s.seed)
    counts = Counts.of(s, rng)
    lead = (len(counts.lens), counts.lens[0]) if s.places == "uniform" else (counts.tokens,)

    def rows(heads: int, columns: int) -> Any:
        values = np.clip(rng.standard_normal((*lead, heads, columns)), -LARGEST, LARGEST)
        return values.astype(DTYPES[s.dtype])

    given: dict[str, Any] = {
        "k": rows(s.kv_heads, s.columns),
        "v": rows(s.kv_heads, s.value_columns),
    }
    owners: dict[str, Any] = {}
    _add_caches(s, counts.num_pages, given, owners)
    _add_places(s, rng, counts, given)
    if s.table != "none":
        _add_rotation(s, rng, given, owners, rows, counts.positions)
    if s.cache != "16 bits" and s.scales != "none":
        for name in ("k_scale", "v_scale"):
            given[name] = _scale(s, rng, len(counts.lens))
    return given, owners


def _add_caches(s: Sample, num_pages: int, given: dict[str, Any], owners: dict[str, Any]) -> None:
    dtype = {"16 bits": DTYPES[s.dtype], "e4m3": E4M3, "bytes": np.dtype(np.uint8)}[s.cache]
    columns = {"k_cache": s.columns, "v_cache": s.value_columns}
    least = 16 // dtype.itemsize  # columns of 16 bytes
    widths = {name: -(-width // least) * least for name, width in columns.items()}
    if s.layout == "packed":
        shape = (num_pages, 2, s.page_size, s.kv_heads, max(widths.values()))
        owners["cache"] = poisoned(shape, dtype)
        for i, name in enumerate(columns):
            given[name] = owners["cache"][:, i, ..., : columns[name]]
        return
    axes = (s.page_size, s.kv_heads)
    extra = least if s.layout == "padded" else 0
    for name in columns:
        shape = (num_pages, *(axes[::-1] if s.layout == "HND" else axes), widths[name] + extra)
        owners[name] = poisoned(shape, dtype)
        given[name] = owners[name][..., : columns[name]]
    if s.layout == "HND":
        given["kv_layout"] = "HND"


def _add_places(s: Sample, rng: Any, counts: Counts, given: dict[str, Any]) -> None:
    if s.places == "slots":
        slots = rng.permutation(counts.num_pages * s.page_size)[: counts.tokens].astype(s.index)
        skipped = counts.tokens // 9
        slots[:skipped] = -1 - 3 * slots[:skipped]
        given["slot_mapping"] = slots
        return
    if s.places == "batch_indices":
        given["batch_indices"] = counts.requests.astype(s.index)
        given["positions"] = counts.positions.astype(s.index)
    else:
        given["kv_lens"] = counts.kv_lens
        if s.places == "kv_lens":
            given["qo_indptr"] = np.concatenate([[0], np.cumsum(counts.lens)]).astype(np.int32)
    shape = (len(counts.lens), counts.max_pages)
    pages = rng.permutation(counts.num_pages)[: shape[0] * shape[1]]
    table = pages.reshape(shape).astype(np.int32)
    table[:, -1] = (-1, 2**31 - 1, counts.num_pages)[s.seed % 3]
    if s.pages == "table":
        given["block_table"] = table
    else:
        given["kv_indices"] = table.reshape(-1)
        given["kv_indptr"] = (np.arange(shape[0] + 1) * shape[1]).astype(np.int32)


def _scale(s: Sample, rng: Any, batch: int) -> Any:
    shapes = {"one": (1,), "head": (s.kv_heads,), "request": (batch, s.kv_heads)}
    shape = shapes.get("head" if (s.scales, s.places) == ("request", "slots") else s.scales)
    scale = 2.0 ** rng.integers(-6, 2, shape) * 1.25
    return float(scale) if shape is None else scale.astype(np.float32)


def _add_rotation(
    s: Sample, rng: Any, given: dict[str, Any], owners: dict[str, Any], rows: Any, positions: Any
) -> None:
    rotary_dim = s.columns if s.rotary == "whole" else max(16, s.columns // 32 * 16)
    offset = {"last": s.columns - rotary_dim, "middle": 8 if rotary_dim + 8 <= s.columns else 0}
    given["rotary_offset"] = offset.get(s.rotary, 0)
    given["interleaved"] = s.interleaved
    angles = rng.uniform(0, 6.28, (MAX_POSITION, rotary_dim // 2))
    cos, sin = (f(angles).astype(DTYPES[s.table]) for f in (np.cos, np.sin))
    freqs = np.stack([cos, sin], axis=-1)
    given["cos_sin"] = {
        "one": np.concatenate([cos, sin], axis=1),
        "pair": (cos, sin),
        "freqs": (freqs[..., 0], freqs[..., 1]),
    }[s.form]
    if s.places == "slots" or s.seed % 2:
        given.setdefault("positions", (positions % 95 - 1).astype(s.index))
    if s.group:
        q = rows(s.kv_heads * s.group, s.columns)
        wide = poisoned((*q.shape[:-1], q.shape[-1] + 8), q.dtype)
        wide[..., : s.columns] = q
        if s.q == "output":
            given["q"] = q
            owners["q_out"] = poisoned(wide.shape, q.dtype)
            given["q_out"] = owners["q_out"][..., : s.columns]
        else:
            owners["q"] = wide if s.q == "slice" else q
            given["q"] = owners["q"][..., : s.columns]


def bits_of(array: Any) -> Any:
    """The same memory as unsigned integers."""
    return array.view(f"u{array.itemsize}")


def check(got: Any, expected: Any, *, rotated: bool) -> None:
    """Compare whole memory to the bit; numbers rotated in float32 may round to a neighbour."""
    differs = bits_of(got) != bits_of(expected)
    if not differs.any():
        return
    assert rotated
    is_fp8 = got.itemsize == 1
    one, other = (
        (a[differs].view(E4M3) if is_fp8 else a[differs]).astype(np.float64)
        for a in (got, expected)
    )
    kind = E4M3 if is_fp8 else got.dtype
    digits = {E4M3: 4, DTYPES["bfloat16"]: 8, DTYPES["float32"]: 24}.get(kind, 11)
    _, exponent = np.frexp(np.maximum(np.abs(other), 2.0**-6 if is_fp8 else 2.0**-14))
    step = np.ldexp(1.0, exponent - digits)
    float32_error = 2.0**-22 * LARGEST * (64 if is_fp8 else 1)  # before the factor of 1 / scale
    assert (np.abs(one - other) <= step * (1 + 1e-9) + float32_error).all()
    # Halves between two neighbours are rare, but where nothing is rounded after float32.
    assert differs.mean() < 0.02 or kind == DTYPES["float32"]
