// SPDX-License-Identifier: Apache-2.0
// The softmax of mla_decode_fp8: scores in registers become probabilities in shared memory, for the product with V,
// and their sums. It raises references if a block needs it.
#pragma once
#include "mla/mla_decode_fp8/layout.cuh"
#include "attend/reduce.cuh"
#include "attend/visible.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace attend;
using namespace ptx;
using namespace split;

// Probabilities are stored relative to a reference, a power of two. Setting it makes the highest probability at least
// 2^7. It stays until a probability overflows float16. So probabilities down to 2^-21 of the highest keep all bits,
// and are rarely compared. With scales, each group of columns has its own reference.
// model: fp8_data
constexpr float kReferenceBelow = 7.0f, kReferenceSlack = 15.0f;
// model: fp8_data
constexpr float kMostProbability = 1e15f;     // before scales
// model: fp8_data
constexpr float kLeastGroupReference = -100;  // relative to that of the probabilities; scales of 0 set no reference

// The state and the softmax of a consumer warpgroup; Fp8Consumer has the products. Scores of a lane:
// rows 16 warp + lane / 4 and 8 more, of the tokens token_at gives; query rows 2 (lane % 4) and 1 more of each eight.
// Output of a lane: columns 16 warp + 2 (lane / 4) and 1 more of each 64 columns of V.
template <int kQueryRows, bool kGrouped, PageForm kForm, typename AnyTile>
struct Fp8Softmax {
  using Layout = Fp8Layout<kQueryRows, kGrouped, kForm, AnyTile::kLatentTiles>;
  static constexpr int kValueTiles = AnyTile::kLatentTiles, kHalfTiles = kValueTiles / 2;
  static_assert(!kGrouped || kValueTiles == 2 * kScaleGroups, "a scale for each 128 columns");
  static constexpr int kOwn = kQueryRows / 4;  // query rows of a thread: 8 (i / 2) + 2 (lane % 4) + i % 2
  static constexpr int kSums = 2 * kOwn;       // accumulators of a product

  const MlaDecodeFp8Params& params;
  const MlaDecodeParams& p;
  const Layout& shared;
  const AnyTile& tile;
  u32 n = 0;  // number of the segment in the part
  const int consumer, warp, lane;
  const float kv_scale;              // of all latent columns
  float output[kValueTiles][kSums];  // this consumer's half of V, then the other's
  float scores[kSums];
  float sum[kOwn];  // of exponentials of this thread's tokens

  __device__ __forceinline__ Fp8Softmax(const MlaDecodeFp8Params& params, const Layout& shared, const AnyTile& tile,
                                        int consumer)
      : params(params),
        p(params.decode),
        shared(shared),
        tile(tile),
        consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        kv_scale(kGrouped ? 1.0f : read_kv_scale()) {}

  __device__ __forceinline__ float read_kv_scale() const {
    return params.kv_scale ? *params.kv_scale : params.kv_scale_value;
  }

