# SPDX-License-Identifier: Apache-2.0
"""SGLang's attention, computed by cumla: ``sglang serve MODEL --attention-backend cumla``.

SGLang finds this plugin by the entry point of cumla's own wheel (group ``sglang.srt.plugins``) and
calls :func:`register` in each of its processes. Nothing changes for a server that does not ask for
cumla; one that does gets :class:`cumla.sglang.backend.Backend`, or with a model of sparse MLA
:class:`cumla.sglang.sparse.Backend`.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["TESTED", "register"]

TESTED = ((0, 5, 22), (0, 5, 23))
"""The first and the last version of SGLang that the plugin was tested with."""

_NAME = "cumla"
# Names that an indexer of sparse MLA imports from DeepGEMM when it is made, before the backend.
_BEFORE_INDEXERS = "sglang.srt.layers.attention.dsa.utils.resolve_num_sms"
_log = logging.getLogger(__name__)
_hooked: Any = None


def register() -> None:
    """Add the backend ``cumla`` to those that SGLang knows; a second call changes nothing.

    Versions that the plugin does not serve are refused when a server selects the backend, and
    disturb no other; those without such a registry get a warning.

    Raises
    ------
    ImportError
        There is no SGLang.

    Examples
    --------
    >>> import cumla.sglang
    >>> cumla.sglang.TESTED
    ((0, 5, 22), (0, 5, 23))
    """
    import sglang

    global _hooked
    try:
        from sglang.srt.arg_groups.choices import (
            ATTENTION_BACKEND_CHOICES,
            DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
        )
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        _log.warning("SGLang %s has no --attention-backend cumla: %s", sglang.__version__, error)
        return
    for choices in (
        ATTENTION_BACKEND_CHOICES,
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if _NAME not in choices:
            choices.append(_NAME)
    register_attention_backend(_NAME)(_make)
    if _hooked is not HookRegistry:
        _hooked = HookRegistry
        HookRegistry.register(_BEFORE_INDEXERS, _num_sms, HookType.AROUND)


def is_deterministic() -> bool:
    """Return whether SGLang runs with ``--enable-deterministic-inference``."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def _num_sms(theirs: Any) -> Any:
    """Take over the indexer if the server asks for cumla; return the GPU's multiprocessors.

    The backend, which is made later, says who serves the indexer.
    """
    import sglang
    from sglang.srt.runtime_context import attention_backends

    from cumla._serving import backend_of

    if _NAME not in attention_backends():
        return theirs()
    indexer = backend_of("sglang", sglang.__version__, TESTED, _NAME, f"{__name__}.indexer", ())
    indexer.take_over()
    return indexer.deep_gemm.get_num_sms()


def _make(runner: Any) -> Any:
    """Make the backend of a model runner: SGLang's factory."""
    import sglang

    from cumla._serving import backend_of

    is_sparse = runner.use_mla_backend and _has_indexer(runner)
    module = f"{__name__}.{'sparse' if is_sparse else 'backend'}"
    backend = backend_of("sglang", sglang.__version__, TESTED, _NAME, module, ("Backend",))
    if runner.use_mla_backend:
        _teach_deepseek(is_sparse)
    elif _chooses_blocks(runner):
        from cumla.sglang import minimax_m3

        minimax_m3.attend(runner.page_size)
    return backend.Backend(runner)


def _has_indexer(runner: Any) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_dsa

    return bool(is_deepseek_dsa(runner.model_config.hf_config))


def _chooses_blocks(runner: Any) -> bool:
    """Return whether the model is MiniMax M3, whose layers that do so SGLang serves by a class."""
    architectures = getattr(runner.model_config.hf_config, "architectures", None) or ()
    return any(name.startswith("MiniMaxM3Sparse") for name in architectures)


def _teach_deepseek(is_sparse: bool) -> None:
    """Let models with MLA always pass absorbed queries, in two parts.

    With sparse MLA short prompts are dense, as SGLang's own backend decides.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    handler = AttentionBackendRegistry.get_handler("dsa") if is_sparse else None
    AttentionBackendRegistry.register(_NAME, handler or (lambda attn, batch: AttnForwardMethod.MLA))
    if _NAME not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(_NAME)
