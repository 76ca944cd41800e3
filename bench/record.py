# SPDX-License-Identifier: Apache-2.0
"""Records a benchmark: all sections, host and start times, and other libraries.

    python -m bench.record records/h200.json
    python -m bench.record records/h200-peers.json --peers all --rows 'b*'

Libraries that are installed run in turns with cumla: all of them, on six rows of the table and on
the indexer, unless `--peers` or `--rows` says otherwise. Published times of others stand beside
(peers.py). What has been measured is in the file even if a later step fails.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.decode_peers import PEER_CASES, PEERS, run_peers
from bench.logits_peers import DEEP_GEMM, run_deep_gemm
from bench.peers import add_published, best_peer
from bench.run import run, say, write
from bench.sections import indexer
from bench.start import StartError
from bench.start import measure as measure_start
from cumla.bench.cases import Case, Ceilings, select
from cumla.bench.gpu import Gpu
from cumla.bench.section import Bench, Note, Row

_IN_TURNS = (
    " Peers that are marked as measured ran in this run, on the same inputs, planned or gathered "
    "beforehand, in turns with cumla, whose time in them is own_us: median of 3 turns of 15, of "
    "DeepGEMM of 30 (FA3-MLA: with the best of three numbers of splits; DeepGEMM: paged logits not "
    "cleaned). Those marked as apart are much slower, by a quick timing: median of 15, beside a "
    "time of cumla that is minutes older. The others were measured on the GPU that `peers` names "
    "and are scaled by the ratio of the two GPUs' ceilings (DeepGEMM's prefill with its kernel "
    "that writes -inf)"
)


def record(
    note: Note, cases: tuple[Case, ...] = PEER_CASES, names: tuple[str, ...] = ()
) -> Iterator[Row]:
    """Measure everything, these libraries on these rows; yield the results so far."""
    try:
        start: Row = dict(measure_start())  # before this process uses the GPU
    except StartError as error:
        start = {"failed": str(error)}
    note("import and first calls")
    for results in run(note):
        yield add_published(results | {"start": start})
    results = add_published(results | {"start": start})
    results["protocol"] += "." + _IN_TURNS
    with Gpu() as gpu:
        bench = Bench(gpu, Ceilings.from_json(results["ceilings"]), results=results)
        for case in cases:
            add_decode_peers(bench, case, tuple(name for name in names if name in PEERS), note)
            yield results
        if not names or "deepgemm" in names:
            for logits in indexer.SECTIONS[0].cases:
                add_deep_gemm(bench, logits, note)
                yield results


def add_decode_peers(bench: Bench, case: Case, names: tuple[str, ...], note: Note) -> None:
    """Run libraries on a case, and put them beside its row."""
    runs = run_peers(bench, case, names)
    _add_notes(bench, runs.notes)
    (row,) = (row for row in bench.results["rows"] if Case.from_json(row) == case)
    if "failed" not in row:
        for name, turns in runs.turns.items():
            row["peers"][name] = turns.to_json()
        for name, time in runs.apart.items():
            figures = {"us": time.us, "scaled_us": time.us, "x": time.us / row["us"]}
            row["peers"][name] = figures | {"measured": True, "apart": True}
        row["best_peer"] = best_peer(row["peers"])
    ran = {name: turns.peer for name, turns in runs.turns.items()} | runs.apart
    times = ", ".join(f"{name} {time.us:.1f} us" for name, time in ran.items())
    note(f"{case.name}: {times or 'no peer ran'}")


def add_deep_gemm(bench: Bench, case: indexer.LogitsCase, note: Note) -> None:
    """Run DeepGEMM on a case of the indexer, and put it beside the rows of that shape."""
    runs = run_deep_gemm(bench, case)
    _add_notes(bench, runs.notes)
    wanted, keys = case.to_json(), ("batch", "next_n", "q_len", "kv_len")
    for row in bench.results["indexer"]:
        same = all(row.get(key) == wanted.get(key) for key in keys)
        if same and row["op"] in runs.turns and "failed" not in row:
            row.setdefault("peers", {})[DEEP_GEMM] = runs.turns[row["op"]].to_json()
    times = ", ".join(f"{op} {turns.peer.us:.1f} us" for op, turns in runs.turns.items())
    note(f"{case.name}: {f'{DEEP_GEMM}, {times}' if times else 'no peer ran'}")


def _add_notes(bench: Bench, notes: list[str]) -> None:
    known = bench.results["notes"]
    known += [line for line in notes if line not in known]


def main(arguments: Sequence[str] | None = None) -> None:
    """Record into a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--peers", nargs="+", choices=("none", *PEERS, "deepgemm"), default=[])
    parser.add_argument("--rows", nargs="+", metavar="PATTERN", help="rows on which peers run")
    args = parser.parse_args(arguments)
    names = tuple(args.peers)
    cases = select(args.rows) if args.rows else PEER_CASES
    for results in record(say, () if names == ("none",) else cases, names):
        write(args.file, results)


if __name__ == "__main__":
    main()
