# SPDX-License-Identifier: Apache-2.0
"""What the plugins of servers share: the versions that they serve, and plans for steps."""

from __future__ import annotations

import logging
import re
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import cumla

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from types import ModuleType

_log = logging.getLogger(__name__)

_MOST_PLANS = 256
_MOST_ROOM = 64 << 20  # bytes beyond what a shape needs
MLA_WIDTHS = (512, 64)  # of the latent columns and of those with RoPE


def backend_of(
    server: str,
    version: str,
    tested: tuple[tuple[int, ...], tuple[int, ...]],
    option: str,
    module: str,
    classes: tuple[str, ...],
) -> ModuleType:
    """Import the module of a plugin that has the server's classes.

    An older server than the tested ones is refused. Any other that is not one of them gets a
    warning, and is refused if an interface that the plugin uses is missing there: by a
    RuntimeError, because of an ImportError older servers keep the name alone.
    """
    size = len(tested[0])
    first, last = (".".join(map(str, v)) for v in tested)
    found = re.match(rf"\d+(\.\d+){{{size - 1}}}", version)
    number = tuple(map(int, found[0].split("."))) if found else None
    if number is not None and number < tested[0]:
        raise _wrong_version(server, version, tested, option)
    known = number is not None and number <= tested[1]
    try:
        backend = import_module(module)
    except (ImportError, AttributeError, TypeError) as error:
        if known:
            raise
        raise _wrong_version(server, version, tested, option, str(error)) from error
    missing = [f"{c}.{m}" for c in classes for m in abstract_methods(getattr(backend, c))]
    if missing:
        reason = f"{', '.join(sorted(missing))} would be missing"
        raise _wrong_version(server, version, tested, option, reason)
    if not known:
        _log.warning(
            "cumla's backend was tested with %s %s to %s, not with %s: it has the interfaces that "
            "the backend uses, and is served; compare a few answers with those of %s's own one",
            *(server, first, last, version, server),
        )
    return backend


def abstract_methods(kind: type) -> frozenset[str]:
    """Return the methods that a class should have and has not."""
    return frozenset(getattr(kind, "__abstractmethods__", ()))


def _wrong_version(
    server: str,
    version: str,
    tested: tuple[tuple[int, ...], tuple[int, ...]],
    option: str,
    reason: str = "",
) -> RuntimeError:
    *lead, end = tested[1]
    first, last, beyond = (".".join(map(str, v)) for v in (*tested, (*lead, end + 1)))
    return RuntimeError(
        f"{server}: cumla's backend needs a version from {first} to {last}, or a newer one with "
        f"the same interfaces, got {version}{reason and f', where {reason}'}; install one "
        f'("{server}>={first},<{beyond}"), or a cumla that knows yours, or leave out '
        f"--attention-backend {option}"
    )


def cache_dtype(stored: torch.dtype) -> str | None:
    """Return the cache_dtype of plans for a cache that a server stores so."""
    return "float8_e4m3fn" if stored.itemsize == 1 else None


class Step(NamedTuple):
    """A plan, and its update with the lengths of a step.

    Servers prepare a step before its layers, and before each replay of a CUDA graph: the update is
    eager, and serves all layers, on whatever stream they run or are captured.
    """

    plan: Any
    update: Callable[[], None]
    note_capture: Callable[[], None]

    def run(self, q: Any, *arrays: torch.Tensor, **options: Any) -> cumla.AttentionState:
        """Attend for one layer; update first if the step was prepared within a capture."""
        on, stream = arrays[0].device, 0
        if on.type == "cuda":
            stream = torch.cuda.current_stream(on).cuda_stream
            if torch.cuda.is_current_stream_capturing():
                self.note_capture()
        if not self.plan.serves(stream):
            self.update()
        state: cumla.AttentionState = self.plan.run(q, *arrays, **options)
        return state

    def run_mla(self, q: Any, *arrays: torch.Tensor, **options: Any) -> cumla.AttentionState:
        """Attend with rows of tokens by either plan of MLA: `q` is one tensor or a pair.

        out is ``(tokens, num_heads, 512)``; lse with its first axes flattened ``(tokens,
        num_heads)``.
        """
        q = q if isinstance(q, tuple) else q.split(MLA_WIDTHS, -1)
        if not isinstance(self.plan, cumla.MLADecodePlan):
            return self.run(q, *arrays, **options)
        q = tuple(part.unflatten(0, (-1, self.plan.key.q_len)) for part in q)
        out, lse = self.run(q, *arrays, **options)
        return cumla.AttentionState(out.flatten(0, 1), lse.transpose(1, 2))


class Plans:
    """Plans of one kind of layers by shape, which take turns in one buffer.

    A shape that needs more memory gets a larger buffer, with some room to grow, and the other
    shapes move to it. A CUDA graph holds the address of its plan's buffer: shapes whose layers were
    captured stay where they are. `sizes` are what the bytes of a buffer depend on beside the shape,
    `options` the rest of what all plans are made with.
    """

    def __init__(self, device: torch.device, sizes: dict[str, Any], **options: Any) -> None:
        self._device = device
        self._sizes = sizes
        self._options = options
        self._plans: dict[Hashable, Any] = {}
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._in_graphs: set[Hashable] = set()
        self._largest: torch.Tensor | None = None

    def begin(
        self, kind: Any, shape: tuple[int, ...], kv_lens: torch.Tensor, **offsets: torch.Tensor
    ) -> Step:
        """Compute the schedule of a step with the plan of a class and a shape."""
        plan = self._find(kind, shape, kv_lens)
        update = partial(plan.update, kv_lens, **offsets)
        update()
        return Step(plan, update, partial(self._in_graphs.add, (kind, shape)))

    def begin_mla(
        self, num_heads: int, tokens: int, q_len: int, kv_lens: torch.Tensor, offsets: torch.Tensor
    ) -> Step:
        """Compute the schedule of a step of MLA.

        `q_len` are the query tokens of each request, or 0 where they differ, as `offsets` tell.
        """
        batch = len(kv_lens)
        if q_len:
            return self.begin(cumla.MLADecodePlan, (batch, q_len, num_heads), kv_lens)
        shape = (batch, tokens, num_heads)
        return self.begin(cumla.MLAAttentionPlan, shape, kv_lens, qo_indptr=offsets)

    def _find(self, kind: Any, shape: tuple[int, ...], like: torch.Tensor) -> Any:
        key = kind, shape
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:  # mixed steps have any shapes
                self._plans.clear()
            place = {"like": like}
            if self._device.type != "cpu":  # where plans have no buffer
                place["workspace"] = self._buffer(kind, shape)
            self._plans[key] = kind(*shape, **self._sizes, **self._options, **place)
        return self._plans[key]

    def _buffer(self, kind: Any, shape: tuple[int, ...]) -> torch.Tensor:
        key = kind, shape
        if key not in self._buffers:
            nbytes = kind.workspace_bytes(*shape, **self._sizes)
            if self._largest is None or self._largest.numel() < nbytes:
                self._largest = self._grown(nbytes)
            self._buffers[key] = self._largest
        return self._buffers[key]

    def _grown(self, nbytes: int) -> torch.Tensor:
        """Allocate a larger buffer; shapes that no graph holds leave the one before."""
        before = 0 if self._largest is None else self._largest.numel()
        for kept in (self._plans, self._buffers):
            for key in kept.keys() - self._in_graphs:
                del kept[key]
        self._largest = None  # its memory, where no graph holds it, may be that of the next one
        room = min(before // 2, _MOST_ROOM)
        return torch.empty(max(nbytes, before + room), dtype=torch.uint8, device=self._device)
