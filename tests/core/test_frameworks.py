# SPDX-License-Identifier: Apache-2.0
"""What is no array, has no memory, or means something else than its memory says: refused by name.

What cumla does with the arrays that it takes is in `tests.core.test_arrays`.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.core import _dlpack
from cumla.core.arrays import glance, open_call, parts, reopen_call, to_numpy
from cumla.core.operation import run
from cumla.indexer.quantize import _QUANTIZE, QUANTIZE

ways_in = pytest.mark.parametrize(
    "look",
    [
        lambda array: open_call((("q", array),)),
        lambda array: open_call((("x", np.zeros(3)), ("q", array))),
        lambda array: open_call((("x", type(array)(3)),), (("q", array),)),
        functools.partial(to_numpy, "q"),
    ],
    ids=["first", "another", "output", "to_numpy"],
)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


# --- memory --------------------------------------------------------------------------------------


@ways_in
@pytest.mark.parametrize("part", [slice(None), slice(1, None)], ids=["whole", "with an offset"])
def test_a_tensor_whose_storage_was_freed(torch: Any, look: Callable[[Any], Any], part: slice):
    tensor = torch.ones(4, 6)[part]
    tensor.untyped_storage().resize_(0)
    message = r"^q: needs a tensor with memory, got a Tensor without: .* freed .*; pass the tensor"
    with pytest.raises(ValueError, match=message):
        look(tensor)
    look(tensor[:0])


@pytest.mark.parametrize("offset", [0, 4])
def test_a_wrapper_subclass(torch: Any, offset: int) -> None:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls: Any, inner: Any) -> Any:
            options = {"dtype": inner.dtype, "strides": inner.stride(), "storage_offset": offset}
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **options)

        @classmethod
        def __torch_dispatch__(cls, function: Any, *rest: Any) -> Any:
            raise NotImplementedError(function)

    for arguments in (
        (("q", Wrapper(torch.ones(3))),),
        (("x", torch.ones(3)), ("q", Wrapper(torch.ones(3)))),
    ):
        with pytest.raises(ValueError, match=r"^q: needs a tensor with memory, got a .*Wrapper"):
            open_call(arguments)


def test_other_tensors_without_memory(torch: Any) -> None:
    with pytest.raises(ValueError, match=r"^q: needs .* got one on meta; it has no memory: make"):
        open_call((("q", torch.empty(3, device="meta")),))
    with pytest.raises(TypeError, match=r"^q: needs a dense tensor .* torch.sparse_coo .*to_dense"):
        open_call((("q", torch.ones(3).to_sparse()),))

    def inside(x: Any) -> Any:
        with pytest.raises(ValueError, match=r"^q: needs a tensor with memory"):
            open_call((("q", x),))
        return x

    torch.func.functionalize(inside)(torch.ones(3))


def test_a_dlpack_array_at_address_0() -> None:
    from tests.core.test_arrays import Producer

    for dtype, offset in (("float32", 0), ("uint8", 64)):
        array = Producer((2, 3), dtype, offset=offset)
        array.managed.tensor.data = None
        with pytest.raises(ValueError, match=r"^q: needs an array with memory, got one at address"):
            open_call((("q", array),))
        assert array.deleted == 1
    empty = Producer((0, 3))
    empty.managed.tensor.data = None
    assert open_call((("q", empty),)).views[0] == _dlpack.ArrayView(
        0, (0, 3), (12, 4), "float32", None
    )


# --- what its memory does not say ----------------------------------------------------------------


def negated(torch: Any) -> list[Any]:
    z = torch.complex(torch.ones(2, 3), torch.ones(2, 3))
    return [z.conj().imag, torch._neg_view(torch.ones(2, 3).bfloat16())]


@pytest.mark.parametrize("which", [0, 1])
def test_the_negative_bit(torch: Any, which: int) -> None:
    tensor = negated(torch)[which]
    message = r"^q: .* got one with the negative bit, .*; pass q\.resolve_neg\(\)$"
    other = torch.ones(2, 3)
    for look in (
        lambda: open_call((("q", tensor),)),
        lambda: open_call((("x", other), ("q", tensor))),
        lambda: open_call((("x", np.zeros(3)), ("q", tensor))),
        lambda: open_call((("x", other),), (("q", tensor),)),
        lambda: to_numpy("q", tensor),
    ):
        with pytest.raises(ValueError, match=message):
            look()
    resolved = tensor.resolve_neg()
    assert (to_numpy("q", resolved).astype(np.float32) == -1).all()


def test_the_conjugate_bit_comes_with_a_dtype_that_nothing_takes(torch: Any) -> None:
    with pytest.raises(TypeError, match="complex64"):
        cumla.quantize_fp8(torch.ones(3, 128, dtype=torch.complex64).conj())


def test_keys_of_jax() -> None:
    jax = pytest.importorskip("jax")
    for key in (jax.random.key(0), jax.random.split(jax.random.key(0), 3)):
        message = r"^q: needs an array of numbers, got JAX's key<fry>; .*jax\.random\.key_data\(q\)"
        with pytest.raises(TypeError, match=message):
            open_call((("q", key),))
        with pytest.raises(TypeError, match=message):
            open_call((("x", jax.numpy.ones(3)), ("q", key)))


# --- transformations that trace ------------------------------------------------------------------


def quantize(x: Any) -> Any:
    return cumla.quantize_fp8(x * 1).scale + 0


def scales_of(x: Any) -> Any:
    """Return what the function does, which cumla.torch does not take into a graph."""
    options = QUANTIZE.defaults
    return run(_QUANTIZE, {"x": x}, {"out": None, "scale_out": None}, options)[1] + 0


@pytest.mark.filterwarnings("error::UserWarning")
def test_torch_compile(torch: Any) -> None:
    """Of the whole graph it is Dynamo's error, with our text in it; else it is ours."""
    x = torch.ones(3, 128)
    way_out = (
        r"graphs take cumla's functions where cumla\.torch is imported, and in place of plans call "
        r"torch\.ops\.cumla\.<function>_schedule and _attend; or put the call into a function of "
        r"its own under @torch\.compiler\.disable"
    )
    with pytest.raises(Exception, match=f"cumla runs eagerly .*; {way_out}") as caught:
        torch.compile(scales_of, backend="eager", fullgraph=True)(x)
    assert type(caught.value).__name__ == "Unsupported"
    with pytest.raises(TypeError, match=rf"^x: cumla runs eagerly, got torch\.compile; {way_out}$"):
        torch.compile(lambda x: scales_of(x * 1), backend="eager")(x)
    known = torch.ones(3, 128)
    scales_of(known)
    with pytest.raises(TypeError, match=rf"^x: cumla runs eagerly, got torch\.compile; {way_out}$"):
        torch.compile(lambda: scales_of(known), backend="eager")()
    apart = torch.compiler.disable(quantize)
    compiled = torch.compile(lambda x: apart(x) + 1, backend="eager")
    assert torch.equal(compiled(x), quantize(x) + 1)
    assert torch.equal(quantize(x), quantize(x))  # nothing of it is left


