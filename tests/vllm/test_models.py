# SPDX-License-Identifier: Apache-2.0
"""`python -m cumla info --vllm`: which models the plugin serves, by which kernels, and why not."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cumla.cli import main
from cumla.vllm._models import read_model

ROOT = Path(__file__).resolve().parents[2]
COMMON = {"torch_dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 12}
MLA = COMMON | {
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
}
V32 = MLA | {"model_type": "deepseek_v32", "index_topk": 2048}
GLM53 = {
    "model_type": "glm5_next",
    "text_config": V32
    | {
        "model_type": "glm5_next_text",
        "num_attention_heads": 64,
        "qk_rope_head_dim": 0,
        "index_kpool": 16,
        "layer_types": (["linear_attention"] * 3 + ["deepseek_sparse_attention"]) * 3,
        "linear_num_heads": 64,
    },
}
V4 = COMMON | {
    "model_type": "deepseek_v4",
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "sliding_window": 128,
    "index_topk": 512,
    "compress_ratios": [0, 4, 128] * 4,
}
V4_OF_TRANSFORMERS = {name: value for name, value in V4.items() if name != "compress_ratios"} | {
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"] * 6,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
}
KIMI = {"model_type": "kimi_vl", "text_config": MLA | {"model_type": "kimi_k2"}}
LLAMA = COMMON | {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN = LLAMA | {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False}
GEMMA3 = COMMON | {"model_type": "gemma3_text", "sliding_window": 1024}
LLAMA4 = LLAMA | {"model_type": "llama4_text", "attention_chunk_size": 8192}
GPT_OSS = COMMON | {
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 6,
}


_BLOCKS = {"sparse_block_size": 128, "sparse_attention_freq": [0] * 3 + [1] * 9}
M3 = {
    "model_type": "minimax_m3_vl",
    "text_config": LLAMA | {"model_type": "minimax_m3", "sparse_attention_config": _BLOCKS},
}
M3_OF_TRANSFORMERS = LLAMA | {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 9}


@pytest.fixture
def info(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> Any:
    """Run the command for a model without vLLM; return its exit code and its lines."""

    def run(config: dict[str, Any], *options: str) -> tuple[int, str]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        code = main(["info", "--vllm", str(tmp_path), *options])
        return code, capsys.readouterr().out

    def version(name: str) -> str:
        if name == "vllm":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    real = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    return run


def rows(text: str) -> dict[str, str]:
    return {line[:24].strip(): line[25:] for line in text.splitlines() if line[:24].strip()}


def test_sparse_mla_by_head_counts_and_caches(info: Any) -> None:
    code, text = info(V32)
    found = rows(text)
    assert code == 0
    assert found["12 layers"] == "sparse MLA, 2048 tokens of an indexer"
    assert found["decoding, 128 requests"] == "mla_sparse_bfloat16_shared_blocks"
    assert found["prefill, 1 request"] == "mla_sparse_bfloat16_shared_blocks"
    assert found["indexer"] == "paged_mqa_logits, mqa_logits, top_k"
    packed = "--kv-cache-dtype", "fp8_ds_mla"
    assert rows(info(V32, *packed)[1])["decoding, 1 request"] == "mla_sparse_packed_16"
    found = rows(info(V32, *packed, "-tp", "8")[1])
    assert found["decoding, 1 request"] == "mla_sparse_packed_16"
    assert found["prefill up to 2048"].startswith("vLLM's own backend, where no prefill of")
    assert "cache" not in found
    one_factor = rows(info(V32, "--kv-cache-dtype", "fp8")[1])
    assert one_factor["served"].startswith("yes")
    assert one_factor["cache"].startswith("one factor for all rows; fp8_ds_mla has four")
    assert rows(info(V32, "--block-size", "128")[1])["served"].startswith("yes")
    assert found["decode context parallel"].startswith("yes; kernels then have the heads of all")
    hy4 = V32 | {"model_type": "hy_v4", "layer_types": ["deepseek_sparse_attention"] * 12}
    found = rows(info(hy4)[1])
    assert found["decode context parallel"] == "no: the layers have sinks"
    assert found["each GPU"].startswith("128 heads of 576, sinks;")
    assert found["served"].startswith("yes")


@pytest.mark.parametrize("dense", [1, 12])
def test_dense_layers_beside_sparse_ones_are_refused(info: Any, dense: int) -> None:
    """vLLM refuses a class of sparse MLA for them, and the plugin's class is the same for all."""
    types = ["full_attention"] * dense + ["sparse_attention"] * (12 - dense)
    code, text = info(V32 | {"model_type": "hy_v4", "layer_types": types})
    assert code == 1
    assert "layer_types: needs sparse attention in all 12 layers, because CUSTOM is" in text
    assert f"one class for all of them, got {12 - dense}" in text


