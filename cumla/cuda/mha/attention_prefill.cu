// SPDX-License-Identifier: Apache-2.0
// Attention of many query rows: each CTA attends for one whole row tile after another, 64 query rows of a kv head for
// each consumer, to all keys that they see. No tile is cut. grid = (as many CTAs as multiprocessors), 384 or 512
// threads, one CTA an SM.
//
// The schedule (split/ragged_schedule.cu, in one part) lists tiles of as many rows. Each CTA begins with the tile of
// its own number and takes the next ones from a counter, the last rows of a request first, for they see most keys, and
// the kv heads of a section, whose keys and values stay in L2, before the next section.
//
// Warpgroup 0 loads: warp 0 keys, warp 1 values (TMA); warp 2 takes tiles from the counter and announces them. Where
// pages are no multiple of eight tokens, each warp loads a quarter of the rows of a block, and warp 0 announces. The
// other warpgroups, two, or three with 64 columns, have 64 query rows each and work through the blocks of all tiles
// without a break, in each tile from the last to the first:
//
//   tensor cores:     S1 = Q K1   O += P0 V0   S2 = Q K2   O += P1 V1 ...
//   the warpgroup:                P1 = exp S1              P2 = exp S2
//
// and take turns: while one issues its products the others make probabilities. The output of a tile is written while
// the others multiply; the first scores of the next tile are there by then. What happens once per tile has as few
// instructions as possible: a warp has a scheduler almost for itself, and each instruction waits for the one before.
//
// Budget of 128 rows by 128 keys, 128 columns: 2 x 1,024 tensor clocks; 16,384 exponentials at 16 a clock are 1,024,
// and some four other instructions for each at 128 a clock 512.
// Shared memory: query 8,192 a 64 columns and consumer + output 8,192 a consumer + 2 stages of keys and values
//                + announcements 256 + barriers 256
// Registers:     consumers 232 or 224 (up to 128 output, 64 scores, 32 probabilities), loaders 40 or 56; of three
//                consumers 160, loaders 32
#include "mha/attention/copy.cuh"
#include "mha/attention/layout.cuh"
#include "split/output.cuh"
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

constexpr int kItems = 4;  // announcements: of the tile that is written, the next one, that after it, and one more
constexpr int kTogether = 1, kTurns = 2, kOwn = 5;  // named barriers: of all consumers; whose turn it is; of each one
constexpr float kMostAdded = 4096.0f;  // of weights by an old maximum: a thread's of a row and block
constexpr i64 kBytesInL2 = 24 << 20;  // of the keys and values of a section

template <int kKeyTiles, int kValueTiles, int kBlock, int kConsumers_>
struct PrefillLayout {
  static constexpr int kConsumers = kConsumers_, kStages = 2;
  static constexpr int kTileBytes = kBlock * 128;  // kBlock rows x 64 columns of 16 bits, 128-byte swizzle
  static constexpr int kQueryBytes = kKeyTiles * 64 * 128;  // of a consumer
  static constexpr int kKeyBytes = kKeyTiles * kTileBytes, kValueBytes = kValueTiles * kTileBytes;
  static constexpr int kOutBytes = 16 * 128;  // of a warp: 16 rows x 64 columns
  static constexpr int kItemBytes = 64;
  static constexpr int kBytes = kConsumers * (kQueryBytes + 4 * kOutBytes) + kStages * (kKeyBytes + kValueBytes) +
                                kItems * kItemBytes + 256;

  u32 start;

  __device__ __forceinline__ u32 query(int consumer) const { return start + consumer * kQueryBytes; }
  __device__ __forceinline__ u32 keys(int s) const { return query(kConsumers) + s * kKeyBytes; }
  __device__ __forceinline__ u32 values(int s) const { return keys(kStages) + s * kValueBytes; }
  __device__ __forceinline__ u32 out(int warp) const { return values(kStages) + warp * kOutBytes; }
  __device__ __forceinline__ u32 item(u32 n) const { return out(4 * kConsumers) + n % kItems * kItemBytes; }
  __device__ __forceinline__ u32 barrier(int i) const { return item(0) + kItems * kItemBytes + i * 8; }
  __device__ __forceinline__ u32 keys_full(int s) const { return barrier(s); }
  __device__ __forceinline__ u32 keys_free(int s) const { return barrier(kStages + s); }
  __device__ __forceinline__ u32 values_full(int s) const { return barrier(2 * kStages + s); }
  __device__ __forceinline__ u32 values_free(int s) const { return barrier(3 * kStages + s); }
  __device__ __forceinline__ u32 item_full(u32 n) const { return barrier(4 * kStages + n % kItems); }
  __device__ __forceinline__ u32 item_free(u32 n) const { return item_full(n) + kItems * 8; }
  __device__ __forceinline__ u32 wanted() const { return barrier(4 * kStages + 2 * kItems); }
  __device__ __forceinline__ u32 begun() const { return wanted() + 8; }
};

