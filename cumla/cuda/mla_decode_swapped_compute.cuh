// SPDX-License-Identifier: Apache-2.0
// The computing role of mla_decode_swapped: one consumer warpgroup, from its first scores to the stored output.
#pragma once
#include "mla_decode_join.cuh"
#include "mla_decode_swapped_layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"

namespace cumla {

// One consumer warpgroup. Thread layout of the accumulators: tokens, or columns of V, 16 warp + lane / 4 and that + 8; in
// every group of eight query rows the two at 2 (lane % 4).
template <typename T, int kRows>
struct SwappedConsumer {
  static constexpr int kGroups8 = kRows / 8;   // of query rows
  static constexpr int kOwn = 2 * kGroups8;    // query rows of a thread: 8 (i / 2) + 2 (lane % 4) + i % 2

  const MlaDecodeParams& p;
  const SwappedLayout<kRows>& shared;
  const Tile& tile;
  const int consumer, warp, lane;
  RingPlace<kRows> place;       // of the block to be computed next
  int t = 0;                    // blocks before it, of all segments
  float output[kHalfTiles][4 * kGroups8];
  float scores[4 * kGroups8];
  u32 probabilities[2 * kGroups8];
  float maximum[kOwn];          // base-2 running maximum
  float sum[kOwn];              // of the exponentials of this thread's tokens, for the log-sum-exp,
  float weight[kOwn];           // and of the 16-bit probabilities made of them, which normalise the output

  __device__ __forceinline__ SwappedConsumer(const MlaDecodeParams& p, const SwappedLayout<kRows>& shared,
                                             const Tile& tile, int consumer)
      : p(p),
        shared(shared),
        tile(tile),
        consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int d = 0; d < kHalfTiles; ++d)
#pragma unroll
      for (int i = 0; i < 4 * kGroups8; ++i) output[d][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      maximum[i] = kLowest;
      sum[i] = 0.0f;
      weight[i] = 0.0f;
    }
  }

  __device__ __forceinline__ int row_of(int i) const { return 8 * (i / 2) + 2 * (lane % 4) + i % 2; }

  __device__ __forceinline__ void sync() const {
    if (consumer == 0)
      named_barrier_sync<kConsumerBarrier + 1, kWarpgroup>();
    else
      named_barrier_sync<kConsumerBarrier + 2, kWarpgroup>();
  }

  // scores = block x query, complete.
  __device__ __forceinline__ void multiply_query() {
    RingPlace<kRows> at = place;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      mbarrier_wait(shared.full(at.slot), at.phase, "a KV tile");
      const u32 query = shared.query + tile_in_order(0, i) * shared.kQueryTileBytes;
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_m64_async<T, false>(scores, matrix_descriptor(shared.slot(at.slot) + k * 32, 0, 1024),
                                  matrix_descriptor(query + k * 32, 0, 1024), i + k > 0);
      at.advance(1);
    }
    warpgroup_commit();
    warpgroup_wait<0>();
  }

  // output += this consumer's half of V x the probabilities of the block's owner; then the half is free.
  __device__ __forceinline__ void multiply_values(int owner) {
    warpgroup_arrive();
#pragma unroll
    for (int d = 0; d < kHalfTiles; ++d) {
      const u32 values = shared.slot(slot_of_value(d));
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_m64_async<T, true>(output[d], matrix_descriptor(values + k * 2048, 0, 1024),
                                 matrix_descriptor(shared.probabilities_of(owner) + k * 32, 0, 1024), true);
    }
    warpgroup_commit();
    warpgroup_wait<0>();
    __syncwarp();
    if (lane < kHalfTiles) mbarrier_arrive(shared.free(slot_of_value(lane)));
  }

  // Slot of 64 columns of this consumer's half of V: behind RoPE and perhaps the other half.
  __device__ __forceinline__ u32 slot_of_value(int d) const { return place.ahead(1 + consumer * kHalfTiles + d).slot; }

  // Rows past the end of the sequence may hold NaN: their probabilities are 0, and 0 x NaN is NaN.
  __device__ __forceinline__ void clear_values_past(int valid) const {
    for (int i = valid * 32 + threadIdx.x % kWarpgroup; i < kBlockTokens * 32; i += kWarpgroup)
      store_shared_zero_16(shared.slot(slot_of_value(i % 32 / 8)) + (i / 32) * 128 + (i % 8) * 16);
    fence_proxy_async_shared();
    sync();
  }

  __device__ __forceinline__ void mask_scores(const Segment& segment, int block) {
    const int token = block * kBlockTokens + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int limit = segment.tokens - tile.shift_of(p, row_of(i));
      if (token >= limit) scores[4 * (i / 2) + i % 2] = -kInfinity;
      if (token + 8 >= limit) scores[4 * (i / 2) + 2 + i % 2] = -kInfinity;
    }
  }

  // The running maximum becomes `next`: what was summed up so far is brought to it. Rarely anything to do.
  __device__ __forceinline__ void rescale(const float (&next)[kOwn]) {
    bool moved = false;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) moved |= next[i] != maximum[i];
    if (!__any_sync(0xffffffffu, moved)) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float factor = exp2_approx(maximum[i] - next[i]);
