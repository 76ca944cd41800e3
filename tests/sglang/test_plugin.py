# SPDX-License-Identifier: Apache-2.0
"""The plugin of SGLang on a stub of it: what is registered, refused, planned and computed."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import cumla
import cumla.sglang
from cumla.mla.shape import WIDE, WIDTHS
from tests.bindings.launches import Launches
from tests.bindings.stand_in import MODEL, OF_MODEL
from tests.compat.oracle import naive
from tests.compat.torch_gpu import torch_gpu
from tests.sglang.server import HEADS, PAGE, SCALE, STEPS, TREE, Server, starts, tree_of
from tests.sglang.stub import (
    DecoderType,
    Handlers,
    Mode,
    WindowPool,
    absorbing,
    backends,
    choices,
    deterministic,
    stubbed,
)

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def sglang() -> Iterator[None]:
    with stubbed():
        yield


# --- the entry point -----------------------------------------------------------------------------


def test_the_entry_point_adds_one_name_however_often(caplog: pytest.LogCaptureFixture) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, value),) = project["entry-points"]["sglang.srt.plugins"].items()
    for _ in range(2):
        EntryPoint(name, value, "sglang.srt.plugins").load()()
        for known in (choices, *deterministic):
            assert known == ["fa3", "cumla"]
        assert list(backends) == ["cumla"]
    assert "cumla.sglang.backend" not in sys.modules
    assert not caplog.records


def test_loading_the_entry_point_imports_neither_sglang_nor_torch() -> None:
    code = "import sys, cumla.sglang; print({'sglang', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.strip() == b"set()"


def test_a_version_without_the_registry_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch.dict(sys.modules, {"sglang.srt.arg_groups.choices": None}):
        with caplog.at_level(logging.WARNING):
            cumla.sglang.register()
        assert "SGLang 0.5.23 has no --attention-backend cumla" in caplog.text
    assert not backends


def test_older_versions_are_refused_when_asked_for() -> None:
    with stubbed("0.5.21"):
        match = r"^sglang: .* from 0.5.22 to 0.5.23, .* got 0.5.21; .* --attention-backend cumla$"
        with pytest.raises(RuntimeError, match=match):
            Server(is_mla=True)


def test_newer_versions_are_served_after_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with stubbed("0.6.0"), caplog.at_level(logging.WARNING):
        Server(is_mla=True)
    assert "tested with sglang 0.5.22 to 0.5.23, not with 0.6.0:" in caplog.text


def test_models_with_mla_are_told_to_absorb() -> None:
    Server(is_mla=False)
    assert absorbing == ["fa3"]
    for _ in range(2):
        Server(is_mla=True)
    assert absorbing == ["fa3", "cumla"]
    assert Handlers.found["cumla"](None, None) == "absorbed"


# --- what is computed ----------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "lens", "new", "drafts", "plan"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_mla_writes_and_attends_as_the_eager_calls(
    mode: Mode,
    lens: tuple[int, ...],
    new: tuple[int, ...],
    drafts: int | None,
    plan: str,
    in_parts: bool,
    cache_dtype: Any,
) -> None:
    tokens = sum(new)
    q = torch.randn(tokens, HEADS, 576).bfloat16()
    k = torch.randn(tokens, 1, 576).bfloat16()
    with stubbed(drafts=drafts):
        server = Server(True, cache_dtype)
        fb, layer = server.batch(mode, lens, new), server.layer()
        wanted = server.buffers[0].clone().unflatten(0, (-1, PAGE))
        server.backend.init_forward_metadata(fb)
        if in_parts:
            parts = {"q_rope": q[..., 512:], "k_rope": k[..., 512:]}
            arrays = q[..., :512].contiguous(), k[..., :512], k[..., :512]
        else:
            parts, arrays = {}, (q.flatten(1), k, k[..., :512])
        out = server.backend.forward_extend(*arrays, layer, fb, **parts)
        (step,) = server.backend.forward_metadata.steps.values()
    assert type(step.plan).__name__ == plan
    cumla.append_mla_cache(k, wanted, fb.out_cache_loc)
    assert torch.equal(server.buffers[0].view(torch.uint8), wanted.flatten(0, 1).view(torch.uint8))
    state = cumla.mla_attention(
        q,
        wanted,
        block_table=server.table.flip(0),
        kv_lens=torch.tensor(lens, dtype=torch.int32),
        qo_indptr=starts(new),
        softmax_scale=SCALE,
    )
    torch.testing.assert_close(out.view(tokens, HEADS, 512), state.out)


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize(
    ("width", "cache_dtype"),
    [*((width, torch.bfloat16) for width in WIDTHS[1:])]
    + [(width, torch.float8_e4m3fn) for width in WIDTHS[1:] if width != WIDE],
    ids=str,
)
def test_mla_of_other_widths(
    width: tuple[int, int], cache_dtype: torch.dtype, in_parts: bool
) -> None:
    """Decoding and a prefill of 3 tokens; a model without RoPE has no columns of it."""
    latent, columns = width[0], sum(width)
    for mode, new in ((Mode.DECODE, (1, 1, 1)), (Mode.EXTEND, (3, 1, 2))):
        tokens = sum(new)
        q, k = (torch.randn(tokens, n, columns).bfloat16() for n in (HEADS, 1))
        with stubbed():
            server = Server(True, cache_dtype, width=width)
            fb, layer = server.batch(mode, (90, 5, 33), new), server.layer()
            wanted = server.buffers[0].clone().unflatten(0, (-1, PAGE))
            server.backend.init_forward_metadata(fb)
            parts: dict[str, Any] = {}
            arrays = q.flatten(1), k, k[..., :latent]
            if in_parts:
                parts = {"q_rope": q[..., latent:], "k_rope": k[..., latent:]}
                arrays = q[..., :latent].contiguous(), k[..., :latent], k[..., :latent]
            out = server.backend.forward_extend(*arrays, layer, fb, **parts)
        bits = wanted.view(torch.uint8)
        rows = k[:, 0].to(cache_dtype).view(torch.uint8)
        bits.view(-1, bits.shape[-1])[fb.out_cache_loc.long()] = rows
        assert torch.equal(server.buffers[0].view(torch.uint8).flatten(1), bits.flatten(0, -2))
        state = cumla.mla_attention(
            q,
            wanted,
            block_table=server.table.flip(0),
            kv_lens=torch.tensor((90, 5, 33), dtype=torch.int32),
            qo_indptr=starts(new),
            softmax_scale=SCALE,
        )
        torch.testing.assert_close(out.view(tokens, HEADS, latent), state.out)


@pytest.mark.parametrize("mode", ["decoding", "drafts", "prefill"])
@pytest.mark.parametrize("page", [PAGE, 1])
def test_mha_writes_and_attends_as_the_eager_calls(mode: str, page: int) -> None:
    kind, lens, new, drafts, _ = STEPS[mode]
    tokens = sum(new)
    q, k, v = (torch.randn(tokens, *s).bfloat16() for s in ((HEADS, 64), (2, 64), (2, 32)))
    sinks = torch.linspace(-1, 1, HEADS).bfloat16()
    with stubbed(drafts=drafts):
        server = Server(False, page=page)
        fb = server.batch(kind, lens, new)
        caches = [each.clone().unflatten(0, (-1, PAGE)) for each in server.buffers]
        server.backend.init_forward_metadata(fb)
        outs = {
            window: server.backend.forward_extend(
                q.flatten(1),
                k.flatten(1),
                v.flatten(1),
                server.layer(sliding_window_size=window, logit_cap=20.0),
                fb,
                sinks=sinks,
            )
            for window in (-1, 7)
        }
    cumla.append_kv_cache(k, v, *caches, fb.out_cache_loc)
    for window, out in outs.items():
        state = cumla.attention(
            q,
            *caches,
            kv_lens=torch.tensor(lens, dtype=torch.int32),
            qo_indptr=starts(new),
            block_table=server.table.flip(0),
            window=None if window < 0 else window,
            softcap=20.0,
            sinks=sinks.float(),
            softmax_scale=SCALE,
        )
        torch.testing.assert_close(out.view(tokens, HEADS, 32), state.out)


@pytest.mark.parametrize("is_mla", [True, False])
def test_deterministic_decoding_has_the_bits_of_a_prefill(is_mla: bool) -> None:
    """Plans cut no request; a token has the same bits alone, among others and as a draft."""
    lens, new = (90, 5, 33), (40, 5, 9)
    tokens = sum(new)
    q = torch.randn(tokens, HEADS, 576 if is_mla else 64).bfloat16()
    with stubbed(drafts=3, is_deterministic=True):
        server = Server(is_mla)
        layer = server.layer() if is_mla else server.layer(sliding_window_size=20)

        def attend(fb: Any, of: Any) -> Any:
            server.backend.init_forward_metadata(fb)
            return server.backend.forward_extend(of.flatten(1), None, None, layer, fb)

        whole = attend(server.batch(Mode.EXTEND, lens, new), q)
        (step,) = server.backend.forward_metadata.steps.values()
        key = step.plan.key
        assert key.batch_invariant and key.parts == key.num_places
        last = torch.tensor([39, 44, 53])
        decoding = server.batch(Mode.DECODE, lens, (1, 1, 1))
        assert torch.equal(attend(decoding, q[last]), whole[last])
        alone = server.batch(Mode.DECODE, lens[:1], (1,))
        assert torch.equal(attend(alone, q[39:40]), whole[39:40])
        drafts = (last[:, None] + torch.arange(-2, 1)).flatten()
        verify = server.batch(Mode.TARGET_VERIFY, lens, (3, 3, 3))
        assert torch.equal(attend(verify, q[drafts]), whole[drafts])
        assert all(
            step.plan.key.batch_invariant for step in server.backend.forward_metadata.steps.values()
        )


@pytest.mark.parametrize("is_mla", [True, False])
def test_deterministic_trees_of_drafts(is_mla: bool) -> None:
    lens = (90, 5, 33)
    q = torch.randn(15, HEADS, 576 if is_mla else 64).bfloat16()
    with stubbed(drafts=5, topk=2, is_deterministic=True):
        server = Server(is_mla)
        outs = []
        for some in (slice(3), slice(1)):
            tree = tree_of(lens[some], is_full=True)
            more = {"spec_info": tree, "positions": tree.positions}
            fb = server.batch(Mode.TARGET_VERIFY, lens[some], (5, 5, 5)[some], **more)
            server.backend.init_forward_metadata(fb)
            of = q[: 5 * fb.batch_size].flatten(1)
            outs.append(server.backend.forward_extend(of, None, None, server.layer(), fb)[:5])
            steps = server.backend.forward_metadata.steps.values()
            assert all(step.plan.key.batch_invariant for step in steps)
    assert torch.equal(*outs)


def test_mha_applies_the_scales_of_fp8_caches() -> None:
    q, k, v = (torch.randn(3, *s).bfloat16() for s in ((HEADS, 64), (2, 64), (2, 32)))
    outs = []
    for dtype, scales in ((torch.bfloat16, (None, None)), (torch.float8_e4m3fn, (0.5, 0.25))):
        server = Server(False, dtype)
        factors = [s and torch.nn.Parameter(torch.tensor(s)) for s in scales]
        server.fill([each.zero_() for each in server.buffers])
        fb = server.batch(Mode.DECODE, (1, 1, 1), (1, 1, 1))
        server.backend.init_forward_metadata(fb)
        layer = server.layer(k_scale=factors[0], v_scale=factors[1])
        outs.append(server.backend.forward_decode(q, k, v, layer, fb).float())
    torch.testing.assert_close(outs[1], outs[0], rtol=0.1, atol=0.02)
    assert not torch.equal(*outs)


@pytest.mark.parametrize("in_place", [True, False])
def test_drafts_behind_the_longest_context_have_their_pages(in_place: bool) -> None:
    """SGLang's pool has slots for them; where it tells no lengths, the table has all pages."""
    with stubbed(drafts=5):
        server = Server(False)
        server.runner.model_config.context_len = 112
        backend = server.backend = backends["cumla"](server.runner)
        backend.init_cuda_graph_state(3, 15)
        backend._block_table.fill_(-1)
        fb = server.batch(Mode.TARGET_VERIFY, (114, 5, 33), (5, 5, 5), seq_lens_cpu=None)
        if in_place:
            backend.init_forward_metadata_out_graph(fb)
        else:
            backend.init_forward_metadata(fb)
        assert torch.equal(backend.forward_metadata.block_table, server.table.flip(0))


