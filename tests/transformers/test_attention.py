# SPDX-License-Identifier: Apache-2.0
"""cumla.transformers with a stub in the place of Transformers: masks, layouts, refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from cumla.errors import MissingDependencyError
from tests.bindings.stand_in import standing_in

torch = pytest.importorskip("torch")

registered: dict[str, Any] = {}


class Interface:
    """Remembers what is registered."""

    @staticmethod
    def register(name: str, function: Any) -> None:
        registered[f"{name}.{function.__name__}"] = function


def causal_mask_function(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return kv <= q


def bidirectional_mask_function(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return q >= 0


def overlay(window: int) -> Callable[..., Any]:
    def inner_mask(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return kv > q - window

    return inner_mask


def bidirectional_overlay(window: int) -> Callable[..., Any]:
    def inner_mask(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return abs(q - kv) <= window

    return inner_mask


def chunked_overlay(size: int) -> Callable[..., Any]:
    def inner_mask(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return q // size == kv // size

    return inner_mask


def and_masks(*functions: Callable[..., Any]) -> Callable[..., Any]:
    def and_mask(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        found = True
        for one in functions:
            found = found & one(batch, head, q, kv)
        return found

    return and_mask


@pytest.fixture
def ours() -> Iterator[Any]:
    masks = {
        "AttentionMaskInterface": Interface,
        "bidirectional_mask_function": bidirectional_mask_function,
        "causal_mask_function": causal_mask_function,
        "sliding_window_bidirectional_overlay": bidirectional_overlay,
        "sliding_window_overlay": overlay,
    }
    stub = {"transformers": {"AttentionInterface": Interface}, "transformers.masking_utils": masks}
    before = sys.modules.pop("cumla.transformers", None)
    with standing_in(stub, "cumla.transformers"):
        yield import_module("cumla.transformers")
        sys.modules.pop("cumla.transformers", None)
    if before is not None:
        sys.modules["cumla.transformers"] = before


def test_importing_registers_the_name(ours: Any) -> None:
    assert registered == {"cumla.attention": ours.attention, "cumla.mask": ours.mask}


@pytest.mark.parametrize("missing", ["transformers", "transformers.masking_utils"])
def test_what_is_missing_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old version has no mask functions."""
    monkeypatch.delitem(sys.modules, "cumla.transformers", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AttentionInterface=Interface))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingDependencyError, match=r"^transformers: .*\bpip install torch trans"):
        import_module("cumla.transformers")


MODULE = torch.nn.Module()
MODULE.is_causal = True  # type: ignore[assignment]


def rows(batch: int, heads: int, tokens: int, seed: int, layout: str = "heads first") -> Any:
    generator = torch.Generator().manual_seed(seed)
    if layout == "tokens first":
        made = torch.randn(batch, tokens, heads, 16, generator=generator)
        return made.transpose(1, 2)
    return torch.randn(batch, heads, tokens, 16, generator=generator)


