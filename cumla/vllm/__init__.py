# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention, computed by cumla: ``vllm serve MODEL --attention-backend CUSTOM``.

vLLM finds this plugin by the entry point of cumla's own wheel (group ``vllm.general_plugins``) and
calls :func:`register` in each of its processes. Nothing changes for a server that does not ask for
CUSTOM. One that does asks this module for ``Backend``: :class:`cumla.vllm.mla.Backend` for models
with MLA, :class:`cumla.vllm.sparse.Backend` where an indexer chooses tokens,
:class:`cumla.vllm.mha.Backend` for the others.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["TESTED", "register"]

TESTED = ((0, 25), (0, 33))
"""The first and the last minor version of vLLM that the plugin was tested with.

Older ones are refused. Newer ones are served after a warning, if they have the interfaces.
"""

_PATH = f"{__name__}.Backend"
_log = logging.getLogger(__name__)


def register() -> None:
    """Make cumla the backend CUSTOM of this process, unless another plugin has taken that name.

    vLLM calls this in each of its processes; a second call changes nothing. Versions that the
    plugin does not serve are refused when a server selects CUSTOM, and disturb no other; those
    without a registry of attention backends get a warning.

    Raises
    ------
    ImportError
        There is no vLLM.

    Examples
    --------
    >>> import cumla.vllm
    >>> cumla.vllm.TESTED
    ((0, 25), (0, 33))
    """
    import vllm

    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        _log.warning("vLLM %s has no --attention-backend CUSTOM: %s", vllm.__version__, error)
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != _PATH:
        _log.warning(
            "vLLM's attention backend CUSTOM is %s already, and stays so; to serve with cumla, "
            "remove that plugin, or leave it out of VLLM_PLUGINS",
            custom.get_path(),
        )
        return
    register_backend(custom, _PATH)


def __getattr__(name: str) -> Any:
    """Choose the class when vLLM resolves the path: one name serves all kinds of attention."""
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm
    from vllm.config import get_current_vllm_config

    from cumla._serving import backend_of

    model = get_current_vllm_config().model_config
    is_sparse = hasattr(getattr(model, "hf_config", None), "index_topk")  # as vLLM asks
    kind = ("sparse" if is_sparse else "mla") if model.use_mla else "mha"
    classes = ("Backend", "Builder", "Impl")
    module = f"{__name__}.{kind}"
    return backend_of("vllm", vllm.__version__, TESTED, "CUSTOM", module, classes).Backend
