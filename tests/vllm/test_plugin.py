# SPDX-License-Identifier: Apache-2.0
"""The plugin of vLLM on a stub of it: what is registered, refused, planned and computed."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import cumla
import cumla.vllm
import tests.emulator
from cumla.mla.shape import WIDE, WIDTHS
from tests.bindings.launches import Launches
from tests.bindings.stand_in import OF_MODEL
from tests.compat.oracle import naive
from tests.compat.torch_gpu import torch_gpu
from tests.selection import some
from tests.vllm.layers import (
    BATCHED_TOKENS,
    HEADS,
    MHA,
    MLA,
    PAGE,
    SCALE,
    STEPS,
    int32,
    micro_batches,
    queries,
    tables,
)
from tests.vllm.stub import Backends, overrides, stubbed

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    with stubbed():
        yield


# --- the entry point -----------------------------------------------------------------------------


def the_entry_point() -> EntryPoint:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, value),) = project["entry-points"]["vllm.general_plugins"].items()
    return EntryPoint(name, value, "vllm.general_plugins")


def test_the_entry_point_registers_custom_and_nothing_else_however_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        the_entry_point().load()()
        assert overrides == {Backends.CUSTOM: "cumla.vllm.Backend"}
    assert not {"cumla.vllm.mla", "cumla.vllm.mha"} & set(sys.modules)
    assert not caplog.records


def test_another_plugin_keeps_the_name(caplog: pytest.LogCaptureFixture) -> None:
    overrides[Backends.CUSTOM] = "theirs.Backend"
    with caplog.at_level(logging.WARNING):
        cumla.vllm.register()
    assert overrides == {Backends.CUSTOM: "theirs.Backend"}
    assert "theirs.Backend" in caplog.text


def test_vllm_without_a_registry_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    with caplog.at_level(logging.WARNING):
        the_entry_point().load()()
    assert not overrides
    assert "has no --attention-backend CUSTOM" in caplog.text


def test_loading_the_entry_point_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, cumla.vllm; print({'vllm', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.strip() == b"set()"


@pytest.mark.parametrize(("use_mla", "family"), [(True, "mla"), (False, "mha")])
def test_one_name_serves_both_kinds_of_attention(use_mla: bool, family: str) -> None:
    with stubbed(use_mla=use_mla):
        backend = cumla.vllm.Backend
        assert backend.__module__ == f"cumla.vllm.{family}"
        assert backend.get_name() == "CUSTOM"
        assert backend.get_impl_cls().__module__ == backend.get_builder_cls().__module__


def test_the_module_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="Frontend"):
        _ = cumla.vllm.Frontend


@pytest.mark.parametrize("version", ["0.24.0", "0.9.2"])
def test_older_versions_are_refused_when_asked_for(version: str) -> None:
    with stubbed(version):
        cumla.vllm.register()
        match = rf'^vllm: .* from 0.25 to 0.33, .* got {version}; install .*"vllm>=0.25,<0.34"'
        with pytest.raises(RuntimeError, match=match):
            _ = cumla.vllm.Backend


NEWER = ["0.34.1.dev7", "1.0", "dev"]


@pytest.mark.parametrize("version", NEWER)
def test_newer_versions_are_served_after_a_warning(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with stubbed(version), caplog.at_level(logging.WARNING):
        assert cumla.vllm.Backend.get_name() == "CUSTOM"
    assert f"tested with vllm 0.25 to 0.33, not with {version}:" in caplog.text


@pytest.mark.parametrize("version", NEWER)
@pytest.mark.parametrize("use_mla", [True, False])
def test_newer_versions_without_an_interface_are_refused(
    version: str, use_mla: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stubbed(version, use_mla=use_mla):
        monkeypatch.delattr(sys.modules["vllm.v1.attention.backend"], "AttentionCGSupport")
        with pytest.raises(RuntimeError, match=rf"^vllm: .* got {version}, where .*AttentionCGS"):
            _ = cumla.vllm.Backend


def test_newer_versions_with_another_abstract_method_are_refused() -> None:
    with stubbed("0.34.0"):
        from cumla.vllm import mla

        with (
            mock.patch.object(mla.Impl, "__abstractmethods__", {"forward_new"}, create=True),
            pytest.raises(RuntimeError, match=r"^vllm: .* where Impl.forward_new would be missing"),
        ):
            _ = cumla.vllm.Backend


@pytest.mark.parametrize("version", ["0.25.1", "0.32.0", "0.33.0+cu130"])
def test_the_tested_versions_are_taken(version: str) -> None:
    with stubbed(version):
        assert cumla.vllm.Backend.get_name() == "CUSTOM"


# --- what a backend says it serves ---------------------------------------------------------------


def capability(major: int, minor: int) -> Any:
    return SimpleNamespace(major=major, minor=minor)


def test_an_mla_backend_serves_what_the_kernels_do() -> None:
    from cumla.vllm.mla import Backend

    widths = [n for n in (192, 288, 320, 512, 576, 640, 1088) if Backend.supports_head_size(n)]
    assert widths == [288, 320, 512, 576, 1088]
    wide = Backend.supports_combination(1088, "bfloat16", "fp8")
    assert wide == "rows of 1088 columns need a cache of 16 bits"
    assert Backend.supports_combination(1088, "bfloat16", "auto") is None
    assert Backend.supports_compute_capability(capability(9, 0))
    assert not Backend.supports_compute_capability(capability(10, 0))
    assert Backend.supports_combination(576, torch.bfloat16, "fp8", 64) is None
    assert "bfloat16" in str(Backend.supports_combination(576, torch.float16, "fp8", 64))
    assert Backend.supports_combination(320, torch.bfloat16, "auto", 64) is None
    for dtype, cache in ((torch.float16, "auto"), (torch.bfloat16, "fp8")):
        assert Backend.supports_combination(320, dtype, cache, 64) is None
    assert [Backend.get_preferred_block_size(n) for n in (16, 64, 256)] == [64, 64, 256]


def test_an_mha_backend_serves_what_the_kernels_do() -> None:
    from cumla.vllm.mha import Backend

    assert [n for n in (8, 100, 512, 520) if Backend.supports_head_size(n)] == [8, 512]
    assert Backend.supports_compute_capability(capability(9, 0))
    assert not Backend.supports_compute_capability(capability(8, 9))
    assert Backend.supports_combination(128, torch.float16, "fp8", 64) is None
    for head_size in (72, 512):
        assert "FP8" in str(Backend.supports_combination(head_size, torch.float16, "fp8", 64))
        assert Backend.supports_combination(head_size, torch.float16, "auto", 64) is None


# --- MLA -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lens", "starts", "tokens", "plan"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("in_one", [False, True])
def test_mla_attends_as_the_eager_call(
    lens: tuple[int, ...], starts: tuple[int, ...], tokens: int, plan: str, in_one: bool
) -> None:
    mla, kv_lens, offsets = MLA(), int32(*lens), int32(*starts)
    step = mla.step(kv_lens, offsets, tokens)
    q = queries(tokens)
    out, lse = mla.attend(step, torch.cat(q, -1) if in_one else q)
    assert type(step.decode.step.plan).__name__ == plan
    assert out.shape == (tokens, HEADS, 512)
    assert lse is None
    table, last = step.decode.block_table, starts[-1]
    wanted = cumla.mla_attention(
        q, mla.cache, block_table=table, kv_lens=kv_lens, qo_indptr=offsets, softmax_scale=SCALE
    )
    torch.testing.assert_close(out[:last], wanted.out[:last])


@pytest.mark.parametrize(
    ("width", "cache_dtype"),
    [*((width, torch.bfloat16) for width in WIDTHS[1:])]
    + [(width, torch.uint8) for width in WIDTHS[1:] if width != WIDE],
    ids=str,
)
def test_mla_of_other_widths(width: tuple[int, int], cache_dtype: torch.dtype) -> None:
    """Decoding and prefills; vLLM passes RoPE columns apart, also where a model has none.

    An FP8 cache holds the rows divided by the layer's factor.
    """
    latent, rope = width
    for lens, starts, tokens, _ in (STEPS["decoding"], STEPS["short prefills"]):
        mla, kv_lens, offsets = MLA(cache_dtype, width=width), int32(*lens), int32(*starts)
        factor: dict[str, Any] = {}
        if cache_dtype == torch.uint8:
            mla.cache, factor = mla.cache.view(torch.float8_e4m3fn), {"kv_scale": mla.k_scale}
            row = torch.randn(1, latent + rope).bfloat16()
            mla.write(row, torch.tensor([5]))
            assert torch.equal(mla.cache[0, 5], (row[0].float() / 0.5).to(torch.float8_e4m3fn))
        step = mla.step(kv_lens, offsets, tokens)
        parts = torch.randn(tokens, HEADS, latent + rope).bfloat16().split(width, -1)
        out, _ = mla.attend(step, parts)
        q = torch.cat(parts, -1)
        pages = {"block_table": step.decode.block_table, "kv_lens": kv_lens, "qo_indptr": offsets}
        wanted = cumla.mla_attention(q, mla.cache, **pages, softmax_scale=SCALE, **factor)
        assert out.shape == (tokens, HEADS, latent)
        torch.testing.assert_close(out, wanted.out)


@pytest.mark.parametrize("name", ["drafts", "short prefills"])
def test_mla_returns_the_logarithm_that_ranks_are_joined_by(name: str) -> None:
    lens, starts, tokens, _ = STEPS[name]
    mla, kv_lens, offsets = MLA(dcp=2), int32(*lens), int32(*starts)
    step, q = mla.step(kv_lens, offsets, tokens), queries(tokens)
    _, lse = mla.attend(step, q)
    table = step.decode.block_table
    wanted = cumla.mla_attention(
        q, mla.cache, block_table=table, kv_lens=kv_lens, qo_indptr=offsets, softmax_scale=SCALE
    )
    torch.testing.assert_close(lse, wanted.lse)


def test_mla_reads_and_writes_fp8_caches_with_their_scale() -> None:
    exact, mla = MLA(), MLA(torch.uint8)
    lens, starts, tokens, _ = STEPS["decoding"]
    outs = []
    for one in (exact, mla):
        one.cache = one.cache if one is exact else one.cache.view(torch.float8_e4m3fn)
        step = one.step(int32(*lens), int32(*starts), tokens)
        outs.append(one.attend(step, queries(tokens))[0].float())
    assert 0.0 < float((outs[0] - outs[1]).abs().max()) < 0.2


@pytest.mark.parametrize("name", ["decoding", "short prefills"])
@pytest.mark.parametrize(
    ("value", "dtype", "wanted"),
    [(None, "fp8", False), (False, "fp8", False), (True, "fp8", True), (True, "bfloat16", False)],
)
def test_mla_multiplies_in_fp8_where_it_is_allowed_to(
    value: bool | None, dtype: str, wanted: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    config.additional_config = {} if value is None else {"cumla": {"fp8_products": value}}
    mla = MLA(torch.uint8 if dtype == "fp8" else torch.bfloat16)
    config.additional_config = {}  # a layer keeps what it read
    if dtype == "fp8":
        mla.cache = mla.cache.view(torch.float8_e4m3fn)
    lens, starts, tokens, _ = STEPS[name]
    step = mla.step(int32(*lens), int32(*starts), tokens)
    step.decode.step.prepare()
    kind, seen = type(step.decode.step.plan), []
    run = kind.run

    def noted(*arguments: Any, fp8_products: Any, **options: Any) -> Any:
        seen.append(fp8_products)
        return run(*arguments, fp8_products=fp8_products, **options)

    monkeypatch.setattr(kind, "run", noted)
    mla.attend(step, queries(tokens))
    assert seen == [wanted]


def test_mla_multiplies_in_fp8_by_an_option_of_vllm() -> None:
    """In the layers and in the line of the log."""
    from vllm.config import get_current_vllm_config

    from cumla.vllm._models import fp8_products

    config = get_current_vllm_config()
    for option, wanted in (
        ({"cumla": {"fp8_products": True}}, True),
        ({"cumla": {"fp8_products": False}}, False),
        ({"cumla": {}}, False),
        ({"theirs": 3}, False),
    ):
        config.additional_config = option
        assert MLA().impl._fp8_products is fp8_products(config) is wanted
    for wrong in ({"fp8": True}, {"fp8_products": "yes"}, ["fp8_products"]):
        config.additional_config = {"cumla": wrong}
        with pytest.raises(ValueError, match=r"^additional_config: needs {.*got {'cumla'"):
            MLA()


@pytest.mark.parametrize("has_mask", [True, False])
def test_mla_merges_every_prefill_with_its_context(has_mask: bool) -> None:
    """Not the first tokens alone, if vLLM masks the prefills that have none."""
    context = SimpleNamespace(prefill_tokens_with_context=7)
    if has_mask:
        context.has_empty_context = [True]
    mla = MLA()
    for prefill in (None, SimpleNamespace(chunked_context=None)):
        assert mla.step(int32(90), int32(0, 1), 1, prefill=prefill).prefill is prefill
    mla.step(int32(90), int32(0, 1), 1, prefill=SimpleNamespace(chunked_context=context))
    assert context.prefill_tokens_with_context == (None if has_mask else 7)


def test_mla_writes_no_padding() -> None:
    mla = MLA()
    before = mla.cache.clone()
    mla.write(torch.ones(3, 576).bfloat16(), torch.tensor([5, -1]))  # and rows behind the slots
    changed = (mla.cache != before).any(-1).flatten().nonzero().flatten()
    assert changed.tolist() == [5]


def test_mla_refuses_windows() -> None:
    from cumla.vllm.mla import Impl

    with pytest.raises(
        NotImplementedError, match=rf"^sliding_window: .* got 128; leave out.*{OF_MODEL}"
    ):
        Impl(scale=SCALE, sliding_window=128)


def entries(launches: list[Any]) -> list[str]:
    """Names of kernels, those of schedules under one."""
    names = [launch.spec.entry for launch in launches]
    return ["schedule" if "schedule" in name else name.split("_")[0] for name in names]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any]]]:
    """A GPU, and what is launched there instead of being run."""
    noted: list[Any] = []
    with torch_gpu(always=True) as gpu:
        monkeypatch.setattr(tests.emulator, "emulate", noted.append)
        yield gpu, noted


GRAPHS = {
    "decoding": ((0, 1, 2), "FULL_AND_PIECEWISE"),
    "one draft": ((0, 2, 4), "FULL_AND_PIECEWISE"),
    "two drafts": ((0, 3, 6), "FULL_AND_PIECEWISE"),
    "three drafts": ((0, 4, 8), "FULL_AND_PIECEWISE"),
    "padded": ((0, 2, 2), "FULL_AND_PIECEWISE"),
    "any mixture": ((0, 1, 8), "FULL"),
}


@pytest.mark.parametrize(  # each value, of all combinations with --exhaustive
    ("form", "streams", "captured"),
    some(product(GRAPHS, [(0, 0), (0, 7), (5, 7), (7, 7)], [False, True]), 5),
)
def test_a_graph_holds_one_schedule_for_each_form_of_layers(
    form: str,
    streams: tuple[int, int],
    captured: bool,
    launched: tuple[Any, list[Any]],
) -> None:
    """On whatever streams vLLM builds and captures, and whether or not layers ran before."""
    starts, graphs = GRAPHS[form]
    (gpu, noted), (gpu.stream, stream), tokens = launched, streams, max(starts[-1], 4)
    mla, mha = MLA(graphs=graphs), MHA()
    lens, offsets = int32(90, 90), int32(*starts)
    step = mla.step(lens, offsets, tokens, captured=captured)
    whole = mha.step(lens, offsets, tokens, captured=captured)
    q = torch.randn(tokens, HEADS, 64).bfloat16()
    if captured:
        mla.attend(step, queries(tokens))
        mha.attend("full", whole, q)
    for _ in range(2):
        noted.clear()
        with gpu.capture(stream):
            for _ in range(3):
                mla.attend(step, queries(tokens))
        assert entries(noted) == ["schedule", *["mla"] * 3]
        noted.clear()
        with gpu.capture(stream):
            for _ in range(3):
                mha.attend("full", whole, q)
                mha.attend("window", whole, q)
        names = entries(noted)
        assert names.count("schedule") == 2
        assert names.count("attention") >= 6  # a mixture may take two kernels a layer
        assert set(names) == {"schedule", "attention"}


def test_under_batch_invariance_decoding_has_the_bits_of_a_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans cut no request, and all steps of MLA have the same kernel."""
    from cumla.vllm import mha as of_heads
    from cumla.vllm import mla as latent

    for backend in (of_heads.Backend, latent.Backend):
        assert backend.supports_batch_invariance()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with torch_gpu(always=True):
        mla, mha = MLA(), MHA()
        tokens = 70
        q = torch.randn(tokens, HEADS, 64).bfloat16()
        whole = mha.step(int32(tokens), int32(0, tokens), tokens)
        prefilled = mha.attend("full", whole, q)
        for last in (5, 64, tokens):
            step = mha.step(int32(last), int32(0, 1), 1)
            decoded = mha.attend("full", step, q[last - 1 : last])
            assert torch.equal(decoded[0], prefilled[last - 1]), last
        (plan,) = {step.steps[form].plan for form in step.steps if form.window is None}
        assert plan.key.batch_invariant and plan.key.parts == plan.key.num_places
        assert mla.builder.reorder_batch_threshold == BATCHED_TOKENS  # no prefill goes elsewhere
        rows = queries(4)
        verified, _ = mla.attend(mla.step(int32(90), int32(0, 4), 4), rows)
        step = mla.step(int32(90), int32(0, 1), 1)
        decoded, _ = mla.attend(step, tuple(part[3:] for part in rows))
        assert torch.equal(decoded[0], verified[3])
        assert type(step.decode.step.plan).__name__ == "MLAAttentionPlan"


