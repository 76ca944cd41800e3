# SPDX-License-Identifier: Apache-2.0
"""Run kernels whose threads do not communicate on the CPU: a C++ compiler compiles their own text,
and one thread runs after the other. C++ functions stand in for instructions that are PTX."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from cumla.launch.kernel import Launch
from cumla.launch.source import KernelSpec, translation_unit

__all__ = ["run_on_host"]

_BEFORE = r"""
#include <cmath>
#include <cstring>
#include <algorithm>
using std::min; using std::max;
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct dim3 { unsigned x, y, z; };
static dim3 blockIdx, threadIdx;
static inline float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
static inline unsigned long long __cvta_generic_to_shared(const void*) { return 0; }
static inline float __shfl_xor_sync(unsigned, float, int) { __builtin_trap(); }
"""
_AFTER = r"""
namespace cumla::ptx {
static unsigned bits16(float x, int exponent_bits, int mantissa_bits, bool saturates) {
  const int bias = (1 << (exponent_bits - 1)) - 1, sign = std::signbit(x);
  const int width = exponent_bits + mantissa_bits;
  if (std::isnan(x)) return saturates ? 0x7f : ((1u << width) - 1);
  double y = std::fabs(static_cast<double>(x));
  const double most = saturates ? 448.0 : INFINITY;
  int exponent = y == 0 || std::isinf(y) ? 1 - bias : std::max(std::ilogb(y), 1 - bias);
  if (!std::isinf(y)) y = std::ldexp(std::nearbyint(std::ldexp(y, mantissa_bits - exponent)),
                                     exponent - mantissa_bits);
  if (y > most) y = most;
  unsigned bits;
  if (!saturates && (std::isinf(y) || std::ilogb(y) > bias)) {
    bits = ((1u << exponent_bits) - 1) << mantissa_bits;
  } else if (y == 0) {
    bits = 0;
  } else {
    exponent = std::max(std::ilogb(y), 1 - bias);
    const auto digits = static_cast<unsigned>(std::ldexp(y, mantissa_bits - exponent));
    const bool normal = digits >> mantissa_bits;
    bits = digits;
    if (normal) bits += ((exponent + bias) << mantissa_bits) - (1u << mantissa_bits);
  }
  return bits | (sign << width);
}
template <> u32 pack_pair<Bf16>(float low, float high) {
  return bits16(low, 8, 7, 0) | bits16(high, 8, 7, 0) << 16;
}
template <> u32 pack_pair<Fp16>(float low, float high) {
  return bits16(low, 5, 10, 0) | bits16(high, 5, 10, 0) << 16;
}
static float half(unsigned bits) {
  const int exponent = bits >> 10 & 31, digits = bits & 1023;
  float size = std::ldexp(float(digits), -24);
  if (exponent == 31) size = digits ? NAN : INFINITY;
  else if (exponent) size = std::ldexp(1024.0f + digits, exponent - 25);
  return bits & 0x8000 ? -size : size;
}
template <> float2 unpack_pair<Fp16>(u32 packed) {
  return {half(packed & 0xffff), half(packed >> 16)};
}
u32 pack_e4m3x4(float a, float b, float c, float d) {
  const unsigned low = bits16(a, 4, 3, 1) | bits16(b, 4, 3, 1) << 8;
  return low | bits16(c, 4, 3, 1) << 16 | bits16(d, 4, 3, 1) << 24;
}
uint4 load_global_16(const uint4* address) { return *address; }
float4 load_global_16(const float4* address) { return *address; }
void grid_dependency_launch() {}
void grid_dependency_wait() {}
}
extern "C" void run(const void* params, int x, int y, int z, int threads) {
  for (blockIdx.z = 0; blockIdx.z < unsigned(z); ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < unsigned(y); ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < unsigned(x); ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < unsigned(threads); ++threadIdx.x)
          NAMESPACE::FUNCTION(*static_cast<const NAMESPACE::PARAMS*>(params));
}
"""
_FUNCTION = re.compile(
    r"^__device__ __forceinline__ [^;{}]*\) \{\n(?:(?!^\}).*\n)*?^\}", re.MULTILINE
)


@cache
def _library(spec: KernelSpec) -> ctypes.CDLL:
    compiler = shutil.which("c++") or pytest.skip("needs a C++ compiler")
    text, _, _ = translation_unit(spec).partition('extern "C"')
    text = re.sub(r"^#line.*$|^#pragma unroll$", "", text, flags=re.MULTILINE)
    text = _FUNCTION.sub(lambda m: _declared(m[0]) if "asm" in m[0] else m[0], text)
    after = _AFTER.replace("NAMESPACE", spec.namespace)
    after = after.replace("FUNCTION", spec.function).replace("PARAMS", spec.params)
    folder = Path(mkdtemp())
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(_BEFORE + text + after)
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off"]
    done = subprocess.run(
        [compiler, *options, "-o", library, source], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr[-3000:]
    return ctypes.CDLL(str(library))


def _declared(function: str) -> str:
    """Leave the body away."""
    return function[: function.index(") {\n") + 1] + ";"


def run_on_host(launch: Launch) -> None:
    """Run a launch whose addresses are those of CPU memory."""
    parameters = launch.pack()
    _library(launch.spec).run(parameters, *launch.grid, launch.spec.threads)
