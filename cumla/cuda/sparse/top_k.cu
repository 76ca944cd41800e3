// SPDX-License-Identifier: Apache-2.0
// The k largest scores of each row: exact, deterministic, ties by the lowest position, positions ascending.
//
// grid = blocks, or clusters of up to eight blocks, one per row; 512 or 1,024 threads.
//
// Time line, all threads:
//   1. count the keys by their upper 11 bits; find the bin of the k-th key
//   2. while the keys up to that bin do not fit the list: count those of the bin by their next bits, over all keys
//   3. put the keys up to the bin into the list, in the order of their positions
//   4. the cluster's first block makes the remaining passes over the list, and writes the chosen entries
// Step 2 is rare, because a bin of the first pass is a quarter of an octave. More: docs/kernels/top_k.md.
//
// Sampled keys begin with a sample of the row, which gives a limit. In a cluster the keys before it are marked and
// listed, and then step 4 follows. If they are too few, or too many for the list, steps 1 to 4 are made instead.
// A block that has a row alone lists these keys as they come, and counts them. The keys of the bin with the k-th key
// are compared with one another. If they are many, passes over the list narrow the range with the k-th key until all of
// it is chosen; if the list is of no use, passes over the row do. The chosen keys are marked in a bitmap, whose sums
// tell where to write them.
//
// Held keys are counted in finer bins, once. A bin of few keys is listed alone, and each of them compared with the
// others; a bin of many is searched as above. The chosen keys are put into the list, and written.
//
// barrier                                 who arrives               who waits  guards
// __syncthreads                           all threads of a block    the same   counters, sums of bins and of warps,
//                                                                              `found`, the list
// cluster_sync, after counting and after  all threads of a cluster  the same   counters and marks of other blocks; the
// listing                                                                      first block's list
// __syncwarp                              a warp                    the same   its marks
// There are no mbarriers.
//
// Shared memory: 25 KB of counters, the list (8 B per entry), kStored x 16 B per thread: keys, or bits of marks
// Registers:     4 kHeld per thread for keys
// Rows of at most k scores are not used, unless values or their order are wanted; only held keys are loaded then.
// Nothing outside of a row is loaded: memory there may be unwritten.
#include "sparse/top_k/finish.cuh"
#include "sparse/top_k/held.cuh"
#include "sparse/top_k/scanned.cuh"

namespace cumla::sparse {

template <typename Element, typename Keys, int kThreads, int kCapacity, bool kClustered>
__device__ __forceinline__ void select_row(const TopKParams& p, TopKShared& head, u64* list, unsigned char* stored) {
  const int cluster = kClustered ? 1 << p.cluster_log2 : 1;
  const int rank = kClustered ? static_cast<int>(blockIdx.x) & (cluster - 1) : 0;
  ScoreRow row;
  if constexpr (Keys::kIsHeld) row = Keys::row_of(p, blockIdx.x, head);
  else row = row_of(p, static_cast<int>(blockIdx.x) >> (kClustered ? p.cluster_log2 : 0));
  const typename Keys::First first(p, row);
  if (threadIdx.x == 0) head.row = row;
  if (row.length <= p.topk) {
    const Output<Element> output(p, row);
    const int thread = rank * kThreads + threadIdx.x, threads = cluster * kThreads;
    output.fill(thread, threads);
    if (!p.is_sorted || row.length == 0) {
      if (thread == 0) output.write_count();
#pragma unroll 1
      for (int slot = thread; slot < row.length; slot += threads) output.write(slot, slot);
      return;
    }
  }
  const auto sync = [] {
    if constexpr (kClustered) cluster_sync();
    else __syncthreads();
  };

  Keys keys(scores_of<Element>(p, row), row.length, rank, cluster, stored);
  if constexpr (!kClustered && Keys::kIsHeld) {
    keys.template select_alone<kCapacity>(head, list, p, first);
  } else if constexpr (!kClustered && Keys::kIsSampled) {
    keys.template select_alone<kCapacity>(head, list, p);
  } else {
    if constexpr (Keys::kIsSampled) {
      const u32 wanted = count_of(row, p.topk);
      const u32 listed = keys.template list_by_sample<kCapacity>(head, list, wanted, rank, cluster, sync);
      if (wanted <= listed && listed <= kCapacity) {
        const Threshold all = {kNoKey - 1, 0, 0, kPasses - 1}, none = {0, wanted, 0, -1};
        if (rank == 0) finish<Element, kThreads>(head, list, listed, 0, listed == wanted ? all : none, p);
        return;
      }
    }
    keys.load_and_count(counters_of(head, 0));
    const u32 wanted = count_of(row, p.topk);
    Threshold threshold = {0, wanted, 0, 0};
    Before block = {0, 0};  // in blocks of lower rank: keys before the threshold's bin, and in it
    u32 listed = 0;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass > 0) keys.count_again(counters_of(head, pass), Digit(pass, threshold.prefix));
      const Found found = kClustered && cluster > 1
                              ? find_in_cluster<kThreads>(head, pass, threshold.need, rank, cluster)
                              : find_in_block<kThreads>(head, pass, threshold.need);
      threshold.narrow(pass, found);
      block.chosen += found.lower_before;
      block.equal = found.lower_count;
      listed = wanted - threshold.need + threshold.count;
      if (threshold.is_whole() || (!Keys::kIsSampled && listed <= kCapacity)) break;
    }

