# SPDX-License-Identifier: Apache-2.0
"""The plugin's backend for sparse MLA, and its indexer, on a stub of vLLM."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import cumla
import cumla.vllm
import tests.emulator
from tests.bindings.launches import Launches
from tests.bindings.stand_in import OF_MODEL
from tests.compat.torch_gpu import torch_gpu
from tests.vllm import stub
from tests.vllm.layers import HEADS, PAGE, SCALE, TOPK, SparseMLA, int32, queries, tables
from tests.vllm.stub import stubbed

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    with stubbed(index_topk=TOPK):
        yield


STEPS = {  # lengths of the cache, offsets, tokens: the lists of a plan
    "decoding": ((90, 5, 33), (0, 1, 2, 3), 3, (3, 1)),
    "drafts": ((90, 5, 33), (0, 2, 4, 6), 6, (3, 2)),
    "padded requests": ((90, 5, 0, 0), (0, 2, 4, 4, 4), 8, (4, 2)),
    "prefills": ((90, 5, 33), (0, 1, 6, 14), 14, (1, 14)),
}


def visible(lens: Any, starts: Any) -> list[int]:
    """Return what each query token sees."""
    spans = zip(lens, starts, starts[1:], strict=False)
    return [n - (end - 1 - i) for n, first, end in spans for i in range(first, end)]


def wanted(sparse: SparseMLA, q: Any, lens: Any, starts: Any, table: Any) -> Any:
    """Attention of all query tokens by one eager call, every entry looked at."""
    counts = torch.tensor(starts).diff()
    requests = torch.repeat_interleave(torch.arange(len(lens)), counts).int()
    rows = sparse.buffer[: starts[-1], : sparse.topk + sparse.pool - 1]
    is_scaled = sparse.cache.dtype == torch.float8_e4m3fn
    q = tuple(part[: starts[-1]] for part in q)
    return cumla.mla_sparse_attention(
        q if q[1].shape[-1] else q[0],
        sparse.cache,
        rows,
        block_table=table,
        row_to_request=requests,
        softmax_scale=SCALE,
        kv_scale=sparse.layer._k_scale.view(1) if is_scaled else None,
        sinks=None if sparse.impl.sinks is None else sparse.impl.sinks.detach().float(),
    )


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize(("lens", "starts", "tokens", "lists"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("in_one", [False, True])
def test_sparse_mla_attends_as_the_eager_call(
    lens: Any, starts: Any, tokens: int, lists: Any, in_one: bool, cache_dtype: str
) -> None:
    sparse, kv_lens = SparseMLA(cache_dtype), int32(*lens)
    sparse.lists(visible(lens, starts))
    step, q = sparse.step(kv_lens, int32(*starts), tokens), queries(tokens)
    out, lse = sparse.attend(step, torch.cat(q, -1) if in_one else q)
    plan = step.step(tokens).plan
    assert type(plan) is cumla.MLASparsePlan
    assert (plan.key.batch, plan.key.q_len) == lists
    assert out.shape == (tokens, HEADS, 512)
    assert lse is None
    real = starts[-1]
    torch.testing.assert_close(out[:real], wanted(sparse, q, lens, starts, tables(kv_lens)).out)
    assert bool(out[real:].eq(0).all())


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(("lens", "starts", "tokens", "lists"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("form", ["pair", "one"])
def test_rows_without_rope_and_lists_of_pools(
    lens: Any, starts: Any, tokens: int, lists: Any, form: str, cache_dtype: str
) -> None:
    """As GLM-5.3 has them: whole pools, and behind topk entries the tokens of the last one."""
    sparse, kv_lens = SparseMLA(cache_dtype, columns=512, pool=4), int32(*lens)
    counts = visible(lens, starts)
    sparse.lists(counts)
    step = sparse.step(kv_lens, int32(*starts), tokens)
    q = queries(tokens)[0]
    pair = q, q[..., :0]
    out, lse = sparse.attend(step, q if form == "one" else pair)
    plan = step.step(tokens).plan
    assert (plan.key.batch, plan.key.q_len, plan.key.topk) == (*lists, TOPK + 3)
    assert out.shape == (tokens, HEADS, 512)
    assert lse is None
    real = starts[-1]
    listed = sparse.buffer[:real, : TOPK + 3].ge(0).sum(-1).tolist()
    assert listed == [n if n <= TOPK else TOPK + n % 4 for n in counts]
    table = tables(kv_lens)
    torch.testing.assert_close(out[:real], wanted(sparse, pair, lens, starts, table).out)
    assert bool(out[real:].eq(0).all())


def test_a_rank_of_tensor_parallelism_attends_with_its_own_heads() -> None:
    """Its plan, of which a graph has one for all layers, and its kernels are those of its heads."""
    lens, starts = (90, 5, 33), (0, 1, 2, 3)
    sparse, kv_lens = SparseMLA(heads=8 * HEADS, ranks=8), int32(*lens)
    sparse.lists(visible(lens, starts))
    q = queries(3)
    for captured in (True, False):
        step = sparse.step(kv_lens, int32(*starts), 3, captured=captured)
        out, _ = sparse.attend(step, q)
        assert step.step(3).plan.key.num_heads == HEADS
        torch.testing.assert_close(out, wanted(sparse, q, lens, starts, tables(kv_lens)).out)


def test_an_indexer_of_pools_is_left_to_vllm() -> None:
    """Its metadata names DeepGEMM's schedule, which :mod:`cumla.vllm.indexer` does without."""
    from cumla.vllm import indexer

    SparseMLA(columns=512, pool=4)
    assert indexer.metadata.has_deep_gemm()
    SparseMLA()
    assert not indexer.metadata.has_deep_gemm()


