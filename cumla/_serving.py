# SPDX-License-Identifier: Apache-2.0
"""Common code of the servers' plugins: the versions that they serve, and plans for steps."""

from __future__ import annotations

import logging
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

import cumla
from cumla.core._driver import driver
from cumla.mla.shape import E4M3_288, WRITTEN_FORMATS, width_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from types import ModuleType

_log = logging.getLogger(__name__)

_MOST_PLANS = 256
_MOST_ROOM = 64 << 20  # bytes beyond what a shape needs
# Plans whose lengths are all that they take.
_OF_LENGTHS = (cumla.MLADecodePlan, cumla.MLASparsePlan, cumla.PagedMQALogitsPlan)


def in_parts(rows: Any) -> Any:
    """Take latent and RoPE columns of rows of MLA apart; rows without RoPE are one tensor."""
    if not isinstance(rows, tuple):
        width = width_of(rows.shape[-1])
        if width is None or not width[1]:
            return rows
        return rows.split(width, -1)
    return rows if rows[1].shape[-1] else rows[0]


def image_spans(
    images: Iterable[Iterable[Sequence[int]]], firsts: Iterable[int], device: torch.device
) -> torch.Tensor | None:
    """Return the images that hold query tokens of a step, None for a step without them.

    `images` are first and last positions for each request, `firsts` the first query token of each.
    Returns ``(requests, n, 2)`` int32 on the device; the host does not wait.
    """
    found = [
        [tuple(span) for span in spans if span[1] >= first and span[1] > span[0]]
        for spans, first in zip(images, firsts, strict=True)
    ]
    most = max(map(len, found), default=0)
    if not most:
        return None
    rows = [[*spans, *[(0, 0)] * (most - len(spans))] for spans in found]
    is_copied = device.type == "cuda"
    tensor = torch.tensor(rows, dtype=torch.int32, pin_memory=is_copied)
    return tensor.to(device, non_blocking=True)


def append_rows(rows: Any, cache: torch.Tensor, slots: torch.Tensor, kv_scale: Any = None) -> None:
    """Write latent rows of new tokens into a cache of numbers; those of negative slots are padding.

    `kv_scale` is that of an FP8 cache.
    """
    columns = cache.shape[-1]
    named = cache.itemsize == 1 and WRITTEN_FORMATS[E4M3_288] == columns
    form = E4M3_288 if named else None
    cumla.append_mla_cache(in_parts(rows), cache, slots, kv_scale=kv_scale, cache_format=form)


def is_tested(
    server: str, version: str, tested: tuple[tuple[int, ...], tuple[int, ...]], option: str
) -> bool:
    """Return whether a server's version is one of the tested ones; refuse an older one."""
    found = re.match(rf"\d+(\.\d+){{{len(tested[0]) - 1}}}", version)
    number = tuple(map(int, found[0].split("."))) if found else None
    if number is not None and number < tested[0]:
        raise _wrong_version(server, version, tested, option)
    return number is not None and number <= tested[1]


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
    known = is_tested(server, version, tested, option)
    try:
        backend = import_module(module)
    except (ImportError, AttributeError, TypeError) as error:
        if known:
            raise
        raise _wrong_version(server, version, tested, option, str(error)) from error
    missing = [
        f"{name}.{method}"
        for name in classes
        for method in getattr(getattr(backend, name), "__abstractmethods__", ())
    ]
    if missing:
        reason = f"{', '.join(sorted(missing))} would be missing"
        raise _wrong_version(server, version, tested, option, reason)
    if not known:
        first, last = (".".join(map(str, v)) for v in tested)
        _log.warning(
            "cumla's backend was tested with %s %s to %s, not with %s: that has the interfaces "
            "which it uses; compare a few answers with those of %s's own one",
            *(server, first, last, version, server),
        )
    return backend


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


