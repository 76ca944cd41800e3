// SPDX-License-Identifier: Apache-2.0
// Joins rows over the eight lanes of a column (attend/reduce.cuh) and leaves each lane a share of them, with a third of
// the exchanges of the functions there.
#pragma once
#include "ptx/types.cuh"

namespace cumla::attend {

// The rows that a lane gets: `first` to `first` + kCount - 1.
template <int kCount>
struct SharedRows {
  float values[kCount];
  int first;
};

// Rows are 16, 8 or 4. Of 4, lanes four apart get the same. kStep: the bit of a lane that divides the rows.
template <int kRows, typename Join, int kStep = 16>
__device__ __forceinline__ auto share_over_column(const float (&values)[kRows], Join join, int first = 0) {
  constexpr int kKept = kRows > 1 ? kRows / 2 : 1;
  const bool upper = kRows > 1 && threadIdx.x & kStep;  // the lane without this bit keeps the first half
  float kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const float own = upper ? values[i + kRows - kKept] : values[i];
    const float other = upper ? values[i] : values[i + kRows - kKept];
    kept[i] = join(own, __shfl_xor_sync(0xffffffffu, other, kStep));
  }
  first += upper ? kRows / 2 : 0;
  if constexpr (kStep > 4) {
    return share_over_column<kKept, Join, kStep / 2>(kept, join, first);
  } else {
    SharedRows<kKept> rows;
#pragma unroll
    for (int i = 0; i < kKept; ++i) rows.values[i] = kept[i];
    rows.first = first;
    return rows;
  }
}

}  // namespace cumla::attend