// A row tile of a kv head. After the last one comes one without rows.
struct Item {
  int tokens, first_row, q_len, q_begin;
  i64 pages;
  int head, rows;
};

// The tile of 64 rows that a consumer has.
__device__ __forceinline__ RaggedTile tile_of(const AttentionParams& p, const Item& item, int consumer) {
  RaggedTile tile(p);
  tile.index = item.head;
  tile.q_len = item.q_len;
  tile.q_begin = item.q_begin;
  tile.first_row = item.first_row + 64 * consumer;
  tile.rows = min(max(item.rows - 64 * consumer, 0), 64);
  tile.pages = item.pages;
  return tile;
}

// Blocks that rows of an item see, [first, end). One where they see nothing: its scores are all masked.
template <int kBlock>
__device__ __forceinline__ Seen blocks_of_item(const AttentionParams& p, const Item& item) {
  const RaggedTile tile = tile_of(p, item, 0);
  const int first = max(seen_by(p, tile, item.tokens, 0).first, 0);
  const int end = max(seen_by(p, tile, item.tokens, item.rows - 1).end, 0);
  return {first / kBlock, max(end / kBlock + (end % kBlock != 0), first / kBlock + 1)};
}

// Takes items: the first one by the CTA's number, the others from the counter. One lane.
template <typename Layout>
struct Dealer {
  const AttentionParams& p;
  const TilePlace* const places;
  u32 tiles, total, heads_of_section;

  __device__ __forceinline__ explicit Dealer(const AttentionParams& p)
      : p(p), places(reinterpret_cast<const TilePlace*>(p.places)) {
    tiles = min(max(p.parts_in[0].end_place, 0), p.batch);  // a plan that was never updated holds anything
    total = tiles * p.num_kv_heads;  // below 2^31: the launcher sees to it
    const i64 tokens = max(places[0].tokens, 64);  // the other requests are taken to be as long as the first
    const u32 in_l2 = kBytesInL2 / (tokens * (p.key_columns + p.value_columns) * 2);
    heads_of_section = min(max(in_l2, 1u), static_cast<u32>(p.num_kv_heads));
  }

  // The first item of a CTA is the one of its own number.
  __device__ __forceinline__ Item next(u32 n) const {
    const u32 at = n == 0 ? blockIdx.x : gridDim.x + atomic_add_acq_rel(&p.tickets[0].arrived, 1);
    if (at >= total) {
      // When all that had an item have asked in vain, for the next launch.
      if (at == total + gridDim.x - 1) store_relaxed(&p.tickets[0].arrived, 0);
      return {};
    }
    const u32 of_section = tiles * heads_of_section, first_head = at / of_section * heads_of_section;
    const u32 rest = at % of_section, heads = min(heads_of_section, p.num_kv_heads - first_head), place = rest / heads;
    const TilePlace from = places[tiles - 1 - place];
    Item item;
    item.head = first_head + rest - place * heads;
    item.q_begin = min(max(from.q_begin, 0), p.q_len - 1);
    item.q_len = min(max(from.q_len, 1), p.q_len - item.q_begin);
    item.first_row = min(max(from.first_row, 0), item.q_len * p.heads_per_group - 1);
    item.rows = min(64 * Layout::kConsumers, item.q_len * p.heads_per_group - item.first_row);
    item.pages = from.pages;
    item.tokens = min(static_cast<i64>(min(max(from.tokens, 0), kMaxTokens)), p.max_tokens);
    if (p.block_table == nullptr)
      item.tokens = min(static_cast<i64>(item.tokens), max(p.page_entries - item.pages, i64{0}));
    return item;
  }

