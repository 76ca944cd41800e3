// SPDX-License-Identifier: Apache-2.0
// Rows of any length, read once: a sample of the row gives a limit that somewhat more than k keys reach. Keys within
// it are marked in a bitmap in shared memory, and only these are loaded again, into the list.
#pragma once
#include "sparse/top_k/narrow.cuh"
#include "sparse/top_k/rows.cuh"

namespace cumla::sparse {

// The inverse of key_of: the bits of a number with this key.
__device__ __forceinline__ u32 bits_of_key(u32 key) {
  return key ^ (0x7fffffffu & ~static_cast<u32>(static_cast<int>(key) >> 31));
}

// Lanes of an octet have eight nibbles each. Lane i gets nibble i of all lanes, that of the first lane lowest.
__device__ __forceinline__ u32 transpose_nibbles(u32 word) {
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    const u32 low = step == 4 ? 0x0000ffffu : step == 2 ? 0x00ff00ffu : 0x0f0f0f0fu;
    const u32 other = __shfl_xor_sync(kAllLanes, word, step);
    word = threadIdx.x & step ? (word & ~low) | (other >> 4 * step & low) : (word & low) | (other & low) << 4 * step;
  }
  return word;
}

// `kWords` x 4 words of the bitmap belong to a thread, one word to eight groups: Streamed if the limit is of no use.
template <typename Element, int kThreads, int kWords>
struct Sampled : Streamed<Element, kThreads, 2> {
  using Base = Streamed<Element, kThreads, 2>;
  using Base::slice;
  static constexpr bool kIsSampled = true, kIsHeld = false;
  static constexpr int kSample = 4;   // groups of four keys of a thread, at most
  static constexpr int kAhead = 8;    // groups that a warp loads at once: a word of the bitmap for each thread
  static constexpr int kMargin = 5;   // deviations of the sample's count
  u32* const bitmap;                  // of the warp
  const int rounds;                   // of eight groups
  const int lane = threadIdx.x % 32;

  __device__ __forceinline__ Sampled(const char* scores, int length, int rank, int cluster, unsigned char* memory)
      : Base(scores, length, rank, cluster, memory, kAhead),
        bitmap(reinterpret_cast<u32*>(memory) + threadIdx.x / 32 * (kWords * 4 * 32)),
        rounds(slice.groups / kAhead) {}

  // A limit for keys: about `wanted` keys, and a margin, are before it. All blocks of a cluster find the same one.
  // Calls meanwhile() while the sample is loaded.
  template <int kCapacity, typename Meanwhile>
  __device__ __forceinline__ u32 limit_of(TopKShared& head, u32 wanted, Meanwhile meanwhile) const {
    if (slice.length <= kCapacity) {
      meanwhile();
      return kNoKey;
    }
    constexpr int kThreadsLog2 = kThreads == 1024 ? 10 : 9;
    static_assert(1 << kThreadsLog2 == kThreads, "samples are counted by a power of two");
    const int most = slice.length >> (kThreadsLog2 + 7);  // one key of 32 at most
    const int log2 = most >= 4 ? 2 : most >= 2 ? 1 : 0;
    const int begin = slice.first & 3;  // the first score of a whole group
    const u32 whole = static_cast<u32>(slice.length - begin) / 4;
    uint4 quads[kSample];
#pragma unroll
    for (int i = 0; i < kSample; ++i) {
      if (i < 1 << log2) {
        // One group at random out of each of as many equal ranges
        const u32 index = i * kThreads + threadIdx.x, random = index * 0x9e3779b1u >> 16;
        const u64 place = static_cast<u64>(index << 16 | random) * whole >> (16 + kThreadsLog2 + log2);
        quads[i] = load_quad<Element>(slice.at(begin + static_cast<int>(place) * 4));
      }
    }
    meanwhile();
    const float keys_per_sample = static_cast<float>(slice.length) / static_cast<float>(4 * kThreads << log2);
    const float target = min(wanted + kMargin * sqrtf(wanted * keys_per_sample), 0.5f * (wanted + kCapacity));
    const u32 need = static_cast<u32>(target / keys_per_sample) + 1;
    const Octaves octaves;
    Range range = {0, kNoKey - 1};
    u32 rest = need;
    __syncthreads();  // the counters are zero
#pragma unroll 1
    for (int pass = 0;; ++pass) {
      const u32 counters = counters_of(head, pass);
#pragma unroll
      for (int i = 0; i < kSample; ++i) {
        if (i < 1 << log2) {
          u32 keys[4];
          keys_of<Element>(quads[i], keys);
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (range.has(keys[j]))
              count_shared(counters + 4 * (pass == 0 ? octaves.bin_of(keys[j]) : range.bin_of(keys[j])));
        }
      }
      const Found found = find_alone<kThreads>(head, head.histogram[pass], rest);
      rest -= found.before;
      range = pass == 0 ? octaves.of_bin(found.bin) : range.of_bin(found.bin);
      if (found.count * 8 <= need || pass + 1 == kPasses) break;
    }
    return range.first + range.width + 1;
  }

