# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's wrapper of MLA attention on the CPU, against a formula written out here."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import pytest

import cumla
from cumla import AttentionState
from cumla.compat.flashinfer import _wrapper, mla
from cumla.compat.flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from tests.compat.elsewhere import open_elsewhere

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:FlashInfer deprecates:DeprecationWarning")

HEADS = 6
SCALE = 0.08
CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
Q_LENS, KV_LENS = (1, 5, 0, 3, 2), (70, 5, 33, 0, 1)  # the first query of the last one sees nothing


def int32(numbers: Any) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


def ends(counts: Any) -> Any:
    return int32([0, *counts]).cumsum(0, dtype=torch.int32)


class Batch(NamedTuple):
    """A batch in FlashInfer's terms; what no request may read is NaN."""

    qo_indptr: Any
    kv_indptr: Any
    kv_indices: Any
    kv_len_arr: Any
    block_tables: Any
    q: Any
    cache: Any

    @property
    def csr(self) -> tuple[Any, ...]:
        return self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_len_arr

    @property
    def parts(self) -> tuple[Any, ...]:
        return (*self.q.split((512, 64), dim=-1), *self.cache.split((512, 64), dim=-1))

    def expected(self, *, causal: bool) -> tuple[Any, Any]:
        """Softmax of each request's scores, in float64; the lse is a natural logarithm."""
        out = torch.zeros(*self.q.shape[:2], 512, dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], -math.inf, dtype=torch.float64)
        for r, length in enumerate(self.kv_len_arr.tolist()):
            own = slice(*self.qo_indptr[r : r + 2].tolist())
            pages = self.kv_indices[self.kv_indptr[r] : self.kv_indptr[r + 1]].long()
            rows = self.cache[pages].flatten(0, 1)[:length].double()
            scores = SCALE * self.q[own].double() @ rows.T
            if causal:
                count = own.stop - own.start
                last = length - count + torch.arange(count)
                scores[
                    (torch.arange(length) > last[:, None])[:, None].expand_as(scores)
                ] = -math.inf
            lse[own] = scores.logsumexp(-1)
            out[own] = scores.softmax(-1).nan_to_num() @ rows[:, :512]
        return out, lse


