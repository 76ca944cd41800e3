# SPDX-License-Identifier: Apache-2.0
"""The base of FlashInfer's wrappers: arrays that CUDA graphs read, and a plan of cumla.

`plan` of a wrapper takes lengths and pages, from the CPU or the GPU, and waits for nothing. The
schedule is computed when the first run of a step asks for it, on its stream; in a wrapper for
graphs `plan` computes it anew, in place, for graphs that have been captured already.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from math import e, inf, log2
from statistics import mode
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cumla.compat._arguments import check_axes, check_integers, check_tensors
from cumla.compat._table import Interface
from cumla.core.arrays import open_call
from cumla.core.names import arg

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "BACKENDS",
    "LOG2_E",
    "NO_KERNELS",
    "Planned",
    "checked_batch",
    "checked_dtypes",
    "dtype_of",
    "factor_of",
    "name_of",
]

LOG2_E = log2(e)
BACKENDS = ("auto", "fa2", "fa3")
NO_KERNELS = "belongs to kernels that cumla does not have; leave it out"
# By cumla's names. Offsets have an entry more than there are requests.
_AXES = {
    "qo_indptr": "batch + 1",
    "kv_lens": "batch",
    "last_page_len": "batch",
    "kv_indptr": "batch + 1",
    "kv_indices": "pages",
    "block_table": "batch, max_pages",
}
_MORE = {"batch": 0, "batch + 1": 1}  # entries than requests
_AS_VALUE_ERRORS = Interface(errors=ValueError)

P = TypeVar("P")
S = TypeVar("S", bound=tuple[Any, ...])


class Planned(ABC, Generic[P, S]):
    """A wrapper: `P` is the plan of its runs, `S` the options of such a plan but query tokens.

    `buffers` are, by cumla's names, the caller's name and the tensor that graphs read, or None;
    `theirs` are the names of the arguments of `plan`, `q_name` that of queries in messages.
    """

    def __init__(
        self,
        workspace: Any,
        use_cuda_graph: bool,
        buffers: Mapping[str, tuple[str, Any]],
        theirs: Mapping[str, str],
        q_name: str,
    ) -> None:
        self.device = workspace.device
        self._use_cuda_graph = use_cuda_graph
        self._theirs = theirs
        self._q_name = q_name
        self._kept: dict[str, Any] = {}
        for name, (own_name, buffer) in buffers.items():
            if use_cuda_graph and buffer is not None:
                self._check_buffer(own_name, buffer, _AXES[name])
                self._kept[name] = buffer
        self._arrays: dict[str, Any] = {}  # of the last plan, by cumla's names
        self._tokens = 0  # that the last plan's offsets end with, where the host knows them
        self._shape: S | None = None
        self._said: dict[str, Any] = {}  # of the first plan: the values that a graph depends on
        self._plan: P | None = None
        self._made_for: tuple[S, int] | None = None
        # Stream of the last update of _plan with _arrays, and whether it was captured.
        self._updated_on: tuple[int, bool] | None = None

    @abstractmethod
    def _make(self, shape: S, tokens: int, like: Any) -> P:
        """Make a plan for runs with this number of query tokens, in the framework of an array."""

    def _check_buffer(self, name: str, buffer: Any, axes: str) -> None:
        _check_lengths(name, buffer, axes)
        if name_of(buffer.dtype) != "int32":
            raise ValueError(
                f"{arg(name)}: needs int32, in which CUDA graphs read it, got {buffer.dtype}; "
                f"allocate it so"
            )
        if not buffer.is_contiguous():
            raise ValueError(
                f"{arg(name)}: needs contiguous numbers, got strides {buffer.stride()}; allocate "
                f"it so"
            )
        if buffer.device != self.device:
            raise ValueError(
                f"{arg(name)}: needs a tensor on {self.device}, where float_workspace_buffer is, "
                f"got one on {buffer.device}; move it there"
            )

    @property
    def _on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    def _staged(self, array: Any) -> Any:
        """Return it as int32 without gaps, and where a copy to the GPU waits for nothing."""
        array = array.int().contiguous()
        return array.pin_memory() if self._on_gpu and array.device.type == "cpu" else array

    def _there(self, array: Any) -> Any:
        return self._staged(array).to(self.device, non_blocking=self._on_gpu)

    def _take(self, shape: S, arrays: dict[str, Any], said: dict[str, Any]) -> None:
        """Take lengths and pages for the runs that follow; a graph depends on what is `said`."""
        if self._use_cuda_graph:
            self._check_said(said)
            self._keep(arrays)
            self._said = said
        else:
            self._arrays = {name: self._there(array) for name, array in arrays.items()}
        self._tokens = _known_end(arrays.get("qo_indptr"))
        self._shape, self._updated_on = shape, None
        if self._use_cuda_graph and self._plan is not None:
            self._update()  # for graphs that hold runs without an update

    def _check_said(self, said: Mapping[str, Any]) -> None:
        for name, value in said.items():
            first = self._said.get(name, value)
            if value != first:
                raise ValueError(
                    f"{arg(name)}: needs {first}, as in the first plan of this wrapper, got "
                    f"{value}; with use_cuda_graph make a wrapper for each"
                )

    def _keep(self, arrays: dict[str, Any]) -> None:
        """Copy lengths and pages to where graphs read them, once they are known to fit there."""
        for name, array in arrays.items():
            kept = self._kept.get(name)
            if kept is not None:
                _check_room(name, self._theirs[name], tuple(kept.shape), tuple(array.shape))
        for name, array in arrays.items():
            staged = self._staged(array)
            kept = self._kept.get(name)
            if kept is None:
                self._kept[name] = staged.to(self.device, non_blocking=self._on_gpu, copy=True)
            else:
                corner = tuple(slice(size) for size in staged.shape)
                kept[corner].copy_(staged, non_blocking=self._on_gpu)
        self._arrays = {name: self._kept[name] for name in arrays}

    def _ready_plan(self, q: Any) -> P:
        """Return a plan whose schedule serves a run with this query, on the current stream."""
        assert self._shape is not None
        place = _place(self._q_name, q)
        tokens = q.shape[0]
        if tokens < self._tokens:
            raise ValueError(
                f"{self._q_name}: needs the {self._tokens} query tokens that "
                f"{self._theirs['qo_indptr']} of the plan ends with, got {tokens}; pass the rows "
                f"of all requests"
            )
        made_for = self._shape, tokens
        if self._plan is None or made_for != self._made_for:
            if self._made_for is not None and self._use_cuda_graph:
                raise ValueError(
                    f"{self._q_name}: needs {self._made_for[1]} query tokens, as in the first run "
                    f"of this wrapper, got {tokens}; with use_cuda_graph make a wrapper for each "
                    f"number"
                )
            self._plan = self._make(self._shape, tokens, q)
            self._made_for, self._updated_on = made_for, None
        if self._updated_on != place:
            self._update()
        return self._plan

    def _update(self) -> None:
        """Have the schedule computed, on the current stream; a capture gets it into the graph.

        What was only captured has not been computed, so it counts for that capture alone.
        """
        plan: Any = self._plan
        arrays = self._arrays
        offsets = {name: arrays.get(name) for name in ("qo_indptr", "kv_indptr")}
        with Interface(self._theirs, ValueError):
            plan.update(arrays.get("kv_lens"), **offsets)
        name, array = next(iter(arrays.items()))
        self._updated_on = _place(self._theirs[name], array)


def _place(name: str, tensor: Any) -> tuple[int, bool]:
    """Return the stream of a call with this tensor, and whether it is being captured."""
    with open_call(((name, tensor),)) as call:  # the driver answers for the current context
        return call.stream, call.capturing


def _known_end(offsets: Any) -> int:
    """Return what offsets end with, where the host knows it; 0 where it does not."""
    return 0 if offsets is None or offsets.is_cuda else int(offsets[-1])


def checked_batch(theirs: Mapping[str, str], arrays: dict[str, Any]) -> int:
    """Check that all arrays describe the same requests, and count these.

    kv_indptr may go on after the last one; it is cut there.
    """
    for name, array in arrays.items():
        _check_lengths(theirs[name], array, _AXES[name])
        with _AS_VALUE_ERRORS:
            check_integers(**{theirs[name]: array})
    extra = {n: _MORE.get(_AXES[n].partition(",")[0]) for n in arrays}
    counts = {n: arrays[n].shape[0] - m for n, m in extra.items() if m is not None}
    batch: int = mode(counts.values())  # what most of them say: the one that differs is wrong
    if counts.get("kv_indptr", -1) > batch:
        counts["kv_indptr"] = batch
        arrays["kv_indptr"] = arrays["kv_indptr"][: batch + 1]
    others = [theirs[name] for name, count in counts.items() if count == batch]
    for name, count in counts.items():
        if count != batch:
            got = arrays[name].shape[0]
            raise ValueError(
                f"{theirs[name]}: needs {batch + got - count} entries with the {batch} requests of "
                f"{others[0]}, got {got}; describe the same requests"
            )
    return batch


def _check_lengths(name: str, tensor: Any, axes: str) -> None:
    with _AS_VALUE_ERRORS:
        check_tensors(**{name: tensor})
        check_axes(name, tensor, axes)


def _check_room(name: str, theirs: str, room: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Check that an array fits where graphs read it: lengths exactly, pages with room to spare."""
    fixed = 0 if name == "kv_indices" else 1
    if room[:fixed] != shape[:fixed] or room[fixed:] < shape[fixed:]:
        raise ValueError(
            f"{theirs}: needs to fit the buffer of shape {room} that CUDA graphs read, got "
            f"{shape}; make the wrapper with larger buffers, and one for each batch"
        )


