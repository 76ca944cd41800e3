// SPDX-License-Identifier: Apache-2.0
// Appends rows to a paged cache with e4m3 latent columns. Their scale is that of the tensor, or a float32 scale per
// token and 128 columns, which is computed here. RoPE columns are e4m3 with the scale of the tensor, or have 16 bits.
// Formats of bytes (Format) have other columns and scales.
//
// Grid, roles, time line and barriers are those of mla/append_cache.cu. Half a warp has the latent columns of one
// scale, in other formats 8, 4 or 2 lanes.
//
// Budget: 18 KiB of loads in flight per CTA, with float32 rows 36 KiB; 3 CTAs per SM, so at most 72 registers per
// thread. Shared memory: 4.4 KB.
#include "mla/append_rows.cuh"
#include "rows/e2m1.cuh"
#include "rows/quantize.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace rows;

// kOneFactor: columns of any width under the tensor's scale. kNumbers: 512 columns; float32 scales, if any. kNoRope:
// the same, without RoPE columns. kV4: 448 columns, and per 64 of them the exponent of a power of two, one byte. kV41:
// the same per 32 columns, of which RoPE columns are the last 64. kV41Fp4: e2m1 columns, e4m3 scales per 16.
enum Format : int { kOneFactor, kNumbers, kNoRope, kV4, kV41, kV41Fp4 };

template <Format kFormat>
constexpr bool kRopeIsScaled = kFormat == kV41 || kFormat == kV41Fp4;  // like the columns before it
template <Format kFormat>
constexpr int kFp8Octets = (kFormat >= kV4 ? 448 : 512) / kOctet;
template <Format kFormat>
constexpr int kScaleOctets = (kFormat == kV41Fp4 ? 16 : kFormat == kV41 ? 32 : kFormat == kV4 ? 64 : 128) /
                             kOctet;  // octets that share a scale

struct AppendFp8CacheParams {
  AppendCacheParams to;
  Pages scales;         // of each row, as the format has them; null: the tensor's scale
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
template <Format kFormat>
__device__ __forceinline__ void store_scale(char* scales, int i, float scale) {
  if constexpr (kFormat == kV4)
    scales[i] = i < kFp8Octets<kV4> / kScaleOctets<kV4> ? __float_as_uint(scale) >> 23 : 0;
  else if constexpr (kFormat == kV41)
    scales[i] = __float_as_uint(scale) >> 23;
  else if constexpr (kFormat == kV41Fp4)
    scales[i] = pack_e4m3x4(scale, 0.0f, 0.0f, 0.0f);
  else
    reinterpret_cast<float*>(scales)[i] = scale;
}

// The scale of columns whose largest magnitude this is.
template <Format kFormat>
__device__ __forceinline__ float scale_of_columns(float largest, bool power_of_two) {
  if constexpr (kFormat == kV4 || kFormat == kV41) return power_scale_of(largest);
  if constexpr (kFormat == kV41Fp4) return e4m3_scale_of(largest);
  return scale_of(largest, power_of_two);
}

template <Format kFormat, typename Elements>
__device__ __forceinline__ void store_scaled(char* row, int octet, const Elements& elements, float scale,
                                             float inverse) {
  if constexpr (kFormat == kV41Fp4)
    store_e2m1(row, octet, elements, scale);
  else
    store_quantized(row, octet, elements, inverse);
}

// Whole warps must call it, because of the shuffles.
template <Format kFormat, typename Element, typename Columns>
__device__ __forceinline__ void store_latent(const AppendFp8CacheParams& p, const Fp8Target* targets,
                                             const Octet<Element> (&octets)[kAtOnce], int octet,
                                             const Columns& columns) {
  const bool is_scaled_here = kFormat > kNumbers || (kFormat == kNumbers && p.scales.data != nullptr);
  float scale = 1.0f, inverse = is_scaled_here ? 1.0f : inverse_of_tensor(p);
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const Fp8Target& target = targets[kAbreast * k];
    if (is_scaled_here) {
      scale = scale_of_columns<kFormat>(largest_of_lanes(largest_of(octets[k]), kScaleOctets<kFormat>),
                                        p.power_of_two);
      inverse = 1.0f / scale;
      if (target.exists() && octet % kScaleOctets<kFormat> == 0 &&
          (!kRopeIsScaled<kFormat> || octet < kFp8Octets<kFormat>))
        store_scale<kFormat>(p.scales.data + target.scales, octet / kScaleOctets<kFormat>, scale);
    }
    if (target.exists() && octet < columns.latent)
      store_scaled<kFormat>(p.to.latent_cache.data + target.latent, columns.first + octet, octets[k], scale, inverse);
  }
}

