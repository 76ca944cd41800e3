# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import pytest

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
