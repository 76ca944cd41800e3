# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse MLA on a stub of SGLang: cumla scores and selects."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import cumla
import cumla.sglang
import tests.emulator
from tests.compat.torch_gpu import torch_gpu
from tests.sglang.stub import Pool, stubbed
from tests.sglang.test_sparse import made

torch = pytest.importorskip("torch")

PAGES, PAGE, HEADS, TOPK = 12, 64, 32, 24
LENGTHS = 200, 70, 10  # of three requests
DSA = "sglang.srt.layers.attention.dsa"


@pytest.fixture(autouse=True)
def sglang() -> Iterator[None]:
    with stubbed():
        yield


def keys(device: str = "cpu") -> Any:
    """A cache of keys as SGLang's pool keeps them."""
    generator = torch.Generator().manual_seed(3)
    cache = torch.zeros(PAGES, PAGE, 132, dtype=torch.uint8, device=device)
    rows = torch.randn(PAGES * PAGE, 128, generator=generator).bfloat16().to(device)
    cumla.append_indexer_cache(rows, cache, torch.arange(PAGES * PAGE, device=device))
    Pool.keys = cache.view(PAGES, -1)
    return cache


def asking(tokens: int, device: str = "cpu") -> tuple[Any, Any]:
    """Queries, and weights with the axis that SGLang has behind them."""
    generator = torch.Generator().manual_seed(tokens)
    q = torch.randn(tokens, HEADS, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.rand(tokens, HEADS, 1, generator=generator)
    return q.to(device), weights.to(device)


def step(q_len: int = 1, device: str = "cpu") -> Any:
    """Metadata of a step in which each request has q_len query tokens."""
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(4)).int()
    table = order.view(3, 4).repeat_interleave(q_len, 0).to(device)
    lens = torch.tensor(LENGTHS, dtype=torch.int32)
    visible = (lens[:, None] - torch.arange(q_len - 1, -1, -1)).reshape(-1).int().to(device)
    return SimpleNamespace(
        cache_seqlens_int32=lens.to(device),
        dsa_seqlens_expanded=visible,
        real_page_table=table,
        page_size=PAGE,
        dsa_extend_seq_lens_list=[q_len] * 3,
        token_to_batch_idx=None,
    )


def prompts(lengths: list[int]) -> Any:
    """Metadata of a step that reads so many tokens of each request: a row of its table for each."""
    of = step()
    rows = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    parts = [torch.arange(n - new + 1, n + 1) for n, new in zip(LENGTHS, lengths, strict=True)]
    of.dsa_seqlens_expanded, of.token_to_batch_idx = torch.cat(parts).int(), rows.int()
    of.dsa_extend_seq_lens_list = lengths
    return of


def by_token(of: Any) -> Any:
    """Return the same metadata with a row of the table for each token, as the oracle reads it."""
    return SimpleNamespace(
        **vars(of) | {"real_page_table": of.real_page_table[of.token_to_batch_idx]}
    )