  // model: fp8_segments
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int d = 0; d < kValueTiles; ++d)
#pragma unroll
      for (int i = 0; i < kSums; ++i) output[d][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum[i] = 0.0f;
    if (threadIdx.x % kWarpgroup >= 4) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      store_shared_float(shared.reference(consumer, row_of(i)), kLowest);
      if constexpr (kGrouped) {
#pragma unroll
        for (int group = 0; group < kScaleGroups; ++group) {
          store_shared_float(shared.group_reference(consumer, group, row_of(i)), kLowest);
          store_shared_float(shared.group_factor(consumer, group, row_of(i)), 1.0f);
        }
      }
    }
  }

  __device__ __forceinline__ int row_of(int i) const { return 8 * (i / 2) + 2 * (lane % 4) + i % 2; }

  // Returns whether any thread of this consumer votes true.
  // model: fp8_segments
  __device__ __forceinline__ bool sync_any(bool vote) const {
    return consumer == 0 ? named_barrier_any<kConsumerBarrier, kWarpgroup>(vote)
                         : named_barrier_any<kConsumerBarrier + 1, kWarpgroup>(vote);
  }

  // The first token of this thread; the second is eight after it.
  // model: fp8_data
  __device__ __forceinline__ int own_token() const { return token_at(warp * 16 + lane / 4); }

  // The scale of this thread's first or second token, for a group of columns.
  // model: fp8_data
  __device__ __forceinline__ float scale_of(u32 slot, int group, int eight) const {
    return load_shared_float(slot + Layout::kScalesOffset + (own_token() + 8 * eight) * Layout::kNextScales +
                             group * 4);
  }

  // Tile of 64 columns of V, and group of 128, counted from this consumer's half.
  // model: fp8_data
  __device__ __forceinline__ int value_tile(int d) const { return d ^ consumer * kHalfTiles; }
  __device__ __forceinline__ int group_of(int pair) const { return value_tile(2 * pair) / 2; }

  // Masks block `block` of a segment. `tokens`: of the request, from the segment's first one on.
  __device__ __forceinline__ void mask_scores(int block, int tokens) {
    const int token = block * kBlockTokens + own_token();
    const int first = copy_of(row_of(0));  // opaque, or the limits of all rows would occupy registers over the blocks
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int limit = tokens - tile.shift_of(p, first + 8 * (i / 2) + i % 2);
      hide_from(scores[4 * (i / 2) + i % 2], scores[4 * (i / 2) + 2 + i % 2], token, limit);
    }
  }

  // The score of row i and of this thread's first or second token.
  __device__ __forceinline__ float score_of(int i, int eight) const { return scores[4 * (i / 2) + 2 * eight + i % 2]; }

  // Rescales the sums of 128 columns, counted from this consumer's half, for four of a thread's query rows from
  // `first` on.
  __device__ __forceinline__ void rescale(int pair, int first, const float (&factor)[4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int d = 2 * pair; d < 2 * pair + 2; ++d) {
        const int i = first + k;
        output[d][4 * (i / 2) + i % 2] *= factor[k];
        output[d][4 * (i / 2) + 2 + i % 2] *= factor[k];
      }
  }

  // Stores a warp's highest values of one kind, for four query rows.
  __device__ __forceinline__ void leave_highest(int kind, int first, float (&v)[4]) const {
    max_over_column(v);
    if (lane >= 4) return;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      store_shared_float(shared.warp_maximum(kind, consumer * 4 + warp, row_of(first + k)), v[k]);
  }

  // Highest value over all warps, after a barrier.
  __device__ __forceinline__ float highest_of(int kind, int row) const {
    float v = load_shared_float(shared.warp_maximum(kind, consumer * 4, row));
#pragma unroll
    for (int w = 1; w < 4; ++w) v = fmaxf(v, load_shared_float(shared.warp_maximum(kind, consumer * 4 + w, row)));
    return v;
  }

  // References are whole numbers, so their differences are exact.
  __device__ __forceinline__ static float raised(float reference, float highest) {
    return highest > reference + kReferenceSlack ? ceilf(highest) - kReferenceBelow : reference;
  }

  // Raises the references if this block needs it, and rescales the sums. Each segment begins with this. Hazard: a
  // barrier separates each write of shared values from their reads.
  // model: fp8_segments
  __device__ __forceinline__ void raise_references(u32 slot) {
#pragma unroll
    for (int first = 0; first < kOwn; first += 4) {
      float highest[4], factor[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) highest[k] = fmaxf(score_of(first + k, 0), score_of(first + k, 1));
      leave_highest(0, first, highest);
      consumer_sync(consumer);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float before = load_shared_float(shared.reference(consumer, row_of(first + k)));
        highest[k] = raised(before, highest_of(0, row_of(first + k)));
        factor[k] = exp2_approx(before - highest[k]);
        sum[first + k] *= factor[k];
      }
      if constexpr (kGrouped) leave_highest_of_groups(slot, first, highest);
      consumer_sync(consumer);
      if (lane < 4) {
        if constexpr (kGrouped) raise_group(first, highest);
        if (warp == 0) {
#pragma unroll
          for (int k = 0; k < 4; ++k) store_shared_float(shared.reference(consumer, row_of(first + k)), highest[k]);
        }
      }
      if constexpr (kGrouped) consumer_sync(consumer);
#pragma unroll
      for (int pair = 0; pair < kHalfTiles; ++pair) {
        if constexpr (kGrouped) {
#pragma unroll
          for (int k = 0; k < 4; ++k) factor[k] = load_shared_float(group_change(pair, row_of(first + k)));
        }
        rescale(pair, first, factor);
      }
    }
    consumer_sync(consumer);
  }

  // Stores the highest scaled probability of each group of columns, relative to the new references.
  __device__ __forceinline__ void leave_highest_of_groups(u32 slot, int first, const float (&reference)[4]) const {
#pragma unroll 1
    for (int pair = 0; pair < kScaleGroups; ++pair) {
      const float low = scale_of(slot, group_of(pair), 0), high = scale_of(slot, group_of(pair), 1);
      float highest[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        highest[k] = fmaxf(exp2_approx(score_of(first + k, 0) - reference[k]) * low,
                           exp2_approx(score_of(first + k, 1) - reference[k]) * high);
      leave_highest(1 + pair, first, highest);
    }
  }

  // Each warp raises the references of one group of columns.
  __device__ __forceinline__ void raise_group(int first, const float (&reference)[4]) const {
    const int group = group_of(warp);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = row_of(first + k);
      const float before = load_shared_float(shared.group_reference(consumer, group, row));
      const float highest =
          fmaxf(raised(before, reference[k] + log2_approx(highest_of(1 + warp, row))),
                reference[k] + kLeastGroupReference);
      store_shared_float(shared.group_reference(consumer, group, row), highest);
      store_shared_float(shared.group_factor(consumer, group, row), exp2_approx(reference[k] - highest));
      store_shared_float(group_change(warp, row), exp2_approx(before - highest));
    }
  }

  // The factor by which a group's sums change with its reference. It overlaps a highest value that the writing lane
  // has read.
  __device__ __forceinline__ u32 group_change(int pair, int row) const {
    return shared.warp_maximum(1 + pair, consumer * 4, row);
  }

  // Turns scores into probabilities, and stores them transposed as float16 for all warps of this consumer: one tile,
  // or one per group of columns with its scales. Returns true if one overflows its reference.
  // model: fp8_segments, fp8_data
  __device__ __forceinline__ bool store_probabilities(u32 slot, float (&p)[kSums]) const {
    const int tokens = 2 * warp + lane / 8 % 2;  // index of eight tokens
    const int row = lane / 16 * 8 + lane % 8;
    const u32 place = row * 128 + ((tokens ^ (row & 7)) << 4);
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      const float2 references = load_shared_float2(shared.reference(consumer, row_of(i)));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        p[2 * i + j] = exp2_approx(scores[2 * i + j] - (j % 2 == 0 ? references.x : references.y));
    }
    u32 highest = 0;
