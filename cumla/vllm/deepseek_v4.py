# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's layers, which choose their attention without asking for a backend.

vLLM's layer, its caches, its metadata and its indexer stay. :func:`attending` puts cumla's
functions in the place of FlashMLA's, and pads queries to fewer heads.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module

from cumla.compat import flash_mla
from cumla.vllm._models import LOGGER

__all__ = ["attending"]

_FUNCTIONS = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
_METADATA = "vllm.v1.attention.backends.mla.sparse_swa"
_HEADS = (16, 32, 64, 128)  # to which vLLM's kernel that writes the queries pads


@cache
def attending(theirs: type) -> type:
    """Return vLLM's class of a layer, whose module then calls cumla.

    Parameters
    ----------
    theirs : type
        The class that vLLM has chosen.

    Returns
    -------
    type
        A class derived from it.

    Raises
    ------
    RuntimeError
        Its module calls other functions than FlashMLA's.
    """
    home, metadata = import_module(theirs.__module__), import_module(_METADATA)
    wanted = [(home, name) for name in _FUNCTIONS] + [(metadata, "get_mla_metadata")]
    missing = [f"{place.__name__}.{name}" for place, name in wanted if not hasattr(place, name)]
    if missing:
        raise RuntimeError(
            f"vllm: cumla's backend needs {', '.join(missing)}, which this version or GPU does not "
            f"use for DeepSeek-V4; leave out --attention-backend CUSTOM"
        )
    for place, name in wanted:
        setattr(place, name, getattr(flash_mla, name))
    logging.getLogger(LOGGER).info(
        "cumla attends in layers of DeepSeek-V4: mla_sparse_v4 in the place of FlashMLA's kernels"
    )

    class Attention(theirs):
        """The layer."""

        @classmethod
        def get_padded_num_q_heads(cls, num_heads: int) -> int:
            """Return the heads of the queries, those that are padding included."""
            return next((n for n in _HEADS if num_heads <= n), num_heads)

    return Attention
