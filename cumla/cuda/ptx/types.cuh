// SPDX-License-Identifier: Apache-2.0
// Scalar names, element types and constants. NVRTC needs no toolkit header for this text.
#pragma once

namespace cumla {

using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

struct Bf16 {};  // element-type tags; 16-bit elements are stored as halves of u32
struct Fp16 {};
struct Fp32 {};
template <typename T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<Bf16> = true;

// Opaque: cuTensorMapEncodeTiled fills it on the host.
struct alignas(64) TensorMap {
  u64 words[16];
};

constexpr int kWarpgroup = 128;  // threads

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

}  // namespace cumla
