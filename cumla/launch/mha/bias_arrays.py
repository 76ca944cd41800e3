# SPDX-License-Identifier: Apache-2.0
"""A bias as a launch of attention has it: the address of its array, and its form."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["NO_BIAS", "BiasArrays"]


class BiasArrays(NamedTuple):
    """Addresses of the arrays of a bias; strides in bytes.

    Forms are variants of kernels. "linear": slopes, ``slope * (j - p)``. "table": rows of elements
    by distance, of query tokens and heads, or of heads alone.
    """

    form: str = ""  # "": no bias
    data: int = 0
    stride_outer: int = 0  # between requests or tokens; 0: all have the same
    stride_head: int = 0
    requests: int = 1  # with slopes of their own
    length: int = 0  # of a row
    dtype: str = "float32"  # of a table
    first: int = 0  # address of the distance of a row's first element; 0: 0
    ends_extend: bool = False  # a row's ends hold beyond it, else 0

    @property
    def values(self) -> dict[str, Any]:
        """Name the values of struct Slopes, or of struct BiasTable; none without a bias."""
        if not self.form:
            return {}
        if self.form == "linear":
            return {
                "slopes": {
                    "data": self.data,
                    "stride_request": self.stride_outer // 4,
                    "stride_head": self.stride_head // 4,
                    "requests": self.requests,
                }
            }
        return {
            "table": {
                "data": self.data,
                "stride_token": self.stride_outer,
                "stride_head": self.stride_head,
                "first": self.first,
                "length": self.length,
                "kind": _KINDS.index(self.dtype),
                "ends_extend": self.ends_extend,
            }
        }


_KINDS = ("float32", "bfloat16", "float16")
NO_BIAS = BiasArrays()
