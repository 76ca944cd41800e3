# SPDX-License-Identifier: Apache-2.0
"""Attention of Hugging Face Transformers by cumla: importing this registers the name ``"cumla"``.

::

    import cumla.transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cumla")

Models with MHA, GQA or MQA that Transformers sends through its attention interface run with it:
decoding and prefill, windows, sinks, soft caps, padded batches, dynamic and static caches, on a
Hopper GPU or, by :mod:`cumla.reference`, on the CPU. Models with MLA run as Transformers computes
them, with keys and values of all heads. Refused, by an error that names the reason: masks that are
neither causal nor full (images that see each other, chunks, packed sequences), position biases,
dropout, and training. Continuous batching of Transformers takes its own implementations only.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import cumla
from cumla.core.arrays import glance, open_call, reopen_call
from cumla.core.check_mode import check_mode
from cumla.core.operation import movable, unplaced
from cumla.core.spec import REQUIRED
from cumla.errors import MissingDependencyError
from cumla.launch.kernel import PreparedLaunch, Template
from cumla.launch.module import load
from cumla.launch.tensor_map import is_plain

try:
    import torch
    from transformers import AttentionInterface
    from transformers.masking_utils import (
        AttentionMaskInterface,
        bidirectional_mask_function,
        causal_mask_function,
        sliding_window_bidirectional_overlay,
        sliding_window_overlay,
    )
except ImportError as error:
    problem = (
        f"transformers: cumla.transformers needs Transformers, with its mask functions ({error})"
    )
    raise MissingDependencyError(problem, "pip install torch transformers") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from cumla.core.arrays import ArrayView, Call

__all__ = ["NAME", "attention", "mask"]

NAME = "cumla"
_ELSE = 'load the model with attn_implementation="sdpa" or "eager"'
_OPTIONS = "causal", "window", "softcap", "softmax_scale"
# Arguments of a call that are no mask and change no number.
_IGNORED = {
    *("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"),
    *("output_router_logits", "return_dict", "num_items_in_batch", "logits_to_keep", "layer_idx"),
    *("position_embeddings", "past_key_values", "is_training", "num_logits_to_keep"),
}


def _parts(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """List the masks whose intersection a mask function is: it holds them in its closure."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    inner = next((c for c in cells if isinstance(c, tuple) and all(map(callable, c))), None)
    if inner is None or function.__name__ != "and_mask":
        return [function]
    return [part for one in inner for part in _parts(one)]


