// SPDX-License-Identifier: Apache-2.0
// Attention of few query rows, 8 or 16 of a kv head, by the ragged schedule (split/plan.cuh): each CTA has a part, and
// attends for one row tile after another to the blocks of its part. grid = (1, parts, kv heads), 384 threads, one CTA
// an SM.
//
// All 12 warps do the same: each takes every twelfth chunk of 16 tokens, copies it (kStages chunks ahead, over the
// tiles of its part; by TMA, or row by row where pages are smaller, and at the end of a request), and has a running maximum,
// sums and an output of its own. No warp waits for another one until the tile ends; then the results are added up, 64
// columns of 8 rows at a time, by warps 4 to 11, which write them or join pieces (split/join.cuh).
//
// Operands are swapped: tokens are the M side of the first product, value columns that of the second, and query rows
// the N side of both, so that eight rows waste nothing:
//
//   S' = K Q'    m16n8k16: 16 tokens x 8 rows, over the columns
//   O' = V' P'             16 columns x 8 rows, over 16 tokens
//
// Keys and values go from shared memory straight to the registers of a fragment, and e4m3 is converted to float16 on
// the way, which has all of its numbers. So columns and tokens are taken in the order in which they lie well. With e4m3
// a bfloat16 query row is multiplied by a power of two that brings it into the range of float16.
//
// Shared memory: 12 warps x kStages x 16 tokens, sums 26,496 B (joining uses them, too), statistics, the query of 16
//                rows
// Registers:     168
#include "mha/attention/layout.cuh"
#include "split/join.cuh"
#include "split/output.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

constexpr int kDecodeWarps = 12, kChunk = 16;  // tokens
constexpr int kSharedMost = 232448;
constexpr float kMaxFactor = 3e38f;  // of scores: an infinite one makes NaN of a score of 0

template <int kKeys, int kValues, int kRows, bool kE4m3>
struct DecodeLayout {
  static constexpr int kUnit = kE4m3 ? 1 : 2, kKeyRow = kKeys * kUnit, kValueRow = kValues * kUnit;  // bytes
  static constexpr int kKeyBytes = kChunk * kKeyRow, kChunkBytes = kKeyBytes + kChunk * kValueRow;
  static constexpr int kSumsRow = 68 * 4, kSumsWarp = 8 * kSumsRow + 32;  // bytes: 64 columns and a shift of banks
  static constexpr int kSumsBytes = kDecodeWarps * kSumsWarp;
  static constexpr int kStatisticsBytes = kDecodeWarps * (kRows * 16 + 4 * 8) + 16;  // and barriers, and two words
  static constexpr bool kSharesQuery = kRows > 8 || kKeys > 192;  // registers have no room for it
  static constexpr int kQueryWords = kKeys / 8;                    // of a lane, of eight rows
  static constexpr int kQueryBytes = kSharesQuery ? kRows / 8 * kQueryWords * 128 + kRows * 4 : 0;
  static constexpr int kOthers = kSumsBytes + kStatisticsBytes + kQueryBytes;
  static constexpr int kFitting = (kSharedMost - kOthers) / (kDecodeWarps * kChunkBytes);
  static constexpr int kMost = kSharesQuery ? 2 : 3;
  static constexpr int kStages = kFitting < kMost ? kFitting : kMost;
  static constexpr int kBytes = kDecodeWarps * kStages * kChunkBytes + kOthers;
  static_assert(kStages >= 2 && kSumsBytes >= 8192 + 1024, "chunks come ahead, and joining uses the sums");

  u32 base;

