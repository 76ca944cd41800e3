# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla info``: what is installed here, what the GPUs are, what a server can serve."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from cumla.cli import positive
from cumla.errors import CumlaError

if TYPE_CHECKING:
    from cumla.vllm._models import Model

# Looked up without importing them: torch alone would take seconds.
_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
    "cuda-core",
    "cuda-bindings",
    "torch",
    "jax",
    "transformers",
    "vllm",
    "sglang",
)
_SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}  # options -> names
_OF_A_MODEL = ("dtype", "kv_cache_dtype", "block_size", "tensor_parallel_size", "fp8_products")
_VARIABLES = ("CUMLA_CHECK", "CUMLA_CUBIN_DIR", "CUMLA_DEBUG")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``python -m cumla``."""
    what = (
        "show versions, GPUs, NVRTC and cache folders; with --vllm CONFIG or --sglang CONFIG what "
        "serves a model"
    )
    parser = subparsers.add_parser("info", help=what, description=what)
    group = parser.add_argument_group(
        "vLLM and SGLang",
        "whether the plugin would serve a model, with what beside attention; the exit status is 1 "
        "if it would not, and 2 if the question cannot be answered",
    )
    which = group.add_mutually_exclusive_group()
    for option in _SERVERS:
        which.add_argument(
            f"--{option}",
            nargs="?",
            const=True,
            metavar="CONFIG",
            help="a config.json of Hugging Face, or a folder with one; without it the versions "
            "alone",
        )
    group.add_argument("--dtype", help="as the model's by default")
    group.add_argument("--kv-cache-dtype", help="auto by default")
    page = "tokens of a page; 64 by default"
    group.add_argument("--block-size", "--page-size", type=positive, help=page)
    group.add_argument("--tensor-parallel-size", "--tp", "-tp", type=positive, help="1 by default")
    allowed = "as with the option fp8_products of vLLM's --additional-config"
    group.add_argument("--fp8-products", action="store_true", default=None, help=allowed)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the report.

    1 if the plugin would not serve the model that is asked about, 2 if it could not be read.
    """
    try:
        model = _asked_about(args)
    except CumlaError as error:
        print(f"cumla info: {error}", file=sys.stderr)
        return 2
    if _server(args) is not None:
        return _served(args, model)
    rows: list[tuple[str, Callable[[], str]]] = [
        ("cumla", _cumla),
        ("Python", lambda: f"{platform.python_version()} on {platform.platform()}"),
        *((name, partial(_version, name)) for name in _PACKAGES),
        ("CuPy", _cupy),
        ("NVRTC of CuPy", _cupy_nvrtc),
        ("NVRTC of cuda.bindings", _bindings_nvrtc),
        ("CUDA driver", _driver),
        ("GPUs", _gpus),
        ("arrays in CPU memory", lambda: "computed by cumla.reference; no GPU, no driver, no CuPy"),
        ("kernels", _kernels),
        ("kernel cache (CuPy)", _kernel_cache),
        ("kernels ahead of time", _cubins),
        *((name, partial(_variable, name)) for name in _VARIABLES),
    ]
    told: dict[str, str] = {}
    for title, ask in rows:
        _print(title, _answer(title, ask, told))
    return 0


def _asked_about(args: argparse.Namespace) -> Model | None:
    """Read the model that the arguments name."""
    given = [name for name in _OF_A_MODEL if getattr(args, name) is not None]
    server = _server(args)
    config = server and getattr(args, server)
    if given and config in (None, True):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise CumlaError(
            f"{names}: needs a model to ask about, got none; add --{server or 'vllm'} CONFIG"
        )
    if server == "sglang" and args.fp8_products:
        raise CumlaError("--fp8-products: needs --vllm, got --sglang; leave it out")
    return None if server is None or config in (None, True) else _read(args, server, config)


def _server(args: argparse.Namespace) -> str | None:
    """Return the server that is asked about, by its option."""
    return next((name for name in _SERVERS if getattr(args, name) is not None), None)


def _served(args: argparse.Namespace, model: Model | None) -> int:
    """Print whether the plugin of a server would serve a model."""
    of_server = _vllm_rows if _server(args) == "vllm" else _sglang_rows
    rows = [("cumla", _cumla()), ("GPUs", _answer("GPUs", _gpus, {})), *of_server(args, model)]
    for row in rows:
        _print(*row)
    return int(any(title == "served" and answer.startswith("no") for title, answer in rows))


def _print(title: str, answer: str) -> None:
    first, *rest = answer.split("\n")
    print(f"{title:<24} {first}")
    for line in rest:
        print(f"{'':<24} {line}")


