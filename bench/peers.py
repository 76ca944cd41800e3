# SPDX-License-Identifier: Apache-2.0
"""Published figures of other libraries, brought to the GPU at hand.

``peers.json`` holds times that were measured on another GPU, with its ceilings. A time is scaled by
the ratio of the two floors of its case: by the read ceilings where memory is the floor, by those of
the matrix product where arithmetic is. Every scaled figure is marked as such wherever it is shown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from cumla.bench.cases import PAGE_SIZE, Case, Ceilings

__all__ = ["PeerTime", "Peers", "beside", "load_peers"]


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
        """Find who ran a case, with pages of 64 tokens.

        Parameters
        ----------
        case : Case
            What was run.
        ceilings : Ceilings
            Of the GPU to scale to.

        Returns
        -------
        dict
            Library to its time. Nobody's figures are known for several kv heads, float16 or ragged
            lengths.
        """
        if case != Case(case.batch, case.q_len, case.heads, case.kv_len):
            return {}
        ratio = case.floor_us(ceilings) / case.floor_us(self.ceilings)
        return {
            row["peer"]: PeerTime(row["us"], row["us"] * ratio, row.get("clock", ""))
            for row in self._of(case, "dense_decode")
            if row["page"] == PAGE_SIZE
        }

    def times(self, case: dict[str, Any], ratio: float) -> dict[str, PeerTime]:
        """Find who ran a case of another operation.

        Parameters
        ----------
        case : dict
            As a row has it: every key must be the same there.
        ratio : float
            By which the times are scaled.

        Returns
        -------
        dict
            Library to its time.
        """
        return {
            row["peer"]: PeerTime(row["us"], row["us"] * ratio, row.get("clock", ""))
            for row in self.rows
            if all(row.get(key) == value for key, value in case.items())
        }

    def schedule_us(self, case: Case) -> float | None:
        """Look up FlashMLA's schedule kernel for a case; launch-bound, so never scaled."""
        times = [row["us"] for row in self._of(case, "schedule") if row["peer"] == "FlashMLA"]
        return float(times[0]) if times else None

    def _of(self, case: Case, operation: str) -> list[dict[str, Any]]:
        wanted = (operation, case.batch, case.q_len, case.heads, case.kv_len)
        keys = ("op", "batch", "q_len", "heads", "kv_len")
        return [row for row in self.rows if tuple(row.get(key) for key in keys) == wanted]


def beside(us: float, times: dict[str, PeerTime]) -> dict[str, dict[str, Any]]:
    """Put the times of peers beside ours, as a row of the results has them."""
    return {
        name: {"us": time.us, "scaled_us": time.scaled_us, "x": time.scaled_us / us}
        | ({"clock": time.clock} if time.clock else {})
        for name, time in times.items()
    }


def load_peers() -> Peers:
    """Read ``cumla/bench/peers.json``."""
    text = resources.files("cumla.bench").joinpath("peers.json").read_text(encoding="utf-8")
    content = json.loads(text)
    return Peers(
        source={key: content[key] for key in ("device", "date", "versions")},
        ceilings=Ceilings.from_json(content["ceilings"]),
        rows=tuple(content["rows"]),
    )
