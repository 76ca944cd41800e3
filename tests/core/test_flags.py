# SPDX-License-Identifier: Apache-2.0
"""Options that are on or off: a bool of Python or NumPy, and nothing that is merely true or false.

Every such option of every public operation and plan is here: a new one without a call
fails `test_every_flag_is_here`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cumla

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
PLANS = (cumla.MLADecodePlan, cumla.MLAAttentionPlan, cumla.PagedMQALogitsPlan)
NO_FLAGS = [("yes", "str"), ("", "str"), (1, "int"), (0, "int"), (None, "NoneType")]
NO_FLAGS += [(np.int64(1), "int64"), (np.ones(1, bool), "ndarray")]
IDS = [repr(value) for value, _ in NO_FLAGS]


class Call(NamedTuple):
    """A call that works, and the arguments that it writes."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    writes: tuple[str, ...] = ()

    def __call__(self, **options: Any) -> Any:
        return self.function(**self.arguments | options)


def numbers(*shape: int, dtype: Any = BF16) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def int32(*values: Any) -> Any:
    return np.array(values, np.int32)


def decode_arguments(q_len: int = 2) -> dict[str, Any]:
    return {
        "q": numbers(2, q_len, 4, 576),
        "kv_cache": numbers(4, 16, 1, 576),
        "block_table": int32([0, 1], [2, 3]),
        "kv_lens": int32(5, 20),
    }


def outputs(*lead: int, lse: tuple[int, ...]) -> dict[str, Any]:
    return {"out": numbers(*lead, 512), "lse": numbers(*lse, dtype="f4")}


def decode(function: Callable[..., Any], q_len: int = 2, **options: Any) -> Call:
    written = outputs(2, q_len, 4, lse=(2, 4, q_len))
    return Call(function, decode_arguments(q_len) | written | options, ("out", "lse"))


def attend(function: Callable[..., Any], **options: Any) -> Call:
    arguments = {
        "q": numbers(5, 4, 576),
        "kv_cache": numbers(4, 16, 1, 576),
        "qo_indptr": int32(0, 2, 5),
        "kv_lens": int32(5, 20),
        "block_table": int32([0, 1], [2, 3]),
    }
    return Call(function, arguments | outputs(5, 4, lse=(5, 4)) | options, ("out", "lse"))


def score(function: Callable[..., Any]) -> Call:
    arguments = {
        "q": numbers(3, 8, 32, dtype=E4M3),
        "kv": (numbers(16, 32, dtype=E4M3), np.ones(16, np.float32)),
        "weights": numbers(3, 8, dtype="f4"),
        "ks": int32(0, 1, 2),
        "ke": int32(3, 9, 16),
        "out": numbers(3, 16, dtype="f4"),
    }
    return Call(function, arguments, ("out",))


def score_pages(function: Callable[..., Any], **options: Any) -> Call:
    arguments = {
        "q": numbers(2, 1, 8, 32, dtype=E4M3),
        "kv_cache": (numbers(4, 16, 32, dtype=E4M3), np.ones((4, 16), np.float32)),
        "weights": numbers(2, 8, dtype="f4"),
        "kv_lens": int32(5, 20),
        "block_table": int32([0, 1], [2, 3]),
        "max_kv_len": 32,
        "out": numbers(2, 32, dtype="f4"),
    }
    return Call(function, arguments | options, ("out",))


def append(function: Callable[..., Any]) -> Call:
    arguments = {
        "rows": numbers(3, 576),
        "kv_cache": numbers(2, 16, 576),
        "slot_mapping": int32(0, 17, 30),
        "positions": int32(0, 1, 2),
        "cos_sin": numbers(3, 64, dtype="f4"),
        "q_pe": numbers(3, 4, 64),
    }
    return Call(function, arguments, ("kv_cache", "q_pe"))


def quantize(function: Callable[..., Any]) -> Call:
    written = {"out": np.ones((3, 32), E4M3), "scale_out": np.zeros(3, np.float32)}
    return Call(function, {"x": numbers(3, 32)} | written, tuple(written))


def append_keys(function: Callable[..., Any]) -> Call:
    cache = np.ones((2, 16, 1, 36), np.uint8)
    arguments = {"k": numbers(3, 32), "kv_cache": cache, "slot_mapping": int32(0, 17, 30)}
    return Call(function, arguments, ("kv_cache",))


def plan(kind: Any, *sizes: int, **options: Any) -> Call:
    """Make a plan for the CPU."""
    return Call(lambda **given: kind(*sizes, **given), {"like": np.zeros(1)} | options)


def ready(kind: Any, *sizes: int, lengths: tuple[Any, ...], **options: Any) -> Any:
    made = kind(*sizes, like=np.zeros(1), **options)
    made.update(*lengths)
    return made


