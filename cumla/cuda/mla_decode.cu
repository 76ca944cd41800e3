// SPDX-License-Identifier: Apache-2.0
// Split-KV MLA decode for sm_90a: attention of up to 64 query rows of one kv head over the blocks of one part of the
// schedule (mla_plan.cuh). grid = (row tiles x kv heads, parts), 384 threads, one CTA an SM.
//
// Three warpgroups. Warpgroup 0 loads: warp 0 the even KV blocks of this CTA's sequence, warp 1 the odd ones (TMA, one
// thread each), warps 2 and 3 the query rows. Warpgroups 1 and 2 compute: consumer c holds the output columns
// [256 c, 256 c + 256) of all 64 rows and computes the scores of every second block; its probabilities go to the other
// consumer through shared memory, so that both add P V of every block, in the order of the blocks:
//
//   consumer 0:  S0 = Q K0   softmax0  O += P0 V0   S2 = Q K2 | O += P1 V1   softmax2  O += P2 V2 ...
//   consumer 1:              S1 = Q K1 | O += P0 V0  softmax1  O += P1 V1    S3 = Q K3 | O += P2 V2 ...
//
// That is the order where several row tiles read the same blocks: compute-bound, P V of the other's block runs beside
// the softmax. With one row tile, memory-bound, it comes before Q K, so that its stage is free for the next load earlier.
//
// The block counter runs on over the requests of a part: block t belongs to consumer t % 2 and stage t % 2 everywhere.
//
// The running maximum is handed on with the probabilities and only moves when a row grows by more than 2^8 over it, so
// that the 128 accumulators a thread are rarely rescaled; the result is the same up to rounding (sums stay in float32).
//
// Shared memory:  query 73,728 + two KV stages of 73,728 + P 8,192 + maxima 512 + sums 1,024 + barriers 224
//                 + pacer 1,024 = 232,160 B of 232,448
// Registers:      consumers 224 (128 output, 32 scores, 16 probabilities), loaders 56; 65,536 / 384 = 168 at the start
// Tensor work:    2,176 clocks a block; loads 73,728 B a block and CTA
#include "mla_plan.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla {

constexpr int kHeadDim = 576;
constexpr int kTileBytes = 64 * 128;  // 64 rows x 64 columns of 16 bits, 128-byte swizzle
constexpr int kTiles = kHeadDim / 64;
constexpr int kRopeTile = 8;
constexpr int kHalfTiles = 4;  // tiles of one half of V
constexpr int kStages = 2;
constexpr int kStageBytes = kTiles * kTileBytes;
constexpr int kWarpgroup = 128;
constexpr int kConsumerBarrier = 1;  // named barriers: both consumers; then one for each consumer
constexpr float kMaximumSlack = 8.0f;
constexpr float kLowest = -1e30f;  // below every score, and its differences stay finite

struct MlaDecodeParams {
  TensorMap kv;  // dims (576, page_size, num_kv_heads, num_pages), box (64, 64, 1, 1), 128-byte swizzle
  const char* q;
  i64 q_stride_batch, q_stride_token, q_stride_head;  // bytes
  char* out;
  i64 out_stride_batch, out_stride_token, out_stride_head;  // bytes
  float* lse;
  i64 lse_stride_batch, lse_stride_head, lse_stride_token;  // elements
  const int* block_table;
  i64 block_table_stride;  // elements
  const int* seqlens;
  const PartBound* bounds;
  float* partial_out;
  float* partial_lse;
  int parts;
  int max_blocks;  // that the block table can name
  int q_len;
  int heads_per_group;
  int row_tiles;  // tiles of one kv head
  int tile_rows;  // rows stored of a tile's partial
  int causal;
  int out_is_float;
  float scale_log2;  // softmax_scale * log2(e)
};

struct SharedLayout {
  u32 query, stages, probabilities, maxima, sums, barriers;

