# SPDX-License-Identifier: Apache-2.0
"""Tiny models of Transformers generate with cumla what they generate with its own attention."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.20")

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "pad_token_id": 2,
}
MODELS = {
    "llama": {"head_dim": 32},
    "mistral": {"head_dim": 32, "sliding_window": 8},
    "gemma2": {
        "head_dim": 32,
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": None,
    },
    "gpt_oss": {
        "head_dim": 32,
        "sliding_window": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 9,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
    },
}


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "disable_compile": True}])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, is_padded: bool, cache: dict[str, Any]) -> None:
    import cumla.transformers  # noqa: F401  (registers the name)

    config = transformers.AutoConfig.for_model(name, **SIZES | MODELS[name])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    ids = torch.randint(3, 256, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if is_padded:
        mask[1, :7] = mask[2, :19] = 0
    found = []
    for implementation in ("eager", "cumla"):
        model.set_attn_implementation(implementation)
        found.append(
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=12,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **cache,
            )
        )
    theirs, ours = found
    assert torch.equal(ours.sequences, theirs.sequences)
    for one, other in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "bart"])
def test_encoders(name: str, padding: str | None) -> None:
    """Full attention, windows to both sides, and cross attention."""
    import cumla.transformers  # noqa: F401  (registers the name)

    sizes = SIZES | {"pad_token_id": 0}
    if name == "modernbert":
        sizes |= {"local_attention": 8, "bos_token_id": 1, "eos_token_id": 1}
        sizes |= {"cls_token_id": 1, "sep_token_id": 1}
    if name == "bart":
        sizes = {"d_model": 64, "vocab_size": 256, "max_position_embeddings": 64}
        sizes |= {f"{one}_layers": 2 for one in ("encoder", "decoder")}
        sizes |= {f"{one}_attention_heads": 4 for one in ("encoder", "decoder")}
        sizes |= {f"{one}_ffn_dim": 64 for one in ("encoder", "decoder")}
    config = transformers.AutoConfig.for_model(name, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    ids = torch.randint(3, 256, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding is not None:
        mask[1, :7] = mask[2, :15] = 0
        mask = mask if padding == "left" else mask.flip(1)
    found: list[Any] = []
    for implementation in ("eager", "cumla"):
        model.set_attn_implementation(implementation)
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if name == "bart":
            given |= {"decoder_input_ids": ids[:, :6]}
        if (name, padding, implementation) == ("modernbert", "right", "cumla"):
            with pytest.raises(NotImplementedError, match=r"padding after them; pad on the left"):
                model(**given)
            return
        with torch.no_grad():
            hidden = model(**given).last_hidden_state
        found.append(hidden if name == "bart" else hidden[mask.bool()])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