  __device__ __forceinline__ u32 chunk(int warp, int stage) const {
    return base + (warp * kStages + stage) * kChunkBytes;
  }
  __device__ __forceinline__ u32 sums() const { return base + kDecodeWarps * kStages * kChunkBytes; }
  __device__ __forceinline__ u32 sums_of(int warp, int row) const {
    return sums() + warp * kSumsWarp + row * kSumsRow;
  }
  // Of a warp and a row: maximum, sum of the weights, sum of the rounded weights.
  __device__ __forceinline__ u32 statistics_of(int warp, int row) const {
    return sums() + kSumsBytes + (warp * kRows + row) * 16;
  }
  // A chunk has come that the copy engine brings.
  __device__ __forceinline__ u32 full(int warp, int stage) const {
    return statistics_of(kDecodeWarps, 0) + (warp * 4 + stage) * 8;
  }
  __device__ __forceinline__ u32 words() const { return full(kDecodeWarps, 0); }
  // The i-th four words of each lane, of eight rows; and of all rows the factors that undo theirs.
  __device__ __forceinline__ u32 query_words(int eight, int i) const {
    return words() + 16 + ((eight * kQueryWords / 4 + i) * 32 + threadIdx.x % 32) * 16;
  }
  __device__ __forceinline__ u32 undone(int row) const {
    return words() + 16 + kRows / 8 * kQueryWords * 128 + row * 4;
  }

  // Where 16 bytes of a token's row lie: tiles of 16 rows of 128 bytes, or of 64, with a swizzle as wide.
  template <int kRow>
  __device__ __forceinline__ static u32 place(int token, int i) {
    constexpr int kTile = tile_bytes<kRow>(), kPieces = kTile / 16;
    const int swizzle = kTile == 128 ? token & 7 : token >> 1 & 3;
    return i / kPieces * kChunk * kTile + token * kTile + ((i % kPieces ^ swizzle) << 4);
  }
  template <int kRow>
  __device__ __forceinline__ static constexpr int tile_bytes() { return kRow % 128 == 0 ? 128 : 64; }
};

// Token of a chunk that a product's row g < 8 is of; row g + 8 is of the token eight later. So lanes that read keys or
// values at once read from all banks.
__device__ __forceinline__ int token_of_row(int g) { return g ^ (g & 1) * 4; }

// The segment at a place, and how many chunks of it some row sees. The part is read anew: registers are scarce.
template <int kRows>
__device__ __forceinline__ Segment chunks_at(const AttentionParams& p, RaggedTile& tile, int place, int& chunks) {
  const Segment segment = visible_segment(p, tile, part_of_cta(p, blockIdx.y), place);
  tile.rows = min(tile.rows, kRows);
  const int begin = segment.begin * kBlockTokens;
  const int end = min(segment.tokens, seen_by(p, tile, segment.tokens, tile.rows - 1).end);
  chunks = min(segment.blocks * (kBlockTokens / kChunk), (max(end - begin, 0) + kChunk - 1) / kChunk);
  return segment;
}

// One warp copies 16 rows of kRowBytes, of which the first `bytes` exist; lane k has the offset of row k, -1 for zeros.
template <typename Layout, int kRowBytes>
__device__ __forceinline__ void copy_chunk(const char* base, i64 own, int bytes, u32 to) {
  constexpr int kLanes = Layout::template tile_bytes<kRowBytes>() / 16, kAtOnce = 32 / kLanes;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int first = 0; first < kChunk; first += kAtOnce) {
    const int row = first + lane / kLanes;
    const i64 offset = __shfl_sync(0xffffffffu, own, row);
#pragma unroll
    for (int i = lane % kLanes; i < kRowBytes / 16; i += kLanes) {
      const bool exists = offset >= 0 && i * 16 < bytes;
      copy_16_async(to + Layout::template place<kRowBytes>(row, i), base + (exists ? offset + i * 16 : 0), exists);
    }
  }
}

__device__ __forceinline__ const char* query_row(const AttentionParams& p, const RaggedTile& tile, int row) {
  const Query of(p, tile, row);
  return p.q + of.at.batch * p.q_stride_batch + of.at.token * p.q_stride_token + of.head * p.q_stride_head;
}

// The token whose offset a lane has: number and row of its page; the row is -1 where there is no token.
struct ChunkRow {
  int number, row;
};

// A warp's chunks, in the order in which it multiplies them. Page numbers are loaded a chunk before they are needed.
template <typename Layout, int kRows>
struct ChunksAhead {
  const AttentionParams& p;
  const Layout& shared;
  const int last_place, warp, lane;
  RaggedTile tile;
  Segment segment;
  int place, chunk, chunks;  // chunk: of the segment