def expected(
    q: Any, k: Any, v: Any, first: list[int], end: int, window: int | None, causal: bool
) -> Any:
    """What each query with a key sees, in float64; the last query stands at key `end` - 1."""
    batch, heads, tokens, _ = q.shape
    out = torch.zeros(batch, tokens, heads, 16, dtype=torch.float64)
    for request in range(batch):
        for i in range(tokens):
            at = end - tokens + i
            begin, last = first[request], at + 1 if causal else end
            if window is not None:
                begin = max(begin, at - window + (1 if causal else 0))
                last = last if causal else min(last, at + window + 1)
            for head in range(heads):
                if begin >= last:
                    continue
                keys = k[request, head // 2, begin:last].double()
                weights = torch.softmax(0.25 * keys @ q[request, head, i].double(), 0)
                out[request, i, head] = weights @ v[request, head // 2, begin:last].double()
    return out


@pytest.mark.parametrize("layout", ["heads first", "tokens first", "of each its own"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("padding", [None, (0, 0, 0), (0, 4, 8)])
@pytest.mark.parametrize("room", [0, 5])
def test_padding_and_windows(
    ours: Any,
    room: int,
    padding: tuple[int, ...] | None,
    tokens: int,
    window: int | None,
    layout: str,
) -> None:
    """Also in a static cache with room behind the keys, which holds NaN."""
    end, size = 9, 9 + room
    q = rows(3, 4, tokens, 1)
    layouts = ("heads first", "tokens first") if layout == "of each its own" else (layout, layout)
    k, v = (rows(3, 2, size, 2 + i, one) for i, one in enumerate(layouts))
    k[:, :, end:] = v[:, :, end:] = float("nan")
    given = None
    if padding is not None:
        given = torch.ones(3, end)
        for request, count in enumerate(padding):
            given[request, :count] = 0
            k[request, :, :count] = v[request, :, :count] = float("nan")
    function = causal_mask_function
    if window is not None:
        function = and_masks(overlay(window), causal_mask_function)
    offset = torch.tensor(end - tokens) if room else end - tokens
    bounds = ours.mask(3, tokens, size, offset, 0, function, given)
    assert (bounds is None) == (not room and not any(padding or ()))
    out, weights = ours.attention(MODULE, q, k, v, bounds, scaling=0.25, sliding_window=window)
    assert weights is None
    wanted = expected(q, k, v, list(padding or (0, 0, 0)), end, window, True)
    torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("queries", [7, 1, 3])
def test_encoders(ours: Any, queries: int, window: int | None, padding: str | None) -> None:
    """Also cross attention, whose queries are fewer; of a window the mask tells the sides."""
    q, k, v = rows(2, 4, queries, 1), rows(2, 2, 7, 2), rows(2, 2, 7, 3)
    function = bidirectional_mask_function
    if window is not None:
        function = and_masks(bidirectional_overlay(window), bidirectional_mask_function)
    given, begin, end = None, 0, 7
    if padding is not None:
        given = torch.ones(2, 7)
        begin, end = (3, 7) if padding == "left" else (0, 4)
        given[1, :begin] = given[1, end:] = 0
        k[1, :, :begin] = v[1, :, end:] = float("nan")
    options: dict[str, Any] = {"scaling": 0.25, "sliding_window": window and window + 1}
    if window is not None and (queries < 7 or padding == "right"):
        with pytest.raises(
            NotImplementedError, match=r"^attention_mask: .*(both sides|after them)"
        ):
            ours.mask(2, queries, 7, 0, 0, function, given)
        return
    bounds = ours.mask(2, queries, 7, 0, 0, function, given)
    assert (bounds is None) == (padding is None and window is None)
    module = SimpleNamespace(is_causal=bounds is not None)  # the mask says whether it is
    out, _ = ours.attention(module, q, k, v, bounds, **options)
    for request, (first, last) in enumerate([(0, 7), (begin, end)]):
        one, keys, values = (part[request : request + 1] for part in (q, k, v))
        wanted = expected(one, keys, values, [first], last, window, False)
        seen = slice(begin if request and queries == 7 else 0, None)  # others are padding
        torch.testing.assert_close(
            out[request : request + 1, seen].double(), wanted[:, seen], atol=2e-6, rtol=1e-5
        )


def test_windows_of_a_mask_that_has_none_are_refused(ours: Any) -> None:
    q, k, v = rows(1, 4, 7, 1), rows(1, 2, 7, 2), rows(1, 2, 7, 3)
    with pytest.raises(NotImplementedError, match=r"^sliding_window: .*from the model's mask"):
        ours.attention(MODULE, q, k, v, None, sliding_window=3, is_causal=False)


def test_a_mask_may_be_longer_than_the_keys(ours: Any) -> None:
    """A cache for a window has the last keys, and a mask may have room for later ones."""
    given = torch.zeros(2, 12)
    given[0, :9] = given[1, 3:9] = 1
    bounds = ours.mask(2, 1, 4, 8, 5, causal_mask_function, given)
    assert bounds is None  # of keys 5 to 8, which all exist
    bounds = ours.mask(2, 1, 7, 8, 2, causal_mask_function, given)
    assert bounds[:, 0, 0].tolist() == [[0, 7], [1, 7]]


def test_sinks_and_soft_caps_reach_cumla(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def noted(*arrays: Any, **options: Any) -> Any:
        seen.update(options)
        return SimpleNamespace(out="out")

    monkeypatch.setattr("cumla.attention", noted)
    q, k, v = rows(1, 4, 2, 1), rows(1, 2, 5, 2), rows(1, 2, 5, 3)
    sinks = torch.nn.Parameter(torch.arange(4.0).bfloat16())
    ours.attention(MODULE, q, k, v, None, softcap=20.0, s_aux=sinks, position_ids=torch.ones(1))
    assert seen["softcap"] == 20.0
    assert seen["sinks"].dtype == torch.float32 and not seen["sinks"].requires_grad


def test_other_masks_are_refused(ours: Any) -> None:
    function = and_masks(chunked_overlay(4), causal_mask_function)
    with pytest.raises(NotImplementedError, match=r"^attention_mask: .* of chunked_overlay.*sdpa"):
        ours.mask(1, 4, 4, 0, 0, function)
    holes = torch.tensor([[1, 0, 1, 1]])
    with pytest.raises(NotImplementedError, match=r"^attention_mask: .* side by side, .*the left"):
        ours.mask(1, 4, 4, 0, 0, causal_mask_function, holes)
    with pytest.raises(NotImplementedError, match=r"^attention_mask: .* side by side, .*the left"):
        ours.mask(1, 1, 4, 3, 0, causal_mask_function, holes)  # decoding of what was padded right
    q, k, v = rows(1, 4, 2, 1), rows(1, 2, 5, 2), rows(1, 2, 5, 3)
    with pytest.raises(NotImplementedError, match=r"^attention_mask: .* got a mask of shape"):
        ours.attention(MODULE, q, k, v, torch.zeros(1, 1, 2, 5))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dropout": 0.1}, r"^dropout: .*model\.eval"),
        ({"position_bias": torch.zeros(1)}, "^position_bias: .*does not know"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "^cu_seq_lens_q: .*does not know"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_would_change_the_result_is_refused(
    ours: Any, options: dict[str, Any], text: str
) -> None:
    q, k, v = rows(1, 4, 2, 1), rows(1, 2, 5, 2), rows(1, 2, 5, 3)
    with pytest.raises(NotImplementedError, match=text):
        ours.attention(MODULE, q, k, v, None, **options)
