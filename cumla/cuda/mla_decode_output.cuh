// SPDX-License-Identifier: Apache-2.0
// The two warpgroups of mla_decode that hold the output, 256 columns each: probabilities x values, and where that goes.
#pragma once
#include "mla_decode_join.cuh"
#include "mla_decode_shared.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"

namespace cumla {

// Thread layout of the output: as that of the scores.
template <typename T>
struct Consumer {
  const MlaDecodeParams& p;
  const SharedLayout& shared;
  const int consumer, warp, lane, row;
  RingPlace place;
  float output[2][64];  // 128 columns each
  float inverse[2];

  __device__ __forceinline__ Consumer(const MlaDecodeParams& p, const SharedLayout& shared, int consumer)
      : p(p),
        shared(shared),
        consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        row(warp * 16 + lane / 4) {}

  // A value of each of both rows, read by the lanes that arrive for these rows later, for the sake of racecheck.
  __device__ __forceinline__ void read_rows(float (&values)[2], u32 address) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      values[r] = 0.0f;
      if (lane % 4 == 0) values[r] = load_shared_float(address + 32 * r);
      values[r] = __shfl_sync(0xffffffffu, values[r], lane & ~3);
    }
  }

  // output += probabilities x values
  __device__ __forceinline__ void multiply_values() {
    const u32 values = shared.half(place.half(consumer));
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        wgmma_m64n128k16_async<T>(output[i], matrix_descriptor(shared.rope(place.rope) + k * 32, 0, 1024),
                                  matrix_descriptor(values + i * 2 * kTileBytes + k * 2048, kTileBytes, 1024));
    warpgroup_commit();
    warpgroup_wait<0>();
  }

  __device__ __forceinline__ void compute(int blocks) {
#pragma unroll
    for (int i = 0; i < 128; ++i) output[i / 64][i % 64] = 0.0f;
    inverse[0] = inverse[1] = 0.0f;
    if (blocks > 0) place.pass_query();
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      mbarrier_wait(shared.scored(place.rope), place.rope_round, "the probabilities of a block");
      float factor[2];
      read_rows(factor, shared.factor(place.rope, row));
      if (__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < 128; ++i) output[i / 64][i % 64] *= factor[i >> 1 & 1];
      }
      multiply_values();
      if (i == blocks - 1) read_rows(inverse, shared.inverse(place.rope, row));
      __syncwarp();
      if (lane % 4 == 0) {
        mbarrier_arrive(shared.half_free(place.half(consumer)));
        mbarrier_arrive(shared.rope_free(place.rope));
      }
      place.pass_block();
    }
  }

  __device__ __forceinline__ void finish(const Tile& tile, const Segment& segment, bool more) const {
    if (segment.blocks == 0 && consumer == 0 && lane % 4 == 0) {
      store_segment_lse(p, tile, segment, row, -kInfinity);
      store_segment_lse(p, tile, segment, row + 8, -kInfinity);
    }
    if (segment.split()) {
      write_piece(tile, segment);
      Joiner<T>(p, {shared.words, shared.join_sums, shared.join_weights}, tile, segment).join(more);
    } else {
      write_result(tile, segment);
    }
  }

  __device__ __forceinline__ float at(int i) const { return output[i / 64][i % 64]; }

  __device__ __forceinline__ void write_piece(const Tile& tile, const Segment& segment) const {
    if (warp >= p.row_groups) return;
    const i64 piece = piece_index(p, tile, blockIdx.y, segment.slot);
    float4* destination = p.partial_out + piece_offset(p, piece, consumer, warp, 0, lane);
#pragma unroll
    for (int j = 0; j < 32; ++j)
      store_global_float4(destination + 32 * j, at(4 * j) * inverse[0], at(4 * j + 1) * inverse[0],
                          at(4 * j + 2) * inverse[1], at(4 * j + 3) * inverse[1]);
  }

  __device__ __forceinline__ void write_result(const Tile& tile, const Segment& segment) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = row + 8 * r < tile.rows;
      const Row to(p, tile, row + 8 * r);
      char* out = p.out + segment.request * p.out_stride_batch + to.token * p.out_stride_token +
                  to.head * p.out_stride_head;
      if (p.out_is_float)
        write_floats(reinterpret_cast<float*>(out), r, exists);
      else
        write_halves(out, r, exists);
    }
  }

  __device__ __forceinline__ void write_floats(float* out, int r, bool exists) const {
    if (!exists) return;
    out += consumer * 256 + (lane % 4) * 2;
#pragma unroll
    for (int j = 0; j < 32; ++j)
      store_global_float2(out + 8 * j, at(4 * j + 2 * r) * inverse[r], at(4 * j + 2 * r + 1) * inverse[r]);
  }

  // Lane pairs trade halves of two neighbouring column groups: eight bytes a lane, full 32-byte sectors.
  __device__ __forceinline__ void write_halves(char* out, int r, bool exists) const {
    const bool odd = lane % 2;
    out += (consumer * 256 + (odd ? 8 + (lane % 4 - 1) * 2 : (lane % 4) * 2)) * 2;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const u32 first = pack_pair<T>(at(4 * j + 2 * r) * inverse[r], at(4 * j + 2 * r + 1) * inverse[r]);
      const u32 second = pack_pair<T>(at(4 * j + 4 + 2 * r) * inverse[r], at(4 * j + 5 + 2 * r) * inverse[r]);
      const u32 received = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
      if (exists) store_global_8(out + 16 * j, odd ? received : first, odd ? second : received);
    }
  }
};

}  // namespace cumla