def make_batch(
    q_lens: Any = Q_LENS, kv_lens: Any = KV_LENS, *, page_size: int = 16, seed: int = 0
) -> Batch:
    random = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in kv_lens]
    pages = torch.randperm(sum(counts) + 2, generator=random).int()
    indptr = ends(counts)
    table = torch.full((len(counts), max(counts, default=0) + 1), -77, dtype=torch.int32)
    cache = torch.full((len(pages), page_size, 576), math.nan)
    for r, (count, length) in enumerate(zip(counts, kv_lens, strict=True)):
        own = pages[indptr[r] : indptr[r + 1]]
        table[r, :count] = own
        for i in range(length):
            row = torch.randn(576, generator=random)
            cache[int(own[i // page_size]), i % page_size] = row
    q = torch.randn(sum(q_lens), HEADS, 576, generator=random)
    return Batch(
        *(ends(q_lens), indptr, pages, int32(kv_lens), table),
        *(q.to(torch.bfloat16), cache.to(torch.bfloat16)),
    )


def settings(batch: Batch, **changes: Any) -> dict[str, Any]:
    """Return what a plan takes beside lengths and pages, in FlashInfer's order."""
    return {
        "num_heads": HEADS,
        "head_dim_ckv": 512,
        "head_dim_kpe": 64,
        "page_size": batch.cache.shape[1],
        "causal": True,
        "sm_scale": SCALE,
        "q_data_type": batch.q.dtype,
        "kv_data_type": batch.cache.dtype,
        **changes,
    }


def make_wrapper(*buffers: Any, **options: Any) -> BatchMLAPagedAttentionWrapper:
    return BatchMLAPagedAttentionWrapper(torch.empty(0, dtype=torch.uint8), *buffers, **options)


def planned(batch: Batch, **changes: Any) -> BatchMLAPagedAttentionWrapper:
    wrapper = make_wrapper()
    wrapper.plan(*batch.csr, *settings(batch, **changes).values())
    return wrapper


def check(result: Any, batch: Batch, *, natural: bool = False, causal: bool = True) -> None:
    out, lse = batch.expected(causal=causal)
    if not natural:
        lse = lse / math.log(2)
    assert (result[0].dtype, result[1].dtype) == (batch.q.dtype, torch.float32)
    torch.testing.assert_close(result[0].double(), out, rtol=2.0**-8, atol=1e-6)
    torch.testing.assert_close(result[1].double(), lse, rtol=1e-6, atol=1e-6)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("causal", "page_size"), [(True, 1), (False, 3), (True, 64)])
def test_as_in_version_0_6(causal: bool, page_size: int) -> None:
    batch = make_batch(page_size=page_size)
    wrapper = planned(batch, causal=causal)
    result = wrapper.run(*batch.parts, return_lse=True)
    assert type(result) is tuple
    check(result, batch, causal=causal)
    blind = result[1].isneginf().all(dim=-1)
    assert blind.sum() == (4 if causal else 3)
    assert not result[0][blind].any()
    assert torch.equal(wrapper.run(*batch.parts), result[0])


@pytest.mark.parametrize("causal", [torch.tensor(True), 0])
def test_flags_by_what_is_true_or_false(causal: Any) -> None:
    batch = make_batch()
    result = planned(batch, causal=causal).run(*batch.parts, return_lse=1)
    check(result, batch, causal=bool(causal))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["csr", "dense", "dual", "flat"])
def test_as_in_version_0_7(form: str, packed: bool) -> None:
    """What FlashInfer announces as its way is not warned of."""
    batch = make_batch()
    dense: dict[str, Any] = {
        "cum_seq_lens_q": batch.qo_indptr,
        "block_tables": batch.block_tables,
        "seq_lens": batch.kv_len_arr,
    }
    described = {
        "csr": lambda: {"metadata": MLAPlanMetadata.csr(*batch.csr)},
        "dense": lambda: {"metadata": MLAPlanMetadata.dense(**dense, max_q_len=5)},
        "dual": lambda: {"metadata": MLAPlanMetadata.dual(*batch.csr, **dense)},
        "flat": lambda: dense | {"max_q_len": 5},
    }[form]()
    wrapper = make_wrapper(backend="fa3")
    layout = "packed" if packed else "split"
    with warnings.catch_warnings():
        warnings.simplefilter("error" if form != "flat" else "ignore")
        wrapper.plan(
            **described,
            **settings(batch),
            query_layout=layout,
            kv_cache_layout=layout,
            lse_mode="basee",
            output_dtype=torch.bfloat16,
            qk_nope_head_dim=None,
            enable_pdl=None,
            is_var_seq=None,
            cute_dsl_impl="auto",
            use_sinks=False,
        )
        parts = batch.parts
        query, cache = (batch.q, batch.cache) if packed else (list(parts[:2]), parts[2:])
        others = ("sinks", "skip_softmax_threshold_scale_factor", "bmm1_scale", "bmm2_scale")
        result = wrapper.run(
            query=query,
            kv_cache=cache,
            return_lse=True,
            return_lse_base_on_e=True,
            **dict.fromkeys(others),
        )
    check(result, batch, natural=True)


def test_what_flashinfer_deprecates_is_warned_of_once() -> None:
    batch = make_batch((1,), (3,))
    wrapper = make_wrapper()
    pairs: dict[str, Any] = {"query": batch.q, "kv_cache": batch.cache}
    parts = dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), batch.parts, strict=True))
    flat = dict(zip(CSR, batch.csr, strict=True))
    for call, message in (
        (lambda: wrapper.plan(**flat, **settings(batch)), "lengths and pages beside metadata="),
        (
            lambda: wrapper.plan(*batch.csr, **settings(batch)),
            r"positional arguments of plan\(\) and",
        ),
        (lambda: wrapper.run(**parts), "q_nope, q_pe, ckv_cache and kpe_cache"),
        (lambda: wrapper.run(**pairs, return_lse=True), r"an lse that plan\(\) did not announce"),
    ):
        with pytest.warns(DeprecationWarning, match=f"^FlashInfer deprecates {message}") as seen:
            call()
        assert [warning.filename for warning in seen] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()


@pytest.mark.parametrize("natural", [False, True])
def test_given_outputs(natural: bool) -> None:
    """An lse is written whether it is returned or not; nothing is left of what was there."""
    batch = make_batch()
    wrapper = planned(batch)
    for return_lse in (False, True):
        out = torch.full((11, HEADS, 512), math.nan, dtype=torch.bfloat16)
        lse = torch.full((11, HEADS), math.nan)
        result = wrapper.run(*batch.parts, out, lse, return_lse, return_lse_base_on_e=natural)
        given = result if return_lse else (result, lse)
        assert given[0] is out
        assert given[1] is lse
        check((out, lse), batch, natural=natural)


def test_a_plan_serves_many_runs_and_the_next_one_counts() -> None:
    """Layers of a step; then another batch, with another number of requests and tokens."""
    wrapper = make_wrapper()
    for q_lens, kv_lens in ((Q_LENS, KV_LENS), ((4, 4, 3), (40, 4, 100)), ((1,), (9,))):
        layers = [make_batch(q_lens, kv_lens, seed=seed) for seed in (1, 2)]
        pages = {name: getattr(layers[0], name) for name in ("kv_indptr", "kv_indices")}
        layers[1] = layers[1]._replace(**pages, cache=layers[0].cache * 2)
        wrapper.plan(*layers[0].csr, *settings(layers[0]).values())
        for batch in layers:
            check(wrapper.run(*batch.parts, return_lse=True), batch)


def test_wide_lengths_and_longer_lists() -> None:
    batch = make_batch()
    wide = [x.long() for x in batch.csr]
    wide[2] = torch.cat([wide[2], torch.full((9,), -5)])
    wide[1] = torch.cat([wide[1], torch.full((4,), 1000)])  # as FlashInfer's own tests have it
    wrapper = make_wrapper()
    wrapper.plan(*wide, *settings(batch).values())
    check(wrapper.run(*batch.parts, return_lse=True), batch)


