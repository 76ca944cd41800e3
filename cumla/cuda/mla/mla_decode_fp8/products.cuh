// SPDX-License-Identifier: Apache-2.0
// Fragments of 8-bit tiles, converted between shared memory and the tensor cores. A step is half a tile: two products
// of 16 columns of K or of 16 tokens of V, eight registers.
#pragma once
#include "mla/mla_decode_fp8/layout.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

constexpr int kStepRegisters = 8;

// K: a lane has tokens lane / 4 and 8 more of its warp's 16, and columns 16 (lane % 4) to 15 more of 64. The product
// does not depend on the order of columns, if the query has the same.
// model: fp8_data
struct KeyTile {
  uint4 low, high;

  template <int kRowBytes>
  __device__ __forceinline__ void load(u32 source) {
    low = load_shared_16(source);
    high = load_shared_16(source + 8 * kRowBytes);
  }
  __device__ __forceinline__ void expand(int half, u32 (&a)[kStepRegisters]) const {
    expand_e4m3x4(half == 0 ? low.x : low.z, a[0], a[2]);
    expand_e4m3x4(half == 0 ? high.x : high.z, a[1], a[3]);
    expand_e4m3x4(half == 0 ? low.y : low.w, a[4], a[6]);
    expand_e4m3x4(half == 0 ? high.y : high.w, a[5], a[7]);
  }
};

// V, transposed: the bytes of a word are columns 2 (lane / 4) and 1 more of one token, then of the next. The first
// column is row lane / 4 of a fragment, the second is row lane / 4 + 8.
// model: fp8_data
__device__ __forceinline__ void expand_values(const u32 (&words)[4], u32 (&a)[kStepRegisters]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) expand_e4m3x4(__byte_perm(words[i], 0, 0x3120), a[2 * i], a[2 * i + 1]);
}

}  // namespace cumla::mla
