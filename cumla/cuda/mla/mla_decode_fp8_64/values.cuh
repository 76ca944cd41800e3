// SPDX-License-Identifier: Apache-2.0
// The products of V and probabilities, with a scale for each token and 128 columns.
#pragma once
#include "mla/mla_decode_fp8_64/compute.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mla {

// Multiplies by the factors that a raised reference asks for.
template <typename RowsForm>
__device__ __forceinline__ void Heads64Consumer<RowsForm>::change_sums(int parity) {
#pragma unroll
  for (int i = 0; i < kHeadsOfThread; i += 2) {
    const float2 factors = load_shared_float2(shared.factor(parity, head_of(i)));
    sum[i] *= factors.x;
    sum[i + 1] *= factors.y;
  }
}

template <typename RowsForm>
__device__ __forceinline__ void Heads64Consumer<RowsForm>::change_output(int parity) {
#pragma unroll
  for (int i = 0; i < kHeads / 2; i += 4) {
    const float2 factors = load_shared_float2(shared.factor(parity, head_of(i / 2)));
#pragma unroll
    for (int d = 0; d < kValueHalf; ++d) {
      output[d][i] *= factors.x;
      output[d][i + 1] *= factors.y;
      output[d][i + 2] *= factors.x;
      output[d][i + 3] *= factors.y;
    }
  }
}

// output += V x probabilities of block t; then its granules are free.
template <typename RowsForm>
__device__ __forceinline__ void Heads64Consumer<RowsForm>::multiply_values(u32 t) {
  const u32 unusual = unusual_of(t);
  if (unusual & kRaised) change_output(t & 1);
  if (unusual & kWide)
    multiply_wide(t);
  else
    multiply_steps(t);
  free_probabilities(t);
}

// The products of a wide block are a loop: unrolled code here slows calls with few lists.
template <typename RowsForm>
__device__ __forceinline__ void Heads64Consumer<RowsForm>::multiply_wide(u32 t) {
  const u32 offset = values_offset(), first_slot = GranulePlace<Layout>(kGranules * t).slot;
#pragma unroll 1
  for (int k = 0; k < kGranules; ++k) {
    const u32 rows = shared.slot(slot_of(first_slot, k));
#pragma unroll
    for (int d = 0; d < kValueGroups; ++d) {
      u32 words[4], x[kStepRegisters];
      load_matrix_x4_transposed(words, rows + offset + d * 128);
      expand_values(words, x);
      scale_widely(x, rows, consumer * kValueGroups + d);
      keep_before_products(x);
      warpgroup_arrive();
      const u64 b = descriptor_of_rows<128>(shared.probabilities(t & 1), k * 32);
#pragma unroll
      for (int i = 0; i < 2; ++i) multiply_heads<Bf16>(output[2 * d + i], x + 4 * i, b, true);
      warpgroup_commit();
      warpgroup_wait<0>();
#pragma unroll
      for (int i = 0; i < 2; ++i) keep_behind_wait(output[2 * d + i]);
    }
    free_granule(slot_of(first_slot, k));
  }
}

template <typename RowsForm>
__device__ __forceinline__ void Heads64Consumer<RowsForm>::multiply_steps(u32 t) {
  const int parity = t & 1;
  constexpr int kSteps = kGranules * kValueGroups;
  const u32 offset = values_offset();
  const u32 table = shared.table(parity) + (consumer * kValueGroups * 16 + lane % 4) * 8;
  u32 rows[kGranules];
  const u32 first_slot = GranulePlace<Layout>(kGranules * t).slot;
#pragma unroll
  for (int k = 0; k < kGranules; ++k) rows[k] = shared.slot(slot_of(first_slot, k));
  u32 words[2][4], a[2][kStepRegisters];
  auto fetch = [&](u32 (&to)[4], int s) {
    load_matrix_x4_transposed(to, rows[s / kValueGroups] + offset + s % kValueGroups * 128);
  };
  auto scale_of = [&](int s) {
    return load_shared_8(table + (s % kValueGroups * kGranules + s / kValueGroups) * 32);
  };
  fetch(words[0], 0);
  uint2 next_scale = scale_of(0);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int k = s / kValueGroups, d = s % kValueGroups;
    const uint2 scale = next_scale;
    if (s + 1 < kSteps) {
      fetch(words[(s + 1) & 1], s + 1);
      next_scale = scale_of(s + 1);
    }
    if (s >= 2) warpgroup_wait<1>();
    u32(&x)[kStepRegisters] = a[s & 1];
    expand_values(words[s & 1], x);
#pragma unroll
    for (int i = 0; i < kStepRegisters; ++i) x[i] = multiply_pairs<Fp16>(x[i], i & 2 ? scale.y : scale.x);
    keep_before_products(x);
    warpgroup_arrive();
    const u64 b = descriptor_of_rows<128>(shared.probabilities(parity), k * 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) multiply_heads<Fp16>(output[2 * d + i], x + 4 * i, b, true);
    warpgroup_commit();
    if (d + 1 == kValueGroups) free_granule(slot_of(first_slot, k));
  }
  warpgroup_wait<0>();
#pragma unroll
  for (int d = 0; d < kValueHalf; ++d) keep_behind_wait(output[d]);
}

// Converts fragments of V to bfloat16, times scales that float16 cannot hold.
template <typename RowsForm>
__device__ __forceinline__ void
Heads64Consumer<RowsForm>::scale_widely(u32 (&x)[kStepRegisters], u32 rows, int group) const {
  float scale[2][2];
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const u32 row = rows + (token_at(2 * (lane % 4) + j) + 8 * e) * kPackedBytes + kPackedScales;
      const float inverse = inverse_of(bounded_exponent(highest_scale(load_shared_16(row))));
      scale[e][j] = load_shared_float(row + 4 * group) * inverse;
    }
#pragma unroll
  for (int i = 0; i < kStepRegisters; ++i) {
    const float2 v = unpack_pair<Fp16>(x[i]);
    const int e = i >> 1 & 1;
    x[i] = pack_pair<Bf16>(v.x * scale[e][0], v.y * scale[e][1]);
  }
}

}  // namespace cumla::mla
