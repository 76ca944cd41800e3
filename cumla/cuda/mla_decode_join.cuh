// SPDX-License-Identifier: Apache-2.0
// Joining the pieces of a split request, by the CTAs that made them, at the end of mla_decode.
//
// Each CTA counts itself in at the request's ticket when its piece is stored. One whose work is done then waits until
// all are there, and joins its share of the columns; one that has more requests to do goes on at once, and so does one
// that has waited for too long (its peers may not even run yet). Whoever comes last joins the shares of those, too: no
// CTA ever depends on another one's progress. Who joins a share never changes its bits: the pieces are added up in the
// order of the parts, grouped by the shape of the share alone.
//
// A share is a number of units: 16 columns of all rows. With few units several warps divide the pieces of one.
#pragma once
#include "mla_decode_layout.cuh"
#include "ptx/atomic.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"

namespace cumla {

constexpr int kUnits = 32;  // of 16 columns
constexpr int kJoinWarps = 2 * kWarpgroup / 32;
constexpr long long kPatience = 40000;  // clocks, about 20 us: requests are dealt out evenly

// A row's log-sum-exp, base 2, as the caller gets it.
__device__ __forceinline__ void store_lse(const MlaDecodeParams& p, int request, const Row& to, float lse) {
  p.lse[request * p.lse_stride_batch + to.head * p.lse_stride_head + to.token * p.lse_stride_token] =
      lse == -kInfinity ? kInfinity : lse * kLn2;
}

template <typename T>
struct Joiner {
  const MlaDecodeParams& p;
  const SharedLayout& shared;
  const Tile& tile;
  const Segment& segment;
  const int pieces, warp, lane;  // warp: of both consumers

  __device__ __forceinline__ Joiner(const MlaDecodeParams& p, const SharedLayout& shared, const Tile& tile,
                                    const Segment& segment)
      : p(p),
        shared(shared),
        tile(tile),
        segment(segment),
        pieces(segment.last_part - segment.first_part + 1),
        warp(threadIdx.x / 32 - kWarpgroup / 32),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ static void sync() { named_barrier_sync<kConsumerBarrier, 2 * kWarpgroup>(); }

  // Called by all threads of both consumers, their piece stored. `more`: the CTA has another request to do.
  __device__ __forceinline__ void join(bool more) const {
    enum Role : u32 { kGoOn, kOwnShare, kLast };
    Ticket* const tickets = p.tickets + static_cast<i64>(tile.index) * p.parts;
    Ticket* const meeting = tickets + segment.first_part;
    sync();
    if (threadIdx.x == kWarpgroup) store_shared_u32(shared.pacer(0), arrive(meeting, tickets + blockIdx.y, more));
    sync();
    const u32 role = load_shared_u32(shared.pacer(0));
    const int mine = blockIdx.y - segment.first_part;
    int share = role == kGoOn ? -1 : mine;
    u32 left = 0;
    for (int looked = 0; share >= 0;) {
      join_share(share);
      for (; role == kLast && left == 0 && looked < pieces; looked += 32) left = who_left(tickets, looked, mine);
      share = left == 0 ? -1 : (looked - 32) + __ffs(left) - 1;
      left &= left - 1;
    }
    if (role == kLast && threadIdx.x == kWarpgroup) store_relaxed(&tickets[blockIdx.y].left, 0);
    sync();  // the role's place is written again
  }

 private:
  // Which of 32 pieces' CTAs have not waited, as a mask that all threads agree on.
  __device__ __forceinline__ u32 who_left(Ticket* tickets, int from, int mine) const {
    sync();
    if (warp == 0) {
      const int i = from + lane;
      const bool left = i < pieces && i != mine && load_acquire(&tickets[segment.first_part + i].left) != 0;
      const u32 mask = __ballot_sync(0xffffffffu, left);
      if (left) store_relaxed(&tickets[segment.first_part + i].left, 0);
      if (lane == 0) store_shared_u32(shared.pacer(1), mask);
    }
    sync();
    return load_shared_u32(shared.pacer(1));
  }

  __device__ __forceinline__ u32 arrive(Ticket* meeting, Ticket* own, bool more) const {
    const bool waits = !more && p.may_wait;
    const u32 before = load_relaxed(&meeting->ready);
    if (!waits) store_relaxed(&own->left, 1);
    const u32 others = atomic_add_acq_rel(&meeting->arrived, 1);
    if (others + 1 == pieces) {
      store_relaxed(&meeting->arrived, 0);
      store_release(&meeting->ready, before + 1);
      fence_sc_gpu();  // a CTA that leaves now either sees that all are there or is seen to have left
      return 2;
    }
    if (!waits) return 0;
    const long long start = clock64();
    while (load_acquire(&meeting->ready) == before) {
      if (clock64() - start < kPatience) continue;
      store_relaxed(&own->left, 1);
      fence_sc_gpu();
      return load_acquire(&meeting->ready) == before ? 0 : 1;
    }
    return 1;
  }

  __device__ __forceinline__ i64 piece(int i) const {
    return piece_index(p, tile, segment.first_part + i, i == 0 ? segment.first_slot : 0);
  }

  // The units of one CTA's share. All warps come here together.
  __device__ __forceinline__ void join_share(int share) const {
    const int begin = kUnits * share / pieces, end = kUnits * (share + 1) / pieces;
    const int items = (end - begin) * p.row_groups;  // a unit of one row group
    const int helpers = items == 0 ? 1 : max(min(kJoinWarps / items, pieces), 1);
#pragma unroll 1
    for (int first = 0; first < items; first += kJoinWarps) {
      const int item = min(first + warp / helpers, items - 1);
      const bool active = first + warp < items * helpers;
      join_item(begin + item / p.row_groups, item % p.row_groups, warp % helpers, helpers, active);
    }
  }