@pytest.mark.parametrize("starts", [(0, 1, 2), (0, 3, 6)])
def test_a_step_of_equal_query_lengths_launches_nothing_when_it_begins(
    starts: tuple[int, ...],
) -> None:
    """vLLM's own builders have told all; the first layer computes the schedule."""
    lens, offsets = int32(90, 90), int32(*starts)
    table = tables(lens)
    for one in (MLA(), MHA()):
        with Launches() as launches:
            one.step(lens, offsets, starts[-1], table=table)
        assert not launches.names


def test_piecewise_graphs_leave_a_step_one_schedule(launched: tuple[Any, list[Any]]) -> None:
    """Layers attend between the graphs, which hold what writes the cache, if anything."""
    gpu, noted = launched
    mla, mha = MLA(), MHA()
    for starts in ((0, 1, 6), (0, 5, 6), (0, 1, 6), (0, 3, 6), (0, 1, 2)):
        tokens = starts[-1]
        step, whole = (one.step(int32(90, 33), int32(*starts), tokens) for one in (mla, mha))
        noted.clear()
        for _ in range(3):
            with gpu.capture():
                mla.write(torch.zeros(tokens, 576).bfloat16(), torch.arange(tokens))
            mla.attend(step, queries(tokens))
            q = torch.randn(tokens, HEADS, 64).bfloat16()
            mha.attend("full", whole, q)
            mha.attend("window", whole, q)
        names = entries(noted)
        assert names[:3] == ["append", "schedule", "mla"]
        assert names.count("append") == names.count("mla") == 3
        assert names.count("schedule") == 3  # of MLA, and of each form of MHA


