// SPDX-License-Identifier: Apache-2.0
// Parameters, row tiles and shared memory of mla_decode_fp8.
#pragma once
#include "mla/mla_decode/layout.cuh"
#include "mla/mla_decode/load.cuh"
#include "split/join.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace split;

constexpr int kScaleGroups = 4;  // of 128 latent columns, each with its own scale
constexpr int kValueTiles = kValueDim / 64;
// model: fp8_data
constexpr int kRawColumns = 128;  // of a tile of 8-bit numbers, which has kTileBytes
// Layout of a packed row: e4m3 latent columns, their scales, bfloat16 RoPE columns.
// model: fp8_data
constexpr int kPackedScales = kValueDim, kPackedRope = kPackedScales + 4 * kScaleGroups,
              kPackedBytes = kPackedRope + 128;

// One more form than mla/mla_decode/pages.cuh has: 64 consecutive packed rows of a page.
constexpr PageForm kPacked = static_cast<PageForm>(kRows + 1);

struct MlaDecodeFp8Params {
  MlaDecodeParams decode;  // e4m3 latent columns; kPages: swizzled boxes of 128 bytes
  CacheColumns scales;     // per token, one per group of columns; unused without kGrouped
  const float* kv_scale;   // factor of e4m3 columns that have no such scales; null: kv_scale_value
  float kv_scale_value;
  int rope_is_fp8;       // else bfloat16
  TensorMap scales_map;  // kPages: dims (4, page_size, num_kv_heads, num_pages), box (4, 64, 1, 1)
  // kPacked: decode.latent_map has whole rows in words: dims (164, page_size, ...), box (164, 64, 1, 1).
};

// Parameters of kernels over rows of other widths than 512 + 64, which are e4m3 throughout.
struct MlaWidthFp8Params : MlaDecodeFp8Params {
  int rope_columns;
};

// Parameters of kernels whose queries are e4m3, too.
struct MlaQueryFp8Params : MlaDecodeFp8Params {
  const float* q_scale;  // factor of the queries; null: q_scale_value
  float q_scale_value;
};

// A tile of rows whose queries are e4m3.
struct QueryIsFp8 {};
template <typename Base>
struct WithFp8Query : Base, QueryIsFp8 {
  using Base::Base;
};
template <typename AnyTile>
constexpr bool kQueryIsFp8 = __is_base_of(QueryIsFp8, AnyTile);
template <typename AnyTile>
constexpr int kQueryChunk = kQueryIsFp8<AnyTile> ? 8 : 16;  // bytes of eight columns

// The factor of the queries.
template <typename AnyTile, typename Params>
__device__ __forceinline__ float query_factor(const Params& params) {
  if constexpr (kQueryIsFp8<AnyTile>) {
    const auto& p = static_cast<const MlaQueryFp8Params&>(params);
    return p.q_scale == nullptr ? p.q_scale_value : *p.q_scale;
  } else {
    return 1.0f;
  }
}

// The tile for prefetch_queries, which fetches a line of 128 bytes for each tile of columns: two of e4m3.
template <typename AnyTile, bool = kQueryIsFp8<AnyTile>>
struct Prefetched {
  using Tile = AnyTile;
};
template <typename AnyTile>
struct Prefetched<AnyTile, true> {
  struct Tile : AnyTile {
    static constexpr int kLatentTiles = AnyTile::kLatentTiles / 2;
  };
};

template <typename AnyTile>
__device__ __forceinline__ bool rope_is_fp8(const MlaDecodeFp8Params& p) {
  return AnyTile::kRopeVaries || p.rope_is_fp8;
}
// True if a RoPE column exists; columns that do not exist are zeros.
template <typename AnyTile>
__device__ __forceinline__ bool has_rope_column(const MlaDecodeFp8Params& p, int column) {
  if constexpr (AnyTile::kRopeVaries)
    return column < static_cast<const MlaWidthFp8Params&>(p).rope_columns;
  else
    return true;
}

// Row tiles of kQueryRows: grid = (row tiles of a kv head, parts, kv heads).
template <int kQueryRows>
struct QueryTile : Tile {
  __device__ __forceinline__ explicit QueryTile(const MlaDecodeParams& p) : Tile(p) {
    first_row = blockIdx.x * kQueryRows;
    rows = min(kQueryRows, p.q_len * p.heads_per_group - first_row);
    most_shift = shift_of(p, 0);
    least_shift = shift_of(p, rows - 1);
  }
};

