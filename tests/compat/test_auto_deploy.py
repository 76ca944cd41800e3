# SPDX-License-Identifier: Apache-2.0
"""AutoDeploy's operations of attention on the CPU, in the shapes of its own tests."""

from __future__ import annotations

import inspect
import subprocess
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.compat import auto_deploy
from cumla.compat.auto_deploy import functions

torch = pytest.importorskip("torch")

from tests.compat.deploy_cases import (  # noqa: E402
    Batch,
    Sizes,
    assert_agree,
    contiguous,
    expected,
    lengths_of,
    paged,
    table_of,
    turned,
)
from tests.emulator import emulated_gpu  # noqa: E402
from tests.selection import some  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
COLUMNS = [(16, 0), (32, 0), (96, 0), (32, 16), (64, 128)]
GROUPS = [1, 4]
BOTH = [False, True]
EMPTY = torch.empty(0)


@pytest.fixture(autouse=True)
def _ready() -> None:
    torch.manual_seed(0)


def int32(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


def table(rows: int, columns: int = 16, dtype: Any = torch.float32) -> Any:
    """Any numbers: as AutoDeploy's tests have them."""
    return torch.rand(rows, columns // 2, 2).to(dtype)


# --- names and arguments --------------------------------------------------------------------------

OF_AUTO_DEPLOY = {
    "scaled_dot_product_attention": (
        "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None"
    ),
    "fused_mha_with_cache": "q k v input_pos k_cache v_cache freqs_cis",
    "fused_flattened_mha_with_cache": (
        "q k v seq_len input_pos cache_loc seq_start k_cache v_cache freqs_cis"
    ),
    "fused_flattened_mha_with_cache_rope_fusion": (
        "q k v input_pos cache_loc seq_len seq_start k_cache v_cache freqs_cis"
    ),
    "fused_mha_with_paged_cache": (
        "q k v input_pos cache_loc seq_len seq_start page_table max_seq_len k_cache v_cache "
        "freqs_cis"
    ),
    "prepare_fused_mha_metadata": "input_ids seq_len input_pos cache_loc pages_per_seq page_size",
    "apply_rope_with_input_pos": "x freqs_cis input_pos layout",
    "apply_rope_on_flattened_inputs": "x freqs_cis input_pos seq_lens seq_start_indices",
}
OWN = {
    "fused_flattened_mha_with_paged_cache": (
        "q k v kv_lens qo_indptr kv_indptr kv_indices k_cache v_cache freqs_cis"
    ),
    "prepare_paged_mha_metadata": "input_ids seq_len input_pos cache_loc pages_per_seq page_size",
}


@pytest.mark.parametrize(("name", "parameters"), (OF_AUTO_DEPLOY | OWN).items())
def test_names_and_signatures(name: str, parameters: str) -> None:
    """Those of the functions, and those of the operations, which their schemas tell."""
    found = inspect.signature(getattr(auto_deploy, name)).parameters.values()
    given = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in found]
    assert " ".join(given) == parameters
    auto_deploy.register()
    schema = getattr(torch.ops.cumla, name).default._schema
    assert [a.name for a in schema.arguments] == [p.name for p in found]
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == {p.name for p in found} & {"k_cache", "v_cache"}


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(  # here and below every pair of values, of all with --exhaustive
    ("rotates", "flat", "group", "dtype", "lengths"),
    some(product(BOTH, BOTH, GROUPS, DTYPES, [(1, 0), (8, 0), (1, 7), (5, 3)]), 5),
)
def test_requests_of_one_length(
    rotates: bool, flat: bool, group: int, dtype: Any, lengths: tuple[int, int]
) -> None:
    seqlen, history = lengths
    sizes = Sizes(8, 8 // group, dtype=dtype)
    batch = Batch.make(sizes, [seqlen] * 2, [history] * 2, "cpu")
    k_cache, v_cache, cache_loc, slots = contiguous(batch, 2, 8)
    slots = slots._replace(rows=[torch.arange(8), 8 + torch.arange(8)])  # whatever cache_loc is
    assert len(cache_loc) == 2
    freqs_cis = table(8) if rotates else None
    wanted = expected(batch, slots, freqs_cis).view(2, seqlen, -1)
    rows = [
        r.view(2, seqlen, -1) if flat else r.view(2, seqlen, -1, sizes.columns)
        for r in (batch.q, batch.k, batch.v)
    ]
    found = auto_deploy.fused_mha_with_cache(*rows, batch.input_pos, k_cache, v_cache, freqs_cis)
    assert found.dtype == dtype
    assert_agree(found, wanted, (k_cache, v_cache), slots)


@pytest.mark.parametrize(
    ("rotates", "dtype", "batch_size", "group", "max_seq_len", "share"),
    some(product(BOTH, DTYPES[::2], [1, 16], GROUPS, [0, 1, 16], [0.0, 0.5, 1.0]), 7),
)
def test_flattened(
    rotates: bool, dtype: Any, batch_size: int, group: int, max_seq_len: int, share: float
) -> None:
    lengths = lengths_of(batch_size, max_seq_len, share)
    batch = Batch.make(Sizes(8, 8 // group, dtype=dtype), *lengths, "cpu")
    most = 2 * (max_seq_len + 1)
    k_cache, v_cache, cache_loc, slots = contiguous(batch, 2 * batch_size, most)
    freqs_cis = table(most) if rotates else None
    wanted = expected(batch, slots, freqs_cis)
    lists = batch.seq_len, batch.input_pos, cache_loc, batch.seq_start
    found = auto_deploy.fused_flattened_mha_with_cache(
        batch.q, batch.k, batch.v, *lists, k_cache, v_cache, freqs_cis
    )
    assert_agree(found, wanted, (k_cache, v_cache), slots)
    lists = batch.input_pos, cache_loc, batch.seq_len, batch.seq_start
    again = auto_deploy.fused_flattened_mha_with_cache_rope_fusion(
        batch.q, batch.k, batch.v, *lists, k_cache, v_cache, freqs_cis
    )
    assert torch.equal(again, found)  # the caches are written to once more, with the same


@pytest.mark.parametrize(
    ("dtype", "batch_size", "group", "max_seq_len", "share"),
    some(product(DTYPES[::2], [1, 16], GROUPS, [0, 1, 16], [0.0, 0.5, 1.0]), 5),
)
def test_paged(dtype: Any, batch_size: int, group: int, max_seq_len: int, share: float) -> None:
    """Chunks of a prefill, too, begin after any history: inside a page, or at its end."""
    lengths = lengths_of(batch_size, max_seq_len, share)
    batch = Batch.make(Sizes(8, 8 // group, dtype=dtype), *lengths, "cpu")
    k_cache, v_cache, pages, slots = paged(batch, 4)
    wanted = expected(batch, slots)
    cache_loc = torch.randperm(2 * batch_size)[:batch_size].to(torch.int32)
    page_table = table_of(pages, "cpu")
    spread = torch.full((2 * batch_size, page_table.shape[1]), -1, dtype=torch.int32)
    spread[cache_loc.long()] = page_table
    lists = batch.input_pos, cache_loc, batch.seq_len, batch.seq_start
    found = auto_deploy.fused_mha_with_paged_cache(
        batch.q, batch.k, batch.v, *lists, spread, 2 * (max_seq_len + 1), k_cache, v_cache, None
    )
    assert_agree(found, wanted, (k_cache, v_cache), slots)


MIXED = [36, 44, 12, 1, 1, 0, 4, 4, 3, 7], [0, 3, 17, 31, 32, 5, 4, 8, 5, 1]
"""Chunks that begin inside a page of 4 tokens, at its end, and end there; a decoding one, too."""


@pytest.mark.parametrize(
    ("columns", "dtype", "rotary", "form"),
    some(product(COLUMNS, DTYPES, [None, 1.0, 0.5], ["contiguous", "table", "list"]), 7),
)
def test_a_mix(columns: tuple[int, int], dtype: Any, rotary: float | None, form: str) -> None:
    batch = Batch.make(Sizes(6, 2, *columns, dtype=dtype), *MIXED, "cpu")
    freqs_cis = EMPTY
    if rotary is not None:
        freqs_cis = table(100, int(rotary * columns[0]) // 16 * 16 or 16, torch.bfloat16)
    rows = batch.q, batch.k, batch.v
    if form == "contiguous":
        k_cache, v_cache, cache_loc, slots = contiguous(batch, 13, 64)
        wanted = expected(batch, slots, freqs_cis)
        lists = batch.seq_len, batch.input_pos, cache_loc, batch.seq_start
        found = auto_deploy.fused_flattened_mha_with_cache(
            *rows, *lists, k_cache, v_cache, freqs_cis
        )
    else:
        k_cache, v_cache, pages, slots = paged(batch, 4)
        wanted = expected(batch, slots, freqs_cis)
        if form == "table":
            numbers = torch.arange(len(pages), dtype=torch.int32)
            lists = batch.input_pos, numbers, batch.seq_len, batch.seq_start
            found = auto_deploy.fused_mha_with_paged_cache(
                *rows, *lists, table_of(pages, "cpu"), 0, k_cache, v_cache, freqs_cis
            )
        else:
            info = auto_deploy.SequenceInfo(96, len(pages), 4)
            info.nest_sequences([[7] * n for n in MIXED[0]])
            info.update_pos(MIXED[1], reset=True)
            info.assign_cache_loc(pages)
            metadata = auto_deploy.prepare_paged_mha_metadata(*info.args, info.page_size)
            found = auto_deploy.fused_flattened_mha_with_paged_cache(
                *rows, *metadata, k_cache, v_cache, freqs_cis
            )
    assert found.shape == (1, sum(MIXED[0]), 6 * batch.sizes.value_columns)
    assert_agree(found, wanted, (k_cache, v_cache), slots)


@pytest.mark.parametrize("form", ["contiguous", "table", "list"])
def test_a_batch_that_decodes_with_padding(form: str) -> None:
    """Padded requests write nothing and give 0, though their positions and pages are others'."""
    batch = Batch.make(Sizes(), [1, 1, 1, 1], [3, 4, 0, 6], "cpu")
    rows = [r.transpose(0, 1) for r in (batch.q, batch.k, batch.v)]  # (4, 1, ...)
    live = Batch(batch.sizes, *(r[:, :2] for r in batch[1:4]), int32(1, 1), int32(3, 4))
    seq_len, input_pos = int32(1, 1, 0, 0), int32(3, 4, 3, 4)
    more = int32(0, 0, 0)  # metadata of requests that the batch does not have
    seq_len, input_pos = torch.cat([seq_len, more]), torch.cat([input_pos, more])
    freqs_cis = table(8)
    if form == "contiguous":
        k_cache, v_cache, cache_loc, slots = contiguous(live, 2, 8)
        wanted = expected(live, slots, freqs_cis)
        lists = seq_len, input_pos, torch.cat([cache_loc, cache_loc, more]), seq_len.cumsum(0)
        found = auto_deploy.fused_flattened_mha_with_cache(
            *rows, *lists, k_cache, v_cache, freqs_cis
        )
    else:
        k_cache, v_cache, pages, slots = paged(live, 4)
        wanted = expected(live, slots, freqs_cis)
        if form == "table":
            lists = input_pos, torch.cat([int32(0, 1, 0, 1), more]), seq_len, seq_len.cumsum(0)
            found = auto_deploy.fused_mha_with_paged_cache(
                *rows, *lists, table_of(pages, "cpu"), 8, k_cache, v_cache, freqs_cis
            )
        else:
            flat = int32(*[page for some in [*pages, *pages] for page in some])
            counts = int32(*map(len, [*pages, *pages]), 0, 0, 0)
            metadata = auto_deploy.prepare_paged_mha_metadata(
                torch.zeros(4, 1), seq_len, input_pos, flat, counts, 4
            )
            found = auto_deploy.fused_flattened_mha_with_paged_cache(
                *rows, *metadata, k_cache, v_cache, freqs_cis
            )
    assert found.shape == (4, 1, 8 * 16)
    assert not found[2:].any()
    assert_agree(found[:2].transpose(0, 1), wanted, (k_cache, v_cache), slots)


def test_one_token_may_be_that_of_any_request() -> None:
    batch = Batch.make(Sizes(), [0, 1, 0], [2, 3, 1], "cpu")
    k_cache, v_cache, cache_loc, slots = contiguous(batch, 3, 8)
    wanted = expected(batch, slots)
    lists = auto_deploy.prepare_fused_mha_metadata(
        torch.zeros(1, 1), batch.seq_len, batch.input_pos, cache_loc, int32(1, 1, 1), 8
    )
    found = auto_deploy.fused_flattened_mha_with_cache(
        batch.q, batch.k, batch.v, *lists, k_cache, v_cache, None
    )
    assert_agree(found, wanted, (k_cache, v_cache), slots)


def test_what_has_no_place_is_not_written() -> None:
    """Slots and rows of a table that do not exist, and positions after the end of a slot."""
    batch = Batch.make(Sizes(), [2, 2, 2], [0, 0, 7], "cpu")
    k_cache, v_cache = torch.zeros(2, 3, 8, 2, 16).half()
    page_table = int32(0, 1)[:, None]
    lists = batch.input_pos, int32(-1, 2, 1), batch.seq_len, batch.seq_start
    auto_deploy.fused_mha_with_paged_cache(
        batch.q, batch.k, batch.v, *lists, page_table, 8, k_cache, v_cache, None
    )
    for cache, rows in ((k_cache, batch.k), (v_cache, batch.v)):
        assert torch.equal(cache[1, 7], rows[0, 4].view(2, 16))
        cache[1, 7] = 0
        assert not cache.any()


def test_plain_attention_is_that_of_pytorch() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 16).half()
    given = {"is_causal": True, "scale": 0.3}
    found = auto_deploy.scaled_dot_product_attention(q, k[..., :3, :], v[..., :3, :], **given)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k[..., :3, :], v[..., :3, :], **given
    )
    assert torch.equal(found, wanted)


# --- the kernels ----------------------------------------------------------------------------------


def on_host(tensor: Any) -> Any:
    """See a tensor as an array, with the memory around it."""
    size = tensor.element_size()
    whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // size,), (1,), 0).numpy()
    strides = [size * stride for stride in tensor.stride()]
    return np.ndarray(tensor.shape, whole.dtype, whole, size * tensor.storage_offset(), strides)


def by_kernels(cupy: Any, function: Any) -> Any:
    """Call with copies on the emulated GPU, and copy what is written back."""

    def call(*arguments: Any, **options: Any) -> Any:
        written = [*arguments[2:4], options.get("q_out")] if function is APPEND else []

        def there(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(there, value))
            return cupy.like(on_host(value)) if isinstance(value, torch.Tensor) else value

        arrays, named = [*map(there, arguments)], {n: there(x) for n, x in options.items()}
        results = function(*arrays, **named)
        for tensor, array in zip(written, [*arrays[2:4], named.get("q_out")], strict=False):
            if tensor is not None:
                tensor.copy_(torch.from_numpy(array.get()))
        if results is None:
            return None
        return cumla.AttentionState(*(torch.from_numpy(array.get()) for array in results))

    return call


APPEND = cumla.append_kv_cache


@pytest.mark.parametrize(
    ("columns", "dtype", "rotary"),
    [
        (16, torch.float16, 0),
        (16, torch.float16, 16),
        pytest.param(96, torch.float16, 16, marks=pytest.mark.exhaustive),
        pytest.param(96, torch.float32, 0, marks=pytest.mark.exhaustive),
        pytest.param(96, torch.float32, 16, marks=pytest.mark.exhaustive),
    ],
)
def test_the_kernels_give_the_same(
    columns: int, dtype: Any, rotary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mix in pages, and a batch that decodes, through the kernels' own text on the CPU."""
    with emulated_gpu() as cupy:
        monkeypatch.setattr(functions, "append_kv_cache", by_kernels(cupy, APPEND))
        monkeypatch.setattr(functions, "attention", by_kernels(cupy, cumla.attention))
        freqs_cis = table(64, rotary) if rotary else None
        batch = Batch.make(Sizes(6, 2, columns, dtype=dtype), [9, 1, 0, 5], [3, 17, 5, 40], "cpu")
        k_cache, v_cache, pages, slots = paged(batch, 4)
        wanted = expected(batch, slots, freqs_cis)
        lists = batch.input_pos, int32(0, 1, 2, 3), batch.seq_len, batch.seq_start
        found = auto_deploy.fused_mha_with_paged_cache(
            *(batch.q, batch.k, batch.v, *lists, table_of(pages, "cpu"), 0),
            *(k_cache, v_cache, freqs_cis),
        )
        assert_agree(found, wanted, (k_cache, v_cache), slots)

        batch = Batch.make(Sizes(6, 2, columns, dtype=dtype), [1, 1], [3, 30], "cpu")
        k_cache, v_cache, cache_loc, slots = contiguous(batch, 5, 40)
        wanted = expected(batch, slots, freqs_cis)
        rows = [r.transpose(0, 1) for r in (batch.q, batch.k, batch.v)]
        lists = batch.seq_len, batch.input_pos, cache_loc, batch.seq_start
        found = auto_deploy.fused_flattened_mha_with_cache(
            *rows, *lists, k_cache, v_cache, freqs_cis
        )
        assert_agree(found.transpose(0, 1), wanted, (k_cache, v_cache), slots)


# --- metadata, rotation ---------------------------------------------------------------------------


def test_metadata() -> None:
    seq_len, input_pos, cache_loc = int32(3, 1, 0, 0), int32(5, 6, 7, 8), int32(9, 8, 7, 6, 5)
    rest = int32(1, 1, 1, 1), 16
    decoding = auto_deploy.prepare_fused_mha_metadata(
        torch.zeros(2, 1), int32(1, 1, 0, 0), input_pos, cache_loc, *rest
    )
    assert [rows.tolist() for rows in decoding] == [[1, 1], [5, 6], [9, 8], [0, 1]]
    mixed = auto_deploy.prepare_fused_mha_metadata(
        torch.zeros(1, 4), seq_len, input_pos, cache_loc, *rest
    )
    assert [rows.tolist() for rows in mixed] == [
        [3, 1, 0, 0],
        [5, 6, 7, 8],
        [9, 8, 7, 6],
        [0, 3, 4, 4],
    ]
    assert {rows.dtype for rows in (*decoding, *mixed)} == {torch.int32}
    for rows in mixed:
        rows.zero_()
    assert seq_len.tolist() == [3, 1, 0, 0]  # new tensors


@pytest.mark.parametrize("layout", ["bsnd", "bnsd", "sbnd", "snbd", "nbsd", "nsbd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rotation_of_every_layout(layout: str, dtype: Any) -> None:
    """Rows whose position has none in the table stay as they are."""
    freqs_cis = table(20, 32, torch.float16)
    plain = torch.randn(3, 5, 2, 32).to(dtype)
    x = torch.einsum(f"bsnd->{layout}", plain).contiguous()
    found = auto_deploy.apply_rope_with_input_pos(x, freqs_cis, int32(0, 13, 17), layout)
    assert found.is_contiguous()
    back = torch.einsum(f"{layout}->bsnd", found)
    for one, rows, first in zip(back, plain, (0, 13, 17), strict=True):
        known = min(5, 20 - first)
        wanted = torch.cat([turned(rows[:known], freqs_cis, first), rows[known:]])
        torch.testing.assert_close(one, wanted, rtol=8e-3, atol=8e-3)
    if layout == "bsnd":
        none = auto_deploy.apply_rope_with_input_pos(x, freqs_cis, None, layout)
        zeros = auto_deploy.apply_rope_with_input_pos(x, freqs_cis, int32(0, 0, 0), layout)
        assert torch.equal(none, zeros)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rotation_of_flattened_rows(dtype: Any) -> None:
    lengths, history = [3, 0, 1, 4], [2, 9, 0, 11]
    x, freqs_cis = torch.randn(8, 2, 48).to(dtype), table(16, 32)  # the last 32 of 48 columns
    starts = int32(*np.cumsum([0, *lengths[:-1]]))
    found = auto_deploy.apply_rope_on_flattened_inputs(
        x, freqs_cis, int32(*history), int32(*lengths), starts
    )
    pieces = zip(x.split(lengths), history, strict=True)
    wanted = torch.cat([turned(rows, freqs_cis, first) for rows, first in pieces])
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


# --- operations of PyTorch ------------------------------------------------------------------------


def calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of each operation."""
    batch = Batch.make(Sizes(columns_v=32), [2, 0, 1, 3], [3, 1, 0, 2], "cpu")
    rows = batch.q, batch.k, batch.v
    k_cache, v_cache, cache_loc, _ = contiguous(batch, 5, 8)
    caches = k_cache, v_cache, table(8)
    k_pages, v_pages, pages, _ = paged(batch, 2)
    start = batch.seq_start.to(torch.int32)
    heads = [torch.randn(5, 1, n, c).half() for n, c in ((8, 16), (2, 16), (2, 32))]
    flat = int32(*[page for some in pages for page in some])
    lists = batch.input_pos, cache_loc, batch.seq_len, start
    sequences = batch.seq_len, batch.input_pos, flat, int32(*map(len, pages)), 2
    metadata = auto_deploy.prepare_paged_mha_metadata(torch.zeros(1, 6), *sequences)
    return {
        "scaled_dot_product_attention": (*torch.randn(3, 1, 2, 4, 16),),
        "fused_mha_with_cache": (*heads, int32(0, 1, 2, 3, 4), *caches),
        "fused_flattened_mha_with_cache": (
            *(*rows, batch.seq_len, batch.input_pos, cache_loc, start, *caches),
        ),
        "fused_flattened_mha_with_cache_rope_fusion": (*rows, *lists, *caches),
        "fused_mha_with_paged_cache": (
            *(*rows, batch.input_pos, int32(0, 1, 2, 3), batch.seq_len, start),
            *(table_of(pages, "cpu"), 8, k_pages, v_pages, None),
        ),
        "fused_flattened_mha_with_paged_cache": (*rows, *metadata, k_pages, v_pages, table(8)),
        "prepare_fused_mha_metadata": (torch.zeros(1, 6), *sequences),
        "prepare_paged_mha_metadata": (torch.zeros(1, 6), *sequences),
        "apply_rope_with_input_pos": (*(heads[0].transpose(0, 1), table(8), int32(3), "bsnd"),),
        "apply_rope_on_flattened_inputs": (
            *(rows[0][0].view(6, 8, 16), table(8), batch.input_pos, batch.seq_len, start),
        ),
    }


@pytest.mark.parametrize("name", some(OF_AUTO_DEPLOY | OWN, 3))
def test_pytorch_finds_an_operation_right(name: str) -> None:
    """What it writes to, the shapes of its results, and what torch.compile makes of it."""
    auto_deploy.register()
    found = torch.library.opcheck(getattr(torch.ops.cumla, name).default, calls()[name])
    assert set(found.values()) == {"SUCCESS"}


def test_an_operation_in_a_compiled_function() -> None:
    """One that is written to between two reads of the cache keeps its place."""
    auto_deploy.register()
    arguments = calls()["fused_flattened_mha_with_cache"]
    *others, k_cache, v_cache, freqs_cis = arguments

    def step(k_cache: Any, v_cache: Any) -> Any:
        before = k_cache.sum() + v_cache.sum()
        out = torch.ops.cumla.fused_flattened_mha_with_cache(*others, k_cache, v_cache, freqs_cis)
        return out, before, k_cache.sum() + v_cache.sum()

    eager = step(k_cache.clone(), v_cache.clone())
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    found = compiled(k_cache.clone(), v_cache.clone())
    assert eager[1] != eager[2]
    for one, other in zip(found, eager, strict=True):
        assert torch.equal(one, other)


class Attend(torch.nn.Module):
    """A layer whose keys and values are its queries, with caches as AutoDeploy makes them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(4, 8, 1, 16).half())
        self.register_buffer("embedding", torch.randn(9, 16).half())
        self.register_buffer("freqs_cis", table(16))

    def forward(self, input_ids: Any, *sequences: Any) -> Any:
        x, ops = self.embedding[input_ids], torch.ops.cumla
        metadata = ops.prepare_fused_mha_metadata(input_ids, *sequences, 8)
        caches = self.k_cache, self.v_cache, self.freqs_cis
        return ops.fused_flattened_mha_with_cache(x, x, x, *metadata, *caches)


def test_an_exported_layer_serves_other_batches() -> None:
    auto_deploy.register()
    info = auto_deploy.SequenceInfo(8, 4)
    info.nest_sequences([[1] * 4] * 2)
    info.input_ids = info.input_ids.view(2, 4)  # the axes of a plain batch
    shapes = info.dynamic_shapes
    layer = Attend()
    program = torch.export.export(layer, (*info.args,), dynamic_shapes=(shapes[0], shapes[1:]))
    exported = program.module()
    for ids in ([[1, 2, 3], [4, 5]], [[1, 2, 3, 4, 5, 6]]):
        info.nest_sequences(ids)
        wanted = layer(*info.args)
        assert torch.equal(exported(*info.args), wanted)
        assert wanted.any()


def test_other_namespaces() -> None:
    auto_deploy.register("test_attention", "test_rope")
    auto_deploy.register("test_attention", "test_rope")  # does nothing
    arguments = calls()
    for namespace, name in (
        ("test_attention", "fused_mha_with_cache"),
        ("test_rope", "apply_rope_on_flattened_inputs"),
    ):
        operation = getattr(getattr(torch.ops, namespace), name)
        assert torch.equal(
            operation(*arguments[name]), getattr(auto_deploy, name)(*arguments[name])
        )
    assert not hasattr(torch.ops.test_rope, "fused_mha_with_cache")


def test_a_namespace_that_is_taken() -> None:
    library = torch.library.Library("test_taken", "FRAGMENT")
    library.define("fused_mha_with_paged_cache(Tensor q) -> Tensor")
    with pytest.raises(ValueError, match=r"^namespace: .*fused_mha_with_paged_cache.*test_taken"):
        auto_deploy.register("test_taken")
    assert not hasattr(torch.ops.test_taken, "fused_mha_with_cache")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from cumla.compat import auto_deploy
for make in (auto_deploy.register, auto_deploy.SequenceInfo):
    try:
        make()
    except ImportError as error:
        print(error)
"""


def test_without_pytorch() -> None:
    """The module can be imported; what needs it says so."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == second
    assert "needs PyTorch" in first
    assert "pip install torch" in first


# --- descriptors ----------------------------------------------------------------------------------


def info_of(rope_dim: int | None = None, **config: Any) -> auto_deploy.AttentionInfo:
    return auto_deploy.AttentionInfo(
        *(8, 2, 32, torch.float16),
        auto_deploy.CacheConfig(),
        auto_deploy.PositionalEmbeddingConfig(**config),
        rope_dim,
    )


@pytest.mark.parametrize("name", ["cumla", "cumla_paged"])
@pytest.mark.parametrize("rope_dim", [None, 16])
def test_a_descriptor_serves_a_prefill_and_then_decodes(name: str, rope_dim: int | None) -> None:
    """As AutoDeploy calls it, from what the descriptor gives alone."""
    descriptor = auto_deploy.AttentionRegistry.get(name)
    assert descriptor.is_paged() == (name == "cumla_paged")
    info = info_of(rope_dim, mode="rope")
    si = auto_deploy.SequenceInfo(32, 3, 4 if descriptor.is_paged() else 0)
    attend, qkv = descriptor.get_attention_op()
    prepare, results = descriptor.get_prepare_metadata_op()
    caches = descriptor.get_cache_initializers(lambda: info)
    buffers = descriptor.get_global_buffer_initializers(lambda: info)
    assert [*caches] == ["k_cache", "v_cache"]
    assert descriptor.get_constants(info) == []
    (key,) = buffers
    assert key == "freqs_cis_rope_10000_0_1_0" + (f"_{rope_dim}" if rope_dim else "")
    k_cache, v_cache = (make(si).zero_() for make in caches.values())
    (freqs_cis,) = (make(si) for make in buffers.values())
    assert freqs_cis.shape == (64, (rope_dim or 32) // 2, 2)
    pages = [[5, 9, 2], [11], [0, 3]] if descriptor.is_paged() else [[1], [2], [0]]
    si.assign_cache_loc(pages)
    size = si.page_size
    inside = torch.arange(size)
    rows = [torch.cat([page * size + inside for page in some]) for some in pages]

    history = [0, 0, 0]
    slots: Any = None
    for lengths in ([7, 2, 3], [1, 1, 1], [1, 1, 4]):
        si.nest_sequences([[1] * n for n in lengths])
        batch = Batch.make(Sizes(8, 2, 32), lengths, history, "cpu")
        if slots is None:
            _, _, _, slots = contiguous(batch, k_cache.shape[0], size)
            slots = slots._replace(rows=rows)
            slots.k_cache.zero_(), slots.v_cache.zero_()
        wanted = expected(batch, slots, freqs_cis)
        metadata = prepare(*si.args, si.page_size)
        assert len(metadata) == results
        lead = si.input_ids.shape
        given = [x.view(*lead, -1) for x in (batch.q, batch.k, batch.v)]
        assert len(given) == qkv
        found = attend(*given, *metadata, k_cache, v_cache, freqs_cis)
        parts = si.unnest_sequences(found)
        assert [len(part) for part in parts] == lengths
        assert_agree(torch.cat(parts)[None], wanted, (k_cache, v_cache), slots)
        si.update_pos(lengths)
        history = [a + b for a, b in zip(history, lengths, strict=True)]
    assert si.input_positions[:3] == history


def test_the_table_of_a_descriptor() -> None:
    make = auto_deploy.CumlaAttention.get_global_buffer_initializers(
        lambda: info_of(mode="rope", rope_theta=500000.0)
    )
    (freqs_cis,) = (f(auto_deploy.SequenceInfo(8)) for f in make.values())
    angles = np.arange(16)[:, None] * 500000.0 ** (-np.arange(16) / 16)
    wanted = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    np.testing.assert_allclose(freqs_cis.numpy(), wanted, atol=1e-6)
    (none,) = auto_deploy.CumlaAttention.get_global_buffer_initializers(info_of).values()
    assert none(auto_deploy.SequenceInfo(8)).numel() == 0


def test_caches_of_a_descriptor() -> None:
    info = info_of()
    info.cache_config.dtype = torch.bfloat16
    paged_info = auto_deploy.SequenceInfo(32, 4, 8, max_num_tokens=50)
    make = auto_deploy.CumlaPagedAttention.get_cache_initializers(lambda: info)["v_cache"]
    assert make(paged_info).shape == (9, 8, 2, 32)
    assert make(paged_info).dtype == torch.bfloat16
    make = auto_deploy.CumlaAttention.get_cache_initializers(lambda: info)["k_cache"]
    assert make(auto_deploy.SequenceInfo(32, 4)).shape == (4, 32, 2, 32)
    with pytest.raises(ValueError, match=r"^page_size: .*cumla_paged"):
        make(paged_info)


def test_the_registry() -> None:
    registry = auto_deploy.AttentionRegistry
    assert registry.has("cumla") and registry.has("cumla_paged") and not registry.has("triton")
    with pytest.raises(ValueError, match="needs one of cumla, cumla_paged, got 'triton'"):
        registry.get("triton")
    with pytest.raises(ValueError, match="needs a name that is free, got 'cumla'"):
        registry.register("cumla")(auto_deploy.CumlaAttention)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"mode": "alibi"}, "mode: needs None or 'rope'"),
        ({"mode": "rope", "rope_theta": 0.0}, "rope_theta: needs a number above 0"),
        ({"mode": "rope", "rope_scale": 2.0}, "rope_scale: needs 1.0"),
    ],
)
def test_positions_that_do_not_exist(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        auto_deploy.PositionalEmbeddingConfig(**config)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"q": [1, 2]}, TypeError, "q: needs a PyTorch tensor, got builtins.list"),
        ({"q": torch.zeros(6, 128).half()}, ValueError, "q: needs axes"),
        ({"q": torch.zeros(1, 6, 100).half()}, ValueError, "q: needs a multiple of the 16 columns"),
        (
            {"q": torch.zeros(1, 6, 48).half()},
            ValueError,
            "q: needs a multiple of the 2 heads of k",
        ),
        ({"q": torch.zeros(1, 5, 64).half()}, ValueError, "k: needs the tokens of q"),
        ({"q": torch.zeros(1, 6, 64)}, TypeError, "k: needs the dtype of q, torch.float32"),
        ({"q": torch.zeros(1, 6, 2, 8).half()}, ValueError, "k: needs the columns of a head of q"),
        ({"v": torch.zeros(1, 5, 64).half()}, ValueError, "v: needs the tokens and heads of k"),
        (
            {"v": torch.zeros(1, 6, 32).bfloat16()},
            TypeError,
            "v: needs the cache's dtype float16, got bfloat16",
        ),
        (
            {"k_cache": torch.zeros(5, 8, 2, 16).bfloat16()},
            TypeError,
            "k_cache: needs float16",
        ),
        (
            {name: torch.zeros(5, 8, 2, n) for name, n in (("k_cache", 16), ("v_cache", 32))},
            TypeError,
            "k: needs the cache's dtype float32, got float16",
        ),
        (
            {"k_cache": torch.zeros(5, 8, 2, 16).to(torch.float8_e4m3fn)},
            TypeError,
            "k_cache: needs q's dtype, torch.float16, got torch.float8_e4m3fn",
        ),
        (
            {"v_cache": torch.zeros(5, 8, 2, 32).byte()},
            TypeError,
            "v_cache: needs q's dtype, torch.float16, got torch.uint8",
        ),
        ({"seq_len": int32(2, 0, 1)}, ValueError, "seq_len: needs a number for each of the 4"),
        ({"seq_start": int32(0, 2, 2)}, ValueError, "seq_start: needs a number for each of the 4"),
        *(
            ({name: torch.zeros(4)}, TypeError, f"{name}: needs int32 or int64, got float32")
            for name in ("seq_len", "input_pos", "cache_loc", "seq_start")
        ),
        ({"k_cache": torch.zeros(5, 2, 16).half()}, ValueError, "k_cache: needs axes"),
        ({"v_cache": torch.zeros(5, 7, 2, 32).half()}, ValueError, "v_cache: needs as many pages"),
        ({"input_pos": int32(1)}, ValueError, "input_pos: needs"),
        ({"cache_loc": int32(1)}, ValueError, "cache_loc: needs"),
        ({"cache_loc": int32(1)[0]}, ValueError, "cache_loc: needs axes"),
        ({"freqs_cis": torch.zeros(8, 16)}, ValueError, "freqs_cis: needs axes"),
        ({"freqs_cis": torch.zeros(8, 8, 3)}, ValueError, "freqs_cis: needs shape"),
        ({"freqs_cis": torch.zeros(8, 16, 2)}, ValueError, "freqs_cis: .*at most 16"),
        ({"freqs_cis": torch.zeros(8, 4, 2)}, ValueError, "freqs_cis: .*a multiple of 16"),
        ({"freqs_cis": torch.zeros(8, 8, 2).double()}, TypeError, "freqs_cis: needs float32"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], kind: Any, says: str) -> None:
    name = "fused_flattened_mha_with_cache"
    arguments = dict(zip(OF_AUTO_DEPLOY[name].split(), calls()[name], strict=True)) | changes
    before = arguments["v_cache"].clone()
    with pytest.raises(kind, match=f"^{says}"):
        functions.fused_flattened_mha_with_cache(**arguments)
    assert torch.equal(arguments["v_cache"], before)


def test_requests_without_a_slot() -> None:
    q, k_cache, v_cache = torch.ones(3, 1, 32).half(), *torch.zeros(2, 2, 8, 2, 16).half()
    with pytest.raises(ValueError, match=r"^k_cache: needs a slot for each of the 3 requests"):
        auto_deploy.fused_mha_with_cache(q, q, q, int32(0, 0, 0), k_cache, v_cache, None)
    assert not k_cache.any()


@pytest.mark.parametrize("name", ["prepare_fused_mha_metadata", "prepare_paged_mha_metadata"])
def test_metadata_of_floats(name: str) -> None:
    input_ids, seq_len, *rest = calls()[name]
    with pytest.raises(TypeError, match=r"^seq_len: needs int32 or int64, got float32"):
        getattr(auto_deploy, name)(input_ids, seq_len.float(), *rest)


def test_rotations_by_floats() -> None:
    x, table_, *lists = calls()["apply_rope_on_flattened_inputs"]
    with pytest.raises(TypeError, match=r"^input_pos: needs int32 or int64"):
        auto_deploy.apply_rope_on_flattened_inputs(x, table_, lists[0].float(), *lists[1:])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layout": "bhsd"}, "layout: needs the letters"),
        ({"layout": "dsnb"}, "layout: needs the letters"),
        ({"x": torch.zeros(2, 3, 16).half()}, "x: needs axes"),
        ({"input_pos": int32(0, 1, 2)}, r"input_pos: needs shape \(2,\)"),
        ({"freqs_cis": torch.zeros(8, 8)}, "freqs_cis: needs axes"),
    ],
)
def test_rotations_that_do_not_fit(changes: dict[str, Any], says: str) -> None:
    x = torch.zeros(2, 3, 2, 16).half()
    arguments = {"x": x, "freqs_cis": table(8), "input_pos": None, "layout": "bsnd"}
    with pytest.raises(ValueError, match=f"^{says}"):
        auto_deploy.apply_rope_with_input_pos(**{**arguments, **changes})


@pytest.mark.parametrize("name", OF_AUTO_DEPLOY | OWN)
def test_nothing_waits_for_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No method that hands a number or a copy to the host is called."""
    arguments = calls()[name]

    def wait(self: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError("waits for the GPU")

    def append(*arrays: Any, q: Any = None, q_out: Any = None, **__: Any) -> None:
        assert len(arrays) == 4

    monkeypatch.setattr(functions, "append_kv_cache", append)
    monkeypatch.setattr(functions, "apply_rope", lambda x, *_, **__: (x, None))
    state = cumla.AttentionState
    monkeypatch.setattr(functions, "attention", lambda q, *_, **__: state(q.clone(), None))
    for method in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, method, wait)
    assert getattr(auto_deploy, name)(*arguments) is not None
