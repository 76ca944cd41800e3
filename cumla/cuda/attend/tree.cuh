// SPDX-License-Identifier: Apache-2.0
// Bits that say which of a request's last keys a query sees: those of a tree of drafts.
#pragma once
#include "ptx/types.cuh"

namespace cumla::attend {

using namespace ptx;

// Bits of the first n keys of 64.
__device__ __forceinline__ u64 keys_before(int n) {
  return n <= 0 ? 0 : n >= 64 ? ~u64{0} : (u64{1} << n) - 1;
}

// The bits of 64 keys, from bit `first` of a query on. tree: [query rows of all requests, count].
__device__ __forceinline__ u64 bits_of_tree(const u32* tree, int count, i64 query, int first) {
  if (first <= -64 || first >= 32 * count) return 0;
  const u32* const words = tree + query * count;
  const int word = first >> 5, shift = first & 31;
  const auto at = [&](int w) { return w >= 0 && w < count ? words[w] : 0u; };
  const u32 low = at(word), middle = at(word + 1), high = at(word + 2);
  return static_cast<u64>(__funnelshift_r(middle, high, shift)) << 32 | __funnelshift_r(low, middle, shift);
}

}  // namespace cumla::attend