  // Announces the next item, the n-th of this CTA. False after the last one.
  __device__ __forceinline__ bool announce(const Layout& shared, u32 n) const {
    const Item item = next(n);
    mbarrier_wait(shared.item_free(n), (n / kItems & 1) ^ 1, "a free announcement");
    store_shared_16(shared.item(n), {static_cast<u32>(item.tokens), static_cast<u32>(item.first_row),
                                     static_cast<u32>(item.q_len), static_cast<u32>(item.q_begin)});
    store_shared_16(shared.item(n) + 16,
                    {static_cast<u32>(item.pages), static_cast<u32>(static_cast<u64>(item.pages) >> 32),
                     static_cast<u32>(item.head), static_cast<u32>(item.rows)});
    mbarrier_arrive(shared.item_full(n));
    return item.rows > 0;
  }
};

// The n-th item, between its announcement and this thread's arrival at item_free.
template <typename Layout>
__device__ __forceinline__ Item read_item(const Layout& shared, u32 n) {
  const uint4 a = load_shared_16(shared.item(n)), b = load_shared_16(shared.item(n) + 16);
  return {static_cast<int>(a.x), static_cast<int>(a.y), static_cast<int>(a.z), static_cast<int>(a.w),
          static_cast<i64>(static_cast<u64>(b.y) << 32 | b.x), static_cast<int>(b.z), static_cast<int>(b.w)};
}

// A loading warp uses what it read once.
template <typename Layout>
__device__ __forceinline__ Item item_at(const Layout& shared, u32 n) {
  mbarrier_wait(shared.item_full(n), n / kItems & 1, "an announcement");
  const Item item = read_item(shared, n);
  mbarrier_arrive(shared.item_free(n));
  return item;
}

// One warp loads the keys, or the values, by boxes, each lane its own of a block. The next item is wanted with the last
// loads of this one, and not before, so that it goes to who is the first to be done. The first keys of all come alone:
// when all CTAs begin, what L2 can deliver is what they wait for.
template <typename Layout, int kTiles, int kBlock, bool kOfKeys>
__device__ __forceinline__ void load_boxes(const AttentionParams& p, const Layout& shared) {
  const int first = threadIdx.x % 32 * p.box_rows;
  u32 t = 0;
#pragma unroll 1
  for (u32 n = 0;; ++n) {
    const Item item = item_at(shared, n);
    if (item.rows == 0) return;
    const RaggedTile tile = tile_of(p, item, 0);
    const Seen blocks = blocks_of_item<kBlock>(p, item);
#pragma unroll 1
    for (int block = blocks.end - 1; block >= blocks.first; --block, ++t) {
      if (!kOfKeys && t == 0) mbarrier_wait(shared.begun(), 0, "the first keys");
      const int stage = t % Layout::kStages;
      const u32 tiles = kOfKeys ? shared.keys(stage) : shared.values(stage);
      const u32 full = kOfKeys ? shared.keys_full(stage) : shared.values_full(stage);
      if (kOfKeys && block == blocks.first && threadIdx.x % 32 == 0) mbarrier_arrive(shared.wanted());
      int row = 0, page = -1;
      if (first < kBlock) page = page_of(p, tile, item.tokens, block * kBlock + first, row);
      mbarrier_wait(kOfKeys ? shared.keys_free(stage) : shared.values_free(stage), (t / Layout::kStages & 1) ^ 1,
                    kOfKeys ? "a free stage of keys" : "a free stage of values");
      if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(full, kTiles * Layout::kTileBytes);
      __syncwarp();
      if (first < kBlock)
#pragma unroll
        for (int k = 0; k < kTiles; ++k)
          tma_load_4d_async(tiles + k * Layout::kTileBytes + first * 128, kOfKeys ? &p.key_map : &p.value_map, full,
                            k * 64, row, item.head, page);
      if (kOfKeys && t == 0) {
        mbarrier_wait(full, 0, "the first keys");
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.begun());
      }
    }
  }
}

