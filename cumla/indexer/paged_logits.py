# SPDX-License-Identifier: Apache-2.0
"""FP8 logits over a paged cache: :func:`paged_mqa_logits` and its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Never

from cumla import reference
from cumla.core.arguments import (
    INT32,
    Array,
    bind,
    check_layout,
    checked_int,
)
from cumla.core.names import arg
from cumla.core.operation import Both, Operation, Output, Scheduled, parts_on_host
from cumla.core.paged import (
    BLOCK_TABLE,
    KV_LENS,
    Schedule,
    check_block_table,
    check_made_for,
    check_table_lengths,
    refuse_value,
)
from cumla.core.plan import Plan
from cumla.core.spec import Out, Spec, array, flag, integer
from cumla.indexer.arguments import (
    CACHE_FORMAT,
    FLOAT32,
    LOGITS_DTYPE,
    MXFP4,
    check_e4m3,
    check_page_size,
    check_page_stride,
    check_q_len,
    check_sizes,
    checked_pair,
    logits_output,
    pages_of,
)
from cumla.launch.device import checked_sm_count, sm_count_of
from cumla.launch.indexer.paged_mqa_logits import paged_mqa_logits_launch, paged_mqa_logits_spec
from cumla.launch.indexer.paged_mqa_schedule import (
    PagedMQAKey,
    kept_lens,
    paged_mqa_schedule_launch,
    paged_mqa_schedule_spec,
    plan_bytes,
)
from cumla.launch.indexer.shape import PagedMQAArguments
from cumla.launch.module import load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable
    from cumla.core.paged import Host, Results

__all__ = [
    "PagedMQALogitsPlan",
    "checked_kv_lens",
    "checked_paged",
    "checked_shape",
    "named",
    "paged_mqa_logits",
]

_SHAPE = ("batch", "q_len", "num_heads", "head_dim", "page_size", "max_pages")


def pages_or_pair(name: str, value: Any) -> dict[str, Any]:
    """Name pages, or keys and scales apart."""
    return checked_pair(name, value) if isinstance(value, (tuple, list)) else {name: value}


PAGED_MQA_LOGITS = Spec(
    "paged_mqa_logits",
    (
        array("q"),
        array("kv_cache", pages_or_pair),
        array("weights"),
        array("block_table"),
        array("kv_lens"),
        integer("max_kv_len", "there is nothing to write"),
        LOGITS_DTYPE,
        flag("clean", True),
        CACHE_FORMAT,
        Out("out"),
    ),
    positional=5,
    kernels=("paged_mqa_",),
    returns=("out",),
    planned=("kv_lens",),
)


@PAGED_MQA_LOGITS
def paged_mqa_logits(
    q: Any,
    kv_cache: Any,
    weights: Any,
    block_table: Any,
    kv_lens: Any,
    *,
    max_kv_len: int,
    logits_dtype: Any = None,
    clean: bool = True,
    cache_format: str | None = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Score the cached tokens of each request: the FP8 indexer's logits of a decoding step.

    The formula is that of :func:`mqa_logits`; token ``t`` of request ``b`` is in page
    ``block_table[b, t // page_size]`` at row ``t % page_size``. Arrays on the GPU are computed
    as by :func:`mqa_logits`, arrays on the CPU by :func:`cumla.reference.paged_mqa_logits`.

    Parameters
    ----------
    q : array
        ``(batch, q_len, num_heads, head_dim)`` float8_e4m3fn, or uint8 with its bits: the newest
        tokens of each request, up to 8; otherwise as in :func:`mqa_logits`.
    kv_cache : array or pair of arrays
        ``(num_pages, page_size, 1, head_dim + 4)`` uint8, or the same without the 1, or keys
        ``(num_pages, page_size, head_dim)`` in a dtype of q's and scales ``(num_pages, page_size)``
        float32 as a pair, as :func:`cumla.append_indexer_cache` writes them. page_size is 16, 32,
        64 or 128; the keys of a page are contiguous, and pages any multiple of 16 bytes apart.
        Slots that no query sees may hold anything, NaN included.
    weights : array
        ``(batch * q_len, num_heads)`` float32, with q's scale folded in. Any strides.
    block_table : array
        ``(batch, max_pages)`` int32, rows contiguous. Entries after a request's last page are not
        used. A used entry outside of ``[0, num_pages)`` counts as the nearest page.
    kv_lens : array
        ``(batch,)`` int32: cached tokens of each request, the q_len newest included; query i sees
        ``kv_lens - (q_len - 1 - i)`` of them. Or ``(batch, q_len)`` int32: how many each query
        sees. Both are clamped to ``[0, max_pages * page_size]`` and to max_kv_len.
    max_kv_len : int
        Columns of the result.
    logits_dtype, clean : optional
        As in :func:`mqa_logits`.
    cache_format : str, optional
        ``"mxfp4"`` for keys of 68 bytes, with head_dim 128: ``(num_pages, page_size, 1, 68)``
        uint8, or the same without the 1. A page holds ``page_size`` rows of 64 bytes, then 4 bytes
        for each row. A row has e2m1 numbers, two per byte, the first in the low half. The 4 bytes
        are exponents of powers of two, biased by 127, one per 32 columns. 255 makes a token's
        logits NaN; exponents below 7 count as a scale of 0. Numbers 2^15 below the largest of their
        row may lose bits.
    out : array, optional
        ``(batch * q_len, max_kv_len)``, as in :func:`mqa_logits`.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    array
        The logits, an array of q's framework: row ``b * q_len + i`` is query i of request b.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`.

    Notes
    -----
    A CUDA graph holds the addresses of the inputs and of `out`, and keeps none of them alive.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q, scale = cumla.quantize_fp8(np.ones((2, 1, 8, 128), np.float32))
    >>> kv, table, lens = np.zeros((4, 64, 132), np.uint8), np.int32([[0], [2]]), np.int32([9, 7])
    >>> cumla.paged_mqa_logits(q, kv, scale[:, 0], table, lens, max_kv_len=64).shape
    (2, 64)
    """
    return _PAGED.call(
        *(q, kv_cache, weights, block_table, kv_lens, max_kv_len, logits_dtype, clean),
        *(cache_format, out, stream),
    )


