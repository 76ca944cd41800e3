// SPDX-License-Identifier: Apache-2.0
// Indexer logits over a paged cache (indexer/paged_mqa_logits.cu) for one request of up to 64 columns: q_len x heads.
//
// A CTA has every gridDim.x-th block of 64 tokens. So page numbers are read before the length is known, and no schedule
// is read.
//
// grid = any number of CTAs of 640 threads, one CTA per SM
//
// Roles and time line:
//   warps 16-19      page numbers and the length | wait I | length | load every fourth block each
//   warpgroups 0-3   barriers | arrive at I | query, weights | wait R | score each fourth block; -inf, by one warp
//
// barrier     who arrives (count)                             who waits       guards
// full(slot)  lanes of a loading warp, one per box, with      its warpgroup   keys and scales are loaded
//             bytes (1 to 4)
// free(slot)  a lane per warp of its warpgroup (4)            its loading     the slot may be overwritten
//                                                             warp
// named, I    all warps (640); warpgroups do not wait         loading warps   full and free are initialised
// named, L    loading warps (128)                             the same        the length
// named, R    all warps (640); loading warps do not wait      warpgroups      length, query, weights
//
// Shared memory: ring of 8 blocks 67,584 + query 8,192 + weights 256 + barriers 128 + length 16
// Registers:     64 (accumulators 32, weights 16)
#include "indexer/mqa_logits/compute.cuh"
#include "indexer/mqa_logits/layout.cuh"
#include "indexer/mqa_logits/load.cuh"
#include "indexer/paged_mqa_plan.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::indexer {

using namespace ptx;

// Strides are in bytes.
struct PagedMqaFewParams {
  TensorMap keys;  // as in PagedMqaParams
  LogitsParams logits;
  KvLens kv_lens;
  const char* q;
  i64 q_stride_row;
  const char* scales;  // float
  i64 scales_stride;   // of a page
  const int* block_table;
  int num_pages;
  int log2_of_page;  // tokens: 16 to 128
};

constexpr int kFewWarpgroups = 4;
// Loading warps. One asks for a block in some 500 clocks; an SM's share of the read bandwidth brings one in 430.
constexpr int kFewLoaders = 4;
constexpr int kFewThreads = kFewWarpgroups * kWarpgroup + kFewLoaders * 32;
constexpr int kFewInitialised = 1, kFewLength = 2, kFewReady = 3;  // named barriers I, L and R

struct LogitsFewLayout {
  static constexpr int kDim = 128;
  static constexpr int kColumns = 64;
  static constexpr int kSlots = 8;  // slot s is of warpgroup s % 4
  static constexpr int kBlockBytes = kBlockTokens * kDim, kScaleBytes = kBlockTokens * 4;
  static constexpr int kBytes =
      kSlots * (kBlockBytes + kScaleBytes) + kColumns * kDim + kColumns * 4 + 2 * kSlots * 8 + 16;
  static_assert(kSlots % kFewWarpgroups == 0 && kSlots <= 4 * kFewWarpgroups, "a slot always has the same warpgroup");

  u32 query;

  __device__ __forceinline__ u32 block(int slot) const { return query + kColumns * kDim + slot * kBlockBytes; }
  __device__ __forceinline__ u32 scales(int slot) const { return block(kSlots) + slot * kScaleBytes; }
  __device__ __forceinline__ u32 weights() const { return scales(kSlots); }
  __device__ __forceinline__ u32 full(int slot) const { return weights() + kColumns * 4 + slot * 8; }
  __device__ __forceinline__ u32 free(int slot) const { return full(kSlots + slot); }
  __device__ __forceinline__ u32 length() const { return full(2 * kSlots); }
};

struct OneRequest {
  const PagedMqaFewParams& p;
  __device__ __forceinline__ Span span_of_row(i64 row) const {
    return {0, visible_tokens(p.kv_lens, 0, static_cast<int>(row)), 0};
  }
};

// Tokens that some row sees. There are up to two rows.
__device__ __forceinline__ int seen_by_rows(const KvLens& l, int length, int length_of_first) {
  return max(visible_of(l, length, l.q_len - 1), visible_of(l, length_of_first, 0));
}

// A lane of each of the warpgroups' warps: lanes of one warp would be serialised.
__device__ __forceinline__ void initialise_barriers(const PagedMqaFewParams& p, const LogitsFewLayout& shared) {
  const int slot = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0 && slot < LogitsFewLayout::kSlots) {
    mbarrier_init(shared.full(slot), 1 << max(6 - p.log2_of_page, 0));
    mbarrier_init(shared.free(slot), 4);  // plant: block of one request read, arrivals
    fence_mbarrier_init();
  }
  __syncwarp();
}

