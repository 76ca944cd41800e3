# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_attention_few.cu: attention to few lists, a warp for each chunk."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from cumla.errors import CumlaError
from cumla.launch.blocks.block_attention import block_attention_values
from cumla.launch.blocks.choice import RULES
from cumla.launch.device import import_driver
from cumla.launch.kernel import Launch
from cumla.launch.layouts import constant, launch_of, strided
from cumla.launch.module import load
from cumla.launch.source import HALVES, KernelSpec, in_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cumla.core.arrays import ArrayView
    from cumla.launch.blocks.key import BlockKey
    from cumla.launch.kernel import Template
    from cumla.launch.mha.launch import MHAArguments

_FILE = "blocks/block_attention_few"
_MOST_PORTABLE = 8  # thread blocks of a cluster


def _spec(dtype: str, e4m3: bool, warps: int, chunk: int, loops: bool) -> KernelSpec:
    return KernelSpec.of(
        *("blocks", "block_attention_few", "BlockAttentionFewParams"),
        *(dtype, e4m3, warps, chunk, loops),
        tags=[
            *(dtype, *(["e4m3"] if e4m3 else [])),
            *(f"{warps}x{chunk}", *(["loops"] if loops else [])),
        ],
        threads=32 * warps,
        smem_bytes=constant(_FILE, f"FewLayout<{in_cuda(e4m3)}, {warps}, {chunk}>::kBytes"),
    )


def _forms(is_e4m3: bool) -> dict[tuple[int, int, bool], None]:
    """List the warps and chunks of kernels."""
    forms = RULES.few_e4m3 if is_e4m3 else RULES.few
    return {(form.warps, form.chunk, form.chunks > 1): None for form in forms}


_SPECS = {
    (dtype, e4m3, *form): _spec(dtype, e4m3, *form)
    for dtype, e4m3 in product(HALVES, (False, True))
    for form in _forms(e4m3)
}
SPECS = tuple(_SPECS.values())


def block_attention_few_spec(key: BlockKey) -> KernelSpec:
    """Find the kernel of a shape that this file serves."""
    few = key.few
    assert few is not None
    is_e4m3 = key.cache_dtype != key.dtype
    return _SPECS[key.dtype, is_e4m3, few.warps, few.chunk, few.chunks > 1]


def block_attention_few_launch(
    key: BlockKey,
    arguments: MHAArguments,
    lists: Mapping[str, Any],
    out: ArrayView,
    lse: ArrayView,
) -> Launch:
    """Describe attention to lists, as `block_attention_launch` does."""
    values = block_attention_values(key, arguments, lists, out, lse)
    for name, view in (("keys", arguments.k), ("values", arguments.v)):
        values[name] = strided(view, "data", "stride_page", "stride_token")
    grid = key.cluster * key.num_places, 1, 1
    return wide_launch(launch_of(block_attention_few_spec(key), grid, values, key.cluster))


def wide_launch(launch: Launch) -> Launch:
    """Allow the clusters of a launch, where they have more than eight thread blocks."""
    return _WideLaunch(*launch) if launch.cluster > _MOST_PORTABLE else launch


class _WideLaunch(Launch):
    """A launch in clusters of more thread blocks than CUDA allows without being asked."""

    __slots__ = ()

    def template(self, device: int, capturing: Callable[[], bool]) -> Template:
        """Load the kernel, pack its parameters, and allow such clusters."""
        found = super().template(device, capturing)
        allow_clusters(self, device, capturing)
        return found


def allow_clusters(launch: Launch, device: int, capturing: Callable[[], bool]) -> None:
    """Allow a kernel the clusters of a launch, of more than eight thread blocks."""
    driver = import_driver()
    allowed = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    kernel = load(launch.spec, device, capturing=capturing)
    (status,) = driver.cuFuncSetAttribute(kernel.handle, allowed, 1)
    if status:
        raise CumlaError(
            f"kernel {launch.spec.entry}: CUDA device {device} refused clusters of "
            f"{launch.cluster} thread blocks with {status.name}; GPUs of compute capability 9.0 "
            f"have them, so check for a fault of an earlier kernel of any library"
        )