@pytest.mark.parametrize("ubatching", [False, True])
def test_groups_of_layers_of_one_form_share_a_schedule(
    ubatching: bool, launched: tuple[Any, list[Any]]
) -> None:
    """Each group has a builder; where vLLM divides steps, the builders of parts share nothing."""
    gpu, noted = launched
    first = MHA(ubatching=ubatching)
    groups = [first, first.another_group(), first.another_group()]
    q = torch.randn(2, HEADS, 64).bfloat16()
    lens, offsets = int32(90, 90), int32(0, 1, 2)
    schedules = 6 if ubatching else 2

    def layers(steps: list[Any]) -> list[str]:
        noted.clear()
        for group, step in zip(groups, steps, strict=True):
            for name in group.impls:
                group.attend(name, step, q)
        return entries(noted)

    for captured in (True, False):
        for _ in range(2):
            steps = [group.step(lens, offsets, 2, captured=captured) for group in groups]
            with gpu.capture(7) if captured else nullcontext():
                assert layers(steps).count("schedule") == schedules
                assert layers(steps).count("schedule") == 0
    again = groups[1].step(lens, offsets, 2)  # lengths in the same arrays may be others
    assert all(again.steps[form] is not steps[1].steps[form] for form in again.steps)
    plans = groups[1].builder._plans
    assert all((plans[form] is first.builder._plans[form]) is not ubatching for form in plans)
    first.builder.vllm_config.model_config.dtype = torch.float16  # as of a later model
    later = first.another_group().builder._plans
    assert all(plans[form] is not later[form] for form in plans)


