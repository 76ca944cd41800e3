// SPDX-License-Identifier: Apache-2.0
// Shared memory and row tiles of mla_decode_wide_few.
#pragma once
#include "mla/mla_decode/layout.cuh"
#include "mla/mla_decode/masked.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

constexpr int kFewRows = 16;     // query rows of a place of the schedule
constexpr int kFewChunk = 48;    // keys of a stage
constexpr int kFewWarps = 8;     // that compute
constexpr int kFewKeyWarps = 4;  // warps that share the columns of the same keys
constexpr int kFewLatent = 2048, kFewRope = 128;  // bytes of a row
constexpr int kFewUnits = 64;    // of 16 columns of out: what a warp stores at a time
constexpr int kFewUnitBytes = 512;  // of sums of eight rows

// Row tile of up to 16 query rows.
using FewTile = WithSinks<WidthTile<WindowTile, 16, true>>;

struct WideFewLayout {
  static constexpr int kPitch = kFewLatent + kFewRope + 16;  // of a row: eight rows of ldmatrix in eight bank groups
  static constexpr int kStageBytes = kFewChunk * kPitch;
  static constexpr int kScorePitch = (kFewChunk + 8) * 4, kScoreBytes = kFewKeyWarps * kFewRows * kScorePitch;
  static constexpr int kProbabilityPitch = (kFewChunk + 8) * 2;

  u32 base;

  __device__ __forceinline__ u32 stage(int s) const { return base + s * kStageBytes; }
  // Query rows, in the place of the last rows of stage 1.
  __device__ __forceinline__ u32 query(int row) const { return stage(2) + (row - kFewRows) * kPitch; }
  // Scores of a row over a quarter of the columns.
  __device__ __forceinline__ u32 score(int quarter, int row, int key) const {
    return stage(2) + (quarter * kFewRows + row) * kScorePitch + key * 4;
  }
  __device__ __forceinline__ u32 probability(int row, int key) const {
    return stage(2) + kScoreBytes + row * kProbabilityPitch + key * 2;
  }
  __device__ __forceinline__ u32 factor(int row) const { return probability(kFewRows, 0) + row * 4; }
  // Barriers
  __device__ __forceinline__ u32 full(int s) const { return factor(kFewRows) + s * 8; }
  __device__ __forceinline__ u32 free(int s) const { return full(2) + s * 8; }
  __device__ __forceinline__ u32 query_full() const { return free(2); }
  __device__ __forceinline__ u32 query_free() const { return query_full() + 8; }
  __device__ __forceinline__ u32 sent() const { return query_free() + 8; }
  // After the last chunk: what CTAs of the cluster send, in the place of stages and scores.
  __device__ __forceinline__ u32 part(int i) const { return base + i * kFewUnitBytes; }
  __device__ __forceinline__ u32 statistics(int rank, int row) const {
    return stage(2) + (rank * kFewRows + row) * 16;
  }
  __device__ __forceinline__ u32 weight(int rank, int row) const {
    return stage(2) + 16 * kFewRows * 16 + (rank * kFewRows + row) * 4;
  }
};

// The keys of a tile that this CTA has, and where it is.
struct FewShare {
  int begin, end, tokens, request;  // tokens: those before the end of the last row's window

  __device__ __forceinline__ FewShare(const MlaDecodeParams& p, FewTile& tile, int rank, int cluster_log2) {
    const int place = min(static_cast<int>(blockIdx.y), p.batch - 1);
    const Part whole = {place, 0, 0, 0, place + 1, 0, 0, 0, 0, 0, {}};
    const Segment segment = segment_of_rows(p, tile, whole, place, p.row_groups * (kFewRows / 2));
    const int first = min(tile.first_seen, segment.tokens);
    const i64 keys = segment.tokens - first;
    begin = first + static_cast<int>(keys * rank >> cluster_log2);
    end = first + static_cast<int>(keys * (rank + 1) >> cluster_log2);
    tokens = segment.tokens;
    request = segment.request;
  }
};

}  // namespace cumla::mla