def test_rows_without_rope_and_an_indexer_of_pools(info: Any) -> None:
    ring = "mla_sparse_bfloat16_512_shared_blocks"
    for cache, kernel in (("auto", ring), ("fp8", "mla_sparse_packed_e4m3")):
        code, text = info(GLM53, "--kv-cache-dtype", cache)
        found = rows(text)
        assert code == 0
        assert found["served"].startswith("yes")
        assert found["3 layers"] == "sparse MLA, 2048 tokens of an indexer"
        assert found["each GPU"].startswith("64 heads of 512;")
        assert found["decoding, 128 requests"] == kernel
        assert found["decode context parallel"] == "no: the indexer chooses pools"
        assert found["indexer"].startswith("vLLM's own")
        assert "cache" not in found
        assert "not tried: layers that are no attention beside those" in text


@pytest.mark.parametrize("config", [V4, V4_OF_TRANSFORMERS], ids=["ratios", "rates"])
def test_deepseek_v4(info: Any, config: dict[str, Any]) -> None:
    for cache in ("fp8", "fp8_ds_mla"):
        code, text = info(config, "--kv-cache-dtype", cache, "--tensor-parallel-size", "4")
        found = rows(text)
        assert code == 0
        assert found["each GPU"] == f"16 heads of 512, sinks; cache {cache}, pages of 256 tokens"
        assert found["12 layers"].startswith("sparse MLA, 512 tokens of an indexer, or all")
        assert found["decoding, 128 requests"] == "mla_sparse_v4"
        assert found["prefill, 1 request"].startswith("mla_sparse_bfloat16_512")
        assert found["mixed, 128 requests"].startswith("mla_sparse_v4, mla_sparse_bfloat16_512")
    code, text = info(config)
    assert code == 1
    assert "--kv-cache-dtype: needs one of fp8, fp8_e4m3, fp8_ds_mla, got auto" in text
    code, text = info(config, "--kv-cache-dtype", "fp8", "--block-size", "64")
    assert code == 1
    assert "--block-size: needs a multiple of 256, because of vLLM's indexer, got 64" in text