def _answer(title: str, ask: Callable[[], str], told: dict[str, str]) -> str:
    """Ask, or say why there is no answer: a broken driver can raise anything.

    `told` holds each reason with the row that gave it: the others refer to that one.
    """
    try:
        return ask()
    except Exception as error:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        reason = f"{type(error).__name__}: {first_line}"
        first = told.setdefault(reason, title)
        return f"not available: {reason if first == title else f'see {first}'}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _variable(name: str) -> str:
    return os.environ.get(name, "not set")


def _cumla() -> str:
    version, folder = _version("cumla"), Path(__file__).resolve().parent.parent
    return f"{version}{'; runs from' if version == 'not installed' else ' in'} {folder}"


def _cupy() -> str:
    from cumla.launch.device import import_cupy

    cupy = import_cupy()
    return f"{cupy.__version__}, made for CUDA {_dotted(cupy.cuda.driver.get_build_version())}"


def _cupy_nvrtc() -> str:
    from cumla.launch.module import compiles_with_cupy, cupy_nvrtc_version

    version = cupy_nvrtc_version()
    how = "RawModule compiles" if compiles_with_cupy(version) else "cuda.bindings compiles instead"
    return f"{version[0]}.{version[1]} ({how})"


def _bindings_nvrtc() -> str:
    from cumla.launch.module import bindings_nvrtc_version

    return "{}.{}".format(*bindings_nvrtc_version())


def _driver() -> str:
    from cumla.launch.device import import_cupy

    version = import_cupy().cuda.runtime.driverGetVersion()
    return f"supports CUDA {_dotted(version)}" if version else "none"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _gpus() -> str:
    from cumla.launch.device import import_cupy

    count = import_cupy().cuda.runtime.getDeviceCount()
    return "\n".join(_gpu(ordinal) for ordinal in range(count)) or "none"


def _gpu(ordinal: int) -> str:
    from cumla.errors import UnsupportedDeviceError
    from cumla.launch.device import properties, require_hopper

    found = properties(ordinal)
    try:
        require_hopper(ordinal)
        verdict = "the kernels run on it"
    except UnsupportedDeviceError:
        verdict = "the kernels need 9.0"
    major, minor = found.compute_capability
    return (
        f"{ordinal}: {found.name}, compute capability {major}.{minor}: {verdict}; "
        f"{found.sm_count} SMs, {found.smem_optin} bytes of shared memory a block, "
        f"{found.l2_bytes >> 20} MiB of L2"
    )


def _kernels() -> str:
    from cumla.launch import all_specs

    specs = all_specs()
    return f"{len(specs)}, of {', '.join(dict.fromkeys(spec.stem for spec in specs))}"


def _kernel_cache() -> str:
    from cumla.launch.module import cache_dir, why_cache_is_shared

    folder = cache_dir()
    if not folder.is_dir():
        return f"{folder} (not there yet)"
    problem = why_cache_is_shared()
    if problem is not None:
        return f"{folder} (not used: {problem})"
    return f"{folder} ({sum(path.suffix == '.cubin' for path in folder.iterdir())} cubins)"


def _cubins() -> str:
    from cumla.launch import all_specs
    from cumla.launch.module import cubin_dir, installed_cubins
    from cumla.launch.source import cubin_name, debug_build

    folder = cubin_dir() or installed_cubins()
    if folder is None:
        return "none (CUMLA_CUBIN_DIR is not set, cumla-cubins is not installed)"
    specs, debug = all_specs(), debug_build()
    found = sum((folder / cubin_name(spec, debug=debug)).is_file() for spec in specs)
    return f"{folder}: {found} of {len(specs)} kernels of this version"


def _vllm_rows(args: argparse.Namespace, model: Model | None) -> Iterator[tuple[str, str]]:
    """Tell of vLLM, and of the model; the row `served` begins with yes or no."""
    reason = ""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        yield "vLLM", "not installed here: versions are not checked"
    else:
        is_sparse = model is not None and bool(model.topk) and not model.is_v4
        answer, reason = _vllm_version(version, is_sparse)
        yield "vLLM", answer
        if model is None:
            yield "with sparse MLA", _vllm_version(version, True)[0]
        yield "plugin", _entry_point("vllm.general_plugins", "VLLM_PLUGINS")
    if model is not None:
        yield from _model_rows(args, model, reason)


def _vllm_version(version: str, is_sparse: bool) -> tuple[str, str]:
    """Return how the plugin takes a version for such models, and why it refuses it."""
    from cumla.vllm import _TESTED_SPARSE, TESTED

    return _judged("vllm", version, _TESTED_SPARSE if is_sparse else TESTED, "CUSTOM")


