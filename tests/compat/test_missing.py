# SPDX-License-Identifier: Apache-2.0
"""A name that a face lacks: the error says which library has it."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import cumla.compat

pytest.importorskip("torch")

FACES = {
    "flash_attn": "flash_attn_interface",
    "vllm_flash_attn": "vllm.vllm_flash_attn",
    "flash_mla": "flash_mla",
    "deep_gemm": "deep_gemm",
    "auto_deploy": "tensorrt_llm._torch.auto_deploy",
    "flashinfer": "flashinfer",
    "vllm_minimax_m3": "vllm.models.minimax_m3.common.ops",
}


def faces() -> list[str]:
    """The public modules of the faces; those of AutoDeploy are there for its own use."""
    found = pkgutil.walk_packages(cumla.compat.__path__, "cumla.compat.")
    names = [module.name for module in found]
    return [n for n in names if "._" not in n and ".auto_deploy." not in n]


@pytest.mark.parametrize("face", ["cumla.compat.flashinfer", "cumla.compat.flashinfer.decode"])
def test_a_missing_name_with_a_successor(face: str) -> None:
    name = "BatchDecodeMlaWithPagedKVCacheWrapper"
    says = rf"^{name}: {face} does not have it; use BatchMLAPagedAttentionWrapper of cumla"
    with pytest.raises(AttributeError, match=says):
        getattr(importlib.import_module(face), name)


@pytest.mark.parametrize("face", faces())
def test_a_missing_name(face: str) -> None:
    _, _, top, *rest = face.split(".")
    library = ".".join([FACES[top], *rest])
    module = importlib.import_module(face)
    says = rf"^sparse_prefill: {face} does not have it; import it from {library}(,|$)"
    with pytest.raises(AttributeError, match=says) as caught:
        module.sparse_prefill  # noqa: B018
    assert caught.value.name == "sparse_prefill"
    with pytest.raises(ImportError, match=says):
        exec(f"from {face} import sparse_prefill")
    assert not hasattr(module, "sparse_prefill")
    assert getattr(module, "sparse_prefill", 5) == 5
    exec(f"from {face} import *")
