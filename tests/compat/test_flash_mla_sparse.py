# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's sparse attention on the CPU: shapes and lists as in its public tests, and promises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.compat import flash_mla

torch = pytest.importorskip("torch")

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
SCALE = 0.5 * 576**-0.5


class Decode:
    """Arguments of a call over packed pages, and what the pages stand for."""

    def __init__(
        self,
        batch: int = 3,
        seq_q: int = 2,
        heads: int = 64,
        kv_len: int = 60,
        topk: int = 64,
        page_size: int = 2,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        blocks = batch * -(-kv_len // page_size)
        self.slots = blocks * page_size
        self.q = torch.randn(batch, seq_q, heads, 576, generator=generator).bfloat16() / 4
        rows = torch.randn(self.slots, 576, generator=generator).bfloat16() / 4
        # As FlashMLA's tests have them: rows between the pages that nobody owns.
        memory = torch.full((blocks, page_size + 1, 1, 656), 255, dtype=torch.uint8)
        self.cache = memory[:, :page_size]
        cumla.append_mla_cache(rows, self.cache, torch.arange(self.slots))
        bits = self.cache.reshape(self.slots, 656)
        scales = bits[:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, dim=1)
        latent = bits[:, :512].contiguous().view(torch.float8_e4m3fn).double() * scales.double()
        rope = bits[:, 528:].contiguous().view(torch.bfloat16).double()
        self.rows = torch.cat([latent, rope], dim=1)
        self.indices = torch.randint(
            0, self.slots, (batch, seq_q, topk), generator=generator, dtype=torch.int32
        )

    def call(self, metadata: Any = None, **changes: Any) -> Any:
        arguments: dict[str, Any] = {
            "q": self.q,
            "k_cache": self.cache,
            "block_table": None,
            "cache_seqlens": None,
            "head_dim_v": 512,
            "tile_scheduler_metadata": metadata or flash_mla.get_mla_metadata()[0],
            "softmax_scale": SCALE,
            "is_fp8_kvcache": True,
            "indices": self.indices,
        }
        return flash_mla.flash_mla_with_kvcache(**arguments | changes)


def naive(
    q: Any, rows: Any, indices: Any, lengths: Any = None, sink: Any = None
) -> tuple[Any, Any, Any]:
    """Attend from each of the rows of q, in float64: out, the largest score, lse."""
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, 512, dtype=torch.float64)
    top = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
    lse = torch.full((tokens, heads), math.inf, dtype=torch.float64)
    for i, entries in enumerate(indices.tolist()):
        known = entries[: None if lengths is None else max(int(lengths[i]), 0)]
        known = [index for index in known if 0 <= index < len(rows)]
        if known:
            scores = SCALE * q[i].double() @ rows[known].T
            top[i], lse[i] = scores.amax(dim=-1), scores.logsumexp(dim=-1)
            out[i] = scores.softmax(dim=-1) @ rows[known][:, :512]
    if sink is not None:
        share = torch.where(lse == math.inf, 1, 1 / (1 + torch.exp(sink.double() - lse)))
        out *= share[..., None]
    return out, top, lse


def assert_decoded(got: Any, problem: Decode, lengths: Any = None, **more: Any) -> None:
    batch, seq_q, heads, _ = problem.q.shape
    each = None if lengths is None else lengths.repeat_interleave(seq_q)
    lists = more.pop("indices", problem.indices).flatten(0, 1)
    out, _, lse = naive(problem.q.flatten(0, 1), problem.rows, lists, each, **more)
    assert got[0].dtype == problem.q.dtype
    assert tuple(got[1].shape) == (batch, heads, seq_q)
    torch.testing.assert_close(got[0].flatten(0, 1).double(), out, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(
        got[1].transpose(1, 2).flatten(0, 1).double(), lse, rtol=1e-6, atol=1e-6
    )


# --- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "seq_q", "heads", "kv_len", "topk", "page_size"),
    [
        (4, 1, 64, 512, 64, 64),
        (4, 3, 64, 512, 64, 69),
        (2, 1, 128, 1024, 576, 61),
        (1, 1, 64, 2046, 2048, 576),
        (3, 2, 16, 100, 65, 2),  # neither heads nor topk are FlashMLA's
        (2, 1, 5, 7, 1, 1),
    ],
)
def test_shapes_of_flash_mlas_tests(
    batch: int, seq_q: int, heads: int, kv_len: int, topk: int, page_size: int
) -> None:
    problem = Decode(batch, seq_q, heads, kv_len, topk, page_size)
    assert_decoded(problem.call(), problem)


def test_sinks_and_lengths() -> None:
    """Sinks of +-inf among them; out alone has them."""
    problem = Decode(heads=8)
    sink = torch.tensor([0.0, 3.0, -2.0, 8.0, -math.inf, math.inf, -1e30, 1e30])
    lengths = torch.tensor([64, 7, 0], dtype=torch.int32)
    for options in ({}, {"topk_length": lengths}):
        plain = problem.call(**options)
        got = problem.call(**options, attn_sink=sink)
        assert torch.equal(got[1], plain[1])
        assert_decoded(got, problem, options.get("topk_length"), sink=sink)
    assert torch.isposinf(got[1][2]).all()
    assert not got[0][2].any()


@pytest.mark.parametrize("invalid", [[-1], [-1, INT_MIN, INT_MAX], None])
def test_lists_without_a_slot(invalid: list[int] | None) -> None:
    """All of a list, and some of the others."""
    problem = Decode(heads=4)
    values = invalid or [problem.slots, problem.slots + 1]
    lists = problem.indices.clone()
    lists[..., 5::3] = torch.tensor(values * 20, dtype=torch.int32)[: lists[..., 5::3].shape[-1]]
    lists[1] = values[0]
    got = problem.call(indices=lists)
    assert_decoded(got, problem, indices=lists)
    assert not got[0][1].any()
    assert torch.isposinf(got[1][1]).all()


def test_caches_of_16_bits_and_names_of_bytes() -> None:
    problem = Decode()
    want = problem.call()
    for dtype in (torch.int8, torch.float8_e4m3fn):
        got = problem.call(k_cache=problem.cache.view(dtype))
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    whole = torch.randn(problem.slots // 2, 2, 1, 576).bfloat16()
    out, lse = problem.call(k_cache=whole, is_fp8_kvcache=False)
    state = cumla.mla_sparse_decode(problem.q, whole, problem.indices, softmax_scale=SCALE)
    assert torch.equal(out, state.out)
    assert torch.equal(lse, state.lse.mT)


def test_the_schedule_is_computed_by_the_first_call() -> None:
    """From the lengths it had; other lists do not matter."""
    problem, metadata = Decode(), flash_mla.get_mla_metadata()[0]
    lengths = torch.tensor([64, 7, 30], dtype=torch.int32)
    problem.call(metadata, topk_length=lengths)
    other = problem.indices.flip(-1)
    got = problem.call(metadata, indices=other, topk_length=lengths)
    assert_decoded(got, problem, lengths, indices=other)
    (plan,) = metadata._plans.values()
    assert isinstance(plan, cumla.MLASparsePlan)
    for change, named in (
        ({"topk_length": None}, "has_topk_length=False"),
        ({"indices": other[..., :32]}, "topk=32"),
        ({"q": problem.q[:, :, :16]}, "heads_q=16"),
    ):
        with pytest.raises(ValueError, match=rf"tile_scheduler_metadata: .*got .*{named}"):
            problem.call(metadata, **{"topk_length": lengths, **change})


def test_modes_of_torch_see_no_call() -> None:
    """Nor pay for it: a default device is such a mode."""
    seen: list[Any] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), named: Any = None):
            seen.append(function)
            return function(*args, **named or {})

    problem, sink, tokens = Decode(), torch.zeros(64), prefill(3, 50, 64, 9)
    lengths, metadata = ints(3), flash_mla.get_mla_metadata()[0]
    with Mode():
        problem.call(metadata, attn_sink=sink, topk_length=lengths)
        flash_mla.flash_mla_sparse_fwd(*tokens, SCALE, attn_sink=sink, topk_length=lengths)
        assert not seen
        assert problem.q.shape and seen