def test_a_step_attends_for_decoding_alone_where_prefills_are_dense() -> None:
    """vLLM passes the first tokens then; later layers of the step may pass all of them."""
    lens, starts = (90, 5, 33), (0, 1, 2, 14)
    sparse, kv_lens = SparseMLA(), int32(*lens)
    sparse.lists(visible(lens, starts))
    step, q = sparse.step(kv_lens, int32(*starts), 14, decodes=2), queries(14)
    expected = wanted(sparse, q, lens, starts, tables(kv_lens)).out
    for tokens in (2, 14, 2):
        out, _ = sparse.attend(step, tuple(part[:tokens] for part in q))
        torch.testing.assert_close(out, expected[:tokens])
    assert sorted(step.steps) == [2, 14]


def test_requests_of_equal_query_lengths_are_told_without_work() -> None:
    """vLLM fills a buffer in each step; a graph of such steps does not read it."""
    sparse = SparseMLA()
    sparse.builder.req_id_per_token_buffer.fill_(99)
    told = {}
    for starts, tokens in (((0, 1, 2, 3), 3), ((0, 2, 4, 4), 6), ((0, 1, 2), 2)):
        step = sparse.step(int32(*[90] * (len(starts) - 1)), int32(*starts), tokens)
        told[starts] = step.req_id_per_token
    assert bool(sparse.builder.req_id_per_token_buffer.eq(99).all())
    assert [each.tolist() for each in told.values()] == [[0, 1, 2], [0, 0, 1, 1, 2, 2], [0, 1]]
    assert told[0, 1, 2].data_ptr() == told[0, 1, 2, 3].data_ptr()
    step = sparse.step(int32(90, 90), int32(0, 1, 4), 4)
    assert step.req_id_per_token.tolist() == [0, 1, 1, 1]
    assert step.req_id_per_token.data_ptr() == sparse.builder.req_id_per_token_buffer.data_ptr()


