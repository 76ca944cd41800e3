# SPDX-License-Identifier: Apache-2.0
"""MiniMax M3 in SGLang: cumla's functions in the place of its Triton kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bindings.stand_in import standing_in

torch = pytest.importorskip("torch")
HOME = "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse"
NAMES = (
    *("flash_decode_with_topk_idx", "flash_decode_with_gqa_share_sparse"),
    *("flash_prefill_with_topk_index", "flash_prefill_with_gqa_share_sparse"),
)
BLOCK, COLUMNS, HEADS, KV_HEADS, TOPK, PAGE = 128, 128, 8, 2, 3, 256
LENS = (700, 130, 385)
E4M3 = torch.float8_e4m3fn


def numbers(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


K, V, INDEX = (numbers(14 * PAGE + 5, heads, COLUMNS, seed=s) for s, heads in enumerate((2, 2, 1)))


def _slots() -> Any:
    """Slots of the tokens of five requests, in pages of 256 in any order; behind them zeros."""
    table = torch.zeros(5, 1024, dtype=torch.int32)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(3)) + 1
    for request, first in ((4, 0), (0, 4), (2, 8)):
        pages = order[first : first + 4] if request != 2 else order[8:12]
        table[request] = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
    return table


SLOTS, REQUESTS = _slots(), torch.tensor([4, 0, 2])


@pytest.fixture
def home() -> Iterator[Any]:
    """SGLang's module, whose functions here give their names; and the plugin's module."""

    def theirs(name: str) -> Any:
        return lambda **given: name

    packages = {HOME.rsplit(".", n)[0]: {"__path__": []} for n in range(1, 6)}
    with standing_in({**packages, HOME: {n: theirs(n) for n in NAMES}}, "cumla.sglang"):
        import sys

        yield sys.modules[HOME]


@pytest.fixture
def m3(home: Any) -> Any:
    from cumla.sglang import minimax_m3

    minimax_m3.attend(PAGE)
    return minimax_m3


def layer(home: Any, q: Any, idx_q: Any, counts: tuple[int, ...] | None, **change: Any) -> Any:
    """A layer as SGLang's `minimax_sparse_decode` and `minimax_sparse_prefill` call it."""
    lens = change.pop("seq_lens", torch.tensor(LENS))
    common = {"sink": None, "req_to_token": SLOTS, "slot_ids": REQUESTS, "seq_lens": lens}
    scales = {"q_scale": None, "k_scale": None, "v_scale": None}
    index: dict[str, Any] = {"topk": TOPK, "init_blocks": 1, "local_blocks": 1, "sm_scale": None}
    index |= {"score_type": "max", "disable_index_value": True, "page_size": PAGE}
    caches = {"k_cache": K, "v_cache": V} | {
        n: change.pop(n) for n in ("k_cache", "v_cache") if n in change
    }
    main: dict[str, Any] = {"sm_scale": None}
    if counts is None:
        names, phase = NAMES[:2], {"block_size": BLOCK}
        index |= {"max_seqlen": 1024, "use_dense_main_attn": False}
        main |= {"page_size": PAGE, "hisparse_slots": None}
    else:
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)]).int()
        names, phase = NAMES[2:], {"block_size_q": 1, "block_size_k": BLOCK, "cu_seqlens": starts}
        phase |= {"max_seqlen_q": max(counts), "prefix_lens": lens - torch.tensor(counts)}
        phase |= {"cu_seqblocks_q": starts, "max_seqblock_q": max(counts)}
        index |= {"max_seqlen_k": 700, "all_seqblock_q": sum(counts)}
        main |= {"loc_mapping": None}
    index |= {name: change.pop(name) for name in list(change) if name in index}
    main |= {name: change.pop(name) for name in list(change) if name in main}
    keys = {"k_cache": change.pop("index_cache", INDEX), "v_cache": None}
    found = getattr(home, names[0])(q=idx_q, **keys, **common, **phase, **scales, **index)
    lists = found[1] if isinstance(found, tuple) else torch.zeros(KV_HEADS, len(q), TOPK).int()
    scales |= change
    out = getattr(home, names[1])(
        q=q, topk_idx=lists, **caches, **common, **phase, **scales, **main
    )
    return found, lists, out


def rows_of(cache: Any, request: int, tokens: list[int]) -> Any:
    return cache[SLOTS[REQUESTS[request], tokens].long()].float()


