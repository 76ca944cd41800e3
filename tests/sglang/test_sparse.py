# SPDX-License-Identifier: Apache-2.0
"""The plugin's backend for sparse MLA on a stub of SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import cumla
import cumla.sglang
import tests.emulator
from tests.bindings.stand_in import CONFIG, OF_MODEL, PATH
from tests.compat.torch_gpu import torch_gpu
from tests.sglang.stub import Handlers, absorbing, backends, stubbed

torch = pytest.importorskip("torch")

SLOTS, TOPK = 200, 24
CACHES = {"bfloat16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "packed": torch.uint8}


@pytest.fixture(autouse=True)
def sglang() -> Iterator[None]:
    with stubbed():
        yield


def made(kind: str = "bfloat16", device: str = "cpu", **other: Any) -> Any:
    """A backend as SGLang makes it, and a cache."""
    is_packed = kind == "packed"
    of_pool = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "dsa_index_kpool": 1,
        "dcp_size": 1,
        "hisparse_coordinator": None,
        "dsa_kv_cache_store_fp8": is_packed,
    }
    runner = SimpleNamespace(
        use_mla_backend=True,
        dtype=torch.bfloat16,
        kv_cache_dtype=CACHES[kind] if not is_packed else torch.float8_e4m3fn,
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(**vars(CONFIG), index_topk=TOPK), model_path=PATH
        ),
        device=device,
        sparse=of_pool | other,
    )
    cumla.sglang.register()
    backend = backends["cumla"](runner)
    columns = 512 + runner.sparse["qk_rope_head_dim"]
    nbytes = {576: 656, 512: 528}[columns]
    form = "v32_no_rope" if is_packed and columns == 512 else None
    columns_stored = nbytes if is_packed else columns
    cache = torch.zeros(SLOTS, 1, columns_stored, dtype=CACHES[kind], device=device)
    rows = torch.randn(SLOTS, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    slots = torch.arange(SLOTS, device=device)
    cumla.append_mla_cache(rows.to(device), cache, slots, cache_format=form)
    return backend, cache.view(torch.float8_e4m3fn) if is_packed else cache  # as SGLang views it


def stored(kind: str, cache: Any) -> Any:
    """A cache as cumla takes it."""
    return cache.view(torch.uint8) if kind == "packed" else cache


def inputs(tokens: int, heads: int = 4) -> tuple[Any, Any, Any]:
    """Queries, slots and the number of slots of each token."""
    generator = torch.Generator().manual_seed(tokens)
    q = torch.randn(tokens, heads, 576, generator=generator).bfloat16()
    slots = torch.randint(0, SLOTS, (tokens, TOPK), generator=generator, dtype=torch.int32)
    lengths = torch.randint(1, TOPK + 1, (tokens,), generator=generator, dtype=torch.int32)
    slots[torch.arange(TOPK)[None] >= lengths[:, None]] = -1
    return q, slots, lengths


@pytest.mark.parametrize("kind", CACHES)
def test_rows_without_rope_and_lists_of_pools(kind: str) -> None:
    """As GLM-5.3 has them: tokens of its last pool are behind lengths that SGLang tells."""
    backend, cache = made(kind, qk_rope_head_dim=0, dsa_index_kpool=4)
    q, slots, lengths = inputs(5)
    q = q[..., :512].contiguous()
    slots[0, -2:] = 7
    form = {"cache_format": "v32_no_rope"} if kind == "packed" else {}
    rows = stored(kind, cache)
    wanted = cumla.mla_sparse_attention(q, rows, slots, softmax_scale=0.1, **form)
    backend.init_forward_metadata(SimpleNamespace(lengths=lengths.clamp(max=3)))
    torch.testing.assert_close(backend.forward_decode(q, cache, slots), wanted.out)
    assert backend._resolve_kpool_tail_backend(slots, "flashmla_sparse") == "flashmla_sparse"
    assert backend._check_kpool_tail_backend(slots, "flashmla_sparse", "decode") is None


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("missing", [0, 2])
def test_sparse_mla_attends_as_the_eager_call(kind: str, missing: int) -> None:
    """Also where SGLang has told lengths of fewer tokens, or of padding behind them.

    Layers with sinks and without them share a step.
    """
    backend, cache = made(kind)
    q, slots, lengths = inputs(5)
    for told in (lengths[: 5 - missing], torch.cat([lengths, lengths])):
        backend.init_forward_metadata(SimpleNamespace(lengths=told))
        for sinks in (None, torch.linspace(-1, 1, 4).bfloat16(), None):
            options = {} if sinks is None else {"sinks": sinks.float()}
            rows = stored(kind, cache)
            wanted = cumla.mla_sparse_attention(q, rows, slots, softmax_scale=0.1, **options)
            for attend in (backend.forward_decode, backend.forward_extend):
                out = attend(q, cache, slots, attn_sink=sinks)
                torch.testing.assert_close(out, wanted.out)


@pytest.mark.parametrize("kind", CACHES)
def test_rows_that_sglang_brings_from_the_host_are_attended_to(kind: str) -> None:
    """HiSparse: SGLang tells where in the GPU's buffer the rows of the slots are."""
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))

    def brought(requests: Any, lengths: Any, slots: Any, layer: int) -> Any:
        found = order.argsort()[slots.clamp(min=0).long()].int()
        return found.where(torch.arange(TOPK) < lengths[:, None], SLOTS - 1)  # any row behind them

    host = SimpleNamespace(swap_in_selected_pages=brought)
    backend, cache = made(kind, hisparse_coordinator=host)
    q, slots, lengths = inputs(5)
    wanted = cumla.mla_sparse_attention(q, stored(kind, cache), slots, softmax_scale=0.1)
    backend.init_forward_metadata(SimpleNamespace(lengths=lengths))
    buffer = cache.view(torch.uint8)[order].view(cache.dtype)
    torch.testing.assert_close(backend.forward_decode(q, buffer, slots), wanted.out)