_CAUSAL = causal_mask_function.__code__
_FULL = bidirectional_mask_function.__code__
_WINDOW = sliding_window_overlay(1).__code__
_WINDOWS = sliding_window_bidirectional_overlay(1).__code__
# The third axis of what `mask` returns tells kinds of attention apart, so that no layer reads it.
_IS_CAUSAL, _IS_FULL, _HAS_WINDOW = 1, 2, 3  # and more by the tokens on each side of a window


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor | None:
    """Return which keys exist, ``(batch_size, 1, kind, 2)`` int32: begin and end; None if all do.

    The attention itself hides later keys and those before a window. Transformers passes masks with
    four axes on as they are. For an `attention_mask` on the GPU the host waits, twice if it has
    padding. Do not write to what comes back: layers would use the schedule of what it was.

    Raises
    ------
    NotImplementedError
        The model masks more than that, a request has keys on both sides of padding, or padding
        follows keys in windows to both sides.
    """
    parts = _parts(mask_function)
    unknown = [part for part in parts if part.__code__ not in (_CAUSAL, _FULL, _WINDOW, _WINDOWS)]
    if unknown:
        names = ", ".join(sorted({part.__qualname__ for part in unknown}))
        raise NotImplementedError(
            f"attention_mask: cumla's attention is causal or full, with windows and padding, got a "
            f"mask of {names}; {_ELSE}"
        )
    codes = [part.__code__ for part in parts]
    is_causal = _CAUSAL in codes
    kind = _IS_CAUSAL if is_causal else _IS_FULL
    if _WINDOWS in codes:
        (side,) = (cell.cell_contents for cell in parts[codes.index(_WINDOWS)].__closure__ or ())
        kind = _HAS_WINDOW + side
    if (_WINDOWS if is_causal else _WINDOW) in codes:
        raise NotImplementedError(
            f"attention_mask: cumla's windows are of causal attention, or to both sides, got "
            f"another one; {_ELSE}"
        )
    last = q_offset + q_length - kv_offset  # where queries end among the keys
    if kind >= _HAS_WINDOW and (isinstance(last, torch.Tensor) or last != kv_length):
        raise NotImplementedError(
            f"attention_mask: windows to both sides need a query for each of {kv_length} keys, got "
            f"{q_length}; {_ELSE}"
        )
    end: Any = last if is_causal else kv_length
    may_be_all = not isinstance(end, torch.Tensor) and end == kv_length and kind < _HAS_WINDOW
    if attention_mask is None:
        return None if may_be_all else _bounds(batch_size, kind, 0, end, device)
    real = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    is_recorded = _is_recorded(real)
    if may_be_all and not is_recorded and real.shape[-1] == kv_length and real.all():
        return None
    seen = real.cumsum(-1)
    count = seen[:, -1]
    first = (seen == 0).sum(-1)
    behind = (seen < count[:, None]).sum(-1) + 1  # the last key
    if not is_recorded:
        # Padding after the last key: causality hides it, else it is cut off, with its positions.
        wrong = torch.stack((behind - first > count, behind < kv_length)).any(1)
        has_holes, is_cut = wrong.tolist()
        if has_holes or (is_cut and kind >= _HAS_WINDOW):
            got = "a mask with padding between them" if has_holes else "one with padding after them"
            raise NotImplementedError(
                "attention_mask: cumla's attention needs the tokens of a request side by side, got "
                f"{got}; pad on the left, or {_ELSE}"
            )
    if not is_causal:
        end = torch.maximum(first, behind)
    return _bounds(batch_size, kind, first, end, real.device)


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Return whether values cannot be looked at, because a graph or a compiler records the call."""
    if torch.compiler.is_compiling():
        return True
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _bounds(batch: int, kind: int, first: Any, end: Any, device: Any) -> torch.Tensor:
    bounds = torch.empty(batch, 2, dtype=torch.int32, device=device)
    bounds[:, 0] = first
    bounds[:, 1] = end
    return bounds[:, None, None].expand(-1, -1, kind, -1)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as Transformers asks: ``(batch, heads, tokens, columns)`` in, tokens before heads out.

    `attention_mask` is what :func:`mask` returned; it says whether attention is causal, else the
    module does. `sliding_window` counts the query's own token; `s_aux` are sinks. The rest is as in
    :func:`cumla.attention`, whose errors are raised.

    Raises
    ------
    NotImplementedError
        An argument that would change the result and is not served: a mask with four axes, a
        position bias, packed sequences, dropout.
    """
    if not _IGNORED.issuperset(others):
        for name, given in others.items():
            if name not in _IGNORED and given is not None and given is not False:
                got = type(given).__name__
                raise NotImplementedError(
                    f"{name}: cumla's attention does not know it, got {got}; {_ELSE}"
                )
    if dropout:
        raise NotImplementedError(
            f"dropout: cumla computes inference, got {dropout}; call model.eval(), or {_ELSE}"
        )
    bounds = attention_mask
    if bounds is None:
        kind = 0
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    else:
        kind = bounds.shape[-2]
        causal = kind == _IS_CAUSAL
        if bounds.dtype != torch.int32 or bounds.shape != (key.shape[0], 1, kind, 2):
            raise NotImplementedError(
                f"attention_mask: cumla's attention needs one of (batch, tokens), got a mask of "
                f"shape {tuple(bounds.shape)}; pass one with two axes, or {_ELSE}"
            )
    window: Any = None
    if causal and sliding_window is not None:
        window = sliding_window - 1
    elif kind >= _HAS_WINDOW:  # by the mask: modules count the query's own token, or do not
        window = kind - _HAS_WINDOW, kind - _HAS_WINDOW
    elif sliding_window is not None and key.shape[2] > 1:
        raise NotImplementedError(
            f"sliding_window: cumla's attention takes a window to both sides from the model's "
            f"mask, which has none, got {sliding_window}; {_ELSE}"
        )
    options = causal, window, softcap or None, scaling
    sinks = None if s_aux is None else s_aux.detach().float()
    if not torch.compiler.is_compiling():
        arrays = (query, key, value) if sinks is None else (query, key, value, sinks)
        out = _STEPS.attend(module, arrays, bounds, options)
        if out is not None:
            return out, None
    named: Any = dict(zip(_OPTIONS, options, strict=True))
    state = cumla.attention(
        query.transpose(1, 2), **_keys(key, value, bounds), sinks=sinks, **named
    )
    return state.out, None