@pytest.mark.parametrize("starts", [(0, 1, 2), (0, 2, 4), (0, 1, 4)])
def test_eager_micro_batches_have_one_schedule_each(
    starts: tuple[int, ...], launched: tuple[Any, list[Any]]
) -> None:
    """Their layers take turns: each has a builder of its own."""
    _, noted = launched
    tokens = starts[-1]
    builders = MLA(), MLA(), MHA(), MHA()
    steps = [one.step(int32(90, 90), int32(*starts), tokens) for one in builders]
    noted.clear()
    for _ in range(3):
        for one, step in zip(builders, steps, strict=True):
            attend(
                one,
                step,
                torch.randn(tokens, HEADS, 576 if isinstance(one, MLA) else 64).bfloat16(),
            )
    names = entries(noted)
    assert names.count("schedule") == 4
    assert names.count("mla") == 6


def test_steps_of_one_builder_that_take_turns_have_their_own_lengths() -> None:
    with torch_gpu():
        mla, q = MLA(), queries(2)
        steps = [mla.step(int32(*lens), int32(0, 1, 2), 2) for lens in ((90, 90), (33, 7))]
        wanted = [mla.attend(step, q)[0].clone() for step in steps]
        for _ in range(2):
            for step, out in zip(steps, wanted, strict=True):
                assert torch.equal(mla.attend(step, q)[0], out)
        assert not torch.equal(*wanted)


@pytest.mark.parametrize("graphs", ["FULL_AND_PIECEWISE", "FULL"])
def test_a_graph_serves_later_lengths(graphs: str) -> None:
    """What is captured holds for each later step of its shape, padded requests included."""
    with torch_gpu() as gpu:
        mla = MLA(graphs=graphs)
        q = queries(2)
        kv_lens, offsets = int32(90, 90), int32(0, 1, 2)
        step = mla.step(kv_lens, offsets, 2, captured=True)
        with gpu.capture(0):
            out, _ = mla.attend(step, q)
        for lens, starts in (((33, 7), (0, 1, 2)), ((50, 0), (0, 1, 1))):
            kv_lens.copy_(int32(*lens))  # vLLM's graphs find lengths where they were
            offsets.copy_(int32(*starts))
            again = mla.step(kv_lens, offsets, 2)
            gpu.replay()
            real = starts[-1]
            kept = out.clone()
            wanted = cumla.mla_decode(
                tuple(part[:, None] for part in q),
                mla.cache,
                again.decode.block_table,
                int32(*lens),
                softmax_scale=SCALE,
            )
            torch.testing.assert_close(kept[:real], wanted.out[:real, 0])
            if graphs != "FULL":
                assert bool(kept[real:].eq(0).all())