  __device__ __forceinline__ void join_item(int unit, int group, int helper, int helpers, bool active) const {
    const int consumer = unit / 16, columns = unit % 16 * 2;
    const int row = group * kRowGroup + lane / 4;
    const i64 lse_row = row;
    auto lse_of = [&](int i, int r) {
      return load_global_l2_float(p.partial_lse + piece(i) * p.row_groups * kRowGroup + lse_row + 8 * r);
    };
    // The lanes of a quad look for the maximum in a quarter of the pieces each.
    float maximum[2] = {-kInfinity, -kInfinity};
#pragma unroll 4
    for (int i = lane % 4; i < pieces; i += 4) {
      maximum[0] = fmaxf(maximum[0], lse_of(i, 0));
      maximum[1] = fmaxf(maximum[1], lse_of(i, 1));
    }
    float reference[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = fmaxf(maximum[r], __shfl_xor_sync(0xffffffffu, maximum[r], 1));
      maximum[r] = fmaxf(maximum[r], __shfl_xor_sync(0xffffffffu, maximum[r], 2));
      reference[r] = maximum[r] == -kInfinity ? 0.0f : maximum[r];
    }
    float4 sum[2] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
    float weight_sum[2] = {0.0f, 0.0f};
    const int count = (pieces + helpers - 1) / helpers;
    const int end = active ? min((helper + 1) * count, pieces) : 0;
#pragma unroll 4
    for (int i = helper * count; i < end; ++i) {
      const float weight[2] = {exp2_approx(lse_of(i, 0) - reference[0]), exp2_approx(lse_of(i, 1) - reference[1])};
      const float4* source = p.partial_out + piece_offset(p, piece(i), consumer, group, columns);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float4 v = load_global_l2_float4(source + 32 * j);
        sum[j].x += weight[0] * v.x;
        sum[j].y += weight[0] * v.y;
        sum[j].z += weight[1] * v.z;
        sum[j].w += weight[1] * v.w;
      }
      weight_sum[0] += weight[0];
      weight_sum[1] += weight[1];
    }
    if (helpers > 1) gather(sum, weight_sum, helper, helpers);
    if (active && helper == 0) store(unit, group, sum, weight_sum, maximum);
  }

  // Adds up what the helpers of an item have, in their order, in the first of them.
  __device__ __forceinline__ void gather(float4 (&sum)[2], float (&weight_sum)[2], int helper, int helpers) const {
    const u32 place = shared.probabilities + lane * 16;
#pragma unroll
    for (int j = 0; j < 2; ++j) store_shared_float4(place + (warp * 2 + j) * 512, sum[j]);
    if (lane % 4 == 0) {
      store_shared_float(shared.sum(0, 0) + (warp * 16 + lane / 4) * 4, weight_sum[0]);
      store_shared_float(shared.sum(0, 0) + (warp * 16 + lane / 4 + 8) * 4, weight_sum[1]);
    }
    sync();
    for (int i = warp + 1; helper == 0 && i < warp + helpers; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float4 v = load_shared_float4(place + (i * 2 + j) * 512);
        sum[j].x += v.x;
        sum[j].y += v.y;
        sum[j].z += v.z;
        sum[j].w += v.w;
      }
      weight_sum[0] += load_shared_float(shared.sum(0, 0) + (i * 16 + lane / 4) * 4);
      weight_sum[1] += load_shared_float(shared.sum(0, 0) + (i * 16 + lane / 4 + 8) * 4);
    }
    sync();  // the next share writes there
  }

  __device__ __forceinline__ void store(int unit, int group, const float4 (&sum)[2], const float (&weight_sum)[2],
                                        const float (&maximum)[2]) const {
    const bool odd = lane % 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = group * kRowGroup + lane / 4 + 8 * r;
      const bool exists = row < tile.rows;
      const Row to(p, tile, row);
      const float scale = weight_sum[r] == 0.0f ? 0.0f : 1.0f / weight_sum[r];
      char* out = p.out + segment.request * p.out_stride_batch + to.token * p.out_stride_token +
                  to.head * p.out_stride_head;
      float values[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        values[2 * j] = (r == 0 ? sum[j].x : sum[j].z) * scale;
        values[2 * j + 1] = (r == 0 ? sum[j].y : sum[j].w) * scale;
      }
      if (p.out_is_float) {
        float* destination = reinterpret_cast<float*>(out) + unit * 16 + lane % 4 * 2;
        if (exists) {
          store_global_float2(destination, values[0], values[1]);
          store_global_float2(destination + 8, values[2], values[3]);
        }
      } else {
        const u32 first = pack_pair<T>(values[0], values[1]), second = pack_pair<T>(values[2], values[3]);
        const u32 received = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
        char* destination = out + (unit * 16 + (odd ? 8 + (lane % 4 - 1) * 2 : (lane % 4) * 2)) * 2;
        if (exists) store_global_8(destination, odd ? received : first, odd ? second : received);
      }
      if (exists && unit == 0 && lane % 4 == 0)
        store_lse(p, segment.request, to, weight_sum[r] == 0.0f ? -kInfinity : maximum[r] + log2_approx(weight_sum[r]));
    }
  }
};

}  // namespace cumla