def _judged(
    server: str, version: str, tested: tuple[tuple[int, ...], tuple[int, ...]], option: str
) -> tuple[str, str]:
    from cumla._serving import is_tested

    try:
        known = is_tested(server, version, tested, option)
    except RuntimeError as error:
        return f"{version}: refused", str(error)
    way = "tested" if known else "not tested; served if it has the interfaces, after a warning"
    return f"{version}: {way}", ""


def _entry_point(group: str, variable: str) -> str:
    allowed = os.environ.get(variable)
    found = metadata.entry_points(group=group, name="cumla")
    if not found:
        return "not found: install cumla into this environment"
    if allowed is not None and "cumla" not in allowed.split(","):
        return f"not loaded: {variable} is {allowed!r}; add cumla"
    return "found"


def _read(args: argparse.Namespace, server: str, config: str) -> Model:
    """Read the model; what is wrong with its file is a CumlaError."""
    from cumla.vllm._models import read_model

    what = f"{config or f'--{server}'}: needs the config.json of a model, got "
    way = "`hf download MODEL config.json --local-dir FOLDER` fetches one"
    if not config:
        raise CumlaError(f"{what}an empty name; {way}, and --{server} FOLDER names it")
    asked = args.dtype or "auto", args.tensor_parallel_size or 1
    try:
        return read_model(config, *asked, _SERVERS[server])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CumlaError(f"{what}no such file; {way}") from error
    except IsADirectoryError as error:
        raise CumlaError(f"{what}a folder, {error.filename}; {way}") from error
    except OSError as error:
        raise CumlaError(f"{what}a file that cannot be read: {error}; {way}") from error
    except (TypeError, ValueError) as error:
        raise CumlaError(f"{what}{error}; {way}") from error


def _model_rows(args: argparse.Namespace, model: Model, reason: str) -> Iterator[tuple[str, str]]:
    cache = args.kv_cache_dtype or "auto"
    page = args.block_size or model.kernels.get_preferred_block_size(16)
    yield from _of_model(model, cache, page)
    reasons = [*([reason] if reason else []), *model.refusals(cache, args.block_size)]
    if not model.windows and not model.by_blocks:
        reasons.append("layers: needs attention, got none")
    kernels: list[tuple[str, str]] = []
    if not reasons:
        try:
            kernels = [
                row
                for window in model.windows
                for row in _layer_rows(model, window, page, cache, bool(args.fp8_products))
            ]
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        yield "served", "no, leave out --attention-backend CUSTOM\n" + "\n".join(reasons)
        return
    untried = "".join(f"\nnot tried: {what}" for what in model.untried)
    yield "served", f"yes, with --attention-backend CUSTOM{untried}"
    yield from kernels
    if model.by_blocks:
        ours = "block_attention, block_scores, select_blocks"
        ours = "block_sparse_attention; vLLM's own chooses" if model.by_groups else ours
        yield f"{model.by_blocks} layers", f"blocks that an indexer chooses\n{ours}"
    if args.fp8_products and not any("fp8_products" in names for _, names in kernels):
        need = "dense MLA of 576 columns, an FP8 cache, a multiple of 64 heads on each GPU"
        yield "--fp8-products", f"has no effect: needs {need}"
    yield from _beside(model, cache)


def _of_model(model: Model, cache: str, page: int) -> Iterator[tuple[str, str]]:
    heads = f"{model.num_heads} heads of {model.head_size}"
    if not model.use_mla:
        heads = f"{model.num_heads} heads over {model.num_kv_heads} of {model.head_size}"
    sinks = ", sinks" if model.has_sink else ""
    yield "model", f"{model.kind}, {'MLA' if model.use_mla else 'no MLA'}, {model.dtype}"
    yield "each GPU", f"{heads}{sinks}; cache {cache}, pages of {page} tokens"


def _sglang_rows(args: argparse.Namespace, model: Model | None) -> Iterator[tuple[str, str]]:
    """Tell of SGLang, and of the model; the row `served` begins with yes or no."""
    from cumla.sglang import TESTED
    from cumla.sglang._models import refusals, ways

    reason = ""
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        yield "SGLang", "not installed here: versions are not checked"
    else:
        answer, reason = _judged("sglang", version, TESTED, "cumla")
        yield "SGLang", answer
        yield "plugin", _entry_point("sglang.srt.plugins", "SGLANG_PLUGINS")
    if model is None:
        return
    cache, page = args.kv_cache_dtype or "auto", args.block_size or 64
    yield from _of_model(model, cache, page)
    reasons = [*([reason] if reason else []), *refusals(model, cache)]
    kernels: list[tuple[str, str]] = []
    if not reasons:
        try:
            for window in model.windows:
                kernels += _layer_rows(model, window, page, cache, False, "SGLang")
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        yield "served", "no, leave out --attention-backend cumla\n" + "\n".join(reasons)
        return
    more = [*ways(model, page), *(f"not tried: {what}" for what in model.untried)]
    yield "served", "\n".join(["yes, with --attention-backend cumla", *more])
    yield from kernels
    if model.by_blocks:
        ours = "block_attention, block_scores, select_blocks"
        yield f"{model.by_blocks} layers", f"blocks that an indexer chooses\n{ours}"
    if model.topk:
        own = f"SGLang's own: it chooses pools of {model.pool} tokens"
        yield "indexer", own if model.pool > 1 else "paged_mqa_logits, mqa_logits, top_k"


