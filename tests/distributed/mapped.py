# SPDX-License-Identifier: Apache-2.0
"""PyTorch's symmetric memory as a gloo group can have it: files that all ranks map."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

__all__ = ["mapped"]


class Handle:
    """What a rendezvous gives; `late` seconds pass before a rank reads what is not its own."""

    def __init__(self, group: Any, paths: list[str], late: float) -> None:
        self._group, self._paths, self._late = group, paths, late
        self._rank = dist.get_rank(group)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        assert timeout_ms >= 60_000  # that of the group
        dist.barrier(self._group)

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, offset: int) -> torch.Tensor:
        if rank != self._rank:
            time.sleep(self._late)
        path = self._paths[rank]
        whole = torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)
        begin = offset * dtype.itemsize
        nbytes = torch.Size(sizes).numel() * dtype.itemsize
        assert begin + nbytes <= len(whole)
        return whole[begin : begin + nbytes].view(dtype).view(sizes)


class Files:
    """Functions of `torch.distributed._symmetric_memory` over files of one folder."""

    def __init__(self, folder: Path, late: float) -> None:
        self._folder, self._late = folder, late
        self._paths: dict[int, str] = {}

    def get_backend(self, device: torch.device) -> str:
        return "files"

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        path = str(self._folder / f"{os.getpid()}-{len(self._paths)}")
        memory = torch.from_file(path, shared=True, size=size, dtype=dtype)
        self._paths[memory.data_ptr()] = path
        return memory.fill_(0xFF)

    def rendezvous(self, memory: torch.Tensor, group: Any) -> Handle:
        paths: list[Any] = [None] * group.size()
        dist.all_gather_object(paths, self._paths[memory.data_ptr()], group=group)
        return Handle(group, paths, self._late)


def mapped(folder: Path, late: float) -> Any:
    """Let PyTorch's symmetric memory be files, for a while."""
    files = Files(folder, late)
    names = ("get_backend", "empty", "rendezvous")
    return mock.patch.multiple(symmetric, **{name: getattr(files, name) for name in names})
