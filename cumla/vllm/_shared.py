# SPDX-License-Identifier: Apache-2.0
"""What both kinds of attention share: what the kernels need, and plans that steps are run by."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from cumla import AttentionState

_MOST_PLANS = 256
FP8 = ("fp8", "fp8_e4m3")  # vLLM's names of the caches that the kernels read


class Kernels:
    """What cumla's kernels need, as vLLM asks for it: comes before its own base class."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", *FP8]

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's registry, where vLLM looks it up."""
        return "CUSTOM"

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Prefer pages of whole 64-token blocks; any others work as well."""
        return default_block_size if default_block_size % 64 == 0 else 64

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Tell whether the kernels run there."""
        return (capability.major, capability.minor) == (9, 0)


def cache_dtype(kv_cache_spec: Any) -> str | None:
    """Return the cache_dtype of a plan."""
    return "float8_e4m3fn" if kv_cache_spec.dtype.itemsize == 1 else None


class Plans:
    """Plans of one builder by shape, which take turns in one buffer.

    A CUDA graph holds the address of its plan's buffer. A shape therefore keeps the buffer that it
    got first, also when its plan is forgotten and made again; a shape that needs more gets a larger
    buffer, which new shapes share from then on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._plans: dict[Hashable, Any] = {}
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._largest: torch.Tensor | None = None

    def find(self, kind: Any, shape: tuple[int, ...], sizes: dict[str, Any], **options: Any) -> Any:
        """Return the plan of a class and a shape.

        `sizes` are what the bytes of its buffer depend on beside the shape.
        """
        found = self._plans.get((kind, shape))
        if found is None:
            if len(self._plans) >= _MOST_PLANS:  # mixed steps have any shapes
                self._plans.clear()
            if self._device.type != "cpu":  # where plans have no buffer
                options["workspace"] = self._buffer(kind, shape, sizes)
            found = self._plans[kind, shape] = kind(*shape, **sizes, **options)
        return found

    def _buffer(self, kind: Any, shape: tuple[int, ...], sizes: dict[str, Any]) -> torch.Tensor:
        if (kind, shape) not in self._buffers:
            nbytes = kind.workspace_bytes(*shape, **sizes)
            if self._largest is None or self._largest.numel() < nbytes:
                self._largest = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._buffers[kind, shape] = self._largest
        return self._buffers[kind, shape]


class Step(NamedTuple):
    """A plan, and its update with the lengths of a step.

    vLLM builds metadata before each step and before each replay of a CUDA graph, on the stream of
    either: the update is eager, and the runs may be captured.
    """

    plan: Any
    update: Callable[[], None]

    def run(self, q: Any, *arrays: torch.Tensor, **options: Any) -> AttentionState:
        """Attend for one layer; on another stream than the update's, update there first.

        Micro-batches, and some captures, run on streams of their own.
        """
        on = arrays[0].device
        stream = torch.cuda.current_stream(on).cuda_stream if on.type == "cuda" else 0
        if not self.plan.serves(stream):
            self.update()
        state: AttentionState = self.plan.run(q, *arrays, **options)
        return state


def begin(plan: Any, kv_lens: torch.Tensor, **offsets: torch.Tensor) -> Step:
    """Compute the schedule of a step."""
    update = partial(plan.update, kv_lens, **offsets)
    update()
    return Step(plan, update)