  // Loads groups from a position on: a nibble for each, whose bits tell which scores are not less than a number.
  template <int kGroups>
  __device__ __forceinline__ u32 marks_of(int at, float least) const {
    const int begin = at - static_cast<int>(threadIdx.x) % 32 * 4;
    const char* const address = slice.at(at);
    u32 marks = 0;
    uint4 quads[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
      if (slice.is_whole(at + i * 128)) quads[i] = load_quad<Element>(address + i * 128 * kElementBytes<Element>);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      float scores[4];
      numbers_of(quads[i], scores);
      u32 of_group = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) of_group |= scores[j] < least ? 0 : 1u << (4 * i + j);
      if (slice.is_whole(at + i * 128)) marks |= of_group;
    }
    if (begin < 0 || begin + kGroups * 128 > slice.length) {
#pragma unroll 1
      for (int i = 0; i < kGroups; ++i) {
        const int first = at + i * 128;
        if (first <= -4 || first >= slice.length || slice.is_whole(first)) continue;
        u32 keys[4];
        slice.load_ends(first, keys);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bool is_less = __uint_as_float(bits_of_key(keys[j])) < least;
          marks |= is_less || keys[j] == kNoKey ? 0 : 1u << (4 * i + j);
        }
      }
    }
    return marks;
  }

  // Marks the keys before a limit, or of the value before it, in the bitmap.
  __device__ __forceinline__ void mark(u32 limit) const {
    const float least = least_of(limit);
    u32* const words = bitmap + lane % 8 * 4 + lane / 8;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round)
      words[round * 32] = transpose_nibbles(marks_of<kAhead>(slice.position(round * kAhead), least));
    __syncwarp();
  }

  // The number of marks of this thread, which are those of neighbouring words.
  __device__ __forceinline__ u32 count_marks() const {
    u32 count = 0;
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) count += __popc(bitmap[lane * rounds + i]);
    return count;
  }

  // Puts the positions of this thread's marks into a list.
  __device__ __forceinline__ void list_marks(u64* list) const {
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) {
      const int word = lane * rounds + i;
#pragma unroll 1
      for (u32 bits = bitmap[word]; bits != 0; bits &= bits - 1)
        *list++ = warp_first() + word * 32 + __ffs(static_cast<int>(bits)) - 1;
    }
  }

  // Lists all keys that reach the sample's limit, in the order of positions; the number of them in all blocks. Without
  // a list if they do not fit it, or are fewer than `wanted`. Clears the counters.
  template <int kCapacity, typename Sync>
  __device__ __forceinline__ u32 list_by_sample(TopKShared& head, u64* list, u32 wanted, int rank, int cluster,
                                                Sync sync) const {
    mark(limit_of<kCapacity>(head, wanted, [] {}));
    const u32 own = count_marks(), inclusive = split::warp_inclusive_sum(own);
    const u32 of_warp = __shfl_sync(kAllLanes, inclusive, 31);
    const u32 before = before_warp<kThreads, false>(head, {of_warp, 0}, {0, 0}).chosen + inclusive - own;
    const u32 count = __reduce_add_sync(kAllLanes, lane < kThreads / 32 ? head.sums[0][lane] : 0);
    clear_counters<kThreads>(head);
    if (threadIdx.x == 0) head.sums[1][0] = count;
    sync();
    const auto count_in = [&](int block) {
      return load_cluster_u32(shared_address_in(shared_address(&head.sums[1][0]), block));
    };
    const u32 one = lane < cluster ? count_in(lane) : 0;
    const u32 listed = __reduce_add_sync(kAllLanes, one), first = __reduce_add_sync(kAllLanes, lane < rank ? one : 0);
    if (listed < wanted || listed > kCapacity) return listed;
    list_marks(list + before);
    __syncthreads();
    const Window<true> whole_list{list, 0, kCapacity};
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int position = static_cast<int>(list[i]);
      whole_list.put(first + i, entry_of(load_key<Element>(slice.at(position)), position));
    }
    sync();
    return listed;
  }

 protected:
  // The number that keys before a limit, or of the value before it, are not less than. NaN: no number is less.
  __device__ __forceinline__ static float least_of(u32 limit) { return __uint_as_float(bits_of_key(limit - 1)); }
  __device__ __forceinline__ int warp_first() const { return slice.first - lane * 4; }
  __device__ __forceinline__ static void numbers_of(const uint4& quad, float (&numbers)[4]) {
    if constexpr (kElementBytes<Element> == 4) {
      numbers[0] = __uint_as_float(quad.x), numbers[1] = __uint_as_float(quad.y);
      numbers[2] = __uint_as_float(quad.z), numbers[3] = __uint_as_float(quad.w);
    } else {
      const float2 low = unpack_pair<Element>(quad.x), high = unpack_pair<Element>(quad.y);
      numbers[0] = low.x, numbers[1] = low.y, numbers[2] = high.x, numbers[3] = high.y;
    }
  }
};

}  // namespace cumla::sparse
