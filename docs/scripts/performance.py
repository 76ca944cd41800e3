# SPDX-License-Identifier: Apache-2.0
"""Writes docs/performance.md and the README's table from recorded benchmark runs.

    python docs/scripts/performance.py

The tables are those of ``python -m bench --markdown``. A test compares both files with what
this script makes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import frameworks  # noqa: E402
from bench.report import parts as parts_of  # noqa: E402
from bench.report import to_markdown  # noqa: E402

Results = dict[str, Any]

# The beginning of a table's first line -> the heading above it. No heading: it continues.
HEADINGS = {
    "| batch |": "Dense decoding",
    "| ragged:": "Decoding with ragged lengths",
    "| batch-invariant:": "The batch-invariant mode",
    "| schedule:": "The schedule of a decoding step",
    "| ragged queries:": "Queries of different lengths",
    "| page sizes:": "Page sizes",
    "| FP8 caches:": "FP8 caches",
    "| forms:": "The same work in other forms",
    "| merge:": "Merging partial results",
    "| append:": "Writing into the cache",
    "| indexer:": "The indexer",
    "| quantize_fp8:": "Quantising",
    "| append_indexer_cache:": "Writing the indexer's cache",
    "Host time": "Host and start times",
    "Times:": "How to read the tables",
}
PEERS = "| peers of this run: batch |"
# Rows of the README: batch, q_len, heads, kv_len.
DENSE = ((128, 1, 16, 4096), (128, 1, 128, 4096))

INTRODUCTION = """\
# Performance

<!-- Written by docs/scripts/performance.py: change that script, not this page. -->

All figures come from two recorded runs. The run of {date} holds digests of the kernels that it
measured ([h200.json](../records/h200.json)). FlashMLA, FlashAttention-3, FlashInfer, PyTorch and a
Triton kernel ran on {peers_date}, on the same inputs in turns with an earlier version of cumla's
kernels ([h200-peers.json](../records/h200-peers.json)). Ratios marked \\* are not
measured: they are published times, scaled by the ceilings of the two GPUs.

Every case is compared with a float64 result before it is timed. A single call is timed with an L2
cache full of other data. Machines differ by several per cent, so compare efficiencies and ratios of
one run, not microseconds of two runs.

`python -m cumla bench` measures the dense table on your GPU. `python -m bench` in the repository
measures all tables.
"""

CURVES = """\
## Over the KV length

![Time and efficiency over the KV length, batch 128](figures/kv-length-b128-s1.svg)

![Time and efficiency over the KV length, batch 1](figures/kv-length-b1-s1.svg)

![Roofline of the dense rows](figures/roofline.svg)
"""

BESIDE = """\
## Beside other libraries

![Time of FlashMLA, FlashAttention-3 and FlashInfer relative to cumla](figures/peers.svg)

x is the time of the other library divided by cumla's time in turns with it. ^ marks a library that
a quick timing found more than 1.5 times slower: it ran apart.
"""


INSIDE = """\
## Inside JAX and PyTorch

