# SPDX-License-Identifier: Apache-2.0
"""The kernel's own text, run by the CPU, against the reference; all memory is compared."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.core import operation as core
from cumla.core._dlpack import numpy_dtype
from cumla.core.arrays import open_call
from cumla.launch.mha import append_kv_cache as launcher
from tests.calls import int32
from tests.emulator import emulate
from tests.emulator.fenced import Fenced
from tests.launch.structs import parameters
from tests.mha.append_cases import DTYPES, Sample, bits_of, check, make, poisoned, samples

BF16 = np.dtype(ml_dtypes.bfloat16)
ROOT = Path(__file__).resolve().parents[3]
FAR = 5 << 30  # bytes: more than 32 bits count
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE: only touched pages count


def call(function: Callable[..., Any], **arguments: Any) -> tuple[Any, ...]:
    """Call a function of NumPy arrays whose launches run on the CPU; give its outputs."""

    def run(
        operation: Any, inputs: Any, outputs: dict[str, Any], options: Any, *_: Any
    ) -> tuple[Any, ...]:
        def views() -> Any:
            found = open_call(tuple(inputs.items()), tuple(outputs.items())).views
            return dict(zip((*inputs, *outputs), found, strict=True))

        returned = operation.outputs(operation.arguments(views(), options))
        for name, shape, dtypes, *_ in returned:
            if outputs[name] is None:
                outputs[name] = poisoned(shape, numpy_dtype(dtypes[0]))
        checked = operation.arguments(views(), options)
        outs = core.checked_outputs(operation, returned, views(), tuple(outputs))
        for launch in operation.recipe(None, checked, outs, 0):
            parameters(launch)  # as many as the kernel's struct has members
            emulate(launch)
        return tuple(outputs.values())

    with mock.patch("cumla.core.operation.run", run):
        return function(**arguments) or ()


SAMPLES = (*samples(48), *(replace(s, dtype="float32") for s in samples(16)))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: f"{s.dtype}-{s.seed}")
def test_append_kv_cache(sample: Sample) -> None:
    given, owners = make(sample)
    expected, expected_owners = make(sample)
    cumla.reference.append_kv_cache(**expected)
    call(cumla.append_kv_cache, **given)
    for name, owner in owners.items():
        check(owner, expected_owners[name], rotated=sample.table != "none")


@pytest.mark.parametrize("heads", [1, 3, 4])
def test_chunks_of_heads(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more tokens, and with tiles in both axes of the grid."""
    monkeypatch.setattr(launcher, "_heads_of_chunk", lambda tokens: heads)
    monkeypatch.setattr(launcher, "_MAX_TILES", 2)
    for sample in SAMPLES[heads::6]:
        test_append_kv_cache(sample)