  // From a tile on; first_place: of it.
  __device__ __forceinline__ ChunksAhead(const AttentionParams& p, const Layout& shared, const RaggedTile& tile,
                                         const Segment& segment, int chunks, int first_place, int last_place)
      : p(p), shared(shared), last_place(last_place), warp(threadIdx.x / 32), lane(threadIdx.x % 32), tile(tile),
        segment(segment), place(first_place), chunk(warp - kDecodeWarps), chunks(chunks) {}

  __device__ __forceinline__ ChunkRow advance() {
    chunk += kDecodeWarps;
    while (chunk >= chunks && place < last_place) {
      segment = chunks_at<kRows>(p, tile, ++place, chunks);
      chunk = warp;
    }
    ChunkRow at = {0, -1};
    if (chunk >= chunks) return at;
    const int token = segment.begin * kBlockTokens + chunk * kChunk + lane % kChunk;
    int row;
    const i64 entry = entry_of(p, tile, segment.tokens, token, row);
    if (entry < 0) return at;
    at.row = row;
    if (p.block_table != nullptr) at.number = p.block_table[entry];
    return at;
  }

  // A whole chunk of one page comes by the copy engine, which is told in what is returned; any other one row by row.
  __device__ __forceinline__ bool copy_async(const ChunkRow& at, int stage, bool was_boxed) const {
    const u32 to = shared.chunk(warp, stage);
    const bool exists = at.row >= 0 && is_page(p, at.number);
    if (p.box_rows == kChunk && __all_sync(0xffffffffu, exists)) {
      if (!was_boxed) fence_proxy_async_shared();  // threads have written there
      __syncwarp();
      if (lane == 0) {
        const u32 full = shared.full(warp, stage);
        mbarrier_arrive_expect_tx(full, Layout::kChunkBytes);
        copy_boxes<Layout::kKeyRow>(&p.key_map, to, full, at);
        copy_boxes<Layout::kValueRow>(&p.value_map, to + Layout::kKeyBytes, full, at);
      }
      return true;
    }
    const auto offset = [&](const Columns& of) {
      return exists ? at.number * of.stride_page + at.row * of.stride_row + blockIdx.z * of.stride_head : i64{-1};
    };
    copy_chunk<Layout, Layout::kKeyRow>(p.keys.base, offset(p.keys), p.key_columns * Layout::kUnit, to);
    copy_chunk<Layout, Layout::kValueRow>(p.values.base, offset(p.values), p.value_columns * Layout::kUnit,
                                          to + Layout::kKeyBytes);
    return false;
  }

  template <int kRow>
  __device__ __forceinline__ static void copy_boxes(const TensorMap* map, u32 to, u32 full, const ChunkRow& at) {
    constexpr int kTile = Layout::template tile_bytes<kRow>();
#pragma unroll
    for (int i = 0; i < kRow / kTile; ++i)
      tma_load_4d_async(to + i * kChunk * kTile, map, full, i * kTile / Layout::kUnit, at.row, blockIdx.z, at.number);
  }
};

// What a warp has of a row tile. Lane 4 g + q has the query of row g, scores and outputs of rows 2 q and 2 q + 1, of
// each eight rows.
template <typename T, int kKeys, int kValues, int kRows, bool kE4m3>
struct Attender {
  using Layout = DecodeLayout<kKeys, kValues, kRows, kE4m3>;
  using Unit = typename TypeIf<kE4m3, Fp16, T>::Type;  // of the products
  static constexpr int kEights = kRows / 8;
  static constexpr int kReads = Layout::kKeyRow / 64;  // of 16 bytes of a key, by a lane
  static constexpr int kSteps = kE4m3 ? 4 : 2;         // products of each
  static constexpr int kRounds = kValues / 64;         // of sums, 64 columns each
  static constexpr int kEach = kDecodeWarps / 4;       // of the warps, whose outputs a lane adds up

  const AttentionParams& p;
  const Layout& shared;
  const RaggedTile& tile;
  const int warp, lane;
  u32 query[kEights][Layout::kQueryWords];  // unless warps share it
  float output[kEights][kValues / 16][4];
  float scores[kEights][4];
  float maximum[kEights][2], sum[kEights][2], weight[kEights][2];
  float factor[kEights][2];  // of scores, to the base 2, or of what is capped
  Seen common;  // what all rows see

