// SPDX-License-Identifier: Apache-2.0
// The softmax of attention_prefill.
#pragma once
#include "mha/attention/layout.cuh"
#include "mha/attention_prefill/layout.cuh"
#include "mha/attention_prefill/split.cuh"
#include "mha/attention_prefill/table.cuh"
#include "attend/reduce.cuh"
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mha {

using namespace attend;
using namespace ptx;
using namespace split;

// The state and the softmax of a consumer warpgroup; PrefillConsumer has the products. A lane has
// rows 16 warp + lane / 4 and 8 more, columns 2 (lane % 4) and 1 more of each eight.
// kCaps: with a softcap and float32 results; they are a quarter of the instructions.
template <typename T, int kKeyTiles, int kValueTiles, int kBlock, int kConsumers, typename Params, bool kSplit,
          bool kCaps>
struct PrefillSoftmax {
  using Layout = PrefillLayout<kKeyTiles, kValueTiles, kBlock, kConsumers, kSplit>;

  const AttentionParams& p;
  const Params& all_params;
  const Layout& shared;
  const int consumer, warp, lane, row;
  float output[kValueTiles * 32];
  float scores[kBlock / 2];
  u32 probabilities[kBlock / 4];
  float maximum[2], sum[2], factor[2], added[2];
  Seen seen_by_all;  // keys that all rows see
  int position[2];   // of this thread's rows, in the request
  // With a mask, of this thread's rows. Where registers do not suffice, they are loaded for each block.
  static constexpr bool kHoldsIntervals = kConsumers != 3;
  Seen intervals[2];
  // With lists: the query tokens of this thread's rows within the tile, and of each unit of a block a byte per row,
  // and the most that a query token sees.
  int own[2];
  u32 listed;
  u32 most_listed[Layout::kUnits];
  PrefillBias<Params> bias[2];
  float from[2];  // with slopes, bias of this thread's first key of a block
  float scale;    // with a table, of the scores of a block, in base 2; with scales of keys, of an item
  float of_keys;  // scale of keys

  __device__ __forceinline__ PrefillSoftmax(const Params& p, const Layout& shared, int consumer)
      : p(p), all_params(p), shared(shared), consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        row(warp * 16 + lane / 4) {}

  // Computes what the rows see, without a branch.
  __device__ __forceinline__ void look(u32 n, const Item& item) {
    const RaggedTile tile = tile_of(p, item, consumer);
    if constexpr (kHasLists<Params>) {
#pragma unroll
      for (int r = 0; r < 2; ++r) own[r] = token_in_tile(p, tile, row + 8 * r);
      if constexpr (kHasScales<Params>) {
        of_keys = scale_of_head(p.key_scale, item.head);
        scale = p.to_softcap == 0.0f ? fminf(p.scale_log2 * of_keys, kMaxFactor) : p.scale_log2;
      }
      return;
    }
    if constexpr (kHasMask<Params>) {
      const ItemMask mask = read_mask(shared, n, item.tokens);
      seen_by_all = mask.hull.all;
#pragma unroll
      for (int r = 0; r < 2 && kHoldsIntervals; ++r)
        intervals[r] = interval_of(all_params, tile, mask.of, own_token(p, tile, row + 8 * r));
      return;
    }
    // The first row has the least end, the last row the greatest beginning.
    seen_by_all = {seen_by(p, tile, item.tokens, 63).first, max(seen_by(p, tile, item.tokens, 0).end, 0)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      position[r] = position_of(p, tile, item.tokens, row + 8 * r);
      if constexpr (kHasBias<Params>) bias[r].begin(all_params, tile, item.tokens, row + 8 * r);
    }
  }

  // Without a branch.
  __device__ __forceinline__ static float scale_of_head(const Scales& scales, int head) {
    return load_global_float_if(scales.data != nullptr, scales.data + head * scales.stride_head, scales.value);
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (float& x : output) x = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = kLowest;
      sum[r] = 0.0f;
    }
  }

  // Caps scores; scale_log2 is then softcap * log2(e). copy_of keeps these branches apart: merged by the compiler,
  // they would need registers for all scores at once.
  __device__ __forceinline__ void cap(float* few) const {
    if constexpr (!kCaps) return;
    float to_softcap = __uint_as_float(copy_of(__float_as_uint(p.to_softcap)));
    if (__builtin_expect(to_softcap == 0.0f, 1)) return;
    if constexpr (kHasScales<Params>) to_softcap = fminf(to_softcap * of_keys, kMaxFactor);
#pragma unroll
    for (int i = 0; i < 32; ++i) few[i] = tanh_of(few[i] * to_softcap);
  }

  // A bit per score of a thread's row (two of each eight tokens): set if it is of a token before this one.
  __device__ __forceinline__ static u32 scores_before(int token) {
    const int within = min(max(token, 0), kBlock);
    return static_cast<u32>((u64{1} << (within / 8 * 2 + min(within % 8, 2))) - 1);
  }

  __device__ __forceinline__ void mask(u32 n, int block) {
#pragma unroll
    for (int i = 0; i < kBlock / 2; i += 32) cap(scores + i);
    add_bias(block);
    if constexpr (kHasLists<Params>) {
      mask_by_lists();
      return;
    }
    // True if all rows see all keys of the block.
    const bool is_clear = block * kBlock >= seen_by_all.first && block * kBlock <= seen_by_all.end - kBlock;
    if constexpr (kHasMask<Params>) {
      // copy_of keeps the bits of this block here: they were computed for every block.
      if (__builtin_expect(!is_clear, 0)) mask_by_arrays(n, static_cast<int>(copy_of(block)) * kBlock);
    } else if (__builtin_expect(!is_clear, 0)) {
      const int tokens = load_shared_u32(shared.item(n)), column = block * kBlock + (lane % 4) * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Seen seen = seen_from(p, tokens, position[r]);
        show(r, scores_before(seen.end - column) & ~scores_before(seen.first - column));
      }
    }
  }

  // Hides the scores of a row whose bits are not set.
  __device__ __forceinline__ void show(int r, u32 visible) {
#pragma unroll
    for (int i = 0; i < kBlock / 4; ++i)
      if (!(visible & 1u << i)) scores[i / 2 * 4 + 2 * r + (i & 1)] = -kInfinity;
  }

  __device__ __forceinline__ void mask_by_arrays(u32 n, int begin) {
    const Item item = read_item(shared, n);
    const RequestMask of = read_mask(shared, n, item.tokens).of;
    const RaggedTile tile = tile_of(p, item, consumer);
    const int column = begin + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = own_token(p, tile, row + 8 * r);
      const Seen interval = kHoldsIntervals ? intervals[r] : interval_of(all_params, tile, of, own);
      u32 visible = (scores_before(interval.end - column) & ~scores_before(interval.first - column)) |
                    scores_before(of.prefix - column);
      if (all_params.mask.words > 0)
#pragma unroll
        for (int half = 0; half < kBlock / 64; ++half)
          visible |= scores_of(bits_of_tree(all_params, tile.q_begin + own, begin - of.tree + 64 * half)) << 16 * half;
      show(r, visible & scores_before(of.tokens - column));
    }
  }

  // The bits of 64 keys that are those of a thread's scores.
  __device__ __forceinline__ u32 scores_of(u64 keys) const {
    const auto of_32 = [&](u32 bits) {
      const u32 pairs = bits >> lane % 4 * 2 & 0x03030303, fours = (pairs | pairs >> 6) & 0x000f000f;
      return (fours | fours >> 12) & 0xff;
    };
    return of_32(static_cast<u32>(keys)) | of_32(static_cast<u32>(keys >> 32)) << 8;
  }

  // Reads what the rows see of the keys of a stage, which must not be free yet.
  __device__ __forceinline__ void look_at_lists(int stage) {
    listed = 0;
#pragma unroll
    for (int unit = 0; unit < Layout::kUnits; ++unit) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 word = load_shared_u32(shared.seen(stage) + 16 * unit + own[r] / 4 * 4);
        listed |= (word >> own[r] % 4 * 8 & 0xff) << 8 * (2 * unit + r);
      }
      most_listed[unit] = load_shared_u32(shared.most_seen(stage) + 4 * unit);
    }
  }

  __device__ __forceinline__ void mask_by_lists() {
    if (listed == (Layout::kUnits == 2 ? 0x40404040u : 0x4040u)) return;
    if (listed == 0) {
#pragma unroll
      for (float& score : scores) score = -kInfinity;
      return;
    }
    const u32 own = copy_of(listed);  // keeps the bits of this block here, as in mask()
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      u32 visible = 0;
#pragma unroll
      for (int unit = 0; unit < Layout::kUnits; ++unit)
        visible |= scores_before(static_cast<int>(own >> 8 * (2 * unit + r) & 0xff) - lane % 4 * 2) << 16 * unit;
      show(r, visible);
    }
  }

  // The largest score of this thread in a row, without its scale or, with slopes, with scale and bias.
  __device__ __forceinline__ float largest(int r) const {
    const auto score = [&](int i) {
      if constexpr (kHasSlopes<Params>) return biased(scores[i] * p.scale_log2, i);
      return scores[i];
    };
    float next = fmaxf(score(2 * r), score(2 * r + 1));
#pragma unroll
    for (int j = 1; j < kBlock / 8; ++j) next = fmaxf(next, fmaxf(score(4 * j + 2 * r), score(4 * j + 2 * r + 1)));
    if constexpr (kHasSlopes<Params>) next += from[r];
    return next;
  }

  // A number of score i with the bias of its slope, relative to that of the first key of the row.
  __device__ __forceinline__ float biased(float number, int i) const {
    if constexpr (kHasSlopes<Params>)
      return __fmaf_rn(bias[i / 2 % 2].slope, static_cast<float>(i / 4 * 8 + i % 2), number);
    return number;
  }

  __device__ __forceinline__ float score_scale() const {
    if constexpr (kHasTable<Params> || kHasScales<Params>) return scale;
    return p.scale_log2;
  }

  // Slopes are added when weights are made, elements of a table here. Scores are masked afterwards: an element that no
  // visible key has may be NaN. copy_of keeps the loads of this block here.
  __device__ __forceinline__ void add_bias(int block) {
    if constexpr (kHasSlopes<Params>) {
#pragma unroll
      for (int r = 0; r < 2; ++r) from[r] = bias[r].from(block * kBlock + lane % 4 * 2);
    }
    if constexpr (kHasTable<Params>) {
      scale = p.scale_log2;
      const int first = static_cast<int>(copy_of(block)) * kBlock;
      if (!has_elements(first)) return;
      scale = kLog2E;
      copy_async_wait<0>();
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 2; ++r)
        bias[r].template add_elements<kBlock>([&](int i) -> float& { return scores[i / 2 * 4 + 2 * r + i % 2]; },
                                              p.scale_log2 * kLn2, bias[r].from(first + lane % 4 * 2),
                                              bias[r].from(first) - (kBlock - 1),
                                              band() + (lane / 4 + 8 * r) * Layout::kBandPitch);
    }
  }
  __device__ __forceinline__ u32 band() const { return shared.band(4 * consumer + warp); }

  // Whether a row of the warp has elements for keys of the block that begins with `first`.
  __device__ __forceinline__ bool has_elements(int first) const {
    const bool some = bias[0].touches(bias[0].from(first), kBlock) || bias[1].touches(bias[1].from(first), kBlock);
    return __any_sync(0xffffffffu, some) != 0;
  }

  // Copies the elements of a block to shared memory, for add_bias(): of each row of the warp the chunk that has the one
  // of the last key, and the 16 that follow. What is not in the table becomes 0.
  __device__ __forceinline__ void fetch_elements(int block) const {
    if constexpr (kHasTable<Params>) {
      if (!bias[0].has_chunks() || !has_elements(block * kBlock)) return;
      constexpr int kChunks = kBlock / kChunk;
      static_assert(kChunks == 16, "half a warp copies a row");
      int first[2];  // chunk of this thread's rows
#pragma unroll
      for (int r = 0; r < 2; ++r) first[r] = bias[r].from(block * kBlock) - (kBlock - 1) >> 3;
      __syncwarp();  // all lanes have read the block before
      const auto copy = [&](int of_warp, int r, int chunk, bool exists) {
        const int owner = of_warp % 8 * 4;
        const u64 row = __shfl_sync(0xffffffffu, reinterpret_cast<u64>(bias[r].row), owner);
        const int at = __shfl_sync(0xffffffffu, first[r], owner) + chunk;
        const bool valid = at >= 0 && at < bias[r].table->length / kChunk;
        if (exists)
          copy_16_async(band() + of_warp * Layout::kBandPitch + chunk * kChunkBytes,
                        reinterpret_cast<const char*>(row) + (valid ? i64{at} * kChunkBytes : 0), valid);
      };
#pragma unroll
      for (int i = 0; i < 8; ++i) copy(2 * i + lane / 16, i / 4, lane % 16, true);
#pragma unroll
      for (int r = 0; r < 2; ++r) copy(8 * r + lane % 8, r, kChunks, lane < 8);
      copy_async_commit();
    }
  }

  // Raises the maximum of each row, and leaves the factor of earlier sums in `factor`. Returns true if one is not 1.
  __device__ __forceinline__ bool raise_maximum() {
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float next = max_of_quad(largest(r));
      if constexpr (!kHasSlopes<Params>) next *= score_scale();
      if (next <= maximum[r] + kMaximumSlack) next = maximum[r];
      grown |= next != maximum[r];
      factor[r] = exp2_approx(maximum[r] - next);
      maximum[r] = next;
      sum[r] *= factor[r];
    }
    return grown;
  }

  // Turns scores into float32 weights. `added` holds the sums of this thread's weights.
  __device__ __forceinline__ void exponentiate() {
    weigh([&](int i, float weight, float next) {
      scores[i] = weight;
      scores[i + 1] = next;
    });
  }

  // The same with packed weights. The scores stay.
  __device__ __forceinline__ void exponentiate_apart(u32 (&weights)[kBlock / 4]) {
    weigh([&](int i, float weight, float next) { weights[i / 2] = pack_pair<T>(weight, next); });
  }

  // Calls `keep` with the weights of scores i and i + 1.
  template <typename Keep>
  __device__ __forceinline__ void weigh(const Keep& keep) {
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      added[r] = 0.0f;
      shift[r] = maximum[r];
      if constexpr (kHasSlopes<Params>) shift[r] -= from[r];
    }
