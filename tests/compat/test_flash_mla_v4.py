# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's decoding over one or two caches in the format of DeepSeek-V4, MODEL1, on the CPU: with
shapes, quantisation and tolerances of its public tests."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest

import cumla
from cumla.compat import flash_mla
from cumla.mla.shape import FORMATS
from tests.compat.test_flash_mla_sparse import INT_MAX, INT_MIN, SCALE, ints, naive
from tests.compat.torch_gpu import torch_gpu

torch = pytest.importorskip("torch")


def make_pages(slots: int, page_size: int, generator: Any) -> tuple[Any, Any]:
    """A cache of at least so many slots, and what they stand for, in float64.

    Pages end in garbage, up to a multiple of 576 bytes; so does each slot's row of exponents.
    """
    blocks = -(-slots // page_size)
    values = torch.randn(blocks, page_size, 512, generator=generator) / 4
    tiles = values[..., :448].unflatten(-1, (7, 64))
    exponents = (tiles.abs().amax(-1) / 448).clamp(min=1e-4).log2().ceil()
    codes = (tiles / exponents.exp2()[..., None]).to(torch.float8_e4m3fn)
    rope = values[..., 448:].bfloat16()
    nbytes = -(-584 * page_size // 576) * 576
    memory = torch.full((blocks, nbytes), 255, dtype=torch.uint8)
    columns = memory[:, : 576 * page_size].view(blocks, page_size, 576)
    columns[..., :448] = codes.flatten(-2).view(torch.uint8)
    columns[..., 448:] = rope.view(torch.uint8)
    scales = memory[:, 576 * page_size : 584 * page_size].view(blocks, page_size, 8)
    scales[..., :7] = (exponents + 127).to(torch.uint8)
    latent = (codes.double() * exponents.double().exp2()[..., None]).flatten(-2)
    cache = memory[:, : 584 * page_size].view(blocks, page_size, 1, 584)
    return cache, torch.cat([latent, rope.double()], dim=-1).flatten(0, 1)


class V4Decode:
    """Arguments of a call, and what the slots of its caches stand for.

    `extra` is the topk of a second cache and its page size.
    """

    def __init__(
        self,
        batch: int = 3,
        seq_q: int = 2,
        heads: int = 64,
        kv_len: int = 60,
        topk: int = 64,
        page_size: int = 2,
        extra: tuple[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(batch, seq_q, heads, 512, generator=generator).bfloat16() / 4
        self.rows, self.given = {}, {}
        names = {"k_cache": ("indices", topk, page_size)}
        if extra is not None:
            names["extra_k_cache"] = ("extra_indices_in_kvcache", *extra)
        for cache, (lists, entries, size) in names.items():
            self.given[cache], self.rows[cache] = make_pages(batch * kv_len, size, generator)
            shape = batch, seq_q, entries
            drawn = torch.randint(0, len(self.rows[cache]), shape, generator=generator)
            drawn[torch.rand(shape, generator=generator) < 0.1] = -1
            self.given[lists] = drawn.to(torch.int32)

    def arguments(self, metadata: Any = None, **changes: Any) -> dict[str, Any]:
        return {
            "q": self.q,
            "block_table": None,
            "cache_seqlens": None,
            "head_dim_v": 512,
            "tile_scheduler_metadata": metadata or flash_mla.get_mla_metadata()[0],
            "softmax_scale": SCALE,
            "is_fp8_kvcache": True,
            **self.given,
            **changes,
        }

    def call(self, metadata: Any = None, **changes: Any) -> Any:
        return flash_mla.flash_mla_with_kvcache(**self.arguments(metadata, **changes))

    def wanted(self, sink: Any = None, **changes: Any) -> tuple[Any, Any]:
        """Attend in float64, with all changes but those of caches."""
        batch, seq_q, heads, _ = self.q.shape
        given, lists, first = self.given | changes, [], 0
        for cache, name, lengths in (
            ("k_cache", "indices", "topk_length"),
            ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"),
        ):
            if cache not in given:
                continue
            entries, count = given[name].long(), len(self.rows[cache])
            most = given.get(lengths, torch.full((batch,), entries.shape[2]))[:, None, None]
            known = (entries >= 0) & (entries < count) & (torch.arange(entries.shape[2]) < most)
            lists.append(torch.where(known, entries + first, -1))
            first += count
        rows, indices = torch.cat([*self.rows.values()]), torch.cat(lists, dim=-1)
        out, _, lse = naive(self.q.flatten(0, 1), rows, indices.flatten(0, 1), None, sink)
        return out.view(batch, seq_q, heads, 512), lse.view(batch, seq_q, heads).transpose(1, 2)


def assert_as_flash_mla(
    got: Any, want: Any, *, absolute: float, relative: float, cosine: float | None = None
) -> None:
    """Hold what FlashMLA's tests hold: the same infinities, and else one of two tolerances."""
    got = got.double()
    special = ~torch.isfinite(want)
    assert torch.equal(got[special], want[special])
    assert torch.isfinite(got[~special]).all()
    got, want = got[~special], want[~special]
    error = (got - want).abs()
    assert ((error < absolute) | (error < relative * want.abs())).all()
    if cosine is not None:
        norms = (got**2 + want**2).sum()
        assert norms == 0 or 1 - 2 * (got * want).sum() / norms < cosine


def assert_decoded(got: Any, problem: V4Decode, **changes: Any) -> None:
    out, lse = problem.wanted(**changes)
    assert (got[0].dtype, got[1].dtype) == (problem.q.dtype, torch.float32)
    assert (got[0].shape, got[1].shape) == (out.shape, lse.shape)
    assert_as_flash_mla(got[0].cpu(), out, absolute=1e-3, relative=2.01 / 128, cosine=5e-6)
    assert_as_flash_mla(got[1].cpu(), lse, absolute=1e-6, relative=8.01 / 65536)


_SOME = [
    (4, 1, 64, 512, 64, 64, None),
    (4, 3, 64, 512, 64, 69, (64, 2)),
    (2, 1, 128, 1024, 576, 61, (128, 64)),
    (1, 1, 64, 2046, 2048, 576, (64, 69)),
    (3, 2, 16, 100, 65, 2, (7, 256)),  # neither heads nor topk are FlashMLA's
    (2, 1, 5, 7, 1, 1, (1, 53)),
]
_LENGTHS = [(512, 64, (2, 64, 69)), (1024, 576, (2, 61)), (2046, 2048, (2, 64, 576))]
_ALL = [
    (4, seq_q, heads, kv_len, topk, page_size, extra)
    for kv_len, topk, sizes in _LENGTHS
    for page_size, seq_q, heads, extra in product(
        sizes, (1, 3), (64, 128), (None, (64, 2), (512, 64), (1024, 2))
    )
]
SHAPES = pytest.mark.parametrize(
    ("batch", "seq_q", "heads", "kv_len", "topk", "page_size", "extra"),
    [*_SOME, *(pytest.param(*shape, marks=pytest.mark.exhaustive) for shape in _ALL)],
)


def options_of(problem: V4Decode) -> dict[str, Any]:
    """Sinks, and lengths from 0 to beyond the lists: of FlashMLA's tests, or worse."""
    batch, _, heads, _ = problem.q.shape
    generator = torch.Generator().manual_seed(1)
    sink = torch.randn(heads, generator=generator)
    sink[::5], sink[1::7] = -math.inf, math.inf
    options = {"attn_sink": sink}
    for lengths, lists in (
        ("topk_length", "indices"),
        ("extra_topk_length", "extra_indices_in_kvcache"),
    ):
        if lists in problem.given:
            most = problem.given[lists].shape[2]
            drawn = torch.randint(0, most + 1, (batch,), generator=generator)
            options[lengths] = drawn.to(torch.int32)
    return options


@SHAPES
def test_shapes_of_flash_mlas_tests(
    batch: int,
    seq_q: int,
    heads: int,
    kv_len: int,
    topk: int,
    page_size: int,
    extra: tuple[int, int] | None,
) -> None:
    problem = V4Decode(batch, seq_q, heads, kv_len, topk, page_size, extra)
    assert_decoded(problem.call(), problem)
    options = options_of(problem)
    wanted = {"sink" if n == "attn_sink" else n: tensor for n, tensor in options.items()}
    assert_decoded(problem.call(**options), problem, **wanted)


def test_sinks_are_in_out_alone() -> None:
    problem = V4Decode(extra=(9, 64))
    options = options_of(problem)
    sink = options.pop("attn_sink")
    plain, got = problem.call(**options), problem.call(**options, attn_sink=sink)
    assert torch.equal(got[1], plain[1])
    assert not got[0][:, :, sink == math.inf].any()
    assert torch.equal(got[0][:, :, sink == -math.inf], plain[0][:, :, sink == -math.inf])


@pytest.mark.parametrize("invalid", [[-1], [-1, INT_MIN, INT_MAX], None])
def test_lists_without_a_slot(invalid: list[int] | None) -> None:
    """Of both caches; of one of them, and then the other's are all that there is."""
    problem = V4Decode(heads=4, extra=(16, 64))
    lists = {}
    for name in ("indices", "extra_indices_in_kvcache"):
        cache = "k_cache" if name == "indices" else "extra_k_cache"
        values = invalid or [len(problem.rows[cache]), len(problem.rows[cache]) + 1]
        lists[name] = problem.given[name].clone()
        some = lists[name][..., 1::3]
        some[...] = torch.tensor(values * 64, dtype=torch.int32)[: some.shape[-1]]
        lists[name][1] = values[0]
    lists["indices"][0] = -1
    lists["extra_indices_in_kvcache"][2] = -1
    got = problem.call(**lists)
    assert_decoded(got, problem, **lists)
    assert not got[0][1].any()
    assert torch.isposinf(got[1][1]).all()
    assert torch.isfinite(got[1][[0, 2]]).all()


def test_a_list_of_length_0_and_an_empty_one() -> None:
    problem = V4Decode(heads=4, extra=(16, 64))
    nothing = torch.zeros(3, dtype=torch.int32)
    alone = problem.call(extra_k_cache=None, extra_indices_in_kvcache=None)
    for changes in (
        {"extra_topk_length": nothing},
        {"extra_indices_in_kvcache": ints(3, 2, 0)},
        {"extra_indices_in_kvcache": ints(3, 2, 0), "extra_topk_length": nothing},
    ):
        got = problem.call(**changes)
        assert all(torch.equal(x, y) for x, y in zip(got, alone, strict=True))
    got = problem.call(topk_length=nothing, extra_topk_length=nothing)
    assert not got[0].any() and torch.isposinf(got[1]).all()


def test_slots_that_no_list_names() -> None:
    """They are NaN, in columns and exponents."""
    problem = V4Decode(heads=4, kv_len=200, extra=(16, 64))
    want = problem.call()
    for cache, lists in (("k_cache", "indices"), ("extra_k_cache", "extra_indices_in_kvcache")):
        pages = problem.given[cache]
        blocks, size = pages.shape[:2]
        named = torch.zeros(blocks * size, dtype=torch.bool)
        entries = problem.given[lists].flatten().long()
        named[entries[entries >= 0]] = True
        whole = pages.view(blocks, -1)
        parts = (
            whole[:, : size * 576].view(blocks, size, 576),
            whole[:, size * 576 :].view(blocks, size, 8),
        )
        assert not named.all()
        for part in parts:
            part[~named.view(blocks, size)] = 255
    got = problem.call()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert torch.isfinite(got[0]).all()


def test_names_of_bytes_and_the_default_scale() -> None:
    problem = V4Decode(extra=(9, 64))
    want = problem.call(softmax_scale=None)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        caches = {n: problem.given[n].view(dtype) for n in ("k_cache", "extra_k_cache")}
        got = problem.call(softmax_scale=None, **caches)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    got = problem.call(softmax_scale=512**-0.5)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_512_columns_in_16_bits(dtype: Any) -> None:
    """Which FlashMLA's decoding does not have."""
    problem = V4Decode(heads=4)
    q, whole = problem.q.to(dtype), torch.randn(90, 2, 1, 512).to(dtype)
    out, lse = problem.call(q=q, k_cache=whole, is_fp8_kvcache=False)
    state = cumla.mla_sparse_decode(q, whole, problem.given["indices"], softmax_scale=SCALE)
    assert torch.equal(out, state.out)
    assert torch.equal(lse, state.lse.mT)


def test_the_schedule_is_computed_by_the_first_call() -> None:
    """From both lengths it had; other lists and pages of another size do not matter."""
    problem, metadata = V4Decode(extra=(16, 64)), flash_mla.get_mla_metadata()[0]
    lengths = {
        "topk_length": torch.tensor([64, 7, 30], dtype=torch.int32),
        "extra_topk_length": torch.tensor([0, 16, 5], dtype=torch.int32),
    }
    problem.call(metadata, **lengths)
    lists = {name: problem.given[name].flip(-1) for name in ("indices", "extra_indices_in_kvcache")}
    assert_decoded(problem.call(metadata, **lists, **lengths), problem, **lists, **lengths)
    layer = V4Decode(extra=(16, 2), page_size=64, seed=1)
    assert_decoded(layer.call(metadata, **lengths), layer, **lengths)
    (plan,) = metadata._plans.values()
    assert isinstance(plan, cumla.MLASparsePlan)
    none = dict.fromkeys(("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"))
    wide = {"q": torch.zeros(3, 2, 64, 576).bfloat16(), "k_cache": ints(9, 2, 1, 656).byte()}
    for change, named in (
        ({"extra_topk_length": None}, "has_extra_topk_length=False"),
        ({"extra_indices_in_kvcache": lists["indices"][..., :8]}, "extra_topk=8"),
        (none, "extra_topk=None"),
        (none | wide, "d_qk=576"),
    ):
        with pytest.raises(ValueError, match=rf"tile_scheduler_metadata: .*got .*{named}"):
            problem.call(metadata, **lengths | change)


def test_the_check_mode_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    problem, metadata = V4Decode(extra=(16, 64)), flash_mla.get_mla_metadata()[0]
    lengths = torch.tensor([16, 7, 3], dtype=torch.int32)
    problem.call(metadata, extra_topk_length=lengths)
    lengths[1] = 8
    message = r"^extra_topk_length\[1\]: .*; call get_mla_metadata\(\) for"
    with pytest.raises(ValueError, match=message):
        problem.call(metadata, extra_topk_length=lengths)
    lengths[1] = 17
    with pytest.raises(ValueError, match=r"^extra_topk_length\[1\]: needs a length from 0 to"):
        problem.call(extra_topk_length=lengths)


def test_a_call_and_a_captured_one_by_the_kernels() -> None:
    """As the CPU computes them, on a GPU that is emulated; lengths change between replays."""
    problem = V4Decode(2, 1, 16, 40, 70, 2, (5, 53))
    lengths = {
        "topk_length": torch.tensor([70, 3], dtype=torch.int32),
        "extra_topk_length": torch.tensor([2, 5], dtype=torch.int32),
    }
    arguments = {name: tensor.clone() for name, tensor in lengths.items()}
    with torch_gpu() as gpu:
        assert_decoded(problem.call(**arguments), problem, **lengths)
        with gpu.capture():
            got = flash_mla.flash_mla_with_kvcache(**problem.arguments(**arguments))
        for later in (lengths, {name: tensor.flip(0) for name, tensor in lengths.items()}):
            for name, tensor in later.items():
                arguments[name].copy_(tensor)
            gpu.replay()
            assert_decoded(got, problem, **later)


@pytest.mark.parametrize(
    ("form", "second"),
    [
        ("V32_NO_ROPE", None),
        ("V41", None),
        ("V41", "v41"),
        ("V41", "v41_fp4"),
        ("V41_FP4", None),
        (None, None),
    ],
)
def test_formats_by_name(form: str | None, second: str | None) -> None:
    """Rows of 288 bytes need no name, nor do those of a second cache."""
    own = (form or "V41_FP4").lower()
    generator = torch.Generator().manual_seed(3)
    caches, numbers = [], []
    for name in filter(None, (own, second)):
        rows = torch.randn(40, 512, generator=generator).bfloat16()
        cache = torch.zeros(10, 4, 1, FORMATS[name], dtype=torch.uint8)
        cumla.append_mla_cache(rows, cache, torch.arange(40), cache_format=name)
        caches.append(cache)
        indices = torch.arange(40, dtype=torch.int32)[:, None, None]
        eye = torch.eye(512).bfloat16()[None, None].expand(40, 1, 512, 512)
        state = cumla.mla_sparse_decode(eye.contiguous(), cache, indices, cache_format=name)
        numbers.append(state.out[:, 0, 0].double())
    q = torch.randn(2, 1, 5, 512, generator=generator).bfloat16() / 4
    given = {"q": q, "k_cache": caches[0], "indices": ints(2, 1, 9).random_(-1, 40)}
    listed = given["indices"]
    if second:
        extra = ints(2, 1, 4).random_(-1, 40)
        given |= {"extra_k_cache": caches[1], "extra_indices_in_kvcache": extra}
        listed = torch.cat([listed, torch.where(extra >= 0, extra + 40, -1)], dim=-1)
    metadata, _ = flash_mla.get_mla_metadata()
    for _ in range(2):
        out, lse = flash_mla.flash_mla_with_kvcache(
            **given,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=512,
            tile_scheduler_metadata=metadata,
            softmax_scale=SCALE,
            is_fp8_kvcache=True,
            kv_format=form,
        )
        want, _, want_lse = naive(
            q.flatten(0, 1), torch.cat(numbers), listed.flatten(0, 1), None, None
        )
        torch.testing.assert_close(out.flatten(0, 1).double(), want, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse.mT.flatten(0, 1).double(), want_lse, atol=1e-5, rtol=1e-5)


def test_rows_of_two_formats_of_one_width() -> None:
    cache = torch.zeros(10, 4, 1, 528, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^kv_format: needed .* pass 'V32_NO_ROPE' or 'V41'"):
        V4Decode().call(k_cache=cache)
    with pytest.raises(ValueError, match=r"^k_cache: needs rows of 288 bytes beside q of 512"):
        V4Decode().call(k_cache=cache, kv_format="V41_FP4")


NO_V4 = "belongs to a second cache, which goes with the formats of DeepSeek-V4 and V4.1; attend"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"causal": True}, ValueError, "causal: needs False with indices"),
        ({"k_cache": ints(90, 2, 584).byte()}, ValueError, "k_cache: needs axes .*, 584\\)"),
        ({"k_cache": ints(90, 2, 1, 656).byte()}, ValueError, "k_cache: needs rows of 288 or 5"),
        (
            {"q": torch.zeros(3, 2, 64, 576).bfloat16(), "extra_k_cache": None}
            | {"extra_indices_in_kvcache": None},
            ValueError,
            "k_cache: needs rows of 656 bytes beside q of 576 columns, got shape",
        ),
        ({"q": torch.zeros(3, 2, 64, 512).half()}, TypeError, "q: needs bfloat16 with k_cache of"),
        ({"k_cache": ints(90, 2, 2, 584).byte()}, ValueError, "k_cache: needs one kv head"),
        (
            {"k_cache": torch.zeros(90, 3, 1, 584, dtype=torch.uint8)},
            ValueError,
            "k_cache: needs contiguous pages, at multiples of 16 bytes",
        ),
        (
            {"extra_k_cache": ints(9, 7, 1, 584).byte()},
            ValueError,
            "extra_k_cache: needs contiguous pages, at multiples of 16 bytes",
        ),
        ({"extra_k_cache": None}, ValueError, "extra_indices_in_kvcache: needs an extra_k_cache"),
        (
            {"extra_k_cache": None, "extra_indices_in_kvcache": None, "extra_topk_length": ints(3)},
            ValueError,
            "extra_topk_length: needs an extra_k_cache, whose slots it is about, got None",
        ),
        (
            {"extra_indices_in_kvcache": None},
            ValueError,
            "extra_indices_in_kvcache: needed with extra_k_cache, got None",
        ),
        ({"extra_k_cache": [1]}, TypeError, "extra_k_cache: needs a PyTorch tensor"),
        (
            {"extra_k_cache": ints(9, 8, 1, 656).byte()},
            ValueError,
            "extra_k_cache: needs rows of 584 bytes beside q of 512 columns, got shape",
        ),
        (
            {"extra_k_cache": torch.zeros(9, 8, 1, 584)},
            TypeError,
            "extra_k_cache: needs float8_e4m3fn, int8, uint8 with is_fp8_kvcache, got float32",
        ),
        (
            {"extra_indices_in_kvcache": ints(3, 16)},
            ValueError,
            "extra_indices_in_kvcache: needs axes",
        ),
        (
            {"extra_indices_in_kvcache": ints(3, 1, 16)},
            ValueError,
            "extra_indices_in_kvcache: needs shape",
        ),
        (
            {"extra_indices_in_kvcache": ints(3, 2, 16).long()},
            TypeError,
            "extra_indices_in_kvcache: needs int32, got int64",
        ),
        ({"extra_topk_length": ints(2)}, ValueError, "extra_topk_length: needs shape"),
        ({"extra_topk_length": ints(3).long()}, TypeError, "extra_topk_length: needs int32, got"),
        (
            {"is_fp8_kvcache": False, "k_cache": torch.zeros(90, 2, 1, 512).bfloat16()},
            NotImplementedError,
            f"extra_k_cache: {NO_V4}",
        ),
        (
            {"q": torch.zeros(3, 2, 64, 576).bfloat16(), "k_cache": ints(90, 2, 1, 656).byte()},
            NotImplementedError,
            f"extra_k_cache: {NO_V4}",
        ),
    ],
)
def test_what_decoding_refuses(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        V4Decode(extra=(16, 8)).call(**change)