  __device__ __forceinline__ Attender(const AttentionParams& p, const Layout& shared, const RaggedTile& tile)
      : p(p), shared(shared), tile(tile), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

  // Eight rows, columns in the order in which the keys' words have them.
  __device__ __forceinline__ void load_rows(u32 (&words)[Layout::kQueryWords], int eight) const {
    constexpr int kColumns = 16 / Layout::kUnit;
    const int row = eight * 8 + lane / 4;
    const char* const from = row < tile.rows ? query_row(p, tile, row) : nullptr;
#pragma unroll
    for (int i = 0; i < Layout::kQueryWords / 4; ++i) {
      const int column = (4 * (i * 8 / kColumns) + lane % 4) * kColumns + i * 8 % kColumns;
      uint4 v = {0, 0, 0, 0};
      if (from != nullptr && column < p.key_columns)
        v = load_global_16(reinterpret_cast<const uint4*>(from + column * 2));
      words[4 * i] = v.x;
      words[4 * i + 1] = v.y;
      words[4 * i + 2] = v.z;
      words[4 * i + 3] = v.w;
    }
  }

  // Ahead of begin(), which waits for it.
  __device__ __forceinline__ void load_query() {
    if constexpr (!Layout::kSharesQuery)
#pragma unroll
      for (int n = 0; n < kEights; ++n) load_rows(query[n], n);
  }

  // Eight rows of a bfloat16 query as float16, times powers of two; what undoes that of the lane's row.
  __device__ __forceinline__ static float narrow_query(u32 (&words)[Layout::kQueryWords]) {
    if constexpr (!kE4m3 || !kIsBf16<T>) return 1.0f;
    u32 highest = 0;  // as bits: those of larger numbers are larger
#pragma unroll
    for (int i = 0; i < Layout::kQueryWords; ++i)
      highest = max(highest, max(words[i] << 16 & 0x7f800000u, words[i] & 0x7f800000u));
    highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
    highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
    // 2^(e - 127) becomes 2^14; of tiny numbers, and where there is an infinity, less is done.
    const u32 exponent = min(max(highest >> 23, 30u), 254u);
    const float up = __uint_as_float((127 + 127 + 14 - exponent) << 23), down = __uint_as_float((exponent - 14) << 23);
#pragma unroll
    for (int i = 0; i < Layout::kQueryWords; ++i) {
      const float2 pair = unpack_pair<Bf16>(words[i]);
      words[i] = pack_pair<Fp16>(pair.x * up, pair.y * up);
    }
    return down;
  }

