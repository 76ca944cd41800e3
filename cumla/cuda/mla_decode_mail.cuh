// SPDX-License-Identifier: Apache-2.0
// Mailboxes: pieces whose words say themselves that they are there.
//
// Where each request has parts of its own and all CTAs run at once, a piece goes to the mailbox of its part, and who joins
// it looks for its words until they have come: no fence and no counter stands between the two.
//
// A row's log-sum-exp comes with a stamp of 32 bits: the round, which is the number of this launch among those that use
// mailboxes, and the lowest bit of all words of the output. That bit changes with every piece that is put into a mailbox, so
// the words of the piece before, which lie there, are told from those that are to come. The numbers lose a bit, and the sum
// takes them without it: its bits do not depend on the round. Each CTA keeps its own count of rounds and its own bit; all CTAs
// of a launch are of one mind about using mailboxes, because the schedule marks all parts, or none.
#pragma once
#include "mla_decode_layout.cuh"
#include "ptx/atomic.cuh"
#include "ptx/copy.cuh"

namespace cumla {

constexpr u32 kNotMailed = 0;  // the stamp of pieces that are stored and then counted

// Whether this CTA's piece, if it has one, goes to a mailbox. It then has one request at most.
template <typename AnyTile>
__device__ __forceinline__ bool mails(const MlaDecodeParams& p, const Part& part, int last_place) {
  return !kIsRagged<AnyTile> && p.stamps != nullptr && part.apart && last_place <= part.place;
}

// A CTA's last stamp, of a piece or of a launch without one.
template <typename AnyTile>
__device__ __forceinline__ u32* stamp_of(const MlaDecodeParams& p, const AnyTile& tile) {
  return p.stamps + static_cast<i64>(tile.index) * p.parts + blockIdx.y;
}

// The next one: round above, the bit of the words below. That of round 0 is left out.
__device__ __forceinline__ u32 next_stamp(u32 last, bool has_piece) {
  const u32 round = (last & ~1u) == ~1u ? 2 : (last & ~1u) + 2;
  return round | ((last & 1) ^ has_piece);
}
__device__ __forceinline__ bool same_round(u32 stamp, u32 other) { return (stamp ^ other) <= 1; }

// A float of a piece with the lowest bit of a stamp, and without it.
__device__ __forceinline__ float stamped(float value, u32 stamp) {
  return __uint_as_float((__float_as_uint(value) & ~1u) | (stamp & 1));
}
__device__ __forceinline__ float unstamped(float value) { return __uint_as_float(__float_as_uint(value) & ~1u); }

__device__ __forceinline__ float4 unstamped(const float4& v) {
  return {unstamped(v.x), unstamped(v.y), unstamped(v.z), unstamped(v.w)};
}

template <typename AnyTile>
__device__ __forceinline__ i64 mail_index(const MlaDecodeParams& p, const AnyTile& tile, int part) {
  return static_cast<i64>(copy_of(tile.index)) * p.parts + part;
}

// Where a piece goes.
struct Piece {
  float4* out;  // as `piece_offset` of piece 0 says
  u64* lse;
  u32 stamp;

  template <typename AnyTile>
  __device__ __forceinline__ Piece(const MlaDecodeParams& p, const AnyTile& tile, const Segment& segment, u32 stamp)
      : stamp(stamp) {
    const bool mailed = stamp != kNotMailed;
    const i64 index = mailed ? mail_index(p, tile, blockIdx.y) : piece_index(p, tile, blockIdx.y, segment.slot);
    const i64 row = index * p.row_groups * kRowGroup;
    out = (mailed ? p.mail_out : p.partial_out) + row * (kValueDim / 4);
    lse = (mailed ? p.mail_lse : p.partial_lse) + row;
  }

  __device__ __forceinline__ void store(i64 offset, float a, float b, float c, float d) const {
    store_relaxed_float4(out + offset, stamped(a, stamp), stamped(b, stamp), stamped(c, stamp), stamped(d, stamp));
  }
  __device__ __forceinline__ void store_lse(int row, float value) const {
    store_relaxed_u64(lse + row, static_cast<u64>(stamp) << 32 | __float_as_uint(value));
  }
};

// By one thread of those that join, before its first wait: the stamp of the piece to come. Kept in shared memory, because
// registers are scarce meanwhile.
template <typename AnyTile>
__device__ __forceinline__ void choose_stamp(const MlaDecodeParams& p, const AnyTile& tile, const Part& part,
                                             int last_place, u32 word) {
  store_shared_u32(word, mails<AnyTile>(p, part, last_place) ? next_stamp(*stamp_of(p, tile), true) : kNotMailed);
}

}  // namespace cumla
