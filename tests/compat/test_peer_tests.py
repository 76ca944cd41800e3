# SPDX-License-Identifier: Apache-2.0
"""peer_tests.py fails where vLLM's tests prove nothing."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tests.compat import peer_tests

PASSES = "def test_one(): pass\n"
SKIPS = "import pytest\n@pytest.mark.skip\ndef test_one(): pass\n"
REFUSES = "import pytest\n@pytest.mark.xfail\ndef test_one(): assert False\n"

HELPERS = "def calc_diff(): pass\ndef _ceil_to_ue8m0(): pass\n"


def sdist(path: Path, texts: dict[str, str]) -> str:
    """An sdist of vLLM with these tests, each with the text that `SMALLER` replaces."""
    files = {peer_tests.HELPERS: HELPERS}
    for name in peer_tests.FILES:
        old = "".join(f"# {old}\n" for old, _ in peer_tests.SMALLER.get(name, ()))
        files[f"{peer_tests.FOLDER}/test_{name}.py"] = old + texts.get(name, PASSES)
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"vllm-0/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return str(path)


@pytest.mark.parametrize(
    ("texts", "silent"),
    [
        ({}, []),
        (dict.fromkeys(peer_tests.FILES, SKIPS), list(peer_tests.FILES)),
        (
            {
                "flashmla": SKIPS,
                "flashinfer": SKIPS + PASSES.replace("one", "two"),
                "deepgemm_attention": REFUSES,
            },
            ["flashmla", "deepgemm_attention"],
        ),
    ],
)
def test_a_file_without_a_passing_test_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], texts: dict[str, str], silent: list[str]
) -> None:
    pytest.importorskip("torch")
    status = peer_tests.main(sdist(tmp_path / "vllm.tar.gz", texts))
    told = capfd.readouterr().out
    assert status == bool(silent), told
    for name in peer_tests.FILES:
        line = f"test_{name}.py: none of the selected tests passed"
        assert (line in told) == (name in silent)


def test_a_failure_stays_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    path = sdist(tmp_path / "vllm.tar.gz", {"flashmla": "def test_one(): assert False\n"})
    assert peer_tests.main(path, "-k", "test_one") == 1
    assert "1 failed, 4 passed" in capfd.readouterr().out
