# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine with cumla's wheel beside it: the same tokens as from vLLM's own attention.

These need `VLLM_TEST_PYTHON`, the Python of an environment that make_environment.sh has made.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.servers import installed, last_line

PYTHON = os.environ.get("VLLM_TEST_PYTHON", "")

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not PYTHON, reason="needs VLLM_TEST_PYTHON: see make_environment.sh"),
]

FLOAT32 = {"dtype": "float32"}
DRAFTS = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cumla as it is installed, with its entry point."""
    return installed(tmp_path_factory.mktemp("vllm"))


def run(site: Path, script: str, *arguments: str) -> str:
    """Run a script of this folder with vLLM; return its last line."""
    return last_line(PYTHON, str(site), f"vllm/{script}", *arguments)


def generate(site: Path, model: str, backend: str, **options: Any) -> dict[str, Any]:
    """Generate 24 tokens for each of four prompts."""
    arguments = model, backend, str(site.parent / model), "--options", json.dumps(options)
    found: dict[str, Any] = json.loads(run(site, "serve.py", *arguments))
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Compare the logprobs of each step, up to the first token that differs."""
    found = []
    both = zip(*(zip(x["tokens"], x["logprobs"], strict=True) for x in (one, other)), strict=True)
    for (tokens, logprobs), (others, other_logprobs) in both:
        for i, (ours, theirs) in enumerate(zip(logprobs, other_logprobs, strict=True)):
            found.append(max(abs(ours[token] - theirs[token]) for token in ours.keys() & theirs))
            if tokens[i] != others[i]:
                break
    return found


def test_the_classes_fit_vllms(site: Path) -> None:
    assert run(site, "interfaces.py").startswith("0.")


def test_deepseek_decodes_as_with_vllms_own_mla(site: Path) -> None:
    own, ours = (generate(site, "deepseek", backend) for backend in ("own", "cumla"))
    assert ours["calls"] == {"MLAAttentionPlan": 2, "MLADecodePlan": 46}  # of 2 layers
    found = differences(own, ours)
    assert len(found) >= 20
    # Logits of about 5 have 8 bits.
    assert max(found) < 0.1
    assert mean(found) < 0.05


def test_deepseek_decodes_from_an_fp8_cache(site: Path) -> None:
    own = generate(site, "deepseek", "own")
    ours = generate(site, "deepseek", "cumla", kv_cache_dtype="fp8")
    assert ours["calls"]["MLADecodePlan"]
    found = differences(own, ours)
    assert 0.05 < max(found) < 0.5
    assert mean(found) < 0.2


def test_a_compiled_model_generates_the_same(site: Path) -> None:
    own = generate(site, "llama", "own", **FLOAT32)
    ours = generate(site, "llama", "cumla", **FLOAT32, enforce_eager=False)
    assert ours["calls"] == {"AttentionPlan": 48}
    assert ours["tokens"] == own["tokens"]
    assert max(differences(own, ours)) < 1e-3


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_mha_models_generate_as_with_vllms_own_attention(site: Path, model: str) -> None:
    own, ours = (generate(site, model, backend, **FLOAT32) for backend in ("own", "cumla"))
    assert ours["calls"] == {"AttentionPlan": 48}
    assert ours["tokens"] == own["tokens"]
    assert max(differences(own, ours)) < 1e-3


def test_drafts_are_verified_as_with_vllms_own_attention(site: Path) -> None:
    options = FLOAT32 | DRAFTS
    own, ours = (generate(site, "llama", backend, **options) for backend in ("own", "cumla"))
    assert ours["tokens"] == own["tokens"]
    assert max(differences(own, ours)) < 1e-3