    constexpr u32 kListEntries = kCapacity;
    const bool fits = !Keys::kIsSampled && listed <= kListEntries;
    const u32 limit = (threshold.prefix + 1) << shift_of(threshold.pass), before = block.chosen + block.equal;
    const Choice choice = threshold.choice();
    if (!fits) {  // only the chosen keys
      if (threshold.is_whole()) block = {before, 0};
      threshold = {kNoKey - 1, 0, 0, kPasses - 1};  // all listed keys are chosen
      listed = wanted;
    }
#pragma unroll 1
    for (u32 first_slot = 0;; first_slot += kListEntries) {
      if (!fits) keys.place_chosen(head, choice, block, Window<kClustered>{list, first_slot, kListEntries});
      else if constexpr (kClustered) keys.place(head, limit, before, Window<true>{list, 0, kListEntries});
      else keys.place(head, limit, before, Own{list});
      sync();
      const u32 left = listed - first_slot;
      if (rank == 0) finish<Element, kThreads>(head, list, min(left, kListEntries), first_slot, threshold, p);
      if (!Keys::kTakesTurns || left <= kListEntries) return;
      sync();
    }
  }
}

template <typename Element, int kThreads, int kHeld, int kStored>
struct KeysOf {
  using Type = Resident<Element, kThreads, kHeld, kStored>;
};
template <typename Element, int kThreads, int kStored>
struct KeysOf<Element, kThreads, 0, kStored> {
  using Type = Scanned<Element, kThreads, kStored>;
};
template <typename Element, int kThreads>
struct KeysOf<Element, kThreads, 4, 0> {
  using Type = Held<Element, kThreads, 4>;
};
template <typename Element, int kThreads>
struct KeysOf<Element, kThreads, 0, 0> {
  using Type = Streamed<Element, kThreads>;
};

template <typename Element, int kThreads, int kHeld, int kStored, int kCapacity, bool kClustered>
__device__ __forceinline__ void top_k(const TopKParams& p) {
  static_assert((power_of_two_from(kCapacity) - kCapacity) * 8 <= kStored * kThreads * 16,
                "what sorting needs beyond the list is that of the keys, which nobody needs then");
  grid_dependency_launch();
  extern __shared__ __align__(16) unsigned char memory[];
  TopKShared& head = *reinterpret_cast<TopKShared*>(memory);
  u64* const list = reinterpret_cast<u64*>(memory + sizeof(TopKShared));
  unsigned char* const stored = memory + sizeof(TopKShared) + kCapacity * sizeof(u64);
  using Keys = typename KeysOf<Element, kThreads, kHeld, kStored>::Type;
  if constexpr (!Keys::kIsHeld) clear_counters<kThreads>(head);
  grid_dependency_wait();
  select_row<Element, Keys, kThreads, kCapacity, kClustered>(p, head, list, stored);
}

}  // namespace cumla::sparse