// All four warps load keys and values row by row; lane 0 of warp 0 also deals.
template <typename Layout, int kKeyTiles, int kValueTiles, int kBlock>
__device__ __forceinline__ void load_rows(const AttentionParams& p, const Layout& shared) {
  constexpr int kRows = kBlock / 4;  // of a warp
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp * kRows;
  const Dealer<Layout> dealer(p);
  bool more = warp == 0 && lane == 0 && dealer.announce(shared, 0);
  u32 t = 0;
#pragma unroll 1
  for (u32 n = 0;; ++n) {
    const Item item = item_at(shared, n);
    if (item.rows == 0) break;
    const RaggedTile tile = tile_of(p, item, 0);
    const Seen blocks = blocks_of_item<kBlock>(p, item);
#pragma unroll 1
    for (int block = blocks.end - 1; block >= blocks.first; --block, ++t) {
      if (more && block == blocks.first) more = dealer.announce(shared, n + 1);
      const int stage = t % Layout::kStages, phase = t / Layout::kStages & 1;
      int row = 0;
      const int page = page_of(p, tile, item.tokens, block * kBlock + first + lane % kRows, row);
      const auto offset = [&](const Columns& from) {
        return page < 0 ? i64{-1} : page * from.stride_page + row * from.stride_row + item.head * from.stride_head;
      };
      mbarrier_wait(shared.keys_free(stage), phase ^ 1, "a free stage of keys");
      copy_rows<kKeyTiles, Layout::kTileBytes, kRows>(p.keys.base, offset(p.keys), first, p.key_columns,
                                                      shared.keys(stage));
      mbarrier_arrive_after_copies(shared.keys_full(stage));
      mbarrier_wait(shared.values_free(stage), phase ^ 1, "a free stage of values");
      copy_rows<kValueTiles, Layout::kTileBytes, kRows>(p.values.base, offset(p.values), first, p.value_columns,
                                                        shared.values(stage));
      mbarrier_arrive_after_copies(shared.values_full(stage));
    }
  }
  copy_async_wait_all();
}

template <typename Layout>
__device__ __forceinline__ void deal(const AttentionParams& p, const Layout& shared) {
  const Dealer<Layout> dealer(p);
  for (u32 n = 0; dealer.announce(shared, n); ++n)
    mbarrier_wait(shared.wanted(), n & 1, "the last block of an item");
}

// One consumer warpgroup. Rows of a thread: 16 warp + lane / 4 and that + 8; in every group of eight columns the two at
// 2 (lane % 4). kCopied: tiles were written by threads' own copies, not by TMA.
template <typename T, int kKeyTiles, int kValueTiles, int kBlock, int kConsumers, bool kCopied>
struct PrefillConsumer {
  using Layout = PrefillLayout<kKeyTiles, kValueTiles, kBlock, kConsumers>;
  static constexpr int kThreads = kConsumers * kWarpgroup;

  const AttentionParams& p;
  const Layout& shared;
  const int consumer, warp, lane, row;
  float output[kValueTiles * 32];
  float scores[kBlock / 2];
  u32 probabilities[kBlock / 4];
  float maximum[2], sum[2], factor[2], added[2];
  Seen seen_by_all;  // tokens that all rows see
  int position[2];   // of the rows of this thread, in the request

  __device__ __forceinline__ PrefillConsumer(const AttentionParams& p, const Layout& shared, int consumer)
      : p(p), shared(shared), consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        row(warp * 16 + lane / 4) {}

  __device__ __forceinline__ void arrive(u32 barrier) const {  // once a warp
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  }

  // What the rows see, without a branch.
  __device__ __forceinline__ void look(const Item& item) {
    const RaggedTile tile = tile_of(p, item, consumer);
    // The first row's end is the least, the last row's beginning the greatest.
    seen_by_all = {seen_by(p, tile, item.tokens, 63).first, max(seen_by(p, tile, item.tokens, 0).end, 0)};
#pragma unroll
    for (int r = 0; r < 2; ++r) position[r] = position_of(p, tile, item.tokens, row + 8 * r);
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

  __device__ __forceinline__ static void multiply(float (&d)[kBlock / 2], u64 a, u64 b, bool accumulate) {
    if constexpr (kBlock == 64)
      wgmma_m64n64k16_async<T>(d, a, b, accumulate);
    else
      wgmma_m64n128k16_async<T>(d, a, b, accumulate);
  }

  __device__ __forceinline__ void issue_scores(int stage) {
    warpgroup_arrive();
#pragma unroll
    for (int column = 0; column < kKeyTiles; ++column)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        multiply(scores, matrix_descriptor(shared.query(consumer) + column * 8192 + k * 32, 0, 1024),
                 matrix_descriptor(shared.keys(stage) + column * Layout::kTileBytes + k * 32, 0, 1024), column + k > 0);
    warpgroup_commit();
  }

  __device__ __forceinline__ void issue_values(int stage) {
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kBlock / 16; ++k)
      wgmma_values_async<T>(output, probabilities + 4 * k,
                            matrix_descriptor(shared.values(stage) + k * 2048, Layout::kTileBytes, 1024));
    warpgroup_commit();
  }