def test_a_layer_that_shares_keys_writes_none() -> None:
    server = Server(True)
    before = server.buffers[0].clone()
    fb = server.batch(Mode.DECODE, (9, 5, 3), (1, 1, 1))
    server.backend.init_forward_metadata(fb)
    q = torch.randn(3, HEADS, 576).bfloat16()
    for k, save in ((None, True), (torch.zeros(3, 1, 576).bfloat16(), False)):
        server.backend.forward_decode(q, k, k, server.layer(), fb, save)
    assert torch.equal(server.buffers[0], before)


def test_a_graph_serves_later_lengths_and_pages() -> None:
    """What is captured holds for each later step of its shape, padded requests included."""
    with torch_gpu() as gpu:
        server = Server(True)
        backend, layer = server.backend, server.layer()
        backend.init_cuda_graph_state(4, 4)
        q = torch.randn(3, HEADS, 576).bfloat16()
        first = server.batch(Mode.DECODE, (90, 90, 90), (1, 1, 1), seq_lens_cpu=None)
        backend.init_forward_metadata_out_graph(first, in_capture=True)
        backend.forward_decode(q, None, None, layer, first)  # warms up
        with gpu.capture(0):
            out = backend.forward_decode(q, None, None, layer, first)
        for lens in ((33, 7, 50), (64, 100, 1)):
            fb = server.batch(Mode.DECODE, lens, (1, 1, 1))
            backend.init_forward_metadata_out_graph(fb)
            gpu.replay()
            wanted = cumla.mla_decode(
                q[:, None],
                server.buffers[0].unflatten(0, (-1, PAGE)),
                server.table.flip(0),
                torch.tensor(lens, dtype=torch.int32),
                softmax_scale=SCALE,
            )
            torch.testing.assert_close(out.view(3, HEADS, 512).clone(), wanted.out[:, 0])


