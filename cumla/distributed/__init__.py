# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention: one cache, cut along its tokens among the GPUs of a group.

Each rank attends to its share with cumla's own functions. Partial results go to the ranks that
merge them through what the user runs already: PyTorch's process groups, JAX's collectives inside
`jax.shard_map`, or a NCCL communicator of CuPy. Importing this package imports none of them.
"""

from __future__ import annotations

from cumla.distributed.context import ContextParallel
from cumla.distributed.shard import LocalLists, LocalPages, Shard

__all__ = ["ContextParallel", "LocalLists", "LocalPages", "Shard"]