class PagedArguments(NamedTuple):
    """Checked arguments of one call without its lengths; the cache as keys and scales."""

    q: ArrayView
    k_cache: ArrayView
    scale_cache: ArrayView
    weights: ArrayView | None
    block_table: ArrayView
    width: int
    dtype: str | None
    clean: bool
    cache_format: str | None = None

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """The sizes of the plan: the first fields of its key."""
        batch, q_len, num_heads, head_dim = self.q.shape
        page_size, max_pages = self.k_cache.shape[1], self.block_table.shape[1]
        return batch, q_len, num_heads, head_dim, page_size, max_pages


class _Schedule(Schedule[PagedMQAKey]):
    """Keeps the lengths in the buffer, too; they may be those of each query."""

    def arguments(self, views: Views, options: tuple[int, int, bool | None]) -> tuple[ArrayView]:
        return (checked_kv_lens(views, *options),)

    def recipe(
        self, key: PagedMQAKey, arguments: tuple[Any, ...], outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        return super().recipe(key, arguments, outs, buffer) if key.q_len else ()


class _Attend(Operation[PagedArguments, PagedMQAKey]):
    """Scores by the schedule in a plan's buffer, and with the lengths there."""

    trusted = ("block_table",)

    def arguments(
        self, views: Views, options: tuple[int, str | None, bool, str | None]
    ) -> PagedArguments:
        return checked_paged(views, options)

    def outputs(self, arguments: PagedArguments) -> tuple[Output, ...]:
        batch, q_len, _, _ = arguments.q.shape
        return (logits_output((batch * q_len, arguments.width), arguments.dtype),)

    def workspace_bytes(self, key: PagedMQAKey) -> int:
        return plan_bytes(key)

    def recipe(
        self, key: PagedMQAKey, arguments: PagedArguments, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        if 0 in arguments.q.shape:
            return ()
        lens = kept_lens(key, arguments.block_table, buffer)
        q, k_cache, scale_cache, weights, table, *_ = arguments
        assert weights is not None  # only the shape of a plan needs none
        views = PagedMQAArguments(q, k_cache, scale_cache, weights, lens, table, buffer, *outs)
        return (paged_mqa_logits_launch(key, views, clean=arguments.clean),)

    def check_values(self, host: Host, arguments: PagedArguments) -> None:
        lengths, table, width = host["kv_lens"], host["block_table"], arguments.width
        num_pages, page_size = arguments.k_cache.shape[:2]
        check_table_lengths(lengths, table, page_size)
        need = f"a length up to max_kv_len = {width}"
        left_out = "the logits after it would be left out, ask for more columns"
        refuse_value("kv_lens", lengths, lengths > width, need, left_out)
        most = lengths if lengths.ndim == 1 else lengths.max(axis=1, initial=0)
        nearest = "the kernels would take the nearest that there is"
        check_block_table(table, most, num_pages, page_size, nearest)

    def reference(self, host: Host, arguments: PagedArguments) -> Results:
        names = ("q", "weights", "block_table", "kv_lens", "out")
        logits = reference.paged_mqa_logits(
            kv_cache=parts_on_host(host, "kv_cache"),
            max_kv_len=arguments.width,
            logits_dtype=arguments.dtype,
            clean=arguments.clean,
            cache_format=arguments.cache_format,
            **{name: host[name] for name in names if name in host},
        )
        return (logits,)


class _Paged(Scheduled[PagedArguments, PagedMQAKey]):
    def batch(self, attend: PagedArguments, views: Views) -> tuple[int, int, bool | None]:
        batch, q_len, _, _ = attend.q.shape
        return batch, q_len, None

    def key(self, arguments: Both[PagedArguments], device: int) -> PagedMQAKey:
        (lens,), attend, _ = arguments
        mxfp4 = attend.cache_format is not None
        return PagedMQAKey(*attend.shape, len(lens.shape) == 2, sm_count_of(device), mxfp4)


_SCHEDULE = _Schedule(
    {"kv_lens": KV_LENS},
    lambda key, buffer, lens: paged_mqa_schedule_launch(key, lens, buffer, keeps_lens=True),
)
_ATTEND = _Attend()
_PAGED = _Paged(_SCHEDULE, _ATTEND, PAGED_MQA_LOGITS)


class PagedMQALogitsPlan(Plan[PagedMQAKey]):
    """Schedule of :func:`paged_mqa_logits`, to be used for every layer of a decoding step.

    It works like :class:`cumla.MLADecodePlan`, with the same rules for buffers, streams, threads,
    CUDA graphs and errors. The buffer also keeps the lengths.

    Parameters
    ----------
    batch, q_len, num_heads, head_dim : int
        As in ``q`` ``(batch, q_len, num_heads, head_dim)``.
    max_pages : int
        Columns of the block table.
    page_size : int
        Tokens of a cache page: 16, 32, 64 or 128.
    kv_lens_shape : tuple of int, optional
        ``(batch,)``, or ``(batch, q_len)`` where each query has a length of its own.
    cache_format : str, optional
        As in :func:`paged_mqa_logits`. ``run`` does not need it.
    device, workspace, like, stream : optional
        As for :class:`cumla.MLADecodePlan`, with which it may share a workspace.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q = cumla.quantize_fp8(np.ones((2, 1, 64, 128), np.float32)).values
    >>> kv_cache, weights = np.zeros((4, 64, 132), np.uint8), np.ones((2, 64), np.float32)
    >>> block_table, kv_lens = np.array([[0, 1], [2, 3]], np.int32), np.array([100, 7], np.int32)
    >>> plan = cumla.PagedMQALogitsPlan.from_arrays(q, kv_cache, block_table, kv_lens)
    >>> plan.update(kv_lens)
    >>> for layer in range(3):
    ...     logits = plan.run(q, kv_cache, weights, block_table=block_table, max_kv_len=128)
    >>> logits.shape
    (2, 128)
    """

    _operation = _PAGED
    _lengths = "kv_lens"

    def __init__(
        self,
        batch: int,
        q_len: int,
        num_heads: int,
        head_dim: int,
        *,
        max_pages: int,
        page_size: int = 64,
        kv_lens_shape: Sequence[int] | None = None,
        cache_format: str | None = None,
        device: int | None = None,
        workspace: Any = None,
        like: Any = None,
        stream: Any = None,
    ) -> None:
        numbers = (batch, q_len, num_heads, head_dim, page_size, max_pages)
        shape = checked_shape(numbers, kv_lens_shape)
        place = (device, workspace, like, stream)
        mxfp4 = CACHE_FORMAT.check("cache_format", cache_format) is not None
        self._make(lambda on: PagedMQAKey(*shape, sm_count_of(on), mxfp4), *place)

    @classmethod
    def from_arrays(
        cls,
        q: Any,
        kv_cache: Any,
        block_table: Any,
        kv_lens: Any,
        *,
        cache_format: str | None = None,
        workspace: Any = None,
        stream: Any = None,
    ) -> PagedMQALogitsPlan:
        """Make a plan for the shapes of these arrays, with a buffer of q's framework.

        Arrays are as in :func:`paged_mqa_logits`; only their shapes, dtypes and device are used.
        All other parameters are those of the class.
        """
        arrays = named(q, kv_cache, None, block_table) | {"kv_lens": kv_lens}
        return cls._from(arrays, stream, workspace=workspace, cache_format=cache_format)

    @classmethod
    def _numbers(cls, views: dict[str, ArrayView | None], options: Any) -> dict[str, Any]:
        form = CACHE_FORMAT.check("cache_format", options["cache_format"])
        shape = checked_paged(views, (0, None, True, form)).shape
        numbers = dict(zip(_SHAPE, shape, strict=True))
        (lens,) = _SCHEDULE.arguments(views, (numbers["batch"], numbers["q_len"], None))
        return numbers | {"kv_lens_shape": lens.shape}

    @staticmethod
    def workspace_bytes(
        batch: int,
        q_len: int,
        num_heads: int,
        head_dim: int,
        *,
        max_pages: int,
        page_size: int = 64,
        kv_lens_shape: Sequence[int] | None = None,
        cache_format: str | None = None,
        sm_count: int | None = None,
    ) -> int:
        """Size of a plan's buffer in bytes, from numbers as for the class.

        `sm_count` and errors are as in :meth:`cumla.MLADecodePlan.workspace_bytes`.
        """
        numbers = (batch, q_len, num_heads, head_dim, page_size, max_pages)
        CACHE_FORMAT.check("cache_format", cache_format)
        shape = checked_shape(numbers, kv_lens_shape)
        return plan_bytes(PagedMQAKey(*shape, checked_sm_count(sm_count)))

    def update(self, kv_lens: Any, *, stream: Any = None, **misplaced: Never) -> None:
        """Compute the schedule for these lengths, on the device, and keep the lengths there.

        Arguments, streams, captures and errors are as in :meth:`cumla.MLADecodePlan.update`; the
        lengths are those of :func:`paged_mqa_logits`.
        """
        if misplaced:
            raise self._misplaced("update", misplaced)
        self._renew(kv_lens, stream)

    def run(
        self,
        q: Any,
        kv_cache: Any,
        weights: Any,
        *,
        block_table: Any,
        max_kv_len: int,
        logits_dtype: Any = None,
        clean: bool = True,
        out: Any = None,
        stream: Any = None,
        **misplaced: Never,
    ) -> Any:
        """Score with the schedule of the last update, and with the lengths it was given.

        Errors are those of :meth:`cumla.MLADecodePlan.run`.

        Parameters
        ----------
        q, kv_cache, weights, block_table, max_kv_len, logits_dtype, clean, out, stream
            As in :func:`paged_mqa_logits`.
        """
        if misplaced:
            raise self._misplaced("run", misplaced)
        return self._call(
            q, kv_cache, weights, block_table, max_kv_len, logits_dtype, clean, out, stream
        )

    @property
    def _batch(self) -> tuple[int, int, bool]:
        key = self.key
        return key.batch, key.q_len, key.per_row_lens

    def _fixed(self) -> dict[str, Any]:
        return {"cache_format": MXFP4 if self.key.mxfp4 else None}

    def _load(self, device: int, capturing: Callable[[], bool]) -> None:
        key = self.key
        logits = paged_mqa_logits_spec(key._replace(q_len=max(key.q_len, 1)))
        for spec in (paged_mqa_schedule_spec(key), logits):
            load(spec, device, capturing=capturing)

    def _check_shape(self, arguments: PagedArguments) -> None:
        check_made_for(_SHAPE, tuple(self.key[:6]), arguments.shape)


Shape = tuple[int, int, int, int, int, int, bool]


def checked_shape(numbers: tuple[int, int, int, int, int, int], kv_lens_shape: Any) -> Shape:
    """Check a shape that was given in numbers, to make a plan for it."""
    for name, value in zip(_SHAPE, numbers, strict=True):
        least = 0 if name in ("batch", "q_len") else 1
        checked_int(name, value, "pass the size of a call", least=least)
    batch, q_len, num_heads, head_dim, page_size, _ = numbers
    check_sizes("num_heads", num_heads, "head_dim", head_dim)
    check_q_len("q_len", q_len)
    check_page_size("page_size", page_size)
    shapes = (batch,), (batch, q_len)
    lens = shapes[0] if kv_lens_shape is None else kv_lens_shape
    if not isinstance(lens, (tuple, list)) or tuple(lens) not in shapes:
        raise ValueError(
            f"kv_lens_shape: needs {shapes[0]}, or {shapes[1]} with a length of each query, got "
            f"{lens!r}; pass the shape of {arg('kv_lens')}"
        )
    return *numbers, len(lens) == 2


def named(q: Any, kv_cache: Any, weights: Any, block_table: Any) -> dict[str, Any]:
    """Name the arrays of a call; weights may be None."""
    given = {} if weights is None else {"weights": weights}
    cache = pages_or_pair("kv_cache", kv_cache)
    return {"q": q, **cache, **given, "block_table": block_table}


def checked_paged(
    views: Views, options: tuple[int, str | None, bool, str | None] = (0, None, True, None)
) -> PagedArguments:
    """Check the arrays of a call, by name, but for its lengths; weights may be missing."""
    given = {name: view for name, view in views.items() if view is not None}
    q = given["q"]
    check_e4m3("q", q, f"(batch, {arg('q_len')}, num_heads, head_dim)", 4)
    batch, q_len, num_heads, head_dim = q.shape
    check_sizes("q", num_heads, "q", head_dim)
    check_q_len("q", q_len)
    check_layout("q", q)
    keys, scales = pages_of(given, head_dim, options[3])
    if "kv_cache" not in given:
        if keys.strides[1:] != (head_dim, 1):
            raise ValueError(
                f"{arg('kv_cache[0]')}: needs pages whose keys are contiguous, got strides "
                f"{given['kv_cache[0]'].strides}; only pages may have gaps between them"
            )
        check_page_stride("kv_cache[0]", keys)
        check_layout("kv_cache[1]", scales)
    sizes = {"batch*q_len": batch * q_len, "num_heads": num_heads, "batch": batch}
    table = {"weights": Array("batch*q_len num_heads", FLOAT32), "block_table": BLOCK_TABLE}
    if bind(table, given, sizes)["max_pages"] == 0:
        raise ValueError(
            f"{arg('block_table')}: needs at least one column, got shape "
            f"{given['block_table'].shape}; skip the call where there is no cache"
        )
    return PagedArguments(q, keys, scales, given.get("weights"), given["block_table"], *options)


def checked_kv_lens(views: Views, batch: int, q_len: int, per_row: bool | None = None) -> ArrayView:
    """Check lengths: one for each request, or one for each query; None: either."""
    view = views["kv_lens"]
    assert view is not None
    has_rows = len(view.shape) == 2 if per_row is None else per_row
    of_queries = Array("batch q_len", INT32, way_out="give each query its length")
    lens = of_queries if has_rows else KV_LENS
    if per_row is not None and len(view.shape) == 2 - per_row:
        way_out = f"{lens.way_out}, or make a plan for lengths of this shape"
        lens = lens._replace(way_out=way_out)
    bind({"kv_lens": lens}, views, {"batch": batch, "q_len": q_len})
    return view
