// SPDX-License-Identifier: Apache-2.0
// Division by a number that the host knows beforehand, as a product: three instructions in place of some 25.
#pragma once
#include "ptx/types.cuh"

namespace cumla::split {

// Of one number, as launch/division.py makes them, where it stands why quotients are exact.
struct Divisor {
  u32 magic, shift;
};

// x / divisor, for x below 2^31.
// model: division
__device__ __forceinline__ u32 quotient(u32 x, const Divisor& divisor) {
  return __umulhi(2 * x, divisor.magic) >> divisor.shift;
}

}  // namespace cumla::split
