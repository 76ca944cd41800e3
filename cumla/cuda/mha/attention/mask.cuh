// SPDX-License-Identifier: Apache-2.0
// The keys that a query sees by arrays: an interval, a prefix of the request, and bits for the last keys, such as
// those of a tree of drafts (docs/kernels/mha-masks.md).
//
// Key j of a request is visible if
//   j < tree      and start <= j <= end, or j < prefix
//   j >= tree     and bit j - tree of the query's words is set
// Any number may stand in the arrays.
#pragma once
#include "mha/attention/layout.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

constexpr int kMostWords = 8;  // of a query's bits

struct MaskArrays {
  const int* start;       // [query rows of all requests]; null: 0
  const int* end;         // the same, inclusive; null: the query's position if `is_causal`, else the last key
  const int* prefix_len;  // [requests]; null: 0
  const u32* tree;        // [query rows of all requests, words]; null without words
  const int* tree_start;  // [requests]; null: the position of the request's first query
  int words;
  int is_causal;
  int requests;
};

struct MaskedParams : AttentionParams {
  MaskArrays mask;
};

template <typename Params>
constexpr bool kHasMask = false;
template <>
constexpr bool kHasMask<MaskedParams> = true;

// The part of a mask that all queries of a request share.
struct RequestMask {
  int tokens, prefix, tree;  // keys; keys before `prefix`; first key that is visible by its bit

  // number: of the request, as the schedule has it.
  __device__ __forceinline__ RequestMask(const MaskedParams& p, int number, int q_len, int tokens)
      : tokens(tokens), prefix(0), tree(tokens) {
    const int request = min(max(number, 0), p.mask.requests - 1);
    // A bit that no word has is not set, wherever below 0 the tree begins.
    if (p.mask.words > 0)
      tree = min(max(p.mask.tree_start == nullptr ? tokens - q_len : p.mask.tree_start[request], -32 * kMostWords),
                 tokens);
    if (p.mask.prefix_len != nullptr) prefix = max(min(p.mask.prefix_len[request], tree), 0);
  }
  __device__ __forceinline__ RequestMask() {}
};

// The query token of a row; rows that do not exist have that of the last one, and of a tile without queries token 0.
__device__ __forceinline__ int own_token(const AttentionParams& p, const RaggedTile& tile, int row) {
  return max(min(tile.token_of(p, row), tile.q_len - 1), 0);
}

// A number of an array, or another one if there is no array. Without a branch.
__device__ __forceinline__ int number_or(const int* array, int at, int other) {
  return __float_as_int(load_global_float_if(array != nullptr, reinterpret_cast<const float*>(array) + at,
                                             __int_as_float(other)));
}

// The interval of a query token, of keys before the tree. It is empty if the end is not after the first.
__device__ __forceinline__ Seen interval_of(const MaskedParams& p, const RaggedTile& tile, const RequestMask& of,
                                            int own) {
  const int at = tile.q_begin + own;
  const int last = p.mask.is_causal ? of.tokens - tile.q_len + own : of.tokens - 1;
  return {max(number_or(p.mask.start, at, 0), 0), max(min(number_or(p.mask.end, at, last), of.tree - 1) + 1, 0)};
}

// Bits of the first n keys of 64.
__device__ __forceinline__ u64 keys_before(int n) {
  return n <= 0 ? 0 : n >= 64 ? ~u64{0} : (u64{1} << n) - 1;
}

// The tree's bits of 64 keys, from bit `first` on.
__device__ __forceinline__ u64 bits_of_tree(const MaskedParams& p, i64 query, int first) {
  if (first <= -64 || first >= 32 * p.mask.words) return 0;
  const u32* const words = p.mask.tree + query * p.mask.words;
  const int word = first >> 5, shift = first & 31;
  const auto at = [&](int w) { return w >= 0 && w < p.mask.words ? words[w] : 0u; };
  const u32 low = at(word), middle = at(word + 1), high = at(word + 2);
  return static_cast<u64>(__funnelshift_r(middle, high, shift)) << 32 | __funnelshift_r(low, middle, shift);
}

