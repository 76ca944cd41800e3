// SPDX-License-Identifier: Apache-2.0
// Constants of the online softmax in base 2, which updates its row maximum rarely.
#pragma once
#include "ptx/types.cuh"

namespace cumla::attend {

constexpr float kMaximumSlack = 8.0f;  // the maximum is updated only if a score exceeds it by more (base 2)
constexpr float kLowest = -3e38f;      // initial row maximum: below every score, and finite
// Bounds of the factor of scores. 0 x inf is NaN: an infinite factor would spoil a score of 0, and a factor of 0 a
// masked score.
constexpr float kMinFactor = 1.2e-38f, kMaxFactor = 3e38f;

}  // namespace cumla::attend