@pytest.mark.parametrize("form", ["csr", "dense"])
def test_lists_with_gaps_and_lists_that_are_no_integers(form: str) -> None:
    batch = make_batch()
    lists = dict(zip(CSR, batch.csr, strict=True))
    if form == "dense":
        lists = {"cum_seq_lens_q": batch.qo_indptr, "block_tables": batch.block_tables}
        lists["seq_lens"] = batch.kv_len_arr
    make = getattr(MLAPlanMetadata, form)
    wrapper = make_wrapper()
    apart = {n: torch.stack([x, x * 3 + 1], -1)[..., 0] for n, x in lists.items()}
    wrapper.plan(metadata=make(**apart), **settings(batch))
    check(wrapper.run(query=batch.q, kv_cache=batch.cache, return_lse=True), batch)
    for name in lists:
        wrong = lists | {name: lists[name].double()}
        with pytest.raises(ValueError, match=f"^{name}: needs int32 or int64, got float64"):
            wrapper.plan(metadata=make(**wrong), **settings(batch))


@pytest.mark.parametrize("q_lens", [(2, 1), (0, 0), ()])
@pytest.mark.parametrize("graph", [False, True])
def test_nothing_to_attend_to(graph: bool, q_lens: tuple[int, ...]) -> None:
    """A cache without pages; no query tokens, no requests."""
    batch = make_batch(q_lens, (0,) * len(q_lens))
    batch = batch._replace(kv_indices=batch.kv_indices[:0], cache=batch.cache[:0])
    wrapper = make_wrapper(graph)
    wrapper.plan(*batch.csr, *settings(batch).values())
    for query, cache in ((batch.parts[:2], batch.parts[2:]), (batch.q, batch.cache)):
        check(wrapper.run(query=query, kv_cache=cache, return_lse=True), batch)


@pytest.mark.parametrize("prefix", ["", "torch."])
def test_dtypes_by_their_names(prefix: str) -> None:
    batch = make_batch()
    name = f"{prefix}bfloat16"
    dtypes = {"q_data_type": name, "kv_data_type": name}
    wrapper = make_wrapper()
    wrapper.plan(*batch.csr, *settings(batch, **dtypes).values(), output_dtype=name)
    check(wrapper.run(*batch.parts, return_lse=True), batch)
    ckv, kpe, _, exact = quantized(batch, 0.5, 0.5)
    wrapper = planned(batch, **dtypes | {"kv_data_type": f"{prefix}float8_e4m3fn"})
    scales = {"ckv_scale": 0.5, "kpe_scale": 0.5}
    check(wrapper.run(*batch.parts[:2], ckv, kpe, return_lse=True, **scales), exact)