// A bit per key of a block of 64: set if the query sees it.
__device__ __forceinline__ u64 visible_keys(const MaskedParams& p, const RequestMask& of, const Seen& interval,
                                            i64 query, int begin) {
  u64 visible = (keys_before(interval.end - begin) & ~keys_before(interval.first - begin)) |
                keys_before(of.prefix - begin);
  if (p.mask.words > 0) visible |= bits_of_tree(p, query, begin - of.tree);
  return visible & keys_before(of.tokens - begin);
}

// Keys [first, end) that must be read for an interval, with the prefix and the tree.
__device__ __forceinline__ Seen keys_to_read(const MaskedParams& p, const RequestMask& of, Seen keys) {
  if (of.prefix > 0) keys = {0, max(keys.end, of.prefix)};
  const int first = max(of.tree, 0);
  const int end = min(i64{of.tree} + 32 * p.mask.words, i64{of.tokens});
  if (first >= end) return keys;
  return keys.first < keys.end ? Seen{min(keys.first, first), max(keys.end, end)} : Seen{first, end};
}

// The keys that some query of a tile sees, and those that all see. All lanes of a warp compute it together.
struct Hull {
  Seen any, all;     // of intervals
  bool is_complete;  // each key of `any` is visible to some query

  __device__ __forceinline__ Hull(const MaskedParams& p, const RaggedTile& tile, const RequestMask& of) {
    const int first_own = own_token(p, tile, 0), last_own = own_token(p, tile, max(tile.rows, 1) - 1);
    int least = 0x7fffffff, most = 0, greatest = 0, smallest = 0x7fffffff, has_own = 1;
#pragma unroll 1
    for (int own = first_own + static_cast<int>(threadIdx.x % 32); own <= last_own; own += 32) {
      const Seen seen = interval_of(p, tile, of, own);
      greatest = max(greatest, seen.first);
      smallest = min(smallest, seen.end);
      if (seen.first < seen.end) {
        least = min(least, seen.first);
        most = max(most, seen.end);
      }
      // Intervals that have their queries' own positions have no gaps between them.
      const int position = of.tokens - tile.q_len + own;
      has_own &= seen.first <= position && position < seen.end;
    }
    all = {__reduce_max_sync(0xffffffffu, greatest), __reduce_min_sync(0xffffffffu, smallest)};
    most = __reduce_max_sync(0xffffffffu, most);
    any = {min(__reduce_min_sync(0xffffffffu, least), most), most};
    is_complete = __all_sync(0xffffffffu, has_own) != 0;
  }
  __device__ __forceinline__ Hull() {}

  // True if all queries see all of the n keys from `begin` on.
  __device__ __forceinline__ bool all_see(const RequestMask& of, int begin, int n) const {
    return (begin >= all.first && begin <= all.end - n) || begin <= of.prefix - n;
  }
  // True if each of these keys is visible to some query, as far as that is known without looking at each.
  __device__ __forceinline__ bool some_see(const RequestMask& of, int begin, int n) const {
    return all_see(of, begin, n) || (is_complete && begin >= any.first && begin <= any.end - n);
  }
};

// True if some query of a tile sees a key.
__device__ __forceinline__ bool is_seen(const MaskedParams& p, const RaggedTile& tile, const RequestMask& of,
                                        const Hull& hull, int key) {
  if (key >= of.tokens) return false;
  if (key < of.prefix) return true;
  if (key < of.tree) {
    if (key < hull.any.first || key >= hull.any.end) return false;
    if (hull.is_complete) return true;
  } else if (key - of.tree >= 32 * p.mask.words) {
    return false;
  }
  const int last_own = own_token(p, tile, tile.rows - 1);
#pragma unroll 1
  for (int own = own_token(p, tile, 0); own <= last_own; ++own) {
    if (key < of.tree) {
      const Seen seen = interval_of(p, tile, of, own);
      if (key >= seen.first && key < seen.end) return true;
    } else {
      const int bit = key - of.tree;
      const u32 word = p.mask.tree[static_cast<i64>(tile.q_begin + own) * p.mask.words + bit / 32];
      if (word >> bit % 32 & 1) return true;
    }
  }
  return false;
}

