# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace

import pytest

from cumla.bench import explain
from cumla.bench.cases import DENSE, Case
from cumla.errors import UnsupportedDeviceError
from cumla.launch.mla_decode import decode_spec


@pytest.mark.parametrize("case", [*DENSE[::5], Case(3, 2, 48, 100, 2, "float16", 1)])
def test_names_the_kernel_and_the_grid(case: Case):
    key = explain._key(case, 60)
    text = explain.explain(case, 60)
    assert text.startswith(f"{case.name}: {decode_spec(key).entry} (")
    assert f"= {key.parts * key.tiles} thread blocks on 60 multiprocessors" in text


def test_gives_the_reason():
    assert "16 query rows of a kv head in 1 row tile" in explain.explain(Case(1, 1, 16, 64), 132)
    assert "256 query rows of a kv head in 4 row tiles" in explain.explain(Case(1, 2, 128, 64), 132)


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