  __device__ __forceinline__ void share_query() const {
    if (warp < kEights) {
      u32 words[Layout::kQueryWords];
      load_rows(words, warp);
      const float undone = narrow_query(words);
#pragma unroll
      for (int i = 0; i < Layout::kQueryWords / 4; ++i)
        store_shared_16(shared.query_words(warp, i),
                        {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]});
      if (lane % 4 == 0) store_shared_float(shared.undone(warp * 8 + lane / 4), undone);
    }
    __syncthreads();
  }

  // The sink counts once: in the first piece of a row tile, for warp 0.
  __device__ __forceinline__ void begin(const Segment& segment) {
    const float of_keys = kE4m3 ? p.key_scale.of(request_of(p, tile)) : 1.0f;
    const bool has_sink = p.sinks != nullptr && warp == 0 && segment.first_part == blockIdx.y;
    common = {seen_by(p, tile, segment.tokens, tile.rows - 1).first, seen_by(p, tile, segment.tokens, 0).end};
    if constexpr (Layout::kSharesQuery) share_query();
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int i = 0; i < kValues / 16; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) output[n][i][e] = 0.0f;
      float undone = 1.0f;
      if constexpr (!Layout::kSharesQuery) undone = narrow_query(query[n]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = n * 8 + lane % 4 * 2 + r;
        maximum[n][r] = kLowest;
        sum[n][r] = weight[n][r] = 0.0f;
        const float scale = of_keys * (Layout::kSharesQuery ? load_shared_float(shared.undone(row))
                                                            : __shfl_sync(0xffffffffu, undone, (lane % 4 * 2 + r) * 4));
        const float of_scores = (p.to_softcap == 0.0f ? p.scale_log2 : p.to_softcap) * scale;
        factor[n][r] = fminf(of_scores, kMaxFactor);
        if (!has_sink || row >= tile.rows) continue;
        const float sink = p.sinks[Row(p, tile, row).head] * kLog2E;
        if (sink == -kInfinity) continue;
        maximum[n][r] = sink;
        if (lane < 4) sum[n][r] = weight[n][r] = 1.0f;
      }
    }
  }

  __device__ __forceinline__ void multiply_keys(u32 keys) {
    constexpr int kTurns = kEights > 1 ? 1 : 2;  // each product waits for the one before
    float products[kTurns][kEights][4];
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) products[0][n][e] = products[kTurns - 1][n][e] = 0.0f;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const auto place = [&](int more) {
        return keys + Layout::template place<Layout::kKeyRow>(token_of_row(lane / 4) + more, 4 * i + lane % 4);
      };
      const uint4 low = load_shared_16(place(0)), high = load_shared_16(place(8));
      const u32 lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
      u32 b[kEights][kSteps * 2];
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int j = 0; j < kSteps / 2; ++j) {
          const int first = i * kSteps * 2 + 4 * j;
          uint4 v;
          if constexpr (Layout::kSharesQuery)
            v = load_shared_16(shared.query_words(n, first / 4));
          else
            v = {query[n][first], query[n][first + 1], query[n][first + 2], query[n][first + 3]};
          b[n][4 * j] = v.x;
          b[n][4 * j + 1] = v.y;
          b[n][4 * j + 2] = v.z;
          b[n][4 * j + 3] = v.w;
        }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        u32 a[4];
        if constexpr (kE4m3) {
          expand_e4m3x4(lows[k], a[0], a[2]);
          expand_e4m3x4(highs[k], a[1], a[3]);
        } else {
          a[0] = lows[2 * k];
          a[1] = highs[2 * k];
          a[2] = lows[2 * k + 1];
          a[3] = highs[2 * k + 1];
        }
#pragma unroll
        for (int n = 0; n < kEights; ++n)
          mma_m16n8k16<Unit>(products[k % kTurns][n], a[0], a[1], a[2], a[3], b[n][2 * k], b[n][2 * k + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (kTurns > 1) products[0][n][e] += products[kTurns - 1][n][e];
        scores[n][e] = products[0][n][e] * factor[n][e & 1];
      }
  }

  // tanh(x) = 1 - 2 / (1 + exp(2 x)); scale_log2 is softcap * log2(e).
  __device__ __forceinline__ void cap_scores() {
    if (p.to_softcap == 0.0f) return;
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        scores[n][e] = p.scale_log2 * (1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(scores[n][e])));
  }

  __device__ __forceinline__ void mask_scores(const Segment& segment, int first) {
    if (first >= common.first && first + kChunk <= common.end) return;
    const int token = first + token_of_row(lane / 4);
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Seen seen = seen_by(p, tile, segment.tokens, n * 8 + lane % 4 * 2 + r);
        if (token < seen.first || token >= seen.end) scores[n][r] = -kInfinity;
        if (token + 8 < seen.first || token + 8 >= seen.end) scores[n][r + 2] = -kInfinity;
      }
  }

  __device__ __forceinline__ void raise_maximum() {
    bool grown = false;
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        grown |= fmaxf(scores[n][r], scores[n][r + 2]) > maximum[n][r] + kMaximumSlack;
    if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float next = fmaxf(scores[n][r], scores[n][r + 2]);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, lanes));
        if (next <= maximum[n][r] + kMaximumSlack) next = maximum[n][r];
        const float kept = exp2_approx(maximum[n][r] - next);
