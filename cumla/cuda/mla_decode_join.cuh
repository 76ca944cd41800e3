// SPDX-License-Identifier: Apache-2.0
// Joining the pieces of a split request, by the CTAs that made them, at the end of mla_decode.
//
// Each CTA counts itself in at the request's ticket when its piece is stored. One whose work is done then waits until
// all are there, and joins its share of the columns; one that has more requests to do goes on at once, and so does one
// that has waited for too long (its peers may not even run yet). Whoever comes last joins the shares of those, too: no
// CTA ever depends on another one's progress. Who joins a share never changes its bits: the pieces are added up in the
// order of the parts, grouped by the shape of the share alone.
//
// Pieces in mailboxes (mla_decode_mail.cuh) are not waited for like that: each warp looks for the words that it joins, and a
// loading warp counts the CTA in meanwhile. The counter only matters for CTAs that have lost patience.
//
// A share is a number of items: a unit of 32 columns of one row group. With few items several warps divide the pieces of
// one.
#pragma once
#include "mla_decode_layout.cuh"
#include "mla_decode_mail.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier_vote.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"

namespace cumla {

constexpr int kGroups = 4;  // of eight columns in a unit
constexpr int kUnits = kValueDim / (8 * kGroups);
constexpr int kAtOnce = 4;  // pieces that a warp loads together
constexpr int kJoinWarps = 2 * kWarpgroup / 32;
constexpr u32 kPatience = 40000;  // clocks, about 20 us: requests are dealt out evenly

// A row's log-sum-exp, base 2, as the caller gets it.
__device__ __forceinline__ void store_lse(const MlaDecodeParams& p, int request, const Row& to, float lse) {
  p.lse[request * p.lse_stride_batch + to.head * p.lse_stride_head + to.token * p.lse_stride_token] =
      lse == -kInfinity ? kInfinity : lse * kLn2;
}

// A quad of lanes stores 16 columns of a row, each lane a, b at 2 quad_lane and c, d eight columns later. In 16 bits lanes
// trade with their neighbour, kNeighbour apart: eight bytes a lane, full 32-byte sectors.
template <typename T, int kNeighbour, typename AnyTile>
__device__ __forceinline__ void store_columns(const MlaDecodeParams& p, const AnyTile& tile, int request, int row,
                                              int quad_lane, int column, float a, float b, float c, float d) {
  const bool exists = row < tile.rows, odd = quad_lane % 2;
  const Row to(p, tile, row);
  char* const out = p.out + request * p.out_stride_batch + to.token * p.out_stride_token + to.head * p.out_stride_head;
  if (p.out_is_float) {
    float* const destination = reinterpret_cast<float*>(out) + column + quad_lane * 2;
    if (exists) {
      store_global_float2(destination, a, b);
      store_global_float2(destination + 8, c, d);
    }
  } else {
    const u32 first = pack_pair<T>(a, b), second = pack_pair<T>(c, d);
    const u32 received = __shfl_xor_sync(0xffffffffu, odd ? first : second, kNeighbour);
    char* const destination = out + (column + (odd ? 8 + (quad_lane - 1) * 2 : quad_lane * 2)) * 2;
    if (exists) store_global_8(destination, odd ? received : first, odd ? second : received);
  }
}

// What a piece counts for, by its base-2 log-sum-exp: nothing if it is empty.
__device__ __forceinline__ float weight_of(float lse, float maximum) {
  return lse == -kInfinity ? 0.0f : exp2_approx(lse - maximum);
}

constexpr int kMailedBarrier = 4;  // named barriers of both consumers and the warp that counts: the piece is mailed,
constexpr int kCountedBarrier = 5;  // and counted in

// Shared memory that nobody else uses between the segments of a CTA.
struct JoinSpace {
  u32 words;    // two, that all threads must agree on; of mailed pieces a third one, the counter as it was
  u32 sums;     // 8,192 bytes
  u32 weights;  // 1,024 bytes
};

template <typename T, typename AnyTile>
struct Joiner {
  const MlaDecodeParams& p;
  const JoinSpace space;
  const AnyTile& tile;
  const Segment& segment;
  const u32 stamp;
  const bool mailed;
  const int pieces, warp, lane;  // warp: of both consumers