A decoding step of 32 layers ran in each framework on {date}
([h200-frameworks.json](../records/h200-frameworks.json), {gpu}, JAX {jax}, PyTorch {torch}):
`append_mla_cache` and `mla_decode`, or `append_kv_cache` and `attention` with heads of 128, by one
schedule. The last table compares a step in JAX with 1.2 times CuPy's CUDA graph of the same step
and XLA's own floor.
"""


def page(results: Results, peers: Results, inside: Results | None = None) -> str:
    """Make docs/performance.md.

    Parameters
    ----------
    results : dict
        The recorded run of the present kernels.
    peers : dict
        The recorded run in turns with other libraries.
    inside : dict, optional
        The recorded run of steps inside JAX and PyTorch.

    Returns
    -------
    str
    """
    dates = {"date": results["date"][:10], "peers_date": peers["date"][:10]}
    parts = [INTRODUCTION.format(**dates).strip()]
    for part in to_markdown(parts_of(results)).strip().split("\n\n"):
        heading = next((HEADINGS[start] for start in HEADINGS if part.startswith(start)), None)
        if heading is not None:
            parts.append(f"## {heading}")
        parts.append(part)
    table = next(
        part for part in to_markdown(parts_of(peers)).split("\n\n") if part.startswith(PEERS)
    )
    if inside is not None:
        text = INSIDE.format(date=inside["date"][:10], **inside["machine"])
        parts += [text.strip(), frameworks.to_markdown(inside).strip()]
    parts += [BESIDE.strip(), table.replace(PEERS, "| batch |", 1), CURVES.strip()]
    return "\n\n".join(parts) + "\n"


def readme_table(results: Results) -> str:
    """Make the five rows of the README.

    Parameters
    ----------
    results : dict
        The recorded run of the present kernels.

    Returns
    -------
    str
    """
    table = ["| call | us | TFLOP/s | GB/s | efficiency |", "|---|---:|---:|---:|---:|"]
    for name, row in _readme_rows(results):
        time = f"{row['us']:,.1f}" if row["us"] < 100 else f"{row['us']:,.0f}"
        rates = (f"{row[key]:,.0f}" if key in row else "-" for key in ("tflops", "gbps"))
        table.append(f"| {name} | {time} | {' | '.join(rates)} | {row['efficiency']:.2f} |")
    return "\n".join(table)


def readme_line(results: Results) -> str:
    """Make the last of the README's first lines, which names one row of the table."""
    name, row = next(_readme_rows(results))
    gpu = results["machine"]["gpu"].removeprefix("NVIDIA ")
    return (
        f"On one {gpu}: {name} takes {row['us']:,.0f} us, {row['efficiency']:.2f} of what its "
        "bytes allow ([all tables](docs/performance.md))."
    )


def _readme_rows(results: Results) -> Iterator[tuple[str, dict[str, Any]]]:
    for batch, q_len, heads, kv_len in DENSE:
        row = _find(results["rows"], batch=batch, q_len=q_len, heads=heads, kv_len=kv_len)
        requests = "1 request" if batch == 1 else f"{batch} requests"
        yield f"`mla_decode`, {requests}, q_len {q_len}, {heads} heads, {kv_len:,} tokens", row
    row = _find(results["attention"], batch=1, heads=128, q_len=2048, kv_len=8192, causal=True)
    yield "`mla_attention`, a chunk of 2,048 queries, 128 heads, 8,192 tokens", row
    row = _find(results["fp8"], batch=128, heads=16, kv_len=8192)
    row = _find(row["formats"], format="e4m3")
    row = row | {"efficiency": row["read_share"]}
    yield "`mla_decode`, e4m3 cache, 128 requests, q_len 1, 16 heads, 8,192 tokens", row
    row = _find(results["indexer"], op="paged_mqa_logits", batch=64, next_n=1, kv_len=32768)
    yield "`paged_mqa_logits`, 64 requests, 64 heads of 128, 32,768 tokens", row


def _find(rows: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    return next(row for row in rows if all(row.get(key) == values[key] for key in values))


def with_parts(readme: str, results: Results) -> str:
    """Put what follows from the record into the README.

    Parameters
    ----------
    readme : str
    results : dict
        The recorded run of the present kernels.

    Returns
    -------
    str
    """
    parts = {
        r"^\| call \|.*?\n\n": readme_table(results) + "\n\n",
        r"^On one [^\n]*\n": readme_line(results) + "\n",
    }
    for pattern, part in parts.items():
        readme, count = re.subn(pattern, lambda _: part, readme, count=1, flags=re.M | re.S)  # noqa: B023
        if not count:
            raise ValueError(f"README.md has no {pattern}")
    return readme


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "records/h200.json")
    parser.add_argument("--peers", type=Path, default=ROOT / "records/h200-peers.json")
    parser.add_argument("--inside", type=Path, default=ROOT / "records/h200-frameworks.json")
    paths = parser.parse_args()
    results, peers, inside = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        for path in (paths.results, paths.peers, paths.inside)
    )
    (ROOT / "docs/performance.md").write_text(page(results, peers, inside), encoding="utf-8")
    readme = ROOT / "README.md"
    text = with_parts(readme.read_text(encoding="utf-8"), results)
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
