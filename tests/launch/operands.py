# SPDX-License-Identifier: Apache-2.0
"""Operand registers of wgmma in machine code: what writes them while products may read them.

The compiler takes a product's registers as read when it is issued. Tensor cores read them until
the wait, so a value that comes meanwhile must have other registers: ptxas 12.9 and 13.0 do not see
to that where the operand is a copy of what a loop loads for its next turn.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_PRODUCTS = (0xDF0, 0xDF3)  # HGMMA, QGMMA with an operand in registers
_OPERANDS = 4  # registers of it
_NO_GROUP = 7  # of a product behind which no group ends
_WAIT, _IS_WAIT = 0x9C5, 1 << 47  # WARPGROUP.DEPBAR; WARPGROUP.ARRIVE has not that bit
_LEAVE = 0x94D  # EXIT

# Instructions that write registers from the one in bits 16 to 23 on, without the form of operands.
_ONE = {
    *(0x002, 0x003, 0x007, 0x008, 0x009, 0x00F, 0x010, 0x011, 0x012, 0x013, 0x016, 0x019, 0x020),
    *(0x021, 0x023, 0x024, 0x027, 0x030, 0x036, 0x03E, 0x045, 0x046, 0x047, 0x048, 0x100, 0x101),
    *(0x105, 0x106, 0x107, 0x108, 0x109, 0x11C, 0x119, 0x189, 0x1A8),
}
_TWO = {0x005, 0x025}  # CS2R, IMAD.WIDE
_FOUR = {0x03B, 0x03C}  # LDSM, HMMA
_LOADS = {0x181, 0x182, 0x184}  # LDG, LDC, LDS: the size is in the upper word
_SIZES = {5: 2, 6: 4}


def written_early(code: bytes) -> list[int]:
    """Find the places of instructions that write operands of products for which none has waited.

    Code is read in its order in memory; a loop's end and its begin are not put together.
    """
    found: list[int] = []
    groups: list[set[int]] = []
    current: set[int] = set()
    for at, (low, high) in enumerate(struct.iter_unpack("<QQ", code)):
        kind = low & 0xFFF
        if kind in _PRODUCTS:
            first = low >> 24 & 0xFF
            current |= set(range(first, first + _OPERANDS))
        if kind & ~0xC00 in {k & ~0xC00 for k in (*_PRODUCTS, 0x9F0, 0x9F3)}:
            if high >> 20 & 7 != _NO_GROUP:
                groups.append(current)
                current = set()
        elif kind == _WAIT and low & _IS_WAIT:
            left = high >> 8 & 0x3F
            groups = groups[len(groups) - left :] if left else []
        elif kind == _LEAVE and low >> 12 & 0xF == 7:  # whatever the predicate, it would be less
            groups, current = [], set()
        elif not current.union(*groups).isdisjoint(_written(low, high)):
            found.append(16 * at)
    return found


def _written(low: int, high: int) -> Iterator[int]:
    first, kind = low >> 16 & 0xFF, low & 0x1FF
    if first == 0xFF:
        return
    count = (kind in _ONE) + 2 * (kind in _TWO) + 4 * (kind in _FOUR)
    if kind in _LOADS:
        count = _SIZES.get(high >> 9 & 7, 1)
    yield from range(first, first + count)
