# SPDX-License-Identifier: Apache-2.0
"""cumla inside transformations of JAX where the layout of XLA's calls is not known."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("jax.experimental.buffer_callback", reason="needs JAX 0.6.1 or later")

import cumla.jax  # noqa: E402
from cumla.jax import call, execute, fallback, handler  # noqa: E402
from tests.bindings.test_jax import (  # noqa: E402
    DECODE,
    IN_PLACE,
    assert_same,
    check_two_members,
    decoding,
    eager,
    layers_of,
    of_jax,
    python,
)
from tests.bindings.xla_frame import Xla  # noqa: E402
from tests.calls import (  # noqa: E402
    OPERATIONS,
    Operation,
    Planned,
    every_operation,
    every_plan,
    refused,
)

UNKNOWN = "structs of [160, 40, 40, 40, 36] bytes"


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA has shown other sizes; the handler must not be called."""

    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(handler, "_unknown", [UNKNOWN])
    monkeypatch.setattr(jax.ffi, "ffi_call", fail)
    fallback._warn.cache_clear()
    call._custom_call.cache_clear()


@pytest.mark.usefixtures("unknown")
@every_operation
def test_jit_equals_the_eager_call(operation: Operation) -> None:
    """As with the handler, to the bit."""
    function, arrays = of_jax(operation)
    assert_same(operation, jax.jit(function)(**arrays), eager(operation))
    for one, other in zip(
        jax.tree.leaves(arrays), jax.tree.leaves(of_jax(operation)[1]), strict=True
    ):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()  # nothing was donated


@pytest.mark.usefixtures("unknown")
@every_plan
def test_a_plan_serves_the_layers_of_a_step(planned: Planned) -> None:
    operation = OPERATIONS[planned.operation]
    step, arrays = layers_of(planned, 2)
    for result in step(arrays):
        assert_same(operation, result, eager(operation))


@pytest.mark.usefixtures("unknown")
def test_a_plan_goes_from_program_to_program() -> None:
    arrays = of_jax(DECODE)[1]
    lengths = arrays.pop("kv_lens")
    plan = jax.jit(lambda p, lens: p.update(lens))(cumla.jax.MLADecodePlan(2, 2, 16), lengths)
    for _ in range(2):
        result, plan = jax.jit(lambda p: p.run(**arrays))(plan)
        assert_same(DECODE, result, eager(DECODE))


def test_scan_writes_to_a_donated_cache_in_place(request: pytest.FixtureRequest) -> None:
    """With the bits of the handler."""
    loop, given = decoding(3)
    expected = jax.device_get(jax.jit(loop)(*given))
    request.getfixturevalue("unknown")
    cache, *rest = given
    mine = jax.numpy.array(cache, copy=True)
    place = mine.unsafe_buffer_pointer()
    got = jax.jit(lambda *arrays: loop(*arrays), donate_argnums=0)(mine, *rest)
    assert got[0][0].unsafe_buffer_pointer() == place and mine.is_deleted()
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == other.tobytes()


@pytest.mark.usefixtures("unknown")
def test_outside_of_jit_and_under_vmap() -> None:
    operation = IN_PLACE["append_indexer_cache"]
    function, arrays = of_jax(operation)
    assert_same(operation, function(**arrays), eager(operation))
    check_two_members(operation)


@pytest.mark.usefixtures("unknown")
def test_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """At the first trace; it says what is known, what is used instead, and what that costs."""
    with caplog.at_level(logging.WARNING, "cumla"):
        for operation in (DECODE, OPERATIONS["quantize_fp8"]):
            function, arrays = of_jax(operation)
            jax.eval_shape(function, **arrays)
    (record,) = caplog.records
    for part in (
        f"JAX {jax.__version__} calls handlers in a way that cumla.jax does not know ({UNKNOWN};",
        "0.1 and later 0.x, of JAX 0.5 to 0.11",
        "jax.experimental.buffer_callback instead",
        "without command buffers",
    ):
        assert part in record.getMessage()


def test_no_warning_if_the_layout_is_known(caplog: pytest.LogCaptureFixture) -> None:
    fallback._warn.cache_clear()
    function, arrays = of_jax(DECODE)
    with caplog.at_level(logging.WARNING, "cumla"):
        jax.eval_shape(function, **arrays)
    assert not caplog.records and handler.unknown_layout() == ""


