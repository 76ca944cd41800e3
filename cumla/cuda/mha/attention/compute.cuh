// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of attention: products and softmax of its blocks. finish.cuh beside it ends a row tile.
#pragma once
#include "mha/attention/bias.cuh"
#include "mha/attention/elements.cuh"
#include "mha/attention/layout.cuh"
#include "mha/attention/lists.cuh"
#include "mha/attention/mask.cuh"
#include "mha/attention/pairs.cuh"
#include "mha/attention/shared.cuh"
#include "attend/reduce.cuh"
#include "attend/visible.cuh"
#include "split/join.cuh"
#include "split/output.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mha {

using namespace attend;
using namespace ptx;
using namespace split;

constexpr int kConsumerBarrier = kConsumersBarrier + 1;

// One consumer warpgroup. A lane has rows 16 warp + lane / 4 and 8 more, columns 2 (lane % 4) and 1 more of each
// eight. kCopied: threads copied the tiles, not TMA. kScaled: keys and values have scales.
template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled, typename Params>
struct Consumer {
  using Tile = TileOf<Params>;
  using Layout = SharedLayout<kKeyTiles, kValueTiles, kScaled, kIsPaired<Params>>;
  using Value = typename TypeIf<kScaled, Fp16, T>::Type;  // type of values and of probabilities
  static constexpr bool kDivided = Layout::kDivided, kPaired = kIsPaired<Params>;
  // Groups of eight value columns
  static constexpr int kHalf = kValueTiles * 4, kGroups = kDivided ? kHalf : 2 * kHalf;
  static constexpr bool kFew = kIsFew<Params>;
  static constexpr int kRows = kFew ? 1 : 2;                  // of a thread
  static constexpr bool kSkipsRows = kGroups <= 16 || kFew;  // registers suffice for it
  static constexpr int kOwnTiles = kGroups / 8;  // value tiles that this consumer multiplies
  static constexpr bool kLoadsElements = kHasElements<Params> && !kScaled && kGroups <= 16;  // before the product
  using BlockElements = typename TypeIf<kLoadsElements, Elements, Nothing>::Type;
  // When a tile begins; others when it ends.
  static constexpr bool kLoadsSinks = (kIsLean<Params> || (kFew && kHasBias<Params>)) && kSkipsRows;

  const CommonOf<Params>& p;
  const Params& all_params;
  const Layout& shared;
  const Tile& tile;
  const int consumer, warp, lane, row;
  float output[kGroups * 4];
  float scores[32];
  u32 probabilities[16];
  float maximum[2], sum[2], weight[2];
  Seen seen[2], seen_by_all;
  int own[2];      // with lists: the query tokens of this thread's rows within the tile
  u32 listed[2];   // and the keys of a block that they see
  MaskOf<Params> mask;
  typename TypeIf<kLoadsElements, LoadedBias, RowBias<Params>>::Type bias[2];
  typename TypeIf<kLoadsSinks, float, Nothing>::Type natural_sink[2];
  float key_factor, value_factor;  // kScaled: factor of scores (base 2) or of the argument of the cap; factor of values

  __device__ __forceinline__ Consumer(const Params& p, const Layout& shared, const Tile& tile, int consumer)
      : p(p), all_params(p), shared(shared), tile(tile), consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        row(warp * 16 + lane / 4) {}

  // True if the warp has row r of a thread's two rows. Results of other rows are discarded.
  __device__ __forceinline__ bool has_rows(int r) const {
    return r < kRows && (!kSkipsRows || tile.rows > warp * 16 + 8 * r);
  }

  __device__ __forceinline__ void arrive(u32 barrier) const {  // a lane per warp
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  }

  // Base-2 factor of a product of query and key. With a cap, p.scale_log2 is the factor of capped scores.
  __device__ __forceinline__ float score_factor() const {
    return kScaled && p.to_softcap == 0.0f ? key_factor : p.scale_log2;
  }
  // The same once the bias, which is in base 2, has been added.
  __device__ __forceinline__ float biased_factor() const { return kHasBias<Params> ? 1.0f : score_factor(); }
  __device__ __forceinline__ float cap_factor() const { return kScaled ? key_factor : p.to_softcap; }

