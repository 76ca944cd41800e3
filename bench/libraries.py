# SPDX-License-Identifier: Apache-2.0
"""Other libraries' kernels, called as their own Python interfaces call them.

FlashMLA, FlashAttention-3 and vLLM's top-k are operators that a compiled file registers with
PyTorch. The file is looked for on the path of Python, where the package would be installed, and
the package itself is not imported: it needs much that the operators do not.

    pip install --no-deps vllm==0.33.0 sgl-flash-mla==1.0.0 flashinfer-python==0.7.4
    pip install flash-attn-4==4.0.0b36  # compiles a kernel at the first call of each kind
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from importlib import import_module, metadata
from importlib.util import module_from_spec, spec_from_file_location
from logging import getLogger
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

__all__ = ["FlashAttention", "FlashMLA", "Libraries"]


def find(path: str) -> Path:
    """Find a file or folder below one of the folders of `sys.path`."""
    for folder in sys.path:
        if (found := Path(folder or ".") / path).exists():
            return found.resolve()
    raise FileNotFoundError(f"no {path} on the path of Python")


def _flash_infer(module: str) -> Any:
    """Import a module of FlashInfer, some of whose files call the driver and do not name it."""
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)  # a symbol that is missing ends the process
    return import_module(f"flashinfer.{module}")


class _Absent(type):
    """A class, or a module, that is imported and not needed: what it should have is absent, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})


def _vllm(path: str, platform: Any, **given: Any) -> ModuleType:
    """Load one file of vLLM, without what it imports of the package beside Triton and `given`.

    Names of modules in `given` are those behind the last dot.
    """
    file = find(f"vllm/{path}")
    triton: dict[str, Any] = {"triton": import_module("triton"), "HAS_TRITON": True}
    triton["tl"] = import_module("triton.language")
    text, name = file.read_text("utf-8"), f"vllm_{file.stem}"
    imported = re.findall(r"^(?:from|import) (vllm[.\w]*)", text, re.M)
    if beside := re.findall(r"^from \.(\w+) import", text, re.M):
        package = f"vllm.{path.rpartition('/')[0].replace('/', '.')}"
        name = f"{package}.{file.stem}"
        imported += [f"{package}.{other}" for other in beside]
    stand_ins: dict[str, Any] = {name: _Absent(name, (), {}) for name in ("vllm", *imported)}
    stand_ins |= {
        "vllm.platforms": SimpleNamespace(current_platform=platform),
        "vllm.triton_utils": SimpleNamespace(**triton),
    }
    stand_ins |= {
        found: given[last] for found in imported if (last := found.split(".")[-1]) in given
    }
    for last, module_of in given.items():
        setattr(stand_ins["vllm"], last, module_of)
    if "vllm.v1.worker.workspace" in stand_ins:  # then scratch is allocated by PyTorch
        stand_ins["vllm.v1.worker.workspace"].is_workspace_manager_initialized = lambda: False
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    with mock.patch.dict(sys.modules, stand_ins):
        spec.loader.exec_module(module)
    return module


class Schedule:
    """The schedule that FlashMLA makes in its first call, and takes in later ones."""

    tiles: Any = None
    splits: Any = None