def workspace_bytes(kind: Any, *sizes: int, **options: Any) -> Call:
    return Call(lambda **given: kind.workspace_bytes(*sizes, sm_count=132, **given), options)


def calls() -> Iterator[tuple[str, str, Call]]:
    """Name every function with a flag, the flag, and a call."""
    for name, flag, make in (
        ("mla_decode", "causal", decode),
        ("mla_decode", "batch_invariant", decode),
        ("mla_attention", "causal", attend),
        ("mqa_logits", "clean", score),
        ("paged_mqa_logits", "clean", score_pages),
        ("append_mla_cache", "interleaved", append),
        ("quantize_fp8", "power_of_two_scales", quantize),
        ("append_indexer_cache", "power_of_two_scales", append_keys),
    ):
        yield name, flag, make(getattr(cumla, name))
    longest: dict[str, Any]
    for flag, longest in (("causal", {}), ("batch_invariant", {"max_kv_len": 64})):
        yield "MLADecodePlan", flag, plan(cumla.MLADecodePlan, 2, 2, 4, **longest)
        q, kv_cache = list(decode_arguments().values())[:2]
        arrays = {"q": q, "kv_cache": kv_cache} | longest
        yield "MLADecodePlan.from_arrays", flag, Call(cumla.MLADecodePlan.from_arrays, arrays)
    sized = workspace_bytes(cumla.MLADecodePlan, 2, 2, 4, max_kv_len=64)
    yield "MLADecodePlan.workspace_bytes", "batch_invariant", sized
    yield "MLAAttentionPlan", "causal", plan(cumla.MLAAttentionPlan, 2, 5, 4)
    arrays = {"q": numbers(5, 4, 576), "kv_cache": numbers(4, 16, 576), "qo_indptr": int32(0, 2, 5)}
    yield "MLAAttentionPlan.from_arrays", "causal", Call(cumla.MLAAttentionPlan.from_arrays, arrays)
    paged, pages = cumla.PagedMQALogitsPlan, {"max_pages": 2, "page_size": 16}
    yield "PagedMQALogitsPlan", "per_row_lens", plan(paged, 2, 1, 8, 32, **pages)
    sized = workspace_bytes(paged, 2, 1, 8, 32, **pages)
    yield "PagedMQALogitsPlan.workspace_bytes", "per_row_lens", sized
    made = ready(paged, 2, 1, 8, 32, lengths=(int32(5, 20),), **pages)
    run = score_pages(made.run)
    del run.arguments["kv_lens"]  # the plan holds them
    yield "PagedMQALogitsPlan.run", "clean", run


CALLS = tuple(calls())
FLAGS = pytest.mark.parametrize(
    "at", range(len(CALLS)), ids=[f"{name}-{flag}" for name, flag, _ in CALLS]
)


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions, and plans with their methods; results and errors are made by nobody."""
    for name in cumla.__all__:
        public = getattr(cumla, name)
        if inspect.isclass(public) and issubclass(public, (tuple, Exception)):
            continue
        yield name, public
        methods = vars(public) if inspect.isclass(public) else ()
        for method in methods:
            if not method.startswith("_") and callable(getattr(public, method)):
                yield f"{name}.{method}", getattr(public, method)


def test_every_flag_is_here() -> None:
    flags = {
        (name, parameter.name)
        for name, function in public_functions()
        for parameter in inspect.signature(function).parameters.values()
        if "bool" in str(parameter.annotation)
    }
    assert flags == {(name, flag) for name, flag, _ in CALLS}


@pytest.mark.parametrize(("value", "kind"), NO_FLAGS, ids=IDS)
@FLAGS
def test_what_is_no_bool(at: int, value: Any, kind: str) -> None:
    _, flag, call = CALLS[at]
    before = [call.arguments[name].tobytes() for name in call.writes]
    with pytest.raises(TypeError) as caught:
        call(**{flag: value})
    assert str(caught.value) == (
        f"{flag}: needs True or False, got {kind}; pass one of the two, such as bool(...) of a "
        f"number"
    )
    assert [call.arguments[name].tobytes() for name in call.writes] == before


@pytest.mark.parametrize("value", [True, False])
@FLAGS
def test_bools_of_numpy(at: int, value: bool) -> None:
    """They count as Python's: the same is written, and plans and sizes are the same."""
    _, flag, call = CALLS[at]
    arguments = dict(call.arguments)
    if not value and flag == "batch_invariant":
        arguments.pop("max_kv_len", None)  # belongs to the flag
    seen = []
    for given in (value, np.bool_(value)):
        written = {name: arguments[name].copy() for name in call.writes}
        result = call.function(**arguments | written | {flag: given})
        made = vars(result) if isinstance(result, PLANS) else None
        size = result if isinstance(result, int) else None
        seen.append(({name: array.tobytes() for name, array in written.items()}, repr(made), size))
    assert seen[0] == seen[1]
