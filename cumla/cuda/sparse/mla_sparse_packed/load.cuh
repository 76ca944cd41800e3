// SPDX-License-Identifier: Apache-2.0
// The loading roles of mla_sparse_packed.
#pragma once
#include "mla/mla_decode_fp8/load.cuh"
#include "sparse/mla_sparse_packed/layout.cuh"
#include "sparse/selected.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace ptx;

// By each of four warps: a granule of every block, a row a lane.
template <typename AnyTile>
__device__ __forceinline__ void load_granules(const MlaSparsePackedParams& params, const PackedLayout& shared,
                                              AnyTile& tile, const Part& part, int last_place, int warp) {
  const MlaDecodeParams& p = params.decode;
  const int lane = threadIdx.x % 32, own = warp * kGranuleRows + lane % kGranuleRows;
  GranulePlace at(warp);
#pragma unroll 1
  for (int place = part.place; place <= last_place; ++place) {
    const Segment segment = segment_of(p, tile, part, place);
    const int first = segment.begin * kBlockTokens + own;
    ListWalk walk(params.lists, List(params.lists, segment.request, tile.q_begin), first, segment.tokens);
#pragma unroll 1
    for (int blocks = segment.blocks; blocks > 0; --blocks) {
      const int row = walk.next(params.lists);
      mbarrier_wait(shared.free(at.slot), at.phase ^ 1, "a free slot");
      const u32 exist = __ballot_sync(0xffffffffu, row >= 0);
      if (lane == 0) {
        store_shared_u32(shared.exist(at.slot), exist);
        mbarrier_arrive_expect_tx(shared.full(at.slot), PackedLayout::kSlotBytes);
      }
      __syncwarp();
      if (lane < kGranuleRows)
        copy_bulk_async(shared.slot(at.slot) + lane * kPackedBytes,
                        row >= 0 ? p.latent.base + row * p.latent.stride_page : p.rope.base, kPackedBytes,
                        shared.full(at.slot));
      at.advance();
    }
  }
}

// By all threads of both consumers: the query of a segment, eight lanes a head. As in load_query_fp8 each row becomes
// float16, divided by a power of two, in the order of K's fragments; its RoPE columns are divided, too, and stay
// bfloat16.
template <typename AnyTile>
__device__ __forceinline__ void load_query_packed(const MlaDecodeParams& p, const PackedLayout& shared,
                                                  const AnyTile& tile, int request) {
  constexpr int kRounds = kHeads * 8 / (2 * kWarpgroup);
  const int thread = threadIdx.x - kWarpgroup, chunk = thread % 8;
  uint4 kept[kRounds][kTiles];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int row = round * (kHeads / kRounds) + thread / 8;
    const bool valid = row < tile.rows;
    const Row from(p, tile, valid ? row : 0);
    const char* const latent = query_tile(p, 0, request, from.token, from.head) + chunk * 16;
    const char* const rope = query_tile(p, kRopeTile, request, from.token, from.head) + chunk * 16;
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      kept[round][k] = {0, 0, 0, 0};
      if (valid) kept[round][k] = *reinterpret_cast<const uint4*>(k == kRopeTile ? rope : latent + k * 128);
    }
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int row = round * (kHeads / kRounds) + thread / 8;
    u32 highest = 0;
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      const uint4& v = kept[round][k];
      highest = highest_magnitude(highest_magnitude(highest, v.x), v.y);
      highest = highest_magnitude(highest_magnitude(highest, v.z), v.w);
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, step));
    const u32 exponent = max(highest >> 23, 16u);  // lower ones would need a factor that is no float
    const float factor = __uint_as_float((127 + 14 + 127 - exponent) << 23);
    const u32 row_bytes = shared.query + row * 128;
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      const uint4& v = kept[round][k];
      const u32 words[4] = {v.x, v.y, v.z, v.w};
      const u32 to = row_bytes + k * PackedLayout::kQueryTileBytes;
      if (k < kRopeTile) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int u = chunk % 2 * 4 + j;  // the chunk it goes to
          store_shared_u32(to + ((u ^ (row & 7)) << 4) + chunk / 2 * 4, scaled_to_half(words[j], factor));
        }
      } else {
        u32 scaled[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack_pair<Bf16>(words[j]);
          scaled[j] = pack_pair<Bf16>(pair.x * factor, pair.y * factor);
        }
        store_shared_16(to + ((chunk ^ (row & 7)) << 4), {scaled[0], scaled[1], scaled[2], scaled[3]});
      }
    }
    if (chunk == 0)
      store_shared_float(shared.score_factor(row), __uint_as_float((exponent - 14) << 23) * p.scale_log2);
  }
  fence_proxy_async_shared();
}

}  // namespace cumla::sparse
