// SPDX-License-Identifier: Apache-2.0
// Row tiles of dense MLA with sinks, and with windows. Kernels without them use the tiles of split/tile.cuh.
#pragma once
#include "mla/mla_decode/layout.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// A tile of rows of another width: kLatent times 64 latent columns, and up to 64 RoPE ones or none.
template <typename Base, int kLatent, bool kRope>
struct WidthTile : Base {
  static constexpr int kLatentTiles = kLatent;
  static constexpr bool kHasRope = kRope, kRopeVaries = true;
  using Base::Base;
};

// A tile whose heads may have sinks (split/output.cuh).
template <typename Base>
struct WithSinks : Base {
  static constexpr bool kHasSinks = true;
  using Base::Base;
};

// Base-2 sink of a row; -inf if it has none.
template <typename Base>
__device__ __forceinline__ float sink_of(const MlaDecodeParams& p, const WithSinks<Base>& tile, int row) {
  const bool exists = p.sinks != nullptr && row < tile.rows;  // loads without branches overlap
  return bounded_sink(
      load_global_float_if(exists, p.sinks + Row(p, tile, row).head * p.sinks_stride, -kInfinity));
}

// Row tile whose queries see a window of keys. Its segments begin with the first block that a row sees, and their
// `tokens` are those before the end of the last row's window. If all requests have as many queries, q, out and lse have
// an axis of requests.
struct WindowTile : RaggedTile {
  using Held = WindowTile;
  using RaggedTile::RaggedTile;
  int behind;              // keys at the end of the request that no row sees
  int first_seen;          // first key that a row sees
  int seen_by_all;         // from here on all rows see keys, up to their ends
  int position;            // of the request's first query

  __device__ __forceinline__ static const MlaWindowParams& window_of(const MlaDecodeParams& p) {
    return static_cast<const MlaWindowParams&>(p);
  }
  __device__ __forceinline__ int own_token(const MlaDecodeParams& p, int row) const {
    return min(token_of(p, row), q_len - 1);
  }
  // Keys before the end of the last row's window that a row does not see.
  __device__ __forceinline__ int shift_of(const MlaDecodeParams& p, int row) const {
    const int right = window_of(p).window_right;
    return right < 0 ? 0 : max(q_len - 1 - own_token(p, row) - right, 0) - behind;
  }
  // First key of a row's window.
  __device__ __forceinline__ int first_of(const MlaDecodeParams& p, int row) const {
    const int left = window_of(p).window_left, at = position + own_token(p, row);
    return left >= 0 && at > left ? at - left : 0;
  }
};

template <typename AnyTile>
constexpr bool kHasWindow = __is_base_of(WindowTile, AnyTile);

__device__ __forceinline__ Segment segment_of(const MlaDecodeParams& p, WindowTile& tile, const Part& part,
                                              int place) {
  TilePlace at = reinterpret_cast<const TilePlace*>(p.places)[place];
  const int axis_q_len = WindowTile::window_of(p).axis_q_len;
  at.q_begin = min(max(at.q_begin, 0), p.q_len - 1);
  const int request = quotient(at.q_begin, p.by_q_len), q_begin = at.q_begin - request * axis_q_len;
  at.q_len = min(at.q_len, axis_q_len - q_begin);
  tile.move_to(p, at);
  tile.q_begin = q_begin;
  tile.behind = 0;
  tile.behind = tile.shift_of(p, tile.rows - 1);
  tile.least_shift = 0;
  tile.most_shift = tile.shift_of(p, 0);
  Segment segment = segment_at(p, part, place, at.tokens, tile.behind);
  tile.position = segment.tokens - tile.q_len;
  tile.first_seen = tile.first_of(p, 0);
  tile.seen_by_all = tile.first_of(p, tile.rows - 1);
  const int end = segment.begin + segment.blocks;
  // Consumers multiply the columns of a block in different orders: a batch-invariant row has the same one for each
  // block, whichever rows are in its tile.
  const int first = min(tile.first_seen / kBlockTokens, end);
  segment.begin = max(segment.begin, p.batch_invariant ? first & ~1 : first);
  segment.blocks = end - segment.begin;
  segment.tokens = max(segment.tokens - tile.behind, 0);
  segment.request = request;
  return segment;
}

// The same of a tile with at most `most` rows.
__device__ __forceinline__ Segment segment_of_rows(const MlaDecodeParams& p, WindowTile& tile, const Part& part,
                                                   int place, int most) {
  Segment segment = segment_of(p, tile, part, place);  // with up to kRowTile rows
  tile.rows = min(tile.rows, most);
  const int more = tile.shift_of(p, tile.rows - 1);  // keys at the end that only rows behind this tile see
  tile.behind += more;
  tile.most_shift -= more;
  tile.seen_by_all = tile.first_of(p, tile.rows - 1);
  segment.tokens = max(segment.tokens - more, 0);
  segment.blocks = max(min(segment.blocks, blocks_of(segment.tokens) - segment.begin), 0);
  return segment;
}

}  // namespace cumla::mla