  // Rows past the end of the request may hold NaN: their probabilities are 0, and 0 x NaN is NaN. All consumers.
  __device__ __forceinline__ void clear_values_past(int stage, int valid) const {
    constexpr int kChunks = kValueTiles * 8;
    for (int i = valid * kChunks + threadIdx.x - kWarpgroup; i < kBlock * kChunks; i += kThreads)
      store_shared_zero_16(shared.values(stage) + (i % kChunks / 8) * Layout::kTileBytes + (i / kChunks) * 128 +
                           (i % 8) * 16);
    fence_proxy_async_shared();
    named_barrier_sync<kTogether, kThreads>();
  }

  __device__ __forceinline__ void meet() const {
    if (consumer == 0)
      named_barrier_sync<kOwn, kWarpgroup>();
    else if (kConsumers == 2 || consumer == 1)
      named_barrier_sync<kOwn + 1, kWarpgroup>();
    else
      named_barrier_sync<kOwn + 2, kWarpgroup>();
  }

  // Whether any thread of the warpgroup says so.
  __device__ __forceinline__ bool any(bool vote) const {
    if (consumer == 0) return named_barrier_any<kOwn, kWarpgroup>(vote);
    if (kConsumers == 2 || consumer == 1) return named_barrier_any<kOwn + 1, kWarpgroup>(vote);
    return named_barrier_any<kOwn + 2, kWarpgroup>(vote);
  }

  // Begins to copy the query rows of an item, after the last products with those of the item before.
  __device__ __forceinline__ void fetch_query(u32 n) const {
    mbarrier_wait(shared.item_full(n), n / kItems & 1, "an announcement");
    const Item item = read_item(shared, n);
    meet();
    copy_query<kKeyTiles, 16>(p, tile_of(p, item, consumer), warp * 16, shared.query(consumer));
  }

  __device__ __forceinline__ void wait_for_query() const {
    copy_async_wait_all();
    fence_proxy_async_shared();
    meet();
  }

