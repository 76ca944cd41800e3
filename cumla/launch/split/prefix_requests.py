# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/split/prefix_requests.cu, and what a plan with prefix groups keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cumla.core.arrays import ArrayView
from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec
from cumla.launch.split.ragged_schedule import int32s

if TYPE_CHECKING:
    from cumla.launch.kernel import Launch

_FILE = "split/prefix_requests"
SPECS = (
    KernelSpec.of(
        *("split", "prefix_requests", "PrefixRequestsParams"),
        threads=constant(_FILE, "kScheduleThreads"),
    ),
)
_ALIGNMENT = 256


class PrefixShape(NamedTuple):
    """The shape of calls whose requests share prefixes."""

    batch: int
    total_tokens: int
    num_heads: int
    value_dim: int
    page_size: int
    max_pages: int  # columns of the block table, whose rows are contiguous
    needs_ends: bool  # queries of a request see different keys, which arrays have to say
    is_together: bool = True  # prefixes and rests have one schedule

    @property
    def entries(self) -> int:
        """Entries of the arrays of requests, the two ends included."""
        return 4 * self.batch + 2

    @property
    def end_of_rests(self) -> int:
        """Entry at which rests end; those of prefixes follow it."""
        return 2 * self.batch


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """Byte offsets into a plan's buffer, behind that of the schedule, and where all ends."""

    tokens: int
    lengths: int
    pages: int
    ends: int
    states: int
    firsts: int
    shared: int
    out: int  # (2, total_tokens, num_heads, value_dim) float32: of prefixes, then of rests
    lse: int  # (2, total_tokens, num_heads) float32
    nbytes: int

    @classmethod
    def of(cls, shape: PrefixShape, begin: int) -> PrefixLayout:
        """Lay out the arrays from an offset on."""
        entries, tokens = shape.entries, shape.total_tokens
        rows = 2 * tokens * shape.num_heads
        offsets = [-(-begin // _ALIGNMENT) * _ALIGNMENT]
        for numbers in (
            *(entries, entries, entries),
            2 * tokens if shape.needs_ends else 0,
            *(tokens, shape.batch, shape.batch),
            *(rows * shape.value_dim, rows),
        ):
            offsets.append(offsets[-1] + -(-4 * numbers // _ALIGNMENT) * _ALIGNMENT)
        return cls(*offsets)


class RequestViews(NamedTuple):
    """Requests of a schedule, as it takes them."""

    qo_indptr: ArrayView
    kv_lens: ArrayView
    kv_indptr: ArrayView

    def part(self, first: int, end: int) -> RequestViews:
        """View some of the requests: those of entries `first` to `end`, which is the last end."""

        def cut(view: ArrayView, stop: int) -> ArrayView:
            return view._replace(ptr=view.ptr + 4 * first, shape=(stop - first,))

        return RequestViews(
            cut(self.qo_indptr, end + 1), cut(self.kv_lens, end), cut(self.kv_indptr, end + 1)
        )


class PrefixViews(NamedTuple):
    """The arrays of a buffer that other launches take."""

    requests: RequestViews  # all of them
    out: ArrayView
    lse: ArrayView  # (2, num_heads, total_tokens)

    @classmethod
    def of(
        cls, shape: PrefixShape, layout: PrefixLayout, buffer: int, device: int | None
    ) -> PrefixViews:
        """View them in the buffer at an address."""
        last, tokens, heads, dim = shape.entries - 1, *shape[1:4]

        def view(offset: int, sizes: tuple[int, ...], dtype: str = "int32") -> ArrayView:
            strides = [4]
            for size in reversed(sizes[1:]):
                strides.insert(0, strides[0] * size)
            return ArrayView(buffer + offset, sizes, tuple(strides), dtype, device)

        lse = view(layout.lse, (2, tokens, heads), "float32")
        by_head = lse._replace(
            shape=(2, heads, tokens), strides=(lse.strides[0], lse.strides[2], lse.strides[1])
        )
        requests = RequestViews(
            view(layout.tokens, (last + 1,)),
            view(layout.lengths, (last,)),
            view(layout.pages, (last + 1,)),
        )
        return cls(
            requests,
            view(layout.out, (2, tokens, heads, dim), "float32"),
            by_head,
        )


def prefix_requests_launch(
    shape: PrefixShape,
    layout: PrefixLayout,
    buffer: int,
    kv_lens: ArrayView,
    qo_indptr: ArrayView | None,
    group: ArrayView,
    prefix_len: ArrayView,
) -> Launch:
    """Describe how to list rests and prefixes as requests, in the buffer at an address.

    `kv_lens`, `group` and `prefix_len` are ``(batch,)`` int32, and `qo_indptr` is ``(batch + 1,)``,
    or None where all requests have as many tokens.
    """
    values = {
        **int32s("kv_lens", kv_lens),
        **int32s("qo_indptr", qo_indptr),
        **int32s("group", group),
        **int32s("prefix_len", prefix_len),
        "tokens": buffer + layout.tokens,
        "lengths": buffer + layout.lengths,
        "pages": buffer + layout.pages,
        "ends": buffer + layout.ends if shape.needs_ends else 0,
        "states": buffer + layout.states,
        "firsts": buffer + layout.firsts,
        "shared": buffer + layout.shared,
        "batch": shape.batch,
        "total_tokens": shape.total_tokens,
        "rest_begin": shape.total_tokens if shape.is_together else 0,
        "q_len": shape.total_tokens // shape.batch if qo_indptr is None else 0,
        "page_size": shape.page_size,
        "max_pages": shape.max_pages,
    }
    return launch_of(SPECS[0], (1, 1, 1), values)