  __device__ __forceinline__ Joiner(const MlaDecodeParams& p, const JoinSpace& space, const AnyTile& tile,
                                    const Segment& segment, u32 stamp = kNotMailed)
      : p(p),
        space(space),
        tile(tile),
        segment(segment),
        stamp(stamp),
        mailed(stamp != kNotMailed),
        pieces(segment.last_part - segment.first_part + 1),
        warp(copy_of(threadIdx.x) / 32 - kWarpgroup / 32),  // what follows from it would else be kept between segments
        lane(threadIdx.x % 32) {}

  // Called by all threads of both consumers, their piece stored. `more`: the CTA has another request to do.
  __device__ __forceinline__ void join(bool more) const {
    u32 role = kOwnShare;
    if (mailed) {
      named_barrier_arrive<kMailedBarrier, kCounting>();
    } else {
      consumers_sync();
      if (threadIdx.x == kWarpgroup) store_shared_u32(space.words, arrive(more));
      consumers_sync();
      role = load_shared_u32(space.words);
    }
    const u32 begun = static_cast<u32>(clock());
    bool waits = mailed;  // pieces may not be there yet
    int share = role == kGoOn ? -1 : mine();
    u32 left = 0;
    for (int looked = 0; share >= 0;) {
      const bool whole = join_share(share, waits, begun);
      if (waits) {
        waits = false;
        role = role_of_mailed(whole);
        if (!whole && role != kGoOn) continue;
      }
      for (; role == kLast && left == 0 && looked < pieces; looked += 32) left = who_left(looked);
      share = left == 0 ? -1 : (looked - 32) + __ffs(left) - 1;
      left &= left - 1;
    }
    if (role == kLast && threadIdx.x == kWarpgroup) store_relaxed(left_here(), 0);
    if (!mailed) consumers_sync();  // the role's place is written again
  }

  // By a warp that loads.
  __device__ __forceinline__ void count_mailed() const {
    named_barrier_sync<kMailedBarrier, kCounting>();
    u32 before = 0;
    if (lane == 0) before = count_in();
    before = __shfl_sync(0xffffffffu, before, 0);
    bool look = false;
    if (all_arrived(before + step(), before)) {
      fence_sc_gpu();
      for (int i = lane; i < pieces; i += 32) look |= i != mine() && load_acquire(left_by(i)) != 0;
      look = __any_sync(0xffffffffu, look);
    }
    if (lane == 0) {
      store_shared_u32(space.words, look ? kLast : kGoOn);
      store_shared_u32(space.words + 8, before);
    }
    named_barrier_arrive<kCountedBarrier, kCounting>();
  }

 private:
  enum Role : u32 { kGoOn, kOwnShare, kLast };
  static constexpr u32 kAll = 1u << 31;
  static constexpr int kCounting = 2 * kWarpgroup + 32;  // threads

  __device__ __forceinline__ Ticket* tickets() const { return p.tickets + static_cast<i64>(copy_of(tile.index)) * p.parts; }
  __device__ __forceinline__ int mine() const { return blockIdx.y - segment.first_part; }
  __device__ __forceinline__ u32* arrived() const { return &tickets()[segment.first_part].arrived; }
  __device__ __forceinline__ u32* left_here() const { return &tickets()[blockIdx.y].left[segment.slot]; }
  __device__ __forceinline__ u32* left_by(int i) const {
    return &tickets()[segment.first_part + i].left[i == 0 ? segment.first_slot : 0];
  }

  // What is left to do for a CTA whose pieces are mailed, by whether its own share is done. All that arrived has been stored.
  __device__ __forceinline__ u32 role_of_mailed(bool done) const {
    named_barrier_sync<kCountedBarrier, kCounting>();
    const u32 role = load_shared_u32(space.words);
    if (done || role == kLast) return role;
    if (threadIdx.x == kWarpgroup) store_shared_u32(space.words + 4, leave(load_shared_u32(space.words + 8)));
    consumers_sync();
    return load_shared_u32(space.words + 4);
  }

