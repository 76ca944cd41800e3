# SPDX-License-Identifier: Apache-2.0
"""The table of an interface: names in errors, kinds of errors, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cumla.compat._table import Interface
from cumla.core.names import arg

torch = pytest.importorskip("torch")

from cumla.compat.flashinfer import (  # noqa: E402
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)

TABLE = Interface(
    {"q": "query", "q[0]": "q_nope", "kv_lens": "seq_lens"},
    RuntimeError,
    refused={"bias": "has no counterpart; leave it out", "chunk": "is 0 here", "tail": "is empty"},
    unused={"chunk": 0, "tail": ()},
)


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_errors_have_the_names_and_the_kind_of_the_caller(error: type[Exception]) -> None:
    def message() -> str:
        return (
            f"{arg('q[0]')}: needs the rows of {arg('q')} and {arg('kv_lens')}, got a.q, qk and "
            "max_kv_lens"
        )

    with pytest.raises(RuntimeError) as caught, TABLE():
        raise error(message())
    assert str(caught.value) == (
        "q_nope: needs the rows of query and seq_lens, got a.q, qk and max_kv_lens"
    )
    assert caught.value.__suppress_context__
    with pytest.raises(error, match=r"^q\[0\]"), Interface():
        raise error(message())
    with pytest.raises(error, match=r"^rows: needs the rows of query"), named():
        raise error(message())
    with pytest.raises(KeyError), TABLE:  # others pass unchanged
        raise KeyError("q")


def named() -> Any:
    return Interface({"q": "query"}).naming(**{"q[0]": "rows"})()


def test_only_what_asks_for_something_is_refused() -> None:
    for nothing in ({}, {"bias": None, "chunk": 0, "tail": ()}, {"chunk": False, "other": 5}):
        TABLE.refuse(nothing)
    for name, value in (
        *(("bias", 0), ("bias", torch.zeros(2)), ("bias", "")),
        *(("chunk", 4), ("chunk", torch.zeros(2)), ("tail", (1,))),
    ):
        with pytest.raises(NotImplementedError, match=f"^{name}: (has no|is)"):
            TABLE.refuse({"bias": None, name: value})


def test_the_refused_arguments_of_a_function() -> None:
    def function(first: Any, *tail: Any, bias: Any = None) -> None:
        chunk = first, tail, bias  # no argument
        del chunk

    assert set(TABLE.refused_by(function)) == {"tail", "bias"}


@pytest.mark.parametrize(
    "kind", [BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper]
)
def test_a_wrapper_whose_methods_are_overridden_refuses_the_same(kind: Any) -> None:
    class Own(kind):  # type: ignore[misc]
        def plan(self, *args: Any, **named: Any) -> None:
            super().plan(*args, **named)

        def run(self, *args: Any, **named: Any) -> Any:
            return super().run(*args, **named)

    wrapper = Own(torch.empty(16, dtype=torch.uint8))
    numbers = torch.arange(3, dtype=torch.int32)
    lists = (numbers, numbers[:2], numbers[:2] + 1)
    sizes = (2, 2, 64, 16) if kind is BatchDecodeWithPagedKVCacheWrapper else (2, 2, 64)
    given = (*lists, *sizes) if len(sizes) == 4 else (numbers, numbers, *sizes)
    with pytest.raises(ValueError, match=r"^use_token_head_sf: belongs to kernels"):
        wrapper.plan(*given, use_token_head_sf=True)
    wrapper.plan(*given)
    rows = torch.zeros(2, 2, 64).half()
    cache = (torch.zeros(2, 2, 16, 2, 64).half(),) if len(sizes) == 4 else (rows, rows)
    with pytest.raises(ValueError, match=r"^kv_cache_sf: belongs to kernels"):
        wrapper.run(rows, *cache, kv_cache_sf=1)
    assert wrapper.run(rows, *cache).shape == rows.shape
