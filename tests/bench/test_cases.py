# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from cumla.bench.cases import DENSE, Case, Ceilings, select
from cumla.bench.peers import load_peers

H200 = Ceilings(read_gbps=4468, copy_gbps=4191, matmul_tflops=754, empty_us=3.7)


@pytest.mark.parametrize(
    ("case", "floor"),
    [
        (Case(128, 1, 128, 1024), 48.4),
        (Case(128, 1, 128, 16384), 774.7),
        (Case(128, 2, 128, 1024), 96.8),
        (Case(128, 1, 64, 4096), 139.2),
        (Case(128, 1, 16, 8192), 271.4),
        (Case(16, 1, 16, 8192), 33.9),
        (Case(1, 1, 128, 8192), 3.0),
        (Case(4, 1, 16, 131072), 135.2),
    ],
)
def test_floors_of_an_h200(case: Case, floor: float):
    assert case.floor_us(H200) == pytest.approx(floor, abs=0.06)


def test_masked_pairs_do_not_count():
    assert Case(1, 2, 1, 64).flops == 2 * (63 + 64) * (576 + 512)


def test_table_has_24_rows_of_whole_pages():
    assert len(DENSE) == len(set(DENSE)) == 24
    assert all(case.kv_len % 64 == 0 for case in DENSE)


def test_select_by_pattern_keeps_the_order():
    names = [case.name for case in select(["b1-*-h16-*", "b128-s1-h128-kv1024"])]
    assert names == ["b128-s1-h128-kv1024", "b1-s1-h16-kv8192", "b1-s1-h16-kv131072"]
    assert select([]) == DENSE


def test_select_refuses_a_pattern_without_match():
    with pytest.raises(ValueError, match=r"rows: 'b3-\*' matches none of b128-s1-h128-kv1024, "):
        select(["b1-*", "b3-*"])


def test_ceilings_survive_json():
    assert Ceilings.from_json(H200.to_json()) == H200


def test_peers_of_every_row():
    peers = load_peers()
    assert peers.ceilings == H200
    for case in DENSE:
        found = peers.dense(case, H200)
        assert {"FlashMLA", "FA3-MLA"} <= set(found)
        for time in found.values():
            assert time.scaled_us == pytest.approx(time.us)  # the same GPU
    found = peers.dense(Case(128, 1, 128, 4096), H200)
    assert (found["FlashMLA"].us, found["FlashMLA"].clock) == (236.26, "")
    assert "back-to-back" in found["FlashInfer"].clock


def test_peers_are_scaled_by_what_bounds_the_case():
    slow_memory = Ceilings(read_gbps=2234, copy_gbps=1, matmul_tflops=754, empty_us=1)
    peers = load_peers()
    few_heads = peers.dense(Case(128, 1, 16, 4096), slow_memory)["FlashMLA"]
    many_heads = peers.dense(Case(128, 2, 128, 4096), slow_memory)["FlashMLA"]
    assert few_heads.scaled_us == pytest.approx(2 * few_heads.us)
    assert many_heads.scaled_us == pytest.approx(many_heads.us)


def test_schedule_peers():
    peers = load_peers()
    assert peers.schedule_us(Case(128, 1, 128, 4096)) == 25.09
    assert peers.schedule_us(Case(1024, 1, 128, 4096)) is None
