# SPDX-License-Identifier: Apache-2.0
"""Other libraries, made of cumla's reference: what the benchmark hands them has to fit."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

import cumla

E4M3 = torch.float8_e4m3fn


class FakeFlashMLA:
    """A build of FlashMLA; `off` is added to what it computes."""

    def __init__(self, takes_out: bool, off: float = 0.0) -> None:
        self.takes_out, self.off = takes_out, off

    def _given(self, result: Any, out: Any) -> Any:
        result = result + self.off
        return out.copy_(result) if self.takes_out and out is not None else result

    def dense(
        self, q: Any, cache: Any, table: Any, lens: Any, scale: float, schedule: Any, out: Any
    ) -> Any:
        schedule.tiles = schedule.tiles or "made"
        return self._given(cumla.mla_decode(q, cache, table, lens, softmax_scale=scale).out, out)

    def dense_fp8(self, q: Any, cache: Any, table: Any, lens: Any, scale: float, heads: int) -> Any:
        assert q.dtype == cache.dtype == E4M3
        assert heads == q.shape[1] * q.shape[2]

        def call() -> Any:
            options = {"softmax_scale": scale, "kv_scale": 1.0}
            return cumla.mla_decode(q.to(torch.bfloat16), cache, table, lens, **options).out

        return call

    def lists(
        self,
        q: Any,
        cache: Any,
        indices: Any,
        scale: float,
        schedule: Any,
        out: Any,
        *,
        sinks: Any = None,
        extra: tuple[Any, Any] = (None, None),
    ) -> Any:
        assert q.shape[2] >= 64 or q.shape[-1] == 512
        caches = [None if rows is None else rows.view(torch.uint8) for rows in (cache, extra[0])]
        more = {"extra_kv_cache": caches[1], "extra_indices": extra[1], "sinks": sinks}
        given = {name: value for name, value in more.items() if value is not None}
        result = cumla.mla_sparse_decode(q, caches[0], indices, softmax_scale=scale, **given)
        return self._given(result.out, out)

    def prefill(self, q: Any, rows: Any, indices: Any, scale: float, out: Any) -> Any:
        assert rows.shape[1] == indices.shape[1] == 1
        given = (q, rows[:, 0], indices[:, 0])
        return self._given(cumla.mla_sparse_attention(*given, softmax_scale=scale).out, out)


class FakeFlashAttention:
    """FlashAttention-3; `wrong` splits give what is not right."""

    def __init__(self, wrong: int = -1) -> None:
        self.wrong = wrong

    def schedule(self, lens: Any, *, heads: tuple[int, int], **options: Any) -> Any:
        assert heads[0] % heads[1] == 0
        assert options["max_kv"] >= int(lens.max())
        return torch.zeros(4, dtype=torch.int32)

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float,
        out: Any,
        qv: Any = None,
        q_starts: Any = None,
        k_starts: Any = None,
        lens: Any = None,
        max_q: int | None = None,
        max_kv: int | None = None,
        table: Any = None,
        factors: Any = None,
        window: tuple[int, int] = (-1, -1),
        schedule: Any = None,
        splits: int = 0,
        pack: bool | None = None,
        sinks: Any = None,
        causal: bool = True,
        with_lse: bool = False,
    ) -> Any:
        if qv is not None:
            whole, cache = torch.cat([qv, q], -1), torch.cat([v, k], -1)
            given: Any = {"softmax_scale": scale}
            if window[0] >= 0:
                given["window"] = window[0]
            if sinks is not None:
                given["sinks"] = sinks.float()
            if q_starts is None:
                result = cumla.mla_decode(whole, cache, table, lens, **given)
            else:
                given["qo_indptr"] = q_starts
                result = cumla.mla_attention(whole, cache, block_table=table, kv_lens=lens, **given)
            return out.copy_(result.out + (splits == self.wrong))
        if factors is not None:
            assert q.dtype == E4M3
            q = q.to(torch.bfloat16)
        options = {"window": window[0] if window[0] >= 0 else None, "softmax_scale": scale}
        if sinks is not None:
            options["sinks"] = sinks.float()
        options["causal"] = causal
        if q_starts is not None:
            options["qo_indptr"] = q_starts
        if table is None:
            result = cumla.attention(q, k, v, kv_indptr=k_starts, **options)
        else:
            result = cumla.attention(q, k, v, kv_lens=lens, block_table=table, **options)
        out.copy_(result.out + (splits == self.wrong))
        return (out, result.lse.transpose(1, 2)) if with_lse else out


def _attends(q: Any, k: Any, v: Any, *, causal: bool, window_size: Any, **given: Any) -> Any:
    """FlashAttention-4's functions; rows of all requests, or `(batch, tokens, heads, columns)`."""
    names = {"cu_seqlens_q": "qo_indptr", "cu_seqlens_k": "kv_indptr", "seqused_k": "kv_lens"}
    names |= {"page_table": "block_table", "learnable_sink": "sinks"}
    assert given.pop("max_seqlen_q", 0) <= max(q.shape[:2])
    given.pop("max_seqlen_k", None)
    if q.ndim == 4 and k.ndim == 4:
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        given |= {"cu_seqlens_q": starts * q.shape[1], "cu_seqlens_k": starts * k.shape[1]}
        out = _attends(
            *(rows.flatten(0, 1) for rows in (q, k, v)),
            causal=causal,
            window_size=window_size,
            **given,
        )[0]
        return out.unflatten(0, q.shape[:2]), None
    options = {names[name]: value for name, value in given.items()}
    return cumla.attention(q, k, v, causal=causal, window=window_size[0], **options)


