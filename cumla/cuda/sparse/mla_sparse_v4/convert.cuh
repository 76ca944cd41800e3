// SPDX-License-Identifier: Apache-2.0
// The converters of mla_sparse_v4 and mla_sparse_v41: rows of 8 or fewer bits become bfloat16 tiles.
#pragma once
#include "rows/e2m1.cuh"
#include "sparse/mla_sparse_v4/find.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using rows::expand_e2m1x4;

// One of four warps that convert 16 rows of every block. A lane has 16 e4m3 columns of each tile, from column 16
// (lane % 4) on, of rows lane / 4 and 8 more. Half a block waits in registers. When a tile is stored as bfloat16,
// that of the next half is loaded into the same registers.
template <typename Format>
struct V4Converter {
  static constexpr int kHalfBytes = kHalfTiles * 64;

  const V4Layout& shared;
  const int row, chunk;    // this lane's first row; its columns
  const char* columns[2];  // of this lane's rows: the half that is loaded next
  uint4 bytes[kHalfTiles][2];
  bool is_fp4[2], next_is_fp4[2];  // of these bytes, and of those that are loaded next

  __device__ __forceinline__ V4Converter(const V4Layout& shared, int warp)
      : shared(shared), row(warp * 16 + threadIdx.x % 32 / 4), chunk(threadIdx.x % 4) {}