  // tanh(x) = 1 - 2 / (1 + exp(2 x)); scale_log2 is softcap * log2(e) then. Few at once, and a branch that the compiler
  // does not join with its neighbours': it takes registers for all that it sees together.
  __device__ __forceinline__ void cap(float* few) const {
    const float to_softcap = __uint_as_float(copy_of(__float_as_uint(p.to_softcap)));
    if (__builtin_expect(to_softcap == 0.0f, 1)) return;
#pragma unroll
    for (int i = 0; i < 32; ++i) few[i] = 1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(few[i] * to_softcap));
  }

  // Which of a thread's scores of a row, two in every eight tokens, are of tokens before this one: a bit each.
  __device__ __forceinline__ static u32 scores_before(int token) {
    const int within = min(max(token, 0), kBlock);
    return static_cast<u32>((u64{1} << (within / 8 * 2 + min(within % 8, 2))) - 1);
  }

  // Caps scores, and masks those that a row does not see.
  __device__ __forceinline__ void mask(u32 n, int block) {
#pragma unroll
    for (int i = 0; i < kBlock / 2; i += 32) cap(scores + i);
    const bool is_clear = block * kBlock >= seen_by_all.first && block * kBlock <= seen_by_all.end - kBlock;
    if (__builtin_expect(!is_clear, 0)) {
      const int tokens = load_shared_u32(shared.item(n)), column = block * kBlock + (lane % 4) * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Seen seen = seen_from(p, tokens, position[r]);
        const u32 visible = scores_before(seen.end - column) & ~scores_before(seen.first - column);
#pragma unroll
        for (int i = 0; i < kBlock / 4; ++i)
          if (!(visible & 1u << i)) scores[i / 2 * 4 + 2 * r + (i & 1)] = -kInfinity;
      }
    }
  }

  // Raises the maximum of each row; the factor of what was added up before is left in `factor`. True if one is not 1.
  __device__ __forceinline__ bool raise_maximum() {
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float next = fmaxf(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < kBlock / 8; ++j) next = fmaxf(next, fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 1));
      next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 2));
      next *= p.scale_log2;
      if (next <= maximum[r] + kMaximumSlack) next = maximum[r];
      grown |= next != maximum[r];
      factor[r] = exp2_approx(maximum[r] - next);
      maximum[r] = next;
      sum[r] *= factor[r];
    }
    return grown;
  }

  // Scores become weights, float32; the sums of a thread's are left in `added`.
  __device__ __forceinline__ void exponentiate() {
#pragma unroll
    for (int r = 0; r < 2; ++r) added[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlock / 2; i += 2) {
      const int r = i >> 1 & 1;
      scores[i] = exp2_approx(__fmaf_rn(scores[i], p.scale_log2, -maximum[r]));
      scores[i + 1] = exp2_approx(__fmaf_rn(scores[i + 1], p.scale_log2, -maximum[r]));
      added[r] += scores[i] + scores[i + 1];
    }
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < kBlock / 4; ++i) probabilities[i] = pack_pair<T>(scores[2 * i], scores[2 * i + 1]);
    keep_before_products(probabilities);
  }

  // Turns go round: each barrier is between who gives and who takes.
  __device__ __forceinline__ void take_turn() const {
    if (consumer == 0)
      named_barrier_sync<kTurns, 2 * kWarpgroup>();
    else if (kConsumers == 2 || consumer == 1)
      named_barrier_sync<kTurns + 1, 2 * kWarpgroup>();
    else
      named_barrier_sync<kTurns + 2, 2 * kWarpgroup>();
  }
  __device__ __forceinline__ void give_turn() const {
    if (consumer == kConsumers - 1)
      named_barrier_arrive<kTurns, 2 * kWarpgroup>();
    else if (kConsumers == 2 || consumer == 0)
      named_barrier_arrive<kTurns + 1, 2 * kWarpgroup>();
    else
      named_barrier_arrive<kTurns + 2, 2 * kWarpgroup>();
  }

  __device__ __forceinline__ void wait_for_keys(u32 t) const {
    mbarrier_wait(shared.keys_full(t % Layout::kStages), t / Layout::kStages & 1, "keys");
    if constexpr (kCopied) fence_proxy_async_shared();
  }
  __device__ __forceinline__ void wait_for_values(u32 t) const {
    mbarrier_wait(shared.values_full(t % Layout::kStages), t / Layout::kStages & 1, "values");
    if constexpr (kCopied) fence_proxy_async_shared();
  }

  __device__ __forceinline__ static float sum_of_quad(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
  }

  // How the rows of the item before end, but for their outputs: computed while products run, and therefore without a
  // branch. Lanes 0 to 15 of a warp have a row each, and so have the others once more.
  struct Ending {
    int rows;
    float inverse[2];  // of the rows of this thread's products
    u64 out;           // of the row lane % 16 of the warp
  };
  __device__ __forceinline__ Ending end_rows(u32 n, bool exists) const {
    const RaggedTile tile = tile_of(p, read_item(shared, n), consumer);
    const int of_warp = lane % 16, of_tile = warp * 16 + of_warp;
    const float added_up = of_rows(sum_of_quad(sum[0]), sum_of_quad(sum[1]));
    const float highest_score = of_rows(maximum[0], maximum[1]);
    const Query to(p, tile, of_tile);
    Ending ending;
    ending.rows = exists ? tile.rows : 0;
    const bool is_row = of_tile < ending.rows;
    // The sink counts last, so that the weight of a row's only key is 1, without a rounding.
    const float sink = kLog2E * load_global_float_if(is_row && p.sinks != nullptr, p.sinks + to.head, -kInfinity);
    const float highest = fmaxf(highest_score, sink), rescaled = exp2_approx(highest_score - highest);
    const float total = rescaled * added_up + exp2_approx(sink - highest);
    const float inverse = total == 0.0f ? 0.0f : rescaled * reciprocal_approx(total);
    float* const lse =
        p.lse + to.at.batch * p.lse_stride_batch + to.head * p.lse_stride_head + to.at.token * p.lse_stride_token;
    store_global_float_if(is_row && lane < 16, reinterpret_cast<u64>(lse),
                          total == 0.0f ? p.empty_lse : (highest + log2_approx(total)) * kLn2);
    ending.out = reinterpret_cast<u64>(p.out + to.at.batch * p.out_stride_batch + to.at.token * p.out_stride_token +
                                       to.head * p.out_stride_head);
#pragma unroll
    for (int r = 0; r < 2; ++r) ending.inverse[r] = __shfl_sync(0xffffffffu, inverse, lane / 4 + 8 * r);
    return ending;
  }

  // Of two numbers that the lanes of a quad share, for its two rows, the one of row lane % 16.
  __device__ __forceinline__ float of_rows(float upper, float lower) const {
    const float of_upper = __shfl_sync(0xffffffffu, upper, lane % 8 * 4);
    const float of_lower = __shfl_sync(0xffffffffu, lower, lane % 8 * 4);
    return lane % 16 < 8 ? of_upper : of_lower;
  }

  __device__ __forceinline__ void write(const Ending& ending) const {
    if (__builtin_expect(!p.out_is_float, 1))
      write_rows(ending);
    else
      write_float_rows(ending);
  }

  __device__ __forceinline__ void write_float_rows(const Ending& ending) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* const destination =
          reinterpret_cast<float*>(__shfl_sync(0xffffffffu, ending.out, lane / 4 + 8 * r)) + lane % 4 * 2;
      const int columns = row + 8 * r < ending.rows ? p.value_columns : 0;
