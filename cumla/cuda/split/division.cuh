// SPDX-License-Identifier: Apache-2.0
// Division by a number that the host knows, as a multiplication.
#pragma once
#include "ptx/types.cuh"

namespace cumla::split {

// The host makes divisors (launch/split/division.py, which proves that quotients are exact).
struct Divisor {
  u32 magic, shift;
};

// Returns x / divisor, for x < 2^31.
// model: division
__device__ __forceinline__ u32 quotient(u32 x, const Divisor& divisor) {
  return __umulhi(2 * x, divisor.magic) >> divisor.shift;
}

}  // namespace cumla::split
