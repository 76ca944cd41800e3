// SPDX-License-Identifier: Apache-2.0
// Mailboxes: pieces whose words say themselves that they are there.
//
// Where each request has parts of its own and all CTAs run at once, a piece goes to the mailbox of its part, and who joins
// it looks for its words until they are there: no fence and no counter stands between the two. A word that has not come is
// kAbsent, which no piece contains. There are two mailboxes for each part and row tile. Launches that use them take turns,
// and each CTA empties its mailbox of the launch before, which nobody reads any more, while its KV blocks are on their way.
// All CTAs of a launch are of one mind: the schedule marks all parts, or none.
#pragma once
#include "mla_decode_layout.cuh"
#include "ptx/atomic.cuh"
#include "ptx/copy.cuh"

namespace cumla {

constexpr u32 kAbsent = 0xffffffffu;  // a NaN, but not the one that arithmetic makes
constexpr u32 kNoMailbox = 2;         // pieces are stored, and then counted

// Whether this CTA's piece, if it has one, goes to a mailbox. It then has one request at most.
template <typename AnyTile>
__device__ __forceinline__ bool mails(const MlaDecodeParams& p, const Part& part, int last_place) {
  return !kIsRagged<AnyTile> && p.rounds != nullptr && part.apart && last_place <= part.place;
}
template <typename AnyTile>
__device__ __forceinline__ u32* round_of(const MlaDecodeParams& p, const AnyTile& tile) {
  return p.rounds + static_cast<i64>(tile.index) * p.parts + blockIdx.y;
}

template <typename AnyTile>
__device__ __forceinline__ i64 mail_index(const MlaDecodeParams& p, const AnyTile& tile, int part, u32 mailbox) {
  const int tiles = gridDim.x * gridDim.z;
  return static_cast<i64>(mailbox * tiles + copy_of(tile.index)) * p.parts + part;
}

// Where a piece goes.
struct Piece {
  float4* out;  // as `piece_offset` of piece 0 says
  float* lse;

  template <typename AnyTile>
  __device__ __forceinline__ Piece(const MlaDecodeParams& p, const AnyTile& tile, const Segment& segment, u32 mailbox) {
    const bool mailed = mailbox != kNoMailbox;
    const i64 index = mailed ? mail_index(p, tile, blockIdx.y, mailbox) : piece_index(p, tile, blockIdx.y, segment.slot);
    out = mailed ? p.mail_out : p.partial_out;
    lse = mailed ? p.mail_lse : p.partial_lse;
    out += piece_offset(p, index, 0, 0, 0, 0);
    lse += index * p.row_groups * kRowGroup;
  }
};

// By one thread of those that join, before its first wait: which mailbox it is. Kept in shared memory, because registers
// are scarce meanwhile.
template <typename AnyTile>
__device__ __forceinline__ void choose_mailbox(const MlaDecodeParams& p, const AnyTile& tile, const Part& part,
                                               int last_place, u32 word) {
  store_shared_u32(word, mails<AnyTile>(p, part, last_place) ? *round_of(p, tile) & 1 : kNoMailbox);
}

// By a warp: empties this CTA's mailbox of the other rounds.
template <typename AnyTile>
__device__ __forceinline__ void empty_mailbox(const MlaDecodeParams& p, const AnyTile& tile, u32 round) {
  const i64 piece = mail_index(p, tile, blockIdx.y, ~round & 1);
  const float absent = __uint_as_float(kAbsent);
  const int rows = p.row_groups * kRowGroup;
  float4* const out = p.mail_out + piece_offset(p, piece, 0, 0, 0, 0);
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < rows * kValueDim / 4; i += 32)
    store_relaxed_float4(out + i, absent, absent, absent, absent);
  for (int i = threadIdx.x % 32; i < rows; i += 32) store_relaxed_float(p.mail_lse + piece * rows + i, absent);
}

}  // namespace cumla