def test_mla_by_head_counts_and_caches(info: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = info(MLA)
    found = rows(text)
    assert code == 0
    assert found["vLLM"] == "not installed here: versions are not checked"
    assert found["model"] == "deepseek_v3, MLA, bfloat16"
    assert found["each GPU"] == "128 heads of 576; cache auto, pages of 64 tokens"
    assert found["served"].startswith("yes")
    assert found["12 layers"] == "full attention"
    assert found["decoding, 1 request"] == "mla_decode_bfloat16_shared_blocks"
    assert found["mixed, 128 requests"] == "mla_attention_bfloat16"
    assert found["prefill, 1 request"] == "vLLM's own backend"
    assert found["drafts"] == "yes, in chains"
    assert found["batch invariance"] == "yes, by VLLM_BATCH_INVARIANT=1"
    assert found["decode context parallel"].endswith("requests one new token per step")
    found = rows(info(KIMI, "--tensor-parallel-size", "8", "--block-size", "16")[1])
    assert found["each GPU"] == "16 heads of 576; cache auto, pages of 16 tokens"
    assert found["decoding, 1 request"] == "mla_decode_bfloat16_swapped_boxes"
    small = rows(info(MLA | {"model_type": "mistral4", "kv_lora_rank": 256})[1])
    assert small["each GPU"].startswith("128 heads of 320;")
    assert small["decoding, 1 request"] == "mla_decode_256_bfloat16_shared_blocks_boxes"
    fp8 = rows(info(MLA, "--kv-cache-dtype", "fp8", "--tensor-parallel-size", "8")[1])
    assert fp8["decoding, 1 request"] == "mla_decode_fp8_16"
    assert "products" not in info(MLA, "--kv-cache-dtype", "fp8")[1]
    products = rows(info(MLA, "--kv-cache-dtype", "fp8", "--fp8-products")[1])
    assert products["decoding, 1 request"].startswith("mla_decode_fp8_products")
    assert "--fp8-products" not in products
    for others in (("--kv-cache-dtype", "fp8", "-tp", "8"), ()):
        found = rows(info(MLA, "--fp8-products", *others)[1])
        assert found["--fp8-products"].startswith("has no effect: needs dense MLA of 576 columns")


def test_gqa_names_the_kernels_of_each_step(info: Any) -> None:
    code, text = info(LLAMA)
    found = rows(text)
    assert code == 0
    assert found["each GPU"] == "32 heads over 8 of 128; cache auto, pages of 64 tokens"
    assert found["decoding, 1 request"] == "attention_few_bfloat16_128_128"
    assert found["prefill, 1 request"] == "attention_prefill_bfloat16_128_128"
    assert found["decode context parallel"] == "no: for MLA alone"
    whole, rest = found["mixed, 128 requests"].split(", ")
    assert (whole, rest) == ("attention_bfloat16_128_128", "attention_prefill_bfloat16_128_128")
    assert "_e4m3" in rows(info(LLAMA, "--kv-cache-dtype", "fp8")[1])["prefill, 1 request"]


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA, {None: 12}),
        (QWEN, {None: 12}),
        (QWEN | {"use_sliding_window": True}, {32768: 12}),
        (LLAMA | {"sliding_window": 0}, {None: 12}),
        (GEMMA3, {1024: 10, None: 2}),
        (GPT_OSS, {128: 6, None: 6}),
        (GPT_OSS | {"layer_types": None}, {128: 6, None: 6}),
        (LLAMA | {"layer_types": ["linear_attention", "full_attention"] * 6}, {None: 6}),
        (GPT_OSS | {"layer_types": ["sliding_attention"] * 13}, {128: 12}),  # one of a draft
        (LLAMA | {"model_type": "qwen3_next"}, {None: 3}),
        (LLAMA | {"full_attention_interval": 5}, {None: 2}),
        (
            LLAMA | {"full_attention_interval": 5, "layer_types": ["full_attention"] * 12},
            {None: 12},
        ),
    ],
)
def test_windows_by_layer(config: Any, windows: dict[int | None, int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(str(tmp_path)).windows == windows
    assert read_model(str(tmp_path)).has_sink == (config["model_type"] == "gpt_oss")


def test_sizes_by_other_names(info: Any) -> None:
    """Of Step 3.5, and of Gemma 4, whose layers without a window have more columns."""
    _, text = info(COMMON | {"num_attention_heads": 64, "num_attention_groups": 8})
    assert rows(text)["each GPU"].startswith("64 heads over 8 of 64;")
    gemma = GEMMA3 | {"head_dim": 256, "global_head_dim": 512}
    code, text = info(gemma, "--kv-cache-dtype", "fp8")
    assert code == 1
    assert " of 512;" in rows(text)["each GPU"]


def test_layers_of_each_window_have_their_kernels(info: Any) -> None:
    code, text = info(GEMMA3)
    assert code == 0
    assert "8 heads over 4 of 256" in text  # which the file leaves out
    assert "10 layers                a window of 1024 tokens" in text
    assert "2 layers                 full attention" in text
    assert text.count("attention_prefill_bfloat16_256_256") == 4
    assert ", sinks;" in rows(info(GPT_OSS)[1])["each GPU"]


@pytest.mark.parametrize("config", [M3, M3_OF_TRANSFORMERS])
def test_layers_that_choose_blocks_are_those_of_vllm(config: dict[str, Any], info: Any) -> None:
    code, text = info(config)
    assert code == 0
    found = rows(text)
    assert found["3 layers"] == "full attention"
    assert found["9 layers"] == "blocks that an indexer chooses"
    assert "block_attention, block_scores, select_blocks" in text
    assert found["batch invariance"].endswith("; not of layers that choose blocks")
    assert "not tried: layers that choose blocks" in text
    assert "12 layers" not in found


@pytest.mark.parametrize(
    ("more", "sparse"),
    [
        ({"indexer_n_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 6}, 6),
        ({"sparse_config": {"topk": 512}, "layer_types": ["full_attention"] * 12}, 12),
    ],
)
def test_layers_that_choose_groups_of_tokens(more: dict[str, Any], sparse: int, info: Any) -> None:
    """Qwen's QSA and Step 5, whose choice is vLLM's."""
    code, text = info(LLAMA | {"model_type": "some"} | more)
    assert code == 0
    assert rows(text)[f"{sparse} layers"] == "blocks that an indexer chooses"
    assert "block_sparse_attention; vLLM's own chooses" in text


def test_deepseek_v41_is_refused_by_its_name(info: Any) -> None:
    """Whatever its file has: vLLM takes the text out of a config of its own."""
    flat = V4_OF_TRANSFORMERS | {"model_type": "deepseek_v41"}
    nested = {"model_type": "deepseek_v41", "text_config": V4}
    for config in (V4 | {"model_type": "deepseek_v41"}, flat, nested):
        code, text = info(config, "--kv-cache-dtype", "fp8")
        assert code == 1
        reasons = text.split("served")[1].splitlines()[1:]
        wanted = "layers: deepseek_v41 has compressed caches, which cumla reads for deepseek_v4"
        assert [each.strip() for each in reasons] == [f"{wanted} alone"]


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (MLA | {"compress_ratios": [4]}, (), "layers: deepseek_v3 has compressed caches, which"),
        (V32 | {"kv_lora_rank": 256}, (), "or 512 latent columns with sparse MLA, got 320"),
        (V32 | {"kv_lora_rank": 448}, (), "kv_lora_rank: needs 512 with sparse MLA, got 448"),
        (GLM53, ("--kv-cache-dtype", "fp8_ds_mla"), "fp8_ds_mla has rows of 576 columns, got 512"),
        (
            V32,
            ("--block-size", "16"),
            "--block-size: needs a multiple of 64, because of vLLM's indexer, got 16; leave it out",
        ),
        (V32, ("--kv-cache-dtype", "fp8_e5m2"), "fp8_e4m3, fp8_ds_mla, got fp8_e5m2"),
        (V32, ("--kv-cache-dtype", "fp8_ds_mla", "--dtype", "half"), "a model in bfloat16"),
        (
            MLA | {"kv_lora_rank": 768},
            (),
            "head size: needs rows of 576, 512, 320, 288, 1088 col",
        ),
        (MLA | {"sliding_window": 128}, (), "sliding_window: not with MLA"),
        (MLA, ("--dtype", "float32"), "--dtype: needs float16 or bfloat16, got float32"),
        (MLA, ("--kv-cache-dtype", "fp8", "--dtype", "half"), "--kv-cache-dtype: an FP8 cache"),
        (LLAMA | {"head_dim": 520}, (), "head size: needs a multiple of 8, up to 512, got 520"),
        (LLAMA, ("--kv-cache-dtype", "fp8_e5m2"), "--kv-cache-dtype: needs one of auto, "),
        (LLAMA | {"head_dim": 512}, ("--kv-cache-dtype", "fp8"), "--kv-cache-dtype: an FP8 cache"),
        (LLAMA, ("--tensor-parallel-size", "5"), "--tensor-parallel-size: needs a divisor of 32"),
        (
            LLAMA | {"num_key_value_heads": 3},
            ("--tensor-parallel-size", "2"),
            "--tensor-parallel-size: needs a divisor of 32 heads, 3 KV heads, got 2",
        ),
        (
            MLA | {"model_type": "dots3_note", "sliding_window": 128},
            (),
            "sliding_window: not with MLA",
        ),
        (LLAMA | {"rswa_window": 64}, (), "rswa_window: vLLM refuses --attention-backend CUSTOM"),
        (
            {"model_type": "unlimited-ocr", "text_config": LLAMA},
            (),
            "windows (R-SWA), here of 128 tokens; pass --attention",
        ),
        (LLAMA | {"model_type": "step1"}, (), "alibi_sqrt: cumla's backend has no ALiBi by sq"),
        (LLAMA | {"model_type": "modernbert"}, (), "layers: needs causal self-attention"),
        (LLAMA | {"layer_types": ["mamba"] * 12}, (), "layers: needs attention, got none"),
    ],
)
def test_what_is_refused_has_its_reason(
    config: dict[str, Any], options: tuple[str, ...], reason: str, info: Any
) -> None:
    code, text = info(config, *options)
    assert code == 1
    assert rows(text)["served"] == "no, leave out --attention-backend CUSTOM"
    assert reason in text
    assert "decoding" not in text


def test_what_was_not_tried_is_said(info: Any) -> None:
    for config in (
        {"model_type": "gemma3", "text_config": GEMMA3},
        LLAMA | {"use_bidirectional_attention": "vision"},
    ):
        code, text = info(config)
        assert code == 0
        assert "not tried: image tokens that see each other" in text
    code, text = info(LLAMA4 | {"linear_num_key_heads": 16, "swa_num_attention_heads": 64})
    assert code == 0
    assert "not tried: chunked local attention" in text
    assert "not tried: layers that are no attention" in text
    assert "not tried: layers of other sizes" in text
    assert "not tried" not in info(LLAMA | {"attention_chunk_size": 128})[1]  # as MiMo's, unused


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "full attention; 9 in chunks of 8192 tokens"),
        ({"no_rope_layers": []}, "full attention; 9 in chunks of 8192 tokens"),
        ({"no_rope_layers": [1, 0] * 6}, "full attention; 6 in chunks of 8192 tokens"),
        ({"attention_chunk_size": None}, "full attention"),
    ],
)
def test_layers_of_llama_4_with_rope_see_chunks(
    changes: dict[str, Any], what: str, info: Any
) -> None:
    whole = {"model_type": "llama4", "torch_dtype": "bfloat16", "text_config": LLAMA4 | changes}
    code, text = info(whole)
    found = rows(text)
    assert code == 0
    assert found["model"] == "llama4_text, no MLA, bfloat16"
    assert found["12 layers"] == what
    assert found["served"].startswith("yes")
    assert ("not tried: chunked local attention" in text) == ("chunks" in what)
    assert found["decoding, 1 request"] == "attention_few_bfloat16_128_128"


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({"model_type": "falcon", "num_key_value_heads": None, "multi_query": True}, 1),
        ({"multi_query": True, "new_decoder_architecture": True}, 8),
        ({"num_key_value_heads": None, "attn_config": {"kv_n_heads": 4}}, 4),
        ({"num_key_value_heads": None, "attn_config": None}, 32),
    ],
)
def test_kv_heads_by_other_names(changes: dict[str, Any], heads: int, info: Any) -> None:
    _, text = info(LLAMA | changes)
    assert rows(text)["each GPU"].startswith(f"32 heads over {heads} of 128;")


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "none with num_attention_heads or n_head or n_heads; write the number"),
    ({"num_attention_heads": 8}, "none with num_hidden_layers or n_layer or n_layers; write"),
    (  # Whisper, and Mamba
        {"model_type": "whisper", "encoder_attention_heads": 8, "num_hidden_layers": 6},
        "no causal self-attention (Mamba, Whisper), leave out --attention-backend",
    ),
    ({"model_type": "mamba", "num_hidden_layers": 6}, "(Mamba, Whisper), leave out"),
    (LLAMA | {"model_type": [], "num_hidden_layers": {"a": 1}}, "num_hidden_layers {"),
    (LLAMA | {"attn_config": [4]}, "attn_config [4]; it has to be an object"),
    (LLAMA | {"full_attention_interval": "4"}, "full_attention_interval '4'; write one number"),
    (LLAMA | {"num_attention_heads": "32"}, "num_attention_heads '32'; write one number"),
    (LLAMA | {"num_attention_heads": [32] * 12}, "num_attention_heads [32, 32, "),
    (LLAMA | {"num_key_value_heads": [8, 4] * 6}, "num_key_value_heads [8, 4, 8, 4, "),
    (LLAMA | {"layer_types": "full_attention"}, "layer_types 'full_attention'; write a list"),
    (LLAMA | {"layer_types": ["full_attention"] * 11}, "with an entry for each of 12"),
    (LLAMA | {"layer_types": ["full_attention", None] * 6}, "layer_types ['full_attention', None"),
    (LLAMA4 | {"no_rope_layers": 4}, "no_rope_layers 4; write a list"),
    ({"text_config": LLAMA4 | {"no_rope_layers": [1, 0]}}, "no_rope_layers [1, 0]; write a list"),
    (LLAMA | {"sliding_window": "4096"}, "sliding_window '4096'; write one number of tokens"),
    (LLAMA | {"sliding_window": [4096] * 12}, "sliding_window [4096, "),
    (
        LLAMA | {"sliding_window": 4096, "sliding_window_pattern": "LLLG"},
        "sliding_window_pattern 'LLLG'; ",
    ),
    ({"text_config": [LLAMA]}, "text_config [{"),
)