def test_a_graph_of_any_mixture_serves_prefills_and_decoding() -> None:
    """vLLM captures it with query lengths that are equal, and replays it with any."""
    from vllm.config import CUDAGraphMode

    from cumla.vllm.mla import Builder

    with torch_gpu() as gpu:
        mla, q = MLA(graphs="FULL"), queries(8)
        assert mla.builder.reorder_batch_threshold == 512
        kv_lens, offsets = int32(90, 90, 90, 90), int32(0, 2, 4, 6, 8)
        step = mla.step(kv_lens, offsets, 8, captured=True)
        with gpu.capture(0):
            out, _ = mla.attend(step, q)
        for lens, starts in (((33, 7, 40, 2), (0, 1, 5, 6, 8)), ((50, 9, 0, 0), (0, 1, 7, 7, 7))):
            kv_lens.copy_(int32(*lens))
            offsets.copy_(int32(*starts))
            gpu.replay()
            table, last = step.decode.block_table, starts[-1]
            wanted = cumla.mla_attention(
                q,
                mla.cache,
                block_table=table,
                kv_lens=int32(*lens),
                qo_indptr=offsets,
                softmax_scale=SCALE,
            )
            torch.testing.assert_close(out[:last], wanted.out[:last])

    def support(**changes: Any) -> Any:
        config = mla.builder.vllm_config
        settings = SimpleNamespace(**vars(config.compilation_config) | changes)
        parallel = SimpleNamespace(decode_context_parallel_size=changes.get("dcp", 1))
        changed = SimpleNamespace(compilation_config=settings, parallel_config=parallel)
        return Builder.get_cudagraph_support(changed, None)

    assert support() == 3
    assert support(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE) == 2
    assert support(max_cudagraph_capture_size=513) == 2
    assert support(dcp=2) == 2


# --- drafts that are cut on the device -----------------------------------------------------------

# Lengths of the cache, offsets on the device, and those of the host: as many tokens, cut evenly.
CUT_DRAFTS = {
    "one request keeps all": ((90, 5, 33), (0, 4, 5, 6), (0, 2, 4, 6)),
    "the last keeps all": ((90, 5, 33), (0, 1, 2, 6), (0, 2, 4, 6)),
    "padded requests": ((90, 5, 33, 0), (0, 3, 4, 6, 6), (0, 2, 4, 6, 6)),
    "padded tokens": ((90, 5, 33), (0, 2, 3, 4), (0, 2, 4, 4)),
}


@pytest.mark.parametrize(("lens", "starts", "host"), CUT_DRAFTS.values(), ids=CUT_DRAFTS)
def test_query_lengths_of_the_device_count(lens: Any, starts: Any, host: Any) -> None:
    tokens = host[1] * (len(host) - 1)
    with torch_gpu():
        mla, q = MLA(cuts_drafts=True), queries(tokens)
        kv_lens, offsets = int32(*lens), int32(*starts)
        step = mla.step(kv_lens, offsets, tokens, host=int32(*host))
        out, _ = mla.attend(step, q)
        wanted = cumla.mla_attention(
            q,
            mla.cache,
            block_table=step.decode.block_table,
            kv_lens=kv_lens,
            qo_indptr=offsets,
            softmax_scale=SCALE,
        )
        last = starts[-1]
        torch.testing.assert_close(out[:last], wanted.out[:last])
        assert type(step.decode.step.plan) is cumla.MLAAttentionPlan


def test_a_graph_serves_drafts_that_are_cut_in_any_way() -> None:
    """vLLM captures it with one token of each request, and replays it with any numbers."""
    with torch_gpu() as gpu:
        mla, q = MLA(cuts_drafts=True), queries(8)
        kv_lens, offsets = int32(*[90] * 8), int32(*range(9))
        step = mla.step(kv_lens, offsets, 8, captured=True)
        with gpu.capture(0):
            out, _ = mla.attend(step, q)
        for lens, starts in (
            ((33, 7, 40, 0, 0, 0, 0, 0), (0, 1, 5, 8, 8, 8, 8, 8, 8)),
            ((33, 7, 40, 2, 0, 0, 0, 0), (0, 4, 5, 6, 7, 7, 7, 7, 7)),
        ):
            kv_lens.copy_(int32(*lens))
            offsets.copy_(int32(*starts))
            gpu.replay()
            wanted = cumla.mla_attention(
                q,
                mla.cache,
                block_table=step.decode.block_table,
                kv_lens=kv_lens,
                qo_indptr=offsets,
                softmax_scale=SCALE,
            )
            last = starts[-1]
            torch.testing.assert_close(out[:last], wanted.out[:last])


def test_mha_takes_query_lengths_of_the_device() -> None:
    for lens, starts, host in CUT_DRAFTS.values():
        mha, kv_lens, offsets = MHA(), int32(*lens), int32(*starts)
        tokens = host[1] * (len(host) - 1)
        q = torch.randn(tokens, HEADS, 64).bfloat16()
        spans = {0: [(3, 9)]}  # of a prompt that was read long ago
        step = mha.step(kv_lens, offsets, tokens, spans=spans, host=int32(*host))
        assert step.masked is None
        wanted = cumla.attention(
            q,
            *mha.pages(),
            block_table=step.block_table,
            kv_lens=kv_lens,
            qo_indptr=offsets,
            softmax_scale=SCALE,
        )
        last = starts[-1]
        torch.testing.assert_close(mha.attend("full", step, q)[:last], wanted.out[:last])


def test_vllm_is_told_which_graphs_take_drafts_that_are_cut() -> None:
    from cumla.vllm import mha, mla

    def most(cuts: bool, **parallel: Any) -> Any:
        drafts = SimpleNamespace(enable_adaptive_verification=cuts)
        settings = SimpleNamespace(**parallel)
        return mla.Builder.get_varlen_cudagraph_max_query_len(
            SimpleNamespace(speculative_config=drafts, parallel_config=settings), None
        )

    assert most(True) == 128
    assert most(False) is None
    assert most(True, use_ubatching=True) is None
    config = SimpleNamespace(speculative_config=None, parallel_config=SimpleNamespace())
    assert mla.Builder.get_varlen_cudagraph_max_query_len(config, None) is None
    assert mla.Backend.supports_device_cpu_query_lens_mismatch()
    assert "supports_device_cpu_query_lens_mismatch" not in vars(mha.Backend)  # vLLM's: True
    with pytest.raises(
        NotImplementedError, match=rf"^enable_adaptive_verification: .* got 2 ranks.*{OF_MODEL}"
    ):
        MLA(dcp=2, cuts_drafts=True)


