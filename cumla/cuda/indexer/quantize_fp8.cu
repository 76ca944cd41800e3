// SPDX-License-Identifier: Apache-2.0
// Quantises rows to e4m3, each with its own float32 scale.
//
// grid = (blocks of rows), 256 threads, in teams of a power of two. A team has a row, and a thread up to four octets
// of it.
//
// Time line: load the row | largest magnitude by shuffles | B, if a team has several warps | scale | quantise, store
// Barrier: B is one __syncthreads of all threads. It guards the magnitudes of the warps. There are no mbarriers.
//
// Budget: 4 x 16 B of loads in flight per thread, 64 KiB per SM with four CTAs; with float32 4 x 32 B. Shared memory:
// 32 B.
#include "rows/quantize.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::indexer {

using namespace ptx;
using namespace rows;

constexpr int kQuantizeThreads = 256;
constexpr int kMostHeld = 4;  // octets of a thread
constexpr int kMostAxes = 4;  // before the last axis

struct QuantizeFp8Params {
  const char* x;
  char *values, *scales;
  i64 sizes[kMostAxes];  // padded in front with 1; strides are in bytes
  i64 x_strides[kMostAxes], value_strides[kMostAxes], scale_strides[kMostAxes];
  i64 rows;
  int octets, team_log2, power_of_two, unused;
};

struct RowOffsets {
  i64 x, values, scale;
};

__device__ __forceinline__ RowOffsets find_row(const QuantizeFp8Params& p, i64 row) {
  RowOffsets offsets = {0, 0, 0};
  u64 rest = row;
#pragma unroll
  for (int axis = kMostAxes - 1; axis >= 0; --axis) {
    const u64 size = p.sizes[axis];
    const u64 outer = rest < size ? 0 : rest / size;  // most arrays have one axis, and need no division
    const i64 index = rest - outer * size;
    offsets.x += index * p.x_strides[axis];
    offsets.values += index * p.value_strides[axis];
    offsets.scale += index * p.scale_strides[axis];
    rest = outer;
  }
  return offsets;
}

// Maximum over a team of several warps. The whole block must call it.
__device__ __forceinline__ float largest_of_warps(float largest, int team_log2) {
  __shared__ float of_warps[kQuantizeThreads / 32];
  const int warp = threadIdx.x / 32, warps = 1 << (team_log2 - 5);
  if (threadIdx.x % 32 == 0) of_warps[warp] = largest;
  __syncthreads();
  const int first = warp & -warps;
  for (int i = 0; i < warps; ++i) largest = fmaxf(largest, of_warps[first + i]);
  return largest;
}

template <typename T>
__device__ __forceinline__ void quantize_fp8(const QuantizeFp8Params& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int thread = threadIdx.x, team = 1 << p.team_log2;
  const int member = thread & (team - 1);
  const i64 row = static_cast<i64>(blockIdx.x) * (kQuantizeThreads >> p.team_log2) + (thread >> p.team_log2);
  const bool exists = row < p.rows;
  const RowOffsets offsets = find_row(p, exists ? row : 0);

  Octet<T> held[kMostHeld] = {};
#pragma unroll
  for (int k = 0; k < kMostHeld; ++k) {
    const int octet = member + (k << p.team_log2);
    if (exists && octet < p.octets) held[k].load(p.x + offsets.x, octet);
  }
  float largest = 0.0f;
#pragma unroll
  for (int k = 0; k < kMostHeld; ++k) largest = fmaxf(largest, largest_of(held[k]));
  largest = largest_of_lanes(largest, min(team, 32));
  if (team > 32) largest = largest_of_warps(largest, p.team_log2);
  if (!exists) return;

  const float scale = scale_of(largest, p.power_of_two), inverse = 1.0f / scale;
#pragma unroll
  for (int k = 0; k < kMostHeld; ++k) {
    const int octet = member + (k << p.team_log2);
    if (octet < p.octets) store_quantized(p.values + offsets.values, octet, held[k], inverse);
  }
  if (member == 0) *reinterpret_cast<float*>(p.scales + offsets.scale) = scale;
}

}  // namespace cumla::indexer