// kFewLoaders warps load the CTA's blocks in turns, in order: a block that is asked for early comes early. Lane 4 i + b
// has box b of every eighth block of its warp from block i on.
__device__ __forceinline__ void load_blocks(const PagedMqaFewParams& p, const LogitsFewLayout& shared) {
  using Layout = LogitsFewLayout;
  constexpr u32 kRound = 8, kBoxes = 4;  // blocks, and boxes of a block, that the lanes have
  const u32 lane = threadIdx.x % 32, loader = threadIdx.x / 32 - kFewWarpgroups * 4;
  const u32 box = lane % kBoxes, group = lane / kBoxes;
  const int log2_of_box = min(p.log2_of_page, 6), log2_of_boxes = 6 - log2_of_box;  // tokens of a box, boxes of a block
  const bool loads = box < 1u << log2_of_boxes;
  auto token_of = [&](u32 n) { return (blockIdx.x + gridDim.x * n) * kBlockTokens + (box << log2_of_box); };
  // The block table's entry for this lane's block of a round, clamped to one that exists.
  auto entry_of = [&](u32 round) {
    const u32 token = token_of(loader + kFewLoaders * (round * kRound + group));
    return p.block_table[min(token, static_cast<u32>(p.kv_lens.most_tokens - 1)) >> p.log2_of_page];
  };
  grid_dependency_wait();
  int entry = entry_of(0), later = 0;
  const int length = length_of(p.kv_lens, 0, p.kv_lens.q_len - 1), length_of_first = length_of(p.kv_lens, 0, 0);
  const u32 box_bytes = Layout::kDim << log2_of_box, scale_bytes = 4u << log2_of_box;
  const u64 policy = evict_first_policy();  // why: indexer/paged_mqa_logits.cu
  named_barrier_sync<kFewInitialised, kFewThreads>();
  // Lengths may change while the kernel runs: those that the first thread reads count for all.
  u32 tokens = seen_by_rows(p.kv_lens, length, length_of_first);
  if (threadIdx.x == kFewWarpgroups * kWarpgroup) store_shared_u32(shared.length(), tokens);
  __syncwarp();
  named_barrier_sync<kFewLength, kFewLoaders * 32>();
  tokens = load_shared_u32(shared.length());
  named_barrier_arrive<kFewReady, kFewThreads>();
#pragma unroll 1
  for (u32 i = 0, n = loader; (blockIdx.x + gridDim.x * n) * kBlockTokens < tokens; ++i, n += kFewLoaders) {
    if (i > 0 && i % kRound == 0) entry = later;
    const u32 slot = n % Layout::kSlots;
    if (loads && i % kRound == group) {
      const u32 full = shared.full(slot), token = token_of(n), in_page = token & ((1 << p.log2_of_page) - 1);
      const bool seen = token < tokens;
      // Other lanes do not wait: some might come back to a phase that is over.
      if (n >= Layout::kSlots) {
        mbarrier_wait(shared.free(slot), n / Layout::kSlots % 2 ^ 1, "a free slot for tokens");
        fence_proxy_async_shared();  // orders the generic reads of the earlier scales before the copies
      }
      mbarrier_arrive_expect_tx(full, seen ? box_bytes + scale_bytes : 0);
      if (seen) {
        const int page = min(max(entry, 0), p.num_pages - 1);
        tma_load_3d_async(shared.block(slot) + box * box_bytes, &p.keys, full, 0, in_page, page, policy);
        copy_bulk_async(shared.scales(slot) + box * scale_bytes, p.scales + page * p.scales_stride + in_page * 4,
                        scale_bytes, full, policy);
      }
    }
    __syncwarp();
    // All lanes at once: a load by some of them would hold up the others' next blocks until it is there.
    if (i % kRound == 0) later = entry_of(i / kRound + 1);
  }
}

// Each thread copies 16 bytes of the query; one of eight copies a weight, too. Columns that do not exist get zeros.
template <typename Shape>
__device__ __forceinline__ void copy_query(const PagedMqaFewParams& p, const LogitsFewLayout& shared) {
  static_assert(Shape::kColumns * Shape::kDim == kFewWarpgroups * kWarpgroup * 16, "16 bytes of each thread");
  const int column = threadIdx.x / 8, chunk = threadIdx.x % 8;
  const int row = Shape::row_of(column), head = Shape::head_of(column);
  const bool valid = row < p.kv_lens.q_len && head < p.logits.num_heads;
  copy_16_async(shared.query + column * Shape::kDim + swizzled_chunk<Shape::kDim>(column, chunk) * 16,
                p.q + (valid ? row * p.q_stride_row + head * p.logits.q_stride_head : 0) + chunk * 16, valid);
  if (chunk != 0) return;
  const i64 at = valid ? row * p.logits.weights_stride_row + head * p.logits.weights_stride_head : 0;
  copy_4_async(shared.weights() + column * 4, p.logits.weights + at, valid);
}