  // Which of 32 pieces' CTAs have not waited, as a mask that all threads agree on.
  __device__ __forceinline__ u32 who_left(int from) const {
    consumers_sync();
    if (warp == 0) {
      const int i = from + lane;
      u32* const flag = left_by(i);
      const bool left = i < pieces && i != mine() && load_acquire(flag) != 0;
      const u32 mask = __ballot_sync(0xffffffffu, left);
      if (left) store_relaxed(flag, 0);
      if (lane == 0) store_shared_u32(space.words + 4, mask);
    }
    consumers_sync();
    return load_shared_u32(space.words + 4);
  }

  __device__ __forceinline__ u32 step() const { return segment.first_part == blockIdx.y ? kAll - (pieces - 1) : 1; }
  __device__ __forceinline__ u32 count_in() const { return atomic_add_acq_rel(arrived(), step()); }
  __device__ __forceinline__ static bool all_arrived(u32 now, u32 before) { return ((now ^ before) & kAll) != 0; }

  // By one thread.
  __device__ __forceinline__ Role arrive(bool more) const {
    const bool waits = !more && p.may_wait;
    if (!waits) store_relaxed(left_here(), 1);
    const u32 before = count_in();
    if (all_arrived(before + step(), before)) {
      fence_sc_gpu();  // a CTA that leaves now either sees that all are there or is seen to have left
      return kLast;
    }
    if (!waits) return kGoOn;
    const u32 begun = static_cast<u32>(clock());
    while (!all_arrived(load_acquire(arrived()), before)) {
      if (static_cast<u32>(clock()) - begun < kPatience) continue;
      return leave(before);
    }
    return kOwnShare;
  }

  // By one thread that has lost patience.
  __device__ __forceinline__ Role leave(u32 before) const {
    store_relaxed(left_here(), 1);
    fence_sc_gpu();
    if (!all_arrived(load_acquire(arrived()), before)) return kGoOn;
    store_relaxed(left_here(), 0);  // should the last one have read it, it does this share as well, with the same bits
    return kOwnShare;
  }

  // What one warp adds up: the accumulators of a unit of one row group and, for both rows of a lane, the sum of the weights
  // and the base-2 maximum to which all is relative.
  struct Sum {
    float4 v[kGroups];
    float weight[2], maximum[2];

    __device__ __forceinline__ void raise(float next0, float next1) {
      const float factor[2] = {weight_of(maximum[0], next0), weight_of(maximum[1], next1)};
#pragma unroll
      for (int j = 0; j < kGroups; ++j)
        v[j] = {v[j].x * factor[0], v[j].y * factor[0], v[j].z * factor[1], v[j].w * factor[1]};
      weight[0] *= factor[0];
      weight[1] *= factor[1];
      maximum[0] = next0;
      maximum[1] = next1;
    }
    __device__ __forceinline__ void add(int j, const float4& other, float weight0, float weight1) {
      v[j].x += weight0 * other.x;
      v[j].y += weight0 * other.y;
      v[j].z += weight1 * other.z;
      v[j].w += weight1 * other.w;
    }
  };

  // The items of one CTA's share: units of one row group. All warps come here together. What runs once runs from a cold
  // instruction cache: the code is kept short rather than unrolled. False where it waits for pieces, and
  // they have not come in good time.
  __device__ __forceinline__ bool join_share(int share, bool waits, u32 begun) const {
    const int all = kUnits * p.row_groups;
    const int begin = all * share / pieces, items = all * (share + 1) / pieces - begin;
    const int most = min(kJoinWarps, pieces);  // one item means eight pieces or more: the helpers of an item divide the warps
    const int helpers = items > 4 ? 1 : items > 2 ? min(most, 2) : items == 2 ? min(most, 4) : most;
#pragma unroll 1
    for (int first = 0; first < items; first += kJoinWarps) {
      const int item = begin + min(first + warp / helpers, items - 1);
      const bool active = first + warp < items * helpers;
      const int unit = item / p.row_groups;
      if (!join_item(unit, item - unit * p.row_groups, warp % helpers, helpers, active, waits, begun)) return false;
    }
    return true;
  }

