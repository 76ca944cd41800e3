# SPDX-License-Identifier: Apache-2.0
"""Qwen's QSA and Step 5 in vLLM: attention to groups of tokens where CUSTOM is asked for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cumla.vllm
from tests.vllm import stub
from tests.vllm.stub import stubbed

torch = pytest.importorskip("torch")

E4M3 = torch.float8_e4m3fn
QSA = """
class Qwen4ExpQSAFlashAttentionImpl:
    def __init__(self, head_size, kv_cache_dtype):
        self.head_size, self.kv_cache_dtype = head_size, kv_cache_dtype

    def forward_qsa(self, *args, **options):
        return "theirs"
"""
REGIONS = """
asked = []
sparse_decode_attention = lambda *args, **options: asked.append(options)

class Step5DSAAttentionImpl:
    pass
"""
LENS, TABLE = (37, 150, 9), ((3, 9, 1, 0, 0), (4, 2, 6, 7, 5), (8, 0, 0, 0, 0))
PAGE = 32


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that stands for vLLM's."""
    folder = tmp_path / "of_vllm"
    folder.mkdir()
    for name, text in (("__init__", ""), ("qsa", QSA), ("regions", REGIONS)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cumla.vllm.InQSA, "name", "of_vllm.qsa")
    monkeypatch.setattr(cumla.vllm.InStep5, "name", "of_vllm.regions")
    with stubbed():
        from cumla.vllm import qsa, step5

        monkeypatch.setattr(qsa, "_LEAST_TOKENS", 4)
        monkeypatch.setattr(qsa, "_LEAST_FP8_TOKENS", 4)
        monkeypatch.setattr(step5, "_HOME", "of_vllm.regions")
        monkeypatch.setattr(step5, "_LEAST_ROWS", 3)
        yield folder
    for name in [each for each in sys.modules if each.split(".")[0] == "of_vllm"]:
        del sys.modules[name]


def made(
    *args: Any, backend: Any = stub.Backends.CUSTOM, of: str = "qsa.Qwen4ExpQSAFlashAttentionImpl"
) -> Any:
    """An object of vLLM's class for QSA, or for Step 5."""
    cumla.vllm.register()
    from vllm.config import get_current_vllm_config

    get_current_vllm_config().attention_config.backend = backend
    module, name = of.split(".")
    return getattr(import_module(f"of_vllm.{module}"), name)(*args)