def _beside(model: Model, cache: str) -> Iterator[tuple[str, str]]:
    """Return what else is served, and what is to be known about the cache."""
    from cumla.mla.shape import HEAD_DIM
    from cumla.vllm._models import FP8, PACKED

    is_sparse = bool(model.topk) and not model.is_v4
    if is_sparse and cache in FP8 and model.head_size == HEAD_DIM:
        yield "cache", f"one factor for all rows; {PACKED} has four in each row, and is preferred"
    if model.is_v4:
        yield "beside attention", "vLLM's own: its layers decide"
        return
    if is_sparse:
        own = "vLLM's own: it chooses pools of tokens"
        yield "indexer", own if model.pool > 1 else "paged_mqa_logits, mqa_logits, top_k"
    yield "drafts", "yes, in chains"
    among = "; the indexer's scores differ in their last bits" if is_sparse else ""
    among = "; not of layers that choose blocks" if model.by_blocks else among
    yield "batch invariance", f"yes, by VLLM_BATCH_INVARIANT=1{among}"
    shared = "yes; kernels then have the heads of all ranks that share a cache"
    if not is_sparse:
        shared += ", and requests one new token per step"
    elif model.has_sink or model.pool > 1:
        shared = f"no: the {'layers have sinks' if model.has_sink else 'indexer chooses pools'}"
    yield "decode context parallel", shared if model.use_mla else "no: for MLA alone"


def _layer_rows(
    model: Model,
    window: int | None,
    page: int,
    cache: str,
    fp8_products: bool,
    server: str = "vLLM",
) -> Iterator[tuple[str, str]]:
    """Name the kernels that attend in the layers of a window, by steps."""
    from cumla._choices import E4M3, Layers
    from cumla.mla.shape import E4M3_512, V4, VALUE_DIM
    from cumla.mla.shape import PACKED as V32
    from cumla.sglang._models import row_format
    from cumla.vllm._models import FP8, PACKED

    count = model.windows[window]
    stored = E4M3 if cache in FP8 else None
    layers = Layers(model.num_heads, page, model.dtype, stored, head_dim=model.head_size)
    if model.is_v4:
        layers = layers._replace(cache_dtype=None, topk=model.topk, cache_format=V4)
    elif model.topk:
        layers = layers._replace(topk=model.topk, cache_format=V32 if cache == PACKED else None)
        if cache in FP8 and model.head_size == VALUE_DIM:
            layers = layers._replace(cache_dtype=None, cache_format=E4M3_512)
        if server == "SGLang" and row_format(model, cache) is not None:
            layers = layers._replace(cache_dtype=None, cache_format=row_format(model, cache))
    elif model.use_mla:
        layers = layers._replace(fp8_products=fp8_products)
    else:
        layers = layers._replace(
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_size,
            window=None if window is None else window - 1,
        )
    what = f"full attention{model.chunks}" if window is None else f"a window of {window} tokens"
    what = f"sparse MLA, {model.topk} tokens of an indexer" if model.topk else what
    what = f"{what}, or all compressed ones, and a window" if model.is_v4 else what
    yield f"{count} layer{'s' * (count > 1)}", what
    gathered = layers._replace(cache_format=None).steps() if model.is_v4 else {}
    for step, names in layers.steps().items():
        is_theirs = model.use_mla and not model.topk and server == "vLLM"
        is_prefill = is_theirs and step.startswith("prefill")
        if model.is_v4 and step.startswith(("mixed", "prefill")):  # vLLM gathers rows of prefills
            names = [*(names if step.startswith("mixed") else ()), *gathered[step]]
        yield f"  {step}", "vLLM's own backend" if is_prefill else ", ".join(names)
    if model.topk and not model.is_v4:
        own = f"{server}'s own backend, where no prefill of the step is longer"
        yield f"  prefill up to {model.topk}", own
