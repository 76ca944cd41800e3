// SPDX-License-Identifier: Apache-2.0
// Brings the pages of a KV cache into shared memory and does nothing with them: the floor of every kernel that reads
// them once. grid = SMs, one thread a CTA: it loads a page of its share, as nine boxes of 64 rows x 64 columns, into
// each of two stages, and the next page into a stage as soon as the one before has arrived there.
//
// Shared memory: two stages of 73,728 + up to 1,008 to align them + two barriers of 8 = 148,480 B
// A page of 64 rows x 576 bfloat16, as in cumla/cuda/mla/mla_decode.cu; the tensor map is the same.
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla {

using namespace ptx;

constexpr int kTiles = 9;
constexpr int kTileBytes = 64 * 128;
constexpr int kPageBytes = kTiles * kTileBytes;
constexpr int kStages = 2;
constexpr u32 kAlignment = 1024;  // that the 128-byte swizzle repeats after

struct StreamKvParams {
  TensorMap kv;  // dims (576, 64, 1, num_pages), box (64, 64, 1, 1)
  const int* pages;
  int num_pages;  // to read, in the order of `pages`
};

__device__ __forceinline__ void load_page_async(const StreamKvParams& p, u32 stage, u32 barrier, int page) {
  mbarrier_arrive_expect_tx(barrier, kPageBytes);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) tma_load_4d_async(stage + i * kTileBytes, &p.kv, barrier, i * 64, 0, 0, page);
}

__device__ __forceinline__ void stream_kv(const StreamKvParams& p) {
  extern __shared__ char memory[];
  const u32 stages = (shared_address(memory) + kAlignment - 1) / kAlignment * kAlignment;
  const u32 barriers = stages + kStages * kPageBytes;
  for (int s = 0; s < kStages; ++s) mbarrier_init(barriers + 8 * s, 1);
  fence_mbarrier_init();
  prefetch_tensor_map(&p.kv);
  grid_dependency_wait();

  const int begin = static_cast<i64>(p.num_pages) * blockIdx.x / gridDim.x;
  const int count = static_cast<i64>(p.num_pages) * (blockIdx.x + 1) / gridDim.x - begin;
  const int* pages = p.pages + begin;
  int page = count > 0 ? pages[0] : 0;
  for (int i = 0; i < count; ++i) {
    const int next_page = i + 1 < count ? pages[i + 1] : 0;  // on its way while this thread waits
    const int s = i % kStages;
    if (i >= kStages) mbarrier_wait(barriers + 8 * s, (i / kStages - 1) & 1, "a page");
    load_page_async(p, stages + s * kPageBytes, barriers + 8 * s, page);
    page = next_page;
  }
  // No CTA may end while copies into its shared memory are under way.
  for (int i = max(count - kStages, 0); i < count; ++i)
    mbarrier_wait(barriers + 8 * (i % kStages), (i / kStages) & 1, "the last pages");
}

}  // namespace cumla
