// SPDX-License-Identifier: Apache-2.0
// Attention of queries of different lengths to keys and values in pages, by the ragged schedule (split/plan.cuh): each
// CTA has a part, and attends for one row tile after another, 64 query rows of a kv head, to the blocks of its part.
// grid = (1, parts, kv heads), 384 threads, or 512 with most of e4m3, one CTA an SM.
//
// Three warpgroups. Warpgroup 0 loads: warp 0 keys and values (TMA), or all four warps a quarter of the rows each where
// pages are no multiple of eight tokens; warps 2 and 3 the query rows. e4m3 keys and values are converted on their way
// by warpgroups 0 and 3 (attention/e4m3.cuh), and their factors multiply scores and outputs. Warpgroups 1 and 2
// compute, every second block each, with a running maximum, sums and output of their own. At the end of a tile they
// exchange halves of their outputs: consumer c keeps the columns of half c.
//
// The block counter runs on over the tiles of a part: block t belongs to consumer t % 2 and stage t % kStages.
//
// Shared memory: query 8,192 a 64 columns + stages of as much for keys and for values + exchange of 64 x value columns
//                x 4 + sums 1,536 + barriers 256; 231,168 B of 232,448 with 256 columns and two stages
//                e4m3: fewer stages, and after the barriers raw blocks of half a stage (attention/e4m3.cuh)
// Registers:     consumers 224 (up to 128 output, 32 scores, 16 probabilities), loaders 56; with e4m3 176 and 80, or
//                200 and 104 with 256 columns
#include "mha/attention/copy.cuh"
#include "mha/attention/e4m3.cuh"
#include "mha/attention/layout.cuh"
#include "split/join.cuh"
#include "split/output.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

constexpr int kTileBytes = 64 * 128;  // 64 rows x 64 columns of 16 bits, 128-byte swizzle
constexpr int kConsumerBarrier = kConsumersBarrier + 1;

template <int kKeyTiles, int kValueTiles, bool kE4m3>
struct SharedLayout {
  static constexpr int kTileBytes = mha::kTileBytes, kTiles = kKeyTiles + kValueTiles;
  // Even: each consumer, and each of two loading warpgroups, has stages of its own.
  static constexpr int kStages = kTiles > 4 || (kTiles > 2 && kE4m3) ? 2 : 4;
  static constexpr int kBuffers = kTiles > 5 && kE4m3 ? 1 : kStages;  // of stages that take turns
  static constexpr int kLoaders = kE4m3 && kTiles <= 5 ? 2 : 1;  // warpgroups
  static constexpr int kLoaderRegisters = !kE4m3 ? 56 : kLoaders > 1 ? 80 : 104;
  static constexpr int kConsumerRegisters = !kE4m3 ? 224 : kLoaders > 1 ? 176 : 200;
  static constexpr int kRawBlocks = !kE4m3 ? 0 : kTiles > 5 ? 2 : kTiles > 4 ? 4 : kTiles > 2 ? 6 : 8;
  static constexpr int kKeyBytes = kKeyTiles * kTileBytes, kValueBytes = kValueTiles * kTileBytes;
  static constexpr int kExchangeBytes = 2 * kRowTile * kValueTiles * 32 * 4;
  static constexpr int kSumsBytes = 2 * 3 * kRowTile * 4, kBarrierBytes = 256;
  static constexpr int kPagesBytes = kBlockTokens * 8;  // of a block
  static constexpr int kBytes = kKeyBytes + kBuffers * (kKeyBytes + kValueBytes) + kExchangeBytes + kSumsBytes +
                                kBarrierBytes + kRawBlocks * (kTiles * kTileBytes / 2 + kPagesBytes);
  static_assert(kExchangeBytes >= 8192 + 1024, "joining uses it, too");

  u32 query;

