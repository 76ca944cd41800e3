# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla info``: what is installed here, what the GPUs are, what a server can serve."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

from cumla.cli.served import add_options, vllm_rows

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
)
_VARIABLES = ("CUMLA_CHECK", "CUMLA_CUBIN_DIR", "CUMLA_DEBUG", "CUMLA_VLLM_FP8_PRODUCTS")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``python -m cumla``."""
    parser = subparsers.add_parser(
        "info",
        help="show versions, GPUs, NVRTC and cache folders; with --vllm CONFIG what serves a model",
        description="Show versions, GPUs, NVRTC and cache folders. It fails only where --vllm "
        "asks about a model.",
    )
    add_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if vLLM's plugin would not serve the model that is asked about."""
    if args.vllm is not None:
        return _served(args)
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


def _served(args: argparse.Namespace) -> int:
    """Print whether vLLM's plugin would serve a model."""
    rows = {"cumla": _cumla(), "GPUs": _answer("GPUs", _gpus, {})}
    code = 0
    for title, answer in (*rows.items(), *vllm_rows(args)):
        _print(title, answer)
        if title == "served" and not answer.startswith("yes"):
            code = 1
    return code


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
    return f"{_version('cumla')} in {Path(__file__).resolve().parent.parent}"


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
    from cumla.launch.module import cache_dir

    folder = cache_dir()
    if not folder.is_dir():
        return f"{folder} (not there yet)"
    return f"{folder} ({sum(path.suffix == '.cubin' for path in folder.iterdir())} cubins)"


def _cubins() -> str:
    from cumla.launch import all_specs
    from cumla.launch.module import cubin_dir
    from cumla.launch.source import cubin_name, debug_build

    folder = cubin_dir()
    if folder is None:
        return "none (CUMLA_CUBIN_DIR is not set)"
    specs, debug = all_specs(), debug_build()
    found = sum((folder / cubin_name(spec, debug=debug)).is_file() for spec in specs)
    return f"{folder}: {found} of {len(specs)} kernels of this version"
