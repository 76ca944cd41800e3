# SPDX-License-Identifier: Apache-2.0
"""`cumla.attention` and its plan with a bias: what they compute on the CPU, against the rule of
each bias, what they refuse, and biases in the frameworks' programs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import cumla
from tests.calls import BF16, int32, keys_in_pages, refused
from tests.fake_cuda import FakeCuPy
from tests.mha.bias_cases import attend, check, hiding, make, poisoned, samples
from tests.mha.test_attention_mask import Sample

BIAS = cumla.AttentionBias


@pytest.mark.parametrize("sample", samples(72), ids=lambda s: f"{s[0]}-{s[1].seed}")
def test_grid(sample: tuple[str, Sample]) -> None:
    """Elements of tables that no query uses are NaN."""
    biased = poisoned(make(*sample))
    got = cumla.attention(**biased.problem.given, **biased.options, bias=biased.bias())
    check(biased, got, sample[1].dtype)


@pytest.mark.parametrize("sample", samples(72)[::5], ids=lambda s: f"{s[0]}-{s[1].seed}")
def test_plans(sample: tuple[str, Sample]) -> None:
    """The bits of a call."""
    biased = make(*sample)
    given, bias = biased.problem.given, biased.bias()
    expected = cumla.attention(**given, **biased.options, bias=bias)
    form = "linear" if "slopes" in biased.arrays else "table"
    lengths = {n: given[n] for n in ("kv_lens", "qo_indptr", "kv_indptr") if n in given}
    arrays = {n: given[n] for n in ("q", "k", "v", "qo_indptr") if n in given}
    plan = cumla.AttentionPlan.from_arrays(**arrays, **biased.options, bias_form=form)
    plan.update(**lengths)
    rest = {n: value for n, value in given.items() if n not in lengths and n != "softcap"}
    got = plan.run(**rest, bias=bias)
    rows = [query.row for query in biased.problem.case.batch.queries()]
    for one, other in zip(got, expected, strict=True):
        if given["q"].ndim == 3:
            one, other = one[rows], other[rows]
        assert one.tobytes() == other.tobytes()


def test_a_distance_more_or_less_shows() -> None:
    """The oracle is no weaker than a step of the distance."""
    for kind, sample in samples(6):
        biased = make(kind, sample)._replace(window=None, causal=True)
        query = next(q for q in biased.problem.case.batch.queries() if q.kv_len > 3)
        q = biased.problem.given["q"].reshape(-1, *biased.problem.given["q"].shape[-2:])[query.row]
        exact = attend(biased, query, q)[1]
        name = "slopes" if "slopes" in biased.arrays else "table"
        other = np.roll(biased.arrays[name], 1, axis=-1)
        if name == "slopes":
            other = biased.arrays[name] * np.float32(1.05)
        changed = biased._replace(arrays=biased.arrays | {name: other})
        if other.shape[-1] > 1:
            assert not np.allclose(attend(changed, query, q)[1], exact, rtol=1e-4, atol=1e-4), kind


@pytest.mark.parametrize("least", [-2.4e38, np.finfo(np.float32).min])
def test_the_least_numbers_hide_keys(least: float) -> None:
    """As -inf does: a query whose keys are all hidden sees none."""
    given, table = hiding(np.float16, least)
    got = cumla.attention(**given, bias=cumla.AttentionBias(table=table))
    endless = np.where(table == np.float32(least), np.float32(-np.inf), table)
    want = cumla.attention(**given, bias=cumla.AttentionBias(table=endless))
    for one, other in zip(got, want, strict=True):
        assert one.tobytes() == other.tobytes()
    assert not got.out[:, :, 1].any()
    assert np.isneginf(got.lse[:, :, 1]).all()
    assert np.isfinite(got.lse[:, :, [0, 2, 3]]).all()


@pytest.mark.parametrize("numbers", [(40, 160, 8), (1, 4096, 16)])
@pytest.mark.parametrize("columns", [(64, 64), (192, 128), (256, 256)])
def test_buffers_of_plans_are_large_enough(
    numbers: tuple[int, int, int], columns: tuple[int, int]
) -> None:
    for kv_heads in (2, numbers[2]):
        sizes = {"num_kv_heads": kv_heads, "head_dim_v": columns[1]}
        most = cumla.AttentionPlan.workspace_bytes(*numbers, columns[0], **sizes, sm_count=132)
        e4m3 = {"cache_dtype": "float8_e4m3fn"}
        for form, more in product(
            ("linear", "table"),
            ({}, {"page_size": 1}, e4m3, {"window": 3}, e4m3 | {"page_size": 16}),
        ):
            made = cumla.AttentionPlan(
                *(*numbers, columns[0]), **sizes, **more, bias_form=form, like=int32(0)
            )
            assert replace(made.key, sm_count=132).layout.nbytes <= most


# --- what is refused ------------------------------------------------------------------------------

SLOPES = np.zeros(4, np.float32)
ROWS = np.zeros((8, 4, 5), BF16)
HEADS = np.zeros((4, 5), np.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"bias": SLOPES},
            TypeError,
            "bias: needs cumla.AttentionBias, got ndarray; pass the arr",
        ),
        ({"bias": BIAS()}, ValueError, "bias: needs at least one array, got none; leave it out"),
        (
            {"bias": BIAS(SLOPES, HEADS)},
            ValueError,
            "bias.slopes: needs no bias.table beside it, got both; pass one of them",
        ),
        (
            {"bias": BIAS(SLOPES, first=int32(0))},
            ValueError,
            "bias.slopes: needs no bias.first beside it, got both; pass one of them",
        ),
        ({"bias": BIAS(first=int32(0))}, ValueError, "bias.first: needs bias.table, got None"),
        (
            {"bias": BIAS(table=ROWS, first=int32(0))},
            ValueError,
            "bias.first: needs bias.table of two axes, got shape (8, 4, 5), whose first element is",
        ),
        (
            {"bias": BIAS(table=HEADS, first=int32(0, 1))},
            ValueError,
            "bias.first: needs shape (1,), got (2,); pass one distance",
        ),
        (
            {"bias": BIAS(SLOPES[:3])},
            ValueError,
            "bias.slopes: needs shape (num_heads,) or (batch, num_heads) with num_heads 4, the lat",
        ),
        ({"bias": BIAS(np.zeros((3, 4), np.float32))}, ValueError, "bias.slopes: needs shape (num"),
        (
            {"bias": BIAS(SLOPES.astype(np.float64))},
            TypeError,
            "bias.slopes: needs float32, got fl",
        ),
        (
            {"bias": BIAS(table=ROWS[:7])},
            ValueError,
            "bias.table: needs shape (num_heads, E) or (total_tokens, num_heads, E) with total_tok",
        ),
        ({"bias": BIAS(table=HEADS[:2])}, ValueError, "bias.table: needs shape (num_heads, E) or"),
        ({"bias": BIAS(table=HEADS[:, :0])}, ValueError, "bias.table: needs 1 to 1073741824 elem"),
        (
            {"bias": BIAS(table=HEADS.astype(np.float64))},
            TypeError,
            "bias.table: needs float32 or b",
        ),
        (
            {"bias": BIAS(table=np.zeros((4, 10), np.float32)[:, ::2])},
            ValueError,
            "bias.table: needs contiguous rows, got a stride of 8 bytes on the last axis; make a c",
        ),
        (
            {"bias": BIAS(SLOPES), "mask": cumla.AttentionMask(np.zeros(8, np.int32))},
            ValueError,
            "mask: needs None beside bias, got one; pass a window, or write -inf into a table for",
        ),
        (
            {"bias": BIAS(SLOPES), "softcap": 3.0},
            ValueError,
            "softcap: needs None beside bias, got 3.0; no order of the two is defined",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_refusals(
    changes: dict[str, Any], error: type[Exception], message: str, cupy: FakeCuPy
) -> None:
    """The same on both kinds of devices."""
    for put in (lambda value: value, cupy.like):
        given = {name: put(value) for name, value in keys_in_pages().items()}
        there = dict(changes)
        for name, value in changes.items():
            arrays = getattr(value, "given", {})
            if put == cupy.like and not all(a.flags.c_contiguous for a in arrays.values()):
                break  # which makes arrays without gaps
            if arrays:
                there[name] = type(value)(**{field: put(array) for field, array in arrays.items()})
        else:
            with refused(error, message):
                cumla.attention(**given, **there)


def test_wide_heads_are_refused() -> None:
    q, k = np.zeros((1, 1, 2, 320), np.float16), np.zeros((1, 4, 2, 320), np.float16)
    given = {"kv_lens": int32(4), "block_table": int32(0)[None]}
    with refused(ValueError, "bias: needs keys and values of at most 256 columns, got 320"):
        cumla.attention(q, k, k, **given, bias=BIAS(SLOPES[:2]))
    with refused(ValueError, "bias: needs keys and values of at most 256 columns, got 320"):
        cumla.AttentionPlan(2, 8, 4, 320, bias_form="linear", like=SLOPES)


def test_plans_that_are_refused() -> None:
    with refused(ValueError, "bias_form: needs 'linear', 'table' or None, got 'alibi'; pass 'li"):
        cumla.AttentionPlan(2, 8, 4, 64, bias_form="alibi", like=SLOPES)
    with refused(ValueError, "mask: needs None beside bias, got one; pass a window"):
        cumla.AttentionPlan(2, 8, 4, 64, bias_form="table", mask_form="rows", like=SLOPES)


@pytest.mark.parametrize(
    ("form", "bias", "message"),
    [
        (None, BIAS(SLOPES), "bias: needs no bias for a plan of bias_form None, got a bias of sl"),
        ("linear", None, "bias: needs a bias of slopes for a plan of bias_form 'linear', got no b"),
        ("table", BIAS(SLOPES), "bias: needs a bias by a table for a plan of bias_form 'table', g"),
    ],
    ids=str,
)
def test_runs_of_plans_that_are_refused(form: Any, bias: Any, message: str) -> None:
    given = keys_in_pages()
    lengths = {name: given.pop(name) for name in ("kv_lens", "qo_indptr")}
    arrays = {name: given[name] for name in ("q", "k", "v")}
    plan = cumla.AttentionPlan.from_arrays(**arrays, qo_indptr=lengths["qo_indptr"], bias_form=form)
    plan.update(**lengths)
    with refused(ValueError, message):
        plan.run(**given, bias=bias)


# --- frameworks -----------------------------------------------------------------------------------

HOST = {
    "slopes": BIAS(np.linspace(-0.2, 0.5, 4, dtype=np.float32)),
    "rows": BIAS(table=np.linspace(-1, 1, ROWS.size, dtype=np.float32).reshape(ROWS.shape)),
    "heads": BIAS(
        table=np.linspace(-1, 1, HEADS.size, dtype=np.float32).reshape(HEADS.shape), first=int32(-2)
    ),
}


@pytest.mark.parametrize("host", HOST.values(), ids=HOST)
def test_torch(host: Any) -> None:
    """Compiled and exported, and as operations of PyTorch."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("cumla.torch")
    given = {}
    for name, value in keys_in_pages().items():
        is_bf16 = value.dtype == BF16
        tensor = torch.from_numpy(value.view(np.int16) if is_bf16 else value)
        given[name] = tensor.view(torch.bfloat16) if is_bf16 else tensor
    bias = BIAS(**{name: torch.from_numpy(array) for name, array in host.given.items()})
    expected = cumla.attention(**keys_in_pages(), bias=host)

    def same(got: Any) -> None:
        assert got[0].view(torch.int16).numpy()[1:6].tobytes() == expected.out[1:6].tobytes()
        assert got[1].numpy()[1:6].tobytes() == expected.lse[1:6].tobytes()

    def attend_by(given: Any, bias: Any) -> Any:
        return cumla.attention(**given, bias=bias)

    same(attend_by(given, bias))
    same(torch.compile(attend_by, fullgraph=True, backend="eager")(given, bias))
    arrays = {f"bias_{name}": array for name, array in bias.given.items()}
    same(torch.ops.cumla.attention(**given, **arrays))

    class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, given: Any, bias: Any) -> Any:
            return tuple(cumla.attention(**given, bias=bias))

    same(torch.export.export(Layer(), (given, bias)).module()(given, bias))


