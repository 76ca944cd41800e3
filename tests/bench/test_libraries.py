# SPDX-License-Identifier: Apache-2.0
"""How one file of a package is loaded that is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.libraries import Libraries

_FILE = """
from dataclasses import dataclass
import vllm._custom_ops as ops
from vllm.config import Config, Kind
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.worker.workspace import is_workspace_manager_initialized

@dataclass
class Step(Config):
    kind = Kind.USUAL
    rows: int

class Dots3NoteTritonMLAImpl(Config):
    def _forward_swa_mqa(self, rows: int | None = None):
        assert not is_workspace_manager_initialized()
        return triton.cdiv(Step(rows).rows, 8)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b)))
    monkeypatch.setitem(sys.modules, "triton.language", SimpleNamespace())
    return tmp_path


def test_one_file_is_loaded_without_its_package(folder: Path) -> None:
    file = folder / "vllm/models/dots3_note/nvidia/attention.py"
    file.parent.mkdir(parents=True)
    file.write_text(_FILE, "utf-8")
    before = set(sys.modules)
    libraries = Libraries(torch=None)
    assert libraries.vllm_windows(None, 17) == 3
    assert not libraries.notes
    assert not [name for name in set(sys.modules) - before if name.startswith("vllm")]


@pytest.mark.usefixtures("folder")
def test_a_file_that_is_not_there_is_a_note() -> None:
    libraries = Libraries(torch=None)
    assert libraries.vllm_mla is None
    (note,) = libraries.notes
    assert "vLLM's TRITON_MLA" in note
    assert "triton_decode_attention.py" in note