@pytest.mark.parametrize("drafts", [None, 3])
def test_a_graph_fills_in_its_step(drafts: int | None) -> None:
    """Nothing is launched before a replay; the graph reads SGLang's arrays, where they stay."""
    q_len = drafts or 1
    mode = Mode.TARGET_VERIFY if drafts else Mode.DECODE
    with stubbed(drafts=drafts), torch_gpu() as gpu:
        server = Server(True)
        backend, layer = server.backend, server.layer()
        backend.init_cuda_graph_state(4, 4 * q_len)
        q = torch.randn(3 * q_len, HEADS, 576).bfloat16()
        kept = server.batch(mode, (90, 90, 90), (q_len,) * 3, seq_lens_cpu=None)
        backend.init_forward_metadata_out_graph(kept, in_capture=True)
        backend.init_forward_metadata_in_graph(kept)
        backend.forward_extend(q, None, None, layer, kept)  # warms up
        with gpu.capture(0), Launches() as launches:
            backend.init_forward_metadata_in_graph(kept)
            recorded = list(launches.names)
            out = backend.forward_extend(q, None, None, layer, kept)
        assert recorded == ["add", "index_select", "floor_divide"]
        for lens in ((33, 7, 50), (64, 100, 3)):
            later = server.batch(mode, lens, (q_len,) * 3)
            kept.seq_lens.copy_(later.seq_lens)
            with Launches() as launches:
                backend.init_forward_metadata_out_graph(kept)
            assert not launches.names
            backend.init_forward_metadata_in_graph(kept)  # what the capture has of PyTorch
            gpu.replay()
            wanted = cumla.mla_decode(
                q.unflatten(0, (3, q_len)),
                server.buffers[0].unflatten(0, (-1, PAGE)),
                server.table.flip(0),
                torch.tensor(lens, dtype=torch.int32),
                softmax_scale=SCALE,
            )
            torch.testing.assert_close(out.view(3, q_len, HEADS, 512).clone(), wanted.out)
        backend.init_cuda_graph_state(4, 4 * q_len)  # the graphs of before are gone
        with Launches() as launches:
            backend.init_forward_metadata_out_graph(kept)
        assert len(launches.names) > 2


