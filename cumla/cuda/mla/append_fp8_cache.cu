// SPDX-License-Identifier: Apache-2.0
// Appends rows to a paged cache with e4m3 latent columns. Their scale is that of the tensor, or a float32 scale per
// token and 128 columns, which is computed here. RoPE columns are e4m3 with the scale of the tensor, or have 16 bits.
// kIsV4: DeepSeek-V4's slots have 448 latent columns, and per 64 columns one byte: the exponent of a power of two.
//
// Grid, roles, time line and barriers are those of mla/append_cache.cu. Half a warp has the latent columns of one
// scale, in V4 a quarter.
//
// Budget: 18 KiB of loads in flight per CTA, with float32 rows 36 KiB; 3 CTAs per SM, so at most 72 registers per
// thread. Shared memory: 4.4 KB.
#include "mla/append_rows.cuh"
#include "rows/quantize.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace rows;

template <bool kIsV4>
constexpr int kFp8Octets = (kIsV4 ? 448 : 512) / kOctet;
template <bool kIsV4>
constexpr int kScaleOctets = (kIsV4 ? 64 : 128) / kOctet;  // octets that share a scale

struct AppendFp8CacheParams {
  AppendCacheParams to;
  Pages scales;         // four float32 per row, or V4's 8 bytes; null: the tensor's scale
  const float* scale;   // of the tensor; null: scale_value
  float scale_value;
  int rope_is_e4m3, power_of_two, unused;
};

// Byte offsets of a row in the caches; latent < 0: the row is skipped.
struct Fp8Target {
  i64 latent, rope, scales;

  __device__ __forceinline__ bool exists() const { return latent >= 0; }
};

__device__ __forceinline__ Fp8Target find_fp8_target(const AppendFp8CacheParams& p, i64 token, const Given& given,
                                                     int head) {
  const Slot slot = slot_of(p.to, token, given);
  if (slot.page < 0) return {-1, -1, -1};
  return {p.to.latent_cache.offset(slot.page, slot.row, head), p.to.rope_cache.offset(slot.page, slot.row, head),
          p.scales.offset(slot.page, slot.row, head)};
}

__device__ __forceinline__ float inverse_of_tensor(const AppendFp8CacheParams& p) {
  return 1.0f / (p.scale != nullptr ? *p.scale : p.scale_value);
}

// A row of V4 has seven scales; the eighth byte is zero.
template <bool kIsV4>
__device__ __forceinline__ void store_scale(char* scales, int i, float scale) {
  if constexpr (kIsV4)
    scales[i] = i < kFp8Octets<true> / kScaleOctets<true> ? __float_as_uint(scale) >> 23 : 0;
  else
    reinterpret_cast<float*>(scales)[i] = scale;
}

// Whole warps must call it, because of the shuffles.
template <bool kIsV4, typename Element>
__device__ __forceinline__ void store_latent(const AppendFp8CacheParams& p, const Fp8Target* targets,
                                             const Octet<Element> (&octets)[kAtOnce], int octet) {
  const bool is_scaled_here = kIsV4 || p.scales.data != nullptr;
  float inverse = is_scaled_here ? 1.0f : inverse_of_tensor(p);
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const Fp8Target& target = targets[kAbreast * k];
    if (is_scaled_here) {
      const float scale = scale_of(largest_of_lanes(largest_of(octets[k]), kScaleOctets<kIsV4>), p.power_of_two);
      inverse = 1.0f / scale;
      if (target.exists() && octet % kScaleOctets<kIsV4> == 0)
        store_scale<kIsV4>(p.scales.data + target.scales, octet / kScaleOctets<kIsV4>, scale);
    }
    if (target.exists() && octet < kFp8Octets<kIsV4>)
      store_quantized(p.to.latent_cache.data + target.latent, octet, octets[k], inverse);
  }
}

template <typename T, typename Elements>
__device__ __forceinline__ void store_rope(const AppendFp8CacheParams& p, const Fp8Target& target, int octet,
                                           const Elements& elements, float inverse) {
  if (!target.exists()) return;
  char* const row = p.to.rope_cache.data + target.rope;
  if (p.rope_is_e4m3)
    store_quantized(row, octet, elements, inverse);
  else
    store(row, octet, elements.template packed<T>());
}

template <typename T, typename Element, bool kIsV4>
__device__ __forceinline__ void append_fp8_rows(const AppendFp8CacheParams& p) {
  __shared__ Fp8Target targets[kTileRows];
  __shared__ alignas(16) char table_rows[kTileRows * kTableRowBytes];
  const i64 tile = static_cast<i64>(blockIdx.x) * kTileRows;
  const int lane = threadIdx.x % 32;
  const bool looks_up = threadIdx.x >= kLatentThreads;
  Held<Element> held = {};
  if (looks_up) {
    if (p.to.cos_sin == nullptr) load_copied(p.to, p.to.rope_rows, tile, held.copied);
    const Given given = load_given(p.to, tile);
    if (lane < kTileRows) targets[lane] = find_fp8_target(p, tile + lane, given, blockIdx.y);
  } else {
    load_rows<kFp8Octets<kIsV4>>(p.to, tile, held, table_rows);
  }
  __syncthreads();

  const auto [first, octet] = copied_share();
  if (!looks_up) store_latent<kIsV4>(p, targets + first, held.copied, octet);
  const bool rotates = p.to.cos_sin != nullptr;
  if (rotates ? threadIdx.x >= kRopeThreads : !looks_up) return;
  const float inverse = p.rope_is_e4m3 ? inverse_of_tensor(p) : 1.0f;
  if (rotates) {
    const auto [row, rope_octet] = rotated_share();
    store_rope<T>(p, targets[row], rope_octet, rotate_rope<T>(p.to, held.rotated, table_rows), inverse);
    return;
  }
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) store_rope<T>(p, targets[first + kAbreast * k], octet, held.copied[k], inverse);
}

template <typename T, typename Element, bool kIsV4 = false>
__device__ __forceinline__ void append_fp8_cache(const AppendFp8CacheParams& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  if (blockIdx.x < p.to.row_tiles)
    append_fp8_rows<T, Element, kIsV4>(p);
  else if (p.to.interleaved)
    rotate_queries<T, true>(p.to);
  else
    rotate_queries<T, false>(p.to);
}

}  // namespace cumla::mla