#pragma unroll
    for (int group = 0; group < (kGrouped ? kScaleGroups : 1); ++group) {
      const u32 to = shared.probabilities_of(consumer, group, slot) + place;
      const float low = kGrouped ? scale_of(slot, group, 0) : 1.0f, high = kGrouped ? scale_of(slot, group, 1) : 1.0f;
#pragma unroll
      for (int i = 0; i < kSums; i += 8) {
        u32 packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float2 v = {p[i + 2 * j], p[i + 2 * j + 1]};
          if constexpr (kGrouped) {
            const float2 factors = load_shared_float2(shared.group_factor(consumer, group, row_of(i / 2 + j / 2 * 2)));
            const float scale = j % 2 == 0 ? low : high;
            v = {v.x * scale * factors.x, v.y * scale * factors.y};  // in this order 0 x infinity cannot arise
          }
          packed[j] = pack_pair<Fp16>(v.x, v.y);
          highest = highest_f16x2(highest, packed[j]);
        }
        store_matrix_x4_transposed(to + i / 8 * 16 * 128, packed[0], packed[1], packed[2], packed[3]);
      }
    }
    constexpr u32 kHalfInfinity = 0x7c00;
    bool too_high = (highest & 0x7fff) >= kHalfInfinity || (highest >> 16) >= kHalfInfinity;
    if constexpr (kGrouped) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) too_high |= p[i] > kMostProbability;
    }
    fence_proxy_async_shared();
    return too_high;
  }

  // Turns scores into probabilities for multiply_values, and adds them up. `begins`: this consumer's first block of a
  // segment, which always raises references.
  // model: fp8_segments
  __device__ __forceinline__ void weigh(u32 slot, bool begins) {
    float p[kSums];
    consumer_sync(consumer);  // earlier probabilities and RoPE columns are no longer read
    if (begins || sync_any(store_probabilities(slot, p))) {
      raise_references(slot);
      store_probabilities(slot, p);
      consumer_sync(consumer);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i / 4 * 2 + i % 2] += p[i];
  }
};

}  // namespace cumla::mla