  __device__ __forceinline__ u32 keys(int s) const {
    return query + kKeyBytes + (kBuffers == kStages ? s : s % kBuffers) * (kKeyBytes + kValueBytes);
  }
  __device__ __forceinline__ u32 values(int s) const { return keys(s) + kKeyBytes; }
  __device__ __forceinline__ u32 exchange() const { return keys(0) + kBuffers * (kKeyBytes + kValueBytes); }
  __device__ __forceinline__ u32 of_row(int consumer, int what, int row) const {
    return exchange() + kExchangeBytes + ((consumer * 3 + what) * kRowTile + row) * 4;
  }
  __device__ __forceinline__ u32 barriers() const { return of_row(2, 0, 0); }
  __device__ __forceinline__ u32 keys_full(int s) const { return barriers() + s * 8; }
  __device__ __forceinline__ u32 values_full(int s) const { return barriers() + (kStages + s) * 8; }
  __device__ __forceinline__ u32 keys_free(int s) const { return barriers() + (2 * kStages + s) * 8; }
  __device__ __forceinline__ u32 values_free(int s) const { return barriers() + (3 * kStages + s) * 8; }
  __device__ __forceinline__ u32 query_full() const { return barriers() + 4 * kStages * 8; }
  __device__ __forceinline__ u32 query_free() const { return query_full() + 8; }
  __device__ __forceinline__ u32 words() const { return query_full() + 16; }
  __device__ __forceinline__ u32 raw_keys(int s) const {
    return barriers() + kBarrierBytes + s * kTiles * kTileBytes / 2;
  }
  __device__ __forceinline__ u32 raw_values(int s) const { return raw_keys(s) + kKeyBytes / 2; }
  __device__ __forceinline__ u32 raw_pages(int s) const { return raw_keys(kRawBlocks) + s * kPagesBytes; }
};

// One warp loads keys and values by boxes, each lane its own of a block.
template <typename Layout>
__device__ __forceinline__ void load_boxes(const AttentionParams& p, const Layout& shared, RaggedTile& tile,
                                           const Part& part, int last_place) {
  constexpr int kKeyTiles = Layout::kKeyBytes / kTileBytes, kValueTiles = Layout::kValueBytes / kTileBytes;
  const int lane = threadIdx.x % 32, first = lane * p.box_rows;
  int t = 0;
  for (int place = part.place; place <= last_place; ++place) {
    const Segment segment = visible_segment(p, tile, part, place);
#pragma unroll 1
    for (int i = 0; i < segment.blocks; ++i, ++t) {
      const int stage = t % Layout::kStages, phase = t / Layout::kStages & 1;
      int row = 0, page = -1;
      if (first < kBlockTokens)
        page = page_of(p, tile, segment.tokens, (segment.begin + i) * kBlockTokens + first, row);
      mbarrier_wait(shared.keys_free(stage), phase ^ 1, "a free stage of keys");
      if (lane == 0) mbarrier_arrive_expect_tx(shared.keys_full(stage), Layout::kKeyBytes);
      __syncwarp();
      if (first < kBlockTokens)
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k)
          tma_load_4d_async(shared.keys(stage) + k * kTileBytes + first * 128, &p.key_map, shared.keys_full(stage),
                            k * 64, row, blockIdx.z, page);
      mbarrier_wait(shared.values_free(stage), phase ^ 1, "a free stage of values");
      if (lane == 0) mbarrier_arrive_expect_tx(shared.values_full(stage), Layout::kValueBytes);
      __syncwarp();
      if (first < kBlockTokens)
#pragma unroll
        for (int k = 0; k < kValueTiles; ++k)
          tma_load_4d_async(shared.values(stage) + k * kTileBytes + first * 128, &p.value_map,
                            shared.values_full(stage), k * 64, row, blockIdx.z, page);
    }
  }
}

// A warp copies 32 query rows of a tile.
template <typename Layout>
__device__ __forceinline__ void load_query(const AttentionParams& p, const Layout& shared, const RaggedTile& tile,
                                           int loader, u32 phase) {
  mbarrier_wait(shared.query_free(), phase ^ 1, "a free query buffer");
  copy_query<Layout::kKeyBytes / kTileBytes, 32>(p, tile, loader * 32, shared.query);
  mbarrier_arrive_after_copies(shared.query_full());
}

