// SPDX-License-Identifier: Apache-2.0
// Lists of blocks that were e4m3 (blocks/widen_blocks.cu): keys and values have scales.
#pragma once
#include "mha/attention/lists.cuh"

namespace cumla::mha {

struct WidenedParams : ListedParams {
  const int* has_tiles;  // [1]: 0 if no row tile has keys to be attended to here
};

template <>
constexpr bool kHasLists<WidenedParams> = true;

template <typename Params>
constexpr bool kHasScales = false;
template <>
constexpr bool kHasScales<WidenedParams> = true;

}  // namespace cumla::mha
