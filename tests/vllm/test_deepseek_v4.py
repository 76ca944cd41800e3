# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 in vLLM: cumla's functions in the place of FlashMLA's, where CUSTOM is asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import cumla
import cumla.vllm
from cumla.compat import flash_mla
from tests.vllm import stub
from tests.vllm.stub import stubbed

torch = pytest.importorskip("torch")
LAYER = """
from of_vllm.swa import get_mla_metadata
flash_mla_with_kvcache = flash_mla_sparse_fwd = lambda *args, **options: "theirs"

class Attention:
    @classmethod
    def get_padded_num_q_heads(cls, num_heads):
        return 64

    @staticmethod
    def decode(**options):
        return flash_mla_with_kvcache(block_table=None, cache_seqlens=None, **options)

    @staticmethod
    def prefill(**options):
        return flash_mla_sparse_fwd(**options)
"""
MODEL = """
from of_vllm.layer import Attention

def _select_dsv4_attn_cls(vllm_config):
    return Attention
"""
SWA = "get_mla_metadata = lambda: ('theirs', None)\n"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that stands for vLLM's, whose model is imported later."""
    folder = tmp_path / "of_vllm"
    folder.mkdir()
    for name, text in (("__init__", ""), ("layer", LAYER), ("model", MODEL), ("swa", SWA)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cumla.vllm.InDeepSeekV4, "name", "of_vllm.model")
    with stubbed():
        from cumla.vllm import deepseek_v4

        monkeypatch.setattr(deepseek_v4, "_METADATA", "of_vllm.swa")
        yield folder
    for name in [each for each in sys.modules if each.split(".")[0] == "of_vllm"]:
        del sys.modules[name]


def chosen(backend: Any = stub.Backends.CUSTOM) -> Any:
    """The class that vLLM's model takes for its layers."""
    cumla.vllm.register()
    return taken(backend)


def taken(backend: Any = stub.Backends.CUSTOM) -> Any:
    """The same, of a plugin that is there already."""
    from vllm.config import get_current_vllm_config

    get_current_vllm_config().attention_config.backend = backend
    model: Any = import_module("of_vllm.model")
    return model._select_dsv4_attn_cls(None)


@pytest.mark.parametrize("is_late", [True, False])
def test_other_backends_keep_vllms_functions(is_late: bool) -> None:
    if is_late:
        import_module("of_vllm.model")
    layer = chosen(stub.Backends.FLASH_ATTN)
    assert layer is import_module("of_vllm.layer").Attention
    assert layer.prefill() == "theirs"
    assert import_module("of_vllm.swa").get_mla_metadata() == ("theirs", None)


@pytest.mark.parametrize("is_late", [True, False])
def test_queries_are_padded_to_fewer_heads(is_late: bool) -> None:
    if is_late:
        import_module("of_vllm.model")
    layer = chosen()
    padded = [layer.get_padded_num_q_heads(n) for n in (1, 8, 16, 17, 64, 65, 128)]
    assert padded == [16, 16, 16, 32, 64, 128, 128]
    assert chosen().__mro__[1] is import_module("of_vllm.layer").Attention  # once more: the same