def chosen(logits: Any, of: Any) -> Any:
    """Return slots by an oracle: each token's best keys, ascending."""
    slots = torch.full((len(logits), TOPK), -1, dtype=torch.int32)
    for row, (score, length) in enumerate(zip(logits, of.dsa_seqlens_expanded, strict=True)):
        best = score[: int(length)].topk(min(TOPK, int(length))).indices.sort().values
        page = of.real_page_table[row, best // PAGE]
        slots[row, : len(best)] = page * PAGE + best % PAGE
    return slots


def indexer() -> Any:
    """A layer's indexer, of the class in which the plugin has put its method."""
    return sys.modules[f"{DSA}.dsa_indexer"].Indexer()  # type: ignore[attr-defined]


def metadata(backend: Any, of: Any) -> Any:
    return backend.get_indexer_metadata(0, SimpleNamespace(step=of))


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("missing", [0, 2])
def test_tokens_of_decoding_and_drafts_get_their_best_keys(q_len: int, missing: int) -> None:
    """Rows behind the tokens are padding; drafts of a request share its row of the page table."""
    backend, _ = made()
    cache, of = keys(), step(q_len)
    q, weights = asking(3 * q_len + missing)
    backend.init_forward_metadata(SimpleNamespace(lengths=None))
    slots = indexer()._get_topk_paged(None, 0, q, weights, metadata(backend, of))
    tokens = 3 * q_len
    logits = cumla.paged_mqa_logits(
        q[:tokens, None],
        cache,
        weights[:tokens, :, 0],
        of.real_page_table,
        of.dsa_seqlens_expanded,
        max_kv_len=4 * PAGE,
    )
    assert torch.equal(slots[:tokens], chosen(logits, of))
    assert slots.shape == (tokens + missing, TOPK)
    assert (slots[tokens:] == -1).all()
    (scored,) = backend._scored.values()
    assert (scored.plan.key.batch, scored.plan.key.q_len) == (3, q_len)


def test_a_step_without_tokens() -> None:
    """As a rank of data parallelism has it: all rows are padding."""
    backend, _ = made()
    keys()
    of = step(1)
    of.dsa_extend_seq_lens_list = [0] * 3
    of.dsa_seqlens_expanded, of.real_page_table = (
        of.dsa_seqlens_expanded[:0],
        of.real_page_table[:0],
    )
    backend.init_forward_metadata(SimpleNamespace(lengths=None))
    slots = indexer()._get_topk_paged(None, 0, *asking(2), metadata(backend, of))
    assert slots.tolist() == [[-1] * TOPK] * 2


def test_a_prefill_selects_from_rows_of_the_keys_of_all() -> None:
    """Whole, in chunks of rows as SGLang cuts them, and where it translates positions itself."""
    backend, _ = made()
    of = prompts([3, 3, 3])
    starts = torch.tensor([0, 200, 270]).repeat_interleave(3).int()
    logits = torch.randn(9, 280, generator=torch.Generator().manual_seed(5))
    rows = torch.stack([row.roll(-int(start)) for row, start in zip(logits, starts, strict=True)])
    each = by_token(of)
    wanted = chosen(rows, each)
    found = metadata(backend, of)
    assert torch.equal(found.topk_transform(logits, TOPK, ks=starts), wanted)
    part = slice(4, 9)
    options = {
        "ks": starts[part],
        "ke_offset": of.dsa_seqlens_expanded[part],
        "batch_idx_list": of.token_to_batch_idx[part],
        "cu_seqlens_q": torch.ones(5, dtype=torch.int32),
    }
    assert torch.equal(found.topk_transform(logits[part], TOPK, **options), wanted[part])
    # Prompts of at most TOPK tokens, whose scores SGLang leaves out.
    of.dsa_seqlens_expanded = each.dsa_seqlens_expanded = of.dsa_seqlens_expanded.clamp(max=TOPK)
    zeros = torch.zeros(9, TOPK)
    assert torch.equal(found.topk_transform(zeros, TOPK), chosen(zeros, each))


def test_as_many_tokens_as_requests_are_not_taken_for_one_of_each() -> None:
    """Two tokens of one prompt, none of the next, one of the last."""
    backend, _ = made()
    of = prompts([2, 0, 1])
    of.dsa_seqlens_expanded = of.dsa_seqlens_expanded.clamp(max=TOPK)
    zeros = torch.zeros(3, TOPK)
    slots = metadata(backend, of).topk_transform(zeros, TOPK)
    assert torch.equal(slots, chosen(zeros, by_token(of)))


def test_rows_of_the_table_behind_the_tokens_are_not_read() -> None:
    backend, _ = made()
    of = step()
    logits = torch.randn(2, 256, generator=torch.Generator().manual_seed(6))
    of.dsa_seqlens_expanded = of.dsa_seqlens_expanded[:2]
    slots = metadata(backend, of).topk_transform(logits, TOPK)
    assert torch.equal(slots, chosen(logits, of))


def test_positions_are_not_translated_where_sglang_does() -> None:
    backend, _ = made(hisparse_coordinator="host")
    of = step()
    slots = metadata(backend, of).topk_transform(torch.zeros(3, 256), TOPK)
    wanted = torch.arange(TOPK).expand(3, -1)
    lens = of.dsa_seqlens_expanded[:, None]
    assert torch.equal(slots, torch.where(wanted < lens, wanted, -1).int())


def test_steps_have_one_schedule_in_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    with torch_gpu(always=True) as gpu:
        monkeypatch.setattr(tests.emulator, "emulate", noted.append)
        backend, _ = made()
        keys()
        of, batch = step(), SimpleNamespace(lengths=torch.ones(3, dtype=torch.int32))
        q, weights = asking(3)
        backend.init_forward_metadata(batch)
        indexer()._get_topk_paged(None, 0, q, weights, metadata(backend, of))
        for captured in (False, True):
            backend.init_forward_metadata_out_graph(batch, captured)
            noted.clear()
            with gpu.capture(7):
                for layer in range(3):
                    indexer()._get_topk_paged(None, layer, q, weights, metadata(backend, of))
            names = [launch.spec.entry for launch in noted]
            assert sum("schedule" in name for name in names) == 1, names
            assert sum(name.startswith("paged_mqa_logits") for name in names) == 3, names
            assert sum(name.startswith("top_k") for name in names) == 3, names


def test_nothing_is_prepared_for_what_sglang_does_not_run() -> None:
    backend, _ = made()
    of = SimpleNamespace()
    assert backend._build_topk_v2_plan(None) is None
    backend._refresh_paged_mqa_schedule_metadata(of, None)
    assert not vars(of)


def test_other_metadata_go_to_sglangs_method() -> None:
    """As those of a draft model's backend do, whose functions of DeepGEMM are cumla's."""
    made()
    one, theirs = indexer(), sys.modules[f"{DSA}.dsa_indexer_metadata"].DSAIndexerMetadata  # type: ignore[attr-defined]
    assert one._get_topk_paged(None, 0, None, None, object()) == "SGLang's"
    # A schedule that was made before, of other lengths: the layer makes one.
    found = theirs(step(), "slots", paged_mqa_schedule_metadata="of other lengths")
    assert one._get_topk_paged(None, 0, None, None, found) == "SGLang's"
    assert one.asked[-1] == theirs(found.attn_metadata, "slots")
    for module in ("utils", "dsa_indexer"):
        home = sys.modules[f"{DSA}.{module}"]
        for kind in ("fp8_paged_mqa_logits", "fp8_mqa_logits", "paged_mqa_logits_metadata"):
            function = getattr(home, f"resolve_{kind}_fn")()
            assert function.__module__ == "cumla.compat.deep_gemm"


def test_indexers_that_choose_pools_stay_sglangs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend, _ = made(dsa_index_kpool=4, qk_rope_head_dim=0)
    (said,) = [message for message in caplog.messages if "indexer" in message]
    assert said.startswith("SGLang scores and selects for the indexer of sparse MLA")
    assert "pools of 4 tokens" in said
    assert type(metadata(backend, step())).__module__ == "tests.sglang.stub"
    assert indexer()._get_topk_paged() == "SGLang's"
    assert backend._build_topk_v2_plan(None) == "SGLang's plan"


def test_layers_are_made_without_deepgemm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What an indexer asks for when it is made: a server that asks for cumla gets cumla's."""
    monkeypatch.setattr("cumla.compat.deep_gemm._num_sms", 132)
    with stubbed() as hooks, caplog.at_level(logging.INFO):
        cumla.sglang.register()
        cumla.sglang.register()
        ((target, hook),) = hooks.found.items()
        module, name = target.rpartition(".")[::2]
        for _ in range(2):
            assert hook(getattr(sys.modules[module], name)) == 132
        assert indexer()._get_topk_paged.__func__.__module__ == "cumla.sglang.indexer"
        assert not [message for message in caplog.messages if "indexer" in message]
        for _ in range(2):
            made()
    (said,) = [message for message in caplog.messages if "indexer" in message]
    assert said.startswith("cumla scores and selects for the indexer")
    with stubbed(asked=("fa3", "fa3")) as hooks:
        cumla.sglang.register()
        (hook,) = hooks.found.values()
        assert hook(lambda: "DeepGEMM's") == "DeepGEMM's"
        assert indexer()._get_topk_paged() == "SGLang's"


def test_an_sglang_without_such_functions_is_refused() -> None:
    with stubbed(version="0.9.0") as hooks:
        cumla.sglang.register()
        (hook,) = hooks.found.values()
        del sys.modules[f"{DSA}.utils"].resolve_fp8_mqa_logits_fn  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="indexer has no resolve_fp8_mqa_logits_fn"):
            hook(lambda: 1)
