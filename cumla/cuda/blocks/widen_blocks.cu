// SPDX-License-Identifier: Apache-2.0
// Widens e4m3 blocks of requests to 16 bits, for row tiles of several query tokens (block_tiles.cu). Each e4m3 number
// is exactly one of 16 bits; scales stay out.
//
// block_places.cu has given each block that some query token of a request may see a slot: the request and the block.
//
// grid = (slots, kv heads), 256 threads.
//
// Time line; there are no barriers:
//   read the slot | its page | load 16 numbers of four rows | store them
// Budget: 64 registers per thread, no shared memory.
#include "blocks/slots.cuh"
#include "mha/attention/layout.cuh"
#include "split/division.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;
using mha::Columns;

constexpr int kWidenThreads = 256;

struct WidenBlocksParams {
  const Slot* slots;
  const int* block_table;
  i64 block_table_stride;  // in elements
  Columns keys, values;    // of the caches
  char* keys_out;          // [slots, kv heads, block_size, columns]
  char* values_out;
  TileCounts* counts;  // cleared for block_tiles
  int batch;      // rows of the block table
  int max_pages;  // columns
  int num_pages;
  int block_size;
  int blocks_per_page;
  int kv_heads;
  int key_columns, value_columns;
  Divisor by_blocks_per_page;
};

template <typename T>
__device__ __forceinline__ void store_widened(char* to, const uint4& numbers) {
  const u32 words[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
  u32 pairs[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    expand_e4m3x4(words[i], pairs[2 * i], pairs[2 * i + 1]);
    if constexpr (kIsBf16<T>)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 pair = unpack_pair<Fp16>(pairs[2 * i + h]);
        pairs[2 * i + h] = pack_pair<T>(pair.x, pair.y);
      }
  }
  store_global_16(to, pairs[0], pairs[1], pairs[2], pairs[3], AnyPolicy{});
  store_global_16(to + 16, pairs[4], pairs[5], pairs[6], pairs[7], AnyPolicy{});
}

template <typename T>
__device__ __forceinline__ void widen_blocks(const WidenBlocksParams& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.counts = {0, 0};
  const Slot slot = p.slots[blockIdx.x];
  if (static_cast<u32>(slot.request) >= static_cast<u32>(p.batch) || slot.block < 0) return;
  const int column = quotient(slot.block, p.by_blocks_per_page);
  if (column >= p.max_pages) return;
  const int page = p.block_table[slot.request * p.block_table_stride + column];
  if (static_cast<u32>(page) >= static_cast<u32>(p.num_pages)) return;
  constexpr int kApart = kWidenThreads / 8, kRows = 2;  // eight threads have a row, a thread kRows of keys and values
  const int first = (slot.block - column * p.blocks_per_page) * p.block_size, head = blockIdx.y;
  const int chunk = threadIdx.x % 8 * 16;
  const bool has_key = chunk < p.key_columns, has_value = chunk < p.value_columns;
  const auto at = [&](const Columns& of, int row) {
    return of.base + page * of.stride_page + (first + row) * of.stride_row + head * of.stride_head + chunk;
  };
  const i64 row_out = (static_cast<i64>(blockIdx.x) * p.kv_heads + head) * p.block_size;
#pragma unroll 1
  for (int begin = threadIdx.x / 8; begin < p.block_size; begin += kRows * kApart) {
    uint4 keys[kRows], values[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = begin + i * kApart;
      if (has_key && row < p.block_size) keys[i] = load_global_16(reinterpret_cast<const uint4*>(at(p.keys, row)));
      if (has_value && row < p.block_size)
        values[i] = load_global_16(reinterpret_cast<const uint4*>(at(p.values, row)));
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const i64 row = row_out + begin + i * kApart;
      if (begin + i * kApart >= p.block_size) break;
      if (has_key) store_widened<T>(p.keys_out + (row * p.key_columns + chunk) * 2, keys[i]);
      if (has_value) store_widened<T>(p.values_out + (row * p.value_columns + chunk) * 2, values[i]);
    }
  }
}

}  // namespace cumla::blocks
