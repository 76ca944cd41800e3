// SPDX-License-Identifier: Apache-2.0
// What a warp of block_attention_few knows of its list.
#pragma once
#include "blocks/block_attention_few/layout.cuh"
#include "blocks/lists.cuh"
#include "split/division.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

// Of the whole list; lane i has the block of entry i.
struct ShortList {
  static constexpr int kNone = 0x7fffffff;

  int tokens;  // of all blocks
  int place;   // of the lane's block in ascending order, or kNone
  int page;    // virtual
  float of_keys = 1.0f, of_values = 1.0f;

  template <typename Attender>
  __device__ __forceinline__ ShortList(const BlockAttentionFewParams& p, int token, int head, Attender& attender) {
    const int lane = threadIdx.x % 32;
    List list;
    const FirstEntry first(p, list, token, head);
    const int count = count_of(p, token, head);
    attender.load_query(token, head);
    list.find(p, first.row);
    i64 entry = first.value(p);
    if (lane >= min(count, p.topk)) entry = -1;
    const Listed own = list.named(p, entry);
    if constexpr (Attender::kIsE4m3) {
      of_keys = p.key_scale.of(list.request, head);
      of_values = p.value_scale.of(list.request, head);
    }
    int block = own.block < 0 ? kNone : own.block;
    const u32 same = __match_any_sync(0xffffffffu, block);
    if (same & (1u << lane) - 1) block = kNone;  // an entry before names it
    int lower = 0;
#pragma unroll 1
    for (int at = 0; at < p.topk; at += 8)
#pragma unroll
      for (int i = 0; i < 8; ++i) lower += __shfl_sync(0xffffffffu, block, at + i) < block;
    place = block == kNone ? kNone : lower;
    page = list.virtual_page(p, own);
    const int found = __popc(__ballot_sync(0xffffffffu, block != kNone));
    const bool has_last = __any_sync(0xffffffffu, block == list.blocks - 1);
    const int missing = has_last ? p.block_size - (list.seen - (list.blocks - 1) * p.block_size) : 0;
    tokens = found * p.block_size - missing;
  }
};

}  // namespace cumla::blocks
