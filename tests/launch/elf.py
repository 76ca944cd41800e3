# SPDX-License-Identifier: Apache-2.0
"""The sections of a cubin, which is a 64-bit little-endian ELF file."""

from __future__ import annotations

import struct


def sections(image: bytes) -> dict[str, bytes]:
    """Return the contents of an ELF image's sections by name."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF image")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    names_at = headers[names_index][4]
    found = {}
    for name, kind, _, _, offset, length in headers:
        start = names_at + name
        text = image[start : image.index(b"\0", start)].decode()
        found[text] = (
            b"" if kind == 8 else image[offset : offset + length]
        )  # 8: no bits in the file
    return found
