# SPDX-License-Identifier: Apache-2.0
"""Tensor maps: what the driver is asked to encode, of each kind of number."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cumla.core.operation import Address
from cumla.errors import CumlaError
from cumla.launch import kernel, tensor_map
from cumla.launch.module import LoadedKernel
from cumla.launch.source import KernelSpec

PTR = 7 << 40


class FakeDriver:
    """A driver that keeps what it is asked to encode; the types are those of cuda.bindings."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._descriptor = ctypes.create_string_buffer(bytes(range(128)), 128)
        self.address_at: int | None = None
        self.also_at: int | None = None  # something else that depends on the address
        self.status: Any = 0
        self.seen: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def cuTensorMapEncodeTiled(
        self, kind: Any, rank: int, ptr: int, *rest: Any
    ) -> tuple[Any, SimpleNamespace]:
        sizes, strides, box, steps, _, swizzle, _, _ = rest
        numbers = ([int(n) for n in each] for each in (sizes, strides, box, steps))
        if self.address_at is not None:
            struct.pack_into("<Q", self._descriptor, self.address_at, ptr)
            struct.pack_into("B", self._descriptor, 50, 0 if ptr >> 47 else 50)
        if self.also_at is not None:
            struct.pack_into("B", self._descriptor, self.also_at, ptr >> 12 & 0xFF)
        self.seen.append((kind.name.rpartition("_")[2], rank, ptr, *numbers, swizzle.name))
        return self.status, SimpleNamespace(getPtr=lambda: ctypes.addressof(self._descriptor))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver(pytest.importorskip("cuda.bindings.driver"))
    monkeypatch.setattr(tensor_map, "import_driver", lambda: fake)
    for cached in (tensor_map._encoded, tensor_map._around_address):
        cached.cache_clear()
    yield fake
    for cached in (tensor_map._encoded, tensor_map._around_address):
        cached.cache_clear()


@pytest.mark.parametrize("at", [0, 8, 120])
def test_one_descriptor_serves_all_addresses_of_a_layout(at: int, driver: FakeDriver) -> None:
    driver.address_at = at
    layout = "bfloat16", (70, 64, 1, 576), (73728, 1152, 1152, 2), 64
    for address in (PTR, PTR + 16, 0x7FFFFFFFFFF0, 16):
        wanted = bytearray(range(128))
        struct.pack_into("<Q", wanted, at, address)
        assert tensor_map.paged_kv_map(address, *layout).encode() == wanted
    assert len(driver.seen) == 2
    tensor_map.paged_kv_map(PTR, *layout[:-1], 32).encode()
    assert len(driver.seen) == 4
    for odd in (PTR + 8, 1 << 47):  # bits that the two did not show: the driver decides
        tensor_map.paged_kv_map(odd, *layout).encode()
        assert driver.seen[-1][2] == odd


def test_a_descriptor_that_hides_its_address_is_asked_for(driver: FakeDriver) -> None:
    driver.address_at, driver.also_at = 0, 77
    layout = "bfloat16", (70, 64, 1, 576), (73728, 1152, 1152, 2), 64
    for address in (PTR, PTR + (5 << 12)):
        got = tensor_map.paged_kv_map(address, *layout).encode()
        assert driver.seen[-1][2] == address
        assert got[77] == address >> 12 & 0xFF


@pytest.mark.parametrize("first", [0, 1 << 47])
@pytest.mark.parametrize(("at", "also_at"), [(0, None), (120, None), (0, 77)])
def test_templates_hold_the_descriptors_of_new_addresses(
    at: int,
    also_at: int | None,
    first: int,
    driver: FakeDriver,
    small: KernelSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "import_driver", lambda: SimpleNamespace(cuLaunchKernelEx=None))
    monkeypatch.setattr(kernel, "_config", lambda *_: None)
    driver.address_at, driver.also_at = at, also_at
    layout = struct.Struct("<q128s")
    shape = "bfloat16", (70, 64, 1, 576), (73728, 1152, 1152, 2), 64
    described = tensor_map.paged_kv_map(Address.of("kv_cache", first, 32), *shape)
    template = kernel.Template(
        LoadedKernel(handle=1, spec=small, device=0, owner=None),
        kernel.Launch(small, (1, 1, 1), layout, (7, described)),
    )
    for address in (PTR, PTR + (5 << 12), 1 << 47):
        parameters, _ = template.at({"kv_cache": address}, 0)._owned
        wanted = tensor_map.paged_kv_map(address + 32, *shape).encode()
        assert layout.unpack(parameters) == (7, wanted)


@pytest.mark.parametrize(
    ("dtype", "columns", "kind", "box_columns", "swizzle"),
    [
        ("bfloat16", 576, "BFLOAT16", 64, "128B"),
        ("float16", 64, "FLOAT16", 64, "128B"),
        ("float8_e4m3fn", 512, "UINT8", 128, "128B"),
        ("float8_e4m3fn", 64, "UINT8", 128, "128B"),
        ("float32", 4, "FLOAT32", 4, "NONE"),
        ("uint32", 164, "UINT32", 164, "NONE"),
        ("uint64", 144, "UINT64", 144, "NONE"),
        ("uint64", 128, "UINT64", 128, "NONE"),
    ],
)
def test_boxes_of_each_kind(
    dtype: str, columns: int, kind: str, box_columns: int, swizzle: str, driver: FakeDriver
) -> None:
    """128 bytes in a swizzle as wide as they are, even of an array that has fewer.

    Scales, a whole packed row, or all columns of a row, as they lie.
    """
    geometry = (PTR, dtype, (70, 128, 2, columns), (90000, 1200, 608, 1), 64)
    descriptor = tensor_map.paged_kv_map(*geometry).encode()
    assert descriptor == bytes(range(128))
    assert tensor_map.paged_kv_map(*geometry).encode() is descriptor
    assert driver.seen[2:] == [  # after two that tell how descriptors hold addresses
        (
            *(kind, 4, PTR),
            [columns, 128, 2, 70],
            [1200, 608, 90000],
            [box_columns, 64, 1, 1],
            [1, 1, 1, 1],
            f"CU_TENSOR_MAP_SWIZZLE_{swizzle}",
        )
    ]


def test_strides_of_axes_of_length_one_mean_nothing(driver: FakeDriver) -> None:
    """Frameworks report anything there, even what the driver refuses."""
    shape, strides = (1, 64, 1, 512), (3, 656, 5, 1)
    tensor_map.paged_kv_map(PTR, "float8_e4m3fn", shape, strides, 64).encode()
    *_, strides, _, _, _ = driver.seen[-1]
    assert strides == [656, 16 * 512, 16 * 512]


def test_a_refused_map_says_what_was_asked(driver: FakeDriver) -> None:
    driver.status = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")
    shape, strides = (70, 64, 2, 512), (90000, 656, 1312, 1)
    wanted = tensor_map.paged_kv_map(PTR, "float8_e4m3fn", shape, strides, 64)
    with pytest.raises(
        CumlaError,
        match=r"^kv_cache: the driver refused a tensor map with CUDA_ERROR_INVALID_VALUE \(sizes "
        r"\(512, 64, 2, 70\), byte strides \[656, 1312, 90000\]\); make a contiguous copy",
    ):
        wanted.encode()
