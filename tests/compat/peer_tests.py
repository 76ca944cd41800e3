# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's own tests of other libraries' functions, with cumla's compatibility modules.

    python tests/compat/peer_tests.py vllm-0.26.0.tar.gz [ARGUMENTS OF PYTEST]

The sdist of vLLM, which ``pip download --no-binary vllm`` gets, has tests of the functions of
FlashAttention-3, FlashInfer, FlashMLA and DeepGEMM that it calls. They are extracted into a
temporary folder and get cumla's functions; vLLM itself is not installed. On a GPU they run as they
are. Without one their tensors are on the CPU, and some sizes are smaller (`SMALLER`). The exit
status is 1 if all selected tests of a file are skipped or refused.
"""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark calls that cumla refuses and functions that it lacks; leave out vLLM's own code."""
    import pytest

    refused = pytest.mark.xfail(raises=NotImplementedError, strict=True)
    absent = pytest.mark.xfail(raises=ImportError, strict=True)
    items[:] = [item for item in items if item.originalname not in OF_VLLM]
    for item in items:
        if item.originalname in ABSENT:
            item.add_marker(absent)
        argument = REFUSED.get(item.originalname)
        if argument and item.callspec.params[argument] is not None:
            item.add_marker(refused)


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


def main(sdist: str, *arguments: str) -> int:
    """Run the tests; return pytest's exit status."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        extract(sdist, Path(folder), torch.cuda.is_available())
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", folder, "-q", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.run([*command, *arguments], cwd=folder, env=environment).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(os.path.abspath(sys.argv[1]), *sys.argv[2:]))
