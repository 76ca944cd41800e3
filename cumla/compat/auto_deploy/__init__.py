# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM AutoDeploy's cached attention over `cumla.attention` and `cumla.append_kv_cache`.

Its operations are functions here, and operations of PyTorch after `register`::

    from cumla.compat import auto_deploy

    auto_deploy.register()  # torch.ops.cumla.fused_mha_with_cache and the others
    auto_deploy.register("attention", "rope")  # the names that AutoDeploy has

The descriptors ``"cumla"``, for contiguous caches, and ``"cumla_paged"`` are registered.

The interface is that of TensorRT-LLM 0.19, the first release with AutoDeploy. Later releases rotate
outside of attention, without freqs_cis, and call the operations
``torch.ops.auto_deploy.triton_attention_...``: those are not here.

Differences from AutoDeploy:

* The caches are declared as written to, and the operations have the shapes of their results, also
  where values have another head_dim than keys.
* No operation waits for the GPU. Calls can be captured into a CUDA graph, after `cumla.prepare`,
  also those of mixed batches: `prepare_fused_mha_metadata` leaves requests without tokens in these.
* `fused_mha_with_cache` sees the history in the cache, and new tokens may begin inside a page.
* Requests whose tokens have no place in the cache, or in freqs_cis, do not write outside of it.
* Arguments that do not fit raise `TypeError` and `ValueError`. FP8 caches are refused.
"""

from __future__ import annotations

from cumla.compat._arguments import missing_from
from cumla.compat.auto_deploy import descriptors, functions, sequence
from cumla.compat.auto_deploy.descriptors import *  # noqa: F403
from cumla.compat.auto_deploy.functions import *  # noqa: F403
from cumla.compat.auto_deploy.ops import register
from cumla.compat.auto_deploy.sequence import *  # noqa: F403

__all__ = ["register"]
__all__ += descriptors.__all__
__all__ += functions.__all__
__all__ += sequence.__all__
__getattr__ = missing_from(__name__, "tensorrt_llm._torch.auto_deploy")
