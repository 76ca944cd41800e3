# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.core.check_mode import check_mode, environment_flag
from cumla.errors import CumlaError

ON = ("1", "true", "TRUE", "Yes", "on", " 1 ")
OFF = ("", "0", "false", "False", "NO", "off")


@pytest.mark.parametrize(
    ("value", "expected"), [*((v, True) for v in ON), *((v, False) for v in OFF)]
)
def test_flags(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("CUMLA_CHECK", value)
    assert check_mode() is expected
    assert environment_flag("CUMLA_CHECK") is expected


@pytest.mark.parametrize("value", ["2", "maybe", "-1", "y", "enable"])
def test_what_is_no_flag(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUMLA_CHECK", value)
    with pytest.raises(CumlaError, match=f"^CUMLA_CHECK: needs 1, .*, got '{value}'; unset"):
        check_mode()


def test_it_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUMLA_CHECK", raising=False)
    assert check_mode() is False
    os.environ["CUMLA_CHECK"] = "1"
    assert check_mode() is True
    del os.environ["CUMLA_CHECK"]
    assert check_mode() is False
    assert environment_flag("CUMLA_CHECK") is False


def test_another_mapping_in_place_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"CUMLA_CHECK": "on"})
    assert check_mode() is True
    monkeypatch.setattr(os, "environ", {})
    assert check_mode() is False


# --- windows -------------------------------------------------------------------------------------


def windowed(form: str, gone: int, window: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Queries 61 to 63 of 64 tokens, and few of a second request; some first pages are gone."""
    numbers = np.random.default_rng(0).standard_normal
    k, v = (numbers((11, 8, 2, 64)).astype(np.float32) for _ in range(2))
    pages = np.arange(8, dtype=np.int32)
    pages[:gone] = -1
    lengths: dict[str, Any] = {"kv_lens": np.array([64, 20], np.int32)}
    if form == "rows":
        q = numbers((2, 3, 4, 64)).astype(np.float32)
    else:
        q = numbers((4, 4, 64)).astype(np.float32)
        lengths["qo_indptr"] = np.array([0, 3, 4], np.int32)
    named = {"block_table": np.stack([pages, np.arange(8, dtype=np.int32)])}
    if form == "list":
        named = {"kv_indices": np.concatenate([pages, np.int32([8, 9, 10])])}
        lengths["kv_indptr"] = np.array([0, 8, 11], np.int32)
    return (q, k, v), {"window": window, **named, **lengths}


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("form", ["table", "list", "rows"])
@pytest.mark.parametrize(
    ("window", "gone"), [(13, 6), (14, 5), (0, 7), ((13, None), 6), ((200, None), 0), (None, 0)]
)
def test_pages_that_end_before_a_window_may_be_gone(
    monkeypatch: pytest.MonkeyPatch, window: Any, gone: int, form: str, is_planned: bool
) -> None:
    """Token 61 sees those from 61 - window, and with 13 the first of page 6."""

    def call(gone: int) -> Any:
        arrays, given = windowed(form, gone, window)
        if not is_planned:
            return cumla.attention(*arrays, **given).out
        lengths = {n: given.pop(n) for n in ("qo_indptr", "kv_indptr") if n in given}
        made_of = {n: array for n, array in lengths.items() if n == "qo_indptr"}
        plan = cumla.AttentionPlan.from_arrays(*arrays, **made_of, window=given.pop("window"))
        plan.update(given.pop("kv_lens"), **lengths)
        return plan.run(*arrays, **given).out

    expected = call(0)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    np.testing.assert_array_equal(call(gone), expected)
    message = rf"^\w+\[(0, )?{gone}\]: needs a page number from 0 to 10, got -1"
    with pytest.raises(ValueError, match=message):
        call(gone + 1)
