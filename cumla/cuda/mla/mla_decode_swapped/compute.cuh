// SPDX-License-Identifier: Apache-2.0
// The consumer role of mla_decode_swapped: from scores to the stored output.
#pragma once
#include "mla/mla_decode_swapped/layout.cuh"
#include "attend/reduce.cuh"
#include "attend/visible.cuh"
#include "split/join.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mla {

using namespace attend;
using namespace ptx;
using namespace split;

// One consumer warpgroup. A lane's accumulators are of tokens, or columns of V, 16 warp + lane / 4 and 8 more; query
// rows 2 (lane % 4) and 1 more of each eight. kCopied: threads copied the tiles, not TMA.
template <typename T, bool kCopied, typename AnyTile>
struct SwappedConsumer {
  using Layout = SwappedLayoutOf<AnyTile::kLatentTiles, AnyTile::kHasRope>;
  using SlotPlace = ptx::RingPlace<Layout::kSlots>;  // slots of a run of tiles
  static constexpr int kHalfTiles = Layout::kHalfTiles, kValueDim = Layout::kValueDim;
  static constexpr bool kHasRope = AnyTile::kHasRope;
  static constexpr int kTiles = Layout::kBlockTiles;
  static constexpr int kOwn = kSwappedRows / 4;  // query rows of a thread: 8 (i / 2) + 2 (lane % 4) + i % 2
  static constexpr int kValueTiles = 2 * kHalfTiles;

  const MlaDecodeParams& p;
  const Layout& shared;
  const AnyTile& tile;
  const int consumer, warp, lane;
  SlotPlace place;     // slots of this consumer's next block
  u32 begun = 0;       // parity of that block's number among this consumer's blocks; with more barriers, the number
  float output[kValueTiles][2 * kOwn];  // this consumer's half of V, then the other's
  float scores[2 * kOwn];
  u32 probabilities[kOwn];
  float maximum[kOwn];     // base-2 running maximum
  float sum[kOwn];         // of exponentials of this thread's tokens, for the log-sum-exp
  float weight[kOwn];      // of the same as rounded 16-bit probabilities, which normalises the output