// A consumer's copy of its row tile's mask.
struct TileMask {
  RequestMask of;
  Hull hull;
};
struct Nothing {};

// The number of the request at a place (split/ragged_schedule_numbered.cu).
__device__ __forceinline__ int number_at(const AttentionParams& p, int place) {
  return static_cast<int>(reinterpret_cast<const TilePlace*>(p.places)[place].unused);
}

template <typename Params>
using MaskOf = typename TypeIf<kHasMask<Params>, TileMask, Nothing>::Type;

constexpr u32 kCompleteBit = 1u << 31;  // beside the first key that some query sees, which is not below 0

// Announces what the queries of the tile see, as 24 bytes after the mbarrier `full`. Whoever needs it reads it here:
// two who read the arrays of a mask might differ, if these change meanwhile, and would wait for each other for ever.
__device__ __forceinline__ void announce(u32 full, const TileMask& mask) {
  const auto store = [&](int i, int word) { store_shared_u32(full + 8 + 4 * i, static_cast<u32>(word)); };
  if (threadIdx.x % 32 != 0) return;
  store(0, mask.of.prefix);
  store(1, mask.of.tree);
  store(2, mask.hull.any.first | (mask.hull.is_complete ? kCompleteBit : 0));
  store(3, mask.hull.any.end);
  store(4, mask.hull.all.first);
  store(5, mask.hull.all.end);
  mbarrier_arrive(full);
}
__device__ __forceinline__ TileMask announced(u32 full, u32 phase, int tokens) {
  mbarrier_wait(full, phase, "what a tile sees");
  const auto load = [&](int i) { return static_cast<int>(load_shared_u32(full + 8 + 4 * i)); };
  TileMask mask;
  mask.of.tokens = tokens;
  mask.of.prefix = load(0);
  mask.of.tree = load(1);
  const u32 first = load(2);
  mask.hull.is_complete = (first & kCompleteBit) != 0;
  mask.hull.any = {static_cast<int>(first & ~kCompleteBit), load(3)};
  mask.hull.all = {load(4), load(5)};
  return mask;
}

// The segment at a place, without the blocks that no query of the tile sees. It has the number of the request, and at
// least one block, so that nobody is more tiles ahead than kMaskSlots: of a tile that sees nothing the one behind its
// last key. One warp announces the masks of all tiles.
template <typename Layout>
__device__ __forceinline__ Segment visible_segment(const MaskedParams& p, const Layout& shared, RaggedTile& tile,
                                                   const Part& part, int place, TileMask& mask,
                                                   bool announces = false) {
  Segment segment = visible_segment(static_cast<const AttentionParams&>(p), tile, part, place);
  segment.request = number_at(p, place);
  const u32 n = place - part.place, full = shared.mask_full(n % Layout::kMaskSlots);
  if (announces) {
    mask.of = RequestMask(p, segment.request, tile.q_len, segment.tokens);
    mask.hull = Hull(p, tile, mask.of);
    announce(full, mask);
  } else {
    mask = announced(full, n / Layout::kMaskSlots & 1, segment.tokens);
  }
  const Seen keys = keys_to_read(p, mask.of, mask.hull.any);
  const int end = min(segment.begin + segment.blocks, blocks_of(keys.end));
  segment.begin = max(segment.begin, keys.first / kBlockTokens);
  segment.blocks = end - segment.begin;
  if (segment.blocks <= 0) {
    segment.begin = blocks_of(segment.tokens);
    segment.blocks = 1;
  }
  return segment;
}
// The same without a mask.
template <typename Layout>
__device__ __forceinline__ Segment visible_segment(const AttentionParams& p, const Layout&, RaggedTile& tile,
                                                   const Part& part, int place, Nothing&, bool = false) {
  return visible_segment(p, tile, part, place);
}

}  // namespace cumla::mha