# --- layers that know nothing of each other ------------------------------------------------------


def _keys(key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor | None) -> dict[str, Any]:
    """Return keys and values as rows without pages, and which rows each request has."""
    batch, _, tokens, _ = key.shape
    step = _step(key.shape, key.stride())
    if step is None or step != _step(value.shape, value.stride()):
        key, value = key.contiguous(), value.contiguous()
        step = key.shape[1] * tokens
    starts = torch.arange(batch + 1, dtype=torch.int32, device=key.device) * step
    starts.clamp_(max=_count(batch, step, tokens))
    if bounds is None:
        lens = torch.full((batch,), tokens, dtype=torch.int32, device=key.device)
    else:
        first, end = bounds[:, 0, 0].unbind(-1)
        starts[:-1] += first
        lens = end - first
    k, v = _rows(key, step), _rows(value, step)
    return {"k": k, "v": v, "kv_indptr": starts, "kv_lens": lens}


def _step(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Count the rows from a request to the next one, of ``(batch, heads, tokens, columns)``."""
    batch, _, tokens, _ = shape
    request, _, token, column = strides
    if not token or column != 1:
        return None
    step: int = tokens if batch == 1 else request // token
    return None if (batch > 1 and request % token) or step < tokens else step


def _count(batch: int, step: int, tokens: int) -> int:
    return (batch - 1) * step + tokens if batch else 0


def _rows(part: torch.Tensor, step: int) -> torch.Tensor:
    """View ``(batch, heads, tokens, columns)`` as rows ``(rows, heads, columns)``.

    Where heads come before tokens in memory, other rows are between those of two requests: they are
    rows of no request.
    """
    batch, heads, tokens, columns = part.shape
    _, head, token, _ = part.stride()
    return part.as_strided((_count(batch, step, tokens), heads, columns), (token, head, 1))


# --- layers that share what a step has in common -------------------------------------------------

_MOST_LAYERS = 8  # kinds of layers of which a thread remembers the last step
_LENGTHS = 64  # numbers of 32 bits, of which arrays of lengths begin at a multiple


class _Steps(threading.local):
    """State that the layers of a step share, for each thread; found by how the arrays look.

    A step begins where they look different, but for their addresses, or the mask is another one:
    a dynamic cache has one more key in each step, and new memory in each layer. No array of a model
    is kept, and what its layers share goes when the one that began the last step does.
    """

    def __init__(self) -> None:
        self._of_form: dict[Hashable, _Layers] = {}  # each as its last step was
        self._of_shape: dict[Hashable, _Layers] = {}  # that of the latest step comes last

    def attend(
        self,
        module: torch.nn.Module,
        arrays: tuple[Any, ...],
        bounds: torch.Tensor | None,
        options: tuple[Any, ...],
    ) -> torch.Tensor | None:
        """Attend; None where only :func:`cumla.attention` can, or can say what is wrong.

        So it is on the CPU, in the check mode and where gradients or graphs are recorded: a graph
        must not depend on what an eager call has computed.
        """
        seen: Any = None if check_mode() else glance(arrays)
        if seen is None or seen[0][4] < 0:
            return None
        call = reopen_call(arrays[0], seen[0][4])
        form = (call.stream, options, *[one[1:] for one in seen])
        layers = self._of_form.get(form)
        with call:
            if call.capturing:  # of a default stream the current device tells
                return None
            if layers is None or not layers.has_begun(bounds):
                rows = _rows_of(seen)
                if rows is None:
                    return None
                layers = self._layers(module, call, rows, arrays, options)
                layers.begin(rows, bounds)
                layers.form, self._of_form[form] = form, layers
            return layers.run(arrays[0], seen)

    def _layers(
        self,
        module: torch.nn.Module,
        call: Call,
        rows: _Rows,
        arrays: tuple[Any, ...],
        options: tuple[Any, ...],
    ) -> _Layers:
        """Find what layers of such rows share, or make it; its last step is forgotten."""
        shape = (call.stream, options, rows.out_shape, rows.layouts)
        of_shape, of_form = self._of_shape, self._of_form  # of this thread, for any
        layers = of_shape.pop(shape, None) or _Layers(call, rows, arrays, options)
        of_form.pop(layers.form, None)
        if layers.owner is None or layers.owner() is not module:

            def forget(owner: Any) -> None:
                found = of_shape.get(shape)
                if found is not None and found.owner is owner:
                    of_shape.pop(shape, None)
                    of_form.pop(found.form, None)

            layers.owner = weakref.ref(module, forget)
        if len(of_shape) >= _MOST_LAYERS:
            oldest = of_shape.pop(next(iter(of_shape), None), None)
            of_form.pop(oldest and oldest.form, None)
        of_shape[shape] = layers
        return layers


class _Layout(NamedTuple):
    """Shape, strides and dtype of an array, from which launches follow."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: torch.dtype
    device: int
    is_neg: bool


class _Rows(NamedTuple):
    """The layout of arrays, seen so that little of it changes with the tokens: keys are rows.

    Where one query token attends to keys of heads before tokens, each kv head is taken for a
    request: kernels then know no stride of heads, which grows with the tokens. The rows are the
    last ones of a power of two. Those before them need not exist: nobody reads them.
    """

    layouts: tuple[_Layout, ...]  # of queries, keys and values, and sinks
    out_shape: tuple[int, ...]
    requests: int
    tokens: int
    step: int  # rows from a request to the next one
    before_bytes: tuple[int, int]  # of keys, and of values, that need not exist

    def views(self, arrays: tuple[Any, ...]) -> dict[str, ArrayView]:
        """Look at such arrays; errors are those of :func:`cumla.attention`."""
        named = tuple(zip(("q", "k", "v", "sinks"), arrays, strict=False))
        views = {}
        before = (0, *self.before_bytes, 0)
        seen = zip(named, open_call(named).views, self.layouts, before, strict=False)
        for (name, array), view, (shape, strides, *_), nbytes in seen:
            assert view is not None
            strides = tuple([n * array.element_size() for n in strides])
            views[name] = view._replace(ptr=view.ptr - nbytes, shape=shape, strides=strides)
        return views


def _rows_of(seen: Any) -> _Rows | None:
    """Lay out queries, keys and values, and sinks, at which was glanced.

    None for those that need a copy, or an error.
    """
    query, key, value, *sinks = [_Layout(*one[1:]) for one in seen]
    if not len(query.shape) == len(key.shape) == len(value.shape) == 4:
        return None
    step = _step(key.shape, key.strides)
    if 0 in (*query.shape, *key.shape) or step is None or step != _step(value.shape, value.strides):
        return None
    batch, heads, q_len, columns = query.shape
    requests, kv_heads, tokens, _ = key.shape
    if requests != batch or key.shape[:3] != value.shape[:3] or heads % kv_heads:
        return None
    out_shape = batch, q_len, heads, value.shape[3]
    request, head, token, column = query.strides
    if (
        q_len == 1
        and not sinks
        and (batch == 1 or (request == heads * head and step == kv_heads * tokens))
        and all(part.strides[1] == tokens * part.strides[2] for part in (key, value))
    ):
        requests, step, heads = batch * kv_heads, tokens, heads // kv_heads
        request, kv_heads = heads * head, 1
    count = _count(requests, step, tokens)
    room = 1 << (count - 1).bit_length()
    shape = requests, q_len, heads, columns
    layouts = [query._replace(shape=shape, strides=(request, token, head, column))]
    before = []
    for part in (key, value):
        _, head, token, column = part.strides
        before.append((room - count) * token * part.dtype.itemsize)
        strides = token, head if kv_heads > 1 else token, column
        layouts.append(part._replace(shape=(room, kv_heads, part.shape[3]), strides=strides))
    return _Rows((*layouts, *sinks), out_shape, requests, tokens, step, (before[0], before[1]))


class _Layers:
    """Schedule, workspace and launches of layers of one shape, on one stream."""

    form: Hashable = None  # how the arrays of the last step look
    owner: weakref.ref[torch.nn.Module] | None = None  # which began it

    def __init__(
        self, call: Call, rows: _Rows, arrays: tuple[Any, ...], options: tuple[Any, ...]
    ) -> None:
        operation = cumla.AttentionPlan._operation
        spec = operation.spec
        assert spec is not None
        given: dict[str, Any] = {}
        for one in spec.arguments:
            given[one.name] = None if one.default is REQUIRED else one.default
        given |= zip(_OPTIONS, options, strict=True)
        views: dict[str, Any] = dict(movable(rows.views(arrays)))
        requests, q_len, heads, _ = views["q"].shape
        self._requests = requests
        self._room = views["k"].shape[0]
        self._device = arrays[0].device
        assert call.device is not None
        with torch.inference_mode(False):  # what is written to in that mode and outside of it
            behind = -(-requests // _LENGTHS) * _LENGTHS  # where the rows of requests begin
            self._lengths = self._empty((behind + requests + 1,), torch.int32)
            lens, starts = self._lengths[:requests], self._lengths[behind:]
            self._of_batch = [x.view(len(arrays[0]), -1) for x in (lens, starts[:-1])]
            self._lse = self._empty((requests, heads, q_len), torch.float32).transpose(1, 2)
            named = (("kv_indptr", starts), ("kv_lens", lens), ("lse", self._lse))
            views["kv_indptr"], views["kv_lens"], lse = open_call(named).views
            checked = operation.arguments(views, spec.sorted(given)[2])
            key = operation.key(checked, call.device)
            self._workspace = self._empty((operation.workspace_bytes(key),), torch.uint8)
        at = self._workspace.data_ptr()
        (new, _) = operation.outputs(checked)
        schedule = operation.schedule.recipe(key, checked.lengths, (), at)
        self._schedule = [_Moving(one, call) for one in schedule]
        outs: list[Any] = [unplaced(new, call.device), lse]
        recipe = operation.attend.recipe(key, checked.attend, outs, at)
        self._attend = [_Moving(one, call) for one in recipe]
        self._bounds: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._steps = 0, 0

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def has_begun(self, bounds: torch.Tensor | None) -> bool:
        """Return whether the schedule is the one of this mask."""
        if bounds is None or self._bounds is None:
            return bounds is None and self._bounds is None
        return self._bounds() is bounds and self._version == _version(bounds)

    def begin(self, rows: _Rows, bounds: torch.Tensor | None) -> None:
        """Compute the schedule of a step."""
        self._before_keys, self._before_values = rows.before_bytes
        self._out_shape = rows.out_shape
        steps = divmod(rows.step, rows.tokens)
        if steps != self._steps:
            self._lay_out(*steps)
        # Requests have as many keys as tokens, and the last one ends where the rows do.
        torch.add(self._fixed, self._per_token, alpha=rows.tokens, out=self._lengths)
        if bounds is not None:
            lens, starts = self._of_batch
            first, behind = bounds[:, 0, 0, :, None].expand(-1, -1, lens.shape[1]).unbind(1)
            starts.add_(first)
            torch.sub(behind, first, out=lens)
        for launch in self._schedule:
            launch(())
        self._bounds = None if bounds is None else weakref.ref(bounds)
        self._version = 0 if bounds is None else _version(bounds)

    def _lay_out(self, lengths: int, rest: int) -> None:
        """Write the lengths and first rows as sums: of a fixed part, and of one for each token.

        From a request to the next one it is `lengths` times the tokens, and `rest` rows.
        """
        with torch.inference_mode(False):
            count = len(self._lengths)
            place = torch.arange(count, device=self._device) - (count - 2)  # 0: the last request
            self._fixed = (place * rest + self._room).to(torch.int32)
            self._per_token = (place * lengths - 1).to(torch.int32)
            self._fixed[: self._requests] = 0
            self._per_token[: self._requests] = 1
        self._steps = lengths, rest

    def run(self, query: torch.Tensor, seen: Any) -> torch.Tensor | None:
        """Attend for one layer; None for addresses that those of other layers cannot have."""
        q, k, v, s = seen[0][0], seen[1][0], seen[2][0], seen[3][0] if len(seen) > 3 else 0
        k -= self._before_keys
        v -= self._before_values
        if not is_plain(q | k | v | s):  # also where one is no multiple of 16, or below 0
            return None
        out = query.new_empty(self._out_shape)
        places = q, k, v, s, out.data_ptr()
        for launch in self._attend:
            launch(places)
        return out


_MOVED = "q", "k", "v", "sinks", "out"


class _Moving:
    """A launch whose arrays are elsewhere each time, for one thread: it keeps its parameters."""

    def __init__(self, launch: Any, call: Call) -> None:
        assert call.device is not None
        self._stream = call.stream
        self._template = launch.template(call.device, lambda: call.capturing)
        # For each address: the index of its 64-bit parameter, its array, the offset in the array.
        self._fields: list[tuple[int, int, int]] = []
        self._launch: Callable[[], None] | None = None
        if not isinstance(self._template, Template):
            return
        for offset, argument, addend, tensor_map in launch.relocations():
            if tensor_map is not None:
                within = tensor_map.address_at() if is_plain(tensor_map.ptr) else None
                if within is None:
                    return
                offset += within
            self._fields.append((offset // 8, _MOVED.index(argument), addend))
        kernel = load(launch.spec, call.device, capturing=lambda: call.capturing)
        packed = launch.pack()
        parameters = (ctypes.c_char * len(packed)).from_buffer_copy(packed)
        self._words = memoryview(parameters).cast("B")[: len(packed) // 8 * 8].cast("Q")
        self._launch = PreparedLaunch(kernel, launch.grid, launch.cluster, parameters, self._stream)

    def __call__(self, places: tuple[int, ...]) -> None:
        """Launch, with these addresses of the arrays of ``_MOVED``."""
        if self._launch is None:
            self._template.at(dict(zip(_MOVED, places, strict=False)), self._stream)()
            return
        words = self._words
        for word, array, addend in self._fields:
            words[word] = places[array] + addend
        self._launch()


def _version(bounds: torch.Tensor) -> int:
    """Count the writes to what `mask` returned; nobody tells those to a tensor of inference."""
    return 0 if bounds.is_inference() else bounds._version


_STEPS = _Steps()


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