template <typename Layout>
__device__ __forceinline__ void load_queries(const AttentionParams& p, const Layout& shared, RaggedTile& tile,
                                             const Part& part, int last_place, int loader) {
  for (int place = part.place; place <= last_place; ++place) {
    segment_of(p, tile, part, place);
    load_query(p, shared, tile, loader, (place - part.place) & 1);
  }
  copy_async_wait_all();
}

// All four warps load keys and values row by row, the last two of them the query rows before.
template <typename Layout>
__device__ __forceinline__ void load_rows(const AttentionParams& p, const Layout& shared, RaggedTile& tile,
                                          const Part& part, int last_place) {
  constexpr int kKeyTiles = Layout::kKeyBytes / kTileBytes, kValueTiles = Layout::kValueBytes / kTileBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp * 16;
  int t = 0;
  for (int place = part.place; place <= last_place; ++place) {
    const Segment segment = visible_segment(p, tile, part, place);
    if (warp >= 2) load_query(p, shared, tile, warp - 2, (place - part.place) & 1);
#pragma unroll 1
    for (int i = 0; i < segment.blocks; ++i, ++t) {
      const int stage = t % Layout::kStages, phase = t / Layout::kStages & 1;
      int row = 0;
      const int page = page_of(p, tile, segment.tokens, (segment.begin + i) * kBlockTokens + first + lane % 16, row);
      const auto offset = [&](const Columns& from) {
        return page < 0 ? i64{-1} : page * from.stride_page + row * from.stride_row + blockIdx.z * from.stride_head;
      };
      mbarrier_wait(shared.keys_free(stage), phase ^ 1, "a free stage of keys");
      copy_rows<kKeyTiles, kTileBytes, 16>(p.keys.base, offset(p.keys), first, p.key_columns, shared.keys(stage));
      mbarrier_arrive_after_copies(shared.keys_full(stage));
      mbarrier_wait(shared.values_free(stage), phase ^ 1, "a free stage of values");
      copy_rows<kValueTiles, kTileBytes, 16>(p.values.base, offset(p.values), first, p.value_columns, shared.values(stage));
      mbarrier_arrive_after_copies(shared.values_full(stage));
    }
  }
  copy_async_wait_all();
}

// One consumer warpgroup. Rows of a thread: 16 warp + lane / 4 and that + 8; in every group of eight columns the two at
// 2 (lane % 4). kCopied: tiles were written by threads' own copies, not by TMA. kScaled: keys and
// values have factors.
template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled>
struct Consumer {
  using Layout = SharedLayout<kKeyTiles, kValueTiles, kScaled>;
  using Value = typename TypeIf<kScaled, Fp16, T>::Type;  // of values and of probabilities
  static constexpr int kGroups = kValueTiles * 8, kHalf = kGroups / 2;  // of eight value columns

  const AttentionParams& p;
  const Layout& shared;
  const RaggedTile& tile;
  const int consumer, warp, lane, row;
  float output[kGroups * 4];
  float scores[32];
  u32 probabilities[16];
  float maximum[2], sum[2], weight[2];
  Seen seen[2];
  float key_factor, value_factor;  // kScaled

  __device__ __forceinline__ Consumer(const AttentionParams& p, const Layout& shared, const RaggedTile& tile,
                                      int consumer)
      : p(p), shared(shared), tile(tile), consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        row(warp * 16 + lane / 4) {}

  __device__ __forceinline__ void arrive(u32 barrier) const {  // once a warp
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  }

  // Factors of a product of query and key, to the base 2: p.scale_log2 is that of what is capped where there is a cap.
  __device__ __forceinline__ float score_factor() const {
    return kScaled && p.to_softcap == 0.0f ? p.scale_log2 * key_factor : p.scale_log2;
  }
  __device__ __forceinline__ float cap_factor() const { return kScaled ? p.to_softcap * key_factor : p.to_softcap; }

