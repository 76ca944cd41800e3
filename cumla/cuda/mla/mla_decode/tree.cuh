// SPDX-License-Identifier: Apache-2.0
// Row tiles of dense MLA whose queries are trees of drafts.
#pragma once
#include "mla/mla_decode/masked.cuh"
#include "attend/tree.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace attend;
using namespace ptx;

// Parameters of kernels over a TreeTile.
struct MlaTreeParams : MlaWidthParams {
  const u32* tree;  // [query tokens of all requests, tree_words]: bit i of a token's is the request's i-th new key
  int tree_words;
};

// Row tile whose queries are a tree of drafts: bits say which of their keys, the last of the request, each sees.
// Earlier keys are visible to all. There is no window beside it.
struct TreeTile : WindowTile {
  using Held = TreeTile;
  using WindowTile::WindowTile;

  // A bit per key of the block that begins with key `begin`: set if query token `own` of the tile's request sees it.
  __device__ __forceinline__ u64 visible_keys(const MlaDecodeParams& p, const Segment& segment, int own,
                                              int begin) const {
    const auto& of = static_cast<const MlaTreeParams&>(p);
    const i64 query = static_cast<i64>(segment.request) * of.axis_q_len + q_begin + own;
    const u64 seen = keys_before(position - begin) | bits_of_tree(of.tree, of.tree_words, query, begin - position);
    return seen & keys_before(segment.tokens - begin);
  }
};
template <>
constexpr bool kHasWindow<WithSinks<TreeTile>> = false;
template <int kLatent, bool kRope>
constexpr bool kHasWindow<WithSinks<WidthTile<TreeTile, kLatent, kRope>>> = false;

}  // namespace cumla::mla
