// SPDX-License-Identifier: Apache-2.0
// Shared by the loading roles: the order of blocks, early prefetches, query rows.
#pragma once
#include "mla/mla_decode/layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// The page and row of a token. Page -1 loads zeros.
struct PageRow {
  int page, row;
};

// Iterates over every kStep-th block (1 or 2) of this CTA's sequence.
template <int kStep, typename AnyTile>
struct BlockCursor {
  const MlaDecodeParams& p;
  typename AnyTile::Held tile;
  const Part& part;
  const int last_place, parity;
  int place, i, t;  // block i of the segment at `place`; t: blocks of earlier segments
  Segment segment;

  __device__ __forceinline__ BlockCursor(const MlaDecodeParams& p, const AnyTile& tile, const Part& part,
                                         int last_place, int parity)
      : p(p),
        tile(tile),
        part(part),
        last_place(last_place),
        parity(parity),
        place(part.place),
        i(parity),
        t(0) {
    if (valid()) segment = segment_of(p, this->tile, part, place);
    skip_to_block();
  }
  __device__ __forceinline__ bool valid() const { return place <= last_place; }
  // Page and row of the block's token `offset` (0 for kPages). It never reads the block table past the end of the
  // request. With pages of 64 a shift replaces the division, whose instructions are visible in the time of a block.
  template <PageForm kForm>
  __device__ __forceinline__ PageRow row_of(int offset) const {
    const int first = valid() ? (segment.begin + i) * kBlockTokens : 0;
    if (!valid() || (kForm != kPages && offset >= segment.tokens - first)) return {-1, 0};
    const u32 token = first + offset;
    const u32 entry = kForm == kPages && p.page_size == kBlockTokens ? token / kBlockTokens : quotient(token,
                                                                                                       p.by_page_size);
    return {page_of(p, tile, segment, entry), static_cast<int>(token - entry * p.page_size)};
  }
  __device__ __forceinline__ void next() {
    i += kStep;
    skip_to_block();
  }
  __device__ __forceinline__ void skip_to_block() {
    while (valid() && i >= segment.blocks) {
      t += segment.blocks;
      i = (parity ^ t) & (kStep - 1);
      if (++place <= last_place) segment = segment_of(p, tile, part, place);
    }
  }
};

// Has L2 fetch what the first loads depend on: the part, the lengths, and a few lines of the block table per CTA. And
// sinks of dense kernels, which the end of a segment waits for.
template <typename AnyTile>
__device__ __forceinline__ void prefetch_plan(const MlaDecodeParams& p, int thread, int threads) {
  constexpr int kLine = 32, kPlaces = 16;  // entries of a line of 128 bytes
  if (thread == 0) prefetch_l2(p.parts_in + blockIdx.y);
  if constexpr (AnyTile::kHasSinks && !AnyTile::kIsList)
    if (p.sinks != nullptr && thread * kLine < p.heads_per_group)
      prefetch_l2(p.sinks + (blockIdx.z * p.heads_per_group + thread * kLine) * p.sinks_stride);
  if (AnyTile::kIsRagged) {
    if (thread == 1)
      prefetch_l2(p.tickets + static_cast<i64>(blockIdx.z * gridDim.x + blockIdx.x) * p.parts + blockIdx.y);
    if (AnyTile::kIsList && thread * kPlaces < p.batch) prefetch_l2(p.places + thread * kPlaces);
    return;
  }
  const int ctas = gridDim.x * gridDim.y * gridDim.z;
  const int cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int lines = (p.max_pages + kLine - 1) / kLine;
#pragma unroll 1
  for (int i = cta * threads + thread, k = 0; i < static_cast<i64>(p.batch) * lines && k < 4; i += ctas * threads, ++k)
    prefetch_l2(p.block_table + (i / lines) * p.block_table_stride + (i % lines) * kLine);
  if (thread * kPlaces < p.batch) prefetch_l2(p.places + thread * kPlaces);
}

// Address of 64 columns, 128 bytes, of a query row.
template <int kLatentTiles = kRopeTile>
__device__ __forceinline__ const char* query_tile(const MlaDecodeParams& p, int column, int request, int token,
                                                  int head) {
  const bool rope = column == kLatentTiles;
  const QueryColumns& q = rope ? p.q_rope : p.q_latent;
  return q.base + request * q.stride_batch + token * q.stride_token + head * q.stride_head + (rope ? 0 : column * 128);
}