#pragma unroll
    for (int i = 0; i < kBlock / 2; i += 2) {
      const int r = i >> 1 & 1;
      const float weight = exp2_approx(biased(__fmaf_rn(scores[i], score_scale(), -shift[r]), i));
      const float next = exp2_approx(biased(__fmaf_rn(scores[i + 1], score_scale(), -shift[r]), i + 1));
      added[r] += weight + next;
      keep(i, weight, next);
    }
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < kBlock / 4; ++i) probabilities[i] = pack_pair<T>(scores[2 * i], scores[2 * i + 1]);
    keep_before_products(probabilities);
  }

  // Copies packed weights. copy_of keeps them apart from the operands of running products.
  __device__ __forceinline__ void take(const u32 (&weights)[kBlock / 4]) {
#pragma unroll
    for (int i = 0; i < kBlock / 4; ++i) probabilities[i] = copy_of(weights[i]);
    keep_before_products(probabilities);
  }

  // The end of a row tile: mha/attention_prefill/finish.cuh.
  //
  // Final statistics of the previous item, without its output. They are computed while wgmma runs, so they must be
  // branch-free. Lanes 0 to 15 of a warp have a row each; lanes 16 to 31 repeat them.
  struct Ending {
    int rows;
    float inverse[2];  // of the rows of this thread's products
    u64 out;           // of row lane % 16 of the warp
    bool is_piece;     // kSplit: other CTAs have other keys of the item
  };
  __device__ __forceinline__ Ending end_rows(u32 n, bool exists) const;
  __device__ __forceinline__ void write(const Ending& ending, u32 n) const;

 private:
  __device__ __forceinline__ float of_rows(float upper, float lower) const;
  __device__ __forceinline__ void write_float_rows(const Ending& ending) const;
  __device__ __forceinline__ void write_rows(const Ending& ending) const;
};

}  // namespace cumla::mha