def numbers(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16()


def attended(q: Any, cache: Any, request: int, tokens: list[int], head: int) -> Any:
    """Attend from (heads, columns) to tokens of a request."""
    pages = torch.tensor(TABLE)[request, torch.tensor(tokens) // PAGE]
    rows = cache[pages, head, torch.tensor(tokens) % PAGE].float()
    k, v = rows.split(q.shape[-1], -1)
    return (q.float() @ k.T * q.shape[-1] ** -0.5).softmax(-1) @ v


def test_other_backends_keep_vllms_functions() -> None:
    other = {"backend": stub.Backends.FLASH_ATTN}
    assert made(64, "auto", **other).forward_qsa() == "theirs"
    made(of="regions.Step5DSAAttentionImpl", **other)
    decode: Any = import_module("of_vllm.regions").sparse_decode_attention  # type: ignore[attr-defined]
    assert decode.__name__ == "<lambda>"


@pytest.mark.parametrize("stored", ["auto", "fp8"])
@pytest.mark.parametrize("counts", [(1, 2, 1), (3, 1, 5)])
def test_qsa(counts: tuple[int, ...], stored: str, caplog: pytest.LogCaptureFixture) -> None:
    """Lists of tokens by groups of 4, the open group behind them, and rows that are padding."""
    heads, kv_heads, columns = 6, 2, 64
    tokens, width = sum(counts), 8 + 4
    cache = numbers(10, kv_heads, PAGE, 2 * columns, seed=1)
    factors = (0.5, 2.0) if stored == "fp8" else (1.0, 1.0)
    rows_of = cache.to(E4M3) if stored == "fp8" else cache
    lists = torch.full((tokens + 2, width), -1, dtype=torch.int32)
    wanted: list[tuple[int, list[int]]] = []
    for request, count in enumerate(counts):
        for i in range(count):
            at, row = LENS[request] - count + i, len(wanted)
            groups = [g for g in (row % 3, (at + 1) // 4 - 1) if g < (at + 1) // 4]
            listed = [4 * g + j for g in groups for j in range(4)]
            listed += range((at + 1) // 4 * 4, at + 1)
            lists[row, : len(listed)] = torch.tensor(listed)
            lists[row, -1] = len(listed)
            wanted.append((request, sorted({*listed})))
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)]).int()
    metadata = SimpleNamespace(
        num_actual_tokens=tokens + 2,
        seq_lens=torch.tensor(LENS).int(),
        query_start_loc=starts,
        block_table=torch.tensor(TABLE).int(),
    )
    layer = SimpleNamespace(topk_indices_buffer=lists, indexer=SimpleNamespace(compress_ratio=4))
    layer._k_scale_float, layer._v_scale_float = factors
    q, gate = numbers(tokens + 3, heads, columns), numbers(tokens + 3, heads * columns, seed=2)
    out = torch.full_like(q, 7)
    with caplog.at_level(logging.INFO):
        impl = made(columns, stored)
    assert "cumla attends in layers of QSA" in caplog.text
    given = rows_of.view(torch.uint8) if stored == "fp8" else cache
    rows = (layer, q, None, None, given, metadata, out, None)
    is_prompt = stored == "fp8" and max(counts) > 2
    assert impl.forward_qsa(*rows, is_prompt, gate) is out
    assert not out[tokens:].any()
    for row, (request, listed) in enumerate(wanted):
        for head in range(kv_heads):
            some = slice(3 * head, 3 * head + 3)
            of_cache = rows_of.float() * torch.tensor(factors).repeat_interleave(columns)
            want = attended(q[row, some], of_cache, request, listed, head)
            want *= gate.view_as(q)[row, some].float().sigmoid()
            torch.testing.assert_close(out[row, some].float(), want, rtol=2e-2, atol=2e-2)
    if stored == "auto":
        assert impl.forward_qsa(*rows, True, gate) == "theirs"
    assert impl.forward_qsa(*rows, False, gate, output_scale=q) == "theirs"
    metadata.num_actual_tokens = 3
    assert impl.forward_qsa(*rows, False, gate) == "theirs"


@pytest.mark.parametrize("dtype", [E4M3, torch.uint8])
@pytest.mark.parametrize(
    ("query_len", "kv_heads", "clear", "has_gate"),
    [(1, 1, True, False), (1, 2, True, True), (3, 2, True, True), (2, 1, False, False)],
)
def test_step5(
    query_len: int,
    kv_heads: int,
    clear: bool,
    has_gate: bool,
    dtype: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regions of 8 tokens, the own one last, behind -1; the last request is none."""
    heads, columns, scale = 4, 64, 0.5
    tokens = 3 * query_len
    rows = tokens * kv_heads
    cache = numbers(10, kv_heads, PAGE, 2 * columns, seed=1).to(E4M3)
    at = torch.tensor(LENS)[:, None] - query_len + torch.arange(query_len)
    positions, active = (
        x.flatten().repeat_interleave(kv_heads)
        for x in (at, torch.tensor([1, 1, 0])[:, None].expand(-1, query_len))
    )
    regions = torch.full((rows, 4), -1)
    for row, own in enumerate((positions // 8).tolist()):
        chosen = sorted({r for r in (row % 3, own - 1, own) if 0 <= r <= own})
        regions[row, 4 - len(chosen) :] = torch.tensor(chosen)
    q, gate = numbers(rows, heads, columns), numbers(tokens, kv_heads * heads, seed=2)
    out, factor = torch.full_like(q, 7), torch.tensor(scale)
    with caplog.at_level(logging.INFO):
        made(of="regions.Step5DSAAttentionImpl")
    home: Any = import_module("of_vllm.regions")
    decode = home.sparse_decode_attention
    assert "cumla attends in layers of Step 5 that choose regions" in caplog.text
    decode(
        *(q, cache.view(dtype), regions, torch.tensor(TABLE).int()),
        *(positions, active.bool(), out),
        scale=columns**-0.5,
        query_len=query_len,
        splits=2,
        clear_inactive=clear,
        k_scale=factor,
        v_scale=factor,
        gate=gate if has_gate else None,
    )
    for row in range(rows):
        request, head = row // (query_len * kv_heads), row % kv_heads
        if not active[row]:
            assert not clear or not out[row].any()
            continue
        listed = [8 * r + j for r in regions[row].tolist() if r >= 0 for j in range(8)]
        listed = [t for t in listed if t <= positions[row]]
        want = attended(q[row], cache.float() * scale, request, listed, head)
        if has_gate:
            some = slice(head * heads, (head + 1) * heads)
            want *= gate[row // kv_heads, some, None].float().sigmoid()
        torch.testing.assert_close(out[row].float(), want, rtol=2e-2, atol=2e-2)
    assert not home.asked
    few = slice(2)
    rest = regions[few], torch.tensor(TABLE).int(), positions[few], active[few], out[few]
    decode(q[few], cache, *rest, scale=1.0, splits=1, query_len=query_len)
    decode(q, cache.bfloat16(), *rest, scale=1.0, splits=2, gate=gate)
    assert [each["splits"] for each in home.asked] == [1, 2]
    assert home.asked[1]["gate"] is gate


def test_another_version_of_step5_is_refused(modules: Path) -> None:
    (modules / "regions.py").write_text("")
    wanted = "needs of_vllm.regions.sparse_decode_attention, which this version does not use for"
    from cumla.vllm import step5

    with pytest.raises(RuntimeError, match=wanted):
        step5.attend()
