// SPDX-License-Identifier: Apache-2.0
// The ways to load a block of 64 tokens from its pages into tiles of shared memory:
//
//   kPages  pages of a multiple of 64 tokens, all columns in one array (FP8 caches: up to three): one box per tile
//   kBoxes  page sizes that share 8, 16, 32 or 64 tokens with 64: boxes of that many rows. The lanes of a warp look up
//           where boxes are. The swizzle has a period of eight rows, so boxes form the tile of one large box.
//   kRows   any other page size: eight lanes copy a row, 16 bytes each, and swizzle it
#pragma once
#include "mla/mla_decode/layout.cuh"
#include "mla/mla_decode/load.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// The first row, in a block, of the box that this lane looks up.
template <PageForm kForm>
__device__ __forceinline__ int first_of_box(const MlaDecodeParams& p) {
  return kForm == kBoxes ? threadIdx.x % 32 * p.box_rows : 0;
}

// Issues the loads of 64 columns of a block. kBoxes: each lane loads its own box, which is faster than Boxes for
// memory-bound rings. `rope`: the columns are RoPE, known at compile time.
template <PageForm kForm>
__device__ __forceinline__ void load_tile(const MlaDecodeParams& p, u32 destination, int column, bool rope, u32 barrier,
                                          const PageRow& from) {
  if constexpr (kForm == kPages) {
    mbarrier_arrive_expect_tx(barrier, kTileBytes);
    tma_load_4d_async(destination, &p.latent_map, barrier, column * 64, from.row, blockIdx.z, from.page);
  } else {
    const TensorMap* const map = rope ? &p.rope_map : &p.latent_map;
    const int x = rope ? 0 : column * 64, row = first_of_box<kForm>(p);
    if (row == 0) mbarrier_arrive_expect_tx(barrier, kTileBytes);
    __syncwarp();
    if (row < kBlockTokens)
      tma_load_4d_async(destination + row * 128, map, barrier, x, from.row, blockIdx.z, from.page);
  }
}

// Page and row of each of the block's kCount boxes. Lane i looks up box i. Shuffles then give every lane all boxes,
// before the wait for a free stage.
template <int kCount>
struct Boxes {
  int pages[kCount], rows[kCount];

  __device__ __forceinline__ explicit Boxes(const PageRow& from) {
#pragma unroll
    for (int box = 0; box < kCount; ++box) {
      pages[box] = __shfl_sync(0xffffffffu, from.page, box);
      rows[box] = __shfl_sync(0xffffffffu, from.row, box);
    }
  }

  // One lane issues the loads of kLoaded consecutive tiles with consecutive barriers, from column x of the map on.
  template <int kLoaded, int kBytes = kTileBytes>
  __device__ __forceinline__ void load(const TensorMap* map, u32 destination, int x, u32 barrier) const {
#pragma unroll 1
    for (int k = 0; k < kLoaded; ++k) {
      mbarrier_arrive_expect_tx(barrier, kBytes);
#pragma unroll
      for (int box = 0; box < kCount; ++box)
        tma_load_4d_async(destination + box * (kBytes / kCount), map, barrier, x, rows[box], blockIdx.z,
                          pages[box]);
      destination += kTileBytes;
      barrier += 8;
      x += 64;
    }
  }
};

// The share of a block that a CTA prefetches into L2: every step-th box or row from `first` on. The last two row
// tiles of a request share the prefetch, because they see the most tokens under a causal mask.
struct FetchShare {
  int first, step;  // step 1 or 2
};
// model: fetching_ahead
__device__ __forceinline__ FetchShare share_of_tile(int behind, int tiles) {
  return {behind < 2 ? behind : kBlockTokens, min(tiles, 2)};
}
// model: fetching_ahead
__device__ __forceinline__ FetchShare share_of_grid() { return share_of_tile(gridDim.x - 1 - blockIdx.x, gridDim.x); }
// model: fetching_ahead
__device__ __forceinline__ FetchShare fetch_share(const MlaDecodeParams&, const Tile&) { return share_of_grid(); }
// A request with ragged queries may have only one tile: then there is no prefetch, as in kernels for one tile.
// model: fetching_ahead
__device__ __forceinline__ FetchShare fetch_share(const MlaDecodeParams& p, const RaggedTile& tile) {
  const int rows = tile.q_len * p.heads_per_group;
  return share_of_tile(rows > kRowTile ? (rows - 1 - tile.first_row) / kRowTile : 2, 2);
}

