// SPDX-License-Identifier: Apache-2.0
// Fills an array with 16-bit numbers of a normal distribution; a number depends on the seed and its place alone.
#include "ptx/convert.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla {

using namespace ptx;

struct FillNormalParams {
  u32* destination;  // two numbers a word
  i64 count;         // of words
  u64 seed;
  float deviation;
};

// The output function of SplitMix64 (Steele, Lea, Flood 2014): consecutive arguments give independent bits.
__device__ __forceinline__ u64 mix(u64 z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Box-Muller: two uniform numbers give two independent normal ones.
template <typename T>
__device__ __forceinline__ void fill_normal(const FillNormalParams& p) {
  grid_dependency_wait();
  const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count; i += threads) {
    const u64 bits = mix((p.seed << 40) + static_cast<u64>(i) * 0x9e3779b97f4a7c15ull);
    const float first = (static_cast<float>(static_cast<u32>(bits >> 40)) + 0.5f) * 0x1p-24f;  // in (0, 1)
    const float second = static_cast<float>(static_cast<u32>(bits) >> 8) * 0x1p-24f;
    const float radius = p.deviation * sqrtf(-2.0f * logf(first));
    float sine, cosine;
    sincospif(2.0f * second, &sine, &cosine);
    p.destination[i] = pack_pair<T>(radius * cosine, radius * sine);
  }
}

}  // namespace cumla
