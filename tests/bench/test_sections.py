# SPDX-License-Identifier: Apache-2.0
"""Every section, measured from end to end on a GPU made of NumPy: checks, rows, figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cumla
from bench.run import SECTIONS
from bench.sections import forms, mla
from bench.sections.append import AppendCase
from bench.sections.indexer import CacheCase, PagedLogitsCase, PrefillLogitsCase, floor_us
from bench.sections.merge import MergeCase
from bench.sections.sparse import SparseCase
from bench.sections.topk import TopKCase
from cumla.bench import ceilings, dense
from cumla.bench.cases import Case
from cumla.bench.problem import check, lay_out, sample
from cumla.bench.section import CheckError
from tests.bench.conftest import DECODE, DENSE, SMALL, Fakes, small
from tests.bench.fake_gpu import CEILINGS, LAUNCH_US, memory

RECORDED = Path(__file__).resolve().parents[2] / "records" / "h200.json"
OF_PEERS = {"peers", "best_peer", "flash_mla_us", "deep_gemm_us"}
TITLES = [section.title for section in SECTIONS]
MOVES = (
    "merge: ",
    "append: ",
    "append keys and values: ",
    "quantize_fp8: ",
    "append_indexer_cache: ",
)


NOT_RECORDED = {  # the list may only shrink
    *("many heads: ", "append keys and values: ", "top-k: ", "sparse MLA: ", "step of a layer: "),
    "sparse MLA, V4: ",
}


def lines(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row, or the list in it."""
    return next((of for of in row.values() if isinstance(of, list)), [row])


@pytest.mark.parametrize("title", TITLES)
def test_rows_have_times_and_the_keys_of_recorded_ones(results: dict[str, Any], title: str) -> None:
    section = small(title)
    recorded = next(s for s in SECTIONS if s.title == title).rows(json.loads(RECORDED.read_text()))
    rows = section.rows(results)
    assert len(rows) == len(SMALL[title])
    for row, case in zip(rows, SMALL[title], strict=True):
        assert row.items() >= case.to_json().items()
        us = 0.0 if "schedule: " in title else LAUNCH_US  # on the CPU there is no schedule
        assert {line["us"] for line in lines(row)} == {us}
        of_op = [of for of in recorded if of.get("op") == row.get("op")]
        if title in NOT_RECORDED:
            continue
        assert set(row) in [set(of) - OF_PEERS for of in of_op]
        assert set(lines(row)[0]) in [set(lines(of)[0]) - OF_PEERS for of in of_op]


def test_dense_rows_stand_beside_the_ceilings(results: dict[str, Any]) -> None:
    first, second = results["rows"]
    for row in (first, second):
        assert row["us_low"] == row["us_high"] == row["stream_only_us"] == LAUNCH_US
        assert row["efficiency"] == pytest.approx(row["floor_us"] / LAUNCH_US)
        assert 0 < row["row_error"] <= 4e-3
        assert 0 <= row["lse_error"] <= 1e-5
    assert second["tflops"] == pytest.approx(DENSE[1].flops / LAUNCH_US / 1e6)
    assert second["gbps"] == pytest.approx(DENSE[1].nbytes / LAUNCH_US / 1e3)
    assert first["graph_us"] is None
    assert second["graph_us"] == pytest.approx(LAUNCH_US)


def test_attention_stands_beside_the_matrix_product(results: dict[str, Any]) -> None:
    for row, case in zip(results["attention"], SMALL["ragged queries: "], strict=True):
        assert row["tflops"] == pytest.approx(case.flops / LAUNCH_US / 1e6)
        assert row["efficiency"] == pytest.approx(row["tflops"] / CEILINGS.matmul_tflops)
        assert row["sustained_share"] == pytest.approx(row["tflops"] / CEILINGS.sustained_tflops)


@pytest.mark.parametrize("title", MOVES)
def test_what_moves_bytes_stands_beside_the_copy(results: dict[str, Any], title: str) -> None:
    for row, case in zip(small(title).rows(results), SMALL[title], strict=True):
        for of in ("", "graph_", "graph_copy_"):
            if row.get(f"{of}us") is None:  # quantising, and cases too large for a graph
                assert of == "" or "quantize" in title or "indexer" in title or case.nbytes > 2e6
                continue
            assert row[f"{of}us"] == pytest.approx(LAUNCH_US)
            assert row[f"{of}gbps"] == pytest.approx(case.nbytes / LAUNCH_US / 1e3)
            share = row[f"{of}gbps"] / CEILINGS.copy_gbps
            assert row[f"{of}efficiency"] == pytest.approx(share)
        assert row["copy_us"] == LAUNCH_US


