# SPDX-License-Identifier: Apache-2.0
"""`python -m cumla info --sglang`: models that the plugin serves, by which kernels, and why not."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cumla.cli import main
from tests.vllm.test_models import (
    GEMMA3,
    GLM53,
    GPT_OSS,
    LLAMA,
    LLAMA4,
    M3,
    MLA,
    ROOT,
    V4,
    V32,
    rows,
)


@pytest.fixture
def info(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> Any:
    """Run the command for a model without SGLang; return its exit code and its lines."""

    def run(config: dict[str, Any], *options: str) -> tuple[int, str]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        code = main(["info", "--sglang", str(tmp_path), *options])
        return code, capsys.readouterr().out

    def version(name: str) -> str:
        if name == "sglang":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    real = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    return run


FP8 = "--kv-cache-dtype", "fp8_e4m3"


@pytest.mark.parametrize(
    ("config", "options", "step", "kernels"),
    [
        (MLA, ("--tp", "8"), "prefill, 1 request", "mla_attention_bfloat16"),
        (MLA, ("--tp", "8", *FP8), "decoding, 1 request", "mla_decode_fp8_16"),
        (V32, ("--tp", "8"), "prefill, 1 request", "mla_sparse_bfloat16_shared_blocks"),
        (V32, ("--tp", "8", *FP8), "decoding, 1 request", "mla_sparse_packed_16"),
        (LLAMA, (), "prefill, 1 request", "attention_prefill_bfloat16_128_128"),
        (LLAMA, FP8, "decoding, 128 requests", "attention_decode_bfloat16_128_128_e4m3_8"),
    ],
)
def test_kernels_of_a_model(
    config: dict[str, Any], options: tuple[str, ...], step: str, kernels: str, info: Any
) -> None:
    code, text = info(config, *options)
    assert code == 0
    assert rows(text)["served"] == "yes, with --attention-backend cumla"
    assert rows(text)[step] == kernels
    assert "vLLM" not in text


def test_rows_without_rope_columns_are_packed_in_their_own_form(info: Any) -> None:
    code, text = info(GLM53, *FP8)
    found = rows(text)
    assert code == 0
    assert found["decoding, 1 request"].startswith("mla_sparse_packed")
    assert found["decoding, 1 request"] != rows(info(V32, *FP8)[1])["decoding, 1 request"]
    assert found["indexer"] == "SGLang's own: it chooses pools of 16 tokens"
    assert found["prefill up to 2048"].startswith("SGLang's own backend")
    assert rows(info(V32)[1])["indexer"] == "paged_mqa_logits, mqa_logits, top_k"


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (V4, (), "layers: SGLang serves those of DeepSeek-V4 by a backend of its own"),
        (LLAMA, ("--kv-cache-dtype", "fp8_e5m2"), "--kv-cache-dtype: needs one of auto, bfloat16"),
        (
            LLAMA,
            ("--dtype", "float16", "--kv-cache-dtype", "bf16"),
            "--kv-cache-dtype: needs one of auto or fp8_e4m3, got bf16",
        ),
        (MLA, ("--dtype", "float16", *FP8), "--kv-cache-dtype: an FP8 cache needs a model in"),
        (LLAMA, ("--dtype", "float"), "--dtype: needs float16 or bfloat16, got float32"),
        (LLAMA, ("--tp", "3"), "--tensor-parallel-size: needs a divisor of 32 heads, 8 KV heads"),
        (LLAMA | {"head_dim": 520}, (), "head size: needs a multiple of 8, up to 512, got 520"),
        (MLA | {"learnable_sink": True}, (), "sinks: not with dense MLA"),
        (MLA | {"sliding_window": 128}, (), "sliding_window: not with MLA"),
        (LLAMA | {"indexer_n_heads": 4, "layer_types": ["full_attention"] * 12}, (), "groups of"),
        (LLAMA | {"layer_types": ["linear_attention"] * 12}, (), "layers: needs attention, got"),
    ],
)
def test_what_is_refused_has_a_reason(
    config: dict[str, Any], options: tuple[str, ...], reason: str, info: Any
) -> None:
    code, text = info(config, *options)
    assert code == 1
    assert rows(text)["served"] == "no, leave out --attention-backend cumla"
    assert reason in text
    assert "vLLM" not in text


@pytest.mark.parametrize(
    ("config", "options", "way"),
    [
        (GPT_OSS, (), "pass --disable-hybrid-swa-memory"),
        (GEMMA3, (), "pass --disable-hybrid-swa-memory"),
        (LLAMA4, (), "pass --prefill-attention-backend cumla --decode-attention-backend cumla"),
        (M3, (), "pass --page-size 128; with 64 SGLang's kernels attend"),
    ],
)
def test_options_that_a_served_model_needs(
    config: dict[str, Any], options: tuple[str, ...], way: str, info: Any
) -> None:
    code, text = info(config, *options)
    assert code == 0
    assert way in text
    if config is M3:
        assert way not in info(config, "--page-size", "128")[1]
        assert "block_attention, block_scores, select_blocks" in text


def test_fp8_products_are_vllms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MLA))
    assert main(["info", "--sglang", str(tmp_path), "--fp8-products"]) == 2
    message = "cumla info: --fp8-products: needs --vllm, got --sglang; leave it out\n"
    assert capsys.readouterr() == ("", message)


def test_it_needs_a_config_that_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--sglang", "--tp", "8"]) == 2
    needs = "--tensor-parallel-size: needs a model to ask about, got none; add --sglang CONFIG"
    assert needs in capsys.readouterr().err
    assert main(["info", "--sglang", ""]) == 2
    assert "and --sglang FOLDER names it" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["info", "--sglang", str(tmp_path)]) == 2
    assert "CUSTOM" not in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["info", "--sglang", str(tmp_path), "--vllm", str(tmp_path)])
    assert stopped.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "answer", "code"),
    [
        ("0.5.22", "0.5.22: tested", 0),
        ("0.5.24", "0.5.24: not tested; served if it has the interfaces, after a warning", 0),
        ("0.5.21", "0.5.21: refused", 1),
    ],
)
def test_an_installed_sglang_is_judged_as_the_plugin_does(
    version: str, answer: str, code: int, info: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: version if name == "sglang" else real(name)
    )
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    got, text = info(LLAMA)
    assert (got, rows(text)["SGLang"]) == (code, answer)
    found = metadata.entry_points(group="sglang.srt.plugins", name="cumla")
    assert rows(text)["plugin"].startswith("not loaded: SGLANG_PLUGINS" if found else "not found")


def test_it_needs_neither_torch_nor_sglang(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code = (
        "import sys; sys.modules.update(torch=None, sglang=None); from cumla.cli import main; "
        f"sys.exit(main(['info', '--sglang', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