// Has L2 fetch all query rows if they are few; the CTAs share them. The CTA's own request is known only one load
// later. `requests` have q_len tokens each.
template <typename AnyTile>
__device__ __forceinline__ void prefetch_queries(const MlaDecodeParams& p, int requests, int thread, int threads) {
  constexpr int kLines = AnyTile::kLatentTiles + AnyTile::kHasRope;  // of a row
  const int heads = gridDim.z * p.heads_per_group;
  const i64 lines = static_cast<i64>(requests) * p.q_len * heads * kLines;
  const int ctas = gridDim.x * gridDim.y * gridDim.z;
  if (lines > 4 * ctas * threads) return;
  const int cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
#pragma unroll 1
  for (int i = cta * threads + thread; i < lines; i += ctas * threads) {
    const int row = i / kLines, tokens = quotient(row, p.by_num_heads), request = quotient(tokens, p.by_q_len);
    prefetch_l2(query_tile<AnyTile::kLatentTiles>(p, i - row * kLines, request, tokens - request * p.q_len,
                                                  row - tokens * heads));
  }
}

// The prologue before the wait for the previous kernel: early prefetches, barriers.
template <PageForm kForm, typename AnyTile, typename Layout>
__device__ __forceinline__ void begin_kernel(const MlaDecodeParams& p, const Layout& shared, int row_warps) {
  const int warp = threadIdx.x / 32;
  // A prefetch returns no value, so an earlier kernel may still write these lines.
  if (warp == 2 || warp == 3) prefetch_plan<AnyTile>(p, threadIdx.x - 64, 64);
  if constexpr (kReadsLists<AnyTile>)
    if (warp == 1) AnyTile::prefetch(p, threadIdx.x - 32, 32);
  if (kForm == kPages && threadIdx.x == 32) prefetch_tensor_map(&p.latent_map);
  if (kForm == kBoxes && ((AnyTile::kHasRope && threadIdx.x == 32) || threadIdx.x == 33))
    prefetch_tensor_map(threadIdx.x == 32 ? &p.rope_map : &p.latent_map);
  if (threadIdx.x == 0) {
    if constexpr (kReadsLists<AnyTile>)
      AnyTile::initialise(shared, row_warps);
    else
      initialise_barriers(shared, row_warps);
  }
  grid_dependency_launch();
  __syncthreads();
  if (AnyTile::kIsList && (warp == 2 || warp == 3))
    prefetch_queries<AnyTile>(p, quotient(p.batch, p.by_q_len), threadIdx.x - 64, 64);
  if (!AnyTile::kIsRagged && (warp == 2 || warp == 3)) prefetch_queries<AnyTile>(p, p.batch, threadIdx.x - 64, 64);
}

// kLoaders warps issue the copies of a request's query rows: eight lanes per row, 16 bytes each.
template <int kQueryRows, int kLoaders = 2, typename Layout, typename AnyTile>
__device__ __forceinline__ void copy_query(const MlaDecodeParams& p, const Layout& shared, const AnyTile& tile,
                                           int request,
                                           int loader) {
  constexpr int kRopeTile = AnyTile::kLatentTiles;
  const int lane = threadIdx.x % 32, chunk = lane % 8;
  const auto policy = tile.policy(p);
#pragma unroll 1  // unrolled, the row addresses do not fit the registers of a loader
  for (int i = 0; i < kQueryRows / (4 * kLoaders); ++i) {
    const int row = loader * (kQueryRows / kLoaders) + i * 4 + lane / 8;
    const bool valid = row < tile.rows;
    const Row from(p, tile, valid ? row : 0);
    const char* latent = query_tile<kRopeTile>(p, 0, request, from.token, from.head) + chunk * 16;
    if constexpr (kHasHalf<AnyTile>) latent += blockIdx.x * (kRopeTile * 128);
    const char* rope = query_tile<kRopeTile>(p, kRopeTile, request, from.token, from.head) + chunk * 16;
    const u32 destination = shared.query + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
    for (int k = 0; k < kRopeTile + (AnyTile::kHasRope && !kHasHalf<AnyTile>) - AnyTile::kRing; ++k)
      copy_16_async(destination + k * kQueryRows * 128, k == kRopeTile ? rope : latent + k * 128,
                    valid && (k < kRopeTile || has_rope_chunk<AnyTile>(p, chunk)), policy);
  }
}

// Two warps load the query rows of all requests.
template <int kQueryRows, typename Layout, typename AnyTile>
__device__ __forceinline__ void load_query(const MlaDecodeParams& p, const Layout& shared, AnyTile& tile,
                                           const Part& part, int last_place, int loader) {
  for (int place = part.place; place <= last_place; ++place) {
    const int request = segment_of(p, tile, part, place).request;
    const u32 phase = (place - part.place) & 1;
    mbarrier_wait(shared.query_free(), phase ^ 1, "a free query buffer");
    copy_query<kQueryRows>(p, shared, tile, request, loader);
    copy_async_wait_all();
    fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.query_full());  // plant: query copied
  }
}

}  // namespace cumla::mla
