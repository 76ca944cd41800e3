# SPDX-License-Identifier: Apache-2.0
"""Tensors on the GPU that are refused before anything is launched; the context stays usable."""

from __future__ import annotations

from typing import Any

import pytest

import cumla

KERNELS = ("quantize_fp8",)
torch: Any = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs PyTorch on the GPU", allow_module_level=True)


class Wrapper(torch.Tensor):  # type: ignore[misc]
    """A tensor of no memory, as quantised weights of torchao are."""

    @staticmethod
    def __new__(cls: Any, inner: Any) -> Any:
        options = {"dtype": inner.dtype, "device": inner.device, "strides": inner.stride()}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **options)

    @classmethod
    def __torch_dispatch__(cls, function: Any, *rest: Any) -> Any:
        raise NotImplementedError(function)


def freed(x: Any) -> Any:
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(
    "spoil",
    [Wrapper, freed, lambda x: freed(torch.cat([x, x])[len(x) :])],
    ids=["wrapper", "freed", "freed, with an offset"],
)
@pytest.mark.parametrize("name", ["x", "scale_out"])
def test_without_memory(name: str, spoil: Any) -> None:
    arguments = {
        "x": torch.ones(64, 128, device="cuda"),
        "scale_out": torch.empty(64, device="cuda"),
    }
    cumla.quantize_fp8(**arguments)
    spoiled = spoil(arguments[name].clone())
    with pytest.raises(ValueError, match=rf"^{name}: needs a tensor with memory"):
        cumla.quantize_fp8(**arguments | {name: spoiled})
    torch.cuda.synchronize()
    assert torch.equal(
        cumla.quantize_fp8(**arguments).scale, cumla.quantize_fp8(arguments["x"]).scale
    )


def test_the_negative_bit() -> None:
    """Also of arrays that are known: the bit is all that tells them apart."""
    x = torch.randn(64, 128, device="cuda")
    for _ in range(2):
        cumla.quantize_fp8(x)
    negated = torch._neg_view(x)
    with pytest.raises(ValueError, match=r"^x: .* negative bit, .*; pass x\.resolve_neg\(\)$"):
        cumla.quantize_fp8(negated)
    got, expected = (cumla.quantize_fp8(a).values for a in (negated.resolve_neg(), -x))
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_no_rows_of_any_framework() -> None:
    cupy, jax = (pytest.importorskip(name) for name in ("cupy", "jax"))
    if jax.default_backend() not in ("gpu", "cuda"):
        pytest.skip("needs JAX on the GPU")
    for x in (
        torch.empty(0, 128, device="cuda"),
        cupy.empty((0, 128), "float32"),
        jax.numpy.zeros((0, 128), "float32"),
    ):
        result = cumla.quantize_fp8(x)
        assert tuple(result.values.shape) == (0, 128)
        assert type(result.values) is type(x)