def test_large_tables_and_trees_are_filled_in_before_a_replay() -> None:
    """A graph would fill in what is not in use; and masks of trees are made from lengths."""
    for topk, most in ((1, 1), (2, 1 << 20)):
        with stubbed(drafts=5, topk=topk), torch_gpu() as gpu:
            server = Server(True)
            backend = server.backend
            backend.init_cuda_graph_state(3, 15)
            with mock.patch.object(sys.modules["cumla.sglang.backend"], "_MOST_PAGES", most):
                fb = server.batch(Mode.TARGET_VERIFY, (90, 50, 33), (5, 5, 5), spec_info=None)
                backend.init_forward_metadata_out_graph(fb, in_capture=True)
                with gpu.capture(0), Launches() as launches:
                    backend.init_forward_metadata_in_graph(fb)
                assert not launches.names
                backend.forward_metadata.kv_lens.zero_()
                backend.init_forward_metadata_out_graph(fb)
            assert backend.forward_metadata.kv_lens.tolist() == [90, 50, 33]


def seen(spec: Any, lens: tuple[int, ...], window: int | None) -> Any:
    """What drafts see of a window by their depths, as attention without pages would: dense."""
    masks = []
    for r, (n, positions) in enumerate(zip(lens, spec.positions.split(5), strict=True)):
        tree = TREE if r % 2 == 0 else TREE.T.flip(0, 1)
        mask = torch.cat([torch.ones(5, n - 5, dtype=torch.bool), tree], 1)
        if window is not None:
            at = torch.cat([torch.arange(n - 5), positions])
            mask &= at >= positions[:, None] - window
        masks.append(mask)
    return masks


def attend_to_trees(server: Server, spec: Any, lens: tuple[int, ...], q: Any, window: Any) -> Any:
    """Attention of each request, and each draft, over what it sees."""
    outs = []
    caches = [each.float().unflatten(0, (-1, PAGE)) for each in server.buffers]
    for mask, pages, rows in zip(
        seen(spec, lens, window), server.table.flip(0), q.split(5), strict=False
    ):
        k, v = (c[pages.long()].flatten(0, 1)[: mask.shape[1]] for c in caches)
        outs.append(naive(rows, k, v, scale=SCALE, mask=mask)[0])
    return torch.cat(outs)


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found.float(), wanted.flatten(1), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [None, 3, 60])
@pytest.mark.parametrize("is_full", [True, False])
def test_drafts_in_trees_see_their_ancestors(window: int | None, is_full: bool) -> None:
    """Masks of all keys, where no graph is; and of drafts alone, also of more requests."""
    lens = (90, 5, 33)
    with stubbed(drafts=5, topk=2):
        server = Server(False)
        if not is_full:
            server.backend.init_cuda_graph_state(2, 10)
            assert server.backend.verify_mask.mode.name == "QLEN_ONLY"
            assert server.backend.verify_mask.buffer.numel() == 50
        assert (server.backend.verify_mask is None) == is_full
        spec = tree_of(lens, is_full=is_full)
        fb = server.batch(Mode.TARGET_VERIFY, lens, (5, 5, 5), spec_info=spec)
        fb.positions = spec.positions
        server.backend.init_forward_metadata(fb)
        q, k, v = (torch.randn(15, *s).bfloat16() for s in ((HEADS, 64), (2, 64), (2, 32)))
        layer = server.layer(sliding_window_size=-1 if window is None else window)
        out = server.backend.forward_extend(q.flatten(1), k, v, layer, fb)
        (step,) = server.backend.forward_metadata.steps.values()
        assert step.plan._mask_form == "tree"
        close(out, attend_to_trees(server, spec, lens, q, window))
        # Decoding and prefill of the same server have no masks.
        for mode, new in ((Mode.DECODE, (1, 1, 1)), (Mode.EXTEND, (5, 5, 5))):
            fb = server.batch(mode, lens, new)
            server.backend.init_forward_metadata(fb)
            server.backend.forward_extend(q[: sum(new)], None, None, layer, fb)
            assert not server.backend.forward_metadata.masks


