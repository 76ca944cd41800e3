# SPDX-License-Identifier: Apache-2.0
"""From a kernel's text to a function handle on one GPU, or to a cubin on a machine without one.

A kernel comes from a cubin in ``CUMLA_CUBIN_DIR`` or, if that is not set, in the wheel
cumla-cubins; or else from `cupy.RawModule`, which compiles with NVRTC and keeps a cache on disk.
CuPy adds the GPU's architecture, sm_90, to our sm_90a: NVRTC 12.9 and later make code for sm_90a of
the pair, earlier ones refuse it. There the same text is compiled through cuda.bindings, and the
cubin is kept in CuPy's cache folder under a name of ours.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from cumla.core._cupy import compile_in_memory, compiles_in_memory
from cumla.core._driver import driver, in_primary_context
from cumla.errors import CompilationError, CumlaError, MissingDependencyError, NotPreparedError
from cumla.launch.device import import_cupy, require_hopper
from cumla.launch.source import (
    ADDED_BY_CUPY,
    OPTIONS,
    KernelSpec,
    cubin_name,
    debug_build,
    error_excerpt,
    translation_unit,
)

if TYPE_CHECKING:
    from pathlib import Path  # 5 ms that no import of cumla needs

_log = logging.getLogger(__name__)

_FITTING = (
    "NVRTC 12.9 and 13.0 fit all kernels: pip install 'nvidia-cuda-nvrtc-cu12==12.9.*', or "
    "'nvidia-cuda-nvrtc==13.0.*' for CUDA 13"
)
# Shared memory of a block on compute capability 9.0, in bytes, static and dynamic together.
_SMEM_LIMIT = 227 * 1024


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel that is ready to be launched on one GPU."""

    handle: int  # the CUfunction
    spec: KernelSpec
    device: int  # CUDA ordinal
    owner: object  # keeps the module loaded


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What came out of a compilation without a GPU; sizes are in bytes."""

    cubin: bytes  # the ELF image for sm_90a
    log: str  # all that NVRTC and ptxas had to say
    registers: int  # of a thread at launch, before any setmaxnreg
    smem: int  # of a block, static and dynamic together
    stack: int  # frame of a thread
    spills: int  # stores and loads
    remarks: tuple[str, ...]  # C75xx of ptxas: wgmma serialised, setmaxnreg ignored, waits injected


_loaded: dict[tuple[KernelSpec, int], LoadedKernel] = {}
_loading = threading.Lock()


def load(spec: KernelSpec, device: int, *, capturing: Callable[[], bool]) -> LoadedKernel:
    """Return the kernel on a GPU, its shared-memory limit set; compile and load it the first time.

    `capturing` tells whether the stream of the call is being captured. It is asked only when the
    kernel is cold, and then a capture raises `NotPreparedError`.

    Raise `CumlaError` if others may write to the folder of ``CUMLA_CUBIN_DIR``,
    `UnsupportedDeviceError` if the GPU is not of compute capability 9.0, `CompilationError` if the
    kernel does not compile, and `MissingDependencyError` if CuPy or NVRTC is missing.
    """
    kernel = _loaded.get((spec, device))
    return _load_cold(spec, device, capturing) if kernel is None else kernel


def _load_cold(spec: KernelSpec, device: int, capturing: Callable[[], bool]) -> LoadedKernel:
    if capturing():
        raise NotPreparedError(
            f"kernel {spec.entry} is not loaded on device {device}, and nothing can be compiled or "
            f"loaded while a stream is being captured; call cumla.prepare(...) before the capture, "
            f"with the plan or the function of cumla that is captured"
        )
    with _loading:
        kernel = _loaded.get((spec, device))
        if kernel is None:
            require_hopper(device)
            cupy = import_cupy()
            cuda = driver()
            # Relaxed: loading would break a capture in the global mode that another thread makes.
            with in_primary_context(cuda, device), cupy.cuda.Device(device), cuda.relaxed_capture():
                kernel = _ready(spec, device, _find_or_compile(cupy, spec, debug=debug_build()))
            _loaded[spec, device] = kernel
    return kernel


def _ready(spec: KernelSpec, device: int, function: Any) -> LoadedKernel:
    """Set the shared-memory limit of a CuPy `RawKernel` and wrap it."""
    if spec.smem_bytes:
        function.max_dynamic_shared_size_bytes = spec.smem_bytes
    if function.local_size_bytes and not debug_build():
        _log.warning(
            "kernel %s uses %d bytes of local memory a thread, which makes it slow: the NVRTC that "
            "compiled it did not fit it into registers; %s",
            spec.entry,
            function.local_size_bytes,
            _FITTING,
        )
    return LoadedKernel(handle=function.kernel.ptr, spec=spec, device=device, owner=function)


def _find_or_compile(cupy: Any, spec: KernelSpec, *, debug: bool) -> Any:
    """Return the kernel as a CuPy `RawKernel` on the current device."""
    folder = cubin_dir()
    if folder is not None:
        path = folder / cubin_name(spec, debug=debug)
        _refuse_if_shared(path)
        function = _load_cubin(cupy, spec, path)
        if function is not None:
            return function
        state = "was refused by the driver" if path.exists() else "is not there"
        _log.warning(
            "CUMLA_CUBIN_DIR: %s %s, so kernel %s is compiled now; write the folder anew with "
            "`python -m cumla compile --output %s`",
            path.name,
            state,
            spec.entry,
            folder,
        )
    elif not debug and (installed := installed_cubins()) is not None:
        function = _load_cubin(cupy, spec, installed / cubin_name(spec))
        if function is not None:
            return function
        _log.warning(
            "cumla-cubins: kernel %s of these sources is not in %s, or the driver refused it, so "
            "it is compiled now; install the cumla-cubins of this version of cumla",
            spec.entry,
            installed,
        )
    if not compiles_in_memory() and (problem := why_cache_is_shared()) is not None:
        compile_in_memory(problem)
    if compiles_with_cupy(cupy_nvrtc_version()):
        return _compile_with_cupy(cupy, spec, debug=debug)
    return _compile_beside_cupy(cupy, spec, debug=debug)


def compiles_with_cupy(nvrtc: tuple[int, int]) -> bool:
    """Tell whether an NVRTC takes our ``-arch=sm_90a`` and CuPy's ``-arch=sm_90`` side by side."""
    return nvrtc >= (12, 9)