def test_formats_count_their_own_bytes(results: dict[str, Any]) -> None:
    of = {row["format"]: row for row in results["fp8"][0]["formats"]}
    tokens = DECODE.batch * DECODE.kv_len
    assert of["bfloat16"]["gbps"] == pytest.approx(DECODE.nbytes / LAUNCH_US / 1e3)
    one = DECODE.nbytes - 576 * tokens
    assert of["e4m3"]["gbps"] == pytest.approx(one / LAUNCH_US / 1e3)
    assert of["packed"]["gbps"] == pytest.approx((one + 80 * tokens) / LAUNCH_US / 1e3)
    assert of["e4m3"]["read_share"] == pytest.approx(of["e4m3"]["gbps"] / CEILINGS.read_gbps)


# --- wrong results --------------------------------------------------------------------------------


def spoiler(what: str, number: int = 0) -> Any:
    """Spoil what the call of this number writes into out= and lse=."""
    seen = []

    def spoil(name: str, arguments: Any, options: dict[str, Any]) -> None:
        if not name.startswith("MLA"):
            return
        seen.append(name)
        if len(seen) != number + 1:
            return
        out, lse = options["out"], options["lse"]
        if what == "out":
            out[-1, ..., -1, :] *= 1.05
        elif what == "lse":
            lse[(-1, *[slice(None)] * (lse.ndim - 1))] *= 1.001
        else:
            out[0] = np.nan

    return spoil


@pytest.mark.parametrize("what", ["out", "lse", "unwritten"])
@pytest.mark.parametrize(
    ("title", "calls"),
    [
        ("", 1),
        ("batch-invariant: ", 1),
        ("ragged queries: ", 1),
        ("page sizes: ", 6),
        ("FP8 caches: ", 4),
        ("forms: ", 6),
    ],
)
def test_wrong_attention_is_not_timed(fakes: Fakes, title: str, calls: int, what: str) -> None:
    for number in range(calls):
        section = small(title, SMALL[title][0])
        fakes.bench.results["rows"] = [DENSE[1].to_json() | {"us": 1.0}]  # of the usual mode
        fakes.cumla.calls.clear()
        fakes.cumla.spoil = spoiler(what, number)
        (row,) = section.run(fakes.bench, fakes.told.append)
        assert f"{'lse' if what == 'lse' else 'out'} is wrong in " in row["failed"]
        assert "us" not in row and not any(isinstance(of, list) for of in row.values())
        assert fakes.told[-1] == f"FAILED: {row['failed']}"
        attended = [name for name in fakes.cumla.calls if name.startswith("MLA")]
        assert len(attended) == number + 1  # nothing was timed


@pytest.mark.parametrize("column", [0, 511, 512, 575])
@pytest.mark.parametrize("case", SMALL["append: "], ids=lambda case: case.name)
def test_a_wrong_row_is_found(fakes: Fakes, case: AppendCase, column: int) -> None:
    def spoil(name: str, arguments: Any, options: Any) -> None:
        _, kv_cache, slots = arguments
        kv_cache.reshape(-1, 576)[slots[-1], column] += 1

    fakes.cumla.spoil = spoil
    (row,) = small("append: ", case).run(fakes.bench, fakes.told.append)
    expected = f"{case.name}: row {case.tokens - 1} was not written as it should be"
    assert (row["failed"], "us" in row) == (expected, False)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("title", ["quantize_fp8: ", "append_indexer_cache: "])
def test_a_wrong_byte_is_found(fakes: Fakes, title: str, place: int) -> None:
    def spoil(name: str, arguments: Any, options: Any) -> None:
        written = options["out"] if "out" in options else arguments[1]
        slot = place if "out" in options else arguments[2][place]
        written.reshape(-1, written.shape[-1])[slot, 5] ^= 1

    fakes.cumla.spoil = spoil
    (row,) = small(title).run(fakes.bench, fakes.told.append)
    assert "was not written as it should be" in row["failed"]