// The warpgroups score every fourth block of the CTA each.
template <typename Shape>
__device__ __forceinline__ void score_blocks(const PagedMqaFewParams& p, const LogitsFewLayout& shared, int warpgroup) {
  using Layout = LogitsFewLayout;
  using Consumer = LogitsConsumer<Shape>;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) prefetch_tensor_map(&p.keys);
  initialise_barriers(p, shared);
  named_barrier_arrive<kFewInitialised, kFewThreads>();
  grid_dependency_wait();
  copy_query<Shape>(p, shared);
  const int row = lane % 4 / Consumer::kLanes;
  const u32 seen = row < p.kv_lens.q_len ? visible_tokens(p.kv_lens, 0, row) : 0;
  copy_async_wait_all();
  fence_proxy_async_shared();
  named_barrier_sync<kFewReady, kFewThreads>();
  const u32 tokens = load_shared_u32(shared.length());
  float weights[Consumer::kColumnsPerThread];
#pragma unroll
  for (int i = 0; i < Consumer::kColumnsPerThread; i += 2) {
    const float2 pair = load_shared_float2(shared.weights() + i * 16 + lane % 4 * 8);
    weights[i] = pair.x;
    weights[i + 1] = pair.y;
  }
  const bool stores = Consumer::kLanes < 4 || lane % 4 < 2;
  const bool out_is_bf16 = p.logits.out_is_bf16;
  const u32 in_block = 16 * warp + lane / 4 + lane % 2 * 8;  // the token whose logit this lane stores
  const u64 out = reinterpret_cast<u64>(p.logits.out) + row * p.logits.out_stride;
  float accumulators[2 * Consumer::kColumnsPerThread];
#pragma unroll
  for (float& x : accumulators) x = 0.0f;
  RingPlace<Layout::kSlots> place;
  place.advance(warpgroup);
  u32 first = (blockIdx.x + gridDim.x * warpgroup) * kBlockTokens;  // token of a block
#pragma unroll 1
  for (; first < tokens; first += gridDim.x * kFewWarpgroups * kBlockTokens) {
    mbarrier_wait(shared.full(place.slot), place.phase, "keys");
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < Layout::kDim; k += 32)
      wgmma_e4m3_async(accumulators, descriptor_of_rows<Layout::kDim>(shared.block(place.slot), k),
                       descriptor_of_rows<Layout::kDim>(shared.query, k), k > 0);
    warpgroup_commit();
    const float scale = load_shared_float(shared.scales(place.slot) + in_block * 4);
    warpgroup_wait<0>();
    keep_behind_wait(accumulators);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.free(place.slot));  // plant: block of one request read
    float low, high;
    Consumer::sum_heads(accumulators, weights, 0, low, high);
    const bool second = lane % 2;
    float sum = (second ? high : low) + __shfl_xor_sync(0xffffffffu, second ? low : high, 1);
    if (Consumer::kLanes == 4) sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const u32 token = first + in_block;
    const bool valid = token < seen && stores;
    const u64 at = out + static_cast<u64>(token) * (out_is_bf16 ? 2 : 4);
    store_global_float_if(valid && !out_is_bf16, at, sum * scale);
    store_global_low_half_if(valid && out_is_bf16, at, pack_pair<Bf16>(sum * scale, 0.0f));
    place.advance(kFewWarpgroups);
  }
  if (p.logits.clean && warpgroup == kFewWarpgroups - 1 && warp == 3) fill_outside(p.logits, OneRequest{p});
}

// kHeads: columns of a query row, 32 or 64.
template <int kHeads>
__device__ __forceinline__ void paged_mqa_logits_few(const PagedMqaFewParams& p) {
  using Shape = LogitsShape<kHeads, LogitsFewLayout::kDim, LogitsFewLayout::kColumns, 1, 2>;
  static_assert(Shape::kRows <= 2, "the first row, and the last one");
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const LogitsFewLayout shared = {shared_address(shared_bytes)};
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  grid_dependency_launch();
  if (warpgroup < kFewWarpgroups) {
    score_blocks<Shape>(p, shared, warpgroup);
    return;
  }
  load_blocks(p, shared);  // ptxas places it first: all wait for its instructions, which may have to come from memory
}

}  // namespace cumla::indexer