def _load_cubin(cupy: Any, spec: KernelSpec, path: Path) -> Any | None:
    """Load one kernel from a cubin; None if there is no such file or the driver refuses it."""
    if not os.path.exists(path):  # unlike Path.exists, False where we may not look
        return None
    try:
        return _function_of_cubin(cupy, spec, path)
    except cupy.cuda.driver.CUDADriverError as error:
        _log.debug("%s: %s", path, error)
        return None


def _function_of_cubin(cupy: Any, spec: KernelSpec, path: Path) -> Any:
    function = cupy.RawModule(path=str(path)).get_function(spec.entry)
    _ = function.kernel  # what CuPy puts off until it is first looked at: reading the file
    return function


def _compile_with_cupy(cupy: Any, spec: KernelSpec, *, debug: bool) -> Any:
    text = translation_unit(spec, debug=debug)
    options = tuple(option for option in OPTIONS if option not in ADDED_BY_CUPY)

    def compiled() -> Any:
        function = cupy.RawModule(code=text, options=options).get_function(spec.entry)
        _ = function.kernel
        return function

    try:
        try:
            return compiled()
        except OSError as error:
            compile_in_memory(error)
            return compiled()
    except cupy.cuda.compiler.CompileException as error:
        raise _failure(spec, text, str(error)) from error


def _compile_beside_cupy(cupy: Any, spec: KernelSpec, *, debug: bool) -> Any:
    """Compile for an NVRTC that refuses CuPy's options; the cubin goes to CuPy's cache folder."""
    version = "nvrtc{}.{}".format(*bindings_nvrtc_version())
    path = cache_dir() / f"cumla-{version}-{cubin_name(spec, debug=debug)}"
    function = None if compiles_in_memory() else _load_cubin(cupy, spec, path)
    if function is not None:
        return function
    cubin, _ = _compile(spec, translation_unit(spec, debug=debug), OPTIONS)
    if not compiles_in_memory():
        try:
            write_whole(path, cubin)
            return _function_of_cubin(cupy, spec, path)
        except OSError as error:
            compile_in_memory(error)
    return _function_through_temporary_file(cupy, spec, cubin)