# --- micro-batches -------------------------------------------------------------------------------


def attend(one: Any, step: Any, q: Any) -> Any:
    """Attend in a layer of either kind."""
    return one.attend(step, q)[0] if isinstance(one, MLA) else one.attend("full", step, q)


KINDS = pytest.mark.parametrize(("kind", "columns"), [(MLA, 576), (MHA, 64)])


@KINDS
@pytest.mark.parametrize("starts", [(0, 1, 2, 3, 4), (0, 3, 6, 9), (0, 4, 5, 12)])
def test_micro_batches_attend_as_the_whole_step(
    kind: Any, columns: int, starts: tuple[int, ...]
) -> None:
    """A request that vLLM divides has its earlier tokens in one of them, all keys in the other."""
    kv_lens, offsets = int32(*(90, 12, 33, 40)[: len(starts) - 1]), int32(*starts)
    table, q = tables(kv_lens), torch.randn(starts[-1], HEADS, columns).bfloat16()
    whole = kind()
    wanted = attend(whole, whole.step(kv_lens, offsets, starts[-1]), q)
    for part in micro_batches(kv_lens, offsets, table):
        one = kind()
        tokens = part.tokens.stop - part.tokens.start
        step = one.step(part.kv_lens, part.offsets, tokens, table=part.table)
        torch.testing.assert_close(attend(one, step, q[part.tokens]), wanted[part.tokens])


@KINDS
def test_a_graph_of_micro_batches_has_one_schedule_each(kind: Any, columns: int) -> None:
    """Their layers take turns on one stream; each has a builder, and offsets that are copies."""
    with torch_gpu(always=True) as gpu:
        kv_lens, offsets = int32(90, 12, 33, 40), int32(0, 1, 2, 3, 4)  # later others, in place
        table, q = tables(kv_lens), torch.randn(4, HEADS, columns).bfloat16()
        parts = micro_batches(kv_lens, offsets, table)
        builders = [kind() for _ in parts]
        steps = [
            one.step(part.kv_lens, part.offsets, 2, table=part.table, captured=True)
            for one, part in zip(builders, parts, strict=True)
        ]
        with gpu.capture():
            outs = [
                attend(one, step, q[part.tokens])
                for _ in range(3)
                for one, step, part in zip(builders, steps, parts, strict=True)
            ]
        assert entries(gpu.captured).count("schedule") == 2
        assert len(gpu.captured) == 8
        kv_lens.copy_(int32(7, 60, 0, 96))
        gpu.replay()
        eager = kind()
        for out, part in zip(outs, parts * 3, strict=True):
            step = eager.step(part.kv_lens, part.offsets, 2, table=part.table)
            assert torch.equal(attend(eager, step, q[part.tokens]), out)


@pytest.mark.parametrize("family", ["mla", "mha"])
@pytest.mark.parametrize("graphs", ["FULL", "FULL_AND_PIECEWISE"])
def test_full_graphs_of_micro_batches_are_those_of_single_tokens(family: str, graphs: str) -> None:
    """Graphs of drafts or prefills would go on reading copies of lengths and offsets."""
    from importlib import import_module

    from vllm.config import CUDAGraphMode

    builder = import_module(f"cumla.vllm.{family}").Builder
    settings = SimpleNamespace(cudagraph_mode=CUDAGraphMode[graphs], max_cudagraph_capture_size=512)
    for divided in (False, True):
        parallel = SimpleNamespace(decode_context_parallel_size=1, use_ubatching=divided)
        config = SimpleNamespace(
            compilation_config=settings, parallel_config=parallel, model_config=SimpleNamespace()
        )
        assert (builder.get_cudagraph_support(config, None) == 1) == divided


# --- MHA -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "window"), [("full", None), ("window", 7)])
@pytest.mark.parametrize("starts", [(0, 1, 2, 3), (0, 1, 6, 8), (0, 2, 2, 4)])
def test_mha_attends_as_the_eager_call(
    name: str, window: int | None, starts: tuple[int, ...]
) -> None:
    sinks = torch.linspace(-1, 1, HEADS).bfloat16()
    mha = MHA(sinks=sinks, logits_soft_cap=20.0)
    for impl in mha.impls.values():
        impl.process_weights_after_loading(torch.bfloat16)
    kv_lens, offsets, last = int32(90, 5, 33), int32(*starts), starts[-1]
    step = mha.step(kv_lens, offsets, last)
    q = torch.randn(last + 2, HEADS, 64).bfloat16()  # vLLM pads it
    out = mha.attend(name, step, q)
    assert bool(out[last:].eq(7.0).all())
    wanted = cumla.attention(
        q[:last],
        *mha.pages(),
        kv_lens=kv_lens,
        qo_indptr=offsets,
        block_table=step.block_table,
        window=window,
        softcap=20.0,
        sinks=sinks.float(),
        softmax_scale=SCALE,
    )
    torch.testing.assert_close(out[:last], wanted.out)


def test_mha_with_alibi() -> None:
    slopes = [0.5**i for i in range(HEADS)]
    mha = MHA(alibi_slopes=slopes)
    kv_lens, offsets = int32(90, 5, 33), int32(0, 1, 6, 8)
    step, q = mha.step(kv_lens, offsets, 8), torch.randn(8, HEADS, 64).bfloat16()
    for name, window in (("full", None), ("window", 7)):
        wanted = cumla.attention(
            q,
            *mha.pages(),
            kv_lens=kv_lens,
            qo_indptr=offsets,
            block_table=step.block_table,
            window=window,
            bias=cumla.AttentionBias(torch.tensor(slopes)),
            softmax_scale=SCALE,
        )
        torch.testing.assert_close(mha.attend(name, step, q), wanted.out)


