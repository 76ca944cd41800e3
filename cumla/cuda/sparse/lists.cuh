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

// An entry on its way to the number of a row: its page is loaded where the table has it.
struct Lookup {
  int page, row;
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

  __device__ __forceinline__ Lookup look_up(const Lists& p, int entry) const {
    Lookup found = {-1, 0};
    if (entry < 0) return found;
    found.page = quotient(entry, p.by_page_size);
    found.row = entry - found.page * p.page_size;
    if (pages != nullptr) found.page = found.page < p.max_pages ? pages[found.page] : -1;
    return found;
  }
  // The number of the row; -1 if there is none.
  __device__ __forceinline__ static int row_of(const Lists& p, const Lookup& found) {
    return static_cast<u32>(found.page) < p.num_pages ? found.page * p.page_step + found.row * p.row_step : -1;
  }
};

// Walks over a lane's entries of a list, one of every block of 64, two blocks ahead with entries, one with their pages.
struct ListWalk {
  const List list;
  const int* entry;
  int left;  // entries from the one on that is loaded next
  int loaded;
  Lookup found;

  // From the entry `first` on, of `length`.
  __device__ __forceinline__ ListWalk(const Lists& p, const List& list, int first, int length)
      : list(list), entry(list.entries + first), left(list.exists ? length - first : 0) {
    const int now = load();
    loaded = load();
    found = list.look_up(p, now);
  }
  // The number of the next row; -1 if there is none.
  __device__ __forceinline__ int next(const Lists& p) {
    const int row = List::row_of(p, found);
    found = list.look_up(p, loaded);
    loaded = load();
    return row;
  }

 private:
  __device__ __forceinline__ int load() {
    const int value = left > 0 ? *entry : -1;
    entry += 64;
    left -= 64;
    return value;
  }
};

}  // namespace cumla::sparse