@pytest.mark.parametrize("host", HOST.values(), ids=HOST)
def test_jax(host: Any) -> None:
    """Biases are pytrees; plans take them, too."""
    jax = pytest.importorskip("jax")
    pytest.importorskip("cumla.jax")
    given = {name: jax.device_put(value) for name, value in keys_in_pages().items()}
    bias = BIAS(**{name: jax.device_put(array) for name, array in host.given.items()})
    expected = cumla.attention(**keys_in_pages(), bias=host)

    def attend_by(given: Any, bias: Any) -> Any:
        return cumla.attention(**given, bias=bias)

    def planned(given: Any, bias: Any) -> Any:
        arrays = {name: given[name] for name in ("q", "k", "v", "qo_indptr")}
        form = "linear" if bias.slopes is not None else "table"
        plan = cumla.jax.AttentionPlan.from_arrays(**arrays, bias_form=form)
        plan = plan.update(given["kv_lens"], qo_indptr=given["qo_indptr"])
        rest = {n: v for n, v in given.items() if n not in ("kv_lens", "qo_indptr")}
        return plan.run(**rest, bias=bias)[0]

    for function in (attend_by, jax.jit(attend_by), jax.jit(planned)):
        got = function(given, bias)
        for one, other in zip(got, expected, strict=True):
            assert np.asarray(one)[1:6].tobytes() == other[1:6].tobytes()
