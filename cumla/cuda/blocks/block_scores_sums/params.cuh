// SPDX-License-Identifier: Apache-2.0
// What block_scores_sums and block_scores_prompts are given.
#pragma once
#include "blocks/rows.cuh"
#include "split/division.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace split;

// Strides are in bytes, those of the table, of weights and of out in elements.
struct BlockScoresSumsParams {
  const BlockRow* rows;  // [total_tokens]
  const char* q;
  i64 q_stride_batch, q_stride_token, q_stride_head;
  const char* keys;  // [num_pages, page_rows, columns]
  i64 keys_stride_page, keys_stride_row;
  const int* block_table;
  i64 block_table_stride;
  const float* weights;  // [total_tokens, groups, group_heads]; null: ones
  i64 weights_stride_token, weights_stride_head;
  const char* entries;  // [total_tokens, groups or 1, width]; null: all blocks
  i64 entries_stride_token, entries_stride_group, entries_stride_entry;
  float* out;  // [total_tokens, groups, width]
  i64 out_stride_token, out_stride_group;
  int total_tokens;
  int tile_tokens;  // of a CTA
  int tile_groups;
  int groups;
  int group_heads;
  int group_shift;  // a group has 1 << group_shift query rows in a CTA, some of which have no head
  int width;        // blocks of a request, or entries of a list
  int items;
  int item_blocks;  // of an item
  int warp_items;   // of a warp; of block_scores_prompts of a CTA
  int batch;        // rows of the block table
  int max_pages;    // columns
  int num_pages;
  int page_rows;   // keys of a page
  int block_rows;  // keys of a block
  int page_size;   // tokens of a page
  int q_len;       // tokens of a request, where q has an axis of requests, else 0
  int is_relu;     // negative products count as zero
  int entries_are_wide;  // 64 bits
  Divisor by_tile_groups, by_page_rows, by_block_rows, by_row_tokens, by_q_len;
};

}  // namespace cumla::blocks
