# SPDX-License-Identifier: Apache-2.0
"""Which tests run no kernels, while those that they may launch are proven on a GPU."""

from __future__ import annotations

import pytest

import tests.emulator
from tests import selection
from tests.emulator import ALWAYS, is_left_out

MASKED, LISTS, STEP, OTHERS = (
    "tests/launch/mha/test_attention_masked.py::test_grid[chunks-1]",
    "tests/launch/sparse/test_mla_sparse.py::test_lists[1]",
    "tests/blocks/test_step.py::test_step",
    "tests/compat/test_flash_attn.py::test_some_queries_on_the_emulated_gpu",
)


@pytest.mark.parametrize(
    ("changed", "emulated"),
    [
        ("", ()),
        ("mask_rows", (MASKED, STEP, OTHERS)),  # of the family of both
        ("schedule", (MASKED, STEP, OTHERS)),  # launched by all families; LISTS names its kernel
        ("mla_sparse", (LISTS, STEP, OTHERS)),  # of the family of top_k, which selects blocks
        ("block_scores", (STEP, OTHERS)),
    ],
)
def test_tests_of_a_changed_kernel_emulate(
    changed: str, emulated: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "exhaustive", False)
    monkeypatch.setattr(tests.emulator, "passed_on_a_gpu", lambda stem: stem != changed)
    found = [test for test in (MASKED, LISTS, STEP, OTHERS) if not is_left_out(test)]
    assert found == list(emulated)
    assert not any(map(is_left_out, ALWAYS))
