// SPDX-License-Identifier: Apache-2.0
// How the CTAs that made the pieces of a split request meet, at the ticket of its first part, to join the pieces. Who
// waits, who goes on, and who joins the shares of those that left: docs/kernels/schedule.md.
#pragma once
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

using namespace ptx;

constexpr int kConsumersBarrier = 1;  // named barrier
constexpr long long kPatience = 40000;  // clocks, about 20 us: requests are dealt out evenly

// The threads of both consumers meet.
__device__ __forceinline__ void consumers_sync() { named_barrier_sync<kConsumersBarrier, 2 * kWarpgroup>(); }

// Of one request, for the threads of both consumers.
template <typename Params>
struct Meeting {
  enum Role : u32 { kGoOn, kOwnShare, kLast };
  // model: join
  static constexpr u32 kAll = 1u << 31;

  const Params& p;
  const Segment& segment;
  const u32 words;               // shared: two, that all threads must agree on
  const int pieces, warp, lane;  // warp: of both consumers

  // Which of 32 pieces' CTAs have not waited, as a mask that all threads agree on.
  // model: join
  __device__ __forceinline__ u32 who_left(Ticket* tickets, int from, int mine) const {
    consumers_sync();
    if (warp == 0) {
      const int i = from + lane;
      u32* const flag = &tickets[segment.first_part + i].left[slot_of(i)];
      const bool left = i < pieces && i != mine && load_acquire(flag) != 0;
      const u32 mask = __ballot_sync(0xffffffffu, left);
      if (left) store_relaxed(flag, 0);
      if (lane == 0) store_shared_u32(words + 4, mask);
    }
    consumers_sync();
    return load_shared_u32(words + 4);
  }

  // By one thread.
  // model: join
  __device__ __forceinline__ Role arrive(u32* arrived, u32* left, bool more) const {
    const bool waits = !more && p.may_wait;  // plant: waiting
    if (!waits) store_relaxed(left, 1);
    const u32 step = segment.first_part == blockIdx.y ? kAll - (pieces - 1) : 1;
    const u32 before = atomic_add_acq_rel(arrived, step);
    auto all_arrived = [&](u32 now) { return ((now ^ before) & kAll) != 0; };
    if (all_arrived(before + step)) {
      fence_sc_gpu();  // a CTA that leaves now either sees that all are there or is seen to have left
      return kLast;
    }
    if (!waits) return kGoOn;
    const long long start = clock64();
    while (!all_arrived(load_acquire(arrived))) {  // plant: arrivals
      if (clock64() - start < kPatience) continue;  // plant: patience
      store_relaxed(left, 1);
      fence_sc_gpu();
      if (!all_arrived(load_acquire(arrived))) return kGoOn;
      store_relaxed(left, 0);  // should the last one have read it, it does this share as well, with the same bits
      return kOwnShare;
    }
    return kOwnShare;
  }

  __device__ __forceinline__ int slot_of(int i) const { return i == 0 ? segment.first_slot : 0; }
};

}  // namespace cumla::split
