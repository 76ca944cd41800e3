# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cumla.bench import explain
from cumla.bench.cases import DENSE, Case
from cumla.errors import UnsupportedDeviceError
from cumla.launch import KernelSpec
from cumla.launch.mla.choice import decode_spec
from cumla.launch.mla.mla_decode_fp8 import fp8_specs
from cumla.launch.mla.shape import VARIANTS


@pytest.mark.parametrize("case", [*DENSE[::5], Case(3, 2, 48, 100, 2, "float16", 1)])
def test_names_the_kernel_and_the_grid(case: Case):
    key = explain.key_of(case, 60)
    text = explain.explain(case, 60)
    assert text.startswith(f"{case.name}: {decode_spec(key).entry} (")
    assert f"= {key.parts * key.tiles} thread blocks on 60 multiprocessors" in text


@pytest.mark.parametrize(
    ("case", "variant", "entry", "rows", "reason"),
    [
        (Case(1, 1, 1, 64), "swapped", "_swapped", "1 query rows", "fit the N side of the matrix"),
        (Case(1, 1, 16, 64), "swapped", "_swapped", "16 query rows", "memory is the bound, and th"),
        (Case(1, 1, 17, 64), "one_tile", "", "17 query rows", "reads each KV block alone, so mem"),
        (Case(1, 2, 32, 64), "one_tile", "", "64 query rows", "reads each KV block alone, so mem"),
        (Case(1, 1, 65, 64), "shared_blocks", "_shared_blocks", "65 query rows", "so arithmetic"),
        (Case(1, 2, 128, 64), "shared_blocks", "_shared_blocks", "256 query rows", "the same KV"),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else None,
)
def test_gives_the_reason(case: Case, variant: str, entry: str, rows: str, reason: str):
    text = explain.explain(case, 132)
    assert explain.key_of(case, 132).variant == variant
    assert text.startswith(f"{case.name}: mla_decode_bfloat16{entry} (384 threads, ")
    assert reason in text
    assert f"\n  variant {variant}: " in text
    tiles = {"shared_blocks": rf"{rows} of a kv head in [24] row tiles: they "}
    assert re.search(tiles.get(variant, rf"{rows} of a kv head in 1 row tile: "), text)


def test_names_the_kernels_of_fp8_caches():
    text = explain.explain(Case(3, 2, 48, 100), 60)
    one, grouped = (spec.entry for spec in _fp8_specs(Case(3, 2, 48, 100)))
    assert text.endswith(f"\n  of an FP8 cache: {one}, or with scales of its own {grouped}")
    assert "FP8" not in explain.explain(Case(3, 2, 48, 100, dtype="float16"), 60)


def test_names_the_kernel_of_packed_rows():
    """Of few query rows they have their own."""
    text = explain.explain(Case(3, 1, 16, 100), 60)
    assert text.endswith("_fp8_16_grouped, packed mla_decode_fp8_16_packed")
    assert "packed" not in explain.explain(Case(3, 2, 16, 100), 60)


def _fp8_specs(case: Case) -> tuple[KernelSpec, ...]:
    return fp8_specs(replace(explain.key_of(case, 60), cache="e4m3"))


def test_every_kernel_has_a_reason():
    assert set(explain._REASONS) == set(VARIANTS)
    assert len(set(explain._REASONS.values())) == len(VARIANTS)


def test_multiprocessors_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    def none() -> int:
        raise UnsupportedDeviceError("no GPU")

    monkeypatch.setattr(explain, "current_device", none)
    assert explain.find_sm_count() == (132, "no GPU found: as of an H200")


def test_multiprocessors_of_the_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(explain, "current_device", lambda: 3)
    found = {3: SimpleNamespace(sm_count=78, name="NVIDIA H20")}
    monkeypatch.setattr(explain, "properties", found.get)
    assert explain.find_sm_count() == (78, "NVIDIA H20")
