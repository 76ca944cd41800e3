// SPDX-License-Identifier: Apache-2.0
// The computing role of mla_decode_fp8: one consumer warpgroup, over the blocks of a segment (mla_decode_fp8_finish.cuh has
// what comes behind the last one).
#pragma once
#include "mla_decode_fp8_layout.cuh"
#include "mla_decode_fp8_products.cuh"
#include "ptx/barrier_vote.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"

namespace cumla {

// Probabilities are stored relative to a reference, a power of two, which makes the highest one 2^7 or more when it is set
// and stays until one is beyond float16: so they lose no bits down to 2^-21 of the highest, and are rarely compared with one
// another. Times scales, they have references for each group of columns.
constexpr float kReferenceBelow = 7.0f, kReferenceSlack = 15.0f;
constexpr float kMostProbability = 1e15f;     // before scales
constexpr float kLeastGroupReference = -100;  // above that of the probabilities: scales of 0 set none

// One consumer warpgroup. Thread layout of the scores: tokens 16 warp + lane / 4 and that + 8, in every group of eight query
// rows the two at 2 (lane % 4). Of the output, of 64 columns of V: 16 warp + 2 (lane / 4) and the one behind that.
template <int kQueryRows, bool kGrouped, PageForm kForm, typename AnyTile>
struct Fp8Consumer {
  using Layout = Fp8Layout<kQueryRows, kGrouped>;
  static constexpr int kOwn = kQueryRows / 4;  // query rows of a thread: 8 (i / 2) + 2 (lane % 4) + i % 2
  static constexpr int kSums = 2 * kOwn;       // accumulators of a product
  static constexpr bool kRoomy = kQueryRows == 16;  // registers for what comes next and for two groups of columns at once
  static constexpr int kSteps = kRoomy ? 2 : 1;     // half tiles of V that go to the tensor cores together
  static constexpr int kKeySteps = kGrouped ? 1 : kSteps;  // the same of K; their products are added in turn to so many sums
  static constexpr int kAhead = kRoomy ? 8 : 1;            // half tiles of V that are read ahead
  static constexpr int kWords = kAhead + kSteps;           // and those in registers

  const MlaDecodeFp8Params& params;
  const MlaDecodeParams& p;
  const Layout& shared;
  const AnyTile& tile;
  const int consumer, warp, lane;
  const float kv_scale;              // of all latent columns
  float output[kValueTiles][kSums];  // this consumer's half of V, then the other's
  float scores[kSums];
  float sum[kOwn];  // of the exponentials of this thread's tokens
  float divisor[kOwn], reference[kOwn];  // of a block

  __device__ __forceinline__ Fp8Consumer(const MlaDecodeFp8Params& params, const Layout& shared, const AnyTile& tile,
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

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int d = 0; d < kValueTiles; ++d)
#pragma unroll
      for (int i = 0; i < kSums; ++i) output[d][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum[i] = 0.0f;
    if (threadIdx.x % kWarpgroup < 4) set_references();
    if (Layout::kOfSlot) sync();
  }

  __device__ __forceinline__ void set_references() const {
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

  __device__ __forceinline__ void sync() const {
    if (consumer == 0)
      named_barrier_sync<kConsumerBarrier + 1, kWarpgroup>();
    else
      named_barrier_sync<kConsumerBarrier + 2, kWarpgroup>();
  }

  // Whether any thread of this consumer says so.
  __device__ __forceinline__ bool sync_any(bool vote) const {
    return consumer == 0 ? named_barrier_any<kConsumerBarrier + 1, kWarpgroup>(vote)
                         : named_barrier_any<kConsumerBarrier + 2, kWarpgroup>(vote);
  }

  // Steps of K x query: sums of their products, which are added in turn to kCount of d.
  template <int kCount>
  __device__ __forceinline__ void multiply_keys(float (*d)[kSums], const KeyTile& keys, int half,
                                                u32 (&a)[kKeySteps * kStepRegisters], int query_tile, bool accumulate) const {
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) keys.expand(half + i, a + i * kStepRegisters);
    keep_before_products(a);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < 2 * kKeySteps; ++k)
      wgmma_f16_async(
          d[k % kCount], a + 4 * k,
          descriptor_of_rows<128>(shared.query, query_tile * Layout::kQueryTileBytes + half * 64 + k * 32),
          accumulate || k >= kCount);
    warpgroup_commit();
  }

