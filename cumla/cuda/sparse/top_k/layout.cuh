// SPDX-License-Identifier: Apache-2.0
// Parameters and shared memory of top_k.
#pragma once
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace ptx;

struct TopKParams {
  const char* scores;
  const int *row_lens, *row_starts;  // null: whole rows
  const int *block_table, *row_to_request, *offsets;
  int *out, *positions;
  char* values;
  int* counts;
  i64 scores_stride, table_stride, out_stride, positions_stride;  // scores in bytes, the others in entries
  i64 row_lens_stride, row_starts_stride, requests_stride, offsets_stride, counts_stride;  // entries
  int width, topk, page_size, max_pages, requests;
  int cluster_log2;  // of the blocks per row
  int is_sorted, unused;
};

// Passes of 11, 11 and 10 bits, from the top.
constexpr int kPasses = 3, kBins = 2048;
__device__ __forceinline__ int shift_of(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }
__device__ __forceinline__ int bits_of(int pass) { return pass == 2 ? 10 : 11; }

// The bin of a key in a pass. A key counts only if its upper bits are those that earlier passes chose.
struct Digit {
  u32 prefix;
  int shift, bits;

  __device__ __forceinline__ Digit(int pass, u32 prefix)
      : prefix(prefix), shift(shift_of(pass)), bits(bits_of(pass)) {}
  __device__ __forceinline__ bool counts(u32 key) const { return key >> (shift + bits - 1) >> 1 == prefix; }
  __device__ __forceinline__ u32 of(u32 key) const { return key >> shift & ((1u << bits) - 1); }
};

// The bin of a pass: keys before it, keys in it, and both counts for blocks of lower rank.
struct Found {
  u32 bin, before, count, lower_before, lower_count;
};

// One row, the same in all threads of a cluster.
struct ScoreRow {
  int index, start, length;
};

// A block's shared memory before its list of entries.
struct TopKShared {
  u32 histogram[kPasses][kBins];
  u32 coarse[kPasses][32];  // sums over the bins of a warp
  u32 sums[2][32];          // over the keys of a warp
  Found found;
  ScoreRow row;  // in shared memory, because keys take the registers
};
static_assert(sizeof(TopKShared) % 16 == 0, "what follows is moved 16 bytes at a time");

}  // namespace cumla::sparse
