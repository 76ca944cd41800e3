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

from typing import TYPE_CHECKING, Any

import cumla
from cumla.errors import MissingDependencyError

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
    from collections.abc import Callable

__all__ = ["NAME", "attention", "mask"]

NAME = "cumla"
_ELSE = 'load the model with attn_implementation="sdpa" or "eager"'
# Of a call, what is no mask and changes no number.
_IGNORED = (
    *("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"),
    *("output_router_logits", "return_dict", "num_items_in_batch", "logits_to_keep", "layer_idx"),
    *("position_embeddings", "past_key_values", "is_training", "num_logits_to_keep"),
)


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
    four axes on as they are. With an `attention_mask` on the GPU the host waits for it, once.

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
    seen = real.cumsum(-1)
    first = (seen == 0).sum(-1)
    behind = (seen < seen[:, -1:]).sum(-1) + 1  # the last key
    if not _is_recorded(real):
        # Padding after the last key: causality hides it, else it is cut off, with its positions.
        holes = (seen > 0) & (seen < seen[:, -1:]) & ~real
        cut = (behind < kv_length) & (kind >= _HAS_WINDOW)
        is_all = real.all() & (real.shape[-1] == kv_length)
        has_holes, is_cut, is_all = torch.stack((holes.any(), cut.any(), is_all)).tolist()
        if has_holes or is_cut:
            got = "a mask with padding between them" if has_holes else "one with padding after them"
            raise NotImplementedError(
                "attention_mask: cumla's attention needs the tokens of a request side by side, got "
                f"{got}; pad on the left, or {_ELSE}"
            )
        if is_all and may_be_all:
            return None
    if not is_causal:
        end = torch.maximum(first, behind)
    return _bounds(batch_size, kind, first, end, real.device)


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Tell whether values cannot be looked at, because a graph or a compiler records the call."""
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
    for name, given in others.items():
        if given is not None and name not in _IGNORED and given is not False:
            raise NotImplementedError(
                f"{name}: cumla's attention does not know it, got {type(given).__name__}; {_ELSE}"
            )
    if dropout:
        raise NotImplementedError(
            f"dropout: cumla computes inference, got {dropout}; call model.eval(), or {_ELSE}"
        )
    bounds = attention_mask
    kind = 0 if bounds is None else bounds.shape[-2]
    if bounds is not None and (bounds.dtype, bounds.shape) != (torch.int32, (len(key), 1, kind, 2)):
        raise NotImplementedError(
            f"attention_mask: cumla's attention needs one of (batch, tokens), got a mask of shape "
            f"{tuple(bounds.shape)}; pass one with two axes, or {_ELSE}"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = kind == _IS_CAUSAL if kind else causal
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
    pages, keys = _keys(key, value, bounds)
    state = cumla.attention(
        query.transpose(1, 2),
        *pages,
        **keys,
        causal=causal,
        window=window,
        softcap=softcap or None,
        sinks=None if s_aux is None else s_aux.detach().float(),
        softmax_scale=scaling,
    )
    return state.out, None


def _keys(
    key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    """Return keys and values in pages, and which pages each request has."""
    batch, _, tokens, _ = key.shape
    where = {"dtype": torch.int32, "device": key.device}
    if bounds is None:  # a page for each request
        table = torch.arange(batch, **where)[:, None]
        lens = torch.full((batch,), tokens, **where)
        return (key, value), {"block_table": table, "kv_lens": lens, "kv_layout": "HND"}
    # A page for each token: those of a request begin after its padding.
    step = _step(key)
    if step is None or step != _step(value):
        key, value = key.contiguous(), value.contiguous()
        step = key.shape[1] * tokens
    first, end = bounds[:, 0, 0].unbind(-1)
    first_rows = torch.arange(batch, **where) * step + first
    table = first_rows[:, None] + torch.arange(tokens, **where)
    lens = end - first
    pages = _rows(key, step), _rows(value, step)
    return pages, {"block_table": table, "kv_lens": lens, "kv_layout": "NHD"}


def _step(part: torch.Tensor) -> int | None:
    """Count the rows from a request to the next one, of ``(batch, heads, tokens, columns)``."""
    if not part.stride(2):
        return None
    step, rest = divmod(part.stride(0), part.stride(2))
    return None if rest or part.stride(3) != 1 else step


def _rows(part: torch.Tensor, step: int) -> torch.Tensor:
    """View ``(batch, heads, tokens, columns)`` as pages of a token.

    Where heads come before tokens in memory, other rows lie between those of two requests: they are
    pages that nobody names.
    """
    batch, heads, tokens, columns = part.shape
    _, head, token, _ = part.stride()
    shape = (batch - 1) * step + tokens, 1, heads, columns
    return part.as_strided(shape, (token, token, head, 1))


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