// One warp prefetches its share of a block into L2. Each box occupies TMA, and delays loads that consumers wait for.
// So these boxes are as wide as rows.
// model: fetching_ahead
template <PageForm kForm>
__device__ __forceinline__ void prefetch_block(const MlaDecodeParams& p, const FetchShare& share, const PageRow& from) {
  const bool whole = kForm == kPages || p.box_rows == kBlockTokens;  // wide boxes are then halves of the block
#pragma unroll 1
  for (int i = share.first; i * p.wide_rows < kBlockTokens; i += share.step) {
    const int page = __shfl_sync(0xffffffffu, from.page, whole ? 0 : i);
    const int row = __shfl_sync(0xffffffffu, from.row, whole ? 0 : i);
    if (elect_one()) {
      tma_prefetch_4d(&p.wide_map, 0, whole ? row + i * p.wide_rows : row, blockIdx.z, page);
      if (kForm == kBoxes && p.rope_is_apart && (i == 0 || !whole)) tma_prefetch_4d(&p.rope_map, 0, row, blockIdx.z,
                                                                                    page);
    }
    __syncwarp();
  }
}

// The request of this CTA's part if all requests have the same length and enough blocks.
__device__ __forceinline__ u32 first_request_guessed(const MlaDecodeParams& p) {
  const u32 batch = p.batch, parts = p.parts;
  return min(2 * batch <= parts ? blockIdx.y / (parts / batch) : blockIdx.y * ((batch + parts - 1) / parts), batch - 1);
}

// One warp prefetches this CTA's share of its first block into L2, for whole pages. The loader is later, because it
// decodes the whole part record first. The block table entries of the guessed request are loaded together with the
// record. If the guess is wrong, the entry is loaded again.
__device__ __forceinline__ void prefetch_first_block(const MlaDecodeParams& p) {
  constexpr int kLines = 4;  // of 32 entries
  const u32 guess = first_request_guessed(p);
  const uint4* const record = reinterpret_cast<const uint4*>(p.parts_in + blockIdx.y);
  const uint4 begin = load_global_16(record), end = load_global_16(record + 1);
  const int lane = threadIdx.x % 32;
  int entries[kLines];
#pragma unroll
  for (int k = 0; k < kLines; ++k) {
    entries[k] = 0;
    if (lane + 32 * k < p.max_pages) entries[k] = p.block_table[guess * p.block_table_stride + lane + 32 * k];
  }
  // begin: place, block, request and tokens; end: place and block of the end of the part.
  const u32 request = min(max(static_cast<int>(begin.z), 0), p.batch - 1);
  const u32 block = max(static_cast<int>(begin.y), 0), token = block * kBlockTokens;
  const i64 tokens = min(static_cast<i64>(static_cast<int>(begin.w)), p.max_tokens);
  if (static_cast<i64>(block) * kBlockTokens >= tokens || (begin.x == end.x && block >= end.y)) return;
  const u32 entry = p.page_size == kBlockTokens ? block : quotient(token, p.by_page_size);
  int page;
  if (request == guess && entry < 32 * kLines) {
    page = entry < 64 ? (entry < 32 ? entries[0] : entries[1]) : (entry < 96 ? entries[2] : entries[3]);
    page = __shfl_sync(0xffffffffu, page, entry % 32);
  } else {
    page = p.block_table[request * p.block_table_stride + entry];
  }
  prefetch_block<kPages>(p, share_of_grid(), {page, static_cast<int>(token - entry * p.page_size)});
}

