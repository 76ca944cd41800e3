// SPDX-License-Identifier: Apache-2.0
// Lists of cache rows as the caller gives them, one for each query token.
//
// An entry is the number of a slot, page * page_size + row, or with a block table a position in the pages of the list's
// request. Any other number is an entry that is absent.
#pragma once
#include "split/division.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace split;

struct Lists {
  const int* indices;
  i64 indices_stride_batch, indices_stride_token;  // elements
  const int* block_table;  // null: entries are slots
  i64 block_table_stride;  // elements
  const int* requests;     // of the lists; null: their batch index
  i64 requests_stride_batch, requests_stride_token;  // elements
  int num_requests, max_pages, num_pages;
  int page_step, row_step;  // from a page and from a row to the next one, in the unit in which rows are numbered
  int page_size;
  Divisor by_page_size;
};

struct List {
  const int* entries;
  const int* pages;  // of its request
  bool exists;       // or else no entry does

  __device__ __forceinline__ List(const Lists& p, int batch, int token)
      : entries(p.indices + batch * p.indices_stride_batch + token * p.indices_stride_token),
        pages(p.block_table),
        exists(true) {
    if (pages == nullptr) return;
    int request = batch;
    if (p.requests != nullptr) request = p.requests[batch * p.requests_stride_batch + token * p.requests_stride_token];
    exists = static_cast<u32>(request) < p.num_requests;
    if (exists) pages += request * p.block_table_stride;
  }

  // The number of the row that an entry names; -1 if there is none.
  __device__ __forceinline__ int row_of(const Lists& p, int entry) const {
    if (entry < 0) return -1;
    int page = quotient(entry, p.by_page_size);
    const int row = entry - page * p.page_size;
    if (pages != nullptr) {
      if (page >= p.max_pages) return -1;
      page = pages[page];
    }
    return static_cast<u32>(page) < p.num_pages ? page * p.page_step + row * p.row_step : -1;
  }
};

}  // namespace cumla::sparse