def test_graphs_of_more_requests_have_masks_of_their_size() -> None:
    """Where SGLang captures again, after another number of requests."""
    lens = (90, 5, 33)
    with stubbed(drafts=5, topk=2):
        server, q = Server(False), torch.randn(15, HEADS, 64).bfloat16()
        for count in (1, 3):
            server.backend.init_cuda_graph_state(count, 5 * count)
            spec = tree_of(lens[:count], is_full=False)
            fb = server.batch(Mode.TARGET_VERIFY, lens[:count], (5,) * count, spec_info=spec)
            fb.positions = spec.positions
            server.backend.init_forward_metadata_out_graph(fb)
            rows = q[: 5 * count]
            out = server.backend.forward_extend(rows.flatten(1), None, None, server.layer(), fb)
            close(out, attend_to_trees(server, spec, lens[:count], rows, None))


@pytest.mark.parametrize("is_ngram", [False, True])
def test_a_graph_serves_later_trees(is_ngram: bool) -> None:
    """Of fewer requests as well; the masks of n-grams always have all keys."""
    windows = (None, 3)
    with stubbed(drafts=5, topk=2), torch_gpu() as gpu:
        server = Server(False, is_ngram=is_ngram)
        backend = server.backend
        backend.init_cuda_graph_state(3, 15)
        layers = [server.layer(sliding_window_size=-1 if w is None else w) for w in windows]
        q = torch.randn(15, HEADS, 64).bfloat16()
        dummy = SimpleNamespace(custom_mask=torch.ones(7, dtype=torch.bool), positions=None)
        fb = server.batch(Mode.TARGET_VERIFY, (90, 90, 90), (5, 5, 5), spec_info=dummy)
        backend.init_forward_metadata_out_graph(fb, in_capture=True)
        for layer in layers:  # warms up
            backend.forward_extend(q, None, None, layer, fb)
        with gpu.capture(0):
            outs = [backend.forward_extend(q, None, None, layer, fb) for layer in layers]
        own = None if is_ngram else backend.verify_mask.buffer
        assert (backend.verify_mask is None) == is_ngram
        for lens, padded in (((33, 7, 50), ()), ((64, 11), (6,)), ((9, 90, 5), ())):
            spec = tree_of(lens, is_full=is_ngram, into=own)
            fb = server.batch(Mode.TARGET_VERIFY, lens + padded, (5, 5, 5), spec_info=spec)
            fb.positions[: len(spec.positions)] = spec.positions
            backend.init_forward_metadata_out_graph(fb)
            gpu.replay()
            for window, out in zip(windows, outs, strict=True):
                wanted = attend_to_trees(server, spec, lens, q, window)
                close(out[: len(wanted)].clone(), wanted)
        # Prepared before the drafts were there: the masks are built again.
        spec.custom_mask.fill_(True)
        backend.init_forward_metadata_out_graph(fb)
        spec = tree_of(lens, is_full=is_ngram, into=own)
        backend.update_verify_buffers_to_fill_after_draft(spec, 3)
        gpu.replay()
        for window, out in zip(windows, outs, strict=True):
            close(out.clone(), attend_to_trees(server, spec, lens, q, window))


def attend_to_latent_trees(server: Server, spec: Any, lens: tuple[int, ...], q: Any) -> Any:
    """The same over rows of MLA."""
    outs = []
    cache = server.buffers[0].float().unflatten(0, (-1, PAGE))
    for mask, pages, rows in zip(
        seen(spec, lens, None), server.table.flip(0), q.split(5), strict=False
    ):
        k = cache[pages.long()].flatten(0, 1)[: mask.shape[1]]
        outs.append(naive(rows, k, k[..., :512], scale=SCALE, mask=mask)[0])
    return torch.cat(outs)


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("page", [PAGE, 1])
def test_drafts_of_mla_in_trees_see_their_ancestors(
    is_full: bool, in_parts: bool, page: int
) -> None:
    """One request has nothing before its drafts."""
    lens = (90, 5, 33)
    with stubbed(drafts=5, topk=2):
        server = Server(True, page=page)
        if not is_full:
            server.backend.init_cuda_graph_state(3, 15)
        spec = tree_of(lens, is_full=is_full)
        fb = server.batch(Mode.TARGET_VERIFY, lens, (5, 5, 5), spec_info=spec)
        fb.positions = spec.positions
        server.backend.init_forward_metadata(fb)
        q = torch.randn(15, HEADS, 576).bfloat16()
        parts = {"q_rope": q[..., 512:].flatten(1)} if in_parts else {}
        rows = (q[..., :512] if in_parts else q).flatten(1)
        layer = server.layer()
        out = server.backend.forward_extend(rows, None, None, layer, fb, **parts)
        close(out, attend_to_latent_trees(server, spec, lens, q))
        # Decoding and prefill of the same server have no trees.
        for mode, new in ((Mode.DECODE, (1, 1, 1)), (Mode.EXTEND, (5, 5, 5))):
            fb = server.batch(mode, lens, new)
            server.backend.init_forward_metadata(fb)
            server.backend.forward_extend(q[: sum(new)].flatten(1), None, None, layer, fb)
            assert not server.backend.forward_metadata.masks