flash_attention_4 = SimpleNamespace(flash_attn_varlen_func=_attends, flash_attn_func=_attends)


def _paged_logits(
    q: Any, cache: Any, weights: Any, seen: Any, table: Any, schedule: Any, longest: int
) -> Any:
    assert seen.shape == q[0].shape[:2]
    given = (q[0], cache, weights, table, seen[:, -1].contiguous())
    return cumla.paged_mqa_logits(*given, max_kv_len=longest)


def _logits(q: Any, keys: Any, weights: Any, first: Any, behind: Any, longest: int) -> Any:
    return cumla.mqa_logits(q[0], keys, weights, first, behind)


deep_gemm = SimpleNamespace(
    get_num_sms=lambda: 132,
    get_paged_mqa_logits_metadata=lambda seen, page, sms: None,
    fp8_fp4_paged_mqa_logits=_paged_logits,
    fp8_fp4_mqa_logits=_logits,
)


def _transform(
    scores: Any,
    table: Any,
    lens: Any,
    top: int,
    *,
    row_to_batch: Any = None,
    deterministic: bool = False,
    dsa_graph_safe: bool = False,
) -> Any:
    assert len(table) == (len(scores) if row_to_batch is None else 1)
    return table.flatten()[cumla.top_k(scores, top, row_lens=lens).indices.long()]


flash_infer_top_k = SimpleNamespace(
    top_k_page_table_transform=_transform,
    top_k_ragged_transform=lambda scores, begins, lens, top: (
        cumla.top_k(scores, top, row_lens=lens).indices + begins[:, None]
    ),
)


def _one_batch(scores: Any, lens: Any, out: Any, memory: Any, top: int, width: int) -> None:
    assert width == scores.shape[1]
    assert memory.numel() == 1 << 20
    out.copy_(cumla.top_k(scores, top, row_lens=lens).indices)


def _a_row_each(scores: Any, q_len: int, lens: Any, out: Any, *last: int) -> None:
    assert last == (len(scores), *scores.stride(), out.shape[1])
    out.copy_(cumla.top_k(scores, out.shape[1], row_lens=lens).indices)


vllm_operators = SimpleNamespace(
    cooperative_topk=_one_batch, persistent_topk=_one_batch, top_k_per_row_decode=_a_row_each
)