@pytest.mark.parametrize(("of", "said"), [("out", "is off by"), ("lse", "logarithms of token")])
def test_a_wrong_merge_is_found(fakes: Fakes, of: str, said: str) -> None:
    def spoil(name: str, arguments: Any, options: Any) -> None:
        options[of][-1] *= 1.05

    fakes.cumla.spoil = spoil
    (row,) = small("merge: ", MergeCase(2, 5)).run(fakes.bench, fakes.told.append)
    assert said in row["failed"]


def test_a_wrong_index_is_found(fakes: Fakes) -> None:
    def spoil(name: str, arguments: Any, options: Any) -> None:
        options["out"][-1, 3] += 1

    fakes.cumla.spoil = spoil
    (row,) = small("top-k: ", TopKCase(3, 90, 8)).run(fakes.bench, fakes.told.append)
    assert row["failed"] == "top-k-3x90-k8: the indices of row 2 are wrong"


@pytest.mark.parametrize("what", ["out", "lse"])
@pytest.mark.parametrize(
    ("title", "plan"),
    [
        ("sparse MLA: ", "MLASparsePlan"),
        ("sparse MLA, V4: ", "MLASparsePlan"),
        ("step of a layer: ", "DSAPlan"),
    ],
)
def test_wrong_sparse_attention_is_found(fakes: Fakes, title: str, plan: str, what: str) -> None:
    def spoil(name: str, arguments: Any, options: Any) -> None:
        if name == plan:
            options[what].reshape(-1)[-1] *= 1.5

    fakes.cumla.spoil = spoil
    for row in small(title).run(fakes.bench, fakes.told.append):
        said = "is off by" if what == "out" else "are wrong"
        assert said in row["failed"] and "us" not in row