def test_the_check_mode_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    problem, metadata = Decode(), flash_mla.get_mla_metadata()[0]
    lengths = torch.tensor([64, 7, 30], dtype=torch.int32)
    problem.call(metadata, topk_length=lengths)
    lengths[1] = 8
    told = (
        r"needs the value of the metadata object's first call, 7.*; call get_mla_metadata\(\) for"
    )
    with pytest.raises(ValueError, match=rf"^topk_length\[1\]: {told}"):
        problem.call(metadata, topk_length=lengths)


def ints(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"causal": True}, ValueError, "causal: needs False with indices"),
        ({"extra_k_cache": ints(1)}, NotImplementedError, "extra_k_cache: belongs to a second"),
        (
            {"extra_indices_in_kvcache": ints(1)},
            NotImplementedError,
            "extra_indices_in_kvcache: belongs to a second cache",
        ),
        ({"indices": ints(3, 2)}, ValueError, "indices: needs axes"),
        ({"indices": ints(3, 1, 64)}, ValueError, "indices: needs shape"),
        ({"indices": ints(3, 2, 64).long()}, TypeError, "indices: needs int32, got int64"),
        ({"indices": [1]}, TypeError, "indices: needs a PyTorch tensor"),
        ({"topk_length": ints(2)}, ValueError, "topk_length: needs shape"),
        ({"topk_length": ints(3).long()}, TypeError, "topk_length: needs int32, got int64"),
        ({"attn_sink": torch.zeros(8)}, ValueError, r"attn_sink: needs shape \(heads_q,\)"),
        ({"attn_sink": torch.zeros(64).half()}, TypeError, "attn_sink: needs float32, got float16"),
        (
            {"attn_sink": torch.zeros(64, requires_grad=True)},
            NotImplementedError,
            "attn_sink: requires a gradient",
        ),
        (
            {"k_cache": ints(90, 2, 1, 336).to(torch.uint8)},
            NotImplementedError,
            "k_cache: needs rows of 656 bytes, the format of DeepSeek-V3.2, or of 584, 528 or 288",
        ),
        (
            {"k_cache": ints(90, 2, 656).to(torch.uint8)},
            ValueError,
            "k_cache: needs axes",
        ),
        (
            {"k_cache": torch.zeros(90, 2, 1, 656).bfloat16()},
            TypeError,
            "k_cache: needs float8_e4m3fn, int8, uint8 with is_fp8_kvcache, got bfloat16",
        ),
        (
            {"is_fp8_kvcache": False},
            TypeError,
            "k_cache: needs q's dtype bfloat16, got uint8; of a packed cache say is_fp8_kvcache",
        ),
        (
            {"is_fp8_kvcache": False, "q": torch.zeros(3, 2, 4, 576)},
            TypeError,
            "q: needs bfloat16 or float16, got float32",
        ),
        (
            {"is_fp8_kvcache": False, "k_cache": torch.zeros(90, 2, 3, 576).bfloat16()},
            ValueError,
            "(num_heads|k_cache): needs ",
        ),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale: needs a number from"),
        ({"softmax_scale": True}, TypeError, "softmax_scale: needs a number, got bool"),
        ({"head_dim_v": 576}, ValueError, "head_dim_v: needs 512"),
    ],
)
def test_what_decoding_refuses(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        Decode().call(**change)


def test_a_given_output_and_a_cache_that_tells_its_format() -> None:
    problem = Decode()
    want, want_lse = problem.call()
    out = torch.full_like(want, math.nan)
    found, lse = problem.call(out=out, is_fp8_kvcache=None)
    assert found is out
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    with pytest.raises(ValueError, match=r"^out: needs shape"):
        problem.call(out=out[:1])
    for form in (None, "V32"):
        found, lse = problem.call(enable_batch_invariant=True, kv_format=form)
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(lse, want_lse)
    with pytest.raises(NotImplementedError, match=r"^kv_format: needs V32 or V4 .*got 'V42'"):
        problem.call(kv_format="V42")
    with pytest.raises(ValueError, match=r"^kv_format: needs a packed cache beside q of 512"):
        problem.call(kv_format="V4")


# --- prefill --------------------------------------------------------------------------------------


def prefill(
    s_q: int, s_kv: int, heads: int, topk: int, invalid: bool = True, d_qk: int = 576
) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(s_kv)
    q = torch.randn(s_q, heads, d_qk, generator=generator).bfloat16() / 4
    kv = torch.randn(s_kv, 1, d_qk, generator=generator).bfloat16() / 4
    lists = torch.randint(0, s_kv, (s_q, 1, topk), generator=generator, dtype=torch.int32)
    if invalid:
        wrong = torch.tensor([INT_MIN, -1, s_kv, INT_MAX], dtype=torch.int32)
        some = torch.rand(lists.shape, generator=generator) < 0.3
        lists[some] = wrong.repeat(lists.numel())[: int(some.sum())]
        lists[-1] = -1
    return q, kv, lists


@pytest.mark.parametrize(
    ("s_q", "s_kv", "heads", "topk"),
    [
        (1, 128, 64, 128),
        (7, 592, 64, 128),
        (3, 1592, 128, 384),
        (13, 95, 64, 128),
        (2, 114, 128, 384),
        (2, 32, 64, 2048),
        (5, 153, 3, 57),
    ],
)
@pytest.mark.parametrize("more", [False, True], ids=["plain", "sinks and lengths"])
@pytest.mark.parametrize("d_qk", [512, 576])
def test_prefill(d_qk: int, s_q: int, s_kv: int, heads: int, topk: int, more: bool) -> None:
    q, kv, lists = prefill(s_q, s_kv, heads, topk, d_qk=d_qk)
    options: dict[str, Any] = {}
    if more:
        options["attn_sink"] = torch.linspace(-5, 5, heads)
        options["topk_length"] = torch.arange(s_q, dtype=torch.int32) * 37 % (topk + 1)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(q, kv, lists, SCALE, **options)
    wanted = naive(
        *(q, kv[:, 0].double(), lists[:, 0]), options.get("topk_length"), options.get("attn_sink")
    )
    assert (out.dtype, max_logits.dtype, lse.dtype) == (q.dtype, torch.float32, torch.float32)
    torch.testing.assert_close(out.double(), wanted[0], rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(max_logits.double(), wanted[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), wanted[2], rtol=1e-6, atol=1e-6)
    assert torch.isposinf(lse[-1]).all()
    assert torch.isneginf(max_logits[-1]).all()


def test_a_given_output_and_statistics_of_a_prefill() -> None:
    arguments = *prefill(3, 95, 4, 16), SCALE
    want, peak, lse = flash_mla.flash_mla_sparse_fwd(*arguments)
    out = torch.full_like(want, math.nan)
    found = flash_mla.flash_mla_sparse_fwd(*arguments, out=out, return_log2_lse=True)
    assert found[0] is out
    assert torch.equal(out, want)
    torch.testing.assert_close(found[1], peak / math.log(2))
    torch.testing.assert_close(found[2], lse / math.log(2))
    none = flash_mla.flash_mla_sparse_fwd(*arguments, return_log2_lse=False, use_legacy=True)
    assert torch.equal(none[0], want)
    assert none[1:] == (None, None)
    with pytest.raises(ValueError, match=r"^out: needs shape \(3, 4, 512\) and torch.bfloat16"):
        flash_mla.flash_mla_sparse_fwd(*arguments, out=out.float())


def test_rows_of_nan_beyond_a_length() -> None:
    """FlashMLA may let them through."""
    q, kv, lists = prefill(3, 50, 4, 9, invalid=False)
    kv[7] = math.nan
    lists[lists == 7] = 8
    lists[:, :, 5:] = 7
    lengths = torch.tensor([5, 3, 0], dtype=torch.int32)
    got = flash_mla.flash_mla_sparse_fwd(q, kv, lists, SCALE, topk_length=lengths)
    want = flash_mla.flash_mla_sparse_fwd(
        q, kv, torch.where(torch.arange(9) < lengths[:, None, None], lists, -1), SCALE
    )
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert torch.isfinite(got[0]).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(3, 576)}, ValueError, "q: needs axes"),
        ({"kv": torch.zeros(50, 576)}, ValueError, "kv: needs axes"),
        ({"kv": torch.zeros(50, 2, 576).bfloat16()}, ValueError, "kv: needs one kv head"),
        ({"kv": torch.zeros(50, 1, 576)}, TypeError, "kv: needs q's dtype bfloat16, got float32"),
        (
            {"kv": torch.zeros(50, 1, 656, dtype=torch.uint8)},
            TypeError,
            "kv: needs q's dtype bfloat16, got uint8; convert it; flash_mla_with_kvcache reads",
        ),
        ({"q": torch.zeros(3, 4, 576)}, TypeError, "q: needs bfloat16 or float16, got float32"),
        ({"indices": ints(3, 9)}, ValueError, "indices: needs axes"),
        ({"indices": ints(2, 1, 9)}, ValueError, "indices: needs shape"),
        ({"topk_length": ints(2)}, ValueError, r"topk_length: needs shape \(s_q,\) with s_q 3"),
        ({"attn_sink": torch.zeros(3)}, ValueError, "attn_sink: needs shape"),
        (
            {"attn_sink": torch.zeros(4, device="meta")},
            ValueError,
            "attn_sink: needs a tensor on cpu, as q, got one on meta; move",
        ),
        (
            {"q": torch.zeros(3, 4, 576, requires_grad=True)},
            NotImplementedError,
            r"q: requires a gradient.*torch\.no_grad\(\), or pass q\.detach\(\)",
        ),
        (
            {"attn_sink": torch.zeros(4, requires_grad=True)},
            NotImplementedError,
            "attn_sink: requires a gradient",
        ),
        ({"d_v": 256}, ValueError, "d_v: needs 512, .*got 256"),
        ({"sm_scale": 0.0}, ValueError, "sm_scale: needs a number from"),
        ({"sm_scale": None}, TypeError, "sm_scale: needs a Python or NumPy number, got None"),
        (
            {"q": torch.zeros(3, 4, 512).bfloat16()},
            ValueError,
            r"kv: needs a last axis of 512, .*got shape \(50, 1, 1, 576\)",
        ),
        ({"kv": torch.zeros(50, 1, 512).bfloat16()}, ValueError, "kv: needs a last axis of 576"),
        ({"q": np.zeros((3, 4, 576))}, TypeError, "q: needs a PyTorch tensor"),
    ],
)
def test_what_prefill_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    q, kv, lists = prefill(3, 50, 4, 9)
    arguments = {"q": q, "kv": kv, "indices": lists, "sm_scale": SCALE}
    with pytest.raises(error, match=f"^{message}"):
        flash_mla.flash_mla_sparse_fwd(**arguments | change)
