# SPDX-License-Identifier: Apache-2.0
"""MiniMax M3 in vLLM: cumla's functions in the place of Triton's, where CUSTOM is asked for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import cumla.vllm
from cumla.compat import vllm_minimax_m3 as functions
from tests.vllm import stub
from tests.vllm.stub import stubbed

torch = pytest.importorskip("torch")

# As in vLLM 0.33; `select_main_impl_cls` is what 0.26 has.
ATTENTION = """
minimax_m3_sparse_attn = minimax_m3_sparse_attn_decode = lambda *args, **options: "theirs"

class Impl:
    def forward(self, *args):
        return minimax_m3_sparse_attn_decode(*args)

def select_main_backend_and_impl_cls(*, topk_blocks, kv_cache_dtype, num_kv_heads):
    return None, Impl

def select_main_impl_cls(*, topk_blocks, kv_cache_dtype):
    return Impl
"""
INDEXER = """
minimax_m3_index_decode = minimax_m3_index_score = lambda *args, **options: "theirs"
minimax_m3_index_topk = minimax_m3_index_score

class Impl:
    def forward(self, *args):
        return minimax_m3_index_decode(*args)
"""
MODEL = "from of_vllm.attention import {}\n"
SELECT = ("select_main_backend_and_impl_cls", "select_main_impl_cls")


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that stands for vLLM's, whose model is imported later."""
    folder = tmp_path / "of_vllm"
    folder.mkdir()
    for name, text in (
        *(("__init__", ""), ("attention", ATTENTION), ("indexer", INDEXER)),
        ("model", MODEL.format(SELECT[0])),
    ):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cumla.vllm.InMiniMaxM3, "name", "of_vllm.model")
    homes = zip(("of_vllm.attention", "of_vllm.indexer"), functions._HOMES.values(), strict=True)
    monkeypatch.setattr(functions, "_HOMES", dict(homes))
    with stubbed():
        from cumla.vllm import minimax_m3

        minimax_m3.attend.cache_clear()
        yield folder
        minimax_m3.attend.cache_clear()
    for name in [each for each in sys.modules if each.split(".")[0] == "of_vllm"]:
        del sys.modules[name]


def chosen(backend: Any = stub.Backends.CUSTOM) -> tuple[Any, Any]:
    """Return what layers of vLLM's model call: the classes of attention and of the indexer."""
    cumla.vllm.register()
    from vllm.config import get_current_vllm_config

    get_current_vllm_config().attention_config.backend = backend
    model: Any = import_module("of_vllm.model")
    name = next(name for name in SELECT if hasattr(model, name))
    numbers = {"topk_blocks": 16, "kv_cache_dtype": "auto"}
    numbers |= {"num_kv_heads": 1} if name == SELECT[0] else {}
    found = getattr(model, name)(**numbers)
    return found[1] if name == SELECT[0] else found, import_module("of_vllm.indexer").Impl


@pytest.mark.parametrize("is_late", [True, False])
def test_other_backends_keep_vllms_functions(is_late: bool) -> None:
    if is_late:
        import_module("of_vllm.model")
    for impl in chosen(stub.Backends.FLASH_ATTN):
        assert impl().forward() == "theirs"


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("name", SELECT)
def test_layers_call_cumla(
    is_late: bool, name: str, modules: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step of decoding, as vLLM's classes call it; layers say it once."""
    (modules / "model.py").write_text(MODEL.format(name))
    if is_late:
        import_module("of_vllm.model")
    with caplog.at_level(logging.INFO):
        attention, indexer = chosen()
        assert chosen() == (attention, indexer)
    said = [line for line in caplog.messages if "layers of MiniMax M3" in line]
    assert len(said) == 1
    assert said[0].startswith("cumla attends in layers of MiniMax M3 that choose blocks: block_att")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 128, generator=generator).bfloat16()
    cache = torch.randn(6, 1, 128, 256, generator=generator).bfloat16()
    keys = torch.randn(6, 128, 128, generator=generator).bfloat16()
    table, lens = torch.tensor([[0, 3, 2], [5, 4, 1]]).int(), torch.tensor([300, 200]).int()
    lists = indexer().forward(q[:, :1], keys, table, lens, 384, 2, 0, 1, 1, 1, 1)
    assert lists.shape == (1, 2, 2)
    assert lists[0, :, 1].tolist() == [2, 1]  # the own block is forced
    out = torch.empty_like(q)
    attention().forward(q, cache, lists, table, lens, 1, 128**-0.5, out, 1)
    for request, blocks in enumerate(lists[0].tolist()):
        tokens = [t for t in range(int(lens[request])) if t // 128 in blocks]
        rows = torch.stack([cache[table[request, t // 128], 0, t % 128] for t in tokens]).float()
        weights = (q[request].float() @ rows[:, :128].T * 128**-0.5).softmax(-1)
        torch.testing.assert_close(
            out[request].float(), weights @ rows[:, 128:], rtol=2e-2, atol=2e-2
        )


def test_a_version_with_other_functions_is_refused(modules: Path) -> None:
    text = INDEXER.replace("minimax_m3_index_topk", "select")
    (modules / "indexer.py").write_text(text)
    wanted = r"of_vllm.indexer.minimax_m3_index_topk: needs a function .*; leave out --attention-ba"
    with pytest.raises(RuntimeError, match=wanted):
        chosen()
    impl: Any = import_module("of_vllm.attention").Impl
    assert impl().forward() == "theirs"