  // The sink counts once: in the first piece of a row tile, for consumer 0.
  __device__ __forceinline__ void begin(const Segment& segment) {
#pragma unroll
    for (int i = 0; i < kGroups * 4; ++i) output[i] = 0.0f;
    if constexpr (kScaled) {
      key_factor = p.key_scale.of(request_of(p, tile));
      value_factor = p.value_scale.of(request_of(p, tile));
    }
    const bool has_sink = p.sinks != nullptr && consumer == 0 && segment.first_part == blockIdx.y;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = kLowest;
      sum[r] = weight[r] = 0.0f;
      seen[r] = seen_by(p, tile, segment.tokens, row + 8 * r);
      if (!has_sink || row + 8 * r >= tile.rows) continue;
      const float sink = p.sinks[Row(p, tile, row + 8 * r).head] * kLog2E;
      if (sink == -kInfinity) continue;
      maximum[r] = sink;
      if (lane % 4 == 0) sum[r] = weight[r] = 1.0f;
    }
  }

  __device__ __forceinline__ void multiply_query(int stage) {
    warpgroup_arrive();
#pragma unroll
    for (int column = 0; column < kKeyTiles; ++column)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_m64n64k16_async<T>(scores, matrix_descriptor(shared.query + column * kTileBytes + k * 32, 0, 1024),
                                 matrix_descriptor(shared.keys(stage) + column * kTileBytes + k * 32, 0, 1024),
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
                               matrix_descriptor(shared.values(stage) + k * 2048, kTileBytes, 1024));
    warpgroup_commit();
    warpgroup_wait<0>();
    keep_behind_wait(output);
  }

  // Rows past the end of the request may hold NaN: their probabilities are 0, and 0 x NaN is NaN.
  __device__ __forceinline__ void clear_values_past(int stage, int valid) const {
    constexpr int kChunks = kValueTiles * 8;
    for (int i = valid * kChunks + threadIdx.x % kWarpgroup; i < kBlockTokens * kChunks; i += kWarpgroup)
      store_shared_zero_16(shared.values(stage) + (i % kChunks / 8) * kTileBytes + (i / kChunks) * 128 + (i % 8) * 16);
    fence_proxy_async_shared();
    if (consumer == 0)
      named_barrier_sync<kConsumerBarrier, kWarpgroup>();
    else
      named_barrier_sync<kConsumerBarrier + 1, kWarpgroup>();
  }

  // tanh(x) = 1 - 2 / (1 + exp(2 x)); what remains to be multiplied is scale_log2, which is softcap * log2(e) then.
  __device__ __forceinline__ void cap_scores() {
    if (p.to_softcap == 0.0f) return;
#pragma unroll
    for (int i = 0; i < 32; ++i)
      scores[i] = 1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(scores[i] * cap_factor()));
  }

  // Nothing to do where the first row sees the block's last token, and the last row its first.
  __device__ __forceinline__ void mask_scores(const Segment& segment, int block) {
    const int begin = block * kBlockTokens;
    if (begin + kBlockTokens <= seen_by(p, tile, segment.tokens, 0).end &&
        begin >= seen_by(p, tile, segment.tokens, kRowTile - 1).first)
      return;
    const int column = block * kBlockTokens + (lane % 4) * 2;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = column + 8 * j + (e & 1);
        if (token < seen[e >> 1].first || token >= seen[e >> 1].end) scores[4 * j + e] = -kInfinity;
      }
  }

  __device__ __forceinline__ void raise_maximum() {
    float next[2];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      next[r] = scores[2 * r];
#pragma unroll
      for (int j = 0; j < 8; ++j) next[r] = fmaxf(next[r], fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      next[r] *= score_factor();
      next[r] = fmaxf(next[r], __shfl_xor_sync(0xffffffffu, next[r], 1));
      next[r] = fmaxf(next[r], __shfl_xor_sync(0xffffffffu, next[r], 2));
      if (next[r] <= maximum[r] + kMaximumSlack) next[r] = maximum[r];
      grown |= next[r] != maximum[r];
    }
    if (!__any_sync(0xffffffffu, grown)) return;
    const float factor[2] = {exp2_approx(maximum[0] - next[0]), exp2_approx(maximum[1] - next[1])};
#pragma unroll
    for (int i = 0; i < kGroups * 4; ++i) output[i] *= factor[i >> 1 & 1];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] *= factor[r];
      weight[r] *= factor[r];
      maximum[r] = next[r];
    }
  }

  __device__ __forceinline__ void exponentiate() {
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int r = i >> 1 & 1;
      const float low = exp2_approx(__fmaf_rn(scores[i], score_factor(), -maximum[r]));
      const float high = exp2_approx(__fmaf_rn(scores[i + 1], score_factor(), -maximum[r]));
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
    for (int i = (consumer ^ t) & 1; i < segment.blocks; i += 2) {
      const int stage = (t + i) % Layout::kStages, phase = (t + i) / Layout::kStages & 1;
      mbarrier_wait(shared.keys_full(stage), phase, "keys");
      if constexpr (kCopied) fence_proxy_async_shared();
      multiply_query(stage);
      arrive(shared.keys_free(stage));
      cap_scores();
      mask_scores(segment, segment.begin + i);
      raise_maximum();
      exponentiate();
      mbarrier_wait(shared.values_full(stage), phase, "values");
      if constexpr (kCopied) fence_proxy_async_shared();
      const int valid = segment.tokens - (segment.begin + i) * kBlockTokens;
      if (valid < kBlockTokens) clear_values_past(stage, max(valid, 0));
      multiply_values(stage);
      arrive(shared.values_free(stage));
    }
    arrive(shared.query_free());
  }

  __device__ __forceinline__ static float sum_of_quad(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
  }

  // Where a group of eight columns of the half that goes to the other consumer lies.
  __device__ __forceinline__ u32 exchanged(int to, int j) const {
    return shared.exchange() + ((to * kHalf + j) * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
  }

  // Halves go to the other consumer; then out and log-sum-exp, or a piece of them.
  __device__ __forceinline__ void finish(const Segment& segment, bool more) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = sum_of_quad(sum[r]);
      weight[r] = sum_of_quad(weight[r]);
      if (lane % 4 == 0) {
        store_shared_float(shared.of_row(consumer, 0, row + 8 * r), maximum[r]);
        store_shared_float(shared.of_row(consumer, 1, row + 8 * r), sum[r]);
        store_shared_float(shared.of_row(consumer, 2, row + 8 * r), weight[r]);
      }
    }
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      float4 v;
      v.x = consumer == 0 ? output[4 * (kHalf + j)] : output[4 * j];
      v.y = consumer == 0 ? output[4 * (kHalf + j) + 1] : output[4 * j + 1];
      v.z = consumer == 0 ? output[4 * (kHalf + j) + 2] : output[4 * j + 2];
      v.w = consumer == 0 ? output[4 * (kHalf + j) + 3] : output[4 * j + 3];
      store_shared_float4(exchanged(1 - consumer, j), v);
    }
    consumers_sync();
    float own[2], other[2], inverse[2], lse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float theirs = load_shared_float(shared.of_row(1 - consumer, 0, row + 8 * r));
      const float highest = fmaxf(maximum[r], theirs);
      own[r] = exp2_approx(maximum[r] - highest);
      other[r] = exp2_approx(theirs - highest);
      const float total = own[r] * sum[r] + other[r] * load_shared_float(shared.of_row(1 - consumer, 1, row + 8 * r));
      const float rounded =
          own[r] * weight[r] + other[r] * load_shared_float(shared.of_row(1 - consumer, 2, row + 8 * r));
      inverse[r] = rounded == 0.0f ? 0.0f : reciprocal_approx(rounded);
      if constexpr (kScaled) inverse[r] *= value_factor;
      lse[r] = total == 0.0f ? -kInfinity : highest + log2_approx(total);
    }
    float half[kHalf * 4];
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      const float4 v = load_shared_float4(exchanged(consumer, j));
      const float theirs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float mine = consumer == 0 ? output[4 * j + e] : output[4 * (kHalf + j) + e];
        half[4 * j + e] = (own[e >> 1] * mine + other[e >> 1] * theirs[e]) * inverse[e >> 1];
      }
    }
    consumers_sync();  // the next tile writes there, and so does joining
    if (segment.split()) {
      write_piece(segment, half, lse);
      Joiner<T, kValueTiles * 64, 4, AttentionParams, RaggedTile>(
          p, {shared.words(), shared.exchange(), shared.exchange() + 8192}, tile, segment).join(more);
    } else {
      write_result(segment, half, lse);
    }
  }

  __device__ __forceinline__ void write_piece(const Segment& segment, const float (&half)[kHalf * 4],
                                              const float (&lse)[2]) const {
    if (warp >= p.row_groups) return;
    const i64 piece = piece_index(p, tile, blockIdx.y, segment.slot);
    if (consumer == 0 && lane % 4 == 0) {
      p.partial_lse[piece * p.row_groups * kRowGroup + row] = lse[0];
      p.partial_lse[piece * p.row_groups * kRowGroup + row + 8] = lse[1];
    }
    float4* const destination = p.partial_out + piece_offset<kValueTiles * 64>(p, piece, consumer, warp, 0, lane);
#pragma unroll
    for (int j = 0; j < kHalf; ++j)
      store_global_float4(destination + 32 * j, half[4 * j], half[4 * j + 1], half[4 * j + 2], half[4 * j + 3]);
  }

  __device__ __forceinline__ void write_result(const Segment& segment, const float (&half)[kHalf * 4],
                                               const float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r < tile.rows && consumer == 0 && lane % 4 == 0)
        store_lse(p, segment.request, Row(p, tile, row + 8 * r), lse[r]);