#pragma unroll
      for (int d = 0; d < kHalfTiles; ++d) {
        output[d][4 * (i / 2) + i % 2] *= factor;
        output[d][4 * (i / 2) + 2 + i % 2] *= factor;
      }
      sum[i] *= factor;
      weight[i] *= factor;
      maximum[i] = next[i];
    }
  }

  // The running maximum of the query rows with this block's scores: over a thread's two tokens, its warp's, all.
  __device__ __forceinline__ void raise_maximum(float (&next)[kOwn]) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) next[i] = fmaxf(scores[4 * (i / 2) + i % 2], scores[4 * (i / 2) + 2 + i % 2]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
#pragma unroll
      for (int i = 0; i < kOwn; ++i) next[i] = fmaxf(next[i], __shfl_xor_sync(0xffffffffu, next[i], step));
    if (lane < 4) {
#pragma unroll
      for (int i = 0; i < kOwn; i += 2)
        store_shared_float2(shared.warp_maximum(consumer, warp, row_of(i)), {next[i], next[i + 1]});
    }
    sync();
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      float2 highest = {-kInfinity, -kInfinity};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 other = load_shared_float2(shared.warp_maximum(consumer, w, row_of(i)));
        highest = {fmaxf(highest.x, other.x), fmaxf(highest.y, other.y)};
      }
      next[i] = slacken(highest.x * p.scale_log2, maximum[i]);
      next[i + 1] = slacken(highest.y * p.scale_log2, maximum[i + 1]);
    }
  }

  __device__ __forceinline__ static float slacken(float highest, float maximum) {
    return highest > maximum + kMaximumSlack ? highest : maximum;
  }

  // scores -> probabilities relative to next, and their sums before and after rounding.
  __device__ __forceinline__ void exponentiate(const float (&next)[kOwn], float (&block_sum)[kOwn],
                                               float (&block_weight)[kOwn]) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) block_sum[i] = block_weight[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kGroups8; i += 2) {
      const int own = i / 4 * 2;
      const float low = exp2_approx(__fmaf_rn(scores[i], p.scale_log2, -next[own]));
      const float high = exp2_approx(__fmaf_rn(scores[i + 1], p.scale_log2, -next[own + 1]));
      block_sum[own] += low;
      block_sum[own + 1] += high;
      probabilities[i / 2] = pack_pair<T>(low, high);
      const float2 rounded = unpack_pair<T>(probabilities[i / 2]);
      block_weight[own] += rounded.x;
      block_weight[own + 1] += rounded.y;
    }
  }

  // Hands probabilities, transposed, and running maximum to both consumers.
  __device__ __forceinline__ void publish(const float (&next)[kOwn]) {
    const u32 base = shared.probabilities_of(consumer);
    const int token_chunk = 2 * warp + lane / 8 % 2;
#pragma unroll
    for (int g = 0; g < kGroups8; g += 2) {
      const int row = 8 * g + lane / 16 * 8 + lane % 8;
      store_matrix_x4_transposed(base + row * 128 + ((token_chunk ^ (row & 7)) << 4), probabilities[2 * g],
                                 probabilities[2 * g + 1], probabilities[2 * g + 2], probabilities[2 * g + 3]);
    }
    if (warp == 0 && lane < 4) {
#pragma unroll
      for (int i = 0; i < kOwn; i += 2)
        store_shared_float2(shared.maximum(consumer, row_of(i)), {next[i], next[i + 1]});
    }
    // Every thread that stored a maximum arrives itself: racecheck does not see an order that goes through another lane.
    fence_proxy_async_shared();
    __syncwarp();
    if (lane < 4) mbarrier_arrive(shared.probabilities_full(consumer));
  }

  // Waits for the other consumer's probabilities of this block and takes over its running maximum. The other one has seen
  // all tiles of the block arrive before, so that they are ours to read, too.
  __device__ __forceinline__ void adopt() {
    mbarrier_wait(shared.probabilities_full(1 - consumer), (t / 2) & 1, "the other consumer's probabilities");
    // Read by lanes that arrive later, for the sake of racecheck, and shared with the others.
    float next[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      float2 pair = {0.0f, 0.0f};
      if (lane < 4) pair = load_shared_float2(shared.maximum(1 - consumer, row_of(i)));
      next[i] = __shfl_sync(0xffffffffu, pair.x, lane % 4);
      next[i + 1] = __shfl_sync(0xffffffffu, pair.y, lane % 4);
    }
    rescale(next);
  }

  __device__ __forceinline__ void score_block(const Segment& segment, int i) {
    multiply_query();
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(shared.free(place.slot));  // the RoPE tile
      if (i + 2 >= segment.blocks) mbarrier_arrive(shared.query_free());
    }
    const int block = segment.begin + i;
    if ((block + 1) * kBlockTokens > segment.tokens - tile.most_shift) mask_scores(segment, block);
    float next[kOwn], block_sum[kOwn], block_weight[kOwn];
    raise_maximum(next);
    exponentiate(next, block_sum, block_weight);
    publish(next);
    rescale(next);
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      sum[own] += block_sum[own];
      weight[own] += block_weight[own];
    }
    mbarrier_wait(shared.probabilities_full(consumer), (t / 2) & 1, "the other warps' probabilities");
  }

  __device__ __forceinline__ void compute(const Segment& segment, u32 query_phase) {
    begin();
    const int first = (consumer ^ t) & 1;  // own block
    // Also without a block to score: or one loader warp could run a segment ahead of the other.
    mbarrier_wait(shared.query_full(), query_phase, "the query");
    if (first >= segment.blocks) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.query_free());
    }
