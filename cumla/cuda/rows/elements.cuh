// SPDX-License-Identifier: Apache-2.0
// Octets: eight neighbouring elements of a row in registers, which a thread loads, converts and stores at once.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::rows {

using namespace ptx;

constexpr int kOctet = 8;  // elements; 16 bytes if each has 16 bits

// An octet of a row of Bf16, Fp16 or Fp32. The compiler may reorder `load`. Several `load_early` stay together,
// before their first use.
template <typename Element>
struct Octet {
  uint4 words;

  __device__ __forceinline__ void load(const char* row, int octet) {
    words = reinterpret_cast<const uint4*>(row)[octet];
  }
  __device__ __forceinline__ void load_early(const char* row, int octet) {
    words = load_global_16(reinterpret_cast<const uint4*>(row) + octet);
  }
  __device__ __forceinline__ float2 pair(int i) const {
    return unpack_pair<Element>(i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w);
  }
  // As 16-bit elements of type T, which must be Element.
  template <typename T>
  __device__ __forceinline__ uint4 packed() const {
    static_assert(kIsBf16<T> == kIsBf16<Element>, "16-bit elements are stored as they are");
    return words;
  }
};

template <>
struct Octet<Fp32> {
  float4 low, high;

  __device__ __forceinline__ void load(const char* row, int octet) {
    low = reinterpret_cast<const float4*>(row)[2 * octet];
    high = reinterpret_cast<const float4*>(row)[2 * octet + 1];
  }
  __device__ __forceinline__ void load_early(const char* row, int octet) {
    low = load_global_16(reinterpret_cast<const float4*>(row) + 2 * octet);
    high = load_global_16(reinterpret_cast<const float4*>(row) + 2 * octet + 1);
  }
  __device__ __forceinline__ float2 pair(int i) const {
    return i == 0 ? float2{low.x, low.y} : i == 1 ? float2{low.z, low.w} : i == 2 ? float2{high.x, high.y}
                                                                                  : float2{high.z, high.w};
  }
  template <typename T>
  __device__ __forceinline__ uint4 packed() const {
    return {pack_pair<T>(low.x, low.y), pack_pair<T>(low.z, low.w), pack_pair<T>(high.x, high.y),
            pack_pair<T>(high.z, high.w)};
  }
};

__device__ __forceinline__ void store(char* row, int octet, const uint4& words) {
  reinterpret_cast<uint4*>(row)[octet] = words;
}

}  // namespace cumla::rows
