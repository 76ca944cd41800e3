// SPDX-License-Identifier: Apache-2.0
// Row tiles of attention_prefill whose keys are split among CTAs: a CTA has a part of the schedule, as in attention.
#pragma once
#include "mha/attention/layout.cuh"
#include "mha/attention/mask.cuh"
#include "mha/attention_prefill/layout.cuh"
#include "split/join.cuh"
#include "split/output.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

// The rows of all consumers.
template <int kRows>
struct TallTile : HeadTile {
  __device__ __forceinline__ explicit TallTile(const AttentionParams& p) : HeadTile(p) {}
  __device__ __forceinline__ void move_to(const AttentionParams& p, const TilePlace& place) {
    HeadTile::move_to(p, place);
    rows = min(kRows, q_len * p.heads_per_group - first_row);
    least_shift = shift_of(p, rows - 1);
  }
};

// Announces the row tiles of the CTA's part. One lane, which is_active: it finds the first one while no barrier exists.
template <typename Layout, typename Params>
struct PartDealer {
  static constexpr int kUnits = Layout::kBlock / kBlockTokens;  // the schedule's blocks in one of ours
  using Tile = TallTile<64 * Layout::kConsumers>;
  struct Found {
    Tile tile;
    Segment segment;
    int first, end;  // blocks
    bool exists;
  };
  const Params& p;
  Part part = {};
  int last_place = -1;
  Found found;

  __device__ __forceinline__ PartDealer(const Params& p, const Layout&, bool is_active)
      : p(p), found{Tile(p), {}, 0, 0, false} {
    if (!is_active) return;
    part = part_of_cta(p, blockIdx.y);
    last_place = last_place_of(p, part);
    find(0);
  }

  // As visible_segment().
  template <typename AnyTile>
  __device__ __forceinline__ Segment segment_of(int place, AnyTile& tile) const {
    const TilePlace at = reinterpret_cast<const TilePlace*>(p.places)[place];
    tile.move_to(p, at);
    Segment segment = segment_at(p, part, place, at.tokens, tile.least_shift);
    int end = segment.begin + segment.blocks;
    if (p.block_table == nullptr) {  // no more rows than exist
      segment.tokens = min(static_cast<i64>(segment.tokens), max(p.page_entries - tile.pages, i64{0}));
      end = max(min(end, split::blocks_of(max(segment.tokens - tile.least_shift, 0))), segment.begin);
    }
    segment.begin = max(segment.begin, min(seen_by(p, tile, segment.tokens, 0).first / kBlockTokens, end));
    segment.blocks = end - segment.begin;
    return segment;
  }

  __device__ __forceinline__ void find(u32 n) {
    const int place = part.place + static_cast<int>(n);
    found.exists = place <= last_place;
    Tile& tile = found.tile;
    tile.q_len = tile.q_begin = tile.first_row = tile.rows = 0;
    tile.pages = 0;
    found.segment = {};
    found.first = found.end = 0;
    if (!found.exists) return;
    const Segment& segment = found.segment = segment_of(place, tile);
    // Both parts round a cut down.
    const bool is_cut = place == part.end_place && segment.begin + segment.blocks == part.end_block;
    found.first = segment.begin / kUnits;
    found.end = (segment.begin + segment.blocks + (is_cut ? 0 : kUnits - 1)) / kUnits;
  }

  __device__ __forceinline__ void announce(const Layout& shared, u32 n) const {
    const int place = part.place + static_cast<int>(n);
    const Tile& tile = found.tile;
    const Segment& segment = found.segment;
    mbarrier_wait(shared.item_free(n), (n / kItems & 1) ^ 1, "a free announcement");
    const auto word = [](int value) { return static_cast<u32>(value); };
    store_shared_16(shared.item(n),
                    {word(segment.tokens), word(tile.first_row), word(tile.q_len), word(tile.q_begin)});
    store_shared_16(shared.item(n) + 16,
                    {static_cast<u32>(tile.pages), static_cast<u32>(static_cast<u64>(tile.pages) >> 32),
                     word(tile.index), word(found.exists ? tile.rows : 0)});
    store_shared_16(shared.item(n) + 64,
                    {word(found.first), word(found.end), word(segment.slot), word(segment.first_slot)});
    store_shared_16(shared.item(n) + 80,
                    {word(segment.first_part), word(segment.last_part), word(place < last_place), 0});
    if constexpr (kHasMask<Params>) {
      store_shared_u32(shared.item(n) + 32, found.exists ? number_at(p, place) : 0);
      mbarrier_arrive(shared.item_taken(n));
    } else {
      mbarrier_arrive(shared.item_full(n));
    }
  }

  __device__ __forceinline__ void deal(const Layout& shared) {
    for (u32 n = 0;; find(++n)) {
      if (n > 0) mbarrier_wait(shared.wanted(), n - 1 & 1, "the last block of an item");
      announce(shared, n);
      if (!found.exists) break;
    }
  }
};

// A partial result.
struct Piece {
  Segment segment;
  bool more;  // the CTA has another row tile
};
template <typename Layout>
__device__ __forceinline__ Piece read_piece(const Layout& shared, u32 n) {
  const uint4 a = load_shared_16(shared.item(n) + 64), b = load_shared_16(shared.item(n) + 80);
  Piece piece = {};
  piece.segment.slot = static_cast<int>(a.z);
  piece.segment.first_slot = static_cast<int>(a.w);
  piece.segment.first_part = static_cast<int>(b.x);
  piece.segment.last_part = static_cast<int>(b.y);
  piece.more = b.z != 0;
  return piece;
}

// Stores a consumer's rows of a partial result, times `inverse`, and combines when all parts have.
template <typename T, typename Layout, int kValueTiles>
__device__ __forceinline__ void store_piece(const AttentionParams& p, const Layout& shared, u32 n, int consumer,
                                            const float (&output)[kValueTiles * 32], const float (&inverse)[2]) {
  const Piece piece = read_piece(shared, n);
  const Item item = read_item(shared, n);
  HeadTile tile(p);
  tile.q_len = item.q_len;
  tile.q_begin = item.q_begin;
  tile.first_row = item.first_row;
  tile.rows = item.rows;
  tile.pages = item.pages;
  const int lane = threadIdx.x % 32, group = 4 * consumer + static_cast<int>(threadIdx.x % kWarpgroup / 32);
  if (group < p.row_groups) {
    const i64 index = piece_index(p, tile, blockIdx.y, piece.segment.slot);
    constexpr int kHalf = kValueTiles * 4;  // groups of eight columns
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4* const to = p.partial_out + piece_offset<kValueTiles * 64, kLongLines>(p, index, half, group, 0, lane);
#pragma unroll
      for (int j = 0; j < kHalf; ++j) {
        const float* const v = output + 4 * (half * kHalf + j);
        store_global_float4(to + 32 * j, v[0] * inverse[0], v[1] * inverse[0], v[2] * inverse[1], v[3] * inverse[1]);
      }
    }
  }
  constexpr int kSpace = Layout::kStages * (Layout::kKeyBytes + Layout::kValueBytes) / kJoinWarps;
  Joiner<T, kValueTiles * 64, kSpace, false, AttentionParams, HeadTile>(
      p, {shared.join(), shared.join() + 64, shared.join() + 64 + 8192, shared.keys(0), shared.keys(0) + 4 * kSpace},
      tile, piece.segment)
      .join(piece.more);
}

}  // namespace cumla::mha
