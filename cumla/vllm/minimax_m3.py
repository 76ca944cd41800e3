# SPDX-License-Identifier: Apache-2.0
"""MiniMax M3's layers that choose blocks, which call functions without asking for a backend.

vLLM's layers, their caches and their metadata stay; the functions become those of
:mod:`cumla.compat.vllm_minimax_m3`.
"""

from __future__ import annotations

import logging
from functools import cache

from cumla.compat import vllm_minimax_m3
from cumla.vllm._models import LOGGER

__all__ = ["attend"]


@cache
def attend() -> None:
    """Put cumla's functions in the place of vLLM's, once in a process, and say so in the log.

    Raises
    ------
    RuntimeError
        This version of vLLM has other functions.
    """
    try:
        vllm_minimax_m3.replace()
    except ImportError as error:
        raise RuntimeError(f"{error}; leave out --attention-backend CUSTOM") from error
    logging.getLogger(LOGGER).info(
        "cumla attends in layers of MiniMax M3 that choose blocks: block_attention, block_scores "
        "and select_blocks in the place of vLLM's Triton kernels"
    )