def _windows_of_flash_infer(
    q: Any, cache: Any, workspace: Any, table: Any, lens: Any, out: Any, *last: Any
) -> None:
    scale, window, tactic = last
    assert q.shape[0] <= 16
    assert q.shape[1:] == (1, 64, 1088)
    assert all(x.is_contiguous() for x in (q, cache, table, lens, out))
    rows = q.shape[0] * 64
    assert workspace.numel() >= 256 * -(-rows * 9 * 4096 // 256) + 256 * -(-rows * 9 * 4 // 256)
    assert tactic in range(6)
    options = {"softmax_scale": scale, "window": window}
    out.copy_(cumla.mla_decode(q, cache, table, lens, **options).out)


def _triton_mla(
    q: Any,
    keys: Any,
    values: Any,
    out: Any,
    lse: Any,
    table: Any,
    lens: Any,
    *last: Any,
    **scales: Any,
) -> None:
    parts, splits, scale, page = last
    assert keys.shape[1:3] == (page, 1)
    assert values.data_ptr() == keys.data_ptr()
    assert scales.pop("is_mla")
    assert set(scales) == {"k_scale", "v_scale"}
    latent = values.shape[-1]
    assert parts.shape == (*q.shape[:2], splits, latent + 1)
    options: dict[str, Any] = {"softmax_scale": scale}
    if keys.dtype == E4M3:
        options["kv_scale"] = scales["k_scale"]
    state = cumla.mla_decode(q[:, None], keys, table, lens, **options)
    out.copy_(state.out[:, 0])
    lse.copy_(state.lse[:, 0])


def _chain(layer: Any, q: Any, cache: Any, step: Any, scale: Any) -> tuple[Any, None]:
    assert (layer.head_size, layer.kv_lora_rank, step.query_len) == (1088, 1024, 1)
    options = {"softmax_scale": layer.scale, "window": layer.sliding_window - 1}
    given = (q[:, None], cache, step.block_table, step.seq_lens)
    return cumla.mla_decode(*given, **options).out[:, 0], None


def _proxy(q: Any, keys: Any, *, per_head: Any, batch_size: int, **given: Any) -> None:
    starts = torch.arange(batch_size + 1, dtype=torch.int32)
    face = import_module("cumla.compat.flashinfer.msa_ops")
    face.msa_proxy_score(q, keys, starts, max_k_tiles=per_head.shape[1], output=per_head, **given)


def _decode_score(
    q: Any, keys: Any, table: Any, lens: Any, most: int, init: int, local: int, *numbers: int
) -> Any:
    assert (most, init, local) == (table.shape[1] * 128, 0, 0)
    assert numbers == (q.shape[1], 1, 1)
    given = {"block_size": 128, "kv_lens": lens, "block_table": table}
    scores = cumla.block_scores(q[:, None], keys, **given).transpose(0, 1)
    return torch.cat([scores, scores[..., :1]], -1)


def _qsa(
    q: Any,
    k: Any,
    v: Any,
    packed: Any,
    table: Any,
    of_request: Any,
    is_prompt: bool,
    out: Any,
    *scales: float,
    output_gate: Any,
) -> None:
    assert scales == (1.0, 1.0)
    for row, request in enumerate(of_request.tolist()):
        tokens = packed[row, : packed[row, -1]][None, None]
        many = int(tokens.max()) + 1
        result = cumla.block_sparse_attention(
            *(q[row : row + 1], k, v, tokens),
            block_size=1,
            kv_lens=torch.tensor([many], dtype=torch.int32),
            block_table=table[request : request + 1],
            qo_indptr=torch.tensor([0, 1], dtype=torch.int32),
        )
        out[row] = (result.out[0] * output_gate.view_as(q)[row].sigmoid()).to(out.dtype)


class _PooledScores:
    """vLLM's scores of QSA: a kernel that is launched by its grid, and a function for prompts."""

    _DECODE_BLOCK_N = 64

    @staticmethod
    def _decode_tiles_per_program(requests: int, columns: int) -> int:
        return 1

    @property
    def _qsa_mqa_paged_uniform_kernel(self) -> Any:
        return self

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(
            q: Any, keys: Any, table: Any, visible: Any, logits: Any, *strides: int, **sizes: int
        ) -> None:
            assert strides == (
                *q.stride()[:1],
                q.shape[-1],
                *keys.stride()[:2],
                *table.shape[1:],
                logits.shape[1],
            )
            assert grid == (len(q), -(-logits.shape[1] // 64))
            assert sizes["PAGE_SIZE"] * sizes["PAGE_TABLE_WIDTH"] == logits.shape[1]
            logits.copy_(_pooled(q, keys, table, visible * 4)[:, 0])

        return launch

    @staticmethod
    def _prefill_logits(
        q: Any,
        keys: Any,
        table: Any,
        starts: Any,
        visible: Any,
        logits: Any,
        queries: int,
        width: int,
        first: int,
        count: int,
    ) -> Any:
        assert (first, count, logits.numel()) == (0, len(q), len(q) * width)
        assert starts.diff().tolist() == [queries] * len(table)
        found = [
            _pooled(
                q[i : i + 1, None], keys[:, :, 0], table[i // queries][None], visible[i : i + 1] * 4
            )
            for i in range(len(q))
        ]
        return torch.cat(found)[:, 0]


def _pooled(q: Any, keys: Any, table: Any, lens: Any) -> Any:
    options: dict[str, Any] = {"block_size": 4, "stride": 4, "num_groups": 1, "activation": "relu"}
    return cumla.block_scores(q, keys, **options, kv_lens=lens, block_table=table)


def _summaries(
    q: Any,
    weights: Any,
    keys: Any,
    table: Any,
    slots: Any,
    lens: Any,
    capacity: int,
) -> tuple[Any, None]:
    assert q.shape[1:3] == weights.shape[1:] == (1, 8)
    options: dict[str, Any] = {"block_size": 8, "stride": 8, "num_groups": 1, "activation": "relu"}
    options |= {"weights": weights[:, 0], "kv_lens": slots + 1, "block_table": table}
    found = cumla.block_scores(q, keys.view(q.dtype), **options)
    assert found.shape[2] == capacity
    return found[:, 0], None


class FakeLibraries:
    """All of them."""

    def __init__(self) -> None:
        self.flash_mla = {"vLLM": FakeFlashMLA(True), "SGLang": FakeFlashMLA(False)}
        self.flash_attention, self.flash_attention_4 = FakeFlashAttention(), flash_attention_4
        self.deep_gemm, self.vllm_operators = deep_gemm, vllm_operators
        self.flash_infer_top_k = flash_infer_top_k
        face = import_module("cumla.compat.flashinfer.msa_ops")
        causal = partial(face.msa_sparse_attention, causal=True)
        functions = {name: getattr(face, name) for name in dir(face) if name.startswith("msa_")}
        short = SimpleNamespace(
            hopper_msa_sparse_attention=causal, hopper_msa_proxy_score_decode=_proxy
        )
        self.flash_infer_blocks = SimpleNamespace(cake_hopper_sm90=short, **functions)
        self.flash_infer_windows = SimpleNamespace(run=_windows_of_flash_infer)
        self.vllm_qsa_scores = _PooledScores()
        self.vllm_step5_scores = _summaries
        self.vllm_blocks = import_module("cumla.compat.vllm_minimax_m3")
        choice = {name: getattr(self.vllm_blocks, name) for name in dir(self.vllm_blocks)}
        choice["minimax_m3_index_decode_score"] = _decode_score
        self.vllm_choice = SimpleNamespace(**choice)
        self.vllm_qsa = _qsa
        step5 = import_module("cumla.vllm.step5").sparse_decode_attention
        self.vllm_step5 = SimpleNamespace(
            sparse_decode_splits=lambda rows: 4, sparse_decode_attention=step5
        )
        self.vllm_mla = SimpleNamespace(decode_attention_fwd=_triton_mla)
        self.vllm_windows = _chain
        self.notes = ["none is real"]

    def flash_infer(self, module: str) -> Any:
        return import_module(f"cumla.compat.flashinfer.{module}")

    def versions(self) -> dict[str, str]:
        return {"fake": "1"}
