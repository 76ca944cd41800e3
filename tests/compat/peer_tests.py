# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's and FlashMLA's tests of other libraries' functions, with cumla's modules for them.

    python tests/compat/peer_tests.py vllm-0.26.0.tar.gz [ARGUMENTS OF PYTEST]
    python tests/compat/peer_tests.py FlashMLA/tests [ARGUMENTS OF PYTEST]

The sdist of vLLM, which ``pip download --no-binary vllm`` gets, has tests of the functions of
FlashAttention-3, FlashInfer, FlashMLA and DeepGEMM that it calls. They are extracted into a
temporary folder and get cumla's functions; vLLM itself is not installed. On a GPU they run as they
are. Without one their tensors are on the CPU, and some sizes are smaller (`SMALLER`). The exit
status is 1 if all selected tests of a file are skipped or refused.

FlashMLA's tests are scripts: each case is a test here, timing is left out, and without a GPU the
cases are smaller (`MOST`). PEER_CASES is how many of a script's selected cases run, 0 for all;
they are selected by the fields of their parameters: ``-k 'h_q128 and d_qk576'``.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/kernels/attention"
FILES = ("flash_attn", "flashinfer", "flashmla", "flashmla_sparse", "deepgemm_attention")
HELPERS = "vllm/utils/deep_gemm.py"  # of which the tests use two functions of arithmetic
SMALLER = {  # on the CPU
    "flash_attn": (
        ("NUM_BLOCKS = [32768, 2048]", "NUM_BLOCKS = [512]"),
        ('"fa_version", [2, 3]', '"fa_version", [3]'),
    ),
    "flashinfer": (("NUM_BLOCKS = 32768", "NUM_BLOCKS = 512"),),
    "flashmla": (('"b", [128]', '"b", [3]'), ("[4096, 8192, 16384]", "[200, 700]")),
}
REFUSED = {"test_varlen_with_paged_kv": "q_dtype"}  # e4m3 queries of FlashAttention
ABSENT = ("test_fast_decode_plan_importable",)  # functions that cumla lacks
MOST = {"b": 3, "s_q": 3, "s_k": 700, "s_kv": 700, "extra_s_k": 700}  # FlashMLA's, on the CPU
UNTIMED = {"num_runs": 0, "test_performance": False, "benchmark": False}
OF_VLLM = (  # tests of vLLM's own classes
    "test_fast_plan_decode_matches_full_plan",
    "test_fast_plan_decode_warmup_uses_full_plan",
    "test_flashinfer_sparse_indices_cache",
    "test_deepseek_v4_prefill_chunk_planning_expands_for_short_sequences",
)


def extract(sdist: str, folder: Path, on_gpu: bool) -> None:
    """Write the test files, and a conftest.py that calls `stand_in`."""
    with tarfile.open(sdist) as archive:
        top = archive.getnames()[0].split("/")[0]

        def read(name: str) -> str:
            file = archive.extractfile(f"{top}/{name}")
            assert file is not None, name
            return file.read().decode()

        for name in FILES:
            text = read(f"{FOLDER}/test_{name}.py")
            if not on_gpu:
                for place in ('"cuda:0"', '"cuda"'):
                    text = text.replace(place, '"cpu"')
                text = text.replace(".cuda()", ".cpu()")
                for old, new in SMALLER.get(name, ()):
                    assert old in text, (name, old)
                    text = text.replace(old, new)
            (folder / f"test_{name}.py").write_text(text, "utf-8")
        (folder / "helpers.txt").write_text(read(HELPERS), "utf-8")
    (folder / "conftest.py").write_text(
        "from tests.compat.peer_tests import *\nstand_in(__file__)\n", "utf-8"
    )


def copy_scripts(source: str, folder: Path, on_gpu: bool) -> None:
    """Copy FlashMLA's tests; write a file of tests for each script, and a conftest.py."""
    scripts = folder / "scripts"
    shutil.copytree(source, scripts)
    for path in [] if on_gpu else scripts.rglob("*.py"):
        text = path.read_text("utf-8").replace('"cuda:0"', '"cpu"').replace(".cuda()", ".cpu()")
        path.write_text(text, "utf-8")
    for path in scripts.glob("test_flash_mla_*.py"):
        text = f"from tests.compat.peer_tests import *\ntest_case = make_test({path.stem!r})\n"
        (folder / f"{path.stem}_cases.py").write_text(text, "utf-8")
    (folder / "conftest.py").write_text(
        "from tests.compat.peer_tests import *\nlend_flash_mla(__file__)\n", "utf-8"
    )