  __device__ __forceinline__ explicit SharedLayout(u32 base)
      : query(base),
        stages(query + kStageBytes),
        probabilities(stages + kStages * kStageBytes),
        maxima(probabilities + kTileBytes),
        sums(maxima + 2 * kRowTile * 4),
        barriers(sums + 4 * kRowTile * 4) {}

  __device__ __forceinline__ u32 stage(int s) const { return stages + s * kStageBytes; }
  __device__ __forceinline__ u32 maximum(int owner, int row) const { return maxima + (owner * kRowTile + row) * 4; }
  __device__ __forceinline__ u32 sum(int turn, int consumer, int row) const {
    return sums + ((turn * 2 + consumer) * kRowTile + row) * 4;
  }
  // Barriers: a tile of a stage is loaded; its half (0, 1: V columns; 2: RoPE) is free again; P of a consumer is written.
  __device__ __forceinline__ u32 full(int s, int tile) const { return barriers + (s * kTiles + tile) * 8; }
  __device__ __forceinline__ u32 free(int s, int half) const { return full(kStages, 0) + (s * 3 + half) * 8; }
  __device__ __forceinline__ u32 probabilities_full(int owner) const { return free(kStages, 0) + owner * 8; }
  __device__ __forceinline__ u32 query_full() const { return probabilities_full(2); }
  __device__ __forceinline__ u32 query_free() const { return query_full() + 8; }
  __device__ __forceinline__ u32 pacer(int thread) const { return query_free() + 8 + thread * 4; }
};

// The stretch of one request that this CTA computes.
struct Segment {
  int request, begin, blocks, tokens;
  bool split;
  int slot;
};

struct Tile {
  int kv_head, first_row, rows;  // rows of this tile that exist
  int least_shift, most_shift;   // causal: its rows see between tokens - most_shift and tokens - least_shift tokens

  __device__ __forceinline__ explicit Tile(const MlaDecodeParams& p) {
    kv_head = blockIdx.x / p.row_tiles;
    first_row = (blockIdx.x % p.row_tiles) * kRowTile;
    rows = min(kRowTile, p.q_len * p.heads_per_group - first_row);
    most_shift = shift_of(p, 0);
    least_shift = shift_of(p, rows - 1);
  }
  __device__ __forceinline__ int shift_of(const MlaDecodeParams& p, int row) const {
    const int token = min((first_row + row) / p.heads_per_group, p.q_len - 1);
    return p.causal ? p.q_len - 1 - token : 0;
  }
};

__device__ __forceinline__ Segment segment_of(const MlaDecodeParams& p, const Tile& tile, PartBound from,
                                              PartBound to, int request) {
  const int scheduled = p.seqlens[request];
  const int tokens = min(static_cast<i64>(scheduled), static_cast<i64>(p.max_blocks) * kBlockTokens);
  Segment segment;
  segment.request = request;
  segment.tokens = tokens;
  segment.begin = request == from.request ? from.block : 0;
  const int scheduled_blocks = blocks_of(scheduled);
  const int scheduled_end = request == to.request ? to.block : scheduled_blocks;
  segment.split = segment.begin > 0 || scheduled_end < scheduled_blocks;
  segment.slot = request == from.request ? 0 : 1;
  const int end = min(scheduled_end, blocks_of(max(tokens - tile.least_shift, 0)));
  segment.blocks = max(end - segment.begin, 0);
  return segment;
}

// Order in which the tiles of a block are wanted and become free: RoPE, the owner's half of V, the other half.
__device__ __forceinline__ int tile_in_order(int owner, int i) {
  return i == 0 ? kRopeTile : (i - 1) ^ (owner * kHalfTiles);
}

// Walks over every second block of this CTA's sequence.
struct BlockCursor {
  const MlaDecodeParams& p;
  const Tile& tile;
  const PartBound from, to;
  const int last_request, parity;
  int request, i, t;  // block i of the request's segment; t: blocks of the segments before it
  Segment segment;