// RoPE columns that are scaled like the columns before them. Whole warps must call it.
template <Format kFormat, typename Elements>
__device__ __forceinline__ void store_scaled_rope(const AppendFp8CacheParams& p, const Fp8Target& target, int octet,
                                                  const Elements& elements) {
  constexpr int kOctets = kScaleOctets<kFormat>;
  const float scale = scale_of_columns<kFormat>(largest_of_lanes(largest_of(elements), kOctets), true);
  if (!target.exists()) return;
  if (octet % kOctets == 0)
    store_scale<kFormat>(p.scales.data + target.scales, (kFp8Octets<kFormat> + octet) / kOctets, scale);
  store_scaled<kFormat>(p.to.rope_cache.data + target.rope, octet, elements, scale, 1.0f / scale);
}

template <typename T, Format kFormat, typename Elements>
__device__ __forceinline__ void store_rope(const AppendFp8CacheParams& p, const Fp8Target& target, int octet,
                                           const Elements& elements, float inverse) {
  if constexpr (kRopeIsScaled<kFormat>) return store_scaled_rope<kFormat>(p, target, octet, elements);
  if (!target.exists()) return;
  char* const row = p.to.rope_cache.data + target.rope;
  if (p.rope_is_e4m3)
    store_quantized(row, octet, elements, inverse);
  else
    store(row, octet, elements.template packed<T>());
}

template <typename T, typename Element, Format kFormat, typename Columns>
__device__ __forceinline__ void append_fp8_rows(const AppendFp8CacheParams& p, const Columns& columns) {
  constexpr bool kVaries = kFormat == kOneFactor;  // the number of columns
  __shared__ Fp8Target targets[kTileRows];
  __shared__ alignas(16) char table_rows[kTileRows * kTableRowBytes];
  const i64 tile = static_cast<i64>(blockIdx.x) * kTileRows;
  const int lane = threadIdx.x % 32;
  const bool looks_up = threadIdx.x >= kLatentThreads;
  Held<Element> held = {};
  if (looks_up) {
    if (kFormat != kNoRope && p.to.cos_sin == nullptr && (!kVaries || copied_share().octet < columns.rope))
      load_copied(p.to, p.to.rope_rows, tile, held.copied);
    const Given given = load_given(p.to, tile);
    if (lane < kTileRows) targets[lane] = find_fp8_target(p, tile + lane, given, blockIdx.y);
  } else {
    load_rows(p.to, tile, held, table_rows, columns);
  }
  __syncthreads();

  const auto [first, octet] = copied_share();
  if (!looks_up) store_latent<kFormat>(p, targets + first, held.copied, octet, columns);
  if constexpr (kFormat == kNoRope) return;
  if (kVaries && columns.rope == 0) return;
  const bool rotates = p.to.cos_sin != nullptr;
  if (rotates ? threadIdx.x >= kRopeThreads : !looks_up) return;
  const float inverse = p.rope_is_e4m3 ? inverse_of_tensor(p) : 1.0f;
  if (rotates) {
    const auto [row, rope_octet] = rotated_share(columns);
    const Octet<Fp32> rotated = rotate_rope<T>(p.to, held.rotated, table_rows, columns);
    if (stores_rotated(columns)) store_rope<T, kFormat>(p, targets[row], rope_octet, rotated, inverse);
    return;
  }
  if (kVaries && octet >= columns.rope) return;
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k)
    store_rope<T, kFormat>(p, targets[first + kAbreast * k], octet, held.copied[k], inverse);
}

template <typename T, typename Element, Format kFormat = kNumbers>
__device__ __forceinline__ void append_fp8_cache(const AppendFp8CacheParams& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  if (blockIdx.x < p.to.row_tiles)
    append_fp8_rows<T, Element, kFormat>(p, FixedColumns<kFp8Octets<kFormat>>());
  else
    rotate_queries_by_pairs<T>(p.to);
}

struct AppendWidthFp8Params : AppendFp8CacheParams {
  Octets octets;
};

template <typename T, typename Element>
__device__ __forceinline__ void append_fp8_cache(const AppendWidthFp8Params& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  if (blockIdx.x < p.to.row_tiles)
    append_fp8_rows<T, Element, kOneFactor>(p, columns_of_slice(p.octets));
  else
    rotate_queries<T>(p.to, p.octets);
}

}  // namespace cumla::mla
