# SPDX-License-Identifier: Apache-2.0
"""MiniMax M3's layers that choose blocks, which SGLang serves without asking a backend.

SGLang's class, its caches and its lists of slots stay. :func:`attend` puts functions in the place
of four that call Triton kernels; what cumla does not compute goes to SGLang's own.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import cumla
from cumla.compat._engine import put_in_place
from cumla.compat.vllm_minimax_m3 import (
    minimax_m3_index_decode,
    minimax_m3_index_score,
    minimax_m3_index_topk,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["attend"]

_HOME = "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse"
_BLOCK = 128  # tokens
_DTYPES = (torch.bfloat16, torch.float16)
_E4M3 = torch.float8_e4m3fn
_log = logging.getLogger(__name__)
_theirs: dict[str, Any] = {}


class _Pages(NamedTuple):
    """Pages of requests, as the choice of a layer made them for its attention."""

    of: tuple[Any, ...]  # the arrays that SGLang passed
    block_table: torch.Tensor
    kv_lens: torch.Tensor


_made: list[_Pages] = []  # one, between the choice of a layer and its attention


def attend(page_size: int) -> None:
    """Put cumla's functions in the place of SGLang's, and say so in the log.

    Parameters
    ----------
    page_size : int
        Tokens of a page of SGLang's caches; with others than multiples of 128 nothing changes, as
        a block has to be in one page.

    Raises
    ------
    RuntimeError
        This version of SGLang has other functions.
    """
    if page_size % _BLOCK:
        _log.warning(
            "MiniMax M3: layers that choose blocks attend by SGLang's Triton kernels, because "
            "pages have %s tokens; pass --page-size %s",
            *(page_size, _BLOCK),
        )
        return
    functions = {name: _serving(name, *each) for name, each in _FUNCTIONS.items()}
    try:
        home = import_module(_HOME)
        found = {name: getattr(home, name, None) for name in functions}
        if any(getattr(each, "__module__", None) == __name__ for each in found.values()):
            return
        put_in_place({_HOME: functions}, functions, _refused)
    except ImportError as error:
        raise RuntimeError(
            f"sglang: cumla's backend needs {error}; leave out --attention-backend cumla"
        ) from error
    _theirs.update(found)
    _log.info(
        "cumla attends in layers of MiniMax M3 that choose blocks: block_attention, block_scores "
        "and select_blocks in the place of SGLang's Triton kernels"
    )


def _refused(name: str) -> ImportError:
    return ImportError(name)


def _serving(
    name: str, serves: Callable[[dict[str, Any]], bool], ours: Callable[[dict[str, Any]], Any]
) -> Any:
    """Make the function of a name; SGLang passes all arguments by name."""

    def function(**given: Any) -> Any:
        return ours(given) if serves(given) else _theirs[name](**given)

    function.__name__ = name
    return function


def _chooses(given: dict[str, Any]) -> bool:
    """Return whether cumla chooses: by the largest products of one key of each token."""
    _made.clear()
    q, keys = given["q"], given["k_cache"]
    return (
        bool(given["disable_index_value"])
        and given["score_type"] == "max"
        and given["sink"] is None
        and not given.get("use_dense_main_attn")
        and given.get("block_size_q", 1) == 1
        and given.get("block_size", given.get("block_size_k")) == _BLOCK
        and keys.shape[1] == 1
        and keys.dtype == q.dtype
        and q.dtype in (*_DTYPES, _E4M3)
    )


def _attends(given: dict[str, Any]) -> bool:
    """Return whether cumla attends; HiSparse has the keys of blocks in other slots."""
    q, k, v = (given[name] for name in ("q", "k_cache", "v_cache"))
    is_one = all(given.get(name) in (None, 1.0) for name in ("k_scale", "v_scale"))
    served = (
        given["sink"] is None
        and given.get("hisparse_slots") is None
        and given.get("loc_mapping") is None
        and given.get("block_size_q", 1) == 1
        and given.get("block_size", given.get("block_size_k")) == _BLOCK
        and q.dtype in _DTYPES
        and k.dtype == v.dtype
        and (k.dtype == _E4M3 or (k.dtype == q.dtype and is_one))
    )
    if not served:
        _made.clear()
    return served


def _decode_choice(given: dict[str, Any]) -> tuple[None, torch.Tensor, None]:
    q, most = given["q"], given["max_seqlen"]
    pages, keys, out = _choice(given, most)
    topk, init, local = _wanted(given)
    index = q, keys, pages.block_table, pages.kv_lens, most
    minimax_m3_index_decode(*index, topk, init, local, q.shape[1], 1, 1, out=out)
    return None, out, None


def _prefill_choice(given: dict[str, Any]) -> tuple[None, torch.Tensor]:
    q, most, longest = given["q"], given["max_seqlen_k"], given["max_seqlen_q"]
    pages, keys, out = _choice(given, most)
    starts, before = given["cu_seqlens"], given["prefix_lens"].int()
    index = q, keys, pages.block_table, starts, pages.kv_lens, before
    scores = minimax_m3_index_score(*index, longest, most, q.shape[1])
    minimax_m3_index_topk(scores, starts, before, longest, *_wanted(given), out=out)
    return None, out


def _choice(given: dict[str, Any], most: int) -> tuple[_Pages, Any, torch.Tensor]:
    """Return the pages of requests, the keys of the indexer, and where to write lists."""
    q = given["q"]
    out = q.new_empty(q.shape[1], q.shape[0], given["topk"], dtype=torch.int32)
    _made.append(_pages(given, most))
    return _made[-1], _blocks(given["k_cache"])[:, :, 0], out


def _wanted(given: dict[str, Any]) -> tuple[int, int, int]:
    return given["topk"], given["init_blocks"], given["local_blocks"]


def _decode(given: dict[str, Any]) -> torch.Tensor:
    out: torch.Tensor = _attention(given, given["q"][:, None]).flatten(0, 1)
    return out


def _prefill(given: dict[str, Any]) -> torch.Tensor:
    out: torch.Tensor = _attention(given, given["q"], qo_indptr=given["cu_seqlens"])
    return out


def _attention(given: dict[str, Any], q: Any, **more: Any) -> Any:
    pages = _made.pop() if _made else None
    if pages is None or any(a is not b for a, b in zip(pages.of, _arrays(given), strict=True)):
        pages = _pages(given, given["req_to_token"].shape[1])
    k, v = (_blocks(given[name]) for name in ("k_cache", "v_cache"))
    if k.dtype == _E4M3:
        more |= {name: given[name] or 1.0 for name in ("k_scale", "v_scale")}
    return cumla.block_sparse_attention(
        *(q, k, v, given["topk_idx"].transpose(0, 1)),
        block_size=_BLOCK,
        kv_lens=pages.kv_lens,
        block_table=pages.block_table,
        softmax_scale=given["sm_scale"],
        **more,
    ).out


def _blocks(cache: Any) -> Any:
    """View slots as blocks: (blocks, 128, heads, columns)."""
    blocks = cache.shape[0] // _BLOCK
    return cache[: blocks * _BLOCK].unflatten(0, (blocks, _BLOCK))


def _arrays(given: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(given[name] for name in ("req_to_token", "slot_ids", "seq_lens"))


def _pages(given: dict[str, Any], most: int) -> _Pages:
    """Find the blocks of requests of at most so many tokens: each begins at a multiple of 128."""
    arrays = slots, requests, lens = _arrays(given)
    table = slots[:, :most:_BLOCK][requests] // _BLOCK
    return _Pages(arrays, table.int(), lens.int())


_FUNCTIONS = {
    "flash_decode_with_topk_idx": (_chooses, _decode_choice),
    "flash_prefill_with_topk_index": (_chooses, _prefill_choice),
    "flash_decode_with_gqa_share_sparse": (_attends, _decode),
    "flash_prefill_with_gqa_share_sparse": (_attends, _prefill),
}