def lend_flash_mla(conftest: str) -> None:
    """Let FlashMLA's scripts import cumla's functions."""
    import torch

    from cumla.compat import flash_mla

    sys.modules["flash_mla"] = flash_mla
    sys.path.insert(0, str(Path(conftest).with_name("scripts")))
    for name in ("rich.console", "rich.table"):  # for tables of times
        try:
            importlib.import_module(name)
        except ImportError:
            _add(name)
    if not torch.cuda.is_available():
        for name in ("synchronize", "empty_cache", "set_device", "manual_seed"):
            setattr(torch.cuda, name, lambda *_: None)
        torch.cuda.get_device_capability = lambda *_: (9, 0)


def make_test(script: str) -> Any:
    """Make a test of all cases of one of FlashMLA's scripts."""
    import torch

    module = importlib.import_module(script)
    tester = "run_test" if hasattr(module, "run_test") else "test_flash_mla"
    test_one = getattr(module, tester)
    cases = [dataclasses.replace(case, **_changes(case)) for case in _cases_of(module, tester)]

    @pytest.mark.parametrize("case", cases, ids=["-".join(_fields_of(case)) for case in cases])
    def test_case(case: Any) -> None:
        torch.set_default_device("cuda:0" if torch.cuda.is_available() else "cpu")
        torch.set_default_dtype(torch.bfloat16)
        result = test_one(case)
        assert result is None or getattr(result, "is_correct", result)

    return test_case


def _cases_of(module: ModuleType, tester: str) -> list[Any]:
    """List the cases that a script would test."""
    import torch

    if hasattr(module, "gen_testcase"):
        return [case.to_test_param() for case in module.gen_testcase()]
    cases: list[Any] = []

    def take(case: Any) -> bool:
        cases.append(case)
        return True

    (*_, last) = ast.parse(inspect.getsource(module)).body
    assert isinstance(last, ast.If)  # on __name__
    setattr(module, tester, take)
    if hasattr(module, "main"):
        module.main(torch.bfloat16)
    else:
        exec(compile(ast.Module(last.body, []), str(module.__file__), "exec"), vars(module))
    pytest_runtest_teardown()  # of what the script has set
    return cases


def _changes(case: Any) -> dict[str, Any]:
    """Tell what is changed of a case: nothing is timed, and sizes on the CPU are smaller."""
    import torch

    changes: dict[str, Any] = {}
    for name, value in vars(case).items():
        if dataclasses.is_dataclass(value):
            changes[name] = dataclasses.replace(value, **_changes(value))  # type: ignore[type-var]
        elif name in UNTIMED:
            changes[name] = UNTIMED[name]
        elif value and not torch.cuda.is_available():
            changes[name] = min(value, MOST.get(name, value))
    return changes


def _fields_of(case: Any) -> Iterator[str]:
    for name, value in vars(case).items():
        if dataclasses.is_dataclass(value):
            yield from _fields_of(value)
        elif value is True:
            yield name
        elif value not in (None, False, -1):
            yield f"{name}{value}"


