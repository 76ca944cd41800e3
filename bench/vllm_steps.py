# SPDX-License-Identifier: Apache-2.0
"""Records a decoding step of vLLM's attention layers: cumla's backend beside vLLM's own.

    python -m bench.vllm_steps records/h200-vllm-steps.json

Needs vLLM's package with its compiled FlashMLA and FlashAttention 3, and a GPU. Each part of
`bench.vllm_layers` runs in a process of its own; what one raises becomes a line of the record.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from bench.files import say, write
from bench.frameworks import laid_out, printed_rows
from bench.vllm_layers import PARTS
from cumla.bench.gpu import Gpu
from cumla.bench.run import environment, refuse_slow_kernels
from cumla.bench.section import Column, Row, columns

__all__ = ["main", "run", "to_markdown", "with_ratios"]

PROTOCOL = (
    "A step: vLLM's builder makes the metadata of one new token per request, then one CUDA graph "
    "replays the layers' attention, each over a cache of its own, captured for up to 16,384 "
    "tokens; no projections, no writing of the new token. Queries of backends that multiply in "
    "FP8 are quantised beforehand. us: until a single step is done; graph us: a replay among 4; "
    "burst us: a step among 8 without a wait between them; build us: until the builder returns. "
    "Medians of 3 turns of up to 20 per backend; x: time / cumla's time. error: largest relative "
    "error of a row against float32 over what the backend was given, in the first layer and the "
    "last, also of a replay with other lengths; differs: from cumla's result, in the worst layer. "
    "Pages of 64 tokens, shuffled; bfloat16 but for FP8 caches"
)
_CASE = ("family", "heads", "kv_heads", "cache", "batch", "kv_len", "layers")
_TIMES = ("us", "graph_us", "burst_us", "build_us")


def _ratio(name: str) -> Callable[[Row], str | None]:
    return lambda row: f"{row[f'{name}_x']:.2f}" if f"{name}_x" in row else None


def _small(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}"


_SHOWN = (
    *columns(*_CASE, "backend", "multiplies"),
    *[
        column
        for name in _TIMES
        for column in (Column(name.replace("_", " "), name, "us"), Column("x", _ratio(name)))
    ],
    Column("error", lambda row: _small(row.get("error"))),
    Column("differs", lambda row: _small(row.get("differs"))),
)


def run(seconds: float) -> Iterator[Row]:
    """Run all parts on the current GPU; yield the results so far, fuller each time."""
    refuse_slow_kernels()
    end = time.monotonic() + seconds
    results = environment(Gpu()) | {"protocol": PROTOCOL, "rows": []}
    results["machine"]["vllm"] = metadata.version("vllm")
    for place, (name, cases) in enumerate(PARTS.items()):
        # Later parts share the remaining time, by their numbers of cases.
        rest = sum(map(len, list(PARTS.values())[place:]))
        share = (end - time.monotonic()) * len(cases) / rest
        rows = printed_rows("bench.vllm_layers", name, share)
        results["rows"] += [{"part": name} | row for row in rows]
        yield with_ratios(results)


def with_ratios(results: Row) -> Row:
    """Divide each backend's times by cumla's of the same case."""
    rows = results["rows"]
    for row in rows:
        of_case = (r for r in rows if r.get("backend") == "cumla" and _same_case(r, row))
        own: Row = next(of_case, {})
        for name in _TIMES:
            if name in own and name in row and row is not own:
                row[f"{name}_x"] = row[name] / own[name]
    return results


def _same_case(row: Row, other: Row) -> bool:
    return all(row.get(name) == other.get(name) for name in _CASE)


def to_markdown(results: Row) -> str:
    """Print results for documents: steps, results that are wrong, what did not run."""
    rows = results["rows"]
    parts = [laid_out(_SHOWN, [row for row in rows if "us" in row])]
    parts += [_reason(row) for row in rows if "skipped" in row or "failed" in row]
    parts += [
        f"{_named(row)}: error {_small(row['error'])}"
        for row in rows
        if not row.get("correct", True)
    ]
    return "\n\n".join([*filter(None, parts), f"{results['protocol']}."]) + "\n"


def _reason(row: Row) -> str:
    return f"{_named(row)}: {row.get('skipped') or row.get('failed')}"


def _named(row: Row) -> str:
    names = ("backend", *_CASE) if "family" in row else ("part",)
    return ", ".join(str(row[key]) for key in names if key in row)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record into a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="where the record goes, as JSON")
    parser.add_argument("--seconds", type=float, default=240.0, help="for all of it (240)")
    args = parser.parse_args(arguments)
    for results in run(args.seconds):
        write(args.file, results)
        say(f"{len(results['rows'])} rows")
    sys.stdout.write(to_markdown(results))


if __name__ == "__main__":
    main()
