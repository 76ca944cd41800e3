// SPDX-License-Identifier: Apache-2.0
// Lists of cache rows, as the caller gives them: one per query token.
//
// An entry is a slot, page * page_size + row. With a block table it is a position in the pages of the list's request.
// Any other number is an absent entry.
#pragma once
#include "split/division.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace split;

struct Lists {
  const int* indices;
  i64 indices_stride_batch, indices_stride_token;  // elements
  const int* block_table;  // null: entries are slots
  i64 block_table_stride;  // elements
  const int* requests;     // request of each list; null: its batch index
  i64 requests_stride_batch, requests_stride_token;  // elements
  int num_requests, max_pages, num_pages;
  int page_step, row_step;  // between pages, and between rows, in the unit of row numbers
  int page_size;
  Divisor by_page_size;

  __device__ __forceinline__ const int* entries_of(int batch, int token) const {
    return indices + batch * indices_stride_batch + token * indices_stride_token;
  }
  // The request of a list. With a block table it may not exist.
  __device__ __forceinline__ int request_of(int batch, int token) const {
    return requests == nullptr ? batch : requests[batch * requests_stride_batch + token * requests_stride_token];
  }
  __device__ __forceinline__ bool has(int request) const {
    return block_table == nullptr || static_cast<u32>(request) < num_requests;
  }
  __device__ __forceinline__ const int* pages_of(int request) const {
    return block_table == nullptr ? nullptr : block_table + request * block_table_stride;
  }
};

// An entry whose page is being loaded from the table.
struct Lookup {
  int page, row;
};

struct List {
  const int* entries;
  const int* pages;  // of the list's request
  bool exists;       // else all entries are absent

  __device__ __forceinline__ List(const Lists& p, int batch, int token)
      : entries(p.entries_of(batch, token)) {
    const int request = p.request_of(batch, token);
    exists = p.has(request);
    pages = exists ? p.pages_of(request) : nullptr;
  }

  __device__ __forceinline__ Lookup look_up(const Lists& p, int entry) const { return look_up(p, pages, entry); }
  __device__ __forceinline__ static Lookup look_up(const Lists& p, const int* pages, int entry) {
    Lookup found = {-1, 0};
    if (entry < 0) return found;
    found.page = quotient(entry, p.by_page_size);
    found.row = entry - found.page * p.page_size;
    if (pages != nullptr) found.page = found.page < p.max_pages ? pages[found.page] : -1;
    return found;
  }
  // The number of the row; -1: absent.
  __device__ __forceinline__ static int row_of(const Lists& p, const Lookup& found) {
    return static_cast<u32>(found.page) < p.num_pages ? found.page * p.page_step + found.row * p.row_step : -1;
  }
};

// Prefetches the lists of all query tokens into L2 if they are few; the CTAs share them.
template <typename Params>
__device__ __forceinline__ void prefetch_lists(const Params& p, const Lists& lists, int entries, int thread,
                                               int threads) {
  const int lines = (entries + 31) / 32, ctas = gridDim.x * gridDim.y;
  const int first = (blockIdx.y * gridDim.x + blockIdx.x) * threads + thread;
  if (first >= static_cast<i64>(p.batch) * lines || ctas * threads < static_cast<i64>(p.batch) * lines) return;
  const int list = first / lines, request = quotient(list, p.by_q_len);
  ptx::prefetch_l2(lists.indices + request * lists.indices_stride_batch +
                   (list - request * p.q_len) * lists.indices_stride_token + (first - list * lines) * 32);
}

// Walks over a lane's entries of a list, one per block of 64. Entries are loaded two blocks ahead, pages one.
struct ListWalk {
  const List list;
  const int* entry;
  int left;  // remaining entries, from the next one to be loaded
  int loaded;
  Lookup found;

  // Starts at entry `first` of `length`.
  __device__ __forceinline__ ListWalk(const Lists& p, const List& list, int first, int length)
      : list(list), entry(list.entries + first), left(list.exists ? length - first : 0) {
    const int now = load();
    loaded = load();
    found = list.look_up(p, now);
  }
  // The number of the next row; -1: absent.
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