class Step:
    """The lengths of a step; the first layer that runs computes the schedule for all of them.

    In a CUDA graph each replay does, from the lengths that the arrays hold by then. `choose` tells
    class and shape of the plan, which is there from the first layer on, or from :meth:`prepare`.
    Later lengths need a step of their own.
    """

    __slots__ = ("_choose", "_kv_lens", "_offsets", "_plans", "has_run", "plan")

    def __init__(
        self,
        plans: Plans,
        choose: Callable[[], tuple[Any, tuple[int, ...]]],
        kv_lens: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        self._plans = plans
        self._choose = choose
        self._kv_lens = kv_lens
        self._offsets = offsets
        self.has_run = False
        self.plan: Any = None

    def reads(self, kv_lens: torch.Tensor, offsets: torch.Tensor) -> bool:
        """Return whether the lengths come from these arrays."""
        return self._kv_lens is kv_lens and self._offsets is offsets

    def prepare(self) -> None:
        """Find the plan, and load its kernels: the first run may then be captured."""
        self.plan = self._plans.find(*self._choose(), self._kv_lens)
        self.plan.prepare()

    def schedule(self, on: torch.device) -> None:
        """Compute the schedule, unless a layer before this one has."""
        self.has_run = True
        plans = self._plans
        stream, capture = current_capture(on)
        known = plans.scheduled is self and plans.capture == capture
        if known and (not capture or self.plan.serves(stream)):
            return
        if self.plan is None:
            self.plan = plans.find(*self._choose(), self._kv_lens)
        self._update()
        plans.scheduled, plans.capture = self, capture
        if capture:
            plans.keep(self)

    def _update(self) -> None:
        if isinstance(self.plan, _OF_LENGTHS):
            self.plan.update(self._kv_lens)
        else:
            self.plan.update(self._kv_lens, qo_indptr=self._offsets)

    def run(self, q: Any, *arrays: torch.Tensor, **options: Any) -> cumla.AttentionState:
        """Attend for one layer."""
        self.schedule(arrays[0].device)
        state: cumla.AttentionState = self.plan.run(q, *arrays, **options)
        return state

    def run_mla(self, q: Any, *arrays: torch.Tensor, **options: Any) -> cumla.AttentionState:
        """Attend with rows of tokens by either plan of MLA: `q` is one tensor or a pair.

        out is ``(tokens, num_heads, latent columns)``; lse with its first axes flattened
        ``(tokens, num_heads)``.
        """
        self.schedule(arrays[0].device)
        q = in_parts(q)
        if not isinstance(self.plan, cumla.MLADecodePlan):
            return self.run(q, *arrays, **options)
        shape = -1, self.plan.key.q_len
        parts = [part.unflatten(0, shape) for part in (q if isinstance(q, tuple) else (q,))]
        q = tuple(parts) if isinstance(q, tuple) else parts[0]
        out, lse = self.plan.run(q, *arrays, **options)
        return cumla.AttentionState(out.flatten(0, 1), lse)


class SparseStep(Step):
    """The lengths of a step of sparse MLA, whose lists have min(visible, topk) entries.

    `q_len` tells the query tokens of each request, 0 where they differ: then `requests` has the
    request of each token. Tokens of padded requests, whose lengths are 0, have empty lists. Where
    the indexer chooses pools of `pool` tokens, the first topk entries are those of whole pools, -1
    where there are fewer, and behind them are the tokens of the last pool that is not whole.
    """

    __slots__ = ("_pool", "_requests", "_topk", "entries")

    def __init__(
        self,
        plans: Plans,
        num_heads: int,
        topk: int,
        q_len: Callable[[], int],
        kv_lens: torch.Tensor,
        offsets: torch.Tensor,
        requests: torch.Tensor,
        pool: int = 1,
    ) -> None:
        self._requests: torch.Tensor | None = None
        self._topk, self._pool = topk, pool
        self.entries = topk + pool - 1  # of a list

        def choose() -> tuple[Any, tuple[int, ...]]:
            each = q_len()
            lists = (len(kv_lens), each) if each else (1, len(requests))
            self._requests = None if each else requests
            return cumla.MLASparsePlan, (*lists, num_heads, self.entries)

        super().__init__(plans, choose, kv_lens, offsets)

    def _update(self) -> None:
        lens, requests, q_len = self._kv_lens, self._requests, self.plan.key.q_len
        if requests is not None:
            ends = (lens - self._offsets[1:]).index_select(0, requests)
            lens = ends + torch.arange(1, q_len + 1, dtype=lens.dtype, device=lens.device)
        elif q_len > 1:
            hidden = torch.arange(1 - q_len, 1, dtype=lens.dtype, device=lens.device)
            lens = lens[:, None] + hidden
        if self._pool > 1:
            lens = lens.clamp(min=0)
            tail = lens % self._pool
            lens = torch.where(tail > 0, self._topk + tail, lens.clamp(max=self._topk))
        self.plan.update(lens)  # which clamps them

    def run_sparse(
        self,
        q: Any,
        kv_cache: torch.Tensor,
        indices: torch.Tensor,
        block_table: torch.Tensor,
        **options: Any,
    ) -> cumla.AttentionState:
        """Attend for one layer to the positions ``(tokens, entries)`` of each token's request.

        `q` is one tensor or a pair, with rows of tokens. out is ``(tokens, num_heads, 512)``; lse
        with its first axes flattened ``(tokens, num_heads)``.
        """
        self.schedule(kv_cache.device)
        q, lists = in_parts(q), (-1, self.plan.key.q_len)
        if self._requests is None:
            block_table = block_table[: self.plan.key.batch]
            parts = [part.unflatten(0, lists) for part in (q if isinstance(q, tuple) else (q,))]
            q = tuple(parts) if len(parts) > 1 else parts[0]
            indices = indices.unflatten(0, lists)
        else:
            options["row_to_request"] = self._requests
        out, lse = self.plan.run(q, kv_cache, indices, block_table=block_table, **options)
        return cumla.AttentionState(out.flatten(0, -3), lse)


class _Logits(cumla.PagedMQALogitsPlan):
    """A plan for one visible length per query token, made of numbers alone."""

    def __init__(
        self,
        batch: int,
        q_len: int,
        num_heads: int,
        head_dim: int,
        page_size: int,
        max_pages: int,
        **place: Any,
    ) -> None:
        pages = _pages(batch, q_len, page_size, max_pages)
        super().__init__(batch, q_len, num_heads, head_dim, **pages, **place)

    @staticmethod
    def workspace_bytes(  # type: ignore[override]
        batch: int, q_len: int, num_heads: int, head_dim: int, page_size: int, max_pages: int
    ) -> int:
        """Size of a plan's buffer in bytes."""
        return cumla.PagedMQALogitsPlan.workspace_bytes(
            batch, q_len, num_heads, head_dim, **_pages(batch, q_len, page_size, max_pages)
        )


def _pages(batch: int, q_len: int, page_size: int, max_pages: int) -> dict[str, Any]:
    return {"page_size": page_size, "max_pages": max_pages, "kv_lens_shape": (batch, q_len)}


class LogitsStep(Step):
    """Lengths ``(requests, q_len)`` that query tokens see, for which an indexer scores keys."""

    __slots__ = ()

    def __init__(
        self,
        plans: Plans,
        kv_lens: torch.Tensor,
        q: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
    ) -> None:
        shape = *kv_lens.shape, *q.shape[1:], cache.shape[1], block_table.shape[1]
        super().__init__(plans, lambda: (_Logits, shape), kv_lens, kv_lens)

    def score(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        weights: torch.Tensor,
        block_table: torch.Tensor,
        width: int,
    ) -> torch.Tensor:
        """Return logits ``(tokens, width)`` float32, undefined behind a token's length.

        q is ``(tokens, heads, 128)`` e4m3 and weights ``(tokens, heads)`` float32, a request's
        tokens side by side; rows of the block table behind those of the requests are not read.
        """
        self.schedule(q.device)
        key = self.plan.key
        logits = torch.empty((len(q), width), dtype=torch.float32, device=q.device)
        self.plan.run(
            q.unflatten(0, (-1, key.q_len)),
            cache,
            weights,
            block_table=block_table[: key.batch],
            max_kv_len=width,
            clean=False,
            out=logits,
        )
        return logits


class ListedStep(Step):
    """A step of sparse MLA whose layers tell slots of the cache, and how many each token has.

    These differ between layers: each has a schedule of its own.
    """

    __slots__ = ()

    def __init__(
        self, plans: Plans, num_heads: int, entries: int, tokens: int, like: torch.Tensor
    ) -> None:
        shape = 1, tokens, num_heads, entries
        super().__init__(plans, lambda: (cumla.MLASparsePlan, shape), like, like)

    def run_listed(
        self, q: Any, kv_cache: torch.Tensor, slots: Any, lens: Any, **options: Any
    ) -> cumla.AttentionState:
        """Attend for one layer to slots ``(tokens, entries)``, of which `lens` are valid.

        `q` is one tensor or a pair, with rows of tokens. out is ``(tokens, num_heads, 512)``; lse
        with its first axes flattened ``(tokens, num_heads)``.
        """
        if self.plan is None:
            self.plan = self._plans.find(*self._choose(), self._kv_lens)
        self._plans.scheduled = None
        if any(current_capture(kv_cache.device)):
            self._plans.keep(self)
        self.plan.update(lens)
        out, lse = self.plan.run(in_parts(q), kv_cache, slots, **options)
        return cumla.AttentionState(out.flatten(0, -3), lse)


class ShardedStep(ListedStep):
    """The same over a cache that is cut among ranks: lists name tokens of all of them.

    Each layer attends to those that this rank holds.
    """

    __slots__ = ("_parallel", "_requests", "entries")

    def __init__(
        self, plans: Plans, num_heads: int, topk: int, parallel: Any, requests: torch.Tensor
    ) -> None:
        super().__init__(plans, num_heads, topk, len(requests), requests)
        self._parallel, self._requests, self.entries = parallel, requests, topk

    def run_sparse(
        self,
        q: Any,
        kv_cache: torch.Tensor,
        indices: torch.Tensor,
        block_table: torch.Tensor,
        **options: Any,
    ) -> cumla.AttentionState:
        """Attend for one layer: what this rank has of out and lse, to be merged."""
        listed = self._parallel.lists(indices, block_table, self._requests)
        return self.run_listed(q, kv_cache, listed.indices, listed.topk_lens, **options)


def current_capture(on: torch.device) -> tuple[int, int]:
    """Tell torch's current stream and the number of its capture; zeros outside of a capture."""
    if on.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return 0, 0
    stream = torch.cuda.current_stream(on).cuda_stream
    return stream, driver().capture_number(stream) or 0


class Plans:
    """Plans of one kind of layers by shape, which take turns in one buffer.

    A shape that needs more memory gets a larger buffer, with some room to grow, and the other
    shapes move to it. A CUDA graph reads the arrays of its step and writes to the buffer of its
    plan: captured steps are kept. `sizes` are what the bytes of a buffer depend on beside the
    shape, `options` the rest of what all plans are made with.
    """

    def __init__(self, device: torch.device, sizes: dict[str, Any], **options: Any) -> None:
        self._device = device
        self._sizes = sizes
        self._options = options
        self._plans: dict[Hashable, Any] = {}
        self._buffers: dict[int, torch.Tensor] = {}  # the one of now, by its bytes
        self.captured: list[Step] = []
        self._begun: tuple[Any, Step] | None = None  # the last step, by what it was begun with
        self.scheduled: Step | None = None  # whose schedule was computed last,
        self.capture = 0  # in which capture

    def begin(
        self, kind: Any, shape: tuple[int, ...], kv_lens: torch.Tensor, qo_indptr: torch.Tensor
    ) -> Step:
        """Begin a step with the plan of a class and a shape.

        Groups of layers that begin one with the same arrays, before any layer runs, share it.
        """
        begun = self._begun
        if begun is not None:
            key, step = begun
            if key == (kind, shape) and not step.has_run and step.reads(kv_lens, qo_indptr):
                return step
        step = Step(self, lambda: (kind, shape), kv_lens, qo_indptr)
        self._begun = (kind, shape), step
        return step

    def begin_mla(
        self,
        num_heads: int,
        tokens: int,
        q_len: int | Callable[[], int],
        kv_lens: torch.Tensor,
        offsets: torch.Tensor,
    ) -> Step:
        """Begin a step of MLA.

        `q_len` are the query tokens of each request, 0 where they differ, as `offsets` tell; or it
        tells them when a layer asks. Batch-invariant plans have the same kernel for any of them.
        """

        def choose() -> tuple[Any, tuple[int, ...]]:
            each = q_len() if callable(q_len) else q_len
            if each and "batch_invariant" not in self._sizes:
                return cumla.MLADecodePlan, (len(kv_lens), each, num_heads)
            return cumla.MLAAttentionPlan, (len(kv_lens), tokens, num_heads)

        return Step(self, choose, kv_lens, offsets)

    def keep(self, step: Step) -> None:
        """Keep a captured step, to whose plan its graph writes."""
        if not any(kept is step for kept in self.captured[-1:]):
            self.captured.append(step)

    def find(self, kind: Any, shape: tuple[int, ...], like: torch.Tensor) -> Any:
        """Return the plan of a class and a shape."""
        key = kind, shape
        plan = self._plans.get(key)
        if plan is None:
            place = {"like": like}
            if self._device.type != "cpu":  # where plans have no buffer
                place["workspace"] = self._buffer(kind, shape)
            plan = kind(*shape, **self._sizes, **self._options, **place)
            if len(self._plans) >= _MOST_PLANS:  # mixed steps have any shapes
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _buffer(self, kind: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the buffer, or a larger one, to which the plans that no graph holds move."""
        nbytes = kind.workspace_bytes(*shape, **self._sizes)
        before = max(self._buffers, default=-1)
        if before < nbytes:
            for kept in (self._plans, self._buffers):
                kept.clear()  # its memory may be that of the next one
            self.scheduled = None
            nbytes = max(nbytes, before + min(before // 2, _MOST_ROOM))
            self._buffers[nbytes] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        (buffer,) = self._buffers.values()
        return buffer