@pytest.mark.parametrize("by_token", [False, True])
def test_a_model_without_rope_needs_no_scale_of_it(by_token: bool) -> None:
    batch = make_batch()
    scales = (0.7, 1.0, 1.0) if by_token else (0.7, 1.0)
    no_rope = torch.zeros(11, HEADS, 64).bfloat16()
    exact = batch._replace(q=torch.cat([batch.parts[0], no_rope], dim=-1))
    ckv, _, factors, exact = quantized(exact, *scales)
    given: dict[str, Any] = {"ckv_scale_arr": factors} if by_token else {"ckv_scale": 0.7}
    wrapper = planned(batch, **FP8, head_dim_kpe=0)
    result = wrapper.run(query=batch.parts[0], kv_cache=ckv, return_lse=True, **given)
    check(result, exact)
    with pytest.raises(ValueError, match=r"^ckv_scale: needs a number above 0, got 0.0"):
        wrapper.run(query=batch.parts[0], kv_cache=ckv, ckv_scale=0.0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_a_model_without_rope(scale: float | None, packed: bool) -> None:
    """FlashInfer's head_dim_kpe of 0; with a scale for an FP8 cache."""
    batch = make_batch()
    exact = batch._replace(
        q=torch.cat([batch.parts[0], torch.zeros(11, HEADS, 64).bfloat16()], dim=-1)
    )
    q_nope, ckv, options = batch.parts[0], batch.parts[2], {}
    changes: dict[str, Any] = {"head_dim_kpe": 0}
    if scale is not None:
        ckv, _, _, exact = quantized(exact, scale, scale)
        options, changes = {"ckv_scale": scale, "kpe_scale": 1.3}, changes | FP8
    query, cache = (q_nope, ckv) if packed else ((q_nope, q_nope[..., :0]), (ckv, ckv[..., :0]))
    wrapper = planned(batch, **changes)
    check(wrapper.run(query=query, kv_cache=cache, return_lse=True, **options), exact)
    with pytest.raises(ValueError, match=r"^q_pe: needs 3 axes, the last of 0 columns, got .* 64"):
        wrapper.run(query=batch.parts[:2], kv_cache=cache, **options)


@pytest.mark.parametrize("rope", [64, 32])
def test_rows_of_256_columns(rope: int) -> None:
    batch = make_batch()
    q_nope, q_pe, ckv, kpe = batch.parts
    parts = q_nope[..., :256], q_pe[..., :rope], ckv[..., :256], kpe[..., :rope]
    q, cache = (torch.cat(parts[i : i + 2], dim=-1) for i in (0, 2))
    lists = {"kv_indptr": batch.kv_indptr, "kv_indices": batch.kv_indices}
    lengths = {"kv_lens": batch.kv_len_arr, "qo_indptr": batch.qo_indptr}
    want = cumla.mla_attention(q, cache, **lengths, **lists, softmax_scale=SCALE)
    wrapper = planned(batch, head_dim_ckv=256, head_dim_kpe=rope)
    for query, rows in ((q, cache), (parts[:2], parts[2:])):
        out, lse = wrapper.run(query=query, kv_cache=rows, return_lse=True)
        assert torch.equal(out, want.out)
        torch.testing.assert_close(lse * math.log(2), want.lse)


# --- FP8 caches ----------------------------------------------------------------------------------


def quantized(batch: Batch, *scales: float, seed: int = 0) -> tuple[Any, Any, Any, Batch]:
    """The cache in e4m3 with scales of latent and RoPE columns, or of 128 columns and RoPE."""
    ckv, kpe = batch.cache.float().split((512, 64), dim=-1)
    random = torch.Generator().manual_seed(seed)
    shape = (*ckv.shape[:2], 4)
    by_token = 10.0 ** (-4 * torch.rand(shape, generator=random)) * scales[0]
    factors = by_token if len(scales) == 3 else torch.full(shape, scales[0])
    wide = factors.repeat_interleave(128, dim=-1)
    values = ckv.to(torch.float8_e4m3fn), kpe.to(torch.float8_e4m3fn)
    known = values[0].double() * wide.double(), values[1].double() * scales[-1]
    return *values, by_token, batch._replace(cache=torch.cat(known, dim=-1))


FP8 = {"kv_data_type": torch.float8_e4m3fn}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("ckv_scale", "kpe_scale"), [(0.37, 0.37), (0.37, 2.6), (1.0, 1)])
def test_scales_of_an_fp8_cache(ckv_scale: float, kpe_scale: float, packed: bool) -> None:
    batch = make_batch()
    ckv, kpe, _, exact = quantized(batch, ckv_scale, kpe_scale)
    wrapper = planned(batch, **FP8)
    q_nope, q_pe = batch.parts[:2]
    cache = (ckv, kpe)
    if packed:
        cache = torch.cat([part.view(torch.uint8) for part in cache], dim=-1)
        cache = cache.view(torch.float8_e4m3fn)
    result = wrapper.run(
        query=(q_nope, q_pe),
        kv_cache=cache,
        return_lse=True,
        ckv_scale=ckv_scale,
        kpe_scale=kpe_scale,
    )
    check(result, exact)


@pytest.mark.parametrize("packed", [False, True])
def test_an_array_of_scales(packed: bool) -> None:
    batch = make_batch()
    ckv, kpe, scales, exact = quantized(batch, 3.0, 1.0, 0.7)
    wrapper = make_wrapper()
    options = {"scale_mode": "kv-per-tensor", "lse_mode": "base2"}
    wrapper.plan(*batch.csr, *settings(batch, **FP8).values(), **options)
    caches: dict[str, Any] = {"ckv_cache": ckv, "kpe_cache": kpe}
    if packed:
        both = torch.cat([part.view(torch.uint8) for part in (ckv, kpe)], dim=-1)
        caches = {"kv_cache": both.view(torch.float8_e4m3fn)}
    result = wrapper.run(
        *batch.parts[:2],
        **caches,
        return_lse=True,
        ckv_scale_arr=scales,
        kpe_scale=0.7,
    )
    check(result, exact)