  __device__ __forceinline__ bool join_item(int unit, int group, int helper, int helpers, bool active,
                                            bool waits, u32 begun) const {
    Sum sum;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) sum.v[j] = {0.0f, 0.0f, 0.0f, 0.0f};
    sum.weight[0] = sum.weight[1] = 0.0f;
    sum.maximum[0] = sum.maximum[1] = -kInfinity;
    const int count = (pieces + helpers - 1) / helpers;
    const int end = active ? min((helper + 1) * count, pieces) : 0;
    // Pieces lie two slots apart, the first perhaps in its second slot; mailed ones side by side.
    const i64 base = mailed ? mail_index(p, tile, segment.first_part)
                            : piece_index(p, tile, segment.first_part, 0);
    const int rows = p.row_groups * kRowGroup;
    const u64* const lse_of = (mailed ? p.mail_lse : p.partial_lse) + base * rows + group * kRowGroup;
    const float4* const out_of =
        (mailed ? p.mail_out : p.partial_out) +
        piece_offset(p, base, unit / (kUnits / 2), group, unit % (kUnits / 2) * kGroups, lane);
    bool late = false;
#pragma unroll 1
    for (int first = helper * count; first < end; first += kAtOnce) {
      float4 v[kAtOnce][kGroups];
      u64 lse[kAtOnce][2];
      for (bool again = true; again;) {
        const int from = copy_of(first);  // or else all addresses would be kept for another time
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int i = min(from + k, end - 1);
          const int row = (i == 0 ? segment.first_slot : mailed ? i : 2 * i) * rows;
          lse[k][0] = load_relaxed_u64(lse_of + row + lane / 4);
          lse[k][1] = load_relaxed_u64(lse_of + row + lane / 4 + 8);
#pragma unroll
          for (int j = 0; j < kGroups; ++j)
            v[k][j] = load_relaxed_float4(out_of + static_cast<i64>(row) * (kValueDim / 4) + 32 * j);
        }
        again = waits && !all_there(lse, v);
        if (again && !wait_for_pieces(lse_of, rows, from, end, begun)) {
          late = true;
          again = false;
        }
      }
      float next[2] = {sum.maximum[0], sum.maximum[1]}, relative[kAtOnce][2];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          relative[k][r] = first + k < end ? __uint_as_float(static_cast<u32>(lse[k][r])) : -kInfinity;
          next[r] = fmaxf(next[r], relative[k][r]);
        }
      sum.raise(next[0], next[1]);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const float weight[2] = {weight_of(relative[k][0], next[0]), weight_of(relative[k][1], next[1])};
#pragma unroll
        for (int j = 0; j < kGroups; ++j) sum.add(j, unstamped(v[k][j]), weight[0], weight[1]);
        sum.weight[0] += weight[0];
        sum.weight[1] += weight[1];
      }
    }
    if (waits && named_barrier_any<kConsumerBarrier, 2 * kWarpgroup>(late)) return false;
    if (helpers > 1) gather(sum, helper, helpers);
    if (active && helper == 0) store(unit, group, sum);
    return true;
  }

  static __device__ __forceinline__ u32 stamp_in(u64 lse) { return static_cast<u32>(lse >> 32); }

  // Whether all of these words have come, in every lane.
  __device__ __forceinline__ bool all_there(const u64 (&lse)[kAtOnce][2], const float4 (&v)[kAtOnce][kGroups]) const {
    bool there = true;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const u32 own = stamp_in(lse[k][0]);
      there &= same_round(own, stamp) && stamp_in(lse[k][1]) == own;
      u32 differ = 0;
#pragma unroll
      for (int j = 0; j < kGroups; ++j)
        differ |= (__float_as_uint(v[k][j].x) ^ own) | (__float_as_uint(v[k][j].y) ^ own) |
                  (__float_as_uint(v[k][j].z) ^ own) | (__float_as_uint(v[k][j].w) ^ own);
      there &= (differ & 1) == 0;
    }
    return __all_sync(0xffffffffu, there);
  }

  // Looks at the log-sum-exps of a few mailed pieces, which come last, until they are there; false if patience ends first.
  __device__ __forceinline__ bool wait_for_pieces(const u64* lse_of, int rows, int first, int end, u32 begun) const {
    static_assert(kAtOnce * kRowGroup == 2 * 32, "two rows a lane");
    const u64* const mine = lse_of + min(first + lane / 8, end - 1) * rows + lane % 8;
    bool there, patient;
    do {
      there = same_round(stamp_in(load_relaxed_u64(mine)), stamp) && same_round(stamp_in(load_relaxed_u64(mine + 8)), stamp);
      patient = static_cast<u32>(clock()) - begun < kPatience;
    } while (!__all_sync(0xffffffffu, there) && __all_sync(0xffffffffu, patient));
    return __all_sync(0xffffffffu, there);
  }

  // Where a warp leaves what it has for the first helper of its item.
  __device__ __forceinline__ u32 place_of_sum(int of_warp, int j) const {
    return space.sums + ((of_warp * 2 + j) * 32 + lane) * 16;
  }
  __device__ __forceinline__ u32 place_of_weights(int of_warp) const {
    return space.weights + (of_warp * 8 + lane / 4) * 16;
  }

  // Adds up what the helpers of an item have, in their order, in the first of them; half at a time, as there is room.
  __device__ __forceinline__ void gather(Sum& sum, int helper, int helpers) const {
    if (lane % 4 == 0)
      store_shared_float4(place_of_weights(warp), {sum.weight[0], sum.weight[1], sum.maximum[0], sum.maximum[1]});
#pragma unroll
    for (int half = 0; half < kGroups; half += 2) {
      store_shared_float4(place_of_sum(warp, 0), sum.v[half]);
      store_shared_float4(place_of_sum(warp, 1), sum.v[half + 1]);
      consumers_sync();
      if (helper == 0) {
        if (half == 0) {
          float4 highest = load_shared_float4(place_of_weights(warp));
#pragma unroll 1
          for (int i = warp + 1; i < warp + helpers; ++i) {
            const float4 other = load_shared_float4(place_of_weights(i));
            highest.z = fmaxf(highest.z, other.z);
            highest.w = fmaxf(highest.w, other.w);
          }
          sum.raise(highest.z, highest.w);
        }
#pragma unroll 1
        for (int i = warp + 1; i < warp + helpers; ++i) {
          const float4 other = load_shared_float4(place_of_weights(i));  // sums of weights, maxima
          const float factor[2] = {weight_of(other.z, sum.maximum[0]), weight_of(other.w, sum.maximum[1])};
          sum.add(half, load_shared_float4(place_of_sum(i, 0)), factor[0], factor[1]);
          sum.add(half + 1, load_shared_float4(place_of_sum(i, 1)), factor[0], factor[1]);
          if (half == 0) {
            sum.weight[0] += factor[0] * other.x;
            sum.weight[1] += factor[1] * other.y;
          }
        }
      }
      consumers_sync();  // the next half is written there
    }
  }

  __device__ __forceinline__ void store(int unit, int group, const Sum& sum) const {
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      const int row = group * kRowGroup + lane / 4 + 8 * r;
      const float weight = r == 0 ? sum.weight[0] : sum.weight[1], highest = r == 0 ? sum.maximum[0] : sum.maximum[1];
      const float scale = weight == 0.0f ? 0.0f : 1.0f / weight;
#pragma unroll
      for (int j = 0; j < kGroups; j += 2) {
        const int column = unit * 8 * kGroups + 8 * j;
        const float4 &v = sum.v[j], &w = sum.v[j + 1];
        store_columns<T, 1>(p, tile, segment.request, row, lane % 4, column, (r == 0 ? v.x : v.z) * scale,
                            (r == 0 ? v.y : v.w) * scale, (r == 0 ? w.x : w.z) * scale, (r == 0 ? w.y : w.w) * scale);
      }
      if (row < tile.rows && unit == 0 && lane % 4 == 0)
        store_lse(p, segment.request, Row(p, tile, row), weight == 0.0f ? -kInfinity : highest + log2_approx(weight));
    }
  }
};

// By a loading warp: what a CTA does about mailed pieces beside its blocks.
template <typename T, typename AnyTile>
__device__ __forceinline__ void tend_mailbox(const MlaDecodeParams& p, const JoinSpace& space, const AnyTile& tile,
                                             const Part& part, int last_place) {
  if (!mails<AnyTile>(p, part, last_place)) return;
  const bool has_piece = last_place == part.place && part.last_part > part.first_part;
  const u32 last = *stamp_of(p, tile);
  if (has_piece) Joiner<T, AnyTile>(p, space, tile, segment_of(p, tile, part, part.place)).count_mailed();
  if (threadIdx.x % 32 == 0) *stamp_of(p, tile) = next_stamp(last, has_piece);
}

}  // namespace cumla
