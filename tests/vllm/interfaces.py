# SPDX-License-Identifier: Apache-2.0
"""Compare the plugin's classes with the vLLM that can be imported; the Python files suffice.

``PYTHONPATH=VLLM:CUMLA python interfaces.py``: VLLM holds vLLM's package (an unpacked wheel, if
another version than the installed one is asked about), CUMLA an installed cumla. An AssertionError
says what does not fit; the last line printed is the version.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum

VARIABLE = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)


def takes(ours: Any, theirs: Any) -> bool:
    """Whether a method takes what vLLM passes to the one that it overrides, and needs no more."""
    own, base = (signature(method).parameters for method in (ours, theirs))
    named = {name for name, p in base.items() if p.kind not in VARIABLE}
    needed = {name for name, p in own.items() if p.default is p.empty and p.kind not in VARIABLE}
    return needed <= named and (
        named <= own.keys() or any(p.kind in VARIABLE for p in own.values())
    )


def check(kind: type) -> None:
    """Check a class against its bases."""
    assert not getattr(kind, "__abstractmethods__", ()), kind.__abstractmethods__
    for name in vars(kind):
        for base in kind.__mro__[1:]:
            method = vars(base).get(name)
            if method is not None and not name.startswith("__") and callable(getattr(base, name)):
                assert takes(getattr(kind, name), getattr(base, name)), (kind, name, base)
                break


def reasons(backend: Any, **asked: Any) -> list[str]:
    """Why vLLM refuses a configuration; this version may not ask about all of it."""
    usual = {
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "use_mla": backend.is_mla(),
        "has_sink": False,
        "use_sparse": backend.is_sparse(),
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
        "head_size": 576 if backend.is_mla() else 128,
    }
    known = signature(backend.validate_configuration).parameters
    found: list[str] = backend.validate_configuration(
        **{name: value for name, value in (usual | asked).items() if name in known}
    )
    return found


def graphs_of_drafts(builder: Any) -> CUDAGraphMode:
    """Which graphs vLLM makes of steps with two drafts that it divides into micro-batches."""
    settings = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.FULL
    )
    settings.set_splitting_ops_for_v1("", 1)
    settings.max_cudagraph_capture_size = 512
    parallel = SimpleNamespace(use_ubatching=True, decode_context_parallel_size=1)
    config = SimpleNamespace(compilation_config=settings, parallel_config=parallel)
    support = builder.get_cudagraph_support(config, None)
    found: CUDAGraphMode = settings.resolve_cudagraph_mode_and_sizes(support, "Backend", 3)
    return found


def check_layers_of_their_own() -> None:
    """Return what the plugin replaces in models whose layers do not ask for a backend."""
    import cumla.vllm
    from cumla.compat.vllm_minimax_m3 import _HOMES
    from cumla.vllm.step5 import _HOME

    wanted: dict[str, Any] = dict(_HOMES)
    for each in (cumla.vllm.InQSA, cumla.vllm.InStep5):
        wanted[each.name] = (f"class {each._class}(",)
    for home, names in (wanted | {_HOME: ("sparse_decode_attention",)}).items():
        text = source_of(home)
        assert text is None or all(name in text for name in names), home
    m3 = cumla.vllm.InMiniMaxM3
    text = source_of(m3.name)
    assert text is None or any(name in text for name in m3._names)


def source_of(module: str) -> str | None:
    """A module's text; None where this version has no such model."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).read_text("utf-8")


def main() -> None:
    load_general_plugins()
    assert AttentionBackendEnum.CUSTOM.get_path() == "cumla.vllm.Backend"
    for family in ("mla", "sparse", "mha"):
        if family == "sparse" and vllm.__version__.startswith("0.25."):
            continue  # which has no classes to derive from
        module = import_module(f"cumla.vllm.{family}")
        for kind in (module.Backend, module.Builder, module.Impl):
            check(kind)
        backend = module.Backend
        served: tuple[dict[str, Any], ...] = (
            {},
            {"kv_cache_dtype": "fp8"},
            {"dtype": torch.float16},
            {"block_size": 1},
            {"use_batch_invariant": True},
        )
        refused: tuple[dict[str, Any], ...] = (
            {"dtype": torch.float32},
            {"kv_cache_dtype": "fp8_e5m2"},
            {"use_sparse": family != "sparse"},
            {"device_capability": DeviceCapability(10, 0)},
            {"attn_type": "encoder_only"},
            {"head_size": 12},
        )
        if family != "mha":
            refused = (*refused, {"kv_cache_dtype": "fp8", "dtype": torch.float16})
        if family == "sparse":
            served = (*served, {"kv_cache_dtype": "fp8_ds_mla"}, {"has_sink": True})
            if "use_adaptive_verification" in signature(backend.validate_configuration).parameters:
                refused = (*refused, {"use_adaptive_verification": True})
        elif family == "mla":
            served = (*served, {"use_adaptive_verification": True})
        else:
            served = (*served, {"use_adaptive_verification": True})
            served = (*served, {"has_sink": True, "has_sliding_window": True})
            served = (*served, {"use_mm_prefix": True}, {"use_non_causal": True})
            refused = (*refused, {"kv_cache_dtype": "fp8", "head_size": 512})
        for asked in served:
            assert not reasons(backend, **asked), (asked, reasons(backend, **asked))
        for asked in refused:
            assert reasons(backend, **asked), asked
        assert graphs_of_drafts(module.Builder) is CUDAGraphMode.PIECEWISE
    check_layers_of_their_own()
    print(vllm.__version__)


if __name__ == "__main__":
    main()
