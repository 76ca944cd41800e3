# SPDX-License-Identifier: Apache-2.0
"""SGLang's engine with cumla's wheel beside it: the logprobs of transformers in float32.

These need `SGLANG_TEST_PYTHON`, the Python of an environment that make_environment.sh has made.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.servers import installed, last_line

FOLDER = Path(__file__).resolve().parent
PYTHON = os.environ.get("SGLANG_TEST_PYTHON", "")

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not PYTHON, reason="needs SGLANG_TEST_PYTHON: see make_environment.sh"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cumla as it is installed, with its entry point."""
    return installed(tmp_path_factory.mktemp("sglang"))


def run(site: Path, script: str, *arguments: str) -> str:
    """Run a script of this folder with SGLang; return its last line."""
    given = os.environ.get("PYTHONPATH", "")  # another SGLang may lie there
    path = f"{site}:{FOLDER / 'standins'}:{given}"
    return last_line(PYTHON, path, f"sglang/{script}", *arguments)


def generate(site: Path, model: str, **options: Any) -> tuple[dict[str, int], list[float]]:
    """Generate 24 tokens for each of four prompts: cumla's calls, errors of the logprobs."""
    arguments = model, str(site.parent / model), "--options", json.dumps(options)
    found = json.loads(run(site, "generate.py", *arguments))
    errors = [
        abs(one - other)
        for ours, wanted in zip(found["logprobs"], found["expected"], strict=True)
        for one, other in zip(ours, wanted, strict=True)
    ]
    assert len(errors) == 96
    return found["calls"], errors


def test_the_names_are_sglangs(site: Path) -> None:
    assert run(site, "interfaces.py").startswith("0.")


@pytest.mark.parametrize(
    "options",
    [{"page_size": 64}, {"chunked_prefill_size": 32, "enable_mixed_chunk": True}],
    ids=["at once", "in chunks"],
)
def test_deepseek(site: Path, options: dict[str, Any]) -> None:
    calls, errors = generate(site, "deepseek", **options)
    assert calls["MLADecodePlan"] == 46  # of 2 layers
    if "page_size" in options:
        assert calls["MLAAttentionPlan"] == 2
    else:  # how many chunks depends on when requests arrive
        assert calls["MLAAttentionPlan"] > 10
    # Logits of about 5 have 8 bits.
    assert max(errors) < 0.15
    assert mean(errors) < 0.05


def test_deepseek_decodes_from_an_fp8_cache(site: Path) -> None:
    calls, errors = generate(site, "deepseek", kv_cache_dtype="fp8_e4m3")
    assert calls["MLADecodePlan"]
    assert 0.15 < max(errors) < 0.6
    assert mean(errors) < 0.2


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_mha_models_with_windows_and_soft_caps(site: Path, model: str) -> None:
    calls, errors = generate(site, model, dtype="float32")
    assert calls == {"AttentionPlan": 48}
    assert max(errors) < 1e-4


def test_decoding_beside_another_prefill_backend(site: Path) -> None:
    backends = {"decode_attention_backend": "cumla", "prefill_attention_backend": "torch_native"}
    calls, errors = generate(site, "llama", dtype="float32", **backends)
    assert calls == {"AttentionPlan": 46}
    assert max(errors) < 1e-4