#pragma unroll
      for (int j = 0; j < kValueTiles * 8; ++j)
        if (j * 8 < columns)
          store_global_float2(destination + j * 8, output[4 * j + 2 * r] * ending.inverse[r],
                              output[4 * j + 2 * r + 1] * ending.inverse[r]);
    }
  }

  // 64 columns at a time: as the products leave them, four lanes have 32 bytes of a row, and a store touches eight
  // lines. Through shared memory eight lanes have a line.
  __device__ __forceinline__ void write_rows(const Ending& ending) const {
    const float (&inverse)[2] = ending.inverse;
    const u32 staged = shared.out(4 * consumer + warp);
    const int to_row = lane % 16, to_chunk = lane / 16, chunk = lane % 8;
#pragma unroll
    for (int v = 0; v < kValueTiles; ++v) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float* const o = output + 32 * v + 8 * k;
        store_matrix_x4(staged + to_row * 128 + (((2 * k + to_chunk) ^ (to_row & 7)) << 4),
                        pack_pair<T>(o[0] * inverse[0], o[1] * inverse[0]),
                        pack_pair<T>(o[2] * inverse[1], o[3] * inverse[1]),
                        pack_pair<T>(o[4] * inverse[0], o[5] * inverse[0]),
                        pack_pair<T>(o[6] * inverse[1], o[7] * inverse[1]));
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * i + lane / 8;
        char* const destination = reinterpret_cast<char*>(__shfl_sync(0xffffffffu, ending.out, at));
        const uint4 bits = load_shared_16(staged + at * 128 + ((chunk ^ (at & 7)) << 4));
        if (warp * 16 + at < ending.rows && v * 64 + chunk * 8 < p.value_columns)
          *reinterpret_cast<uint4*>(destination + v * 128 + chunk * 16) = bits;
      }
      __syncwarp();
    }
  }

  // Scores of block t, and then the products with values of block t - 1; who waits knows when it is their turn.
  __device__ __forceinline__ void issue_both(u32 t, bool has_values) {
    take_turn();
    issue_scores(t % Layout::kStages);
    if (has_values) wait_for_values(t - 1);
    issue_values((t - 1) % Layout::kStages);
    give_turn();
  }

  // Block t is the t-th of all tiles. Without branches around products, which ptxas would not let overlap: before the
  // first block, and after the last one, they are of whatever memory holds, and dropped.
  __device__ __forceinline__ void work() {
    if (consumer == kConsumers - 1) give_turn();
#pragma unroll
    for (u32& x : probabilities) x = 0;
    fetch_query(0);
    u32 t = 0;
#pragma unroll 1
    for (u32 n = 0;; ++n) {
      const Item item = read_item(shared, n);
      const bool exists = item.rows > 0;
      const Seen blocks = blocks_of_item<kBlock>(p, item);
      if (exists) {
        wait_for_query();
        wait_for_keys(t);
      }
      issue_both(t, t > 0);
      // Before the first item ends there is nothing to end: its own record stands for that of the one before, and
      // nothing of what comes out is stored.
      const Ending ending = end_rows(n == 0 ? n : n - 1, t > 0);
      look(item);
      warpgroup_wait<0>();
      keep_behind_wait(scores);
      keep_behind_wait(output);
      if (t > 0) {
        arrive(shared.values_free((t - 1) % Layout::kStages));
        write(ending);
        mbarrier_arrive(shared.item_free(n - 1));
      }
      if (!exists) break;
      int block = blocks.end - 1;
      arrive(shared.keys_free(t % Layout::kStages));
      if (block == blocks.first) fetch_query(n + 1);
      begin();
      mask(n, block);
      raise_maximum();
      exponentiate();
      sum[0] += added[0];
      sum[1] += added[1];
      pack();
      const int valid = item.tokens - block * kBlock;
      if (valid < kBlock) {
        wait_for_values(t);
        clear_values_past(t % Layout::kStages, max(valid, 0));
      }
#pragma unroll 1
      for (++t, --block; block >= blocks.first; ++t, --block) {
        wait_for_keys(t);
        issue_both(t, true);
        warpgroup_wait<1>();
        keep_behind_wait(scores);
        // Maxima seldom grow once each row has one: scores are weighed by those there are, and computed again if weights
        // come out too large. Not of the last block, because its query is overwritten meanwhile.
        bool raises = kBlock == 64 || block == blocks.first || block * kBlock >= seen_by_all.end - kBlock, grown;
        if (block == blocks.first) fetch_query(n + 1);
#pragma unroll 1
        for (;; raises = true) {
          mask(n, block);
          grown = raises && raise_maximum();
          exponentiate();
          // ptxas moves the wait for the products with values up to the last branch: this vote's. All warps take the
          // same one, for they must wait at the same place.
          grown = any(raises ? grown : !(fmaxf(added[0], added[1]) < kMostAdded));
          if (raises || !grown) break;
          issue_scores(t % Layout::kStages);
          warpgroup_wait<0>();
          keep_behind_wait(scores);
          keep_behind_wait(output);
        }
        arrive(shared.keys_free(t % Layout::kStages));
        sum[0] += added[0];
        sum[1] += added[1];
        if (raises && grown) {
          warpgroup_wait<0>();
          keep_behind_wait(output);
#pragma unroll
          for (int i = 0; i < kValueTiles * 32; ++i) output[i] *= factor[i >> 1 & 1];
        }
        warpgroup_wait<0>();
        keep_behind_wait(output);
        arrive(shared.values_free((t - 1) % Layout::kStages));
        pack();
      }
    }
    if (consumer == 0) take_turn();  // which the last one gave
    copy_async_wait_all();
  }
};