def test_scales_that_do_not_fit() -> None:
    batch = make_batch()
    ckv, kpe, scales, _ = quantized(batch, 1.0, 1.0)
    wrapper = planned(batch, **FP8)
    arguments = (*batch.parts[:2], ckv, kpe)
    both = {"ckv_scale": 1.0, "ckv_scale_arr": scales, "kpe_scale": 1.0}
    for given, message in (
        ({}, "ckv_scale: needs either it or ckv_scale_arr for an FP8 cache, got neither"),
        (both, "ckv_scale: needs either it or ckv_scale_arr for an FP8 cache, got both"),
        ({"ckv_scale": 1.0}, "kpe_scale: needs a number for an FP8 cache, got None"),
        ({"ckv_scale": 0.0, "kpe_scale": 1.0}, "ckv_scale: needs a number above 0, got 0.0"),
        ({"ckv_scale": 1.0, "kpe_scale": -1.0}, "kpe_scale: needs a number above 0"),
        ({"ckv_scale": 1.0, "kpe_scale": math.nan}, "kpe_scale: needs a number above 0, got nan"),
        (
            {"ckv_scale_arr": scales[:, :1], "kpe_scale": 1.0},
            r"ckv_scale_arr: needs the first axes of ckv_cache",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            wrapper.run(*arguments, **given)
    for cache, name in (((ckv, batch.parts[3]), "kpe_cache"), (batch.cache, "kv_cache")):
        with pytest.raises(ValueError, match=f"^{name}.dtype: needs kv_data_type.*got torch.bf"):
            wrapper.run(query=batch.q, kv_cache=cache, ckv_scale=1.0, kpe_scale=3.0)
    with pytest.raises(ValueError, match=r"^ckv_cache.dtype: needs kv_data_type of the plan"):
        planned(batch).run(*arguments)


# --- CUDA graphs ---------------------------------------------------------------------------------


def graph_buffers(batch: int = 5, pages: int = 40) -> list[Any]:
    return [
        torch.full((size,), -9, dtype=torch.int32) for size in (batch + 1,) * 2 + (pages, batch)
    ]


def test_plans_fill_the_given_buffers() -> None:
    buffers = graph_buffers()
    wrapper = make_wrapper(True, *buffers)
    for q_lens, kv_lens in ((Q_LENS, KV_LENS), ((0, 2, 6, 2, 1), (9, 80, 6, 1, 300))):
        batch = make_batch(q_lens, kv_lens)
        wrapper.plan(*batch.csr, *settings(batch).values())
        for buffer, array in zip(buffers, batch.csr, strict=True):
            assert torch.equal(buffer[: len(array)], array)
        for array in batch.csr:
            array.fill_(-1)  # it is not looked at any more
        batch = make_batch(q_lens, kv_lens)
        check(wrapper.run(*batch.parts, return_lse=True), batch)


def test_a_graphs_table_is_kept_where_the_first_one_was_copied() -> None:
    wrapper = make_wrapper(True)
    places = set()
    for q_lens, kv_lens in ((Q_LENS, (300, 5, 33, 0, 1)), ((0, 2, 6, 2, 1), (9, 80, 6, 1, 100))):
        batch = make_batch(q_lens, kv_lens)
        metadata = MLAPlanMetadata.dense(batch.qo_indptr, batch.block_tables, batch.kv_len_arr)
        wrapper.plan(metadata=metadata, **settings(batch))
        places.add(tuple(array.data_ptr() for array in wrapper._arrays.values()))
        assert wrapper._arrays["block_table"] is not batch.block_tables
        check(wrapper.run(*batch.parts, return_lse=True), batch)
    assert len(places) == 1


class Gpu:
    """What the wrapper asks of a stream, and a plan that notes where it is updated and run."""

    def __init__(self) -> None:
        self.stream, self.capturing = 1, False
        self.log: list[str] = []

    def open_call(self, arguments: Any) -> Gpu:
        return self

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *error: object) -> None: ...

    def make_plan(self, **options: Any) -> Any:
        self.log.append("make")
        return GpuPlan(self)


class GpuPlan:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.stream = gpu, 0

    def update(self, *lengths: Any, **others: Any) -> None:
        self.stream = self.gpu.stream
        self.gpu.log.append("captured update" if self.gpu.capturing else "update")

    def run(self, *arguments: Any, **options: Any) -> Any:
        assert self.stream == self.gpu.stream
        self.gpu.log.append("captured run" if self.gpu.capturing else "run")
        return AttentionState(None, None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(_wrapper, "open_call", gpu.open_call)
    monkeypatch.setattr(mla, "MLAAttentionPlan", gpu.make_plan)
    return gpu


def test_without_graphs_the_first_run_makes_the_schedule(gpu: Gpu) -> None:
    batch = make_batch()
    wrapper = make_wrapper()
    for _ in range(2):
        wrapper.plan(*batch.csr, *settings(batch).values())
        for _ in range(2):
            wrapper.run(*batch.parts)
    gpu.stream = 2
    wrapper.run(*batch.parts)
    assert gpu.log == ["make", *["update", "run", "run"] * 2, "update", "run"]
    gpu.log.clear()
    other = make_batch((1,) * 5)
    wrapper.plan(*other.csr, *settings(other).values())
    wrapper.run(*other.parts)
    assert gpu.log == ["make", "update", "run"]


@pytest.mark.parametrize("current", [None, 100])
def test_a_thread_without_a_context_or_with_another_gpus(
    monkeypatch: pytest.MonkeyPatch, current: int | None
) -> None:
    """Whether the default stream of the arrays' GPU is captured is asked in a context of it."""
    library = open_elsewhere(monkeypatch, _wrapper, current)
    batch = make_batch()
    check(planned(batch).run(*batch.parts, return_lse=True), batch)
    assert set(library.asked) == {103}
    assert library.context == current


@pytest.mark.parametrize("capture_stream", [1, 2])
def test_a_graph_has_its_schedule_once(gpu: Gpu, capture_stream: int) -> None:
    """In each capture before its first run; and each plan makes it, for graphs that have none."""
    batch = make_batch()
    wrapper = make_wrapper(True, *graph_buffers())

    def capture() -> None:
        gpu.stream, gpu.capturing = capture_stream, True
        wrapper.run(*batch.parts)
        wrapper.run(*batch.parts)
        gpu.stream, gpu.capturing = 1, False

    wrapper.plan(*batch.csr, *settings(batch).values())
    wrapper.run(*batch.parts)
    assert gpu.log == ["make", "update", "run"]
    for _ in range(2):
        gpu.log.clear()
        capture()
        assert gpu.log == ["captured update", "captured run", "captured run"]
        wrapper.plan(*batch.csr, *settings(batch).values())
        assert gpu.log[3:] == ["update"]
    gpu.log.clear()
    capture()
    wrapper.run(*batch.parts)
    assert gpu.log[3:] == ["update", "run"]  # what was captured has not been computed


def test_what_a_graph_would_not_see_is_refused() -> None:
    batch = make_batch()
    wrapper = make_wrapper(True, *graph_buffers(pages=len(batch.kv_indices)))
    wrapper.plan(*batch.csr, *settings(batch).values())
    wrapper.run(*batch.parts)
    with pytest.raises(
        ValueError, match=r"^query: needs 11 query tokens, .* got 22; with use_cuda"
    ):
        wrapper.run(*(torch.cat([part, part]) for part in batch.parts[:2]), *batch.parts[2:])
    for name, had, got in (
        ("causal", True, False),
        ("page_size", 16, 8),
        ("num_heads", HEADS, 3),
        ("sm_scale", SCALE, 0.09),
        ("head_dim_kpe", 64, 0),
        ("kv_data_type", "torch.bfloat16", torch.float8_e4m3fn),
    ):
        message = f"^{name}: needs {had}, as in the first plan of this wrapper, got {got}; with us"
        with pytest.raises(ValueError, match=message):
            wrapper.plan(*batch.csr, *settings(batch, **{name: got}).values())
    metadata = MLAPlanMetadata.dense(batch.qo_indptr, batch.block_tables, batch.kv_len_arr)
    with pytest.raises(ValueError, match=r"^metadata: needs kv_indices, .* got block_tables; with"):
        wrapper.plan(metadata=metadata, **settings(batch))
    longer = list(batch.csr)
    longer[0] = longer[0] + 100  # must not be copied before the error
    longer[2] = int32([0] * (len(longer[2]) + 1))
    with pytest.raises(ValueError, match=r"^kv_indices: needs to fit the buffer of shape \(12,\)"):
        wrapper.plan(*longer, *settings(batch).values())
    check(wrapper.run(*batch.parts, return_lse=True), batch)
    fewer = make_wrapper(True, *graph_buffers(batch=6))
    with pytest.raises(ValueError, match=r"^qo_indptr: needs to fit .* \(7,\) .* got \(6,\)"):
        fewer.plan(*batch.csr, *settings(batch).values())


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cutlass", "fa4"])
def test_other_backends(backend: str) -> None:
    with pytest.raises(ValueError, match=r"^backend: needs one of auto, fa2, fa3, got '"):
        make_wrapper(backend=backend)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"use_profiler": True},
            ValueError,
            "use_profiler: belongs to kernels that cumla does not",
        ),
        ({"output_scale": "per-tensor"}, ValueError, "output_scale: belongs"),
        ({"scale_mode": "kv-per-tensor"}, ValueError, "scale_mode: belongs"),
        (FP8 | {"scale_mode": "bmm-scalar"}, ValueError, "scale_mode: belongs"),
        ({"skip_softmax": True}, ValueError, "skip_softmax: belongs"),
        ({"use_sinks": True}, ValueError, "use_sinks: belongs"),
        ({"enable_pdl": False}, ValueError, "enable_pdl: belongs"),
        ({"head_dim_ckv": 128}, ValueError, "head_dim_ckv: needs rows .* 512 and 64.* got 128"),
        ({"head_dim_kpe": 32}, ValueError, r"head_dim_ckv: .* of RoPE \(head_dim_kpe.* 512 and 32"),
        ({"q_data_type": torch.float32}, ValueError, "q_data_type: needs bfloat16 or float16"),
        ({"kv_data_type": torch.float16}, ValueError, "kv_data_type: needs q_data_type"),
        (
            {"kv_data_type": torch.float8_e5m2},
            ValueError,
            r"kv_data_type: .* or float8_e4m3fn beside bfloat16, got torch.float8_e5m2; keep",
        ),
        (
            {"q_data_type": torch.float16} | FP8,
            ValueError,
            "kv_data_type: needs q_data_type, torch.float16, or float8_e4m3fn beside bfloat16",
        ),
        (
            {"output_dtype": torch.float32},
            ValueError,
            r"output_dtype: .*; leave it out, and pass out",
        ),
        ({"sm_scale": -1.0}, ValueError, "sm_scale: needs a number from 1e-20 to"),
        ({"q_data_type": "float64"}, ValueError, "q_data_type: needs bfloat16 or float16, got tor"),
        ({"q_data_type": "nn"}, ValueError, "q_data_type: needs bfloat16 or float16, got nn;"),
        ({"sm_scale": None}, TypeError, r"sm_scale: needs a value, got None; pass it to plan\(\)"),
        ({"causal": None}, TypeError, "causal: needs a value"),
        ({"metadata": None}, TypeError, "metadata: needs all of qo_indptr, kv_len_arr"),
        ({"metadata": 7}, TypeError, "metadata: needs all of qo_indptr, kv_len_arr"),
        ({"metadata": MLAPlanMetadata()}, ValueError, "cum_seq_lens_q: needs a tensor, got None"),
        (
            {"metadata": MLAPlanMetadata(qo_indptr=int32([0]))},
            ValueError,
            "kv_len_arr: needs a tensor, got None; describe",
        ),
        ({"qo_indptr": int32([0])}, ValueError, "metadata: needs the other tensors left out"),
        ({"seq_lens": int32([0])}, ValueError, "metadata: needs the other tensors left out"),
    ],
)
def test_arguments_of_a_plan(changes: Any, error: type[Exception], message: str) -> None:
    batch = make_batch()
    arguments = settings(batch) | {"metadata": MLAPlanMetadata.csr(*batch.csr)} | changes
    with pytest.raises(error, match=f"^{message}"):
        make_wrapper().plan(**arguments)