def test_mha_reads_and_writes_fp8_caches_with_their_scales() -> None:
    outs = []
    for dtype in (torch.bfloat16, torch.uint8):
        mha = MHA(dtype)
        step = mha.step(int32(90, 33), int32(0, 1, 3), 3)
        q = torch.randn(3, HEADS, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        outs.append(mha.attend("full", step, q).float())
    assert 0.0 < float((outs[0] - outs[1]).abs().max()) < 0.1


def test_mha_reads_a_cache_whose_heads_come_behind_the_tokens() -> None:
    mha = MHA()
    step, q = mha.step(int32(90, 33), int32(0, 1, 3), 3), torch.randn(3, HEADS, 64).bfloat16()
    before = mha.attend("full", step, q)
    mha.cache = mha.cache.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(mha.attend("full", step, q), before)


def test_mha_writes_no_padding() -> None:
    mha = MHA()
    before = mha.cache.clone()
    rows = torch.ones(3, 2, 64).bfloat16()
    mha.write(rows, rows, torch.tensor([PAGE + 5, -1]))
    changed = (mha.cache != before).nonzero()[:, [0, 2]].unique(dim=0)
    assert changed.tolist() == [[1, 5]]


def test_mha_computes_nothing_while_vllm_measures_memory() -> None:
    mha = MHA()
    q = torch.randn(3, HEADS, 64).bfloat16()
    assert bool(mha.attend("full", None, q).eq(0).all())


def seen_by(lens: Any, starts: Any, rule: Any) -> Any:
    """A mask of a step, by `rule` of request, position and keys: its rows of all tokens."""
    rows = []
    for r, length in enumerate(lens):
        for p in range(length - (starts[r + 1] - starts[r]), length):
            keys = rule(r, p, torch.arange(length)).nonzero()
            rows.append((int(keys.min()), int(keys.max())) if len(keys) else (0, -1))
    first, last = (torch.tensor(side, dtype=torch.int32) for side in zip(*rows, strict=True))
    return cumla.AttentionMask(first, last)


def attend_by(mha: MHA, step: Any, lens: Any, starts: Any, q: Any, rule: Any) -> Any:
    mask = seen_by(lens, starts, rule)
    places = {"kv_lens": int32(*lens), "qo_indptr": int32(*starts), "block_table": step.block_table}
    return cumla.attention(q, *mha.pages(), **places, mask=mask, softmax_scale=SCALE).out


IMAGES = {0: [(3, 19), (81, 88)], 1: [], 2: [(0, 30)]}  # as vLLM tells them, inclusive


def sees(r: int, p: int, j: Any, window: int | None, clamp: bool, causal: bool = True) -> Any:
    """vLLM's rule."""
    near = j > p - 8 if window else j >= 0
    own = (j <= p) & near if causal else near & (j < p + 8 if window else j >= 0)
    for first, last in IMAGES[r]:
        if first <= p <= last:
            own |= (j >= first) & (j <= last) & (near if clamp else True)
    return own


@pytest.mark.parametrize(("name", "window"), [("full", None), ("window", 7)])
@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("flags", [None, (True, False, True), (False, False, False)])
def test_mha_lets_tokens_of_an_image_see_each_other(
    name: str, window: int | None, clamp: bool, flags: Any
) -> None:
    """Gemma 3 and, with the layer's flag, Gemma 4; beside requests that are not causal."""
    mha, lens, starts = MHA(), (90, 5, 25), (0, 12, 13, 38)
    mha.layer.mm_prefix_clamp_sliding_window = clamp
    causal = True if flags is None else torch.tensor(flags)
    step = mha.step(int32(*lens), int32(*starts), 38, causal=causal, spans=IMAGES)
    q = torch.randn(38, HEADS, 64).bfloat16()
    out = mha.attend(name, step, q)
    wanted = attend_by(
        *(mha, step, lens, starts, q),
        lambda r, p, j: sees(r, p, j, window, clamp, flags is None or flags[r]),
    )
    torch.testing.assert_close(out, wanted)


RSWA = {"rswa_window": 8}
WINDOWED = {  # lengths, offsets of the queries, tokens of the prompts
    "decoding": ((90, 5, 33), (0, 1, 2, 3), (20, 4, 32)),
    "drafts": ((90, 5, 33), (0, 3, 6, 9), (20, 3, 30)),
    "prompts in chunks": ((90, 5, 25), (0, 12, 17, 30), (200, 5, 25)),
    "after a preemption": ((90, 5, 33), (0, 40, 41, 74), (70, 2, 10)),
    "padding": ((90, 33, 0), (0, 5, 6, 6), (88, 20)),
}


def attend_in_windows(mha: MHA, lens: Any, starts: Any, prefixes: Any, q: Any) -> Any:
    """vLLM's rule: causal, and the prompt or a window."""
    outs = [q[:0].float()]
    k, v = mha.pages()
    for r, (n, prefix) in enumerate(zip(lens, prefixes, strict=False)):
        pages, rows = tables(torch.zeros(3))[r].long(), q[starts[r] : starts[r + 1]]
        p, j = torch.arange(n - len(rows), n)[:, None], torch.arange(n)
        mask = (j <= p) & ((j < prefix) | (p - j < 8))
        own = (cache[pages].flatten(0, 1)[:n] for cache in (k, v))
        outs.append(naive(rows, *own, mask=mask, scale=SCALE)[0])
    return torch.cat(outs)


@pytest.mark.parametrize("name", ["full", "window"])
@pytest.mark.parametrize("case", WINDOWED)
def test_mha_has_reference_windows(name: str, case: str) -> None:
    """Windows of layers have no effect; the one and the other part of a request may be empty."""
    from cumla.vllm.mha import Backend

    assert Backend.supports_rswa()
    lens, starts, prefixes = WINDOWED[case]
    mha, tokens = MHA(model=RSWA), starts[-1]
    q = torch.randn(tokens, HEADS, 64).bfloat16()
    step = mha.step(int32(*lens), int32(*starts), tokens, prefixes=int32(*prefixes))
    out = mha.attend(name, step, q).view(tokens, HEADS, 64)
    wanted = attend_in_windows(mha, lens, starts, prefixes, q)
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-2)