# --- apply_rope -----------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "columns", "rotary_dim", "offset"),
    [
        ("bfloat16", 4, 1, 64, 64, 0),
        ("float16", 5, 3, 128, 32, 0),
        ("bfloat16", 1, 0, 192, 64, 128),
        ("float16", 9, 2, 40, 16, 8),
        ("bfloat16", 3, 8, 512, 512, 0),
        ("float32", 3, 2, 72, 64, 8),
    ],
)
def test_apply_rope(
    dtype: str,
    heads: int,
    kv_heads: int,
    columns: int,
    rotary_dim: int,
    offset: int,
    interleaved: bool,
) -> None:
    """New outputs, in place, and in rows of wider arrays; some positions have no row."""
    rng, tokens = np.random.default_rng(heads), 70

    def wide(count: int) -> Any:
        values = rng.standard_normal((tokens, count, columns + 8)).clip(-6, 6)
        return values.astype(DTYPES[dtype])

    angles = rng.uniform(0, 6.3, (40, rotary_dim // 2))
    q, k = wide(heads), wide(kv_heads) if kv_heads else None
    positions = rng.integers(-2, 43, tokens)
    positions[:4] = np.iinfo(np.int64).min, np.iinfo(np.int64).max, 1 << 32, -(1 << 32)
    options = {
        "positions": positions,
        "cos_sin": (np.cos(angles)[::-1].astype(np.float32), np.sin(angles).astype(np.float32)),
        "interleaved": interleaved,
        "rotary_offset": offset,
    }
    owners = [array for array in (q, k) if array is not None]
    expected = [array.copy() for array in owners]
    seen = [array[..., :columns] for array in expected]
    cumla.reference.apply_rope(
        seen[0], seen[1] if kv_heads else None, **options, q_out=seen[0], k_out=seen[-1]
    )
    inputs = {"q": q[..., :columns], "k": None if k is None else k[..., :columns]}
    new = call(cumla.apply_rope, **inputs, **options)
    for one, other in zip(new, seen, strict=False):
        if one is not None:
            check(one, np.ascontiguousarray(other), rotated=True)
    given = {f"{name}_out": array for name, array in inputs.items() if array is not None}
    call(cumla.apply_rope, **inputs, **options, **given)
    for owner, other in zip(owners, expected, strict=True):
        check(owner, other, rotated=True)


# --- integers that mean nothing -------------------------------------------------------------------


def hostile(rng: Any) -> Iterator[tuple[dict[str, Any], bool]]:
    """Calls in which integers hold anything; and whether the order of offsets is one, too."""
    tokens, batch, num_pages = 60, 5, 7

    def garbage(shape: Any, dtype: str, small: int) -> Any:
        limits = np.iinfo(dtype)
        wild = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        wild = np.where(rng.random(shape) < 0.3, rng.choice([limits.min, limits.max], shape), wild)
        return np.where(rng.random(shape) < 0.7, rng.integers(-1, small, shape), wild).astype(dtype)

    for index in ("int32", "int64"):
        rows = {
            "k": rng.standard_normal((tokens, 3, 64)).astype(BF16),
            "v": rng.standard_normal((tokens, 3, 16)).astype(BF16),
            "k_cache": poisoned((num_pages, 16, 3, 64), np.uint8),
            "v_cache": poisoned((num_pages, 16, 3, 16), np.uint8),
        }
        rotation = {
            "q": rng.standard_normal((tokens, 2, 64)).astype(BF16),
            "cos_sin": rng.standard_normal((50, 64)).astype(np.float32),
        }
        positions = garbage(tokens, index, 60)
        table = {"block_table": garbage((batch, 4), "int32", num_pages + 1)}
        pages = {
            "kv_indices": garbage(20, "int32", num_pages + 1),
            "kv_indptr": garbage(batch + 1, "int32", 21),
        }
        scales = {"k_scale": np.ones((batch, 3), np.float32)}
        kv_lens = garbage(batch, "int32", 70)
        bounds = np.sort(rng.integers(0, tokens + 3, batch + 1)).astype(np.int32)
        lasts = {"kv_lens": kv_lens, **scales}
        slots = {"slot_mapping": garbage(tokens, index, 16 * num_pages + 2)}
        yield rows | slots, True
        yield rows | slots | rotation | {"positions": positions}, True
        nobody = {name: array[:0] for name, array in (table | lasts).items()}
        yield rows | nobody | {"qo_indptr": int32(0)}, True
        for where in (table, pages):
            requests = garbage(tokens, index, batch + 1)
            yield rows | where | {"batch_indices": requests, "positions": positions} | scales, True
            yield rows | rotation | where | lasts | {"qo_indptr": bounds}, True
            anything = garbage(batch + 1, "int32", tokens)
            yield rows | rotation | where | lasts | {"qo_indptr": anything}, False
            turned_by = {"positions": positions, "qo_indptr": anything}
            yield rows | rotation | where | lasts | turned_by, False
        uniform = {n: a.reshape(batch, -1, *a.shape[1:]) for n, a in rows.items() if n in "kv"}
        yield rows | uniform | table | lasts, True


def run_hostile() -> None:
    """Run all of them; a touch of what is no array's ends the process."""
    for at_end in (False, True):
        written = set()
        for given, is_ordered in hostile(np.random.default_rng(7)):
            fenced = Fenced(at_end=at_end)
            host = {n: a.copy() for n, a in given.items()}
            there = {n: fenced.copy(a) for n, a in given.items()}
            call(cumla.append_kv_cache, **there)
            cumla.reference.append_kv_cache(**host)
            for name in ("k_cache", "v_cache"):  # several rows may have one place
                got, expected = ((a[name] != 0xFF).any(axis=(2, 3)) for a in (there, host))
                assert not is_ordered or (got == expected).all(), name
                written.add(bool(got.any()))
            for name in given.keys() - {"k_cache", "v_cache", "q"}:
                assert there[name].tobytes() == host[name].tobytes()
            if "q" in given and is_ordered:
                check(there["q"], host["q"], rotated=True)
        assert True in written


def test_integers_that_mean_nothing() -> None:
    """In a process of its own, between pages that must not be touched."""
    code = "from tests.launch.mha import test_append_kv_cache as tests; tests.run_hostile()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


# --- sizes ----------------------------------------------------------------------------------------


def test_offsets_beyond_32_bits() -> None:
    """Rows, pages and angles that lie 5 GB apart, in memory of which little is touched."""
    try:
        memory = mmap.mmap(-1, FAR + (1 << 20), flags=PRIVATE)
    except (OSError, ValueError) as error:
        pytest.skip(f"needs 5 GB of address space: {error}")
    rng, begin = np.random.default_rng(0), 0

    def apart(shape: tuple[int, ...], dtype: Any) -> Any:
        """The first axis steps by 5 GB."""
        nonlocal begin
        inner = np.empty(shape[1:], dtype)
        array = np.ndarray(shape, dtype, memory, begin, (FAR, *inner.strides))
        begin += -(-inner.nbytes // 64) * 64
        array[...] = rng.standard_normal(shape)
        return array

    given = {
        "k": apart((2, 3, 64), BF16),
        "v": apart((2, 3, 32), BF16),
        "k_cache": apart((2, 4, 3, 64), BF16),
        "v_cache": apart((2, 4, 3, 32), BF16),
        "q": apart((2, 5, 64), BF16),
        "q_out": apart((2, 5, 64), BF16),
        "cos_sin": apart((2, 64), np.float32),
        "slot_mapping": np.array([6, 1]),
        "positions": np.array([1, 0], np.int32),
    }
    host = {name: array.copy() for name, array in given.items()}
    cumla.reference.append_kv_cache(**host)
    call(cumla.append_kv_cache, **given)
    for name, array in given.items():
        got = np.ascontiguousarray(array)
        if name in ("k_cache", "q_out"):
            check(got, host[name], rotated=True)
        else:
            assert (bits_of(got) == bits_of(host[name])).all(), name