  // Starts loading block t. Returns false if it is the end mark, which then loads zeros.
  __device__ __forceinline__ bool begin(int t) {
    const int slot = t % V4Layout::kSlots;
    mbarrier_wait(shared.found(slot), t / V4Layout::kSlots & 1, "rows");
#pragma unroll
    for (int g = 0; g < 2; ++g)
      columns[g] = V4Finder<Format>::columns_at(shared.row(slot, row + 8 * g)) + chunk * 16;
    if constexpr (Format::kMayBeFp4) {
#pragma unroll
      for (int g = 0; g < 2; ++g) {  // a lane's eight bytes are half of 16
        next_is_fp4[g] = reinterpret_cast<u64>(columns[g]) & 2;
        columns[g] -= next_is_fp4[g] ? 2 + (chunk - chunk / 2) * 16 : 0;
      }
    }
    const bool exists = (reinterpret_cast<u64>(columns[0]) & 1) == 0;
#pragma unroll
    for (int g = 0; g < 2; ++g) columns[g] -= !exists;
    return exists;
  }
  __device__ __forceinline__ void load_tile(int k) {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const int offset = Format::kMayBeFp4 ? k * 64 >> next_is_fp4[g] : k * 64;
      bytes[k][g] = load_global_16(reinterpret_cast<const uint4*>(columns[g] + offset));
    }
  }
  // The scales of this lane's columns of a half, a byte per tile: exponents, or e4m3 scales of e2m1 columns.
  __device__ __forceinline__ u32 scales_of(int slot, int g, int half) const {
    if constexpr (Format::kScalesFollow) {
      const u32 scales = shared.scales(slot, row + 8 * g);
      if (Format::kMayBeFp4 && is_fp4[g]) {
        const uint4 of = load_shared_16(scales + half * 16);  // a word per tile, a byte per 16 columns
        const u32 own = chunk | (chunk + 4) << 4;
        return __byte_perm(__byte_perm(of.x, of.y, own), __byte_perm(of.z, of.w, own), 0x5410);
      }
      const uint2 of = load_shared_8(scales + half * 8);
      return __byte_perm(of.x, of.y, chunk < 2 ? 0x6420 : 0x7531);
    }
    return load_shared_u32(shared.row(slot, row + 8 * g) + 8 + half * 4);
  }
  // Stores tile k of a half as bfloat16, times its scales.
  __device__ __forceinline__ void store_tile(u32 tiles, int k, const u32 (&exponents)[2]) const {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const u32 exponent = exponents[g] >> 8 * k & 0xff;
      const uint4& from = bytes[k][g];
      uint4 pairs[2];
      if (Format::kMayBeFp4 && is_fp4[g]) {
        const u32 scale = pair_of_e4m3(exponent);
        convert_e2m1(chunk % 2 ? from.z : from.x, scale, pairs[0]);
        convert_e2m1(chunk % 2 ? from.w : from.y, scale, pairs[1]);
      } else {
        const u32 half = exponent == 0xff ? 0x7fff : exponent << 7, scale = half << 16 | half;
        convert(from.x, scale, pairs[0].x, pairs[0].y);
        convert(from.y, scale, pairs[0].z, pairs[0].w);
        convert(from.z, scale, pairs[1].x, pairs[1].y);
        convert(from.w, scale, pairs[1].z, pairs[1].w);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_shared_16(tiles + k * kTileBytes + (row + 8 * g) * 128 + ((2 * chunk + i ^ row % 8) << 4), pairs[i]);
    }
  }
  __device__ __forceinline__ static void convert(u32 bytes, u32 scale, u32& low, u32& high) {
    u32 first, second;
    expand_e4m3x4(bytes, first, second);
    const float2 a = unpack_pair<Fp16>(first), b = unpack_pair<Fp16>(second);
    low = multiply_pairs<Bf16>(pack_pair<Bf16>(a.x, a.y), scale);
    high = multiply_pairs<Bf16>(pack_pair<Bf16>(b.x, b.y), scale);
  }
  // A pair of bfloat16, both an e4m3 number.
  __device__ __forceinline__ static u32 pair_of_e4m3(u32 byte) {
    u32 first, second;
    expand_e4m3x4(byte, first, second);
    const float scale = unpack_pair<Fp16>(first).x;
    return pack_pair<Bf16>(scale, scale);
  }
  // Eight e2m1 numbers times their scale: exact, for the product has six significant bits.
  __device__ __forceinline__ static void convert_e2m1(u32 codes, u32 scale, uint4& pairs) {
    expand_e2m1x4(codes, pairs.x, pairs.y);
    expand_e2m1x4(codes >> 16, pairs.z, pairs.w);
    pairs = {multiply_pairs<Bf16>(pairs.x, scale), multiply_pairs<Bf16>(pairs.y, scale),
             multiply_pairs<Bf16>(pairs.z, scale), multiply_pairs<Bf16>(pairs.w, scale)};
  }

  // Stores half a block, which has been loaded: of block turn / 2 first the half that its owner uses first. Loads the
  // next half; after a second half that of the next block, if it exists. One code path serves all halves
  // (docs/kernels/mla_sparse.md).
  __device__ __forceinline__ bool hand_over(int turn) {
    const bool second = turn & 1;
    const int t = turn / 2, parity = t & 1, slot = t % V4Layout::kSlots;
    const int half = second ? 1 - parity : parity, next_half = second ? half : 1 - half;
    const u32 tiles = shared.stage(parity) + half * (kHalfTiles * kTileBytes);
    u32 exponents[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      if constexpr (Format::kMayBeFp4) is_fp4[g] = next_is_fp4[g];
      exponents[g] = scales_of(slot, g, half);
    }
    bool more = true;
    int step = half ? -kHalfBytes : kHalfBytes;
    if (second) {
      more = begin(t + 1);
      step = half * kHalfBytes;
    }
#pragma unroll
    for (int g = 0; g < 2; ++g)
      columns[g] = copy_of(columns[g] + (Format::kMayBeFp4 && next_is_fp4[g] ? step / 2 : step));
    mbarrier_wait(shared.free(parity, half), t / 2 & 1 ^ 1, "a free KV stage");
#pragma unroll
    for (int k = 0; k < kHalfTiles; ++k) {
      if (k < Format::kTiles - kHalfTiles || half == 0) store_tile(tiles, k, exponents);
      if (k < Format::kTiles - kHalfTiles || next_half == 0) load_tile(k);
      if (k == 1) __syncwarp();  // limits how much is converted at once, and so the registers
    }
    fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.full(parity, half * kHalfTiles));  // plant: V4 tiles
    if (second) {
      if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.used(slot));  // plant: V4 rows used
    }
    return more;
  }
};

template <typename Format>
__device__ __forceinline__ void convert_v4(const V4Layout& shared, int warp) {
  V4Converter<Format> converter(shared, warp);
  bool more = converter.begin(0);
#pragma unroll
  for (int k = 0; k < kHalfTiles; ++k) converter.load_tile(k);
#pragma unroll 1
  for (int turn = 0; more || (turn & 1); ++turn) more = converter.hand_over(turn);
}

}  // namespace cumla::sparse