  __device__ __forceinline__ void begin(const Segment& segment) {
#pragma unroll
    for (int i = 0; i < kGroups * 4; ++i) output[i] = 0.0f;
    if constexpr (kScaled) {
      const float key_scale = p.key_scale.of(request_of(p, tile), tile.index);
      const float factor = (p.to_softcap == 0.0f ? p.scale_log2 : p.to_softcap) * key_scale;
      key_factor = fminf(fmaxf(factor, kMinFactor), kMaxFactor);
      value_factor = p.value_scale.of(request_of(p, tile), tile.index);
    }
    if constexpr (!kHasMask<Params> && !kHasLists<Params>) {
      // The first row has the least end, the last row the greatest beginning.
      seen_by_all = {seen_by(p, tile, segment.tokens, kRowTile - 1).first, seen_by(p, tile, segment.tokens, 0).end};
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      maximum[r] = kLowest;
      sum[r] = weight[r] = 0.0f;
      if constexpr (kHasLists<Params>)
        own[r] = token_in_tile(p, tile, row + 8 * r);
      else if constexpr (kHasMask<Params>)
        seen[r] = interval_of(all_params, tile, mask.of, own_token(p, tile, row + 8 * r));
      else
        seen[r] = seen_by(p, tile, segment.tokens, row + 8 * r);
      if constexpr (kHasBias<Params>) bias[r].begin(all_params, tile, segment.tokens, row + 8 * r);
      if constexpr (kLoadsElements) bias[r].look_beyond();
      if constexpr (kLoadsSinks) natural_sink[r] = natural_sink_of(p, tile, segment, row + 8 * r);
    }
  }

  __device__ __forceinline__ void multiply_query(int stage) {
    warpgroup_arrive();
#pragma unroll
    for (int column = 0; column < kKeyTiles; ++column)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_m64n64k16_async<T>(
            scores, descriptor_of_rows<128>(for_descriptor(own_query()), column * kTileBytes + k * 32),
            descriptor_of_rows<128>(for_descriptor(own_keys(stage)), column * Layout::kTileStep + k * 32),
            column + k > 0);
    warpgroup_commit();
    warpgroup_wait<0>();
    keep_behind_wait(scores);
  }

  __device__ __forceinline__ void multiply_values(int stage) {
    keep_before_products(probabilities);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_values_async<Value>(output, probabilities + 4 * k,
                               descriptor_of_rows<128, Layout::kTileStep>(for_descriptor(own_values(stage)), k * 2048));
    warpgroup_commit();
    warpgroup_wait<0>();
    keep_behind_wait(output);
  }

  // Without the CTA's rank in its cluster, which is in addresses from bit 24 on.
  __device__ __forceinline__ u32 for_descriptor(u32 address) const {
    return kPaired ? address & 0xffffff : address;
  }
  __device__ __forceinline__ u32 own_query() const {
    return shared.query + (kPaired ? consumer * Layout::kKeyBytes : 0);
  }
  __device__ __forceinline__ u32 own_keys(int stage) const {
    return shared.keys(stage) + (kPaired ? consumer * kTileBytes : 0);
  }
  __device__ __forceinline__ u32 own_values(int stage) const {
    return shared.values(stage) + (kPaired ? consumer * kTileBytes : kDivided ? consumer * kOwnTiles * kTileBytes : 0);
  }

  // The same for rows that no query of the tile sees.
  __device__ __forceinline__ void clear_unseen(int stage, int block) const {
    const int begin = block * kBlockTokens;
    if (mask.hull.some_see(mask.of, begin, kBlockTokens)) return;
    constexpr int kChunks = kOwnTiles * 4;  // of a thread: half a row
    const int key = threadIdx.x % kWarpgroup / 2, first = threadIdx.x % 2 * kChunks;
    if (!is_seen(all_params, tile, mask.of, mask.hull, begin + key))
#pragma unroll 4
      for (int i = first; i < first + kChunks; ++i)
        store_shared_zero_16(own_values(stage) + i / 8 * Layout::kTileStep + key * 128 + i % 8 * 16);
    meet();
  }

  // Rows past the end of the request, or before all windows, may hold NaN. Their probabilities are 0, but 0 x NaN is
  // NaN.
  __device__ __forceinline__ void clear_values(int stage, int first, int end) const {
    constexpr int kChunks = kOwnTiles * 8;
    for (int i = first * kChunks + threadIdx.x % kWarpgroup; i < end * kChunks; i += kWarpgroup)
      store_shared_zero_16(own_values(stage) + (i % kChunks / 8) * Layout::kTileStep + (i / kChunks) * 128 +
                           (i % 8) * 16);
    meet();
  }

  // The consumer's threads have cleared rows.
  __device__ __forceinline__ void meet() const {
    fence_proxy_async_shared();
    if (consumer == 0)
      named_barrier_sync<kConsumerBarrier, kWarpgroup>();
    else
      named_barrier_sync<kConsumerBarrier + 1, kWarpgroup>();
  }

