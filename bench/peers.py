# SPDX-License-Identifier: Apache-2.0
"""Published times of other libraries, scaled to the GPU at hand.

``peers.json`` holds times that were measured on another GPU, with its ceilings. A time is scaled by
the ratio of the two floors of its case: by the read ceilings where memory is the floor, by those of
the matrix product where arithmetic is. Every scaled figure is marked as such wherever it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.sections.indexer import LogitsCase, PagedLogitsCase, PrefillLogitsCase, floor_us
from bench.sections.sparse import SparseCase
from cumla.bench.cases import PAGE_SIZE, Case, Ceilings
from cumla.bench.timing import Timing

__all__ = ["PeerTime", "Peers", "Turns", "add_published", "best_peer", "load_peers"]

Row = dict[str, Any]


class Turns(NamedTuple):
    """Times of two libraries in turns: cumla's and the other one's."""

    own: Timing
    peer: Timing

    def to_json(self) -> Row:
        """Describe it as the entry of a peer that ran in this run."""
        us, own_us = self.peer.us, self.own.us
        return {"us": us, "scaled_us": us, "own_us": own_us, "x": us / own_us, "measured": True}


@dataclass(frozen=True, slots=True)
class PeerTime:
    """What another library took for a case.

    Attributes
    ----------
    us : float
        As measured on the other GPU.
    scaled_us : float
        Scaled to the ceilings of this one.
    clock : str
        How it was timed, if not as the cases here are.
    """

    us: float
    scaled_us: float
    clock: str = ""


@dataclass(frozen=True)
class Peers:
    """The file of peers.

    Attributes
    ----------
    source : dict
        Its device, date and the versions of the libraries.
    ceilings : Ceilings
        Of its device.
    rows : tuple of dict
        What was measured.
    """

    source: dict[str, Any]
    ceilings: Ceilings
    rows: tuple[dict[str, Any], ...]

    def dense(self, case: Case, ceilings: Ceilings) -> dict[str, PeerTime]:
        """Find who ran a case, with pages of 64 tokens; times scaled to these ceilings.

        None are known for several kv heads, float16 or ragged lengths.
        """
        if case != Case(case.batch, case.q_len, case.heads, case.kv_len):
            return {}
        ratio = case.floor_us(ceilings) / case.floor_us(self.ceilings)
        return {
            row["peer"]: PeerTime(row["us"], row["us"] * ratio, row.get("clock", ""))
            for row in self.rows
            if row["op"] == "dense_decode" and row["page"] == PAGE_SIZE and _is_of(row, case)
        }

    def times(self, case: dict[str, Any], ratio: float) -> dict[str, PeerTime]:
        """Find who ran a case of another operation, given as a row; times scaled by a ratio."""
        return {
            row["peer"]: PeerTime(row["us"], row["us"] * ratio, row.get("clock", ""))
            for row in self.rows
            if all(row.get(key) == value for key, value in case.items())
        }


def _is_of(row: Row, case: Case) -> bool:
    shape = {"batch": case.batch, "q_len": case.q_len, "heads": case.heads, "kv_len": case.kv_len}
    return all(row.get(key) == value for key, value in shape.items())


def best_peer(found: dict[str, Row]) -> str | None:
    """Name the library whose time is closest to cumla's, or below it."""
    return min(found, key=lambda name: found[name]["x"], default=None)


def add_published(results: Row) -> Row:
    """Put published times beside those of a run, scaled to its GPU's ceilings.

    Rows get ``peers`` and ``best_peer``; schedules get ``flash_mla_us`` or ``deep_gemm_us``, which
    are launch-bound and so never scaled.
    """
    peers, ceilings = load_peers(), Ceilings.from_json(results["ceilings"])
    results["peers"] = peers.source
    for row in results["rows"]:
        times = {} if "failed" in row else peers.dense(Case.from_json(row), ceilings)
        row["peers"] = {} if "failed" in row else beside(row["us"], times)
        row["best_peer"] = best_peer(row["peers"])
    for row in results.get("schedule", ()):
        shape = {"op": "schedule", "batch": row["batch"], "q_len": 1, "heads": row["heads"]}
        times = peers.times(shape | {"kv_len": row["kv_len"]}, 1.0)
        known = "FlashMLA" in times and row["lengths"] == "equal"
        row["flash_mla_us"] = times["FlashMLA"].us if known else None
    for row in results.get("indexer", ()):
        if "failed" in row:
            continue
        if row["op"] in _LOGITS:
            row["peers"] = beside(row["us"], _of_logits(row, ceilings, peers))
        if row["op"] == "paged_schedule":
            keys = ("op", "batch", "next_n", "kv_len")
            times = peers.times({key: row[key] for key in keys}, 1.0)
            row["deep_gemm_us"] = next((time.us for time in times.values()), None)
    for row in results.get("sparse", ()):
        if "failed" not in row and row["op"].startswith(("sparse_decode", "sparse_prefill")):
            row["peers"] = beside(row["us"], _of_lists(row, ceilings, peers))
    return results


_LOGITS: dict[str, Callable[[Row], LogitsCase]] = {
    "paged_mqa_logits": lambda row: PagedLogitsCase(row["batch"], row["next_n"], row["kv_len"]),
    "mqa_logits": lambda row: PrefillLogitsCase(row["q_len"], row["kv_len"]),
}


def _of_logits(row: Row, ceilings: Ceilings, peers: Peers) -> dict[str, PeerTime]:
    """Find who ran a case; a prefill with the kernel that writes -inf, which memory bounds."""
    case = _LOGITS[row["op"]](row)
    ratio = floor_us(case, ceilings) / floor_us(case, peers.ceilings)
    times = peers.times(case.to_json(), ratio)
    if row["op"] == "paged_mqa_logits":
        return times
    share = peers.ceilings.read_gbps / ceilings.read_gbps
    cleaning = peers.times(case.to_json() | {"op": "clean_logits"}, share)
    return {
        name: replace(time, us=time.us + clean.us, scaled_us=time.scaled_us + clean.scaled_us)
        for name, time in times.items()
        if (clean := cleaning.get(name)) is not None
    }


def _of_lists(row: Row, ceilings: Ceilings, peers: Peers) -> dict[str, PeerTime]:
    """Find who ran a case; how long contexts are makes no difference to a decoding step."""
    case = SparseCase(**{name: row[name] for name in SparseCase.__dataclass_fields__})
    ratio = case.floor_us(ceilings) / case.floor_us(peers.ceilings)
    varies = "kv_len" if case.prefill else "batch"
    return peers.times({key: row[key] for key in ("op", varies, "q_len", "heads", "topk")}, ratio)


def beside(us: float, times: dict[str, PeerTime]) -> dict[str, Row]:
    """Put the times of peers beside ours, as a row of the results has them."""
    return {
        name: {"us": time.us, "scaled_us": time.scaled_us, "x": time.scaled_us / us}
        | ({"clock": time.clock} if time.clock else {})
        for name, time in times.items()
    }


def load_peers() -> Peers:
    """Read ``peers.json`` beside this file."""
    content = json.loads(Path(__file__).with_name("peers.json").read_text(encoding="utf-8"))
    return Peers(
        source={key: content[key] for key in ("device", "date", "versions")},
        ceilings=Ceilings.from_json(content["ceilings"]),
        rows=tuple(content["rows"]),
    )
