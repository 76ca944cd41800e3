# SPDX-License-Identifier: Apache-2.0
"""Errors cross processes: what `pickle` and `copy` make of them says the same."""

from __future__ import annotations

import copy
import pickle
import re
import tomllib
from pathlib import Path

import pytest

from cumla import errors
from cumla.core.frameworks import Traced

ERRORS = (
    errors.CumlaError("what"),
    errors.UnsupportedDeviceError("what"),
    errors.CompilationError("kernel x"),
    errors.CompilationError("kernel x", "log"),
    errors.NotPreparedError("what"),
    errors.MissingDependencyError("CuPy is not installed"),
    errors.MissingDependencyError("torch", "pip install torch"),
    Traced("q: needs memory", "cumla.jax"),
)


def test_every_error_is_here() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    assert {k for k in kinds if issubclass(k, errors.CumlaError)} <= set(map(type, ERRORS))


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_an_error_comes_back(error, again) -> None:
    other = again(again(error))
    assert type(other) is type(error)
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


def test_the_install_commands_name_extras_that_there_are() -> None:
    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    extras = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = re.findall(r'pip install "(cumla|\.)\[(\w+)\]"', str(errors.MissingDependencyError("")))
    assert named == [(what, extra) for what in ("cumla", ".") for extra in ("cu12", "cu13")]
    assert {extra for _, extra in named} <= set(extras)