  // model: swapped_ring
  __device__ __forceinline__ SwappedConsumer(const MlaDecodeParams& p, const Layout& shared,
                                             const AnyTile& tile, int consumer)
      : p(p),
        shared(shared),
        tile(tile),
        consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32) {
    if (consumer == 1) place.advance(kTiles);
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int d = 0; d < kValueTiles; ++d)
#pragma unroll
      for (int i = 0; i < 2 * kOwn; ++i) output[d][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      maximum[i] = kLowest;
      sum[i] = 0.0f;
      weight[i] = 0.0f;
    }
  }

  __device__ __forceinline__ int row_of(int i) const { return 8 * (i / 2) + 2 * (lane % 4) + i % 2; }

  // scores = block x query; then the RoPE tile, if there is one, is free.
  // model: swapped_ring
  __device__ __forceinline__ void multiply_query() {
    SlotPlace at = place;
    // Without this wait, a tile of the other consumer could pass for one of this block (docs/kernels/mla.md).
    if constexpr (Layout::kBegun == 2) {
      mbarrier_wait(shared.begun(consumer), begun, "the loads of a block to begin");
      begun ^= 1;
    } else {
      constexpr u32 kOwnBegun = Layout::kBegun / 2;
      mbarrier_wait(shared.begun(2 * (begun % kOwnBegun) + consumer), begun / kOwnBegun & 1,
                    "the loads of a block to begin");
      ++begun;
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      mbarrier_wait(shared.full(at.slot), at.phase, "a KV tile");
      if constexpr (kCopied) fence_proxy_async_shared();
      const u32 query = shared.query + tile_in_order<AnyTile::kLatentTiles>(0, i + !kHasRope) * shared.kQueryTileBytes;
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_m64n16k16_async<T, false>(scores, descriptor_of_rows<128>(shared.slot(at.slot), k * 32),
                                  descriptor_of_rows<128>(query, k * 32), i + k > 0);
      at.advance(1);
    }
    warpgroup_commit();
    warpgroup_wait<0>();
    if constexpr (kHasRope) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.free(place.slot));
    }
  }

  // Slot of 64 columns of V, counted from this consumer's half. V follows the RoPE tile.
  __device__ __forceinline__ u32 slot_of_value(int d) const {
    return place.ahead(kHasRope + (d ^ consumer * kHalfTiles)).slot;
  }

  // output += V x probabilities. Each half of V is freed as soon as its products are done.
  __device__ __forceinline__ void multiply_values() {
    warpgroup_arrive();
#pragma unroll
    for (int d = 0; d < kValueTiles; ++d) {
      const u32 values = shared.slot(slot_of_value(d));
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_m64n16k16_async<T, true>(output[d], descriptor_of_rows<128>(values, k * 2048),
                                 descriptor_of_rows<128>(shared.probabilities_of(consumer), k * 32), true);
      if (d % kHalfTiles == kHalfTiles - 1) warpgroup_commit();
    }
    warpgroup_wait<1>();
    __syncwarp();
    if (lane < kHalfTiles) mbarrier_arrive(shared.free(slot_of_value(lane)));
    warpgroup_wait<0>();
    __syncwarp();
    if (lane < kHalfTiles) mbarrier_arrive(shared.free(slot_of_value(kHalfTiles + lane)));
  }

  // Rows past the end of the request may hold NaN. Their probabilities are 0, but 0 x NaN is NaN.
  __device__ __forceinline__ void clear_values_past(int valid) const {
    constexpr int kChunks = 8 * kValueTiles;  // of 16 bytes, of a row
    for (int i = valid * kChunks + threadIdx.x % kWarpgroup; i < kBlockTokens * kChunks; i += kWarpgroup)
      store_shared_zero_16(shared.slot(slot_of_value(i % kChunks / 8)) + (i / kChunks) * 128 + (i % 8) * 16);
    fence_proxy_async_shared();
  }

  __device__ __forceinline__ void mask_scores(const Segment& segment, int block) {
    const int token = block * kBlockTokens + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int limit = segment.tokens - tile.shift_of(p, row_of(i));
      hide_from(scores[4 * (i / 2) + i % 2], scores[4 * (i / 2) + 2 + i % 2], token, limit);
    }
  }

  // Masks the scores of absent rows. The lane that arrives after the block's products loads, as racecheck needs.
  __device__ __forceinline__ void mask_absent(int t) {
    u32 exist = 0;
    if (lane == 0) exist = load_shared_u32(shared.exist(t, warp / 2));
    exist = __shfl_sync(0xffffffffu, exist, 0) >> warp % 2 * 16;
    if ((exist & 0xffff) == 0xffff) return;
    const bool low = exist >> lane / 4 & 1, high = exist >> (lane / 4 + 8) & 1;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (!low) scores[4 * (i / 2) + i % 2] = -kInfinity;
      if (!high) scores[4 * (i / 2) + 2 + i % 2] = -kInfinity;
    }
  }

  // Makes `next` the running maximum, and rescales what was summed so far. It rarely has work.
  __device__ __forceinline__ void rescale(const float (&next)[kOwn]) {
    bool moved = false;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) moved |= next[i] != maximum[i];
    if (!__any_sync(0xffffffffu, moved)) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float factor = exp2_approx(maximum[i] - next[i]);