def test_a_wrong_selection_is_found(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    def select(plan: Any, *arrays: Any) -> Any:
        indices = cumla.DSAPlan.select(plan, *arrays)
        indices[-1, 0, 3] += 1
        return indices

    spoilt = type("DSAPlan", (fakes.cumla.DSAPlan,), {"select": select})
    monkeypatch.setattr(fakes.cumla, "DSAPlan", spoilt, raising=False)
    (row,) = small("step of a layer: ").run(fakes.bench, fakes.told.append)
    assert row["failed"].endswith("the selection of request 1 is wrong")


def test_rows_of_sparse_attention_have_the_figures_of_their_cases(results: dict[str, Any]) -> None:
    for row, case in zip(small("sparse MLA: ").rows(results), SMALL["sparse MLA: "], strict=True):
        assert row["efficiency"] == pytest.approx(case.floor_us(CEILINGS) / LAUNCH_US)
        assert row["tflops"] == pytest.approx(case.flops / LAUNCH_US / 1e6)
        assert row["gbps"] == pytest.approx(case.nbytes / LAUNCH_US / 1e3)
    first = SparseCase(128, 1, 128)  # of the specification: 46.7 and 96.8 us
    assert first.floor_us(CEILINGS) == pytest.approx(96.8, abs=0.1)
    assert first.nbytes / CEILINGS.read_gbps / 1e3 == pytest.approx(46.7, abs=0.2)


@pytest.mark.parametrize(
    ("case", "row", "column", "value", "message"),
    [
        (PagedLogitsCase(3, 2, 70), 5, 0, 99.0, "query 1 of request 2 are off by"),
        (PagedLogitsCase(3, 2, 70), 2, 69, 0.0, "query 0 of request 1: not -inf after the 69 "),
        (PagedLogitsCase(3, 2, 70), 1, 69, np.nan, "query 1 of request 0 are off by nan"),
        (PrefillLogitsCase(5, 90), 2, 88, 0.0, "query 2: not -inf after the 88 tokens"),
        (PrefillLogitsCase(5, 90), 4, 89, -np.inf, "query 4 are off by inf"),
    ],
)
def test_a_wrong_logit_is_found(
    fakes: Fakes, case: Any, row: int, column: int, value: float, message: str
) -> None:
    def spoil(name: str, arguments: Any, options: Any) -> None:
        if "Logits" in name or "logits" in name:
            options["out"][row, column] = value

    fakes.cumla.spoil = spoil
    (measured,) = small("indexer: ", case).run(fakes.bench, fakes.told.append)
    assert measured["failed"].startswith(f"{case.name}: the logits of {message}")


@pytest.mark.parametrize("title", [title for title in TITLES if "schedule" not in title])
def test_what_is_not_written_is_found(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    moving = ("merge_attention_states", "append_mla_cache", "append_kv_cache")
    for name in (*moving, "mqa_logits", "top_k"):
        monkeypatch.setattr(fakes.cumla, name, lambda *args, **options: None, raising=False)
    if title in ("quantize_fp8: ", "append_indexer_cache: "):
        name = title.removesuffix(": ")
        monkeypatch.setattr(fakes.cumla, name, lambda *args, **options: None, raising=False)
    plans = ("MLADecodePlan", "MLAAttentionPlan", "PagedMQALogitsPlan", "AttentionPlan")
    for name in (*plans, "MLASparsePlan", "DSAPlan"):
        idle = type(name, (getattr(fakes.cumla, name),), {"run": lambda *args, **options: None})
        monkeypatch.setattr(fakes.cumla, name, idle, raising=False)
    rows = list(small(title).run(fakes.bench, fakes.told.append))
    assert all("failed" in row for row in rows)


def test_an_error_of_one_case_leaves_the_others(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = dense.lay_out

    def broken(gpu: Any, case: Case, *caches: int) -> Any:
        if case == DENSE[0]:
            raise TypeError("no such\nargument")
        return original(gpu, case, *caches)

    monkeypatch.setattr(dense, "lay_out", broken)
    first, second = fakes.measure(small(""))["rows"]
    assert first["failed"] == f"{DENSE[0].name}: TypeError: no such"
    assert second["us"] == LAUNCH_US
    assert fakes.told[0] == f"FAILED: {first['failed']}"


def test_a_case_that_does_not_fit_says_so(fakes: Fakes) -> None:
    fakes.gpu.free_bytes = lambda: 1 << 20  # type: ignore[method-assign]
    (row,) = small("", Case(64, 1, 1, 16384)).run(fakes.bench, fakes.told.append)
    assert "needs 1.2 GB for its cache, and 0.0 GB are free" in row["failed"]


@pytest.mark.parametrize("kv_head", [0, 1])
def test_every_kv_head_is_checked(fakes: Fakes, kv_head: int) -> None:
    def spoil(name: str, arguments: Any, options: Any) -> None:
        options["out"][:, :, 2 * kv_head] *= 1.02

    fakes.cumla.spoil = spoil
    (row,) = small("", Case(2, 1, 4, 64, kv_heads=2)).run(fakes.bench, fakes.told.append)
    assert "out is wrong in 2 of 8 rows" in row["failed"]


def test_unwritten_output_is_wrong(fakes: Fakes) -> None:
    with pytest.raises(CheckError, match="out is wrong in 12 of 12 rows"):
        check(fakes.gpu, lay_out(fakes.gpu, DENSE[1]))


@pytest.mark.parametrize("title", ["", "indexer: "])
def test_what_a_graph_left_is_checked(fakes: Fakes, title: str) -> None:
    case: Any = DENSE[1] if not title else PagedLogitsCase(2, 1, 66)

    def captured(work: Any) -> Any:
        def spoil(name: str, arguments: Any, options: Any) -> None:
            options["out"][...] = 9.0

        fakes.cumla.spoil = spoil
        return work

    fakes.gpu.capture = captured  # type: ignore[method-assign]
    (row,) = small(title, case).run(fakes.bench, fakes.told.append)
    assert "failed" in row


@pytest.mark.parametrize("place", [0, 1])
def test_every_set_of_a_graph_is_checked(fakes: Fakes, place: int) -> None:
    caches: list[int] = []

    def captured(work: Any) -> Any:
        def spoil(name: str, arguments: Any, options: Any) -> None:
            cache = arguments[1]
            if id(cache) not in caches:
                caches.append(id(cache))
            if caches.index(id(cache)) == place:
                cache.reshape(-1, 576)[arguments[2][-1]] = 0

        if len(caches) == 0:
            fakes.cumla.spoil = spoil
        return work

    fakes.gpu.capture = captured  # type: ignore[method-assign]
    (row,) = small("append: ", AppendCase(1, 64)).run(fakes.bench, fakes.told.append)
    assert "row 831 was not written" in row["failed"]
    assert len(caches) == 2


# --- how things are called ------------------------------------------------------------------------


def test_graphs_go_round_caches_of_their_own(fakes: Fakes) -> None:
    tables: list[Any] = []
    fakes.cumla.spoil = lambda name, arguments, options: tables.append(arguments[3])
    fakes.measure(small("", DENSE[1]))
    of_a_replay = tables[-3:]
    pages = np.concatenate([table.ravel() for table in of_a_replay])
    assert sorted(pages.tolist()) == list(range(3 * DENSE[1].pages))
    assert sorted(pages.tolist()) != pages.tolist()


def test_the_invariant_mode_is_planned_with_the_longest_request(fakes: Fakes) -> None:
    planned: list[tuple[bool, int]] = []

    def note(name: str, arguments: Any, options: Any) -> None:
        planned.append((arguments[0].key.batch_invariant, arguments[0].key.max_blocks))

    fakes.cumla.spoil = note
    (row,) = fakes.measure(small("batch-invariant: "))["invariant"]
    assert row["usual_us"] == LAUNCH_US  # measured, for there is no table
    assert set(planned) == {(False, 0), (True, 2)}


def test_the_worst_seed_counts_against_the_equal_lengths_of_the_table(fakes: Fakes) -> None:
    fakes.bench.results["rows"] = [DENSE[0].to_json() | {"us": 4.0}]
    plans: list[Any] = []

    def note(name: str, arguments: Any, options: Any) -> None:
        if arguments[0] not in plans:
            plans.append(arguments[0])
        if len(plans) == 2:
            fakes.gpu.now += 3.0

    fakes.cumla.spoil = note
    (row,) = fakes.measure(small("ragged: "))["ragged"]
    assert [seed["us"] for seed in row["seeds"]] == [LAUNCH_US, LAUNCH_US + 3]
    assert (row["worst_us"], row["equal_us"], row["ratio"]) == (8.0, 4.0, 2.0)


def test_turns_of_page_sizes_and_formats(fakes: Fakes) -> None:
    sizes: list[int] = []
    fakes.cumla.spoil = lambda name, arguments, options: sizes.append(arguments[2].shape[1])
    fakes.measure(small("page sizes: "))
    checked, timed = sizes[:6], sizes[6:]
    assert checked == [64, 1, 16, 32, 48, 128]
    assert [size for i, size in enumerate(timed) if not i or timed[i - 1] != size] == 3 * checked


@pytest.mark.parametrize("name", ["e4m3", "e4m3 and scales", "packed"])
def test_a_scale_that_is_left_out_is_found(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original = mla._caches

    def mistaken(*arguments: Any) -> dict[str, Any]:
        caches = original(*arguments)
        cache = caches[name]
        if name == "e4m3":
            cache = replace(cache, argument=cache.argument ^ 0x80)  # other signs
        elif name == "packed":
            argument = cache.argument.copy()
            argument[..., 512:528].view(np.float32)[...] *= 2
            cache = replace(cache, argument=argument)
        else:
            latent, rope, scales = cache.argument
            cache = replace(cache, argument=(latent, rope, 2 * scales))
        return caches | {name: cache}

    monkeypatch.setattr(mla, "_caches", mistaken)
    (row,) = small("FP8 caches: ").run(fakes.bench, fakes.told.append)
    assert row["failed"].startswith(f"{name}: some requests of {DECODE.name}: ")


LAYOUTS = [
    (group, form)
    for group in (forms.by_layout(DECODE), forms.by_kv_heads(Case(4, 1, 1, 70), 2))
    for form in group.forms
    if form.cache != "packed"
]


@pytest.mark.parametrize(("group", "form"), LAYOUTS, ids=[form.name for _, form in LAYOUTS])
def test_a_layout_that_is_mistaken_is_found(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, group: Any, form: Any
) -> None:
    """A form's cache is read as if its rows lay one after the other."""
    original = forms.decode
    strides = forms.cache_parts(form, np.zeros(form.cache_elements, np.uint16))[0].strides

    def mistaken(q: Any, kv_cache: Any, *others: Any, **options: Any) -> Any:
        first = kv_cache[0] if isinstance(kv_cache, tuple) else kv_cache
        if first.strides == strides:
            flat = np.lib.stride_tricks.as_strided(first, (form.cache_elements,), (2,))
            (kv_cache,) = forms.cache_parts(replace(form, cache="packed"), flat)
        return original(q, kv_cache, *others, **options)

    monkeypatch.setattr(forms, "decode", mistaken)
    (row,) = small("forms: ", group).run(fakes.bench, fakes.told.append)
    assert row["failed"].startswith(f"{form.name}: some requests of ")


def test_forms_come_as_their_names_say(fakes: Fakes) -> None:
    called: list[tuple[Any, Any]] = []
    fakes.cumla.spoil = lambda name, arguments, options: called.append((arguments[1], arguments[2]))
    group = forms.by_layout(DECODE)
    fakes.measure(small("forms: ", group))
    of = dict(zip((form.name for form in group.forms), called, strict=False))
    assert of["cache: wide rows"][1].strides[1] == 2 * 640
    assert of["cache: pages apart"][1].strides[0] == 2 * 2 * 64 * 576
    latent, rope = of["cache: split"][1]
    assert (latent.shape[-1], rope.shape[-1]) == (512, 64)
    assert of["query: wide rows"][0].strides[2] == 2 * 640
    assert [q.dtype.name for q, _ in called[:2]] == ["bfloat16", "float16"]


def test_the_stream_brings_all_kv_heads(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(fakes.gpu, "launch", lambda *arguments: sent.append(arguments))
    kv = np.zeros((3, 64, 2, 576), np.uint16)
    ceilings.stream_only(fakes.gpu, kv, np.array([2, 0], np.int32))()
    ((spec, _, _, (tensor_map, address, count)),) = sent
    assert spec == ceilings.STREAM_KV
    assert (tensor_map.ptr, tensor_map.sizes) == (kv.ctypes.data, (576, 64, 1, 6))
    assert memory(address, (count,), "int32").tolist() == [4, 5, 0, 1]


# --- cases ----------------------------------------------------------------------------------------


def test_sampled_rows_hold_the_corners() -> None:
    rows = sample(Case(128, 2, 128, 1024))
    assert 510 <= len(rows) <= 512
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert (rows[0].tolist(), rows[-1].tolist()) == ([0, 0, 0], [127, 1, 127])
    assert sample(Case(1, 1, 1, 64)).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_cases_have_names_of_their_own(section: Any) -> None:
    assert len({case.name for case in section.cases}) == len(section.cases) > 0
    for case in section.cases:
        json.dumps(case.to_json())


def test_ragged_queries_see_what_causality_leaves() -> None:
    mixed = mla.AttentionCase(3, 2, 4, 100, causal=True, decodes=2)
    assert mixed.visible.tolist() == [100, 100, 97, 98, 99, 100]
    assert mixed.requests.tolist() == [0, 1, 2, 2, 2, 2]
    assert mla.AttentionCase(1, 1, 4, 2, causal=True).visible.tolist() == [0, 0, 1, 2]
    (section,) = (section for section in SECTIONS if section.name == "attention")
    for case in section.cases:
        assert case.visible[case.checked].min() >= 64
        assert set(case.requests[case.checked]) == set(range(case.batch))


def test_floors_of_logits() -> None:
    memory_bound, arithmetic = PagedLogitsCase(128, 1, 32768), PagedLogitsCase(128, 4, 32768)
    assert floor_us(memory_bound, CEILINGS) == pytest.approx(128 * 32768 * 136 / 4468e3)
    flops = 2 * 64 * 128 * 128 * sum(32768 - i for i in range(4))
    assert arithmetic.flops == flops
    assert floor_us(arithmetic, CEILINGS) == pytest.approx(flops / 1356e6)
    prefill = PrefillLogitsCase(2, 3)
    assert (prefill.flops, prefill.nbytes) == (2 * 64 * 128 * (2 + 3), 3 * 132 + 2 * 3 * 4)


@pytest.mark.parametrize("case", [AppendCase(64, 64), AppendCase(1000, 1), CacheCase("", 128)])
def test_rows_are_whole_pages_of_about_the_bytes(case: Any) -> None:
    page = getattr(case, "page_size", 64)
    assert case.tokens % page == 0
    both = 2 if isinstance(case, AppendCase) else 1
    assert 0 <= both * case.mbytes * 10**6 - case.nbytes < 2 * 1152 * page