def test_sizes_that_equal_those_of_the_last_plan() -> None:
    batch, wrapper = make_batch(), make_wrapper()
    arguments = settings(batch) | {"metadata": MLAPlanMetadata.csr(*batch.csr)}
    wrapper.plan(**arguments)
    for name in ("num_heads", "page_size"):
        with pytest.raises(ValueError, match=f"^{name}: needs an int, got float"):
            wrapper.plan(**arguments | {name: float(arguments[name])})


def test_lengths_that_do_not_fit() -> None:
    batch = make_batch()
    for i, (wrong, message) in enumerate(
        [
            (
                int32([0] * 5),
                r"qo_indptr: needs 6 entries with the 5 requests of kv_len_arr, got 5",
            ),
            (int32([0] * 5), "kv_indptr: needs 6 entries with the 5 requests"),
            (batch.block_tables, r"kv_indices: needs axes \(pages\), got shape \(5, 6\)"),
            (
                int32([0] * 4),
                r"kv_len_arr: needs 5 entries with the 5 requests of qo_indptr, got 4",
            ),
        ]
    ):
        given = [*batch.csr[:i], wrong, *batch.csr[i + 1 :]]
        with pytest.raises(ValueError, match=f"^{message}"):
            make_wrapper().plan(*given, *settings(batch).values())
    longer = torch.cat([batch.kv_len_arr, batch.kv_len_arr[:1]])
    metadata = MLAPlanMetadata.dense(batch.qo_indptr, batch.block_tables, longer)
    for given, message in (
        ({"metadata": metadata}, "seq_lens: needs 5 entries with the 5 requests of cum_seq_lens_q"),
        (
            dict(zip(CSR, (*batch.csr[:3], longer), strict=True)),
            "kv_len_arr: needs 5 entries with the 5 requests of qo_indptr, got 6",
        ),
        (
            dict(zip(CSR, (batch.qo_indptr.numpy(), *batch.csr[1:]), strict=True)),
            "qo_indptr: needs a PyTorch tensor, got numpy.ndarray; pass a tensor, or call cumla's",
        ),
        (
            dict(zip(CSR, (batch.qo_indptr.tolist(), *batch.csr[1:]), strict=True)),
            "qo_indptr: needs a PyTorch tensor, got builtins.list; pass a tensor, such as",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            make_wrapper().plan(**given, **settings(batch))
    with pytest.raises(TypeError, match=r"^float_workspace_buffer: needs a PyTorch tensor"):
        BatchMLAPagedAttentionWrapper(7)
    with pytest.raises(ValueError, match=r"^kv_len_arr: needs a tensor on cpu, .* got one on meta"):
        make_wrapper(True, kv_len_arr=torch.empty(5, device="meta", dtype=torch.int32))
    for i, name in enumerate(CSR):
        buffers = graph_buffers()
        buffers[i] = buffers[i].long()
        with pytest.raises(ValueError, match=f"^{name}: needs int32, .* got torch.int64; allocate"):
            make_wrapper(True, *buffers)


def test_arguments_of_a_run() -> None:
    batch = make_batch()
    parts = batch.parts
    with pytest.raises(
        ValueError, match=r"^query: needs the 11 query tokens that qo_indptr .* 10;"
    ):
        planned(batch).run(*(part[:10] for part in parts[:2]), *parts[2:])
    with pytest.raises(RuntimeError, match=r"^run: needs a plan, got none; call plan\(\) first"):
        make_wrapper().run(*parts)
    wrapper = planned(batch)
    for name in ("kv_len", "page_table", "o_scale", "sinks", "bmm1_scale", "bmm2_scale"):
        with pytest.raises(ValueError, match=f"^{name}: belongs to kernels that cumla does not"):
            wrapper.run(*parts, **{name: 1})
    for name in ("ckv_scale", "ckv_scale_arr", "kpe_scale"):
        with pytest.raises(ValueError, match=f"^{name}: .* need a plan with kv_data_type float8"):
            wrapper.run(*parts, **{name: 1.0})
    cache = {"kv_cache": batch.cache}
    for arguments, error, message in (
        (cache, TypeError, "query: needs query= alone, or q_nope and q_pe together, got neither"),
        (cache | {"q_nope": parts[0]}, ValueError, "query: needs both q_nope and q_pe, got one"),
        (cache | {"query": batch.q, "q_pe": parts[1]}, TypeError, "query: .*, got both forms"),
        ({"query": batch.q}, TypeError, "kv_cache: needs kv_cache= alone, or ckv_cache and kpe_"),
        (
            {"q_nope": batch.q, "q_pe": batch.cache},
            TypeError,
            "kv_cache: .*, got neither; pass one form: kv_cache= by name",
        ),
        (
            cache | {"query": (7, parts[1])},
            TypeError,
            "q_nope: needs a PyTorch tensor, got builtin",
        ),
        (cache | {"query": parts[:3]}, ValueError, "query: needs a tensor or a pair, got 3"),
        (cache | {"query": parts[:1] * 2}, ValueError, "q_pe: needs 3 axes, the last of 64 column"),
        (
            cache | {"query": batch.q.half()},
            ValueError,
            "query.dtype: needs q_data_type of the pla",
        ),
        (
            cache | {"query": batch.q, "out": torch.zeros(11, HEADS, 512, dtype=torch.float16)},
            ValueError,  # cumla raises a TypeError
            "out: needs",
        ),
    ):
        with pytest.raises(error, match=f"^{message}"):
            wrapper.run(**arguments)
    for query, kv_cache, message in (
        (batch.q[:, :3], batch.cache, "query: needs num_heads of the plan, 6, as its second axis,"),
        (
            batch.q,
            parts[2:],
            "ckv_cache: needs page_size of the plan, 8, as its second axis, got s",
        ),
    ):
        sizes = {"page_size": 8} if kv_cache is not batch.cache else {}
        with pytest.raises(ValueError, match=f"^{message}"):
            planned(batch, **sizes).run(query=query, kv_cache=kv_cache)


@pytest.mark.parametrize(
    ("q_len", "heads", "width", "page_size", "window"),
    [(1, 64, 1088, 64, 512), (4, 64, 1088, 64, 512), (3, 5, 576, 16, 7), (1, 8, 320, 1, 0)],
)
@pytest.mark.parametrize("has_out", [False, True])
def test_decoding_in_a_window(
    q_len: int, heads: int, width: int, page_size: int, window: int, has_out: bool
) -> None:
    """Rows that no query sees are NaN; a request without keys gives 0."""
    lens = (600, 0, 70)
    latent = width - 64
    pages = -(-600 // page_size)
    table = torch.randperm(3 * pages).int().view(3, pages)
    cache = torch.full((3 * pages, page_size, width), math.nan)
    q = torch.randn(3, q_len, heads, width).bfloat16()
    wanted = torch.zeros(3, q_len, heads, latent, dtype=torch.float64)
    for r, length in enumerate(lens):
        rows = torch.randn(length, width).bfloat16()
        at = torch.arange(length)
        at = at[at >= length - q_len - window]
        cache[table[r, at // page_size].long(), at % page_size] = rows[at].float()
        for i in range(q_len if length else 0):
            p = length - q_len + i
            own = rows[max(0, p - window) : p + 1].double()
            weights = (SCALE * q[r, i].double() @ own.T).softmax(-1)
            wanted[r, i] = weights @ own[:, :latent]
    size = mla.get_mla_swa_workspace_size_bytes(3, q_len, heads)
    out = torch.full(wanted.shape, math.nan).bfloat16() if has_out else None
    found = mla.batch_decode_with_kv_cache_mla_swa(
        *(q, cache.bfloat16(), torch.empty(size, dtype=torch.uint8), table, int32(lens)),
        window_left=window,
        sm_scale=SCALE,
        out=out,
    )
    assert out is None or found is out
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"backend": "sm120"}, "^backend: needs one of auto, sm90, got 'sm120'"),
        ({"window_left": -2}, "^window_left: .* got -2"),
        ({"sm_scale": math.inf}, "^sm_scale: .* got inf"),
        ({"query": torch.zeros(2, 1, 64, 1000).bfloat16()}, "^query: .*1000"),
        ({"seq_lens": int32([3])}, r"^seq_lens: .* batch 2, got \(1,\)"),
        ({"block_tables": int32([0, 1])}, r"^block_tables: .* batch 2, got \(2,\)"),
    ],
)
def test_calls_in_a_window_are_refused(change: dict[str, Any], match: str) -> None:
    usual: dict[str, Any] = {
        "query": torch.zeros(2, 1, 64, 1088).bfloat16(),
        "kv_cache": torch.zeros(4, 64, 1088).bfloat16(),
        "workspace_buffer": torch.zeros(0, dtype=torch.uint8),
        "block_tables": int32([[0, 1], [2, 3]]),
        "seq_lens": int32([3, 70]),
        "window_left": 512,
        "sm_scale": SCALE,
    }
    with pytest.raises(ValueError, match=match):
        mla.batch_decode_with_kv_cache_mla_swa(**usual | change)