def factor_of(name: str, scale: Any, what: str) -> float:
    """Return a scale as a number, without waiting for a GPU; `what` is there that needs it."""
    got = None
    if scale is None:
        got = "None"
    elif getattr(scale, "is_cuda", False):
        got = "a tensor on a GPU, which would have to be waited for"
    elif hasattr(scale, "numel") and scale.numel() != 1:
        got = f"a tensor of shape {tuple(scale.shape)}"
    if got is not None:
        raise ValueError(f"{arg(name)}: needs a number{what}, got {got}; pass float(...)")
    number = float(scale)
    if not 0 < number < inf:
        raise ValueError(
            f"{arg(name)}: needs a number above 0, got {scale}; quantise with a positive factor"
        )
    return number


def name_of(dtype: Any) -> str:
    """Name a dtype of PyTorch, or one that is a name already."""
    return str(dtype).removeprefix("torch.")


def dtype_of(given: Any) -> Any:
    """Return PyTorch's dtype of a name; other things as they are."""
    torch = sys.modules["torch"]
    found = getattr(torch, name_of(given), None) if isinstance(given, str) else None
    return found if isinstance(found, torch.dtype) else given


def checked_dtypes(
    query: Any,
    cache: Any,
    output: Any,
    fp8_beside: Iterable[str] = (),
    output_name: str = "o_data_type",
    cache_name: str = "kv_data_type",
) -> tuple[str, str]:
    """Return the names of the dtype of query and output, and of that of the cache."""
    name = name_of(query)
    if name not in ("bfloat16", "float16"):
        raise ValueError(f"q_data_type: needs bfloat16 or float16, got {query}; convert the arrays")
    if cache != query and (name not in fp8_beside or name_of(cache) != "float8_e4m3fn"):
        fp8 = f", or float8_e4m3fn beside {' or '.join(fp8_beside)}" if fp8_beside else ""
        way_out = "keep the cache in that, or import the wrapper from flashinfer"
        if name_of(cache) in ("bfloat16", "float16"):
            way_out = f"pass q_data_type={cache}, if the queries are that, too"
        raise ValueError(f"{cache_name}: needs q_data_type, {query}{fp8}, got {cache}; {way_out}")
    if output not in (None, query):
        raise ValueError(
            f"{output_name}: needs q_data_type, {query}, got {output}; leave it out, and pass out= "
            f"of float32 to run() for an output that is not rounded"
        )
    return name, name_of(cache)