// Of a list: this lane's entry of the next block, whose page is being loaded, and the pages of the block after it.
template <typename AnyTile, bool kReads = kReadsLists<AnyTile>>
struct AheadOfList {};
template <typename AnyTile>
struct AheadOfList<AnyTile, true> {
  typename AnyTile::Found found;
  const int* pages;
};

// Copies a share of the rows of every block, for one of kWarps warps. Lane i, modulo the share, looks up row i two
// blocks ahead.
template <typename AnyTile, int kWarps = 2>
struct RowCopier : AheadOfList<AnyTile> {
  static constexpr int kRopeTile = AnyTile::kLatentTiles, kTiles = kRopeTile + 1;
  static constexpr int kShare = kBlockTokens / kWarps;
  static constexpr int kOwn = kShare / 4;  // rows of which a lane copies 16 bytes

  const MlaDecodeParams& p;
  const int lane, first_row;
  // Offset of this lane's first 16 bytes in a tile. The shuffle stops the compiler from computing it anew for each
  // copy.
  const u32 corner;
  BlockCursor<1, AnyTile> ahead;
  PageRow now, next, later;
  // Addresses of this lane's next 16 bytes of its rows. Bit 4 i of `exist`: row i exists. See locate.
  const char* sources[kOwn];
  u32 exist;

  __device__ __forceinline__ RowCopier(const MlaDecodeParams& p, const AnyTile& tile, const Part& part, int last_place,
                                       int warp)
      : p(p),
        lane(threadIdx.x % 32),
        first_row(warp * kShare),
        corner(__shfl_sync(0xffffffffu, (warp * kShare + lane / 8) * 128 + ((lane % 8 ^ lane / 8) << 4), lane)),
        ahead(p, tile, part, last_place, 0) {
    next = find();
    if constexpr (kReadsLists<AnyTile>) this->found = AnyTile::look_up(p, this->pages, next.page);
    later = find();
  }

  // Returns row -1 in all lanes if there is no block.
  __device__ __forceinline__ PageRow find() {
    if (!ahead.valid()) return {-1, -1};
    const PageRow at = ahead.template row_of<kRows>(first_row + lane % kShare);
    if constexpr (kReadsLists<AnyTile>) this->pages = ahead.tile.pages_of_list;
    ahead.next();
    return at;
  }

  // Advances to the next block; false if there is none.
  __device__ __forceinline__ bool take() {
    if (next.row < 0) return false;
    now = next;
    if constexpr (kReadsLists<AnyTile>) {
      now.page = AnyTile::row_of(p, this->found);
      this->found = AnyTile::look_up(p, this->pages, later.page);
    }
    next = later;
    later = find();
    return true;
  }

  // Byte offset of a row in the cache; -1 if it is to be zeros.
  __device__ __forceinline__ i64 offset_of(const CacheColumns& columns, const PageRow& at) const {
    if (static_cast<u32>(at.page) >= p.num_pages) return -1;
    return at.page * columns.stride_page + at.row * columns.stride_row + blockIdx.z * columns.stride_head;
  }

  // Stores a bit for each of this warp's 32 rows, set if the row exists.
  __device__ __forceinline__ void store_exist(u32 to) const {
    const u32 bits = __ballot_sync(0xffffffffu, lane < kShare && offset_of(p.latent, now) >= 0);
    if (lane == 0) store_shared_u32(to, bits);
    __syncwarp();
  }