class FlashMLA:
    """A build of FlashMLA."""

    def __init__(
        self, torch: Any, files: tuple[str, ...], names: tuple[str, str], takes_out: bool
    ) -> None:
        for file in files:
            torch.ops.load_library(str(find(file)))
        self.operators, self._fp8 = (getattr(torch.ops, name) for name in names)
        self.takes_out = takes_out

    def _out(self, out: Any) -> tuple[Any, ...]:
        return (out,) if self.takes_out else ()

    def dense(
        self, q: Any, cache: Any, table: Any, lens: Any, scale: float, schedule: Schedule, out: Any
    ) -> Any:
        """Decode, causal; a cache (pages, tokens, 1, 576)."""
        given = (q, cache, 512, lens, table, scale, True, schedule.tiles, schedule.splits)
        result, _, schedule.tiles, schedule.splits = self.operators.dense_decode_fwd(
            *given, *self._out(out)
        )
        return result

    def dense_fp8(
        self, q: Any, cache: Any, table: Any, lens: Any, scale: float, heads: int
    ) -> Callable[[], Any]:
        """Make a call that decodes over e4m3 queries and rows; its schedule is made now."""
        schedule = self._fp8.get_mla_decoding_metadata_dense_fp8(lens, heads, 1)
        one = lens.new_ones(1).float()

        def call() -> Any:
            return self._fp8.fwd_kvcache_mla_fp8(
                *(q, cache, 512, lens, table, scale, True, *schedule, one, one)
            )[0]

        return call

    def lists(
        self,
        q: Any,
        cache: Any,
        indices: Any,
        scale: float,
        schedule: Schedule,
        out: Any,
        *,
        sinks: Any = None,
        extra: tuple[Any, Any] = (None, None),
    ) -> Any:
        """Decode over lists of packed rows; `extra` is a second cache with its lists."""
        made = (schedule.tiles, schedule.splits)
        given = (q, cache, indices, None, sinks, *made, *extra, None, 512, scale)
        result, _, schedule.tiles, schedule.splits = self.operators.sparse_decode_fwd(
            *given, *self._out(out)
        )
        return result

    def prefill(self, q: Any, rows: Any, indices: Any, scale: float, out: Any) -> Any:
        """Attend from each query token over a list of its own of bfloat16 rows."""
        last = (out,) if self.takes_out else (True, True)  # where not: statistics by base 2
        given = (q, rows, indices, scale, 512, None, None)
        return self.operators.sparse_prefill_fwd(*given, *last)[0]


class FlashAttention:
    """FlashAttention-3, as vLLM builds it."""

    def __init__(self, torch: Any) -> None:
        torch.ops.load_library(str(find("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")))
        self._operators = torch.ops._vllm_fa3_C

    def schedule(
        self,
        lens: Any,
        *,
        max_q: int,
        max_kv: int,
        heads: tuple[int, int],
        columns: tuple[int, int],
        dtype: Any,
        window: tuple[int, int] = (-1, -1),
        page: int | None = None,
        q_starts: Any = None,
        k_starts: Any = None,
        splits: int = 0,
        pack: bool | None = None,
        causal: bool = True,
    ) -> Any:
        """Compute the schedule of the calls that follow."""
        return self._operators.get_scheduler_metadata(
            *(len(lens), max_q, max_kv, *heads, *columns, dtype, lens, q_starts, k_starts),
            *(None, None, None, page, 0, causal, *window, False, splits, pack, 0),
        )

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float,
        out: Any,
        qv: Any = None,
        q_starts: Any = None,
        k_starts: Any = None,
        lens: Any = None,
        max_q: int | None = None,
        max_kv: int | None = None,
        table: Any = None,
        factors: Any = None,
        window: tuple[int, int] = (-1, -1),
        schedule: Any = None,
        splits: int = 0,
        pack: bool | None = None,
        sinks: Any = None,
        causal: bool = True,
        with_lse: bool = False,
    ) -> Any:
        """Attend; with_lse: return a pair."""
        lengths = (q_starts, k_starts, None, None, lens, max_q, max_kv)
        last = (window[0], window[1], 0.0, True, schedule, splits, pack, 0, sinks, 1, 0, None)
        found = self._operators.fwd(
            *(q, k, v, None, None, qv, out, *lengths, table, None, None, None, None, None),
            *(factors, factors, factors, scale, causal, *last),
        )
        return found[:2] if with_lse else found[0]


