# SPDX-License-Identifier: Apache-2.0
"""Builds the arrays of cases: PyTorch's on a GPU, or tiny ones on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from bench.libraries import Libraries


@dataclass
class Lab:
    """PyTorch, its device and the libraries that are there.

    `tiny` makes each case as small as its code allows, for the CPU, where cumla's reference
    computes and no library is called.
    """

    tiny: bool = False
    torch: Any = field(default_factory=lambda: import_module("torch"))
    libraries: Libraries = field(init=False)

    def __post_init__(self) -> None:
        self.libraries = Libraries(self.torch, usable=not self.tiny)
        self.torch.manual_seed(0)

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    def at_most(self, **sizes: tuple[int, int]) -> tuple[int, ...]:
        """Sizes as they are, or if the lab is tiny not above the second number of each."""
        return tuple(min(pair) if self.tiny else pair[0] for pair in sizes.values())

    def dtype(self, name: str) -> Any:
        return getattr(self.torch, name)

    def normal(self, *shape: int, std: float = 1.0, dtype: str = "bfloat16") -> Any:
        """Draw normal numbers."""
        made = self.torch.empty(*shape, dtype=self.dtype(dtype), device=self.device)
        return made.normal_(0, std)

    def empty(self, *shape: int, dtype: str = "bfloat16") -> Any:
        """Make an array to write to; what nobody writes is NaN, or -1."""
        made = self.torch.empty(*shape, dtype=self.dtype(dtype), device=self.device)
        made.view(self.torch.uint8).fill_(0xFF)
        return made

    def ints(self, values: Any) -> Any:
        """Make an int32 array of a list, or of an array."""
        return self.torch.as_tensor(values).to(self.torch.int32).to(self.device)

    def full(self, count: int, value: int) -> Any:
        return self.torch.full((count,), value, dtype=self.torch.int32, device=self.device)

    def shuffled(self, count: int) -> Any:
        """A random order, int32."""
        return self.torch.randperm(count, device=self.device).to(self.torch.int32)

    def table(self, batch: int, pages: int) -> Any:
        """A block table of shuffled pages, as many for each request."""
        return self.shuffled(batch * pages).view(batch, pages)

    def distinct(self, rows: int, below: int, count: int) -> Any:
        """(rows, count) int32: ascending numbers, one of each of `count` stretches of equal size.

        That is how a selection of the best tokens looks: ascending, spread over the context.
        """
        torch = self.torch
        bounds = torch.linspace(0, below, count + 1, device=self.device, dtype=torch.float64).long()
        width = bounds[1:] - bounds[:-1]
        steps = (torch.rand(rows, count, device=self.device) * width).long().minimum(width - 1)
        return (bounds[:-1] + steps).to(torch.int32)