def test_queries_in_parts_are_not_copied() -> None:
    """As SGLang's model passes them: without sinks its backend makes no array of both parts."""
    backend, cache = made()
    q, slots, lengths = inputs(5)
    latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)  # of a batched product
    backend.init_forward_metadata(SimpleNamespace(lengths=lengths))
    with mock.patch.object(cumla.MLASparsePlan, "run", autospec=True) as run:
        backend.forward_decode(latent, cache, slots, q_rope=q[..., 512:])
    nope, rope = run.call_args.args[1]
    assert nope.data_ptr() == latent.data_ptr()
    assert rope.data_ptr() == q[..., 512:].data_ptr()
    out = backend.forward_decode(latent, cache, slots, q_rope=q[..., 512:])
    wanted = cumla.mla_sparse_attention(q, cache, slots, softmax_scale=0.1)
    torch.testing.assert_close(out, wanted.out)


def test_lengths_of_other_tokens_are_not_taken() -> None:
    """As SGLang's own backend: where their number is another one, they are not those of q."""
    backend, cache = made()
    q, slots, _ = inputs(5)
    slots.clamp_(min=0)
    wanted = cumla.mla_sparse_attention(q, cache, slots, softmax_scale=0.1)
    backend.init_forward_metadata(SimpleNamespace(lengths=torch.arange(1, 11).int()))
    torch.testing.assert_close(backend.forward_decode(q, cache, slots), wanted.out)


def test_models_are_told_to_absorb_as_sglangs_own_backend_decides() -> None:
    backend, _ = made()
    assert type(backend).__module__ == "cumla.sglang.sparse"
    assert absorbing == ["fa3", "cumla"]
    assert Handlers.found["cumla"] == "as dsa"


def test_a_step_has_one_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    with torch_gpu(always=True) as gpu:
        monkeypatch.setattr(tests.emulator, "emulate", noted.append)
        backend, cache = made("packed")
        q, slots, lengths = inputs(5)
        backend.init_forward_metadata(SimpleNamespace(lengths=lengths))
        backend.forward_decode(q, cache, slots)
        for captured in (False, True):
            backend.init_forward_metadata_out_graph(SimpleNamespace(lengths=lengths), captured)
            noted.clear()
            with gpu.capture(7):
                for _ in range(3):
                    backend.forward_decode(q, cache, slots)
            names = [launch.spec.entry for launch in noted]
            assert sum("schedule" in name for name in names) == 1, names
            assert sum(name.startswith("mla_sparse") for name in names) == 3, names


REFUSED = {
    "kv_lora_rank, qk_rope_head_dim": {"kv_lora_rank": 256},
    "dcp_size": {"dcp_size": 2},
    "hisparse_coordinator": {"hisparse_coordinator": "host", "dsa_index_kpool": 4},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_its_name(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^{name}: .* got .*; leave out.*{OF_MODEL}"):
        made(**REFUSED[name])


@pytest.mark.parametrize("kind", CACHES)
def test_deterministic_steps_are_sparse_and_have_the_same_bits(kind: str) -> None:
    """Dense attention of short prompts would depend on the longest one of a step."""
    assert made()[0].supports_mha_one_shot
    with stubbed(is_deterministic=True):
        backend, cache = made(kind)
        assert not backend.supports_mha_one_shot
        q, slots, lengths = inputs(5)
        backend.init_forward_metadata(SimpleNamespace(lengths=lengths))
        whole = backend.forward_extend(q, cache, slots)
        (step,) = backend._steps.values()
        assert step.plan.key.batch_invariant
        backend.init_forward_metadata(SimpleNamespace(lengths=lengths[2:3]))
        assert torch.equal(backend.forward_decode(q[2:3], cache, slots[2:3]), whole[2:3])