#pragma unroll 1
    for (int i = 0; i < segment.blocks; ++i) {
      const bool own = i % 2 == first;
      if (own)
        score_block(segment, i);
      else
        adopt();
      const int valid = segment.tokens - (segment.begin + i) * kBlockTokens;
      if (valid < kBlockTokens) clear_values_past(valid);
      multiply_values(own ? consumer : 1 - consumer);
      place.advance(kTiles);
      ++t;
    }
  }

  // Sums of all warps; then out and log-sum-exp, or a piece of them.
  __device__ __forceinline__ void finish(const Segment& segment, bool more) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], step);
        weight[i] += __shfl_xor_sync(0xffffffffu, weight[i], step);
      }
    if (lane < 4) {
#pragma unroll
      for (int i = 0; i < kOwn; i += 2) {
        store_shared_float2(shared.sum(consumer * 4 + warp, row_of(i)), {sum[i], sum[i + 1]});
        store_shared_float2(shared.weight(consumer * 4 + warp, row_of(i)), {weight[i], weight[i + 1]});
      }
    }
    consumers_sync();
    float inverse[kOwn], lse[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      float2 total = {0.0f, 0.0f}, rounded = {0.0f, 0.0f};
#pragma unroll 1
      for (int w = 0; w < shared.kWarps; ++w) {
        const float2 of_warp = load_shared_float2(shared.sum(w, row_of(i)));
        const float2 weight_of_warp = load_shared_float2(shared.weight(w, row_of(i)));
        total = {total.x + of_warp.x, total.y + of_warp.y};
        rounded = {rounded.x + weight_of_warp.x, rounded.y + weight_of_warp.y};
      }
      inverse[i] = rounded.x == 0.0f ? 0.0f : 1.0f / rounded.x;
      inverse[i + 1] = rounded.y == 0.0f ? 0.0f : 1.0f / rounded.y;
      lse[i] = total.x == 0.0f ? -kInfinity : maximum[i] + log2_approx(total.x);
      lse[i + 1] = total.y == 0.0f ? -kInfinity : maximum[i + 1] + log2_approx(total.y);
    }
    consumers_sync();  // the next segment, and the joining, write there
    const bool split = segment.split();
    if (consumer == 0 && warp == 0 && lane < 4) write_lse(segment, lse, split);
    write_output(segment, inverse, split);
    if (split) Joiner<T>(p, {shared.words, shared.probabilities, shared.sums}, tile, segment).join(more);
  }

  __device__ __forceinline__ void write_lse(const Segment& segment, const float (&lse)[kOwn], bool split) const {
    float* const of_piece = p.partial_lse + piece_index(p, tile, blockIdx.y, segment.slot) * kRows;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (split)
        of_piece[row_of(i)] = lse[i];
      else if (row_of(i) < tile.rows)
        store_lse(p, segment.request, Row(p, tile, row_of(i)), lse[i]);
    }
  }

  // Lanes 4 apart trade values, after which a thread has what it would have of a product with the query rows on the M side:
  // columns c, c + 1 of query rows r and r + 8. It then stands for another lane of that layout.
  __device__ __forceinline__ void write_output(const Segment& segment, const float (&inverse)[kOwn], bool split) const {
    const bool odd = lane / 4 % 2;
    const int as_lane = ((lane % 4) * 2 + odd) * 4 + lane / 8;
    const i64 piece = piece_index(p, tile, blockIdx.y, segment.slot);
#pragma unroll
    for (int group = 0; group < kRows / kRowGroup; ++group)
#pragma unroll
      for (int d = 0; d < kHalfTiles; ++d) {
        float4 v[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = 4 * group;  // of the four query rows: two, and two 8 later
          const float* const of = output[d] + 8 * group + 2 * half;
          const float a0 = of[0] * inverse[i], a1 = of[1] * inverse[i + 1];
          const float b0 = of[4] * inverse[i + 2], b1 = of[5] * inverse[i + 3];
          const float a = __shfl_xor_sync(0xffffffffu, odd ? a0 : a1, 4);
          const float b = __shfl_xor_sync(0xffffffffu, odd ? b0 : b1, 4);
          v[half] = odd ? float4{a, a1, b, b1} : float4{a0, a, b0, b};
        }
        const int columns = 8 * d + 2 * warp;  // groups of eight before these two
        if (split) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            store_global_float4(p.partial_out + piece_offset(p, piece, consumer, group, columns + half, as_lane), v[half].x,
                                v[half].y, v[half].z, v[half].w);
        } else {
          const int row = group * kRowGroup + as_lane / 4, column = consumer * 256 + columns * 8;
          store_columns<T, 8>(p, tile, segment.request, row, as_lane % 4, column, v[0].x, v[0].y, v[1].x, v[1].y);
          store_columns<T, 8>(p, tile, segment.request, row + 8, as_lane % 4, column, v[0].z, v[0].w, v[1].z, v[1].w);
        }
      }
  }
};

}  // namespace cumla
