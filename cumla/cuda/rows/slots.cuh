// SPDX-License-Identifier: Apache-2.0
// Rows of new tokens, paged caches, and the slot of a token in a cache.
#pragma once
#include "ptx/types.cuh"

namespace cumla::rows {

// All strides are in bytes.
struct Rows {
  char* data;
  i64 stride_token, stride_head;
};

struct Pages {
  char* data;
  i64 stride_page, stride_row, stride_head;

  __device__ __forceinline__ i64 offset(i64 page, i64 row, int head) const {
    return page * stride_page + row * stride_row + head * stride_head;
  }
};

struct Indices {
  const char* data;  // null: not given
  i64 stride;
  i64 is_wide;  // 64-bit indices, else 32

  __device__ __forceinline__ i64 operator[](i64 i) const {
    const char* const at = data + i * stride;
    return is_wide ? *reinterpret_cast<const i64*>(at) : *reinterpret_cast<const i32*>(at);
  }
};

// The position of a token, and its slot (its position again if there are no slots). Negative: not given.
struct Given {
  i64 position, slot;
};

// A row of a cache; page < 0: none.
struct Slot {
  i64 page, row;
};

// The slot of `place`: a slot number, or a position in the pages of a request if there are no slots. Params needs
// slots, page_numbers, page_numbers_stride, page_numbers_stride_request, page_list_bounds, batch, num_entries,
// num_pages and page_size.
template <typename Params>
__device__ __forceinline__ Slot slot_at(const Params& p, i64 request, i64 place) {
  const Slot nowhere = {-1, 0};
  i64 page = static_cast<u64>(place) / static_cast<u64>(p.page_size);
  const i64 row = place - page * p.page_size;
  if (p.slots.data == nullptr) {
    if (request < 0 || request >= p.batch) return nowhere;
    i64 first = 0, end = p.num_entries;
    if (p.page_list_bounds.data != nullptr) {
      first = p.page_list_bounds[request];
      end = min(p.page_list_bounds[request + 1], end);
    }
    if (first < 0 || page >= end - first) return nowhere;
    page = *reinterpret_cast<const i32*>(p.page_numbers + request * p.page_numbers_stride_request +
                                         (first + page) * p.page_numbers_stride);
  }
  if (page < 0 || page >= p.num_pages) return nowhere;
  return {page, row};
}

// The slot of a token, whose request is in Params' batch_indices.
template <typename Params>
__device__ __forceinline__ Slot find_slot(const Params& p, i64 token, i64 place) {
  return slot_at(p, p.slots.data == nullptr ? p.batch_indices[token] : -1, place);
}

}  // namespace cumla::rows
