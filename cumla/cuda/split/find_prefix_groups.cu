// SPDX-License-Identifier: Apache-2.0
// Finds neighbouring requests whose block table rows begin with the same page numbers.
//
// grid = (windows of 1,024 requests), 1,024 threads. Groups do not extend over two windows.
//
// Roles and time line; B is __syncthreads:
//   thread      a request: pages that all its queries see whole | B |
//   warp        compare the rows of a request and of the one before it, 256 page numbers at a time | B |
//   thread      a request: find its run of requests that share min_pages | choose how many pages a group shares | B |
//               cut the run where fewer are shared | least number of pages in the group | store
// A group of n requests that share s pages saves (n - 1) x s pages of reading. Each request proposes the pages that it
// shares with the one before; a run takes the proposal that saves most, the longest one if several do.
//
// Barriers guard the arrays of PrefixShared: every thread arrives, once per B.
// Budget: 64 registers per thread, 17 KiB of static shared memory.
#include "split/scan.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

using namespace ptx;

struct FindPrefixGroupsParams {
  const int* block_table;  // [batch, max_pages]; its page numbers are compared, and lead nowhere
  i64 block_table_stride;  // in elements, as all strides here
  const int* kv_lens;      // [batch]
  i64 kv_lens_stride;
  const int* qo_indptr;  // [batch + 1]; null: each request has q_len query tokens
  i64 qo_indptr_stride;
  int* group;       // [batch]: the first request of the group
  int* prefix_len;  // [batch]: tokens that all requests of the group share; 0 if it has one
  int batch;
  int max_pages;
  int page_size;
  int min_pages;  // at least 1
  int q_len;
};

constexpr int kPrefixWindow = kScheduleThreads;

struct PrefixShared {
  int usable[kPrefixWindow];      // leading pages that all queries of a request see whole
  int pages[kPrefixWindow];       // leading pages that a request shares with the one before
  i64 saved[kPrefixWindow];       // pages that are not read if a run takes this number
  u32 breaks[kPrefixWindow / 32];  // a bit per request: set if it begins a run
};

// Leading pages of a request that all its queries see whole.
__device__ __forceinline__ int usable_pages(const FindPrefixGroupsParams& p, int request) {
  i64 queries = p.q_len;
  if (p.qo_indptr != nullptr)
    queries = i64{p.qo_indptr[(request + 1) * p.qo_indptr_stride]} - p.qo_indptr[request * p.qo_indptr_stride];
  const i64 tokens =
      min(i64{p.kv_lens[request * p.kv_lens_stride]}, i64{p.max_pages} * p.page_size) - max(queries, i64{0});
  return static_cast<int>(max(tokens, i64{0}) / p.page_size);
}

// Leading pages, of `most`, that a request and the one before it have in common. All lanes of a warp compute it
// together.
__device__ __forceinline__ int shared_pages(const FindPrefixGroupsParams& p, int request, int most) {
  const int lane = threadIdx.x % 32;
  if (most < p.min_pages) return 0;
  const int* const own = p.block_table + request * p.block_table_stride;
  const int* const before = own - p.block_table_stride;
  constexpr int kAtOnce = 8;
#pragma unroll 1
  for (int first = 0; first < most; first += 32 * kAtOnce) {
    bool differs[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int page = first + 32 * i + lane;
      differs[i] = page < most && own[page] != before[page];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const u32 different = __ballot_sync(0xffffffffu, differs[i]);
      if (different != 0) return first + 32 * i + __ffs(different) - 1;
    }
  }
  return most;
}

// The requests [first, end) of a window that `breaks` puts together with one of them.
struct Together {
  int first, end;

  __device__ __forceinline__ Together(const u32 (&breaks)[kPrefixWindow / 32], int request) {
    int word = request / 32;
    u32 bits = breaks[word] & (0xffffffffu >> (31 - request % 32));  // the first request of a window begins a run
    while (bits == 0 && word > 0) bits = breaks[--word];
    first = word * 32 + 31 - __clz(static_cast<int>(bits));
    word = request / 32;
    bits = breaks[word] & (0xfffffffeu << (request % 32));
    while (bits == 0 && ++word < kPrefixWindow / 32) bits = breaks[word];
    end = bits == 0 ? kPrefixWindow : word * 32 + __ffs(static_cast<int>(bits)) - 1;
  }
};

// Notes which requests of the window begin a run.
__device__ __forceinline__ void note_breaks(PrefixShared& shared, bool begins) {
  const u32 bits = __ballot_sync(0xffffffffu, begins);
  if (threadIdx.x % 32 == 0) shared.breaks[threadIdx.x / 32] = bits;
  __syncthreads();
}

__device__ __forceinline__ void find_prefix_groups(const FindPrefixGroupsParams& p) {
  __shared__ PrefixShared shared;
  const int own = threadIdx.x, warp = own / 32, window = blockIdx.x * kPrefixWindow;
  const int requests = min(p.batch - window, kPrefixWindow);
  grid_dependency_launch();
  grid_dependency_wait();

  if (own < requests) shared.usable[own] = usable_pages(p, window + own);
  shared.pages[own] = 0;
  __syncthreads();
  for (int i = warp; i < requests; i += kScheduleWarps) {
    if (i == 0) continue;
    const int pages = shared_pages(p, window + i, min(shared.usable[i], shared.usable[i - 1]));
    if (own % 32 == 0) shared.pages[i] = pages;
  }
  __syncthreads();

  const int pages = shared.pages[own];
  const bool is_alone = own >= requests || pages < p.min_pages;
  note_breaks(shared, is_alone);
  const Together run(shared.breaks, own);
  i64 saved = 0;
  if (!is_alone) {
#pragma unroll 4
    for (int i = run.first + 1; i < run.end; ++i) saved += shared.pages[i] >= pages ? pages : 0;
  }
  shared.saved[own] = saved;
  __syncthreads();
  i64 most = 0;
  int chosen = 0;
#pragma unroll 4
  for (int i = run.first + 1; i < run.end; ++i) {
    const i64 here = shared.saved[i];
    const bool is_better = here > most || (here == most && shared.pages[i] > chosen);
    most = is_better ? here : most;
    chosen = is_better ? shared.pages[i] : chosen;
  }
  note_breaks(shared, is_alone || pages < chosen);
  if (own >= requests) return;
  const Together group(shared.breaks, own);
  int least = 0x7fffffff;
#pragma unroll 4
  for (int i = group.first + 1; i < group.end; ++i) least = min(least, shared.pages[i]);
  p.group[window + own] = window + group.first;
  p.prefix_len[window + own] = group.end - group.first > 1 ? least * p.page_size : 0;
}

}  // namespace cumla::split