  // The remaining factor is scale_log2, which is softcap * log2(e) with a cap.
  __device__ __forceinline__ void cap_scores() {
    if (kFew && kHasBias<Params>) return;  // no call has both a bias and a cap
    if (p.to_softcap == 0.0f) return;
#pragma unroll
    for (int i = 0; i < 32; ++i) scores[i] = tanh_of(scores[i] * cap_factor());
  }

  // Reads what the rows see of a block. True if no row of this warp sees a key.
  __device__ __forceinline__ bool look_at_list(const uint4& of_tokens) {
#pragma unroll
    for (int r = 0; r < 2; ++r) listed[r] = seen_by_token(of_tokens, own[r]);
    return __all_sync(0xffffffffu, (listed[0] | listed[1]) == 0) != 0;
  }

  __device__ __forceinline__ void mask_scores(int block) {
    const int begin = block * kBlockTokens;
    if constexpr (kHasLists<Params>) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (listed[r] == kUnit) continue;
        hide_unset(scores, r, keys_before(listed[r]), lane);
      }
      return;
    }
    if constexpr (kHasMask<Params>) {
      if (mask.hull.all_see(mask.of, begin, kBlockTokens)) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const i64 query = tile.q_begin + own_token(p, tile, row + 8 * r);
        hide_unset(scores, r, visible_keys(all_params, mask.of, seen[r], query, begin), lane);
      }
      return;
    }
    if (begin + kBlockTokens <= seen_by_all.end && begin >= seen_by_all.first) return;
    if constexpr (kFew) {
      hide_few(begin + lane % 4 * 2);
      return;
    }
    const attend::Seen of_rows[2] = {{seen[0].first, seen[0].end}, {seen[1].first, seen[1].end}};
    hide_outside(scores, begin + (lane % 4) * 2, of_rows);
  }

  __device__ __forceinline__ void hide_few(int column) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int key = column + i / 2 * 8 + i % 2;
      if (key < seen[0].first || key >= seen[0].end) scores[i / 2 * 4 + i % 2] = -kInfinity;
    }
  }

  // Scales the scores, and adds the bias. Scores are masked afterwards: a bias of what is not seen may be NaN.
  __device__ __forceinline__ void add_bias(int block, const BlockElements (&elements)[2]) {
    if constexpr (kHasBias<Params>) {
      const int first = block * kBlockTokens + lane % 4 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!kScaled && !has_rows(r)) continue;
        const auto score = [&](int i) -> float& { return scores[i / 2 * 4 + 2 * r + i % 2]; };
        if constexpr (kLoadsElements)
          bias[r].add(score, score_factor(), block, elements[r]);
        else
          bias[r].template add<kScaled>(score, score_factor(), bias[r].from(first));
      }
    }
  }

  // Loads the elements of a table for a block, while its keys are on their way.
  __device__ __forceinline__ void load_elements(int block, BlockElements (&elements)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (has_rows(r)) bias[r].load(block, block * kBlockTokens + lane % 4 * 2, elements[r]);
  }

  // Turns the scores of kOf of the two rows into weights.
  template <int kOf>
  __device__ __forceinline__ void weigh() {
    raise_maximum<kOf>();
    exponentiate<kOf>();
  }

  template <int kOf>
  __device__ __forceinline__ void raise_maximum() {
    float next[kOf], factor[kOf];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < kOf; ++r) {
      next[r] = scores[2 * r];
#pragma unroll
      for (int j = 0; j < 8; ++j) next[r] = fmaxf(next[r], fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      next[r] *= biased_factor();
      next[r] = max_of_quad(next[r]);
      if (next[r] <= maximum[r] + kMaximumSlack) next[r] = maximum[r];
      grown |= next[r] != maximum[r];
    }
    if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
    for (int r = 0; r < kOf; ++r) {
      factor[r] = exp2_approx(maximum[r] - next[r]);
#pragma unroll
      for (int i = 2 * r; i < kGroups * 4; i += 4) {
        output[i] *= factor[r];
        output[i + 1] *= factor[r];
      }
      sum[r] *= factor[r];
      weight[r] *= factor[r];
      maximum[r] = next[r];
    }
  }

  template <int kOf>
  __device__ __forceinline__ void exponentiate() {
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int r = i >> 1 & 1;
      if (r >= kOf) continue;
      const float low = exp2_approx(__fmaf_rn(scores[i], biased_factor(), -maximum[r]));
      const float high = exp2_approx(__fmaf_rn(scores[i + 1], biased_factor(), -maximum[r]));
      sum[r] += low + high;
      probabilities[i / 2] = pack_pair<Value>(low, high);
      weight[r] += sum_of_pair<Value>(probabilities[i / 2]);
    }
  }

  __device__ __forceinline__ void compute(const Segment& segment, int t, u32 query_phase) {
    begin(segment);
    mbarrier_wait(shared.query_full(), query_phase, "the query");
    fence_proxy_async_shared();
#pragma unroll 1
    for (int i = Layout::kSeesAll ? 0 : (consumer ^ t) & 1; i < segment.blocks; i += Layout::kSeesAll ? 1 : 2) {
      const int stage = (t + i) % Layout::kStages, phase = (t + i) / Layout::kStages & 1;
      uint4 of_tokens;
      if constexpr (kHasLists<Params>) of_tokens = seen_of(all_params, tile.pages, i, segment.tokens);
      BlockElements elements[2];
      if constexpr (kLoadsElements) load_elements(segment.begin + i, elements);
      mbarrier_wait(shared.keys_full(stage), phase, "keys");
      if constexpr (kCopied) fence_proxy_async_shared();
      multiply_query(stage);
      arrive(shared.keys_free(stage));
      cap_scores();
      bool is_hidden = false;
      if constexpr (kHasLists<Params>) is_hidden = look_at_list(of_tokens);
      if (is_hidden) {
#pragma unroll
        for (u32& x : probabilities) x = 0;
      } else if (has_rows(0)) {
        add_bias(segment.begin + i, elements);
        mask_scores(segment.begin + i);
        if (has_rows(1))
          weigh<2>();
        else
          weigh<1>();
      }
      mbarrier_wait(shared.values_full(stage), phase, "values");
      if constexpr (kCopied) fence_proxy_async_shared();
      if constexpr (kHasLists<Params>) {
        if (const u32 most = most_seen(of_tokens); most < kUnit) clear_values(stage, most, kUnit);
      } else if constexpr (kHasMask<Params>) {
        clear_unseen(stage, segment.begin + i);
      } else {
        const int valid = segment.tokens - (segment.begin + i) * kBlockTokens;
        if (valid < kBlockTokens) clear_values(stage, max(valid, 0), kBlockTokens);
        if (i == 0 && p.window_left >= 0) {  // only this block has rows before all windows
          const int hidden = seen_by(p, tile, segment.tokens, 0).first - (segment.begin + i) * kBlockTokens;
          if (hidden > 0) clear_values(stage, 0, min(hidden, kBlockTokens));
        }
      }
      multiply_values(stage);
      arrive(shared.values_free(stage));
    }
    arrive(shared.query_free());
  }

  // The end of a row tile: mha/attention/finish.cuh.
  __device__ __forceinline__ void finish(const Segment& segment, bool more);

 private:
  __device__ __forceinline__ u32 exchanged(int to, int j) const;
  __device__ __forceinline__ void normalise(float (&half)[kHalf * 4], float (&lse)[2], const float (&sink)[2]) const;
  __device__ __forceinline__ void exchange(float (&half)[kHalf * 4], float (&lse)[2], const float (&sink)[2]) const;
  __device__ __forceinline__ void finish_head(const Segment& segment, const float (&sink)[2]);
  // mha/attention/few.cuh
  __device__ __forceinline__ void finish_few(const Segment& segment, const float (&sink)[2], bool more) const;
  __device__ __forceinline__ void add_other(float (&half)[kHalf * 4], float (&lse)[2], const float (&sink)[2]) const;
  __device__ __forceinline__ void write_row(const Segment& segment, const float (&half)[kHalf * 4],
                                            const float (&lse)[2]) const;
  __device__ __forceinline__ bool is_last_piece(const Segment& segment) const;
  __device__ __forceinline__ void combine_pieces(const Segment& segment, float (&lse)[2]);
  // The halves of an output that one consumer has.
  template <typename Do>
  __device__ __forceinline__ void for_halves(const Do& call) const {
#pragma unroll
    for (int own = 0; own < 2; ++own) {
      float half[kHalf * 4];
#pragma unroll
      for (int i = 0; i < kHalf * 4; ++i) half[i] = output[own * kHalf * 4 + i];
      call(own, half);
    }
  }
  // own: which half of the columns it is.
  __device__ __forceinline__ void write_piece(const Segment& segment, int own, const float (&half)[kHalf * 4],
                                              const float (&lse)[2]) const;
  __device__ __forceinline__ void write_result(const Segment& segment, int own, const float (&half)[kHalf * 4],
                                               const float (&lse)[2]) const;
};

}  // namespace cumla::mha
