// SPDX-License-Identifier: Apache-2.0
// The online softmax that all kernels share: base 2, relative to a maximum that moves rarely.
#pragma once
#include "ptx/types.cuh"

namespace cumla::attend {

constexpr float kMaximumSlack = 8.0f;  // a maximum stays until a score is above it by more, base 2
constexpr float kLowest = -3e38f;      // stands for no score yet: below every score, and finite
// Of scores: an infinite factor makes NaN of a score of 0, and 0 makes NaN of one that is masked.
constexpr float kMinFactor = 1.2e-38f, kMaxFactor = 3e38f;

}  // namespace cumla::attend
