// SPDX-License-Identifier: Apache-2.0
// Quantises the indexer keys of new tokens to e4m3, and appends them with their scales to the pages of a cache. With
// kMxfp4 they become e2m1 numbers with a power of two per 32 columns, whose exponent is a byte.
//
// grid = (blocks of tokens), 128 threads, in teams of head_dim / 16 lanes. Pages have a power of two of tokens.
//
// Roles and time line: a team has one token, and a lane two octets of its row:
//   load the row | load the slot | largest magnitude by shuffles | scale | quantise, store
// Barriers: none; teams are within a warp.
//
// Budget: 2 x 16 B of loads in flight per thread, 64 KiB per SM with sixteen CTAs; with float32 rows 2 x 32 B.
#include "rows/e2m1.cuh"
#include "rows/quantize.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::indexer {

using namespace ptx;
using namespace rows;

constexpr int kAppendIndexerThreads = 128;
constexpr int kHeld = 2;  // octets of a lane

// All strides are in bytes.
struct PagedRows {
  char* data;
  i64 stride_page, stride_row;

  __device__ __forceinline__ char* row(i64 page, i64 offset) const {
    return data + page * stride_page + offset * stride_row;
  }
};

struct AppendIndexerCacheParams {
  const char* rows;
  i64 rows_stride;
  const char* slots;
  i64 slots_stride;
  PagedRows values, scales;
  i64 tokens, num_slots;
  int slots_are_wide;  // 64-bit slots, else 32
  int page_size_log2, team_log2, power_of_two;
};

template <typename T, bool kMxfp4 = false>
__device__ __forceinline__ void append_indexer_cache(const AppendIndexerCacheParams& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int team = 1 << p.team_log2, member = threadIdx.x & (team - 1);
  const i64 token =
      static_cast<i64>(blockIdx.x) * (kAppendIndexerThreads >> p.team_log2) + (threadIdx.x >> p.team_log2);

  Octet<T> held[kHeld] = {};
  i64 slot = -1;
  if (token < p.tokens) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) held[k].load(p.rows + token * p.rows_stride, member + (k << p.team_log2));
    const char* const at = p.slots + token * p.slots_stride;
    slot = p.slots_are_wide ? *reinterpret_cast<const i64*>(at) : *reinterpret_cast<const i32*>(at);
  }
  if constexpr (kMxfp4) {
    constexpr int kGroup = 32 / kOctet;  // lanes that share a scale
    const i64 page = slot >> p.page_size_log2, offset = slot - (page << p.page_size_log2);
    const bool exists = slot >= 0 && slot < p.num_slots;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int octet = member + (k << p.team_log2);
      const float scale = e2m1_power_scale_of(largest_of_lanes(largest_of(held[k]), kGroup));
      if (!exists) continue;
      store_e2m1_times(p.values.row(page, offset), octet, held[k], 1.0f / scale);
      if (octet % kGroup == 0) p.scales.row(page, offset)[octet / kGroup] = __float_as_uint(scale) >> 23;
    }
    return;
  }
  const float largest = largest_of_lanes(fmaxf(largest_of(held[0]), largest_of(held[1])), team);
  if (slot < 0 || slot >= p.num_slots) return;

  const i64 page = slot >> p.page_size_log2, offset = slot - (page << p.page_size_log2);
  const float scale = scale_of(largest, p.power_of_two), inverse = 1.0f / scale;
#pragma unroll
  for (int k = 0; k < kHeld; ++k)
    store_quantized(p.values.row(page, offset), member + (k << p.team_log2), held[k], inverse);
  if (member == 0) *reinterpret_cast<float*>(p.scales.row(page, offset)) = scale;
}

}  // namespace cumla::indexer