#pragma unroll
        for (int i = 0; i < kValues / 16; ++i) {
          output[n][i][r] *= kept;
          output[n][i][r + 2] *= kept;
        }
        sum[n][r] *= kept;
        weight[n][r] *= kept;
        maximum[n][r] = next;
      }
  }

  // Probabilities as operands of the second product.
  __device__ __forceinline__ void exponentiate(u32 (&probabilities)[kEights][2]) {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float a = exp2_approx(scores[n][2 * half] - maximum[n][0]);
        const float b = exp2_approx(scores[n][2 * half + 1] - maximum[n][1]);
        const u32 packed = pack_pair<Unit>(a, b);
        const float2 rounded = unpack_pair<Unit>(packed);
        sum[n][0] += a;
        sum[n][1] += b;
        weight[n][0] += rounded.x;
        weight[n][1] += rounded.y;
        probabilities[n][half] = transpose_matrix(packed);
      }
  }

  __device__ __forceinline__ void multiply_values_of(int i, const u32 (&a)[4], const u32 (&probabilities)[kEights][2]) {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
      mma_m16n8k16<Unit>(output[n][i], a[0], a[1], a[2], a[3], probabilities[n][0], probabilities[n][1]);
  }

  // `words`: of the four tokens, the same columns each. Products i and, of e4m3, i + 1 are of columns in pairs.
  __device__ __forceinline__ void multiply_word(int i, const u32 (&words)[4], const u32 (&probabilities)[kEights][2]) {
    u32 a[4];
    if constexpr (kE4m3) {
      const u32 first = __byte_perm(words[0], words[1], 0x5140), last = __byte_perm(words[2], words[3], 0x5140);
      expand_e4m3x4(first, a[0], a[1]);
      expand_e4m3x4(last, a[2], a[3]);
      multiply_values_of(i, a, probabilities);
      const u32 next = __byte_perm(words[0], words[1], 0x7362), end = __byte_perm(words[2], words[3], 0x7362);
      expand_e4m3x4(next, a[0], a[1]);
      expand_e4m3x4(end, a[2], a[3]);
      multiply_values_of(i + 1, a, probabilities);
    } else {
      a[0] = __byte_perm(words[0], words[1], 0x5410);
      a[1] = __byte_perm(words[0], words[1], 0x7632);
      a[2] = __byte_perm(words[2], words[3], 0x5410);
      a[3] = __byte_perm(words[2], words[3], 0x7632);
      multiply_values_of(i, a, probabilities);
    }
  }

  __device__ __forceinline__ void multiply_values(u32 chunk, const u32 (&probabilities)[kEights][2]) {
    constexpr int kEach = kE4m3 ? 2 : 1;  // products of a word
    const int g = lane / 4, q = lane % 4;
    const auto place = [&](int e, int i) {  // of the e-th of a lane's four tokens
      return chunk + Layout::kKeyBytes +
             Layout::template place<Layout::kValueRow>(token_of_row(2 * q + e % 2) + e / 2 * 8, i);
    };
    if constexpr (Layout::kValueRow == 64) {  // eight bytes a lane
      float2 v[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = load_shared_float2(place(e, g / 2) + g % 2 * 8);
      const u32 first[4] = {__float_as_uint(v[0].x), __float_as_uint(v[1].x), __float_as_uint(v[2].x),
                            __float_as_uint(v[3].x)};
      const u32 second[4] = {__float_as_uint(v[0].y), __float_as_uint(v[1].y), __float_as_uint(v[2].y),
                             __float_as_uint(v[3].y)};
      multiply_word(0, first, probabilities);
      multiply_word(kEach, second, probabilities);
    } else {
#pragma unroll
      for (int s = 0; s < Layout::kValueRow / 128; ++s) {
        uint4 v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = load_shared_16(place(e, g + 8 * s));
        const u32 words[4][4] = {{v[0].x, v[1].x, v[2].x, v[3].x},
                                 {v[0].y, v[1].y, v[2].y, v[3].y},
                                 {v[0].z, v[1].z, v[2].z, v[3].z},
                                 {v[0].w, v[1].w, v[2].w, v[3].w}};
#pragma unroll
        for (int w = 0; w < 4; ++w) multiply_word((4 * s + w) * kEach, words[w], probabilities);
      }
    }
  }

  // First of the eight columns of outputs 4 round to 4 round + 3 in lanes of g.
  __device__ __forceinline__ static int column_of(int round, int g) {
    return kE4m3 && kValues > 64 ? round / 2 * 128 + g * 16 + round % 2 * 8 : round * 64 + g * 8;
  }

  __device__ __forceinline__ void attend(const Segment& segment, u32 chunk, int first) {
    u32 probabilities[kEights][2];
    multiply_keys(chunk);
    cap_scores();
    mask_scores(segment, first);
    raise_maximum();
    exponentiate(probabilities);
    multiply_values(chunk, probabilities);
  }

  // The warps' results, added up; then out and log-sum-exp, or a piece of them. Warp 4 + w of those that add has the
  // columns of lanes 4 w to 4 w + 3, its lane 4 g + q columns 2 q and 2 q + 1 of them in row g.
  __device__ __forceinline__ void finish(const Segment& segment, bool more) {
    const int g = lane / 4, q = lane % 4, adder = warp - kWarpgroup / 32;
    const bool adds = adder >= 0 && adder < kJoinWarps;
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          sum[n][r] += __shfl_xor_sync(0xffffffffu, sum[n][r], lanes);
          weight[n][r] += __shfl_xor_sync(0xffffffffu, weight[n][r], lanes);
        }
    __syncthreads();  // what the tile before left has been read
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (lane < 4)
          store_shared_float4(shared.statistics_of(warp, n * 8 + 2 * q + r),
                              {maximum[n][r], sum[n][r], weight[n][r], 0.0f});
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        if (n + round > 0) __syncthreads();
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float(&even)[4] = output[n][4 * round + 2 * half], (&odd)[4] = output[n][4 * round + 2 * half + 1];
            store_shared_float4(shared.sums_of(warp, 2 * q + r) + g * 32 + half * 16,
                                {even[r], even[r + 2], odd[r], odd[r + 2]});
          }
        __syncthreads();
        if (!adds) continue;
        add_warps(segment, n, adder, column_of(round, adder), round == 0);
      }
    if (adds && segment.split())
      Joiner<T, kValues, Layout::kSharesQuery ? 4 : 1, AttentionParams, RaggedTile>(
          p, {shared.words(), shared.sums(), shared.sums() + 8192}, tile, segment).join(more);
  }

  // Each lane of a quad weighs every fourth warp's output of row lane / 4, relative to the highest score of all. Gives
  // what their sum is divided by, inverted; the first time it stores the row's log-sum-exp.
  __device__ __forceinline__ float weigh_warps(const Segment& segment, int n, int adder, float (&own)[kEach],
                                               bool is_first) const {
    const int row = n * 8 + lane / 4;
    float highest = kLowest, total = 0.0f, rounded = 0.0f;
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      highest = fmaxf(highest, load_shared_float(shared.statistics_of(lane % 4 + 4 * k, row)));
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const float4 of_warp = load_shared_float4(shared.statistics_of(lane % 4 + 4 * k, row));
      own[k] = exp2_approx(of_warp.x - highest);
      total += own[k] * of_warp.y;
      rounded += own[k] * of_warp.z;
    }
    total = sum_of_quad(total);
    rounded = sum_of_quad(rounded);
    if (is_first && adder == 0 && lane % 4 == 0) {
      const float lse = total == 0.0f ? -kInfinity : highest + log2_approx(total);
      float* const of_piece = p.partial_lse + piece_index(p, tile, blockIdx.y, segment.slot) * kRowGroup + row;
      if (!segment.split()) {
        if (row < tile.rows) store_lse(p, segment.request, Row(p, tile, row), lse);
      } else {
        of_piece[0] = lse;
        if (kEights == 1) of_piece[8] = -kInfinity;
      }
    }
    const float inverse = rounded == 0.0f ? 0.0f : reciprocal_approx(rounded);
    return kE4m3 ? inverse * p.value_scale.of(request_of(p, tile)) : inverse;
  }

  __device__ __forceinline__ static float sum_of_quad(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
  }

  // Each lane of a quad adds up eight columns of its warps; then they trade, so that each has the sums of two.
  __device__ __forceinline__ void add_warps(const Segment& segment, int n, int adder, int column,
                                            bool is_first) const {
    const int q = lane % 4;
    float own[kEach], sums[8];
    const float inverse = weigh_warps(segment, n, adder, own, is_first);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const u32 from = shared.sums_of(q + 4 * k, lane / 4) + adder * 32;
      const float4 low = load_shared_float4(from), high = load_shared_float4(from + 16);
      const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += own[k] * v[i];
    }
    float four[4], two[2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      four[i] = (q & 2 ? sums[4 + i] : sums[i]) + __shfl_xor_sync(0xffffffffu, q & 2 ? sums[i] : sums[4 + i], 2);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      two[i] = (q & 1 ? four[2 + i] : four[i]) + __shfl_xor_sync(0xffffffffu, q & 1 ? four[i] : four[2 + i], 1);
    store(segment, n, column, two[0] * inverse, two[1] * inverse);
  }

  // Two columns of a row each, of `column` and the seven after it; of a piece, whose one row group has 16 rows.
  __device__ __forceinline__ void store(const Segment& segment, int n, int column, float a, float b) const {
    constexpr int kHalf = kValues / 16;  // eights of half of the columns
    if (!segment.split())
      return store_pair<T>(p, tile, segment.request, n * 8 + lane / 4, lane % 4, column, a, b);
    const int half = column / 8 / kHalf;
    float4* const piece = p.partial_out + piece_offset<kValues>(p, piece_index(p, tile, blockIdx.y, segment.slot), half,
                                                                0, column / 8 - half * kHalf, lane);
    if (kEights == 1)
      store_global_float4(piece, a, b, 0.0f, 0.0f);
    else
      store_global_float2(reinterpret_cast<float2*>(piece) + n, a, b);
  }
};

