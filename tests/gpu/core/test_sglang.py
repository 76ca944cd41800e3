# SPDX-License-Identifier: Apache-2.0
"""The plugin of SGLang, on a stub of it, on torch's CUDA tensors and in graphs as SGLang captures.

The kernels are proven by other modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import cumla
from tests.gpu.tools.waiting import no_waiting
from tests.sglang.server import HEADS, PAGE, SCALE, STEPS, Server, starts, tree_of
from tests.sglang.stub import Mode, stubbed
from tests.sglang.test_plugin import (
    CHUNKS,
    GEMMA,
    attend_by,
    attend_to_latent_trees,
    attend_to_trees,
    image_inputs,
    sees_chunk,
    sees_images,
)
from tests.sglang.test_sparse import inputs, made, stored

KERNELS = ()
MAY_SKIP = ()
torch = pytest.importorskip("torch")


def eager(server: Server, q: Any, lens: tuple[int, ...], new: tuple[int, ...]) -> Any:
    caches = [each.unflatten(0, (-1, PAGE)) for each in server.buffers]
    options: dict[str, Any] = {
        "kv_lens": torch.tensor(lens, dtype=torch.int32, device="cuda"),
        "qo_indptr": starts(new).cuda(),
        "block_table": server.table.flip(0),
        "softmax_scale": SCALE,
    }
    if len(caches) == 1:
        return cumla.mla_attention(q, caches[0], **options).out.flatten(1)
    return cumla.attention(q, *caches, **options).out.flatten(1)


def queries(server: Server, tokens: int) -> Any:
    return torch.randn(tokens, HEADS, server.layer().qk_head_dim, device="cuda").bfloat16()


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("is_mla", [True, False], ids=["MLA", "MHA"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_attend_as_the_eager_call(name: str, is_mla: bool, cache_dtype: Any) -> None:
    mode, lens, new, drafts, _ = STEPS[name]
    with stubbed(drafts=drafts):
        server = Server(is_mla, cache_dtype, device="cuda")
        q, fb = queries(server, sum(new)), server.batch(mode, lens, new)
        fb.seq_lens_cpu = fb.seq_lens.cpu()
        server.backend.init_forward_metadata(fb)
        server.backend.forward_extend(q, None, None, server.layer(), fb)  # compiles
        with no_waiting():
            server.backend.init_forward_metadata(fb)
            out = server.backend.forward_extend(q, None, None, server.layer(), fb)
    torch.testing.assert_close(out, eager(server, q, lens, new), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("fills_in", [True, False])
@pytest.mark.parametrize("shares_stream", [True, False])
@pytest.mark.parametrize("is_mla", [True, False], ids=["MLA", "MHA"])
def test_graphs_serve_later_steps(is_mla: bool, shares_stream: bool, fills_in: bool) -> None:
    """As SGLang: warm-ups, then the capture; later steps are prepared on the replaying stream.

    The graph fills in lengths and pages, or where SGLang has not asked for that, the preparation.
    """
    with stubbed():
        server = Server(is_mla, device="cuda")
        backend, layers = server.backend, [server.layer(), server.layer(sliding_window_size=40)]
        layers = layers[:1] if is_mla else layers
        backend.init_cuda_graph_state(3, 3)
        q, side = queries(server, 3), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            kept = server.batch(Mode.DECODE, (1, 1, 1), (1, 1, 1), seq_lens_cpu=None)

            def run() -> list[Any]:
                if fills_in:
                    backend.init_forward_metadata_in_graph(kept)
                return [backend.forward_decode(q, None, None, layer, kept) for layer in layers]

            backend.init_forward_metadata_out_graph(kept, in_capture=True)
            for _ in range(2):
                run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side if shares_stream else None):
                outs = run()
        torch.cuda.synchronize()
        for lens in ((33, 7, 30), (64, 100, 1), (128, 2, 90)):
            fb = server.batch(Mode.DECODE, lens, (1, 1, 1))
            kept.seq_lens.copy_(fb.seq_lens)
            fb.seq_lens_cpu = fb.seq_lens.cpu()
            backend.init_forward_metadata_out_graph(fb)
            graph.replay()
            wanted = eager(server, q, lens, (1, 1, 1))
            torch.testing.assert_close(outs[0], wanted, rtol=2e-2, atol=2e-2)
            alone = backend.forward_decode(q, None, None, layers[-1], fb)
            torch.testing.assert_close(outs[-1], alone, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shares_stream", [True, False])
@pytest.mark.parametrize("is_mla", [True, False], ids=["MLA", "MHA"])
def test_graphs_serve_later_trees_of_drafts(is_mla: bool, shares_stream: bool) -> None:
    """SGLang writes the masks and positions of a step before each replay."""
    windows = (None,) if is_mla else (None, 3)
    with stubbed(drafts=5, topk=2):
        server, on_host = Server(is_mla, device="cuda"), Server(is_mla)
        backend = server.backend
        backend.init_cuda_graph_state(3, 15)
        layers = [server.layer(sliding_window_size=-1 if w is None else w) for w in windows]
        q, side = queries(server, 15), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fb = server.batch(Mode.TARGET_VERIFY, (90, 90, 90), (5, 5, 5), spec_info=None)
            backend.init_forward_metadata_out_graph(fb, in_capture=True)
            for _ in range(2):
                for layer in layers:
                    backend.forward_extend(q, None, None, layer, fb)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side if shares_stream else None):
                outs = [backend.forward_extend(q, None, None, layer, fb) for layer in layers]
        torch.cuda.synchronize()
        for lens in ((33, 7, 50), (64, 11, 6), (9, 90, 5)):
            spec = tree_of(lens, is_full=False, into=backend.verify_mask.buffer)
            fb = server.batch(Mode.TARGET_VERIFY, lens, (5, 5, 5), spec_info=spec)
            fb.seq_lens_cpu = fb.seq_lens.cpu()
            fb.positions.copy_(spec.positions)
            backend.init_forward_metadata_out_graph(fb)
            graph.replay()
            for window, out in zip(windows, outs, strict=True):
                if is_mla:
                    wanted = attend_to_latent_trees(on_host, spec, lens, q.cpu()).flatten(1)
                else:
                    wanted = attend_to_trees(on_host, spec, lens, q.cpu(), window).flatten(1)
                torch.testing.assert_close(out.cpu().float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("is_mla", [True, False], ids=["MLA", "MHA"])
def test_deterministic_decoding_has_the_bits_of_a_prefill(is_mla: bool) -> None:
    lens, new = (128, 5, 33), (40, 5, 9)
    with stubbed(drafts=3, is_deterministic=True):
        server = Server(is_mla, device="cuda")
        q = queries(server, sum(new))

        def attend(mode: Mode, some: slice, new: tuple[int, ...], of: Any) -> Any:
            fb = server.batch(mode, lens[some], new)
            fb.seq_lens_cpu = fb.seq_lens.cpu()
            server.backend.init_forward_metadata(fb)
            return server.backend.forward_extend(of.flatten(1), None, None, server.layer(), fb)

        whole = attend(Mode.EXTEND, slice(3), new, q)
        last = torch.tensor([39, 44, 53], device="cuda")
        drafts = (last[:, None] + torch.arange(-2, 1, device="cuda")).flatten()
        for some in (slice(3), slice(1)):
            rows = last[some]
            ones = (1,) * len(rows)
            assert torch.equal(attend(Mode.DECODE, some, ones, q[rows]), whole[rows])
        found = attend(Mode.TARGET_VERIFY, slice(3), (3, 3, 3), q[drafts])
        assert torch.equal(found, whole[drafts])


@pytest.fixture
def sglang() -> Iterator[None]:
    with stubbed():
        yield


@pytest.mark.parametrize("window", [-1, 7])
def test_tokens_of_an_image_see_each_other(sglang: None, window: int) -> None:
    lens, new = (90, 5, 33), (20, 5, 33)
    server, on_host = (Server(False, device=on, hf_config=GEMMA) for on in ("cuda", "cpu"))
    q, layer = queries(server, sum(new)), server.layer(sliding_window_size=window)
    fb = server.batch(Mode.EXTEND, lens, new, mm_inputs=image_inputs())
    fb.seq_lens_cpu = fb.seq_lens.cpu()
    server.backend.init_forward_metadata(fb)
    server.backend.forward_extend(q.flatten(1), None, None, layer, fb)  # compiles
    with no_waiting():
        server.backend.init_forward_metadata(fb)
        out = server.backend.forward_extend(q.flatten(1), None, None, layer, fb)
    wanted = attend_by(on_host, lens, list(new), q.cpu(), sees_images(window)).flatten(1)
    torch.testing.assert_close(out.cpu().float(), wanted, rtol=2e-2, atol=2e-2)


def test_graphs_build_masks_of_chunks(sglang: None) -> None:
    server, on_host = (Server(False, device=on, **CHUNKS) for on in ("cuda", "cpu"))
    backend, layer = server.backend, server.layer(use_irope=True)
    backend.init_cuda_graph_state(3, 3)
    q, side = queries(server, 3), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept = server.batch(Mode.DECODE, (90, 90, 90), (1, 1, 1), seq_lens_cpu=None)

        def run() -> Any:
            backend.init_forward_metadata_in_graph(kept)
            return backend.forward_decode(q.flatten(1), None, None, layer, kept)

        backend.init_forward_metadata_out_graph(kept, in_capture=True)
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = run()
    torch.cuda.synchronize()
    for lens in ((33, 7, 50), (64, 90, 1)):
        kept.seq_lens.copy_(server.batch(Mode.DECODE, lens, (1, 1, 1)).seq_lens)
        backend.init_forward_metadata_out_graph(kept)
        graph.replay()
        wanted = attend_by(on_host, lens, [1, 1, 1], q.cpu(), sees_chunk).flatten(1)
        torch.testing.assert_close(out.cpu().float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["bfloat16", "packed"])
def test_graphs_serve_later_lists(kind: str) -> None:
    """Layers of sparse MLA with queries in two parts, as SGLang's model passes them."""
    with stubbed():
        backend, cache = made(kind, device="cuda")
        q, slots, lengths = (each.cuda() for each in inputs(5))
        latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)  # of a batched product
        step = SimpleNamespace(lengths=lengths)
        backend.init_forward_metadata(step)
        backend.forward_decode(latent, cache, slots, q_rope=q[..., 512:])  # compiles
        backend.init_forward_metadata_out_graph(step, in_capture=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = backend.forward_decode(latent, cache, slots, q_rope=q[..., 512:])
        for _ in range(2):
            for each in (q, slots, lengths):
                each.copy_(each.flip(0))
            latent.copy_(q[..., :512])
            graph.replay()
            rows = stored(kind, cache)
            wanted = cumla.mla_sparse_attention(q, rows, slots, softmax_scale=0.1).out
            torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
