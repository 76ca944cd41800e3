# SPDX-License-Identifier: Apache-2.0
"""The caller's names of arguments in messages."""

from __future__ import annotations

import numpy as np
import pytest

import cumla
from cumla.core.names import Naming, arg
from cumla.core.spec import SPECS
from tests.calls import OPERATIONS, Operation, arrays_of, every_operation, refused, with_array


def test_names_and_parts() -> None:
    assert arg("q") == "q"
    with Naming({"q": "queries", "kv_cache[1]": "k_pe"}):
        assert arg("q") == "queries"
        assert arg("q[1]") == "queries[1]"
        assert arg("kv_cache[1]") == "k_pe"
        assert arg("kv_cache[0]") == "kv_cache[0]"
        assert arg("q_out") == "q_out"
    assert arg("q") == "q"


def test_callers_of_callers() -> None:
    """The inner names lead to those of the block outside."""
    with Naming({"index_q": "query"}):
        with Naming({"q": "index_q"}):
            assert arg("q") == "query"
        assert arg("q") == "q"


def test_an_error_ends_the_block() -> None:
    with pytest.raises(KeyError), Naming({"q": "queries"}):
        raise KeyError
    assert arg("q") == "q"


def test_messages() -> None:
    """What is said of an argument, and of others beside it, has the caller's names."""
    given = OPERATIONS["mla_decode"].make()
    names = {"q": "query", "kv_cache": "ckv_cache", "kv_lens": "seq_lens"}
    with Naming(names):
        with refused(TypeError, "ckv_cache: needs query's dtype bfloat16"):
            cumla.mla_decode(**given | {"kv_cache": given["kv_cache"].astype(np.float32)})
        with refused(ValueError, "seq_lens: needs shape (batch,) with batch 2, got (1,)"):
            cumla.mla_decode(**given | {"kv_lens": given["kv_lens"][:1]})
        with refused(TypeError, "seq_lens: needs an array of CuPy"):
            cumla.mla_decode(**given | {"kv_lens": [1, 2]})


@every_operation
def test_all_messages(operation: Operation) -> None:
    """Whatever is wrong has the caller's name."""
    spec, given = SPECS[operation.function.__name__], operation.make() | operation.outputs()
    names = {a.name: f"their_{a.name}" for a in spec.arguments}
    wrong = [{option.name: object()} for option in spec.options if option.name != "tie_break"]
    for name, array in arrays_of(given):
        for other in ("text", array.astype(np.complex64), array[..., None, None, None]):
            wrong.append(with_array(given, name, other))
    for changes in wrong:
        with Naming(names), pytest.raises((TypeError, ValueError), match=r"^their_"):
            operation.function(**given | changes)