// If query lengths differ: half of the row tile at a place of the schedule, grid = (2, parts, kv heads). The second
// half may have no rows. Its CTA then has no blocks, and its partial results have weight 0.
struct RowHalfTile : RaggedTile {
  using Held = RowHalfTile;
  static constexpr int kHalf = kRowTile / 2;

  __device__ __forceinline__ explicit RowHalfTile(const MlaDecodeParams& p) : RaggedTile(p) {}
  __device__ __forceinline__ void move_to(const MlaDecodeParams& p, const TilePlace& place) {
    RaggedTile::move_to(p, place);
    index = blockIdx.z * gridDim.x + blockIdx.x;
    first_row += blockIdx.x * kHalf;
    rows = min(kHalf, q_len * p.heads_per_group - first_row);
    most_shift = shift_of(p, 0);
    least_shift = shift_of(p, max(rows, 1) - 1);
  }
};

__device__ __forceinline__ Segment segment_of(const MlaDecodeParams& p, RowHalfTile& tile, const Part& part,
                                              int place) {
  const TilePlace at = reinterpret_cast<const TilePlace*>(p.places)[place];
  tile.move_to(p, at);
  Segment segment = segment_at(p, part, place, at.tokens, tile.least_shift);
  if (tile.rows <= 0) segment.blocks = 0;
  return segment;
}

// The token of row `place` of a block's fragments: adjacent rows are four tokens apart.
// model: fp8_segments, fp8_data
__device__ __forceinline__ int token_at(int place) { return (place & ~7) | (place & 1) << 2 | (place >> 1 & 3); }

// A slot of the ring holds a block in the order of the cache: tiles of 128 latent columns, a tile of RoPE columns of
// 8 or 16 bits, 16 bytes of scales per token. Tiles have rows of 128 bytes with swizzled chunks of 16 (chunk_of). No
// bank conflict arises between eight rows of a chunk (ldmatrix), or between four chunks of rows r and r + 4
// (fragments of K). RoPE rows of 8 bits have half of the chunks.
//
// kPacked holds whole rows. A pitch of 656 bytes is five times all banks and 16 bytes, so no swizzle is needed.
// model: fp8_segments, fp8_data
// kLatentTiles: of 64 latent columns of a row. Rows of half the width have half as many slots more.
template <int kQueryRows, bool kGrouped, PageForm kForm, int kLatentTiles = mla::kRopeTile>
struct Fp8Layout : Widths<kLatentTiles> {
  using Own = Widths<kLatentTiles>;
  using Own::kHalfTiles, Own::kTiles, Own::kValueDim;
  static constexpr bool kWhole = kForm == kPacked;
  static constexpr int kSlots = kLatentTiles < 8 ? 6 : 4;  // even, so that a slot always has the same consumer
  static constexpr int kRowBytes = kWhole ? kPackedBytes : 128;  // pitch of the tokens' latent columns
  static constexpr int kRopeOffset = kWhole ? kPackedRope : kValueDim / kRawColumns * kTileBytes;
  static constexpr int kScalesOffset = kWhole ? kPackedScales : kRopeOffset + kTileBytes;
  static constexpr int kNextScales = kWhole ? kPackedBytes : 4 * kScaleGroups;  // pitch of the tokens' scales
  static constexpr int kSlotBytes =
      kWhole ? kBlockTokens * kPackedBytes : kScalesOffset + (kGrouped ? kBlockTokens * kNextScales : 0);
  static constexpr int kQueryTileBytes = kQueryRows * 128;  // 64 columns
  // Probability tiles per consumer. If a slot has a RoPE tile, two more replace that.
  static constexpr int kOwnProbabilities = kWhole ? kScaleGroups : 2;
  static constexpr int kExchanged = 2 * kHalfTiles;  // 16 bytes of a thread each
  static constexpr int kExchangeBytes = 2 * kExchanged * kWarpgroup * 16;
  static constexpr int kQueryBytes = kTiles * kQueryTileBytes;
  // With 16 rows there is also room for the next segment's query. Exchanges overlap a query and probabilities.
  static constexpr int kQueries = kQueryRows == 16 ? 2 : 1;
  static constexpr int kAllProbabilities = 2 * kOwnProbabilities * kQueryTileBytes;
  static constexpr int kProbabilityBytes =
      kAllProbabilities > kExchangeBytes - kQueryBytes ? kAllProbabilities : kExchangeBytes - kQueryBytes;
  static constexpr int kMaxima = kGrouped ? 1 + kScaleGroups : 1;  // per query row and warp
  static constexpr int kWarps = 2 * kWarpgroup / 32;
  static_assert(kWarps * kJoinSpace <= kSlots * kSlotBytes, "joining uses the ring");
  static constexpr int kReferences = kGrouped ? 1 + 2 * kScaleGroups : 1;  // per query row and consumer
  static constexpr int kLastReferences = kGrouped ? 1 + kScaleGroups : 1;
  static constexpr int kRowFloats = (kMaxima + 1) * kWarps + 2 * (kReferences + kLastReferences) + kQueries;
  static constexpr int kBytes = kSlots * kSlotBytes + kQueries * kQueryBytes + kProbabilityBytes +
                                kRowFloats * kQueryRows * 4 + 16 + (2 * kSlots + 2 * kQueries) * 8;