def _function_through_temporary_file(cupy: Any, spec: KernelSpec, cubin: bytes) -> Any:
    import tempfile
    from pathlib import Path

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _function_of_cubin(cupy, spec, Path(file.name))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that other processes may be reading or writing: all of it, or none."""
    # Whatever the umask is, nobody else may write there: `cubin_dir` would refuse the folder.
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    # Not tempfile: its files are readable by their owner alone, and a container image that root
    # builds is run by others.
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            file.write(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def cache_dir() -> Path:
    """Return the folder in which CuPy keeps compiled kernels (``CUPY_CACHE_DIR``)."""
    from pathlib import Path

    # expanduser, as in CuPy: Path.home() fails for a user without a home.
    return Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))


def cubin_dir() -> Path | None:
    """Return the folder of kernels compiled ahead of time (``CUMLA_CUBIN_DIR``), or None.

    Raise `CumlaError` if others than this user and root may write to it.
    """
    from pathlib import Path

    folder = os.environ.get("CUMLA_CUBIN_DIR")
    if not folder:
        return None
    _refuse_if_shared(folder)
    return Path(folder)


def installed_cubins() -> Path | None:
    """Return the folder of the installed package cumla-cubins, or None; nothing is imported.

    It may belong to anybody: whoever can write there can write to cumla as well.
    """
    from importlib.util import find_spec
    from pathlib import Path

    found = find_spec("cumla_cubins")
    return None if found is None or found.origin is None else Path(found.origin).parent


def _refuse_if_shared(path: str | Path) -> None:
    """Refuse a folder of cubins, or one in it, that somebody else may write to."""
    problem = why_shared(path)
    if problem is not None:
        raise CumlaError(f"CUMLA_CUBIN_DIR: {problem}")


def why_cache_is_shared() -> str | None:
    """Say why nothing is loaded from CuPy's cache folder, nor kept there; None if it is.

    The group may write there: CuPy makes the folder as the umask says. Its files are looked at once
    a process: nobody else can add one later, unless the folder itself is shared.
    """
    folder = str(cache_dir())
    why = why_shared(folder, 0o002)
    if why is None:
        with suppress(OSError):  # not there, or it may be read but not listed
            why = _why_files_are_shared(folder)
    return why


@cache
def _why_files_are_shared(folder: str) -> str | None:
    paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    return next((why for path in paths if (why := why_shared(path, 0o002)) is not None), None)


def why_shared(path: str | Path, others: int = 0o022) -> str | None:
    """Say why cubins are not loaded from a folder or file; None if they are, or it is not there.

    `others` are the bits of a mode with which somebody else may write there.
    """
    try:
        found = os.stat(path)
    except OSError:  # nothing is loaded from there
        return None
    if os.name != "posix":
        return None
    is_ours = found.st_uid in (0, os.geteuid())
    if is_ours and not found.st_mode & others:
        return None
    mode = f"mode {found.st_mode & 0o777:03o}"
    way = f"`chmod go-w {path}`" if is_ours else "a copy of what you trust, in a folder of your own"
    return (
        f"needs a folder and files that nobody but you and root may write to, got {path} of user "
        f"{found.st_uid} with {mode}: whoever may write there chooses the code that runs on the "
        f"GPU; make it yours, e.g. with {way}"
    )


def cupy_nvrtc_version() -> tuple[int, int]:
    """Return the version of the NVRTC that CuPy found.

    Raise `MissingDependencyError` if CuPy is missing, or found no NVRTC.
    """
    nvrtc = import_cupy().cuda.nvrtc
    return _version_of("CuPy", nvrtc.getVersion)


def bindings_nvrtc_version() -> tuple[int, int]:
    """Return the version of the NVRTC that cuda.bindings found.

    Raise `MissingDependencyError` if cuda.bindings is missing, or found no NVRTC.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MissingDependencyError(
            f"cuda.bindings, which compiles the kernels here, cannot be imported ({error})"
        ) from error
    return _version_of("cuda.bindings", nvrtc.nvrtcVersion)


