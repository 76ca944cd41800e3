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
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

__all__ = ["TESTED", "register"]

TESTED = ((0, 25), (0, 33))
"""The first and the last minor version of vLLM that the plugin was tested with.

Older ones are refused. Newer ones are served after a warning, if they have the interfaces.
"""

_TESTED_SPARSE = ((0, 26), (0, 33))  # 0.25 has no classes to derive from
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
    for care in (WithoutDeepGEMM, InDeepSeekV4, InDeepSeekV41, InMiniMaxM3, InQSA, InStep5):
        care.take_care()


class _OnImport(MetaPathFinder):
    """Changes a module of vLLM as soon as it is imported, and imports nothing itself.

    Until then it stays: others may ask where the module is, and an import may fail.
    """

    name: str
    _is_asking = False  # the other finders

    @classmethod
    def take_care(cls) -> None:
        """Replace something in the module now, if it is there already, or when it is imported."""
        if cls.name in sys.modules:
            cls.replace(sys.modules[cls.name])
        elif not any(type(finder) is cls for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())

    @classmethod
    def replace(cls, module: Any) -> None:
        """Replace what is to be replaced; a second call changes nothing."""
        raise NotImplementedError

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find the module as others do, to change it once it has been executed."""
        if fullname != self.name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self.replace(module)

            setattr(spec.loader, "exec_module", execute_and_replace)  # noqa: B010
        return spec


class WithoutDeepGEMM(_OnImport):
    """Lets vLLM's sparse indexer be made without DeepGEMM where cumla's backend is asked for.

    vLLM makes the indexer before it resolves the backend of the first layer, and refuses without
    DeepGEMM, which :mod:`cumla.vllm.indexer` does not use. Nothing happens until vLLM imports the
    indexer's module, and nothing changes for other backends.
    """

    name = "vllm.model_executor.layers.sparse_attn_indexer"
    was_asked_for = False  # by the model whose drafts another one makes, with a backend of its own

    @classmethod
    def replace(cls, module: Any) -> None:
        """Answer for DeepGEMM where CUSTOM is asked for."""
        theirs = module.has_deep_gemm
        if getattr(theirs, "__module__", None) == __name__:
            return

        def has_deep_gemm() -> bool:
            cls.was_asked_for |= _is_asked_for()
            return cls.was_asked_for or bool(theirs())

        module.has_deep_gemm = has_deep_gemm


class InDeepSeekV4(_OnImport):
    """Lets the layers of DeepSeek-V4 attend by cumla where its backend is asked for.

    They take FlashMLA's functions whatever the option says: CUSTOM is none of their names.
    """

    name = "vllm.models.deepseek_v4.nvidia.model"

    @classmethod
    def replace(cls, module: Any) -> None:
        """Choose the class of a layer."""
        theirs = getattr(module, "_select_dsv4_attn_cls", None)
        if theirs is None or getattr(theirs, "__module__", None) == __name__:
            return

        def choose(vllm_config: Any) -> type:
            chosen: type = theirs(vllm_config)
            return cls.of_layers(chosen) if _is_asked_for() else chosen

        module._select_dsv4_attn_cls = choose

    @classmethod
    def of_layers(cls, theirs: type) -> type:
        """Return the class of a layer where CUSTOM is asked for."""
        from cumla.vllm.deepseek_v4 import attending

        return attending(theirs)


class InDeepSeekV41(InDeepSeekV4):
    """Warns that the layers of DeepSeek-V4.1 keep vLLM's functions, which they take silently."""

    name = "vllm.models.deepseek_v41.nvidia.model"
    _has_warned = False

    @classmethod
    def of_layers(cls, theirs: type) -> type:
        """Warn once."""
        if not cls._has_warned:
            cls._has_warned = True
            _log.warning(
                "DeepSeek-V4.1: cumla's backend does not read its caches, and its layers attend by "
                "vLLM's %s; leave out --attention-backend CUSTOM",
                theirs.__name__,
            )
        return theirs


class InMiniMaxM3(_OnImport):
    """Lets the layers of MiniMax M3 that choose blocks do so by cumla where CUSTOM is asked for.

    They call Triton functions whatever the option says.
    """

    name = "vllm.models.minimax_m3.nvidia.model"
    _names = ("select_main_backend_and_impl_cls", "select_main_impl_cls")  # of 0.33, and of 0.26

    @classmethod
    def replace(cls, module: Any) -> None:
        """Replace the functions as soon as a layer chooses its class."""
        for name in cls._names:
            theirs = getattr(module, name, None)
            if theirs is not None and getattr(theirs, "__module__", None) != __name__:
                setattr(module, name, cls._asking(theirs))

    @staticmethod
    def _asking(theirs: Any) -> Any:
        def choose(**given: Any) -> Any:
            if _is_asked_for():
                from cumla.vllm import minimax_m3

                minimax_m3.attend()
            return theirs(**given)

        return choose


class InQSA(_OnImport):
    """Lets Qwen's QSA layers attend by cumla: they call a Triton kernel whatever is asked for."""

    name = "vllm.models.qwen4_exp.nvidia.qsa"
    _class = "Qwen4ExpQSAFlashAttentionImpl"

    @classmethod
    def replace(cls, module: Any) -> None:
        """Look at what objects of the class are made."""
        impl = getattr(module, cls._class, None)
        if impl is None or getattr(impl.__init__, "__module__", None) == __name__:
            return
        theirs = impl.__init__

        def __init__(self: Any, *args: Any, **given: Any) -> None:
            theirs(self, *args, **given)
            if _is_asked_for():
                cls._attend(self)

        impl.__init__ = __init__

    @staticmethod
    def _attend(impl: Any) -> None:
        from cumla.vllm import qsa

        qsa.attend(impl)


class InStep5(InQSA):
    """The same for Step 5's layers that choose regions, which call one function."""

    name = "vllm.models.step5.nvidia.sparse_attention"
    _class = "Step5DSAAttentionImpl"

    @staticmethod
    def _attend(impl: Any) -> None:
        from cumla.vllm import step5

        step5.attend()


def _is_asked_for() -> bool:
    """Return whether the server asks for CUSTOM, and this plugin is CUSTOM."""
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = get_current_vllm_config().attention_config
    kinds: dict[str, Any] = getattr(config, "backend_per_kind", None) or {}
    custom = AttentionBackendEnum.CUSTOM
    return custom in (config.backend, *kinds.values()) and custom.get_path() == _PATH


def __getattr__(name: str) -> Any:
    """Choose the class when vLLM resolves the path: one name serves all kinds of attention."""
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm
    from vllm.config import get_current_vllm_config

    from cumla._serving import backend_of

    model = get_current_vllm_config().model_config
    configs = (getattr(model, name, None) for name in ("hf_config", "hf_text_config"))
    is_sparse = any(hasattr(config, "index_topk") for config in configs)  # as vLLM asks
    kind = ("sparse" if is_sparse else "mla") if model.use_mla else "mha"
    classes = ("Backend", "Builder", "Impl")
    module = f"{__name__}.{kind}"
    tested = _TESTED_SPARSE if kind == "sparse" else TESTED
    return backend_of("vllm", vllm.__version__, tested, "CUSTOM", module, classes).Backend