  __device__ __forceinline__ BlockCursor(const MlaDecodeParams& p, const Tile& tile, PartBound from, PartBound to,
                                         int last_request, int parity)
      : p(p), tile(tile), from(from), to(to), last_request(last_request), parity(parity), request(from.request),
        i(parity), t(0) {
    if (valid()) segment = segment_of(p, tile, from, to, request);
    skip_to_block();
  }
  __device__ __forceinline__ bool valid() const { return request <= last_request; }
  __device__ __forceinline__ int page() const {
    return p.block_table[request * p.block_table_stride + segment.begin + i];
  }
  __device__ __forceinline__ void next() {
    i += 2;
    skip_to_block();
  }
  __device__ __forceinline__ void skip_to_block() {
    while (valid() && i >= segment.blocks) {
      t += segment.blocks;
      i = (parity ^ t) & 1;
      if (++request <= last_request) segment = segment_of(p, tile, from, to, request);
    }
  }
};

// Whether this CTA has L2 fetch the blocks that are loaded next, so that a load waits for L2 and not for DRAM. That pays
// where several row tiles read the same blocks (compute-bound); of two tiles one does it for both. With one row tile
// (memory-bound) it only lengthens the queue of the copy engine.
__device__ __forceinline__ bool fetches_ahead(const MlaDecodeParams& p) {
  return p.row_tiles > 2 || (p.row_tiles == 2 && blockIdx.x % 2 == 0);
}

// One thread: loads the blocks of one parity into their stage as it becomes free.
__device__ __forceinline__ void load_kv(const MlaDecodeParams& p, const SharedLayout& shared, const Tile& tile,
                                        PartBound from, PartBound to, int last_request, int parity) {
  BlockCursor ahead(p, tile, from, to, last_request, parity);
  BlockCursor now = ahead;
  int next_page = now.valid() ? now.page() : 0;
  if (fetches_ahead(p))
    ahead.next();
  else
    ahead.request = last_request + 1;
#pragma unroll 1
  while (now.valid()) {
    const int page = next_page;
    const u32 phase = ((now.t + now.i) / 2) & 1;
    const u32 stage = shared.stage(parity);
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      const int column = tile_in_order(parity, k);
      const int half = column / kHalfTiles;
      if (k == 0 || k == 1 || k == 1 + kHalfTiles)
        mbarrier_wait(shared.free(parity, half), phase ^ 1, "a free KV stage");
      const u32 barrier = shared.full(parity, column);
      mbarrier_arrive_expect_tx(barrier, kTileBytes);
      tma_load_4d_async(stage + column * kTileBytes, &p.kv, barrier, column * 64, 0, tile.kv_head, page);
    }
    if (ahead.valid()) {
      const int page_ahead = ahead.page();
#pragma unroll
      for (int k = 0; k < kTiles; ++k) tma_prefetch_4d(&p.kv, k * 64, 0, tile.kv_head, page_ahead);
      ahead.next();
    }
    now.next();
    if (now.valid()) next_page = now.page();
  }
}

// Two warps copy the query rows; eight lanes a row, 16 bytes each.
__device__ __forceinline__ void load_query(const MlaDecodeParams& p, const SharedLayout& shared, const Tile& tile,
                                           PartBound from, int last_request, int loader) {
  const int lane = threadIdx.x % 32, chunk = lane % 8;
  for (int request = from.request; request <= last_request; ++request) {
    const u32 phase = (request - from.request) & 1;
    mbarrier_wait(shared.query_free(), phase ^ 1, "a free query buffer");
    const char* q = p.q + request * p.q_stride_batch;
#pragma unroll 1  // unrolled, the row addresses do not fit the registers of a loader
    for (int i = 0; i < kRowTile / 8; ++i) {
      const int row = loader * (kRowTile / 2) + i * 4 + lane / 8;
      const bool valid = row < tile.rows;
      const int group_row = valid ? tile.first_row + row : tile.first_row;
      const int token = group_row / p.heads_per_group;
      const int head = tile.kv_head * p.heads_per_group + group_row % p.heads_per_group;
      const char* source = q + token * p.q_stride_token + head * p.q_stride_head + chunk * 16;
      const u32 destination = shared.query + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
      for (int k = 0; k < kTiles; ++k) copy_16_async(destination + k * kTileBytes, source + k * 128, valid);
    }
    copy_async_wait_all();
    fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.query_full());
  }
}