@pytest.mark.parametrize("is_ngram", [False, True])
def test_a_graph_serves_later_trees_of_mla(is_ngram: bool) -> None:
    """Of fewer requests as well; and of drafts that come after the step was prepared."""
    with stubbed(drafts=5, topk=2), torch_gpu() as gpu:
        server = Server(True, is_ngram=is_ngram)
        backend = server.backend
        backend.init_cuda_graph_state(3, 15)
        layer = server.layer()
        q = torch.randn(15, HEADS, 576).bfloat16()
        dummy = SimpleNamespace(custom_mask=torch.ones(7, dtype=torch.bool), positions=None)
        fb = server.batch(Mode.TARGET_VERIFY, (90, 90, 90), (5, 5, 5), spec_info=dummy)
        backend.init_forward_metadata_out_graph(fb, in_capture=True)
        backend.forward_extend(q.flatten(1), None, None, layer, fb)
        with gpu.capture(0):
            out = backend.forward_extend(q.flatten(1), None, None, layer, fb)
        own = None if is_ngram else backend.verify_mask.buffer
        for lens, padded in (((33, 7, 50), ()), ((64, 11), (6,)), ((9, 90, 5), ())):
            spec = tree_of(lens, is_full=is_ngram, into=own)
            fb = server.batch(Mode.TARGET_VERIFY, lens + padded, (5, 5, 5), spec_info=spec)
            fb.positions[: len(spec.positions)] = spec.positions
            backend.init_forward_metadata_out_graph(fb)
            gpu.replay()
            wanted = attend_to_latent_trees(server, spec, lens, q)
            close(out[: len(wanted)].clone(), wanted)
        spec.custom_mask.fill_(True)
        backend.init_forward_metadata_out_graph(fb)
        spec = tree_of(lens, is_full=is_ngram, into=own)
        backend.update_verify_buffers_to_fill_after_draft(spec, 3)
        gpu.replay()
        close(out.clone(), attend_to_latent_trees(server, spec, lens, q))


def test_a_graph_of_trees_needs_a_run_before_it() -> None:
    """The masks that it reads would be memory of the graph, which each replay clears."""
    with stubbed(drafts=5, topk=2), torch_gpu() as gpu:
        server = Server(False)
        server.backend.init_cuda_graph_state(3, 15)
        fb = server.batch(Mode.TARGET_VERIFY, (90, 90, 90), (5, 5, 5), spec_info=None)
        server.backend.init_forward_metadata_out_graph(fb, in_capture=True)
        q = torch.randn(15, HEADS, 64).bfloat16()
        with (
            pytest.raises(RuntimeError, match=r"^CUDA graph: .* before the capture"),
            gpu.capture(0),
        ):
            server.backend.forward_extend(q, None, None, server.layer(), fb)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_an_idle_rank_replays_a_graph_of_trees(has_drafts: bool) -> None:
    """It has no drafts, or the buffer of the largest batch, which is no mask of this one."""
    with stubbed(drafts=5, topk=2), torch_gpu() as gpu:
        server = Server(False)
        backend = server.backend
        backend.init_cuda_graph_state(3, 15)
        layer = server.layer()
        q = torch.randn(15, HEADS, 64).bfloat16()
        fb = server.batch(Mode.TARGET_VERIFY, (90, 90, 90), (5, 5, 5), spec_info=None)
        backend.init_forward_metadata_out_graph(fb, in_capture=True)
        backend.forward_extend(q, None, None, layer, fb)
        with gpu.capture(0):
            backend.forward_extend(q, None, None, layer, fb)
        buffer = torch.zeros(3 * 6 * 5, dtype=torch.bool)
        spec = SimpleNamespace(custom_mask=buffer, positions=None) if has_drafts else None
        fb = server.batch(Mode.TARGET_VERIFY, (1, 1, 1), (5, 5, 5), spec_info=spec)
        fb.actual_forward_mode = SimpleNamespace(is_idle=lambda: True)
        backend.init_forward_metadata_out_graph(fb)
        assert backend.forward_metadata.tree is None
        gpu.replay()


def test_chains_have_no_masks() -> None:
    with stubbed(drafts=3, topk=1):
        server = Server(False)
        server.backend.init_cuda_graph_state(3, 9)
        assert server.backend.verify_mask is None
        fb = server.batch(Mode.TARGET_VERIFY, (90, 5, 33), (3, 3, 3), spec_info=None)
        server.backend.init_forward_metadata(fb)
        server.backend.update_verify_buffers_to_fill_after_draft(None, None)
        server.backend.forward_extend(
            torch.zeros(9, HEADS, 64).bfloat16(), None, None, server.layer(), fb
        )
        assert not server.backend.forward_metadata.masks


