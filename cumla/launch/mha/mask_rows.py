# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mha/mask_rows.cu, which builds the arrays of an attention mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.layouts import constant, launch_of
from cumla.launch.slots import indices
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

_FILE = "mha/mask_rows"
_TOKENS = constant(_FILE, "kMaskWarps")  # of a block
_FORMS = {
    form: constant(_FILE, name)
    for form, name in (
        ("drafts", "kDrafts"),
        ("bits", "kBits"),
        ("all keys", "kAllKeys"),
        ("bits of keys", "kBitsOfKeys"),
    )
}
SPECS = (
    KernelSpec.of(*("mha", "mask_rows", "MaskRowsParams"), threads=constant(_FILE, "kMaskThreads")),
)


class Rules(NamedTuple):
    """Options of a mask that are no arrays; sides of a window are negative where unbounded."""

    left: int = -1
    right: int = -1
    chunk: int = 0  # tokens; 0: none
    lookback: int = 0  # chunks
    block: int = 0  # tokens; 0: none
    clamp: bool = False  # the window bounds spans as well
    tree_form: str = "drafts"  # or "bits", "all keys", "bits of keys"
    q_len: int = 0  # of each request, where there are no offsets
    total_tokens: int = 0
    batch: int = 0
    words: int = 0  # of a row of the tree


class MaskRowsArguments(NamedTuple):
    """Checked views of one call; what is None has no part in it."""

    rules: Rules
    qo_indptr: ArrayView | None = None  # (batch + 1,)
    kv_lens: ArrayView | None = None  # (batch,)
    positions: ArrayView | None = None  # (total_tokens,)
    spans: ArrayView | None = None  # (batch, n, 2) or (total_tokens, 2)
    flags: ArrayView | None = None  # (batch,) of one byte
    tree: ArrayView | None = None  # (batch, drafts, drafts), (tokens, bytes) or (bytes,)


def mask_rows_launch(
    arguments: MaskRowsArguments,
    start: ArrayView | None,
    end: ArrayView | None,
    words: ArrayView | None,
) -> Launch:
    """Describe how to build what is not None, for at least one token."""
    a, rules = arguments, arguments.rules
    listed = a.spans is not None and len(a.spans.shape) == 3  # by request
    if a.spans is not None and 0 in a.spans.shape:
        a = a._replace(spans=None)
    spans, tree = _strides(a.spans, 3), _strides(a.tree, 3)
    of_drafts, of_bits = rules.tree_form == "drafts", rules.tree_form == "bits"
    columns = 0 if a.tree is None else a.tree.shape[-1]
    values: dict[str, Any] = {
        "bounds": indices(a.qo_indptr),
        "kv_lens": indices(a.kv_lens),
        "positions": indices(a.positions),
        "spans": 0 if a.spans is None else a.spans.ptr,
        "spans_stride": spans[0],
        "spans_stride_span": spans[1],
        "flags": 0 if a.flags is None else a.flags.ptr,
        "flags_stride": 0 if a.flags is None else a.flags.strides[0],
        "tree": 0 if a.tree is None else a.tree.ptr,
        "tree_stride_request": tree[0] if of_drafts else 0,
        "tree_stride_row": tree[1] if of_drafts else tree[0],
        "tree_bytes": columns,
        "start": 0 if start is None else start.ptr,
        "end": 0 if end is None else end.ptr,
        "words": 0 if words is None else words.ptr,
        "left": rules.left,
        "right": rules.right,
        "chunk": rules.chunk,
        "block": rules.block,
        "lookback": rules.lookback,
        "total_tokens": rules.total_tokens,
        "batch": rules.batch,
        "q_len": rules.q_len,
        "num_spans": a.spans.shape[1] if a.spans is not None and listed else 0,
        "clamp": rules.clamp,
        "tree_form": _FORMS[rules.tree_form],
        "drafts": columns * 8 if of_bits else columns if of_drafts else 0,
        "trees": a.tree.shape[0] if a.tree is not None and of_drafts else 0,
        "num_words": rules.words,
    }
    return launch_of(SPECS[0], (-(-rules.total_tokens // _TOKENS), 1, 1), values)


def _strides(view: ArrayView | None, axes: int) -> tuple[int, ...]:
    """Return strides in bytes, zeros after the last of fewer axes."""
    strides = () if view is None else view.strides
    return (*strides, *(0,) * (axes - len(strides)))
