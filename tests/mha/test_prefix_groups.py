# SPDX-License-Identifier: Apache-2.0
"""Requests that share prefixes: what is found, what attention makes of it, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from cumla import PrefixGroups
from tests.fake_cuda import FakeBindings, FakeCuPy
from tests.launch.split.find_prefix_groups_mirror import expected_groups
from tests.prefix_cases import (
    Group,
    batch_of,
    detection_cases,
    make,
    problem_of,
    samples,
)

CASES = detection_cases()


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(name: str) -> None:
    batch, least = CASES[name]
    found = cumla.find_prefix_groups(*batch[:3], page_size=batch.page_size, min_tokens=least)
    group, prefix_len = expected_groups(batch, least)
    assert (found.group.tolist(), found.prefix_len.tolist()) == (group, prefix_len)


def test_the_cases_have_groups() -> None:
    """Of each kind some, or nothing would be tested."""
    lens = {name: expected_groups(*case)[1] for name, case in CASES.items()}
    assert set(lens["none"]) == {0}
    assert set(lens["all"]) == {320}
    assert set(lens["system prompt"]) == {128}  # eight groups, not one of 32 tokens
    assert set(lens["long system prompt"]) == {112}  # one group: the eighth page saves less
    assert set(lens["fork inside a page"]) == {96}
    assert any(lens["hostile"])


def test_arrays_to_write_to() -> None:
    batch, least = CASES["all"]
    given: dict[str, Any] = {"page_size": 16, "min_tokens": least}
    group, prefix_len = np.zeros(40, np.int32), np.zeros(40, np.int32)
    found = cumla.find_prefix_groups(*batch[:3], **given, group=group, prefix_len=prefix_len)
    assert found.group is group
    assert found.prefix_len is prefix_len
    assert prefix_len.tolist() == [320] * 40
    drafts = cumla.find_prefix_groups(*batch[:2], **given, q_len=9)
    assert set(drafts.prefix_len.tolist()) == {304}  # five tokens and four of the last page are new


@pytest.mark.parametrize("sample", samples(24), ids=lambda s: str(s.seed))
def test_groups_change_nothing_on_the_cpu(sample: Any) -> None:
    problem, options = make(sample)
    batch = problem.batch
    groups = cumla.find_prefix_groups(*batch[:3], page_size=batch.page_size, min_tokens=64)
    got = cumla.attention(**problem.given, groups=groups, **options)
    without = cumla.attention(**problem.given, **options)
    rows = slice(0, problem.tokens)
    for one, other in zip(got, without, strict=True):
        assert one[rows].tobytes() == other[rows].tobytes()


# --- refusals -------------------------------------------------------------------------------------


def call(**more: Any) -> Any:
    batch = batch_of([Group(3, 64)], 16)
    given = problem_of(batch, (4, 2), (64, 64), np.float16).given
    groups = cumla.find_prefix_groups(*batch[:3], page_size=16, min_tokens=16)
    return cumla.attention(**{**given, "groups": groups, **more})


def test_a_group_alone() -> None:
    assert call().out.shape == (3, 4, 64)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"window": 7}, "window: needs none beside groups of shared prefixes, got window"),
        ({"mask": cumla.AttentionMask(end=np.zeros(3, np.int32))}, "mask: needs none beside"),
        ({"groups": np.zeros(3, np.int32)}, "groups: needs PrefixGroups, or a pair"),
        (
            {"groups": PrefixGroups(np.zeros(3, np.int32), None)},
            r"groups\[1\]: needs",
        ),
        (
            {"groups": PrefixGroups(np.zeros(2, np.int32), np.zeros(3, np.int32))},
            r"groups\[\d\]: needs",
        ),
        (
            {"groups": PrefixGroups(np.zeros(3, np.int64), np.zeros(3, np.int32))},
            r"groups\[0\]: needs int32",
        ),
    ],
)
def test_refused(more: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call(**more)


def test_tables_that_are_refused() -> None:
    batch = batch_of([Group(3, 64)], 16)
    wide = np.zeros((3, 32), np.int32)
    wide[:, : batch.block_table.shape[1]] = batch.block_table
    with pytest.raises(ValueError, match="block_table: needs contiguous rows beside groups"):
        call(block_table=wide[:, : batch.block_table.shape[1]])
    lists = {"kv_indices": wide[0], "kv_indptr": np.arange(4, dtype=np.int32)}
    with pytest.raises(ValueError, match="groups: needs block_table"):
        call(block_table=None, **lists)


def plan_of(**more: Any) -> cumla.AttentionPlan:
    given: dict[str, Any] = {"page_size": 16, "dtype": "float16", "like": np.zeros(1)}
    return cumla.AttentionPlan(3, 3, 4, 64, num_kv_heads=2, **{**given, **more})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prefix_groups": True}, "max_pages: needs the columns of block_table"),
        ({"max_pages": 7}, "max_pages: needs prefix_groups=True, got 7"),
        ({"prefix_groups": True, "max_pages": 7, "page_size": 0}, "prefix_groups: needs keys in"),
        ({"prefix_groups": True, "max_pages": 7, "window": 9}, "window: needs none beside groups"),
        ({"prefix_groups": True, "max_pages": 7, "mask_form": "rows"}, "mask: needs none beside"),
        ({"prefix_groups": True, "max_pages": 1 << 30}, "block_table: needs at most"),
        ({"prefix_groups": 1, "max_pages": 7}, "prefix_groups: needs True or False"),
    ],
)
def test_plans_that_are_refused(more: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        plan_of(**more)


def test_updates_and_runs_that_are_refused() -> None:
    batch = batch_of([Group(3, 64)], 16)
    given = problem_of(batch, (4, 2), (64, 64), np.float16).given
    groups = cumla.find_prefix_groups(*batch[:3], page_size=16, min_tokens=16)
    lengths: dict[str, Any] = {"kv_lens": batch.kv_lens, "qo_indptr": batch.qo_indptr}
    with pytest.raises(ValueError, match="groups: needs a plan with prefix_groups=True"):
        plan_of().update(**lengths, groups=groups)
    plan = plan_of(prefix_groups=True, max_pages=9)
    with pytest.raises(ValueError, match="groups: needed for a plan with prefix_groups, got None"):
        plan.update(**lengths)
    with pytest.raises(ValueError, match="kv_indptr: needs None for a plan with prefix_groups"):
        plan.update(**lengths, groups=groups, kv_indptr=batch.qo_indptr)
    plan.update(**lengths, groups=groups)
    rest = {n: given[n] for n in ("q", "k", "v", "block_table")}
    with pytest.raises(ValueError, match="block_table: needs the 9 columns of a plan"):
        plan.run(**rest)
    with pytest.raises(TypeError, match="groups: needs to be given to update, got it in run"):
        plan.run(**rest, groups=groups)


def test_queries_that_are_refused() -> None:
    batch = batch_of([Group(3, 64)], 16, (2,))
    given = problem_of(batch, (4, 2), (64, 64), np.float16).given
    del given["qo_indptr"]
    q = given["q"].reshape(3, 2, 4, 64)
    apart = np.zeros((3, 3, 4, 64), np.float16)[:, :2]
    groups = PrefixGroups(np.zeros(3, np.int32), np.full(3, 64, np.int32))
    assert cumla.attention(**given | {"q": q}, groups=groups).out.shape == q.shape
    with pytest.raises(ValueError, match=r"q: needs requests one after the other beside groups"):
        cumla.attention(**given | {"q": apart}, groups=groups)
    wide = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (3, 1 << 30), (1 << 32, 4))
    with pytest.raises(ValueError, match=r"block_table: needs at most 2147483647 entries beside"):
        cumla.attention(**given | {"q": q, "block_table": wide}, groups=groups)


MLA = {"q": np.ones((3, 16, 576), np.float16), "kv_cache": np.ones((20, 16, 576), np.float16)}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"window": 7}, "window: needs none beside groups of shared prefixes, got window"),
        ({"groups": np.zeros(3, np.int32)}, "groups: needs PrefixGroups, or a pair"),
        ({"kv_indices": np.zeros(3, np.int32)}, "groups: needs block_table, got pages in another"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mla_refused(more: Any, message: str) -> None:
    batch = batch_of([Group(3, 64)], 16)
    lengths: dict[str, Any] = {"kv_lens": batch.kv_lens, "qo_indptr": batch.qo_indptr}
    pages: dict[str, Any] = {"block_table": batch.block_table}
    groups = cumla.find_prefix_groups(*batch[:3], page_size=16, min_tokens=16)
    assert cumla.mla_attention(**MLA, **lengths, **pages, groups=groups).out.shape == (3, 16, 512)
    if "kv_indices" in more:
        pages = {"kv_indptr": np.arange(4, dtype=np.int32)}
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        cumla.mla_attention(**{**MLA, **lengths, **pages, "groups": groups, **more})


def test_mla_plans_that_are_refused() -> None:
    numbers: dict[str, Any] = {"page_size": 16, "dtype": "float16", "like": np.zeros(1)}
    with pytest.raises(ValueError, match=r"^max_pages: needs the columns of block_table"):
        cumla.MLAAttentionPlan(3, 3, 16, **numbers, prefix_groups=True)
    with pytest.raises(ValueError, match=r"^max_pages: needs prefix_groups=True, got 7"):
        cumla.MLAAttentionPlan(3, 3, 16, **numbers, max_pages=7)
    with pytest.raises(ValueError, match=r"^window: needs none beside groups"):
        cumla.MLAAttentionPlan(3, 3, 16, **numbers, prefix_groups=True, max_pages=9, window=5)
    plan = cumla.MLAAttentionPlan(3, 3, 16, **numbers, prefix_groups=True, max_pages=9)
    lengths = np.full(3, 70, np.int32), np.arange(4, dtype=np.int32)
    with pytest.raises(
        ValueError, match=r"^groups: needed for a plan with prefix_groups, got None"
    ):
        plan.update(lengths[0], qo_indptr=lengths[1])
    groups = PrefixGroups(np.zeros(3, np.int32), np.full(3, 64, np.int32))
    plan.update(lengths[0], qo_indptr=lengths[1], groups=groups)
    with pytest.raises(ValueError, match=r"^block_table: needs the 9 columns of a plan"):
        plan.run(**MLA, block_table=np.zeros((3, 5), np.int32))


FOUND = [
    ({"page_size": 0}, "page_size: needs a number from 1, got 0; pass the tokens of a page"),
    (
        {"page_size": 1 << 29},
        "page_size: needs max_pages * page_size up to 2147483647, got 5 pages",
    ),
    ({"q_len": 2}, "q_len: needs no qo_indptr beside it, got both; pass one of them"),
    ({"q_len": 0, "qo_indptr": None}, "q_len: needs a number from 1, got 0"),
    ({"min_tokens": 0}, "min_tokens: needs a number from 1, got 0"),
    ({"kv_lens": np.zeros(2, np.int32)}, "kv_lens: needs shape"),
    ({"kv_lens": np.zeros(3)}, "kv_lens: needs int32, got float64"),
    ({"qo_indptr": np.zeros(3, np.int32)}, "qo_indptr: needs shape"),
    ({"block_table": np.zeros((3, 5))}, "block_table: needs int32, got float64"),
    ({"block_table": np.zeros((3, 8), np.int32)[:, ::2]}, "block_table: needs contiguous rows"),
    ({"group": np.zeros(2, np.int32)}, "group: needs shape"),
    ({"prefix_len": np.zeros(3, np.int64)}, "prefix_len: needs int32, got int64"),
]


@pytest.mark.parametrize(("more", "message"), FOUND, ids=[message for _, message in FOUND])
def test_what_is_not_looked_for(more: Any, message: str) -> None:
    given: dict[str, Any] = {
        "block_table": np.zeros((3, 5), np.int32),
        "kv_lens": np.full(3, 70, np.int32),
        "qo_indptr": np.arange(4, dtype=np.int32),
        "page_size": 16,
    }
    with pytest.raises((ValueError, TypeError)) as caught:
        cumla.find_prefix_groups(**given | more)
    assert str(caught.value).startswith(message)


def test_check_mode_sees_other_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among those that the group shares: what kernels cut off from prefixes may be anything."""
    monkeypatch.setenv("CUMLA_CHECK", "1")
    call()
    batch = batch_of([Group(3, 64, (21, 40))], 16)
    given = problem_of(batch, (4, 2), (64, 64), np.float16).given
    want = cumla.attention(**given)
    for lens in ([64, 64, 64], [96, 64, 2**31 - 1], [-1, 96, 96], [79, 79, 79], [15, 2**20, 17]):
        groups = PrefixGroups(np.zeros(3, np.int32), np.array(lens, np.int32))
        got = cumla.attention(**given, groups=groups)
        assert got.out.tobytes() == want.out.tobytes()
    message = r"^groups\[0\]\[1\]: needs another number than request 0's, which has other pages"
    with pytest.raises(ValueError, match=message):
        cumla.attention(**given, groups=PrefixGroups(groups.group, np.full(3, 80, np.int32)))
    other = batch.block_table.copy()
    other[2, 1] += 1
    groups = PrefixGroups(groups.group, np.full(3, 32, np.int32))
    with pytest.raises(ValueError, match=r"^groups\[0\]\[2\]: needs another number than request 0"):
        cumla.attention(**given | {"block_table": other}, groups=groups)
    other[1, 1] += 1  # now the last two have the same page, and the first one another
    with pytest.raises(ValueError, match=r"^groups\[0\]\[1\]: needs another number than request 0"):
        cumla.attention(**given | {"block_table": other}, groups=groups)


