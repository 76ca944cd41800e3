# SPDX-License-Identifier: Apache-2.0
"""The demo's backend with calls that are repeated: on a GPU, replays of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from cumla.cli.demo import Backend


class GraphBackend(Backend):
    """Repeats a call on the same arrays with new contents."""

    @property
    def repeats(self) -> str:
        """Return what `repeatable` gives."""
        return "a replay of one CUDA graph" if self.cupy else "a call of the reference"

    def write(self, target: Any, source: NDArray[Any]) -> None:
        """Overwrite a contiguous array by one of the host."""
        if self.cupy:
            target.set(source)
        else:
            target[...] = source

    def copy(self, target: Any, source: Any) -> None:
        """Copy a contiguous array over another one, on a GPU on the current stream."""
        if self.cupy:
            target.data.copy_from_device_async(source.data, source.nbytes)
        else:
            target[...] = source

    def repeatable(self, call: Callable[[], None]) -> Callable[[], None]:
        """Capture the call, to be launched on the current stream; on the CPU, return it."""
        if not self.cupy:
            return call
        stream = self.cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            call()
            graph = stream.end_capture()
        launch: Callable[[], None] = graph.launch
        return launch
