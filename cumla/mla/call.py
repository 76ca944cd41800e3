# SPDX-License-Identifier: Apache-2.0
"""What a call of either MLA operation has on the GPU: kernels, and where the results go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.mla.mla_decode_fp8 import fp8_spec, how_it_lies
from cumla.launch.mla.shape import VALUE_DIM
from cumla.launch.module import load

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView, Call
    from cumla.launch.mla.shape import MLAAttentionKey, MLADecodeKey
    from cumla.launch.module import LoadedKernel
    from cumla.launch.source import KernelSpec
    from cumla.mla.checks import Arguments

__all__ = ["Kernels", "Outputs", "load_for"]


class Kernels(NamedTuple):
    """The kernels of a shape, all loaded before the first of them is launched."""

    schedule: LoadedKernel
    attention: LoadedKernel
    of_spec: dict[KernelSpec, LoadedKernel]

    @classmethod
    def of(cls, call: Call, *specs: KernelSpec) -> Kernels:
        """Load them, in their order: schedule, attention, that over FP8 caches of other formats."""
        kernels = [load_for(call, spec) for spec in specs]
        return cls(kernels[0], kernels[1], dict(zip(specs, kernels, strict=True)))

    def of_fp8(
        self, call: Call, key: MLADecodeKey | MLAAttentionKey, arguments: Arguments
    ) -> LoadedKernel:
        """Choose the kernel that attends to an FP8 cache as it came."""
        spec = fp8_spec(key, arguments.kv_scales is not None, how_it_lies(arguments))
        return self.of_spec.get(spec) or load_for(call, spec)


def load_for(call: Call, spec: KernelSpec) -> LoadedKernel:
    """Load a kernel on the device of a call; where its stream is being captured it must be."""
    assert call.device is not None
    return load(spec, call.device, capturing=lambda: call.capturing)


class Outputs(NamedTuple):
    """Where the results go: the caller's arrays, or new ones of the caller's framework."""

    out: Any
    out_view: ArrayView
    lse: Any
    lse_view: ArrayView
    given: tuple[bool, bool]

    @classmethod
    def of(
        cls, call: Call, arguments: Arguments, lse_shape: tuple[int, ...], out: Any, lse: Any
    ) -> Outputs:
        """Take the caller's arrays; allocate those that are not given."""
        out_view, lse_view = arguments.out, arguments.lse
        given = (out_view is not None, lse_view is not None)
        if out_view is None:
            out, out_view = call.empty((*arguments.q.shape[:-1], VALUE_DIM), arguments.q.dtype)
        if lse_view is None:
            lse, lse_view = call.empty(lse_shape, "float32")
        return cls(out, out_view, lse, lse_view, given)

    def export(self, call: Call) -> tuple[Any, Any]:
        """Return out and lse as the caller gets them."""
        out = self.out if self.given[0] else call.export(self.out)
        lse = self.lse if self.given[1] else call.export(self.lse)
        return out, lse