@pytest.mark.parametrize("kind", [cumla.AttentionPlan, cumla.MLAAttentionPlan])
def test_batch_invariant_requests_share_nothing(
    kind: Any, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """They launch what they launch without groups, which are checked as ever."""
    is_mha = kind is cumla.AttentionPlan
    sizes = (3, 3, 4, 64) if is_mha else (3, 3, 16)
    numbers: dict[str, Any] = {"page_size": 16, "batch_invariant": True, "max_kv_len": 9000}
    lengths = [cupy.like(np.zeros(size, np.int32)) for size in (3, 4)]
    groups = PrefixGroups(*(cupy.like(np.zeros(3, np.int32)) for _ in range(2)))
    launched = []
    for more in ({}, {"prefix_groups": True, "max_pages": 9}):
        plan = kind(*sizes, **numbers, **more, device=0)
        bindings.launched.clear()
        given = {"groups": groups} if more else {}
        plan.update(lengths[0], qo_indptr=lengths[1], **given)
        launched.append((plan.key, [(one.entry, one.grid) for one in bindings.launched]))
    assert launched[0] == launched[1]
    with pytest.raises(ValueError, match="groups: needed for a plan with prefix_groups, got None"):
        plan.update(lengths[0], qo_indptr=lengths[1])
    with pytest.raises(ValueError, match="needs none beside groups"):
        kind(*sizes, **numbers, **more, window=7, device=0)


def test_the_size_of_a_workspace() -> None:
    numbers: dict[str, Any] = {"num_kv_heads": 2, "sm_count": 132}
    size = cumla.AttentionPlan.workspace_bytes(64, 64, 8, 128, **numbers)
    with_groups = cumla.AttentionPlan.workspace_bytes(
        64, 64, 8, 128, **numbers, prefix_groups=True, max_pages=9
    )
    assert with_groups > size + 2 * 64 * 8 * 128 * 4
    invariant = {"batch_invariant": True, "max_kv_len": 9000, "num_kv_heads": 2, "sm_count": 132}
    for kind, sizes in (
        (cumla.AttentionPlan, (64, 64, 8, 128)),
        (cumla.MLAAttentionPlan, (64, 64, 8)),
    ):
        more = {"prefix_groups": True, "max_pages": 9}
        least = kind.workspace_bytes(*sizes, **invariant)
        assert kind.workspace_bytes(*sizes, **invariant, **more) == least


def test_a_step_inside_jax_jit() -> None:
    """Groups are found, and a plan is updated and run, in one program."""
    jax = pytest.importorskip("jax")
    import cumla.jax

    batch = batch_of([Group(3, 64), Group(1, 48)], 16)
    given = problem_of(batch, (4, 2), (64, 64), np.float16).given
    given |= {name: np.nan_to_num(given[name]) for name in ("k", "v")}

    @jax.jit
    def step(q: Any, k: Any, v: Any, **lengths: Any) -> Any:
        table, kv_lens, qo_indptr = (lengths[n] for n in ("block_table", "kv_lens", "qo_indptr"))
        groups = cumla.find_prefix_groups(table, kv_lens, qo_indptr, page_size=16, min_tokens=16)
        more = {"prefix_groups": True, "max_pages": table.shape[1]}
        plan = cumla.jax.AttentionPlan.from_arrays(q, k, v, qo_indptr=qo_indptr, **more)
        plan = plan.update(kv_lens, qo_indptr=qo_indptr, groups=groups)
        state, plan = plan.run(q, k, v, block_table=table)
        return state, groups

    state, groups = step(**given)
    assert groups.prefix_len.tolist() == [64, 64, 64, 0]
    np.testing.assert_array_equal(np.asarray(state.out), cumla.attention(**given).out)


def test_the_check_mode_looks_at_the_offsets_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    table, lens = np.zeros((3, 4), np.int32), np.full(3, 60, np.int32)
    offsets = np.array([0, 1, -7, 99], np.int32)
    with pytest.raises(ValueError, match=r"^qo_indptr\[2\]"):
        cumla.find_prefix_groups(table, lens, offsets, page_size=16)


@pytest.mark.parametrize("kind", [cumla.AttentionPlan, cumla.MLAAttentionPlan])
def test_updates_with_groups_are_known_again(
    kind: Any, cupy: FakeCuPy, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those without: the same arrays are looked at once, others each time."""
    sizes = (3, 3, 4, 64) if kind is cumla.AttentionPlan else (3, 3, 4)
    plan = kind(*sizes, prefix_groups=True, max_pages=9, device=0)
    looks, update = [], kind._update
    monkeypatch.setattr(kind, "_update", lambda self, *a: (looks.append(a), update(self, *a)))
    arrays = [cupy.like(np.zeros(size, np.int32)) for size in (3, 4, 3, 3, 3)]
    lengths = {"kv_lens": arrays[0], "qo_indptr": arrays[1]}
    groups = [PrefixGroups(arrays[2], arrays[3]), PrefixGroups(arrays[2], arrays[4])]
    for turn in range(4):
        for one in groups:
            bindings.launched.clear()
            plan.update(**lengths, groups=one)
            assert len(bindings.launched) > 1
        if turn == 1:
            looks.clear()
    assert not looks