@pytest.mark.parametrize("stream", [0, 7])
@pytest.mark.parametrize("is_mla", [True, False])
def test_a_graph_holds_one_schedule(is_mla: bool, stream: int) -> None:
    """On whatever stream SGLang captures."""
    with torch_gpu(always=True) as gpu:
        server = Server(is_mla)
        backend, layer = server.backend, server.layer()
        backend.init_cuda_graph_state(4, 4)
        shapes = [(HEADS, 576)] if is_mla else [(HEADS, 64), (2, 64), (2, 32)]
        arrays = [torch.randn(3, *shape).bfloat16().flatten(1) for shape in shapes]
        arrays += [None] * (3 - len(arrays))
        first = server.batch(Mode.DECODE, (90, 90, 90), (1, 1, 1), seq_lens_cpu=None)
        backend.init_forward_metadata_out_graph(first, in_capture=True)
        for _ in range(2):
            backend.forward_decode(*arrays, layer, first, False)  # warms up
        with gpu.capture(stream):
            for _ in range(3):
                backend.forward_decode(*arrays, layer, first, False)
        entries = [launch.spec.entry for launch in gpu.captured]
        assert len(entries) == 4
        assert "schedule" in entries[0]
        assert not [entry for entry in entries[1:] if "schedule" in entry]


# --- images and chunks ---------------------------------------------------------------------------

GEMMA = SimpleNamespace(architectures=["Gemma3ForConditionalGeneration"])
CHUNKS = {"attention_chunk_size": 8, "is_local_attention_model": True}
IMAGES = [[(52, 60), (70, 86)], None, [(0, 3), (20, 40)]]  # of three requests; the last goes on


def image_inputs() -> list[Any]:
    """SGLang's inputs: one item an image, and audio, which is causal."""
    item = SimpleNamespace(is_image=lambda: True)
    audio = SimpleNamespace(is_image=lambda: False, offsets=[(8, 12)])
    return [
        spans and SimpleNamespace(mm_items=[SimpleNamespace(**vars(item), offsets=spans), audio])
        for spans in IMAGES
    ]


def attend_by(server: Server, lens: Any, new: Any, q: Any, sees: Any) -> Any:
    """Attention of each request over what its tokens see: request, positions, all positions."""
    outs = []
    caches = [each.float().unflatten(0, (-1, PAGE)) for each in server.buffers]
    rows = zip(lens, new, server.table.flip(0), q.split(new), strict=True)
    for r, (n, count, pages, queries) in enumerate(rows):
        k, v = (cache[pages.long()].flatten(0, 1)[:n] for cache in caches)
        mask = sees(r, torch.arange(n - count, n)[:, None], torch.arange(n))
        outs.append(naive(queries, k, v, mask=mask, scale=SCALE)[0].flatten(1))
    return torch.cat(outs)


def sees_images(window: int) -> Any:
    """SGLang's rule for Gemma 3: what is before a token, and its image, within a window."""

    def sees(r: int, p: Any, j: Any) -> Any:
        mask = j <= p
        for first, last in IMAGES[r] or ():
            mask = mask | (p >= first) & (p <= last) & (j >= first) & (j <= last)
        return mask & ((j >= p - window) | (window < 0))

    return sees


@pytest.mark.parametrize("window", [-1, 7])
def test_tokens_of_an_image_see_each_other(window: int) -> None:
    """Also where a chunk of a prompt begins in an image, or ends in it; windows cut them."""
    lens, new = (90, 5, 33), (20, 5, 33)
    server = Server(False, hf_config=GEMMA)
    q = torch.randn(58, HEADS, 64).bfloat16()
    layers = [server.layer(sliding_window_size=window) for _ in range(2)]
    fb = server.batch(Mode.EXTEND, lens, new, mm_inputs=image_inputs())
    server.backend.init_forward_metadata(fb)
    batch = server.backend.forward_metadata
    assert batch.spans.tolist() == [[[70, 86], [0, 0]], [[0, 0], [0, 0]], [[0, 3], [20, 40]]]
    outs = [server.backend.forward_extend(q.flatten(1), None, None, each, fb) for each in layers]
    assert len(batch.rows) == len(batch.steps) == 1
    close(outs[0], attend_by(server, lens, list(new), q, sees_images(window)))
    assert torch.equal(*outs)


def test_images_count_without_the_lengths_of_cached_prefixes() -> None:
    server = Server(False, hf_config=GEMMA)
    fb = server.batch(Mode.EXTEND, (90, 5, 33), (20, 5, 33), mm_inputs=image_inputs())
    fb.extend_prefix_lens_cpu = None
    server.backend.init_forward_metadata(fb)
    spans = server.backend.forward_metadata.spans.tolist()
    assert [70, 86] in spans[0]
    assert [0, 3] in spans[2]