def test_torch_compile_of_what_was_known_before(torch: Any) -> None:
    """A ready call starts with a glance."""
    x = torch.ones(3)
    open_call((("x", x),))
    for look in (lambda x: glance((x,)), lambda x: reopen_call(x, None).device):
        with pytest.raises(Exception, match="cumla runs eagerly and torch"):
            torch.compile(look, backend="eager", fullgraph=True)(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_jit_trace(torch: Any) -> None:
    message = r"^x: cumla runs eagerly, got torch\.jit\.trace; call cumla outside the traced"
    with pytest.raises(TypeError, match=message):
        torch.jit.trace(quantize, (torch.ones(3, 128),), check_trace=False)


def test_torch_make_fx(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused after an eager call with the same arrays as well."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    monkeypatch.delitem(sys.modules, "cumla.torch", raising=False)
    x = torch.ones(3, 128)
    quantize(x)
    message = (
        "^x: cumla runs eagerly, got a call under make_fx .*; import cumla.torch, which takes "
    )
    for options in ({}, {"pre_dispatch": True}):
        with pytest.raises(TypeError, match=message):
            make_fx(quantize, **options)(x)
    with pytest.raises(TypeError, match=message), FakeTensorMode():
        cumla.quantize_fp8(x)


def test_torch_function_transforms(torch: Any) -> None:
    message = (
        r"^x: needs a dense tensor with memory of its own, got one inside torch\.vmap or "
        r"torch\.func\.grad; .*: pass the whole batch in one call, outside"
    )
    x = torch.ones(2, 3, 128)
    for transform in (
        lambda: torch.vmap(quantize)(x),
        lambda: torch.func.grad(lambda x: quantize(x).sum())(x[0]),
        lambda: torch.func.jvp(quantize, (x[0],), (x[0],)),
    ):
        with pytest.raises(TypeError, match=message):
            transform()


def test_proxies(torch: Any) -> None:
    with pytest.raises(TypeError, match=r"^x: .*Proxy; it has no memory: call cumla outside"):
        torch.fx.symbolic_trace(quantize)
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"^x: .*ShapeDtypeStruct; it has no memory: call cumla"):
        cumla.quantize_fp8(jax.ShapeDtypeStruct((3, 128), "float32"))


# --- lists and parts -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [[1, 2], (1, 2, 3), [np.zeros(3)]])
def test_a_list_is_no_array(value: Any) -> None:
    kind, length = type(value).__name__, len(value)
    message = rf"^t: needs an array .*, got builtins\.{kind} of {length}; make one with torch\.tens"
    with pytest.raises(TypeError, match=message):
        open_call((("q", np.zeros(3)), ("t", value)))


def test_a_whole_result_is_no_array() -> None:
    rows = cumla.quantize_fp8(np.ones((2, 8, 32), np.float32))
    for given, field in ((rows, "values"), (cumla.top_k(rows.scale, 2), "indices")):
        with pytest.raises(TypeError, match=rf"^q: .*; pass one array of it, such as \.{field}$"):
            open_call((("q", given),))


def test_parts() -> None:
    one, two, three = (np.zeros(3) for _ in range(3))
    names = ("ckv", "k_pe", "scales?")
    for value, expected in (
        (one, {"kv": one}),
        ((one, two), {"kv[0]": one, "kv[1]": two}),
        ([one, two], {"kv[0]": one, "kv[1]": two}),
        ([one, two, three], {"kv[0]": one, "kv[1]": two, "kv[2]": three}),
        (types.SimpleNamespace(), None),
        (None, {"kv": None}),
    ):
        seen = parts("kv", value, names)
        wanted = {"kv": value} if expected is None else expected
        assert list(seen) == list(wanted)
        assert all(a is b for a, b in zip(seen.values(), wanted.values(), strict=True))


@pytest.mark.parametrize(
    ("names", "listed", "wrong"),
    [
        (("q_nope", "q_pe"), "q_nope and q_pe", (0, 1, 3)),
        (("ckv", "k_pe", "scales?"), "ckv and k_pe, maybe with scales", (0, 1, 4)),
    ],
)
def test_another_number_of_parts(
    names: tuple[str, ...], listed: str, wrong: tuple[int, ...]
) -> None:
    for length in wrong:
        for value in ([np.zeros(3)] * length, (np.zeros(3),) * length):
            message = f"^q: needs one array, or a tuple or list of {listed}, got {length} of them;"
            with pytest.raises(ValueError, match=message):
                parts("q", value, names)