  // Issues copies of 128 bytes of each of this warp's rows, from byte `bytes` on, to each of the given tiles.
  // model: fp8_data
  template <int kCount, bool kRope = false>
  __device__ __forceinline__ void copy(const CacheColumns& from, int bytes, const u32 (&tiles)[kCount]) const {
    const i64 own = offset_of(from, now);
    const int chunk = lane % 8;
    const char* const base = from.base + bytes + chunk * 16;
#pragma unroll 4
    for (int i = 0; i < kOwn; ++i) {
      const int row = 4 * i + lane / 8;
      const i64 offset = __shfl_sync(0xffffffffu, own, row);
      const bool exists = offset >= 0;
      const char* const source = base + (exists ? offset : 0);
      const u32 destination = (first_row + row) * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
      for (int k = 0; k < kCount; ++k)
        copy_16_async(tiles[k] + destination, source + k * 128,
                      exists && (!kRope || has_rope_chunk<AnyTile>(p, chunk)));
    }
  }

  // Issues copies of one half of the RoPE columns of each of this warp's rows: 64 bytes, as wide as the swizzle.
  __device__ __forceinline__ void copy_half_rope(int half, u32 tile) const {
    const i64 own = offset_of(p.rope, now);
    const int chunk = lane % 4;
#pragma unroll 1
    for (int i = 0; i < kOwn / 2; ++i) {
      const int row = 8 * i + lane / 4;
      const i64 offset = __shfl_sync(0xffffffffu, own, row);
      copy_16_async(tile + (first_row + row) * 64 + (swizzled_chunk<64>(row, chunk) << 4),
                    p.rope.base + (offset >= 0 ? offset : 0) + half * 64 + chunk * 16, offset >= 0);
    }
  }

  // The same in two steps, so that a copy does not wait for addresses: locate() finds the rows, then any number of
  // copies follow.
  __device__ __forceinline__ void locate(const CacheColumns& from) {
    const i64 offset = offset_of(from, now);
    const char* const own = from.base + max(offset, i64{0});
    exist = __ballot_sync(0xffffffffu, offset >= 0) >> (lane / 8);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const u64 source = __shfl_sync(0xffffffffu, reinterpret_cast<u64>(own), 4 * i + lane / 8);
      sources[i] = reinterpret_cast<const char*>(source) + lane % 8 * 16;
    }
  }
  // Copies to kCount consecutive tiles. A lane's rows are 4 apart, so its swizzled chunk alternates between two
  // addresses. Each has its own register: overwriting one that a pending copy reads would stall.
  template <int kCount, int kBytes = 0, bool kRope = false>
  __device__ __forceinline__ void copy_located(u32 tiles) const {
    const u32 even = tiles + corner, odd = even ^ 64;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
      for (int k = 0; k < kCount; ++k)
        copy_16_async((i % 2 ? odd : even) + i * 512 + k * kTileBytes, sources[i] + kBytes + k * 128,
                      (exist >> 4 * i & 1) && (!kRope || has_rope_chunk<AnyTile>(p, lane % 8)));
  }
  __device__ __forceinline__ void move(int bytes) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sources[i] += bytes;
  }

  // Prefetches this CTA's share of the block after next into L2. With ragged queries `ahead` may be at the next place
  // by then, so its tile gives the share; that can only cost time.
  // model: fetching_ahead
  __device__ __forceinline__ void prefetch() const {
    const i64 latent = offset_of(p.latent, later);
    const FetchShare share = fetch_share(p, ahead.tile);
    if (lane >= kShare || (lane & (share.step - 1)) != share.first || latent < 0) return;
    if constexpr (AnyTile::kRopeVaries) {
      const int rope_bytes = static_cast<const MlaWidthParams&>(p).rope_chunks * 16;
      prefetch_bulk_l2(p.latent.base + latent, kRopeTile * 128 + (p.rope_is_apart ? 0 : rope_bytes));
      if (AnyTile::kHasRope && p.rope_is_apart) prefetch_bulk_l2(p.rope.base + offset_of(p.rope, later), rope_bytes);
    } else {
      prefetch_bulk_l2(p.latent.base + latent, (p.rope_is_apart ? kRopeTile : kTiles) * 128);
      if (p.rope_is_apart) prefetch_bulk_l2(p.rope.base + offset_of(p.rope, later), 128);
    }
  }
};

}  // namespace cumla::mla
