# SPDX-License-Identifier: Apache-2.0
"""cumla inside `jax.jit`: what differs there from the public functions.

Functions of cumla that return what they compute work on traced arrays as they are. What writes in
place returns the new arrays here, and plans are values. Importing this module imports JAX, and
makes programs that `jax.export` has written with cumla's calls run in the process. It starts no
backend of JAX's. With a JAX whose foreign function interface is not known (known: JAX 0.5 to 0.11)
calls go through `jax.experimental.buffer_callback`, and a warning says so when the first one is
traced: the results are the same, without command buffers and `jax.export`.
"""

from __future__ import annotations

from typing import NoReturn

import cumla
from cumla.errors import MissingDependencyError

try:
    from jax import ffi as _ffi  # noqa: F401
except ImportError as error:
    problem = f"jax: cumla.jax needs JAX 0.5 or later, with jax.ffi ({error})"
    raise MissingDependencyError(problem, "pip install jax, or cumla[jax]") from error

from cumla.jax.caches import append_indexer_cache, append_kv_cache, append_mla_cache
from cumla.jax.call import run as run
from cumla.jax.call import run_eagerly as run_eagerly
from cumla.jax.plans import (
    AttentionPlan,
    BlockSparsePlan,
    DSAPlan,
    MLAAttentionPlan,
    MLADecodePlan,
    MLASparsePlan,
    PagedMQALogitsPlan,
)

__all__ = [
    "AttentionPlan",
    "BlockSparsePlan",
    "DSAPlan",
    "MLAAttentionPlan",
    "MLADecodePlan",
    "MLASparsePlan",
    "PagedMQALogitsPlan",
    "append_indexer_cache",
    "append_kv_cache",
    "append_mla_cache",
]


def __getattr__(name: str) -> NoReturn:
    way = f"; jax.jit traces cumla.{name} as it is" if name in cumla.__all__ else ""
    raise AttributeError(f"{name}: cumla.jax does not have it{way}", name=name)