def check(
    q: Any, idx_q: Any, counts: tuple[int, ...], lists: Any, out: Any, k: Any, v: Any
) -> None:
    """A loop over query tokens and heads."""
    token = 0
    for request, count in enumerate(counts):
        for i in range(count):
            seen = LENS[request] - (count - 1 - i)
            visible = range(-(-seen // BLOCK))
            keys = rows_of(INDEX, request, list(range(seen)))[:, 0]
            for group in range(KV_HEADS):
                products = keys @ idx_q[token, group].float()
                best = {b: float(products[b * BLOCK : (b + 1) * BLOCK].max()) for b in visible}
                forced = {0, visible[-1]}
                others = sorted((b for b in visible if b not in forced), key=lambda b: -best[b])
                blocks = sorted(forced | {*others[: TOPK - 2]})
                assert lists[group, token].tolist() == blocks + [-1] * (TOPK - len(blocks))
                tokens = [t for t in range(seen) if t // BLOCK in blocks]
                some = slice(group * HEADS // KV_HEADS, (group + 1) * HEADS // KV_HEADS)
                weights = q[token, some].float() @ rows_of(k, request, tokens)[:, group].T
                want = (weights * COLUMNS**-0.5).softmax(-1) @ rows_of(v, request, tokens)[:, group]
                torch.testing.assert_close(out[token, some].float(), want, rtol=2e-2, atol=2e-2)
            token += 1


@pytest.mark.usefixtures("m3")
@pytest.mark.parametrize("counts", [None, (3, 1, 4)])
def test_a_layer(home: Any, counts: tuple[int, ...] | None) -> None:
    tokens = sum(counts or (1, 1, 1))
    q, idx_q = numbers(tokens, HEADS, COLUMNS), numbers(tokens, KV_HEADS, COLUMNS, seed=9)
    found, lists, out = layer(home, q, idx_q, counts)
    assert found[0] is None
    assert found[2:] == ((None,) if counts is None else ())
    assert lists.is_contiguous()  # SGLang views it by groups of heads
    assert out.shape == q.shape
    check(q, idx_q, counts or (1, 1, 1), lists, out, K, V)


@pytest.mark.usefixtures("m3")
def test_e4m3_caches_with_factors(home: Any) -> None:
    q, idx_q = numbers(3, HEADS, COLUMNS), numbers(3, KV_HEADS, COLUMNS, seed=9)
    k, v = ((cache.float() * 4).to(E4M3) for cache in (K, V))
    caches = {"k_cache": k, "v_cache": v, "k_scale": 0.25, "v_scale": 0.25}
    _, lists, out = layer(home, q, idx_q, None, **caches)
    check(q, idx_q, (1, 1, 1), lists, out, k.float() / 4, v.float() / 4)


def test_lists_of_an_earlier_layer(home: Any, m3: Any) -> None:
    """Then the pages are found anew: those of the choice before are not taken."""
    q, idx_q = numbers(3, HEADS, COLUMNS), numbers(3, KV_HEADS, COLUMNS, seed=9)
    lens = torch.tensor(LENS)
    _, lists, out = layer(home, q, idx_q, None, seq_lens=lens)
    assert not m3._made
    given = {"sink": None, "req_to_token": SLOTS, "slot_ids": REQUESTS, "seq_lens": lens}
    given |= {"sm_scale": None, "block_size": BLOCK, "k_scale": None, "v_scale": None}
    again = getattr(home, NAMES[1])(q=q, k_cache=K, v_cache=V, topk_idx=lists, **given)
    assert torch.equal(again, out)
    lens -= 100  # in place, as in a later step
    later = getattr(home, NAMES[1])(q=q, k_cache=K, v_cache=V, topk_idx=lists, **given)
    assert not torch.equal(later, out)


@pytest.mark.usefixtures("m3")
@pytest.mark.parametrize(
    ("change", "is_index"),
    [
        ({"disable_index_value": False}, True),
        ({"score_type": "lse"}, True),
        ({"use_dense_main_attn": True}, True),
        ({"index_cache": INDEX.to(E4M3)}, True),
        ({"index_cache": torch.cat([INDEX, INDEX], 1)}, True),
        ({"hisparse_slots": SLOTS}, False),
        ({"k_cache": K.to(torch.float8_e5m2), "v_cache": V.to(torch.float8_e5m2)}, False),
        ({"k_scale": 0.5}, False),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_the_rest_stays_sglangs(home: Any, change: dict[str, Any], is_index: bool) -> None:
    q, idx_q = numbers(3, HEADS, COLUMNS), numbers(3, KV_HEADS, COLUMNS, seed=9)
    found, _, out = layer(home, q, idx_q, None, **change)
    assert (found == NAMES[0]) == is_index
    assert (isinstance(out, str) and out == NAMES[1]) != is_index


def test_it_is_said_once(home: Any, caplog: pytest.LogCaptureFixture) -> None:
    from cumla.sglang import minimax_m3

    with caplog.at_level(logging.INFO):
        minimax_m3.attend(64)
        assert getattr(home, NAMES[0])() == NAMES[0]
        minimax_m3.attend(PAGE)
        ours = getattr(home, NAMES[0])
        minimax_m3.attend(PAGE)
    assert getattr(home, NAMES[0]) is ours
    warned, said = caplog.messages
    assert warned.endswith("because pages have 64 tokens; pass --page-size 128")
    assert said.startswith("cumla attends in layers of MiniMax M3 that choose blocks: block_atten")


def test_other_versions_are_refused(home: Any) -> None:
    from cumla.sglang import minimax_m3

    delattr(home, NAMES[3])
    before = vars(home).copy()
    wanted = f"needs {HOME}.{NAMES[3]}; leave out --attention-backend cumla"
    with pytest.raises(RuntimeError, match=wanted):
        minimax_m3.attend(PAGE)
    assert vars(home) == before


@pytest.mark.parametrize("name", ["MiniMaxM3SparseForCausalLM", "LlamaForCausalLM"])
def test_models_that_choose_blocks_are_known_by_their_class(name: str) -> None:
    import cumla.sglang

    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[name]))
    runner = SimpleNamespace(model_config=config)
    assert cumla.sglang._chooses_blocks(runner) == name.startswith("MiniMax")
