# SPDX-License-Identifier: Apache-2.0
"""The kernels of a record, and whether today's are the same.

A kernel is the same if its source is, or if its new source is proven, in the evidence of the GPU
tests, to compile to the machine code that was measured.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from cumla.launch import all_specs, module
from cumla.launch.source import KernelSpec, cubin_name, digest

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "tests/gpu/evidence"

Known = dict[str, Any]  # digests of an entry point: ``source``, and ``cubins`` by NVRTC


def known_of(spec: KernelSpec, nvrtc: str) -> Known:
    """Digests of an entry point that is measured; of its machine code if it came from a folder."""
    found: Known = {"source": digest(spec)}
    folder = module.cubin_dir()
    path = None if folder is None else folder / cubin_name(spec)
    if path is not None and path.exists():
        from tests.gpu.tools.cubins import digest_of  # the repository's, like this folder

        with suppress(ValueError):  # code that cannot be compared: only the same source is the same
            found["cubins"] = {nvrtc: digest_of(path.read_bytes())}
    return found


def changed(known: dict[str, Known], evidence: Path = EVIDENCE) -> list[str]:
    """List the entry points of a record that today's package has not, or not with such code."""
    now = {spec.entry: spec for spec in all_specs()}
    return [
        entry
        for entry, then in known.items()
        if entry not in now or not _is_same(now[entry], then, evidence)
    ]


def _is_same(spec: KernelSpec, then: Known, evidence: Path) -> bool:
    source = digest(spec)
    if source == then["source"]:
        return True
    path = evidence / f"{spec.stem}.json"
    entries = json.loads(path.read_text("utf-8"))["entries"] if path.exists() else {}
    proven = entries.get(spec.entry, {})
    if proven.get("source") != source:
        return False
    cubins = proven.get("cubins", {})
    measured = then.get("cubins", {})
    return any(cubins.get(nvrtc) == code for nvrtc, code in measured.items())