  // What a row of the query was divided by, times factors of this thread's two tokens, for its accumulators from `at` on.
  template <typename Use>
  __device__ __forceinline__ void for_each_factor(float low, float high, Use use) const {
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      const float2 divisors = kRoomy ? float2{divisor[i], divisor[i + 1]} : load_shared_float2(shared.divisor(row_of(i)));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float of_row = j == 0 ? divisors.x : divisors.y;
        use(2 * i + j, of_row * low);
        use(2 * i + j + 2, of_row * high);
      }
    }
  }

  // Behind a wait for these sums of e4m3 columns: scores += the sums, `low` and `high` being the factors of this thread's two
  // tokens.
  __device__ __forceinline__ void add_to_scores(float (&sums)[kKeySteps][kSums], float low, float high) {
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) keep_behind_wait(sums[i]);
    for_each_factor(low, high, [&](int at, float factor) {
      const float sum = kKeySteps == 1 ? sums[0][at] : sums[0][at] + sums[kKeySteps - 1][at];
      scores[at] = __fmaf_rn(sum, factor, scores[at]);
    });
  }

  // Sums up the RoPE columns in the scores; where there are registers for that, beside what follows: until end_rope.
  __device__ __forceinline__ void multiply_rope(u32 rope, KeyTile& keys, u32 (&a)[2][kKeySteps * kStepRegisters]) {
    if (params.rope_is_fp8) {
      float own[kSums];
      float(&sums)[kSums] = kRoomy ? scores : own;
      if (!kRoomy) keys.load(rope + key_offset());
#pragma unroll
      for (int half = 0; half < 2; half += kKeySteps) multiply_keys<1>(&sums, keys, half, a[half], kRopeTile, half > 0);
      if (kRoomy) return;
      warpgroup_wait<0>();
      scale_fp8_rope(sums);
    } else {
      if constexpr (kForm == kRows) fence_proxy_async_shared();  // the tile was written by threads' own copies
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_bf16_async(scores, descriptor_of_rows<128>(rope, k * 32),
                         descriptor_of_rows<128>(shared.query, kRopeTile * Layout::kQueryTileBytes + k * 32), k > 0);
      warpgroup_commit();
      if (kRoomy) return;
      warpgroup_wait<0>();
      scale_rope();
    }
  }

  // Behind a wait for these sums: they become scores, in base 2.
  __device__ __forceinline__ void scale_fp8_rope(float (&sums)[kSums]) {
    keep_behind_wait(sums);
    const float factor = p.scale_log2 * (kGrouped ? read_kv_scale() : kv_scale);
    for_each_factor(factor, factor, [&](int at, float f) { scores[at] = sums[at] * f; });
  }
  __device__ __forceinline__ void scale_rope() {
    keep_behind_wait(scores);
#pragma unroll
    for (int i = 0; i < kSums; ++i) scores[i] *= p.scale_log2;
  }
  __device__ __forceinline__ void end_rope() {
    if (!kRoomy) return;
    if (params.rope_is_fp8)
      scale_fp8_rope(scores);
    else
      scale_rope();
  }

  // Where this thread's rows of a tile of K begin: eight rows are two periods of the swizzle.
  __device__ __forceinline__ u32 key_offset() const { return raw_offset(warp * 16 + lane / 4, lane % 4); }

  // The scale of this thread's token, or of the one eight behind it, and a group of columns.
  __device__ __forceinline__ float scale_of(u32 slot, int group, int eight) const {
    return load_shared_float(slot + Layout::kScalesOffset + (warp * 16 + lane / 4 + 8 * eight) * 16 + group * 4);
  }

  // Tile of 64 columns of V, counted from this consumer's half.
  __device__ __forceinline__ int value_tile(int d) const { return d ^ consumer * kHalfTiles; }

  // Bytes of V: of each half tile four words, as they are wanted: two tiles' first halves, their second ones, and so on.
  using Words = u32[kWords][4];

  using Fragments = u32[kSteps * kStepRegisters];

  __device__ __forceinline__ static void expand_values(const Words& words, int step, Fragments& a) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) cumla::expand_values(words[(step * kSteps + i) % kWords], a + i * kStepRegisters);
    keep_before_products(a);
  }

  // Where this lane's row of 16 columns lies in this consumer's half of V; 32 rows are periods of the swizzle.
  __device__ __forceinline__ u32 first_value(u32 slot) const {
    return slot + raw_offset(lane, warp) + consumer * kHalfTiles * kRawTileBytes;
  }

  // Half tiles of V from `first` on, `source` being the first_value.
  __device__ __forceinline__ void load_values(u32 source, int first, int count, Words& words) const {
    const u32 other = source + (1 - 2 * consumer) * kHalfTiles * kRawTileBytes;
#pragma unroll
    for (int i = first; i < min(first + count, 2 * kValueTiles); ++i) {
      const int d = i / (2 * kSteps) * kSteps + i % kSteps;
      load_matrix_x4_transposed(words[i % kWords], (d < kHalfTiles ? source : other) + d % kHalfTiles * kRawTileBytes +
                                                       i / kSteps % 2 * 32 * 64);
    }
  }

  __device__ __forceinline__ void load_references() {
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) load_pair(shared.reference(consumer, row_of(i)), reference + i);
  }
  __device__ __forceinline__ void load_divisors() {
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) load_pair(shared.divisor(row_of(i)), divisor + i);
  }
  __device__ __forceinline__ static void load_pair(u32 source, float* to) {
    const float2 v = load_shared_float2(source);
    to[0] = v.x;
    to[1] = v.y;
  }

  // scores = block x query, in base 2. Where there are registers for that, what the softmax and the first products of V read
  // comes meanwhile.
  __device__ __forceinline__ void multiply_query(u32 s, u32 phase, u32 values, Words& words) {
    const u32 slot = shared.slot(s), source = slot + key_offset();
    mbarrier_wait(shared.full(s, 0), phase, "the first half of a KV block");
    constexpr int kTilesOfGroup = kGrouped ? kValueTiles / kScaleGroups : kValueTiles;
    constexpr int kSets = kGrouped && kRoomy ? 2 : 1;  // of sums: those of a group are added to the scores beside the next one
    float sums[kSets][kKeySteps][kSums];
    u32 a[2][kKeySteps * kStepRegisters];
    KeyTile keys, rope;
    if (kRoomy) {
      if (params.rope_is_fp8) rope.load(source + Layout::kRopeOffset);
      keys.load(source);
      wait_for_output();  // of the block before
    }
    multiply_rope(slot + Layout::kRopeOffset, rope, a);
    if (!kRoomy) keys.load(source);
#pragma unroll
    for (int k = 0; k < kValueTiles; ++k) {
      const int group = k / kTilesOfGroup;
      KeyTile next;
      if (k + 1 == kValueTiles / 2) mbarrier_wait(shared.full(s, 1), phase, "the second half of a KV block");
      if (kRoomy && k + 1 < kValueTiles) next.load(source + (k + 1) * kRawTileBytes);
#pragma unroll
      for (int half = 0; half < 2; half += kKeySteps) {
        if (kRoomy || k + half > 0) warpgroup_wait<1>();
        if (kSets == 2 && k % kTilesOfGroup == 0 && half == 1 && group > 0)
          add_group(sums[(group - 1) % kSets], slot, group - 1);
        multiply_keys<kKeySteps>(sums[group % kSets], keys, half, a[kKeySteps == 2 ? (k + 1) % 2 : half], k,
                                 k % kTilesOfGroup + half > 0);
      }
      if (kRoomy && k == (kGrouped ? 0 : kValueTiles - 1)) load_divisors();
      if (kRoomy && k + 1 == kValueTiles) load_references();
      if (kGrouped && (kSets == 1 || k + 1 == kValueTiles) && k % kTilesOfGroup == kTilesOfGroup - 1) {
        warpgroup_wait<0>();
        if (kRoomy) load_values(values, 0, kAhead, words);
        add_group(sums[group % kSets], slot, group);
      }
      if (kRoomy)
        keys = next;
      else if (k + 1 < kValueTiles)
        keys.load(source + (k + 1) * kRawTileBytes);
    }
    if constexpr (!kGrouped) {
      warpgroup_wait<0>();
      if (kRoomy) load_values(values, 0, kAhead, words);
      end_rope();
      add_to_scores(sums[0], p.scale_log2 * kv_scale, p.scale_log2 * kv_scale);
    }
  }

  __device__ __forceinline__ void add_group(float (&sums)[kKeySteps][kSums], u32 slot, int group) {
    if (group == 0) end_rope();
    add_to_scores(sums, p.scale_log2 * scale_of(slot, group, 0), p.scale_log2 * scale_of(slot, group, 1));
  }

  // output += V x probabilities, with fragments of the first step or, of more rows, none yet. Of fewer rows the last products are
  // waited for in the next block. The slot is free behind that, or once all of V is in registers and nothing else lies there.
  __device__ __forceinline__ void multiply_values(u32 s, u32 values, Words& words, Fragments (&a)[2]) {
    if (!kRoomy) load_values(values, 0, kAhead, words);
#pragma unroll
    for (int step = 0; step < 2 * kValueTiles / kSteps; ++step) {
      const int first = step / 2 * kSteps, half = step % 2;
      load_values(values, step * kSteps + kAhead, kSteps, words);
      if (kRoomy && step * kSteps == 2 * kValueTiles - kAhead) give_back(s);
      if (step > 1) warpgroup_wait<1>();
      if (!kRoomy || step > 0) expand_values(words, step, a[half]);
      warpgroup_arrive();
      const int group = kGrouped ? value_tile(first) / (kValueTiles / kScaleGroups) : 0;
      const u32 probabilities = shared.probabilities_of(consumer, group, s);
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
          wgmma_f16_async(output[first + i], a[half] + i * kStepRegisters + 4 * k,
                          descriptor_of_rows<128>(probabilities, half * 64 + k * 32), true);
      warpgroup_commit();
    }
    if (kRoomy) return;
    wait_for_output();
    give_back(s);
  }

  __device__ __forceinline__ void wait_for_output() {
    warpgroup_wait<0>();
#pragma unroll
    for (int d = 0; d < kValueTiles; ++d) keep_behind_wait(output[d]);
  }

  __device__ __forceinline__ void give_back(u32 s) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.free(s));
  }

  // Block `block` of a segment, of a request that has so many tokens from the segment's first one on.
  __device__ __forceinline__ void mask_scores(int block, int tokens) {
    const int token = block * kBlockTokens + warp * 16 + lane / 4;
    const int first = copy_of(row_of(0));  // or else the limits of all rows would be kept in registers over the blocks
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int limit = tokens - tile.shift_of(p, first + 8 * (i / 2) + i % 2);
      if (token >= limit) scores[4 * (i / 2) + i % 2] = -kInfinity;
      if (token + 8 >= limit) scores[4 * (i / 2) + 2 + i % 2] = -kInfinity;
    }
  }

  // The scores of a row, of this thread's token or of the one eight behind it.
  __device__ __forceinline__ float score_of(int i, int eight) const { return scores[4 * (i / 2) + 2 * eight + i % 2]; }

  // Four of a thread's query rows, from `first` on: multiplies what was summed up so far of 128 columns, counted from this
  // consumer's half.
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

  // Their highest values: of those of a thread its warp's, then all.
  __device__ __forceinline__ void find_highest(int first, float (&v)[4]) const {
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = fmaxf(v[k], __shfl_xor_sync(0xffffffffu, v[k], step));
    if (lane < 4) {
#pragma unroll
      for (int k = 0; k < 4; ++k) store_shared_float(shared.warp_maximum(consumer * 4 + warp, row_of(first + k)), v[k]);
    }
    sync();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int w = 0; w < 4; ++w)
        v[k] = fmaxf(v[k], load_shared_float(shared.warp_maximum(consumer * 4 + w, row_of(first + k))));
    sync();
  }

  // Whole numbers: differences of references are exact.
  __device__ __forceinline__ static float raised(float reference, float highest) {
    return highest > reference + kReferenceSlack ? ceilf(highest) - kReferenceBelow : reference;
  }

  // Raises the references where this block needs it, and brings what was summed up to the new ones. What threads read here
  // was written before a meeting, and what they write is read behind another one.
  __device__ __forceinline__ void raise_references(u32 slot) {
#pragma unroll
    for (int first = 0; first < kOwn; first += 4) {
      float highest[4], factor[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) highest[k] = fmaxf(score_of(first + k, 0), score_of(first + k, 1));
      find_highest(first, highest);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float before = load_shared_float(shared.reference(consumer, row_of(first + k)));
        highest[k] = raised(before, highest[k]);
        factor[k] = exp2_approx(before - highest[k]);
        sum[first + k] *= factor[k];
      }
      sync();
      if (threadIdx.x % kWarpgroup < 4) {
#pragma unroll
        for (int k = 0; k < 4; ++k) store_shared_float(shared.reference(consumer, row_of(first + k)), highest[k]);
      }
#pragma unroll
      for (int pair = 0; pair < kScaleGroups; ++pair) {
        if constexpr (kGrouped) raise_group(slot, value_tile(2 * pair) / 2, first, highest, factor);
        rescale(pair, first, factor);
      }
    }
    sync();
  }

  // The same of what is stored for a group of columns.
  __device__ __forceinline__ void raise_group(u32 slot, int group, int first, const float (&reference)[4],
                                              float (&factor)[4]) const {
    const float low = scale_of(slot, group, 0), high = scale_of(slot, group, 1);
    float highest[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      highest[k] = fmaxf(exp2_approx(score_of(first + k, 0) - reference[k]) * low,
                         exp2_approx(score_of(first + k, 1) - reference[k]) * high);
    find_highest(first, highest);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float before = load_shared_float(shared.group_reference(consumer, group, row_of(first + k)));
      highest[k] = fmaxf(raised(before, reference[k] + log2_approx(highest[k])), reference[k] + kLeastGroupReference);
      factor[k] = exp2_approx(before - highest[k]);
    }
    sync();
    if (threadIdx.x % kWarpgroup >= 4) return;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      store_shared_float(shared.group_reference(consumer, group, row_of(first + k)), highest[k]);
      store_shared_float(shared.group_factor(consumer, group, row_of(first + k)), exp2_approx(reference[k] - highest[k]));
    }
  }

  // scores -> probabilities, and, for all warps of this consumer, as float16 and transposed: as they are, or for each group
  // of columns times scales. Tells whether some are too high for their references.
  __device__ __forceinline__ bool store_probabilities(u32 s, float (&p)[kSums]) const {
    const u32 slot = shared.slot(s);
    const int tokens = 2 * warp + lane / 8 % 2;  // eight of them
    const int row = lane / 16 * 8 + lane % 8;
    const u32 place = row * 128 + ((tokens ^ (row & 7)) << 4);
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
#pragma unroll
      for (int j = 0; j < 4; ++j) p[2 * i + j] = exp2_approx(scores[2 * i + j] - reference[i + j % 2]);
    }
    u32 highest = 0;