  u32 ring, first_query, probabilities, maxima, words, barriers;

  __device__ __forceinline__ explicit Fp8Layout(u32 base)
      : ring(base),
        first_query(ring + kSlots * kSlotBytes),
        probabilities(first_query + kQueryBytes),
        maxima(first_query + kQueries * kQueryBytes + kProbabilityBytes),
        words(maxima + kRowFloats * kQueryRows * 4),
        barriers(words + 16) {}

  __device__ __forceinline__ u32 slot(u32 s) const { return ring + s * kSlotBytes; }
  // Offset in a slot of a chunk of 16 bytes among the first 128 bytes of a token.
  __device__ __forceinline__ static u32 chunk_of(int token, int chunk) {
    return token * kRowBytes + (kWhole ? chunk * 16 : (chunk ^ (token & 7)) << 4);
  }
  // Moves from a chunk of the first 64 latent columns to the same chunk of the `tile`-th 64.
  __device__ __forceinline__ static u32 chunk_of_tile(u32 chunk, int tile) {
    return kWhole ? chunk + tile * 64 : (chunk ^ (tile & 1) << 6) + (tile >> 1) * kTileBytes;
  }
  // Transposed: 64 tokens per query row, for a group of columns. The RoPE tile of the slot is no longer used then.
  __device__ __forceinline__ u32 probabilities_of(int consumer, int group, u32 slot) const {
    return kWhole || group < kOwnProbabilities
               ? probabilities + (consumer * kOwnProbabilities + group) * kQueryTileBytes
               : slot + kRopeOffset + (group - kOwnProbabilities) * kQueryTileBytes;
  }
  // The buffer and phase of query n, counted over the segments of a part. Probabilities are between the two buffers.
  __device__ __forceinline__ static u32 buffer_of(u32 n) { return n % kQueries; }
  __device__ __forceinline__ static u32 phase_of(u32 n) { return n / kQueries & 1; }
  __device__ __forceinline__ u32 query(u32 n) const {
    return first_query + buffer_of(n) * (kQueryBytes + kProbabilityBytes);
  }
  // Room for what the consumers exchange. It overlaps the query and probabilities, which the segment no longer needs.
  // The next segment waits for query_free(n) before it uses them (Fp8Consumer::compute).
  __device__ __forceinline__ u32 exchange(u32 n, int consumer, int i) const {
    const u32 place = buffer_of(n) == 0 ? first_query : probabilities;
    return place + ((consumer * kExchanged + i) * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
  }
  // Per query row and warp of both consumers: the highest value when references are raised, of scores and of those
  // times each group's scales; and the sum of exponentials over a segment.
  __device__ __forceinline__ u32 warp_maximum(int which, int warp, int row) const {
    return maxima + ((which * kWarps + warp) * kQueryRows + row) * 4;
  }
  __device__ __forceinline__ u32 sum(int row, int warp) const {
    return warp_maximum(kMaxima, 0, 0) + (row * kWarps + warp) * 4;
  }
  // Per consumer: the reference of the probabilities; the references and factors of each group of columns; the
  // references of the segment that has ended, in the same order.
  __device__ __forceinline__ u32 reference(int consumer, int row) const {
    return sum(kQueryRows, 0) + (consumer * kReferences * kQueryRows + row) * 4;
  }
  __device__ __forceinline__ u32 group_reference(int consumer, int group, int row) const {
    return reference(consumer, (1 + group) * kQueryRows + row);
  }
  __device__ __forceinline__ u32 group_factor(int consumer, int group, int row) const {
    return group_reference(consumer, kScaleGroups + group, row);
  }
  __device__ __forceinline__ u32 last_reference(int consumer, int row) const {
    return reference(2, 0) + (consumer * kLastReferences * kQueryRows + row) * 4;
  }
  __device__ __forceinline__ u32 last_group_reference(int consumer, int group, int row) const {
    return last_reference(consumer, (1 + group) * kQueryRows + row);
  }
  // Per row of query n: its divisor, times the base-2 factor of scores.
  __device__ __forceinline__ u32 factor_of(u32 n, int row) const {
    return last_reference(2, buffer_of(n) * kQueryRows + row);
  }
  // Barriers (table: mla/mla_decode_fp8.cu).
  __device__ __forceinline__ u32 full(u32 s) const { return barriers + s * 8; }
  __device__ __forceinline__ u32 free(u32 s) const { return full(kSlots) + s * 8; }
  __device__ __forceinline__ u32 query_full(u32 n) const { return free(kSlots) + buffer_of(n) * 8; }
  __device__ __forceinline__ u32 query_free(u32 n) const { return query_full(0) + kQueries * 8 + buffer_of(n) * 8; }
};

// The value of two lanes 16 apart, first that of the lower one: each lane gives `low` for the lower one to have and
// `high` for the other.
// model: fp8_data
__device__ __forceinline__ float2 exchanged_halves(bool is_high, float low, float high) {
  const float own = is_high ? high : low, other = __shfl_xor_sync(0xffffffffu, is_high ? low : high, 16);
  return is_high ? float2{other, own} : float2{own, other};
}

// Stores a consumer's half of the columns of a partial result, for kGroups groups of rows or those that exist. Lane 4
// r + t of its layout has columns 2 t and 2 t + 1 of eight, of query rows r and r + 8. Of two tiles a lane has half of
// a unit for each of two rows: lanes 16 apart exchange halves.
// model: fp8_data
template <int kGroups, bool kAll, typename AnyTile, typename Output>
__device__ __forceinline__ void write_transposed_piece(const MlaDecodeParams& p, const AnyTile& tile,
                                                       const Segment& segment, const Output& output, int consumer,
                                                       int warp, int lane) {
  constexpr int kTiles = AnyTile::kLatentTiles / 2, kColumns = Widths<AnyTile::kLatentTiles>::kValueDim;
  const int pair = lane / 4, row = 2 * (lane % 4), eight = pair / 4;
  const i64 piece = piece_index(p, tile, blockIdx.y, segment.slot);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (!kAll && group >= p.row_groups) break;
    const int unit = kTiles == 4 ? 2 * warp + eight : warp;
    const int as_lane = (kTiles == 4 ? row : row + eight) * 4 + pair % 4;
    float4* const to =
        p.partial_out + piece_offset<kColumns, kShortLines>(p, piece, consumer, group, unit, as_lane);
    // Two columns of row `row` + j and of row `row` + j + 8.
    auto of_row = [&](int d, int j) {
      const float* const v = output[d] + group * 8 + j;
      return float4{v[0], v[2], v[4], v[6]};
    };
    if constexpr (kTiles == 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
        store_short_unit(to + j * 4, {of_row(0, j), of_row(1, j), of_row(2, j), of_row(3, j)});
    } else {
      float4 unit_columns[2 * kTiles];  // eight columns each
#pragma unroll
      for (int d = 0; d < kTiles; ++d) {
        const float4 low = of_row(d, 0), high = of_row(d, 1);
        const float2 x = exchanged_halves(eight, low.x, high.x), y = exchanged_halves(eight, low.y, high.y);
        const float2 z = exchanged_halves(eight, low.z, high.z), w = exchanged_halves(eight, low.w, high.w);
        unit_columns[2 * d] = {x.x, y.x, z.x, w.x};
        unit_columns[2 * d + 1] = {x.y, y.y, z.y, w.y};
      }
      store_short_unit(to, {unit_columns[0], unit_columns[1], unit_columns[2], unit_columns[3]});
    }
  }
}

}  // namespace cumla::mla