def test_graphs_with_reference_windows_serve_later_steps() -> None:
    """What they read is filled in before a replay; vLLM tells no prompts in a capture."""
    from cumla.vllm.mha import Builder

    with torch_gpu() as gpu:
        mha, q = MHA(model=RSWA), torch.randn(3, HEADS, 64).bfloat16()
        assert Builder.get_cudagraph_support(mha.builder.vllm_config, None) == 3  # ALWAYS
        step = mha.step(int32(90, 90, 90), int32(0, 1, 2, 3), 3, captured=True)
        mha.attend("full", step, q)
        with gpu.capture(0):
            out = mha.attend("full", step, q)
        for lens, starts, prefixes in (
            WINDOWED["decoding"],
            ((7, 64, 50), (0, 1, 2, 3), (7, 9, 49)),
        ):
            mha.step(int32(*lens), int32(*starts), 3, prefixes=int32(*prefixes))
            gpu.replay()
            wanted = attend_in_windows(mha, lens, starts, prefixes, q)
            torch.testing.assert_close(out.clone().float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("name", "window"), [("full", None), ("window", 7)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_mha_attends_without_order(name: str, window: int | None, as_tensor: bool) -> None:
    """A window is as wide on the right there."""
    mha, lens, starts = MHA(), (90, 5, 33), (0, 4, 5, 20)
    causal = torch.zeros(3, dtype=torch.int32) if as_tensor else False
    step = mha.step(int32(*lens), int32(*starts), 20, causal=causal)
    q = torch.randn(20, HEADS, 64).bfloat16()
    wanted = attend_by(
        *(mha, step, lens, starts, q),
        lambda r, p, j: (j > p - 8) & (j < p + 8) if window else j >= 0,
    )
    torch.testing.assert_close(mha.attend(name, step, q), wanted)


def test_mha_has_no_mask_where_no_span_holds_a_query() -> None:
    """Decoding, drafts, and chunks of a prompt that come later; others have one for all layers."""
    mha = MHA()
    for lens, starts in (((90, 5, 33), (0, 1, 2, 3)), ((91, 5, 34), (0, 2, 3, 6))):
        step = mha.step(int32(*lens), int32(*starts), starts[-1], spans=IMAGES)
        assert step.masked is None
    step = mha.step(int32(90, 5, 33), int32(0, 2, 3, 4), 4, spans={0: [(80, 88)], 2: [(4, 32)]})
    assert step.mm_prefix_range_tensor.tolist() == [[[80, 88]], [[0, 0]], [[4, 32]]]
    q = torch.randn(4, HEADS, 64).bfloat16()
    for _ in range(2):
        for name in mha.impls:
            mha.attend(name, step, q)
    assert len(step.masks) == 2
    step.mm_prefix_range_tensor = None  # as Gemma 4 has it for layers without windows
    plain = mha.step(int32(90, 5, 33), int32(0, 2, 3, 4), 4)
    assert torch.equal(mha.attend("full", step, q), mha.attend("full", plain, q))


def test_mha_has_full_graphs_of_decoding_beside_images() -> None:
    """Graphs of prefills would hold the masks of one step, or none."""
    from cumla.vllm.mha import Builder

    mha = MHA(model={"is_mm_prefix_lm": True})
    config = mha.builder.vllm_config
    assert Builder.get_cudagraph_support(config, None) == 1  # UNIFORM_SINGLE_TOKEN_DECODE
    config.model_config.is_mm_prefix_lm = False
    assert Builder.get_cudagraph_support(config, None) == 3  # ALWAYS


def test_a_graph_serves_later_requests_without_order(launched: tuple[Any, list[Any]]) -> None:
    """Each capture builds the mask of its layers, and reads flags where vLLM has them."""
    gpu, noted = launched
    mha, flags = MHA(), torch.tensor([True, False])
    q = torch.randn(4, HEADS, 64).bfloat16()
    step = mha.step(int32(90, 33), int32(0, 1, 4), 4, causal=flags, captured=True)
    mha.attend("full", step, q)
    for _ in range(2):
        noted.clear()
        with gpu.capture(7):
            for name in ("full", "window", "full"):
                mha.attend(name, step, q)
        names = entries(noted)
        assert names.count("schedule") == 1
        assert names.count("mask") == 2
        assert step.causal.data_ptr() == flags.data_ptr()


def test_mha_refuses_what_it_does_not_have() -> None:
    from cumla.vllm.mha import Impl

    for size, cap in ((320, None), (64, 20.0)):
        with pytest.raises(NotImplementedError, match=rf"^alibi_slopes: .* leave out.*{OF_MODEL}"):
            Impl(HEADS, size, SCALE, 2, [1.0] * HEADS, logits_soft_cap=cap)
    mha = MHA(alibi_slopes=[1.0] * HEADS)
    with pytest.raises(NotImplementedError, match=rf"^alibi_slopes: .* leave out.*{OF_MODEL}"):
        mha.step(int32(90, 33), int32(0, 1, 3), 3, causal=torch.tensor([True, False]))
    with pytest.raises(NotImplementedError, match=rf"^alibi_slopes: .* not causal.*{OF_MODEL}"):
        mha.step(int32(90, 33), int32(0, 1, 3), 3, causal=False)
    mha = MHA(alibi_slopes=[1.0] * HEADS, model=RSWA)
    with pytest.raises(NotImplementedError, match=rf"^alibi_slopes: .* windows; le.*{OF_MODEL}"):
        mha.step(int32(90, 33), int32(0, 1, 3), 3, prefixes=int32(9, 9))
    mha = MHA(model=RSWA)
    for other in ({"causal": False}, {"spans": {0: [(3, 9)]}}):
        with pytest.raises(NotImplementedError, match=rf"^rswa_window: .* causal .*{OF_MODEL}"):
            mha.step(int32(90, 33), int32(0, 1, 3), 3, prefixes=int32(9, 9), **other)
    for model in ({"is_mm_prefix_lm": True}, RSWA):
        with pytest.raises(
            NotImplementedError, match=rf"^enable_dbo: .* leave out --enable-dbo{OF_MODEL}"
        ):
            MHA(model=model, ubatching=True)
    mha = MHA()
    step = mha.step(int32(90, 33), int32(0, 1, 3), 3)
    with pytest.raises(NotImplementedError, match=r"^output_scale: .* leave out"):
        mha.attend("full", step, torch.randn(3, HEADS, 64), output_scale=torch.ones(1))