class Libraries:
    """The libraries that are there; `notes` says why others are not."""

    def __init__(self, torch: Any, *, usable: bool = True) -> None:
        self._torch, self._usable = torch, usable
        self._loaded: dict[str, Any] = {}
        self.notes: list[str] = []

    def _load(self, name: str, load: Callable[[], Any]) -> Any:
        """Load once; None if it cannot be, or nothing is to be called here."""
        if not self._usable:
            return None
        if name not in self._loaded:
            try:
                self._loaded[name] = load()
            except Exception as error:  # of any kind: the others are measured
                reason = str(error).strip().partition("\n")[0]
                self.notes.append(f"{name} did not run: {type(error).__name__}: {reason}")
                self._loaded[name] = None
        return self._loaded[name]

    @property
    def flash_mla(self) -> dict[str, FlashMLA]:
        """Builds of FlashMLA, by the project that made them."""
        found = {
            "vLLM": self._load(
                "FlashMLA of vLLM",
                lambda: FlashMLA(
                    self._torch,
                    ("vllm/_flashmla_C.abi3.so", "vllm/_flashmla_extension_C.abi3.so"),
                    ("_flashmla_C", "_flashmla_extension_C"),
                    takes_out=True,
                ),
            ),
            "SGLang": self._load(
                "FlashMLA of SGLang",
                lambda: FlashMLA(
                    self._torch,
                    ("flash_mla/_C_legacy.abi3.so",),
                    ("flash_mla_legacy", "flash_mla_legacy"),
                    takes_out=False,
                ),
            ),
        }
        return {name: build for name, build in found.items() if build is not None}

    @property
    def flash_attention(self) -> FlashAttention | None:
        return self._load("FlashAttention-3", lambda: FlashAttention(self._torch))  # type: ignore[no-any-return]

    @property
    def flash_attention_4(self) -> Any:
        """The module with its functions."""
        return self._load("FlashAttention-4", lambda: import_module("flash_attn.cute.interface"))

    @property
    def deep_gemm(self) -> Any:
        def load() -> Any:
            sys.path.append(str(find("vllm/third_party/deep_gemm").parent))
            return import_module("deep_gemm")

        return self._load("DeepGEMM", load)

    @property
    def flash_infer_top_k(self) -> Any:
        return self._load("FlashInfer", lambda: _flash_infer("topk"))

    def flash_infer(self, module: str) -> Any:
        """One of FlashInfer's modules of Python."""
        return self._load(f"flashinfer.{module}", lambda: _flash_infer(module))

    @property
    def flash_infer_blocks(self) -> Any:
        """The functions of MiniMax M3: scores, choice and attention of blocks."""

        def load() -> Any:
            _flash_infer("msa_ops.cake_hopper_sm90")
            return _flash_infer("msa_ops")

        return self._load("FlashInfer's msa_ops", load)

    @property
    def flash_infer_windows(self) -> Any:
        """The module of `batch_decode_with_kv_cache_mla_swa`: its `run` takes the tactic, too."""

        def load() -> Any:
            return _flash_infer("jit.mla").gen_mla_swa_sm90_module().build_and_load()

        return self._load("FlashInfer's mla_swa", load)

    @property
    def vllm_blocks(self) -> Any:
        """vLLM's Triton kernels of MiniMax M3."""

        def load() -> Any:
            platform = SimpleNamespace(
                is_arch_support_pdl=lambda: True, fp8_dtype=lambda: self._torch.float8_e4m3fn
            )
            return _vllm("models/minimax_m3/common/ops/sparse_attn.py", platform)

        return self._load("vLLM's kernels of MiniMax M3", load)

    @property
    def vllm_choice(self) -> Any:
        """vLLM's Triton kernels of MiniMax M3 that score blocks and choose them."""

        def load() -> Any:
            platform = SimpleNamespace(is_arch_support_pdl=lambda: True)
            utils = SimpleNamespace(round_up=lambda size, unit: -(-size // unit) * unit)
            file = "models/minimax_m3/common/ops/index_topk.py"
            return _vllm(file, platform, math_utils=utils)

        return self._load("vLLM's choice of blocks", load)

    @property
    def vllm_qsa(self) -> Any:
        """vLLM's Triton kernel of Qwen QSA, as a function."""

        def load() -> Any:
            platform = SimpleNamespace(get_device_capability=lambda: (9, 0))
            module = _vllm("models/qwen4_exp/nvidia/ops/qsa.py", platform)
            return module.qsa_sparse_paged_attention

        return self._load("vLLM's kernel of QSA", load)

    @property
    def vllm_step5(self) -> Any:
        """vLLM's Triton kernel of Step 5, and how it splits lists."""

        def load() -> Any:
            platform = SimpleNamespace(is_arch_support_pdl=lambda: True)
            return _vllm("models/step5/nvidia/ops/sparse_decode_attention.py", platform)

        return self._load("vLLM's kernel of Step 5", load)

    @property
    def vllm_qsa_scores(self) -> Any:
        """vLLM's Triton kernels that score pooled keys of QSA."""
        path = "models/qwen4_exp/nvidia/ops/qsa_indexer.py"
        return self._load("vLLM's scores of QSA", lambda: _vllm(path, SimpleNamespace()))

    @property
    def vllm_step5_scores(self) -> Any:
        """vLLM's Triton kernel that scores pooled keys of Step 5, as a function."""

        def load() -> Any:
            count = self._torch.cuda.get_device_properties("cuda").multi_processor_count
            beside = SimpleNamespace(DecodeIndexerMetadata=lambda *arrays: arrays)
            path = "models/step5/nvidia/ops/sparse_indexer_scores.py"
            module = _vllm(path, SimpleNamespace(), sparse_indexer=beside)
            return partial(module.decode_summary_scores, num_sms=count)

        return self._load("vLLM's scores of Step 5", load)

    @property
    def vllm_attention(self) -> Any:
        """vLLM's Triton kernel of TRITON_ATTN, as a function."""

        def load() -> Any:
            folder = "v1/attention/ops"
            platform = SimpleNamespace(
                fp8_dtype=lambda: self._torch.float8_e4m3fn,
                is_device_capability_family=lambda family: family == 90,
            )
            kinds = {"NONE": 0, "INT8_PER_TOKEN_HEAD": 2, "FP8_PER_TOKEN_HEAD": 3}
            module = _vllm(
                f"{folder}/triton_unified_attention.py",
                platform,
                triton_attention_helpers=_vllm(f"{folder}/triton_attention_helpers.py", platform),
                kv_cache_interface=SimpleNamespace(
                    KVQuantMode=IntEnum("KVQuantMode", kinds | {"INT4_PER_TOKEN_HEAD": 4})
                ),
                envs=SimpleNamespace(VLLM_BATCH_INVARIANT=False),
                logger=SimpleNamespace(init_logger=getLogger),
            )
            return module.unified_attention

        return self._load("vLLM's TRITON_ATTN", load)

    @property
    def vllm_mla(self) -> Any:
        """vLLM's Triton kernels of decoding, those of TRITON_MLA."""

        def load() -> Any:
            platform = SimpleNamespace(is_rocm=lambda: False)
            return _vllm("v1/attention/ops/triton_decode_attention.py", platform)

        return self._load("vLLM's TRITON_MLA", load)

    @property
    def vllm_windows(self) -> Any:
        """Load vLLM's method that decodes over dots3's windows; it needs little of its class."""

        def load() -> Any:
            module = _vllm("models/dots3_note/nvidia/attention.py", SimpleNamespace())
            return module.Dots3NoteTritonMLAImpl._forward_swa_mqa

        return self._load("vLLM's kernels of dots3", load)

    @property
    def vllm_operators(self) -> Any:
        """The operators of vLLM, its top-k among them."""

        def load() -> Any:
            self._torch.ops.load_library(str(find("vllm/_C_stable_libtorch.abi3.so")))
            return self._torch.ops._C

        return self._load("vLLM's top-k", load)

    def versions(self) -> dict[str, str]:
        """Versions of the packages that the libraries come from, where one is there."""
        found = {}
        for package in ("vllm", "sgl-flash-mla", "flashinfer-python", "flash-attn-4", "deep_gemm"):
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        deep_gemm = self._loaded.get("DeepGEMM")
        if deep_gemm is not None:
            found["deep_gemm"] = deep_gemm.__version__
        return found
