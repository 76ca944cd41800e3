# SPDX-License-Identifier: Apache-2.0
"""MLA over rows of other widths than 512 + 64 columns, and in windows."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from bench.case import Case, Section, Variant, shapes
from bench.lab import Lab
from bench.sections.mla import DEVIATION, Decode, small

_WORKSPACE = 128 << 20  # bytes, as FlashInfer's documentation has it

Peers = dict[str, list[Variant]]


def widths(
    lab: Lab, latent: int, rope: int, cache: str, batch: int, heads: int, kv_len: int
) -> Case:
    is_fp8 = cache == "float8_e4m3fn"
    deviation, options = (1.0, {"kv_scale": 1.0}) if is_fp8 else (DEVIATION, {})
    sizes = small(lab, batch, 1, heads, kv_len)
    work = Decode(lab, sizes, cache_dtype=cache, deviation=deviation, width=(latent, rope))
    peers = _triton(work) | flash_infer(work, rope)
    if not is_fp8:
        peers["FlashAttention-3"] = work.flash_attention()
        if work.columns == work.values == 512:
            peers["FlashMLA"] = [of for of in work.flash_mla() if of.name == "SGLang"]
    limit = 6e-3 if is_fp8 else 4e-3
    run = partial(work.run, **options)
    return Case(run, work.error, limit, nbytes=work.nbytes, flops=work.flops, peers=peers)


def _triton(work: Decode) -> Peers:
    """vLLM's backend TRITON_MLA, with as many splits as it takes."""
    library = work.lab.libraries.vllm_mla
    if library is None:
        return {}
    torch, rows = work.lab.torch, max(1, work.kv_len // 512)
    splits = 1 << (rows - 1).bit_length()  # fewer than its bound of two an SM
    out = torch.empty_like(work.out[:, 0])
    lse = out.new_empty(out.shape[:2])
    parts = torch.empty(*lse.shape, splits, work.values + 1, device=out.device)
    one = torch.ones((), device=out.device)

    def run() -> Any:
        library.decode_attention_fwd(
            *(work.q[:, 0], work.cache, work.cache[..., : work.values], out, lse),
            *(work.table, work.lens, parts, splits, work.scale, work.cache.shape[1]),
            k_scale=one,
            v_scale=one,
            is_mla=True,
        )
        return out

    return {"vLLM": [Variant("", run)]}


def flash_infer(work: Any, rope: int) -> Peers:
    """FlashInfer's wrapper with the backend that it takes on Hopper, for the widths of that."""
    is_fp8 = work.cache.element_size() == 1
    if rope % 64 or (is_fp8 and work.values != 512):
        return {}
    library = work.lab.libraries.flash_infer("mla")
    if library is None:
        return {}
    torch, device = work.lab.torch, work.out.device
    out = torch.empty_like(work.out[:, 0])
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if is_fp8 else {}

    @cache
    def planned() -> Any:
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        starts = torch.arange(work.batch + 1, dtype=torch.int32, device=device)
        wrapper.plan(
            metadata=library.MLAPlanMetadata.csr(
                starts, starts * work.pages, work.table.flatten(), work.lens
            ),
            num_heads=work.heads,
            head_dim_ckv=work.values,
            head_dim_kpe=rope,
            page_size=work.cache.shape[1],
            causal=False,
            sm_scale=work.scale,
            q_data_type=work.q.dtype,
            kv_data_type=work.cache.dtype,
            scale_mode="kv-per-tensor" if is_fp8 else "default",
        )
        return wrapper

    def run() -> Any:
        return planned().run(query=work.q[:, 0], kv_cache=work.cache[:, :, 0], out=out, **scales)

    return {"FlashInfer": [Variant("fa3", run)]}


WIDTHS = Section(
    name="widths",
    title="Rows of other widths",
    about="`cumla.MLADecodePlan.run` over rows of Mistral Small 4 (256 + 64), MiniCPM3 (256 + 32) "
    "and GLM-5.3 (512 columns without RoPE), in bfloat16 or e4m3 under one scale; all queries are "
    "bfloat16. vLLM is the Triton kernel of its backend TRITON_MLA. FlashInfer has no kernel for "
    "32 RoPE columns, nor for e4m3 rows of 256 latent columns; FlashAttention-3 and FlashMLA none "
    "for e4m3 rows with bfloat16 queries. FlashAttention-3 wants RoPE columns: for rows without, "
    "the query's are 0.",
    columns={
        "latent": "latent columns",
        "rope": "RoPE columns",
        "cache": "cache",
        "batch": "requests",
        "heads": "heads",
        "kv_len": "cached tokens",
    },
    shapes=shapes(
        "latent rope cache batch heads kv_len",
        *(
            (*width, cache, *sizes)
            for width, *some in (
                ((256, 64), (1, 32, 8192), (64, 32, 8192), (64, 8, 8192)),
                ((256, 32), (64, 40, 4096)),
                ((512, 0), (128, 64, 4096), (64, 8, 8192)),
            )
            for sizes in some
            for cache in ("bfloat16", "float8_e4m3fn")
        ),
    ),
    build=widths,
)

# --- windows --------------------------------------------------------------------------------------

_WINDOW = 512
_MOST = 16  # requests of FlashInfer's kernel
_TACTICS = 6


def short_windows(lab: Lab, batch: int, heads: int, kv_len: int) -> Case:
    batch, heads = lab.at_most(batch=(batch, 3), heads=(heads, 4))
    kv_len, window = lab.at_most(kv_len=(kv_len, 130), window=(128, 70))
    work = Decode(lab, (batch, 1, heads, kv_len), window=window)
    return work.case(4e-3, peers={"FlashAttention-3": work.flash_attention()})


SHORT_WINDOWS = Section(
    name="windows-512",
    title="Rows of 512 + 64 columns in windows",
    about="`cumla.MLADecodePlan.run` with `window=128` over bfloat16 rows: a query sees its own "
    "token and 128 before.",
    columns={"batch": "requests", "heads": "heads", "kv_len": "cached tokens"},
    shapes=shapes("batch heads kv_len", (1, 64, 8192), (128, 64, 8192), (128, 16, 8192)),
    build=short_windows,
)


def windows(lab: Lab, batch: int, heads: int, kv_len: int) -> Case:
    batch, heads = lab.at_most(batch=(batch, 17), heads=(heads, 64))
    kv_len, window = lab.at_most(kv_len=(kv_len, 130), window=(_WINDOW, 70))
    work = Decode(lab, (batch, 1, heads, kv_len), width=(1024, 64), window=window)
    return work.case(4e-3, peers=_chain(work) | _windows_of_flash_infer(work))


def _chain(work: Decode) -> Peers:
    """vLLM's backend of dots3: rows are gathered, then matrix products and a softmax."""
    forward = work.lab.libraries.vllm_windows
    if forward is None:
        return {}
    assert work.window is not None
    layer = SimpleNamespace(
        head_size=work.columns,
        kv_lora_rank=work.values,
        scale=work.scale,
        sliding_window=work.window + 1,
    )
    step = SimpleNamespace(query_len=1, block_table=work.table, seq_lens=work.lens)
    one = work.lab.torch.ones((), device=work.lens.device)
    q, cache = work.q[:, 0], work.cache[:, :, 0]
    return {"vLLM": [Variant("", lambda: forward(layer, q, cache, step, one)[0])]}


def _windows_of_flash_infer(work: Decode) -> Peers:
    """FlashInfer's kernel, of 64 heads and at most 16 requests, with each of its tactics."""
    library = work.lab.libraries.flash_infer_windows if work.heads == 64 else None
    if library is None:
        return {}
    torch = work.lab.torch
    floats = _MOST * work.heads * 9 * (work.values + 1)  # nine splits of a request at most
    workspace = torch.empty(4 * floats + 512, dtype=torch.uint8, device=work.out.device)
    cache, out = work.cache[:, :, 0], torch.empty_like(work.out)
    parts = [slice(first, min(first + _MOST, work.batch)) for first in range(0, work.batch, _MOST)]

    def run(tactic: int) -> Any:
        for part in parts:
            library.run(
                *(work.q[part], cache, workspace, work.table[part], work.lens[part], out[part]),
                *(work.scale, work.window, tactic),
            )
        return out

    calls = f"{len(parts)} calls, " if len(parts) > 1 else ""
    return {"FlashInfer": [Variant(f"{calls}tactic {i}", partial(run, i)) for i in range(_TACTICS)]}


WINDOWS = Section(
    name="windows",
    title="Rows of 1,024 + 64 columns in windows",
    about="`cumla.MLADecodePlan.run` with `window=512` over bfloat16 rows of dots3: a query sees "
    "its own token and 512 before. vLLM is its backend of that model for Hopper, which gathers "
    "rows and calls matrix products and a softmax of PyTorch. FlashInfer is the kernel of its "
    "`batch_decode_with_kv_cache_mla_swa`, which takes 64 heads and at most 16 requests: 128 are "
    "8 calls.",
    columns={"batch": "requests", "heads": "heads", "kv_len": "cached tokens"},
    shapes=shapes(
        "batch heads kv_len",
        *((batch, 64, 8192) for batch in (1, 16, 128)),
        (128, 8, 8192),
    ),
    build=windows,
)