// One consumer warpgroup. Thread layout of the accumulators: rows 16 warp + lane / 4 and that + 8; in every group of
// eight columns the two at 2 (lane % 4).
template <typename T>
struct Consumer {
  const MlaDecodeParams& p;
  const SharedLayout& shared;
  const Tile& tile;
  const int consumer, warp, lane, row;
  float output[128];
  float scores[32];
  u32 probabilities[16];
  float maximum[2], sum[2];  // base-2 running maximum of both rows; sum over the blocks this consumer owns
  int limit[2];              // tokens that the two rows see

  __device__ __forceinline__ Consumer(const MlaDecodeParams& p, const SharedLayout& shared, const Tile& tile,
                                      int consumer)
      : p(p),
        shared(shared),
        tile(tile),
        consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        row(warp * 16 + lane / 4) {}

  __device__ __forceinline__ void arrive(u32 barrier) const {  // once a warp
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void begin(const Segment& segment) {
#pragma unroll
    for (int i = 0; i < 128; ++i) output[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = kLowest;
      sum[r] = 0.0f;
      limit[r] = segment.tokens - tile.shift_of(p, row + 8 * r);
    }
  }

  // scores = query x block `t`, asynchronously.
  __device__ __forceinline__ void multiply_query(int t) {
    const u32 stage = shared.stage(consumer);
    const u32 phase = (t / 2) & 1;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int column = tile_in_order(consumer, i);
      mbarrier_wait(shared.full(consumer, column), phase, "a KV tile");
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_m64n64k16_async<T>(scores, matrix_descriptor(shared.query + column * kTileBytes + k * 32, 0, 1024),
                                 matrix_descriptor(stage + column * kTileBytes + k * 32, 0, 1024), i + k > 0);
    }
    warpgroup_commit();
  }

  __device__ __forceinline__ u64 value_descriptor(int stage, int k) const {
    return matrix_descriptor(shared.stage(stage) + consumer * kHalfTiles * kTileBytes + k * 2048, kTileBytes, 1024);
  }

  // output += own probabilities x this consumer's half of V, asynchronously.
  __device__ __forceinline__ void multiply_own(int stage) {
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_m64n256k16_async<T>(output, probabilities + 4 * k, value_descriptor(stage, k));
    warpgroup_commit();
  }

  // output += the other consumer's probabilities x this consumer's half of V, asynchronously.
  __device__ __forceinline__ void multiply_other(int stage) {
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_m64n256k16_async<T>(output, matrix_descriptor(shared.probabilities + k * 32, 0, 1024),
                                value_descriptor(stage, k));
    warpgroup_commit();
  }

  // Rows past the end of the sequence may hold NaN: their probabilities are 0, and 0 x NaN is NaN.
  __device__ __forceinline__ void clear_values_past(int stage, int valid) {
    const u32 half = shared.stage(stage) + consumer * kHalfTiles * kTileBytes;
    for (int i = valid * 32 + threadIdx.x % kWarpgroup; i < kBlockTokens * 32; i += kWarpgroup)
      store_shared_zero_16(half + (i % 32 / 8) * kTileBytes + (i / 32) * 128 + (i % 8) * 16);
    fence_proxy_async_shared();
    if (consumer == 0)
      named_barrier_sync<kConsumerBarrier + 1, kWarpgroup>();
    else
      named_barrier_sync<kConsumerBarrier + 2, kWarpgroup>();
  }