def test_every_dense_prefill_is_merged_with_its_context() -> None:
    """The fault of vLLM 0.26 and 0.27 that the backend of dense MLA mends."""
    context = SimpleNamespace(prefill_tokens_with_context=7, has_empty_context=[True])
    prefill = SimpleNamespace(chunked_context=context)
    assert SparseMLA().step(int32(90), int32(0, 1), 1, prefill=prefill).prefill is prefill
    assert context.prefill_tokens_with_context is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_and_the_logarithm_of_layers(dtype: Any) -> None:
    """Sinks are a parameter of the model, which is loaded after its layers are made."""
    lens, starts = (90, 5, 33), (0, 1, 2, 3)
    sinks = torch.nn.Parameter(torch.zeros(HEADS, dtype=dtype))
    sparse, kv_lens = SparseMLA(sinks=sinks), int32(*lens)
    sinks.data.copy_(torch.linspace(-1, 1, HEADS))
    sparse.impl.need_to_return_lse_for_decode = True
    sparse.lists(visible(lens, starts))
    out, lse = sparse.attend(sparse.step(kv_lens, int32(*starts), 3), queries(3))
    state = wanted(sparse, queries(3), lens, starts, tables(kv_lens))
    torch.testing.assert_close(out, state.out)
    torch.testing.assert_close(lse, state.lse)


def test_the_plugin_refuses_what_sparse_mla_does_not_have() -> None:
    from cumla.vllm.sparse import Impl

    for name in ("alibi_slopes", "sliding_window", "logits_soft_cap"):
        with pytest.raises(
            NotImplementedError, match=rf"^{name}: .* got 128; leave out.*{OF_MODEL}"
        ):
            Impl(scale=SCALE, **{name: 128})
    with stubbed(index_topk=TOPK, dcp=2):
        match = rf"^decode_context_parallel_size: .* pools of tokens, got 2 ranks; .*{OF_MODEL}"
        with pytest.raises(NotImplementedError, match=match):
            SparseMLA(dcp=2, columns=512, pool=4)
        sharded: Any = import_module("cumla.vllm.sparse")
        match = rf"^decode_context_parallel_size: .* beside sinks, got 2 ranks; .*{OF_MODEL}"
        with pytest.raises(NotImplementedError, match=match):
            sharded.Impl(scale=SCALE, sinks=torch.zeros(HEADS))