#pragma unroll
    for (int group = 0; group < (kGrouped ? kScaleGroups : 1); ++group) {
      const u32 to = shared.probabilities_of(consumer, group, s) + place;
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
            v = {v.x * scale * factors.x, v.y * scale * factors.y};  // in this order: 0 times infinity does not come up
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

  // scores -> probabilities for multiply_values, and their sums.
  __device__ __forceinline__ void weigh(u32 s, const Words& words, Fragments& first) {
    float p[kSums];
    // Nobody reads this consumer's probabilities of before, nor RoPE columns. Those of a slot's own were read for the last time
    // two meetings ago.
    if (!Layout::kOfSlot) {
      sync();
      load_references();
    }
    const bool too_high = store_probabilities(s, p);
    if (kRoomy) expand_values(words, 0, first);
    if (sync_any(too_high)) {
      raise_references(shared.slot(s));
      load_references();
      store_probabilities(s, p);
      sync();
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i / 4 * 2 + i % 2] += p[i];
  }

  // Tokens past the end, of a block with so many valid ones, may be anything: their probabilities are 0, and 0 x NaN is NaN.
  __device__ __forceinline__ void clear_past(u32 s, u32 phase, int valid) const {
    const int thread = threadIdx.x % kWarpgroup;
    const u32 slot = shared.slot(s);
    mbarrier_wait(shared.full(s, 0), phase, "the first half of the last KV block");
    mbarrier_wait(shared.full(s, 1), phase, "the second half of the last KV block");
#pragma unroll 1
    for (int i = valid * 4 + thread; i < kBlockTokens * 4; i += kWarpgroup)
#pragma unroll 1
      for (int k = 0; k < kValueTiles; ++k) store_shared_zero_16(slot + k * kRawTileBytes + i * 16);
    if (kGrouped && thread >= valid && thread < kBlockTokens)
      store_shared_zero_16(slot + Layout::kScalesOffset + thread * 16);
    sync();
  }

  // Returns how many blocks there were. t: those of the segments before. Of kRows tokens past the end are zeros already
  // (load_kv_fp8): only their scores need a mask.
  __device__ __forceinline__ int compute(const Segment& segment, int t, u32 query_phase) {
    begin();
    mbarrier_wait(shared.query_full(), query_phase, "the query");
    const int tokens = segment.tokens - segment.begin * kBlockTokens;
#pragma unroll 1
    for (int i = (consumer ^ t) & 1; i < segment.blocks; i += 2) {
      const u32 s = (t + i) % Layout::kSlots, phase = (t + i) / Layout::kSlots & 1;
      if (kForm == kPages && (i + 1) * kBlockTokens > tokens) clear_past(s, phase, tokens - i * kBlockTokens);
      const u32 values = first_value(shared.slot(s));
      Words words;
      multiply_query(s, phase, values, words);
      if ((i + 1) * kBlockTokens > tokens - tile.most_shift) mask_scores(i, tokens);
      Fragments fragments[2];
      weigh(s, words, fragments[0]);
      multiply_values(s, values, words, fragments);
    }
    if (kRoomy) wait_for_output();
    return segment.blocks;
  }
};

}  // namespace cumla
