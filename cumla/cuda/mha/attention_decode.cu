// SPDX-License-Identifier: Apache-2.0
// Attention of 8 or 16 query rows of a kv head, by the ragged schedule (split/plan.cuh). Each CTA has a part, and
// computes one row tile at a time over the blocks of its part.
//
// grid: see HeadTile; 384 threads, one CTA per SM. Operands are swapped: tokens, then value columns, are the M side
// of mma.sync products, and query rows the N side.
//
// Roles and time line:
//   warp w      every twelfth chunk of 16 tokens, with its own maximum, sums and output:
//               copy kStages chunks ahead | S' = K Q' | softmax | P' by movmatrix | O' += V' P'
//   warp 11     also copies the query rows, and narrows bfloat16 rows for e4m3
//   warps 0-7   also add up what all warps have of a tile, and store or combine (mha/attention_decode/join.cuh)
//
// barrier                   who arrives (count)               who waits              guards
// full(warp, stage)         lane 0 of the warp, with the      the warp               a chunk is loaded
//                           bytes of TMA (1); its own
//                           cp.async copies use no barrier
// sums_full                 a lane per warp that has left     warps 0 to 7; warp 11  the outputs of a turn; the tile's
//                           its output (12)                                          query is free
// sums_free                 a lane per warp that has added    all warps              the outputs may be overwritten
//                           up (8)
// query_copied              the lanes of warp 11, after       warp 11                query rows to be narrowed
//                           their copies (32)
// query_full(slot)          warp 11: a lane after narrowing   all warps              query rows and scales
//                           (1), or all after their copies
//                           (32)
// named, kConsumersBarrier  warps 0 to 7, while they combine  the same               the ticket's answer, sums
//                           (256)
//
// Shared memory: 12 warps x kStages x 16 tokens, sums 26,496 B per step, of one step or all (combining uses them, too),
//                statistics, query rows of one tile or three
// Registers:     168
#include "mha/attention/layout.cuh"
#include "mha/attention_decode/compute.cuh"
#include "mha/attention_decode/finish.cuh"
#include "mha/attention_decode/layout.cuh"
#include "mha/attention_decode/load.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

template <typename T, int kKeys, int kValues, int kRows, bool kE4m3, bool kCaps = true, typename Given>
__device__ __forceinline__ void attention_decode(const Given& given) {
  using Params = typename TypeIf<kCaps, Given, LeanParams>::Type;
  const Params& p = static_cast<const Params&>(given);
  using Layout = DecodeLayout<kKeys, kValues, kRows, kE4m3>;
  // Narrows query rows; copies them ahead
  constexpr bool kNarrows = kE4m3 && kIsBf16<T>, kAhead = Layout::kQuerySlots > 1;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Layout shared = {shared_address(shared_bytes)};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (lane < Layout::kStages) {
    mbarrier_init(shared.full(warp, lane), 1);
    fence_mbarrier_init();
    fence_proxy_async_shared();
  }
  if (threadIdx.x == 0) {
    mbarrier_init(shared.sums_full(), kDecodeWarps);  // plant: sums, arrivals
    mbarrier_init(shared.sums_free(), kJoinWarps);    // plant: sums read, arrivals
    mbarrier_init(shared.query_copied(), 32);
    for (int s = 0; s < Layout::kQuerySlots; ++s)
      mbarrier_init(shared.query_full(s), kNarrows ? 1 : 32);  // plant: query, arrivals
    fence_mbarrier_init();
  }
  if (p.box_rows == kChunk && threadIdx.x == 0) prefetch_tensor_map(&p.key_map);
  if (p.box_rows == kChunk && threadIdx.x == 32) prefetch_tensor_map(&p.value_map);
  if (warp == 2) prefetch_plan(p, lane);
  __syncthreads();
  grid_dependency_launch();
  grid_dependency_wait();

  int place, last_place;
  {
    const Part part = part_of_cta(p, blockIdx.y);
    place = part.place;
    last_place = last_place_of(p, part);
  }
  u32 boxed = 0, phases = 0;  // a bit per stage
  int chunks = 0;
  HeadTile tile(p);
  Segment segment;
  Attender<T, kKeys, kValues, kRows, kE4m3, Params> attender(p, shared, tile);
  if (place <= last_place) segment = chunks_at<kRows>(p, tile, place, chunks);
  // Copies the query of this tile, or of the next one.
  const auto copy_query = [&](int later) {
    if (warp != kQueryWarp || place + later > last_place) return false;
    HeadTile of = tile;
    int unused;
    if (later > 0) chunks_at<kRows>(p, of, place + later, unused);
    attender.copy_query_async(of, attender.tiles + later);
    return kNarrows;
  };
  ChunksAhead<Layout, kRows> ahead(p, shared, tile, segment, chunks, place, last_place);
  // Code that runs for the first time is slow. So it is a loop, if registers allow that.
  constexpr int kOnce = Layout::kHoldsQuery ? 1 : Layout::kStages;
  ChunkEntry first[Layout::kStages];
#pragma unroll kOnce
  for (int s = 0; s < Layout::kStages; ++s) {
    const ChunkEntry at = ahead.advance();
#pragma unroll
    for (int i = 0; i < Layout::kStages; ++i)
      if (i == s) first[i] = at;
  }
  ChunkRow rows[Layout::kStages];
#pragma unroll
  for (int s = 0; s < Layout::kStages; ++s) rows[s] = ahead.look_up(first[s]);
  bool narrows = copy_query(0);  // while the page numbers are loaded
#pragma unroll kOnce
  for (int s = 0; s < Layout::kStages; ++s) {
    ChunkRow at = rows[0];
#pragma unroll
    for (int i = 1; i < Layout::kStages; ++i)
      if (i == s) at = rows[i];
    boxed |= static_cast<u32>(ahead.copy_async(at, s, false)) << s;
    copy_async_commit();
  }
  ChunkRow next = ahead.look_up(ahead.advance());  // a chunk before it is needed

  if (kAhead && narrows) attender.narrow_query(0);
  int stage = 0, chunk = warp;
  bool owes = false;  // the results of the tile before are still to be stored
#pragma unroll 1
  while (place <= last_place) {
    if (!kAhead && warp == kQueryWarp) {
      if (Layout::kSumTurns == 1 && attender.tiles > 0) {
        attender.wait_for_all();
        narrows = copy_query(0);
      }
      if (narrows) attender.narrow_query(attender.tiles);
    }
    attender.begin(segment, attender.tiles);
    narrows = kAhead && copy_query(1);  // to the slot of two tiles before, which all warps have left
    bool has_duty = owes || narrows;  // to be done after the first chunk
    while (true) {
      const int end = has_duty ? min(chunk + 1, chunks) : chunks;
#pragma unroll 1
      for (; chunk < end; chunk += kDecodeWarps) {
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
        next = ahead.look_up(ahead.advance());
        stage = stage + 1 < Layout::kStages ? stage + 1 : 0;
      }
      if (!has_duty) break;
      has_duty = false;
      if (narrows) attender.narrow_query(attender.tiles + 1);
      if (!owes) continue;
      HeadTile before(p);  // computed again, because registers are scarce
      int unused;
      chunks_at<kRows>(p, before, place - 1, unused);
      attender.settle(before);
    }
    chunk -= chunks;  // the warp of a chunk depends on earlier tiles, so batch_invariant calls use another kernel
    const bool more = place < last_place;
    owes = attender.finish(segment, more, [&] {
      if (!kAhead) narrows = copy_query(1);
    });
    if (!more) break;
    segment = chunks_at<kRows>(p, tile, ++place, chunks);
  }
}

}  // namespace cumla::mha
