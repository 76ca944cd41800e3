# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's layers, which choose their attention without asking for a backend.

vLLM's layer, its caches, its metadata and its indexer stay. :func:`attending` puts cumla's
functions in the place of FlashMLA's, and pads queries to fewer heads.
"""

from __future__ import annotations

import logging
from functools import cache

from cumla.compat import flash_mla
from cumla.compat._engine import put_in_place
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
    homes = {theirs.__module__: _FUNCTIONS, _METADATA: ("get_mla_metadata",)}
    put_in_place(homes, vars(flash_mla), _refused)
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


def _refused(name: str) -> RuntimeError:
    return RuntimeError(
        f"vllm: cumla's backend needs {name}, which this version or GPU does not use for "
        f"DeepSeek-V4; leave out --attention-backend CUSTOM"
    )
