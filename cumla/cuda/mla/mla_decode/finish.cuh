// SPDX-License-Identifier: Apache-2.0
// The end of a segment in a consumer of mla_decode: sums of both consumers, sinks, result or partial result.
#pragma once
#include "mla/mla_decode/compute.cuh"
#include "attend/reduce.cuh"
#include "split/join.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

// Adds the sums of both consumers, then stores out and log-sum-exp, or a partial result.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void
Consumer<T, kSharedBlocks, kCopied, AnyTile>::finish(const Segment& segment, bool more) {
  float total[2], inverse[2], lse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = sum_of_quad(sum[r]);
    weight[r] = sum_of_quad(weight[r]);
    if (lane % 4 == 0) {
      store_shared_float(shared.sum(consumer, row + 8 * r), sum[r]);
      store_shared_float(shared.weight(consumer, row + 8 * r), weight[r]);
    }
    if constexpr (AnyTile::kHasMaxLogits) {
      this->max_logit[r] = max_of_quad(this->max_logit[r]);
      if (consumer == 1 && lane % 4 == 0) store_shared_float(shared.max_logit(row + 8 * r), this->max_logit[r]);
    }
  }
  consumers_sync();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] = load_shared_float(shared.sum(0, row + 8 * r)) + load_shared_float(shared.sum(1, row + 8 * r));
    const float rounded =
        load_shared_float(shared.weight(0, row + 8 * r)) + load_shared_float(shared.weight(1, row + 8 * r));
    inverse[r] = inverse_of_sum(rounded);
    lse[r] = log_sum_exp(maximum[r], total[r]);
    if constexpr (AnyTile::kHasMaxLogits)
      if (consumer == 0)
        this->max_logit[r] = fmaxf(this->max_logit[r], load_shared_float(shared.max_logit(row + 8 * r)));
  }
  consumers_sync();  // the next segment overwrites the sums
  // The hint changes the order of the main loop that ptxas chooses, for the better.
  if (__builtin_expect(segment.split(), 0)) {
    write_piece(segment, inverse, lse);  // plant: piece
    LatentJoiner<T, AnyTile>(
        p,
        {shared.pacer(0), shared.probabilities, shared.sum(0, 0), shared.stage(0), shared.stage(Layout::kStages / 2)},
        tile, segment)
        .join(more);
  } else {
    if constexpr (AnyTile::kHasSinks)
#pragma unroll
      for (int r = 0; r < 2; ++r) take_sink(p, sink_of(p, tile, row + 8 * r), inverse[r], lse[r]);
    write_result(segment, inverse, lse);
  }
}

template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void
Consumer<T, kSharedBlocks, kCopied, AnyTile>::write_piece(const Segment& segment, const float (&inverse)[2],
                                            const float (&lse)[2]) const {
  if (warp >= p.row_groups) return;
  const i64 piece = piece_index(p, tile, blockIdx.y, segment.slot);
  if (consumer == 0 && lane % 4 == 0) {
    p.partial_rows[piece * p.row_groups * kRowGroup + row] = {lse[0], inverse[0]};
    p.partial_rows[piece * p.row_groups * kRowGroup + row + 8] = {lse[1], inverse[1]};  // plant: partial
    if constexpr (AnyTile::kHasMaxLogits)
#pragma unroll
      for (int r = 0; r < 2; ++r) *tile.partial_max_logit(p, piece, row + 8 * r) = this->max_logit[r];
  }
  float4* const to = copy_of(p.partial_out + piece_offset<kValueDim, kShortLines>(p, piece, consumer, warp, 0, lane));
  constexpr int kUnits = kValueDim / 64;
  auto eight = [&](int i) { return float4{output[4 * i], output[4 * i + 1], output[4 * i + 2], output[4 * i + 3]}; };
#pragma unroll
  for (int u = 0; u < kUnits; ++u)
    store_short_unit(to + u * (kShortLines * 32),
                     {eight(u), eight(u + kUnits), eight(u + 2 * kUnits), eight(u + 3 * kUnits)});
}

template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void
Consumer<T, kSharedBlocks, kCopied, AnyTile>::write_result(const Segment& segment, const float (&inverse)[2],
                                             const float (&lse)[2]) const {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exists = row + 8 * r < tile.rows;
    const Row to(p, tile, row + 8 * r);
    char* out = p.out + segment.request * p.out_stride_batch + to.token * p.out_stride_token +
                to.head * p.out_stride_head;
    if constexpr (kHasHalf<AnyTile>) out = row_of_out(p, tile, segment.request, row + 8 * r);
    if (exists && consumer == 0 && lane % 4 == 0) {
      store_lse(p, tile, segment.request, to, lse[r]);
      if constexpr (AnyTile::kHasMaxLogits) tile.store_max_logit(p, segment.request, to, this->max_logit[r]);
    }
    if (p.out_is_float)
      write_floats(reinterpret_cast<float*>(out), r, exists, inverse[r]);
    else
      write_halves(out, r, exists, inverse[r]);
  }
}

template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void
Consumer<T, kSharedBlocks, kCopied, AnyTile>::write_floats(float* out, int r, bool exists, float inverse) const {
  if (!exists) return;
  out += consumer * (kValueDim / 2) + (lane % 4) * 2;
#pragma unroll
  for (int j = 0; j < kValueDim / 16; ++j)
    store_global_float2(out + 8 * j, output[4 * j + 2 * r] * inverse, output[4 * j + 2 * r + 1] * inverse);
}

// Lists with shared blocks: loads and stores compete, so the lanes of a quad exchange words until each has eight
// adjacent columns. Otherwise lane pairs exchange halves of two adjacent groups: eight bytes per lane, full sectors
// of 32 bytes. More code would cost the main loop of some kernels instructions.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void
Consumer<T, kSharedBlocks, kCopied, AnyTile>::write_halves(char* out, int r, bool exists, float inverse) const {
  if constexpr (AnyTile::kIsList && kSharedBlocks) {
    const int quad_lane = copy_of(threadIdx.x) % 4;  // loaded anew: ptxas would keep it over the blocks
    const bool odd = quad_lane & 1, high = quad_lane & 2;
    out = copy_of(out + (consumer * 256 + quad_lane * 8) * 2);
    const auto policy = tile.policy(p);
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      u32 own[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        own[i] = pack_pair<T>(output[4 * (j + i) + 2 * r] * inverse, output[4 * (j + i) + 2 * r + 1] * inverse);
      const uint2 low = trade<1>(odd, own[0], own[1]), later = trade<1>(odd, own[2], own[3]);
      const uint2 even = trade<2>(high, low.x, later.x), uneven = trade<2>(high, low.y, later.y);
      if (exists) store_global_16(out + 16 * j, even.x, uneven.x, even.y, uneven.y, policy);
    }
  } else {
    const bool odd = lane % 2;
    out = copy_of(out + (consumer * (kValueDim / 2) + (odd ? 8 + (lane % 4 - 1) * 2 : (lane % 4) * 2)) * 2);
#pragma unroll
    for (int j = 0; j < kValueDim / 16; j += 2) {
      const u32 first = pack_pair<T>(output[4 * j + 2 * r] * inverse, output[4 * j + 2 * r + 1] * inverse);
      const u32 second = pack_pair<T>(output[4 * j + 4 + 2 * r] * inverse, output[4 * j + 5 + 2 * r] * inverse);
      // Not trade<1>, which compiles to other code
      const u32 received = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
      if (exists) store_global_8(out + 16 * j, odd ? received : first, odd ? second : received);
    }
  }
}

}  // namespace cumla::mla