@pytest.mark.usefixtures("unknown")
def test_a_jax_without_callbacks_on_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while tracing, with the versions."""
    monkeypatch.setitem(sys.modules, "jax.experimental.buffer_callback", None)
    function, arrays = of_jax(DECODE)
    with refused(
        cumla.CumlaError,
        f"JAX {jax.__version__} calls handlers in a way that cumla.jax does not know ... has no "
        "jax.experimental.buffer_callback ... (JAX 0.6.1); use a JAX from 0.5 to 0.11, or call",
    ):
        jax.eval_shape(function, **arrays)


@pytest.mark.usefixtures("unknown")
def test_checks_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    function, arrays = of_jax(DECODE)
    with refused(TypeError, "kv_lens: needs int32, got float32; convert"):
        jax.eval_shape(function, **arrays | {"kv_lens": jax.numpy.zeros(2)})
    with refused(TypeError, "cumla has no gradients"):
        jax.grad(lambda q: function(**arrays | {"q": q}).lse.sum())(arrays["q"])
    monkeypatch.setenv("CUMLA_CHECK", "1")
    arrays["block_table"] = arrays["block_table"] + 1000
    with pytest.raises(Exception, match=r"ValueError: block_table\[0, 0\]: needs a page number"):
        jax.block_until_ready(jax.jit(function)(**arrays))


@pytest.mark.usefixtures("unknown")
def test_errors_that_cannot_be_shown_do_not_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a \udc80 b")

    monkeypatch.setattr(fallback, "on_cpu", fail)
    function, arrays = of_jax(DECODE)
    with pytest.raises(Exception, match=r"CumlaError: ValueError: a \? b"):
        jax.block_until_ready(jax.jit(function)(**arrays))


@pytest.mark.usefixtures("unknown")
def test_eager_calls_do_without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that JAX would run compiled; DLPack takes less than a callback on buffers."""
    place: Any = SimpleNamespace(platform="gpu", local_hardware_id=0, memory_kind="device")
    place.device_set = (place,)
    monkeypatch.setattr(call, "gpu", lambda: 0)
    monkeypatch.setattr(call, "_places", {})
    assert call._place(place) == (place, None)
    monkeypatch.setattr(handler, "_unknown", [])
    assert call._place(place) == (place, place)


# --- what XLA and jaxlib show ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, ""),
        ({"frame_bytes": 160}, "structs of [160, 40, 40, 48, 36] bytes"),
        ({"inputs_bytes": 32}, "structs of [168, 32, 40, 48, 36] bytes"),
        ({"metadata_bytes": 32}, "structs of [168, 40, 40, 48, 32] bytes"),
        ({"table_bytes": 184}, "major version 0, a table of 184 bytes"),
        ({"major": 1}, "major version 1, a table of 200 bytes"),
        ({"frame_bytes": 176, "metadata_bytes": 48}, ""),  # longer structs: later minor versions
        ({"has_table": False}, ""),
    ],
    ids=str,
)
def test_sizes_are_compared_when_xla_asks_for_the_metadata(
    change: dict[str, Any], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which it does when a backend starts; it is answered in any case."""
    monkeypatch.setattr(handler, "_unknown", [])
    assert Xla(execute.on_gpu).ask(**change) == (0, 1, 1)
    assert handler.unknown_layout() == found


OTHER_MAJOR_VERSION = """
import logging, sys
import jax, numpy as np
from jax._src import xla_bridge
jax.ffi.include_dir = lambda: sys.argv[1]
logging.basicConfig(format="%(name)s", stream=sys.stdout)
import cumla.jax
assert not xla_bridge.backends_are_initialized()
x = np.arange(32, dtype=np.float32).reshape(2, 16)
for _ in range(2):
    got = jax.jit(lambda x: cumla.quantize_fp8(x))(x)
    for one, other in zip(got, cumla.quantize_fp8(x), strict=True):
        assert np.asarray(one).tobytes() == other.tobytes()
print(cumla.jax.handler.unknown_layout(), cumla.jax.handler._handlers)
"""


def test_another_major_version(tmp_path: Path) -> None:
    """Known from jaxlib's header: XLA would refuse the handler, and JAX would have no backend.

    The import starts no backend either way.
    """
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 1\n#define XLA_FFI_API_MINOR 0\n")
    printed = python(OTHER_MAJOR_VERSION, str(tmp_path)).splitlines()
    assert printed == ["cumla.jax.fallback", "major version 1 []"]


def test_the_header_that_jaxlib_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a JAX without one: then XLA's own sizes decide."""
    assert handler._shipped() == ""
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: "/nowhere")
    assert handler._shipped.__wrapped__() == ""