class Platform:
    """vLLM's description of a Hopper GPU."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: name in ("is_cuda", "is_cuda_alike")

    def has_device_capability(self, number: int) -> bool:
        return number <= 90

    def get_device_capability(self) -> SimpleNamespace:
        return SimpleNamespace(major=9, minor=0)


def _add(name: str, **values: Any) -> None:
    """Make a module, and the packages that it is in."""
    above, _, leaf = name.rpartition(".")
    if above and above not in sys.modules:
        _add(above)
    made = sys.modules[name] = ModuleType(name)
    vars(made).update(values, __path__=[])
    if above:
        setattr(sys.modules[above], leaf, made)


def stand_in(conftest: str) -> None:
    """Put modules with cumla's functions in the places where the tests import them."""
    import numpy as np
    import torch

    from cumla.compat import deep_gemm, flash_mla, flashinfer, vllm_flash_attn

    def seed(number: int) -> None:
        for set_seed in (torch.manual_seed, random.seed, np.random.seed):
            set_seed(number)

    def functions(module: ModuleType, *names: str) -> dict[str, Any]:
        return {name: getattr(module, name) for name in names}

    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    def supported(*_: Any) -> tuple[bool, None]:
        return True, None

    def once(call: Any) -> float:  # in place of a benchmark
        call()
        return 1.0

    tree = ast.parse(Path(conftest).with_name("helpers.txt").read_text("utf-8"))
    helpers: dict[str, Any] = {"torch": torch}
    for node in tree.body:
        if getattr(node, "name", "") in ("calc_diff", "_ceil_to_ue8m0"):
            exec(compile(ast.Module([node], []), HELPERS, "exec"), helpers)
    if not torch.cuda.is_available():
        deep_gemm.set_num_sms(132)
        torch.accelerator.set_device_index = lambda _: None
    testing = SimpleNamespace(do_bench=once)
    _add("vllm.platforms", current_platform=Platform())
    _add("vllm.utils.torch_utils", set_random_seed=seed)
    _add("vllm.utils.math_utils", cdiv=cdiv)
    _add("vllm.utils.import_utils", has_deep_gemm=lambda: True)
    _add("vllm.triton_utils", triton=SimpleNamespace(cdiv=cdiv, testing=testing))
    _add(
        "vllm.vllm_flash_attn",
        **functions(vllm_flash_attn, "flash_attn_varlen_func"),
        is_fa_version_supported=lambda _: True,
        fa_version_unsupported_reason=lambda _: "",
    )
    names = ("flash_mla_with_kvcache", "get_mla_metadata", "flash_mla_sparse_fwd")
    _add(
        "vllm.v1.attention.ops.flashmla",
        **functions(flash_mla, *names, "FlashMLASchedMeta"),
        is_flashmla_dense_supported=supported,
        is_flashmla_sparse_supported=supported,
    )
    names = ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_num_sms")
    _add(
        "vllm.utils.deep_gemm",
        **functions(deep_gemm, *names, "get_paged_mqa_logits_metadata"),
        **{name: helpers[name] for name in ("calc_diff", "_ceil_to_ue8m0")},
    )
    sys.modules["flashinfer"] = flashinfer


@pytest.hookimpl(trylast=True)  # of those that -k selects
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark calls that cumla refuses and functions that it lacks; leave out vLLM's own code."""
    refused = pytest.mark.xfail(raises=NotImplementedError, strict=True)
    absent = pytest.mark.xfail(raises=ImportError, strict=True)
    items[:] = [item for item in items if item.originalname not in OF_VLLM]
    for item in items:
        if item.originalname in ABSENT:
            item.add_marker(absent)
        argument = REFUSED.get(item.originalname)
        if argument and item.callspec.params[argument] is not None:
            item.add_marker(refused)
    most = int(os.environ.get("PEER_CASES", "0"))
    for path in {item.path for item in items if item.originalname == "test_case"} if most else ():
        of_script = [item for item in items if item.path == path]
        left_out = set(of_script) - set(
            random.Random(0).sample(of_script, min(most, len(of_script)))
        )
        items[:] = [item for item in items if item not in left_out]


_passed: dict[str, bool] = {}  # whether a test of a file passed, by file


def pytest_runtest_logreport(report: Any) -> None:
    file = report.nodeid.partition("::")[0]
    passed = report.when == "call" and report.passed and not hasattr(report, "wasxfail")
    _passed[file] = _passed.get(file, False) or passed


def pytest_sessionfinish(session: Any) -> None:
    """Fail if a file proves nothing: none of its tests passed."""
    if not all(_passed.values()):
        session.exitstatus = session.exitstatus or 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for file, passed in _passed.items():
        if not passed:
            terminalreporter.write_line(f"{file}: none of the selected tests passed")


def pytest_runtest_teardown() -> None:
    import torch

    torch.set_default_device("cpu")
    torch.set_default_dtype(torch.float32)


def main(source: str, *arguments: str) -> int:
    """Run the tests; return pytest's exit status."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        write = copy_scripts if Path(source).is_dir() else extract
        write(source, Path(folder), torch.cuda.is_available())
        places = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [str(path) for path in sorted(Path(folder).glob("test_*.py"))]
        environment = os.environ | {"PYTHONPATH": places}
        return subprocess.run([*command, *arguments], cwd=folder, env=environment).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(os.path.abspath(sys.argv[1]), *sys.argv[2:]))
