# SPDX-License-Identifier: Apache-2.0
"""Tensors in CPU memory that cumla takes for a GPU's: the faces' own way to the kernels.

The kernels are run by the emulator. What is launched in a capture is noted, and run by a replay;
what PyTorch computes happens at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

import cumla._serving
import tests.emulator
from cumla.core import frameworks
from cumla.core._dlpack import ArrayView
from cumla.core.frameworks import _Torch
from cumla.core.operation import Ready
from cumla.core.plan import Workspace
from tests.emulator import emulated_gpu
from tests.fake_cuda import FakeDriver

torch = pytest.importorskip("torch")


class TorchGpu(_Torch):
    """PyTorch with its tensors on GPU 0."""

    def __init__(self) -> None:
        super().__init__(torch)
        self.stream = 0
        self.capturing = False
        self.captures = 0
        self.captured: list[Any] = []
        self.held: list[Any] = []  # what a graph's launches write to

    def views(self, named: tuple[tuple[str, Any], ...]) -> list[ArrayView | None]:
        return [view and view._replace(device=0) for view in super().views(named)]

    def glance(self, arrays: tuple[Any, ...]) -> Any:
        seen: Any = super().glance(arrays)
        return seen and tuple([(*one[:4], 0, one[5]) for one in seen])

    def current_stream(self, device: int) -> int:
        return self.stream

    def empty(
        self, shape: tuple[int, ...], dtype: str, device: int, stream: int
    ) -> tuple[object, ArrayView]:
        """An array of 0xFF bytes, NaN as any float."""
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor.view(torch.uint8).fill_(0xFF)
        if self.capturing:
            self.held.append(tensor)
        (view,) = self.views((("", tensor),))
        assert view is not None
        return tensor, view

    @contextlib.contextmanager
    def capture(self, stream: int = 7) -> Iterator[None]:
        """Note launches in place of running them; `replay` runs them."""
        before, self.stream = self.stream, stream
        self.capturing, self.captured = True, []
        self.captures += 1
        yield
        self.stream, self.capturing = before, False

    def replay(self) -> None:
        """Run what was captured."""
        assert not self.capturing
        for launch in self.captured:
            tests.emulator.emulate(launch)


@contextlib.contextmanager
def torch_gpu(*, always: bool = False) -> Iterator[TorchGpu]:
    """Let cumla take tensors for those of a GPU, on which it launches kernels; see emulated_gpu."""
    gpu = TorchGpu()
    emulate: Callable[[Any], None] = tests.emulator.emulate

    def run(launch: Any) -> None:
        if gpu.capturing:
            gpu.captured.append(launch)
        else:
            emulate(launch)

    def is_capturing(driver: FakeDriver, stream: int) -> bool:
        return gpu.capturing

    def current_capture(on: Any) -> tuple[int, int]:
        return (gpu.stream, gpu.captures) if gpu.capturing else (0, 0)

    with (
        emulated_gpu(always=always),
        mock.patch.object(cumla._serving, "current_capture", current_capture),
        mock.patch.dict(frameworks.framework_of_type, {torch.Tensor: gpu}),
        mock.patch.object(tests.emulator, "emulate", run),
        mock.patch.object(FakeDriver, "is_capturing", is_capturing),
        # Tensors of the CPU may lie at the same addresses later: no call is remembered.
        mock.patch.object(Ready, "keep"),
        # Their memory waits for no event of a driver that is gone by then.
        mock.patch.object(Workspace, "note_use"),
    ):
        yield gpu
