# SPDX-License-Identifier: Apache-2.0
"""The benchmark of forms of the same work, on a GPU made of NumPy."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

from cumla.bench import forms
from cumla.bench.cases import Case
from cumla.bench.dense import CheckError
from cumla.bench.forms import FORMS, FormGroup, forms_row, measure_forms
from cumla.bench.peers import load_peers
from cumla.bench.report import failures, to_markdown, to_text
from cumla.bench.timing import Timing
from tests.bench.fake_gpu import LAUNCH_US, FakeGpu

H200 = load_peers().ceilings
SMALL = Case(4, 1, 4, 70)  # two pages a request, one of them nearly empty
LAYOUTS = forms._by_layout(SMALL)
KV_HEADS = forms._by_kv_heads(SMALL, 2, 4)
Q_LENS = forms._by_q_len(SMALL, 2, 4)
EACH = [(group, form.name) for group in (LAYOUTS, KV_HEADS, Q_LENS) for form in group.forms]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU whose calls note their arrays, and may spoil what they wrote."""
    gpu: Any = FakeGpu()
    gpu.spoil, gpu.calls = lambda number, out, lse: None, []
    original = forms.MLADecodePlan.run

    def run(self: Any, q: Any, kv_cache: Any, *others: Any, out: Any, lse: Any) -> None:
        original(self, q, kv_cache, *others, out=out, lse=lse)
        gpu.calls.append((q, kv_cache))
        gpu.spoil(len(gpu.calls) - 1, out, lse)
        gpu.now += LAUNCH_US

    monkeypatch.setattr(forms.MLADecodePlan, "run", run)
    return gpu


# --- groups ---------------------------------------------------------------------------------------


def test_groups() -> None:
    assert [(group.name, len(group.forms)) for group in FORMS] == [
        ("b128-s1-h16-kv4096 by dtype and layout", 6),
        ("b128-s1-h128-kv4096 by dtype and layout", 6),
        ("b128-s1-h16-kv4096 by kv heads", 5),
        ("b128-s1-h128-kv4096 by kv heads", 3),
        *((f"b128-s1-h{rows}-kv4096 by q_len", 4) for rows in (16, 32, 64, 128)),
    ]
    shapes = [
        [(form.case.batch, form.case.q_len, form.case.heads, form.case.kv_heads) for form in group]
        for group in (group.forms for group in FORMS)
    ]
    assert shapes[2] == [(128, 1, 16, 1), *[(64, 1, 32, 2)] * 2, *[(32, 1, 64, 4)] * 2]
    assert shapes[3] == [(128, 1, 128, 1), *[(64, 1, 256, 2)] * 2]
    assert shapes[4] == [(128, 1, 16, 1), (128, 2, 8, 1), (128, 4, 4, 1), (128, 8, 2, 1)]
    assert {form.case.dtype for form in FORMS[0].forms} == {"bfloat16", "float16"}


@pytest.mark.parametrize("group", FORMS, ids=lambda group: group.name)
def test_forms_of_a_group_are_the_same_work(group: FormGroup) -> None:
    first = group.forms[0].case
    assert len({form.name for form in group.forms}) == len(group.forms)
    assert group.forms[0] == forms.Form(group.forms[0].name, first)  # packed
    for form in group.forms:
        case = form.case
        rows = case.q_len * case.heads // case.kv_heads
        assert rows == first.heads
        assert case.nbytes == first.nbytes
        assert case.flops == pytest.approx(first.flops, rel=1e-3)


@pytest.mark.parametrize("group", FORMS, ids=lambda group: group.name)
def test_a_group_fits_beside_everything_else(group: FormGroup) -> None:
    largest = {
        dtype: max(2 * form.cache_elements for form in group.forms if form.case.dtype == dtype)
        for dtype in {form.case.dtype for form in group.forms}
    }
    rows = sum(2 * prod(form.query_shape) for form in group.forms)  # more than queries and outputs
    assert sum(largest.values()) + 2 * rows < 3e9


# --- measuring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [LAYOUTS, KV_HEADS, Q_LENS], ids=lambda group: group.varied)
def test_forms_are_timed_in_turns(gpu: Any, group: FormGroup) -> None:
    times = measure_forms(gpu, group)
    assert list(times) == [form.name for form in group.forms]
    assert all(time == (LAUNCH_US, LAUNCH_US, LAUNCH_US) for time in times.values())
    count = len(group.forms)
    queries = [id(q) for q, _ in gpu.calls]
    assert len(set(queries[:count])) == count  # what is checked
    timed = queries[count:]
    assert len(timed) == 3 * count * 15
    turns = [query for i, query in enumerate(timed) if i == 0 or timed[i - 1] != query]
    assert turns == queries[:count] * 3