@pytest.mark.parametrize(
    ("mode", "architecture"),
    [(Mode.EXTEND, "SomeForCausalLM"), (Mode.EXTEND, None), (Mode.DECODE, GEMMA.architectures[0])],
)
def test_steps_without_images_of_such_models_have_no_mask(
    mode: Mode, architecture: str | None
) -> None:
    """Other models; prompts behind their images; decoding."""
    config = SimpleNamespace(architectures=[architecture or GEMMA.architectures[0]])
    server = Server(False, hf_config=config)
    inputs = image_inputs()[: 2 if architecture is None else 3]
    fb = server.batch(mode, (90, 5, 33), (1, 1, 1), mm_inputs=inputs)
    server.backend.init_forward_metadata(fb)
    assert server.backend.forward_metadata.spans is None


def sees_chunk(r: int, p: Any, j: Any) -> Any:
    return (j <= p) & (j >= p // 8 * 8)


@pytest.mark.parametrize("mode", ["decoding", "drafts", "prefill"])
def test_layers_attend_in_chunks(mode: str) -> None:
    """Llama 4: layers without RoPE see all keys."""
    kind, lens, new, drafts, _ = STEPS[mode]
    q = torch.randn(sum(new), HEADS, 64).bfloat16()
    with stubbed(drafts=drafts):
        server = Server(False, **CHUNKS)
        fb = server.batch(kind, lens, new)
        server.backend.init_forward_metadata(fb)
        outs = [
            server.backend.forward_extend(
                q.flatten(1), None, None, server.layer(use_irope=has_rope), fb
            )
            for has_rope in (True, False)
        ]
    for out, sees in zip(outs, (sees_chunk, lambda r, p, j: j <= p), strict=True):
        close(out, attend_by(server, lens, list(new), q, sees))


def test_a_graph_builds_the_masks_of_chunks_at_each_replay() -> None:
    with torch_gpu() as gpu:
        server = Server(False, **CHUNKS)
        backend, layer = server.backend, server.layer(use_irope=True)
        backend.init_cuda_graph_state(4, 4)
        q = torch.randn(3, HEADS, 64).bfloat16()
        first = server.batch(Mode.DECODE, (90, 90, 90), (1, 1, 1), seq_lens_cpu=None)
        backend.init_forward_metadata_out_graph(first, in_capture=True)
        backend.forward_decode(q.flatten(1), None, None, layer, first)  # warms up
        with gpu.capture(0):
            out = backend.forward_decode(q.flatten(1), None, None, layer, first)
        for lens in ((33, 7, 50), (64, 90, 1)):
            fb = server.batch(Mode.DECODE, lens, (1, 1, 1))
            backend.init_forward_metadata_out_graph(fb)
            gpu.replay()
            close(out.clone(), attend_by(server, lens, [1, 1, 1], q, sees_chunk))


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "change", "match"),
    [
        ({}, {"kv_cache_dtype": torch.float8_e5m2}, r"^kv_cache_dtype: .*float8_e5m2; pass"),
        ({}, {"token_to_kv_pool": WindowPool()}, "^memory pool: .*--disable-hybrid-swa-memory"),
        (
            {"drafts": 5, "topk": 2},
            {"model_config": SimpleNamespace(**vars(MODEL) | CHUNKS), "use_mla_backend": False},
            "^speculative_eagle_topk: .* beside chunked local attention, got 2; pass",
        ),
        ({"dcp": 2}, {}, "^dcp_size: .* got 2; leave out"),
        (
            {"drafts": 257, "topk": 2},
            {"use_mla_backend": False},
            "^speculative_eagle_topk: .* up to 256 drafts, got 2 with 257 drafts; pass",
        ),
    ],
)
def test_configurations_are_refused(
    options: dict[str, Any], change: dict[str, Any], match: str
) -> None:
    runner = SimpleNamespace(**vars(Server(is_mla=True).runner) | change)
    with stubbed(**options):
        cumla.sglang.register()
        with pytest.raises(NotImplementedError, match=rf"{match}.*{OF_MODEL}"):
            backends["cumla"](runner)


def test_halves_of_a_step_are_refused_where_tokens_of_an_image_see_each_other() -> None:
    """SGLang gives them no `mm_inputs`."""
    with stubbed(in_two=True):
        Server(False)
        match = "^enable_two_batch_overlap: .* got True; leave out .* Gemma3ForConditional"
        with pytest.raises(NotImplementedError, match=match):
            Server(False, hf_config=GEMMA)


@pytest.mark.parametrize(
    ("is_mla", "layer", "match"),
    [
        (False, {"is_cross_attention": True}, "got cross-attention; leave out"),
        (False, {"attn_type": DecoderType.ENCODER_ONLY}, "ENCODER_ONLY; leave out"),
        (False, {"xai_temperature_len": 8}, "xai_temperature_len 8"),
        (
            True,
            {"qk_head_dim": 192},
            "absorbed queries of 576, 512, 320, 288, 1088 columns .* got 192",
        ),
    ],
)
def test_layers_are_refused(is_mla: bool, layer: dict[str, Any], match: str) -> None:
    server = Server(is_mla)
    fb = server.batch(Mode.DECODE, (9, 5, 3), (1, 1, 1))
    server.backend.init_forward_metadata(fb)
    with pytest.raises(NotImplementedError, match=f"^layer 0: .*{match}.*{OF_MODEL}"):
        server.backend.forward_decode(None, None, None, server.layer(**layer), fb)