@pytest.mark.parametrize("world", [2, 8])
def test_ranks_attend_as_one(tmp_path: Path, world: int) -> None:
    """Decode context parallelism, in processes of their own; of eight some hold no token."""
    command = [sys.executable, "-m", "tests.vllm.ranks", str(tmp_path), str(world)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_name_serves_sparse_mla() -> None:
    backend = cumla.vllm.Backend
    assert backend.__module__ == "cumla.vllm.sparse"
    assert backend.is_mla() and backend.is_sparse() and backend.supports_sink()
    assert not backend.supports_device_cpu_query_lens_mismatch()
    assert backend.get_name() == "CUSTOM"
    assert backend.get_kv_cache_shape(3, 64, 1, 576) == (3, 64, 576)
    assert backend.get_kv_cache_shape(3, 64, 1, 576, "fp8_ds_mla") == (3, 64, 656)
    assert "bfloat16" in str(backend.supports_combination(576, torch.float16, "fp8_ds_mla"))
    assert backend.supports_combination(576, torch.bfloat16, "fp8_ds_mla") is None
    assert [n for n in (288, 320, 512, 576) if backend.supports_head_size(n)] == [512, 576]
    assert "576 columns" in str(backend.supports_combination(512, torch.bfloat16, "fp8_ds_mla"))
    assert backend.supports_combination(512, torch.bfloat16, "fp8") is None
    with stubbed(use_mla=False, index_topk=TOPK):
        assert cumla.vllm.Backend.__module__ == "cumla.vllm.mha"


def test_the_log_says_that_an_fp8_cache_has_one_factor(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cumla._choices._said", set())
    caplog.set_level("INFO")
    for cache_dtype in ("fp8", "fp8_ds_mla", "auto"):
        SparseMLA(cache_dtype)
    lines = [one.getMessage() for one in caplog.records if "attends in" in one.getMessage()]
    start = "cumla attends in layers with sparse MLA (1)"
    assert lines[0].startswith(f"{start}, whose cache has one factor, where fp8_ds_mla has four in")
    assert all(line.startswith(f"{start}: ") for line in lines[1:])
    assert len(lines) == 3


def test_versions_have_a_range_of_their_own_for_sparse_mla(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with stubbed("0.25.1", index_topk=TOPK):
        match = r"^vllm: cumla's backend needs a version from 0.26 to 0.33, .* got 0.25.1; install"
        with pytest.raises(RuntimeError, match=match):
            _ = cumla.vllm.Backend
    with caplog.at_level(logging.WARNING):
        with stubbed("0.33.0", index_topk=TOPK):
            assert cumla.vllm.Backend.is_sparse()
        assert not caplog.records
        with stubbed("0.34.0", index_topk=TOPK):
            assert cumla.vllm.Backend.is_sparse()
    assert "tested with vllm 0.26 to 0.33, not with 0.34.0:" in caplog.text


# --- the indexer ---------------------------------------------------------------------------------


def best(sparse: SparseMLA, q: Any, weights: Any, request: Any, count: int) -> Any:
    """The best tokens of one query token, of `count` that it sees."""
    logits = cumla.paged_mqa_logits(
        q[None, None],
        sparse.keys,
        weights[None],
        request[None],
        int32(count),
        max_kv_len=len(request) * PAGE,
    )
    return cumla.top_k(logits, TOPK, row_lens=int32(count)).indices[0]


@pytest.mark.parametrize("q_len", [1, 2])
def test_the_indexer_selects_for_decoding(q_len: int) -> None:
    sparse, lens = SparseMLA(), (90, 5, 33)
    table = tables(int32(*lens))
    seen = torch.tensor([[n - q_len + 1 + i for i in range(q_len)] for n in lens]).int()
    tokens = 3 * q_len
    step = sparse.decoding(seen, table, torch.arange(4) * q_len)
    q, weights, keys = sparse.index_inputs(tokens)
    for _ in range(2):  # layers
        sparse.buffer.fill_(7)
        assert sparse.index(step, q, weights, keys) is sparse.buffer
        for i, count in enumerate(seen.flatten().tolist()):
            chosen = best(sparse, q[i], weights[i], table[i // q_len], count)
            assert torch.equal(sparse.buffer[i], chosen)
        assert bool(sparse.buffer[tokens:].eq(7).all())


@pytest.mark.parametrize("says_so", [True, False])
def test_the_indexer_selects_for_unequal_decoding(says_so: bool) -> None:
    """vLLM says that it would pad the queries, or their number does."""
    sparse, lens, starts = SparseMLA(), (90, 5, 33), (0, 1, 3, 4)
    table = tables(int32(*lens))
    seen = torch.tensor([[n - 1, n] for n in lens]).int()
    step = sparse.decoding(seen, table, torch.tensor(starts), padded=True)
    step.decode.requires_padding = says_so
    q, weights, keys = sparse.index_inputs(4)
    sparse.index(step, q, weights, keys)
    for i, (request, count) in enumerate(((0, 90), (1, 4), (1, 5), (2, 33))):
        chosen = best(sparse, q[i], weights[i], table[request], count)
        assert torch.equal(sparse.buffer[i], chosen)


def test_the_indexer_selects_for_prefills() -> None:
    sparse, lens, starts = SparseMLA(), (90, 45), (0, 3, 8)
    table = tables(int32(*lens))
    step = sparse.prefilling(int32(*lens), starts, table)
    q, weights, keys = sparse.index_inputs(8)
    for _ in range(2):
        sparse.buffer.fill_(7)
        sparse.index(step, q, weights, keys)
        for i, count in enumerate(visible(lens, starts)):
            request = sum(i >= start for start in starts[1:])
            chosen = best(sparse, q[i], weights[i], table[request], count)
            assert torch.equal(sparse.buffer[i], chosen)


def test_the_indexer_writes_new_keys() -> None:
    sparse = SparseMLA()
    step = sparse.decoding(int32(90, 5).view(2, 1), tables(int32(90, 5)), torch.arange(3))
    step.slot_mapping = torch.tensor([17, -1])
    q, weights, keys = sparse.index_inputs(2)
    expected = sparse.keys.clone()
    cumla.append_indexer_cache(keys[:1], expected, torch.tensor([17]), power_of_two_scales=True)
    sparse.index(step, q, weights, keys)
    assert torch.equal(sparse.keys, expected)


def test_the_indexer_leaves_it_to_vllm_to_measure_memory() -> None:
    from cumla.vllm.indexer import select

    stub.steps = None
    assert select(*[None] * 13, "buffer", False, False) == "buffer"


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("use_fp4_cache", True, "True"),
        ("use_pcp", True, "True"),
        ("candidate_blocks", torch.zeros(3, 8), r"torch.Size\(\[3, 8\]\)"),
    ],
)
def test_the_indexer_refuses_what_it_does_not_have(name: str, value: Any, got: str) -> None:
    """It would select other tokens; vLLM 0.33 has the last one."""
    from cumla.vllm.indexer import select

    SparseMLA()  # whose model has asked last
    with pytest.raises(NotImplementedError, match=rf"^{name}: .* got {got}; .*{OF_MODEL}"):
        select(**{name: value})


def test_vllms_operation_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the layers call, once in a process; and DeepGEMM makes no schedule."""
    from vllm.model_executor.layers import sparse_attn_indexer as layer
    from vllm.v1.attention.backends.mla import indexer as metadata

    from cumla.vllm import indexer

    later = ModuleType("vllm.models.later")  # a model that calls the function itself
    for module in (later, ModuleType("theirs")):
        module.sparse_attn_indexer = layer.sparse_attn_indexer  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert metadata.has_deep_gemm()
    for _ in range(2):
        SparseMLA()
    assert not metadata.has_deep_gemm()
    assert indexer._library is not None
    for module in (later, layer):
        assert module.sparse_attn_indexer is indexer.select
    assert sys.modules["theirs"].sparse_attn_indexer is stub.sparse_attn_indexer


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("kind", ["decoding", "prefills"])
def test_layers_of_later_versions_select_and_attend(
    kind: str, cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepseekV32Attention of vLLM 0.29 to 0.33 calls both; its kernels have written the caches.

    It calls the function of the indexer itself, with later arguments and without new keys, leaves
    the lists uncleared, and absorbs queries into a transposed array.
    """
    later = ModuleType("vllm.models.later")
    later.sparse_attn_indexer = stub.sparse_attn_indexer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, later.__name__, later)
    lens, starts = ((90, 45), (0, 1, 2)) if kind == "decoding" else ((90, 45), (0, 3, 8))
    sparse, kv_lens, tokens = SparseMLA(cache_dtype), int32(*lens), starts[-1]
    table = tables(kv_lens)
    if kind == "decoding":
        indexing = sparse.decoding(kv_lens.view(-1, 1), table, torch.tensor(starts))
    else:
        indexing = sparse.prefilling(kv_lens, starts, table)
    attending = sparse.step(kv_lens, int32(*starts), tokens)
    stub.steps, before = {"layer.k_cache": indexing}, sparse.keys.clone()
    for _ in range(2):  # layers
        sparse.buffer.fill_(7)
        index_q, weights, _ = sparse.index_inputs(tokens)
        later.sparse_attn_indexer(  # type: ignore[attr-defined]
            torch.zeros(tokens, 8),
            "layer.k_cache",
            sparse.keys,
            index_q,
            None,
            None,
            weights,
            128,
            "ue8m0",
            TOPK,
            128,
            320,
            4096,
            sparse.buffer,
            skip_k_cache_insert=True,
            use_pcp=False,
            pcp_shard_decode_requests=False,
            dense_mha_metadata_layer_name="layer",
            dcp_rank=0,
            dcp_world_size=1,
            cp_kv_cache_interleave_size=1,
            skip_topk_buffer_clear=True,
            topk_backend=None,
        )
        for i, count in enumerate(visible(lens, starts)):
            request = sum(i >= start for start in starts[1:])
            chosen = best(sparse, index_q[i], weights[i], table[request], count)
            assert torch.equal(sparse.buffer[i], chosen)
        nope, rope = queries(tokens)
        nope = nope.transpose(0, 1).contiguous().transpose(0, 1)
        out, lse = sparse.attend(attending, (nope, rope))
        assert lse is None
        torch.testing.assert_close(out, wanted(sparse, (nope, rope), lens, starts, table).out)
    assert torch.equal(sparse.keys, before)


@pytest.mark.parametrize(("dense", "decodes"), [(True, 0), (True, 1), (False, 0)])
def test_nothing_is_selected_where_layers_read_no_list(dense: bool, decodes: int) -> None:
    """vLLM 0.33 names the layer, whose prefills are dense in steps without decoding alone."""
    from cumla.vllm.indexer import select

    lens, starts = (20, 30), (0, 3, 8)
    sparse = SparseMLA()
    layer = SimpleNamespace(prefill=SimpleNamespace(use_dense_mha=dense), num_decode_tokens=decodes)
    indexing = sparse.prefilling(int32(*lens), starts, tables(int32(*lens)))
    stub.steps = {"layer.k_cache": indexing, "layer": layer}
    q, weights, _ = sparse.index_inputs(8)
    sparse.buffer.fill_(7)
    select(
        *(torch.zeros(8, 8), "layer.k_cache", sparse.keys, q, None, None, weights, 128, "ue8m0"),
        *(TOPK, 128, 320, 4096, sparse.buffer, True, False),
        dense_mha_metadata_layer_name="layer",
    )
    assert bool(sparse.buffer[:8].eq(7).all()) == (dense and not decodes)


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("has_it", [True, False])
def test_vllm_asks_for_deep_gemm_where_cumla_is_not_asked_for(
    has_it: bool, is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refuses to make an indexer without it, before it resolves the backend of a layer."""
    from vllm.config import get_current_vllm_config

    (tmp_path / "of_the_indexer.py").write_text(f"has_deep_gemm = lambda: {has_it}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cumla.vllm.WithoutDeepGEMM, "name", "of_the_indexer")
    if is_late:
        import_module("of_the_indexer")
    for _ in range(2):
        cumla.vllm.register()
    finders = sum(isinstance(each, cumla.vllm.WithoutDeepGEMM) for each in sys.meta_path)
    assert finders == (not is_late)
    module = import_module("of_the_indexer")
    assert not any(isinstance(each, cumla.vllm.WithoutDeepGEMM) for each in sys.meta_path)
    config = get_current_vllm_config().attention_config
    custom, other = stub.Backends.CUSTOM, stub.Backends.FLASH_ATTN
    for backend, kinds, is_asked in (
        (other, None, False),
        (None, {}, False),
        (None, {"mla_attention": custom}, True),
        (custom, None, True),
    ):
        monkeypatch.setattr(cumla.vllm.WithoutDeepGEMM, "was_asked_for", False)
        config.backend, config.backend_per_kind = backend, kinds
        assert module.has_deep_gemm() is (is_asked or has_it)
    config.backend = None  # of a draft model
    assert module.has_deep_gemm()
    monkeypatch.setattr(cumla.vllm.WithoutDeepGEMM, "was_asked_for", False)
    stub.overrides[custom] = "theirs.Backend"
    config.backend = custom
    assert module.has_deep_gemm() is has_it
    del sys.modules["of_the_indexer"]


# --- graphs --------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any]]]:
    """A GPU, and what is launched there instead of being run."""
    noted: list[Any] = []
    with torch_gpu(always=True) as gpu:
        monkeypatch.setattr(tests.emulator, "emulate", noted.append)
        yield gpu, noted


def entries(launches: list[Any]) -> list[str]:
    return [launch.spec.entry for launch in launches]


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("starts", [(0, 1, 2), (0, 2, 2)])
@pytest.mark.parametrize(("streams", "captured"), [((0, 7), False), ((5, 7), True)])
def test_a_graph_holds_one_schedule(
    cache_dtype: str,
    starts: Any,
    streams: Any,
    captured: bool,
    launched: tuple[Any, list[Any]],
) -> None:
    """On whatever streams vLLM builds and captures, and whether or not layers ran before."""
    (gpu, noted), (gpu.stream, stream) = launched, streams
    tokens = 2 * starts[1]
    sparse = SparseMLA(cache_dtype)
    step = sparse.step(int32(90, 90), int32(*starts), tokens, captured=captured)
    lens = torch.full((2, starts[1]), 90, dtype=torch.int32)
    index = sparse.decoding(lens, tables(int32(90, 90)), torch.tensor(starts))
    inputs = sparse.index_inputs(tokens)
    if captured:
        sparse.index(index, *inputs)
        sparse.attend(step, queries(tokens))
    for _ in range(2):
        noted.clear()
        with gpu.capture(stream):
            for _ in range(3):
                sparse.index(index, *inputs)
                sparse.attend(step, queries(tokens))
        names = entries(noted)
        once = ["paged_mqa_schedule", "bound_rows", "mla_schedule"]
        for name in once:
            assert sum(entry.startswith(name) for entry in names) == 1, (name, names)
        each = ["append_indexer_cache", "paged_mqa_logits", "top_k", "mla_sparse"]
        each += ["select_rows"] if cache_dtype == "auto" else []
        for name in each:
            assert sum(entry.startswith(name) for entry in names) == 3, (name, names)
        assert len(names) == len(once) + 3 * len(each), names


@pytest.mark.parametrize("starts", [(0, 1, 2), (0, 3, 6)])
def test_a_step_of_equal_query_lengths_launches_nothing_when_it_begins(
    starts: tuple[int, ...],
) -> None:
    """Beside what vLLM's own builder does: requests of tokens are there from the first step on."""
    sparse, lens, offsets = SparseMLA(), int32(90, 90), int32(*starts)
    table = tables(lens)
    for again in (False, True):
        with Launches() as launches:
            sparse.step(lens, offsets, starts[-1], table=table)
        launched = set(launches.names) - {"_local_scalar_dense"}  # the stub reads a host's array
        assert again is not bool(launched)


HOSTED = "rows of the host"  # what vLLM calls HiSparse


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("in_one", [False, True])
def test_rows_that_vllm_brings_from_the_host_are_attended_to(
    in_one: bool, cache_dtype: str
) -> None:
    lens, starts = (90, 5, 33), (0, 1, 6, 14)
    with stubbed("0.33.0", index_topk=TOPK, hosted=HOSTED):
        sinks, kv_lens = torch.zeros(HEADS), int32(*lens)
        sparse = SparseMLA(cache_dtype, sinks=sinks, hosted=HOSTED)
        sparse.impl.need_to_return_lse_for_decode = True
        sparse.lists(visible(lens, starts))
        q = queries(14)
        state = wanted(sparse, q, lens, starts, tables(kv_lens))
        for decodes, tokens in ((1, 14), (3, 14), (1, 1)):  # mixed, decoding alone
            step = sparse.step(kv_lens, int32(*starts), 14, decodes=decodes)
            given = tuple(part[:tokens] for part in q)
            out, lse = sparse.attend(step, torch.cat(given, -1) if in_one else given)
            torch.testing.assert_close(out, state.out[:tokens])
            torch.testing.assert_close(lse, state.lse.flatten(0, -2)[:tokens])


def test_a_capture_loads_the_kernels_of_rows_from_the_host() -> None:
    with stubbed("0.33.0", index_topk=TOPK, hosted=HOSTED):
        sparse = SparseMLA(hosted=HOSTED)
        step = sparse.step(int32(90, 5), int32(0, 1, 2), 2, captured=True)
        assert type(step.listed(2).plan) is cumla.MLASparsePlan
        assert not step.steps


def test_rows_in_the_memory_of_the_host_are_refused_where_vllm_tells_no_slots() -> None:
    match = rf"^hisparse_config: .* HiSparse before 0.33, got {HOSTED}; leave out .*{OF_MODEL}"
    with pytest.raises(NotImplementedError, match=match):
        SparseMLA(hosted=HOSTED)
    with stubbed("0.33.0", index_topk=TOPK, hosted=HOSTED):
        match = rf"^hisparse_config: .* chooses pools of tokens, got {HOSTED}; .*{OF_MODEL}"
        with pytest.raises(NotImplementedError, match=match):
            SparseMLA(columns=512, pool=4, hosted=HOSTED)


def test_groups_of_micro_batches_have_plans_of_their_own() -> None:
    """Each has a builder of vLLM's, whose buffer tells them apart."""
    from cumla.vllm import indexer

    sparse = SparseMLA()
    table, starts = tables(int32(90, 5)), torch.arange(3)
    for schedule in (torch.zeros(1), torch.zeros(1)):
        step = sparse.decoding(int32(90, 5).view(2, 1), table, starts)
        step.decode.schedule_metadata = schedule
        sparse.index(step, *sparse.index_inputs(2))
    assert len(indexer._plans) >= 2


def test_under_batch_invariance_all_tokens_are_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense prefills would depend on the longest one of a step."""
    from cumla.vllm.sparse import Backend

    assert Backend.supports_batch_invariance()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    lens, starts = (90, 5, 33), (0, 1, 6, 14)
    with torch_gpu(always=True):
        sparse = SparseMLA()
        assert sparse.builder.vllm_config.attention_config.sparse_mla_force_mqa
        sparse.lists(visible(lens, starts))
        q = queries(14)
        whole, _ = sparse.attend(sparse.step(int32(*lens), int32(*starts), 14), q)
        step = sparse.step(int32(90), int32(0, 1), 1, table=tables(int32(*lens))[:1])
        alone, _ = sparse.attend(step, tuple(part[:1] for part in q))
        assert step.step(1).plan.key.batch_invariant
        assert torch.equal(alone[0], whole[0])


@pytest.mark.exhaustive  # the emulator compiles the kernel
def test_a_graph_serves_later_lengths_and_lists() -> None:
    starts = (0, 1, 2)
    with torch_gpu() as gpu:
        sparse = SparseMLA()
        q, kv_lens, offsets = queries(2), int32(90, 90), int32(*starts)
        sparse.lists([90, 90])
        step = sparse.step(kv_lens, offsets, 2, captured=True)
        with gpu.capture(0):
            out, _ = sparse.attend(step, q)
        for lens in ((33, 7), (50, 90)):
            kv_lens.copy_(int32(*lens))
            sparse.lists(visible(lens, starts))
            gpu.replay()
            expected = wanted(sparse, q, lens, starts, tables(kv_lens)).out
            torch.testing.assert_close(out, expected)


def test_vllm_is_told_which_graphs_there_are() -> None:
    from cumla.vllm.sparse import Builder

    for divided, support in ((False, 2), (True, 1)):
        config = SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=divided))
        assert Builder.get_cudagraph_support(config, None) == support


def test_a_later_engine_has_the_ranks_of_its_own_group() -> None:
    """In one process: vLLM destroys the group of the first one."""
    from cumla.vllm.indexer import context_parallel

    seen = []
    for _ in range(2):
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            stub.dcp_group = torch.distributed.group.WORLD
            parallel = context_parallel(PAGE)
            assert parallel is context_parallel(PAGE)  # of all layers
            assert parallel.top_k(torch.tensor([[3.0, 1, 4]]), 2).tolist() == [[0, 2]]
            seen.append(parallel)
        finally:
            torch.distributed.destroy_process_group()
    assert seen[0] is not seen[1]