  __device__ __forceinline__ void mask_scores(int block) {
    const int column = block * kBlockTokens + (lane % 4) * 2;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (column + 8 * j + (e & 1) >= limit[e >> 1]) scores[4 * j + e] = -kInfinity;
  }

  // The running maximum becomes `next`: what was summed up so far is brought to it. Rarely anything to do.
  __device__ __forceinline__ void rescale(const float (&next)[2]) {
    if (!__any_sync(0xffffffffu, next[0] != maximum[0] || next[1] != maximum[1])) return;
    const float factor[2] = {exp2_approx(maximum[0] - next[0]), exp2_approx(maximum[1] - next[1])};
#pragma unroll
    for (int i = 0; i < 128; ++i) output[i] *= factor[i >> 1 & 1];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] *= factor[r];
      maximum[r] = next[r];
    }
  }

  // scores -> probabilities relative to next (the new running maximum); their sums go to `block_sum`.
  __device__ __forceinline__ void softmax(float (&next)[2], float (&block_sum)[2]) {
    float highest[2] = {-kInfinity, -kInfinity};
#pragma unroll
    for (int i = 0; i < 32; ++i) highest[i >> 1 & 1] = fmaxf(highest[i >> 1 & 1], scores[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      highest[r] = fmaxf(highest[r], __shfl_xor_sync(0xffffffffu, highest[r], 1));
      highest[r] = fmaxf(highest[r], __shfl_xor_sync(0xffffffffu, highest[r], 2));
      highest[r] *= p.scale_log2;
      next[r] = highest[r] > maximum[r] + kMaximumSlack ? highest[r] : maximum[r];
      block_sum[r] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int r = i >> 1 & 1;
      const float low = exp2_approx(__fmaf_rn(scores[i], p.scale_log2, -next[r]));
      const float high = exp2_approx(__fmaf_rn(scores[i + 1], p.scale_log2, -next[r]));
      block_sum[r] += low + high;
      probabilities[i / 2] = pack_pair<T>(low, high);
    }
  }

  // Hands probabilities and running maximum to the other consumer.
  __device__ __forceinline__ void publish(const float (&next)[2]) {
    const int store_row = warp * 16 + lane % 16;
    const u32 address = shared.probabilities + store_row * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      store_matrix_x4(address + (((2 * k + lane / 16) ^ (store_row & 7)) << 4), probabilities[4 * k],
                      probabilities[4 * k + 1], probabilities[4 * k + 2], probabilities[4 * k + 3]);
    if (lane % 4 == 0) {
      store_shared_float(shared.maximum(consumer, row), next[0]);
      store_shared_float(shared.maximum(consumer, row + 8), next[1]);
    }
    fence_proxy_async_shared();
    arrive(shared.probabilities_full(consumer));
  }

  // Waits for the other consumer's probabilities of block counter t and takes over its running maximum.
  __device__ __forceinline__ void adopt(int t) {
    mbarrier_wait(shared.probabilities_full(1 - consumer), (t / 2) & 1, "the other consumer's probabilities");
    const float next[2] = {load_shared_float(shared.maximum(1 - consumer, row)),
                           load_shared_float(shared.maximum(1 - consumer, row + 8))};
    rescale(next);
#pragma unroll
    for (int i = 0; i < kHalfTiles; ++i)  // complete since the other consumer saw it; this makes the bytes ours to read
      mbarrier_wait(shared.full(1 - consumer, consumer * kHalfTiles + i), (t / 2) & 1, "a KV tile");
  }

  // Block i of the segment, counter t, is this consumer's; with kPrevious, block i - 1 of the other one still waits to
  // be multiplied here, which runs beside this block's softmax.
  template <bool kPrevious>
  __device__ __forceinline__ void own_block(const Segment& segment, int i, int t) {
    multiply_query(t);
    if constexpr (kPrevious) {
      adopt(t - 1);
      multiply_other(1 - consumer);
      warpgroup_wait<1>();
    } else {
      warpgroup_wait<0>();
    }
    arrive(shared.free(consumer, 2));
    if (i + 2 >= segment.blocks) arrive(shared.query_free());

    const int block = segment.begin + i;
    const int last_token = (block + 1) * kBlockTokens;
    if (last_token > segment.tokens - tile.most_shift) mask_scores(block);
    float next[2], block_sum[2];
    softmax(next, block_sum);
    if constexpr (kPrevious) {
      // ptxas moves the wait up, before the arithmetic that it should run beside, but not past a store: 32 dependent
      // exponentials then stand between the product and its wait (seen in SASS; nobody reads what is stored).
      pin(probabilities);
      store_shared_float(shared.pacer(threadIdx.x - kWarpgroup), block_sum[0] + block_sum[1]);
      warpgroup_wait<0>();
      arrive(shared.free(1 - consumer, consumer));
    }
    publish(next);
    rescale(next);
    sum[0] += block_sum[0];
    sum[1] += block_sum[1];
    if (last_token > segment.tokens) clear_values_past(consumer, kBlockTokens + segment.tokens - last_token);
    multiply_own(consumer);
    warpgroup_wait<0>();
    arrive(shared.free(consumer, consumer));
  }

  // A block of the other consumer: probabilities from there.
  __device__ __forceinline__ void other_block(const Segment& segment, int i, int t) {
    adopt(t);
    const int last_token = (segment.begin + i + 1) * kBlockTokens;
    if (last_token > segment.tokens) clear_values_past(1 - consumer, kBlockTokens + segment.tokens - last_token);
    multiply_other(1 - consumer);
    warpgroup_wait<0>();
    arrive(shared.free(1 - consumer, consumer));
  }

  __device__ __forceinline__ void compute(const Segment& segment, int t, u32 query_phase) {
    begin(segment);
    int i = (consumer ^ t) & 1;
    // Also without a block to score: or one loader warp could run a segment ahead of the other.
    mbarrier_wait(shared.query_full(), query_phase, "the query");
    if (i >= segment.blocks) {
      arrive(shared.query_free());
    } else {
      if (i == 0) {
        own_block<false>(segment, 0, t);
        i = 2;
      }
      for (; i < segment.blocks; i += 2) {
        if (p.row_tiles == 1) {
          other_block(segment, i - 1, t + i - 1);
          own_block<false>(segment, i, t + i);
        } else {
          own_block<true>(segment, i, t + i);
        }
      }
    }
    if (i == segment.blocks && segment.blocks > 0) other_block(segment, i - 1, t + i - 1);
  }

  // Sums of both consumers; then out (or a partial result) and log-sum-exp.
  __device__ __forceinline__ void finish(const Segment& segment, int turn) {
    float total[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
      if (lane % 4 == 0) store_shared_float(shared.sum(turn, consumer, row + 8 * r), sum[r]);
    }
    named_barrier_sync<kConsumerBarrier, 2 * kWarpgroup>();
#pragma unroll
    for (int r = 0; r < 2; ++r)
      total[r] = load_shared_float(shared.sum(turn, 0, row + 8 * r)) +
                 load_shared_float(shared.sum(turn, 1, row + 8 * r));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = row + 8 * r < tile.rows;
      const float inverse = total[r] == 0.0f ? 0.0f : 1.0f / total[r];
      if (segment.split)
        write_partial(segment, r, exists, total[r], inverse);
      else
        write_final(segment, r, exists, total[r], inverse);
    }
  }

  __device__ __forceinline__ void write_floats(float* destination, int r, bool exists, float inverse) {
    if (!exists) return;
    destination += consumer * 256 + (lane % 4) * 2;
#pragma unroll
    for (int j = 0; j < 32; ++j)
      store_global_float2(destination + 8 * j, output[4 * j + 2 * r] * inverse, output[4 * j + 2 * r + 1] * inverse);
  }

  __device__ __forceinline__ void write_partial(const Segment& segment, int r, bool exists, float total,
                                                float inverse) {
    const i64 index =
        partial_index(blockIdx.x, blockIdx.y, segment.slot, p.parts, p.tile_rows) + row + 8 * r;
    write_floats(p.partial_out + index * kValueDim, r, exists, inverse);
    if (exists && consumer == 0 && lane % 4 == 0)
      p.partial_lse[index] = total == 0.0f ? -kInfinity : maximum[r] + log2_approx(total);
  }

  __device__ __forceinline__ void write_final(const Segment& segment, int r, bool exists, float total,
                                              float inverse) {
    const int group_row = tile.first_row + row + 8 * r;
    const int token = group_row / p.heads_per_group;
    const int head = tile.kv_head * p.heads_per_group + group_row % p.heads_per_group;
    char* out = p.out + segment.request * p.out_stride_batch + token * p.out_stride_token +
                head * p.out_stride_head;
    if (p.out_is_float) {
      write_floats(reinterpret_cast<float*>(out), r, exists, inverse);
    } else {
      // Lane pairs trade halves of two neighbouring column groups: eight bytes a lane, full 32-byte sectors.
      const bool odd = lane % 2;
      const int column = consumer * 256 + (odd ? 8 + (lane % 4 - 1) * 2 : (lane % 4) * 2);
#pragma unroll
      for (int j = 0; j < 32; j += 2) {
        const u32 first = pack_pair<T>(output[4 * j + 2 * r] * inverse, output[4 * j + 2 * r + 1] * inverse);
        const u32 second = pack_pair<T>(output[4 * j + 4 + 2 * r] * inverse, output[4 * j + 5 + 2 * r] * inverse);
        const u32 received = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
        if (exists)
          store_global_8(out + (column + 8 * j) * 2, odd ? received : first, odd ? second : received);
      }
    }
    if (exists && consumer == 0 && lane % 4 == 0)
      p.lse[segment.request * p.lse_stride_batch + head * p.lse_stride_head + token * p.lse_stride_token] =
          total == 0.0f ? kInfinity : (maximum[r] + log2_approx(total)) * kLn2;
  }
};

