# SPDX-License-Identifier: Apache-2.0
"""A backend and its caches, set up as SGLang does; `stubbed` must be in force."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import cumla.sglang
from tests.bindings.stand_in import MODEL
from tests.sglang.stub import DecoderType, Mode, backends

torch = pytest.importorskip("torch")

PAGE, SLOTS, LONGEST, HEADS, SCALE = 16, 24 * 16, 128, 4, 0.1


class Server:
    """A backend, and its caches: `requests` of the pool have their pages in turn."""

    def __init__(
        self,
        is_mla: bool,
        cache_dtype: Any = torch.bfloat16,
        page: int = PAGE,
        device: str = "cpu",
        is_ngram: bool = False,
        width: tuple[int, int] = (512, 64),
        **of_model: Any,
    ) -> None:
        torch.manual_seed(1)
        self.width = width  # of MLA: latent columns, and RoPE ones
        columns = [sum(width)] if is_mla else [64, 32]
        heads = 1 if is_mla else 2
        rows = [torch.randn(SLOTS, heads, n).bfloat16().to(device) for n in columns]
        self.buffers = [torch.zeros_like(each, dtype=cache_dtype) for each in rows]
        pages = torch.arange(SLOTS // PAGE).view(-1, 3).T.flip(0).contiguous()  # of 3 requests
        self.table = pages.int().to(device)
        slots = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).int().to(device)
        self.runner = SimpleNamespace(
            use_mla_backend=is_mla,
            page_size=page,
            dtype=torch.bfloat16,
            kv_cache_dtype=cache_dtype,
            model_config=SimpleNamespace(**vars(MODEL) | {"context_len": LONGEST} | of_model),
            spec_algorithm=SimpleNamespace(is_ngram=lambda: is_ngram),
            req_to_token_pool=SimpleNamespace(req_to_token=slots),
            token_to_kv_pool=SimpleNamespace(
                get_key_buffer=lambda layer: self.buffers[0],
                get_kv_buffer=lambda layer: tuple(self.buffers),
            ),
        )
        cumla.sglang.register()
        self.backend = backends["cumla"](self.runner)
        self.fill(rows)

    def fill(self, rows: list[Any]) -> None:
        for each, buffer in zip(rows, self.buffers, strict=True):
            buffer.copy_(each)

    def layer(self, **other: Any) -> Any:
        is_mla = self.runner.use_mla_backend
        usual = {
            "layer_id": 0,
            "tp_q_head_num": HEADS,
            "tp_k_head_num": 1 if is_mla else 2,
            "qk_head_dim": sum(self.width) if is_mla else 64,
            "v_head_dim": self.width[0] if is_mla else 32,
            "scaling": SCALE,
            "logit_cap": 0.0,
            "sliding_window_size": -1,
            "k_scale": None,
            "v_scale": None,
            "is_cross_attention": False,
            "attn_type": DecoderType.DECODER,
            "xai_temperature_len": -1,
            "pos_encoding_mode": "NONE",
            "use_irope": False,
        }
        return SimpleNamespace(**usual | other)

    def batch(self, mode: Mode, lens: tuple[int, ...], new: tuple[int, ...], **other: Any) -> Any:
        """A step of requests 2, 1 and 0, whose last `new` tokens are the queries."""
        before = new if mode is Mode.TARGET_VERIFY else (0,) * len(lens)
        slots = self.runner.req_to_token_pool.req_to_token
        on = slots.device
        seq_lens = torch.tensor(lens, device=on) - torch.tensor(before, device=on)
        requests = torch.arange(2, -1, -1, device=on)[: len(lens)]
        found = [slots[r, n - q : n] for r, n, q in zip(requests, lens, new, strict=True)]
        lengths = list(zip(lens, new, strict=True))
        usual = {
            "forward_mode": mode,
            "batch_size": len(lens),
            "req_pool_indices": requests,
            "seq_lens": seq_lens,
            # SGLang copies those of drafts to the host for backends alone that ask for it
            "seq_lens_cpu": None if mode is Mode.TARGET_VERIFY else seq_lens,
            "positions": torch.cat([torch.arange(n - q, n, device=on) for n, q in lengths]),
            "out_cache_loc": torch.cat(found).long(),
            "extend_seq_lens": torch.tensor(new, dtype=torch.int32, device=on),
            "extend_prefix_lens_cpu": [n - q for n, q in lengths],
            "mm_inputs": None,
        }
        return SimpleNamespace(**usual | other)


def starts(new: tuple[int, ...]) -> Any:
    return torch.tensor([0, *torch.tensor(new).cumsum(0)], dtype=torch.int32)


# What five drafts see: the first verified token has two children; each of these has one.
TREE = torch.tensor(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]],
    dtype=torch.bool,
)


def tree_of(lens: tuple[int, ...], *, is_full: bool, into: Any = None) -> Any:
    """SGLang's input of a verification, with trees of TREE's form and its mirror in turn."""
    trees = [TREE if r % 2 == 0 else TREE.T.flip(0, 1) for r in range(len(lens))]
    before = [torch.ones(5, n - 5, dtype=torch.bool) for n in lens]
    rows = [torch.cat([b, t], 1) if is_full else t for b, t in zip(before, trees, strict=True)]
    flat = torch.cat([each.flatten() for each in rows])
    if into is not None:
        into[: len(flat)] = flat
    depths = [n - 5 + tree.sum(1) - 1 for n, tree in zip(lens, trees, strict=True)]
    mask = flat if into is None else into
    return SimpleNamespace(custom_mask=mask, positions=torch.cat(depths))


STEPS = {  # mode, lengths, query tokens of each, drafts, the kind of plan
    "decoding": (Mode.DECODE, (90, 5, 33), (1, 1, 1), None, "MLADecodePlan"),
    "drafts": (Mode.TARGET_VERIFY, (90, 5, 33), (3, 3, 3), 3, "MLADecodePlan"),
    "prefill": (Mode.EXTEND, (90, 5, 33), (40, 5, 1), None, "MLAAttentionPlan"),
}