#pragma unroll
      for (int j = 0; j < kHalf; j += 2)
        store_columns<T, 1>(p, tile, segment.request, row + 8 * r, lane % 4,
                            (consumer * kHalf + j) * 8, half[4 * j + 2 * r], half[4 * j + 2 * r + 1],
                            half[4 * j + 4 + 2 * r], half[4 * j + 5 + 2 * r]);
    }
  }
};

template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kE4m3 = false>
__device__ __forceinline__ void attention(const AttentionParams& p) {
  using Layout = SharedLayout<kKeyTiles, kValueTiles, kE4m3>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Layout shared = {shared_address(shared_bytes)};
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0), warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < Layout::kStages; ++s) {
      mbarrier_init(shared.keys_full(s), kE4m3 ? 4 : kCopied ? kWarpgroup : 1);
      mbarrier_init(shared.values_full(s), kE4m3 ? 4 : kCopied ? kWarpgroup : 1);
      mbarrier_init(shared.keys_free(s), 4);
      mbarrier_init(shared.values_free(s), 4);
    }
    mbarrier_init(shared.query_full(), 64);
    mbarrier_init(shared.query_free(), 8);
    fence_mbarrier_init();
  }
  if (warp == 1) prefetch_plan(p, threadIdx.x % 32);
  if (!kCopied && !kE4m3 && (threadIdx.x == 64 || threadIdx.x == 96))
    prefetch_tensor_map(threadIdx.x == 64 ? &p.key_map : &p.value_map);
  grid_dependency_launch();
  __syncthreads();
  grid_dependency_wait();

  const Part part = part_of_cta(p, blockIdx.y);
  const int last_place = last_place_of(p, part);
  RaggedTile tile(p);
  if (warpgroup % 3 == 0) {
    registers_decrease<Layout::kLoaderRegisters>();
    if constexpr (kE4m3)
      load_e4m3<T>(p, shared, tile, part, last_place, warpgroup / 3);
    else if (kCopied)
      load_rows(p, shared, tile, part, last_place);
    else if (warp == 0)
      load_boxes(p, shared, tile, part, last_place);
    else if (warp >= 2)
      load_queries(p, shared, tile, part, last_place, warp - 2);
  } else {
    registers_increase<Layout::kConsumerRegisters>();
    Consumer<T, kKeyTiles, kValueTiles, kCopied, kE4m3> consumer(p, shared, tile, warpgroup - 1);
    int t = 0;
    for (int place = part.place; place <= last_place; ++place) {
      const Segment segment = visible_segment(p, tile, part, place);
      consumer.compute(segment, t, (place - part.place) & 1);
      consumer.finish(segment, place < last_place);
      t += segment.blocks;
    }
  }
}

}  // namespace cumla::mha