__device__ __forceinline__ void initialise_barriers(const SharedLayout& shared) {
  for (int s = 0; s < kStages; ++s) {
    for (int tile = 0; tile < kTiles; ++tile) mbarrier_init(shared.full(s, tile), 1);
    for (int half = 0; half < 3; ++half) mbarrier_init(shared.free(s, half), 4);
  }
  for (int owner = 0; owner < 2; ++owner) mbarrier_init(shared.probabilities_full(owner), 4);
  mbarrier_init(shared.query_full(), 2);
  mbarrier_init(shared.query_free(), 8);
  fence_mbarrier_init();
}

template <typename T>
__device__ __forceinline__ void mla_decode(const MlaDecodeParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const SharedLayout shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  const Tile tile(p);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.kv);
    initialise_barriers(shared);
  }
  grid_dependency_launch();
  __syncthreads();
  grid_dependency_wait();

  const PartBound from = p.bounds[blockIdx.y], to = p.bounds[blockIdx.y + 1];
  const int last_request = to.block > 0 ? to.request : to.request - 1;

  if (warpgroup == 0) {
    registers_decrease<56>();
    const int warp = threadIdx.x / 32;
    if (warp < 2) {
      if (threadIdx.x % 32 == 0) load_kv(p, shared, tile, from, to, last_request, warp);
    } else {
      load_query(p, shared, tile, from, last_request, warp - 2);
    }
  } else {
    registers_increase<224>();
    Consumer<T> consumer(p, shared, tile, warpgroup - 1);
    int t = 0;
    for (int request = from.request; request <= last_request; ++request) {
      const Segment segment = segment_of(p, tile, from, to, request);
      const u32 turn = (request - from.request) & 1;
      consumer.compute(segment, t, turn);
      consumer.finish(segment, turn);
      t += segment.blocks;
    }
  }
}

}  // namespace cumla