def _version_of(finder: str, version: Callable[[], tuple[int, ...]]) -> tuple[int, int]:
    try:
        *_, major, minor = version()
    except (RuntimeError, ImportError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise MissingDependencyError(f"{finder} found no NVRTC ({reason})") from error
    return major, minor


def compile_to_cubin(spec: KernelSpec, *, debug: bool = False) -> CompiledKernel:
    """Compile a kernel for sm_90a; needs NVRTC and no GPU.

    Raise `CompilationError` if the kernel does not compile, or if it spills registers, has a stack
    frame, asks for more shared memory than a block can have, or draws one of the C75xx remarks of
    ptxas; the debug build is held to no such budget. Raise `MissingDependencyError` if NVRTC or
    cuda.bindings is missing.
    """
    text = translation_unit(spec, debug=debug)
    options = (*OPTIONS, "--ptxas-options=-v")
    cubin, log = _compile(spec, text, options)
    if not _USED.search(log):  # from the driver's cache, which keeps no report of ptxas
        cubin, log = _compile(spec, text, (*options, "--no-cache"))
    kernel = _read_resources(spec, cubin, log)
    problems = _over_budget(kernel)
    if problems and not debug:
        major, minor = bindings_nvrtc_version()
        raise CompilationError(
            f"kernel {spec.entry} compiles, but with NVRTC {major}.{minor} {'; '.join(problems)}; "
            f"{_FITTING}",
            log,
        )
    return kernel


_USED = re.compile(r"Used (\d+) registers(.*)")
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REMARK = re.compile(r"^.*\(C75\d\d\).*$", re.MULTILINE)


def _read_resources(spec: KernelSpec, cubin: bytes, log: str) -> CompiledKernel:
    """Read what ``ptxas -v`` wrote; device functions that are called have frames of their own."""
    used = _USED.search(log)
    frames = _FRAME.findall(log)
    if used is None or not frames:
        raise CompilationError(
            f"kernel {spec.entry} compiles, but NVRTC does not say what it uses", log
        )
    static = _STATIC_SMEM.search(used[2])
    return CompiledKernel(
        cubin=cubin,
        log=log,
        registers=int(used[1]),
        smem=spec.smem_bytes + (int(static[1]) if static else 0),
        stack=max(int(stack) for stack, _, _ in frames),
        spills=sum(int(stores) + int(loads) for _, stores, loads in frames),
        remarks=tuple(line.strip() for line in _REMARK.findall(log)),
    )


def _over_budget(kernel: CompiledKernel) -> list[str]:
    problems = []
    if kernel.spills > 64:
        problems.append(f"it spills {kernel.spills} bytes ({kernel.registers} registers)")
    if kernel.stack > 16:
        problems.append(f"it has a stack frame of {kernel.stack} bytes")
    if kernel.smem > _SMEM_LIMIT:
        problems.append(f"it needs {kernel.smem} bytes of shared memory, of {_SMEM_LIMIT}")
    if kernel.remarks:
        problems.append(f"ptxas remarks: {kernel.remarks[0]}")
    return problems


def _compile(spec: KernelSpec, text: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """Run NVRTC through cuda.bindings; return the cubin and the log."""
    bindings_nvrtc_version()
    from cuda.bindings import nvrtc

    def succeed(result: Any, *values: Any) -> Any:
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise _failure(spec, text, f"{result.name}\n{read_log()}")
        return values[0] if values else None

    def read_log() -> str:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        return log.rstrip(b"\0").decode(errors="replace")

    _, program = nvrtc.nvrtcCreateProgram(text.encode(), f"{spec.entry}.cu".encode(), 0, [], [])
    try:
        encoded = [option.encode() for option in options]
        succeed(*nvrtc.nvrtcCompileProgram(program, len(encoded), encoded))
        cubin = bytearray(succeed(*nvrtc.nvrtcGetCUBINSize(program)))
        succeed(*nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin), read_log()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _failure(spec: KernelSpec, text: str, log: str) -> CompilationError:
    excerpt = error_excerpt(text, log)
    return CompilationError(
        f"kernel {spec.entry} ({spec.path}) does not compile",
        f"{log.rstrip()}\n{excerpt}" if excerpt else log.rstrip(),
    )