def test_layouts_of_arrays(gpu: Any) -> None:
    measure_forms(gpu, LAYOUTS)
    called = dict(zip((form.name for form in LAYOUTS.forms), gpu.calls, strict=False))
    strides = {name: getattr(cache, "strides", None) for name, (_, cache) in called.items()}
    packed = (64 * 1152, 1152, 1152, 2)
    assert strides == {
        "packed bfloat16": packed,
        "float16": packed,
        "cache: wide rows": (64 * 1280, 1280, 1280, 2),
        "cache: pages apart": (2 * 64 * 1152, 1152, 1152, 2),
        "cache: split": None,
        "query: wide rows": packed,
    }
    latent, rope = called["cache: split"][1]
    assert (latent.shape[-1], rope.shape[-1]) == (512, 64)
    assert (latent.strides[0], rope.strides[0]) == (64 * 1024, 64 * 128)
    assert not np.shares_memory(latent, rope)
    rows = {name: q.strides[2] for name, (q, _) in called.items()}
    assert rows.pop("query: wide rows") == 1280
    assert set(rows.values()) == {1152}
    assert [q.dtype.name for q, _ in called.values()] == [
        "bfloat16",
        "float16",
        *["bfloat16"] * 4,
    ]
    of_bfloat16 = [cache for name, (_, cache) in called.items() if name != "float16"]
    first, *others = [cache[0] if isinstance(cache, tuple) else cache for cache in of_bfloat16]
    assert all(np.shares_memory(first, other) for other in others)
    assert np.std(called["float16"][1].astype(np.float32)) == pytest.approx(0.1, rel=0.02)


def test_layouts_of_kv_heads(gpu: Any) -> None:
    measure_forms(gpu, KV_HEADS)
    caches = [cache for _, cache in gpu.calls[: len(KV_HEADS.forms)]]
    assert [cache.shape for cache in caches] == [
        (8, 64, 1, 576),
        *[(4, 64, 2, 576)] * 2,
        *[(2, 64, 4, 576)] * 2,
    ]
    page, row = 64 * 1152, 1152
    assert [cache.strides[:3] for cache in caches[1:]] == [
        (2 * page, 2 * row, row),
        (2 * page, row, page),
        (4 * page, 4 * row, row),
        (4 * page, row, page),
    ]


@pytest.mark.parametrize("what", ["out", "lse", "unwritten"])
@pytest.mark.parametrize(("group", "name"), EACH)
def test_a_wrong_form_is_found(gpu: Any, group: FormGroup, name: str, what: str) -> None:
    number = [form.name for form in group.forms].index(name)

    def spoil(call: int, out: Any, lse: Any) -> None:
        if call != number:
            return
        if what == "out":
            out[-1, -1, -1] *= 1.02
        elif what == "lse":
            lse[0, -1, -1] *= 1.001
        else:
            out[len(out) // 2, 0] = np.nan

    gpu.spoil = spoil
    case = group.forms[number].case.name
    with pytest.raises(CheckError, match=f"^{name}: some requests of {case}: b"):
        measure_forms(gpu, group)
    assert len(gpu.calls) == 1 + number  # nothing was timed


@pytest.mark.parametrize(
    ("group", "name"),
    [(group, name) for group, name in EACH if "cache: " in name or "heads first" in name],
)
def test_a_layout_that_is_mistaken_is_found(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, group: FormGroup, name: str
) -> None:
    (form,) = (form for form in group.forms if form.name == name)
    original = forms._call

    def mistaken(inputs: Any, parts: tuple[Any, ...]) -> Any:
        case = form.case
        if parts[0].strides == forms._cache_parts(form, memory)[0].strides:
            flat = np.lib.stride_tricks.as_strided(parts[0], (form.cache_elements,), (2,))
            parts = forms._cache_parts(forms.Form(name, case), flat)
        return original(inputs, parts)

    memory = np.zeros(form.cache_elements, np.uint16)
    monkeypatch.setattr(forms, "_call", mistaken)
    with pytest.raises(CheckError, match=f"^{name}: .* out is wrong in "):
        measure_forms(gpu, group)


# --- rows and tables ------------------------------------------------------------------------------


def test_rows_and_table() -> None:
    group = FORMS[4]
    us = dict(zip((form.name for form in group.forms), (200.0, 201.0, 198.0, 230.0), strict=True))
    times = {name: Timing(time, time - 1, time + 2) for name, time in us.items()}
    row = forms_row(group, times)
    assert [row[key] for key in ("batch", "q_len", "heads", "kv_len")] == [128, 1, 16, 4096]
    assert row["varied"] == "q_len"
    assert row["forms"][3] == {
        "form": "q_len 8",
        "us": 230.0,
        "us_low": 229.0,
        "us_high": 232.0,
        "ratio": 1.15,
    }
    assert row["forms"][0]["ratio"] == 1.0
    machine = dict.fromkeys(("gpu", "sm_count", "driver", "cupy", "nvrtc", "cumla"), "1")
    failed = KV_HEADS.to_json() | {"failed": "2 kv heads are off"}
    found = {
        "machine": machine,
        "date": "2026-11-21T00:00",
        "ceilings": H200.to_json(),
        "peers": load_peers().source,
        "rows": [],
        "forms": [row, failed],
    }
    lines = to_markdown(found).splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("| forms: batch |"))
    assert lines[at].endswith("| heads | kv_len | by | form | us | ratio to the first |")
    assert lines[at + 2] == "| 128 | 16 | 4096 | q_len | q_len 1 | 200 | 1.000 |"
    assert lines[at + 5] == "| 128 | 16 | 4096 | q_len | q_len 8 | 230 | 1.150 |"
    assert lines[at + 6] == "| 4 | 4 | 70 | kv heads | failed |  |  |"
    assert failures(found) == ["2 kv heads are off"]
    assert "q_len 4" in to_text(found)
    assert "efficiency" not in to_markdown(found)  # no table of nothing, and no word about one