@pytest.mark.parametrize("has_second", [False, True])
def test_layers_decode_by_cumla(has_second: bool) -> None:
    """As vLLM calls it: a request for each token, padded heads, lists of both caches."""
    layer, tokens, heads = chosen(), 3, 8
    generator = torch.Generator().manual_seed(0)
    caches = []
    for pages, page, stride in ((6, 64, 64 * 584 + 64), (20, 2, 2 * 584)):  # vLLM aligns pages
        cache = torch.zeros(pages, stride, dtype=torch.uint8)
        cache = cache.as_strided((pages, page, 1, 584), (stride, 584, 584, 1))
        rows = torch.randn(pages * page, 512, generator=generator).bfloat16()
        cumla.append_mla_cache(rows, cache, torch.arange(pages * page))
        caches.append(cache)
    q = torch.zeros(tokens, 1, 16, 512, dtype=torch.bfloat16)
    q[:, :, :heads] = torch.randn(tokens, 1, heads, 512, generator=generator)
    sinks = torch.full((16,), -torch.inf)
    sinks[:heads] = torch.randn(heads, generator=generator)
    lists = [torch.randint(n, (tokens, 1, 128), generator=generator).int() for n in (384, 40)]
    lens = [torch.tensor(each).int() for each in ((128, 5, 0), (17, 40, 0))]
    second, named = {}, {}
    if has_second:
        keys = "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"
        second = dict(zip(keys, (caches[1], lists[1], lens[1]), strict=True))
        keys = "extra_kv_cache", "extra_indices", "extra_topk_lens"
        named = dict(zip(keys, second.values(), strict=True))
    metadata = import_module("of_vllm.swa").get_mla_metadata()[0]
    assert isinstance(metadata, flash_mla.FlashMLASchedMeta)
    out = torch.full((tokens, 1, 16, 512), 7.0).bfloat16()
    for _ in range(2):  # layers
        layer.decode(
            q=q,
            k_cache=caches[0],
            head_dim_v=512,
            tile_scheduler_metadata=metadata,
            is_fp8_kvcache=True,
            indices=lists[0],
            topk_length=lens[0],
            softmax_scale=512**-0.5,
            attn_sink=sinks,
            out=out,
            **second,
        )
    found = cumla.mla_sparse_decode(q, caches[0], lists[0], topk_lens=lens[0], sinks=sinks, **named)
    torch.testing.assert_close(out, found.out)
    assert bool(out[2].eq(0).all())


def test_layers_prefill_by_cumla() -> None:
    layer = chosen()
    q, rows = torch.randn(5, 16, 512).bfloat16(), torch.randn(40, 1, 512).bfloat16()
    lists, lens = torch.randint(40, (5, 1, 128)).int(), torch.tensor([1, 5, 0, 128, 40]).int()
    sinks, out = torch.randn(16), torch.empty(5, 16, 512, dtype=torch.bfloat16)
    options = {"sm_scale": 0.05, "attn_sink": sinks, "topk_length": lens, "out": out}
    layer.prefill(q=q, kv=rows, indices=lists, **options)
    wanted = cumla.mla_sparse_attention(
        q, rows.view(1, 40, 512), lists[:, 0], topk_lens=lens, softmax_scale=0.05, sinks=sinks
    )
    torch.testing.assert_close(out, wanted.out)


def test_deepseek_v41_is_told_that_it_keeps_vllms_functions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cumla.vllm.InDeepSeekV4, "name", "of_vllm.none")
    monkeypatch.setattr(cumla.vllm.InDeepSeekV41, "name", "of_vllm.model")
    monkeypatch.setattr(cumla.vllm.InDeepSeekV41, "_has_warned", False)
    layer = chosen(stub.Backends.FLASH_ATTN)
    assert layer.prefill() == "theirs"
    assert not caplog.records
    for _ in range(2):  # layers
        assert chosen() is layer
    assert layer.prefill() == "theirs"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("DeepSeek-V4.1: cumla's backend does not read its caches")
    assert "vLLM's Attention; leave out --attention-backend CUSTOM" in line


def test_who_asks_where_the_module_is_changes_nothing(modules: Path) -> None:
    """Nor does an import that fails."""
    cumla.vllm.register()
    assert find_spec("of_vllm.model") is not None
    (modules / "model.py").write_text("raise ImportError('later')\n")
    with pytest.raises(ImportError, match="later"):
        import_module("of_vllm.model")
    (modules / "model.py").write_text(f"{MODEL}# once more\n")
    invalidate_caches()
    assert taken().get_padded_num_q_heads(1) == 16
    assert not any(type(each) is cumla.vllm.InDeepSeekV4 for each in sys.meta_path)


def test_a_version_that_calls_something_else_is_refused(modules: Path) -> None:
    (modules / "layer.py").write_text("class Attention: pass\n")
    match = r"^vllm: cumla's backend needs of_vllm.layer.flash_mla_with_kvcache, .* leave out"
    with pytest.raises(RuntimeError, match=match):
        chosen()
    assert import_module("of_vllm.swa").get_mla_metadata() == ("theirs", None)
