// SPDX-License-Identifier: Apache-2.0
// Places of widened blocks, and what becomes of row tiles over them.
#pragma once
#include "ptx/types.cuh"

namespace cumla::blocks {

struct alignas(8) Slot {
  int request, block;  // -1: none
};

struct TileCounts {
  int has_tiles;  // 0 if all are left
  u32 left;       // tiles of kv heads whose lists are attended to by themselves
};

}  // namespace cumla::blocks