#pragma unroll
      for (int d = 0; d < kValueTiles; ++d) {
        output[d][4 * (i / 2) + i % 2] *= factor;
        output[d][4 * (i / 2) + 2 + i % 2] *= factor;
      }
      sum[i] *= factor;
      weight[i] *= factor;
      maximum[i] = next[i];
    }
  }

  // Computes the new running maximum: over a thread's two tokens, then its warp's, then all.
  __device__ __forceinline__ void raise_maximum(float (&next)[kOwn]) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) next[i] = fmaxf(scores[4 * (i / 2) + i % 2], scores[4 * (i / 2) + 2 + i % 2]);
    max_over_column(next);
    if (lane < 4) {
#pragma unroll
      for (int i = 0; i < kOwn; i += 2)
        store_shared_float2(shared.warp_maximum(consumer * 4 + warp, row_of(i)), {next[i], next[i + 1]});
    }
    consumer_sync(consumer);
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      float2 highest = {-kInfinity, -kInfinity};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 other = load_shared_float2(shared.warp_maximum(consumer * 4 + w, row_of(i)));
        highest = {fmaxf(highest.x, other.x), fmaxf(highest.y, other.y)};
      }
      next[i] = slacken(highest.x * p.scale_log2, maximum[i]);
      next[i + 1] = slacken(highest.y * p.scale_log2, maximum[i + 1]);
    }
  }

  __device__ __forceinline__ static float slacken(float highest, float maximum) {
    return highest > maximum + kMaximumSlack ? highest : maximum;
  }

  // Turns scores into probabilities relative to the running maximum, and sums them before and after rounding (why
  // both: docs/kernels/mla.md).
  __device__ __forceinline__ void exponentiate() {
#pragma unroll
    for (int i = 0; i < 2 * kOwn; i += 2) {
      const int own = i / 4 * 2;
      const float low = exp2_approx(__fmaf_rn(scores[i], p.scale_log2, -maximum[own]));
      const float high = exp2_approx(__fmaf_rn(scores[i + 1], p.scale_log2, -maximum[own + 1]));
      sum[own] += low;
      sum[own + 1] += high;
      probabilities[i / 2] = pack_pair<T>(low, high);
      const float2 rounded = unpack_pair<T>(probabilities[i / 2]);
      weight[own] += rounded.x;
      weight[own + 1] += rounded.y;
    }
  }

  // Stores the transpose, for all warps of this consumer.
  __device__ __forceinline__ void store_probabilities() const {
    const int tokens = 2 * warp + lane / 8 % 2;  // index of eight tokens
    const int row = lane / 16 * 8 + lane % 8;
    store_matrix_x4_transposed(shared.probabilities_of(consumer) + row * 128 + ((tokens ^ (row & 7)) << 4),
                               probabilities[0], probabilities[1], probabilities[2], probabilities[3]);
    fence_proxy_async_shared();
  }

  // t: blocks of the earlier segments.
  // model: swapped_ring
  __device__ __forceinline__ void compute(const Segment& segment, int t, u32 query_phase) {
    begin();
    mbarrier_wait(shared.query_full(), query_phase, "the query");
#pragma unroll 1
    for (int i = (consumer ^ t) & 1; i < segment.blocks; i += 2) {
      multiply_query();
      const int block = segment.begin + i;
      const int last_token = (block + 1) * kBlockTokens;
      if constexpr (AnyTile::kHasAbsent)
        mask_absent(t + i);
      else if (last_token > segment.tokens - tile.most_shift)
        mask_scores(segment, block);
      float next[kOwn];
      raise_maximum(next);
      rescale(next);
      exponentiate();
      store_probabilities();
      if (!AnyTile::kHasAbsent && last_token > segment.tokens)
        clear_values_past(kBlockTokens + segment.tokens - last_token);
      consumer_sync(consumer);
      multiply_values();
      place.advance(2 * kTiles);
    }
  }

  // Adds up the outputs of both consumers, a half of V each. Then stores out and log-sum-exp, or a partial result.
  __device__ __forceinline__ void finish(const Segment& segment, bool more) {
    leave_sums();
    consumers_sync();  // query and probabilities are no longer used; plant: exchange
#pragma unroll
    for (int i = 0; i < Layout::kExchanged; ++i) {
      const float* const of = output[kHalfTiles + i / 2] + i % 2 * 4;
      store_shared_float4(shared.exchange(consumer, i), {of[0], of[1], of[2], of[3]});
    }
    consumers_sync();
    float lse[kOwn];
    add_up(lse, segment.split());
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.query_free());  // plant: query read
    const bool split = segment.split();
    if (consumer == 0 && warp == 0 && lane < 4) write_lse(segment, lse, split);
    write_output(segment, split);  // plant: piece
    if (split)
      LatentJoiner<T, AnyTile, (kHalfTiles < 4)>(
          p, {shared.words, shared.probabilities, shared.sums, shared.ring, shared.ring + 4 * kJoinSpace}, tile,
          segment)
          .join(more);
  }

  __device__ __forceinline__ void leave_sums() {
#pragma unroll
    for (int step = 4; step < 32; step *= 2)  // not sum_over_column, with which ptxas orders instructions differently
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], step);
        weight[i] += __shfl_xor_sync(0xffffffffu, weight[i], step);
      }
    if (lane >= 4) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      store_shared_float(shared.sum(row_of(i), consumer * 4 + warp), sum[i]);
      store_shared_float(shared.weight(row_of(i), consumer * 4 + warp), weight[i]);
      if (warp == 0) store_shared_float(shared.maximum(consumer, row_of(i)), maximum[i]);
    }
  }

  // Adds the other consumer's output to this consumer's half, and normalises it.
  __device__ __forceinline__ void add_up(float (&lse)[kOwn], bool split) {
    float of_own[kOwn], of_other[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = row_of(i);
      const float other = load_shared_float(shared.maximum(1 - consumer, row));
      const float highest = fmaxf(maximum[i], other);
      const float own_factor = exp2_approx(maximum[i] - highest), other_factor = exp2_approx(other - highest);
      const float total = own_factor * sum_of_four(shared.sum(row, consumer * 4)) +
                          other_factor * sum_of_four(shared.sum(row, (1 - consumer) * 4));
      const float rounded = own_factor * sum_of_four(shared.weight(row, consumer * 4)) +
                            other_factor * sum_of_four(shared.weight(row, (1 - consumer) * 4));
      float inverse = inverse_of_sum(rounded);
      lse[i] = log_sum_exp(highest, total);
      if constexpr (AnyTile::kHasSinks)
        if (!split) take_sink(p, sink_of(p, tile, row), inverse, lse[i]);
      of_own[i] = own_factor * inverse;
      of_other[i] = other_factor * inverse;
    }
#pragma unroll
    for (int i = 0; i < Layout::kExchanged; ++i) {
      float* const of = output[i / 2] + i % 2 * 4;
      const float4 other = load_shared_float4(shared.exchange(1 - consumer, i));
      const int row = i % 2 * 2;
      of[0] = of[0] * of_own[row] + other.x * of_other[row];
      of[1] = of[1] * of_own[row + 1] + other.y * of_other[row + 1];
      of[2] = of[2] * of_own[row] + other.z * of_other[row];
      of[3] = of[3] * of_own[row + 1] + other.w * of_other[row + 1];
    }
  }

  __device__ __forceinline__ static float sum_of_four(u32 source) {
    const float4 v = load_shared_float4(source);
    return (v.x + v.y) + (v.z + v.w);
  }

  __device__ __forceinline__ void write_lse(const Segment& segment, const float (&lse)[kOwn], bool split) const {
    float2* const of_piece = p.partial_rows + piece_index(p, tile, blockIdx.y, segment.slot) * kSwappedRows;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (split)
        of_piece[row_of(i)] = {lse[i], 1.0f};  // plant: partial
      else if (row_of(i) < tile.rows)
        store_lse(p, tile, segment.request, Row(p, tile, row_of(i)), lse[i]);
    }
  }

  // Lanes 4 apart exchange values. Then a thread has the layout of a product with query rows on the M side: columns
  // c, c + 1 of query rows r and r + 8. `as_lane` is the lane of that layout.
  __device__ __forceinline__ void write_output(const Segment& segment, bool split) const {
    const bool odd = lane / 4 % 2;
    const int as_lane = ((lane % 4) * 2 + odd) * 4 + lane / 8, row = as_lane / 4;
    const i64 piece = piece_index(p, tile, blockIdx.y, segment.slot);
    float4 v[2][kHalfTiles];
#pragma unroll
    for (int d = 0; d < kHalfTiles; ++d)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const of = output[d] + 2 * half;  // of two query rows; 4 further on, of the two 8 rows later
        const float a = __shfl_xor_sync(0xffffffffu, odd ? of[0] : of[1], 4);
        const float b = __shfl_xor_sync(0xffffffffu, odd ? of[4] : of[5], 4);
        v[half][d] = odd ? float4{a, of[1], b, of[5]} : float4{of[0], a, of[4], b};
      }
    if (split) {
      constexpr int kUnits = kHalfTiles / 2;  // of this lane
      float4* const to =
          p.partial_out + piece_offset<kValueDim, kShortLines>(p, piece, consumer, 0, kUnits * warp, as_lane);
      if constexpr (kUnits == 1)
        store_short_unit(to, {v[0][0], v[1][0], v[0][1], v[1][1]});
      else
#pragma unroll
        for (int half = 0; half < 2; ++half) store_short_unit(to + half * (kShortLines * 32), v[half]);
    } else {
#pragma unroll
      for (int d = 0; d < kHalfTiles; ++d) {
        const int column = consumer * (kValueDim / 2) + (8 * d + 2 * warp) * 8;
        const float4 &low = v[0][d], &high = v[1][d];
        store_columns<T, 8>(p, tile, segment.request, row, as_lane % 4, column, low.x, low.y, high.x, high.y);
        store_columns<T, 8>(p, tile, segment.request, row + 8, as_lane % 4, column, low.z, low.w, high.z, high.w);
      }
    }
  }
};

}  // namespace cumla::mla