@pytest.mark.parametrize(("config", "got"), WRONG)
def test_a_config_that_does_not_fit_is_an_error_with_its_reason(
    config: dict[str, Any], got: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["info", "--vllm", str(tmp_path)]) == 2
    written = capsys.readouterr()
    assert written.err.startswith(f"cumla info: {tmp_path}: needs the config.json of a model, got ")
    assert got in written.err
    assert written.err.endswith(
        "; `hf download MODEL config.json --local-dir FOLDER` fetches one\n"
    )
    assert "served" not in written.out


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"[]", "the file []; it has to be an object"),
        (b"null", "the file None; it has to be an object"),
        (b"no json", "no JSON (Expecting value"),
        (b"", "no JSON (Expecting value"),
        (b"\xff\xfe", "no JSON ('utf-8' codec"),
        (b"[" * 100_000, "no JSON ("),
    ],
)
def test_a_file_that_is_no_model_is_an_error(
    content: bytes, got: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert main(["info", "--vllm", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    start = f"cumla info: {tmp_path}: needs the config.json of a model, got {got}"
    assert message.startswith(start)
    assert message.endswith("; `hf download MODEL config.json --local-dir FOLDER` fetches one\n")


def test_what_is_no_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--vllm", ""]) == 2
    assert "--vllm: needs the config.json of a model, got an empty name" in capsys.readouterr().err
    (tmp_path / "config.json").mkdir()
    assert main(["info", "--vllm", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert f"got a folder, {tmp_path / 'config.json'}; `hf download" in message
    (tmp_path / "file").write_text("{}")
    for model in ("org/model", "none.json", "file/x"):  # a name on Hugging Face is no folder
        assert main(["info", "--vllm", str(tmp_path / model)]) == 2
        message = capsys.readouterr().err
        assert f"{model}: needs the config.json of a model" in message
        assert "`hf download MODEL config.json " in message


@pytest.mark.parametrize(
    "option",
    [
        *("--dtype=half", "--kv-cache-dtype=auto", "--block-size=64", "--tensor-parallel-size=1"),
        "--fp8-products",
    ],
)
@pytest.mark.parametrize("rest", [(), ("--vllm",)])
def test_options_of_a_model_need_one(
    option: str, rest: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", *rest, option]) == 2
    name = option.partition("=")[0]
    message = f"cumla info: {name}: needs a model to ask about, got none; add --vllm CONFIG\n"
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize(
    ("version", "answer", "code"),
    [
        ("0.26.0", "0.26.0: tested", 0),
        ("0.34.0", "0.34.0: not tested; served if it has the interfaces, after a warning", 0),
        ("0.24.0", "0.24.0: refused", 1),
    ],
)
def test_an_installed_vllm_is_judged_as_the_plugin_does(
    version: str, answer: str, code: int, info: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "vllm" else real(name))
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    got, text = info(LLAMA)
    assert got == code
    assert rows(text)["vLLM"] == answer
    assert ('install one ("vllm>=0.25' in text) == (code == 1)
    found = metadata.entry_points(group="vllm.general_plugins", name="cumla")
    assert rows(text)["plugin"].startswith("not loaded: VLLM_PLUGINS" if found else "not found")


@pytest.mark.parametrize(
    ("version", "answer", "code"),
    [
        ("0.25.1", "0.25.1: refused", 1),
        ("0.28.0", "0.28.0: tested", 0),
        ("0.33.0", "0.33.0: tested", 0),
    ],
)
def test_versions_for_sparse_mla_are_others(
    version: str,
    answer: str,
    code: int,
    info: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "vllm" else real(name))
    got, text = info(V32)
    assert (got, rows(text)["vLLM"]) == (code, answer)
    assert rows(info(MLA)[1])["vLLM"] == f"{version}: tested"
    assert main(["info", "--vllm"]) == 0
    found = rows(capsys.readouterr().out)
    assert (found["vLLM"], found["with sparse MLA"]) == (f"{version}: tested", answer)


def test_vllm_gets_the_same_answers() -> None:
    """The backends have these classes, and answer nothing else by themselves."""
    pytest.importorskip("torch")
    from tests.vllm.stub import stubbed

    with stubbed():
        from cumla.vllm import mha, mla
        from cumla.vllm._models import MHAKernels, MLAKernels

        for backend, kernels in ((mla.Backend, MLAKernels), (mha.Backend, MHAKernels)):
            asked = {name for kind in kernels.__mro__[:-1] for name in vars(kind)}
            assert backend.__mro__[1] is kernels
            assert not asked & {name for name in vars(backend) if name.startswith("support")}


def test_it_needs_neither_torch_nor_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code = (
        "import sys; sys.modules.update(torch=None, vllm=None); from cumla.cli import main; "
        f"sys.exit(main(['info', '--vllm', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Return what the plugins have logged of kernels, in a process that said nothing before."""
    pytest.importorskip("torch")
    monkeypatch.setattr("cumla._choices._said", set())
    caplog.set_level("INFO")
    return lambda: [record for record in caplog.records if "attends in" in record.getMessage()]


def test_vllm_logs_once_which_kernels_serve_which_layers(told: Any) -> None:
    import torch

    from tests.vllm.layers import MHA as Full
    from tests.vllm.layers import MLA as Latent
    from tests.vllm.stub import stubbed

    with stubbed():
        for _ in range(2):  # micro-batches have a builder each
            Full()
            Latent()
            Latent(torch.uint8)
    assert {record.name for record in told()} == {"vllm.cumla"}  # below the logger that is shown
    full, latent, fp8 = (record.getMessage() for record in told())
    assert full == (
        "cumla attends in layers without a window (1): attention_decode_bfloat16_64_64_8, "
        "attention_bfloat16_64_64, attention_prefill_bfloat16_64_64, "
        "attention_prefill_bfloat16_64_64_split; layers with a window of 8 "
        "(1): attention_few_bfloat16_64_64, attention_bfloat16_64_64, "
        "attention_prefill_bfloat16_64_64"
    )
    mla = "cumla attends in layers with MLA (1): "
    assert latent == f"{mla}mla_decode_bfloat16_swapped_boxes, mla_attention_bfloat16_boxes"
    assert fp8 == f"{mla}mla_decode_fp8_16_rows, mla_attention_fp8_rows"
