// SPDX-License-Identifier: Apache-2.0
// Query rows of bfloat16 become float16, the type of products with e4m3 numbers.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/types.cuh"

namespace cumla::attend {

using namespace ptx;

// Scales a row to float16: `up` is the power of two that brings its largest number to 2^14, `down` the inverse. The
// exponent is clamped for tiny rows, and for rows with an infinity. `highest`: the highest exponent among a lane's
// numbers; a quad of lanes has a row.
struct Narrowed {
  float up, down;

  __device__ __forceinline__ explicit Narrowed(u32 highest) {
    highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
    highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
    const u32 exponent = min(max(highest >> 23, 30u), 254u);
    up = __uint_as_float((127 + 127 + 14 - exponent) << 23);
    down = __uint_as_float((exponent - 14) << 23);
  }
  // The highest exponent of a pair. Bits of larger numbers are larger.
  __device__ __forceinline__ static u32 highest_of(u32 pair) {
    return max(pair << 16 & 0x7f800000u, pair & 0x7f800000u);
  }
  __device__ __forceinline__ u32 operator()(u32 word) const {
    const float2 pair = unpack_pair<Bf16>(word);
    return pack_pair<Fp16>(pair.x * up, pair.y * up);
  }
};

}  // namespace cumla::attend