template <typename T, int kKeys, int kValues, int kRows, bool kE4m3>
__device__ __forceinline__ void attention_decode(const AttentionParams& p) {
  using Layout = DecodeLayout<kKeys, kValues, kRows, kE4m3>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Layout shared = {shared_address(shared_bytes)};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (lane < Layout::kStages) {
    mbarrier_init(shared.full(warp, lane), 1);
    fence_mbarrier_init();
    fence_proxy_async_shared();
  }
  if (p.box_rows == kChunk && threadIdx.x == 0) prefetch_tensor_map(&p.key_map);
  if (p.box_rows == kChunk && threadIdx.x == 32) prefetch_tensor_map(&p.value_map);
  if (warp == 2) prefetch_plan(p, lane);
  __syncwarp();
  grid_dependency_launch();
  grid_dependency_wait();

  int place, last_place;
  {
    const Part part = part_of_cta(p, blockIdx.y);
    place = part.place;
    last_place = last_place_of(p, part);
  }
  u32 boxed = 0, phases = 0;  // a bit for each stage
  int chunks = 0;
  RaggedTile tile(p);
  Segment segment;
  Attender<T, kKeys, kValues, kRows, kE4m3> attender(p, shared, tile);
  if (place <= last_place) {
    segment = chunks_at<kRows>(p, tile, place, chunks);
    attender.load_query();
  }
  ChunksAhead<Layout, kRows> ahead(p, shared, tile, segment, chunks, place, last_place);
  ChunkRow first[Layout::kStages];
#pragma unroll
  for (int s = 0; s < Layout::kStages; ++s) first[s] = ahead.advance();
#pragma unroll
  for (int s = 0; s < Layout::kStages; ++s) {
    boxed |= static_cast<u32>(ahead.copy_async(first[s], s, false)) << s;
    copy_async_commit();
  }
  ChunkRow next = ahead.advance();

  int stage = 0;
#pragma unroll 1
  while (place <= last_place) {
    attender.begin(segment);
#pragma unroll 1
    for (int chunk = warp; chunk < chunks; chunk += kDecodeWarps) {
      copy_async_wait<Layout::kStages - 1>();
      const u32 bit = 1u << stage;
      if (boxed & bit) {
        mbarrier_wait(shared.full(warp, stage), (phases & bit) != 0, "a chunk");
        phases ^= bit;
      }
      __syncwarp();
      attender.attend(segment, shared.chunk(warp, stage), segment.begin * kBlockTokens + chunk * kChunk);
      __syncwarp();
      boxed = ahead.copy_async(next, stage, (boxed & bit) != 0) ? boxed | bit : boxed & ~bit;
      copy_async_commit();
      next = ahead.advance();
      stage = stage + 1 < Layout::kStages ? stage + 1 : 0;
    }
    const bool more = place++ < last_place;
    attender.finish(segment, more);
    if (!more) break;
    segment = chunks_at<kRows>(p, tile, place, chunks);
    attender.load_query();
  }
  copy_async_wait_all();
}

}  // namespace cumla::mha