template <typename T, int kKeyTiles, int kValueTiles, int kBlock, int kConsumers, bool kCopied>
__device__ __forceinline__ void attention_prefill(const AttentionParams& p) {
  using Layout = PrefillLayout<kKeyTiles, kValueTiles, kBlock, kConsumers>;
  constexpr int kLoaderRegisters = kConsumers == 3 ? 32 : kCopied ? 56 : 40;
  constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kCopied ? 224 : 232;
  static_assert(kLoaderRegisters + kConsumers * kConsumerRegisters <= (kConsumers == 3 ? 4 * 128 : 3 * 168),
                "else warpgroups wait for registers for ever");
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Layout shared = {shared_address(shared_bytes)};
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0), warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < Layout::kStages; ++s) {
      mbarrier_init(shared.keys_full(s), kCopied ? kWarpgroup : 1);
      mbarrier_init(shared.values_full(s), kCopied ? kWarpgroup : 1);
      mbarrier_init(shared.keys_free(s), 4 * kConsumers);
      mbarrier_init(shared.values_free(s), 4 * kConsumers);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      mbarrier_init(shared.item_full(i), 1);
      mbarrier_init(shared.item_free(i), 32 * (4 * kConsumers + (kCopied ? 4 : 2)));  // all threads that read it
    }
    mbarrier_init(shared.wanted(), 1);
    mbarrier_init(shared.begun(), 1);
    fence_mbarrier_init();
  }
  if (warp == 1) prefetch_plan(p, threadIdx.x % 32);
  if (!kCopied && (threadIdx.x == 64 || threadIdx.x == 96))
    prefetch_tensor_map(threadIdx.x == 64 ? &p.key_map : &p.value_map);
  grid_dependency_launch();
  __syncthreads();
  grid_dependency_wait();

  if (warpgroup == 0) {
    registers_decrease<kLoaderRegisters>();
    if constexpr (kCopied)
      load_rows<Layout, kKeyTiles, kValueTiles, kBlock>(p, shared);
    else if (warp == 0)
      load_boxes<Layout, kKeyTiles, kBlock, true>(p, shared);
    else if (warp == 1)
      load_boxes<Layout, kValueTiles, kBlock, false>(p, shared);
    else if (threadIdx.x == 64)
      deal(p, shared);
  } else {
    registers_increase<kConsumerRegisters>();
    PrefillConsumer<T, kKeyTiles, kValueTiles, kBlock, kConsumers, kCopied> consumer(p, shared, warpgroup - 1);
    consumer.work();
  }
}

}  // namespace cumla::mha
